"""What methods on patients tell: concepts, codes and labels of a site's patients.

    concepts    a concept's vector, or its weights in the classifiers, move only if a patient has it
                (Melis et al. 2019, of words)
    counts      sites count patients by code, concept and label before a stage, in exact numbers
    codes,      the gradient of an output's bias is Σ p − y over patients: of one patient its sign
    labels      says whether he has the code (Zhao, Mopuri, Bilen 2020)

Decoys are concepts and codes that nobody has, or, where each is somewhere, those that the site
lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from fednotes.apps.audit import Attack, Nothing, Scene, Trial, below
from fednotes.apps.audit.counts import COUNTS, exact
from fednotes.apps.phenotyping.cohort import ABSENT, PRESENT
from fednotes.privacy.promise import COUNTS as NOISY_COUNTS
from fednotes.privacy.training import NOISY

ALONE = 16  # patients of the control whose gradients are seen each for itself
_Table = np.ndarray
_Parts = tuple[_Table, _Table]  # scores of what is there, and of what is not
_NOTHING: _Parts = (np.zeros(0), np.zeros(0))


def _change(scene: Scene, name: str) -> _Table | None:
    """What the first training tells of a tensor; with noise all trainings that were heard."""
    found = []
    for seen in scene.seen:
        changes = map(seen.change, (name, f"network.{name}"))
        change = next((change for change in changes if change is not None), None)
        if change is not None and seen.task in ("train", NOISY):
            behind = seen.tensors.get(
                "patients"
            )  # of classifiers, which are sent as sums
            found.append(change if behind is None else change / behind.clamp(min=1e-9))
    return torch.stack(found).sum(0).numpy() if found else None


def _apart(scores: _Table, each: list[_Table]) -> _Parts:
    """each: (things,) whether a site has it, the audited one first."""
    nobody = ~np.any(each, axis=0)
    return scores[each[0]], scores[nobody if nobody.any() else ~each[0]]


def _has(site: Any, name: str) -> _Table:
    """(rows,) whether a training patient has the concept that a row of this table is of."""
    if name == "embedding":
        bags, rows = site._codes._read, site._codes.network.rows
        first = len(site._codes.known)  # of few, the first is of all that have none
    else:
        bags, first = site.data.train.labelled().bags, 0
        rows = bags.width
    return np.bincount(bags.concepts, None, rows)[first:] > 0


def _concepts(scene: Scene, name: str) -> _Parts:
    """Concepts that a training patient of the site has, and others."""
    change, own = _change(scene, name), scene.part.config
    told = name == "embedding" or own.model.representation == "none"
    if change is None or own.space.dense or not told:
        return _NOTHING
    members = sorted(scene.members, key=lambda member: member.id != scene.site)
    each = [_has(below(member), name) for member in members]
    return _apart(np.linalg.norm(change, axis=1)[-len(each[0]) :], each)


def _counted(scene: Scene) -> _Parts:
    """Of lists of codes, concepts and labels, as they are told."""
    found = [_NOTHING]
    for seen in scene.seen:
        for name, value in (
            seen.tensors.items() if seen.task in (*COUNTS, NOISY_COUNTS) else ()
        ):
            each = [one.tensors[name].numpy() > 0 for one in (seen.own, *seen.rest)]
            if seen.task == NOISY_COUNTS:  # of which the exact ones are told to nobody
                sites = sorted(scene.members, key=lambda site: site.id != scene.site)
                own = (
                    [s._counting.own(s.site, one)[0] for one in s._counted]
                    for s in sites
                )
                each = [
                    np.isin(np.arange(len(value)), np.concatenate([[], *of]))
                    for of in own
                ]
            found.append(_apart(value.numpy(), each))
    inside, outside = map(np.concatenate, zip(*found, strict=True))
    return inside, outside


def _outputs(scene: Scene, name: str) -> _Parts:
    """Codes, or classes of diseases, that a training patient has, and the others; of the control
    those of a patient, by the gradient of that patient alone."""
    change, site = _change(scene, name), scene.member
    if change is None:
        return _NOTHING
    codes, own = site._codes, site._classifiers
    if name == "output_bias":
        targets = (codes._labels == PRESENT) * 1 - (codes._labels == ABSENT)
    else:
        targets = own._targets
    if not scene.control:
        had = (targets > 0).any(0)
        return change[had], change[~had]
    found = []
    for row in range(min(ALONE, len(targets))):
        if name == "output_bias":
            part = codes.some(np.array([row]))
            bias, loss = part.network.output_bias, part.loss([part])
        else:
            weights = {n: torch.zeros_like(v) for n, v in own.machines.sent().items()}
            bias = weights[name].requires_grad_()
            loss = own.loss(weights, row)
        found.append(torch.autograd.grad(loss, bias)[0])
    gradients, targets = np.stack(found), targets[: len(found)]
    return -gradients[targets > 0], -gradients[targets < 0]


# ---- attacks -------------------------------------------------------------------------------------


def _trial(scene: Scene, parts: Callable[[Scene], _Parts], why: str) -> Trial:
    """By scores of all that there is to be told."""
    inside, outside = parts(scene)
    if not len(inside) or not len(outside):
        raise Nothing(f"{why}, or all is alike at the site")
    return Trial.of(inside, outside).whole


_NOISE = "noise ([privacy])"
_PUBLIC = f"{_NOISE}; a representation that is public already (its folder)"
_WHICH = "A secure sum hides whose they are, not which"
_OTHERS = "a secure sum, where other sites' patients are others"
_NONE = "no such update leaves a site"
_Row = tuple[str, str, str, Callable[[Scene], _Parts]]
_ROWS: dict[
    str, _Row
] = {  # name → what is seen, what closes it, why it is none, and how
    "concepts from concepts' vectors": (
        "the first update of concepts' vectors",
        f'{_PUBLIC}; representation = "none" has none. {_WHICH}',
        "no concepts' vectors leave a site",
        partial(_concepts, name="embedding"),
    ),
    "concepts from classifiers of concepts": (
        "the first update of classifiers of concepts",
        f"{_NOISE}; classifiers of a representation. {_WHICH}",
        "no classifiers of concepts leave a site",
        partial(_concepts, name="svm.weight"),
    ),
    "codes and concepts from counts": (
        "counts of a site's patients by code, concept and label",
        f"{_NOISE}, which counts have too. A secure sum hides whose they are",
        "nothing is counted",
        _counted,
    ),
    "codes from biases": (
        "the first update of the network that predicts codes",
        f"{_PUBLIC}; {_OTHERS}",
        _NONE,
        partial(_outputs, name="output_bias"),
    ),
    "labels from intercepts": (
        "the first update of the classifiers",
        f"{_NOISE}; {_OTHERS}",
        _NONE,
        partial(_outputs, name="svm.intercept"),
    ),
}
ATTACKS = (
    *(
        Attack(name, sees, closes, partial(_trial, parts=parts, why=why), patients=True)
        for name, (sees, closes, why, parts) in _ROWS.items()
    ),
    Attack(
        "exact counts",
        "counts of a site's patients by code, concept, label and what is predicted",
        f"a secure sum; {_NOISE}, under which nothing is counted exactly",
        exact,
        patients=True,
    ),
)
