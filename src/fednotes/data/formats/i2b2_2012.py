"""i2b2 2012 temporal relations: one XML file a record, events and times with offsets.

    <TEXT><![CDATA[ … ]]></TEXT>
    <EVENT id="E0" start="36" end="46" text="chest pain" modality="FACTUAL" … type="PROBLEM" />

Offsets are characters into the raw text, half-open. The files are not always XML (quotes and
ampersands inside attributes stand as they are), so they are read line by line.
Labels are the types of events (PROBLEM, TEST, TREATMENT, CLINICAL_DEPT, EVIDENTIAL, OCCURRENCE)
and of times (DATE, TIME, DURATION, FREQUENCY). Section times and links are not mentions.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from pathlib import Path
from sys import intern

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats.files import head, listing, read_text
from fednotes.data.formats.problems import Found, Problems, unique
from fednotes.data.text import normalise

_TEXT = re.compile(r"<TEXT>(?:\s*<!\[CDATA\[(.*?)\]\]>\s*|(.*?))</TEXT>", re.DOTALL)
_TAG = re.compile(r"\s*<(EVENT|TIMEX3)\s")
_PARTS = re.compile(
    r'\s*<(?:EVENT|TIMEX3)\s+id="[^"]*"\s+start="([0-9]{1,9})"\s+end="([0-9]{1,9})"\s+text="(.*?)"'
    r'\s+(?:modality|type)="(.*)/?>\s*'
)
_TYPE = re.compile(r'(?:^|\s)type="([A-Za-z_]+)"')
_Mention = tuple[int, int, str, str, int]  # start, end, form, label, line


def accepts(path: Path) -> bool:
    """Whether the file is XML whose first lines open a TEXT."""
    if path.suffix.lower() != ".xml":
        return False
    lines = head(path)[:6]
    return bool(lines) and lines[0].startswith("<") and any("<TEXT>" in line for line in lines)


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """One document per record; its lines are its sentences.

    `meta["mismatched"]` counts mentions whose text is not what their offsets hold. Noted
    are a file without text or tags, and with the line a broken tag or offsets outside the text,
    and where most mentions do not match.
    """
    found: list[Found] = []
    for file in listing(path, accepts, "i2b2 2012"):
        with problems.passing("document"):
            found.append(Found(_read_record(file, problems), file))
    return unique(found, problems)


def _read_record(path: Path, problems: Problems) -> Document:
    content = read_text(path)
    found = _TEXT.search(content)
    if found is None:
        raise DataError.at(path, 0, "there is no TEXT element: it is no i2b2 2012 record")
    if "<TAGS" not in content[found.end() :]:
        raise DataError.at(path, 0, "there is no TAGS element after the text: is the file whole?")
    raw = found.group(1) if found.group(1) is not None else html.unescape(found.group(2))
    first = content.count("\n", 0, found.end()) + 1
    lines = content[found.end() :].split("\n")
    mentions: list[_Mention] = []
    for number, line in enumerate(lines, first):
        if _TAG.match(line):
            with problems.passing("mention"):
                mentions.append(_mention(path, number, line))
    text, shift = _placed(raw, mentions)
    spans = []
    wrong: list[int] = []
    for start, end, form, label, number in mentions:
        span = Span(start + shift, end + shift, intern(label))
        if not 0 <= span.start < span.end <= len(text):
            message = f"{start}:{end} is no stretch of the text ({len(raw)} characters)"
            problems.add(DataError.at(path, number, message), "mention")
            continue
        if normalise(text[span.start : span.end]) != normalise(form):
            wrong.append(number)
        spans.append(span)
    if 2 * len(wrong) > len(spans):
        message = f"{len(wrong)} of {len(spans)} mentions are not what the text holds there"
        raise DataError.at(path, wrong[0], message)
    return Document(
        path.stem,
        text,
        tuple(dict.fromkeys(spans)),
        meta={"mismatched": len(wrong)} if wrong else {},
        sentences=_lines(text),
    )


def _mention(path: Path, number: int, line: str) -> _Mention:
    found = _PARTS.fullmatch(line)
    # The value of `type` comes first in a TIMEX3, last in an EVENT.
    label = None if found is None else _TYPE.findall(line[found.end(3) :])
    if found is None or not label:
        raise DataError.at(path, number, 'expected id, start, end, text and type="…" in one tag')
    start, end, form = int(found.group(1)), int(found.group(2)), html.unescape(found.group(3))
    return start, end, form, label[0].upper(), number


def _placed(raw: str, mentions: Sequence[_Mention]) -> tuple[str, int]:
    """The text without its first line end, and what to add to offsets.

    Offsets count from the raw text. Readers that strip it first subtract one, which is the
    same unless the raw text begins otherwise than with one line end: the better fit is taken.
    """
    text = raw.removeprefix("\n")
    as_raw = len(text) - len(raw)
    as_stripped = len(raw) - len(raw.lstrip()) - 1 + as_raw

    def hits(shift: int) -> int:
        return sum(
            start + shift >= 0 and normalise(text[start + shift : end + shift]) == normalise(form)
            for start, end, form, _, _ in mentions
        )

    return text, max((as_raw, as_stripped), key=hits)


def _lines(text: str) -> tuple[tuple[int, int], ...]:
    """Offsets of the lines that hold something, trimmed."""
    return tuple(m.span() for m in re.finditer(r"\S(?:[^\n]*\S)?", text))
