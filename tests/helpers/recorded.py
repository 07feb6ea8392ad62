"""What leaves the sites of a small job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from two_jobs import Case

from fednotes.core.update import Update
from fednotes.engines.inprocess import InProcess


class Recording(InProcess):
    """Keeps all that leaves each site."""

    def __init__(self, sites: Sequence[Any]) -> None:
        super().__init__(sites)
        self.sent: list[tuple[str, str, Update]] = []

    def run(self, site: Any, task: str, *arguments: Any) -> Update:
        update = super().run(site, task, *arguments)
        tensors = {
            name: value.detach().clone() for name, value in update.tensors.items()
        }
        self.sent.append((site.id, task, replace(update, tensors=tensors)))
        return update


def run(case: Case, **options: Any) -> tuple[Recording, Any]:
    """Train a case to its end; what left its sites, and the server's last state."""
    settings = case.settings(case.sites)
    engine = Recording(
        [case.method.make_site(site, settings, **options) for site in case.sites]
    )
    return engine, case.method.train(engine, settings)
