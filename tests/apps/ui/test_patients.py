"""Patients in the local web UI: errors by phenotype, calibration, weights."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from applications import needs_app
from pages import Tree

pytest.importorskip("starlette")
from starlette.testclient import TestClient

from fednotes.apps.ui.access import Access
from fednotes.apps.ui.background import BackgroundWork
from fednotes.apps.ui.content import Content, load_content
from fednotes.apps.ui.pages import create_app
from fednotes.apps.ui.patient_review import (
    PatientFilter,
    PatientReview,
    judge_presence,
    parse_patient_filter,
)
from fednotes.core.errors import ConfigError
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.patient_reviews import (
    FeatureWeight,
    ReviewedPatient,
    ReviewedPatients,
)
from fednotes.jobs.results import read_result
from fednotes.jobs.simulate import simulate

ROOT = "http://127.0.0.1:8000"
PHENOTYPES = ("gout", "asthma")


def patient(
    name: str,
    gold: dict[str, str],
    gout: float,
    asthma: float | None = 0.1,
    concepts: int | None = 4,
) -> ReviewedPatient:
    """Return a patient whose labels follow from the probabilities."""
    probabilities = {"gout": gout, "asthma": asthma}
    predicted = {
        phenotype: None if p is None else ("present" if p > 0.5 else "absent")
        for phenotype, p in probabilities.items()
    }
    return ReviewedPatient(name, gold, predicted, probabilities, concepts)


WEIGHTS = {
    "gout": (FeatureWeight("uric acid (C1)", 2.5), FeatureWeight("rash (C2)", -1.0))
}
NORTH = ReviewedPatients(
    "north",
    PHENOTYPES,
    [
        patient("n1", {"gout": "present", "asthma": "absent"}, 0.9),
        patient("n2", {"gout": "absent", "asthma": "present"}, 0.8),
        patient("n3", {"gout": "questionable"}, 0.3, asthma=None, concepts=0),
    ],
    "the probability",
    WEIGHTS,
)
SOUTH = ReviewedPatients(
    "south", PHENOTYPES, [patient("s1", {"gout": "present"}, 0.2)], "the probability"
)


def browse(sources: Sequence[ReviewedPatients]) -> TestClient:
    """Return a browser of the pages of some patients, with the cookie."""
    review = PatientReview(sources, "model")
    return browse_content(Content(patients=BackgroundWork(lambda: review)))


def browse_content(content: Content) -> TestClient:
    access = Access()
    browser = TestClient(
        create_app(content, access),
        base_url=ROOT + access.root,
        headers={"origin": ROOT},
    )
    assert browser.get(f"/?token={access.token}").status_code == 200
    return browser


def test_errors_are_counted_by_phenotype_and_linked_to_their_patients() -> None:
    """By hand: of four labels of gout one is right, of two of asthma one."""
    browser = browse([NORTH, SOUTH])
    text = browser.get("/patients").text
    rows = Tree(text).rows
    (gout,) = (row for row in rows if row[0] == "gout" and len(row) > 5)
    (asthma,) = (row for row in rows if row[0] == "asthma" and len(row) > 5)
    # labelled, errors, then label → prediction: errors before what is right
    assert gout[1:] == ["4", "3 (75 %)", "1", "1", "1", "0", "1"]
    assert asthma[1:] == ["2", "1 (50 %)", "0", "1", "0", "1", "0"]
    listed = [row[:4] for row in rows if row[0].startswith(("n", "s"))]
    assert listed == [
        ["n2north", "asthma", "present", "absent"],  # 0.9 from the label
        ["n2north", "gout", "absent", "present"],
        ["s1south", "gout", "present", "absent"],
        ["n3north", "gout", "questionable", "absent"],
    ]
    (address,) = re.findall(
        r'href="/[\w-]{22}(/patients\?[^"]*)#list" aria-label="gout, present, '
        r'predicted absent: 1"',
        text,
    )
    rows = Tree(browser.get(address.replace("&amp;", "&")).text).rows
    assert [row[0] for row in rows if row[0].startswith(("n", "s"))] == ["s1south"]
    rows = Tree(browser.get("/patients?site=south").text).rows
    assert [row[1] for row in rows if row[0] == "gout"] == ["1"]


def test_a_patient_is_shown_with_all_phenotypes() -> None:
    browser = browse([NORTH, SOUTH])
    text = browser.get("/patients/2").text
    assert "<h1>Patient n3</h1>" in text
    assert "say nothing about the patient" in text
    rows = Tree(text).rows[1:]
    assert [row[:3] for row in rows] == [
        ["gout", "questionable", "absent"],
        ["asthma", "not labelled", "–"],
    ]
    assert [row[4] for row in rows] == ["wrong", "–"]
    assert "say nothing" not in browser.get("/patients/0").text
    assert 'rel="prev"' not in browser.get("/patients/0").text
    assert 'rel="next"' not in browser.get("/patients/3").text
    assert browser.get("/patients/4").status_code == 400


def test_calibration_compares_probability_and_presence() -> None:
    """A questionable label is not present; what was not learned is left out."""
    review = PatientReview([NORTH, SOUTH], "model")
    gout = [each for each in review.list_judgments() if each.phenotype == "gout"]
    measured = judge_presence(gout)
    assert measured is not None
    errors = (abs(1 - 0.9), 0.8, 0.3, abs(1 - 0.2))
    assert measured.ece == pytest.approx(sum(errors) / 4)
    assert (measured.spans, measured.documents) == (4, 4)
    text = browse([NORTH, SOUTH]).get("/phenotype?phenotype=gout").text
    assert f"<dd>{measured.ece:.3f}<small>0 is best" in text
    assert ["uric acid (C1)", "+2.500"] in Tree(text).rows
    assert judge_presence([]) is None


def test_weights_are_shown_once_if_all_sites_have_the_same() -> None:
    twin = ReviewedPatients("south", PHENOTYPES, SOUTH.patients, "p", WEIGHTS)
    text = browse([NORTH, twin]).get("/phenotype?phenotype=gout").text
    assert text.count("uric acid") == 1
    other = {"gout": (FeatureWeight("uric acid (C1)", 1.0),)}
    twin = ReviewedPatients("south", PHENOTYPES, SOUTH.patients, "p", other)
    text = browse([NORTH, twin]).get("/phenotype?phenotype=gout").text
    assert text.count("uric acid") == 2
    assert "<h3>south</h3>" in text
    text = browse([NORTH, twin]).get("/phenotype?phenotype=asthma").text
    assert "Single concepts have no weight" in text
    assert "Choose a phenotype" in browse([NORTH]).get("/phenotype").text


def test_impossible_values_in_an_address_of_patients_are_ignored() -> None:
    query = {"kind": "x", "phenotype": "gout", "run": "r" * 501, "page": "2"}
    assert parse_patient_filter(query) == PatientFilter(phenotype="gout")
    browser = browse([NORTH])
    for path in ("/patients?kind=x&page=-1", "/phenotype?phenotype=none"):
        assert browser.get(path).status_code == 200
    assert browser.get("/patients?run=none").status_code == 400
    assert browse_content_without_patients().get("/patients").status_code == 400


def browse_content_without_patients() -> TestClient:
    return browse_content(Content(model=lambda documents: documents))


@pytest.mark.parametrize(
    "hostile",
    ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{ 7 }}"],
)
def test_names_of_patients_and_phenotypes_are_escaped(hostile: str) -> None:
    source = ReviewedPatients(
        hostile,
        (hostile,),
        [
            ReviewedPatient(
                hostile, {hostile: "present"}, {hostile: "absent"}, {hostile: 0.1}
            )
        ],
        hostile,
        {hostile: (FeatureWeight(hostile, 1.0),)},
    )
    browser = browse([source])
    for path in ("/patients", "/patients/0", "/phenotype"):
        text = browser.get(path, params={"phenotype": hostile}).text
        assert hostile not in text or hostile == "{{ 7 }}"
        assert "<img" not in text
        for tag, name, _ in Tree(text).attributes:
            assert not name.startswith("on"), (tag, name)


def test_the_patients_of_a_saved_model_are_shown(tmp_path: Path) -> None:
    """Through the protocol of models of patients; the text of notes is not kept."""
    needs_app("phenotyping")
    from patient_files import save_model

    model = save_model(tmp_path / "model", "synthetic", Path(), "asthma", "gout")
    rows = [
        {"patient": "p1", "text": "Has asthma.", "labels": {"asthma": "present"}},
        {"patient": "p2", "text": "Known gout.", "labels": {"gout": "absent"}},
    ]
    notes = tmp_path / "patients.jsonl"
    notes.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    content = load_content([model, notes])
    assert [name for _, name in content.list_sections()] == ["Patients"]
    browser = browse_content(content)
    assert content.patients is not None
    review = content.patients.get(60)
    assert review is not None
    assert [
        (each.number, each.phenotype, each.is_right) for each in review.list_judgments()
    ] == [(0, "asthma", True), (1, "gout", False)]
    page = browser.get("/patients").text
    assert "Patients in patients.jsonl" in page
    text = browser.get("/phenotype?phenotype=gout").text
    assert any(row[0].startswith("gout (") for row in Tree(text).rows)
    with pytest.raises(ConfigError, match="also give labelled patients"):
        load_content([model])


def test_the_patients_of_a_run_are_shown(tmp_path: Path) -> None:
    """As many errors as its summary says, at each site."""
    needs_app("phenotyping")
    table = {
        "method": "phenotype",
        "seed": 1,
        "conditions": ["federated"],
        "synthetic": {"sites": 2, "patients": 120},
        "model": {"representation": "none"},
        "training": {"classifier_cycles": 1},
    }
    run = tmp_path / "runs" / "clinics"
    simulate(parse_job(table, "tiny", tmp_path, "test"), run)
    browser = browse_content(load_content([run.parent]))
    text = browser.get("/runs/0").text
    assert re.search(r'href="/[\w-]{22}/patients\?run=clinics"', text)
    content = load_content([run])
    assert [name for _, name in content.list_sections()] == ["Runs", "Patients"]
    assert content.patients is not None
    review = content.patients.get(60)
    assert review is not None
    assert review.about == "clinics, federated"
    compared = 0
    for site, scores in read_result(run).sites.items():
        by_phenotype = scores["federated"]["by_output"]
        for row in review.count_errors(site):
            # A phenotype that no model has learned has no scores.
            for label in {"present", "absent"} & {*by_phenotype.get(row.phenotype, ())}:
                gold = sum(n for (name, _), n in row.pairs.items() if name == label)
                assert gold == by_phenotype[row.phenotype][label]["support"]
                right = row.pairs.get((label, label), 0)
                recall = by_phenotype[row.phenotype][label]["recall"]
                assert right == pytest.approx(recall * gold)
                compared += 1
    assert compared > 5
