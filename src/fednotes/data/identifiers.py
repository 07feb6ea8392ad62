"""Counts of text that may identify a patient, by pattern. Only counts are returned.

The patterns are in `identifiers.toml`. Most notes contain nothing of most kinds, and
searching for a pattern that begins at a word boundary is slow. Therefore a kind's
pattern is searched only if its hint, which begins with a fixed character or character
set, occurs in the text.
"""

from __future__ import annotations

import re
from collections import Counter

from fednotes.core.parsing import read_shipped_table

_PATTERNS = read_shipped_table("data/identifiers.toml")


def _compile(pattern: str) -> re.Pattern[str]:
    """Return a pattern with the lists of months and first names filled in."""
    first_names = "|".join(_PATTERNS["given"].split())
    filled = pattern.replace("{month}", _PATTERNS["month"])
    filled = filled.replace("{given}", first_names)
    return re.compile(filled, re.VERBOSE)


_PLACEHOLDER = re.compile(_PATTERNS["placeholder"])
_PLACEHOLDER_PARTS = ("[", "<", "{", "___", "XXX")
KINDS = {kind: _compile(pattern) for kind, pattern in _PATTERNS["kinds"].items()}
_HINTS = {
    kind: [_compile(hint) for hint in hints]
    for kind, hints in _PATTERNS["hints"].items()
}


def count_identifiers(text: str) -> Counter[str]:
    """Count the pieces of a text that may identify a patient, by kind.

    De-identification placeholders do not count. Text that is counted as one kind is not
    counted as another.
    """
    counts: Counter[str] = Counter()
    if any(part in text for part in _PLACEHOLDER_PARTS):
        text = _PLACEHOLDER.sub("\n", text)
    for kind, pattern in KINDS.items():
        if any(hint.search(text) for hint in _HINTS[kind]):
            text, number = pattern.subn("\n", text)
            if number:
                counts[kind] = number
    return counts
