"""A site's rules applied to the messages of a run: what may leave the site."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from guarded import JOB, SITES, TABLE, Guarded, Network, Trainer

from fednotes.apps.deployment.rules import guard as module
from fednotes.apps.deployment.rules.guard import (
    NoRoom,
    SiteGuard,
    Withheld,
    open_approvals,
    settle_job,
)
from fednotes.apps.deployment.rules.ledger import (
    FIRST,
    Entry,
    Head,
    Ledger,
    describe_tensors,
    encode_head,
    get_head_path,
    hash_update,
    verify_ledger,
)
from fednotes.apps.deployment.rules.policy import Policy, PolicyRefusal
from fednotes.apps.deployment.site_agreement import SCORES
from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.messages import (
    BEGIN,
    CHECKPOINT,
    END,
    Attached,
    Reply,
    Request,
    encode_message,
)
from fednotes.core.tables import fingerprint_table
from fednotes.core.update import Tensors, Update

OPEN = Policy(
    secure_sum="off", share_scores=True, source="[policy] of /srv/ward7/site.toml"
)
MASKED = Policy(secure_sum="required")


def updates(number: int) -> list[Update]:
    return [Update({"lstm.w": torch.full((4,), 1.0 + n)}, 2.0) for n in range(number)]


# a job


def test_a_job_without_secure_sum_needs_shared_scores(tmp_path: Path) -> None:
    """Whatever it says of itself: any job's evaluations count."""
    site = Guarded(tmp_path / "b", replace(OPEN, share_scores=False), [])
    with pytest.raises(
        PolicyRefusal, match="the counts of this site's own evaluations"
    ) as refusal:
        site.guard.check_job("fedner", 3, 10)
    assert refusal.value.rule == "share_scores"
    site.policy = OPEN
    site.guard.check_job("fedner", 3, None)
    Guarded(tmp_path / "c", Policy(), [], secure=True).guard.check_job("fedner", 3, 10)


# requests


def test_rules_may_change_during_a_run(tmp_path: Path) -> None:
    """The least number of sites, by which a secure sum is opened too."""
    site = Guarded(
        tmp_path, replace(MASKED, min_sites=2), updates(1), secure=True, threshold=2
    )
    assert site.ask("train", 1, preparing=True).update is not None
    site.policy = MASKED
    refused = site.ask("train", 2)
    assert "refused by min_sites" in refused.refusal
    assert "may be opened with 2 of 4 sites" in site.messages[-1]
    assert not refused.later


@pytest.mark.parametrize("secure", [False, True])
def test_no_answer_leaves_if_the_job_is_rejected_during_the_task(
    secure: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = MASKED if secure else OPEN
    site = Guarded(tmp_path, policy, updates(2), secure=secure)
    give = Trainer.give

    def reject_and_give(trainer: Trainer, tensors: Tensors) -> Update:
        settle_job(site.kit, site.table, approve=False, by="tester")
        return give(trainer, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "give", reject_and_give)
        reply = site.ask("train", 1, preparing=True)
    assert reply.update is None
    assert "has rejected this job" in reply.refusal
    assert reply.later
    assert site.ledger[-1]["refusal"]
    site.approve()
    assert site.ask("train", 2, preparing=True).update is not None


def test_sites_that_are_not_in_the_job_do_not_count(tmp_path: Path) -> None:
    site = Guarded(tmp_path, OPEN, updates(1))
    made_up = {"b": 0, "c": 0} | {f"fake{n}": 0 for n in range(9)}
    assert "refused by min_sites" in site.ask("train", 1, counted=made_up).refusal
    assert site.ask("train", 2, counted=dict.fromkeys(SITES[:3], 0)).update is not None


def test_no_run_starts_outside_the_permitted_hours(tmp_path: Path) -> None:
    """The server may ask again later; that it may not for a rule that stays."""
    clock = module.read_clock().hour
    closed = f"{(clock + 2) % 24:02}:00-{(clock + 3) % 24:02}:00"
    site = Guarded(tmp_path, replace(OPEN, hours=closed, timezone="UTC"), updates(1))
    for number, task in enumerate((BEGIN, "train"), start=1):
        reply = site.ask(task, number)
        assert ("refused by hours" in reply.refusal, reply.later) == (True, True)
        assert closed not in reply.refusal
        assert closed in site.messages[-1]
    # an update that was served may be finished
    assert site.ask(CHECKPOINT, 3).update is not None
    site.policy = replace(OPEN, min_sites=5)
    assert site.ask(BEGIN, 4).later is False


def test_no_count_leaves_in_the_clear_without_shared_scores(tmp_path: Path) -> None:
    counts = [Update({}, 0.0, {"gold": 5.0})]
    site = Guarded(tmp_path, OPEN, counts)
    assert site.ask("evaluate", 1).update == counts[0]
    site.policy = replace(OPEN, share_scores=False)
    position = site.host._site.at
    # the stored one; one that is not done
    for number, task in ((1, "evaluate"), (2, "train")):
        assert "refused by share_scores" in site.ask(task, number).refusal
    assert site.host._site.at == position
    site = Guarded(tmp_path / "two", OPEN, counts)
    change = replace(OPEN, share_scores=False)
    judge = site.guard.check_request

    def then_change(request: Request) -> None:
        judge(request)
        site.policy = change

    site.guard.check_request = then_change  # type: ignore[method-assign]
    # while it was made
    assert "refused by share_scores" in site.ask("evaluate", 1).refusal


# what a server is told


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("min_tokens", {"tokens": 41}),
        ("min_patients", {"patients": 41}),
        ("min_steps", {}),
    ],
)
def test_a_refusal_names_the_rule_and_no_number(
    tmp_path: Path, rule: str, change: dict[str, int]
) -> None:
    site = Guarded(tmp_path, replace(OPEN, **{rule: 7_777}), updates(1))
    site.covered = {**site.covered, **change}
    refusal = site.ask("train", 1).refusal
    assert f"refused by {rule} of this site's policy" in refusal
    assert not any(c.isdigit() for c in refusal)
    assert "ward7" not in refusal
    assert "7,777 or more" in site.messages[-1]
    assert "ward7" in site.messages[-1]
    if change:
        assert f"covers 41 {rule[4:]}" in site.messages[-1]


