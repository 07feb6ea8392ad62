"""Training sequences of a language model, and their prediction targets.

Sequences are built as in the original BERT (Devlin et al. 2018, A.2). The model
predicts masked tokens (BERT) or infilled spans (BART).

    pairs     [CLS] A [SEP] B [SEP]; B follows A in half of the pairs, and otherwise
              comes from elsewhere
    full      [CLS] S [SEP] S [SEP] …; sentences in order until the sequence is full

A plan lists the stretches of the corpus that make up each sequence. It needs four
numbers for a pair, so a corpus of any size can be planned; `gather_sequences` then
builds a batch. A plan depends only on the corpus, the seed and the epoch; masks depend
on the batch and the generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.seeds import rng_of
from fednotes.encoders.token_cache import Tokens

# The fraction of documents whose pairs are deliberately short, as in the original.
SHORT = 0.1
# Attempts to draw a document other than A's, as in the original.
_TRIES = 10
# The label of positions without a loss.
IGNORED = -100
# The fractions of chosen tokens replaced by [MASK] and by a random word.
MASKED, RANDOM = 0.8, 0.1
# A sort key greater than any random key.
_NO_WORD = 2.0


@dataclass(frozen=True, slots=True)
class Specials:
    """Ids of special tokens, which are not words.

    Attributes:
        cls: The id of [CLS].
        sep: The id of [SEP].
        mask: The id of [MASK].
        pad: The id of padding.
        others: Further special ids, without [UNK].
    """

    cls: int
    sep: int
    mask: int
    pad: int
    others: tuple[int, ...] = ()

    @property
    def all(self) -> tuple[int, ...]:
        """All special ids, sorted, without duplicates."""
        return tuple(sorted({self.cls, self.sep, self.mask, self.pad, *self.others}))


@dataclass(frozen=True, eq=False)
class SequencePlan:
    """The tokens that make up each sequence.

    Attributes:
        stretches: (stretches, 2) int64, start and end in the corpus's ids; [SEP]
            follows each.
        bounds: (sequences + 1,) int64 bounds in `stretches`.
        random_next: (sequences,) bool, whether B does not follow A in the corpus; None
            without pairs.
    """

    stretches: np.ndarray
    bounds: np.ndarray
    random_next: np.ndarray | None

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def count_tokens(self) -> np.ndarray:
        """Return the tokens that no other sequence has as its own, (sequences,).

        Special tokens are not counted, and neither is a random B: it belongs to other
        sequences as well.
        """
        counts = self.stretches[:, 1] - self.stretches[:, 0]
        if self.random_next is not None:
            counts = counts.reshape(-1, 2)
            counts[self.random_next, 1] = 0
            return np.asarray(counts.sum(1))
        before = np.concatenate(([0], np.cumsum(counts)))
        return np.diff(before[self.bounds])


@dataclass(frozen=True, eq=False)
class Sequences:
    """A batch of sequences.

    Attributes:
        ids: (batch, longest) int64.
        segments: (batch, longest) int64, 1 in B, else 0.
        lengths: (batch,) int64, number of tokens before the padding.
        random_next: (batch,) int64, 1 where B is random (BERT's label for next-sentence
            prediction); None without pairs.
    """

    ids: np.ndarray
    segments: np.ndarray
    lengths: np.ndarray
    random_next: np.ndarray | None


def _cut_sentences(tokens: Tokens, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut sentences into pieces of at most `longest` tokens.

    Returns:
        (pieces + 1,) bounds of pieces in the ids, and (documents + 1,) bounds of
        documents in the pieces.
    """
    if len(tokens.ids) == 0 or len(tokens.documents) < 2:
        raise DataError("the corpus has no tokens: give notes with text")
    starts = np.asarray(tokens.sentences[:-1])  # (sentences,)
    ends = np.asarray(tokens.sentences[1:])
    counts = (ends - starts + longest - 1) // longest  # pieces, rounded up
    first_pieces = np.concatenate(([0], np.cumsum(counts)))  # (sentences + 1,)
    num_pieces = first_pieces[-1]

    sentence_of_piece = np.repeat(np.arange(len(counts)), counts)
    place_in_sentence = np.arange(num_pieces) - first_pieces[sentence_of_piece]
    piece_starts = starts[sentence_of_piece] + place_in_sentence * longest
    bounds = np.append(piece_starts, ends[-1])
    return bounds, first_pieces[np.asarray(tokens.documents)]


