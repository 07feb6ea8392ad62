"""How many files one note, and one secure sum, pass on their way.

    python tools/walk.py [note | exchange]

A tiny run is traced. Its walk is the package's functions in the order in which each is called for
the first time, so a loop counts once. A file is entered where a call comes to it from another and
no call of it is still open: then it was never there, or had been left. The last lines are
`note files=N entered=M most=K` and the same of `exchange`: the files passed, how often one was
entered in all, and how often the one that was entered most.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import fednotes

PACKAGE = Path(fednotes.__file__).parent
SAVED = "taggers/saving.py"
JOB = """\
method = "fedner"
conditions = ["federated"]
[training]
epochs = 1
batch_size = 2
[model]
hashed_words = 16
word_dim = 4
char_dim = 4
char_filters = 4
cnn_filters = 4
lstm_units = 4
[sites.ward]
path = "notes.conll"
split = "sentence"
format = "conll"
"""


@dataclass(frozen=True, slots=True)
class Walk:
    """stops: files within the package in the order of the walk, each time that it is entered."""

    stops: tuple[str, ...]

    @property
    def entered(self) -> Counter[str]:
        """file: how often it is entered."""
        return Counter(self.stops)


def walk(run: Callable[[], Any]) -> Walk:
    """What of the package `run` calls, in order; bodies of modules and classes do not count."""
    seen: set[CodeType] = set()
    stops: list[str] = []

    def called(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & CO_OPTIMIZED and code not in seen:
            seen.add(code)
            if (file := _file(code)) and file not in _open(frame.f_back):
                stops.append(file)

    sys.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Walk(tuple(stops))


def _file(code: CodeType) -> str:
    """Where in the package a function stands; "" outside it."""
    path = Path(code.co_filename)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else ""


def _open(frame: FrameType | None) -> set[str]:
    """The files whose functions have not returned yet."""
    files = set()
    while frame is not None:
        files.add(_file(frame.f_code))
        frame = frame.f_back
    return files


def note(folder: Path) -> Walk:
    """From a job file to the model that was trained on its one note."""
    from fednotes.jobs.job_file import load_job
    from fednotes.jobs.simulate import simulate

    rows = [f"word{n} O\ndrug{n} B-drug\n. O\n\n" for n in range(10)]
    (folder / "notes.conll").write_text("".join(rows), "utf-8")
    (folder / "job.toml").write_text(JOB, "utf-8")
    made = walk(lambda: simulate(load_job(str(folder / "job.toml")), folder / "run"))
    return Walk(made.stops[: made.stops.index(SAVED) + 1])  # the report comes after


def exchange() -> Walk:
    """One secure sum over three sites, the keys of the next one on the way."""
    import torch

    from fednotes.core.update import Update
    from fednotes.engines.inprocess import InProcess

    class Toy:
        tasks = frozenset({"add"})

        def __init__(self, name: str) -> None:
            self.id = name

        def add(self, tensors: dict[str, torch.Tensor]) -> Update:
            return Update({"x": tensors["x"] + 1}, 2.0, {"loss": 0.5})

    federation = InProcess([Toy(name) for name in "abc"], secure=True)  # type: ignore[list-item]
    federation.sum("add", {"x": torch.zeros(3)})  # the first has the keys of two
    return walk(lambda: federation.sum("add", {"x": torch.ones(3)}))


def main(wanted: list[str]) -> None:
    """Prints the walks, file by file."""
    with tempfile.TemporaryDirectory() as folder:
        walks = {"note": lambda: note(Path(folder)), "exchange": exchange}
        for name in wanted or list(walks):
            made = walks[name]()
            for file, times in made.entered.items():
                print(f"  {times:2d} {file}")
            most = max(made.entered.values())
            print(f"{name} files={len(made.entered)} entered={len(made.stops)} most={most}")


if __name__ == "__main__":
    main(sys.argv[1:])
