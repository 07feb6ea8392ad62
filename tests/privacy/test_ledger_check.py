"""Tampering: every change of a ledger that no append made is found, and its line is named."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from ledgers import MESSAGE, lines_of, rehashed, written

from fednotes.core.errors import ConfigError, DataError, RefusedError
from fednotes.rules.ledger import (
    FIRST,
    Head,
    Ledger,
    decode_head,
    encode_head,
    head_path,
    judge,
    noted_end,
    show,
    verify,
)


def test_an_unbroken_ledger_is_well(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = written(path, 5)
    report = verify(path)
    assert (report.ok, report.lines, report.notes) == (True, 5, ())
    assert report.head == ledger.head() == verify(path, noted=ledger.head()).head
    assert report.head is not None
    assert report.head.hash in str(report)
    assert [t["round"] for t in show(path, first=1, last=3)] == [1, 2, 3]
    assert [t["round"] for t in show(path, last=0)] == [0]
    assert list(show(path, run="other")) == []
    with pytest.raises(DataError, match="nothing has left"):
        verify(tmp_path / "absent")
    with pytest.raises(DataError, match="nothing has left"):
        list(show(tmp_path / "absent"))
    assert Ledger(tmp_path / "absent").head() == Head()
    assert not (tmp_path / "absent").exists()


def test_every_change_of_a_single_byte_is_found(tmp_path: Path) -> None:
    """Brute force: each byte of a small ledger and of its head takes each other value."""
    path = tmp_path / "l"
    written(path, 2)
    good, head = path.read_bytes(), head_path(path).read_bytes()
    first = good.index(b"\n")
    changed = bytearray(good)
    for place in range(len(good)):
        for change in range(1, 256):
            changed[place] = good[place] ^ change
            report = judge(path, io.BytesIO(changed), head, None)
            assert report.faults, (place, change)
            assert report.faults[0].line == (1 if place <= first else 2), (place, change)
        changed[place] = good[place]
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        assert not verify(path).ok, place
    lines = good.splitlines(keepends=True)
    for place in range(len(head)):
        for change in range(1, 256):
            new = head[:place] + bytes([head[place] ^ change]) + head[place + 1 :]
            assert decode_head(new) is None or judge(path, lines, new, None).faults, place
    assert judge(path, lines, head, None).ok


def test_every_inserted_and_removed_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "l"
    written(path, 2)
    good = path.read_bytes()
    for place in range(len(good) + 1):
        for extra in (b"\n", b" ", b"0", b"{"):
            path.write_bytes(good[:place] + extra + good[place:])
            assert not verify(path).ok, (place, extra)
        if place < len(good):
            path.write_bytes(good[:place] + good[place + 1 :])
            assert not verify(path).ok, place
            path.write_bytes(good[:place])  # a cut tail
            assert not verify(path).ok, place
            with pytest.raises(RefusedError, match="does not end as"):
                Ledger(path).append(MESSAGE)


def test_removed_swapped_and_inserted_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "l"
    written(path, 6)
    good = lines_of(path)

    def faults(lines: list[bytes]) -> dict[int, str]:
        path.write_bytes(b"".join(lines))
        return {fault.line: fault.what for fault in verify(path).faults}

    for gone in range(5):
        found = faults(good[:gone] + good[gone + 1 :])
        assert list(found) == [gone + 1]
        assert f"number {gone + 1}, was removed" in found[gone + 1]
    assert "2 to 4, was removed" in faults(good[:1] + good[4:])[2]
    assert faults(good[:5]) == {5: "is the last, but 1 more was written: cut off"}
    assert "2 more were written" in faults(good[:4])[4]
    assert list(faults([])) == [0]
    for i in range(6):
        for j in range(i + 1, 6):
            swapped = list(good)
            swapped[i], swapped[j] = swapped[j], swapped[i]
            found = faults(swapped)
            assert min(found) == i + 1
            assert j + 1 in found
            assert all("moved" in what for what in found.values()), (i, j, found)
    for place in range(7):
        found = faults([*good[:place], good[2], *good[place:]])  # one line a second time
        assert any("inserted" in what or "moved" in what for what in found.values()), place
    assert faults(good) == {}


def test_forged_lines_are_found(tmp_path: Path) -> None:
    """A forger who hashes anew: one line, all lines from one on, and the head as well."""
    path, other = tmp_path / "l", tmp_path / "forged"
    ledger = written(path, 5)
    noted = ledger.head()
    good = lines_of(path)
    table = json.loads(good[2])
    table["receiver"] = "nobody"
    new = rehashed(json.dumps(table, separators=(",", ":")).encode())
    assert table["hash"] not in new.decode()
    path.write_bytes(b"".join([*good[:2], new, *good[3:]]))
    report = verify(path)
    assert [fault.line for fault in report.faults] == [4]
    assert "does not follow" in report.faults[0].what
    path.write_bytes(b"".join([*good[:2], new]))
    assert "2 more were written" in str(verify(path))
    path.write_bytes(b"".join([*good, good[-1]]))
    assert not verify(path).ok
    whole = written(other, 5)
    whole.append(MESSAGE)
    path.write_bytes(b"".join(lines_of(other)))  # one line that goes on from the last
    report = verify(path)
    assert "goes beyond the 5 lines" in report.faults[0].what
    anew = Ledger(tmp_path / "anew")
    for _ in range(6):
        anew.append(replace(MESSAGE, receiver="nobody"))
    assert verify(anew.path).ok  # all of it is new: only what was noted elsewhere tells
    assert [f.line for f in verify(anew.path, noted).faults] == [5]
    assert verify(other, noted).ok


def test_a_line_in_the_middle_that_begins_anew_is_found(tmp_path: Path) -> None:
    """Two histories, one after the other, with the second's head and numbers that go on."""
    path = tmp_path / "l"
    written(path, 4)
    lines, before = list[bytes](), FIRST
    for number, line in enumerate(lines_of(path)):
        table = json.loads(line)
        before = FIRST if number == 2 else before
        lines.append(rehashed(line.replace(table["prev"].encode(), before.encode())))
        before = json.loads(lines[-1])["hash"]
    path.write_bytes(b"".join(lines))
    size = path.stat().st_size
    head_path(path).write_bytes(encode_head(Head(4, size, before)))
    assert [(f.line, f.what[:15]) for f in verify(path).faults] == [(3, "does not follow")]


