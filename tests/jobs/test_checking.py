"""`fednotes check` reports everything that is wrong with a corpus."""

from __future__ import annotations

import json
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import pytest
from corpus_files import write_damaged_brat, write_hospitals, write_notes

from fednotes.cli.app import fail
from fednotes.core.errors import DataError, Problem
from fednotes.core.types import Document
from fednotes.core.work import reporting_to
from fednotes.data.checks import Finding
from fednotes.data.formats import examine, read
from fednotes.jobs.checking import Checked, check_files


def findings_of(checked: Checked, code: str) -> tuple[Finding, ...]:
    return tuple(finding for finding in checked.findings if finding.code == code)


def kinds_of(checked: Checked) -> list[str]:
    return [problem.kind for problem in checked.wrong]


# ---- what readers refuse and leave out -----------------------------------------------


def test_a_check_lists_the_problems_of_all_files(tmp_path: Path) -> None:
    result = check_files([write_damaged_brat(tmp_path / "notes")]).to_dict()
    problems = [
        (Path(problem["file"]).name, problem["line"], problem["kind"])
        for problem in result["problems"]
    ]
    assert problems == [
        ("alone.txt", None, "document"),
        ("beyond.ann", 2, "mention"),
        ("cut.ann", 3, "line"),
        ("latin.txt", 1, "document"),
        ("moved.ann", 2, "mention"),
        ("twice.ann", 2, "line"),
    ]
    assert result["counts"] == {
        "problems": 6,
        "kinds": {"document": 2, "mention": 2, "line": 2},
    }


def test_a_check_shows_no_text_of_a_note(tmp_path: Path) -> None:
    checked = check_files([write_damaged_brat(tmp_path / "notes")])
    assert "rash" not in json.dumps(checked.to_dict())


def test_texts_without_annotations_are_counted_by_a_check(tmp_path: Path) -> None:
    checked = check_files([write_damaged_brat(tmp_path / "notes")])
    (finding,) = findings_of(checked, "texts_without_annotations")
    assert finding.counts == {"texts": 1}


def test_a_reader_refuses_a_corpus_with_all_of_its_problems(tmp_path: Path) -> None:
    folder = write_damaged_brat(tmp_path / "notes")
    message = r"alone.txt: no such file \(and 5 more\)"
    with pytest.raises(DataError, match=message) as caught:
        read(folder)
    assert len(caught.value.problems) == 6


def test_a_skipping_reader_leaves_out_unusable_data(tmp_path: Path) -> None:
    folder = write_damaged_brat(tmp_path / "notes")
    mentions = {
        document.id: len(document.spans) for document in read(folder, None, "skip")
    }
    assert mentions == {
        "bare": 0,
        "beyond": 1,
        "cut": 2,
        "good": 1,
        "moved": 1,
        "twice": 1,
    }
    assert str(examine(folder)[1]) == "2 documents, 2 mentions, 2 lines"


def test_data_left_out_on_request_are_not_a_problem(tmp_path: Path) -> None:
    checked = check_files([write_damaged_brat(tmp_path / "notes")], None, "skip")
    assert not checked.wrong
    (finding,) = findings_of(checked, "left_out")
    assert finding.counts == {"document": 2, "mention": 2, "line": 2}


@pytest.mark.parametrize(
    ("name", "content", "places", "documents"),
    [
        ("a.conll", "a O\nb B-X\n\nc O O\nd O\n\ne B-X\n", [(4, "line")], 2),
        ("a.conll", "a X\nb Y\n", [(1, "line"), (2, "line")], 0),
        (
            "a.jsonl",
            '{"text": "ab"}\n{"text"\n{"text": 3}\n',
            [(2, "line"), (3, "document")],
            1,
        ),
        (
            "a.jsonl",
            '{"text": "ab", "spans": [{"start": 0, "end": 9, "label": "X"}, [0, 1, "X"]]}\n',
            [(1, "mention")],
            1,
        ),
        (
            "a.pubtator",
            "1|t|ab\n1\t0\t9\tab\tX\n2\t0\t1\ta\tX\n",
            [(2, "mention"), (3, "line")],
            1,
        ),
    ],
)
def test_every_wrong_line_of_a_file_is_listed(
    tmp_path: Path,
    name: str,
    content: str,
    places: list[tuple[int, str]],
    documents: int,
) -> None:
    (tmp_path / name).write_text(content)
    usable, problems = examine(tmp_path / name)
    # PubTator's lines are read before its mentions.
    assert sorted((p.line, p.kind) for p in problems.listed) == places
    assert len(usable) == documents


# ---- ids -----------------------------------------------------------------------------


