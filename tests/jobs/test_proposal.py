"""`fednotes init`: sites, entity types, a method, and a valid job without note text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from site_facts import facts_of
from time_limits import processor_time_below
from tiny_jobs import corpus
from tiny_models import save_bert

import fednotes as fn
from fednotes.core.errors import ConfigError, DataError, MissingExtra, ParameterError
from fednotes.data.formats import FORMATS
from fednotes.data.synthetic import generate, write_sites
from fednotes.jobs.label_maps import KnownNames
from fednotes.jobs.proposal import (
    Choices,
    find_label_maps,
    find_places,
    first_job,
    format_job,
    propose,
    read_facts,
)
from fednotes.jobs.proposal.decisions import Silos
from fednotes.jobs.proposal.facts import Lengths, ReadOptions
from fednotes.jobs.proposal.writing import describe_site_notes

ENCODINGS = "auto"


def note(path: Path, label: str = "Drug", word: str = "aspir") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    corpus(path, label, word)


# ---- which paths are sites -----------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "paths", "expected"),
    [
        (["notes.conll"], ["notes.conll"], {"notes": ["path"]}),
        (["a/x.conll", "a/y.conll"], ["a"], {"a": ["path"]}),
        (
            ["a/train.conll", "a/devel.conll", "a/test.conll"],
            ["a"],
            {"a": ["train", "valid", "test"]},
        ),
        (
            ["a/train/x.conll", "a/test/x.conll"],
            ["a"],
            {"a": ["train", "test"]},
        ),
        (
            ["a/train.conll", "a/train_more.conll", "a/test.conll"],
            ["a"],
            {"a": ["train", "test"]},
        ),
        (
            ["a/train_corpus.conll", "a/test_corpus.conll"],
            ["a/train_corpus.conll", "a/test_corpus.conll"],
            {"a": ["train", "test"]},
        ),
        (["a/train/x.conll", "a/dev/x.conll"], ["a"], {"a": ["path"]}),
        (
            ["all/b/x.conll", "all/c/x.conll", "all/README.txt"],
            ["all"],
            {"b": ["path"], "c": ["path"]},
        ),
        (
            ["all/b/train.conll", "all/b/test.conll", "all/c/x.conll"],
            ["all"],
            {"b": ["train", "test"], "c": ["path"]},
        ),
        (["all/b/x.conll", "all/c/x.conll"], ["one=all"], {"one": ["path"]}),
        (
            ["siteA/notes/x.conll", "siteB/notes/x.conll"],
            ["siteA/notes", "siteB/notes"],
            {"siteA": ["path"], "siteB": ["path"]},
        ),
        (["deep/er/x.conll"], ["deep"], {"er": ["path"]}),
        (["an odd näme/x.conll"], ["an odd näme"], {"an-odd-n-me": ["path"]}),
        (["pooled/x.conll"], ["pooled"], {"pooled-site": ["path"]}),
        (["Mean/x.conll"], ["Mean"], {"Mean-site": ["path"]}),
    ],
)
def test_sites_are_recognised_in_paths(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: list[str],
    paths: list[str],
    expected: Mapping[str, list[str]],
) -> None:
    monkeypatch.chdir(tmp_path)
    for file in files:
        if file.endswith("README.txt"):
            Path(file).write_text("About these notes.\n", encoding="utf-8")
        else:
            note(Path(file))
    places = find_places(paths, ENCODINGS)
    assert {place.name: [*place.parts] for place in places.sites} == expected
    assert not places.remarks


TABLE = "note_no,patient,note\nN1,P1,She took aspirin.\n"
LABELS = "patient,Asthma\nP1,Y\nP2,N\n"


def fill(folder: Path, files: Mapping[str, str]) -> None:
    """Write files by name; a file ending in .conll has annotated notes."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".conll"):
            note(file)
        elif name.endswith(".ann"):
            file.write_text("T1\tDrug 0 7\taspirin\n", encoding="utf-8")
            file.with_suffix(".txt").write_text("aspirin\n", encoding="utf-8")
        else:
            file.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("folders", [("b", "c"), ("b",)])
