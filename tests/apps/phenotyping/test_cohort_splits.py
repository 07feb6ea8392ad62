"""Jobs on patients: parts and silos follow the seed; sites may have nothing to train.

The expected values are counts of files that are written here, and what `cohort.deal`
makes of the patients of the same job without silos.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from patient_files import job, load, parts, write, write_terms

from fednotes.apps.phenotyping.cohort import Cohort, SitePatients, deal_cohort
from fednotes.core.errors import FednotesError
from fednotes.jobs.simulate import simulate

TERMS = ("asthma", "gout", "cough", "fever", "nausea", "rash")
CODES = ("4019", "25000", "4280")
PARTS = ("train", "valid", "test")


def write_notes(path: Path, numbers: range, terms: bool = True) -> None:
    """Write notes: patient i has three terms, of which an even i has only 0 and 1."""
    rows = []
    for i in numbers:
        mentioned = [
            TERMS[(i + k) % 6 if i % 2 else k % 2 + 2 * (k > 1)] for k in range(3)
        ]
        rows.append(f"{i},Known {' and '.join(mentioned) if terms else 'nothing'}.")
    write(path, "patient,text", rows)


def write_codes(path: Path, numbers: range) -> None:
    rows = [f"{i},{CODES[k % 3]}" for i in numbers for k in (i, i + 1 + i % 2)]
    write(path, "patient,icd9_code", rows)


def write_labels(path: Path, numbers: range) -> None:
    rows = [f"{i},{i % 2},{int(i % 3 == 0)}" for i in numbers]
    write(path, "patient,asthma,gout", rows)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Write 60 training and 12 test patients with codes and labels."""
    write_terms(tmp_path, *TERMS)
    write_notes(tmp_path / "notes.csv", range(60))
    write_notes(tmp_path / "test.csv", range(60, 72))
    write_codes(tmp_path / "codes.csv", range(72))
    write_labels(tmp_path / "labels.csv", range(72))
    return tmp_path


SITE = {
    **{"notes": "notes.csv", "codes": "codes.csv", "codes_format": "table"},
    **{"system": "icd9", "labels": "labels.csv"},
}
TRAINING = {
    **{"cycles": 2, "classifier_cycles": 2, "minimum": 5, "min_patients": 0},
    **{"systems": ["icd9"], "batch_size": 8},
}
TABLES = {"training": TRAINING, "model": {"network": {"embedding": 4, "hidden": 6}}}


def sites_of(folder: Path, seed: int = 1, **tables: Any) -> tuple[SitePatients, ...]:
    return tuple(load(folder, seed, **TABLES, **tables).data)


def members(site: SitePatients) -> list[tuple[str, ...]]:
    return [part.patients for part in parts(site)]


def known(cohort: Cohort) -> set[str]:
    rows = np.flatnonzero((cohort.labels >= 0).any(axis=1))
    return {cohort.patients[row] for row in rows.tolist()}


# ---- the job's seed


def test_parts_depend_on_the_seed(place: Path) -> None:
    """The same seed gives the same parts, another seed others, also with a test part."""
    for site in (SITE, {**SITE, "test": "test.csv", "valid_fraction": 0.3}):
        first, again, reseeded = (
            sites_of(place, seed, sites={"a": site})[0] for seed in (1, 1, 2)
        )
        assert members(first) == members(again)
        for part in PARTS[: 2 if "test" in site else 3]:
            ours, theirs = (set(getattr(s, part).patients) for s in (first, reseeded))
            assert len(ours) == len(theirs) > 0
            assert ours != theirs
        assert (set(first.test.patients) == set(reseeded.test.patients)) == (
            "test" in site
        )


def test_held_out_patients_are_dealt_by_the_seed(place: Path) -> None:
    """They are dealt by the job's seed; another seed gives other silos."""
    site = {**SITE, "test": "test.csv", "valid_fraction": 0.4}
    for seed in (1, 2):
        (undealt,) = sites_of(place, seed, sites={"a": site})
        silos = sites_of(place, seed, sites={"a": site}, silos={"number": 3})
        for part in ("train", "valid"):
            dealt = [getattr(silo, part).patients for silo in silos]
            expected, others = (
                deal_cohort(getattr(undealt, part), 3, s) for s in (seed, 0)
            )
            assert dealt == [each.patients for each in expected]
            assert dealt != [each.patients for each in others]


