"""CoNLL and IOB files: a token a line with its tag in the last column, sentences apart.

Columns are parted by tabs or by runs of spaces. Tags may be BIO, IOB1, BIOES (or with the
letters of BILOU, BMES) or IO. `# newdoc id = X` and `-DOCSTART-` begin a document; a file
without them has one document per sentence. Other lines that begin with `#` and are no token
are comments. What a file holds beyond tokens and tags is kept in `meta["conll"]`.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from sys import intern
from typing import Any

import numpy as np

from fednotes.core.errors import DataError
from fednotes.core.store import write_out
from fednotes.core.types import Document, Scheme, Span, TagSet
from fednotes.data.formats import files as corpus
from fednotes.data.tags import decode, encode, flatten
from fednotes.data.text import split_sentences, tokenize

LOOSE = 2  # a tag is guessed
_TAG = re.compile(r"O|[BIESLUM]-\S.*")
_NEWDOC = re.compile(r"#\s*newdoc\b(?:\s+id\s*=\s*(.*\S))?")
_START = "-DOCSTART-"
_SUFFIXES = {".conll", ".bio", ".iob", ".iob2", ".bioes"}
_BASES: dict[str, Scheme] = {"IO": "IO", "BIO": "BIO", "IOB1": "BIO"}
_CANONICAL = {"L": "E", "U": "S", "M": "I"}
_LETTERS = {"BILOU": {"E": "L", "S": "U"}, "BMES": {"I": "M"}}


@dataclass
class _Part:
    """One document of a file, as read. marker: the line that begins it, or ""; line: its number.
    sentences: the rows of each, and the comments before them."""

    marker: str = ""
    name: str = ""
    line: int = corpus.DERIVED
    sentences: list[tuple[list[list[str]], list[str]]] = field(default_factory=list)


def accepts(path: Path) -> bool:
    """Whether most lines of the file end in a tag, or its name says so."""
    if path.suffix.lower() in _SUFFIXES:
        return True
    lines = [line for line in corpus.head(path)[:400] if not line.startswith("# ")]
    rows = (_split(line, "\t" if "\t" in line else " ") for line in lines)
    tokens = [row for row in rows if len(row) > 1 and _TAG.fullmatch(row[-1])]
    return 2 * len(tokens) > len(lines)


def read(path: Path, problems: corpus.Problems) -> tuple[Document, ...]:
    """Documents with the file's own tokens and sentences; tokens are joined by a space.

    A tag that its scheme does not allow there (an I- that continues nothing) is mended as
    conlleval reads it; `meta["repaired"]` counts such tags. Noted, with the line, are a wrong
    number of columns and something that is no tag; with such a line its sentence is left out.
    """
    return corpus.gather(corpus.listing(path, accepts, "CoNLL"), _read_file, problems)


def _read_file(path: Path, problems: corpus.Problems) -> list[corpus.Found]:
    before = problems.number
    parts, separator = _parse(path, problems)
    if any(part.sentences for part in parts):
        return _found(parts, separator, path)
    if problems.number == before:
        raise DataError("the file holds no tokens")
    return []


def is_tag(text: str) -> bool:
    """Whether it is O, or a letter of a scheme and a type."""
    return _TAG.fullmatch(text) is not None


def of_rows(
    rows: Sequence[tuple[str, list[list[str]]]], path: Path
) -> list[corpus.Found]:
    """Documents of a sentence each: its name or "", and its tokens with their tags."""
    return _found(
        [_Part("", name, 0, [(pairs, [])]) for name, pairs in rows], "\t", path
    )


def _found(parts: Sequence[_Part], separator: str, path: Path) -> list[corpus.Found]:
    tags = [[row[-1] for row in rows] for part in parts for rows, _ in part.sentences]
    scheme = _scheme_of(tags)
    types = sorted({tag[2:] for own in tags for tag in own if tag != "O"})
    tagset = TagSet(tuple(map(intern, types)), _BASES.get(scheme, "BIOES"))
    shared = {"conll": {"scheme": scheme, "separator": separator}}
    documents = []
    for number, part in enumerate(parts, 1):
        name = part.name or f"{path.stem}:{number}"
        line = part.line if part.name else corpus.DERIVED
        documents.append(
            corpus.Found(_document(name, part, tagset, shared), path, line)
        )
    return documents


def _parse(path: Path, problems: corpus.Problems) -> tuple[list[_Part], str]:
    """The file cut into documents and sentences, and its separator."""
    lines = corpus.read_text(path).split("\n")
    separator, width = _layout(lines)
    parts, marked = [_Part()], False
    rows, comments, damaged = list[list[str]](), list[str](), False
    for number, line in enumerate([*lines, ""], 1):
        row = _split(line, separator)
        token = len(row) == width and _TAG.fullmatch(row[-1]) and row[0] != _START
        newdoc = None if token else _NEWDOC.fullmatch(line.strip())
        begins = newdoc or row[0] == _START
        if begins or not line.strip(
            " \t"
        ):  # comments without a sentence go before the next
            if rows and not damaged:
                parts[-1].sentences.append((rows, comments))
            if rows or damaged:
                rows, comments, damaged = [], [], False
            if begins:
                parts.append(
                    _Part(line, (newdoc.group(1) or "") if newdoc else "", number)
                )
                marked = True
        elif token and row[0].strip(" "):
            rows.append(row)
        elif line.startswith("#") and not rows:
            comments.append(line)
        else:
            told = "the last column is no tag: expected O or a tag such as B-Drug"
            if len(row) != width:
                told = f"{len(row)} columns, expected {width} (token first, tag last)"
            elif not row[0].strip(" "):
                told = "the token is empty"
            problems.note("line", path, number, told)
            damaged = True
    if marked:
        return parts[0 if parts[0].sentences else 1 :], separator
    return [_Part(sentences=[sentence]) for sentence in parts[0].sentences], separator


def _layout(lines: Sequence[str]) -> tuple[str, int]:
    """Separator and number of columns: what most lines have that end in a tag."""
    counts: Counter[tuple[str, int]] = Counter()
    for line in lines:
        separator = "\t" if "\t" in line else " "
        row = _split(line, separator)
        if (
            len(row) > 1
            and _TAG.fullmatch(row[-1])
            and not line.startswith(("# ", _START))
        ):
            counts[separator, len(row)] += 1
    if counts:
        return counts.most_common(1)[0][0]
    sure = (line for line in lines if line.strip(" \t") and line[0] not in "#-")
    line = next(sure, None) or next(
        (ln for ln in lines if _TAG.fullmatch(_split(ln)[-1])), ""
    )
    separator = "\t" if "\t" in line else " "
    return separator, max(2, len(_split(line, separator)))


def _split(line: str, separator: str = " ") -> list[str]:
    if separator == "\t":
        return line.rstrip(" ").split("\t")
    return re.split("[ \t]+", line.strip(" \t"))


def _scheme_of(sentences: Iterable[Sequence[str]]) -> str:
    """The tag scheme of a file, from all its tags."""
    pairs = [
        pair for tags in sentences for pair in pairwise(["O", *tags]) if pair[1] != "O"
    ]
    prefixes = {tag[0] for _, tag in pairs}
    fresh = {tag[0] for before, tag in pairs if before[1:] != tag[1:]}
    for scheme, letters in (("BILOU", "LU"), ("BMES", "M"), ("BIOES", "ES")):
        if prefixes & set(letters):
            return scheme
    if prefixes == {"I"}:
        return "IO"
    return "IOB1" if "I" in fresh and "B" not in fresh else "BIO"


def _document(
    name: str, part: _Part, tagset: TagSet, shared: dict[str, Any]
) -> Document:
    """One document; `shared` is the meta of all documents without more to keep."""
    ids = {tag: i for i, tag in enumerate(tagset.tags)}
    text, bounds, tokens = corpus.laid_out(
        [[r[0] for r in rows] for rows, _ in part.sentences]
    )
    spans: list[Span] = []
    first = repaired = 0
    for rows, _ in part.sentences:
        last = first + len(rows)
        offsets = np.array(tokens[first:last])  # (tokens, 2)
        tags = (row[-1] for row in rows)
        given = np.array([ids[_CANONICAL.get(t[0], t[0]) + t[1:]] for t in tags])
        found = decode(given, offsets, tagset)
        if shared["conll"]["scheme"] != "IOB1":
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
    meta = {"conll": {**shared["conll"], **kept}} if kept else shared
    meta = {**meta, "repaired": repaired} if repaired else meta
    return Document(
        name, text, tuple(spans), meta=meta, sentences=bounds, tokens=tokens
    )


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Writes token, any further columns, and tag, in the scheme the documents were read in.

    A document without tokens is cut by `data/text.py` and written as BIO. CoNLL cannot say
    everything: overlapping and discontinuous mentions are flattened (outermost) and spans are
    snapped to tokens.
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
    """Yield the lines of each document as it comes, in the layout that needs to know no other:
    columns apart by tabs, and a line `# newdoc id = …` before each."""
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
