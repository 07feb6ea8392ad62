"""Patients as bytes: equal in a view that leaves out their difference.

The number of patients who differ is counted by hand.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fednotes.apps.phenotyping.cohort import Bags, Cohort, SitePatients, Vectors
from fednotes.jobs import kinds


def differing(first: SitePatients, second: SitePatients) -> dict[str, int]:
    """Return in how many patients two sites' data differ, in each view."""
    kind = kinds.find("patients")
    views, others = kind.encode_examples(first), kind.encode_examples(second)
    assert views.keys() == others.keys()
    return {name: len(set(views[name]) ^ set(others[name])) for name in views}


def patients(
    names: str = "pq",
    bags: Any = ((0, 1), (1,)),
    labels: Any = ((1,), (0,)),
    codes: Any = None,
) -> SitePatients:
    features = bags if isinstance(bags, Vectors) else Bags.from_lists(bags, 3)
    train = Cohort("a", tuple(names), features, np.array(labels, np.int8), ("asthma",))
    none = train.take([])
    space: Any = None
    known = {"p": frozenset({"x", "y"})} if codes is None else codes
    return SitePatients("a", space, train, none, none, known)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"codes": {"p": frozenset({"y", "x"})}}, (0, 0, 0)),
        ({"names": "pr"}, (2, 2, 2)),
        ({"names": "p", "bags": ((0, 1),), "labels": ((1,),)}, (1, 1, 1)),
        ({"labels": ((1,), (-1,))}, (0, 2, 0)),
        ({"codes": {"p": frozenset({"x"})}}, (0, 2, 0)),
        ({"codes": {"p": frozenset({"x", "y"}), "q": frozenset()}}, (0, 2, 0)),
        ({"bags": ((0, 1), (2,))}, (0, 0, 2)),
        ({"bags": ((0,), (1, 1))}, (0, 0, 4)),
    ],
)
def test_an_example_of_a_cohort_is_a_patient(
    change: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    names = ("patients", "patients with labels and codes", "patients with features")
    views = differing(patients(), patients(**change))
    assert views == dict(zip(names, expected, strict=True))


def test_the_vector_of_a_patient_is_a_feature() -> None:
    first = patients(bags=Vectors(np.array([[1.0], [2.0]])))
    second = patients(bags=Vectors(np.array([[1.0], [3.0]])))
    assert differing(first, second)["patients with features"] == 2
