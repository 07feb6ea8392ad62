"""brat standoff: `NAME.txt` with the note, `NAME.ann` with a line per annotation.

Mentions may overlap and may consist of pieces (`T3<TAB>ADE 60 71;75 79<TAB>text`). The
lines of the `.ann` file are stored unchanged in `meta["brat"]`, so relations, events,
attributes and notes are written back with the document. Offsets count characters of the
`.txt` file. Files whose offsets also count a byte-order mark, or both characters of a
Windows line ending, are recognised by the texts of their mentions.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from sys import intern
from typing import NamedTuple

from fednotes.core import bounds
from fednotes.core.errors import DataError
from fednotes.core.store import write_out
from fednotes.core.types import Document, Offsets, Span
from fednotes.data.formats.file_names import file_of_id, id_of_file
from fednotes.data.formats.files import read_head, read_text
from fednotes.data.formats.folders import find_corpus_files, find_file, list_files
from fednotes.data.formats.gathering import ReadDocument, gather_documents, stream_files
from fednotes.data.formats.mentions import (
    is_far_longer,
    is_same_text,
    require_short_mentions,
)
from fednotes.data.formats.problems import UNANNOTATED, WINDOWS, Problems
from fednotes.data.text import merge_overlapping

LOOSE = 0
_OFFSETS = "[0-9]{1,9} [0-9]{1,9}"
_MENTION_LINE = re.compile(
    rf"(T\S{{1,40}})\t(\S+) ({_OFFSETS}(?:;{_OFFSETS})*)\t(.*)", re.DOTALL
)
_OTHER_LINE = re.compile(
    r"[RAMN]\S*\t\S+ .*|E\S*\t\S+:\S.*|#\S*\t\S.*|\*\t\S+ .*", re.DOTALL
)
_ANNOTATION_START = re.compile(r"[TREAMN#*]\S*\t")
_TEXT_FOLDERS = ("text", "txt")  # in CADEC, next to the annotations' folder
# If so many mentions, and more than half, do not match, the text is a different one.
_MIN_MISFITS = 5
_WORD = re.compile(r"[^\s:]+")


class _Mention(NamedTuple):
    """A T line.

    Attributes:
        id: Its id, such as "T1".
        span: The mention.
        pieces: The sorted pieces of the line, before overlapping ones are merged.
        form: Their text, according to the line.
    """

    id: str
    span: Span
    pieces: Offsets
    form: str


# ---- reading -------------------------------------------------------------------------


def accepts(path: Path) -> bool:
    """Return whether the file is an `.ann` file, or the `.txt` file next to one."""
    if path.suffix == ".txt":
        return path.with_suffix(".ann").is_file()
    if path.suffix != ".ann":
        return False
    lines = read_head(path)
    is_annotation = not lines or any(_ANNOTATION_START.match(line) for line in lines)
    return is_annotation or path.with_suffix(".txt").is_file()


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return the documents of one `.txt`/`.ann` pair, or of all pairs in a folder.

    A document's id is the name of its file, preceded by the names of subfolders and
    "/", as `write` creates them. A %XX that `write` puts into a name is decoded. An
    empty `.txt` file is a document without text. In a folder, a `.txt` file without an
    `.ann` file is ignored and counted. These problems are collected: a missing file of
    a pair; a line that is incomplete or does not match the text; and a text that most
    mentions do not match.
    """
    base, files = _find_files(path, problems)
    return gather_documents(files, partial(_read_pair, base), problems, "document")


