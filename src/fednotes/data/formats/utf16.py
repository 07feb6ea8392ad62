"""Offsets of programs that count UTF-16 units: those in Java and JavaScript.

A character outside Unicode's first plane, such as an emoji, has two units.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from functools import cached_property

_OF_TWO_UNITS = re.compile("[\U00010000-\U0010ffff]")


class Utf16Units:
    """Positions in a text in UTF-16 units, computed once for all its mentions.

    Args:
        text: The text.
    """

    def __init__(self, text: str) -> None:
        self._text = text

    @cached_property
    def _characters(self) -> list[int]:
        """The positions of all characters that have two units."""
        return [match.start() for match in _OF_TWO_UNITS.finditer(self._text)]

    @cached_property
    def _second_units(self) -> list[int]:
        """The positions of the second units of these characters."""
        return [
            position + number + 1 for number, position in enumerate(self._characters)
        ]

    def to_character(self, unit: int) -> int | None:
        """Return the position of the character that begins with a unit, or None."""
        before = bisect_left(self._second_units, unit)
        if self._second_units[before : before + 1] == [unit]:
            return None
        return unit - before

    def to_unit(self, character: int) -> int:
        """Return the position of a character's first unit."""
        return character + bisect_left(self._characters, character)


def count_units(text: str) -> int:
    """Return the length of a text in UTF-16 units."""
    return len(text) + len(_OF_TWO_UNITS.findall(text))
