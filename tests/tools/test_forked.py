"""A forked command behaves like one that a shell starts."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from forked import Command, fork

import fednotes


def _describe(path: str) -> None:
    """Write the threads of the process that forked this one, and where this one is."""
    threads = len(os.listdir(f"/proc/{os.getppid()}/task"))
    variable = os.environ.get("FEDNOTES_TEST_VARIABLE")
    Path(path).write_text(f"{threads} {variable} {'OMP_NUM_THREADS' in os.environ}")


def test_the_forking_process_has_one_thread_and_passes_on_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for value in ("a", "b"):
        monkeypatch.setenv("FEDNOTES_TEST_VARIABLE", value)
        process = fork(_describe, str(tmp_path / value))
        process.join()
        assert process.exitcode == 0
        assert (tmp_path / value).read_text() == f"1 {value} False"


@pytest.mark.parametrize(
    ("words", "code", "printed"),
    [
        (("--version",), 0, ""),
        (("simulate", "none.toml", "--out", "run"), 2, "error: "),
        (("none",), 2, ""),
    ],
)
def test_a_command_ends_with_its_exit_code(
    tmp_path: Path, words: tuple[str, ...], code: int, printed: str
) -> None:
    ended, stderr = Command(tmp_path, *words).wait()
    assert ended == code
    assert stderr.startswith(printed)
    assert bool(stderr) == bool(code)


def test_a_killed_command_ends_with_the_signal(tmp_path: Path) -> None:
    command = Command(tmp_path, "simulate", "demo", "--out", "run")
    assert command.is_alive()
    command.send(signal.SIGKILL)
    assert command.wait() == (-signal.SIGKILL, "")


def test_a_command_runs_in_its_folder_and_leaves_that_of_the_parent(
    tmp_path: Path,
) -> None:
    before = Path.cwd()
    words = ("corpus", "synthesise", "notes", "--sites", "1", "--sentences", "10")
    assert Command(tmp_path, *words).wait() == (0, "")
    assert (tmp_path / "notes").is_dir()
    assert Path.cwd() == before
    assert fednotes.__version__
