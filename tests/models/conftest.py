"""A tiny random BART for the tests of what is built on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

PIECES = "Cloz ind ak ath isia child ren schiz drug ade dis ease find ing with in no pa".split()


def pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A byte-level vocabulary: every letter, and the pieces above built letter by letter."""
    letters = [*"abcdefghijklmnopqrstuvwxyzACDE.,", "Ġ"]
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *letters]
    merges: list[tuple[str, str]] = []
    for piece in PIECES:
        for size in range(1, len(piece)):
            pair = (piece[:size], piece[size])
            if pair not in merges:
                merges.append(pair)
                words.append("".join(pair))
    return {word: i for i, word in enumerate(words)}, merges


def save_bart(path: Path, **changes: Any) -> Path:
    """A BART directory: 2 + 2 layers of 32, room for 38 sub-words beside the marks."""
    vocabulary, merges = pieces()
    import transformers

    transformers.RobertaTokenizerFast(vocab=vocabulary, merges=merges).save_pretrained(path)
    settings: dict[str, Any] = {
        "vocab_size": len(vocabulary),
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 40,
        "init_std": 0.3,
    }
    torch.manual_seed(0)
    transformers.BartModel(transformers.BartConfig(**settings | changes)).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def make_bart() -> Callable[..., Path]:
    """make_bart(folder, **changes of its configuration) writes such a directory."""
    pytest.importorskip("transformers")
    return save_bart


@pytest.fixture(scope="session")
def bart(make_bart: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One such directory for all tests; they only read it."""
    return make_bart(tmp_path_factory.mktemp("bart"))
