"""`--out` writes where a person said: devices, FIFOs and links are what they were before."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fednotes.core.errors import FednotesError
from fednotes.core.store import write_out
from fednotes.core.types import Document
from fednotes.data.formats import jsonl


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("before", [0o600, 0o640, 0o666])
def test_a_file_keeps_its_permissions(tmp_path: Path, before: int) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(before)
    write_out(path, "ä\n")
    assert path.read_bytes() == b"\xc3\xa4\n"
    assert mode(path) == before
    assert os.listdir(tmp_path) == ["a"]


def test_a_new_file_is_as_the_umask_has_it(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        write_out(tmp_path / "new" / "a", "text")
    finally:
        os.umask(mask)
    assert mode(tmp_path / "new" / "a") == 0o640


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for folder in (there, here):
        folder.mkdir()
    (there / "real").write_text("old")
    (here / "a").symlink_to("../there/real")
    (here / "new").symlink_to("../there/none yet")
    for name in ("a", "new"):
        write_out(here / name, "new")
        assert (here / name).is_symlink()
    assert (there / "real").read_text() == (there / "none yet").read_text() == "new"
    assert sorted(os.listdir(there)) == ["none yet", "real"]


def test_a_full_device_is_an_error_and_stays_a_device() -> None:
    before = os.stat("/dev/full")
    with pytest.raises(FednotesError, match=r"/dev/full: cannot be written \(No space left"):
        write_out(Path("/dev/full"), "text")
    with pytest.raises(FednotesError, match="No space left"):
        jsonl.write([Document("a", "text")], "/dev/full")
    assert os.path.samestat(os.stat("/dev/full"), before)


def test_a_fifo_is_given_the_bytes_and_stays(tmp_path: Path) -> None:
    path, got = tmp_path / "pipe", list[bytes]()
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: got.append(path.read_bytes()), daemon=True)
    reader.start()
    write_out(path, "text" * 50_000)
    reader.join(timeout=20)
    assert got == [b"text" * 50_000]
    assert stat.S_ISFIFO(path.stat().st_mode)


@pytest.mark.parametrize("to", ["pipe", "file"])
@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
def test_stdout_by_name_is_stdout(tmp_path: Path, name: str, to: str) -> None:
    """Also where the shell has led it into a file: what was printed before and after is there."""
    program = (
        "import sys; from pathlib import Path; from fednotes.core.store import write_out\n"
        "print('before', flush=True); write_out(Path(sys.argv[1]), 'text\\n'); print('after')"
    )
    with open(tmp_path / "out", "ab") as file:
        done = subprocess.run(
            [sys.executable, "-c", program, name],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdout=file if to == "file" else subprocess.PIPE,
            check=True,
            timeout=60,
        )
    got = (tmp_path / "out").read_bytes() if to == "file" else done.stdout
    assert got == b"before\ntext\nafter\n"


@pytest.mark.parametrize("text", ["half \ud800", "whole"])
def test_what_fails_leaves_the_file_before_it(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    if text == "whole":

        def fsync(number: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(FednotesError, match="a: cannot be written"):
        write_out(path, text)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_and_a_loop_are_errors(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path in (tmp_path, tmp_path / "loop", tmp_path / "loop" / "a"):
        with pytest.raises(FednotesError, match="cannot be written"):
            write_out(path, "text")
    assert (tmp_path / "loop").is_symlink()
