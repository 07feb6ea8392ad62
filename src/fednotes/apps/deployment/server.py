"""The server's part of a deployed job: the method's `train` over a real network.

STATE/server/ holds checkpoints, STATE/agreement.json the sites' descriptions, and
STATE/metrics.jsonl a line for each evaluation. The folder that the admin fetches gets a
copy of the metrics, summary.json and, if all sites end with one model, model/. Nothing
here depends on the carrier of the frames; `engines/launch.py` defines the start-up data
of both ends.

The watchers of the run receive lines, which are tables with a `kind`:

    plan       number of rounds, examples in a round (0: unknown), the job's title, and
               done: the rounds that a resumed run has already completed
    round      a committed round; its numbers come from sums over sites
    event      an event that may interest a person, such as a missing site; is_problem:
               whether a person at the site should look at it
    approvals  the sites that have not approved the job, and since when (`waiting.py`)
    end        the run is finished
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from fednotes.apps.deployment.rules.guard import REJECTED, UNAPPROVED
from fednotes.apps.deployment.run_secrets import load_or_create_secret
from fednotes.apps.deployment.site_agreement import (
    AGREE,
    DESCRIBE,
    SCORES,
    compute_agreement_fingerprint,
    compute_sum_threshold,
    count_planned_rounds,
    decode_descriptions,
    derive_config,
    digest_encoder,
    encode_descriptions,
    make_threshold_function,
    name_key_exchange,
    read_site_description,
    require_as_declared,
    unpack_json,
)
from fednotes.apps.deployment.site_file import (
    insert_local_paths,
    read_site_file,
    require_no_places,
)
from fednotes.apps.deployment.waiting import APPROVALS_FILE, PendingApprovals
from fednotes.core import bounds
from fednotes.core.errors import (
    ConfigError,
    FednotesError,
    MissingExtra,
    ModelError,
    TrainingError,
    raising_if_unreadable,
)
from fednotes.core.federation import Option, State
from fednotes.core.messages import Frame, ReceivedFrame
from fednotes.core.parsing import find_number, read_json_table
from fednotes.core.seeds import Draws
from fednotes.core.settings import expand_home
from fednotes.core.store import write_json, write_text
from fednotes.core.tables import fingerprint_table
from fednotes.core.tensors import require_deterministic_kernels
from fednotes.core.update import Tensors, Total
from fednotes.engines.deployed import Deployed, Paused
from fednotes.engines.history import OPENED
from fednotes.engines.launch import Setup
from fednotes.engines.requests import Event, Patience, Transport
from fednotes.engines.rounds import RoundResult
from fednotes.engines.sampling import RoundSampling
from fednotes.engines.secure import SecureSum
from fednotes.jobs.declaration import make_table_to_approve, parse_declared
from fednotes.jobs.job import Job
from fednotes.jobs.metrics_file import METRICS, append_entry, make_entry, rewind_metrics
from fednotes.jobs.parts import plan_rounds
from fednotes.jobs.results import RunResult
from fednotes.jobs.run_files import VERSION
from fednotes.jobs.run_folder import list_versions
from fednotes.privacy.promise import Promise
from fednotes.training.site_sampling import count_drawn_sites

# In the server's kit: [files] of this machine, if the job names files.
SERVER_FILE = "server.toml"
SAMPLING_KEY_FILE = "sampling.key"  # in the folder of a run's state
PROBLEM = "problem.json"  # why a run failed, in the folder that the admin fetches
_STARTED = "started.json"  # when a run first started, in its state
_PART = "federated"
MAX_ATTEMPTS = 3  # a run is not resumed after failing this often in the same round
# Limits on the scores that one site shares, and on those of all sites together. They
# keep summary.json readable, whatever a site sends.
MAX_SCORES = 2**17  # maximum number of values from one site
MAX_ALL_SCORES = 2**20
MAX_SCORES_BYTES = 2**22  # from one site
MAX_ALL_SCORES_BYTES = bounds.FILE // 4
MAX_SCORES_DEPTH = 16
MAX_REFUSALS = 100  # maximum number of refusals remembered while sites agree
MAX_EVENTS = 10_000  # maximum number of events published for one site
_FILES_REMEDY = "fednotes server stop KIT; fednotes server start KIT --server-file FILE"
# Errors about files of the server; errors of sites have other classes.
_SERVER_ERRORS = (ModelError, MissingExtra)
_SILENT = "not connected, or still busy"
_PUBLISHED_EVENTS = ("waiting", "missing", "joined", "refused")
logger = logging.getLogger("fednotes.apps.deployment.site")


class Pipe(Transport, Protocol):
    """A transport that also carries lines of progress.

    `apps/deployment/nvflare/server.py` implements it.

    Attributes:
        pause: An event that is set when the run should stop at its next checkpoint.
    """

    pause: Any

    def publish(self, line: Mapping[str, Any]) -> None:
        """Send a line of progress to the watchers of the run."""


def server_main(setup: Setup, transport: Pipe) -> None:
    """Run a job until it ends or is paused; resume from its checkpoint if there is one.

    Raises:
        TrainingError: The run failed, and another submission may help.
        FednotesError: The run failed, and no submission will help.
    """
    progress: RunProgress | None = None
    try:
        job = parse_server_job(setup)
        torch.set_num_threads(job.threads)
        require_deterministic_kernels("cpu")
        progress = RunProgress(setup, transport, job)
        _run(setup, job, progress)
    except Paused:
        logger.info("paused; the run resumes from its last checkpoint")
    except FednotesError as original_error:
        error = original_error
        if isinstance(original_error, _SERVER_ERRORS):
            error = ModelError(f"at the server: {original_error}")
        rounds = progress.rounds if progress else 0
        is_final = _count_failure(setup.state, rounds, error)
        problem = {"problem": str(error), "again": not is_final}
        write_json(setup.folder / PROBLEM, problem)
        if is_final and isinstance(error, TrainingError):
            raise ConfigError(
                f"{error} (failed {MAX_ATTEMPTS} times in the same way: the run will "
                "not be resumed)"
            ) from original_error
        raise error from original_error.__cause__


def parse_server_job(setup: Setup) -> Job:
    """Return the job, with this machine's paths for the files that the job names.

    Raises:
        ModelError: One of the files does not exist, or the job names a file or an
            environment variable of this machine.
        ConfigError: The job was submitted for sites other than those it names.
    """
    path = setup.kit / SERVER_FILE
    where = f"job {setup.job.get('name')}"
    table = setup.job.get("job")
    files: Mapping[str, str] = {}
    declared: Mapping[str, Any] = setup.job
    if isinstance(table, Mapping):
        if path.exists():
            server_file = read_site_file(path)
            files = server_file.files
            declared = {**declared, "job": insert_local_paths(server_file, table)}
        # The server reads the tables of models; only sites open the files of others.
        opened_here = {"model": table.get("model"), "sites": table.get("sites")}
        try:
            require_no_places(opened_here, files, Path(SERVER_FILE), where)
        except ConfigError as error:
            raise ModelError(f"{error}: {_FILES_REMEDY}") from error
    job = parse_declared(declared, setup.kit, where)
    if tuple(job.sites) != setup.sites:
        raise ConfigError(
            f"the job is for {', '.join(job.sites)}, but it was submitted for "
            f"{', '.join(setup.sites)}"
        )
    try:
        digest_encoder(job)
        if not job.module.site_keys:  # otherwise the server builds no model
            _require_files(job.config.model)
    except ModelError as error:
        raise ModelError(
            f"{error}. [files] of a TOML file says where it is: {_FILES_REMEDY}"
        ) from error
    return job


def _require_files(model: Any) -> None:
    """Raise ModelError if a file from which the server builds the model is missing.

    Dictionaries and text encoders are not checked, because only the sites need them.
    """
    for key in ("word_vectors", "backbone", "representation"):
        name = getattr(model, key, "")
        is_file = name not in ("", "learn", "none", "attention")
        if is_file and not os.path.exists(expand_home(name)):
            raise ModelError(f"{key} {name!r}: no such file or folder")


def _count_failure(state: Path, rounds: int, error: FednotesError) -> bool:
    """Count a failure of the run, and return whether it is final.

    A failure is final if another submission cannot help, or if the same failure has
    occurred `MAX_ATTEMPTS` times after the same round.

    Args:
        state: The folder of the run's state.
        rounds: Number of committed rounds.
        error: The failure.
    """
    if not isinstance(error, TrainingError):
        return True
    path = state / "failure.json"
    failure = {"rounds": rounds, "problem": str(error)}
    last_failure = read_json_table(path)
    is_same_failure = all(
        key in last_failure and last_failure[key] == value
        for key, value in failure.items()
    )
    times = 1
    if is_same_failure:
        times += int(last_failure.get("times", 0))
    write_json(path, {**failure, "times": times})
    return times >= MAX_ATTEMPTS


class _Engine(Deployed):
    """A federation that publishes the run's length once sites have counted examples.

    Attributes:
        progress: Publishes the progress of the run.
    """

    progress: RunProgress

    def sum(
        self, task: str, tensors: Tensors | None = None, /, **options: Option
    ) -> Total:
        """Return the total of all sites, as the federation does."""
        total = super().sum(task, tensors, **options)
        if task == "count":
            self.progress.publish_plan([int(total.metric("examples"))])
        return total


def _run(setup: Setup, job: Job, progress: RunProgress) -> None:
    """Train, and write the run's model, results and metrics."""
    first_start = _record_first_start(setup.state)
    engine = _create_engine(setup, job, progress)
    config = _agree_on_config(setup, job, engine, progress)

    # The server does not know how many notes each site has.
    unknown_sizes = [1] * len(setup.sites)
    warnings = job.module.list_size_warnings(config, unknown_sizes)
    for warning in warnings:
        progress.publish_warning(warning)
    # Only the display needs the state here: `train` asks the engine for it again.
    progress.begin(config, engine.resume())
    final_state = job.module.train(engine, config)
    progress.is_trained = True

    result = _make_result(
        setup,
        job,
        engine,
        promise=job.module.make_promise(config),
        warnings=warnings,
        rounds=final_state.round,
        first_start=first_start,
    )
    job.module.save_model(config, final_state, setup.folder / "model")
    result.write(setup.folder)
    write_text(setup.folder / METRICS, progress.path.read_text(encoding="utf-8"))
    engine.end()
    progress.pipe.publish({"kind": "end", "rounds": progress.rounds})


