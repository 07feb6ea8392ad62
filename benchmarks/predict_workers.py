"""Time of `fednotes predict` with worker processes, beside the same in one process.

    python benchmarks/predict_workers.py [--notes 20000] [--texts 4] [--workers 2]

A light tagger is trained on generated sentences. It predicts generated notes, each of
which joins a few texts, from a file into a file. Both runs are whole commands, so the
time includes the start of Python and of the workers. Their files are compared by
SHA-256. Peak memory is that of the command and of the largest of its workers.

Seconds are wall-clock seconds, because workers save these: use a machine without other
work.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import fednotes as fn
from fednotes.data.synthetic import generate

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from scratch import scratch
from worker_runs import find_workers

JOB = {
    "method": "fedner",
    "seed": 1,
    "conditions": ["federated"],
    "synthetic": {"sites": 2, "sentences": 300},
    "model": fn.job("demo").table["model"],
    "training": {"learning_rate": 0.004, "epochs": 4, "patience": 4},
}


@dataclass(frozen=True)
class Run:
    """A command that has ended.

    Attributes:
        seconds: How long it took.
        cpu_seconds: CPU time of the command and its workers.
        command_mib: The peak of its memory.
        worker_mib: The largest peak of a worker; 0 without workers.
        sha256: The hash of the file that it wrote; "" if it wrote a folder.
    """

    seconds: float
    cpu_seconds: float
    command_mib: float
    worker_mib: float
    sha256: str = ""


def train(out: Path) -> Path:
    """Train a light tagger; return its folder."""
    fn.simulate(fn.job(JOB), out, workers=1)
    return next(path for path in sorted(out.rglob("model")) if path.is_dir())


def write_notes(path: Path, number: int, texts_of_a_note: int) -> float:
    """Write a file of generated notes; return the mean number of characters."""
    site = generate(num_sites=1, sentences_per_site=4000, seed=7)[0].data
    texts = [document.text for document in (*site.train, *site.valid, *site.test)]
    characters = 0
    with path.open("w", encoding="utf-8") as file:
        for n in range(number):
            first = n * texts_of_a_note
            parts = [texts[(first + k) % len(texts)] for k in range(texts_of_a_note)]
            text = "\n".join([f"Note {n}.", *parts])
            characters += len(text)
            file.write(json.dumps({"id": str(n), "text": text}) + "\n")
    return characters / number


def read_peak(process: int) -> float:
    """Return the peak of a process's memory in MiB; 0 if it has ended."""
    with suppress(OSError):
        for line in Path(f"/proc/{process}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0


def measure(model: Path, notes: Path, out: Path, workers: int) -> Run:
    """Predict notes with a command; measure its time and the peaks of memory."""
    words = ["predict", str(model), str(notes)]
    run = measure_command([*words, "--out", str(out), "--workers", str(workers)])
    return replace(run, sha256=hashlib.sha256(out.read_bytes()).hexdigest())


def measure_command(words: Sequence[str]) -> Run:
    """Run a command of fednotes; measure its time and the peaks of memory."""
    command = [sys.executable, "-m", "fednotes", *words]
    # It and its workers compute with one thread, and the libraries start no others.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    cpu_start = count_cpu_seconds()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    command_mib = 0.0
    worker_mib = 0.0
    while process.poll() is None:
        command_mib = max(command_mib, read_peak(process.pid))
        peaks = [read_peak(worker) for worker in find_workers(process.pid)]
        worker_mib = max([worker_mib, *peaks])
        time.sleep(0.25)
    seconds = time.perf_counter() - start
    assert process.returncode == 0
    return Run(seconds, count_cpu_seconds() - cpu_start, command_mib, worker_mib)


def count_cpu_seconds() -> float:
    """Return the CPU time of all processes that have ended and were started here."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--notes", type=int, default=20_000)
    parser.add_argument("--texts", type=int, default=4, help="texts per note")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with scratch() as folder:
        model = train(folder / "run")
        notes = folder / "notes.jsonl"
        characters = write_notes(notes, options.notes, options.texts)
        print(f"{options.notes:,} notes of {characters:,.0f} characters on average")
        runs: dict[int, Run] = {}
        for workers in (1, options.workers):
            out = folder / f"{workers}.jsonl"
            run = measure(model, notes, out, workers)
            runs[workers] = run
            print(
                f"{workers} process(es): {run.seconds:.1f} s, "
                f"{options.notes / run.seconds:.0f} notes/s, peak of memory "
                f"{run.command_mib:.0f} MiB, of a worker {run.worker_mib:.0f} MiB"
            )
    one, several = runs[1], runs[options.workers]
    assert one.sha256 == several.sha256
    ratio = one.seconds / several.seconds
    print(f"predict-workers ratio={ratio:.2f} against one process")


if __name__ == "__main__":
    main()
