"""Patients as bags of concepts with labels: what a site has, and how it is dealt and split.

    Bags      which concepts occur in each patient's notes, flat: no padding
    Vectors   in place of them, a vector a patient
    Cohort    one site's patients: bags or vectors, and a label for each patient and output
    deal      one cohort → random silos by patient (Liu, Dligach and Miller 2019, section 3)
    split     one cohort → parts (train, valid, test) by patient
    pooled    several cohorts → one, for the centralised comparison

A vocabulary is public: a dictionary's concepts, never what occurs at a site.

Patients of sites for phenotyping: what each one's notes say, billed codes, known phenotypes.

`jobs/patients.py` makes them of files.
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

PRESENT: Final = 1
ABSENT: Final = 0
QUESTIONABLE: Final = 2
UNLABELLED: Final = -1
LABELS: Final = (UNLABELLED, ABSENT, PRESENT, QUESTIONABLE)
_SHOWN = 5  # names in a message
_LARGEST = np.iinfo(np.int32).max


@dataclass(frozen=True, eq=False)
class Bags:
    """Bags of concepts of many patients, one behind the other.

    concepts: (entries,) int32 indices into a vocabulary, each as often as it occurs.
    offsets: (patients + 1,) int64 bounds of the patients in `concepts`. A patient without
    concepts has two equal bounds. vocabulary: indices are below it.

    Raises DataError where the three do not fit each other.
    """

    concepts: np.ndarray
    offsets: np.ndarray
    vocabulary: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "concepts", _integers(self.concepts, np.int32, "concepts"))
        object.__setattr__(self, "offsets", _integers(self.offsets, np.int64, "offsets"))
        concepts, offsets = self.concepts, self.offsets
        if not 0 <= self.vocabulary <= _LARGEST:
            raise DataError(f"a vocabulary of {self.vocabulary} concepts cannot be indexed")
        whole = len(offsets) and offsets[0] == 0 and offsets[-1] == len(concepts)
        if not whole or (np.diff(offsets) < 0).any():
            raise DataError(
                f"offsets of bags must rise from 0 to the number of entries ({len(concepts)})"
            )
        if len(concepts) and not 0 <= int(concepts.min()) <= int(concepts.max()) < self.vocabulary:
            raise DataError(
                f"concepts {concepts.min()} to {concepts.max()} are not all below the "
                f"vocabulary's {self.vocabulary}: are bags and dictionary of one origin?"
            )

    def __len__(self) -> int:
        """The number of patients."""
        return len(self.offsets) - 1

    @classmethod
    def of(cls, lists: Iterable[Iterable[int]], vocabulary: int) -> Bags:
        """Bags from each patient's concept indices."""
        arrays = [np.asarray(tuple(each), dtype=np.int64) for each in lists]
        offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
        np.cumsum([len(a) for a in arrays], out=offsets[1:])
        flat = np.concatenate(arrays) if arrays else np.zeros(0, dtype=np.int64)
        return cls(flat, offsets, vocabulary)

    @property
    def width(self) -> int:
        """The vocabulary's size; of Vectors, the numbers of one."""
        return self.vocabulary

    @property
    def sizes(self) -> np.ndarray:
        """(patients,) int64: each patient's number of entries."""
        return np.diff(self.offsets)

    def take(self, rows: Sequence[int] | np.ndarray) -> Bags:
        """The bags of these patients, in the order of `rows` (indices or a boolean mask)."""
        chosen = _rows(rows, len(self))
        sizes = self.sizes[chosen]
        offsets = np.zeros(len(chosen) + 1, dtype=np.int64)
        np.cumsum(sizes, out=offsets[1:])
        # Entry e of the result lies as far from its patient's new bound as from the old one.
        moved = np.repeat(self.offsets[:-1][chosen] - offsets[:-1], sizes)
        source = np.arange(offsets[-1]) + moved
        return Bags(self.concepts[source], offsets, self.vocabulary)

    def counts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """How often each concept occurs in each patient, sparse.

        (row, column, count), three int64 arrays of (distinct,), sorted by row, then column.
        """
        row = np.repeat(np.arange(len(self), dtype=np.int64), self.sizes)
        key = row * self.vocabulary + self.concepts
        distinct, count = np.unique(key, return_counts=True)
        if not len(distinct):
            return distinct, distinct.copy(), count.astype(np.int64)
        return distinct // self.vocabulary, distinct % self.vocabulary, count.astype(np.int64)


