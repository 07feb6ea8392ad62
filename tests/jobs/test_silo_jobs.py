"""Silos of annotated corpora: every part shared out, nothing lost, what cannot be is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fednotes.core.errors import ConfigError
from fednotes.core.settings import read_toml
from fednotes.data.notes.sites import assign
from fednotes.jobs.job import Sites, load_sites
from fednotes.jobs.job_file import built_in_jobs, load_job, parse_job

DRUGS = "aspirin metformin ibuprofen warfarin insulin statin codeine heparin".split()
FINDINGS = "rash nausea cough fever pain ulcer cramps vertigo".split()


def conll(path: Path, first: int, number: int) -> str:
    """Sentences `Case <i> took <drug> and had <finding> .`, of one document each three."""
    lines = []
    for i in range(first, first + number):
        if (i - first) % 3 == 0:
            lines.append(f"# newdoc id = d{i}")
        words = f"Case {i} took {DRUGS[i % 8]} and had {FINDINGS[i // 8 % 8]} .".split()
        tags = ["O", "O", "O", "B-Drug", "O", "O", "B-ADE", "O"]
        lines += [f"{word} {tag}" for word, tag in zip(words, tags, strict=True)] + [""]
    path.write_text("\n".join(lines) + "\n")
    return path.name


def silos(folder: Path, table: dict[str, Any], **sites: dict[str, Any]) -> Sites:
    job = {"method": "fedner", "model": {"hashed_words": 8}, "silos": table, "sites": sites}
    return load_sites(parse_job(job, "j", folder, "j.toml"))


def ids(sites: Sites, part: str) -> list[set[str]]:
    return [{document.id for document in getattr(site, part)} for site in sites.data]


def test_silos_share_out_every_part_by_document(tmp_path: Path) -> None:
    """`assign` on the documents of the undealt site, part by part, as the job's table says."""
    name = conll(tmp_path / "all", 0, 180)
    site = {"path": name, "split": "document", "scheme": "BIOES"}
    table = {"method": "fedner", "model": {"hashed_words": 8}, "sites": {"a": site}}
    (whole,) = load_sites(parse_job(table, "j", tmp_path, "j.toml")).data
    made = silos(tmp_path, {"number": 3}, a=site)
    assert [s.id for s in made.data] == ["silo1", "silo2", "silo3"]
    assert {s.tags for s in made.data} == {whole.tags}
    for part in ("train", "valid", "test"):
        given = getattr(whole, part)
        where = assign([("document", "a", d.id) for d in given], 3, 1)
        expected = [{k[2] for k, silo in where.items() if silo == i} for i in range(3)]
        assert ids(made, part) == expected
        assert sum(len(getattr(s, part)) for s in made.data) == len(given)
    assert made.complete is None
    assert made.notes[-1] == "documents in 3 silos: train 42, valid 6, test 12"


def test_two_corpora_are_one_pool_and_sentences_stay_with_their_document(tmp_path: Path) -> None:
    a, b = conll(tmp_path / "a", 0, 90), conll(tmp_path / "b", 200, 60)
    asked = {"split": "sentence"}
    made = silos(tmp_path, {"number": 4}, a=asked | {"path": a}, b=asked | {"path": b})
    notes = [{(d.text.split()[1], d.meta["document"]) for d in s.train} for s in made.data]
    sources = [{(int(case) >= 200, note) for case, note in own} for own in notes]
    assert sum(map(len, sources)) == len(set().union(*sources))  # none in two silos
    assert all({large for large, _ in own} == {False, True} for own in sources)
    assert sum(len(s.train) for s in made.data) == 63 + 42


def test_a_patients_documents_stay_together(tmp_path: Path) -> None:
    lines = [
        {"text": f"took aspirin {i}", "spans": [{"start": 5, "end": 12, "label": "Drug"}]}
        | ({"patient": f"p{i % 10}"} if i % 2 else {})
        for i in range(60)
    ]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
        lines = [line | {"text": line["text"] + " more"} for line in lines]
    site = {"train": "train.jsonl", "test": "test.jsonl", "valid_fraction": 0}
    made = silos(tmp_path, {"number": 5, "by": "patient"}, a=site)
    patients = [{d.patient for d in s.train if d.patient} for s in made.data]
    assert sum(map(len, patients)) == len(set().union(*patients)) == 5
    assert sum(len(s.train) for s in made.data) == 60
    assert [s.valid for s in made.data] == [()] * 5  # no site has any: no silo has
    assert made.notes[-1] == "patients in 5 silos: train 35, test 35"


