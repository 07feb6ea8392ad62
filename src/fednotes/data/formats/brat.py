"""brat standoff: `NAME.txt` with the note, `NAME.ann` with a line per annotation.

Mentions may overlap and may come in pieces (`T3<TAB>ADE 60 71;75 79<TAB>text`). The
lines of the `.ann` file are kept in `meta["brat"]` as they are, so relations, events,
attributes and notes come out again when the document is written. Offsets count
characters of the `.txt` file; files whose offsets count a byte-order mark or the two
characters of a Windows line end are recognised by their mentions' texts.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from sys import intern
from typing import NamedTuple
from urllib.parse import quote, unquote

from fednotes.core import bounds
from fednotes.core.errors import DataError
from fednotes.core.store import write_out
from fednotes.core.types import Document, Offsets, Span
from fednotes.data.formats.files import read_head, read_text
from fednotes.data.formats.folders import find_corpus_files, find_file, list_files
from fednotes.data.formats.gathering import ReadDocument, gather, stream_files
from fednotes.data.formats.mentions import is_far_longer, is_same_text
from fednotes.data.formats.problems import UNANNOTATED, WINDOWS, Problems
from fednotes.data.text import merge_overlapping

LOOSE = 0
_PLACE = "[0-9]{1,9} [0-9]{1,9}"
_MENTION = re.compile(
    rf"(T\S{{1,40}})\t(\S+) ({_PLACE}(?:;{_PLACE})*)\t(.*)", re.DOTALL
)
_OTHER = re.compile(
    r"[RAMN]\S*\t\S+ .*|E\S*\t\S+:\S.*|#\S*\t\S.*|\*\t\S+ .*", re.DOTALL
)
_STRAY = 5  # so many mentions that do not fit, and most of all: it is another text
_WORD = re.compile(r"[^\s:]+")
# The %XX that `_safe` writes. A % of an id is escaped only where it would begin one of
# them.
_CODE = "%(?:[01][0-9A-F]|22|25|2A|2E|3A|3C|3E|3F|5C|7C|7F)"
_ESCAPED = re.compile(_CODE)
_UNSAFE = re.compile(rf'[\x00-\x1f\x7f\\:*?"<>|]|(?={_CODE})%')


class _Mention(NamedTuple):
    """A T line. pieces: as the line gives them, in order; form: their text by the line."""

    id: str
    span: Span
    pieces: Offsets
    form: str


def accepts(path: Path) -> bool:
    """Whether the file is an `.ann` file, or the `.txt` file beside one."""
    if path.suffix != ".ann":
        return path.suffix == ".txt" and path.with_suffix(".ann").is_file()
    lines = read_head(path)
    known = not lines or any(re.match(r"[TREAMN#*]\S*\t", line) for line in lines)
    return known or path.with_suffix(".txt").is_file()


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Documents of one `.txt`/`.ann` pair or of all pairs in a folder; id: the file's
    name.

    The folders below are read too, their names before a / of the id, as `write` puts
    them. A %XX that `write` puts into a name is turned back. An empty `.txt` is a
    document without text. A `.txt` file without `.ann` is passed over in a folder, and
    counted. Noted are a missing partner and, with the line, a line that is cut short or
    does not fit the text, and a text that most of its mentions do not fit.
    """
    base, files = _files(path, problems)
    return gather(files, partial(_read_pair, base), problems, "document")


