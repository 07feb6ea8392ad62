"""A site whose policy has a `count_step` sends no exact count of its notes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from applications import needs_app
from hospital_jobs import FEDNER, NAMES, SECURE, SHORT
from hospitals import OPEN, Hospitals
from kits import run_site_command, site_kit

from fednotes.apps.deployment.rules.guard import (
    NotApproved,
    open_approvals,
    require_approved,
)
from fednotes.apps.deployment.rules.policy import Policy
from fednotes.apps.deployment.site_agreement import AGREE, SCORES
from fednotes.apps.deployment.site_file import SITE_FILE
from fednotes.core.messages import OURS, decode_reply, decode_request
from fednotes.core.update import Update
from fednotes.jobs.card import SCORES_FILE
from fednotes.methods import fedner

STEP = 10
ROUNDED = f"{OPEN}count_step = {STEP}\n"
SUMS = {"loss", "source", "target"}  # of a loss over examples
DERIVED = {"share"}  # of reported counts
COUNT_TENSORS = ("patients", "occurrences", "absent", "present", "questionable")


def sent(hospitals: Hospitals) -> list[tuple[str, Update]]:
    """Return the method's tasks with the sites' updates, as decoded from the frames."""
    updates = []
    for request_frame, reply_frame in zip(
        *[iter(hospitals.network.frames)] * 2, strict=True
    ):
        request, reply = decode_request(request_frame), decode_reply(reply_frame)
        is_of_method = request.task != AGREE and not request.task.startswith(OURS)
        if is_of_method and reply.update is not None:
            updates.append((request.task, reply.update))
    return updates


def exact_counts(updates: list[tuple[str, Update]]) -> set[tuple[str, str]]:
    """Return the task and name of each count that is not a multiple of STEP."""
    exact = set()
    for task, update in updates:
        numbers = {"weight": update.weight} if update.weight != 1 else {}
        numbers |= {n: v for n, v in update.metrics.items() if n not in SUMS | DERIVED}
        exact |= {(task, name) for name, value in numbers.items() if value % STEP}
        counted = [name for name in COUNT_TENSORS if name in update.tensors]
        exact |= {
            (task, name) for name in counted if (update.tensors[name] % STEP).any()
        }
    return exact


@pytest.mark.slow
def test_a_tagger_job_sends_counts_in_steps(site_notes: Any, tmp_path: Path) -> None:
    """Sites do not send their own scores, which follow from exact counts.

    The scores in a site's own folder are exact.
    """
    exact = Hospitals(tmp_path / "exact", FEDNER, site_notes, policy=OPEN)
    exact.run()
    assert exact_counts(sent(exact))

    hospitals = Hospitals(tmp_path / "steps", FEDNER, site_notes, policy=ROUNDED)
    hospitals.run()
    updates = sent(hospitals)
    assert {task for task, _ in updates} == {task for task, _ in sent(exact)}
    assert exact_counts(updates) == set()

    support = [
        json.loads((hospitals.results(name) / SCORES_FILE).read_text())["support"]
        for name in NAMES
    ]
    assert any(number % STEP for number in support)
    pairs = zip(*[iter(hospitals.network.frames)] * 2, strict=True)
    score_replies = [
        decode_reply(answer)
        for ask, answer in pairs
        if decode_request(ask).task == SCORES
    ]
    assert score_replies
    assert all(reply.update is None for reply in score_replies)
    assert all("refused by count_step" in reply.refusal for reply in score_replies)


@pytest.mark.slow
def test_a_phenotyping_job_sends_counts_in_steps(tmp_path: Path) -> None:
    needs_app("phenotyping")
    from patient_hospitals import PHENOTYPE, patients

    data = {
        name: patients(tmp_path / name, number) for number, name in enumerate(NAMES)
    }
    hospitals = Hospitals(tmp_path / "job", PHENOTYPE, data, policy=ROUNDED)
    hospitals.run()
    updates = sent(hospitals)
    assert {"count_codes", "train", "evaluate", "count_labels"} <= {
        task for task, _ in updates
    }
    assert exact_counts(updates) == set()


@pytest.mark.slow
def test_counts_are_rounded_under_the_secure_sum(
    site_notes: Any, tmp_path: Path
) -> None:
    """The server sees only sums of multiples, for example of pseudo-annotated mentions."""
    pytest.importorskip("cryptography")
    hospitals = Hospitals(tmp_path, SECURE, site_notes, policy=ROUNDED)
    hospitals.run()
    pseudo = [line["pseudo"] for line in hospitals.lines("round")]
    assert any(pseudo)
    assert all(number % STEP == 0 for number in pseudo)


@pytest.mark.slow
def test_a_larger_step_applies_from_the_next_start(
    site_notes: Any, tmp_path: Path
) -> None:
    """The running site refuses requests; once restarted, it sends multiples."""
    hospitals = Hospitals(tmp_path, SHORT, site_notes)
    network, at = hospitals.network, list[int]()

    def change() -> None:
        if not at and hospitals.lines("round"):
            at.append(len(network.frames))
            hospitals.change("posts", "[policy]", f"[policy]\ncount_step = {STEP}")
        elif at and "posts" in network.members and "count_step" in hospitals.texts():
            network.members.pop("posts")

    network.meanwhile = change
    hospitals.run()
    requests = network.frames[at[0] :: 2]
    replies = [decode_reply(reply) for reply in network.frames[at[0] + 1 :: 2]]
    replies_of_posts = [
        (decode_request(request).task, reply)
        for request, reply in zip(requests, replies, strict=True)
        if reply.site == "posts"
    ]
    assert any(
        "refused by count_step" in reply.refusal for _, reply in replies_of_posts
    )
    trained = [
        (task, reply.update)
        for task, reply in replies_of_posts
        if task == "train" and reply.update
    ]
    assert trained
    assert exact_counts(trained) == set()


def test_a_site_does_not_join_with_a_method_that_sends_exact_counts(
    site_notes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedner.Site, "rounds_counts", False)
    refusal = Hospitals(tmp_path, FEDNER, site_notes, policy=ROUNDED).refusal()
    assert "refused by count_step of this site's policy" in refusal
    assert not any(character.isdigit() for character in refusal)


def test_a_method_that_sends_exact_counts_cannot_be_approved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = site_kit(tmp_path / "h1")
    (kit / SITE_FILE).write_text(
        f"[data]\npath = 'notes'\n[policy]\ncount_step = {STEP}\n"
    )
    sites = {"h1": {}, "h2": {}, "h3": {}}
    table = {
        "name": "ner",
        "job": {"method": "fedner", "sites": sites},
        "sites": [*sites],
    }
    table["min_sites"] = 3
    with pytest.raises(NotApproved):
        require_approved(kit, "h1", table, Policy())

    with monkeypatch.context() as patch:
        patch.setattr(fedner.Site, "rounds_counts", False)
        output = run_site_command("approve", kit, "--yes", code=2)
        assert "sites of the method 'fedner' send exact weights and counts" in output
        assert "multiples of 10 (another method, or count_step = 1)" in output
    assert not open_approvals(kit).read_decisions()

    output = run_site_command("approve", kit, "--yes")
    assert "weights and counts of this site leave in multiples of 10" in output
    assert open_approvals(kit).read_decisions()