def test_a_file_without_annotations_beside_the_folders_of_sites_is_left_out(
    tmp_path: Path, folders: tuple[str, ...]
) -> None:
    fill(tmp_path / "all", {f"{name}/x.ann": "" for name in folders})
    fill(tmp_path / "all", {"clinic.csv": TABLE, "scores.csv": "a,b\n1,2\n"})
    fill(tmp_path / "all", {"README.md": "About.", ".hidden.csv": TABLE})
    places = find_places([str(tmp_path / "all")], ENCODINGS)
    assert tuple(place.name for place in places.sites) == folders
    assert places.remarks == (
        f"{tmp_path / 'all'}: clinic.csv has no annotations and was left out",
        f"{tmp_path / 'all'}: scores.csv was left out, because a site's files must be "
        "in its folder",
    )


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"b/x.conll": "", "c/x.conll": "", "y.conll": ""}, "y.conll"),
        ({"b/x.ann": "", "c/x.ann": "", "y.ann": ""}, "y.ann, y.txt"),
        ({"b/x.txt": "One.", "c/x.txt": "Two.", "clinic.csv": TABLE}, "clinic.csv"),
    ],
)
def test_files_that_may_be_a_site_beside_folders_are_refused_with_a_command(
    tmp_path: Path, files: Mapping[str, str], named: str
) -> None:
    fill(tmp_path, files)
    with pytest.raises(DataError) as caught:
        find_places([str(tmp_path)], ENCODINGS)
    assert f"in its folders (b, c) and beside them ({named})" in str(caught.value)
    command = f"`fednotes init {tmp_path / 'b'} {tmp_path / 'c'}`"
    assert command in str(caught.value)


def test_a_folder_without_notes_beside_folders_of_sites_is_named(
    tmp_path: Path,
) -> None:
    fill(tmp_path, {"b/x.conll": "", "figures/plot.svg": "<svg/>"})
    (tmp_path / "c").mkdir()
    (tmp_path / ".cache").mkdir()
    (tmp_path / "d").symlink_to(tmp_path / "b")
    places = find_places([str(tmp_path)], ENCODINGS)
    assert [place.name for place in places.sites] == ["b"]
    empty, links = places.remarks
    assert empty.endswith(
        "c, figures have no notes that fednotes can read, so they were left out, and b "
        "is the only site"
    )
    assert ": d was left out, because links to folders are not followed" in links


def test_folders_named_by_years_are_one_site(tmp_path: Path) -> None:
    folder = tmp_path / "mercy"
    fill(folder, {"2019/x.conll": "", "2020-01/x.conll": "", "clinic.csv": TABLE})
    places = find_places([str(folder)], ENCODINGS)
    assert [(place.name, place.root) for place in places.sites] == [("mercy", folder)]
    years, table = places.remarks
    assert "one site, because its folders are years (2019, 2020-01)" in years
    assert f"`fednotes init {folder / '2019'} {folder / '2020-01'}`" in years
    assert "clinic.csv has no annotations" in table
    facts = read_facts(places, ReadOptions())
    assert facts.sites[0].mentions
    proposal = propose(facts, Choices(encoder="none"), has_minilm=False)
    assert proposal.remarks[:2] == places.remarks