def test_an_unreadable_site_file_stops_the_site_temporarily(tmp_path: Path) -> None:
    site = Guarded(tmp_path, OPEN, updates(1))

    def damaged() -> Policy:
        raise ConfigError("/srv/ward7/site.toml: not a TOML file (line 3)")

    site.guard._policy = damaged
    reply = site.ask("train", 1)
    assert (reply.refusal, reply.later) == ("site 'b' cannot read its own file", True)
    assert "line 3" in site.messages[-1]


# what leaves again


def test_a_damaged_record_of_examples_excludes_the_site_temporarily(
    tmp_path: Path,
) -> None:
    """The server learns neither where the record lies nor what is wrong with it."""
    site = Guarded(tmp_path, replace(OPEN, min_difference=2), [])
    site.guard.check_examples(lambda: {"notes": [b"one", b"two"]})
    (site.kit / "rules" / "examples" / "record.json").write_text("{}")
    with pytest.raises(
        Withheld, match=r"record\.json or secret\.key is missing, damaged"
    ) as refusal:
        site.guard.check_examples(lambda: {"notes": [b"one", b"two"]})
    assert refusal.value.later
    assert refusal.value.public == f"site {site.site!r} cannot read its own file"


def test_a_stored_reply_is_checked_by_the_current_rules(tmp_path: Path) -> None:
    """Also by what is behind it, which after a restart the ledger alone knows."""
    site = Guarded(tmp_path, OPEN, updates(3))
    first = site.ask("train", 1)
    assert first.update is not None
    for restarted in (False, True):
        if restarted:
            site.restart()
        for change in (
            {"denied_layers": ("lstm",)},
            {"min_patients": 61},
            {"min_tokens": 5_001},
            {"min_steps": 10},
            {"max_bytes": 300},
        ):
            site.policy = replace(OPEN, **change)
            assert f"refused by {next(iter(change))}" in site.ask("train", 1).refusal
        site.policy = replace(OPEN, min_patients=60, min_tokens=5_000, min_steps=9)
        assert encode_message(site.ask("train", 1)) == encode_message(first)
    for file in (
        Ledger.in_kit(tmp_path).path,
        get_head_path(Ledger.in_kit(tmp_path).path),
    ):
        file.unlink()
    assert "ledger has no record of the requested reply" in site.ask("train", 1).refusal


def secure_sites(folder: Path, policy: Policy, size: int = 4) -> dict[str, Guarded]:
    return {
        name: Guarded(
            folder / name,
            policy,
            [Update({"lstm.w": torch.arange(size) + 1.0 + n}, 1.0 + n, {"notes": 9.0})],
            secure=True,
            site=name,
        )
        for n, name in enumerate(SITES)
    }


def test_the_ledger_records_what_is_behind_the_masks_of_a_secure_sum(
    tmp_path: Path,
) -> None:
    """Norms from NumPy; the words and the message by their hashes; masked where words
    are. The terms lack a count, so sites answer "again", and mask the update in a
    stage."""
    sites = secure_sites(tmp_path, MASKED)
    assert Network(tmp_path, sites).sum(4, metrics=()).sites == 4
    for n, name in enumerate(SITES):
        lines = sites[name].ledger
        assert verify_ledger(Ledger.in_kit(sites[name].kit).path).is_intact
        by_words = [
            line for line in lines if "words" in [t["name"] for t in line["tensors"]]
        ]
        assert [line for line in lines if line["masked"]] == by_words
        (line,) = by_words
        assert (line["task"], line["round"], line["receiver"]) == ("train", 4, "server")
        assert (line["steps"], line["tokens"], line["patients"]) == (9, 5_000, 60)
        update, words = line["tensors"]
        value = np.arange(4, dtype=np.float32) + 1 + n
        assert (update["name"], update["shape"]) == ("lstm.w", [4])
        assert update["norm"] == pytest.approx(np.linalg.norm(value))
        assert update["sha256"] == hashlib.sha256(value.tobytes()).hexdigest()
        assert (words["name"], words["norm"]) == ("words", None)
        again = [x for x in lines if x["task"] == "train" and not x["masked"]]
        assert not [t for x in again for t in x["tensors"]]
        assert again
        assert [(x["update"], x["tokens"]) for x in again] == [("", None)] * len(again)
        stages = {x["task"] for x in lines if x["task"].startswith("@")}
        assert {"@keys", "@shares", "@unmask"} <= stages


