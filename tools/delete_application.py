"""Delete an application of src/fednotes/apps, and what only it needs.

    python tools/delete_application.py NAME

This deletes its code and its tests, the benchmarks (with their goals) and tools that
import it, its entry points, extras and settings of mypy in `pyproject.toml`, and the
rows of its extras in `docs/install.md`. Then it lists the pages and other files that
still name the application. CONTRIBUTING.md ("Deleting an application") describes the
next steps.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def delete_application(name: str, root: Path = ROOT) -> None:
    """Delete an application from the project in a folder.

    Args:
        name: The application, a folder of `src/fednotes/apps`.
        root: The root of the project.

    Raises:
        ValueError: There is no such application.
    """
    code = root / "src" / "fednotes" / "apps" / name
    if not name.isidentifier() or not (code / "__init__.py").is_file():
        raise ValueError(f"{name!r} is no application: name a folder of {code.parent}")
    goals = root / "benchmarks" / "goals.toml"
    for path in list(find_users(name, root)):
        path.unlink()
        if path.parent == goals.parent:
            text = without_benchmark(goals.read_text("utf-8"), path.name)
            goals.write_text(text, "utf-8")
    shutil.rmtree(code)
    shutil.rmtree(root / "tests" / "apps" / name, ignore_errors=True)

    project = root / "pyproject.toml"
    text, extras = without_application(project.read_text("utf-8"), name)
    project.write_text(text, "utf-8")
    page = root / "docs" / "install.md"
    rows = page.read_text("utf-8").splitlines(keepends=True)
    starts = tuple(f"| `{extra}` |" for extra in extras)
    page.write_text("".join(row for row in rows if not row.startswith(starts)), "utf-8")


def find_users(name: str, root: Path) -> Iterator[Path]:
    """Yield the benchmarks and tools that cannot run without an application."""
    package = f"fednotes.apps.{name}"
    for folder in ("benchmarks", "tools"):
        for path in sorted((root / folder).glob("*.py")):
            for node in ast.parse(path.read_text("utf-8")).body:
                module = node.module if isinstance(node, ast.ImportFrom) else None
                if f"{module}.".startswith(f"{package}."):
                    yield path
                    break


def without_application(text: str, name: str) -> tuple[str, list[str]]:
    """Return a pyproject.toml without an application, and the extras it leaves out.

    Args:
        text: The file's text.
        name: The application.
    """
    in_list = re.compile(rf'^ *"fednotes\.apps\.{name}\b.*",\n', re.MULTILINE)
    entry_point = re.compile(rf'^\w+ = "fednotes\.apps\.{name}[.:"].*\n', re.MULTILINE)
    # A block of settings for this application only.
    block = re.compile(
        rf'^\[\[tool\.mypy\.overrides\]\]\nmodule = \["fednotes\.apps\.{name}\b[^,\n]*\]\n'
        r"(?:.+\n)*\n",
        re.MULTILINE,
    )
    extra = re.compile(rf"^# apps/{name}: .*\n(\w+) = .*\n", re.MULTILINE)
    extras = extra.findall(text)
    for pattern in (in_list, entry_point, block, extra):
        text = pattern.sub("", text)

    def keep_others(listed: re.Match[str]) -> str:
        names = [each for each in listed[1].split(",") if each not in extras]
        return f'"fednotes[{",".join(names)}]"'

    return re.sub(r'"fednotes\[([\w,]+)\]"', keep_others, text), extras


def without_benchmark(goals: str, file: str) -> str:
    """Return the text of benchmarks/goals.toml without one benchmark."""
    entry = re.compile(
        rf'^\[\[benchmarks\]\]\nfile = "{re.escape(file)}"\n(?:.+\n)*\n?', re.MULTILINE
    )
    return entry.sub("", goals)


def find_mentions(name: str, root: Path = ROOT) -> Iterator[str]:
    """Yield the places of files that still name an application."""
    named = re.compile(rf"\bapps[./]{name}\b")
    files = ["Makefile", ".ci/run", "README.md", "CONTRIBUTING.md", "mkdocs.yml"]
    paths = [root / file for file in files if (root / file).is_file()]
    for folder in ("docs", "tools", "benchmarks", "deploy"):
        paths += [p for p in sorted((root / folder).rglob("*.*")) if p.is_file()]
    for path in paths:
        try:
            lines = path.read_text("utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # an image
        numbers = [str(at) for at, line in enumerate(lines, 1) if named.search(line)]
        if numbers:
            yield f"{path.relative_to(root)}: lines {', '.join(numbers)}"


def main() -> None:
    """Delete the application that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", help="folder in src/fednotes/apps")
    name = parser.parse_args().name
    try:
        delete_application(name)
    except ValueError as error:
        sys.exit(f"error: {error}")
    for place in find_mentions(name):
        print(f"still names apps/{name}: {place}")


if __name__ == "__main__":
    main()
