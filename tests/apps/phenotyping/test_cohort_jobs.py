"""Jobs on patients: files of notes, codes and labels become the patients of each site.

The expected values are read off small files that are written here, or are identities:
all silos together have the patients of the site.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from applications import needs_app
from patient_files import SECRET, everyone, job, load, parts, write, write_terms

from fednotes.apps.phenotyping.cohort import (
    Bags,
    Vectors,
    compute_site_fingerprint,
    pool_sites,
)
from fednotes.cli import app
from fednotes.core.errors import ConfigError, DataError, FednotesError
from fednotes.core.settings import read_toml
from fednotes.data.text import Passage
from fednotes.jobs.built_in_jobs import list_built_in_jobs
from fednotes.jobs.job import Job, Sites, load_sites
from fednotes.jobs.job_file import load_job, parse_job
from fednotes.jobs.run_folder import read_job_record, record_inputs

TERMS = ("asthma", "gout", "cough", "fever")  # concepts C0000000 …, in this order
CONCEPTS = {"dictionary": "terms.tsv"}
PHENOTYPES = {"hypertension": ["icd9:401"], "gout": ["icd9:274", "icd9proc:81"]}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Write a dictionary of four terms, and 30 patients with notes and MIMIC-III codes.

    Patient i has i % 4 mentions. Every third has hypertension (401). Patients
    0 to 4 have no codes, and three patients in the tables of codes have no notes.
    """
    write_terms(tmp_path, *TERMS)
    write_notes(tmp_path / "notes.csv", range(30))
    coded = [f"{i},{i},{'5715' if i % 3 else '4019'}" for i in range(5, 33)]
    head = "ROW_ID,SUBJECT_ID,ICD9_CODE"
    write(tmp_path / "DIAGNOSES_ICD.csv", head, [*coded, "9,9", "10,10,"])
    write(tmp_path / "PROCEDURES_ICD.csv", head, ["1,7,8154"])
    write(tmp_path / "CPTEVENTS.csv", "ROW_ID,SUBJECT_ID,CPT_CD", ["1,7,99254"])
    return tmp_path


def write_notes(path: Path, numbers: range) -> None:
    rows = [
        f'{i},"{SECRET} has {" and ".join(TERMS[: i % 4]) or "nothing"}."'
        for i in numbers
    ]
    write(path, "patient,text", rows)


SITE = {"notes": "notes.csv", "codes": ".", "codes_format": "mimic"}


def test_patients_have_the_notes_codes_and_labels_of_the_files(place: Path) -> None:
    """Bags, labels and codes are those that the files were written with."""
    sites = load(place, sites={"a": SITE}, phenotypes=PHENOTYPES)
    (site,) = sites.data
    assert sorted(everyone(site), key=int) == [str(i) for i in range(30)]
    assert [len(part) for part in parts(site)] == [21, 3, 6]
    assert site.phenotypes == ("hypertension", "gout")
    assert (site.space.width, site.space.dense) == (4, False)
    for part in parts(site):
        assert isinstance(part.bags, Bags)
        for at, patient in enumerate(part.patients):
            i = int(patient)
            concepts = part.bags.concepts[
                part.bags.offsets[at] : part.bags.offsets[at + 1]
            ]
            assert concepts.tolist() == list(range(i % 4))
            expected = [-1, -1] if i < 5 else [int(i % 3 == 0), int(i == 7)]
            assert part.labels[at].tolist() == expected
    assert set(site.codes) == {str(i) for i in range(5, 30)}
    assert site.codes["7"] == {"icd9:5715", "cpt:99254"}
    assert all(site.codes[str(i)] == set() for i in range(6, 30, 3))
    hypertension_codes = [
        code
        for billed in site.codes.values()
        for code in billed
        if code.startswith("icd9:401")
    ]
    assert hypertension_codes == []


def test_counts_of_patients_and_damaged_rows_are_reported(place: Path) -> None:
    notes = load(place, sites={"a": SITE}, phenotypes=PHENOTYPES).remarks
    assert notes[:8] == (
        f"a: {place / 'DIAGNOSES_ICD.csv'}:30: 2 columns instead of 3",
        f"a: {place / 'DIAGNOSES_ICD.csv'}: left out 1 row without a code",
        "a: 30 patients with 30 notes",
        "a: kept 8 patients without a concept of the dictionary in the notes",
        "a: kept 5 patients without codes; the codes count as unknown",
        "a: left out 3 patients with codes but no notes at this site",
        "a: codes held out of stage 1, with the number of patients who had them: icd9:401 8, icd9proc:81 1",
        "a: codes to hold out that no patient has: icd9:274",
    )
    assert SECRET not in "".join(notes)


