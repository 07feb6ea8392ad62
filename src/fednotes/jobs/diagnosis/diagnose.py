"""Diagnose a run, the runs of several seeds, or a job before training."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from fednotes.core.errors import (
    ConfigError,
    DataError,
    ParameterError,
    describe_place,
    suggest_name,
)
from fednotes.core.wording import format_count, list_names
from fednotes.jobs.built_in_jobs import list_built_in_jobs
from fednotes.jobs.causes import IMPORTANCES, Cause, Evidence, Importance, Setting
from fednotes.jobs.diagnosis.evidence import RunEvidence, read_run_evidence
from fednotes.jobs.diagnosis.gain import find_gain_causes
from fednotes.jobs.diagnosis.learning import (
    find_learning_causes,
    list_unjudged_lengths,
)
from fednotes.jobs.diagnosis.next_run import find_command, suggest_command
from fednotes.jobs.diagnosis.participation import find_participation_causes
from fednotes.jobs.diagnosis.plan import (
    find_noise_causes,
    find_rate_causes,
    find_step_causes,
)
from fednotes.jobs.diagnosis.vocabulary import find_vocabulary_causes
from fednotes.jobs.job import Job, count_data
from fednotes.jobs.job_file import load_job, parse_job
from fednotes.jobs.parts import prepare
from fednotes.jobs.run_folder import is_run, list_runs_near
from fednotes.jobs.score_causes import find_empty_scores
from fednotes.jobs.seeds import (
    SEEDS_FILE,
    SeedDifference,
    holds_runs,
    list_seed_folders,
    read_seeds,
)
from fednotes.metrics.gap import ALPHA, find_main_score

# A model with half of all mentions right has learned, so what its settings and its data
# could have caused did not stop it.
LEARNED = 0.5
# Raised by a value that training never writes.
_ERRORS_OF_DAMAGE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)
# A cause of single runs is one of the job if more than half of its seeds show it.
MOST_SEEDS = 0.5
# Causes that longer training does not mend; they may explain a curve that rises slowly.
_ROOTS = (
    "failed",
    "diverged",
    "rate_high",
    "rate_low",
    "noise_large",
    "names_alike",
    "types_untrained",
)
# Poor results, which other causes may explain.
_EFFECTS = (
    "nothing_found",
    "types_missed",
    "below_alone",
    "types_lost",
    "gap_open",
    "no_gain",
    "pooled_below_alone",
)
_MAX_PLACES = 4  # number of sites and conditions that one cause names
# Causes that say what might happen; the scores of a run show whether it did.
_EXPECTATIONS = ("rate_high", "rate_low", "few_steps")


@dataclass(frozen=True)
class Diagnosis:
    """The likely causes of a poor result, the most important first.

    Attributes:
        subject: What was examined: the folder of a run, or a job.
        state: Whether the run has ended; "job" before training.
        causes: The causes.
        checked: The aspects that were examined, in words.
        unchecked: The aspects that could not be examined, and why.
        command: The command that tries the first settings of the first cause that has
            some; "" if no cause has, or if the command of the run is not known.
    """

    subject: str
    state: Literal["job", "finished", "failed", "unfinished"]
    causes: tuple[Cause, ...]
    checked: tuple[str, ...]
    unchecked: tuple[str, ...] = ()
    command: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "subject": self.subject,
            "state": self.state,
            "causes": [cause.to_dict() for cause in self.causes],
            "checked": list(self.checked),
            "unchecked": list(self.unchecked),
            "command": self.command,
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
        ConfigError: There is no such run or job, it has a mistake, or `settings` does
            not apply to it.
        DataError: A file of the run or the job cannot be used.
    """
    if isinstance(target, Job):
        if settings:
            raise ParameterError(
                "`settings` changes a job that is given as a file or by name, and this "
                "one is a Job: give the changes to `job` instead, as in "
                "job(source, training={...})"
            )
        return diagnose_job(target)
    folder = Path(target)
    if folder.is_dir():
        _require_run(folder)
        if settings:
            raise ConfigError(
                f"{folder} is a run, whose job cannot change: give settings with a "
                "job, or leave them out"
            )
        return diagnose_run(folder) if is_run(folder) else diagnose_seeds(folder)
    if not folder.is_file() and _looks_like_folder(str(target)):
        raise ConfigError(
            f"there is no run and no job {target}: {_propose_runs(folder)}"
        )
    diagnosis = diagnose_job(load_job(target, tuple(settings)))
    words = ["fednotes", "simulate", str(target)]
    for setting in settings:
        words += ["--set", setting]
    command = suggest_command(words, diagnosis.causes)
    return replace(diagnosis, subject=str(target), command=command)


