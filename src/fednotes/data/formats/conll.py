"""CoNLL and IOB files: a token a line with its tag in the last column, sentences apart.

Columns are parted by tabs or by runs of spaces. Tags may be BIO, IOB1, BIOES (or with
the letters of BILOU, BMES) or IO. `# newdoc id = X` and `-DOCSTART-` begin a document;
a file without them has one document per sentence. Other lines that begin with `#` and
are no token are comments. What a file holds beyond tokens and tags is kept in
`meta["conll"]`.
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
from fednotes.core.errors import DataError
from fednotes.core.store import write_out
from fednotes.core.types import Document, Scheme, Span, TagSet
from fednotes.data.formats.files import read_head, read_lines
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import (
    DERIVED_ID,
    ReadDocument,
    gather,
    stream_files,
)
from fednotes.data.formats.mentions import lay_out
from fednotes.data.formats.problems import Problems
from fednotes.data.tags import decode, encode, flatten
from fednotes.data.text import split_sentences, tokenize

LOOSE = 2  # a tag is guessed
_FIRST = 100_000  # lines that tell the columns of a file
_TAG = re.compile(r"O|[BIESLUM]-\S.*")
_NEWDOC = re.compile(r"#\s*newdoc\b(?:\s+id\s*=\s*(.*\S))?")
_START = "-DOCSTART-"
_SUFFIXES = {".conll", ".bio", ".iob", ".iob2", ".bioes"}
_BASES: dict[str, Scheme] = {"IO": "IO", "BIO": "BIO", "IOB1": "BIO"}
_CANONICAL = {"L": "E", "U": "S", "M": "I"}
_LETTERS = {"BILOU": {"E": "L", "S": "U"}, "BMES": {"I": "M"}}


@dataclass
class _Part:
    """One document of a file, as read. marker: the line that begins it, or ""; line:
    its number. sentences: the rows of each, and the comments before them."""

    marker: str = ""
    name: str = ""
    line: int = DERIVED_ID
    sentences: list[tuple[list[list[str]], list[str]]] = field(default_factory=list)


@dataclass
class _Sentence:
    """A sentence: its rows of columns, the comments before them, the line that it ends
    on.

    size: characters of its lines.
    """

    rows: list[list[str]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    line: int = 0
    size: int = 0


def accepts(path: Path) -> bool:
    """Whether most lines of the file end in a tag, or its name says so."""
    if path.suffix.lower() in _SUFFIXES:
        return True
    lines = [line for line in read_head(path)[:400] if not line.startswith("# ")]
    rows = (_split(line, "\t" if "\t" in line else " ") for line in lines)
    tokens = [row for row in rows if len(row) > 1 and _TAG.fullmatch(row[-1])]
    return 2 * len(tokens) > len(lines)


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Documents with the file's own tokens and sentences; tokens are joined by a space.

    A tag that its scheme does not allow there (an I- that continues nothing) is mended
    as conlleval reads it; `meta["repaired"]` counts such tags. Noted, with the line,
    are a wrong number of columns and something that is no tag; with such a line its
    sentence is left out.
    """
    return gather(_files(path), _read_file, problems)


