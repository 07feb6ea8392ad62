"""Is one run better than another, or is it the choice of test documents?"""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from fednotes.core.errors import ConfigError, DataError, nearest
from fednotes.core.types import Document
from fednotes.jobs import CONDITIONS, POOLED, Job, parse_job
from fednotes.metrics.compare import Bootstrap, paired_bootstrap
from fednotes.models.features import default_cache
from fednotes.models.saving import load_model
from fednotes.run_folder import recorded
from fednotes.sites import load_sites


def compare_runs(
    a: Path, b: Path, condition: str, against: str, metric: str = "strict", samples: int = 10_000
) -> dict[str, Bootstrap]:
    """A paired bootstrap for each site: `condition` of run a minus `against` of run b.

    Both runs' saved taggers tag the test data of run a's job again.
    Raises DataError if the runs do not have the same test data or a model is missing.
    """
    for name in (condition, against):
        if name not in CONDITIONS:
            raise ConfigError(f"no condition is called {name!r}; {nearest(name, CONDITIONS)}")
    job_a, job_b = job_of(a), job_of(b)
    for run, job in ((a, job_a), (b, job_b)):
        if job.reads_notes:
            raise DataError(f"{run}: a run of {job.method!r} finds no entities to compare")
    sites = load_sites(job_a).data
    if a.resolve() != b.resolve():
        other = {site.id: site.test for site in load_sites(job_b).data}
        for site in sites:
            if [d.text for d in other.get(site.id, ())] != [d.text for d in site.test]:
                raise DataError(f"{a} and {b} do not have the same test data at site {site.id!r}")
    found = {}
    for site in sites:
        predicted = [
            _predict(run, chosen, site.id, site.test)
            for run, chosen in ((a, condition), (b, against))
        ]
        found[site.id] = paired_bootstrap(
            site.test, predicted[0], predicted[1], metric, samples, types=site.tags.types
        )
    return found


def job_of(run: Path) -> Job:
    """The job that a run's folder was made by. Raises ConfigError."""
    record = recorded(run)
    try:
        return parse_job(record["table"], record["job"], Path(record["folder"]), str(run))
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{run / 'job.json'}: damaged") from error


def _predict(
    run: Path, condition: str, site: str, documents: tuple[Document, ...]
) -> tuple[Document, ...]:
    part = run / condition / site if condition == "alone" else run / condition
    places = (part / "sites" / site, part / "sites" / POOLED, part)  # its own, or one for all
    folder = next((p / "model" for p in places if (p / "model").exists()), None)
    if folder is None:
        raise DataError(f"{run} has no {condition} model of site {site!r}: was it run to its end?")
    tagger = load_model(folder)
    return tagger.predict(tagger.prepare(documents, cache=default_cache(), gold=False))


def comparison_table(
    a: Path, b: Path, condition: str, against: str, metric: str, samples: int
) -> Table:
    """What `fednotes compare` prints; F1 in percent."""
    table = Table(title=f"{metric} F1: {condition} minus {against}, {samples:,} resamples")
    for head in ("site", condition, against, "difference", "95 % interval", "p"):
        table.add_column(head, justify="left" if head == "site" else "right")
    for site, test in compare_runs(a, b, condition, against, metric, samples).items():
        table.add_row(
            site,
            f"{100 * test.f1_a:.1f}",
            f"{100 * test.f1_b:.1f}",
            f"{100 * test.difference:+.1f}",
            f"{100 * test.low:+.1f} to {100 * test.high:+.1f}",
            f"{test.p_value:.4f}",
        )
    return table