@dataclass(frozen=True, eq=False)
class Vectors:
    """A vector a patient: (patients, width) float32, as a frozen encoder makes of notes.

    Raises DataError for another shape, or a value that is not finite.
    """

    values: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", np.ascontiguousarray(self.values, dtype=np.float32))
        if self.values.ndim != 2 or not np.isfinite(self.values).all():
            raise DataError("vectors of patients must be a matrix of finite numbers")

    def __len__(self) -> int:
        """The number of patients."""
        return len(self.values)

    @property
    def width(self) -> int:
        """The numbers of one vector."""
        return int(self.values.shape[1])

    def take(self, rows: Sequence[int] | np.ndarray) -> Vectors:
        """The vectors of these patients, in the order of `rows` (indices or a boolean mask)."""
        return Vectors(self.values[_rows(rows, len(self))])


@dataclass(frozen=True, eq=False)
class Cohort:
    """One site's patients. It never leaves the site.

    patients: ids, each once. labels: (patients, outputs) int8: 1 present, 0 absent,
    2 questionable, -1 unlabelled. outputs: the outputs' names, each once.

    Raises DataError where patients, bags, labels and outputs do not fit each other.
    """

    id: str
    patients: tuple[str, ...]
    bags: Bags | Vectors
    labels: np.ndarray
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "labels", np.ascontiguousarray(self.labels, dtype=np.int8))
        wanted = (len(self.patients), len(self.outputs))
        if self.labels.shape != wanted or len(self.bags) != len(self.patients):
            raise DataError(
                f"cohort {self.id}: {len(self.patients)} patients and {len(self.outputs)} outputs "
                f"have {len(self.bags)} bags and labels of shape {self.labels.shape}"
            )
        for what, names in (("patients", self.patients), ("outputs", self.outputs)):
            if len(set(names)) != len(names):
                twice = len(names) - len(set(names))
                raise DataError(f"cohort {self.id}: {twice} of its {what} are there twice")
        if not np.isin(self.labels, LABELS).all():
            raise DataError(f"cohort {self.id}: labels must be 1, 0, 2 or -1 (unlabelled)")

    def __len__(self) -> int:
        """The number of patients: the sample size of Eq. 1."""
        return len(self.patients)

    def take(self, rows: Sequence[int] | np.ndarray, id: str | None = None) -> Cohort:
        """These patients (indices or a boolean mask), in the order of `rows`."""
        chosen = _rows(rows, len(self))
        return Cohort(
            self.id if id is None else id,
            tuple(self.patients[i] for i in chosen.tolist()),
            self.bags.take(chosen),
            self.labels[chosen],
            self.outputs,
        )

    def label_counts(self) -> dict[str, np.ndarray]:
        """Patients of each label: name → (outputs,) int64. They add over sites."""
        names = {"present": PRESENT, "absent": ABSENT, "questionable": QUESTIONABLE}
        counted = {name: (self.labels == value).sum(0) for name, value in names.items()}
        return {**counted, "unlabelled": (self.labels == UNLABELLED).sum(0)}

    def without_large(self, limit: int) -> tuple[Cohort, int]:
        """The cohort without patients of more than `limit` entries, and how many these were.

        The paper leaves out patients with more than 10,000 concepts. Vectors have no entries:
        all their patients stay.
        """
        if isinstance(self.bags, Vectors):
            return self, 0
        kept = self.bags.sizes <= limit
        left_out = int((~kept).sum())
        return (self.take(kept) if left_out else self), left_out


