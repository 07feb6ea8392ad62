"""Cleaning of text from other parties for screens, logs and reports.

A name, version, label or reason may contain characters that move the cursor, end the
line, reverse the direction of writing or are invisible. This is the only module that
escapes them.
"""

from __future__ import annotations

import re

NAME = 80  # maximum length of a name within a line, in characters
LINE = 2000  # maximum length of a line, in characters
# Printable but invisible: some letters, tags and further variation selectors.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0\U000e0000-\U0010ffff]"
)
_PICTURE = "[\u2190-\u2bff\ufe0f\U0001f000-\U0001faff]"
# The joiner within an emoji that consists of several others.
_JOINER = re.compile(f"(?<={_PICTURE})\u200d(?={_PICTURE})")


def clean(text: object, limit: int | None = LINE) -> str:
    r"""Return text on one line in which every character is visible.

    Control characters, line ends, direction marks, invisible characters and all blanks
    except the plain one are escaped as in Python (`\x1b`, `\u202e`).

    Args:
        text: The text.
        limit: Maximum number of characters. Longer text is cut and ends with "…". None
            sets no limit.
    """
    line = str(text)
    if limit is not None:
        line = line[: limit + 1]
    if not line.isprintable() or _INVISIBLE.search(line):
        line = _escape(line)
    if limit is not None and len(line) > limit:
        line = f"{line[: limit - 1]}…"
    return line


def clean_to_one_line(text: object, limit: int | None = LINE) -> str:
    """Return text on one line, cleaned, with one blank for each run of white space.

    Args:
        text: The text.
        limit: As in `clean`.
    """
    return clean(_join_lines(text), limit)


def clean_message(text: object) -> str:
    """Return an error or a warning on one line, cleaned.

    The middle of a message that quotes a huge value is left out: the beginning says
    what is wrong, and the end has the remedy.

    Args:
        text: The message.
    """
    line = _join_lines(text)
    if len(line) > 2 * LINE:
        line = f"{line[:LINE]} … {line[-LINE:]}"
    return clean(line, None)


def _join_lines(text: object) -> str:
    """Return text with one blank for each run of white space."""
    return " ".join(str(text).split())


def find_joiners(text: str) -> set[int]:
    """Return the offsets of the invisible joiners within emoji."""
    return {match.start() for match in _JOINER.finditer(text)}


def _escape(text: str) -> str:
    """Return text with invisible characters escaped, except joiners within emoji."""
    joining = find_joiners(text)
    characters = []
    for offset, character in enumerate(text):
        is_visible = character.isprintable() and not _INVISIBLE.match(character)
        if is_visible or offset in joining:
            characters.append(character)
        else:
            characters.append(character.encode("unicode_escape").decode())
    return "".join(characters)
