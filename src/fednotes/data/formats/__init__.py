"""Corpus files ⇄ Documents. One module a format; the format is guessed from the
content.

A module of this folder, or of `published/`, is a format if it has `read(path,
problems)` for a file or a folder, which notes what it cannot use and goes on, and
`accepts(path)`, whether one file looks like the format; its name is the module's. Those
that can be read a document at a time have `stream(path, problems)`, which yields each
with its place. Those that write have `write(documents, path)` too. What a format cannot
hold is not claimed but found: whatever is written is read again and compared before it
is put in its place (`write`, `lost`). Other packages add formats by entry points
(`core/plugins.py`).
"""

from __future__ import annotations

import os
import pkgutil
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, NamedTuple

from fednotes.core import plugins
from fednotes.core.errors import (
    ConfigError,
    DataError,
    FednotesError,
    MissingExtra,
    nearest,
)
from fednotes.core.parsing import mapping, shipped
from fednotes.core.settings import path_of
from fednotes.core.store import beside, new_folder, sync_folder
from fednotes.core.types import Document, Span
from fednotes.data.encodings import AUTO, reading_as
from fednotes.data.formats import published
from fednotes.data.formats.files import (
    DERIVED,
    Found,
    OnError,
    Problems,
    mixed,
    read_text,
    visible,
)


def discover() -> dict[str, ModuleType]:
    """Return the formats of this folder and of other packages, in the order to try a
    file.

    A module's `LOOSE` says how easily it takes a file for its own: 0 not at all, 1 (if
    it says nothing) by its first line, 2 by guessing.
    """
    places = ((__name__, __path__), (published.__name__, published.__path__))
    found = [
        import_module(f"{name}.{module.name}")
        for name, path in places
        for module in pkgutil.iter_modules(path)
    ]
    formats = {
        module.__name__.rpartition(".")[2].replace("_", "-"): module
        for module in found
        if hasattr(module, "accepts") and hasattr(module, "read")
    }
    for name, entry in plugins.added("formats", formats).items():
        formats[name] = plugins.load(entry, ModuleType)
    return dict(sorted(formats.items(), key=_order_of_trial))


def _order_of_trial(item: tuple[str, ModuleType]) -> tuple[int, str]:
    _, module = item
    return getattr(module, "LOOSE", 1), module.__name__


FORMATS = discover()
_MADE = re.compile(r":[0-9]+$")  # an id that a reader made of a file and a number


def read(
    path: str | os.PathLike[str],
    format: str | None = None,
    on_error: OnError = "refuse",
    encoding: str = AUTO,
) -> tuple[Document, ...]:
    """The documents of a file or folder; ids are unique within one call.

    format: a key of `FORMATS`; None guesses it. on_error: "skip" leaves out what cannot
    be used (`examine` counts it). encoding: of files without a byte-order mark that are
    not UTF-8, such as "cp1252". Raises DataError for anything wrong with the files
    (each by its line), or where nothing is left of them, ConfigError for a format that
    does not exist.
    """
    documents, problems = examine(path, format, encoding)
    problems.refuse(on_error, documents)
    return documents


def examine(
    path: str | os.PathLike[str], format: str | None = None, encoding: str = AUTO
) -> tuple[tuple[Document, ...], Problems]:
    """What can be used of a file or folder, and all that is wrong with the rest.

    Raises DataError where there is no such file or no format fits, ConfigError as
        `read`.
    """
    if format is not None and format not in FORMATS:
        raise ConfigError(f"unknown format {format!r}: {nearest(format, FORMATS)}")
    problems = Problems()
    with reading_as(encoding):
        documents = FORMATS[format or guess_format(path)].read(Path(path), problems)
    return documents, problems


def stream(
    path: str | os.PathLike[str],
    problems: Problems,
    format: str | None = None,
    encoding: str = AUTO,
) -> Iterator[Document]:
    """Yield the documents of a file or folder, one by one where the format's reader
    can.

    A document keeps its id where an earlier one has the same, which is noted.

    Args:
        path: The file or folder.
        problems: Takes note of what is wrong, as `examine` returns it.
        format: As of `read`.
        encoding: As of `read`.

    Raises:
        DataError: There is no such file, or no format fits.
        ConfigError: As `read`.
    """
    with reading_as(encoding):
        kind = format or guess_format(path)
    module = FORMATS.get(kind)
    if module is None or not hasattr(module, "stream"):
        documents, found = examine(path, kind, encoding)
        problems.include(found)
        yield from documents
        return
    seen = set[int]()
    for document, file, line, _ in _reading(
        module.stream(Path(path), problems), encoding
    ):
        if line != DERIVED:
            key = hash(document.id)
            if key in seen:
                problems.repeat(file, line)
            seen.add(key)
        yield document


def _reading(found: Iterator[Found], encoding: str) -> Iterator[Found]:
    """Yield what a reader finds; the encoding is named while it reads, and not in
    between."""
    while True:
        with reading_as(encoding):
            one = next(found, None)
        if one is None:
            return
        yield one


