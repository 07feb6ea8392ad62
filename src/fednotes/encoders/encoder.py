"""How any Hugging Face encoder reads words; and one as frozen features.

The words are given (the project's own tokens), so each word's sub-words are known: its
vector is their mean (default) or the first one. Mean is the default because the end of a
drug's or a finding's name says what it is (-pril, -statin, -itis), and nobody trains a frozen
encoder to move that into the first piece. A sentence longer than the model's positions is
read in overlapping windows, and each sub-word is taken from the window where it lies deepest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import ConfigError, ModelError
from fednotes.encoders.pretrained import NO_ENCODER, Frame, folder_fingerprint, open_encoder

CPU = torch.device("cpu")
CPU_BATCH = (1024, 32)  # most sub-words (with padding) and windows of a batch: what the caches
ACCELERATOR_BATCH = (16384, 256)  # of a core hold is fastest there, an accelerator wants more


class Window(NamedTuple):
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


class Pieces(NamedTuple):
    """The sub-words of one sentence: ids; the number of each one's word in the whole call; its
    weight in the word's vector (a word's weights sum to 1)."""

    ids: list[int]
    words: np.ndarray
    shares: np.ndarray


def sub_words(
    tokenizer: Any, sentences: Sequence[Sequence[str]], pooling: str = "mean"
) -> list[Pieces]:
    """Sub-words of each sentence that has words."""
    starts = np.cumsum([0, *map(len, sentences)])
    kept = [i for i, words in enumerate(sentences) if len(words)]
    if not kept:
        return []
    result = tokenizer(
        # Lone surrogates, which no tokeniser takes, become question marks.
        [[w.encode("utf-8", "replace").decode("utf-8") for w in sentences[i]] for i in kept],
        is_split_into_words=True,
        add_special_tokens=False,
        padding=False,
        truncation=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return [
        _pieces(result["input_ids"][n], result.word_ids(n), int(starts[i]), pooling)
        for n, i in enumerate(kept)
    ]


def _pieces(ids: list[int], word: list[int | None], start: int, pooling: str) -> Pieces:
    # A sub-word of no word (white space that some tokenisers keep) is context only.
    owner = np.array([-1 if w is None else w for w in word], dtype=np.int64)
    if pooling == "first":
        shares = (np.diff(owner, prepend=-1) != 0).astype(np.float32)
    else:
        size = np.bincount(owner + 1, minlength=1)
        shares = (1 / size[owner + 1]).astype(np.float32)
    shares[owner < 0] = 0
    return Pieces(ids, np.maximum(owner, 0) + start, shares)


class WindowGroup(NamedTuple):
    """Some windows that go through an encoder together.

    ids, mask: (windows, longest), on the model's device. at: (sub-words,) where those that
    are used stand in `ids` taken flat. token: (sub-words,) the word that each is part of;
    share: its weight in that; sentence: the number of its sentence among those asked for.
    """

    ids: Tensor
    mask: Tensor
    at: np.ndarray
    token: np.ndarray
    share: np.ndarray
    sentence: np.ndarray


@dataclass(frozen=True, eq=False)
class SubWords:
    """Sentences as sub-words, flat: a mini-batch is put together by indexing alone.

    lengths: (sentences,) sub-words. ids, word, share: (sub-words,) id, the word that it is part
    of, and its weight in that word's vector (0: context only). first, size: (windows,)
    sub-words that are read together; keep: (windows, 2) those that are used. window_bounds:
    (sentences + 1,).
    """

    lengths: np.ndarray
    ids: np.ndarray
    word: np.ndarray
    share: np.ndarray
    first: np.ndarray
    size: np.ndarray
    keep: np.ndarray
    window_bounds: np.ndarray

    @classmethod
    def of(cls, pieces: Sequence[Pieces], capacity: int) -> SubWords:
        """The sentences one after the other; capacity: sub-words of a window at most."""
        lengths = np.array([len(p.ids) for p in pieces], np.int64)
        cuts = [windows(len(p.ids), capacity) if p.ids else [] for p in pieces]
        counts = np.array([len(each) for each in cuts], np.int64)
        rows = np.array([w for each in cuts for w in each], np.int64).reshape(-1, 4)
        rows += np.repeat(np.cumsum(lengths) - lengths, counts)[:, None]
        return cls(
            lengths=lengths,
            ids=np.array([i for p in pieces for i in p.ids], np.int32),
            word=np.concatenate([np.zeros(0, np.int64), *(p.words for p in pieces)]),
            share=np.concatenate([np.zeros(0, np.float32), *(p.shares for p in pieces)]),
            first=rows[:, 0],
            size=rows[:, 1] - rows[:, 0],
            keep=rows[:, 2:],
            window_bounds=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        )

    def groups(
        self, chosen: np.ndarray, frame: Frame, device: torch.device, marks: int = 0
    ) -> Iterator[WindowGroup]:
        """The windows of some sentences, in groups of like length.

        marks: counted with each window's sub-words in the size of a group. Every sub-word that
        is part of a word is used in exactly one group.
        """
        start = self.window_bounds[chosen]
        counts = self.window_bounds[chosen + 1] - start
        of_batch = ranges(start, counts)  # (windows,)
        owner = np.repeat(np.arange(len(chosen)), counts)
        limits = CPU_BATCH if device.type == "cpu" else ACCELERATOR_BATCH
        for group in length_batches((self.size[of_batch] + marks).tolist(), *limits):
            windows = of_batch[group]
            ids, mask = frame.rows(self.ids, self.first[windows], self.size[windows], device)
            kept = self.keep[windows, 1] - self.keep[windows, 0]
            used = ranges(self.keep[windows, 0], kept)  # (sub-words,) of all
            row = np.repeat(np.arange(len(windows)), kept)
            counted = self.share[used] > 0
            used, row = used[counted], row[counted]
            column = used - self.first[windows][row] + len(frame.prefix)
            yield WindowGroup(
                ids=ids,
                mask=mask,
                at=row * ids.shape[1] + column,
                token=self.word[used],
                share=self.share[used],
                sentence=owner[group][row],
            )


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """arange(start, start + length) of each, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def length_batches(lengths: Sequence[int], budget: int, rows: int) -> list[np.ndarray]:
    """Indices in batches of like length: at most `rows` each, and rows * longest ≤ budget.

    Longest first, so that the batch that needs most memory comes first. A length above the
    budget makes a batch of its own. Stable: equal input gives equal batches.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    batches, start = [], 0
    while start < len(order):
        size = max(1, min(rows, budget // max(1, lengths[order[start]])))
        batches.append(order[start : start + size])
        start += size
    return batches


def to_half(vectors: Tensor, source: str | Path) -> np.ndarray:
    """Any float tensor → float16 array. Raises ModelError where a value does not fit."""
    half = vectors.to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        raise ModelError(
            f"{source}: gives vectors that are not finite in float16; "
            "the weights are damaged or made for another use"
        )
    array: np.ndarray = half.cpu().numpy()
    return array


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
        layer: int | None = None,
    ) -> None:
        self._directory, self._pooling = directory, pooling
        self._tokenizer, self._model = open_encoder(directory)
        self._frame = Frame.of(directory, self._tokenizer, self._model)
        states = hidden_layers(directory, self._model, self._frame, CPU)
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
        self.fingerprint = folder_fingerprint(
            directory, kind="transformers", version=1, pooling=pooling, layers=layers, layer=layer
        )

    def encode(self, sentences: Sequence[Sequence[str]]) -> np.ndarray:
        """Words of each sentence → (sum of words, layers, dim) float16.

        A word of which the tokeniser leaves nothing (white space, control characters) is zero.
        """
        return to_half(self.hidden(sentences), self._directory)

    @torch.inference_mode()
    def hidden(self, sentences: Sequence[Sequence[str]]) -> Tensor:
        """As `encode`, in float32."""
        frame = self._frame
        text = SubWords.of(sub_words(self._tokenizer, sentences, self._pooling), frame.capacity)
        out = torch.zeros(sum(len(words) for words in sentences), self.layers, self.dim)
        marks = len(frame.prefix) + len(frame.suffix)
        for group in text.groups(np.arange(len(text.lengths)), frame, CPU, marks):
            result = self._model(
                input_ids=group.ids,
                attention_mask=group.mask.long(),
                output_hidden_states=not self._last_alone,
                return_dict=True,
            )
            last = (result.last_hidden_state,)
            states = last if self._last_alone else result.hidden_states[self._chosen]
            at = torch.from_numpy(group.at)
            chosen = torch.stack([state.flatten(0, 1)[at] for state in states], 1)
            share = torch.from_numpy(group.share)[:, None, None]
            out.index_add_(0, torch.from_numpy(group.token), chosen.float() * share)
        return out


@torch.no_grad()
def hidden_layers(
    where: object, model: Any, frame: Frame, device: torch.device
) -> tuple[Tensor, ...]:
    """All hidden layers of one padding sub-word: how many there are, and how wide.

    Raises ModelError where there are none.
    """
    ids, mask = frame.rows(np.full(1, frame.pad), np.zeros(1, int), np.ones(1, int), device)
    try:
        found = model(
            input_ids=ids, attention_mask=mask.long(), output_hidden_states=True, return_dict=True
        )
        return tuple(found.hidden_states)
    except NO_ENCODER as error:
        raise ModelError(f"{where}: does not work as a text encoder") from error
