"""How the sites of a job are read: mapped, flattened, split, reduced and dealt."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.types import Document
from fednotes.data.checks import Finding
from fednotes.data.notes.sites import assign_to_silos
from fednotes.data.tags import list_types
from fednotes.data.text import split_sentences
from fednotes.jobs.job import Sites, load_sites
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.kinds.documents import digest_site
from fednotes.training.sites import unite_tags

DRUGS = "aspirin metformin ibuprofen warfarin insulin statin codeine heparin".split()
FINDINGS = "rash nausea cough fever pain ulcer cramps vertigo".split()


def conll(
    path: Path, first: int, number: int, labels: tuple[str, str] = ("Drug", "ADE")
) -> str:
    """Write sentences "Case <i> took <drug> and had <finding> ." in documents of three."""
    lines = []
    for i in range(first, first + number):
        if (i - first) % 3 == 0:
            lines.append(f"# newdoc id = d{i}")
        words = f"Case {i} took {DRUGS[i % 8]} and had {FINDINGS[i // 8 % 8]} .".split()
        tags = ["O", "O", "O", f"B-{labels[0]}", "O", "O", f"B-{labels[1]}", "O"]
        lines += [f"{word} {tag}" for word, tag in zip(words, tags, strict=True)] + [""]
    path.write_text("\n".join(lines) + "\n")
    return path.name


def load(
    folder: Path, seed: int = 4, tables: Any = None, **sites: dict[str, Any]
) -> Sites:
    """Return the sites of a job.

    Args:
        folder: Folder of the job.
        seed: Seed of the job.
        tables: Other keys and tables of the job.
        sites: The [sites.NAME] tables.
    """
    table = {
        "method": "fedner",
        "model": {"hashed_words": 8},
        "seed": seed,
        **(tables or {}),
    }
    table |= {"sites": sites} if sites else {}
    return load_sites(parse_job(table, "j", folder, "j.toml"))


def texts(documents: tuple[Document, ...]) -> set[str]:
    return {document.text for document in documents}


def test_one_file_is_split_into_sentences(tmp_path: Path) -> None:
    name = conll(tmp_path / "all.txt", 0, 100)
    (site,) = load(tmp_path, a={"path": name, "split": "sentence"}).data
    assert site.tags.types == ("ADE", "Drug")
    assert [len(part) for part in (site.train, site.valid, site.test)] == [70, 10, 20]
    assert not texts(site.train) & texts(site.test)


def test_the_same_seed_gives_the_same_split(tmp_path: Path) -> None:
    site = {"path": conll(tmp_path / "all.txt", 0, 100), "split": "sentence"}
    assert load(tmp_path, a=site).data == load(tmp_path, a=site).data
    assert load(tmp_path, seed=5, a=site).data != load(tmp_path, a=site).data


def test_documents_stay_together_by_default(tmp_path: Path) -> None:
    name = conll(tmp_path / "all.txt", 0, 90)
    (by_default,) = load(tmp_path, a={"path": name}).data
    (by_document,) = load(tmp_path, a={"path": name, "split": "document"}).data
    assert by_default == by_document
    parts = (by_document.train, by_document.valid, by_document.test)
    assert [len(part) for part in parts] == [21, 3, 6]


def test_patients_stay_together_if_the_corpus_has_them(tmp_path: Path) -> None:
    lines = [
        {
            "text": f"took aspirin {i}",
            "spans": [{"start": 5, "end": 12, "label": "Drug"}],
        }
        | ({"patient": f"p{i % 20}"} if i < 60 else {})
        for i in range(80)
    ]
    (tmp_path / "all.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    (site,) = load(tmp_path, a={"path": "all.jsonl"}).data
    parts = (site.train, site.valid, site.test)
    patients = [{d.patient for d in part} - {None} for part in parts]
    assert sum(map(len, patients)) == len(set().union(*patients)) == 20
    assert sum(len(part) for part in parts) == 80  # with those without a patient
    with pytest.raises(
        DataError, match="cannot split by patient: 20 of 80 documents have no value"
    ):
        load(tmp_path, a={"path": "all.jsonl", "split": "patient"})


def train_and_test(folder: Path) -> dict[str, Any]:
    """Return a site of 50 training sentences and 30 test sentences."""
    return {"train": conll(folder / "a", 0, 50), "test": conll(folder / "b", 60, 30)}


def test_validation_data_are_held_out_of_a_training_file(tmp_path: Path) -> None:
    (site,) = load(tmp_path, a=train_and_test(tmp_path)).data
    assert len(site.train) == 15  # documents of three sentences, the last one of two
    assert len(site.valid) == 2
    assert sum(len(document.sentences) for document in site.test) == 30


def test_a_file_of_validation_data_is_used_unchanged(tmp_path: Path) -> None:
    valid = conll(tmp_path / "c", 100, 9)
    (site,) = load(tmp_path, a=train_and_test(tmp_path) | {"valid": valid}).data
    assert [len(document.sentences) for document in site.valid] == [3, 3, 3]


def test_a_fraction_reduces_the_training_sentences(tmp_path: Path) -> None:
    site = train_and_test(tmp_path) | {"valid_fraction": 0}
    (full,) = load(tmp_path, a=site).data
    (tenth,) = load(tmp_path, a=site | {"fraction": 0.1}).data
    assert len(tenth.train) == 5
    assert all(
        any(d.text in full_document.text for full_document in full.train)
        for d in tenth.train
    )
    assert tenth.test == full.test


def test_sentences_of_the_test_data_leave_the_training_data(tmp_path: Path) -> None:
    train, test = conll(tmp_path / "a", 0, 50), conll(tmp_path / "b", 40, 30)
    loaded = load(tmp_path, a={"train": train, "test": test})
    (site,) = loaded.data
    assert sum(len(d.sentences) for d in (*site.train, *site.valid)) == 40
    assert loaded.remarks == (
        "a: dropped 10 training sentences that also occur in test",
    )
    with_repeats = load(
        tmp_path,
        a={"train": train, "test": test, "repeats": "keep", "valid_fraction": 0},
    )
    assert sum(len(d.sentences) for d in with_repeats.data[0].train) == 50
    assert with_repeats.data[0].valid == with_repeats.remarks == ()


def test_a_label_map_renames_and_drops_labels(tmp_path: Path) -> None:
    name = conll(tmp_path / "a", 0, 40, ("Drug", "ADR"))
    (site,) = load(tmp_path, a={"path": name, "label_map": {"ADR": "ADE"}}).data
    assert site.tags.types == ("ADE", "Drug")
    (site,) = load(tmp_path, a={"path": name, "label_map": {"ADR": ""}}).data
    assert site.tags.types == list_types(site.train) == ("Drug",)


def test_a_label_map_with_an_unused_label_causes_a_remark(
    tmp_path: Path,
) -> None:
    name = conll(tmp_path / "a", 0, 40, ("Drug", "ADR"))
    loaded = load(tmp_path, a={"path": name, "label_map": {"ADRR": "X", "Age": "X"}})
    assert loaded.remarks == (
        "a: label_map has 'ADRR', which is not annotated: did you mean 'ADR'?",
        "a: label_map has 'Age', which is not annotated",
    )


def test_a_site_may_choose_its_types_and_its_scheme(tmp_path: Path) -> None:
    name = conll(tmp_path / "a", 0, 40, ("Drug", "ADR"))
    (site,) = load(tmp_path, a={"path": name, "types": ["ADR"], "scheme": "BIOES"}).data
    assert site.tags.tags == ("O", "B-ADR", "I-ADR", "E-ADR", "S-ADR")
    assert list_types(site.train) == ("ADR",)


def test_a_type_may_be_missing_from_a_part_but_not_from_all(tmp_path: Path) -> None:
    train, test = (
        conll(tmp_path / "a", 0, 50),
        conll(tmp_path / "b", 60, 9, ("Drug", "Drug")),
    )
    site = {"train": train, "test": test, "types": ["ADE", "Drug"]}
    assert load(tmp_path, a=site).data[0].tags.types == ("ADE", "Drug")
    with pytest.raises(
        DataError, match=r"site 'a' lists the type 'AED'.* ADE, Drug: did you"
    ):
        load(tmp_path, a=site | {"types": ["AED"]})


def test_masking_hides_the_forms_that_another_site_annotates(tmp_path: Path) -> None:
    """Both sites annotate drugs and only the first one findings, so drugs are masked."""
    a, b = (
        conll(tmp_path / "a", 0, 100),
        conll(tmp_path / "b", 200, 100, ("Drug", "ADE")),
    )
    drugs_alone = {"path": b, "label_map": {"ADE": ""}}
    loaded = load(tmp_path, a={"path": a, "mask_overlap": 1.0}, b=drugs_alone)
    words = {
        word for document in loaded.data[0].train for word in document.text.split()
    }
    assert not words & set(DRUGS)
    assert words >= set(FINDINGS)
    assert list_types(loaded.data[0].train) == ("ADE",)
    words = {
        word for document in loaded.data[1].train for word in document.text.split()
    }
    assert words >= set(DRUGS)


def test_nested_mentions_are_flattened_and_counted(tmp_path: Path) -> None:
    folder = tmp_path / "brat"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"Case {i} had severe chest pain.\n")
        start = len(f"Case {i} had ")
        (folder / f"{i}.ann").write_text(
            f"T1\tADE {start} {start + 17}\tsevere chest pain\n"
            f"T2\tADE {start + 7} {start + 17}\tchest pain\n"
        )
    loaded = load(tmp_path, a={"path": "brat"})
    assert loaded.remarks == ("a: 12 nested mentions in brat (outermost)",)
    assert {d.text[s.start : s.end] for d in loaded.data[0].train for s in d.spans} == {
        "severe chest pain"
    }


def test_overlapping_mentions_of_different_types_can_be_kept(tmp_path: Path) -> None:
    """A mention inside another one of its type is flattened and reported."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for i in range(12):
            (tmp_path / name / f"{i}.txt").write_text(
                f"Case {i} had severe chest pain."
            )
            start = len(f"Case {i} had ")
            (tmp_path / name / f"{i}.ann").write_text(
                f"T1\tADE {start} {start + 17}\tsevere chest pain\n"
                f"T2\tADE {start + 7} {start + 17}\tchest pain\n"
                f"T3\tPlace {start + 7} {start + 12}\tchest\n"
                "T4\tPlace 0 4\tCase\n"
            )
    keep = {"path": "a", "flatten": "keep"}
    scorer = {"method": "finetune", "model": {"kind": "type-scorer"}}
    loaded = load(tmp_path, tables=scorer, a=keep, b=keep | {"path": "b"})
    assert loaded.remarks == tuple(
        f"{name}: 12 nested mentions in {name} (keep)" for name in ("a", "b")
    )
    assert all(site.tags.overlaps for site in loaded.data)
    assert {
        (d.text[s.start : s.end], s.label)
        for d in loaded.data[0].train
        for s in d.spans
    } == {("severe chest pain", "ADE"), ("chest", "Place"), ("Case", "Place")}
    mixed = load(tmp_path, tables=scorer, a=keep, b={"path": "b"})
    with pytest.raises(
        ConfigError, match=r"'a' keeps overlapping .*'b' does not: set the same"
    ):
        unite_tags(mixed.data)
    with pytest.raises(ConfigError, match="'a' has overlapping mentions, and 'b' flat"):
        load_silos(tmp_path, {"number": 2}, a=keep, b={"path": "b"})