def guess_format(path: str | os.PathLike[str]) -> str:
    """The format of a file, or the one format of a folder's files, from what they hold.

    Raises DataError where no format fits or a folder mixes formats.
    """
    path = Path(path)
    if not os.path.exists(path):
        raise DataError(f"{path}: no such file or folder")
    known = ", ".join(sorted(FORMATS))
    if not path.is_dir():
        if found := _guess_file(path):
            return found
        read_text(path)  # an empty or wrongly encoded file says so itself
        raise DataError(f"{path}: cannot tell the format: name one of {known}")
    for below in (False, True):
        counts = Counter(f for f in map(_guess_file, visible(path, below)) if f)
        if len(counts) == 1:
            return next(iter(counts))
        if counts:
            raise mixed(path, counts)
    raise DataError(f"{path}: no file in this folder is of a known format: {known}")


def _guess_file(path: Path) -> str | None:
    return next(
        (name for name, module in FORMATS.items() if module.accepts(path)), None
    )


def corpora() -> dict[str, dict[str, Any]]:
    """The corpora of `catalogue.toml`, which jobs know, by name; its head says what is
    told."""
    return shipped("data/formats/catalogue.toml")


# ---- writing, and what a format cannot hold ------------------------------------------


class LossyError(DataError):
    """Not all would be left of documents in a format. lost: how much of what, by kind."""

    def __init__(self, format: str, lost: Counter[str]) -> None:
        named = "; ".join(
            f"{kind}: {number:,}" for kind, number in sorted(lost.items())
        )
        told = "nothing was written: choose another format, or agree to it with --allow-loss"
        super().__init__(f"written as {format}, this would be lost: {named}; {told}")
        self.lost = lost


def writing() -> tuple[str, ...]:
    """The formats that documents can be written in."""
    return tuple(
        sorted(name for name, module in FORMATS.items() if hasattr(module, "write"))
    )


