"""Run one job with several seeds, and summarise the runs.

OUT/seed-1 …           one run a seed (`simulate.py`)
OUT/seeds.json         means and deviations over the seeds, and paired tests
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat

from fednotes.core.errors import ConfigError, DataError, MissingExtra, ParameterError
from fednotes.core.stopping import resumable
from fednotes.core.store import LOCK, hold_folder, write_json
from fednotes.jobs.job import Job
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.progress import AnyListener, to_listener
from fednotes.jobs.results import (
    BASELINES,
    SUMMARY,
    VERSION,
    Number,
    RunResult,
    Share,
    read_result,
    read_table,
)
from fednotes.jobs.run_folder import list_versions, require_same_job
from fednotes.jobs.simulate import simulate
from fednotes.metrics.gap import main_score
from fednotes.metrics.paired_tests import FEWEST_SEEDS, paired_t
from fednotes.metrics.summaries import summarise

SEEDS_FILE = "seeds.json"
FEWEST_TESTED = 3  # seeds; with fewer there is no paired test
MOST_SEEDS = 1000
_FOLDER = "seed-"


class SeedDifference(BaseModel):
    """federated − another condition over the seeds, by Student's paired t test.

    site: "" for the mean over the sites. mean, low, high: fractions of F1 (nats of
    held-out loss for pre-training), with the 95 % interval. n: seeds that have both
    scores.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    site: str = ""
    against: str
    mean: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat
    p_value: Share
    n: int


