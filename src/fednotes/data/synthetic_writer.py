"""Writes synthetic notes: phrases filled with names, and the mentions they hold."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from fednotes.core.seeds import rng_of
from fednotes.core.types import Document, Span
from fednotes.data import synthetic_lexicon as words
from fednotes.data.synthetic_lexicon import CLAUSES, Lexicon

TYPES = ("ADE", "Disease", "Dosage", "Drug", "Symptom", "Test")
GENRES = ("discharge", "reports", "posts")
GENRE_TYPES: dict[str, tuple[str, ...]] = {
    "discharge": ("Disease", "Dosage", "Drug", "Test"),
    "reports": ("ADE", "Disease", "Drug"),
    "posts": ("ADE", "Drug", "Symptom"),
}
_TOKEN = re.compile(r"\[|\]|\||\{\w+\}|[^\[\]|{]+")
T = TypeVar("T")
# A compiled template: text as it is, ("choice", options), ("slot", name), ("mention", type).
Part = str | tuple[str, object]
Template = tuple[Part, ...]


class Draws:
    """Random numbers by the thousand: one by one, NumPy's generator is the bottleneck."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._values: list[float] = []

    def uniform(self) -> float:
        if not self._values:
            self._values = self._rng.random(8192).tolist()
        return self._values.pop()

    def below(self, count: int) -> int:
        return int(self.uniform() * count)


class Writer:
    """Writes the notes of one genre at one site, with the site's favourite names."""

    def __init__(self, genre: str, seed: int, rng: np.random.Generator, lexicon: Lexicon) -> None:
        self.genre = genre
        self._draws = Draws(rng)
        self._meta = MappingProxyType({"genre": genre})
        self._typos = 0.06 if genre == "posts" else 0.0
        self._clauses = self._tail(_compiled(), _clause_weights(genre, seed), rng, 0.5)
        pools = {
            "drug": self._names(lexicon.drug, rng),
            "finding": self._names(lexicon.finding, rng),
            "disease": self._names(lexicon.disease, rng),
            "test": self._names(lexicon.test, rng),
        }
        self._mentions: dict[str, Callable[[], str]] = {
            "Drug": pools["drug"],
            "Test": pools["test"],
            "Symptom": pools["finding"],
            "ADE": pools["finding"],
            "Disease": lambda: pools["disease" if self._draws.uniform() < 0.4 else "finding"](),
            "Dosage": lambda: self._number(words.DOSAGES),
        }
        self._slots: dict[str, Callable[[], str]] = {
            "dur": self._choice(words.DURATIONS),
            "month": self._choice(words.MONTHS),
            "person": self._choice(words.PEOPLE),
            "place": self._choice(words.PLACES),
            "org": self._choice(lexicon.org),
            "device": self._choice(lexicon.device),
            "brand": self._choice(lexicon.brand),
            "poss": self._choice(words.POSSESSIVES[genre]),
            "obj": self._choice(words.OBJECTS[genre]),
            "num": lambda: str(1 + self._draws.below(99)),
            "value": lambda: self._number(words.VALUES),
        }
        self._leads = [_compile(lead) for lead in words.LEADS[genre]]
        self._subjects = [_compile(subject) for subject in words.SUBJECTS[genre]]

    def note(
        self, name: str, patient: str, length: int, part: str, used: dict[str, str]
    ) -> Document:
        """A note of `length` sentences, none of them in another part of any site."""
        spans: list[Span] = []
        bounds: list[tuple[int, int]] = []
        texts: list[str] = []
        at = 0
        for _ in range(length):
            text, found = self._sentence()
            while used.setdefault(text.casefold(), part) != part:
                text, found = self._sentence()
            spans += [Span(a + at, b + at, label) for a, b, label in found]
            bounds.append((at, at + len(text)))
            texts.append(text)
            at += len(text) + 1
        return Document(
            name,
            ("\n" if self.genre == "discharge" else " ").join(texts),
            tuple(spans),
            patient,
            meta=self._meta,
            sentences=tuple(bounds),
        )

    def _sentence(self) -> tuple[str, list[tuple[int, int, str]]]:
        draws = self._draws
        pieces: list[str] = []
        found: list[tuple[int, int, str]] = []
        at = self._write(self._leads[draws.below(len(self._leads))], pieces, found, 0)
        at = self._write(self._clauses(), pieces, found, at)
        if draws.uniform() < 0.3:
            join = words.JOINS[self.genre][draws.below(len(words.JOINS[self.genre]))]
            pieces.append(join)
            at = self._write(self._clauses(), pieces, found, at + len(join))
        ends = words.ENDS[self.genre]
        pieces.append(ends[draws.below(len(ends))])
        text = "".join(pieces)
        if self.genre == "posts" and draws.uniform() < 0.5:
            return text.lower(), found
        return text[0].upper() + text[1:], found

    def _write(
        self, template: Template, pieces: list[str], found: list[tuple[int, int, str]], at: int
    ) -> int:
        """Append the filled template; returns the offset behind it."""
        for part in template:
            if isinstance(part, str):
                text = part
            else:
                kind, value = part
                if kind == "choice":
                    options: Sequence[Template] = value  # type: ignore[assignment]
                    chosen = options[self._draws.below(len(options))]
                    at = self._write(chosen, pieces, found, at)
                    continue
                if value == "subj":
                    chosen = self._subjects[self._draws.below(len(self._subjects))]
                    at = self._write(chosen, pieces, found, at)
                    continue
                label = str(value)
                text = (self._mentions if kind == "mention" else self._slots)[label]()
            if self._typos and self._draws.uniform() < self._typos:
                text = self._mistyped(text)
            if not isinstance(part, str) and part[0] == "mention":
                found.append((at, at + len(text), str(part[1])))
            pieces.append(text)
            at += len(text)
        return at

    def _mistyped(self, text: str) -> str:
        """Two letters swapped, or one left out or doubled."""
        i = self._draws.below(max(1, len(text) - 1))
        if not text[i : i + 2].isalpha() or len(text) < 5:
            return text
        a, b = text[i], text[i + 1]
        return text[:i] + (b + a, b, a + a + b)[self._draws.below(3)] + text[i + 2 :]

    def _number(self, patterns: Sequence[str]) -> str:
        pattern = patterns[self._draws.below(len(patterns))]
        steps = ("5", "10", "20", "25", "40", "50", "75", "100", "250", "1.5", "2.5", "0.4")
        return pattern.replace("{n}", steps[self._draws.below(len(steps))])

    def _choice(self, options: Sequence[str]) -> Callable[[], str]:
        count = len(options)
        return lambda: options[self._draws.below(count)]

    def _names(self, names: Sequence[str], rng: np.random.Generator) -> Callable[[], str]:
        return self._tail(names, 1 / (np.arange(len(names)) + 8.0) ** 0.9, rng, 1.0)

    def _tail(
        self, items: Sequence[T], weights: np.ndarray, rng: np.random.Generator, spread: float
    ) -> Callable[[], T]:
        """Draws from long-tailed weights which the site shifts by its own taste."""
        own = weights * np.exp(rng.normal(0.0, spread, len(items)))
        edges = (np.cumsum(own) / own.sum()).tolist()
        last = len(items) - 1
        return lambda: items[min(bisect_right(edges, self._draws.uniform()), last)]


