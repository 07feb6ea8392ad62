"""A job's sites → their data: read, mapped, flattened, split, reduced."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from fednotes.core.errors import ConfigError, DataError, FednotesError, nearest
from fednotes.core.types import Document, SiteData, TagSet
from fednotes.data import synthetic
from fednotes.data.formats import read
from fednotes.data.split import (
    mask_overlap,
    sentence_documents,
    split,
    subsample,
    without_leaks,
)
from fednotes.data.tags import FlattenCounts, flatten, relabel, types_of
from fednotes.jobs import Job, SiteConfig, expand

Parts = dict[str, tuple[Document, ...]]


@dataclass(frozen=True)
class Sites:
    """The sites of a job in its order.

    complete: the same texts with every site's types annotated; synthetic data only.
    notes: what was changed on the way, as counts.
    """

    data: tuple[SiteData, ...]
    complete: tuple[SiteData, ...] | None = None
    notes: tuple[str, ...] = ()


def load_sites(job: Job) -> Sites:
    """Read every site of a job.

    Raises DataError for a bad file, ConfigError for a setting that does not fit it.
    """
    if job.synthetic is not None:
        made = synthetic.generate(
            num_sites=job.synthetic.sites,
            sentences_per_site=job.synthetic.sentences,
            seed=job.seed,
        )
        return Sites(tuple(s.data for s in made), tuple(s.complete for s in made))
    notes: list[str] = []
    parts = {name: _read_site(job, name, site, notes) for name, site in job.sites.items()}
    data = []
    for name, site in job.sites.items():
        documents = parts[name]
        tags = TagSet(site.types or types_of(documents["train"]), site.scheme)
        if not documents["train"]:
            raise ConfigError(f"site {name!r}: no training document is left after splitting")
        if not tags.types:
            raise ConfigError(
                f"site {name!r}: no entity is annotated in its training data; "
                "check its format and label_map"
            )
        train = _reduced(job, name, site, parts)
        data.append(SiteData(name, tags, train, documents["valid"], documents["test"]))
    return Sites(tuple(data), None, tuple(notes))


def _read_site(job: Job, name: str, site: SiteConfig, notes: list[str]) -> Parts:
    """Train, valid and test documents with mapped, flat labels."""
    given = [part for part in ("path", "train", "valid", "test") if getattr(site, part)]
    raw = {part: _read(job, name, site, part) for part in given}
    _check_labels(name, site, types_of(chain(*raw.values())), notes)
    flat = {part: _flat(name, site, part, documents, notes) for part, documents in raw.items()}
    try:
        parts = _split(job, site, flat)
    except FednotesError as error:
        raise type(error)(f"site {name!r}: {error}") from error
    if site.train:
        for part in ("valid", "test"):
            parts["train"], dropped = without_leaks(parts["train"], parts[part])
            if dropped:
                notes.append(f"{name}: {dropped} training sentences dropped that occur in {part}")
    return parts


def _read(job: Job, name: str, site: SiteConfig, part: str) -> tuple[Document, ...]:
    path = Path(expand(getattr(site, part), f"sites.{name}.{part}"))
    try:
        return read(path if path.is_absolute() else job.folder / path, site.format or None)
    except ConfigError as error:
        raise ConfigError(f"site {name!r}: {error}") from error


def _check_labels(name: str, site: SiteConfig, found: tuple[str, ...], notes: list[str]) -> None:
    """A type that is asked for but occurs in no file of the site is a misspelt one."""
    for label in site.label_map:
        if label not in found:
            notes.append(f"{name}: label_map has {label!r}, which is not annotated")
    mapped = sorted({site.label_map.get(label, label) for label in found} - {""})
    for label in site.types:
        if label not in mapped:
            raise DataError(
                f"site {name!r} asks for the type {label!r}, its files have "
                f"{', '.join(mapped) or 'no entity'}; {nearest(label, mapped)}"
            )


def _flat(
    name: str, site: SiteConfig, part: str, raw: tuple[Document, ...], notes: list[str]
) -> tuple[Document, ...]:
    counts = FlattenCounts()
    documents = []
    for document in relabel(raw, site.label_map, site.types or None):
        spans, count = flatten(document.spans, site.flatten)
        documents.append(replace(document, spans=spans))
        counts += count
    where = Path(getattr(site, part)).name
    for what in ("duplicates", "nested", "crossing", "discontinuous"):
        if number := getattr(counts, what):
            notes.append(f"{name}: {number} {what} mentions in {where} ({site.flatten})")
    return tuple(documents)


def _split(job: Job, site: SiteConfig, flat: Mapping[str, tuple[Document, ...]]) -> Parts:
    if site.path:
        fractions = {
            "train": 1 - site.valid_fraction - site.test_fraction,
            "valid": site.valid_fraction,
            "test": site.test_fraction,
        }
        return split(flat["path"], fractions, site.split, job.seed)
    parts = {part: flat.get(part, ()) for part in ("train", "valid", "test")}
    if not parts["valid"] and site.valid_fraction:
        held = {"train": 1 - site.valid_fraction, "valid": site.valid_fraction}
        parts |= split(parts["train"], held, site.split, job.seed)
    return parts


def _reduced(
    job: Job, name: str, site: SiteConfig, parts: Mapping[str, Parts]
) -> tuple[Document, ...]:
    """The training data after `fraction` and `mask_overlap`."""
    train = parts[name]["train"]
    if site.mask_overlap:
        others = [other["train"] for key, other in parts.items() if key != name]
        train = mask_overlap(train, others, site.mask_overlap, job.seed)
    if site.fraction < 1:
        train = subsample(sentence_documents(train), site.fraction, job.seed)
    return train


def fingerprint(site: SiteData) -> str:
    """SHA-256 of a site's texts, mentions and parts: two runs on the same notes agree in it."""
    digest = hashlib.sha256(repr(site.tags).encode())
    for part in (site.train, site.valid, site.test):
        digest.update(b"\x1d")
        for document in part:
            digest.update(f"{document.text}\x1e{document.spans}\x1e".encode())
    return digest.hexdigest()
