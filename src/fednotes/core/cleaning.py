"""Text that somebody else wrote, as it may stand on a screen, in a log or in a report.

A name, a version, a label or a reason of another party may hold what moves the cursor,
ends the line, turns its direction round or is not seen at all. Here is the one place
that makes it plain.
"""

from __future__ import annotations

import re

NAME, LINE = 80, 2000  # characters of a name in a line, and of a line at most
# Without a shape, though printable: some letters, tags, further variation selectors.
_UNSEEN = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\U000e0000-\U0010ffff]"
)
_PICTURE = "[\u2190-\u2bff\ufe0f\U0001f000-\U0001faff]"
# of one emoji out of several
_JOINER = re.compile(f"(?<={_PICTURE})\u200d(?={_PICTURE})")


def clean(text: object, most: int | None = LINE) -> str:
    """Text on one line, of characters that are seen, each in its place.

    Controls, line ends, marks of direction, characters without width or shape and
    blanks other than the plain one are escaped as in Python (`\\x1b`, `\\u202e`); what
    is longer than `most` characters (None: no bound) ends with "…".
    """
    whole = str(text)
    whole = whole if most is None else whole[: most + 1]
    seen = whole.isprintable() and not _UNSEEN.search(whole)
    shown = whole if seen else _escaped(whole)
    return shown if most is None or len(shown) <= most else f"{shown[: most - 1]}…"


def one_line(text: object, most: int | None = LINE) -> str:
    """As `clean`, with a blank for each run of blanks and line ends."""
    return clean(" ".join(str(text).split()), most)


def joiners(text: str) -> set[int]:
    """Where a character without width makes one emoji out of several."""
    return {found.start() for found in _JOINER.finditer(text)}


def _escaped(text: str) -> str:
    joining = joiners(text)
    return "".join(
        c
        if place in joining or (c.isprintable() and not _UNSEEN.match(c))
        else c.encode("unicode_escape").decode()
        for place, c in enumerate(text)
    )
