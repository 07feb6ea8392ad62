"""Simulate a job on this machine: train alone, federated and pooled, and score.

`jobs/run_folder.py` describes the folder that a run writes.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fednotes.core.federation import EVALUATE, MethodSite
from fednotes.core.stopping import resumable
from fednotes.core.store import hold_folder, write_json, write_text
from fednotes.core.tensors import device_of
from fednotes.core.types import POOLED, SiteData
from fednotes.engines.inprocess import InProcess
from fednotes.engines.rounds import RoundResult
from fednotes.jobs.job import Job, Sites, count_data
from fednotes.jobs.local_files import digest_model_files
from fednotes.jobs.metrics_file import METRICS, append_entry, make_entry, rewind_metrics
from fednotes.jobs.parts import (
    Part,
    estimate_traffic,
    is_summed_securely,
    make_method_sites,
    prepare,
)
from fednotes.jobs.progress import (
    AnyListener,
    ProgressListener,
    reported,
    to_listener,
)
from fednotes.jobs.remarks import (
    mark_conditions,
    remark_on_empty_scores,
    remark_on_pooled,
)
from fednotes.jobs.results import BASELINES, Outcome, PairedDifference, RunResult
from fednotes.jobs.run_files import VERSION
from fednotes.jobs.run_folder import (
    FAILURE,
    claim,
    has_record,
    list_versions,
    nothing_to_resume,
    read_outcome,
    recorded_failure,
    require_run_folder,
    require_usable,
    set_aside,
)
from fednotes.metrics.paired_tests import Bootstrap, paired_sites
from fednotes.metrics.summaries import mean_scores, summed_scores

Conditions = Mapping[str, Sequence[Outcome]]


def simulate(
    job: Job,
    out: Path,
    *,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    listener: AnyListener = None,
    command: str = "",
) -> RunResult:
    """Train and score every part of a job, and write the results.

    Args:
        job: The job.
        out: Folder of the run: a new one, or with `resume` that of an unfinished run of
            the same job.
        resume: Whether to resume an unfinished run.
        overwrite: Whether to move an earlier run in `out` to `OUT.previous`; this
            happens once the sites' data have been read.
        device: PyTorch device to train on.
        listener: Receives the progress.
        command: Command that repeats this run, for the report.

    Returns:
        The content of summary.json.

    Raises:
        ConfigError: `out` holds another run.
        BusyError: Another process is running in `out`.
    """
    events = to_listener(listener)
    device_of(device)
    replaces_run = overwrite and not resume
    require_run_folder(out)
    with ExitStack() as locks:
        locks.enter_context(hold_folder(out))
        require_usable(job, out, resume=resume, overwrite=replaces_run)

        sites, config, parts = prepare(job, events.features)
        sizes = [job.kind.count_examples(site) for site in sites.data]
        job_warnings = (
            *job.module.list_warnings(config),
            *job.module.list_size_warnings(config, sizes),
        )
        if resume and not has_record(out):
            job_warnings = (nothing_to_resume(out), *job_warnings)
        for text in (*sites.warnings, *job_warnings):
            events.warn(text)
        sites = replace(sites, remarks=(*sites.remarks, *job_warnings))
        traffic = estimate_traffic(job, config, sites.data)
        if traffic is not None:
            events.cost(traffic)

        if replaces_run and set_aside(out):
            # The lock moved away with the earlier run, so lock the new folder too.
            locks.enter_context(hold_folder(out))
        facts = count_data(job, sites.data)
        files = digest_model_files(job)
        claim(job, out, sites, facts, files=files, resume=resume, command=command)
        with resumable(f"{command} --resume"), reported(events, out):
            run = _Run(job, out, resume, device, events)
            outcomes = run.train_parts(parts, sites.data)
            result = _make_result(job, sites, facts, parts, outcomes, command)
            result.write(out)
    return result


@dataclass(frozen=True)
class _Run:
    """Trains the parts of a job in the folder of a run.

    Attributes:
        job: The job.
        out: The folder of the run.
        resume: Whether to resume an unfinished run.
        device: PyTorch device to train on.
        listener: Receives the progress.
    """

    job: Job
    out: Path
    resume: bool
    device: str
    listener: ProgressListener

    def train_parts(
        self, parts: Sequence[Part], sites: Sequence[Any]
    ) -> dict[str, Outcome]:
        """Train the parts that are not finished, and return all outcomes by part name.

        Args:
            parts: Parts of the run.
            sites: Data of all sites; a pooled model is scored on each of them.
        """
        torch.set_num_threads(self.job.threads)
        torch.use_deterministic_algorithms(self.device == "cpu")
        if not (self.resume and (self.out / METRICS).exists()):
            write_text(self.out / METRICS, "")
        (self.out / FAILURE).unlink(missing_ok=True)
        self.listener.plan(self._plan_work(parts))

        outcomes = {}
        for part in parts:
            folder = self.out / part.name
            outcome = read_outcome(folder / "done.json") if self.resume else None
            if outcome is None:
                with recorded_failure(self.out, part.name):
                    outcome = self._train_part(part, folder, sites)
                write_json(folder / "done.json", outcome.model_dump())
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            outcomes[part.name] = outcome
        return outcomes

    def _plan_work(self, parts: Sequence[Part]) -> dict[str, float]:
        """Return how many examples each unfinished part reads over all rounds."""
        work = {}
        for part in parts:
            if self.resume and (self.out / part.name / "done.json").exists():
                continue
            sizes = [self.job.kind.count_examples(site) for site in part.sites]
            rounds, examples = self.job.module.plan_rounds(part.config, sizes)
            work[part.name] = float(rounds * examples)
        return work

    def _train_part(self, part: Part, folder: Path, sites: Sequence[Any]) -> Outcome:
        """Train one part and score it on its sites' test data.

        Args:
            part: The part.
            folder: Folder of the part's checkpoints and models.
            sites: Data of all sites; a pooled model is scored on each of them.
        """

        def observe(result: RoundResult) -> None:
            """Log a committed round, and show it."""
            if result.evaluated:
                self._log_evaluation(part, result)
            self.listener.round(result)

        method = self.job.module
        method_sites = make_method_sites(
            self.job,
            part,
            self._model_folders(part, folder),
            self.device,
            progress=self.listener.features,
        )
        engine = InProcess(
            method_sites,
            directory=folder / "checkpoints",
            resume=self.resume,
            observer=observe,
            secure=is_summed_securely(self.job, part),
        )
        state = engine.resume()
        rewind_metrics(self.out / METRICS, part.name, state.round if state else 0)
        sizes = [site.num_examples for site in method_sites]
        rounds, examples = method.plan_rounds(part.config, sizes)
        self.listener.begin(part, rounds, examples)
        final_state = method.train(engine, part.config)
        self.listener.end()

        scores = _score(method_sites, sites)
        first_site, *_ = method_sites
        return Outcome(
            scores=scores.by_site,
            documents=scores.document_counts,
            rounds=final_state.round,
            seconds=engine.seconds,
            bytes_up=engine.bytes_up,
            bytes_down=engine.bytes_down,
            examples=sum(site.num_examples for site in method_sites),
            described=first_site.described(),
            eta=first_site.eta,
            valid={site.id: site.valid_score for site in method_sites},
            reading={site.id: dict(site.measure_reading()) for site in method_sites},
        )

    def _model_folders(self, part: Part, folder: Path) -> list[Path | None]:
        """Return each site's folder for its model; None if it saves none."""
        if self.job.module.ends_with_one_model(part.config):
            # The first site saves the model of all.
            other_folders = [None] * (len(part.sites) - 1)
            return [folder, *other_folders]
        return [folder / "sites" / site.id for site in part.sites]

    def _log_evaluation(self, part: Part, result: RoundResult) -> None:
        """Add an evaluation to metrics.jsonl."""
        append_entry(self.out / METRICS, describe_evaluation(result, part))


