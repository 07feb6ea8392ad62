"""What a grafted decoder learns from: pieces of public text and the spans that rules find there.

A piece is a sentence, or a part of a long one, as sub-words. Its spans are of two sorts:

surface classes   number, name, abbreviation, bracket, long word, phrase: seen in the letters
kinds             a phrase (words between stop words and punctuation) whose last word, its head,
                  lies in one of some clusters of word vectors: semantic types without a label

A span is (first, last, class): inclusive positions in the sub-words, the begin mark is 0.
Nobody annotated anything, and no annotation is read.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.seeds import rng_of
from fednotes.core.types import Document
from fednotes.data.formats import read
from fednotes.data.formats.files import read_text, visible
from fednotes.data.synthetic import generate
from fednotes.data.text import split_sentences

SURFACE = ("number", "name", "abbreviation", "bracket", "long word", "phrase")
NUMBER, NAME, ABBREVIATION, BRACKET, LONG, PHRASE = range(len(SURFACE))
STOP_WORDS = frozenset(
    "a an the and or but nor not no so if than then that this these those there here of in on at "
    "to from by with without for as into onto over under after before during until since about "
    "between among through per via within against toward towards up down out off is are was were "
    "be been being am do does did done has have had having will would can could may might must "
    "shall should he she it they we you i his her hers its their our your my him them us me who "
    "whom whose which what when where why how all any both each few more most other some such "
    "only own same too very also just however while because although though yet still again once "
    "s t m d ll re ve".split()
)
_WORD = re.compile(r"[^\W\d_]+(?:[-'’][^\W\d_]+)*|\d+(?:[.,/:]\d+)*%?|\S")
_BRACKET = re.compile(r"[(\[]([^()\[\]]{2,60})[)\]]")
_MOST_WORDS = 5  # of a phrase
_GENERATED = 1500  # sentences a site
_SHORTEST_CELL = 20  # characters of a CSV cell that is text and not a code

Mark = tuple[int, int, int]


@dataclass(frozen=True)
class Piece:
    """ids: (sub-words,) with begin and end marks. spans: of surface classes. phrases: every
    phrase as (first, last, number of its head word in `Pieces.heads`)."""

    ids: np.ndarray
    spans: tuple[Mark, ...]
    phrases: tuple[Mark, ...]


@dataclass(frozen=True)
class Pieces:
    """pieces in a seeded order. heads: the head words, lower case, by number; with counts."""

    pieces: tuple[Piece, ...]
    heads: tuple[str, ...]
    counts: np.ndarray


def read_texts(paths: Sequence[Path], seed: int) -> tuple[list[str], list[str]]:
    """The texts of corpora, and the corpora's names.

    paths: files or folders that `data.formats` reads, or of .txt and .csv files; of a CSV file
    every cell that is longer than a code. Annotation is left aside. Without paths: generated
    notes, a poor substitute that is there everywhere.
    Raises DataError for a path without text.
    """
    if paths:
        return [text for path in paths for text in _read_one(path)], [p.name for p in paths]
    made = generate(num_sites=3, sentences_per_site=_GENERATED, seed=seed)
    return [note.text for site in made for note in site.data.train], ["generated"]


def _read_one(path: Path) -> list[str]:
    try:
        return [document.text for document in read(path)]
    except DataError:
        plain = visible(path, True) if path.is_dir() else [path]
        plain = [file for file in plain if file.suffix.lower() in (".txt", ".csv")]
        if not plain:
            raise  # says what is wrong with the corpus, or that nothing is there
    return [text for file in plain for text in _plain(file)]


def _plain(file: Path) -> list[str]:
    if file.suffix.lower() == ".txt":
        return [read_text(file, empty=True)]
    try:
        rows = list(csv.reader(read_text(file).splitlines(keepends=True)))
    except csv.Error as error:
        raise DataError(f"{file}: not a CSV file: {error}") from None
    return [cell for row in rows for cell in row if len(cell) >= _SHORTEST_CELL and " " in cell]


def make_pieces(
    texts: Iterable[str],
    tokenizer: Any,
    marks: tuple[int, int],
    longest: int,
    most: int,
    seed: int,
) -> Pieces:
    """At most `most` different pieces of at most `longest` sub-words, in a seeded order.

    tokenizer: the `tokenizers.Tokenizer` of the backbone. marks: its begin and end marks' ids.
    Raises ConfigError where the texts hold too little to learn from.
    """
    sentences = dict.fromkeys(  # without repetitions, in order
        text[start:end]
        for text in texts
        for start, end in split_sentences(Document("", text))
        if end - start >= _SHORTEST_CELL
    )
    chosen = list(sentences)
    order = rng_of(seed, "graft", "pieces").permutation(len(chosen))[:most]
    numbers: dict[str, int] = {}
    counts: Counter[int] = Counter()
    pieces: list[Piece] = []
    for sentence, coded in zip(
        (chosen[i] for i in order),
        tokenizer.encode_batch([chosen[i] for i in order], add_special_tokens=False),
        strict=True,
    ):
        found = _spans(sentence, numbers)
        for low, high in _windows(coded.word_ids, longest - 2):
            piece = _piece(coded, low, high, found, marks)
            pieces.append(piece)
            counts.update(head for _, _, head in piece.phrases)
    if len(pieces) < 2 or not numbers:
        raise ConfigError("the text is too short to train on: two sentences of words or more")
    return Pieces(
        tuple(pieces[:most]), tuple(numbers), np.array([counts[i] for i in range(len(numbers))])
    )


def _windows(words: Sequence[int | None], capacity: int) -> list[tuple[int, int]]:
    """Parts of a sentence of at most `capacity` sub-words, cut before a word where one begins."""
    parts, low = [], 0
    while len(words) - low > capacity:
        high = low + capacity
        while high > low + 1 and words[high] == words[high - 1]:
            high -= 1
        high = high if high > low + 1 else low + capacity
        parts.append((low, high))
        low = high
    return [*parts, (low, len(words))] if low < len(words) else parts


def _piece(coded: Any, low: int, high: int, found: Sequence[Mark], marks: tuple[int, int]) -> Piece:
    """Sub-words low:high; spans that lie wholly in them, in sub-word positions."""
    ids = np.array([marks[0], *coded.ids[low:high], marks[1]], np.int64)
    starts = np.array([a for a, _ in coded.offsets[low:high]])
    ends = np.array([b for _, b in coded.offsets[low:high]])
    spans: list[Mark] = []
    phrases: list[Mark] = []
    for start, end, what in found:
        first, last = int(np.searchsorted(starts, start)), int(np.searchsorted(ends, end))
        if (
            first < len(starts)
            and last < len(ends)
            and starts[first] == start
            and ends[last] == end
        ):
            kept = phrases if what < 0 else spans
            kept.append((first + 1, last + 1, -1 - what if what < 0 else what))
    return Piece(ids, tuple(spans), tuple(phrases))


def _spans(text: str, numbers: dict[str, int]) -> list[Mark]:
    """(start, end, class) in characters; a phrase with head h is also (start, end, -1 - h)."""
    words = [(m.start(), m.end(), m.group()) for m in _WORD.finditer(text)]
    found = [(m.start(1), m.end(1), BRACKET) for m in _BRACKET.finditer(text)]
    run: list[tuple[int, int, str]] = []
    for start, end, word in [*words, (len(text), len(text), ".")]:
        plain = word[0].isalpha() and word.casefold() not in STOP_WORDS
        if plain and len(run) < _MOST_WORDS:
            run.append((start, end, word))
            continue
        if run:
            head = numbers.setdefault(run[-1][2].casefold(), len(numbers))
            found.append((run[0][0], run[-1][1], -1 - head))
            if len(run) > 1:
                found.append((run[0][0], run[-1][1], PHRASE))
        run = [(start, end, word)] if plain else []
    for i, (start, end, word) in enumerate(words):
        if word[0].isdigit():
            found.append((start, end, NUMBER))
        if len(word) > 1 and word.isupper() and word.isalpha():
            found.append((start, end, ABBREVIATION))
        elif i and word[0].isupper() and word[1:].islower() and word.casefold() not in STOP_WORDS:
            if found and found[-1][2] == NAME and start - found[-1][1] == 1:
                start = found.pop()[0]  # two capitalised words in a row are one name
            found.append((start, end, NAME))
        if len(word) >= 10 and word[0].isalpha():
            found.append((start, end, LONG))
    return found


def cluster(
    vectors: np.ndarray, weights: np.ndarray, count: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Spherical k-means of unit vectors (words, dim): (words,) clusters, (count, dim) centres.

    weights: how often a word occurs; a frequent word counts as the square root of that.
    """
    rng = rng_of(seed, "graft", "clusters")
    strength = np.sqrt(weights)
    chosen = rng.choice(len(vectors), size=count, replace=False, p=strength / strength.sum())
    centres = vectors[chosen]
    for _ in range(15):
        nearest = (vectors @ centres.T).argmax(1)  # (words,)
        sums = np.zeros_like(centres)
        np.add.at(sums, nearest, vectors * strength[:, None])
        length = np.linalg.norm(sums, axis=1, keepdims=True)
        centres = np.where(length > 1e-9, sums / np.maximum(length, 1e-9), centres)
    return (vectors @ centres.T).argmax(1), centres


def disjoint(spans: Iterable[Mark]) -> list[Mark]:
    """Left to right; of those that overlap the leftmost, of these the longest, then the class."""
    kept: list[Mark] = []
    for span in sorted(spans, key=lambda s: (s[0], -s[1], s[2])):
        if not kept or span[0] > kept[-1][1]:
            kept.append(span)
    return kept


def infill(ids: np.ndarray, mask: int, share: float, rng: np.random.Generator) -> np.ndarray:
    """BART's noise: spans of Poisson(3) sub-words, `share` of all, each become one mask."""
    inner = len(ids) - 2
    hidden = np.zeros(len(ids) + 1, bool)
    for _ in range(4 * inner):
        if hidden.sum() >= share * inner:
            break
        first = 1 + int(rng.integers(inner))
        hidden[first : min(first + max(1, int(rng.poisson(3))), len(ids) - 1)] = True
    starts = hidden & ~np.roll(hidden, 1)
    out = np.where(starts[:-1], mask, ids)
    result: np.ndarray = out[~hidden[:-1] | starts[:-1]]
    return result
