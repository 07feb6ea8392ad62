"""Dictionaries of medical concepts, from files that users have.

    umls     MRCONSO.RRF of the UMLS, with MRSTY.RRF beside it for the semantic types
    obo      an ontology such as the Disease Ontology
    table    two columns, an id and a term, separated by commas or tabs

The concepts of a dictionary are public and the same at every site, whatever occurs in
its notes: their sorted ids are the vocabulary of all models. Files are read line by
line; .gz files are decompressed on the fly.
"""

from __future__ import annotations

import csv
import hashlib
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from fednotes.apps.phenotyping.cohort import compute_offsets
from fednotes.apps.phenotyping.tables import (
    Damaged,
    NumberedRow,
    TableReport,
    read_numbered_lines,
    split_cells,
    split_lines,
)
from fednotes.core.cleaning import NAME, clean
from fednotes.core.errors import ConfigError, DataError, suggest_name

_LISTS = tomllib.loads(
    files("fednotes.apps.phenotyping").joinpath("dictionary.toml").read_text("utf-8")
)
LEFT_OUT_KINDS: Final[frozenset[str]] = frozenset(_LISTS["left_out_kinds"])
TYPES: Final[frozenset[str]] = frozenset(
    name for group in _LISTS["types"].values() for name in group
)
SOURCES: Final = ("SNOMEDCT_US", "RXNORM")
SCOPES: Final = ("EXACT", "RELATED", "NARROW", "BROAD")

_CUI = re.compile(r"C\d{7}")
_TUI = re.compile(r"T\d{3}")
# Concepts of a term. Each mention of the term gets all of them.
_MAX_CONCEPTS = 1000
T = TypeVar("T")


class TermEntry(NamedTuple):
    """A term of a dictionary, and the id of a concept that it denotes."""

    concept: str
    term: str


@dataclass(frozen=True, eq=False)
class Dictionary:
    """The terms of concepts.

    Attributes:
        concepts: Ids such as C0011849 or DOID:1234, sorted. The index of a concept is
            its position in this tuple.
        terms: Distinct terms as in the source, sorted.
        bounds: (terms + 1,) int64 bounds of the terms in `members`.
        members: int32 indices of the concepts that each term denotes, sorted.
    """

    concepts: tuple[str, ...]
    terms: tuple[str, ...]
    bounds: np.ndarray
    members: np.ndarray

    def __len__(self) -> int:
        """Return the number of concepts."""
        return len(self.concepts)

    def get_concepts(self, term: int) -> tuple[int, ...]:
        """Return the indices of the concepts that a term, given by index, denotes."""
        return tuple(self.members[self.bounds[term] : self.bounds[term + 1]].tolist())

    @cached_property
    def fingerprint(self) -> str:
        """A digest of concepts and terms, for caches and comparison between sites."""
        state = hashlib.sha256()
        for names in (self.concepts, self.terms):
            state.update(len(names).to_bytes(8, "little"))
            for name in names:
                data = name.encode("utf-8", "surrogatepass")
                state.update(len(data).to_bytes(4, "little") + data)
        state.update(self.bounds.astype("<i8").tobytes())
        state.update(self.members.astype("<i4").tobytes())
        return state.hexdigest()


def build_dictionary(entries: Iterable[tuple[str, str]]) -> Dictionary:
    """Return a dictionary with these (concept, term) pairs, whatever their order.

    Raises:
        DataError: A term has too many concepts.
    """
    numbers: dict[str, int] = {}  # concept -> its number, in order of reading
    # Most terms denote one concept, and a number takes less memory than a set.
    numbers_of_term: dict[str, int | set[int]] = {}
    for concept, term in entries:
        number = numbers.setdefault(concept, len(numbers))
        known = numbers_of_term.setdefault(term, number)
        if isinstance(known, set):
            known.add(number)
        elif known != number:
            numbers_of_term[term] = {known, number}
    for term, known in numbers_of_term.items():
        if isinstance(known, set) and len(known) > _MAX_CONCEPTS:
            raise DataError(
                f"the term {clean(term, NAME)!r} of the dictionary has {len(known):,} "
                f"concepts, but at most {_MAX_CONCEPTS:,} are possible: leave the term "
                "out of the dictionary"
            )

    concepts = tuple(sorted(numbers))
    terms = tuple(sorted(numbers_of_term))
    index_of_number = np.empty(len(concepts), dtype=np.int32)
    index_of_number[[numbers[concept] for concept in concepts]] = np.arange(
        len(concepts)
    )
    lists = [_list_numbers(numbers_of_term[term]) for term in terms]
    members = np.fromiter(
        (
            index
            for numbers_of_one in lists
            for index in sorted(index_of_number[numbers_of_one].tolist())
        ),
        np.int32,
    )
    bounds = compute_offsets([len(numbers_of_one) for numbers_of_one in lists])
    return Dictionary(concepts, terms, bounds=bounds, members=members)