@pytest.mark.parametrize(
    "change",
    [{"max_bytes": 30_000}, {"min_patients": 61}, {"denied_layers": ("lstm",)}],
)
def test_a_masked_update_is_checked_when_it_leaves(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    """The small reply "again" passes; then the rule comes, or the words are too many
    for it."""
    sites = secure_sites(tmp_path, MASKED, 100_000)
    network = Network(tmp_path, sites)

    def tighten(task: str) -> None:
        if task == "@masked":
            for site in sites.values():
                site.policy = replace(MASKED, **change)

    network.before = tighten
    with pytest.raises(TrainingError, match="nothing was opened"):
        network.sum(4, metrics=())
    assert any(
        f"refused by {next(iter(change))}" in refusal for refusal in network.refusals
    )
    assert not any(line["masked"] for site in sites.values() for line in site.ledger)


def test_masked_words_of_an_unchecked_update_do_not_leave(tmp_path: Path) -> None:
    class Words:
        def answer_stage(self, request: Request) -> Attached:
            return Attached(tensors={"words": torch.ones(3, dtype=torch.int64)})

        def seal(self, request: Request, update: Update, question: bytes) -> Attached:
            return Attached()

        strict = True

        def find_history_to_adopt(self, request: Request, question: Any) -> None:
            return None

    site = Guarded(tmp_path, MASKED, updates(1), secure=True)
    site.host._sealer = Words()
    assert (
        "cannot tell which update this masked message contains"
        in site.ask("@masked", 1).refusal
    )
    assert site.ask("train", 2).update is not None
    assert (
        "cannot tell which update this masked message contains"
        in site.ask("@masked", 3, counted=0).refusal
    )
    assert site.ask("train", 4).update is not None
    assert site.ask("@masked", 5, counted=4).attached.tensors["words"].shape == (3,)


def test_the_size_of_every_reply_is_checked(tmp_path: Path) -> None:
    public = {
        "@describe": lambda update: {"description": torch.ones(900, dtype=torch.uint8)}
    }
    site = Guarded(tmp_path, replace(OPEN, max_bytes=900), updates(1), public=public)
    assert "refused by max_bytes" in site.ask("@describe", 1).refusal
    assert site.ask("train", 2).update is not None


# what a site stores


ROOM = 5 * 10**6
BOUNDED = replace(OPEN, max_stored_bytes=ROOM)
LARGE = {"x": torch.ones(100_000)}  # 400 KB


def stored(site: Guarded) -> int:
    """Return the bytes of the site's files, and of its ledger."""
    files = [path for path in site.kit.rglob("*") if path.is_file()]
    return sum(path.stat().st_size for path in files)


def test_a_site_stores_no_more_than_its_policy_allows(tmp_path: Path) -> None:
    """Of a server that never lets it forget; its log says why, and the server the rule
    alone."""
    site = Guarded(tmp_path, BOUNDED, updates(99))
    last_number = 0
    for number in range(1, 40):
        request = Request(
            JOB, 1, number, "train", counted=at(last_number), tensors=LARGE
        )
        reply = site.send(request)
        assert stored(site) < ROOM
        if reply.update is None:
            break
        last_number = number
    assert 5 < last_number < 12
    assert "refused by max_stored_bytes of this site's policy" in reply.refusal
    assert not reply.later
    assert not any(character.isdigit() for character in reply.refusal)
    assert f"bytes for this run; this site allows at most {ROOM:,}" in site.messages[-1]
    assert (
        site.host._site is None or site.host._site.at == last_number
    )  # it did no more work
    site.policy = replace(OPEN, max_stored_bytes=2 * ROOM)
    assert site.send(replace(request, number=50)).update is not None


def at(number: int) -> dict[str, int]:
    return dict.fromkeys(SITES, number)


def test_refusals_are_recorded_as_long_as_there_is_room(tmp_path: Path) -> None:
    """Then nothing leaves, so that a server cannot fill the disk by asking again."""
    site = Guarded(tmp_path, replace(BOUNDED, max_stored_bytes=120_000), updates(1))
    refusals: list[str] = []

    def ask_again_and_again() -> None:
        while stored(site) < 120_000:
            refusals.append(site.ask("train", len(refusals) + 1).refusal)

    with pytest.raises(NoRoom, match="this site allows at most 120,000"):
        ask_again_and_again()
    lines = len(site.ledger)
    assert lines == len(refusals) > 9
    assert all("refused by max_stored_bytes" in refusal for refusal in refusals)
    with pytest.raises(NoRoom):
        site.host.handle(b"noise")
    assert len(site.ledger) == lines


def test_only_files_of_the_run_count_as_stored(tmp_path: Path) -> None:
    """Not the lines of other runs, nor what else is in the kit."""
    site = Guarded(tmp_path, BOUNDED, updates(9))
    assert site.ask("train", 1, tensors=LARGE).update is not None
    used = site.guard._measure_stored_bytes()
    (site.kit / "notes.txt").write_bytes(bytes(10**6))
    second = site.in_another_run("run2", updates(9))
    assert second.ask("train", 1, tensors=LARGE).update is not None
    assert site.guard._measure_stored_bytes() == used
    assert second.guard._measure_stored_bytes() == pytest.approx(used, abs=4096)
    # many small files take more of a disk than their bytes
    (site.kit / "state" / site.run / "small").write_bytes(b"1")
    assert site.guard._measure_stored_bytes() == used + 4096


def test_ledger_lines_of_a_run_still_count_after_a_restart(tmp_path: Path) -> None:
    site = Guarded(tmp_path, BOUNDED, updates(9))
    assert site.ask("train", 1).update is not None
    used = site.guard._measure_stored_bytes()
    assert used > Ledger.in_kit(tmp_path).path.stat().st_size
    site.restart()
    assert site.guard._measure_stored_bytes() == used


# rounds


def served(site: Guarded, task: str, number: int, count: int) -> int:
    """Return how many of so many requests of a lying server for round 0 are
    answered."""
    answered, counted = 0, number - 1
    for at in range(number, number + count):
        if site.ask(task, at, counted, round=0).update is not None:
            answered, counted = answered + 1, at
    return answered


def test_rounds_are_counted_by_the_site(tmp_path: Path) -> None:
    """By its ledger: over restarts, and over runs of the same job under other names."""
    rules = replace(OPEN, max_rounds=3)
    site = Guarded(tmp_path, rules, updates(99))
    another = Guarded(
        tmp_path, rules, updates(99)[20:], run="run3", table={**TABLE, "seed": 2}
    )
    assert served(site, "train", 1, 2) == 2
    site.restart()
    assert served(site, "train", 3, 9) == 1
    assert "would be number 4 of this job" in site.messages[-1]
    second = site.in_another_run("run2", updates(99)[50:])
    assert served(second, "train", 1, 9) == 0
    assert served(another, "train", 1, 3) == 3
    site.approve()
    assert served(second, "train", 10, 9) == 0  # counts from 9, which it is not at
    second.restart()
    assert second.ask("train", 20, 0, round=0).update is not None
    assert second.ask("train", 21, 20, round=3).refusal.startswith(
        "refused by max_rounds"
    )


def parameters(value: float) -> dict[str, torch.Tensor]:
    return {"lstm.w": torch.full((4,), value)}


def test_a_repeated_question_does_not_count_as_a_round(tmp_path: Path) -> None:
    """Nor is it one after a restart of the site, or in a round that the server invents."""
    site = Guarded(tmp_path, replace(OPEN, max_rounds=1), updates(3))
    first = site.ask("train", 1, 0, tensors=parameters(1.0)).update
    assert first is not None
    for number in range(2, 6):
        if number == 4:
            site.restart()
        again = site.ask("train", number, 0, preparing=True, tensors=parameters(1.0))
        assert again.update is not None
        assert torch.equal(again.update.tensors["lstm.w"], first.tensors["lstm.w"])
    counted = {
        (line["question"], line["update"])
        for line in site.ledger
        if not line["refusal"]
    }
    assert len(counted) == 1
    reply = site.ask("train", 9, 0, tensors=parameters(2.0))
    assert "refused by max_rounds" in reply.refusal


def test_processes_that_answer_at_the_same_time_share_the_number_of_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has counted before any of them has written its line, unless they wait."""
    first = Guarded(tmp_path, replace(OPEN, max_rounds=1), updates(1))
    runs = [first.in_another_run(f"run{n}", updates(1)) for n in range(2, 6)]
    append = Ledger.append

    def append_slowly(ledger: Ledger, entry: Entry) -> None:
        time.sleep(0.2)
        append(ledger, entry)

    monkeypatch.setattr(Ledger, "append", append_slowly)

    def ask(n: int) -> Reply:
        return runs[n].ask("train", 1, tensors=parameters(float(n)))

    with ThreadPoolExecutor(len(runs)) as threads:
        replies = list(threads.map(ask, range(len(runs))))
    assert sum(reply.update is not None for reply in replies) == 1
    assert all("refused by max_rounds" in r.refusal for r in replies if not r.update)


def test_processes_that_refuse_at_the_same_time_share_the_number_of_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which of a server's questions fail may depend on single notes."""
    first = Guarded(tmp_path, replace(OPEN, max_rounds=1), [])
    runs = [first.in_another_run(f"run{n}", []) for n in range(2, 6)]
    check_refusal = SiteGuard.check_refusal
    all_have_counted = threading.Barrier(len(runs), timeout=30)

    def check_and_wait(*arguments: Any) -> None:
        check_refusal(*arguments)
        all_have_counted.wait()

    monkeypatch.setattr(SiteGuard, "check_refusal", check_and_wait)

    def ask(n: int) -> Reply:
        return runs[n].ask("train", 1, tensors=parameters(float(n)))

    with ThreadPoolExecutor(len(runs)) as threads:
        replies = list(threads.map(ask, range(len(runs))))
    told = [reply.refusal for reply in replies]
    assert sum("the task failed" in refusal for refusal in told) == 1
    assert sum("refused by max_rounds" in refusal for refusal in told) == 3
    assert len({line["question"] for line in first.ledger if line["question"]}) == 1


def test_a_question_after_a_saved_state_is_recognised(tmp_path: Path) -> None:
    """What led to a state is saved with it, so the request before need not be there."""
    site = Guarded(tmp_path, replace(OPEN, max_rounds=2), updates(5))
    assert site.ask("train", 1, 0).update is not None
    assert site.ask(CHECKPOINT, 2, 1).update is not None
    assert site.ask("train", 3, 1).update is not None
    site.restart()
    assert site.ask("train", 4, 1).update is not None
    # The same request to a site in another state is another question.
    assert "refused by max_rounds" in site.ask("train", 5, 4).refusal


@pytest.mark.parametrize(
    "changes",
    [
        {"tensors": parameters(2.0)},
        {"options": {"cycle": 3}},
        {"counted": 1},
    ],
)
def test_a_different_question_with_an_equal_answer_counts_as_a_round(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Otherwise a server could ask for as many words as it likes, and only those that
    occur at the site would cost it a round."""
    site = Guarded(tmp_path, replace(OPEN, max_rounds=1), updates(1))
    question: dict[str, Any] = {"counted": 0, "tensors": parameters(1.0)}
    assert site.ask("train", 1, **question).update is not None
    refused = site.ask("train", 2, **{**question, **changes})
    assert "refused by max_rounds" in refused.refusal
    assert "would be number 2 of this job" in site.messages[-1]


def test_tasks_without_an_answer_are_part_of_the_question(
    tmp_path: Path,
) -> None:
    """Such a task costs nothing, so a server could otherwise vary it at will."""
    site = Guarded(tmp_path, replace(OPEN, max_rounds=2), updates(1))
    answered = []
    for number, value in ((1, 1.0), (3, 2.0), (5, 2.0), (7, 3.0)):
        prepared = site.ask("prepare", number, 0, tensors=parameters(value))
        assert prepared.update == Update()
        answered.append(site.ask("train", number + 1, number).update is not None)
    assert answered == [True, True, True, False]


ZEROS = torch.zeros(4)


@pytest.mark.parametrize(
    "changed_update",
    [
        Update({"lstm.w": ZEROS}, 2.0, {"loss": 1.5}),
        Update({"lstm.w": ZEROS}, 2.0, {"error": 1.0}),
        Update({"lstm.w": ZEROS}, 3.0, {"loss": 1.0}),
        Update({"lstm.w": ZEROS + 1}, 2.0, {"loss": 1.0}),
        Update({"lstm.v": ZEROS}, 2.0, {"loss": 1.0}),
    ],
)
def test_a_different_answer_to_the_same_question_counts_as_a_round(
    tmp_path: Path, changed_update: Update
) -> None:
    """As in another run of the job, with other draws. Any number of it may differ."""
    same = Update({"lstm.w": ZEROS}, 2.0, {"loss": 1.0})
    site = Guarded(tmp_path, replace(OPEN, max_rounds=1), [same])
    assert site.ask("train", 1, 0).update is not None
    assert site.in_another_run("run2", [same]).ask("train", 1, 0).update is not None
    refused = site.in_another_run("run3", [changed_update]).ask("train", 1, 0)
    assert "refused by max_rounds" in refused.refusal


def test_the_hash_of_an_update_covers_each_number() -> None:
    """By the documented text of the hash, for an update of one tensor and two counts."""
    update = Update({"w": torch.tensor([1.0, 2.0])}, 3.0, {"b": 0.5, "a": 1.0})
    tensor = hashlib.sha256(np.array([1, 2], np.float32).tobytes()).hexdigest()
    tensors = hashlib.sha256(f"w float32 [2] {tensor}\n".encode()).hexdigest()
    text = f'["{tensors}", "{(3.0).hex()}", [["a", "{(1.0).hex()}"], ["b", "{(0.5).hex()}"]]]'
    expected = hashlib.sha256(text.encode()).hexdigest()
    assert hash_update(update, describe_tensors(update.tensors)) == expected
    assert hash_update(Update(), ()) == ""
    assert hash_update(Update(weight=2.0), ()) != ""


def test_a_task_without_training_is_allowed_after_the_rounds(tmp_path: Path) -> None:
    """As a calibration does, at most 100 times."""
    site = Guarded(tmp_path, replace(OPEN, max_rounds=2), updates(200))
    site.covered = {"patients": 60}
    assert served(site, "calibrate", 1, 104) == 102


def test_each_calibrated_model_counts_as_a_round(tmp_path: Path) -> None:
    """Questions about one model do not, up to 100 above the rounds."""
    site = Guarded(tmp_path, replace(OPEN, max_rounds=2), updates(200))
    site.covered = {"patients": 60}
    models = ["a" * 64, "b" * 64, "c" * 64]
    site.guard.find_model_digest = lambda task: models[0]
    assert served(site, "calibrate", 1, 5) == 5
    del models[0]
    assert served(site, "calibrate", 6, 5) == 5
    del models[0]
    assert served(site, "calibrate", 11, 5) == 0
    assert "would be number 3 of this job" in site.messages[-1]


def test_questions_about_one_model_are_bounded(tmp_path: Path) -> None:
    site = Guarded(tmp_path, replace(OPEN, max_rounds=2), updates(200))
    site.covered = {"patients": 60}
    site.guard.find_model_digest = lambda task: "a" * 64
    assert served(site, "calibrate", 1, 60) == 60
    site.restart()
    site.guard.find_model_digest = lambda task: "a" * 64
    assert served(site, "calibrate", 61, 60) == 42


def test_the_number_of_evaluations_is_bounded(tmp_path: Path) -> None:
    """A server that lies could otherwise ask about as many models as it likes."""
    counts = [Update(metrics={"n": 1.0 * n}) for n in range(200)]
    site = Guarded(tmp_path, replace(OPEN, max_rounds=1), counts)
    assert served(site, "evaluate", 1, 105) == 101
    assert "would be number 2 of this job" in site.messages[-1]


def test_equal_counts_of_different_models_are_different_evaluations(
    tmp_path: Path,
) -> None:
    """Or a count that is mostly 0 would tell about any number of models."""
    counts = [Update(metrics={"n": 0.0})]
    site = Guarded(tmp_path, replace(OPEN, max_rounds=1), counts)
    answered = 0
    for number in range(1, 106):
        model = parameters(float(number))
        reply = site.ask("evaluate", number, 0, tensors=model)
        answered += reply.update is not None
    assert answered == 101
    again = site.ask("evaluate", 200, 0, tensors=parameters(1.0))
    assert again.update == counts[0]


def test_a_count_does_not_count_as_a_round(tmp_path: Path) -> None:
    site = Guarded(
        tmp_path,
        replace(OPEN, max_rounds=1),
        [Update(metrics={"n": 1.0 * n}) for n in range(9)],
    )
    assert served(site, "evaluate", 1, 5) == 5


# a ledger that an earlier version wrote


def write_as_earlier_version(site: Guarded, updates: dict[str, str]) -> None:
    """Write a site's ledger anew without questions, and with a hash of tensors alone.

    Args:
        site: The site.
        updates: Hash of a line's first tensor to what the earlier version recorded.
    """
    path = Ledger.in_kit(site.kit).path
    before = FIRST
    lines = []
    for line in site.ledger:
        del line["question"], line["model"], line["hash"]
        if line["update"]:
            line["update"] = updates[line["tensors"][0]["sha256"]]
        line["prev"] = before
        body = json.dumps(line, separators=(",", ":")).removesuffix("}").encode()
        before = hashlib.sha256(body).hexdigest()
        lines.append(body + f',"hash":"{before}"}}\n'.encode())
    path.write_bytes(b"".join(lines))
    head = Head(len(lines), path.stat().st_size, hash=before)
    get_head_path(path).write_bytes(encode_head(head))
    assert verify_ledger(path).is_intact
    site.restart()


def tensor_hash(update: Update) -> str:
    value = update.tensors["lstm.w"].numpy()
    return hashlib.sha256(value.tobytes()).hexdigest()


def hash_by_earlier_version(update: Update) -> str:
    line = f"lstm.w float32 [4] {tensor_hash(update)}\n"
    return hashlib.sha256(line.encode()).hexdigest()


def test_updates_counted_by_an_earlier_version_still_count(tmp_path: Path) -> None:
    site_updates = updates(9)
    site = Guarded(tmp_path, replace(OPEN, max_rounds=3), site_updates)
    assert served(site, "train", 1, 2) == 2
    recorded = {
        tensor_hash(each): hash_by_earlier_version(each) for each in site_updates
    }
    write_as_earlier_version(site, recorded)
    # The stored answer to the newest question is the one that has left already.
    site.policy = replace(OPEN, max_rounds=2)
    assert site.ask("train", 2, 1, round=0).update is not None
    site.policy = replace(OPEN, max_rounds=3)
    assert served(site, "train", 3, 4) == 1
    assert "would be number 4 of this job" in site.messages[-1]


def test_models_counted_by_an_earlier_version_still_count(tmp_path: Path) -> None:
    """Also how many questions it answered about them."""
    site_updates = updates(200)
    site = Guarded(tmp_path, replace(OPEN, max_rounds=2), site_updates)
    site.covered = {"patients": 60}
    assert served(site, "calibrate", 1, 60) == 60
    models = ["a" * 64, "b" * 64]
    recorded = {
        tensor_hash(each): models[number % 2]
        for number, each in enumerate(site_updates)
    }
    write_as_earlier_version(site, recorded)
    site.guard.find_model_digest = lambda task: "c" * 64
    assert served(site, "calibrate", 61, 1) == 0
    assert "would be number 3 of this job" in site.messages[-1]
    site.guard.find_model_digest = lambda task: models[0]
    assert served(site, "calibrate", 61, 60) == 42


# the ledger


def test_every_message_is_recorded_with_its_kind(tmp_path: Path) -> None:
    """Own scores are not masked because a secure sum is on; a task's name may not be
    text."""
    public = {"@scores": lambda update: {"scores": torch.ones(9, dtype=torch.uint8)}}
    site = Guarded(tmp_path, MASKED, updates(1), secure=True, public=public)
    assert site.ask("@scores", 1).update is not None
    assert "has no task" in site.ask("give it now", 2).refusal
    assert "has no task" in site.ask("x" * 400, 3).refusal
    site.host.handle(b"noise")
    site.ask(END, 4)
    entries = [(line["task"], line["masked"], line["refusal"]) for line in site.ledger]
    assert entries == [
        ("@scores", False, False),
        ("-", False, True),
        ("-", False, True),
        ("-", False, True),
        ("@end", False, False),
    ]
    assert {line["job"] for line in site.ledger} == {fingerprint_table(TABLE)}
    assert [t["name"] for t in site.ledger[0]["tensors"]] == ["scores"]


def test_a_reply_that_the_ledger_cannot_record_does_not_leave(tmp_path: Path) -> None:
    """Not even a refusal; and no journal hands it out later."""
    site = Guarded(tmp_path, OPEN, updates(1))
    ledger = Ledger.in_kit(tmp_path).path
    site.ask(BEGIN, 1)
    before = ledger.read_bytes()
    ledger.write_bytes(before[:-9] + b"00000" + before[-4:])
    request = encode_message(
        Request("job-1", 1, 2, "train", first=True, counted=dict.fromkeys(SITES, 0))
    )
    for frame in (request, request, b"noise"):
        with pytest.raises(RefusedError) as refusal:
            site.host.handle(frame)
        assert getattr(refusal.value, "public", "") == (
            "site 'b' cannot record this message in its ledger"
        )
        assert "ledger verify" in str(refusal.value)
    ledger.write_bytes(before)
    assert site.host.handle(request)
    assert verify_ledger(ledger).is_intact
    assert [line["task"] for line in site.ledger] == [BEGIN, "train"]


def test_a_full_disk_is_a_temporary_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Guarded(tmp_path, OPEN, updates(1))
    real, writes_left = site.guard._ledger.append, [1]

    def full(entry: Any) -> Any:
        writes_left[0] -= 1
        if writes_left[0] == 0:
            raise module.FednotesError(
                f"{tmp_path}/ledger.jsonl: cannot be written (no space)"
            )
        return real(entry)

    monkeypatch.setattr(site.guard._ledger, "append", full)
    reply = site.ask("train", 1)
    assert (reply.later, reply.refusal) == (
        True,
        "site 'b' cannot record this message in its ledger",
    )
    assert "no space" in site.messages[-1]


# the clock: what counts rounds is the ledger, not the time

NOON = datetime(2030, 5, 6, 12, tzinfo=UTC)
ROUNDS = replace(OPEN, max_rounds=3)
NIGHT = replace(OPEN, hours="11:00-13:00", timezone="UTC")


class Clock:
    """What the site takes for the time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.time = NOON
        patch.setattr(module, "read_clock", lambda: self.time)

    def move(self, **by: float) -> None:
        self.time += timedelta(**by)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


@pytest.mark.parametrize("years", [-20, 20])
def test_a_jumping_clock_does_not_permit_more_rounds(
    tmp_path: Path, clock: Clock, years: int
) -> None:
    """Before the approval's time stamp no round counted; nor may an approval of the
    future hide those after it."""
    site = Guarded(tmp_path, ROUNDS, updates(60))
    assert served(site, "train", 1, 2) == 2
    clock.move(days=365 * years)
    assert served(site, "train", 3, 6) == 1
    site.restart()
    assert served(site, "train", 4, 6) == 0
    site.approve()  # by the clock as it is now, before or after everything
    clock.move(days=-365 * years)
    assert served(site, "train", 4, 9) == 3
    assert served(site, "train", 13, 9) == 0


def test_an_approval_records_the_end_of_the_ledger(
    tmp_path: Path, clock: Clock
) -> None:
    site = Guarded(tmp_path, ROUNDS, updates(60))
    assert open_approvals(tmp_path).find_ledger_hash_at_approval(TABLE) == FIRST
    served(site, "train", 1, 2)
    site.approve()
    assert (
        open_approvals(tmp_path).find_ledger_hash_at_approval(TABLE)
        == Ledger.in_kit(tmp_path).read_head().hash
    )
    assert (
        open_approvals(tmp_path).find_ledger_hash_at_approval({"name": "another"}) == ""
    )


def test_all_lines_count_if_the_approval_belongs_to_another_ledger(
    tmp_path: Path, clock: Clock
) -> None:
    """A ledger was begun anew after the approval, or an earlier version noted no place."""
    site = Guarded(tmp_path, ROUNDS, updates(60))
    served(site, "train", 1, 2)
    site.approve()
    for path in (
        Ledger.in_kit(tmp_path).path,
        get_head_path(Ledger.in_kit(tmp_path).path),
    ):
        path.rename(path.with_suffix(".evidence"))
    site.restart()
    assert served(site, "train", 3, 9) == 3
    approvals_file = open_approvals(tmp_path).path
    table: dict[str, Any] = json.loads(approvals_file.read_text())
    for decision in table["decisions"]:
        del decision["ledger"]
    approvals_file.write_text(json.dumps(table))
    site.restart()
    assert served(site, "train", 12, 9) == 0


def test_permitted_hours_are_not_checked_by_a_clock_that_was_set_back(
    tmp_path: Path, clock: Clock
) -> None:
    site = Guarded(tmp_path, NIGHT, updates(60))
    assert served(site, "train", 1, 1) == 1
    clock.move(minutes=-4)  # as clocks are corrected
    assert served(site, "train", 2, 1) == 1
    # inside the hours by its own word, the day before
    clock.move(hours=-20, minutes=30)
    clock.move(hours=-4)
    refused = site.ask("train", 3, 2)
    assert (refused.update, refused.later) == (None, True)
    assert refused.refusal == "the clock of site 'b' was set back"
    assert (
        "set the clock; if the ledger is wrong, approve the job again"
        in site.messages[-1]
    )
    site.restart()
    assert served(site, "train", 3, 1) == 0
    site.policy = replace(NIGHT, hours="")
    assert served(site, "train", 3, 1) == 1  # no rule asks for the time


def test_a_new_approval_recovers_from_a_clock_that_was_ahead(
    tmp_path: Path, clock: Clock
) -> None:
    site = Guarded(tmp_path, NIGHT, updates(60))
    clock.move(days=3650)
    assert served(site, "train", 1, 1) == 1
    clock.move(days=-3650)
    assert served(site, "train", 2, 1) == 0
    site.approve()
    assert served(site, "train", 2, 1) == 1


# questions that are refused after their task has read notes


def not_finite(*values: float) -> list[Update]:
    """Return an update for each value; those of NaN are refused."""
    return [Update({"lstm.w": torch.full((4,), value)}, 2.0) for value in values]


def ask_each(site: Guarded, count: int) -> list[str]:
    """Ask so many different questions; return what was refused, "" for an answer."""
    refusals = []
    counted = 0
    for number in range(1, count + 1):
        tensors = {"x": torch.tensor([float(number)])}
        reply = site.ask("train", number, counted, tensors=tensors)
        refusals.append(reply.refusal)
        counted = reply.has
    return refusals


def test_refused_questions_still_count_as_rounds_after_a_restart(
    tmp_path: Path,
) -> None:
    rules = replace(OPEN, max_rounds=2)
    site = Guarded(tmp_path, rules, not_finite(math.nan))
    refusals = ask_each(site, 2)
    assert all("is not finite" in refusal for refusal in refusals)
    site.restart()
    # whether or not the site could answer, it says the same
    for value in (math.nan, 1.0):
        site.updates[:] = not_finite(value)
        reply = site.ask("train", 9, 0, tensors={"x": torch.tensor([9.0])})
        assert "refused by max_rounds" in reply.refusal
    site.approve()
    assert site.ask("train", 10, 0).update is not None


def test_a_refused_question_that_is_answered_later_counts_once(tmp_path: Path) -> None:
    site = Guarded(tmp_path, replace(OPEN, max_rounds=1), not_finite(math.nan))
    assert "is not finite" in site.ask("train", 1, 0).refusal
    assert "is not finite" in site.ask("train", 2, 0).refusal  # again
    site.updates[:] = not_finite(1.0)
    assert site.ask("train", 3, 0).update is not None
    assert site.ask("train", 4, 0).update is not None


def test_refusals_before_a_task_reads_notes_do_not_count_as_rounds(
    tmp_path: Path,
) -> None:
    """Of tensors that nothing can be computed with, other options, another task."""
    site = Guarded(tmp_path, replace(OPEN, max_rounds=1), updates(1))
    wrong = {"x": torch.tensor([math.inf])}
    assert "nothing was computed" in site.ask("train", 1, tensors=wrong).refusal
    assert "has no task" in site.ask("guess", 2).refusal
    assert not any(line["question"] for line in site.ledger)
    assert site.ask("train", 3).update is not None


def test_refused_evaluations_are_bounded_like_answered_ones(tmp_path: Path) -> None:
    site = Guarded(tmp_path, replace(OPEN, max_rounds=2), not_finite(math.nan))
    refusals = []
    for number in range(1, 2 + module.SPARE + 5):
        tensors = {"x": torch.tensor([float(number)])}
        site.covered = {}
        refusals.append(site.ask("evaluate", number, 0, tensors=tensors).refusal)
    assert sum("is not finite" in refusal for refusal in refusals) == 2 + module.SPARE


def test_refused_questions_about_models_count_as_models(tmp_path: Path) -> None:
    site = Guarded(tmp_path, replace(OPEN, max_rounds=2), not_finite(math.nan))
    site.covered = {}
    refusals = []
    for number in range(1, 6):
        site.guard.find_model_digest = lambda task: "a model"
        tensors = {"x": torch.tensor([float(number)])}
        refusals.append(site.ask("calibrate", number, 0, tensors=tensors).refusal)
    assert sum("is not finite" in refusal for refusal in refusals) == 2


def test_the_number_of_models_whose_scores_leave_is_bounded(tmp_path: Path) -> None:
    """A server has a site score any model; each counts as a round, however it scores.

    Otherwise models that differ from an earlier one only where a word occurs would say
    whether it does. `prepare` takes the part of `finish`.
    """
    shared = {SCORES: lambda _site: {"scores": torch.tensor([1])}}
    site = Guarded(tmp_path, replace(OPEN, max_rounds=2), [], public=shared)

    def share_scores(model: int, number: int) -> str:
        tensors = {"w": torch.tensor([float(model)])}
        told = site.ask("prepare", 2 * number, 2 * number - 2, tensors=tensors)
        assert told.refusal == ""
        return site.ask(SCORES, 2 * number + 1, 2 * number).refusal

    for number, model in enumerate((7, 7, 8, 8), 1):
        assert share_scores(model, number) == ""
    assert "refused by max_rounds" in share_scores(9, 5)
    site.restart()
    assert "refused by max_rounds" in share_scores(10, 6)
    site.approve()
    assert share_scores(11, 7) == ""
