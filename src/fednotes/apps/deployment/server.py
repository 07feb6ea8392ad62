"""The server's part of a deployed job: the method's `train` over the engine of real
sites.

STATE/server/ holds checkpoints, STATE/agreement.json what the sites said of themselves,
STATE/metrics.jsonl a line per evaluation; the folder that is fetched gets a copy,
summary.json and, where all sites end with one model, model/. Nothing here knows what
carries the frames: `engines/launch.py` says what both ends start from.

Whoever watches gets lines, tables with `kind`:

    plan      rounds (0: not known), examples of a round (0: not known), the job's title, and
              done: rounds that a run has which goes on from a checkpoint
    round     a committed round; numbers are of sums over sites
    event     something that a person may want to know, such as a site that is waited for
    approvals the sites that have not approved the job, with the time since when (`waiting.py`)
    end       the run is done
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from fednotes.apps.deployment.agreement import (
    AGREE,
    DESCRIBE,
    SCORES,
    agreed_config,
    agreement_of,
    as_text,
    encoder_of,
    from_tensors,
    from_text,
    planned_rounds,
    require_as_declared,
    threshold,
    unpacked,
)
from fednotes.apps.deployment.rules.guard import REJECTED, UNAPPROVED
from fednotes.apps.deployment.site_file import read_site_file, with_local_files
from fednotes.apps.deployment.waiting import APPROVALS_FILE, PendingApprovals
from fednotes.core.errors import (
    ConfigError,
    FednotesError,
    MissingExtra,
    ModelError,
    TrainingError,
    readable,
)
from fednotes.core.federation import Option, State
from fednotes.core.messages import Frame
from fednotes.core.parsing import read_json_table
from fednotes.core.store import write_json, write_text
from fednotes.core.tables import table_fingerprint
from fednotes.core.update import Tensors, Total
from fednotes.engines.deployed import Deployed, Paused
from fednotes.engines.history import OPENED
from fednotes.engines.launch import Setup
from fednotes.engines.requests import Event, Patience, Transport
from fednotes.engines.rounds import RoundResult
from fednotes.engines.secure import SecureSum
from fednotes.jobs.declaration import parse_declared, table_to_approve
from fednotes.jobs.job import Job
from fednotes.jobs.results import (
    METRICS,
    VERSION,
    RunResult,
    add_line,
    line_of,
    rewound,
)
from fednotes.jobs.simulate import versions

# in the server's kit: [files] of this machine, if it needs any
SERVER_FILE = "server.toml"
PROBLEM = "problem.json"  # in the folder that is fetched, of a run that failed
_PART = "federated"
REPEATS = 3  # of one failure at one place, before a run stays stopped
MOST_SCORES = 2**17  # numbers of a site's scores
_REMEDY = "fednotes server stop KIT; fednotes server start KIT --files FILE"
# of the server's own files: what sites meet comes otherwise
_HERE = (ModelError, MissingExtra)
_TOLD = ("waiting", "missing", "joined", "refused")  # kinds of events that travel
logger = logging.getLogger("fednotes.apps.deployment.site")


class Pipe(Transport, Protocol):
    """A transport that also carries lines of progress
    (`apps/deployment/nvflare/server.py`)."""

    pause: Any

    def publish(self, line: Mapping[str, Any]) -> None: ...


def server_main(setup: Setup, transport: Pipe) -> None:
    """Run a job to its end, or to a pause; go on from its checkpoint if there is one.

    Raises TrainingError where another submission may help, another FednotesError where
        not.
    """
    progress: Progress | None = None
    try:
        job = job_of_server(setup)
        torch.set_num_threads(job.threads)
        torch.use_deterministic_algorithms(True)
        progress = Progress(setup, transport, job)
        _run(setup, job, progress)
    except Paused:
        logger.info("paused; it goes on from the last checkpoint")
    except FednotesError as found:
        error = (
            ModelError(f"at the server: {found}") if isinstance(found, _HERE) else found
        )
        last = _is_last(setup.state, progress.rounds if progress else 0, error)
        write_json(setup.folder / PROBLEM, {"problem": str(error), "again": not last})
        if last and isinstance(error, TrainingError):
            raise ConfigError(
                f"{error} (and so again: the run stays stopped)"
            ) from found
        raise error from found.__cause__


def job_of_server(setup: Setup) -> Job:
    """The job with this machine's places of the files that it names.

    Raises ModelError where one is not there, before any site is asked, ConfigError for
    another job's sites.
    """
    path = setup.kit / SERVER_FILE
    declared: Mapping[str, Any] = setup.job
    if path.exists():
        declared = {
            **declared,
            "job": with_local_files(read_site_file(path), declared["job"]),
        }
    job = parse_declared(declared, setup.kit, f"job {declared.get('name')}")
    if tuple(job.sites) != setup.sites:
        raise ConfigError(
            f"the job is for {', '.join(job.sites)}, it was handed in for {', '.join(setup.sites)}"
        )
    try:
        encoder_of(job)
        _require_files(job.config.model)
    except ModelError as error:
        raise ModelError(
            f"{error}. [files] of a TOML file says where it is: {_REMEDY}"
        ) from error
    return job


def _require_files(model: Any) -> None:
    """What the server builds the first model of.

    Dictionaries and text encoders are the sites'.
    """
    for key in ("word_vectors", "backbone", "representation"):
        place = getattr(model, key, "")
        if place not in ("", "learn", "none") and not Path(place).expanduser().exists():
            raise ModelError(f"{key} {place!r}: there is no such file or folder")


def _is_last(state: Path, rounds: int, error: FednotesError) -> bool:
    """Whether no further submission is to be tried: a failure that comes back at the
    same place, or that no submission mends."""
    if not isinstance(error, TrainingError):
        return True
    path, here = state / "failure.json", {"rounds": rounds, "problem": str(error)}
    kept = read_json_table(path)
    times = 1 + (int(kept.get("times", 0)) if {**kept, **here} == kept else 0)
    write_json(path, {**here, "times": times})
    return times >= REPEATS


class _Engine(Deployed):
    """Tells how long the run will take once a sum says how many examples all sites
    have."""

    progress: Progress

    def sum(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> Total:
        """As the federation's own."""
        total = super().sum(task, tensors, **options)
        if task == "count":
            self.progress.plan([int(total.metric("examples"))])
        return total