def _record_first_start(state: Path) -> float:
    """Record that a run starts, if this is its first start; return the first start.

    The time of the first start survives restarts of the server.

    Args:
        state: The folder of the run's state.

    Returns:
        Seconds since the epoch.
    """
    first_start = find_number(read_json_table(state / _STARTED), "time")
    if first_start is None:
        first_start = time.time()
        write_json(state / _STARTED, {"time": first_start})
    return first_start


def _make_result(
    setup: Setup,
    job: Job,
    engine: _Engine,
    *,
    promise: Promise | None,
    warnings: Iterable[str],
    rounds: int,
    first_start: float,
) -> RunResult:
    """Return the result of a run, with the scores of the sites that share them.

    Args:
        setup: Start-up data of this side of the job.
        job: The job.
        engine: The federation, after training.
        promise: The job's guarantee of differential privacy; None if it has none.
        warnings: The warnings about the sites' sizes.
        rounds: Number of rounds.
        first_start: When the run first started, in seconds since the epoch.
    """
    shared_scores = _fetch_shared_scores(engine)
    notes = list(warnings)
    privacy = {}
    if promise is not None:
        notes.append(str(promise))
        privacy["federated"] = promise.to_dict()
    return RunResult(
        version=VERSION,
        title=job.title,
        method=job.method,
        holds=job.kind.name,
        seed=job.seed,
        run=setup.run,
        seconds=engine.seconds,
        bytes_up=engine.bytes_up,
        bytes_down=engine.bytes_down,
        sites={
            site: {"federated": shared_scores[site]} if site in shared_scores else {}
            for site in setup.sites
        },
        privacy=privacy,
        metrics=dict(engine.progress.metrics),
        conditions={
            "federated": {
                "seconds": engine.seconds,
                "elapsed": time.time() - first_start,
                "bytes_up": engine.bytes_up,
                "bytes_down": engine.bytes_down,
                "rounds": rounds,
            }
        },
        config=dict(setup.job["job"]),
        versions=list_versions(),
        notes=notes,
    )


