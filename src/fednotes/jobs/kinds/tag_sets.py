"""Choose or draw the entity types that each site of a job annotates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from fednotes.core.errors import ConfigError, suggest_name
from fednotes.core.seeds import seed_of
from fednotes.core.settings import build
from fednotes.core.types import Document, SiteData
from fednotes.data.tags import (
    TagSets,
    draw_appendix_d,
    draw_disjoint,
    list_types,
    relabel,
)
from fednotes.jobs.job import Job, KindTables, SiteConfig, Sites, TagsConfig
from fednotes.jobs.kinds.annotated_files import ReadingLog, Types

_MAX_DRAWS = 10_000


def read_tags(
    table: Mapping[str, Any], _preset: Mapping[str, Any], where: str
) -> KindTables:
    """Read the [tags] table of a job, if it has one.

    Args:
        table: All tables of the job.
        where: Name of the job in error messages.

    Raises:
        ConfigError: The table contradicts the job's other tables.
    """
    if "tags" not in table:
        return KindTables()
    tags = build(TagsConfig, table["tags"], f"{where} [tags]")
    if tags.is_sampled and "silos" in table:
        raise ConfigError(
            f"{where} [silos]: silos annotate the same types, but design = "
            f"{tags.design!r} samples other types for each site: leave out one of the "
            "two"
        )
    if not tags.is_sampled and "synthetic" in table:
        raise ConfigError(
            f"{where} [tags]: generated sites already have types: set "
            'design = "disjoint" or "appendix-d" to sample others'
        )
    for name, site in table.get("sites", {}).items():
        if tags.is_sampled and site.get("test_types"):
            raise ConfigError(
                f"{where} [sites.{name}]: test_types cannot be combined with "
                f"design = {tags.design!r}, which tests on the complete tag set"
            )
    return KindTables(tags=tags)


def list_named_types(site: SiteConfig) -> Types:
    """Return the types that a site's table names for training and testing."""
    return tuple(dict.fromkeys(site.types + site.test_types))


def find_complete_types(
    config: TagsConfig, annotated: Iterable[Sequence[str]]
) -> Types:
    """Return the complete tag set of a job.

    Args:
        config: The [tags] table.
        annotated: The types of each site.

    Raises:
        ConfigError: [tags] names a type that occurs at no site.
    """
    occurring = sorted({label for types in annotated for label in types})
    for label in config.types:
        if label not in occurring:
            raise ConfigError(
                f"[tags] types has {label!r}, which no site annotates: "
                f"{suggest_name(label, occurring)}"
            )
    return config.types or tuple(occurring)


# ---- choosing ------------------------------------------------------------------------


class ChosenTypes(NamedTuple):
    """The types that the documents of a job keep when they are read.

    Attributes:
        by_site: The types that each site's documents keep; None keeps all.
        complete: The complete tag set; empty for a job without [tags].
    """

    by_site: Mapping[str, Types | None]
    complete: Types


def choose_types(
    job: Job, annotated: Mapping[str, Types], log: ReadingLog
) -> ChosenTypes:
    """Return the types that the documents of each site keep when they are read.

    Args:
        job: The job.
        annotated: The types in each site's files.
        log: Collects reports of types that are left out.

    Raises:
        ConfigError: The types of a site do not match [tags].
    """
    listed_types = {
        name: list_named_types(site) if site.types else None
        for name, site in job.sites.items()
    }
    if job.tags is None:
        return ChosenTypes(listed_types, ())
    requested_types = {
        name: types or annotated[name] for name, types in listed_types.items()
    }
    complete = find_complete_types(job.tags, requested_types.values())
    for name, site in job.sites.items():
        _require_fitting_types(name, site, job.tags, complete)
    for name, labels in annotated.items():
        _report_left_out_labels(name, labels, complete, log)
    if job.tags.is_sampled:
        return ChosenTypes(dict.fromkeys(job.sites, complete), complete)
    by_site = {
        name: tuple(label for label in complete if label in types)
        for name, types in requested_types.items()
    }
    return ChosenTypes(by_site, complete)


def _require_fitting_types(
    name: str, site: SiteConfig, config: TagsConfig, complete: Types
) -> None:
    """Raise ConfigError if the types that a site's table names do not match [tags]."""
    site_types = list_named_types(site)
    if config.is_sampled:
        missing = sorted(set(complete) - set(site_types))
        if site.types and missing:
            raise ConfigError(
                f"site {name!r} keeps {', '.join(site_types)}, but design = "
                f"{config.design!r} needs the complete tag set; {', '.join(missing)} "
                'are missing: leave out its `types`, or set design = "given"'
            )
        return
    for label in site_types:
        if label not in complete:
            raise ConfigError(
                f"site {name!r} has the type {label!r}, but [tags] types does not: "
                f"{suggest_name(label, complete)}"
            )