@pytest.mark.parametrize(
    ("site", "error", "message"),
    [
        ({"path": "nothing"}, DataError, "nothing: no such file"),
        ({"path": "$NO_SUCH_VARIABLE/x"}, ConfigError, "sites.a.path = .*is not set"),
        (
            {"path": "all", "format": "conl"},
            ConfigError,
            "'conl': did you mean 'conll'",
        ),
        ({"path": "all", "split": "ward"}, DataError, "site 'a': cannot split by ward"),
        (
            {"path": "one"},
            DataError,
            "site 'a': cannot split 1 documents .* give more notes",
        ),
        ({"path": "plain"}, ConfigError, "site 'a': no entity is annotated"),
        (
            {"path": "all", "label_map": {"Drug": "", "ADE": ""}},
            ConfigError,
            "no entity",
        ),
        ({"train": "one", "test": "one"}, ConfigError, "site 'a': no training"),
    ],
)
def test_a_site_that_cannot_be_read_is_reported_by_name(
    tmp_path: Path, site: dict[str, Any], error: type[Exception], message: str
) -> None:
    conll(tmp_path / "all", 0, 20)
    (tmp_path / "one").write_text("# newdoc id = a\naspirin B-Drug\n")
    (tmp_path / "plain").write_text("\n".join(f"Fine{i} O\n. O\n" for i in range(20)))
    with pytest.raises(error, match=message):
        load(tmp_path, a=site | ({"valid_fraction": 0} if "train" in site else {}))


