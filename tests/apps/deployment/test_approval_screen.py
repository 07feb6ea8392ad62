"""What a person sees before approving, who approved, and how several people do it."""

from __future__ import annotations

import io
import os
import pwd
import threading
from pathlib import Path
from typing import Any

import pytest
from applications import needs_app
from kits import run_site_command, site_kit
from rich.cells import cell_len
from rich.console import Console

from fednotes.apps.deployment.approval_requests import describe_account, describe_job
from fednotes.apps.deployment.commands import site as kit_cli
from fednotes.apps.deployment.nvflare import processes
from fednotes.apps.deployment.rules.guard import (
    RULES,
    NotApproved,
    RequestedJob,
    open_approvals,
    read_pending_jobs,
    require_approved,
)
from fednotes.apps.deployment.rules.policy import Policy
from fednotes.apps.deployment.site_file import SITE_FILE, read_policy
from fednotes.cli import shared
from fednotes.core.store import write_json
from fednotes.core.tables import fingerprint_table
from fednotes.jobs.audit_result import AUDIT, Audit, Leak

SITES = ["h1", "h2", "h3"]
JOB: dict[str, Any] = {
    "name": "ner",
    "method": "fedner",
    "sites": SITES,
    "training": {"epochs": 3},
}


@pytest.fixture
def kit(tmp_path: Path) -> Path:
    return site_kit(tmp_path / "h1")


def request_approval(
    kit: Path, table: dict[str, Any], policy: Policy | None = None
) -> str:
    """Ask a kit to approve a job, as the server does; return the refusal."""
    with pytest.raises(NotApproved) as refusal:
        require_approved(kit, "h1", table, policy or Policy())
    return str(refusal.value)


# the screen


def test_the_fingerprint_of_the_job_is_shown_first(kit: Path) -> None:
    request_approval(kit, JOB)
    assert run_site_command("approve", kit, "--yes").splitlines()[:7] == [
        f"fingerprint {fingerprint_table(JOB)}",
        'job "ner"',
        '  method = "fedner"',
        '  name = "ner"',
        '  sites = ["h1", "h2", "h3"]',
        "  training.epochs = 3",
        "no job was approved here before",
    ]


def test_the_approver_sees_the_privacy_guarantee(kit: Path) -> None:
    """Of the noise that a job asks for, too: by hand, one round of all at σ = 2 and δ =
    1e-5 has the least of α / 2σ² + log(1 - 1/α) - log(δ α) / (α - 1), 2.168 at α = 10.
    """
    noisy = {"noise": 2.0, "rate": 1.0, "where": "site", "unit": "document"}
    job = {"method": "fedner", "training": {"rounds": 1}, "privacy": noisy}
    table = {
        "name": "ner",
        "job": job | {"sites": {"h1": {}, "h2": {}}},
        "sites": ["h1", "h2"],
    }
    request_approval(kit, {**table, "min_sites": 2})
    output = run_site_command("approve", kit, "--yes")
    assert (
        "guarantees differential privacy for each document of a site, against anybody"
        in output
    )
    assert "ε = 2.17 at δ = 1e-05 after 1 rounds" in output


def test_the_approver_sees_the_model_that_the_site_chose_itself(kit: Path) -> None:
    """Only for a method that lets a site choose; another one ignores the table."""
    (kit / SITE_FILE).write_text(
        '[data]\npath = "notes"\n[data.model]\nkind = "encoder-tagger"\n'
    )
    tables = {"sites": {"h1": {}, "h2": {"model": {"tagger": "hash-cnn"}}}}
    request = {"name": "ner", "sites": ["h1", "h2"], "min_sites": 2}
    request_approval(kit, {**request, "job": {"method": "fedmd", **tables}})
    output = run_site_command("approve", kit, "--yes")
    assert 'from this site\'s own file: model.kind = "encoder-tagger"' in output
    assert '  job.sites.h2.model.tagger = "hash-cnn"' in output

    plain = {"method": "distill", "sites": {"h1": {}, "h2": {}}}
    request_approval(kit, {**request, "job": plain})
    assert "own file" not in run_site_command("approve", kit, "--yes")


# waiting for a job


