"""A job under the secure sum, and each of its sums against the plain one.

The plain sum (`Total.of`, float64) is the independent program: the secure one rounds
each weight · value to a grid first, so the two differ by at most half a step of it a
site.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from fednotes.core.update import Total, Update
from fednotes.engines.inprocess import InProcess


class Compared(InProcess):
    """Under the secure sum, and each total beside the plain one of the same updates."""

    def __init__(self, sites: Sequence[Any]) -> None:
        super().__init__(sites, secure=True)
        self.own: list[Update] = []
        self.pairs: list[tuple[str, Total, Total]] = []

    def run(self, *arguments: Any) -> Update:
        update = super().run(*arguments)
        tensors = {
            name: value.detach().clone() for name, value in update.tensors.items()
        }
        self.own.append(replace(update, tensors=tensors))
        return update

    def sum(self, task: str, tensors: Any = None, /, **options: Any) -> Total:
        self.own = []
        total = super().sum(task, tensors, **options)
        self.pairs.append((task, total, Total.of(self.own)))
        return total


def check_sums(engine: Compared) -> None:
    """Weights, counts, integers: equal. Other numbers: S steps of a grid of 2^-29 at
    first, and of 2^-47 of the largest sum once there is a last total."""
    seen: dict[tuple[str, str], float] = {}
    names = [site.id for site in engine._sites]
    for task, secure, plain in engine.pairs:
        assert secure.included == tuple(names)
        assert secure.sites == plain.sites
        assert secure.weight == pytest.approx(plain.weight, rel=1e-15)
        assert list(secure.metrics) == list(plain.metrics)
        for name, number in plain.metrics.items():
            if number == int(number):
                assert secure.metrics[name] == number, (task, name)
            assert secure.metrics[name] == pytest.approx(number, rel=1e-14, abs=1e-15)
        assert list(secure.tensors) == list(plain.tensors)
        for name, value in plain.tensors.items():
            assert secure.tensors[name].dtype == torch.float64
            step = seen.get((task, name), 2.0**-29)
            largest = float(value.abs().max()) if value.numel() else 0.0
            torch.testing.assert_close(
                secure.tensors[name],
                value,
                rtol=1e-15,
                atol=len(names) * step,
                msg=f"{task} {name}",
            )
            if torch.equal(value, value.round()):
                assert torch.equal(secure.tensors[name], value), (task, name)
            seen[task, name] = 2.0**-44 * largest if largest else 2.0**-29


def compare(
    method: Any, data: Sequence[Any], settings: Any, **options: Any
) -> tuple[Compared, list[Any], Any, Any]:
    """The job under both; what it returns must be close. options: of a site, and
    `close`."""
    close = options.pop("close", {"rtol": 1e-5, "atol": 1e-6})
    engine, plain = (
        make([method.make_site(own, settings, **options) for own in data])
        for make in (Compared, InProcess)
    )
    ends = [method.train(each, settings) for each in (engine, plain)]
    check_sums(engine)
    assert ends[0].round == ends[1].round
    assert ends[0].tensors.keys() == ends[1].tensors.keys()
    for name, value in ends[1].tensors.items():
        torch.testing.assert_close(ends[0].tensors[name], value, **close, msg=name)
    return engine, list(plain._sites), *ends
