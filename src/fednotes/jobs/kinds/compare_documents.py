"""Compare two runs by the mentions that they find in the same test documents."""

from __future__ import annotations

from fednotes.core.errors import DataError
from fednotes.core.types import Document, SiteData
from fednotes.encoders.features import find_default_cache
from fednotes.jobs.job import ComparedSites, Side
from fednotes.jobs.left_out import find_mentions, find_trained_models
from fednotes.jobs.left_out_sites import list_others, list_shared_types
from fednotes.jobs.results import LEFT_OUT
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
        predicted_a = _predict(a, site)
        predicted_b = _predict(b, site)
        types = _list_scored_types(a, b, site)
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


def _list_scored_types(a: Side, b: Side, site: SiteData) -> tuple[str, ...]:
    """Return the types by which two sides are compared on a site's test data.

    Models of other sites know only the types that one of these annotates.
    """
    types: tuple[str, ...] = a.job.module.inner_site_class.list_judged_types(site)
    for side in (a, b):
        if side.condition == LEFT_OUT:
            others = list_others(side.sites, site)
            shared = list_shared_types(side.job, site, others)
            types = tuple(name for name in types if name in shared)
    return types


def _predict(side: Side, site: SiteData) -> tuple[Document, ...]:
    """Return a site's test documents with the mentions that its saved model finds."""
    if side.condition == LEFT_OUT:
        folder = side.run / LEFT_OUT / site.id / "federated"
        models = find_trained_models(folder, list_others(side.sites, site))
        return find_mentions(models, site.test)
    model = load_model(find_model_folder(side.run, side.condition, site.id))
    documents = model.prepare(site.test, cache=find_default_cache(), gold=False)
    return model.predict(documents)
