"""Generated patients with notes, billed codes and phenotypes, for use without data.

A patient has a few of 20 hidden conditions. Each condition favours some concepts, and
both billed codes and six phenotypes follow from the conditions. Therefore notes predict
codes and phenotypes, and training on codes helps with phenotypes. A phenotype is named
in some notes of the patients who have it; in other notes it is negated or attributed to
a relative.

Words come from syllables and lists (`data/lexicon.toml`). No line comes from a real
patient, and results on these patients do not transfer to hospitals. The dictionary is
the same for every seed, so a model trained on one seed can be used on another.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import islice
from typing import Final

import numpy as np

from fednotes.apps.phenotyping.cohort import ABSENT, PRESENT, QUESTIONABLE, UNLABELLED
from fednotes.apps.phenotyping.dictionary import Dictionary, build_dictionary
from fednotes.apps.phenotyping.labels import PatientLabels
from fednotes.apps.phenotyping.words import (
    explain_no_match,
    make_singular,
    split_into_words,
)
from fednotes.core.seeds import rng_of
from fednotes.data.synthetic import make_lexicon

_LISTS: Final = tomllib.loads(
    files("fednotes.apps.phenotyping").joinpath("synthetic.toml").read_text("utf-8")
)
_SENTENCES: Final = _LISTS["sentences"]  # templates by their meaning
PHENOTYPES: Final = tuple(_LISTS["phenotypes"])
_UNCERTAIN: Final = "depression"  # questionable in patients near the threshold

_CONDITIONS: Final = 20
_OTHER_CONCEPTS: Final = 300  # concepts besides the phenotypes
_FAVOURED: Final = 9  # number of concepts that a condition favours
_CODES: Final = 2  # number of codes of a condition
_NOISE: Final = 0.25  # standard deviation of the noise in the evidence


@dataclass(frozen=True, eq=False)
class GeneratedPatients:
    """The patients of one site.

    A few patients have no codes, and a few pairs of patient and phenotype have no
    label.

    Attributes:
        notes: The notes of each patient.
        codes: The codes of each patient who was coded.
        labels: The labels of the phenotypes.
    """

    notes: Mapping[str, tuple[str, ...]]
    codes: Mapping[str, frozenset[str]]
    labels: PatientLabels


@dataclass(frozen=True, eq=False)
class _World:
    """The constants shared by all sites and seeds.

    Attributes:
        terms: The terms of each concept. The phenotypes come first.
        favoured: (conditions, _FAVOURED) concepts of each condition.
        codes: The codes of each condition.
        weight: (conditions, phenotypes) evidence of each condition for a phenotype.
        frequency: (conditions,) fraction of the patients who have each condition.
    """

    terms: tuple[tuple[str, ...], ...]
    favoured: np.ndarray
    codes: tuple[tuple[str, ...], ...]
    weight: np.ndarray
    frequency: np.ndarray


# ---- the world -----------------------------------------------------------------------


def build_synthetic_dictionary() -> Dictionary:
    """Return the public dictionary: some 300 concepts with 1 to 3 terms each."""
    terms = _get_world().terms
    return build_dictionary(
        (f"S{concept:04d}", term)
        for concept, names in enumerate(terms)
        for term in names
    )


@lru_cache(maxsize=1)
def _get_world() -> _World:
    """Return the world, which is drawn once."""
    rng = rng_of(0, "synthetic patients", "world")
    terms = _draw_terms(rng)
    others = np.arange(len(PHENOTYPES), len(terms))
    favoured = rng.choice(others, (_CONDITIONS, _FAVOURED), replace=False)
    codes = _draw_codes(rng)
    weight = np.zeros((_CONDITIONS, len(PHENOTYPES)))
    for column in range(len(PHENOTYPES)):
        weight[rng.choice(_CONDITIONS, 3, replace=False), column] = (1.0, 0.8, 0.6)
    frequency = rng.uniform(0.06, 0.25, _CONDITIONS)
    return _World(terms, favoured, codes=codes, weight=weight, frequency=frequency)


def _draw_codes(rng: np.random.Generator) -> tuple[tuple[str, ...], ...]:
    """Return the codes of each condition, each of a different category."""
    numbers = rng.choice(np.arange(10, 1000), _CODES * _CONDITIONS, replace=False)
    categories = rng.permutation(np.sort(numbers)).reshape(_CONDITIONS, _CODES)
    return tuple(
        tuple(f"icd9:{category:03d}{rng.integers(10)}" for category in of_condition)
        for of_condition in categories.tolist()
    )


def _draw_terms(rng: np.random.Generator) -> tuple[tuple[str, ...], ...]:
    """Return the terms of each concept.

    No two terms consist of the same words, and each can be matched.
    """
    lexicon = make_lexicon(rng, 800)
    used: set[str] = set()

    def is_new(term: str) -> bool:
        """Return whether a term is matched and new, and count it as used."""
        words = split_into_words(term)
        form = " ".join(map(make_singular, words))
        if form in used or explain_no_match(words):
            return False
        used.add(form)
        return True

    concepts = [
        tuple(filter(is_new, names)) for _, *names in _LISTS["phenotypes"].values()
    ]
    pools = [iter(lexicon[kind]) for kind in ("disease", "finding", "drug")]
    for number in range(_OTHER_CONCEPTS):
        pool = pools[number % len(pools)]
        synonyms = int(rng.integers(1, 4))
        # `filter` takes only as many terms from the pool as the concept needs.
        terms = tuple(islice(filter(is_new, pool), synonyms))
        if terms:
            concepts.append(terms)
    return tuple(concepts)


@lru_cache(maxsize=1)
def _choose_thresholds() -> np.ndarray:
    """Return the evidence thresholds that give each phenotype its share of patients.

    Returns:
        (phenotypes,) thresholds.
    """
    world = _get_world()
    rng = rng_of(0, "synthetic patients", "thresholds")
    has = rng.random((20_000, _CONDITIONS)) < world.frequency
    evidence = _draw_evidence(world, has, rng)
    shares = [share for share, *_ in _LISTS["phenotypes"].values()]
    return np.array(
        [
            np.quantile(evidence[:, column], 1 - share)
            for column, share in enumerate(shares)
        ]
    )


def _draw_evidence(
    world: _World, has: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return the evidence for each phenotype of each patient.

    Args:
        world: The world.
        has: (patients, conditions) whether a patient has each condition.
        rng: Draws the noise.

    Returns:
        (patients, phenotypes).
    """
    noise = rng.standard_normal((len(has), len(PHENOTYPES)))
    evidence: np.ndarray = has @ world.weight + _NOISE * noise
    return evidence


