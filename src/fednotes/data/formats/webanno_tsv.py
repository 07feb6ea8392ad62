r"""WebAnno TSV 3.2 and 3.3, as INCEpTION and WebAnno export it: a file per document.

    #FORMAT=WebAnno TSV 3.3
    #T_SP=de.tudarmstadt.ukp.dkpro.core.api.ner.type.NamedEntity|value


    #Text=Upper belly pain 😀.
    1-1     0-5     Upper   ADE[1]
    1-2     6-11    belly   ADE[1]|Site[2]
    1-3     12-16   pain    ADE[1]
    1-4     17-19   😀      _
    1-5     19-20   .       _

A line is a token, or a part of the token before it (1-2.1). Offsets count UTF-16 units.
An annotation with an id, such as [1], reaches from its first unit to its last one; `|`
separates annotations of the same unit, `_` is none, and `*` has no value. The
annotations of one layer are the mentions, and one of its features is their type
(`layers.py`).
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, zip_longest
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from fednotes.core import bounds
from fednotes.core.errors import DataError
from fednotes.core.store import write_out
from fednotes.core.types import Document
from fednotes.data.formats import jsonl, layers
from fednotes.data.formats.choices import get_choice
from fednotes.data.formats.file_names import file_of_id, id_of_file
from fednotes.data.formats.files import (
    locating_errors,
    read_first_line,
    read_lines,
    remove_packed_suffix,
)
from fednotes.data.formats.gathering import ReadDocument
from fednotes.data.formats.layered_files import DocumentLayers, LayeredFormat
from fednotes.data.formats.layers import Layer
from fednotes.data.formats.mentions import require_short_mentions
from fednotes.data.formats.problems import Problems
from fednotes.data.formats.utf16 import Utf16Units, count_units
from fednotes.data.text import split_sentences, tokenize

LOOSE = 0
CHOICE = layers.CHOICE
_SUFFIX = ".tsv"
_MARK = "#FORMAT=WebAnno TSV "
_VERSIONS = ("3.2", "3.3")
_SPANS = "#T_SP="
_OTHER_LAYERS = ("#T_CH=", "#T_RL=")  # chains and relations
_TEXT = "#Text="
_FIRST_COLUMN = 3  # the first column of annotations
_NONE = "_"
_NO_VALUE = "*"
_UNIT = re.compile(r"([0-9]{1,9})-([0-9]{1,9})(\.[0-9]{1,9})?")
_PLACE = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")
_STACKED = re.compile(r"(?:[^\\|]|\\.)+", re.DOTALL)
_VALUE = re.compile(r"((?:[^\\]|\\.)*?)(?:\[([0-9]{1,9})\])?", re.DOTALL)
_ESCAPED_VALUE = re.compile(r"\\(->|.)", re.DOTALL)
_ESCAPED_TEXT = re.compile(r"\\([\\tnrfb\x00-\x07\x0e-\x1f])")
_UNSAFE_VALUE = re.compile(r"->|[\\\[\]|_;\t\n*]")
_UNSAFE_TEXT = re.compile(r"[\\\t\n\r\f\x08\x00-\x07\x0e-\x1f]")
# The letters of escaped control characters.
_LETTERS = {"\t": "t", "\n": "n", "\r": "r", "\f": "f", "\x08": "b"}
_CONTROLS = {letter: character for character, letter in _LETTERS.items()}

_Place = tuple[int, int]  # begin and end of a stretch, in characters
_MentionUnit = tuple[_Place, _Place]  # a token, and the part of it in a mention


class _Unit(NamedTuple):
    """A token, or a part of one.

    Attributes:
        line: The line, from 1.
        begin: Its first UTF-16 unit.
        end: The UTF-16 unit after its last one.
        form: Its text, with escapes.
        values: The columns of its annotations.
        is_token: Whether it is a whole token.
    """

    line: int
    begin: int
    end: int
    form: str
    values: Sequence[str]
    is_token: bool


@dataclass
class _File:
    """The content of a file.

    Attributes:
        id: The id of its document.
        path: The file.
        columns: The layer of each column, with the feature "" if it has no feature;
            None for columns of slots, chains and relations.
        text: The text.
        sentences: The places of the sentences, in UTF-16 units.
        units: The tokens and their parts.
    """

    id: str
    path: Path
    columns: list[Layer | None] = field(default_factory=list)
    text: str = ""
    sentences: list[tuple[int, int]] = field(default_factory=list)
    units: list[_Unit] = field(default_factory=list)


# ---- reading -------------------------------------------------------------------------


def accepts(path: Path) -> bool:
    """Return whether the first line names WebAnno TSV 3."""
    return read_first_line(path).startswith(f"{_MARK}3")


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return a document for each file; its id is the name of the file.

    These problems are collected: lines that are not tokens, and tokens that differ from
    the text at their offsets. Annotations without a label or without text, and those of
    other layers, are ignored and counted.
    """
    return _make_format().read(path, problems)


