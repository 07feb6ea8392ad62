"""Splitting text into sub-words, and mapping sub-words to words.

A tokenizer always receives the unchanged text: a sentence, a note or a piece of one. A
model then reads the same input as in its pre-training and in other programs: byte-level
tokenizers (RoBERTa, ModernBERT, BART) and SentencePiece (DeBERTa, XLM-R) include the
blank before a word in its first sub-word, and words that are tokenised one by one would
lose it.

Words are those of this project (`data/text.py`). Sub-words are assigned to them by
character offsets:

- A word consists of the sub-words that cover at least one of its characters. Its first
sub-word is the one that covers its first character, even if that sub-word begins in an
earlier word: "%)" may be one sub-word, which both words then share.
- If several sub-words have the same offsets (the bytes of one character, the letters of
a ligature), the first of them counts as the first.
- Sub-words that cover only blanks are context and not part of any word. The same holds
for a bare blank mark ("▁", "Ġ"), whatever its offsets.
- A word that the tokenizer removes (control characters) has no sub-words. If a
normaliser removes only a word's first character, the first remaining sub-word is used.

A text cut from a note begins without the blank before it. It is read as other programs
and exported models would read it. Text that spells a special token of the tokenizer
("[MASK]") is read as that token, as in other programs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from tokenizers.models import WordLevel, WordPiece

from fednotes.core.errors import ModelError
from fednotes.data.text import Passage

# Recorded in saved models. Models of earlier versions read text word by word.
READING = "text"
# The blank marks of SentencePiece and of byte-level tokenizers.
BLANK_MARKS = ("▁", "Ġ")


class Pieces(NamedTuple):
    """The sub-words of some texts, concatenated.

    A word without sub-words has first > last.

    Attributes:
        ids: (sub-words,) int32.
        lengths: (texts,) number of sub-words of each text.
        first: (words,) the index of each word's first sub-word, over all texts.
        last: (words,) the index of each word's last sub-word.
        visible: (sub-words,) bool, False for sub-words that cover only blanks.
    """

    ids: np.ndarray
    lengths: np.ndarray
    first: np.ndarray
    last: np.ndarray
    visible: np.ndarray

    @classmethod
    def join(cls, parts: Sequence[Pieces]) -> Pieces:
        """Concatenate the texts of all parts."""
        nothing = np.zeros(0, np.int64)
        sizes = np.array([len(part.ids) for part in parts], np.int64)
        words = np.array([len(part.first) for part in parts], np.int64)
        before = np.repeat(np.cumsum(sizes) - sizes, words)
        return cls(
            ids=np.concatenate([np.zeros(0, np.int32), *(part.ids for part in parts)]),
            lengths=np.concatenate([nothing, *(part.lengths for part in parts)]),
            first=np.concatenate([nothing, *(part.first for part in parts)]) + before,
            last=np.concatenate([nothing, *(part.last for part in parts)]) + before,
            visible=np.concatenate(
                [np.zeros(0, bool), *(part.visible for part in parts)]
            ),
        )

    def list_members(self, pooling: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the sub-words and weights of each word's vector.

        Args:
            pooling: "mean" of a word's sub-words, or its "first" one.

        Returns:
            (members,) each: the sub-word, its word, and its weight in the word's
            vector, in the order of the sub-words. A word's weights sum to 1. A shared
            sub-word appears once for each of its words.
        """
        size = np.maximum(self.last - self.first + 1, 0)
        if pooling == "first":
            size = np.minimum(size, 1)
        word = np.repeat(np.arange(len(size)), size)
        place = concatenate_ranges(self.first, size)
        inside = self.visible[place]
        place, word = place[inside], word[inside]
        share = (1 / np.bincount(word)[word]).astype(np.float32)
        order = np.argsort(place, kind="stable")
        return place[order], word[order], share[order]


