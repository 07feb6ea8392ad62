"""Dictionaries of medical concepts: terms → concept ids, from files that users have.

    umls     MRCONSO.RRF of the UMLS, with MRSTY.RRF beside it for the semantic types
    obo      an ontology such as the Disease Ontology
    table    two columns, an id and a term, separated by commas or tabs

A dictionary's concepts are public and the same at every site, whatever occurs in its
notes: their sorted ids are the vocabulary of all that is learnt from them. Files are
read line by line; those that end in .gz as they are.

Terms and texts are cut into the same words (`words_of`): folded, without accents,
plurals as singulars. `plain_text` keeps a text's length wherever each character stands
for one; `origin_of` leads back.
"""

from __future__ import annotations

import csv
import hashlib
import re
import tomllib
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, Final

import numpy as np

from fednotes.apps.phenotyping.cohort import offsets_of
from fednotes.apps.phenotyping.tables import Damaged, TableReport, cells_of, lines, rows
from fednotes.core.errors import ConfigError, DataError, nearest

_LISTS = tomllib.loads(
    files("fednotes.apps.phenotyping").joinpath("dictionary.toml").read_text("utf-8")
)
AMBIGUOUS: Final[frozenset[str]] = frozenset(_LISTS["ambiguous"])
LEFT_OUT_KINDS: Final[frozenset[str]] = frozenset(_LISTS["left_out_kinds"])
TYPES: Final[frozenset[str]] = frozenset(
    one for group in _LISTS["types"].values() for one in group
)
SOURCES: Final = ("SNOMEDCT_US", "RXNORM")
SCOPES: Final = ("EXACT", "RELATED", "NARROW", "BROAD")

_MRCONSO_FIELDS: Final = 18
_CUI = re.compile(r"C\d{7}")
_TUI = re.compile(r"T\d{3}")
_Pairs = Iterator[tuple[str, str]]  # id, term


