"""A model's errors in labelled patients, counted by phenotype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import Field, TypeAdapter

from fednotes.apps.ui.filters import parse_query
from fednotes.core.errors import DataError
from fednotes.jobs.job import Side, load_sites
from fednotes.jobs.job_file import load_recorded_job
from fednotes.jobs.models import load
from fednotes.jobs.patient_models import PatientModel
from fednotes.jobs.patient_reviews import ReviewedPatient, ReviewedPatients
from fednotes.jobs.run_folder import require_same_data
from fednotes.metrics.calibration import Reliability

PRESENT = "present"
# The conditions whose models are shown; the first one that a run has counts.
_CONDITIONS = ("federated", "pooled", "alone")

LoadReview = Callable[[], "PatientReview"]


class Judgment(NamedTuple):
    """A model's prediction of one phenotype of one patient.

    Attributes:
        number: The index of the patient in `PatientReview.patients`.
        phenotype: The phenotype.
        gold: Its label.
        predicted: The predicted label; None if the model has not learned it.
        probability: The probability that it is present; None likewise.
    """

    number: int
    phenotype: str
    gold: str
    predicted: str | None
    probability: float | None

    @property
    def is_right(self) -> bool:
        """Whether the prediction is the label."""
        return self.gold == self.predicted

    @property
    def surprise(self) -> float:
        """How far the probability of "present" is from the label; 1 is farthest."""
        if self.probability is None:
            return 0.0
        is_present = self.gold == PRESENT
        return abs(float(is_present) - self.probability)


class SitePatient(NamedTuple):
    """A patient of a site or file.

    Attributes:
        number: Its index in `PatientReview.patients`.
        site: The name of the site or file.
        patient: The patient.
    """

    number: int
    site: str
    patient: ReviewedPatient


class PhenotypeRow(NamedTuple):
    """The errors of one phenotype.

    Attributes:
        phenotype: The phenotype.
        labelled: The number of labelled patients.
        pairs: Label and predicted label → number of patients.
        errors: The number of wrong predictions.
    """

    phenotype: str
    labelled: int
    pairs: Mapping[tuple[str, str], int]
    errors: int


@dataclass(frozen=True)
class PatientFilter:
    """The selection of patients in a list.

    Attributes:
        phenotype: A phenotype; "" for all.
        site: The name of a site or file; "" for all.
        gold: A label; "" for all.
        predicted: A predicted label; "" for all.
        kind: "errors", or "all" for all predictions.
        run: The run whose patients are shown; "" for the first one.
    """

    phenotype: str = ""
    site: str = ""
    gold: str = ""
    predicted: str = ""
    kind: Literal["errors", "all"] = "errors"
    run: Annotated[str, Field(max_length=500)] = ""

    def accepts(self, judgment: Judgment, site: str) -> bool:
        """Return whether the list shows a prediction for a patient of a site."""
        return (
            self.phenotype in ("", judgment.phenotype)
            and self.site in ("", site)
            and self.gold in ("", judgment.gold)
            and self.predicted in ("", judgment.predicted)
            and (self.kind == "all" or not judgment.is_right)
        )


_FILTER = TypeAdapter(PatientFilter)


def parse_patient_filter(query: Mapping[str, str]) -> PatientFilter:
    """Return the filter in an address; invalid values are ignored."""
    return parse_query(_FILTER, query)


class PatientReview:
    """The patients of some sites or of a file, with a model's predictions.

    Args:
        sources: The patients of each site or file.
        about: The name of what is reviewed.

    Attributes:
        sources: The patients of each site or file.
        about: The name of what is reviewed.
        patients: All patients.
        phenotypes: All phenotypes, in the order of the models.
    """

    def __init__(self, sources: Sequence[ReviewedPatients], about: str) -> None:
        self.sources = tuple(sources)
        self.about = about
        in_order = [
            (source.name, patient) for source in sources for patient in source.patients
        ]
        self.patients = [
            SitePatient(number, site, patient)
            for number, (site, patient) in enumerate(in_order)
        ]
        self.phenotypes = list(
            dict.fromkeys(name for source in sources for name in source.phenotypes)
        )

    def list_judgments(self, site: str = "") -> list[Judgment]:
        """Return all predictions of labelled phenotypes, of one site or of all."""
        return [
            judgment
            for each in self.patients
            if site in ("", each.site)
            for judgment in self.judge(each)
        ]

    def judge(self, site_patient: SitePatient) -> list[Judgment]:
        """Return the predictions of a patient's labelled phenotypes."""
        patient = site_patient.patient
        return [
            Judgment(
                site_patient.number,
                phenotype,
                gold=label,
                predicted=patient.predicted.get(phenotype),
                probability=patient.probabilities.get(phenotype),
            )
            for phenotype, label in patient.gold.items()
        ]

    def select(self, filters: PatientFilter) -> list[Judgment]:
        """Return the predictions that a filter accepts, the most surprising first."""
        selected = [
            judgment
            for judgment in self.list_judgments(filters.site)
            if filters.accepts(judgment, self.patients[judgment.number].site)
        ]
        return sorted(selected, key=lambda judgment: -judgment.surprise)

    def count_errors(self, site: str = "") -> list[PhenotypeRow]:
        """Return the errors of each phenotype that is labelled."""
        pairs: dict[str, Counter[tuple[str, str]]] = {
            phenotype: Counter() for phenotype in self.phenotypes
        }
        for judgment in self.list_judgments(site):
            key = (judgment.gold, judgment.predicted or "")
            pairs[judgment.phenotype][key] += 1
        return [
            PhenotypeRow(
                phenotype,
                labelled=counts.total(),
                pairs=counts,
                errors=sum(
                    number
                    for (gold, predicted), number in counts.items()
                    if gold != predicted
                ),
            )
            for phenotype, counts in pairs.items()
            if counts
        ]

    def list_label_pairs(self, rows: Sequence[PhenotypeRow]) -> list[tuple[str, str]]:
        """Return the pairs of label and predicted label that occur, errors first."""
        pairs = {pair for row in rows for pair in row.pairs}
        return sorted(pairs, key=lambda pair: (pair[0] == pair[1], pair))


