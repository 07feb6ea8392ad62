"""Bags and cohorts, compared with lists; no patient is lost or repeated."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from fednotes.apps.phenotyping.cohort import (
    Bags,
    Cohort,
    FeatureSpace,
    SitePatients,
    Vectors,
    compute_site_fingerprint,
    deal_cohort,
    pool_cohorts,
    pool_sites,
    require_alike,
    split_cohort,
)
from fednotes.core.errors import ConfigError, DataError


def _lists(patients: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Return random bags, of which some are empty and some repeat a concept."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 9, patients)
    return [rng.integers(0, vocabulary, n).tolist() for n in sizes]


def _as_lists(bags: Bags) -> list[list[int]]:
    at = bags.offsets.tolist()
    return [bags.concepts[a:b].tolist() for a, b in itertools.pairwise(at)]


def _cohort(
    patients: int = 37, outputs: int = 3, seed: int = 0, id: str = "h"
) -> Cohort:
    rng = np.random.default_rng(seed)
    return Cohort(
        id,
        tuple(f"{id}{n:03d}" for n in rng.permutation(patients)),
        Bags.from_lists(_lists(patients, 20, seed), 20),
        rng.integers(-1, 3, (patients, outputs)),
        tuple(f"d{n}" for n in range(outputs)),
    )


def _rows(cohort: Cohort) -> dict[str, tuple[list[int], list[int]]]:
    """Return concepts and labels by patient, which every deal must keep."""
    return {
        patient: (bag, labels)
        for patient, bag, labels in zip(
            cohort.patients, _as_lists(cohort.bags), cohort.labels.tolist(), strict=True
        )
    }


def test_bags_hold_the_concepts_of_the_lists() -> None:
    lists = _lists(50, 11, 1)
    bags = Bags.from_lists(lists, 11)
    assert len(bags) == 50
    assert (bags.concepts.dtype, bags.offsets.dtype) == (np.int32, np.int64)
    assert _as_lists(bags) == lists
    assert bags.sizes.tolist() == [len(each) for each in lists]


@pytest.mark.parametrize("rows", [[], [3], [4, 0, 4, 49], list(range(49, -1, -1))])
def test_take_selects_the_given_patients(rows: Sequence[int]) -> None:
    """Rows may be indices or a mask."""
    lists = _lists(50, 11, 2)
    bags = Bags.from_lists(lists, 11)
    assert _as_lists(bags.take(rows)) == [lists[r] for r in rows]
    mask = np.isin(np.arange(50), rows)
    assert _as_lists(bags.take(mask)) == [lists[r] for r in sorted(set(rows))]


def test_counts_equal_those_of_a_counter() -> None:
    """The expected counts are those of `collections.Counter`."""
    lists = _lists(60, 7, 4)
    counts = list(
        zip(
            *(a.tolist() for a in Bags.from_lists(lists, 7).count_concepts()),
            strict=True,
        )
    )
    expected = [
        (r, c, n)
        for r, bag in enumerate(lists)
        for c, n in sorted(Counter(bag).items())
    ]
    assert counts == expected


def test_bags_without_patients_or_concepts_are_accepted() -> None:
    for lists in ([], [[], []]):
        bags = Bags.from_lists(lists, 5)
        assert len(bags) == len(lists)
        assert [a.tolist() for a in bags.count_concepts()] == [[], [], []]
        assert _as_lists(bags.take([-1] if lists else [])) == lists[1:]


def test_many_patients_are_copied_and_counted_like_few() -> None:
    """They are read in several blocks, whose bounds must not show."""
    lists = _lists(2500, 50, 7)
    bags = Bags.from_lists(lists, 50)
    rng = np.random.default_rng(1)
    order = rng.integers(0, 2500, 4000)
    assert _as_lists(bags.take(order)) == [lists[row] for row in order.tolist()]
    mask = rng.random(2500) < 0.9
    chosen = np.flatnonzero(mask).tolist()
    assert _as_lists(bags.take(mask)) == [lists[row] for row in chosen]
    expected = [
        (row, concept, count)
        for row, concepts in enumerate(lists)
        for concept, count in sorted(Counter(concepts).items())
    ]
    columns = [values.tolist() for values in bags.count_concepts()]
    assert list(zip(*columns, strict=True)) == expected


def test_counting_the_concepts_of_many_patients_takes_little_memory() -> None:
    """Of two million concepts, only the distinct ones of each patient are held."""
    concepts = np.tile(np.arange(4, dtype=np.int32), 500_000)
    bags = Bags(concepts, np.arange(0, 2_000_001, 400), 5)
    tracemalloc.start()
    try:
        _, columns, counts = bags.count_concepts()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(columns), set(counts.tolist())) == (5000 * 4, {100})
    assert peak < 3 * concepts.nbytes


@pytest.mark.parametrize(
    ("concepts", "offsets", "message"),
    [
        ([0, 5], [0, 2], "below 5, the size of the vocabulary"),
        ([0, -1], [0, 2], "must be at least 0 and below"),
        ([0, 1], [0, 1], "offsets of bags must rise from 0"),
        ([0, 1], [1, 2], "offsets of bags must rise from 0"),
        ([0, 1], [0, 2, 1, 2], "offsets of bags must rise from 0"),
        ([0, 1], [], "offsets of bags must rise from 0"),
        ([0.5], [0, 1], "flat array of integers"),
        ([[0]], [0, 1], "flat array of integers"),
        ([1 << 40], [0, 1], "outside the range of int32"),
    ],
)
def test_impossible_bags_are_refused(
    concepts: list[int], offsets: list[int], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        Bags(np.array(concepts), np.array(offsets), 5)
    with pytest.raises(DataError, match="outside the range of int32"):
        Bags.from_lists([[1 << 33]], 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patients": ("a",)}, "1 patients and 1 outputs, but 2 bags"),
        ({"patients": ("a", "a")}, "1 of its patients are repeated"),
        ({"outputs": ("x", "y")}, r"labels of shape \(2, 1\)"),
        ({"labels": np.array([[3], [0]])}, "labels must be 1, 0, 2 or -1"),
    ],
)
def test_impossible_cohorts_are_refused(
    change: dict[str, object], message: str
) -> None:
    cohort = Cohort(
        "h", ("a", "b"), Bags.from_lists([[1], []], 3), np.array([[1], [0]]), ("x",)
    )
    with pytest.raises(DataError, match=message):
        replace(cohort, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize("sites", [1, 3, 10, 37])
def test_dealing_loses_and_repeats_no_patient(sites: int) -> None:
    cohort = _cohort()
    dealt = deal_cohort(cohort, sites, seed=5)
    assert [part.id for part in dealt] == [f"h-{n}" for n in range(1, sites + 1)]
    sizes = [len(part) for part in dealt]
    assert sum(sizes) == 37
    assert max(sizes) - min(sizes) <= 1
    together: dict[str, tuple[list[int], list[int]]] = {}
    for part in dealt:
        assert not set(together) & set(part.patients)
        together |= _rows(part)
    assert together == _rows(cohort)


def test_dealing_depends_on_patients_and_seed_but_not_on_order() -> None:
    cohort = _cohort()
    turned = cohort.take(np.arange(36, -1, -1))

    def silos(cohort_to_deal: Cohort, seed: int) -> list[set[str]]:
        return [set(part.patients) for part in deal_cohort(cohort_to_deal, 4, seed)]

    assert silos(cohort, 0) == silos(turned, 0)
    assert silos(cohort, 0) != silos(cohort, 1)


def test_dealing_selects_random_patients() -> None:
    """The mean of 200 deals is the hypergeometric mean within 5 σ."""
    cohort = _cohort(12)
    hits = sum(
        cohort.patients[0] in deal_cohort(cohort, 3, seed)[0].patients
        for seed in range(200)
    )
    assert abs(hits - 200 / 3) < 5 * np.sqrt(200 * (1 / 3) * (2 / 3))


def test_a_split_has_the_requested_shares() -> None:
    cohort = _cohort(40)
    parts = split_cohort(
        cohort, {"train": 0.6, "valid": 0.1, "test": 0.3, "none": 0.0}, seed=2
    )
    assert {n: len(p) for n, p in parts.items()} == {
        "train": 24,
        "valid": 4,
        "test": 12,
        "none": 0,
    }
    assert {k: v for p in parts.values() for k, v in _rows(p).items()} == _rows(cohort)
    order = [p for p in cohort.patients if p in set(parts["train"].patients)]
    assert list(parts["train"].patients) == order


def test_impossible_dealing_and_splits_are_refused() -> None:
    cohort = _cohort(3)
    with pytest.raises(DataError, match="3 patients of cohort h cannot fill 4 sites"):
        deal_cohort(cohort, 4)
    with pytest.raises(ConfigError, match=r"sum to 1, not: train = 0.5"):
        split_cohort(cohort, {"train": 0.5})
    with pytest.raises(DataError, match=r"'valid' .* has no patient"):
        split_cohort(cohort, {"train": 0.9, "valid": 0.1})


def test_pooling_inverts_dealing() -> None:
    cohort = _cohort()
    together = pool_cohorts(deal_cohort(cohort, 5, 1))
    assert _rows(together) == _rows(cohort)
    assert together.id == "pooled"
    assert pool_cohorts([cohort]).bags.offsets.tolist() == cohort.bags.offsets.tolist()


def test_different_cohorts_are_not_pooled() -> None:
    a, b = _cohort(5, id="a"), _cohort(6, id="b")
    for different, message in (
        (a, "5 patients of cohort a are in another one"),
        (replace(b, outputs=("d0", "d1", "x")), "only one of them has d2, x"),
        (replace(b, outputs=("d1", "d0", "d2")), "the order differs"),
        (
            replace(b, id="c", bags=Bags(b.bags.concepts, b.bags.offsets, 21)),
            "vocabulary of 21 concepts and cohort a one of 20",
        ),
    ):
        with pytest.raises(DataError, match=message):
            pool_cohorts([a, different])


def test_label_counts_add_up_and_a_site_may_lack_a_disease() -> None:
    """Counted in Python; one output is never present, another has no label."""
    cohort = _cohort(30)
    labels = cohort.labels.copy()
    labels[:, 0] = np.where(labels[:, 0] == 1, 0, labels[:, 0])
    labels[:, 1] = -1
    cohort = Cohort("h", cohort.patients, cohort.bags, labels, cohort.outputs)
    counts = {name: n.tolist() for name, n in cohort.count_labels().items()}
    for column in range(3):
        expected = Counter(labels[:, column].tolist())
        names = {"present": 1, "absent": 0, "questionable": 2, "unlabelled": -1}
        assert {n: counts[n][column] for n in names} == {
            n: expected[v] for n, v in names.items()
        }
    assert counts["present"][0] == 0
    assert counts["unlabelled"][1] == 30
    assert (
        sum(p.count_labels()["absent"] for p in deal_cohort(cohort, 4)).tolist()
        == counts["absent"]
    )


def test_the_fingerprint_changes_with_everything_but_the_name() -> None:
    cohort = _cohort(6, seed=3)
    bags, labels = cohort.bags, cohort.labels.copy()
    assert (
        replace(cohort, id="other", labels=labels.copy()).compute_fingerprint()
        == cohort.compute_fingerprint()
    )
    labels[0, 0] = 1 if labels[0, 0] != 1 else 0
    concepts, offsets = bags.concepts.copy(), bags.offsets.copy()
    concepts[0] = (concepts[0] + 1) % 20
    offsets[1] = offsets[0] if offsets[1] else offsets[2]
    others = [
        replace(cohort, labels=labels),
        replace(cohort, bags=Bags(concepts, bags.offsets, 20)),
        replace(cohort, bags=Bags(bags.concepts, offsets, 20)),
        replace(cohort, bags=Bags(bags.concepts, bags.offsets, 21)),
        replace(cohort, patients=("x" + cohort.patients[0][1:], *cohort.patients[1:])),
        replace(cohort, outputs=("d0", "d", "1d2")),
    ]
    assert len({c.compute_fingerprint() for c in (cohort, *others)}) == 1 + len(others)


def test_vectors_stay_with_their_patients() -> None:
    """A patient's vector stays with the patient through deal, pool, split and take."""
    plain = _cohort()
    values = (
        np.random.default_rng(5).standard_normal((len(plain), 4)).astype(np.float32)
    )
    dense = replace(plain, bags=Vectors(values))
    vector_of = dict(zip(dense.patients, values.tolist(), strict=True))
    halves = split_cohort(dense, {"a": 0.5, "b": 0.5}, 2)
    for part in (
        pool_cohorts(deal_cohort(dense, 3, 1)),
        dense.take([5, 2, 2][:2]),
        *halves.values(),
    ):
        assert isinstance(part.bags, Vectors)
        assert (len(part.bags), part.bags.width) == (len(part), 4)
        pairs = zip(part.patients, part.bags.values.tolist(), strict=True)
        assert all(vector == vector_of[patient] for patient, vector in pairs)
    assert sum(map(len, halves.values())) == len(dense)
    assert dense.compute_fingerprint() != plain.compute_fingerprint()
    assert (
        dense.compute_fingerprint()
        != replace(dense, bags=Vectors(values + 1)).compute_fingerprint()
    )
    with pytest.raises(DataError, match="give both one dictionary"):
        pool_cohorts([dense, _cohort(id="other")])


