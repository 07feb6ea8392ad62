"""Bags of concepts on disk: made once for the same texts, dictionary and rules.

    <folder>/<key>/concepts.npy offsets.npy   the bags
                   kept.npy                   which patients they are of, by position
                   counts.json                what was read

The key is a hash of all texts and of what they are matched with. No text and no patient's id is
in the files, but they are as sensitive as the notes; only their owner can read them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fednotes.core.errors import DataError
from fednotes.core.parsing import read_json
from fednotes.core.store import write_folder
from fednotes.data.cohort import Bags


@dataclass(frozen=True)
class BagCounts:
    """What was read. left_out: patients with too many concepts. without: patients without one."""

    patients: int
    notes: int
    characters: int
    mentions: int
    left_out: int
    without: int


Found = tuple[Bags, np.ndarray, BagCounts]  # bags, rows of the patients that stay, counts


def key_of(notes: Mapping[str, Sequence[str]], fingerprint: str, most: int) -> str:
    """A hash of all texts, in order, and of how they are matched (`fingerprint`)."""
    state = hashlib.sha256(f"{fingerprint} {most}".encode())
    for texts in notes.values():
        state.update(len(texts).to_bytes(8, "little"))
        for text in texts:
            data = text.encode("utf-8", "surrogatepass")
            state.update(len(data).to_bytes(8, "little"))
            state.update(data)
    return state.hexdigest()[:32]


def save(path: Path, made: Bags, kept: np.ndarray, counts: BagCounts) -> None:
    """A result as files that only their owner can read, whole or not at all."""

    def fill(folder: Path) -> None:
        arrays = {"concepts": made.concepts, "offsets": made.offsets, "kept": kept}
        for name, array_of in arrays.items():
            np.save(folder / f"{name}.npy", array_of, allow_pickle=False)
        (folder / "counts.json").write_text(json.dumps(asdict(counts)), encoding="utf-8")

    write_folder(path, fill)


def load(path: Path, patients: int, vocabulary: int) -> Found | None:
    """A result from the cache; None where there is none, or it is damaged."""
    try:
        names = ("concepts", "offsets", "kept")
        concepts, offsets, kept = (np.load(path / f"{n}.npy", allow_pickle=False) for n in names)
        counts = BagCounts(**read_json(path / "counts.json"))
        made = Bags(concepts, offsets, vocabulary)
    except (OSError, ValueError, TypeError, EOFError, DataError):
        return None
    fits = len(made) == len(kept) == patients - counts.left_out and counts.patients == patients
    return (made, kept, counts) if fits and (kept < patients).all() else None
