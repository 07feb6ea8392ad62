"""Read files in a process of their own, and measure how much memory that takes."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

_MIB = 2**20
_ROOM = (
    3 * 2**30
)  # bytes beside those at the start that the process may map for each file


class Reading(NamedTuple):
    """How the reading of a file ended.

    Attributes:
        end: The error as text; or the number of records.
        mib: By how many MiB the peak of memory grew meanwhile.
    """

    end: str
    mib: float


def read_apart(reader: str, example: Path, paths: Sequence[Path]) -> list[Reading]:
    """Read files one after the other in a new process.

    Args:
        reader: One of `READERS`.
        example: A small file of the same format, which is read before the others, so
            that the memory of modules is not counted.
        paths: The files.
    """
    command = [sys.executable, __file__, reader, str(example), *map(str, paths)]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    return [Reading(*json.loads(line)) for line in completed.stdout.splitlines()]


def _count_notes(path: Path) -> int:
    from fednotes.data.notes import read_notes

    return sum(1 for _ in read_notes(path))


def _count_documents(path: Path) -> int:
    from fednotes.data.formats import read

    return len(read(path))


READERS: dict[str, Callable[[Path], int]] = {
    "notes": _count_notes,
    "documents": _count_documents,
}


def _begin_peak() -> int:
    """Forget the peak of memory so far, and return the bytes that are in use."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    """Return the peak of memory in bytes; that of `resource` is the parent's, too."""
    (line,) = (
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM:")
    )
    return int(line.split()[1]) * 1024


def _mapped() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _main(name: str, paths: Sequence[Path]) -> None:
    reader = READERS[name]
    example, *others = paths
    reader(example)
    for path in others:
        # A reader that does not measure first must not take the machine's memory.
        resource.setrlimit(resource.RLIMIT_AS, (_mapped() + _ROOM, -1))
        before = _begin_peak()
        try:
            end = str(reader(path))
        except Exception as error:
            end = f"{type(error).__name__}: {error}"
        print(json.dumps([end, (_peak() - before) / _MIB]))


if __name__ == "__main__":
    _main(sys.argv[1], [Path(argument) for argument in sys.argv[2:]])
