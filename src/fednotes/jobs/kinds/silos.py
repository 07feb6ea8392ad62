"""Deal the documents of a job's sites into silos, which simulate hospitals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.types import Document, SiteData
from fednotes.data.notes import Key
from fednotes.data.notes.sites import assign_to_silos
from fednotes.jobs.job import Job, Sites

_REMEDIES = {
    "train": "or give more documents",
    "valid": "or set valid_fraction higher, or to 0",
    "test": "or give more test documents",
}


class _Unit(NamedTuple):
    """A document, and the key of the group that silos never divide."""

    key: Key
    document: Document


def deal_into_silos(job: Job, sites: Sites) -> Sites:
    """Return the sites' documents in `silo1`, `silo2` and so on.

    Training, validation and test data are dealt out separately; a part that no site has
    is empty in all silos. Generated sites are dealt out with their complete annotation.
    Sentences split from the same document stay together.

    Raises:
        ConfigError: Sites annotate different types or schemes, or a part has fewer
            documents (or patients) than there are silos.
    """
    assert job.silos is not None
    corpora = sites.data
    if job.synthetic and sites.complete:
        corpora = sites.complete
    _require_same_annotation(corpora)
    by = job.silos.by or "document"
    unit_name = "patients" if by == "patient" else "documents"
    documents_by_part: dict[str, list[list[Document]]] = {}
    counts = []
    for part in _REMEDIES:
        units = [
            _Unit(_make_key(site.id, document, by), document)
            for site in corpora
            for document in _list_documents(site, part)
        ]
        documents_by_part[part] = _deal_part(job, part, units, unit_name)
        if units:
            num_units = len({unit.key for unit in units})
            counts.append(f"{part} {num_units:,}")

    first_corpus, *_ = corpora
    parts_by_silo = zip(
        documents_by_part["train"],
        documents_by_part["valid"],
        documents_by_part["test"],
        strict=True,
    )
    silos = tuple(
        SiteData(
            f"silo{number}",
            first_corpus.tags,
            tuple(train),
            tuple(valid),
            tuple(test),
            first_corpus.test_types,
        )
        for number, (train, valid, test) in enumerate(parts_by_silo, start=1)
    )
    remark = f"{unit_name} in {job.silos.number} silos: {', '.join(counts)}"
    return Sites(silos, None, (*sites.remarks, remark), sites.findings)


def _list_documents(site: SiteData, part: str) -> tuple[Document, ...]:
    """Return a site's documents of a part, which is "train", "valid" or "test"."""
    return {"train": site.train, "valid": site.valid, "test": site.test}[part]


def _deal_part(
    job: Job, part: str, units: Sequence[_Unit], unit_name: str
) -> list[list[Document]]:
    """Deal the documents of one part out to the silos; return one list for each.

    Args:
        job: The job.
        part: Name of the part.
        units: Its documents, with their keys.
        unit_name: Name of the undivided groups in messages.

    Raises:
        ConfigError: There are fewer keys than silos.
    """
    assert job.silos is not None
    number = job.silos.number
    silos: list[list[Document]] = [[] for _ in range(number)]
    if not units:
        return silos
    keys = {unit.key for unit in units}
    try:
        silo_of = assign_to_silos(keys, number, job.seed)
    except DataError as error:
        raise make_silo_error(
            number, part, len(keys), unit_name, _REMEDIES[part]
        ) from error
    for unit in units:
        silos[silo_of[unit.key]].append(unit.document)
    return silos


def make_silo_error(
    number: int, part: str, units: int, unit_name: str, remedy: str
) -> ConfigError:
    """Return the error for more silos than a part has documents or patients.

    Args:
        number: Number of silos.
        part: Name of the part, such as "train".
        units: Number of documents or patients of the part.
        unit_name: What they are called, in the plural.
        remedy: What else a person can do than ask for fewer silos.
    """
    return ConfigError(
        f"[silos] number = {number}: the {part} data have {units} {unit_name}, so a "
        f"silo would have none: ask for at most {max(units, 1)} silos, {remedy}"
    )


def _make_key(site: str, document: Document, by: str) -> Key:
    """Return the key by which a document is grouped.

    It is that of its patient, or of the note that it is or was split from.

    Args:
        site: Name of the document's site.
        document: The document.
        by: "patient" or "document".
    """
    if by == "patient" and document.patient is not None:
        return ("patient", document.patient)
    return ("document", site, str(document.meta.get("document", document.id)))


def _require_same_annotation(sites: Sequence[SiteData]) -> None:
    """Raise ConfigError unless all sites annotate the same types in the same way."""
    first, *others = sites
    for site in others:
        _require_equal("annotates", first, site, first.tags.types, site.tags.types)
        _require_equal(
            "is tested on", first, site, first.scored_types, site.scored_types
        )
        _require_equal(
            "has the scheme", first, site, (first.tags.scheme,), (site.tags.scheme,)
        )
        _require_equal(
            "has",
            first,
            site,
            (_describe_overlaps(first),),
            (_describe_overlaps(site),),
        )


def _describe_overlaps(site: SiteData) -> str:
    """Describe whether a site's mentions may overlap."""
    return "overlapping mentions" if site.tags.overlaps else "flat mentions"


def _require_equal(
    verb: str,
    one: SiteData,
    two: SiteData,
    values_of_one: Sequence[str],
    values_of_two: Sequence[str],
) -> None:
    """Raise ConfigError if two sites do not have the same values, in any order.

    Args:
        verb: What sites do with the values, such as "annotates", for the message.
        one: The first site.
        two: The second site.
        values_of_one: Values of the first site, such as its types.
        values_of_two: Values of the second site.
    """
    if set(values_of_one) != set(values_of_two):
        raise ConfigError(
            "[silos]: all sites must annotate the same types with the same "
            f"scheme, but site {one.id!r} {verb} "
            f"{', '.join(sorted(values_of_one))}, and {two.id!r} "
            f"{', '.join(sorted(values_of_two))}: give both the same `types` "
            "(label_map renames them), the same scheme and the same `flatten`"
        )
