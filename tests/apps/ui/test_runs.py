"""Runs on the local pages: reports, comparisons, errors in test notes, and ledgers."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from applications import needs_app
from pages import Tree
from tiny_jobs import TABLE

from fednotes.apps.ui.access import Access
from fednotes.apps.ui.content import Content, load_content
from fednotes.apps.ui.pages import create_app
from fednotes.core.errors import ConfigError
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.results import SUMMARY, read_result
from fednotes.jobs.simulate import simulate

pytest.importorskip("starlette")
from starlette.testclient import TestClient

ROOT = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, a copy of it, and one that has not finished.

    Tests only read them.
    """
    folder = tmp_path_factory.mktemp("runs")
    table = {**TABLE, "title": "Two sites", "conditions": ["alone", "federated"]}
    table["synthetic"] = {"sites": 2, "sentences": 20}
    simulate(parse_job(table, "tiny", folder, "test"), folder / "one")
    for name in ("two", "live"):
        shutil.copytree(folder / "one", folder / name)
    (folder / "live" / SUMMARY).unlink()
    return folder


def browse(content: Content) -> TestClient:
    """Return a browser of the pages, with the cookie."""
    access = Access()
    browser = TestClient(
        create_app(content, access),
        base_url=ROOT + access.root,
        headers={"origin": ROOT},
    )
    assert browser.get(f"/?token={access.token}").status_code == 200
    return browser


def wait_for_page(browser: TestClient, path: str) -> str:
    """Return a page once the work that it waits for is done."""
    for _ in range(200):
        text = browser.get(path).text
        if "data-poll" not in text:
            return text
        time.sleep(0.05)
    raise AssertionError(f"{path} is still waiting")


def test_a_run_is_shown_as_in_its_report(runs: Path) -> None:
    text = browse(load_content([runs / "one"])).get("/runs").text
    report = (runs / "one" / "summary.json").read_text("utf-8")
    f1 = json.loads(report)["mean"]["federated"]["strict"]["f1"]
    assert "<h1>Two sites</h1>" in text
    assert f"<dd>{f1:.3f}<small>mean strict F1" in text
    assert "Did the federation pay?" in text
    assert 'aria-labelledby="mean-f1-t' in text  # a curve
    assert "data-poll" not in text
    Tree(text)