def _create_engine(setup: Setup, job: Job, progress: RunProgress) -> _Engine:
    """Return the federation whose sites answer over `progress`."""
    settings = job.federation
    table = make_table_to_approve(setup.job, setup.sites, setup.min_sites)
    fingerprint = fingerprint_table(table)
    summing = None
    if settings.secure_sum:
        summing = SecureSum(
            setup.sites,
            job=name_key_exchange(fingerprint, setup.run),
            threshold=compute_sum_threshold(job, setup),
            threshold_of_drawn=make_threshold_function(job, setup),
            record=setup.state / OPENED,
        )
    engine = _Engine(
        progress,
        setup.sites,
        setup.state / "server",
        job=fingerprint,
        patience=Patience(
            min_sites=setup.min_sites,
            timeout=settings.timeout,
            knock=min(5.0, settings.timeout),
            grace=settings.grace or math.inf,
            pause=settings.pause,
            knock_every=settings.knock_every,
            checkpoint_seconds=settings.checkpoint_seconds,
        ),
        summing=summing,
        sampling=_load_sampling(setup, job),
        observer=progress.record_round,
        notify=progress.record_event,
        max_norm=settings.max_norm,
        counting=job.module.site_class.counting,
        stop=progress.pipe.pause.is_set,
    )
    engine.progress = progress
    return engine


