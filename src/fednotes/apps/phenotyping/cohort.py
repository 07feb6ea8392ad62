"""Patients as bags of concepts with labels, and their division.

    Bags           the concepts in each patient's notes, in flat arrays without padding
    Vectors        one vector per patient, instead of bags
    SubWords       the sub-words of each patient's notes, instead of bags
    Cohort         patients, their bags or vectors, and a label per patient and output
    SitePatients   the three cohorts of a site, its billed codes, and its feature space
    deal_cohort    divide a cohort among sites at random, patient by patient
    split_cohort   divide a cohort into parts (train, valid, test), patient by patient

A vocabulary is public: it contains the concepts of a dictionary, whether or not they
occur at a site.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.seeds import rng_of
from fednotes.core.settings import checked
from fednotes.metrics.classification import ABSENT as ABSENT
from fednotes.metrics.classification import PRESENT as PRESENT
from fednotes.metrics.classification import QUESTIONABLE as QUESTIONABLE
from fednotes.metrics.classification import UNLABELLED as UNLABELLED

LABELS: Final = {"present": PRESENT, "absent": ABSENT, "questionable": QUESTIONABLE}
Rows = Sequence[int] | np.ndarray  # indices or a boolean mask

_BLOCK_PATIENTS = 1024  # patients whose concepts are copied or counted together
_NAMES_SHOWN = 5  # maximum number of names in a message


# ---- features of patients ------------------------------------------------------------


def compute_offsets(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the (rows + 1,) int64 bounds of consecutive rows of these sizes."""
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def find_entries(bounds: np.ndarray, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of the entries of selected rows.

    Args:
        bounds: (all rows + 1,) bounds of the rows in a flat array.
        rows: The selected rows.

    Returns:
        The (entries,) positions in the flat array, row after row, and the (selected
        rows + 1,) bounds of the selected rows among them.
    """
    selected = np.asarray(rows)
    if selected.dtype == np.bool_:
        selected = np.flatnonzero(selected)
    else:
        selected = selected.astype(np.int64)

    sizes = np.diff(bounds)[selected]
    offsets = compute_offsets(sizes)
    shifts = bounds[:-1][selected] - offsets[:-1]
    positions = np.repeat(shifts, sizes) + np.arange(offsets[-1])
    return positions, offsets


@dataclass(frozen=True, eq=False)
class Bags:
    """Bags of concepts of many patients, in flat arrays.

    Attributes:
        concepts: (entries,) int32 indices into a vocabulary, patient after patient. A
            concept is repeated for each occurrence.
        offsets: (patients + 1,) int64 bounds of the patients in `concepts`. The two
            bounds of a patient without concepts are equal.
        vocabulary: Size of the vocabulary; all indices are below it.

    Raises:
        DataError: The fields contradict each other.
    """

    concepts: np.ndarray
    offsets: np.ndarray
    vocabulary: int

    def __post_init__(self) -> None:
        concepts = _make_flat_integers(self.concepts, np.int32, "concepts")
        offsets = _make_flat_integers(self.offsets, np.int64, "offsets")
        object.__setattr__(self, "concepts", concepts)
        object.__setattr__(self, "offsets", offsets)

        spans_all = len(offsets) and offsets[0] == 0 and offsets[-1] == len(concepts)
        if not spans_all or (np.diff(offsets) < 0).any():
            raise DataError(
                "the offsets of bags must rise from 0 to the number of entries "
                f"({len(concepts)})"
            )
        if not len(concepts):
            return
        smallest = int(concepts.min())
        largest = int(concepts.max())
        if smallest < 0 or largest >= self.vocabulary:
            raise DataError(
                f"concept ids range from {smallest} to {largest}, but must be at least "
                f"0 and below {self.vocabulary}, the size of the vocabulary: make the "
                "bags with the same dictionary"
            )

    def __len__(self) -> int:
        """Return the number of patients."""
        return len(self.offsets) - 1

    @classmethod
    def from_lists(
        cls, lists: Iterable[Iterable[int] | np.ndarray], vocabulary: int
    ) -> Bags:
        """Return bags made of each patient's concept indices."""
        arrays = [np.asarray(tuple(each), dtype=np.int64) for each in lists]
        flat = np.concatenate([np.zeros(0, np.int64), *arrays])
        return cls(flat, compute_offsets([len(each) for each in arrays]), vocabulary)

    @property
    def width(self) -> int:
        """The size of the vocabulary, under the same name as in `Vectors`."""
        return self.vocabulary

    @property
    def sizes(self) -> np.ndarray:
        """(patients,) int64: the number of entries of each patient."""
        return np.diff(self.offsets)

    def take(self, rows: Rows) -> Bags:
        """Return the bags of these patients, in the order of `rows`."""
        selected = np.asarray(rows)
        if selected.dtype == np.bool_:
            selected = np.flatnonzero(selected)
        selected = selected.astype(np.int64)

        offsets = compute_offsets(self.sizes[selected])
        concepts = np.empty(offsets[-1], np.int32)
        # Block by block, because positions take several times the memory of concepts.
        for start in range(0, len(selected), _BLOCK_PATIENTS):
            stop = min(start + _BLOCK_PATIENTS, len(selected))
            positions, _ = find_entries(self.offsets, selected[start:stop])
            concepts[offsets[start] : offsets[stop]] = self.concepts[positions]
        return Bags(concepts, offsets, self.vocabulary)

    def count_concepts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return how often each concept occurs in each patient, as a sparse matrix.

        Returns:
            Rows, columns and counts: three int64 arrays of (distinct pairs,), sorted by
            row and then by column.
        """
        all_pairs = [np.zeros(0, np.int64)]
        all_counts = [np.zeros(0, np.int64)]
        # Block by block, because sorting takes many times the memory of concepts.
        for start in range(0, len(self), _BLOCK_PATIENTS):
            stop = min(start + _BLOCK_PATIENTS, len(self))
            entries = self.concepts[self.offsets[start] : self.offsets[stop]]
            rows = np.arange(start, stop, dtype=np.int64)
            entry_rows = np.repeat(rows, self.sizes[start:stop])
            pairs, counts = np.unique(
                entry_rows * self.vocabulary + entries, return_counts=True
            )
            all_pairs.append(pairs)
            all_counts.append(counts.astype(np.int64))
        rows, columns = np.divmod(np.concatenate(all_pairs), max(self.vocabulary, 1))
        return rows, columns, np.concatenate(all_counts)


@dataclass(frozen=True, eq=False)
class Vectors:
    """One vector per patient, computed by a frozen encoder from the patient's notes.

    Attributes:
        values: (patients, width) float32.

    Raises:
        DataError: The shape is another one, or a value is not finite.
    """

    values: np.ndarray

    def __post_init__(self) -> None:
        values = np.ascontiguousarray(self.values, dtype=np.float32)
        object.__setattr__(self, "values", values)
        if values.ndim != 2 or not np.isfinite(values).all():
            raise DataError("vectors of patients must be a matrix of finite numbers")

    def __len__(self) -> int:
        """Return the number of patients."""
        return len(self.values)

    @property
    def width(self) -> int:
        """The number of components of a vector."""
        return int(self.values.shape[1])

    def take(self, rows: Rows) -> Vectors:
        """Return the vectors of these patients, in the order of `rows`."""
        return Vectors(self.values[np.asarray(rows) if len(rows) else []])


@dataclass(frozen=True, eq=False)
class SubWords:
    """The sub-words of each patient's notes, for an encoder that is tuned.

    Attributes:
        ids: (sub-words,) int32 ids of a tokenizer, note after note.
        bounds: (notes + 1,) int64 bounds of the notes in `ids`.
        offsets: (patients + 1,) int64 bounds of the patients in the notes. The two
            bounds of a patient without notes are equal.
        width: The number of columns of the encoder's states.
    """

    ids: np.ndarray = field(repr=False)
    bounds: np.ndarray = field(repr=False)
    offsets: np.ndarray
    width: int

    def __len__(self) -> int:
        """Return the number of patients."""
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """(patients,) int64: the number of sub-words of each patient."""
        return np.diff(self.bounds[self.offsets])

    def get_ids(self, row: int) -> np.ndarray:
        """Return (sub-words,) int32: all sub-words of a patient."""
        first, end = self.bounds[self.offsets[row : row + 2]]
        return self.ids[first:end]

    def take(self, rows: Rows) -> SubWords:
        """Return the sub-words of these patients, in the order of `rows`."""
        notes, offsets = find_entries(self.offsets, rows)
        places, bounds = find_entries(self.bounds, notes)
        return SubWords(self.ids[places], bounds, offsets=offsets, width=self.width)

    @classmethod
    def join(cls, parts: Sequence[SubWords]) -> SubWords:
        """Return the patients of several parts, one after the other."""
        lengths = np.concatenate([np.diff(part.bounds) for part in parts])
        notes = np.concatenate([np.diff(part.offsets) for part in parts])
        return cls(
            np.concatenate([part.ids for part in parts]),
            compute_offsets(lengths),
            offsets=compute_offsets(notes),
            width=parts[0].width,
        )


Inputs = Bags | Vectors | SubWords  # what is known of the notes of patients


def _make_flat_integers(
    values: np.ndarray, kind: type[np.signedinteger], name: str
) -> np.ndarray:
    """Return values as a flat array of an integer type.

    Raises:
        DataError: The type cannot hold the values.
    """
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise DataError(f"{name} of bags must be a flat array of integers")
    if array.dtype != kind and array.size and int(array.max()) > np.iinfo(kind).max:
        raise DataError(
            f"{name} of bags are outside the range of {np.dtype(kind).name}"
        )
    return np.ascontiguousarray(array, dtype=kind)


# ---- cohorts -------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Cohort:
    """Patients of one site, whose data never leave it.

    Attributes:
        id: Name of the cohort.
        patients: The patients' ids, each once.
        bags: The features of the patients' notes.
        labels: (patients, outputs) int8: 1 present, 0 absent, 2 questionable, -1
            unlabelled.
        outputs: Names of the outputs, each once.

    Raises:
        DataError: Patients, bags, labels and outputs contradict each other.
    """

    id: str
    patients: tuple[str, ...] = field(repr=False)
    bags: Inputs
    labels: np.ndarray
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        labels = np.ascontiguousarray(self.labels, dtype=np.int8)
        object.__setattr__(self, "labels", labels)

        expected = (len(self.patients), len(self.outputs))
        if labels.shape != expected or len(self.bags) != len(self.patients):
            raise DataError(
                f"cohort {self.id}: {len(self.patients)} patients and "
                f"{len(self.outputs)} outputs, but {len(self.bags)} bags and labels "
                f"of shape {labels.shape}"
            )
        self._require_distinct("patients", self.patients)
        self._require_distinct("outputs", self.outputs)
        if not np.isin(labels, (UNLABELLED, *LABELS.values())).all():
            raise DataError(
                f"cohort {self.id}: labels must be 1, 0, 2 or -1 (unlabelled)"
            )

    def _require_distinct(self, kind: str, names: Sequence[str]) -> None:
        """Raise DataError if a name is repeated."""
        repeated = len(names) - len(set(names))
        if repeated:
            raise DataError(f"cohort {self.id}: {repeated} of its {kind} are repeated")

    def __len__(self) -> int:
        """Return the number of patients: the sample size in Eq. 1 of the paper."""
        return len(self.patients)

    def take(self, rows: Rows, id: str | None = None) -> Cohort:
        """Return a cohort of these patients, in the order of `rows`.

        Args:
            rows: The patients to take.
            id: Name of the new cohort; the same one if it is None.
        """
        selected = np.arange(len(self))[np.asarray(rows) if len(rows) else []]
        return Cohort(
            self.id if id is None else id,
            tuple(self.patients[row] for row in selected.tolist()),
            bags=self.bags.take(selected),
            labels=self.labels[selected],
            outputs=self.outputs,
        )

    def select_labelled(self) -> Cohort:
        """Return the patients who have a label for at least one output."""
        return self.take(np.asarray((self.labels >= 0).any(axis=1)))

    @property
    def fewest_labelled(self) -> int:
        """The patients with a label for the output that has the fewest, but some."""
        numbers = (self.labels >= 0).sum(axis=0)
        return min((int(number) for number in numbers if number), default=0)

    def count_labels(self) -> dict[str, np.ndarray]:
        """Return the number of patients with each label.

        Returns:
            (outputs,) int64 counts by the label's name. Counts of several sites add up.
        """
        values = {**LABELS, "unlabelled": UNLABELLED}
        return {name: (self.labels == value).sum(0) for name, value in values.items()}

    def compute_fingerprint(self) -> str:
        """Return a SHA-256 digest of everything in the cohort but its name.

        The digest is as private as the patients themselves: anyone who guesses a cohort
        can confirm the guess.
        """
        state = hashlib.sha256()
        for names in (self.patients, self.outputs):
            for name in (str(len(names)), *names):
                data = name.encode("utf-8", "surrogatepass")
                state.update(len(data).to_bytes(8, "little") + data)

        arrays: tuple[np.ndarray, ...]
        if isinstance(self.bags, Vectors):
            arrays = (self.bags.values, self.labels)
        elif isinstance(self.bags, SubWords):
            words = self.bags
            arrays = (words.ids, words.bounds, words.offsets, self.labels)
        else:
            arrays = (self.bags.concepts, self.bags.offsets, self.labels)
        for array in arrays:
            portable = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
            state.update(len(portable).to_bytes(8, "little") + portable.tobytes())
        state.update(self.bags.width.to_bytes(8, "little"))
        return state.hexdigest()


def pool_cohorts(cohorts: Sequence[Cohort], id: str = "pooled") -> Cohort:
    """Return one cohort with the patients of several, in order.

    Raises:
        DataError: Vocabularies or outputs differ, or a patient is in two cohorts.
    """
    first = cohorts[0]
    patients: dict[str, None] = {}
    for cohort in cohorts:
        _require_same_space(first, cohort)
        _require_same_outputs(first, cohort)
        repeated = sum(patient in patients for patient in cohort.patients)
        if repeated:
            raise DataError(
                f"{repeated} patients of cohort {cohort.id} are in another one too"
            )
        patients |= dict.fromkeys(cohort.patients)
    labels = np.concatenate([cohort.labels for cohort in cohorts])
    bags = _pool_bags([cohort.bags for cohort in cohorts])
    return Cohort(id, tuple(patients), bags=bags, labels=labels, outputs=first.outputs)


def _require_same_space(first: Cohort, other: Cohort) -> None:
    """Raise DataError if two cohorts have different vocabularies or vectors."""
    same_kind = type(other.bags) is type(first.bags)
    if not same_kind or other.bags.width != first.bags.width:
        raise DataError(
            f"cohort {other.id} has a vocabulary of {other.bags.width} concepts and "
            f"cohort {first.id} one of {first.bags.width}: give both one dictionary "
            "(or encoder)"
        )


def _require_same_outputs(first: Cohort, other: Cohort) -> None:
    """Raise DataError if two cohorts have different outputs."""
    if other.outputs == first.outputs:
        return
    unshared = sorted(set(first.outputs) ^ set(other.outputs))
    if unshared:
        shown = ", ".join(unshared[:_NAMES_SHOWN])
        if len(unshared) > _NAMES_SHOWN:
            shown += " …"
        difference = f"only one of them has {shown}"
    else:
        difference = "the order differs"
    raise DataError(
        f"cohorts {first.id} and {other.id} have different outputs ({difference}): "
        "use one list of outputs for both"
    )


def _pool_bags(parts: Sequence[Inputs]) -> Inputs:
    """Return the bags, vectors or sub-words of several cohorts, one after the other."""
    words = [part for part in parts if isinstance(part, SubWords)]
    if words:
        return SubWords.join(words)
    bags = [part for part in parts if isinstance(part, Bags)]
    if not bags:
        vectors = [part.values for part in parts if isinstance(part, Vectors)]
        return Vectors(np.concatenate(vectors))
    sizes = np.concatenate([part.sizes for part in bags])
    concepts = np.concatenate([part.concepts for part in bags])
    return Bags(concepts, compute_offsets(sizes), bags[0].vocabulary)


def deal_cohort(cohort: Cohort, sites: int, seed: int = 0) -> tuple[Cohort, ...]:
    """Divide a cohort among sites at random, patient by patient.

    The paper divides the patients of MIMIC-III among 10 sites (stage 1) and the
    training part of the obesity cohort among 3 (stage 2). The result depends on the
    seed and on the set of patients, not on their order. Patients keep their order
    within a site.

    Returns:
        The cohorts, named `<cohort>-1`, `<cohort>-2` and so on. Their sizes differ by
        at most one patient.

    Raises:
        DataError: There are fewer patients than sites.
    """
    if len(cohort) < sites:
        raise DataError(
            f"the {len(cohort)} patients of cohort {cohort.id} cannot fill {sites} "
            f"sites: ask for at most {max(len(cohort), 1)}"
        )
    site_of_row = np.empty(len(cohort), dtype=np.int64)
    site_of_row[_shuffle_rows(cohort, seed, "cohort sites")] = (
        np.arange(len(cohort)) % sites
    )
    return tuple(
        cohort.take(site_of_row == site, f"{cohort.id}-{site + 1}")
        for site in range(sites)
    )


def split_cohort(
    cohort: Cohort, fractions: Mapping[str, float], seed: int = 0
) -> dict[str, Cohort]:
    """Divide a cohort into parts at random, patient by patient.

    Args:
        cohort: The patients.
        fractions: Fraction of each part, such as {"train": 0.6, "valid": 0.2, "test":
            0.2}. They sum to 1. A part of fraction 0 is empty.
        seed: Seed of the random order.

    Returns:
        The parts by name. They keep the cohort's id and the order of its patients.

    Raises:
        ConfigError: The fractions are negative or do not sum to 1.
        DataError: A part with a positive fraction would have no patient.
    """
    values = list(fractions.values())
    if not values or min(values) < 0 or abs(sum(values) - 1) > 1e-6:
        shown = ", ".join(f"{name} = {value:g}" for name, value in fractions.items())
        raise ConfigError(
            "the fractions of a split must be at least 0 and sum to 1, not: "
            f"{shown or 'no fraction'}"
        )
    bounds = np.rint(np.cumsum([0, *values]) * len(cohort)).astype(np.int64)
    order = _shuffle_rows(cohort, seed, "cohort parts")
    parts = {}
    for number, (name, fraction) in enumerate(fractions.items()):
        rows = order[bounds[number] : bounds[number + 1]]
        if fraction > 0 and not len(rows):
            raise DataError(
                f"the part {name!r} ({fraction:g}) of cohort {cohort.id} has no "
                f"patient: {len(cohort)} patients are too few for {len(values)} parts"
            )
        parts[name] = cohort.take(np.sort(rows))
    return parts


def _shuffle_rows(cohort: Cohort, seed: int, name: str) -> np.ndarray:
    """Return the rows in a random order that depends only on the set of patients."""
    by_patient = sorted(range(len(cohort)), key=cohort.patients.__getitem__)
    order = rng_of(seed, name).permutation(len(cohort))
    shuffled: np.ndarray = np.array(by_patient, dtype=np.int64)[order]
    return shuffled


# ---- sites ---------------------------------------------------------------------------


@checked(frozen=True)
class FeatureSpace:
    """The meaning of patients' features, public and the same at all sites.

    Attributes:
        width: Size of the vocabulary, or number of components of an encoder's vectors.
        dense: Whether an encoder reads the notes, instead of a dictionary.
        recipe: JSON values from which the same features are computed for new notes. Its
            `fingerprint` confirms that they are the same.
    """

    width: int
    dense: bool = False
    recipe: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """A digest that is equal if the same notes give the same features."""
        return str(self.recipe.get("fingerprint", ""))


@dataclass(frozen=True, eq=False)
class ConceptVectors:
    """Public vectors of some concepts of the dictionary, the same at all sites.

    Attributes:
        concepts: (concepts with a vector,) int64 indices into the dictionary, rising.
        values: (concepts with a vector, width) float32.
        digest: SHA-256 of both, with which sites confirm that their files are the same.
    """

    concepts: np.ndarray
    values: np.ndarray
    digest: str

    @classmethod
    def from_arrays(cls, concepts: np.ndarray, values: np.ndarray) -> ConceptVectors:
        """Return vectors, for which the digest is computed.

        Args:
            concepts: (concepts with a vector,) indices into the dictionary, rising.
            values: (concepts with a vector, width) the vectors.
        """
        indices = np.ascontiguousarray(concepts, "<i8")
        numbers = np.ascontiguousarray(values, "<f4")
        digest = hashlib.sha256(indices.tobytes() + numbers.tobytes()).hexdigest()
        return cls(indices, numbers, digest)

    def make_table(self, known: np.ndarray) -> np.ndarray:
        """Return the initial table of concept vectors.

        A known concept without a vector, and row 0, get the mean of the known concepts'
        vectors, as in the program of Dligach and Miller; zeros if there is none.

        Args:
            known: (known concepts,) indices into the dictionary, rising.

        Returns:
            (1 + known concepts, width) float32. Row 0 is for unknown concepts.
        """
        _, known_rows, vector_rows = np.intersect1d(
            known, self.concepts, return_indices=True
        )
        vectors = self.values[vector_rows]
        table = np.zeros((1 + len(known), self.values.shape[1]), np.float32)
        if len(vectors):
            table[:] = vectors.mean(axis=0, dtype=np.float64)  # [phenotype word2vec]
        table[1 + known_rows] = vectors
        return table


@dataclass(frozen=True, eq=False)
class SitePatients:
    """One site's patients in three parts, whose data never leave the site.

    Attributes:
        id: Name of the site.
        space: The meaning of the patients' features.
        train: Patients to train on. No patient is in two parts. The labels are for
            phenotypes, all -1 for a patient who is not annotated.
        valid: Patients to validate on.
        test: Patients to test on.
        codes: Billed codes of each patient, without those that define a phenotype. A
            patient who is missing here was never coded.
        vectors: Initial concept vectors of stage 1; random if None.
    """

    id: str
    space: FeatureSpace
    train: Cohort
    valid: Cohort
    test: Cohort
    codes: Mapping[str, frozenset[str]] = field(repr=False)
    vectors: ConceptVectors | None = None

    @property
    def phenotypes(self) -> tuple[str, ...]:
        """Names of the phenotypes, the same at all sites; empty with stage 1 alone."""
        return self.train.outputs

    def select_coded(self, cohort: Cohort) -> Cohort:
        """Return the patients of a cohort of this site whose codes are known."""
        has_codes = [patient in self.codes for patient in cohort.patients]
        return cohort.take(np.array(has_codes, bool))


def require_alike(sites: Sequence[SitePatients]) -> None:
    """Check that all sites have the same phenotypes and the same features.

    Raises:
        DataError: Two sites differ; the message names them.
    """
    first = sites[0]
    for site in sites[1:]:
        pair = f"sites {first.id!r} and {site.id!r}"
        if site.phenotypes != first.phenotypes:
            unshared = sorted(set(site.phenotypes) ^ set(first.phenotypes))
            raise DataError(
                f"{pair} have different phenotypes "
                f"({', '.join(unshared) or 'their order'}): give both the same "
                "[phenotypes], or the same kind of labels"
            )
        same_width = site.space.width == first.space.width
        if not same_width or site.space.fingerprint != first.space.fingerprint:
            raise DataError(
                f"{pair} read notes with different dictionaries or encoders: "
                "give both the same files"
            )
        if _get_vectors_digest(site) != _get_vectors_digest(first):
            raise DataError(
                f"{pair} have different [concepts] vectors: give both the same file"
            )


def _get_vectors_digest(site: SitePatients) -> str | None:
    """Return the digest of a site's concept vectors; None if it has none."""
    return None if site.vectors is None else site.vectors.digest


def pool_sites(sites: Sequence[SitePatients]) -> SitePatients:
    """Return one site, named "pooled", with the patients of all sites.

    Sites that divide a corpus share their test patients, who are in the result once.

    Raises:
        DataError: The sites differ in phenotypes or features, or another patient is at
            two sites.
    """
    require_alike(sites)
    tests = [site.test for site in sites]
    share_tests = len(sites) > 1 and all(
        test.patients == tests[0].patients for test in tests[1:]
    )
    codes = {
        patient: billed for site in sites for patient, billed in site.codes.items()
    }
    return SitePatients(
        "pooled",
        sites[0].space,
        train=pool_cohorts([site.train for site in sites]),
        valid=pool_cohorts([site.valid for site in sites]),
        test=tests[0] if share_tests else pool_cohorts(tests),
        codes=codes,
        vectors=sites[0].vectors,
    )


def compute_site_fingerprint(site: SitePatients) -> str:
    """Return a SHA-256 digest of a site's patients and parts.

    The digest is as private as the patients themselves.
    """
    digest = hashlib.sha256(site.space.fingerprint.encode())
    for cohort in (site.train, site.valid, site.test):
        digest.update(cohort.compute_fingerprint().encode())
    codes = {patient: sorted(billed) for patient, billed in sorted(site.codes.items())}
    digest.update(json.dumps(codes).encode())
    return digest.hexdigest()
