"""The files of the experiments.

Shells complete the names of these, so this module imports nothing large.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path

from fednotes.core.settings import read_toml


@lru_cache(maxsize=1)
def list_grid_files() -> Mapping[str, Path]:
    """Return the grid files by the name of the experiment, such as "fedner-table2"."""
    root = Path(str(resources.files("fednotes") / "apps" / "experiments"))
    files = {}
    for path in sorted(root.glob("*/*.toml")):
        # A file without "base" is a job.
        if "base" in read_toml(path):
            files[f"{path.parent.name}-{path.stem}"] = path
    return files