@dataclass(frozen=True, eq=False)
class Dictionary:
    """Terms of concepts.

    concepts: ids such as C0011849 or DOID:1234, sorted; a concept's index is its
        position.
    terms: surface forms as the source writes them, each once, sorted. bounds: (terms +
    1,) int64 into `members`; members: int32 indices of the concepts that a term stands
    for, sorted.
    """

    concepts: tuple[str, ...]
    terms: tuple[str, ...]
    bounds: np.ndarray
    members: np.ndarray

    def __len__(self) -> int:
        """The number of concepts."""
        return len(self.concepts)

    def of(self, term: int) -> tuple[int, ...]:
        """The concepts of a term, both by index."""
        return tuple(self.members[self.bounds[term] : self.bounds[term + 1]].tolist())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of concepts and terms: caches name it, and sites compare it before a
        run."""
        state = hashlib.sha256()
        for names in (self.concepts, self.terms):
            state.update(len(names).to_bytes(8, "little"))
            for name in names:
                data = name.encode("utf-8", "surrogatepass")
                state.update(len(data).to_bytes(4, "little") + data)
        for array in (self.bounds.astype("<i8"), self.members.astype("<i4")):
            state.update(array.tobytes())
        return state.hexdigest()


def dictionary_of(pairs: Iterable[tuple[str, str]]) -> Dictionary:
    """A dictionary from (id, term) pairs, whatever their order."""
    numbers: dict[str, int] = {}
    found: dict[str, int | tuple[int, ...]] = {}  # most terms stand for one concept
    for concept, term in pairs:
        number = numbers.setdefault(concept, len(numbers))
        known = found.setdefault(term, number)
        if isinstance(known, int):
            known = (known,)
        if number not in known:
            found[term] = (*known, number)
    concepts, terms = tuple(sorted(numbers)), tuple(sorted(found))
    # (concepts,) order of reading → index
    place = np.empty(len(concepts), dtype=np.int32)
    place[[numbers[concept] for concept in concepts]] = np.arange(len(concepts))
    lists = [(own,) if isinstance(own := found[term], int) else own for term in terms]
    members = np.fromiter(
        (index for own in lists for index in sorted(place[list(own)].tolist())),
        np.int32,
    )
    return Dictionary(concepts, terms, offsets_of([len(own) for own in lists]), members)


def read_dictionary(path: str | Path, format: str = "", **options: Any) -> Dictionary:
    """A dictionary from a file; its name tells the format (.RRF, .obo, else a table).

    options: what the format's reader takes. Raises ConfigError for an unknown option,
    DataError for a file that is none or holds no term.
    """
    path = Path(path)
    if not format:
        name = path.name.lower().removesuffix(".gz")
        format = (
            "umls"
            if name.endswith(".rrf")
            else "obo"
            if name.endswith(".obo")
            else "table"
        )
    readers: dict[str, Any] = {"umls": _umls, "obo": _obo, "table": _table}
    known = readers[format].__kwdefaults__ or {}
    for option in options:
        if option not in known:
            hint = nearest(option, known)
            raise ConfigError(
                f"dictionary option {option!r} is none of format {format}: {hint}"
            )
    return dictionary_of(readers[format](path, **options))


def _sound_rows(
    path: Path,
    what: str,
    given: Iterable[tuple[int, Any]],
    sound: Callable[[Any], Any],
    whole: Callable[[Any], Any] = bool,
) -> Iterator[Any]:
    """The rows that are sound. Raises DataError where most are damaged, or there is
    none.

    given: line numbers and rows; None for a line that is no UTF-8. what: a row should
        be.
    whole: a sound row for which it is false is damaged, and yielded all the same.
    """
    report = TableReport(path)
    for number, row in given:
        report.rows += 1
        usable = row is not None and sound(row)
        if not usable or not whole(row):
            report.damage(Damaged(number, f"this is no {what}"))
        if usable:
            yield row
    if not report.rows:
        raise DataError(f"{path}: there is no {what} in it: is it the right file?")
    report.require_sound(report.rows)


def _visible(path: Path) -> Iterator[tuple[int, str | None]]:
    return (
        (number, line) for number, line in lines(path) if line is None or line.strip()
    )


def _split(path: Path) -> Iterator[tuple[int, list[str] | None]]:
    return (
        (n, None if line is None else line.rstrip("\r").split("|"))
        for n, line in _visible(path)
    )


# ---- formats -------------------------------------------------------------------------


def _umls(
    path: Path,
    *,
    language: str = "ENG",
    sources: Collection[str] = SOURCES,
    types: Collection[str] | None = None,
    left_out_kinds: Collection[str] = LEFT_OUT_KINDS,
) -> _Pairs:
    """The terms of MRCONSO.RRF, filtered as for cTAKES' fast dictionary.

    sources: vocabularies (SAB) whose terms are taken. types: semantic types (TUI) that
    are taken; by default those of cTAKES where MRSTY.RRF lies beside, else all; an
    empty list takes all. left_out_kinds: term types (TTY) that are not taken; nor are
    RxNorm's synonyms (SY). Rows marked as suppressed (SUPPRESS of E, O or Y) are
    dropped. (cTAKES also takes the terms of other vocabularies for a concept that one
    of the sources has.)

    Raises DataError for a file that is no MRCONSO, or of which nothing is left, with
    the sources that it has.
    """

    def sound(row: Sequence[str]) -> bool:  # every field ends in |, the last one too
        whole = len(row) == _MRCONSO_FIELDS + 1 and not row[-1]
        return whole and bool(_CUI.fullmatch(row[0]) and row[14].strip())

    wanted = _concepts_of_types(path, types)
    seen, nothing = Counter[str](), True
    what = f"row of MRCONSO ({_MRCONSO_FIELDS} fields separated by |)"
    for row in _sound_rows(path, what, _split(path), sound):
        concept, source, kind = row[0], row[11], row[12]
        seen[source] += 1
        other = (
            row[1] != language or source not in sources or row[16] in ("E", "O", "Y")
        )
        other = other or kind in left_out_kinds or (source == "RXNORM" and kind == "SY")
        if not other and (wanted is None or concept in wanted):
            nothing = False
            yield concept, cleaned(row[14])
    if nothing:
        present = ", ".join(source for source, _ in seen.most_common(10))
        raise DataError(
            f"{path}: no row is left for language {language} and sources {', '.join(sources)}: "
            f"the file has the sources {present or 'none'}"
        )


def _concepts_of_types(path: Path, types: Collection[str] | None) -> set[str] | None:
    """The concepts of the semantic types in MRSTY.RRF beside MRCONSO; None takes all."""
    for name in types or ():
        if not _TUI.fullmatch(name):
            raise ConfigError(f"semantic type {name!r}: give its number, such as T047")
    beside = [path.with_name(f"MRSTY.RRF{end}") for end in ("", ".gz")]
    if path.name.lower().endswith(".gz"):
        beside.reverse()
    given = next(filter(Path.is_file, beside), None)
    if (types is not None and not types) or (types is None and given is None):
        return None
    if given is None:
        raise DataError(
            f"{beside[0]}: no such file: semantic types need it beside MRCONSO.RRF"
        )

    def sound(row: Sequence[str]) -> bool:
        return len(row) >= 6 and bool(_CUI.fullmatch(row[0]) and _TUI.fullmatch(row[1]))

    chosen = TYPES if types is None else frozenset(types)
    what = "row of MRSTY (6 fields separated by |, CUI and TUI first)"
    return {
        r[0] for r in _sound_rows(given, what, _split(given), sound) if r[1] in chosen
    }


_SYNONYM = re.compile(r'"((?:[^"\\]|\\.)*)"\s*(EXACT|RELATED|NARROW|BROAD)?')
_ESCAPE = re.compile(r"\\(.)")
_Stanza = dict[str, list[str]]  # tag → values


def _obo(
    path: Path, *, scopes: Collection[str] = ("EXACT",), ids: str = "own"
) -> _Pairs:
    """The terms of an ontology in OBO format: names and synonyms; obsolete ones are
    dropped.

    scopes: of synonyms, among EXACT, RELATED, NARROW and BROAD. ids: "own" for the
    ontology's ids, or the prefix of a cross reference ("UMLS_CUI"): a term then stands
    for all ids that are given there, and one without any is left out. A synonym that is
    none, and a line that is no UTF-8, is left out. Raises DataError where most terms
    have one, or no term is sound.
    """
    for scope in scopes:
        if scope not in SCOPES:
            raise ConfigError(
                f"synonym scope {scope!r} is unknown: {nearest(scope, SCOPES)}"
            )

    def sound(stanza: _Stanza) -> bool:
        return all(stanza.get(tag, [""])[0].strip() for tag in ("id", "name"))

    def obsolete(stanza: _Stanza) -> bool:
        return stanza.get("is_obsolete", [""])[0].strip() == "true"

    def whole(stanza: _Stanza) -> bool:
        return obsolete(stanza) or ("" not in stanza and all(_synonyms(stanza)))

    nothing, what = True, "stanza [Term] of OBO, with id and name"
    for stanza in _sound_rows(path, what, _stanzas(path), sound, whole):
        if obsolete(stanza):
            continue
        synonyms = _synonyms(stanza)
        terms = [stanza["name"][0].strip()]
        terms += [
            f[1] for f in synonyms if f is not None and (f[2] or "RELATED") in scopes
        ]
        xrefs = [value.split()[0] for value in stanza.get("xref", ()) if value.strip()]
        other = [x.partition(":")[2] for x in xrefs if x.startswith(f"{ids}:")]
        concepts = [stanza["id"][0].strip()] if ids == "own" else filter(None, other)
        for concept in concepts:
            for term in terms:
                if visible := cleaned(_ESCAPE.sub(r"\1", term)):
                    nothing = False
                    yield concept, visible
    if nothing:
        raise DataError(f"{path}: no term has a cross reference {ids}: give ids = own")


def _synonyms(stanza: _Stanza) -> list[re.Match[str] | None]:
    return [_SYNONYM.match(value.lstrip()) for value in stanza.get("synonym", ())]


def _stanzas(path: Path) -> Iterator[tuple[int, _Stanza]]:
    """The [Term] stanzas with their line numbers; "" is a tag where a line cannot be
    read."""
    kind, begin = "", 0
    stanza: _Stanza = {}
    for number, line in chain(_visible(path), [(0, "[]")]):
        text = (line or "").strip()
        if text.startswith("["):
            if kind == "[Term]":
                yield begin, stanza
            kind, begin, stanza = text, number, {}
        tag, colon, value = text.partition(":")
        if colon or line is None:
            stanza.setdefault(tag, []).append(value)


_ID_NAMES: Final = frozenset("id cui concept concept_id code identifier".split())
_TERM_NAMES: Final = frozenset("term str name synonym label text string".split())


def _table(path: Path) -> _Pairs:
    """The terms of a table with two columns, id and term; tabs or commas separate them.

    A first row that names both columns (id, cui, concept, code; term, str, name,
    synonym) gives their places, and others may stand beside them. Raises DataError
    where no row is sound.
    """
    first = next((line for _, line in _visible(path) if line is not None), "")
    delimiter = "\t" if "\t" in first else ","
    header: list[str] = []
    with suppress(csv.Error, StopIteration):
        header = [cell.strip().lower() for cell in cells_of(first, delimiter)]
    names = (_ID_NAMES, _TERM_NAMES)
    places = [
        next((at for at, name in enumerate(header) if name in of), -1) for of in names
    ]
    named = min(places) >= 0
    id, term = places if named else (0, 1)
    given = rows(
        _visible(path), len(header) if named else 2, delimiter, delimiter != "\t"
    )
    pairs = (
        (row.line, None)
        if isinstance(row, Damaged)
        else (row[0], (row[1][id], row[1][term]))
        for row in given
    )
    if named:
        next(pairs)
    what = "row of a dictionary table, with two columns, id and term"
    for concept, text in _sound_rows(
        path, what, pairs, lambda p: p[0].strip() and cleaned(p[1])
    ):
        yield concept.strip(), cleaned(text)


_TAG = re.compile(
    r"\s*\((?:disorder|finding|procedure|situation|event|observable entity|body structure|"
    r"morphologic abnormality|morphology|qualifier value|substance|product|medicinal product|"
    r"organism|regime/therapy|physical object|context-dependent category|cell|function)\)\s*$"
)
_AFFIX = re.compile(
    r"^\[[A-Z]{1,3}\]\s*|[\s,]+NOS$|[\s,]*\(NOS\)$|\s*\[NOS\]$", re.IGNORECASE
)


def cleaned(term: str) -> str:
    """A term as notes would write it.

    Without SNOMED's tags "(disorder)", "(finding)" …, without "NOS" at its end and
    "[X]" or "[D]" at its start; white space made single.
    """
    term = " ".join(term.split())
    while True:
        shorter = _AFFIX.sub("", _TAG.sub("", term)).strip(" ,")
        if shorter == term or not shorter:
            return term
        term = shorter


# ---- words ---------------------------------------------------------------------------

_SHORTEST: Final = 3
_MOST_WORDS: Final = 20
_ACCENTS: Final = range(0x300, 0x370)
_APOSTROPHES: Final = "'’ʼ"


class _Characters(dict[int, str]):
    """Code point → what stands for it: letters and digits folded, an apostrophe, or a
    space."""

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
    """A word without the ending of an English plural; four letters and fewer stay as
    they are.

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