def _report_left_out_labels(
    name: str, labels: Types, complete: Types, log: ReadingLog
) -> None:
    """Add a remark on labels of a site's files that the complete tag set lacks.

    Raises:
        ConfigError: No label is left.
    """
    unknown = sorted(set(labels) - set(complete))
    if not unknown:
        return
    annotates = f"annotates {', '.join(unknown)}"
    if len(unknown) == len(set(labels)):
        raise ConfigError(
            f"site {name!r} {annotates}; [tags] types has {', '.join(complete)}: map "
            "its labels to these in label_map, or add them to types"
        )
    log.remarks.append(
        f"{name}: left out {', '.join(unknown)}, which [tags] types does not contain"
    )


def keep_types(
    site: SiteData, types: Types, labels: Types | None, test_types: Types = ()
) -> SiteData:
    """Return a site whose data keep only some types.

    Args:
        site: The site.
        types: The types of its tag set.
        labels: The types that its data keep; all if None.
        test_types: The types that its test data keep, if different.
    """
    return SiteData(
        site.id,
        replace(site.tags, types=types),
        relabel(site.train, {}, labels),
        relabel(site.valid, {}, labels),
        relabel(site.test, {}, test_types or labels),
        test_types,
    )


def require_learnable(types: Types, sites: Sequence[SiteData]) -> None:
    """Raise ConfigError if a type of [tags] is in no site's tag set."""
    for label in types:
        if not any(label in site.tags.types for site in sites):
            by_site = "; ".join(
                f"{site.id}: {', '.join(site.tags.types)}" for site in sites
            )
            raise ConfigError(
                f"[tags] types has {label!r}, which no site annotates in its training "
                f"data ({by_site}): leave it out, or add it to the `types` of a site"
            )


def describe_tag_sets(sites: Sequence[SiteData]) -> Iterator[str]:
    """Yield the types that each site annotates, and those without training mentions."""
    number = len({label for site in sites for label in site.tags.types})
    for site in sites:
        yield f"{site.id}: annotates {', '.join(site.tags.types)} (of {number} types)"
        mentioned = list_types(site.train)
        missing = [label for label in site.tags.types if label not in mentioned]
        if missing:
            yield f"{site.id}: no training mention of {', '.join(missing)}"


# ---- sampling ------------------------------------------------------------------------


def draw_types(
    config: TagsConfig,
    seed: int,
    types: Types,
    documents: Sequence[Iterable[Document]],
) -> TagSets:
    """Sample the types of each site for a job.

    Args:
        config: The [tags] table.
        seed: The job's seed.
        types: The complete tag set.
        documents: The documents of all parts of each site.

    Raises:
        ConfigError: The types cannot be dealt out, or no draw has enough mentions.
    """
    sampling = config.find_sampling_number(seed)
    mentions_by_site = [
        Counter(span.label for document in site_documents for span in document.spans)
        for site_documents in documents
    ]
    num_sites = len(mentions_by_site)
    for attempt in range(_MAX_DRAWS):
        # The first draw uses the number itself, so that a `min_mentions` which this
        # draw satisfies does not change the types.
        draw_seed = seed_of(sampling, "draw", attempt) if attempt else sampling
        if config.design == "disjoint":
            tag_sets = draw_disjoint(types, num_sites, config.per_site, draw_seed)
        else:
            tag_sets = draw_appendix_d(types, num_sites, draw_seed)
        has_enough_mentions = all(
            mentions[label] >= config.min_mentions
            for mentions, site_types in zip(mentions_by_site, tag_sets, strict=True)
            for label in site_types
        )
        if has_enough_mentions:
            return tag_sets
    raise ConfigError(
        f"[tags] min_mentions = {config.min_mentions}: in each of {_MAX_DRAWS:,} "
        "draws, some site has fewer mentions of one of its types; lower it, or leave "
        "rare types out of [tags] types"
    )


def keep_drawn_types(sets: TagSets, types: Types, full: Sequence[SiteData]) -> Sites:
    """Return sites whose training and validation data keep the types drawn for them.

    Args:
        sets: The types drawn for each site.
        types: The complete tag set.
        full: The sites with all types annotated.
    """
    drawn = {label for of_site in sets for label in of_site}
    unused = [label for label in types if label not in drawn]
    types = tuple(label for label in types if label in drawn)
    complete = tuple(keep_types(site, types, types) for site in full)
    data = tuple(
        keep_types(site, of_site, of_site, types)
        for site, of_site in zip(complete, sets, strict=True)
    )
    remarks = list(describe_tag_sets(data))
    if unused:
        remarks.insert(
            0,
            "annotated at no site in this sampling, left out: " + ", ".join(unused),
        )
    return Sites(data, complete, tuple(remarks))
