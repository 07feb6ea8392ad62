"""Time of a complete simulation in worker processes and in one process.

    python benchmarks/workers.py [--workers 2] [--sites 4] [--sentences 2000]
        [--tuned 60] [--only fedner]

Both runs do everything that `fednotes simulate` does, from reading the sites to saving
their models, with one thread per process: each site alone, federated and pooled. The
time includes the start of the workers. The weights of both runs are compared by SHA-256.

The jobs are FedNER with its CNN-CLSTM-CRF, and fine-tuning of MiniLM with fewer
sentences. Seconds are wall-clock seconds, which are what workers save, so use an idle
machine.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path
from typing import Any

from fednotes.jobs.job_file import parse_job
from fednotes.jobs.simulate import simulate

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from scratch import scratch


def fedner_table(sites: int, sentences: int) -> dict[str, Any]:
    """Return a job of FedNER."""
    return {
        "method": "fedner",
        "seed": 1,
        "synthetic": {"sites": sites, "sentences": sentences},
        "training": {"epochs": 5, "patience": 5},
        "model": {"tagger": "cnn-clstm-crf", "hashed_words": 4096},
    }


def finetune_table(sites: int, sentences: int) -> dict[str, Any]:
    """Return a job of fine-tuning."""
    return {
        "method": "finetune",
        "seed": 1,
        "synthetic": {"sites": sites, "sentences": sentences},
        "training": {
            "cycles": 2,
            "min_tokens": 0,
            "min_steps": 0,
            "precision": "float32",
        },
        "model": {"encoder": "minilm"},
    }


def hash_weights(run: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of weights by its place."""
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.rglob("*.safetensors"))
    }


def measure(table: dict[str, Any], out: Path, workers: int) -> float:
    """Return the seconds of a run."""
    job = parse_job(table, "benchmark", out.parent, "benchmark")
    start = time.perf_counter()
    simulate(job, out, workers=workers)
    return time.perf_counter() - start


def compare(name: str, table: dict[str, Any], folder: Path, workers: int) -> None:
    """Print the seconds with one process and with workers, and their ratio."""
    # This process loads kernels, tokenizers and encoders before the clock starts. The
    # workers load their own, which counts.
    warm_up = table | {
        "conditions": ["federated"],
        "synthetic": {"sites": 2, "sentences": 10},
    }
    measure(warm_up, folder / f"{name}-warm-up", 1)
    one = measure(table, folder / f"{name}-1", 1)
    several = measure(table, folder / f"{name}-{workers}", workers)
    weights = hash_weights(folder / f"{name}-1")
    assert weights
    assert hash_weights(folder / f"{name}-{workers}") == weights
    print(f"{name}: 1 process {one:.1f} s, {workers} workers {several:.1f} s")
    print(f"workers-{name} ratio={one / several:.2f} against one process")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--sentences", type=int, default=2000)
    parser.add_argument("--tuned", type=int, default=60)
    methods = ["finetune", "fedner"]
    parser.add_argument("--only", choices=methods, nargs="+", default=methods)
    options = parser.parse_args()
    tables = {
        "finetune": finetune_table(options.sites, options.tuned),
        "fedner": fedner_table(options.sites, options.sentences),
    }
    with scratch() as folder:
        for name in options.only:
            compare(name, tables[name], folder, options.workers)


if __name__ == "__main__":
    main()