def stream(path: Path, problems: Problems) -> Iterator[ReadDocument]:
    """Yield the documents of `read` one by one."""
    return _make_format().stream(path, problems)


def _make_format() -> LayeredFormat:
    """Return the format, whose mentions are in one layer."""
    return LayeredFormat("WebAnno TSV", _is_corpus_file, _find_layers, _read_file)


def _is_corpus_file(path: Path) -> bool:
    # A damaged file must be refused, not passed over.
    """Return whether a file has the format, or its name says so."""
    return accepts(path) or remove_packed_suffix(path).suffix.lower() == _SUFFIX


def _find_layers(base: Path, path: Path) -> Iterator[DocumentLayers]:
    """Yield the layers of the document of a file."""
    file = _parse_file(base, path)
    used: set[Layer] = set()
    declared: set[Layer] = set()
    for number, layer in enumerate(file.columns):
        if layer is None or not layer.feature:
            continue
        declared.add(layer)
        if any(unit.values[number] != _NONE for unit in file.units):
            used.add(layer)
    yield DocumentLayers(used, declared)


def _read_file(
    base: Path, layer: Layer, path: Path, problems: Problems
) -> Iterator[ReadDocument]:
    """Yield the document of a file, with the mentions of a layer."""
    to_record = partial(_to_record, layer=layer, ignored=problems.ignored)
    items = [_parse_file(base, path)]
    return jsonl.parse_items(items, "document", to_record, path, problems)


def _to_record(
    file: _File, context: jsonl.MentionContext, layer: Layer, ignored: Counter[str]
) -> dict[str, Any]:
    """Return the content of a file as a record of JSONL."""
    units = Utf16Units(file.text)
    _require_forms(file, units)
    ignored["annotations of other layers"] += _count_other_layers(file, layer)
    spans = []
    annotations: list[tuple[str, int, int]] = []
    if layer in file.columns:
        annotations = _find_annotations(file, file.columns.index(layer))
    for label, begin, end in annotations:
        if not label:
            ignored["annotations without a label"] += 1
        elif begin == end:
            ignored["annotations without text"] += 1
        else:
            with context():
                place = (units.to_character(begin), units.to_character(end))
                spans.append(jsonl.make_mention(file.text, [place], label))
    tokens = [(unit.begin, unit.end) for unit in file.units if unit.is_token]
    return {
        "id": file.id,
        "text": file.text,
        "spans": spans,
        "sentences": _to_characters(file.sentences, units),
        "tokens": _to_characters(tokens, units),
    }


def _count_other_layers(file: _File, layer: Layer) -> int:
    """Count the annotations of other layers that could hold mentions."""
    number = 0
    counted = {layer.type}
    for index, column in enumerate(file.columns):
        if column is None or column.type in counted:
            continue
        counted.add(column.type)
        if layers.can_hold_mentions(column.type):
            number += len(_find_annotations(file, index))
    return number


def _require_forms(file: _File, units: Utf16Units) -> None:
    """Check that each unit has its form in the text.

    Raises:
        DataError: One has not; the offsets of a text with emoji may count characters.
    """
    for unit in file.units:
        begin = units.to_character(unit.begin)
        end = units.to_character(unit.end)
        # Programs differ in what they escape here.
        forms = {_unescape_text(unit.form), _unescape_value(unit.form), unit.form}
        if (
            begin is None
            or end is None
            or end - begin > len(unit.form)
            or file.text[begin:end] not in forms
        ):
            raise DataError.at(
                file.path,
                unit.line,
                f"the token at {unit.begin}-{unit.end} differs from the text: offsets "
                "must count UTF-16 units",
            )


