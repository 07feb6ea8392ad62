"""What a site approved: hashes, decisions and differences."""

from __future__ import annotations

import copy
import datetime as dt
import hashlib
import json
import os
import random
import re
import stat
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fednotes.apps.deployment.rules import approval, guard
from fednotes.apps.deployment.rules.approval import Approvals
from fednotes.apps.deployment.rules.guard import (
    MAX_PENDING,
    PENDING_SECONDS,
    NotApproved,
    find_job,
    read_pending_jobs,
    require_approved,
    settle_job,
)
from fednotes.apps.deployment.rules.policy import Policy
from fednotes.core import bounds
from fednotes.core.errors import ConfigError, FednotesError, RefusedError
from fednotes.core.tables import compare_tables, fingerprint_table

NOON = dt.datetime(2026, 3, 1, 12, tzinfo=dt.UTC)
JOB: dict[str, Any] = {
    "name": "ner",
    "method": "fedner",
    "training": {"epochs": 3, "rate": 1e-3, "private": ["lstm", "crf"]},
    "sites": {"h 1": {"path": "$DATA/a", "label_map": {"ADR": "Drug"}}},
}


def test_the_fingerprint_is_the_hash_of_canonical_json() -> None:
    """SHA-256 of the text, written here by hand."""
    text = '{"a":[1,2.5,true,null],"b":{"\\u00e4":"x"}}'
    table = {"b": {"ä": "x"}, "a": [1, 2.5, True, None]}
    assert fingerprint_table(table) == hashlib.sha256(text.encode()).hexdigest()
    assert fingerprint_table(
        {"a": (1, 2.5, True, None), "b": {"ä": "x"}}
    ) == fingerprint_table(table)
    travelled = json.loads(json.dumps(JOB))
    assert fingerprint_table(dict(reversed(travelled.items()))) == fingerprint_table(
        JOB
    )
    others = [
        {"a": 1},
        {"a": 1.0},
        {"a": True},
        {"a": "1"},
        {"a": [1]},
        {"a": {}},
        {"a": None},
        {},
    ]
    assert len({fingerprint_table(table) for table in others}) == len(others)


class Text(str):
    """Text that could bring methods of its own."""


@pytest.mark.parametrize(
    "value",
    [
        print,
        Path("/etc"),
        b"bytes",
        {1, 2},
        dt.date(2026, 1, 1),
        float("nan"),
        float("inf"),
        2**63,
        1j,
        Text("x"),
        "half \ud800",
        {1: "key"},
        {"\ud800": 1},
        object(),
    ],
)
def test_a_table_with_anything_but_json_is_refused(tmp_path: Path, value: Any) -> None:
    table = {"name": "ner", "training": {"steps": [1, value]}}
    for act in (fingerprint_table, Approvals(tmp_path).read_status):
        with pytest.raises(RefusedError, match=r"training\.steps\[1\]"):
            act(table)
    with pytest.raises(RefusedError):
        Approvals(tmp_path).decide("approved", table, "anna", NOON)
    with pytest.raises(RefusedError):
        compare_tables(JOB, table)
    assert list(tmp_path.iterdir()) == []


def test_a_long_key_above_many_values_is_refused() -> None:
    """Each value is shown with its dotted key: 400 KB would take more than 8 GB."""
    values = {str(number): 0 for number in range(20_000)}
    shapes: list[dict[str, Any]] = [{"k" * 200_000: values}, {"a": {}}]
    inner = shapes[1]["a"]
    for _ in range(20):
        inner["k" * 100] = {}
        inner = inner["k" * 100]
    inner |= values
    for shape in shapes:
        with pytest.raises(RefusedError, match="more than 1,000 characters"):
            fingerprint_table({**JOB, "x": shape})
        with pytest.raises(RefusedError, match="more than 1,000 characters"):
            compare_tables({}, {**JOB, "x": shape})
    fingerprint_table({**JOB, "x": {"k" * 900: values}})


def test_a_table_that_is_nested_too_deeply_or_contains_itself_is_refused() -> None:
    table: dict[str, Any] = {}
    table["self"] = table
    with pytest.raises(RefusedError, match="deep"):
        fingerprint_table(table)


def nested(number: int, values: int) -> dict[str, Any]:
    """Return a job whose table is a list of zeros, 20 deep."""
    value: Any = [0] * values
    for _ in range(20):
        value = [value]
    return {"name": f"job {number}", "job": {"training": {"outputs": value}}}


def test_decisions_are_read_again_only_if_they_have_changed(tmp_path: Path) -> None:
    """A site checks its approval with each message; other jobs may be large."""
    book = Approvals(tmp_path)
    book.decide("rejected", {"name": "large"}, "a", NOON)
    book.decide("approved", JOB, "a", NOON)
    with mock.patch.object(approval, "read_json", wraps=approval.read_json) as read:
        assert [book.read_status(JOB) for _ in range(5)] == ["approved"] * 5
        assert read.call_count == 1
        Approvals(tmp_path).decide("rejected", JOB, "a", NOON)
        assert book.read_status(JOB) == "rejected"


