"""Sites' scores → those of a run: plain means over sites, and all test data taken together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from fednotes.metrics.classification import ClassCounts
from fednotes.metrics.spans import micro_scores

MEASURES = {
    "strict": ("precision", "recall", "f1"),
    "relaxed": ("precision", "recall", "f1"),
    "masked": ("loss", "perplexity", "accuracy"),
    "next_sentence": ("accuracy",),
    "phenotypes": ("precision", "recall", "f1"),
    "present": ("precision", "recall", "f1"),
    "ranking": ("auroc", "auprc"),
    "calibration": ("brier",),
    "codes": ("loss", "auroc"),
}
_OF_A_DISEASE = {
    **{key: ("macro", key) for key in ("precision", "recall", "f1")},
    **{key: (key, "value") for key in ("auroc", "auprc")},
}


def mean_scores(scores: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The plain mean of each measure, over the sites that have it (those with held-out data).

    A number that exists at no site is None. "by_output": disease → its own scores likewise, if
    any site judges diseases.
    """
    means: dict[str, dict[str, Any]] = {
        kind: {key: _mean(judged, kind, key) for key in keys}
        for kind, keys in MEASURES.items()
        if (judged := [score for score in scores if kind in score])
    }
    tables = [score["by_output"] for score in scores if "by_output" in score]
    if diseases := dict.fromkeys(name for table in tables for name in table):
        means["by_output"] = {
            name: _disease([table[name] for table in tables if name in table]) for name in diseases
        }
    return means


def _disease(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One disease's means over sites; its intervals where all sites have the same one."""
    means: dict[str, Any] = {key: _mean(found, *path) for key, path in _OF_A_DISEASE.items()}
    for key in ("auroc", "auprc"):
        bounds = {tuple((at.get(key) or {}).get(end) for end in ("low", "high")) for at in found}
        if len(bounds) == 1 and None not in (only := bounds.pop()):
            means[f"{key}_interval"] = list(only)
    return means | {"sites": len(found)}


def _mean(scores: Sequence[Mapping[str, Any]], kind: str, key: str) -> float | None:
    """The mean over the sites where this number exists."""
    values = [v for s in scores if (v := (s.get(kind) or {}).get(key)) is not None]
    return fmean(values) if values else None


def summed_scores(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Scores of all sites' test data together, from their counts; empty where one has none.

    Of diseases: sites that are judged on codes alone are left out, and a patient whom several
    sites judge counts at each.
    """
    if all("counts" in score for score in scores):
        return dict(micro_scores(scores))
    judged = [score for score in scores if score.get("by_output")]
    if not judged or not all("class_counts" in score for score in judged):
        return {}
    each = (ClassCounts.from_metrics(score["class_counts"]) for score in judged)
    found = sum(each, ClassCounts()).scores()
    return {
        "phenotypes": found["macro"],
        "present": found["present"]["macro"],
        "by_output": found["by_output"],
    }
