"""Invented patients with notes, billed codes and phenotypes: a demonstration without
any file.

A patient has a few of 20 hidden conditions. Each condition favours concepts of its own,
billed codes follow from the conditions, and so do six phenotypes; so what the notes say
predicts both, and what is learnt of codes carries over to phenotypes. A phenotype is
named in some notes of those who have it, in others negated or as a relative's. Words
come from syllables and lists (`data/lexicon.toml`): no line of it is of a real patient,
and that one way of learning does better on it says nothing of hospitals.

The dictionary is the same for every seed: a model that was trained on one can be used
on another.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Final

import numpy as np

from fednotes.apps.phenotyping.cohort import ABSENT, PRESENT, QUESTIONABLE, UNLABELLED
from fednotes.apps.phenotyping.dictionary import (
    Dictionary,
    dictionary_of,
    singular,
    unfit,
    words_of,
)
from fednotes.apps.phenotyping.labels import PatientLabels
from fednotes.core.seeds import rng_of
from fednotes.data.synthetic import make_lexicon

_LISTS: Final = tomllib.loads(
    files("fednotes.apps.phenotyping").joinpath("synthetic.toml").read_text("utf-8")
)
PHENOTYPES: Final = tuple(_LISTS["phenotypes"])
_SAID: Final = _LISTS["sentences"]
_UNCERTAIN: Final = "depression"  # judged questionable where little speaks for it
_One = Callable[..., str]
_CONDITIONS = 20
_OTHERS = 300  # concepts besides the phenotypes'
_OWN = 9  # concepts that a condition favours
_CODES = 2  # categories of codes of each condition


@dataclass(frozen=True, eq=False)
class GeneratedPatients:
    """One site's patients: notes by patient, codes by patient, and labels.

    A few patients have no codes, and a few pairs of patient and phenotype no label.
    """

    notes: Mapping[str, tuple[str, ...]]
    codes: Mapping[str, frozenset[str]]
    labels: PatientLabels


@dataclass(frozen=True, eq=False)
class _World:
    """What is the same for all sites and seeds.

    terms: of each concept; the phenotypes' come first. own: (conditions, _OWN)
        concepts.
    codes: of each condition. weight: (conditions, phenotypes), how much a condition
    speaks for a phenotype. common: (conditions,) shares of patients.
    """

    terms: tuple[tuple[str, ...], ...]
    own: np.ndarray
    codes: tuple[tuple[str, ...], ...]
    weight: np.ndarray
    common: np.ndarray


def dictionary() -> Dictionary:
    """The public dictionary of the generated notes: some 300 concepts with 1 to 3 terms
    each."""
    terms = _world().terms
    return dictionary_of(
        (f"S{at:04d}", term) for at, names in enumerate(terms) for term in names
    )


@lru_cache(maxsize=1)
def _world() -> _World:
    rng = rng_of(0, "synthetic patients", "world")
    terms = _terms(rng)
    others = np.arange(len(PHENOTYPES), len(terms))
    own = rng.choice(others, (_CONDITIONS, _OWN), replace=False)
    categories = np.sort(
        rng.choice(np.arange(10, 1000), 2 * _CONDITIONS, replace=False)
    )
    codes = tuple(
        tuple(f"icd9:{c:03d}{rng.integers(10)}" for c in pair)
        for pair in rng.permutation(categories).reshape(_CONDITIONS, _CODES).tolist()
    )
    weight = np.zeros((_CONDITIONS, len(PHENOTYPES)))
    for column in range(len(PHENOTYPES)):
        weight[rng.choice(_CONDITIONS, 3, replace=False), column] = (1.0, 0.8, 0.6)
    return _World(terms, own, codes, weight, rng.uniform(0.06, 0.25, _CONDITIONS))


def _terms(rng: np.random.Generator) -> tuple[tuple[str, ...], ...]:
    """Each concept's terms.

    No two terms are the same words, and each can be matched.
    """
    lexicon = make_lexicon(rng, 800)
    taken: set[str] = set()

    def fresh(term: str) -> bool:
        words = words_of(term)
        form = " ".join(map(singular, words))
        if form in taken or unfit(words):
            return False
        taken.add(form)
        return True

    made = [tuple(filter(fresh, names)) for _, *names in _LISTS["phenotypes"].values()]
    pools = [
        iter(names)
        for names in map(lexicon.__getitem__, ("disease", "finding", "drug"))
    ]
    for number in range(_OTHERS):
        pool, synonyms = pools[number % len(pools)], int(rng.integers(1, 4))
        found: list[str] = []
        for term in pool:
            if fresh(term):
                found.append(term)
            if len(found) == synonyms:
                break
        if found:
            made.append(tuple(found))
    return tuple(made)


def generate(name: str, patients: int = 600, seed: int = 0) -> GeneratedPatients:
    """The patients of a site of this name; sites differ in number and in what they
    have.

    patients: roughly: from 0.6 to 1.4 times as many. A function of its arguments.
    """
    world = _world()
    rng = rng_of(seed, "synthetic patients", name)
    size = max(1, round(patients * rng.uniform(0.6, 1.4)))
    odds = np.log(world.common / (1 - world.common)) + 0.5 * rng.standard_normal(
        _CONDITIONS
    )
    # (patients, conditions)
    has = rng.random((size, _CONDITIONS)) < 1 / (1 + np.exp(-odds))
    said = has @ world.weight + 0.25 * rng.standard_normal((size, len(PHENOTYPES)))
    truth = said > _thresholds()
    labels = np.where(truth, PRESENT, ABSENT).astype(np.int8)
    column = PHENOTYPES.index(_UNCERTAIN)
    near = np.abs(said[:, column] - _thresholds()[column]) < 0.06
    labels[near, column] = QUESTIONABLE
    labels[rng.random(labels.shape) < 0.05] = UNLABELLED  # experts who disagreed
    # this site's own words
    favourite = [int(rng.integers(len(terms))) for terms in world.terms]
    notes, codes = {}, {}
    for row in range(size):
        patient = f"{name}-{row + 1:05d}"
        notes[patient] = _notes(world, has[row], truth[row], favourite, rng)
        billed = _billed(world, has[row], rng)
        if rng.random() >= 0.02:
            codes[patient] = billed
    values = {
        patient: {p: v for p, v in zip(PHENOTYPES, own, strict=True) if v != UNLABELLED}
        for patient, own in zip(notes, labels.tolist(), strict=True)
    }
    return GeneratedPatients(notes, codes, PatientLabels(PHENOTYPES, values))


@lru_cache(maxsize=1)
def _thresholds() -> np.ndarray:
    """(phenotypes,): what must speak for one, so that about its share of patients has
    it."""
    world, rng = _world(), rng_of(0, "synthetic patients", "thresholds")
    has = rng.random((20_000, _CONDITIONS)) < world.common
    said = has @ world.weight + 0.25 * rng.standard_normal((len(has), len(PHENOTYPES)))
    shares = [share for share, *_ in _LISTS["phenotypes"].values()]
    return np.array(
        [np.quantile(said[:, c], 1 - share) for c, share in enumerate(shares)]
    )


def _billed(world: _World, has: np.ndarray, rng: np.random.Generator) -> frozenset[str]:
    """Codes of a patient's conditions, most of them, and now and then another one."""
    every = [code for pair in world.codes for code in pair]
    billed = {
        code
        for at in np.flatnonzero(has)
        for code in world.codes[at]
        if rng.random() < 0.8
    }
    return frozenset(
        billed | {every[int(rng.integers(len(every)))] for _ in range(rng.poisson(1))}
    )


