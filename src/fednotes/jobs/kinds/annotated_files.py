"""Read the annotated files of a job's sites.

The result is each site's documents after `label_map`, `where` and `share`. At this
stage, no site depends on another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path

from fednotes.core.errors import (
    ConfigError,
    DataError,
    FednotesError,
    Problem,
    naming_place,
    suggest_name,
)
from fednotes.core.types import Document
from fednotes.data.checks import (
    Finding,
    compare_size,
    find_shared_notes,
    report_problems,
)
from fednotes.data.formats import examine
from fednotes.data.formats.problems import Problems
from fednotes.data.split import split_documents
from fednotes.data.tags import list_types, relabel
from fednotes.data.text import split_sentences
from fednotes.jobs.job import Job, SiteConfig

Documents = tuple[Document, ...]
# Documents by the name of their part: `_WHOLE`, or "train", "valid" and "test".
Parts = dict[str, Documents]
Types = tuple[str, ...]

PARTS = ("train", "valid", "test")
_WHOLE = "path"  # the key of a corpus that is split here
_MAX_LISTED = 12  # maximum number of values in a message
_MAX_LENGTH = 20  # maximum length of a value in a message

# Reads a file with a format and an encoding; the format "" is recognised.
_ReadFile = Callable[[Path, str, str], tuple[Documents, Problems]]


@dataclass
class ReadingLog:
    """Remarks and findings for the user, collected while a job's data are read.

    Attributes:
        remarks: What was changed or left out, as counts.
        findings: What the checks found.
    """

    remarks: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


@dataclass(frozen=True)
class SiteOfJob:
    """One site of a job during the stages of reading.

    Attributes:
        job: The job.
        name: Name of the site.
        log: Collects what the stages change.
    """

    job: Job
    name: str
    log: ReadingLog

    @property
    def config(self) -> SiteConfig:
        """The site's table."""
        config: SiteConfig = self.job.sites[self.name]
        return config

    def remark(self, text: str) -> None:
        """Add a remark on the site."""
        self.log.remarks.append(f"{self.name}: {text}")


def list_files_by_part(config: SiteConfig) -> dict[str, str]:
    """Return the paths in a site's table by part, without empty ones."""
    paths = {
        _WHOLE: config.path,
        "train": config.train,
        "valid": config.valid,
        "test": config.test,
    }
    return {part: path for part, path in paths.items() if path}


def read_annotated_files(job: Job, log: ReadingLog) -> dict[str, Parts]:
    """Return the documents of each site's files, with mapped labels.

    Raises:
        DataError: Files cannot be used, or a site names a type that is not annotated.
            The error holds the problems of all sites.
        ConfigError: A setting does not match the files.
    """

    # Cached, because sites may share a file.
    @cache
    def read_file(path: Path, format: str, encoding: str) -> tuple[Documents, Problems]:
        """Return the documents of a file, and the problems with its unusable data."""
        return examine(path, format or None, encoding)

    problems: list[Problem] = []
    errors: list[DataError] = []
    sites: dict[str, Parts] = {}
    for name in job.sites:
        try:
            sites[name] = _read_site(SiteOfJob(job, name, log), read_file)
        except DataError as error:
            errors.append(error)
            problems += error.problems or (Problem("", 0, "site", str(error)),)
    # A single problem keeps its own, more specific error.
    if len(problems) == 1:
        raise errors[0]
    if problems:
        raise DataError.of(problems)
    return sites


def _read_site(site: SiteOfJob, read_file: _ReadFile) -> Parts:
    """Return the documents of one site, with mapped labels."""
    raw = _read_files(site, read_file)
    if len(raw) > 1:
        site.log.findings += find_shared_notes(raw, site.name)
    labels = list_types(chain(*raw.values()))
    label_map = site.config.label_map
    for label in label_map:
        if label not in labels:
            hint = suggest_name(label, labels, fallback="")
            remark = f"label_map has {label!r}, which is not annotated"
            site.remark(f"{remark}: {hint}" if hint else remark)
    _require_types(site, labels)

    with naming_place(f"site {site.name!r}", FednotesError):
        chosen = _choose_documents(site, raw)
    _compare_size(site, chosen)
    return {part: relabel(documents, label_map) for part, documents in chosen.items()}


