"""Tensors in an unnamed file are those in memory, and take memory only in use."""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path

import pytest
import torch

from fednotes.core import stored_tensors
from fednotes.core.errors import FednotesError
from fednotes.core.messages import (
    DTYPES,
    Reply,
    WireError,
    decode_reply,
    encode_message,
)
from fednotes.core.stored_bytes import ALIGN, StoredBytes
from fednotes.core.stored_tensors import StoredTensors, copy_or_store_tensors
from fednotes.core.tensors import fingerprint_tensors, list_shapes
from fednotes.core.update import Total, Update


def store(frame: bytes, folder: Path) -> StoredBytes:
    stored = StoredBytes(folder)
    for start in range(0, len(frame), 1000):
        stored.append(frame[start : start + 1000])
    return stored


def make_update(seed: int = 0, size: int = 5000) -> Update:
    """Return an update with a tensor of each type that can be sent."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(size, generator=generator) * 2
    tensors = {name: numbers.to(dtype) for name, dtype in DTYPES.items()}
    tensors |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    return Update(tensors, 3.0 + seed)


def make_frame(update: Update) -> bytes:
    return encode_message(Reply("job", 1, 2, "a", update))


def test_a_reply_in_a_file_has_the_same_update(tmp_path: Path) -> None:
    frame = make_frame(make_update())
    in_memory = decode_reply(frame).update
    stored = decode_reply(store(frame, tmp_path)).update
    assert in_memory is not None
    assert stored is not None
    assert isinstance(stored.tensors, StoredTensors)
    assert list(stored.tensors) == list(in_memory.tensors)
    assert list_shapes(stored.tensors) == list_shapes(in_memory.tensors)
    assert fingerprint_tensors(stored.tensors) == fingerprint_tensors(in_memory.tensors)
    assert stored.weight == in_memory.weight
    assert not list(tmp_path.iterdir())  # the file has no name


def test_a_damaged_reply_in_a_file_is_found_out(tmp_path: Path) -> None:
    frame = bytearray(make_frame(make_update()))
    frame[-ALIGN] ^= 1
    with pytest.raises(WireError, match="damaged in transit"):
        decode_reply(store(frame, tmp_path))
    with pytest.raises(WireError, match="too few"):
        decode_reply(StoredBytes(tmp_path))
    frame = make_frame(Update({"b": torch.tensor([True])}))
    wrong = bytes(frame[:-ALIGN] + b"\2" + frame[1 - ALIGN :])
    with pytest.raises(WireError, match="a boolean"):
        decode_reply(store(wrong, tmp_path), checked=True)


def test_the_sum_of_replies_in_files_has_the_same_bits(tmp_path: Path) -> None:
    updates = [make_update(seed) for seed in range(11)]
    stored = [
        decode_reply(store(make_frame(each), tmp_path)).update for each in updates
    ]
    mixed = [each if seed % 3 else updates[seed] for seed, each in enumerate(stored)]
    total = Total.of(updates)
    for others in (stored, mixed):
        again = Total.of(each for each in others if each is not None)
        assert fingerprint_tensors(again.tensors) == fingerprint_tensors(total.tensors)
        assert (again.weight, again.sites) == (total.weight, total.sites)


def measure_memory() -> int:
    """Return the bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_only_the_tensors_in_use_are_in_memory(tmp_path: Path) -> None:
    tensors = {str(i): torch.full((1_000_000,), float(i)) for i in range(40)}
    kept = copy_or_store_tensors(tensors, tmp_path)
    del tensors
    before = measure_memory()
    most = 0
    for _ in range(2):
        for name, value in kept.items():
            assert float(value.mean()) == float(name)
            most = max(most, measure_memory() - before)
    assert most < 5 * 4_000_000


def test_kept_tensors_do_not_change_with_the_ones_they_are_copied_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for large in (stored_tensors.LARGE_BYTES, 1):
        monkeypatch.setattr(stored_tensors, "LARGE_BYTES", large)
        tensors = {"w": torch.ones(5, 4).T, "n": torch.arange(3), "e": torch.empty(0)}
        kept = copy_or_store_tensors(tensors, tmp_path)
        assert isinstance(kept, StoredTensors) == (large == 1)
        before = fingerprint_tensors(tensors)
        for value in tensors.values():
            value += 1
        assert fingerprint_tensors(kept) == before
        kept["w"].zero_()
        assert large > 1 or fingerprint_tensors(kept) == before


def test_a_full_disk_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    if not Path("/dev/full").exists() or not hasattr(os, "pread"):
        pytest.skip("needs a device that is always full")
    stored = StoredBytes(tmp_path)
    stored._file.close()
    stored._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    weakref.finalize(stored, stored._file.close)
    with pytest.raises(FednotesError, match=r"cannot hold a large message.*make room"):
        stored.append(b"x")
    with pytest.raises(FednotesError, match="No such file"):
        StoredBytes(tmp_path / "missing")