@pytest.mark.parametrize("values", [np.zeros(3), np.full((2, 2), np.nan)])
def test_impossible_vectors_are_refused(values: np.ndarray) -> None:
    with pytest.raises(DataError, match="a matrix of finite numbers"):
        Vectors(values)


# ---- sites ---------------------------------------------------------------------------

SPACE = FeatureSpace(5, False, {"kind": "concepts", "fingerprint": "f"})


def named(*patients: str, outputs: tuple[str, ...] = ("a", "b")) -> Cohort:
    bags = Bags.from_lists([[len(p) % 5, 1] for p in patients], 5)
    return Cohort("c", patients, bags, np.zeros((len(patients), len(outputs))), outputs)


def site(name: str, train: Cohort, valid: Cohort, test: Cohort) -> SitePatients:
    codes = {
        p: frozenset({f"icd9:{len(p):03d}"})
        for part in (train, test)
        for p in part.patients
    }
    return SitePatients(name, SPACE, train, valid, test, codes)


def test_pooling_keeps_every_patient_once() -> None:
    """The expected values are worked out by hand."""
    a = site("a", named("p", "q"), named("v"), named("t"))
    b = site("b", named("r"), named("w"), named("u"))
    together = pool_sites([a, b])
    assert (together.id, together.space) == ("pooled", SPACE)
    assert together.train.patients == ("p", "q", "r")
    assert together.valid.patients == ("v", "w")
    assert together.test.patients == ("t", "u")
    assert set(together.codes) == {"p", "q", "r", "t", "u"}
    assert together.train.bags.concepts.tolist() == [1, 1] * 3