def _list_numbers(numbers: int | set[int]) -> list[int]:
    """Return one number or several as a list."""
    return [numbers] if isinstance(numbers, int) else list(numbers)


def read_dictionary(path: str | Path, format: str = "", **options: Any) -> Dictionary:
    """Read a dictionary.

    Args:
        path: The file.
        format: "umls", "obo" or "table"; recognised from the file's name if empty.
        options: Options of the format. UMLS has `language`, `sources`, `types` and
            `left_out_kinds`; an ontology `scopes` and `ids`.

    Raises:
        ConfigError: The format does not have an option.
        DataError: The file has another format, or contains no term.
    """
    path = Path(path)
    format = format or _guess_format(path)
    reader = _READERS[format]
    for option in options:
        if option not in reader.options:
            hint = suggest_name(option, reader.options)
            raise ConfigError(
                f"dictionary option {option!r} does not apply to format {format}: "
                f"{hint}"
            )
    return build_dictionary(reader.read(path, **options))


def _guess_format(path: Path) -> str:
    """Return the format of a dictionary by the name of its file."""
    name = path.name.lower().removesuffix(".gz")
    if name.endswith(".rrf"):
        return "umls"
    return "obo" if name.endswith(".obo") else "table"


# ---- rows ----------------------------------------------------------------------------


def _select_usable_rows(
    path: Path,
    kind: str,
    rows: Iterable[tuple[int, T | None]],
    is_usable: Callable[[T], object],
    is_sound: Callable[[T], object] = bool,
) -> Iterator[T]:
    """Yield the usable rows.

    Args:
        path: The file.
        kind: Description of a correct row, for messages.
        rows: Line numbers and rows; None for a line that is not UTF-8.
        is_usable: Returns whether a row can be used at all.
        is_sound: Returns whether a usable row is undamaged. A damaged row is counted
            and still yielded.

    Raises:
        DataError: Most rows are damaged, or there are none.
    """
    report = TableReport(path)
    for number, row in rows:
        report.rows += 1
        if row is None or not is_usable(row):
            report.add_damaged(Damaged(number, f"this is not a {kind}"))
            continue
        if not is_sound(row):
            report.add_damaged(Damaged(number, f"this is not a {kind}"))
        yield row
    if not report.rows:
        raise DataError(f"{path} contains no {kind}: check that this is the right file")
    report.require_sound(report.rows)


def _read_nonblank_lines(path: Path) -> Iterator[tuple[int, str | None]]:
    """Yield the lines of a file that are not blank, with their numbers."""
    for number, line in read_numbered_lines(path):
        if line is None or line.strip():
            yield number, line


def _read_rrf_rows(path: Path) -> Iterator[tuple[int, list[str] | None]]:
    """Yield the rows of a file of the UMLS, with their line numbers."""
    for number, line in _read_nonblank_lines(path):
        yield number, None if line is None else line.rstrip("\r").split("|")


# ---- UMLS ----------------------------------------------------------------------------

_MRCONSO_FIELDS: Final = 18
_SUPPRESSED: Final = ("E", "O", "Y")


class _MrconsoRow(NamedTuple):
    """The fields that are read from a row of MRCONSO.RRF."""

    concept: str  # CUI
    language: str  # LAT
    source: str  # SAB
    kind: str  # TTY
    term: str  # STR
    suppress: str  # SUPPRESS

    @classmethod
    def from_fields(cls, fields: Sequence[str]) -> _MrconsoRow:
        """Return the row with these fields."""
        return cls(
            concept=fields[0],
            language=fields[1],
            source=fields[11],
            kind=fields[12],
            term=fields[14],
            suppress=fields[16],
        )

    @property
    def is_synonym_of_rxnorm(self) -> bool:
        """Whether it is a synonym of RxNorm, which cTAKES leaves out."""
        return self.source == "RXNORM" and self.kind == "SY"


def _is_mrconso(fields: Sequence[str]) -> bool:
    """Return whether a row has the form of MRCONSO: each field ends in a bar."""
    is_complete = len(fields) == _MRCONSO_FIELDS + 1 and not fields[-1]
    return is_complete and bool(_CUI.fullmatch(fields[0]) and fields[14].strip())