def test_approve_can_wait_for_the_request(kit: Path) -> None:
    """The server asks a second later, as it does once the admin has handed in a job."""
    request = threading.Timer(1.0, request_approval, (kit, JOB))
    request.start()
    output = run_site_command("approve", kit, "--yes", "--wait", "--timeout", "60")
    request.join()
    assert "waiting up to 60 s for a job that asks for approval" in output
    assert "note: this site is not running" in output
    assert f"approved: ner ({fingerprint_table(JOB)[:12]})" in output


def test_waiting_ends_after_the_timeout_with_a_remedy(kit: Path) -> None:
    message = run_site_command(
        "approve", kit, "--yes", "--wait", "--timeout", "0.1", code=2
    )
    assert "no job has asked for approval within 0.1 s" in message
    assert "--timeout SECONDS" in message


def test_waiting_can_be_for_one_job(kit: Path) -> None:
    """Another one that waits is not taken for it."""
    key = fingerprint_table(JOB | {"title": "the awaited one"})
    request_approval(kit, JOB)
    message = run_site_command(
        "approve", kit, key[:12], "--yes", "--wait", "--timeout", "0.1", code=2
    )
    assert f"no job whose fingerprint begins with {key[:12]!r} has asked" in message
    assert not open_approvals(kit).read_decisions()
    short = fingerprint_table(JOB)[:12]
    assert "approved: ner" in run_site_command(
        "approve", kit, short, "--yes", "--wait", "--timeout", "0.1"
    )
    assert "approved: ner" in run_site_command(
        "approve", kit, short, "--yes", "--wait", "--timeout", "0.1"
    )


FORGED = (
    f"ner, fingerprint {'0' * 64}\n  training.epochs = 3\n"
    "changes since ner (000000000000), approved today:\n  none\x1b[0J\x1b[8m"
)


