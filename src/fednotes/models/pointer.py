"""Entities as a sequence of pointers: ids, their grammar, and the repair of what breaks it.

Wang et al. 2023, section 3.1: the entities of a sentence are written one after the other as
[start, end, type] (Eq. 2), then an end token; a sentence without entities is the end token
alone, in training as in use. The layout of the ids, for T types and a sentence of n sub-words:

    0            BEGIN   what the decoder reads first; never written
    1            END     behind the last entity
    2            PAD     behind END in a batch; never written
    3 ... 2+T    the types, in the tag set's order
    3+T + p      the sentence's sub-word p = 0 ... n-1

A span's end is its last sub-word, inclusive: [0, 1, Drug] is the drug that the first two
sub-words name ("Clozapine", Figure 2). Positions count sub-words of the text alone: the begin
mark that a tokeniser puts before them is not counted, so sub-word p is the encoder's input
p + 1 where there is one such mark, as in BART (LightNER counts the mark: its p is ours + 1).

Entities come in one order: by start, the longer first, then by type as in the tag set. Eq. 5
writes a site's own annotation first and the pseudo-annotation behind it; by that rule one and
the same annotation would be another sequence at each site, since which types are a site's own
differs, and the sites would train the shared decoder against each other. The order also makes
the grammar strict: entities only increase, so decoding ends and repeats nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

BEGIN, END, PAD = 0, 1, 2
FIRST_LABEL = 3


def first_position(types: int) -> int:
    """The id of the sentence's first sub-word."""
    return FIRST_LABEL + types


def in_order(entities: np.ndarray) -> np.ndarray:
    """(entities, 3) start, end (inclusive), type: each once, in the order of the target."""
    rows = np.asarray(entities, dtype=np.int64).reshape(-1, 3)
    keyed = np.unique(rows * [1, -1, 1], axis=0)  # sorted by start, then -end, then type
    return np.asarray(keyed * [1, -1, 1])


def encode_entities(entities: np.ndarray, types: int) -> np.ndarray:
    """(entities, 3) start, end (inclusive), type index → (3 * entities + 1,) ids with END."""
    shift = first_position(types)
    ids = in_order(entities) + np.array([shift, shift, FIRST_LABEL])
    return np.append(ids.reshape(-1), END)


def repair(ids: Iterable[int], types: int, length: int) -> np.ndarray:
    """What can be read of any output: (entities, 3) start, end (inclusive), type, in order.

    As the paper says of "Drug, Drug" (Figure 2), a type that no span precedes is discarded;
    so is a type behind one position or more than two, a span whose end comes before its
    start, a position outside the sentence, and what is unfinished at the end. BEGIN and PAD
    are passed over; nothing is read behind END. ids: with or without END. length: sub-words.
    """
    shift = first_position(types)
    found: list[tuple[int, int, int]] = []
    span: list[int] = []
    for value in ids:
        if value == END:
            break
        if value in (BEGIN, PAD):
            continue
        if value >= shift:
            span.append(value - shift)
            continue
        if len(span) == 2 and span[0] <= span[1] < length:
            found.append((span[0], span[1], value - FIRST_LABEL))
        span = []
    return in_order(np.array(found, dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Grammar:
    """Which ids may come next, for a batch of sentences that are decoded in step.

    A sentence is decoded as start → end ≥ start → type → start or END, and each entity comes
    after the one before it in the target's order. All sentences of a batch are at the same of
    the three, so no step loops over sentences or sub-words.

    types: how many. starts, ends: (batch, sub-words) bool, where a word begins and where one
    ends; others cannot be chosen. most: (batch,) entities that a sentence may have. last:
    (batch, 3) the entity before. span: (batch, 0 to 2) what is chosen of the one now. count:
    entities that each sentence has.
    """

    types: int
    starts: Tensor
    ends: Tensor
    most: Tensor
    last: Tensor
    span: Tensor
    count: int = 0

    @classmethod
    def begin(cls, types: int, starts: Tensor, ends: Tensor, most: int) -> Grammar:
        """Before anything is decoded. No sentence gets more than `most` entities, nor more than
        it has words: without that, a model that has learnt nothing yet would write all there
        is room for."""
        last = torch.full((len(starts), 3), -1, device=starts.device)
        return cls(types, starts, ends, starts.sum(dim=1).clamp(max=most), last, last[:, :0])

    def allowed(self) -> Tensor:
        """(batch, 3 + types + sub-words) bool: what may come next; never empty."""
        size, length = self.starts.shape
        out = self.starts.new_zeros(size, first_position(self.types) + length)
        labels, positions = out.split([out.shape[1] - length, length], dim=1)
        at = torch.arange(length, device=out.device)
        start, end, kind = self.last.unsqueeze(-1).unbind(1)  # (batch, 1) each
        if self.span.shape[1] == 0:
            labels[:, END] = True
            again = (at == start) & self._room()[:, None]
            room = (self.most > self.count)[:, None]
            positions.copy_(self.starts & ((at > start) | again) & room)
            return out
        now = self.span[:, :1]
        if self.span.shape[1] == 1:
            shorter = (at < end) | ((at == end) & (kind < self.types - 1))
            positions.copy_(self.ends & (at >= now) & ((now > start) | shorter))
            return out
        same = (self.span == self.last[:, :2]).all(dim=1, keepdim=True)
        every = torch.arange(self.types, device=out.device)
        labels[:, FIRST_LABEL:] = ~same | (every > kind)
        return out

    def after(self, chosen: Tensor) -> Grammar:
        """With (batch,) ids chosen among the allowed; none of them END."""
        if self.span.shape[1] == 2:
            kind = (chosen - FIRST_LABEL)[:, None]
            last = torch.cat([self.span, kind], dim=1)
            return replace(self, last=last, span=self.span[:, :0], count=self.count + 1)
        position = (chosen - first_position(self.types))[:, None]
        return replace(self, span=torch.cat([self.span, position], dim=1))

    def rows(self, index: Tensor) -> Grammar:
        """The sentences of these rows alone."""
        parts = (self.starts, self.ends, self.most, self.last, self.span)
        starts, ends, most, last, span = (part[index] for part in parts)
        return Grammar(self.types, starts, ends, most, last, span, self.count)

    def _room(self) -> Tensor:
        """(batch,) whether another entity can begin where the last one did."""
        start, end, kind = self.last.unbind(1)
        at = torch.arange(self.starts.shape[1], device=self.starts.device)
        between = (at >= start[:, None]) & (at < end[:, None]) & self.ends
        return between.any(dim=1) | (kind < self.types - 1)
