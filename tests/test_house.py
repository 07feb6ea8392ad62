"""What keeps the house small: budgets, one importer, one name, no cycle, no second copy.

Each rule is a function of a table of modules, so that it can be tried on modules made up for it.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
SOURCES = {
    ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((SRC / "fednotes").rglob("*.py"))
}
TEXTS = {name: path.read_text("utf-8") for name, path in SOURCES.items()}

FILES_A_FOLDER = 14
LINES_A_FILE = 800
LONG = 300  # a module this long may have one importer, if that is as long
# Found by name in their folder, or started or called by name: no importer says that they are used.
BY_NAME = re.compile(
    r"fednotes\.(__main__|methods\.\w+|data\.formats\.[\w.]+|taggers\.\w+|cli\.\w+|jobs\.kinds\.\w+|"
    r"engines\.nvflare\.\w+|serving\.exports(\.\w+)?|serving\.spacy_component|audit\.\w+|report|ui)$"
)
TWICE = frozenset({"Config", "Site", "Server"})  # every method has its own
BLOCK = 6  # lines that stand in two places
_THIN = re.compile(r'#|from |import |"""|\w+,?$')  # comments, imports and the names in them
# What was found when the rules were made. These may only fall.
COPIES, LONELY, SHARED_NAMES = 0, 1, 0


def references(texts: Mapping[str, str]) -> dict[str, set[str]]:
    """module: the modules of the package that it imports, anywhere in it."""
    found: dict[str, set[str]] = {}
    for name, text in texts.items():
        found[name] = set()
        for node in ast.walk(ast.parse(text)):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
            for target in targets:
                while target and target not in texts:
                    target = target.rpartition(".")[0]
                if target and target not in (name, "fednotes"):
                    found[name].add(target)
    return found


def cycles(texts: Mapping[str, str]) -> list[str]:
    """Modules that reach themselves, each with the import by which they do."""
    below = references(texts)
    found = []
    for start in below:
        seen, waiting = set(), [(start, first) for first in below[start]]
        while waiting:
            origin, module = waiting.pop()
            if module == start:
                found.append(f"{start} reaches itself by {origin}")
                break
            if module not in seen:
                seen.add(module)
                waiting += [(module, further) for further in below[module]]
    return found


def lonely(texts: Mapping[str, str]) -> list[str]:
    """Modules with one importer, unless both are long: their place is in that importer."""
    above: defaultdict[str, list[str]] = defaultdict(list)
    for name, targets in references(texts).items():
        for target in targets:
            above[target].append(name)
    found = []
    for name, text in texts.items():
        if BY_NAME.fullmatch(name) or not text or name == "fednotes":
            continue
        users = above[name]
        lengths = [texts[other].count("\n") for other in (name, *users)]
        if len(users) < 2 and not (users and min(lengths) > LONG):
            found.append(f"{name}: used by {', '.join(users) or 'nobody'}; move it there")
    return found


def shared_names(texts: Mapping[str, str]) -> list[str]:
    """Public classes that stand in more than one module."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for module, text in texts.items():
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    return [
        f"{name}: {', '.join(modules)}; give one of them another name"
        for name, modules in places.items()
        if len(modules) > 1 and name not in TWICE
    ]


def copies(texts: Mapping[str, str]) -> list[str]:
    """Runs of `BLOCK` lines that stand in two places, imports, comments and brackets aside."""
    places: defaultdict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for module, text in texts.items():
        lines = list(_telling(text))
        for start in range(len(lines) - BLOCK + 1):
            block = tuple(line for _, line in lines[start : start + BLOCK])
            places[block].append((module, lines[start][0]))
    pairs = {(one, two) for found in places.values() for one, two in pairwise(found)}
    begun = {  # a longer run is counted where it begins
        (one, two)
        for one, two in pairs
        if not any(
            0 < one[1] - a[1] <= BLOCK
            and 0 < two[1] - b[1] <= BLOCK
            and (a[0], b[0]) == (one[0], two[0])
            for a, b in pairs
        )
    }
    return [f"{a[0]}:{a[1]} and {b[0]}:{b[1]}; make it one function" for a, b in sorted(begun)]


def _telling(text: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if len(bare) > 3 and not _THIN.match(bare):
            yield number, bare


def budgets(page: str) -> dict[str, tuple[int, int]]:
    """room: lines and files, as the table of docs/architecture.md has them."""
    rows = re.findall(r"^\| `(\w+)/` \| ([\d,]+) \| (\d+) \|", page, re.MULTILINE)
    return {room: (int(lines.replace(",", "")), int(files)) for room, lines, files in rows}


def test_each_room_stays_within_its_budget() -> None:
    """Raising one needs a line in CHANGELOG.md that says what users got for it."""
    allowed = budgets((ROOT / "docs" / "architecture.md").read_text("utf-8"))
    held: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name, text in TEXTS.items():
        room = name.split(".")[1] if "." in name else ""
        if room not in ("", "__main__"):
            held[room] += text.count("\n")
            files[room] += 1
    assert set(held) == set(allowed), "docs/architecture.md's table of budgets lacks a room"
    over = [
        f"{room}: {held[room]:,} lines in {files[room]} files; {lines:,} in {most} are allowed"
        for room, (lines, most) in allowed.items()
        if held[room] > lines or files[room] > most
    ]
    assert not over, f"unite or delete before adding (docs/architecture.md): {over}"


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES.values()}), ids=str)
def test_a_folder_holds_few_files(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= FILES_A_FOLDER, f"{folder}: unite some, or divide it"


def test_a_file_can_be_read_in_one_sitting() -> None:
    long = {name: text.count("\n") for name, text in TEXTS.items()}
    assert not {name: lines for name, lines in long.items() if lines > LINES_A_FILE}


def test_no_module_reaches_itself() -> None:
    assert cycles(TEXTS) == []


def test_modules_of_one_importer_stand_in_it() -> None:
    found = lonely(TEXTS)
    assert len(found) <= LONELY, found


def test_public_classes_have_a_name_each() -> None:
    found = shared_names(TEXTS)
    assert len(found) <= SHARED_NAMES, found


def test_copies_only_become_fewer() -> None:
    found = copies(TEXTS)
    assert len(found) <= COPIES, found


def test_the_rules_see() -> None:
    """Each of them finds what was put there for it, and no more."""
    block = "".join(f"    value_{n} = {n}\n" for n in range(BLOCK))
    texts = {
        "fednotes.a": f"from fednotes.b import f\nclass Thing: ...\ndef one():\n{block}",
        "fednotes.b": f"def f():\n    import fednotes.a\nclass Thing: ...\ndef two():\n{block}",
        "fednotes.c": "from fednotes import a, b\nclass Other: ...\n",
    }
    assert len(cycles(texts)) == 2
    assert [row.split(":")[0] for row in lonely(texts)] == ["fednotes.c"]
    assert [row.split(":")[0] for row in shared_names(texts)] == ["Thing"]
    assert copies(texts) == ["fednotes.a:4 and fednotes.b:5; make it one function"]
    assert cycles({"fednotes.a": "", "fednotes.b": "import fednotes.a"}) == []
    assert budgets("| `core/` | 1,250 | 11 |") == {"core": (1250, 11)}