# ---- patients ------------------------------------------------------------------------


def generate_patients(
    name: str, patients: int = 600, seed: int = 0
) -> GeneratedPatients:
    """Return the patients of a site; equal arguments give equal patients.

    Sites differ in their number of patients and in the patients' conditions.

    Args:
        name: Name of the site.
        patients: Approximate number of patients; the actual number is 0.6 to 1.4 times
            as large.
        seed: Seed of the patients.
    """
    world = _get_world()
    rng = rng_of(seed, "synthetic patients", name)
    size = max(1, round(patients * rng.uniform(0.6, 1.4)))
    log_odds = np.log(world.frequency / (1 - world.frequency))
    log_odds = log_odds + 0.5 * rng.standard_normal(_CONDITIONS)
    # (patients, conditions)
    has = rng.random((size, _CONDITIONS)) < 1 / (1 + np.exp(-log_odds))
    evidence = _draw_evidence(world, has, rng)
    truth = evidence > _choose_thresholds()
    labels = _draw_labels(evidence, truth, rng)

    favourites = [int(rng.integers(len(terms))) for terms in world.terms]
    writer = _NoteWriter(world, favourites, rng)
    notes = {}
    codes = {}
    for row in range(size):
        patient = f"{name}-{row + 1:05d}"
        notes[patient] = writer.write_notes(has[row], truth[row])
        billed = _draw_billed_codes(world, has[row], rng)
        if rng.random() >= 0.02:
            codes[patient] = billed
    values = {}
    for patient, row_labels in zip(notes, labels.tolist(), strict=True):
        pairs = zip(PHENOTYPES, row_labels, strict=True)
        values[patient] = {
            phenotype: label for phenotype, label in pairs if label != UNLABELLED
        }
    return GeneratedPatients(notes, codes, PatientLabels(PHENOTYPES, values))


