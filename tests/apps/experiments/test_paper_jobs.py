"""The built-in jobs on the papers' corpora load as their papers state."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from fednotes.core.errors import ConfigError
from fednotes.core.settings import read_toml
from fednotes.data.tags import list_types
from fednotes.jobs.built_in_jobs import list_built_in_jobs
from fednotes.jobs.job import Sites, load_sites
from fednotes.jobs.job_file import load_job, parse_job


def load_built_in(name: str) -> Sites:
    """Return the sites of a built-in job, whatever its method."""
    path = list_built_in_jobs()[name]
    stub = {
        "method": "fedner",
        "preset": "best",
        "model": {"hashed_words": 8},
        "training": {},
    }
    return load_sites(parse_job(read_toml(path) | stub, name, path.parent, str(path)))


def test_the_jobs_of_the_papers_are_listed() -> None:
    assert {"fedner/paper", "fedner/real"} <= set(list_built_in_jobs())


def test_an_error_lists_the_variables_of_a_built_in_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("FEDNOTES_CORPORA", raising=False)
    with pytest.raises(ConfigError) as error:
        load_job("fedner/real")
    message = str(error.value)
    assert "FEDNOTES_CORPORA is not set; for example: export" in message
    assert "model.word_vectors" in message
    assert "sites." in message


@pytest.mark.slow
@pytest.mark.corpora
@pytest.mark.parametrize("name", ["gum", "maccrobat", "mapped"])
def test_the_built_in_jobs_on_heterogeneous_tag_sets_load(
    corpora: Path, name: str
) -> None:
    """Every site can teach its types and is tested on more than it can teach."""
    loaded = load_built_in(f"tagsets/{name}")
    complete = {t for site in loaded.data for t in site.tags.types}
    for site in loaded.data:
        assert site.train
        assert site.test
        assert set(list_types(site.test)) <= set(site.scored_types) <= complete
        if name != "mapped" or site.id != "psytar":
            assert set(list_types(site.test)) - set(site.tags.types)
        assert list_types(site.train) == tuple(sorted(site.tags.types))


def test_the_jobs_on_licensed_corpora_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read invented files in the layout that the first lines of the jobs describe."""
    types = read_toml(list_built_in_jobs()["tagsets/ontonotes"])["tags"]["types"]
    genres = ("nw", "tc", "wb", "bn", "bc", "mz")
    for part in ("train", "development", "test"):
        for genre in (*genres, "pt"):
            rows = "".join(
                f"{genre}/x 0 0 {part}{genre}{i} X * - - - - ({label}) -\n\n"
                for i, label in enumerate(types if genre != "pt" else ())
            )
            folder = tmp_path / part / genre
            folder.mkdir(parents=True)
            (folder / "x.gold_conll").write_text(
                f"#begin document ({genre}/x); part 000\n{rows}{genre}/x 0 0 end X * - - - - * -\n"
                "\n#end document\n"
            )
    monkeypatch.setenv("ONTONOTES", str(tmp_path))
    loaded = load_built_in("tagsets/ontonotes")
    assert tuple(site.id for site in loaded.data) == genres
    assert sorted(t for site in loaded.data for t in site.tags.types) == sorted(types)
    for site in loaded.data:
        assert {d.meta["genre"] for d in (*site.train, *site.valid, *site.test)} == {
            site.id
        }
        assert len(list_types(site.train)) == len(list_types(site.valid)) == 3
        assert list_types(site.test) == tuple(sorted(types))
    for name in ("cadec", "ade", "smm4h"):
        folder = tmp_path / name
        folder.mkdir()
        labels = (
            "Drug",
            "ADR" if name == "cadec" else "ADE",
            "Disease",
            "Finding",
            "Symptom",
        )
        spans = [
            {"start": 2 * i, "end": 2 * i + 1, "label": t} for i, t in enumerate(labels)
        ]
        lines = [
            json.dumps({"text": f"a b c d e {name} {i}", "spans": spans})
            for i in range(20)
        ]
        (folder / "notes.jsonl").write_text("\n".join(lines) + "\n")
    monkeypatch.setenv("CLINIC", str(tmp_path))
    for site in load_built_in("tagsets/clinic").data:
        assert [len(part) for part in (site.train, site.valid, site.test)] == [18, 0, 2]
        assert list_types(site.test) == ("ADE", "Disease", "Drug", "Finding", "Symptom")


