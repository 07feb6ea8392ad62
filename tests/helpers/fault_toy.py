"""A toy job with everything that real methods have, and the same job in NumPy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch

from fednotes.core.errors import TrainingError
from fednotes.core.federation import Federation, State
from fednotes.core.update import Tensors, Update

SIZES = {"a": 3, "b": 5, "c": 7}
SITES, ROUNDS, JOB = tuple(SIZES), 5, "job-1"
Took = dict[tuple[int, str], tuple[str, ...]]  # (round, task) → who was in that sum


class Toy:
    """A site that does a few float operations with everything that real methods have.

    That is private values, a prologue, a second task that needs the first, and tensors
    that are not sent twice.
    """

    tasks: ClassVar[frozenset[str]] = frozenset(
        {"count", "share", "train", "send", "evaluate", "finish"}
    )
    builds_on: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType(
        {"send": ("train",)}
    )

    def __init__(self, name: str, inside: Callable[[], None] = lambda: None) -> None:
        self._id, self.size, self._inside = name, SIZES[name], inside
        self.local_state = torch.zeros(4)
        self.part = 1.0
        self.steps = 0
        self._told: Tensors | None = None
        self._change: torch.Tensor | None = None

    @property
    def id(self) -> str:
        return self._id

    def count(self, tensors: Tensors) -> Update:
        return Update(metrics={"size": self.size})

    def share(self, tensors: Tensors, *, sizes: int) -> Update:
        self.part = self.size / sizes
        return Update(metrics={"share": self.part})

    def train(self, tensors: Tensors, *, round: int) -> Update:
        if not tensors:
            if self._told is None:
                raise TrainingError(f"site {self._id!r} has no parameters")
            tensors = self._told
        self.local_state = self.local_state * 0.5 + tensors["x"] * self.part
        self._inside()
        self.local_state = self.local_state + float(self.size + round)
        self.steps += 1
        self._change = self.local_state * 0.25 - tensors["x"]
        return Update({"least": self._change.abs()}, self.size, {"steps": self.steps})

    def send(self, tensors: Tensors) -> Update:
        if self._change is None:
            raise TrainingError(f"site {self._id!r} has no change to send")
        change, self._change = self._change, None
        return Update({"x": change * tensors["scale"]}, self.size)

    def evaluate(self, tensors: Tensors) -> Update:
        self._told = tensors
        return Update(metrics={"steps": self.steps})

    def finish(self, tensors: Tensors) -> Update:
        assert tensors or self._told
        return Update(metrics={"own": float(self.local_state.sum())})

    def state(self) -> State:
        return State(self.steps, {"own": self.local_state}, {"part": self.part})

    def restore(self, state: State) -> None:
        self.local_state, self.part, self.steps = (
            state.tensors["own"],
            state.facts["part"],
            state.round,
        )


def toy_job(federation: Federation, took: Took) -> np.ndarray:
    """Run the server side of the toy job.

    took: filled in with the sites in each sum, by round and task.
    """

    def total(round: int, task: str, tensors: Tensors, /, **options: Any) -> Any:
        sums = federation.sum(task, tensors, **options)
        took[round, task] = sums.included
        return sums

    state, broadcast = federation.resume(), None
    if state is None:
        sizes = int(total(-1, "count", {}).metrics["size"])
        total(-1, "share", {}, sizes=sizes)
        state = State(0, {"x": torch.ones(4)}, {})
    x = state.tensors["x"]
    for turn in federation.rounds(state.round, ROUNDS):
        least = total(
            turn.number, "train", {} if broadcast is x else {"x": x}, round=turn.number
        )
        scale = {"scale": least.mean()["least"] * 0.125}
        x = x + total(turn.number, "send", scale).mean()["x"]
        evaluated = turn.number % 2 == 1
        if evaluated:
            total(turn.number, "evaluate", {"x": x})
            broadcast = x
        turn.commit(State(turn.number + 1, {"x": x}), {}, evaluated=evaluated)
    metric_sum = total(ROUNDS, "finish", {} if broadcast is x else {"x": x}).metrics[
        "own"
    ]
    return np.concatenate([x.numpy(), [metric_sum]])


def by_hand(took: Mapping[tuple[int, str], tuple[str, ...]]) -> np.ndarray:
    """Compute the same job in NumPy: a site's work counts only in sums that include it.

    A site that missed the prologue does it later, with the same numbers.
    """
    local_state = {site: np.zeros(4, np.float32) for site in SITES}
    sizes = sum(SIZES[site] for site in took[-1, "count"])
    part = {site: np.float32(SIZES[site] / sizes) for site in SITES}
    x, half, quarter = np.ones(4, np.float32), np.float32(0.5), np.float32(0.25)

    def mean(values: Mapping[str, np.ndarray]) -> np.ndarray:
        total, weight = np.zeros(4), 0
        for site, value in values.items():
            total, weight = (
                total + value.astype(np.float64) * SIZES[site],
                weight + SIZES[site],
            )
        return (total / weight).astype(np.float32)

    for round in range(ROUNDS):
        change = {}
        for site in took[round, "train"]:
            local_state[site] = (
                local_state[site] * half
                + x * part[site]
                + np.float32(SIZES[site] + round)
            )
            change[site] = local_state[site] * quarter - x
        scale = mean({site: abs(value) for site, value in change.items()}) * np.float32(
            0.125
        )
        x = x + mean({site: change[site] * scale for site in took[round, "send"]})
    return np.concatenate(
        [x, [sum(float(local_state[s].sum()) for s in took[ROUNDS, "finish"])]]
    )