def split_passages(tokenizer: Any, passages: Sequence[Passage]) -> Pieces:
    """Return the sub-words of passages, without special tokens or truncation.

    Args:
        tokenizer: A fast tokenizer of the `transformers` library.
        passages: Texts with the character offsets of their words.
    """
    encodings = _encode(tokenizer, [passage.text for passage in passages])
    lengths = np.fromiter(map(len, encodings), np.int64, len(encodings))
    total = int(lengths.sum())
    ids = np.fromiter(chain.from_iterable(e.ids for e in encodings), np.int32, total)
    flat = chain.from_iterable(chain.from_iterable(e.offsets for e in encodings))
    offsets = np.fromiter(flat, np.int64, 2 * total).reshape(-1, 2)

    # Offsets run over all texts, with a gap between texts, so that one search finds the
    # sub-words of all words.
    sizes = np.fromiter(
        (len(passage.text) + 1 for passage in passages), np.int64, len(passages)
    )
    begins = np.cumsum(sizes) - sizes  # (texts,)
    counts = np.fromiter(
        (len(passage.words) for passage in passages), np.int64, len(passages)
    )
    empty = np.zeros((0, 2), np.int64)
    words = np.concatenate([empty, *(passage.words for passage in passages)])
    words = words + np.repeat(begins, counts)[:, None]
    offsets += np.repeat(begins, lengths)[:, None]

    visible = offsets[:, 0] < offsets[:, 1]
    marks = [
        tokenizer.backend_tokenizer.token_to_id(mark)
        for mark in list_blank_marks(tokenizer)
    ]
    if marks:
        visible &= ~np.isin(ids, marks)
    first, last = _find_cover(np.flatnonzero(visible), offsets[visible], words)
    return Pieces(ids, lengths, first, last, visible)


def _find_cover(
    numbers: np.ndarray, offsets: np.ndarray, words: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the first and last sub-word that overlap each word; 0 and -1 for none.

    Args:
        numbers: (visible sub-words,) their indices among all sub-words.
        offsets: (visible sub-words, 2) characters.
        words: (words, 2) characters.
    """
    if not len(numbers):
        return np.zeros(len(words), np.int64), np.full(len(words), -1)
    # Normalisers that reorder accents can leave offsets slightly unsorted.
    starts = np.maximum.accumulate(offsets[:, 0])
    ends = np.maximum.accumulate(offsets[:, 1])
    first = np.searchsorted(ends, words[:, 0], side="right")
    last = np.searchsorted(starts, words[:, 1], side="left") - 1
    is_covered = first <= last
    first_number = numbers[np.where(is_covered, first, 0)]
    last_number = numbers[np.where(is_covered, last, 0)]
    return np.where(is_covered, first_number, 0), np.where(is_covered, last_number, -1)


def concatenate_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return arange(start, start + length) of all pairs, concatenated."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def list_blank_marks(tokenizer: Any) -> list[str]:
    """Return the sub-words of a tokenizer that consist only of a blank mark."""
    if reads_words_alike(tokenizer):
        return []
    number = tokenizer.backend_tokenizer.token_to_id
    return [mark for mark in BLANK_MARKS if number(mark) is not None]


def reads_words_alike(tokenizer: Any) -> bool:
    """Return whether words tokenised one by one get the same sub-words as in text.

    WordPiece splits text at blanks and punctuation before it looks for sub-words,
    similar to this project's words; the two differ only next to symbols such as "°".
    Models with such a tokenizer that earlier versions trained word by word are
    therefore still accepted. Other tokenizers include the blanks between words in their
    sub-words.
    """
    return isinstance(tokenizer.backend_tokenizer.model, WordPiece | WordLevel)


def choose_reading_version(tokenizer: Any) -> int:
    """Return the version of the reading in the fingerprint of a frozen encoder.

    It is 1 if earlier versions of this package read text in the same way, so that
    models trained on the encoder stay usable, and 2 for other tokenizers.
    """
    return 1 if reads_words_alike(tokenizer) else 2


def _encode(tokenizer: Any, texts: Sequence[str]) -> list[Any]:
    """Return the tokenizer's encodings of texts, without special tokens.

    Raises:
        ModelError: The tokenizer library failed on a text, for example because a
            pattern of tokenizer.json takes too long.
    """
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    # Tokenizers refuse lone surrogates; question marks preserve the offsets.
    valid = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
    with converting_panics():
        encodings: list[Any] = backend.encode_batch(valid, add_special_tokens=False)
    return encodings


@contextmanager
def converting_panics() -> Iterator[None]:
    """Turn a failure of the tokenizer library on a text into an error.

    Raises:
        ModelError: The library failed.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a BaseException, from Rust
            raise
        raise ModelError(
            "the model's tokenizer cannot read a text: a pattern in tokenizer.json "
            "fails on it; use the tokenizer that the model's authors published"
        ) from None
