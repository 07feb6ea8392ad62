"""Cut clinical text into tokens and sentences, by rule and with character offsets.

Nothing here is learnt from text, so every site cuts its notes in the same way without
exchanging a word.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fednotes.core.parsing import shipped
from fednotes.core.types import Document, Span

# Python's `re` does not count accents and vowel signs that are characters of their own
# as "word characters"; without them, "café" in decomposed form would be cut in three.
_MARKS = "".join(
    chr(c) for c in range(0x300, 0x10000) if unicodedata.category(chr(c))[0] == "M"
)
_WORD = rf"(?:[^\W_][{_MARKS}]*)+"
TOKEN = re.compile(rf"{_WORD}|\S[{_MARKS}]*")  # exports contain it

Bounds = tuple[int, int]


class Passage(NamedTuple):
    """A text that is read together, and its words.

    Attributes:
        text: The text.
        words: (words, 2) half-open character offsets in `text`, in order.
    """

    text: str
    words: np.ndarray

    @property
    def forms(self) -> list[str]:
        """The words as they are written."""
        return [self.text[start:end] for start, end in self.words.tolist()]


def tokenize(text: str) -> np.ndarray:
    """Return the words of a text, and each other visible character as a token.

    A word consists of letters and digits, which are not separated ("B12", "60mg";
    `docs/architecture.md` has the measurement). An underscore is punctuation. A
    combining mark belongs to the character before it.

    Returns:
        (tokens, 2) int32 half-open character offsets, in order.
    """
    if len(text) >= _LONG:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        if codes.max() < _CODES:
            kinds = _character_kinds()[codes]
            if not (kinds == _MARK).any():
                return _tokenize_kinds(kinds)
    bounds = [match.span() for match in TOKEN.finditer(text)]
    return np.array(bounds, dtype=np.int32).reshape(-1, 2)


_LONG = 256  # characters of a text for which arrays are faster than the pattern
_CODES = 0x2100  # Latin, Greek, Cyrillic, ... and general punctuation
_SPACE, _LETTER, _OTHER, _MARK = range(4)


@lru_cache(maxsize=1)
def _character_kinds() -> np.ndarray:
    """Return (_CODES,) uint8: the kind of each character, as `TOKEN` sees it."""
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
    """Return what `tokenize` returns for a text without combining marks.

    Args:
        kinds: (characters,) the kind of each character.
    """
    is_letter = kinds == _LETTER
    continues = is_letter[1:] & is_letter[:-1]  # the word of the character before
    is_start = kinds != _SPACE
    is_end = is_start.copy()
    is_start[1:] &= ~continues
    is_end[:-1] &= ~continues
    bounds = np.flatnonzero(is_start), np.flatnonzero(is_end) + 1
    return np.stack(bounds, axis=1).astype(np.int32)


def normalise(form: str) -> str:
    """Return a surface form for comparison: case folded, white space as one space."""
    return " ".join(form.casefold().split())


_WORDS = {
    name: frozenset(words.split()) for name, words in shipped("data/words.toml").items()
}
# The look-behind keeps a match from starting within a run of marks; otherwise a row of
# 200,000 dots would be tried from each of them.
_END_MARKS = re.compile(r"(?<![.!?])[.!?]+[\"'\u201d\u2019)\]]*(?=\s)")
_WORD_BEFORE = re.compile(r"[^\s(\[\"'\u201c\u2018/,;]+$")
_WORD_AFTER = re.compile(r"[\"'\u201c\u2018(\[]*(\w+)?")
_LIST_NUMBER = re.compile(r"(?:\d{1,3}|[A-Za-z]|[ivxIVX]{1,4})[.)]+\Z")
_MAX_WORD_BEFORE = 40  # characters in which the word before a mark is looked for
_MIN_WRAPPED = 50  # characters; a shorter line was not broken because of its width
_MIN_WORD = 3  # letters of a word that may end a sentence before a lower-case word


def split_sentences(document: Document) -> list[Bounds]:
    """Return the sentences of a document, trimmed; none of them is empty.

    If the source gives sentences, these are used. Otherwise lines are cut by a rule
    that knows clinical abbreviations, numbers and list items. A long line that
    continues in lower case was broken because of its width and is joined to the next.
    No sentence cuts a gold span that touches it: sentences are joined, or widened to
    the white space that a span includes.

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
    """Return sentences, joined or widened so that no span is cut.

    A span that touches no sentence changes nothing. A discontinuous span counts from
    its first to its last fragment.

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
    """Return stretches of text in order; those that overlap become one."""
    merged: list[Bounds] = []
    for start, end in sorted(stretches):
        if merged and start < merged[-1][1]:
            first_start, first_end = merged[-1]
            merged[-1] = (first_start, max(first_end, end))
        else:
            merged.append((start, end))
    return merged


def _find_paragraphs(text: str) -> list[Bounds]:
    """Return lines; those that were broken because of their width are joined."""
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
    """Return the offsets inside one paragraph at which a sentence ends."""
    ends: list[int] = []
    sentence_start = start
    for match in _END_MARKS.finditer(text, start, end):
        if _ends_sentence(text, sentence_start, match, end):
            sentence_start = match.end()
            ends.append(sentence_start)
    return ends


def _ends_sentence(
    text: str, start: int, match: re.Match[str], paragraph_end: int
) -> bool:
    """Return whether the marks in `match` end the sentence that began at `start`."""
    after = match.end()
    while after < paragraph_end and text[after].isspace():
        after += 1
    if after == paragraph_end:
        return False  # the paragraph ends here anyway
    if _LIST_NUMBER.match(text[start : match.end()].strip()):
        return False  # "1. Aspirin"
    if not set("!?").isdisjoint(match.group()):
        return True

    head = text[max(start, match.start() - _MAX_WORD_BEFORE) : match.start()]
    found_before = _WORD_BEFORE.search(head)
    found_after = _WORD_AFTER.match(text, after, paragraph_end)
    return _full_stop_ends_sentence(
        found_before.group() if found_before else "",
        (found_after.group(1) if found_after else None) or "",
    )


def _full_stop_ends_sentence(before: str, after: str) -> bool:
    """Return whether a full stop between two words, or none (""), ends a sentence."""
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
    """Return a stretch without the white space at its ends."""
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return start, end
