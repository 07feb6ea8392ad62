"""Silos: every note in one of them, a patient's notes together, shares even."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fednotes.core.errors import ConfigError, DataError
from fednotes.data.notes import Note
from fednotes.data.silos import assign, count_patients, patient_of, split_by_source, split_notes


def _note(number: int, patient: str | None, source: str = "s") -> Note:
    return Note(str(number), f"note {number}", patient, None, source)


corpus = st.lists(st.one_of(st.none(), st.sampled_from("abcdefgh")), min_size=1, max_size=40).map(
    lambda patients: [_note(i, p) for i, p in enumerate(patients)]
)


@settings(max_examples=150, deadline=None)
@given(corpus, st.integers(1, 6), st.integers(0, 5), st.sampled_from(["patient", "note"]))
def test_silos_partition_the_notes(notes: list[Note], silos: int, seed: int, by: str) -> None:
    """Brute force: sets of patients are disjoint, sizes even, order kept, nothing lost."""
    units = len(notes) if by == "note" else len({n.patient or f"#{n.id}" for n in notes})
    if units < silos:
        with pytest.raises(DataError, match=f"{units} patients or notes cannot fill {silos} silos"):
            split_notes(notes, silos, by, seed)  # type: ignore[arg-type]
        return
    parts = split_notes(notes, silos, by, seed)  # type: ignore[arg-type]
    assert len(parts) == silos
    assert sorted(int(n.id) for part in parts for n in part) == list(range(len(notes)))
    assert all([int(n.id) for n in p] == sorted(int(n.id) for n in p) for p in parts)
    sizes = [len(p) if by == "note" else count_patients(p) for p in parts]
    assert max(sizes) - min(sizes) <= 1
    if by == "patient":
        homes = Counter(p for part in parts for p in {patient_of(n) for n in part})
        assert set(homes.values()) == {1}
    assert split_notes(notes, silos, by, seed) == parts  # type: ignore[arg-type]


def test_the_order_of_notes_does_not_matter_but_the_seed_does() -> None:
    notes = [_note(i, str(i % 30)) for i in range(90)]
    home = [{n.id for n in part} for part in split_notes(notes, 5)]
    assert [{n.id for n in part} for part in split_notes(notes[::-1], 5)] == home
    assert [{n.id for n in part} for part in split_notes(notes, 5, seed=1)] != home


def test_silos_of_one_patient() -> None:
    notes = [_note(i, p) for i, p in enumerate("aabbbc")]
    parts = split_notes(notes, 3)
    assert sorted(len(p) for p in parts) == [1, 2, 3]
    assert [count_patients(p) for p in parts] == [1, 1, 1]


def test_no_patient_is_a_patient_of_its_own_in_each_source() -> None:
    """Two sources may use the same note ids; a patient "1" is not the note "1"."""
    notes = [_note(1, None, "a"), _note(1, None, "b"), _note(2, "1", "a"), _note(3, "1", "b")]
    assert count_patients(notes) == 3


def test_repeated_ids_are_different_notes() -> None:
    assert [len(p) for p in split_notes([_note(1, "a")] * 6, 3, "note")] == [2, 2, 2]


def test_by_source_and_wrong_requests() -> None:
    notes = [_note(1, None, "b"), _note(2, None, "a"), _note(3, None, "b")]
    parts = split_by_source(notes)
    assert [(k, [n.id for n in v]) for k, v in parts.items()] == [("a", ["2"]), ("b", ["1", "3"])]
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        split_notes(notes, 0)
    with pytest.raises(ConfigError, match="not by 'ward'"):
        split_notes(notes, 2, "ward")  # type: ignore[arg-type]
    with pytest.raises(DataError, match="cannot fill 1 silos"):
        split_notes([], 1)


def test_assign_is_the_split_of_a_stream() -> None:
    """Two passes over a file that is never held give what `split_notes` gives."""
    notes = [_note(i, str(i % 7)) for i in range(40)]
    where = assign((patient_of(n) for n in notes), 3, seed=4)
    parts = split_notes(notes, 3, seed=4)
    assert [[n for n in notes if where[patient_of(n)] == s] for s in range(3)] == list(
        map(list, parts)
    )
