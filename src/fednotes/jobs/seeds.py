"""Run one job with several seeds, and summarise the runs.

OUT/seed-1 …           a run for each seed (`jobs/run_folder.py`)
OUT/seeds.json         means and deviations over the seeds, and paired tests
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, FiniteFloat

from fednotes.core.errors import ConfigError, DataError, MissingExtra, ParameterError
from fednotes.core.numbers import Fraction
from fednotes.core.stopping import telling_how_to_resume
from fednotes.core.store import LOCK, reserving_folder, write_json
from fednotes.jobs.card import write_cards
from fednotes.jobs.job import Job
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.left_out_table import (
    LeftOutScores,
    LeftOutTable,
    make_left_out_table,
)
from fednotes.jobs.progress import AnyListener, ProgressListener, to_listener
from fednotes.jobs.results import BASELINES, SUMMARY, RunResult, read_result
from fednotes.jobs.run_files import VERSION, OptionalNumber, read_versioned
from fednotes.jobs.run_folder import (
    SEED_PREFIX,
    describe_nothing_to_resume,
    has_record,
    has_same_conditions,
    list_versions,
    require_resumable,
)
from fednotes.jobs.simulate import simulate
from fednotes.jobs.workers.pool import Workers, running_workers
from fednotes.metrics.gap import find_main_score
from fednotes.metrics.paired_tests import FEWEST_SEEDS, run_paired_t_test
from fednotes.metrics.summaries import summarise

SEEDS_FILE = "seeds.json"
FEWEST_TESTED = 3  # minimum number of seeds for a paired test
MOST_SEEDS = 1000
# Parts of the scores that are left out of `SeedsResult.table`.
_NOT_IN_TABLE = ("by_type", "by_output", "counts")


class SeedDifference(BaseModel):
    """Federated minus another condition over the seeds, by Student's paired t-test.

    Attributes:
        site: Name of the site; "" for the mean over the sites.
        against: The other condition.
        mean: Mean difference, as a fraction of F1; in nats of held-out loss for
            pre-training.
        low: Lower end of the 95% confidence interval.
        high: Upper end of the 95% confidence interval.
        p_value: Two-sided p-value.
        n: Number of seeds that have both scores.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    site: str = ""
    against: str
    mean: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat
    p_value: Fraction
    n: int


