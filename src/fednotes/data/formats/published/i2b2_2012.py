"""i2b2 2012 temporal relations: one XML file a record, events and times with offsets.

    <TEXT><![CDATA[ … ]]></TEXT> <EVENT id="E0" start="36" end="46" text="chest pain"
    modality="FACTUAL" … type="PROBLEM" />

Offsets are characters into the raw text, half-open. The files are not always XML
(quotes and ampersands inside attributes stand as they are), so they are read line by
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

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats.files import read_head, read_text
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import ReadDocument, gather
from fednotes.data.formats.mentions import count_mismatches
from fednotes.data.formats.problems import Problems
from fednotes.data.text import normalise

LOOSE = 0
_TEXT = re.compile(r"<TEXT>(?:\s*<!\[CDATA\[(.*?)\]\]>\s*|(.*?))</TEXT>", re.DOTALL)
_TAG = re.compile(r"\s*<(EVENT|TIMEX3)\s")
_PARTS = re.compile(
    r'\s*<(?:EVENT|TIMEX3)\s+id="[^"]*"\s+start="([0-9]{1,9})"\s+end="([0-9]{1,9})"\s+text="(.*?)"'
    r'\s+(?:modality|type)="(.*)/?>\s*'
)
_TYPE = re.compile(r'(?:^|\s)type="([A-Za-z_]+)"')
_Mention = tuple[Span, str, int]  # as the file gives it, its text, its line


def accepts(path: Path) -> bool:
    """Whether the file is XML whose first lines open a TEXT."""
    if path.suffix.lower() != ".xml":
        return False
    lines = read_head(path)[:6]
    return (
        bool(lines)
        and lines[0].startswith("<")
        and any("<TEXT>" in line for line in lines)
    )


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """One document per record; its lines are its sentences.

    `meta["mismatched"]` counts mentions whose text is not what their offsets hold.
    Noted are a file without text or tags, and with the line a broken tag or offsets
    outside the text, and where most mentions do not match.
    """
    return gather(
        find_corpus_files(path, accepts, "i2b2 2012"),
        _read_record,
        problems,
        "document",
    )


def _read_record(path: Path, problems: Problems) -> list[ReadDocument]:
    content = read_text(path)
    found = _TEXT.search(content)
    if found is None:
        raise DataError("there is no TEXT element: it is no i2b2 2012 record")
    if "<TAGS" not in content[found.end() :]:
        raise DataError(
            "there is no TAGS element after the text: is the file complete?"
        )
    raw = (
        found.group(1) if found.group(1) is not None else html.unescape(found.group(2))
    )
    first = content.count("\n", 0, found.end()) + 1
    given: list[_Mention] = []
    for number, line in enumerate(content[found.end() :].split("\n"), first):
        if _TAG.match(line):
            with problems.collect("mention", path, number):
                given.append((*_mention(line), number))
    text, shift = _placed(raw, given)
    mentions: list[_Mention] = []
    for span, form, number in given:
        moved = Span(span.start + shift, span.end + shift, span.label)
        if 0 <= moved.start < moved.end <= len(text):
            mentions.append((moved, form, number))
        else:
            place = f"{span.start}:{span.end} is no stretch of the text"
            problems.note("mention", path, number, f"{place} ({len(raw)} characters)")
    document = Document(
        path.stem,
        text,
        tuple(dict.fromkeys(span for span, _, _ in mentions)),
        meta=count_mismatches(path, text, mentions, "mentions"),
        # The lines that hold something, trimmed.
        sentences=tuple(m.span() for m in re.finditer(r"\S(?:[^\n]*\S)?", text)),
    )
    return [ReadDocument(document, path)]


def _mention(line: str) -> tuple[Span, str]:
    found = _PARTS.fullmatch(line)
    # The value of `type` comes first in a TIMEX3, last in an EVENT.
    label = None if found is None else _TYPE.findall(line[found.end(3) :])
    if found is None or not label:
        raise DataError('expected id, start, end, text and type="…" in one tag')
    span = Span(int(found.group(1)), int(found.group(2)), intern(label[0].upper()))
    return span, html.unescape(found.group(3))


def _placed(raw: str, mentions: Sequence[_Mention]) -> tuple[str, int]:
    """The text without its first line end, and what to add to offsets.

    Offsets count from the raw text. Readers that strip it first subtract one, which is
    the same unless the raw text begins otherwise than with one line end: the better fit
    is taken.
    """
    text = raw.removeprefix("\n")
    as_raw = len(text) - len(raw)
    as_stripped = len(raw) - len(raw.lstrip()) - 1 + as_raw

    def hits(shift: int) -> int:
        return sum(
            s.start + shift >= 0
            and normalise(text[s.start + shift : s.end + shift]) == normalise(form)
            for s, form, _ in mentions
        )

    return text, max((as_raw, as_stripped), key=hits)