GENERATED = {"synthetic": {"sentences": 30}}


def test_generated_sites_have_their_complete_annotation() -> None:
    loaded = load(Path(), tables=GENERATED)
    assert loaded.complete is not None
    assert [s.id for s in loaded.data] == [s.id for s in loaded.complete]
    for site, complete in zip(loaded.data, loaded.complete, strict=True):
        assert [d.text for d in site.train] == [d.text for d in complete.train]
        assert set(site.tags.types) < set(complete.tags.types)


def test_the_types_of_generated_sites_can_be_sampled() -> None:
    sampled = load(Path(), tables=GENERATED | {"tags": {"design": "disjoint"}})
    assert sampled.complete is not None
    types = [t for site in sampled.data for t in site.tags.types]
    assert sorted(types) == sorted(sampled.complete[0].tags.types)
    first = sampled.data[0]
    assert {s.label for d in first.train for s in d.spans} <= set(first.tags.types)


TYPES = ("ADE", "Dose", "Drug", "Sign")
WORDS = ((DRUGS, "Drug"), (FINDINGS, "ADE"), ("10mg 20mg 40mg".split(), "Dose"))


def rich(
    path: Path,
    first: int,
    number: int,
    labels: tuple[str, ...] = ("ADE", "Dose", "Drug"),
) -> str:
    """Write sentences with a drug, an effect, a dose and a sign; annotate `labels`."""
    lines = []
    for i in range(first, first + number):
        if i % 3 == 0:
            lines.append(f"# newdoc id = d{i}")
        lines += [f"Case{i} O"]
        lines += [
            f"{w[i % len(w)]} {f'B-{t}' if t in labels else 'O'}" for w, t in WORDS
        ]
        lines += [f"pallor {'B-Sign' if 'Sign' in labels else 'O'}", ". O", ""]
    path.write_text("\n".join(lines) + "\n")
    return path.name


