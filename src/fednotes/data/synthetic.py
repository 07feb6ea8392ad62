"""A seeded generator of clinical text for several sites. No text of anyone's is in it.

Sites differ in genre (discharge summaries, case reports, patients' posts, mixtures
beyond three), in which names and phrasings they use often (long-tailed), in what they
annotate (overlapping tag sets), in size, and in care (annotation noise, in train only).
A finding is an ADE, a Disease or a Symptom by its context; companies, devices and lab
values look like drugs and doses.

    sites = generate(3, sentences_per_site=250, seed=0)
    sites[0].data        what the site annotates: its own tag set, noise in train
    sites[0].complete    the same texts, every type, no noise: pooled training's upper bound

Names are made of the syllables, roots and phrases in `lexicon.toml`, texts of its
templates.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from fednotes.core.errors import ConfigError
from fednotes.core.parsing import shipped
from fednotes.core.seeds import rng_of
from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.data.formats import FORMATS
from fednotes.data.tags import relabel

TYPES = ("ADE", "Disease", "Dosage", "Drug", "Symptom", "Test")
GENRES = ("discharge", "reports", "posts")
GENRE_TYPES: dict[str, tuple[str, ...]] = {
    "discharge": ("Disease", "Dosage", "Drug", "Test"),
    "reports": ("ADE", "Disease", "Drug"),
    "posts": ("ADE", "Drug", "Symptom"),
}
_TOKEN = re.compile(r"\[|\]|\||\{\w+\}|[^\[\]|{]+")
T = TypeVar("T")
PARTS = ("train", "valid", "test")
_SIZES = (1.5, 0.9, 0.6)  # of sites in turn, in parts of the mean
# A compiled template: ("text", as it is), ("choice", options), ("slot", name),
# ("mention", type).
Template = tuple[tuple[str, Any], ...]


@lru_cache(maxsize=1)
def words() -> dict[str, Any]:
    """`lexicon.toml`: lists of words and phrases, some of them by genre."""
    return shipped("data/lexicon.toml")


def make_lexicon(
    rng: np.random.Generator, size: int = 1500
) -> dict[str, tuple[str, ...]]:
    """About `size` drugs and findings and half as many diseases. A function of `rng`
    alone.

    Names by kind, the commonest first; how often each is used is up to a site.
    """
    known = words()

    def drawn(slot: str) -> str:
        """One of a list of the file, or a name of a kind; in title case where the slot
        is."""
        kinds = known["names"].get(slot.lower())
        if kinds is None:
            return str(known[slot][int(rng.integers(len(known[slot])))])
        mark = rng.random() if len(kinds) > 1 else 0.0
        template, *chance = next(rest for below, *rest in kinds if mark < below)
        name = re.sub(r"\{(\w+)\}", lambda found: drawn(found[1]), template)
        if chance and rng.random() < chance[0]:
            name = f"{drawn('course')} {name}"
        return name.title() if slot[0].isupper() else name

    def distinct(count: int, slot: str) -> list[str]:
        """`count` different names, or fewer if the inventory is too small for so many."""
        names: dict[str, None] = {}
        for _ in range(20 * count):
            if len(names) >= count:
                break
            names[drawn(slot)] = None
        return list(names)

    def shuffled(names: list[str]) -> tuple[str, ...]:
        return tuple(names[i] for i in rng.permutation(len(names)).tolist())

    brands = distinct(size // 3, "Brand")
    generics = distinct(size - len(brands) - len(known["electrolytes"]), "generic")
    companies = distinct(200, "Brand")
    orgs = [f"{name} {drawn('orgs')}" for name in companies[:90]]
    orgs += [f"{drawn('places')} {drawn('orgs')}" for _ in range(30)]
    devices = [f"{name} {drawn('devices')}" for name in companies[90:]] + known[
        "devices"
    ]
    return {
        "drug": shuffled([*brands, *generics, *known["electrolytes"]]),
        "finding": shuffled(distinct(size, "finding")),
        "disease": shuffled(distinct(size // 2, "disease")),
        "test": shuffled(distinct(180, "test")),
        "org": shuffled(orgs),
        "device": shuffled(devices),
        "brand": shuffled(companies),
    }


class Writer:
    """Writes the notes of one genre at one site, with the site's favourite names."""

    def __init__(
        self,
        genre: str,
        seed: int,
        rng: np.random.Generator,
        lexicon: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.genre = genre
        self._rng = rng
        self._drawn: list[float] = []
        self._typos = 0.06 if genre == "posts" else 0.0
        known = words()
        weights = _clause_weights(known["clauses"], genre, seed)
        self._clause = self._tail(_compiled(), weights, rng, 0.5)
        drug, finding, disease, test = (
            self._tail(names, 1 / (np.arange(len(names)) + 8.0) ** 0.9, rng, 1.0)
            for names in map(
                lexicon.__getitem__, ("drug", "finding", "disease", "test")
            )
        )
        one = self._choice
        # mentions by type, other slots by name
        self._fill: dict[str, Callable[[], str]] = {
            "Drug": drug,
            "Test": test,
            "Symptom": finding,
            "ADE": finding,
            "Disease": lambda: (disease if self._uniform() < 0.4 else finding)(),
            "Dosage": self._number(known["dosages"]),
            "dur": one(known["durations"]),
            "month": one(known["months"]),
            "person": one(known["people"]),
            "place": one(known["places"]),
            "org": one(lexicon["org"]),
            "device": one(lexicon["device"]),
            "brand": one(lexicon["brand"]),
            "poss": one(known["possessives"][genre]),
            "obj": one(known["objects"][genre]),
            "num": lambda: str(1 + self._below(99)),
            "value": self._number(known["values"]),
        }
        self._lead = one([_compile(lead) for lead in known["leads"][genre]])
        self._subject = one([_compile(subject) for subject in known["subjects"][genre]])
        self._join, self._end = one(known["joins"][genre]), one(known["ends"][genre])

    def _uniform(self) -> float:
        """Drawn by the thousand: one by one, NumPy's generator is the bottleneck."""
        if not self._drawn:
            self._drawn = self._rng.random(8192).tolist()
        return self._drawn.pop()

    def _below(self, count: int) -> int:
        return int(self._uniform() * count)

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
            meta=MappingProxyType({"genre": self.genre}),
            sentences=tuple(bounds),
        )

    def _sentence(self) -> tuple[str, list[tuple[int, int, str]]]:
        pieces: list[str] = []
        found: list[tuple[int, int, str]] = []
        at = self._write(self._lead(), pieces, found, 0)
        at = self._write(self._clause(), pieces, found, at)
        if self._uniform() < 0.3:
            join = self._join()
            pieces.append(join)
            at = self._write(self._clause(), pieces, found, at + len(join))
        pieces.append(self._end())
        text = "".join(pieces)
        if self.genre == "posts" and self._uniform() < 0.5:
            return text.lower(), found
        return text[0].upper() + text[1:], found

    def _write(
        self,
        template: Template,
        pieces: list[str],
        found: list[tuple[int, int, str]],
        at: int,
    ) -> int:
        """Append the filled template; returns the offset behind it."""
        for kind, value in template:
            if kind == "choice":
                at = self._write(value[self._below(len(value))], pieces, found, at)
                continue
            if value == "subj":
                at = self._write(self._subject(), pieces, found, at)
                continue
            text = value if kind == "text" else self._fill[value]()
            if self._typos and self._uniform() < self._typos:
                text = self._mistyped(text)
            if kind == "mention":
                found.append((at, at + len(text), value))
            pieces.append(text)
            at += len(text)
        return at

    def _mistyped(self, text: str) -> str:
        """Two letters swapped, or one left out or doubled."""
        i = self._below(max(1, len(text) - 1))
        if not text[i : i + 2].isalpha() or len(text) < 5:
            return text
        a, b = text[i], text[i + 1]
        return text[:i] + (b + a, b, a + a + b)[self._below(3)] + text[i + 2 :]

    def _number(self, patterns: Sequence[str]) -> Callable[[], str]:
        pattern, step = self._choice(patterns), self._choice(words()["numbers"])
        return lambda: pattern().replace("{n}", step())

    def _choice(self, options: Sequence[T]) -> Callable[[], T]:
        count = len(options)
        return lambda: options[self._below(count)]

    def _tail(
        self,
        items: Sequence[T],
        weights: np.ndarray,
        rng: np.random.Generator,
        spread: float,
    ) -> Callable[[], T]:
        """Draws from long-tailed weights which the site shifts by its own taste."""
        own = weights * np.exp(rng.normal(0.0, spread, len(items)))
        edges = (np.cumsum(own) / own.sum()).tolist()
        last = len(items) - 1
        return lambda: items[min(bisect_right(edges, self._uniform()), last)]


