"""The files of a job's sites → documents with mapped labels: first step of `sites.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path

from fednotes.core.errors import ConfigError, DataError, FednotesError, Problem, nearest
from fednotes.core.types import Document
from fednotes.data.checks import in_two_parts, problem_findings
from fednotes.data.findings import Finding
from fednotes.data.formats import examine
from fednotes.data.formats.problems import Problems
from fednotes.data.split import split
from fednotes.data.tags import relabel, types_of
from fednotes.job_tables import SiteConfig
from fednotes.jobs import Job, expand

Documents = tuple[Document, ...]
Parts = dict[str, Documents]
Reader = Callable[[str, str, str], tuple[Documents, Problems]]

_SHOWN = 12  # values in a message


def _reader(job: Job) -> Reader:
    """(path, format, where it is named) → documents, and what is wrong with the others; a file
    that sites share is read once."""

    @cache
    def read_once(path: Path, format: str) -> tuple[Documents, Problems]:
        return examine(path, format or None)

    def reader(text: str, format: str, where: str) -> tuple[Documents, Problems]:
        path = Path(expand(text, where))
        return read_once(path if path.is_absolute() else job.folder / path, format)

    return reader


def read_sites(job: Job, notes: list[str], findings: list[Finding]) -> dict[str, Parts]:
    """The documents of every site's `path`, or train, valid and test, with mapped labels.

    notes, findings: take what was changed, and what to know of the files. Raises DataError of
    the problems of all sites together, ConfigError for a setting that does not fit them.
    """
    reader = _reader(job)
    problems: list[Problem] = []
    first = None
    raw: dict[str, Parts] = {}
    for name, site in job.sites.items():
        try:
            raw[name] = _read_site(job, name, site, reader, notes, findings)
        except DataError as error:
            first = first or error
            problems += error.problems or (Problem("", 0, "site", str(error)),)
    if first is None:
        return raw
    raise first if len(problems) == 1 else DataError.of(problems)


def _read_site(
    job: Job,
    name: str,
    site: SiteConfig,
    reader: Reader,
    notes: list[str],
    findings: list[Finding],
) -> Parts:
    """The documents of `path`, or of train, valid and test, with mapped labels."""
    raw = _files(name, site, reader, findings)
    if len(raw) > 1:
        findings += in_two_parts(raw, name)
    _check_labels(name, site, types_of(chain(*raw.values())), notes)
    try:
        chosen = {part: _where(documents, site.where) for part, documents in raw.items()}
        if site.share:
            number, of = site.shares
            shares = {str(i): 1 / of for i in range(1, of + 1)}
            chosen["path"] = split(chosen["path"], shares, site.split, job.seed)[str(number)]
    except FednotesError as error:
        raise type(error)(f"site {name!r}: {error}") from error
    return {part: relabel(documents, site.label_map) for part, documents in chosen.items()}


def _files(name: str, site: SiteConfig, reader: Reader, findings: list[Finding]) -> Parts:
    """The documents of each of a site's files. Raises DataError of the problems of all files."""
    raw: Parts = {}
    wrong: list[Problem] = []
    for part in ("path", "train", "valid", "test"):
        if not (text := getattr(site, part)):
            continue
        try:
            raw[part], problems = reader(text, site.format, f"sites.{name}.{part}")
            if site.on_error == "refuse" or not raw[part]:
                problems.refuse()
        except ConfigError as error:
            raise ConfigError(f"site {name!r}: {error}") from error
        except DataError as error:
            wrong += error.problems or (Problem("", 0, "file", str(error)),)
            continue
        findings += problem_findings(problems, name, Path(text).name)
    if wrong:
        raise DataError.of(wrong)
    return raw


def _where(documents: Documents, where: str) -> Documents:
    """The documents whose meta has the value; all if nothing is asked."""
    if not where:
        return documents
    key, _, value = where.partition("=")
    chosen = tuple(d for d in documents if str(d.meta.get(key)) == value)
    if not chosen:
        known = sorted({str(d.meta[key])[:20] for d in documents if key in d.meta})
        keys = sorted({k for d in documents for k, v in d.meta.items() if isinstance(v, str | int)})
        raise DataError(
            f"where = {where!r}: no document has this value; "
            + (
                f"{key} is one of {', '.join(known[:_SHOWN])}"
                if known
                else f"their meta has {', '.join(keys[:_SHOWN]) or 'nothing to choose by'}"
            )
        )
    return chosen


def _check_labels(name: str, site: SiteConfig, found: tuple[str, ...], notes: list[str]) -> None:
    """A type that is asked for but occurs in no file of the site is a misspelt one."""
    for label in site.label_map:
        if label not in found:
            notes.append(f"{name}: label_map has {label!r}, which is not annotated")
    mapped = sorted({site.label_map.get(label, label) for label in found} - {""})
    for label in (*site.types, *site.test_types):
        if label not in mapped:
            raise DataError(
                f"site {name!r} asks for the type {label!r}, its files have "
                f"{', '.join(mapped) or 'no entity'}; {nearest(label, mapped)}"
            )