def load_with_tags(
    folder: Path, tags: dict[str, Any], seed: int = 4, **sites: dict[str, Any]
) -> Sites:
    return load(folder, seed, {"tags": tags}, **sites)


def three_sites(folder: Path) -> dict[str, dict[str, Any]]:
    """Return three sites that annotate all four types."""
    return {
        name: {"path": rich(folder / name, 100 * i, 60, TYPES)}
        for i, name in enumerate("abc")
    }


@pytest.mark.parametrize("design", ["disjoint", "appendix-d"])
def test_only_sampled_types_are_annotated_in_training(
    tmp_path: Path, design: str
) -> None:
    """Compare each part with the complete one, span by span."""
    loaded = load_with_tags(tmp_path, {"design": design}, **three_sites(tmp_path))
    assert loaded.complete is not None
    for site, complete in zip(loaded.data, loaded.complete, strict=True):
        assert complete.tags.types == site.test_types == site.scored_types == TYPES
        assert set(site.tags.types) < set(TYPES)
        for part, full in ((site.train, complete.train), (site.valid, complete.valid)):
            assert [d.text for d in part] == [d.text for d in full]
            for document, every in zip(part, full, strict=True):
                assert document.spans == tuple(
                    s for s in every.spans if s.label in site.tags.types
                )
                assert {s.label for s in every.spans} == set(TYPES)
        assert site.test == complete.test
        assert (
            f"{site.id}: annotates {', '.join(site.tags.types)} (of 4 types)"
            in loaded.remarks
        )
    named = [t for site in loaded.data for t in site.tags.types]
    assert set(named) == set(TYPES)
    assert len(named) == 4 or design == "appendix-d"


