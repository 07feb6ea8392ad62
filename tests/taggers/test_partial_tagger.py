"""Partial annotation through a whole tagger: new mentions, losses and gradients.

The CRF's part alone is in `test_partial.py`, against enumeration.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_taggers import HashEncoder
from torch import Tensor

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Scheme, Span, TagSet
from fednotes.data.batches import decode_mentions, encode_corpus
from fednotes.taggers.corpora import TaggerCorpus
from fednotes.taggers.partial import Soft, find_allowed_tags, retag
from fednotes.taggers.tagger import Tagger, read_tagger_config

SCHEMES: tuple[Scheme, ...] = ("BIO", "BIOES", "IO")
TYPES = ("ADR", "Drug", "Dose")
WORD_LISTS = {
    "ADR": ("headache", "dry mouth", "very bad nausea"),
    "Drug": ("Zoloft", "aspirin", "Effexor-XR"),
    "Dose": ("5 mg", "twice a day"),
}


def documents(count: int = 16, seed: int = 0) -> tuple[Document, ...]:
    """Return documents of one to three sentences of 2 to 14 tokens, some without
    mentions."""
    rng = np.random.default_rng(seed)
    out = []
    for number in range(count):
        text, spans, bounds = "", [], []
        for _ in range(rng.integers(1, 4)):
            start = len(text)
            for _ in range(rng.integers(1, 5)):
                if rng.random() < 0.4:
                    label = str(rng.choice(TYPES))
                    mention = str(rng.choice(WORD_LISTS[label]))
                    spans.append(Span(len(text), len(text) + len(mention), label))
                    text += mention + " "
                else:
                    text += " ".join(rng.choice(["I", "took", "it", "slept"], 2)) + " "
            bounds.append((start, len(text) - 1))
        out.append(Document(str(number), text, tuple(spans), sentences=tuple(bounds)))
    return tuple(out)


def build(scheme: Scheme = "BIO", encoder: bool = True, **changes: Any) -> Tagger:
    """Return a small tagger with every layer and large parameters."""
    small: dict[str, Any] = {
        "char_dim": 6,
        "char_filters": 8,
        "cnn_filters": 7,
        "lstm_units": 5,
    }
    small |= {"contextual": "x", "project": 4} if encoder else {}
    config = read_tagger_config(small | {"dropout": 0.3} | changes)
    tagger = Tagger(
        config, TagSet(TYPES, scheme), 1, None, HashEncoder() if encoder else None
    )
    with torch.no_grad():
        for parameter in tagger.crf.parameters():
            parameter.mul_(4.0)
    return tagger.eval()


def partly(tagger: Tagger, known: Sequence[str] = ("Drug",)) -> TaggerCorpus:
    return tagger.annotate(tagger.prepare(documents()), documents(), known)


def gradient(loss: Tensor, tagger: Tagger) -> list[Tensor]:
    parameters = list(tagger.trainable().values())
    return [
        torch.zeros_like(p) if g is None else g
        for p, g in zip(
            parameters,
            torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True),
            strict=True,
        )
    ]


# ---- losses --------------------------------------------------------------------------


@pytest.mark.parametrize("soft", [False, True])
def test_a_complete_tag_set_gives_the_ordinary_loss(soft: bool) -> None:
    """Prepared, or annotated with all types known: source bitwise the loss, target
    exactly 0."""
    tagger = build()
    corpus = tagger.prepare(documents())
    assert corpus.known == set(TYPES)
    for complete in (corpus, tagger.annotate(corpus, documents(), TYPES)):
        softened = tagger.soften(complete) if soft else complete
        assert softened.soft is None
        parts = tagger.losses(softened, range(12))
        torch.testing.assert_close(parts.source.mean(), tagger.loss(corpus, range(12)))
        for index in range(12):
            assert torch.equal(
                tagger.losses(softened, [index]).source[0], tagger.loss(corpus, [index])
            )
        assert torch.equal(parts.target, torch.zeros(12))
        (parts.source + parts.target).mean().backward()


def test_soft_targets_equal_the_posterior_of_each_sentence() -> None:
    """Each sentence alone through posterior(); a teacher equal to its student: ∇ of
    both parts is ∇ source, by all parameters of the tagger (one step of EM)."""
    tagger = build("BIOES")
    corpus = partly(tagger, ("Drug", "Dose"))
    soft = tagger.soften(corpus).soft
    assert isinstance(soft, Soft)
    assert soft.unary.dtype == soft.pairs.dtype == np.float32
    for s in range(corpus.sentences):
        part = slice(corpus.encoded.bounds[s], corpus.encoded.bounds[s + 1])
        states = tagger.losses(corpus, [s], with_states=True)
        assert states.outputs is not None
        x = tagger.crf.project(states.outputs)[None]
        tags = torch.from_numpy(corpus.encoded.tags[part])[None]
        allowed = find_allowed_tags(tags, tagger.tagset, corpus.known)
        unary, pairs = tagger.crf.crf.compute_posterior(
            x, torch.tensor([tags.shape[1]]), allowed
        )
        np.testing.assert_allclose(soft.unary[part], unary[0], atol=1e-5)
        np.testing.assert_allclose(soft.pairs[s], pairs[0], atol=1e-5)
    parts = tagger.losses(replace(corpus, soft=soft), range(corpus.sentences))
    full, source = (
        gradient((parts.source + parts.target).sum(), tagger),
        parts.source.sum(),
    )
    for ours, theirs in zip(full, gradient(source, tagger), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


# ---- states --------------------------------------------------------------------------


def test_states_of_every_layer_are_means_over_tokens() -> None:
    """Sentence by sentence: means over the tokens; what enters the projection gives
    back the emissions whose loss is the loss; pseudo by the tags' names."""
    tagger = build()
    corpus = partly(tagger)
    assert tagger.widths == (4, 7, 10)
    order = [5, 0, 9, 3, 3]
    states = tagger.losses(corpus, order, with_states=True)
    assert [layer.shape for layer in states.hidden] == [(5, 4), (5, 7), (5, 10)]
    at = 0
    for place, index in enumerate(order):
        single = tagger.losses(corpus, [index], with_states=True)
        for together, alone in zip(states.hidden, single.hidden, strict=True):
            torch.testing.assert_close(together[place], alone[0], atol=1e-5, rtol=1e-5)
        part = slice(corpus.encoded.bounds[index], corpus.encoded.bounds[index + 1])
        names = [tagger.tagset.tags[i] for i in corpus.encoded.tags[part]]
        word_range = slice(at, at + len(names))
        at += len(names)
        assert states.outputs is not None
        assert states.is_added is not None
        assert states.score_states is not None
        assert states.is_added[word_range].tolist() == [
            n[2:] in ("ADR", "Dose") for n in names
        ]
        # Without dropout what enters the projection is the LSTM's output.
        mean = states.outputs[word_range].mean(0)
        torch.testing.assert_close(mean, states.hidden[2][place], atol=1e-5, rtol=1e-5)
        x = states.score_states(states.outputs[word_range])[None]
        tags = torch.from_numpy(corpus.encoded.tags[part])[None]
        loss = tagger.crf.crf.loss(x, tags, torch.tensor([len(names)]))[0]
        total = states.source[place] + states.target[place]
        torch.testing.assert_close(loss, total, atol=1e-4, rtol=1e-5)
    assert len(states.is_added) == at


