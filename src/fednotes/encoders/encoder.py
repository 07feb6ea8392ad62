"""Reading words with any Hugging Face encoder, and frozen features from it.

Text is split into sub-words by `encoders/reading.py`. A word's vector is the mean of
its sub-words (the default) or the first one. The mean is the default because the end of
the name of a drug or finding is informative (-pril, -statin, -itis), and a frozen
encoder cannot learn to move this information into the first sub-word. A sentence longer
than the model's positions is read in overlapping windows, and each sub-word is taken
from the window in which it is farthest from the edges.
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
from fednotes.core.work import count_items
from fednotes.data.text import Passage
from fednotes.encoders.pretrained import (
    NO_ENCODER,
    Frame,
    compute_folder_fingerprint,
    open_encoder,
)
from fednotes.encoders.reading import (
    Pieces,
    choose_reading_version,
    concatenate_ranges,
    split_passages,
)

CPU = torch.device("cpu")
# The largest batch: sub-words with padding, and windows. On a CPU a batch that fits a
# core's caches is fastest; an accelerator needs larger ones.
CPU_BATCH = (1024, 32)
ACCELERATOR_BATCH = (16384, 256)


class Window(NamedTuple):
    """A window that reads sub-words start:end and uses keep_start:keep_end."""

    start: int
    end: int
    keep_start: int
    keep_end: int


def cut_into_windows(length: int, capacity: int) -> list[Window]:
    """Return windows over `length` sub-words, each of `capacity` sub-words.

    Neighbouring windows overlap by at least a quarter. The kept ranges cover 0:length
    exactly once; the later window is used from the middle of the overlap. The last
    window is also full, so that no context is lost.
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
    """Windows that an encoder reads as one batch.

    A sub-word that is part of several words appears once for each.

    Attributes:
        ids: (windows, longest) ids, on the model's device.
        mask: (windows, longest) bool, False at padding, on the model's device.
        position: (sub-words,) positions of the used sub-words in the flattened `ids`.
        token: (sub-words,) the word of each, as an index over the corpus.
        share: (sub-words,) the weight of each in its word.
        sentence: (sub-words,) the position of the sentence in the request.
    """

    ids: Tensor
    mask: Tensor
    position: np.ndarray
    token: np.ndarray
    share: np.ndarray
    sentence: np.ndarray


@dataclass(frozen=True, eq=False)
class SubWords:
    """Sentences as flat sub-words, from which indexing builds mini-batches.

    Each member pairs a sub-word with one of its words, in the order of the sub-words. A
    sub-word without a word is only context.

    Attributes:
        lengths: (sentences,) number of sub-words.
        ids: (sub-words,).
        place: (members,) the sub-word.
        word: (members,) the word of the sub-word.
        share: (members,) the sub-word's weight in the word's vector.
        first: (windows,) the first sub-word of each window.
        size: (windows,) number of sub-words that are read together.
        keep: (windows, 2) bounds of the sub-words that are used.
        window_bounds: (sentences + 1,) sentence s has the windows
            window_bounds[s]:window_bounds[s + 1].
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
            pieces: The sub-words of the sentences, each tokenized separately.
            capacity: The largest number of sub-words in a window.
            pooling: "mean" or "first"; see `Pieces.list_members`.
        """
        lengths = pieces.lengths
        cuts = [
            cut_into_windows(length, capacity) if length else []
            for length in lengths.tolist()
        ]
        counts = np.array([len(each) for each in cuts], np.int64)
        # The fields of each `Window`: start, end, and the bounds of what is kept. They
        # count from the beginning of the sentence, then of the corpus.
        all_windows = [window for each in cuts for window in each]
        bounds = np.array(all_windows, np.int64).reshape(-1, 4)
        bounds += np.repeat(np.cumsum(lengths) - lengths, counts)[:, None]
        place, word, share = pieces.list_members(pooling)
        return cls(
            lengths=lengths,
            ids=pieces.ids,
            place=place,
            word=word,
            share=share,
            first=bounds[:, 0],
            size=bounds[:, 1] - bounds[:, 0],
            keep=bounds[:, 2:],
            window_bounds=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        )

    def iterate_groups(
        self, chosen: np.ndarray, frame: Frame, device: torch.device, marks: int = 0
    ) -> Iterator[WindowGroup]:
        """Yield the windows of some sentences in groups of similar length.

        Every sub-word that is part of a word is used in exactly one group.

        Args:
            chosen: Indices of the sentences.
            frame: The encoder's frame.
            device: The encoder's device.
            marks: Number of special tokens to count in the size of a window.
        """
        start = self.window_bounds[chosen]
        counts = self.window_bounds[chosen + 1] - start
        batch_windows = concatenate_ranges(start, counts)
        owner = np.repeat(np.arange(len(chosen)), counts)
        limits = CPU_BATCH if device.type == "cpu" else ACCELERATOR_BATCH
        sizes = (self.size[batch_windows] + marks).tolist()
        for group in batch_similar_lengths(sizes, *limits):
            windows = batch_windows[group]
            ids, mask = frame.make_rows(
                self.ids, self.first[windows], self.size[windows], device
            )
            # Each window uses only the members low:high; the sub-words around them are
            # read as context.
            low, high = np.searchsorted(self.place, self.keep[windows].T)
            members = concatenate_ranges(low, high - low)
            row = np.repeat(np.arange(len(windows)), high - low)
            column = self.place[members] - self.first[windows][row] + len(frame.prefix)
            yield WindowGroup(
                ids=ids,
                mask=mask,
                position=row * ids.shape[1] + column,
                token=self.word[members],
                share=self.share[members],
                sentence=owner[group][row],
            )