def _run(setup: Setup, job: Job, progress: Progress) -> None:
    asked, pipe = job.federation, progress.pipe
    key = table_fingerprint(table_to_approve(setup.job, setup.sites, setup.min_sites))
    engine = _Engine(
        progress,
        setup.sites,
        setup.state / "server",
        job=key,
        patience=Patience(
            min_sites=setup.min_sites,
            timeout=asked.timeout,
            knock=min(5.0, asked.timeout),
            grace=asked.grace or math.inf,
            pause=asked.pause,
            knock_every=asked.knock_every,
            checkpoint_seconds=asked.checkpoint_seconds,
        ),
        summing=SecureSum(
            setup.sites,
            job=key,
            threshold=threshold(job, setup),
            record=setup.state / OPENED,
        )
        if asked.secure_sum
        else None,
        observer=progress.round,
        notify=progress.event,
        max_norm=asked.max_norm,
        stop=pipe.pause.is_set,
    )
    engine.progress = progress
    config = _agree(setup, job, engine, progress)
    # sizes stay at the sites
    warnings = job.module.size_warnings(config, [1] * len(setup.sites))
    for text in warnings:
        progress.warn(text)
    progress.begin(config, engine.resume())
    final = job.module.train(engine, config)
    progress.trained = True
    shared = _shared_scores(engine)
    promise = job.module.promise(config)
    spent = {"seconds": engine.seconds, "bytes_up": engine.bytes_up}
    spent |= {"bytes_down": engine.bytes_down, "rounds": final.round}
    result = RunResult(
        version=VERSION,
        title=job.title,
        method=job.method,
        holds=job.kind.name,
        seed=job.seed,
        run=setup.run,
        seconds=engine.seconds,
        bytes_up=engine.bytes_up,
        bytes_down=engine.bytes_down,
        # Of sites whose policy shares them.
        sites={s: {"federated": shared[s]} if s in shared else {} for s in setup.sites},
        privacy={} if promise is None else {"federated": promise.told()},
        metrics=dict(progress.metrics),
        conditions={"federated": spent},
        config=dict(setup.job["job"]),
        versions=versions(),
        notes=[*warnings, *([] if promise is None else [str(promise)])],
    )
    job.module.save(config, final, setup.folder / "model")
    result.write(setup.folder)
    write_text(setup.folder / METRICS, progress.path.read_text(encoding="utf-8"))
    engine.end()
    pipe.publish({"kind": "end", "rounds": progress.rounds})


