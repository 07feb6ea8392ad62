"""Patients as bags of concepts with labels: what a site has, and how it is dealt and
split.

    Bags           which concepts occur in each patient's notes, flat: no padding
    Vectors        in place of them, a vector a patient
    Cohort         some patients: bags or vectors, and a label for each patient and output
    SitePatients   a site's three cohorts, its billed codes, and what its numbers mean
    deal           one cohort → random silos by patient (Liu, Dligach and Miller 2019, section 3)
    split          one cohort → parts (train, valid, test) by patient

A vocabulary is public: a dictionary's concepts, never what occurs at a site.
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
_SHOWN = 5  # names in a message
Rows = Sequence[int] | np.ndarray  # indices or a boolean mask


def offsets_of(sizes: Sequence[int] | np.ndarray) -> np.ndarray:
    """(rows + 1,) int64 bounds of rows of these sizes, one behind the other."""
    offsets = np.zeros(len(sizes) + 1, dtype=np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def stretches(bounds: np.ndarray, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Where the entries of some rows lie, one row behind the other, and the rows' new
    bounds."""
    chosen = np.asarray(rows)
    chosen = (
        np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen.astype(np.int64)
    )
    sizes = np.diff(bounds)[chosen]
    offsets = offsets_of(sizes)
    return np.repeat(bounds[:-1][chosen] - offsets[:-1], sizes) + np.arange(
        offsets[-1]
    ), offsets


@dataclass(frozen=True, eq=False)
class Bags:
    """Bags of concepts of many patients, one behind the other.

    concepts: (entries,) int32 indices into a vocabulary, each as often as it occurs.
    offsets: (patients + 1,) int64 bounds of the patients in `concepts`. A patient
    without concepts has two equal bounds. vocabulary: indices are below it.

    Raises DataError where the three do not fit each other.
    """

    concepts: np.ndarray
    offsets: np.ndarray
    vocabulary: int

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "concepts", _integers(self.concepts, np.int32, "concepts")
        )
        object.__setattr__(
            self, "offsets", _integers(self.offsets, np.int64, "offsets")
        )
        concepts, offsets = self.concepts, self.offsets
        whole = len(offsets) and offsets[0] == 0 and offsets[-1] == len(concepts)
        if not whole or (np.diff(offsets) < 0).any():
            raise DataError(
                f"offsets of bags must rise from 0 to the number of entries ({len(concepts)})"
            )
        if (
            len(concepts)
            and not 0 <= int(concepts.min()) <= int(concepts.max()) < self.vocabulary
        ):
            raise DataError(
                f"concepts {concepts.min()} to {concepts.max()} are not all below the "
                f"vocabulary's {self.vocabulary}: are bags and dictionary of one origin?"
            )

    def __len__(self) -> int:
        """The number of patients."""
        return len(self.offsets) - 1

    @classmethod
    def of(cls, lists: Iterable[Iterable[int] | np.ndarray], vocabulary: int) -> Bags:
        """Bags from each patient's concept indices."""
        arrays = [np.asarray(tuple(each), dtype=np.int64) for each in lists]
        flat = np.concatenate([np.zeros(0, np.int64), *arrays])
        return cls(flat, offsets_of([len(each) for each in arrays]), vocabulary)

    @property
    def width(self) -> int:
        """The vocabulary's size; of Vectors, the numbers of one."""
        return self.vocabulary

    @property
    def sizes(self) -> np.ndarray:
        """(patients,) int64: each patient's number of entries."""
        return np.diff(self.offsets)

    def take(self, rows: Rows) -> Bags:
        """The bags of these patients, in the order of `rows`."""
        source, offsets = stretches(self.offsets, rows)
        return Bags(self.concepts[source], offsets, self.vocabulary)

    def counts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """How often each concept occurs in each patient, sparse.

        (row, column, count), three int64 arrays of (distinct,), sorted by row, then
        column.
        """
        row = np.repeat(np.arange(len(self), dtype=np.int64), self.sizes)
        distinct, count = np.unique(
            row * self.vocabulary + self.concepts, return_counts=True
        )
        own, column = np.divmod(distinct, max(self.vocabulary, 1))
        return own, column, count.astype(np.int64)


