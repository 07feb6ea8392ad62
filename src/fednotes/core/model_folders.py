"""What kind of model a folder holds, without reading it."""

from __future__ import annotations

from pathlib import Path

PHENOTYPER = "phenotyper"  # the stem of a phenotyping model's files


def is_phenotyper(path: Path) -> bool:
    """Return whether a folder holds a phenotyping model."""
    return (path / f"{PHENOTYPER}.json").is_file()
