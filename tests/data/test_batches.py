"""Encoded corpora and mini-batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span, TagSet
from fednotes.data import batches
from fednotes.data.batches import buckets, encode_corpus, without_gold

BIO = TagSet(("ADR", "Drug"))


def _document(text: str, *mentions: tuple[str, str], sentences: bool = False) -> Document:
    """Spans at each mention's first occurrence."""
    spans = tuple(
        Span(text.index(form), text.index(form) + len(form), label) for form, label in mentions
    )
    whole = ((0, len(text)),) if sentences else ()
    return Document("d", text, spans, sentences=whole)


def test_arrays_describe_the_tokens() -> None:
    """By hand: two sentences over two documents, forms shared between them."""
    documents = [
        _document(
            "Aspirin causes severe headache.", ("Aspirin", "Drug"), ("severe headache", "ADR")
        ),
        _document("No headache."),
    ]
    encoded = encode_corpus(documents, BIO)
    assert encoded.sentence_document.tolist() == [0, 1]
    assert encoded.bounds.tolist() == [0, 5, 8]
    assert encoded.lengths.tolist() == [5, 3]
    assert encoded.forms == ("Aspirin", "causes", "severe", "headache", ".", "No")
    assert encoded.form.tolist() == [0, 1, 2, 3, 4, 5, 3, 4]
    names = [BIO.tags[t] for t in encoded.tags]
    assert names == ["B-Drug", "O", "B-ADR", "I-ADR", "O", "O", "O", "O"]
    owner = np.repeat(encoded.sentence_document, encoded.lengths)
    for token, (start, end) in enumerate(encoded.offsets):
        text = documents[owner[token]].text
        assert text[start:end] == encoded.forms[encoded.form[token]]


def test_empty_documents_and_no_documents() -> None:
    empty = encode_corpus([], BIO)
    assert empty.sentences == 0
    assert empty.offsets.shape == (0, 2)
    blank = encode_corpus([Document("a", ""), Document("b", " \n\t\n")], BIO)
    assert blank.sentences == 0
    assert blank.bounds.tolist() == [0]


def test_a_gold_span_outside_every_sentence_is_left_out() -> None:
    text = "Nausea. Header line"
    spans = (Span(0, 6, "ADR"), Span(8, 14, "ADR"))
    encoded = encode_corpus([Document("d", text, spans, sentences=((0, 7),))], BIO)
    assert [BIO.tags[tag] for tag in encoded.tags] == ["B-ADR", "O"]


@pytest.mark.parametrize("scheme", ["BIO", "BIOES", "IO"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_long_sentences_are_cut_between_entities(scheme: str, data: st.DataObject) -> None:
    """Brute force: the pieces joined are the sentence encoded without a limit, and no entity
    has tokens in two pieces; a piece is over the limit only by one entity that fills it."""
    words = data.draw(st.integers(1, 40))
    limit = data.draw(st.integers(1, 8))
    text = " ".join(f"w{i:02d}" for i in range(words))
    spans, token = [], 0
    while token < words:
        size = data.draw(st.integers(1, 6))
        last = min(token + size, words)
        if data.draw(st.booleans()):
            spans.append(Span(4 * token, 4 * last - 1, "ADR"))
        token = last
    document = Document("d", text, tuple(spans), sentences=((0, len(text)),))
    tagset = TagSet(("ADR",), scheme)  # type: ignore[arg-type]
    whole = encode_corpus([document], tagset, max_tokens=1000)
    cut = encode_corpus([document], tagset, max_tokens=limit)
    assert cut.tags.tolist() == whole.tags.tolist()
    assert cut.offsets.tolist() == whole.offsets.tolist()
    assert whole.sentences == 1
    pieces = list(zip(cut.bounds[:-1].tolist(), cut.bounds[1:].tolist(), strict=True))
    assert pieces[-1][1] == words
    for span in spans:
        first, last = span.start // 4, (span.end + 1) // 4
        assert sum(first < b and a < last for a, b in pieces) == 1
        holder = next((a, b) for a, b in pieces if a <= first < b)
        assert last <= holder[1]
    longest = max([0, *((s.end + 1) // 4 - s.start // 4 for s in spans)])
    assert max(b - a for a, b in pieces) <= max(limit, longest)


def test_an_unknown_label_is_refused() -> None:
    with pytest.raises(DataError, match="'Dose' is not in the tag set"):
        encode_corpus([_document("5 mg", ("5 mg", "Dose"))], BIO)


def test_without_gold_takes_the_spans_only() -> None:
    document = _document("Aspirin.", ("Aspirin", "Drug"))
    (bare,) = without_gold([document])
    assert bare.spans == ()
    assert bare.text == document.text


@given(
    lengths=st.lists(st.integers(1, 60), max_size=300),
    batch=st.integers(1, 17),
    window=st.integers(1, 9),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_an_epoch_holds_every_sentence_once(
    lengths: list[int], batch: int, window: int, seed: int
) -> None:
    """Counting: the batches' indices together are 0..n-1, and all but one batch are full."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "_WINDOW", window)
        epoch, again = (
            buckets(np.array(lengths, dtype=np.int64), batch, np.random.default_rng(seed))
            for _ in range(2)
        )
    together = sorted(int(i) for indices in epoch for i in indices)
    assert together == list(range(len(lengths)))
    assert sum(len(indices) != batch for indices in epoch) <= 1
    assert all(0 < len(indices) <= batch for indices in epoch)
    assert [a.tolist() for a in epoch] == [b.tolist() for b in again]


def test_batches_hold_like_lengths_and_vary() -> None:
    """Padding of 3,200 lengths from 1 to 60: random batches of 32 fill about half a padded
    matrix (mean 30 of a maximum near 60); bucketed ones nearly all of it."""
    lengths = np.random.default_rng(0).integers(1, 61, size=3200)
    first = buckets(lengths, 32, np.random.default_rng(1))
    second = buckets(lengths, 32, np.random.default_rng(2))
    padded = sum(lengths[b].max() * len(b) for b in first)
    assert lengths.sum() / padded > 0.95
    assert {frozenset(b.tolist()) for b in first} != {frozenset(b.tolist()) for b in second}
    means = [lengths[b].mean() for b in first]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.4  # not from short to long