def _agree(setup: Setup, job: Job, engine: Deployed, progress: Progress) -> Any:
    """The method's configuration, which all the sites have too."""
    path = setup.state / "agreement.json"
    if engine.resume() is not None:
        with readable(path, ConfigError):
            return agreed_config(job, from_text(path.read_text(encoding="utf-8")))
    found = {s: from_tensors(s, t) for s, t in engine.public(DESCRIBE).items()}
    require_as_declared(job, found)
    config = agreed_config(job, found)
    write_text(path, as_text(found))
    progress.refusals.clear()
    try:
        total = engine.sum(
            AGREE, descriptions=as_text(found), agreed=agreement_of(job, found)
        )
    except TrainingError as error:
        if progress.refusals:
            raise ConfigError(str(error)) from error
        raise
    if total.sites < len(setup.sites) and progress.refusals:
        raise ConfigError("; ".join(progress.refusals))
    return config


def _shared_scores(engine: Deployed) -> dict[str, Any]:
    """The scores of those sites whose policy lets them go."""
    found = {}
    for site, tensors in engine.public(SCORES, all_sites=False).items():
        try:
            found[site] = dict(
                unpacked(tensors["scores"], most_values=MOST_SCORES, strict=False)
            )
        except (KeyError, ValueError, TypeError):
            logger.warning("site %r: its scores are not readable", site)
    return found