def test_a_table_of_labels_beside_folders_of_notes_makes_them_one_site(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "patients"
    fill(folder, {"notes/P1.txt": "Asthma.", "labels.csv": LABELS})
    places = find_places([str(folder)], ENCODINGS)
    assert [place.root for place in places.sites] == [folder]
    assert not places.remarks
    fill(folder, {"more/P2.txt": "No asthma."})
    (remark,) = find_places([str(folder)], ENCODINGS).remarks
    assert "is for the patients of all its folders (more, notes)" in remark


def test_folders_without_annotations_beside_annotated_files_are_named(
    tmp_path: Path,
) -> None:
    fill(tmp_path, {"x.conll": "", "raw/x.txt": "Raw."})
    places = find_places([str(tmp_path)], ENCODINGS)
    assert [place.root for place in places.sites] == [tmp_path]
    (remark,) = places.remarks
    assert remark.endswith("and raw was left out: no annotations")


def test_sites_with_equal_names_are_refused_with_a_remedy(tmp_path: Path) -> None:
    note(tmp_path / "a.conll")
    note(tmp_path / "b.conll")
    paths = [f"north={tmp_path / 'a.conll'}", f"North={tmp_path / 'b.conll'}"]
    with pytest.raises(
        ConfigError, match="choose the names yourself, as in mercy=PATH"
    ):
        find_places(paths, ENCODINGS)
    with pytest.raises(ConfigError, match="a path is given twice"):
        find_places([str(tmp_path / "a.conll")] * 2, ENCODINGS)
    with pytest.raises(ConfigError, match="letters, digits, - and _ only"):
        find_places([f"my site={tmp_path / 'a.conll'}"], ENCODINGS)


# ---- names of entity types -----------------------------------------------------------


@pytest.mark.parametrize(
    ("first_labels", "second_labels", "expected"),
    [
        ({"Drug": 5}, {"DRUG": 3}, ("two", "DRUG", "Drug", True)),
        ({"Drug": 5}, {"drugs": 9}, ("one", "Drug", "drugs", True)),
        ({"Sign_symptom": 5}, {"SignSymptom": 3}, ("two", "SignSymptom", "Sign_symptom", True)),
        ({"Allergies": 5}, {"allergy": 3}, ("two", "allergy", "Allergies", True)),
        ({"Disease": 5}, {"Disease_disorder": 3}, ("two", "Disease_disorder", "Disease", False)),
        ({"Symptom": 5}, {"Sign_symptom": 3}, ("two", "Sign_symptom", "Symptom", False)),
        ({"Drug": 5}, {"Drug": 1, "drug": 3}, ("two", "drug", "Drug", False)),
    ],
)  # fmt: skip
def test_similar_names_of_two_sites_are_proposed(
    first_labels: Mapping[str, int],
    second_labels: Mapping[str, int],
    expected: tuple[str, str, str, bool],
) -> None:
    (proposed,) = find_label_maps({"one": first_labels, "two": second_labels})
    assert (proposed.site, proposed.old, proposed.new, proposed.is_active) == expected
    assert repr(proposed.new) in proposed.reason


@pytest.mark.parametrize(
    ("first_labels", "second_labels"),
    [
        ({"Drug": 5}, {"Drug": 3}),
        ({"Drug": 5}, {"Disease": 3}),
        ({"Drug": 5}, {"Adverse_drug_event": 3}),
        ({"Diagnosis": 5}, {"Diagnosi": 3}),
        ({"!": 5}, {"?": 3}),
        ({"Disease": 5}, {"Disease": 2, "Disease_disorder": 3}),
    ],
)
def test_entity_types_with_another_meaning_are_not_mapped(
    first_labels: Mapping[str, int], second_labels: Mapping[str, int]
) -> None:
    assert find_label_maps({"one": first_labels, "two": second_labels}) == ()


def test_names_of_many_entity_types_are_compared_in_linear_time() -> None:
    """A corpus of 100 KB can have thousands of types."""
    labels = {
        site: {f"{site} disorder{number}": 1 for number in range(4000)}
        for site in ("heart", "lung", "skin")
    }
    labels["skin"] |= {"lung disorder7": 1, "acute heart disorder7": 1}
    with processor_time_below(20):  # it was ten minutes
        (proposed,) = find_label_maps(labels)
        assert (proposed.site, proposed.old) == ("skin", "acute heart disorder7")
        assert proposed.new == "heart disorder7"


def test_names_of_many_sites_are_compared_in_linear_time() -> None:
    labels = {f"s{number}": {f"disorder{number}": 1} for number in range(4000)}
    labels["a"] = {"acute disorder7": 1}
    with processor_time_below(20):  # it was over a minute
        (proposed,) = find_label_maps(labels)
        assert (proposed.site, proposed.new) == ("a", "disorder7")


def test_names_with_many_words_are_compared_in_linear_time() -> None:
    """Broader names have at most twenty words, or each length would cost time."""
    words = [f"v{number}" for number in range(3000)]
    labels = {
        "short": {" ".join(words[:n]): 1 for n in range(1, 1500)},
        "long": {" ".join([*words[:1500], f"x{n}"]): 1 for n in range(500)},
    }
    with processor_time_below(10):  # it was over a minute
        proposed = find_label_maps(labels)
    assert {each.new for each in proposed if each.site == "long"} == {
        " ".join(words[:20])
    }


def test_new_names_of_many_sites_are_compared_in_linear_time() -> None:
    """Each site has another variant of a name that all of them use."""
    number = 10_000
    names = KnownNames({f"s{n}": {"drug": 1} for n in range(number)})
    with processor_time_below(10):  # it was a minute
        for n in range(number):
            (proposed,) = names.map_new_names(f"s{n}", {"Drug" + "!" * (n % 50): 1})
            assert (proposed.new, proposed.is_active) == ("drug", False)


def test_names_that_no_site_has_are_compared_with_those_of_all_sites() -> None:
    names = KnownNames({"one": {"Drug": 5}, "two": {"Disease": 3, "Dose": 1}})
    new = {"DRUGS": 2, "Disease_disorder": 1, "strong dose": 1, "Place": 1}
    proposed = {each.old: each for each in names.map_new_names("two", new)}
    assert proposed.keys() == {"DRUGS"}  # the site has the two broader names itself
    assert (proposed["DRUGS"].new, proposed["DRUGS"].is_active) == ("Drug", True)
    (broader,) = names.map_new_names("one", {"Disease_disorder": 1})
    assert (broader.new, broader.is_active) == ("Disease", False)


# ---- decisions -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sites", "has_minilm", "method", "model"),
    [
        ({"a": {"Drug": 50}, "b": {"Drug": 70}}, True, "finetune", "minilm"),
        ({"a": {"Drug": 50}, "b": {"Drug": 70}}, False, "fedner", "none"),
        ({"a": {"Drug": 50}, "b": {"DRUGS": 70}}, True, "finetune", "minilm"),
        ({"a": {"Drug": 990}, "b": {"Drug": 990, "Rare": 3}}, True, "finetune", "minilm"),
        ({"a": {"Drug": 50}, "b": {"Disease": 70}}, True, "distill", "minilm"),
        ({"a": {"Drug": 50}, "b": {"Disease": 70}}, False, "distill", "none"),
        ({"a": {"Drug": 50, "Test": 50}, "b": {"Drug": 70}}, True, "distill", "minilm"),
        ({"a": {"Drug": 50}}, True, "finetune", "minilm"),
        ({"a": {}, "b": {}}, True, "pretrain", "minilm"),
        ({"a": {}, "b": {}}, False, "pretrain", "minilm"),
        ({"a": {"Drug": 50}, "b": {"Drug": 50}, "c": {}}, True, "finetune", "minilm"),
    ],
)  # fmt: skip
def test_the_proposed_method_fits_the_annotated_types(
    sites: Mapping[str, Mapping[str, int]], has_minilm: bool, method: str, model: str
) -> None:
    proposal = propose(facts_of(sites), Choices(), has_minilm=has_minilm)
    assert (proposal.method.value, proposal.model.value) == (method, model)
    for choice in (proposal.method, proposal.model):
        assert re.fullmatch(r"[A-Z].*[.]", choice.reason), choice


