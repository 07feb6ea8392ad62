"""The mean of the models of a run's last rounds, as the model that is released.

De et al. 2022, "Unlocking high-accuracy differentially private image classification
through scale", section 3: the noise of a step moves the parameters back and forth, so a
mean over several steps has less of it. Each of the models is computed from noisy sums,
so their mean costs no privacy.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fednotes.core.tensors import add_prefix, select_prefix
from fednotes.core.update import Tensors

AVERAGED = "averaged."  # prefix in states, of sums of parameters


class LastRounds:
    """Computes the mean of parameters over the last k of T rounds.

    The mean is (θ_{T−k+1} + … + θ_T) / k, where θ_t are the parameters after round t,
    counted from 1. It is summed in float64, in the order of the rounds. With k = 1 it
    is θ_T itself.

    Args:
        rounds: T, the number of rounds of the run.
        averaged: k, the number of last rounds to average.
    """

    def __init__(self, rounds: int, averaged: int) -> None:
        self._first = rounds - averaged + 1
        self._is_mean = averaged > 1
        self._sum: dict[str, Tensor] = {}

    def add(self, parameters: Mapping[str, Tensor], round: int) -> None:
        """Add the parameters after a round, if it is one of the last k.

        Args:
            parameters: The parameters by name.
            round: The round's number, counted from 1.
        """
        if not self._is_mean or round < self._first:
            return
        for name, parameter in parameters.items():
            value = parameter.detach().cpu().double()
            if name in self._sum:
                value = self._sum[name] + value
            self._sum[name] = value  # [de average]

    def compute(self, parameters: Mapping[str, Tensor], round: int) -> Tensors:
        """Return the mean over the added rounds, or the parameters if there are none.

        Args:
            parameters: The parameters after the newest round.
            round: The number of the newest round, counted from 1.
        """
        if not self._is_mean or round < self._first:
            return {name: value.detach() for name, value in parameters.items()}
        count = round - self._first + 1
        return {
            name: (self._sum[name] / count).to(parameter)  # [de average]
            for name, parameter in parameters.items()
        }

    def state(self) -> dict[str, Tensor]:
        """Return the sums, to be saved."""
        return add_prefix(AVERAGED, self._sum)

    def restore(self, tensors: Tensors) -> None:
        """Restore saved sums.

        Args:
            tensors: The tensors of a saved state.
        """
        self._sum = dict(select_prefix(AVERAGED, tensors))
