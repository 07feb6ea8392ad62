"""A hospital's tables, a row a line: what was damaged in them; the codes of its
patients; XML.

    read_mimic     MIMIC-III: DIAGNOSES_ICD, PROCEDURES_ICD, CPTEVENTS
    read_omop      OMOP: condition_occurrence, procedure_occurrence
    read_codiesp   CodiEsp: trainD.tsv, trainP.tsv and the like, no header
    read_codes     a table of a site's own with a header and a row for each patient and code

Comma, tab or semicolon, as the header tells; .gz is unpacked. None of these tables has
a field over several lines, so a damaged row (wrong number of columns, no patient, no
code of its system, no text, a quote that is not closed) harms no row after it: it is
left out, counted, and named by its line. What a cell holds is in no message, and no
more of the header than a column that was meant. Rows whose code is empty are counted
apart: MIMIC-III has some. Codes are strings: "0389" is septicaemia, 389 is hearing
loss.

The columns of a site's own table are found by their names, without case; blanks and
hyphens are underscores. Where a row names no coding system (`_SYSTEM`, a cell such as
"ICD-10-CM" or "CPT4"; or icd_version, 9 or 10, as MIMIC-IV has it), it is the one that
the caller gives. A version is of procedures where the caller's system is, or, without
one, where "proc" is in the file's name; of diagnoses otherwise: 3605 is a code of both.
Other columns are passed over.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from sys import intern
from typing import Any, Final, TypeVar
from xml.sax import ContentHandler, SAXParseException

from defusedxml import DefusedXmlException, DTDForbidden
from defusedxml.sax import make_parser

from fednotes.apps.phenotyping.codes import SYSTEMS, code_of, system_of
from fednotes.core import bounds
from fednotes.core.errors import ConfigError, DataError, nearest
from fednotes.data.encodings import named_encoding
from fednotes.data.formats.files import (
    READ_ERRORS,
    encoding_for,
    incomplete_file,
    open_bytes,
    open_text,
)
from fednotes.data.formats.folders import list_files

EXAMPLES: Final = 10  # damaged rows that a report names
_WRONG: Final = 100  # rows of which all are damaged: the rest of the file is not read
PATIENT_COLUMNS: Final = (
    "patient",
    "patient_id",
    "patientid",
    "subject_id",
    "person_id",
    "pat_id",
)
_LONGEST = 1 << 20  # bytes of a row; more is no row
_PIECE = 1 << 16  # bytes of XML that are read at once
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Damaged:
    """A row that was left out: its line, counted from 1, and why."""

    line: int
    reason: str


Row = tuple[int, list[str]] | Damaged  # line and cells


@dataclass
class TableReport:
    """What became of a table's rows: kept, empty (nothing given) and damaged ones are
    all.

    unknown: kept rows whose code the dictionary beside the table (D_ICD_DIAGNOSES and
    D_ICD_PROCEDURES) does not know, for example because a spreadsheet ate a leading
    zero.
    examples: the first damaged rows.
    """

    path: Path
    rows: int = 0
    kept: int = 0
    empty: int = 0
    damaged: int = 0
    unknown: int = 0
    examples: list[Damaged] = field(default_factory=list)

    def sound(self, rows: Iterable[T | Damaged]) -> Iterator[T]:
        """The rows that are not damaged; all of them are counted."""
        for row in rows:
            self.rows += 1
            if isinstance(row, Damaged):
                self.damage(row)
            else:
                yield row

    def damage(self, row: Damaged) -> None:
        """Count a row that is left out.

        Raises DataError where all of the first hundred are.
        """
        self.damaged += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(row)
        if self.damaged == self.rows == _WRONG:
            self.require_sound(self.rows)

    def require_sound(self, rows: int) -> None:
        """Raises DataError where more than half of so many are damaged: it is another
        table."""
        if 2 * self.damaged > rows:
            reason, all_of = self.examples[0].reason, f"{self.damaged} of {rows} rows"
            raise DataError.at(
                self.path,
                self.examples[0].line,
                f"{reason}; so are {all_of}: is this the right table?",
            )

    def lines(self) -> tuple[str, ...]:
        """The damaged rows, a line each, as in an error message."""
        named = tuple(f"{self.path}:{d.line}: {d.reason}" for d in self.examples)
        more = self.damaged - len(named)
        return (*named, f"{self.path}: {more} more damaged rows") if more else named


# ---- rows ----------------------------------------------------------------------------


def lines(path: Path) -> Iterator[tuple[int, str | None]]:
    """Yield numbered lines without their ends; None for one that is no text or too
    long.

    The encoding is that of the byte-order mark, else UTF-8 or the one that the user
    named (`encodings.reading_as`). A byte that is not UTF-8 harms no other line.

    Raises:
        DataError: The file is missing, not whole or no text.
    """
    codec, mark = encoding_for(path, named_encoding())
    pieces = _byte_lines(path, mark) if codec == "utf-8" else _wide_lines(path)
    number, is_inside = 0, False  # inside: within a line that is too long
    for piece, is_whole in pieces:
        if not is_inside:
            number += 1
            yield (
                number,
                piece.rstrip("\r\n") if piece is not None and is_whole else None,
            )
        is_inside = not is_whole


def _byte_lines(path: Path, mark: int) -> Iterator[tuple[str | None, bool]]:
    """Yield the lines of a UTF-8 file in pieces of `_LONGEST` bytes; whether each ends
    one."""
    with open_bytes(path) as file:
        try:
            file.read(mark)
            while data := file.readline(_LONGEST):
                is_whole = len(data) < _LONGEST or data.endswith(b"\n")
                yield _text(data) if is_whole else None, is_whole
        except READ_ERRORS as error:
            raise incomplete_file(path, error) from None


def _wide_lines(path: Path) -> Iterator[tuple[str | None, bool]]:
    """Yield the same of a file in another encoding."""
    with open_text(path, named_encoding(), errors="replace") as file:
        while line := file.readline(_LONGEST):
            is_whole = len(line) < _LONGEST or line.endswith("\n")
            yield None if "\ufffd" in line else line, is_whole


def _text(data: bytes) -> str | None:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def rows(
    lines: Iterable[tuple[int, str | None]],
    width: int,
    delimiter: str,
    quoted: bool = True,
) -> Iterator[Row]:
    """Each line's cells, `width` of them; empty lines are passed over.

    quoted: whether a cell may stand in quotes.
    """
    for number, line in lines:
        if line is None:
            yield Damaged(
                number, "a byte is not of the file's encoding, or the row is too long"
            )
        elif line.strip():
            try:
                row = (
                    cells_of(line, delimiter)
                    if quoted and '"' in line
                    else line.split(delimiter)
                )
            except csv.Error:
                yield Damaged(number, "a quote is not closed")
            else:
                fits = len(row) == width
                why = "" if fits else f"{len(row)} columns instead of {width}"
                yield (number, row) if fits else Damaged(number, why)


def cells_of(line: str, delimiter: str) -> list[str]:
    """The cells of one line. Raises csv.Error for a quote that is not closed."""
    return next(csv.reader([line], delimiter=delimiter, strict=True))


class Table:
    """A table with a header. Raises DataError where there is none.

    titles: as they stand; names: to compare ("Patient ID" is patient_id). line: the
        header's.
    """

    def __init__(self, path: Path, what: str = "codes") -> None:
        if path.is_dir():
            raise DataError(f"{path}: a folder: name the table of {what} that is in it")
        self.path, self._lines = path, lines(path)
        self.line, first = next(self._lines, (1, ""))
        if not (first or "").strip():
            message = "the table has no header: expected the columns' names"
            raise DataError.at(path, self.line, message)
        assert first is not None
        self._delimiter = max(",\t;", key=first.count)
        try:
            header = next(csv.reader([first], delimiter=self._delimiter))
        except csv.Error as error:
            raise self.error(f"the columns' names cannot be read ({error})") from error
        self.titles = tuple(name.strip() for name in header)
        self.names = tuple(map(_plain, self.titles))

    def has(self, *columns: str) -> bool:
        """Whether there is a column of one of these names."""
        return any(_plain(column) in self.names for column in columns if column)

    def column(self, given: str, usual: Sequence[str] = (), key: str = "") -> int:
        """Where a column is: the one of the `given` name, else the only one of the
        usual names.

        key: the setting that names the column, for a message. Raises DataError for a
        column that is missing, or that two could be.
        """
        wanted = [_plain(given)] if given else usual
        found = [at for at, name in enumerate(self.names) if name in wanted]
        if not found:
            shown = given or usual[0]
            # the first line of a table without a header is a row
            none = f"the first line names {len(self.names)} columns, none like it"
            hint = nearest(_plain(shown), self.names, none)
            remedy = f" ({key} = names it)" if key and not given else ""
            raise self.error(f"there is no column {shown!r}: {hint}{remedy}")
        if len(found) > 1:
            both = " and ".join(repr(self.titles[at]) for at in found[:2])
            remedy = f"name one with {key} =" if key and not given else "rename one"
            raise self.error(
                f"columns {found[0] + 1} and {found[1] + 1}, {both}, could both be meant: {remedy}"
            )
        return found[0]

    def rows(self) -> Iterator[Row]:
        """What is below the header; once."""
        return rows(self._lines, len(self.names), self._delimiter)

    def error(self, message: str) -> DataError:
        """An error in the header."""
        return DataError.at(self.path, self.line, message)


def _plain(title: str) -> str:
    return "_".join(title.lower().replace("-", " ").split())


_ENTITIES = "the file declares or uses entities of its own: replace them by their text"
# line, name, attributes; where an element ends: None, and the text of one whose text is
# asked for
_Element = tuple[int, str, Mapping[str, str] | None, str]


class _Handler(ContentHandler):
    """The elements since the last look. texts: the name of those whose text is kept."""

    def __init__(self, path: Path, texts: str, parser: Any) -> None:
        super().__init__()
        self.path, self.texts, self.found = path, texts, list[_Element]()
        self._parser = parser
        self._pieces: list[str] | None = None
        self._length = 0
        self.number = 0  # what was found so far, runs of characters too

    def error(self, message: str) -> DataError:
        """An error where the reader is."""
        return DataError.at(self.path, self._line, message)

    @property
    def _line(self) -> int:
        return int(self._parser.getLineNumber() or 1)

    def startElement(self, name: str, attrs: Any) -> None:  # noqa: N802 - sax calls it so
        self.number += 1
        self.found.append((self._line, name, dict(attrs), ""))
        if name == self.texts:
            self._pieces, self._length = [], 0

    def characters(self, content: str) -> None:
        self.number += 1
        if self._pieces is not None:
            self._length += len(content)
            if self._length > bounds.NOTE:
                raise self.error(f"a text has more than {bounds.NOTE:,} characters")
            self._pieces.append(content)

    def endElement(self, name: str) -> None:  # noqa: N802
        self.number += 1
        text = ""
        if name == self.texts and self._pieces is not None:
            text, self._pieces = "".join(self._pieces), None
        self.found.append((self._line, name, None, text))

    def skippedEntity(self, name: str) -> None:  # noqa: N802
        raise self.error(_ENTITIES)


def elements(path: Path, texts: str = "", doctype: bool = True) -> Iterator[_Element]:
    """Where the elements of an XML file begin and end, one after the other, while it is
    read.

    Nothing is fetched, and entities of the file's own are refused, so that it can
    neither grow in memory nor reach for another one. texts: the name of elements whose
    text is wanted. doctype: whether the file may have one at all.

    Raises DataError, with the line, for a file that is no XML, not whole or not safe.
    """
    parser = make_parser()
    handler = _Handler(path, texts, parser)
    parser.forbid_dtd, parser.forbid_external = not doctype, False
    parser.setContentHandler(handler)
    parser.reset()
    unread = 0  # bytes in which nothing began, ended or went on
    with open_bytes(path) as file:
        more = True
        while more:
            before = handler.number
            try:
                more = bool(data := file.read(_PIECE))
                parser.feed(data) if more else parser.close()
            except SAXParseException as error:
                message = f"the file is no XML ({error.getMessage()})"
                raise DataError.at(path, error.getLineNumber() or 1, message) from None
            except DTDForbidden:
                raise handler.error(
                    "the file has a DOCTYPE, which its program never writes"
                ) from None
            except DefusedXmlException:
                raise handler.error(_ENTITIES) from None
            except READ_ERRORS as error:
                raise incomplete_file(path, error) from None
            except (LookupError, ValueError):
                message = "the file's encoding is not known here: write it as UTF-8"
                raise DataError.at(path, 1, message) from None
            unread = 0 if handler.number > before else unread + len(data)
            if unread > bounds.MARKUP:
                told = f"a tag or a comment has more than {bounds.MARKUP:,} bytes"
                raise handler.error(f"{told}: is this the right file?")
            yield from handler.found
            handler.found.clear()


# ---- codes ---------------------------------------------------------------------------


@dataclass
class PatientCodes:
    """The codes of a site's patients. They never leave the site.

    codes: patient → codes as `data.codes` writes them, at least one each. tables: what
    became of the rows.
    """

    codes: dict[str, set[str]] = field(default_factory=dict, repr=False)
    tables: list[TableReport] = field(default_factory=list)


# MIMIC-III's tables: name, column of codes, coding system, dictionary of codes.
MIMIC: Final = {
    "diagnoses": ("DIAGNOSES_ICD", "ICD9_CODE", "icd9", "D_ICD_DIAGNOSES"),
    "procedures": ("PROCEDURES_ICD", "ICD9_CODE", "icd9proc", "D_ICD_PROCEDURES"),
    "cpt": ("CPTEVENTS", "CPT_CD", "cpt", ""),
}
_CONCEPTS: Final = ("condition", "procedure")  # systems of OMOP, whose 0 is no concept
_CODIESP: Final = {"D": "icd10", "P": "icd10pcs"}
_CODE: Final = (
    *("code", "icd_code", "icd9_code", "icd10_code", "dx_code", "diagnosis_code"),
    *("procedure_code", "cpt_code", "cpt_cd", "hcpcs_cd"),
)
_SYSTEM: Final = ("system", "coding_system", "code_system")
_VERSION: Final = "icd_version"
# of diagnoses, of procedures
_ICD: Final = (("icd9", "icd10"), ("icd9proc", "icd10pcs"))
# What else a coding system is called, in small letters and digits alone.
_CALLED: Final = {
    **{name: name for name in SYSTEMS},
    **{"icd9cm": "icd9", "icd10cm": "icd10", "icd10gm": "icd10", "icd9pcs": "icd9proc"},
    **{"icd9cmproc": "icd9proc", "cpt4": "cpt", "hcpcs": "cpt"},
}


def read_mimic(folder: Path, tables: Collection[str] = ()) -> PatientCodes:
    """The codes in a folder of MIMIC-III tables (.csv or .csv.gz, upper or lower case).

    tables: which of "diagnoses", "procedures", "cpt", all if empty; each must be there.
    Raises ConfigError for another table, DataError for a missing file or column, or a
    table of mostly damaged rows.
    """
    for name in tables:
        if name not in MIMIC:
            raise ConfigError(
                f"unknown table {name!r} of MIMIC-III: {nearest(name, MIMIC)}"
            )
    made = PatientCodes()
    wanted = [MIMIC[name] for name in tables or MIMIC]
    paths = [_needed(folder, table[0]) for table in wanted]
    for path, (_, column, system, dictionary) in zip(paths, wanted, strict=True):
        known = None
        if dictionary and (beside := _find(folder, dictionary)):
            listed = Table(beside)
            at, each = listed.column(column), listed.rows()
            known = {
                code_of(system, r[1][at]) for r in each if not isinstance(r, Damaged)
            }
        _of_table(made, path, ("SUBJECT_ID", column), system, known)
    return made


def read_omop(
    folder: Path, conditions: str = "condition", procedures: str = "procedure"
) -> PatientCodes:
    """The codes in a folder of OMOP tables (.csv or .csv.gz; comma or tab).

    conditions, procedures: the coding system of each table; "" leaves it out.
    "condition" and "procedure" take standard concepts (condition_concept_id; 0, not
    mapped, counts as empty); any other, such as "icd10" or "cpt", takes the source's
    codes (condition_source_value), which the tables do not say the system of. Raises as
    `read_mimic`.
    """
    wanted = [
        (k, s) for k, s in (("condition", conditions), ("procedure", procedures)) if s
    ]
    for _, system in wanted:
        system_of(system)
    made = PatientCodes()
    for path, kind, system in [
        (_needed(folder, f"{k}_occurrence"), k, s) for k, s in wanted
    ]:
        column = f"{kind}_{'concept_id' if system in _CONCEPTS else 'source_value'}"
        _of_table(made, path, ("person_id", column), system)
    return made


def read_codiesp(path: Path, kinds: str = "DP") -> PatientCodes:
    """The codes of CodiEsp's cases: article → ICD-10 codes.

    path: a file such as trainD.tsv, or a folder whose files ending in D.tsv (diagnoses)
    and P.tsv (procedures) are all read. kinds: "D", "P" or both. Two columns without a
    header: article, code; codes are lower case there. Raises as `read_mimic`.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    made = PatientCodes()
    for file in [path] if not path.is_dir() else list_files(path, recursive=True):
        for kind in kinds:
            if file.name.removesuffix(".gz").endswith(f"{kind}.tsv"):
                system = _CODIESP[kind]
                _collect(made, file, rows(lines(file), 2, "\t"), (0, 1), system)
    if not made.tables:
        ends = " or ".join(f"{kind}.tsv" for kind in kinds)
        raise DataError(f"{path}: no file of codes here: their names end in {ends}")
    return made


