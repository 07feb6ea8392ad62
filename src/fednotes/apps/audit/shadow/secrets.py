"""Secrets to plant: invented names, and numbers, that no note contains.

A name is two words of four syllables' parts each; a number is four times two digits, of
which there are 65,610,000.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

SecretKind = Literal["name", "number"]
TIMES_PLANTED = {1: 10, 10: 6}  # notes that a secret is in → number of such secrets
GUESSES = 99  # other values that each secret could have had

_ONSETS = "b br d dr f g gr k kl l m n p r s st t tr v z".split()
_VOWELS = "a e i o u".split()
_ENDINGS = "ck ld m n r rt s sk th x".split()
_NAME_PARTS = (_ONSETS, _VOWELS, _ENDINGS, _ONSETS, _VOWELS)


@dataclass(frozen=True)
class Secret:
    """What one model is trained on and may remember.

    Attributes:
        kind: "name" or "number".
        guesses: The secret itself, then other values that it could have had.
        times: Number of notes that it is in.
        carriers: (times,) numbers of the texts that it is planted into.
    """

    kind: SecretKind
    guesses: tuple[str, ...]
    times: int
    carriers: tuple[int, ...]


Planted = tuple[Secret, int]  # and the number of the text that carries it


def draw_secrets(
    rng: np.random.Generator, kinds: Sequence[SecretKind], carriers: int
) -> Iterator[Secret]:
    """Yield the secrets of one model.

    Args:
        rng: The generator that they are drawn with.
        kinds: Kinds of secrets to draw.
        carriers: Number of texts that one can be planted into.
    """
    for kind in kinds:
        for times, count in TIMES_PLANTED.items():
            for _ in range(count):
                guesses = tuple(_draw(rng, kind) for _ in range(1 + GUESSES))
                places = tuple(rng.integers(0, carriers, times).tolist())
                yield Secret(kind, guesses, times, places)


def _draw(rng: np.random.Generator, kind: SecretKind) -> str:
    if kind == "number":
        return " ".join(str(pair) for pair in rng.integers(10, 100, 4))
    first = _draw_word(rng)
    return f"{first} {_draw_word(rng)}"


def _draw_word(rng: np.random.Generator) -> str:
    return "".join(str(rng.choice(parts)) for parts in _NAME_PARTS).title()
