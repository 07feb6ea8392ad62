"""Patients with predictions, and weights of concepts, as the local web UI shows them."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import numpy as np
import pytest
from patient_files import save_model
from phenotype_patients import DISEASES, SPACE, VOCABULARY, sites_of

from fednotes.apps.phenotyping.classifiers import LinearSVMs
from fednotes.apps.phenotyping.cohort import PRESENT
from fednotes.apps.phenotyping.features import ConceptFeatures, load_features
from fednotes.apps.phenotyping.model import PhenotypeModel
from fednotes.apps.phenotyping.phenotyper import Phenotyper, load_phenotyper
from fednotes.apps.phenotyping.review import MAX_WEIGHTS, review_run, weigh_features
from fednotes.core.errors import DataError
from fednotes.jobs.job import Job, Side
from fednotes.jobs.saved_models import LoadOptions

LABEL_NAMES = {1: "present", 0: "absent", 2: "questionable"}


def save_svms(folder: Path) -> Phenotyper:
    """Save a model that finds disease d by ten concepts from 10 d on."""
    svms = LinearSVMs([(0, 1)] * len(DISEASES), VOCABULARY)
    for disease in range(len(DISEASES)):
        svms.weight[10 * disease : 10 * disease + 10, disease] = 10
    svms.intercept[:] = -0.5
    idf = np.ones(VOCABULARY)
    model = Phenotyper(SPACE, idf=idf, phenotypes=DISEASES, svms=svms)
    model.save(folder)
    return model


def test_the_patients_of_a_run_have_labels_and_predictions(tmp_path: Path) -> None:
    """Of every labelled test patient, from the model that the site has."""
    sites = sites_of(2)
    model = save_svms(tmp_path / "federated" / "model")
    side = Side(tmp_path, cast(Job, None), sites=tuple(sites), condition="federated")
    reviewed = review_run(side)
    assert [each.name for each in reviewed] == [site.id for site in sites]
    for site, shown in zip(sites, reviewed, strict=True):
        rows = np.flatnonzero((site.test.labels >= 0).any(axis=1))
        assert [each.patient for each in shown.patients] == [
            site.test.patients[row] for row in rows
        ]
        bags = site.test.bags.take(rows)
        classes = model.predict_classes(bags)
        chances = model.predict_probabilities(bags)[:, :, PRESENT]
        for place, (row, each) in enumerate(zip(rows, shown.patients, strict=True)):
            labels = site.test.labels[row]
            assert each.gold == {
                name: LABEL_NAMES[label]
                for name, label in zip(DISEASES, labels.tolist(), strict=True)
                if label >= 0
            }
            assert [*each.predicted.values()] == [
                LABEL_NAMES[label] for label in classes[place].tolist()
            ]
            assert [*each.probabilities.values()] == chances[place].tolist()
        assert shown.weights == {}  # the dictionary of these patients is nowhere
    with pytest.raises(DataError, match="no pooled model"):
        review_run(Side(tmp_path, cast(Job, None), tuple(sites), condition="pooled"))


def test_the_concepts_with_the_largest_weights_come_first(tmp_path: Path) -> None:
    """The model finds a disease by its own name, so only this concept has a weight."""
    folder = save_model(tmp_path / "model", "synthetic", Path(), "asthma", "gout")
    model = load_phenotyper(folder)
    features = load_features(model.space.recipe)
    assert isinstance(features, ConceptFeatures)
    weights = weigh_features(model, features)
    assert [*weights] == ["asthma", "gout"]
    for disease, listed in weights.items():
        assert listed[0].feature.startswith(f"{disease} (")
        assert listed[0].weight > 0
    assert model.svms is not None
    names = features.matcher.dictionary.concepts
    by_hand = np.arange(len(names), dtype=float) - 5
    model.svms.weight[:, 1] = by_hand
    listed = weigh_features(model, features)["gout"]
    ids = [each.feature.rpartition("(")[2].rstrip(")") for each in listed]
    assert ids[:MAX_WEIGHTS] == [*reversed(names[-MAX_WEIGHTS:])]
    assert [each.weight for each in listed[-5:]] == [-1, -2, -3, -4, -5]
    assert len(listed) == 2 * MAX_WEIGHTS - 1  # a weight of zero is none
    assert weigh_features(model, None) == {}


def test_a_label_table_beside_the_notes_is_used(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "synthetic", Path(), "asthma", "gout")
    model = PhenotypeModel.load(folder, LoadOptions())
    notes = tmp_path / "notes.csv"
    notes.write_text("patient,text\np1,Has asthma.\np2,Seen today.\n")
    labels = tmp_path / "labels.csv"
    labels.write_text("patient,asthma,gout\np1,present,absent\np2,present,\n")
    reviewed = model.review_file(notes, labels)
    assert reviewed.name == "notes.csv"
    assert [each.gold for each in reviewed.patients] == [
        {"asthma": "present", "gout": "absent"},
        {"asthma": "present"},
    ]
    assert [each.predicted["asthma"] for each in reviewed.patients] == [
        "present",
        "absent",
    ]
    assert [each.concepts for each in reviewed.patients] == [1, 0]
    assert reviewed.confidence == model.confidence
