"""ADE Corpus V2 (Gurulingappa et al. 2012).

    PMID|sentence|effect|start|end|drug|start|end      DRUG-AE.rel
    PMID|sentence|dose|start|end|drug|start|end        DRUG-DOSE.rel
    PMID NEG sentence                                  ADE-NEG.txt

Offsets refer to the whole abstract, which the corpus does not include. Mentions are
therefore located by their text. If a text occurs several times, the sentence's position
in the abstract decides: the position at which the offsets of most rows match their
texts. All rows of a sentence become one document with the union of their mentions.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from fednotes.core.types import Document, Span
from fednotes.data.formats.files import read_first_line, read_nonblank_lines
from fednotes.data.formats.folders import find_corpus_files
from fednotes.data.formats.gathering import (
    DERIVED_ID,
    ReadDocument,
    rename_repeated_ids,
)
from fednotes.data.formats.problems import Problems

_NEGATIVE = re.compile(r"(\d+) NEG (.*\S)")
_PMID = re.compile(r"\d+")
_OFFSET = re.compile("[0-9]{1,9}")
_EXPECTED = "expected PMID|sentence|text|start|end|drug|start|end or PMID NEG sentence"
# The share of rows whose mentions may be missing: some rows of the corpus are damaged.
_MAX_UNPLACED = 0.05
_MAX_MENTION = 1000  # maximum length of a text that is searched for in its sentence
_MAX_OCCURRENCES = 1000  # maximum number of a text's occurrences in a sentence

_Place = tuple[int, int]


class _Row(NamedTuple):
    """A relation; start offsets refer to the abstract.

    Attributes:
        path: The file.
        line: The line.
        label: "ADE" or "Dosage".
        other: The text of the effect or the dose.
        other_start: The start offset of that text.
        drug: The text of the drug.
        drug_start: The start offset of the drug.
    """

    path: Path
    line: int
    label: str
    other: str
    other_start: int
    drug: str
    drug_start: int


def accepts(path: Path) -> bool:
    """Return whether the first line is a relation or a negative sentence."""
    line = read_first_line(path).rstrip()
    return _NEGATIVE.fullmatch(line) is not None or _split_relation(line) is not None


def _split_relation(line: str) -> list[str] | None:
    """Return PMID, sentence, text, start, end, drug, start and end of a line.

    None for any other line. Only the sentence may contain a bar, so the line is split
    from the right, in linear time.
    """
    head, *cells = line.rsplit("|", 6)
    pmid, _, sentence = head.partition("|")
    if len(cells) != 6 or not _PMID.fullmatch(pmid):
        return None
    other, start, end, drug, drug_start, drug_end = cells
    if not all(text.strip() for text in (sentence, other, drug)):
        return None
    offsets = (start, end, drug_start, drug_end)
    if not all(_OFFSET.fullmatch(offset) for offset in offsets):
        return None
    return [pmid, sentence, *cells]


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """Return a document per distinct sentence of an article, over all files.

    Labels are Drug, ADE and Dosage. A document's meta contains

        "pmid", for splitting;
        "part": "relations" for a sentence of the relation files, "negative" for one
        that is only in ADE-NEG.txt;
        "relations": rows (label, start, end, drug's start, drug's end);
        "unplaced": the number of rows with a text that is not in the sentence.

    Damaged lines are added to `problems`, and also each row with a text that is not in
    its sentence if these are more than 1 row in 20.
    """
    sentences: dict[tuple[str, str], list[_Row]] = {}
    for file in find_corpus_files(path, accepts, "the ADE corpus"):
        with problems.collecting("file", file):
            for pmid, text, row in _read_rows(file, problems):
                rows = sentences.setdefault((pmid, text), [])
                if row is not None:
                    rows.append(row)
    numbers: Counter[str] = Counter()
    documents: list[ReadDocument] = []
    unplaced: list[_Row] = []
    for (pmid, text), rows in sentences.items():
        numbers[pmid] += 1
        id = f"{pmid}:{numbers[pmid]}"
        document, missing = _to_document(pmid, text, rows, id)
        documents.append(ReadDocument(document, path, DERIVED_ID))
        unplaced += missing
    total = sum(len(rows) for rows in sentences.values())
    if len(unplaced) > _MAX_UNPLACED * total:
        message = f"a mention is not in its sentence ({len(unplaced)} of {total} rows)"
        for row in unplaced:
            problems.note("mention", row.path, row.line, message)
    return rename_repeated_ids(documents, problems)


def _read_rows(
    path: Path, problems: Problems
) -> Iterator[tuple[str, str, _Row | None]]:
    """Yield PMID, sentence and relation of each line; None for a negative one."""
    label = "Dosage" if "DOSE" in path.name.upper() else "ADE"
    for number, line in read_nonblank_lines(path):
        negative = _NEGATIVE.fullmatch(line.rstrip())
        if negative:
            yield negative.group(1), negative.group(2).strip(), None
            continue
        cells = _split_relation(line.rstrip())
        if cells is None:
            problems.note("line", path, number, _EXPECTED)
            continue
        pmid, text, other, start, _, drug, drug_start, _ = cells
        row = _Row(
            path=path,
            line=number,
            label=label,
            other=other.strip(),
            other_start=int(start),
            drug=drug.strip(),
            drug_start=int(drug_start),
        )
        yield pmid, text.strip(), row


def _to_document(
    pmid: str, text: str, rows: Sequence[_Row], id: str
) -> tuple[Document, list[_Row]]:
    """Return the document of a sentence, and the rows with a text not in it."""
    places = [
        (_find_occurrences(text, row.other), _find_occurrences(text, row.drug))
        for row in rows
    ]
    origin = _guess_origin(rows, places)
    spans: set[Span] = set()
    relations: dict[tuple[str, int, int, int, int], None] = {}
    unplaced = []
    for row, (others, drugs) in zip(rows, places, strict=True):
        if not others or not drugs:
            unplaced.append(row)
            continue
        other, drug = min(
            ((other, _choose_nearest(other, drugs, row)) for other in others),
            key=lambda pair: _measure_misfit(pair, row, origin),
        )
        spans.add(Span(*other, row.label))
        spans.add(Span(*drug, "Drug"))
        relations[row.label, *other, *drug] = None
    meta: dict[str, object] = {
        "pmid": pmid,
        "part": "relations" if rows else "negative",
    }
    if relations:
        meta["relations"] = tuple(relations)
    if unplaced:
        meta["unplaced"] = len(unplaced)
    return Document(id, text, tuple(sorted(spans)), meta=meta), unplaced


def _guess_origin(
    rows: Sequence[_Row], places: Sequence[tuple[list[_Place], list[_Place]]]
) -> int | None:
    """Return the start of the sentence in its abstract, by the offsets of most rows.

    None if no row's offsets match.
    """
    votes: Counter[int] = Counter()
    for row, (others, drugs) in zip(rows, places, strict=True):
        by_other = {row.other_start - start for start, _ in others}
        by_drug = {row.drug_start - start for start, _ in drugs}
        votes.update(by_other & by_drug)
    return min(votes, key=lambda origin: (-votes[origin], origin)) if votes else None


def _find_occurrences(text: str, form: str) -> list[_Place]:
    """Return the occurrences of a mention's text in a sentence.

    Case and the width of spaces are ignored only if necessary, and occurrences inside a
    word are used only if there are no others.
    """
    if len(form) > _MAX_MENTION:
        return []
    loose = r"\s+".join(map(re.escape, form.split()))
    for pattern, flags in ((re.escape(form), 0), (loose, re.IGNORECASE)):
        if not pattern:
            continue
        # A lookahead also finds overlapping occurrences.
        matches = re.finditer(f"(?=({pattern}))", text, flags)
        places = [match.span(1) for match in islice(matches, _MAX_OCCURRENCES)]
        if places:
            words = [place for place in places if not _is_inside_word(text, *place)]
            return words or places
    return []


def _is_inside_word(text: str, start: int, end: int) -> bool:
    """Return whether a stretch of text is continued by a letter or digit."""
    continues_left = text[start].isalnum() and text[start - 1 : start].isalnum()
    continues_right = text[end - 1].isalnum() and text[end : end + 1].isalnum()
    return continues_left or continues_right


def _choose_nearest(other: _Place, drugs: Sequence[_Place], row: _Row) -> _Place:
    """Return the place of a drug whose distance from another text fits a row best.

    Args:
        other: The place of the effect or the dose.
        drugs: The places of the drug in the sentence, sorted.
        row: The row.
    """
    wanted = other[0] + row.drug_start - row.other_start
    number = bisect_left(drugs, wanted, key=lambda place: place[0])
    nearby = drugs[max(0, number - 1) : number + 1]
    return min(nearby, key=lambda place: abs(place[0] - wanted))


def _measure_misfit(
    pair: tuple[_Place, _Place], row: _Row, origin: int | None
) -> tuple[int, int, int]:
    """Return how far two places deviate from a row's offsets; smaller is better.

    The distance between the two counts first, then their position in the abstract, then
    their position in the sentence.

    Args:
        pair: The places of the effect or dose, and of the drug.
        row: The row.
        origin: The start of the sentence in its abstract; None if unknown.
    """
    (other, _), (drug, _) = pair
    distance = abs((drug - other) - (row.drug_start - row.other_start))
    shift = 0 if origin is None else abs(other + origin - row.other_start)
    return distance, shift, other
