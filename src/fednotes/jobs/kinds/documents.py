"""Define sites of annotated documents, and read them.

files        mapped labels; `where` and `share` (`annotated_files.py`)
types        which types the documents of each site keep (`tag_sets.py`)
parts        train, valid and test without leaks, reduced (`site_parts.py`)
tag sets     the types that each site annotates, given or sampled (`tag_sets.py`)
silos        redistribution, if the job simulates hospitals (`silos.py`)
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any

from fednotes.core.types import Document, PublicNotes, SiteData, Span, TagSet
from fednotes.data import synthetic
from fednotes.data.checks import (
    Finding,
    check_sites,
    find_bare_documents,
    find_unlearnt_types,
)
from fednotes.data.split import make_sentence_documents
from fednotes.data.tags import list_types
from fednotes.data.text import split_sentences
from fednotes.jobs.causes import Cause
from fednotes.jobs.job import (
    ConfigTable,
    CountTable,
    Job,
    Progress,
    SiteConfig,
    SiteKind,
    Sites,
    SyntheticConfig,
    TagsConfig,
)
from fednotes.jobs.kinds.annotated_files import (
    Parts,
    ReadingLog,
    SiteOfJob,
    read_annotated_files,
)
from fednotes.jobs.kinds.compare_documents import compare_documents
from fednotes.jobs.kinds.mention_causes import (
    count_training,
    find_data_causes,
    find_missed_types,
    find_threshold_causes,
)
from fednotes.jobs.kinds.public_notes import read_public_notes
from fednotes.jobs.kinds.silos import deal_into_silos
from fednotes.jobs.kinds.site_parts import cut_parts, reduce_parts
from fednotes.jobs.kinds.tag_sets import (
    choose_types,
    describe_tag_sets,
    draw_types,
    find_complete_types,
    keep_drawn_types,
    keep_types,
    list_named_types,
    read_tags,
    require_learnable,
)
from fednotes.privacy.secure_sum.crypto import join_parts


def load_documents(job: Job, _progress: Progress | None, _cache: Path | None) -> Sites:
    """Read every site of a job, and deal the documents into silos if the job has them.

    Args:
        job: The job.

    Raises:
        DataError: A file cannot be used.
        ConfigError: A setting does not match the files.
    """
    sites = _read_sites(job) if job.synthetic is None else _generate_sites(job)
    if job.silos:
        sites = deal_into_silos(job, sites)
    return read_public_notes(job, sites) if job.module.reads_public_notes else sites


def _generate_sites(job: Job) -> Sites:
    """Return generated sites; with [tags], their types are resampled."""
    generated = synthetic.generate(
        job.synthetic.sites, job.synthetic.sentences, job.seed
    )
    complete = tuple(site.complete for site in generated)
    if job.tags is None:
        return Sites(tuple(site.data for site in generated), complete)
    types = find_complete_types(job.tags, [site.tags.types for site in complete])
    documents = [(*site.train, *site.valid, *site.test) for site in complete]
    sets = draw_types(job.tags, job.seed, types, documents)
    return keep_drawn_types(sets, types, complete)


def _read_sites(job: Job) -> Sites:
    """Return the sites that a job reads from files."""
    log = ReadingLog()
    files_by_site = read_annotated_files(job, log)
    annotated_types = {
        name: list_types(chain.from_iterable(files.values()))
        for name, files in files_by_site.items()
    }
    chosen = choose_types(job, annotated_types, log)
    parts_by_site: dict[str, Parts] = {}
    for name in job.sites:
        site = SiteOfJob(job, name, log)
        # `pop` frees the memory of the documents as they were read.
        files = files_by_site.pop(name)
        parts_by_site[name] = cut_parts(site, files, chosen.by_site[name])
    for name, parts in parts_by_site.items():
        documents = tuple(chain.from_iterable(parts.values()))
        log.findings += find_bare_documents(documents, name)
    sites = tuple(
        reduce_parts(SiteOfJob(job, name, log), parts_by_site) for name in job.sites
    )
    if job.tags is None or not job.tags.is_sampled:
        return _keep_listed_types(job, sites, log)

    documents_by_site = [
        chain.from_iterable(parts.values()) for parts in parts_by_site.values()
    ]
    tag_sets = draw_types(job.tags, job.seed, chosen.complete, documents_by_site)
    sampled_sites = keep_drawn_types(tag_sets, chosen.complete, sites)
    return replace(
        sampled_sites,
        remarks=(*log.remarks, *sampled_sites.remarks),
        findings=tuple(log.findings),
    )


def _keep_listed_types(job: Job, sites: Sequence[SiteData], log: ReadingLog) -> Sites:
    """Return sites whose data keep the types that their tables list.

    Args:
        job: The job.
        sites: The sites with all types that were read.
        log: Collects reports.
    """
    data = []
    for site in sites:
        config: SiteConfig = job.sites[site.id]
        labels = config.types or None
        data.append(keep_types(site, site.tags.types, labels, config.test_types))
    if job.tags is not None:
        require_learnable(job.tags.types, data)
        log.remarks += describe_tag_sets(data)
    for site in data:
        log.findings += find_unlearnt_types(site)
    return Sites(tuple(data), None, tuple(log.remarks), tuple(log.findings))


# ---- what a job needs of this kind of site -------------------------------------------


def digest_site(site: SiteData) -> str:
    """Return the SHA-256 of a site's texts, mentions and parts, as hexadecimal digits.

    Two runs on the same notes have the same digest.
    """
    digest = hashlib.sha256(repr(site.tags).encode())
    if site.tags.overlaps:
        digest.update(b"overlaps")
    if site.test_types:
        digest.update(repr(site.test_types).encode())
    if site.public is not None:
        digest.update(site.public.digest.encode())
    for part in (site.train, site.valid, site.test):
        digest.update(b"\x1d")
        for document in part:
            digest.update(f"{document.text}\x1e{document.spans}\x1e".encode())
    return digest.hexdigest()


def _check(job: Job, sites: Sites) -> tuple[Finding, ...]:
    """Return findings about the sites' files and about the data left for training."""
    sites_with_split = {name for name, site in job.sites.items() if site.split}
    if job.silos and sites_with_split:
        # Each silo has documents of all sites, so it has the chosen unit too.
        sites_with_split = {site.id for site in sites.data}
    known = {(finding.code, finding.where) for finding in sites.findings}
    new_findings = [
        finding
        for finding in check_sites(sites.data, sites_with_split=sites_with_split)
        if (finding.code, finding.where) not in known
        and not (finding.code == "bare_documents" and job.synthetic is None)
    ]
    return (*sites.findings, *new_findings)


