"""The ledger: appends survive kills, and every other change is detected and located."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
import torch
from forked import fork
from ledgers import DIGEST, MESSAGE, lines_of, rehashed, write_ledger

from fednotes.apps.deployment.rules import ledger as module
from fednotes.apps.deployment.rules.ledger import (
    FIRST,
    Entry,
    Head,
    JobLines,
    Ledger,
    RunLines,
    check_lines,
    clean_name,
    decode_head,
    describe_tensors,
    encode_head,
    get_head_path,
    hash_tensors,
    parse_noted_end,
    read_ledger_lines,
    verify_ledger,
)
from fednotes.core.errors import ConfigError, DataError, FednotesError, RefusedError


class Killed(BaseException):
    """Stands for a kill -9: nothing that runs after it may tidy up."""


@contextmanager
def dying(monkeypatch: pytest.MonkeyPatch, writes: int, part: int) -> Iterator[None]:
    """Let the process die in the given write of an append, after `part` bytes of it."""
    writes_left = [writes]

    def write(file, place: int, raw: bytes, wait: bool = True) -> None:
        file.seek(place)
        writes_left[0] -= 1
        if writes_left[0] < 0:
            file.write(raw[:part])
            raise Killed
        file.write(raw)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_at", write)
        with pytest.raises(Killed):
            yield


def refuses(path: Path) -> None:
    """Check that nothing more is appended."""
    before = path.read_bytes()
    with pytest.raises(RefusedError, match=r"its end does not match .* sends nothing"):
        Ledger(path).append(MESSAGE)
    assert path.read_bytes() == before


def test_a_line_describes_the_message(tmp_path: Path) -> None:
    """Norms and hashes from NumPy and hashlib, the chain by hand."""
    path = tmp_path / "site" / "ledger.jsonl"
    gradient = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    tensors = {
        "lstm.weight": gradient,
        "half": torch.tensor([0.5, -2.0], dtype=torch.bfloat16),
        "codes": torch.tensor([3, -4], dtype=torch.int8),
        "one": torch.tensor([731.0]),
        "none": torch.zeros(0, 4),
        "broken": torch.tensor([float("nan"), 1.0]),
    }
    later = datetime(2026, 3, 1, 13, 30, tzinfo=timezone(timedelta(hours=2)))
    entry = Entry(
        later, "r", 7, "train", "CN=server,O=a", describe_tensors(tensors), 1234, DIGEST
    )
    ledger = Ledger(path)
    ledger.append(MESSAGE)
    end = ledger.append(entry)
    first, second = lines_of(path)
    table = json.loads(second)
    assert list(read_ledger_lines(path)) == [json.loads(first), table]
    assert table["prev"] == json.loads(first)["hash"]
    assert json.loads(first)["prev"] == "0" * 64
    body = second[: second.index(b',"hash"')]
    assert table["hash"] == hashlib.sha256(body).hexdigest() == end.hash
    assert (table["seq"], table["time"]) == (2, "2026-03-01T11:30:00.000Z")
    assert (table["round"], table["bytes"], table["receiver"]) == (
        7,
        1234,
        "CN=server,O=a",
    )
    facts = {t["name"]: t for t in table["tensors"]}
    assert list(facts) == list(tensors)
    array = gradient.numpy()
    assert facts["lstm.weight"] == {
        "name": "lstm.weight",
        "shape": [2, 3],
        "dtype": "float32",
        "norm": pytest.approx(np.sqrt(np.square(array.astype(np.float64)).sum())),
        "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
    }
    assert facts["half"]["norm"] == pytest.approx(np.sqrt(4.25))
    assert (
        facts["half"]["sha256"] == hashlib.sha256(bytes([0, 0x3F, 0, 0xC0])).hexdigest()
    )
    assert facts["codes"]["norm"] == 5.0
    assert facts["one"]["norm"] is None  # it would be the value
    assert facts["none"]["sha256"] == hashlib.sha256(b"").hexdigest()
    assert facts["broken"]["norm"] is None
    assert [json.loads(raw)["round"] for raw in lines_of(path)] == [0, 7]
    for file in (path, get_head_path(path)):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_masked_words_have_no_norm() -> None:
    words = {"sum": torch.tensor([[1, 2**62], [5, 0]]).t()}
    (facts,), (known,) = describe_tensors(words, norms=False), describe_tensors(words)
    assert (facts.norm, known.norm) == (None, pytest.approx(2.0**62))
    assert facts.sha256 == hashlib.sha256(words["sum"].numpy().tobytes()).hexdigest()


def test_one_hash_covers_several_tensors() -> None:
    """It changes with a value, a name, a shape and a type, and with nothing else."""
    tensors = {"a": torch.ones(4), "b": torch.zeros(2)}
    same = hash_tensors(describe_tensors(tensors))
    assert same == hash_tensors(describe_tensors(tensors, norms=False))
    assert hash_tensors(()) == ""
    others = (
        {**tensors, "b": torch.tensor([0.0, -0.0])},
        {"a": torch.ones(4), "c": torch.zeros(2)},
        {**tensors, "a": torch.ones(2, 2)},
        {**tensors, "b": torch.zeros(2, dtype=torch.int32)},
        {"a": torch.ones(4)},
    )
    assert (
        len({same, *(hash_tensors(describe_tensors(changed)) for changed in others)})
        == 6
    )


def test_a_name_that_could_be_text_is_replaced_by_a_dash() -> None:
    for name in ("train", "@keys", "a/b.c", "x" * 256):
        assert clean_name(name) == name
    for name in ("give it now", "", "Müller", "x" * 257, "a\n"):
        assert clean_name(name) == "-"


@pytest.mark.parametrize("field", ["run", "task", "receiver", "job", "tensor", "dtype"])
@pytest.mark.parametrize(
    "text", ["Anna Muster has pain", "Müller", "a\nb", "", 'x"y', "x" * 257]
)
def test_text_is_refused_without_quoting_it(
    tmp_path: Path, field: str, text: str
) -> None:
    """Planted strings: neither the files nor the error hold them."""
    path = tmp_path / "ledger.jsonl"
    write_ledger(path, 1)
    before = path.read_bytes()
    (facts,) = describe_tensors({"a": torch.ones(2)})
    change = {"tensor": "name", "dtype": "dtype"}.get(field)
    entry = replace(MESSAGE, **({field: text} if change is None else {}))
    if change:
        entry = replace(MESSAGE, tensors=(replace(facts, **{change: text}),))
    with pytest.raises(RefusedError, match="not a plain name") as refusal:
        Ledger(path).append(entry)
    assert path.read_bytes() == before
    assert not text or text not in str(refusal.value)


def test_the_files_contain_no_value(tmp_path: Path) -> None:
    """Planted numbers, in any usual spelling and as raw bytes."""
    path = tmp_path / "ledger.jsonl"
    values = np.array([0.7310585786, 482.9137, -31.41592653])
    tensors = describe_tensors(
        {"w": torch.from_numpy(values), "bias": torch.tensor([0.8808])}
    )
    Ledger(path).append(replace(MESSAGE, tensors=tensors))
    everything = path.read_bytes() + get_head_path(path).read_bytes()
    for value in (*values, 0.8808):
        for spelt in (f"{abs(value):.4f}"[:-1], repr(float(value))):
            assert spelt.encode() not in everything
        assert np.float64(value).tobytes() not in everything


@pytest.mark.parametrize("before", [0, 2])
def test_a_ledger_survives_a_kill_at_any_byte_of_an_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """Brute force: each byte of the line; the head is one small write, whole or not
    there."""
    length = len(lines_of(write_ledger(tmp_path / "x", before + 1).path)[-1])
    states = [(0, 0), (1, length), (2, 0), (2, 320)] + [
        (1, part) for part in range(length)
    ]
    for number, (writes, part) in enumerate(states):
        path = tmp_path / f"{number}"
        write_ledger(path, before)
        with dying(monkeypatch, writes, part):
            Ledger(path).append(replace(MESSAGE, round=before))
        report = verify_ledger(path)
        is_complete = writes == 2 or part == length
        assert report.is_intact, (writes, part, str(report))
        assert report.lines == before + is_complete
        cut = writes == 1 and 0 < part < length
        assert ("killed" in str(report.notes)) == (cut or (is_complete and part != 320))
        Ledger(path).append(replace(MESSAGE, round=9))
        last = list(read_ledger_lines(path))[-1]
        mended = "cut" if cut else "whole" if is_complete and part != 320 else None
        assert (last["round"], last.get("mended")) == (9, mended)
        assert verify_ledger(path) == replace(verify_ledger(path), faults=(), notes=())


def test_the_head_announces_a_line_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On disk, not only in this order: a power cut may keep what was written later."""
    path = tmp_path / "l"
    ledger = write_ledger(path, 2)
    size, observed = path.stat().st_size, list[tuple[bool, int]]()

    def fsync(number: int) -> None:
        head = decode_head(get_head_path(path).read_bytes())
        assert head is not None
        is_head = os.fstat(number).st_ino == get_head_path(path).stat().st_ino
        observed.append(
            (
                is_head and head.lines == 2 and head.next != "",
                path.stat().st_size - size,
            )
        )

    monkeypatch.setattr(os, "fsync", fsync)
    ledger.append(MESSAGE)
    assert observed[0] == (True, 0)
    assert observed[1][1] > 0
    assert len(observed) == 2