def _to_characters(
    places: Iterable[tuple[int, int]], units: Utf16Units
) -> list[list[int | None]]:
    """Return places in characters, without empty ones."""
    return [
        [units.to_character(begin), units.to_character(end)]
        for begin, end in places
        if begin < end
    ]


def _find_annotations(file: _File, column: int) -> list[tuple[str, int, int]]:
    """Return the value, the begin and the end of each annotation in a column.

    The value is "" if there is none.
    """
    with_id: dict[str, list[Any]] = {}
    annotations: list[list[Any]] = []
    for unit in file.units:
        value = unit.values[column]
        if value == _NONE:
            continue
        for stacked in _STACKED.findall(value):
            label, id = _parse_value(stacked)
            if id and id in with_id:
                annotation = with_id[id]
                annotation[1] = min(annotation[1], unit.begin)
                annotation[2] = max(annotation[2], unit.end)
                continue
            annotation = [label, unit.begin, unit.end]
            annotations.append(annotation)
            if id:
                with_id[id] = annotation
    return [(label, begin, end) for label, begin, end in annotations]


def _parse_value(value: str) -> tuple[str, str]:
    """Return the unescaped value of an annotation and its id; "" for none."""
    match = _VALUE.fullmatch(value)
    if match is None:  # it ends in half of an escape
        return value, ""
    raw, id = match.groups()
    if raw == _NO_VALUE:
        return "", id or ""
    return _unescape_value(raw), id or ""


def _unescape_value(value: str) -> str:
    """Return the value of an annotation without escapes."""
    return _ESCAPED_VALUE.sub(_unescape, value)


def _unescape(match: re.Match[str]) -> str:
    """Return the character that an escape stands for."""
    return _CONTROLS.get(match[1], match[1])


# ---- parsing -------------------------------------------------------------------------


def _parse_file(base: Path, path: Path) -> _File:
    """Return the content of a file.

    Raises:
        DataError: It is not WebAnno TSV 3.2 or 3.3, or a line is wrong.
    """
    stem = remove_packed_suffix(path).relative_to(base)
    if stem.suffix.lower() == _SUFFIX:
        stem = stem.with_suffix("")
    file = _File(id_of_file(PurePosixPath(stem)), path)
    parser = _Parser(file)
    for number, line in read_lines(path):
        with locating_errors(path, number):
            parser.add(number, line)
    with locating_errors(path):
        parser.end_sentence()
    file.text = parser.join_text()
    return file


