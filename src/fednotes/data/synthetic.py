"""Generate clinical text for several sites. It contains no text of real patients.

Sites differ in genre (discharge summaries, case reports, patients' posts; mixtures
beyond three sites), in their frequent names and phrasings (long-tailed), in their tag
sets (which overlap), in size, and in accuracy (annotation noise, only in train).
Whether a finding is an ADE, a Disease or a Symptom depends on its context; companies,
devices and lab values look like drugs and doses.

    sites = generate(3, sentences_per_site=250, seed=0)
    sites[0].data        what the site annotates: its own tag set, noise in train
    sites[0].complete    the same texts with every type and without noise: the upper
                         bound of pooled training

Names are composed of the syllables, roots and phrases in `lexicon.toml`, and texts of
its templates.
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
from fednotes.core.parsing import read_shipped_table
from fednotes.core.seeds import rng_of
from fednotes.core.types import Document, SiteData, Span, TagSet
from fednotes.core.work import count_items
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
_SIZES = (1.5, 0.9, 0.6)  # sizes of sites in turn, as multiples of the mean
MIN_PART_SIZES = (1, 40, 200)  # least sentences of train, valid and test
_TYPO_RATE = 0.06  # per word in patients' posts
_DRAWN_AT_ONCE = 8192
# A compiled template: ("text", as it is), ("choice", options), ("slot", name),
# ("mention", type).
Template = tuple[tuple[str, Any], ...]


@lru_cache(maxsize=1)
def read_words() -> dict[str, Any]:
    """Return `lexicon.toml`, lists of words and phrases, some of them by genre."""
    return read_shipped_table("data/lexicon.toml")


def make_lexicon(
    rng: np.random.Generator, size: int = 1500
) -> dict[str, tuple[str, ...]]:
    """Return about `size` drugs and findings, and half as many diseases.

    They depend only on `rng`. Names are listed by kind, the most common first; each
    site has its own frequencies.
    """
    words = read_words()

    def draw(slot: str) -> str:
        """Draw a word from a list of the lexicon, or compose a name.

        A slot that begins with a capital gets a name in title case.
        """
        patterns = words["names"].get(slot.lower())
        if patterns is None:
            return str(words[slot][int(rng.integers(len(words[slot])))])
        quantile = rng.random() if len(patterns) > 1 else 0.0
        # Each pattern has its cumulative probability, a template and sometimes the
        # probability of a course ("acute").
        template, *course_chance = next(
            pattern[1:] for pattern in patterns if quantile < pattern[0]
        )
        name = re.sub(r"\{(\w+)\}", lambda match: draw(match[1]), template)
        if course_chance and rng.random() < course_chance[0]:
            name = f"{draw('course')} {name}"
        return name.title() if slot[0].isupper() else name

    def draw_distinct(count: int, slot: str) -> list[str]:
        """Return `count` different names, or fewer if the lexicon is too small."""
        names: dict[str, None] = {}
        for _ in range(20 * count):
            if len(names) >= count:
                break
            names[draw(slot)] = None
        return list(names)

    def shuffle(names: list[str]) -> tuple[str, ...]:
        """Return the names in random order."""
        return tuple(names[i] for i in rng.permutation(len(names)).tolist())

    electrolytes = words["electrolytes"]
    brands = draw_distinct(size // 3, "Brand")
    generics = draw_distinct(size - len(brands) - len(electrolytes), "generic")
    companies = draw_distinct(200, "Brand")
    organisations = [f"{name} {draw('orgs')}" for name in companies[:90]]
    organisations += [f"{draw('places')} {draw('orgs')}" for _ in range(30)]
    devices = [f"{name} {draw('devices')}" for name in companies[90:]]
    devices += words["devices"]
    return {
        "drug": shuffle([*brands, *generics, *electrolytes]),
        "finding": shuffle(draw_distinct(size, "finding")),
        "disease": shuffle(draw_distinct(size // 2, "disease")),
        "test": shuffle(draw_distinct(180, "test")),
        "org": shuffle(organisations),
        "device": shuffle(devices),
        "brand": shuffle(companies),
    }


class Writer:
    """Write the notes of one genre at one site, with the site's name frequencies.

    Args:
        genre: One of `GENRES`.
        seed: Seed of the corpora.
        rng: The site's source of randomness.
        lexicon: The names, from `make_lexicon`.
    """

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
        self._typo_rate = _TYPO_RATE if genre == "posts" else 0.0
        words = read_words()
        weights = _draw_clause_weights(words["clauses"], genre, seed)
        self._clause = self._make_weighted_source(_compile_clauses(), weights, rng, 0.5)
        drug = self._make_name_source(lexicon["drug"], rng)
        finding = self._make_name_source(lexicon["finding"], rng)
        disease = self._make_name_source(lexicon["disease"], rng)
        test = self._make_name_source(lexicon["test"], rng)
        make_source = self._make_uniform_source
        # Sources of text, by type of mention or by name of slot.
        self._fill: dict[str, Callable[[], str]] = {
            "Drug": drug,
            "Test": test,
            "Symptom": finding,
            "ADE": finding,
            "Disease": lambda: (disease if self._draw_uniform() < 0.4 else finding)(),
            "Dosage": self._make_number_source(words["dosages"]),
            "dur": make_source(words["durations"]),
            "month": make_source(words["months"]),
            "person": make_source(words["people"]),
            "place": make_source(words["places"]),
            "org": make_source(lexicon["org"]),
            "device": make_source(lexicon["device"]),
            "brand": make_source(lexicon["brand"]),
            "poss": make_source(words["possessives"][genre]),
            "obj": make_source(words["objects"][genre]),
            "num": lambda: str(1 + self._draw_index(99)),
            "value": self._make_number_source(words["values"]),
        }
        self._lead = make_source(
            [_compile_template(lead) for lead in words["leads"][genre]]
        )
        self._subject = make_source(
            [_compile_template(subject) for subject in words["subjects"][genre]]
        )
        self._join = make_source(words["joins"][genre])
        self._end = make_source(words["ends"][genre])

    def _draw_uniform(self) -> float:
        """Return a uniform number.

        Thousands are drawn at once, because NumPy's generator is slow for single draws.
        """
        if not self._drawn:
            self._drawn = self._rng.random(_DRAWN_AT_ONCE).tolist()
        return self._drawn.pop()

    def _draw_index(self, count: int) -> int:
        """Return a random index of `count` items."""
        return int(self._draw_uniform() * count)

    def write_note(
        self, name: str, patient: str, length: int, part: str, used: dict[str, str]
    ) -> Document:
        """Return a note whose sentences do not occur in another part of any site.

        Args:
            name: The id of the note.
            patient: The id of the patient.
            length: Number of sentences.
            part: The part to which the note belongs.
            used: The part of each sentence so far; new ones are added.
        """
        spans: list[Span] = []
        bounds: list[tuple[int, int]] = []
        texts: list[str] = []
        at = 0
        for _ in range(length):
            text, mentions = self._write_sentence()
            while used.setdefault(text.casefold(), part) != part:
                text, mentions = self._write_sentence()
            spans += [Span(a + at, b + at, label) for a, b, label in mentions]
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

    def _write_sentence(self) -> tuple[str, list[tuple[int, int, str]]]:
        """Draw a sentence; return it with its mentions (start, end, type)."""
        pieces: list[str] = []
        mentions: list[tuple[int, int, str]] = []
        at = self._fill_template(self._lead(), pieces, mentions, 0)
        at = self._fill_template(self._clause(), pieces, mentions, at)
        if self._draw_uniform() < 0.3:
            join = self._join()
            pieces.append(join)
            at = self._fill_template(self._clause(), pieces, mentions, at + len(join))
        pieces.append(self._end())
        text = "".join(pieces)
        if self.genre == "posts" and self._draw_uniform() < 0.5:
            return text.lower(), mentions
        return text[0].upper() + text[1:], mentions

    def _fill_template(
        self,
        template: Template,
        pieces: list[str],
        mentions: list[tuple[int, int, str]],
        at: int,
    ) -> int:
        """Append a template to a sentence, with its slots filled at random.

        Args:
            template: The template.
            pieces: The pieces of the sentence; those of the template are added.
            mentions: The mentions of the sentence; those of the template are added.
            at: The offset at which the template begins.

        Returns:
            The offset after it.
        """
        for kind, value in template:
            if kind == "choice":
                option = value[self._draw_index(len(value))]
                at = self._fill_template(option, pieces, mentions, at)
                continue
            if value == "subj":
                at = self._fill_template(self._subject(), pieces, mentions, at)
                continue
            text = value if kind == "text" else self._fill[value]()
            if self._typo_rate and self._draw_uniform() < self._typo_rate:
                text = self._mistype(text)
            if kind == "mention":
                mentions.append((at, at + len(text), value))
            pieces.append(text)
            at += len(text)
        return at

    def _mistype(self, text: str) -> str:
        """Return a text with two letters swapped, or one omitted or doubled."""
        i = self._draw_index(max(1, len(text) - 1))
        if not text[i : i + 2].isalpha() or len(text) < 5:
            return text
        first = text[i]
        second = text[i + 1]
        mistakes = (second + first, second, first + first + second)
        return text[:i] + mistakes[self._draw_index(3)] + text[i + 2 :]

    def _make_number_source(self, patterns: Sequence[str]) -> Callable[[], str]:
        """Return a source of patterns in which "{n}" is replaced by a number."""
        pattern = self._make_uniform_source(patterns)
        value = self._make_uniform_source(read_words()["numbers"])
        return lambda: pattern().replace("{n}", value())

    def _make_uniform_source(self, options: Sequence[T]) -> Callable[[], T]:
        """Return a source that draws options uniformly."""
        count = len(options)
        return lambda: options[self._draw_index(count)]

    def _make_name_source(
        self, names: Sequence[str], rng: np.random.Generator
    ) -> Callable[[], str]:
        """Return a source of names, with the first ones most frequent."""
        weights = 1 / (np.arange(len(names)) + 8.0) ** 0.9
        return self._make_weighted_source(names, weights, rng, 1.0)

    def _make_weighted_source(
        self,
        items: Sequence[T],
        weights: np.ndarray,
        rng: np.random.Generator,
        spread: float,
    ) -> Callable[[], T]:
        """Return a source that draws items by weights, which differ between sites.

        Args:
            items: The items.
            weights: (items,) how often they are drawn on average.
            rng: The site's source of randomness.
            spread: Deviation of the site from the weights.
        """
        site_weights = weights * np.exp(rng.normal(0.0, spread, len(items)))
        edges = (np.cumsum(site_weights) / site_weights.sum()).tolist()
        last = len(items) - 1
        return lambda: items[min(bisect_right(edges, self._draw_uniform()), last)]


def _draw_clause_weights(clauses: Sequence[str], genre: str, seed: int) -> np.ndarray:
    """Return the frequency of each clause in a genre, (clauses,).

    The frequencies have a long tail and favour clauses with the genre's own types.
    """
    ranks = rng_of(seed, "clauses", genre).permutation(len(clauses))
    types = [set(re.findall(r"\{([A-Z]\w+)\}", clause)) for clause in clauses]
    genre_types = set(GENRE_TYPES[genre]) - {"Drug"}  # which every genre has
    preference = [2.0 if clause_types & genre_types else 1.0 for clause_types in types]
    weights: np.ndarray = np.array(preference) / (ranks + 10.0) ** 0.7
    return weights


@lru_cache(maxsize=1)
def _compile_clauses() -> tuple[Template, ...]:
    """Return the templates of all clauses, which are parsed once."""
    return tuple(map(_compile_template, read_words()["clauses"]))


def _compile_template(text: str) -> Template:
    """Return the template of a text with `[a|b]` choices (nested) and `{slots}`."""
    (template,), end = _parse_options(text, 0)
    if end != len(text):
        raise ValueError(f"unbalanced brackets in {text!r}")
    return template


def _parse_options(text: str, at: int) -> tuple[list[Template], int]:
    """Parse alternatives, which `|` separates, up to their closing bracket or the end.

    Args:
        text: The text of a template.
        at: The offset of the first alternative.

    Returns:
        The alternatives, and the offset of the bracket.
    """
    options: list[Template] = [()]
    token = _TOKEN.match(text, at)
    while token and token.group() != "]":
        piece = token.group()
        at = token.end()
        if piece == "|":
            options.append(())
        elif piece == "[":
            choices, closing = _parse_options(text, at)
            options[-1] += (("choice", choices),)
            at = closing + 1
        elif piece.startswith("{"):
            name = piece[1:-1]
            options[-1] += (("mention" if name in TYPES else "slot", name),)
        else:
            options[-1] += (("text", piece),)
        token = _TOKEN.match(text, at)
    return options, at


@dataclass(frozen=True, slots=True)
class SyntheticSite:
    """A site with two annotations of the same texts.

    Attributes:
        data: The site's own annotation.
        complete: Annotation of all `TYPES` without noise.
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
    """Generate the corpora of several sites, deterministically.

    Parts have no patient or sentence in common, within and across sites.

    Args:
        num_sites: Number of sites.
        sentences_per_site: Mean number of training sentences per site (sizes differ).
            Valid has a fifth of a site's number (at least 40), test a quarter (at least
            200).
        seed: Seed of all draws.
        noise: The fraction of training mentions with an annotation error: dropped,
            shortened or extended by a word, or of another type.

    Raises:
        ConfigError: The numbers do not allow a corpus.
    """
    if num_sites < 1 or sentences_per_site < 1 or not 0 <= noise < 1:
        raise ConfigError(
            "synthetic corpora need one site or more, a sentence or more for each and "
            f"0 <= noise < 1, not sites = {num_sites}, "
            f"sentences = {sentences_per_site}, noise = {noise}"
        )
    lexicon = _draw_lexicon(seed)
    used: dict[str, str] = {}
    sites = []
    for index in count_items(range(num_sites), "generating sites", num_sites):
        rng = rng_of(seed, "synthetic", index)
        name, shares, types = _draw_profile(index, rng)
        writers = [Writer(genre, seed, rng, lexicon) for genre in GENRES]
        size = round(sentences_per_site * _SIZES[index % len(_SIZES)])
        sizes = map(max, (size, size // 5, size // 4), MIN_PART_SIZES)
        train, valid, test = (
            _write_notes(f"{name}-{part}", part, count, shares, writers, rng, used)
            for part, count in zip(PARTS, sizes, strict=True)
        )
        complete = SiteData(name, TagSet(TYPES), train, valid, test)
        annotated_train = relabel(train, {}, types)
        data = SiteData(
            id=name,
            tags=TagSet(types),
            train=_add_noise(
                annotated_train, types, noise, rng_of(seed, "noise", index)
            ),
            valid=relabel(valid, {}, types),
            test=relabel(test, {}, types),
        )
        sites.append(SyntheticSite(data, complete))
    return tuple(sites)


@lru_cache(maxsize=8)
def _draw_lexicon(seed: int) -> dict[str, tuple[str, ...]]:
    """Return the lexicon of a seed, which is drawn once."""
    return make_lexicon(rng_of(seed, "lexicon"))


def _draw_profile(
    index: int, rng: np.random.Generator
) -> tuple[str, list[float], tuple[str, ...]]:
    """Draw a site's name, its shares of the genres, and its tag set.

    The first three sites have one genre each; others are mixtures.
    """
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


def _write_notes(
    prefix: str,
    part: str,
    sentences: int,
    shares: Sequence[float],
    writers: Sequence[Writer],
    rng: np.random.Generator,
    used: dict[str, str],
) -> tuple[Document, ...]:
    """Write the notes of patients, one to three of three to nine sentences each.

    Args:
        prefix: Beginning of the ids.
        part: The part to which the notes belong.
        sentences: Total number of sentences.
        shares: The share of each genre.
        writers: A writer for each genre.
        rng: The site's source of randomness.
        used: As in `Writer.write_note`.
    """
    documents: list[Document] = []
    edges = np.cumsum(shares).tolist()
    sentences_left = sentences
    notes_left = 0
    patient_number = 0
    writer = writers[0]
    while sentences_left:
        if notes_left == 0:
            patient_number += 1
            notes_left = int(rng.integers(1, 4))
            genre = bisect_right(edges, rng.random() * edges[-1])
            writer = writers[min(genre, len(edges) - 1)]
        length = min(sentences_left, int(rng.integers(3, 10)))
        patient = f"{prefix}-p{patient_number:04d}"
        name = f"{patient}-n{notes_left}"
        documents.append(writer.write_note(name, patient, length, part, used))
        sentences_left -= length
        notes_left -= 1
    return tuple(documents)


def _add_noise(
    notes: Sequence[Document],
    types: Sequence[str],
    noise: float,
    rng: np.random.Generator,
) -> tuple[Document, ...]:
    """Return notes with errors in a fraction of their mentions."""
    noisy_notes = []
    for note in notes:
        spans = [
            _annotate_carelessly(note, span, types, noise, rng) for span in note.spans
        ]
        # An extended mention may overlap the next one, which is then dropped.
        flat: list[Span] = []
        for span in sorted(span for span in spans if span):
            if not flat or span.start >= flat[-1].end:
                flat.append(span)
        noisy_notes.append(replace(note, spans=tuple(flat)))
    return tuple(noisy_notes)


def _annotate_carelessly(
    note: Document,
    span: Span,
    types: Sequence[str],
    noise: float,
    rng: np.random.Generator,
) -> Span | None:
    """Return a mention as a careless annotator marks it; None if it is missed.

    Args:
        note: The note.
        span: The true mention.
        types: The types that the annotator uses.
        noise: The probability of a mistake.
        rng: Source of randomness.
    """
    if rng.random() >= noise:
        return span
    kind = rng.random()
    if kind < 0.5:
        return None
    if kind < 0.75:
        return Span(span.start, span.end, types[int(rng.integers(len(types)))])
    space = note.text.find(" ", span.start, span.end)
    if space > 0:
        return Span(space + 1, span.end, span.label)
    sentence_start = max(start for start, _ in note.sentences if start <= span.start)
    word = re.search(r"\w+ $", note.text[sentence_start : span.start])
    if word is None:
        return span
    return Span(sentence_start + word.start(), span.end, span.label)


def write_sites(
    sites: Sequence[SyntheticSite], directory: str | Path, format: str = "conll"
) -> tuple[Path, ...]:
    """Write `<directory>/<site>/{train,valid,test}.<format>`.

    Returns:
        The folders of the sites.

    Raises:
        ConfigError: The format cannot be written.
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
