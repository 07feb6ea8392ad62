"""Words scored against the texts of types: a tiny random BERT, by NumPy and by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_classifiers import TAGS, document, lines

import fednotes
from fednotes.core.errors import ConfigError
from fednotes.core.types import Document, Span, TagSet
from fednotes.taggers.partial import Soft
from fednotes.taggers.saving import (
    build_model,
    load_model,
    read_model_config,
    save_model,
)
from fednotes.taggers.type_scorer import TypeScorer, make_type_texts
from fednotes.training.sites import Adam

transformers = pytest.importorskip("transformers")

DESCRIPTIONS = {"ADR": "nausea and pain", "Drug": "took metoprolol"}


def build(
    bert: Path, tagset: TagSet = TAGS, *, stirred: bool = True, **settings: Any
) -> TypeScorer:
    """Return a model in evaluation mode; its parameters are moved if `stirred`."""
    table: dict[str, Any] = {
        "kind": "type-scorer",
        "encoder": str(bert),
        "descriptions": DESCRIPTIONS,
        "rank": 2,
        "width": 5,
    }
    model = build_model(read_model_config(table | settings), tagset, 1)
    assert isinstance(model, TypeScorer)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.trainable().values() if stirred else ():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().double().numpy()


def sigmoid(scores: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-scores)))


def test_a_text_is_the_name_of_a_type_in_words_and_its_description() -> None:
    types = ("Disease_disorder", "ADE")
    texts = make_type_texts(types, {"ADE": " harm by a drug "})
    assert texts == ("disease disorder", "ade: harm by a drug")


def test_descriptions_that_cannot_be_used_are_refused(bert: Path) -> None:
    with pytest.raises(ConfigError, match="unknown type 'Durg': did you mean 'Drug'"):
        build(bert, descriptions={"Durg": "pain"})
    with pytest.raises(ConfigError, match="'a_b' and 'A_B' have the same text 'a b'"):
        build(bert, TagSet(("a_b", "A_B")), descriptions={})
    with pytest.raises(ConfigError, match=r"'ADR' has 2\d sub-words, .* reads 1 to 12"):
        build(bert, descriptions={"ADR": "pain " * 20})
    many = TagSet(
        (*(f"t{number}" for number in range(999)), "no_pain_took_nausea_and" * 2)
    )
    with pytest.raises(ConfigError, match="1,000 types, that about 'no_pain_took_naus"):
        build(bert, many, descriptions={})


def test_a_job_for_fewer_types_keeps_only_their_descriptions(bert: Path) -> None:
    config = build(bert).config.for_types(["Drug"])
    assert config.descriptions == {"Drug": DESCRIPTIONS["Drug"]}


def test_the_vector_of_a_type_is_the_mean_over_the_sub_words_of_its_text(
    bert: Path,
) -> None:
    """Each text is read alone by the library's model; new adapters change nothing."""
    model = build(bert, stirred=False)
    vectors = numbers(model.compute_type_vectors())
    tokenizer = transformers.BertTokenizerFast.from_pretrained(bert)
    library = transformers.BertModel.from_pretrained(bert).eval()
    texts = ("adr: nausea and pain", "drug: took metoprolol")
    for vector, text in zip(vectors, texts, strict=True):
        with torch.no_grad():
            states = library(**tokenizer(text, return_tensors="pt")).last_hidden_state
        expected = numbers(states)[0, 1:-1].mean(0)  # without [CLS] and [SEP]
        np.testing.assert_allclose(vector, expected, atol=1e-6)


def compute_scores(model: TypeScorer, reading: Any) -> np.ndarray:
    """Return (U_k h_w + c_k) · V g_t / √m + b_k by loops, (batch, steps, types, 3)."""
    words, types = numbers(reading.states), numbers(model.compute_type_vectors())
    classifier = model.classifier
    rows = numbers(classifier.words.weight).reshape(3, 5, -1)  # U
    shifts = numbers(classifier.words.bias).reshape(3, 5)  # c
    embeddings = types @ numbers(classifier.types.weight).T  # e_t = V g_t
    scores = np.zeros((*words.shape[:2], len(types), 3))
    for row, word, kind, place in np.ndindex(scores.shape):
        projected = rows[place] @ words[row, word] + shifts[place]
        product = projected @ embeddings[kind] / np.sqrt(5)
        scores[row, word, kind, place] = product + numbers(classifier.bias)[place]
    return scores


