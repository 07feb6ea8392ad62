"""Dictionaries of medical concepts: terms → concept ids, from files that users have.

    umls     MRCONSO.RRF of the UMLS, with MRSTY.RRF beside it for the semantic types
    obo      an ontology such as the Disease Ontology
    table    two columns, an id and a term, separated by commas or tabs

A dictionary's concepts are public and the same at every site, whatever occurs in its notes:
their sorted ids are the vocabulary of all that is learnt from them. Files are read line by
line; those that end in .gz as they are.

Words as terms and texts share them: folded, without accents, plurals as singulars.

`plain` keeps a text's length wherever each character stands for one: `origin` leads back.

What a dictionary of concepts is, and what its readers share: terms, counts, lines.
"""

from __future__ import annotations

import csv
import hashlib
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from fednotes.core.errors import ConfigError, DataError, nearest
from fednotes.data.formats.files import BROKEN, broken, open_bytes

# Single words that are terms of some dictionary and mean something else, or nothing, in notes.
AMBIGUOUS: Final = frozenset(
    "a about after all also an and any are as at back bad be been before best but by can care "
    "case cat control could date day did discharge disease diseases disorder disorders do "
    "does done due each end etc face fall fast feel felt few fig find finding findings first "
    "fit for from fund gas get give given go good had has have he her here him his history "
    "home hot how ii iii illness in increased is it its job lab large last left level like "
    "line long low lump made male man map may mean men met mg might mild ml moderate month "
    "more most must name negative new no none normal nos not note now of off old on once one "
    "only or other our out over par past patient patients per plan positive post pre present "
    "problem rate rest right s said scale see seen sequela sequelae set severe she short "
    "should sign since site so some son spot stable state still such sun syndrome tag tan "
    "test than that the their them then there these they thin this those time tip to today "
    "too top two type under unit until up us use used very via was way we week well were what "
    "when where which while white who will with woman work would year years yes you your".split()
)
_SHORTEST: Final = 3
_MOST_WORDS: Final = 20

_ACCENTS: Final = range(0x300, 0x370)
_APOSTROPHES: Final = "'’ʼ"


class _Characters(dict[int, str]):
    """Code point → what stands for it: letters and digits folded, an apostrophe, or a space."""

    def __missing__(self, code: int) -> str:
        if chr(code) in _APOSTROPHES:
            made = "'"
        elif code in _ACCENTS:
            made = ""  # an accent
        else:
            folded = unicodedata.normalize("NFKD", chr(code).casefold())
            kept = [c for c in folded if ord(c) not in _ACCENTS]
            made = "".join(c if _in_word(c) else " " for c in kept) or " "
        self[code] = made
        return made


def _in_word(character: str) -> bool:
    return character.isalnum() or unicodedata.category(character)[0] == "M"


_CHARACTERS: Final = _Characters()
for _code in range(128):
    _CHARACTERS[_code]


def plain_text(text: str) -> str:
    """Words parted by spaces, with one space at the end."""
    plain = text.translate(_CHARACTERS) + " "
    if "'" in plain:
        plain = plain.replace("'s ", "   ").replace("'", " ")
    return plain


def words_of(text: str) -> list[str]:
    """The normalised words of a text, plurals as they stand."""
    return plain_text(text).split()


def singular(word: str) -> str:
    """A word without the ending of an English plural; four letters and fewer stay as they are.

    biopsies → biopsy, abscesses → abscess, reflexes → reflex, stenoses → stenosis, metastases →
    metastasis, tumors → tumor; words in -ss, -us and -is stay. Both sides of a match go through
    it, so what it makes need not be a word ("diabete").
    """
    if len(word) < 5 or word[-1] != "s":
        return word
    if word.endswith("ies"):
        return word[:-3] + "y"
    if word.endswith(("sses", "xes")):
        return word[:-2]
    if word.endswith("stases") or (word.endswith("oses") and len(word) > 6):
        return word[:-2] + "is"
    return word if word.endswith(("ss", "us", "is")) else word[:-1]