def _read_files(site: SiteOfJob, read_file: _ReadFile) -> Parts:
    """Return the documents of a site's files.

    Raises:
        DataError: Files cannot be used; with the problems of all of them.
    """
    raw: Parts = {}
    unusable: list[Problem] = []
    config = site.config
    for part, text in list_files_by_part(config).items():
        try:
            with naming_place(f"site {site.name!r}", ConfigError):
                path = site.job.locate(text, f"sites.{site.name}.{part}")
                raw[part], problems = read_file(path, config.format, config.encoding)
            problems.raise_if_refused(config.on_error, raw[part])
        except DataError as error:
            unusable += error.problems or (Problem("", 0, "file", str(error)),)
            continue
        site.log.findings += report_problems(problems, site.name, Path(text).name)
    if unusable:
        raise DataError.of(unusable)
    return raw


def _require_types(site: SiteOfJob, labels: Types) -> None:
    """Check the types of a site's files after `label_map`.

    Args:
        site: The site.
        labels: Labels of its files.

    Raises:
        ConfigError: A type is called "O".
        DataError: A type that the site's table names is not annotated.
    """
    config = site.config
    mapped = {config.label_map.get(label, label) for label in labels} - {""}
    if "O" in mapped:
        raise ConfigError(
            f"{site.name}: mentions are called 'O', which is the tag of words outside "
            "every mention: give them another name in label_map"
        )
    for label in (*config.types, *config.test_types):
        if label not in mapped:
            annotated = ", ".join(sorted(mapped)) or "no entity"
            raise DataError(
                f"site {site.name!r} lists the type {label!r}, but its files have "
                f"{annotated}: {suggest_name(label, mapped)}"
            )


def _choose_documents(site: SiteOfJob, raw: Parts) -> Parts:
    """Return the documents of a site that its `where` and `share` keep."""
    config = site.config
    chosen = dict(raw)
    if config.where:
        chosen = {
            part: _choose_by_metadata(documents, config.where)
            for part, documents in raw.items()
        }
    if config.share:  # the site's table has `path`: `SiteConfig` refuses it otherwise
        chosen[_WHOLE] = _take_share(site, chosen[_WHOLE])
    return chosen


def _take_share(site: SiteOfJob, documents: Documents) -> Documents:
    """Return the `share` of a site: one of several equal parts of a corpus.

    The job's seed deals the documents out.
    """
    share, shares = site.config.part_of_corpus
    proportions = {str(number): 1 / shares for number in range(1, shares + 1)}
    dealt = split_documents(documents, proportions, site.config.split, site.job.seed)
    return dealt[str(share)]


def _choose_by_metadata(documents: Documents, where: str) -> Documents:
    """Return the documents whose metadata have a value, such as "genre=nw".

    Raises:
        DataError: No document has it.
    """
    key, _, value = where.partition("=")
    chosen = tuple(
        document for document in documents if str(document.meta.get(key)) == value
    )
    if chosen:
        return chosen
    values = {
        str(document.meta[key])[:_MAX_LENGTH]
        for document in documents
        if key in document.meta
    }
    if values:
        known = f"{key} is one of {', '.join(sorted(values)[:_MAX_LISTED])}"
    else:
        keys = sorted(set(_list_metadata_keys(documents)))[:_MAX_LISTED]
        known = f"their meta has {', '.join(keys) or 'nothing to choose by'}"
    raise DataError(f"where = {where!r}: no document has this value: {known}")


def _list_metadata_keys(documents: Documents) -> Iterator[str]:
    """Yield the keys of metadata by which documents can be chosen."""
    for document in documents:
        for key, value in document.meta.items():
            if isinstance(value, str | int):
                yield key


def _compare_size(site: SiteOfJob, parts: Mapping[str, Documents]) -> None:
    """Add a finding if the number of sentences differs from `expected_sentences`."""
    expected = site.config.expected_sentences
    if not expected:
        return
    documents = chain.from_iterable(parts.values())
    sentences = sum(len(split_sentences(document)) for document in documents)
    if sentences != expected:
        site.log.findings.append(compare_size(site.name, sentences, expected))
