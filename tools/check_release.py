"""Compare a release's tag with the project, and print its part of the changelog.

    python tools/check_release.py v0.1.0

The tag is "v" and the version of pyproject.toml, and CHANGELOG.md has a section with this
version. Otherwise the command says what differs and exits with 1. It needs only Python.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def list_problems(tag: str, root: Path = ROOT) -> list[str]:
    """Return what keeps a tag from being released; an empty list if nothing does."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    version = project["version"]
    problems = []
    if tag != f"v{version}":
        problems.append(
            f"the tag is {tag} and pyproject.toml has the version {version}: tag the "
            f"commit v{version}, or change the version first"
        )
    if not read_notes(version, root):
        problems.append(
            f"CHANGELOG.md has no section {version}: rename its section Unreleased"
        )
    citation = (root / "CITATION.cff").read_text("utf-8")
    if f"\nversion: {version}\n" not in citation:
        problems.append(f"CITATION.cff has another version: write {version}")
    return problems


def read_notes(version: str, root: Path = ROOT) -> str:
    """Return a version's section of CHANGELOG.md without its heading; "" if absent."""
    text = (root / "CHANGELOG.md").read_text("utf-8")
    heading = rf"^## \[?{re.escape(version)}\b[^\n]*\n"
    found = re.search(rf"{heading}(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1].strip() if found else ""


def main() -> int:
    """Check the tag that the command line names."""
    (tag,) = sys.argv[1:]
    problems = list_problems(tag)
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(read_notes(tag.removeprefix("v")))
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
