"""Simulate a job: train alone, federated and pooled, and score.

`jobs/run_folder.py` describes the folder that a run writes.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fednotes.core.federation import EVALUATE
from fednotes.core.stopping import telling_how_to_resume
from fednotes.core.store import reserving_folder, write_json, write_text
from fednotes.core.tensors import require_deterministic_kernels
from fednotes.core.types import SiteData
from fednotes.engines.remote_programs import wait_for_links
from fednotes.engines.rounds import RoundResult
from fednotes.jobs.causes import Cause
from fednotes.jobs.job import Job, Sites, count_data
from fednotes.jobs.left_out import LeftOutSite, TrainedModels, find_trained_models
from fednotes.jobs.left_out_sites import explain_others_not_left_out, list_others
from fednotes.jobs.local_files import digest_model_files
from fednotes.jobs.metrics_file import (
    METRICS,
    append_entry,
    make_entry,
    order_entries,
    rewind_metrics,
)
from fednotes.jobs.part_training import PartRun, SitesHere, train_part
from fednotes.jobs.parts import (
    Part,
    count_examples_of_few_sentences,
    estimate_traffic,
    explain_incomparable_conditions,
    plan_rounds,
    prepare,
)
from fednotes.jobs.progress import (
    AnyListener,
    ProgressListener,
    reporting,
    to_listener,
)
from fednotes.jobs.results import (
    BASELINES,
    LEFT_OUT,
    LeftOutOutcome,
    Outcome,
    PairedDifference,
    RunResult,
)
from fednotes.jobs.run_files import VERSION
from fednotes.jobs.run_folder import (
    FAILURE,
    describe_nothing_to_resume,
    has_record,
    list_versions,
    move_aside,
    read_part_outcome,
    record_inputs,
    record_workers,
    recording_failure,
    require_run_folder,
    require_usable_folder,
)
from fednotes.jobs.score_causes import (
    find_empty_scores,
    find_low_pooled_scores,
)
from fednotes.jobs.workers.dealing import (
    Pace,
    count_useful_workers,
    list_divided_parts,
)
from fednotes.jobs.workers.pool import (
    SitesOfWorkers,
    TrainedPart,
    Workers,
    remark_on_processors,
    running_workers,
)
from fednotes.jobs.workers.turns import Turns
from fednotes.jobs.workers.worker_process import WorkerProcess
from fednotes.metrics.paired_tests import Bootstrap, bootstrap_sites
from fednotes.metrics.summaries import average_scores, score_all_test_data
from fednotes.training.precision import list_precision_warnings

Conditions = Mapping[str, Sequence[Outcome]]


def simulate(  # noqa: PLR0913 - a run has a job, a place and its resources
    job: Job,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    workers: int | Literal["auto"] = "auto",
    cluster: str | None = None,
    pool: Workers | None = None,
    listener: AnyListener = None,
    command: str = "",
) -> RunResult:
    """Train and score every part of a job, and write the results.

    Args:
        job: The job.
        out: Folder of the run: a new one, or with `resume` that of a run of the same
            job, to which conditions may have been added.
        resume: Whether to resume an unfinished run.
        overwrite: Whether to move an earlier run in `out` to `OUT.previous`; this
            happens once the sites' data have been read.
        device: PyTorch device to train on; "cuda:*" distributes workers over all GPUs.
        workers: Largest number of worker processes, which compute for sites at the same
            time; 1 computes in this process; "auto" decides after the first part.
            Results do not depend on it.
        cluster: Address of a Ray cluster on which the workers compute, "HOST:PORT" or
            "auto"; None is this machine.
        pool: Workers that several runs share; None starts those of this run.
        listener: Receives the progress.
        command: Command that repeats this run, for the report.

    Returns:
        The content of summary.json.

    Raises:
        ConfigError: `out` holds another run.
        BusyError: Another process is running in `out`.
        WorkerError: A worker process was ended, such as by a system without memory.
    """
    events = to_listener(listener)
    replaces_run = overwrite and not resume
    with ExitStack() as locks:
        if pool is None:
            pool = locks.enter_context(
                running_workers(device, workers, job.threads, cluster)
            )
        require_run_folder(out)
        locks.enter_context(reserving_folder(out))
        require_usable_folder(job, out, resume=resume, overwrite=replaces_run)

        # The workers read the data at the same time as this process.
        pool.begin_to_open(job, out)
        torch.set_num_threads(job.threads)
        require_deterministic_kernels(pool.device)
        sites, config, parts = prepare(job, events.features)
        job_warnings = _list_warnings(job, config, sites, pool.device)
        if resume and not has_record(out):
            job_warnings = (describe_nothing_to_resume(out), *job_warnings)
        for text in (*sites.warnings, *job_warnings):
            events.warn(text)
        # The run's result and report have the warnings, too.
        sites = replace(sites, remarks=(*sites.remarks, *job_warnings))
        traffic = estimate_traffic(job, config, sites.data)
        if traffic is not None:
            events.cost(traffic)

        if replaces_run and move_aside(out):
            # The lock moved away with the earlier run, so lock the new folder too.
            locks.enter_context(reserving_folder(out))
        facts = count_data(job, sites.data)
        files = digest_model_files(job)
        useful = count_useful_workers([len(part.sites) for part in parts])
        pool.finish_opening(job, out, sites.data, useful)
        record_inputs(
            job,
            out,
            sites,
            facts,
            files=files,
            resume=resume,
            command=command,
            workers=pool.count,
            processors=pool.processors,
        )
        with telling_how_to_resume(f"{command} --resume"), reporting(events, out):
            run = _Run(job, out, resume, events, pool)
            outcomes = run.train_parts(parts, sites.data)
            left_out = run.score_left_out_sites(parts, sites.data, outcomes)
            outcomes |= left_out
            result = _make_result(job, sites, facts, parts, outcomes, command, pool)
            result.write(out)
    return result


def _list_warnings(job: Job, config: Any, sites: Sites, device: str) -> tuple[str, ...]:
    """Return what a method, and this machine, warn about before training.

    Args:
        job: The job.
        config: The method's config, completed with the facts of all sites.
        sites: Data of the job's sites.
        device: PyTorch device that trains.
    """
    precision = job.table.get("training", {}).get("precision", "")
    sizes = [job.kind.count_examples(site) for site in sites.data]
    return (
        *job.module.list_warnings(config),
        *job.module.list_size_warnings(config, sizes),
        *list_precision_warnings(precision, torch.device(device)),
    )


@dataclass(frozen=True)
class _Run:
    """Trains the parts of a job in the folder of a run.

    Attributes:
        job: The job.
        out: The folder of the run.
        resume: Whether to resume an unfinished run.
        listener: Receives the progress.
        workers: The worker processes, if there are any.
    """

    job: Job
    out: Path
    resume: bool
    listener: ProgressListener
    workers: Workers

    def train_parts(
        self, parts: Sequence[Part], sites: Sequence[Any]
    ) -> dict[str, Outcome]:
        """Train the parts that are not finished, and return all outcomes by part name.

        Args:
            parts: Parts of the run.
            sites: Data of all sites; a pooled model is scored on each of them.
        """
        if not (self.resume and (self.out / METRICS).exists()):
            write_text(self.out / METRICS, "")
        (self.out / FAILURE).unlink(missing_ok=True)
        self.listener.plan(self._plan_work(parts) | self._plan_few_sentences(parts))

        outcomes: dict[str, Outcome] = {}
        for part in parts:
            done = self.out / part.name / "done.json"
            outcome = read_part_outcome(done, Outcome) if self.resume else None
            if outcome is not None:
                outcomes[part.name] = outcome
        unfinished = [part for part in parts if part.name not in outcomes]
        outcomes |= self._train_unfinished(unfinished, sites)
        order_entries(self.out / METRICS, [part.name for part in parts])
        return {part.name: outcomes[part.name] for part in parts}

    def _train_unfinished(
        self, parts: Sequence[Part], sites: Sequence[Any]
    ) -> dict[str, Outcome]:
        """Train parts in this process or in workers; return their outcomes.

        Parts are trained here until there are workers. Those that wait start after a
        part that shows that the others will take long.

        Args:
            parts: The parts.
            sites: Data of all sites; a pooled model is scored on each of them.
        """
        outcomes: dict[str, Outcome] = {}
        pace = Pace(self._plan_work(parts))
        waiting = list(parts)
        while waiting and not self.workers.all:
            part = waiting.pop(0)
            started = time.monotonic()
            outcomes[part.name] = self._train_here(part, sites)
            pace.record(part.name, time.monotonic() - started)
            useful = count_useful_workers([len(part.sites) for part in waiting])
            seconds = pace.expect([part.name for part in waiting])
            if useful > 1 and self.workers.is_worthwhile(seconds):
                self.workers.start_late(self.job, self.out, sites, useful)
                record_workers(self.out, self.workers.count)
        return outcomes | self._train_in_workers(waiting)

    def _train_here(self, part: Part, sites: Sequence[Any]) -> Outcome:
        """Train a part in this process, and return its outcome.

        Args:
            part: The part.
            sites: Data of all sites; a pooled model is scored on each of them.
        """
        run = PartRun(self.job, part, self.out, self.resume)
        with recording_failure(self.out, part.name):
            part_sites = SitesHere(
                run, sites, self.workers.device, progress=self.listener.features
            )
            events = _PartEvents(self.out, part, self.listener)
            outcome = train_part(run, part_sites, events)
        self._finish_part(part, outcome)
        return outcome

    def _train_in_workers(self, parts: Sequence[Part]) -> dict[str, Outcome]:
        """Train parts in worker processes; return their outcomes.

        Parts do not need each other, so as many as possible are trained at the same
        time, each in one worker. Then all workers share the sites of each other part.

        Args:
            parts: The parts.
        """
        if not parts:
            return {}
        work = self._plan_work(parts)
        divided = list_divided_parts(
            work,
            {part.name: len(part.sites) for part in parts},
            len(self.workers.all),
        )
        outcomes = self._train_at_once(
            [part for part in parts if part.name not in divided], work
        )
        for part in parts:
            if part.name not in divided:
                continue
            run = PartRun(self.job, part, self.out, self.resume)
            sizes = {site.id: self.job.kind.count_examples(site) for site in part.sites}
            with recording_failure(self.out, part.name):
                part_sites = SitesOfWorkers(
                    run, self.workers, sizes, self.listener.features
                )
                events = _PartEvents(self.out, part, self.listener)
                outcomes[part.name] = train_part(run, part_sites, events)
            self._finish_part(part, outcomes[part.name])
        return outcomes

    def _train_at_once(
        self, parts: Sequence[Part], work: Mapping[str, float]
    ) -> dict[str, Outcome]:
        """Train parts at the same time, each in one worker; return their outcomes.

        Args:
            parts: The parts.
            work: As `_plan_work` returns it.
        """
        # The longest part comes first, so that the workers end at about the same time.
        waiting = sorted(parts, key=lambda part: -work.get(part.name, 0.0))
        idle = list(self.workers.all)
        active: dict[WorkerProcess, TrainedPart] = {}
        turns = Turns(self.listener)
        outcomes = {}
        while waiting or active:
            while waiting and idle:
                part = waiting.pop(0)
                worker = idle.pop(0)
                listener = turns.listen(part)
                active[worker] = TrainedPart(
                    PartRun(self.job, part, self.out, self.resume),
                    worker,
                    _PartEvents(self.out, part, listener),
                    listener.features,
                )
            for worker in wait_for_links(list(active)):
                part = active[worker].part
                with recording_failure(self.out, part.name):
                    outcome = active[worker].handle_reply()
                if outcome is not None:
                    outcomes[part.name] = outcome
                    self._finish_part(part, outcome)
                    turns.end(part.name)
                    del active[worker]
                    idle.append(worker)
        return outcomes

    def _finish_part(self, part: Part, outcome: Outcome) -> None:
        """Record a part's outcome, and delete its checkpoints."""
        folder = self.out / part.name
        write_json(folder / "done.json", outcome.model_dump())
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    def score_left_out_sites(
        self,
        parts: Sequence[Part],
        sites: Sequence[Any],
        outcomes: Mapping[str, Outcome],
    ) -> dict[str, LeftOutOutcome]:
        """Score the models of other sites at each left-out site; return the outcomes.

        Args:
            parts: All parts of the run.
            sites: Data of all sites.
            outcomes: Outcome of each part by its name.
        """
        left_out = {}
        for site in sites:
            if not any(part.training and part.site == site.id for part in parts):
                continue
            name = f"{LEFT_OUT}/{site.id}"
            done = self.out / name / "done.json"
            outcome = read_part_outcome(done, LeftOutOutcome) if self.resume else None
            if outcome is None:
                with recording_failure(self.out, name):
                    scorer = LeftOutSite(
                        self.job, site, list_others(sites, site), self.workers.device
                    )
                    models = self._find_models(site, parts, outcomes)
                    outcome = scorer.score(models)
                write_json(done, outcome.model_dump())
            left_out[name] = outcome
        return left_out

    def _find_models(
        self, site: Any, parts: Sequence[Part], outcomes: Mapping[str, Outcome]
    ) -> TrainedModels:
        """Return the models that are scored at a left-out site.

        Args:
            site: Data of the site.
            parts: All parts of the run.
            outcomes: Outcome of each part by its name.
        """
        models = TrainedModels([], [], [], [])
        for part in parts:
            if part.condition == "alone":
                chosen = models.own if part.site == site.id else models.alone
            elif part.condition == LEFT_OUT and part.site == site.id:
                is_pooled = part.training == "pooled"
                chosen = models.pooled if is_pooled else models.federated
            else:
                continue
            chosen.extend(
                find_trained_models(
                    self.out / part.name, part.sites, outcomes[part.name].valid
                )
            )
        return models

    def _plan_few_sentences(self, parts: Sequence[Part]) -> dict[str, float]:
        """Return how many examples training on few sentences of each site reads.

        Left-out sites that have been scored are omitted.

        Args:
            parts: All parts of the run.
        """
        names = {f"{LEFT_OUT}/{part.site}" for part in parts if part.training}
        return {
            name: float(count_examples_of_few_sentences(self.job))
            for name in sorted(names)
            if not (self.resume and (self.out / name / "done.json").exists())
        }

    def _plan_work(self, parts: Sequence[Part]) -> dict[str, float]:
        """Return how many examples each unfinished part reads over all rounds."""
        work = {}
        for part in parts:
            if self.resume and (self.out / part.name / "done.json").exists():
                continue
            sizes = [self.job.kind.count_examples(site) for site in part.sites]
            rounds, examples = plan_rounds(
                self.job.module, part.config, sizes, len(sizes)
            )
            work[part.name] = float(rounds * examples)
        return work