def fingerprint(cohort: Cohort) -> str:
    """A hash (64 hexadecimal digits) of all that is in a cohort, its name aside.

    As private as the patients themselves: anyone who guesses a cohort can confirm the guess.
    """
    state = hashlib.sha256()
    for names in (cohort.patients, cohort.outputs):
        for name in (str(len(names)), *names):
            data = name.encode("utf-8", "surrogatepass")
            state.update(len(data).to_bytes(8, "little") + data)
    bags = cohort.bags
    flat = (bags.values,) if isinstance(bags, Vectors) else (bags.concepts, bags.offsets)
    for array in (*flat, cohort.labels):
        fixed = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        state.update(len(fixed).to_bytes(8, "little") + fixed.tobytes())
    state.update(bags.width.to_bytes(8, "little"))
    return state.hexdigest()


def pooled(cohorts: Sequence[Cohort], id: str = "pooled") -> Cohort:
    """All patients of several cohorts in one, in order.

    Raises DataError if there is none, if vocabularies or outputs differ, or if a patient is in
    two of them.
    """
    if not cohorts:
        raise DataError("there is no cohort to pool")
    first = cohorts[0]
    for other in cohorts[1:]:
        if (type(other.bags), other.bags.width) != (type(first.bags), first.bags.width):
            raise DataError(
                f"cohort {other.id} has a vocabulary of {other.bags.width} concepts, "
                f"{first.id} one of {first.bags.width}: give both one dictionary (or encoder)"
            )
        if other.outputs != first.outputs:
            raise DataError(_other_outputs(first, other))
    seen: dict[str, str] = {}
    for cohort in cohorts:
        repeated = sum(patient in seen for patient in cohort.patients)
        if repeated:
            raise DataError(f"{repeated} patients of cohort {cohort.id} are in another one too")
        seen.update(dict.fromkeys(cohort.patients, cohort.id))
    labels = np.concatenate([c.labels for c in cohorts])
    return Cohort(id, tuple(seen), _joined([c.bags for c in cohorts]), labels, first.outputs)


def _joined(parts: Sequence[Bags | Vectors]) -> Bags | Vectors:
    """All patients' bags, or vectors, one part after the other."""
    bags = [part for part in parts if isinstance(part, Bags)]
    if not bags:
        return Vectors(np.concatenate([p.values for p in parts if isinstance(p, Vectors)]))
    starts = np.cumsum([0, *(len(b.concepts) for b in bags)])
    bounds = [b.offsets[1:] + start for b, start in zip(bags, starts, strict=False)]
    return Bags(
        np.concatenate([b.concepts for b in bags]),
        np.concatenate([np.zeros(1, dtype=np.int64), *bounds]),
        bags[0].vocabulary,
    )


def deal(cohort: Cohort, sites: int, seed: int = 0) -> tuple[Cohort, ...]:
    """Random silos by patient, named <cohort>-1 and on: sizes differ by one at most.

    The paper deals MIMIC-III's patients to 10 sites (stage 1) and the training part of the
    obesity cohort to 3 (stage 2). The deal depends on the seed and on which patients there
    are, not on their order; patients keep their order within a silo.

    Raises ConfigError for fewer than one site, DataError for fewer patients than sites.
    """
    if sites < 1:
        raise ConfigError(f"the number of sites must be at least 1, not {sites}")
    if len(cohort) < sites:
        raise DataError(
            f"the {len(cohort)} patients of cohort {cohort.id} cannot fill {sites} sites: "
            f"ask for {len(cohort) or 'fewer'} at most"
        )
    where = np.empty(len(cohort), dtype=np.int64)
    where[_shuffled(cohort, seed, "cohort sites")] = np.arange(len(cohort)) % sites
    return tuple(
        cohort.take(np.flatnonzero(where == site), f"{cohort.id}-{site + 1}")
        for site in range(sites)
    )