def _draw_labels(
    evidence: np.ndarray, truth: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return (patients, phenotypes) int8 labels, of which some are missing."""
    labels = np.where(truth, PRESENT, ABSENT).astype(np.int8)
    column = PHENOTYPES.index(_UNCERTAIN)
    distance = np.abs(evidence[:, column] - _choose_thresholds()[column])
    labels[distance < 0.06, column] = QUESTIONABLE
    is_missing = rng.random(labels.shape) < 0.05  # as if experts disagreed
    labels[is_missing] = UNLABELLED
    return labels


def _draw_billed_codes(
    world: _World, has: np.ndarray, rng: np.random.Generator
) -> frozenset[str]:
    """Return most codes of a patient's conditions, and sometimes an unrelated one."""
    every_code = [code for codes in world.codes for code in codes]
    billed = {
        code
        for condition in np.flatnonzero(has)
        for code in world.codes[condition]
        if rng.random() < 0.8
    }
    others = rng.poisson(1)
    billed |= {every_code[int(rng.integers(len(every_code)))] for _ in range(others)}
    return frozenset(billed)


class _NoteWriter:
    """Writes the notes of a site.

    Args:
        world: The world.
        favourites: The term of each concept that the site prefers.
        rng: Source of all random draws.
    """

    def __init__(
        self, world: _World, favourites: Sequence[int], rng: np.random.Generator
    ) -> None:
        self._world = world
        self._favourites = favourites
        self._rng = rng

    def write_notes(self, has: np.ndarray, truth: np.ndarray) -> tuple[str, ...]:
        """Return the notes of a patient.

        Args:
            has: (conditions,) whether the patient has each condition.
            truth: (phenotypes,) whether the patient has each phenotype.
        """
        if self._rng.random() < 0.01:  # a note without any dictionary term
            return (" ".join(self._rng.choice(_SENTENCES["noise"], 3).tolist()),)
        number = int(self._rng.integers(1, 4))
        return tuple(self._write_note(has, truth) for _ in range(number))

    def _write_note(self, has: np.ndarray, truth: np.ndarray) -> str:
        """Return the sentences of a note, in random order."""
        rng = self._rng
        sentences = [
            self._write_sentence("noise") for _ in range(int(rng.integers(1, 4)))
        ]
        for condition in np.flatnonzero(has).tolist():
            sentences += self._write_condition_sentences(condition)
        for phenotype, is_present in enumerate(truth.tolist()):
            kind = self._choose_sentence_kind(is_present=is_present)
            if kind is not None:
                sentences.append(self._write_sentence(kind, phenotype))
        for _ in range(int(rng.poisson(2))):
            sentences.append(self._write_sentence("present", self._draw_concept()))
        for _ in range(int(rng.poisson(1.5))):
            sentences.append(self._write_sentence("negated", self._draw_concept()))
        return " ".join(sentences[i] for i in rng.permutation(len(sentences)).tolist())

    def _write_condition_sentences(self, condition: int) -> list[str]:
        """Return sentences about some of the concepts that a condition favours."""
        is_named = self._rng.random(_FAVOURED) < 0.3
        concepts = self._world.favoured[condition][is_named].tolist()
        sentences = []
        while concepts:
            if len(concepts) > 1 and self._rng.random() < 0.4:
                first = concepts.pop()
                second = concepts.pop()
                sentences.append(self._write_sentence("more", first, second))
            else:
                sentences.append(self._write_sentence("present", concepts.pop()))
        return sentences

    def _choose_sentence_kind(self, *, is_present: bool) -> str | None:
        """Choose at random what a note says about a phenotype; None for nothing."""
        draw = self._rng.random()
        if is_present and draw < 0.35:
            return "present"
        if draw > 0.92:
            return "family"
        if not is_present and draw > 0.84:
            return "negated"
        # Some notes name a phenotype that the patient does not have, or no longer has.
        return "present" if draw > 0.82 else None

    def _draw_concept(self) -> int:
        """Return a random concept that is not a phenotype."""
        return int(self._rng.integers(len(PHENOTYPES), len(self._world.terms)))

    def _write_sentence(self, kind: str, *concepts: int) -> str:
        """Return a sentence of one kind about some concepts."""
        forms = _SENTENCES[kind]
        form = forms[int(self._rng.integers(len(forms)))]
        text: str = form.format(*map(self._choose_term, concepts))
        return text[0].upper() + text[1:]

    def _choose_term(self, concept: int) -> str:
        """Return a term of a concept, often the one that the site prefers."""
        names = self._world.terms[concept]
        if self._rng.random() < 0.7:
            return names[self._favourites[concept]]
        return names[int(self._rng.integers(len(names)))]
