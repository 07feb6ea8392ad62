"""The i2b2 2008 obesity challenge (Uzuner 2009): discharge summaries, judged for 16 diseases.

    obesity_patient_records_training.xml, …_training2.xml, …_test.xml   doc[@id] > text
    obesity_standoff_annotations_training.xml, …_addendum*.xml, …_test.xml
        diseases[@source] > disease[@name] > doc[@id][@judgment]

Two experts judged each summary twice: `textual`, what the text states, and `intuitive`, what a
reader concludes, which is what Liu, Dligach and Miller 2019 use. A judgment becomes a label:

    Y  present        1
    N  absent         0
    Q  questionable   2
    U  unmentioned   -1, or 0 on request; it exists in the textual judgments only
    no judgment      -1: experts who disagreed left the pair out, so nothing is known

"Unmentioned" is not "absent": the text says nothing of the disease either way, so it is no
label unless the caller's question is "does the text state it?" (`unmentioned="absent"`); of the
textual judgments only some dozens are N. Addenda add pairs to earlier documents. Where two
files disagree on a pair the later one holds, since an addendum corrects; where one file
contradicts itself nothing holds. Both are counted, and told by file and line alone. In the
paper's Table 1 the columns of presence and absence are exchanged; labels here follow the files.

Each summary is a patient of its own, as in the paper. XML is read as a stream that refuses
entity declarations, so a file can neither grow in memory nor reach for another one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from xml.parsers import expat

import numpy as np

from fednotes.core.errors import ConfigError, DataError, nearest
from fednotes.data.formats.files import BROKEN, broken, open_bytes, visible
from fednotes.data.notes import LARGEST, Note
from fednotes.patients.cohort import ABSENT, PRESENT, QUESTIONABLE, UNLABELLED

DISEASES: Final = (
    "Asthma",
    "CAD",
    "CHF",
    "Depression",
    "Diabetes",
    "GERD",
    "Gallstones",
    "Gout",
    "Hypercholesterolemia",
    "Hypertension",
    "Hypertriglyceridemia",
    "OA",
    "OSA",
    "Obesity",
    "PVD",
    "Venous Insufficiency",
)
Source = Literal["intuitive", "textual"]
Unmentioned = Literal["unlabelled", "absent"]
Part = Literal["train", "test", "all"]

_JUDGMENTS: Final = {"Y": PRESENT, "N": ABSENT, "Q": QUESTIONABLE, "U": UNLABELLED}
_SHOWN = 10  # conflicts and damaged judgments that a report names
_Attributes = dict[str, str]


@dataclass(frozen=True, slots=True)
class Conflict:
    """A pair that is judged twice and differently; not for messages, which name `where`.

    kept: the judgment that holds, if any.
    """

    document: str
    disease: str
    where: tuple[str, str]  # path:line of both
    kept: str | None


@dataclass(frozen=True, eq=False)
class Judgments:
    """What the annotation files say of one source.

    letters: (document, disease) → Y, N, Q or U; pairs without a judgment are not in it.
    conflicts: pairs judged twice and differently. damaged: `path:line: reason` of judgments
    that are left out (another letter, no document, an unknown disease).
    """

    source: Source
    diseases: tuple[str, ...]
    letters: Mapping[tuple[str, str], str]
    conflicts: tuple[Conflict, ...] = ()
    damaged: tuple[str, ...] = ()

    @property
    def documents(self) -> frozenset[str]:
        """The documents with at least one judgment."""
        return frozenset(document for document, _ in self.letters)

    def lines(self) -> tuple[str, ...]:
        """What is wrong in the files, a line each; no patient (a document is one) or disease."""
        named = [
            f"{c.where[1]}: another judgment of the pair than at {c.where[0]}: "
            + ("the later one holds" if c.kept else "neither holds")
            for c in self.conflicts[:_SHOWN]
        ]
        more = len(self.conflicts) - len(named)
        tail = [f"{more} more conflicting judgments"] if more else []
        hidden = len(self.damaged) - _SHOWN
        last = [f"{hidden} more damaged judgments"] if hidden > 0 else []
        return (*named, *tail, *self.damaged[:_SHOWN], *last)


@dataclass(frozen=True, eq=False)
class Obesity:
    """Summaries and labels, ready for a Cohort once the notes are bags of concepts.

    notes: one a patient. labels: (notes, diseases) int8 as in `Cohort`. without_text: judged
    documents whose text is in none of the files. unlabelled: notes without any judgment.
    """

    notes: tuple[Note, ...]
    labels: np.ndarray
    diseases: tuple[str, ...]
    judgments: Judgments
    without_text: int
    unlabelled: int


def read_obesity(
    folder: str | os.PathLike[str],
    source: Source = "intuitive",
    part: Part = "all",
    unmentioned: Unmentioned = "unlabelled",
) -> Obesity:
    """The summaries and judgments of a folder.

    Files are told by their names, `*patient_records*.xml` and `*annotations*.xml` (.xml.gz
    too); annotations are read training first, addenda in the order of their names, test last.
    part: "train" and "test" are the challenge's. Raises ConfigError for another setting,
    DataError for missing files or ones that are no such XML, with the line.
    """
    _one_of("part", part, ("train", "test", "all"))
    texts, annotations = (_files(Path(folder), kind, part) for kind in ("records", "annotations"))
    notes = read_texts(texts)
    judgments = read_judgments(annotations, source)
    ids = [note.id for note in notes]
    labels = label_matrix(ids, judgments, unmentioned)
    judged = judgments.documents
    without_text = len(judged - set(ids))
    unlabelled = sum(id not in judged for id in ids)
    return Obesity(notes, labels, judgments.diseases, judgments, without_text, unlabelled)


def _files(folder: Path, kind: str, part: str) -> list[Path]:
    """The XML files of texts or of annotations, of one part, in the order to read them in."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    mark = "patient_records" if kind == "records" else "annotations"
    endings = (".xml", ".xml.gz")
    named = [
        p for p in visible(folder) if p.name.lower().endswith(endings) and mark in p.name.lower()
    ]
    # In order of names an addendum follows what it adds to: "." is before "_" and digits.
    test = [p for p in named if "test" in p.name.lower()]
    train = [p for p in named if p not in test]
    found = {"train": train, "test": test, "all": train + test}[part]
    if not found:
        what = "" if part == "all" else f"{part} "
        raise DataError(
            f"{folder}: no {what}file of {kind} here: their names are like "
            f"obesity_{'patient_records' if kind == 'records' else 'standoff_annotations'}_*.xml"
        )
    return found


