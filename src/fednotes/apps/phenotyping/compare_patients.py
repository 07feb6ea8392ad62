"""Compare two runs on patients by their predictions for the same test patients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from fednotes.apps.phenotyping.cohort import SitePatients
from fednotes.apps.phenotyping.phenotyper import Phenotyper, load_phenotyper
from fednotes.core.errors import DataError
from fednotes.jobs.job import ComparedSites, Side
from fednotes.jobs.run_folder import find_model_folder
from fednotes.metrics.classification import compute_macro_measures
from fednotes.metrics.paired_tests import Bootstrap, bootstrap_patients
from fednotes.metrics.spans import Scores

ALL_SITES: Final = "all sites"  # the row of runs whose sites share their test patients
METRICS: Final = {"strict": "macro F1", "auroc": "macro AUROC"}


class PatientTest(NamedTuple):
    """A paired test of phenotypes.

    Attributes:
        test: The test.
        scores: Macro precision, recall and F1 of both sides; None if rankings are
            compared.
    """

    test: Bootstrap
    scores: tuple[Scores, Scores] | None


class _Predictions(NamedTuple):
    """The predictions of two models for the labelled test patients of a site.

    Attributes:
        patients: The patients.
        labels: (patients, diseases) labels.
        first: (patients, diseases) predicted classes, or ranks, of the first model.
        second: The same for the second model.
        classes: The classes of each disease known to either model.
        folders: The folders of both models.
    """

    patients: tuple[str, ...]
    labels: np.ndarray
    first: np.ndarray
    second: np.ndarray
    classes: list[list[int]]
    folders: tuple[Path, Path]


def compare_patient_runs(a: Side, b: Side, metric: str, samples: int) -> ComparedSites:
    """Compare the predictions of two sides for the same test patients of each site.

    Args:
        a: One side.
        b: The other side.
        metric: "strict" compares macro F1, "auroc" macro AUROC.
        samples: Number of bootstrap samples.

    Raises:
        DataError: As in `compare_patients`.
    """
    compared = ComparedSites()
    for site, result in compare_patients(a, b, samples, metric).items():
        compared.tests[site] = result.test
        if result.scores is not None:
            compared.scores[site] = result.scores
    return compared


def compare_patients(
    a: Side, b: Side, samples: int, metric: str = "strict"
) -> dict[str, PatientTest]:
    """Compare macro F1 of phenotypes on the same labelled test patients of each site.

    If all sites have the same test patients, the row "all sites" compares the mean of
    the sites' macro F1, drawing the same patients for every site. If each side has one
    model for all sites, this is the only row. A class counts for a disease if either
    model knows it.

    Args:
        a: One side.
        b: The other side, which is subtracted.
        samples: Number of bootstrap samples.
        metric: "strict", or "auroc" for the macro AUROC of the classifiers' own scores.

    Raises:
        DataError: Patients, labels or phenotypes differ, or no patient is labelled.
    """
    others = {site.id: site for site in b.sites}
    predictions: dict[str, _Predictions] = {}
    for site in a.sites:
        if not (site.test.labels >= 0).any():
            continue
        other = others.get(site.id)
        if other is None or not _have_same_test_patients(site, other):
            raise DataError(
                f"{a.run} and {b.run} do not have the same test patients, labels and "
                f"phenotypes at site {site.id!r}: compare runs that were tested on the "
                "same data"
            )
        predictions[site.id] = _predict(a, b, site, other, metric=metric)
    if not predictions:
        raise DataError(
            f"{a.run}: no test patient is labelled, so there is nothing to compare"
        )

    tests = {
        name: _test_difference(of_site, samples, metric)
        for name, of_site in predictions.items()
    }
    sites = list(predictions.values())
    share_patients = all(site.patients == sites[0].patients for site in sites)
    if len(sites) == 1 or not share_patients:
        return tests
    has_one_model_per_side = len({site.folders for site in sites}) == 1
    if has_one_model_per_side:
        # The same models predicted for the same patients, so all tests are equal.
        return {ALL_SITES: next(iter(tests.values()))}
    return {
        **tests,
        ALL_SITES: _test_difference(_join_predictions(sites), samples, metric),
    }


def _have_same_test_patients(a: SitePatients, b: SitePatients) -> bool:
    """Return whether two sites have the same test patients, labels and phenotypes."""
    same_names = a.phenotypes == b.phenotypes and a.test.patients == b.test.patients
    return same_names and np.array_equal(a.test.labels, b.test.labels)


def _predict(
    a: Side, b: Side, site: SitePatients, other: SitePatients, *, metric: str
) -> _Predictions:
    """Return the predictions of both sides for the labelled test patients of a site.

    Args:
        a: One side.
        b: The other side.
        site: The site in the run of `a`.
        other: The same site in the run of `b`.
        metric: As in `compare_patients`.

    Raises:
        DataError: A model predicts other phenotypes, or reads other features.
    """
    rows = np.flatnonzero((site.test.labels >= 0).any(axis=1))
    folders = []
    outputs = []
    known = []
    for side, side_site in ((a, site), (b, other)):
        folder = find_model_folder(side.run, side.condition, side_site.id)
        model = load_phenotyper(folder)
        known.append(read_known_classes(model, side_site, folder))
        bags = side_site.test.bags.take(rows)
        outputs.append(
            model.rank(bags) if metric == "auroc" else model.predict_classes(bags)
        )
        folders.append(folder)
    classes = [sorted({*first, *second}) for first, second in zip(*known, strict=True)]
    return _Predictions(
        tuple(site.test.patients[row] for row in rows),
        site.test.labels[rows],
        first=outputs[0],
        second=outputs[1],
        classes=classes,
        folders=(folders[0], folders[1]),
    )


def _join_predictions(sites: Sequence[_Predictions]) -> _Predictions:
    """Return the predictions of all sites for their common test patients.

    The diseases of all sites are side by side, so that a drawn patient is drawn for
    every site.
    """
    return _Predictions(
        sites[0].patients,
        np.concatenate([site.labels for site in sites], axis=1),
        first=np.concatenate([site.first for site in sites], axis=1),
        second=np.concatenate([site.second for site in sites], axis=1),
        classes=[classes for site in sites for classes in site.classes],
        folders=sites[0].folders,
    )


def _test_difference(
    predictions: _Predictions, samples: int, metric: str
) -> PatientTest:
    """Test the difference between two models' predictions."""
    labels = predictions.labels
    classes = predictions.classes
    test = bootstrap_patients(
        labels,
        predictions.first,
        predictions.second,
        metric=metric,
        classes=classes,
        samples=samples,
    )
    if metric == "auroc":
        return PatientTest(test, None)
    first = compute_macro_measures(labels, classes, predictions.first)
    second = compute_macro_measures(labels, classes, predictions.second)
    return PatientTest(test, (first, second))


def read_known_classes(
    model: Phenotyper, site: SitePatients, folder: Path
) -> Sequence[Sequence[int]]:
    """Return the classes of each disease that a model knows.

    Raises:
        DataError: The model predicts other phenotypes, or reads other features.
    """
    classes = model.classes
    if classes is None:
        raise DataError(
            f"{folder}: this model predicts codes and no phenotypes: "
            "compare runs with [phenotypes] or labels"
        )
    if model.phenotypes != site.phenotypes:
        raise DataError(
            f"{folder}: the model's phenotypes are not those of the job's labels"
        )
    if model.space.fingerprint != site.space.fingerprint:
        raise DataError(
            f"{folder}: the model was trained with a different dictionary or "
            "encoder, not the one that is there now"
        )
    return classes