def judge_presence(judgments: Sequence[Judgment]) -> Reliability | None:
    """Compare the probabilities of "present" with the labels; None without any."""
    known = [each for each in judgments if each.probability is not None]
    if not known:
        return None
    probabilities = np.array([each.probability for each in known], np.float64)
    is_present = np.array([each.gold == PRESENT for each in known], bool)
    patients = len({each.number for each in known})
    return Reliability.of(probabilities, is_present, patients)


# ---- loading -------------------------------------------------------------------------


def review_patients_of_run(run: Path) -> PatientReview:
    """Return the errors of a run's models in its test patients.

    Args:
        run: The folder of the run.

    Raises:
        DataError: The run has no patients to show, its data have changed, or it has no
            models.
    """
    job = load_recorded_job(run)
    if job.kind.review is None:
        raise DataError(
            f"{run}: method {job.method!r} does not predict phenotypes, so there is "
            "nothing to show"
        )
    sites = load_sites(job).data
    require_same_data(run, job, sites)
    condition = next((each for each in _CONDITIONS if (run / each).is_dir()), "alone")
    sources = job.kind.review(Side(run, job, sites, condition))
    return PatientReview(sources, f"{run.name}, {condition}")


def make_review_loader(
    folder: Path,
    files: Sequence[Path],
    *,
    labels: Path | None,
    encoding: str,
    device: str,
    backbone: str | None,
) -> LoadReview:
    """Load a model; return a function that loads its errors in labelled patients.

    Args:
        folder: The folder of the model.
        files: The files or folders of patients.
        labels: A table of labels; None if the files have labels.
        encoding: As in `fednotes.evaluate`.
        device: As in `fednotes.load`.
        backbone: As in `fednotes.load`.
    """
    model = load(folder, device, backbone)
    assert isinstance(model, PatientModel)
    return partial(_review_files, model, files, labels, encoding)


def _review_files(
    model: PatientModel, files: Sequence[Path], labels: Path | None, encoding: str
) -> PatientReview:
    """Return a model's errors in the labelled patients of some files."""
    sources = [model.review_file(path, labels, encoding) for path in files]
    return PatientReview(sources, ", ".join(path.name for path in files))
