"""Generated patients depend on the seed, differ between sites, and can be matched."""

from __future__ import annotations

from collections import Counter

import numpy as np

from fednotes.apps.phenotyping.codes import (
    find_category,
    list_public_categories,
    normalise_code,
)
from fednotes.apps.phenotyping.concepts import Matcher
from fednotes.apps.phenotyping.synthetic import (
    PHENOTYPES,
    build_synthetic_dictionary,
    generate_patients,
)


def test_equal_arguments_give_equal_patients() -> None:
    first, again = generate_patients("site1", 60, 3), generate_patients("site1", 60, 3)
    assert (first.notes, first.codes) == (again.notes, again.codes)
    assert first.labels.values == again.labels.values
    assert generate_patients("site1", 60, 4).notes != first.notes
    assert not set(first.notes) & set(generate_patients("site2", 60, 3).notes)


def test_sites_differ_in_size_and_conditions() -> None:
    """Sites differ in size and conditions; every label and 40 categories occur."""
    sites = [generate_patients(f"site{at}", 600, 1) for at in (1, 2, 3)]
    sizes = [len(s.notes) for s in sites]
    assert len(set(sizes)) == 3
    assert all(360 <= size <= 840 for size in sizes)
    matrices = [s.labels.to_matrix(tuple(s.notes)) for s in sites]
    labels = np.concatenate(matrices)
    assert set(np.unique(labels)) == {-1, 0, 1, 2}
    present = dict(zip(PHENOTYPES, (labels == 1).mean(0), strict=True))
    assert 0.005 < present["gout"] < 0.06
    assert present["hypertension"] > 0.2
    assert [p for p, n in zip(PHENOTYPES, (labels == 2).sum(0), strict=True) if n] == [
        "depression"
    ]
    rates = np.array([(matrix == 1).mean(0) for matrix in matrices])
    assert np.ptp(rates, axis=0).max() > 0.05
    counts = Counter(
        code for s in sites for billed in s.codes.values() for code in billed
    )
    assert len(counts) == 40
    assert len({code[: len("icd9:000")] for code in counts}) == 40
    listed = set(list_public_categories(("icd9",)))
    assert all(
        normalise_code("icd9", c[5:]) == c and find_category(c) in listed
        for c in counts
    )
    uncoded = sum(len(s.notes) - len(s.codes) for s in sites)
    assert 0 < uncoded < 0.05 * sum(sizes)
    assert {len(texts) for s in sites for texts in s.notes.values()} == {1, 2, 3}


def test_every_term_of_a_generated_note_is_matched() -> None:
    """A sentence with one term has its concept; no term stands for two concepts."""
    public = build_synthetic_dictionary()
    assert len(public) > 250
    assert build_synthetic_dictionary().fingerprint == public.fingerprint
    matcher = Matcher(public)
    assert not matcher.dropped
    for at, term in enumerate(public.terms):
        assert matcher.make_bag(f"History of {term}.").tolist() == list(
            public.get_concepts(at)
        )
        assert matcher.make_bag(f"Denies {term}.").tolist() == []


def test_notes_mention_the_conditions_of_patients() -> None:
    """Notes name a phenotype more often for patients who have it."""
    generated = generate_patients("site1", 600, 2)
    matcher = Matcher(build_synthetic_dictionary())
    bags = [set(matcher.make_bag(texts).tolist()) for texts in generated.notes.values()]
    assert 3 < np.mean([len(bag) for bag in bags]) < 40
    labels, known = (
        generated.labels.to_matrix(tuple(generated.notes)),
        build_synthetic_dictionary(),
    )
    for column, name in enumerate(PHENOTYPES):
        (concept,) = known.get_concepts(known.terms.index(name))
        is_named = np.array([concept in bag for bag in bags])
        label = labels[:, column]
        assert is_named[label == 1].mean() > 2 * is_named[label == 0].mean()
        assert is_named[label == 0].any()