def test_a_score_compares_the_vectors_of_a_word_and_a_type(bert: Path) -> None:
    model = build(bert)
    corpus = model.prepare(lines())
    reading = model._read(corpus, np.arange(corpus.sentences))
    found = numbers(model.classifier(reading.states, reading.types))
    expected = compute_scores(model, reading)
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_only_the_types_that_a_site_annotates_are_in_its_loss(bert: Path) -> None:
    """The source loss of a site that annotates drugs is that of drugs alone, whatever
    mentions of other types a model added; the added ones are in the target loss."""
    model = build(bert, positive_weight=3.0)
    documents = lines()
    prepared = model.prepare(documents)
    corpus = model.annotate(prepared, documents, ["Drug"])
    bare = [
        replace(d, spans=tuple(s for s in d.spans if s.label == "Drug"))
        for d in documents
    ]
    order = np.array([2, 0, 5, 1])
    reading = model._read(prepared, order)
    probabilities = sigmoid(compute_scores(model, reading))
    expected = np.zeros((2, len(order)))
    for row, sentence in enumerate(order):
        words = prepared.encoded.offsets[
            prepared.encoded.bounds[sentence] : prepared.encoded.bounds[sentence + 1]
        ]
        for word, (start, end) in enumerate(words.tolist()):
            for kind, label in enumerate(TAGS.types):
                # Every mention is one word, which starts, is inside and ends it.
                is_mention = Span(start, end, label) in documents[sentence].spans
                p = probabilities[row, word, kind]
                of_places = -3.0 * np.log(p) if is_mention else -np.log(1 - p)
                expected[1 - kind, row] += of_places.sum()
    losses = model.losses(corpus, order)
    np.testing.assert_allclose(numbers(losses.source), expected[0], rtol=1e-4)
    np.testing.assert_allclose(numbers(losses.target), expected[1], rtol=1e-4)
    without = model.losses(model.annotate(prepared, bare, ["Drug"]), order)
    assert torch.equal(without.source, losses.source)
    assert not torch.equal(without.target, losses.target)


def test_soft_targets_are_the_probabilities_of_a_teacher(bert: Path) -> None:
    """They replace the annotation of other types, and their positives have weight 1."""
    model = build(bert, positive_weight=3.0)
    documents = lines(4)
    corpus = model.annotate(model.prepare(documents), documents, ["ADR"])
    every = np.arange(corpus.sentences)
    teacher = np.random.default_rng(0).uniform(size=(len(corpus.encoded.form), 6))
    soft = Soft(teacher.astype(np.float32), np.zeros((len(every), 0, 0), np.float32))
    losses = model.losses(replace(corpus, soft=soft), every)
    plain = model.losses(corpus, every)
    assert torch.equal(losses.source, plain.source)

    reading = model._read(corpus, every)
    probabilities = sigmoid(compute_scores(model, reading))
    for sentence, (low, high) in enumerate(
        zip(corpus.encoded.bounds[:-1], corpus.encoded.bounds[1:], strict=True)
    ):
        p = probabilities[sentence, : high - low, 1]
        q = teacher[low:high].reshape(-1, 2, 3)[:, 1]
        expected = -(q * np.log(p) + (1 - q) * np.log(1 - p)).sum()
        np.testing.assert_allclose(
            numbers(losses.target)[sentence], expected, rtol=1e-4
        )


def test_a_student_that_equals_its_teacher_has_no_gradient_of_the_target(
    bert: Path,
) -> None:
    model = build(bert, positive_weight=3.0)
    documents = lines(4)
    corpus = model.annotate(model.prepare(documents), documents, ["ADR"])
    every = np.arange(corpus.sentences)
    of_source, of_target = model.gradients(model.soften(corpus), every)
    assert float(of_source.abs().max()) > 0.1
    assert float(of_target.abs().max()) < 1e-4