def test_a_frequent_type_that_one_site_lacks_is_a_difference_of_annotation() -> None:
    """Even if it has few of all mentions, as in notes with many types."""
    shared = {f"Type{n}": 400 for n in range(10)}
    sites = {
        "hospital_a": {**shared, "Medication": 159, "Height": 3},
        "hospital_b": shared,
    }
    proposal = propose(facts_of(sites), Choices(), has_minilm=True)
    assert proposal.method.value == "distill"
    assert proposal.remarks[0].startswith(
        "hospital_b never annotates Medication, which hospital_a has 159 times: either "
        'annotators leave such mentions out (then method "distill" fits'
    )
    assert 'hold none (then method "finetune" fits)' in proposal.remarks[0]
    rare = {**sites, "hospital_a": {**shared, "Height": 3}}
    proposal = propose(facts_of(rare), Choices(), has_minilm=True)
    assert proposal.method.value == "finetune"
    assert "except rare ones (Height)" in proposal.method.reason
    assert "never annotates" not in "".join(proposal.remarks)


def test_a_remark_describes_three_sites_that_lack_types_and_counts_the_others() -> None:
    shared = {f"Type{n}": 400 for n in range(10)}
    sites = dict.fromkeys("abcdef", shared)
    sites["a"] = shared | {"Medication": 159}
    remark = propose(facts_of(sites), Choices(), has_minilm=True).remarks[0]
    assert remark.count("never annotates Medication") == 3
    assert "; types are missing at 2 more sites, too: either annotators" in remark


@pytest.mark.parametrize("other_type", ["Drug", "Disease"])
def test_an_encoder_that_the_user_refuses_is_not_called_missing(
    other_type: str,
) -> None:
    facts = facts_of({"a": {"Drug": 50}, "b": {other_type: 70}})
    refused = propose(facts, Choices(encoder="none"), has_minilm=True)
    missing = propose(facts, Choices(), has_minilm=False)
    assert "ou want no pre-trained encoder" in f"{refused.method}{refused.model}"
    assert "installed" not in f"{refused.method}{refused.model}"
    assert "installed" in f"{missing.method}{missing.model}"


def test_a_site_with_few_notes_does_not_decide_the_method() -> None:
    """One note lacks many types; a type that only it has is another matter."""
    sites = {
        "a": {"Drug": 50, "Dose": 40},
        "b": {"Drug": 60, "Dose": 30},
        "c": {"Drug": 9},
    }
    facts = facts_of(sites)
    small = replace(facts.sites[2], notes=1)
    with_small = replace(facts, sites=(*facts.sites[:2], small))
    proposal = propose(with_small, Choices(), has_minilm=True)
    assert proposal.method.value == "finetune"
    assert any(
        remark.startswith("c: 1 note cannot show which types")
        for remark in proposal.remarks
    )
    assert propose(facts, Choices(), has_minilm=True).method.value == "distill"
    other = replace(small, types={"Disease": 90})
    different = replace(facts, sites=(*facts.sites[:2], other))
    assert propose(different, Choices(), has_minilm=True).method.value == "distill"


