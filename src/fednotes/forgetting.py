"""What a site keeps of one run, deleted: all that could be computed from its notes there.

The ledger and the decisions stay: they say what left the site, and who agreed to it.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from fednotes.core.errors import ConfigError, FednotesError, TrainingError
from fednotes.core.lock import LOCK
from fednotes.data.token_cache import clear_tokens
from fednotes.deployment import RESULTS
from fednotes.engines import processes
from fednotes.engines.pipe import only_one
from fednotes.kit_status import run_of
from fednotes.models.features import clear_cache, default_cache
from fednotes.site_file import SITE_FILE, of_kit

STATE = "state"


def forget(kit: Path, run: str) -> dict[Path, int]:
    """Delete a run's journals and states, its model and scores, and what was computed from the
    site's notes beforehand (its cache). Folder → bytes freed.

    Raises ConfigError for a run that is not known or is alive, FednotesError where something
    cannot be deleted: what is left is deleted when this is called again.
    """
    known = _folders(kit)
    if run not in known:
        names = ", ".join(sorted(known)) or "none"
        raise ConfigError(f"{kit}: keeps nothing of a run {run!r}; it does of: {names}")
    alive = ConfigError(
        f"{kit}: run {run} is alive, and nothing was deleted: end it (fednotes run --abort, by "
        f"its admin), or fednotes site stop {kit}"
    )
    if run in (run_of(kit, job) for job in processes.status(kit).jobs):
        raise alive
    try:
        with only_one(kit / STATE / run):
            freed = {folder: _delete(folder) for folder in _folders(kit)[run]}
    except TrainingError as error:
        raise alive from error
    cache = (of_kit(kit).cache if (kit / SITE_FILE).exists() else None) or default_cache()
    return freed | {cache: clear_caches(cache)}


def clear_caches(cache: Path) -> int:
    """Delete the features, tokens and concepts that were made from notes: bytes freed."""
    return clear_cache(cache) + sum(clear_tokens(cache / name) for name in ("tokens", "concepts"))


def _folders(kit: Path) -> dict[str, list[Path]]:
    """Run → what there is of it."""
    found: dict[str, list[Path]] = {}
    for place in (kit / STATE, kit / RESULTS):
        for folder in sorted(place.iterdir()) if place.is_dir() else []:
            if folder.is_dir() and not folder.is_symlink():
                found.setdefault(folder.name, []).append(folder)
    for folder in processes.job_folders(kit):
        found.setdefault(run_of(kit, folder.name), []).append(folder)
    return found


def _delete(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if not path.is_dir() and path.name != LOCK)
    size = sum(path.lstat().st_size for path in files)
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise FednotesError(
            f"{error.filename or folder}: cannot be deleted ({error.strerror})"
        ) from error
    return size
