"""A small model of every kind, and notes that all of them can read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import save_encoder

from fednotes.core.types import Document, Span, TagSet
from fednotes.taggers.saving import build_model, model_config

TAGS = TagSet(("ADR", "Drug"))
WORDS = ["no", "pain", "took", "aspirin", ".", "adr", "drug"]
LABELS = {"pain": "ADR", "aspirin": "Drug"}
KINDS = ["tagger", "lora", "prompts", "none", "token-classifier"]
KINDS += ["prompt-bart", "prompt-bart with cross-attention"]


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
    """A tiny random BERT or BART with a tokeniser of whole words."""
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
    """A model of this kind; its backbone is written below the folder. stirred: its
    parameters are away from their start."""
    backbone = folder / ("bart" if which.startswith("prompt-bart") else "bert")
    if which != "tagger" and not backbone.exists():
        write_backbone(backbone, backbone.name)
    tables: dict[str, dict[str, Any]] = {
        "tagger": {"char_filters": 6, "cnn_filters": 5, "lstm_units": 4},
        "token-classifier": {"encoder": str(backbone)},
    }
    if which.startswith("prompt-bart"):
        table = {"kind": "prompt-bart", "backbone": str(backbone), "prompts": 3}
        table |= {
            "prompt_hidden": 4,
            "label_words": {"ADR": "pain"} if "ADR" in tagset.types else {},
        }
        table["tune_cross_attention"] = "cross" in which
    elif which in tables:
        table = {"kind": which, **tables[which]}
    else:
        table = {"kind": "encoder-tagger", "encoder": str(backbone), "tuning": which}
    model = build_model(model_config(table | settings), tagset, seed)
    if stirred:
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.trainable().values():
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model
