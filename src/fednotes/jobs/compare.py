"""Is one run better than another, or is it the choice of test documents?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fednotes.core.errors import ConfigError, DataError, ParameterError, nearest
from fednotes.core.settings import path_of
from fednotes.core.types import Document, SiteData
from fednotes.encoders.features import default_cache
from fednotes.jobs.comparing import Compared, Side, model_folder
from fednotes.jobs.job import Job, load_sites
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.results import CONDITIONS, read_result
from fednotes.jobs.simulate import recorded
from fednotes.metrics.gap import Gap
from fednotes.metrics.paired_tests import BOOTSTRAP_SAMPLES, Bootstrap, paired_bootstrap
from fednotes.metrics.spans import Scores, SpanCounts
from fednotes.taggers.saving import load_model


class Comparison(NamedTuple):
    """`condition` minus `against`: a test for each site. kind: of score.

    scores: site → precision, recall and F1 of both sides; empty for AUROC. one_to_one: site → F1
    of both sides where overlapping mentions are paired one to one, of metric "relaxed" alone.
    gaps: where a run's federated models are compared with its own of sites alone, how much of
    pooled - alone they close at each site. runs: names of the folders of both runs, empty
    where both sides are of one run.
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


def compare(
    a: str | Path,
    b: str | Path | None = None,
    condition: str = "federated",
    against: str = "alone",
    metric: str = "strict",
    samples: int = BOOTSTRAP_SAMPLES,
) -> Comparison:
    """A paired bootstrap, site by site: `condition` of run a minus `against` of run b
    (or of a).

    Both runs' saved models predict the test data of run a's job again. metric:
    "strict", "relaxed" (any overlap) or "relaxed_one_to_one"; runs on another kind of
    data have metrics of their own (`SiteKind.metrics`), as those on patients "strict"
    (macro F1) and "auroc".
    Raises DataError if the runs do not have the same test data or a model is missing.
    """
    a, b = (path_of(run, "a run's folder") for run in (a, a if b is None else b))
    for name in (condition, against):
        if name not in CONDITIONS:
            raise ConfigError(
                f"no condition is called {name!r}; {nearest(name, CONDITIONS)}"
            )
    job, other_job = job_of(a), job_of(b)
    for run, run_job in ((a, job), (b, other_job)):
        if run_job.kind.compare is None:
            raise DataError(
                f"{run}: a run of {run_job.method!r} finds no entities to compare"
            )
    kind = job.kind
    if kind is not other_job.kind or kind.compare is None:
        raise DataError(
            f"{a} and {b}: one is a run on {kind.name}, the other on {other_job.kind.name}: "
            "compare runs on the same kind of data"
        )
    if metric not in kind.metrics:
        known = " or ".join(f"{label} ({name})" for name, label in kind.metrics.items())
        raise ParameterError(
            f"`metric` {metric}: runs on {kind.name} are compared by {known}"
        )
    same_run = a.resolve() == b.resolve()
    gaps: dict[str, Gap | None] = {}
    if same_run and (condition, against) == ("federated", "alone"):
        result = read_result(a)
        gaps = {site: result.gap(site) for site in result.sites}
    sites = load_sites(job).data
    other_sites = sites if same_run else load_sites(other_job).data
    compared = kind.compare(
        Side(a, job, sites, condition),
        Side(b, other_job, other_sites, against),
        metric,
        samples,
    )
    return Comparison(
        kind.metrics[metric],
        condition,
        against,
        samples,
        compared.tests,
        gaps,
        compared.scores,
        compared.one_to_one,
        () if same_run else (a.resolve().name, b.resolve().name),
    )


def compare_documents(a: Side, b: Side, metric: str, samples: int) -> Compared:
    """Compare the mentions that two sides find in the same test documents of each site.

    Args:
        a: One side.
        b: The other side.
        metric: Which F1 is compared, as of `compare`.
        samples: Number of bootstrap samples.

    Raises:
        DataError: The sides do not have the same test data, or a model is missing.
    """
    for side in (a, b):
        require_same(side.run, side.job, side.sites)
    other_texts = {site.id: [d.text for d in site.test] for site in b.sites}
    compared = Compared()
    for site in a.sites:
        if other_texts.get(site.id) != [d.text for d in site.test]:
            raise DataError(
                f"{a.run} and {b.run} do not have the same test data at site {site.id!r}"
            )
        one, two = (_predict(side.run, side.condition, site) for side in (a, b))
        types = judged_types(a.job, site)
        compared.tests[site.id] = paired_bootstrap(
            site.test, one, two, metric, samples, types=types
        )
        totals = [
            SpanCounts.of(site.test, predicted, types=types).total
            for predicted in (one, two)
        ]
        compared.scores[site.id] = (totals[0].score(metric), totals[1].score(metric))
        if metric == "relaxed":
            matched = [total.score("relaxed_one_to_one")["f1"] for total in totals]
            compared.one_to_one[site.id] = (matched[0], matched[1])
    return compared


def judged_types(job: Job, site: SiteData) -> tuple[str, ...]:
    """Return the types by which a run judges a site's predictions on its test data."""
    types: tuple[str, ...] = job.module.inner_site_class.judged_types(site)
    return types


def require_same(run: Path, job: Job, sites: Sequence[SiteData]) -> None:
    """Raises DataError unless a run's sites are split as they were when it trained."""
    before = recorded(run).get("notes", {})
    for site in sites:
        if before.get(site.id, own := job.kind.fingerprint(site)) != own:
            raise DataError(
                f"{run}: site {site.id!r} has other data, or parts, than when this run was made: "
                "what it is tested on may be what it learnt; give it its files back (jobs without "
                '`split` were once split by sentence: add split = "sentence" to its job.json)'
            )


def job_of(run: Path) -> Job:
    """The job that a run's folder was made by. Raises ConfigError."""
    record = recorded(run)
    try:
        return parse_job(
            record["table"], record["job"], Path(record["folder"]), str(run)
        )
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{run / 'job.json'}: damaged") from error


def _predict(run: Path, condition: str, site: SiteData) -> tuple[Document, ...]:
    tagger = load_model(model_folder(run, condition, site.id))
    return tagger.predict(tagger.prepare(site.test, cache=default_cache(), gold=False))