def test_seeds_share_a_sampling_but_not_a_split(tmp_path: Path) -> None:
    sites = three_sites(tmp_path)
    tags = {"design": "appendix-d", "runs_per_sampling": 3}
    loaded = [
        load_with_tags(tmp_path, tags, seed, **sites).data for seed in range(1, 16)
    ]
    types = [tuple(site.tags.types for site in data) for data in loaded]
    assert all(len(set(types[i : i + 3])) == 1 for i in range(0, 15, 3))
    assert len(set(types)) > 1
    assert len({tuple(d.text for d in data[0].test) for data in loaded[:3]}) == 3


def test_types_that_no_site_draws_are_left_out(tmp_path: Path) -> None:
    sites = three_sites(tmp_path)
    few = load_with_tags(tmp_path, {"design": "disjoint", "per_site": 1}, **sites)
    sampled_types = {t for site in few.data for t in site.tags.types}
    assert len(sampled_types) == 3
    assert {site.test_types for site in few.data} == {
        tuple(t for t in TYPES if t in sampled_types)
    }
    (unused,) = set(TYPES) - sampled_types
    remark = f"annotated at no site in this sampling, left out: {unused}"
    assert few.remarks[0] == remark


def test_a_sampled_type_without_mentions_causes_a_remark(
    tmp_path: Path,
) -> None:
    sites = three_sites(tmp_path) | {
        "c": {"path": rich(tmp_path / "c", 200, 60, ("ADE",))}
    }
    tags: dict[str, Any] = {"design": "disjoint", "types": list(TYPES)}
    loaded_by_seed = {
        seed: load_with_tags(tmp_path, tags, seed, **sites) for seed in range(1, 6)
    }
    for loaded in loaded_by_seed.values():
        lacking = [t for t in loaded.data[2].tags.types if t != "ADE"]
        note = f"c: no training mention of {', '.join(lacking)}"
        assert (note in loaded.remarks) == bool(lacking)


def test_min_mentions_repeats_the_sampling_of_types(tmp_path: Path) -> None:
    sites = three_sites(tmp_path) | {
        "c": {"path": rich(tmp_path / "c", 200, 60, ("ADE",))}
    }
    tags: dict[str, Any] = {"types": list(TYPES), "min_mentions": 1}
    tags["design"] = "disjoint"
    for seed in range(1, 6):
        assert load_with_tags(tmp_path, tags, seed, **sites).data[2].tags.types == (
            "ADE",
        )
    with pytest.raises(
        ConfigError, match="min_mentions = 999: in each of 10,000 draws"
    ):
        load_with_tags(tmp_path, tags | {"min_mentions": 999}, **sites)


def sites_with_given_types(folder: Path) -> dict[str, dict[str, Any]]:
    """Return two sites that train on one type each; the first is tested on two."""
    a, b = rich(folder / "a", 0, 60), rich(folder / "b", 100, 60)
    return {
        "a": {"path": a, "types": ["Drug"], "test_types": ["ADE", "Drug"]},
        "b": {"path": b, "types": ["ADE"], "label_map": {"Dose": ""}},
    }


def test_a_site_can_be_tested_on_more_types_than_it_trains_on(tmp_path: Path) -> None:
    sites = sites_with_given_types(tmp_path)
    loaded = load_with_tags(tmp_path, {"design": "given"}, **sites)
    first, second = loaded.data
    assert loaded.complete is None
    assert (first.tags.types, second.tags.types) == (("Drug",), ("ADE",))
    assert (first.test_types, first.scored_types) == (("ADE", "Drug"), ("ADE", "Drug"))
    assert (second.test_types, second.scored_types) == ((), ("ADE",))
    assert list_types(first.train) == list_types(first.valid) == ("Drug",)
    assert list_types(first.test) == ("ADE", "Drug")
    assert list_types(second.test) == ("ADE",)


def test_test_types_need_no_tags_table(tmp_path: Path) -> None:
    sites = sites_with_given_types(tmp_path)
    (alone,) = load(tmp_path, a=sites["a"]).data
    assert alone == load_with_tags(tmp_path, {"design": "given"}, **sites).data[0]


def test_the_fingerprint_of_a_site_covers_its_test_types(tmp_path: Path) -> None:
    site = sites_with_given_types(tmp_path)["a"]
    (first,) = load(tmp_path, a=site).data
    (second,) = load(tmp_path, a=site).data
    changed = replace(second, test_types=("Drug",))
    assert digest_site(first) == digest_site(second) != digest_site(changed)