def test_choices_of_the_user_override_the_proposal() -> None:
    sites = {"a": {"Drug": 50}, "b": {"DRUGS": 70}}
    choices = Choices(label_maps={("a", "Drug"): False})
    proposal = propose(facts_of(sites), choices, has_minilm=True)
    assert [each.is_active for each in proposal.label_maps] == [False]
    assert proposal.method.value == "distill"

    choices = Choices(method="fedner", encoder="none")
    proposal = propose(facts_of(sites), choices, has_minilm=True)
    assert (proposal.method.value, proposal.model.value) == ("fedner", "none")

    with pytest.raises(ParameterError, match=r"`method` pretrain: .* known: distill"):
        propose(facts_of(sites), Choices(method="pretrain"), has_minilm=True)
    with pytest.raises(ParameterError, match="come from 2 sites: leave it out"):
        propose(facts_of(sites), Choices(silos=3), has_minilm=True)


def test_one_corpus_is_dealt_into_as_many_silos_as_it_can_fill() -> None:
    sites = {"a": {"Drug": 50}}
    few = propose(facts_of(sites, units=3), Choices(), has_minilm=True).silos
    many = propose(facts_of(sites, patients=9), Choices(), has_minilm=True).silos
    chosen = propose(facts_of(sites), Choices(silos=7), has_minilm=True).silos
    assert few == Silos(3, "document")
    assert many == Silos(5, "patient")
    assert chosen == Silos(7, "document")
    with pytest.raises(ParameterError, match="`silos` 41: expected 2 to 40"):
        propose(facts_of(sites), Choices(silos=41), has_minilm=True)
    with pytest.raises(DataError, match="give more notes, or a folder for each site"):
        propose(facts_of(sites, units=1), Choices(), has_minilm=True)


def test_a_site_with_a_single_note_is_described_in_the_singular() -> None:
    (site,) = facts_of({"north": {"Drug": 1}}).sites
    lengths = Lengths(1, 1, 1)
    site = replace(site, notes=1, patients=1, words=lengths)
    assert describe_site_notes(site) == (
        "1 note (conll), 1 word in the median note, 1 patient, 1 mention: Drug 1."
    )


def test_remarks_state_what_a_user_should_know() -> None:
    sites = {"a": {"Drug": 50, "Odd\x1b[2J": 3}, "b": {"Disease": 70}, "c": {}}
    remarks = propose(facts_of(sites), Choices(), has_minilm=True).remarks
    text = "\n".join(remarks)
    assert "c: no annotations, so this job leaves it out" in text
    assert "two sites: between real sites, a secure sum needs 3" in text
    assert "no entity type is annotated at all sites" in text
    assert "learn a type: a of Odd\\x1b[2J" in text


def test_one_remark_names_the_rare_types_of_all_sites() -> None:
    sites = {name: {"Drug": 50, f"Rare{name}": 3} for name in "abcde"}
    remarks = propose(facts_of(sites), Choices(), has_minilm=True).remarks
    assert [each for each in remarks if "fewer than 10 mentions" in each] == [
        "fewer than 10 mentions, too few for a model to learn a type: a of Rarea; "
        "b of Rareb; c of Rarec; and 2 more"
    ]


def test_rare_types_that_a_site_lacks_are_listed_as_by_the_simulation() -> None:
    """Pooled is one model of all notes with the types that the comment lists."""
    sites = {
        "a": {"Drug": 990, "Dose": 12, "Time": 9},
        "b": {"Drug": 990, "Dose": 14, "Time": 30, "Height": 3},
    }
    proposal = propose(facts_of(sites), Choices(), has_minilm=True)
    assert proposal.remarks[0].startswith(
        "some sites lack Height, so the pooled model has an output layer for each site"
    )
    assert proposal.common_types == ("Dose", "Drug")
    text = format_job(proposal, Path())
    assert '# [tags]\n# types = ["Dose", "Drug"]\n' in text
    same = propose(
        facts_of({"a": {"Drug": 9}, "b": {"Drug": 9}}), Choices(), has_minilm=True
    )
    assert same.common_types == ()
    assert "[tags]" not in format_job(same, Path())


# ---- the file ------------------------------------------------------------------------


def test_the_job_file_has_each_choice_with_its_reason() -> None:
    odd_name = 'The "Drug"\n# [sites.x]'
    sites = {"a": {odd_name: 50, "Test": 30}, "b": {odd_name.upper(): 70, "Test": 30}}
    proposal = propose(facts_of(sites), Choices(), has_minilm=True)
    text = format_job(proposal, Path())
    job = fn.job(first_job.FirstJob(proposal, text).table)
    assert dict(job.sites["a"].label_map) == {odd_name: odd_name.upper()}
    assert job.method == "finetune"
    assert proposal.method.reason in " ".join(text.replace("\n# ", " ").split())
    assert "in case, punctuation or plural only" in text
    assert max(map(len, text.splitlines())) <= 120


