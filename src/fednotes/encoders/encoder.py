"""Any Hugging Face encoder as frozen features: one vector, or the last few, for each word.

The words are given (the project's own tokens), so each word's sub-words are known: its
vector is their mean (default) or the first one. Mean is the default because the end of a
drug's or a finding's name says what it is (-pril, -statin, -itis), and nobody trains a frozen
encoder to move that into the first piece. A sentence longer than the model's positions is
read in overlapping windows, and each sub-word is taken from the window where it lies deepest.
Weights are read from safetensors alone; nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import ConfigError, ModelError
from fednotes.encoders.frozen import fingerprint, length_batches, to_half
from fednotes.encoders.pretrained import open_pretrained, require_complete

CPU_BATCH = (1024, 32)  # most sub-words (with padding) and windows of a batch: what the caches
ACCELERATOR_BATCH = (16384, 256)  # of a core hold is fastest there, an accelerator wants more
FINGERPRINTED = ("*.safetensors", "*.json", "*.txt", "*.model")


@dataclass(frozen=True)
class Window:
    """Sub-words start:end are read together; keep_start:keep_end are used."""

    start: int
    end: int
    keep_start: int
    keep_end: int


def windows(length: int, capacity: int) -> list[Window]:
    """Windows of `capacity` over `length` sub-words, a quarter or more of each shared.

    What is kept covers 0:length exactly once; between two windows it changes hands in the
    middle of what they share. The last window is full too, so that no context is lost.
    """
    if length <= capacity:
        return [Window(0, length, 0, length)]
    step = max(1, capacity - capacity // 4)
    starts = [*range(0, length - capacity, step), length - capacity]
    cuts = [(a + capacity + b) // 2 for a, b in pairwise(starts)]
    return [
        Window(start, start + capacity, low, high)
        for start, low, high in zip(starts, [0, *cuts], [*cuts, length], strict=True)
    ]


class HuggingFaceEncoder:
    """A frozen encoder from a local directory.

    pooling: "mean" or "first" sub-word. layers: how many hidden layers, the last ones,
    bottom to top; layer: one of them instead (0 are the word vectors). Raises ModelError
    (no safetensors, not an encoder, damaged), ConfigError (a layer that is not there),
    MissingExtra.
    """

    def __init__(
        self,
        directory: Path,
        pooling: str = "mean",
        layers: int = 1,
        device: str = "cpu",
        layer: int | None = None,
    ) -> None:
        self._directory, self._pooling, self._device = directory, pooling, device
        self._tokenizer, self._model = open_encoder(directory, device)
        self._prefix, self._suffix = marks_of(self._tokenizer)
        self._pad = self._tokenizer.pad_token_id or 0
        marks = len(self._prefix) + len(self._suffix)
        self._capacity = positions_of(self._tokenizer, self._model) - marks
        if self._capacity < 1:
            raise ModelError(f"{directory}: the model has no room for a word beside its marks")
        states = self._probe()
        if not 1 <= layers <= len(states):
            raise ConfigError(f"{directory}: has {len(states)} layers, layers={layers} is asked")
        if layer is not None and not 0 <= layer < len(states):
            last = len(states) - 1
            raise ConfigError(f"{directory}: has layers 0 to {last}, layer={layer} is asked")
        self.layers = layers if layer is None else 1
        self._chosen = slice(-layers, None) if layer is None else slice(layer, layer + 1)
        self._last_alone = layer is None and layers == 1
        self.dim = int(states[-1].shape[-1])
        # Now, not when it is asked for: the files may have changed by then.
        files = {file for form in FINGERPRINTED for file in directory.glob(form)}
        self.fingerprint = fingerprint(
            files, kind="transformers", version=1, pooling=pooling, layers=layers, layer=layer
        )

    def encode(self, sentences: Sequence[Sequence[str]]) -> np.ndarray:
        """Words of each sentence → (sum of words, layers, dim) float16.

        A word of which the tokeniser leaves nothing (white space, control characters) is zero.
        """
        return to_half(self.hidden(sentences), self._directory)

    @torch.inference_mode()
    def hidden(self, sentences: Sequence[Sequence[str]]) -> Tensor:
        """As `encode`, in float32."""
        pieces = sub_words(self._tokenizer, sentences, self._pooling)
        parts = [(p, w) for p in pieces for w in windows(len(p.ids), self._capacity) if p.ids]
        total = sum(len(words) for words in sentences)
        out = torch.zeros(total, self.layers, self.dim)
        room = len(self._prefix) + len(self._suffix)
        lengths = [w.end - w.start + room for _, w in parts]
        limits = CPU_BATCH if self._device == "cpu" else ACCELERATOR_BATCH
        for batch in length_batches(lengths, *limits):
            self._add([parts[i] for i in batch], int(max(lengths[i] for i in batch)), out)
        return out

    def _add(self, batch: list[tuple[Pieces, Window]], longest: int, out: Tensor) -> None:
        """Run one batch of windows and add each kept sub-word's share to its word in `out`."""
        ids = torch.full((len(batch), longest), self._pad)  # (batch, sub-words)
        mask = torch.zeros(len(batch), longest, dtype=torch.long)
        rows, columns, words, shares = [], [], [], []
        for row, (piece, window) in enumerate(batch):
            inner = piece.ids[window.start : window.end]
            line = [*self._prefix, *inner, *self._suffix]
            ids[row, : len(line)] = torch.tensor(line)
            mask[row, : len(line)] = 1
            used = np.arange(window.keep_start, window.keep_end)
            used = used[piece.shares[used] > 0]
            rows.append(np.full(len(used), row))
            columns.append(used - window.start + len(self._prefix))
            words.append(piece.words[used])
            shares.append(piece.shares[used])
        at = [torch.from_numpy(np.concatenate(part)) for part in (rows, columns)]
        states = self._states(ids, mask)[self._chosen]
        chosen = [state[at[0].to(self._device), at[1].to(self._device)] for state in states]
        vectors = torch.stack(chosen, 1).float().cpu()  # (kept sub-words, layers, dim)
        share = torch.from_numpy(np.concatenate(shares))[:, None, None]
        # On the CPU, because the sum's order is not fixed on an accelerator.
        out.index_add_(0, torch.from_numpy(np.concatenate(words)), vectors * share)

    def _states(self, ids: Tensor, mask: Tensor, every: bool = False) -> tuple[Tensor, ...]:
        """Hidden layers of a batch, each (batch, sub-words, dim); only the last if enough."""
        every = every or not self._last_alone
        result = self._model(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            output_hidden_states=every,
            return_dict=True,
        )
        return tuple(result.hidden_states) if every else (result.last_hidden_state,)

    @torch.inference_mode()
    def _probe(self) -> tuple[Tensor, ...]:
        """All hidden layers of the empty sentence: how many there are, and how wide."""
        ids = torch.tensor([[*self._prefix, self._pad, *self._suffix]])
        try:
            return self._states(ids, torch.ones_like(ids), every=True)
        except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            raise ModelError(f"{self._directory}: does not work as a text encoder") from error


