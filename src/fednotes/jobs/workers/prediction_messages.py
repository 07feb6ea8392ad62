"""What workers that predict notes are asked, and how notes and spans travel to them.

A reply to a command is its result (`events.py`). Confidences and features travel as the
shortest decimal numbers that stand for them, so no bit changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fednotes.core.types import Document, Span

LOAD = "@load"  # load a saved model
PREDICT = "@predict"  # predict the notes of a window
COMPUTE_FEATURES = "@features"  # compute the features of a window's notes of patients


def encode_notes(documents: Iterable[Document]) -> list[list[Any]]:
    """Return what a model reads of documents as JSON values."""
    return [[document.id, document.text, document.sentences] for document in documents]


def decode_notes(values: Iterable[Sequence[Any]]) -> list[Document]:
    """Return the documents that `encode_notes` encoded."""
    return [
        Document(id, text, sentences=tuple((start, end) for start, end in sentences))
        for id, text, sentences in values
    ]


def encode_spans(documents: Iterable[Document]) -> list[list[list[Any]]]:
    """Return the spans of each document as JSON values."""
    return [
        [
            [span.start, span.end, span.label, span.fragments, span.confidence]
            for span in document.spans
        ]
        for document in documents
    ]


def decode_spans(values: Iterable[Sequence[Any]]) -> tuple[Span, ...]:
    """Return the spans of one document that `encode_spans` encoded."""
    return tuple(
        Span(
            start,
            end,
            label,
            tuple((first, last) for first, last in fragments),
            confidence,
        )
        for start, end, label, fragments, confidence in values
    )