def _clause_weights(clauses: Sequence[str], genre: str, seed: int) -> np.ndarray:
    """(clauses,) how often a genre uses each: a long tail, its own types first."""
    ranks = rng_of(seed, "clauses", genre).permutation(len(clauses))
    types = [set(re.findall(r"\{([A-Z]\w+)\}", clause)) for clause in clauses]
    theme = [
        2.0 if held & set(GENRE_TYPES[genre]) - {"Drug"} else 1.0 for held in types
    ]
    weights: np.ndarray = np.array(theme) / (ranks + 10.0) ** 0.7
    return weights


@lru_cache(maxsize=1)
def _compiled() -> tuple[Template, ...]:
    return tuple(map(_compile, words()["clauses"]))


def _compile(text: str) -> Template:
    """Parse `[a|b]` choices (nested) and `{slots}`."""
    (template,), end = _parse(text, 0)
    if end != len(text):
        raise ValueError(f"unbalanced brackets in {text!r}")
    return template


def _parse(text: str, at: int) -> tuple[list[Template], int]:
    """The alternatives from `at` up to the closing bracket (or the end), and where that
    is."""
    options: list[Template] = [()]
    while (token := _TOKEN.match(text, at)) and token.group() != "]":
        piece, at = token.group(), token.end()
        part: tuple[str, Any] = ("text", piece)
        if piece == "|":
            options.append(())
            continue
        if piece == "[":
            inner, at = _parse(text, at)
            part, at = ("choice", inner), at + 1
        elif piece[0] == "{":
            part = ("mention" if piece[1:-1] in TYPES else "slot", piece[1:-1])
        options[-1] += (part,)
    return options, at


