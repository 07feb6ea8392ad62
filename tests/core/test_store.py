"""Files and folders that are whole or absent, whatever fails in between."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path

import pytest
import torch

from fednotes.core import store, tensors
from fednotes.core.errors import FednotesError, ModelError

FULL = OSError(errno.ENOSPC, "No space left on device")


def everything(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def failing(*names: str):
    """`os.replace` that fails for targets of these names, once each."""
    real, left = os.replace, list(names)

    def replace(source: Path, target: Path) -> None:
        if Path(target).name in left:
            left.remove(Path(target).name)
            raise FULL
        real(source, target)

    return replace


def test_text_is_replaced_or_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "deep" / "a.json"
    store.write_json(path, {"ä": [1]})
    assert json.loads(path.read_text("utf-8")) == {"ä": [1]}
    before = everything(tmp_path)
    monkeypatch.setattr(os, "replace", failing("a.json"))
    with pytest.raises(FednotesError, match=r"a\.json: cannot be written \(No space left"):
        store.write_text(path, "other")
    assert everything(tmp_path) == before
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(FULL))
    with pytest.raises(FednotesError, match="before is whole"):
        store.write_text(path, "other")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_file_is_replaced_with_its_mode(tmp_path: Path, mode: int) -> None:
    """Whatever the mode of the one before it."""
    path = tmp_path / "a"
    path.write_bytes(b"longer than the new one")
    path.chmod(0o666)
    store.replace_file(path, memoryview(b"one\r\n\x00"), mode=mode)
    assert everything(tmp_path) == {"a": b"one\r\n\x00"}
    assert stat.S_IMODE(path.stat().st_mode) == mode
    with pytest.raises(FileNotFoundError):
        store.replace_file(tmp_path / "b" / "a", b"")


def test_a_place_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file" / "x" / "y", tmp_path):
        with pytest.raises(FednotesError, match="cannot be written"):
            store.write_text(target, "text")
    with pytest.raises(FednotesError, match="cannot be written"):
        store.write_folder(tmp_path / "file" / "x", lambda folder: None)
    assert everything(tmp_path) == {"file": b""}


def put(text: str):
    def fill(folder: Path) -> None:
        (folder / "a").write_text(text)

    return fill


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "model"
    store.write_folder(path, put("one"))
    (path / "left over").write_text("")
    store.write_folder(path, put("two"))
    assert everything(tmp_path) == {"model/a": b"two"}


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt(), ValueError("a bug")])
def test_a_folder_stays_whole_when_filling_fails(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "model"
    store.write_folder(path, put("one"))

    def fill(folder: Path) -> None:
        (folder / "a").write_text("half")
        raise error

    with pytest.raises(FednotesError if error is FULL else type(error)):
        store.write_folder(path, fill)
    assert everything(tmp_path) == {"model/a": b"one"}


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt()])
def test_a_folder_stays_whole_when_the_last_rename_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The old folder has been moved aside by then, and comes back."""
    path = tmp_path / "model"
    store.write_folder(path, put("one"))
    real = os.replace
    calls = []

    def replace(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise error
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises((FednotesError, KeyboardInterrupt)):
        store.write_folder(path, put("two"))
    assert len(calls) == 3
    assert everything(tmp_path) == {"model/a": b"one"}


def test_the_old_folder_is_never_deleted_while_there_is_no_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if putting it back fails as well, its content is still there beside its place."""
    path = tmp_path / "model"
    store.write_folder(path, put("one"))
    monkeypatch.setattr(os, "replace", failing("model", "model"))
    with pytest.raises(FednotesError):
        store.write_folder(path, put("two"))
    assert list(everything(tmp_path).values()) == [b"one"]


TENSORS = {"a.b": torch.arange(6.0).reshape(2, 3).T, "n": torch.tensor(3), "e": torch.zeros(0)}
FACTS = {"round": 3, "best": 0.25, "names": ["a", "ä"]}


def test_state_comes_back_to_the_bit(tmp_path: Path) -> None:
    tensors.save_state(tmp_path / "s", TENSORS, FACTS)
    found, facts = tensors.load_state(tmp_path / "s")
    assert facts == FACTS
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], TENSORS[name]) for name in TENSORS)


def test_no_state_at_all_is_a_state(tmp_path: Path) -> None:
    tensors.save_state(tmp_path / "s", {}, {})
    assert tensors.load_state(tmp_path / "s") == ({}, {})


@pytest.mark.parametrize("name", ["tensors.safetensors", "facts.json"])
def test_damage_is_found_by_its_checksum(tmp_path: Path, name: str) -> None:
    tensors.save_state(tmp_path / "s", TENSORS, FACTS)
    file = tmp_path / "s" / name
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(ModelError, match=f"{name}: damaged"):
        tensors.load_state(tmp_path / "s")
    file.unlink()
    with pytest.raises(ModelError, match="not a readable state folder"):
        tensors.load_state(tmp_path / "s")


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "{}", "[]", "3", '{"format": 1}', "[" * 100_000, "\xff", '{"format": {}}'),
        *(
            f'{{"format": 1, "sha256": {sums}}}'
            for sums in ("{}", "[]", "null", '{"facts.json": ""}')
        ),
    ],
)
def test_a_damaged_manifest_is_an_error_not_a_crash(tmp_path: Path, text: str) -> None:
    tensors.save_state(tmp_path / "s", TENSORS, FACTS)
    (tmp_path / "s" / "manifest.json").write_text(text, "latin-1")
    with pytest.raises(ModelError, match=r"not a readable|format|not a checksum"):
        tensors.load_state(tmp_path / "s")


def test_writers_of_one_process_number_do_not_meet(tmp_path: Path) -> None:
    """As of containers on one volume: another one writes the same while this one is at it."""
    path = tmp_path / "model"

    def fill(folder: Path) -> None:
        store.write_folder(path, put("inner"))
        put("outer")(folder)

    store.write_folder(path, fill)
    assert everything(tmp_path) == {"model/a": b"outer"}


def test_a_folder_that_comes_in_between_is_replaced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "model", os.replace
    store.write_folder(path, put("one"))
    others = [put("two"), put("three")]

    def replace(source: Path, target: Path) -> None:
        if target == path and others:  # the place is free for a moment, and another one takes it
            path.mkdir()
            others.pop()(path)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    store.write_folder(path, put("last"))
    assert not others
    assert everything(tmp_path) == {"model/a": b"last"}


def synced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is synced and renamed below a folder from now on, in order, by first letters of words;
    temporary names end in "~"."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def name(path: object) -> str:
        parts = Path(str(path)).relative_to(folder).parts
        return "/".join(
            re.sub(r"\.[0-9a-f]{16}\.(tmp|old)$", "~", p[1:]) if p[0] == "." else p for p in parts
        )

    def sync(number: int) -> None:
        calls.append(f"fsync {name(os.readlink(f'/proc/self/fd/{number}'))}")
        fsync(number)

    def move(source: Path, target: Path) -> None:
        calls.append(f"replace {name(target)}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", move)
    return calls


def test_bytes_and_names_are_on_disk_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file before its name, and the name before anything that builds on it: so a power cut
    finds one of the two states that a kill finds."""
    (tmp_path / "d").mkdir()
    calls = synced(tmp_path, monkeypatch)
    store.replace_file(tmp_path / "d" / "a", b"one")
    assert calls == ["fsync d/a~", "replace d/a", "fsync d"]
    calls.clear()
    tensors.save_state(tmp_path / "d" / "s", TENSORS, FACTS)
    files = ["tensors.safetensors", "facts.json", "manifest.json"]
    assert calls[:3] == [f"fsync d/s~/{file}" for file in files]
    assert calls[3:] == ["fsync d/s~", "replace d/s", "fsync d"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_cannot_sync_folders_will_do(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    before = len(os.listdir("/proc/self/fd"))
    if number == errno.EIO:
        with pytest.raises(FednotesError, match="cannot be written"):
            store.write_text(tmp_path / "a", "one")
    else:
        store.write_text(tmp_path / "a", "one")
    assert everything(tmp_path) == {"a": b"one"}
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    tensors.save_state(tmp_path / "s", TENSORS, FACTS)
    (tmp_path / "s" / "manifest.json").write_text('{"format": 2, "sha256": {}}')
    with pytest.raises(ModelError, match="format 2, this version reads 1"):
        tensors.load_state(tmp_path / "s")


def test_a_missing_state_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a readable state folder"):
        tensors.load_state(tmp_path / "nothing")


def test_a_full_disk_while_tensors_are_written(tmp_path: Path, monkeypatch) -> None:
    """What the tensor library itself raises: its own error for the system's."""
    tensors.save_state(tmp_path / "s", TENSORS, FACTS)
    before = everything(tmp_path)

    def save_file(values, path) -> None:
        path.write_bytes(b"half")
        raise tensors.SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(tensors, "save_file", save_file)
    with pytest.raises(FednotesError, match="is the disk full"):
        tensors.save_state(tmp_path / "s", TENSORS, {})
    assert everything(tmp_path) == before
