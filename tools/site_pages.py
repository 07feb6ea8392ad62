"""A hook of mkdocs, named in mkdocs.yml, that completes the web site of the pages.

It makes README.md the first page, and adds CONTRIBUTING.md, CHANGELOG.md, SECURITY.md
and the notebook as pages. A link to a file that is not a page is replaced by its text.
If a built page would load anything from another host, the build fails, because hospitals
read the pages without a network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    # SECURITY.md would replace docs/security.md on file systems that ignore case.
    "SECURITY.md": "security-policy.md",
}
LINK = re.compile(r"(?<!\!)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)#\s]+)(#[^)]*)?\)")
ASKS = re.compile(
    r"""<(?:script|img|iframe|source|audio|video|embed)\b[^>]*\ssrc=["']?(?:https?:)?//[^\s"'>]+"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preload|preconnect|icon|modulepreload))[^>]*\shref=["']?(?:https?:)?//[^\s"'>]+"""
    r"""|url\(["']?(?:https?:)?//[^)]+|@import\s+["'](?:https?:)?//[^"']+"""
)


def linked(text: str, folder: str) -> str:
    """Return a page's text with the links of the web site.

    Args:
        text: The page in Markdown.
        folder: The folder of the page in the project.
    """
    up = "../" * folder.removeprefix("docs").count(
        "/"
    )  # from the page to the site's top

    def link(match: re.Match[str]) -> str:
        words, target, anchor = match.groups()
        path = (ROOT / folder / target).resolve()
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
        if name.startswith("docs/"):
            page = name.removeprefix("docs/").replace(".ipynb", "-notebook.md")
        elif name in PAGES:
            page = PAGES[name]
        else:
            return words
        return f"[{words}]({up}{page}{anchor or ''})"

    return LINK.sub(link, text).replace("](docs/figures/", "](figures/")


def of_notebook(text: str) -> str:
    """Return a notebook as Markdown: its texts and its code."""
    blocks = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"]).rstrip()
        blocks.append(
            f"```python\n{source}\n```" if cell["cell_type"] == "code" else source
        )
    return "\n\n".join(blocks) + "\n"


def asking(folder: Path) -> Iterator[str]:
    """Yield what pages and styles would load from another host when they are shown."""
    for path in sorted([*folder.rglob("*.html"), *folder.rglob("*.css")]):
        for request in ASKS.findall(path.read_text("utf-8")):
            yield f"{path.relative_to(folder)}: {request[:120]}"


def on_files(files: Any, config: Any) -> Any:
    """Add pages that are not in docs/; mkdocs calls this."""
    from mkdocs.structure.files import File

    for name, page in PAGES.items():
        text = linked((ROOT / name).read_text("utf-8"), "")
        files.append(File.generated(config, page, content=text))
    docs = ROOT / "docs"
    for path in sorted(docs.rglob("*.ipynb")):
        folder = path.parent.relative_to(ROOT).as_posix()
        text = linked(of_notebook(path.read_text("utf-8")), folder)
        # A notebook may have the name of a page, so its own page is called differently.
        page = path.relative_to(docs).with_name(f"{path.stem}-notebook.md")
        files.append(File.generated(config, page.as_posix(), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links of a page that lead out of docs/; mkdocs calls this."""
    if page.file.generated_by:
        return markdown
    return linked(markdown, (Path("docs") / page.file.src_uri).parent.as_posix())


def on_post_build(config: Any) -> None:
    """Fail if a built page would load anything from another host; mkdocs calls this.

    Raises:
        PluginError: A page would.
    """
    from mkdocs.exceptions import PluginError

    if requests := list(asking(Path(config["site_dir"]))):
        raise PluginError(f"pages that load from another host: {requests}")