def read_codes(
    path: Path, system: str = "", patient_column: str = "", code_column: str = ""
) -> PatientCodes:
    """The codes of a table with a header: CSV or tab-separated, also .gz.

    system: the coding system of rows that name none. patient_column, code_column: names
    of columns that are called otherwise than usual.

    Raises DataError for a missing file or column, a table that says no coding system,
    or one of mostly damaged rows.
    """
    table, made = Table(path), PatientCodes()
    patient = table.column(patient_column, PATIENT_COLUMNS, "patient_column")
    code = table.column(code_column, _CODE, "code_column")
    _collect(made, path, table.rows(), (patient, code), _systems(table, system))
    return made


def _systems(table: Table, system: str) -> Callable[[Sequence[str]], str | None]:
    """How a row's coding system is told. Raises DataError where nothing tells it."""
    named = [name for name in _SYSTEM if name in table.names]
    column = table.column("", named) if named else None
    of_icd = not system or system.startswith("icd")
    version = table.names.index(_VERSION) if of_icd and table.has(_VERSION) else None
    if column is None and version is None and not system:
        raise table.error(
            'nothing says which coding system the codes are of: give system = "icd10" (or '
            f"another of {', '.join(SYSTEMS)}), or add a column `system`"
        )
    in_name = not system and "proc" in table.path.name.lower()
    procedures = in_name or system in ("icd9proc", "icd10pcs")
    versions = dict(zip(("9", "10"), _ICD[procedures], strict=True))

    def of(cells: Sequence[str]) -> str | None:
        if column is not None and (text := cells[column].strip()):
            return _called(text)
        if version is not None and (text := cells[version].strip()):
            return versions.get(text)
        return system or None

    return of


