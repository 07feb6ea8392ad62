"""Jobs that tune an encoder for phenotypes or codes, from their tables to predictions."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from applications import needs_app
from patient_files import SECRET, job, load, write
from patients_of_words import ILLNESSES, write_notes
from sklearn.metrics import roc_auc_score
from tiny_models import save_bert

import fednotes as fn
from fednotes.apps.phenotyping.cohort import SubWords
from fednotes.apps.phenotyping.phenotyper import load_phenotyper
from fednotes.apps.phenotyping.two_stage import METHOD, Site
from fednotes.core.errors import ConfigError, DataError, MovedError
from fednotes.engines.inprocess import InProcess
from fednotes.jobs.saved_models import EvaluationOptions

MODEL = {
    "representation": "attention",
    "attention": {"length": 8, "rank": 2, "width": 6, "dropout": 0.0},
}
TRAINING = {"cycles": 3, "batch_size": 8, "learning_rate": 0.01}
ICD = {"asthma": "J45", "hypertension": "I10"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with notes, labels and codes of three sites.

    Patients have the diseases that their notes name.
    """
    folder = tmp_path_factory.mktemp("sites")
    for number, name in enumerate("abc"):
        site = folder / name
        site.mkdir()
        notes = write_notes(name, 40, number)
        texts = {patient: " ".join(each) for patient, each in notes.items()}
        write(
            site / "notes.csv",
            "patient,text",
            [f"{p},{text}" for p, each in notes.items() for text in each],
        )
        rows = [
            ",".join([p, *(str(int(word in texts[p])) for word in ILLNESSES)])
            for p in texts
        ]
        write(site / "judged.csv", f"patient,{','.join(ILLNESSES)}", rows)
        codes = [
            f"{p},{ICD[word]}" for p in texts for word in ILLNESSES if word in texts[p]
        ]
        write(site / "codes.csv", "patient,code", codes)
    return folder


def tables_of(bert: Path, *, labelled: bool = True, **changes: Any) -> dict[str, Any]:
    """Return the tables of a job of these sites."""
    labels = {"labels": "judged.csv"}
    codes = {"codes": "codes.csv", "codes_format": "table", "system": "icd10"}
    sites: dict[str, Any] = {}
    for name in "abc":
        files = labels if labelled else codes
        sites[name] = {
            key: f"{name}/{value}" if value.endswith(".csv") else value
            for key, value in {"notes": "notes.csv", **files}.items()
        }
    training = (
        TRAINING if labelled else TRAINING | {"outputs": ["icd10:J45"], "minimum": 1}
    )
    table = {
        "sites": sites,
        "text": {"encoder": str(bert)},
        "model": MODEL,
        "training": training,
    }
    return {**table, **changes}


