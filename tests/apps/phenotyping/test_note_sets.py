"""Notes of patients that lie apart in a file, of which only facts stay in memory."""

from __future__ import annotations

import os
import signal
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from patient_files import job, write, write_terms

from fednotes.apps.phenotyping.concepts import Matcher, make_bags
from fednotes.apps.phenotyping.dictionary import build_dictionary
from fednotes.apps.phenotyping.note_sets import NoteSet
from fednotes.core.errors import DataError, TrainingError
from fednotes.jobs.job import load_sites
from fednotes.jobs.patient_models import PatientNote

TERMS = [("C0000001", "asthma"), ("C0000002", "gout"), ("C0000003", "migraine")]
PATIENTS = 7


def list_notes(number: int = 1000) -> list[PatientNote]:
    """Return notes of patients in turn, which name concepts in different orders."""
    names = [term for _, term in TERMS]
    return [
        PatientNote(
            f"p{n * 3 % PATIENTS}", f"Known {names[n % 3]}, {names[n * 2 % 3]}. {n}"
        )
        for n in range(number)
    ]


def group_texts(notes: list[PatientNote]) -> dict[str, list[str]]:
    """Return the texts of each patient."""
    texts: dict[str, list[str]] = {}
    for note in notes:
        texts.setdefault(note.patient, []).append(note.text)
    return texts


def make_set(notes: list[PatientNote]) -> NoteSet:
    return NoteSet.scan(notes, lambda: iter(notes))


def make_matcher() -> Matcher:
    return Matcher(build_dictionary(TERMS), context="drop")


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("max_concepts", [285, 10_000])
def test_bags_of_patients_that_lie_apart_equal_those_of_their_texts(
    processes: int, max_concepts: int
) -> None:
    notes = list_notes()
    expected = make_bags(group_texts(notes), make_matcher(), max_concepts=max_concepts)
    found = make_bags(
        make_set(notes), make_matcher(), processes, max_concepts=max_concepts
    )
    assert found.patients == expected.patients
    assert found.counts == expected.counts
    np.testing.assert_array_equal(found.values.concepts, expected.values.concepts)
    np.testing.assert_array_equal(found.values.offsets, expected.values.offsets)
    is_limited = max_concepts < 10_000
    assert 0 < len(found.patients) <= PATIENTS
    assert (len(found.patients) < PATIENTS) == is_limited


def test_the_cache_of_notes_that_lie_apart_is_that_of_their_texts(
    tmp_path: Path,
) -> None:
    notes = list_notes(30)
    make_bags(group_texts(notes), make_matcher(), cache=tmp_path)
    make_bags(make_set(notes), make_matcher(), cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    changed = [*notes[:-1], replace(notes[-1], text="Known gout.")]
    make_bags(make_set(changed), make_matcher(), cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_set_of_notes_knows_their_numbers_and_shows_no_text() -> None:
    notes = [PatientNote("Zebulon", "Known gout."), PatientNote("b", "Seen.")]
    found = make_set([*notes, PatientNote("Zebulon", "Asthma.")])
    assert found.patients == ("Zebulon", "b")
    assert (found.number, found.characters) == (3, 23)
    assert "Zebulon" not in repr(found)
    assert "gout" not in repr(found)
    both = found.with_prefix("x/").combine(NoteSet.of({"c": ["Here."], "none": []}))
    assert both.patients == ("x/Zebulon", "x/b", "c", "none")
    assert [note.patient for note in both] == ["x/Zebulon", "x/b", "x/Zebulon", "c"]


@pytest.mark.parametrize("change", ["more", "fewer", "another patient"])
def test_notes_that_change_between_two_readings_are_refused(change: str) -> None:
    notes = list_notes(10)
    later = {
        "more": [*notes, notes[0]],
        "fewer": notes[:-1],
        "another patient": [*notes[:-1], PatientNote("new", "Known gout.")],
    }
    found = NoteSet.scan(notes, lambda: iter(later[change]))
    with pytest.raises(DataError, match="have changed while they were read: start"):
        make_bags(found, make_matcher())


class Killed(Matcher):
    """A matcher whose process is killed by a note."""

    def make_bag(self, texts: object) -> np.ndarray:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


def test_a_killed_process_is_one_error_with_a_remedy() -> None:
    matcher = Killed(build_dictionary(TERMS), context="drop")
    message = (
        r"was killed \(the system does this when memory runs out\): set `processes`"
    )
    with pytest.raises(TrainingError, match=message):
        make_bags(make_set(list_notes()), matcher, processes=2)


# ---- memory --------------------------------------------------------------------------

NOTES = 200
LONG = 40_000  # characters of a long note: 8 MB in all
ALLOWED_GROWTH = 2_000_000  # bytes: a few notes at a time, and the reader's buffers


def test_memory_of_reading_a_site_does_not_grow_with_the_text(tmp_path: Path) -> None:
    terms = [term for _, term in TERMS]
    write_terms(tmp_path, *terms)
    codes = [f"p{n},{'274' if n % 2 else '401'}" for n in range(40)]
    write(tmp_path / "codes.csv", "patient,code", codes)

    def peak(characters: int) -> int:
        """Return the bytes that Python holds at most while the site is read."""
        rows = []
        for n in range(NOTES):
            text = f"Known {terms[n % 3]}. " + "filler" * (characters // 6)
            rows.append(f'p{n % 40},"{text}"')
        path = write(tmp_path / f"{characters}.csv", "patient,text", rows)
        del rows
        site = {
            "notes": path.name,
            "codes": "codes.csv",
            "codes_format": "table",
            "system": "icd9",
        }
        phenotypes = {"gout": ["icd9:274"]}
        patients_job = job(tmp_path, sites={"a": site}, phenotypes=phenotypes)
        tracemalloc.start()
        try:
            load_sites(patients_job, cache=tmp_path / "cache")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(60)  # whatever is loaded once
    growth = peak(LONG) - peak(60)
    assert growth < ALLOWED_GROWTH < NOTES * LONG / 3
