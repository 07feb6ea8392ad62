"""Names of the synthetic corpus, made of the syllables, roots and phrases in `lexicon.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import numpy as np


@lru_cache(maxsize=1)
def words() -> dict[str, Any]:
    """`lexicon.toml`: lists of words and phrases, some of them by genre."""
    file = resources.files("fednotes.data").joinpath("lexicon.toml")
    return tomllib.loads(file.read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class Lexicon:
    """Names by kind, the commonest first; how often each is used is up to a site."""

    drug: tuple[str, ...]
    finding: tuple[str, ...]
    disease: tuple[str, ...]
    test: tuple[str, ...]
    org: tuple[str, ...]
    device: tuple[str, ...]
    brand: tuple[str, ...]


def make_lexicon(rng: np.random.Generator, size: int = 1500) -> Lexicon:
    """About `size` drugs and findings and half as many diseases. A function of `rng` alone."""
    known = words()

    def one(options: str | Sequence[str]) -> str:
        """One of a list of the file, or of these."""
        own = known[options] if isinstance(options, str) else options
        return str(own[int(rng.integers(len(own)))])

    def joined(*lists: str) -> str:
        return "".join(map(one, lists))

    def generic() -> str:
        short = rng.random() >= 0.7
        return joined("onset", "class") if short else joined("onset", "middle", "class")

    def body() -> str:
        return one(("", "", "left ", "right ", "lower ", "upper ")) + one("body")

    def finding() -> str:
        """A name that may be a disease, a symptom or an adverse effect: the context decides."""
        kind = rng.random()
        if kind < 0.40:
            name = joined("roots", "endings")
            return f"{one('course')} {name}" if rng.random() < 0.2 else name
        if kind < 0.60:
            return f"{one('complaint')} in the {body()}"
        if kind < 0.78:
            return f"{body()} {one('complaint')}"
        return one("lay")

    def disease() -> str:
        kind = rng.random()
        if kind < 0.25:
            eponym = joined("onset", "middle", "eponym_end").title()
            return f"{eponym}{one(('', chr(39) + 's'))} {one(('syndrome', 'disease'))}"
        if kind < 0.55:
            course = f"{one('course')} " if rng.random() < 0.3 else ""
            return f"{course}{one('adjective')} {one('state')}"
        return joined("roots", "endings") if kind < 0.80 else one("diseases")

    def test() -> str:
        kind = rng.random()
        if kind < 0.35:
            return one(("", "serum ", "urine ", "")) + one("tested")
        if kind < 0.55:
            return f"{one('tested')} level"
        whole = f"{one('imaging')} of the {body()}" if kind < 0.80 else ""
        return whole or f"{one('body')} {one('imaging')}"

    def distinct(count: int, make: Callable[[], str]) -> list[str]:
        """`count` different names, or fewer if the inventory is too small for so many."""
        names: dict[str, None] = {}
        for _ in range(20 * count):
            if len(names) >= count:
                break
            names[make()] = None
        return list(names)

    def shuffled(names: list[str]) -> tuple[str, ...]:
        return tuple(names[i] for i in rng.permutation(len(names)).tolist())

    def brand() -> str:
        return joined("onset", "middle", "brand_end").title()

    brands = distinct(size // 3, brand)
    generics = distinct(size - len(brands) - len(known["electrolytes"]), generic)
    companies = distinct(200, brand)
    orgs = [f"{name} {one('orgs')}" for name in companies[:90]]
    orgs += [f"{one('places')} {one('orgs')}" for _ in range(30)]
    devices = [f"{name} {one('devices')}" for name in companies[90:]] + known["devices"]
    return Lexicon(
        drug=shuffled([*brands, *generics, *known["electrolytes"]]),
        finding=shuffled(distinct(size, finding)),
        disease=shuffled(distinct(size // 2, disease)),
        test=shuffled(distinct(180, test)),
        org=shuffled(orgs),
        device=shuffled(devices),
        brand=shuffled(companies),
    )
