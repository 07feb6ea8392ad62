"""Commands in tutorials and how-to pages are run unless a comment says otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
from applications import needs_app
from shell_pages import BLOCK, list_commands, run_page

DOCS = Path(__file__).parents[1] / "docs"
NOT_RUN = "<!-- Commands of this page are not run: "


def test_a_block_is_run_unless_a_comment_says_why_not(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\necho first > a.txt\n```\n\n"
        "<!-- not run: removes everything -->\n```sh\nrm -r a.txt\n```\n\n"
        "```toml\nseed = 1\n```\n\n"
        "```sh\ncat a.txt\nfednotes --version\n```\n",
        "utf-8",
    )
    assert len(list_commands(page.read_text("utf-8"))) == 2
    output = run_page(page, tmp_path, timeout=60)
    assert output.startswith("first\n")
    assert "fednotes" in output


# The application whose commands a page runs.
APPLICATIONS = {"audit": "audit", "export": "serving"}
PAGES = [DOCS / "tutorials/laptop.md", *sorted((DOCS / "how-to").glob("*.md"))]
RUN = [page for page in PAGES if list_commands(page.read_text("utf-8"))]


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_the_commands_of_each_page_run(page: Path, tmp_path: Path) -> None:
    if page.stem in APPLICATIONS:
        needs_app(APPLICATIONS[page.stem])
    pytest.importorskip("transformers")
    run_page(page, tmp_path, timeout=850)


def test_every_shell_block_is_run_or_marked_as_not_run() -> None:
    """A page of another kind says in a comment at its top that no block of it is run."""
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text("utf-8")
        blocks = [match["reason"] for match in BLOCK.finditer(text)]
        is_run = page.parent.name in ("tutorials", "how-to")
        assert is_run or not blocks or NOT_RUN in text, page
