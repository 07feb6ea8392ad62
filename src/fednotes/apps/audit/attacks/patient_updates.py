"""Recover patients' concepts, codes and labels from updates of phenotyping models.

Concepts. Melis et al. 2019, "Exploiting Unintended Feature Leakage in Collaborative
Learning", infer words from embeddings. Similarly, the vector of a concept, and its
weights in classifiers of concepts, change only if a training patient has it:

    score of concept c = |ΔE_c|

Codes and labels. Zhao, Mopuri and Bilen 2020, "iDLG: Improved Deep Leakage from
Gradients": with the predicted probability p_j of output j, and y_j = 1 if the patient
has it, otherwise 0,

    ∂L/∂b_j = Σ (p_j − y_j) over the patients        negative for one patient who has j
    score of output j = −∂L/∂b_j

Decoys are concepts and codes that no site has or, if every one occurs at some site,
those that this site lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednotes.apps.audit.attack import Attack, NotApplicable, Trial
from fednotes.apps.audit.scene import Scene, remove_noise_layer
from fednotes.metrics.classification import ABSENT, PRESENT
from fednotes.privacy.training import NOISY

CONTROL_PATIENTS = 16  # control patients, whose gradients are seen individually
MIN_PATIENTS = 1e-9  # keeps a division by a sum of no patients finite
EMBEDDING = "embedding"  # stage 1's table of concepts
WEIGHTS = "svm.weight"
INTERCEPTS = "svm.intercept"
OUTPUT_BIAS = "output_bias"
ATTENTION_BIAS = "attention.bias"  # of a tuned encoder's codes or phenotypes


class ItemScores(NamedTuple):
    """The scores of items, such as codes.

    Attributes:
        present: (items,) scores of the items that occur at the audited site.
        absent: (decoys,) scores of the decoys.
    """

    present: np.ndarray
    absent: np.ndarray


NO_SCORES = ItemScores(np.zeros(0), np.zeros(0))


def make_population_trial(
    scene: Scene, *, score_items: Callable[[Scene], ItemScores], reason_if_none: str
) -> Trial:
    """Return the trial of an attack whose targets are the whole population.

    The targets are all items that the audited site has, such as its concepts, and not a
    sample of them.

    Args:
        scene: The job.
        score_items: Returns the scores of the targets (present) and decoys (absent).
        reason_if_none: Why the attack does not apply if there are no scores.

    Raises:
        NotApplicable: There are no scores, or the site has all items or none, so there
            are no targets or no decoys.
    """
    scores = score_items(scene)
    if not len(scores.present) or not len(scores.absent):
        raise NotApplicable(f"{reason_if_none}, or nothing at the site differs")
    # The trial's interval is that of a sample, and nothing was sampled here.
    return Trial.from_scores(scores.present, scores.absent).drop_interval()


def split_by_site(scores: np.ndarray, has: list[np.ndarray]) -> ItemScores:
    """Split the scores of items into those that the audited site has, and decoys.

    Args:
        scores: (items,).
        has: For each site, (items,) whether it has each item, the audited site first.
    """
    nowhere = ~np.any(has, axis=0)
    is_decoy = nowhere if nowhere.any() else ~has[0]
    return ItemScores(scores[has[0]], scores[is_decoy])


def list_audited_site_first(scene: Scene) -> list[Any]:
    """Return the method's sites with the audited site first."""
    return sorted(scene.get_method_sites(), key=lambda site: site.id != scene.site)


# ---- concepts ------------------------------------------------------------------------


def _score_concepts(scene: Scene, *, name: str) -> ItemScores:
    """Score concepts by how far their rows of `EMBEDDING` or `WEIGHTS` move."""
    config = scene.training.config
    reads_concepts = name == EMBEDDING or config.model.representation == "none"
    step = _sum_steps(scene, name)
    if step is None or config.space.dense or not reads_concepts:
        return NO_SCORES
    has = [
        _mark_concepts(remove_noise_layer(site), name)
        for site in list_audited_site_first(scene)
    ]
    lengths = np.linalg.norm(step, axis=1)
    return split_by_site(lengths[-len(has[0]) :], has)


def _mark_concepts(site: Any, name: str) -> np.ndarray:
    """Return (rows,) whether any training patient has the concept of each row."""
    if name == EMBEDDING:
        learner = site.code_learner
        bags = learner.train_data.network_input
        rows = learner.network.table_rows
        shared = len(learner.known)  # a first row, for all concepts without their own
    else:
        bags = site.data.train.select_labelled().bags
        rows = bags.width
        shared = 0
    counts = np.bincount(bags.concepts, minlength=rows)
    present: np.ndarray = counts[shared:] > 0
    return present


