"""The setting with which a job draws the sites of each round."""

from __future__ import annotations

from dataclasses import field, replace
from typing import Any, TypeVar

from fednotes.core.errors import ConfigError
from fednotes.core.numbers import PositiveInt
from fednotes.core.settings import checked


@checked(frozen=True)
class SiteSampling:
    """How many sites take part in a round.

    Attributes:
        sites_per_round: Number of sites that are drawn at random, without replacement,
            for each round; it must be lower than the job's number of sites. Only these
            sites train and send an update, and their updates have the same weights as
            without this key. All sites evaluate. Without this key, all sites take part
            in each round. The number of rounds does not depend on it, and a site's
            learning rate is scheduled over its own steps.
    """

    # `repr` of the settings is part of the key from which a site with differential
    # privacy derives its noise, so this key must not change it.
    sites_per_round: PositiveInt | None = field(default=None, repr=False)


C = TypeVar("C")


def count_drawn_sites(config: Any) -> int | None:
    """Return the number of sites that are drawn for a round; None if all take part.

    Args:
        config: The settings of a method. Those of another package may lack the key.
    """
    drawn: int | None = getattr(config, "sites_per_round", None)
    return drawn


def require_fewer_drawn_sites(config: Any, num_sites: int) -> None:
    """Check that a job draws fewer sites for a round than it has.

    Args:
        config: The settings of a method.
        num_sites: Number of the job's sites.

    Raises:
        ConfigError: It draws as many sites as it has, or more.
    """
    drawn = count_drawn_sites(config)
    if drawn is not None and drawn >= num_sites:
        raise ConfigError(
            f"training.sites_per_round = {drawn}: it must be lower than the number of "
            f"sites, {num_sites}: lower it, or leave it out so that all sites take "
            "part in each round"
        )


def remove_sampling(config: C) -> C:
    """Return the settings of a run in which all sites take part in each round."""
    if count_drawn_sites(config) is None:
        return config
    unsampled: C = replace(config, sites_per_round=None)  # type: ignore[type-var]
    return unsampled


def count_round_sites(config: Any) -> int:
    """Return the number of sites of a round, of settings that know all sites."""
    return count_drawn_sites(config) or int(config.sites)
