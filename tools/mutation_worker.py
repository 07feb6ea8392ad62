"""Run tests in forks of this process, which has imported the slow packages.

    python tools/mutation_worker.py SRC MODULE ...

SRC is a copy of the project's `src`, the first folder from which packages are imported;
nothing of it is imported here. Each line of standard input requests a run, in JSON: the
"tests", the maximum number of "seconds", and the "folder" to which they write. Each line
of standard output is the answer: the "code" (pytest's; -1 after the time limit), the
"passed" and "skipped" tests, the first test that "failed", and the "seconds".
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


class Outcomes:
    """A plugin of pytest that counts the tests by outcome."""

    def __init__(self) -> None:
        self.passed = self.skipped = 0
        self.failed = ""

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.passed += report.passed and report.when == "call"
        self.skipped += report.skipped
        if report.failed:
            self.failed = self.failed or report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.failed = self.failed or report.nodeid


def run(tests: Sequence[str], folder: Path) -> dict[str, Any]:
    """Run tests in the forked process, and return the answer without the seconds."""
    import pytest

    outcomes = Outcomes()
    options = ["-x", "-q", "-p", "no:cacheprovider"]
    # pytest warns of modules that were imported before.
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    code = pytest.main(
        [*options, f"--basetemp={folder / 'tmp'}", *tests], plugins=[outcomes]
    )
    return {"code": int(code), **vars(outcomes)}


def answer(tests: Sequence[str], seconds: float, folder: str) -> dict[str, Any]:
    """Run tests in a forked process, and return the answer.

    The process and all that it started are killed at the time limit, and at the end.
    """
    place, start = Path(folder), time.monotonic()
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setpgid(0, 0)
            out = os.open(place / "log", os.O_CREAT | os.O_WRONLY)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for number, target in enumerate((nothing, out, out)):
                os.dup2(target, number)
            result = run(tests, place)
            (place / "result").write_text(json.dumps(result), "utf-8")
            code = 0
        except BaseException:  # this process must not return to the caller's code
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    late = False
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() - start > seconds:
            late = True
            _end(child)
            os.waitpid(child, 0)
            break
        time.sleep(0.01)
    _end(child)  # also ends the processes that the tests have started
    outcome: dict[str, Any] = {
        "code": -1 if late else 3,
        "passed": 0,
        "skipped": 0,
        "failed": "",
    }
    with suppress(FileNotFoundError, ValueError):
        outcome |= {} if late else json.loads((place / "result").read_text("utf-8"))
    return outcome | {"seconds": time.monotonic() - start}


def _end(group: int) -> None:
    """Kill a group of processes."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def main(source: str, modules: Sequence[str]) -> None:
    """Answer requests until standard input ends."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, source)
    spec = importlib.util.find_spec("fednotes")
    if spec is None or not str(spec.origin).startswith(source):
        sys.exit(
            f"error: fednotes is imported from {spec and spec.origin}, not from {source}"
        )
    for name in modules:
        with suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
