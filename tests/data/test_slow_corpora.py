"""Small corpora that once took minutes, because the time grew with a square.

Each file would have less than 4 MB. Readers are tested in `test_bombs.py`; these are
the steps after them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from time_limits import processor_time_below

from fednotes.core.types import Document, Span, TagSet
from fednotes.data.batches import encode_corpus
from fednotes.data.checks import find_shared_notes
from fednotes.data.formats._comparison import count_differences
from fednotes.data.split import mask_overlap, split_documents
from fednotes.data.stats import compute_corpus_stats
from fednotes.data.tags import flatten
from fednotes.data.text import split_sentences


def _flatten_mentions_that_all_overlap() -> None:
    pairs = product(range(170), range(170, 340))
    spans = [Span(start, end, "A") for start, end in pairs]
    flat, counts = flatten(spans, "outermost")
    assert flat == (Span(0, 339, "A"),)
    assert counts.nested == len(spans) - 1
    assert counts.crossing == len(spans) - 2  # without the longest and the shortest


def _count_sentences_with_mentions() -> None:
    number = 80_000
    text = "No.\n" * number
    spans = tuple(Span(4 * n, 4 * n + 2, "A") for n in range(number // 2, number))
    stats = compute_corpus_stats({"a": [Document("a", text, spans)]})
    assert stats["sites"][0]["annotated_sentences"] == number // 2


def _split_notes_of_one_patient() -> None:
    notes = [Document(f"a{n}", "No", patient="p") for n in range(60_000)]
    notes += [Document("b", "No", patient="q")]
    parts = split_documents(notes, {"train": 0.5, "test": 0.5}, by="patient")
    assert sorted(map(len, parts.values())) == [1, 60_000]


def _compare_notes_of_one_id() -> None:
    parts = {
        part: [Document("a", f"{part} {n}") for n in range(20_000)]
        for part in ("train", "test")
    }
    assert list(find_shared_notes(parts, "site")) == []


def _split_a_sentence_of_many_full_stops() -> None:
    text = "dr. " * 500_000
    assert split_sentences(Document("a", text)) == [(0, len(text) - 1)]


def _count_mentions_that_a_format_moves() -> None:
    number = 20_000
    text = "abcd " * number
    before, after = (
        Document("a", text, tuple(Span(5 * n, 5 * n + e, "A") for n in range(number)))
        for e in (3, 4)
    )
    assert count_differences([before], [after]) == {"bounds of mentions": number}


def _mask_many_mentions() -> None:
    number = 20_000
    text = "abcd " * number
    spans = tuple(Span(5 * n, 5 * n + 4, "A") for n in range(number))
    note = Document("a", text, (*spans, Span(0, len(text), "B")))
    (masked,) = mask_overlap([note], [[Document("b", "abcd", spans[:1])]], 1.0)
    assert masked.text == "MASK " * number
    assert masked.spans == (Span(0, len(text), "B"),)


def _cut_a_sentence_of_many_tokens() -> None:
    encoded = encode_corpus([Document("a", "," * 2_000_000)], TagSet(("A",)))
    assert encoded.sentences == 7_813


@pytest.mark.parametrize(
    "do",
    [
        _flatten_mentions_that_all_overlap,
        _count_sentences_with_mentions,
        _split_notes_of_one_patient,
        _compare_notes_of_one_id,
        _split_a_sentence_of_many_full_stops,
        _count_mentions_that_a_format_moves,
        _mask_many_mentions,
        _cut_a_sentence_of_many_tokens,
    ],
)
def test_the_time_does_not_grow_with_a_square(do: Callable[[], None]) -> None:
    with processor_time_below(8):
        do()