def _clause_weights(genre: str, seed: int) -> np.ndarray:
    """(clauses,) how often a genre uses each: a long tail, its own types first."""
    ranks = rng_of(seed, "clauses", genre).permutation(len(CLAUSES))
    types = [set(re.findall(r"\{([A-Z]\w+)\}", clause)) for clause in CLAUSES]
    theme = [2.0 if held & set(GENRE_TYPES[genre]) - {"Drug"} else 1.0 for held in types]
    weights: np.ndarray = np.array(theme) / (ranks + 10.0) ** 0.7
    return weights


@lru_cache(maxsize=1)
def _compiled() -> tuple[Template, ...]:
    return tuple(_compile(clause) for clause in CLAUSES)


def _compile(text: str) -> Template:
    """Parse `[a|b]` choices (nested) and `{slots}`."""
    parts, end = _parse(text, 0)
    if end != len(text):
        raise ValueError(f"unbalanced brackets in {text!r}")
    return parts[0]


def _parse(text: str, at: int) -> tuple[tuple[Template, ...], int]:
    """The alternatives from `at` up to the closing bracket (or the end), and where that is."""
    options: list[Template] = []
    parts: list[Part] = []
    while token := _TOKEN.match(text, at):
        piece, at = token.group(), token.end()
        if piece == "[":
            inner, at = _parse(text, at)
            parts.append(("choice", inner))
            at += 1
        elif piece == "]":
            at -= 1
            break
        elif piece == "|":
            options.append(tuple(parts))
            parts = []
        elif piece[0] == "{":
            name = piece[1:-1]
            parts.append(("mention" if name in TYPES else "slot", name))
        else:
            parts.append(piece)
    return (*options, tuple(parts)), at
