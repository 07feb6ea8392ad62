"""Cut a site's documents into train, valid and test, and reduce these parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from fednotes.core.errors import ConfigError, FednotesError, naming_place
from fednotes.core.types import SiteData, TagSet
from fednotes.core.wording import format_count
from fednotes.data.split import (
    make_sentence_documents,
    mask_overlap,
    remove_leaks,
    split_documents,
    subsample,
)
from fednotes.data.tags import FlattenCounts, flatten, list_types, relabel
from fednotes.jobs.job import SiteConfig
from fednotes.jobs.kinds.annotated_files import (
    PARTS,
    Documents,
    Parts,
    SiteOfJob,
    Types,
    list_files_by_part,
)


def cut_parts(site: SiteOfJob, raw: Parts, types: Types | None) -> Parts:
    """Return the train, valid and test documents of a site, with flattened mentions.

    Args:
        site: The site.
        raw: The documents of its files.
        types: The types to keep; all if None.

    Raises:
        FednotesError: The documents cannot be split.
    """
    flat = {
        part: _flatten_mentions(site, part, documents, types)
        for part, documents in raw.items()
    }
    with naming_place(f"site {site.name!r}", FednotesError):
        parts = split_parts(site.config, flat, site.job.seed)
    if site.config.train and site.config.repeats == "drop":
        _drop_leaks(site, parts)
    return parts


def _flatten_mentions(
    site: SiteOfJob, part: str, documents: Documents, types: Types | None
) -> Documents:
    """Return documents with mentions flattened by the site's rule; report changes."""
    rule = site.config.flatten
    counts = FlattenCounts()
    flat = []
    for document in relabel(documents, {}, types):
        spans, changes = flatten(document.spans, rule)
        flat.append(replace(document, spans=spans))
        counts += changes
    file = Path(list_files_by_part(site.config)[part]).name
    for what, number in _list_changes(counts):
        site.remark(f"{number} {what} mentions in {file} ({rule})")
    return tuple(flat)


def _list_changes(counts: FlattenCounts) -> Iterator[tuple[str, int]]:
    """Yield each kind of mentions that were changed, and their number."""
    numbers = {
        "duplicates": counts.duplicates,
        "nested": counts.nested,
        "crossing": counts.crossing,
        "discontinuous": counts.discontinuous,
    }
    for what, number in numbers.items():
        if number:
            yield what, number


def split_parts(config: SiteConfig, flat: Mapping[str, Documents], seed: int) -> Parts:
    """Return train, valid and test; split off those that have no files of their own.

    Args:
        config: The site's table.
        flat: The documents of its files by part.
        seed: Seed of the split.
    """
    valid = config.valid_fraction
    test = config.test_fraction
    if config.path:
        fractions = {"train": 1 - valid - test, "valid": valid, "test": test}
        parts = split_documents(flat["path"], fractions, config.split, seed)
    else:
        parts = {part: flat.get(part, ()) for part in PARTS}
        if not parts["valid"] and valid:
            parts |= _split_off_valid(config, parts["train"], valid, seed)
    if not parts["valid"] and config.hold_out:
        parts |= _split_off_valid(config, parts["train"], config.hold_out, seed)
    return parts


def _split_off_valid(
    config: SiteConfig, train: Documents, fraction: float, seed: int
) -> Parts:
    """Return training documents without a fraction of them, which becomes valid."""
    fractions = {"train": 1 - fraction, "valid": fraction}
    return split_documents(train, fractions, config.split, seed)


def _drop_leaks(site: SiteOfJob, parts: Parts) -> None:
    """Drop training sentences that occur in valid or test, and report how many."""
    for part in ("valid", "test"):
        parts["train"], dropped = remove_leaks(parts["train"], parts[part])
        # Without a file of its own, valid was split off train, so its sentences are
        # reported as training sentences.
        if part == "test" and not site.config.valid:
            parts["valid"], more = remove_leaks(parts["valid"], parts["test"])
            dropped += more
        if dropped:
            sentences = format_count(dropped, "training sentence")
            verb = "occurs" if dropped == 1 else "occur"
            site.remark(f"dropped {sentences} that also {verb} in {part}")


def reduce_parts(site: SiteOfJob, parts_by_site: Mapping[str, Parts]) -> SiteData:
    """Return the data of a site after `mask_overlap`, `fraction` and its limits.

    Args:
        site: The site.
        parts_by_site: Train, valid and test of all sites.

    Raises:
        ConfigError: No training document is left, or none has a mention.
    """
    config = site.config
    seed = site.job.seed
    parts = dict(parts_by_site[site.name])
    types = _find_trained_types(site, parts["train"])
    if config.mask_overlap:
        train_of_others = [
            other_parts["train"]
            for name, other_parts in parts_by_site.items()
            if name != site.name
        ]
        parts["train"] = mask_overlap(
            parts["train"], train_of_others, config.mask_overlap, seed
        )
    if config.fraction < 1:
        sentences = make_sentence_documents(parts["train"])
        parts["train"] = subsample(sentences, config.fraction, seed)
    limits = {
        "train": config.max_sentences,
        "valid": config.max_valid_sentences,
        "test": config.max_test_sentences,
    }
    for part, limit in limits.items():
        parts[part] = _limit_sentences(site, part, parts[part], limit)
    tags = TagSet(types, config.scheme, config.keeps_overlaps)
    return SiteData(site.name, tags, parts["train"], parts["valid"], parts["test"])


def _find_trained_types(site: SiteOfJob, train: Documents) -> Types:
    """Return the types of a site's training data, before mentions are masked.

    Raises:
        ConfigError: There are no training documents, or none has a mention.
    """
    if not train:
        raise ConfigError(
            f"site {site.name!r}: no training document is left after splitting: give "
            "more documents, or hold out fewer"
        )
    types = site.config.types or list_types(train)
    if not types:
        raise ConfigError(
            f"site {site.name!r}: no entity is annotated in its training data: "
            "check its format and label_map"
        )
    return types


def _limit_sentences(
    site: SiteOfJob, part: str, documents: Documents, limit: int
) -> Documents:
    """Return a limited number of a part's sentences; 0 returns all documents."""
    if not limit:
        return documents
    sentences = make_sentence_documents(documents)
    if len(sentences) <= limit:
        return documents
    site.remark(f"{limit:,} of {len(sentences):,} sentences of {part} are used")
    return subsample(sentences, limit / len(sentences), site.job.seed)
