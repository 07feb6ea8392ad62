"""Token classifiers, compared with the library's own loss and enumeration."""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_classifiers import LABELS, TAGS, build, library, lines, same_gradients
from tiny_models import MARKS, SUB_WORDS, save_encoder

from fednotes.core.errors import ConfigError
from fednotes.core.types import Document, TagSet
from fednotes.taggers import token_classifier
from fednotes.taggers.partial import compute_word_gradients, compute_word_losses
from fednotes.taggers.saving import save_model
from fednotes.taggers.token_classifier import TokenClassifier, open_token_classifier
from fednotes.taggers.word_reading import WordReading

transformers = pytest.importorskip("transformers")

WIDTH, LAYERS = 16, 3


def as_library(
    model: TokenClassifier, documents: tuple[Document, ...]
) -> dict[str, Any]:
    """Return inputs and labels by the recipe of the library's documentation.

    Sub-words other than the first of a word have the label -100.
    """
    words = [d.text.split() for d in documents]
    inputs = model.tokenizer(
        words, is_split_into_words=True, padding=True, return_tensors="pt"
    )
    labels = torch.full_like(inputs["input_ids"], -100)
    for row, text in enumerate(words):
        last = None
        for column, word in enumerate(inputs.word_ids(row)):
            if word is not None and word != last:
                label = LABELS.get(text[word])
                tag = (
                    f"B-{label}"
                    if label in {s.label for s in documents[row].spans}
                    else "O"
                )
                labels[row, column] = TAGS.tags.index(tag)
            last = word
    return {**inputs, "labels": labels}


def test_the_loss_equals_that_of_the_library(bert: Path) -> None:
    """`labels=` of the library, a mean over words, times the words; every gradient too."""
    model, documents = build(bert, train="all").double(), lines()
    corpus = model.prepare(documents)
    every = np.arange(corpus.sentences)
    reference = library(model)
    inputs = as_library(model, documents)
    words = int((inputs["labels"] >= 0).sum())
    assert model.count_tokens(corpus, every) == words == len(corpus.encoded.form)
    expected = reference(**inputs).loss * words
    expected.backward()
    losses = model.losses(corpus, every)
    assert not losses.target.any()
    assert not losses.target.requires_grad
    torch.testing.assert_close(
        losses.source.sum(), expected.detach(), check_dtype=False
    )
    losses.source.sum().backward()
    same_gradients(model, reference)
    part = model.losses(corpus, [5, 2])  # one unit's is its own, in the order asked for
    torch.testing.assert_close(part.source, losses.source[[5, 2]])


