"""One network on loopback: three sites and a server, from kits to the result."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

import intruders
import refusal_mains
from intruders import SUBMIT, UNTIL_FINISHED, Network, ward_job
from places import alive

from fednotes.apps.deployment.nvflare import processes
from fednotes.apps.deployment.nvflare.processes import NO_WATCH_VARIABLE
from fednotes.core.errors import ConfigError

pytestmark = pytest.mark.network
SITES = ("h1", "h2", "h3")
NEWEST = """
job = server.submit(Path(sys.argv[1]))
newest = lambda: [j for j in server.list_jobs() if j["name"] == "ward-1"][-1]
while newest()["status"] != "FINISHED:COMPLETED":
    time.sleep(0.5)
last = newest()["job_id"]
print(json.dumps([job, last, str(server.fetch(last, Path(sys.argv[2])))]))
"""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with intruders.network(
        tmp_path_factory.mktemp("network") / "kits", *SITES
    ) as running:
        yield running


def test_a_tampered_job_is_refused(net: Network, tmp_path: Path) -> None:
    """A job is changed in the server's store: the admin's signature tells."""
    net.start(net.server)
    job = net.admin(SUBMIT + "print(job)", ward_job(tmp_path, "tampered", SITES))
    stored = [p for p in (net.server / "store").rglob("*") if zipfile.is_zipfile(p)]
    assert stored
    for archive in stored:
        rewrite(archive, b'"rounds": 3', b'"rounds": 9')
    net.start(*(net.kits[site] for site in SITES))
    status, detail = json.loads(net.admin("job = sys.argv[1]" + UNTIL_FINISHED, job))
    assert status == "FINISHED:FAILED_TO_RUN"
    assert "signature" in " ".join(detail) + (net.server / "fednotes.log").read_text()
    assert not list(net.kits["h1"].glob("*/app_h1"))


def rewrite(archive: Path, original: bytes, replacement: bytes) -> None:
    with zipfile.ZipFile(archive) as file:
        content = {name: file.read(name) for name in file.namelist()}
    assert any(original in data for data in content.values())
    with zipfile.ZipFile(archive, "w") as file:
        for name, data in content.items():
            file.writestr(name, data.replace(original, replacement))


@pytest.mark.parametrize(
    ("who", "reason"),
    [("server", "BYOC not permitted"), ("site", "which may be code: custom/")],
)
def test_a_job_with_code_is_refused(
    net: Network, tmp_path: Path, who: str, reason: str
) -> None:
    """By the server; and by each site, where the server's owner lets code pass."""
    folder = ward_job(tmp_path, f"code-{who}", SITES, least=len(SITES))
    (folder / "app" / "custom").mkdir()
    (folder / "app" / "custom" / "evil.py").write_text("raise SystemExit\n")
    policy = net.server / "local" / "authorization.json"
    text = policy.read_text()
    if who == "site":
        policy.write_text(text.replace('"byoc": "none"', '"byoc": "any"'))
    net.stop(net.server)
    net.start(net.server)
    try:
        status, detail = net.run(folder)
    finally:
        policy.write_text(text)
    assert status == "FINISHED:FAILED_TO_RUN"
    assert any(reason in line for line in detail)
    sites = [reason in line for line in detail if line.startswith("h")]
    assert sites == [True] * 3 * (who == "site")


def test_a_run_continues_after_a_kill(net: Network, tmp_path: Path) -> None:
    """Started, run, killed in round 1, resubmitted by the watch, fetched, stopped:
    the numbers are those of plain arithmetic, and 5 MB frames travel fast."""
    kits = [net.server, *(net.kits[site] for site in SITES)]
    net.stop(*kits)
    net.start(*kits, **{NO_WATCH_VARIABLE: ""})
    assert all(processes.read_status(kit).is_running for kit in kits)
    with pytest.raises(ConfigError, match="h1 is already running"):
        processes.start(net.kits["h1"])
    folder = ward_job(
        tmp_path, "ward-1", SITES, rounds=4, least=3, die=1, numbers=1_250_000
    )
    first, second, fetched = json.loads(
        net.admin(NEWEST.strip(), folder, tmp_path / "out")
    )
    assert first != second
    rows = json.loads((Path(fetched) / "fednotes" / "result.json").read_text())
    assert [row["included"] for row in rows] == [list(SITES)] * 2
    assert [row["x"][0] for row in rows] == pytest.approx(
        refusal_mains.total(SITES, 4)[2:], rel=1e-5
    )
    for site in SITES:  # one process a submission
        assert len(set((net.kits[site] / "frames.txt").read_text().split())) == 2
    assert rows[-1]["seconds"] < 3.0  # 0.3 s on an idle machine
    assert sum(p.stat().st_size for p in net.kits["h1"].rglob("fednotes.log*")) < 20_000
    for kit in kits:
        assert not processes.stop(kit).is_running
    assert alive(net.server.parent) == []
