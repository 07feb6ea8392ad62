"""What modules import and name, read from their syntax trees without importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"


@dataclass(frozen=True)
class Import:
    """One imported module or name, absolute. `local`: in a function or for types
    only."""

    target: str
    line: int
    local: bool


def module_name(path: Path) -> str:
    """Return the name of a module: src/fednotes/core/types.py → fednotes.core.types."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, path: Path = SRC / "fednotes" / "example.py") -> list[Import]:
    """Return every import of a module, with relative ones and `import_module("…")`."""
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    return list(_walk(ast.parse(source), package, local=False))


def _walk(node: ast.AST, package: list[str], local: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, local)
    elif isinstance(node, ast.ImportFrom):
        above = package[: len(package) + 1 - node.level] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:  # the name may be a module or something in one
            yield Import(f"{module}.{alias.name}", node.lineno, local)
    elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in (
        "import_module",
        "__import__",
    ):
        if node.args and isinstance(node.args[0], ast.Constant):
            yield Import(str(node.args[0].value), node.lineno, local)
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        local = True
    elif isinstance(node, ast.If) and dotted(node.test).endswith("TYPE_CHECKING"):
        for child in node.body:
            yield from _walk(child, package, local=True)
        for child in node.orelse:
            yield from _walk(child, package, local)
        return
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, package, local)


def dotted(node: ast.AST) -> str:
    """Return `torch.load` for the expression torch.load; "" if it is no dotted name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return ""


def names_in(source: str) -> set[str]:
    """Return every name that a module uses."""
    return {n.id for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name)}