class _Parser:
    """Adds lines to the content of a file.

    Args:
        file: The content.
    """

    def __init__(self, file: _File) -> None:
        self._file = file
        self._pieces: list[str] = []  # of the text
        self._length = 0  # of the text, in UTF-16 units
        self._lines_of_sentence: list[str] = []
        self._sentence_begin: int | None = None

    def add(self, number: int, line: str) -> None:
        """Add a line.

        Raises:
            DataError: The line is not in its place, or is wrong.
        """
        if number == 1:
            _require_version(line)
        elif line.startswith((_SPANS, *_OTHER_LAYERS)) and not self._file.units:
            self._file.columns += _parse_columns(line)
        elif line.startswith(_TEXT):
            if self._sentence_begin is not None:
                raise DataError(
                    "a sentence begins before the empty line that ends the previous one"
                )
            self._lines_of_sentence.append(_unescape_text(line.removeprefix(_TEXT)))
        elif not line:
            self.end_sentence()
        elif not line.startswith("#"):
            self._add_unit(number, line)

    def end_sentence(self) -> None:
        """End the sentence, if there is one.

        Raises:
            DataError: It has no tokens, or the text is too long.
        """
        if not self._lines_of_sentence:
            return
        if self._sentence_begin is None:
            raise DataError("a sentence has no tokens: check that the file is complete")
        self._lines_of_sentence = []
        self._sentence_begin = None

    def join_text(self) -> str:
        """Return the text of all sentences."""
        return "".join(self._pieces)

    def _add_unit(self, number: int, line: str) -> None:
        """Add a token or a part of one, and begin its sentence if it is the first.

        Args:
            number: The number of its line.
            line: The line.
        """
        unit = self._parse_unit(number, line)
        if self._sentence_begin is None:
            self._begin_sentence(unit.begin)
        if unit.end > self._length:
            raise DataError(f"the token at {unit.begin}-{unit.end} is not in its text")
        if len(self._file.units) >= bounds.TOKENS + bounds.MENTIONS:
            raise DataError(
                f"more than {bounds.TOKENS + bounds.MENTIONS:,} tokens: split it into "
                "notes"
            )
        self._file.units.append(unit)

    def _parse_unit(self, number: int, line: str) -> _Unit:
        """Return the token, or the part of one, on a line.

        Args:
            number: The number of the line.
            line: The line.

        Raises:
            DataError: The line is not that of a token with all columns.
        """
        fields = line.split("\t")
        columns = len(self._file.columns)
        unit = _UNIT.fullmatch(fields[0])
        place = _PLACE.fullmatch(fields[1]) if len(fields) > 1 else None
        if not unit or not place or len(fields) < _FIRST_COLUMN + columns:
            raise DataError(
                f"expected the number, place and text of a token and {columns} columns "
                "of annotations, separated by tabs"
            )
        begin, end = int(place[1]), int(place[2])
        if begin > end:
            raise DataError(f"the token at {begin}-{end} ends before it begins")
        return _Unit(
            line=number,
            begin=begin,
            end=end,
            form=fields[2],
            values=fields[_FIRST_COLUMN : _FIRST_COLUMN + columns],
            is_token=not unit[3],
        )

    def _begin_sentence(self, begin: int) -> None:
        """Add the text of a sentence, after what lies before it.

        A sentence ends with a line feed unless the next one follows directly. Further
        characters before the next sentence are not in the file, and become spaces.
        """
        if not self._lines_of_sentence:
            raise DataError("a token comes before the text of its sentence")
        gap = begin - self._length
        if gap < 0 or begin > bounds.NOTE:
            raise DataError(
                f"the sentence at {begin} overlaps the one before it, or is far from it"
            )
        is_first = not self._pieces
        if gap:
            self._pieces.append(" " * gap if is_first else "\n" + " " * (gap - 1))
        text = "\n".join(self._lines_of_sentence)
        self._pieces.append(text)
        self._length = begin + count_units(text)
        if self._length > 2 * bounds.NOTE:
            raise DataError(
                f"the text has more than {bounds.NOTE:,} characters: split it"
            )
        self._sentence_begin = begin
        end = begin + count_units(text.rstrip())
        self._file.sentences.append((begin, end))


def _require_version(line: str) -> None:
    """Raise DataError unless the first line of a file names a version that is read."""
    version = line.removeprefix(_MARK)
    if not line.startswith(_MARK):
        raise DataError(f"expected {_MARK}{_VERSIONS[-1]} in the first line")
    if version.strip() not in _VERSIONS:
        raise DataError(
            "only versions 3.2 and 3.3 of WebAnno TSV are read: import the file into "
            "INCEpTION, and export it again"
        )


def _parse_columns(line: str) -> list[Layer | None]:
    """Return the columns that a line of the header declares."""
    kind, _, declaration = line.partition("=")
    type, *features = declaration.split("|")
    names = [feature for feature in features if feature] or [""]
    if f"{kind}=" != _SPANS:
        return [None] * len(names)
    columns: list[Layer | None] = []
    for name in names:
        # Slots refer to other annotations, and the name after a slot is their type.
        is_feature = not name.startswith("ROLE_") and "." not in name
        columns.append(Layer(type, name) if is_feature else None)
    return columns


def _unescape_text(text: str) -> str:
    """Return the text of a sentence or token without escapes."""
    return _ESCAPED_TEXT.sub(_unescape, text)


# ---- writing -------------------------------------------------------------------------


def write(documents: Iterable[Document], path: str | os.PathLike[str]) -> None:
    """Write a file per document into a folder.

    The mentions are in the layer that the user chooses, or are named entities. A
    mention of several pieces becomes one stretch, and one that begins or ends in white
    space loses that. The NUL character becomes U+FFFD.

    Raises:
        DataError: The path is a file.
    """
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise DataError(
            f"{folder} is a file, but WebAnno TSV needs a folder: give the folder that "
            "contains the files"
        )
    layer = layers.choose_layer_to_write(get_choice())
    for document in documents:
        name = f"{file_of_id(document.id)}{_SUFFIX}"
        write_out(folder / name, _to_tsv(document, layer))