class Progress:
    """What a server's run tells, and the transport of its engine, which sees replies
    alone: here is noted why sites have no answer."""

    def __init__(self, setup: Setup, pipe: Pipe, job: Job) -> None:
        self.path, self.pipe = setup.state / METRICS, pipe
        self._job, self._sites = job, len(setup.sites)
        self._least = max(threshold(job, setup), setup.min_sites)  # are needed to go on
        self._config: Any = None  # until all have agreed, which takes all of them
        # site, kind → what was told of it last
        self._said: dict[tuple[str, str], str] = {}
        self._silent: dict[str, str] = {}  # site → why it gave no answer
        self._rejected: dict[str, str] = {}  # site → its words
        self._approvals = PendingApprovals(setup.state / APPROVALS_FILE, setup.sites)
        self.metrics: dict[str, float] = {}
        self.rounds = 0
        self.refusals: list[str] = []
        # sites are asked for their own scores then, which most of them keep
        self.trained = False

    def exchange(
        self, frames: Mapping[str, Frame], *, timeout: float, grace: float, enough: int
    ) -> Iterator[tuple[str, Frame]]:
        """As in `Transport`.

        Raises Paused if the run was asked to stop and waits for sites: one that was
        lost can only come back with another submission. Raises ConfigError where so
        many sites have rejected the job that the others are too few.
        """
        silent = dict.fromkeys(frames, "not connected, or still busy")
        replies = self.pipe.exchange(
            frames, timeout=timeout, grace=grace, enough=enough
        )
        for site, reply in replies:
            silent.pop(site, None)
            self._rejected.pop(site, None)  # if the reply is a refusal, `event` follows
            self._approvals.remove(site)  # likewise
            yield site, reply
        if len(frames) - len(silent) < enough and self.pipe.pause.is_set():
            raise Paused
        before, self._silent = (
            self._silent,
            silent | dict(getattr(self.pipe, "failed", {})),
        )
        for site, reason in self._silent.items():
            self._judge(site, reason)
            if before.get(site) != reason:  # the same reason is told once
                named = reason.startswith(f"site {site!r}")
                text = reason if named else f"no answer from site {site!r}: {reason}"
                logger.info("%s", text)
                self._tell(site, "silent", text)
        self._publish_approvals()
        self._require_willing()

    def begin(self, config: Any, resumed: State | None) -> None:
        """The run starts, or goes on: what was told before is told again."""
        self._config = config
        self.rounds = resumed.round if resumed else 0
        kept = rewound(self.path, _PART, self.rounds)
        examples = resumed.facts.get("examples", 0) if resumed else 0
        self.plan([examples] if examples else [])
        for entry in kept:
            self.pipe.publish({"kind": "round", "evaluated": True, **entry})

    def warn(self, text: str) -> None:
        """Say what a person should know before training."""
        logger.warning("%s", text)
        self.pipe.publish({"kind": "event", "text": f"warning: {text}", "site": ""})

    def plan(self, sizes: list[int]) -> None:
        """How long it will take. sizes: of the sites, or of all together; [] if not
        known."""
        if sizes:
            rounds, each = self._job.module.planned(self._config, sizes)
        else:
            rounds, each = planned_rounds(self._job, self._config) or 0, 0
        line = {
            "kind": "plan",
            "title": self._job.title,
            "rounds": rounds,
            "examples": each,
        }
        self.pipe.publish({**line, "done": self.rounds})

    def round(self, result: RoundResult) -> None:
        """A round was committed."""
        self.rounds, self.metrics = result.round + 1, dict(result.metrics)
        self._said.pop(("", "waiting"), None)
        entry = line_of(result, _PART, _PART, took_part=result.sites)
        if result.evaluated:
            add_line(self.path, entry)
        self.pipe.publish({"kind": "round", "evaluated": result.evaluated, **entry})

    def event(self, event: Event) -> None:
        """Something went wrong, or is well again."""
        text = event.text  # a site's own words may leave out its name
        if event.site and repr(event.site) not in text:
            text = f"site {event.site!r}: {text}"
        if event.kind == "refused":
            self.refusals.append(text)
            self._judge(event.site, text)
        if event.kind == "waiting" and (missing := self._approvals.text):
            text = f"{text}; {missing}"
        if event.kind == "joined":  # what it says from now on is news
            self._said.pop((event.site, "refused"), None)
        if event.kind in _TOLD and not (self.trained and event.kind == "refused"):
            self._tell(event.site, event.kind, text)
        logger.info("%s", text if event.kind == "waiting" else event.text)

    def _judge(self, site: str, text: str) -> None:
        """Note from a site's words whether people there have rejected or not approved
        the job."""
        if f"site {site!r} {REJECTED}" in text:
            self._rejected[site] = text.removesuffix("; asked again")
            self._approvals.remove(site)
        elif any(f"site {site!r} {words}" in text for words in UNAPPROVED):
            self._approvals.add(site)

    def _publish_approvals(self) -> None:
        """Say which approvals are missing, where that is news, here and to whoever
        watches."""
        line = self._approvals.news()
        if line is not None:
            logger.info("%s", line["text"])
            self.pipe.publish(line)

    def _require_willing(self) -> None:
        """Raises ConfigError where people at sites said no, and the others are too few."""
        needed = self._sites if self._config is None else self._least
        if self._rejected and self._sites - len(self._rejected) < needed:
            said = "; ".join(text for _, text in sorted(self._rejected.items()))
            begin = " to begin" if self._config is None else ""
            raise ConfigError(
                f"{said}. {needed} of {self._sites} sites are needed{begin}, so this run is over; "
                "once the job is approved, hand it in again"
            )

    def _tell(self, site: str, kind: str, text: str) -> None:
        if text != self._said.get((site, kind)):
            self._said[site, kind] = text
            self.pipe.publish({"kind": "event", "text": text, "site": site})
