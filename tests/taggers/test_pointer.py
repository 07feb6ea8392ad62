"""Conversion of entities to ids and back, their grammar and repair, pointer corpora."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.types import Document, Span, TagSet
from fednotes.data.text import Passage
from fednotes.encoders.reading import Pieces
from fednotes.taggers.pointer import (
    BEGIN,
    END,
    FIRST_LABEL,
    PAD,
    Grammar,
    PointerCorpus,
    PointerLimits,
    encode_entities,
    encode_pointers,
    find_first_position,
    repair,
    sort_entities,
)
from fednotes.taggers.prompt_bart import Targets

TYPES = ("Drug", "ADE", "Disease")
DRUG, ADE, DISEASE = range(FIRST_LABEL, FIRST_LABEL + 3)
ZERO = find_first_position(3)  # id of sub-word 0
TAGS = TagSet(TYPES)
ROOM = PointerLimits(subwords=1000, entities=300)

Entities = st.sets(
    st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 2)).map(
        lambda e: (min(e[:2]), max(e[:2]), e[2])
    ),
    max_size=8,
)


def figure_2() -> tuple[str, list[tuple[str, str]]]:
    text = "Clozapine induced akathisia in children with schizophrenia ."
    return text, [
        ("Clozapine", "Drug"),
        ("akathisia", "ADE"),
        ("schizophrenia", "Disease"),
    ]


def letters(passages: Sequence[Passage]) -> Pieces:
    """Return sub-words of up to five letters, with the first letter as id; "~" has
    none."""
    ids, lengths, edges = list[int](), list[int](), list[tuple[int, int]]()
    for passage in passages:
        before = len(ids)
        for word in passage.forms:
            start = len(ids)
            ids += [ord(word[i]) for i in range(0, len(word), 5)] if word != "~" else []
            edges.append((start, len(ids) - 1))
        lengths.append(len(ids) - before)
    first, last = np.array(edges, np.int64).reshape(-1, 2).T
    every = np.ones(len(ids), bool)
    return Pieces(
        np.array(ids, np.int32), np.array(lengths, np.int64), first, last, every
    )


def document(
    text: str, mentions: Sequence[tuple[str, str]], name: str = "d"
) -> Document:
    """Return a document with each entity where its words first occur."""
    spans = [
        Span(text.index(w), text.index(w) + len(w), label) for w, label in mentions
    ]
    return Document(name, text, tuple(spans))


def test_the_example_of_figure_2_is_encoded_as_in_the_paper() -> None:
    """The figure's own example: [0, 1, Drug] and what becomes of "Drug, Drug"."""
    text, mentions = figure_2()
    corpus = encode_pointers([document(text, mentions)], TAGS, letters, ROOM)
    # cloza pine | induc ed | akath isia | in | child ren | with | schiz ophre nia | .
    assert corpus.entities.tolist() == [[0, 1, 0], [4, 5, 1], [10, 12, 2]]
    target = encode_entities(corpus.entities, 3).tolist()
    drug, ade, disease = (0, 1, DRUG), (4, 5, ADE), (10, 12, DISEASE)
    triples = [(a + ZERO, b + ZERO, t) for a, b, t in (drug, ade, disease)]
    assert target == [i for entity in triples for i in entity] + [END]
    # What the decoder is to write is the same, padded behind; without an entity END
    # alone.
    encoded = encode_pointers(
        [document(text, mentions), document("no pain", [])], TAGS, letters, ROOM
    )
    ids = Targets.of(encoded, np.array([1, 0]), "cpu").ids.tolist()
    assert ids == [[END] + [PAD] * 9, target]
    # The global model's output: the second "Drug" stands for no span.
    output = [*triples[0], DRUG, *triples[2], END]
    assert repair(output, 3, 14).tolist() == [[0, 1, 0], [10, 12, 2]]
    assert corpus.make_spans(0, repair(target, 3, 14)) == list(
        corpus.documents[0].spans
    )


def test_ids_have_the_documented_layout() -> None:
    """The ids as the module's text lists them."""
    assert (BEGIN, END, PAD, FIRST_LABEL, find_first_position(5)) == (0, 1, 2, 3, 8)
    assert encode_entities(np.zeros((0, 3), int), 5).tolist() == [END]
    assert encode_entities(np.array([[2, 4, 3]]), 5).tolist() == [10, 12, 6, END]


