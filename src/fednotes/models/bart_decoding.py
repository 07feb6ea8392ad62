"""Batches of a pointer model, the scores of its targets, and greedy decoding with a cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.models.bart_backbone import Backbone
from fednotes.models.pointer import BEGIN, END, FIRST_LABEL, PAD, Grammar, first_position
from fednotes.models.pointer_corpus import PointerCorpus
from fednotes.models.prompts import KeyValues

PromptMap = Mapping[nn.Module, KeyValues]


@dataclass(frozen=True, eq=False)
class Sources:
    """Some sentences as the encoder reads them, padded behind.

    ids, mask: (batch, longest with marks), mask is True where there is something.
    text: (batch, sub-words) ids without marks; real: bool, where there is a sub-word.
    offset: marks before the text.
    """

    ids: Tensor
    mask: Tensor
    text: Tensor
    real: Tensor
    offset: int

    @classmethod
    def of(cls, corpus: PointerCorpus, chosen: np.ndarray, bart: Backbone, device: Any) -> Sources:
        """The sentences `chosen`, in that order."""
        lengths = corpus.lengths[chosen]
        before, after = len(bart.prefix), len(bart.suffix)
        column = np.arange(int(lengths.max()))
        real = column < lengths[:, None]  # (batch, sub-words)
        at = np.where(real, corpus.bounds[chosen][:, None] + column, 0)
        text = np.where(real, corpus.ids[at], bart.pad)
        ids = np.full((len(chosen), before + len(column) + after), bart.pad)
        ids[:, :before] = bart.prefix
        ids[:, before : before + len(column)] = text
        for k, mark in enumerate(bart.suffix):
            ids[np.arange(len(chosen)), before + lengths + k] = mark
        mask = np.arange(ids.shape[1]) < (before + lengths + after)[:, None]
        parts = [torch.from_numpy(part).to(device) for part in (ids, mask, text, real)]
        return cls(parts[0], parts[1], parts[2], parts[3], offset=before)


@dataclass(frozen=True, eq=False)
class Targets:
    """What the decoder is to write for some sentences, padded behind.

    ids: (batch, steps) with END, then PAD. real: (batch, steps) bool. pseudo: (batch, steps)
    bool, targets of an entity whose type the site does not annotate; END is never one.
    """

    ids: Tensor
    real: Tensor
    pseudo: Tensor

    @classmethod
    def of(cls, corpus: PointerCorpus, chosen: np.ndarray, device: Any) -> Targets:
        """The targets of the sentences `chosen`."""
        bounds, types = corpus.entity_bounds, corpus.tagset.types
        counts = np.diff(bounds)[chosen]
        most = int(counts.max())
        real = np.arange(most) < counts[:, None]  # (batch, entities)
        at = np.where(real, bounds[chosen][:, None] + np.arange(most), 0)
        shift = first_position(len(types))
        table = corpus.entities + np.array([shift, shift, FIRST_LABEL])  # [tagsets eq 2]
        ids = np.full((len(chosen), 3 * most + 1), PAD)
        pseudo = np.zeros(ids.shape, bool)
        if most:
            unknown = np.array([name not in corpus.known for name in types])
            other = unknown[corpus.entities[at, 2]] & real
            ids[:, :-1] = np.where(real[..., None], table[at], PAD).reshape(len(chosen), -1)
            pseudo[:, :-1] = np.repeat(other, 3, axis=1)
        ids[np.arange(len(chosen)), 3 * counts] = END
        parts = (torch.from_numpy(part).to(device) for part in (ids, ids != PAD, pseudo))
        return cls(*parts)

    @property
    def inputs(self) -> Tensor:
        """(batch, steps) what the decoder reads: BEGIN, then the targets but the last."""
        return torch.cat([torch.full_like(self.ids[:, :1], BEGIN), self.ids[:, :-1]], dim=1)


@dataclass(frozen=True, eq=False)
class Memory:
    """Encoded sentences, and the rows that stand for each id as input and as output.

    states, mask: the encoder's, (batch, longest, width) and (batch, longest). inputs, outputs:
    (batch, ids, width). open: (batch, ids) bool, ids that a target may be at all. layers: the
    outputs of the encoder's layers, where they were asked for.
    """

    states: Tensor
    mask: Tensor
    inputs: Tensor
    outputs: Tensor
    open: Tensor
    layers: tuple[Tensor, ...] = ()

    @classmethod
    def of(
        cls, bart: Any, sources: Sources, fixed: Tensor, prompts: PromptMap | None, states: bool
    ) -> Memory:
        """Run the encoder once. fixed: (3 + types, width) rows of the marks and the labels."""
        size, length = sources.text.shape
        result = bart.encoder(
            input_ids=sources.ids,
            attention_mask=sources.mask,
            output_hidden_states=states,
            prompts=prompts,
            return_dict=True,
        )
        encoded = result.last_hidden_state
        embedded = bart.get_input_embeddings()(sources.text)  # (batch, sub-words, width)
        found = encoded[:, sources.offset : sources.offset + length]
        marks = fixed.expand(size, -1, -1)
        allowed = torch.ones(size, len(fixed), dtype=torch.bool, device=fixed.device)
        allowed[:, [BEGIN, PAD]] = False
        return cls(
            encoded,
            sources.mask,
            torch.cat([marks, embedded], dim=1),
            torch.cat([marks, (found + embedded) / 2], dim=1),
            torch.cat([allowed, sources.real], dim=1),
            tuple(result.hidden_states[1:]) if states else (),
        )

    def read(self, ids: Tensor) -> Tensor:
        """The decoder's input for (batch, steps) ids: (batch, steps, width)."""
        return self.inputs.gather(1, ids.unsqueeze(-1).expand(-1, -1, self.inputs.shape[-1]))

    def scores(self, states: Tensor) -> Tensor:
        """Decoder states (batch, steps, width) → (batch, steps, ids), -inf where none may be."""
        raw = states @ self.outputs.transpose(1, 2)
        return raw.masked_fill(~self.open.unsqueeze(1), -torch.inf)

    def rows(self, index: Tensor) -> Memory:
        """The sentences of these rows alone."""
        parts = (self.states, self.mask, self.inputs, self.outputs, self.open)
        states, mask, inputs, outputs, allowed = (part[index] for part in parts)
        return Memory(states, mask, inputs, outputs, allowed)


