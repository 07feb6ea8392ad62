"""Generate cohorts at the scale of Liu, Dligach and Miller 2019, to measure stage 1.

A patient is a mixture of a few hidden conditions. Each condition favours concepts of its
own, and codes follow from the conditions plus noise. The distribution of concepts is
close to Zipf's. The number of concepts of a patient is log-normal, up to the paper's
limit of 10,000. Nothing comes from a real patient.
"""

from __future__ import annotations

import numpy as np

from fednotes.apps.phenotyping.cohort import Bags, Cohort, compute_offsets
from fednotes.core.seeds import rng_of

LIMIT = 10_000  # maximum number of concepts of a patient
CONDITIONS = 24
# Fraction of a patient's concepts that do not depend on conditions.
BACKGROUND = 0.3
SPREAD = 1.0  # σ of the log-normal number of concepts
SHUFFLE = 3.0  # how far a condition moves concepts from their overall rank, in ln(rank)
CONCENTRATION = 0.05  # of the Dirichlet mixture: a patient has few conditions
SKEW = 0.5  # how much sites differ in their mix of conditions
NOISE = 0.5  # of labels, in standard deviations of the conditions' scores
CHUNK = 4_000  # number of patients whose concepts are drawn at once


def generate(
    patients: int = 44_211,
    sites: int = 10,
    outputs: int = 174,
    vocabulary: int = 20_000,
    mean_concepts: float = 500.0,
) -> tuple[Cohort, ...]:
    """Return a cohort for each site, named site-1, site-2 and so on.

    With the defaults, the cohorts have 22 million concepts, 88 MB.

    Args:
        patients: Number of patients. The sizes of sites differ by at most one.
        sites: Number of sites.
        outputs: Number of codes, code-001 and so on. Their frequencies fall from 45 % of
            the patients by a power of the rank. With 174 codes, the last one has 2.3 % of
            the patients, as in the paper (1,001 of 44,211). Over all sites, each code has
            exactly its fraction.
        vocabulary: Number of concepts.
        mean_concepts: Mean number of concepts of a patient, before the limit.
    """
    rank = np.arange(1, vocabulary + 1)
    noise = rng_of(0, "synthetic cohort", "world", vocabulary)
    moved = np.log(rank) + SHUFFLE * noise.standard_normal((CONDITIONS + 1, vocabulary))
    moved[0] = np.log(rank)  # row 0 is the background
    # (conditions + 1, vocabulary): the concept at each rank
    concept = np.argsort(moved, axis=1).astype(np.int32)
    cumulative = np.cumsum(1.0 / rank) / (1.0 / rank).sum()
    sizes = [len(part) for part in np.array_split(np.arange(patients), sites)]
    names = [f"site {site}" for site in range(1, sites + 1)]
    mixes = [_conditions(size, name) for size, name in zip(sizes, names, strict=True)]
    labels = _labels(np.concatenate(mixes), outputs)
    codes = tuple(f"code-{n:03d}" for n in range(1, outputs + 1))
    cohorts = []
    for site, (mix, site_labels) in enumerate(
        zip(mixes, np.split(labels, np.cumsum(sizes)[:-1]), strict=True), 1
    ):
        bags = _bags(mix, cumulative, concept, mean_concepts, f"site {site}")
        ids = tuple(f"s{site}-{n:06d}" for n in range(1, len(mix) + 1))
        cohorts.append(Cohort(f"site-{site}", ids, bags, site_labels, codes))
    return tuple(cohorts)


def _conditions(patients: int, name: str) -> np.ndarray:
    """Return (patients, conditions) float32: each patient's mixture of conditions.

    Rows sum to 1.
    """
    rng = rng_of(0, "synthetic cohort", "conditions", name)
    weight = CONCENTRATION * np.exp(SKEW * rng.standard_normal(CONDITIONS))
    gammas = rng.standard_gamma(weight, (patients, CONDITIONS)) + 1e-12
    mixes: np.ndarray = (gammas / gammas.sum(1, keepdims=True)).astype(np.float32)
    return mixes


def _labels(mixes: np.ndarray, outputs: int) -> np.ndarray:
    """Return (patients, outputs) int8: the codes of each patient.

    Three conditions favour a code, each by the square root of its share in the patient. The
    patients with the highest scores have the code.
    """
    rng = rng_of(0, "synthetic cohort", "codes")
    weight = np.zeros((CONDITIONS, outputs))
    for code in range(outputs):
        weight[rng.choice(CONDITIONS, 3, replace=False), code] = rng.uniform(
            0.5, 1.5, 3
        )
    scores = np.sqrt(mixes) @ weight / (0.125 * np.sqrt((weight**2).sum(0)))
    scores += NOISE * rng_of(0, "synthetic cohort", "codes").standard_normal(
        scores.shape
    )
    fall = np.log(0.45 * 44_211 / 1_001) / np.log(outputs) if outputs > 1 else 0.0
    counts = np.rint(0.45 * np.arange(1, outputs + 1) ** -fall * len(mixes)).astype(
        np.int64
    )
    order = np.argsort(-scores, axis=0, kind="stable")
    labels = np.zeros(scores.shape, dtype=np.int8)
    for code, count in enumerate(counts.tolist()):
        labels[order[:count, code], code] = 1
    return labels


def _bags(
    mixes: np.ndarray,
    cumulative: np.ndarray,
    concept: np.ndarray,
    mean: float,
    name: str,
) -> Bags:
    """Draw the concepts of patients with these conditions.

    They are drawn in chunks to bound the memory.
    """
    rng = rng_of(0, "synthetic cohort", "concepts", name)
    patients, vocabulary = len(mixes), concept.shape[1]
    centre = np.log(mean) - SPREAD**2 / 2  # the mean is `mean` before the limit
    sizes = (
        np.rint(rng.lognormal(centre, SPREAD, patients)).clip(1, LIMIT).astype(np.int64)
    )
    offsets = compute_offsets(sizes)
    concepts = np.empty(offsets[-1], dtype=np.int32)
    for start in range(0, patients, CHUNK):
        stop = min(start + CHUNK, patients)
        share = np.full((stop - start, CONDITIONS + 1), BACKGROUND)
        share[:, 1:] = (1 - BACKGROUND) * mixes[start:stop].astype(np.float64)
        share /= share.sum(1, keepdims=True)
        # A multinomial draw per patient says how many concepts come from each condition.
        # This needs far fewer draws than one per concept, whose order has no meaning.
        counts = rng.multinomial(sizes[start:stop], share)  # (patients, conditions + 1)
        condition = np.repeat(
            np.tile(np.arange(share.shape[1]), stop - start), counts.ravel()
        )
        total = int(offsets[stop] - offsets[start])
        draws = np.searchsorted(cumulative, rng.random(total), side="right")
        np.minimum(draws, vocabulary - 1, out=draws)
        concepts[offsets[start] : offsets[stop]] = concept[condition, draws]
    return Bags(concepts, offsets, vocabulary)