def _load_sampling(setup: Setup, job: Job) -> RoundSampling | None:
    """Return how the sites of a round are drawn; None if all take part.

    The draws follow from a secret in the state of the run, so a resumed run has the
    same ones.
    """
    drawn = count_drawn_sites(job.config)
    if drawn is None:
        return None
    draws = Draws.of_secret(load_or_create_secret(setup.state / SAMPLING_KEY_FILE))
    return RoundSampling(drawn, draws, job.module.site_class.for_all_sites)


def _agree_on_config(
    setup: Setup, job: Job, engine: Deployed, progress: RunProgress
) -> Any:
    """Have all sites agree on the method's configuration, and return it.

    A run that resumes keeps the configuration of its first start.

    Raises:
        ConfigError: A site differs from the job, or refuses the agreement.
    """
    path = setup.state / "agreement.json"
    if engine.resume() is not None:
        with raising_if_unreadable(path, ConfigError):
            saved_text = path.read_text(encoding="utf-8")
            return derive_config(job, decode_descriptions(saved_text))

    descriptions = {
        site: read_site_description(site, tensors)
        for site, tensors in engine.collect_public_facts(DESCRIBE).items()
    }
    require_as_declared(job, descriptions)
    config = derive_config(job, descriptions)
    fingerprint = compute_agreement_fingerprint(job, descriptions)
    text = encode_descriptions(descriptions)
    write_text(path, text)

    progress.refusals.clear()
    try:
        total = engine.sum(AGREE, descriptions=text, agreed=fingerprint)
    except TrainingError as error:
        if progress.refusals:
            raise ConfigError(str(error)) from error
        raise
    if total.sites < len(setup.sites) and progress.refusals:
        raise ConfigError("; ".join(progress.refusals))
    return config


def _count_required_sites(job: Job, setup: Setup) -> int:
    """Return how many sites must be willing to take part, so that rounds can go on.

    If the sites of a round are drawn, one round may draw all that are not willing.
    """
    min_sites = max(compute_sum_threshold(job, setup), setup.min_sites)
    num_drawn = count_drawn_sites(job.config)
    if num_drawn is None:
        return min_sites
    num_unwilling = num_drawn - compute_sum_threshold(job, setup, num_drawn)
    return max(min_sites, len(setup.sites) - num_unwilling)


def _fetch_shared_scores(engine: Deployed) -> dict[str, Any]:
    """Return the scores of the sites whose policy shares them."""
    scores = {}
    answers = engine.collect_public_facts(SCORES, all_sites=False)
    for site, tensors in answers.items():
        try:
            scores[site] = _read_scores(tensors, len(answers))
        except (KeyError, ValueError):
            logger.warning("site %r: its scores are not readable", site)
    return scores