def _to_tsv(document: Document, layer: Layer) -> str:
    """Return a document as WebAnno TSV."""
    require_short_mentions(document)
    units = Utf16Units(document.text)
    sentences = _lay_out_sentences(document)
    rows = _lay_out_mentions(document, [t for s in sentences for t in s.tokens])
    lines = [f"{_MARK}{_VERSIONS[-1]}", f"{_SPANS}{layer.type}|{layer.feature}", ""]
    for number, sentence in enumerate(sentences, 1):
        text = document.text[sentence.begin : sentence.end]
        lines += ["", *(f"{_TEXT}{_escape_text(line)}" for line in text.split("\n"))]
        for token_number, token in enumerate(sentence.tokens, 1):
            for part_number, (begin, end) in enumerate(rows[token]):
                suffix = f".{part_number}" if part_number else ""
                lines.append(
                    f"{number}-{token_number}{suffix}\t"
                    f"{units.to_unit(begin)}-{units.to_unit(end)}\t"
                    f"{_escape_text(document.text[begin:end])}\t"
                    f"{rows[token][begin, end] or _NONE}\t"
                )
    return "\n".join(lines) + "\n"


class _Sentence(NamedTuple):
    """A sentence to write: its text from `begin` to `end`, and its tokens."""

    begin: int
    end: int
    tokens: list[tuple[int, int]]


def _lay_out_sentences(document: Document) -> list[_Sentence]:
    """Return sentences that cover the text from the first token on.

    Each begins with a token and ends at the next one, or at the line feed before it.
    """
    tokens = [(begin, end) for begin, end in document.tokens]
    if not tokens:
        tokens = [(begin, end) for begin, end in tokenize(document.text).tolist()]
    starts = [start for start, _ in document.sentences or split_sentences(document)]
    groups: list[list[tuple[int, int]]] = []
    last_sentence = -1
    for token in tokens:
        sentence = bisect_right(starts, token[0])
        if sentence != last_sentence:
            groups.append([])
            last_sentence = sentence
        groups[-1].append(token)
    sentences = []
    for group, following in zip_longest(groups, groups[1:]):
        end = len(document.text)
        if following:
            end = following[0][0]
            if document.text[end - 1] == "\n" and group[-1][1] < end:
                end -= 1
        sentences.append(_Sentence(group[0][0], end, group))
    return sentences


def _lay_out_mentions(
    document: Document, tokens: Sequence[_Place]
) -> dict[_Place, dict[_Place, str]]:
    """Return the annotations of each token, and of the parts of it that have some.

    A mention has an id if it has several units, or shares one with another mention.

    Args:
        document: The document.
        tokens: Its tokens, sorted.

    Returns:
        For each token, the annotations of itself and of its parts, by their places, as
        the column shows them; "" if a token has none.
    """
    ends = [end for _, end in tokens]
    units_of_mentions: list[list[_MentionUnit]] = []
    mentions_of_unit: dict[_MentionUnit, list[int]] = defaultdict(list)
    for number, span in enumerate(document.spans):
        units = []
        for begin, end in tokens[bisect_right(ends, span.start) :]:
            if begin >= span.end:
                break
            place = (max(begin, span.start), min(end, span.end))
            units.append(((begin, end), place))
            mentions_of_unit[units[-1]].append(number)
        units_of_mentions.append(units)

    new_ids = count(1)
    values = []
    for span, units in zip(document.spans, units_of_mentions, strict=True):
        needs_id = len(units) > 1 or any(len(mentions_of_unit[u]) > 1 for u in units)
        id = f"[{next(new_ids)}]" if needs_id else ""
        values.append(f"{_escape_value(span.label)}{id}")

    rows: dict[_Place, dict[_Place, str]] = {}
    for token in tokens:
        rows[token] = {token: ""}
    for (token, place), numbers in sorted(mentions_of_unit.items()):
        rows[token][place] = "|".join(values[number] for number in numbers)
    return rows


def _escape_text(text: str) -> str:
    """Return the text of a sentence or token with escapes."""
    return _UNSAFE_TEXT.sub(_escape, text.replace("\0", "\ufffd"))


def _escape_value(value: str) -> str:
    """Return the value of an annotation with escapes."""
    return _UNSAFE_VALUE.sub(_escape, value.replace("\0", "\ufffd"))


def _escape(match: re.Match[str]) -> str:
    """Return the escape of a character."""
    return f"\\{_LETTERS.get(match[0], match[0])}"