@pytest.mark.corpora
@pytest.mark.parametrize(
    ("name", "sizes"), [("maccrobat", (136, 21, 43)), ("bc5cdr", (500,) * 3)]
)
def test_the_built_in_jobs_of_fine_tuning_load(
    corpora: Path, name: str, sizes: tuple[int, ...]
) -> None:
    loaded = load_built_in(f"bert/{name}")
    expected = (
        ("Chemical", "Disease")
        if name == "bc5cdr"
        else ("problem", "test", "treatment")
    )
    assert [s.tags.types for s in loaded.data] == [expected] * 5
    for part, size in zip(("train", "valid", "test"), sizes, strict=True):
        notes = [
            {d.meta.get("document", d.id) for d in getattr(s, part)}
            for s in loaded.data
        ]
        assert sum(map(len, notes)) == size
        assert max(map(len, notes)) - min(map(len, notes)) <= 1


LABELS = ("PROBLEM", "TEST", "TREATMENT", "CLINICAL_DEPT", "EVIDENTIAL", "OCCURRENCE")


def i2b2(path: Path, year: str, number: int) -> None:
    """Write a record with a mention of each label, in the form of that challenge."""
    words = [f"w{number}{label.lower()}" for label in LABELS]
    text = "\n".join(words) + "\n"
    if year == "2010":
        rows = [
            f'c="{words[i]}" {i + 1}:0 {i + 1}:0||t="{LABELS[i].lower()}"'
            for i in range(3)
        ]
        path.with_suffix(".txt").write_text(text)
        path.with_suffix(".con").write_text("\n".join(rows) + "\n")
        return
    spans = [(text.index(word) + 1, text.index(word) + 1 + len(word)) for word in words]
    tags = "".join(
        f'<EVENT id="E{i}" start="{spans[i][0]}" end="{spans[i][1]}" text="{words[i]}" '
        f'modality="FACTUAL" polarity="POS" type="{label}" />\n'
        for i, label in enumerate(LABELS)
    )
    path.with_suffix(".xml").write_text(
        '<?xml version="1.0" encoding="UTF-8" ?>\n<ClinicalNarrativeTemporalAnnotation>\n<TEXT>'
        f"<![CDATA[\n{text}]]></TEXT>\n<TAGS>\n{tags}</TAGS>\n"
        "</ClinicalNarrativeTemporalAnnotation>\n"
    )


@pytest.mark.parametrize(
    ("year", "train", "test", "mentions"),
    [
        (
            "2010",
            "concept_assertion_relation_training_data",
            "reference_standard_for_test_data",
            3,
        ),
        (
            "2012",
            "2012-07-15.original-annotation.release",
            "2012-08-08.test-data.event-timex-groundtruth/xml",
            6,
        ),
    ],
)
def test_paper_jobs_of_fine_tuning_train_on_every_training_note(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    year: str,
    train: str,
    test: str,
    mentions: int,
) -> None:
    """Nothing is held out or dropped, although test records repeat training records."""
    monkeypatch.setenv(f"I2B2_{year}", str(tmp_path))
    monkeypatch.setenv("BERT_BASE", str(tmp_path))
    for part, number in ((train, 12), (test, 7)):
        (tmp_path / part).mkdir(parents=True)
        for i in range(number):
            i2b2(tmp_path / part / f"r{i}", year, i)
    loaded = load_sites(load_job(f"bert/i2b2-{year}"))
    assert [len(site.valid) for site in loaded.data] == [0] * 5
    for name, number in (("train", 12), ("test", 7)):
        documents = [d for site in loaded.data for d in getattr(site, name)]
        assert len({d.id for d in documents}) == len(documents) == number
        assert sum(len(d.spans) for d in documents) == number * mentions


