"""What a dictionary of concepts is, and what its readers share: terms, counts, lines."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from fednotes.core.errors import DataError
from fednotes.data.notes.records import BROKEN, broken, open_bytes

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
