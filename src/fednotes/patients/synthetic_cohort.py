"""Invented cohorts at the scale of Liu, Dligach and Miller 2019: to measure and to demonstrate.

    generate     stage 1: 44,211 patients at 10 sites with 174 codes
    phenotypes   stage 2: 1,237 patients judged for 16 diseases at the rates of Table 1

A patient is a mixture of a few hidden conditions. Each condition favours concepts of its own,
and codes and diseases follow from the conditions plus noise, so what is in the bags predicts
the labels, and what stage 1 learns carries over to stage 2: both draw on one world of
conditions, which depends on `world` and the vocabulary alone. Concepts are Zipf distributed,
nearly. The number of concepts of a patient is log-normal, cut at the paper's limit of 10,000;
the paper gives no mean, so `mean_concepts` is an assumption. No line of it comes from a real
patient: that one way of learning does better on it says nothing of hospitals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from fednotes.core.errors import ConfigError
from fednotes.core.seeds import rng_of
from fednotes.patients.cohort import ABSENT, PRESENT, QUESTIONABLE, UNLABELLED, Bags, Cohort
from fednotes.patients.obesity import DISEASES

# Table 1: present, absent, questionable. The paper's columns of presence and absence are
# exchanged (596 of 682 patients with asthma); these are the other way round.
TABLE_1: Final[dict[str, tuple[int, int, int]]] = {
    "Asthma": (86, 596, 0),
    "CAD": (391, 265, 5),
    "CHF": (308, 318, 1),
    "Depression": (142, 555, 0),
    "Diabetes": (473, 205, 5),
    "GERD": (144, 447, 1),
    "Gallstones": (101, 609, 0),
    "Gout": (94, 616, 2),
    "Hypercholesterolemia": (315, 287, 1),
    "Hypertension": (511, 127, 0),
    "Hypertriglyceridemia": (37, 665, 0),
    "OA": (117, 554, 1),
    "OSA": (99, 606, 8),
    "Obesity": (285, 379, 1),
    "PVD": (110, 556, 1),
    "Venous Insufficiency": (54, 577, 0),
}
JUDGED: Final = 730  # summaries of the challenge's training part, which Table 1 counts
LIMIT: Final = 10_000  # concepts of a patient
_CONDITIONS = 24
_BACKGROUND = 0.3  # share of a patient's concepts that have nothing to do with conditions
_SPREAD = 1.0  # σ of the log-normal number of concepts
_SHUFFLE = 3.0  # how far a condition moves concepts from their overall rank, in ln(rank)
_CONCENTRATION = 0.05  # of a patient's conditions: few of them at a time
_NOISE = 0.5  # of labels, in standard deviations of what the conditions say
_CHUNK = 4_000  # patients whose concepts are drawn at once


@dataclass(frozen=True, eq=False)
class World:
    """What all cohorts of one world share.

    cumulative: (vocabulary,) float64, the Zipf distribution over ranks, summed up.
    concept: (conditions + 1, vocabulary) int32, the concept of each rank; row 0 is background.
    """

    cumulative: np.ndarray
    concept: np.ndarray

    @classmethod
    def of(cls, vocabulary: int, world: int) -> World:
        """The world of this number and size of vocabulary."""
        if vocabulary < 1:
            raise ConfigError(f"the vocabulary must have at least 1 concept, not {vocabulary}")
        rng = rng_of(world, "synthetic cohort", "world", vocabulary)
        rank = np.arange(1, vocabulary + 1)
        weight = 1.0 / rank
        moved = np.log(rank) + _SHUFFLE * rng.standard_normal((_CONDITIONS + 1, vocabulary))
        moved[0] = np.log(rank)
        cumulative = np.cumsum(weight) / weight.sum()
        cumulative[-1] = 1.0
        return cls(cumulative, np.argsort(moved, axis=1).astype(np.int32))


def generate(
    patients: int = 44_211,
    sites: int = 10,
    outputs: int = 174,
    vocabulary: int = 20_000,
    seed: int = 0,
    *,
    mean_concepts: float = 500.0,
    skew: float = 0.5,
    world: int = 0,
) -> tuple[Cohort, ...]:
    """A cohort for each site, named site-1 and on; sizes differ by one at most.

    outputs: codes, code-001 and on, as frequent as the paper's: from 45 % of patients down to
    2.3 % (1,001 of 44,211), falling like a power of their rank. Over all sites each has exactly
    its share; a site may have a code in no patient. mean_concepts: mean of the log-normal
    number of concepts (σ of its logarithm 1; each patient has one at least). skew: how much
    sites differ in their mix of conditions; 0 deals patients at random as the paper does.
    Labels are 1 and 0. 44,211 patients are 22 million concepts, 88 MB.

    Raises ConfigError for numbers below 1, a negative skew, or more sites than patients.
    """
    _check(patients=patients, sites=sites, outputs=outputs)
    _check_shape(mean_concepts, skew)
    if sites > patients:
        raise ConfigError(f"{patients} patients cannot fill {sites} sites")
    here = World.of(vocabulary, world)
    sizes = [len(part) for part in np.array_split(np.arange(patients), sites)]
    mixes = np.concatenate(
        [_conditions(size, skew, seed, f"site {site}") for site, size in enumerate(sizes, 1)]
    )
    share = 0.45 * np.arange(1, outputs + 1) ** -_fall(outputs)
    said = _said(mixes, outputs, rng_of(world, "synthetic cohort", "codes"))
    said += _NOISE * rng_of(seed, "synthetic cohort", "codes").standard_normal(said.shape)
    labels = _top(said, np.rint(share * patients).astype(np.int64))
    names = tuple(f"code-{n:03d}" for n in range(1, outputs + 1))
    cohorts = []
    start = 0
    for site, size in enumerate(sizes, 1):
        stop = start + size
        bags = _bags(mixes[start:stop], here, mean_concepts, seed, f"site {site}")
        ids = tuple(f"s{site}-{n:06d}" for n in range(1, size + 1))
        cohorts.append(Cohort(f"site-{site}", ids, bags, labels[start:stop], names))
        start = stop
    return tuple(cohorts)


def phenotypes(
    patients: int = 1_237,
    diseases: int = 16,
    vocabulary: int = 20_000,
    seed: int = 0,
    *,
    mean_concepts: float = 100.0,
    skew: float = 0.5,
    world: int = 0,
) -> Cohort:
    """A cohort for stage 2, of another hospital than those of `generate`, of one world with them.

    Each disease is present, absent and questionable at Table 1's rates, exactly (rounded); the
    questionable ones lie between the two. Pairs that Table 1 lacks (of its 730 summaries) are
    unlabelled here at the same rate. More than 16 diseases repeat the rates and are named
    disease-17 and on. Deal it to sites with `cohort.deal`.

    Raises ConfigError for numbers below 1 or a negative skew.
    """
    _check(patients=patients, diseases=diseases)
    _check_shape(mean_concepts, skew)
    here = World.of(vocabulary, world)
    mixes = _conditions(patients, skew, seed, "phenotypes")
    rng = rng_of(seed, "synthetic cohort", "phenotypes")
    said = _said(mixes, diseases, rng_of(world, "synthetic cohort", "diseases"))
    said += _NOISE * rng.standard_normal(said.shape)
    columns = [
        _judged(said[:, d], TABLE_1[DISEASES[d % len(DISEASES)]], rng) for d in range(diseases)
    ]
    names = (*DISEASES[:diseases], *(f"disease-{n}" for n in range(17, diseases + 1)))
    bags = _bags(mixes, here, mean_concepts, seed, "phenotypes")
    ids = tuple(f"p-{n:05d}" for n in range(1, patients + 1))
    return Cohort("phenotypes", ids, bags, np.stack(columns, axis=1), names)


def _fall(outputs: int) -> float:
    """The power by which code frequencies fall from 45 % to 1,001 patients of 44,211."""
    return float(np.log(0.45 * 44_211 / 1_001) / np.log(outputs)) if outputs > 1 else 0.0


def _conditions(patients: int, skew: float, seed: int, name: str) -> np.ndarray:
    """(patients, conditions) float32: how much each condition is a patient's; rows sum to 1."""
    rng = rng_of(seed, "synthetic cohort", "conditions", name)
    weight = _CONCENTRATION * np.exp(skew * rng.standard_normal(_CONDITIONS))
    drawn = rng.standard_gamma(weight, (patients, _CONDITIONS)) + 1e-12
    mixes: np.ndarray = (drawn / drawn.sum(1, keepdims=True)).astype(np.float32)
    return mixes


