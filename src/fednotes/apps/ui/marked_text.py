"""Show the text of a note with its mentions."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from markupsafe import Markup, escape

from fednotes.core.cleaning import clean
from fednotes.core.types import Span

ANNOTATED = "g"
PREDICTED = "p"


class Stretch(NamedTuple):
    """A stretch of text within which no mention begins or ends.

    Attributes:
        start: Start of the stretch.
        end: End of the stretch, exclusive.
        mentions: The mentions that cover it, each with "g" if it is annotated or "p" if
            it is predicted.
    """

    start: int
    end: int
    mentions: list[tuple[str, Span]]


def cut_at_mentions(
    gold: Sequence[Span], predicted: Sequence[Span], low: int, high: int
) -> list[Stretch]:
    """Split a text where mentions begin and end.

    Args:
        gold: The annotated mentions.
        predicted: The predicted mentions.
        low: Start of the range.
        high: End of the range, exclusive.
    """
    mentions = [(ANNOTATED, span) for span in gold]
    mentions += [(PREDICTED, span) for span in predicted]
    mentions = [
        (side, span) for side, span in mentions if span.end > low and span.start < high
    ]

    cuts = {low, high}
    for _, span in mentions:
        for start, end in span.pieces:
            cuts.update((start, end))
    edges = sorted(cut for cut in cuts if low <= cut <= high)
    stretches = [Stretch(start, end, []) for start, end in pairwise(edges)]

    for side, span in mentions:
        for start, end in span.pieces:
            first = bisect_left(edges, start)
            last = bisect_left(edges, end)
            for stretch in stretches[first:last]:
                stretch.mentions.append((side, span))
    return stretches


def to_html(text: str) -> Markup:
    """Return a note's text as HTML, with control and invisible characters spelt out."""
    parts = re.split("([\n\t\xa0]+)", text.replace("\r\n", "\n"))
    for index in range(0, len(parts), 2):
        # The other parts are white space.
        parts[index] = clean(parts[index], None)
    return escape("".join(parts))
