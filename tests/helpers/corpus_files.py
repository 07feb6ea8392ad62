"""Write corpora in which things are wrong, for tests of readers and checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

NOTE = "Ann took aspirin for pain.\nShe had a rash on the second day.\n"
MENTION = "T1\tDrug 9 16\taspirin\n"


def write_damaged_brat(folder: Path) -> Path:
    """Write a brat corpus with one good note, and one note for each kind of damage."""
    folder.mkdir()
    files: dict[str, tuple[str | bytes, str]] = {
        "good": (NOTE, MENTION),
        "cut": (NOTE, MENTION + "T2\tADE 37 41\trash\nT3\tAD"),
        "beyond": (NOTE, MENTION + "T2\tADE 90 94\trash\n"),
        "moved": (NOTE, MENTION + "T2\tADE 36 40\trash\n"),
        "twice": (NOTE, MENTION + MENTION),
        "latin": (NOTE.replace("Ann", "Zoë").encode("latin-1"), MENTION),
        "bare": (NOTE, ""),
    }
    for name, (text, lines) in files.items():
        data = text if isinstance(text, bytes) else text.encode()
        (folder / f"{name}.txt").write_bytes(data)
        (folder / f"{name}.ann").write_text(lines)
    (folder / "alone.ann").write_text(MENTION)
    (folder / "unread.txt").write_text(NOTE)
    return folder


def write_notes(
    path: Path, numbers: range, patient: int = 0, first_id: str = ""
) -> Path:
    """Write JSON lines with notes of two sentences and one mention each.

    Args:
        path: The file.
        numbers: Numbers of the notes; equal numbers give equal texts.
        patient: How many of the first notes are of one patient.
        first_id: Id of the first note; notes have different ids otherwise.
    """
    rows: list[dict[str, Any]] = []
    for number in numbers:
        text = (
            f"Case number {number} took aspirin today.\n"
            f"She went home on day {number} of it."
        )
        start = text.index("aspirin")
        span = [start, start + 7, "Drug"]
        rows.append({"id": f"n{number}", "text": text, "spans": [span]})
    for row in rows[:patient]:
        row["patient"] = "p"
    if first_id:
        rows[0]["id"] = first_id
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_hospitals(folder: Path) -> tuple[Path, Path]:
    """Write two brat corpora with equal file names, of which one note is in both."""
    for site, number_of_site in (("mercy", 1), ("north", 2)):
        for number in range(12):
            word = "both" if number == 3 else f"site{number_of_site}"
            name = folder / site / f"{number:03}"
            name.parent.mkdir(exist_ok=True)
            first = f"Took drug{number} for pain at {word} twice."
            second = f"Nothing of {word} {number} else."
            name.with_suffix(".txt").write_text(f"{first}\n{second}")
            mention = "T1\tDrug 0 4\tTook\n" if number % 4 else ""
            name.with_suffix(".ann").write_text(mention)
    return folder / "mercy", folder / "north"