class SeedsResult(BaseModel):
    """Content of seeds.json: the scores of runs of one job with several seeds.

    Attributes:
        version: Version of the file.
        title: Title of the job.
        method: Name of the method.
        holds: Kind of data that the method's sites hold.
        seeds: The seeds.
        command: Command that repeats the runs.
        sites: Site → condition → kind of score → measure → {"mean", "std", "n"}, as
            fractions. "std" is the standard deviation of a sample, None for one seed.
        mean: Condition → the same for the means over the sites.
        micro: Condition → the same on the test data of all sites together.
        left_out: Left-out site → model → kind of score → measure → the same.
        left_out_mean: Model → the same for the means over the left-out sites.
        left_out_types: As in `RunResult`.
        bytes_up: "mean", "std" and "n" of the bytes that all sites sent in federated
            training; empty if unknown.
        bytes_down: The same for the bytes that all sites received.
        differences: The paired tests; empty for fewer than three seeds.
        marks: Condition → why its scores are not directly comparable with the others'.
        config: Tables of the job, without the seed.
        versions: Versions of the software, and the machine.
        notes: Remarks about the runs and the tests.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = 0
    title: str = ""
    method: str = ""
    holds: str = ""
    seeds: list[int] = []
    command: str = ""
    sites: dict[str, dict[str, dict[str, Any]]] = {}
    mean: dict[str, dict[str, Any]] = {}
    micro: dict[str, dict[str, Any]] = {}
    left_out: LeftOutScores = {}
    left_out_mean: dict[str, dict[str, Any]] = {}
    left_out_types: dict[str, list[str]] = {}
    bytes_up: dict[str, Any] = {}
    bytes_down: dict[str, Any] = {}
    differences: list[SeedDifference] = []
    marks: dict[str, str] = {}
    config: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    notes: list[str] = []

    def table(self) -> list[dict[str, OptionalNumber | str]]:
        """Return a row for each site and condition, then rows for "mean" over sites.

        Returns:
            Rows with "site", "condition", and means and standard deviations as
            fractions, under names such as "strict_f1_mean" and "strict_f1_std".
        """
        by_site = {**self.sites, "mean": self.mean}
        return [
            {"site": site, "condition": condition, **_flatten_statistics(scores)}
            for site, conditions in by_site.items()
            for condition, scores in conditions.items()
        ]

    @property
    def left_out_table(self) -> LeftOutTable | None:
        """The table of models at left-out sites; None if there are no such sites."""
        if not self.left_out:
            return None
        return make_left_out_table(
            self.left_out, self.left_out_mean, self.left_out_types
        )

    def write(self, folder: Path) -> None:
        """Write seeds.json into a folder."""
        write_json(folder / SEEDS_FILE, self.model_dump(exclude_defaults=True))


def _flatten_statistics(
    scores: Mapping[str, Any], prefix: str = ""
) -> dict[str, OptionalNumber | str]:
    """Return the statistics of nested scores under flat names, without entity types."""
    flat: dict[str, OptionalNumber | str] = {}
    for key, value in scores.items():
        if not isinstance(value, dict) or key in _NOT_IN_TABLE:
            continue
        name = f"{prefix}_{key}" if prefix else key
        if value.keys() == {"mean", "std", "n"}:
            flat[f"{name}_mean"] = value["mean"]
            flat[f"{name}_std"] = value["std"]
        else:
            flat.update(_flatten_statistics(value, name))
    return flat


# ---- which seeds ---------------------------------------------------------------------


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds that a text names, such as "1-5" or "1,2,7".

    Raises:
        ConfigError: The text is not a list of numbers and ranges, or names a seed
            twice.
    """
    seeds: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        last = last if dash else first
        if not first.isdecimal() or (last and not last.isdecimal()):
            raise ConfigError(
                f"seeds {text!r}: expected numbers or ranges, such as 1-5 or 1,2,7"
            )
        if not last:
            raise ConfigError(
                f"seeds {text!r}: the range {piece.strip()!r} has no end: write it as "
                "1-5"
            )
        start = int(first)
        end = int(last)
        if end - start >= MOST_SEEDS:
            raise ConfigError(
                f"seeds {text!r}: at most {MOST_SEEDS:,} seeds are possible"
            )
        if end < start:
            raise ConfigError(
                f"seeds {text!r}: the range {piece.strip()!r} is empty: write the "
                "smaller number first"
            )
        seeds += range(start, end + 1)
    return check_seeds(seeds)


def check_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """Check that a job can run with these seeds, and return them in their order.

    Raises:
        ConfigError: There are no seeds or too many, one is not an integer of at least
            0, or one occurs twice.
    """
    if not seeds:
        raise ConfigError("seeds is empty: give at least one seed, such as 1-5")
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigError(f"seeds: {seed!r} is not an integer of at least 0")
    if len(set(seeds)) < len(seeds):
        raise ConfigError("seeds: a seed occurs twice: give each seed once")
    if len(seeds) > MOST_SEEDS:
        raise ConfigError(f"seeds: at most {MOST_SEEDS:,} are possible")
    return tuple(seeds)


# ---- the runs ------------------------------------------------------------------------


def change_seed(job: Job, seed: int) -> Job:
    """Return the same job with another seed."""
    return parse_job({**job.table, "seed": seed}, job.name, job.folder, job.name)


