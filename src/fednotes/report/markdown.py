"""Write tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(
    heads: Sequence[str], rows: Iterable[Sequence[str]], *, names: int = 1
) -> str:
    """Return a table in Markdown.

    Args:
        heads: The headings.
        rows: The cells of each row.
        names: Number of leading columns with names, which are left-aligned; the others
            hold numbers.
    """
    ruler = "|" + "---|" * names + "---:|" * (len(heads) - names)
    lines = [_table_line(heads), ruler]
    lines += [_table_line(row) for row in rows]
    return "\n".join(lines)


def _table_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
