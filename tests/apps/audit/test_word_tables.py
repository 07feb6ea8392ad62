"""Words recovered from word tables, and masked words from an output bias."""

from __future__ import annotations

from pathlib import Path

from audit_jobs import (
    PRIVATE,
    SECURE,
    assert_hidden,
    attack_tagger,
    encoder_job,
    run_attack,
    tagger_job,
)

from fednotes.jobs.job import load_sites
from fednotes.jobs.job_file import parse_job


def test_rows_that_change_reveal_the_words_of_the_mini_batch() -> None:
    """A secure sum hides whose words they are, but not which."""
    for settings in ({}, {"federation": SECURE}):
        leak = attack_tagger("word tables", **settings)
        assert leak.proven
        assert leak.control == leak.success == 1.0


def test_rows_that_change_in_a_cycle_of_fine_tuning_reveal_its_words(
    bert: Path,
) -> None:
    """Few bits round the smallest changes away, so they hide a few words."""
    for compression, least in (("none", 1.0), ("packed", 0.9)):
        free = {"min_tokens": 0, "min_steps": 0, "compression": compression}
        leak = run_attack(encoder_job(bert, {"train": "all"}, **free), "word tables")
        assert leak.control == 1.0
        assert leak.success is not None
        assert leak.success >= least


def test_noise_hides_words() -> None:
    assert_hidden(attack_tagger("word tables", privacy=PRIVATE))


def test_frozen_tables_send_no_rows(bert: Path) -> None:
    for job in (
        tagger_job(model={"hashed_words": 0}),
        encoder_job(bert, {"train": "encoder"}),
    ):
        leak = run_attack(job, "word tables")
        assert not leak.applies
        assert "no table" in leak.why


def test_the_sign_of_an_output_bias_reveals_masked_words(
    bert: Path, tmp_path: Path
) -> None:
    """The bias is trained in the paper's setting, and frozen by default."""
    for name in ("north", "south"):
        notes = [d.text for d in load_sites(tagger_job()).data[name == "south"].train]
        (tmp_path / f"{name}.txt").write_text("\n\n".join(notes))
    table = {
        "method": "pretrain",
        "seed": 2,
        "training": {
            "cycles": 1,
            "head_cycles": 0,
            "min_tokens": 0,
            "min_steps": 0,
            "length": 32,
        },
        "model": {"encoder": str(bert)},
        "sites": {name: {"path": f"{name}.txt"} for name in ("north", "south")},
    }
    leak = run_attack(parse_job(table, "job", tmp_path, "job"), "output bias")
    assert not leak.applies
    table["model"] |= {"train": "all"}
    table["training"] |= {"local_epochs": 0.001, "compression": "none"}
    leak = run_attack(parse_job(table, "job", tmp_path, "job"), "output bias")
    assert leak.control == leak.success == 1.0
    tokens = run_attack(
        parse_job(table, "job", tmp_path, "job"), "tokens from the lowest"
    )
    assert tokens.control is not None, tokens
    assert tokens.control >= 0.9, tokens
    none = run_attack(
        parse_job(table, "job", tmp_path, "job"), "neighbours from convolutions"
    )
    assert none.why == "no convolution that reads words leaves a site"