def plan_full(tokens: Tokens, length: int, seed: int, epoch: int) -> SequencePlan:
    """Plan sequences of whole sentences, with documents in a random order.

    Every token is in exactly one sequence. A sequence continues in the next document if
    it has room, with a [SEP] between the two.

    Args:
        tokens: The corpus.
        length: The maximum number of tokens in a sequence, including special ones.
        seed: The run's seed.
        epoch: The number of the epoch.

    Raises:
        ConfigError: The length leaves no room for text.
        DataError: The corpus has no token.
    """
    if length < 3:
        raise ConfigError(
            f"sequences of {length} tokens have no room for text: at least 3 are needed"
        )
    room = length - 2
    bounds, documents = _cut_sentences(tokens, room)
    order = rng_of(seed, "pack-full", epoch).permutation(len(documents) - 1)
    sentence_bounds = bounds.tolist()
    stretches: list[tuple[int, int]] = []
    sequences = [0]
    used = 1  # [CLS]
    for document in order.tolist():
        start = sentence_bounds[documents[document]]
        end = start
        if used + 2 > length:
            sequences.append(len(stretches))
            used = 1
        for piece in range(documents[document], documents[document + 1]):
            after = sentence_bounds[piece + 1]
            if used + after - start + 1 > length:
                if end > start:
                    stretches.append((start, end))
                if len(stretches) > sequences[-1]:
                    sequences.append(len(stretches))
                start = end
                used = 1
            end = after
        stretches.append((start, end))
        used += end - start + 1
    sequences.append(len(stretches))
    return SequencePlan(
        np.array(stretches, np.int64), np.array(sequences, np.int64), None
    )


