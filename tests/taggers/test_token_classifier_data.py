"""What a token classifier reads: windows and whole documents."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_classifiers import (
    TAGS,
    WORDS,
    build,
    document,
    library,
    loud,
    notes,
    same_gradients,
)
from tiny_models import save_encoder

from fednotes.core.errors import TrainingError
from fednotes.core.seeds import rng_of, seed_of
from fednotes.core.types import Document, Span, TagSet
from fednotes.data.batches import draw_epoch_batches, encode_corpus
from fednotes.data.synthetic import generate
from fednotes.encoders.encoder import CPU_BATCH
from fednotes.engines.inprocess import InProcess
from fednotes.methods import distill
from fednotes.methods.distill import pseudo_complete
from fednotes.taggers.saving import build_model, load_model
from fednotes.taggers.token_classifier import TokenClassifierConfig

transformers = pytest.importorskip("transformers")

POSITIONS = 14


# ---- windows -------------------------------------------------------------------------


def long_document(words: int, seed: int = 3) -> Document:
    rng = np.random.default_rng(seed)
    return document(0, rng.choice(WORDS, words).tolist())


@pytest.mark.parametrize("window", [14, 9, 0])
@pytest.mark.parametrize("words", [1, 4, 30])
def test_each_word_is_read_in_the_window_with_most_context(
    bert: Path, words: int, window: int
) -> None:
    """Direct calls of the library, one a window of the size that fits, the next a
    quarter less further on; a sub-word's best window is the one with most context on
    its poorer side (the text's own ends are no lack of it), as a loop over all of them
    finds. The same with the gradients. A text that fits is one call."""
    model = build(bert, train="all", window=window, context="document").double()
    text, reference = long_document(words), library(model)
    pieces = model.tokenizer(
        text.text.split(), is_split_into_words=True, add_special_tokens=False
    )
    ids, owner = pieces["input_ids"], pieces.word_ids()
    size, step = (window or POSITIONS) - 2, None
    step = size - size // 4
    starts = [0]
    while starts[-1] + size < len(ids):
        starts.append(min(starts[-1] + step, len(ids) - size))
    rows = []
    for start in starts:
        line = [2, *ids[start : start + size], 3]
        rows.append(reference(input_ids=torch.tensor([line])).logits[0, 1:-1])
    firsts = [i for i, word in enumerate(owner) if i == 0 or owner[i - 1] != word]
    expected = []
    for i in firsts:
        depth = []
        for number, start in enumerate(starts):
            left_context = i - start if start else 10**6
            right_context = start + size - 1 - i if number < len(starts) - 1 else 10**6
            inside = start <= i < start + size
            depth.append(min(left_context, right_context) if inside else -1)
        best = max(depth)
        # the later one of two alike
        at = max(n for n, d in enumerate(depth) if d == best)
        expected.append(rows[at][i - starts[at]])
    corpus = model.prepare([text], gold=False)
    assert corpus.sentences == 1
    assert len(corpus.pieces.first) == len(starts)
    if len(ids) <= size:
        assert len(starts) == 1
    batch = model._read(corpus, np.array([0]))
    torch.testing.assert_close(
        batch.logits, torch.stack(expected), rtol=1e-9, atol=1e-9
    )
    target = torch.tensor([int(i % 5) for i in range(words)])
    F.cross_entropy(batch.logits, target, reduction="sum").backward()
    F.cross_entropy(torch.stack(expected), target, reduction="sum").backward()
    same_gradients(model, reference)


def test_a_note_of_200_000_characters_is_read_in_bounded_batches(bert: Path) -> None:
    """In one piece, in batches of bounded size; the middle is read as in a shorter
    note, since the text repeats every window's step."""
    model = loud(build(bert, context="document"))
    sizes: list[int] = []
    model.encoder.register_forward_pre_hook(
        lambda _, arguments: sizes.append(arguments[0].numel())
    )
    line = "took no pain and nausea . no pain "  # 9 sub-words, a window's step
    text = (line * (200_000 // len(line) + 1))[:200_000]
    (predicted,) = model.predict([Document("long", text)])
    assert len(text) == 200_000
    assert max(sizes) <= CPU_BATCH[0]
    (short,) = model.predict([Document("short", line * 30)])
    period = lambda spans, at: [  # noqa: E731
        (s.start - at, s.end - at, s.label)
        for s in spans
        if at <= s.start < at + len(line)
    ]
    middle = period(short.spans, 15 * len(line))
    assert middle
    assert period(predicted.spans, 3000 * len(line)) == middle


@pytest.mark.parametrize("context", ["sentence", "document"])
def test_notes_without_tokens_have_no_mentions(bert: Path, context: str) -> None:
    """Empty notes, white space, and words of which the tokenizer leaves nothing."""
    model = build(bert, context=context)
    texts = ("", " \n\t ", "\u200b \u200b", "pain \u200b .", "\x00")
    documents = tuple(Document(str(i), text) for i, text in enumerate(texts))
    predicted = model.predict(documents)
    assert [d.text for d in predicted] == list(texts)
    assert not any(d.spans for d in (*predicted[:3], predicted[4]))
    assert model.predict([]) == ()
    corpus = model.prepare(documents)
    every = np.arange(corpus.sentences)
    assert model.count_tokens(corpus, every) == 2  # "pain" and "."
    empty = int(np.flatnonzero(corpus.words == 0)[0])
    losses = model.losses(corpus, [empty], with_states=True)
    losses.source.sum().backward()
    assert float(losses.source.detach()) == 0
    assert all(
        not p.grad.any() for p in model.trainable().values() if p.grad is not None
    )
    each, total = model.gradients(corpus, [empty])
    assert not each.any()
    assert not total.any()
    with pytest.raises(TrainingError, match="without sentences"):
        model.losses(corpus, [])


# ---- whole documents -----------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["BIO", "BIOES", "IO"])
def test_units_do_not_change_tokens_or_tags(scheme: Any) -> None:
    documents, tags = notes(6), TagSet(("ADR", "Drug"), scheme)
    by_sentence = encode_corpus(documents, tags)
    by_document = encode_corpus(documents, tags, unit="document", max_tokens=None)
    assert by_sentence.sentences == sum(len(d.sentences) for d in documents)
    assert by_document.sentence_document.tolist() == list(range(6))
    for name in ("offsets", "form", "tags"):
        assert np.array_equal(getattr(by_document, name), getattr(by_sentence, name))
    assert set(by_document.bounds) <= set(by_sentence.bounds)


def test_documents_are_split_at_sentence_ends_or_between_entities() -> None:
    """By hand: sentences of 3, 2, 4, 9 and 1 tokens, pieces of at most 5."""
    words = [["no"] * 3, ["no"] * 2, ["no"] * 4, ["no"] * 9, ["no"]]
    text = document(0, *words)
    encoded = encode_corpus([text], TAGS, unit="document", max_tokens=5)
    assert encoded.lengths.tolist() == [5, 4, 5, 5]  # 3 + 2 | 4 | 5 of 9 | 4 of 9 + 1
    ten = [text.text.index("no", at) for at in encoded.offsets[12:16, 0]]
    entity = Span(ten[0], ten[-1] + 2, "ADR")  # four tokens, across the cut after 14
    encoded = encode_corpus(
        [replace(text, spans=(entity,))], TAGS, unit="document", max_tokens=5
    )
    assert encoded.lengths.tolist() == [5, 4, 3, 5, 2]
    assert encode_corpus([text], TAGS, max_tokens=None).lengths.tolist() == [
        3,
        2,
        4,
        9,
        1,
    ]
    for unit in ("sentence", "document"):
        empty = encode_corpus(
            [Document("a", " "), text, Document("b", "")], TAGS, unit=unit
        )
        assert set(empty.sentence_document) == {1}


@pytest.mark.parametrize("context", ["sentence", "document"])
def test_documents_are_split_only_in_training(bert: Path, context: str) -> None:
    """And what is predicted for a prepared corpus is what it is for the documents."""
    model = loud(build(bert, context=context, max_tokens=4))
    documents = notes(4)
    trained, prediction_data = (
        model.prepare(documents),
        model.prepare(documents, gold=False),
    )
    assert trained.encoded.lengths.max() <= 4
    longest = max(len(d.text.split()) for d in documents)
    assert prediction_data.encoded.lengths.max() == (
        longest if context == "document" else 5
    )
    assert not prediction_data.encoded.tags.any()
    assert model.predict(prediction_data) == model.predict(documents)
    assert any(d.spans for d in model.predict(prediction_data))
    progress_calls: list[tuple[int, int]] = []
    model.prepare(
        documents, progress=lambda done, total: progress_calls.append((done, total))
    )
    assert progress_calls[0] == (0, trained.sentences)
    assert progress_calls[-1] == (trained.sentences, trained.sentences)


def test_context_reaches_across_sentences(bert: Path) -> None:
    """A sentence's loss depends on its neighbours in one way of reading, not in the
    other."""
    denied, affirmed = document(0, ["no"], ["pain"]), document(0, ["and"], ["pain"])
    for context, same in (("sentence", True), ("document", False)):
        model = build(bert, context=context)
        logits = [
            model._read(c, np.arange(c.sentences)).logits[-1]
            for c in (model.prepare([denied]), model.prepare([affirmed]))
        ]
        assert torch.allclose(*logits, atol=1e-5) == same


# ---- in a method ---------------------------------------------------------------------


@pytest.mark.parametrize("unannotated", ["pseudo", "soft"])
def test_distillation_trains_token_classifiers(
    unannotated: str, tmp_path: Path
) -> None:
    """Distillation among three sites with other tag sets: one site's part of a round as
    a plain loop, and a saved model that knows every type."""
    bert = save_encoder(tmp_path / "bert", max_position_embeddings=64)
    sites = [site.data for site in generate(num_sites=3, sentences_per_site=12, seed=5)]
    spec = TokenClassifierConfig(encoder=str(bert), dropout=0.1)
    base = distill.Config(
        model=spec,
        rounds=2,
        batch_size=4,
        seed=3,
        unannotated=unannotated,
        weighting=unannotated == "pseudo",
    )
    settings = distill.METHOD.configure(base, sites)
    members = [
        distill.Site(site, settings, directory=tmp_path / site.id) for site in sites
    ]
    federation = InProcess(members)
    distill.train(federation, settings)
    loaded = load_model(tmp_path / sites[0].id / "model")
    assert set(loaded.tagset.types) == {t for site in sites for t in site.tags.types}

    first = distill.Site(sites[0], settings)
    start = distill.make_initial_parameters(settings)
    first.begin(start, round=0)
    update = first.train({}, round=0)
    model = build_model(spec, settings.tags, settings.seed)
    corpus = model.annotate(first.train_set, sites[0].train, sites[0].tags.types)
    if unannotated == "pseudo":
        guess = model.predict(corpus)
        completed = [
            pseudo_complete(gold, guessed, sites[0].tags.types)
            for gold, guessed in zip(sites[0].train, guess, strict=True)
        ]
        corpus = model.annotate(first.train_set, completed, sites[0].tags.types)
    else:
        corpus = model.soften(corpus)
    adam = torch.optim.Adam(
        list(model.trainable().values()), lr=settings.learning_rate, fused=True
    )
    rng = rng_of(settings.seed, "order", sites[0].id, 0, 0)
    for step, batch in enumerate(draw_epoch_batches(corpus.lengths, 4, rng)):
        torch.manual_seed(seed_of(settings.seed, "dropout", sites[0].id, 0, step))
        model.train()
        losses = model.losses(corpus, batch)
        adam.zero_grad()
        (losses.source.mean() + losses.target.mean()).backward()
        adam.step()
    for name, parameter in model.trainable().items():
        assert torch.equal(parameter.detach(), update.tensors[name]), name
