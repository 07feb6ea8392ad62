"""What methods on patients tell: concepts, codes and labels of a site's patients, and who they are.

    concepts    a concept's vector, or its weights in the classifiers, move only if a patient has it
                (Melis et al. 2019, of words)
    counts      sites count patients by code, concept and label before a stage, in exact numbers
    codes,      the gradient of an output's bias is Σ p − y over patients: of one patient its sign
    labels      says whether he has the code (Zhao, Mopuri, Bilen 2020)
    members     LiRA (`memory.lira`), by how likely is what a patient truly has

Decoys are concepts and codes that nobody has, or, where each is somewhere, those that the site
lacks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from fednotes.audit import Attack, Nothing, Scene, Trial, below
from fednotes.audit.counts import COUNTS, exact
from fednotes.audit.memory import CONTROL, UNITS, told, trained
from fednotes.core.errors import DataError
from fednotes.core.seeds import rng_of
from fednotes.methods.private import NOISY
from fednotes.patients.classifiers import CHOICES
from fednotes.patients.codes import output_matrix
from fednotes.patients.cohort import ABSENT, PRESENT, SitePatients

MODELS = 16  # trained for the job, and as many for the control
ALONE = 16  # patients of the control whose gradients are seen each for itself
OFTEN: dict[str, Any] = {
    **{"cycles": 10, "local_epochs": 20, "local_steps": 0, "classifier_epochs": 50},
    **{"batch_size": 8, "learning_rate": 0.01, "weight_decay": 0.0, "proximal": 0.0},
} | {"keep_cycle": 0, "calibrate": False}
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
            behind = seen.tensors.get("patients")  # of classifiers, which are sent as sums
            found.append(change if behind is None else change / behind.clamp(min=1e-9))
    return torch.stack(found).sum(0).numpy() if found else None


def _apart(scores: _Table, each: list[_Table]) -> _Parts:
    """each: (things,) whether a site has it, the audited one first."""
    nobody = ~np.any(each, axis=0)
    return scores[each[0]], scores[nobody if nobody.any() else ~each[0]]


def _read(site: Any) -> list[Any]:
    """Stage 1's training patients of a site, some together."""
    return [part for batch in site._codes.steps(0) for part in batch]


# ---- concepts ------------------------------------------------------------------------------------


def _has(site: Any, name: str) -> _Table:
    """(rows,) whether a training patient has the concept that a row of this table is of."""
    if name == "embedding":
        had = np.zeros(site._codes.network.rows, bool)
        for part in _read(site):
            had[part.read.concepts] = True
        return had[len(site._codes.known) :]  # the first of few is of all that have none
    bags = site.data.train.labelled().bags
    return np.bincount(bags.concepts, None, bags.width) > 0


def _concepts(scene: Scene, name: str) -> _Parts:
    change, own = _change(scene, name), scene.part.config
    told = name == "embedding" or own.model.representation == "none"
    if change is None or own.space.dense or not told:
        return _NOTHING
    members = sorted(scene.members, key=lambda member: member.id != scene.site)
    each = [_has(below(member), name) for member in members]
    return _apart(np.linalg.norm(change, axis=1)[-len(each[0]) :], each)


# ---- counts --------------------------------------------------------------------------------------


def _counted(scene: Scene) -> _Parts:
    """Of lists of codes, concepts and labels, as they are told."""
    found = [_NOTHING]
    for seen in scene.seen:
        for name, value in seen.tensors.items() if seen.task in COUNTS else ():
            each = [one.tensors[name].numpy() > 0 for one in (seen.own, *seen.rest)]
            found.append(_apart(value.numpy(), each))
    inside, outside = map(np.concatenate, zip(*found, strict=True))
    return inside, outside


# ---- codes and labels ----------------------------------------------------------------------------


def _outputs(scene: Scene, name: str) -> _Parts:
    """Codes, or classes of diseases, that a training patient has, and the others."""
    if scene.control:
        return _single(scene, name)
    change, site = _change(scene, name), scene.member
    if change is None:
        return _NOTHING
    codes = name == "output_bias"
    parts = (
        [p.labels == PRESENT for p in _read(site)] if codes else [site._classifiers._targets > 0]
    )
    had = np.any(np.concatenate([np.zeros((1, len(change)), bool), *parts]), axis=0)
    return change[had], change[~had]


def _single(scene: Scene, name: str) -> _Parts:
    """Outputs that a patient has and has not, by the gradient of that patient alone."""
    assert scene.seen
    codes, own, found = scene.member._codes, scene.member._classifiers, []
    if name == "output_bias":
        codes.share = 1
        for part in islice(_read(scene.member), ALONE):
            bias, target = part.network.output_bias, _signs(part.labels[0])
            found.append((torch.autograd.grad(part.loss([part]), bias)[0], target))
    else:
        for row, target in enumerate(own._targets[:ALONE]):
            weights = {n: torch.zeros_like(v) for n, v in own.machines.sent().items()}
            bias = weights[name].requires_grad_()
            found.append((torch.autograd.grad(own.loss(weights, row), bias)[0], target))
    gradients, targets = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return -gradients[targets > 0], -gradients[targets < 0]


def _signs(labels: _Table) -> _Table:
    """1 of what is so, -1 of what is not, 0 of what is not known."""
    return np.where(labels == PRESENT, 1, np.where(labels == ABSENT, -1, 0))