class _Scores(NamedTuple):
    """The scores of a part's trained models.

    Attributes:
        by_site: Site to the scores on its test data.
        document_counts: Site to the counts of each of its test documents, for the sites
            that have these counts.
    """

    by_site: dict[str, dict[str, Any]]
    document_counts: dict[str, list[list[int]]]


def _score(method_sites: Sequence[MethodSite], sites: Sequence[Any]) -> _Scores:
    """Score the trained models of a part.

    Args:
        method_sites: The sites of the part.
        sites: Data of all sites; a pooled model is scored on each of them.
    """
    first_site, *_ = method_sites
    if first_site.id == POOLED:
        scores = {site.id: first_site.scores_on(site) for site in sites}
        counts = {site.id: first_site.document_counts(site.id) for site in sites}
    else:
        scores = {site.id: dict(site.scores) for site in method_sites}
        counts = {site.id: site.document_counts(site.id) for site in method_sites}
    document_counts = {
        site: site_counts.tolist()
        for site, site_counts in counts.items()
        if site_counts is not None
    }
    return _Scores(scores, document_counts)


def describe_evaluation(result: RoundResult, part: Part) -> dict[str, Any]:
    """Return the entry of metrics.jsonl for an evaluation of a part."""
    details: dict[str, Any] = {}
    if part.site:
        details["site"] = part.site
    details["sites"] = site_metrics(result, part)
    return make_entry(result, part.name, part.condition, details)


