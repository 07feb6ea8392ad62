"""Attacks on counts, which reveal a site's entity types and the counts themselves.

After an evaluation, a site sends, for each entity type, how many mentions are
annotated, predicted and right. This shows the server which types occur at the site:

    score of type t = number of annotated mentions of t

Under a secure sum, it sees the sum over all sites. If sites may drop out, it may see
two sums of the same question, one of them without the site, and their difference is the
site's count:

    count of site k = Σ_{i} c_i − Σ_{i ≠ k} c_i
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from fednotes.apps.audit.attack import Attack, NotApplicable, Trial
from fednotes.apps.audit.listening import Observation
from fednotes.apps.audit.scene import Scene
from fednotes.core.federation import EVALUATE
from fednotes.core.update import Total, Update
from fednotes.metrics.spans import SpanCounts

PATIENT_COUNTS = ("count_codes", "count_concepts", "count_labels")  # before stages


def infer_types(scene: Scene) -> Trial:
    """Read off the first evaluation which entity types occur at the site."""
    for seen in _list_evaluations(scene):
        at_site = SpanCounts.from_metrics(seen.audited_update.metrics).by_type
        visible = SpanCounts.from_metrics(seen.metrics).by_type
        if not visible:
            continue
        present: list[int] = []
        absent: list[int] = []
        for name in dict.fromkeys((*scene.training.config.tags.types, *visible)):
            count = visible[name].gold if name in visible else 0
            occurs = name in at_site and at_site[name].gold > 0
            (present if occurs else absent).append(count)
        if present and absent:
            return Trial.from_scores(present, absent).drop_interval()
        break
    raise NotApplicable(
        "no evaluation sends counts by type, or every type of the job "
        "occurs at the site"
    )


def subtract_sums(scene: Scene) -> Trial:
    """Subtract two sums, one with the audited site and one without it."""
    federation = scene.job.federation
    sites = len(scene.training.sites)
    if not scene.is_control:
        if not federation.secure_sum:
            raise NotApplicable(
                "sums are not secure: each site's counts are visible anyway"
            )
        if not 0 < federation.min_sites < sites:
            raise NotApplicable(f"min_sites requires all {sites} sites in every sum")
    return guess_counts(
        scene, two_sums=True, reason_if_none="no evaluation sends counts of the site"
    )


def guess_counts(
    scene: Scene, *, two_sums: bool = False, reason_if_none: str = "nothing is counted"
) -> Trial:
    """Guess the site's counts, and return the fraction of correct guesses.

    Counts of 0 are not targets. The chance level is the success rate of always guessing
    the most frequent count.

    Args:
        scene: The job.
        two_sums: Whether the adversary sees two sums, one with the site and one without
            it. If not, the adversary sees the site's own counts, or under a secure sum
            guesses that all sites have equal shares.
        reason_if_none: The reason to report if nothing is counted.

    Raises:
        NotApplicable: Nothing is counted.
    """
    is_right: list[bool] = []
    frequencies: Counter[float] = Counter()
    for seen in list_observed_counts(scene):
        layout = seen.audited_update  # the names of counts, in one order
        truth = flatten_counts(seen.audited_update, layout)
        total = flatten_counts(seen.total, layout)
        guess = truth  # without a secure sum, the site's own counts are visible
        if two_sums:
            guess = total - flatten_counts(Total.of(seen.other_updates), layout)
        elif scene.job.federation.secure_sum:
            guess = total / (1 + len(seen.other_updates))
        is_target = truth != 0
        is_right += (np.abs(guess - truth)[is_target] < 0.5).tolist()
        frequencies.update(truth[is_target].tolist())
    if not is_right:
        raise NotApplicable(reason_if_none)

    num_targets = len(is_right)
    chance = max(frequencies.values()) / num_targets
    trial = Trial.from_fraction(sum(is_right) / num_targets, num_targets, chance)
    return trial.drop_interval()


def list_observed_counts(scene: Scene) -> list[Observation]:
    """Return the observations that contain counts of the site.

    These are the first evaluation or, for jobs on patients, all evaluations and the
    sums that consist only of counts.
    """
    evaluations = _list_evaluations(scene)
    if not scene.has_patients:
        return evaluations[:1]
    counts = [
        seen
        for seen in scene.observe()
        if seen.task in PATIENT_COUNTS
        and flatten_counts(seen.audited_update, seen.audited_update).any()
    ]
    return counts + evaluations


def flatten_counts(source: Update | Total, names: Update) -> np.ndarray:
    """Return tensors and metrics as one array, shape (counts,), without the loss.

    Args:
        source: The values.
        names: An update that has the tensors and metrics to return.
    """
    parts = [source.tensors[name].double().flatten().numpy() for name in names.tensors]
    metrics = [
        source.metrics.get(name, 0.0) for name in names.metrics if name != "loss"
    ]
    return np.concatenate([*parts, metrics])


def _list_evaluations(scene: Scene) -> list[Observation]:
    """Return the evaluations that contain counts of the site."""
    return [
        seen
        for seen in scene.observe()
        if seen.task == EVALUATE and any(seen.audited_update.metrics.values())
    ]


ATTACKS = (
    Attack(
        "types from counts",
        sees="the counts of a site's evaluation",
        closes="a secure sum, if other sites have other types; noise ([privacy])",
        trial=infer_types,
    ),
    Attack(
        "counts from two sums",
        sees="two sums of the same question, one of them without the site",
        closes=(
            "sums over all sites: leave min_sites out of [federation], or set it in "
            "[policy]"
        ),
        trial=subtract_sums,
        data="any",
    ),
)
