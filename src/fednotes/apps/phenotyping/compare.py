"""Two runs on patients, compared by what their models say of the same test patients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fednotes.apps.phenotyping.cohort import SitePatients
from fednotes.apps.phenotyping.phenotyper import Phenotyper, load_phenotyper
from fednotes.core.errors import DataError
from fednotes.jobs.comparing import Compared, Side, model_folder
from fednotes.metrics.classification import macro_measures
from fednotes.metrics.compare import Bootstrap, paired_patients
from fednotes.metrics.spans import Scores

ALL_SITES = "all sites"  # the row of runs whose sites share their test patients
METRICS = {"strict": "macro F1", "auroc": "macro AUROC"}

Block = tuple[
    np.ndarray, np.ndarray, np.ndarray
]  # labels, what both say: (patients, diseases)


class PatientTest(NamedTuple):
    """A paired test of phenotypes. scores: macro precision, recall and F1 of both
    sides; None where rankings are compared."""

    test: Bootstrap
    scores: tuple[Scores, Scores] | None


def compare_runs(a: Side, b: Side, metric: str, samples: int) -> Compared:
    """Compare what two sides say of the same test patients of each site.

    Args:
        a: One side.
        b: The other side.
        metric: "strict" compares macro F1, "auroc" macro AUROC.
        samples: Number of bootstrap samples.

    Raises:
        DataError: As of `compare_patients`.
    """
    compared = Compared()
    for site, found in compare_patients(a, b, samples, metric).items():
        compared.tests[site] = found.test
        if found.scores is not None:
            compared.scores[site] = found.scores
    return compared


def compare_patients(
    a: Side, b: Side, samples: int, metric: str = "strict"
) -> dict[str, PatientTest]:
    """Compare macro F1 of phenotypes on the same labelled test patients of each site.

    Where all sites have the same test patients, "all sites" is compared too: the mean
    of the sites' macro F1, with patients drawn for all of them at once. It stands alone
    where each side has one model for all sites. A class counts for a disease where
    either model knows it.

    Args:
        a: One side.
        b: The other side, which is subtracted.
        samples: Number of bootstrap samples.
        metric: "strict", or "auroc" for the macro AUROC of the classifiers' own scores.

    Raises:
        DataError: Patients, labels or phenotypes differ, or no patient is labelled.
    """
    others = {site.id: site for site in b.sites}
    found, blocks, folders = {}, [], set()
    for site in a.sites:
        rows = np.flatnonzero((site.test.labels >= 0).any(axis=1))
        if not len(rows):
            continue
        other = others.get(site.id)
        if other is None or not _same_test(site, other):
            raise DataError(
                f"{a.run} and {b.run} do not have the same test patients, labels and phenotypes at "
                f"site {site.id!r}"
            )
        predicted, known, used = [], [], []
        for side, its in ((a, site), (b, other)):
            used.append(model_folder(side.run, side.condition, site.id))
            model = load_phenotyper(used[-1])
            known.append(_classes(model, its, used[-1]))
            bags = its.test.bags.take(rows)
            predicted.append(
                model.rank(bags) if metric == "auroc" else model.classes(bags)
            )
        classes = [sorted({*x, *y}) for x, y in zip(*known, strict=True)]
        block = (site.test.labels[rows], predicted[0], predicted[1])
        found[site.id] = _patient_test(block, classes, samples, metric)
        blocks.append((tuple(site.test.patients[row] for row in rows), block, classes))
        folders.add(tuple(used))
    if not found:
        raise DataError(
            f"{a.run}: no test patient is labelled, so there is nothing to compare"
        )
    if len(blocks) == 1 or any(patients != blocks[0][0] for patients, _, _ in blocks):
        return found
    if len(folders) == 1:
        return {ALL_SITES: next(iter(found.values()))}
    # Each site's diseases stand side by side, so a drawn patient is drawn at every
    # site.
    labels, one, two = (
        np.concatenate([b[i] for _, b, _ in blocks], axis=1) for i in range(3)
    )
    together = [each for _, _, classes in blocks for each in classes]
    return found | {
        ALL_SITES: _patient_test((labels, one, two), together, samples, metric)
    }


def _patient_test(
    block: Block, classes: Sequence[Sequence[int]], samples: int, metric: str
) -> PatientTest:
    """Compare what two models say of the same patients."""
    labels, one, two = block
    test = paired_patients(
        labels, one, two, metric=metric, classes=classes, samples=samples
    )
    if metric == "auroc":
        return PatientTest(test, None)
    sides = [macro_measures(labels, classes, predicted) for predicted in (one, two)]
    return PatientTest(test, (sides[0], sides[1]))


def _same_test(a: SitePatients, b: SitePatients) -> bool:
    same: bool = a.phenotypes == b.phenotypes and a.test.patients == b.test.patients
    return same and np.array_equal(a.test.labels, b.test.labels)


def _classes(
    model: Phenotyper, site: SitePatients, folder: Path
) -> Sequence[Sequence[int]]:
    """The classes that a model knows of each disease.

    Raises DataError for other diseases.
    """
    if model.machines is None:
        raise DataError(
            f"{folder}: this model ends with stage 1, it predicts no phenotypes"
        )
    if model.phenotypes != site.phenotypes:
        raise DataError(
            f"{folder}: the model's phenotypes are not those of the job's labels"
        )
    if model.space.fingerprint != site.space.fingerprint:
        raise DataError(
            f"{folder}: the model read notes with another dictionary or encoder than is there now"
        )
    return model.machines.classes
