"""Notes are read one by one as their files state them, and dealt into sites."""

from __future__ import annotations

import csv
import gzip
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fednotes.core.errors import ConfigError, DataError, ParameterError
from fednotes.core.seeds import seed_of
from fednotes.core.types import Document
from fednotes.data.notes import (
    EMPTY,
    MISTAKEN,
    OTHER,
    Note,
    guess_notes,
    make_patient_key,
    read_notes,
)
from fednotes.data.notes._settings import COMMON_KEYS
from fednotes.data.notes.sites import (
    NoteCorpus,
    SiteNotes,
    assign_to_silos,
    fingerprint_notes,
    make_sites,
    pool_notes,
)
from fednotes.data.overlap import index_documents

ROOT = Path(__file__).parents[2]

File = Callable[..., Path]
MIMIC = (Path(__file__).parent / "samples" / "NOTEEVENTS.csv").read_text()
HEADER = MIMIC.split("\n")[0]


LONG = (
    "Stable overnight. " * 20_000
)  # 360,000 characters; csv gives up at 131,072 of its own accord
OMOP = """note_id,person_id,note_date,note_type_concept_id,note_title,note_text
7,31,2020-01-01,44814645,Discharge,"Went home.
Well."
8,32,2020-01-02,44814646,,Came in.
"""
RECORDS = """\ufeff{"text": "a\\r\\nb", "id": 5, "patient": "p", "category": "Nursing "}

{"note": "c"}
{"text": " \\n"}
{"text": "d", "answer": "reject"}
"""
REMARKS = "key,remark,patient\n1,Well.,p1\n2,Ill.,p2\n"
REPORT = (
    *("1", 'Admission Date:  [**2130-1-1**]\nPatient with "hypertension" .\n', "101"),
    "Discharge summary",
)
NURSING = ("2", "Pt stable.", "102", "Nursing")
EVENTS = [REPORT, NURSING, ("5", "No effusion.", "103", "Radiology")]
SKIPPED = {EMPTY: 1, MISTAKEN: 1}
WARDS = [
    ("7", "Went home.\nWell.", "31", "Discharge"),
    ("8", "Came in.", "32", "44814646"),
]
Row = tuple[str, str, str | None, str | None]


@pytest.mark.parametrize(
    ("name", "content", "options", "expected", "skipped"),
    [
        # Text over lines, quotes doubled, blanks after a category, errors and empty
        # notes out.
        ("NOTEEVENTS.csv", MIMIC, {}, EVENTS, SKIPPED),
        ("n.csv.gz", gzip.compress(MIMIC.encode(), mtime=0), {}, EVENTS, SKIPPED),
        # The demo of MIMIC has lower-case names; spreadsheets write a mark and CRLF.
        (
            "a.csv",
            "\ufeff" + MIMIC.replace(HEADER, HEADER.lower()).replace("\n", "\r\n"),
            *({}, EVENTS, SKIPPED),
        ),
        (
            "n.csv",
            MIMIC,
            {"categories": ["nursing", "Discharge summary "]},
            *([REPORT, NURSING], SKIPPED | {OTHER: 1}),
        ),
        ("n.csv", HEADER + "\r\n", {}, [], {}),
        (
            "n.csv",
            f'{HEADER}\n1,2,,,,,C,,,,"{LONG}"\n',
            {},
            [("1", LONG, "2", "C")],
            {},
        ),
        # The first of title and type that says something is the category.
        ("NOTE.csv", OMOP, {}, WARDS, {}),
        ("NOTE.csv", OMOP.replace(",", "\t"), {}, WARDS, {}),
        ("NOTE.csv", OMOP.replace(",", ";"), {}, WARDS, {}),
        (
            "x.csv",
            REMARKS,
            {"column": "Remark"},
            *([("x:2", "Well.", "p1", None), ("x:3", "Ill.", "p2", None)], {}),
        ),
        (
            "n.jsonl",
            RECORDS,
            {},
            [("5", "a\nb", "p", "Nursing"), ("n:3", "c", None, None)],
            SKIPPED,
        ),
        (
            "n.txt",
            "Progress note, text\nwell, text\n",
            {},
            [("n", ..., None, None)],
            {},
        ),
    ],
)
def test_notes_are_read_as_their_file_states(
    file: File,
    name: str,
    content: str | bytes,
    options: dict[str, Any],
    expected: list[Row],
    skipped: dict[str, int],
) -> None:
    notes = read_notes(file(content, name), **options)
    fields = [(n.id, n.text, n.patient, n.category) for n in notes]
    assert fields == [(a, content if t is ... else t, b, c) for a, t, b, c in expected]
    assert notes.counts == Counter({"notes": len(expected), **skipped})
    # the process's own: others may read what they could
    assert csv.field_size_limit() >= 131_072


