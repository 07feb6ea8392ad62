"""Does text of one collection occur in another? Counts only, never text.

    sentence   of MIN_WORDS words or more; case, white space, punctuation and placeholders of
               de-identification, which differ from copy to copy, do not count
    n-gram     NGRAM words in a row, across sentences: finds what is cut or wrapped differently

Liu and Miller 2020 name the overlap of pre-training and fine-tuning text as a limit of
their
study: what a model has read before says little of what it can do on new text. Notes are
looked at one by one; of the other collection, 64-bit hashes are kept in sorted arrays.
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
from fednotes.data.clinical import PLACEHOLDER, sentences
from fednotes.data.text import split_sentences

MIN_WORDS: Final = 8
# words; as in GPT-3's check of its benchmarks (Brown et al. 2020, appendix C)
NGRAM: Final = 13

_WORD = re.compile(r"[^\W_]+")
_FACTOR = 0x9E3779B97F4A7C15  # odd, so that no word of an n-gram loses a bit


@dataclass(frozen=True, slots=True)
class SharedText(Counts):
    """What of a collection of notes occurs in another collection.

    sentences, ngrams: of the notes. shared_sentences, shared_ngrams: those of them that
    occur there too, repeats counted. notes_with_shared: notes with such a sentence.
    """

    sentences: int = 0
    shared_sentences: int = 0
    notes_with_shared: int = 0
    ngrams: int = 0
    shared_ngrams: int = 0


@dataclass(frozen=True, eq=False)
class TextIndex:
    """Hashes of a collection's sentences and n-grams, (distinct,) uint64 each, sorted."""

    sentences: np.ndarray
    ngrams: np.ndarray


def _hash(text: str) -> int:
    """64 bits, the same on every machine."""
    return int.from_bytes(
        hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "little"
    )


_word_hash = lru_cache(maxsize=1 << 20)(_hash)


def index_documents(documents: Iterable[Document]) -> TextIndex:
    """The index of annotated documents.

    Their sentences are cut as notes are, and once more as their source or the project's
    general rule cuts them, so that a sentence is found whichever way it was cut.
    """
    hashed = [np.zeros(0, np.uint64)]
    ngrams = [np.zeros(0, np.uint64)]
    for document in documents:
        own = sentences(document.text)
        cut = [document.text[a:b] for a, b in split_sentences(document)]
        ngrams.append(np.unique(_ngrams(own)))
        hashed.append(_sentence_hashes([*own, *cut]))
    return TextIndex(
        np.unique(np.concatenate(hashed)), np.unique(np.concatenate(ngrams))
    )


def shared_text(
    texts: Iterable[str], indexes: Sequence[TextIndex]
) -> tuple[SharedText, ...]:
    """What the notes share with each of the collections; the notes are gone through
    once."""
    totals = [SharedText() for _ in indexes]
    for text in texts:
        own = sentences(text)
        hashed, ngrams = _sentence_hashes(own), _ngrams(own)
        for at, index in enumerate(indexes):
            shared, again = (
                _occurring(hashed, index.sentences),
                _occurring(ngrams, index.ngrams),
            )
            totals[at] += SharedText(
                len(hashed), shared, int(shared > 0), len(ngrams), again
            )
    return tuple(totals)


def shares_sentence(text: str, index: TextIndex) -> bool:
    """Whether a sentence of the text, of MIN_WORDS words or more, occurs in the
    collection."""
    return _occurring(_sentence_hashes(sentences(text)), index.sentences) > 0


def _words_of(sentence: str) -> list[str]:
    plain = PLACEHOLDER.sub(" ", unicodedata.normalize("NFKC", sentence))
    return _WORD.findall(plain.casefold())


def _sentence_hashes(cut: Iterable[str]) -> np.ndarray:
    """(sentences of MIN_WORDS words or more,) uint64."""
    words = map(_words_of, cut)
    return np.fromiter(
        (_hash(" ".join(own)) for own in words if len(own) >= MIN_WORDS), np.uint64
    )


def _ngrams(cut: Iterable[str]) -> np.ndarray:
    """(words - NGRAM + 1,) uint64: Σ hash(word i) · factor^i modulo 2^64 of each
    n-gram."""
    # (words,)
    hashed = np.fromiter((_word_hash(w) for s in cut for w in _words_of(s)), np.uint64)
    total = np.zeros(max(0, len(hashed) - NGRAM + 1), np.uint64)  # (n-grams,)
    for offset in range(NGRAM if len(total) else 0):
        total *= np.uint64(_FACTOR)  # wraps, as meant
        total += hashed[offset : offset + len(total)]
    return total


def _occurring(hashes: np.ndarray, known: np.ndarray) -> int:
    """How many of `hashes` are in `known`, which is sorted."""
    if not len(known) or not len(hashes):
        return 0
    at = np.searchsorted(known, hashes)
    at[at == len(known)] = 0
    return int(np.count_nonzero(known[at] == hashes))