def _said(mixes: np.ndarray, labels: int, rng: np.random.Generator) -> np.ndarray:
    """(patients, labels) float64: what the conditions say of each label, of variance near 1.

    Three conditions speak for a label, by the root of their share: half a share is not half
    a disease.
    """
    weight = np.zeros((_CONDITIONS, labels))
    for label in range(labels):
        weight[rng.choice(_CONDITIONS, 3, replace=False), label] = rng.uniform(0.5, 1.5, 3)
    said: np.ndarray = np.sqrt(mixes) @ weight
    # Not by the sample's own deviation: a world's labels mean the same in every cohort of it.
    return said / (0.125 * np.sqrt((weight**2).sum(0)))


def _top(said: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(patients, labels) int8: 1 for the `counts` patients of whom most is said, else 0."""
    order = np.argsort(-said, axis=0, kind="stable")
    labels = np.full(said.shape, ABSENT, dtype=np.int8)
    for label, count in enumerate(counts.tolist()):
        labels[order[:count, label], label] = PRESENT
    return labels


def _judged(said: np.ndarray, rates: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
    """(patients,) int8: one disease's labels at the rates of present, absent, questionable."""
    present, _, questionable = (r / sum(rates) for r in rates)
    patients = len(said)
    labelled = round(patients * sum(rates) / JUDGED)
    chosen = rng.permutation(patients)[:labelled]
    ordered = chosen[np.argsort(-said[chosen], kind="stable")]
    first = round(present * labelled)
    last = min(first + round(questionable * labelled), labelled)
    labels = np.full(patients, UNLABELLED, dtype=np.int8)
    labels[ordered[:first]] = PRESENT
    labels[ordered[first:last]] = QUESTIONABLE
    labels[ordered[last:]] = ABSENT
    return labels


def _bags(mixes: np.ndarray, world: World, mean: float, seed: int, name: str) -> Bags:
    """The concepts of patients of these conditions, drawn in chunks to bound the memory."""
    rng = rng_of(seed, "synthetic cohort", "concepts", name)
    patients, vocabulary = len(mixes), world.concept.shape[1]
    centre = np.log(mean) - _SPREAD**2 / 2  # so that the mean is `mean` before it is cut
    sizes = np.rint(rng.lognormal(centre, _SPREAD, patients)).clip(1, LIMIT).astype(np.int64)
    offsets = np.zeros(patients + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    concepts = np.empty(offsets[-1], dtype=np.int32)
    for start in range(0, patients, _CHUNK):
        stop = min(start + _CHUNK, patients)
        total = int(offsets[stop] - offsets[start])
        condition = _drawn_conditions(mixes[start:stop], sizes[start:stop], rng)
        rank = np.searchsorted(world.cumulative, rng.random(total), side="right")
        np.minimum(rank, vocabulary - 1, out=rank)
        concepts[offsets[start] : offsets[stop]] = world.concept[condition, rank]
    return Bags(concepts, offsets, vocabulary)


def _drawn_conditions(mixes: np.ndarray, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(entries,) int64: which row of `World.concept` each entry comes from."""
    share = np.concatenate(
        [np.full((len(mixes), 1), _BACKGROUND), (1 - _BACKGROUND) * mixes.astype(np.float64)],
        axis=1,
    )
    share /= share.sum(1, keepdims=True)
    # One multinomial a patient gives how many entries each condition has: far fewer draws
    # than one an entry. Their order within a bag means nothing.
    counts = rng.multinomial(sizes, share)  # (patients, conditions + 1)
    which = np.tile(np.arange(share.shape[1]), len(mixes))
    return np.repeat(which, counts.ravel())


def _check(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ConfigError(f"the number of {name} must be at least 1, not {value}")


def _check_shape(mean_concepts: float, skew: float) -> None:
    if not mean_concepts >= 1:
        raise ConfigError(f"the mean number of concepts must be at least 1, not {mean_concepts:g}")
    if not skew >= 0:
        raise ConfigError(f"the skew between sites must not be negative, not {skew:g}")
