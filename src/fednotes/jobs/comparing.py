"""What kinds of sites need to compare two runs (`jobs/compare.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednotes.core.errors import DataError
from fednotes.core.types import POOLED
from fednotes.metrics.paired_tests import Bootstrap
from fednotes.metrics.spans import Scores

if TYPE_CHECKING:  # jobs/job.py imports this module
    from fednotes.jobs.job import Job


@dataclass(frozen=True)
class Side:
    """One side of a comparison.

    Attributes:
        run: Folder of the run.
        job: The job that made it.
        sites: The job's sites.
        condition: Condition whose models are compared, such as "federated".
    """

    run: Path
    job: Job
    sites: tuple[Any, ...]
    condition: str


@dataclass(frozen=True)
class Compared:
    """What a comparison found, each by site.

    Attributes:
        tests: The paired test.
        scores: Precision, recall and F1 of both sides; left out for a metric without
            these.
        one_to_one: F1 of both sides where overlapping mentions are paired one to one.
    """

    tests: dict[str, Bootstrap] = field(default_factory=dict)
    scores: dict[str, tuple[Scores, Scores]] = field(default_factory=dict)
    one_to_one: dict[str, tuple[float, float]] = field(default_factory=dict)


def model_folder(run: Path, condition: str, site: str) -> Path:
    """Return the folder of the model that a site has under a condition.

    Raises:
        DataError: There is none.
    """
    part = run / condition / site if condition == "alone" else run / condition
    places = (
        part / "sites" / site,
        part / "sites" / POOLED,
        part,
    )  # its own, or one for all
    folder = next((p / "model" for p in places if (p / "model").exists()), None)
    if folder is None:
        raise DataError(
            f"{run} has no {condition} model of site {site!r}: was it run to its end?"
        )
    return folder