def test_a_foreign_line_is_not_accepted_as_the_announced_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole line with its own right hash, where a killed process had announced
    another."""
    path, foreign = tmp_path / "l", tmp_path / "other"
    for place in (path, foreign):
        write_ledger(place, 2)
    with dying(monkeypatch, 1, 0):
        Ledger(path).append(MESSAGE)
    Ledger(foreign).append(replace(MESSAGE, receiver="nobody"))
    announced = path.read_bytes()
    path.write_bytes(announced + lines_of(foreign)[2])
    refuses(path)
    assert not verify_ledger(path).is_intact
    path.write_bytes(announced)
    Ledger(path).append(MESSAGE)
    assert verify_ledger(path).is_intact


def test_nothing_is_appended_after_a_changed_last_line(tmp_path: Path) -> None:
    """As long as it was: only its hash tells."""
    path = tmp_path / "l"
    write_ledger(path, 3)
    good = path.read_bytes()
    for place in (-4, -30, -66):
        changed = bytearray(good)
        changed[place] = ord("0") if changed[place] != ord("0") else ord("1")
        path.write_bytes(changed)
        refuses(path)
    shorter = lines_of(write_ledger(tmp_path / "x", 3).path)[2].replace(
        b'"round":2', b'"round":7'
    )
    path.write_bytes(b"".join([*lines_of(tmp_path / "x")[:2], rehashed(shorter)]))
    assert path.stat().st_size == len(good)
    refuses(path)


def test_a_long_incomplete_line_is_removed_completely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next line is far shorter than what the killed process left."""
    path = tmp_path / "l"
    write_ledger(path, 1)
    tensors = describe_tensors(
        {f"layer.{number}": torch.ones(4) for number in range(50)}
    )
    with dying(monkeypatch, 1, 5_000):
        Ledger(path).append(replace(MESSAGE, tensors=tensors))
    Ledger(path).append(MESSAGE)
    assert verify_ledger(path).is_intact
    assert [t.get("mended") for t in read_ledger_lines(path)] == [None, "cut"]


