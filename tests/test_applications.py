"""Each application can be deleted with its tests: nothing else names it.

Everything is read from the syntax tree, as in `test_imports.py`. Code in `src` names an
application by entry points alone. A test of something else may use an application if it
is skipped without it: below `needs_app(name)`, or within `if has_app(name):`.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from applications import COMMANDS, FUNCTIONS, is_deleted_command
from syntax_trees import SRC, dotted

TESTS = Path(__file__).parent
APPS = sorted(path.parent.name for path in SRC.glob("fednotes/apps/*/__init__.py"))
# The application of each helper that lies with the tests of one.
HELPERS = {path.stem: path.parts[-3] for path in TESTS.glob("apps/*/helpers/*.py")}
NAMED = re.compile(r"\bfednotes\.apps\.(\w+)")


def owner_of(path: Path) -> str:
    """Return the application of a file of src or of the tests; "" for the core's."""
    match = re.search(r"/(?:src/fednotes|tests)/apps/(\w+)/", path.as_posix())
    return match[1] if match else ""


def named_by(node: ast.AST) -> Iterator[str]:
    """The applications that one node of a syntax tree names."""
    modules: list[str] = []
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        modules = [f"{node.module}.{alias.name}" for alias in node.names]
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from NAMED.findall(node.value)
    for module in modules:
        yield from NAMED.findall(module)
        first = module.split(".")[0]
        if first in HELPERS:
            yield HELPERS[first]


def applications_in(node: ast.AST, function: str) -> set[str]:
    """The applications in calls of `needs_app` or `has_app`, such as has_app("ui")."""
    return {
        str(argument.value)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and dotted(call.func) == function
        for argument in call.args
        if isinstance(argument, ast.Constant)
    }


def is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def unguarded(body: Sequence[ast.AST], present: set[str]) -> Iterator[tuple[int, str]]:
    """Yield line and name of each application that need not be there.

    Args:
        body: Statements in their order, or other nodes.
        present: The applications that are there when these run.
    """
    present = set(present)
    for node in body:
        if isinstance(node, ast.stmt) and is_docstring(node):
            continue
        if isinstance(node, ast.Expr):
            present |= applications_in(node, "needs_app")
        for name in named_by(node):
            if name not in present:
                yield getattr(node, "lineno", 0), name
        inside = present
        if isinstance(node, ast.If):
            inside = present | applications_in(node.test, "has_app")
            yield from unguarded(node.orelse, present)
        for field, value in ast.iter_fields(node):
            children = value if isinstance(value, list) else [value]
            nodes = [child for child in children if isinstance(child, ast.AST)]
            if not (isinstance(node, ast.If) and field == "orelse"):
                yield from unguarded(nodes, inside)


def foreign(source: str, path: Path) -> list[str]:
    """The places where a module names an application that it is no part of."""
    references = unguarded(ast.parse(source).body, {owner_of(path)})
    return [f"{path.name}:{line}: {name}" for line, name in references]


def test_applications_are_discovered() -> None:
    """An empty list would pass everything below."""
    assert APPS
    assert set(APPS) >= set(HELPERS.values())


def test_no_module_names_an_application_that_it_does_not_belong_to() -> None:
    problems = [
        problem
        for path in sorted((SRC / "fednotes").rglob("*.py"))
        for problem in foreign(path.read_text("utf-8"), path)
    ]
    assert not problems, f"register it by an entry point (core/plugins.py): {problems}"


def test_no_test_needs_an_application_that_may_be_deleted() -> None:
    problems = [
        problem
        for path in sorted(TESTS.rglob("*.py"))
        if path != Path(__file__)
        for problem in foreign(path.read_text("utf-8"), path)
    ]
    assert not problems, (
        "move it to tests/apps/NAME, or put needs_app(NAME) of tests/helpers/"
        f"applications.py above it: {problems}"
    )


@pytest.mark.parametrize(
    ("group", "known"), [("commands", COMMANDS), ("api", FUNCTIONS)]
)
def test_the_application_of_each_command_and_function_is_known(
    group: str, known: Mapping[str, str]
) -> None:
    """Pages may name those of an application that was deleted."""
    project = tomllib.loads((SRC.parent / "pyproject.toml").read_text("utf-8"))
    entries = project["project"]["entry-points"].get(f"fednotes.{group}", {})
    registered = {name: NAMED.findall(value)[0] for name, value in entries.items()}
    assert registered == {
        name: app for name, app in known.items() if app in APPS and " " not in name
    }


def test_a_command_of_a_deleted_application_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(COMMANDS, "job show", "no_such_application")
    assert is_deleted_command(["job", "show", "demo"])
    assert not is_deleted_command(["job", "keys"])


def test_helper_modules_have_unique_names() -> None:
    """All of their folders are places of imports."""
    paths = [*TESTS.glob("helpers/*.py"), *TESTS.glob("apps/*/helpers/*.py")]
    names = Counter(path.stem for path in paths)
    assert [name for name, number in names.items() if number > 1] == []


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ("import fednotes.apps.ui", True),
        ("from fednotes.apps import audit, ui", True),
        ("def f():\n    from fednotes.apps.ui.pages import run", True),
        ("if TYPE_CHECKING:\n    from fednotes.apps.ui import pages", True),
        ('patch("fednotes.apps.ui.pages.run")', True),
        ('MAIN = f"fednotes.apps.ui:{name}"', True),
        ('"""As fednotes.apps.ui does."""', False),
        ("from fednotes.apps.audit import Attack", False),
        ('needs_app("ui")\nfrom fednotes.apps.ui import pages', False),
        ('from fednotes.apps.ui import pages\nneeds_app("ui")', True),
        ('needs_app("serving")\nfrom fednotes.apps.ui import pages', True),
        ('def f():\n    needs_app("ui")\n    import fednotes.apps.ui', False),
        ('def f():\n    needs_app("ui")\nimport fednotes.apps.ui', True),
        ('if has_app("ui"):\n    import fednotes.apps.ui', False),
        ('if has_app("ui"):\n    pass\nelse:\n    import fednotes.apps.ui', True),
        ('if has_app("ui"):\n    pass\nimport fednotes.apps.ui', True),
    ],
)
def test_the_check_detects_each_way_to_name_an_application(
    source: str, wrong: bool
) -> None:
    """In a test of the audit, which may name the audit alone."""
    path = TESTS / "apps" / "audit" / "test_example.py"
    assert bool(foreign(source, path)) is wrong


def test_the_check_knows_which_application_a_helper_belongs_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(HELPERS, "windows", "ui")
    source = "from windows import open_window"
    assert foreign(source, TESTS / "test_example.py") == ["test_example.py:1: ui"]
    assert foreign(source, TESTS / "apps" / "ui" / "test_example.py") == []
