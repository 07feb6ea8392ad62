"""What the server's part of a job begins with, and what a failure of it means for the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError, FednotesError, MissingExtra, ModelError, TrainingError
from fednotes.core.parsing import read_json
from fednotes.core.store import write_json
from fednotes.deployed_jobs import parsed
from fednotes.engines.asking import Transport
from fednotes.engines.deployed import Paused
from fednotes.engines.pipe import Setup
from fednotes.engines.wire import Frame
from fednotes.jobs import Job
from fednotes.models.frozen import encoder_directory
from fednotes.progress import Progress
from fednotes.site_file import own_files, read_site_file

SERVER_FILE = "server.toml"  # in the server's kit: [files] of this machine, if it needs any
_REMEDY = "fednotes server stop KIT; fednotes server start KIT --files FILE"
REPEATS = 3  # of one failure at one place, before a run stays stopped
_HERE = (ModelError, MissingExtra)  # of the server's own files: what sites meet comes otherwise


def job_of_server(setup: Setup) -> Job:
    """The job with this machine's places of the files that it names.

    Raises ModelError where one is not there, before any site is asked, ConfigError for another
    job's sites.
    """
    path = setup.kit / SERVER_FILE
    declared: Mapping[str, Any] = setup.job
    if path.exists():
        file = read_site_file(path)
        declared = {**declared, "job": own_files(file, declared["job"])}
    job = parsed(declared, setup.kit, f"job {declared.get('name')}")
    if tuple(job.sites) != setup.sites:
        raise ConfigError(
            f"the job is for {', '.join(job.sites)}, it was handed in for {', '.join(setup.sites)}"
        )
    try:
        _require_files(job.config.model)
    except ModelError as error:
        raise ModelError(f"{error}. [files] of a TOML file says where it is: {_REMEDY}") from error
    return job


def _require_files(model: Any) -> None:
    """What the server builds the first model of. Dictionaries and text encoders are the sites'."""
    for key in ("encoder", "contextual"):
        spec = getattr(model, key, "")
        if spec:
            name = spec if Path(spec).expanduser().is_dir() else spec.partition("#")[0]
            encoder_directory(name, spec)
    for key in ("word_vectors", "backbone", "representation"):
        place = getattr(model, key, "")
        if place in ("", "learn", "none") or Path(place).expanduser().exists():
            continue
        raise ModelError(f"{key} {place!r}: there is no such file or folder")


def explained_here(error: FednotesError) -> FednotesError:
    """An error of this machine's own files says that it is here."""
    return ModelError(f"at the server: {error}") if isinstance(error, _HERE) else error


def is_last(state: Path, rounds: int, error: FednotesError) -> bool:
    """Whether no further submission is to be tried: a failure that comes back at the same place,
    or that no submission mends."""
    if not isinstance(error, TrainingError):
        return True
    path, here = state / "failure.json", {"rounds": rounds, "problem": str(error)}
    times = 1
    try:
        kept = read_json(path)
        if {k: kept[k] for k in here} == here:
            times += int(kept["times"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    write_json(path, {**here, "times": times})
    return times >= REPEATS


class Listening:
    """A transport, and why sites have no answer: the engine sees replies alone."""

    def __init__(self, pipe: Any, progress: Progress) -> None:
        self._pipe, self._progress = pipe, progress

    def exchange(
        self, frames: Mapping[str, Frame], *, timeout: float, grace: float, enough: int
    ) -> Iterator[tuple[str, Frame]]:
        """As in `Transport`.

        Raises Paused if the run was asked to stop and waits for sites: one that was lost can
        only come back with another submission. Raises RefusedError where so many sites have
        rejected the job that the others are too few.
        """
        pipe: Transport = self._pipe
        silent = dict.fromkeys(frames, "not connected, or still busy")
        for site, reply in pipe.exchange(frames, timeout=timeout, grace=grace, enough=enough):
            silent.pop(site, None)
            self._progress.answered(site)
            yield site, reply
        if len(frames) - len(silent) < enough and self._pipe.pause.is_set():
            raise Paused
        self._progress.silent(silent | dict(getattr(self._pipe, "failed", {})))
        self._progress.require_willing()