def batch_similar_lengths(
    lengths: Sequence[int], budget: int, rows: int
) -> list[np.ndarray]:
    """Return indices in batches of similar length.

    A batch has at most `rows` items, and items * longest ≤ budget. The longest items
    come first, because the batch that needs the most memory should fail first. An item
    longer than the budget is a batch by itself. The result is deterministic.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    batches = []
    start = 0
    while start < len(order):
        size = max(1, min(rows, budget // max(1, lengths[order[start]])))
        batches.append(order[start : start + size])
        start += size
    return batches


def to_half(vectors: Tensor, source: str | Path) -> np.ndarray:
    """Return a float tensor as a float16 array.

    Args:
        vectors: The tensor.
        source: The origin of the vectors, for the message.

    Raises:
        ModelError: A value is not finite in float16.
    """
    half = vectors.to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        raise ModelError(
            f"{source}: the encoder returns vectors that are not finite in float16: "
            "its weights are damaged or meant for another purpose; use another encoder"
        )
    array: np.ndarray = half.cpu().numpy()
    return array


class HuggingFaceEncoder:
    """A frozen encoder from a local directory; see `features.FrozenEncoder`.

    Args:
        directory: A Hugging Face directory.
        pooling: A word's vector is the "mean" of its sub-words or the "first" one.
        layers: Number of hidden layers to return, the last ones, bottom to top.
        layer: A single layer to return instead; 0 is the embeddings.

    Raises:
        ModelError: There are no safetensors, they are damaged, or the model is not an
            encoder.
        ConfigError: There is no such layer.
        MissingExtra: A package is missing.
    """

    def __init__(
        self,
        directory: Path,
        pooling: str = "mean",
        layers: int = 1,
        layer: int | None = None,
    ) -> None:
        self._directory = directory
        self._pooling = pooling
        self._tokenizer, self._model = open_encoder(directory)
        self._frame = Frame.of(directory, self._tokenizer, self._model)
        states = try_encoder(directory, self._model, self._frame, CPU)
        if not 1 <= layers <= len(states):
            raise ConfigError(
                f"{directory}: has {len(states)} layers, but layers={layers}: give 1 "
                f"to {len(states)}"
            )
        if layer is not None and not 0 <= layer < len(states):
            last = len(states) - 1
            raise ConfigError(
                f"{directory}: has layers 0 to {last}, but layer={layer}: give one of "
                "these"
            )
        if layer is None:
            self.layers = layers
            self._chosen = slice(-layers, None)
        else:
            self.layers = 1
            self._chosen = slice(layer, layer + 1)
        self._needs_last_only = layer is None and layers == 1
        self.dim = int(states[-1].shape[-1])
        # Computed now because the files may change later.
        self.fingerprint = compute_folder_fingerprint(
            directory,
            kind="transformers",
            version=choose_reading_version(self._tokenizer),
            pooling=pooling,
            layers=layers,
            layer=layer,
        )

    def encode(self, sentences: Sequence[Passage]) -> np.ndarray:
        """Return (words of all sentences, layers, dim) float16.

        A word without sub-words (white space, control characters) is zero.
        """
        return to_half(self.compute_hidden(sentences), self._directory)

    @torch.inference_mode()
    def compute_hidden(self, sentences: Sequence[Passage]) -> Tensor:
        """Return the same vectors as `encode`, in float32."""
        frame = self._frame
        pieces = split_passages(self._tokenizer, sentences)
        sub_words = SubWords.of(pieces, frame.capacity, self._pooling)
        all_sentences = np.arange(len(sub_words.lengths))
        num_marks = len(frame.prefix) + len(frame.suffix)
        groups = sub_words.iterate_groups(all_sentences, frame, CPU, num_marks)
        # (words, layers, dim): each sub-word adds its share to the vector of its word.
        vectors = torch.zeros(len(pieces.first), self.layers, self.dim)
        for group in count_items(groups, "reading windows"):
            result = self._model(
                input_ids=group.ids,
                attention_mask=group.mask.long(),
                output_hidden_states=not self._needs_last_only,
                return_dict=True,
            )
            if self._needs_last_only:
                states = (result.last_hidden_state,)
            else:
                states = result.hidden_states[self._chosen]
            position = torch.from_numpy(group.position)
            # (sub-words, layers, dim)
            used = torch.stack([state.flatten(0, 1)[position] for state in states], 1)
            share = torch.from_numpy(group.share)[:, None, None]
            word = torch.from_numpy(group.token)
            vectors.index_add_(0, word, used.float() * share)
        return vectors


@torch.no_grad()
def try_encoder(
    where: object, model: Any, frame: Frame, device: torch.device
) -> tuple[Tensor, ...]:
    """Return all hidden layers of one padding sub-word, to find their sizes.

    Args:
        where: The name of the model in messages.
        model: The model.
        frame: Its frame.
        device: Its device.

    Raises:
        ModelError: The model has no hidden layers, or does not run.
    """
    ids, mask = frame.make_padding_row(device)
    try:
        output = model(
            input_ids=ids,
            attention_mask=mask.long(),
            output_hidden_states=True,
            return_dict=True,
        )
        return tuple(output.hidden_states)
    except NO_ENCODER as error:
        raise ModelError(f"{where}: does not work as a text encoder") from error