@pytest.mark.parametrize(
    ("tags", "site", "message"),
    [
        (
            {"types": ["ADE", "Drugg"]},
            {},
            r"'Drugg', which no site annotates: did you mean",
        ),
        ({"types": ["ADE"]}, {"types": ["Drug"]}, "site 'a' has the type 'Drug'"),
        (
            {"types": ["ADE", "Drug"]},
            {"types": ["ADE"], "test_types": ["ADE", "Drug"]},
            r"'Drug', which no site annotates in its training data \(a: ADE; b: ADE\)",
        ),
        ({"design": "disjoint"}, {"types": ["ADE"]}, "leave out its `types`"),
        ({"design": "disjoint", "per_site": 3}, {}, "need 6 types, but there are 3"),
        ({}, {"types": ["Drugg"]}, "site 'a' lists the type 'Drugg'"),
        (
            {},
            {"types": ["Drug"], "test_types": ["AED"]},
            "lists the type 'AED'.*did you mean",
        ),
    ],
)
def test_tag_sets_that_do_not_fit_the_files_are_refused(
    tmp_path: Path, tags: dict[str, Any], site: dict[str, Any], message: str
) -> None:
    a, b = rich(tmp_path / "a", 0, 60), rich(tmp_path / "b", 100, 60)
    second_types = {"types": ["ADE"]} if "types" in tags else {}
    with pytest.raises((ConfigError, DataError), match=message):
        load_with_tags(
            tmp_path, tags, a={"path": a, **site}, b={"path": b, **second_types}
        )


@pytest.mark.parametrize("unit", ["document", "sentence"])
def test_shares_of_a_corpus_are_disjoint_and_complete(
    tmp_path: Path, unit: str
) -> None:
    name = rich(tmp_path / "all", 0, 90)
    site = {"path": name, "split": unit, "valid_fraction": 0}
    loaded = load(tmp_path, **{f"s{i}": site | {"share": f"{i}/3"} for i in (1, 2, 3)})
    lines = [
        sorted(line for d in (*s.train, *s.test) for line in d.text.split("\n"))
        for s in loaded.data
    ]
    assert [len(share) for share in lines] == [30, 30, 30]
    assert len({line for share in lines for line in share}) == 90
    assert [len(s.valid) for s in loaded.data] == [0, 0, 0]
    (undivided,) = load(tmp_path, one=site | {"share": "1/1"}).data
    assert sum(len(d.sentences) for d in (*undivided.train, *undivided.test)) == 90


def test_the_number_of_sentences_can_be_limited(tmp_path: Path) -> None:
    site = {
        "path": rich(tmp_path / "all", 0, 90),
        "split": "document",
        "valid_fraction": 0,
    }
    (full,) = load(tmp_path, a=site).data
    loaded = load(tmp_path, a=site | {"max_sentences": 20, "max_test_sentences": 7})
    (less,) = loaded.data
    assert (len(less.train), len(less.test)) == (20, 7)
    assert texts(less.train) < {t for d in full.train for t in d.text.split("\n")}
    assert texts(less.test) < {t for d in full.test for t in d.text.split("\n")}
    assert "a: 20 of 72 sentences of train are used" in loaded.remarks
    limited = site | {"valid_fraction": 0.2, "max_valid_sentences": 5}
    (valid,) = [len(s.valid) for s in load(tmp_path, a=limited).data]
    assert valid == 5
    (more,) = load(tmp_path, a=site | {"max_sentences": 40}).data
    assert texts(less.train) < texts(more.train)
    (all_of_it,) = load(tmp_path, a=site | {"max_sentences": 500}).data
    assert all_of_it == full


def test_a_site_can_be_one_genre_of_a_corpus(tmp_path: Path) -> None:
    lines = [
        f'{{"text": "Case {i} had rash.", "genre": "{"nw" if i % 3 else "bc"}", '
        '"spans": [{"start": 0, "end": 4, "label": "X"}]}'
        for i in range(60)
    ]
    (tmp_path / "all.jsonl").write_text("\n".join(lines) + "\n")
    site = {"path": "all.jsonl", "split": "document", "where": "genre=bc"}
    (bc,) = load(tmp_path, a=site).data
    texts_of_genre = [d.text for part in (bc.train, bc.valid, bc.test) for d in part]
    assert sorted(texts_of_genre) == sorted(
        f"Case {i} had rash." for i in range(0, 60, 3)
    )
    with pytest.raises(
        DataError, match=r"site 'a': where = 'genre=tc': .* one of bc, nw"
    ):
        load(tmp_path, a=site | {"where": "genre=tc"})
    with pytest.raises(DataError, match=r"where = 'gnre=bc'.*their meta has genre"):
        load(tmp_path, a=site | {"where": "gnre=bc"})


