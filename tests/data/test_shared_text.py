"""Text in common, against sets of words that are held in memory."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednotes.core.types import Document
from fednotes.data.formats import read
from fednotes.data.notes import read_notes
from fednotes.data.overlap import (
    MIN_WORDS,
    NGRAM,
    SharedText,
    index_documents,
    shared_text,
    shares_sentence,
)

Text = list[list[str]]  # sentences of words
sentence = st.lists(st.sampled_from("abc"), min_size=1, max_size=11)
texts = st.lists(st.lists(sentence, max_size=4), max_size=5)


def _written(text: Text) -> str:
    """Each sentence a paragraph of its own, so that there is no question where one ends."""
    return "\n\n".join(" ".join(words).capitalize() + "." for words in text)


def _document(text: Text) -> Document:
    return Document("d", _written(text))


def _long(text: Text) -> list[tuple[str, ...]]:
    return [tuple(words) for words in text if len(words) >= MIN_WORDS]


def _grams(text: Text) -> list[tuple[str, ...]]:
    words = [word for words in text for word in words]
    return [tuple(words[i : i + NGRAM]) for i in range(len(words) - NGRAM + 1)]


@settings(max_examples=200, deadline=None)
@given(texts, texts)
def test_counts_are_those_of_sets_of_words(notes: list[Text], documents: list[Text]) -> None:
    """Brute force: sentences and n-grams as tuples of words, looked up in Python sets."""
    known = {s for d in documents for s in _long(d)}
    grams = {g for d in documents for g in _grams(d)}
    shared = [sum(s in known for s in _long(note)) for note in notes]
    expected = SharedText(
        sum(len(_long(note)) for note in notes),
        sum(shared),
        sum(number > 0 for number in shared),
        sum(len(_grams(note)) for note in notes),
        sum(g in grams for note in notes for g in _grams(note)),
    )
    index = index_documents(map(_document, documents))
    assert shared_text(map(_written, notes), [index]) == (expected,)
    assert [shares_sentence(_written(n), index) for n in notes] == [n > 0 for n in shared]


def test_each_collection_is_counted_by_itself() -> None:
    words = "one two three four five six seven eight".split()
    a, b = index_documents([_document([words])]), index_documents([_document([words[::-1]])])
    found = shared_text([_written([words]), _written([["x"] * 20])], [a, b])
    assert found == (SharedText(2, 1, 1, 8, 0), SharedText(2, 0, 0, 8, 0))
    assert found[0] + found[1] == SharedText(4, 1, 1, 16, 0)
    assert shared_text([_written([words])], []) == ()


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("He was given 5 mg of warfarin on day two.", True),
        ("HE WAS  given 5 mg\tof warfarin (on day two)", True),
        ("He was given ５ mg of warfarin, on day two!", True),  # compatibility forms are one digit
        ("Plan:\n1. Rest.\n\nHe was given 5 mg of warfarin on day two. Then home.", True),
        ("He was given 6 mg of warfarin on day two.", False),
        ("He was given 5 mg of warfarin.", False),  # 7 words
        ("", False),
    ],
)
def test_case_space_and_punctuation_do_not_count(text: str, shared: bool) -> None:
    """Judged by hand."""
    index = index_documents([Document("d", "He was given 5 mg of warfarin on day two .")])
    assert shares_sentence(text, index) is shared


def test_a_document_is_cut_as_notes_are_and_as_its_source_does() -> None:
    """The source cuts after "Seen by", which no rule does; both cuts are found."""
    tail = "the surgeon of the third ward on day four"
    text = f"Seen by {tail}"
    document = Document("d", text, sentences=((0, 7), (8, len(text))))
    index = index_documents([document])
    assert shares_sentence(text, index)
    assert shares_sentence(tail, index)
    assert not shares_sentence(tail, index_documents([Document("d", text)]))


def test_what_is_cut_differently_is_found_by_its_ngrams() -> None:
    """20 words in a row, of which the other text has 16: 16 - 13 + 1 n-grams in common."""
    words = [f"w{number}" for number in range(20)]
    index = index_documents([_document([words])])
    (found,) = shared_text([_written([["x", *words[2:10]], [*words[10:18], "y"]])], [index])
    assert (found.shared_sentences, found.ngrams, found.shared_ngrams) == (0, 18 - 12, 4)


def test_very_long_and_odd_texts() -> None:
    """200,000 characters, without a stop and with many; marks only; half a million words."""
    rng = random.Random(1)
    words = [str(rng.randrange(10**6)) for _ in range(30_000)]
    index = index_documents([Document("d", " ".join(words))])
    assert len(index.ngrams) == len(words) - NGRAM + 1
    assert np.all(np.diff(index.ngrams.astype(object)) > 0)
    (found,) = shared_text([" ".join(words), "…" * 200_000, "\n" * 1000], [index])
    assert found.shared_ngrams == found.ngrams == len(words) - NGRAM + 1
    empty = index_documents([])
    assert shared_text(["a b c"], [empty]) == (SharedText(),)


@pytest.mark.corpora
def test_a_corpus_is_found_in_itself(corpora: Path) -> None:
    """Every n-gram of MACCROBAT's text files is in its documents; its sentences, by a plain scan.

    The scan takes whole lines that end in a full stop and hold no other one.
    """
    documents = read(corpora / "maccrobat")
    index = index_documents(documents)
    notes = [note.text for note in read_notes(corpora / "maccrobat", "text")][:40]
    (found,) = shared_text(notes, [index])
    assert found.shared_ngrams == found.ngrams > 10_000
    assert found.shared_sentences == found.sentences > 500
    assert found.notes_with_shared == 40
    lines = {
        line
        for document in documents
        for line in document.text.splitlines()
        if re.fullmatch(r"[A-Z][^.]+[a-z]{2}\.", line)
        and sum(map(str.isalpha, line.split())) >= MIN_WORDS
    }
    assert len(lines) > 100
    assert all(shares_sentence(line, index) for line in lines)
