"""ADE Corpus V2 (Gurulingappa et al. 2012): `DRUG-AE.rel`, `DRUG-DOSE.rel`,
`ADE-NEG.txt`.

    PMID|sentence|effect|start|end|drug|start|end      DRUG-AE.rel
    PMID|sentence|dose|start|end|drug|start|end        DRUG-DOSE.rel
    PMID NEG sentence                                  ADE-NEG.txt

Offsets relate to the whole abstract, which the corpus does not give. So mentions are
found by their text, and where a text occurs more than once, by the sentence's place in
the
abstract: the one place from which most rows' offsets point at their texts.
All rows of one sentence make one document with the union of their mentions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
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
_PMID, _OFFSET = re.compile(r"\d+"), re.compile("[0-9]{1,9}")
_MAX_UNPLACED = 0.05  # of a file's rows; a few rows of real corpora are damaged


class _Row(NamedTuple):
    """One relation: `other` is the effect or the dose.

    Starts count from the abstract's start.
    """

    path: Path
    line: int
    label: str
    other: str
    other_start: int
    drug: str
    drug_start: int


def accepts(path: Path) -> bool:
    """Whether the first line is a relation or a negative sentence."""
    line = read_first_line(path).rstrip()
    return _NEGATIVE.fullmatch(line) is not None or _relation(line) is not None


def _relation(line: str) -> list[str] | None:
    """Return PMID, sentence, text, start, end, drug, start and end of a line; None of
    another.

    The sentence alone may hold a bar. Cut from the right, as here, a line of any length
    takes time linear in it.
    """
    head, *cells = line.rsplit("|", 6)
    pmid, _, sentence = head.partition("|")
    is_relation = (
        len(cells) == 6
        and _PMID.fullmatch(pmid)
        and all(part.strip() for part in (sentence, cells[0], cells[3]))
        and all(_OFFSET.fullmatch(cells[at]) for at in (1, 2, 4, 5))
    )
    return [pmid, sentence, *cells] if is_relation else None


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """One document per distinct sentence of an article, over all files of the folder.

    Labels: Drug, ADE, Dosage. `meta`: "pmid", to split by; "part", "relations" for a
    sentence of the relation files and "negative" for one of ADE-NEG.txt alone;
    "relations", rows (label, start, end, drug's start, drug's end); "unplaced", how
    many rows name a text that is not in the sentence. Noted, with the line, is a broken
    line; and where more than 1 row in 20 cannot be placed, each of them.
    """
    sentences: dict[tuple[str, str], list[_Row]] = {}
    for file in find_corpus_files(path, accepts, "the ADE corpus"):
        with problems.collect("file", file):
            for pmid, text, row in _rows(file, problems):
                sentences.setdefault((pmid, text), []).extend([row] if row else [])
    numbers: Counter[str] = Counter()
    documents: list[ReadDocument] = []
    unplaced: list[_Row] = []
    for (pmid, text), rows in sentences.items():
        numbers[pmid] += 1
        document, missing = _document(pmid, text, rows, f"{pmid}:{numbers[pmid]}")
        documents.append(ReadDocument(document, path, DERIVED_ID))
        unplaced += missing
    total = sum(map(len, sentences.values()))
    if len(unplaced) > _MAX_UNPLACED * total:
        message = f"a mention is not in its sentence ({len(unplaced)} of {total} rows)"
        for row in unplaced:
            problems.note("mention", row.path, row.line, message)
    return rename_repeated_ids(documents, problems)


def _rows(path: Path, problems: Problems) -> Iterator[tuple[str, str, _Row | None]]:
    """PMID, sentence and relation of each line."""
    label = "Dosage" if "DOSE" in path.name.upper() else "ADE"
    for number, line in read_nonblank_lines(path):
        if negative := _NEGATIVE.fullmatch(line.rstrip()):
            yield negative.group(1), negative.group(2).strip(), None
        elif parts := _relation(line.rstrip()):
            pmid, text, other, start, _, drug, drug_start, _ = parts
            names = other.strip(), int(start), drug.strip(), int(drug_start)
            yield pmid, text.strip(), _Row(path, number, label, *names)
        else:
            message = "expected PMID|sentence|text|start|end|drug|start|end or PMID NEG sentence"
            problems.note("line", path, number, message)


def _document(
    pmid: str, text: str, rows: Sequence[_Row], name: str
) -> tuple[Document, list[_Row]]:
    """The sentence's document, and the rows that could not be placed."""
    places = [
        (_occurrences(text, row.other), _occurrences(text, row.drug)) for row in rows
    ]
    origins: Counter[int] = Counter()
    for (others, drugs), row in zip(places, rows, strict=True):
        origins.update(
            {row.other_start - s for s, _ in others}
            & {row.drug_start - s for s, _ in drugs}
        )
    origin = min(origins, key=lambda o: (-origins[o], o)) if origins else None
    spans: set[Span] = set()
    relations: dict[tuple[str, int, int, int, int], None] = {}
    unplaced = []
    for (others, drugs), row in zip(places, rows, strict=True):
        if not others or not drugs:
            unplaced.append(row)
            continue
        (start, end), (drug_start, drug_end) = min(
            product(others, drugs),
            key=lambda pair: _misfit(pair[0][0], pair[1][0], row, origin),
        )
        spans |= {Span(start, end, row.label), Span(drug_start, drug_end, "Drug")}
        relations[row.label, start, end, drug_start, drug_end] = None
    meta: dict[str, object] = {
        "pmid": pmid,
        "part": "relations" if rows else "negative",
    }
    if relations:
        meta["relations"] = tuple(relations)
    if unplaced:
        meta["unplaced"] = len(unplaced)
    return Document(name, text, tuple(sorted(spans)), meta=meta), unplaced


def _occurrences(text: str, form: str) -> list[tuple[int, int]]:
    """Where a mention's text stands in a sentence; case and width of spaces only if
    they must, inside a word only if nowhere else."""
    loose = r"\s+".join(map(re.escape, form.split()))
    for pattern, flags in ((re.escape(form), 0), (loose, re.IGNORECASE)):
        # Looking ahead finds occurrences that overlap, too.
        found = (
            [m.span(1) for m in re.finditer(f"(?=({pattern}))", text, flags)]
            if pattern
            else []
        )
        whole = [
            (start, end)
            for start, end in found
            if not (text[start].isalnum() and text[start - 1 : start].isalnum())
            and not (text[end - 1].isalnum() and text[end : end + 1].isalnum())
        ]
        if found:
            return whole or found
    return []


def _misfit(
    other: int, drug: int, row: _Row, origin: int | None
) -> tuple[int, int, int]:
    """How badly two places fit a row's offsets: by distance, then by place, then
    leftmost."""
    distance = abs((drug - other) - (row.drug_start - row.other_start))
    place = 0 if origin is None else abs(other + origin - row.other_start)
    return distance, place, other