def plurals_of(word: str) -> list[str]:
    """All words that `singular` takes to this one."""
    forms = [word, word + "s", word + "es", word[:-1] + "ies", word[:-2] + "es"]
    return [form for form in dict.fromkeys(forms) if singular(form) == word]


def unfit(words: Sequence[str], ambiguous: frozenset[str]) -> str | None:
    """Why a term of these words is not matched; None where it is."""
    if not words or not any(c.isalpha() for word in words for c in word):
        return "no letter"
    if len(words) > _MOST_WORDS:
        return "long"
    if len(words) == 1 and len(words[0]) < _SHORTEST:
        return "short"
    return "ambiguous" if len(words) == 1 and words[0] in ambiguous else None


def origin_of(text: str) -> Callable[[int, int], tuple[int, int]] | None:
    """Offsets in the plain text → in the text; None where they are the same."""
    if text.isascii() or all(len(_CHARACTERS[ord(c)]) == 1 for c in set(text)):
        return None
    lengths = np.fromiter((len(_CHARACTERS[ord(c)]) for c in text), np.int64, count=len(text))
    places = np.concatenate(([0], np.cumsum(lengths)))  # (characters + 1,) starts in the plain text

    def origin(start: int, end: int) -> tuple[int, int]:
        # The last character that begins there: those before it are dropped accents.
        first = int(np.searchsorted(places, start, side="right")) - 1
        last = int(np.searchsorted(places, end - 1, side="right"))
        while last < len(text) and places[last] == end and not lengths[last]:
            last += 1  # an accent on the last letter belongs to it
        return first, last

    return origin


_GIVE_UP = 100  # damaged rows before a sound one: this is some other file


@dataclass(frozen=True, eq=False)
class Dictionary:
    """Terms of concepts.

    concepts: ids such as C0011849 or DOID:1234, sorted; a concept's index is its position.
    names: id → preferred name. terms: surface forms as the source writes them, each once.
    bounds: (terms + 1,) int64 into `members`; members: int32 indices of the concepts that a
    term stands for, sorted. xrefs: id → ids elsewhere ("ICD10CM:E11"). counts: what became of
    the source's rows.
    """

    concepts: tuple[str, ...]
    names: Mapping[str, str]
    terms: tuple[str, ...]
    bounds: np.ndarray
    members: np.ndarray
    xrefs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    counts: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        """The number of concepts."""
        return len(self.concepts)

    def of(self, term: int) -> tuple[int, ...]:
        """The concepts of a term, both by index."""
        return tuple(self.members[self.bounds[term] : self.bounds[term + 1]].tolist())

    def index(self) -> dict[str, int]:
        """Each concept's position in the vocabulary."""
        return {concept: at for at, concept in enumerate(self.concepts)}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of concepts and terms: caches name it, and sites compare it before a run."""
        state = hashlib.sha256()
        for names in (self.concepts, self.terms):
            state.update(len(names).to_bytes(8, "little"))
            for name in names:
                data = name.encode("utf-8", "surrogatepass")
                state.update(len(data).to_bytes(4, "little") + data)
        for array in (self.bounds.astype("<i8"), self.members.astype("<i4")):
            state.update(array.tobytes())
        return state.hexdigest()


class Builder:
    """Collects terms; a string that stands for several concepts is held once."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.names: dict[str, str] = {}
        self.terms: dict[str, int | tuple[int, ...]] = {}
        self.xrefs: dict[str, tuple[str, ...]] = {}

    def add(self, concept: str, term: str) -> None:
        number = self.numbers.setdefault(concept, len(self.numbers))
        known = self.terms.setdefault(term, number)
        if isinstance(known, int):
            if known != number:
                self.terms[term] = (known, number)
        elif number not in known:
            self.terms[term] = (*known, number)

    def refer(self, concept: str, xrefs: Iterable[str]) -> None:
        known = self.xrefs.get(concept, ())
        self.xrefs[concept] = tuple(dict.fromkeys((*known, *xrefs)))

    def finish(self, counts: Mapping[str, int]) -> Dictionary:
        concepts = tuple(sorted(self.numbers))
        place = np.empty(len(concepts), dtype=np.int32)  # (concepts,) order of reading → index
        place[[self.numbers[concept] for concept in concepts]] = np.arange(len(concepts))
        terms = tuple(sorted(self.terms))  # the order of rows must not change the fingerprint
        lists = [self.terms[term] for term in terms]
        bounds = np.zeros(len(terms) + 1, dtype=np.int64)  # (terms + 1,)
        np.cumsum([1 if isinstance(n, int) else len(n) for n in lists], out=bounds[1:])
        members = np.empty(bounds[-1], dtype=np.int32)  # (pairs of a term and a concept,)
        at = 0
        for numbers in lists:
            own = (numbers,) if isinstance(numbers, int) else numbers
            for index in sorted(place[list(own)].tolist()):
                members[at] = index
                at += 1
        names = {concept: self.names.get(concept, concept) for concept in concepts}
        return Dictionary(concepts, names, terms, bounds, members, self.xrefs, dict(counts))