@dataclass(frozen=True, slots=True)
class SyntheticSite:
    """One site twice over the same texts.

    data: the site's own annotation. complete: noise-free labels of all `TYPES`.
    """

    data: SiteData
    complete: SiteData


def generate(
    num_sites: int = 3,
    sentences_per_site: int = 250,
    seed: int = 0,
    *,
    noise: float = 0.08,
) -> tuple[SyntheticSite, ...]:
    """Corpora of `num_sites` sites; the same arguments give the same bytes.

    sentences_per_site: training sentences, the mean over sites (they are unequal).
        Valid has a fifth of a site's (at least 40), test a quarter (at least 200).
        Parts share no patient and no sentence, within and across sites.
    noise: the share of training mentions that the site annotates wrongly: dropped, cut
        or grown by a word, or of another type.

    Raises ConfigError for numbers that make no corpus.
    """
    if num_sites < 1 or sentences_per_site < 1 or not 0 <= noise < 1:
        raise ConfigError(
            "synthetic corpora need one site or more, a sentence or more for each and "
            f"0 <= noise < 1, not {num_sites} site(s) with {sentences_per_site} sentences, {noise}"
        )
    lexicon = make_lexicon(rng_of(seed, "lexicon"))
    used: dict[str, str] = {}
    made = []
    for index in range(num_sites):
        rng = rng_of(seed, "synthetic", index)
        name, shares, types = _profile(index, rng)
        writers = [Writer(genre, seed, rng, lexicon) for genre in GENRES]
        size = max(1, round(sentences_per_site * _SIZES[index % len(_SIZES)]))
        train, valid, test = (
            _notes(f"{name}-{part}", part, count, shares, writers, rng, used)
            for part, count in zip(
                PARTS, (size, max(40, size // 5), max(200, size // 4)), strict=True
            )
        )
        complete = SiteData(name, TagSet(TYPES), train, valid, test)
        train, valid, test = (relabel(part, {}, types) for part in (train, valid, test))
        train = _noisy(train, types, noise, rng_of(seed, "noise", index))
        own = SiteData(name, TagSet(types), train, valid, test)
        made.append(SyntheticSite(own, complete))
    return tuple(made)


def _profile(
    index: int, rng: np.random.Generator
) -> tuple[str, list[float], tuple[str, ...]]:
    """A site's name, genre shares and tag set: one genre each for three, then mixtures."""
    if index < len(GENRES):
        genre = GENRES[index]
        return genre, [float(g == genre) for g in GENRES], GENRE_TYPES[genre]
    shares = rng.dirichlet([0.7] * len(GENRES)).tolist()
    other = [t for t in TYPES if t != "Drug"]
    chosen = rng.permutation(len(other))[: int(rng.integers(2, 4))].tolist()
    return (
        f"mixed{index + 1}",
        shares,
        tuple(sorted(["Drug", *(other[i] for i in chosen)])),
    )


def _notes(
    prefix: str,
    part: str,
    sentences: int,
    shares: Sequence[float],
    writers: Sequence[Writer],
    rng: np.random.Generator,
    used: dict[str, str],
) -> tuple[Document, ...]:
    """Patients of one to three notes of three to nine sentences each, `sentences` in
    all."""
    documents: list[Document] = []
    edges = np.cumsum(shares).tolist()
    left, patient, notes_left = sentences, 0, 0
    writer = writers[0]
    while left:
        if notes_left == 0:
            patient, notes_left = patient + 1, int(rng.integers(1, 4))
            writer = writers[
                min(bisect_right(edges, rng.random() * edges[-1]), len(edges) - 1)
            ]
        length = min(left, int(rng.integers(3, 10)))
        who = f"{prefix}-p{patient:04d}"
        documents.append(writer.note(f"{who}-n{notes_left}", who, length, part, used))
        left, notes_left = left - length, notes_left - 1
    return tuple(documents)


def _noisy(
    notes: Sequence[Document],
    types: Sequence[str],
    noise: float,
    rng: np.random.Generator,
) -> tuple[Document, ...]:
    made = []
    for note in notes:
        spans = [_mistaken(note, span, types, noise, rng) for span in note.spans]
        # without the mentions that a mistake made overlap the one before
        kept: list[Span] = []
        for span in sorted(span for span in spans if span):
            if not kept or span.start >= kept[-1].end:
                kept.append(span)
        made.append(replace(note, spans=tuple(kept)))
    return tuple(made)


def _mistaken(
    note: Document,
    span: Span,
    types: Sequence[str],
    noise: float,
    rng: np.random.Generator,
) -> Span | None:
    """The mention as a hurried annotator has it: mostly right."""
    if rng.random() >= noise:
        return span
    kind = rng.random()
    if kind < 0.5:
        return None
    if kind < 0.75:
        return Span(span.start, span.end, types[int(rng.integers(len(types)))])
    cut = note.text.find(" ", span.start, span.end)
    if cut > 0:
        return Span(cut + 1, span.end, span.label)
    first = max(a for a, _ in note.sentences if a <= span.start)
    word = re.search(r"\w+ $", note.text[first : span.start])
    return Span(first + word.start(), span.end, span.label) if word else span


def write_sites(
    sites: Sequence[SyntheticSite], directory: str | Path, format: str = "conll"
) -> tuple[Path, ...]:
    """Write `<directory>/<site>/{train,valid,test}.<format>`; returns the sites'
    folders.

    Raises ConfigError for a format that has no writer.
    """
    writer = getattr(FORMATS.get(format), "write", None)
    if writer is None:
        raise ConfigError(f"cannot write {format!r}: choose conll, brat or jsonl")
    folders = []
    for site in sites:
        folder = Path(directory) / site.data.id
        folder.mkdir(parents=True, exist_ok=True)
        suffix = "" if format == "brat" else f".{format}"
        for part in PARTS:
            writer(getattr(site.data, part), folder / f"{part}{suffix}")
        folders.append(folder)
    return tuple(folders)
