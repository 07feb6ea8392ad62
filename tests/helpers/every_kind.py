"""A small model of every kind, and notes that all of them can read."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import save_encoder

from fednotes import taggers
from fednotes.core.types import Document, Span, TagSet
from fednotes.taggers.saving import build_model, find_config_class, read_model_config

SAMPLES = Path(__file__).parents[1] / "data" / "samples"
TAGS = TagSet(("ADR", "Drug"))
WORDS = ["no", "pain", "took", "aspirin", ".", "adr", "drug"]
LABELS = {"pain": "ADR", "aspirin": "Drug"}


@dataclass(frozen=True)
class SmallModel:
    """How the tests make a small model of a kind, and what they expect of it.

    Attributes:
        settings: Its [model] table, without the folder of its backbone.
        backbone: The pre-trained model that it begins with: "bert", "bart", or "" for
            none.
        backbone_key: The key of the table that names the backbone's folder.
        learning_rate: Adam's rate with which it learns a few notes by heart in less
            than 2000 steps; None leaves this test out.
        tags_words: Whether it is a `TaggingModel`.
        in_double: Whether all of it can compute in float64, so that gradients are
            compared more closely.
        setting: One of its settings, which a test misspells.
    """

    settings: Mapping[str, Any]
    backbone: str = ""
    backbone_key: str = "encoder"
    learning_rate: float | None = None
    tags_words: bool = True
    in_double: bool = False
    setting: str = "dropout"


def _encoder_tagger(tuning: str, learning_rate: float | None = None) -> SmallModel:
    table = {"kind": "encoder-tagger", "tuning": tuning}
    return SmallModel(table, "bert", learning_rate=learning_rate)


def _prompt_bart(**settings: Any) -> SmallModel:
    table = {"kind": "prompt-bart", "prompts": 3, "prompt_hidden": 4}
    table |= {"label_words": {"ADR": "pain"}, **settings}
    return SmallModel(table, "bart", "backbone", tags_words=False)


# A new kind of tagger is one more entry.
KINDS = {
    "tagger": SmallModel(
        {"kind": "tagger", "char_filters": 6, "cnn_filters": 5, "lstm_units": 4},
        learning_rate=0.02,
        in_double=True,
    ),
    "lora": _encoder_tagger("lora", 0.01),
    "prompts": _encoder_tagger("prompts", 0.01),
    "none": _encoder_tagger("none"),
    "token-classifier": SmallModel(
        {"kind": "token-classifier"}, "bert", learning_rate=0.003, in_double=True
    ),
    "type-scorer": SmallModel(
        {"kind": "type-scorer", "width": 8}, "bert", learning_rate=0.01
    ),
    "prompt-bart": _prompt_bart(tune_cross_attention=False),
    "prompt-bart with cross-attention": _prompt_bart(tune_cross_attention=True),
}
# The samples of CONTRIBUTING, which `add_sample_kinds` makes available.
SAMPLE_KINDS = {
    "capitals": SmallModel({"kind": "capitals"}, in_double=True, setting="width"),
    "initials": SmallModel({"kind": "initials"}, in_double=True, setting="width"),
}


def add_sample_kinds(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Write the sample kinds into a folder in which kinds are found from now on."""
    for kind in SAMPLE_KINDS:
        source = (SAMPLES / f"{kind}.py.txt").read_text()
        (folder / f"{kind}.py").write_text(source)
        patch.delitem(sys.modules, f"fednotes.taggers.{kind}", raising=False)
    patch.setattr(taggers, "__path__", [*taggers.__path__, str(folder)])


def dropout(kind: str, rate: float) -> dict[str, float]:
    """Return the setting for dropout; empty for a kind without dropout."""
    fields = dataclasses.fields(find_config_class(small_model(kind).settings["kind"]))
    has_dropout = any(field.name == "dropout" for field in fields)
    return {"dropout": rate} if has_dropout else {}


def small_model(kind: str) -> SmallModel:
    """Return the entry of a kind, which may be a sample."""
    return (KINDS | SAMPLE_KINDS)[kind]


def _document(number: int, words: list[str]) -> Document:
    text, spans, at = " ".join(words), [], 0
    for word in words:
        if word in LABELS:
            spans.append(Span(at, at + len(word), LABELS[word]))
        at += len(word) + 1
    return Document(str(number), text, tuple(spans), sentences=((0, len(text)),))


_rng = np.random.default_rng(0)
DOCUMENTS = (
    _document(0, "took aspirin . no pain .".split()),
    _document(1, "pain .".split()),
    *(_document(n, _rng.choice(WORDS[:5], n).tolist()) for n in (5, 1, 9, 3)),
)


def write_backbone(path: Path, model: str, seed: int = 0) -> Path:
    """Write a tiny random BERT or BART with a tokenizer of whole words."""
    if model == "bert":
        return save_encoder(path, words=WORDS, seed=seed, max_position_embeddings=64)
    shape: dict[str, Any] = {
        "d_model": 16,
        "max_position_embeddings": 64,
        "bos_token_id": 2,
    }
    for side in ("encoder", "decoder"):
        shape |= {
            f"{side}_layers": 1,
            f"{side}_attention_heads": 2,
            f"{side}_ffn_dim": 24,
        }
    ends = dict.fromkeys(
        ("eos_token_id", "decoder_start_token_id", "forced_eos_token_id"), 3
    )
    return save_encoder(path, "BartModel", WORDS, seed, **shape | ends)


def make(
    which: str,
    folder: Path,
    seed: int = 1,
    tagset: TagSet = TAGS,
    stirred: bool = True,
    **settings: Any,
) -> Any:
    """Return a model of this kind; its backbone is written below the folder.

    stirred: Whether its parameters are moved away from their start.
    """
    small = small_model(which)
    table = dict(small.settings)
    if small.backbone:
        backbone = folder / small.backbone
        if not backbone.exists():
            write_backbone(backbone, small.backbone)
        table[small.backbone_key] = str(backbone)
    if "label_words" in table:
        labels = table["label_words"].items()
        table["label_words"] = {
            type: word for type, word in labels if type in tagset.types
        }
    model = build_model(read_model_config(table | settings), tagset, seed)
    if stirred:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.trainable().values():
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model
