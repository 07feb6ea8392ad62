"""The readers and writers of every format: content, errors and round trips.

Corpora and records are invented; real ones are counted where they are installed.
"""

from __future__ import annotations

import json
import random
import re
import sys
import tomllib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fednotes.core.errors import ConfigError, DataError, FednotesError
from fednotes.core.types import Document, Span
from fednotes.data import formats
from fednotes.data.formats import (
    FORMATS,
    _registry,
    brat,
    conll,
    guess_format,
    jsonl,
    read,
)

File = Callable[..., Path]
SAMPLES = Path(__file__).parent / "samples"


def forms(document: Document) -> list[tuple[str, str]]:
    """Return the text and label of each span."""
    return [(document.text[s.start : s.end], s.label) for s in document.spans]


def complains(path: Path, message: str, format: str | None = None) -> None:
    """Check that reading is refused in one line without the text."""
    with pytest.raises(DataError, match=message) as caught:
        read(path, format)
    assert "\n" not in str(caught.value)
    assert "Zyxwolan" not in str(caught.value)


# ---- what all share: guessing, folders, ids, whole files, a new format ---------------


BIO = "He\tO\ntook\tO\nthe\tB-Drug\ndrug\tI-Drug\n\n#\tO\n1\tB-ADR\n\n"


def test_wrong_files_are_refused_in_one_line(file: File, tmp_path: Path) -> None:
    """One line each, with the remedy."""
    complains(tmp_path / "nowhere", "no such file or folder")
    complains(file("", "empty.tsv"), "empty.tsv: the file is empty")
    complains(file("\ufeff\n \n", "blank.tsv"), "the file is empty")
    complains(
        file(BIO.encode() + b"caf\xe9\tO\n"),
        f"byte {len(BIO) + 3} is not UTF-8: give the encoding",
    )
    complains(
        file("Just some prose.\nNo tags here.\n", "p"),
        "give `format`; `fednotes corpus formats` lists",
    )
    with pytest.raises(ConfigError, match="did you mean 'conll'"):
        read(tmp_path, "conl")


def test_a_folder_must_hold_files_of_one_format(file: File, tmp_path: Path) -> None:
    """One format a folder, other files passed over, folders below only if they must."""
    folder = file(BIO, "c/b.tsv").parent
    file(BIO, "c/a.tsv")
    file("A corpus.", "c/README.md")
    file(b"\x00\xff\x89PNG", "c/x.png")
    file('{"text": "a"}', "c/below/x.jsonl")
    assert [d.id for d in read(folder)] == ["a:1", "a:2", "b:1", "b:2"]
    assert len(read(folder.parent / "c/below")) == 1
    file('{"text": "a"}', "c/x.jsonl")
    complains(
        folder, r"mixes formats: conll \(2 files\), jsonl \(1 files\); choose one"
    )
    assert len(read(folder, "jsonl")) == 1
    complains(folder, "no file in this folder looks like brat", "brat")
    complains(
        file("x", "d/y").parent, "of a known format; `fednotes corpus formats` lists"
    )
    (tmp_path / "empty").mkdir()
    complains(tmp_path / "empty", "the folder is empty: give one with notes")


def test_repeated_ids_become_unique(file: File) -> None:
    """Also where an id looks like a renamed one."""
    lines = [json.dumps({"id": i, "text": "a"}) for i in ("x", "x~2", "x", "x")]
    assert [d.id for d in read(file("\n".join(lines)))] == ["x", "x~2", "x~3", "x~4"]


def test_files_are_written_completely_or_not_at_all(tmp_path: Path) -> None:
    """What cannot be written leaves the earlier file, and no debris."""
    path = tmp_path / "a.jsonl"
    jsonl.write([Document("a", "b")], path)
    before = path.read_bytes()
    for bad in (Document("a", "\ud800"), Document("a", "b", meta={"x": object()})):
        with pytest.raises(FednotesError, match=r"cannot be written|cannot write"):
            jsonl.write([bad], path)
    with pytest.raises(FednotesError, match="cannot be written"):
        jsonl.write([Document("a", "b")], path / "below.jsonl")
    with pytest.raises(DataError, match="brat needs a folder"):
        brat.write([Document("a", "b")], path)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [before]


CHARACTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | CHARACTERS,
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(CHARACTERS, inner, max_size=3)
    ),
    max_leaves=5,
)


@st.composite
def _documents(draw: st.DrawFn) -> Document:
    text = draw(CHARACTERS)
    pair = st.lists(st.integers(0, len(text)), min_size=4, max_size=4).map(sorted)
    spans = []
    for a, b, c, d in draw(st.lists(pair, max_size=4)):
        label = draw(CHARACTERS.filter(bool))
        if a < b < c < d and draw(st.booleans()):
            spans.append(Span(a, d, label, ((a, b), (c, d))))
        elif a < d:
            spans.append(Span(a, d, label))
    edges = st.lists(st.integers(0, len(text)), max_size=6, unique=True).map(sorted)
    places = edges.map(lambda e: tuple(zip(e[::2], e[1::2], strict=False)))
    return Document(
        draw(CHARACTERS),
        text,
        tuple(spans),
        draw(st.none() | CHARACTERS),
        draw(st.lists(CHARACTERS, max_size=2).map(tuple)),
        draw(st.dictionaries(CHARACTERS, VALUES, max_size=3)),
        draw(places),
        draw(places),
    )


@pytest.mark.slow
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    documents=st.lists(_documents(), min_size=1, max_size=3, unique_by=lambda d: d.id)
)
def test_jsonl_survives_a_round_trip(documents: list[Document], tmp_path: Path) -> None:
    """Every field of every document, whatever characters it holds."""
    jsonl.write(documents, tmp_path / "a.jsonl")
    assert read(tmp_path / "a.jsonl") == tuple(documents)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(document=_documents())
def test_brat_survives_a_round_trip(document: Document, tmp_path: Path) -> None:
    """Text and spans of any document whose labels brat can hold; \\r and \\ufeff aside."""
    text = re.sub("[\r\ufeff]", "x", document.text)
    spans = tuple(
        sorted({Span(s.start, s.end, "L", s.fragments) for s in document.spans})
    )
    brat.write([Document("d", text, spans)], tmp_path / "b")
    (again,) = read(tmp_path / "b")
    assert (again.text, set(again.spans)) == (text, set(spans))


