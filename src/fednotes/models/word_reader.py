"""A `…ForTokenClassification` run on a corpus: its scores of every word.

A word is read above its first sub-word. What does not fit the model's positions is read in
overlapping windows, each sub-word from the one where it lies deepest. The library's model is
run whole, so its scores are the library's, but its classifier only where a word begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, ModelError
from fednotes.models.encoder import marks_of, positions_of
from fednotes.models.encoder_corpus import EncoderCorpus, padded_windows, window_groups
from fednotes.models.tagger_corpus import evaluating


@dataclass(frozen=True, eq=False)
class Words:
    """What the model says of the words of some units, in reading order.

    units, steps: how many, and words of the longest. token: (words,) of the corpus. place:
    (words,) in (units, steps) taken flat. logits: (words, tags). below: (words, width), what
    the classifier reads. layers: (words, width) above each layer, if asked for.
    """

    units: int
    steps: int
    token: np.ndarray
    place: Tensor
    logits: Tensor
    below: Tensor
    layers: tuple[Tensor, ...]

    def padded(self, values: Tensor) -> Tensor:
        """(words, …) → (units, steps, …), zero elsewhere. Each place is written once."""
        flat = values.new_zeros(self.units * self.steps, *values.shape[1:])
        flat = flat.index_copy(0, self.place, values)
        return flat.view(self.units, self.steps, *values.shape[1:])


class WordReader:
    """Runs a `…ForTokenClassification` whose `classifier` is linear.

    window: sub-words read at once, marks included; 0 = as many as the model has positions.
    capacity: those that fit between the marks. widths: columns of each of its layers.

    Raises ConfigError (a window that is too large or small), ModelError (it does not run).
    where: how messages call the model.
    """

    def __init__(self, model: Any, tokenizer: Any, window: int, where: str) -> None:
        self._model, self._where = model, where
        before, after = marks_of(tokenizer)
        self._marks = (tuple(before), tuple(after))
        self._pad = tokenizer.pad_token_id or 0
        positions = positions_of(tokenizer, model)
        if window > positions:
            raise ConfigError(f"window = {window}: {where} reads {positions} sub-words at most")
        self.capacity = (window or positions) - len(before) - len(after)
        if self.capacity < 1:
            raise ConfigError(
                f"window = {window or positions}: no room for a word beside the "
                f"{len(before) + len(after)} marks"
            )
        self.widths = self._probe()

    @property
    def _classifier(self) -> nn.Linear:
        head: nn.Linear = self._model.classifier
        return head

    @property
    def _device(self) -> torch.device:
        return self._classifier.weight.device

    def read(
        self, corpus: EncoderCorpus, chosen: np.ndarray, every: bool = False, below: bool = True
    ) -> Words:
        """Run some units, their windows in groups of like length. below: keep those states."""
        bounds, device = corpus.encoded.bounds, self._device
        steps = int((bounds[chosen + 1] - bounds[chosen]).max())
        token, place = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        parts: list[tuple[Tensor, ...]] = []  # of each group: logits, below, layers
        for group in window_groups(corpus, chosen, self._rows, len(self._marks[0]), device):
            at = torch.from_numpy(group.at).to(device)
            logits, states, layers = self._run(group.ids, group.mask, at, every)
            parts.append((logits, states if below else states[:0].clone(), *layers))
            token.append(group.token)
            place.append(group.sentence * steps + group.token - bounds[chosen][group.sentence])
        if not parts:
            head = self._classifier
            empty = head.weight.new_zeros(0, head.in_features)
            layers = [empty.new_zeros(0, width) for width in self.widths if every]
            parts.append((head(empty), empty, *layers))
        where = np.concatenate(place)
        order = np.argsort(where)
        turn = torch.from_numpy(order).to(device)
        whole = [torch.cat(part) for part in zip(*parts, strict=True)]
        logits, states, *others = (v[turn] if len(v) == len(turn) else v for v in whole)
        there = torch.from_numpy(where[order]).to(device)
        tokens = np.concatenate(token)[order]
        return Words(len(chosen), steps, tokens, there, logits, states, tuple(others))

    def _rows(
        self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        padded, mask = padded_windows(ids, starts, lengths, self._marks, self._pad)
        return padded.to(self._device), mask.to(self._device)

    def _run(
        self, ids: Tensor, mask: Tensor, at: Tensor, every: bool
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The whole model, its classifier at some sub-words alone.

        ids, mask: (windows, longest). at: (words,) in them taken flat. Returns logits
        (words, tags), what the classifier read (words, width), and if asked for each layer's
        states (words, width).
        """
        read: list[Tensor] = []

        def pick(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
            read.append(inputs[0].flatten(0, 1).index_select(0, at))
            return (read[0],)

        handle = self._classifier.register_forward_pre_hook(pick)
        try:
            out = self._model(
                input_ids=ids,
                attention_mask=mask.long(),
                output_hidden_states=every,
                return_dict=True,
            )
        finally:
            handle.remove()
        layers = out.hidden_states[1:] if every else ()
        return out.logits, read[0], [s.flatten(0, 1).index_select(0, at) for s in layers]

    @torch.no_grad()
    def _probe(self) -> tuple[int, ...]:
        """One sub-word through the model: whether it runs, and how wide its layers are."""
        ids, mask = self._rows(np.full(1, self._pad), np.zeros(1, np.int64), np.ones(1, np.int64))
        at = torch.zeros(1, dtype=torch.long, device=self._device)
        try:
            with evaluating(self._model):
                _, _, layers = self._run(ids, mask, at, every=True)
        except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
            raise ModelError(f"{self._where}: does not work as a token classifier") from error
        return tuple(int(layer.shape[-1]) for layer in layers)