def read_texts(paths: Iterable[str | os.PathLike[str]]) -> tuple[Note, ...]:
    """The summaries of one or more files; the document's id is the note's and the patient's.

    Raises DataError for a document without id or text, or one that is there twice.
    """
    notes: dict[str, Note] = {}
    places: dict[str, str] = {}
    for path in map(Path, paths):
        for line, id, text in _documents(path):
            if not id or not text.strip():
                raise DataError.at(path, line, "the document has no id" if not id else "no text")
            if id in notes:
                raise DataError.at(path, line, f"the document's id is also that at {places[id]}")
            places[id] = f"{path}:{line}"
            notes[id] = Note(id, text, id, "Discharge summary", path.name.split(".")[0])
    return tuple(notes.values())


def _documents(path: Path) -> list[tuple[int, str, str]]:
    """Line, id and text of each `doc` of a file."""
    made: list[tuple[int, str, str]] = []
    pieces: list[str] | None = None
    length = 0
    open_doc: tuple[int, str] | None = None

    def start(line: int, name: str, attributes: _Attributes) -> None:
        nonlocal pieces, open_doc, length
        if name == "doc":
            open_doc, pieces, length = (line, attributes.get("id", "").strip()), None, 0
        elif name == "text" and open_doc is not None:
            pieces = []

    def data(line: int, text: str) -> None:
        nonlocal length
        if pieces is not None:
            length += len(text)
            if length > LARGEST:
                raise DataError.at(path, line, f"a text has more than {LARGEST:,} characters")
            pieces.append(text)

    def end(name: str) -> None:
        nonlocal pieces, open_doc
        if name == "doc" and open_doc is not None:
            made.append((*open_doc, ""))
            open_doc = None
        elif name == "text" and open_doc is not None and pieces is not None:
            made.append((*open_doc, "".join(pieces)))
            open_doc = pieces = None

    _parse(path, start, end, data)
    if not made:
        raise DataError(f"{path}: there is no doc element: these are no patient records")
    return made