def _require_run(folder: Path) -> None:
    """Raise ConfigError if a folder holds no run."""
    if not is_run(folder) and not holds_runs(folder):
        raise ConfigError(
            f"{folder} is not the folder of a run: {_propose_runs(folder)}"
        )


def _looks_like_folder(target: str) -> bool:
    """Return whether a target that does not exist was meant to be a run's folder."""
    is_like_built_in = suggest_name(target, list_built_in_jobs(), "") != ""
    return not target.endswith(".toml") and not is_like_built_in


def _propose_runs(path: Path) -> str:
    """Return what to give in place of a path where no run is."""
    near = [str(run) for run in list_runs_near(path)]
    if near:
        return f"give a job, or a run; nearby: {list_names(near)}"
    return (
        "give the folder after --out of `fednotes simulate` or `fednotes run`, or a job"
    )


# ---- a job ---------------------------------------------------------------------------


def diagnose_job(job: Job) -> Diagnosis:
    """Return what a job and its data show before training.

    Raises:
        FednotesError: The data cannot be read, or do not match the job.
    """
    sites, config, _ = prepare(job)
    facts = count_data(job, sites.data)
    promise = job.module.make_promise(config)
    promised = promise.to_dict() if promise is not None else {}
    causes = [
        *find_rate_causes(job),
        *find_noise_causes(job, facts, promised),
        *job.kind.find_data_causes(job, facts),
        *find_step_causes(job, facts, config),
    ]
    causes = _keep_accepted_settings(job, causes)
    causes = _drop_repeated_settings(
        _sort_by_importance(_merge_by_code(_drop_files(causes)))
    )
    checked = ["learning rate", "number of steps", *_DATA_CHECKS.get(job.kind.name, ())]
    if job.privacy is not None:
        checked.append("noise against signal")
    return Diagnosis(
        job.name,
        "job",
        tuple(causes),
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


def _drop_files(causes: Iterable[Cause]) -> list[Cause]:
    """Return causes whose evidence names no file, as before training there is none."""
    without_files = []
    for cause in causes:
        evidence = tuple(replace(each, file="") for each in cause.evidence)
        without_files.append(replace(cause, evidence=evidence))
    return without_files


# ---- a run ---------------------------------------------------------------------------


def diagnose_run(folder: Path) -> Diagnosis:
    """Return the likely causes of a poor result of one run.

    Raises:
        ConfigError: The folder is not that of a run, or its job cannot be read.
        DataError: A file of the run is damaged.
    """
    try:
        return _diagnose_evidence(read_run_evidence(folder))
    except _ERRORS_OF_DAMAGE as error:
        # Scores and counts have many forms, and strangers may have written them.
        raise DataError(
            f"{folder}: a file of this run has a value that training never writes "
            f"({describe_place(error)}): copy the run's folder again"
        ) from error


def _diagnose_evidence(run: RunEvidence) -> Diagnosis:
    """Return the likely causes of a poor result, from what a run's folder holds."""
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
        causes = _weigh_expectations(causes, "low")
    elif not has_learned:
        causes = _weigh_expectations(causes, "high")
    if "diverged" in codes or ("rate_high" in codes and not has_learned):
        causes = _drop_effects_of_rate(causes)
    causes = _keep_accepted_settings(job, causes)
    causes = _drop_repeated_settings(_sort_by_importance(_merge_by_code(causes)))
    words = find_command(run)
    return Diagnosis(
        str(run.folder),
        run.state,
        tuple(causes),
        tuple(_list_checked(run)),
        tuple(_list_unchecked(run)),
        suggest_command(words, causes, run.folder),
    )


def _find_score_causes(run: RunEvidence) -> Iterator[Cause]:
    """Yield the causes that the scores show, or those that the run has recorded."""
    if run.result.causes:
        yield from run.result.causes
        return
    yield from find_empty_scores(run.job, _read_disclosed_scores(run))
    yield from run.job.kind.find_score_causes(run.job, run.scores, run.facts)


def _read_disclosed_scores(run: RunEvidence) -> dict[str, Any]:
    """Return site → condition → scores, without the scores that a site withholds.

    A withheld score is empty too, but does not mean that there were no test data.
    """
    return {
        site: {
            condition: scores for condition, scores in by_condition.items() if scores
        }
        for site, by_condition in run.scores.items()
    }


def _weigh_expectations(causes: Iterable[Cause], importance: Importance) -> list[Cause]:
    """Set the importance of the causes that only say what might happen.

    The scores of a run show whether it did. Other causes stay as they are.
    """
    weighed = []
    for cause in causes:
        if cause.code in _EXPECTATIONS:
            weighed.append(replace(cause, importance=importance))
        else:
            weighed.append(cause)
    return weighed


def _drop_effects_of_rate(causes: Iterable[Cause]) -> list[Cause]:
    """Return causes without what a learning rate that is too high explains.

    It makes losses odd, and longer training does not help. If mentions are missing, the
    advice is to lower the rate first.
    """
    remaining = []
    for cause in causes:
        if cause.code in ("nothing_found", "types_missed"):
            advice = "lower the learning rate first, as said above"
            remaining.append(replace(cause, advice=advice, settings=()))
        elif cause.code not in ("sites_odd", "undertrained"):
            remaining.append(cause)
    return remaining


def _has_learned(run: RunEvidence) -> bool:
    """Return whether the run's models score at least `LEARNED` on average.

    The models of the sites alone count if there are no scores of the federated ones.
    """
    for condition in ("federated", "alone"):
        scores = [
            find_main_score(by_condition.get(condition, {}))
            for by_condition in run.scores.values()
        ]
        known = [score.score for score in scores if score is not None]
        if known:
            return fmean(known) >= LEARNED
    return False


def _list_checked(run: RunEvidence) -> Iterator[str]:
    """Yield the aspects that the files of a run allow to examine."""
    if run.entries:
        parts = {curve.part for curve in run.curves}
        yield f"learning curves of {format_count(len(parts), 'part')}"
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
    """Yield the aspects for which a run has no files, and how to get them."""
    if run.state != "finished":
        yield f"the end of the run, which is {run.state}: resume it for all scores"
    if not run.entries:
        yield "learning curves: the run has no evaluation yet"
    yield from list_unjudged_lengths(run)
    if run.is_deployed:
        yield "the sites' data, which stay there"
    elif not run.facts:
        yield (
            "the sites' data, which this run did not count: diagnose its job as well"
        )


# Messages of merged causes whose own messages differ.
_MERGED_MESSAGES = {
    "types_missed": "types of the test data are not found",
    "types_unmapped": "label_map leaves types under names that no other site uses",
    "types_untrained": "types of the test data have no training mention anywhere",
    "no_auroc": "all test patients have the same label for some phenotypes",
}


def _merge_by_code(causes: Iterable[Cause]) -> list[Cause]:
    """Return one cause for each code, so that shared causes are listed once."""
    groups: dict[str, list[Cause]] = {}
    for cause in causes:
        groups.setdefault(cause.code, []).append(cause)
    return [_merge_group(group) for group in groups.values()]


def _merge_group(group: Sequence[Cause]) -> Cause:
    """Return one cause that stands for a group with the same code."""
    if len(group) == 1:
        return group[0]
    # The run was made for the federated models, so they come first.
    ordered = sorted(group, key=lambda cause: "federated" not in cause.where)
    first = min(ordered, key=lambda cause: IMPORTANCES.index(cause.importance))
    messages = {cause.message for cause in ordered}
    is_same_message = len(messages) == 1
    evidence = []
    for cause in ordered:
        if not is_same_message:
            text = f"{cause.where}: {cause.message}"
            file = cause.evidence[0].file if cause.evidence else ""
            evidence.append(Evidence(text, file))
        evidence += [
            replace(each, text=f"{cause.where}: {each.text}") for each in cause.evidence
        ]
    return replace(
        first,
        where=_list_places(list(dict.fromkeys(cause.where for cause in ordered))),
        message=first.message if is_same_message else _MERGED_MESSAGES[first.code],
        advice=_join_advice(ordered),
        evidence=tuple(evidence),
        settings=_gather_settings(ordered),
    )


def _join_advice(causes: Iterable[Cause]) -> str:
    """Return the advice of several causes, each clause once."""
    clauses = (clause for cause in causes for clause in cause.advice.split("; "))
    return "; ".join(dict.fromkeys(clauses))


def _gather_settings(causes: Iterable[Cause]) -> tuple[Setting, ...]:
    """Return the settings of several causes, with the first value of each key."""
    by_key: dict[str, Setting] = {}
    for cause in causes:
        for setting in cause.settings:
            by_key.setdefault(setting.key, setting)
    return tuple(by_key.values())


def _list_places(places: Sequence[str]) -> str:
    """Return the first places, and the number of the others, in one line."""
    listed = list(places[:_MAX_PLACES])
    unlisted = len(places) - len(listed)
    if unlisted:
        listed.append(f"{unlisted} more")
    return "; ".join(listed)


def _drop_repeated_settings(causes: Iterable[Cause]) -> list[Cause]:
    """Return causes without settings of keys for which an earlier cause has one.

    Effects of few steps, for example, do not repeat that training is to be longer.
    """
    proposed: set[str] = set()
    without_repeats = []
    for cause in causes:
        settings = tuple(each for each in cause.settings if each.key not in proposed)
        proposed.update(setting.key for setting in settings)
        without_repeats.append(replace(cause, settings=settings))
    return without_repeats


def _sort_by_importance(causes: Iterable[Cause]) -> list[Cause]:
    """Return causes by importance; of equal ones, causes come before their effects."""

    def make_rank(cause: Cause) -> tuple[int, bool, bool]:
        """Return the sort key of a cause; the smallest comes first."""
        return (
            IMPORTANCES.index(cause.importance),
            cause.code in _EFFECTS,
            cause.code not in _ROOTS,
        )

    return sorted(causes, key=make_rank)


def _keep_accepted_settings(job: Job, causes: Iterable[Cause]) -> list[Cause]:
    """Return causes without the settings that the job refuses.

    Settings may exclude each other, such as a median and compressed updates.
    """
    return [
        replace(
            cause,
            settings=tuple(each for each in cause.settings if _is_accepted(job, each)),
        )
        for cause in causes
    ]


def _is_accepted(job: Job, setting: Setting) -> bool:
    """Return whether a job is valid with the value of a setting."""
    job_table: dict[str, Any] = copy.deepcopy(dict(job.table))
    *tables, key = setting.place
    inner_table = job_table
    for name in tables:
        inner_table = inner_table.setdefault(name, {})
    inner_table[key] = setting.value
    try:
        parse_job(job_table, job.name, job.folder, job.name)
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
            f"{folder}: it contains no run of a seed: give another folder"
        )
    has_ended = (folder / SEEDS_FILE).is_file()
    causes = list(_find_common_causes(by_seed))
    first_diagnosis = next(iter(by_seed.values()))
    checked = list(first_diagnosis.checked)
    tests = _read_gain_tests(folder) if has_ended else []
    if tests:
        # The test over the seeds replaces those of single runs.
        causes = [
            cause for cause in causes if cause.code not in ("below_alone", "no_gain")
        ]
        causes += _find_missing_gain(tests)
        checked.append(f"the paired test over {len(by_seed)} seeds")
    unchecked = dict.fromkeys(
        text for diagnosis in by_seed.values() for text in diagnosis.unchecked
    )
    causes = _sort_by_importance(causes)
    first_seed = next(iter(by_seed))
    words = find_command(read_run_evidence(list_seed_folders(folder)[first_seed]))
    return Diagnosis(
        str(folder),
        "finished" if has_ended else "unfinished",
        tuple(causes),
        tuple(checked),
        tuple(unchecked),
        suggest_command(words, causes, folder),
    )


