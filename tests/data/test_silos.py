"""Silos: every patient in one of them, shares even."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednotes.core.errors import ConfigError, DataError
from fednotes.data.notes import Note, patient_of
from fednotes.data.notes.sites import assign

some_keys = st.lists(st.tuples(st.sampled_from("abcdefgh")), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None)
@given(some_keys, st.integers(1, 6), st.integers(0, 5))
def test_silos_partition_the_patients(keys: list[tuple[str]], silos: int, seed: int) -> None:
    """Brute force: each patient has one silo, sizes are even; the order of the notes is nothing."""
    units = len(set(keys))
    if units < silos:
        with pytest.raises(DataError, match=f"{units} patients or notes cannot fill {silos} silos"):
            assign(keys, silos, seed)
        return
    where = assign(keys, silos, seed)
    sizes = Counter(where.values())
    assert (set(where), set(sizes)) == (set(keys), set(range(silos)))
    assert max(sizes.values()) - min(sizes.values()) <= 1
    assert assign(iter(keys[::-1]), silos, seed) == where


def test_the_seed_matters() -> None:
    keys = [(str(i),) for i in range(30)]
    assert assign(keys, 5) != assign(keys, 5, seed=1)


def test_no_patient_is_a_patient_of_its_own_in_each_source() -> None:
    """Two sources may use the same note ids; a patient "1" is not the note "1"."""
    whose = [("1", None, "a"), ("1", None, "b"), ("2", "1", "a"), ("3", "1", "b")]
    notes = [Note(name, "text", patient, None, source) for name, patient, source in whose]
    assert len(set(map(patient_of, notes))) == 3


def test_wrong_requests() -> None:
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        assign([("a",)], 0)
    with pytest.raises(DataError, match="cannot fill 1 silos"):
        assign([], 1)