def test_only_training_patients_lose_their_labels(place: Path) -> None:
    """A third of the training labels stays; valid and test patients keep all labels."""
    site = {**SITE, "test": "test.csv", "valid_fraction": 0.3}
    (complete,) = sites_of(place, sites={"a": site})
    (part,) = sites_of(place, sites={"a": {**site, "labelled": 1 / 3}})
    assert members(part) == members(complete)
    assert (len(known(complete.train)), len(known(part.train))) == (42, 14)
    for name in ("valid", "test"):
        assert np.array_equal(
            getattr(part, name).labels, getattr(complete, name).labels
        )
    few = {**site, "valid_fraction": 0.0, "labelled": 0.5}
    first, again, reseeded = (
        known(sites_of(place, s, sites={"a": few})[0].train) for s in (1, 1, 2)
    )
    assert first == again != reseeded
    assert len(first) == len(reseeded) == 30


# ---- sites with nothing to train


def run(folder: Path, sites: dict[str, Any], **tables: Any) -> dict[str, Any]:
    small_job = job(folder, sites=sites, **TABLES | tables)
    return simulate(small_job, folder / "run")


def curves(folder: Path, part: str) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [line for text in lines if (line := json.loads(text))["part"] == part]


def judged_alone(place: Path) -> dict[str, dict[str, Any]]:
    """Return sites: complete, with codes, or with labels, of test patients only."""
    for kind, first in (("uncoded", 100), ("unjudged", 200)):
        write_notes(place / f"{kind}.csv", range(first, first + 30))
        write_notes(place / f"{kind}_test.csv", range(first + 30, first + 50))
    write_codes(place / "late_codes.csv", range(130, 150))
    write_labels(place / "some_labels.csv", range(100, 150))
    write_codes(place / "some_codes.csv", range(200, 250))
    write_labels(place / "late_labels.csv", range(230, 250))
    sites: dict[str, dict[str, Any]] = {"all": {**SITE, "test": "test.csv"}}
    for kind, codes, labels in (
        ("uncoded", "late", "some"),
        ("unjudged", "some", "late"),
    ):
        files = {"notes": f"{kind}.csv", "test": f"{kind}_test.csv"}
        files |= {"codes": f"{codes}_codes.csv", "labels": f"{labels}_labels.csv"}
        sites[kind] = SITE | files
    return sites


def test_sites_without_data_of_a_stage_participate(place: Path) -> None:
    """Federated and pooled, every site is scored on both stages."""
    sites = judged_alone(place)
    summary = run(place, sites, conditions=["federated", "pooled"])
    for name in sites:
        for condition in ("federated", "pooled"):
            assert {"codes", "phenotypes"} <= summary.sites[name][condition].keys()
    first, *_, last = curves(place, "federated")
    assert {n for n, scores in first["sites"].items() if "loss" in scores} == {
        "all",
        "unjudged",
    }
    assert {n for n, scores in last["sites"].items() if "loss" in scores} == {
        "all",
        "uncoded",
    }


@pytest.mark.parametrize("name", ["uncoded", "unjudged"])
def test_a_site_with_nothing_to_train_cannot_train_alone(
    place: Path, name: str
) -> None:
    """The error is clear and there is no summary; with others the site can train."""
    sites = judged_alone(place)
    lacks = "with billing codes" if name == "uncoded" else "labelled"
    with pytest.raises(
        FednotesError, match=f"{name!r} has no training patient {lacks}"
    ):
        run(place, {name: sites[name]}, conditions=["alone"])
    assert not (place / "run" / "summary.json").exists()


@pytest.mark.slow
def test_a_site_without_concepts_trains_alone_and_with_others(place: Path) -> None:
    """With one patient per batch; equal scores for all patients have an AUROC of 1/2."""
    write_notes(place / "empty.csv", range(100, 160), terms=False)
    write_codes(place / "empty_codes.csv", range(100, 160))
    write_labels(place / "empty_labels.csv", range(100, 160))
    empty = {
        "notes": "empty.csv",
        "codes": "empty_codes.csv",
        "labels": "empty_labels.csv",
    }
    sites = {"all": SITE, "empty": {**SITE, **empty}}
    summary = run(place, sites, training={**TRAINING, "batch_size": 1})
    for condition in ("alone", "federated", "pooled"):
        scores = summary.sites["empty"][condition]
        assert scores["ranking"]["auroc"] == scores["codes"]["auroc"] == 0.5
        assert summary.sites["all"][condition]["ranking"]["auroc"] != 0.5
