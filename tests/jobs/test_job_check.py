"""`fednotes check` reports everything that is wrong with a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from corpus_files import write_hospitals, write_notes
from tiny_jobs import JOB, SITES, corpus

from fednotes.data.checks import Finding, find_notes_of_several_sites
from fednotes.jobs.checking import Checked
from fednotes.jobs.job import load_sites
from fednotes.jobs.job_check import check_job
from fednotes.jobs.job_file import parse_job


def findings_of(checked: Checked, code: str) -> tuple[Finding, ...]:
    return tuple(finding for finding in checked.findings if finding.code == code)


def check_sites(folder: Path, **sites: str) -> Checked:
    """Check a job.

    Args:
        folder: Folder of the job.
        sites: The keys of each site's table, as they are written.
    """
    tables = "".join(f"[sites.{name}]\n{keys}\n" for name, keys in sites.items())
    path = folder / "job.toml"
    path.write_text(f"{JOB}{tables}")
    return check_job(str(path))


# ---- notes of several sites ----------------------------------------------------------


def test_sites_with_the_same_notes_cause_a_warning(tmp_path: Path) -> None:
    write_notes(tmp_path / "a.jsonl", range(60))
    checked = check_sites(tmp_path, north='path = "a.jsonl"', south='path = "a.jsonl"')
    (finding,) = findings_of(checked, "equal_notes")
    assert (finding.level, finding.where) == ("warning", "north, south")
    assert finding.counts == {"notes": 48, "of": 48}  # all but the test data
    assert finding.message == (
        "north has 48 notes that south has too, of 48 in all: sites with the same "
        "notes gain little from each other; check the paths of both sites"
    )
    assert not checked.wrong


def test_a_single_common_note_is_in_the_singular(tmp_path: Path) -> None:
    write_notes(tmp_path / "a.jsonl", range(1))
    write_notes(tmp_path / "b.jsonl", range(1, 3))
    keys = 'train = "a.jsonl"\ntest = "b.jsonl"\nvalid_fraction = 0'
    checked = check_sites(tmp_path, north=keys, south=keys)
    (finding,) = findings_of(checked, "equal_notes")
    assert finding.message.startswith("north has 1 note that south has too, of 1")


def test_the_command_prints_the_warning_without_the_text(
    tmp_path: Path, run_cli: Any
) -> None:
    write_notes(tmp_path / "a.jsonl", range(60))
    check_sites(tmp_path, north='path = "a.jsonl"', south='path = "a.jsonl"')
    code, out, _ = run_cli("check", tmp_path / "job.toml")
    assert code == 0
    words = " ".join(out.split())
    assert "north has 48 notes that south has too" in words
    assert "aspirin" not in words
    _, out, _ = run_cli("check", tmp_path / "job.toml", "--json")
    assert "equal_notes" in {finding["code"] for finding in json.loads(out)["findings"]}
    assert "aspirin" not in out


def test_equal_notes_are_recognised_by_text_whatever_their_ids_and_case(
    tmp_path: Path,
) -> None:
    path = write_notes(tmp_path / "a.jsonl", range(60))
    text = path.read_text()
    changed = text.replace('"id": "n', '"id": "m').replace("Case", "CASE")
    (tmp_path / "b.jsonl").write_text(changed)
    checked = check_sites(tmp_path, north='path = "a.jsonl"', south='path = "b.jsonl"')
    (finding,) = findings_of(checked, "equal_notes")
    assert finding.counts["notes"] > 30


def test_the_warning_depends_on_the_share_of_the_smaller_site(tmp_path: Path) -> None:
    """South has 3 of its 50 notes from north: 6 %. West has 2 of 50: 4 %."""
    write_notes(tmp_path / "test.jsonl", range(5000, 5004))
    for name, numbers in {
        "north": range(500),
        "south": range(497, 547),
        "west": range(1000, 1050),
    }.items():
        write_notes(tmp_path / f"{name}.jsonl", numbers)
    west = (tmp_path / "west.jsonl").read_text().splitlines(keepends=True)
    north = (tmp_path / "north.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "west.jsonl").write_text("".join([*north[:2], *west[:48]]))
    checked = check_sites(
        tmp_path,
        **{
            name: f'train = "{name}.jsonl"\ntest = "test.jsonl"\nvalid_fraction = 0'
            for name in ("north", "south", "west")
        },
    )
    (finding,) = findings_of(checked, "equal_notes")
    assert finding.where == "south, north"
    assert finding.counts == {"notes": 3, "of": 50}


def test_sites_may_have_the_same_test_data(tmp_path: Path) -> None:
    write_notes(tmp_path / "a.jsonl", range(30))
    write_notes(tmp_path / "b.jsonl", range(100, 130))
    write_notes(tmp_path / "test.jsonl", range(200, 230))
    checked = check_sites(
        tmp_path,
        north='train = "a.jsonl"\ntest = "test.jsonl"',
        south='train = "b.jsonl"\ntest = "test.jsonl"',
    )
    assert not findings_of(checked, "equal_notes")


def test_equal_short_texts_are_not_equal_notes(tmp_path: Path) -> None:
    for name in ("north", "south"):
        rows = "".join(
            f"# newdoc id = {name}{number}\nTook O\naspirin B-Drug\n{number} O\n\n"
            for number in range(60)
        )
        (tmp_path / f"{name}.conll").write_text(rows)
    checked = check_sites(
        tmp_path, north='path = "north.conll"', south='path = "south.conll"'
    )
    assert not findings_of(checked, "equal_notes")


def test_sites_that_divide_a_corpus_have_no_notes_in_common(tmp_path: Path) -> None:
    write_notes(tmp_path / "a.jsonl", range(60))
    checked = check_sites(
        tmp_path,
        north='path = "a.jsonl"\nshare = "1/2"',
        south='path = "a.jsonl"\nshare = "2/2"',
    )
    assert not findings_of(checked, "equal_notes")


def test_notes_without_annotations_are_compared(tmp_path: Path) -> None:
    for name, start in (("north", 0), ("south", 30)):
        rows = [
            {"id": f"{name}{number}", "text": f"Case {number} took aspirin every day."}
            for number in range(start, start + 40)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    sites = {name: {"path": f"{name}.jsonl"} for name in ("north", "south")}
    table = {"method": "pretrain", "sites": sites}
    job = parse_job(table, "j", tmp_path, "j.toml")
    texts = {site.id: job.kind.iterate_notes(site) for site in load_sites(job).data}
    (finding,) = find_notes_of_several_sites(texts)
    assert finding.counts == {"notes": 10, "of": 40}


def test_at_most_ten_pairs_of_sites_with_equal_notes_are_listed() -> None:
    """Six equal sites have 15 pairs."""
    notes = [f"Case {number} took aspirin every day." for number in range(40)]
    *pairs, remainder = find_notes_of_several_sites(dict.fromkeys("abcdef", notes))
    assert len(pairs) == 10
    assert {finding.code for finding in (*pairs, remainder)} == {"equal_notes"}
    assert remainder.message == "5 more pairs of sites have many notes in common"


# ---- parts of a site -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "test", "kinds"),
    [
        ({}, {}, []),
        ({"patient": 2}, {"patient": 1}, ["shared_patients"]),
        ({"first_id": "m7"}, {"first_id": "m7"}, ["shared_notes"]),
        # as a reader would make it of a file and a line
        ({"first_id": "a:7"}, {"first_id": "a:7"}, []),
    ],
)
def test_a_note_or_patient_in_two_parts_of_a_site_is_a_problem(
    tmp_path: Path, train: dict[str, Any], test: dict[str, Any], kinds: list[str]
) -> None:
    write_notes(tmp_path / "a.jsonl", range(30), **train)
    write_notes(tmp_path / "b.jsonl", range(100, 130), **test)
    checked = check_sites(tmp_path, north='train = "a.jsonl"\ntest = "b.jsonl"')
    assert [problem.kind for problem in checked.wrong] == kinds


def test_train_and_test_may_have_files_of_equal_names(tmp_path: Path) -> None:
    _, north = write_hospitals(tmp_path)
    keys = 'train = "mercy"\ntest = "north"'
    problem, *_ = check_sites(tmp_path, north=keys).wrong
    assert problem.kind == "shared_notes"
    text = (north / "003.txt").read_text()
    (north / "003.txt").write_text(text.replace("both", "none"))
    assert not check_sites(tmp_path, north=keys).wrong


@pytest.mark.parametrize(
    ("keys", "levels"), [("", []), ('split = "sentence"\n', ["warning"] * 3)]
)
def test_splitting_by_sentence_causes_a_warning_about_notes_in_two_parts(
    tmp_path: Path, keys: str, levels: list[str]
) -> None:
    write_notes(tmp_path / "a.jsonl", range(60))
    checked = check_sites(tmp_path, north=f'path = "a.jsonl"\n{keys}')
    assert not checked.wrong
    findings = findings_of(checked, "shared_notes")
    assert [finding.level for finding in findings] == levels


def test_a_label_that_equals_the_outside_tag_is_refused(tmp_path: Path) -> None:
    path = write_notes(tmp_path / "a.jsonl", range(60))
    path.write_text(path.read_text().replace('"Drug"', '"O"'))
    (problem,) = check_sites(tmp_path, north='path = "a.jsonl"').wrong
    assert "mentions are called 'O'" in problem.message
    mapped = 'path = "a.jsonl"\nlabel_map = { O = "Other" }'
    assert not check_sites(tmp_path, north=mapped).wrong


def test_a_skipping_site_has_remarks_in_place_of_problems(tmp_path: Path) -> None:
    path = write_notes(tmp_path / "a.jsonl", range(60))
    path.write_text(path.read_text() + "{\n{\n")
    refused = check_sites(tmp_path, north='path = "a.jsonl"').wrong
    places = [(problem.line, problem.kind) for problem in refused]
    assert places == [(61, "line"), (62, "line")]
    checked = check_sites(tmp_path, north='path = "a.jsonl"\non_error = "skip"')
    assert not checked.wrong
    assert checked.sites is not None
    warning = (
        "warning: north: left out of a.jsonl, because they cannot be used: 2 lines"
    )
    assert warning in checked.sites.messages


def write_unlearnt_types(folder: Path) -> str:
    """Write parts of which valid and test have types of their own; return the keys."""
    for part, text in {
        "train": "a B-X\nb O\n\nc B-X\n",
        "valid": "d B-Y\ne O\n\nf B-X\n",
        "test": "g B-Y\nh B-Z\n\ni B-X\nj B-Y\n",
    }.items():
        (folder / f"{part}.conll").write_text(text)
    return 'train = "train.conll"\nvalid = "valid.conll"\ntest = "test.conll"\n'


def test_types_without_training_mentions_cause_a_warning(tmp_path: Path) -> None:
    checked = check_sites(tmp_path, north=write_unlearnt_types(tmp_path))
    assert checked.wrong == ()
    findings = findings_of(checked, "unlearnt_types")
    counts = {finding.where: dict(finding.counts) for finding in findings}
    assert counts == {"north/valid": {"Y": 1}, "north/test": {"Y": 2, "Z": 1}}
    assert checked.sites is not None
    start = (
        "warning: north/test: 3 mentions have types that the training data do not have "
        "(Y, Z), which no model can learn"
    )
    assert any(line.startswith(start) for line in checked.sites.messages)


def test_types_listed_by_the_site_need_no_training_mention(tmp_path: Path) -> None:
    keys = write_unlearnt_types(tmp_path)
    checked = check_sites(tmp_path, north=f'{keys}types = ["X", "Y", "Z"]')
    assert (checked.wrong, findings_of(checked, "unlearnt_types")) == ((), ())


# ---- what a simulation would refuse --------------------------------------------------


def test_problems_of_all_sites_and_of_the_model_are_listed_together(
    tmp_path: Path,
) -> None:
    (tmp_path / "north.conll").write_text("a B-X\nb O\nc\n")
    (tmp_path / "south.conll").write_text("a B-X\nb O\n\nc O O O\n")
    job = tmp_path / "job.toml"
    job.write_text(JOB.replace("[model]", '[model]\nword_vectors = "none.txt"') + SITES)
    checked = check_job(str(job))
    north, south, model = checked.wrong
    assert (Path(north.file).name, north.line) == ("north.conll", 3)
    assert (Path(south.file).name, south.line) == ("south.conll", 4)
    assert "none.txt" in model.message
    assert checked.number == 3


def test_a_problem_that_the_model_repeats_is_listed_once(tmp_path: Path) -> None:
    """A federation that is too small is refused with and without the notes."""
    (tmp_path / "north.conll").write_text("a B-X\nb O\nc\n")
    corpus(tmp_path / "south.conll", "Drug", "south")
    job = tmp_path / "job.toml"
    job.write_text(f"{JOB}{SITES}[federation]\nsecure_sum = true\n")
    messages = [problem.message for problem in check_job(str(job)).wrong]
    assert len(messages) == len(set(messages)) == 2
    assert "it needs 3" in messages[1]


@pytest.mark.parametrize(
    ("original", "replacement", "message"),
    [
        ("[model]", '[model]\nword_vectors = "none.txt"', "none.txt"),
        ("[model]", '[model]\ncontextual = "no/such"', "no/such"),
        ("[model]", "[model]\ntager = 1", "unknown key 'tager'"),
        ("[training]", "[training]\nepocs = 1", "unknown key 'epocs'"),
        ("[training]", "[federation]\nsecure_sum = true\n[training]", "it needs 3"),
        ("[training]", "[training", "not a TOML file"),
    ],
)
def test_a_check_reports_what_a_simulation_refuses(
    tmp_path: Path, original: str, replacement: str, message: str, run_cli: Any
) -> None:
    corpus(tmp_path / "north.conll", "Drug", "north")
    corpus(tmp_path / "south.conll", "Drug", "south")
    job = tmp_path / "job.toml"
    job.write_text((JOB + SITES).replace(original, replacement, 1))
    (problem,) = check_job(str(job)).wrong
    assert message in problem.message
    code, _, err = run_cli("simulate", job, "--out", tmp_path / "run")
    assert code == 2
    assert message in err
