"""Jobs on notes without annotations: their tables, sites and commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.types import Document
from fednotes.data.notes import make_patient_key, read_notes
from fednotes.data.notes.sites import SiteNotes
from fednotes.data.overlap import index_documents, measure_shared_text
from fednotes.jobs.job import Job, NotesConfig, Sites, load_sites
from fednotes.jobs.job_file import parse_job

SECRET = "Wilhelmina"  # stands in every note; no message may hold it


def job(folder: Path, seed: int = 1, **tables: Any) -> Job:
    return parse_job(
        {"method": "pretrain", "seed": seed, **tables}, "j", folder, "j.toml"
    )


def load(folder: Path, **tables: Any) -> Sites:
    return load_sites(job(folder, **tables))


def write(folder: Path, name: str, number: int, first: int = 0) -> str:
    """Write a table of notes with two notes of each patient."""
    rows = [
        f'p{i // 2},"{SECRET} was seen, note {i}."'
        for i in range(first, first + number)
    ]
    (folder / name).write_text("\n".join(["patient,text", *rows]) + "\n")
    return name


def all_texts(site: SiteNotes) -> list[str]:
    return [note.text for part in (site.train, site.valid) for note in part()]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"sites": {"a": {}}}, r"\[sites\.a\]: give either `path`"),
        ({"sites": {"a": {"path": "x", "paths": ["y"]}}}, "give either `path`"),
        ({"sites": {"a": {"paths": [""]}}}, "give either `path`"),
        ({"sites": {"a": {"paths": "x"}}}, "paths = 'x': expected a list"),
        ({"sites": {"a": {"paths": ["x", "x"]}}}, "a path is listed twice"),
        (
            {"sites": {"a": {"path": "x", "valid_fraction": 1}}},
            "valid_fraction = 1: expected less than 1",
        ),
        (
            {"sites": {"a": {"path": "x", "max_notes": -1}}},
            "max_notes = -1: expected at least 0",
        ),
        ({"sites": {"a": {"path": "x", "types": ["A"]}}}, "unknown key 'types'"),
        (
            {"sites": {"a": {"path": "x"}}, "tags": {}},
            r"\[tags\]: applies only to methods on documents, not to pretrain",
        ),
        (
            {"sites": {"a": {"path": "x"}}, "silos": {"number": 0}},
            r"\[silos\]: number = 0",
        ),
    ],
)
def test_a_mistake_is_reported_with_its_table_and_key(
    tmp_path: Path, tables: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"j\.toml.*" + message):
        job(tmp_path, **tables)


def test_each_table_is_a_site_with_the_notes_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts are those of `read_notes`; a path may begin with a variable."""
    a, b = write(tmp_path, "a.csv", 20), write(tmp_path, "b.csv", 6, 20)
    (tmp_path / "c").mkdir()
    for i in range(5):
        (tmp_path / "c" / f"{i}.txt").write_text(f"case {i}")
    monkeypatch.setenv("NOTES_HERE", str(tmp_path))
    table = {"paths": [a, f"$NOTES_HERE/{b}"], "max_notes": 30}
    parsed = job(tmp_path, sites={"x": table, "y": {"path": "c"}})
    assert parsed.kind.name == "notes"
    assert parsed.sites["x"] == NotesConfig(paths=(a, f"$NOTES_HERE/{b}"), max_notes=30)
    assert [site.files for site in parsed.sites.values()] == [
        tuple(table["paths"]),
        ("c",),
    ]
    loaded = load_sites(parsed)
    assert [site.id for site in loaded.data] == ["x", "y"]
    expected = [n.text for name in (a, b) for n in read_notes(tmp_path / name)]
    assert sorted(all_texts(loaded.data[0])) == sorted(expected)
    assert sorted(all_texts(loaded.data[1])) == [f"case {i}" for i in range(5)]
    assert (loaded.data[0].train_patients, loaded.data[0].valid_patients) == (12, 1)
    assert (loaded.data[1].train_patients, loaded.data[1].valid_patients) == (4, 1)
    assert loaded.complete is None


