"""Seconds and peak memory of phenotyping notes in MIMIC-III's layout.

    python benchmarks/mimic.py [--notes 20000] [--workers 2] [--train]
        [--only-workers]
    python benchmarks/mimic.py --notes 2083180 --workers 16 --train    its full size

Generated notes are written to a compressed NOTEEVENTS.csv.gz. They have 1,800 characters
on average, and a patient has 45 notes on average, as in MIMIC-III; a patient's notes are
scattered over the file. A model trained on generated patients predicts their phenotypes,
in one process and then in workers, and the predictions are compared by SHA-256. The time
of a tenth of the notes is subtracted, so the start of Python and of the workers does not
count. With `--only-workers`, workers predict all notes, and nothing else is compared.
With `--train`, a job also learns from these notes. All runs are whole commands.

Seconds are wall-clock seconds, which are what workers save, so use an idle machine.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

import fednotes as fn
from fednotes.apps.phenotyping.synthetic import generate_patients

sys.path.append(str(Path(__file__).resolve().parent / "helpers"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from command_runs import (
    NotesFile,
    compare_with_workers,
    measure_command,
    measure_prediction,
)
from scratch import scratch

NOTES_OF_A_PATIENT = 2_083_180 / 46_520
CHARACTERS = 1_800  # of a note, on average
HEADER = (
    "ROW_ID,SUBJECT_ID,HADM_ID,CHARTDATE,CHARTTIME,STORETIME,CATEGORY,DESCRIPTION,CGID,"
    "ISERROR,TEXT"
).split(",")
CATEGORIES = ("Nursing/other", "Radiology", "Nursing", "ECG", "Physician", "Discharge")
# Sentences without terms, which stand between those of the generated patients.
FILLERS = (
    "Plan discussed with the team on rounds this morning.",
    "Vital signs remained within the expected range overnight.",
    "The line was flushed, and the dressing was changed at 06:00.",
    "Family at the bedside and updated by the nurse on duty.",
    "Please see the flow sheet for the values of the last shift.",
)

JOB = {
    "method": "phenotype",
    "seed": 1,
    "conditions": ["federated"],
    "synthetic": {"sites": 2, "patients": 300},
    "training": {"minimum": 20, "min_patients": 0, "cycles": 2, "classifier_cycles": 2},
    "model": {"network": {"embedding": 32, "hidden": 32}},
}
# Codes of the patients, and the phenotypes that follow from them.
CODES = tuple(str(number) for number in range(4010, 4200, 5))
PHENOTYPES = {"first": ["icd9:401"], "second": ["icd9:414"]}


class Corpus(NamedTuple):
    """A file of generated notes.

    Attributes:
        notes: The file of notes.
        codes: The table of the patients' codes.
    """

    notes: NotesFile
    codes: Path


def write_corpus(folder: Path, number: int) -> Corpus:
    """Write a compressed table of notes, and a table of the patients' codes."""
    start = time.perf_counter()
    rng = np.random.default_rng(0)
    patients = max(1, round(number / NOTES_OF_A_PATIENT))
    # A few patients have very many notes.
    shares = rng.lognormal(0, 1, patients)
    owners = rng.choice(patients, number, p=shares / shares.sum())
    characters = 0

    folder.mkdir(exist_ok=True)
    path = folder / "NOTEEVENTS.csv.gz"
    with gzip.open(path, "wt", 1, encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(HEADER)
        texts = generate_texts(rng)
        for row, patient in enumerate(owners.tolist(), 1):
            text = next(texts)
            characters += len(text)
            category = CATEGORIES[row % len(CATEGORIES)]
            day = f"2101-{row % 12 + 1:02}-{row % 28 + 1:02}"
            table.writerow([row, patient, "", day, "", "", category, "", "", "", text])

    codes = folder / "codes.csv"
    with codes.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(["patient", "code"])
        for patient in range(patients):
            for code in rng.choice(CODES, 5, replace=False):
                table.writerow([patient, code])
    print(
        f"{number:,} notes of {len(np.unique(owners)):,} patients, "
        f"{characters / number:,.0f} characters on average, written in "
        f"{time.perf_counter() - start:.0f} s",
        flush=True,
    )
    return Corpus(NotesFile(path, number), codes)


def generate_texts(rng: np.random.Generator) -> Iterator[str]:
    """Yield texts of different lengths; half of their sentences name no concept."""
    notes = generate_patients("mimic", 2000, seed=5).notes
    sentences = [
        f"{sentence.strip()}."
        for texts in notes.values()
        for text in texts
        for sentence in text.split(".")
        if sentence.strip()
    ]
    mean = np.mean([len(each) for each in sentences[:5000]])
    mean_number = CHARACTERS / (mean + np.mean([len(each) for each in FILLERS]) + 2)
    while True:
        numbers = np.maximum(1, rng.gamma(1.5, mean_number / 1.5, 1000).astype(int))
        for number in numbers.tolist():
            parts = []
            for at in rng.integers(len(sentences), size=number).tolist():
                parts += [sentences[at], FILLERS[at % len(FILLERS)]]
            yield "\n".join(parts)


def train_model(out: Path) -> Path:
    """Train a small model on generated patients; return its folder."""
    fn.simulate(fn.job(JOB), out, workers=1)
    return out / "federated" / "model"


def write_job(folder: Path, corpus: Corpus, processes: int) -> Path:
    """Write a job that learns from the notes; return its file."""
    phenotypes = "\n".join(f"{name} = {codes}" for name, codes in PHENOTYPES.items())
    path = folder / f"job-{processes}.toml"
    path.write_text(
        f"""method = "phenotype"
conditions = ["federated"]

[concepts]
dictionary = "synthetic"
processes = {processes}

[phenotypes]
{phenotypes}

[training]
minimum = 1
min_patients = 0
systems = ["icd9"]
cycles = 1
classifier_cycles = 1

[model.network]
embedding = 32
hidden = 32

[sites.mimic]
notes = "{corpus.notes.path}"
codes = "{corpus.codes}"
codes_format = "table"
system = "icd9"
""",
        "utf-8",
    )
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--notes", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--only-workers", action="store_true", help="not in one process"
    )
    parser.add_argument("--train", action="store_true", help="also train on the notes")
    options = parser.parse_args()
    with scratch() as folder:
        corpus = write_corpus(folder / "many", options.notes)
        model = train_model(folder / "run")
        if options.only_workers:
            measure_prediction(model, corpus.notes, options.workers)
        else:
            few_notes = write_corpus(folder / "few", options.notes // 10).notes
            ratio = compare_with_workers(
                model, few_notes, corpus.notes, options.workers
            )
            print(f"mimic-workers ratio={ratio:.2f} against one process")
        if options.train:
            os.environ["FEDNOTES_CACHE"] = str(folder / "cache")
            job = write_job(folder, corpus, options.workers)
            words = ["simulate", str(job), "--out", str(folder / "trained")]
            run = measure_command([*words, "--workers", "1"])
            print(f"train: {run.describe(options.notes)}", flush=True)


if __name__ == "__main__":
    main()