@given(Entities)
def test_entities_survive_a_round_trip(entities: set[tuple[int, int, int]]) -> None:
    """Any set of entities, nested, adjacent or crossing, comes back; order by Python's
    sort."""
    entity_rows = np.array(sorted(entities)).reshape(-1, 3)
    ids = encode_entities(entity_rows, 3)
    assert len(ids) == 3 * len(entities) + 1
    ordered = sorted(entities, key=lambda e: (e[0], -e[1], e[2]))
    assert [tuple(e) for e in repair(ids.tolist(), 3, 10).tolist()] == ordered
    assert [tuple(e) for e in sort_entities(entity_rows[::-1]).tolist()] == ordered


@given(st.lists(st.integers(0, ZERO + 5), max_size=25))
@settings(max_examples=300)
def test_repair_of_ids_equals_a_regular_expression(ids: list[int]) -> None:
    """Any output as letters (p position, l label): exactly "pp" before an "l" is a
    span."""
    body = [
        i
        for i in ids[: ids.index(END) if END in ids else None]
        if i not in (BEGIN, PAD)
    ]
    text = "".join("p" if i >= ZERO else "l" for i in body)
    expected = set()
    for match in re.finditer(r"(?<!p)(?=ppl)", text):
        start, end, label = body[match.start() : match.start() + 3]
        if start <= end < ZERO + 5:
            expected.add((start - ZERO, end - ZERO, label - FIRST_LABEL))
    repaired = [tuple(e) for e in repair(ids, 3, 5).tolist()]
    assert set(repaired) == expected
    assert repaired == sorted(repaired, key=lambda e: (e[0], -e[1], e[2]))


def paths(grammar: Grammar, prefix: tuple[int, ...] = ()) -> set[tuple[int, ...]]:
    """Return all complete sequences of a grammar, by trying every allowed id."""
    sequences: set[tuple[int, ...]] = set()
    options = grammar.find_allowed()[0].nonzero().squeeze(1)
    assert len(options), "the grammar leads into a dead end"
    for option in options:
        ids = (*prefix, int(option))
        sequences |= (
            {ids} if option == END else paths(grammar.advance(option[None]), ids)
        )
    return sequences


@pytest.mark.parametrize(("types", "max_entities"), [(1, 4), (2, 2)])
def test_the_grammar_allows_exactly_the_valid_targets(
    types: int, max_entities: int
) -> None:
    """Every set of entities on words of 2, 1 and 1 sub-words, and nothing else."""
    # the last column is padding
    starts = torch.tensor([[True, False, True, True, False]])
    ends = torch.tensor([[False, True, True, True, False]])
    spans = [(a, b) for a, b in product((0, 2, 3), (1, 2, 3)) if a <= b]
    every = [(*span, t) for span in spans for t in range(types)]
    limit = min(max_entities, 3)  # no more entities than words
    expected = {
        tuple(encode_entities(np.array(chosen).reshape(-1, 3), types).tolist())
        for size in range(limit + 1)
        for chosen in combinations(every, size)
    }
    assert paths(Grammar.begin(types, starts, ends, max_entities)) == expected


def test_the_grammar_treats_sentences_of_a_batch_independently() -> None:
    """Sentences side by side as alone, and after one has left."""
    starts = torch.tensor(
        [[True, True, True], [True, False, False], [True, True, False]]
    )
    ends = torch.tensor([[True, True, True], [False, True, False], [True, True, False]])
    chosen = torch.tensor([[5, 5, 6], [7, 6, 6], [4, 3, 4]])  # (step, sentence)
    batch = Grammar.begin(2, starts, ends, 9)
    alone = [Grammar.begin(2, starts[i : i + 1], ends[i : i + 1], 9) for i in range(3)]
    for step in chosen:
        for i in range(3):
            assert torch.equal(batch.find_allowed()[i], alone[i].find_allowed()[0])
            alone[i] = alone[i].advance(step[i : i + 1])
        batch = batch.advance(step)
    remaining = batch.select_rows(torch.tensor([0, 2]))
    assert torch.equal(
        remaining.find_allowed(),
        torch.cat([alone[0].find_allowed(), alone[2].find_allowed()]),
    )