def _append_without_end(path: Path, rounds: Path) -> None:
    """Append lines to a ledger, and write to a file which rounds were appended."""
    ledger = Ledger(path)
    with rounds.open("a", buffering=1) as file:
        for number in range(10**6):
            ledger.append(replace(MESSAGE, round=number))
            file.write(f"{number}\n")


@pytest.mark.slow
def test_a_killed_process_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    """A real kill -9, several times: every round that the process reported is in the
    ledger."""
    path = tmp_path / "l"
    for delay in (0.0, 0.013, 0.1):
        start = len(lines_of(path)) if path.exists() else 0
        rounds = tmp_path / f"rounds {delay}"
        rounds.touch()
        child = fork(_append_without_end, path, rounds)
        while not rounds.stat().st_size:
            assert child.is_alive()
            time.sleep(0.001)
        time.sleep(delay)
        child.kill()
        child.join()
        acknowledged = rounds.read_bytes().count(b"\n")
        report = verify_ledger(path)
        assert report.is_intact, str(report)
        assert start + acknowledged <= report.lines <= start + acknowledged + 1
        Ledger(path).append(MESSAGE)
        assert verify_ledger(path).is_intact


def test_a_full_disk_leaves_the_ledger_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "l"
    write_ledger(path, 2)
    before = path.read_bytes(), get_head_path(path).read_bytes()
    real = module._write_at
    writes_left = [1]

    def full(file, place: int, raw: bytes, *, wait: bool = True) -> None:
        writes_left[0] -= 1
        if writes_left[0] == -1:
            real(file, place, raw[:50], wait=wait)
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file, place, raw, wait=wait)

    monkeypatch.setattr(module, "_write_at", full)
    with pytest.raises(FednotesError, match=r"No space left on device.*was not sent"):
        Ledger(path).append(MESSAGE)
    assert (path.read_bytes(), get_head_path(path).read_bytes()) == before
    (tmp_path / "file").write_text("")
    with pytest.raises(FednotesError, match="cannot be written"):
        Ledger(tmp_path / "file" / "l").append(MESSAGE)