def simulate_seeds(  # noqa: PLR0913 - the parameters of `simulate`, and the seeds
    job: Job,
    out: Path,
    seeds: Sequence[int],
    *,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    workers: int | Literal["auto"] = "auto",
    cluster: str | None = None,
    listener: AnyListener = None,
    command: str = "",
) -> SeedsResult:
    """Run a job once for each seed, and write the models' cards and a summary.

    Args:
        job: The job; its own seed is not used.
        out: Folder of all runs: a new one, or with `resume` that of an earlier call.
            Finished seeds are not run again; a call may add further seeds.
        seeds: The seeds.
        resume: Whether to resume unfinished runs in `out`.
        overwrite: Whether to move earlier runs in `out` to `OUT.previous`.
        device: As in `simulate`.
        workers: As in `simulate`; the runs share the workers.
        cluster: As in `simulate`.
        listener: As in `simulate`.
        command: Command that repeats the runs, for the report.

    Returns:
        The content of seeds.json.

    Raises:
        ConfigError: `out` holds other runs, or a run of another job.
        BusyError: Another process is running in `out`.
    """
    events = to_listener(listener)
    # Make all jobs before the first run, so that mistakes show immediately.
    jobs = {seed: change_seed(job, seed) for seed in check_seeds(seeds)}
    _require_seeds_folder(out)
    with ExitStack() as locks:
        locks.enter_context(reserving_folder(out))
        has_runs = holds_runs(out)
        notes = []
        if resume:
            _require_same_jobs(out, job)
            if not has_runs:
                notes.append(describe_nothing_to_resume(out))
                events.warn(notes[0])
        elif has_runs:
            _require_overwrite(out, overwrite=overwrite)
            _set_runs_aside(out)
            # The lock was moved with the earlier runs, so lock the new folder too.
            locks.enter_context(reserving_folder(out))

        pool = locks.enter_context(
            running_workers(device, workers, job.threads, cluster)
        )
        with telling_how_to_resume(f"{command} --resume"):
            results = _run_seeds(
                jobs, out, resume=resume, pool=pool, events=events, command=command
            )
            summary = summarise_runs(results, command)
            summary = summary.model_copy(update={"notes": notes + summary.notes})
            summary.write(out)
    return summary


def _run_seeds(
    jobs: Mapping[int, Job],
    out: Path,
    *,
    resume: bool,
    pool: Workers,
    events: ProgressListener,
    command: str,
) -> list[RunResult]:
    """Run the job of each seed, unless it has a result already.

    Args:
        jobs: The jobs by seed.
        out: As in `simulate_seeds`.
        resume: Whether finished runs are read and unfinished ones resumed.
        pool: The worker processes, if there are any.
        events: Receives the progress.
        command: The command that repeats the runs.
    """
    results = []
    for number, (seed, job) in enumerate(jobs.items(), 1):
        folder = out / f"{SEED_PREFIX}{seed}"
        result = _read_finished(job, folder) if resume else None
        if result is None:
            events.seed(seed, number, len(jobs))
            result = simulate(
                job,
                folder,
                # A seed that an earlier call did not reach is a new run.
                resume=resume and has_record(folder),
                pool=pool,
                listener=events,
                command=command,
            )
        write_cards(folder)
        events.finish(folder)
        results.append(result)
    return results


def _require_overwrite(out: Path, *, overwrite: bool) -> None:
    """Raise ParameterError unless the runs in `out` may be replaced."""
    if not overwrite:
        raise ParameterError(
            f"{out} holds runs of several seeds already: give another `out`, "
            "`resume` to resume them, or `overwrite` to replace them"
        )


def _require_same_jobs(out: Path, job: Job) -> None:
    """Raise ParameterError unless all runs in `out` are of this job.

    Otherwise a further seed would add a run of another job to those that are compared.
    """
    for seed, folder in list_seed_folders(out).items():
        if has_record(folder):
            require_resumable(folder, change_seed(job, seed))


def _read_finished(job: Job, folder: Path) -> RunResult | None:
    """Return the result of a finished run, or None if some of it is left to train.

    Raises:
        ParameterError: The folder holds a run of another job.
    """
    if not (folder / SUMMARY).is_file():
        return None
    require_resumable(folder, job)
    return read_result(folder) if has_same_conditions(folder, job) else None


def _require_seeds_folder(out: Path) -> None:
    """Raise ParameterError unless a folder is new, empty, or holds runs of seeds."""
    if not out.exists():
        return
    if out.is_dir():
        is_empty = all(path.name == LOCK for path in out.iterdir())
        if is_empty or holds_runs(out):
            return
    raise ParameterError(
        f"{out} is neither a folder of runs of several seeds nor empty: give another "
        "`out`"
    )


def holds_runs(out: Path) -> bool:
    """Return whether a folder holds runs of seeds."""
    if (out / SEEDS_FILE).is_file():
        return True
    return bool(list_seed_folders(out))


def list_seed_folders(out: Path) -> dict[int, Path]:
    """Return the folders of the runs of seeds by seed, in ascending order."""
    folders = {}
    for folder in out.glob(f"{SEED_PREFIX}*"):
        seed = folder.name.removeprefix(SEED_PREFIX)
        if seed.isdecimal():
            folders[int(seed)] = folder
    return dict(sorted(folders.items()))


