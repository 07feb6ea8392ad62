"""The frozen BART of a directory: what a model reads from it, and what is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.types import Document, TagSet
from fednotes.encoders.bart import load_backbone
from fednotes.taggers.prompt_bart import PromptBart, PromptBartConfig, build_prompt_bart

transformers = pytest.importorskip("transformers")

TAGS = TagSet(("Drug", "ADE", "Disease"))


def build(bart: Path, tagset: TagSet = TAGS, **settings: Any) -> PromptBart:
    config = PromptBartConfig(
        backbone=str(bart), prompts=3, prompt_hidden=8, **settings
    )
    return build_prompt_bart(config, tagset, 1)


@pytest.fixture(scope="module")
def model(bart: Path) -> PromptBart:
    return build(bart)


def test_the_vector_of_a_label_is_the_mean_of_its_sub_words(bart: Path) -> None:
    """The mean of the words' sub-words, from the table of embeddings; refused where
    unclear."""
    model = build(bart, label_words={"ADE": "finding with"})
    backbone = load_backbone(bart)
    ids = backbone.tokenizer(" finding with", add_special_tokens=False)["input_ids"]
    table = backbone.model.shared.weight
    torch.testing.assert_close(model._fixed[4], table[ids].mean(0))
    # BEGIN: decoder_start_token_id
    assert torch.equal(model._fixed[:3], table[[2, 2, 1]])
    for words, message in (
        ({"Diseas": "x"}, "unknown type 'Diseas': did you mean 'Disease'"),
        ({"ADE": "drug"}, r"'ADE' \('drug'\) cannot be distinguished from 'Drug'"),
        ({"ADE": " \t"}, r"has no sub-words"),
    ):
        with pytest.raises(ConfigError, match=message):
            build(bart, label_words=words)


def test_impossible_settings_and_directories_are_refused(
    bart: Path, model: PromptBart, make_bart: Callable[..., Path], tmp_path: Path
) -> None:
    corpus = model.prepare([Document("d", "no pain")])
    with pytest.raises(ConfigError, match='kind = "tagger"'):
        model.soften(corpus)
    with pytest.raises(ConfigError, match="needs backbone"):
        build_prompt_bart(PromptBartConfig(), TAGS, 0)
    for wrong in (
        {"prompts": 0},
        {"dropout": 1.0},
        {"max_entities": -1},
        {"kind": "tagger"},
    ):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            PromptBartConfig(**wrong)  # type: ignore[arg-type]
    config = transformers.BertConfig(vocab_size=9, hidden_size=8, num_attention_heads=2)
    config.num_hidden_layers = 1
    shutil.copytree(bart, tmp_path / "bert")
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelError, match="has model_type 'bert'"):
        build(tmp_path / "bert")
    make_bart(tmp_path / "small", vocab_size=20)
    with pytest.raises(ModelError, match="replace it by the tokenizer that"):
        build(tmp_path / "small")
    shutil.copytree(bart, tmp_path / "mute")
    for file in (tmp_path / "mute").glob("*token*"):
        file.unlink()
    with pytest.raises(ModelError, match=r"no tokenizer beside config\.json"):
        build(tmp_path / "mute")


def test_limits_never_exceed_those_of_the_backbone(bart: Path) -> None:
    """40 positions: 38 sub-words beside two marks; 13 entities of three steps, and the
    end."""
    for settings, expected in (
        ({}, (38, 13)),
        ({"max_subwords": 20, "max_entities": 5}, (20, 5)),
        ({"max_subwords": 50, "max_entities": 50}, (38, 13)),
    ):
        limits = build(bart, **settings).limits
        assert (limits.subwords, limits.entities) == expected


def test_a_backbone_is_loaded_once(
    bart: Path, make_bart: Callable[..., Path], tmp_path: Path
) -> None:
    """The same object for the same content; another where the directory has changed."""
    assert load_backbone(bart) is load_backbone(str(bart))
    path = tmp_path / "changing"
    first = load_backbone(make_bart(path))
    again = load_backbone(make_bart(path, init_std=0.1))
    assert first is not again
    assert not torch.equal(first.model.shared.weight, again.model.shared.weight)
    assert not any(p.requires_grad for p in again.model.parameters())