class _PartEvents:
    """Logs the evaluations of a part, and passes its events to a listener.

    Args:
        out: The folder of the run.
        part: The part.
        listener: The listener.
    """

    def __init__(self, out: Path, part: Part, listener: ProgressListener) -> None:
        self._metrics = out / METRICS
        self._part = part
        self._listener = listener
        self._drawn: Counter[str] = Counter()  # rounds since the last evaluation

    def begin(self, first_round: int, rounds: int, examples: int) -> None:
        """Remove the entries of rounds that are repeated; pass the event on."""
        rewind_metrics(self._metrics, self._part.name, first_round)
        self._listener.begin(self._part, rounds, examples)

    def round(self, result: RoundResult) -> None:
        """Log an evaluation, and pass the round on."""
        self._drawn.update(result.drawn)
        if result.evaluated and self._part.is_logged:
            entry = describe_evaluation(result, self._part, self._drawn)
            append_entry(self._metrics, entry)
            self._drawn.clear()
        self._listener.round(result)

    def end(self) -> None:
        """Pass the event on."""
        self._listener.end()


def describe_evaluation(
    result: RoundResult, part: Part, drawn: Mapping[str, int] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the entry of metrics.jsonl for an evaluation of a part.

    Args:
        result: The evaluated round.
        part: The part.
        drawn: For how many rounds since the last evaluation each site was drawn; empty
            if the sites of a round are not drawn.
    """
    details: dict[str, Any] = {}
    if part.site:
        details["site"] = part.site
    details["sites"] = gather_site_metrics(result, part)
    if drawn:
        details["drawn"] = dict(sorted(drawn.items()))
    return make_entry(result, part.name, part.condition, details)


def gather_site_metrics(result: RoundResult, part: Part) -> dict[str, dict[str, float]]:
    """Return each site's training loss and validation scores in a simulated round."""
    metrics_by_site: dict[str, dict[str, float]] = {}
    if part.method is None:
        return metrics_by_site
    for task in part.method.training_tasks:
        for site, metrics in result.replies.get(task, {}).items():
            # A site without examples in this round has no loss.
            if metrics["examples"]:
                loss = metrics["loss"] / metrics["examples"]
                metrics_by_site[site] = {"loss": loss}
    for site, metrics in result.replies.get(EVALUATE, {}).items():
        scores = part.method.summarise(metrics)
        scores.pop("held_out", None)
        if "valid_f1" in scores:
            scores["f1"] = scores.pop("valid_f1")
        metrics_by_site.setdefault(site, {}).update(scores)
    return metrics_by_site


# ---- the result of a run -------------------------------------------------------------


def _make_result(
    job: Job,
    sites: Sites,
    facts: Mapping[str, Any],
    parts: Sequence[Part],
    outcomes: Mapping[str, Outcome],
    command: str,
    pool: Workers,
) -> RunResult:
    """Combine the outcomes of all parts into the result of the run.

    Args:
        job: The job.
        sites: Data of the job's sites.
        facts: Facts about the sites' data that can explain low scores.
        parts: The parts of the run.
        outcomes: Name of each part, or of each left-out site, to its outcome.
        command: Command that repeats the run.
        pool: The workers that trained the parts.
    """
    by_condition = _group_by_condition(outcomes)
    scores = _collect_scores(parts, outcomes, [site.id for site in sites.data])
    left_out = _gather_left_out(outcomes)
    costs = {
        condition: _sum_costs(condition_outcomes)
        for condition, condition_outcomes in by_condition.items()
    }
    paired, paired_mean = _compare_with_baselines(by_condition)
    federated = outcomes.get("federated")
    causes = [
        *find_empty_scores(job, scores.by_site),
        *job.kind.find_score_causes(job, scores.by_site, facts),
        *find_low_pooled_scores(job, scores.mean, costs, parts, len(sites.data)),
    ]
    return RunResult(
        version=VERSION,
        title=job.title,
        method=job.method,
        holds=job.kind.name,
        seed=job.seed,
        command=command,
        seconds=sum(cost["seconds"] for cost in costs.values()),
        bytes_up=federated.bytes_up if federated else 0,
        bytes_down=federated.bytes_down if federated else 0,
        eta=federated.eta if federated else None,
        annotated={
            site.id: list(site.tags.types)
            for site in sites.data
            if isinstance(site, SiteData)
        },
        sites=scores.by_site,
        mean=scores.mean,
        micro=scores.micro,
        valid=scores.validation,
        privacy=_describe_privacy(job, parts),
        conditions=costs,
        marks=explain_incomparable_conditions(parts),
        paired=paired,
        paired_mean=paired_mean,
        left_out={site: outcome.models for site, outcome in left_out.items()},
        left_out_mean=_average_models(list(left_out.values())),
        left_out_types={site: outcome.types for site, outcome in left_out.items()},
        config=dict(job.table),
        versions=list_versions(),
        workers=pool.count,
        processors=pool.processors,
        threads=job.threads,
        notes=_list_remarks(
            job, sites, outcomes, causes=causes, processors=pool.processors
        ),
        causes=causes,
    )


def _list_remarks(
    job: Job,
    sites: Sites,
    outcomes: Mapping[str, Outcome],
    *,
    causes: Sequence[Cause],
    processors: Sequence[str],
) -> list[str]:
    """Return what a reader of the run's scores should know, in sentences.

    Args:
        job: The job.
        sites: Data of the job's sites.
        outcomes: Name of each part, or of each left-out site, to its outcome.
        causes: What can explain low scores.
        processors: The names of the workers' processors, if these may differ.
    """
    remarks = [*sites.messages]
    federated = outcomes.get("federated")
    if federated is not None and federated.described:
        remarks.append(f"federated: {federated.described}")
    remarks += map(str, causes)
    if LEFT_OUT in job.conditions:
        remarks += explain_others_not_left_out(job, sites.data)
    for outcome in _gather_left_out(outcomes).values():
        remarks += outcome.remarks
    remarks += remark_on_processors(processors)
    return remarks


def _collect_scores(
    parts: Sequence[Part], outcomes: Mapping[str, Outcome], site_ids: Sequence[str]
) -> _RunScores:
    """Return the scores of all parts at their own sites.

    The parts that train for a left-out site have none: what they train is scored at
    the left-out site.
    """
    unscored = {part.name for part in parts if part.training}
    scored_outcomes = {
        name: outcome for name, outcome in outcomes.items() if name not in unscored
    }
    return _RunScores.collect(_group_by_condition(scored_outcomes), site_ids)


@dataclass(frozen=True)
class _RunScores:
    """The scores of a run; see `RunResult`.

    Attributes:
        by_site: Site → condition → scores on the site's test data.
        mean: Condition → means of the scores over the sites.
        micro: Condition → scores on the test data of all sites together, if these can
            be computed.
        validation: Condition → validation scores of the selected models.
    """

    by_site: dict[str, dict[str, Any]]
    mean: dict[str, dict[str, Any]]
    micro: dict[str, dict[str, Any]]
    validation: dict[str, dict[str, Any]]

    @classmethod
    def collect(cls, by_condition: Conditions, site_ids: Sequence[str]) -> _RunScores:
        """Return the scores in the outcomes of each condition's parts."""
        scores = cls({site: {} for site in site_ids}, {}, {}, {})
        for condition, outcomes in by_condition.items():
            scores_by_site = _gather_scores(outcomes)
            scored_sites = [site for site in site_ids if site in scores_by_site]
            for site in scored_sites:
                scores.by_site[site][condition] = scores_by_site[site]
            scores_in_order = [scores_by_site[site] for site in scored_sites]
            scores.mean[condition] = average_scores(scores_in_order)
            micro_scores = score_all_test_data(scores_in_order)
            if micro_scores:
                scores.micro[condition] = micro_scores
            scores.validation[condition] = _gather_validation(outcomes)
        return scores


def _gather_left_out(outcomes: Mapping[str, Outcome]) -> dict[str, LeftOutOutcome]:
    """Return the outcomes of left-out sites, by site.

    Args:
        outcomes: Name of each part, or of each left-out site, to its outcome.
    """
    return {
        name.removeprefix(f"{LEFT_OUT}/"): outcome
        for name, outcome in outcomes.items()
        if isinstance(outcome, LeftOutOutcome)
    }


def _average_models(outcomes: Sequence[LeftOutOutcome]) -> dict[str, dict[str, Any]]:
    """Return the means of each model's scores over left-out sites, if all have it."""
    names = dict.fromkeys(name for outcome in outcomes for name in outcome.models)
    return {
        name: average_scores([outcome.models[name] for outcome in outcomes])
        for name in names
        if all(name in outcome.models for outcome in outcomes)
    }


def _group_by_condition(outcomes: Mapping[str, Outcome]) -> dict[str, list[Outcome]]:
    """Return the outcomes of each condition's parts.

    Args:
        outcomes: Name of each part, such as "alone/SITE", to its outcome.
    """
    by_condition = defaultdict[str, list[Outcome]](list)
    for name, outcome in outcomes.items():
        condition, _, _ = name.partition("/")
        by_condition[condition].append(outcome)
    return by_condition


def _gather_scores(outcomes: Iterable[Outcome]) -> dict[str, dict[str, Any]]:
    """Return the scores of all parts of a condition, by site."""
    scores: dict[str, dict[str, Any]] = {}
    for outcome in outcomes:
        scores.update(outcome.scores)
    return scores


def _sum_costs(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the total costs of all parts of a condition."""
    return {
        "bytes_down": sum(outcome.bytes_down for outcome in outcomes),
        "bytes_up": sum(outcome.bytes_up for outcome in outcomes),
        "examples": sum(outcome.examples for outcome in outcomes),
        "rounds": sum(outcome.rounds for outcome in outcomes),
        "seconds": sum(outcome.seconds for outcome in outcomes),
    }


def _describe_privacy(job: Job, parts: Sequence[Part]) -> dict[str, dict[str, Any]]:
    """Return the privacy guarantee of each condition that has one."""
    guarantees = {}
    for part in parts:
        promise = job.module.make_promise(part.config)
        if promise is not None:
            guarantees[part.condition] = promise.to_dict()
    return guarantees


def _gather_validation(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the validation scores of the selected models, for choosing settings.

    Higher is better. A site without validation data has None and is left out of the
    mean.

    Returns:
        "mean": the mean over the sites; "sites": the score of each site.
    """
    sites: dict[str, float | None] = {}
    for outcome in outcomes:
        sites.update(outcome.valid)
    scores = [score for score in sites.values() if score is not None]
    return {"mean": fmean(scores) if scores else None, "sites": sites}


def _compare_with_baselines(
    by_condition: Conditions,
) -> tuple[dict[str, dict[str, PairedDifference]], dict[str, PairedDifference]]:
    """Compare the federated models with each baseline by a paired test.

    Returns:
        Baseline → site → the difference, and baseline → the difference of the means
        over the sites; without the baselines that cannot be compared.
    """
    paired = {}
    paired_mean = {}
    for baseline in BASELINES:
        if baseline not in by_condition:
            continue
        differences = _compare_with_baseline(baseline, by_condition)
        if differences.by_site:
            paired[baseline] = differences.by_site
        if differences.of_means is not None:
            paired_mean[baseline] = differences.of_means
    return paired, paired_mean


class _Differences(NamedTuple):
    """Paired differences between the federated models and a baseline.

    Attributes:
        by_site: The difference at each site; empty if there is no comparison.
        of_means: The difference of the means over the sites; None if there is none.
    """

    by_site: dict[str, PairedDifference]
    of_means: PairedDifference | None


def _compare_with_baseline(baseline: str, by_condition: Conditions) -> _Differences:
    """Compare each site's federated model with a baseline by a paired test.

    There is no comparison if one of the conditions was not trained or a site has no
    counts of its test documents.

    Args:
        baseline: The other condition.
        by_condition: Outcomes of the parts of each condition.
    """
    federated_counts = _gather_document_counts(by_condition.get("federated", ()))
    baseline_counts = _gather_document_counts(by_condition.get(baseline, ()))
    if federated_counts.keys() != baseline_counts.keys():
        return _Differences({}, None)
    tests, mean_test = bootstrap_sites(
        {
            site: (federated_counts[site], baseline_counts[site])
            for site in federated_counts
        }
    )
    by_site = {site: _to_difference(test) for site, test in tests.items()}
    of_means = None if mean_test is None else _to_difference(mean_test)
    return _Differences(by_site, of_means)


def _gather_document_counts(outcomes: Iterable[Outcome]) -> dict[str, NDArray[Any]]:
    """Return the counts of test documents by site, (documents, 4) each."""
    return {
        site: np.reshape(rows, (-1, 4))
        for outcome in outcomes
        for site, rows in outcome.documents.items()
    }


def _to_difference(test: Bootstrap) -> PairedDifference:
    """Return the part of a test that a run's result stores."""
    return PairedDifference(
        difference=test.difference,
        low=test.low,
        high=test.high,
        p_value=test.p_value,
    )
