"""Diagnose a run, the runs of several seeds, or a job before training."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from fednotes.core.errors import ConfigError
from fednotes.jobs.causes import IMPORTANCES, Cause, Evidence, Importance
from fednotes.jobs.diagnosis.gain import find_gain_causes
from fednotes.jobs.diagnosis.learning import find_learning_causes
from fednotes.jobs.diagnosis.participation import find_participation_causes
from fednotes.jobs.diagnosis.plan import (
    find_noise_causes,
    find_rate_causes,
    find_step_causes,
)
from fednotes.jobs.diagnosis.runs import RunEvidence, read_run
from fednotes.jobs.diagnosis.vocabulary import find_vocabulary_causes
from fednotes.jobs.job import Job, count_data
from fednotes.jobs.job_file import load_job, parse_job
from fednotes.jobs.parts import prepare
from fednotes.jobs.remarks import remark_on_empty_scores
from fednotes.jobs.run_folder import is_run
from fednotes.jobs.seeds import (
    SEEDS_FILE,
    SeedDifference,
    holds_runs,
    list_seed_folders,
    read_seeds,
)
from fednotes.metrics.gap import ALPHA, main_score

# A model with half of all mentions right has learned, so what its settings and its data
# could have caused did not stop it.
LEARNED = 0.5
# A cause of single runs is one of the job if more than half of its seeds show it.
MOST_SEEDS = 0.5
# What longer training does not mend, and what explains a curve that rises slowly.
_ROOTS = (
    "failed",
    "diverged",
    "rate_high",
    "rate_low",
    "noise_large",
    "names_alike",
    "types_untrained",
)
# What other causes explain, where there are any.
_EFFECTS = (
    "nothing_found",
    "types_missed",
    "below_alone",
    "types_lost",
    "gap_open",
    "no_gain",
    "pooled_below_alone",
)
_MAX_PLACES = 4  # places that a cause of many sites and conditions names
# Causes that say what might happen; the scores of a run show whether it did.
_EXPECTATIONS = ("rate_high", "rate_low", "few_steps")


@dataclass(frozen=True)
class Diagnosis:
    """The likely causes of a poor result, the most important first.

    Attributes:
        subject: What was examined: the folder of a run, or a job.
        state: Whether the run has ended; "job" before training.
        causes: The causes.
        checked: What was looked at, in words.
        unchecked: What could not be looked at, and why.
    """

    subject: str
    state: Literal["job", "finished", "failed", "unfinished"]
    causes: tuple[Cause, ...]
    checked: tuple[str, ...]
    unchecked: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "subject": self.subject,
            "state": self.state,
            "causes": [cause.to_dict() for cause in self.causes],
            "checked": list(self.checked),
            "unchecked": list(self.unchecked),
        }

    def __str__(self) -> str:
        lines = [str(cause) for cause in self.causes]
        return "\n".join(lines) or f"nothing found; checked: {'; '.join(self.checked)}"


def diagnose(target: str | Path | Job, settings: Sequence[str] = ()) -> Diagnosis:
    """Return the likely causes of a poor result.

    Args:
        target: The folder of a run or of several seeds; or a job's file or name, or a
            job, whose data are read.
        settings: Assignments over a job's file, such as "training.epochs=3".

    Raises:
        ConfigError: There is no such run or job, or it has a mistake.
        DataError: A file of the run or the job cannot be used.
    """
    if isinstance(target, Job):
        return diagnose_job(target)
    folder = Path(target)
    if folder.is_dir():
        if settings:
            raise ConfigError(
                f"{folder} is a run, whose job does not change: give settings with a "
                "job, or leave them out"
            )
        if holds_runs(folder) and not is_run(folder):
            return diagnose_seeds(folder)
        if not is_run(folder):
            raise ConfigError(
                f"{folder} is not the folder of a run: give the folder after --out of "
                "`fednotes simulate` or `fednotes run`, or a job"
            )
        return diagnose_run(folder)
    diagnosis = diagnose_job(load_job(target, tuple(settings)))
    return replace(diagnosis, subject=str(target))


# ---- a job ---------------------------------------------------------------------------


def diagnose_job(job: Job) -> Diagnosis:
    """Return what a job and its data show before training.

    Raises:
        FednotesError: The data cannot be read, or do not match the job.
    """
    sites, config, _ = prepare(job)
    facts = count_data(job, sites.data)
    promise = job.module.make_promise(config)
    causes = [
        *find_rate_causes(job),
        *find_noise_causes(job, facts, promise.told() if promise is not None else {}),
        *job.kind.find_data_causes(job, facts),
        *find_step_causes(job, facts, config),
    ]
    checked = ["learning rate", "number of steps", *_DATA_CHECKS.get(job.kind.name, ())]
    if job.privacy is not None:
        checked.append("noise against signal")
    return Diagnosis(
        job.name,
        "job",
        tuple(
            _propose_once(_sort(_before_training(_with_accepted_settings(job, causes))))
        ),
        tuple(checked),
        ("what only training shows: learning curves, scores, absent sites",),
    )


_DATA_CHECKS: Mapping[str, tuple[str, ...]] = {
    "documents": (
        "names of types between sites",
        "label maps",
        "rare types",
        "densities of types",
        "long sentences",
        "small sites",
    ),
    "patients": ("rare phenotypes", "sites without labels"),
}


def _before_training(causes: Iterable[Cause]) -> Iterator[Cause]:
    """Yield causes whose evidence names no file of a run."""
    for cause in causes:
        evidence = tuple(replace(each, file="") for each in cause.evidence)
        yield replace(cause, evidence=evidence)


# ---- a run ---------------------------------------------------------------------------


def diagnose_run(folder: Path) -> Diagnosis:
    """Return the likely causes of a poor result of one run.

    Raises:
        ConfigError: The folder is not that of a run, or its job cannot be read.
        DataError: A file of the run is damaged.
    """
    run = read_run(folder)
    job = run.job
    promise = run.result.privacy.get("federated", {})
    causes: list[Cause] = [
        *find_learning_causes(run),
        *find_rate_causes(job),
        *find_noise_causes(job, run.facts, promise),
        *find_participation_causes(run),
        *find_vocabulary_causes(run),
        *job.kind.find_data_causes(job, run.facts),
        *find_step_causes(job, run.facts, job.config),
        *_find_score_causes(run),
        *find_gain_causes(run),
    ]
    codes = {cause.code for cause in causes}
    has_learned = _has_learned(run)
    if has_learned and "undertrained" not in codes:
        causes = list(_weigh_expectations(causes, "low"))
    elif not has_learned:
        causes = list(_weigh_expectations(causes, "high"))
    if "diverged" in codes or ("rate_high" in codes and not has_learned):
        causes = list(_keep_below_rate(causes))
    return Diagnosis(
        str(folder),
        run.state,
        tuple(_propose_once(_sort(_merge(_with_accepted_settings(job, causes))))),
        tuple(_list_checked(run)),
        tuple(_list_unchecked(run)),
    )


def _find_score_causes(run: RunEvidence) -> Iterator[Cause]:
    """Yield the causes that the scores show, as the run recorded them if it did."""
    if run.result.causes:
        yield from run.result.causes
        return
    yield from remark_on_empty_scores(run.job, _without_withheld(run))
    yield from run.job.kind.find_score_causes(run.job, run.scores, run.facts)


def _without_withheld(run: RunEvidence) -> dict[str, Any]:
    """Return the scores of sites that disclose them; others say nothing about data."""
    return {
        site: {condition: of for condition, of in by_condition.items() if of}
        for site, by_condition in run.scores.items()
    }


def _weigh_expectations(
    causes: Iterable[Cause], importance: Importance
) -> Iterator[Cause]:
    """Yield causes; those that only say what might happen get this importance.

    The scores of a run show whether it did.
    """
    for cause in causes:
        is_expectation = cause.code in _EXPECTATIONS
        yield replace(cause, importance=importance) if is_expectation else cause


def _keep_below_rate(causes: Iterable[Cause]) -> Iterator[Cause]:
    """Yield causes beside a learning rate that is too high.

    It explains odd losses, and training longer or faster does not help against it.
    """
    for cause in causes:
        if cause.code in ("nothing_found", "types_missed"):
            advice = "lower the learning rate first, as said above"
            yield replace(cause, advice=advice, settings=())
        elif cause.code not in ("sites_odd", "undertrained"):
            yield cause


def _has_learned(run: RunEvidence) -> bool:
    """Return whether the federated models, or else those alone, are right often."""
    for condition in ("federated", "alone"):
        scores = [
            main_score(by_condition.get(condition, {}))
            for by_condition in run.scores.values()
        ]
        known = [score.score for score in scores if score is not None]
        if known:
            return fmean(known) >= LEARNED
    return False


def _list_checked(run: RunEvidence) -> Iterator[str]:
    """Yield what the files of a run allow to look at."""
    if run.entries:
        yield f"learning curves of {len({c.part for c in run.curves})} parts"
    if any(run.scores.values()):
        yield "scores by type"
    if run.result.verdict() is not None:
        yield "federated against alone"
    if any("took_part" in entry for entry in run.entries):
        yield "absent sites"
    if any(entry.get("sites") for entry in run.entries):
        yield "sites unlike the others"
    yield "learning rate"
    if run.facts:
        yield "number of steps"
        yield from _DATA_CHECKS.get(run.job.kind.name, ())
    if run.job.privacy is not None and run.facts:
        yield "noise against signal"


def _list_unchecked(run: RunEvidence) -> Iterator[str]:
    """Yield what the files of a run lack, and how to get it."""
    if run.state != "finished":
        yield f"the end of the run, which is {run.state}: resume it for all scores"
    if not run.entries:
        yield "learning curves: the run has no evaluation yet"
    if run.is_deployed:
        yield ("the sites' data, which stay there")
    elif not run.facts:
        yield (
            "the sites' data, which this run did not count: diagnose its job as well"
        )


def _merge(causes: Iterable[Cause]) -> Iterator[Cause]:
    """Yield causes, with those that differ only in where they were seen as one.

    Many sites and conditions then take one place in the list.
    """
    groups: dict[tuple[Any, ...], list[Cause]] = {}
    for cause in causes:
        key = (cause.code, cause.advice, str(cause.settings))
        groups.setdefault(key, []).append(cause)
    for unsorted in groups.values():
        # the federated models first, which the run was made for
        group = sorted(unsorted, key=lambda cause: "federated" not in cause.where)
        first = min(group, key=lambda cause: IMPORTANCES.index(cause.importance))
        if len(group) == 1:
            yield first
            continue
        messages = list(dict.fromkeys(cause.message for cause in group))
        evidence: list[Evidence] = []
        for cause in group:
            if len(messages) > 1:
                evidence.append(
                    Evidence(f"{cause.where}: {cause.message}", "summary.json")
                )
            evidence += [
                replace(each, text=f"{cause.where}: {each.text}")
                for each in cause.evidence
            ]
        yield replace(
            first,
            where="; ".join(_shorten([cause.where for cause in group])),
            message=messages[0] if len(messages) == 1 else _SHARED[first.code],
            evidence=tuple(evidence),
        )


def _shorten(places: Sequence[str]) -> list[str]:
    """Return the first places, and the number of the others."""
    unlisted = len(places) - _MAX_PLACES
    more = [f"{unlisted} more"] if unlisted > 0 else []
    return [*places[:_MAX_PLACES], *more]


# Messages of several causes of the same kind, whose own messages become evidence.
_SHARED = {
    "types_missed": "types of the test data are not found",
    "no_auroc": "test patients of some phenotypes are all present, or all absent",
}


def _propose_once(causes: Iterable[Cause]) -> Iterator[Cause]:
    """Yield causes; only the first one proposes a value for a key.

    Effects of few steps, for example, do not repeat that training is to be longer.
    """
    proposed: set[str] = set()
    for cause in causes:
        settings = tuple(each for each in cause.settings if each.key not in proposed)
        proposed.update(setting.key for setting in settings)
        yield replace(cause, settings=settings)


def _sort(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Return causes by importance; of equal ones, causes come before their effects."""

    def place(cause: Cause) -> tuple[int, bool, bool]:
        return (
            IMPORTANCES.index(cause.importance),
            cause.code in _EFFECTS,
            cause.code not in _ROOTS,
        )

    return tuple(sorted(causes, key=place))