def _append_many(path: str, run: str) -> None:
    ledger = Ledger(Path(path))
    for number in range(60):
        ledger.append(replace(MESSAGE, run=run, round=number))


@pytest.mark.slow
def test_two_processes_wait_for_each_other(tmp_path: Path) -> None:
    path = tmp_path / "l"
    processes = [fork(_append_many, str(path), run) for run in ("a", "b")]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert verify_ledger(path).is_intact
    for run in ("a", "b"):
        assert [t["round"] for t in read_ledger_lines(path, run=run)] == list(range(60))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc/self/io")
def test_an_append_takes_the_same_time_at_round_10000(tmp_path: Path) -> None:
    """Counted by the kernel: bytes that an append reads and writes, and its system
    calls."""

    def cost(ledger: Ledger) -> dict[str, int]:
        def counters() -> dict[str, int]:
            lines = Path("/proc/self/io").read_text().splitlines()
            return {
                name: int(number)
                for name, number in (line.split(": ") for line in lines)
            }

        ledger.append(MESSAGE)  # whatever the first one imports
        before = counters()
        ledger.append(MESSAGE)
        after = counters()
        return {
            name: after[name] - before[name]
            for name in ("rchar", "wchar", "syscr", "syscw")
        }

    ledger = Ledger(tmp_path / "l")
    early = cost(ledger)
    for number in range(10_000):
        ledger.append(replace(MESSAGE, round=number))
    late = cost(ledger)
    assert late["syscr"] == early["syscr"]
    assert late["syscw"] == early["syscw"]
    assert abs(late["rchar"] - early["rchar"]) < 64
    assert abs(late["wchar"] - early["wchar"]) < 64
    assert verify_ledger(tmp_path / "l").is_intact


# tampering