# ---- members -------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def _asked(scene: Scene, control: str = "") -> tuple[dict[str, _Table], _Table]:
    """(patients, models) log p of codes, and of labels; nan where there are none; and
    whether a patient was in each. control: of which of them, on few patients, often, with nothing
    held back; classifiers are of concepts themselves then."""
    own, job = scene.part.config, scene.job
    settings: dict[str, Any] = {"least_occurrences": min(1, own.least_occurrences)}
    if own.learns and scene.seen:  # what all sites have agreed, by counts that are public then
        settings |= {"outputs": scene.member._codes.outputs, "minimum": 1}
    if control:
        model: dict[str, Any] = {"classifier": replace(own.model.classifier, C=CHOICES[-1])}
        model |= {"network": replace(own.model.network, dropout=0.0)}
        model |= {"representation": "none"} if control == "labels" else {}
        job = scene.bare(model, **OFTEN).job
    job = replace(job, config=replace(job.config, **settings))  # type: ignore[type-var]
    data: SitePatients = next(each for each in scene.sites.data if each.id == scene.site)
    coded = np.array([patient in data.codes for patient in data.train.patients], bool)
    of_use = (data.train.labels >= 0).any(1) | (coded & own.learns)
    rng = rng_of(job.seed, "audit", scene.site)
    order = rng.permutation(np.flatnonzero(of_use))
    if control:  # where nobody has a disease, nobody is to be told apart by it
        order = order[np.argsort(~(data.train.labels[order] == PRESENT).any(1), kind="stable")]
    judged, rest = np.split(order, [CONTROL if control else UNITS])
    if len(judged) < MODELS:
        raise DataError(f"site {scene.site!r} has too few patients to tell those in training apart")
    cohort, inside = data.train.take(judged), rng.random((len(judged), MODELS)) < 0.5
    found = {what: np.full(inside.shape, np.nan) for what in ("codes", "labels")}
    with TemporaryDirectory() as cache:
        for at in range(MODELS):
            rows = np.sort(np.append(judged[inside[:, at]], rest[: 0 if control else None]))
            given = replace(data, train=data.train.take(rows), test=data.test.take([]))
            site = trained(scene, job, given, 0, cache)  # who knows the job knows its seed
            if (codes := site._codes) is not None:
                whole = codes.config.whole_causes
                labels = output_matrix(cohort.patients, data.codes, codes.outputs, whole)
                with torch.no_grad():
                    odds = codes.network.eval()(cohort.bags).numpy()
                found["codes"][:, at] = _sure(odds, _signs(labels))
            if (of := site._classifiers) is not None:
                margins = of.machines.scores(of.model.features(cohort.bags))
                found["labels"][:, at] = _sure(margins, of.machines.targets(cohort.labels))
    return found, inside


def _sure(scores: _Table, targets: _Table) -> _Table:
    """(patients,) log p of what is so, by log-odds or margins; nan where nothing is known."""
    losses = np.logaddexp(0, -targets * scores) * np.abs(targets)
    return np.where(targets.any(1), -losses.sum(1), np.nan)


def _members(scene: Scene, what: str) -> Trial:
    config = scene.part.config
    if not (config.learns if what == "codes" else config.phenotypes):
        raise Nothing(f"the job trains no model of {what}")
    found, inside = _asked(scene, what * scene.control)
    known = ~np.isnan(found[what]).any(1)
    return told(found[what][known], inside[known])


# ---- attacks -------------------------------------------------------------------------------------


def _trial(scene: Scene, parts: Callable[[Scene], _Parts], why: str) -> Trial:
    """By scores of all that there is to be told."""
    inside, outside = parts(scene)
    if not len(inside) or not len(outside):
        raise Nothing(f"{why}, or all is alike at the site")
    return Trial.of(inside, outside).whole


def _attack(name: str, sees: str, closes: str, why: str, parts: Callable[..., _Parts]) -> Attack:
    return Attack(name, sees, closes, partial(_trial, parts=parts, why=why), patients=True)


_NOISE = "noise ([privacy])"
_PUBLIC = f"{_NOISE}; a representation that is public already (its folder)"
_TABLES = {
    "embedding": ("concepts' vectors", f'{_PUBLIC}; representation = "none" has none'),
    "svm.weight": ("classifiers of concepts", f"{_NOISE}; classifiers of a representation"),
}
_BIASES = {
    "output_bias": ("codes from biases", "the network that predicts codes", _PUBLIC),
    "svm.intercept": ("labels from intercepts", "the classifiers", _NOISE),
}
ATTACKS = (
    *(
        _attack(
            f"concepts from {what}",
            f"the first update of {what}",
            f"{closes}. A secure sum hides whose they are, not which",
            f"no {what} leave a site",
            partial(_concepts, name=name),
        )
        for name, (what, closes) in _TABLES.items()
    ),
    _attack(
        "codes and concepts from counts",
        "counts of a site's patients by code, concept and label",
        f"{_NOISE}, under which nothing is counted. A secure sum hides whose they are",
        "nothing is counted",
        _counted,
    ),
    Attack(
        "exact counts",
        "counts of a site's patients by code, concept, label and what is predicted",
        f"a secure sum; {_NOISE}, under which nothing is counted",
        exact,
        patients=True,
    ),
    *(
        _attack(
            name,
            f"the first update of {what}",
            f"{closes}; a secure sum, where other sites' patients are others",
            "no such update leaves a site",
            partial(_outputs, name=bias),
        )
        for bias, (name, what, closes) in _BIASES.items()
    ),
    *(
        Attack(
            f"membership, by {what}",
            f"the trained model, and a patient with {what}, to ask whether he was in training",
            f"{_NOISE}; more patients, fewer cycles",
            partial(_members, what=what),
            least=0.5,
            patients=True,
        )
        for what in ("codes", "labels")
    ),
)