def stream(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the documents of `read` one by one."""
    base, files = _find_files(path, problems)
    return stream_files(files, partial(_read_pair, base), problems, "document")


def _find_files(path: Path, problems: Problems) -> tuple[Path, list[Path]]:
    """Return the folder to which ids are relative, and the annotation files.

    Texts without annotations are added to `problems`.
    """
    files = find_corpus_files(
        path,
        lambda file: file.suffix == ".ann" and accepts(file),
        "brat",
        recursive=True,
    )
    if not path.is_dir():
        return path.parent, files
    if any(file.with_suffix(".txt").is_file() for file in files):
        annotated = {file.with_suffix("") for file in files}
        texts = [
            file
            for file in list_files(path, recursive=True)
            if file.suffix == ".txt" and file.with_suffix("") not in annotated
        ]
        problems.unannotated += texts
        problems.ignored[UNANNOTATED] += len(texts)
    return path, files


def _read_pair(base: Path, file: Path, problems: Problems) -> list[ReadDocument]:
    """Return the document of an `.ann` file and its text."""
    stem = file.with_suffix("")
    annotation_file = _find_partner(file, ".ann", base)
    text_file = _find_partner(file, ".txt", base, _TEXT_FOLDERS)
    raw_text = read_text(text_file, may_be_empty=True, exact=True)
    content = read_text(annotation_file, may_be_empty=True).removesuffix("\n")
    lines = dict(enumerate(content.split("\n"), 1))
    mentions = _parse_lines(lines, annotation_file, problems)

    text, misfits = _choose_text(raw_text, mentions)
    if "\r\n" in raw_text and "\r\n" not in text:
        problems.ignored[WINDOWS] += 1
    if len(misfits) >= _MIN_MISFITS and 2 * len(misfits) > len(mentions):
        raise DataError.at(
            annotation_file,
            next(iter(misfits)),
            f"{len(misfits)} of {len(mentions)} mentions do not match the "
            "text: check that the text belongs to these annotations",
        )
    for number, reason in misfits.items():
        problems.note("mention", annotation_file, number, reason)
        del mentions[number]
        del lines[number]

    remaining_lines = tuple(lines.values())
    document = Document(
        id=id_of_file(stem.relative_to(base)),
        text=text,
        spans=tuple(mention.span for mention in mentions.values()),
        meta={"brat": remaining_lines} if any(remaining_lines) else {},
    )
    return [ReadDocument(document, file)]


def _find_partner(
    file: Path, suffix: str, base: Path, folders: Iterable[str] = ()
) -> Path:
    """Return the file of a pair that has this suffix.

    Args:
        file: One file of the pair; it may itself have the suffix.
        suffix: ".txt" or ".ann".
        base: The folder of the corpus.
        folders: Names of folders next to the file's folder that may contain it.

    Raises:
        DataError: A link leads out of the corpus, or it is not a file.
    """
    beside = file.with_suffix(suffix)
    if beside == file:
        return file
    places = [file.parent, *(file.parent.parent / name for name in folders)]
    return find_file(beside.name, places, base) or beside


def _parse_lines(
    lines: dict[int, str], path: Path, problems: Problems
) -> dict[int, _Mention]:
    """Return the mentions of annotation lines, by line number.

    Invalid lines are added to `problems` and removed from `lines`.

    Raises:
        DataError: There are more than `bounds.MENTIONS` mentions.
    """
    mentions: dict[int, _Mention] = {}
    ids: set[str] = set()
    for number, line in tuple(lines.items()):
        with problems.collecting("line", path, number) as errors:
            mention = _parse_line(line)
            if mention is not None:
                if mention.id in ids:
                    raise DataError(
                        f"the id {mention.id} is used twice: give each mention its own "
                        "id"
                    )
                ids.add(mention.id)
                mentions[number] = mention
        if len(mentions) > bounds.MENTIONS:
            raise DataError.at(
                path,
                number,
                f"more than {bounds.MENTIONS:,} mentions in one text: check that it is "
                "one note",
            )
        if errors:
            del lines[number]
    return mentions


def _parse_line(line: str) -> _Mention | None:
    """Return the mention of a T line; None for any other line.

    Raises:
        DataError: The line is not a complete annotation.
    """
    match = _MENTION_LINE.fullmatch(line)
    if match is None:
        if line.strip() and not _OTHER_LINE.fullmatch(line):
            raise DataError("incomplete brat annotation: check that the line is whole")
        return None
    id, label, offsets, form = match.groups()
    if offsets.count(";") >= bounds.PIECES:
        raise DataError(
            f"{id} has more than {bounds.PIECES:,} pieces: check that it is one mention"
        )
    pieces = []
    for piece in offsets.split(";"):
        start, end = map(int, piece.split())
        if start >= end:
            raise DataError(f"{id} ends before it starts")
        pieces.append((start, end))
    pieces.sort()
    merged = tuple(merge_overlapping(pieces))  # annotators' pieces may overlap
    span = Span(
        merged[0][0],
        merged[-1][1],
        intern(label),
        merged if len(merged) > 1 else (),
    )
    return _Mention(id, span, tuple(pieces), form)


def _choose_text(
    raw: str, mentions: Mapping[int, _Mention]
) -> tuple[str, dict[int, str]]:
    """Return the variant of a text to which the mentions' offsets refer.

    Args:
        raw: The unchanged text of the file.
        mentions: The mentions, by line number.

    Returns:
        The variant that the most mentions match, and the reason why each of the others
        does not, by line number.
    """
    bare = raw.removeprefix("\ufeff")
    best_text = bare
    best_misfits: dict[int, str] | None = None
    candidates = (bare.replace("\r\n", "\n"), bare, raw.replace("\r\n", "\n"), raw)
    for text in dict.fromkeys(candidates):
        misfits = _find_misfits(text, mentions)
        if best_misfits is None or len(misfits) < len(best_misfits):
            best_text = text
            best_misfits = misfits
        if not misfits:
            break
    return best_text, best_misfits or {}


def _find_misfits(text: str, mentions: Mapping[int, _Mention]) -> dict[int, str]:
    """Return the reason of each mention that does not match a text, by line number."""
    reasons = {
        number: _explain_misfit(text, mention) for number, mention in mentions.items()
    }
    return {number: reason for number, reason in reasons.items() if reason}


def _explain_misfit(text: str, mention: _Mention) -> str:
    """Return the reason why a mention does not match a text; "" if it does.

    The words of several pieces may be in a different order.
    """
    start = mention.span.start
    end = mention.span.end
    where = f"{mention.id} at {start}:{end}"
    if end > len(text):
        return f"{where} lies outside the text ({len(text)} characters)"
    is_equal = False
    if not is_far_longer(mention.pieces, mention.form):
        form = _join_pieces(text, mention.pieces)
        if len(mention.pieces) > 1:
            is_equal = sorted(form.split()) == sorted(mention.form.split())
        else:
            is_equal = is_same_text(form, mention.form)
    return "" if is_equal else f"{where}: the document has other text there"


def _join_pieces(text: str, pieces: Offsets) -> str:
    """Return the text of a mention's pieces, joined by spaces, on one line."""
    form = " ".join(text[start:end] for start, end in pieces)
    return re.sub(r"[\r\n\t]", " ", form)


# ---- writing -------------------------------------------------------------------------


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Write a `.txt` and an `.ann` file per document into a folder.

    Annotation lines that were read are written back unchanged, except those of removed
    mentions and the lines that refer to these. New mentions get new ids. Characters
    that are not allowed in file names are written as %XX.

    Raises:
        DataError: The path is a file.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise DataError(
            f"{folder} is a file, but brat needs a folder: give the folder that "
            "contains the files"
        )
    for document in documents:
        require_short_mentions(document)
        name = file_of_id(document.id)
        lines = _make_annotation_lines(document)
        write_out(folder / f"{name}.txt", document.text)
        write_out(folder / f"{name}.ann", "".join(f"{line}\n" for line in lines))


def _make_annotation_lines(document: Document) -> list[str]:
    """Return the annotation lines of a document; see `write`."""
    unwritten = Counter(document.spans)
    lines: list[str] = []
    removed_ids: set[str] = set()
    highest_number = 0
    # The lines that were read, except those of mentions that the document lacks now.
    for line in document.meta.get("brat", ()):
        mention = _parse_line(line)
        if mention is not None:
            number = int(re.sub(r"\D", "", mention.id) or 0)
            highest_number = max(highest_number, number)
            is_removed = unwritten[mention.span] <= 0
            if is_removed or _explain_misfit(document.text, mention):
                removed_ids.add(mention.id)
                continue
            unwritten[mention.span] -= 1
        lines.append(line)
    lines = _remove_references(lines, removed_ids)

    # The other mentions are new, and get the numbers after the highest one.
    for number, span in enumerate(unwritten.elements(), highest_number + 1):
        offsets = ";".join(f"{start} {end}" for start, end in span.pieces)
        label = re.sub(r"\s+", "_", span.label)
        form = _join_pieces(document.text, span.pieces)
        lines.append(f"T{number}\t{label} {offsets}\t{form}")
    return lines


def _remove_references(lines: list[str], removed_ids: set[str]) -> list[str]:
    """Return the lines that do not refer, directly or indirectly, to removed ids."""
    if not removed_ids:
        return lines
    referring = defaultdict[str, list[int]](list)  # numbers of lines, by id
    for number, line in enumerate(lines):
        for id in _find_ids(line):
            referring[id].append(number)

    removed_lines = set[int]()
    pending = list(removed_ids)
    while pending:
        for number in referring.pop(pending.pop(), ()):
            removed_lines.add(number)
            own_id = lines[number].split("\t")[0]
            if own_id != "*":
                pending.append(own_id)
    return [line for number, line in enumerate(lines) if number not in removed_lines]


def _find_ids(line: str) -> set[str]:
    """Return the ids to which an annotation refers; a mention refers to none."""
    columns = line.split("\t")
    if line.startswith("T") or len(columns) < 2:
        return set()
    return set(_WORD.findall(columns[1])[1:])