def test_an_answer_sent_again_is_recognised_among_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a, b, c, a, d the three newest are c, a and d; those of another job do not
    count."""
    monkeypatch.setattr("fednotes.apps.deployment.rules.ledger.MAX_REMEMBERED", 3)
    path, ours = tmp_path / "ledger.jsonl", replace(MESSAGE, job="job-1")
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in "abcde"}
    ledger = Ledger(path)
    for name in "abcad":
        ledger.append(replace(ours, sha256=digests[name]))
    ledger.append(replace(MESSAGE, job="job-2", sha256=digests["e"]))
    past = JobLines(path, "job-1")
    past.read()
    assert [*past.lines_by_message] == [digests[name] for name in "cad"]


def test_the_size_of_the_lines_of_a_run_follows_the_present_ledger(
    tmp_path: Path,
) -> None:
    """Lines of another run and a piece of a line do not count; a new ledger begins at
    zero."""
    path = tmp_path / "ledger.jsonl"
    lines = RunLines(path, "run-1")
    assert lines.measure_size() == 0
    ledger = Ledger(path)
    for run in ("run-1", "run-2", "run-1"):
        ledger.append(replace(MESSAGE, run=run))
    first, _, third = path.read_bytes().splitlines(keepends=True)
    assert lines.measure_size() == lines.measure_size() == len(first) + len(third)
    with path.open("ab") as file:
        file.write(b'{"run":"run-1"')
    assert lines.measure_size() == len(first) + len(third)

    path.unlink()
    get_head_path(path).unlink()
    assert lines.measure_size() == 0
    ledger.append(replace(MESSAGE, run="run-1"))
    assert lines.measure_size() == path.stat().st_size


def test_an_unbroken_ledger_passes_verification(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = write_ledger(path, 5)
    report = verify_ledger(path)
    assert (report.is_intact, report.lines, report.notes) == (True, 5, ())
    assert (
        report.head
        == ledger.read_head()
        == verify_ledger(path, noted=ledger.read_head()).head
    )
    assert report.head is not None
    assert report.head.hash in str(report)
    assert [t["round"] for t in read_ledger_lines(path, first=1, last=3)] == [1, 2, 3]
    assert [t["round"] for t in read_ledger_lines(path, last=0)] == [0]
    assert list(read_ledger_lines(path, run="other")) == []
    with pytest.raises(DataError, match="nothing has left"):
        verify_ledger(tmp_path / "absent")
    with pytest.raises(DataError, match="nothing has left"):
        list(read_ledger_lines(tmp_path / "absent"))
    assert Ledger(tmp_path / "absent").read_head() == Head()
    assert not (tmp_path / "absent").exists()


BITS = [1 << bit for bit in range(8)]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(BITS, id="bits"),
        pytest.param(range(1, 256), id="values", marks=pytest.mark.slow),
    ],
)
def test_every_change_of_a_single_byte_is_detected(
    tmp_path: Path, changes: Sequence[int]
) -> None:
    """Brute force: in a small ledger and its head, each byte takes other values.

    They differ in each single bit, or (slow) are all 255 others.
    """
    path = tmp_path / "l"
    write_ledger(path, 2)
    good, head = path.read_bytes(), get_head_path(path).read_bytes()
    first = good.index(b"\n")
    changed = bytearray(good)
    for place in range(len(good)):
        for change in changes:
            changed[place] = good[place] ^ change
            report = check_lines(path, io.BytesIO(changed), head, None)
            assert report.faults, (place, change)
            assert report.faults[0].line == (1 if place <= first else 2), (
                place,
                change,
            )
        changed[place] = good[place]
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        assert not verify_ledger(path).is_intact, place
    lines = good.splitlines(keepends=True)
    for place in range(len(head)):
        for change in changes:
            changed_head = (
                head[:place] + bytes([head[place] ^ change]) + head[place + 1 :]
            )
            assert (
                decode_head(changed_head) is None
                or check_lines(path, lines, changed_head, None).faults
            ), place
    assert check_lines(path, lines, head, None).is_intact


@pytest.mark.slow
def test_every_inserted_and_removed_byte_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "l"
    write_ledger(path, 2)
    good, head = path.read_bytes(), get_head_path(path).read_bytes()

    def is_found(changed: bytes) -> bool:
        return bool(check_lines(path, io.BytesIO(changed), head, None).faults)

    for place in range(len(good) + 1):
        for extra in (b"\n", b" ", b"0", b"{"):
            assert is_found(good[:place] + extra + good[place:]), (place, extra)
        if place < len(good):
            assert is_found(good[:place] + good[place + 1 :]), place
            assert is_found(good[:place]), place  # a cut tail
            path.write_bytes(good[:place])
            refuses(path)


def test_removed_swapped_and_inserted_lines_are_located(tmp_path: Path) -> None:
    path = tmp_path / "l"
    write_ledger(path, 6)
    good = lines_of(path)

    def faults(lines: list[bytes]) -> dict[int, str]:
        path.write_bytes(b"".join(lines))
        return {fault.line: fault.problem for fault in verify_ledger(path).faults}

    for removed in range(5):
        named_faults = faults(good[:removed] + good[removed + 1 :])
        assert list(named_faults) == [removed + 1]
        problem = f"number {removed + 1}, which came before it, was removed"
        assert problem in named_faults[removed + 1]
    problem = "numbers 2 to 4, which came before it, were removed"
    assert problem in faults(good[:1] + good[4:])[2]
    assert faults(good[:5]) == {
        5: "is the last line, but 1 more was written: the end is missing"
    }
    assert "2 more were written" in faults(good[:4])[4]
    assert list(faults([])) == [0]
    for i in range(6):
        for j in range(i + 1, 6):
            swapped = list(good)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            named_faults = faults(swapped)
            assert min(named_faults) == i + 1
            assert j + 1 in named_faults
            assert all("moved" in fault for fault in named_faults.values()), (
                i,
                j,
                named_faults,
            )
    for place in range(7):
        # one line a second time
        named_faults = faults([*good[:place], good[2], *good[place:]])
        assert any(
            "inserted" in fault or "moved" in fault for fault in named_faults.values()
        ), place
    assert faults(good) == {}


def test_forged_lines_are_detected(tmp_path: Path) -> None:
    """A forger who hashes anew: one line, all lines from one on, and the head as well."""
    path, forged = tmp_path / "l", tmp_path / "forged"
    ledger = write_ledger(path, 5)
    noted = ledger.read_head()
    good = lines_of(path)
    table = json.loads(good[2])
    table["receiver"] = "nobody"
    forged_line = rehashed(json.dumps(table, separators=(",", ":")).encode())
    assert table["hash"] not in forged_line.decode()
    path.write_bytes(b"".join([*good[:2], forged_line, *good[3:]]))
    report = verify_ledger(path)
    assert [fault.line for fault in report.faults] == [4]
    assert "does not follow" in report.faults[0].problem
    path.write_bytes(b"".join([*good[:2], forged_line]))
    assert "2 more were written" in str(verify_ledger(path))
    path.write_bytes(b"".join([*good, good[-1]]))
    assert not verify_ledger(path).is_intact
    longer = write_ledger(forged, 5)
    longer.append(MESSAGE)
    path.write_bytes(b"".join(lines_of(forged)))  # one line that goes on from the last
    report = verify_ledger(path)
    assert "goes beyond the 5 lines" in report.faults[0].problem
    anew = Ledger(tmp_path / "anew")
    for _ in range(6):
        anew.append(replace(MESSAGE, receiver="nobody"))
    assert verify_ledger(
        anew.path
    ).is_intact  # all of it is new: only what was noted elsewhere tells
    assert [f.line for f in verify_ledger(anew.path, noted).faults] == [5]
    assert verify_ledger(forged, noted).is_intact


def test_a_spliced_history_is_detected(tmp_path: Path) -> None:
    """Two histories, one after the other, with the second's head and numbers that go
    on."""
    path = tmp_path / "l"
    write_ledger(path, 4)
    lines, before = list[bytes](), FIRST
    for number, line in enumerate(lines_of(path)):
        table = json.loads(line)
        before = FIRST if number == 2 else before
        lines.append(rehashed(line.replace(table["prev"].encode(), before.encode())))
        before = json.loads(lines[-1])["hash"]
    path.write_bytes(b"".join(lines))
    size = path.stat().st_size
    get_head_path(path).write_bytes(encode_head(Head(4, size, before)))
    assert [(f.line, f.problem[:15]) for f in verify_ledger(path).faults] == [
        (3, "does not follow")
    ]


def test_an_end_noted_elsewhere_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "l"
    ledger = write_ledger(path, 3)
    noted = ledger.read_head()
    ledger.append(MESSAGE)
    assert verify_ledger(path, parse_noted_end(f" 3:{noted.hash}\n")).is_intact
    (fault,) = verify_ledger(path, parse_noted_end(f"2:{noted.hash}")).faults
    assert (fault.line, fault.problem) == (
        2,
        "is not the line whose hash was noted elsewhere",
    )
    for name in (path, get_head_path(path)):
        name.unlink()
    (fault,) = verify_ledger(path, parse_noted_end(f"3:{noted.hash}")).faults
    assert (fault.line, fault.problem) == (
        3,
        "was noted elsewhere, and the ledger ends before it",
    )
    write_ledger(path, 1)  # a new one was begun
    assert not verify_ledger(path, parse_noted_end(f"3:{noted.hash}")).is_intact
    for text in (
        "",
        "3",
        noted.hash,
        f"x:{noted.hash}",
        "3:abc",
        f"0:{noted.hash}",
        "²:" + FIRST,
    ):
        with pytest.raises(ConfigError, match="expected LINES:HASH"):
            parse_noted_end(text)


def test_a_lost_or_edited_head_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "l"
    write_ledger(path, 2)
    head = get_head_path(path).read_bytes()
    for raw in (b"", head[:-1], head + b" ", b"[]", b"{}"):
        get_head_path(path).write_bytes(raw)
        assert not verify_ledger(path).is_intact
        refuses(path)
    get_head_path(path).write_bytes(head.replace(b'"lines":2', b'"lines":1'))
    assert "goes beyond" in str(verify_ledger(path))
    get_head_path(path).unlink()
    assert "is missing" in str(verify_ledger(path))
    get_head_path(path).write_bytes(head)
    path.write_bytes(b"")
    refuses(path)
    path.unlink()
    assert "the end is missing" in str(verify_ledger(path))