def _is_mrsty(fields: Sequence[str]) -> bool:
    """Return whether a row has the form of MRSTY."""
    return len(fields) >= 6 and bool(
        _CUI.fullmatch(fields[0]) and _TUI.fullmatch(fields[1])
    )


def _read_umls(
    path: Path,
    *,
    language: str = "ENG",
    sources: Collection[str] = SOURCES,
    types: Collection[str] | None = None,
    left_out_kinds: Collection[str] = LEFT_OUT_KINDS,
) -> Iterator[TermEntry]:
    """Yield the terms of MRCONSO.RRF, filtered as for cTAKES' fast dictionary.

    Synonyms of RxNorm (SY) and suppressed rows (SUPPRESS of E, O or Y) are left out.
    Unlike this function, cTAKES also uses terms from other vocabularies for concepts
    that one of the sources has.

    Args:
        path: The file.
        language: Language of the terms (LAT).
        sources: Vocabularies (SAB) whose terms are used.
        types: Semantic types (TUI) to use. None means those of cTAKES if MRSTY.RRF is
            beside the file, otherwise all. An empty list means all.
        left_out_kinds: Term types (TTY) to leave out.

    Raises:
        DataError: The file is not MRCONSO, or no row is left; the message then lists
            the file's sources.
    """
    concepts = _read_concepts_of_types(path, types)
    rows_of_source = Counter[str]()
    is_empty = True
    kind = f"row of MRCONSO ({_MRCONSO_FIELDS} fields separated by |)"
    for fields in _select_usable_rows(
        path, kind, _read_rrf_rows(path), is_usable=_is_mrconso
    ):
        row = _MrconsoRow.from_fields(fields)
        rows_of_source[row.source] += 1
        is_wanted = (
            row.language == language
            and row.source in sources
            and row.suppress not in _SUPPRESSED
            and row.kind not in left_out_kinds
            and not row.is_synonym_of_rxnorm
        )
        if is_wanted and (concepts is None or row.concept in concepts):
            is_empty = False
            yield TermEntry(row.concept, clean_term(row.term))
    if is_empty:
        present = ", ".join(source for source, _ in rows_of_source.most_common(10))
        raise DataError(
            f"{path}: no row is left for language {language} and sources "
            f"{', '.join(sources)}: the file has the sources {present or 'none'}"
        )


def _read_concepts_of_types(
    path: Path, types: Collection[str] | None
) -> set[str] | None:
    """Return the concepts of semantic types; None stands for all concepts.

    Args:
        path: MRCONSO.RRF; MRSTY.RRF is expected beside it.
        types: As in `_read_umls`.

    Raises:
        ConfigError: A type is not a TUI.
        DataError: MRSTY.RRF is needed and missing.
    """
    for name in types or ():
        if not _TUI.fullmatch(name):
            raise ConfigError(f"semantic type {name!r}: give its number, such as T047")
    candidates = [path.with_name(f"MRSTY.RRF{ending}") for ending in ("", ".gz")]
    if path.name.lower().endswith(".gz"):
        candidates.reverse()
    table = next((file for file in candidates if file.is_file()), None)
    if types is None and table is None:
        return None
    if types is not None and not types:
        return None
    if table is None:
        raise DataError(
            f"{candidates[0]}: no such file: semantic types need it beside MRCONSO.RRF"
        )
    chosen = TYPES if types is None else frozenset(types)
    kind = "row of MRSTY (6 fields separated by |, CUI and TUI first)"
    rows = _select_usable_rows(table, kind, _read_rrf_rows(table), is_usable=_is_mrsty)
    return {fields[0] for fields in rows if fields[1] in chosen}


# ---- ontologies ----------------------------------------------------------------------

_SYNONYM = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(EXACT|RELATED|NARROW|BROAD)?')
_ESCAPE = re.compile(r"\\(.)")
# Cross-references of one kind to a term. Each of them gets all of the term's synonyms,
# so without a bound, a small file could have billions of entries.
_MAX_REFERENCES = 100
# The values of each tag. The tag "" marks a line that cannot be read.
_Stanza = dict[str, list[str]]


