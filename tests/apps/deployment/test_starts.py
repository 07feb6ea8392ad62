"""Starting a kit while it is being started."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("nvflare")

from fednotes.apps.deployment.nvflare import processes
from fednotes.core.errors import ConfigError


@pytest.mark.parametrize("other_start", [processes.start, processes.run])
def test_of_two_starts_at_the_same_time_one_is_refused(
    other_start: Callable[[Path], object],
    kits: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second process would replace the socket of the first."""
    kit = kits["a"]
    running = list[processes.RunningProcess]()

    def begin(*_args: object, **_options: object) -> mock.Mock:
        """Act as a process that takes a moment until it is listed."""
        time.sleep(0.3)
        words = ["fednotes.apps.deployment.nvflare.processes", str(kit)]
        running.append(processes.RunningProcess(7, words))
        return mock.Mock()

    def start(start_kit: Callable[[Path], object]) -> str:
        try:
            start_kit(kit)
        except ConfigError as error:
            return str(error)
        return "started"

    monkeypatch.setattr(processes.subprocess, "Popen", begin)
    monkeypatch.setattr(processes.os, "execve", begin)
    monkeypatch.setattr(processes, "list_processes", lambda _kit: list(running))
    monkeypatch.chdir(kit)
    with ThreadPoolExecutor() as threads:
        outcomes = sorted(threads.map(start, [processes.start, other_start]))
    assert outcomes == [f"{kit}: a is already running (process 7)", "started"]


def test_a_folder_that_is_no_kit_stays_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        processes.start(tmp_path)
    assert list(tmp_path.iterdir()) == []
