"""A job of two sites that trains in a second, and a corpus for each."""

from __future__ import annotations

from pathlib import Path

JOB = """\
method = "fedner"
seed = 3
conditions = ["federated"]
[training]
epochs = 1
batch_size = 16
[model]
hashed_words = 32
word_dim = 4
char_dim = 4
char_filters = 4
cnn_filters = 4
lstm_units = 4
"""
TAGGER = {
    "tagger": "cnn-clstm-crf", "hashed_words": 64, "word_dim": 4, "char_dim": 4,
    "char_filters": 6, "cnn_filters": 8, "lstm_units": 4,
}  # fmt: skip
TABLE = {  # of a job of generated sites
    "method": "fedner",
    "seed": 2,
    "synthetic": {"sites": 3, "sentences": 30},
    "training": {"epochs": 2, "batch_size": 24, "learning_rate": 0.01},
    "model": TAGGER,
}
SITES = """\
[sites.north]
path = "north.conll"
[sites.south]
path = "south.conll"
"""


def corpus(path: Path, label: str, word: str) -> None:
    """Write forty different sentences of one mention each."""
    rows = [
        f"Case O\n{word}{n} O\ntook O\n{word}ol B-{label}\n. O\n\n" for n in range(40)
    ]
    path.write_text("".join(rows), encoding="utf-8")