def _read_obo(
    path: Path, *, scopes: Collection[str] = ("EXACT",), ids: str = "own"
) -> Iterator[TermEntry]:
    """Yield the terms of an ontology in OBO format: names and synonyms.

    Obsolete terms, malformed synonyms, and lines that are not UTF-8 are left out.

    Args:
        path: The file.
        scopes: Scopes of the synonyms to use, from `SCOPES`.
        ids: "own" for the ontology's ids; or the prefix of a cross-reference such as
            "UMLS_CUI". A term then denotes all ids of this kind, and is left out if it
            has none.

    Raises:
        ConfigError: A scope is unknown.
        DataError: Most terms are damaged, no term can be used, or one has too many
            cross-references.
    """
    for scope in scopes:
        if scope not in SCOPES:
            raise ConfigError(
                f"synonym scope {scope!r} is unknown: {suggest_name(scope, SCOPES)}"
            )
    is_empty = True
    kind = "stanza [Term] of OBO, with id and name"
    for stanza in _select_usable_rows(
        path, kind, _read_stanzas(path), is_usable=_has_id_and_name, is_sound=_is_sound
    ):
        if _is_obsolete(stanza):
            continue
        concepts = _list_ids(stanza, ids)
        if len(concepts) > _MAX_REFERENCES:
            raise DataError(
                f"{path}: the term {clean(stanza['id'][0].strip(), NAME)} has "
                f"{len(concepts):,} cross-references to {ids}, but at most "
                f'{_MAX_REFERENCES:,} are read: set ids = "own"'
            )
        terms = _list_terms(stanza, scopes)
        for concept in concepts:
            for term in terms:
                is_empty = False
                yield TermEntry(concept, term)
    if is_empty:
        raise DataError(
            f'{path}: no term has a cross-reference to {ids}: set ids = "own"'
        )


def _has_id_and_name(stanza: _Stanza) -> bool:
    """Return whether a stanza has an id and a name."""
    return all(stanza.get(tag, [""])[0].strip() for tag in ("id", "name"))


def _is_obsolete(stanza: _Stanza) -> bool:
    """Return whether a term is obsolete."""
    return stanza.get("is_obsolete", [""])[0].strip() == "true"


def _is_sound(stanza: _Stanza) -> bool:
    """Return whether a term is readable; obsolete terms, which are not used, are."""
    return _is_obsolete(stanza) or ("" not in stanza and all(_match_synonyms(stanza)))


def _match_synonyms(stanza: _Stanza) -> list[re.Match[str] | None]:
    """Return the synonyms of a term; None for a malformed one."""
    return [_SYNONYM.match(value.lstrip()) for value in stanza.get("synonym", ())]


def _list_terms(stanza: _Stanza, scopes: Collection[str]) -> list[str]:
    """Return the name of a term, and its synonyms with certain scopes."""
    synonyms = [
        synonym[1]
        for synonym in _match_synonyms(stanza)
        if synonym is not None and (synonym[2] or "RELATED") in scopes
    ]
    terms = [stanza["name"][0].strip(), *synonyms]
    cleaned = (clean_term(_ESCAPE.sub(r"\1", term)) for term in terms)
    return [term for term in cleaned if term]


def _list_ids(stanza: _Stanza, kind: str) -> list[str]:
    """Return the ids of a term: its own, or its cross-references of one kind."""
    if kind == "own":
        return [stanza["id"][0].strip()]
    references = [value.split()[0] for value in stanza.get("xref", ()) if value.strip()]
    prefix = f"{kind}:"
    ids = [text.partition(":")[2] for text in references if text.startswith(prefix)]
    return list(dict.fromkeys(id for id in ids if id))


def _read_stanzas(path: Path) -> Iterator[tuple[int, _Stanza]]:
    """Yield the [Term] stanzas of an ontology, with their line numbers."""
    kind = ""
    first_line = 0
    stanza: _Stanza = {}
    for number, line in _read_nonblank_lines(path):
        text = (line or "").strip()
        if text.startswith("["):
            if kind == "[Term]":
                yield first_line, stanza
            kind = text
            first_line = number
            stanza = {}
        tag, colon, value = text.partition(":")
        if colon or line is None:
            stanza.setdefault(tag, []).append(value)
    if kind == "[Term]":
        yield first_line, stanza


# ---- tables --------------------------------------------------------------------------

_ID_NAMES: Final = frozenset("id cui concept concept_id code identifier".split())
_TERM_NAMES: Final = frozenset("term str name synonym label text string".split())