def site_metrics(result: RoundResult, part: Part) -> dict[str, dict[str, float]]:
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
) -> RunResult:
    """Combine the outcomes of all parts into the result of the run.

    Args:
        job: The job.
        sites: Data of the job's sites.
        facts: Facts about the sites' data that can explain low scores.
        parts: The parts of the run.
        outcomes: Name of each part to its outcome.
        command: Command that repeats the run.
    """
    by_condition = _group_by_condition(outcomes)
    site_ids = [site.id for site in sites.data]
    scores: dict[str, dict[str, Any]] = {site: {} for site in site_ids}
    mean = {}
    micro = {}
    costs = {}
    validation = {}
    for condition, condition_outcomes in by_condition.items():
        by_site = _gather_scores(condition_outcomes)
        for site in site_ids:
            scores[site][condition] = by_site[site]
        scores_in_order = [by_site[site] for site in site_ids]
        mean[condition] = mean_scores(scores_in_order)
        summed = summed_scores(scores_in_order)
        if summed:
            micro[condition] = summed
        costs[condition] = _sum_costs(condition_outcomes)
        validation[condition] = _gather_validation(condition_outcomes)
    paired, paired_mean = _compare_with_baselines(by_condition)

    federated = outcomes.get("federated")
    notes = [*sites.messages]
    if federated is not None and federated.described:
        notes.append(f"federated: {federated.described}")
    causes = [
        *remark_on_empty_scores(job, scores),
        *job.kind.find_score_causes(job, scores, facts),
        *remark_on_pooled(job, mean, costs, parts, len(site_ids)),
    ]
    notes += map(str, causes)
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
        sites=scores,
        mean=mean,
        micro=micro,
        valid=validation,
        privacy=_describe_privacy(job, parts),
        conditions=costs,
        marks=mark_conditions(parts),
        paired=paired,
        paired_mean=paired_mean,
        config=dict(job.table),
        versions=list_versions(),
        notes=notes,
        causes=causes,
    )


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
            guarantees[part.condition] = promise.told()
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
        differences = _compare_with(baseline, by_condition)
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


def _compare_with(baseline: str, by_condition: Conditions) -> _Differences:
    """Compare each site's federated model with a baseline by a paired test.

    There is no comparison if one of the conditions was not trained or a site has no
    counts of its test documents.

    Args:
        baseline: The other condition.
        by_condition: Outcomes of the parts of each condition.
    """
    federated_counts = _document_counts(by_condition.get("federated", ()))
    baseline_counts = _document_counts(by_condition.get(baseline, ()))
    if federated_counts.keys() != baseline_counts.keys():
        return _Differences({}, None)
    tests, mean_test = paired_sites(
        {
            site: (federated_counts[site], baseline_counts[site])
            for site in federated_counts
        }
    )
    by_site = {site: _to_difference(test) for site, test in tests.items()}
    of_means = None if mean_test is None else _to_difference(mean_test)
    return _Differences(by_site, of_means)


def _document_counts(outcomes: Iterable[Outcome]) -> dict[str, NDArray[Any]]:
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