def read_judgments(
    paths: Iterable[str | os.PathLike[str]],
    source: Source = "intuitive",
    diseases: Sequence[str] = DISEASES,
) -> Judgments:
    """The judgments of one source in one or more files, in the order in which they hold.

    Raises ConfigError for an unknown source, DataError if there is no judgment of it at all.
    """
    _one_of("source", source, ("intuitive", "textual"))
    found: dict[tuple[str, str], tuple[str, str, Path]] = {}  # → letter, where, file
    conflicts: dict[tuple[str, str], Conflict] = {}
    damaged: list[str] = []
    given = list(map(Path, paths))
    names = {name.casefold(): name for name in diseases}
    for path in given:
        for line, disease, document, letter in _judged(path, source):
            where = f"{path}:{line}"
            known = names.get(disease.casefold())
            if known is None or letter not in _JUDGMENTS or not document:
                damaged.append(f"{where}: {_damage(known, disease, letter, names)}")
                continue
            pair = (document, known)
            before = found.get(pair)
            if before is not None and before[0] != letter:
                kept = letter if before[2] != path else None
                conflicts[pair] = Conflict(document, known, (before[1], where), kept)
                letter = kept or ""
            found[pair] = (letter, where, path)
    letters = {pair: letter for pair, (letter, _, _) in found.items() if letter}
    if not letters:
        shown = ", ".join(str(path) for path in given) or "no file"
        raise DataError(f"{shown}: there is no {source} judgment of a known disease")
    return Judgments(source, tuple(diseases), letters, tuple(conflicts.values()), tuple(damaged))


def _damage(known: str | None, disease: str, letter: str, names: Mapping[str, str]) -> str:
    """Why a judgment is left out."""
    if known is None:
        return f"the disease is none of the challenge's: {nearest(disease, names.values())}"
    if letter not in _JUDGMENTS:
        return "the judgment is none of Y, N, Q and U"
    return "the judgment is of no document"


def _judged(path: Path, source: str) -> list[tuple[int, str, str, str]]:
    """Line, disease, document and judgment of each pair of one source in a file."""
    made: list[tuple[int, str, str, str]] = []
    sources: list[str] = []
    of: list[str] = []

    def start(line: int, name: str, attributes: _Attributes) -> None:
        if name == "diseases":
            sources.append(attributes.get("source", "").strip().lower())
        elif name == "disease":
            of.append(attributes.get("name", "").strip())
        elif name == "doc" and of and sources and sources[-1] == source:
            judgment = attributes.get("judgment", "").strip().upper()
            made.append((line, of[-1], attributes.get("id", "").strip(), judgment))

    def end(name: str) -> None:
        if name == "diseases":
            sources.pop()
        elif name == "disease":
            of.pop()

    _parse(path, start, end)
    return made


def _parse(
    path: Path,
    start: Callable[[int, str, _Attributes], None],
    end: Callable[[str], None],
    data: Callable[[int, str], None] | None = None,
) -> None:
    """Reads XML as a stream. Raises DataError with the line where it is none, or not safe."""
    parser = expat.ParserCreate()
    parser.buffer_text = True

    def refuse(*_: object) -> int:
        message = "the file declares or uses entities of its own: replace them by their text"
        raise DataError.at(path, parser.CurrentLineNumber, message)

    parser.StartElementHandler = lambda name, attributes: start(
        parser.CurrentLineNumber, name, attributes
    )
    parser.EndElementHandler = end
    if data is not None:
        parser.CharacterDataHandler = lambda text: data(parser.CurrentLineNumber, text)
    parser.EntityDeclHandler = refuse
    parser.SkippedEntityHandler = refuse
    parser.ExternalEntityRefHandler = refuse
    with open_bytes(path) as file:
        try:
            parser.ParseFile(file)
        except expat.ExpatError as error:
            reason = expat.ErrorString(error.code)
            raise DataError.at(path, error.lineno, f"the file is no XML ({reason})") from None
        except BROKEN as error:
            raise broken(path, error) from None


def label_matrix(
    documents: Sequence[str], judgments: Judgments, unmentioned: Unmentioned = "unlabelled"
) -> np.ndarray:
    """(documents, diseases) int8: the labels of these documents, -1 where there is no judgment.

    unmentioned: what U becomes, "unlabelled" (-1) or "absent" (0). Raises ConfigError for
    another one.
    """
    _one_of("unmentioned", unmentioned, ("unlabelled", "absent"))
    values = {**_JUDGMENTS, "U": ABSENT if unmentioned == "absent" else UNLABELLED}
    labels = np.full((len(documents), len(judgments.diseases)), UNLABELLED, dtype=np.int8)
    row = {document: at for at, document in enumerate(documents)}
    column = {disease: at for at, disease in enumerate(judgments.diseases)}
    for (document, disease), letter in judgments.letters.items():
        if document in row:
            labels[row[document], column[disease]] = values[letter]
    return labels


def _one_of(what: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigError(f"{what} must be one of {', '.join(known)}, not {value!r}")
