"""Summaries of scores over several runs, or over the sites of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np

from fednotes.core.errors import DataError
from fednotes.metrics.classification import ClassCounts
from fednotes.metrics.spans import score_all_mentions

# The measures of each kind of score that are averaged over sites.
_MEASURES = {
    "strict": ("precision", "recall", "f1"),
    "relaxed": ("precision", "recall", "f1"),
    "relaxed_one_to_one": ("precision", "recall", "f1"),
    "masked": ("loss", "perplexity", "accuracy"),
    "next_sentence": ("accuracy",),
    "phenotypes": ("precision", "recall", "f1"),
    "present": ("precision", "recall", "f1"),
    "ranking": ("auroc", "auprc"),
    "calibration": ("brier",),
    "codes": ("loss", "auroc"),
}
# The path of each measure in the scores of a disease.
_DISEASE_MEASURES = {
    **{key: ("macro", key) for key in ("precision", "recall", "f1")},
    **{key: (key, "value") for key in ("auroc", "auprc")},
}


# ---- several runs --------------------------------------------------------------------


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return mean and standard deviation of every number of nested scores.

    Each number becomes {"mean": m, "std": s, "n": number of runs that have it}. The
    standard deviation is that of a sample (ddof = 1), and None for a single run. Values
    that are not numbers (names, None, booleans) are left out.

    Raises:
        DataError: A key is a number in one run and a dictionary in another.
    """
    summary: dict[str, Any] = {}
    for key in dict.fromkeys(key for run in runs for key in run):
        values = [run[key] for run in runs if key in run]
        nested = [value for value in values if isinstance(value, Mapping)]
        numbers = [float(value) for value in values if _is_number(value)]
        if nested and numbers:
            raise DataError(
                f"score {key!r} is a number in one run and a dictionary in another"
            )
        if nested:
            summary[key] = summarise(nested)
        elif numbers:
            std = stdev(numbers) if len(numbers) > 1 else None
            summary[key] = {"mean": fmean(numbers), "std": std, "n": len(numbers)}
    return summary


def _is_number(value: object) -> bool:
    """Return whether a value is a number; booleans are not."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


# ---- the sites of a run --------------------------------------------------------------


def average_scores(scores: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the plain mean of each measure over the sites that have it.

    Sites have measures if they have held-out data. A measure that no site has is None.
    "by_output" has the means of each disease, if any site is scored on diseases.
    """
    means: dict[str, dict[str, Any]] = {}
    for kind, measures in _MEASURES.items():
        judged = [each for each in scores if kind in each]
        if judged:
            means[kind] = {
                measure: _average(judged, kind, measure) for measure in measures
            }
    tables = [each["by_output"] for each in scores if "by_output" in each]
    diseases = dict.fromkeys(name for table in tables for name in table)
    if diseases:
        means["by_output"] = {
            name: _average_disease([table[name] for table in tables if name in table])
            for name in diseases
        }
    return means


def _average_disease(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the means over sites of one disease's measures.

    An interval is included only if it is the same at all sites.

    Args:
        scores: The disease's scores at each site.
    """
    means: dict[str, Any] = {
        measure: _average(scores, kind, key)
        for measure, (kind, key) in _DISEASE_MEASURES.items()
    }
    for measure in ("auroc", "auprc"):
        intervals = set()
        for site in scores:
            area = site.get(measure) or {}
            intervals.add((area.get("low"), area.get("high")))
        if len(intervals) == 1:
            interval = intervals.pop()
            if None not in interval:
                means[f"{measure}_interval"] = list(interval)
    means["sites"] = len(scores)
    return means


def _average(scores: Sequence[Mapping[str, Any]], kind: str, key: str) -> float | None:
    """Return the mean over the sites that have this number; None if none has it."""
    values = [(each.get(kind) or {}).get(key) for each in scores]
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def score_all_test_data(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the scores of all sites' test data taken together, from their counts.

    For diseases, sites that are scored only on codes are left out, and a patient who is
    scored at several sites counts at each of them.

    Returns:
        The scores; {} if a site has no counts.
    """
    if all("counts" in each for each in scores):
        return dict(score_all_mentions(scores))
    judged = [each for each in scores if each.get("by_output")]
    if not judged or not all("class_counts" in each for each in judged):
        return {}
    total = ClassCounts()
    for each in judged:
        total += ClassCounts.from_metrics(each["class_counts"])
    micro_scores = total.scores()
    return {
        "phenotypes": micro_scores["macro"],
        "present": micro_scores["present"]["macro"],
        "by_output": micro_scores["by_output"],
    }