def _set_runs_aside(out: Path) -> None:
    """Move earlier runs of seeds to `OUT.previous`, replacing the runs there.

    Raises:
        ParameterError: `OUT.previous` does not hold runs of seeds.
    """
    previous = out.with_name(out.name + ".previous")
    if previous.exists():
        if not holds_runs(previous):
            raise ParameterError(
                f"{previous} is in the way: move it, or give another `out`"
            )
        shutil.rmtree(previous)
    out.rename(previous)


# ---- the summary of the runs ---------------------------------------------------------


def summarise_runs(results: Sequence[RunResult], command: str = "") -> SeedsResult:
    """Return means, deviations and paired tests of runs that differ only in their seed.

    Args:
        results: Results of the runs; at least one.
        command: Command that repeats the runs.
    """
    first = results[0]
    differences, notes = _test_differences(results)
    config = {key: value for key, value in first.config.items() if key != "seed"}
    traffic = summarise(
        [{"up": result.bytes_up, "down": result.bytes_down} for result in results]
    )
    return SeedsResult(
        version=VERSION,
        title=first.title,
        method=first.method,
        holds=first.holds,
        seeds=[result.seed for result in results if result.seed is not None],
        command=command,
        sites=summarise([result.sites for result in results]),
        mean=summarise([result.mean for result in results]),
        micro=summarise([result.micro for result in results]),
        left_out=summarise([result.left_out for result in results]),
        left_out_mean=summarise([result.left_out_mean for result in results]),
        left_out_types=first.left_out_types,
        bytes_up=traffic.get("up", {}),
        bytes_down=traffic.get("down", {}),
        differences=differences,
        marks=first.marks,
        config=config,
        versions=list_versions(),
        notes=notes,
    )


def _test_differences(
    results: Sequence[RunResult],
) -> tuple[list[SeedDifference], list[str]]:
    """Return the paired tests over the seeds, and remarks about them."""
    if len(results) < FEWEST_TESTED:
        return [], [f"no paired test: it needs {FEWEST_TESTED} seeds or more"]
    try:
        differences = list(_list_differences(results))
    except MissingExtra as error:
        return [], [f"no paired test over the seeds: {error}"]
    notes = []
    if differences and len(results) < FEWEST_SEEDS:
        notes.append(
            f"{len(results)} seeds: no difference is claimed with fewer than "
            f"{FEWEST_SEEDS}"
        )
    return differences, notes


def _list_differences(results: Sequence[RunResult]) -> Iterator[SeedDifference]:
    """Yield the paired test of each site and of the means, against each baseline."""
    for baseline in BASELINES:
        for site in [*results[0].sites, ""]:
            of_runs = [_measure_gain(result, site, baseline) for result in results]
            gains = [gain for gain in of_runs if gain is not None]
            if len(gains) < FEWEST_TESTED:
                continue
            test = run_paired_t_test(gains)
            yield SeedDifference(
                site=site,
                against=baseline,
                mean=test.mean,
                low=test.low,
                high=test.high,
                p_value=test.p_value,
                n=test.n,
            )


def _measure_gain(result: RunResult, site: str, baseline: str) -> float | None:
    """Return federated minus a baseline in one run, as in `SeedDifference.mean`.

    Args:
        result: Result of the run.
        site: Name of the site; "" for the mean over the sites.
        baseline: The other condition.

    Returns:
        The difference of the main scores; None if one of them is missing.
    """
    if not site:
        verdict = result.verdict(against=baseline)
        return None if verdict is None else verdict.gain
    scores = result.sites.get(site, {})
    federated = find_main_score(scores.get("federated", {}))
    other = find_main_score(scores.get(baseline, {}))
    if federated is None or other is None:
        return None
    return federated.score - other.score


def read_seeds(folder: Path) -> SeedsResult:
    """Return the seeds.json of a folder of runs of several seeds.

    Raises:
        DataError: The file is missing, damaged, or of a later version.
    """
    path = folder / SEEDS_FILE
    if not path.is_file():
        raise DataError(
            f"{folder}: contains no {SEEDS_FILE}: check that the runs of all seeds "
            "have ended"
        )
    return read_versioned(path, SeedsResult)
