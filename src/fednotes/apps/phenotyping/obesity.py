"""The i2b2 2008 obesity challenge (Uzuner 2009): discharge summaries with judgments.

The summaries are judged for 16 diseases. Each summary is a patient of its own, as in
Liu, Dligach and Miller 2019. A folder has these files:

    obesity_patient_records_training.xml, …_training2.xml, …_test.xml   doc[@id] > text
    obesity_standoff_annotations_training.xml, …_addendum*.xml, …_test.xml
        diseases[@source] > disease[@name] > doc[@id][@judgment]

Two experts judged each summary twice: `textual`, what the text states, and `intuitive`,
what a reader concludes, which the paper uses. In Table 1 of the paper, the columns
of presence and absence are swapped; the labels here follow the files.

If two files judge the same pair differently, the later judgment is used, because an
addendum is a correction. These pairs are counted and reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, Literal

from fednotes.apps.phenotyping.labels import (
    LABEL_VALUES,
    LabelCollector,
    Pair,
    PatientLabels,
)
from fednotes.apps.phenotyping.tables import Damaged
from fednotes.core.errors import DataError, suggest_name
from fednotes.data.formats.folders import list_files
from fednotes.data.formats.xml_files import read_elements
from fednotes.data.notes import Note

Judgment = Literal["intuitive", "textual"]

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
_LETTERS: Final = ("y", "n", "q", "u")


def read_obesity(
    folder: Path, judgment: Judgment = "intuitive"
) -> tuple[tuple[Note, ...], PatientLabels]:
    """Read the summaries of a folder and their judgments.

    Files are recognised by their names, `*patient_records*.xml` and `*annotations*.xml`
    (.xml.gz too). Annotations are read in this order: training, addenda by name, test.

    Args:
        folder: The folder.
        judgment: Which of the two judgments to read.

    Raises:
        DataError: A file is missing, or is not such XML; the message has the line.
    """
    notes = read_summaries(_list_xml_files(folder, "patient_records", "records"))
    collector = LabelCollector(prefers_later=True)
    for path in _list_xml_files(folder, "annotations", "annotations"):
        collector.add_file(path, _read_judgments(path, judgment))
    labels = collector.make_labels(DISEASES)
    if not labels.values:
        raise DataError(
            f"{folder}: found no {judgment} judgments of a known disease: check the "
            "folder, or choose the other judgment"
        )
    return notes, labels


def _list_xml_files(folder: Path, name_part: str, kind: str) -> list[Path]:
    """Return the XML files of texts or annotations, in the order of reading.

    Args:
        folder: The folder.
        name_part: A part that the names of the files have.
        kind: The content of the files, for messages.

    Raises:
        DataError: There is no such folder or file.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    files = [
        path
        for path in list_files(folder)
        if path.name.lower().endswith((".xml", ".xml.gz"))
        and name_part in path.name.lower()
    ]
    if not files:
        prefix = "obesity_standoff_" if kind == "annotations" else "obesity_"
        raise DataError(
            f"{folder}: no file of {kind} here: expected a name such as "
            f"{prefix}{name_part}_*.xml"
        )
    # Sorted by name, an addendum follows the file that it corrects, because "." comes
    # before "_" and digits.
    return sorted(files, key=lambda path: "test" in path.name.lower())


def read_summaries(paths: Iterable[Path]) -> tuple[Note, ...]:
    """Read the summaries of one or more files, as `stream_summaries` yields them."""
    return tuple(stream_summaries(paths))


def stream_summaries(paths: Iterable[Path]) -> Iterator[Note]:
    """Yield the summaries of one or more files as they are read.

    A document's id serves as the id of both note and patient.

    Raises:
        DataError: A document has no id or no text, or its id is repeated.
    """
    places: dict[str, str] = {}
    for path in paths:
        number = 0
        for line, id, text in _read_documents(path):
            number += 1
            if not id:
                raise DataError.at(path, line, "the document has no id")
            if not text.strip():
                raise DataError.at(path, line, "no text")
            if id in places:
                reason = f"the document at {places[id]} has the same id"
                raise DataError.at(path, line, reason)
            places[id] = f"{path}:{line}"
            source = path.name.split(".")[0]
            yield Note(id, text, id, "Discharge summary", source)
        if not number:
            raise DataError(
                f"{path}: there is no doc element, so these are not patient records"
            )


def _read_documents(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the id and the first text of each document in a file."""
    begin = 0
    id = ""
    first_text = ""
    for line, name, attributes, text in read_elements(path, text_of=("text",)):
        if name == "doc" and attributes is not None:
            begin = line
            id = attributes.get("id", "").strip()
            first_text = ""
        elif name == "doc":
            yield begin, id, first_text
        elif name == "text":
            first_text = first_text or text


def _read_judgments(path: Path, judgment: Judgment) -> Iterator[Pair | Damaged]:
    """Yield the textual or the intuitive judgments in a file."""
    source = ""
    disease = ""
    for line, name, attributes, _ in read_elements(path):
        # The end of an element has no attributes and therefore resets its name.
        values = attributes or {}
        if name == "diseases":
            source = values.get("source", "").strip().lower()
        elif name == "disease":
            disease = values.get("name", "").strip()
        elif (
            name == "doc" and attributes is not None and disease and source == judgment
        ):
            document = values.get("id", "").strip()
            letter = values.get("judgment", "").strip()
            yield _read_judgment(line, document, disease, letter=letter)


def _read_judgment(
    line: int, document: str, disease: str, *, letter: str
) -> Pair | Damaged:
    """Return a document's judgment on a disease, or why it cannot be used.

    Args:
        line: Its line in the file.
        document: The document's id, which is the patient.
        disease: The disease's name, in any case.
        letter: The judgment: Y, N, Q or U, in any case.
    """
    names = {name.casefold(): name for name in DISEASES}
    name = names.get(disease.casefold())
    if name is None:
        hint = suggest_name(disease, DISEASES)
        return Damaged(line, f"the disease is not one of the challenge's: {hint}")
    if letter.lower() not in _LETTERS:
        return Damaged(line, "the judgment is not Y, N, Q or U")
    if not document:
        return Damaged(line, "the judgment does not name a document")
    return Pair(line, document, name, LABEL_VALUES[letter.lower()])
