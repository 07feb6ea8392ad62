"""Hints about scores on patients: why they may be low, and what to try."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fednotes.apps.phenotyping.cohort import SitePatients
from fednotes.core.wording import list_names


def score_hints(
    scores: Mapping[str, Mapping[str, Any]],
    sites: Sequence[SitePatients],  # noqa: ARG001 - part of the interface of SiteKind
) -> Iterator[str]:
    """Yield a line for each model that misses diseases or lacks suitable test patients.

    Args:
        scores: The scores of each site by condition.
        sites: The sites.
    """
    for site, by_condition in scores.items():
        for condition, score in by_condition.items():
            by_disease = score.get("by_output", {}) if score else {}
            missed = _never_predicted(by_disease)
            if missed:
                yield (
                    f"{site}, {condition}: predicts {list_names(missed)} for no "
                    "patient: train longer, or give rare classes more weight"
                )
            alike = _without_both_classes(by_disease)
            if alike:
                yield (
                    f"{site}, {condition}: all test patients are present, or all "
                    f"absent, for {list_names(alike)}: these have no AUROC"
                )


def _never_predicted(by_disease: Mapping[str, Any]) -> list[str]:
    """Return the diseases of test patients that the model never predicts."""
    return [
        disease
        for disease, score in by_disease.items()
        if _support(score, "present") and not score["present"].get("predicted", 1)
    ]


def _without_both_classes(by_disease: Mapping[str, Any]) -> list[str]:
    """Return the diseases that all test patients have, or none."""
    return [
        disease
        for disease, score in by_disease.items()
        if not (_support(score, "present") and _support(score, "absent"))
    ]


def _support(score: Mapping[str, Any], label: str) -> int:
    """Return the number of test patients with a label."""
    number: int = score.get(label, {}).get("support", 0)
    return number
