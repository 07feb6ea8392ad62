"""`fednotes check`: everything that is wrong with a corpus or a job, before training."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fednotes.core.errors import (
    ConfigError,
    DataError,
    FednotesError,
    ParameterError,
    Problem,
)
from fednotes.core.types import Document
from fednotes.data.checks import (
    CorpusCheck,
    Finding,
    agreement,
    in_two_parts,
    leaks,
    problem_findings,
)
from fednotes.data.encodings import AUTO
from fednotes.data.formats import examine, read, stream
from fednotes.data.formats.folders import name_paths
from fednotes.data.formats.problems import OnError, Problems, refuses
from fednotes.data.tags import flatten
from fednotes.engines.inprocess import InProcess
from fednotes.jobs.job import Job, Sites
from fednotes.jobs.job_file import load_job
from fednotes.jobs.parts import (
    Part,
    is_summed_securely,
    list_parts,
    make_method_sites,
    prepare,
)
from fednotes.metrics.spans import SpanCounts, token_kappa

# kind of a problem with a path of which nothing can be read, whatever is left out
UNREADABLE = "unreadable"
_OFTEN = 100  # documents between two reports of how many were read


@dataclass(frozen=True)
class Checked:
    """What a check found.

    problems: by file and line, where these are known. number: how many there are, if
    they are more than are kept. job, sites: of a job, as far as they could be read.
    agreement: with another annotation, as `agreed` counts it.
    """

    problems: tuple[Problem, ...] = ()
    number: int = 0
    findings: tuple[Finding, ...] = ()
    job: Job | None = None
    sites: Sites | None = None
    agreement: Mapping[str, Any] | None = None

    @property
    def wrong(self) -> tuple[Problem, ...]:
        """`problems`, and the findings that are errors."""
        errors = [f for f in self.findings if f.level == "error"]
        listed = [p for f in errors for p in f.problems]
        unlisted = [f for f in errors if not f.problems]  # else each is counted already
        others = [Problem("", 0, f.code, f"{f.where}: {f.message}") for f in unlisted]
        return (*self.problems, *listed, *others)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: problems by file and line (null where none is to
        blame)."""
        wrong, left = self.wrong, max(0, self.number - len(self.problems))
        return {
            "problems": [
                {**asdict(p), "file": p.file or None, "line": p.line or None}
                for p in wrong
            ],
            "findings": [finding.to_dict() for finding in self.findings],
            **({} if self.agreement is None else {"agreement": dict(self.agreement)}),
            "counts": {
                "problems": len(wrong) + left,
                "kinds": dict(Counter(p.kind for p in wrong)),
            },
        }


def check_files(
    paths: Sequence[Path],
    format: str | None = None,
    on_error: OnError = "refuse",
    encoding: str = AUTO,
    heard: Callable[[int], None] | None = None,
) -> Checked:
    """Check a corpus, or several files or folders that are the parts of one.

    on_error: with "skip" what cannot be used is no problem, but counted. encoding: of
    files without a byte-order mark that are not UTF-8. Raises DataError for a path that
    does not exist, ConfigError for a format that does not.

    A single corpus in JSON lines is read document by document and not held. heard: is
    told, from time to time, how many documents were read.
    """
    for path in paths:
        if not os.path.exists(path):
            raise DataError(f"{path}: no such file or folder")
    places = name_paths(paths) if len(paths) > 1 else {"corpus": paths[0]}
    wrong, number = list[Problem](), 0
    findings: list[Finding] = []
    parts: dict[str, tuple[Document, ...]] = {}
    for name, path in places.items():
        problems = Problems()
        held: list[Document] = []
        read_so_far = 0
        try:
            with CorpusCheck(name) as corpus:
                for document in stream(path, problems, format, encoding):
                    corpus.add(document)
                    if len(places) > 1:  # for what the parts share
                        held.append(document)
                    read_so_far += 1
                    if heard is not None and not read_so_far % _OFTEN:
                        heard(read_so_far)
                of_corpus = corpus.findings()
        except DataError as error:
            told = str(error).removeprefix(f"{path}: ")
            own = error.problems or (Problem(str(path), 0, UNREADABLE, told),)
            wrong += own
            number += len(own)
            continue
        if refuses(on_error):
            wrong += problems.listed
            number += problems.number
            problems.counts.clear()
        parts[name] = tuple(held)
        findings += problem_findings(problems, name, path.name)
        if read_so_far or not problems.listed:
            findings += of_corpus
    findings += (*in_two_parts(parts, "corpus"), *leaks(parts, "corpus"))
    return Checked(tuple(wrong), number, tuple(findings))


