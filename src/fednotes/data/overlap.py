"""Measurement of text overlap between collections, as counts without text.

Two kinds of units are compared:

    sentence   of at least MIN_WORDS words, ignoring case, white space, punctuation and
               de-identification placeholders
    n-gram     NGRAM consecutive words, across sentences, which also finds text that is
               split or wrapped differently

Liu and Miller 2020 name the overlap of pre-training and fine-tuning text as a limit of
their study: if a model has read a text before, its scores on it say little about new
text. Notes are read one by one; the other collection is stored only as sorted arrays of
64-bit hashes.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from fednotes.core.types import Counts, Document
from fednotes.data.clinical import PLACEHOLDER, list_note_sentences
from fednotes.data.text import split_sentences

MIN_WORDS: Final = 8
# words, as in GPT-3's contamination check (Brown et al. 2020, appendix C)
NGRAM: Final = 13

_WORD = re.compile(r"[^\W_]+")
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that no word of an n-gram loses a bit


@dataclass(frozen=True, slots=True)
class SharedText(Counts):
    """The overlap of a collection of notes with another collection.

    Attributes:
        sentences: Number of sentences in the notes, including repeats.
        shared_sentences: Number of these that occur in the other collection.
        notes_with_shared: Number of notes with a shared sentence.
        ngrams: Number of n-grams in the notes, including repeats.
        shared_ngrams: Number of these that occur in the other collection.
    """

    sentences: int = 0
    shared_sentences: int = 0
    notes_with_shared: int = 0
    ngrams: int = 0
    shared_ngrams: int = 0


@dataclass(frozen=True, eq=False)
class TextIndex:
    """The sentences and n-grams of a collection, as hashes.

    Attributes:
        sentences: (distinct sentences,) uint64, sorted.
        ngrams: (distinct n-grams,) uint64, sorted.
    """

    sentences: np.ndarray
    ngrams: np.ndarray


def index_documents(documents: Iterable[Document]) -> TextIndex:
    """Return the index of annotated documents.

    Each document is split into sentences in two ways: like notes, and by its source or
    the general rule of fednotes. A sentence is then recognised in both cases.
    """
    sentence_hashes = [np.zeros(0, np.uint64)]
    ngram_hashes = [np.zeros(0, np.uint64)]
    for document in documents:
        as_notes = list_note_sentences(document.text)
        as_source = [
            document.text[start:end] for start, end in split_sentences(document)
        ]
        sentence_hashes.append(_hash_sentences([*as_notes, *as_source]))
        ngram_hashes.append(np.unique(_hash_ngrams(as_notes)))
    return TextIndex(
        sentences=np.unique(np.concatenate(sentence_hashes)),
        ngrams=np.unique(np.concatenate(ngram_hashes)),
    )


def measure_shared_text(
    texts: Iterable[str], indexes: Sequence[TextIndex]
) -> tuple[SharedText, ...]:
    """Measure the overlap of notes with each of several collections.

    Args:
        texts: The notes, which are read once.
        indexes: The collections.
    """
    totals = [SharedText() for _ in indexes]
    for text in texts:
        cut = list_note_sentences(text)
        sentence_hashes = _hash_sentences(cut)
        ngram_hashes = _hash_ngrams(cut)
        for number, index in enumerate(indexes):
            shared_sentences = _count_known(sentence_hashes, index.sentences)
            totals[number] += SharedText(
                sentences=len(sentence_hashes),
                shared_sentences=shared_sentences,
                notes_with_shared=int(shared_sentences > 0),
                ngrams=len(ngram_hashes),
                shared_ngrams=_count_known(ngram_hashes, index.ngrams),
            )
    return tuple(totals)


def shares_sentence(text: str, index: TextIndex) -> bool:
    """Return whether a sentence of at least MIN_WORDS words is in a collection."""
    return _count_known(_hash_sentences(list_note_sentences(text)), index.sentences) > 0


def _hash(text: str) -> int:
    """Return a 64-bit hash that is the same on every machine."""
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


_hash_word = lru_cache(maxsize=1 << 20)(_hash)


def _split_words(sentence: str) -> list[str]:
    """Return the words of a sentence for comparison, without placeholders."""
    plain = PLACEHOLDER.sub(" ", unicodedata.normalize("NFKC", sentence))
    return _WORD.findall(plain.casefold())


def _hash_sentences(cut: Iterable[str]) -> np.ndarray:
    """Return hashes of sentences with at least MIN_WORDS words, uint64."""
    hashes = (
        _hash(" ".join(words))
        for words in map(_split_words, cut)
        if len(words) >= MIN_WORDS
    )
    return np.fromiter(hashes, np.uint64)


def _hash_ngrams(cut: Iterable[str]) -> np.ndarray:
    """Return a hash of each n-gram of a text, given its sentences.

    Returns:
        (words - NGRAM + 1,) uint64: Σ hash(word i) · factor^(NGRAM - 1 - i) over the
        words i = 0, …, NGRAM - 1 of each n-gram, modulo 2^64.
    """
    word_hashes = np.fromiter(
        (_hash_word(word) for sentence in cut for word in _split_words(sentence)),
        np.uint64,
    )
    number = max(0, len(word_hashes) - NGRAM + 1)
    hashes = np.zeros(number, np.uint64)
    if not number:
        return hashes
    for offset in range(NGRAM):
        hashes *= np.uint64(_FACTOR)  # overflow is intended: modulo 2^64
        hashes += word_hashes[offset : offset + number]
    return hashes


def _count_known(hashes: np.ndarray, known: np.ndarray) -> int:
    """Return the number of hashes in `known`, which must be sorted."""
    if not len(known) or not len(hashes):
        return 0
    positions = np.searchsorted(known, hashes)
    positions[positions == len(known)] = 0
    return int(np.count_nonzero(known[positions] == hashes))