@dataclass(frozen=True, eq=False)
class Vectors:
    """A vector a patient: (patients, width) float32, as a frozen encoder makes of
    notes.

    Raises DataError for another shape, or a value that is not finite.
    """

    values: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "values", np.ascontiguousarray(self.values, dtype=np.float32)
        )
        if self.values.ndim != 2 or not np.isfinite(self.values).all():
            raise DataError("vectors of patients must be a matrix of finite numbers")

    def __len__(self) -> int:
        """The number of patients."""
        return len(self.values)

    @property
    def width(self) -> int:
        """The numbers of one vector."""
        return int(self.values.shape[1])

    def take(self, rows: Rows) -> Vectors:
        """The vectors of these patients, in the order of `rows`."""
        return Vectors(self.values[np.asarray(rows) if len(rows) else []])


@dataclass(frozen=True, eq=False)
class Cohort:
    """Patients of one site. They never leave it.

    patients: ids, each once. labels: (patients, outputs) int8: 1 present, 0 absent,
    2 questionable, -1 unlabelled. outputs: the outputs' names, each once.

    Raises DataError where patients, bags, labels and outputs do not fit each other.
    """

    id: str
    patients: tuple[str, ...] = field(repr=False)
    bags: Bags | Vectors
    labels: np.ndarray
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "labels", np.ascontiguousarray(self.labels, dtype=np.int8)
        )
        wanted = (len(self.patients), len(self.outputs))
        if self.labels.shape != wanted or len(self.bags) != len(self.patients):
            raise DataError(
                f"cohort {self.id}: {len(self.patients)} patients and {len(self.outputs)} outputs "
                f"have {len(self.bags)} bags and labels of shape {self.labels.shape}"
            )
        for what in ("patients", "outputs"):
            if twice := len(getattr(self, what)) - len(set(getattr(self, what))):
                raise DataError(
                    f"cohort {self.id}: {twice} of its {what} are there twice"
                )
        if not np.isin(self.labels, (UNLABELLED, *LABELS.values())).all():
            raise DataError(
                f"cohort {self.id}: labels must be 1, 0, 2 or -1 (unlabelled)"
            )

    def __len__(self) -> int:
        """The number of patients: the sample size of Eq. 1."""
        return len(self.patients)

    def take(self, rows: Rows, id: str | None = None) -> Cohort:
        """These patients, in the order of `rows`."""
        chosen = np.arange(len(self))[np.asarray(rows) if len(rows) else []]
        patients = tuple(self.patients[at] for at in chosen.tolist())
        bags, labels = self.bags.take(chosen), self.labels[chosen]
        return Cohort(
            self.id if id is None else id, patients, bags, labels, self.outputs
        )

    def labelled(self) -> Cohort:
        """The patients who are labelled for an output."""
        return self.take(np.asarray((self.labels >= 0).any(axis=1)))

    def label_counts(self) -> dict[str, np.ndarray]:
        """Patients of each label: name → (outputs,) int64. They add over sites."""
        of = {**LABELS, "unlabelled": UNLABELLED}
        return {name: (self.labels == value).sum(0) for name, value in of.items()}

    def fingerprint(self) -> str:
        """A hash (64 hexadecimal digits) of all that is in it, its name aside.

        As private as the patients themselves: anyone who guesses a cohort can confirm
        the guess.
        """
        state = hashlib.sha256()
        for names in (self.patients, self.outputs):
            for name in (str(len(names)), *names):
                data = name.encode("utf-8", "surrogatepass")
                state.update(len(data).to_bytes(8, "little") + data)
        bags = self.bags
        flat = (
            (bags.values,)
            if isinstance(bags, Vectors)
            else (bags.concepts, bags.offsets)
        )
        for array in (*flat, self.labels):
            fixed = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
            state.update(len(fixed).to_bytes(8, "little") + fixed.tobytes())
        state.update(bags.width.to_bytes(8, "little"))
        return state.hexdigest()


