"""Runs are compared on the data that they had."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tiny_jobs import JOB, SITES, corpus


def test_a_run_whose_sites_have_changed_is_not_compared(
    tmp_path: Path, run_cli: Any
) -> None:
    for name in ("north", "south"):
        corpus(tmp_path / f"{name}.conll", "Drug", name)
    job = tmp_path / "job.toml"
    run = tmp_path / "run"
    job.write_text(JOB.replace('["federated"]', '["alone", "federated"]') + SITES)
    assert run_cli("simulate", job, "--out", run)[0] == 0
    assert run_cli("compare", run, run, "--samples", 5)[0] == 0

    record = json.loads((run / "job.json").read_text())
    record["notes"]["south"] = "0" * 64
    (run / "job.json").write_text(json.dumps(record))
    code, _, err = run_cli("compare", run, run, "--samples", 5)
    assert code == 2
    assert "the data of site 'south', or their split into parts, have changed" in err
