"""Comparison of documents with their counterparts read back from a format."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Any

from fednotes.core.parsing import as_mapping
from fednotes.core.types import Document, Span

_DERIVED_ID = re.compile(r":[0-9]+$")  # an id made from a file name and a number
_LAYOUT_KEYS = {"scheme", "separator", "marker"}
_PARTS = ("patient", "codes", "sentences", "tokens")


def count_differences(
    before: Sequence[Document], after: Sequence[Document]
) -> Counter[str]:
    """Count the differences between documents and their counterparts, by kind.

    Documents with the same id are compared. If equally many remain on both sides, they
    are compared in order. Additions are not differences.

    Args:
        before: The documents.
        after: The same documents after writing and reading.
    """
    counts: Counter[str] = Counter()
    counterparts = _find_counterparts(before, after)
    for document in before:
        counterpart = counterparts.get(document.id)
        if counterpart is None:
            counts["documents"] += 1
        else:
            counts += _count_document_differences(document, counterpart)
    return +counts


def _find_counterparts(
    before: Sequence[Document], after: Sequence[Document]
) -> dict[str, Document]:
    """Return the counterpart of each document, by the document's id."""
    counterparts = {document.id: document for document in after}
    ids = {document.id for document in before}
    unpaired = [document for document in before if document.id not in counterparts]
    others = [document for document in after if document.id not in ids]
    if len(unpaired) == len(others):
        for document, other in zip(unpaired, others, strict=True):
            counterparts[document.id] = other
    return counterparts


def _count_document_differences(before: Document, after: Document) -> Counter[str]:
    """Count the differences between a document and its counterpart, by kind."""
    counts: Counter[str] = Counter()
    has_derived_ids = _DERIVED_ID.search(before.id) and _DERIVED_ID.search(after.id)
    if before.id != after.id and not has_derived_ids:
        counts["ids"] += 1
    if before.text != after.text:
        is_same = _remove_spaces(before.text) == _remove_spaces(after.text)
        counts["spacing" if is_same else "texts"] += 1
    for part in _PARTS:
        value = getattr(before, part)
        if value not in (None, ()) and value != getattr(after, part):
            counts[part] += 1
    meta_before = _remove_layout(before)
    meta_after = _remove_layout(after)
    for name, value in meta_before.items():
        if meta_after.get(name) != value:
            counts[f"meta {name}"] += 1
    return counts + _count_lost_mentions(before, after)


def _remove_spaces(text: str) -> str:
    """Return a text without white space."""
    return "".join(text.split())


def _remove_layout(document: Document) -> dict[str, Any]:
    """Return a document's meta without parts that only describe a file's layout."""
    meta = dict(document.meta)
    if set(as_mapping(meta.get("conll"))) <= _LAYOUT_KEYS:
        meta.pop("conll", None)
    brat_lines = meta.get("brat") or ()
    if isinstance(brat_lines, list | tuple) and all(
        str(line)[:1] in ("T", "") for line in brat_lines
    ):
        meta.pop("brat", None)
    return meta


def _count_lost_mentions(before: Document, after: Document) -> Counter[str]:
    """Count the mentions that a document no longer has, by kind.

    If white space was added or removed, offsets count visible characters.
    """
    if len(after.text) == len(before.text):
        old = Counter(before.spans)
        new = Counter(after.spans)
    else:
        old = Counter(_move_to_visible_offsets(before))
        new = Counter(_move_to_visible_offsets(after))
    counts: Counter[str] = Counter()
    overlaps_another = _make_overlap_test(old)
    relabelled = {(s.start, s.end, s.fragments) for s in new - old}
    for span, number in (old - new).items():
        if (span.start, span.end, span.fragments) in relabelled:
            kind = "labels"
        elif new[span]:
            kind = "repeated mentions"
        elif span.fragments:
            kind = "mentions in pieces"
        elif overlaps_another(span):
            kind = "overlapping mentions"
        else:
            kind = "bounds of mentions"
        counts[kind] += number
    confidences = _count_confidences(before) - _count_confidences(after)
    counts["confidences"] += sum(
        number for (span, _), number in confidences.items() if new[span]
    )
    return counts


def _make_overlap_test(spans: Collection[Span]) -> Callable[[Span], bool]:
    """Return a function that says whether a mention overlaps another one.

    Args:
        spans: The distinct mentions of a document.
    """
    starts = sorted(span.start for span in spans)
    ends = sorted(span.end for span in spans)

    def overlaps_another(span: Span) -> bool:
        """Return whether `span`, which is one of the mentions, overlaps another one."""
        # Mentions that begin before its end overlap it, except for those that end
        # before its start.
        num_begun = bisect_left(starts, span.end)
        num_ended = bisect_right(ends, span.start)
        return num_begun - num_ended > 1  # one of them is this mention

    return overlaps_another


def _count_confidences(document: Document) -> Counter[tuple[Span, float]]:
    """Count the mentions with a confidence, each with its rounded confidence."""
    return Counter(
        (span, round(span.confidence, 6))
        for span in document.spans
        if span.confidence is not None
    )


def _move_to_visible_offsets(document: Document) -> list[Span]:
    """Return the mentions with offsets that count visible characters only."""
    visible_before = [0, *accumulate(not c.isspace() for c in document.text)]
    return [
        Span(
            visible_before[span.start],
            visible_before[span.end],
            span.label,
            tuple((visible_before[a], visible_before[b]) for a, b in span.fragments),
        )
        for span in document.spans
    ]
