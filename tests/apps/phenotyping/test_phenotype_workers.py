"""Phenotyping in worker processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from worker_runs import check_same_files

from fednotes.jobs.job_file import parse_job
from fednotes.jobs.workers import pool

TABLE = {
    "method": "phenotype",
    "seed": 2,
    "synthetic": {"sites": 3, "patients": 60},
    "training": {
        "minimum": 2,
        "min_patients": 0,
        "cycles": 2,
        "classifier_cycles": 2,
    },
    "model": {"network": {"embedding": 8, "hidden": 8}},
}


@pytest.mark.slow
def test_a_run_in_workers_writes_the_files_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "count_cores", lambda: 8)
    job = parse_job(TABLE, "job", tmp_path, "job.toml")
    check_same_files(job, tmp_path)
