"""Sentences of words as the package reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fednotes.data.text import Passage


def passage(words: Sequence[str]) -> Passage:
    """Return the words joined by blanks, with the place of each one."""
    places, at = [], 0
    for word in words:
        places.append((at, at + len(word)))
        at += len(word) + 1
    return Passage(" ".join(words), np.array(places, np.int64).reshape(-1, 2))


def passages(sentences: Sequence[Sequence[str]]) -> list[Passage]:
    """Return the `passage` of each sentence."""
    return [passage(words) for words in sentences]
