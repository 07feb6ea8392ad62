"""Tables in Markdown."""

from __future__ import annotations

from fednotes.report.markdown import format_markdown_table


def test_names_change_neither_the_columns_nor_the_page() -> None:
    """Entity types come from the notes, and sites from a stranger's job."""
    names = ("a|b", "c\n\n# d", "<script>e</script>", "p < 0.05", "12.0 \\*", "f\u202e")
    table = format_markdown_table(names, [names])
    head, ruler, row = table.splitlines()
    assert (
        head
        == row
        == (
            r"| a\|b | c\n\n# d | \<script>e\</script> | p < 0.05 | 12.0 \* | f\u202e |"
        )
    )
    assert ruler == "|---|---:|---:|---:|---:|---:|"
