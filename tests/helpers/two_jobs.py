"""Two jobs of the same seed, one of which has a site more, are no way to that site's
update.

Sites a, b and c are in both jobs, d is in the first one alone. The attack subtracts the
sums of the first round: where the others' draws follow from the job's seed, their parts
cancel and what is left is d's own part. The independent number is the update that d's
own site object returned.

With secret draws what is left is d's part and, for each other site, the difference of
two draws of its part: u − u′. These are independent and alike, so their expected square
is twice the variance of a site's part over its draws. `Case.least_missed` says how much
the attack then misses at least; rounding leaves below 1e-6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from method_runs import Case

from fednotes.core.seeds import Draws
from fednotes.core.update import Total, Update
from fednotes.engines.inprocess import InProcess

MOST = 1e-6  # of `remaining`, where the attack works


class FirstSum(InProcess):
    """Stops at the first sum of one task, and keeps each site's own update of it."""

    def __init__(self, sites: Sequence[Any], task: str) -> None:
        super().__init__(sites)
        self.task, self.updates = task, dict[str, Update]()

    def sum(self, task: str, tensors: Any = None, /, **options: Any) -> Total:
        self.sent = {n: v.detach().double().clone() for n, v in (tensors or {}).items()}
        total = super().sum(task, tensors, **options)
        if task == self.task:
            self.total = total
            raise Reached
        return total

    def run(self, site: Any, task: str, *arguments: Any) -> Update:
        update = super().run(site, task, *arguments)
        tensors = {n: v.detach().double().clone() for n, v in update.tensors.items()}
        self.updates[site.id] = replace(update, tensors=tensors)
        return update


class Reached(Exception):
    """Raised once the sum was computed."""


def first_sum(case: Case, number: int, run: str, kind: str) -> FirstSum:
    """Return the engine after the first sum of the job over the first sites.

    run: the name of the run; each run has new secrets.
    """
    sites = case.sites[:number]
    settings = case.settings(sites)

    def draws(site: str) -> Draws | None:
        return Draws.of_secret(f"{run}/{site}".encode()) if kind == "secret" else None

    members = [
        case.method.make_site(site, settings, draws=draws(site.id)) for site in sites
    ]
    engine = FirstSum(members, case.task)
    with pytest.raises(Reached):
        case.method.train(engine, settings)
    return engine


def summed(total: Total, start: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what the server learns of a sum: Σ weight · value, less where it began."""
    return {
        name: value - total.weight * start.get(name, torch.zeros(()))
        for name, value in total.tensors.items()
    }


def missed(
    more: Total, less: Total, alone: Total, starts: Sequence[Mapping[str, torch.Tensor]]
) -> float:
    """Return how much the attack misses of what is special to d.

    That is |difference − part| / |part − guess|, where the guess is what the mean of
    the smaller job's sum says of any site: who knows no more than that has 1.

    Args:
        more: The sum of the job that d is in.
        less: The sum of the other job.
        alone: What d added to the former.
        starts: The parameters that each job's sum began with; empty where the sum is of
            changes.
    """
    wide, narrow, contribution = (
        summed(total, start)
        for total, start in zip((more, less, alone), (*starts, starts[0]), strict=True)
    )
    shared = [
        n
        for n in contribution
        if n in narrow and contribution[n].shape == narrow[n].shape
    ]
    shared = [n for n in shared if not n.startswith("domain.")]
    part = torch.cat([contribution[n].flatten() for n in shared])
    difference = torch.cat([(wide[n] - narrow[n]).flatten() for n in shared])
    share = alone.weight / less.weight
    guess = torch.cat([share * narrow[n].flatten() for n in shared])
    assert float((part - guess).norm()) > 0
    return float((difference - part).norm() / (part - guess).norm())


def remaining(case: Case, kind: str) -> float:
    """Return what `missed` says of a case. kind: "job" or "secret" draws."""
    more, less = first_sum(case, 4, "run 1", kind), first_sum(case, 3, "run 2", kind)
    alone = Total.of([more.updates[case.sites[-1].id]])
    starts = [engine.sent if case.is_change else {} for engine in (more, less)]
    return missed(more.total, less.total, alone, starts)