def pooled(cohorts: Sequence[Cohort], id: str = "pooled") -> Cohort:
    """All patients of one cohort or several, in order.

    Raises DataError if vocabularies or outputs differ, or if a patient is in two of
        them.
    """
    first = cohorts[0]
    seen: dict[str, None] = {}
    for other in cohorts:
        if (type(other.bags), other.bags.width) != (type(first.bags), first.bags.width):
            raise DataError(
                f"cohort {other.id} has a vocabulary of {other.bags.width} concepts, "
                f"{first.id} one of {first.bags.width}: give both one dictionary (or encoder)"
            )
        if other.outputs != first.outputs:
            apart = sorted(set(first.outputs) ^ set(other.outputs))
            shown = ", ".join(apart[:_SHOWN]) + (" …" if len(apart) > _SHOWN else "")
            how = (
                f"only one of them has {shown}"
                if apart
                else "the same ones in another order"
            )
            raise DataError(
                f"cohorts {first.id} and {other.id} have different outputs: {how}: "
                "agree on one list"
            )
        if repeated := sum(patient in seen for patient in other.patients):
            raise DataError(
                f"{repeated} patients of cohort {other.id} are in another one too"
            )
        seen |= dict.fromkeys(other.patients)
    labels = np.concatenate([c.labels for c in cohorts])
    parts: list[Any] = [c.bags for c in cohorts]
    bags: Bags | Vectors
    if isinstance(first.bags, Vectors):
        bags = Vectors(np.concatenate([part.values for part in parts]))
    else:
        sizes = np.concatenate([part.sizes for part in parts])
        flat = np.concatenate([part.concepts for part in parts])
        bags = Bags(flat, offsets_of(sizes), first.bags.vocabulary)
    return Cohort(id, tuple(seen), bags, labels, first.outputs)


def deal(cohort: Cohort, sites: int, seed: int = 0) -> tuple[Cohort, ...]:
    """Random silos by patient, named <cohort>-1 and on: sizes differ by one at most.

    The paper deals MIMIC-III's patients to 10 sites (stage 1) and the training part of
    the obesity cohort to 3 (stage 2). The deal depends on the seed and on which
    patients there are, not on their order; patients keep their order within a silo.

    Raises DataError for fewer patients than sites.
    """
    if len(cohort) < sites:
        raise DataError(
            f"the {len(cohort)} patients of cohort {cohort.id} cannot fill {sites} sites: "
            f"ask for {len(cohort) or 'fewer'} at most"
        )
    where = np.empty(len(cohort), dtype=np.int64)
    where[_shuffled(cohort, seed, "cohort sites")] = np.arange(len(cohort)) % sites
    names = [f"{cohort.id}-{site + 1}" for site in range(sites)]
    return tuple(cohort.take(where == site, name) for site, name in enumerate(names))


def split(
    cohort: Cohort, fractions: Mapping[str, float], seed: int = 0
) -> dict[str, Cohort]:
    """Parts by patient, each of its share of the patients (rounded); a part of 0 is
    empty.

    fractions: share of each part, such as {"train": 0.6, "valid": 0.2, "test": 0.2};
    they sum to 1. Parts keep the cohort's id and the order of its patients.

    Raises ConfigError if the fractions are no shares, DataError if a part with a share
    would have no patient.
    """
    shares = list(fractions.values())
    if not shares or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        shown = ", ".join(f"{name} = {share:g}" for name, share in fractions.items())
        raise ConfigError(
            f"the fractions of a split must sum to 1, not: {shown or 'none given'}"
        )
    bounds = np.rint(np.cumsum([0, *shares]) * len(cohort)).astype(np.int64)
    order = _shuffled(cohort, seed, "cohort parts")
    parts = {}
    for (name, share), start, stop in zip(
        fractions.items(), bounds, bounds[1:], strict=False
    ):
        if share > 0 and start == stop:
            raise DataError(
                f"the part {name!r} ({share:g}) of cohort {cohort.id} has no patient: "
                f"{len(cohort)} patients are too few for {len(shares)} parts"
            )
        parts[name] = cohort.take(np.sort(order[start:stop]))
    return parts


def _shuffled(cohort: Cohort, seed: int, name: str) -> np.ndarray:
    """Rows in random order, the same one for the same set of patients."""
    by_name = np.array(
        sorted(range(len(cohort)), key=cohort.patients.__getitem__), dtype=np.int64
    )
    shuffled: np.ndarray = by_name[rng_of(seed, name).permutation(len(cohort))]
    return shuffled