def _notes(
    world: _World,
    has: np.ndarray,
    truth: np.ndarray,
    favourite: Sequence[int],
    rng: np.random.Generator,
) -> tuple[str, ...]:
    if rng.random() < 0.01:  # nothing that the dictionary knows
        return (" ".join(rng.choice(_SAID["noise"], 3).tolist()),)

    def term(concept: int) -> str:
        names = world.terms[concept]
        return names[
            favourite[concept] if rng.random() < 0.7 else int(rng.integers(len(names)))
        ]

    def one(forms: Sequence[str], *concepts: int) -> str:
        made = forms[int(rng.integers(len(forms)))].format(*map(term, concepts))
        return made[0].upper() + made[1:]

    return tuple(
        _note(world, has, truth, one, rng) for _ in range(int(rng.integers(1, 4)))
    )


def _note(
    world: _World,
    has: np.ndarray,
    truth: np.ndarray,
    one: _One,
    rng: np.random.Generator,
) -> str:
    """A note's sentences, in random order."""
    sentences = [one(_SAID["noise"]) for _ in range(int(rng.integers(1, 4)))]
    for at in np.flatnonzero(has):
        own = world.own[at][rng.random(_OWN) < 0.3].tolist()
        while own:
            pair = len(own) > 1 and rng.random() < 0.4
            sentences.append(
                one(_SAID["more"], own.pop(), own.pop())
                if pair
                else one(_SAID["present"], own.pop())
            )
    for phenotype, present in enumerate(truth.tolist()):
        draw = rng.random()
        if present and draw < 0.35:
            sentences.append(one(_SAID["present"], phenotype))
        elif draw > 0.92:
            sentences.append(one(_SAID["family"], phenotype))
        elif not present and draw > 0.84:
            sentences.append(one(_SAID["negated"], phenotype))
        elif draw > 0.82:  # said of somebody who does not have it, or only once had it
            sentences.append(one(_SAID["present"], phenotype))
    for _ in range(int(rng.poisson(2))):
        sentences.append(
            one(_SAID["present"], int(rng.integers(len(PHENOTYPES), len(world.terms))))
        )
    for _ in range(int(rng.poisson(1.5))):
        sentences.append(
            one(_SAID["negated"], int(rng.integers(len(PHENOTYPES), len(world.terms))))
        )
    return " ".join(sentences[i] for i in rng.permutation(len(sentences)).tolist())
