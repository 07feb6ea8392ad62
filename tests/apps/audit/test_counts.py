"""What counts of mentions reveal, and which rounds are observed for that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from audit_jobs import (
    PRIVATE,
    SECURE,
    attack_tagger,
    encoder_job,
    run_attack,
    scene_of,
    tagger_job,
)


def test_counts_of_an_evaluation_reveal_types() -> None:
    """Under a secure sum, only the types of all sites together are visible."""
    leak = attack_tagger("from counts")
    assert leak.success == leak.control == 1.0
    assert leak.low == 1.0  # all types are looked at, so there is no interval
    secure = attack_tagger("from counts", federation=SECURE)
    assert secure.success is not None
    assert secure.success < 1
    assert not attack_tagger("from counts", privacy=PRIVATE).applies


@pytest.mark.slow
def test_a_late_evaluation_is_attacked(bert: Path) -> None:
    """Even after more cycles than those whose tensors are kept."""
    few = {
        "local_epochs": 0.001,
        "cycles": 10,
        "evaluate_every": 10,
        "compression": "packed",
    }
    scene = scene_of(encoder_job(bert, {"train": "top", "top": 1}, **few))
    assert run_attack(scene, "from counts").success == 1.0
    assert sum(bool(observation.tensors) for observation in scene.observe()) < 10


@pytest.mark.slow
def test_two_rounds_are_attacked_if_each_is_evaluated(bert: Path) -> None:
    job = encoder_job(
        bert,
        {"train": "top", "top": 1},
        cycles=3,
        local_epochs=0.001,
        evaluate_every=1,
        compression="none",
    )
    observations = scene_of(job).observe()
    assert [each.task for each in observations] == ["train", "evaluate"] * 2


def test_two_sums_that_differ_by_a_site_reveal_its_counts() -> None:
    """Only if sites may drop out: a sum over all sites hides the counts."""
    leaked_counts = attack_tagger("two sums", federation={**SECURE, "min_sites": 2})
    assert leaked_counts.success == leaked_counts.control == 1.0
    assert leaked_counts.advantage > 0.5
    for settings in ({"federation": SECURE}, {}):
        assert not attack_tagger("two sums", **settings).applies
    scene = scene_of(tagger_job(federation={**SECURE, "min_sites": 2}))
    last = scene.observe()[-1]
    nothing = dict.fromkeys(last.audited_update.metrics, 0.0)  # no validation notes
    update = replace(last.audited_update, metrics=nothing)
    scene.observe()[-1] = replace(last, audited_update=update)
    leak = run_attack(scene, "two sums")
    assert leak.why == "no evaluation sends counts of the site"
