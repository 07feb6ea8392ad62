"""Exchanges in a row: two messages a site each while nothing fails, a fresh start when it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import pytest
import torch

from fednotes.core.errors import RefusedError, TrainingError
from fednotes.core.update import Total, Update
from fednotes.privacy.secure_sum import Parties
from fednotes.privacy.secure_sum.messages import KeysMessage
from fednotes.privacy.secure_sum.server import ServerChain
from fednotes.privacy.secure_sum.site import SiteChain

SITES = ("a", "b", "c", "d")
PARTIES = Parties(SITES, confirmed=False)


class Network:
    """Sites and a server, and how many messages each site sent by kind."""

    def __init__(self) -> None:
        self.sites = {name: SiteChain(name, PARTIES, b"job") for name in SITES}
        self.server = ServerChain(PARTIES, b"job")
        self.sent: Counter[str] = Counter()
        self.public: list[KeysMessage] = []

    def start(self, alive: Collection[str], number: int | None = None) -> None:
        if number is not None:
            self.server.number = number - 2
        now = self.server.start()
        number = self.server.number
        for name in alive:
            now.add_keys(self.sites[name].keys(number))
        keys = now.keys()
        for name in keys:
            now.add_shares(self.sites[name].at(number).shares(keys))
        self.sent["keys"] += len(keys)
        self.sent["shares"] += len(keys)
        now.boxes()

    def sum(self, updates: dict[str, Update], silent: Collection[str] = ()) -> Total:
        """An exchange with the sites of `updates`; those in `silent` do not answer the second
        request. Starts afresh unless all of them are prepared."""
        if not set(updates) <= set(self.server.prepared):
            self.start(tuple(updates))
        number, boxes = self.server.number, self.server.now.boxes()
        for name, update in updates.items():
            message = self.sites[name].masked(number, boxes[name], update)
            assert message.next_keys is not None
            self.public.append(message.next_keys)
            self.server.add_masked(message)
            self.sent["masked"] += 1
        requests, keys = self.server.requests()
        for name, request in requests.items():
            if name not in silent:
                self.server.add_unmask(self.sites[name].unmask(number, request, keys))
                self.sent["unmask"] += 1
        return self.server.total()


def updates_of(round: int, sites: Collection[str] = SITES) -> dict[str, Update]:
    """Integers, so that the plain sum is exact."""
    return {
        s: Update({"w": torch.arange(5.0) * (i + round)}, 1.0 + i, {"n": float(i)})
        for i, s in enumerate(SITES)
        if s in sites
    }


def check(total: Total, updates: dict[str, Update]) -> None:
    """Against the plain sum."""
    plain = Total.of(updates.values())
    assert torch.equal(total.tensors["w"], plain.tensors["w"])
    assert (total.weight, dict(total.metrics)) == (plain.weight, dict(plain.metrics))
    assert total.included == tuple(updates)


def test_two_messages_a_site_without_faults() -> None:
    """The first exchange has four; every exchange has keys of its own."""
    network = Network()
    for round in range(5):
        check(network.sum(updates_of(round)), updates_of(round))
    assert network.sent == {"keys": 4, "shares": 4, "masked": 20, "unmask": 20}
    assert network.server.number == 6
    public = [raw for k in network.public for raw in (k.sharing, k.masking, k.commitment)]
    assert len(set(public)) == len(public) == 60


def test_a_drop_out_goes_on_at_two_messages_and_comes_back_at_four() -> None:
    network = Network()
    check(network.sum(updates_of(0)), updates_of(0))
    assert network.server.prepared == SITES
    three = updates_of(1, ("a", "b", "c"))
    check(network.sum(three), three)  # d is silent
    assert network.server.prepared == ("a", "b", "c")
    check(network.sum(three), three)
    assert network.sent["keys"] == 4
    check(network.sum(updates_of(2)), updates_of(2))  # d is back
    assert network.sent["keys"] == 8
    check(network.sum(updates_of(3), silent=("b",)), updates_of(3))  # in the sum all the same
    assert network.server.prepared == ("a", "c", "d")


def test_after_a_failure_a_higher_number_starts_afresh() -> None:
    network = Network()
    network.sum(updates_of(0))
    two = updates_of(1, ("a", "b"))
    with pytest.raises(TrainingError, match="threshold is 3"):
        network.sum(two)  # a and b sent masked updates of the prepared exchange
    assert network.server.prepared == SITES  # still open for c and d, but nothing to reuse
    network.start(SITES)
    check(network.sum(updates_of(2)), updates_of(2))
    with pytest.raises(RefusedError, match="was used before"):
        network.sites["a"].keys(1)
    with pytest.raises(RefusedError, match="no keys for exchange 1"):
        network.sites["a"].masked(1, {}, Update())


def test_restarted_processes_meet_again_at_a_fresh_start() -> None:
    network = Network()
    network.sum(updates_of(0))
    network.sites["b"] = SiteChain("b", PARTIES, b"job")  # killed and started again
    boxes = network.server.now.boxes()
    with pytest.raises(RefusedError, match="start afresh"):
        network.sites["b"].masked(network.server.number, boxes["b"], updates_of(1)["b"])
    network.start(SITES)
    check(network.sum(updates_of(1)), updates_of(1))
    highest = network.server.number
    network.server = ServerChain(PARTIES, b"job")
    assert network.server.prepared == ()
    with pytest.raises(TrainingError, match="start one"):
        _ = network.server.now
    network.start(SITES, highest + 100)
    check(network.sum(updates_of(2)), updates_of(2))


def test_a_spoilt_piggyback_costs_no_sum() -> None:
    """The server sends a wrong list of next keys: the total is made, the next one starts afresh."""
    network = Network()
    network.start(SITES)
    number, boxes = network.server.number, network.server.now.boxes()
    for name, update in updates_of(0).items():
        network.server.add_masked(network.sites[name].masked(number, boxes[name], update))
    requests, keys = network.server.requests()
    assert set(keys) == set(SITES)
    for name, request in requests.items():
        answer = network.sites[name].unmask(number, request, {"a": keys["a"]})
        assert answer.next_shares is None
        network.server.add_unmask(answer)
    check(network.server.total(), updates_of(0))
    assert network.server.prepared == ()
    check(network.sum(updates_of(1)), updates_of(1))


def test_numbers_rise_and_an_older_exchange_is_forgotten() -> None:
    """A number has keys once, also the next one's that rode on a masked update. And what was
    masked in an exchange that was passed over can be opened by nobody any more."""
    network = Network()
    network.sum(updates_of(0))
    site = network.sites["a"]
    newest = network.server.number  # its keys rode on the first exchange's masked updates
    for number in (newest - 1, newest):
        with pytest.raises(RefusedError, match="was used before"):
            site.keys(number)
    first, boxes = site._open[newest], network.server.now.boxes()
    for name, update in updates_of(1).items():
        network.server.add_masked(network.sites[name].masked(newest, boxes[name], update))
    requests, keys = network.server.requests()
    server = ServerChain(PARTIES, b"job")
    server.number = newest - 1
    following = server.start()
    for name in SITES:
        following.add_keys(keys[name])
    keys = following.keys()
    for name in SITES:
        following.add_shares(network.sites[name].at(newest + 1).shares(keys))
    site.masked(newest + 1, following.boxes()["a"], updates_of(2)["a"])
    with pytest.raises(RefusedError, match=f"no keys for exchange {newest}"):
        site.unmask(newest, requests["a"])
    with pytest.raises(RefusedError, match="stands at 'closed'"):
        first.unmask(requests["a"])
    assert not first._seed
    assert not first._held
