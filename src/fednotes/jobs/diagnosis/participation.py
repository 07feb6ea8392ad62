"""Sites that are absent from rounds, or whose training is unlike that of the others."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from fednotes.core.parsing import as_mapping, find_number
from fednotes.core.wording import list_names
from fednotes.jobs.causes import (
    ENOUGH_ROUNDS,
    Cause,
    Evidence,
    Setting,
    limit_importance,
)
from fednotes.jobs.diagnosis.evidence import RunEvidence
from fednotes.jobs.job import Job
from fednotes.jobs.settings_to_try import list_personal_settings
from fednotes.training.server_steps import Aggregation, needs_each_update
from fednotes.training.site_sampling import count_drawn_sites

# A site that misses one evaluated round in ten misses more than a restart or two.
ABSENT_SHARE = 0.1
# Losses of sites with other kinds of notes are within a factor of two or so of each
# other; wrong labels, or an attack, keep a site's loss far above.
ODD_LOSS = 3.0
ODD_SCORE = 0.5
# A mini-batch's loss is noisy; the mean of three evaluations is steadier.
LAST_EVALUATIONS = 3
# A median of the others needs two of them.
FEWEST_SITES = 3


def find_participation_causes(run: RunEvidence) -> Iterator[Cause]:
    """Yield the sites that are absent, and those unlike the others."""
    yield from _find_absent_sites(run)
    yield from _find_odd_sites(run)


def _find_absent_sites(run: RunEvidence) -> Iterator[Cause]:
    """Yield a cause if sites are missing from rounds of a run between real sites."""
    evaluated = [
        entry for entry in run.entries if find_number(entry, "took_part") is not None
    ]
    if not evaluated:
        return
    num_sites = count_drawn_sites(run.job.config) or len(run.job.sites)
    counts = [int(entry["took_part"]) for entry in evaluated]
    incomplete = sum(count < num_sites for count in counts)
    rounds = int(find_number(evaluated[-1], "round") or 0) + 1
    absences = _count_absences(evaluated)
    most_missed = max(absences.values(), default=0)
    share = max(incomplete / len(evaluated), most_missed / rounds)
    if share < ABSENT_SHARE:
        return
    evidence = [
        Evidence(
            f"{incomplete:,} of {len(evaluated):,} evaluated rounds had fewer than "
            f"{num_sites} sites; the fewest were {min(counts)}",
            "metrics.jsonl",
            {"short": incomplete, "rounds": len(evaluated), "fewest": min(counts)},
        )
    ]
    evidence += [
        Evidence(
            f"{site}: absent in {missed:,} of {rounds:,} rounds",
            "metrics.jsonl",
            {"absent": missed},
        )
        for site, missed in absences.most_common()
    ]
    yield Cause(
        "sites_absent",
        limit_importance(
            "high" if share >= 2 * ABSENT_SHARE else "medium",
            max(incomplete, most_missed),
            ENOUGH_ROUNDS,
        ),
        list_names(list(absences)) or "some sites",
        "sites drop out or answer late, so rounds go on without their notes",
        "look at `fednotes server status` and the site's log, and wait longer",
        evidence=tuple(evidence),
        settings=tuple(_list_longer_waits(run.job)),
    )


def _count_absences(evaluated: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Return the number of rounds that each site missed.

    Args:
        evaluated: The entries of metrics.jsonl; each counts the rounds that sites
            missed since the entry before.
    """
    absences: Counter[str] = Counter()
    for entry in evaluated:
        for site in as_mapping(entry.get("absent")):
            absences[str(site)] += int(find_number(entry, "absent", str(site)) or 0)
    return absences


def _list_longer_waits(job: Job) -> Iterator[Setting]:
    """Yield the settings with which the server waits longer for its sites."""
    timeout = job.federation.timeout
    yield Setting.of("federation", "timeout", value=2 * timeout, current=timeout)
    grace = job.federation.grace
    if grace:
        yield Setting.of("federation", "grace", value=0.0, current=grace)


def _find_odd_sites(run: RunEvidence) -> Iterator[Cause]:
    """Yield a cause for sites whose training loss stays far above the others'."""
    evaluations = [
        as_mapping(entry.get("sites"))
        for entry in run.entries
        if entry.get("condition") == "federated"
    ][-LAST_EVALUATIONS:]
    losses = _average_by_site(evaluations, "loss")
    scores = _average_by_site(evaluations, "f1")
    if len(losses) < FEWEST_SITES:
        return
    odd = _list_odd(losses, scores)
    if not odd:
        return
    yield Cause(
        "sites_odd",
        limit_importance("medium", len(evaluations), ENOUGH_ROUNDS),
        list_names(odd),
        f"its training loss is {ODD_LOSS:g} times that of the other sites or more, and "
        "its score is below half of theirs, so its labels or its notes are of another "
        "kind",
        "look at its annotation (`fednotes check`), or let it keep more of the model; "
        "if you do not trust it, use a robust aggregation",
        evidence=(
            Evidence(
                "training loss and validation F1 of the last evaluations: "
                + list_names(
                    [
                        f"{site} {loss:.3g} and {100 * scores.get(site, 0):.1f}"
                        for site, loss in losses.items()
                    ]
                ),
                "metrics.jsonl",
                {"loss": losses, "f1": scores},
            ),
        ),
        settings=(*list_personal_settings(run.job), *_list_robust(run.job)),
    )


def _list_odd(losses: Mapping[str, float], scores: Mapping[str, float]) -> list[str]:
    """Return the sites whose loss is far above, and score far below, the others'.

    Long sentences make a loss high, but not a score low.
    """
    score_by_site = {site: scores.get(site, 0.0) for site in losses}
    sorted_losses = sorted(losses.values())
    sorted_scores = sorted(score_by_site.values())
    odd = []
    for site, loss in losses.items():
        score = score_by_site[site]
        usual_loss = _find_median_of_others(sorted_losses, loss)
        usual_score = _find_median_of_others(sorted_scores, score)
        has_high_loss = loss >= ODD_LOSS * usual_loss > 0
        if has_high_loss and score < ODD_SCORE * usual_score:
            odd.append(site)
    return odd


def _find_median_of_others(values: Sequence[float], value: float) -> float:
    """Return the median of all values but one.

    Args:
        values: At least two values in ascending order. They are not sorted again for
            each site, because a damaged file may name very many sites.
        value: The value to leave out.
    """
    left_out = bisect_left(values, value)
    num_others = len(values) - 1
    low = (num_others - 1) // 2
    high = num_others // 2
    # The values after the one that is left out move up by one place.
    return median(values[place + (place >= left_out)] for place in (low, high))


def _list_robust(job: Job) -> Iterator[Setting]:
    """Yield the setting of a robust aggregation, if the job can have one."""
    if not isinstance(job.config, Aggregation):
        return
    if job.federation.secure_sum or job.privacy is not None:
        return  # these hide the updates that a median compares
    if not needs_each_update(job.config):
        yield Setting.of(
            "training", "aggregation", value="median", current=job.config.aggregation
        )


def _average_by_site(
    evaluations: Sequence[Mapping[str, Any]], measure: str
) -> dict[str, float]:
    """Return each site's mean of a measure over evaluations that have it."""
    values: dict[str, list[float]] = {}
    for by_site in evaluations:
        for site, of_site in by_site.items():
            value = find_number(of_site, measure)
            if value is not None:
                values.setdefault(str(site), []).append(value)
    return {site: fmean(of_site) for site, of_site in values.items()}
