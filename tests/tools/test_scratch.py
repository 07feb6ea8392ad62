"""A benchmark or test that is stopped leaves no process and no folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from scratch import end_all, working_in

ROOT = Path(__file__).parents[2]
PROGRAM = """
import signal, subprocess, sys, time
from scratch import scratch
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the tests' own process does
with scratch() as folder:
    sleeper = ("import signal, time\\n"
               "for n in (signal.SIGINT, signal.SIGTERM): signal.signal(n, signal.SIG_IGN)\\n"
               "time.sleep(300)")
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"
    subprocess.Popen([sys.executable, "-c", child, sleeper], cwd=folder, start_new_session=True)
    subprocess.Popen([sys.executable, "-c", sleeper, f"{folder}/kit"], start_new_session=True)
    (folder / "file").touch()
    print("begun", flush=True)
    if sys.argv[1] != "nothing":
        time.sleep(300)
"""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Where temporary folders are made; what this test itself leaves there is ended."""
    yield tmp_path
    end_all(tmp_path)


def begin(place: Path, *command: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, *command],
        env={
            **os.environ,
            "TMPDIR": str(place),
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
        },
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def until(condition: Callable[[], object], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return bool(condition())


def processes_in(place: Path) -> list[object]:
    return [*working_in(place), *place.iterdir()]


@pytest.mark.slow
@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "SIGKILL", "group", "nothing"])
def test_no_process_remains_after_the_command(place: Path, end: str) -> None:
    """Its children ignore signals, have children of their own and are in sessions of
    their own."""
    process = begin(place, "-c", PROGRAM, end)
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    if end != "nothing":  # else it ends by itself already
        # the watch is one of them
        assert until(lambda: len(working_in(place)) >= 4, 20)
        assert len(list(place.iterdir())) == 1
    if end == "group":
        os.killpg(process.pid, signal.SIGKILL)
    elif end != "nothing":
        process.send_signal(signal.Signals[end])
    process.communicate(timeout=60)
    assert until(lambda: not processes_in(place), 30), processes_in(place)


def test_processes_in_other_folders_are_left_alone(place: Path) -> None:
    """A folder whose name begins alike is another one."""
    for name in ("a", "ab"):
        (place / name).mkdir()
    sleep = [sys.executable, "-c", "import time; time.sleep(300)"]
    with (
        subprocess.Popen(sleep, cwd=place / "a") as ours,
        subprocess.Popen(sleep, cwd=place / "ab") as outsider,
    ):
        try:
            end_all(place / "a")
            assert ours.wait(timeout=20) == -signal.SIGTERM
            assert outsider.poll() is None
        finally:
            ours.kill()
            outsider.kill()


@pytest.mark.network
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_benchmark_of_real_sites_leaves_no_process_and_no_folder(
    place: Path, number: signal.Signals
) -> None:
    pytest.importorskip("nvflare")
    script = str(ROOT / "benchmarks" / "deployed.py")
    process = begin(
        place, script, "--megabytes", "0.1", "--exchanges", "1", "--steps", "1"
    )
    try:
        # A server, three sites, and the watch.
        assert until(
            lambda: len(working_in(place)) >= 5 or process.poll() is not None, 120
        )
        assert process.poll() is None
        process.send_signal(number)
        process.communicate(timeout=60)
        assert until(lambda: not processes_in(place), 60), processes_in(place)
    finally:
        process.kill()
        process.communicate()