@pytest.mark.parametrize(
    "name",
    [
        FORGED,
        FORGED.replace("\n", "\r"),
        FORGED.replace("\n", "\x85"),
        FORGED.replace("\n", "\u2028"),
        "ner" + " " * 55 + "changes since ner, approved today:" + " " * 26 + "  none",
        "ner\u202e:yadot devorppa ,ren ecnis segnahc",
        "\u3164" * 60 + "changes since ner",
        "漢" * 30 + "changes since ner",
    ],
    ids=range(8),
)
@pytest.mark.parametrize("place", ["name", "title", "key"])
def test_words_of_a_job_cannot_imitate_another_job(
    kit: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    """On a terminal of 60 columns, only our own words begin a row, and every row has
    room."""
    request_approval(kit, JOB)
    run_site_command("approve", kit, "--yes")
    forged = {
        **JOB,
        **({name: 1} if place == "key" else {place: name}),
        "training": {"epochs": 9},
    }
    request_approval(kit, forged)
    screen = io.StringIO()
    console = Console(width=60, force_terminal=True, color_system=None, file=screen)
    for module in (shared, kit_cli):
        monkeypatch.setattr(module, "console", console)
    kit_cli._show_job(
        kit,
        RequestedJob(fingerprint_table(forged), dict(forged)),
        read_policy(kit).make_quorum("h1"),
    )
    rows = screen.getvalue().split("\n")
    assert rows[0] == f"fingerprint {fingerprint_table(forged)}"
    begins = [row for row in rows[1:] if row and not row.startswith(" ")]
    assert [row[:3] for row in begins] == ["job", "cha", "com"]
    assert "\n  ~ training.epochs: 3 → 9\n" in screen.getvalue()
    assert "  none" not in rows
    for row in rows[1:]:
        assert cell_len(row) <= 60
        assert row.isprintable()


def test_words_of_a_job_cannot_imitate_lines_of_lists(kit: Path) -> None:
    """`status`, and the message that names the jobs, have a line a job."""
    request_approval(kit, {**JOB, "name": FORGED})
    message = run_site_command("approve", kit, "no such", code=2)
    assert "\x1b" not in message
    assert "\n" not in message
    status = run_site_command("status", kit)
    assert "\x1b" not in status
    assert not any(line.startswith("changes since") for line in status.splitlines())
    run_site_command("reject", kit)
    status = run_site_command("status", kit)
    assert not any(line.startswith("changes since") for line in status.splitlines())


def test_a_job_that_the_rules_refuse_causes_a_warning_before_the_question(
    kit: Path,
) -> None:
    rules = '[data]\npath = "x"\n[policy]\nmin_sites = 4\nshare_scores = true\n'
    (kit / SITE_FILE).write_text(rules)
    table = notes_job(SITES)
    request_approval(kit, table)
    output = run_site_command("approve", kit, typed="n\n")
    warning, _, question = output.partition("Approve this job at this site?")
    assert (
        "warning: this site will not join, even if you approve the job: refused by the "
        "site's policy: the sum would be over 3 sites; this site allows 4 sites or "
        "more. Only the site can change this: min_sites in [policy] of "
    ) in warning
    assert "nothing was decided" in question
    assert f"joins once its rules permit the job: fednotes site rules {kit}" in (
        run_site_command("approve", kit, "--yes")
    )

    (kit / SITE_FILE).write_text(rules.replace("4", "3"))
    output = run_site_command(
        "approve", kit, fingerprint_table(table)[:12], "--yes", code=0
    )
    assert "warning" not in output


@pytest.mark.parametrize(
    "tables",
    [
        {"training": {"local_epochs": 1e308}},
        {"model": {"encoder": "x" * 5000}},
    ],
    ids=["epochs", "encoder"],
)
def test_a_job_with_extreme_values_is_shown(kit: Path, tables: dict[str, Any]) -> None:
    """Such a job is refused when it begins, but people can read and reject it."""
    sites = {name: {} for name in SITES}
    job = {"method": "finetune", "sites": sites, **tables}
    table = {"name": "ner", "job": job, "sites": SITES, "min_sites": 3}
    request_approval(kit, table)
    (kit / SITE_FILE).write_text("[data]\n")
    (requested,) = read_pending_jobs(kit)
    assert describe_job(kit, requested, read_policy(kit).make_quorum("h1"))


def test_an_approval_reports_whether_a_run_waits_for_it(
    kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was aborted leaves its request at the site."""
    request_approval(kit, JOB)
    assert "no run asks for it now; this site joins when one does" in run_site_command(
        "approve", kit, "--yes"
    )
    table = notes_job(SITES) | {"min_sites": 3}
    request_approval(kit, table)
    job_id = "01234567-0123-4123-8123-0123456789ab"
    facts = {key: table[key] for key in ("sites", "min_sites")}
    job = {"name": table["name"], "job": table["job"]}
    write_json(
        kit / job_id / "app_h1" / "config" / "job.json",
        {**facts, "run": "ner-1", "job": job},
    )
    running = processes.Status("h1", "site", 7, (job_id,), kit / "fednotes.log")
    assert "is waiting for a decision, but no run asks for it now" in run_site_command(
        "status", kit
    )
    monkeypatch.setattr(processes, "read_status", lambda kit: running)
    assert "ner (" in run_site_command("status", kit)
    assert "but no run asks" not in run_site_command("status", kit)
    assert "this site joins within seconds" in run_site_command("approve", kit, "--yes")


def test_each_of_several_waiting_jobs_can_be_chosen(kit: Path) -> None:
    request_approval(kit, JOB)
    other_job = {**JOB, "name": "other"}
    request_approval(kit, other_job)
    prefix = fingerprint_table(JOB)[:12]
    other_prefix = fingerprint_table(other_job)[:12]
    status = run_site_command("status", kit)
    assert status.index(f"other ({other_prefix}) is waiting") < status.index(
        f"ner ({prefix}) is waiting"
    )
    shown = run_site_command("approve", kit, other_prefix, typed="n\n")
    assert shown.startswith(f"fingerprint {fingerprint_table(other_job)}")
    assert f"also waiting for a decision: ner ({prefix}); to see one of them" in shown
    shown = run_site_command("approve", kit, prefix, "--yes")
    assert f"also waiting for a decision: other ({other_prefix})" in shown
    assert f"approved: ner ({prefix})" in shown


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("approve", []),
        ("approve", ["--yes"]),
        ("approve", ["--yes", "--wait"]),
        ("reject", []),
    ],
)
def test_a_decision_names_its_job_if_several_jobs_are_waiting(
    kit: Path, word: str, options: list[str]
) -> None:
    """The person has seen one of them, and the server may have asked for another."""
    request_approval(kit, JOB)
    other_job = {**JOB, "name": "other"}
    request_approval(kit, other_job)
    message = " ".join(run_site_command(word, kit, *options, code=2).split())
    assert "2 jobs are waiting for a decision: " in message
    for job in (JOB, other_job):
        label = f"{job['name']} ({fingerprint_table(job)[:12]})"
        assert f"{label}, for which no run asks now" in message
    assert f"fednotes site {word} {kit} FINGERPRINT" in message
    assert not open_approvals(kit).read_decisions()
    assert len(read_pending_jobs(kit)) == 2


def test_an_approval_is_withdrawn_only_by_its_fingerprint(kit: Path) -> None:
    """Rejecting two waiting jobs, one after the other, does not end a run."""
    request_approval(kit, JOB)
    run_site_command("approve", kit, "--yes")
    for seed in (2, 3):
        request_approval(kit, {**JOB, "seed": seed})
    (newer, older) = read_pending_jobs(kit)
    run_site_command("reject", kit, newer.fingerprint[:12])
    assert "seed" not in open_approvals(kit).find_last_approval().table
    assert f"({older.fingerprint[:12]})" in run_site_command("reject", kit)

    prefix = fingerprint_table(JOB)[:12]
    message = run_site_command("reject", kit, code=2)
    assert f"to withdraw the approval of ner ({prefix}): " in message
    assert f"fednotes site reject {kit} {prefix}" in message
    assert open_approvals(kit).read_status(JOB) == "approved"
    assert "its approval is withdrawn" in run_site_command("reject", kit, prefix)
    message = run_site_command("reject", kit, code=2)
    assert "no job is waiting for a decision, and none is approved" in message


def test_an_input_without_an_answer_is_no_decision(kit: Path) -> None:
    request_approval(kit, JOB)
    message = run_site_command("approve", kit, code=2)
    assert "the input ended without an answer, so nothing was decided" in message
    assert "(--yes)" in message
    assert not open_approvals(kit).read_decisions()
    message = run_site_command(
        "key", "alice", "--out", kit / "alice.key", "--protect", code=2
    )
    assert "the input ended without a passphrase, so nothing was done" in message
    assert not (kit / "alice.key").exists()


# whose yes


@pytest.mark.parametrize("word", ["approve", "reject"])
def test_the_decision_is_recorded_under_the_system_account(
    kit: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    for variable in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(variable, "dr_no")
    monkeypatch.delenv("SUDO_UID", raising=False)
    request_approval(kit, JOB)
    run_site_command(word, kit, *["--yes"] * (word == "approve"))
    (decision,) = open_approvals(kit).read_decisions()
    assert decision.by == f"{pwd.getpwuid(os.getuid()).pw_name} (uid {os.getuid()})"
    assert "dr_no" not in run_site_command("status", kit)


def test_sudo_and_unnamed_accounts_are_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4_000_123)
    monkeypatch.setenv("SUDO_UID", "0")
    root = pwd.getpwuid(0).pw_name
    assert (
        describe_account()
        == f"no name (uid 4000123); SUDO_UID belongs to {root} (uid 0)"
    )
    monkeypatch.setenv("SUDO_UID", "99999999999999999999")
    assert describe_account().endswith(
        "SUDO_UID belongs to no name (uid 99999999999999999999)"
    )
    monkeypatch.setenv("SUDO_UID", "root")
    assert describe_account() == "no name (uid 4000123)"


# two people


def test_two_people_approve_by_their_keys(kit: Path, tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    outputs = [
        run_site_command("key", who, "--out", tmp_path / who)
        for who in ("alice", "bob", "carol")
    ]
    lines = [
        line
        for output in outputs
        for line in output.splitlines()
        if " approvers." in line
    ]
    assert len(lines) == 3
    (kit / SITE_FILE).write_text("\n".join(["[policy]", "approvals = 2", *lines[:2]]))
    policy = read_policy(kit)
    assert "not approved this job" in request_approval(kit, JOB, policy)
    assert "2 of these people: alice, bob" in run_site_command(
        "approve", kit, "--yes", code=2
    )
    outputs = run_site_command(
        "approve", kit, "--yes", "--key", tmp_path / "carol", code=2
    )
    assert "not among the approvers of this site's rules (alice, bob)" in outputs
    assert open_approvals(kit).read_decisions() == ()
    output = run_site_command("approve", kit, "--yes", "--key", tmp_path / "alice")
    assert "approved by alice; 1 more of bob must" in output
    assert "joins" not in output
    assert "(1 of 2 people have)" in request_approval(kit, JOB, policy)
    output = run_site_command("approve", kit, "--yes", "--key", tmp_path / "alice")
    assert "alice has approved this job before" in output
    assert len(open_approvals(kit).read_decisions()) == 1
    assert read_pending_jobs(kit)
    assert (
        "but no run asks for it now: approved by alice; 1 more of bob must"
        in run_site_command("status", kit)
    )
    assert "this site joins when" in run_site_command(
        "approve", kit, "--yes", "--key", tmp_path / "bob"
    )
    require_approved(kit, "h1", JOB, policy)
    assert not read_pending_jobs(kit)
    assert "with the key of bob" in run_site_command("status", kit)
    changed_job = {**JOB, "seed": 2}
    assert "approved another form of this job" in request_approval(
        kit, changed_job, policy
    )
    run_site_command(
        "reject", kit, fingerprint_table(JOB)[:12]
    )  # one person's no, without a key
    assert "has rejected this job" in request_approval(kit, JOB, policy)


def test_a_key_is_required_only_if_the_rules_list_approvers(
    kit: Path, tmp_path: Path
) -> None:
    pytest.importorskip("cryptography")
    typed = "pass word\npass word\n"
    assert "approvers.alice" in run_site_command(
        "key", "alice", "--out", tmp_path / "a", "--protect", typed=typed
    )
    request_approval(kit, JOB)
    message = run_site_command("approve", kit, "--yes", "--key", tmp_path / "a", code=2)
    assert "its rules list no approvers: approve without --key" in message
    assert "already exists" in run_site_command(
        "key", "alice", "--out", tmp_path / "a", code=2
    )


# audits


def test_a_rule_can_require_an_audit(kit: Path, tmp_path: Path) -> None:
    """Of this site and this job table, with all attacks tried and none above the bound;
    then the kit's copy is enough for the next who approves."""
    needs_app("audit")
    from fednotes.apps.audit import load_attacks

    job = {"method": "fedner", "sites": {name: {} for name in SITES}}
    table = {"name": "ner", "job": job, "sites": SITES, "min_sites": 3}
    (kit / SITE_FILE).write_text('[data]\npath = "x"\n[policy]\naudit = "required"\n')
    request_approval(kit, table)
    fine = Leak(attack="words", success=0.1, chance=0.01, control=1.0, proven=True)
    others = [
        Leak(attack=each.name, applies=False, why="no") for each in load_attacks()
    ]
    right = Audit(
        site="h1", fingerprint=fingerprint_table(job), attacks=[fine, *others]
    )
    worse = fine.model_copy(update={"success": 0.12, "proven": False})

    def approve(audit: Audit | None, code: int = 0) -> str:
        words = ["--audit", tmp_path] if audit is not None else []
        if audit is not None:
            (tmp_path / AUDIT).write_text(audit.model_dump_json())
        return run_site_command("approve", kit, "--yes", *words, code=code)

    assert "there is no audit of this job" in approve(None, 2)
    for change in ({"site": "h2"}, {"fingerprint": "0" * 64}):
        assert "are needed: run fednotes audit" in approve(
            right.model_copy(update=change), 2
        )
    untried = Leak(attack="b", why="could not be tried: x")
    # or of a version with fewer
    for attacks in ([fine, *others, untried], [], others[1:]):
        message = approve(right.model_copy(update={"attacks": attacks}), 2)
        assert "not every attack could be tried" in message
    message = approve(right.model_copy(update={"attacks": [fine, *others, worse]}), 2)
    assert "may be 0.110 above chance; this site allows 0.1 at most" in message
    assert open_approvals(kit).read_decisions() == ()
    assert "the best attack, words, may be 0.090 above chance" in approve(right)
    assert "approved: ner" in run_site_command(
        "approve", kit, fingerprint_table(table), "--yes"
    )
    assert "contains no audit.json" in run_site_command(
        "approve", kit, fingerprint_table(table), "--audit", kit, code=2
    )
    request_approval(
        kit, fewer := {**table, "sites": SITES[:2]}
    )  # of which a sum tells more
    assert "differ from those in the job's table" in approve(right, 2)
    assert not (kit / RULES / "audits" / fingerprint_table(fewer)).exists()


def test_an_audit_is_shown_without_a_rule(kit: Path, tmp_path: Path) -> None:
    table = {
        "name": "ner",
        "job": {"sites": {name: {} for name in SITES}},
        "sites": SITES,
    }
    request_approval(kit, table)
    leak = Leak(attack="a\nb", success=1.0, chance=0.01, control=0.1)
    audit = Audit(
        site="h1", fingerprint=fingerprint_table(table["job"]), attacks=[leak]
    )
    (tmp_path / AUDIT).write_text(audit.model_dump_json())
    output = run_site_command("approve", kit, "--yes", "--audit", tmp_path)
    assert "may be 0.990 above chance; these attacks prove nothing: a" in output
    assert "approved" in output


# earlier jobs


def notes_job(sites: list[str], **own_table: Any) -> dict[str, Any]:
    """Return a job as a site approves it. own_table: its settings for the notes of
    h1."""
    tables = {name: own_table if name == "h1" else {} for name in sites}
    return {"name": "ner", "job": {"method": "fedner", "sites": tables}, "sites": sites}


def screen(kit: Path, *tables: dict[str, Any]) -> str:
    """Return what is shown of the last of some jobs that are approved in turn."""
    for table in tables:
        request_approval(kit, table)
        output = run_site_command("approve", kit, "--yes")
    return output.partition("compared with ")[2]


def test_one_site_more_than_in_an_earlier_job_causes_a_warning(kit: Path) -> None:
    comparison = screen(kit, notes_job([*SITES, "h4"]), notes_job(SITES))
    assert "other sites (h4), the same notes here" in comparison
    assert (
        "warning: the sums of the two jobs differ only by a few sites (h4)"
        in comparison
    )


def test_another_model_of_the_site_is_not_taken_for_other_notes(kit: Path) -> None:
    own = notes_job(SITES, model={"tagger": "hash-cnn"}, training={"clip": 2.0})
    comparison = screen(kit, own, notes_job(SITES))
    assert "the same sites, the same notes here" in comparison


def test_a_difference_of_as_many_sites_as_a_sum_needs_causes_no_warning(
    kit: Path,
) -> None:
    """The difference of both sums is one of three sites, which the rules permit of any
    sum."""
    comparison = screen(kit, notes_job([*SITES, "h4", "h5", "h6"]), notes_job(SITES))
    assert "other sites (h4, h5, h6)" in comparison
    assert "warning" not in comparison


def test_one_sentence_less_than_in_an_earlier_job_causes_a_warning(kit: Path) -> None:
    comparison = screen(
        kit, notes_job(SITES, max_sentences=60), notes_job(SITES, max_sentences=59)
    )
    assert "the same sites, other notes here" in comparison
    assert "~ sites.h1.max_sentences: 60 → 59" in comparison
    assert "warning: this site reads other notes for this job" in comparison


def test_every_earlier_job_is_compared_including_withdrawn_ones(kit: Path) -> None:
    """Its sums may be known by then."""
    request_approval(kit, notes_job([*SITES, "h4"]))
    run_site_command("approve", kit, "--yes")
    (decision,) = open_approvals(kit).read_decisions()
    run_site_command("reject", kit, decision.fingerprint)
    comparison = screen(kit, notes_job(SITES, max_sentences=60), notes_job(SITES))
    assert (
        comparison.count("compared with ") == 1
    )  # and the first, which `screen` cut off
    assert "other sites (h4)" in comparison


def test_other_training_settings_are_compared_as_the_same_notes(kit: Path) -> None:
    first, second = notes_job(SITES), notes_job(SITES)
    second["job"]["training"] = {"epochs": 3}
    comparison = screen(kit, first, second)
    assert "the same sites, the same notes here" in comparison
    assert "warning" not in comparison


def test_another_seed_is_compared_as_a_different_split(kit: Path) -> None:
    second = notes_job(SITES)
    second["job"]["seed"] = 7
    comparison = screen(kit, notes_job(SITES), second)
    assert "~ seed: 0 → 7" in comparison
    assert "warning: this site reads other notes for this job" in comparison
