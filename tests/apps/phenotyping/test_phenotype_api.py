"""A saved phenotyping model in the Python API gives the results of the commands."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from patient_files import save_model as save_patients
from typer.testing import CliRunner

import fednotes as fn
from fednotes.cli.app import app
from fednotes.core.errors import ConfigError, DataError, FednotesError
from fednotes.core.types import Document


def test_patients_are_predicted_from_one_or_several_notes(tmp_path: Path) -> None:
    """One note, several, or all of each patient, as `fednotes predict` has them; who
    has no concept has a count of 0. (`test_phenotype_predict.py` has the command.)"""
    place = save_patients(tmp_path / "model", "synthetic", tmp_path, "asthma", "gout")
    model = fn.load(place)
    assert isinstance(model, fn.PatientModel)
    assert model.types == ("asthma", "gout")
    assert "not calibrated" in model.confidence
    of_all = model(
        {"p1": ["Known asthma.", "Known gout."], "p2": "No evidence of gout."}
    )
    prediction = CliRunner().invoke(
        app, ["predict", str(place), "--text", "Known asthma. Known gout."]
    )
    row = json.loads(prediction.stdout)
    assert (of_all[0].probabilities, of_all[0].labels) == (
        row["probabilities"],
        row["labels"],
    )
    assert of_all[0].labels == {"asthma": "present", "gout": "present"}
    assert [(f.patient, f.concepts) for f in of_all] == [("p1", 2), ("p2", 0)]
    assert model("Known asthma.").labels == {"asthma": "present", "gout": "absent"}
    assert [f.patient for f in model(["Known gout.", "Seen today."])] == ["1", "2"]
    findings = model([["Known asthma.", "Known gout."], "Seen today."])
    assert [f.labels for f in findings] == [
        of_all[0].labels,
        model("Seen today.").labels,
    ]
    assert model([]) == model({}) == []
    labelled = [
        {"patient": str(n), "text": t, "labels": {"gout": "present"}}
        for n, t in enumerate(
            ["Known gout.", "No evidence of gout.", "Known gout.", "Seen today."]
        )
    ]
    (tmp_path / "gold.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in labelled)
    )
    evaluation = fn.evaluate(model, tmp_path / "gold.jsonl")
    command = ["evaluate", str(place), str(tmp_path / "gold.jsonl"), "--json"]
    assert evaluation.to_dict() == json.loads(CliRunner().invoke(app, command).stdout)
    assert evaluation.scores["by_output"]["gout"]["present"]["recall"] == 0.5
    for wrong in (lambda: fn.evaluate(model, []), lambda: fn.reliability(model, [])):
        with pytest.raises(ConfigError, match=r"patients|phenotypes"):
            wrong()
    with pytest.raises(ConfigError, match="calibrated in training"):
        fn.calibrate(place, [])
    note = Document("n", "Known asthma.")
    assert model(note) == model(note.text) == model([note])[0] == model([[note]])[0]
    for wrong_notes in ({"p1": [3]}, {"p1": 3}, [3], 3):
        with pytest.raises(DataError, match="not int"):
            model(wrong_notes)  # type: ignore[call-overload]
    with pytest.raises(DataError, match="half a character"):
        model("\ud83d")


def test_patients_are_read_from_tables(tmp_path: Path) -> None:
    place = save_patients(tmp_path / "model", "synthetic", tmp_path, "asthma", "gout")
    path = tmp_path / "notes.csv.gz"
    rows = "1,p,Known asthma.\n2,q,Known gout.\n3,p,Known gout.\n"
    path.write_bytes(gzip.compress(f"id,patient,text\n{rows}".encode()))
    opened = fn.load(place)
    assert isinstance(opened, fn.PatientModel)
    findings = opened.predict_file(path)
    assert {
        f.patient: [n for n, v in f.labels.items() if v == "present"] for f in findings
    } == {
        "p": ["asthma", "gout"],
        "q": ["gout"],
    }
    (tmp_path / "notes.md").write_text("Known gout.")
    with pytest.raises(FednotesError, match="cannot recognise the format"):
        opened.predict_file(tmp_path / "notes.md")