MANY = HEADER + "".join(f"\n{i},1,,,,,title {i},,,,x" for i in range(31))
CUT = MIMIC[: MIMIC.index("5,103")] + '5,103,,2131-02-07,,,"Radiology"\n'
MIMICS = {"format": "mimic", "categories": ["Radiology", "Nursing"]}


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("n.csv", CUT, MIMICS, "n.csv:8: the row has 7 columns, but the header has 11"),
        (
            "n.csv",
            MIMIC[: MIMIC.index("effusion")],
            MIMICS,
            "n.csv:8: the file ends inside a quoted",
        ),
        (
            "n.csv",
            MIMIC.replace('"Pt stable."', '"Zyxwolan" b'),
            MIMICS,
            "n.csv:5: the row is not valid CSV",
        ),
        (
            "n.csv",
            MIMIC.replace("CATEGORY", "KIND"),
            MIMICS,
            "n.csv:1: there is no column 'category'",
        ),
        (
            "n.csv",
            MIMIC.replace("SUBJECT_ID", "SUBJECTID"),
            MIMICS,
            "did you mean 'subjectid'",
        ),
        (
            "n.csv",
            MIMIC.split("\n", 1)[1].replace("Report", "Zyxwolan"),
            MIMICS,
            "n.csv:1: there is no",
        ),
        (
            "n.csv",
            MIMIC,
            {"categories": ["Nursin"]},
            "no notes of category nursin: did you mean 'Nur",
        ),
        (
            "n.csv",
            MIMIC.encode().replace(b"Pt st", b"Pt\xe4"),
            {},
            "n.csv:5: byte [0-9]+ is not UTF-8.*encoding = ",
        ),
        ("n.txt", b"one\ntwo\nthr\xe9e", {}, "n.txt:3: byte [0-9]+ is not UTF-8"),
        (
            "n.jsonl",
            b'{"text": "a"}\n{"text": "\xe9"}\n',
            {},
            "n.jsonl:2: byte [0-9]+ is not UTF-8",
        ),
        (
            "n.csv.gz",
            gzip.compress(MIMIC.encode() * 3, mtime=0)[:300],
            {"format": "mimic"},
            "check that the file is complete",
        ),
        (
            "n.csv",
            MANY,
            {"categories": ["Nursing"]},
            "no notes of category nursing: there are 31 ",
        ),
        (
            "x.csv",
            REMARKS,
            {},
            "x.csv:1: no column of this table is recognised as the text of notes",
        ),
        (
            *("x.csv", REMARKS, {"column": "remarks", "format": "csv"}),
            "no column 'remarks' for the text: did you mean 'remark'",
        ),
        ("e.csv", "", {}, "e.csv:1: the table is empty"),
        (
            *("s.csv", "id;text\n1;No rash; no fever.\n", {}),
            "s.csv:2: the row has 3 columns, but the header has 2",
        ),
        (
            *("s.csv", "id;text,date\n1;No rash.,2\n", {}),
            "s.csv:1: no column of this table is recognised",
        ),
        *(
            ("b.jsonl", f'{{"text": "a"}}\n{line}\n', {}, f"b.jsonl:2: .*{message}")
            for line, message in (
                ('{"text": "Zyxwolan', "not JSON"),
                ("[1]", "not a JSON object"),
                ('{"text": 1}', "missing or not a string"),
                ('{"text": "\\ud800"}', "half of a surrogate pair"),
                ('{"id": "\\ud800", "text": "a"}', 'the key "id" has half of'),
            )
        ),
    ],
)
def test_an_error_names_the_mistake_in_a_file_of_notes(
    file: File, name: str, content: str | bytes, options: dict[str, Any], message: str
) -> None:
    _complains(file(content, name), message, **options)


def _complains(path: Path, message: str, **options: Any) -> None:
    with pytest.raises(DataError, match=message) as caught:
        list(read_notes(path, **options))
    assert "\n" not in str(caught.value)
    assert "Zyxwolan" not in str(caught.value)


