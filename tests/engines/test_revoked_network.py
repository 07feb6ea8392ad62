"""A revoked kit on a network of real processes: what the authority says travels by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

import intruders
from intruders import Network, log_of, until

from fednotes.engines.nvflare.authority import ProjectConfig, authority_of, provision
from fednotes.engines.nvflare.certificates import Trust, take
from fednotes.engines.nvflare.processes import Known, connected, contact_of, status

pytestmark = [pytest.mark.slow, pytest.mark.network]


@pytest.fixture
def net(tmp_path: Path) -> Iterator[tuple[Network, ProjectConfig, Path]]:
    project, out = intruders.project(intruders.free_port(), "h1", "h2"), tmp_path / "kits"
    net = Network(provision(project, out))
    try:
        yield net, project, out
    finally:
        net.stop()


def hears(kit: Path) -> bool:
    return connected(contact_of(kit, status(kit).pid), time.time())


def last(kit: Path) -> float:
    return (contact_of(kit, status(kit).pid) or Known()).last


def test_a_revoked_site_is_shut_out_and_everybody_learns_of_it(
    net: tuple[Network, ProjectConfig, Path],
) -> None:
    """h1 gets the list as a file, the server from h1, and h2's and the old admin's kits are out."""
    network, project, out = net
    h1, h2, server = network.kits["h1"], network.kits["h2"], network.server
    network.start(server, h1, h2)
    assert until(lambda: hears(h1) and hears(h2), 60)
    assert network.admin("print(sorted(server.sites()))") == "['h1', 'h2']"
    provision(project, out, revoke=["h2", "admin"])
    assert take(h1, (out / "trust.pem").read_bytes())
    assert until(lambda: Trust.of(server / "startup").number == 2, 30)
    refused = time.time()
    assert until(
        lambda: "a connection of h2 was closed: its certificate was revoked on" in log_of(server),
        20,
    )
    assert "what the authority says now was brought by h1" in log_of(server)
    assert until(lambda: last(h1) > refused + 6, 30)
    assert last(h2) < refused + 6
    said = network.admin("print(sorted(server.sites()))")
    assert "['h1" not in said
    assert "does not answer" in said or "does not know this certificate" in said


def test_a_root_is_replaced_while_sites_are_connected(
    net: tuple[Network, ProjectConfig, Path],
) -> None:
    """The server's new certificate is taken by a site that does not know the new root yet."""
    from fednotes.engines.nvflare.certificates import request, take_renewal

    network, project, out = net
    h1, server = network.kits["h1"], network.server
    authority = authority_of(project, out)
    authority.replace(30)
    take_renewal(server, authority.renew(request(server), project.kit_of))
    authority.keep()
    assert len(Trust.of(server / "startup").roots) == 2
    assert len(Trust.of(h1 / "startup").roots) == 1
    network.start(server, h1)
    assert until(lambda: hears(h1), 60)
    assert until(lambda: len(Trust.of(h1 / "startup").roots) == 2, 20)
    network.stop(h1)
    take_renewal(h1, authority.renew(request(h1), project.kit_of))
    network.start(h1)
    assert until(lambda: hears(h1), 60)
    assert network.admin("print(sorted(server.sites()))") == "['h1']"  # of the old root
