"""What the counts of an evaluation tell: of the site's types, and of two sums that differ by it."""

from __future__ import annotations

from dataclasses import replace

from fednotes.audit import Attack, Scene, Seen, Trial
from fednotes.core.federation import EVALUATE
from fednotes.core.update import Total
from fednotes.metrics.spans import SpanCounts


def _of_all(trial: Trial) -> Trial:
    """Of all that there is, and not of a sample of it: without an interval."""
    return replace(trial, low=trial.success, high=trial.success)


def _judged(scene: Scene) -> list[Seen]:
    """Evaluations that count anything of the site."""
    return [s for s in scene.seen if s.task == EVALUATE and any(s.own.metrics.values())]


def _types(scene: Scene) -> tuple[list[int], list[int]]:
    """Annotated mentions, as the server is told: of types that the site has, and of the others."""
    judged = [s for s in _judged(scene) if SpanCounts.from_metrics(s.metrics).by_type]
    if not judged:
        return [], []
    both = judged[0].own.metrics, judged[0].metrics
    own, told = (SpanCounts.from_metrics(metrics).by_type for metrics in both)
    asked = dict.fromkeys((*scene.part.config.tags.types, *told))
    gold = [(told[n].gold if n in told else 0, bool(n in own and own[n].gold)) for n in asked]
    return [number for number, there in gold if there], [n for n, there in gold if not there]


def _untold(scene: Scene) -> str:
    inside, outside = _types(scene)
    if inside and outside:
        return ""
    return "no evaluation tells types, or all of the job's occur at the site"


def _not_apart(scene: Scene) -> str:
    """Why no two sums differ by one site."""
    least, sites = scene.job.federation.min_sites, len(scene.part.sites)
    if not scene.job.federation.secure_sum:
        return "no sum is secure: each site's counts are told as they are"
    if not least or least >= sites:
        return f"a sum is over all {sites} sites, or there is none (min_sites)"
    return "" if _judged(scene) else "no evaluation counts anything of the site"


def _difference(scene: Scene) -> Trial:
    """The share of the site's counts that are told; who sees one sum alone divides it."""
    seen = _judged(scene)[0]
    without = Total.of(seen.rest).metrics
    own = {name: number for name, number in seen.own.metrics.items() if number}  # 0 is no secret
    sites = len(scene.part.sites)
    told = [abs(seen.total.metrics[n] - without.get(n, 0.0) - v) < 0.5 for n, v in own.items()]
    guessed = [abs(seen.total.metrics[n] / sites - value) < 0.5 for n, value in own.items()]
    return _of_all(Trial.share(sum(told) / len(told), len(told), sum(guessed) / len(guessed)))


ATTACKS = (
    Attack(
        "types from counts",
        "the counts of a site's evaluation",
        "a secure sum, where others have other types; noise ([privacy])",
        _untold,
        lambda scene: _of_all(Trial.of(*_types(scene))),
        lambda scene: _of_all(Trial.of(*_types(scene.bare()))),
    ),
    Attack(
        "counts from two sums",
        "two sums of one question, one of them without the site",
        "sums over all sites: leave min_sites out of [federation], or set it in [policy]",
        _not_apart,
        _difference,
        lambda scene: _difference(scene.bare()),
    ),
)
