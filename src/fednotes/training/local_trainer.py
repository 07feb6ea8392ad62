"""Local training in mini-batches between two exchanges.

It uses AdamW (or another optimizer) with a learning rate that rises and falls over all
of the site's steps, gradient clipping, the term of FedProx, and optionally lower
precision.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fednotes.core.seeds import Draws
from fednotes.core.tensors import seed_torch
from fednotes.core.update import Tensors
from fednotes.training.precision import Precision, setting_precision
from fednotes.training.row_adam import RowAdam
from fednotes.training.sites import Adam, require_finite_loss

# First words of the names of the parameters of LoRA adapters.
ADAPTERS = ("lora", "private")
Optimizer = Adam | RowAdam


class LocalSettings(Protocol):
    """The settings that local training depends on; see `Averaging` for each."""

    @property
    def learning_rate(self) -> float:
        """The largest learning rate."""

    @property
    def lora_learning_rate(self) -> float:
        """Learning rate of LoRA adapters; 0 uses `learning_rate`."""

    @property
    def warmup(self) -> float:
        """The fraction of steps over which the rate rises."""

    @property
    def decay(self) -> Literal["linear", "constant"]:
        """The schedule of the rate after the rise."""

    @property
    def weight_decay(self) -> float:
        """Weight decay of AdamW."""

    @property
    def clip(self) -> float:
        """Largest norm of a step's gradient; 0 does not clip."""

    @property
    def precision(self) -> Precision:
        """Precision of matrix products."""

    @property
    def proximal(self) -> float:
        """μ of FedProx."""


class Step(Protocol):
    """A part of a mini-batch, as large as memory allows."""

    @property
    def examples(self) -> int:
        """The number of words, masked tokens or patients."""

    def loss(self, batch: Sequence[Any]) -> Tensor:
        """Return this part's contribution to the mean loss of its batch, ()."""


class LocalTrainer:
    """Takes the optimizer steps of one site.

    Args:
        name: The site's name, from which the dropout of its steps is derived.
        settings: Learning rates, schedule, clipping, precision and FedProx.
        parameters: All trained parameters by name.
        draws: Source of the random dropout.
        device: Device of the model.
        optimizer: Optimizer of all parameters; None creates AdamW.
        warm_up: Names of the only parameters that a warm-up trains.
        warm_up_rate: The constant learning rate of the warm-up.

    Attributes:
        steps_taken: Number of steps so far, including the warm-up.
        steps_in_warm_up: Number of steps so far in the warm-up.
    """

    def __init__(  # noqa: PLR0913 - all but three are by keyword
        self,
        name: str,
        settings: LocalSettings,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        draws: Draws,
        device: torch.device,
        optimizer: Optimizer | None = None,
        warm_up: Collection[str] = (),
        warm_up_rate: float = 0.0,
    ) -> None:
        self._name = name
        self._settings = settings
        self._draws = draws
        self._device = device
        self._optimizer = optimizer or _make_adamw(settings, parameters)
        self._warm_up_optimizer = Adam(
            {name: parameters[name] for name in warm_up}, warm_up_rate
        )
        self.steps_taken = 0
        self.steps_in_warm_up = 0

    def step(self, parts: Sequence[Step], *, planned: int, start: Tensors) -> float:
        """Take a step along the gradient of a mini-batch's mean loss.

        Args:
            parts: The mini-batch.
            planned: Number of steps in the learning-rate schedule.
            start: The shared parameters at the cycle's start, by name, for FedProx.

        Returns:
            The loss, summed over the examples of the mini-batch.
        """
        loss = self._backward(parts, start, self._optimizer)
        self._optimizer.step(rate=self.compute_learning_rate(planned))
        self.steps_taken += 1
        return loss

    def step_in_warm_up(self, parts: Sequence[Step], *, start: Tensors) -> float:
        """Take a step on the warm-up's parameters; return the summed loss."""
        loss = self._backward(parts, start, self._warm_up_optimizer)
        self._warm_up_optimizer.step()
        self.steps_taken += 1
        self.steps_in_warm_up += 1
        return loss

    def _backward(
        self, parts: Sequence[Step], start: Tensors, optimizer: Optimizer
    ) -> float:
        """Compute the gradients; return the loss summed over examples."""
        seed = self._draws.seed_of("dropout", self._name, self.steps_taken)
        seed_torch(seed, self._device)
        mean_loss = 0.0
        for part in parts:
            with self.setting_precision():
                loss = part.loss(parts)
            mean_loss += require_finite_loss(
                loss, self._name, f"at step {self.steps_taken}"
            )
            loss.backward()

        parameters = optimizer.parameters
        self._add_proximal_gradient(parameters, start)
        if self._settings.clip:
            torch.nn.utils.clip_grad_norm_(parameters.values(), self._settings.clip)
        return mean_loss * sum(part.examples for part in parts)

    def _add_proximal_gradient(
        self, parameters: Mapping[str, Tensor], start: Tensors
    ) -> None:
        """Add the gradient of μ/2 |w - w_t|², FedProx's term, over shared parameters.

        The term is part of a site's objective (Li et al. 2020), so it is added before
        the gradient is clipped.
        """
        if not self._settings.proximal:
            return
        for name, value in start.items():
            parameter = parameters[name]
            if parameter.grad is not None:
                pull = parameter.detach() - value
                parameter.grad.add_(pull, alpha=self._settings.proximal)

    def setting_precision(self) -> AbstractContextManager[None]:
        """Return a context that sets the job's precision for matrix products."""
        return setting_precision(self._settings.precision, self._device)

    def compute_learning_rate(self, planned: int) -> float:
        """Return the rate of the next step: a linear rise, then a linear fall to zero.

        Args:
            planned: Number of steps in the whole schedule, excluding the warm-up.
        """
        settings = self._settings
        done = self.steps_taken - self.steps_in_warm_up
        rising_steps = settings.warmup * planned
        if done < rising_steps:
            return settings.learning_rate * (done + 1) / (rising_steps + 1)
        if settings.decay == "constant":
            return settings.learning_rate
        fraction_left = (planned - done) / max(1.0, planned - rising_steps)
        return settings.learning_rate * min(1.0, max(0.0, fraction_left))

    # State that must survive a restart.

    def state(self) -> dict[str, Tensor]:
        """Return the moments of both optimizers."""
        return self._optimizer.state() | self._warm_up_optimizer.state("first")

    def restore(
        self, tensors: Tensors, steps_taken: int, steps_in_warm_up: int
    ) -> None:
        """Restore saved moments and numbers of steps."""
        self._optimizer.restore(tensors)
        self._warm_up_optimizer.restore(tensors, "first")
        self.steps_taken = steps_taken
        self.steps_in_warm_up = steps_in_warm_up


def _make_adamw(
    settings: LocalSettings, parameters: Mapping[str, torch.nn.Parameter]
) -> Adam:
    """Return AdamW with a separate learning rate for LoRA adapters."""
    rate_of_changes = settings.lora_learning_rate or settings.learning_rate
    factor = rate_of_changes / settings.learning_rate
    return Adam(
        parameters,
        settings.learning_rate,
        settings.weight_decay,
        dict.fromkeys(ADAPTERS, factor),
    )
