"""How any Hugging Face encoder reads words; and one as frozen features.

Text becomes sub-words as `encoders/reading.py` says; a word's vector is the mean of its
sub-words (default) or the first one. Mean is the default because the end of a drug's or
a finding's name says what it is (-pril, -statin, -itis), and nobody trains a frozen
encoder to move that into the first piece. A sentence longer than the model's positions
is read in overlapping windows, and each sub-word is taken from the window where it lies
deepest.
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
from fednotes.data.text import Passage
from fednotes.encoders.pretrained import (
    NO_ENCODER,
    Frame,
    folder_fingerprint,
    open_encoder,
)
from fednotes.encoders.reading import Pieces, ranges, reading_version, split_passages

CPU = torch.device("cpu")
# most sub-words (with padding) and windows of a batch: what the caches
CPU_BATCH = (1024, 32)
# of a core hold is fastest there, an accelerator wants more
ACCELERATOR_BATCH = (16384, 256)


class Window(NamedTuple):
    """Sub-words start:end are read together; keep_start:keep_end are used."""

    start: int
    end: int
    keep_start: int
    keep_end: int


def windows(length: int, capacity: int) -> list[Window]:
    """Windows of `capacity` over `length` sub-words, a quarter or more of each shared.

    What is kept covers 0:length exactly once; between two windows it changes hands in
    the middle of what they share. The last window is full too, so that no context is
    lost.
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


class WindowGroup(NamedTuple):
    """Some windows that go through an encoder together.

    ids, mask: (windows, longest), on the model's device. at: (sub-words,) where those
    that are used stand in `ids` taken flat, once for each word that they are part of.
    token: (sub-words,) that word; share: the weight in it; sentence: the number of the
    sentence among those asked for.
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

    lengths: (sentences,) sub-words. ids: (sub-words,). place, word, share: (members,) a
    sub-word, the word that it is part of, and its weight in that word's vector, in the
    order of the sub-words; what is part of no word is context only. first, size:
    (windows,) sub-words that are read together; keep: (windows, 2) those that are used.
    window_bounds: (sentences + 1,).
    """

    lengths: np.ndarray
    ids: np.ndarray
    place: np.ndarray
    word: np.ndarray
    share: np.ndarray
    first: np.ndarray
    size: np.ndarray
    keep: np.ndarray
    window_bounds: np.ndarray

    @classmethod
    def of(cls, pieces: Pieces, capacity: int, pooling: str = "mean") -> SubWords:
        """Lay out sentences for reading.

        Args:
            pieces: The sub-words of the sentences, each a text of its own.
            capacity: Sub-words of a window at most.
            pooling: "mean" or "first", see `Pieces.members`.
        """
        lengths = pieces.lengths
        cuts = [
            windows(length, capacity) if length else [] for length in lengths.tolist()
        ]
        counts = np.array([len(each) for each in cuts], np.int64)
        rows = np.array([w for each in cuts for w in each], np.int64).reshape(-1, 4)
        rows += np.repeat(np.cumsum(lengths) - lengths, counts)[:, None]
        place, word, share = pieces.members(pooling)
        return cls(
            lengths=lengths,
            ids=pieces.ids,
            place=place,
            word=word,
            share=share,
            first=rows[:, 0],
            size=rows[:, 1] - rows[:, 0],
            keep=rows[:, 2:],
            window_bounds=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        )

    def groups(
        self, chosen: np.ndarray, frame: Frame, device: torch.device, marks: int = 0
    ) -> Iterator[WindowGroup]:
        """The windows of some sentences, in groups of like length.

        marks: counted with each window's sub-words in the size of a group. Every
        sub-word that is part of a word is used in exactly one group.
        """
        start = self.window_bounds[chosen]
        counts = self.window_bounds[chosen + 1] - start
        of_batch = ranges(start, counts)  # (windows,)
        owner = np.repeat(np.arange(len(chosen)), counts)
        limits = CPU_BATCH if device.type == "cpu" else ACCELERATOR_BATCH
        for group in length_batches((self.size[of_batch] + marks).tolist(), *limits):
            windows = of_batch[group]
            ids, mask = frame.rows(
                self.ids, self.first[windows], self.size[windows], device
            )
            # (windows,) members
            low, high = np.searchsorted(self.place, self.keep[windows].T)
            used = ranges(low, high - low)
            row = np.repeat(np.arange(len(windows)), high - low)
            column = self.place[used] - self.first[windows][row] + len(frame.prefix)
            yield WindowGroup(
                ids=ids,
                mask=mask,
                at=row * ids.shape[1] + column,
                token=self.word[used],
                share=self.share[used],
                sentence=owner[group][row],
            )


def length_batches(lengths: Sequence[int], budget: int, rows: int) -> list[np.ndarray]:
    """Indices in batches of like length: at most `rows` each, and rows * longest ≤
    budget.

    Longest first, so that the batch that needs most memory comes first. A length above
    the budget makes a batch of its own. Stable: equal input gives equal batches.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    batches, start = [], 0
    while start < len(order):
        size = max(1, min(rows, budget // max(1, lengths[order[start]])))
        batches.append(order[start : start + size])
        start += size
    return batches


def to_half(vectors: Tensor, source: str | Path) -> np.ndarray:
    """Any float tensor → float16 array.

    Raises ModelError where a value does not fit.
    """
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
    bottom to top; layer: one of them instead (0 are the word vectors). Raises
    ModelError (no safetensors, not an encoder, damaged), ConfigError (a layer that is
    not there), MissingExtra.
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
            raise ConfigError(
                f"{directory}: has {len(states)} layers, layers={layers} is asked"
            )
        if layer is not None and not 0 <= layer < len(states):
            last = len(states) - 1
            raise ConfigError(
                f"{directory}: has layers 0 to {last}, layer={layer} is asked"
            )
        self.layers = layers if layer is None else 1
        self._chosen = (
            slice(-layers, None) if layer is None else slice(layer, layer + 1)
        )
        self._last_alone = layer is None and layers == 1
        self.dim = int(states[-1].shape[-1])
        # Now, not when it is asked for: the files may have changed by then.
        self.fingerprint = folder_fingerprint(
            directory,
            kind="transformers",
            version=reading_version(self._tokenizer),
            pooling=pooling,
            layers=layers,
            layer=layer,
        )

    def encode(self, sentences: Sequence[Passage]) -> np.ndarray:
        """Sentences with their words → (sum of words, layers, dim) float16.

        A word of which the tokenizer leaves nothing (white space, control characters)
        is zero.
        """
        return to_half(self.hidden(sentences), self._directory)

    @torch.inference_mode()
    def hidden(self, sentences: Sequence[Passage]) -> Tensor:
        """As `encode`, in float32."""
        frame = self._frame
        pieces = split_passages(self._tokenizer, sentences)
        text = SubWords.of(pieces, frame.capacity, self._pooling)
        out = torch.zeros(len(pieces.first), self.layers, self.dim)
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
    ids, mask = frame.rows(
        np.full(1, frame.pad), np.zeros(1, int), np.ones(1, int), device
    )
    try:
        found = model(
            input_ids=ids,
            attention_mask=mask.long(),
            output_hidden_states=True,
            return_dict=True,
        )
        return tuple(found.hidden_states)
    except NO_ENCODER as error:
        raise ModelError(f"{where}: does not work as a text encoder") from error