def test_spans_of_every_kind_are_encoded_as_by_hand() -> None:
    """What becomes of each kind of span, by hand."""
    text = "lung cancer stage two ~ pain, pain"
    spans = (
        Span(0, 11, "Disease"),
        Span(0, 4, "ADE"),
        Span(5, 11, "ADE"),
        Span(5, 11, "ADE"),  # twice
        Span(13, 20, "Drug"),  # inside two words: snapped to "stage two"
        Span(22, 23, "Drug"),  # on a word of no sub-words
        Span(24, 34, "Disease", fragments=((24, 28), (30, 34))),
    )
    corpus = encode_pointers([Document("d", text, spans)], TAGS, letters, ROOM)
    # lung | cance r | stage | two | pain | , | pain
    assert corpus.entities.tolist() == [
        [0, 2, 2],
        [0, 0, 1],
        [1, 2, 1],
        [3, 4, 0],
        [5, 7, 2],
    ]
    assert corpus.known == frozenset(TYPES)
    assert [text[a:b] for a, b in corpus.encoded.offsets] == list(
        re.findall(r"\w+|,", text)
    )


@st.composite
def long_documents(draw: st.DrawFn) -> Document:
    """Return sentences of 40 words, with spans that do not cross each other."""
    words = draw(
        st.lists(st.sampled_from(["a", "bravo", "charlies"]), min_size=40, max_size=40)
    )
    at = np.cumsum([0] + [len(w) + 1 for w in words])
    first = draw(st.lists(st.integers(0, 37), max_size=12, unique=True))
    spans = [
        Span(int(at[i]), int(at[i + n]) - 1, TYPES[i % 3])
        for i in sorted(first)
        for n in ([2, 1] if i % 2 == 0 else [1])
    ]
    return Document("d", " ".join(words), tuple(spans))


@given(long_documents(), st.integers(4, 12), st.integers(3, 6))
def test_long_sentences_are_split_without_loss(
    note: Document, room: int, entities: int
) -> None:
    """Pieces obey the limits, their sub-words joined are the sentence's, all entities
    are there.

    Against the same document without limits.
    """
    uncut = encode_pointers([note], TAGS, letters, ROOM)
    cut = encode_pointers([note], TAGS, letters, PointerLimits(room, entities))
    assert uncut.sentences == 1 < cut.sentences
    assert cut.lengths.max() <= room
    assert np.diff(cut.entity_bounds).max(initial=0) <= entities
    np.testing.assert_array_equal(cut.ids, uncut.ids)
    np.testing.assert_array_equal(cut.encoded.offsets, uncut.encoded.offsets)
    assert found_in(cut) == found_in(uncut) == sorted(note.spans)


def found_in(corpus: PointerCorpus) -> list[Span]:
    """Return all entities as spans of the documents."""
    spans: list[Span] = []
    for s in range(corpus.sentences):
        part = slice(corpus.entity_bounds[s], corpus.entity_bounds[s + 1])
        spans += corpus.make_spans(s, corpus.entities[part])
    return sorted(spans)


def test_words_and_entities_beyond_the_limits_are_dropped() -> None:
    """A word keeps its first sub-words; an entity its first piece; too many entities
    go."""
    text = "abcdefghijklmnopqrstuvwxyz one"
    corpus = encode_pointers(
        [document(text, [(text, "Drug")])], TAGS, letters, PointerLimits(3, 9)
    )
    assert corpus.lengths.tolist() == [3, 1]
    assert found_in(corpus) == [Span(0, 26, "Drug")]
    nest = document("one", [("one", "Drug"), ("one", "ADE"), ("one", "Disease")])
    corpus = encode_pointers([nest], TAGS, letters, PointerLimits(3, 2))
    assert found_in(corpus) == [Span(0, 3, "ADE"), Span(0, 3, "Drug")]


