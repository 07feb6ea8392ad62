"""Small jobs of three hospitals, and generated notes for their sites."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from fednotes.data.synthetic import generate, write_sites

SMALL = """
[model]
tagger = "cnn-clstm-crf"
hashed_words = 64
word_dim = 6
char_dim = 4
char_filters = 6
cnn_filters = 8
lstm_units = 6
"""
NAMES = ("discharge", "reports", "posts")
SITES = "".join(f"[sites.{name}]\n" for name in NAMES)
FEDERATION = "[federation]\npause = 0.1\nknock_every = 0\ntimeout = 20\n"
FEDNER = f"""
method = "fedner"
seed = 3
{FEDERATION}
[training]
epochs = 2
batch_size = 16
personal_epochs = 1
{SMALL}
{SITES}
"""
PRIVATE = (
    FEDNER.replace("[federation]", "[federation]\nsecure_sum = true")
    .replace("personal_epochs = 1", "")
    .replace(
        "[training]",
        '[privacy]\nepsilon = 8.0\nrate = 0.5\nunit = "document"\n[training]',
    )
)
DISTILL = f"""
method = "distill"
seed = 3
{FEDERATION}
[training]
rounds = 3
unannotated = "pseudo"
weighting = true
{SMALL}
{SITES}
"""
SHORT = DISTILL.replace("rounds = 3", "rounds = 2")
SECURE = SHORT.replace("[federation]", "[federation]\nsecure_sum = true")
QUICK = SHORT.replace("weighting = true", "weighting = false").replace("= 20", "= 0.1")
FEDMD = f"""
method = "fedmd"
seed = 3
{FEDERATION.replace("[federation]", "[federation]" + chr(10) + "secure_sum = true")}
[training]
rounds = 1
first_epochs = 1
local_epochs = 1
public_sentences = 20
{SMALL}
{SITES}
[sites.reports.model]
tagger = "cnn-clstm-crf"
hashed_words = 48
char_dim = 3
char_filters = 5
cnn_filters = 6
lstm_units = 4
[sites.reports.training]
learning_rate = 1e-2
"""
FINETUNE = f"""
method = "finetune"
seed = 3
{FEDERATION}
[training]
cycles = 2
batch_size = 8
learning_rate = 1e-3
[model]
encoder = "BERT"
{SITES}
"""


def corpus(folder: Path, sentences: int = 30) -> dict[str, dict[str, Any]]:
    """Write generated notes of three sites into three folders; return their tables."""
    hospitals = generate(num_sites=3, sentences_per_site=sentences, seed=1)
    shutil.rmtree(folder, ignore_errors=True)
    write_sites(hospitals, folder, "conll")
    parts = ("train", "valid", "test")
    return {
        site.data.id: {
            part: str(folder / site.data.id / f"{part}.conll") for part in parts
        }
        for site in hospitals
    }
