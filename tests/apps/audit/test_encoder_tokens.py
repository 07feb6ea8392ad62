"""Tokens and their positions, recovered from the lowest layers of an encoder."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from audit_jobs import PRIVATE, assert_hidden, encoder_job, run_attack

from fednotes.apps.audit.attacks.encoder_tokens import score_places


def test_tokens_lie_in_the_span_of_the_lowest_layers(bert: Path) -> None:
    """A gradient reveals all tokens; a frozen lowest layer sends nothing."""
    single_step = {"local_epochs": 0.001, "compression": "none"}
    leak = run_attack(
        encoder_job(bert, {"train": "encoder"}, **single_step), "tokens from the lowest"
    )
    assert leak.control is not None
    assert leak.control >= 0.99
    top = run_attack(
        encoder_job(bert, {"train": "top", "top": 1}, **single_step),
        "tokens from the lowest",
    )
    assert not top.applies
    assert "no map" in top.why


def test_the_first_step_of_low_rank_changes_is_skipped(bert: Path) -> None:
    """One factor starts at zero, so at first the other moves by rounding alone."""
    single_step = {
        "local_epochs": 0.001,
        "compression": "none",
        "evaluate_every": 3,
        "cycles": 3,
    }
    leak = run_attack(
        encoder_job(bert, {"train": "lora"}, **single_step), "tokens from the lowest"
    )
    assert leak.details["auc"] > 0.6


@pytest.mark.slow
def test_adam_compression_and_low_ranks_do_not_hide_tokens() -> None:
    """A real encoder after one step of Adam, and after six low-rank steps."""
    single_step = {"local_epochs": 0.001, "compression": "none"}
    leak = run_attack(
        encoder_job(Path("minilm"), {"train": "encoder"}, **single_step),
        "tokens from the lowest",
    )
    assert leak.control is not None
    assert leak.control >= 0.99
    assert leak.success is not None
    assert leak.success > 0.8
    ranks = run_attack(
        encoder_job(Path("minilm"), {"train": "lora"}), "tokens from the lowest"
    )
    assert ranks.low is not None
    assert ranks.low > 0.1


@pytest.mark.slow
def test_one_step_reveals_positions_and_an_epoch_hides_them(bert: Path) -> None:
    """On average over seeds, and in float32, because some processors round to bfloat16
    by default, which changes what the updates reveal."""
    model = {"train": "encoder", "dropout": 0.0}

    def measure_advantage(local_epochs: float) -> float:
        """Return the mean advantage over chance."""
        advantages = []
        for seed in (2, 3, 4):
            job = encoder_job(
                bert,
                model,
                seed=seed,
                local_epochs=local_epochs,
                compression="none",
                precision="float32",
            )
            leak = run_attack(job, "positions")
            assert leak.control == 1.0
            assert leak.success is not None
            advantages.append(leak.success - leak.chance)
        return float(np.mean(advantages))

    one_step = measure_advantage(local_epochs=0.001)
    epoch = measure_advantage(local_epochs=1.0)
    assert one_step > 0.25 + epoch


def test_a_position_scores_higher_the_nearer_its_row_is_to_the_span() -> None:
    """Compare with the definition, computed number by number."""
    distances, times = [[0.1, 0.4], [0.2, 0.3], [0.9, 0.5]], [[3, 0], [1, 1], [0, 2]]
    scores = score_places(np.array(distances), np.array(times))
    for word, word_distances in enumerate(distances):
        for place in range(2):
            less = sum(math.log(d) for d in word_distances) / 2 - math.log(
                word_distances[place]
            )
            often = sum(times[word]) * sum(counts[place] for counts in times)
            assert scores[word, place] == pytest.approx(
                less + 0.02 * math.log(1 + often)
            )


@pytest.mark.slow
def test_noise_hides_tokens_of_an_encoder(bert: Path) -> None:
    job = encoder_job(bert, {"train": "encoder"}, cycles=2, privacy=PRIVATE)
    assert_hidden(run_attack(job, "tokens from the lowest"))
    leak = run_attack(job, "positions")
    assert (leak.success or 0) < leak.chance + 0.1