def _read_scores(tensors: Tensors, sites: int) -> dict[str, Any]:
    """Return the scores that a site sent.

    Args:
        tensors: The site's answer.
        sites: Number of sites whose scores go into the same summary.

    Raises:
        KeyError: The answer has no scores.
        ValueError: The scores are malformed or too large.
    """
    packed_scores = tensors["scores"]
    if packed_scores.numel() > min(MAX_SCORES_BYTES, MAX_ALL_SCORES_BYTES // sites):
        raise ValueError("too many bytes")
    scores = unpack_json(
        packed_scores,
        max_values=min(MAX_SCORES, MAX_ALL_SCORES // sites),
        max_depth=MAX_SCORES_DEPTH,
        strict=False,
    )
    if not isinstance(scores, dict):
        raise ValueError("not a table")
    json.dumps(scores, ensure_ascii=False).encode()  # raises for a lone surrogate
    return scores


class RunProgress:
    """Publishes the progress of a run, and serves as the transport of its engine.

    The engine sees only replies. This class wraps the pipe, and also records why sites
    do not answer.

    Attributes:
        path: The file of metrics, in the folder of the run's state.
        pipe: The underlying transport.
        metrics: Metrics of the latest round.
        rounds: Number of committed rounds.
        refusals: The distinct refusals of sites, in order of arrival.
        is_trained: Whether training has ended. The server then asks for the sites' own
            scores, which many of them refuse to send; these refusals are not published.
    """

    def __init__(self, setup: Setup, pipe: Pipe, job: Job) -> None:
        self.path = setup.state / METRICS
        self.pipe = pipe
        self.metrics: dict[str, float] = {}
        self.rounds = 0
        self.refusals: list[str] = []
        self.is_trained = False
        self._job = job
        self._num_sites = len(setup.sites)
        self._min_sites = _count_required_sites(job, setup)  # after the agreement
        self._config: Any = None  # the method's configuration, after the agreement
        # Site and kind of event to the newest text that was published.
        self._published_texts: dict[tuple[str, str], str] = {}
        self._num_events: Counter[str] = Counter()  # published events by site
        self._silence_reasons: dict[str, str] = {}  # site -> why it did not answer
        # Rounds since the last evaluation that each site has missed, and for which it
        # was drawn.
        self._missed_rounds: Counter[str] = Counter()
        self._drawn_rounds: Counter[str] = Counter()
        self._rejections: dict[str, str] = {}  # site -> the text of its rejection
        self._approvals = PendingApprovals(setup.state / APPROVALS_FILE, setup.sites)

    def exchange(
        self, frames: Mapping[str, Frame], *, timeout: float, grace: float, enough: int
    ) -> Iterator[tuple[str, ReceivedFrame]]:
        """Send each site its frame and yield replies, as `Transport.exchange` does.

        Raises:
            Paused: The run was asked to stop while waiting for sites. A lost site can
                only return with a new submission.
            ConfigError: Too few sites remain, because others rejected the job.
        """
        reasons = dict.fromkeys(frames, _SILENT)
        replies = self.pipe.exchange(
            frames, timeout=timeout, grace=grace, enough=enough
        )
        for site, reply in replies:
            reasons.pop(site, None)
            # If the reply is a refusal, `event` records the decision again.
            self._rejections.pop(site, None)
            self._approvals.remove(site)
            yield site, reply
        num_replies = len(frames) - len(reasons)
        if num_replies < enough and self.pipe.pause.is_set():
            raise Paused

        reasons |= dict(getattr(self.pipe, "failed", {}))
        self._publish_silence(reasons)
        self._publish_approvals()
        self._require_willing_sites()

    def _publish_silence(self, reasons: dict[str, str]) -> None:
        """Record and publish why sites did not answer, unless it was published before.

        Args:
            reasons: Each site that did not answer, and why.
        """
        earlier_reasons = self._silence_reasons
        self._silence_reasons = reasons
        for site, reason in reasons.items():
            self._record_decision(site, reason)
            if earlier_reasons.get(site) == reason:
                continue
            text = reason
            if not reason.startswith(f"site {site!r}"):
                text = f"no answer from site {site!r}: {reason}"
            logger.info("%s", text)
            is_problem = reason != _SILENT and site not in self._approvals.since
            self._publish_event(site, "silent", text, is_problem=is_problem)

    def begin(self, config: Any, state: State | None) -> None:
        """Publish the plan, and the earlier rounds of a run that resumes.

        Args:
            config: The method's configuration.
            state: The state from which the run resumes; None for a new run.
        """
        self._config = config
        self.rounds = state.round if state else 0
        earlier_rounds = rewind_metrics(self.path, _PART, self.rounds)
        examples = state.facts.get("examples", 0) if state else 0
        self.publish_plan([examples] if examples else [])
        for entry in earlier_rounds:
            self.pipe.publish({"kind": "round", "evaluated": True, **entry})

    def publish_warning(self, text: str) -> None:
        """Publish a warning that a person should read before training."""
        logger.warning("%s", text)
        self.pipe.publish({"kind": "event", "text": f"warning: {text}", "site": ""})

    def publish_plan(self, sizes: list[int]) -> None:
        """Publish the number of the run's rounds, and of examples in each.

        Args:
            sizes: Number of examples of each site, or of all sites together; empty if
                unknown.
        """
        if sizes:
            rounds, examples = plan_rounds(
                self._job.module, self._config, sizes, self._num_sites
            )
        else:
            rounds = count_planned_rounds(self._job, self._config) or 0
            examples = 0
        self.pipe.publish(
            {
                "kind": "plan",
                "title": self._job.title,
                "rounds": rounds,
                "examples": examples,
                "done": self.rounds,
            }
        )

    def record_round(self, result: RoundResult) -> None:
        """Publish a committed round, and write its metrics if it was evaluated."""
        self.rounds = result.round + 1
        self.metrics = dict(result.metrics)
        self._published_texts.pop(("", "waiting"), None)
        self._missed_rounds.update(result.absent)
        self._drawn_rounds.update(result.drawn)
        details: dict[str, object] = {"took_part": result.sites}
        if result.evaluated and self._missed_rounds:
            details["absent"] = dict(self._missed_rounds)
        if result.evaluated and self._drawn_rounds:
            details["drawn"] = dict(self._drawn_rounds)
        entry = make_entry(result, _PART, _PART, details)
        if result.evaluated:
            append_entry(self.path, entry)
            self._missed_rounds.clear()
            self._drawn_rounds.clear()
        self.pipe.publish({"kind": "round", "evaluated": result.evaluated, **entry})

    def record_event(self, event: Event) -> None:
        """Record an event of the engine, and publish it if it may interest a person."""
        text = event.text
        # A site's own message may omit its name.
        if event.site and repr(event.site) not in text:
            text = f"site {event.site!r}: {text}"
        if event.kind == "refused":
            self._record_refusal(event.site, text)
        elif event.kind == "waiting" and self._approvals.text:
            text = f"{text}; {self._approvals.text}"
        elif event.kind == "joined":
            # The site's next refusal is news, even with the same text.
            self._published_texts.pop((event.site, "refused"), None)

        is_withheld_score = self.is_trained and event.kind == "refused"
        if event.kind in _PUBLISHED_EVENTS and not is_withheld_score:
            is_problem = (
                event.kind == "refused" and event.site not in self._approvals.since
            )
            self._publish_event(event.site, event.kind, text, is_problem=is_problem)
        logger.info("%s", text if event.kind == "waiting" else event.text)

    def _record_refusal(self, site: str, text: str) -> None:
        """Record a site's refusal, and the decision behind it."""
        if text not in self.refusals and len(self.refusals) < MAX_REFUSALS:
            self.refusals.append(text)
        self._record_decision(site, text)

    def _record_decision(self, site: str, text: str) -> None:
        """Record a rejection or a missing approval of the job, if a message has one."""
        if f"site {site!r} {REJECTED}" in text:
            self._rejections[site] = text.removesuffix("; asked again")
            self._approvals.remove(site)
        elif any(f"site {site!r} {words}" in text for words in UNAPPROVED):
            self._approvals.add(site)

    def _publish_approvals(self) -> None:
        """Log and publish which approvals are missing, if this has changed."""
        line = self._approvals.take_news()  # None if nothing has changed
        if line is not None:
            logger.info("%s", line["text"])
            self.pipe.publish(line)

    def _require_willing_sites(self) -> None:
        """Raise ConfigError if sites rejected the job and too few others remain."""
        # The agreement needs all sites, and only then there is a configuration.
        min_sites = self._num_sites
        purpose = " to begin"
        if self._config is not None:
            min_sites = self._min_sites
            purpose = ""
        num_willing = self._num_sites - len(self._rejections)
        if self._rejections and num_willing < min_sites:
            rejections = "; ".join(text for _, text in sorted(self._rejections.items()))
            raise ConfigError(
                f"{rejections}. {min_sites} of {self._num_sites} sites are "
                f"needed{purpose}, so this run is over; once the job is approved, "
                "submit it again"
            )

    def _publish_event(
        self, site: str, kind: str, text: str, *, is_problem: bool
    ) -> None:
        """Publish an event unless it repeats the last one of its kind for this site.

        After `MAX_EVENTS`, a site's events are only logged, so that a site whose
        messages keep changing cannot exhaust memory.

        Args:
            site: The site; "" if the event concerns the whole run.
            kind: The kind of the event.
            text: A line for a person to read.
            is_problem: Whether a person at the site should look at it; a missing
                approval is published by itself.
        """
        is_news = text != self._published_texts.get((site, kind))
        if is_news and self._num_events[site] < MAX_EVENTS:
            self._published_texts[site, kind] = text
            self._num_events[site] += 1
            self.pipe.publish(
                {
                    "kind": "event",
                    "text": text,
                    "site": site,
                    "is_problem": is_problem,
                }
            )
