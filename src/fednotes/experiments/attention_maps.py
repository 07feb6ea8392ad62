"""The attention maps of any Hugging Face encoder, a batch of texts at a time.

Attention heads compared: entropies, and Jensen–Shannon divergences between heads.

After Clark et al. 2019, "What does BERT look at?", sections 3.3 (entropy) and 6 (clustering of
heads), as Liu and Miller 2020, section 4.3 and table 2, use them. A query position's attention
is a distribution over the text's tokens; every position of every text counts the same, the
special tokens too, padding never. Everything is a sum over positions, so batches of maps come
and go: no more than one is in memory. Entropies and divergences are in nats.

A batch: attention (texts, layers, heads, tokens, tokens), each row over the last axis a
distribution, and lengths (texts,), tokens before the padding. Head h of layer l is number
l * heads + h.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from fednotes.core.errors import ConfigError, DataError, ModelError
from fednotes.core.tensors import device_of
from fednotes.encoders.pretrained import (
    encoder_directory,
    open_pretrained,
    positions_of,
    require_complete,
)

_FLOATS = 2**24  # of the maps of one batch: 64 MB


@dataclass(frozen=True, eq=False)
class AttentionModel:
    """An encoder that gives its attention. positions: tokens that it can read at once."""

    directory: Path
    tokenizer: Any
    model: Any
    layers: int
    heads: int
    positions: int
    device: str


def open_attention_model(spec: str | Path, device: str = "cpu") -> AttentionModel:
    """A model for `attention_maps`: "minilm" or a Hugging Face directory.

    Of an encoder-decoder it is the encoder. Raises ModelError (no such directory, damaged,
    gives no attention, layers with different numbers of heads), ConfigError (no such device),
    MissingExtra.
    """
    device_of(device)
    name = str(spec)
    directory = encoder_directory(name) if name == "minilm" else Path(spec).expanduser()
    # Only the plain implementation keeps the maps.
    tokenizer, model, missing = open_pretrained(directory, "AutoModel", attn_implementation="eager")
    require_complete(directory, tuple(name for name in missing if "pooler" not in name))
    positions = positions_of(tokenizer, model)
    if getattr(model.config, "is_encoder_decoder", False):
        model = model.get_encoder()
    model = model.to(device).eval().requires_grad_(False)
    layers, heads = _probe(directory, tokenizer, model, device)
    return AttentionModel(directory, tokenizer, model, layers, heads, positions, device)


def _probe(directory: Path, tokenizer: Any, model: Any, device: str) -> tuple[int, int]:
    """Layers and heads, from the maps of one token."""
    ids = np.array([[tokenizer.pad_token_id or 0]])
    try:
        shape = _run(model, ids, np.ones_like(ids), device).shape
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise ModelError(
            f"{directory}: gives no attention maps; give a text encoder such as BERT, all of "
            "whose layers have the same number of heads"
        ) from error
    return shape[1], shape[2]


def _run(model: Any, ids: np.ndarray, mask: np.ndarray, device: str) -> np.ndarray:
    """(batch, layers, heads, tokens, tokens) float32."""
    with torch.inference_mode():
        result = model(
            input_ids=torch.from_numpy(ids).to(device),
            attention_mask=torch.from_numpy(mask).to(device),
            output_attentions=True,
            return_dict=True,
        )
        maps: np.ndarray = torch.stack([a.float() for a in result.attentions], 1).cpu().numpy()
    return maps


def token_ids(model: AttentionModel, texts: Sequence[str], length: int) -> list[list[int]]:
    """Each text's ids with the model's marks, cut to `length`.

    Raises ConfigError for a length that the model cannot read, DataError for a text without
    a token (its number counts from 1).
    """
    if not 1 <= length <= model.positions:
        raise ConfigError(
            f"{model.directory}: reads 1 to {model.positions} tokens at once, length={length} "
            "is asked"
        )
    marks = model.tokenizer.num_special_tokens_to_add()
    if length <= marks:
        raise ConfigError(f"length={length} leaves no room beside the {marks} marks of the model")
    if not texts:
        return []  # which tokenizers do not take
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
    empty = next((number for number, line in enumerate(ids, 1) if not line), None)
    if empty is not None:
        raise DataError(f"text {empty} of {len(texts)} has no token: leave it out")
    return ids


def attention_maps(
    model: AttentionModel | str | Path,
    texts: Sequence[str],
    length: int = 128,
    batch: int | None = None,
    device: str = "cpu",
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The attention of all heads on the texts, in their order, a batch at a time.

    Yields attention (batch, layers, heads, tokens, tokens) float32, rows over the last axis
    distributions, and lengths (batch,) int64, the tokens of each text; rows and columns
    behind them are padding and mean nothing.

    model: opened, or what `open_attention_model` takes. length: tokens of a text at most, the
    marks included. batch: texts of a batch; None takes as many as fit 64 MB of maps.
    Raises what `open_attention_model` and `token_ids` raise, ConfigError for batch < 1.
    """
    if not isinstance(model, AttentionModel):
        model = open_attention_model(model, device)
    if batch is None:
        batch = max(1, _FLOATS // (model.layers * model.heads * length * length))
    if batch < 1:
        raise ConfigError(f"batch={batch}: give 1 or more")
    ids = iter(token_ids(model, texts, length))
    pad = model.tokenizer.pad_token_id or 0
    while lines := list(islice(ids, batch)):
        lengths = np.array([len(line) for line in lines], np.int64)
        padded = np.full((len(lines), int(lengths.max())), pad, np.int64)  # (batch, tokens)
        mask = (np.arange(padded.shape[1]) < lengths[:, None]).astype(np.int64)
        padded[mask == 1] = np.concatenate(lines)
        yield _run(model.model, padded, mask, model.device), lengths


@dataclass(frozen=True)
class Traits:
    """What must be equal for two models' heads to be compared on the same texts.

    vocabulary, ids: SHA-256 of the tokenizer's entries, and of what it makes of the texts.
    """

    layers: int
    heads: int
    tokens: int
    vocabulary: str
    ids: str


def traits_of(model: AttentionModel, texts: Sequence[str], length: int) -> Traits:
    """A model's traits on these texts. Raises as `token_ids`."""
    entries = sorted(model.tokenizer.get_vocab().items())
    return Traits(
        layers=model.layers,
        heads=model.heads,
        tokens=len(entries),
        vocabulary=_digest(entries),
        ids=_digest(token_ids(model, texts, length)),
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def require_comparable(models: Mapping[str, Traits]) -> None:
    """All models have the first one's heads and tokenizer. Raises ConfigError."""
    (name, first), *others = models.items()
    for other, traits in others:
        pair = f"models {name!r} and {other!r} cannot be compared head by head: "
        remedy = "; give models that were trained from the same one"
        if (first.layers, first.heads) != (traits.layers, traits.heads):
            raise ConfigError(
                f"{pair}{name!r} has {first.layers} layers of {first.heads} heads, {other!r} "
                f"{traits.layers} of {traits.heads}{remedy}"
            )
        if first.vocabulary != traits.vocabulary:
            raise ConfigError(
                f"{pair}their tokenizers differ ({first.tokens} and {traits.tokens} entries, "
                f"not the same){remedy}"
            )
        if first.ids != traits.ids:
            raise ConfigError(
                f"{pair}their tokenizers have the same entries but cut the texts differently "
                f"(case, accents or marks){remedy}"
            )


Floats = NDArray[np.float64]
Batch = tuple[np.ndarray, np.ndarray]

# Columns of a block: heads * 2048 floats and their logarithms stay in a core's own cache.
_COLUMNS = 2048
_TINY = np.float32(1e-30)  # makes 0 log 0 zero, without a branch


@dataclass(frozen=True, eq=False)
class Heads:
    """What is known of one model's heads on a sample.

    entropy: (layers, heads). divergence: (layers * heads, layers * heads), symmetric, zero on
    the diagonal. Both are means over `positions`, the tokens of `texts` texts.
    """

    entropy: Floats
    divergence: Floats
    positions: int
    texts: int

    @property
    def by_depth(self) -> Floats:
        """(layers,): the mean entropy of each layer's heads."""
        return self.entropy.mean(axis=1)


def measure(batches: Iterable[Batch]) -> Heads:
    """Entropies and divergences of all heads in one pass. Raises DataError (no position)."""
    entropies, divergences, positions, texts = np.zeros(1), np.zeros(1), 0, 0
    for attention, lengths in batches:
        entropies = entropies + entropy_sum(attention, lengths)
        divergences = divergences + divergence_sum(attention, lengths)
        positions += int(np.sum(lengths))
        texts += len(lengths)
    _require(positions)
    return Heads(entropies / positions, divergences / positions, positions, texts)


def _require(positions: int) -> None:
    if not positions:
        raise DataError("attention was measured on no token: give at least one text")


def _texts(attention: np.ndarray, lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Each text's maps without padding: (heads in all, tokens, tokens) float32."""
    for maps, length in zip(attention, lengths, strict=True):
        kept = maps[:, :, :length, :length]
        yield np.ascontiguousarray(kept, np.float32).reshape(-1, length, length)


def entropy_sum(attention: np.ndarray, lengths: np.ndarray) -> Floats:
    """(layers, heads): the entropies of one batch, summed over its positions."""
    layers, heads = attention.shape[1:3]
    total = np.zeros(layers * heads)
    for maps in _texts(attention, lengths):
        rows = np.einsum("hqk,hqk->hq", maps, np.log(maps + _TINY))  # [bert table 2 entropy]
        total -= rows.sum(axis=1, dtype=np.float64)
    # A distribution on one token may come out a rounding error below zero.
    return np.maximum(total, 0.0).reshape(layers, heads)


def divergence_sum(attention: np.ndarray, lengths: np.ndarray) -> Floats:
    """(heads in all, heads in all): JS of one batch, summed over its positions.

    Clark et al.'s program first mixes 0.1 % of the uniform distribution into each head, because
    its formula divides by it; here 0 log 0 is 0.

    JS(p, q) = H(m) − (H(p) + H(q)) / 2 with m = (p + q) / 2: of each pair of heads only m's
    entropy is new, one logarithm a pair and key.
    """
    count = attention.shape[1] * attention.shape[2]
    total = np.zeros((count, count))
    for maps in _texts(attention, lengths):
        halves = maps.reshape(count, -1) * np.float32(0.5) + _TINY
        for start in range(0, halves.shape[1], _COLUMNS):
            total += _pairs(np.ascontiguousarray(halves[:, start : start + _COLUMNS]))
    own = total.diagonal()  # m = p: minus the heads' own entropies, by the same additions
    found = (own[:, None] + own) / 2 - total  # [bert table 2 divergence]
    upper = np.triu(np.maximum(found, 0.0), 1)
    return upper + upper.T


def _pairs(halves: np.ndarray) -> Floats:
    """Σ m log m for each two rows' sum m, in the upper triangle: (rows, rows)."""
    found = np.zeros((len(halves), len(halves)))
    sums, logs = np.empty_like(halves), np.empty_like(halves)
    for first in range(len(halves)):
        m = np.add(halves[first:], halves[first], out=sums[first:])
        log = np.log(m, out=logs[first:])
        found[first, first:] = np.einsum("hk,hk->h", m, log)
    return found


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's rank correlation of two lists of numbers, of any shape but the same size.

    Ties get the mean of their ranks. NaN where all values of one are equal. Raises DataError
    (sizes differ, fewer than two values).
    """
    x, y = np.ravel(a), np.ravel(b)
    if len(x) != len(y) or len(x) < 2:
        raise DataError(
            f"a rank correlation of {len(x)} and {len(y)} values: "
            "give two lists of the same size, two values or more"
        )
    x, y = _ranks(x), _ranks(y)
    x, y = x - x.mean(), y - y.mean()
    scale = float(np.sqrt((x @ x) * (y @ y)))  # [bert table 2 spearman]
    # Pearson's correlation of the ranks. [bert table 2 spearman]
    return float((x @ y) / scale) if scale else float("nan")


def _ranks(values: np.ndarray) -> Floats:
    """Ranks from 1; equal values share the mean of theirs."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[which]


def matrix_distance(a: ArrayLike, b: ArrayLike) -> tuple[float, float]:
    """Mean and sum over all entries of the absolute differences of two JS matrices.

    The paper names the mean, which of matrices of mean divergences is ln 2 at most. Raises
    DataError where the shapes differ.
    """
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if x.shape != y.shape or not x.size:
        raise DataError(f"JS matrices of {x.shape} and {y.shape}: the models' heads differ")
    difference = np.abs(x - y)  # [bert table 2 distance]
    return float(difference.mean()), float(difference.sum())  # [bert table 2 distance]