def test_an_ambiguous_path_is_refused(
    tmp_path: Path,
) -> None:
    note(tmp_path / "$HOME" / "a" / "x.conll")
    note(tmp_path / "$HOME" / "b" / "x.conll")
    with pytest.raises(ConfigError, match="rename the folder"):
        fn.init(tmp_path / "$HOME", encoder="none")


def test_relative_paths_are_relative_to_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    note(Path("a/x.conll"))
    note(Path("b/x.conll"))
    proposed_job = fn.init(["a", "b"], "jobs/first.toml", encoder="none")
    assert proposed_job.table["sites"]["a"]["path"] == "../a"
    absolute = fn.init([tmp_path / "a", tmp_path / "b"], encoder="none")
    assert absolute.table["sites"]["a"]["path"] == str(tmp_path / "a")
    assert absolute.path is None


def test_an_existing_job_is_replaced_only_on_request(tmp_path: Path) -> None:
    note(tmp_path / "a" / "x.conll")
    note(tmp_path / "b" / "x.conll")
    out = tmp_path / "job.toml"
    out.write_text("mine\n", encoding="utf-8")
    paths = {"a": tmp_path / "a", "b": tmp_path / "b"}
    with pytest.raises(ParameterError, match="`overwrite` to replace it"):
        fn.init(paths, out, encoder="none")
    assert out.read_text("utf-8") == "mine\n"
    proposed_job = fn.init(paths, out, encoder="none", overwrite=True)
    assert out.read_text("utf-8") == proposed_job.text
    assert proposed_job.path == out
    assert proposed_job.to_dict()["method"]["value"] == "fedner"


def test_a_proposed_job_without_an_encoder_trains_the_hashed_tagger(
    tmp_path: Path,
) -> None:
    """A tagger that needs no file; of its layers, the output stays at the site."""
    for site in ("a", "b"):
        note(tmp_path / site / "x.conll")
    paths = {"a": tmp_path / "a", "b": tmp_path / "b"}
    proposed_job = fn.init(paths, tmp_path / "job.toml", encoder="none")
    assert proposed_job.path is not None
    table = fn.job(proposed_job.path).table
    assert table["model"] == {"tagger": "hash-cnn"}
    assert table["training"]["private"] == ["crf"]


def test_a_job_that_cannot_be_written_is_refused_before_the_notes_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "broken.conll"
    notes.write_text("Took O\naspirin X-Y-Z B-Drug\nno\n\n", encoding="utf-8")
    with pytest.raises(ParameterError, match="conll: choose another `out`"):
        fn.init(notes, notes / "jobs" / "job.toml", encoder="none")
    # Root may write into every folder.
    monkeypatch.setattr(first_job.os, "access", lambda *_: False)
    with pytest.raises(ParameterError, match=r"no file can be written in .*another"):
        fn.init(notes, tmp_path / "new" / "job.toml", encoder="none")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "paths", [[], {}, "", [" "], {"a": ""}, {"a": "notes", "b": " "}]
)
def test_a_first_job_needs_at_least_one_path_and_no_empty_ones(paths: Any) -> None:
    with pytest.raises(ConfigError, match="no notes were given: give a file or folder"):
        fn.init(paths, encoder="none")


def test_a_missing_encoder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note(tmp_path / "a" / "x.conll")
    note(tmp_path / "b" / "x.conll")
    with pytest.raises(ParameterError, match="`encoder` nowhere: no such directory"):
        fn.init(tmp_path, encoder="nowhere")
    monkeypatch.setattr(first_job, "has_minilm", lambda: False)
    assert fn.init(tmp_path).proposal.method.value == "fedner"
    with pytest.raises(MissingExtra, match="transformers"):
        fn.init(tmp_path, method="finetune")


# ---- files ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "the folder is empty: give one with notes"),
        ({"a.bin": b"\x00\x01\x02"}, "no file in this folder is of a known format"),
        (
            {
                "a.conll": b"Took O\naspirin B-Drug\n\n",
                "b.txt": b"Took aspirin",
                "b.ann": b"T1\tDrug 5 12\taspirin\n",
            },
            "the folder mixes formats: brat (2 files), conll (1 files); choose one of them",
        ),
        ({"a.txt": b"caf\xe9"}, 'such as `encoding = "cp1252"`'),
        ({"a.conll": b"Took O\naspirin O\n\n"}, "no entity is annotated"),
        ({"a.conll": b"Took O\naspirin B-Drug\n\n"}, "too few notes (1) to be split"),
        ({"x/a.conll": b"Took O\naspirin X-Y-Z B-Drug\nno\n\n"}, "a.conll:2"),
    ],
)
def test_an_error_names_unusable_files(
    tmp_path: Path, files: Mapping[str, bytes], message: str
) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    with pytest.raises(DataError) as refused:
        fn.init(folder, encoder="none")
    assert message in str(refused.value)
    assert str(folder) in str(refused.value)
    assert "aspirin" not in str(refused.value)


