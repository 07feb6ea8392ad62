"""Causes that the scores of a run show, whatever its sites hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fednotes.core.parsing import find_number
from fednotes.core.types import SiteData
from fednotes.core.wording import format_count
from fednotes.jobs.causes import ENOUGH, Cause, Evidence, Importance, Setting
from fednotes.jobs.job import Job
from fednotes.jobs.parts import Part
from fednotes.jobs.results import Scores
from fednotes.jobs.settings_to_try import (
    advise_longer_training,
    list_longer_training,
)
from fednotes.jobs.unshared_types import (
    are_missing_by_chance,
    describe_pooled,
    find_common_types,
    find_unshared_types,
)

# Mean scores of one seed differ by this much by chance.
CLEARLY_BELOW = 0.02


def find_low_pooled_scores(
    job: Job,
    mean: Mapping[str, Any],
    conditions: Mapping[str, Mapping[str, float]],
    parts: Sequence[Part],
    num_sites: int,
) -> Iterator[Cause]:
    """Yield a cause if the pooled model scores below the sites' own models.

    Args:
        job: The job.
        mean: Mean scores of each condition, as in the result.
        conditions: Rounds and costs of each condition, as in the result.
        parts: Parts of the run.
        num_sites: Number of sites.
    """
    alone_f1 = _read_mean_f1(mean, "alone")
    pooled_f1 = _read_mean_f1(mean, "pooled")
    if alone_f1 is None or pooled_f1 is None or pooled_f1 >= alone_f1:
        return

    pooled_rounds = conditions["pooled"]["rounds"]
    alone_rounds = conditions["alone"]["rounds"] / num_sites  # of one site on average
    reasons = list(_explain_sharing(parts, num_sites))
    if pooled_rounds < alone_rounds:
        reasons.append(f"pooled took fewer rounds: {advise_longer_training(job)}")
    reasons.append("a single seed cannot tell a small difference from chance")
    importance: Importance = "medium"
    if alone_f1 - pooled_f1 < CLEARLY_BELOW:
        importance = "low"
    yield Cause(
        "pooled_below_alone",
        importance,
        "",
        f"pooled is below alone (mean F1 {100 * pooled_f1:.1f} against "
        f"{100 * alone_f1:.1f}, {pooled_rounds:,.0f} rounds against "
        f"{alone_rounds:,.0f} at a site)",
        "; ".join(reasons),
        evidence=(
            Evidence(
                f"mean F1: pooled {100 * pooled_f1:.1f}, alone {100 * alone_f1:.1f}",
                "summary.json",
                {"pooled_f1": pooled_f1, "alone_f1": alone_f1},
            ),
        ),
        settings=(*_list_common_types(job, parts), *list_longer_training(job)),
    )


def _list_pooled_sites(parts: Sequence[Part]) -> list[SiteData]:
    """Return the sites of the pooled part that have tag sets."""
    return [
        site
        for part in parts
        if part.condition == "pooled"
        for site in part.sites
        if isinstance(site, SiteData)
    ]


def _find_unshared_types(parts: Sequence[Part]) -> list[str]:
    """Return the types that a site of the pooled part lacks."""
    return find_unshared_types([site.tags.types for site in _list_pooled_sites(parts)])


def _list_common_types(job: Job, parts: Sequence[Part]) -> Iterator[Setting]:
    """Yield the types that all sites have, if only rare types are left out."""
    sites = _list_pooled_sites(parts)
    unshared = _find_unshared_types(parts)
    mentions = {
        site.id: Counter(
            span.label for document in site.train for span in document.spans
        )
        for site in sites
    }
    notes = {site.id: len(site.train) for site in sites}
    is_fixed = job.tags is not None or job.synthetic is not None
    if unshared and not is_fixed and are_missing_by_chance(unshared, mentions, notes):
        common = find_common_types(mentions)
        if common:
            yield Setting.of("tags", "types", value=common)


def _explain_sharing(parts: Sequence[Part], num_sites: int) -> Iterator[str]:
    """Yield how the pooled model differs from the sites' own models.

    Args:
        parts: Parts of the run.
        num_sites: Number of sites.
    """
    has_output_layers = any(
        part.condition == "pooled" and len(part.sites) > 1 for part in parts
    )
    if has_output_layers:
        yield describe_pooled(_find_unshared_types(parts))
    elif num_sites > 1:
        yield "one model serves all sites, whose notes may differ in kind"
    epochs = {part.condition: part.personal_epochs for part in parts}
    personal_epochs = epochs.get("alone", 0) - epochs.get("pooled", 0)
    if personal_epochs > 0:
        yield f"alone ends with {personal_epochs} personal epochs, pooled has none"


def _read_mean_f1(mean: Mapping[str, Any], condition: str) -> float | None:
    """Return a condition's mean F1 of mentions, or of phenotypes."""
    for kind in ("strict", "phenotypes"):
        if kind in mean.get("alone", {}):
            return find_number(mean, condition, kind, "f1")
    return None


def find_empty_scores(
    job: Job, scores: Mapping[str, Mapping[str, Scores]]
) -> Iterator[Cause]:
    """Yield a cause for each site without test data, mentions or correct predictions.

    Args:
        job: The job.
        scores: Site → condition → scores on the site's test data.
    """
    for site, by_condition in scores.items():
        for condition, score in by_condition.items():
            if not score:
                yield _describe_no_test_data(site)
                break
            # Scores on patients have no mentions.
            if "by_type" not in score:
                continue
            support = sum(of_type["support"] for of_type in score["by_type"].values())
            if support == 0:
                yield _describe_no_test_mentions(site)
                break
            if score["relaxed"]["f1"] == 0:
                yield _describe_nothing_found(job, f"{site}, {condition}", support)


def _describe_no_test_data(site: str) -> Cause:
    """Return the cause that a site has no test data."""
    return Cause(
        "no_test_data",
        "medium",
        site,
        "no data are held out there, so it has no score and does not count in the "
        "means",
        evidence=(Evidence("no scores for this site", "summary.json"),),
    )


def _describe_no_test_mentions(site: str) -> Cause:
    """Return the cause that no entity type is mentioned in a site's test data."""
    return Cause(
        "no_test_mentions",
        "medium",
        site,
        "no mentions in its test data, so its scores say nothing",
        evidence=(Evidence("0 test mentions of each type", "summary.json"),),
    )


def _describe_nothing_found(job: Job, where: str, support: int) -> Cause:
    """Return the cause that a model finds none of the test mentions.

    Args:
        job: The job.
        where: The site and the condition.
        support: Number of test mentions.
    """
    return Cause(
        "nothing_found",
        "high" if support >= ENOUGH else "medium",
        where,
        "found no mentions",
        f"{advise_longer_training(job)} or raise training.learning_rate",
        evidence=(
            Evidence(
                f"predictions overlap 0 of {format_count(support, 'test mention')}",
                "summary.json",
                {"test_mentions": support},
            ),
        ),
        settings=list_longer_training(job),
    )
