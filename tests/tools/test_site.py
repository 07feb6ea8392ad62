"""The documentation site: its links work, and it loads nothing from other hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from site_pages import asking, linked, of_notebook


@pytest.mark.parametrize(
    ("folder", "text", "expected"),
    [
        (
            "",
            "[a](docs/job.md#tags), [b](CHANGELOG.md)",
            "[a](job.md#tags), [b](CHANGELOG.md)",
        ),
        ("", "![p](docs/figures/silos.png)", "![p](figures/silos.png)"),
        ("docs", "[c](../README.md) [d](privacy.md)", "[c](index.md) [d](privacy.md)"),
        ("docs", "[s](../SECURITY.md)", "[s](security-policy.md)"),
        (
            "docs/how-to",
            "[a](mapping.md) [b](../job.md) [c](../../README.md)",
            "[a](../how-to/mapping.md) [b](../job.md) [c](../index.md)",
        ),
        ("docs", "[n](tutorials/laptop.ipynb)", "[n](tutorials/laptop-notebook.md)"),
        ("docs", "[code](../src/fednotes) [far](../../secret)", "code far"),
        (
            "docs",
            "[w](https://semver.org) [h](#here)",
            "[w](https://semver.org) [h](#here)",
        ),
    ],
)
def test_links_are_rewritten_to_pages_of_the_site(
    folder: str, text: str, expected: str
) -> None:
    assert linked(text, folder) == expected


def test_a_notebook_becomes_a_page_with_its_text_and_code() -> None:
    cells = (
        '{"cells": [{"cell_type": "markdown", "source": ["# A\\n", "b"]}, '
        '{"cell_type": "code", "source": ["x = 1\\n"], "outputs": [{"text": "no"}]}]}'
    )
    assert of_notebook(cells) == "# A\nb\n\n```python\nx = 1\n```\n"


@pytest.mark.parametrize(
    ("page", "wrong"),
    [
        ('<script src="https://cdn.example/x.js">', True),
        ('<link rel="stylesheet" href="//cdn.example/x.css">', True),
        ('<link href="https://cdn.example/f" rel="preconnect">', True),
        ("<style>@font-face{src:url(https://cdn.example/f.woff)}</style>", True),
        ('<img alt="a" src="http://cdn.example/x.png">', True),
        ('<a href="https://semver.org">', False),
        ('<script src="assets/x.js"><link rel="stylesheet" href="site.css">', False),
    ],
)
def test_files_that_a_page_loads_from_other_hosts_are_detected(
    tmp_path: Path, page: str, wrong: bool
) -> None:
    (tmp_path / "page.html").write_text(page, "utf-8")
    assert bool(list(asking(tmp_path))) is wrong
