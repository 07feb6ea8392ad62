"""i2b2/VA 2010 concepts: `NAME.txt`, one tokenised sentence a line, and `NAME.con`.

    c="chest pain" 3:7 3:8||t="problem"

Lines count from 1, tokens from 0 and are parted by spaces; the end token is included.
The archives keep the two kinds of file in folders beside each other (`concept` and `txt`,
or `concepts` and `test_data` one level up), which is known here.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from sys import intern

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats.files import head, is_inside, listing, read_text
from fednotes.data.formats.problems import Found, Problems, unique
from fednotes.data.text import normalise

_PLACE = r"([0-9]{1,9}):([0-9]{1,9})"  # line:token
_CONCEPT = re.compile(rf'c="(.+)" {_PLACE} {_PLACE}\|\|t="([^"]+)"')


def accepts(path: Path) -> bool:
    """Whether the file is a `.con` file, or the `.txt` file beside one."""
    if path.suffix != ".con":
        return path.suffix == ".txt" and path.with_suffix(".con").is_file()
    lines = head(path)
    return not lines or lines[0].startswith('c="')


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """One document per record; tokens and sentences are the file's own.

    `meta["mismatched"]` counts concepts whose text is not what their offsets hold. Noted
    are a missing text, and with the line a broken line or offsets outside the text, and where
    most concepts do not match (the wrong text).
    """
    if path.suffix == ".txt" and path.is_file() and not path.with_suffix(".con").is_file():
        raise DataError(f"{path}: there is no .con file beside it; give the .con file")
    files = listing(path, lambda p: p.suffix == ".con" and accepts(p), "i2b2 2010")
    found: list[Found] = []
    for file in files:
        with problems.passing("document"):
            con = file.with_suffix(".con")
            found.append(Found(_read_record(con, problems), con))
    return unique(found, problems)


def _text_of(con: Path) -> Path:
    """The text file that belongs to a `.con` file."""
    name, folder = f"{con.stem}.txt", con.parent
    places = [folder, folder.parent / "txt", folder.parent / "test_data", folder.parent]
    places.append(folder.parent.parent / "test_data")
    for place in places:
        found = place / name
        if os.path.lexists(found) and is_inside(found, place.parent):
            return found
    raise DataError.at(con, 0, f"its text {name} is neither beside it nor in a folder txt beside")


def _read_record(con: Path, problems: Problems) -> Document:
    text = read_text(_text_of(con))
    position = 0
    lines: list[list[tuple[int, int]]] = []  # token offsets by line
    for line in text.split("\n"):
        found = re.finditer(r"[^ ]+", line)
        lines.append([(position + m.start(), position + m.end()) for m in found])
        position += len(line) + 1
    spans, mismatched, first = [], 0, 0
    for number, line in enumerate(read_text(con, empty=True).split("\n"), 1):
        if not line.strip():
            continue
        try:
            span, form = _span(con, number, line.rstrip(), lines)
        except DataError as error:
            problems.add(error, "mention")
            continue
        spans.append(span)
        if normalise(text[span.start : span.end]) != normalise(form):
            mismatched, first = mismatched + 1, first or number
    if 2 * mismatched > len(spans):
        message = f"{mismatched} of {len(spans)} concepts are not what the text holds there"
        raise DataError.at(con, first, message)
    return Document(
        con.stem,
        text,
        tuple(spans),
        meta={"mismatched": mismatched} if mismatched else {},
        sentences=tuple((tokens[0][0], tokens[-1][1]) for tokens in lines if tokens),
        tokens=tuple(token for tokens in lines for token in tokens),
    )


def _span(
    path: Path, number: int, line: str, lines: list[list[tuple[int, int]]]
) -> tuple[Span, str]:
    match = _CONCEPT.fullmatch(line)
    if match is None:
        raise DataError.at(path, number, 'expected c="text" line:token line:token||t="type"')
    form, first_line, first, last_line, last, label = match.groups()
    try:
        # Python would read line 0 as the last one.
        start = lines[_from_one(first_line)][int(first)][0]
        end = lines[_from_one(last_line)][int(last)][1]
    except IndexError:
        message = f"{first_line}:{first} {last_line}:{last} lies outside the text"
        raise DataError.at(path, number, message) from None
    if start >= end:
        raise DataError.at(path, number, "the concept ends before it starts")
    return Span(start, end, intern(label)), form


def _from_one(line: str) -> int:
    if int(line) < 1:
        raise IndexError
    return int(line) - 1
