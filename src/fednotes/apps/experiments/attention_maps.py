"""Attention maps of encoders, and checks that encoders can be compared head by head.

A batch of maps is a pair of arrays:

- attention (texts, layers, heads, tokens, tokens): each row of the last axis is a
  distribution.
- lengths (texts,): each text's number of tokens; the remaining positions are padding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from fednotes.core.errors import ConfigError, DataError, ModelError, ParameterError
from fednotes.encoders.pretrained import (
    count_positions,
    find_encoder_directory,
    open_pretrained,
    require_complete,
)

Batch = tuple[np.ndarray, np.ndarray]  # attention and lengths

_NUMBERS_AT_ONCE = 2**24  # numbers in the maps of one batch: 64 MB


@dataclass(frozen=True, eq=False)
class AttentionModel:
    """An encoder that returns its attention.

    Attributes:
        directory: Its directory.
        tokenizer: Its tokenizer, of transformers.
        model: The encoder, of transformers.
        layers: Number of layers.
        heads: Number of heads in each layer.
        positions: Maximum number of tokens in its input.
    """

    directory: Path
    tokenizer: Any
    model: Any
    layers: int
    heads: int
    positions: int


def open_attention_model(spec: str | Path) -> AttentionModel:
    """Open a model that returns its attention; for an encoder-decoder, the encoder.

    Args:
        spec: "minilm" or a Hugging Face directory.

    Raises:
        ModelError: There is no such directory, it is damaged, or the model returns no
            attention or has layers with different numbers of heads.
        MissingExtra: transformers is not installed.
    """
    directory = find_encoder_directory(str(spec))
    # Only the eager implementation returns the maps.
    tokenizer, model, missing = open_pretrained(
        directory, "AutoModel", attn_implementation="eager"
    )
    require_complete(directory, tuple(name for name in missing if "pooler" not in name))
    positions = count_positions(tokenizer, model)
    if getattr(model.config, "is_encoder_decoder", False):
        model = model.get_encoder()
    model.eval()
    model.requires_grad_(requires_grad=False)

    one_token = np.array([[tokenizer.pad_token_id or 0]])
    try:
        maps = _read_maps(model, one_token, np.ones_like(one_token))
        _, layers, heads, _, _ = maps.shape
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise ModelError(
            f"{directory}: returns no attention maps: give a text encoder such as "
            "BERT, all of whose layers have the same number of heads"
        ) from error
    return AttentionModel(
        directory=directory,
        tokenizer=tokenizer,
        model=model,
        layers=layers,
        heads=heads,
        positions=positions,
    )


def _read_maps(model: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the attention of all heads.

    Args:
        model: The encoder.
        ids: (batch, tokens) int64.
        mask: (batch, tokens), 1 for tokens and 0 for padding.

    Returns:
        (batch, layers, heads, tokens, tokens) float32.
    """
    with torch.inference_mode():
        result = model(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            output_attentions=True,
            return_dict=True,
        )
        layers = [attention.float() for attention in result.attentions]
        maps: np.ndarray = torch.stack(layers, 1).numpy()
    return maps


def list_token_ids(
    model: AttentionModel, texts: Sequence[str], length: int
) -> list[list[int]]:
    """Return each text's token ids with special tokens, truncated to `length`.

    Raises:
        ParameterError: The model cannot read this length.
        DataError: A text has no tokens; the message counts texts from 1.
    """
    if not 1 <= length <= model.positions:
        raise ParameterError(
            f"`length` {length}: expected 1 to {model.positions}, the tokens "
            f"that {model.directory} reads at once"
        )
    marks = model.tokenizer.num_special_tokens_to_add()
    if length <= marks:
        raise ParameterError(
            f"`length` {length} leaves no room for text beside the model's "
            f"{marks} special tokens: raise it"
        )
    if not texts:
        return []  # some tokenizers reject an empty list
    result = model.tokenizer(
        [text.encode("utf-8", "replace").decode("utf-8") for text in texts],
        truncation=True,
        max_length=length,
        padding=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    ids: list[list[int]] = result["input_ids"]
    for number, of_text in enumerate(ids, 1):
        if not of_text:
            raise DataError(
                f"text {number} of {len(texts)} has no tokens: leave it out"
            )
    return ids


def compute_attention_maps(
    model: AttentionModel, texts: Sequence[str], length: int
) -> Iterator[Batch]:
    """Yield the attention of all heads, in the order of the texts, 64 MB at a time.

    Args:
        model: The model.
        texts: The texts.
        length: Maximum number of tokens of a text, including special tokens.

    Yields:
        Attention (float32) and lengths (int64) of a batch of texts.

    Raises:
        FednotesError: As `list_token_ids`.
    """
    numbers_per_text = model.layers * model.heads * length * length
    batch_size = max(1, _NUMBERS_AT_ONCE // numbers_per_text)
    pad = model.tokenizer.pad_token_id or 0
    ids = list_token_ids(model, texts, length)
    for start in range(0, len(ids), batch_size):
        batch = ids[start : start + batch_size]
        lengths = np.array([len(of_text) for of_text in batch], np.int64)
        padded = np.full((len(batch), int(lengths.max())), pad, np.int64)
        mask = (np.arange(padded.shape[1]) < lengths[:, None]).astype(np.int64)
        padded[mask == 1] = np.concatenate(batch)
        yield _read_maps(model.model, padded, mask), lengths


# ---- comparability -------------------------------------------------------------------


class Traits(NamedTuple):
    """Traits that two models must share to be compared head by head on the same texts.

    Attributes:
        layers: Number of layers.
        heads: Number of heads in each layer.
        vocabulary: The entries of the tokenizer.
        ids: The token ids of the texts.
    """

    layers: int
    heads: int
    vocabulary: Mapping[str, int]
    ids: Sequence[Sequence[int]]

    @classmethod
    def of(cls, model: AttentionModel, texts: Sequence[str], length: int) -> Traits:
        """Return a model's traits on these texts.

        Raises:
            FednotesError: As `list_token_ids`.
        """
        return cls(
            layers=model.layers,
            heads=model.heads,
            vocabulary=model.tokenizer.get_vocab(),
            ids=list_token_ids(model, texts, length),
        )


def require_comparable(models: Mapping[str, Traits]) -> None:
    """Raise ConfigError unless all models have the heads and tokenizer of the first.

    Args:
        models: The traits of each model by name.
    """
    (first_name, first), *others = models.items()
    for name, traits in others:
        if traits == first:
            continue
        difference = _describe_difference(first_name, first, name, traits)
        raise ConfigError(
            f"models {first_name!r} and {name!r} cannot be compared head by head: "
            f"{difference}: give models that started from the same pretrained model"
        )


def _describe_difference(a_name: str, a: Traits, b_name: str, b: Traits) -> str:
    """Describe the traits in which two models differ."""
    if (a.layers, a.heads) != (b.layers, b.heads):
        return (
            f"{a_name!r} has {a.layers} layers of {a.heads} heads, "
            f"{b_name!r} {b.layers} of {b.heads}"
        )
    if a.vocabulary != b.vocabulary:
        sizes = f"{len(a.vocabulary)} and {len(b.vocabulary)} entries"
        return f"their tokenizers differ ({sizes}, not the same)"
    return (
        "their tokenizers have the same entries but cut the texts differently (case, "
        "accents or marks)"
    )
