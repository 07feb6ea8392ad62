"""`fednotes site run` and `fednotes server run`: in the foreground, for systemd and
containers."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from intruders import copy_kit, free_port, project
from places import Place, until
from ward_places import stopped

from fednotes.apps.deployment.nvflare import processes
from fednotes.apps.deployment.nvflare.authority import provision
from fednotes.apps.deployment.problems import read_last_problem, record_problem


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    provision(project(free_port(), "h1", "h2"), tmp_path / "kits")
    (tmp_path / "train.conll").touch()
    (tmp_path / "h1.toml").write_text(
        "[data]\ntrain = 'train.conll'\ntest = 'train.conll'\n"
    )
    running = Place(tmp_path)
    try:
        yield running
    finally:
        stopped(running)


def ended(process: subprocess.Popen[str], sign: int) -> tuple[int, str]:
    """Return the exit code after a signal, and the output."""
    process.send_signal(sign)
    output, _ = process.communicate(timeout=300)
    return process.returncode, output


@pytest.mark.network
def test_a_server_and_a_site_run_in_the_foreground(place: Place) -> None:
    """Each is the process that was begun, prints its log, ends as it is told, and all
    with it. What ends by itself has failed, so that systemd starts it again."""
    server, h1 = place.folder / "kits/server", place.folder / "kits/sites/h1"
    record_problem(h1, "of an earlier process")
    running = place.begin("server", "run", "kits/server")
    site = place.begin("site", "run", "kits/sites/h1", "--site-file", "h1.toml")
    log = h1 / "fednotes.log"
    until(lambda: log.exists() and "connected to the server" in log.read_text(), 300)
    assert read_last_problem(h1) is None
    assert processes.read_status(server).pid == running.pid
    assert processes.read_status(h1).pid == site.pid
    again = place.give("site", "run", "kits/sites/h1", code=2)
    assert f"h1 is already running (process {site.pid})" in again
    copy_kit(h1, place.folder / "copy")
    second = place.begin("site", "run", "copy")
    output, _ = second.communicate(timeout=300)
    assert second.returncode not in (0, 2, 130)
    assert "another process of this site is connected" in output
    assert "INFO fednotes.apps.deployment.nvflare.processes: ended on its own" in output
    problem = read_last_problem(place.folder / "copy")
    assert problem is not None
    assert problem.text.startswith("the server refuses this site: another process")
    assert site.poll() is None
    code, output = ended(running, signal.SIGINT)
    assert code == 130
    assert "site 'h1' is connected" in output
    assert "processes: stopped by SIGINT" in output
    running = place.begin("server", "run", "kits/server")
    until(lambda: "answers" in place.give("preflight", "kits/server"), 300)
    assert ended(running, signal.SIGKILL)[0] == -signal.SIGKILL
    until(
        lambda: not processes.list_processes(server.resolve()), 30
    )  # nothing outlives it
    code, output = ended(site, signal.SIGTERM)
    assert code == 0
    assert f"started as process {site.pid}, which connects to localhost:" in output
    assert "fednotes.presence: connected to the server" in output
    assert "processes: stopped by SIGTERM" in log.read_text()
    assert output.endswith("stopped; its runs resume when it is started again\n")
    assert [processes.list_processes(kit.resolve()) for kit in (server, h1)] == [[], []]