def teacher_forced(
    bart: Any, memory: Memory, targets: Targets, prompts: PromptMap | None
) -> Tensor:
    """The decoder's last states, (batch, steps, width), each step given the true ones before.

    Padding stands behind, where a causal decoder does not look.
    """
    result = bart.decoder(
        inputs_embeds=memory.read(targets.inputs),
        encoder_hidden_states=memory.states,
        encoder_attention_mask=memory.mask,
        use_cache=False,
        prompts=prompts,
        return_dict=True,
    )
    states: Tensor = result.last_hidden_state
    return states


class Stepper:
    """The decoder one step at a time, keys and values of earlier steps kept."""

    def __init__(self, bart: Any, memory: Memory, prompts: PromptMap | None) -> None:
        self._bart, self._prompts, self.memory = bart, prompts, memory
        self._cache: Any = None

    def step(self, ids: Tensor) -> Tensor:
        """(batch,) ids just written → (batch, ids) scores of what comes next."""
        result = self._bart.decoder(
            inputs_embeds=self.memory.read(ids[:, None]),
            encoder_hidden_states=self.memory.states,
            encoder_attention_mask=self.memory.mask,
            past_key_values=self._cache,
            use_cache=True,
            prompts=self._prompts,
            return_dict=True,
        )
        self._cache = result.past_key_values
        return self.memory.scores(result.last_hidden_state)[:, 0]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone."""
        self.memory = self.memory.rows(rows)
        if self._cache is not None:
            self._cache.batch_select_indices(rows)


def greedy(stepper: Stepper, grammar: Grammar) -> list[np.ndarray]:
    """The best id at each step among those that the grammar allows.

    Returns each sentence's (steps,) ids, without END. Sentences that are done leave the batch.
    """
    size, device = len(grammar.starts), grammar.starts.device
    most = int(grammar.most.max())
    alive = torch.arange(size, device=device)
    written = torch.full((size, 3 * most), PAD, device=device)
    chosen = torch.full((size,), BEGIN, device=device)
    for step in range(3 * most):
        scores = stepper.step(chosen)
        scores = scores.masked_fill(~grammar.allowed(), -torch.inf)
        chosen = scores.argmax(dim=-1)  # [tagsets eq 4]
        going = chosen != END
        if not bool(going.all()):  # only in place of a start, so all stay in step
            rows = going.nonzero().squeeze(1)
            if not len(rows):
                break
            stepper.keep(rows)
            alive, chosen, grammar = alive[rows], chosen[rows], grammar.rows(rows)
        written[alive, step] = chosen
        grammar = grammar.after(chosen)
    table = written.cpu().numpy()
    return [row[row != PAD] for row in table]


def word_edges(corpus: PointerCorpus, chosen: np.ndarray, longest: int) -> Sequence[np.ndarray]:
    """(batch, longest) bool twice: where a word of the sentence begins, and where one ends."""
    counts = np.diff(corpus.word_bounds)[chosen]
    row = np.repeat(np.arange(len(chosen)), counts)
    skipped = np.repeat(corpus.word_bounds[chosen] - (np.cumsum(counts) - counts), counts)
    words = np.arange(len(row)) + skipped
    edges = []
    for at in (corpus.first, corpus.last):
        mask = np.zeros((len(chosen), longest), bool)
        mask[row, at[words]] = True
        edges.append(mask)
    return edges