def test_a_module_in_the_folder_of_formats_is_a_format(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that is laid into the folder is found, guessed, read, and named in
    messages."""
    folder = file(
        (SAMPLES / "loud_notes.py.txt").read_text(), "more/loud_notes.py"
    ).parent
    file("no_format = True", "more/other.py")
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(folder)])
    monkeypatch.setattr(_registry, "FORMATS", formats.discover())
    assert set(_registry.FORMATS) == {*FORMATS, "loud-notes"}
    path = file("SHOUTED\nHe took ASPIRIN.\n\nNo RASH at all.\n")
    first, second = read(path)
    assert (first.id, forms(first), forms(second)) == (
        "f:2",
        [("ASPIRIN", "Loud")],
        [("RASH", "Loud")],
    )
    with pytest.raises(ConfigError, match="did you mean 'loud-notes'"):
        read(path, "loud_note")
    for name in ("loud_notes", "other"):
        sys.modules.pop(f"fednotes.data.formats.{name}")
        monkeypatch.delattr(formats, name)


# ---- what samples of every format say ------------------------------------------------


def described(document: Document) -> dict[str, object]:
    """Return a document as `samples/read.toml` writes it, without what is empty."""
    d, text = document, document.text
    meta = json.loads(json.dumps(dict(d.meta)))
    description = {
        **{"id": d.id, "text": text},
        "mentions": [
            f"{s.start}:{s.end} {s.label} {text[s.start : s.end]}" for s in d.spans
        ],
        "sentences": " ".join(f"{a}:{b}" for a, b in d.sentences),
        "tokens": " ".join(f"{a}:{b}" for a, b in d.tokens),
        "meta": {name: value for name, value in meta.items() if value is not None},
    }
    return {name: value for name, value in description.items() if value}


READ = tomllib.loads((SAMPLES / "read.toml").read_text("utf-8"))["sample"]


@pytest.mark.parametrize("sample", READ, ids=lambda sample: sample["what"])
def test_each_sample_is_read_as_it_states(
    file: File, sample: dict[str, Any], tmp_path: Path
) -> None:
    content = sample.get("content") or (SAMPLES / sample["file"]).read_text()
    path = file(content, sample["name"])
    assert guess_format(path) == sample["format"]
    documents = read(path)
    assert list(map(described, documents)) == sample["documents"]
    if sample.get("again"):
        FORMATS[sample["format"]].write(documents, tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == path.read_bytes()


# ---- ADE Corpus V2: mentions are found where the rows' offsets put them --------------


def _corpus(seed: int) -> tuple[dict[str, str], dict[tuple[str, str], set[Span]]]:
    """Invented abstracts in the corpus' files, and the spans that were put into them.

    Words repeat within a sentence, so that only the offsets tell which occurrence is
    meant; each sentence has three rows or more, one of them a dose.
    """
    rng = random.Random(seed)
    words = ["rash", "fever", "aspirin", "lithium", "and", "with", "rash", "aspirin"]
    files: dict[str, list[str]] = {
        "DRUG-AE.rel": [],
        "DRUG-DOSE.rel": [],
        "ADE-NEG.txt": [],
    }
    truth: dict[tuple[str, str], set[Span]] = {}
    for pmid in ("11", "22"):
        position = rng.randrange(50)
        for number in range(6):
            sentence_words = [rng.choice(words) for _ in range(7)]
            sentence_words += ["rash", "aspirin", "5mg", f"x{number}."]
            rng.shuffle(sentence_words)
            sentence = " ".join(sentence_words)
            starts = [
                sum(len(f) + 1 for f in sentence_words[:i])
                for i in range(len(sentence_words))
            ]
            spans = truth.setdefault((pmid, sentence), set())

            def place(
                names: tuple[str, ...], forms=sentence_words, starts=starts
            ) -> tuple[str, int]:
                i = rng.choice([i for i, f in enumerate(forms) if f in names])
                return forms[i], starts[i]

            for row in range(4):
                name, label, kind = ("DRUG-AE.rel", "ADE", ("rash", "fever"))
                if row == 3:
                    name, label, kind = "DRUG-DOSE.rel", "Dosage", ("5mg",)
                ends = []
                for form, start in (place(kind), place(("aspirin", "lithium"))):
                    entity_type = label if form in kind else "Drug"
                    spans.add(Span(start, start + len(form), entity_type))
                    ends += [
                        form,
                        str(position + start),
                        str(position + start + len(form)),
                    ]
                files[name].append("|".join([pmid, sentence, *ends]))
            if number == 0:
                files["ADE-NEG.txt"].append(f"{pmid} NEG {sentence}")
            position += len(sentence) + rng.randrange(1, 40)
        files["ADE-NEG.txt"].append(f"{pmid} NEG Nothing was | seen.")
        truth[pmid, "Nothing was | seen."] = set()
    return {name: "\n".join(lines) + "\n" for name, lines in files.items()}, truth


@pytest.mark.parametrize("seed", range(12))
def test_spans_of_ade_are_read_at_their_places(file: File, seed: int) -> None:
    """`_corpus` puts mentions at random occurrences; the reader must find just those."""
    files, truth = _corpus(seed)
    for name, text in files.items():
        file(text, f"ade/{name}")
    folder = file("about", "ade/README").parent
    assert guess_format(folder) == "ade"
    documents = read(folder)
    assert len(documents) == len({d.id for d in documents}) == len(truth)
    assert {(d.meta["pmid"], d.text): set(d.spans) for d in documents} == truth
    assert not any("unplaced" in d.meta for d in documents)


def test_a_row_of_ade_that_matches_no_text_is_counted_or_refused(file: File) -> None:
    """1 of 21 is counted, 1 of 1 is an error with its line."""
    good = [f"7|Rash {i} after aspirin.|Rash|0|4|aspirin|13|20" for i in range(20)]
    bad = "7|Rash 3 after aspirin.|fever|0|4|aspirin|13|20"
    documents = read(file("\n".join([*good, bad])))
    assert sum(d.meta.get("unplaced", 0) for d in documents) == 1
    complains(file(bad), r"f.txt:1: a mention is not in its sentence \(1 of 1 rows\)")


# ---- brat: pieces, counted offsets, lines that refer to each other, names of files ---

ANN = (SAMPLES / "note.ann").read_text()
NOTE = "Had a upper belly pain after\naspirin.\n"


def _pair(file: File, note: str, ann: str) -> Path:
    file(note, "p/n1.txt")
    return file(ann, "p/n1.ann")


def _moved(ann: str, by: int) -> str:
    """Return the annotations with all offsets moved."""

    def move(match: re.Match[str]) -> str:
        return re.sub(r"\d+", lambda m: str(int(m.group()) + by), match.group())

    return re.sub(r"(?<= )\d+ \d+(;\d+ \d+)*(?=\t)", move, ann)


def test_mentions_of_brat_may_overlap_and_be_discontinuous(
    file: File, tmp_path: Path
) -> None:
    """Overlapping and discontinuous mentions; the other lines survive a round trip."""
    path = _pair(file, NOTE, ANN)
    for source in (path, path.with_suffix(".txt"), path.parent):
        (document,) = read(source)
        assert document.id == "n1"
        assert document.spans[1] == Span(6, 22, "ADE", ((6, 11), (18, 22)))
        assert forms(document) == [
            ("belly pain", "ADE"),
            ("upper belly pain", "ADE"),
            ("aspirin", "Drug"),
        ]
    brat.write([document], tmp_path / "out")
    assert (tmp_path / "out/n1.txt").read_bytes() == NOTE.encode()
    assert (tmp_path / "out/n1.ann").read_bytes() == ANN.encode()


def test_changed_mentions_of_brat_get_consistent_references_and_new_ids(
    file: File, tmp_path: Path
) -> None:
    """A mention that went takes along what refers to it; a new one gets a new id."""
    (document,) = read(_pair(file, NOTE, ANN))
    changed = Document(
        "n1", NOTE, (*document.spans[1:], Span(0, 3, "X")), meta=document.meta
    )
    brat.write([changed], tmp_path / "out")
    lines = (tmp_path / "out/n1.ann").read_text().split("\n")
    assert [line.split("\t")[0] for line in lines] == ["T2", "T3", "#1", "T4", ""]
    assert lines[3] == "T4\tX 0 3\tHad"
    assert read(tmp_path / "out")[0].spans == changed.spans


@pytest.mark.parametrize("counted", [True, False])
def test_offsets_of_brat_may_or_may_not_count_windows_line_ends(
    file: File, counted: bool
) -> None:
    """Offsets may count the BOM and both characters of a line end, or neither."""
    note = "\ufeff" + NOTE.replace("\n", "\r\n")
    ann = _moved(ANN, 1).replace("30 37", "31 38") if counted else ANN
    (document,) = read(_pair(file, note, ann.replace("\n", "\r\n")))
    assert forms(document)[0] == ("belly pain", "ADE")
    assert forms(document)[2] == ("aspirin", "Drug")


def test_offsets_of_brat_count_characters(file: File) -> None:
    """Not bytes, not UTF-16 units; a line break inside a mention is written as a space."""
    (document,) = read(_pair(file, "é😀 ear\npain", "T1\tX 3 11\tear pain\n"))
    assert document.spans == (Span(3, 11, "X"),)


def test_texts_of_brat_may_be_in_a_neighbouring_folder(file: File) -> None:
    """CADEC's layout; pieces out of order, overlapping, their words in another order."""
    file("bad upper pain", "cadec/text/a.txt")
    file("T1\tADR 10 14;0 3\tbad pain\nT2\tADR 4 9;5 14\tx\n".replace("x", "upper pper pain"),
         "cadec/original/a.ann")  # fmt: skip
    (document,) = read(file("", "cadec/original/b.ann").parent / "a.ann")
    assert document.spans == (
        Span(0, 14, "ADR", ((0, 3), (10, 14))),
        Span(4, 14, "ADR"),
    )


@pytest.mark.parametrize("blank", ["", " \n\t\n"])
def test_brat_keeps_empty_notes(tmp_path: Path, blank: str) -> None:
    """One empty note among others, or alone: what was written is what is read."""
    documents = (Document("a", blank), Document("b", "has rash", (Span(4, 8, "ADE"),)))
    for name, subset in (("both", documents), ("alone", documents[:1])):
        brat.write(subset, tmp_path / name)
        notes = [(d.id, d.text, d.spans) for d in read(tmp_path / name)]
        assert notes == [(d.id, d.text, d.spans) for d in subset]
    (lone,) = read(tmp_path / "both/a.txt")
    assert (lone.id, lone.text) == ("a", blank)


def test_a_lone_text_or_annotation_of_brat_is_refused(file: File) -> None:
    """An empty text alone is no corpus, a mark alone no text; nothing is annotated in
    none."""
    folder = file("", "p/a.txt").parent
    complains(folder, "no file in this folder looks like brat", "brat")
    file("T1\tADE 0 4\tZyxwolan\n", "p/a.ann")
    complains(folder, r"a.ann:1: T1 at 0:4 lies outside the text \(0 characters\)")
    file("\ufeff", "p/a.txt")
    file("", "p/a.ann")
    assert read(folder) == (Document("a", ""),)
    complains(file("T1\tX 0 1\ta\n", "x.ann"), "x.txt: no such file")


ID = st.text(st.sampled_from(list('ab/.:%*?"<>|\\\n\x7f~ é2356AECF')), max_size=10)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=ID)
@example(name="odd:1")
@example(name="odd%3A1")
@example(name="%")
@example(name="..")
@example(name="/a//.b/")
@example(name="100%/%253A%2")
def test_brat_keeps_the_ids_of_documents(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever characters, hidden or relative names; in one file below the folder."""
    folder = tmp_path_factory.mktemp("b") / "in"
    brat.write([Document(name, "x")], folder)
    assert [p.name for p in folder.parent.iterdir()] == ["in"]
    assert [d.id for d in read(folder)] == [name]


def test_ids_of_brat_that_only_look_escaped_are_kept(
    file: File, tmp_path: Path
) -> None:
    """A name that only looks escaped is left; names that mean one id are told apart."""
    for name in ("50%41", "a%3A1", "a:1", "100%"):
        file("x", f"p/{name}.txt")
        file("", f"p/{name}.ann")
    documents = read(tmp_path / "p")
    assert [d.id for d in documents] == ["100%", "50%41", "a:1", "a:1~2"]
    brat.write(documents[:2], tmp_path / "out")
    assert {p.stem for p in (tmp_path / "out").iterdir()} == {"100%", "50%41"}


def test_ids_of_brat_may_name_subfolders(file: File, tmp_path: Path) -> None:
    """Ids with and without a / beside each other: all of them come back, as each
    folder's own."""
    ids = ["a", "b", "b/c", "b/d/a", "e/a"]
    brat.write([Document(name, f"Text of {name}.") for name in ids], tmp_path / "o")
    documents = read(tmp_path / "o")
    assert sorted((d.id, d.text) for d in documents) == [
        (n, f"Text of {n}.") for n in ids
    ]
    assert [d.id for d in read(tmp_path / "o/b")] == ["c", "d/a"]
    assert [d.id for d in read(tmp_path / "o/b.ann")] == ["b"]
    file("No note.", "o/b/README.txt")
    file("", "o/.old/a.ann")
    assert read(tmp_path / "o") == documents


def test_ids_of_brat_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    """An id is data: it must not name a path elsewhere."""
    brat.write([Document("../../evil", "a"), Document("/etc/x", "b")], tmp_path / "o/p")
    files = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.txt")}
    assert files == {"o/p/%2E%2E/%2E%2E/evil.txt", "o/p/%/etc/x.txt"}


@pytest.mark.slow
@pytest.mark.corpora
def test_maccrobat_is_read_and_written_unchanged(corpora: Path, tmp_path: Path) -> None:
    """200 documents, 25,189 mentions, 44 in pieces; written again every file is the
    same."""
    documents = read(corpora / "maccrobat")
    spans = [s for d in documents for s in d.spans]
    assert (len(documents), len(spans)) == (200, 25_189)
    assert sum(bool(s.fragments) for s in spans) == 44
    brat.write(documents, tmp_path / "m")
    for path in (corpora / "maccrobat").iterdir():
        assert (tmp_path / "m" / path.name).read_bytes() == path.read_bytes()
    jsonl.write(documents, tmp_path / "m.jsonl")
    assert read(tmp_path / "m.jsonl") == documents


# ---- CoNLL: documents, schemes, repairs, and the same bytes when written again -------


def test_documents_without_tokens_are_tokenised_for_conll(tmp_path: Path) -> None:
    """Documents without tokens are cut by the project's rule."""
    spans = (Span(3, 9, "X"), Span(3, 6, "Y"), Span(12, 15, "X"))
    document = Document("n 1", "He has 60mg. Newly up.", spans)
    conll.write([document], tmp_path / "o.conll")
    lines = "He\tO|has\tB-X|60mg\tI-X|.\tO||Newly\tB-X|up\tO|.\tO||"
    expected = "# newdoc id = n 1\n" + lines.replace("|", "\n")
    assert (tmp_path / "o.conll").read_text() == expected
    (again,) = read(tmp_path / "o.conll")
    assert again.id == "n 1"


FORM = st.text(
    st.characters(exclude_categories=["Cs", "Z", "C"]), min_size=1, max_size=6
)
ROWS = st.lists(
    st.lists(
        st.tuples(FORM, st.sampled_from(["O", "B-X", "B-Y"])), min_size=1, max_size=6
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(rows=ROWS)
def test_conll_survives_a_round_trip(
    rows: list[list[tuple[str, str]]], tmp_path: Path
) -> None:
    """Any tokens, also `#` and accents: the written file is the read one."""
    text = "".join(
        "".join(f"{f}\t{t}\n" for f, t in s) + "\n" for s in [[("a", "O")], *rows]
    )
    if "-DOCSTART-" in text:
        return
    (tmp_path / "a").write_bytes(text.encode())
    documents = read(tmp_path / "a", "conll")
    assert len(documents) == len(rows) + 1
    conll.write(documents, tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == text.encode()


LABELS = {
    "psytar": Counter(ADR=3543, DI=716, WD=444, SSI=340),
    "ncbi_disease": Counter(Disease=787 + 960 + 5134),
}


@pytest.mark.slow
@pytest.mark.corpora
@pytest.mark.parametrize("folder", ["psytar", "ncbi_disease", "bc5cdr", "gum"])
def test_real_conll_files_are_written_back_unchanged(
    corpora: Path, folder: str, tmp_path: Path
) -> None:
    """Byte for byte; mentions are counted on the raw lines (each has one B-)."""
    labels: Counter[str] = Counter()
    for path in sorted(corpora.joinpath(folder).iterdir()):
        if not path.is_file() or not conll.accepts(path):
            continue
        documents = read(path)
        conll.write(documents, tmp_path / path.name)
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()
        counts = Counter(s.label for d in documents for s in d.spans)
        assert counts == Counter(
            re.findall(r"\tB-(.+)$", path.read_text("utf-8"), re.MULTILINE)
        )
        labels += counts
    assert labels == LABELS.get(folder, labels)
    assert labels.total() > 5000


# ---- i2b2 2010 (lines and tokens as offsets, texts beside or in another folder) and 20

I2B2_TEXT = 'Admission Date :\nShe  had chest\tpain and " no " fever .\n\nA chest\nx-ray was done .\n'
I2B2_CON = """c="had chest\tpain" 2:1 2:2||t="problem"
c="" no " fever" 2:4 2:7||t="problem"
c="a chest x-ray" 4:0 5:0||t="test"
"""


@pytest.mark.parametrize(
    "layout",
    ["r.txt r.con", "txt/r.txt concept/r.con", "test_data/r.txt ref/concepts/r.con"],
)
def test_i2b2_counts_tokens_from_zero(file: File, layout: str) -> None:
    """Lines from 1, tokens from 0 and parted by spaces only, the end included."""
    text, con = layout.split()
    file(I2B2_TEXT, text)
    path = file(I2B2_CON, con)
    (document,) = read(path.parent)
    assert document == read(path)[0]
    concepts = [
        ("had chest\tpain", "problem"),
        ('" no " fever', "problem"),
        ("A chest\nx-ray", "test"),
    ]
    assert forms(document) == concepts
    assert document.id == "r"
    assert len(document.sentences) == 4
    assert [document.text[a:b] for a, b in document.tokens[:3]] == [
        "Admission",
        "Date",
        ":",
    ]


def test_i2b2_mismatches_are_counted(file: File) -> None:
    """A few concepts may be written otherwise than the text."""
    file(I2B2_TEXT, "r.txt")
    path = file(I2B2_CON + 'c="it" 2:0 2:0||t="x"\n', "r.con")
    assert read(path)[0].meta == {"mismatched": 1}
    complains(file(I2B2_CON, "other/lone.con"), "its text file lone.txt was not found")


# i2b2 2012: an invented record, its dirt, and what is refused. No real record is
# public.

RECORD = (SAMPLES / "i2b2_2012.xml").read_text()


def test_i2b2_ignores_other_files_and_counts_crlf_as_one_character(file: File) -> None:
    """Other files beside records are passed over; CRLF counts as one character, as in
    XML."""
    file(RECORD, "1.xml")
    file(RECORD.replace("\n", "\r\n"), "2.xml")
    first, second = read(file("x", "1.xml.extent").parent)
    assert (first.id, second.id) == ("1", "2")
    assert (first.text, first.spans) == (second.text, second.spans)


def test_i2b2_offsets_relative_to_the_stripped_text_are_accepted(file: File) -> None:
    """Public readers strip the text and subtract one: with three line ends first, that
    fits."""
    (document,) = read(file(RECORD.replace("[CDATA[\n", "[CDATA[\n\n\n"), "1.xml"))
    assert [form for form, _ in forms(document)] == [
        "chest pain",
        "aspirin",
        "2001-02-03",
    ]


def test_an_i2b2_record_without_mentions_is_read(file: File) -> None:
    lines = [
        line
        for line in RECORD.splitlines()
        if not line.startswith(("<EVENT", "<TIMEX3"))
    ]
    (document,) = read(file("\n".join(lines), "1.xml"))
    assert document.spans == ()


# ---- OntoNotes in CoNLL-2012 columns -------------------------------------------------

SAMPLE = (SAMPLES / "ontonotes.conll").read_text()


def test_a_folder_of_ontonotes_is_read_without_its_automatic_columns(
    file: File, tmp_path: Path
) -> None:
    for genre, name in (("nw", "a"), ("bc", "b"), ("tc", "c")):
        text = SAMPLE.replace("nw/made", f"{genre}/made").replace("made_0001", name)
        for columns in ("gold", "auto"):
            file(text, f"o/data/{genre}/00/{name}.{columns}_conll")
    file("what this is\n", "o/README")
    assert guess_format(tmp_path / "o") == "ontonotes"
    genres = [d.meta["genre"] for d in read(tmp_path / "o")]
    assert genres == ["bc", "bc", "nw", "nw", "tc", "tc"]
    assert read(file(SAMPLE, "x.conll12")) == read(file(SAMPLE, "y.v9_gold_conll"))


mentions = st.lists(
    st.tuples(
        st.integers(1, 3), st.integers(0, 2), st.sampled_from(["GPE", "WORK_OF_ART"])
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(mentions, min_size=1, max_size=3))
def test_ontonotes_columns_are_read_as_written(
    tmp_path_factory: pytest.TempPathFactory, sentences: list
) -> None:
    """A writer of this test's own: mentions of 1 to 3 words with 0 to 2 words between."""
    lines, expected, words = ["#begin document (wb/x/00/x_1); part 002"], [], []
    position = 0
    for sentence in sentences:
        bits: list[tuple[str, str]] = []
        for length, gap, label in sentence:
            names = [f"w{len(words) + len(bits) + i}" for i in range(length)]
            middle = [(n, "*") for n in names[1:-1]]
            ends = [(names[-1], "*)")] if length > 1 else []
            start = position + sum(len(w) + 1 for w, _ in bits)
            expected.append(Span(start, start + len(" ".join(names)), label))
            bits += [
                (names[0], f"({label}*" if length > 1 else f"({label})"),
                *middle,
                *ends,
            ]
            bits += [(f"gap{i}", "*") for i in range(gap)]
        lines += [
            f"wb/x/00/x_1 2 {i} {w} X * - - - - {b} -" for i, (w, b) in enumerate(bits)
        ]
        lines += [""]
        words += [w for w, _ in bits]
        position += sum(len(w) + 1 for w, _ in bits)
    path = tmp_path_factory.mktemp("x") / "x"
    path.write_text("\n".join([*lines, "#end document", ""]))
    (document,) = read(path)
    assert document.text.split() == words
    assert list(document.spans) == expected
    assert len(document.sentences) == len(sentences)


@pytest.mark.slow
@pytest.mark.corpora
def test_pubtator_of_bc5cdr_has_the_published_counts(corpora: Path) -> None:
    """1,500 articles; mentions and relations counted on the raw lines."""
    folder = corpora / "bc5cdr" / "pubtator"
    documents = read(folder)
    lines = "\n".join(p.read_text("utf-8") for p in sorted(folder.glob("*_corpus.txt")))
    assert len(documents) == 1500
    mentions = len(re.findall(r"^\d+\t\d+\t\d+\t", lines, re.MULTILINE))
    assert sum(len(d.spans) for d in documents) == mentions == 28_785
    relations = len(re.findall(r"^\d+\tCID\t", lines, re.MULTILINE))
    assert sum(len(d.meta.get("relations", ())) for d in documents) == relations == 3116


# ---- what is wrong, by path and line, never with the text ----------------------------


def _refused() -> Iterator[tuple[str, str, str]]:
    """Yield format, text and message: the rows of `refused.toml`, and long texts."""
    table = tomllib.loads((Path(__file__).parent / "refused.toml").read_text("utf-8"))
    for name, parts in table.items():
        for part in parts:
            for text, message in part.get("rows", ()):
                yield name, part.get("before", "") + text, message
            for original, changed, message in part.get("changes", ()):
                yield (
                    name,
                    (SAMPLE if name == "ontonotes" else RECORD).replace(
                        original, changed, 1
                    ),
                    message,
                )
    yield "brat", f"T1\tADE 1 {'9' * 5000}\tbelly\n", "n1.ann:1: incomplete"
    yield "jsonl", "{" * 5000, "f.txt:1: not JSON"
    yield (
        "ontonotes",
        SAMPLE.removesuffix("#end document\n"),
        "f.txt:22: the file ends before `#end",
    )


@pytest.mark.parametrize(("format", "text", "message"), list(_refused()))
def test_an_error_names_the_mistake_in_a_file(
    file: File, format: str, text: str, message: str
) -> None:
    if format == "brat":
        path = _pair(file, NOTE, text)
    elif format == "i2b2":
        file(I2B2_TEXT, "r.txt")
        path = file(text, "r.con")
    else:
        path = file(text, "1.xml" if format == "i2b2-2012" else "f.txt")
    complains(path, message, format)


def test_a_small_docbin_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    """200 MB of zeros are 200 kB when packed; notes do not pack a thousandfold."""
    pytest.importorskip("spacy")
    path = tmp_path / "bomb.spacy"
    path.write_bytes(zlib.compress(bytes(200_000_000)))
    with pytest.raises(DataError, match="it unpacks to more than"):
        read(path, "docbin")