@pytest.fixture(scope="module")
def run(place: Path, bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of all three conditions."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    conditions = ["alone", "federated", "pooled"]
    tables = tables_of(bert, conditions=conditions)
    fn.simulate(job(place, **tables), folder)
    return folder


# ---- a run ---------------------------------------------------------------------------


@pytest.mark.slow
def test_each_condition_is_scored_by_phenotype(run: Path) -> None:
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    conditions = {"alone", "federated", "pooled"}
    assert summary["mean"].keys() == conditions
    for of_site in summary["sites"].values():
        for condition in conditions:
            scores = of_site[condition]
            assert scores["by_output"].keys() == set(ILLNESSES)
            assert 0 <= scores["ranking"]["auroc"] <= 1


def test_a_saved_model_predicts_what_its_network_computes(
    run: Path, place: Path, bert: Path
) -> None:
    folder = run / "federated" / "model"
    saved = load_phenotyper(folder)
    assert saved.attention is not None
    (site, *_) = load(place, **tables_of(bert)).data
    assert isinstance(site.test.bags, SubWords)
    chances = saved.attention.predict_probabilities(site.test.bags)

    findings = {
        f.patient: f for f in fn.load(folder).predict_file(place / "a/notes.csv")
    }
    for patient, expected in zip(site.test.patients, chances, strict=True):
        finding = findings[patient]
        assert finding.concepts is None
        assert list(finding.probabilities.values()) == pytest.approx(
            expected.tolist(), abs=2e-6
        )
        is_present = [label == "present" for label in finding.labels.values()]
        assert is_present == (expected >= 0.5).tolist()


def test_a_model_is_scored_by_its_probabilities(run: Path, place: Path) -> None:
    """Areas by scikit-learn, over the patients who have notes."""
    model = fn.load(run / "federated" / "model")
    judged = place / "b" / "judged.csv"
    evaluation = model.evaluate(
        place / "b" / "notes.csv", EvaluationOptions(labels=judged)
    )
    with judged.open() as stream:
        gold = {row["patient"]: row for row in csv.DictReader(stream)}
    findings = model.predict_file(place / "b" / "notes.csv")
    for name in ILLNESSES:
        area = roc_auc_score(
            [int(gold[f.patient][name]) for f in findings],
            [f.probabilities[name] for f in findings],
        )
        found = evaluation.scores["by_output"][name]["auroc"]
        assert found["value"] == pytest.approx(area, abs=1e-6)


@pytest.mark.slow
def test_predictions_do_not_depend_on_workers(run: Path, place: Path) -> None:
    folder = run / "federated" / "model"
    path = place / "c" / "notes.csv"
    assert fn.load(folder, workers=2).predict_file(path) == fn.load(
        folder
    ).predict_file(path)


def test_no_file_of_a_run_holds_a_word_of_the_notes(run: Path) -> None:
    names = {"model", "summary.json"}
    assert names & {path.name for path in run.rglob("*")}
    for path in (run / "federated" / "model").iterdir():
        assert SECRET.encode() not in path.read_bytes()
        assert b"ibuprofen" not in path.read_bytes()


def test_a_moved_encoder_is_named_with_its_remedy(
    run: Path, tmp_path: Path, bert: Path
) -> None:
    """The fingerprint of another encoder differs."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (run / "federated" / "model").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    other = save_bert(tmp_path / "other", seed=1)
    with pytest.raises(MovedError, match="not the one that the model was trained with"):
        fn.load(folder, backbone=str(other))
    assert fn.load(folder, backbone=str(bert)).types == ILLNESSES


# ---- between real sites --------------------------------------------------------------


@pytest.mark.slow
def test_the_server_needs_no_encoder(place: Path, bert: Path) -> None:
    """It knows descriptions of the sites; the model is the same as in one process."""
    needs_app("deployment")
    from fednotes.apps.deployment.site_agreement import derive_config, describe_site

    here = job(place, **tables_of(bert))
    sites = load(place, **tables_of(bert)).data
    descriptions = {site.id: describe_site(here, site) for site in sites}
    of_server = derive_config(here, descriptions)
    assert "encoder" not in of_server.space.recipe
    states = [
        METHOD.train(InProcess([Site(site, config) for site in sites]), config)
        for config in (of_server, METHOD.configure(here.config, sites))
    ]
    assert states[0].tensors.keys() == states[1].tensors.keys()
    for name, value in states[0].tensors.items():
        assert torch.equal(value, states[1].tensors[name]), name


def test_sites_with_different_encoders_are_refused(
    place: Path, bert: Path, tmp_path: Path
) -> None:
    needs_app("deployment")
    from fednotes.apps.deployment.site_agreement import derive_config, describe_site

    other = save_bert(tmp_path / "other", seed=1)
    here = job(place, **tables_of(bert))
    descriptions = {
        f"{number}": describe_site(here, load(place, **tables_of(each)).data[0])
        for number, each in enumerate((bert, other))
    }
    with pytest.raises(DataError, match="different dictionaries or encoders"):
        derive_config(here, descriptions)


# ---- codes ---------------------------------------------------------------------------


def test_without_phenotypes_codes_are_learned(
    place: Path, bert: Path, tmp_path: Path
) -> None:
    tables = tables_of(bert, labelled=False, conditions=["federated"])
    run = tmp_path / "run"
    fn.simulate(job(place, **tables), run)
    (finding,) = fn.load(run / "federated" / "model")(["patient has asthma"])
    assert finding.probabilities.keys() == {"icd10:J45"}
    assert finding.labels == {}
    summary = json.loads((run / "summary.json").read_text("utf-8"))
    codes = [of_site["federated"]["codes"] for of_site in summary["sites"].values()]
    assert all(np.isfinite(each["loss"]) for each in codes)


# ---- refusals ------------------------------------------------------------------------


def test_concepts_cannot_be_attended_to(place: Path, bert: Path) -> None:
    tables = tables_of(bert)
    del tables["text"]
    with pytest.raises(ConfigError, match=r"tunes an encoder: give \[text\]"):
        job(place, **tables)


def test_differential_privacy_is_refused(place: Path, bert: Path) -> None:
    privacy = {"epsilon": 8.0, "rate": 0.5, "unit": "patient"}
    with pytest.raises(ConfigError, match='does not support representation = "atten'):
        job(place, **tables_of(bert, privacy=privacy))


def test_a_job_without_codes_and_phenotypes_is_refused(
    place: Path, bert: Path, tmp_path: Path
) -> None:
    sites = {name: {"notes": f"{name}/notes.csv"} for name in "abc"}
    with pytest.raises(ConfigError, match="no site has phenotypes or codes"):
        fn.simulate(job(place, **tables_of(bert, sites=sites)), tmp_path / "run")


def test_a_misspelt_representation_is_refused_with_the_possible_ones(
    place: Path, bert: Path, tmp_path: Path
) -> None:
    model = {"representation": "atention"}
    tables = tables_of(bert, model=model, conditions=["federated"])
    with pytest.raises(ConfigError, match='"learn", "none" or "attention"'):
        fn.simulate(job(place, **tables), tmp_path / "run")


def test_chunks_longer_than_the_encoder_reads_are_refused(
    place: Path, bert: Path, tmp_path: Path
) -> None:
    model = {**MODEL, "attention": {"length": 500}}
    with pytest.raises(ConfigError, match="length = 500: the encoder reads only 62"):
        fn.simulate(job(place, **tables_of(bert, model=model)), tmp_path / "run")


def test_scikit_learn_cannot_run_a_tuned_encoder(
    run: Path,
    tmp_path: Path,
    run_cli: Callable[..., tuple[int, str, str]],
) -> None:
    model = run / "federated" / "model"
    code, _, err = run_cli("export", "sklearn", model, tmp_path / "out")
    assert code != 0
    assert "scikit-learn cannot run" in err
