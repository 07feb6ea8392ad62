"""i2b2 2012 temporal relations: one XML file per record, events and times with offsets.

    <TEXT><![CDATA[ … ]]></TEXT> <EVENT id="E0" start="36" end="46" text="chest pain"
    modality="FACTUAL" … type="PROBLEM" />

Offsets are characters of the raw text, half-open. The files are not always valid XML
(quotes and ampersands inside attributes are not escaped), so they are read line by
line. Labels are the types of events (PROBLEM, TEST, TREATMENT, CLINICAL_DEPT,
EVIDENTIAL, OCCURRENCE) and of times (DATE, TIME, DURATION, FREQUENCY). Section times
and links are not mentions.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from sys import intern
from typing import NamedTuple

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats.files import read_head, read_text
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather_documents
from fednotes.data.formats.mentions import count_mismatches, is_normal_form
from fednotes.data.formats.problems import Problems

LOOSE = 0
_ACCEPT_LINES = 6  # the text must begin within these lines
_TEXT = re.compile(r"<TEXT>(?:\s*<!\[CDATA\[(.*?)\]\]>\s*|(.*?))</TEXT>", re.DOTALL)
_TAG = re.compile(r"\s*<(EVENT|TIMEX3)\s")
_ATTRIBUTES = re.compile(
    r'\s*<(?:EVENT|TIMEX3)\s+id="[^"]*"\s+start="([0-9]{1,9})"\s+end="([0-9]{1,9})"'
    r'\s+text="(.*?)"\s+(?:modality|type)="(.*)/?>\s*'
)
_TYPE = re.compile(r'(?:^|\s)type="([A-Za-z_]+)"')


class _Mention(NamedTuple):
    """A mention with the file's offsets, its text, and its line."""

    span: Span
    form: str
    line: int


def accepts(path: Path) -> bool:
    """Return whether the file is XML whose first lines open a TEXT."""
    if path.suffix.lower() != ".xml":
        return False
    lines = read_head(path)[:_ACCEPT_LINES]
    if not lines or not lines[0].startswith("<"):
        return False
    return any("<TEXT>" in line for line in lines)


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return a document per record; its lines are its sentences.

    `meta["mismatched"]` counts mentions that differ from the text at their offsets.
    These problems are collected: a file without text or tags; a damaged tag or offsets
    outside the text; and a text that most mentions do not match.
    """
    files = find_corpus_files(path, accepts, "i2b2 2012")
    return gather_documents(files, _read_record, problems, "document")


class _Record(NamedTuple):
    """The elements of a record.

    Attributes:
        raw_text: The text, as in the file.
        tags: What follows the text in the file.
        first_line: The number of the first line of the tags.
    """

    raw_text: str
    tags: str
    first_line: int


def _split_record(content: str) -> _Record:
    """Return the elements of a record.

    Raises:
        DataError: The text or the tags are missing.
    """
    # If the first one has no end, none has, and a search would read to the end for
    # each.
    match = _TEXT.match(content, max(0, content.find("<TEXT>")))
    if match is None:
        raise DataError("there is no TEXT element, so it is not an i2b2 2012 record")
    tags = content[match.end() :]
    if "<TAGS" not in tags:
        raise DataError(
            "there is no TAGS element after the text: check that the file is complete"
        )
    raw_text = match.group(1)
    if raw_text is None:  # no CDATA
        raw_text = html.unescape(match.group(2))
    first_line = content.count("\n", 0, match.end()) + 1
    return _Record(raw_text, tags, first_line)


def _read_record(path: Path, problems: Problems) -> list[ReadDocument]:
    """Return the document of a record."""
    raw_text, tags, first_line = _split_record(read_text(path))
    read_mentions: list[_Mention] = []
    for number, line in enumerate(tags.split("\n"), first_line):
        if _TAG.match(line):
            with problems.collecting("mention", path, number):
                read_mentions.append(_parse_mention(line, number))

    text, shift = _place_text(raw_text, read_mentions)
    mentions: list[_Mention] = []
    for span, form, number in read_mentions:
        moved = Span(span.start + shift, span.end + shift, span.label)
        if 0 <= moved.start < moved.end <= len(text):
            mentions.append(_Mention(moved, form, number))
        else:
            problems.note(
                "mention",
                path,
                number,
                f"{span.start}:{span.end} is not a span of the text "
                f"({len(raw_text)} characters)",
            )
    trimmed_lines = re.finditer(r"\S(?:[^\n]*\S)?", text)
    document = Document(
        id=path.stem,
        text=text,
        spans=tuple(dict.fromkeys(mention.span for mention in mentions)),
        meta=count_mismatches(path, text, mentions, "mentions"),
        sentences=tuple(line.span() for line in trimmed_lines),
    )
    return [ReadDocument(document, path)]


def _parse_mention(line: str, number: int) -> _Mention:
    # Otherwise the rest of the line would be searched after each attribute.
    """Return the mention of a tag.

    Args:
        line: The line with the tag.
        number: The line's number in the file.

    Raises:
        DataError: The tag is damaged.
    """
    is_whole = line.rstrip().endswith(">")
    match = _ATTRIBUTES.fullmatch(line) if is_whole else None
    # The attribute `type` is the first after the text in a TIMEX3 and the last in an
    # EVENT.
    types = [] if match is None else _TYPE.findall(line[match.end(3) :])
    if match is None or not types:
        raise DataError('expected id, start, end, text and type="…" in one tag')
    label = intern(types[0].upper())
    span = Span(int(match.group(1)), int(match.group(2)), label)
    return _Mention(span, html.unescape(match.group(3)), number)


def _place_text(raw: str, mentions: Sequence[_Mention]) -> tuple[str, int]:
    """Return the text without its first line end, and the correction of offsets.

    Offsets refer to the raw text. Some readers strip it and subtract one from offsets,
    which is equivalent if the raw text begins with exactly one line end. The correction
    that matches more mentions is used.
    """
    text = raw.removeprefix("\n")
    shift_of_raw = len(text) - len(raw)
    shift_of_stripped = len(raw) - len(raw.lstrip()) - 1 + shift_of_raw

    def count_hits(shift: int) -> int:
        """Return the number of mentions that match after this correction."""
        hits = 0
        for span, form, _ in mentions:
            start = span.start + shift
            end = span.end + shift
            hits += start >= 0 and is_normal_form(text, start, end, form)
        return hits

    return text, max((shift_of_raw, shift_of_stripped), key=count_hits)