@pytest.mark.parametrize(
    ("changes", "widths"),
    [
        ({"encoder": False, "lstm_units": 0}, (7,)),
        ({"encoder": False, "cnn_filters": 0}, (10,)),
        ({"project": 0}, (7, 10)),  # frozen features as they are: no layer
        ({"encoder": False, "cnn_filters": 0, "lstm_units": 0}, ()),
        ({"cnn_widths": [3, 5]}, (4, 14, 10)),
    ],
)
def test_widths_follow_from_the_layers(
    changes: dict[str, Any], widths: tuple[int, ...]
) -> None:
    tagger = build(**changes)
    states = tagger.losses(tagger.prepare(documents()), [1, 0], with_states=True)
    assert tagger.widths == widths == tuple(layer.shape[1] for layer in states.hidden)


# ---- gradients of the transfer parameter ---------------------------------------------


# ---- refused -------------------------------------------------------------------------


# ---- new mentions on old tokens ------------------------------------------------------

TEXT = "aspirin gave her a mild rash. no headache/nausea today but she took more aspirin again"
WORDS = [match.span() for match in re.finditer(r"\S+", TEXT)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    picks=st.lists(
        st.tuples(st.integers(0, len(WORDS) - 1), st.sampled_from("XYZ")), max_size=6
    ),
    scheme=st.sampled_from(SCHEMES),
    max_tokens=st.sampled_from([4, 256]),
)
def test_retagging_equals_a_new_encoding(
    picks: list[tuple[int, str]], scheme: Scheme, max_tokens: int
) -> None:
    """Words as mentions, in two of three documents: tags and all as `encode_corpus` of
    the same documents; no mention is longer than a word, so it cuts the same pieces."""
    tagset = TagSet(("X", "Y", "Z"), scheme)
    spans = tuple({WORDS[i]: Span(*WORDS[i], label) for i, label in picks}.values())
    bare = [Document(str(n), TEXT) for n in range(3)]
    marked = [bare[0], Document("1", TEXT, spans), Document("2", TEXT, spans[:2])]
    expected = encode_corpus(marked, tagset, max_tokens=max_tokens)
    encoded = encode_corpus(bare, tagset, max_tokens=max_tokens)
    for known in ((), ("X",), ("X", "Y", "Z")):
        ours = retag(encoded, marked, known)
        for name in ("tags", "bounds", "form", "offsets"):
            assert np.array_equal(getattr(ours, name), getattr(expected, name)), name
        assert ours.documents == tuple(marked)
    again = retag(expected, bare, ())
    assert not again.tags.any()