def write_ids(path: Path, ids: str) -> Path:
    """Write a note for each letter, which is its id."""
    rows = [{"id": name, "text": f"note {i}"} for i, name in enumerate(ids)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_repeated_ids_are_listed_by_line_in_the_order_of_the_file(
    tmp_path: Path,
) -> None:
    path = write_ids(tmp_path / "a.jsonl", "abacba")
    (finding, *_) = [
        finding
        for finding in findings_of(check_files([path]), "repeated_ids")
        if finding.level == "error"
    ]
    assert [problem.line for problem in finding.problems] == [3, 5, 6]
    assert {problem.file for problem in finding.problems} == {str(path)}


def test_a_repeated_id_is_reported_once(tmp_path: Path) -> None:
    checked = check_files([write_ids(tmp_path / "a.jsonl", "777")])
    repeated = [p.line for p in checked.wrong if p.kind == "repeated_id"]
    assert repeated == [2, 3]
    assert "repeated_ids" not in kinds_of(checked)
    assert checked.to_dict()["counts"]["kinds"]["repeated_id"] == 2


def test_ids_derived_from_files_and_lines_may_repeat(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "n.conll").write_text("a B-X\n")
    assert "repeated_id" not in kinds_of(check_files([tmp_path]))


# ---- parts of a corpus ---------------------------------------------------------------


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
def test_a_note_or_patient_in_two_parts_is_a_problem(
    tmp_path: Path, train: dict[str, Any], test: dict[str, Any], kinds: list[str]
) -> None:
    a = write_notes(tmp_path / "a.jsonl", range(30), **train)
    b = write_notes(tmp_path / "b.jsonl", range(100, 130), **test)
    assert kinds_of(check_files([a, b])) == kinds


def test_a_note_in_two_parts_is_recognised_by_its_text(tmp_path: Path) -> None:
    a = write_notes(tmp_path / "a.jsonl", range(30))
    b = write_notes(tmp_path / "b.jsonl", range(29, 60), first_id="z")
    checked = check_files([a, b])
    (leak,) = findings_of(checked, "leakage")
    assert leak.counts == {"sentences": 2, "of": 62, "long": 2}
    (problem,) = checked.wrong
    assert problem.kind == "shared_notes"
    assert "1 note is in a.jsonl and in b.jsonl" in problem.message


def test_files_with_equal_names_are_the_same_note_only_with_equal_texts(
    tmp_path: Path,
) -> None:
    mercy, north = write_hospitals(tmp_path)
    (problem,) = check_files([mercy, north]).wrong
    assert problem.kind == "shared_notes"
    assert "1 note is in mercy and in north" in problem.message
    text = (north / "003.txt").read_text()
    (north / "003.txt").write_text(text.replace("both", "none"))
    assert not check_files([mercy, north]).wrong


def test_a_label_that_equals_the_outside_tag_is_a_problem(tmp_path: Path) -> None:
    path = write_notes(tmp_path / "a.jsonl", range(60))
    path.write_text(path.read_text().replace('"Drug"', '"O"'))
    assert kinds_of(check_files([path])) == ["outside_label"]


# ---- the command ---------------------------------------------------------------------


def test_the_command_exits_with_0_if_nothing_is_wrong(
    tmp_path: Path, run_cli: Any
) -> None:
    path = write_notes(tmp_path / "a.jsonl", range(30))
    assert run_cli("check", path)[0] == 0
    code, out, _ = run_cli("check", path, "--json")
    assert code == 0
    assert json.loads(out)["problems"] == []


def test_the_command_exits_with_1_if_there_are_problems(
    tmp_path: Path, run_cli: Any
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{\n")
    code, out, err = run_cli("check", path, "--json")
    assert (code, err) == (1, "")
    (problem,) = json.loads(out)["problems"]
    assert (problem["file"], problem["line"], problem["kind"]) == (str(path), 1, "line")


@pytest.mark.parametrize(
    "arguments",
    [
        ["{folder}/nothing"],
        ["{folder}/a.jsonl", "{folder}/nothing.jsonl"],
        ["{folder}/a.jsonl", "{folder}/a.jsonl"],
        ["{folder}/a.jsonl", "--format", "jsn"],
        ["{folder}/a.jsonl", "--set", "seed=2"],
        ["no.toml"],
        ["demo", "--set", "seed"],
        ["demo", "{folder}/a.jsonl"],
        ["demo", "--on-error", "skip"],
    ],
)
def test_the_command_exits_with_2_if_it_cannot_check(
    tmp_path: Path, run_cli: Any, arguments: list[str]
) -> None:
    write_notes(tmp_path / "a.jsonl", range(30))
    code, out, err = run_cli(
        "check", *(each.format(folder=tmp_path) for each in arguments)
    )
    assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_similar_problems_are_folded_except_in_json(
    tmp_path: Path, run_cli: Any
) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.ann").write_text(f"T1\tDrug 0 {number + 1}\ta\n")
    code, out, err = run_cli("check", tmp_path)
    assert code == 1
    lines = [line for line in out.splitlines() if "no such file" in line]
    assert len(lines) == 4
    assert lines[-1] == "37 more like it: no such file"
    assert "40 problems " in err
    hint = 'hint: --on-error skip (in a job, on_error = "skip" of the site) leaves these out'
    assert hint in err
    assert len(json.loads(run_cli("check", tmp_path, "--json")[1])["problems"]) == 40


def test_a_check_keeps_the_key_names_in_an_error_of_a_job(
    tmp_path: Path, run_cli: Any
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        'method = "adversarial"\nconditions = ["federated"]\n'
        "[synthetic]\nsites = 3\nsentences = 20\n"
        "[model]\nproject = 0\ncnn_filters = 0\nlstm_units = 0\n"
    )
    code, out, _ = run_cli("check", job)
    assert code == 1
    assert "(`widths` is empty)" in " ".join(out.split())


def test_an_error_of_a_command_lists_twenty_problems(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = [f"{a}{b}" for a in "abcde" for b in "abcdefghij"]
    problems = [
        Problem("a.jsonl", line, "line", f"no {name}")
        for line, name in enumerate(names, 1)
    ]
    with pytest.raises(SystemExit):
        fail(str(DataError.of(problems)), problems[1:])
    rows = capsys.readouterr().err.splitlines()
    assert rows[0].endswith("(and 49 more)")
    assert rows[19] == "error: a.jsonl:20: no bj"
    assert rows[20] == "error: 30 further problems"
    assert rows[21] == "hint: `fednotes check` lists all problems"
    assert rows[22].startswith("hint: --on-error skip")
    assert len(rows) == 23


def test_an_error_of_a_command_folds_similar_problems(
    tmp_path: Path, run_cli: Any
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{\n" * 50)
    code, _, err = run_cli("corpus", "stats", path)
    rows = err.splitlines()
    assert code == 2
    assert "a.jsonl:1: not JSON" in rows[0]
    assert rows[0].endswith("(and 49 more)")
    assert "a.jsonl:4: not JSON" in rows[3]
    assert rows[4].startswith("error: 46 more like it: not JSON")
    assert rows[5] == "hint: `fednotes check` lists all problems"
    assert rows[6].startswith("hint: --on-error skip")
    assert len(rows) == 7


def test_statistics_can_leave_out_unusable_data(tmp_path: Path, run_cli: Any) -> None:
    path = write_notes(tmp_path / "a.jsonl", range(30))
    path.write_text(path.read_text() + "{\n")
    command = ("corpus", "stats", path, "--on-error", "skip")
    code, out, _ = run_cli(*command, "--json")
    assert code == 0
    statistics = json.loads(out)
    assert statistics["left_out"] == {"a.jsonl": {"line": 1}}
    assert statistics["sites"][0]["documents"] == 30
    assert "left out of a.jsonl: 1 line" in run_cli(*command)[1]


# ---- memory and progress -------------------------------------------------------------


def write_short_notes(path: Path) -> Path:
    rows = [f'{{"id": "{n}", "text": "Had rash {n}"}}\n' for n in range(50)]
    path.write_text("".join(rows))
    return path


def test_a_corpus_of_json_lines_is_not_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document is freed before the second one behind it is read."""
    alive = 0
    peak = 0

    class WatchedDocument(Document):
        """A document that reports when it is freed."""

    def count_freed() -> None:
        nonlocal alive
        alive -= 1

    def make_watched(*args: Any, **kwargs: Any) -> Document:
        nonlocal alive, peak
        document = WatchedDocument(*args, **kwargs)
        weakref.finalize(document, count_freed)
        alive += 1
        peak = max(peak, alive)
        return document

    monkeypatch.setattr("fednotes.data.formats.jsonl.Document", make_watched)
    checked = check_files([write_short_notes(tmp_path / "a.jsonl")])
    assert peak <= 3
    (bare,) = findings_of(checked, "bare_documents")
    assert bare.counts == {"documents": 50, "of": 50}


def test_the_number_of_documents_read_so_far_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fednotes.core.work.INTERVAL", 0.0)
    numbers: list[int] = []

    class Listener:
        """Record how many documents are read."""

        def begin(self, name: str, total: int | None) -> None:
            assert (name, total) == ("reading documents", None)

        def advance(self, done: int) -> None:
            numbers.append(done)

        def end(self) -> None:
            pass

    with reporting_to(Listener()):
        check_files([write_short_notes(tmp_path / "a.jsonl")])
    assert numbers == list(range(1, 51))


def peak_of_check(path: Path) -> int:
    """Return the largest memory of Python objects during a check, in bytes."""
    tracemalloc.start()
    try:
        check_files([path])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Check 1,800 more notes of ten sentences.

    One hash of 8 bytes for each sentence, id, text and name of a cut note would be
    169 KB, and twice that while they are sorted.
    """
    paths = []
    for size in (200, 2000):
        path = tmp_path / f"{size}.jsonl"
        with path.open("w") as file:
            for number in range(size):
                text = "\n".join(f"Sentence {number} {i} ends." for i in range(10))
                meta = {"document": f"note {number}"}
                record = {"id": f"id {number}", "text": text, "meta": meta}
                print(json.dumps(record), file=file)
        paths.append(path)
    small, large = paths
    peak_of_check(small)  # fills the caches that every check shares
    assert peak_of_check(large) - peak_of_check(small) < 100_000