def test_rejected_jobs_cannot_make_the_decisions_unreadable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise, no approval would hold: two rejected jobs of 1 MB took 70 MB."""
    monkeypatch.setattr(bounds, "JSON_VALUES", 2_000)
    approvals = Approvals(tmp_path)
    approvals.decide("approved", JOB, "anna", NOON)
    approvals.decide("rejected", nested(1, 1_000), "anna", NOON)
    with pytest.raises(ConfigError, match=r"too large .* nothing was decided"):
        approvals.decide("rejected", nested(2, 1_000), "anna", NOON)
    assert approvals.read_status(JOB) == "approved"
    assert approvals.read_status(nested(1, 1_000)) == "rejected"
    approvals.decide("rejected", JOB, "anna", NOON)  # an approval can be withdrawn
    assert approvals.read_status(JOB) == "rejected"


def test_nested_tables_are_stored_without_indentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "FILE", 100_000)
    approvals = Approvals(tmp_path)
    approvals.decide("rejected", nested(1, 10_000), "anna", NOON)
    assert approvals.read_status(nested(1, 10_000)) == "rejected"


def test_a_job_that_no_person_could_read_does_not_wait_for_approval(
    tmp_path: Path,
) -> None:
    with pytest.raises(RefusedError, match="no person could read"):
        require_approved(tmp_path, "a", nested(1, 500_000), Policy())
    assert list(tmp_path.iterdir()) == []


def ask(kit: Path, seed: int) -> dict[str, Any]:
    """Ask a kit to approve the job with a seed, as the server does; return its table."""
    table = {**JOB, "seed": seed}
    with pytest.raises(NotApproved):
        require_approved(kit, "a", table, Policy())
    return table


def list_waiting_seeds(kit: Path) -> list[int]:
    return [job.table["seed"] for job in read_pending_jobs(kit)]


def test_a_server_that_alternates_jobs_replaces_neither(tmp_path: Path) -> None:
    """Otherwise it could keep people from ever approving the one that they want."""
    for _ in range(3):
        wanted = ask(tmp_path, 1)
        other = ask(tmp_path, 2)
        assert list_waiting_seeds(tmp_path) == [2, 1]
    job = find_job(tmp_path, fingerprint_table(wanted)[:12])
    settle_job(tmp_path, job.table, approve=True, by="anna")
    require_approved(tmp_path, "a", wanted, Policy())
    assert [job.table for job in read_pending_jobs(tmp_path)] == [other]


def test_the_newest_waiting_jobs_are_kept(tmp_path: Path) -> None:
    """A job that the server asks for again is new, but keeps its place in the list."""
    for seed in range(MAX_PENDING):
        ask(tmp_path, seed)
    ask(tmp_path, 0)
    ask(tmp_path, MAX_PENDING)
    assert list_waiting_seeds(tmp_path) == [*range(MAX_PENDING, 1, -1), 0]


def test_requests_that_are_repeated_keep_their_order(tmp_path: Path) -> None:
    """Otherwise the jobs of two runs would change places while a person reads."""
    for seed in (1, 2, 1):
        ask(tmp_path, seed)
    assert list_waiting_seeds(tmp_path) == [2, 1]


@pytest.mark.parametrize("approve", [True, False])
def test_a_decision_removes_only_its_own_job(tmp_path: Path, approve: bool) -> None:
    """Nobody has decided on the others."""
    ask(tmp_path, 1)
    decided = ask(tmp_path, 2)
    ask(tmp_path, 3)
    settle_job(tmp_path, decided, approve=approve, by="anna")
    assert list_waiting_seeds(tmp_path) == [3, 1]


def test_a_job_that_is_approved_while_the_server_asks_does_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise rejecting the waiting job would withdraw the approval."""
    write = guard.write_json

    def approve_and_write(path: Path, pending: dict[str, Any]) -> None:
        settle_job(tmp_path, pending["table"], approve=True, by="anna")
        write(path, pending)

    monkeypatch.setattr(guard, "write_json", approve_and_write)
    approved = ask(tmp_path, 1)
    assert list_waiting_seeds(tmp_path) == []
    require_approved(tmp_path, "a", approved, Policy())


