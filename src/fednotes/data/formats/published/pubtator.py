"""PubTator: `PMID|t|title`, `PMID|a|abstract`, then a line per mention or relation.

    PMID<TAB>start<TAB>end<TAB>text<TAB>type<TAB>concept[<TAB>parts of a joint mention]
    PMID<TAB>relation<TAB>concept<TAB>concept[<TAB>Novel or No]

Text is title, one line break, abstract: offsets count the break as one character.
`meta["concepts"]` has a row (start, end, type, concept, parts…) per mention that names
a concept, `meta["relations"]` a row per relation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from sys import intern
from typing import Any

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats.files import read_first_line, read_nonblank_lines
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather
from fednotes.data.formats.mentions import is_same_text, require_in_text
from fednotes.data.formats.problems import Problems

_PASSAGE = re.compile(r"([^\s|]+)\|([ta])\|(.*)", re.DOTALL)
_OFFSET = re.compile(r"[0-9]{1,9}")
_RELATION = re.compile(r"[^\W\d_].*")
_NOVELTY = {"Novel", "No"}  # BioRED's fifth column of a relation


@dataclass
class _Article:
    id: str
    title: str
    line: int
    abstract: str | None = None
    rows: list[tuple[int, list[str]]] = field(default_factory=list)  # line, columns


def accepts(path: Path) -> bool:
    """Whether the first line is a title, or the file's name says so."""
    match = _PASSAGE.fullmatch(read_first_line(path))
    return path.suffix == ".pubtator" or (match is not None and match.group(2) == "t")


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """One document per article; id: its PMID.

    Noted, with the line, are a line that fits no pattern and offsets that do not hold
    the mention's text.
    """
    return gather(find_corpus_files(path, accepts, "PubTator"), _read_file, problems)


def _read_file(path: Path, problems: Problems) -> list[ReadDocument]:
    articles: list[_Article] = []
    for number, line in read_nonblank_lines(path):
        passage = _PASSAGE.fullmatch(line)
        if passage and passage.group(2) == "t":
            articles.append(_Article(passage.group(1), passage.group(3), number))
            continue
        columns = line.split("\t")
        with problems.collect("line", path, number):
            if not articles or articles[-1].id != (
                passage.group(1) if passage else columns[0]
            ):
                raise DataError("no title line with this PMID goes before")
            if passage is None:
                articles[-1].rows.append((number, columns))
            elif articles[-1].abstract is not None:
                raise DataError("a second abstract for one PMID")
            else:
                articles[-1].abstract = passage.group(3)
    return [ReadDocument(_document(path, a, problems), path, a.line) for a in articles]


def _document(path: Path, article: _Article, problems: Problems) -> Document:
    text = f"{article.title}\n{article.abstract}" if article.abstract else article.title
    spans, concepts, relations = [], [], []
    for number, columns in article.rows:
        if _is_relation(columns, text):
            relations.append(tuple(columns[1:]))
            continue
        with problems.collect("mention", path, number):
            span = _span(columns, text)
            spans.append(span)
            if columns[5:]:
                concepts.append((span.start, span.end, span.label, *columns[5:]))
    meta: dict[str, Any] = {"concepts": tuple(concepts), "relations": tuple(relations)}
    return Document(
        article.id, text, tuple(spans), meta={k: v for k, v in meta.items() if v}
    )


def _is_relation(columns: list[str], text: str) -> bool:
    """Whether a line is a relation, and no mention whose start is not a number."""
    if not 3 <= len(columns) <= 5 or not _RELATION.fullmatch(columns[1]):
        return False
    if len(columns) == 5 and columns[4] not in _NOVELTY:
        return False
    if len(columns) == 3 or not _OFFSET.fullmatch(columns[2]):
        return True
    # A gene's concept is a number too; only an end offset has the mention before it.
    return not (columns[3] and text[: int(columns[2])].endswith(columns[3]))


def _span(columns: list[str], text: str) -> Span:
    if len(columns) < 5 or not all(map(_OFFSET.fullmatch, columns[1:3])):
        raise DataError(
            f"{len(columns)} columns, expected PMID, start, end (numbers), text, type"
        )
    start, end = require_in_text(int(columns[1]), int(columns[2]), len(text))
    if not is_same_text(text[start:end], columns[3]):
        raise DataError(f"{start}:{end} is not what the text holds there")
    if not columns[4].strip():
        raise DataError("the type is empty")
    return Span(start, end, intern(columns[4].strip()))
