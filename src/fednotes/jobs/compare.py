"""Is one run better than another, or is it the choice of test documents?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fednotes.apps.phenotyping.cohort import SitePatients
from fednotes.apps.phenotyping.phenotyper import Phenotyper, load_phenotyper
from fednotes.core.errors import ConfigError, DataError, nearest
from fednotes.core.settings import path_of
from fednotes.core.types import Document, SiteData
from fednotes.encoders.features import default_cache
from fednotes.jobs.job import POOLED, Job, load_sites
from fednotes.jobs.job_file import parse_job
from fednotes.jobs.results import CONDITIONS, read_result
from fednotes.jobs.simulate import recorded
from fednotes.metrics.classification import macro_measures
from fednotes.metrics.compare import (
    BOOTSTRAP_SAMPLES,
    Bootstrap,
    paired_bootstrap,
    paired_patients,
)
from fednotes.metrics.gap import Gap
from fednotes.metrics.spans import Scores, SpanCounts
from fednotes.taggers.saving import load_model

ALL_SITES = "all sites"  # the row of runs whose sites share their test patients


class Comparison(NamedTuple):
    """`condition` minus `against`: a test for each site. kind: of score.

    scores: site → precision, recall and F1 of both sides; empty for AUROC. one_to_one: site → F1
    of both sides where overlapping mentions are paired one to one, of metric "relaxed" alone.
    gaps: where a run's federated models are compared with its own of sites alone, how much of
    pooled - alone they close at each site.
    """

    kind: str
    condition: str
    against: str
    samples: int
    tests: dict[str, Bootstrap]
    gaps: dict[str, Gap | None]
    scores: dict[str, tuple[Scores, Scores]]
    one_to_one: dict[str, tuple[float, float]]


def compare(
    a: str | Path,
    b: str | Path | None = None,
    condition: str = "federated",
    against: str = "alone",
    metric: str = "strict",
    samples: int = BOOTSTRAP_SAMPLES,
) -> Comparison:
    """A paired bootstrap, site by site: `condition` of run a minus `against` of run b (or of a).

    Both runs' saved taggers tag the test data of run a's job again. metric: "strict",
    "relaxed" (any overlap) or "relaxed_one_to_one"; runs on patients are compared by macro F1
    ("strict") or "auroc", see `compare_patients`.
    Raises DataError if the runs do not have the same test data or a model is missing.
    """
    a, b = (path_of(run, "a run's folder") for run in (a, a if b is None else b))
    for name in (condition, against):
        if name not in CONDITIONS:
            raise ConfigError(
                f"no condition is called {name!r}; {nearest(name, CONDITIONS)}"
            )
    job, other_job = job_of(a), job_of(b)
    for run, of in ((a, job), (b, other_job)):
        if of.kind.name == "notes":
            raise DataError(
                f"{run}: a run of {of.method!r} finds no entities to compare"
            )
    if job.kind is not other_job.kind:
        raise DataError(f"{a} and {b}: one finds phenotypes, the other entities")
    patients = job.kind.name == "patients"
    if patients and metric not in ("strict", "auroc"):
        raise ConfigError(
            f"--metric {metric}: runs on patients are compared by macro F1, or by auroc"
        )
    gaps: dict[str, Gap | None] = {}
    if a.resolve() == b.resolve() and (condition, against) == ("federated", "alone"):
        result = read_result(a)
        gaps = {site: result.gap(site) for site in result.sites}
    own = load_sites(job).data
    others = own if a.resolve() == b.resolve() else load_sites(other_job).data
    if patients:
        tests = compare_patients(
            (a, own, condition), (b, others, against), samples, metric
        )
        kind = "macro AUROC" if metric == "auroc" else "macro F1"
        found = {site: each.test for site, each in tests.items()}
        measured = {
            site: each.scores for site, each in tests.items() if each.scores is not None
        }
        return Comparison(kind, condition, against, samples, found, gaps, measured, {})
    require_same(a, job, own)
    require_same(b, other_job, others)
    other = {site.id: [d.text for d in site.test] for site in others}
    found = {}
    scores: dict[str, tuple[Scores, Scores]] = {}
    one_to_one: dict[str, tuple[float, float]] = {}
    for site in own:
        if other.get(site.id) != [d.text for d in site.test]:
            raise DataError(
                f"{a} and {b} do not have the same test data at site {site.id!r}"
            )
        one, two = (_predict(*side, site) for side in ((a, condition), (b, against)))
        types = judged_types(job, site)
        found[site.id] = paired_bootstrap(
            site.test, one, two, metric, samples, types=types
        )
        sides = [
            SpanCounts.of(site.test, said, types=types).total for said in (one, two)
        ]
        scores[site.id] = (sides[0].score(metric), sides[1].score(metric))
        if metric == "relaxed":
            matched = [side.score("relaxed_one_to_one")["f1"] for side in sides]
            one_to_one[site.id] = (matched[0], matched[1])
    kind = f"{metric} F1"
    return Comparison(
        kind, condition, against, samples, found, gaps, scores, one_to_one
    )


def judged_types(job: Job, site: SiteData) -> tuple[str, ...]:
    """Return the types by which a run judges a site's predictions on its test data."""
    method_site = job.module.Site
    judging = method_site.made if hasattr(method_site, "made") else method_site
    types: tuple[str, ...] = judging.judged_types(site)
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