def _tabulate_no_counts(_sites: Sequence[SiteData]) -> list[CountTable]:
    """Return no tables: `check` shows findings about documents instead."""
    return []


def _collect_tables(job: Job) -> dict[str, TagsConfig]:
    """Return the [tags] table, if the job has one."""
    return {} if job.tags is None else {"tags": job.tags}


def _count_sentences(site: SiteData) -> int:
    """Return the number of a site's training sentences."""
    return sum(len(split_sentences(document)) for document in site.train)


def _make_stand_in(site: SiteData, name: str, size: int) -> SiteData:
    """Return a copy of a site with `size` training sentences, which may repeat."""
    sentences = islice(cycle(make_sentence_documents(site.train)), size)
    return replace(site, id=name, train=tuple(sentences))


def _shrink(site: SiteData, sentences: int) -> SiteData:
    """Return a site with a sample of its notes, of about as many training sentences.

    Held-out notes are sampled at the same rate. Only one public note is kept.
    """
    filled = [document for document in site.train if document.text.strip()]
    train: list[Document] = []
    for document in _spread(filled):
        if len(train) >= sentences:
            break
        train += make_sentence_documents([document])
    train = train[:sentences]
    rate = len(train) / max(1, _count_sentences(site))
    valid, test = (
        tuple(islice(_spread(part), int(rate * len(part))))
        for part in (site.valid, site.test)
    )
    public = site.public
    if public is not None:
        public = replace(public, documents=public.documents[:1])
    return replace(site, train=tuple(train), valid=valid, test=test, public=public)


