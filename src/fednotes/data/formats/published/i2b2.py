"""i2b2/VA 2010 concepts: `NAME.txt`, one tokenised sentence a line, and `NAME.con`.

    c="chest pain" 3:7 3:8||t="problem"

Lines count from 1, tokens from 0 and are parted by spaces; the end token is included.
The archives keep the two kinds of file in folders beside each other (`concept` and
`txt`, or `concepts` and `test_data` one level up), which is known here.
"""

from __future__ import annotations

import re
from pathlib import Path
from sys import intern

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats.files import read_first_line, read_nonblank_lines, read_text
from fednotes.data.formats.folders import find_corpus_files, find_file
from fednotes.data.formats.gathering import ReadDocument, gather
from fednotes.data.formats.mentions import count_mismatches
from fednotes.data.formats.problems import Problems

LOOSE = 0
_PLACE = r"([0-9]{1,9}):([0-9]{1,9})"  # line:token
_CONCEPT = re.compile(rf'c="(.+)" {_PLACE} {_PLACE}\|\|t="([^"]+)"')


def accepts(path: Path) -> bool:
    """Whether the file is a `.con` file, or the `.txt` file beside one."""
    if path.suffix != ".con":
        return path.suffix == ".txt" and path.with_suffix(".con").is_file()
    line = read_first_line(path)
    return not line or line.startswith('c="')


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """One document per record; tokens and sentences are the file's own.

    `meta["mismatched"]` counts concepts whose text is not what their offsets hold.
    Noted are a missing text, and with the line a broken line or offsets outside the
    text, and where most concepts do not match (the wrong text).
    """
    if (
        path.suffix == ".txt"
        and path.is_file()
        and not path.with_suffix(".con").is_file()
    ):
        raise DataError(f"{path}: there is no .con file beside it; give the .con file")
    files = find_corpus_files(
        path, lambda p: p.suffix == ".con" and accepts(p), "i2b2 2010"
    )
    records = [file.with_suffix(".con") for file in files]
    return gather(records, _read_record, problems, "document")


def _read_record(con: Path, problems: Problems) -> list[ReadDocument]:
    name, folder = f"{con.stem}.txt", con.parent
    near = (folder, folder.parent / "txt", folder.parent / "test_data", folder.parent)
    file = find_file(name, (*near, folder.parent.parent / "test_data"))
    if file is None:
        raise DataError(
            f"its text {name} is neither beside it nor in a folder txt beside"
        )
    text = read_text(file)
    position = 0
    # token offsets by line, which counts from 1
    lines: list[list[tuple[int, int]]] = [[]]
    for line in text.split("\n"):
        found = re.finditer(r"[^ ]+", line)
        lines.append([(position + m.start(), position + m.end()) for m in found])
        position += len(line) + 1
    concepts: list[tuple[Span, str, int]] = []
    for number, line in read_nonblank_lines(con, empty=True):
        with problems.collect("mention", con, number):
            concepts.append((*_concept(line.rstrip(), lines), number))
    document = Document(
        con.stem,
        text,
        tuple(span for span, _, _ in concepts),
        meta=count_mismatches(con, text, concepts, "concepts"),
        sentences=tuple((tokens[0][0], tokens[-1][1]) for tokens in lines if tokens),
        tokens=tuple(token for tokens in lines for token in tokens),
    )
    return [ReadDocument(document, con)]


def _concept(row: str, lines: list[list[tuple[int, int]]]) -> tuple[Span, str]:
    match = _CONCEPT.fullmatch(row)
    if match is None:
        raise DataError('expected c="text" line:token line:token||t="type"')
    form, line, token, last_line, last_token, label = match.groups()
    try:
        start = lines[int(line)][int(token)][0]
        end = lines[int(last_line)][int(last_token)][1]
    except IndexError:
        place = f"{line}:{token} {last_line}:{last_token}"
        raise DataError(f"{place} lies outside the text") from None
    if start >= end:
        raise DataError("the concept ends before it starts")
    return Span(start, end, intern(label)), form
