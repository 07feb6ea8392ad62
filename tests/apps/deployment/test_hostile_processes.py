"""Hostile servers and sites as real processes, and their effect on honest ones.

The hostile ones have true kits, and their owners changed their programs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

import intruders
import refusal_mains
from intruders import SUBMIT, UNTIL_FINISHED, Network, log_of, ward_job

pytestmark = [pytest.mark.slow, pytest.mark.network]
SITES = ("h1", "h2", "h3")


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    with intruders.network(
        tmp_path_factory.mktemp("hostile") / "kits", *SITES
    ) as running:
        running.start(running.server, running.kits["h1"], running.kits["h2"])
        yield running


def run_with(net: Network, hostile: str, folder: Path) -> str:
    """Run a job with h3 as this program of `refusal_mains`; return its status."""
    h3 = net.kits["h3"]
    net.start(h3, FEDNOTES_SITE_MAIN=f"refusal_mains:{hostile}")
    try:
        # A site that was stopped counts as connected for a minute.
        present = f"set({SITES}) <= set(server.list_sites(within=8))"
        code = f"while not {present}:\n    time.sleep(0.3)\n"
        output = net.admin(code + SUBMIT + UNTIL_FINISHED.strip(), folder)
        status, _ = json.loads(output)
        return str(status)
    finally:
        net.stop(h3)


def test_an_undecodable_result_of_a_site_does_not_end_a_run(
    net: Network, tmp_path: Path
) -> None:
    """NVFlare's server ends the process of a job at such a result. The numbers are
    those of plain arithmetic."""
    folder = ward_job(tmp_path, "unreadable", SITES, least=2)
    status = run_with(net, "unreadable_main", folder)
    assert "RuntimeError" in log_of(net.server)  # it was sent
    assert status == "FINISHED:COMPLETED"
    rows = json.loads((net.server / "state/unreadable/result.json").read_text())
    expected = refusal_mains.total(SITES, 3)
    assert [row["x"][0] for row in rows] == pytest.approx(expected, rel=1e-6)


def test_a_site_that_reports_its_failure_does_not_end_a_run(
    net: Network, tmp_path: Path
) -> None:
    """NVFlare's server ends the run of all sites; with the code of a forbidden
    component it even counts as aborted by a person, and is never handed in again."""
    folder = ward_job(tmp_path, "quitter", SITES, least=2)
    status = run_with(net, "quitter_main", folder)
    assert "h3 reports that its process of job " in log_of(net.server)
    assert status == "FINISHED:COMPLETED"
    rows = json.loads((net.server / "state/quitter/result.json").read_text())
    assert len(rows) == 3
    for row in rows:  # two sites are enough, so the third may come too late
        assert {"h1", "h2"} <= {*row["included"]}


def test_an_honest_run_finishes_and_is_fetched(net: Network, tmp_path: Path) -> None:
    """What is refused above and below is nothing that a run needs."""
    folder = ward_job(tmp_path, "honest", SITES[:2], least=2)
    code = (
        SUBMIT
        + UNTIL_FINISHED.strip()
        + "\nprint(server.fetch(job, Path(sys.argv[2])))"
    )
    fetched = Path(net.admin(code, folder, tmp_path / "out"))
    rows = json.loads((fetched / "fednotes/result.json").read_text())
    assert [row["included"] for row in rows] == [list(SITES[:2])] * 3
    for kit in (net.server, net.kits["h1"], net.kits["h2"]):
        assert "dropped an order of h1" not in log_of(kit)
        assert "dropped an order of admin" not in log_of(kit)
        assert "refused an order from the server" not in log_of(kit)


def test_a_site_cannot_give_orders_to_the_server(net: Network, tmp_path: Path) -> None:
    """Those that only the server's processes give each other: NVFlare's obey anyone who
    may speak to them."""
    folder = ward_job(tmp_path, "orders", SITES, least=len(SITES))
    status = run_with(net, "commander_main", folder)
    answers = json.loads((net.kits["h3"] / "orders.json").read_text())
    assert {name: code for name, code in answers.items() if code.startswith("ok")} == {}
    assert len(answers) == 8
    assert status == "FINISHED:COMPLETED"
    rows = json.loads((net.server / "state/orders/result.json").read_text())
    assert [row["included"] for row in rows] == [list(SITES)] * 3
    for order in (
        "get_clients",
        "app_command",
        "handle_dead_job",
        "fed.event",
        "abort",
    ):
        assert re.search(rf"dropped an order of h3: .*'{order}'", log_of(net.server))
