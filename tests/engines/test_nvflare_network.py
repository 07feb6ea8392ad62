"""One network on loopback: three sites and a server as processes, from kits to the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare")

from intruders import SUBMIT, UNTIL_FINISHED, as_admin, free_port, project

from fednotes.core.errors import ConfigError
from fednotes.engines import pipe
from fednotes.engines.nvflare import kit as kit_files
from fednotes.engines.nvflare import processes
from fednotes.engines.nvflare.authority import provision
from fednotes.engines.nvflare.processes import UNWATCHED

pytestmark = pytest.mark.network

MAINS = """
import json, os, time

class Host:
    def __init__(self, setup):
        self.site, self.frames = setup.site, 0
    def handle(self, frame):
        self.frames += 1
        time.sleep(0.05)
        return f"{self.site} {self.frames} {os.getpid()} {len(frame)}".encode()
    def close(self):
        pass

def site_main(setup):
    return Host(setup)

def server_main(setup, transport):
    path = setup.state / "rounds.json"
    rounds = json.loads(path.read_text()) if path.exists() else []
    for number in range(len(rounds), setup.job["rounds"]):
        begun, frame = time.monotonic(), bytes(setup.job["bytes"])
        frames = dict.fromkeys(setup.sites, frame)
        replies = dict(transport.exchange(frames, timeout=60, grace=60, enough=3))
        seconds = time.monotonic() - begun
        told = {site: reply.decode() for site, reply in sorted(replies.items())}
        rounds.append({"job": setup.job_id, "replies": told, "seconds": seconds})
        path.write_text(json.dumps(rounds))
        transport.publish({"round": number})
        if setup.job.get("die") == number and len({r["job"] for r in rounds}) == 1:
            os.kill(os.getpid(), 9)
    (setup.folder / "result.json").write_text(path.read_text())
"""


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Three sites, a server and an admin, not started; whatever is started ends here."""
    base = tmp_path_factory.mktemp("network")
    (base / "pipe_mains.py").write_text(MAINS)
    kits = provision(project(free_port(), "h1", "h2", "h3"), base / "kits")
    try:
        yield kits
    finally:
        for name, kit in kits.items():
            if name != "admin":
                processes.stop(kit, patience=5)


def launch(kits: dict[str, Path], *names: str, unwatched: bool = False) -> None:
    base = kits["server"].parents[1]
    variables = {
        pipe.SERVER_MAIN: "pipe_mains:server_main",
        pipe.SITE_MAIN: "pipe_mains:site_main",
        "PYTHONPATH": os.pathsep.join([str(base), *filter(None, sys.path)]),
    }
    if unwatched:
        variables[UNWATCHED] = "1"
    for name in names:
        processes.start(kits[name], variables)