def _read_table(path: Path) -> Iterator[TermEntry]:
    """Yield the terms of a table with two columns, id and term.

    Tabs or commas separate the columns. If the first row names both columns (id, cui,
    concept, code; term, str, name, synonym), they may be anywhere among other columns.

    Raises:
        DataError: All rows are damaged.
    """
    # A line that cannot be decoded is None.
    first_line = next(
        (line for _, line in _read_nonblank_lines(path) if line is not None), ""
    )
    delimiter = "\t" if "\t" in first_line else ","
    columns = _find_columns_in_header(first_line, delimiter)
    has_header = columns is not None
    columns = columns or _Columns(id=0, term=1, width=2)

    rows = split_lines(
        _read_nonblank_lines(path),
        columns.width,
        delimiter,
        has_quotes=delimiter != "\t",
    )
    entries = _read_entries(_skip_header(rows) if has_header else rows, columns)

    kind = "row of a dictionary table, with two columns, id and term"
    yield from _select_usable_rows(path, kind, entries, is_usable=all)


def _skip_header(
    rows: Iterable[NumberedRow | Damaged],
) -> Iterator[NumberedRow | Damaged]:
    """Yield the rows without the header, the first row that is not damaged."""
    is_header_read = False
    for row in rows:
        if isinstance(row, Damaged) or is_header_read:
            yield row
        else:
            is_header_read = True


class _Columns(NamedTuple):
    """The columns of a table.

    Attributes:
        id: Number of the column with the ids, from 0.
        term: Number of the column with the terms.
        width: Number of all columns.
    """

    id: int
    term: int
    width: int


def _find_columns_in_header(first_line: str, delimiter: str) -> _Columns | None:
    """Return the columns that a table's first line names; None if it is no header."""
    header: list[str] = []
    with suppress(csv.Error, StopIteration):
        header = [cell.strip().lower() for cell in split_cells(first_line, delimiter)]
    id_column = _find_column(header, _ID_NAMES)
    term_column = _find_column(header, _TERM_NAMES)
    if id_column is None or term_column is None:
        return None
    return _Columns(id_column, term_column, len(header))


def _read_entries(
    rows: Iterable[NumberedRow | Damaged], columns: _Columns
) -> Iterator[tuple[int, TermEntry | None]]:
    """Yield the line and entry of each row; None for a damaged row."""
    for row in rows:
        if isinstance(row, Damaged):
            yield row.line, None
        else:
            concept = row.cells[columns.id].strip()
            yield row.line, TermEntry(concept, clean_term(row.cells[columns.term]))


def _find_column(header: Sequence[str], names: Collection[str]) -> int | None:
    """Return the first column with one of these names; None if there is none."""
    return next((at for at, name in enumerate(header) if name in names), None)


# ---- formats -------------------------------------------------------------------------


class _Reader(NamedTuple):
    """How a format is read, and the names of the reader's options."""

    read: Callable[..., Iterator[TermEntry]]
    options: tuple[str, ...] = ()


_READERS: Final = {
    "umls": _Reader(_read_umls, ("language", "sources", "types", "left_out_kinds")),
    "obo": _Reader(_read_obo, ("scopes", "ids")),
    "table": _Reader(_read_table),
}

_MAX_CLEANED = 4000  # characters of a term; no note contains a longer one
# The search for an ending starts only at the beginning of a run of blanks or commas. If
# it started at each character of the run, the time would grow with the square of the
# run's length.
_TAG = re.compile(
    r"(?<!\s)\s*\((?:disorder|finding|procedure|situation|event|observable entity|"
    r"body structure|morphologic abnormality|morphology|qualifier value|substance|"
    r"product|medicinal product|organism|regime/therapy|physical object|"
    r"context-dependent category|cell|function)\)\s*$"
)
_PREFIX = re.compile(r"\[[A-Z]{1,3}\]\s*", re.IGNORECASE)
_SUFFIX = re.compile(
    r"(?<![\s,])(?:[\s,]+NOS|[\s,]*\(NOS\))$|(?<!\s)\s*\[NOS\]$", re.IGNORECASE
)


def clean_term(term: str) -> str:
    """Return a term as it would appear in notes.

    Removes the tags of SNOMED ("(disorder)", "(finding)" …), "NOS" at the end, and
    "[X]" or "[D]" at the start. White space becomes single spaces.
    """
    term = " ".join(term.split())
    if len(term) > _MAX_CLEANED:
        return term
    while True:
        untagged = _TAG.sub("", term)
        prefix = _PREFIX.match(untagged)
        shorter = untagged[prefix.end() :] if prefix else untagged
        shorter = _SUFFIX.sub("", shorter).strip(" ,")
        if shorter == term or not shorter:
            return term
        term = shorter
