"""Compare two runs by the mentions that they find in the same test documents."""

from __future__ import annotations

from pathlib import Path

from fednotes.core.errors import DataError
from fednotes.core.types import Document, SiteData
from fednotes.encoders.features import find_default_cache
from fednotes.jobs.job import ComparedSites, Job, Side
from fednotes.jobs.run_folder import find_model_folder, require_same_data
from fednotes.metrics.paired_tests import bootstrap_documents
from fednotes.metrics.spans import SpanCounts
from fednotes.taggers.saving import load_model


def compare_documents(a: Side, b: Side, metric: str, samples: int) -> ComparedSites:
    """Compare the mentions that two sides find in the same test documents of each site.

    Args:
        a: The first side.
        b: The second side, which is subtracted.
        metric: The F1 to compare: "strict", "relaxed" or "relaxed_one_to_one".
        samples: Number of bootstrap samples.

    Raises:
        DataError: The sides do not have the same test data, or a model is missing.
    """
    require_same_data(a.run, a.job, a.sites)
    require_same_data(b.run, b.job, b.sites)
    texts_of_b = {site.id: _list_test_texts(site) for site in b.sites}
    compared = ComparedSites()
    for site in a.sites:
        if texts_of_b.get(site.id) != _list_test_texts(site):
            raise DataError(
                f"{a.run} and {b.run} do not have the same test data at site "
                f"{site.id!r}"
            )
        predicted_a = _predict(a.run, a.condition, site)
        predicted_b = _predict(b.run, b.condition, site)
        types = _list_scored_types(a.job, site)
        compared.tests[site.id] = bootstrap_documents(
            site.test,
            predicted_a,
            predicted_b,
            metric=metric,
            samples=samples,
            types=types,
        )

        total_a = SpanCounts.of(site.test, predicted_a, types=types).total
        total_b = SpanCounts.of(site.test, predicted_b, types=types).total
        compared.scores[site.id] = (total_a.score(metric), total_b.score(metric))
        if metric == "relaxed":
            compared.one_to_one[site.id] = (
                total_a.score("relaxed_one_to_one")["f1"],
                total_b.score("relaxed_one_to_one")["f1"],
            )
    return compared


def _list_test_texts(site: SiteData) -> list[str]:
    """Return the texts of a site's test documents, by which sides are matched."""
    return [document.text for document in site.test]


def _list_scored_types(job: Job, site: SiteData) -> tuple[str, ...]:
    """Return the types that a run scores on a site's test data."""
    types: tuple[str, ...] = job.module.inner_site_class.list_judged_types(site)
    return types


def _predict(run: Path, condition: str, site: SiteData) -> tuple[Document, ...]:
    """Return a site's test documents with the mentions that its saved model finds."""
    model = load_model(find_model_folder(run, condition, site.id))
    documents = model.prepare(site.test, cache=find_default_cache(), gold=False)
    return model.predict(documents)