@pytest.mark.parametrize("name", ["mimic", "i2b2-2010", "i2b2-2012"])
def test_the_paper_jobs_of_fine_tuning_train_bert_base(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The preset of the other jobs has a smaller encoder."""
    for variable in ("MIMIC_III", "I2B2_2010", "I2B2_2012"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.setenv("BERT_BASE", str(tmp_path / "bert-base"))
    job = load_job(f"bert/{name}")
    assert job.config.model.encoder == str(tmp_path / "bert-base")


ADE = """\
10030778|He took gold for pain.|pain|18|22|gold|8|12
10030778|He took zinc for pain.|pain|38|42|zinc|28|32
10030779|Rash after iron.|Rash|0|4|iron|11|15
"""
NEGATIVE = """\
10030779 NEG Rash after iron.
10030779 NEG He was well.
10030780 NEG Nothing was seen.
"""


def load_sentences(folder: Path, site: dict[str, Any]) -> Sites:
    """Return the only site of a job, whose corpus is split by sentence."""
    table = {
        "method": "fedner",
        "model": {"hashed_words": 8},
        "seed": 4,
        "sites": {"a": {**site, "split": "sentence"}},
    }
    return load_sites(parse_job(table, "j", folder, "j.toml"))


def test_the_ade_corpus_of_the_paper_has_no_sentence_of_its_negative_file(
    tmp_path: Path,
) -> None:
    """Three sentences have relations; one of them is in ADE-NEG.txt too."""
    paper = read_toml(list_built_in_jobs()["fedner/paper"])["sites"]["ade"]
    (tmp_path / "DRUG-AE.rel").write_text(ADE)
    (tmp_path / "ADE-NEG.txt").write_text(NEGATIVE)
    site = {
        "path": ".",
        "where": paper["where"],
        "test_fraction": 0.4,
        "valid_fraction": 0.0,
    }
    loaded = load_sentences(tmp_path, {**site, "expected_sentences": 3})
    documents = (*loaded.data[0].train, *loaded.data[0].test)
    assert {document.text for document in documents} == {
        "He took gold for pain.",
        "He took zinc for pain.",
        "Rash after iron.",
    }
    assert not any(finding.code == "other_size" for finding in loaded.findings)

    for expected, level, difference in (
        (4, "warning", "-25.0"),
        (2, "warning", "+50.0"),
    ):
        other_size = load_sentences(tmp_path, {**site, "expected_sentences": expected})
        (finding,) = (f for f in other_size.findings if f.code == "other_size")
        assert finding.level == level
        assert (
            f"3 sentences, where the publication counts {expected} ({difference} %)"
            in str(finding)
        )


def test_sizes_of_the_corpora_equal_the_table_of_the_paper(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Table 1 of Ge et al. 2020."""
    monkeypatch.setenv("FEDNOTES_CORPORA", "corpora")
    sites = load_job("fedner/paper").sites
    assert {name: site.expected_sentences for name, site in sites.items()} == {
        "cadec": 7597,
        "ade": 4484,
        "smm4h": 2213,
    }


@pytest.mark.slow
@pytest.mark.corpora
def test_the_built_in_jobs_on_public_notes_load(corpora: Path) -> None:
    """They have 4,909 notes, and none shares a sentence with the annotated corpora."""
    names = ("bert/pretrain", "bert/pretrain-sources")
    dealt, by_source = (read_toml(list_built_in_jobs()[name]) for name in names)
    loaded = load_sites(parse_job(dealt, "pretrain", corpora, "pretrain.toml"))
    assert [site.id for site in loaded.data] == [f"silo{i}" for i in range(1, 6)]
    assert sum(site.train_notes + site.valid_notes for site in loaded.data) == 4909
    assert not any("excluded" in note for note in loaded.remarks)
    assert "silos" not in by_source
    assert dealt["sites"] == by_source["sites"]


@pytest.mark.parametrize("packed", [False, True])
def test_the_job_on_mimic_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool
) -> None:
    """Read an invented NOTEEVENTS.csv, or NOTEEVENTS.csv.gz as PhysioNet has it."""
    head = "ROW_ID,SUBJECT_ID,CATEGORY,ISERROR,TEXT"
    rows = [
        f"{i},{i // 2},{'Discharge summary' if i % 2 else 'Nursing'},,n{i}"
        for i in range(40)
    ]
    table = "\n".join([head, *rows]) + "\n"
    if packed:
        (tmp_path / "NOTEEVENTS.csv.gz").write_bytes(gzip.compress(table.encode()))
    else:
        (tmp_path / "NOTEEVENTS.csv").write_text(table)
    monkeypatch.setenv("BERT_BASE", str(tmp_path))
    monkeypatch.delenv("MIMIC_III", raising=False)
    monkeypatch.setenv("MIMIC3", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"MIMIC_III is not set; .* export MIMIC_III=\$MIMIC3"
    ):
        load_sites(load_job("bert/mimic"))
    monkeypatch.setenv("MIMIC_III", str(tmp_path))
    loaded = load_sites(load_job("bert/mimic"))
    assert [site.train_patients + site.valid_patients for site in loaded.data] == [
        4
    ] * 5
    assert loaded.remarks[0] == "mimic: notes left out: 20 of another category"