def stream(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield what `read` returns, a document at a time."""
    return stream_files(_files(path), _read_file, problems)


def _files(path: Path) -> list[Path]:
    return find_corpus_files(path, accepts, "CoNLL")


def _read_file(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the documents of a file, which is read thrice: for its columns, tags and
    texts.

    Scheme and types are the file's, and each document's tags are read by them; so they
    must be known before the first document is.
    """
    before = problems.number
    shape = _survey(path)
    made = 0
    for number, part in enumerate(_documents(path, problems, shape), 1):
        made += bool(part.sentences)
        yield _found(part, number, path, shape)
    if not made and problems.number == before:
        raise DataError("the file holds no tokens")


def is_tag(text: str) -> bool:
    """Whether it is O, or a letter of a scheme and a type."""
    return _TAG.fullmatch(text) is not None


@dataclass(frozen=True)
class _Shape:
    """What all documents of a file have in common.

    separator: between the columns, a tab or a space. width: the number of columns.
    is_marked: whether lines say where documents begin. scheme: of the tags. types: of
    the mentions, in order.
    """

    separator: str
    width: int = 2
    is_marked: bool = True
    scheme: str = "BIO"
    types: tuple[str, ...] = ()

    @cached_property
    def tagset(self) -> TagSet:
        return TagSet(tuple(map(intern, self.types)), _BASES.get(self.scheme, "BIOES"))

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each tag of the tag set."""
        return {tag: number for number, tag in enumerate(self.tagset.tags)}

    @cached_property
    def meta(self) -> dict[str, Any]:
        """The meta of all documents without more to keep."""
        return {"conll": {"scheme": self.scheme, "separator": self.separator}}


def of_rows(
    rows: Sequence[tuple[str, list[list[str]]]], path: Path
) -> list[ReadDocument]:
    """Documents of a sentence each: its name or "", and its tokens with their tags."""
    tags = _Tags()
    for _, pairs in rows:
        tags.add([pair[-1] for pair in pairs])
    shape = _Shape("\t", scheme=tags.scheme(), types=tuple(sorted(tags.types)))
    parts = (_Part("", name, 0, [(pairs, [])]) for name, pairs in rows)
    return [_found(part, number, path, shape) for number, part in enumerate(parts, 1)]


def _found(part: _Part, number: int, path: Path, shape: _Shape) -> ReadDocument:
    name = part.name or f"{path.stem}:{number}"
    line = part.line if part.name else DERIVED_ID
    return ReadDocument(_document(name, part, shape), path, line)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    expected = "a token a line, its tag in the last column"
    return read_lines(path, max_length=bounds.TOKEN_LINE, expected=expected)


def _survey(path: Path) -> _Shape:
    """Read a file for what all its documents have in common."""
    separator, width = _layout(path)
    tags = _Tags()
    is_marked = False
    for event in _events(path, Problems(), separator, width):
        if isinstance(event, _Part):
            is_marked = True
            continue
        tags.add([row[-1] for row in event.rows])
        if len(tags.types) > bounds.ENTITY_TYPES:
            told = f"more than {bounds.ENTITY_TYPES:,} entity types: is the last column a tag?"
            raise DataError.at(path, event.line, told)
    return _Shape(separator, width, is_marked, tags.scheme(), tuple(sorted(tags.types)))


def _documents(path: Path, problems: Problems, shape: _Shape) -> Iterator[_Part]:
    """Yield the documents of a file: its parts, or its sentences where nothing marks
    parts."""
    part = _Part()
    size = 0
    for event in _events(path, problems, shape.separator, shape.width):
        if isinstance(event, _Part):
            if part.sentences or part.marker:
                yield part
            part, size = event, 0
            continue
        part.sentences.append((event.rows, event.comments))
        size += len(event.rows)
        if size > bounds.TOKENS:
            told = (
                f"a document of more than {bounds.TOKENS:,} tokens: cut it into notes"
            )
            raise DataError.at(path, event.line, told)
        if not shape.is_marked:
            yield part
            part, size = _Part(), 0
    if part.sentences or part.marker:
        yield part


def _events(
    path: Path, problems: Problems, separator: str, width: int
) -> Iterator[_Part | _Sentence]:
    """Yield what a file holds in its order: a new, empty part, or a sentence.

    Raises:
        DataError: A sentence is too long for one.
    """
    sentence = _Sentence()
    is_damaged = False
    for number, line in chain(_lines(path), [(0, "")]):
        row = _split(line, separator)
        is_token = len(row) == width and is_tag(row[-1]) and row[0] != _START
        newdoc = None if is_token else _NEWDOC.fullmatch(line.strip())
        begins = newdoc is not None or row[0] == _START
        if begins or not line.strip(" \t"):
            if sentence.rows and not is_damaged:
                yield sentence
            if sentence.rows or is_damaged:  # else comments go before the next sentence
                sentence, is_damaged = _Sentence(), False
            if begins:
                yield _Part(line, (newdoc.group(1) or "") if newdoc else "", number)
            continue
        sentence.line = number
        sentence.size += len(line)
        if sentence.size > bounds.LINE or len(sentence.rows) >= bounds.TOKENS:
            told = (
                f"a sentence of more than {bounds.TOKENS:,} tokens, or {bounds.LINE:,} "
            )
            raise DataError.at(
                path, number, f"{told}characters: put an empty line after each"
            )
        if is_token and row[0].strip(" "):
            sentence.rows.append(row)
        elif line.startswith("#") and not sentence.rows:
            sentence.comments.append(line)
        else:
            problems.note("line", path, number, _what_is_wrong(row, width))
            is_damaged = True


def _what_is_wrong(row: Sequence[str], width: int) -> str:
    if len(row) != width:
        return f"{len(row)} columns, expected {width} (token first, tag last)"
    if not row[0].strip(" "):
        return "the token is empty"
    return "the last column is no tag: expected O or a tag such as B-Drug"


def _layout(path: Path) -> tuple[str, int]:
    """Return separator and number of columns: what most lines have that end in a tag.

    The first lines tell, unless none of them ends in a tag.
    """
    counts: Counter[tuple[str, int]] = Counter()
    first = first_tagged = ""
    for number, line in _lines(path):
        if counts and number > _FIRST:
            break
        separator = "\t" if "\t" in line else " "
        row = _split(line, separator)
        if len(row) > 1 and is_tag(row[-1]) and not line.startswith(("# ", _START)):
            counts[separator, len(row)] += 1
        if not first and line.strip(" \t") and line[0] not in "#-":
            first = line
        if not first_tagged and is_tag(_split(line)[-1]):
            first_tagged = line
    if counts:
        return counts.most_common(1)[0][0]
    line = first or first_tagged
    separator = "\t" if "\t" in line else " "
    return separator, max(2, len(_split(line, separator)))


def _split(line: str, separator: str = " ") -> list[str]:
    if separator == "\t":
        return line.rstrip(" ").split("\t")
    return re.split("[ \t]+", line.strip(" \t"))


class _Tags:
    """What the tags of a file tell of their scheme and of its types."""

    def __init__(self) -> None:
        self.types: set[str] = set()
        self._prefixes: set[str] = set()
        self._fresh: set[str] = set()  # of tags behind one of another type, or behind O

    def add(self, tags: Sequence[str]) -> None:
        """Take in the tags of a sentence."""
        for before, tag in pairwise(["O", *tags]):
            if tag == "O":
                continue
            self.types.add(tag[2:])
            self._prefixes.add(tag[0])
            if before[1:] != tag[1:]:
                self._fresh.add(tag[0])

    def scheme(self) -> str:
        """Return the tag scheme of the file."""
        for scheme, letters in (("BILOU", "LU"), ("BMES", "M"), ("BIOES", "ES")):
            if self._prefixes & set(letters):
                return scheme
        if self._prefixes == {"I"}:
            return "IO"
        return "IOB1" if "I" in self._fresh and "B" not in self._fresh else "BIO"


def _document(name: str, part: _Part, shape: _Shape) -> Document:
    ids, tagset = shape.numbers, shape.tagset
    text, edges, tokens = lay_out([[r[0] for r in rows] for rows, _ in part.sentences])
    spans: list[Span] = []
    first = repaired = 0
    for rows, _ in part.sentences:
        last = first + len(rows)
        offsets = np.array(tokens[first:last])  # (tokens, 2)
        tags = (row[-1] for row in rows)
        given = np.array([ids[_CANONICAL.get(t[0], t[0]) + t[1:]] for t in tags])
        found = decode(given, offsets, tagset)
        if shape.scheme != "IOB1":
            repaired += int((encode(found, offsets, tagset)[0] != given).sum())
        spans += found
        first = last
    columns = tuple(tuple(row[1:-1]) for rows, _ in part.sentences for row in rows)
    more = {
        "marker": part.marker,
        "comments": tuple(
            (i, c) for i, (_, own) in enumerate(part.sentences) for c in own
        ),
        "columns": columns if any(columns) else (),
    }
    kept = {name: value for name, value in more.items() if value}
    meta = {"conll": {**shape.meta["conll"], **kept}} if kept else shape.meta
    meta = {**meta, "repaired": repaired} if repaired else meta
    return Document(name, text, tuple(spans), meta=meta, sentences=edges, tokens=tokens)


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Writes token, any further columns, and tag, in the scheme the documents were read
    in.

    A document without tokens is cut by `data/text.py` and written as BIO. CoNLL cannot
    say
    everything: overlapping and discontinuous mentions are flattened (outermost) and
    spans are snapped to tokens.
    """
    documents = list(documents)
    types = tuple(sorted({s.label for d in documents for s in d.spans}))
    kept = [d.meta.get("conll", {}) for d in documents]
    marked = any("marker" in own or "scheme" not in own for own in kept)
    blocks: list[list[str] | str] = []  # a row of columns, or a line as it is
    for document in documents:
        blocks += _marker(document) if marked else []
        blocks += _rows(document, types)
    single = all(own.get("separator") == " " for own in kept)
    single &= not any(
        " " in column for row in blocks if isinstance(row, list) for column in row
    )
    separator = " " if single else "\t"
    lines = [row if isinstance(row, str) else separator.join(row) for row in blocks]
    write_out(Path(path), "".join(f"{line}\n" for line in lines))


def blocks(documents: Iterable[Document]) -> Iterator[list[str]]:
    """Yield the lines of each document as it comes, in the layout that needs to know no
    other: columns apart by tabs, and a line `# newdoc id = …` before each."""
    for document in documents:
        types = tuple(sorted({span.label for span in document.spans}))
        rows = [*_marker(document), *_rows(document, types)]
        yield [row if isinstance(row, str) else "\t".join(row) for row in rows]


def _marker(document: Document) -> list[str]:
    marker = str(document.meta.get("conll", {}).get("marker", ""))
    if marker.startswith(_START):
        return [marker, ""]
    newdoc = _NEWDOC.fullmatch(marker.strip())
    if newdoc and newdoc.group(1) in (None, document.id):
        return [marker]
    return [f"# newdoc id = {' '.join(document.id.split())}"]


def _rows(document: Document, types: tuple[str, ...]) -> Iterator[list[str] | str]:
    """The lines of one document."""
    spans, _ = flatten(document.spans, "outermost")
    kept = document.meta.get("conll", {})
    scheme = kept.get("scheme", "BIO")
    tagset = TagSet(types, _BASES.get(scheme, "BIOES"))
    names = tagset.tags
    tokens = document.tokens or tokenize(document.text).tolist()
    own = np.array(tokens).reshape(-1, 2)  # (tokens, 2)
    columns = kept.get("columns", ())
    if len(columns) != len(own):
        columns = ((),) * len(own)
    done = first = 0
    starts = [start for start, _ in split_sentences(document)]
    # Each sentence reaches to the next, so that no token is left out.
    for number, end in enumerate([*starts[1:], len(document.text)]):
        last = int(np.searchsorted(own[:, 0], end, side="left"))
        # By their ends: a span may begin with the space before its sentence.
        stop = bisect_right(spans, end, key=lambda span: span.end)
        ids, _ = encode(spans[first:stop], own[done:last], tagset)
        yield from (
            comment for index, comment in kept.get("comments", ()) if index == number
        )
        tags = _letters([names[i] for i in ids.tolist()], scheme)
        for i, tag in enumerate(tags, done):
            form = document.text[slice(*tokens[i])]
            # A token that its column can hold; only other tools' tokens need it.
            form = form if form.isalnum() else re.sub(r"[\t\n\r]+", " ", form)
            yield [form, *columns[i], tag]
        if last > done:
            yield ""
        done, first = last, stop


def _letters(tags: list[str], scheme: str) -> list[str]:
    """Tags of one sentence in the letters of the file's own scheme."""
    if scheme == "IOB1":
        pairs = pairwise(["O", *tags])
        return [
            "I" + tag[1:] if tag[0] == "B" and tag[1:] != old[1:] else tag
            for old, tag in pairs
        ]
    letters = _LETTERS.get(scheme, {})
    return [
        tag if tag == "O" else letters.get(tag[0], tag[0]) + tag[1:] for tag in tags
    ]
