"""Choose the setting of a row by validation data, never by test data."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from fednotes.apps.experiments.grid_runs import GridRun
from fednotes.apps.experiments.grids import Settings
from fednotes.core.errors import ConfigError
from fednotes.jobs.results import read_result


class Cell(NamedTuple):
    """The runs of one row and condition to show in a table.

    Attributes:
        runs: The runs of the chosen setting, one for each seed.
        tried: The settings that were tried, with their validation scores; empty for a
            row without a search.
    """

    runs: list[GridRun]
    tried: list[dict[str, Any]]


def choose_runs(runs: Sequence[GridRun]) -> Cell:
    """Return the runs of one row and condition with the chosen setting.

    Args:
        runs: All runs of the row and condition; those of the search have ended.

    Raises:
        ConfigError: A run of the search has no validation score.
    """
    searching = list_search_runs(runs)
    choice = runs[0].choice
    tried: list[dict[str, Any]] = []
    if searching:
        choice, tried = choose_setting(searching)
    chosen = [run for run in runs if run.choice == choice and not run.is_trial]
    return Cell(chosen, tried)


def list_search_runs(runs: Sequence[GridRun]) -> list[GridRun]:
    """Return the runs for choosing the setting of one row and condition.

    They are the trials or, if the job has validation data, the runs on the first seed.
    There are none for a row without a search.
    """
    trials = [run for run in runs if run.is_trial]
    if trials:
        return trials
    is_search = len({run.choice for run in runs}) > 1
    if not is_search:
        return []
    return [run for run in runs if run.seed == runs[0].seed]


def choose_setting(
    runs: Sequence[GridRun],
) -> tuple[Settings, list[dict[str, Any]]]:
    """Return the setting with the best validation score, and the scores of all.

    A setting's score is the mean over seeds of the mean over sites. The first setting
    wins a tie.

    Args:
        runs: Runs of one row and condition, each setting on the same seeds.

    Raises:
        ConfigError: A run has no validation score.
    """
    scores: dict[Settings, list[float]] = {}
    for run in runs:
        score = read_result(run.folder).valid.get(run.condition, {}).get("mean")
        if score is None:
            raise ConfigError(
                f"row {run.row.label!r} is chosen by validation score, but "
                f"{run.folder} has none: give the job's sites `valid` files or a "
                "`valid_fraction`"
            )
        scores.setdefault(run.choice, []).append(float(score))

    means = {choice: fmean(of_choice) for choice, of_choice in scores.items()}
    best = max(means, key=lambda choice: means[choice])
    is_held_out = any(run.is_trial for run in runs)
    tried = [
        {"set": list(choice), "validation": mean, "held_out": is_held_out}
        for choice, mean in means.items()
    ]
    return best, tried
