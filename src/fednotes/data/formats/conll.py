"""CoNLL and IOB: one token per line, with its tag in the last column.

A blank line ends a sentence. Tabs or runs of spaces separate the columns. Tags may be
BIO, IOB1, BIOES (also with the letters of BILOU or BMES) or IO. `# newdoc id = X` and
`-DOCSTART-` begin a document; in a file without them, each sentence is a document.
Other lines that begin with `#` and are not tokens are comments. Everything besides
tokens and tags is stored in `meta["conll"]`.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from pathlib import Path
from sys import intern
from typing import Any

import numpy as np

from fednotes.core import bounds
from fednotes.core.cleaning import NAME, clean
from fednotes.core.errors import DataError
from fednotes.core.store import write_out
from fednotes.core.types import Document, Scheme, Span, TagSet
from fednotes.core.wording import format_count
from fednotes.data.formats.files import read_head, read_lines
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import (
    DERIVED_ID,
    ReadDocument,
    gather_documents,
    stream_files,
)
from fednotes.data.formats.mentions import lay_out
from fednotes.data.formats.problems import Problems
from fednotes.data.tags import decode_tags, encode_tags, flatten
from fednotes.data.text import split_sentences, tokenize

LOOSE = 2  # tags are recognised by guessing
_ACCEPT_LINES = 400  # lines from which it is decided whether to accept a file
_LAYOUT_LINES = 100_000  # lines from which the columns of a file are guessed
_TAG = re.compile(r"O|[BIESLUM]-\S.*")
_SEPARATORS = re.compile("[\t\n\r]")
_NEWDOC = re.compile(r"#\s*newdoc\b(?:\s+id\s*=\s*(.*\S))?")
_DOCSTART = "-DOCSTART-"
_SUFFIXES = {".conll", ".bio", ".iob", ".iob2", ".bioes"}
_BASE_SCHEMES: dict[str, Scheme] = {"IO": "IO", "BIO": "BIO", "IOB1": "BIO"}
_CANONICAL_LETTERS = {"L": "E", "U": "S", "M": "I"}
_SCHEME_LETTERS = {"BILOU": {"E": "L", "S": "U"}, "BMES": {"I": "M"}}

Row = list[str]  # the columns of a token


@dataclass
class _Part:
    """A document of a file while it is read.

    Attributes:
        marker: The line that begins it, or "".
        name: Its id, or "".
        line: The number of its first line.
        sentences: The rows of each sentence, and the comments before it.
    """

    marker: str = ""
    name: str = ""
    line: int = DERIVED_ID
    sentences: list[tuple[list[Row], list[str]]] = field(default_factory=list)


@dataclass
class _Sentence:
    """A sentence of a file.

    Attributes:
        rows: Its rows of columns.
        comments: The comments before it.
        line: The line that it ends on.
        size: The number of characters of its lines.
        is_damaged: Whether one of its lines is neither a token nor a comment before it.
    """

    rows: list[Row] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    line: int = 0
    size: int = 0
    is_damaged: bool = False


@dataclass(frozen=True)
class _Layout:
    """The common properties of all documents of a file.

    Attributes:
        separator: The separator of the columns, a tab or a space.
        width: The number of columns.
        has_markers: Whether special lines mark where documents begin.
        scheme: The scheme of the tags.
        types: The types of the mentions, sorted.
    """

    separator: str
    width: int = 2
    has_markers: bool = True
    scheme: str = "BIO"
    types: tuple[str, ...] = ()

    @cached_property
    def tagset(self) -> TagSet:
        """The tag set for decoding the tags."""
        types = tuple(intern(name) for name in self.types)
        return TagSet(types, _BASE_SCHEMES.get(self.scheme, "BIOES"))

    @cached_property
    def tag_ids(self) -> dict[str, int]:
        """The id of each tag of the tag set."""
        return {tag: number for number, tag in enumerate(self.tagset.tags)}

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The meta that all documents share."""
        return {"conll": {"scheme": self.scheme, "separator": self.separator}}


# ---- reading -------------------------------------------------------------------------


