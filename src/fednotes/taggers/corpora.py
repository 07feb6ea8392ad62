"""Corpora in the form that models read, and mini-batches for models with a CRF."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import TrainingError
from fednotes.core.types import Document
from fednotes.data.batches import Encoded
from fednotes.encoders.encoder import SubWords
from fednotes.encoders.reading import Pieces, concatenate_ranges, split_passages
from fednotes.taggers.crf import Counts
from fednotes.taggers.partial import Soft, find_allowed_tags, require_types, retag

# The maximum number of words and sentences in one call of the tokenizer.
TOKENIZER_WORDS, TOKENIZER_SENTENCES = 131072, 512
# Tokens per batch in prediction with a light tagger, which has no padding.
PREDICT_TOKENS = 4096
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedCorpus:
    """A corpus in the form that a model reads. It stays at its site.

    Attributes:
        encoded: The tokens and tags, flat over the corpus.
        known: The types that the site annotates. Spans of other types were added by a
            model.
        lengths: (sentences,) the number of tokens or sub-words, for batches of similar
            length.
        soft: A teacher's posterior of the other types; None if their spans are the
            target.
    """

    encoded: Encoded
    known: frozenset[str]
    lengths: np.ndarray
    soft: Soft | None = None

    @property
    def sentences(self) -> int:
        """Number of sentences, or pieces of sentences too long for the model."""
        return len(self.lengths)

    @property
    def documents(self) -> tuple[Document, ...]:
        """The documents in corpus order."""
        return self.encoded.documents

    @property
    def complete(self) -> bool:
        """Whether every type of the tag set is known, so that no token is ambiguous."""
        return self.known.issuperset(self.encoded.tagset.types)

    def annotate(self, documents: Sequence[Document], known: Collection[str]) -> Self:
        """Return the same texts with the spans of `documents` as hard targets.

        Raises:
            ConfigError: A known type is not in the tag set.
            DataError: The texts differ, or a label is unknown.
        """
        types = require_types(known, self.encoded.tagset)
        encoded = retag(self.encoded, documents, types)
        return replace(self, encoded=encoded, known=types, soft=None)


@dataclass(frozen=True, eq=False, kw_only=True)
class TaggerCorpus(PreparedCorpus):
    """A corpus in the form that a light tagger reads.

    Inputs that the tagger's configuration does not use are None.

    Attributes:
        word: (forms,) rows of the table of word vectors.
        hashed: (forms, hashes) rows of each hashed table, by the table's name in
            `ATTRIBUTES`; empty without hashed tables.
        characters: (forms, size) uint8 character ids.
        character_lengths: (forms,) uint8 number of character ids.
        context: (tokens, layers, dim) float16, the frozen encoder's features.
    """

    word: Tensor | None
    hashed: Mapping[str, Tensor]
    characters: np.ndarray | None
    character_lengths: np.ndarray | None
    context: np.ndarray | None


@dataclass(frozen=True, eq=False, kw_only=True)
class EncoderCorpus(PreparedCorpus):
    """A corpus as sub-words, whose words are the corpus's tokens."""

    pieces: SubWords

    @cached_property
    def words(self) -> np.ndarray:
        """(sentences,) number of words with sub-words; control characters have none."""
        tokens = np.unique(self.pieces.word)
        return np.diff(np.searchsorted(tokens, self.encoded.bounds))

    @classmethod
    def of(
        cls,
        encoded: Encoded,
        tokenizer: Any,
        capacity: int,
        pooling: str = "mean",
        progress: Progress | None = None,
    ) -> EncoderCorpus:
        """Split a corpus into sub-words; all types of its tag set count as annotated.

        Args:
            encoded: The corpus.
            tokenizer: A fast tokenizer of the `transformers` library.
            capacity: Number of sub-words in a window.
            pooling: "mean" of a word's sub-words, or its "first" one.
            progress: Is called with the number of sentences done and their total.
        """
        batches: list[Pieces] = []
        start = 0
        while start < encoded.sentences:
            if progress is not None:
                progress(start, encoded.sentences)
            end = _find_end_of_tokenizer_batch(encoded.bounds, start)
            passages = list(encoded.cut_passages(start, end))
            batches.append(split_passages(tokenizer, passages))
            start = end
        if progress is not None:
            progress(encoded.sentences, encoded.sentences)

        subwords = SubWords.of(Pieces.join(batches), capacity, pooling)
        return cls(
            encoded=encoded,
            known=frozenset(encoded.tagset.types),
            lengths=subwords.lengths,
            pieces=subwords,
        )


