"""i2b2/VA 2010 concepts: `NAME.txt`, one tokenised sentence per line, and `NAME.con`.

    c="chest pain" 3:7 3:8||t="problem"

Lines are numbered from 1 and tokens from 0; spaces separate tokens, and the end token
is included. In the archives, the two kinds of files are in neighbouring folders
(`concept` and `txt`, or `concepts` and, one level up, `test_data`), where the reader
searches as well.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from sys import intern

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats.files import read_first_line, read_nonblank_lines, read_text
from fednotes.data.formats.folders import find_corpus_files, find_file
from fednotes.data.formats.gathering import ReadDocument, gather_documents
from fednotes.data.formats.mentions import count_mismatches
from fednotes.data.formats.problems import Problems

LOOSE = 0
_PLACE = r"([0-9]{1,9}):([0-9]{1,9})"  # line:token
_CONCEPT = re.compile(rf'c="(.+)" {_PLACE} {_PLACE}\|\|t="([^"]+)"')

_Tokens = list[list[tuple[int, int]]]  # offsets of tokens by line


def accepts(path: Path) -> bool:
    """Return whether the file is a `.con` file, or the `.txt` file next to one."""
    if path.suffix == ".txt":
        return path.with_suffix(".con").is_file()
    if path.suffix != ".con":
        return False
    line = read_first_line(path)
    return not line or line.startswith('c="')


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return a document per record, with the tokens and sentences of the file.

    `meta["mismatched"]` counts concepts that differ from the text at their offsets.
    These problems are collected: a missing text; a damaged line or offsets outside the
    text; and a text that most concepts do not match.
    """
    is_text_file = path.suffix == ".txt" and path.is_file()
    if is_text_file and not path.with_suffix(".con").is_file():
        raise DataError(f"{path}: there is no .con file beside it: give the .con file")
    files = find_corpus_files(
        path, lambda file: file.suffix == ".con" and accepts(file), "i2b2 2010"
    )
    corpus = path if path.is_dir() else path.parent
    return gather_documents(files, partial(_read_record, corpus), problems, "document")


def _read_record(corpus: Path, file: Path, problems: Problems) -> list[ReadDocument]:
    """Return the document of a `.con` file, or of the `.txt` file next to one."""
    path = file.with_suffix(".con")
    if path != file:
        find_file(path.name, (path.parent,), corpus)  # only to check links
    text = read_text(file if file.suffix == ".txt" else _find_text(path, corpus))
    tokens = _tokenize_lines(text)
    concepts: list[tuple[Span, str, int]] = []
    for number, line in read_nonblank_lines(path, may_be_empty=True):
        with problems.collecting("mention", path, number):
            span, form = _parse_concept(line.rstrip(), tokens)
            concepts.append((span, form, number))
    document = Document(
        id=path.stem,
        text=text,
        spans=tuple(span for span, _, _ in concepts),
        meta=count_mismatches(path, text, concepts, "concepts"),
        sentences=tuple((line[0][0], line[-1][1]) for line in tokens if line),
        tokens=tuple(token for line in tokens for token in line),
    )
    return [ReadDocument(document, path)]


def _find_text(path: Path, corpus: Path) -> Path:
    """Return the text that belongs to a `.con` file.

    Raises:
        DataError: There is none, or a link leads out of the corpus.
    """
    name = f"{path.stem}.txt"
    folder = path.parent
    file = find_file(
        name,
        (
            folder,
            folder.parent / "txt",
            folder.parent / "test_data",
            folder.parent,
            folder.parent.parent / "test_data",
        ),
        corpus,
    )
    if file is None:
        raise DataError(
            f"its text file {name} was not found beside it or in ../txt: put it there"
        )
    return file


def _tokenize_lines(text: str) -> _Tokens:
    """Return the offsets of tokens by line; lines start at 1, so item 0 is []."""
    tokens: _Tokens = [[]]
    position = 0
    for line in text.split("\n"):
        matches = re.finditer(r"[^ ]+", line)
        tokens.append([(position + m.start(), position + m.end()) for m in matches])
        position += len(line) + 1
    return tokens


def _parse_concept(row: str, tokens: _Tokens) -> tuple[Span, str]:
    """Return the mention of a line, and its text according to the line."""
    match = _CONCEPT.fullmatch(row)
    if match is None:
        raise DataError('expected c="text" line:token line:token||t="type"')
    form, line, token, last_line, last_token, label = match.groups()
    try:
        start, _ = tokens[int(line)][int(token)]
        _, end = tokens[int(last_line)][int(last_token)]
    except IndexError:
        raise DataError(
            f"{line}:{token} {last_line}:{last_token} lies outside the text"
        ) from None
    if start >= end:
        raise DataError("the concept ends before it starts")
    return Span(start, end, intern(label)), form