def dictionary_of(pairs: Iterable[tuple[str, str]]) -> Dictionary:
    """A dictionary from (id, term) pairs; a concept's first term is its name."""
    builder = Builder()
    for concept, term in pairs:
        builder.add(concept, term)
        builder.names.setdefault(concept, term)
    return builder.finish({})


_TAG = re.compile(
    r"\s*\((?:disorder|finding|procedure|situation|event|observable entity|body structure|"
    r"morphologic abnormality|morphology|qualifier value|substance|product|medicinal product|"
    r"organism|regime/therapy|physical object|context-dependent category|cell|function)\)\s*$"
)
_AFFIX = re.compile(r"^\[[A-Z]{1,3}\]\s*|[\s,]+NOS$|[\s,]*\(NOS\)$|\s*\[NOS\]$", re.IGNORECASE)


def cleaned(term: str) -> str:
    """A term as notes would write it.

    Without SNOMED's tags "(disorder)", "(finding)" …, without "NOS" at its end and "[X]" or
    "[D]" at its start; white space made single.
    """
    term = " ".join(term.split())
    while True:
        shorter = _AFFIX.sub("", _TAG.sub("", term)).strip(" ,")
        if shorter == term or not shorter:
            return term
        term = shorter


class Counts:
    """Counts rows, and stops at a file that is something else."""

    def __init__(self, path: Path, expected: str) -> None:
        self.counts = {"rows": 0, "damaged": 0}
        self._path, self._expected, self._first = path, expected, 0

    def add(self, name: str, count: int = 1) -> None:
        if count:
            self.counts[name] = self.counts.get(name, 0) + count

    def row(self, number: int, sound: bool) -> bool:
        """Counts a row; gives back whether it is sound."""
        self.add("rows")
        if not sound:
            self.add("damaged")
            self._first = self._first or number
            if self.counts["damaged"] == self.counts["rows"] == _GIVE_UP:
                self._refuse()
        return sound

    def finish(self) -> None:
        """Raises DataError where most rows are damaged, or there is none."""
        if not self.counts["rows"]:
            raise DataError(f"{self._path}: this is no {self._expected}; there is none")
        if 2 * self.counts["damaged"] > self.counts["rows"]:
            self._refuse()

    def _refuse(self) -> None:
        rows, damaged = self.counts["rows"], self.counts["damaged"]
        raise DataError.at(
            self._path,
            self._first,
            f"{damaged} of {rows} rows are no {self._expected}: is it the right file?",
        )


def lines_of(path: Path) -> Iterator[tuple[int, str | None]]:
    """Visible lines with their numbers; None for one that is no UTF-8."""
    with open_bytes(path) as file:
        try:
            for number, data in enumerate(file, 1):
                if number == 1:
                    data = data.removeprefix(b"\xef\xbb\xbf")
                try:
                    line = data.decode("utf-8").rstrip("\r\n")
                except UnicodeDecodeError:
                    yield number, None
                    continue
                if line and not line.isspace():
                    yield number, line
        except BROKEN as error:
            raise broken(path, error) from None


