"""What reads patients' files, for the tests of all readers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fednotes.apps.phenotyping.code_tables import read_codiesp, read_mimic
from fednotes.apps.phenotyping.ctakes import read_ctakes
from fednotes.apps.phenotyping.obesity import read_obesity
from fednotes.apps.phenotyping.patient_notes import read_patient_notes

PATIENT_READERS: dict[str, Callable[[Path], object]] = {
    "predict patients": lambda path: list(read_patient_notes(str(path))),
    "ctakes": read_ctakes,
    "codes": read_codiesp,
    "mimic": read_mimic,
    "obesity": read_obesity,
}
PATIENT_READERS_OF_FILES = ["predict patients"]
