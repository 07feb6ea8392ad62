"""Write tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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


def _format_line(cells: Sequence[str]) -> str:
    """Return a row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"
