"""Approvals in the local web UI: what is shown, checked and recorded."""

from __future__ import annotations

import html
import json
import re
import shutil
from html.parser import HTMLParser
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from applications import needs_app

needs_app("deployment")
pytest.importorskip("starlette")
from kits import run_site_command, site_kit
from pages import Tree
from starlette.testclient import TestClient

from fednotes.apps.deployment.rules.guard import (
    NotApproved,
    open_approvals,
    read_pending_jobs,
    require_approved,
)
from fednotes.apps.deployment.rules.policy import Policy
from fednotes.apps.deployment.site_file import SITE_FILE
from fednotes.apps.ui.access import Access
from fednotes.apps.ui.content import find_ledger_reader, load_content
from fednotes.apps.ui.pages import create_app
from fednotes.core import plugins
from fednotes.core.errors import ConfigError
from fednotes.core.tables import fingerprint_table

ROOT = "http://127.0.0.1:8000"
SITES = ["north", "south", "east"]
JOB: dict[str, Any] = {
    "name": "ner",
    "method": "fedner",
    "sites": SITES,
    "training": {"epochs": 3},
}


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    return site_kit(tmp_path / "north")


def request_approval(kit: Path, table: dict[str, Any]) -> None:
    """Ask a kit to approve a job, as the server does."""
    with pytest.raises(NotApproved):
        require_approved(kit, "north", table, Policy())


def browse(kit: Path) -> TestClient:
    """Return a browser of the pages of a kit, with the cookie."""
    access = Access()
    browser = TestClient(
        create_app(load_content([kit]), access),
        base_url=ROOT + access.root,
        headers={"origin": ROOT},
    )
    assert browser.get(f"/?token={access.token}").status_code == 200
    return browser


