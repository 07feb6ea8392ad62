"""Files and folders are written completely or not at all, whatever fails in between."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import re
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from fednotes.core import store, tensors
from fednotes.core.errors import BusyError, FednotesError, ModelError
from fednotes.core.store import is_reserved, reserving_folder
from fednotes.core.types import Document
from fednotes.data.formats import jsonl

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
FULL = OSError(errno.ENOSPC, "No space left on device")


def everything(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, hidden ones too."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def failing(*names: str):
    """Return an `os.replace` that fails once for each target of these names."""
    real, pending = os.replace, list(names)

    def replace(source: Path, target: Path) -> None:
        if Path(target).name in pending:
            pending.remove(Path(target).name)
            raise FULL
        real(source, target)

    return replace


def test_a_text_file_is_replaced_completely_or_left_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "a.json"
    store.write_json(path, {"ä": [1]})
    assert json.loads(path.read_text("utf-8")) == {"ä": [1]}
    before = everything(tmp_path)
    monkeypatch.setattr(os, "replace", failing("a.json"))
    with pytest.raises(
        FednotesError, match=r"a\.json: cannot be written \(No space left"
    ):
        store.write_text(path, "other")
    assert everything(tmp_path) == before
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(FULL))
    with pytest.raises(FednotesError, match="the earlier content is unchanged"):
        store.write_text(path, "other")
    assert everything(tmp_path) == before
    with pytest.raises(FednotesError) as refused:
        store.write_text(tmp_path / "new", "first")
    assert "earlier content" not in str(refused.value)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_replaced_file_has_the_requested_mode(tmp_path: Path, mode: int) -> None:
    """Whatever the mode of the one before it."""
    path = tmp_path / "a"
    path.write_bytes(b"longer than the new one")
    path.chmod(0o666)
    store.replace_file(path, memoryview(b"one\r\n\x00"), mode=mode)
    assert everything(tmp_path) == {"a": b"one\r\n\x00"}
    assert stat.S_IMODE(path.stat().st_mode) == mode
    with pytest.raises(FileNotFoundError):
        store.replace_file(tmp_path / "b" / "a", b"")


LARGE = os.urandom(2 * store.DIRECT_BYTES + 5)


def has_direct_flag(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize("size", [0, store.DIRECT_BYTES, len(LARGE)])
def test_whole_blocks_of_a_large_file_are_written_past_the_cache(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, flags = os.write, []

    def recording(descriptor: int, data: bytes) -> int:
        flags.append(has_direct_flag(descriptor))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", recording)
    store.replace_file(tmp_path / "a", LARGE[:size])
    assert everything(tmp_path) == {"a": LARGE[:size]}
    assert flags == [True] * (size // store.DIRECT_BYTES)


@pytest.mark.parametrize("taken", [0, 1])
def test_a_large_file_is_complete_on_a_file_system_that_only_has_a_cache(
    taken: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a file system refuses at the first block, or after a part of it."""
    write, blocks_left = os.write, [taken]

    def refuse(descriptor: int, data: bytes) -> int:
        if not blocks_left[0]:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        blocks_left[0] -= 1
        return write(descriptor, memoryview(data)[: store.BLOCK_BYTES])

    monkeypatch.setattr(os, "write", refuse)
    store.replace_file(tmp_path / "a", LARGE)
    assert everything(tmp_path) == {"a": LARGE}


def test_a_disk_that_fills_up_in_a_large_file_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.replace_file(tmp_path / "a", b"earlier")

    def fill(descriptor: int, data: bytes) -> int:
        raise FULL

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(OSError, match="No space left"):
        store.replace_file(tmp_path / "a", LARGE)
    assert everything(tmp_path) == {"a": b"earlier"}


def test_an_error_names_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "file" / "x" / "y", tmp_path):
        with pytest.raises(FednotesError, match="cannot be written"):
            store.write_text(target, "text")
    with pytest.raises(FednotesError, match="cannot be written"):
        store.write_folder(tmp_path / "file" / "x", lambda folder: None)
    assert everything(tmp_path) == {"file": b""}


