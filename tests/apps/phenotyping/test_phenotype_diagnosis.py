"""`fednotes doctor` on jobs and runs of patients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fednotes as fn
from fednotes.apps.phenotyping.causes import (
    count_training,
    find_data_causes,
    find_score_causes,
)
from fednotes.jobs.causes import Cause
from fednotes.jobs.job import Job, load_sites

TABLE: dict[str, Any] = {
    "method": "phenotype",
    "seed": 1,
    "conditions": ["federated"],
    "synthetic": {"sites": 2, "patients": 60},
    "training": {
        "minimum": 5,
        "min_patients": 0,
        "cycles": 2,
        "local_epochs": 1,
        "classifier_cycles": 2,
    },
    "model": {"classifier": {"class_weights": "none"}},
}


@pytest.fixture(scope="module")
def job() -> Job:
    """Return a job of two generated sites."""
    return fn.job(TABLE)


@pytest.fixture(scope="module")
def run(job: Job, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that trained for a few steps."""
    out = tmp_path_factory.mktemp("patients") / "run"
    fn.simulate(job, out)
    return out


def by_code(causes: Any) -> dict[str, Cause]:
    return {cause.code: cause for cause in causes}


def test_a_phenotype_that_no_training_patient_has_is_reported(job: Job) -> None:
    """Without weights of classes, these are the setting to try."""
    causes = by_code(fn.doctor(job).causes)
    rare = causes["types_rare"]
    assert rare.evidence[0].numbers["present"]["gout"] == 0
    (setting,) = rare.settings
    assert (setting.key, setting.value) == (
        "model.classifier.class_weights",
        "balanced",
    )
    weighted = fn.job(TABLE, model={"classifier": {"class_weights": "balanced"}})
    assert by_code(fn.doctor(weighted).causes)["types_rare"].settings == ()


def test_common_phenotypes_and_labelled_sites_are_not_reported(job: Job) -> None:
    labels = {"asthma": {"present": 40, "labelled": 90}}
    facts = {site: {"patients": 90, "labels": labels} for site in "ab"}
    assert list(find_data_causes(job, facts)) == []


def test_a_site_without_labels_is_reported(job: Job) -> None:
    first, second = load_sites(job).data
    unlabelled = replace(
        second,
        train=replace(second.train, labels=np.full_like(second.train.labels, -1)),
    )
    facts = {site.id: count_training(job, site) for site in (first, unlabelled)}
    cause = by_code(find_data_causes(job, facts))["sites_unlabelled"]
    assert cause.where == second.id
    assert cause.evidence[0].numbers == {"patients": len(second.train)}


def test_phenotypes_that_a_run_never_predicts_are_reported(run: Path) -> None:
    diagnosis = fn.doctor(run)
    causes = by_code(diagnosis.causes)
    missed = causes["types_missed"]
    assert "gout" in f"{missed.message} {missed.evidence}"
    # The weights of classes are proposed once, by the first cause.
    keys = [setting.key for cause in diagnosis.causes for setting in cause.settings]
    assert len(keys) == len(set(keys))
    assert {"training.classifier_cycles", "model.classifier.class_weights"} <= set(keys)
    assert "rare phenotypes" in diagnosis.checked


@pytest.mark.parametrize(
    ("present", "absent", "is_named"), [(0, 9, True), (9, 0, True), (4, 5, False)]
)
def test_phenotypes_with_equal_test_labels_are_reported_as_without_auroc(
    job: Job, present: int, absent: int, is_named: bool
) -> None:
    gout = {
        "present": {"support": present, "predicted": 1},
        "absent": {"support": absent},
    }
    asthma = {"present": {"support": 3, "predicted": 1}, "absent": {"support": 3}}
    score = {"by_output": {"gout": gout, "asthma": asthma}}
    causes = by_code(find_score_causes(job, {"mercy": {"alone": score}}, {}))
    assert ("no_auroc" in causes) == is_named
    if is_named:
        cause = causes["no_auroc"]
        assert (cause.where, cause.importance) == ("mercy, alone", "low")
        assert cause.message.endswith("have the same label for gout")
        assert cause.evidence[0].text == "1 of 2 phenotypes"


@pytest.mark.parametrize(("patients", "importance"), [(9, "low"), (10, "high")])
def test_the_importance_of_missed_phenotypes_follows_their_test_patients(
    job: Job, patients: int, importance: str
) -> None:
    gout = {
        "present": {"support": patients, "predicted": 0},
        "absent": {"support": 5},
    }
    score = {"by_output": {"gout": gout}}
    causes = by_code(find_score_causes(job, {"mercy": {"alone": score}}, {}))
    assert causes["types_missed"].importance == importance


def test_each_stage_is_judged_by_its_own_length(job: Job) -> None:
    name = job.module.name_length_key
    assert name(job.config, "valid_loss") == "cycles"
    assert name(job.config, "valid_f1") == "classifier_cycles"


def test_a_failed_run_shows_its_error(tmp_path: Path) -> None:
    """No category of codes is frequent enough, which only the sites' sum shows."""
    strict = fn.job(TABLE, training={"minimum": 1001})
    with pytest.raises(fn.FednotesError, match=r"lower .training. minimum"):
        fn.simulate(strict, tmp_path / "run")
    diagnosis = fn.doctor(tmp_path / "run")
    assert diagnosis.state == "failed"
    cause = by_code(diagnosis.causes)["failed"]
    assert cause.where == "federated"
    assert "lower [training] minimum" in cause.evidence[0].text
