"""Warnings if the mini-batches of many sites exceed the job's batch size."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_jobs import TABLE

from fednotes.jobs.job_file import parse_job
from fednotes.jobs.progress import ProgressListener
from fednotes.jobs.simulate import simulate
from fednotes.methods import averaging, fedner, finetune


class WarningCollector(ProgressListener):
    """Keeps the warnings before training."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)


def test_a_thousand_sites_turn_a_batch_of_64_into_a_thousand() -> None:
    """By hand: 64 / 1,000 rounds to 0, and a quarter of that, rounded up, is 1."""
    config = fedner.Config(batch_size=64, sites=1000)
    (warning,) = fedner.METHOD.list_size_warnings(config, [30] * 1000)
    assert warning.startswith(
        "batch_size = 64 becomes 1,000: each of the 1,000 sites adds at least 1 example"
    )


def test_the_warning_names_the_least_share() -> None:
    """By hand: each of ten equal sites has 6.4 of 64, so 6, and the job wants 20 of
    each."""
    config = fedner.Config(batch_size=64, least_share=20, sites=10)
    (warning,) = fedner.METHOD.list_size_warnings(config, [100] * 10)
    assert warning.startswith(
        "batch_size = 64 becomes 200: each of the 10 sites adds at least 20 exam"
    )


def test_rounding_causes_no_warning() -> None:
    """By hand: three equal sites have 21.33 of 64, so 21 each and 63 together; one
    without notes adds nothing."""
    config = fedner.Config(batch_size=64, sites=3)
    assert fedner.METHOD.list_size_warnings(config, [100] * 3) == ()
    assert fedner.METHOD.list_size_warnings(config, [100, 100, 100, 0]) == ()


def test_the_warning_applies_only_to_shared_batches_of_averaging() -> None:
    config = finetune.Config(batch="shared", batch_size=8, sites=100)
    (warning,) = averaging.list_size_warnings(config, [50] * 100)
    assert warning.startswith("batch_size = 8 becomes 100: each of the 100 sites")
    assert averaging.list_size_warnings(replace(config, batch="each"), [50] * 100) == ()


@pytest.mark.slow
def test_a_run_prints_the_warning_before_training_and_in_its_notes(
    tmp_path: Path,
) -> None:
    table = {
        **TABLE,
        "conditions": ["federated"],
        "training": {"rounds": 1, "batch_size": 2},
    }
    listener = WarningCollector()
    job = parse_job(table, "tiny", tmp_path, "tiny.toml")
    result = simulate(job, tmp_path / "run", listener=listener)
    warnings = [
        text
        for text in listener.texts
        if text.startswith("batch_size = 2 becomes 3: each of")
    ]
    assert len(warnings) == 1
    assert warnings[0] in result.notes
