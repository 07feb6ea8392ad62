"""ADE Corpus V2 (Gurulingappa et al. 2012): `DRUG-AE.rel`, `DRUG-DOSE.rel`, `ADE-NEG.txt`.

    PMID|sentence|effect|start|end|drug|start|end      DRUG-AE.rel
    PMID|sentence|dose|start|end|drug|start|end        DRUG-DOSE.rel
    PMID NEG sentence                                  ADE-NEG.txt

Offsets relate to the whole abstract, which the corpus does not give. So mentions are found
by their text, and where a text occurs more than once, by the sentence's place in the
abstract: the one place from which most rows' offsets point at their texts.
All rows of one sentence make one document with the union of their mentions.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Literal

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats.files import head, listing, read_text
from fednotes.data.formats.problems import DERIVED, Found, Problems, unique

_NEGATIVE = re.compile(r"(\d+) NEG (.*\S)")
_PLACE = r"([^|]*[^|\s][^|]*)\|([0-9]{1,9})\|([0-9]{1,9})"  # text, start, end
_RELATION = re.compile(rf"(\d+)\|(.*\S.*)\|{_PLACE}\|{_PLACE}")
_MAX_UNPLACED = 0.05  # of a file's rows; a few rows of real corpora are damaged

Label = Literal["Drug", "ADE", "Dosage"]


@dataclass(frozen=True)
class _Row:
    """One relation: `other` is the effect or the dose. Starts count from the abstract's start."""

    line: int
    label: Label
    other: str
    other_start: int
    drug: str
    drug_start: int


@dataclass
class _Sentence:
    pmid: str
    text: str
    rows: list[tuple[Path, _Row]] = field(default_factory=list)


def accepts(path: Path) -> bool:
    """Whether the first line is a relation or a negative sentence."""
    lines = head(path)
    return bool(lines) and any(p.fullmatch(lines[0].rstrip()) for p in (_NEGATIVE, _RELATION))


def read(path: Path, problems: Problems) -> tuple[Document, ...]:
    """One document per distinct sentence of an article, over all files of the folder.

    Labels: Drug, ADE, Dosage. `meta`: "pmid", to split by; "relations", rows (label, start,
    end, drug's start, drug's end); "unplaced", how many rows name a text that is not in the
    sentence. Noted, with the line, is a broken line; and where more than 1 row in 20 cannot
    be placed, each of them.
    """
    sentences: dict[tuple[str, str], _Sentence] = {}
    for file in listing(path, accepts, "the ADE corpus"):
        with problems.passing("file"):
            for pmid, text, row in _rows(file, problems):
                sentence = sentences.setdefault((pmid, text), _Sentence(pmid, text))
                if row is not None:
                    sentence.rows.append((file, row))
    numbers: Counter[str] = Counter()
    documents, unplaced, rows = [], [], 0
    for sentence in sentences.values():
        numbers[sentence.pmid] += 1
        document, missing = _document(sentence, f"{sentence.pmid}:{numbers[sentence.pmid]}")
        documents.append(Found(document, path, DERIVED))
        unplaced += missing
        rows += len(sentence.rows)
    if len(unplaced) > _MAX_UNPLACED * rows:
        message = f"a mention is not in its sentence ({len(unplaced)} of {rows} rows)"
        for place in unplaced:
            problems.add(DataError.at(*place, message), "mention")
    return unique(documents, problems)


def _rows(path: Path, problems: Problems) -> Iterator[tuple[str, str, _Row | None]]:
    """PMID, sentence and relation of each line."""
    label: Label = "Dosage" if "DOSE" in path.name.upper() else "ADE"
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        if negative := _NEGATIVE.fullmatch(line.rstrip()):
            yield negative.group(1), negative.group(2).strip(), None
            continue
        match = _RELATION.fullmatch(line.rstrip())
        if match is None:
            message = "expected PMID|sentence|text|start|end|drug|start|end or PMID NEG sentence"
            problems.add(DataError.at(path, number, message), "line")
            continue
        pmid, text, other, start, _, drug, drug_start, _ = match.groups()
        row = _Row(number, label, other.strip(), int(start), drug.strip(), int(drug_start))
        yield pmid, text.strip(), row


def _document(sentence: _Sentence, name: str) -> tuple[Document, list[tuple[Path, int]]]:
    """The sentence's document, and where the rows stand that could not be placed."""
    text = sentence.text
    found = [(_occurrences(text, r.other), _occurrences(text, r.drug)) for _, r in sentence.rows]
    origins: Counter[int] = Counter()
    for (others, drugs), (_, row) in zip(found, sentence.rows, strict=True):
        origins.update(
            {row.other_start - s for s, _ in others} & {row.drug_start - s for s, _ in drugs}
        )
    origin = min(origins, key=lambda o: (-origins[o], o)) if origins else None
    spans: dict[Span, None] = {}
    relations: dict[tuple[str, int, int, int, int], None] = {}
    unplaced = []
    for (others, drugs), (path, row) in zip(found, sentence.rows, strict=True):
        if not others or not drugs:
            unplaced.append((path, row.line))
            continue
        (start, end), (drug_start, drug_end) = min(
            product(others, drugs), key=lambda pair: _misfit(pair[0][0], pair[1][0], row, origin)
        )
        spans[Span(start, end, row.label)] = None
        spans[Span(drug_start, drug_end, "Drug")] = None
        relations[row.label, start, end, drug_start, drug_end] = None
    meta: dict[str, object] = {"pmid": sentence.pmid}
    if relations:
        meta["relations"] = tuple(relations)
    if unplaced:
        meta["unplaced"] = len(unplaced)
    return Document(name, text, tuple(sorted(spans)), meta=meta), unplaced


def _occurrences(text: str, form: str) -> list[tuple[int, int]]:
    """Where a mention's text stands in a sentence; case and width of spaces only if they must."""
    loose = r"\s+".join(map(re.escape, form.split()))
    for pattern, flags in ((re.escape(form), 0), (loose, re.IGNORECASE)):
        # Looking ahead finds occurrences that overlap, too.
        found = [m.span(1) for m in re.finditer(f"(?=({pattern}))", text, flags)] if pattern else []
        if found:
            return _whole_words(text, found)
    return []


def _whole_words(text: str, found: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The occurrences that do not start or end inside a word, if there are any."""
    whole = [
        (start, end)
        for start, end in found
        if not (text[start].isalnum() and text[start - 1 : start].isalnum())
        and not (text[end - 1].isalnum() and text[end : end + 1].isalnum())
    ]
    return whole or found


def _misfit(other: int, drug: int, row: _Row, origin: int | None) -> tuple[int, int, int]:
    """How badly two places fit a row's offsets: by distance, then by place, then leftmost."""
    distance = abs((drug - other) - (row.drug_start - row.other_start))
    place = 0 if origin is None else abs(other + origin - row.other_start)
    return distance, place, other