def plan_pairs(tokens: Tokens, length: int, seed: int, epoch: int) -> SequencePlan:
    """Plan pairs for next-sentence prediction (`create_pretraining_data.py` of BERT).

    Sentences of a document are collected up to a target length. The target is drawn
    once per document: a tenth of the documents get a shorter one for all of their
    pairs. A consists of a random number of these sentences. With probability 1/2,
    or if there is only one sentence, B comes from a random position in another
    document; otherwise it consists of the remaining sentences. A pair that is too
    long loses tokens at either end of its longer half. Unlike in the original,
    sentences longer than half a sequence are first cut; the original would discard
    most of them.

    Args:
        tokens: The corpus.
        length: The maximum number of tokens in a pair, including special ones.
        seed: The run's seed.
        epoch: The number of the epoch.

    Raises:
        ConfigError: The length leaves no room for text.
        DataError: The corpus has no token.
    """
    if length < 5:
        raise ConfigError(
            f"pairs of {length} tokens have no room for text: at least 5 are needed"
        )
    room = length - 3
    bounds, documents = _cut_sentences(tokens, (room + 1) // 2)
    rng = rng_of(seed, "pack-pairs", epoch)
    sentence_bounds = bounds.tolist()
    document_bounds = documents.tolist()
    pairs: list[tuple[int, int, int, int]] = []
    labels: list[bool] = []
    for document in rng.permutation(len(document_bounds) - 1).tolist():
        for pair, random_next in _plan_document_pairs(
            document, sentence_bounds, document_bounds, room, rng
        ):
            pairs.append(pair)
            labels.append(random_next)
    order = rng.permutation(len(pairs))
    stretches = np.array(pairs, np.int64)[order].reshape(-1, 2)
    bounds_of = np.arange(0, len(stretches) + 1, 2, dtype=np.int64)
    return SequencePlan(stretches, bounds_of, np.array(labels)[order])


def _plan_document_pairs(
    document: int,
    sentence_bounds: list[int],
    document_bounds: list[int],
    room: int,
    rng: np.random.Generator,
) -> Iterator[tuple[tuple[int, int, int, int], bool]]:
    """Yield one document's pairs.

    Args:
        document: The index of the document.
        sentence_bounds: Positions in the ids at which sentences begin, and the end.
        document_bounds: Indices of the sentences at which documents begin, and the end.
        room: The maximum number of tokens in a pair, without special ones.
        rng: The generator.

    Yields:
        Start and end of A and of B in the ids, and whether B is random.
    """
    at = document_bounds[document]
    last = document_bounds[document + 1]
    # As in BERT, about a tenth of the documents (SHORT) get short pairs.
    target = int(rng.integers(2, room + 1)) if rng.random() < SHORT else room
    while at < last:
        end = at + 1
        while end < last and sentence_bounds[end] - sentence_bounds[at] < target:
            end += 1
        middle = at + (int(rng.integers(1, end - at)) if end - at >= 2 else 1)
        a = (sentence_bounds[at], sentence_bounds[middle])
        random_next = end - at == 1 or rng.random() < 0.5
        if random_next:
            b = _pick_elsewhere(
                document, sentence_bounds, document_bounds, target - (a[1] - a[0]), rng
            )
            end = middle  # the unused second half starts the next pair
        else:
            b = (sentence_bounds[middle], sentence_bounds[end])
        yield _shorten(a, b, room, rng), random_next
        at = end


def _pick_elsewhere(
    document: int,
    sentence_bounds: list[int],
    document_bounds: list[int],
    target: int,
    rng: np.random.Generator,
) -> tuple[int, int]:
    """Return start and end of sentences at a random position of another document.

    Sentences are added until they have `target` tokens, or the document ends. After
    `_TRIES` draws, it may be the same document.
    """
    other = document
    for _ in range(_TRIES):
        other = int(rng.integers(0, len(document_bounds) - 1))
        if other != document:
            break
    document_end = document_bounds[other + 1]
    first = int(rng.integers(document_bounds[other], document_end))
    start = sentence_bounds[first]
    after = first + 1  # the sentence after the last one
    while after < document_end and sentence_bounds[after] - start < target:
        after += 1
    return start, sentence_bounds[after]


def _shorten(
    a: tuple[int, int], b: tuple[int, int], room: int, rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Cut both halves so that the pair fits.

    The original removes tokens one by one from a random end of the longer half. This is
    equivalent in closed form: the number of tokens removed at the front is
    binomial.
    """
    na = a[1] - a[0]
    nb = b[1] - b[0]
    if na + nb > room:
        left_a = max(min(na, room - nb), min(na, room - room // 2))
        left_b = room - left_a
        front_a = int(rng.binomial(na - left_a, 0.5))
        front_b = int(rng.binomial(nb - left_b, 0.5))
        a = (a[0] + front_a, a[0] + front_a + left_a)
        b = (b[0] + front_b, b[0] + front_b + left_b)
    return (*a, *b)


def gather_sequences(
    tokens: Tokens, plan: SequencePlan, rows: np.ndarray, specials: Specials
) -> Sequences:
    """Return the sequences `rows` of a plan, padded to the longest one."""
    parts: list[np.ndarray] = []
    for row in np.asarray(rows).tolist():
        ids = [np.array([specials.cls], np.int64)]
        halves = [np.zeros(1, np.int64)]
        stretches = plan.stretches[plan.bounds[row] : plan.bounds[row + 1]]
        for number, (start, end) in enumerate(stretches):
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


# ---- prediction targets --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Masked:
    """A batch with masked tokens.

    Attributes:
        inputs: (batch, tokens) int64 ids that the model reads.
        labels: (batch, tokens) int64, the original id where it is to be predicted, -100
            elsewhere.
    """

    inputs: np.ndarray
    labels: np.ndarray

    @property
    def positions(self) -> np.ndarray:
        """(predictions,) int64, flat positions of the predicted tokens, ascending."""
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
    """Mask tokens as in BERT's masked language model, but never special tokens.

    Of each row's n tokens (including special ones, as in the original), round(n ·
    rate), but at least one, are chosen without replacement. Of these, 80 % become
    [MASK], 10 % become a random word, and 10 % stay.

    Args:
        ids: (batch, tokens), padded.
        specials: The ids that are not words.
        vocabulary: Number of ids.
        rng: The generator.
        rate: Fraction of tokens to choose.
        max_predictions: The maximum number of chosen tokens in a row.
        continues: (vocabulary,) bool, whether a token continues the preceding word. If
            given, whole words are chosen in random order, skipping those that exceed
            the remaining number.

    Raises:
        ConfigError: The rate is not a fraction.
    """
    if not 0 < rate <= 1:
        raise ConfigError(
            f"the rate of masked tokens must be above 0 and at most 1, not {rate:g}"
        )
    ids = np.asarray(ids, dtype=np.int64)
    is_word = ~np.isin(ids, specials.all)  # (batch, tokens)
    tokens = (ids != specials.pad).sum(1)
    wanted = np.maximum(1, np.rint(tokens * rate)).astype(np.int64)
    if max_predictions is not None:
        wanted = np.minimum(wanted, max_predictions)
    if continues is None:
        chosen = _choose_tokens(is_word, wanted, rng)
    else:
        chosen = _choose_words(is_word, np.asarray(continues)[ids], wanted, rng)

    fate = rng.random(ids.shape)
    allowed = _list_words(specials, vocabulary)
    random = allowed[rng.integers(0, len(allowed), ids.shape)]
    inputs = np.where(chosen & (fate < MASKED), specials.mask, ids)
    swapped = chosen & (fate >= MASKED) & (fate < MASKED + RANDOM)
    inputs = np.where(swapped, random, inputs)
    return Masked(inputs, np.where(chosen, ids, IGNORED))


@lru_cache(maxsize=8)
def _list_words(specials: Specials, vocabulary: int) -> np.ndarray:
    """Return the ids that are words, which all ids but the special ones are."""
    allowed = np.setdiff1d(np.arange(vocabulary), specials.all)
    allowed.flags.writeable = False
    return allowed


def _choose_tokens(
    words: np.ndarray, wanted: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Choose `wanted` words of each row uniformly at random.

    Args:
        words: (batch, tokens) bool, whether a token is a word.
        wanted: (batch,).
        rng: The generator.

    Returns:
        (batch, tokens) bool.
    """
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
    """Choose whole words of each row in random order, up to `wanted` tokens.

    A word is a token and its continuations. The first token of a stretch begins a word
    even if it is a continuation, because a long sentence may be cut inside a word.

    Args:
        words: (batch, tokens) bool, whether a token is a word.
        continues: (batch, tokens) bool, whether it continues the preceding word.
        wanted: (batch,) the maximum number of tokens.
        rng: The generator.

    Returns:
        (batch, tokens) bool.
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
    chosen = np.zeros((batch, length), bool)  # (batch, words)
    remaining = wanted.copy()
    all_rows = np.arange(batch)
    max_words = int((sizes > 0).sum(1).max(initial=0))
    for column in keys.argsort(1, kind="stable").T[:max_words]:
        size = sizes[all_rows, column]
        fits = (size > 0) & (size <= remaining)
        chosen[all_rows, column] |= fits
        remaining -= np.where(fits, size, 0)
        if not remaining.any():
            break
    return np.take_along_axis(chosen, number, 1) & words


def denoise(
    ids: np.ndarray,
    specials: Specials,
    rng: np.random.Generator,
    *,
    rate: float = 0.3,
    mean: float = 3.0,
) -> Masked:
    """Replace spans by one [MASK] each, as in BART's infilling (Lewis et al. 2019).

    Of each row's n words, round(n · rate), but at least one, are in spans of
    Poisson(mean) words; an empty span inserts a [MASK]. Special tokens stay, and a span
    across a special token becomes a [MASK] on either side of it.

    Args:
        ids: (batch, tokens), padded.
        specials: The ids that are not words.
        rng: The generator.
        rate: Fraction of the words that are in spans.
        mean: Mean number of words in a span.

    Returns:
        `inputs` are padded to the longest row and never longer than `ids`. `labels`
        equal `ids`, with -100 at padding.

    Raises:
        ConfigError: The rate is not a fraction, or the mean is not positive.
    """
    if not 0 < rate <= 1 or mean <= 0:
        raise ConfigError(
            f"infilling needs 0 < rate <= 1 and mean > 0, not {rate:g}, {mean:g}"
        )
    ids = np.asarray(ids, dtype=np.int64)
    rows = [
        _infill(row[row != specials.pad], specials, rng, rate=rate, mean=mean)
        for row in ids
    ]
    longest = min(ids.shape[1], max((len(row) for row in rows), default=0))
    inputs = np.full((len(rows), longest), specials.pad, np.int64)
    for index, row in enumerate(rows):
        inputs[index, : len(row)] = row
    return Masked(inputs, np.where(ids == specials.pad, IGNORED, ids))


def _infill(
    row: np.ndarray,
    specials: Specials,
    rng: np.random.Generator,
    *,
    rate: float,
    mean: float,
) -> np.ndarray:
    """Replace random spans of a row's words by one [MASK] each, as `denoise` says.

    Args:
        row: (tokens,) without padding.
        specials: The ids that are not words.
        rng: The generator.
        rate: Fraction of the words that are in spans.
        mean: Mean number of words in a span.

    Returns:
        The row, which is no longer than before.
    """
    places = np.flatnonzero(~np.isin(row, specials.all))
    if not len(places):
        return row
    lengths = _draw_span_lengths(max(1, round(len(places) * rate)), mean, rng)
    covered = int(lengths.sum())
    # Every remaining word is one unit, and so is every span; spans may be anywhere.
    units = np.ones(len(places) - covered + len(lengths), np.int64)
    spans = np.sort(rng.choice(len(units), len(lengths), replace=False))
    units[spans] = lengths
    starts = np.cumsum(units) - units  # (units,) the first word of each unit

    # (tokens + 1,) the span of each token
    span_of = np.full(len(row) + 1, -1, np.int64)
    inserted = np.zeros(len(row) + 1, np.int64)  # [MASK]s before each token
    ends_at = np.append(places, places[-1] + 1)
    for number, unit in enumerate(spans.tolist()):
        first = int(starts[unit])
        size = int(units[unit])
        span_of[places[first : first + size]] = number
        if size == 0:
            inserted[ends_at[first]] += 1
    in_span = span_of[:-1] >= 0
    begins = in_span & (span_of[:-1] != np.append(-1, span_of[:-2]))
    replaced = np.where(in_span, np.where(begins, specials.mask, IGNORED), row)

    # At most as many [MASK]s are inserted as tokens were removed.
    room = len(row) - int((replaced != IGNORED).sum())
    after = np.cumsum(inserted)
    inserted = np.minimum(after, room) - np.minimum(after - inserted, room)
    out = np.repeat(np.append(replaced, IGNORED), 1 + inserted)
    # All copies of a repeated token except the last become the [MASK]s before it.
    last = np.cumsum(1 + inserted) - 1
    copies = np.ones(len(out), bool)
    copies[last] = False
    out = np.where(copies, specials.mask, out)
    return out[out != IGNORED]


def _draw_span_lengths(
    budget: int, mean: float, rng: np.random.Generator
) -> np.ndarray:
    """Return Poisson lengths that sum to exactly `budget`, cutting the last one."""
    lengths = np.empty(0, np.int64)
    while lengths.sum() < budget:
        lengths = np.append(lengths, rng.poisson(mean, max(4, int(budget / mean) + 1)))
    total = np.cumsum(lengths)
    last = int(np.searchsorted(total, budget))
    lengths = lengths[: last + 1].copy()
    lengths[last] -= total[last] - budget
    return lengths