def stream(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield what `read` returns, a document at a time."""
    base, files = _files(path, problems)
    return stream_files(files, partial(_read_pair, base), problems, "document")


def _files(path: Path, problems: Problems) -> tuple[Path, list[Path]]:
    """Return the folder that ids begin in, and the files of annotations; note bare
    texts."""
    files = find_corpus_files(
        path, lambda p: p.suffix == ".ann" and accepts(p), "brat", recursive=True
    )
    base = path if path.is_dir() else path.parent
    if path.is_dir() and any(file.with_suffix(".txt").is_file() for file in files):
        texts = {
            p.with_suffix("")
            for p in list_files(path, recursive=True)
            if p.suffix == ".txt"
        }
        bare = texts - {file.with_suffix("") for file in files}
        problems.unannotated += sorted(
            text.with_name(f"{text.name}.txt") for text in bare
        )
        problems.ignored[UNANNOTATED] += len(bare)
    return base, files


def _read_pair(base: Path, file: Path, problems: Problems) -> list[ReadDocument]:
    stem = file.with_suffix("")
    ann, beside = Path(f"{stem}.ann"), Path(f"{stem}.txt")
    # CADEC has them in a folder beside that of the annotations
    if not beside.is_file():
        folders = (stem.parent.parent / name for name in ("text", "txt"))
        beside = find_file(beside.name, folders) or beside
    raw = read_text(beside, empty=True, exact=True)
    lines = dict(
        enumerate(read_text(ann, empty=True).removesuffix("\n").split("\n"), 1)
    )
    mentions: dict[int, _Mention] = {}
    ids: set[str] = set()
    for number, line in tuple(lines.items()):
        with problems.collect("line", ann, number) as wrong:
            mention = _parse(line)
            if mention is not None:
                if mention.id in ids:
                    raise DataError(f"the id {mention.id} is used twice")
                ids.add(mention.id)
                mentions[number] = mention
        if len(mentions) > bounds.MENTIONS:
            told = (
                f"more than {bounds.MENTIONS:,} mentions in one text: is it one note?"
            )
            raise DataError.at(ann, number, told)
        if wrong:
            del lines[number]
    text, failed = _matching(raw, mentions)
    problems.ignored[WINDOWS] += "\r\n" in raw and "\r\n" not in text
    if len(failed) >= _STRAY and 2 * len(failed) > len(mentions):
        told = f"{len(failed)} of {len(mentions)} mentions do not fit the text: is it theirs?"
        raise DataError.at(ann, next(iter(failed)), told)
    for number, reason in failed.items():
        problems.note("mention", ann, number, reason)
        del mentions[number], lines[number]
    spans = tuple(mention.span for mention in mentions.values())
    name = "/".join(map(_unsafe, stem.relative_to(base).parts))
    kept = tuple(lines.values())
    meta = {"brat": kept} if any(kept) else {}
    return [ReadDocument(Document(name, text, spans, meta=meta), file)]


def _parse(line: str) -> _Mention | None:
    """The mention of a T line; None for another line.

    Raises DataError for a broken one.
    """
    match = _MENTION.fullmatch(line)
    if match is None:
        if line.strip() and not _OTHER.fullmatch(line):
            raise DataError("no whole brat annotation (is the line cut short?)")
        return None
    name, label, places, form = match.groups()
    if places.count(";") >= bounds.PIECES:
        raise DataError(
            f"{name} has more than {bounds.PIECES:,} pieces: is it one mention?"
        )
    rows = (tuple(map(int, place.split())) for place in places.split(";"))
    pieces = tuple(sorted((start, end) for start, end in rows))
    if any(start >= end for start, end in pieces):
        raise DataError(f"{name} ends before it starts")
    whole = tuple(merge_overlapping(pieces))  # pieces of hand-made corpora may overlap
    span = Span(
        whole[0][0], whole[-1][1], intern(label), whole if len(whole) > 1 else ()
    )
    return _Mention(name, span, pieces, form)


def _matching(raw: str, mentions: Mapping[int, _Mention]) -> tuple[str, dict[int, str]]:
    """The reading of the text file that the mentions' offsets were counted in: that
    which the most mentions fit. And what is wrong with the others, by their lines."""
    bare = raw.removeprefix("\ufeff")
    best: tuple[str, dict[int, str]] | None = None
    for text in dict.fromkeys(
        (bare.replace("\r\n", "\n"), bare, raw.replace("\r\n", "\n"), raw)
    ):
        failed = {
            n: reason for n, m in mentions.items() if (reason := _misfit(text, m))
        }
        if best is None or len(failed) < len(best[1]):
            best = text, failed
        if not failed:
            break
    assert best is not None
    return best


def _misfit(text: str, mention: _Mention) -> str:
    """Why a text does not hold a mention, or ""; its pieces' words may be in another
    order."""
    start, end = mention.span.start, mention.span.end
    where = f"{mention.id} at {start}:{end}"
    if end > len(text):
        return f"{where} lies outside the text ({len(text)} characters)"
    if is_far_longer(mention.pieces, mention.form):
        return f"{where} is not what the text holds there"
    found = _form(text, mention.pieces)
    same = is_same_text(found, mention.form)
    if len(mention.pieces) > 1:
        same = sorted(found.split()) == sorted(mention.form.split())
    return "" if same else f"{where} is not what the text holds there"


def _form(text: str, pieces: Offsets) -> str:
    """A mention's text as brat writes it: pieces joined by a space, on one line."""
    return re.sub(r"[\r\n\t]", " ", " ".join(text[start:end] for start, end in pieces))


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Writes a `.txt` and an `.ann` file per document into the folder `path`.

    Annotation lines that were read are written as they were; those whose mention the
    document no longer has go, with the lines that refer to them. New mentions get new
    ids. Characters of an id that a file name cannot hold are written as %XX.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder}: brat needs a folder and this is a file")
    for document in documents:
        name = "/".join(_safe(part) for part in document.id.split("/"))
        write_out(folder / f"{name}.txt", document.text)
        write_out(
            folder / f"{name}.ann", "".join(f"{line}\n" for line in _lines(document))
        )