def _find_end_of_tokenizer_batch(bounds: np.ndarray, start: int) -> int:
    """Return the index after the last sentence of the tokenizer batch from `start`."""
    max_words = bounds[start] + TOKENIZER_WORDS
    fitting = int(np.searchsorted(bounds, max_words, side="right")) - 1
    return min(max(fitting, start + 1), start + TOKENIZER_SENTENCES)


def require_sentences(indices: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the sentence indices of a mini-batch as a nonempty array.

    Raises:
        TrainingError: There are none.
    """
    chosen = np.asarray(indices, np.int64)
    if len(chosen) == 0:
        raise TrainingError("a mini-batch without sentences has no loss")
    return chosen


@dataclass(frozen=True, eq=False)
class Batch:
    """A padded batch of sentences from a corpus.

    Attributes:
        corpus: The corpus.
        request_order: (batch,) indices that restore the order in which sentences were
            requested.
        rows: (batch,) indices of the sentences in the corpus.
        tokens: (batch, steps) indices of the corpus's tokens; padding repeats the
            sentence's first token.
        inside: (batch, steps) bool, False at padding.
        lengths: (batch,) number of tokens.
        tags: (batch, steps), 0 at padding.
    """

    corpus: PreparedCorpus
    request_order: np.ndarray
    rows: np.ndarray
    tokens: np.ndarray
    inside: np.ndarray
    lengths: Tensor
    tags: Tensor

    @classmethod
    def of(
        cls,
        corpus: PreparedCorpus,
        chosen: np.ndarray,
        device: torch.device,
        order: np.ndarray | None = None,
    ) -> Batch:
        """Pad some sentences.

        Args:
            corpus: The corpus.
            chosen: Indices of the sentences.
            device: The device for lengths and tags.
            order: (batch,) positions in `chosen`, in the order of the batch; None keeps
                the order of `chosen`.
        """
        if order is None:
            order = np.arange(len(chosen))
        encoded = corpus.encoded
        rows = chosen[order]
        start = encoded.bounds[rows]
        lengths = encoded.bounds[rows + 1] - start
        step = np.arange(lengths.max())
        inside = step < lengths[:, None]
        tokens = np.where(inside, start[:, None] + step, start[:, None])
        tags = np.where(inside, encoded.tags[tokens], 0)
        return cls(
            corpus=corpus,
            request_order=np.argsort(order),
            rows=rows,
            tokens=tokens,
            inside=inside,
            lengths=torch.from_numpy(lengths).to(device),
            tags=torch.from_numpy(tags).to(device),
        )

    @property
    def allowed(self) -> Tensor:
        """(batch, steps, tags) bool; see `partial.find_allowed_tags`."""
        return find_allowed_tags(
            self.tags, self.corpus.encoded.tagset, self.corpus.known
        )

    def find_mentions(self) -> np.ndarray:
        """Return the mentions of the sentences, if they may overlap.

        Returns:
            (mentions, 4) position of the sentence in the batch, first word, word after
            the last, and type index.
        """
        encoded = self.corpus.encoded
        mentions = encoded.mentions
        assert mentions is not None
        start = encoded.bounds[self.rows]
        low = np.searchsorted(mentions[:, 0], start)
        counts = np.searchsorted(mentions[:, 0], encoded.bounds[self.rows + 1]) - low
        chosen = mentions[concatenate_ranges(low, counts)]
        sentence = np.repeat(np.arange(len(self.rows)), counts)
        first, stop, kind = chosen.T
        shift = start[sentence]
        return np.stack([sentence, first - shift, stop - shift, kind], 1)

    def make_targets(self) -> tuple[Tensor, Tensor | None, Tensor, Counts | None]:
        """Return the targets of the sentences, as `partial.py` takes them.

        Returns:
            Tags; allowed tags, or None if every type is known; lengths; and the
            posterior, or None if the target is hard.
        """
        if self.corpus.complete:
            return self.tags, None, self.lengths, None
        soft = self.corpus.soft
        if soft is None:
            return self.tags, self.allowed, self.lengths, None

        device = self.tags.device
        unary = np.where(self.inside[..., None], soft.unary[self.tokens], 0)
        counts = (
            torch.from_numpy(unary).to(device),
            torch.from_numpy(soft.pairs[self.rows]).to(device),
        )
        return self.tags, self.allowed, self.lengths, counts


def batch_by_length(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Yield sentence indices by length, in batches of about PREDICT_TOKENS tokens."""
    if not len(lengths):
        return
    order = np.argsort(lengths, kind="stable")
    group = np.cumsum(lengths[order]) // PREDICT_TOKENS
    yield from np.split(order, np.flatnonzero(np.diff(group)) + 1)


# ---- rows of hashed tables -----------------------------------------------------------

PREFIX, SUFFIX = 3, 3  # number of characters
MAX_RUN = 4  # a longer run of one sign in a shape is cut
_LONGER_RUN = re.compile(rf"(.)\1{{{MAX_RUN},}}", re.DOTALL)


class _Signs(dict[int, str]):
    """The sign of each character in a word's shape, by code point."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        sign = character
        if character.isalpha():
            sign = "X" if character.isupper() else "x"
        elif character.isdigit():
            sign = "d"
        self[code] = sign
        return sign


_SIGNS = _Signs()


def find_word_shape(form: str) -> str:
    """Return a word's shape: X for capitals, x for other letters, d for digits.

    Other characters stand for themselves. Of a longer run of one sign, `MAX_RUN`
    remain: "Metformin-500" is "Xxxxx-ddd".
    """
    return _LONGER_RUN.sub(lambda run: run[1] * MAX_RUN, form.translate(_SIGNS))


# What is hashed of a word, by the name of the hashed table.
ATTRIBUTES: Mapping[str, Callable[[str], str]] = {
    "hashed": str.lower,
    "prefixes": lambda form: form[:PREFIX],
    "suffixes": lambda form: form[-SUFFIX:],
    "shapes": find_word_shape,
}


def hash_forms(
    forms: Sequence[str], buckets: int, *, attribute: str = "hashed", hashes: int = 1
) -> np.ndarray:
    """Return the rows of a hashed table for each form, (forms, hashes).

    The first row is the CRC-32 of the attribute's UTF-8, modulo `buckets`. The others
    are numbers 1, 2, … of the generator SplitMix64 (Steele et al. 2014) that starts
    from this CRC-32. They are the same on every machine.

    Args:
        forms: The words.
        buckets: Number of rows of the table.
        attribute: The name of what is hashed, in `ATTRIBUTES`.
        hashes: Number of rows of each word, whose sum represents it. Two words that
            share one row then rarely share them all.
    """
    key = ATTRIBUTES[attribute]
    codes = np.fromiter(
        (zlib.crc32(key(form).encode()) for form in forms), np.uint64, len(forms)
    )
    columns = [codes, *(_draw_split_mix(codes, number) for number in range(1, hashes))]
    return (np.stack(columns, axis=1) % np.uint64(buckets)).astype(np.int64)


def _draw_split_mix(codes: np.ndarray, number: int) -> np.ndarray:
    """Return output `number` (from 1) of SplitMix64 for each uint64 state."""
    z = codes + np.uint64(number * 0x9E3779B97F4A7C15 % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
