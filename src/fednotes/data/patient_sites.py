"""Patients of sites for phenotyping: what each one's notes say, billed codes, known phenotypes.

`cohort_jobs.py` makes them of files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fednotes.core.errors import DataError
from fednotes.data.cohort import Cohort
from fednotes.data.cohort import fingerprint as cohort_fingerprint
from fednotes.data.cohort import pooled as pooled_cohorts

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
        pooled_cohorts([site.train for site in sites], _POOLED),
        pooled_cohorts([site.valid for site in sites], _POOLED),
        tests[0] if shared else pooled_cohorts(tests, _POOLED),
        codes,
        sites[0].vectors,
    )


def fingerprint(site: SitePatients) -> str:
    """SHA-256 of a site's patients and parts; as private as the patients themselves."""
    digest = hashlib.sha256(site.space.fingerprint.encode())
    for cohort in (site.train, site.valid, site.test):
        digest.update(cohort_fingerprint(cohort).encode())
    codes = {patient: sorted(given) for patient, given in sorted(site.codes.items())}
    digest.update(json.dumps(codes).encode())
    return digest.hexdigest()
