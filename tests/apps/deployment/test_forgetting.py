"""A site forgets a run: what is deleted, what remains, and when it is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hospital_jobs import FEDNER
from hospitals import Hospitals
from kits import run_site_command, site_kit
from places import files_of

from fednotes.apps.deployment.nvflare import processes
from fednotes.apps.deployment.rules.guard import open_approvals
from fednotes.apps.deployment.rules.ledger import Ledger, verify_ledger
from fednotes.apps.deployment.site_file import SITE_FILE
from fednotes.engines.launch import holding_state

JOB_ID = "11fc898f-1fc4-4b3c-9533-b5b1d56a0f0c"


@pytest.fixture(scope="module")
def kit_after_a_run(site_notes: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a site's kit after a run; tests only read it."""
    hospitals = Hospitals(
        tmp_path_factory.mktemp("run"),
        FEDNER.replace("epochs = 2", "epochs = 1"),
        site_notes,
    )
    hospitals.run()
    return site_kit(hospitals.setups["posts"].kit)


@pytest.fixture
def kit(kit_after_a_run: Path, tmp_path: Path) -> Path:
    """Return a copy of the kit, with another run beside the first one."""
    kit = tmp_path / kit_after_a_run.name
    shutil.copytree(kit_after_a_run, kit)
    (kit / "state" / "run2").mkdir()
    (kit / "state" / "run2" / "kept").write_text("kept")
    config = kit / JOB_ID / "app_posts" / "config"
    config.mkdir(parents=True)
    (config / "job.json").write_text(json.dumps({"run": "run1"}))
    cache = tmp_path / "cache" / "features"
    cache.mkdir(parents=True)
    (cache / f"{'0' * 64}.npy").write_bytes(b"x" * 1000)
    (cache / "mine.txt").write_text("mine")
    for name in ("tokens", "concepts"):
        (cache.parent / name / ("0" * 32)).mkdir(parents=True)
        (cache.parent / name / ("0" * 32) / "notes").write_bytes(b"x" * 100)
    text = (kit / SITE_FILE).read_text()
    (kit / SITE_FILE).write_text(f"cache = {str(tmp_path / 'cache')!r}\n{text}")
    return kit


def test_forget_deletes_states_and_keeps_rules(kit: Path, tmp_path: Path) -> None:
    before, lines = files_of(kit), Ledger.in_kit(kit).read_head().lines
    run_folders = [kit / "state" / "run1", kit / "results" / "run1", kit / JOB_ID]
    assert {"tagger.safetensors", "scores.json"} <= {
        p.name for p in files_of(run_folders[1])
    }
    assert files_of(run_folders[0])
    sizes = [sum(map(len, files_of(folder).values())) for folder in run_folders]
    assert all(sizes)
    printed = run_site_command("forget", kit, "run1").splitlines()
    for folder, size in zip(run_folders, sizes, strict=True):
        assert f"deleted: {folder}, {size:,} bytes" in printed
        assert not folder.exists()
    assert f"deleted: {tmp_path / 'cache'}, 1,200 bytes" in printed
    assert any(
        line.startswith(f"{sum(sizes) + 1200:,} bytes in all") for line in printed
    )
    away = [folder.relative_to(kit) for folder in run_folders]
    stays = {
        p: raw
        for p, raw in before.items()
        if not any(p.is_relative_to(g) for g in away)
    }
    assert files_of(kit) == stays
    assert Path("rules/ledger.jsonl") in stays
    assert lines > 0
    assert verify_ledger(Ledger.in_kit(kit).path).is_intact
    assert len(open_approvals(kit).read_decisions()) == 1
    assert list((tmp_path / "cache" / "features").iterdir()) == [
        tmp_path / "cache" / "features" / "mine.txt"
    ]


@pytest.mark.parametrize(
    "name", ["run7", "../rules", "", ".", "/", "run1/site", "link"]
)
def test_forgetting_an_unknown_run_is_refused(kit: Path, name: str) -> None:
    (kit / "state" / "link").symlink_to(kit / "rules")
    before = files_of(kit)
    message = run_site_command("forget", "--", kit, name, code=2)
    assert f"has no files of a run {name!r}; its runs are: run1, run2" in message
    assert files_of(kit) == before


def test_forgetting_a_run_in_progress_is_refused(
    kit: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the lock that its process holds, and by the process, before it has the lock."""
    before = files_of(kit)
    with holding_state(kit / "state" / "run1"):
        assert "run run1 is in progress, and nothing was deleted" in run_site_command(
            "forget", kit, "run1", code=2
        )
    running = processes.Status("posts", "site", 7, (JOB_ID,), kit / "log")
    monkeypatch.setattr(processes, "read_status", lambda kit: running)
    assert "run run1 is in progress, and nothing was deleted" in run_site_command(
        "forget", kit, "run1", code=2
    )
    assert files_of(kit) == before
    assert "deleted: " in run_site_command(
        "forget", kit, "run2"
    )  # another run is no reason