def test_codes_to_hold_out_that_nobody_has_are_reported(place: Path) -> None:
    sites = load(place, sites={"a": SITE}, phenotypes={"gout": ["icd9:274"]})
    assert (
        "a: codes held out of stage 1, with the number of patients who had them: no patient had any"
    ) in sites.remarks
    assert "a: codes to hold out that no patient has: icd9:274" in sites.remarks


def test_label_counts_cover_the_training_patients(place: Path) -> None:
    sites = load(
        place,
        sites={"a": SITE},
        phenotypes={"hypertension": ["icd9:401"], "x": ["cpt:0"]},
    )
    train = sites.data[0].train
    present, absent, none = (int((train.labels[:, 0] == v).sum()) for v in (1, 0, -1))
    line = "hypertension: present/absent/questionable/unlabelled of the training patients: "
    assert sites.remarks[-3] == f"{line}a {present}/{absent}/0/{none}"
    assert sites.remarks[-1].endswith(
        "without two classes of training labels: x (absent only)"
    )


def test_patients_with_too_many_concepts_are_left_out(place: Path) -> None:
    sites = load(place, sites={"a": SITE}, concepts={**CONCEPTS, "most": 2})
    assert len(everyone(sites.data[0])) == 30 - 7
    assert "a: left out 7 patients with more than 2 concepts" in sites.remarks


def test_codes_or_labels_may_be_missing(place: Path) -> None:
    """Without phenotypes there is no output; without codes stage 1 has nothing to learn."""
    (codes_only,) = load(place, sites={"a": SITE}, hold_out={"codes": ["icd9:57"]}).data
    assert codes_only.phenotypes == ()
    remaining = {code for billed in codes_only.codes.values() for code in billed}
    assert remaining == {"icd9:4019", "icd9proc:8154", "cpt:99254"}
    (notes_only,) = load(place, sites={"a": {"notes": "notes.csv"}}).data
    assert (notes_only.codes, notes_only.phenotypes) == ({}, ())


def test_silos_together_have_all_patients(place: Path) -> None:
    tables = {"sites": {"a": SITE}, "phenotypes": PHENOTYPES}
    (site,) = load(place, **tables).data
    silos = load(place, **tables, silos={"number": 3}).data
    assert [s.id for s in silos] == ["silo1", "silo2", "silo3"]
    for part in ("train", "valid"):
        dealt = [p for s in silos for p in getattr(s, part).patients]
        assert sorted(dealt) == sorted(getattr(site, part).patients)
    assert all(s.test.patients == site.test.patients for s in silos)
    assert all(set(s.codes) == set(everyone(s)) & set(site.codes) for s in silos)
    again = pool_sites(silos)
    assert again.codes == site.codes
    assert again.test.patients == site.test.patients
    only_silo = load(place, **tables, silos={"number": 1}).data[0]
    assert sorted(only_silo.train.patients) == sorted(site.train.patients)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (
            4,
            "the valid data have 3 patients, so a silo would have none: ask for at "
            "most 3 silos, or set valid_fraction higher, or to 0",
        ),
        (
            22,
            "the train data have 21 patients, so a silo would have none: ask for at "
            "most 21 silos, or give more patients",
        ),
    ],
)
def test_more_silos_than_patients_of_a_part_are_refused(
    place: Path, number: int, message: str
) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"[silos] number = {number}: {message}")
    ):
        load(place, sites={"a": SITE}, silos={"number": number})


def test_a_smaller_labelled_share_is_a_subset(place: Path) -> None:
    sets = []
    for share in (0.1, 0.3, 0.5, 1.0):
        site = {**SITE, "labelled": share}
        (loaded,) = load(place, sites={"a": site}, phenotypes=PHENOTYPES).data
        has_label = (loaded.train.labels >= 0).any(1)
        sets.append(
            {p for p, k in zip(loaded.train.patients, has_label, strict=True) if k}
        )
    full = len(sets[-1])
    assert [len(s) for s in sets] == [round(x * full) for x in (0.1, 0.3, 0.5, 1.0)]
    assert all(a < b for a, b in itertools.pairwise(sets))
    assert (loaded.test.labels >= 0).sum() == 2 * sum(
        int(p) >= 5 for p in loaded.test.patients
    )