class SeedsResult(BaseModel):
    """seeds.json: what several runs of one job, each with its own seed, have in common.

    sites: site → condition → kind of score → measure → {"mean", "std", "n"}, fractions; std is the
    sample's deviation, None for one seed. mean: condition → the same of the means over sites.
    differences: the paired tests; empty for fewer than three seeds.
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
    differences: list[SeedDifference] = []
    marks: dict[str, str] = {}
    config: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    notes: list[str] = []

    def table(self) -> list[dict[str, Number | str]]:
        """Return a row for each site and condition, then for "mean": means and
        deviations, as fractions, by names such as "strict_f1_mean" and "strict_f1_std".
        """
        return [
            {"site": site, "condition": condition, **_flat(scores)}
            for site, conditions in [*self.sites.items(), ("mean", self.mean)]
            for condition, scores in conditions.items()
        ]

    def write(self, folder: Path) -> None:
        """Write seeds.json."""
        write_json(folder / SEEDS_FILE, self.model_dump(exclude_defaults=True))


def _flat(scores: dict[str, Any], above: str = "") -> dict[str, Number | str]:
    """Return the statistics of nested scores by one name each, types left out."""
    found: dict[str, Number | str] = {}
    for key, value in scores.items():
        name = f"{above}_{key}" if above else key
        if not isinstance(value, dict) or key in ("by_type", "by_output", "counts"):
            continue
        if value.keys() == {"mean", "std", "n"}:
            found |= {
                f"{name}_{statistic}": value[statistic] for statistic in ("mean", "std")
            }
        else:
            found |= _flat(value, name)
    return found


def parse_seeds(text: str) -> tuple[int, ...]:
    """Return the seeds that a person named, such as "1-5" or "1,2,7".

    Raises:
        ConfigError: The text is neither numbers nor ranges, or names a seed twice.
    """
    seeds: list[int] = []
    for piece in text.split(","):
        first, dash, last = piece.strip().partition("-")
        if not first.isdecimal() or not (last or first if dash else first).isdecimal():
            raise ConfigError(
                f"seeds {text!r}: expected numbers or ranges, such as 1-5 or 1,2,7"
            )
        if dash and not last:
            raise ConfigError(f"seeds {text!r}: the range {piece.strip()!r} has no end")
        end = int(last) if dash else int(first)
        if end - int(first) >= MOST_SEEDS:
            raise ConfigError(
                f"seeds {text!r}: at most {MOST_SEEDS:,} seeds are possible"
            )
        if end < int(first):
            raise ConfigError(f"seeds {text!r}: the range {piece.strip()!r} is empty")
        seeds += range(int(first), end + 1)
    return checked_seeds(seeds)


def checked_seeds(seeds: Sequence[int]) -> tuple[int, ...]:
    """Return seeds that a job can be run with, in their order.

    Raises:
        ConfigError: There is none, one is no whole number from 0 on, or one occurs
            twice.
    """
    if not seeds:
        raise ConfigError("seeds: name at least one, such as 1-5")
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise ConfigError(f"seeds: {seed!r} is no whole number from 0 on")
    if len(set(seeds)) < len(seeds):
        raise ConfigError("seeds: one occurs twice; name each once")
    if len(seeds) > MOST_SEEDS:
        raise ConfigError(f"seeds: at most {MOST_SEEDS:,} are possible")
    return tuple(seeds)


def with_seed(job: Job, seed: int) -> Job:
    """Return the same job with another seed."""
    return parse_job({**job.table, "seed": seed}, job.name, job.folder, job.name)


def simulate_seeds(
    job: Job,
    out: Path,
    seeds: Sequence[int],
    *,
    resume: bool = False,
    overwrite: bool = False,
    device: str = "cpu",
    listener: AnyListener = None,
    command: str = "",
    after_run: Callable[[Path], None] = lambda folder: None,
) -> SeedsResult:
    """Run a job once for each seed, and write what the runs have in common.

    Args:
        job: The job; its own seed is not used.
        out: The folder of all runs; new, or with `resume` the one of an earlier call.
            Seeds that were run to their end there are not run again; a call may name
            further seeds.
        seeds: The seeds.
        resume: Resume interrupted runs in `out`.
        overwrite: Move earlier runs in `out` to `OUT.previous`.
        device: As for `simulate`.
        listener: As for `simulate`.
        command: How a person repeats this call, for the report.
        after_run: Called with the folder of each run once it has ended.

    Returns:
        The summary, as seeds.json holds it.

    Raises:
        ConfigError: `out` holds other runs, or one with this seed of another job.
        BusyError: Another process runs there.
    """
    seeds, shown = checked_seeds(seeds), to_listener(listener)
    # all are checked before the first run
    jobs = {seed: with_seed(job, seed) for seed in seeds}
    _require_place(out)
    with ExitStack() as mine:
        mine.enter_context(hold_folder(out))
        earlier = _is_begun(out)
        if earlier and not (resume or overwrite):
            raise ParameterError(
                f"{out} holds runs of several seeds already: give another `out`, "
                "`resume` to resume them, or `overwrite` to replace them"
            )
        if earlier and overwrite and not resume:
            _set_aside(out)
            # a new folder: the lock of the other one moved with it
            mine.enter_context(hold_folder(out))
        results = []
        with resumable(f"{command} --resume"):
            for place, (seed, own) in enumerate(jobs.items(), 1):
                folder = out / f"{_FOLDER}{seed}"
                result = _finished(own, folder) if resume else None
                if result is None:
                    shown.seed(seed, place, len(seeds))
                    result = simulate(
                        own,
                        folder,
                        resume=resume,
                        device=device,
                        listener=shown,
                        command=command,
                    )
                after_run(folder)
                results.append(result)
            summary = summarised(results, command)
            summary.write(out)
    return summary


def _finished(job: Job, folder: Path) -> RunResult | None:
    """Return the result of a seed that was run to its end; None where it was not.

    Raises:
        ConfigError: The folder holds a run of another job.
    """
    if not (folder / SUMMARY).is_file():
        return None
    require_same_job(folder, job)
    return read_result(folder)


def _require_place(out: Path) -> None:
    """Raise ConfigError unless a folder holds runs of seeds, or is new or empty."""
    if not out.exists():
        return
    if not out.is_dir() or not (
        _is_begun(out) or all(path.name == LOCK for path in out.iterdir())
    ):
        raise ParameterError(
            f"{out} holds something else than runs of several seeds: give another `out`"
        )


def _is_begun(out: Path) -> bool:
    """Return whether a folder holds runs of seeds."""
    return (out / SEEDS_FILE).is_file() or any(
        path.name.removeprefix(_FOLDER).isdecimal() for path in out.glob(f"{_FOLDER}*")
    )


def _set_aside(out: Path) -> None:
    """Move earlier runs of seeds to OUT.previous.

    Raises:
        ConfigError: OUT.previous is something else.
    """
    previous = out.with_name(out.name + ".previous")
    if previous.exists():
        if not _is_begun(previous):
            raise ParameterError(
                f"{previous} is in the way: move it, or give another `out`"
            )
        shutil.rmtree(previous)
    out.rename(previous)


# ---- what the runs have in common ----------------------------------------------------


def summarised(results: Sequence[RunResult], command: str = "") -> SeedsResult:
    """Return means, deviations and paired tests of runs that differ in their seed
    alone."""
    first = results[0]
    differences, notes = _differences(results)
    config = {key: value for key, value in first.config.items() if key != "seed"}
    return SeedsResult(
        version=VERSION,
        title=first.title,
        method=first.method,
        holds=first.holds,
        seeds=[result.seed for result in results if result.seed is not None],
        command=command,
        sites=summarise([result.sites for result in results]),
        mean=summarise([result.mean for result in results]),
        differences=differences,
        marks=first.marks,
        config=config,
        versions=list_versions(),
        notes=notes,
    )


def _differences(
    results: Sequence[RunResult],
) -> tuple[list[SeedDifference], list[str]]:
    """Return the paired tests over the seeds, and what a reader should know of them."""
    if len(results) < FEWEST_TESTED:
        return [], [
            f"a paired test needs {FEWEST_TESTED} seeds or more: none is made of fewer"
        ]
    try:
        found = list(_tests(results))
    except MissingExtra as error:
        return [], [f"no paired test over the seeds: {error}"]
    few = (
        f"{len(results)} seeds: no difference is claimed with fewer than {FEWEST_SEEDS}"
    )
    return found, [few] if found and len(results) < FEWEST_SEEDS else []


def _tests(results: Sequence[RunResult]) -> Iterator[SeedDifference]:
    """Yield the paired test of each site and of the means, against each baseline."""
    for against in BASELINES:
        for site in [*results[0].sites, ""]:
            gains = [
                gain
                for result in results
                if (gain := _gain(result, site, against)) is not None
            ]
            if len(gains) < FEWEST_TESTED:
                continue
            test = paired_t(gains)
            yield SeedDifference(
                site=site,
                against=against,
                mean=test.mean,
                low=test.low,
                high=test.high,
                p_value=test.p_value,
                n=test.n,
            )


def _gain(result: RunResult, site: str, against: str) -> float | None:
    """Return federated − another condition in one run, at a site or of the means ("")."""
    if not site:
        verdict = result.verdict(against=against)
        return None if verdict is None else verdict.gain
    scores = result.sites.get(site, {})
    pair = [
        main_score(scores.get(condition, {})) for condition in ("federated", against)
    ]
    federated, other = pair
    return None if federated is None or other is None else federated[0] - other[0]


def read_seeds(folder: Path) -> SeedsResult:
    """Return the summary in a folder of runs of several seeds.

    Raises:
        DataError: There is none, or it is damaged or of a later version.
    """
    path = folder / SEEDS_FILE
    if not path.is_file():
        raise DataError(
            f"{folder}: no {SEEDS_FILE} there: were all seeds run to their end?"
        )
    return read_table(path, SeedsResult)
