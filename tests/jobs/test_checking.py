"""`fednotes check` finds everything, of files and of jobs; readers leave out what they
must."""

from __future__ import annotations

import json
import random
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nervaluate import Evaluator
from sklearn.metrics import cohen_kappa_score
from tiny_jobs import JOB, SITES, corpus

from fednotes.api import evaluate
from fednotes.cli.app import fail
from fednotes.core.errors import DataError, Problem
from fednotes.core.types import Document, Span, TagSet
from fednotes.data.checks import Finding
from fednotes.data.formats import examine, read, write
from fednotes.jobs.checking import Checked, check_against, check_files, check_job
from fednotes.jobs.models import MentionModel


def of(found: Checked, code: str) -> tuple[Finding, ...]:
    """The findings with that code."""
    return tuple(f for f in found.findings if f.code == code)


NOTE = "Ann took aspirin for pain.\nShe had a rash on the second day.\n"
GOOD = "T1\tDrug 9 16\taspirin\n"


def brat(folder: Path) -> Path:
    """A folder in which every kind of thing is wrong once, and one note that is right."""
    folder.mkdir()
    files: dict[str, tuple[str | bytes, str]] = {
        "good": (NOTE, GOOD),
        "cut": (NOTE, GOOD + "T2\tADE 37 41\trash\nT3\tAD"),
        "beyond": (NOTE, GOOD + "T2\tADE 90 94\trash\n"),
        "moved": (NOTE, GOOD + "T2\tADE 36 40\trash\n"),
        "twice": (NOTE, GOOD + GOOD),
        "latin": (NOTE.replace("Ann", "Zoë").encode("latin-1"), GOOD),
        "bare": (NOTE, ""),
    }
    for name, (text, lines) in files.items():
        data = text if isinstance(text, bytes) else text.encode()
        (folder / f"{name}.txt").write_bytes(data)
        (folder / f"{name}.ann").write_text(lines)
    (folder / "alone.ann").write_text(GOOD)
    (folder / "unread.txt").write_text(NOTE)
    return folder


def test_all_problems_of_all_files(tmp_path: Path) -> None:
    """The refusal lists all; skipping leaves out the line, mention or document and
    counts it."""
    folder = brat(tmp_path / "notes")
    found = check_files([folder]).to_dict()
    assert [
        (Path(p["file"]).name, p["line"], p["kind"]) for p in found["problems"]
    ] == [
        ("alone.txt", None, "document"),
        ("beyond.ann", 2, "mention"),
        ("cut.ann", 3, "line"),
        ("latin.txt", 1, "document"),
        ("moved.ann", 2, "mention"),
        ("twice.ann", 2, "line"),
    ]
    assert found["counts"] == {
        "problems": 6,
        "kinds": {"document": 2, "mention": 2, "line": 2},
    }
    texts = [f for f in found["findings"] if f["code"] == "texts_without_annotations"]
    assert [f["counts"] for f in texts] == [{"texts": 1}]
    assert "rash" not in json.dumps(found)
    with pytest.raises(
        DataError, match=r"alone.txt: no such file \(and 5 more\)"
    ) as caught:
        read(folder)
    assert len(caught.value.problems) == 6
    kept = {d.id: len(d.spans) for d in read(folder, None, "skip")}
    assert kept == {"bare": 0, "beyond": 1, "cut": 2, "good": 1, "moved": 1, "twice": 1}
    assert str(examine(folder)[1]) == "2 documents, 2 mentions, 2 lines"
    skipped = check_files([folder], None, "skip")
    assert not skipped.wrong
    (left,) = of(skipped, "left_out")
    assert left.counts == {"document": 2, "mention": 2, "line": 2}


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
def test_every_line_that_is_wrong(
    tmp_path: Path,
    name: str,
    content: str,
    places: list[tuple[int, str]],
    documents: int,
) -> None:
    """In a file whose name says its format, however much of it is wrong."""
    (tmp_path / name).write_text(content)
    found, problems = examine(tmp_path / name)
    # PubTator's lines are read before its mentions.
    assert sorted((p.line, p.kind) for p in problems.listed) == places
    assert len(found) == documents


