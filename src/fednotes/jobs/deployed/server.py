"""What the server's part of a job begins with, and what a failure of it means for the run.

How a deployed run goes, for people: lines that travel to whoever watches, and a file.

A line is a table with `kind`:

    plan      rounds (0: not known), examples of a round (0: not known), the job's title, and
              done: rounds that a run has which goes on from a checkpoint
    round     a committed round; numbers are of sums over sites
    event     something that a person may want to know, such as a site that is waited for
    end       the run is done
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from fednotes.core.errors import ConfigError, FednotesError, MissingExtra, ModelError, TrainingError
from fednotes.core.federation import Federation, Option, Round, State
from fednotes.core.parsing import parse_json, read_json
from fednotes.core.store import write_json, write_text
from fednotes.core.update import Tensors, Total, Update
from fednotes.encoders.frozen import encoder_directory
from fednotes.engines.asking import Event, Transport
from fednotes.engines.deployed import Paused
from fednotes.engines.inprocess import RoundResult
from fednotes.engines.pipe import Setup
from fednotes.engines.wire import Frame
from fednotes.jobs.deployed.site_file import own_files, read_site_file
from fednotes.jobs.deployed.sites import parsed
from fednotes.jobs.job import Job
from fednotes.rules.guard import REJECTED

logger = logging.getLogger("fednotes.jobs.deployed.site")
METRICS = "metrics.jsonl"
_TOLD = ("waiting", "missing", "joined", "refused")  # kinds of events that travel


class Published(Protocol):
    """Where lines go."""

    def publish(self, line: Mapping[str, Any]) -> None: ...


class Progress:
    """What a server's run tells.

    state: the run's folder there. sites: of the job, all of which are needed to begin.
    least: so many are needed to go on.
    """

    def __init__(
        self, state: Path, pipe: Published, job: Job, sites: Sequence[str] = (), least: int = 0
    ) -> None:
        self.path = state / METRICS
        self._pipe, self._job, self._sites, self._least = pipe, job, sites, least
        self._config: Any = None
        self._trained = False
        self._said: dict[tuple[str, str], str] = {}  # site, kind → what was told of it last
        self._silent: dict[str, str] = {}  # site → why it gave no answer
        self._rejected: dict[str, str] = {}  # site → its words
        self.metrics: Mapping[str, float] = {}
        self.rounds = 0
        self.refusals: list[str] = []

    def begin(self, config: Any, resumed: State | None) -> None:
        """The run starts, or goes on: what was told before is told again."""
        self._config = config
        self.rounds = resumed.round if resumed else 0
        kept = [entry for entry in self._kept() if entry["round"] < self.rounds]
        write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in kept))
        examples = (resumed.facts if resumed else {}).get("examples", 0)
        self.plan([examples] if examples else [])
        for entry in kept:
            self._pipe.publish({"kind": "round", "evaluated": True, **entry})

    def plan(self, sizes: list[int]) -> None:
        """How long it will take. sizes: of the sites, or of all together; [] if not known."""
        plan = self._job.module.planned
        if sizes:
            rounds, each = plan(self._config, sizes)
        else:
            few, many = (plan(self._config, [n])[0] for n in (1, 1_000_000))
            rounds, each = (few if few == many else 0), 0
        line = {"kind": "plan", "title": self._job.title, "rounds": rounds, "examples": each}
        self._pipe.publish({**line, "done": self.rounds})

    def round(self, result: RoundResult) -> None:
        """A round was committed."""
        self.rounds, self.metrics = result.round + 1, dict(result.metrics)
        self._said.pop(("", "waiting"), None)
        entry = {
            "part": "federated",
            "condition": "federated",
            "round": result.round,
            **result.metrics,
            "took_part": result.sites,
            "bytes_up": result.bytes_up,
            "bytes_down": result.bytes_down,
            "seconds": round(result.seconds, 3),
        }
        if result.evaluated:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        self._pipe.publish({"kind": "round", "evaluated": result.evaluated, **entry})

    def event(self, event: Event) -> None:
        """Something went wrong, or is well again."""
        text = _named(event.site, event.text)
        if event.kind == "refused":
            self.refusals.append(text)
            self._judge(event.site, text)
        if event.kind == "joined":  # what it says from now on is news
            self._said.pop((event.site, "refused"), None)
        if event.kind in _TOLD and not (self._trained and event.kind == "refused"):
            self._tell(event.site, event.kind, text)

    def trained(self) -> None:
        """From now on sites are asked for their own scores, which most of them keep."""
        self._trained = True

    def answered(self, site: str) -> None:
        """A site sent something; if it is a refusal, `event` follows."""
        self._rejected.pop(site, None)

    def _judge(self, site: str, text: str) -> None:
        if f"site {site!r} {REJECTED}" in text:
            self._rejected[site] = text.removesuffix("; asked again")

    def require_willing(self) -> None:
        """Raises ConfigError where people at sites said no, and the others are too few."""
        sites = len(self._sites)
        needed = sites if self._config is None else self._least
        if self._rejected and sites - len(self._rejected) < needed:
            said = "; ".join(text for _, text in sorted(self._rejected.items()))
            begin = " to begin" if self._config is None else ""
            raise ConfigError(
                f"{said}. {needed} of {sites} sites are needed{begin}, so this run is over; "
                "once the job is approved, hand it in again"
            )

    def silent(self, sites: Mapping[str, str]) -> None:
        """Which sites gave no answer just now, and why; the same reason is told once."""
        told = self._silent
        self._silent = dict(sites)
        for site, reason in sites.items():
            self._judge(site, reason)
            if told.get(site) != reason:
                text = reason if reason.startswith(f"site {site!r}") else ""
                text = text or f"no answer from site {site!r}: {reason}"
                logger.info("%s", text)
                self._tell(site, "silent", text)

    def _tell(self, site: str, kind: str, text: str) -> None:
        if text != self._said.get((site, kind)):
            self._said[site, kind] = text
            self._pipe.publish({"kind": "event", "text": text, "site": site})

    def end(self) -> None:
        """All is done."""
        self._pipe.publish({"kind": "end", "rounds": self.rounds})

    def _kept(self) -> Iterator[dict[str, Any]]:
        with suppress(OSError):
            for line in self.path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    entry = parse_json(line, strict=False)
                    int(entry["round"])
                    yield entry


def _named(site: str, text: str) -> str:
    """What a site said, with its name: its own words may leave it out."""
    return text if not site or repr(site) in text else f"site {site!r}: {text}"


class Told:
    """A federation that notes how many examples all sites have, once a sum says so."""

    def __init__(self, federation: Federation, progress: Progress) -> None:
        self._federation, self._progress = federation, progress
        self.each: Callable[..., Mapping[str, Update]] = federation.each
        self.resume: Callable[[], State | None] = federation.resume
        self.rounds: Callable[[int, int], Iterator[Round]] = federation.rounds

    def sum(self, task: str, tensors: Tensors | None = None, /, **options: Option) -> Total:
        """As the federation's own."""
        total = self._federation.sum(task, tensors, **options)
        if sentences := int(total.metrics.get("sentences", 0)):
            self._progress.plan([sentences])
        return total


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