def writer_of(text: str):
    def fill(folder: Path) -> None:
        (folder / "a").write_text(text)

    return fill


def test_half_a_character_in_a_text_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "text"
    for write in (store.write_text, store.write_json, store.write_out):
        with pytest.raises(FednotesError, match="characters that UTF-8 cannot encode"):
            write(path, "a\ud800")
        assert not path.exists()


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "model"
    store.write_folder(path, writer_of("one"))
    (path / "left over").write_text("")
    store.write_folder(path, writer_of("two"))
    assert everything(tmp_path) == {"model/a": b"two"}


@pytest.mark.parametrize("error", [FULL, KeyboardInterrupt(), ValueError("a bug")])
@pytest.mark.parametrize("rename", [False, True])
def test_an_old_folder_survives_a_failure_to_fill_or_rename_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, rename: bool
) -> None:
    """By the last rename the old folder has been moved aside, and comes back."""
    path, real, calls = tmp_path / "model", os.replace, list[Path]()
    store.write_folder(path, writer_of("one"))

    def fill(folder: Path) -> None:
        writer_of("half")(folder)
        if not rename:
            raise error

    def replace(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise error
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(FednotesError if error is FULL else type(error)):
        store.write_folder(path, fill)
    assert len(calls) == (3 if rename else 0)
    assert everything(tmp_path) == {"model/a": b"one"}


def test_the_old_folder_is_never_deleted_while_there_is_no_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if putting it back fails as well, its content is still there beside its
    place."""
    path = tmp_path / "model"
    store.write_folder(path, writer_of("one"))
    monkeypatch.setattr(os, "replace", failing("model", "model"))
    with pytest.raises(FednotesError):
        store.write_folder(path, writer_of("two"))
    assert list(everything(tmp_path).values()) == [b"one"]


TENSORS = {
    "a.b": torch.arange(6.0).reshape(2, 3).T,
    "n": torch.tensor(3),
    "e": torch.zeros(0),
}
FACTS = {"round": 3, "best": 0.25, "names": ["a", "ä"]}


def test_a_saved_state_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    tensors.save_state(tmp_path / "s", TENSORS, FACTS)
    loaded, facts = tensors.load_state(tmp_path / "s")
    assert facts == FACTS
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], TENSORS[name]) for name in TENSORS)
    tensors.save_state(tmp_path / "none", {}, {})
    assert tensors.load_state(tmp_path / "none") == ({}, {})


@pytest.mark.parametrize("name", ["tensors.safetensors", "facts.json"])
def test_damage_is_detected_by_its_checksum(tmp_path: Path, name: str) -> None:
    tensors.save_state(tmp_path / "s", TENSORS, FACTS)
    file = tmp_path / "s" / name
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with pytest.raises(ModelError, match=f"{name}: damaged"):
        tensors.load_state(tmp_path / "s")
    file.unlink()
    with pytest.raises(ModelError, match="cannot read the saved state"):
        tensors.load_state(tmp_path / "s")


_SUMS = [
    f'{{"format": 1, "sha256": {sums}}}'
    for sums in ("{}", "[]", "null", '{"facts.json": ""}')
]


@pytest.mark.parametrize(
    "text",
    [
        *(
            None,
            "",
            "{",
            "{}",
            "[]",
            "3",
            '{"format": 1}',
            "[" * 100_000,
            "\xff",
            *_SUMS,
        ),
        *('{"format": {}}', '{"format": 2, "sha256": {}}'),
    ],
)
def test_a_damaged_manifest_is_refused(tmp_path: Path, text: str | None) -> None:
    tensors.save_state(tmp_path / "s", TENSORS, FACTS)
    (tmp_path / "s" / "manifest.json").unlink()
    if text is not None:
        (tmp_path / "s" / "manifest.json").write_text(text, "latin-1")
    later = "has format 2, but this version reads 1" if text and "2, " in text else None
    with pytest.raises(
        ModelError,
        match=later or r"cannot read|cannot be read|format|a checksum for each file",
    ):
        tensors.load_state(tmp_path / "s")


def test_writers_with_the_same_process_number_do_not_collide(tmp_path: Path) -> None:
    """Processes of two containers on one volume may have the same number. Here, the
    second one writes the same path while the first one is writing it."""
    path = tmp_path / "model"

    def fill(folder: Path) -> None:
        store.write_folder(path, writer_of("inner"))
        writer_of("outer")(folder)

    store.write_folder(path, fill)
    assert everything(tmp_path) == {"model/a": b"outer"}


def test_a_folder_that_appears_meanwhile_is_replaced_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "model", os.replace
    store.write_folder(path, writer_of("one"))
    others = [writer_of("two"), writer_of("three")]

    def replace(source: Path, target: Path) -> None:
        # the place is free for a moment, and another one takes it
        if target == path and others:
            path.mkdir()
            others.pop()(path)
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    store.write_folder(path, writer_of("last"))
    assert not others
    assert everything(tmp_path) == {"model/a": b"last"}


def synced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Yield what is synced and renamed below a folder, in order.

    Names are the first letters of words; temporary names end in "~".
    """
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def name(path: object) -> str:
        parts = Path(str(path)).relative_to(folder).parts
        return "/".join(
            re.sub(r"\.[0-9a-f]{16}\.(tmp|old)$", "~", p[1:]) if p[0] == "." else p
            for p in parts
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


def test_files_are_synced_before_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file before its name, and the name before anything that builds on it: so a
    power cut finds one of the two states that a kill finds."""
    (tmp_path / "d").mkdir()
    calls = synced(tmp_path, monkeypatch)
    store.replace_file(tmp_path / "d" / "a", b"one")
    assert calls == ["fsync d/a~", "replace d/a", "fsync d"]
    calls.clear()
    tensors.save_state(tmp_path / "d" / "s", TENSORS, FACTS)
    files = ["tensors.safetensors", "facts.json", "manifest.json"]
    assert calls[:3] == [f"fsync d/s~/{file}" for file in files]
    assert calls[3:] == ["fsync d/s~", "replace d/s", "fsync d"]


def test_disk_usage_counts_whole_blocks(tmp_path: Path) -> None:
    """A link takes a block, whatever it leads to, and a missing folder nothing."""
    folder = tmp_path / "folder"
    assert store.measure_disk_usage(folder) == 0
    (folder / "inner").mkdir(parents=True)
    for name, size in (("none", 0), ("small", 1), ("block", 4096)):
        (folder / name).write_bytes(bytes(size))
    (folder / "inner" / "large").write_bytes(bytes(4097))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_bytes(bytes(10**6))
    (folder / "link").symlink_to(tmp_path / "elsewhere" / "file")
    (folder / "linked folder").symlink_to(tmp_path / "elsewhere")
    assert store.measure_disk_usage(folder) == 4096 * (0 + 1 + 1 + 2 + 1)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EIO])
def test_a_file_system_that_cannot_sync_folders_is_accepted(
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


def test_a_disk_that_fills_up_while_tensors_are_written_is_an_error(
    tmp_path: Path, monkeypatch
) -> None:
    """What the tensor library itself raises: its own error for the system's."""
    tensors.save_state(tmp_path / "s", TENSORS, FACTS)
    before = everything(tmp_path)

    def save_file(values, path) -> None:
        path.write_bytes(b"half")
        raise tensors.SafetensorError(
            "I/O error: No space left on device (os error 28)"
        )

    monkeypatch.setattr(tensors, "save_file", save_file)
    with pytest.raises(FednotesError, match="check that the disk is not full"):
        tensors.save_state(tmp_path / "s", TENSORS, {})
    assert everything(tmp_path) == before


# ---- `--out`: devices, FIFOs and links are what they were before ---------------------


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("before", [0o600, 0o640, 0o666])
def test_a_file_keeps_its_permissions(tmp_path: Path, before: int) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(before)
    store.write_out(path, "ä\n")
    assert path.read_bytes() == b"\xc3\xa4\n"
    assert mode(path) == before
    assert os.listdir(tmp_path) == ["a"]


def test_a_new_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        store.write_out(tmp_path / "new" / "a", "text")
    finally:
        os.umask(mask)
    assert mode(tmp_path / "new" / "a") == 0o640


def test_writing_through_a_link_replaces_its_target_and_keeps_the_link(
    tmp_path: Path,
) -> None:
    target_folder, link_folder = tmp_path / "there", tmp_path / "here"
    for folder in (target_folder, link_folder):
        folder.mkdir()
    (target_folder / "real").write_text("old")
    (link_folder / "a").symlink_to("../there/real")
    (link_folder / "new").symlink_to("../there/none yet")
    for name in ("a", "new"):
        store.write_out(link_folder / name, "new")
        assert (link_folder / name).is_symlink()
    assert (
        (target_folder / "real").read_text()
        == (target_folder / "none yet").read_text()
        == "new"
    )
    assert sorted(os.listdir(target_folder)) == ["none yet", "real"]


def test_a_full_device_is_an_error_and_is_not_replaced() -> None:
    before = os.stat("/dev/full")
    with pytest.raises(
        FednotesError, match=r"/dev/full: cannot be written \(No space left"
    ):
        store.write_out(Path("/dev/full"), "text")
    with pytest.raises(FednotesError, match="No space left"):
        jsonl.write([Document("a", "text")], "/dev/full")
    assert os.path.samestat(os.stat("/dev/full"), before)


def test_a_fifo_receives_the_bytes_and_is_not_replaced(tmp_path: Path) -> None:
    path, received = tmp_path / "pipe", list[bytes]()
    os.mkfifo(path)
    reader = threading.Thread(
        target=lambda: received.append(path.read_bytes()), daemon=True
    )
    reader.start()
    store.write_out(path, "text" * 50_000)
    reader.join(timeout=20)
    assert received == [b"text" * 50_000]
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.parametrize("to", ["pipe", "file"])
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_a_path_that_names_stdout_writes_to_stdout(
    tmp_path: Path, name: str, to: str
) -> None:
    """Also where the shell has led it into a file: what was printed before and after is
    there."""
    program = (
        "import sys; from pathlib import Path; from fednotes.core.store import write_out\n"
        "print('before', flush=True); write_out(Path(sys.argv[1]), 'text\\n'); print('after')"
    )
    with open(tmp_path / "out", "ab") as file:
        completed = subprocess.run(
            [sys.executable, "-c", program, name],
            env=ENVIRONMENT,
            stdout=file if to == "file" else subprocess.PIPE,
            check=True,
            timeout=60,
        )
    output = (tmp_path / "out").read_bytes() if to == "file" else completed.stdout
    assert output == b"before\ntext\nafter\n"


@pytest.mark.parametrize("text", ["half \ud800", "whole"])
def test_a_failed_write_leaves_the_earlier_file(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    if text == "whole":

        def fsync(number: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(FednotesError, match="a: cannot be written"):
        store.write_out(path, text)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_writing_to_a_folder_or_a_link_loop_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path, tmp_path / "loop", tmp_path / "loop" / "a"):
        with pytest.raises(FednotesError, match="cannot be written"):
            store.write_out(path, "text")
    assert (tmp_path / "loop").is_symlink()


# ---- one process a folder, however the one before it ended ---------------------------

HOLD = """
import sys, time
from pathlib import Path
from fednotes.core.store import reserving_folder
with reserving_folder(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """Start a process that holds a folder until its stdin ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_an_error_names_the_holder_of_a_folder_and_a_dead_holder_is_replaced(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    with holder(folder) as process:
        pattern = rf"run is in use by process {process.pid} on \S+ since 20\d\d-\S+ \S+ \(.*\): wait"
        with pytest.raises(BusyError, match=pattern), reserving_folder(folder):
            pytest.fail("two at once")
        process.kill()
    with (folder / store.LOCK).open("a") as lock:  # nobody could tidy up
        lock.write("of one with a longer command" * 100)
    with reserving_folder(folder):
        assert (folder / store.LOCK).read_text().startswith(f"process {os.getpid()} on")
        assert "longer" not in (folder / store.LOCK).read_text()
    assert os.listdir(folder) == []


def test_a_folder_is_held_only_while_its_process_lives(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert not is_reserved(folder)
    with holder(folder) as process:
        assert is_reserved(folder)
        process.kill()
    assert (folder / store.LOCK).exists()
    assert not is_reserved(folder)
    with reserving_folder(folder):  # the question has not locked it
        assert is_reserved(folder)


def test_an_empty_folder_is_removed_on_release_and_others_remain(
    tmp_path: Path,
) -> None:
    with reserving_folder(tmp_path / "a" / "new"):
        pass
    with reserving_folder(tmp_path / "used"):
        (tmp_path / "used" / "file").touch()
    (tmp_path / "empty").mkdir()
    with reserving_folder(tmp_path / "empty"):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "empty", "used"]
    assert not (tmp_path / "a" / "new").exists()
    assert os.listdir(tmp_path / "used") == ["file"]


def test_a_folder_may_be_moved_while_it_is_held(tmp_path: Path) -> None:
    original, renamed = tmp_path / "one", tmp_path / "other"
    with reserving_folder(original):
        (original / "file").touch()
        original.rename(renamed)
        with pytest.raises(BusyError), reserving_folder(renamed):
            pytest.fail("it is ours there too")
        with reserving_folder(original):
            assert os.listdir(original) == [store.LOCK]
            assert (original / store.LOCK).stat().st_mode & 0o777 == 0o600
    assert os.listdir(renamed) == ["file"]


def test_a_folder_moved_just_before_it_is_locked_is_not_mistaken_for_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, renamed, flock = tmp_path / "one", tmp_path / "other", store.fcntl.flock

    def late(number: int, operation: int) -> None:
        if not renamed.exists():
            original.rename(renamed)
        flock(number, operation)

    monkeypatch.setattr(store.fcntl, "flock", late)
    with (
        reserving_folder(original),
        pytest.raises(BusyError),
        reserving_folder(original),
    ):
        pytest.fail("two at once")


COUNT = """
import sys
from pathlib import Path
from fednotes.core.errors import BusyError
from fednotes.core.store import reserving_folder
folder, done = Path(sys.argv[1]), 0
while done < 100:
    try:
        with reserving_folder(folder):
            number = folder / "number"
            number.write_text(str(int(number.read_text() or 0) + 1))
            done += 1
    except BusyError:
        pass
"""


def test_a_folder_never_has_two_holders_at_once(tmp_path: Path) -> None:
    """The lock's file comes and goes; who waited with an old one does not take it for
    the lock."""
    (tmp_path / "number").write_text("")
    command = [sys.executable, "-c", COUNT, str(tmp_path)]
    processes = [subprocess.Popen(command, env=ENVIRONMENT) for _ in range(3)]
    try:
        assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
    assert (tmp_path / "number").read_text() == "300"


def test_foreign_text_in_a_lock_is_cleaned_and_cut(tmp_path: Path) -> None:
    with reserving_folder(tmp_path):
        (tmp_path / store.LOCK).write_bytes(b"\x1b[2Jboo\xff\n" + b"x" * 100_000)
        with pytest.raises(BusyError) as refusal, reserving_folder(tmp_path):
            pytest.fail("two at once")
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 1000


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    (tmp_path / store.LOCK).symlink_to("precious")
    with (
        pytest.raises(FednotesError, match="cannot be written"),
        reserving_folder(tmp_path),
    ):
        pytest.fail("held through a link")
    assert (tmp_path / "precious").read_text() == "text"


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(number: int, operation: int) -> None:
        raise OSError(problem, os.strerror(problem))

    problem = errno.ENOLCK
    monkeypatch.setattr(store.fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING), reserving_folder(tmp_path):
        assert "has no locks" in caplog.text
    problem = errno.EIO
    with (
        pytest.raises(FednotesError, match="cannot be written"),
        reserving_folder(tmp_path),
    ):
        pytest.fail("held on a broken disk")


def test_no_descriptor_remains_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with (
        reserving_folder(tmp_path),
        pytest.raises(BusyError),
        reserving_folder(tmp_path),
    ):
        pytest.fail("two at once")
    assert len(os.listdir("/proc/self/fd")) == before