def _integers(
    values: np.ndarray, kind: type[np.signedinteger], what: str
) -> np.ndarray:
    """A flat array of this type. Raises DataError for values that it cannot hold."""
    given = np.asarray(values)
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise DataError(f"{what} of bags must be a flat array of integers")
    if given.dtype != kind and given.size and int(given.max()) > np.iinfo(kind).max:
        raise DataError(f"{what} of bags do not fit {np.dtype(kind).name}")
    return np.ascontiguousarray(given, dtype=kind)


# ---- sites ---------------------------------------------------------------------------


@checked(frozen=True)
class FeatureSpace:
    """What a patient's numbers mean; the same at all sites, and public.

    width: concepts of the dictionary (marked ones apart), or numbers of a note's
        vector.
    dense: vectors of a frozen encoder in place of bags of concepts. recipe: JSON values
    from which the same numbers are made of new notes, with `fingerprint`, which says
    whether they are the same.
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
    """Public vectors of some of the dictionary's concepts, from a file that all sites
    read.

    concepts: (found,) int64 indices into the dictionary, rising. values: (found, width)
        float32.
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
        """(1 + known, width) float32, where training starts: row 0 is of unknown
        concepts.

        A known concept that the file has not, and row 0, get the mean of those that it
        has, as in Dligach and Miller's program; zeros where it has none.
        """
        _, own, theirs = np.intersect1d(known, self.concepts, return_indices=True)
        found = self.values[theirs]
        table = np.zeros((1 + len(known), self.values.shape[1]), np.float32)
        if len(found):
            table[:] = found.mean(axis=0, dtype=np.float64)  # [phenotype word2vec]
        table[1 + own] = found
        return table


@dataclass(frozen=True, eq=False)
class SitePatients:
    """One site's patients in three parts. They never leave the site.

    train, valid, test: cohorts without a patient in common; their labels are of
    phenotypes, all -1 for a patient who is not annotated. codes: patient → billed
    codes, without those that define a phenotype; a patient who is not in it was never
    coded. vectors: where stage 1 starts.
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
        """The phenotypes' names, the same at all sites; empty where only codes are
        learnt."""
        return self.train.outputs

    def coded(self, cohort: Cohort) -> Cohort:
        """The patients of one of its parts whose codes are known."""
        return cohort.take(np.array([p in self.codes for p in cohort.patients], bool))


def require_alike(sites: Sequence[SitePatients]) -> None:
    """Raises DataError where sites have other phenotypes or other features."""
    first = sites[0]
    for site in sites[1:]:
        both = f"sites {first.id!r} and {site.id!r}"
        if site.phenotypes != first.phenotypes:
            odd = sorted(set(site.phenotypes) ^ set(first.phenotypes)) or [
                "their order"
            ]
            raise DataError(
                f"{both} have different phenotypes ({', '.join(odd)}): "
                "give both the same [phenotypes], or the same kind of labels"
            )
        one, other = ((s.space.width, s.space.fingerprint) for s in (first, site))
        if one != other:
            raise DataError(
                f"{both} read notes with different dictionaries or encoders: "
                "give both the same files"
            )
        if len({s.vectors and s.vectors.digest for s in (first, site)}) > 1:
            raise DataError(
                f"{both} have different [concepts] vectors: give both the same file"
            )


def pooled_patients(sites: Sequence[SitePatients]) -> SitePatients:
    """One site, called "pooled", with all the sites' patients.

    A test patient whom several sites judge (silos share their test patients) is there
    once.
    Raises DataError for a patient who is at two sites otherwise.
    """
    require_alike(sites)
    tests = [site.test for site in sites]
    shared = len(sites) > 1 and all(t.patients == tests[0].patients for t in tests[1:])
    return SitePatients(
        "pooled",
        sites[0].space,
        pooled([site.train for site in sites]),
        pooled([site.valid for site in sites]),
        tests[0] if shared else pooled(tests),
        {patient: codes for site in sites for patient, codes in site.codes.items()},
        sites[0].vectors,
    )


def fingerprint(site: SitePatients) -> str:
    """SHA-256 of a site's patients and parts; as private as the patients themselves."""
    digest = hashlib.sha256(site.space.fingerprint.encode())
    for cohort in (site.train, site.valid, site.test):
        digest.update(cohort.fingerprint().encode())
    codes = {patient: sorted(given) for patient, given in sorted(site.codes.items())}
    digest.update(json.dumps(codes).encode())
    return digest.hexdigest()