def _spread(documents: Sequence[Document]) -> Iterator[Document]:
    """Yield documents in an order that soon has visited all regions of a corpus."""
    step = max(1, math.isqrt(len(documents)))
    for start in range(step):
        yield from documents[start::step]


def _invent_site(name: str, site: SiteConfig) -> SiteData:
    """Return a one-sentence site in place of one whose files cannot be read."""
    types = list_named_types(site) or ("Drug",)
    note = Document("invented", "Took aspirin .", (Span(5, 12, types[0]),))
    tags = TagSet(types, site.scheme, site.keeps_overlaps)
    return SiteData(name, tags, (note,), (), (), public=PublicNotes.of([note]))


def _describe(job: Job, site: SiteData) -> dict[str, Any]:
    """Return a site's tag set, how its labels are renamed, and its public notes."""
    return {
        "types": site.tags.types,
        "scheme": site.tags.scheme,
        "overlaps": site.tags.overlaps,
        "label_map": dict(job.sites[site.id].label_map),
        "public": "" if site.public is None else site.public.digest,
    }


def _iterate_notes(site: SiteData) -> Iterator[str]:
    """Yield the training and validation texts; sentences, if notes were split."""
    return (document.text for document in (*site.train, *site.valid))


def encode_training_examples(site: SiteData) -> Mapping[str, Iterator[bytes]]:
    """Return the training sentences of a site as bytes, in several views.

    Returns:
        The sentences by the name of the view: the text alone, with the positions of the
            mentions, and with their labels too.
    """
    sentences = make_sentence_documents(site.train)
    return {
        "sentences": (join_parts(sentence.text) for sentence in sentences),
        "sentences with mentions": (
            _encode_sentence(sentence, labels=False) for sentence in sentences
        ),
        "sentences with labels": (
            _encode_sentence(sentence, labels=True) for sentence in sentences
        ),
    }


def _encode_sentence(sentence: Document, *, labels: bool) -> bytes:
    """Return a sentence as bytes, with the positions of its mentions.

    Args:
        sentence: The sentence.
        labels: Whether the labels of the mentions are encoded too.
    """
    parts: list[str | int] = [sentence.text]
    for span in sorted(sentence.spans):
        parts.append(str(span.pieces))
        if labels:
            parts.append(span.label)
    return join_parts(*parts)


def _find_score_causes(
    job: Job, scores: Mapping[str, Any], facts: Mapping[str, Any]
) -> Iterator[Cause]:
    """Yield the causes that scores of mentions show; see `find_missed_types`."""
    yield from find_missed_types(job, scores, facts)
    yield from find_threshold_causes(job, scores)


KIND = SiteKind(
    name="documents",
    site_config=SiteConfig,
    synthetic_config=SyntheticConfig,
    load=load_documents,
    fingerprint=digest_site,
    tabulate_counts=_tabulate_no_counts,
    source_keys=("path", "train"),
    source_placeholder={"path": "notes"},
    tables={"tags": ConfigTable("[tags]", TagsConfig)},
    read_tables=read_tags,
    collect_tables=_collect_tables,
    count_examples=_count_sentences,
    make_stand_in=_make_stand_in,
    count_training=count_training,
    find_score_causes=_find_score_causes,
    find_data_causes=find_data_causes,
    check=_check,
    iterate_notes=_iterate_notes,
    compare=compare_documents,
    metrics={
        name: f"{name} F1" for name in ("strict", "relaxed", "relaxed_one_to_one")
    },
    encode_examples=encode_training_examples,
    describe=_describe,
    shrink=_shrink,
    invent_site=_invent_site,
)
