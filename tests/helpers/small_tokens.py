"""A tokenized corpus in memory, where a program keeps it on disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from fednotes.encoders.token_cache import Tokens


def tokens_of(documents: Iterable[Sequence[Sequence[int]]]) -> Tokens:
    """Return a corpus from the ids of each document's sentences, without empty ones."""
    nonempty = [[s for s in document if len(s)] for document in documents]
    nonempty = [document for document in nonempty if document]
    flat = [s for document in nonempty for s in document]
    bounds = [
        np.cumsum([0, *map(len, part)], dtype=np.int64) for part in (flat, nonempty)
    ]
    return Tokens(np.array([i for s in flat for i in s], dtype=np.uint32), *bounds)