def test_the_ids_of_notes_come_from_the_column_that_the_user_names(
    file: File,
) -> None:
    table = file("id,note_key,text\n1,A1,Well.\n2,A2,Ill.\n", "n.csv")
    notes = read_notes(table, id_column="Note_Key")
    assert [(note.id, note.own_id) for note in notes] == [
        ("n:A1", "A1"),
        ("n:A2", "A2"),
    ]
    _complains(
        table, "n.csv:1: there is no column 'nr' for the notes' ids", id_column="nr"
    )

    records = file('{"key": "A1", "text": "Well."}\n{"text": "Ill."}\n', "n.jsonl")
    assert next(read_notes(records, id_column="key")).id == "A1"
    _complains(records, "n.jsonl:2: there is no key 'key' for the", id_column="key")


def test_commas_and_quoted_semicolons_are_text_in_a_table_with_semicolons(
    file: File,
) -> None:
    table = file('id;text\n1;Calm, alert.\n2;"No rash;\nno fever"\n', "n.csv")
    texts = [note.text for note in read_notes(table)]
    assert texts == ["Calm, alert.", "No rash;\nno fever"]


def test_texts_have_no_column_of_ids(file: File) -> None:
    with pytest.raises(ParameterError, match="`id_column` is for tables"):
        read_notes(file("Well.\n", "n.txt"), id_column="id")


def test_the_guide_names_the_columns_that_tables_of_notes_may_have() -> None:
    """The names in `docs/use.md` are those of the code, in the same order."""
    page = (ROOT / "docs" / "use.md").read_text("utf-8")
    for meaning, field in (
        ("text of the note", "text"),
        ("id of the note", "id"),
        ("patient", "patient"),
        ("visit", "visit"),
        ("category", "category"),
    ):
        names = ", ".join(f"`{name}`" for name in COMMON_KEYS[field])
        assert f"| {meaning} | {names} |\n" in page


def test_a_folder_of_texts_is_read_with_its_subfolders(
    file: File, tmp_path: Path
) -> None:
    """Below as well; ids are paths; other files, and a table without text, are passed
    over."""
    texts = {
        "b.txt": "two",
        "a/1.txt": "\ufeffone\r\nline",
        "a/2.txt": "\n",
        "a/1.ann": "T1",
    }
    for name, text in (
        texts | dict.fromkeys((".hidden.txt", "README.md"), "no")
    ).items():
        file(text, f"notes/{name}")
    file("file\tcode\n", "notes/codes.tsv")
    notes = read_notes(tmp_path / "notes")
    fields = [(n.id, n.text, n.source) for n in notes]
    assert fields == [("a/1", "one\nline", "notes"), ("b", "two", "notes")]
    assert notes.counts == Counter({"notes": 2, EMPTY: 1})
    with pytest.raises(ConfigError, match="no category"):
        read_notes(tmp_path / "notes", categories=["x"])
    (lone,) = read_notes(tmp_path / "notes/b.txt", source="ward")
    assert (lone.id, lone.text, lone.source) == ("b", "two", "ward")


