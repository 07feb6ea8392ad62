"""A simulation whose sites live in this process: calls to a site are function calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fednotes.core.federation import Option, SiteTasks
from fednotes.core.update import Tensors, Update
from fednotes.engines.rounds import Observer
from fednotes.engines.sampling import RoundSampling
from fednotes.engines.simulation import Simulation
from fednotes.engines.site_programs import ProgramsHere, run_task


class InProcess(Simulation):
    """A federation of sites that live in this process; see `Simulation`.

    Args:
        sites: The sites. Sums add updates in this order.
        directory: As in `Simulation`.
        resume: As in `Simulation`.
        observer: As in `Simulation`.
        secure: As in `Simulation`.
        sampling: As in `Simulation`.
    """

    def __init__(
        self,
        sites: Sequence[SiteTasks],
        *,
        directory: Path | None = None,
        resume: bool = False,
        observer: Observer | None = None,
        secure: bool = False,
        sampling: RoundSampling | None = None,
    ) -> None:
        self._sites = tuple(sites)
        super().__init__(
            ProgramsHere(sites, self.run),
            directory=directory,
            resume=resume,
            observer=observer,
            secure=secure,
            sampling=sampling,
        )

    def run(
        self,
        site: SiteTasks,
        task: str,
        tensors: Tensors,
        options: Mapping[str, Option],
    ) -> Update:
        """Run a task at one site; see `run_task`."""
        return run_task(site, task, tensors, options)