def split(cohort: Cohort, fractions: Mapping[str, float], seed: int = 0) -> dict[str, Cohort]:
    """Parts by patient, each of its share of the patients (rounded); a part of 0 is empty.

    fractions: share of each part, such as {"train": 0.6, "valid": 0.2, "test": 0.2}; they sum
    to 1. Parts keep the cohort's id and the order of its patients.

    Raises ConfigError if the fractions are no shares, DataError if a part with a share would
    have no patient.
    """
    shares = list(fractions.values())
    if not shares or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        shown = ", ".join(f"{name} = {share:g}" for name, share in fractions.items())
        raise ConfigError(f"the fractions of a split must sum to 1, not: {shown or 'none given'}")
    bounds = np.rint(np.cumsum([0, *shares]) * len(cohort)).astype(np.int64)
    for name, share, count in zip(fractions, shares, np.diff(bounds).tolist(), strict=True):
        if share > 0 and count == 0:
            raise DataError(
                f"the part {name!r} ({share:g}) of cohort {cohort.id} has no patient: "
                f"{len(cohort)} patients are too few for {len(shares)} parts"
            )
    order = _shuffled(cohort, seed, "cohort parts")
    spans = zip(fractions, bounds[:-1], bounds[1:], strict=True)
    return {name: cohort.take(np.sort(order[start:stop])) for name, start, stop in spans}


def _shuffled(cohort: Cohort, seed: int, name: str) -> np.ndarray:
    """Rows in random order, the same one for the same set of patients."""
    by_name = np.array(sorted(range(len(cohort)), key=cohort.patients.__getitem__), dtype=np.int64)
    shuffled: np.ndarray = by_name[rng_of(seed, name).permutation(len(cohort))]
    return shuffled


def _other_outputs(first: Cohort, other: Cohort) -> str:
    """What is wrong with outputs that differ."""
    apart = sorted(set(first.outputs) ^ set(other.outputs))
    shown = ", ".join(apart[:_SHOWN]) + (" …" if len(apart) > _SHOWN else "")
    how = f"only one of them has {shown}" if apart else "the same ones in another order"
    return f"cohorts {first.id} and {other.id} have different outputs: {how}: agree on one list"