def test_the_page_of_an_unfinished_run_refreshes_itself(runs: Path) -> None:
    """Its curves show the complete lines of metrics.jsonl; half a line is ignored."""
    with (runs / "live" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 99, "los')
    newest = json.loads(
        (runs / "one" / "metrics.jsonl").read_text("utf-8").splitlines()[-1]
    )
    text = browse(load_content([runs / "live"])).get("/runs").text
    assert 'data-poll="5"' in text
    assert (
        f"has not finished. Its latest evaluation is of round {newest['round']}."
        in text
    )
    assert "<h1>Two sites</h1>" in text
    assert 'aria-labelledby="mean-f1-t' in text
    listed = browse(load_content([runs / "one", runs / "live"])).get("/runs").text
    assert [row[0] for row in Tree(listed).rows[1:]] == ["one", "live"]
    assert "in progress" in listed


def test_two_runs_are_compared_and_their_difference_is_tested(runs: Path) -> None:
    """A run and its copy do not differ at any site."""
    browser = browse(load_content([runs / "one", runs / "two"]))
    result = read_result(runs / "one")
    rows = Tree(browser.get("/compare").text).rows
    for site, scores in result.sites.items():
        f1 = f"{scores['federated']['strict']['f1']:.3f}"
        assert [site, "Strict F1", f1, f1, "+0.000"] in rows
    tested = Tree(wait_for_page(browser, "/compare?a=one&b=two&test=1")).rows
    assert [row[3:] for row in tested if row[0] in result.sites and len(row) == 6] == [
        ["+0.000", "+0.000 to +0.000", "1.0000"] for _ in result.sites
    ]
    assert browser.get("/compare?a=%3Cb%3E&b=none").status_code == 200
    assert browser.get("/runs/2").status_code == 400
    assert browse(load_content([runs / "one"])).get("/compare").status_code == 400


def test_errors_of_a_run_agree_with_its_counts(runs: Path) -> None:
    """summary.json has each site's counts of correct, annotated and predicted ones."""
    content = load_content([runs / "one"])
    browser = browse(content)
    wait_for_page(browser, "/errors")
    assert content.review is not None
    review = content.review.get()
    assert review is not None
    for place, (site, scores) in enumerate(read_result(runs / "one").sites.items()):
        assert review.sources[place].name == site
        items = [item for item in review.items if item.source == place]
        kinds = Counter(item.kind for item in items)
        counts = scores["federated"]["counts"]
        assert kinds["correct"] == counts["strict"]
        assert sum(item.gold is not None for item in items) == counts["gold"] > 0
        assert sum(item.predicted is not None for item in items) == counts["predicted"]
    assert review.file == runs / "one.corrections.json"
    assert browser.get("/errors?site=none").text.count("<li>") == 0


def test_a_run_without_models_is_named_and_read_again_on_request(
    runs: Path, tmp_path: Path
) -> None:
    shutil.copytree(runs / "one", tmp_path / "run")
    for folder in ("alone", "federated"):
        (tmp_path / "run" / folder).rename(tmp_path / folder)
    browser = browse(load_content([tmp_path / "run"]))
    assert "has no federated model" in wait_for_page(browser, "/errors")
    for folder in ("alone", "federated"):
        (tmp_path / folder).rename(tmp_path / "run" / folder)
    assert "Errors in run, federated" in wait_for_page(browser, "/errors")


def test_a_run_of_patients_has_no_section_of_errors(runs: Path, tmp_path: Path) -> None:
    table = json.loads((runs / "one" / SUMMARY).read_text("utf-8"))
    (tmp_path / SUMMARY).write_text(json.dumps({**table, "holds": "patients"}), "utf-8")
    assert [name for _, name in load_content([tmp_path]).list_sections()] == ["Runs"]
    assert [name for _, name in load_content([runs / "one"]).list_sections()] == [
        "Runs",
        "Errors",
    ]


def test_the_page_of_a_ledger_shows_whether_it_is_intact(
    tmp_path: Path, instant_disk: None
) -> None:
    needs_app("deployment")
    from ledgers import MESSAGE, lines_of, write_ledger

    from fednotes.apps.deployment.nvflare.kit import KIT_FILE
    from fednotes.apps.deployment.rules.ledger import ledger_of

    kit = tmp_path / "north"
    kit.mkdir()
    (kit / KIT_FILE).write_text("{}")
    ledger_of(kit).path.parent.mkdir()
    ledger = write_ledger(ledger_of(kit).path, 119)
    ledger.append(replace(MESSAGE, round=119, update="ab" * 32))
    browser = browse(load_content([kit]))
    text = browser.get("/ledger").text
    assert ["run-1", "train", "120", "480 B", "0"] in Tree(text).rows
    assert "120 lines, unbroken" in text
    assert "The newest 100 messages" in text
    (newest,) = (row for row in Tree(text).rows if row[0] == "120")
    assert newest[4] == "0"  # tensors
    lines = lines_of(ledger_of(kit).path)
    ledger_of(kit).path.write_bytes(b"".join([*lines[:5], *lines[6:]]))
    assert 'role="alert"' in browser.get("/ledger").text
    without_task = lines[3].replace(b'"task":', b'"tusk":')
    ledger_of(kit).path.write_bytes(b"".join([*lines[:3], without_task, *lines[4:]]))
    text = browser.get("/ledger").text
    assert 'role="alert"' in text
    assert "The newest 3 messages" in text


def test_paths_that_do_not_fit_together_are_refused(runs: Path) -> None:
    models = [
        next((runs / name / "federated").rglob("model")) for name in ("one", "two")
    ]
    for paths in ([runs / "nothing"], [runs], models):
        with pytest.raises(ConfigError, match="fednotes ui MODEL NOTES"):
            load_content(paths)


def test_names_of_runs_and_sites_are_escaped(runs: Path, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    shutil.copytree(runs / "one", tmp_path / hostile)
    summary = tmp_path / hostile / SUMMARY
    table = json.loads(summary.read_text("utf-8"))
    table["title"] = hostile
    table["sites"] = {hostile: next(iter(table["sites"].values()))}
    summary.write_text(json.dumps(table), "utf-8")
    browser = browse(load_content([runs / "one", tmp_path / hostile]))
    for path in ("/runs", "/runs/1", "/compare"):
        text = browser.get(path).text
        assert "&lt;img src=x onerror=alert(1)&gt;" in text
        assert "<img" not in text