def test_bad_data_and_encodings_are_read_as_the_job_will_read_them(
    tmp_path: Path,
) -> None:
    for site in ("a", "b"):
        note(tmp_path / site / "x.conll", word=f"tabl{site}")
        path = tmp_path / site / "x.conll"
        path.write_bytes(path.read_bytes() + b"caf\xe9 O\nmore O\nless\n\n")
    with pytest.raises(DataError):
        fn.init(tmp_path, encoder="none")
    proposed_job = fn.init(tmp_path, encoder="none", on_error="skip", encoding="cp1252")
    assert proposed_job.table["sites"]["a"]["encoding"] == "cp1252"
    assert proposed_job.table["sites"]["a"]["on_error"] == "skip"
    assert proposed_job.proposal.facts.sites[0].encodings == ("cp1252",)
    assert "a: left out because it cannot be used: 1 line" in "\n".join(
        proposed_job.proposal.remarks
    )


def test_one_remark_names_the_columns_that_nothing_reads(tmp_path: Path) -> None:
    table = "study_no,case,text\n1,7,A note.\n"
    known = "NOTE_ID,PERSON_ID,NOTE_TEXT,PROVIDER_ID\n1,7,A note.,3\n"
    fill(tmp_path, {"a/n.csv": table, "b/n.csv": table, "c/n.csv": known})
    facts = read_facts(find_places([str(tmp_path)], ENCODINGS), ReadOptions())
    remarks = propose(facts, Choices(), has_minilm=True).remarks
    (remark,) = [each for each in remarks if "not used" in each]
    assert remark.startswith("columns that are not used: case, study_no (a, b); if one")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("note_id,text\n", "n.csv: the file has no notes, or a header and no rows"),
        ("note_id,text\n1,\n", "none of its records is a note (1 without text)"),
    ],
)
def test_a_table_without_notes_is_refused_with_its_reason(
    tmp_path: Path, table: str, message: str
) -> None:
    fill(tmp_path, {"n.csv": table})
    with pytest.raises(DataError, match=re.escape(message)):
        read_facts(find_places([str(tmp_path / "n.csv")], ENCODINGS), ReadOptions())


def test_notes_without_annotations_are_proposed_for_pretraining(tmp_path: Path) -> None:
    rows = "".join(f"{n},p{n // 2},Note {n} says little.\n" for n in range(12))
    (tmp_path / "ward.csv").write_text(f"note_id,subject_id,text\n{rows}")
    proposed_job = fn.init(tmp_path / "ward.csv", encoder="minilm")
    (site,) = proposed_job.proposal.facts.sites
    assert (site.notes, site.patients, site.holds) == (12, 6, "notes")
    assert proposed_job.table["method"] == "pretrain"
    assert proposed_job.table["silos"] == {"number": 5, "by": "patient"}


