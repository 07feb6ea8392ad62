"""What the workers of a simulation are asked, beside the tasks of methods.

A reply to a command is an event or the result (`events.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from fednotes.core.errors import DataError
from fednotes.engines.rounds import RoundResult
from fednotes.jobs.job import Job

HOLD = "@hold"  # make the sites of a part that this worker holds
OPEN = "@open"  # read a job's data
REPORT = "@report"  # score the trained models of the sites that it holds
TRAIN = "@train"  # train a part completely
CONTINUE = "@continue"  # the event was logged: continue


def encode_round(result: RoundResult) -> dict[str, Any]:
    """Return a round as JSON values."""
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    values["metrics"] = dict(result.metrics)
    values["replies"] = {
        task: {site: dict(metrics) for site, metrics in by_site.items()}
        for task, by_site in result.replies.items()
    }
    return values


def decode_round(values: Mapping[str, Any]) -> RoundResult:
    """Return the round that `encode_round` encoded."""
    names = {key: tuple(values[key]) for key in ("absent", "drawn")}
    return RoundResult(**{**values, **names})


def digest_data(job: Job, sites: Sequence[Any]) -> dict[str, str]:
    """Return a digest of the data of each site."""
    return {site.id: job.kind.fingerprint(site) for site in sites}


def require_equal_data(expected: Mapping[str, str], read: Mapping[str, str]) -> None:
    """Raise DataError unless a worker has read the same data.

    Args:
        expected: Digests of the data that the process with the server has read.
        read: Digests of the data that the worker has read.
    """
    for site, digest in expected.items():
        if read.get(site) != digest:
            raise DataError(
                f"the notes of site {site!r} have changed while the run was starting: "
                "start it again"
            )