def _with_accepted_settings(job: Job, causes: Iterable[Cause]) -> Iterator[Cause]:
    """Yield causes with only the settings that the job accepts.

    Settings may exclude each other, such as a median and compressed updates.
    """
    for cause in causes:
        accepted = tuple(
            setting for setting in cause.settings if _is_accepted(job, setting)
        )
        yield replace(cause, settings=accepted)


def _is_accepted(job: Job, setting: Any) -> bool:
    """Return whether a job with this value is valid."""
    table: dict[str, Any] = copy.deepcopy(dict(job.table))
    *tables, key = setting.place
    inner = table
    for name in tables:
        inner = inner.setdefault(name, {})
    inner[key] = setting.value
    try:
        parse_job(table, job.name, job.folder, job.name)
    except ConfigError:
        return False
    return True


# ---- several seeds -------------------------------------------------------------------


def diagnose_seeds(folder: Path) -> Diagnosis:
    """Return the causes that most seeds of a job show, and the test over all seeds.

    Raises:
        ConfigError: A run's job cannot be read.
        DataError: A file is damaged.
    """
    by_seed = {
        seed: diagnose_run(of_seed)
        for seed, of_seed in list_seed_folders(folder).items()
        if is_run(of_seed)
    }
    if not by_seed:
        raise ConfigError(
            f"{folder}: no run of a seed has begun there: give another folder"
        )
    has_ended = (folder / SEEDS_FILE).is_file()
    tested = [
        each
        for each in (read_seeds(folder).differences if has_ended else ())
        if each.against == "alone" and not each.site
    ]
    causes = [
        cause
        for cause in _find_common(by_seed)
        # The test over the seeds replaces those of single runs.
        if not tested or cause.code not in ("below_alone", "no_gain")
    ]
    causes += _find_seeds_gain(tested)
    checked = [*next(iter(by_seed.values())).checked]
    if tested:
        checked.append(f"the paired test over {len(by_seed)} seeds")
    unchecked = dict.fromkeys(
        text for diagnosis in by_seed.values() for text in diagnosis.unchecked
    )
    return Diagnosis(
        str(folder),
        "finished" if has_ended else "unfinished",
        _sort(causes),
        tuple(checked),
        tuple(unchecked),
    )


