"""Secrets to plant: invented names and numbers that no note contains.

A name is two words of four syllable parts each; a number is four pairs of digits, of
which there are 65,610,000.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

SecretKind = Literal["name", "number"]
TIMES_PLANTED = {1: 10, 10: 6}  # notes with the secret → number of secrets
GUESSES = 99  # number of alternative values of each secret

_ONSETS = "b br d dr f g gr k kl l m n p r s st t tr v z".split()
_VOWELS = "a e i o u".split()
_ENDINGS = "ck ld m n r rt s sk th x".split()
_NAME_PARTS = (_ONSETS, _VOWELS, _ENDINGS, _ONSETS, _VOWELS)


@dataclass(frozen=True)
class Secret:
    """A secret that one model is trained on and may remember.

    Attributes:
        kind: "name" or "number".
        guesses: The secret itself, then its alternative values.
        times: Number of notes that contain it.
        carriers: (times,) indices of the texts that it is planted into.
    """

    kind: SecretKind
    guesses: tuple[str, ...]
    times: int
    carriers: tuple[int, ...]


Planted = tuple[Secret, int]  # a secret and the index of the text that carries it


def draw_secrets(
    rng: np.random.Generator, kinds: Sequence[SecretKind], carriers: int
) -> Iterator[Secret]:
    """Yield the secrets of one model.

    Args:
        rng: The random generator.
        kinds: Kinds of secrets to draw.
        carriers: Number of texts that a secret can be planted into.
    """
    for kind in kinds:
        for times, count in TIMES_PLANTED.items():
            for _ in range(count):
                guesses = tuple(_draw_value(rng, kind) for _ in range(1 + GUESSES))
                places = tuple(rng.integers(0, carriers, times).tolist())
                yield Secret(kind, guesses, times, places)


def _draw_value(rng: np.random.Generator, kind: SecretKind) -> str:
    """Return a random name or number."""
    if kind == "number":
        return " ".join(str(pair) for pair in rng.integers(10, 100, 4))
    first = _draw_word(rng)
    return f"{first} {_draw_word(rng)}"


def _draw_word(rng: np.random.Generator) -> str:
    """Return a random word of a name."""
    return "".join(str(rng.choice(parts)) for parts in _NAME_PARTS).title()
