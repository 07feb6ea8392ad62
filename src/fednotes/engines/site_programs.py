"""Where the site programs of a simulation run: in this process, or in others.

The engine (`engines/simulation.py`) calls sites only through `SitePrograms`. So it does
not matter to methods, checkpoints, sums and counts of bytes where a site computes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from fednotes.core.errors import TrainingError
from fednotes.core.federation import Option, SiteTasks, State
from fednotes.core.update import Tensors, Update
from fednotes.engines.summing import check_received


class SiteUpdate(NamedTuple):
    """The update of a site."""

    site: str
    update: Update


class SitePrograms(Protocol):
    """The site programs of one federation, wherever they run.

    Attributes:
        names: The sites, in the fixed order in which sums add their updates.
    """

    names: tuple[str, ...]

    def run(
        self,
        task: str,
        tensors: Tensors,
        options: Mapping[str, Option],
        sites: Collection[str] | None = None,
    ) -> Iterator[SiteUpdate]:
        """Run a task and yield the updates, in the order of the sites.

        Args:
            task: The task.
            tensors: The tensors that the server sends.
            options: The task's options.
            sites: The sites that run it; None for all.

        Raises:
            TrainingError: A site has no such task.
        """

    def states(self) -> dict[str, State]:
        """Return the state of each site, in the order of the sites."""

    def restore(self, states: Mapping[str, State]) -> None:
        """Return the sites to earlier `states`."""


class ProgramsHere:
    """Site programs in this process, which run one after another.

    Args:
        sites: The sites, in the fixed order.
        run: Runs a task at a site; `run_task`, or a function around it.
    """

    def __init__(
        self,
        sites: Sequence[SiteTasks],
        run: Callable[[SiteTasks, str, Tensors, Mapping[str, Option]], Update],
    ) -> None:
        self._sites = tuple(sites)
        self._run = run
        self.names = tuple(site.id for site in sites)

    def run(
        self,
        task: str,
        tensors: Tensors,
        options: Mapping[str, Option],
        sites: Collection[str] | None = None,
    ) -> Iterator[SiteUpdate]:
        """Run a task at one site after another; see `SitePrograms`.

        A site computes when its update is wanted, so that only one is in memory.
        """
        for site in self._sites:
            if sites is None or site.id in sites:
                yield SiteUpdate(site.id, self._run(site, task, tensors, options))

    def states(self) -> dict[str, State]:
        """Return the state of each site; see `SitePrograms`."""
        return {site.id: site.state() for site in self._sites}

    def restore(self, states: Mapping[str, State]) -> None:
        """Return the sites to earlier states; see `SitePrograms`."""
        for site in self._sites:
            site.restore(states[site.id])


def run_task(
    site: SiteTasks, task: str, tensors: Tensors, options: Mapping[str, Option]
) -> Update:
    """Run a task at one site and return its update.

    Args:
        site: The site.
        task: The task.
        tensors: The tensors that the server sends.
        options: The task's options.

    Raises:
        TrainingError: The site has no such task.
        RefusedError: A tensor is not finite.
    """
    if task not in site.tasks:
        raise TrainingError(f"site {site.id!r} has no task {task!r}")
    check_received(tensors, site.id, task)
    update: Update = getattr(site, task)(tensors, **options)
    return update
