"""Tokens → training sequences, as the original BERT makes them (Devlin et al. 2018,
A.2), and what a language model has to guess of them: masked tokens (BERT), infilled
spans (BART).

    pairs     [CLS] A [SEP] B [SEP]; B follows A, or in half of the pairs comes from elsewhere
    full      [CLS] S [SEP] S [SEP] …; sentences in order until the sequence is full, no pairs

A plan says which stretches of the corpus make up which sequence: four numbers a
sequence, so a corpus of any size can be planned; `gather` then makes a batch. A plan
depends on the corpus, the seed and the epoch only; masks on the batch and the generator
given.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.seeds import rng_of
from fednotes.encoders.token_cache import Tokens

# share of documents whose pairs are made short on purpose, as in the original
SHORT = 0.1
_TRIES = 10  # to find another document than A's, as in the original
IGNORED = -100  # the label of positions that count for no loss
MASKED, RANDOM = 0.8, 0.1  # shares of the chosen tokens; the rest stays as it is
_NO_WORD = 2.0  # above every random key


@dataclass(frozen=True, slots=True)
class Specials:
    """Ids that are no words. `others` are such ids besides the four, [UNK] not among
    them."""

    cls: int
    sep: int
    mask: int
    pad: int
    others: tuple[int, ...] = ()

    @property
    def all(self) -> tuple[int, ...]:
        """Every one of them, once, in order."""
        return tuple(sorted({self.cls, self.sep, self.mask, self.pad, *self.others}))


@dataclass(frozen=True, eq=False)
class Plan:
    """Which tokens make up each sequence.

    stretches: (stretches, 2) int64, half-open, in the corpus' ids; each is followed by
        [SEP].
    bounds: (sequences + 1,) int64 bounds in `stretches`.
    random_next: (sequences,) bool, whether B is no continuation of A; None without
        pairs.
    """

    stretches: np.ndarray
    bounds: np.ndarray
    random_next: np.ndarray | None

    def __len__(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True, eq=False)
class Sequences:
    """A batch. ids, segments: (batch, longest) int64; segments are 1 in B, else 0.

    lengths: (batch,) int64, tokens before the padding. random_next: (batch,) int64, 1
    where B is random, BERT's label of next-sentence prediction; None without pairs.
    """

    ids: np.ndarray
    segments: np.ndarray
    lengths: np.ndarray
    random_next: np.ndarray | None


def _pieces(tokens: Tokens, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Sentences cut so that none is longer: bounds in the ids, and documents' bounds in
    them."""
    if len(tokens.ids) == 0 or len(tokens.documents) < 2:
        raise DataError("the corpus holds no token: give notes with text")
    starts, ends = np.asarray(tokens.sentences[:-1]), np.asarray(tokens.sentences[1:])
    counts = -(-(ends - starts) // longest)  # (sentences,)
    first = np.concatenate(([0], np.cumsum(counts)))
    owner = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(first[-1]) - first[owner]
    cuts = starts[owner] + number * longest
    return np.append(cuts, ends[-1]), first[np.asarray(tokens.documents)]


def plan_full(tokens: Tokens, length: int, seed: int, epoch: int) -> Plan:
    """Sequences of whole sentences, documents in a random order; every token in exactly
    one. A sequence goes on in the next document where there is room, with a [SEP]
    between the two."""
    if length < 3:
        raise ConfigError(
            f"sequences of {length} tokens hold no text: ask for at least 3"
        )
    room = length - 2
    bounds, documents = _pieces(tokens, room)
    order = rng_of(seed, "pack-full", epoch).permutation(len(documents) - 1)
    cuts = bounds.tolist()
    stretches: list[tuple[int, int]] = []
    sequences = [0]
    used = 1  # [CLS]
    for document in order.tolist():
        start = cuts[documents[document]]
        end = start
        if used + 2 > length:
            sequences.append(len(stretches))
            used = 1
        for piece in range(documents[document], documents[document + 1]):
            after = cuts[piece + 1]
            if used + after - start + 1 > length:
                if end > start:
                    stretches.append((start, end))
                if len(stretches) > sequences[-1]:
                    sequences.append(len(stretches))
                start, used = end, 1
            end = after
        stretches.append((start, end))
        used += end - start + 1
    sequences.append(len(stretches))
    return Plan(np.array(stretches, np.int64), np.array(sequences, np.int64), None)


def plan_pairs(tokens: Tokens, length: int, seed: int, epoch: int) -> Plan:
    """Pairs for next-sentence prediction, by the original's rule
    (`create_pretraining_data.py`).

    Sentences of a document are taken up to a target length. The target is drawn once a
    document: a tenth of the documents gets a shorter one for all of their pairs. A is a
    random number of the sentences; with probability 1/2, or if there is only one, B
    comes from a random place of another document, else it is the rest. A pair that is
    too long loses tokens of its longer half at either end. The one difference:
    sentences longer than half a sequence are cut first, where the original would throw
    the most of them away.
    """
    if length < 5:
        raise ConfigError(f"pairs of {length} tokens hold no text: ask for at least 5")
    room = length - 3
    bounds, documents = _pieces(tokens, (room + 1) // 2)
    rng = rng_of(seed, "pack-pairs", epoch)
    cuts, docs = bounds.tolist(), documents.tolist()
    pairs: list[tuple[int, int, int, int]] = []
    labels: list[bool] = []
    for document in rng.permutation(len(docs) - 1).tolist():
        _document_pairs(document, cuts, docs, room, rng, pairs, labels)
    order = rng.permutation(len(pairs))
    stretches = np.array(pairs, np.int64)[order].reshape(-1, 2)
    bounds_of = np.arange(0, len(stretches) + 1, 2, dtype=np.int64)
    return Plan(stretches, bounds_of, np.array(labels)[order])


def _document_pairs(
    document: int,
    cuts: list[int],
    docs: list[int],
    room: int,
    rng: np.random.Generator,
    pairs: list[tuple[int, int, int, int]],
    labels: list[bool],
) -> None:
    """One document's pairs, added to `pairs` and `labels`."""
    at, last = docs[document], docs[document + 1]
    target = int(rng.integers(2, room + 1)) if rng.random() < SHORT else room
    while at < last:
        end = at + 1
        while end < last and cuts[end] - cuts[at] < target:
            end += 1
        middle = at + (int(rng.integers(1, end - at)) if end - at >= 2 else 1)
        a = (cuts[at], cuts[middle])
        random_next = end - at == 1 or rng.random() < 0.5
        if random_next:
            b = _elsewhere(document, cuts, docs, target - (a[1] - a[0]), rng)
            end = middle
        else:
            b = (cuts[middle], cuts[end])
        pairs.append((*_shorten(a, b, room, rng),))
        labels.append(random_next)
        at = end


def _elsewhere(
    document: int,
    cuts: list[int],
    docs: list[int],
    target: int,
    rng: np.random.Generator,
) -> tuple[int, int]:
    """Sentences from a random place of another document, up to `target` tokens."""
    other = document
    for _ in range(_TRIES):
        other = int(rng.integers(0, len(docs) - 1))
        if other != document:
            break
    start = int(rng.integers(docs[other], docs[other + 1]))
    end = start + 1
    while end < docs[other + 1] and cuts[end] - cuts[start] < target:
        end += 1
    return cuts[start], cuts[end]


def _shorten(
    a: tuple[int, int], b: tuple[int, int], room: int, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Both halves cut to fit together: token by token off the longer one, at a random
    end, in closed form: how many tokens go at the front is a binomial number."""
    na, nb = a[1] - a[0], b[1] - b[0]
    if na + nb > room:
        left_a = max(min(na, room - nb), min(na, room - room // 2))
        left_b = room - left_a
        front_a = int(rng.binomial(na - left_a, 0.5))
        front_b = int(rng.binomial(nb - left_b, 0.5))
        a = (a[0] + front_a, a[0] + front_a + left_a)
        b = (b[0] + front_b, b[0] + front_b + left_b)
    return (*a, *b)


def gather(
    tokens: Tokens, plan: Plan, rows: np.ndarray, specials: Specials
) -> Sequences:
    """The sequences `rows` of a plan, padded to the longest of them."""
    parts: list[np.ndarray] = []
    for row in np.asarray(rows).tolist():
        ids = [np.array([specials.cls], np.int64)]
        halves = [np.zeros(1, np.int64)]
        for number, at in enumerate(
            range(int(plan.bounds[row]), int(plan.bounds[row + 1]))
        ):
            start, end = plan.stretches[at]
            ids += [tokens.ids[start:end].astype(np.int64), np.array([specials.sep])]
            halves.append(
                np.full(end - start + 1, number if plan.random_next is not None else 0)
            )
        # (2, tokens)
        parts.append(np.stack([np.concatenate(ids), np.concatenate(halves)]))
    lengths = np.array([part.shape[1] for part in parts], np.int64)
    both = np.zeros((2, len(parts), int(lengths.max(initial=0))), np.int64)
    both[0] = specials.pad
    for index, part in enumerate(parts):
        both[:, index, : part.shape[1]] = part
    labels = (
        None if plan.random_next is None else plan.random_next[rows].astype(np.int64)
    )
    return Sequences(both[0], both[1], lengths, labels)


# ---- what is to be guessed -----------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Masked:
    """A batch to guess from.

    inputs: (batch, tokens) int64. labels: (batch, tokens) int64, the token's own id
    where it is to be guessed, -100 elsewhere.
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
    """BERT's masked language model: a share of the words to guess, never a special
    token.

    ids: (batch, tokens), padded. Of each row's n tokens (special ones counted, as in
    the original) round(n · rate) are chosen without replacement, at least one and at
    most `max_predictions`; of these 80 % become [MASK], 10 % a random word, 10 % stay.
    continues: (vocabulary,) bool, whether a token goes on with the word before it.
    Given, whole words are chosen: in random order, each that still fits into the
    number.

    Raises ConfigError for a rate that is no share.
    """
    if not 0 < rate <= 1:
        raise ConfigError(
            f"the rate of masked tokens must be above 0 and at most 1, not {rate:g}"
        )
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


def _choose_tokens(
    words: np.ndarray, wanted: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """`wanted` words of each row, each as likely as the others; (batch, tokens) bool."""
    keys = np.where(words, rng.random(words.shape), _NO_WORD)
    ranks = keys.argsort(1, kind="stable").argsort(1, kind="stable")
    chosen: np.ndarray = (ranks < wanted[:, None]) & words
    return chosen


def _choose_words(
    words: np.ndarray,
    continues: np.ndarray,
    wanted: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Whole words of each row in random order, each that fits into what is left of
    `wanted`.

    A word is a token and the continuations after it; the first token of a stretch
    begins one even if it is a continuation (a long sentence may be cut inside a word).
    """
    batch, length = words.shape
    before = np.zeros_like(words)
    before[:, 1:] = words[:, :-1]
    starts = words & (~continues | ~before)
    # (batch, tokens): the word of each token
    number = np.maximum(starts.cumsum(1) - 1, 0)
    rows = np.broadcast_to(np.arange(batch)[:, None], words.shape)
    sizes = np.zeros((batch, length), np.int64)  # (batch, words)
    np.add.at(sizes, (rows[words], number[words]), 1)
    keys = np.where(sizes > 0, rng.random(sizes.shape), _NO_WORD)
    taken = np.zeros((batch, length), bool)  # (batch, words)
    left = wanted.copy()
    everyone = np.arange(batch)
    for column in keys.argsort(1, kind="stable").T[
        : int((sizes > 0).sum(1).max(initial=0))
    ]:
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

    ids: (batch, tokens), padded. Of each row's n words round(n · rate), at least one,
    lie in spans of Poisson(mean) words; a span of none inserts a [MASK]. Special tokens
    stay; a span that reaches over one becomes a [MASK] on either side of it. `inputs`
    are padded to the longest row, never longer than `ids`; `labels` are all of `ids`,
    -100 in the padding.

    Raises ConfigError for a rate that is no share or a mean that is not positive.
    """
    if not 0 < rate <= 1 or mean <= 0:
        raise ConfigError(
            f"infilling needs 0 < rate <= 1 and mean > 0, not {rate:g}, {mean:g}"
        )
    ids = np.asarray(ids, dtype=np.int64)
    rows = [_infill(row[row != specials.pad], specials, rng, rate, mean) for row in ids]
    longest = min(ids.shape[1], max((len(row) for row in rows), default=0))
    inputs = np.full((len(rows), longest), specials.pad, np.int64)
    for index, row in enumerate(rows):
        inputs[index, : len(row)] = row
    return Masked(inputs, np.where(ids == specials.pad, IGNORED, ids))


def _infill(
    row: np.ndarray,
    specials: Specials,
    rng: np.random.Generator,
    rate: float,
    mean: float,
) -> np.ndarray:
    """One row without padding, infilled; not longer than it was."""
    places = np.flatnonzero(~np.isin(row, specials.all))
    if not len(places):
        return row
    lengths = _span_lengths(max(1, round(len(places) * rate)), mean, rng)
    covered = int(lengths.sum())
    # A row in which every word that is kept, and every span, is one unit; spans are
    # laid anywhere.
    units = np.ones(len(places) - covered + len(lengths), np.int64)
    spans = np.sort(rng.choice(len(units), len(lengths), replace=False))
    units[spans] = lengths
    starts = np.cumsum(units) - units  # (units,): the first word of each unit
    # (tokens + 1,): the span of each token
    span_of = np.full(len(row) + 1, -1, np.int64)
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
    """Poisson lengths that sum to exactly `budget`; the last one is cut, none follows
    it."""
    lengths = np.empty(0, np.int64)
    while lengths.sum() < budget:
        lengths = np.append(lengths, rng.poisson(mean, max(4, int(budget / mean) + 1)))
    total = np.cumsum(lengths)
    last = int(np.searchsorted(total, budget))
    lengths = lengths[: last + 1].copy()
    lengths[last] -= total[last] - budget
    return lengths