def accepts(path: Path) -> bool:
    """Return whether most lines of the file end in a tag, or its suffix fits."""
    if path.suffix.lower() in _SUFFIXES:
        return True
    head = read_head(path)[:_ACCEPT_LINES]
    lines = [line for line in head if not line.startswith("# ")]
    rows = [_split_columns(line, _find_separator(line)) for line in lines]
    tokens = [row for row in rows if len(row) > 1 and is_tag(row[-1])]
    return 2 * len(tokens) > len(lines)


def is_tag(text: str) -> bool:
    """Return whether a text is O, or a letter of a scheme and a type."""
    return _TAG.fullmatch(text) is not None


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return documents with the tokens and sentences of the file.

    Tokens are joined by spaces. A tag that the scheme does not permit at its position
    (an I- that continues nothing) is repaired like in conlleval; `meta["repaired"]`
    counts such tags. A wrong number of columns or an invalid tag is added to `problems`
    with its line, and its sentence is left out.
    """
    return gather_documents(_find_files(path), _read_file, problems)


def stream(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the documents of `read` one by one."""
    return stream_files(_find_files(path), _read_file, problems)


def _find_files(path: Path) -> list[Path]:
    """Return the files of a corpus that have this format."""
    return find_corpus_files(path, accepts, "CoNLL")


