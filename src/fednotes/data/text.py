"""Rule-based tokens and sentences of clinical text, with character offsets.

Nothing is learned from text, so every site splits its notes in the same way without
exchanging any words.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fednotes.core.parsing import read_shipped_table
from fednotes.core.types import Document, Span

# Python's `re` does not treat combining accents and vowel signs as word characters;
# without them, "café" in decomposed form would be split in three.
_MARKS = "".join(
    chr(c) for c in range(0x300, 0x10000) if unicodedata.category(chr(c))[0] == "M"
)
_WORD = rf"(?:[^\W_][{_MARKS}]*)+"
TOKEN = re.compile(rf"{_WORD}|\S[{_MARKS}]*")  # included in exported models

Bounds = tuple[int, int]
_MAX_FORM = 1000  # characters of a surface form that are compared as they are


class Passage(NamedTuple):
    """A text that is read at once, and its words.

    Attributes:
        text: The text.
        words: (words, 2) half-open character offsets in `text`, in order.
    """

    text: str
    words: np.ndarray

    @property
    def forms(self) -> list[str]:
        """The words as written."""
        return [self.text[start:end] for start, end in self.words.tolist()]


def tokenize(text: str) -> np.ndarray:
    """Return the tokens of a text: words, and single other visible characters.

    A word consists of letters and digits, which are not separated ("B12", "60mg";
    measured in `docs/architecture.md`). An underscore is punctuation. A combining mark
    belongs to the preceding character.

    Returns:
        (tokens, 2) int32 half-open character offsets, in order.
    """
    if len(text) >= _LONG:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        if codes.max() < _CODES:
            kinds = _classify_characters()[codes]
            if not (kinds == _MARK).any():
                return _tokenize_kinds(kinds)
    bounds = [match.span() for match in TOKEN.finditer(text)]
    return np.array(bounds, dtype=np.int32).reshape(-1, 2)


_LONG = 256  # characters from which arrays are faster than the pattern
_CODES = 0x2100  # Latin, Greek, Cyrillic, ... and general punctuation
_SPACE, _LETTER, _OTHER, _MARK = range(4)


@lru_cache(maxsize=1)
def _classify_characters() -> np.ndarray:
    """Return the kind of each character according to `TOKEN`, (_CODES,) uint8."""
    kinds = np.full(_CODES, _OTHER, dtype=np.uint8)
    for code in range(_CODES):
        character = chr(code)
        if character in _MARKS:
            kinds[code] = _MARK
        elif character.isspace():
            kinds[code] = _SPACE
        elif re.fullmatch(r"[^\W_]", character):
            kinds[code] = _LETTER
    return kinds


def _tokenize_kinds(kinds: np.ndarray) -> np.ndarray:
    """Tokenise a text without combining marks; see `tokenize`.

    Args:
        kinds: (characters,) the kind of each character.
    """
    is_letter = kinds == _LETTER
    continues = is_letter[1:] & is_letter[:-1]  # the previous character's word
    is_start = kinds != _SPACE
    is_end = is_start.copy()
    is_start[1:] &= ~continues
    is_end[:-1] &= ~continues
    bounds = np.flatnonzero(is_start), np.flatnonzero(is_end) + 1
    return np.stack(bounds, axis=1).astype(np.int32)


def normalise(form: str) -> str:
    """Normalise a surface form for comparison: fold case, collapse white space.

    The end of a long form is replaced by its digest. Otherwise, the forms of thousands
    of nested mentions would take thousands of times the memory of their text.
    """
    normalised = " ".join(form.casefold().split())
    if len(normalised) <= _MAX_FORM:
        return normalised
    end = normalised[_MAX_FORM:].encode("utf-8", "surrogatepass")
    return normalised[:_MAX_FORM] + hashlib.sha256(end).hexdigest()


_WORDS = {
    name: frozenset(words.split())
    for name, words in read_shipped_table("data/words.toml").items()
}
# The look-behind keeps a match from starting within a run of marks; otherwise a row of
# 200,000 dots would be tried from each dot.
_END_MARKS = re.compile(r"(?<![.!?])[.!?]+[\"'\u201d\u2019)\]]*(?=\s)")
_WORD_BEFORE = re.compile(r"[^\s(\[\"'\u201c\u2018/,;]+$")
_WORD_AFTER = re.compile(r"[\"'\u201c\u2018(\[]*(\w+)?")
_LIST_NUMBER = re.compile(r"(?:\d{1,3}|[A-Za-z]|[ivxIVX]{1,4})[.)]+\Z")
_MAX_WORD_BEFORE = 40  # characters searched for the word before a mark
_MIN_WRAPPED = 50  # characters; shorter lines were not wrapped
_MIN_WORD = 3  # minimum letters of a word that ends a sentence before lower case


def split_sentences(document: Document) -> list[Bounds]:
    """Return the trimmed, non-empty sentences of a document.

    Sentences from the source are used if available. Otherwise lines are split by a rule
    that knows clinical abbreviations, numbers and list items. A long line that
    continues in lower case was wrapped and is joined to the next line. No sentence
    boundary splits a gold span: sentences are joined, or widened to white space that a
    span includes.

    Returns:
        Half-open character offsets, in order.
    """
    if document.sentences:
        return join_cut_sentences(document.sentences, document.spans)
    text = document.text
    bounds: list[Bounds] = []
    for start, end in _find_paragraphs(text):
        cuts = [start, *_find_sentence_ends(text, start, end), end]
        for piece_start, piece_end in pairwise(cuts):
            trimmed_start, trimmed_end = _trim(text, piece_start, piece_end)
            if trimmed_start < trimmed_end:
                bounds.append((trimmed_start, trimmed_end))
    return join_cut_sentences(bounds, document.spans)


def join_cut_sentences(bounds: Sequence[Bounds], spans: Iterable[Span]) -> list[Bounds]:
    """Join or widen sentences so that no span is split.

    A span outside all sentences has no effect. A discontinuous span extends from its
    first to its last fragment.

    Args:
        bounds: Half-open character offsets of the sentences, in order.
        spans: Spans of the same text.
    """
    ends = [end for _, end in bounds]
    stretches = list(bounds)
    for span in spans:
        at = bisect_right(ends, span.start)
        if at < len(bounds) and bounds[at][0] < span.end:
            stretches.append((span.start, span.end))
    return merge_overlapping(stretches)


def merge_overlapping(stretches: Iterable[Bounds]) -> list[Bounds]:
    """Return stretches of text in order, with overlapping ones merged."""
    merged: list[Bounds] = []
    for start, end in sorted(stretches):
        if merged and start < merged[-1][1]:
            first_start, first_end = merged[-1]
            merged[-1] = (first_start, max(first_end, end))
        else:
            merged.append((start, end))
    return merged


def count_tokens_by_sentence(bounds: Sequence[Bounds], tokens: np.ndarray) -> list[int]:
    """Return the number of tokens of each sentence.

    Args:
        bounds: Half-open character offsets of the sentences.
        tokens: (tokens, 2) half-open character offsets of all tokens, in order.
    """
    edges = np.array(bounds, dtype=np.int64).reshape(-1, 2)
    first_and_next_token = np.searchsorted(tokens[:, 0], edges)
    lengths: list[int] = np.diff(first_and_next_token, axis=1)[:, 0].tolist()
    return lengths


def _find_paragraphs(text: str) -> list[Bounds]:
    """Return lines, with wrapped lines joined."""
    paragraphs: list[Bounds] = []
    position = 0
    was_wrapped = False
    for line in text.split("\n"):
        start = position
        end = position + len(line)
        position = end + 1
        if was_wrapped and line.lstrip()[:1].islower():
            start, _ = paragraphs.pop()
        paragraphs.append((start, end))
        body = line.rstrip()
        was_wrapped = len(body) >= _MIN_WRAPPED and body[-1] not in ".:;!?"
    return paragraphs


def _find_sentence_ends(text: str, start: int, end: int) -> list[int]:
    """Return the offsets of sentence ends inside one paragraph."""
    ends: list[int] = []
    sentence_start = _skip_spaces(text, start, end)
    for match in _END_MARKS.finditer(text, start, end):
        if _ends_sentence(text, sentence_start, match, end):
            ends.append(match.end())
            sentence_start = _skip_spaces(text, match.end(), end)
    return ends


def _skip_spaces(text: str, start: int, end: int) -> int:
    """Return the offset of the first visible character of a stretch, or its end."""
    while start < end and text[start].isspace():
        start += 1
    return start


def _ends_sentence(
    text: str, start: int, match: re.Match[str], paragraph_end: int
) -> bool:
    """Return whether the marks in `match` end the sentence that began at `start`.

    The sentence is not copied, because it may be long and have many marks.
    """
    after = _skip_spaces(text, match.end(), paragraph_end)
    if after == paragraph_end:
        return False  # the end of the paragraph
    if _LIST_NUMBER.match(text, start, match.end()):
        return False  # "1. Aspirin"
    if not set("!?").isdisjoint(match.group()):
        return True

    head = text[max(start, match.start() - _MAX_WORD_BEFORE) : match.start()]
    match_before = _WORD_BEFORE.search(head)
    match_after = _WORD_AFTER.match(text, after, paragraph_end)
    return _full_stop_ends_sentence(
        match_before.group() if match_before else "",
        (match_after.group(1) if match_after else None) or "",
    )


def _full_stop_ends_sentence(before: str, after: str) -> bool:
    """Return whether a full stop between two words (or "") ends a sentence."""
    bare = before.casefold().replace(".", "")
    if bare in _WORDS["titles"]:
        return False
    is_dotted = "." in before and not before[0].isdigit()
    is_letter = len(bare) == 1 and bare.isalpha()
    if is_dotted or is_letter or bare in _WORDS["short"]:
        return after[:1].isupper() and after.casefold() in _WORDS["openers"]
    if after[:1].islower():
        return len(bare) >= _MIN_WORD and bare.isalpha() and before.islower()
    return True


def _trim(text: str, start: int, end: int) -> Bounds:
    """Trim white space from both ends of a stretch."""
    start = _skip_spaces(text, start, end)
    while end > start and text[end - 1].isspace():
        end -= 1
    return start, end
