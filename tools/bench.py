"""Run the benchmarks, and compare each ratio with its limits and goal.

    python tools/bench.py [NAME ...] [--minutes M]

Without names, all benchmarks of `benchmarks/goals.toml` run, in the order and with the
arguments that this file gives. Their output is printed as it arrives, and at the end a
table of all ratios.

The exit code is 0 if each ratio keeps its limits. It is 1 if a ratio does not, if a
benchmark fails or does not print a ratio, or if the time runs out. It is 2 for a wrong
command or a wrong file.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
GOALS = ROOT / "benchmarks" / "goals.toml"
MINUTES = 15.0
# Such as "crf-loss-40 ratio=12.3 against pytorch-crf".
_RATIO = re.compile(
    r"(?P<name>[a-z0-9-]+) ratio=(?P<ratio>[0-9.]+) against (?P<other>.+)"
)


@dataclass(frozen=True)
class Limits:
    """What a ratio should be; None where there is no such limit.

    Attributes:
        floor: The lowest accepted value.
        ceiling: The highest accepted value.
        goal: The intended value: the ratio should be at least as high if there is a floor,
            and at most as high if there is a ceiling.
        optional: Whether the ratio may be missing, because a program that it needs is not
            installed everywhere.
    """

    floor: float | None = None
    ceiling: float | None = None
    goal: float | None = None
    optional: bool = False

    def is_kept_by(self, ratio: float) -> bool:
        """Return whether a ratio is accepted."""
        if self.floor is not None and ratio < self.floor:
            return False
        return self.ceiling is None or ratio <= self.ceiling

    def is_goal_reached_by(self, ratio: float) -> bool:
        """Return whether a ratio reaches the goal; True if there is none."""
        if self.goal is None:
            return True
        return ratio >= self.goal if self.ceiling is None else ratio <= self.goal

    def __str__(self) -> str:
        """Return the limits as a column of the table."""
        limits = []
        if self.floor is not None:
            limits.append(f"at least {self.floor:g}")
        if self.ceiling is not None:
            limits.append(f"at most {self.ceiling:g}")
        if self.goal is not None:
            limits.append(f"goal {self.goal:g}")
        return ", ".join(limits)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark as `make bench` runs it.

    Attributes:
        path: Its program.
        arguments: Arguments of the program.
        ratios: The limits of each ratio that it prints, by the ratio's name.
    """

    path: Path
    arguments: tuple[str, ...]
    ratios: dict[str, Limits]


@dataclass(frozen=True)
class Result:
    """A ratio and its limits.

    Attributes:
        name: The ratio's name.
        ratio: The ratio; None if it was not printed.
        other: What fednotes was compared with; "" if the ratio was not printed.
        limits: The limits.
    """

    name: str
    ratio: float | None
    other: str
    limits: Limits

    @property
    def is_accepted(self) -> bool:
        """Whether the ratio keeps its limits, or may be missing."""
        if self.ratio is None:
            return self.limits.optional
        return self.limits.is_kept_by(self.ratio)

    @property
    def verdict(self) -> str:
        """What a reader should know about the ratio."""
        if self.ratio is None:
            return "not measured" if self.limits.optional else "MISSING"
        if not self.is_accepted:
            return "FAILED"
        if not self.limits.is_goal_reached_by(self.ratio):
            return "goal not reached"
        return "ok"


def read_goals(path: Path) -> list[Benchmark]:
    """Return the benchmarks of a file of goals.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not TOML, or names an unknown key or a missing program.
    """
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    return [_read_benchmark(entry, path) for entry in table["benchmarks"]]


def _read_benchmark(entry: dict[str, Any], path: Path) -> Benchmark:
    """Return one benchmark of a file of goals; see `read_goals`."""
    unknown = entry.keys() - {"file", "arguments", "ratios"}
    if unknown:
        raise ValueError(f"{path}: unknown key {sorted(unknown)[0]!r}")
    program = path.parent / entry["file"]
    if not program.is_file():
        raise ValueError(f"{path}: there is no {program}")
    try:
        ratios = {name: Limits(**limits) for name, limits in entry["ratios"].items()}
    except TypeError as error:
        raise ValueError(f"{path}: {entry['file']}: {error}") from error
    return Benchmark(program, tuple(entry.get("arguments", ())), ratios)


def run(benchmark: Benchmark, seconds: float) -> list[Result]:
    """Run a benchmark, print its output, and return its ratios.

    Args:
        benchmark: The benchmark.
        seconds: Time after which it is stopped.
    """
    print(f"\n== {benchmark.path.name} {' '.join(benchmark.arguments)}", flush=True)
    start = time.monotonic()
    lines: list[str] = []
    with _started(benchmark, seconds) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
        code = process.wait()
    elapsed = time.monotonic() - start
    if elapsed >= seconds:
        print(f"{benchmark.path.name}: stopped after {elapsed:.0f} s", flush=True)
    elif code:
        print(f"{benchmark.path.name}: failed with exit code {code}", flush=True)
        lines = []
    else:
        print(f"{benchmark.path.name}: {elapsed:.0f} s", flush=True)
    return find_results(benchmark, lines)


@contextmanager
def _started(benchmark: Benchmark, seconds: float) -> Iterator[subprocess.Popen[str]]:
    """Start a benchmark; end its group of processes at the time limit, and at the end."""
    command = [sys.executable, "-u", str(benchmark.path), *benchmark.arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:

        def end_group() -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(seconds, end_group)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            timer.join()
            end_group()


def find_results(benchmark: Benchmark, lines: Sequence[str]) -> list[Result]:
    """Return the ratios of a benchmark from its output, in the order of its limits."""
    printed = {}
    for line in lines:
        match = _RATIO.fullmatch(line.strip())
        if match is not None:
            printed[match["name"]] = (float(match["ratio"]), match["other"])
    results = []
    for name, limits in benchmark.ratios.items():
        ratio, other = printed.get(name, (None, ""))
        results.append(Result(name, ratio, other, limits))
    return results


def show(results: Sequence[Result]) -> None:
    """Print a table of all ratios."""
    table = Table("ratio", "value", "against", "limits", "", box=None, pad_edge=False)
    for result in results:
        value = "" if result.ratio is None else f"{result.ratio:g}"
        table.add_row(
            result.name, value, result.other, str(result.limits), result.verdict
        )
    Console(width=110).print(table, highlight=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmarks that the command line names; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", help="benchmarks to run, such as crf; all by default"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help="maximum time of all benchmarks together",
    )
    parser.add_argument("--goals", type=Path, default=GOALS, help="file with the goals")
    options = parser.parse_args(arguments)

    try:
        benchmarks = read_goals(options.goals)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    known = [benchmark.path.stem for benchmark in benchmarks]
    unknown = [name for name in options.names if name not in known]
    if unknown:
        print(
            f"error: no benchmark {unknown[0]!r}; there are: {', '.join(known)}",
            file=sys.stderr,
        )
        return 2

    # SIGTERM would end this process without ending the benchmark that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    deadline = time.monotonic() + 60 * options.minutes
    results = []
    for benchmark in benchmarks:
        if not options.names or benchmark.path.stem in options.names:
            results += run(benchmark, max(0.0, deadline - time.monotonic()))
    print()
    show(results)
    return 0 if all(result.is_accepted for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
