"""One process a folder, however the one before it ended."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fednotes.core import store
from fednotes.core.errors import BusyError, FednotesError
from fednotes.core.store import held

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
HOLD = """
import sys, time
from pathlib import Path
from fednotes.core.store import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(folder: Path) -> subprocess.Popen[str]:
    """A process that holds a folder until its stdin ends."""
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


def test_the_second_is_told_who_holds_it_and_a_dead_one_s_is_taken_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with holder(folder) as process:
        pattern = rf"run: in use by process {process.pid} on \S+ since 20\d\d-\S+ \S+ \(.*\): wait"
        with pytest.raises(BusyError, match=pattern), held(folder):
            pytest.fail("two at once")
        process.kill()
    with (folder / store.LOCK).open("a") as left:  # nobody could tidy up
        left.write("of one with a longer command" * 100)
    with held(folder):
        assert (folder / store.LOCK).read_text().startswith(f"process {os.getpid()} on")
        assert "longer" not in (folder / store.LOCK).read_text()
    assert os.listdir(folder) == []


def test_a_folder_without_anything_goes_and_one_with_something_stays(tmp_path: Path) -> None:
    with held(tmp_path / "a" / "new"):
        pass
    with held(tmp_path / "used"):
        (tmp_path / "used" / "file").touch()
    (tmp_path / "empty").mkdir()
    with held(tmp_path / "empty"):
        pass
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "empty", "used"]
    assert not (tmp_path / "a" / "new").exists()
    assert os.listdir(tmp_path / "used") == ["file"]


def test_a_folder_may_be_moved_while_it_is_held(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    with held(one):
        (one / "file").touch()
        one.rename(other)
        with pytest.raises(BusyError), held(other):
            pytest.fail("it is ours there too")
        with held(one):
            assert os.listdir(one) == [store.LOCK]
            assert (one / store.LOCK).stat().st_mode & 0o777 == 0o600
    assert os.listdir(other) == ["file"]


def test_a_folder_that_is_moved_just_before_it_is_locked_is_not_taken_for_the_one_there_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other, flock = tmp_path / "one", tmp_path / "other", store.fcntl.flock

    def late(number: int, what: int) -> None:
        if not other.exists():
            one.rename(other)
        flock(number, what)

    monkeypatch.setattr(store.fcntl, "flock", late)
    with held(one), pytest.raises(BusyError), held(one):
        pytest.fail("two at once")


COUNT = """
import sys
from pathlib import Path
from fednotes.core.errors import BusyError
from fednotes.core.store import held
folder, done = Path(sys.argv[1]), 0
while done < 100:
    try:
        with held(folder):
            number = folder / "number"
            number.write_text(str(int(number.read_text() or 0) + 1))
            done += 1
    except BusyError:
        pass
"""


def test_there_is_never_more_than_one(tmp_path: Path) -> None:
    """The lock's file comes and goes; who waited with an old one does not take it for the lock."""
    (tmp_path / "number").write_text("")
    command = [sys.executable, "-c", COUNT, str(tmp_path)]
    processes = [subprocess.Popen(command, env=ENVIRONMENT) for _ in range(3)]
    try:
        assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
    assert (tmp_path / "number").read_text() == "300"


def test_what_somebody_wrote_into_the_lock_is_cleaned_and_cut(tmp_path: Path) -> None:
    with held(tmp_path):
        (tmp_path / store.LOCK).write_bytes(b"\x1b[2Jboo\xff\n" + b"x" * 100_000)
        with pytest.raises(BusyError) as told, held(tmp_path):
            pytest.fail("two at once")
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 1000


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    (tmp_path / store.LOCK).symlink_to("precious")
    with pytest.raises(FednotesError, match="cannot be written"), held(tmp_path):
        pytest.fail("held through a link")
    assert (tmp_path / "precious").read_text() == "text"


def test_a_file_system_without_locks_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(number: int, what: int) -> None:
        raise OSError(problem, os.strerror(problem))

    problem = errno.ENOLCK
    monkeypatch.setattr(store.fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING), held(tmp_path):
        assert "has no locks" in caplog.text
    problem = errno.EIO
    with pytest.raises(FednotesError, match="cannot be written"), held(tmp_path):
        pytest.fail("held on a broken disk")


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with held(tmp_path), pytest.raises(BusyError), held(tmp_path):
        pytest.fail("two at once")
    assert len(os.listdir("/proc/self/fd")) == before