def test_folders_without_notes_or_of_mixed_formats_are_refused(
    file: File, tmp_path: Path
) -> None:
    _complains(tmp_path / "none", "no such file or folder")
    _complains(tmp_path, "no file in this folder holds notes")
    file("Zyxwolan", "LICENSE.txt")
    file(MIMIC, "a.csv")
    assert len(list(read_notes(tmp_path))) == 3
    file('{"text": "x"}\n', "b.jsonl")
    _complains(tmp_path, r"mixes formats: jsonl \(1 files\), mimic \(1 files\)")
    assert [n.text for n in read_notes(tmp_path, "jsonl")] == ["x"]
    with pytest.raises(
        ConfigError, match="unknown format 'mimik' of notes: did you mean 'mimic'"
    ):
        read_notes(tmp_path, "mimik")
    with pytest.raises(ConfigError, match="must be a list"):
        read_notes(tmp_path, categories="Nursing")


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(
        st.text(
            st.characters(codec="utf-8", exclude_characters="\r"),
            min_size=1,
            max_size=60,
        ),
        max_size=8,
    )
)
def test_csv_of_the_standard_library_is_read_back(
    tmp_path: Path, texts: list[str]
) -> None:
    """Python's csv.writer is the independent program; blank texts are what is left out."""
    with (tmp_path / "h.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(["note_id", "person_id", "note_text"])
        writer.writerows([str(i), "p", text] for i, text in enumerate(texts))
    rows = [(n.id, n.text) for n in read_notes(tmp_path / "h.csv")]
    assert rows == [(str(i), text) for i, text in enumerate(texts) if text.strip()]


@pytest.mark.corpora
def test_real_corpora_have_their_published_numbers_of_notes(corpora: Path) -> None:
    """Numbers of notes as the corpora's own page gives them; csv.DictReader reads the
    same."""
    cases = read_notes(corpora / "codiesp/background")
    assert sum(1 for _ in cases) == 3001
    mts = list(read_notes(corpora / "mts_dialog"))
    assert len(mts) == 1701
    assert len({n.id for n in mts}) == 1701
    aci = list(read_notes(corpora / "aci_bench"))
    assert len(aci) == 207
    assert {n.source for n in aci} == {"aci_bench"}
    with (corpora / "aci_bench/train.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    train = read_notes(corpora / "aci_bench/train.csv")
    assert [n.text for n in train] == [r["note"].replace("\r\n", "\n") for r in rows]
    talk = read_notes(corpora / "aci_bench/train.csv", column="dialogue")
    assert next(talk).text == rows[0]["dialogue"].replace("\r\n", "\n")
    demo = read_notes(corpora / "mimic_iii_demo/NOTEEVENTS.csv")
    assert (list(demo), demo.counts) == ([], Counter())
    assert guess_notes(corpora / "mimic_iii_demo/NOTEEVENTS.csv") == "mimic"
    assert list(read_notes(corpora / "mimic_iii_demo")) == []


# ---- sites of notes, streamed: what each holds, and that no text stays in memory


def _notes(patients: Sequence[str | None], source: str = "s") -> list[Note]:
    """Return notes without equal texts: note i has i + 1 times three characters."""
    return [
        Note(str(i), f"n{i} " * (i + 1), p, None, source)
        for i, p in enumerate(patients)
    ]


def _corpus(notes: Iterable[Note], name: str = "a", **settings: object) -> NoteCorpus:
    copies = list(notes)
    return NoteCorpus(name, lambda: iter(copies), f"{name}.csv", **settings)  # type: ignore[arg-type]


def _all(site: SiteNotes) -> list[Note]:
    return [*site.train(), *site.valid()]


some_notes = st.lists(
    st.one_of(st.none(), st.sampled_from("abcdefgh")), min_size=1, max_size=30
)


@settings(max_examples=100, deadline=None)
@given(some_notes, st.sampled_from([0.0, 0.05, 0.5, 0.9]), st.integers(0, 5))
def test_notes_of_a_site_are_split_by_patient(
    patients: list[str | None], fraction: float, seed: int
) -> None:
    """Counts of patients and characters by hand, from the notes in memory."""
    notes = _notes(patients)
    ((site,), _) = make_sites([_corpus(notes, valid_fraction=fraction)], seed)
    train, valid = list(site.train()), list(site.valid())
    assert sorted(n.id for n in train + valid) == sorted(n.id for n in notes)
    assert [int(n.id) for n in train] == sorted(int(n.id) for n in train)
    train_patients, valid_patients = (
        {make_patient_key(n) for n in train},
        {make_patient_key(n) for n in valid},
    )
    assert not train_patients & valid_patients
    number = len(train_patients) + len(valid_patients)
    requested = round(number * fraction)
    assert len(valid_patients) == (
        min(number - 1, max(requested, 1)) if fraction else 0
    )
    assert (site.train_notes, site.valid_notes) == (len(train), len(valid))
    assert (site.train_patients, site.valid_patients) == (
        len(train_patients),
        len(valid_patients),
    )
    assert site.train_characters == sum(len(n.text) for n in train)
    assert site.valid_characters == sum(len(n.text) for n in valid)
    assert site.longest == max(len(n.text) for n in notes)


some_keys = st.lists(st.tuples(st.sampled_from("abcdefgh")), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(some_keys, st.integers(1, 6), st.integers(0, 5))
def test_patients_are_partitioned_into_silos_of_even_size(
    keys: list[tuple[str]], silos: int, seed: int
) -> None:
    """Brute force: each patient has one silo, sizes are even; the order of the notes is
    nothing."""
    units = len(set(keys))
    if units < silos:
        with pytest.raises(
            DataError, match=f"{units} patients or notes cannot fill {silos} silos"
        ):
            assign_to_silos(keys, silos, seed)
        return
    silo_of = assign_to_silos(keys, silos, seed)
    sizes = Counter(silo_of.values())
    assert (set(silo_of), set(sizes)) == (set(keys), set(range(silos)))
    assert max(sizes.values()) - min(sizes.values()) <= 1
    assert assign_to_silos(iter(keys[::-1]), silos, seed) == silo_of


def test_silos_depend_on_the_seed_and_none_is_empty() -> None:
    keys = [(str(i),) for i in range(30)]
    assert assign_to_silos(keys, 5) != assign_to_silos(keys, 5, seed=1)
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        assign_to_silos([("a",)], 0)
    with pytest.raises(DataError, match="cannot fill 1 silos"):
        assign_to_silos([], 1)


def test_a_note_without_patient_is_its_own_patient_in_each_source() -> None:
    """Two sources may use the same note ids; a patient "1" is not the note "1"."""
    rows = [("1", None, "a"), ("1", None, "b"), ("2", "1", "a"), ("3", "1", "b")]
    notes = [
        Note(name, "text", patient, None, source) for name, patient, source in rows
    ]
    assert len(set(map(make_patient_key, notes))) == 3


@settings(max_examples=60, deadline=None)
@given(some_notes, st.integers(1, 5), st.integers(0, 3))
def test_dealing_by_patient_from_files_equals_dealing_in_memory(
    patients: list[str | None], silos: int, seed: int
) -> None:
    """Dealt in memory, the notes lie in the same silos; two corpora are one pool."""
    notes = _notes(patients)
    half = len(notes) // 2
    corpora = [_corpus(notes[:half], "a"), _corpus(notes[half:], "b")][half == 0 :]
    if len({make_patient_key(n) for n in notes}) < silos:
        with pytest.raises(
            ConfigError, match=rf"\[silos\] number = {silos}: .* ask for"
        ):
            make_sites(corpora, seed, silos)
        return
    sites, _ = make_sites(corpora, seed, silos)
    silo_of = assign_to_silos(map(make_patient_key, notes), silos, seed)
    expected = [
        [n for n in notes if silo_of[make_patient_key(n)] == silo]
        for silo in range(silos)
    ]
    assert [site.id for site in sites] == [f"silo{i + 1}" for i in range(silos)]
    for site, part in zip(sites, expected, strict=True):
        assert sorted(n.id for n in _all(site)) == sorted(n.id for n in part)
        assert site.train_patients + site.valid_patients == len(
            {make_patient_key(n) for n in part}
        )


def test_silos_by_document_may_separate_the_notes_of_a_patient() -> None:
    """23 notes of one patient, twelve of them alike: silos of 8, 8 and 7."""
    notes = [Note("x", "same text", "p", None, "s")] * 12 + _notes(["p"] * 11)
    sites, _ = make_sites([_corpus(notes)], 1, 3, "document")
    assert sorted(len(_all(site)) for site in sites) == [7, 8, 8]
    texts = Counter(n.text for site in sites for n in _all(site))
    assert texts == Counter(n.text for n in notes)


def test_silos_depend_on_the_seed_and_not_on_the_order_of_notes() -> None:
    notes = _notes([str(i) for i in range(40)])

    def homes(pool: list[Note], seed: int, by: str) -> list[set[str]]:
        sites, _ = make_sites([_corpus(pool)], seed, 4, by)  # type: ignore[arg-type]
        return [
            {n.id for n in part()}
            for site in sites
            for part in (site.train, site.valid)
        ]

    for by in ("patient", "document"):
        assert homes(notes, 1, by) == homes(notes[::-1], 1, by) != homes(notes, 2, by)


def test_a_limit_keeps_the_training_notes_with_the_lowest_hashes() -> None:
    """Those whose hash of (seed, patient, id) is lowest, sorted here in memory; nested."""
    notes = _notes([str(i // 2) for i in range(60)])
    ((unlimited,), _) = make_sites([_corpus(notes)], 3)
    ranked = sorted(
        unlimited.train(),
        key=lambda n: seed_of(3, "max_notes", *make_patient_key(n), n.id),
    )
    for limit in (1, 7, 30):
        ((site,), messages) = make_sites([_corpus(notes, max_notes=limit)], 3)
        assert {n.id for n in site.train()} == {n.id for n in ranked[:limit]}
        assert [n.id for n in site.valid()] == [n.id for n in unlimited.valid()]
        assert (
            f"a: {limit} of {unlimited.train_notes} training notes are used" in messages
        )
    assert not make_sites([_corpus(notes, max_notes=99)], 3)[1]
    with pytest.raises(
        ConfigError, match=r"'silo\d': no training note is left: raise max_notes"
    ):
        make_sites([_corpus(notes, max_notes=1)], 3, 2)


def test_a_lone_patient_is_used_for_training() -> None:
    ((site,), messages) = make_sites([_corpus(_notes(["p"] * 3))], 1)
    assert (site.train_notes, site.valid_notes, list(site.valid())) == (3, 0, [])
    assert messages == ("a: only one patient, so nothing is held out for validation",)
    sites, messages = make_sites([_corpus(_notes("pqr"))], 1, 3)
    assert [site.train_patients for site in sites] == [1, 1, 1]
    assert sum("one patient" in line for line in messages) == 3
    assert "3 notes of 3 patients in 3 silos by patient" in messages


def test_notes_that_share_a_sentence_are_left_out() -> None:
    shared = "The patient was given five mg of warfarin."
    notes = [
        Note("1", f"Plan.\n\n{shared.upper()} Then home.", "p", None, "s"),
        Note("2", "The patient was given five mg of heparin.", "q", None, "s"),
    ]
    index = index_documents([Document("d", f"Before. {shared}")])
    ((site,), messages) = make_sites([_corpus(notes, exclude=index)], 1)
    assert [n.id for n in _all(site)] == ["2"]
    assert messages[0] == (
        "a: notes left out: 1 that share a sentence with an excluded corpus"
    )
    with pytest.raises(
        ConfigError, match=r"site 'a': found no usable notes in a\.csv but 1 that share"
    ):
        make_sites([_corpus(notes[:1], exclude=index)], 1)


def test_the_pool_has_the_notes_of_every_site() -> None:
    a, b = _corpus(_notes("aabbcc"), "a"), _corpus(_notes("ddeeff", "t"), "b")
    sites, _ = make_sites([a, b], 1)
    pool = pool_notes(sites)
    assert pool.id == "pooled"
    assert list(pool.train()) == [n for site in sites for n in site.train()]
    assert list(pool.valid()) == [n for site in sites for n in site.valid()]
    assert list(pool.train()) == list(pool.train())
    assert pool.train_patients == len({make_patient_key(n) for n in pool.train()})
    assert pool.train_characters == sum(len(n.text) for n in pool.train())
    assert pool.longest == max(site.longest for site in sites)


def test_the_fingerprint_depends_on_texts_patients_and_parts() -> None:
    """The one made while dealing is that of a pass over the sources; any change changes
    it."""
    notes = _notes("aabbccdd")
    ((site,), _) = make_sites([_corpus(notes)], 1)
    assert fingerprint_notes(site) == fingerprint_notes(replace(site, content=""))
    moved = replace(site, train=site.valid, valid=site.train, content="")
    text, *others = notes
    ((other_text,), _) = make_sites(
        [_corpus([replace(text, text="other"), *others])], 1
    )
    ((patient,), _) = make_sites([_corpus([replace(text, patient="b"), *others])], 1)
    ((category,), _) = make_sites(
        [_corpus([replace(n, category="x") for n in notes])], 1
    )
    prints = [fingerprint_notes(s) for s in (site, moved, other_text, patient)]
    assert len(set(prints)) == 4
    assert fingerprint_notes(category) == prints[0]


class _Text(str):
    """A text that is counted while it is alive."""

    alive = peak = 0

    def __new__(cls, value: str) -> _Text:
        instance = super().__new__(cls, value)
        _Text.alive += 1
        _Text.peak = max(_Text.peak, _Text.alive)
        return instance

    def __del__(self) -> None:
        _Text.alive -= 1


def _counted() -> Iterator[Note]:
    for number in range(300):
        yield Note(str(number), _Text(f"{number} " * 20), str(number // 3), None, "s")


def test_at_most_two_texts_are_in_memory() -> None:
    """The one that is read, and the one before it, which a caller's variable still
    holds."""
    index = index_documents(
        [Document("d", "nothing of it occurs here at all, not one")]
    )
    corpus = NoteCorpus("a", _counted, "a.csv", max_notes=100, exclude=index)
    _Text.alive = _Text.peak = 0
    sites, _ = make_sites([corpus], 1, 4)
    assert _Text.alive == 0
    assert _Text.peak == 1
    for site in (*sites, pool_notes(sites)):
        for part in (site.train, site.valid):
            for _note in part():
                assert _Text.alive <= 2
            del _note
        fingerprint_notes(replace(site, content=""))
    assert _Text.peak == 2


def _table(path: Path, rows: Iterable[str]) -> Path:
    path.write_text(
        "\n".join(["SUBJECT_ID,ROW_ID,CATEGORY,ISERROR,TEXT", *rows]) + "\n"
    )
    return path


def _files(*paths: Path, **settings: object) -> NoteCorpus:
    source = partial(read_notes, paths, source="a", **settings)  # type: ignore[arg-type]
    return NoteCorpus("a", source, ", ".join(path.name for path in paths))


def test_a_large_file_is_not_loaded_into_memory(tmp_path: Path) -> None:
    """120 notes of 200,000 characters, 24 MB: tracemalloc's peak is a few notes."""
    text = "The patient was stable overnight. " * 5883
    rows = [f'{i // 2},{i},x,,"{text[:200_000]}"' for i in range(120)]
    path = _table(tmp_path / "notes.csv", rows)
    tracemalloc.start()
    try:
        sites, _ = make_sites([_files(path)], 1, 3)
        longest = max(len(n.text) for site in sites for n in site.train())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert longest == sites[0].longest == 200_000
    assert peak < 5e6


def test_several_files_are_read_and_notes_left_out_are_counted(tmp_path: Path) -> None:
    first = _table(
        tmp_path / "a.csv", ["1,1,x,,one", "1,2,y,,two", "2,3,x,1,three", '2,4,x,,"  "']
    )
    second = _table(tmp_path / "b.csv", ["3,1,x,,four", "3,2,x,,"])
    ((site,), messages) = make_sites([_files(first, second, categories=("X",))], 1)
    assert sorted(n.text for n in _all(site)) == ["four", "one"]
    assert messages == (
        "a: notes left out: 2 without text, 1 marked as errors, 1 of another category",
    )
    stream = read_notes([first, second], source="a")
    assert stream.counts == Counter()
    assert [n.source for n in stream] == ["a", "a", "a/1"]
    assert stream.counts == Counter(
        {"notes": 3, "without text": 2, "marked as errors": 1}
    )


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (
            b"text\nab\xffc\n",
            DataError,
            r"site 'a': .*notes\.csv:2: byte [0-9]+ is not UTF-8",
        ),
        (b"", DataError, r"site 'a': .*notes\.csv:1: the table is empty"),
        (
            b"text\n",
            ConfigError,
            r"site 'a': found no usable notes in notes\.csv: check the path",
        ),
        (
            b'text\n" "\n""\n',
            ConfigError,
            r"found no usable notes in notes\.csv but 2 without text",
        ),
    ],
)
def test_an_error_names_a_file_without_notes(
    tmp_path: Path, data: bytes, error: type[Exception], message: str
) -> None:
    path = tmp_path / "notes.csv"
    path.write_bytes(data)
    with pytest.raises(error, match=message):
        make_sites([_files(path)], 1)


@pytest.mark.parametrize("change", ["text", "fewer", "more"])
def test_a_file_that_changes_during_reading_is_reported(
    tmp_path: Path, change: str
) -> None:
    rows = [f"{i},{i},x,,note {i}" for i in range(10)]
    path = _table(tmp_path / "notes.csv", rows)
    ((site,), _) = make_sites([_files(path)], 1)
    seen_notes = len(list(site.train()))
    changed = {
        "text": [*rows[:9], "9,9,x,,NOTE 9"],
        "fewer": rows[:9],
        "more": [*rows, rows[0]],
    }
    _table(path, changed[change])
    with pytest.raises(
        DataError, match=r"site 'a': the notes in notes\.csv changed while"
    ):
        list(pool_notes([site]).train()) + list(site.valid())
    assert seen_notes == site.train_notes