def test_a_shared_test_part_is_included_once() -> None:
    test = named("t", "u")
    sites = [
        site(n, named(n), named(f"{n}v"), replace(test, id=n)) for n in ("a", "b", "c")
    ]
    assert pool_sites(sites).test.patients == ("t", "u")
    partly = [sites[0], replace(sites[1], test=named("t"))]
    original = site("a", named("p"), named(), named())
    for twice in (
        partly,
        [original, replace(original, id="b")],
    ):  # a patient at two sites
        with pytest.raises(DataError, match="1 patients of cohort"):
            pool_sites(twice)


def test_sites_with_different_phenotypes_or_dictionaries_are_refused() -> None:
    original = site("a", named("p"), named("v"), named("t"))
    require_alike([original, replace(original, id="b")])
    refusal = "'a' and 'b' read notes with different dictionaries"
    for message, change in (
        (r"different phenotypes \(b, c\)", {"train": named("q", outputs=("a", "c"))}),
        ("their order", {"train": named("q", outputs=("b", "a"))}),
        (refusal, {"space": replace(SPACE, width=6)}),
        (refusal, {"space": replace(SPACE, recipe={"fingerprint": "g"})}),
    ):
        with pytest.raises(DataError, match=message):
            require_alike([original, replace(original, id="b", **change)])  # type: ignore[arg-type]


