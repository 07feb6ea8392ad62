"""Remarks about entity types of which a run finds no mention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fednotes.core.types import SiteData
from fednotes.core.wording import list_names


def find_missed_types(
    scores: Mapping[str, Mapping[str, Any]], sites: Sequence[SiteData]
) -> Iterator[str]:
    """Yield a remark for each site with types of which no mention is found.

    A site where no mention of any type is found gets a different remark.

    Args:
        scores: Site → condition → scores on the site's test data.
        sites: The sites' data, with annotations.
    """
    by_site = {site.id: _count_mentions(site) for site in sites}
    everywhere: Counter[str] = sum(by_site.values(), Counter())
    for name, by_condition in scores.items():
        condition = _find_condition(by_condition)
        if condition is None:
            continue
        by_type = by_condition[condition]["by_type"]
        tested = {label: score for label, score in by_type.items() if score["support"]}
        missed = {
            label: score
            for label, score in tested.items()
            if score["strict"]["f1"] <= 0
        }
        if missed:
            by_support = sorted(missed, key=lambda label: -missed[label]["support"])
            listed = list_names(
                [
                    _describe_type(label, missed[label], by_site[name], everywhere)
                    for label in by_support
                ]
            )
            remedies = _list_remedies(missed, by_site[name], everywhere, len(sites))
            yield (
                f"{name}, {condition}: {len(missed)} of {len(tested)} types score 0 "
                f"(training mentions here of those at all sites): {listed}: "
                f"{'; '.join(remedies)}"
            )


def _count_mentions(site: SiteData) -> Counter[str]:
    return Counter(span.label for document in site.train for span in document.spans)


def _find_condition(scores: Mapping[str, Any]) -> str | None:
    """Return the first condition in which any mention is found, or None."""
    for condition in ("federated", "alone", "pooled"):
        score = scores.get(condition)
        if score and score.get("by_type") and score["relaxed"]["f1"] > 0:
            return condition
    return None


def _describe_type(
    label: str, score: Mapping[str, Any], local: Counter[str], everywhere: Counter[str]
) -> str:
    never = "" if score["predicted"] else ", never predicted"
    return f"{label} ({local[label]} of {everywhere[label]}{never})"


def _list_remedies(
    missed: Mapping[str, Any],
    local: Counter[str],
    everywhere: Counter[str],
    sites: int,
) -> Iterator[str]:
    """Yield possible remedies.

    Args:
        missed: The missed types.
        local: Training mentions of this site by type.
        everywhere: Training mentions of all sites by type.
        sites: Number of sites.
    """
    if any(not everywhere[label] for label in missed):
        yield "name types without training mentions as the training data do (label_map)"
    if any(everywhere[label] for label in missed):
        yield "train longer or give more mentions"
    if sites > 1 and any(0 < local[label] == everywhere[label] for label in missed):
        yield (
            "a type that only this site mentions may have another name at other sites "
            "(label_map)"
        )
