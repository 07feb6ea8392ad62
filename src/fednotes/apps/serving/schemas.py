"""The bodies of requests and responses of `fednotes serve`, as its OpenAPI schema."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from fednotes.core.types import Document, Span

T = TypeVar("T")

Threshold = Annotated[
    float,
    Field(ge=0, le=1, description="Leave out mentions with a lower confidence."),
]
TableFormat = Literal["csv", "tsv", "jsonl", "parquet"]


class Question(BaseModel, extra="forbid", strict=True):
    """One text or several texts in which to find mentions."""

    text: str | None = Field(None, description="One text; use `texts` for several.")
    texts: list[str] | None = None
    threshold: Threshold = 0.0
    offsets: Literal["characters", "utf16"] = Field(
        "characters",
        description="characters: Unicode code points, as Python counts; utf16: code "
        "units, as JavaScript, Java and C# count.",
    )

    def select_mentions(self, document: Document) -> Mentions:
        """Return a document's mentions that reach the requested threshold.

        Their offsets are in the requested units.
        """
        spans = keep_confident_spans(document.spans, self.threshold)
        if self.offsets == "utf16":
            spans = _convert_to_utf16_offsets(document.text, spans)
        return Mentions(spans=spans)


class Mentions(BaseModel):
    """The mentions in one text, with the kind of offsets that was requested.

    `GET /model` describes what the confidences mean.
    """

    spans: list[Span]


class Results(BaseModel, Generic[T]):
    """One result for each text or patient, in the order of the request."""

    results: list[T]


class PatientNotes(BaseModel, extra="forbid", strict=True):
    """The notes of each patient, by patient name."""

    patients: dict[str, list[str]]


class About(BaseModel):
    """A description of the model that answers."""

    types: list[str]
    confidence: str
    version: str


class Refusal(BaseModel):
    """Why a request was refused, and how to fix it. Never quotes the text."""

    detail: str


def keep_confident_spans(spans: Iterable[Span], threshold: float) -> list[Span]:
    """Return the spans without a confidence, or with at least the threshold's."""
    return [
        span
        for span in spans
        if span.confidence is None or span.confidence >= threshold
    ]


def _convert_to_utf16_offsets(text: str, spans: Sequence[Span]) -> list[Span]:
    """Return spans with offsets in UTF-16 code units instead of code points."""
    # These characters take two code units.
    wide = [index for index, character in enumerate(text) if character > "\uffff"]

    def convert(offset: int) -> int:
        """Return an offset in code units."""
        return offset + bisect_left(wide, offset)

    return [
        replace(
            span,
            start=convert(span.start),
            end=convert(span.end),
            fragments=tuple(
                (convert(start), convert(end)) for start, end in span.fragments
            ),
        )
        for span in spans
    ]