def test_two_hospitals_may_use_equal_patient_ids(place: Path) -> None:
    (place / "b").mkdir()
    write_notes(place / "b" / "notes.csv", range(20, 40))
    loaded = load(place, sites={"a": SITE, "b": {**SITE, "notes": "b/notes.csv"}})
    assert any(
        "b: 10 patient ids also occur at another site, where" in line
        for line in loaded.remarks
    )
    assert set(everyone(loaded.data[1])) == {f"b/{i}" for i in range(20, 40)}
    assert set(loaded.data[1].codes) == {f"b/{i}" for i in range(20, 33)}
    assert len(everyone(pool_sites(loaded.data))) == 50


def test_ids_that_cross_between_sites_are_counted(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain loops count ids: b shares ten with a, c ten with b, and d none.

    `check` warns of them.
    """
    numbers = {
        "a": range(30),
        "b": range(20, 50),
        "c": range(40, 60),
        "d": range(60, 80),
    }
    for name, ids in numbers.items():
        write_notes(place / f"{name}.csv", ids)
    sites = {name: {"notes": f"{name}.csv"} for name in numbers}
    loaded = load(place, sites=sites)
    ids = [
        [{int(p.rpartition("/")[2]) for p in c.patients} for c in parts(s)]
        for s in loaded.data
    ]
    crossed = []
    for (train, valid, test), (train2, valid2, test2) in itertools.pairwise(ids[:3]):
        crossed.append(len((train | valid) & test2 | test & (train2 | valid2)))
    assert min(crossed) > 0
    assert [line for line in loaded.remarks if line.startswith("warning: ")] == [
        f"warning: {name}: 10 patient ids also occur at another site, where they count "
        f"as other patients; if they are the same people, {number} of them are trained "
        "on at one site and tested at another"
        for name, number in zip("bc", crossed, strict=True)
    ]
    together = [p for site in loaded.data for p in everyone(site)]
    assert len(together) == len(set(together)) == 100
    # a common test part is none
    apart = {name: {**sites[name], "test": "d.csv"} for name in "ac"}
    assert not any("warning" in line for line in load(place, sites=apart).remarks)
    table = 'codes = "."\ncodes_format = "mimic"\n'
    tables = "".join(f'[sites.{n}]\nnotes = "{n}.csv"\n{table}' for n in "ab")
    # or a simulation would refuse them, and so the check
    few = "[training]\nmin_patients = 1\nminimum = 1\n"
    head = 'method = "phenotype"\nconditions = ["federated"]\n[concepts]\ndictionary = "terms.tsv"\n'
    (place / "job.toml").write_text(head + few + tables)
    monkeypatch.setattr(sys, "argv", ["fednotes", "check", str(place / "job.toml")])
    app.main()
    caught = capsys.readouterr()
    messages = (caught.out + caught.err).splitlines()
    assert sum(line.startswith("warning: b: 10 patient ids") for line in messages) == 1
    assert not any(line.startswith("note: warning") for line in messages)
    assert SECRET not in caught.out + caught.err


def test_generated_patients_need_no_file(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    generated_job = job(tmp_path, synthetic={"sites": 2, "patients": 40})
    loaded = load_sites(
        generated_job, lambda done, total: calls.append((done, total)), tmp_path
    )
    assert [s.id for s in loaded.data] == ["site1", "site2"]
    assert len(loaded.data[0].phenotypes) == 6
    sizes = [len(everyone(s)) for s in loaded.data]
    # A patient has one to three notes.
    ends = [done for done, total in calls if done == total]
    for size, notes in zip(sizes, ends, strict=True):
        assert size < notes < 3 * size
    again = load(tmp_path, synthetic={"sites": 2, "patients": 40})
    assert [compute_site_fingerprint(s) for s in loaded.data] == [
        compute_site_fingerprint(s) for s in again.data
    ]
    dealt = load(tmp_path, synthetic={"sites": 2, "patients": 40}, silos={"number": 3})
    assert sorted(everyone(pool_sites(dealt.data))) == sorted(
        p for s in loaded.data for p in everyone(s)
    )


def test_a_run_on_other_patients_is_not_resumed(place: Path) -> None:
    first_job, out = job(place, sites={"a": SITE}, concepts=CONCEPTS), place / "out"
    sites = load_sites(first_job, cache=place / "cache")
    record_inputs(first_job, out, sites, resume=False)
    assert read_job_record(out)["notes"] == {
        "a": compute_site_fingerprint(sites.data[0])
    }
    (out / "metrics.jsonl").write_text("{}\n")
    record_inputs(first_job, out, load_sites(first_job, cache=None), resume=True)
    (place / "CPTEVENTS.csv").write_text("ROW_ID,SUBJECT_ID,CPT_CD\n1,8,99254\n")
    with pytest.raises(ConfigError, match="the notes of site 'a' have changed"):
        record_inputs(
            first_job, out, load_sites(first_job, cache=place / "cache"), resume=True
        )


@pytest.mark.parametrize(
    ("tables", "error", "message"),
    [
        (
            {"sites": {"a": {"notes": "none"}}},
            DataError,
            "site 'a': .*none: no such file",
        ),
        ({"sites": {"a": {"notes": "$NO_SUCH/x"}}}, ConfigError, "NO_SUCH is not set"),
        (
            {
                "sites": {"a": {"notes": ["$NO_SUCH/x"], "labels": "$NO_LABELS"}},
                "concepts": {"dictionary": "$NO_TERMS/MRCONSO.RRF"},
            },
            ConfigError,
            r"NO_LABELS \(sites\.a\.labels\), NO_SUCH \(sites\.a\.notes\), NO_TERMS "
            r"\(concepts\.dictionary\); for example: export NO_LABELS=/path/to/folder",
        ),
        (
            {"concepts": {"dictionary": "no.obo"}},
            DataError,
            r"\[concepts\] dictionary: .*no\.obo",
        ),
        (
            {"concepts": {**CONCEPTS, "ids": "x"}},
            ConfigError,
            r"option 'ids' does not apply to format",
        ),
        (
            {"sites": {"a": {**SITE, "tables": ["cp"]}}},
            ConfigError,
            "'cp'.*did you mean 'cpt'",
        ),
        (
            {"sites": {"a": {**SITE, "notes": "other.csv"}}},
            DataError,
            "none of the 28 patients",
        ),
        (
            {"sites": {"a": {**SITE, "test": "notes.csv"}}},
            DataError,
            "30 patients of test are",
        ),
        (
            {"sites": {"a": SITE, "b": {"labels": "obesity"}}},
            DataError,
            "have different phenotypes",
        ),
        (
            {"sites": {"a": {"notes": "few.csv"}}},
            DataError,
            "site 'a': the part .* has no patient",
        ),
    ],
)
def test_an_error_names_the_place_of_a_mistake(
    place: Path, tables: dict[str, Any], error: type[Exception], message: str
) -> None:
    write_notes(place / "other.csv", range(100, 110))
    write_notes(place / "few.csv", range(2))
    obesity(place)
    with pytest.raises(error, match=message) as caught:
        load(place, **{"sites": {"a": SITE}, **tables})
    assert SECRET not in str(caught.value)


def obesity(place: Path, train: int = 8) -> Path:
    """Write summaries of the challenge, four of them in its test part, judged for gout."""
    folder = place / "obesity"
    folder.mkdir(exist_ok=True)
    for part, first, last in (("training", 1, train), ("test", train + 1, train + 4)):
        ids = range(first, last + 1)
        docs = "".join(
            f'<doc id="{i}"><text>{SECRET} has gout.</text></doc>' for i in ids
        )
        (folder / f"obesity_patient_records_{part}.xml").write_text(
            f"<root>{docs}</root>"
        )
        judged = "".join(
            f'<doc id="{i}" judgment="{"YNQ"[i % 3]}"/>' for i in ids if i != 8
        )
        (folder / f"obesity_standoff_annotations_{part}.xml").write_text(
            f'<set><diseases source="intuitive"><disease name="Gout">{judged}</disease></diseases>'
            "</set>"
        )
    return folder


def test_labels_of_the_obesity_challenge_are_read(place: Path) -> None:
    obesity(place)
    site = {"labels": "obesity", "valid_fraction": 0.25}
    loaded = load(place, sites={"o": site})
    (challenge_site,) = loaded.data
    assert challenge_site.test.patients == ("9", "10", "11", "12")
    assert (
        len(challenge_site.train),
        len(challenge_site.valid),
        challenge_site.codes,
    ) == (6, 2, {})
    at = challenge_site.phenotypes.index("Gout")
    labels = {p: int(c.labels[r, at]) for c in (challenge_site.train, challenge_site.valid, challenge_site.test)
              for r, p in enumerate(c.patients)}  # fmt: skip
    values = {0: 1, 1: 0, 2: 2}
    assert labels == {str(i): values[i % 3] if i != 8 else -1 for i in range(1, 13)}
    assert "o: 1 patient without a label for any phenotype" in loaded.remarks
    assert any("Asthma (no label)" in line for line in loaded.remarks)


def test_output_of_ctakes_can_replace_notes(place: Path) -> None:
    rows = [f"{i} C0000000 -C0000001 C0000003 C0009999" for i in range(30)]
    (place / "found.txt").write_text("\n".join(rows) + "\n")
    loaded = load(place, sites={"a": {**SITE, "notes": [], "concepts": "found.txt"}, "b": {
        "notes": "notes.csv"}})  # fmt: skip
    (first, second) = loaded.data
    assert first.space == second.space
    assert isinstance(first.train.bags, Bags)
    assert first.train.bags.concepts.tolist() == [0, 3] * len(first.train)
    assert "a: left out 30 CUIs not in the dictionary" in loaded.remarks
    (place / "found.txt").write_text("1 C0099999\n2 C0099998\n")
    with pytest.raises(
        DataError, match="none of the 2 CUIs is a concept of the dictionary"
    ):
        load(place, sites={"a": {"concepts": "found.txt"}})


@pytest.mark.slow
@pytest.mark.corpora
def test_codiesp_has_the_counted_patients_and_codes(
    corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 750 cases, 104 have no concept that holds for the patient; grep counts codes.

    grep -cP '^\\S+\\ti10$' codiesp/train/trainD.tsv → 77 of 500, dev 39 of 250.
    """
    needs_app("experiments")
    monkeypatch.setenv("FEDNOTES_CORPORA", str(corpora))

    def built_in(name: str) -> Sites:
        path = list_built_in_jobs()[f"phenotype/{name}"]
        table = {**read_toml(path), "method": "phenotype", "training": {}, "model": {}}
        return load_sites(
            parse_job(table, name, path.parent, str(path)), cache=tmp_path
        )

    both_stages, codes = built_in("codiesp"), built_in("codiesp-codes")
    assert "codiesp: 750 patients with 750 notes" in both_stages.remarks
    line = "codiesp: kept 104 patients without a concept of the dictionary in the notes"
    assert line in both_stages.remarks
    together = pool_sites(both_stages.data)
    assert (len(together.train), len(together.valid), len(together.test)) == (
        450,
        50,
        250,
    )
    present = [
        (c.labels == 1).sum(0) for c in (together.train, together.valid, together.test)
    ]
    at = together.phenotypes.index("hypertension")
    assert (present[0][at] + present[1][at], present[2][at]) == (77, 39)
    assert min(present[2]) >= 10
    alone = pool_sites(codes.data)
    assert (len(codes.data), alone.phenotypes) == (10, ())
    assert alone.codes == together.codes
    assert alone.space == together.space
    assert not any(
        c.startswith("icd10:I10") for billed in together.codes.values() for c in billed
    )


def test_jobs_of_the_paper_load(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invented files: 200 patients of MIMIC-III, 44 summaries, a UMLS with one term."""
    needs_app("experiments")
    rows = [f"{i},{i},Nursing,,{SECRET} has gout" for i in range(200)]
    head = "ROW_ID,SUBJECT_ID,CATEGORY,ISERROR,TEXT"
    (place / "NOTEEVENTS.csv").write_text("\n".join([head, *rows]) + "\n")
    row = "C0018099|ENG|P|L|PF|S|Y|A||M|D|SNOMEDCT_US|PT|1|Gout|0|N||"
    (place / "MRCONSO.RRF").write_text(row + "\n")
    (place / "cuis.txt").write_text("C0018099 1 2\n")
    for name, folder in (
        ("CONCEPT_VECTORS", place / "cuis.txt"),
        ("MIMIC_III", place),
        ("UMLS_RRF", place),
        ("I2B2_OBESITY", obesity(place, 40)),
    ):
        monkeypatch.setenv(name, str(folder))
    assert load_job("phenotype/obesity").sites["obesity"].judgment == "intuitive"
    sizes = []
    for name in ("mimic", "obesity"):
        path = list_built_in_jobs()[f"phenotype/{name}"]
        table = {**read_toml(path), "method": "phenotype", "training": {}, "model": {}}
        loaded = load_sites(
            parse_job(table, name, path.parent, str(path)), cache=place / "cache"
        )
        together = pool_sites(loaded.data)
        parts = [len(part) for part in (together.train, together.valid, together.test)]
        sizes.append((len(loaded.data), parts, len(together.codes)))
        assert (together.vectors is None) == (name == "obesity")
    # nobody is held out of training
    assert sizes == [(10, [200, 0, 0], 28), (3, [40, 0, 4], 0)]


LINES = ["C0000002 1 2", "C0000000 3 4", "C9999999 7 7"]


def of_vectors(
    place: Path, lines: Sequence[str], vectors: str = "cuis.txt"
) -> tuple[Job, Sites]:
    """Load two silos of a job that names a file of public concept vectors."""
    write(place / "cuis.txt", "", lines)
    tables = {
        **{"preset": "paper", "silos": {"number": 2}, "sites": {"a": SITE}},
        "concepts": {**CONCEPTS, "vectors": vectors},
        "training": {
            "minimum": 1,
            "least_occurrences": 1,
            "cycles": 1,
            "systems": ["icd9"],
        },
        "model": {"network": {"embedding": 2, "hidden": 3, "length": 0}},
    }
    return job(place, **tables), load(place, **tables)


def test_vectors_of_concepts_reach_every_silo(place: Path) -> None:
    """Vectors follow the order of the dictionary; other words are left out."""
    vectors_job, loaded = of_vectors(place, LINES)
    assert len(loaded.data) == 2
    for site in loaded.data:
        assert site.vectors.concepts.tolist() == [0, 2]
        assert site.vectors.values.tolist() == [[3, 4], [1, 2]]
    assert any(
        "2 of the dictionary's concepts have a vector" in line
        for line in loaded.remarks
    )
    assert vectors_job.module.configure(vectors_job.config, loaded.data).vectors
    other_vectors, without = of_vectors(place, LINES, "")
    assert all(site.vectors is None for site in without.data)
    assert not other_vectors.module.configure(
        other_vectors.config, without.data
    ).vectors
    # Notes are read alike whatever training starts from.
    assert loaded.data[0].space == without.data[0].space
    with pytest.raises(
        DataError,
        match=r"none of its words is a concept id \(for example C0000000\): check",
    ):
        of_vectors(place, ["aspirin 1 2"])
    with pytest.raises(ConfigError, match="NOWHERE is not set"):
        of_vectors(place, LINES, "$NOWHERE")


def test_real_sites_must_have_equal_vectors(place: Path) -> None:
    """Sites compare digests before round 1."""
    needs_app("deployment")
    from fednotes.apps.deployment.site_agreement import (
        Description,
        derive_config,
        describe_site,
    )

    vectors_job, loaded = of_vectors(place, LINES)
    description = describe_site(vectors_job, loaded.data[0])
    assert description.vectors == loaded.data[0].vectors.digest
    assert len(description.vectors) == 64
    assert derive_config(vectors_job, {"a": description, "b": description}).vectors
    _, others = of_vectors(place, [*LINES[:2], "C0000003 5 5"])
    other_description = describe_site(vectors_job, others.data[0])
    assert other_description.vectors != description.vectors
    for theirs in (
        other_description,
        Description(**{**vars(description), "vectors": ""}),
    ):
        with pytest.raises(DataError, match=r"different \[concepts\] vectors"):
            derive_config(vectors_job, {"a": description, "b": theirs})


def test_vectors_of_concepts_can_come_from_an_encoder(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder gives each word its length; the mean is worked out here."""

    class Lengths:
        fingerprint, layers, dim = "lengths", 1, 2

        def encode(self, sentences: list[Passage]) -> np.ndarray:
            words = [word for sentence in sentences for word in sentence.forms]
            return np.array([[[len(w), 1]] for w in words], dtype=np.float16)

    monkeypatch.setattr(
        "fednotes.apps.phenotyping.features.load_encoder", lambda spec: Lengths()
    )
    (site,) = load(
        place, sites={"a": {"notes": "notes.csv"}}, text={"encoder": "x"}
    ).data
    assert (site.space.width, site.space.dense) == (2, True)
    assert isinstance(site.train.bags, Vectors)
    for row, patient in enumerate(site.train.patients):
        terms = " and ".join(TERMS[: int(patient) % 4]) or "nothing"
        sizes = [len(w) for w in f"{SECRET} has {terms} .".split()]
        assert site.train.bags.values[row].tolist() == pytest.approx(
            [np.mean(sizes), 1]
        )
    with pytest.raises(FednotesError, match="concepts cannot be combined with"):
        job(place, sites={"a": {"concepts": "x"}}, text={"encoder": "x"})
