"""What a language model has to guess: masked tokens (BERT), infilled spans (BART).

Vectorised over a batch; a function of the batch and the generator given, so a step replays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fednotes.core.errors import ConfigError
from fednotes.encoders.packing import Specials

IGNORED = -100  # the label of positions that count for no loss
MASKED, RANDOM = 0.8, 0.1  # shares of the chosen tokens; the rest stays as it is
_NO_WORD = 2.0  # above every random key


@dataclass(frozen=True, eq=False)
class Masked:
    """A batch to guess from.

    inputs: (batch, tokens) int64. labels: (batch, tokens) int64, the token's own id where it
    is to be guessed, -100 elsewhere.
    """

    inputs: np.ndarray
    labels: np.ndarray

    @property
    def positions(self) -> np.ndarray:
        """Flat positions of what is to be guessed, in order; (predictions,) int64."""
        return np.flatnonzero(self.labels != IGNORED)


def mask(
    ids: np.ndarray,
    specials: Specials,
    vocabulary: int,
    rng: np.random.Generator,
    *,
    rate: float = 0.15,
    max_predictions: int | None = None,
    continues: np.ndarray | None = None,
) -> Masked:
    """BERT's masked language model: a share of the words to guess, never a special token.

    ids: (batch, tokens), padded. Of each row's n tokens (special ones counted, as in the
    original) round(n · rate) are chosen without replacement, at least one and at most
    `max_predictions`; of these 80 % become [MASK], 10 % a random word, 10 % stay.
    continues: (vocabulary,) bool, whether a token goes on with the word before it. Given,
    whole words are chosen: in random order, each that still fits into the number.

    Raises ConfigError for a rate that is no share.
    """
    if not 0 < rate <= 1:
        raise ConfigError(f"the rate of masked tokens must be above 0 and at most 1, not {rate:g}")
    ids = np.asarray(ids, dtype=np.int64)
    words = ~np.isin(ids, specials.all)  # (batch, tokens)
    tokens = (ids != specials.pad).sum(1)
    wanted = np.maximum(1, np.rint(tokens * rate)).astype(np.int64)
    if max_predictions is not None:
        wanted = np.minimum(wanted, max_predictions)
    if continues is None:
        chosen = _choose_tokens(words, wanted, rng)
    else:
        chosen = _choose_words(words, np.asarray(continues)[ids], wanted, rng)
    fate = rng.random(ids.shape)
    allowed = _words_of(specials, vocabulary)
    random = allowed[rng.integers(0, len(allowed), ids.shape)]
    inputs = np.where(chosen & (fate < MASKED), specials.mask, ids)
    swapped = chosen & (fate >= MASKED) & (fate < MASKED + RANDOM)
    inputs = np.where(swapped, random, inputs)
    return Masked(inputs, np.where(chosen, ids, IGNORED))


@lru_cache(maxsize=8)
def _words_of(specials: Specials, vocabulary: int) -> np.ndarray:
    allowed = np.setdiff1d(np.arange(vocabulary), specials.all)
    allowed.flags.writeable = False
    return allowed


def _choose_tokens(words: np.ndarray, wanted: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """`wanted` words of each row, each as likely as the others; (batch, tokens) bool."""
    keys = np.where(words, rng.random(words.shape), _NO_WORD)
    ranks = keys.argsort(1, kind="stable").argsort(1, kind="stable")
    chosen: np.ndarray = (ranks < wanted[:, None]) & words
    return chosen


def _choose_words(
    words: np.ndarray, continues: np.ndarray, wanted: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Whole words of each row in random order, each that fits into what is left of `wanted`.

    A word is a token and the continuations after it; the first token of a stretch begins one
    even if it is a continuation (a long sentence may be cut inside a word).
    """
    batch, length = words.shape
    before = np.zeros_like(words)
    before[:, 1:] = words[:, :-1]
    starts = words & (~continues | ~before)
    number = np.maximum(starts.cumsum(1) - 1, 0)  # (batch, tokens): the word of each token
    rows = np.broadcast_to(np.arange(batch)[:, None], words.shape)
    sizes = np.zeros((batch, length), np.int64)  # (batch, words)
    np.add.at(sizes, (rows[words], number[words]), 1)
    keys = np.where(sizes > 0, rng.random(sizes.shape), _NO_WORD)
    taken = np.zeros((batch, length), bool)  # (batch, words)
    left = wanted.copy()
    everyone = np.arange(batch)
    for column in keys.argsort(1, kind="stable").T[: int((sizes > 0).sum(1).max(initial=0))]:
        size = sizes[everyone, column]
        fits = (size > 0) & (size <= left)
        taken[everyone, column] |= fits
        left -= np.where(fits, size, 0)
        if not left.any():
            break
    return np.take_along_axis(taken, number, 1) & words


