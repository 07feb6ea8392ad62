"""Bytes of a round of FedNER that trains word vectors: as rows, or as complete tables.

    FEDNOTES_CORPORA=... python benchmarks/word_rows.py [--rounds 10]

The sizes are the paper's: 40,000 words of 300 numbers, mini-batches of 64 sentences, and
the layers of section 4.1 (without a language model, which is frozen and is not sent), on
the three corpora of `fedner/real`. The vectors are random; their words are those of the
corpora and invented ones. Both runs end with the same bits. The count is of numbers in
the memory of one process, with four bytes per number; a secure sum sends eight bytes per
number to the server.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fednotes.data.text import tokenize
from fednotes.engines.inprocess import InProcess
from fednotes.engines.rounds import RoundResult
from fednotes.jobs.job import load_sites
from fednotes.jobs.job_file import load_job
from fednotes.methods import fedner
from fednotes.training import word_rows

WORDS, SIZE = 40_000, 300
# The exchange of rows does not depend on the evaluation of models. With all documents, it
# would take more than half of the time.
NUM_EVALUATED = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    if "FEDNOTES_CORPORA" not in os.environ:
        print("not measured: set FEDNOTES_CORPORA to the folder of the corpora")
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vectors.txt"
        job = load_job(
            "fedner/real",
            (
                "preset=paper",
                "model.contextual=''",
                f"model.word_vectors={path}",
                "model.train_words=true",
                f"training.rounds={rounds}",
            ),
        )
        data = [
            replace(
                site, valid=site.valid[:NUM_EVALUATED], test=site.test[:NUM_EVALUATED]
            )
            for site in load_sites(job).data
        ]
        forms = {
            d.text[a:b].lower()
            for site in data
            for d in site.train
            for a, b in d.tokens or tokenize(d.text)
        }
        words = [w for w in sorted(forms) if not w.isspace()]
        words = [*words, *(f"other{i}" for i in range(WORDS))][:WORDS]
        table = np.random.default_rng(1).normal(size=(WORDS, SIZE)).astype(np.float32)
        rows = (" ".join(f"{x:.4f}" for x in row) for row in table)
        lines = (f"{word} {row}\n" for word, row in zip(words, rows, strict=True))
        path.write_text("".join(lines), "utf-8")
        config = fedner.METHOD.configure(job.config, data)
        ends, sizes = [], []
        for name, least in (("whole tables", WORDS + 9), ("rows", word_rows.LEAST)):
            word_rows.LEAST = least
            round_results: list[RoundResult] = []
            members = [fedner.Site(site, config) for site in data]
            ends.append(
                fedner.train(
                    InProcess(members, observer=round_results.append), config
                ).tensors
            )
            # The last round evaluates, so it is left out.
            first, last = round_results[0], round_results[-2]
            each = (last.round - first.round) * len(data)
            up = (last.bytes_up - first.bytes_up) / each
            down = (last.bytes_down - first.bytes_down) / each
            sizes.append(up + down)
            print(
                f"{name:>12}: {up / 1e6:6.2f} MB up, {down / 1e6:6.2f} MB down a site and round"
            )
        same = all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
        print(f"{len(forms):,} words in the corpora; the same bits: {same}")
        print(
            f"word-rows ratio={sizes[0] / sizes[1]:.1f} against the bytes of whole tables"
        )


if __name__ == "__main__":
    main()