@dataclass(frozen=True)
class Pieces:
    """The sub-words of one sentence."""

    ids: list[int]
    words: np.ndarray  # (sub-words,) number of the word in the whole call
    shares: np.ndarray  # (sub-words,) weight in the word's vector; a word's shares sum to 1

    @classmethod
    def of(cls, ids: list[int], word: list[int | None], start: int, pooling: str) -> Pieces:
        # A sub-word of no word (white space that some tokenisers keep) is context only.
        owner = np.array([-1 if w is None else w for w in word], dtype=np.int64)
        first = np.diff(owner, prepend=-1) != 0
        if pooling == "first":
            shares = first.astype(np.float32)
        else:
            size = np.bincount(owner + 1, minlength=1)
            shares = (1 / size[owner + 1]).astype(np.float32)
        shares[owner < 0] = 0
        return cls(ids, owner + start, shares)


def sub_words(
    tokenizer: Any, sentences: Sequence[Sequence[str]], pooling: str = "mean"
) -> list[Pieces]:
    """Sub-words of each sentence that has words."""
    starts = np.cumsum([0, *map(len, sentences)])
    kept = [i for i, words in enumerate(sentences) if len(words)]
    if not kept:
        return []
    result = tokenizer(
        [[_clean(word) for word in sentences[i]] for i in kept],
        is_split_into_words=True,
        add_special_tokens=False,
        padding=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return [
        Pieces.of(result["input_ids"][n], result.word_ids(n), int(starts[i]), pooling)
        for n, i in enumerate(kept)
    ]


def _clean(word: str) -> str:
    """Lone surrogates, which no tokeniser takes, become question marks."""
    return word if word.isascii() else word.encode("utf-8", "replace").decode("utf-8")


def open_encoder(directory: Path, device: str) -> tuple[Any, Any]:
    """Tokeniser and frozen model. Quiet, local, complete: no weight may be left to chance.

    Raises ModelError (no safetensors, not an encoder, damaged), MissingExtra.
    """
    tokenizer, model, missing = open_pretrained(directory, "AutoModel")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{directory}: is an encoder-decoder; give an encoder")
    require_complete(directory, tuple(name for name in missing if "pooler" not in name))
    return tokenizer, model.to(device).requires_grad_(False)


def marks_of(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that the tokeniser puts before and after a sentence."""
    result = tokenizer(["a"], is_split_into_words=True, return_special_tokens_mask=True)
    ids, special = result["input_ids"], result["special_tokens_mask"]
    inner = [i for i, mark in enumerate(special) if not mark]
    if not inner:
        return list(ids), []
    return list(ids[: inner[0]]), list(ids[inner[-1] + 1 :])


def positions_of(tokenizer: Any, model: Any) -> int:
    """How many sub-words the model can read at once, marks included."""
    limits = [int(tokenizer.model_max_length)]  # a huge number where nobody set it
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions:
        # RoBERTa's family counts positions from behind its padding id.
        skipped = [
            module.padding_idx + 1
            for name, module in model.named_modules()
            if name.endswith("position_embeddings")
            and getattr(module, "padding_idx", None) is not None
        ]
        limits.append(int(positions) - max(skipped, default=0))
    limit = min(limits)
    return limit if limit < 100_000 else 512
