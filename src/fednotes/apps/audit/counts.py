"""What counts tell: an evaluation's of the site's types, and two sums that differ by the site."""

from __future__ import annotations

from collections import Counter

import numpy as np

from fednotes.apps.audit import Attack, Nothing, Scene, Seen, Trial
from fednotes.core.federation import EVALUATE
from fednotes.core.update import Total, Update
from fednotes.metrics.spans import SpanCounts

COUNTS = (
    "count_codes",
    "count_concepts",
    "count_labels",
)  # of patients, before a stage


def _judged(scene: Scene) -> list[Seen]:
    """Evaluations that count anything of the site."""
    return [s for s in scene.seen if s.task == EVALUATE and any(s.own.metrics.values())]


def counting(scene: Scene) -> list[Seen]:
    """What counts anything of the site: the first evaluation; of patients all, by sums of their own
    too."""
    if not scene.patients:
        return _judged(scene)[:1]
    counts = [s for s in scene.seen if s.task in COUNTS and numbers(s.own, s.own).any()]
    return counts + _judged(scene)


def numbers(of: Update | Total, like: Update) -> np.ndarray:
    """(counts,) of an answer that counts, by the names of another."""
    parts = [of.tensors[name].double().flatten().numpy() for name in like.tensors]
    told = [of.metrics.get(name, 0.0) for name in like.metrics if name != "loss"]
    return np.concatenate([*parts, told])


def exact(scene: Scene, sums: int = 1, none: str = "nothing is counted") -> Trial:
    """The share of the site's counts that are told: by one sum, of which each site has its part, or
    by two, one of them without the site. Who sees none says the most frequent number. none: why
    there is no such count."""
    secure, told, every = (
        scene.job.federation.secure_sum,
        list[bool](),
        Counter[float](),
    )
    for seen in counting(scene):
        own, whole = (numbers(side, seen.own) for side in (seen.own, seen.total))
        known = whole / (1 + len(seen.rest)) if secure else own
        if sums == 2:
            known = whole - numbers(Total.of(seen.rest), seen.own)
        there = own != 0  # 0 is no secret
        told += (np.abs(known - own)[there] < 0.5).tolist()
        every.update(own[there].tolist())
    if not told:
        raise Nothing(none)
    return Trial.share(
        sum(told) / len(told), len(told), max(every.values()) / len(told)
    ).whole


def _types(scene: Scene) -> Trial:
    """Annotated mentions, as the server is told: of types that the site has, and of the others."""
    parts: tuple[list[int], list[int]] = [], []
    for seen in _judged(scene):
        both = seen.own.metrics, seen.metrics
        own, told = (SpanCounts.from_metrics(metrics).by_type for metrics in both)
        if told:
            for name in dict.fromkeys((*scene.part.config.tags.types, *told)):
                absent = name not in own or not own[name].gold
                parts[absent].append(told[name].gold if name in told else 0)
            break
    if not all(parts):
        raise Nothing(
            "no evaluation tells types, or all of the job's occur at the site"
        )
    return Trial.of(*parts).whole


def _apart(scene: Scene) -> Trial:
    """Two sums that differ by one site."""
    federation, sites = scene.job.federation, len(scene.part.sites)
    if not scene.control:
        if not federation.secure_sum:
            raise Nothing("no sum is secure: each site's counts are told as they are")
        if not 0 < federation.min_sites < sites:
            raise Nothing(
                f"a sum is over all {sites} sites, or there is none (min_sites)"
            )
    return exact(scene, 2, "no evaluation counts anything of the site")


ATTACKS = (
    Attack(
        "types from counts",
        "the counts of a site's evaluation",
        "a secure sum, where others have other types; noise ([privacy])",
        _types,
    ),
    Attack(
        "counts from two sums",
        "two sums of one question, one of them without the site",
        "sums over all sites: leave min_sites out of [federation], or set it in [policy]",
        _apart,
        patients=None,
    ),
)
