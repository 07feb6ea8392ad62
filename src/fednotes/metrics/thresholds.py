"""The choice of a threshold by the strict F1 over all sites' validation data.

    gold         Σ over the sites, the annotated mentions
    predicted_θ  Σ over the sites, the mentions predicted at the threshold θ
    tp_θ         Σ over the sites, those of them that are annotated

    F1_θ = 2 tp_θ / (gold + predicted_θ)

The chosen threshold is the highest one with the best F1. Sites send only the counts, so
that their sum suffices.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fednotes.core.types import Document
from fednotes.metrics.spans import SpanCounts

# The thresholds to choose from.
THRESHOLDS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005)
_HEAD = "threshold"  # of the names of the counts


def count_at_thresholds(
    documents: Sequence[Document],
    predicted: Mapping[float, Sequence[Document]],
    types: Collection[str],
) -> dict[str, float]:
    """Return the counts of validation mentions at each threshold.

    Args:
        documents: The documents with gold mentions.
        predicted: The same documents with predictions, by threshold.
        types: The types that the site annotates.
    """
    metrics: dict[str, float] = {}
    for threshold, predictions in predicted.items():
        total = SpanCounts.of(documents, predictions, types=types).total
        metrics[f"{_HEAD}/gold"] = float(total.gold)
        metrics[f"{_HEAD}/{threshold:g}/predicted"] = float(total.predicted)
        metrics[f"{_HEAD}/{threshold:g}/tp"] = float(total.strict)
    return metrics


def score_thresholds(metrics: Mapping[str, float]) -> dict[float, float]:
    """Return the strict F1 at each threshold; empty without counts or gold mentions."""
    gold = metrics.get(f"{_HEAD}/gold", 0.0)
    if gold <= 0:
        return {}
    scores: dict[float, float] = {}
    for threshold in THRESHOLDS:
        predicted = max(0.0, metrics.get(f"{_HEAD}/{threshold:g}/predicted", 0.0))
        true_positives = metrics.get(f"{_HEAD}/{threshold:g}/tp", 0.0)
        f1 = 2 * true_positives / (gold + predicted)  # [scorer threshold]
        # Rounded counts may give more than 1.
        scores[threshold] = min(1.0, max(0.0, f1))
    return scores


def choose_threshold(f1_by_threshold: Mapping[float, float]) -> float:
    """Return the highest of the thresholds with the best F1."""
    best = max(f1_by_threshold.values())
    return max(each for each, f1 in f1_by_threshold.items() if f1 == best)