def check_against(
    path: Path,
    other: Path,
    format: str | None,
    on_error: OnError,
    encoding: str = AUTO,
) -> Checked:
    """Check a corpus, and how well another annotation of the same documents agrees with
    it.

    Raises as `check_files`, DataError where the other one cannot be read or none of its
    documents is one of these.
    """
    found = check_files([path], format, on_error, encoding)
    documents, _ = examine(path, format, encoding)
    scores = agreed(documents, read(other, None, on_error, encoding))
    if not scores["documents"]:
        raise DataError(
            f"{other}: no document with the id and the text of one in {path}"
        )
    told = (*found.findings, *agreement(scores, path.name))
    return replace(found, findings=told, agreement=scores)


def agreed(one: Iterable[Document], other: Iterable[Document]) -> dict[str, Any]:
    """How well two annotations agree: of documents with the same id and text.

    F1 of mentions, flattened to the outermost, strict and relaxed (any overlap), over
    all types and by type; Cohen's kappa of the tokens' types. apart: the other ids,
    each once.
    """
    known = {document.id: document for document in other}
    mine = list(one)
    pairs = [
        (d, known[d.id]) for d in mine if d.id in known and known[d.id].text == d.text
    ]
    flat = [
        [
            replace(pair[i], spans=flatten(pair[i].spans, "outermost")[0])
            for pair in pairs
        ]
        for i in (0, 1)
    ]
    counts = SpanCounts.of(flat[0], flat[1])
    tokens, kappa = token_kappa(flat[0], flat[1])
    f1 = {kind: counts.total.score(kind)["f1"] for kind in ("strict", "relaxed")}
    by_type = {name: own.score("strict")["f1"] for name, own in counts.by_type.items()}
    ids = {document.id for document in mine} | known.keys()
    numbers = {"documents": len(pairs), "apart": len(ids) - len(pairs)}
    numbers |= {
        "gold": counts.total.gold,
        "predicted": counts.total.predicted,
        "tokens": tokens,
    }
    return {**numbers, **f1, "kappa": kappa, "strict_by_type": by_type}


def check_job(name: str, settings: tuple[str, ...] = ()) -> Checked:
    """Check all that a simulation of a job would do before it trains.

    name, settings: as `load_job`. Raises ConfigError where there is no such job, or a
    setting of the command line is none.
    """
    try:
        job = load_job(name, settings)
    except ConfigError as error:
        if isinstance(error, ParameterError) or not Path(name).is_file():
            raise
        return _refused(error)
    stopped = Checked(job=job)
    try:
        sites, _, parts = prepare(job)
    except FednotesError as error:
        others = [other for other in _stand_in(job) if str(other) != str(error)]
        problems = [p for each in (error, *others) for p in _problems(each)]
        return replace(stopped, problems=tuple(problems), number=len(problems))
    try:
        rehearse(job, parts)
    except FednotesError as error:
        stopped = _refused(error)
    return replace(stopped, findings=job.kind.check(job, sites), job=job, sites=sites)


def _refused(error: FednotesError) -> Checked:
    """What a simulation would refuse."""
    found = _problems(error)
    return Checked(found, len(found))


def _problems(error: FednotesError) -> tuple[Problem, ...]:
    return getattr(error, "problems", ()) or (Problem("", 0, "job", str(error)),)


def rehearse(job: Job, parts: Iterable[Part]) -> None:
    """Make the sites and models of every part as a simulation does, and train none of
    them.

    Where frozen features are computed of notes, one sentence of each site stands for
    them.
    Raises FednotesError as the simulation would.
    """
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            model = getattr(part.config, "model", None)
            frozen = getattr(model, "contextual", "") or getattr(model, "tuning", "")
            little = bool(frozen) and job.kind.shrink
            if little:
                part = replace(part, sites=tuple(map(little, part.sites)))
            cache = Path(folder) if little else None
            members = make_method_sites(
                job, part, [None] * len(part.sites), cache=cache
            )
            InProcess(members, secure=is_summed_securely(job, part))


def _stand_in(job: Job) -> Iterable[FednotesError]:
    """What is wrong with a job's model, tried on a sentence where its notes cannot be
    read."""
    if job.kind.invent_site is None:
        return
    sites = tuple(job.kind.invent_site(name, site) for name, site in job.sites.items())
    try:
        parts = list_parts(job, Sites(sites), job.module.configure(job.config, sites))
        rehearse(
            job, [part for part in parts if part.condition == "federated"] or parts[:1]
        )
    except FednotesError as error:
        yield error
