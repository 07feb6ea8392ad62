"""A model's predictions for labelled patients, one patient at a time.

An application whose sites hold patients returns them from `SiteKind.review`, and a
phenotyping model from `PatientModel.review_file`. The local web UI shows them. They
never leave the computer that holds the patients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class ReviewedPatient:
    """A patient with labels and a model's predictions.

    Attributes:
        patient: Name of the patient.
        gold: The label of each phenotype that is labelled: "present", "absent" or
            "questionable".
        predicted: The predicted label of each phenotype; None if the model has not
            learned it.
        probabilities: The probability that each phenotype is present; None if the model
            has not learned it.
        concepts: The number of mentions of concepts that the prediction is based on;
            None if the model does not read concepts.
    """

    patient: str = field(repr=False)
    gold: Mapping[str, str]
    predicted: Mapping[str, str | None]
    probabilities: Mapping[str, float | None]
    concepts: int | None = None


class FeatureWeight(NamedTuple):
    """The weight of a feature in the prediction that a phenotype is present.

    Attributes:
        feature: What the feature is, such as the id and a term of a concept.
        weight: Its weight; a positive one speaks for the phenotype.
    """

    feature: str
    weight: float


@dataclass(frozen=True)
class ReviewedPatients:
    """The patients of one site or one file.

    Attributes:
        name: Name of the site or file.
        phenotypes: The phenotypes, in the model's order.
        patients: The patients.
        confidence: What the model's probabilities are, in words.
        weights: The features that count most for each phenotype, the largest weights
            first; empty if single features have no weight in the model.
    """

    name: str
    phenotypes: Sequence[str]
    patients: Sequence[ReviewedPatient]
    confidence: str
    weights: Mapping[str, Sequence[FeatureWeight]] = field(default_factory=dict)
