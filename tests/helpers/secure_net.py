"""Sites that return prepared updates, behind the secure sum."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fault_net import Net, seal_of, toys
from fault_toy import JOB

from fednotes.core.federation import State
from fednotes.core.messages import Attached, Request
from fednotes.core.update import Tensors, Total, Update
from fednotes.engines.history import OPENED
from fednotes.engines.requests import Event
from fednotes.engines.secure import SecureSeal, SecureSum, make_context
from fednotes.privacy.secure_sum import Parties
from fednotes.privacy.secure_sum import messages as wire
from fednotes.privacy.secure_sum.messages import (
    KeysMessage,
    SharesMessage,
    Stage,
    Terms,
)
from fednotes.privacy.secure_sum.server import ServerChain

SITES = ("a", "b", "c", "d")


class Giver:
    """A site that returns prepared updates, the last one repeatedly, and counts its
    calls."""

    tasks: ClassVar[frozenset[str]] = frozenset({"give"})

    def __init__(
        self, name: str, updates: list[Update], calls: Counter[str] | None = None
    ) -> None:
        self.id, self.updates, self.at = name, updates, 0
        self.calls = Counter[str]() if calls is None else calls

    def give(self, tensors: Tensors) -> Update:
        self.calls[self.id] += 1
        self.at += 1
        return self.updates[min(self.at, len(self.updates)) - 1]

    def state(self) -> State:
        return State(self.at)

    def restore(self, state: State) -> None:
        self.at = state.round


def network(folder: Path, updates: Mapping[str, list[Update]], **options: Any) -> Any:
    """Return a net of givers, an engine over it, its events, and each site's calls."""
    calls, events = Counter[str](), list[Event]()
    identities = options.pop("identities", {})
    makes = {s: lambda s=s: Giver(s, updates[s], calls) for s in updates}
    seals = {"job": JOB, **options}

    def seal(site: str) -> SecureSeal:
        site_options = {
            "identity": identities.get(site),
            "record": folder / site / OPENED,
        }
        return SecureSeal(site, tuple(updates), **site_options, **seals)

    net = Net(makes, folder, seal=seal)
    summing = SecureSum(tuple(updates), job=JOB, **options)
    engine = net.engine(tuple(updates), summing=summing, notify=events.append)
    return net, engine, events, calls


class ByHand:
    """The sites' ends of the secure sum, driven message by message.

    Each message has its own number.
    """

    def __init__(self, sites: Sequence[str]) -> None:
        self.names, self.run, self.number = tuple(sites), 0, 0
        self.seals = {s: SecureSeal(s, self.names, job=JOB, threshold=3) for s in sites}
        self.restart()

    def restart(self) -> None:
        self.run += 1
        self.chain = ServerChain(Parties(self.names, 3), make_context(JOB, self.run))

    def request(self, task: str, attached: Attached, counted: int = 0) -> Request:
        self.number += 1
        at = dict.fromkeys(self.names, counted)
        return Request(JOB, self.run, self.number, task, counted=at, attached=attached)

    def terms(self, metrics: Sequence[str] | None = None, **limits: int) -> Attached:
        """Return what all sites receive with a task, in a fresh exchange."""
        now, number = self.chain.start(), self.chain.number
        for seal in self.seals.values():
            reply = seal.answer_stage(self.request("@keys", wire.pack(Stage(number))))
            now.add_keys(wire.read_message(KeysMessage, reply.facts))
        encoded = wire.pack(Stage(number, now.collect_keys()))
        for seal in self.seals.values():
            reply = seal.answer_stage(self.request("@shares", encoded))
            now.add_shares(wire.read_message(SharesMessage, reply.facts))
        names = None if metrics is None else tuple(metrics)
        return wire.pack_boxes(
            Terms(number, self.names, names, limits), now.collect_boxes()
        )


def random_updates(seed: int, rounds: int = 3) -> dict[str, list[Update]]:
    """Return updates of several types and unequal weights (one of them zero), with
    counts and other metrics."""
    updates: dict[str, list[Update]] = {}
    for number, site in enumerate(SITES):
        generator = torch.Generator().manual_seed(100 * seed + number)
        updates[site] = []
        for _ in range(rounds):
            tensors = {
                "layer.weight": torch.randn(7, 5, generator=generator),
                "half": torch.randn(6, generator=generator).bfloat16(),
                "double": torch.randn(4, generator=generator, dtype=torch.float64),
                "counts": torch.randint(-9, 10**9, (5,), generator=generator),
                "empty": torch.empty(0, 3),
                "scalar": torch.randn((), generator=generator),
            }
            metrics = {
                "loss": float(torch.randn((), generator=generator)),
                "notes": 1000 + number,
            }
            updates[site].append(Update(tensors, 31.0 * number, metrics))
    return updates


def check(total: Total, updates: list[Update], step: float = 2.0**-29) -> None:
    """Compare a total with the plain sum in float64."""
    plain = Total.of(updates)
    assert (total.sites, total.weight) == (len(updates), plain.weight)
    assert list(total.metrics) == list(plain.metrics)
    for name, number in plain.metrics.items():
        assert total.metrics[name] == pytest.approx(number, rel=1e-15)
        assert total.metrics[name] == number or number != int(number)
    assert list(total.tensors) == list(plain.tensors)
    for name, value in plain.tensors.items():
        assert total.tensors[name].dtype == value.dtype == torch.float64
        atol = {"double": 1e-12, "counts": 0.0}.get(name, len(updates) * step)
        torch.testing.assert_close(total.tensors[name], value, rtol=1e-15, atol=atol)


def tasks(net: Net, site: str = "a") -> list[str]:
    return [request.task for to, request, _ in net.sent if to == site]


def secure_toys(
    folder: Path,
    chaos: random.Random | None = None,
    threshold: int | None = None,
    **options: Any,
) -> Net:
    """Return the sites of the toy job, behind the secure sum."""
    seal = partial(seal_of, folder, threshold=threshold)
    return toys(folder, chaos, seal=seal, **options)
