"""Jobs to audit: generated sites with a light tagger, or with a tiny encoder."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiny_jobs import TABLE, TAGGER

from fednotes.apps.audit import Scene, load_attacks
from fednotes.jobs.audit_result import Leak
from fednotes.jobs.job import Job, load_sites
from fednotes.jobs.job_file import parse_job

SECURE = {"secure_sum": True}
PRIVATE = {"epsilon": 8.0, "delta": 1e-5, "unit": "document", "rate": 0.5}


def tagger_job(**tables: Any) -> Job:
    """Return a job on three sites that trains word tables; `tables` change it."""
    table: dict[str, Any] = {**TABLE, "model": {**TAGGER, "hashed_words": 4096}}
    for name, values in tables.items():
        table[name] = {**table.get(name, {}), **values}
    return parse_job(table, "job", Path(), "job")


def encoder_job(
    encoder: Path,
    model: dict[str, Any],
    privacy: dict[str, Any] | None = None,
    *,
    seed: int = 2,
    **training: Any,
) -> Job:
    """Return a job that fine-tunes an encoder on the same sites."""
    table = {
        "method": "finetune",
        "seed": seed,
        "synthetic": TABLE["synthetic"],
        "training": {"cycles": 1, "batch": "each", "batch_size": 2, **training},
        "model": {"kind": "token-classifier", "encoder": str(encoder), **model},
    }
    if privacy:
        table |= {"privacy": privacy, "preset": "paper"}
    return parse_job(table, "job", Path(), "job")


def scene_of(job: Job) -> Scene:
    """Return a job with its sites' data."""
    return Scene(job, load_sites(job))


def run_attack(target: Job | Scene, name: str) -> Leak:
    """Run the attack whose name contains `name`."""
    attack = next(attack for attack in load_attacks() if name in attack.name)
    return attack.run(target if isinstance(target, Scene) else scene_of(target))


def attack_tagger(name: str, **tables: Any) -> Leak:
    """Run an attack on `tagger_job(**tables)`, which trains once for all attacks."""
    return run_attack(_tagger_scene(json.dumps(tables)), name)


@cache
def _tagger_scene(tables: str) -> Scene:
    return scene_of(tagger_job(**json.loads(tables)))


def assert_hidden(leak: Leak) -> None:
    """Check that an attack on about a hundred targets is near chance."""
    assert leak.control is not None
    assert leak.control >= 0.99
    assert leak.success is not None
    assert leak.success < 0.3
    assert leak.details["auc"] == pytest.approx(0.5, abs=0.25)
