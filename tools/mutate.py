"""Change each line that docs/papers.md names, and run the tests that must notice.

    python tools/mutate.py [--sample N --seed S] [--minutes M] [--jobs J] [--only TEXT]
    [--list]

A mutant is the project with one small error: in a statement that a marker marks
(`mutations.py` says which statement that is and what is changed), or one that
`mutants.toml` names. The tests of the marker's row, or of the named mutant, run on a
copy of `src`. The mutant is killed if one of them fails or does not end in time;
otherwise, it survives. A mutant that changes nothing that a test could notice is listed
in `mutants.toml` as equivalent, with the reason.

The exit code is 0 if all mutants were killed, and 1 if one survived. It is 2 if no
result is possible: tests fail or are skipped on the unchanged code, the text of a named
mutant is gone, or a marker marks no statement.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import json
import os
import py_compile
import queue
import random
import shutil
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
from mutations import marked, mutants
from papers import (
    ROOT,
    Row,
    is_of_deleted_app,
    lines_of,
    markers,
    rows,
    without_deleted_apps,
)
from scratch import scratch

SLOW = [  # packages that take long to import
    *(
        "torch",
        "numba",
        "numpy",
        "pytest",
        "hypothesis",
        "safetensors.torch",
        "tokenizers",
    ),
    *(
        "transformers.models.bart.modeling_bart",
        "transformers.models.bert.modeling_bert",
    ),
    *("sklearn.linear_model", "scipy.stats"),
]
WORKER = Path(__file__).with_name("mutation_worker.py")
# A mutant's tests may take 30 s, or ten times as long as on the unchanged code.
LEAST = 30.0
TIMES = 10.0


class Wrong(Exception):
    """No result is possible, as the module describes."""


class Change(NamedTuple):
    """A mutant.

    Attributes:
        of: The marker, or the name of the mutant in `mutants.toml`.
        path: The changed file, relative to the root.
        line: The line that is changed.
        source: The changed content of the file.
        tests: The tests that must notice.
    """

    of: str
    path: Path
    line: int
    source: str
    tests: tuple[str, ...]

    def diff(self, root: Path) -> list[str]:
        """Return the lines that differ: the old ones after "-", then the new ones after "+"."""
        lines_before, lines_after = (
            (root / self.path).read_text("utf-8").splitlines(),
            self.source.splitlines(),
        )
        while lines_before and lines_after and lines_before[0] == lines_after[0]:
            del lines_before[0], lines_after[0]
        while lines_before and lines_after and lines_before[-1] == lines_after[-1]:
            del lines_before[-1], lines_after[-1]
        return [f"-{line}" for line in lines_before] + [
            f"+{line}" for line in lines_after
        ]


# ---- the mutants ---------------------------------------------------------------------


def of_rows(root: Path, table: Sequence[Row]) -> Iterator[Change]:
    """Yield the mutants of all statements that are marked in the functions of rows."""
    for row in table:
        for function in row.functions:
            places = list(_places(root, row.marker, function))
            if not places:
                raise Wrong(f"{function} has no comment `# {row.marker}`")
            for path, line in places:
                source = (root / path).read_text("utf-8")
                statement = marked(source, line)
                candidates = mutants(source, statement) if statement else []
                if not candidates:
                    raise Wrong(
                        f"{path}:{line}: {row.marker} marks a statement without mutants: put it "
                        "at the statement that computes the equation"
                    )
                for each in candidates:
                    yield Change(row.marker, path, each.line, each.source, row.tests)


def _places(root: Path, marker: str, function: str) -> Iterator[tuple[Path, int]]:
    """Yield the file and the line of each marker in a function."""
    place = lines_of(function, root)
    if place is None:
        raise Wrong(f"docs/papers.md: {marker}: no function {function} in src")
    path, lines = place
    for found_marker, line in markers(path.read_text("utf-8")):
        if found_marker == marker and line in lines:
            yield path.relative_to(root), line


def of_list(root: Path, listed: Sequence[dict[str, Any]]) -> Iterator[Change]:
    """Yield the named mutants, except those of applications that were deleted."""
    for each in listed:
        path, original, replacement = Path(each["file"]), each["old"], each["new"]
        tests = [test for test in each["tests"] if not is_of_deleted_app(test, root)]
        if is_of_deleted_app(each["file"], root) or not tests:
            continue
        source = (root / path).read_text("utf-8")
        if source.count(original) != 1:
            raise Wrong(
                f"tools/mutants.toml: {each['what']!r}: its text must occur once in {path}, "
                f"but it occurs {source.count(original)} times: {original!r}"
            )
        changed = source.replace(original, replacement)
        if changed == source:
            raise Wrong(f"tools/mutants.toml: {each['what']!r} changes nothing")
        if path.suffix == ".py":
            try:
                ast.parse(changed)
            except SyntaxError as error:
                raise Wrong(
                    f"tools/mutants.toml: {each['what']!r} does not parse"
                ) from error
        line = source[: source.index(original)].count("\n") + 1
        yield Change(each["what"], path, line, changed, tuple(tests))


def collected(root: Path) -> list[Change]:
    """Return all mutants except the equivalent ones.

    Raises:
        Wrong: No result is possible.
    """
    listed = tomllib.loads((root / "tools" / "mutants.toml").read_text("utf-8"))
    page = (root / "docs" / "papers.md").read_text("utf-8")
    table = without_deleted_apps(rows(page), root)
    changes = [*of_rows(root, table), *of_list(root, listed.get("mutant", []))]
    equivalent = [
        (each["file"], each["old"], each["new"])
        for each in listed.get("equivalent", [])
        if not is_of_deleted_app(each["file"], root)
    ]
    files = {path for path, _, _ in equivalent}
    keys = [_key(c, root) if c.path.as_posix() in files else None for c in changes]
    for entry in equivalent:
        if entry not in keys:
            raise Wrong(
                f"tools/mutants.toml: no mutant of {entry[0]} is {entry[2]!r} any more"
            )
    return [c for c, key in zip(changes, keys, strict=True) if key not in equivalent]


def _key(change: Change, root: Path) -> tuple[str, str, str]:
    """Return the file of a mutant, and its old and new text without comments."""
    lines = change.diff(root)
    before, after = (
        " ".join(line[1:].split("  # ")[0].strip() for line in lines if line[0] == sign)
        for sign in "-+"
    )
    return change.path.as_posix(), before, after


# ---- running -------------------------------------------------------------------------


class Copy:
    """A copy of `src`, and the process that runs tests on it."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        # Compiled kernels are copied, compiled Python is not.
        ignored = shutil.ignore_patterns("*.pyc")
        shutil.copytree(root / "src", folder / "src", ignore=ignored)
        # Python compares the content of a source with its compiled form, so it notices
        # each changed file.
        checked = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(folder / "src", quiet=2, invalidation_mode=checked)
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), str(folder / "src"), *SLOW],
            cwd=root,
            env=os.environ
            | {"PYTHONPATH": str(folder / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
            | {"OMP_NUM_THREADS": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, tests: Sequence[str], seconds: float) -> dict[str, Any]:
        """Run tests on the copy, and return the answer of the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {
            "tests": tests,
            "seconds": seconds,
            "folder": str(self.folder / "run"),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise Wrong("the process that runs the tests has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run_changed(self, change: Change, seconds: float) -> dict[str, Any]:
        """Run a mutant's tests on its changed file, and restore the file with its time stamp."""
        path = self.folder / change.path
        path.write_text(change.source, "utf-8")
        try:
            return self.run(change.tests, seconds)
        finally:
            shutil.copy2(self.root / change.path, path)

    def log(self) -> str:
        """Return what the last run printed."""
        return (self.folder / "run" / "log").read_text("utf-8", "replace")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


class Run:
    """A run of mutants, which the copies share."""

    def __init__(self, root: Path, copies: Sequence[Copy], end: float) -> None:
        self.root, self.end = root, end
        self.number = self.done = 0
        self.survived: list[Change] = []
        self._free: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for each in copies:
            self._free.put(each)
        self._jobs = len(copies)
        self._lock = threading.Lock()

    def unchanged(
        self, groups: Sequence[tuple[str, ...]]
    ) -> dict[tuple[str, ...], float]:
        """Return the seconds that each group of tests takes on the unchanged code.

        Raises:
            Wrong: Tests of a group fail or are skipped.
        """
        with ThreadPoolExecutor(self._jobs) as pool:
            return dict(zip(groups, pool.map(self._unchanged, groups), strict=True))

    def _unchanged(self, tests: tuple[str, ...]) -> float:
        """Return the seconds of one group of tests; see `unchanged`."""
        copy = self._free.get()
        try:
            outcome = copy.run(tests, 600.0)
            if outcome["code"] != 0 or outcome["skipped"] or not outcome["passed"]:
                raise Wrong(
                    f"on the unchanged code, {' '.join(tests)} must pass and none be skipped:\n"
                    + "\n".join(copy.log().splitlines()[-15:])
                )
            return float(outcome["seconds"])
        finally:
            self._free.put(copy)

    def all(
        self, changes: Sequence[Change], times: dict[tuple[str, ...], float]
    ) -> None:
        """Run every mutant that can be started before the time runs out."""
        self.number = len(changes)
        with ThreadPoolExecutor(self._jobs) as pool:
            for _ in pool.map(lambda each: self._one(each, times[each.tests]), changes):
                pass

    def _one(self, change: Change, usual: float) -> None:
        """Run one mutant."""
        if time.monotonic() > self.end:
            return
        copy = self._free.get()
        try:
            outcome = copy.run_changed(change, max(LEAST, TIMES * usual))
            if outcome["code"] in (4, 5) and not outcome["failed"]:
                raise Wrong(
                    f"pytest cannot run {' '.join(change.tests)}:\n{copy.log()}"
                )
        finally:
            self._free.put(copy)
        with self._lock:
            self.done += 1
            self._told(change, outcome)

    def _told(self, change: Change, outcome: dict[str, Any]) -> None:
        """Record and print the result of a mutant."""
        killed = outcome["code"] != 0
        if not killed:
            self.survived.append(change)
        by = outcome["failed"] or (
            "the time limit" if outcome["code"] == -1 else "a crash"
        )
        print(
            f"{self.done:>4}/{self.number}  {'killed' if killed else 'SURVIVED':8}"
            f"  {outcome['seconds']:5.1f} s  {change.path}:{change.line}  {change.of}"
        )
        for line in change.diff(self.root):
            print(f"        {line}")
        print(f"        {'by' if killed else 'not noticed by'} ", end="")
        print(by if killed else " ".join(change.tests), flush=True)


def main(words: Sequence[str], root: Path = ROOT) -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--sample", type=int, default=0, help="number of mutants to draw; 0 runs all"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument(
        "--minutes",
        type=float,
        default=600.0,
        help="minutes after which no mutant is started",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count() or 1,
        help="number of mutants to run at the same time",
    )
    parser.add_argument(
        "--only",
        default="",
        help="run mutants whose marker, name or file contains this text",
    )
    parser.add_argument(
        "--list", action="store_true", help="list the mutants without running them"
    )
    arguments = parser.parse_args(words)
    try:
        return _main(arguments, root.resolve())
    except Wrong as wrong:
        print(f"mutate: {wrong}", file=sys.stderr)
        return 2


def _main(arguments: argparse.Namespace, root: Path) -> int:
    """Run the command with parsed arguments, and return its exit code.

    Raises:
        Wrong: No result is possible.
    """
    end = time.monotonic() + 60 * arguments.minutes
    everything = collected(root)
    changes = [
        c
        for c in everything
        if arguments.only in c.of or arguments.only in c.path.as_posix()
    ]
    if arguments.sample and arguments.sample < len(changes):
        changes = random.Random(arguments.seed).sample(changes, arguments.sample)
        print(f"{len(changes)} of {len(everything)} mutants, by seed {arguments.seed}")
    if arguments.list:
        for change in changes:
            print(
                f"{change.path}:{change.line}  {change.of}",
                *change.diff(root),
                sep="\n    ",
            )
        print(f"{len(changes)} mutants")
        return 0
    with scratch() as folder, ExitStack() as stack:
        jobs = max(1, min(arguments.jobs, len(changes)))
        copies = [Copy(root, folder / str(number)) for number in range(jobs)]
        for copy in copies:
            stack.callback(copy.close)
        run = Run(root, copies, end)
        times = run.unchanged(list(dict.fromkeys(change.tests for change in changes)))
        run.all(changes, times)
    if not run.done:
        raise Wrong(
            f"no mutant was run in {arguments.minutes:g} minutes: give more --minutes"
        )
    unreached = (
        f", {run.number - run.done} not run in time" if run.done < run.number else ""
    )
    print(
        f"{run.done - len(run.survived)} killed, {len(run.survived)} survived{unreached}"
    )
    for change in run.survived:
        print(f"survived: {change.path}:{change.line}  {change.of}")
    return 1 if run.survived else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