def test_a_fingerprint_changes_with_the_content_of_a_site() -> None:
    original = site("a", named("p"), named("v"), named("t"))
    changed = [
        replace(original, train=named("q")),
        replace(original, valid=original.test, test=original.valid),
        replace(original, codes={**original.codes, "p": frozenset({"icd9:999"})}),
        replace(original, codes={}),
        replace(original, space=replace(SPACE, recipe={"fingerprint": "g"})),
        replace(original, train=replace(original.train, labels=np.ones((1, 2)))),
        replace(
            original, train=replace(original.train, bags=Vectors(np.zeros((1, 5))))
        ),
    ]
    assert len({compute_site_fingerprint(s) for s in (original, *changed)}) == 1 + len(
        changed
    )
    assert compute_site_fingerprint(
        replace(original, id="b")
    ) == compute_site_fingerprint(original)
    turned = replace(original, codes=dict(reversed(original.codes.items())))
    assert compute_site_fingerprint(turned) == compute_site_fingerprint(original)


def test_the_repr_of_a_site_and_its_cohorts_shows_no_patient() -> None:
    """In a log, a traceback's locals or a notebook."""
    cohort = Cohort(
        "mercy",
        ("Erika",),
        Bags.from_lists([[0]], 1),
        np.zeros((1, 1)),
        ("depression",),
    )
    patients = SitePatients(
        "mercy", SPACE, cohort, cohort, cohort, {"Erika": frozenset({"F32"})}
    )
    for value in (cohort, patients, {"of": (cohort, patients)}):
        assert not [text for text in ("Erika", "F32") if text in repr(value)]