def _sum_steps(scene: Scene, name: str) -> np.ndarray | None:
    """Return the sum of the observed changes of a tensor; None if none is sent.

    Without noise, only the first training of each stage is observed.
    """
    steps: list[Tensor] = []
    for seen in scene.observe():
        if seen.task not in ("train", NOISY):
            continue
        step = seen.compute_descent(name)
        if step is None:
            step = seen.compute_descent(f"network.{name}")
        if step is None:
            continue
        patients = seen.tensors.get("patients")
        if patients is not None:  # classifiers are sent as sums over patients
            step = step / patients.clamp(min=MIN_PATIENTS)
        steps.append(step)
    return torch.stack(steps).sum(0).numpy() if steps else None


# ---- codes and labels ----------------------------------------------------------------


def _score_outputs(scene: Scene, *, name: str) -> ItemScores:
    """Score codes or classes by the update of `OUTPUT_BIAS` or `INTERCEPTS`.

    If an encoder is tuned, its biases take the place of one of them. For the control,
    score the outputs of single patients by each patient's own gradient.
    """
    config = scene.training.config
    if config.has_attention:
        if config.learns_codes != (name == OUTPUT_BIAS):
            return NO_SCORES
        name = ATTENTION_BIAS
    step = _sum_steps(scene, name)
    if step is None:
        return NO_SCORES
    site = scene.get_audited_site()
    if name in (OUTPUT_BIAS, ATTENTION_BIAS):
        labels = site.code_learner.train_data.labels
        signs = (labels == PRESENT) * 1 - (labels == ABSENT)
    else:
        signs = site.classifiers.targets
    if not scene.is_control:
        is_present = (signs > 0).any(0)
        return ItemScores(step[is_present], step[~is_present])

    signs = signs[:CONTROL_PATIENTS]
    if not len(signs):
        return NO_SCORES
    descents = -np.stack(
        [_compute_bias_gradient(site, name, patient) for patient in range(len(signs))]
    )
    return ItemScores(descents[signs > 0], descents[signs < 0])


def _compute_bias_gradient(site: Any, name: str, patient: int) -> Tensor:
    """Return the (outputs,) gradient of a bias for one training patient."""
    if name in (OUTPUT_BIAS, ATTENTION_BIAS):
        part = site.code_learner.select(np.array([patient]))
        bias = part.network.trainable()[name]
        loss = part.loss([part])
    else:
        classifiers = site.classifiers
        weights = {
            key: torch.zeros_like(value)
            for key, value in classifiers.svms.to_float32().items()
        }
        bias = weights[name].requires_grad_()
        loss = classifiers.measure_patient_loss(weights, patient)
    gradient: Tensor = torch.autograd.grad(loss, bias)[0]
    return gradient


_NOISE = "noise ([privacy])"
_PUBLIC = f"{_NOISE}; an existing public representation (the folder of its model)"
_SECURE_CONCEPTS = "A secure sum hides whose concepts they are, but not the concepts"
_SECURE_OUTPUTS = "a secure sum, if other sites have other patients"


def _make_attack(
    name: str,
    *,
    sees: str,
    closes: str,
    score_items: Callable[[Scene], ItemScores],
    reason_if_none: str = "no such update leaves a site",
) -> Attack:
    """Return an attack on patients whose targets are the whole population.

    Args:
        name: As in `Attack`.
        sees: As in `Attack`.
        closes: As in `Attack`.
        score_items: As in `make_population_trial`.
        reason_if_none: As in `make_population_trial`.
    """
    return Attack(
        name,
        sees=sees,
        closes=closes,
        trial=partial(
            make_population_trial,
            score_items=score_items,
            reason_if_none=reason_if_none,
        ),
        data="patients",
    )


CONCEPT_ATTACKS = (
    _make_attack(
        "concepts from concepts' vectors",
        sees="the first update of the concepts' vectors",
        closes=(
            f'{_PUBLIC}; representation = "none", which has no vectors. '
            f"{_SECURE_CONCEPTS}"
        ),
        score_items=partial(_score_concepts, name=EMBEDDING),
        reason_if_none="no concepts' vectors leave a site",
    ),
    _make_attack(
        "concepts from classifiers of concepts",
        sees="the first update of classifiers of concepts",
        closes=f"{_NOISE}; classifiers of a representation. {_SECURE_CONCEPTS}",
        score_items=partial(_score_concepts, name=WEIGHTS),
        reason_if_none="no classifiers of concepts leave a site",
    ),
)

OUTPUT_ATTACKS = (
    _make_attack(
        "codes from biases",
        sees="the first update of the network that predicts codes",
        closes=f"{_PUBLIC}; {_SECURE_OUTPUTS}",
        score_items=partial(_score_outputs, name=OUTPUT_BIAS),
    ),
    _make_attack(
        "labels from intercepts",
        sees="the first update of the classifiers",
        closes=f"{_NOISE}; {_SECURE_OUTPUTS}",
        score_items=partial(_score_outputs, name=INTERCEPTS),
    ),
)
