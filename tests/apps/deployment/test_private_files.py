"""Files that derive from notes are private to their owner, whatever the umask."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hospital_jobs import DISTILL, FEDNER
from hospitals import Hospitals, ServerKilled
from places import opened
from tiny_jobs import TABLE

from fednotes.apps.deployment.rules.guard import RULES
from fednotes.apps.deployment.server import server_main
from fednotes.core import store
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.progress import ProgressListener
from fednotes.jobs.simulate import simulate
from fednotes.report.html import write_report


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.slow
def test_files_of_a_simulated_run_are_private(tmp_path: Path) -> None:
    """While it runs as well: then there are checkpoints, with modules that no site
    shares."""
    out, names = tmp_path / "new" / "run", list[str]()

    class Watching(ProgressListener):
        def round(self, result: Any) -> None:
            names.extend(path.name for path in out.rglob("*"))
            assert opened(out) == []

    out.mkdir(parents=True)
    # of a run that had not begun, by an earlier version
    (out / "job.json").write_text("{}")
    job = parse_job(TABLE, "tiny", tmp_path, "tiny.toml")
    simulate(job, out, listener=Watching())
    assert "tensors.safetensors" in names
    assert {"summary.json", "metrics.jsonl"} <= {path.name for path in out.iterdir()}
    assert opened(out) == []
    page = write_report(out, tmp_path / "mine" / "page.html")
    assert stat.S_IMODE(page.stat().st_mode) == 0o666
    assert stat.S_IMODE(page.parent.stat().st_mode) == 0o777


@pytest.mark.parametrize("job", [FEDNER, DISTILL], ids=["fedner", "distill"])
def test_files_of_kits_are_private_after_a_run(
    job: str, site_notes: Any, tmp_path: Path
) -> None:
    """Killed in the middle, so journals and checkpoints lie there; then to its end."""
    hospitals = Hospitals(tmp_path, job, site_notes, approve=False)
    kits = tmp_path / "kits"
    store.make_private(kits)  # folders that only the test made
    hospitals.network.kill = ("server", 12)
    hospitals.network.meanwhile = lambda: [
        hospitals.approve(name) for name in site_notes if not _approved(kits / name)
    ]
    with pytest.raises(ServerKilled):
        server_main(hospitals.setups[""], hospitals.network)
    names = {path.name for path in kits.rglob("*")}
    assert {"approvals.json", "ledger.jsonl", "journal", "states", "run.json"} <= names
    assert opened(kits) == []
    hospitals.run()
    names = {path.name for path in kits.rglob("*")}
    assert {
        "scores.json",
        "tagger.safetensors",
        "metrics.jsonl",
        "summary.json",
    } <= names
    assert opened(kits) == []


def _approved(kit: Path) -> bool:
    return (kit / RULES / "approvals.json").exists()


def test_existing_files_are_made_private_without_following_links(
    tmp_path: Path,
) -> None:
    kit, mine = tmp_path / "kit", tmp_path / "mine"
    (kit / "a").mkdir(parents=True)
    (kit / "a" / "b").write_text("")
    (kit / "script.sh").touch(mode=0o777)
    mine.mkdir()
    (mine / "c").write_text("")
    (kit / "folder").symlink_to(mine)
    (kit / "file").symlink_to(mine / "c")
    store.make_private(kit)
    assert opened(kit) == []
    assert stat.S_IMODE((kit / "script.sh").stat().st_mode) == 0o700
    assert sorted(opened(mine)) == [mine, mine / "c"]


def test_requested_outputs_follow_the_umask(tmp_path: Path) -> None:
    os.umask(0o027)
    store.write_text(tmp_path / "a" / "b", "text", private=False)
    store.write_folder(
        tmp_path / "c", lambda f: (f / "d").touch(mode=0o666), private=False
    )
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")
    }
    assert modes == {"a": 0o750, "b": 0o640, "c": 0o750, "d": 0o640}
