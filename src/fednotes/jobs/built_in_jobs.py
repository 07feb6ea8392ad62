"""The built-in job files.

Shells complete the names of these jobs, so this module imports nothing large.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import resources
from pathlib import Path
from types import ModuleType

from fednotes.core import plugins
from fednotes.core.errors import ConfigError
from fednotes.core.settings import read_toml


@lru_cache(maxsize=1)
def list_built_in_jobs() -> Mapping[str, Path]:
    """Return the built-in job files by name, such as "fedner/paper".

    `demo` belongs to the core. Applications and other packages add jobs by entry points
    of the group `fednotes.jobs`. An entry point names a package whose folder holds job
    files, and a job's name is its path in that folder without the suffix.

    Raises:
        ConfigError: A package cannot be imported, or two packages have jobs of the same
            name.
    """
    jobs = {"demo": Path(str(resources.files("fednotes") / "jobs" / "demo.toml"))}
    for entry in plugins.list_entries("jobs").values():
        folder = Path(str(resources.files(plugins.load_entry(entry, ModuleType))))
        for path in folder.rglob("*.toml"):
            # A file with "base" is a grid over a job, not a job itself.
            if "base" in read_toml(path):
                continue
            name = path.relative_to(folder).with_suffix("").as_posix()
            if name in jobs:
                raise ConfigError(
                    f"{path}: another package has a job {name!r} ({jobs[name]}): "
                    "uninstall one of the packages"
                )
            jobs[name] = path
    return dict(sorted(jobs.items()))