# Semantic types of cTAKES' fast dictionary, by its groups. Anatomy and drugs stand in the source
# of cTAKES' dictionary creator (TuiTableModel.java); the other groups are from cTAKES'
# documentation of versions 3.2 to 4.0, from memory.
CTAKES_TYPES: Final[Mapping[str, tuple[str, ...]]] = {
    "anatomy": tuple("T021 T022 T023 T024 T025 T026 T029 T030".split()),
    "disorder": tuple("T019 T020 T037 T046 T047 T048 T049 T050 T190 T191".split()),
    "finding": tuple("T033 T034 T040 T041 T042 T043 T044 T045 T046 T056 T057 T184".split()),
    "procedure": tuple("T059 T060 T061".split()),
    "drug": tuple(
        "T109 T110 T114 T115 T116 T118 T119 T121 T122 T123 T124 T125 T126 T127 T129 T130 T131 "
        "T195 T196 T197 T200 T203".split()
    ),
}
ALL_TYPES: Final = frozenset(t for group in CTAKES_TYPES.values() for t in group)
SOURCES: Final = ("SNOMEDCT_US", "RXNORM")
# Kinds of terms (TTY) that cTAKES' dictionary creator leaves out (MrconsoParser.java): full names
# with a tag, clinical drugs with doses, and names that SNOMED marks as obsolete.
LEFT_OUT_KINDS: Final = frozenset(
    "FN CCS CA2 CA3 PSN TMSY SBD SBDC SBDF SBDG SCD SCDC SCDF SCDG BPCK GPCK XM OF MTH_OF OAP "
    "MTH_OAP OAF MTH_OAF IS MTH_IS OAS MTH_OAS OP MTH_OP".split()
)
SCOPES: Final = ("EXACT", "RELATED", "NARROW", "BROAD")
__all__ = ["Dictionary", "dictionary_of", "read_dictionary", "read_obo", "read_table", "read_umls"]

FORMATS: Final = ("umls", "obo", "table")

_MRCONSO_FIELDS: Final = 18
_CUI = re.compile(r"C\d{7}")
_TUI = re.compile(r"T\d{3}")


def read_dictionary(path: str | Path, format: str | None = None, **options: Any) -> Dictionary:
    """A dictionary from a file; its name tells the format (.RRF, .obo, else a table).

    options: what the format's reader takes. Raises ConfigError for an unknown format or option,
    DataError for a file that is none or holds no term.
    """
    path = Path(path)
    if format is None:
        name = path.name.lower().removesuffix(".gz")
        format = "umls" if name.endswith(".rrf") else "obo" if name.endswith(".obo") else "table"
    readers: dict[str, Any] = {"umls": read_umls, "obo": read_obo, "table": read_table}
    if format not in readers:
        raise ConfigError(f"dictionary format {format!r} is unknown: {nearest(format, FORMATS)}")
    known = readers[format].__kwdefaults__ or {}
    for option in options:
        if option not in known:
            hint = nearest(option, known)
            raise ConfigError(f"dictionary option {option!r} is none of format {format}: {hint}")
    made: Dictionary = readers[format](path, **options)
    return made


