"""A job's sites from files: mapped, flattened, split, reduced; and what is wrong is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.types import Document
from fednotes.data.tags import types_of
from fednotes.jobs import parse_job
from fednotes.sites import Sites, load_sites

DRUGS = "aspirin metformin ibuprofen warfarin insulin statin codeine heparin".split()
FINDINGS = "rash nausea cough fever pain ulcer cramps vertigo".split()


def conll(path: Path, first: int, number: int, labels: tuple[str, str] = ("Drug", "ADE")) -> str:
    """Sentences `Case <i> took <drug> and had <finding> .`, of one document each three."""
    lines = []
    for i in range(first, first + number):
        if (i - first) % 3 == 0:
            lines.append(f"# newdoc id = d{i}")
        words = f"Case {i} took {DRUGS[i % 8]} and had {FINDINGS[i // 8 % 8]} .".split()
        tags = ["O", "O", "O", f"B-{labels[0]}", "O", "O", f"B-{labels[1]}", "O"]
        lines += [f"{word} {tag}" for word, tag in zip(words, tags, strict=True)] + [""]
    path.write_text("\n".join(lines) + "\n")
    return path.name


def load(folder: Path, **sites: dict[str, Any]) -> Sites:
    table = {"method": "fedner", "model": {"hashed_words": 8}, "seed": 4, "sites": sites}
    return load_sites(parse_job(table, "j", folder, "j.toml"))


def texts(documents: tuple[Document, ...]) -> set[str]:
    return {document.text for document in documents}


def test_one_file_is_split(tmp_path: Path) -> None:
    name = conll(tmp_path / "all.txt", 0, 100)
    (site,) = load(tmp_path, a={"path": name}).data
    assert site.tags.types == ("ADE", "Drug")
    assert [len(part) for part in (site.train, site.valid, site.test)] == [70, 10, 20]
    assert not texts(site.train) & texts(site.test)
    (again,) = load(tmp_path, a={"path": name}).data
    assert again == site


def test_a_document_stays_together(tmp_path: Path) -> None:
    name = conll(tmp_path / "all.txt", 0, 90)
    (site,) = load(tmp_path, a={"path": name, "split": "document"}).data
    assert [len(part) for part in (site.train, site.valid, site.test)] == [21, 3, 6]


def test_given_parts_are_kept_and_valid_is_held_out(tmp_path: Path) -> None:
    train, test = conll(tmp_path / "a", 0, 50), conll(tmp_path / "b", 60, 30)
    (site,) = load(tmp_path, a={"train": train, "test": test}).data
    assert len(site.train) == 45
    assert len(site.valid) == 5
    assert sum(len(document.sentences) for document in site.test) == 30
    valid = conll(tmp_path / "c", 100, 9)
    (site,) = load(tmp_path, a={"train": train, "valid": valid, "test": test}).data
    assert [len(d.sentences) for d in site.valid] == [3, 3, 3]


def test_sentences_of_the_test_data_leave_the_training_data(tmp_path: Path) -> None:
    train, test = conll(tmp_path / "a", 0, 50), conll(tmp_path / "b", 40, 30)
    made = load(tmp_path, a={"train": train, "test": test})
    (site,) = made.data
    sentences = sum(len(d.sentences) for d in (*site.train, *site.valid))
    assert sentences == 40
    assert made.notes == ("a: 10 training sentences dropped that occur in test",)


def test_labels_are_mapped_dropped_and_chosen(tmp_path: Path) -> None:
    name = conll(tmp_path / "a", 0, 40, ("Drug", "ADR"))
    (site,) = load(tmp_path, a={"path": name, "label_map": {"ADR": "ADE"}}).data
    assert site.tags.types == ("ADE", "Drug")
    (site,) = load(tmp_path, a={"path": name, "label_map": {"ADR": ""}}).data
    assert site.tags.types == types_of(site.train) == ("Drug",)
    (site,) = load(tmp_path, a={"path": name, "types": ["ADR"], "scheme": "BIOES"}).data
    assert site.tags.tags == ("O", "B-ADR", "I-ADR", "E-ADR", "S-ADR")
    made = load(tmp_path, a={"path": name, "label_map": {"ADRR": "X"}})
    assert made.notes == ("a: label_map has 'ADRR', which is not annotated",)


def test_a_type_may_be_missing_from_a_part_but_not_from_all(tmp_path: Path) -> None:
    train, test = conll(tmp_path / "a", 0, 50), conll(tmp_path / "b", 60, 9, ("Drug", "Drug"))
    site = {"train": train, "test": test, "types": ["ADE", "Drug"]}
    assert load(tmp_path, a=site).data[0].tags.types == ("ADE", "Drug")
    with pytest.raises(DataError, match=r"site 'a' asks for the type 'AED'.* ADE, Drug; did you"):
        load(tmp_path, a=site | {"types": ["AED"]})


def test_a_fraction_is_of_training_sentences(tmp_path: Path) -> None:
    train, test = conll(tmp_path / "a", 0, 60), conll(tmp_path / "b", 60, 30)
    whole = {"train": train, "test": test, "valid_fraction": 0}
    (full,) = load(tmp_path, a=whole).data
    (tenth,) = load(tmp_path, a=whole | {"fraction": 0.1}).data
    assert len(tenth.train) == 6
    assert all(any(d.text in given.text for given in full.train) for d in tenth.train)
    assert tenth.test == full.test


def test_masking_hides_the_forms_that_another_site_annotates(tmp_path: Path) -> None:
    """Both sites annotate the same eight drugs: at a ratio of 1 none is left in training."""
    a, b = conll(tmp_path / "a", 0, 100), conll(tmp_path / "b", 200, 100, ("Drug", "Sign"))
    made = load(tmp_path, a={"path": a, "mask_overlap": 1.0}, b={"path": b})
    words = {word for document in made.data[0].train for word in document.text.split()}
    assert not words & set(DRUGS)
    words = {word for document in made.data[1].train for word in document.text.split()}
    assert words >= set(DRUGS)


def test_mentions_that_one_tag_cannot_hold_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "brat"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"Case {i} had severe chest pain.\n")
        start = len(f"Case {i} had ")
        (folder / f"{i}.ann").write_text(
            f"T1\tADE {start} {start + 17}\tsevere chest pain\n"
            f"T2\tADE {start + 7} {start + 17}\tchest pain\n"
        )
    made = load(tmp_path, a={"path": "brat"})
    assert made.notes == ("a: 12 nested mentions in brat (outermost)",)
    assert {d.text[s.start : s.end] for d in made.data[0].train for s in d.spans} == {
        "severe chest pain"
    }


@pytest.mark.parametrize(
    ("site", "error", "message"),
    [
        ({"path": "nothing"}, DataError, "nothing: no such file"),
        ({"path": "$NO_SUCH_VARIABLE/x"}, ConfigError, "sites.a.path = .*is not set"),
        ({"path": "all", "format": "conl"}, ConfigError, "'conl': did you mean 'conll'"),
        ({"path": "all", "split": "ward"}, DataError, "site 'a': cannot split by ward"),
        ({"path": "one"}, DataError, "site 'a': cannot split 1 documents"),
        ({"path": "plain"}, ConfigError, "site 'a': no entity is annotated"),
        ({"path": "all", "label_map": {"Drug": "", "ADE": ""}}, ConfigError, "no entity"),
        ({"train": "one", "test": "one"}, ConfigError, "site 'a': no training"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, site: dict[str, Any], error: type[Exception], message: str
) -> None:
    conll(tmp_path / "all", 0, 20)
    (tmp_path / "one").write_text("# newdoc id = a\naspirin B-Drug\n")
    (tmp_path / "plain").write_text("\n".join(f"Fine{i} O\n. O\n" for i in range(20)))
    with pytest.raises(error, match=message):
        load(tmp_path, a=site | ({"valid_fraction": 0} if "train" in site else {}))


def test_generated_sites_come_twice() -> None:
    table = {"method": "fedner", "model": {"hashed_words": 8}, "synthetic": {"sentences": 30}}
    made = load_sites(parse_job(table, "j", Path(), "j.toml"))
    assert made.complete is not None
    assert [s.id for s in made.data] == [s.id for s in made.complete]
    for own, complete in zip(made.data, made.complete, strict=True):
        assert [d.text for d in own.train] == [d.text for d in complete.train]
        assert set(own.tags.types) < set(complete.tags.types)
