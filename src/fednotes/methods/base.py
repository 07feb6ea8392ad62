"""The base class of methods: what a job asks of each of them.

A method module defines `class FedNER(Method)` and ends with `METHOD = FedNER()`. The
engine, the job and the reports know methods by this class alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fednotes.core.federation import (
    TRAIN,
    Coverage,
    Federation,
    MethodSite,
    State,
)
from fednotes.privacy.promise import Promise
from fednotes.privacy.training import DPSupport


class Method(ABC):
    """A method: its settings, its sites, its training, and what a run needs to know.

    A subclass must define the class attributes without a value here and the abstract
    methods. Everything else has a default. `config` is always an instance of
    `config_class`, and `sites` are what the sites of the job hold, for example
    `SiteData`.

    Attributes:
        config_class: The class of the method's settings, the [training] table.
        site_class: The site side. `make_site` calls it.
        presets: Settings by name ("best", "paper"): tables as in a job file.
        holds: What its sites hold: "documents" (annotated), "notes" or "patients".
        reads_layers: Whether it reads the states of the layers in `Model.widths`, which
            a kind of model may lack.
        training_tasks: The tasks whose metrics are a "loss" summed over "examples".
        dp: How the method trains with differential privacy; None if it cannot.
        no_dp_reason: Why it cannot, where `dp` is None.
    """

    config_class: type[Any]
    site_class: type[Any]
    presets: Mapping[str, Mapping[str, Any]]
    holds: str = "documents"
    reads_layers: bool = False
    training_tasks: tuple[str, ...] = (TRAIN,)
    dp: DPSupport | None = None
    no_dp_reason: str = "it does not say how"

    @property
    def inner_site_class(self) -> type[Any]:
        """The class of the site whose model is trained, whatever stands around it."""
        return self.site_class

    # What every method defines.

    @abstractmethod
    def train(self, federation: Federation, config: Any) -> State:
        """Run the server side of the method and return its last state."""

    @abstractmethod
    def read_model_config(self, table: Mapping[str, Any]) -> Any:
        """Return the [model] table of a job as the settings of a model.

        Raises:
            ConfigError: The method does not support such a model. The caller adds the
                name of the table to the message.
        """

    @abstractmethod
    def plan_rounds(self, config: Any, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the largest number of rounds, and the examples of each.

        Args:
            config: The settings of the run.
            sizes: Number of training examples of each site.
        """

    @abstractmethod
    def configure_pooled(
        self, config: Any, sites: Sequence[Any], complete: Sequence[Any] | None
    ) -> tuple[tuple[Any, ...], Any]:
        """Return the pooled data and the settings of one model trained on all of it.

        Args:
            config: The settings of the federated run.
            sites: What the sites hold.
            complete: The same texts with every entity type annotated, if known.

        Returns:
            The data, as those of one site or of several, and the settings of the run.
        """

    @abstractmethod
    def summarise(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Turn the summed counts of "evaluate" into numbers for people.

        Returns:
            Scores by name. "held_out" is among them: the larger the better, and -inf
            where no site holds anything out.
        """

    # What the sites are, and how they are configured.

    def make_site(self, data: Any, config: Any, **options: Any) -> MethodSite:
        """Return the site side of the method.

        Args:
            data: What the site holds.
            config: The settings of the run.
            **options: `directory`, where the site writes its model and scores;
                `cache`, where it keeps what the next run can use again; `device`,
                `progress`, `draws` and `count_step`.
        """
        site: MethodSite = self.site_class(data, config, **options)
        return site

    def configure(self, config: Any, sites: Sequence[Any]) -> Any:
        """Return the settings, completed by what only all sites together can say."""
        del sites
        return config

    def configure_alone(self, config: Any, sites: Sequence[Any]) -> tuple[Any, ...]:
        """Return the settings with which each site trains by itself."""
        return (config,) * len(sites)

    def configure_control(self, config: Any) -> Any:
        """Return the settings of sites that train alike and share nothing.

        A federation has to beat this control. None: the method has no such control.
        """
        del config

    def list_models(self) -> Mapping[str, type[Any]] | None:
        """Return the classes of the [model] table by its `kind`.

        The key is "" where the table has no such key. None: all taggers.
        """
        return None

    # What people are told of a run.

    def estimate_traffic(
        self, config: Any, sizes: Sequence[int]
    ) -> tuple[int, int] | None:
        """Return the largest number of bytes that a site sends and receives in a run.

        None: the method cannot tell.
        """
        del config, sizes
        return None

    def sends_integers(self, config: Any) -> bool:
        """Return whether updates are integers, which a secure sum does not enlarge."""
        del config
        return False

    def count_personal_epochs(self, config: Any) -> int:
        """Return the epochs that each site trains by itself after the last round."""
        del config
        return 0

    def list_warnings(self, config: Any) -> tuple[str, ...]:
        """Return the warnings to show before training."""
        del config
        return ()

    def list_size_warnings(self, config: Any, sizes: Sequence[int]) -> tuple[str, ...]:
        """Return the warnings that follow from the sites' numbers of examples."""
        del config, sizes
        return ()

    def name_extension(self, config: Any) -> str:
        """Return what the settings add to the published method, for tables."""
        del config
        return ""

    # What a run ends with.

    def ends_with_one_model(self, config: Any) -> bool:
        """Return whether all sites end with equal models, so that one copy is kept."""
        del config
        return False

    def save_model(self, config: Any, final: State, folder: Path) -> bool:
        """Write the model that all sites end with.

        Args:
            config: The settings of the run.
            final: The state that `train` returned.
            folder: Where the model is written.

        Returns:
            False where there is no such model, or the server cannot know it.
        """
        del config, final, folder
        return False

    # What sites are promised, and what they must permit.

    def make_promise(self, config: Any) -> Promise | None:
        """Return what the run promises of differential privacy, if anything."""
        del config
        return None

    def list_coverage(self, config: Any, site: Any) -> tuple[Coverage, ...]:
        """Return the updates that cover few patients where a site's data have few.

        A site's policy checks them before the site joins.

        Args:
            config: The settings of the run.
            site: What the site holds.
        """
        del config, site
        return ()

    def needs_each_update(self, config: Any) -> bool:
        """Return whether the server looks at each site's update (`Federation.each`)."""
        del config
        return False
