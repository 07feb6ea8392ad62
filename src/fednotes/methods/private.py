"""Training of any supporting method with differential privacy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fednotes.core.federation import Coverage, Federation, State
from fednotes.core.tensors import nbytes
from fednotes.methods.base import Method
from fednotes.privacy.promise import Promise
from fednotes.privacy.training import DPSite, DPSupport, train

BYTES_A_NUMBER = 8  # noisy sums have 64-bit integers
FLOAT_BYTES = 4  # a parameter


class DPMethod(Method):
    """Train another method with differential privacy.

    Everything except training is delegated to that method.

    Args:
        method: A method that declares `dp`.

    Raises:
        ValueError: The method does not support differential privacy.
    """

    site_class = DPSite
    training_tasks = ()  # no loss leaves a site

    def __init__(self, method: Method) -> None:
        if method.dp is None:
            raise ValueError(
                f"{type(method).__name__} has no differential privacy: "
                f"{method.no_dp_reason}"
            )
        self._method = method
        self._support: DPSupport = method.dp
        self.config_class = method.config_class
        self.presets = method.presets
        self.holds = method.holds
        self.dp = method.dp
        self.personal = method.personal

    @property
    def inner_site_class(self) -> type[Any]:
        """The class of the site whose model is trained."""
        return self._method.inner_site_class

    # Training with differential privacy.

    def train(self, federation: Federation, config: Any) -> State:
        """Train all rounds that the guarantee covers (`privacy/training.py`)."""
        return train(federation, config, self._support)

    def make_site(
        self,
        data: Any,
        config: Any,
        *,
        secret: bytes | None = None,
        name_request: Callable[[], bytes] = bytes,
        **options: Any,
    ) -> DPSite:
        """Wrap the method's own site in one that sends only noisy sums.

        Args:
            data: The site's data.
            config: The settings of the run.
            secret: 32 bytes that only this site knows; see `DPSite`.
            name_request: Returns the name of the current request; see `DPSite`.
            **options: As in `Method.make_site`. `count_step` has no effect, because
                every number that leaves the site has noise.
        """
        options.pop("count_step", None)
        site = self._method.make_site(data, config, **options)
        return DPSite(
            site, data, config, self._support, secret=secret, name_request=name_request
        )

    def plan_rounds(self, config: Any, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the number of rounds and the expected examples per round."""
        rounds = self._support.make_promise(config).rounds
        return rounds, math.ceil(config.privacy.rate * sum(sizes))

    def name_length_key(self, config: Any, measure: str) -> str:
        """Return the key of [training] that limits the length of training."""
        return self._method.name_length_key(config, measure)

    def shares_outputs(self, config: Any) -> bool:
        """Return whether sites share output layers."""
        return self._method.shares_outputs(config)

    def count_steps(self, config: Any, sizes: Sequence[int]) -> int:
        """Return the number of rounds, each of which is a step."""
        rounds, _ = self.plan_rounds(config, sizes)
        return rounds

    def estimate_traffic(self, config: Any, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the bytes that a site sends and receives in all rounds."""
        del sizes
        rounds = self._support.make_promise(config).rounds
        received = nbytes(self._support.make_initial_parameters(config, {}))
        sent = received * BYTES_A_NUMBER // FLOAT_BYTES
        return rounds * sent, (rounds + 1) * received

    def sends_integers(self, config: Any) -> bool:
        """Return True, because noise is added to integers."""
        del config
        return True

    def make_promise(self, config: Any) -> Promise:
        """Return the run's guarantee of differential privacy."""
        return self._support.make_promise(config)

    # Settings: no sum is divided by a number that depends on a site's data.

    def configure_alone(self, config: Any, sites: Sequence[Any]) -> tuple[Any, ...]:
        """Return each site's settings, with the constant batch size of the job."""
        return tuple(
            replace(alone, sites=1, batch_size=config.batch_size)
            for alone in self._method.configure_alone(config, sites)
        )

    def configure_pooled(
        self, config: Any, sites: Sequence[Any], complete: Sequence[Any] | None
    ) -> tuple[tuple[Any, ...], Any]:
        """Return the pooled data and one model's settings, with the number of sites."""
        together, pooled = self._method.configure_pooled(config, sites, complete)
        return together, replace(pooled, sites=len(together))

    # Everything else is delegated to the method.

    def configure(self, config: Any, sites: Sequence[Any]) -> Any:
        """Return the settings, completed with facts that depend on all sites."""
        return self._method.configure(config, sites)

    def configure_control(self, config: Any) -> Any:
        """Return the settings of the method's control; None if it has none."""
        return self._method.configure_control(config)

    def read_model_config(self, table: Mapping[str, Any]) -> Any:
        """Return the [model] table of a job as the settings of a model."""
        return self._method.read_model_config(table)

    def list_models(self) -> Mapping[str, type[Any]] | None:
        """Return the classes of the [model] table by its `kind`."""
        return self._method.list_models()

    def summarise(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Turn the summed counts of "evaluate" into scores."""
        return self._method.summarise(metrics)

    def count_personal_epochs(self, config: Any) -> int:
        """Return the epochs that each site trains by itself after the last round."""
        return self._method.count_personal_epochs(config)

    def list_warnings(self, config: Any) -> tuple[str, ...]:
        """Return the warnings to show before training."""
        return self._method.list_warnings(config)

    def list_size_warnings(self, config: Any, sizes: Sequence[int]) -> tuple[str, ...]:
        """Return the warnings that follow from the sites' numbers of examples."""
        return self._method.list_size_warnings(config, sizes)

    def name_extension(self, config: Any) -> str:
        """Name what the settings add to the published method."""
        return self._method.name_extension(config)

    def ends_with_one_model(self, config: Any) -> bool:
        """Return whether all sites end with equal models."""
        return self._method.ends_with_one_model(config)

    def save_model(self, config: Any, final: State, folder: Path) -> bool:
        """Write the model that all sites end with, if the server knows it."""
        return self._method.save_model(config, final, folder)

    def list_coverage(self, config: Any, site: Any) -> tuple[Coverage, ...]:
        """Return the updates that cover few patients if a site has few."""
        return self._method.list_coverage(config, site)

    def needs_each_update(self, config: Any) -> bool:
        """Return whether the server looks at each site's update."""
        return self._method.needs_each_update(config)
