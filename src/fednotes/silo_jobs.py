"""Hospitals simulated from annotated corpora: a job's sites, pooled and dealt into silos."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.types import Document, SiteData
from fednotes.data.silos import Key, assign
from fednotes.jobs import Job, Sites

_REMEDIES = {
    "train": "or give more documents",
    "valid": "or set valid_fraction higher, or to 0",
    "test": "or give more test documents",
}


def document_silos(job: Job, sites: Sites) -> Sites:
    """The sites' documents in `silo1` …, train, valid and test each dealt out by itself.

    Generated sites are taken with their complete annotation. A part that no site has no silo
    has. Sentences that were cut out of a document go where it goes.

    Raises ConfigError where sites annotate different types or schemes, or a part has fewer
    documents (patients) than there are silos.
    """
    assert job.silos is not None
    whole = sites.complete if job.synthetic and sites.complete else sites.data
    _require_alike(whole)
    number, by = job.silos.number, job.silos.by or "document"
    parts: dict[str, list[list[Document]]] = {}
    told = []
    for part, remedy in _REMEDIES.items():
        given = [(_unit(site.id, d, by), d) for site in whole for d in getattr(site, part)]
        parts[part] = [[] for _ in range(number)]
        if not given:
            continue
        where = _dealt((key for key, _ in given), job, part, by, remedy)
        for key, document in given:
            parts[part][where[key]].append(document)
        told.append(f"{part} {len(where):,}")
    unit = "patients" if by == "patient" else "documents"
    made = tuple(
        SiteData(
            f"silo{at + 1}",
            whole[0].tags,
            train=tuple(parts["train"][at]),
            valid=tuple(parts["valid"][at]),
            test=tuple(parts["test"][at]),
            test_types=whole[0].test_types,
        )
        for at in range(number)
    )
    dealt = f"{unit} in {number} silos: {', '.join(told)}"
    return Sites(made, None, (*sites.notes, dealt), sites.findings)


def _unit(site: str, document: Document, by: str) -> Key:
    """What is never parted: a patient, or the note that a document is or was cut out of."""
    if by == "patient" and document.patient is not None:
        return ("patient", document.patient)
    return ("document", site, str(document.meta.get("document", document.id)))


def _dealt(keys: Iterable[Key], job: Job, part: str, by: str, remedy: str) -> dict[Key, int]:
    assert job.silos is not None
    distinct = set(keys)
    try:
        return assign(distinct, job.silos.number, job.seed)
    except DataError as error:
        unit = "patients" if by == "patient" else "documents"
        raise ConfigError(
            f"[silos] number = {job.silos.number}: the {part} data have {len(distinct)} {unit}, "
            f"so a silo would have none: ask for {len(distinct)} silos at most, {remedy}"
        ) from error


def _require_alike(sites: Sequence[SiteData]) -> None:
    """Raises ConfigError unless all sites annotate the same types in the same scheme."""
    first = sites[0]
    for site in sites[1:]:
        for what, own, other in (
            ("annotates", set(first.tags.types), set(site.tags.types)),
            ("is tested on", set(first.scored_types), set(site.scored_types)),
            ("has the scheme", {first.tags.scheme}, {site.tags.scheme}),
        ):
            if own != other:
                raise ConfigError(
                    f"[silos] silos annotate alike, but site {first.id!r} {what} "
                    f"{', '.join(sorted(own))}, and {site.id!r} {', '.join(sorted(other))}: "
                    "give both the same `types` (label_map renames them) and the same scheme"
                )