def test_the_texts_of_types_train_the_adapters(bert: Path) -> None:
    """The adapters get a gradient through the types' vectors, too."""
    model = build(bert)
    model.compute_type_vectors().sum().backward()
    assert model.lora.up.grad is not None
    assert bool(model.lora.up.grad.any())


def test_confidence_is_the_score_of_a_span(bert: Path) -> None:
    """That no word is in a mention is 1 minus the largest probability of a word."""
    model = build(bert, threshold=0.2)
    with torch.no_grad():
        model.classifier.bias.fill_(3.0)
    text = document(1, ["took", "pain", "nausea"])
    (predicted,) = model.predict([text], confidence=True)
    reading = model._read(model.prepare([text]), np.array([0]))
    probabilities = sigmoid(compute_scores(model, reading))[0]
    assert predicted.spans
    words = [(0, 4), (5, 9), (10, 16)]
    for span in predicted.spans:
        first = [start for start, _ in words].index(span.start)
        last = [end for _, end in words].index(span.end)
        kind = TAGS.types.index(span.label)
        expected = np.mean(
            [
                probabilities[first, kind, 0],
                probabilities[first : last + 1, kind, 1].mean(),
                probabilities[last, kind, 2],
            ]
        )
        assert span.confidence == pytest.approx(expected, abs=1e-5)
    others = model.compute_alternatives(text, Span(5, 16, "ADR"))
    assert others["O"] == pytest.approx(1 - probabilities[1:3, :, 1].max(), abs=1e-5)
    assert others.keys() == {"O", "ADR", "Drug"}


def nested_documents() -> list[Document]:
    """Return notes in which each "took X" is one mention and the drug X another."""
    texts = ["took metoprolol", "no pain took metoprolol and nausea", "metoprolol no"]
    notes = []
    for number, text in enumerate(texts):
        spans = []
        for word, label in (("took metoprolol", "ADR"), ("metoprolol", "Drug")):
            if word in text:
                start = text.index(word)
                spans.append(Span(start, start + len(word), label))
        bounds = ((0, len(text)),)
        notes.append(Document(str(number), text, tuple(spans), sentences=bounds))
    return notes


NESTED = replace(TAGS, overlaps=True)


def test_overlapping_mentions_of_different_types_are_all_targets(bert: Path) -> None:
    """The loss, from the scores by loops: "metoprolol" ends one mention and is all of
    another."""
    model = build(bert, NESTED)
    corpus = model.prepare(nested_documents())
    order = np.array([1, 0])
    probabilities = sigmoid(compute_scores(model, model._read(corpus, order)))
    expected = []
    for p, took, length in ((probabilities[0], 2, 6), (probabilities[1], 0, 2)):
        y = np.zeros((length, 2, 3))
        y[took, 0] = [1, 1, 0]
        y[took + 1, 0] = [0, 1, 1]
        y[took + 1, 1] = 1
        q = p[:length]
        expected.append(-(y * np.log(q) + (1 - y) * np.log(1 - q)).sum())
    losses = model.losses(corpus, order)
    np.testing.assert_allclose(numbers(losses.source), expected, rtol=1e-4)


@pytest.mark.slow
def test_a_model_learns_and_predicts_nested_mentions(
    bert: Path, tmp_path: Path
) -> None:
    """They are scored against all mentions, also by the saved model."""
    model = build(bert, NESTED, stirred=False, dropout=0.0, threshold=0.5, width=16)
    gold = nested_documents()
    corpus = model.prepare(gold)
    optimizer = Adam(model.trainable(), 0.01)
    for _ in range(150):
        model.losses(corpus, [0, 1, 2]).source.sum().backward()
        optimizer.step()
    predicted = model.predict(gold, confidence=True)
    assert [each.spans for each in predicted] == [each.spans for each in gold]
    assert all(0.5 < s.confidence <= 1 for each in predicted for s in each.spans)

    save_model(model, tmp_path / "model")
    saved = fednotes.load(tmp_path / "model")
    assert saved.evaluate(gold).scores["strict"]["f1"] == 1
    assert saved.evaluate(gold).scores["support"] == 5
    assert load_model(tmp_path / "model").tagset == NESTED