def read_umls(
    path: str | Path,
    *,
    language: str = "ENG",
    sources: Collection[str] = SOURCES,
    types: Collection[str] | None = None,
    left_out_kinds: Collection[str] = LEFT_OUT_KINDS,
) -> Dictionary:
    """The terms of MRCONSO.RRF, filtered as for cTAKES' fast dictionary.

    sources: vocabularies (SAB) whose terms are taken. types: semantic types (TUI) that are
    taken; by default those of `CTAKES_TYPES` where MRSTY.RRF lies beside, else all; an empty
    list takes all. left_out_kinds: term types (TTY) that are not taken; nor are RxNorm's
    synonyms (SY). Rows marked as suppressed (SUPPRESS of E, O or Y) are dropped. (cTAKES also
    takes the terms of other vocabularies for a concept that one of the sources has.)

    counts: rows, damaged, filtered, other_type. Raises DataError for a file that is no
    MRCONSO, or of which nothing is left, with the sources that it has.
    """
    path = Path(path)
    wanted = _concepts_of_types(path, types)
    builder, rank = Builder(), dict[str, int]()
    counts = Counts(path, f"MRCONSO: expected {_MRCONSO_FIELDS} fields separated by |")
    seen: dict[str, int] = {}
    for number, line in lines_of(path):
        row = line.rstrip("\r").split("|") if line is not None else []
        # Every field ends in |, the last one too.
        sound = len(row) == _MRCONSO_FIELDS + 1 and not row[-1] and _CUI.fullmatch(row[0])
        if not counts.row(number, bool(sound and row[14].strip())):
            continue
        concept, source, kind = row[0], row[11], row[12]
        seen[source] = seen.get(source, 0) + 1
        other = row[1] != language or source not in sources or row[16] in ("E", "O", "Y")
        if other or kind in left_out_kinds or (source == "RXNORM" and kind == "SY"):
            counts.add("filtered")
        elif wanted is not None and concept not in wanted:
            counts.add("other_type")
        else:
            builder.add(concept, cleaned(row[14]))
            preferred = (row[2] != "P") * 4 + (row[4] != "PF") * 2 + (row[6] != "Y")
            if preferred < rank.get(concept, 8):
                rank[concept], builder.names[concept] = preferred, row[14].strip()
    counts.finish()
    if not builder.terms:
        present = ", ".join(sorted(seen, key=lambda s: -seen[s])[:10])
        raise DataError(
            f"{path}: no row is left for language {language} and sources {', '.join(sources)}: "
            f"the file has the sources {present or 'none'}"
        )
    return builder.finish(counts.counts)


def _concepts_of_types(path: Path, types: Collection[str] | None) -> set[str] | None:
    """The concepts of the semantic types in MRSTY.RRF beside MRCONSO; None takes all."""
    suffix = ".gz" if path.name.lower().endswith(".gz") else ""
    beside = [path.with_name(f"MRSTY.RRF{end}") for end in dict.fromkeys((suffix, "", ".gz"))]
    types_file = next((file for file in beside if file.is_file()), None)
    if types is not None and not types:
        return None
    for name in types or ():
        if not _TUI.fullmatch(name):
            raise ConfigError(f"semantic type {name!r}: give its number, such as T047")
    if types_file is None:
        if types is None:
            return None
        raise DataError(f"{beside[0]}: no such file: semantic types need it beside MRCONSO.RRF")
    chosen = ALL_TYPES if types is None else frozenset(types)
    found = set[str]()
    counts = Counts(types_file, "MRSTY: expected 6 fields separated by |, CUI and TUI first")
    for number, line in lines_of(types_file):
        row = line.split("|") if line is not None else []
        sound = len(row) >= 6 and _CUI.fullmatch(row[0]) and _TUI.fullmatch(row[1])
        if counts.row(number, bool(sound)) and row[1] in chosen:
            found.add(row[0])
    counts.finish()
    return found


_SYNONYM = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(EXACT|RELATED|NARROW|BROAD)?')
_ESCAPE = re.compile(r"\\(.)")