def test_mentions_that_may_overlap_stay_when_others_are_added() -> None:
    """ "gave her a mild rash" contains "mild rash", and "rash. no" ends at the
    sentence."""
    tagset = TagSet(("X", "Y"), overlaps=True)
    spans = (Span(8, 28, "Y"), Span(19, 28, "X"), Span(24, 32, "Y"), Span(0, 7, "X"))
    marked = [Document("0", TEXT), Document("1", TEXT, spans[:2]), Document("2", TEXT)]
    bare = [Document(document.id, TEXT) for document in marked]
    expected = encode_corpus(marked, tagset)
    ours = retag(encode_corpus(bare, tagset), marked, ("X",))
    assert expected.mentions is not None
    assert ours.mentions is not None
    assert np.array_equal(ours.mentions, expected.mentions)
    assert np.array_equal(ours.tags, expected.tags)
    words = [
        (TEXT[a:b], tagset.types[kind])
        for first, stop, kind in ours.mentions.tolist()
        for (a, _), (_, b) in [ours.offsets[[first, stop - 1]].tolist()]
    ]
    assert words == [("gave her a mild rash", "Y"), ("mild rash", "X")]
    crossing = retag(expected, [*marked[:2], Document("2", TEXT, spans[2:])], ())
    assert crossing.mentions is not None
    decoded = decode_mentions(crossing, crossing.mentions[::-1])
    assert [document.spans for document in decoded] == [
        (),
        spans[:2],
        (Span(0, 7, "X"), Span(24, 29, "Y")),
    ]


def _found(
    spans: list[Span], known: str, max_tokens: int = 256
) -> list[tuple[str, str]]:
    """Return token and tag wherever the tag is not O."""
    tagset = TagSet(("X", "Y"))
    encoded = encode_corpus(
        [Document("0", "", ()), Document("1", TEXT)], tagset, max_tokens
    )
    ours = retag(
        encoded, [Document("0", ""), Document("1", TEXT, tuple(spans))], set(known)
    )
    names = [tagset.tags[i] for i in ours.tags]
    forms = [TEXT[a:b] for a, b in ours.offsets]
    return [
        (form, name) for form, name in zip(forms, names, strict=True) if name != "O"
    ]


def test_added_mentions_never_change_known_ones() -> None:
    """A longer added mention over a known one; one that shares only a token's other
    half."""
    # "mild rash", "ild " within "mild"
    rash, part = Span(19, 28, "X"), Span(20, 24, "X")
    known_tags = [("mild", "B-X"), ("rash", "I-X")]
    assert _found([rash], "X") == known_tags
    assert _found([rash, Span(8, 28, "Y")], "X") == known_tags
    assert _found([rash, Span(8, 28, "Y")], "Y")[0] == ("gave", "B-Y")
    assert _found([part, Span(19, 20, "Y")], "X") == known_tags[:1]
    assert _found([part, Span(0, 7, "Y")], "X") == [("aspirin", "B-Y"), *known_tags[:1]]
    # the first has it
    assert _found([part, Span(19, 20, "Y")], "XY") == [("mild", "B-Y")]


def test_added_mentions_are_cut_at_their_sentence_or_piece() -> None:
    """ "rash. no" over the end of a sentence; "gave her a mild" over a piece of three
    tokens."""
    assert _found([Span(24, 32, "Y")], "X") == [("rash", "B-Y"), (".", "I-Y")]
    assert _found([Span(8, 23, "Y")], "X", 3) == [("gave", "B-Y"), ("her", "I-Y")]
    assert _found([Span(7, 8, "Y")], "X") == []  # white space


def test_other_documents_and_labels_are_refused() -> None:
    document = Document("1", TEXT)
    encoded = encode_corpus([document], TagSet(("X",)))
    with pytest.raises(DataError, match="2 annotated documents for a corpus of 1"):
        retag(encoded, [document, document], ())
    with pytest.raises(
        DataError, match=r"document 0 .* differs from the corpus"
    ) as caught:
        retag(encoded, [Document("1", TEXT + "!")], ())
    assert "aspirin" not in str(caught.value)
    with pytest.raises(DataError, match="label 'Q' is not in the tag set"):
        retag(encoded, [Document("1", TEXT, (Span(0, 7, "Q"),))], ())
    empty = encode_corpus([Document("0", " ")], TagSet(("X",)))
    assert len(retag(empty, [Document("0", " ", (Span(0, 1, "X"),))], ()).tags) == 0