def test_silos_are_dealt_from_the_notes_of_all_tables(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a.csv", 20), write(tmp_path, "b.csv", 20, 100)
    sites = {"a": {"path": a}, "b": {"path": b}}
    loaded = load(tmp_path, sites=sites, silos={"number": 4})
    assert [site.id for site in loaded.data] == ["silo1", "silo2", "silo3", "silo4"]
    patients = [
        {make_patient_key(n) for p in (site.train, site.valid) for n in p()}
        for site in loaded.data
    ]
    assert [len(of_silo) for of_silo in patients] == [5] * 4
    assert len(set().union(*patients)) == 20
    by_note = load(tmp_path, sites=sites, silos={"number": 3, "by": "document"})
    assert sorted(len(all_texts(site)) for site in by_note.data) == [13, 13, 14]
    with pytest.raises(
        ConfigError, match=r"\[silos\] number = 21: 20 patients .* ask for at most 20"
    ):
        load(tmp_path, sites=sites, silos={"number": 21})


def test_generated_notes_need_no_file(tmp_path: Path) -> None:
    loaded = load(tmp_path, synthetic={"sites": 2, "sentences": 40})
    assert len(loaded.data) == 2
    assert all(site.train_notes > 5 < site.train_patients for site in loaded.data)
    assert all(site.valid_notes for site in loaded.data)
    again = load(tmp_path, synthetic={"sites": 2, "sentences": 40})
    assert [s.content for s in loaded.data] == [s.content for s in again.data]
    assert len({s.content for s in loaded.data}) == 2
    dealt = load(tmp_path, synthetic={"sites": 2, "sentences": 40}, silos={"number": 5})
    assert sorted(t for s in dealt.data for t in all_texts(s)) == sorted(
        t for s in loaded.data for t in all_texts(s)
    )


def test_notes_that_share_a_sentence_with_an_excluded_corpus_are_left_out(
    tmp_path: Path,
) -> None:
    line = "the patient was started on warfarin five mg daily ."
    (tmp_path / "gold.conll").write_text(
        "".join(f"{word}\tO\n" for word in line.split()) + "\nx\tB-Drug\n\n"
    )
    notes = write(tmp_path, "a.csv", 8)
    with (tmp_path / notes).open("a") as file:
        file.write(f'p9,"Plan:\n{line.upper()}"\n')
    loaded = load(tmp_path, sites={"a": {"path": notes, "exclude": ["gold.conll"]}})
    assert len(all_texts(loaded.data[0])) == 8
    assert loaded.remarks == (
        "a: notes left out: 1 that share a sentence with an excluded corpus",
    )


@pytest.mark.parametrize(
    ("site", "error", "message"),
    [
        ({"path": "none.csv"}, DataError, r"site 'a': .*none\.csv: no such file"),
        ({"path": "$NO_SUCH_PLACE/x"}, ConfigError, r"sites\.a\.path = .*is not set"),
        (
            {"path": "a.csv", "format": "cvs"},
            ConfigError,
            "site 'a': unknown format 'cvs'",
        ),
        (
            {"path": "a.csv", "column": "texts"},
            DataError,
            "site 'a': .*a.csv:1: there is no column 'texts': the columns are patient, text",
        ),
        (
            {"path": "a.csv", "categories": ["x"]},
            DataError,
            "site 'a': .*for the categories",
        ),
        ({"path": "a.csv", "exclude": ["none"]}, DataError, "none: no such file"),
        (
            {"path": "latin.txt"},
            DataError,
            r"site 'a': .*latin\.txt:1: byte [0-9]+ is not UTF-8",
        ),
        (
            {"path": "blank"},
            ConfigError,
            r"site 'a': found no usable notes in .*blank but 2 without",
        ),
    ],
)
def test_a_site_that_cannot_be_read_is_reported_by_name(
    tmp_path: Path, site: dict[str, Any], error: type[Exception], message: str
) -> None:
    write(tmp_path, "a.csv", 4)
    (tmp_path / "latin.txt").write_bytes(f"{SECRET} caf\xe9".encode("latin-1"))
    (tmp_path / "blank").mkdir()
    for name in "ab":
        (tmp_path / "blank" / f"{name}.txt").write_text(" \n")
    with pytest.raises(error, match=message) as caught:
        load(tmp_path, sites={"a": site})
    assert SECRET not in str(caught.value)


@pytest.fixture
def run(
    run_cli: Any, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs a command and checks that its output holds no text.

    The function returns the exit code and both outputs.
    """
    monkeypatch.setenv("COLUMNS", "160")

    def run_command(*arguments: object) -> tuple[int, str, str]:
        code, out, err = run_cli(*arguments)
        assert SECRET not in out + err
        return code, out, err

    return run_command


def test_check_counts_the_notes_of_a_job(tmp_path: Path, run: Any, bert: Path) -> None:
    name = write(tmp_path, "a.csv", 40)
    with (tmp_path / name).open("a") as file:
        file.write("p99,  \n")
    path = tmp_path / "job.toml"
    model = f'[model]\nencoder = "{bert}"\n[training]\nlength = 32\n'
    head = f'method = "pretrain"\nconditions = ["federated"]\n{model}'
    path.write_text(f'{head}[sites.mercy]\npath = "{name}"\n')
    code, out, _ = run("check", path)
    assert code == 0
    assert "mercy: notes left out: 1 without text" in out
    (site,) = load(tmp_path, sites={"mercy": {"path": name}}).data
    cells = [" ".join(line.replace("│", " ").split()) for line in out.splitlines()]
    assert (
        f"mercy train 38 19 {sum(len(n.text) for n in site.train()):,} {site.longest}"
        in cells
    )
    assert f"held out 2 1 {sum(len(n.text) for n in site.valid()):,}" in cells
    code, out, err = run("check", path, "--set", "silos.number=99")
    assert (code, err) == (1, "1 problem (job: 1)\n")
    assert "ask for at most 20" in out


def test_overlap_is_counted_in_files_with_a_named_encoding(
    tmp_path: Path, run: Any
) -> None:
    line = "Der Patient nimmt täglich fünf mg Warfarin ein ."
    tokens = "".join(f"{word}\tO\n" for word in line.split()) + "\nx\tB-Drug\n\n"
    (tmp_path / "gold.conll").write_bytes(tokens.encode("cp1252"))
    (tmp_path / "notes.csv").write_bytes(f"text\n{line}\n".encode("cp1252"))
    command = ("corpus", "overlap", "--notes", tmp_path / "notes.csv", "--documents")
    command = (*command, tmp_path / "gold.conll", "--strict")
    code, _, err = run(*command)
    assert (code, "is not UTF-8" in err) == (2, True)
    code, _, err = run(*command, "--encoding", "cp1252")
    assert err.startswith("error: 1 sentences of the notes occur in the documents")


def test_overlap_is_counted_and_refused_if_strict(tmp_path: Path, run: Any) -> None:
    line = f"{SECRET} was started on warfarin five mg every day ."
    (tmp_path / "gold.conll").write_text(
        "".join(f"{word}\tO\n" for word in line.split()) + "\nx\tB-Drug\n\n"
    )
    (tmp_path / "other.conll").write_text("x\tB-Drug\n\n")
    (tmp_path / "notes.csv").write_text(
        f"text\n{line}\nNothing of it is in this other note here.\n"
    )
    command = ("corpus", "overlap", "--notes", tmp_path / "notes.csv")
    command = (*command, "--documents", tmp_path / "gold.conll")
    code, out, _ = run(*command, "--documents", tmp_path / "other.conll")
    assert code == 0
    rows = [
        line.replace("│", " ").split()[2:]
        for line in out.splitlines()
        if ".conll" in line
    ]
    assert rows == [["2", "1", "1", "0", "0"], ["2", "0", "0", "0", "0"]]
    code, _, err = run(*command, "--strict")
    assert code == 2
    assert err.startswith(
        "error: 1 sentences of the notes occur in the documents: leave"
    )
    command = ("corpus", "overlap", "--notes", tmp_path / "notes.csv", "--strict")
    assert run(*command, "--documents", tmp_path / "other.conll")[0] == 0


@pytest.mark.parametrize(
    ("document", "note"),
    [
        (
            "He had ( at night ) no fever , chills or pain .",
            "He had (at night) no fever, chills or pain.",
        ),
        (
            "Seen at [**Hospital1 18**] on [**2130-1-1**] for fever, chills and a very bad cough.",
            "Seen at [**Hospital6 2**] on [**2151-7-30**] for fever, chills and a very bad cough.",
        ),
    ],
)
def test_a_shared_sentence_is_recognised_in_another_copy_of_its_note(
    document: str, note: str
) -> None:
    """The copy is tokenised differently, or de-identified with other placeholders."""
    (overlap,) = measure_shared_text(
        [note], [index_documents([Document("d", document)])]
    )
    assert overlap.shared_sentences == 1