def denoise(
    ids: np.ndarray,
    specials: Specials,
    rng: np.random.Generator,
    *,
    rate: float = 0.3,
    mean: float = 3.0,
) -> Masked:
    """BART's text infilling (Lewis et al. 2019): spans, each replaced by one [MASK].

    ids: (batch, tokens), padded. Of each row's n words round(n · rate), at least one, lie in
    spans of Poisson(mean) words; a span of none inserts a [MASK]. Special tokens stay; a span
    that reaches over one becomes a [MASK] on either side of it. `inputs` are padded to the
    longest row, never longer than `ids`; `labels` are all of `ids`, -100 in the padding.

    Raises ConfigError for a rate that is no share or a mean that is not positive.
    """
    if not 0 < rate <= 1 or mean <= 0:
        raise ConfigError(f"infilling needs 0 < rate <= 1 and mean > 0, not {rate:g}, {mean:g}")
    ids = np.asarray(ids, dtype=np.int64)
    rows = [_infill(row[row != specials.pad], specials, rng, rate, mean) for row in ids]
    longest = min(ids.shape[1], max((len(row) for row in rows), default=0))
    inputs = np.full((len(rows), longest), specials.pad, np.int64)
    for index, row in enumerate(rows):
        inputs[index, : len(row)] = row
    return Masked(inputs, np.where(ids == specials.pad, IGNORED, ids))


def _infill(
    row: np.ndarray, specials: Specials, rng: np.random.Generator, rate: float, mean: float
) -> np.ndarray:
    """One row without padding, infilled; not longer than it was."""
    places = np.flatnonzero(~np.isin(row, specials.all))
    if not len(places):
        return row
    lengths = _span_lengths(max(1, round(len(places) * rate)), mean, rng)
    covered = int(lengths.sum())
    # A row in which every word that is kept, and every span, is one unit; spans are laid anywhere.
    units = np.ones(len(places) - covered + len(lengths), np.int64)
    spans = np.sort(rng.choice(len(units), len(lengths), replace=False))
    units[spans] = lengths
    starts = np.cumsum(units) - units  # (units,): the first word of each unit
    span_of = np.full(len(row) + 1, -1, np.int64)  # (tokens + 1,): the span of each token
    inserted = np.zeros(len(row) + 1, np.int64)  # [MASK]s before each token
    ends_at = np.append(places, places[-1] + 1)
    for number, unit in enumerate(spans.tolist()):
        first, size = int(starts[unit]), int(units[unit])
        span_of[places[first : first + size]] = number
        if size == 0:
            inserted[ends_at[first]] += 1
    begins = (span_of[:-1] >= 0) & (span_of[:-1] != np.append(-1, span_of[:-2]))
    kept = np.where(span_of[:-1] >= 0, np.where(begins, specials.mask, IGNORED), row)
    room = len(row) - int((kept != IGNORED).sum())
    after = np.cumsum(inserted)
    inserted = np.minimum(after, room) - np.minimum(after - inserted, room)
    out = np.repeat(np.append(kept, IGNORED), 1 + inserted)
    # Repeated tokens: all copies but the last stand for the [MASK]s inserted before it.
    last = np.cumsum(1 + inserted) - 1
    copies = np.ones(len(out), bool)
    copies[last] = False
    out = np.where(copies, specials.mask, out)
    return out[out != IGNORED]


def _span_lengths(budget: int, mean: float, rng: np.random.Generator) -> np.ndarray:
    """Poisson lengths that sum to exactly `budget`; the last one is cut, none follows it."""
    lengths = np.empty(0, np.int64)
    while lengths.sum() < budget:
        lengths = np.append(lengths, rng.poisson(mean, max(4, int(budget / mean) + 1)))
    total = np.cumsum(lengths)
    last = int(np.searchsorted(total, budget))
    lengths = lengths[: last + 1].copy()
    lengths[last] -= total[last] - budget
    return lengths
