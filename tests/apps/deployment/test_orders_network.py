"""A server that gives needless orders, strangers at its port, and revoked kits.

The server that gives orders is the true one, with its true key, and its owner changed
its program. What the authority says travels by itself.
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
from intruders import Network, log_of, until

from fednotes.apps.deployment.nvflare.authority import open_authority
from fednotes.apps.deployment.nvflare.processes import (
    LastContact,
    is_connected,
    read_contact,
    read_status,
)
from fednotes.apps.deployment.nvflare.renewal import install_renewal, request_renewal
from fednotes.apps.deployment.nvflare.trust import Trust, install_trust

pytestmark = [pytest.mark.slow, pytest.mark.network]

JOB = "01234567-89ab-cdef-0123-456789abcdef"  # as the server names a submission
REFUSALS = ("invalid_request", "it does not name a job")


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Network]:
    with intruders.network(tmp_path / "kits", "h1", "h2") as running:
        yield running


def test_a_server_cannot_read_or_delete_files_of_a_site(
    tmp_path: Path, net: Network
) -> None:
    """Shell commands, logs, and runs by the name of a folder that is the site's own."""
    notes, site = tmp_path / "notes.txt", net.kits["h1"]
    notes.write_text("Mrs Doe has diabetes.")
    site_files = [
        site / "rules/ledger.jsonl",
        site / "state/first/opened",
        site / JOB / "meta.json",
    ]
    for path in site_files:
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
    orders_file, answered = tmp_path / "orders.json", tmp_path / "answers.json"
    orders_file.write_text(json.dumps(orders))
    loose = tmp_path / "loose"
    loose.mkdir()
    (loose / "sitecustomize.py").write_text(
        "import dishonest\ndishonest.give_orders()\n"
    )
    path = os.pathsep.join(
        [str(loose), str(intruders.HELPERS), *filter(None, sys.path)]
    )
    net.start(
        net.server,
        PYTHONPATH=path,
        FEDNOTES_TEST_ORDERS=str(orders_file),
        FEDNOTES_TEST_ANSWERS=str(answered),
    )
    net.start(site)
    assert until(answered.exists, 300)
    *refused, status, own_run = json.loads(answered.read_text())
    assert "Mrs Doe" not in str(refused)
    assert "PRIVATE KEY" not in str(refused)
    assert [
        order
        for order, answer in zip(orders[:-2], refused, strict=True)
        if answer not in REFUSALS
    ] == []
    assert json.loads(status)["running_jobs"] == []
    assert own_run in REFUSALS
    assert all(path.exists() for path in site_files)


def test_strangers_at_the_port_cannot_fill_a_file(net: Network) -> None:
    """Who has no certificate leaves nothing behind, however often they come."""
    net.start(net.server)

    def stranger() -> bool:
        try:
            with socket.create_connection(("127.0.0.1", net.project.port), 5) as plain:
                plain.sendall(b"GET / HTTP/1.0\r\n\r\n")
                while plain.recv(100):
                    pass
        except ConnectionResetError:
            pass
        except OSError:
            return False
        return True

    assert until(stranger, 300)
    assert all(stranger() for _ in range(50))
    time.sleep(1)  # for what is written afterwards
    assert sum(path.stat().st_size for path in net.server.glob("*.log*")) < 1000


# what the authority says


def hears(kit: Path) -> bool:
    return is_connected(read_contact(kit, read_status(kit).pid), time.time())


def last(kit: Path) -> float:
    return (read_contact(kit, read_status(kit).pid) or LastContact()).last


def test_a_revoked_site_is_excluded_and_all_kits_get_the_list(net: Network) -> None:
    """h1 gets the list as a file, the server from h1, and h2's and the old admin's kits
    are out."""
    h1, h2, server = net.kits["h1"], net.kits["h2"], net.server
    net.start(server, h1, h2)
    assert until(lambda: hears(h1) and hears(h2), 300)
    assert net.admin("print(sorted(server.list_sites()))") == "['h1', 'h2']"
    assert install_trust(
        h1, intruders.revoke(net.kits, "h2", "admin", project_of_kits=net.project)
    )
    assert until(lambda: Trust.read(server / "startup").number == 2, 30)
    refused = time.time()
    output = "closed a connection from h2: its certificate was revoked on"
    assert until(lambda: output in log_of(server), 20)
    assert "installed a newer trust list, which h1 sent" in log_of(server)
    assert until(lambda: last(h1) > refused + 6, 30)
    assert last(h2) < refused + 6
    output = net.admin("print(sorted(server.list_sites()))")
    assert "['h1" not in output
    assert "does not answer" in output or "does not know this certificate" in output


def test_a_root_is_replaced_while_sites_are_connected(net: Network) -> None:
    """The server's new certificate is taken by a site that does not know the new root
    yet."""
    h1, server = net.kits["h1"], net.server
    authority = open_authority(net.project, server.parent)
    authority.replace_root(30)
    install_renewal(
        server, authority.sign_requests(request_renewal(server), net.project.find_kit)
    )
    authority.save()
    assert len(Trust.read(server / "startup").roots) == 2
    assert len(Trust.read(h1 / "startup").roots) == 1
    net.start(server, h1)
    assert until(lambda: hears(h1), 300)
    assert until(lambda: len(Trust.read(h1 / "startup").roots) == 2, 20)
    net.stop(h1)
    install_renewal(
        h1, authority.sign_requests(request_renewal(h1), net.project.find_kit)
    )
    net.start(h1)
    assert until(lambda: hears(h1), 300)
    assert (
        net.admin("print(sorted(server.list_sites()))") == "['h1']"
    )  # of the old root
