"""Notes → silos, as in Liu and Miller 2020, section 3.2: by patient, or by note.

A silo stands for a hospital: a patient's notes are in one of them only. Deals depend on the
seed and on which patients there are, not on the order of the notes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.seeds import rng_of
from fednotes.data.notes import Note

Unit = Literal["patient", "note"]
Key = tuple[str, ...]


def patient_of(note: Note) -> Key:
    """Whose note it is. A note without a patient counts as a patient of its own."""
    if note.patient is not None:
        return ("patient", note.patient)
    return ("note", note.source, note.id)


def count_patients(notes: Iterable[Note]) -> int:
    """The number of patients: a silo's sample size in pre-training (Eq. 1)."""
    return len({patient_of(note) for note in notes})


def assign(keys: Iterable[Key], silos: int, seed: int = 0) -> dict[Key, int]:
    """A silo (from 0) for each key; silos' numbers of keys differ by one at most.

    For a file too large to hold: one pass over the notes for the keys, a second one that sends
    each note to its silo. Raises ConfigError for fewer than one silo, DataError for fewer keys
    than silos.
    """
    if silos < 1:
        raise ConfigError(f"the number of silos must be at least 1, not {silos}")
    distinct = sorted(set(keys))
    if len(distinct) < silos:
        raise DataError(
            f"{len(distinct)} patients or notes cannot fill {silos} silos: "
            f"ask for {len(distinct) or 'fewer'} at most, or give more notes"
        )
    order = rng_of(seed, "silos").permutation(len(distinct))
    return {distinct[at]: position % silos for position, at in enumerate(order.tolist())}


def split_notes(
    notes: Iterable[Note], silos: int, by: Unit = "patient", seed: int = 0
) -> tuple[tuple[Note, ...], ...]:
    """The notes of each silo, in their order. Nothing is lost, nothing is in two silos.

    by: "patient" keeps a patient's notes together (pre-training); "note" does not (fine-tuning).
    Raises ConfigError for another unit and whatever `assign` raises.
    """
    if by not in ("patient", "note"):
        raise ConfigError(f"silos are split by 'patient' or by 'note', not by {by!r}")
    given = tuple(notes)
    keys = [patient_of(note) for note in given] if by == "patient" else _own_keys(given)
    where = assign(keys, silos, seed)
    parts: list[list[Note]] = [[] for _ in range(silos)]
    for note, key in zip(given, keys, strict=True):
        parts[where[key]].append(note)
    return tuple(map(tuple, parts))


def _own_keys(notes: Sequence[Note]) -> list[Key]:
    """A key for each note; notes of the same source and id are told apart by their number."""
    seen: dict[Key, int] = {}
    keys: list[Key] = []
    for note in notes:
        name = (note.source, note.id)
        seen[name] = seen.get(name, 0) + 1
        keys.append((*name, str(seen[name])))
    return keys


def split_by_source(notes: Iterable[Note]) -> dict[str, tuple[Note, ...]]:
    """A silo for each source, in order of their names: hospitals that write differently."""
    parts: dict[str, list[Note]] = {}
    for note in notes:
        parts.setdefault(note.source, []).append(note)
    return {source: tuple(parts[source]) for source in sorted(parts)}