def _find_common_causes(by_seed: Mapping[int, Diagnosis]) -> Iterator[Cause]:
    """Yield the causes that more than half of the seeds show.

    The evidence is that of the first seed that shows a cause.
    """
    # Code of a cause → seed → the cause.
    by_code: dict[str, dict[int, Cause]] = {}
    for seed, diagnosis in by_seed.items():
        for cause in diagnosis.causes:
            by_code.setdefault(cause.code, {}).setdefault(seed, cause)
    for causes in by_code.values():
        if len(causes) <= MOST_SEEDS * len(by_seed):
            continue
        seeds = list(causes)
        listed = ", ".join(map(str, seeds))
        evidence = [
            Evidence(
                f"seen with seeds {listed} of {len(by_seed)}", "", {"seeds": seeds}
            )
        ]
        first_seed = seeds[0]
        first = causes[first_seed]
        for each in first.evidence:
            file = f"seed-{first_seed}/{each.file}" if each.file else ""
            evidence.append(replace(each, file=file))
        yield replace(first, evidence=tuple(evidence))


def _read_gain_tests(folder: Path) -> list[SeedDifference]:
    """Return the tests of the federated models against those alone, over all sites."""
    differences = read_seeds(folder).differences
    return [each for each in differences if each.against == "alone" and not each.site]


def _find_missing_gain(tests: Sequence[SeedDifference]) -> Iterator[Cause]:
    """Yield a cause for each test over the seeds that shows a loss, or no gain."""
    for test in tests:
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
                "address the other causes first; then let sites that differ keep more "
                "layers private",
                evidence=(evidence,),
            )
        else:
            yield Cause(
                "no_gain",
                "medium",
                "the mean over the sites",
                f"{test.n} seeds do not show that federation is better",
                "address the other causes first; then run more seeds",
                evidence=(evidence,),
            )
