"""Patients of sites: what must be alike, what pooling keeps, what a fingerprint depends on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fednotes.core.errors import DataError
from fednotes.patients.cohort import (
    Bags,
    Cohort,
    FeatureSpace,
    SitePatients,
    Vectors,
    fingerprint,
    pooled_patients,
    require_alike,
)

SPACE = FeatureSpace(5, False, {"kind": "concepts", "fingerprint": "f"})


def cohort(*patients: str, outputs: tuple[str, ...] = ("a", "b")) -> Cohort:
    bags = Bags.of([[len(p) % 5, 1] for p in patients], 5)
    return Cohort("c", patients, bags, np.zeros((len(patients), len(outputs))), outputs)


def site(name: str, train: Cohort, valid: Cohort, test: Cohort) -> SitePatients:
    codes = {p: frozenset({f"icd9:{len(p):03d}"}) for part in (train, test) for p in part.patients}
    return SitePatients(name, SPACE, train, valid, test, codes)


def test_pooling_keeps_every_patient_once() -> None:
    """Sets and sums, by hand."""
    a = site("a", cohort("p", "q"), cohort("v"), cohort("t"))
    b = site("b", cohort("r"), cohort("w"), cohort("u"))
    whole = pooled_patients([a, b])
    assert (whole.id, whole.space) == ("pooled", SPACE)
    assert whole.train.patients == ("p", "q", "r")
    assert whole.valid.patients == ("v", "w")
    assert whole.test.patients == ("t", "u")
    assert set(whole.codes) == {"p", "q", "r", "t", "u"}
    assert whole.train.bags.concepts.tolist() == [1, 1] * 3


def test_a_shared_test_part_is_pooled_once() -> None:
    test = cohort("t", "u")
    sites = [site(n, cohort(n), cohort(f"{n}v"), replace(test, id=n)) for n in ("a", "b", "c")]
    assert pooled_patients(sites).test.patients == ("t", "u")
    partly = [sites[0], replace(sites[1], test=cohort("t"))]
    with pytest.raises(DataError, match="1 patients of cohort"):
        pooled_patients(partly)


def test_a_patient_at_two_sites_is_refused() -> None:
    one = site("a", cohort("p"), cohort(), cohort())
    with pytest.raises(DataError, match="1 patients of cohort"):
        pooled_patients([one, replace(one, id="b")])


def test_sites_must_be_alike() -> None:
    one = site("a", cohort("p"), cohort("v"), cohort("t"))
    require_alike([one, replace(one, id="b")])
    other = replace(one, id="b", train=cohort("q", outputs=("a", "c")))
    with pytest.raises(DataError, match=r"'a' and 'b' have different phenotypes \(b, c\)"):
        require_alike([one, other])
    turned = replace(one, id="b", train=cohort("q", outputs=("b", "a")))
    with pytest.raises(DataError, match="their order"):
        require_alike([one, turned])
    for space in (replace(SPACE, width=6), replace(SPACE, recipe={"fingerprint": "g"})):
        with pytest.raises(DataError, match="'a' and 'b' read notes with different dictionaries"):
            require_alike([one, replace(one, id="b", space=space)])


def test_a_fingerprint_changes_with_what_is_in_a_site() -> None:
    one = site("a", cohort("p"), cohort("v"), cohort("t"))
    changed = [
        replace(one, train=cohort("q")),
        replace(one, valid=one.test, test=one.valid),
        replace(one, codes={**one.codes, "p": frozenset({"icd9:999"})}),
        replace(one, codes={}),
        replace(one, space=replace(SPACE, recipe={"fingerprint": "g"})),
        replace(one, train=replace(one.train, labels=np.ones((1, 2)))),
        replace(one, train=replace(one.train, bags=Vectors(np.zeros((1, 5))))),
    ]
    assert len({fingerprint(s) for s in (one, *changed)}) == 1 + len(changed)
    assert fingerprint(replace(one, id="b")) == fingerprint(one)
    turned = replace(one, codes=dict(reversed(one.codes.items())))
    assert fingerprint(turned) == fingerprint(one)