@pytest.mark.parametrize(
    ("table", "a", "b", "message"),
    [
        ({"number": 5}, {}, None, r"number = 5: the valid data have 3 documents, .* 3 silos at"),
        ({"number": 40}, {}, None, r"the train data have 21 documents, .* or give more documents"),
        ({}, {"types": ["Drug"]}, {"types": ["ADE"]}, "'a' annotates Drug, and 'b' ADE: give"),
        ({}, {}, {"types": ["ADE"]}, "'a' annotates ADE, Drug, and 'b' ADE: give both"),
        ({}, {"scheme": "IO"}, {}, "'a' has the scheme IO, and 'b' BIO: give both"),
        (
            {},
            {"types": ["ADE"], "test_types": ["ADE", "Drug"]},
            {"types": ["ADE"]},
            "'a' is tested on ADE, Drug, and 'b' ADE",
        ),
    ],
)
def test_what_cannot_be_dealt_out_is_named(
    tmp_path: Path, table: dict[str, Any], a: dict[str, Any], b: dict[str, Any], message: str
) -> None:
    site = {"path": conll(tmp_path / "all", 0, 90), "split": "document"}
    sites = {"a": site | a} | ({"b": site | b} if b is not None else {})
    with pytest.raises(ConfigError, match=r"\[silos\].*" + message):
        silos(tmp_path, table, **sites)


def test_generated_sites_are_dealt_out_with_all_their_types() -> None:
    table = {
        "method": "fedner", "model": {"hashed_words": 8},
        "synthetic": {"sites": 2, "sentences": 60}, "silos": {"number": 2},
    }  # fmt: skip
    made = load_sites(parse_job(table, "j", Path(), "j.toml"))
    whole = load_sites(
        parse_job({k: v for k, v in table.items() if k != "silos"}, "j", Path(), "j.toml")
    )
    assert whole.complete is not None
    assert {s.tags for s in made.data} == {s.tags for s in whole.complete}
    for part in ("train", "valid", "test"):
        dealt = [d.id for s in made.data for d in getattr(s, part)]
        assert sorted(dealt) == sorted(d.id for s in whole.complete for d in getattr(s, part))


@pytest.mark.corpora
@pytest.mark.parametrize(("name", "sizes"), [("maccrobat", (136, 21, 43)), ("bc5cdr", (500,) * 3)])
def test_the_built_in_jobs_of_fine_tuning_load(
    corpora: Path, name: str, sizes: tuple[int, ...]
) -> None:
    """Which method would train on them is of no account here."""
    path = built_in_jobs()[f"bert/{name}"]
    stub = {"method": "fedner", "preset": "best", "model": {"hashed_words": 8}, "training": {}}
    made = load_sites(parse_job(read_toml(path) | stub, name, path.parent, str(path)))
    expected = ("Chemical", "Disease") if name == "bc5cdr" else ("problem", "test", "treatment")
    assert [s.tags.types for s in made.data] == [expected] * 5
    for part, size in zip(("train", "valid", "test"), sizes, strict=True):
        notes = [{d.meta.get("document", d.id) for d in getattr(s, part)} for s in made.data]
        assert sum(map(len, notes)) == size
        assert max(map(len, notes)) - min(map(len, notes)) <= 1


def test_the_papers_jobs_of_fine_tuning_train_on_every_training_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On invented records of which the test data repeat some: nothing is held out or dropped."""
    folders = {
        "2010": ("concept_assertion_relation_training_data", "reference_standard_for_test_data"),
        "2012": (
            "2012-07-15.original-annotation.release",
            "2012-08-08.test-data.event-timex-groundtruth/xml",
        ),
    }
    monkeypatch.setenv("I2B2_2010", str(tmp_path))
    monkeypatch.setenv("I2B2_2012", str(tmp_path))
    labels = ("PROBLEM", "TEST", "TREATMENT", "CLINICAL_DEPT", "EVIDENTIAL", "OCCURRENCE")
    for year, parts in folders.items():
        for part, number in zip(parts, (12, 7), strict=True):
            (tmp_path / part).mkdir(parents=True)
            for i in range(number):
                words = [f"w{i}{label.lower()}" for label in labels]
                text = "\n".join(words) + "\n"
                file = tmp_path / part / f"r{i}"
                if year == "2010":
                    file.with_suffix(".txt").write_text(text)
                    concepts = zip(words, ("problem", "test", "treatment"), strict=False)
                    file.with_suffix(".con").write_text(
                        "".join(
                            f'c="{word}" {at}:0 {at}:0||t="{label}"\n'
                            for at, (word, label) in enumerate(concepts, 1)
                        )
                    )
                    continue
                events = "".join(
                    f'<EVENT id="E{at}" start="{text.index(word) + 1}" '
                    f'end="{text.index(word) + 1 + len(word)}" text="{word}" '
                    f'modality="FACTUAL" polarity="POS" type="{label}" />\n'
                    for at, (word, label) in enumerate(zip(words, labels, strict=True))
                )
                file.with_suffix(".xml").write_text(
                    '<?xml version="1.0" encoding="UTF-8" ?>\n'
                    "<ClinicalNarrativeTemporalAnnotation>\n"
                    f"<TEXT><![CDATA[\n{text}]]></TEXT>\n<TAGS>\n{events}</TAGS>\n"
                    "</ClinicalNarrativeTemporalAnnotation>\n"
                )
        made = load_sites(load_job(f"bert/i2b2-{year}"))
        assert [len(site.valid) for site in made.data] == [0] * 5
        for part, number in (("train", 12), ("test", 7)):
            documents = [d for site in made.data for d in getattr(site, part)]
            assert len({d.id for d in documents}) == len(documents) == number
            assert sum(len(d.spans) for d in documents) == number * (3 if year == "2010" else 6)