def test_a_job_stops_waiting_when_the_server_no_longer_asks_for_it(
    tmp_path: Path,
) -> None:
    """An aborted run leaves its job. Only the last request for a job counts."""
    ask(tmp_path, 1)
    (path,) = tmp_path.rglob("pending/*.json")
    last_time = path.stat().st_mtime - PENDING_SECONDS
    os.utime(path, (last_time + 60, last_time + 60))
    assert list_waiting_seeds(tmp_path) == [1]
    os.utime(path, (last_time - 60, last_time - 60))
    assert list_waiting_seeds(tmp_path) == []
    ask(tmp_path, 1)
    assert list_waiting_seeds(tmp_path) == [1]

    os.utime(path, (last_time - 60, last_time - 60))
    ask(tmp_path, 2)
    assert not path.exists()


def test_a_damaged_request_is_named_with_a_remedy(tmp_path: Path) -> None:
    ask(tmp_path, 1)
    (path,) = tmp_path.rglob("pending/*.json")
    for damaged in ("{", "[]", path.read_text().replace('"seed": 1', '"seed": 2')):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match=r"pending.*: damaged: delete it"):
            read_pending_jobs(tmp_path)


def test_decisions_are_stored(tmp_path: Path) -> None:
    folder = tmp_path / "site" / "approvals"
    book = Approvals(folder)
    changed = copy.deepcopy(JOB)
    changed["training"]["epochs"] = 30
    assert book.read_status(JOB) == "unknown"
    assert book.find_last_approval() is None
    assert not folder.exists()
    assert book.decide("approved", JOB, "anna", NOON) == fingerprint_table(JOB)
    assert [book.read_status(t) for t in (JOB, changed)] == ["approved", "changed"]
    assert book.read_status({**JOB, "name": "other"}) == "unknown"
    assert book.read_status({k: v for k, v in JOB.items() if k != "name"}) == "unknown"
    book.decide("rejected", changed, "bert", NOON + dt.timedelta(hours=1))
    assert [Approvals(folder).read_status(t) for t in (JOB, changed)] == [
        "approved",
        "rejected",
    ]
    last = Approvals(folder).find_last_approval()
    assert last is not None
    assert (last.table, last.by, last.when) == (
        JOB,
        "anna",
        "2026-03-01T12:00:00+00:00",
    )
    assert compare_tables(last.table, changed) == ("~ training.epochs: 3 → 30",)
    book.decide("approved", changed, "bert", NOON)
    assert book.find_last_approval().table == changed  # type: ignore[union-attr]
    book.decide("rejected", changed, "bert", NOON)  # taken back
    assert book.find_last_approval().table == JOB  # type: ignore[union-attr]
    assert book.find_last_approval("other") is None
    book.decide("rejected", JOB, "anna", NOON)
    assert book.find_last_approval() is None
    # nothing of this name is approved now
    assert book.read_status({**JOB, "seed": 1}) == "unknown"
    assert [(d.decision, d.by) for d in book.read_decisions()] == [
        ("approved", "anna"),
        ("rejected", "bert"),
        ("approved", "bert"),
        ("rejected", "bert"),
        ("rejected", "anna"),
    ]


def test_the_file_is_private_and_written_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = Approvals(tmp_path / "a")
    book.decide("approved", JOB, "anna", NOON)
    assert stat.S_IMODE(book.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(book.path.parent.stat().st_mode) == 0o700
    before = book.path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(FednotesError, match=r"No space left.*nothing was decided"):
        book.decide("rejected", JOB, "anna", NOON)
    assert book.path.read_bytes() == before
    assert [p.suffix for p in book.path.parent.iterdir() if p != book.path] == [".lock"]
    (tmp_path / "file").write_text("")
    with pytest.raises(FednotesError, match="cannot be written"):
        Approvals(tmp_path / "file").decide("approved", JOB, "anna", NOON)
    with pytest.raises(ValueError, match="time zone"):
        book.decide("approved", JOB, "anna", NOON.replace(tzinfo=None))


def test_simultaneous_decisions_are_all_stored(tmp_path: Path) -> None:
    book = Approvals(tmp_path)
    jobs = [{**JOB, "seed": seed} for seed in range(12)]
    threads = [
        threading.Thread(target=book.decide, args=("approved", j, "anna", NOON))
        for j in jobs
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [book.read_status(job) for job in jobs] == ["approved"] * 12


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '"x"',
        "{}",
        '{"format": 2, "jobs": {}, "decisions": []}',
        '{"format": 1, "jobs": [], "decisions": []}',
        '{"format": 1, "jobs": {}, "decisions": [{"fingerprint": "0"}]}',
        "[" * 100_000,
    ],
)
def test_a_damaged_file_approves_nothing(tmp_path: Path, text: str) -> None:
    book = Approvals(tmp_path)
    book.path.write_text(text)
    for act in (
        book.read_status,
        lambda job: book.decide("approved", job, "anna", NOON),
    ):
        with pytest.raises(ConfigError, match=r"approvals\.json: .*move it away"):
            act(JOB)
    assert book.path.read_text() == text