def unfit(words: Sequence[str]) -> str | None:
    """Why a term of these words is not matched; None where it is."""
    if not words or not any(c.isalpha() for word in words for c in word):
        return "no letter"
    if len(words) > _MOST_WORDS:
        return "long"
    if len(words) == 1 and len(words[0]) < _SHORTEST:
        return "short"
    return "ambiguous" if len(words) == 1 and words[0] in AMBIGUOUS else None


def origin_of(text: str) -> Callable[[int, int], tuple[int, int]] | None:
    """Offsets in the plain text → in the text; None where they are the same."""
    if text.isascii() or all(len(_CHARACTERS[ord(c)]) == 1 for c in set(text)):
        return None
    lengths = np.fromiter(
        (len(_CHARACTERS[ord(c)]) for c in text), np.int64, count=len(text)
    )
    places = offsets_of(lengths)  # (characters + 1,) starts in the plain text

    def origin(start: int, end: int) -> tuple[int, int]:
        # The last character that begins there: those before it are dropped accents.
        first = int(np.searchsorted(places, start, side="right")) - 1
        last = int(np.searchsorted(places, end - 1, side="right"))
        while last < len(text) and places[last] == end and not lengths[last]:
            last += 1  # an accent on the last letter belongs to it
        return first, last

    return origin
