"""Runs with worker processes: what they leave, and which processes belong to them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fednotes.jobs.job import Job
from fednotes.jobs.simulate import simulate

PROGRAM = b"fednotes.jobs.workers.process"
# What differs between two runs of one job.
_OF_THE_RUN = {"seconds", "workers", "processors", "command"}


def check_same_files(job: Job, folder: Path) -> None:
    """Simulate a job in one process and in workers; compare all files.

    With two workers, one of them trains the federated part if the job has other parts.
    With four, they share its sites.
    """
    simulate(job, folder / "one")
    files = read_run(folder / "one")
    assert any(place.endswith(".safetensors") for place in files)
    for workers in (2, 4):
        simulate(job, folder / str(workers), workers=workers)
        assert read_run(folder / str(workers)) == files


def read_run(out: Path) -> dict[str, Any]:
    """Return all files of a run by place, JSON files without times.

    The text of a JSON file, and not its values, is compared: its keys have an order.
    """
    contents: dict[str, Any] = {}
    for path in sorted(out.rglob("*")):
        if not path.is_file():
            continue
        place = str(path.relative_to(out))
        content = path.read_bytes()
        if path.suffix == ".json":
            contents[place] = json.dumps(steady(json.loads(content)))
        elif path.suffix == ".jsonl":
            rows = [json.loads(line) for line in content.splitlines()]
            contents[place] = [json.dumps(steady(row)) for row in rows]
        else:
            contents[place] = content
    return contents


def steady(value: Any) -> Any:
    """Return JSON values without those that differ between two runs of one job."""
    if isinstance(value, dict):
        return {k: steady(v) for k, v in value.items() if k not in _OF_THE_RUN}
    if isinstance(value, list):
        return [steady(inner) for inner in value]
    return value


def find_workers(parent: int) -> list[int]:
    """Return the ids of the workers that a process has started."""
    workers = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            status = (process / "stat").read_text().rpartition(")")[2].split()
            if PROGRAM in words and int(status[1]) == parent:
                workers.append(int(process.name))
    return sorted(workers)


def is_running(process: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        status = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return status[0] != "Z"


def wait_until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until a condition holds.

    Raises:
        TimeoutError: It does not hold in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s")
        time.sleep(0.005)