def test_ids_that_repeat(tmp_path: Path) -> None:
    """Each is named with its line; ids that a reader makes of files and lines do not
    count."""
    path = tmp_path / "a.jsonl"
    rows = [{"id": name, "text": f"note {i}"} for i, name in enumerate("xyx")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problems = check_files([path]).to_dict()["problems"]
    repeated = [(p["line"], p["kind"]) for p in problems if p["kind"] == "repeated_id"]
    assert repeated == [(3, "repeated_id")]
    (tmp_path / "b").mkdir()
    for folder in ("b/one", "b/two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "n.conll").write_text("a B-X\n")
    assert not [
        p for p in check_files([tmp_path / "b"]).wrong if p.kind == "repeated_id"
    ]


def lines(path: Path, numbers: range, patient: int = 0, same: str = "") -> Path:
    """Notes of two sentences; `patient` of them share one, `same` is the id of the
    first."""
    rows: list[dict[str, Any]] = []
    for i in numbers:
        text = f"Case number {i} took aspirin today.\nShe went home on day {i} of it."
        start = text.index("aspirin")
        rows.append(
            {"id": f"n{i}", "text": text, "spans": [[start, start + 7, "Drug"]]}
        )
    for row in rows[:patient]:
        row["patient"] = "p"
    if same:
        rows[0]["id"] = same
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def of_site(folder: Path, site: str) -> Checked:
    """The check of a job of one site."""
    (folder / "job.toml").write_text(f"{JOB}[sites.north]\n{site}\n")
    return check_job(str(folder / "job.toml"))


@pytest.mark.parametrize(
    ("train", "test", "kinds"),
    [
        ({}, {}, []),
        ({"patient": 2}, {"patient": 1}, ["shared_patients"]),
        ({"same": "m7"}, {"same": "m7"}, ["shared_notes"]),
        ({"same": "a:7"}, {"same": "a:7"}, []),  # as a reader would make it
    ],
)
def test_a_note_or_patient_in_two_files(
    tmp_path: Path, train: dict[str, Any], test: dict[str, Any], kinds: list[str]
) -> None:
    """Given to the command, and as train and test of a job."""
    a = lines(tmp_path / "a.jsonl", range(30), **train)
    b = lines(tmp_path / "b.jsonl", range(100, 130), **test)
    assert [p.kind for p in check_files([a, b]).wrong] == kinds
    found = of_site(tmp_path, 'train = "a.jsonl"\ntest = "b.jsonl"')
    assert [p.kind for p in found.wrong] == kinds


def test_a_note_in_two_files_is_known_by_its_text(tmp_path: Path) -> None:
    a = lines(tmp_path / "a.jsonl", range(30))
    b = lines(tmp_path / "b.jsonl", range(29, 60), same="z")
    checked = check_files([a, b])
    (leak,) = of(checked, "leakage")
    assert leak.counts == {"sentences": 2, "of": 62, "long": 2}
    (found,) = checked.wrong
    assert found.kind == "shared_notes"
    assert "1 notes are in a.jsonl and in b.jsonl" in found.message


def test_equal_file_names_are_no_equal_notes(tmp_path: Path) -> None:
    """Two hospitals' folders of brat, of which one note is really in both."""
    for site, own in (("mercy", 1), ("north", 2)):
        for number in range(12):
            words = "both" if number == 3 else f"site{own}"
            name = tmp_path / site / f"{number:03}"
            name.parent.mkdir(exist_ok=True)
            body = f"Took drug{number} for pain at {words} twice.\nNothing of {words} {number} else."
            name.with_suffix(".txt").write_text(body)
            name.with_suffix(".ann").write_text(
                "T1\tDrug 0 4\tTook\n" if number % 4 else ""
            )
    (wrong,) = check_files([tmp_path / "mercy", tmp_path / "north"]).wrong
    assert wrong.kind == "shared_notes"
    assert "1 notes are in mercy and in north" in wrong.message
    (north := tmp_path / "north" / "003.txt").write_text(
        north.read_text().replace("both", "own")
    )
    for found in (
        check_files([tmp_path / "mercy", tmp_path / "north"]),
        of_site(tmp_path, 'train = "mercy"\ntest = "north"'),
    ):
        assert not [p.kind for p in found.wrong]


def test_a_type_that_is_the_tag_of_nothing(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", range(60))
    path.write_text(path.read_text().replace('"Drug"', '"O"'))
    assert [p.kind for p in check_files([path]).wrong] == ["outside_label"]
    (wrong,) = of_site(tmp_path, 'path = "a.jsonl"').wrong
    assert "mentions are called 'O'" in wrong.message
    assert not of_site(tmp_path, 'path = "a.jsonl"\nlabel_map = { O = "Other" }').wrong


def test_sentences_of_a_note_in_two_parts(tmp_path: Path) -> None:
    """Who asked for it is warned, and who did not has none."""
    lines(tmp_path / "a.jsonl", range(60))
    for split, level in (("", []), ('split = "sentence"\n', ["warning"] * 3)):
        found = of_site(tmp_path, f'path = "a.jsonl"\n{split}')
        assert not found.wrong
        assert [f.level for f in of(found, "shared_notes")] == level


def test_a_job_of_sites_that_skip(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", range(60))
    path.write_text(path.read_text() + "{\n{\n")
    wrong = of_site(tmp_path, 'path = "a.jsonl"').wrong
    assert [(p.line, p.kind) for p in wrong] == [(61, "line"), (62, "line")]
    found = of_site(tmp_path, 'path = "a.jsonl"\non_error = "skip"')
    assert not found.wrong
    assert found.sites is not None
    assert (
        "warning: north: 2 lines of a.jsonl cannot be used and are left out"
        in found.sites.messages
    )


def test_types_that_only_held_out_data_have(tmp_path: Path) -> None:
    """No mistake, so exit code 0; a run says that they are not scored."""
    for part, text in {
        "train": "a B-X\nb O\n\nc B-X\n",
        "valid": "d B-Y\ne O\n\nf B-X\n",
        "test": "g B-Y\nh B-Z\n\ni B-X\nj B-Y\n",
    }.items():
        (tmp_path / f"{part}.conll").write_text(text)
    parts = 'train = "train.conll"\nvalid = "valid.conll"\ntest = "test.conll"\n'
    found = of_site(tmp_path, parts)
    assert found.wrong == ()
    counted = {f.where: dict(f.counts) for f in of(found, "unlearnt_types")}
    assert counted == {"north/valid": {"Y": 1}, "north/test": {"Y": 2, "Z": 1}}
    assert found.sites is not None
    told = "warning: north/test: 3 mentions are of types that no training mention has (Y, Z): "
    assert any(line.startswith(told) for line in found.sites.messages)
    named = of_site(tmp_path, parts + 'types = ["X", "Y", "Z"]')
    assert (named.wrong, of(named, "unlearnt_types")) == ((), ())


def test_problems_of_every_site_and_of_the_model(tmp_path: Path) -> None:
    for name, line in (
        ("north", "a B-X\nb O\nc\n"),
        ("south", "a B-X\nb O\n\nc O O O\n"),
    ):
        (tmp_path / f"{name}.conll").write_text(line)
    job = tmp_path / "job.toml"
    job.write_text(JOB.replace("[model]", '[model]\nword_vectors = "none.txt"') + SITES)
    wrong = check_job(str(job)).wrong
    assert [(Path(p.file).name, p.line) for p in wrong[:2]] == [
        ("north.conll", 3),
        ("south.conll", 4),
    ]
    (model,) = wrong[2:]
    assert "none.txt" in model.message


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("[model]", '[model]\nword_vectors = "none.txt"', "none.txt"),
        ("[model]", '[model]\ncontextual = "no/such"', "no/such"),
        ("[model]", "[model]\ntager = 1", "unknown key 'tager'"),
        ("[training]", "[training]\nepocs = 1", "unknown key 'epocs'"),
        ("[training]", "[federation]\nsecure_sum = true\n[training]", "it takes 3"),
        ("[training]", "[training", "not a TOML file"),
    ],
)
def test_what_a_simulation_would_refuse(
    tmp_path: Path, old: str, new: str, told: str, give: Any
) -> None:
    """The check says what `simulate` says, and that before it trains."""
    corpus(tmp_path / "north.conll", "Drug", "north")
    corpus(tmp_path / "south.conll", "Drug", "south")
    job = tmp_path / "job.toml"
    job.write_text((JOB + SITES).replace(old, new, 1))
    (wrong,) = check_job(str(job)).wrong
    assert told in wrong.message
    code, _, err = give("simulate", job, "--out", tmp_path / "run")
    assert code == 2
    assert told in err


def test_the_command_itself(tmp_path: Path, give: Any) -> None:
    """0: nothing is wrong. 1: problems. 2: it could not be done."""
    path = lines(tmp_path / "a.jsonl", range(30))
    assert give("check", path)[0] == 0
    code, out, _ = give("check", path, "--json")
    assert code == 0
    assert json.loads(out)["problems"] == []
    path.write_text("{\n")
    code, out, err = give("check", path, "--json")
    assert (code, err) == (1, "")
    (problem,) = json.loads(out)["problems"]
    assert (problem["file"], problem["line"], problem["kind"]) == (str(path), 1, "line")
    for wrong in (
        [tmp_path / "nothing"],
        [path, tmp_path / "nothing.jsonl"],
        [path, path],
        [path, "--format", "jsn"],
        [path, "--set", "seed=2"],
        ["no.toml"],  # no such job file
        ["demo", "--set", "seed"],
        ["demo", path],
        ["demo", "--on-error", "skip"],
    ):
        code, out, err = give("check", *wrong)
        assert (code, out, len(err.splitlines())) == (2, "", 1), wrong


def test_an_error_lists_twenty(capsys: pytest.CaptureFixture[str]) -> None:
    path = "a.jsonl"
    names = [f"{a}{b}" for a in "abcde" for b in "abcdefghij"]
    problems = [
        Problem(path, n, "line", f"no {name}") for n, name in enumerate(names, 1)
    ]
    with pytest.raises(SystemExit):
        fail(str(DataError.of(problems)), problems[1:])
    rows = capsys.readouterr().err.splitlines()
    assert rows[0].endswith("(and 49 more)")
    assert rows[19] == f"error: {path}:20: no bj"
    assert rows[20].startswith("error: 30 more; `fednotes check` lists all")
    assert len(rows) == 21


def test_an_error_folds_what_is_alike(tmp_path: Path, give: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{\n" * 50)
    code, _, err = give("corpus", "stats", path)
    rows = err.splitlines()
    assert code == 2
    assert "a.jsonl:1: no JSON" in rows[0]
    assert rows[0].endswith("(and 49 more)")
    assert "a.jsonl:4: no JSON" in rows[3]
    assert rows[4].startswith("error: 46 more like it: no JSON")
    assert rows[5].startswith("error: `fednotes check` lists all; --on-error skip")
    assert len(rows) == 6


def test_stats_of_what_can_be_used(tmp_path: Path, give: Any) -> None:
    path = lines(tmp_path / "a.jsonl", range(30))
    path.write_text(path.read_text() + "{\n")
    skipping = ("corpus", "stats", path, "--on-error", "skip")
    code, out, _ = give(*skipping, "--json")
    assert code == 0
    made = json.loads(out)
    assert made["left_out"] == {"a.jsonl": {"line": 1}}
    assert made["sites"][0]["documents"] == 30
    assert "left out of a.jsonl: 1 line" in give(*skipping)[1]


class Finder:
    """A model that finds the first two words of every note, as two types."""

    tagset = TagSet(("ADE", "Drug"))

    def predict(self, documents: Sequence[Document]) -> tuple[Document, ...]:
        spans = (Span(0, 4, "Drug"), Span(5, 9, "ADE"))
        return tuple(replace(d, spans=spans) for d in documents)


@pytest.mark.parametrize(
    ("types", "precision", "silent", "left"),
    [
        ((), 1.0, ("ADE",), ()),
        (("ADE", "Drug"), 0.5, (), ()),
        (("ADE",), 0.0, (), ("Drug",)),
    ],
)
def test_only_annotated_types_are_scored(
    tmp_path: Path,
    types: tuple[str, ...],
    precision: float,
    silent: tuple[str, ...],
    left: tuple[str, ...],
) -> None:
    """Ten notes with one drug each that is found, and no word on side effects: what is
    found of these is wrong only where they are asked for."""
    path = tmp_path / "gold.jsonl"
    row = json.dumps({"text": "drug rash", "spans": [[0, 4, "Drug"]]}) + "\n"
    path.write_text(row * 10)
    found = evaluate(MentionModel(Finder()), path, types=types)
    assert found.scores["strict"]["precision"] == precision
    assert (found.not_annotated, found.not_requested) == (silent, left)
    assert set(found.scores["by_type"]) <= set(types or ("Drug",))


def test_runs_are_compared_on_the_data_they_had(tmp_path: Path, give: Any) -> None:
    """A job that would be split otherwise now is told from the run it made."""
    for name in ("north", "south"):
        corpus(tmp_path / f"{name}.conll", "Drug", name)
    job, run = tmp_path / "job.toml", tmp_path / "run"
    job.write_text(JOB.replace('["federated"]', '["alone", "federated"]') + SITES)
    assert give("simulate", job, "--out", run)[0] == 0
    assert give("compare", run, run, "--samples", 5)[0] == 0
    record = json.loads((run / "job.json").read_text())
    record["notes"]["south"] = "0" * 64
    (run / "job.json").write_text(json.dumps(record))
    code, _, err = give("compare", run, run, "--samples", 5)
    assert code == 2
    assert "site 'south' has other data, or another division of them, than when" in err


def test_two_annotators(tmp_path: Path) -> None:
    """F1 by nervaluate, kappa by scikit-learn, of random annotations of words."""
    drawn = random.Random(3)
    words = [[drawn.choice("abc") * 3 for _ in range(12)] for _ in range(9)]
    tags = [
        [[drawn.choice(["O", "O", "X", "Y"]) for _ in row] for row in words]
        for _ in range(2)
    ]
    made = [
        tuple(
            Document(f"d{n}", " ".join(row), tuple(
                Span(4 * i, 4 * i + 3, tag) for i, tag in enumerate(own[n]) if tag != "O"))
            for n, row in enumerate(words)
        )
        for own in tags
    ]  # fmt: skip
    for name, documents in zip("ab", made, strict=True):
        odd = Document(f"only {name}", "x"), Document("of another text", name)
        write([*documents, *odd], tmp_path / f"{name}.jsonl", "jsonl")
    found = check_against(tmp_path / "a.jsonl", tmp_path / "b.jsonl", None, "refuse")
    scores = found.to_dict()["agreement"]
    flat = [[tag for row in own for tag in row] for own in tags]
    assert scores["kappa"] == pytest.approx(cohen_kappa_score(*flat), abs=1e-12)
    spans = [
        [
            [{"label": s.label, "start": s.start, "end": s.end} for s in d.spans]
            for d in own
        ]
        for own in made
    ]
    whole = Evaluator(*spans, tags=["X", "Y"]).evaluate()["overall"]
    assert scores["strict"] == pytest.approx(whole["strict"].f1, abs=1e-12)
    assert scores["relaxed"] == pytest.approx(whole["ent_type"].f1, abs=1e-12)
    assert (scores["documents"], scores["apart"], scores["tokens"]) == (9, 3, 108)
    told = [f.message for f in found.findings if f.code == "agreement"]
    assert len(told) == 1
    assert f"{scores['kappa']:.3f}" in told[0]
    write([Document("z", "y")], tmp_path / "c.jsonl", "jsonl")
    with pytest.raises(DataError, match="no document with the id and the text"):
        check_against(tmp_path / "a.jsonl", tmp_path / "c.jsonl", None, "refuse")


def test_annotators_who_say_nothing_agree_in_nothing(tmp_path: Path) -> None:
    """No mention on either side: no kappa, no division by zero; an empty text has no
    token."""
    for name in "ab":
        write(
            [Document("d", "x y"), Document("e", "")],
            tmp_path / f"{name}.jsonl",
            "jsonl",
        )
    found = check_against(tmp_path / "a.jsonl", tmp_path / "b.jsonl", None, "refuse")
    assert found.agreement is not None
    assert (found.agreement["kappa"], found.agreement["tokens"]) == (None, 2)


def test_problems_alike_are_folded(
    give: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """Three examples and a count; the whole list is in the JSON."""
    for number in range(40):
        (tmp_path / f"{number:02}.ann").write_text(f"T1\tDrug 0 {number + 1}\ta\n")
    code, out, err = give("check", tmp_path)
    assert code == 1
    lines = [line for line in out.splitlines() if "no such file" in line]
    assert len(lines) == 4
    assert lines[-1] == "37 more like it: no such file"
    assert "problems: 40 " in err
    assert (
        'hint: --on-error skip (on_error = "skip" of a job\'s site) leaves these out'
        in err
    )
    assert len(json.loads(give("check", tmp_path, "--json")[1])["problems"]) == 40


def test_a_repeated_id_is_counted_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "7", "text": "Had rash"}\n' * 3)
    found = check_files([path])
    repeated = [
        problem.line for problem in found.wrong if problem.kind == "repeated_id"
    ]
    assert repeated == [2, 3]
    assert not [problem for problem in found.wrong if problem.kind == "repeated_ids"]
    assert found.to_dict()["counts"]["kinds"]["repeated_id"] == 2


def test_a_corpus_of_json_lines_is_not_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each document may go before the second one behind it is read."""
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(f'{{"id": "{n}", "text": "Had rash {n}"}}\n' for n in range(50))
    )
    alive = most = 0

    class Kept(Document):
        """One that can be watched."""

    def gone() -> None:
        nonlocal alive
        alive -= 1

    def kept(*given: Any, **named: Any) -> Document:
        nonlocal alive, most
        document = Kept(*given, **named)
        weakref.finalize(document, gone)
        alive += 1
        most = max(most, alive)
        return document

    monkeypatch.setattr("fednotes.data.formats.jsonl.Document", kept)
    heard: list[int] = []
    monkeypatch.setattr("fednotes.jobs.checking._OFTEN", 20)
    found = check_files([path], heard=heard.append)
    assert most <= 3
    assert heard == [20, 40]
    (bare,) = (
        finding for finding in found.findings if finding.code == "bare_documents"
    )
    assert bare.counts == {"documents": 50, "of": 50}


def peak_of_check(path: Path) -> int:
    """Return the largest memory of Python objects during a check, in bytes."""
    tracemalloc.start()
    try:
        check_files([path])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """1,800 more notes of ten sentences. One hash of 8 bytes for each sentence, id,
    text and name of a cut note would be 169 KB, and twice that while they are sorted."""
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


def test_repeated_ids_are_reported_by_line_in_the_order_of_the_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "notes.jsonl"
    ids = ["a", "b", "a", "c", "b", "a"]
    lines = [json.dumps({"id": name, "text": f"Note {name}."}) for name in ids]
    path.write_text("\n".join(lines))
    (repeated, *_) = (
        finding
        for finding in check_files([path]).findings
        if finding.code == "repeated_ids" and finding.level == "error"
    )
    assert [problem.line for problem in repeated.problems] == [3, 5, 6]
    assert {problem.file for problem in repeated.problems} == {str(path)}
