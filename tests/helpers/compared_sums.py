"""Run a job under the secure sum, and compare each of its sums with the plain one.

The plain sum (`Total.of`, float64) is the independent program. The secure one first
rounds each weight · value to a grid, so a sum is off by at most half a step for each
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
    """Sums securely, and keeps each total beside the plain one of the same updates."""

    def __init__(self, sites: Sequence[Any]) -> None:
        super().__init__(sites, secure=True)
        self.updates: list[Update] = []
        self.pairs: list[tuple[str, Total, Total]] = []

    def run(self, *arguments: Any) -> Update:
        update = super().run(*arguments)
        tensors = {
            name: value.detach().clone() for name, value in update.tensors.items()
        }
        self.updates.append(replace(update, tensors=tensors))
        return update

    def sum(self, task: str, tensors: Any = None, /, **options: Any) -> Total:
        self.updates = []
        total = super().sum(task, tensors, **options)
        self.pairs.append((task, total, Total.of(self.updates)))
        return total


def check_sums(engine: Compared) -> None:
    """Check the secure totals against the plain ones.

    Weights, counts and integers are equal. Other numbers differ by at most a step for
    each site, of the fixed grid at first and then of a grid that follows from the last
    total.
    """
    grid_steps: dict[tuple[str, str], float] = {}
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
            step = grid_steps.get((task, name), 2.0**-29)
            torch.testing.assert_close(
                secure.tensors[name],
                value,
                rtol=1e-15,
                atol=len(names) * step,
                msg=f"{task} {name}",
            )
            if torch.equal(value, value.round()):
                assert torch.equal(secure.tensors[name], value), (task, name)
            # The grid follows from the last total as the server has it.
            last = secure.tensors[name]
            largest = float(last.abs().max()) if last.numel() else 0.0
            grid_steps[task, name] = 2.0**-44 * largest if largest else 2.0**-29