def write(
    documents: Sequence[Document],
    path: str | os.PathLike[str],
    format: str,
    allow_loss: bool = False,
    unread: Counter[str] | None = None,
) -> Counter[str]:
    """Writes documents to a new file or folder, whole or not at all.

    They are written beside their place and read again; only what came back as it was,
    or with `allow_loss`, is put there. Returns what was lost, by kind: with `unread`,
    what their reader passed over. Raises LossyError where anything would be and nobody
    agreed, ConfigError for a format that does not write, FednotesError where something
    lies at the path.
    """
    path = Path(path)
    if os.path.lexists(path):
        raise FednotesError(
            f"{path}: there is something already: name a new file or folder"
        )
    stage = beside(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_folder(stage, mode=0o700):
            gone = lost(documents, format, stage / path.name) + (unread or Counter())
            if gone and not allow_loss:
                raise LossyError(format, gone)
            os.rename(stage / path.name, path)
            sync_folder(path.parent)
    except OSError as error:
        raise FednotesError(
            f"{path}: cannot be written ({error.strerror or error})"
        ) from error
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return gone


def lost(
    documents: Sequence[Document], format: str, path: Path | None = None
) -> Counter[str]:
    """What a format cannot hold of documents, by kind: they are written, read again and
    compared.

    path: where they are written, and stay; else in a folder that goes again. Raises
    ConfigError for a format that does not write.
    """
    if format not in writing():
        raise ConfigError(
            f"{format!r} is no format that can be written: {nearest(format, writing())}"
        )
    if path is None:
        with TemporaryDirectory() as folder:
            return lost(documents, format, Path(folder, "documents"))
    try:
        FORMATS[format].write(documents, path)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        told = (
            f"what stands in a document's meta is not what {format} has under that name"
        )
        raise DataError(told) from None
    try:
        again, _ = examine(path, format)
    except DataError:
        again = ()  # nothing that could be read: the format has no empty corpora
    return differences(documents, again)


def differences(before: Sequence[Document], after: Sequence[Document]) -> Counter[str]:
    """What of some documents others do not have, by kind. Those of one id are compared,
    and, where as many are left, the rest in their order; what is only added is no
    difference."""
    found: Counter[str] = Counter()
    known = {document.id: document for document in after}
    left = [document for document in before if document.id not in known]
    names = {document.id for document in before}
    spare = [document for document in after if document.id not in names]
    if len(left) == len(spare):
        known |= {old.id: new for old, new in zip(left, spare, strict=True)}
    for old in before:
        new = known.get(old.id)
        if new is None:
            found["documents"] += 1
            continue
        found["ids"] += new.id != old.id and not all(
            map(_MADE.search, (old.id, new.id))
        )
        if new.text != old.text:
            found[
                "spacing" if _visible(new.text) == _visible(old.text) else "texts"
            ] += 1
        for part in ("patient", "codes", "sentences", "tokens"):
            held = getattr(old, part)
            found[part] += held not in (None, ()) and held != getattr(new, part)
        meta = _told(old)
        found.update(
            f"meta {name}" for name in meta if _told(new).get(name) != meta[name]
        )
        found += _mentions_gone(old, new)
    return +found


def _visible(text: str) -> str:
    return "".join(text.split())


def _told(document: Document) -> dict[str, Any]:
    """A document's meta without what only says how a file was laid out."""
    meta = dict(document.meta)
    if set(mapping(meta.get("conll"))) <= {"scheme", "separator", "marker"}:
        meta.pop("conll", None)
    brat = meta.get("brat") or ("",)
    if isinstance(brat, list | tuple) and all(
        str(line)[:1] in ("T", "") for line in brat
    ):
        meta.pop("brat", None)
    return meta


def _mentions_gone(old: Document, new: Document) -> Counter[str]:
    """Mentions that a document no longer has, by what they are. Where blanks came or
    went, places are counted in the characters that are seen."""
    if len(new.text) == len(old.text):
        wanted, held = Counter(old.spans), Counter(new.spans)
    else:
        wanted, held = (Counter(map(_seen_place(d), d.spans)) for d in (old, new))
    found: Counter[str] = Counter()
    renamed = {(s.start, s.end, s.fragments) for s in held - wanted}
    for span, number in (wanted - held).items():
        if (span.start, span.end, span.fragments) in renamed:
            kind = "labels"
        elif held[span]:
            kind = "repeated mentions"
        elif span.fragments:
            kind = "mentions in pieces"
        elif any(
            s != span and s.start < span.end and span.start < s.end for s in wanted
        ):
            kind = "overlapping mentions"
        else:
            kind = "bounds of mentions"
        found[kind] += number
    sure, again = (
        Counter(
            (s, round(s.confidence, 6)) for s in d.spans if s.confidence is not None
        )
        for d in (old, new)
    )
    kept = [number for (span, _), number in (sure - again).items() if held[span]]
    found["confidences"] += sum(kept)
    return found


def _seen_place(document: Document) -> Callable[[Span], Span]:
    seen = [0, *accumulate(not c.isspace() for c in document.text)]

    def placed(span: Span) -> Span:
        pieces = tuple((seen[a], seen[b]) for a, b in span.fragments)
        return Span(seen[span.start], seen[span.end], span.label, pieces)

    return placed


class Converted(NamedTuple):
    """How many documents were written; what was lost of them, by kind; what could not
    be read."""

    documents: int
    lost: Counter[str]
    problems: Problems


def convert(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: str,
    format: str | None = None,
    *,
    allow_loss: bool = False,
    on_error: OnError = "refuse",
    encoding: str = AUTO,
) -> Converted:
    """Reads a corpus and writes it in the format `to`, to a new file or folder `out`.

    format, on_error, encoding: as `read`; allow_loss: as `write`. Raises as these, and
    FednotesError where `out` lies in what is read: it would be a part of that corpus.
    """
    source, out = path_of(source, "a corpus"), path_of(out, "a path to write")
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(source)):
        raise FednotesError(
            f"{out} lies in {source}, which is read: name a place elsewhere"
        )
    documents, problems = examine(source, format, encoding)
    problems.refuse(on_error, documents)
    if not documents:
        raise DataError(f"{source}: there is no document in it: nothing was written")
    gone = write(documents, out, to, allow_loss, problems.unread)
    return Converted(len(documents), gone, problems)


_RASH = (Span(4, 8, "ADE"),)
_PROBES = {  # documents that have the feature and little else
    "text as it is": Document("a", "Had rash,\r\n\tno fever 😀.\u0301", _RASH),
    "ids": Document("ward 7/a", "Had rash", _RASH),
    "overlapping": Document("a", "Had rash", (Span(0, 8, "X"), *_RASH)),
    "in pieces": Document("a", "Had a rash", (Span(0, 10, "ADE", ((0, 3), (6, 10))),)),
    "confidences": Document("a", "Had rash", (Span(4, 8, "ADE", (), 0.5),)),
    "patient": Document("a", "Had rash", _RASH, "7"),
    "codes, meta": Document("a", "Had rash", _RASH, None, ("E11",), {"b": 1}),
    "sentences, tokens": Document(
        "a", "Had rash", _RASH, sentences=((0, 8),), tokens=((0, 3), (4, 8))
    ),
}


def table() -> list[dict[str, str]]:
    """What each format keeps, tried on documents made up for it; a row a format, in its
    name's order. Without its package a format that needs one says so."""
    rows = []
    for name in sorted(FORMATS):
        row = {"format": name, "written": "yes" if name in writing() else "no"}
        for feature, document in _PROBES.items() if name in writing() else ():
            try:
                row[feature] = "no" if lost([document], name) else "yes"
            except MissingExtra:
                row[feature] = "?"
        rows.append(row)
    return rows
