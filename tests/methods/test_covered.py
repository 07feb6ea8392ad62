"""What an update covers, as reported by a site: each token once, however often read.

The expected numbers of words are lines of the files; those of sub-words come from the
tokenizer itself.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hospital_jobs import FEDNER, SITES, SMALL, corpus

from fednotes.jobs.job import load_sites
from fednotes.jobs.job_file import parse_job

DISTILL = f'method = "distill"\n[training]\nunannotated = "pseudo"\n{SMALL}\n{SITES}'


def member(job: str, epochs: float, data: dict[str, dict[str, Any]]) -> Any:
    table = tomllib.loads(job)
    table["training"] = {**table.get("training", {}), "local_epochs": epochs}
    if table["method"] == "fedner":
        table["training"]["exchange"] = "weights"
    table["sites"] = {name: dict(part_files) for name, part_files in data.items()}
    parsed = parse_job(
        {**table, "conditions": ["federated"]}, "job", Path(), "job.toml"
    )
    sites = load_sites(parsed).data
    return parsed.module.make_site(
        sites[0], parsed.module.configure(parsed.config, sites)
    )


def words_of(data: dict[str, dict[str, Any]]) -> list[str]:
    """Return the words of the first site's file."""
    lines = Path(next(iter(data.values()))["train"]).read_text().splitlines()
    return [line.split("\t")[0] for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("job", [FEDNER, DISTILL], ids=["fedner", "distill"])
def test_more_epochs_are_more_steps_over_the_same_words(
    job: str, tmp_path: Path
) -> None:
    data = corpus(tmp_path / "notes")
    words = len(words_of(data))
    single_epoch, five_epochs = (
        member(job, epochs, data).count_covered("train") for epochs in (1, 5)
    )
    assert single_epoch["tokens"] == five_epochs["tokens"] == words
    assert five_epochs["steps"] == 5 * single_epoch["steps"] > 0


def test_a_fine_tuned_encoder_covers_sub_words(bert: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    data = corpus(tmp_path / "notes")
    job = f'method = "finetune"\n[training]\nbatch_size = 8\n[model]\nencoder = "{bert}"\n{SITES}'
    single_epoch, five_epochs = (
        member(job, epochs, data).count_covered("train") for epochs in (1, 5)
    )
    assert single_epoch["tokens"] == five_epochs["tokens"]
    assert five_epochs["steps"] == 5 * single_epoch["steps"] > 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    pieces = [
        tokenizer(word, add_special_tokens=False)["input_ids"]
        for word in words_of(data)
    ]
    assert single_epoch["tokens"] == sum(map(len, pieces))


def test_a_fine_tuned_encoder_covers_at_least_its_shortest_sentences(
    bert: Path, tmp_path: Path
) -> None:
    """A quarter of an epoch is the last, incomplete mini-batch, or a full one: at least
    as many sub-words as the shortest sentences have, by the tokenizer itself."""
    transformers = pytest.importorskip("transformers")
    data = corpus(tmp_path / "notes")
    job = f'method = "finetune"\n[training]\nbatch_size = 7\n[model]\nencoder = "{bert}"\n{SITES}'
    tokenizer = transformers.AutoTokenizer.from_pretrained(bert)
    path = Path(next(iter(data.values()))["train"])
    lengths = []
    for block in path.read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        words = [line.split("\t")[0] for line in lines if line]
        pieces = [tokenizer(word, add_special_tokens=False) for word in words]
        if pieces:
            lengths.append(sum(len(each["input_ids"]) for each in pieces))
    batches = -(-len(lengths) // 7)
    site = member(job, 1 / batches, data)
    assert site.num_examples == len(lengths)
    fewest = len(lengths) - 7 * (batches - 1)
    expected = sum(sorted(lengths)[:fewest])
    assert site.count_covered("train")["tokens"] == expected < sum(lengths) / batches