@lru_cache(maxsize=1000)
def _called(text: str) -> str | None:
    """The system of this name; the last part of an address, as FHIR has:
    …/sid/icd-10-cm."""
    return _CALLED.get(re.sub("[^a-z0-9]", "", text.lower().rpartition("/")[2]))


def _find(folder: Path, name: str) -> Path | None:
    """The table of this name in a folder, whatever its case and packing."""
    wanted = {
        f"{name.lower()}{ending}" for ending in (".csv", ".csv.gz", ".tsv", ".tsv.gz")
    }
    return next(
        (path for path in list_files(folder) if path.name.lower() in wanted), None
    )


def _needed(folder: Path, name: str) -> Path:
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder of tables")
    if found := _find(folder, name):
        return found
    raise DataError(
        f"{folder}: there is no {name}.csv (nor .csv.gz): add the table or leave it out of the "
        "tables to read"
    )


# of all rows, or by a row's cells
_System = str | Callable[[Sequence[str]], str | None]


def _of_table(
    made: PatientCodes,
    path: Path,
    columns: tuple[str, str],
    system: str,
    known: Collection[str | None] | None = None,
) -> None:
    """Adds the codes of a table with these columns.

    Raises DataError for a missing one.
    """
    table = Table(path)
    patient, code = map(table.column, columns)
    _collect(made, path, table.rows(), (patient, code), system, known)


def _collect(
    made: PatientCodes,
    path: Path,
    given: Iterable[Row],
    columns: tuple[int, int],
    system: _System,
    known: Collection[str | None] | None = None,
) -> None:
    """Adds a table's codes, and what became of its rows.

    columns: of patients and of codes. known: the codes that there are; others are kept
    and counted. Raises DataError where most rows are damaged.
    """
    report = TableReport(path)
    made.tables.append(report)
    for line, cells in report.sound(given):
        patient, text = (cells[at].strip() for at in columns)
        of = system if isinstance(system, str) else system(cells)
        code = None if of is None else code_of(of, text)
        if patient and (not text or (text == "0" and of in _CONCEPTS)):
            report.empty += 1
        elif patient and code is not None:
            made.codes.setdefault(intern(patient), set()).add(code)
            report.kept += 1
            report.unknown += known is not None and code not in known
        elif of is None:
            report.damage(
                Damaged(line, f"the coding system is none of {', '.join(SYSTEMS)}")
            )
        else:
            reason = f"the code is none of {of}" if patient else "no patient"
            report.damage(Damaged(line, reason))
    report.require_sound(report.rows)