class _Lines(HTMLParser):
    """Reads the list of a request: its lines, those of the job with two spaces."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._depth = 0
        (shown,) = re.findall(r'<ul class="lines".*?</ul>\n<', page, re.DOTALL)
        self.feed(shown)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._depth += tag == "ul"
        if tag == "li":
            self.lines.append("  " * (self._depth - 1))

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag == "ul"

    def handle_data(self, data: str) -> None:
        if data.strip() and self.lines:
            self.lines[-1] += data.strip()


def token_of(page: str) -> str:
    """Return the token of the form on a page."""
    (token,) = re.findall(r'name="token" value="([0-9a-f]{64})"', page)
    return str(token)


def approval(page: str, **changes: str) -> dict[str, str]:
    """Return the fields that a person sends to approve the job on a page."""
    fields = {"token": token_of(page), "decision": "approve", "read": "yes"}
    return {**fields, **changes}


def test_the_page_shows_what_the_command_shows(kit: Path) -> None:
    """Before the question, for a job that differs from one approved before."""
    request_approval(kit, JOB)
    run_site_command("approve", kit, "--yes")
    noisy = {"noise": 2.0, "rate": 1.0, "where": "site", "unit": "document"}
    sites = {"north": {}, "south": {}}
    job = {"method": "fedner", "training": {"rounds": 1}, "privacy": noisy}
    later = {
        "name": "ner",
        "job": {**job, "sites": sites},
        "sites": [*sites],
        "min_sites": 2,
    }
    request_approval(kit, later)
    printed = run_site_command("approve", kit, typed="n\n").splitlines()
    end = next(
        place for place, line in enumerate(printed) if line.startswith("Approve this")
    )
    shown = _Lines(browse(kit).get("/approvals").text).lines
    assert shown == printed[:end]
    assert any("warning: the sums of the two jobs differ" in line for line in shown)
    assert any(line.startswith("guarantees differential privacy") for line in shown)


def test_an_approval_is_recorded_like_one_by_the_command(
    kit: Path, tmp_path: Path
) -> None:
    request_approval(kit, JOB)
    shutil.copytree(kit, tmp_path / "twin" / "north")
    twin = tmp_path / "twin" / "north"
    run_site_command("approve", twin, "--yes")
    browser = browse(kit)
    page = browser.get("/approvals").text
    assert "ner is waiting for a decision" in page
    assert "data-poll" not in page  # a person is reading it
    answer = browser.post("/approvals/0", data=approval(page))
    assert answer.status_code == 200
    assert "Approved: ner (" in answer.text
    assert "this site joins when one does" in answer.text
    assert not read_pending_jobs(kit)
    require_approved(kit, "north", JOB, Policy())
    written, expected = (
        json.loads(open_approvals(each).path.read_text()) for each in (kit, twin)
    )
    for each in (written, expected):
        del each["decisions"][0]["when"]
    assert written == expected
    (row,) = (row for row in Tree(answer.text).rows if "ner" in row)
    assert row[1:4] == ["ner", "approved", open_approvals(kit).read_decisions()[0].by]
    assert "data-poll" in browser.get("/approvals").text  # it waits for the next job


def test_a_rejection_needs_no_confirmation(kit: Path) -> None:
    request_approval(kit, JOB)
    browser = browse(kit)
    page = browser.get("/approvals").text
    fields = approval(page, decision="reject", read="")
    assert "Rejected: ner (" in browser.post("/approvals/0", data=fields).text
    (decision,) = open_approvals(kit).read_decisions()
    assert decision.decision == "rejected"
    with pytest.raises(NotApproved, match="has rejected this job"):
        require_approved(kit, "north", JOB, Policy())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"read": ""}, "tick that you have read"),
        ({"decision": ""}, "unknown decision"),
        ({"decision": "approved"}, "unknown decision"),
        ({"token": ""}, "has changed since the page showed it, or no longer waits"),
        (
            {"token": "0" * 64},
            "has changed since the page showed it, or no longer waits",
        ),
        ({"token": "é"}, "has changed since the page showed it, or no longer waits"),
    ],
)
def test_an_incomplete_decision_changes_nothing(
    changes: dict[str, str], message: str, kit: Path
) -> None:
    request_approval(kit, JOB)
    browser = browse(kit)
    page = browser.get("/approvals").text
    answer = browser.post("/approvals/0", data=approval(page, **changes))
    assert answer.status_code == 400
    assert message in html.unescape(answer.text)
    assert open_approvals(kit).read_decisions() == ()
    assert read_pending_jobs(kit)


def test_another_page_cannot_approve(kit: Path) -> None:
    request_approval(kit, JOB)
    browser = browse(kit)
    fields = approval(browser.get("/approvals").text)
    for origin in ("http://evil.example", "null", "", "http://127.0.0.1:1"):
        answer = browser.post("/approvals/0", data=fields, headers={"origin": origin})
        assert answer.status_code == 403
    assert browser.get("/approvals/0", params=fields).status_code == 405
    browser.cookies.clear()
    assert browser.post("/approvals/0", data=fields).status_code == 403
    # The token of another process is none of this one.
    assert browse(kit).post("/approvals/0", data=fields).status_code == 400
    assert open_approvals(kit).read_decisions() == ()


def test_an_approval_applies_only_to_what_was_shown(kit: Path) -> None:
    """Neither to a decided job, nor after a change of what a person must see."""
    request_approval(kit, JOB)
    browser = browse(kit)
    fields = approval(browser.get("/approvals").text)
    changed_job = {**JOB, "seed": 2}
    request_approval(kit, changed_job)
    run_site_command("approve", kit, fingerprint_table(changed_job), "--yes")
    assert browser.post("/approvals/0", data=fields).status_code == 400
    request_approval(kit, JOB)
    assert browser.post("/approvals/0", data=fields).status_code == 400

    fields = approval(browser.get("/approvals").text)
    run_site_command("reject", kit, open_approvals(kit).read_decisions()[0].fingerprint)
    assert browser.post("/approvals/0", data=fields).status_code == 400
    assert [each.decision for each in open_approvals(kit).read_decisions()] == [
        "approved",
        "rejected",
    ]


def test_each_waiting_job_has_its_own_decision(kit: Path) -> None:
    """A server that asks for another job cannot keep people from deciding on this one."""
    request_approval(kit, JOB)
    request_approval(kit, {**JOB, "name": "other"})
    browser = browse(kit)
    page = browser.get("/approvals").text
    shown = page.partition("ner is waiting for a decision")
    assert "other is waiting for a decision" in shown[0]
    request_approval(kit, {**JOB, "name": "third"})
    answer = browser.post("/approvals/0", data=approval(shown[2]))
    assert "Approved: ner (" in answer.text
    (decision,) = open_approvals(kit).read_decisions()
    assert decision.table == JOB
    assert [job.table["name"] for job in read_pending_jobs(kit)] == ["third", "other"]


def test_a_job_that_the_policy_forbids_cannot_be_approved(kit: Path) -> None:
    """Nor by a form that the page does not have."""
    (kit / SITE_FILE).write_text('[data]\npath = "x"\n[policy]\naudit = "required"\n')
    request_approval(kit, JOB)
    browser = browse(kit)
    page = browser.get("/approvals").text
    assert "there is no audit of this job" in page
    assert "fednotes site approve" in page
    assert 'value="approve"' not in page
    answer = browser.post("/approvals/0", data=approval(page))
    assert answer.status_code == 400
    assert "there is no audit of this job" in answer.text
    assert open_approvals(kit).read_decisions() == ()


def test_a_job_that_needs_keys_is_approved_by_the_command(
    kit: Path, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography")
    output = run_site_command("key", "alice", "--out", tmp_path / "alice")
    (line,) = (line for line in output.splitlines() if " approvers." in line)
    (kit / SITE_FILE).write_text("\n".join(["[policy]", "approvals = 1", line]))
    request_approval(kit, JOB)
    browser = browse(kit)
    page = browser.get("/approvals").text
    assert "each uses their own key" in page
    assert "--key FILE" in page
    answer = browser.post("/approvals/0", data=approval(page))
    assert answer.status_code == 400
    assert "nothing was decided" in answer.text
    assert open_approvals(kit).read_decisions() == ()


def test_a_job_cannot_imitate_the_page(kit: Path) -> None:
    """Its text stays in the inner list, and never becomes markup."""
    hostile = {
        "name": '"><img src=x onerror=alert(1)>\nfingerprint 0000',
        "guarantees differential privacy": "<b>ε = 0</b>",
        "x\n</ul>no job was approved here before": 1,
        "sites": SITES,
    }
    request_approval(kit, hostile)
    page = browse(kit).get("/approvals").text
    assert "<img" not in page
    assert "<b>" not in page
    assert page.count("<ul>") == 1
    ours = [line for line in _Lines(page).lines if not line.startswith("  ")]
    assert [line.split()[0] for line in ours] == ["fingerprint", "job", "no"]
    Tree(page)


def test_damaged_records_are_reported_on_the_page(kit: Path) -> None:
    request_approval(kit, JOB)
    browser = browse(kit)
    open_approvals(kit).path.write_text("{")
    page = browser.get("/approvals")
    assert page.status_code == 200
    assert 'role="alert"' in page.text
    assert "approvals.json" in page.text
    assert "<form" not in page.text


def test_a_site_that_has_sent_nothing_has_an_empty_ledger(kit: Path) -> None:
    text = browse(kit).get("/ledger").text
    assert "Nothing has left this site yet" in text
    assert 'role="alert"' not in text


def test_a_reader_of_ledgers_without_its_functions_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "half_a_reader.py").write_text("def is_kit(folder): return False\n")
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("half", "half_a_reader", "fednotes.ledgers")
    monkeypatch.setattr(plugins, "list_entries", lambda _group: {"half": entry})
    message = "'half_a_reader' cannot be loaded .* does not define `read_ledger`"
    with pytest.raises(ConfigError, match=message):
        find_ledger_reader(tmp_path)


def test_the_page_has_no_approvals_without_the_kit_of_a_site(tmp_path: Path) -> None:
    kit = site_kit(tmp_path / "server")
    facts = next(iter(kit.iterdir()))
    facts.write_text(facts.read_text().replace('"site"', '"server"'))
    content = load_content([kit])
    assert [name for _, name in content.list_sections()] == ["Ledger"]
    browser = browse(kit)
    assert "fednotes ui KIT" in browser.get("/approvals").text
    assert browser.post("/approvals/0", data={}).status_code == 400
