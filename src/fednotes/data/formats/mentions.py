"""Checks of mentions against their text, and splitting of text into words.

The functions are shared by readers and writers of corpora. Offsets are half-open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from fednotes.core import bounds
from fednotes.core.errors import DataError
from fednotes.core.types import Document, Offsets, Span
from fednotes.data.text import normalise, tokenize

_SPARE_WHITE_SPACE = 1000  # characters of white space that may be missing in a form


def require_in_text(start: int, end: int, length: int) -> tuple[int, int]:
    """Return offsets of a stretch of a text with `length` characters.

    Raises:
        DataError: The offsets are invalid.
    """
    if not 0 <= start < end <= length:
        raise DataError(
            f"{start}:{end} is not a span of the text ({length} characters)"
        )
    return start, end


def is_same_text(left: str, right: str) -> bool:
    """Return whether two strings are equal except for runs of white space."""
    return left == right or left.split() == right.split()


def is_far_longer(pieces: Iterable[tuple[int, int]], form: str) -> bool:
    """Return whether pieces of a text are far longer than the form they should have.

    This check comes before slicing the text, so that many long mentions take little
    time.
    """
    length = sum(end - start for start, end in pieces)
    return length > 2 * len(form) + _SPARE_WHITE_SPACE


def has_form(text: str, pieces: Sequence[tuple[int, int]], form: str) -> bool:
    """Return whether pieces of a text equal a form, except for white space.

    The running time grows with the form, not with the pieces.
    """
    if is_far_longer(pieces, form):
        return False
    return is_same_text(" ".join(text[start:end] for start, end in pieces), form)


def require_short_mentions(document: Document) -> None:
    """Check a document before the text of each of its mentions is written.

    Raises:
        DataError: The mentions have more than `bounds.PACKED_FREE` characters in total,
            and more than `bounds.PACKED_RATIO` times those of the text.
    """
    limit = max(bounds.PACKED_FREE, bounds.PACKED_RATIO * len(document.text))
    if sum(span.end - span.start for span in document.spans) > limit:
        raise DataError(
            f"the mentions of a document have more than {limit:,} characters in all, "
            "and this format repeats each mention's text: write jsonl, which does not"
        )


def is_normal_form(text: str, start: int, end: int, form: str) -> bool:
    """Return whether a stretch of text equals a form, except for case and white space.

    The running time grows with the form, not with the stretch.
    """
    if is_far_longer([(start, end)], form):
        return False
    return normalise(text[start:end]) == normalise(form)


def count_mismatches(
    path: Path, text: str, mentions: Sequence[tuple[Span, str, int]], name: str
) -> dict[str, int]:
    """Count the mentions whose form differs from the text at their offsets.

    Args:
        path: The file, for messages.
        text: The document's text.
        mentions: Each mention, its form according to the file, and its line.
        name: The name of the mentions in the message, such as "concepts".

    Returns:
        {"mismatched": number} for a document's meta; {} if none differs.

    Raises:
        DataError: Most of them differ, so it is probably the wrong text.
    """
    wrong_lines = [
        line
        for span, form, line in mentions
        if not is_normal_form(text, span.start, span.end, form)
    ]
    if 2 * len(wrong_lines) > len(mentions):
        raise DataError.at(
            path,
            wrong_lines[0],
            f"{len(wrong_lines)} of {len(mentions)} {name} do not match the "
            "text: check that the text belongs to these annotations",
        )
    return {"mismatched": len(wrong_lines)} if wrong_lines else {}


def lay_out(sentences: Sequence[Sequence[str]]) -> tuple[str, Offsets, Offsets]:
    """Return the text of some words, and the offsets of its sentences and words.

    Words are joined by spaces, sentences by line ends.
    """
    sentence_offsets: list[tuple[int, int]] = []
    tokens: list[tuple[int, int]] = []
    at = 0
    for words in sentences:
        start = at
        for word in words:
            tokens.append((at, at + len(word)))
            at += len(word) + 1
        sentence_offsets.append((start, at - 1))
    text = "\n".join(" ".join(words) for words in sentences)
    return text, tuple(sentence_offsets), tuple(tokens)


def cut_into_words(document: Document) -> list[tuple[int, int, bool]]:
    """Split a text into words that cover all of it, as in spaCy.

    Mentions begin and end at word boundaries.

    Returns:
        The start and end of each word, and whether one space, which belongs to no word,
        follows it.
    """
    pieces = [piece for span in document.spans for piece in span.pieces]
    starts = {start for start, _ in pieces}
    ends = {end for _, end in pieces}
    text = document.text
    tokens = document.tokens or tokenize(text).tolist()
    edges = sorted({0, len(text), *starts, *ends}.union(*tokens))

    def is_separator(start: int) -> bool:
        """Return whether there is a space with which no mention begins or ends."""
        return text[start] == " " and start not in starts and start + 1 not in ends

    words: list[tuple[int, int, bool]] = []
    for start, end in pairwise(edges):
        if is_separator(start) and words and not text[start - 1].isspace():
            word_start, word_end, has_space = words[-1]
            if not has_space:
                words[-1] = (word_start, word_end, True)
                start += 1
        if start < end:
            words.append((start, end, False))
    return words
