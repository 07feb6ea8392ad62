"""PubTator: `PMID|t|title`, `PMID|a|abstract`, then a line per mention or relation.

    PMID<TAB>start<TAB>end<TAB>text<TAB>type<TAB>concept[<TAB>parts of a joint mention]
    PMID<TAB>relation<TAB>concept<TAB>concept[<TAB>Novel or No]

The text is title, one line break and abstract; the break counts as one character in
offsets. `meta["concepts"]` has a row (start, end, type, concept, parts…) per mention
with a concept, `meta["relations"]` a row per relation.
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
from fednotes.data.formats.gathering import ReadDocument, gather_documents
from fednotes.data.formats.mentions import has_form, require_in_text
from fednotes.data.formats.problems import Problems

_PASSAGE = re.compile(r"([^\s|]+)\|([ta])\|(.*)", re.DOTALL)
_OFFSET = re.compile(r"[0-9]{1,9}")
_RELATION = re.compile(r"[^\W\d_].*")
_NOVELTY = {"Novel", "No"}  # BioRED's fifth column of a relation


@dataclass
class _Article:
    """An article while it is read.

    Attributes:
        id: Its PMID.
        title: Its title.
        line: The line of the title.
        abstract: Its abstract; None until it was read.
        rows: The line number and the columns of each mention and relation.
    """

    id: str
    title: str
    line: int
    abstract: str | None = None
    rows: list[tuple[int, list[str]]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Title and abstract."""
        return f"{self.title}\n{self.abstract}" if self.abstract else self.title


def accepts(path: Path) -> bool:
    """Return whether the first line is a title, or the suffix is .pubtator."""
    match = _PASSAGE.fullmatch(read_first_line(path))
    return path.suffix == ".pubtator" or (match is not None and match.group(2) == "t")


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return a document per article; its id is the PMID.

    These problems are collected with their lines: a line that matches no pattern, and
    offsets at which the text differs from the mention's.
    """
    return gather_documents(
        find_corpus_files(path, accepts, "PubTator"), _read_file, problems
    )


def _read_file(path: Path, problems: Problems) -> list[ReadDocument]:
    """Return the documents of a file."""
    articles: list[_Article] = []
    for number, line in read_nonblank_lines(path):
        passage = _PASSAGE.fullmatch(line)
        if passage and passage.group(2) == "t":
            articles.append(_Article(passage.group(1), passage.group(3), number))
            continue
        with problems.collecting("line", path, number):
            columns = line.split("\t")
            pmid = passage.group(1) if passage else columns[0]
            if not articles or articles[-1].id != pmid:
                raise DataError("no title line with this PMID precedes it")
            article = articles[-1]
            if passage is None:
                article.rows.append((number, columns))
            elif article.abstract is not None:
                raise DataError("a second abstract for one PMID")
            else:
                article.abstract = passage.group(3)
    return [
        ReadDocument(_to_document(path, article, problems), path, article.line)
        for article in articles
    ]


def _to_document(path: Path, article: _Article, problems: Problems) -> Document:
    """Return the document of an article.

    Mentions that differ from the text are added to `problems` and left out.
    """
    text = article.text
    spans = []
    concepts = []
    relations = []
    for number, columns in article.rows:
        if _is_relation(columns, text):
            relations.append(tuple(columns[1:]))
            continue
        with problems.collecting("mention", path, number):
            span = _parse_mention(columns, text)
            spans.append(span)
            if columns[5:]:
                concepts.append((span.start, span.end, span.label, *columns[5:]))
    meta: dict[str, Any] = {}
    if concepts:
        meta["concepts"] = tuple(concepts)
    if relations:
        meta["relations"] = tuple(relations)
    return Document(article.id, text, tuple(spans), meta=meta)


def _is_relation(columns: list[str], text: str) -> bool:
    """Return whether a line is a relation, and not a mention with a damaged start."""
    if not 3 <= len(columns) <= 5 or not _RELATION.fullmatch(columns[1]):
        return False
    if len(columns) == 5 and columns[4] not in _NOVELTY:
        return False
    if len(columns) == 3 or not _OFFSET.fullmatch(columns[2]):
        return True
    # The concept of a gene is also a number, but only an end offset is preceded by the
    # mention's text.
    return not (columns[3] and text.endswith(columns[3], 0, int(columns[2])))


def _parse_mention(columns: list[str], text: str) -> Span:
    """Return the mention of a line.

    Raises:
        DataError: The line is not a mention, or the mention's text differs from the
            document's.
    """
    if len(columns) < 5 or not all(map(_OFFSET.fullmatch, columns[1:3])):
        raise DataError(
            f"{len(columns)} columns, expected PMID, start, end (numbers), text, type"
        )
    start, end = require_in_text(int(columns[1]), int(columns[2]), len(text))
    if not has_form(text, [(start, end)], columns[3]):
        raise DataError(
            f"the text of the mention differs from the document at {start}:{end}"
        )
    label = columns[4].strip()
    if not label:
        raise DataError("the type is empty")
    return Span(start, end, intern(label))