def _rows(rows: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
    """Row indices; a boolean mask becomes the indices where it is true."""
    chosen = np.asarray(rows)
    if chosen.dtype == np.bool_:
        if chosen.shape != (length,):
            raise DataError(f"a mask of {chosen.size} cannot choose among {length} patients")
        return np.flatnonzero(chosen)
    chosen = chosen.astype(np.int64)
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < length:
        raise DataError(
            f"rows {chosen.min()} to {chosen.max()} are not all among {length} patients"
        )
    return chosen


def _integers(values: np.ndarray, kind: type[np.signedinteger], what: str) -> np.ndarray:
    """A flat array of this type. Raises DataError for values that it cannot hold."""
    given = np.asarray(values)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise DataError(f"{what} of bags must be a flat array of integers")
    if given.dtype != kind and given.size and int(given.max()) > np.iinfo(kind).max:
        raise DataError(f"{what} of bags do not fit {np.dtype(kind).name}")
    return np.ascontiguousarray(given, dtype=kind)


_POOLED = "pooled"


@dataclass(frozen=True)
class FeatureSpace:
    """What a patient's numbers mean; the same at all sites, and public.

    width: concepts of the dictionary (marked ones apart), or numbers of a note's vector.
    dense: vectors of a frozen encoder in place of bags of concepts. recipe: JSON values from
    which the same numbers are made of new notes, with `fingerprint`, which says whether they are
    the same.
    """

    width: int
    dense: bool = False
    recipe: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        """Equal where the same notes give the same numbers."""
        return str(self.recipe.get("fingerprint", ""))


@dataclass(frozen=True, eq=False)
class ConceptVectors:
    """Public vectors of some of the dictionary's concepts, from a file that all sites read.

    concepts: (found,) int64 indices into the dictionary, rising. values: (found, width) float32.
    digest: SHA-256 of both, by which sites know that they have the same file.
    """

    concepts: np.ndarray
    values: np.ndarray
    digest: str

    @classmethod
    def of(cls, concepts: np.ndarray, values: np.ndarray) -> ConceptVectors:
        """Vectors with their digest."""
        indices = np.ascontiguousarray(concepts, "<i8")
        numbers = np.ascontiguousarray(values, "<f4")
        digest = hashlib.sha256(indices.tobytes() + numbers.tobytes()).hexdigest()
        return cls(indices, numbers, digest)

    def start(self, known: np.ndarray) -> np.ndarray:
        """(1 + known, width) float32, where training starts: row 0 is of unknown concepts.

        A known concept that the file has not, and row 0, get the mean of those that it has, as
        in Dligach and Miller's program; zeros where it has none.
        """
        _, own, theirs = np.intersect1d(known, self.concepts, return_indices=True)
        found = self.values[theirs]
        mean = found.mean(axis=0, dtype=np.float64) if len(found) else 0.0
        table = np.empty((1 + len(known), self.values.shape[1]), np.float32)
        table[:] = mean  # [phenotype word2vec]
        table[1 + own] = found
        return table


@dataclass(frozen=True, eq=False)
class SitePatients:
    """One site's patients in three parts. They never leave the site.

    train, valid, test: cohorts without a patient in common; their labels are of phenotypes, all
    -1 for a patient who is not annotated. codes: patient → billed codes, without those that
    define a phenotype; a patient who is not in it was never coded. vectors: where stage 1 starts.
    """

    id: str
    space: FeatureSpace
    train: Cohort
    valid: Cohort
    test: Cohort
    codes: Mapping[str, frozenset[str]]
    vectors: ConceptVectors | None = None

    @property
    def phenotypes(self) -> tuple[str, ...]:
        """The phenotypes' names, the same at all sites; empty where only codes are learnt."""
        return self.train.outputs


def require_alike(sites: Sequence[SitePatients]) -> None:
    """Raises DataError where sites have other phenotypes or other features."""
    first = sites[0]
    for site in sites[1:]:
        if site.phenotypes != first.phenotypes:
            odd = sorted(set(site.phenotypes) ^ set(first.phenotypes)) or ["their order"]
            raise DataError(
                f"sites {first.id!r} and {site.id!r} have different phenotypes ({', '.join(odd)}): "
                "give both the same [phenotypes], or the same kind of labels"
            )
        if (site.space.width, site.space.fingerprint) != (
            first.space.width,
            first.space.fingerprint,
        ):
            raise DataError(
                f"sites {first.id!r} and {site.id!r} read notes with different dictionaries or "
                "encoders: give both the same files"
            )
        one, other = (s.vectors.digest if s.vectors else "" for s in (first, site))
        if one != other:
            raise DataError(
                f"sites {first.id!r} and {site.id!r} have different [concepts] vectors: give both "
                "the same file"
            )


def pooled_patients(sites: Sequence[SitePatients]) -> SitePatients:
    """One site, called "pooled", with all the sites' patients.

    A test patient whom several sites judge (silos share their test patients) is there once.
    Raises DataError for a patient who is at two sites otherwise.
    """
    require_alike(sites)
    tests = [site.test for site in sites]
    shared = len(sites) > 1 and all(t.patients == tests[0].patients for t in tests[1:])
    codes: dict[str, frozenset[str]] = {}
    for site in sites:
        codes |= site.codes
    return SitePatients(
        _POOLED,
        sites[0].space,
        pooled([site.train for site in sites], _POOLED),
        pooled([site.valid for site in sites], _POOLED),
        tests[0] if shared else pooled(tests, _POOLED),
        codes,
        sites[0].vectors,
    )


def patient_sites_fingerprint(site: SitePatients) -> str:
    """SHA-256 of a site's patients and parts; as private as the patients themselves."""
    digest = hashlib.sha256(site.space.fingerprint.encode())
    for cohort in (site.train, site.valid, site.test):
        digest.update(fingerprint(cohort).encode())
    codes = {patient: sorted(given) for patient, given in sorted(site.codes.items())}
    digest.update(json.dumps(codes).encode())
    return digest.hexdigest()
