"""Membership inference: was this note, or this patient, in the training data?

Carlini, Chien, Nasr, Song, Terzis and Tramèr 2022, "Membership Inference Attacks From
First Principles" (LiRA). The score φ of a unit under the attacked model is compared
with its scores under shadow models that were trained with it (in) and without it (out):

    Λ = log N(φ; μ_in, σ_in²) − log N(φ; μ_out, σ_out²)          their equation 3

With few models, all units share one variance, as in the paper. The means also come from
few models, so the variance of a new value is σ² (1 + 1/n). Notes are scored by φ =
log(p / (1 − p)), where p is the likelihood of their annotation or of masked words;
patients by the log-likelihood of their codes or labels. Each shadow model is attacked
with the others as shadows.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import numpy as np

from fednotes.apps.audit.attack import Attack, NotApplicable, Trial
from fednotes.apps.audit.scene import Scene
from fednotes.apps.audit.shadow.models import train_shadow_models

MIN_VARIANCE = 1e-12  # keeps the ratio finite if all models agree
MIN_CONTROL = 0.5  # with few models, members are harder to identify than words
Criterion = Literal["", "codes", "labels"]


def identify_members(scene: Scene, criterion: Criterion = "") -> Trial:
    """Distinguish members of the training data from others by LiRA.

    Args:
        scene: The job.
        criterion: For patients, whether they are judged by their codes or by their
            labels.

    Raises:
        NotApplicable: The job trains no model of codes or labels.
    """
    config = scene.training.config
    if criterion == "codes" and not config.learns_codes:
        raise NotApplicable("the job trains no model of codes")
    if criterion == "labels" and not config.phenotypes:
        raise NotApplicable("the job trains no model of labels")

    scores = train_shadow_models(scene, criterion if scene.is_control else "")
    unit_scores = scores.units[criterion]
    is_known = ~np.isnan(unit_scores).any(1)
    is_member = scores.is_member[is_known]
    ratios = compute_likelihood_ratios(unit_scores[is_known], is_member)
    return Trial.from_scores(
        ratios[is_member], ratios[~is_member], models=scores.num_models
    )


def compute_likelihood_ratios(scores: np.ndarray, is_member: np.ndarray) -> np.ndarray:
    """Return (units, models) Λ for each model, with the others as shadow models.

    Λ is 0 for a unit that all of the other models, or none of them, were trained on.

    Args:
        scores: (units, models) φ.
        is_member: (units, models) whether each unit was in each model's training data.
    """
    ratios = np.zeros_like(scores)
    for model in range(scores.shape[1]):
        shadows = np.arange(scores.shape[1]) != model
        target = scores[:, model]
        others = scores[:, shadows]
        inside = is_member[:, shadows]
        density_in = _compute_twice_negative_log_density(target, others, inside)
        density_out = _compute_twice_negative_log_density(target, others, ~inside)
        is_comparable = inside.any(1) & (~inside).any(1)
        ratios[:, model] = np.where(is_comparable, (density_out - density_in) / 2, 0.0)
    return ratios


def _compute_twice_negative_log_density(
    target: np.ndarray, others: np.ndarray, chosen: np.ndarray
) -> np.ndarray:
    """Return (units,) −2 log N(target) up to a constant, by the chosen models.

    Args:
        target: (units,) scores under the attacked model.
        others: (units, shadows) scores under the shadow models.
        chosen: (units, shadows) whether the normal distribution is fitted to each
            model.
    """
    count = chosen.sum(1)
    mean = (others * chosen).sum(1) / np.maximum(count, 1)
    # A unit has too few models for a variance of its own, so all units share one.
    squares = ((others - mean[:, None]) ** 2 * chosen).sum()
    freedom = max((count - 1).clip(0).sum(), 1)
    variance = max(squares / freedom, MIN_VARIANCE)
    spread = variance * (1 + 1 / np.maximum(count, 1))  # variance of a new value
    density: np.ndarray = (target - mean) ** 2 / spread + np.log(spread)
    return density


NOTE_ATTACKS = (
    Attack(
        "membership",
        sees="the trained model with all its layers, and a note to ask about",
        closes=(
            "differential privacy ([privacy]); less training on more notes weakens it"
        ),
        trial=identify_members,
        min_control=MIN_CONTROL,
    ),
)

_BY: tuple[Criterion, ...] = ("codes", "labels")
PATIENT_ATTACKS = tuple(
    Attack(
        f"membership, by {criterion}",
        sees=f"the trained model, and a patient with {criterion} to ask about",
        closes="noise ([privacy]); more patients and fewer cycles weaken it",
        trial=partial(identify_members, criterion=criterion),
        min_control=MIN_CONTROL,
        data="patients",
    )
    for criterion in _BY
)
