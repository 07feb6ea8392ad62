"""The two ends of a deployed job: what the server runs, and what each site does.

    server_main   the method's `train` over the engine of real sites, and what a run leaves
    site_main     the site of the method behind its host, its rules and its ledger

Neither knows what carries the frames: `engines/pipe.py` says what they start from.

At the server, STATE/server/ holds checkpoints, STATE/agreement.json what the sites said of
themselves, STATE/metrics.jsonl a line per evaluation; the folder that is fetched gets a copy,
summary.json and, where all sites end with one model, model/. At a site, KIT/results/RUN/ holds
its model and its own scores.

The model that all sites end with, at the server: where the method has one for all.

Sites of other methods (FedNER's, and any with private layers) each have their own, which stays
there. A phenotyping model is made at the sites too, of calibrations that the server forgets.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import ConfigError, FednotesError, RefusedError, TrainingError
from fednotes.core.federation import State
from fednotes.core.parsing import parse_json
from fednotes.core.store import write_json, write_text
from fednotes.core.tensors import load_into
from fednotes.core.update import Tensors
from fednotes.encoders.features import default_cache
from fednotes.engines.asking import Event, Policy, Transport
from fednotes.engines.deployed import Deployed, Paused
from fednotes.engines.host import Sealer, SiteHost
from fednotes.engines.pace import Pace
from fednotes.engines.pipe import Setup
from fednotes.engines.question import OPENED
from fednotes.engines.summing import Summing, limits_of
from fednotes.jobs.deployed.agreement import (
    AGREE,
    DESCRIBE,
    SCORES,
    AgreedSite,
    Description,
    agreed_config,
    agreement_of,
    as_tensors,
    as_text,
    describe,
    from_tensors,
    from_text,
    require_as_declared,
)
from fednotes.jobs.deployed.server import (
    Listening,
    Progress,
    Told,
    explained_here,
    is_last,
    job_of_server,
)
from fednotes.jobs.deployed.site_file import SiteFile, discreet, of_kit, outward, unplaced
from fednotes.jobs.deployed.sites import job_of_site, load_own, whole_table
from fednotes.jobs.job import FederationConfig, Job
from fednotes.jobs.run_folder import versions
from fednotes.rules.approval import fingerprint
from fednotes.rules.guard import SiteGuard, require_approved, require_share
from fednotes.rules.policy import JobFacts
from fednotes.taggers.saving import build_model, save_model


def save_global_model(job: Job, config: Any, final: State, folder: Path) -> bool:
    """Write the model of a run's last state, ready for `fednotes predict`.

    Returns False, and writes nothing, where each site has a model of its own.
    """
    if job.method == "pretrain":
        from fednotes.methods.pretrain import shared_model

        language = shared_model(config.model, config.seed, "cpu")
        load_into(language.parameters, _chosen(final, language.parameters, "kept."))
        language.model.save(folder)
        return True
    if job.method not in ("distill", "adversarial", "finetune") or getattr(
        config, "private", False
    ):
        return False
    model = build_model(config.model, config.tags, config.seed)
    parameters = model.trainable()
    best = "kept." if job.method == "finetune" else "best."
    load_into(parameters, _chosen(final, parameters, best))
    save_model(model, folder)
    return True


def _chosen(final: State, parameters: Mapping[str, Any], best: str) -> dict[str, Tensor]:
    """The parameters that the run ends with: those it kept as the best, if it did."""
    kept = all(f"{best}{name}" in final.tensors for name in parameters)
    return {n: final.tensors[f"{best if kept else 'shared.'}{n}"] for n in parameters}


RESULTS = "results"
MOST_SCORES = 2**17  # numbers of a site's scores
PROBLEM = "problem.json"  # in the folder that is fetched, of a run that failed
logger = logging.getLogger("fednotes.jobs.deployed.site")


class Pipe(Transport, Protocol):
    """A transport that also carries lines of progress (`engines/nvflare/server.py`)."""

    pause: Any

    def publish(self, line: Mapping[str, Any]) -> None: ...


# ---- the server ------------------------------------------------------------------------------


def server_main(setup: Setup, transport: Pipe) -> None:
    """Run a job to its end, or to a pause; go on from its checkpoint if there is one.

    Raises TrainingError where another submission may help, another FednotesError where not.
    """
    progress: Progress | None = None
    try:
        job = job_of_server(setup)
        torch.set_num_threads(job.threads)
        torch.use_deterministic_algorithms(True)
        least = _threshold(job, len(setup.sites)) if job.federation.secure_sum else 0
        least = max(least, setup.min_sites)
        progress = Progress(setup.state, transport, job, setup.sites, least)
        _run(setup, job, _engine(setup, job, transport, progress), progress)
    except Paused:
        logger.info("paused; it goes on from the last checkpoint")
    except FednotesError as found:
        error = explained_here(found)
        last = is_last(setup.state, progress.rounds if progress else 0, error)
        write_json(setup.folder / PROBLEM, {"problem": str(error), "again": not last})
        if last and isinstance(error, TrainingError):
            raise ConfigError(f"{error} (and so again: the run stays stopped)") from found
        raise error from found.__cause__


def _engine(setup: Setup, job: Job, transport: Pipe, progress: Progress) -> Deployed:
    key = fingerprint(whole_table(setup.job, setup.sites, setup.min_sites))
    return Deployed(
        Listening(transport, progress),
        setup.sites,
        setup.state / "server",
        job=key,
        policy=_policy(job.federation, setup.min_sites),
        summing=_summing(job, setup, key),
        observer=progress.round,
        notify=lambda event: _notify(event, progress),
        limits=limits_of(job.federation.max_norm),
        stop=transport.pause.is_set,
    )


def _run(setup: Setup, job: Job, engine: Deployed, progress: Progress) -> None:
    resumed = engine.resume()
    config = _agree(setup, job, engine, progress)
    progress.begin(config, resumed)
    final = job.module.train(Told(engine, progress), config)
    progress.trained()
    shared = _shared_scores(engine)
    summary = {
        "title": job.title,
        "method": job.method,
        "seed": job.seed,
        "run": setup.run,
        "rounds": final.round,
        "sites": list(setup.sites),
        "seconds": engine.seconds,
        "bytes_up": engine.bytes_up,
        "bytes_down": engine.bytes_down,
        "metrics": dict(progress.metrics),  # of sums
        "scores": shared,  # of sites whose policy shares them
        "config": dict(setup.job["job"]),
        "versions": versions(),
    }
    save_global_model(job, config, final, setup.folder / "model")
    write_json(setup.folder / "summary.json", summary)
    write_text(setup.folder / "metrics.jsonl", progress.path.read_text(encoding="utf-8"))
    engine.end()
    progress.end()


def _policy(config: FederationConfig, least: int) -> Policy:
    return Policy(
        min_sites=least,
        timeout=config.timeout,
        knock=min(5.0, config.timeout),
        grace=config.grace or math.inf,
        pause=config.pause,
        knock_every=config.knock_every,
        checkpoint_seconds=config.checkpoint_seconds,
    )


def _summing(job: Job, setup: Setup, key: str) -> Summing | None:
    if not job.federation.secure_sum:
        return None
    from fednotes.engines.secure_server import SecureSum

    return SecureSum(setup.sites, job=key, threshold=_threshold(job, len(setup.sites)))


def _threshold(job: Job, sites: int) -> int:
    """Least number of sites that a secure sum is opened with: `min_sites`, but more than half."""
    return max(job.federation.min_sites or sites, sites // 2 + 1)


def _agree(setup: Setup, job: Job, engine: Deployed, progress: Progress) -> Any:
    """The method's configuration, which all the sites have too."""
    path = setup.state / "agreement.json"
    if engine.resume() is not None:
        try:
            return agreed_config(job, from_text(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    found = {s: from_tensors(s, t) for s, t in engine.public(DESCRIBE).items()}
    require_as_declared(job, found)
    config = agreed_config(job, found)
    write_text(path, as_text(found))
    progress.refusals.clear()
    try:
        total = engine.sum(AGREE, descriptions=as_text(found), agreed=agreement_of(job, found))
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
            raw = tensors["scores"].numpy().tobytes()
            found[site] = dict(parse_json(raw, most_values=MOST_SCORES, strict=False))
        except (KeyError, ValueError, TypeError):
            logger.warning("site %r: its scores are not readable", site)
    return found


def _notify(event: Event, progress: Progress) -> None:
    progress.event(event)
    logger.info("%s", event.text)


# ---- a site ----------------------------------------------------------------------------------


class Member:
    """A site's part of one job, as its process holds it (`engines.pipe.Host`)."""

    def __init__(self, host: SiteHost) -> None:
        self.host = host

    def handle(self, frame: bytes) -> bytes:
        """The reply to one frame of the server."""
        return self.host.handle(frame)

    def close(self) -> None:
        """The job is over; what it kept stays until a person deletes it."""


def site_main(setup: Setup) -> Member:
    """Join a job that was approved here, with this site's own notes.

    Raises NotApproved (asked again later), PolicyRefusal, or what reading the notes raises, in
    words that may leave the site.
    """
    with discreet(setup.site):
        return _member(setup)


def _member(setup: Setup) -> Member:
    kit, site = setup.kit, setup.site
    file = of_kit(kit)
    table = whole_table(setup.job, setup.sites, setup.min_sites)
    require_approved(kit, site, table, file.policy)
    job = job_of_site(setup.job, site, file)
    secure, sites = job.federation.secure_sum, len(setup.sites)
    guard = SiteGuard(
        kit,
        site,
        setup.run,
        table,
        lambda: unplaced(of_kit(kit).policy),
        secure=secure,
        threshold=_threshold(job, sites) if secure else setup.min_sites,
    )
    guard.job(_job_facts(job, sites, setup.min_sites))
    torch.set_num_threads(file.threads or job.threads)
    torch.use_deterministic_algorithms(file.device == "cpu")
    loaded = load_own(job, cache=file.cache)
    for note in loaded.told:
        logger.info("%s", note)
    data = loaded.data[0]
    own = describe(job, data)
    results = kit / RESULTS / setup.run
    make = _maker(job, setup.sites, data, own, file, results, guard)
    key = fingerprint(table)
    host = SiteHost(
        make,
        setup.state / "site",
        job=key,
        name=site,
        guard=guard,
        sealer=_sealer(job, setup, key),
        public={DESCRIBE: lambda made: as_tensors(own), SCORES: lambda made: _scores(kit, made)},
        limits=limits_of(job.federation.max_norm),
        pace=Pace() if file.policy.steady_replies else None,
        tell=lambda line: logger.info("%s", line),
        outward=outward,
    )
    return Member(host)


def _maker(
    job: Job,
    sites: tuple[str, ...],
    data: Any,
    own: Description,
    file: SiteFile,
    results: Path,
    guard: SiteGuard,
) -> Callable[[], Any]:
    """How the site is built anew: on its notes, which are read once."""

    def member(config: Any) -> Any:
        return job.module.Site(
            data,
            config,
            directory=results,
            device=file.device,
            cache=file.cache or default_cache(),
        )

    def make() -> AgreedSite:
        made = AgreedSite(data.id, job, sites, own, member, results)
        guard.covered = made.covered
        return made

    return make


def _sealer(job: Job, setup: Setup, key: str) -> Sealer | None:
    if not job.federation.secure_sum:
        return None
    from fednotes.engines.secure_server import SecureSeal

    least, own = _threshold(job, len(setup.sites)), setup.identity
    kept = setup.state / "site" / OPENED
    return SecureSeal(setup.site, setup.sites, job=key, threshold=least, identity=own, kept=kept)


def _job_facts(job: Job, sites: int, least: int) -> JobFacts:
    """What the job will want, as far as it can be told before the notes are read."""
    secure = job.federation.secure_sum
    return JobFacts(
        job.method,
        sites,
        rounds=planned_rounds(job),
        secure=secure,
        threshold=_threshold(job, sites) if secure else least,
    )


def planned_rounds(job: Job) -> int | None:
    """The most rounds that a job can take; None if that depends on how many notes sites have."""
    few, many = (job.module.planned(job.config, [n])[0] for n in (1, 1_000_000))
    return int(few) if few == many else None


def _scores(kit: Path, made: Any) -> Tensors:
    """The site's own scores, where its policy lets them go. Raises RefusedError."""
    require_share(unplaced(of_kit(kit).policy))
    scores = getattr(made.site, "scores", None)
    if not scores:
        raise RefusedError(f"site {made.id!r} has no scores yet")
    raw = json.dumps(scores).encode("ascii")
    return {"scores": torch.from_numpy(np.frombuffer(raw, np.uint8).copy())}