def read_obo(
    path: str | Path,
    *,
    scopes: Collection[str] = ("EXACT",),
    ids: str = "own",
    keep: Sequence[str] = ("UMLS_CUI", "ICD10CM"),
) -> Dictionary:
    """The terms of an ontology in OBO format: names and synonyms; obsolete ones are dropped.

    scopes: of synonyms, among EXACT, RELATED, NARROW and BROAD. ids: "own" for the ontology's
    ids, or the prefix of a cross reference ("UMLS_CUI"): a term then stands for all ids that
    are given there, and one without any is left out (`without_id`). keep: prefixes of the
    cross references that `xrefs` holds.

    counts: rows (stanzas of terms), damaged (no id or no name, a line that is no UTF-8, a
    synonym that is none), obsolete, without_id. Raises DataError for a file without a sound term.
    """
    path = Path(path)
    for scope in scopes:
        if scope not in SCOPES:
            raise ConfigError(f"synonym scope {scope!r} is unknown: {nearest(scope, SCOPES)}")
    builder = Builder()
    counts = Counts(path, "OBO: expected stanzas [Term] with id and name")
    for number, stanza in _stanzas(path):
        own, name = stanza.get("id", [""])[0].strip(), stanza.get("name", [""])[0].strip()
        broken_lines = len(stanza.get("", ()))
        if stanza.get("is_obsolete", [""])[0].strip() == "true":
            counts.add("rows")
            counts.add("obsolete")
            continue
        synonyms = [_SYNONYM.match(value.lstrip()) for value in stanza.get("synonym", ())]
        broken_lines += sum(found is None for found in synonyms)
        if not counts.row(number, bool(own and name)):
            continue
        counts.add("damaged", broken_lines)
        terms = [name, *(f[1] for f in synonyms if f is not None and (f[2] or "RELATED") in scopes)]
        xrefs = [value.split()[0] for value in stanza.get("xref", ()) if value.strip()]
        other = [x.partition(":")[2] for x in xrefs if x.startswith(f"{ids}:")]
        concepts = [own] if ids == "own" else [concept for concept in other if concept]
        counts.add("without_id", not concepts)
        for concept in concepts:
            for term in terms:
                if visible := cleaned(_ESCAPE.sub(r"\1", term)):
                    builder.add(concept, visible)
            builder.names.setdefault(concept, _ESCAPE.sub(r"\1", name))
            kept = [x for x in xrefs if x.partition(":")[0] in keep]
            builder.refer(concept, kept if ids == "own" else [own, *kept])
    counts.finish()
    if not builder.terms:
        raise DataError(f"{path}: no term has a cross reference {ids}: give ids = own")
    return builder.finish(counts.counts)


def _stanzas(path: Path) -> Iterator[tuple[int, dict[str, list[str]]]]:
    """The [Term] stanzas, as line number and values by tag; lines that cannot be read under ""."""
    kind, begin = "", 0
    stanza: dict[str, list[str]] = {}
    for number, line in lines_of(path):
        text = (line or "").strip()
        if line is not None and text.startswith("["):
            if kind == "[Term]":
                yield begin, stanza
            kind, begin, stanza = text, number, {}
        elif line is None:
            stanza.setdefault("", []).append("")
        else:
            tag, colon, value = text.partition(":")
            if colon:
                stanza.setdefault(tag, []).append(value)
    if kind == "[Term]":
        yield begin, stanza


_ID_NAMES: Final = frozenset("id cui concept concept_id code identifier".split())
_TERM_NAMES: Final = frozenset("term str name synonym label text string".split())


def read_table(path: str | Path) -> Dictionary:
    """The terms of a table with two columns, id and term; tabs or commas separate them.

    A first row that names both columns (id, cui, concept, code; term, str, name, synonym) gives
    their places, and others may stand beside them. An id's first term is its name.

    counts: rows, damaged (another number of columns, an empty id or term). Raises DataError
    where no row is sound.
    """
    path = Path(path)
    builder = Builder()
    counts = Counts(path, "a dictionary table: expected two columns, id and term")
    places, width, delimiter = (0, 1), 2, ""
    for number, line in lines_of(path):
        if line is not None and not delimiter:
            delimiter = "\t" if "\t" in line else ","
            header = [cell.strip().lower() for cell in _cells(line, delimiter) or []]
            concept = next((i for i, cell in enumerate(header) if cell in _ID_NAMES), None)
            term = next((i for i, cell in enumerate(header) if cell in _TERM_NAMES), None)
            if concept is not None and term is not None:
                places, width = (concept, term), len(header)
                continue
        row = _cells(line, delimiter) if line is not None else None
        cells = [row[i].strip() for i in places] if row is not None and len(row) == width else []
        if counts.row(number, len(cells) == 2 and all(cells) and bool(cleaned(cells[-1]))):
            builder.add(cells[0], cleaned(cells[1]))
            builder.names.setdefault(cells[0], cells[1])
    counts.finish()
    return builder.finish(counts.counts)


def _cells(line: str, delimiter: str) -> list[str] | None:
    """A row's cells; None for a quote that is never closed. A row is one line."""
    if delimiter == "\t":
        return line.split("\t")
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:
        return None
