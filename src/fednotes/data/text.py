"""Tokens and sentences of clinical text, by rule and with character offsets.

Nothing here is learnt from text, so every site cuts its notes the same way without
exchanging a word.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fednotes.core.parsing import shipped
from fednotes.core.types import Document, Span

# Accents and vowel signs written as separate characters are no "word characters" to
# Python's `re`; without them "café" in decomposed form would be cut in three.
_MARKS = "".join(
    chr(c) for c in range(0x300, 0x10000) if unicodedata.category(chr(c))[0] == "M"
)
_WORD = rf"(?:[^\W_][{_MARKS}]*)+"
TOKEN = re.compile(rf"{_WORD}|\S[{_MARKS}]*")  # exports write it down

Bounds = tuple[int, int]


class Passage(NamedTuple):
    """A text that is read together, and its words.

    words: (words, 2) character offsets in `text`, half-open, in order.
    """

    text: str
    words: np.ndarray

    @property
    def forms(self) -> list[str]:
        """The words as they are written."""
        return [self.text[start:end] for start, end in self.words.tolist()]


def tokenize(text: str) -> np.ndarray:
    """Words (letters and digits), and every other visible character by itself.

    Returns (tokens, 2) int32 character offsets, half-open, in order. An underscore is
    punctuation; a combining mark stays with the character before it. Letters and digits
    are not parted ("B12", "60mg"): see `docs/architecture.md` for the measurement.
    """
    spans = [match.span() for match in TOKEN.finditer(text)]
    return np.array(spans, dtype=np.int32).reshape(-1, 2)  # (tokens, 2)


def normalise(form: str) -> str:
    """A surface form for comparison: case folded, runs of whitespace made one space."""
    return " ".join(form.casefold().split())


_WORDS = {
    name: frozenset(own.split()) for name, own in shipped("data/words.toml").items()
}
# Not from within a run of marks, or a row of 200,000 dots would be tried from each of
# them.
_END = re.compile(r"(?<![.!?])[.!?]+[\"'\u201d\u2019)\]]*(?=\s)")
_BEFORE = re.compile(r"[^\s(\[\"'\u201c\u2018/,;]+$")
_NEXT = re.compile(r"[\"'\u201c\u2018(\[]*(\w+)?")
_LIST_NUMBER = re.compile(r"(?:\d{1,3}|[A-Za-z]|[ivxIVX]{1,4})[.)]+\Z")
_WRAPPED = 50  # characters; a shorter line was not broken for its width


def split_sentences(document: Document) -> list[Bounds]:
    """Sentences of a document as half-open character offsets, trimmed, none of them
    empty.

    The source's own sentences where it gives them; else lines, and within a line a rule
    that knows clinical abbreviations, numbers and list items. A long line that goes on
    in lower case was broken for its width and is joined. A gold span that touches a
    sentence lies wholly in it: none is cut, and one that takes in space around a
    sentence widens it.
    """
    if document.sentences:
        return join_cut(document.sentences, document.spans)
    text = document.text
    bounds: list[Bounds] = []
    for start, end in _paragraphs(text):
        cuts = [start, *_ends(text, start, end), end]
        bounds += pairwise(cuts)
    trimmed = (_trim(text, start, end) for start, end in bounds)
    return join_cut(
        [(start, end) for start, end in trimmed if start < end], document.spans
    )


def join_cut(bounds: Sequence[Bounds], spans: Iterable[Span]) -> list[Bounds]:
    """Sentences in order, joined or widened so that each span that touches one lies in
    one.

    A discontinuous span counts with all its fragments and what is between them.
    """
    ends = [end for _, end in bounds]
    parts = list(bounds)
    for span in spans:
        at = bisect_right(ends, span.start)
        if at < len(bounds) and bounds[at][0] < span.end:
            parts.append((span.start, span.end))
    return joined(parts)


def joined(pieces: Iterable[Bounds]) -> list[Bounds]:
    """Stretches in order, those put together that overlap."""
    found: list[Bounds] = []
    for start, end in sorted(pieces):
        if found and start < found[-1][1]:
            start, before = found.pop()
            end = max(before, end)
        found.append((start, end))
    return found


def _paragraphs(text: str) -> list[Bounds]:
    """Lines, with lines that were broken for their width put together."""
    parts: list[Bounds] = []
    position = 0
    wrapped = False
    for line in text.split("\n"):
        start, end = position, position + len(line)
        position = end + 1
        if wrapped and line.lstrip()[:1].islower():
            start = parts.pop()[0]
        parts.append((start, end))
        body = line.rstrip()
        wrapped = len(body) >= _WRAPPED and body[-1] not in ".:;!?"
    return parts


def _ends(text: str, start: int, end: int) -> list[int]:
    """Offsets inside one paragraph at which a sentence ends."""
    found: list[int] = []
    for match in _END.finditer(text, start, end):
        if _is_end(text, found[-1] if found else start, match, end):
            found.append(match.end())
    return found


def _is_end(text: str, start: int, match: re.Match[str], end: int) -> bool:
    """Whether the punctuation in `match` ends the sentence that began at `start`."""
    after = match.end()
    while after < end and text[after].isspace():
        after += 1
    if after == end:
        return False  # the paragraph's own end
    head = text[max(start, match.start() - 40) : match.start()]
    if _LIST_NUMBER.match(text[start : match.end()].strip()):
        return False  # "1. Aspirin"
    if not set("!?").isdisjoint(match.group()):
        return True
    following = _NEXT.match(text, after, end)
    word = (following.group(1) if following else None) or ""
    found = _BEFORE.search(head)
    before = found.group() if found else ""
    short = before.casefold().replace(".", "")
    if short in _WORDS["titles"]:
        return False
    dotted = "." in before and not before[0].isdigit()
    if dotted or short in _WORDS["short"] or (len(short) == 1 and short.isalpha()):
        return word[:1].isupper() and word.casefold() in _WORDS["openers"]
    if word[:1].islower():
        return len(short) >= 3 and short.isalpha() and before.islower()
    return True


def _trim(text: str, start: int, end: int) -> Bounds:
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return start, end