def _safe(part: str) -> str:
    """A part of an id as a file name: no empty, hidden or relative one, no odd
    characters."""
    if part in ("", "%"):
        return "%25" if part else "%"
    bare = part.lstrip(".")
    dots = "%2E" * (len(part) - len(bare))
    return dots + _UNSAFE.sub(lambda m: quote(m.group(), safe=""), bare)


def _unsafe(name: str) -> str:
    """The part of an id that `_safe` made the name of; other names are what they are."""
    return "" if name == "%" else _ESCAPED.sub(lambda m: unquote(m.group()), name)


def _lines(document: Document) -> list[str]:
    """The annotation lines of a document."""
    wanted = Counter(document.spans)
    kept: list[str] = []
    gone: set[str] = set()
    highest = 0
    for line in document.meta.get("brat", ()):
        mention = _parse(line)
        if mention is not None:
            highest = max(highest, int(re.sub(r"\D", "", mention.id) or 0))
            if wanted[mention.span] <= 0 or _misfit(document.text, mention):
                gone.add(mention.id)
                continue
            wanted[mention.span] -= 1
        kept.append(line)
    kept = _without(kept, gone)
    for number, span in enumerate(wanted.elements(), highest + 1):
        places = ";".join(f"{start} {end}" for start, end in span.pieces)
        label = re.sub(r"\s+", "_", span.label)
        kept.append(f"T{number}\t{label} {places}\t{_form(document.text, span.pieces)}")
    return kept


def _without(lines: list[str], gone: set[str]) -> list[str]:
    """The lines that do not refer, straight or through another line, to what is gone."""
    while gone:
        refers = {
            line for line in lines if not line.startswith("T") and _refers(line, gone)
        }
        gone = {line.split("\t")[0] for line in refers} - {"*"}
        lines = [line for line in lines if line not in refers]
    return lines


def _refers(line: str, gone: set[str]) -> bool:
    """Whether an annotation's second column, which holds types and ids, names one of
    `gone`."""
    columns = line.split("\t")
    return len(columns) > 1 and not gone.isdisjoint(_WORD.findall(columns[1])[1:])
