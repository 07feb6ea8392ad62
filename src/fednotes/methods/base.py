"""The base class of methods, which is their whole interface to jobs.

A method module defines `class FedNER(Method)` and ends with `METHOD = FedNER()`.
Engines, jobs and reports use methods only through this class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
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
    """A method: its settings, sites and training, and facts that a run needs.

    A subclass must define the abstract methods and the class attributes that have no
    default. Everything else has a default. `config` is always an instance of
    `config_class`, and `sites` are the data of the job's sites, for example `SiteData`.

    Attributes:
        config_class: The class of the method's settings, the [training] table.
        site_class: The class of the site side; `make_site` instantiates it.
        presets: Named settings ("best", "paper"), as tables of a job file.
        holds: The data of its sites: "documents" (annotated), "notes" or "patients".
        reads_layers: Whether it reads the states of the layers in `Model.widths`, which
            some kinds of models lack.
        reads_public_notes: Whether sites also read public notes.
        site_keys: The keys of [training] that each site may set for itself, in
            [sites.NAME.training]. If there are any, a site may also have another kind
            of model than the others, in [sites.NAME.model], and `config_class` has the
            field `site_configs` for the settings of these sites.
        training_tasks: The tasks whose metrics are a "loss" summed over "examples".
        dp: Support for training with differential privacy; None if there is none.
        no_dp_reason: Why `dp` is None.
        length_key: The key of [training] that limits the length of training; "" if
            there is none.
        keep_best: The values of [training] with which the model of the best evaluation
            is the result.
        personal: Values of [training] that leave more of the model to each site, which
            helps if sites annotate differently.
    """

    config_class: type[Any]
    site_class: type[Any]
    presets: Mapping[str, Mapping[str, Any]]
    holds: str = "documents"
    reads_layers: bool = False
    reads_public_notes: bool = False
    site_keys: frozenset[str] = frozenset()
    training_tasks: tuple[str, ...] = (TRAIN,)
    dp: DPSupport | None = None
    no_dp_reason: str = "it does not define how"
    length_key: str = ""
    keep_best: Mapping[str, Any] = MappingProxyType({})
    personal: Mapping[str, Any] = MappingProxyType({})

    @property
    def inner_site_class(self) -> type[Any]:
        """The class of the site whose model is trained, without any wrapper."""
        return self.site_class

    # Every method defines these.

    @abstractmethod
    def train(self, federation: Federation, config: Any) -> State:
        """Run the server side of the method and return the final state."""

    @abstractmethod
    def read_model_config(self, table: Mapping[str, Any]) -> Any:
        """Return the [model] table of a job as the settings of a model.

        Raises:
            ConfigError: The method does not support this kind of model. The caller adds
                the name of the table to the message.
        """

    @abstractmethod
    def plan_rounds(self, config: Any, sizes: Sequence[int]) -> tuple[int, int]:
        """Return the maximum number of rounds and the examples per round.

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
            sites: The sites' data.
            complete: The same texts with every entity type annotated; None if unknown.

        Returns:
            The data, as one site or several, and the settings of the run.
        """

    @abstractmethod
    def summarise(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Turn the summed counts of "evaluate" into scores.

        Returns:
            Scores by name, among them "held_out": larger is better, and it is -inf if
            no site has held-out data.
        """

    # Sites and their configuration.

    def make_site(self, data: Any, config: Any, **options: Any) -> MethodSite:
        """Return the site side of the method.

        Args:
            data: The site's data.
            config: The settings of the run.
            **options: `directory`, where the site writes its model and scores;
                `cache`, where it keeps files that the next run can reuse; `device`,
                `progress`, `draws` and `count_step`.
        """
        site: MethodSite = self.site_class(data, config, **options)
        return site

    def configure(self, config: Any, sites: Sequence[Any]) -> Any:
        """Return the settings, completed with facts that depend on all sites."""
        del sites
        return config

    def check_agreement(self, federation: Federation, config: Any) -> None:
        """Let the sites agree as at the start of training, and discard the result.

        Args:
            federation: The sites, before training.
            config: The settings of the run.

        Raises:
            FednotesError: Training would raise the same error.
        """
        del federation, config

    def configure_alone(self, config: Any, sites: Sequence[Any]) -> tuple[Any, ...]:
        """Return the settings with which each site trains by itself."""
        return (config,) * len(sites)

    def configure_control(self, config: Any) -> Any:
        """Return the settings of a control that trains the same way but shares nothing.

        A federation has to beat this control. None if the method has none.
        """
        del config

    def list_models(self) -> Mapping[str, type[Any]] | None:
        """Return the classes of the [model] table by its `kind`.

        The key is "" if the table has no `kind`. None stands for all taggers.
        """
        return None

    # Facts about a run that are shown to users.

    def count_exchanges(self, config: Any, sizes: Sequence[int]) -> int:
        """Return the maximum number of rounds in which sites exchange updates.

        Args:
            config: The settings of the run.
            sizes: Number of training examples of each site.
        """
        rounds, _ = self.plan_rounds(config, sizes)
        return rounds

    def estimate_traffic(
        self, config: Any, sizes: Sequence[int]
    ) -> tuple[int, int] | None:
        """Return the maximum bytes that a site sends and receives in a run.

        None if the method cannot estimate them.
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

    def name_length_key(self, config: Any, measure: str) -> str:
        """Return the key of [training] that limits the length of training.

        Args:
            config: The settings of the run.
            measure: The measure that sites evaluate in this training, such as
                "valid_f1", because a method may train in several stages.
        """
        del config, measure
        return self.length_key

    def shares_outputs(self, config: Any) -> bool:
        """Return whether sites share output layers, in which names of types meet."""
        del config
        return True

    def count_steps(self, config: Any, sizes: Sequence[int]) -> int | None:
        """Return the maximum number of optimizer steps on the shared model.

        If sites take their own steps, the result is the mean over the sites.

        Args:
            config: The settings of the run.
            sizes: Number of training examples of each site.

        Returns:
            The number; None if the method does not know it.
        """
        del config, sizes
        return None

    def list_warnings(self, config: Any) -> tuple[str, ...]:
        """Return the warnings to show before training."""
        del config
        return ()

    def list_size_warnings(self, config: Any, sizes: Sequence[int]) -> tuple[str, ...]:
        """Return the warnings that follow from the sites' numbers of examples."""
        del config, sizes
        return ()

    def name_extension(self, config: Any) -> str:
        """Name what the settings add to the published method, for tables."""
        del config
        return ""

    # The result of a run.

    def ends_with_one_model(self, config: Any) -> bool:
        """Return whether all sites end with equal models, so that one copy suffices."""
        del config
        return False

    def save_model(self, config: Any, final: State, folder: Path) -> bool:
        """Write the model that all sites end with.

        Args:
            config: The settings of the run.
            final: The state that `train` returned.
            folder: Folder to which the model is written.

        Returns:
            False if there is no such model or the server does not know it.
        """
        del config, final, folder
        return False

    # Guarantees to the sites, and permissions that sites must give.

    def make_promise(self, config: Any) -> Promise | None:
        """Return the run's guarantee of differential privacy; None if it has none."""
        del config
        return None

    def list_coverage(self, config: Any, site: Any) -> tuple[Coverage, ...]:
        """Return the updates that cover few patients if a site has few.

        A site's policy checks them before the site joins.

        Args:
            config: The settings of the run.
            site: The site's data.
        """
        del config, site
        return ()

    def needs_each_update(self, config: Any) -> bool:
        """Return whether the server must see each site's individual update.

        `Federation.each` then returns the updates.
        """
        del config
        return False


def list_models_of_sites(config: Any) -> list[Any]:
    """Return the settings of all kinds of models in a run: the job's, then sites' own.

    Args:
        config: The settings of a method.
    """
    site_configs: Mapping[str, Any] = getattr(config, "site_configs", {})
    return [config.model, *(each.model for each in site_configs.values())]
