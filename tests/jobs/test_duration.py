"""The time of a run is estimated from a trial on a few of its own sentences."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_jobs import TABLE

from fednotes.cli.display import describe_run_time
from fednotes.engines.rounds import RoundResult
from fednotes.jobs import duration
from fednotes.jobs.duration import SAMPLE_EXAMPLES, estimate_seconds
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.parts import Part, prepare


def parts_of(tmp_path: Path, **tables: Any) -> tuple[Any, list[Part]]:
    job = parse_job({**TABLE, **tables}, "job", tmp_path, "job")
    _, _, parts = prepare(job)
    return job, parts


def round_of(number: int) -> RoundResult:
    return RoundResult(number, {}, 3, 0, 0, 0.0, evaluated=False)


def test_the_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duration, "TRIAL_SECONDS", 4.0)
    times = iter([100.0, 101.5, 103.0])
    trial = duration._Trial(lambda: next(times))
    trial.observe(round_of(0))
    assert trial.compute_seconds_per_round() is None
    trial.observe(round_of(1))
    trial.observe(round_of(2))
    assert trial.compute_seconds_per_round() == 1.5


def test_a_trial_ends_once_it_has_taken_long_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(duration, "TRIAL_SECONDS", 4.0)
    times = iter([100.0, 104.5])
    trial = duration._Trial(lambda: next(times))
    trial.observe(round_of(0))
    with pytest.raises(duration._TrialOverError):
        trial.observe(round_of(1))


def test_the_estimate_is_the_pace_times_the_sentences_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sites of 120 sentences: each condition reads all of them ten times.

    A round of the trial reads 24 sentences, and is said to take 12 seconds. The last
    mini-batch of an epoch may be smaller than the others, and counts as a whole one.
    """
    job, parts = parts_of(
        tmp_path,
        synthetic={"sites": 3, "sentences": 120},
        training={"epochs": 10, "batch_size": 24},
    )
    monkeypatch.setattr(duration, "_time_round", lambda *_: 12.0)
    seconds = estimate_seconds(job, parts)
    assert list(seconds) == ["alone", "federated", "pooled"]
    for each in seconds.values():
        expected = 10 * 3 * 120 * 12.0 / 24
        assert expected <= each < expected + 10 * 12.0


def test_a_trial_trains_on_a_sample_of_each_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, parts = parts_of(tmp_path, synthetic={"sites": 3, "sentences": 120})
    tried: list[Part] = []
    monkeypatch.setattr(duration, "_time_round", lambda _, part: tried.append(part))
    assert estimate_seconds(job, parts) == {}
    (part,) = tried
    assert part.condition == "federated"
    for whole, sample in zip(parts[-2].sites, part.sites, strict=True):
        assert len(sample.train) == SAMPLE_EXAMPLES // 3
        text = "".join(note.text for note in whole.train)
        assert all(sentence.text in text for sentence in sample.train)
        rate = len(sample.train) / job.kind.count_examples(whole)
        assert len(sample.test) == int(rate * len(whole.test))


def test_a_real_trial_gives_an_estimate(tmp_path: Path) -> None:
    job, parts = parts_of(tmp_path)
    seconds = estimate_seconds(job, parts)
    assert 0 < sum(seconds.values()) < 600


def test_a_round_that_never_ends_is_left_without_an_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(duration, "MAX_SECONDS", 0.1)
    training = {"rounds": 2, "warmup": 1, "local_epochs": 1_000_000}
    job, parts = parts_of(tmp_path, method="distill", training=training)
    assert estimate_seconds(job, parts) == {}


def test_an_error_of_torch_in_a_trial_leaves_no_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> float:
        raise RuntimeError("not enough memory: you tried to allocate 9 bytes")

    job, parts = parts_of(tmp_path)
    monkeypatch.setattr(job.module, "train", fail)
    assert estimate_seconds(job, parts) == {}


def test_sites_without_samples_have_no_estimate(tmp_path: Path) -> None:
    job, parts = parts_of(tmp_path)
    job = replace(job, kind=replace(job.kind, shrink=None))
    assert estimate_seconds(job, parts) == {}


def test_a_long_run_can_begin_with_its_federated_part() -> None:
    lines = describe_run_time({"alone": 600.0, "federated": 540.0, "pooled": 660.0})
    assert lines == [
        "estimated time: about 30 min on one core, less if others are free",
        "the federated model needs about 9 min of it; to train only this one, add",
        "  --set 'conditions=[\"federated\"]'",
        "the same command with --resume instead trains the others later",
    ]
    assert len(describe_run_time({"federated": 7200.0})) == 1
