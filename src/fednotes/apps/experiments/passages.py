"""Draw passages of consecutive sentences from notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from fednotes.core.errors import ParameterError
from fednotes.core.seeds import rng_of
from fednotes.data import clinical
from fednotes.data.text import tokenize


def draw_passages(
    notes: Iterable[str], sample: int, length: int, seed: int
) -> list[str]:
    """Draw passages, each of consecutive sentences of one note.

    All notes are equally likely. A second passage comes from a note only after each
    drawn note has contributed one. At most `sample` notes are in memory.

    Args:
        notes: The texts of the notes.
        sample: Number of passages; fewer are drawn if the notes have no more.
        length: Minimum number of words of a passage; only the last one of a note is
            shorter.
        seed: Seed of the draws. The same notes, numbers and seed give the same
            passages.

    Raises:
        ParameterError: `sample` or `length` is less than 1.
    """
    if sample < 1 or length < 1:
        raise ParameterError(
            f"`sample` {sample}, `length` {length}: give 1 or more of each"
        )
    drawn = _draw_notes(notes, sample, rng_of(seed, "attention", "notes"))
    rng = rng_of(seed, "attention", "stretches")
    queues = []
    for note in drawn:
        passages = list(_join_into_passages(clinical.list_note_sentences(note), length))
        queues.append([passages[place] for place in rng.permutation(len(passages))])

    result: list[str] = []
    while len(result) < sample and any(queues):
        result += [queue.pop() for queue in queues if queue]
    return result[:sample]


def _draw_notes(
    notes: Iterable[str], sample: int, rng: np.random.Generator
) -> list[str]:
    """Draw notes by reservoir sampling (Vitter's algorithm R)."""
    drawn: list[str] = []
    for number, note in enumerate(notes):
        if len(drawn) < sample:
            drawn.append(note)
            continue
        place = int(rng.integers(number + 1))
        if place < sample:
            drawn[place] = note
    return drawn


def _join_into_passages(sentences: Sequence[str], length: int) -> Iterator[str]:
    """Join sentences into passages of at least `length` words.

    The last sentences become a passage if they have at least half as many words, or if
    the note has no other passage; otherwise they are dropped. A word is at least one
    token, so models truncate all full passages to the same length.
    """
    passage: list[str] = []
    words = 0
    is_first = True
    for sentence in sentences:
        passage.append(sentence)
        words += len(tokenize(sentence))
        if words >= length:
            yield " ".join(passage)
            passage = []
            words = 0
            is_first = False
    if passage and (is_first or words >= length / 2):
        yield " ".join(passage)