def admin(kits: dict[str, Path], code: str, *arguments: object) -> str:
    """The last line that `as_admin` prints."""
    done = as_admin(kits["admin"], code, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def job(tmp_path: Path, run: str, **settings: Any) -> Path:
    declared = {"rounds": 4, "bytes": 5_000_000, **settings}
    return kit_files.job_folder(tmp_path, declared, run=run, sites=["h1", "h2", "h3"], min_sites=3)


def test_a_tampered_job_is_refused(network: dict[str, Path], tmp_path: Path) -> None:
    """A job is changed in the server's store: the admin's signature tells."""
    launch(network, "server", unwatched=True)
    job_id = admin(network, SUBMIT + "print(job)", job(tmp_path, "tampered"))
    stored = [p for p in (network["server"] / "store").rglob("*") if zipfile.is_zipfile(p)]
    assert stored
    for archive in stored:
        rewrite(archive, b'"rounds": 4', b'"rounds": 9')
    launch(network, "h1", "h2", "h3", unwatched=True)
    lines = "job = sys.argv[1]" + UNTIL_FINISHED
    status, detail = json.loads(admin(network, lines, job_id))
    assert status == "FINISHED:FAILED_TO_RUN"
    assert "signature" in " ".join(detail) + (network["server"] / "fednotes.log").read_text()
    assert not list(network["h1"].glob("*/app_h1"))


def rewrite(archive: Path, old: bytes, new: bytes) -> None:
    with zipfile.ZipFile(archive) as file:
        content = {name: file.read(name) for name in file.namelist()}
    assert any(old in data for data in content.values())
    with zipfile.ZipFile(archive, "w") as file:
        for name, data in content.items():
            file.writestr(name, data.replace(old, new))


@pytest.mark.parametrize("who", ["server", "site"])
def test_a_job_with_code_is_refused(network: dict[str, Path], tmp_path: Path, who: str) -> None:
    """By the server; and by each site, where the server's owner lets code pass."""
    folder = job(tmp_path, f"code-{who}")
    custom = folder / "app" / "custom"
    custom.mkdir()
    (custom / "evil.py").write_text("raise SystemExit\n")
    policy = network["server"] / "local" / "authorization.json"
    text = policy.read_text()
    if who == "site":
        policy.write_text(text.replace('"byoc": "none"', '"byoc": "any"'))
        restart(network)
    try:
        lines = SUBMIT + UNTIL_FINISHED
        status, detail = json.loads(admin(network, lines, folder))
    finally:
        if who == "site":
            policy.write_text(text)
            restart(network)
    assert status == "FINISHED:FAILED_TO_RUN"
    sites = [line for line in detail if line.startswith("h")]
    if who == "server":
        assert sites == []
        assert any("BYOC not permitted" in line for line in detail)
    else:
        assert len(sites) == 3
        assert all("BYOC not permitted" in line for line in sites)


def restart(kits: dict[str, Path]) -> None:
    processes.stop(kits["server"])
    launch(kits, "server", unwatched=True)


def test_a_run_goes_on_after_a_kill(network: dict[str, Path], tmp_path: Path) -> None:
    """Provisioned, started, run, killed in round 1, resubmitted by the watch, fetched, stopped."""
    names = ("server", "h1", "h2", "h3")
    for name in names:
        processes.stop(network[name], patience=5)
    launch(network, *names)
    assert all(processes.status(network[name]).running for name in names)
    with pytest.raises(ConfigError, match="h1 runs already"):
        processes.start(network["h1"])
    folder = job(tmp_path, "ward-1", die=1)
    wait = """
job = server.submit(Path(sys.argv[1]))
newest = lambda: [j for j in server.jobs() if j["name"] == "ward-1"][-1]
while newest()["status"] != "FINISHED:COMPLETED":
    time.sleep(0.5)
last = newest()["job_id"]
print(json.dumps([job, last, str(server.fetch(last, Path(sys.argv[2])))]))
"""
    first, second, fetched = json.loads(admin(network, wait.strip(), folder, tmp_path / "out"))
    rounds = json.loads((Path(fetched) / "fednotes" / "result.json").read_text())
    assert [r["job"] for r in rounds] == [first, first, second, second]
    for start in (0, 2):  # one process a site and submission, which counts its frames
        told = [
            [reply.split() for reply in r["replies"].values()] for r in rounds[start : start + 2]
        ]
        assert [[words[0] for words in reply] for reply in told] == [["h1", "h2", "h3"]] * 2
        assert [[words[1] for words in reply] for reply in told] == [["1"] * 3, ["2"] * 3]
        assert [words[2] for words in told[0]] == [words[2] for words in told[1]]
        assert {words[3] for reply in told for words in reply} == {"5000000"}
    assert rounds[3]["seconds"] < 3.0  # 0.3 s on an idle machine
    logs = sum(p.stat().st_size for p in network["h1"].rglob("fednotes.log*"))
    assert logs < 20_000
    for name in names:
        assert not processes.stop(network[name]).running
    listing = subprocess.run(
        ["ps", "-A", "-ww", "-o", "stat=,command="], capture_output=True, text=True
    )
    kits = str(network["server"].parent)
    assert not [x for x in listing.stdout.splitlines() if kits in x and x[0] != "Z"]