def test_a_corpus_can_be_annotated_anew() -> None:
    """The same sub-words with another annotation; the corpus given is not changed."""
    text, mentions = figure_2()
    docs = [
        document(text, mentions),
        Document("e", "~ ~"),
        document("one two", [("two", "ADE")]),
    ]
    corpus = encode_pointers(docs, TAGS, letters, ROOM)
    assert corpus.encoded.sentence_document.tolist() == [0, 2]
    documents = [
        document(text, mentions[:1]),
        docs[1],
        document("one two", [("one", "Drug")]),
    ]
    annotated = corpus.annotate(documents, {"Drug"})
    assert annotated.known == {"Drug"}
    assert annotated.ids is corpus.ids
    assert annotated.documents == tuple(documents)
    assert found_in(annotated) == [Span(0, 3, "Drug"), Span(0, 9, "Drug")]
    again = annotated.annotate(docs, TYPES)
    np.testing.assert_array_equal(again.entities, corpus.entities)
    np.testing.assert_array_equal(again.entity_bounds, corpus.entity_bounds)


def test_other_texts_and_labels_are_refused() -> None:
    corpus = encode_pointers([Document("d", "one")], TAGS, letters, ROOM)
    nested = Document("d", "one", (Span(0, 3, "Drug"), Span(0, 3, "Sign")))
    with pytest.raises(DataError, match="'Sign' is not in the tag set"):
        encode_pointers([nested], TAGS, letters, ROOM)
    with pytest.raises(DataError, match="'Sign' is not in the tag set"):
        corpus.annotate([nested], TYPES)
    with pytest.raises(DataError, match="differs from the corpus"):
        corpus.annotate([Document("d", "two")], TYPES)
    with pytest.raises(ConfigError, match="did you mean 'Drug'"):
        corpus.annotate(corpus.documents, {"drug"})


def test_empty_corpora_are_encoded() -> None:
    for documents in (
        [],
        [Document("d", "")],
        [Document("d", "~", (Span(0, 1, "ADE"),))],
    ):
        corpus = encode_pointers(documents, TAGS, letters, ROOM)
        assert corpus.sentences == len(corpus.lengths) == len(corpus.entities) == 0
        assert corpus.annotate(documents, TYPES).sentences == 0


def two_letters(passages: Sequence[Passage]) -> Pieces:
    """One sub-word for every two characters of the text without blanks, the second
    one's code."""
    ids, lengths, edges = list[int](), list[int](), list[tuple[int, int]]()
    for passage in passages:
        before, characters = len(ids), passage.text.replace(" ", "")
        blanks = np.cumsum([c == " " for c in passage.text])
        ids += [ord(characters[i : i + 2][-1]) for i in range(0, len(characters), 2)]
        for start, end in passage.words.tolist():
            low, high = start - int(blanks[start]), end - 1 - int(blanks[end - 1])
            edges.append((before + low // 2, before + high // 2))
        lengths.append(len(ids) - before)
    first, last = np.array(edges, np.int64).reshape(-1, 2).T
    every = np.ones(len(ids), bool)
    return Pieces(
        np.array(ids, np.int32), np.array(lengths, np.int64), first, last, every
    )


def test_words_that_share_a_sub_word_are_encoded() -> None:
    """ "abc" and "def" share "cd"; "gh" has one of its own; "i" and "j" share one
    wholly, so that they cannot be told apart."""
    text = "abc def gh i j"
    words = [("abc", "Drug"), ("def", "ADE"), ("def gh", "Disease"), ("gh", "Drug")]
    corpus = encode_pointers([document(text, words)], TAGS, two_letters, ROOM)
    assert corpus.first.tolist() == [0, 1, 3, 4, 4]
    assert corpus.last.tolist() == [1, 2, 3, 4, 4]
    assert found_in(corpus) == sorted(corpus.documents[0].spans)
    corpus = encode_pointers([document(text, [("i", "Drug")])], TAGS, two_letters, ROOM)
    assert found_in(corpus) == [Span(11, 14, "Drug")]


def test_a_sub_word_on_a_cut_belongs_to_both_pieces() -> None:
    """Both pieces have it."""
    corpus = encode_pointers(
        [document("abc def gh", [])], TAGS, two_letters, PointerLimits(2, 9)
    )
    assert [chr(i) for i in corpus.ids] == ["b", "d", "d", "f", "h"]
    assert corpus.lengths.tolist() == [2, 2, 1]
    assert corpus.first.tolist() == [0, 0, 0]
    assert corpus.last.tolist() == [1, 1, 0]