def test_annotated_types_that_tags_omits_are_left_out_or_refused(
    tmp_path: Path,
) -> None:
    """They are left out with a remark, unless a site has no other types."""
    lines = "".join(f"a{i}\tB-Drug\nb{i}\tB-ADE\n\n" for i in range(20))
    (tmp_path / "both.conll").write_text(lines)
    (tmp_path / "ade.conll").write_text(lines.replace("B-Drug", "O"))
    both_types, tags = {"path": "both.conll"}, {"types": ["Drug"]}
    notes = load_with_tags(tmp_path, tags, both=both_types).remarks
    assert "both: left out ADE, which [tags] types does not contain" in notes
    with pytest.raises(
        ConfigError, match=r"'ade' annotates ADE; \[tags\] types has Drug"
    ):
        load_with_tags(tmp_path, tags, both=both_types, ade={"path": "ade.conll"})


# ---- silos ---------------------------------------------------------------------------


def load_silos(folder: Path, table: dict[str, Any], **sites: dict[str, Any]) -> Sites:
    return load(folder, 1, {"silos": table}, **sites)


def test_every_part_is_dealt_into_silos_by_document(tmp_path: Path) -> None:
    """Compare with `assign_to_silos` on the documents of the undealt site, part by part."""
    name = conll(tmp_path / "all", 0, 180)
    site = {"path": name, "split": "document", "scheme": "BIOES"}
    (undivided,) = load(tmp_path, 1, a=site).data
    loaded = load_silos(tmp_path, {"number": 3}, a=site)
    assert [s.id for s in loaded.data] == ["silo1", "silo2", "silo3"]
    assert {s.tags for s in loaded.data} == {undivided.tags}
    for part in ("train", "valid", "test"):
        documents = getattr(undivided, part)
        silo_of = assign_to_silos([("document", "a", d.id) for d in documents], 3, 1)
        expected = [
            {k[2] for k, silo in silo_of.items() if silo == i} for i in range(3)
        ]
        assert [{d.id for d in getattr(s, part)} for s in loaded.data] == expected
        assert sum(len(getattr(s, part)) for s in loaded.data) == len(documents)
    assert loaded.complete is None
    assert loaded.remarks[-1] == "documents in 3 silos: train 42, valid 6, test 12"


def test_sentences_of_two_corpora_stay_with_their_document_in_silos(
    tmp_path: Path,
) -> None:
    a, b = conll(tmp_path / "a", 0, 90), conll(tmp_path / "b", 200, 60)
    by_sentence = {"split": "sentence"}
    loaded = load_silos(
        tmp_path,
        {"number": 4},
        a=by_sentence | {"path": a},
        b=by_sentence | {"path": b},
    )
    notes = [
        {(d.text.split()[1], d.meta["document"]) for d in s.train} for s in loaded.data
    ]
    sources = [
        {(int(case) >= 200, note) for case, note in of_silo} for of_silo in notes
    ]
    assert sum(map(len, sources)) == len(set().union(*sources))  # none in two silos
    assert all({large for large, _ in of_silo} == {False, True} for of_silo in sources)
    assert sum(len(s.train) for s in loaded.data) == 63 + 42


