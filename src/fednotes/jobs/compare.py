"""Compare two runs: is one better, or is the difference due to the test sample?

This is the function behind `fednotes compare`. Each kind of data defines how its
predictions are compared (`SiteKind.compare`; for annotated documents in
`jobs/kinds/compare_documents.py`). The tests are in `metrics/paired_tests.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fednotes.core.errors import ConfigError, DataError, ParameterError, suggest_name
from fednotes.core.settings import require_path
from fednotes.jobs.job import ComparedSites, Job, Side, SiteKind, load_sites
from fednotes.jobs.job_file import load_recorded_job
from fednotes.jobs.results import CONDITIONS, read_result
from fednotes.metrics.gap import ALPHA, Gap, find_proven_sign
from fednotes.metrics.paired_tests import BOOTSTRAP_SAMPLES, Bootstrap
from fednotes.metrics.spans import OVERLAP_POINTS, Scores


class Comparison(NamedTuple):
    """The result of a comparison: `condition` minus `against`, with a test per site.

    Attributes:
        kind: Display name of the score that is compared.
        condition: Condition of the first run.
        against: Condition of the second run.
        samples: Number of bootstrap samples.
        tests: Site → the paired test.
        gaps: Site → share of pooled - alone that the federation closes, if the
            federated models of a run are compared with the models of its sites alone;
            empty otherwise.
        scores: Site → precision, recall and F1 of both sides; empty for AUROC.
        one_to_one: Site → F1 of both sides where overlapping mentions are paired one to
            one; only for the metric "relaxed".
        runs: Names of the folders of both runs; empty if both sides are the same run.
    """

    kind: str
    condition: str
    against: str
    samples: int
    tests: dict[str, Bootstrap]
    gaps: dict[str, Gap | None]
    scores: dict[str, tuple[Scores, Scores]]
    one_to_one: dict[str, tuple[float, float]]
    runs: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What is compared, in words."""
        sides = [self.condition, self.against]
        if self.runs:
            pairs = zip(sides, self.runs, strict=True)
            sides = [f"{side} of {run}" for side, run in pairs]
        return f"{self.kind}: {' minus '.join(sides)}, {self.samples:,} resamples"

    def sign(self, site: str) -> int:
        """Return the sign of the difference at a site; 0 if none is shown."""
        test = self.tests[site]
        return find_proven_sign(test.low, test.high, test.p_value)

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON, such as `fednotes compare --json` prints."""
        return {
            "kind": self.kind,
            "condition": self.condition,
            "against": self.against,
            "runs": list(self.runs),
            "samples": self.samples,
            "sites": {site: self._describe_site(site) for site in self.tests},
            "remarks": self.remarks(),
        }

    def _describe_site(self, site: str) -> dict[str, Any]:
        """Return the tests and scores of a site as JSON."""
        test = self.tests[site]
        described: dict[str, Any] = {
            "a": test.f1_a,
            "b": test.f1_b,
            "difference": test.difference,
            "low": test.low,
            "high": test.high,
            "p_value": test.p_value,
        }
        gap = self.gaps.get(site)
        if gap is not None:
            described["gap_closed"] = gap.closed
        if site in self.scores:
            described["scores"] = [dict(each) for each in self.scores[site]]
        if site in self.one_to_one:
            described["one_to_one"] = list(self.one_to_one[site])
        return described

    def remarks(self) -> list[str]:
        """Return what a reader of the tests should know, in sentences without a dot."""
        remarks = []
        if self.kind == "macro F1":
            remarks.append(
                "a class counts if either model knows it; in a report, a class counts "
                "if the report's model knows it"
            )
        if any(map(_disagrees, self.tests.values())):
            remarks.append(
                "if the interval and p disagree, as they can with few test documents, "
                "claim no difference"
            )
        for site, (first, second) in self.one_to_one.items():
            test = self.tests[site]
            if max(abs(first - test.f1_a), abs(second - test.f1_b)) > OVERLAP_POINTS:
                remarks.append(
                    f"{site}: one to one, F1 is {first:.1%} and {second:.1%}: a long "
                    "mention matches several; compare with the metric "
                    "relaxed_one_to_one"
                )
        return remarks


def _disagrees(test: Bootstrap) -> bool:
    """Return whether the interval of a test and its p value do not agree."""
    excludes_zero = test.low > 0 or test.high < 0
    return excludes_zero != (test.p_value < ALPHA)


def compare(
    a: str | Path,
    b: str | Path | None = None,
    condition: str = "federated",
    against: str = "alone",
    metric: str = "strict",
    samples: int = BOOTSTRAP_SAMPLES,
) -> Comparison:
    """Compare two runs, or two conditions of a run, by a paired bootstrap at each site.

    The saved models of both sides predict the test data of run a's job again.

    Args:
        a: Folder of a run.
        b: Folder of the run to subtract; run a if None.
        condition: Condition of run a: "alone", "own-mix", "federated", "pooled" or
            "left-out".
        against: Condition of run b.
        metric: For annotated documents "strict", "relaxed" (any overlap) or
            "relaxed_one_to_one"; for patients "strict" (macro F1) or "auroc". Other
            kinds of data have metrics of their own (`SiteKind.metrics`).
        samples: Number of bootstrap samples.

    Raises:
        ConfigError: A parameter has an impossible value, or a folder is not a run.
        DataError: The runs do not have the same test data, or a model is missing.
    """
    run_a = require_path(a, "a run's folder")
    run_b = run_a if b is None else require_path(b, "a run's folder")
    for name in (condition, against):
        if name not in CONDITIONS:
            raise ConfigError(
                f"no condition is called {name!r}: {suggest_name(name, CONDITIONS)}"
            )
    job_a = load_recorded_job(run_a)
    job_b = load_recorded_job(run_b)
    compare_sides = _find_comparison(run_a, job_a, run_b, job_b)
    kind = job_a.kind
    _require_metric(metric, kind)

    is_same_run = run_a.resolve() == run_b.resolve()
    sites_a = load_sites(job_a).data
    sites_b = sites_a if is_same_run else load_sites(job_b).data
    compared = compare_sides(
        Side(run_a, job_a, sites_a, condition),
        Side(run_b, job_b, sites_b, against),
        metric,
        samples,
    )

    gaps: dict[str, Gap | None] = {}
    if is_same_run and (condition, against) == ("federated", "alone"):
        result = read_result(run_a)
        gaps = {site: result.gap(site) for site in result.sites}
    run_names: tuple[str, ...] = ()
    if not is_same_run:
        run_names = (run_a.resolve().name, run_b.resolve().name)
    return Comparison(
        kind=kind.metrics[metric],
        condition=condition,
        against=against,
        samples=samples,
        tests=compared.tests,
        gaps=gaps,
        scores=compared.scores,
        one_to_one=compared.one_to_one,
        runs=run_names,
    )


def _find_comparison(
    run_a: Path, job_a: Job, run_b: Path, job_b: Job
) -> Callable[[Side, Side, str, int], ComparedSites]:
    """Return the function that compares runs on the data of two jobs.

    Args:
        run_a: Folder of the first run.
        job_a: Its job.
        run_b: Folder of the second run.
        job_b: Its job.

    Raises:
        DataError: A run has no entities, or the runs are on different kinds of data.
    """
    for run, job in ((run_a, job_a), (run_b, job_b)):
        if job.kind.compare is None:
            raise DataError(
                f"{run}: a run of {job.method!r} finds no entities to compare"
            )
    kind = job_a.kind
    if kind is not job_b.kind or kind.compare is None:
        raise DataError(
            f"{run_a} and {run_b}: one is a run on {kind.name}, the other on "
            f"{job_b.kind.name}: compare runs on the same kind of data"
        )
    return kind.compare


def _require_metric(metric: str, kind: SiteKind) -> None:
    """Raise ParameterError unless runs on this kind of data have a metric."""
    if metric not in kind.metrics:
        known = " or ".join(f"{label} ({name})" for name, label in kind.metrics.items())
        raise ParameterError(
            f"`metric` {metric}: runs on {kind.name} are compared by {known}"
        )