# ---- the job as it is ----------------------------------------------------------------


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generated notes: three sites with the same types, three with different ones."""
    folder = tmp_path_factory.mktemp("hospitals")
    generated = generate(3, sentences_per_site=60, seed=4)
    write_sites(generated, folder / "different", "conll")
    for site in generated:
        target = folder / "same" / site.data.id
        target.mkdir(parents=True)
        documents = (*site.complete.train, *site.complete.valid, *site.complete.test)
        FORMATS["jsonl"].write(documents, target / "notes.jsonl")
    return folder


QUICK = {
    "finetune": {"training": {"cycles": 1}},
    "fedner": {"training": {"epochs": 1, "personal_epochs": 0}},
    "distill": {"training": {"rounds": 1}},
    "personal": {"training": {"cycles": 1, "distil_epochs": 1}},
    "pretrain": {"training": {"cycles": 1, "head_cycles": 0}},
}


def run_as_it_is(proposed_job: fn.FirstJob, out: Path) -> fn.RunResult:
    """Check the written job, and simulate its first epoch."""
    assert proposed_job.path is not None
    checked = fn.check(proposed_job.path)
    assert checked.wrong == (), checked.wrong
    quick = QUICK[proposed_job.proposal.method.value]
    return fn.simulate(
        fn.job(proposed_job.path, conditions=["federated"], **quick), out
    )


@pytest.mark.parametrize(
    ("notes", "method"),
    [("same", "finetune"), ("different", "distill"), ("same/reports", "finetune")],
)
def test_the_proposed_job_passes_check_and_simulate(
    tmp_path: Path, hospitals: Path, bert: Path, notes: str, method: str
) -> None:
    proposed_job = fn.init(hospitals / notes, tmp_path / "job.toml", encoder=str(bert))
    assert proposed_job.proposal.method.value == method
    result = run_as_it_is(proposed_job, tmp_path / "run")
    number = proposed_job.proposal.silos.number if proposed_job.proposal.silos else 3
    assert len(result.sites) == number


@pytest.mark.slow
@pytest.mark.parametrize(
    ("notes", "method"),
    [
        ("same", "fedner"),
        ("different", "distill"),
        ("different", "fedner"),
        ("same/reports", "fedner"),
    ],
)
def test_the_proposed_job_of_a_light_tagger_passes_check_and_simulate(
    tmp_path: Path, hospitals: Path, notes: str, method: str
) -> None:
    out = tmp_path / "job.toml"
    proposed_job = fn.init(hospitals / notes, out, encoder="none", method=method)
    assert proposed_job.proposal.is_light
    run_as_it_is(proposed_job, tmp_path / "run")


@pytest.mark.slow
def test_proposed_jobs_of_other_methods_pass_check_and_simulate(
    tmp_path: Path, hospitals: Path, bert: Path
) -> None:
    out = tmp_path / "job.toml"
    proposed_job = fn.init(
        hospitals / "different", out, method="personal", encoder=str(bert)
    )
    run_as_it_is(proposed_job, tmp_path / "personal")
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(8):
        (texts / f"{number}.txt").write_text("Denies fever. No cough today.\n" * 3)
    encoder = save_bert(tmp_path / "bert", max_position_embeddings=128)
    proposed_job = fn.init(texts, out, encoder=str(encoder), overwrite=True)
    assert proposed_job.proposal.method.value == "pretrain"
    run_as_it_is(proposed_job, tmp_path / "pretrain")


def shown_words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.casefold()))


def test_no_text_of_a_mention_is_shown(hospitals: Path) -> None:
    """All that a proposal says, against the words of all mentions."""
    proposed_job = fn.init(hospitals / "different", encoder="none")
    words_shown = shown_words(
        f"{proposed_job.text}{proposed_job.to_dict()}{proposed_job!r}"
    )
    type_words = shown_words(f"{' '.join(proposed_job.proposal.facts.sites[0].types)}")
    for site in generate(3, sentences_per_site=60, seed=4):
        for document in (*site.data.train, *site.data.test):
            for span in document.spans:
                forms = shown_words(document.text[span.start : span.end])
                secrets = {
                    form for form in forms if len(form) > 5 and not form.isdigit()
                }
                assert not secrets & (words_shown.keys() - type_words.keys())


# ---- real corpora --------------------------------------------------------------------


@pytest.mark.corpora
@pytest.mark.slow
@pytest.mark.parametrize(
    ("paths", "method", "number"),
    [
        (["bc5cdr/train.tsv", "bc5cdr/devel.tsv", "north=bc5cdr/test.tsv"], "finetune", 3),
        (["psytar", "ncbi_disease", "bc5cdr/pubtator"], "distill", 3),
        (["maccrobat"], "finetune", 5),
    ],
)  # fmt: skip
def test_jobs_for_real_corpora_pass_check_and_simulate(
    tmp_path: Path,
    corpora: Path,
    monkeypatch: pytest.MonkeyPatch,
    bert: Path,
    paths: list[str],
    method: str,
    number: int,
) -> None:
    monkeypatch.chdir(corpora)
    proposed_job = fn.init(paths, tmp_path / "job.toml", encoder=str(bert))
    assert proposed_job.proposal.method.value == method
    assert fn.check(proposed_job.path).wrong == ()
    limits = {"max_sentences": 40, "max_valid_sentences": 20, "max_test_sentences": 20}
    sites = dict.fromkeys(proposed_job.table["sites"], limits)
    job = fn.job(
        proposed_job.path, conditions=["federated"], sites=sites, **QUICK[method]
    )
    assert len(fn.simulate(job, tmp_path / "run").sites) == number

    text = f"{proposed_job.text}{proposed_job.to_dict()}".casefold()
    for site in proposed_job.proposal.facts.sites:
        for path in site.parts.values():
            for document in fn.read(path):
                for span in document.spans:
                    form = document.text[span.start : span.end].casefold()
                    # Shorter ones are words and numbers that any job may have.
                    is_phrase = len(form.split()) >= 3 and len(form) >= 12
                    assert not is_phrase or form not in text
