"""A small job of three hospitals on patients, and generated patients for its sites."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hospital_jobs import FEDERATION, NAMES

from fednotes.apps.phenotyping.synthetic import generate_patients

PHENOTYPE = f"""
method = "phenotype"
seed = 3
{FEDERATION}
[concepts]
dictionary = "synthetic"
[training]
cycles = 2
classifier_cycles = 2
minimum = 10
min_patients = 10
[model]
network = {{ embedding = 6, hidden = 8 }}
[phenotypes]
pneumonia = ["icd9:485"]
back = ["icd9:722"]
{"".join(f"[sites.{name}]{chr(10)}valid_fraction = 0.2{chr(10)}" for name in NAMES)}
"""


def patients(folder: Path, number: int) -> dict[str, Any]:
    """Write generated patients as a table of notes and MIMIC-III's codes."""
    generated = generate_patients(f"s{number}", 90, seed=number)
    folder.mkdir()
    rows = [
        {"patient": f"{number}-{patient}", "text": text}
        for patient, texts in generated.notes.items()
        for text in texts
    ]
    (folder / "notes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = ["ROW_ID,SUBJECT_ID,ICD9_CODE"]
    for patient, codes in generated.codes.items():
        icd_codes = sorted(code for code in codes if code.startswith("icd9:"))
        lines += [
            f"1,{number}-{patient},{code.partition(':')[2]}" for code in icd_codes
        ]
    (folder / "DIAGNOSES_ICD.csv").write_text("\n".join(lines) + "\n")
    return {
        "notes": str(folder / "notes.jsonl"),
        "codes": str(folder),
        "codes_format": "mimic",
        "tables": ["diagnoses"],
    }