def model_folder(run: Path, condition: str, site: str) -> Path:
    """The model that a site has under a condition. Raises DataError if there is none."""
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


Side = tuple[Path, Sequence[SitePatients], str]  # a run, its sites, a condition
Block = tuple[
    np.ndarray, np.ndarray, np.ndarray
]  # labels, what both say: (patients, diseases)


class PatientTest(NamedTuple):
    """A paired test of phenotypes. scores: macro precision, recall and F1 of both sides; None where
    rankings are compared."""

    test: Bootstrap
    scores: tuple[Scores, Scores] | None


def compare_patients(
    a: Side, b: Side, samples: int, metric: str = "strict"
) -> dict[str, PatientTest]:
    """Macro F1 of phenotypes, a minus b, on the same labelled test patients of each site.

    Where all sites have the same test patients, "all sites" too: the mean of the sites' macro
    F1, patients drawn for all of them at once; it alone where both sides have one model.
    A class counts for a disease where either model knows it. metric = "auroc": macro AUROC of
    the classifiers' own scores in its place.
    Raises DataError if patients, labels or phenotypes differ, or no patient is labelled.
    """
    others = {site.id: site for site in b[1]}
    found, blocks, folders = {}, [], set()
    for site in a[1]:
        rows = np.flatnonzero((site.test.labels >= 0).any(axis=1))
        if not len(rows):
            continue
        other = others.get(site.id)
        if other is None or not _same_test(site, other):
            raise DataError(
                f"{a[0]} and {b[0]} do not have the same test patients, labels and phenotypes at "
                f"site {site.id!r}"
            )
        predicted, known, used = [], [], []
        for (run, _, condition), its in ((a, site), (b, other)):
            used.append(model_folder(run, condition, site.id))
            model = load_phenotyper(used[-1])
            known.append(_classes(model, its, used[-1]))
            bags = its.test.bags.take(rows)
            predicted.append(
                model.rank(bags) if metric == "auroc" else model.classes(bags)
            )
        classes = [sorted({*x, *y}) for x, y in zip(*known, strict=True)]
        block = (site.test.labels[rows], predicted[0], predicted[1])
        found[site.id] = _patient_test(block, classes, samples, metric)
        blocks.append((tuple(site.test.patients[row] for row in rows), block, classes))
        folders.add(tuple(used))
    if not found:
        raise DataError(
            f"{a[0]}: no test patient is labelled, so there is nothing to compare"
        )
    if len(blocks) == 1 or any(patients != blocks[0][0] for patients, _, _ in blocks):
        return found
    if len(folders) == 1:
        return {ALL_SITES: next(iter(found.values()))}
    # Each site's diseases stand side by side, so a drawn patient is drawn at every site.
    labels, one, two = (
        np.concatenate([b[i] for _, b, _ in blocks], axis=1) for i in range(3)
    )
    together = [each for _, _, classes in blocks for each in classes]
    return found | {
        ALL_SITES: _patient_test((labels, one, two), together, samples, metric)
    }


def _patient_test(
    block: Block, classes: Sequence[Sequence[int]], samples: int, metric: str
) -> PatientTest:
    """Compare what two models say of the same patients."""
    labels, one, two = block
    test = paired_patients(
        labels, one, two, metric=metric, classes=classes, samples=samples
    )
    if metric == "auroc":
        return PatientTest(test, None)
    sides = [macro_measures(labels, classes, predicted) for predicted in (one, two)]
    return PatientTest(test, (sides[0], sides[1]))


def _same_test(a: SitePatients, b: SitePatients) -> bool:
    same: bool = a.phenotypes == b.phenotypes and a.test.patients == b.test.patients
    return same and np.array_equal(a.test.labels, b.test.labels)


def _classes(
    model: Phenotyper, site: SitePatients, folder: Path
) -> Sequence[Sequence[int]]:
    """The classes that a model knows of each disease. Raises DataError for other diseases."""
    if model.machines is None:
        raise DataError(
            f"{folder}: this model ends with stage 1, it predicts no phenotypes"
        )
    if model.phenotypes != site.phenotypes:
        raise DataError(
            f"{folder}: the model's phenotypes are not those of the job's labels"
        )
    if model.space.fingerprint != site.space.fingerprint:
        raise DataError(
            f"{folder}: the model read notes with another dictionary or encoder than is there now"
        )
    return model.machines.classes