MODERN = {"global_attn_every_n_layers": 2, "local_attention": 6} | {
    f"{name}_token_id": number
    for name, number in (("cls", 2), ("bos", 2), ("eos", 3), ("sep", 3))
}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("DistilBert", {"dim": WIDTH, "hidden_dim": 24, "n_layers": 2, "n_heads": 2}),
        ("Roberta", {}),
        ("Electra", {"embedding_size": 8}),
        ("Albert", {"embedding_size": 8}),
        ("ModernBert", MODERN),
    ],
)
def test_other_encoder_families_are_supported(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """The same identity; ModernBERT has a layer of its own below the classifier."""
    head = "Model" if kind != "ModernBert" else "ForMaskedLM"
    path = save_encoder(tmp_path / kind, f"{kind}{head}", **settings)
    model, documents = build(path, train="all"), lines()
    reference, inputs = library(model), as_library(model, documents)
    inputs.pop("token_type_ids", None)
    loss = model.losses(model.prepare(documents), np.arange(7)).source.sum()
    with torch.no_grad():
        expected = reference(**inputs).loss * (inputs["labels"] >= 0).sum()
    torch.testing.assert_close(loss.detach(), expected, rtol=1e-5, atol=1e-5)
    first = {name.split(".")[0] for name in model.trainable()}
    assert first == {"classifier", "encoder"} | (
        {"head"} if kind == "ModernBert" else set()
    )
    if kind == "Albert":  # one layer's weights, used three times
        with pytest.raises(ConfigError, match="cannot be identified"):
            build(path, train="top")
    else:
        build(path, train="top", top=1)


# ---- partial annotation --------------------------------------------------------------


def enumerate_losses(logits, tags, allowed, soft=None):
    """Sum over all tag sequences, with products of the words' softmax as
    probabilities."""
    of_word = logits.softmax(-1)
    within = torch.zeros(())
    expected = torch.zeros(())
    for sequence in product(range(logits.shape[1]), repeat=len(logits)):
        p = torch.stack([of_word[i, tag] for i, tag in enumerate(sequence)]).prod()
        if not all(bool(allowed[i, tag]) for i, tag in enumerate(sequence)):
            continue
        within = within + p
        if soft is not None:
            q = np.prod([float(soft[i, tag]) for i, tag in enumerate(sequence)])
            expected = expected - q * p.log()
        elif list(sequence) == tags.tolist():
            expected = -p.log()
    return -within.log(), within.log() + expected


@pytest.mark.parametrize("way", ["hard", "soft"])
def test_losses_are_sums_over_tag_sequences(way: str) -> None:
    """Enumeration of 5 ** 4 sequences in float64, and autograd through it."""
    generator = torch.Generator().manual_seed(2)
    logits = 2 * torch.randn(4, 5, generator=generator, dtype=torch.float64)
    tags = torch.tensor([1, 0, 3, 0])  # ADR is known: [1, 2]; a Drug was added
    allowed = torch.ones(4, 5, dtype=torch.bool)
    allowed[0] = torch.tensor([False, True, False, False, False])
    allowed[1:, 1:3] = False
    soft = None
    if way == "soft":
        teacher = torch.randn(4, 5, generator=generator, dtype=torch.float64)
        soft = teacher.masked_fill(~allowed, float("-inf")).softmax(-1)
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    totals = [loss.sum() for loss in compute_word_losses(mine, tags, allowed, soft)]
    enumerated = enumerate_losses(theirs, tags, allowed, soft)
    closed = compute_word_gradients(logits, tags, allowed, soft)
    for total, by_enumeration, gradient in zip(totals, enumerated, closed, strict=True):
        torch.testing.assert_close(total, by_enumeration)
        (gradient_here,) = torch.autograd.grad(total, mine, retain_graph=True)
        (enumerated_gradient,) = torch.autograd.grad(
            by_enumeration, theirs, retain_graph=True
        )
        torch.testing.assert_close(gradient_here, enumerated_gradient)
        torch.testing.assert_close(gradient, enumerated_gradient)
    plain, nothing = compute_word_losses(logits, tags)
    torch.testing.assert_close(plain, F.cross_entropy(logits, tags, reduction="none"))
    assert not nothing.any()
    full, zero = compute_word_gradients(logits, tags)
    torch.testing.assert_close(full, logits.softmax(-1) - F.one_hot(tags, 5))
    assert not zero.any()


def test_states_are_means_over_the_first_sub_words_of_each_layer(bert: Path) -> None:
    """`hidden` is the mean over first pieces of each layer of a direct call; `score` of
    `outputs` gives the loss."""
    model, documents = build(bert), lines(4)
    corpus = model.annotate(model.prepare(documents), documents, {"Drug"})
    losses = model.losses(corpus, np.arange(4), with_states=True)
    reference, inputs = library(model), as_library(model, documents)
    labels = inputs.pop("labels")
    out = reference(**inputs, output_hidden_states=True)
    first = (labels >= 0).float()[..., None]
    assert model.widths == (WIDTH,) * LAYERS
    assert model.output_width == WIDTH
    for states, layer in zip(losses.hidden, out.hidden_states[1:], strict=True):
        torch.testing.assert_close(states, (layer * first).sum(1) / first.sum(1))
    torch.testing.assert_close(
        losses.score_states(losses.outputs), out.logits[labels >= 0]
    )
    added = torch.tensor([1 <= t <= 2 for t in labels[labels >= 0]])
    assert torch.equal(losses.is_added, added)
    assert added.any()


def test_predictions_keep_no_states_of_the_words(
    bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a sentence of a million commas, the states took 9 GB."""
    readings: list[WordReading] = []

    def record(**attributes: Any) -> WordReading:
        readings.append(WordReading(**attributes))
        return readings[-1]

    monkeypatch.setattr(token_classifier, "WordReading", record)
    model = build(bert)
    corpus = model.prepare([Document("a", "," * 3000)], gold=False)
    model.predict(corpus)
    model.compute_emissions(corpus)
    assert [tuple(reading.states.shape) for reading in readings] == [(3000, 0)] * 2
    assert all(reading.logits.shape[0] == 3000 for reading in readings)


# ---- what is trained -----------------------------------------------------------------


def test_each_choice_of_layers_trains_the_named_parameters(bert: Path) -> None:
    every = set(build(bert, train="all").trainable())
    words = "encoder.embeddings.word_embeddings.weight"
    model = build(bert)
    assert set(model.trainable()) == every - {words}
    assert list(model.trainable()) == sorted(model.trainable())
    assert model.count_frozen() == (len(MARKS) + len(SUB_WORDS)) * WIDTH
    top = build(bert, train="top", top=1)
    assert {n.rsplit(".", 1)[0] for n in top.trainable() if n[0] == "c"} == {
        "classifier"
    }
    assert {
        n[: len("encoder.encoder.layer.2.")] for n in top.trainable() if n[0] == "e"
    } == {"encoder.encoder.layer.2."}
    before = {n: p.detach().clone() for n, p in top.named_parameters()}
    adam = torch.optim.Adam(top.trainable().values(), lr=0.1)
    top.losses(top.prepare(lines()), np.arange(7)).source.sum().backward()
    adam.step()
    for name, parameter in top.named_parameters():
        assert torch.equal(parameter, before[name]) == (name not in top.trainable()), (
            name
        )
    with pytest.raises(ConfigError, match=r"top = 4: .* has 3 layers"):
        build(bert, train="top", top=4)


def test_biases_normalisation_weights_and_the_classifier_are_trained_alone(
    bert: Path, tmp_path: Path
) -> None:
    """The names by hand, in a step of a hand-written loop, and in what is saved."""
    model = build(bert, train="biases")
    linears = [
        "attention.self.query", "attention.self.key", "attention.self.value",
        "attention.output.dense", "intermediate.dense", "output.dense",
    ]  # fmt: skip
    norms = ["attention.output.LayerNorm", "output.LayerNorm"]
    trained = {"classifier.weight", "classifier.bias"}
    for place in ["embeddings.LayerNorm"] + [
        f"encoder.layer.{number}.{norm}" for number in range(LAYERS) for norm in norms
    ]:
        trained |= {f"encoder.{place}.weight", f"encoder.{place}.bias"}
    for number in range(LAYERS):
        trained |= {f"encoder.encoder.layer.{number}.{name}.bias" for name in linears}
    assert set(model.trainable()) == trained

    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    loss = model.losses(model.prepare(lines()), np.arange(7)).source.sum()
    loss.backward()
    torch.optim.SGD(model.trainable().values(), lr=0.1).step()
    moved = {
        name
        for name, value in model.named_parameters()
        if not torch.equal(value, before[name])
    }
    # A bias of all keys changes each score of a query alike, so its gradient is 0 up to
    # rounding.
    keys = {name for name in trained if "key" in name}
    assert trained - keys <= moved <= trained

    save_model(model, tmp_path / "saved")
    saved = open_token_classifier(tmp_path / "saved")
    assert set(saved.trainable()) == trained
    for name, value in saved.named_parameters():
        assert torch.equal(value, dict(model.named_parameters())[name])


def test_biases_are_found_in_encoders_that_name_them_differently(
    tmp_path: Path,
) -> None:
    """DistilBERT calls its normalisations "layer_norm"; ModernBERT has no biases."""
    settings = {"dim": WIDTH, "hidden_dim": 24, "n_layers": 2, "n_heads": 2}
    distil = save_encoder(tmp_path / "distil", "DistilBertModel", **settings)
    names = build(distil, train="biases").trainable()
    assert "encoder.transformer.layer.0.sa_layer_norm.weight" in names
    assert "encoder.transformer.layer.0.ffn.lin1.bias" in names
    assert "encoder.transformer.layer.0.ffn.lin1.weight" not in names
    modern = save_encoder(tmp_path / "modern", "ModernBertForMaskedLM", **MODERN)
    of_encoder = [
        name
        for name in build(modern, train="biases").trainable()
        if name.startswith("encoder.")
    ]
    assert of_encoder
    assert all("norm" in name for name in of_encoder)


def test_the_seed_determines_the_classifier(bert: Path) -> None:
    """The classifier's values; tag sets that differ start from the directory's encoder."""
    first, reseeded = build(bert), build(bert, seed=2)
    fewer = build(bert, TagSet(("Drug",), "BIOES"))
    for name, value in first.state_dict().items():
        if name.startswith("encoder."):
            assert torch.equal(value, reseeded.state_dict()[name])
            assert torch.equal(value, fewer.state_dict()[name])
    assert not torch.equal(first.classifier.weight, reseeded.classifier.weight)
    assert fewer.classifier.weight.shape == (5, WIDTH)
    assert not first.classifier.bias.any()
    saved = transformers.BertModel.from_pretrained(bert).state_dict()
    for name, value in first.encoder.state_dict().items():
        assert torch.equal(value, saved[name])


def test_models_share_frozen_parameters(bert: Path) -> None:
    """In memory once; yet one that is moved or trained leaves the others alone."""
    first, second = build(bert), build(bert)
    words = [m.encoder.embeddings.word_embeddings.weight for m in (first, second)]
    assert words[0].data_ptr() == words[1].data_ptr()
    assert first.classifier.weight.data_ptr() != second.classifier.weight.data_ptr()
    before = {n: v.clone() for n, v in second.state_dict().items()}
    with torch.no_grad():
        for parameter in first.double().trainable().values():
            parameter.add_(1)
    assert all(torch.equal(v, before[n]) for n, v in second.state_dict().items())
    assert words[1].dtype == torch.float32
    copied = copy.deepcopy(second)
    with torch.no_grad():
        copied.classifier.bias[0] += 1
    corpus = second.prepare(lines())
    assert not torch.equal(
        copied.losses(corpus, [0]).source, second.losses(corpus, [0]).source
    )


def test_dropout_follows_the_job_or_the_encoder(bert: Path) -> None:
    model = build(bert, dropout=0.4)
    rates = {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)}
    assert rates == {0.4}
    kept_dropout = build(bert, dropout=None)
    assert {m.p for m in kept_dropout.modules() if isinstance(m, torch.nn.Dropout)} == {
        0.1
    }
    corpus = model.prepare(lines())
    model.train()
    once, twice = (model.losses(corpus, [6]).source for _ in range(2))
    assert not torch.equal(once, twice)
    model.train(False)
    assert torch.equal(*(model.losses(corpus, [6]).source for _ in range(2)))


def test_bfloat16_losses_are_summed_in_float32(bert: Path) -> None:
    model = build(bert)
    corpus = model.prepare(lines())
    plain = model.losses(corpus, np.arange(7)).source
    with torch.autocast("cpu", torch.bfloat16):
        rough = model.losses(corpus, np.arange(7)).source
        each, _ = model.gradients(corpus, np.arange(7))
    assert rough.dtype == each.dtype == torch.float32
    assert not torch.equal(plain, rough)
    torch.testing.assert_close(plain, rough, rtol=0.1, atol=0.1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 15}, "window = 15: .* reads at most 14 sub-words"),
        ({"window": 2}, "too few positions for a word and the 2 special"),
        ({"window": -1}, "window = -1"),
        ({"top": 0}, "top = 0"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"dropout": 1.0}, "dropout"),
        ({"context": "page"}, "context"),
        ({"train": "none"}, "train"),
        ({"tran": "all"}, "did you mean 'train'"),
    ],
)
def test_impossible_settings_are_refused(
    bert: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(bert, **settings)


@pytest.mark.parametrize(("maps", "number"), [("attention", 1), ("all", 1), ("all", 2)])
def test_low_rank_changes_are_saved_as_weights(
    bert: Path, maps: str, number: int, tmp_path: Path
) -> None:
    """One change, and two that add up. Before a step the frozen model's bits; the
    library's model of what is saved, which has no sign of them, gives the same logits
    and gradient of the classifier."""
    model, plain, documents = (
        build(bert, train="lora", rank=2, maps=maps),
        build(bert),
        lines(),
    )
    assert set(model.trainable()) == {
        "classifier.bias", "classifier.weight", "lora.down", "lora.up"
    }  # fmt: skip
    if number == 2:
        model.adapt(1, "private")
    corpus = model.prepare(documents)
    every = np.arange(corpus.sentences)
    model.train(False), plain.train(False)
    first = model.losses(corpus, every).source
    assert torch.equal(first, plain.losses(plain.prepare(documents), every).source)
    assert len(model.adapters) == number
    for each in model.adapters:
        with torch.no_grad():
            each.up.normal_(generator=torch.Generator().manual_seed(1))
    before = {name: value.clone() for name, value in model.encoder.state_dict().items()}
    changed = model.losses(corpus, every).source
    assert not torch.allclose(changed, first)
    save_model(model, tmp_path / "saved")
    assert all(torch.equal(v, before[n]) for n, v in model.encoder.state_dict().items())
    reopened = open_token_classifier(tmp_path / "saved")
    assert isinstance(reopened, TokenClassifier)
    assert not reopened.adapters
    assert not [name for name in reopened.state_dict() if "up" in name.split(".")]
    again = reopened.losses(reopened.prepare(documents), every).source
    torch.testing.assert_close(again, changed, rtol=1e-4, atol=1e-5)
    changed.sum().backward()
    assert not [n for n, p in model.encoder.named_parameters() if p.grad is not None]
    assert all(bool(each.down.grad.any()) for each in model.adapters)


def test_unavailable_attention_maps_are_refused_with_a_remedy(
    tmp_path: Path,
) -> None:
    """ModernBERT has one map of queries, keys and values; all of its maps can be
    changed."""
    modern = save_encoder(tmp_path / "modern", "ModernBertForMaskedLM", **MODERN)
    with pytest.raises(
        ConfigError, match=r"no query and value.*: set \[model\] maps = \"all\""
    ):
        build(modern, train="lora", maps="attention")
    assert "lora" in {
        name.split(".")[0] for name in build(modern, train="lora").trainable()
    }
