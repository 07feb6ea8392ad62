"""What counts tell: an evaluation's of the site's types, and two sums that differ by the site."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np

from fednotes.audit import Attack, Scene, Seen, Trial
from fednotes.core.federation import EVALUATE
from fednotes.core.update import Total, Update
from fednotes.metrics.spans import SpanCounts


def of_all(trial: Trial) -> Trial:
    """Of all that there is, and not of a sample of it: without an interval."""
    return replace(trial, low=trial.success, high=trial.success)


COUNTS = ("count_codes", "count_concepts", "count_labels")  # of patients, before a stage


def _judged(scene: Scene) -> list[Seen]:
    """Evaluations that count anything of the site."""
    return [s for s in scene.seen if s.task == EVALUATE and any(s.own.metrics.values())]


def counting(scene: Scene) -> list[Seen]:
    """What counts anything of the site: the first evaluation; of patients all, by sums of their own
    too."""
    if not scene.patients:
        return _judged(scene)[:1]
    return [s for s in scene.seen if s.task in COUNTS and numbers(s.own, s.own).any()] + _judged(
        scene
    )


def numbers(of: Update | Total, like: Update) -> np.ndarray:
    """(counts,) of an answer that counts, by the names of another."""
    parts = [of.tensors[name].double().flatten().numpy() for name in like.tensors]
    told = [of.metrics.get(name, 0.0) for name in like.metrics if name != "loss"]
    return np.concatenate([*parts, told])


def exact(scene: Scene, sums: int) -> Trial:
    """The share of the site's counts that are told: by one sum, of which each site has its part, or
    by two, one of them without the site. Who sees none says the most frequent number."""
    secure, told, every = scene.job.federation.secure_sum, list[bool](), Counter[float]()
    for seen in counting(scene):
        own, whole = (numbers(side, seen.own) for side in (seen.own, seen.total))
        known = whole / (1 + len(seen.rest)) if secure else own
        if sums == 2:
            known = whole - numbers(Total.of(seen.rest), seen.own)
        there = own != 0  # 0 is no secret
        told += (np.abs(known - own)[there] < 0.5).tolist()
        every.update(own[there].tolist())
    share = Trial.share(sum(told) / len(told), len(told), max(every.values()) / len(told))
    return of_all(share)


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
    return "" if counting(scene) else "no evaluation counts anything of the site"


ATTACKS = (
    Attack(
        "types from counts",
        "the counts of a site's evaluation",
        "a secure sum, where others have other types; noise ([privacy])",
        _untold,
        lambda scene: of_all(Trial.of(*_types(scene))),
        lambda scene: of_all(Trial.of(*_types(scene.bare()))),
    ),
    Attack(
        "counts from two sums",
        "two sums of one question, one of them without the site",
        "sums over all sites: leave min_sites out of [federation], or set it in [policy]",
        _not_apart,
        lambda scene: exact(scene, 2),
        lambda scene: exact(scene.bare(), 2),
        patients=None,
    ),
)