def test_the_documents_of_a_patient_stay_together_in_silos(tmp_path: Path) -> None:
    lines = [
        {
            "text": f"took aspirin {i}",
            "spans": [{"start": 5, "end": 12, "label": "Drug"}],
        }
        | ({"patient": f"p{i % 10}"} if i % 2 else {})
        for i in range(60)
    ]
    for name in ("train", "test"):
        (tmp_path / f"{name}.jsonl").write_text(
            "\n".join(map(json.dumps, lines)) + "\n"
        )
        lines = [line | {"text": line["text"] + " more"} for line in lines]
    site = {"train": "train.jsonl", "test": "test.jsonl", "valid_fraction": 0}
    loaded = load_silos(tmp_path, {"number": 5, "by": "patient"}, a=site)
    patients = [{d.patient for d in s.train if d.patient} for s in loaded.data]
    assert sum(map(len, patients)) == len(set().union(*patients)) == 5
    assert sum(len(s.train) for s in loaded.data) == 60
    assert [s.valid for s in loaded.data] == [()] * 5  # no site has any
    assert loaded.remarks[-1] == "patients in 5 silos: train 35, test 35"


@pytest.mark.parametrize(
    ("table", "a", "b", "message"),
    [
        (
            {"number": 5},
            {},
            None,
            r"number = 5: the valid data have 3 documents, .* at most 3 silos",
        ),
        (
            {"number": 40},
            {},
            None,
            r"the train data have 21 documents, .* or give more documents",
        ),
        (
            {},
            {"types": ["Drug"]},
            {"types": ["ADE"]},
            "'a' annotates Drug, and 'b' ADE: give",
        ),
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
def test_notes_that_cannot_be_dealt_into_silos_are_refused(
    tmp_path: Path,
    table: dict[str, Any],
    a: dict[str, Any],
    b: dict[str, Any],
    message: str,
) -> None:
    site = {"path": conll(tmp_path / "all", 0, 90), "split": "document"}
    sites = {"a": site | a} | ({"b": site | b} if b is not None else {})
    with pytest.raises(ConfigError, match=r"\[silos\].*" + message):
        load_silos(tmp_path, table, **sites)


def test_generated_sites_are_dealt_into_silos_with_all_their_types() -> None:
    generated = {"synthetic": {"sites": 2, "sentences": 60}}
    loaded, undivided = (
        load(Path(), 1, generated | {"silos": {"number": 2}}),
        load(Path(), 1, generated),
    )
    assert undivided.complete is not None
    assert {s.tags for s in loaded.data} == {s.tags for s in undivided.complete}
    for part in ("train", "valid", "test"):
        dealt = [d.id for s in loaded.data for d in getattr(s, part)]
        assert sorted(dealt) == sorted(
            d.id for s in undivided.complete for d in getattr(s, part)
        )


@pytest.mark.parametrize("unit", ["sentence", "document"])
def test_holding_out_training_data_does_not_change_the_test_data(
    tmp_path: Path, unit: str
) -> None:
    conll(tmp_path / "all.txt", 0, 60)
    site = {"path": "all.txt", "split": unit, "valid_fraction": 0.0}
    (plain,) = load(tmp_path, a=site).data
    (held_out,) = load(tmp_path, a={**site, "hold_out": 0.25}).data
    assert not plain.valid
    assert texts(held_out.test) == texts(plain.test)
    assert texts(held_out.train) | texts(held_out.valid) == texts(plain.train)
    assert not texts(held_out.train) & texts(held_out.valid)
    sentences = sum(len(split_sentences(d)) for d in plain.train)
    assert sum(len(split_sentences(d)) for d in held_out.valid) == pytest.approx(
        sentences / 4, abs=1
    )

    conll(tmp_path / "test.txt", 100, 20)
    from_parts = {
        "train": "all.txt",
        "test": "test.txt",
        "valid_fraction": 0.0,
        "split": unit,
    }
    (parts,) = load(tmp_path, a={**from_parts, "hold_out": 0.25}).data
    assert texts(parts.train) | texts(parts.valid) == texts(plain.train) | texts(
        plain.test
    )


def test_one_warning_names_the_rare_types_of_all_sites() -> None:
    rare = [
        Finding("warning", "rare_types", site, "types with fewer than 20 mentions: A 3")
        for site in "abcde"
    ]
    other = Finding("warning", "empty_part", "a", "no documents")
    assert Sites((), findings=(rare[0], other)).warnings == (
        "a: types with fewer than 20 mentions: A 3",
        "a: no documents",
    )
    assert Sites((), findings=(*rare, other)).warnings == (
        "types with fewer than 20 mentions: A 3 (a); A 3 (b); A 3 (c); and 2 more",
        "a: no documents",
    )