def _find_common(by_seed: Mapping[int, Diagnosis]) -> Iterator[Cause]:
    """Yield the causes that more than half of the seeds show, as the first has them."""
    seen: dict[str, dict[int, Cause]] = {}
    for seed, diagnosis in by_seed.items():
        for cause in diagnosis.causes:
            seen.setdefault(cause.code, {}).setdefault(seed, cause)
    for of_seed in seen.values():
        if len(of_seed) <= MOST_SEEDS * len(by_seed):
            continue
        seed, cause = next(iter(of_seed.items()))
        evidence = [
            replace(each, file=f"seed-{seed}/{each.file}") if each.file else each
            for each in cause.evidence
        ]
        seeds = ", ".join(map(str, of_seed))
        shown = Evidence(
            f"seen with seeds {seeds} of {len(by_seed)}", "", {"seeds": list(of_seed)}
        )
        yield replace(cause, evidence=(shown, *evidence))


def _find_seeds_gain(tested: Sequence[SeedDifference]) -> Iterator[Cause]:
    """Yield a cause if the test over the seeds shows no gain of the federation."""
    for test in tested:
        is_shown = test.p_value < ALPHA
        if is_shown and test.mean > 0:
            continue
        evidence = Evidence(
            f"mean over {test.n} seeds: {100 * test.mean:+.1f} points (95 % "
            f"{100 * test.low:+.1f} to {100 * test.high:+.1f}, p {test.p_value:.4f})",
            SEEDS_FILE,
            test.model_dump(),
        )
        if is_shown:
            yield Cause(
                "below_alone",
                "high",
                "the mean over the sites",
                "the federated model is worse than the models that the sites train "
                "alone",
                "follow the other causes here first; sites whose notes or annotation "
                "differ keep more of the model",
                evidence=(evidence,),
            )
        else:
            yield Cause(
                "no_gain",
                "medium",
                "the mean over the sites",
                f"no gain of the federation is shown over {test.n} seeds",
                "follow the other causes here first, then run more seeds",
                evidence=(evidence,),
            )
