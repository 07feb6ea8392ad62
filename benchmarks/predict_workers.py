"""Speed of `fednotes predict` in worker processes and in one process.

    python benchmarks/predict_workers.py [--notes 20000] [--texts 4] [--workers 2]
        [--only-workers]

A light tagger is trained on generated sentences. It predicts generated notes, each of
which joins a few texts, from a file into a file. All runs are whole commands. The time
of a tenth of the notes is subtracted, so the start of Python and of the workers does not
count. The predictions are compared by SHA-256; with `--only-workers`, workers predict
all notes, and nothing else runs. Peak memory is that of the command and of its largest
worker.

Seconds are wall-clock seconds, which are what workers save, so use an idle machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import fednotes as fn
from fednotes.data.synthetic import generate

sys.path.append(str(Path(__file__).resolve().parent / "helpers"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from command_runs import NotesFile, compare_with_workers, measure_prediction
from scratch import scratch

JOB = {
    "method": "fedner",
    "seed": 1,
    "conditions": ["federated"],
    "synthetic": {"sites": 2, "sentences": 300},
    "model": fn.job("demo").table["model"],
    "training": {"learning_rate": 0.004, "epochs": 4, "patience": 4},
}


def train(out: Path) -> Path:
    """Train a light tagger; return its folder."""
    fn.simulate(fn.job(JOB), out, workers=1)
    return next(path for path in sorted(out.rglob("model")) if path.is_dir())


def write_notes(folder: Path, number: int, texts_of_a_note: int) -> NotesFile:
    """Write a file of generated notes; print the mean number of their characters."""
    site = generate(num_sites=1, sentences_per_site=4000, seed=7)[0].data
    texts = [document.text for document in (*site.train, *site.valid, *site.test)]
    characters = 0
    path = folder / f"{number}-notes.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for n in range(number):
            first = n * texts_of_a_note
            parts = [texts[(first + k) % len(texts)] for k in range(texts_of_a_note)]
            text = "\n".join([f"Note {n}.", *parts])
            characters += len(text)
            file.write(json.dumps({"id": str(n), "text": text}) + "\n")
    print(f"{number:,} notes of {characters / number:,.0f} characters on average")
    return NotesFile(path, number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--notes", type=int, default=20_000)
    parser.add_argument("--texts", type=int, default=4, help="texts per note")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--only-workers", action="store_true", help="not in one process"
    )
    options = parser.parse_args()
    with scratch() as folder:
        model = train(folder / "run")
        notes = write_notes(folder, options.notes, options.texts)
        if options.only_workers:
            measure_prediction(model, notes, options.workers)
            return
        few_notes = write_notes(folder, options.notes // 10, options.texts)
        ratio = compare_with_workers(model, few_notes, notes, options.workers)
        print(f"predict-workers ratio={ratio:.2f} against one process")


if __name__ == "__main__":
    main()
