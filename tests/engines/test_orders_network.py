"""What a site does when the server gives orders that no run needs, and a server with strangers.

The server that gives orders is the true one, with its true key, and its owner changed its program.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

import intruders
from intruders import Network, until

from fednotes.engines.nvflare.authority import provision

pytestmark = [pytest.mark.slow, pytest.mark.network]

JOB = "01234567-89ab-cdef-0123-456789abcdef"  # as the server names a submission
REFUSALS = ("invalid_request", "no job's name")


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    kits = provision(intruders.project(intruders.free_port(), "h1"), tmp_path / "kits")
    network = Network(kits)
    try:
        yield network
    finally:
        network.stop()


def test_a_server_reads_no_file_of_a_site_and_deletes_none(tmp_path: Path, net: Network) -> None:
    """Shell commands, logs, and runs by the name of a folder that is the site's own."""
    notes, site = tmp_path / "notes.txt", net.kits["h1"]
    notes.write_text("Mrs Doe has diabetes.")
    kept = [site / "rules/ledger.jsonl", site / "state/first/opened", site / JOB / "meta.json"]
    for path in kept:
        path.parent.mkdir(parents=True)
        path.write_text("{}")
    orders = [
        ("sys.shell", f"cat {notes}", ""),
        ("sys.shell", "cat startup/client.key", ""),
        ("sys.info", "", ""),
        ("sys.report_env", "", ""),
        ("train.configure_job_log", "CRITICAL", JOB),
        ("sys.configure_site_log", "CRITICAL", ""),
        ("train.restart", "", ""),
        ("train.delete_run", "", "rules"),
        ("train.deploy", "", "state"),
        ("train.start_job", "", "startup"),
        ("train.check_status", "", ""),
        ("train.delete_run", "", JOB),
    ]
    given, answered = tmp_path / "orders.json", tmp_path / "answers.json"
    given.write_text(json.dumps(orders))
    loose = tmp_path / "loose"
    loose.mkdir()
    (loose / "sitecustomize.py").write_text("import dishonest\ndishonest.give_orders()\n")
    path = os.pathsep.join([str(loose), str(intruders.HELPERS), *filter(None, sys.path)])
    net.start(
        net.server,
        PYTHONPATH=path,
        FEDNOTES_TEST_ORDERS=str(given),
        FEDNOTES_TEST_ANSWERS=str(answered),
    )
    net.start(site)
    assert until(answered.exists, 60)
    *refused, status, own_run = json.loads(answered.read_text())
    assert "Mrs Doe" not in str(refused)
    assert "PRIVATE KEY" not in str(refused)
    assert [
        order for order, told in zip(orders[:-2], refused, strict=True) if told not in REFUSALS
    ] == []
    assert json.loads(status)["running_jobs"] == []
    assert own_run in REFUSALS
    assert all(path.exists() for path in kept)


def test_strangers_at_the_port_fill_no_file(net: Network) -> None:
    """Who has no certificate leaves nothing behind, however often they come."""
    net.start(net.server)
    facts = json.loads((net.server / "kit.json").read_text())
    address = ("127.0.0.1", facts["port"])

    def stranger() -> bool:
        try:
            with socket.create_connection(address, 5) as plain:
                plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
                while plain.recv(100):
                    pass
        except ConnectionResetError:
            pass
        except OSError:
            return False
        return True

    assert until(stranger, 60)
    assert all(stranger() for _ in range(50))
    time.sleep(1)  # for what is written afterwards
    assert sum(path.stat().st_size for path in net.server.glob("*.log*")) < 1000