def _read_file(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the documents of a file.

    The file is read three times: for its columns, its tags and its texts. Scheme and
    types apply to the whole file and determine how tags are read, so they must be known
    before the first document is read.
    """
    problems_before = problems.number
    layout = _find_layout(path)
    documents = 0
    for number, part in enumerate(_read_parts(path, problems, layout), 1):
        documents += bool(part.sentences)
        yield _make_read_document(part, number, path, layout)
    if not documents and problems.number == problems_before:
        raise DataError("the file contains no tokens")


def parse_rows(rows: Sequence[tuple[str, list[Row]]], path: Path) -> list[ReadDocument]:
    """Return documents of one sentence each.

    Args:
        rows: The name of each document, or "", and the rows of its tokens, with the tag
            in the last column.
        path: The file.
    """
    tags = _Tags()
    for _, tokens in rows:
        tags.add([token[-1] for token in tokens])
    layout = _Layout("\t", scheme=tags.guess_scheme(), types=tuple(sorted(tags.types)))
    documents = []
    for number, (name, tokens) in enumerate(rows, 1):
        part = _Part(name=name, line=0, sentences=[(tokens, [])])  # without comments
        documents.append(_make_read_document(part, number, path, layout))
    return documents


def _make_read_document(
    part: _Part, number: int, path: Path, layout: _Layout
) -> ReadDocument:
    """Return the document of a part, with its place in the file.

    Args:
        part: The part.
        number: Its number in the file, for an id if it has no name.
        path: The file.
        layout: The layout of the file.
    """
    name = part.name or f"{path.stem}:{number}"
    line = part.line if part.name else DERIVED_ID
    return ReadDocument(_parse_part(name, part, layout), path, line)


def _read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file and their numbers."""
    expected = "one token per line, its tag in the last column"
    return read_lines(path, max_length=bounds.TOKEN_LINE, expected=expected)


def _find_layout(path: Path) -> _Layout:
    """Return the layout of a file, which is read for this from start to end."""
    separator, width = _guess_columns(path)
    tags = _Tags()
    has_markers = False
    for event in _read_sentences(path, Problems(), separator, width):
        if isinstance(event, _Part):
            has_markers = True
            continue
        tags.add([row[-1] for row in event.rows])
        if len(tags.types) > bounds.ENTITY_TYPES:
            raise DataError.at(
                path,
                event.line,
                f"more than {bounds.ENTITY_TYPES:,} entity types: check that the "
                "last column has the tags",
            )
    types = tuple(sorted(tags.types))
    return _Layout(separator, width, has_markers, tags.guess_scheme(), types)


def _read_parts(path: Path, problems: Problems, layout: _Layout) -> Iterator[_Part]:
    """Yield the documents of a file, or its sentences if it has no document markers."""
    part = _Part()
    size = 0
    for event in _read_sentences(path, problems, layout.separator, layout.width):
        if isinstance(event, _Part):
            if part.sentences or part.marker:
                yield part
            part = event
            size = 0
            continue
        part.sentences.append((event.rows, event.comments))
        size += len(event.rows)
        if size > bounds.TOKENS:
            raise DataError.at(
                path,
                event.line,
                f"a document of more than {bounds.TOKENS:,} tokens: split it into "
                "notes",
            )
        if not layout.has_markers:
            yield part
            part = _Part()
            size = 0
    if part.sentences or part.marker:
        yield part


def _read_sentences(
    path: Path, problems: Problems, separator: str, width: int
) -> Iterator[_Part | _Sentence]:
    """Yield the content of a file in order: a new, empty part, or a sentence.

    A line that is neither a token nor a comment is added to `problems`, and its
    sentence is left out.

    Args:
        path: The file.
        problems: Collects the problems.
        separator: The separator of the columns, a tab or a space.
        width: The number of columns of a token.

    Raises:
        DataError: A sentence is too long.
    """
    sentence = _Sentence()
    last_line = (0, "")  # an empty line, which ends the last sentence
    for number, line in chain(_read_lines(path), [last_line]):
        row = _split_columns(line, separator)
        is_token = len(row) == width and is_tag(row[-1]) and row[0] != _DOCSTART
        part = None if is_token else _parse_marker(line, row, number)
        is_blank = not line.strip(" \t")
        if part is None and not is_blank:
            sentence.line = number
            sentence.size += len(line)
            _require_short(sentence, path)
            if is_token and row[0].strip(" "):
                sentence.rows.append(row)
            elif line.startswith("#") and not sentence.rows:
                sentence.comments.append(line)
            else:
                problems.note("line", path, number, _explain_row(row, width))
                sentence.is_damaged = True
            continue

        if sentence.rows and not sentence.is_damaged:
            yield sentence
        # Comments without a sentence belong to the next one, so they are kept.
        if sentence.rows or sentence.is_damaged:
            sentence = _Sentence()
        if part is not None:
            yield part


def _require_short(sentence: _Sentence, path: Path) -> None:
    """Raise DataError if no further line may be added to a sentence."""
    if sentence.size > bounds.LINE or len(sentence.rows) >= bounds.TOKENS:
        raise DataError.at(
            path,
            sentence.line,
            f"a sentence of more than {bounds.TOKENS:,} tokens, or {bounds.LINE:,} "
            "characters: put an empty line after each",
        )


def _parse_marker(line: str, row: Row, number: int) -> _Part | None:
    """Return the new document if a line begins one, else None."""
    newdoc = _NEWDOC.fullmatch(line.strip())
    if newdoc is not None:
        return _Part(line, newdoc.group(1) or "", number)
    return _Part(line, "", number) if row[0] == _DOCSTART else None


def _explain_row(row: Row, width: int) -> str:
    """Return the reason why a row is not a token with its tag."""
    if len(row) != width:
        columns = format_count(len(row), "column")
        return f"{columns}, expected {width} (token first, tag last)"
    if not row[0].strip(" "):
        return "the token is empty"
    return "the last column is not a tag: expected O or a tag such as B-Drug"


def _guess_columns(path: Path) -> tuple[str, int]:
    """Return the separator and column count of most lines that end in a tag.

    Only the first lines are examined, unless none of them ends in a tag.
    """
    counts: Counter[tuple[str, int]] = Counter()
    first_content = ""
    first_tagged = ""
    for number, line in _read_lines(path):
        if counts and number > _LAYOUT_LINES:
            break
        separator = _find_separator(line)
        row = _split_columns(line, separator)
        if len(row) > 1 and is_tag(row[-1]) and not line.startswith(("# ", _DOCSTART)):
            counts[separator, len(row)] += 1
        if not first_content and line.strip(" \t") and line[0] not in "#-":
            first_content = line
        if not first_tagged and is_tag(_split_columns(line)[-1]):
            first_tagged = line
    if counts:
        return counts.most_common(1)[0][0]
    line = first_content or first_tagged
    separator = _find_separator(line)
    return separator, max(2, len(_split_columns(line, separator)))


def _find_separator(line: str) -> str:
    """Return the separator of a line: a tab if it has one, else a space."""
    return "\t" if "\t" in line else " "


def _split_columns(line: str, separator: str = " ") -> Row:
    """Return the columns of a line."""
    if separator == "\t":
        return line.rstrip(" ").split("\t")
    return re.split("[ \t]+", line.strip(" \t"))


class _Tags:
    """Detection of the scheme and the types of a file's tags.

    Attributes:
        types: The types so far.
    """

    def __init__(self) -> None:
        self.types: set[str] = set()
        self._letters: set[str] = set()
        self._opening_letters: set[str] = set()  # of tags after O or another type

    def add(self, tags: Sequence[str]) -> None:
        """Include the tags of a sentence."""
        for before, tag in pairwise(["O", *tags]):
            if tag == "O":
                continue
            self.types.add(tag[2:])
            self._letters.add(tag[0])
            if before[1:] != tag[1:]:
                self._opening_letters.add(tag[0])

    def guess_scheme(self) -> str:
        """Return the scheme of the tags so far, judged by their letters."""
        for scheme, letters in (("BILOU", "LU"), ("BMES", "M"), ("BIOES", "ES")):
            if self._letters & set(letters):
                return scheme
        if self._letters == {"I"}:
            return "IO"
        is_iob1 = "I" in self._opening_letters and "B" not in self._opening_letters
        return "IOB1" if is_iob1 else "BIO"


def _parse_part(name: str, part: _Part, layout: _Layout) -> Document:
    """Return the document of a part: its text, mentions, sentences and tokens."""
    text, sentences, tokens = lay_out(
        [[row[0] for row in rows] for rows, _ in part.sentences]
    )
    spans: list[Span] = []
    first = 0
    repaired = 0
    for rows, _ in part.sentences:
        last = first + len(rows)
        offsets = np.array(tokens[first:last])  # (tokens, 2)
        ids = np.array([_find_tag_id(row[-1], layout) for row in rows])
        sentence_spans = decode_tags(ids, offsets, layout.tagset)
        if layout.scheme != "IOB1":
            canonical, _ = encode_tags(sentence_spans, offsets, layout.tagset)
            repaired += int((canonical != ids).sum())
        spans += sentence_spans
        first = last
    meta = _make_meta(part, layout)
    if repaired:
        meta = {**meta, "repaired": repaired}
    return Document(
        name, text, tuple(spans), meta=meta, sentences=sentences, tokens=tokens
    )


def _find_tag_id(tag: str, layout: _Layout) -> int:
    """Return the id of a tag, whose letter may be that of another scheme."""
    letter = _CANONICAL_LETTERS.get(tag[0], tag[0])
    return layout.tag_ids[letter + tag[1:]]


def _make_meta(part: _Part, layout: _Layout) -> dict[str, Any]:
    """Return a document's meta: the parts of the file besides tokens and tags."""
    details: dict[str, Any] = {}
    if part.marker:
        details["marker"] = part.marker
    comments = tuple(
        (number, comment)
        for number, (_, sentence_comments) in enumerate(part.sentences)
        for comment in sentence_comments
    )
    if comments:
        details["comments"] = comments
    columns = tuple(tuple(row[1:-1]) for rows, _ in part.sentences for row in rows)
    if any(columns):
        details["columns"] = columns
    if not details:
        return layout.meta
    return {"conll": {**layout.meta["conll"], **details}}


# ---- writing -------------------------------------------------------------------------


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Write tokens, any further columns, and tags in the scheme that was read.

    A document without tokens is tokenised by `data/text.py` and written as BIO. CoNLL
    cannot represent everything: overlapping and discontinuous mentions are flattened
    ("outermost"), and mentions are extended to whole tokens.
    """
    documents = list(documents)
    types = tuple(sorted({span.label for d in documents for span in d.spans}))
    metas = [document.meta.get("conll", {}) for document in documents]
    has_markers = any("marker" in meta or "scheme" not in meta for meta in metas)
    content: list[Row | str] = []  # rows of columns, and unchanged lines
    for document in documents:
        if has_markers:
            content += _make_marker_lines(document)
        content += _make_rows(document, types)
    had_spaces = all(meta.get("separator") == " " for meta in metas)
    has_space_inside = any(
        " " in column for row in content if isinstance(row, list) for column in row
    )
    separator = " " if had_spaces and not has_space_inside else "\t"
    lines = [row if isinstance(row, str) else separator.join(row) for row in content]
    write_out(Path(path), "".join(f"{line}\n" for line in lines))


def make_document_lines(documents: Iterable[Document]) -> Iterator[list[str]]:
    """Yield the lines of each document, as `write` would write that document alone.

    Tabs separate the columns, and a line `# newdoc id = …` precedes each document.

    Raises:
        DataError: A type contains a tab or a line end. A model from an untrusted source
            could otherwise add tokens and sentences through its types.
    """
    for document in documents:
        types = tuple(sorted({span.label for span in document.spans}))
        for label in types:
            if _SEPARATORS.search(label):
                raise DataError(
                    f"the type {clean(label, NAME)!r} has a tab or a line end, which "
                    "separate columns and lines in CoNLL: choose another format"
                )
        rows = [*_make_marker_lines(document), *_make_rows(document, types)]
        yield [row if isinstance(row, str) else "\t".join(row) for row in rows]


def _make_marker_lines(document: Document) -> list[str]:
    """Return the lines that begin a document."""
    marker = str(document.meta.get("conll", {}).get("marker", ""))
    if marker.startswith(_DOCSTART):
        return [marker, ""]
    newdoc = _NEWDOC.fullmatch(marker.strip())
    if newdoc and newdoc.group(1) in (None, document.id):
        return [marker]
    return [f"# newdoc id = {' '.join(document.id.split())}"]


def _make_rows(document: Document, types: tuple[str, ...]) -> Iterator[Row | str]:
    """Yield the rows of a document, with its comments and blank lines."""
    meta = document.meta.get("conll", {})
    scheme = meta.get("scheme", "BIO")
    tagset = TagSet(types, _BASE_SCHEMES.get(scheme, "BIOES"))
    tag_names = tagset.tags
    spans, _ = flatten(document.spans, "outermost")
    tokens = document.tokens or tokenize(document.text).tolist()
    offsets = np.array(tokens).reshape(-1, 2)  # (tokens, 2)
    columns = meta.get("columns", ())
    if len(columns) != len(offsets):
        columns = ((),) * len(offsets)

    first_token = 0
    first_span = 0
    starts = [start for start, _ in split_sentences(document)]
    # Each sentence extends to the next one, so that no token is left out.
    for number, end in enumerate([*starts[1:], len(document.text)]):
        stop_token = int(np.searchsorted(offsets[:, 0], end, side="left"))
        # A mention may begin in the white space before its sentence, so its end counts.
        stop_span = bisect_right(spans, end, key=lambda span: span.end)
        ids, _ = encode_tags(
            spans[first_span:stop_span], offsets[first_token:stop_token], tagset
        )
        for index, comment in meta.get("comments", ()):
            if index == number:
                yield comment
        tags = _convert_tags([tag_names[i] for i in ids.tolist()], scheme)
        for token, tag in enumerate(tags, first_token):
            start, stop = tokens[token]
            yield [_clean_column(document.text[start:stop]), *columns[token], tag]
        if stop_token > first_token:
            yield ""
        first_token = stop_token
        first_span = stop_span


def _clean_column(form: str) -> str:
    """Return a token without tabs and line ends, which other tools may leave in it."""
    return form if form.isalnum() else re.sub(r"[\t\n\r]+", " ", form)


def _convert_tags(tags: list[str], scheme: str) -> list[str]:
    """Return the tags of one sentence in the letters of a file's scheme."""
    if scheme == "IOB1":
        return [
            f"I{tag[1:]}" if tag[0] == "B" and tag[1:] != before[1:] else tag
            for before, tag in pairwise(["O", *tags])
        ]
    letters = _SCHEME_LETTERS.get(scheme, {})
    return [
        tag if tag == "O" else letters.get(tag[0], tag[0]) + tag[1:] for tag in tags
    ]
