"""The sites' agreement before training, based on counts of their patients.

Sums over all sites determine the outputs of stage 1 and the concepts with a vector of
their own. With differential privacy, the sums have noise (`Privacy.counts`): each
patient adds 1 for each of the patient's codes, concepts and labels, and the noisy sums
also determine the weights of concepts and classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from fednotes.apps.phenotyping.classifiers import (
    LinearSVMs,
    compute_idf,
)
from fednotes.apps.phenotyping.codes import choose_categories, find_category
from fednotes.apps.phenotyping.cohort import ABSENT, PRESENT, Bags, SitePatients
from fednotes.apps.phenotyping.config import Config
from fednotes.apps.phenotyping.dan import CHOSEN, KNOWN
from fednotes.core.errors import RefusedError, TrainingError
from fednotes.core.update import Tensors

# The largest agreed weight of a class or a concept; the smallest is 1 / MAX_WEIGHT.
MAX_WEIGHT: Final = 1e6


# ---- choices by sums -----------------------------------------------------------------


def choose_codes(counts: np.ndarray, config: Config) -> tuple[str, ...]:
    """Return the outputs of stage 1: the candidates that enough patients have.

    Args:
        counts: (candidates,) numbers of patients.
        config: The settings of the run.

    Raises:
        DataError: No candidate is frequent enough.
    """
    numbers = counts.round().astype(int).tolist()
    count_of = dict(zip(config.list_candidates(), numbers, strict=True))
    return choose_categories(count_of, config.minimum)


def find_candidates(names: Sequence[str], config: Config) -> Tensor:
    """Return (names,) int64 candidate numbers, the form in which outputs are sent."""
    number_of = {name: k for k, name in enumerate(config.list_candidates())}
    return torch.tensor([number_of[name] for name in names])


def choose_known_concepts(counts: Tensor, least: int) -> Tensor:
    """Return the concepts that have their own vector: (known,) int64, ascending.

    Args:
        counts: (vocabulary,) how often concepts occur.
        least: The minimum number of occurrences of a known concept.

    Raises:
        TrainingError: No concept is frequent enough.
    """
    known = torch.nonzero(counts.round() >= least).flatten()
    if not len(known):
        raise TrainingError(
            f"no concept occurs {least:,} times in the training notes of all sites "
            f"(the most frequent one: {int(counts.max()):,}): lower least_occurrences"
        )
    return known


# ---- noisy counts --------------------------------------------------------------------


def compute_count_sizes(config: Config) -> dict[str, int]:
    """Return how many counts there are of each kind.

    The counts are "codes" (patients of each candidate), "concepts" (patients who have
    each concept), "patients" (all patients), and "absent" and "present" (patients with
    that label of each phenotype).
    """
    if not config.space.width:  # what the sites hold is not known yet
        return {"patients": 1}
    sizes: dict[str, int] = {}
    if config.has_stage_1 and not config.outputs:
        sizes["codes"] = len(config.list_candidates())
    weighs_concepts = config.least_occurrences > 0 or not config.has_stage_1
    if weighs_concepts and not config.space.dense:
        sizes["concepts"] = config.space.width
        sizes["patients"] = 1
    phenotypes = len(config.phenotypes)
    if config.model.classifier.class_weights == "balanced" and phenotypes:
        sizes["absent"] = phenotypes
        sizes["present"] = phenotypes
    return sizes


def count_patient(
    data: SitePatients,
    config: Config,
    rows: np.ndarray,
    candidate_numbers: Mapping[str, int],
) -> tuple[np.ndarray, np.ndarray]:
    """Return one patient's contribution to the counts: 1 for each item it has.

    Args:
        data: The patients of the site.
        config: The settings of the run.
        rows: The patient's rows in the training data.
        candidate_numbers: The numbers of the candidates, by name.

    Returns:
        (items,) positions among all counts, and (items,) ones.
    """
    codes = {
        find_category(code, whole_causes=config.whole_causes)
        for row in rows
        for code in data.codes.get(data.train.patients[row], ())
    }
    bags = data.train.bags.take(rows)
    concepts = np.unique(bags.concepts) if isinstance(bags, Bags) else np.zeros(0)
    labels = data.train.labels[rows]
    numbers: dict[str, np.ndarray] = {
        "codes": np.array(
            [candidate_numbers[name] for name in codes if name in candidate_numbers]
        ),
        "concepts": concepts,
        "patients": np.zeros(1),
        "absent": np.flatnonzero((labels == ABSENT).any(0)),
        "present": np.flatnonzero((labels == PRESENT).any(0)),
    }
    positions: list[np.ndarray] = []
    first = 0
    for name, size in compute_count_sizes(config).items():
        positions.append(first + numbers[name].astype(np.int64))
        first += size
    flat = np.concatenate(positions)
    return flat, np.ones(len(flat))


def agree_from_counts(config: Config, counts: np.ndarray, deviation: float) -> Tensors:
    """Return the agreement with which both stages begin.

    Args:
        config: The settings of the run.
        counts: The noisy counts of all sites, one after the other.
        deviation: The standard deviation of the noise in each count.

    Returns:
        "chosen" and "known", the numbers of codes and concepts of stage 1, or "idf";
        and "weights" of classes. Only counted items are present.

    Raises:
        DataError: No code is frequent enough.
        TrainingError: No concept is frequent enough.
    """
    sizes = compute_count_sizes(config)
    parts = np.split(counts, np.cumsum([*sizes.values()])[:-1])
    count_of = dict(zip(sizes, parts, strict=True))
    agreed: dict[str, Tensor] = {}
    if "codes" in count_of:
        names = choose_codes(count_of["codes"], config)
        agreed[CHOSEN] = find_candidates(names, config)
    if "concepts" in count_of and config.has_stage_1:
        agreed[KNOWN] = choose_known_concepts(
            torch.from_numpy(count_of["concepts"]), config.least_occurrences
        )
    elif "concepts" in count_of:
        patients = max(1, round(float(count_of["patients"][0])))
        frequencies = count_of["concepts"].clip(0, patients)
        idf = compute_idf(frequencies, patients)
        agreed["idf"] = torch.from_numpy(idf)
    if "present" in count_of:
        absent = count_of["absent"]
        present = count_of["present"]
        weights = _weigh_classes(config, absent, present, deviation)
        agreed["weights"] = torch.from_numpy(weights)
    return agreed


def _weigh_classes(
    config: Config, absent: np.ndarray, present: np.ndarray, deviation: float
) -> np.ndarray:
    """Return (classifiers, 2) balanced weights of classes, from noisy counts.

    Counts below the standard deviation of their noise are raised to it. Otherwise noise
    alone could give a class with a single patient any weight.
    """
    table = np.stack([absent, present, np.zeros_like(absent)], axis=1)
    classes = [(ABSENT, PRESENT)] * len(config.phenotypes)
    svms = LinearSVMs(classes, 1, config.model.classifier)
    return svms.compute_class_weights(table.clip(max(1.0, deviation)))


def require_agreement(config: Config, tensors: Tensors, site: str) -> None:
    """Raise RefusedError for tensors that `agree_from_counts` cannot return.

    Args:
        config: The settings of the run.
        tensors: The agreement according to the server.
        site: The site that checks it.
    """
    shapes = {"idf": (config.space.width,), "weights": (len(config.phenotypes), 2)}
    fits = tensors.keys() == _list_agreement_names(config) and all(
        _are_weights(tensors[name], shape)
        for name, shape in shapes.items()
        if name in tensors
    )
    if not fits:
        raise RefusedError(
            f"site {site!r}: the server's message contradicts the noisy counts of this "
            "job: start the run again, with the same version of fednotes at the "
            "server and all sites"
        )


def _list_agreement_names(config: Config) -> set[str]:
    """Return the names of the tensors that `agree_from_counts` returns."""
    sizes = compute_count_sizes(config)
    names: set[str] = set()
    if "codes" in sizes:
        names.add(CHOSEN)
    if "concepts" in sizes:
        names.add(KNOWN if config.has_stage_1 else "idf")
    if "present" in sizes:
        names.add("weights")
    return names


def _are_weights(value: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor has a shape, and numbers within the limits of weights."""
    if value.dtype != torch.float64 or value.shape != shape:
        return False
    return bool(((value > 1 / MAX_WEIGHT) & (value < MAX_WEIGHT)).all())