def test_what_was_noted_elsewhere_is_found_or_missed(tmp_path: Path) -> None:
    path = tmp_path / "l"
    ledger = written(path, 3)
    noted = ledger.head()
    ledger.append(MESSAGE)
    assert verify(path, noted_end(f" 3:{noted.hash}\n")).ok
    (fault,) = verify(path, noted_end(f"2:{noted.hash}")).faults
    assert (fault.line, fault.what) == (2, "is not the line whose hash was noted elsewhere")
    for name in (path, head_path(path)):
        name.unlink()
    (fault,) = verify(path, noted_end(f"3:{noted.hash}")).faults
    assert (fault.line, fault.what) == (3, "was noted elsewhere, and the ledger ends before it")
    written(path, 1)  # a new one was begun
    assert not verify(path, noted_end(f"3:{noted.hash}")).ok
    for text in ("", "3", noted.hash, f"x:{noted.hash}", "3:abc", f"0:{noted.hash}", "²:" + FIRST):
        with pytest.raises(ConfigError, match="expected LINES:HASH"):
            noted_end(text)


def test_a_head_that_is_lost_or_edited_is_found(tmp_path: Path) -> None:
    path = tmp_path / "l"
    written(path, 2)
    head = head_path(path).read_bytes()
    for raw in (b"", head[:-1], head + b" ", b"[]", b"{}"):
        head_path(path).write_bytes(raw)
        assert not verify(path).ok
        with pytest.raises(RefusedError, match="does not end as"):
            Ledger(path).append(MESSAGE)
    head_path(path).write_bytes(head.replace(b'"lines":2', b'"lines":1'))
    assert "goes beyond" in str(verify(path))
    head_path(path).unlink()
    assert "is missing" in str(verify(path))
    head_path(path).write_bytes(head)
    path.unlink()
    assert "cut off" in str(verify(path))
    with pytest.raises(RefusedError, match="nothing may leave"):
        Ledger(path).append(MESSAGE)
