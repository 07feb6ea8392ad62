"""Write tables in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from fednotes.core.cleaning import clean

# What begins a tag, a comment or an instruction of HTML.
_HTML = re.compile(r"<(?=[A-Za-z/!?])")


def format_markdown_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, name_columns: int = 1
) -> str:
    """Return a table in Markdown.

    Args:
        heads: The headings.
        rows: The cells of each row.
        name_columns: Number of leading columns with names, which are left-aligned; the
            others hold numbers.
    """
    ruler = "|" + "---|" * name_columns + "---:|" * (len(heads) - name_columns)
    lines = [_format_line(heads), ruler]
    lines += [_format_line(row) for row in rows]
    return "\n".join(lines)


def escape_names(text: str) -> str:
    """Return text on one line in which names can neither end a cell nor begin a tag.

    Other signs of Markdown stay, such as those of a footnote.
    """
    return _HTML.sub(r"\\<", clean(text, None)).replace("|", r"\|")


def _format_line(cells: Sequence[str]) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join(map(escape_names, cells))} |"