def test_an_edited_job_or_decision_is_detected(tmp_path: Path) -> None:
    book = Approvals(tmp_path)
    book.decide("approved", JOB, "anna", NOON)
    text = book.path.read_text()
    for edited in (
        text.replace('"epochs": 3', '"epochs": 4'),
        text.replace('"approved"', '"yes"'),
    ):
        assert edited != text
        book.path.write_text(edited)
        with pytest.raises(ConfigError, match="was edited"):
            book.read_status(JOB)


def test_differences_are_listed_by_dotted_key() -> None:
    changed_job = copy.deepcopy(JOB)
    changed_job["training"] |= {"rate": 1.0, "private": ["lstm"]}
    changed_job["sites"]["h 1"]["label_map"] = {}
    changed_job["model"] = {"layers": [{"size": 3}, {"size": 4}]}
    del changed_job["method"]
    assert compare_tables(JOB, changed_job) == (
        '- method = "fedner"',
        "+ model.layers[0].size = 3",
        "+ model.layers[1].size = 4",
        '+ sites."h 1".label_map = {}',
        '- sites."h 1".label_map.ADR = "Drug"',
        '~ training.private: ["lstm", "crf"] → ["lstm"]',
        "~ training.rate: 0.001 → 1.0",
    )
    assert compare_tables({"a": 1}, {"a": True}) == ("~ a: 1 → true",)
    assert compare_tables({}, {"a.b": "ä"}) == ('+ "a.b" = "ä"',)
    sly = compare_tables({}, {"x": "a\x1b[2J\u202e\n", "y\u200b": 1})
    assert sly == ('+ "y\\u200b" = 1', '+ x = "a\\u001b[2J\\u202e\\n"')


def _table(rng: random.Random, depth: int = 0) -> Any:
    kinds = ["int", "float", "bool", "text", "list"] + ["table"] * (
        3 if depth < 3 else 0
    )
    kind = "table" if depth == 0 else rng.choice(kinds)
    if kind == "table":
        names = ("a", "b", "a.b", "a b", "c", "ä")
        return {name: _table(rng, depth + 1) for name in names if rng.random() < 0.4}
    if kind == "list":
        return [_table(rng, depth + 1) for _ in range(rng.randrange(3))]
    return {"int": rng.randrange(2), "float": rng.choice([0.0, 1.0]), "bool": rng.random() < 0.5,
            "text": rng.choice(["", "1", "a = b", "x → y"])}[kind]  # fmt: skip


def _leaves(
    value: Any, key: tuple[str | int, ...] = ()
) -> dict[tuple[str | int, ...], str]:
    """Return a table's values as canonical JSON, with keys as tuples."""
    if isinstance(value, dict) and (value or not key):
        return {
            k: v
            for n, inner in value.items()
            for k, v in _leaves(inner, (*key, n)).items()
        }
    if isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
        leaves = {}
        for number, inner in enumerate(value):
            leaves |= _leaves(inner, (*key, number))
        return leaves
    return {key: json.dumps(value, sort_keys=True, ensure_ascii=False)}


def test_random_tables_have_a_difference_for_each_changed_leaf() -> None:
    """Random tables, against the leaves found by `_list_leaves`: as many lines as leaves
    differ; none exactly for equal fingerprints; the way back swaps the signs."""
    rng, equal = random.Random(7), 0
    for _ in range(2000):
        before, after = _table(rng), _table(rng)
        if rng.random() < 0.3:
            after = json.loads(json.dumps(before))
        leaves_before, leaves_after = _leaves(before), _leaves(after)
        forward, backward = (
            compare_tables(before, after),
            compare_tables(after, before),
        )
        changed = [
            key
            for key in leaves_before.keys() & leaves_after.keys()
            if leaves_before[key] != leaves_after[key]
        ]
        numbers = [
            len(leaves_after.keys() - leaves_before.keys()),
            len(leaves_before.keys() - leaves_after.keys()),
            len(changed),
        ]
        assert [[line[0] for line in forward].count(sign) for sign in "+-~"] == numbers
        assert (forward == ()) == (
            fingerprint_table(before) == fingerprint_table(after)
        )
        equal += forward == ()
        swap = {"+": "-", "-": "+"}
        swapped = {swap[line[0]] + line[1:] for line in forward if line[0] in swap}
        assert swapped == {line for line in backward if line[0] in swap}
        assert len({re.split(" = |: ", line[2:])[0] for line in forward}) == len(
            forward
        )
        for key in leaves_before.keys() - leaves_after.keys():
            assert any(
                line[0] == "-" and line.endswith(f" = {leaves_before[key]}")
                for line in forward
            )
        for key in changed:
            assert any(
                line.endswith(f": {leaves_before[key]} → {leaves_after[key]}")
                for line in forward
            )
    assert 400 < equal < 1600
