"""The tool that changes lines and runs their tests, on projects of a few lines."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path

import mutate
import pytest
from mutations import marked, mutants
from papers import PAGE, ROOT, definition, rows, without_deleted_apps
from scratch import working_in

TOY = '''
def mean(total, weight):
    """The mean. # [fedner eq 9]"""
    return total / weight  # [fedner eq 2]


def positive(x):
    # [fedner eq 1]
    y = x if x > 3 else 0
    return y


def last(n):
    while n > 5:  # [fedner alg 1]
        n = n - 1
    return n
'''
TESTS = """
from fednotes.toy import last, mean, positive

def test_mean():
    assert mean(6, 3) == 2

def test_positive():
    assert [positive(x) for x in (-2, 3, 4)] == [0, 0, 4]

def test_last():
    assert [last(n) for n in (4, 5, 6, 9)] == [4, 5, 5, 5]

def test_nothing():
    assert mean

def test_wrong():
    assert mean(6, 3) == 3
"""
ROW = "| `[fedner {0}]` | `fednotes.toy.{1}` | `tests/test_toy.py::test_{2}` |\n"
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A project with these rows and named mutants; what it leaves behind is told at the
    end."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    monkeypatch.setattr(mutate, "SLOW", ["pytest"])

    def make_project(*rows: tuple[str, str, str], listed: str = "") -> Path:
        files = {
            "src/fednotes/__init__.py": "",
            "src/fednotes/toy.py": TOY,
            "tests/test_toy.py": TESTS,
            "docs/papers.md": "".join(ROW.format(*row) for row in rows),
            "tools/mutants.toml": listed,
        }
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text, "utf-8")
        return tmp_path

    return make_project


MEAN, LAST = ("eq 2", "mean", "mean"), ("alg 1", "last", "last")


def test_every_mutant_is_killed(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: a quotient without its divisor; a constant and a side for ever or never;
    and a loop without an end is ended."""
    root = make(MEAN, ("eq 1", "positive", "positive"), LAST)
    assert mutate.main(["--jobs", "2"], root) == 0
    output = capsys.readouterr().out
    assert "8 killed, 0 survived" in output
    lines = [line.strip() for line in output.splitlines()]
    killed = {
        line.removesuffix("  # [fedner eq 2]") for line in lines if line.startswith("+")
    }
    assert killed == {
        "+    return total",
        "+    y = x",
        "+    y = 0",
        "+    y = x if (x >= 3) else 0",
        "+    y = x if x > 4 else 0",
        "+    y = x if x > 3 else 1",
        "+    while (n >= 5):  # [fedner alg 1]",
        "+    while n > 6:  # [fedner alg 1]",
    }
    assert "src/fednotes/toy.py:4  [fedner eq 2]" in output
    assert "by tests/test_toy.py::test_mean" in output
    assert (root / "src/fednotes/toy.py").read_text("utf-8") == TOY
    assert not working_in(root)
    assert not list((root / "scratch").iterdir())


def test_a_surviving_mutant_is_reported(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make(("eq 2", "mean", "nothing"))
    assert mutate.main(["--jobs", "1"], root) == 1
    output = capsys.readouterr().out
    assert "SURVIVED" in output
    assert "+    return total  # [fedner eq 2]" in output
    assert "not noticed by tests/test_toy.py::test_nothing" in output
    assert (
        "0 killed, 1 survived\nsurvived: src/fednotes/toy.py:4  [fedner eq 2]" in output
    )


ENDLESS = """
[[mutant]]
what = "never ends"
file = "src/fednotes/toy.py"
old = "n = n - 1"
new = "n = n + 0"
tests = ["tests/test_toy.py::test_last"]
"""
EQUIVALENT = """
[[equivalent]]
file = "src/fednotes/toy.py"
old = "return total / weight"
new = "return total"
why = "the weight is one"
"""


@pytest.mark.slow
def test_mutants_that_never_end_are_stopped_and_reported(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutate, "LEAST", 3.0)
    monkeypatch.setattr(mutate, "TIMES", 0.0)
    assert mutate.main([], make(listed=ENDLESS)) == 0
    output = capsys.readouterr().out
    assert "src/fednotes/toy.py:15  never ends" in output
    assert "by the time limit" in output


@pytest.mark.parametrize(
    ("rows", "listed", "message"),
    [
        (
            (("eq 2", "mean", "wrong"),),
            "",
            "test_wrong must pass and none be skipped",
        ),
        ((("eq 2", "mean", "gone"),), "", "test_gone must pass"),
        (
            (("eq 3", "mean", "mean"),),
            "",
            r"fednotes.toy.mean has no comment `# [fedner eq 3]`",
        ),
        ((("eq 2", "median", "mean"),), "", "no function fednotes.toy.median in src"),
        (
            (),
            ENDLESS.replace("n - 1", "n - 2"),
            "its text must occur once in src/fednotes/toy.py, but it occurs 0 times",
        ),
        ((), ENDLESS.replace("n = n - 1", "return"), "but it occurs 3 times"),
        ((), ENDLESS.replace("n + 0", "n +"), "'never ends' does not parse"),
        ((), ENDLESS.replace("n + 0", "n - 1"), "'never ends' changes nothing"),
        (
            (LAST,),
            EQUIVALENT,
            "no mutant of src/fednotes/toy.py is 'return total' any more",
        ),
    ],
)
def test_a_run_with_wrong_tests_or_markers_fails(
    make: Make,
    capsys: pytest.CaptureFixture[str],
    rows: tuple,
    listed: str,
    message: str,
) -> None:
    assert mutate.main(["--jobs", "1"], make(*rows, listed=listed)) == 2
    assert message in capsys.readouterr().err


def test_equivalent_mutants_are_left_out(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    assert mutate.main(["--list"], make(MEAN, LAST, listed=EQUIVALENT)) == 0
    assert "2 mutants" in capsys.readouterr().out


def test_a_sample_depends_on_its_seed(
    make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    root = make(MEAN, ("eq 1", "positive", "positive"), LAST)
    samples = []
    for seed in ("1", "1", "2"):
        assert mutate.main(["--list", "--sample", "3", "--seed", seed], root) == 0
        samples.append(capsys.readouterr().out)
    assert samples[0] == samples[1] != samples[2]
    assert f"3 of 8 mutants, by seed {1}" in samples[0]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = -a + b", ["x = (-a - b)", "x = a + b"]),
        ("x = a * b", ["x = a", "x = b"]),
        ("x = a ** 2 // c", ["x = (a ** 2)", "x = a // c", "x = a ** 3 // c"]),
        ("x = a[1:]", ["x = a[:]", "x = a[2:]"]),
        ("x = a[-1]", ["x = a[0]"]),
        ("x = f(a, w)", ["x = f(a)", "x = f(a, 1)"]),
        ("x = f(a, n=w)", ["x = f(n=w)", "x = f(a)"]),
        ("x = a.mean()", ["x = a.sum()"]),
        ("x = np.tanh(float(a))", ["x = float(a)"]),
        ("x = a if not c else b", ["x = a", "x = b", "x = a if c else b"]),
        ("x = [a for a in b if a]", ["x = [a for a in b]"]),
        ("self.x += a & b", ["pass", "self.x -= a & b", "self.x += (a | b)"]),
        ("f(a)", ["pass", "a"]),
        ("x = f'{a + b}'", []),
        ("x = (*a, *b)", ["x = ((*b,))", "x = ((*a,))"]),
        ("x = a is b or c", ["x = (a is b and c)", "x = (a is not b) or c"]),
        ("x = True", ["x = False"]),
    ],
)  # fmt: skip
def test_mutants_of_a_line_are_as_expected(line: str, expected: list[str]) -> None:
    """By hand, with text of more than one byte a letter before it."""
    source = f'def f():\n    "Σ"; {line}  # [fedner eq 2]\n    return x\n'
    statement = marked(source, 2)
    assert statement is not None
    changed_lines = [each.source.splitlines()[1] for each in mutants(source, statement)]
    assert sorted(changed_lines) == sorted(
        f'    "Σ"; {replacement}  # [fedner eq 2]' for replacement in expected
    )


def test_a_marker_leads_to_its_statement() -> None:
    """By hand: on its line, in its lines, above it; of a loop the header, of a
    definition and a docstring nothing."""
    source = '''def f():
    """Text."""  # 2
    # 3
    x = (
        1,  # 5
        2,
    )
    for a in x:  # 8
        # 9
        y = a
    return y
    # 12
'''
    begins = {line: marked(source, line) for line in (1, 2, 3, 5, 8, 9, 11, 12)}
    assert {line: statement and statement.lineno for line, statement in begins.items()} == {
        1: None, 2: None, 3: 4, 5: 4, 8: 8, 9: 10, 11: 11, 12: None,
    }  # fmt: skip


@pytest.mark.slow
def test_mutants_use_only_names_that_exist(tmp_path: Path) -> None:
    """A test that fails for a missing name says nothing about the changed line."""
    files = {}
    for number, change in enumerate(mutate.collected(ROOT)):
        if change.path.suffix == ".py":
            path = tmp_path / f"mutant_{number}.py"
            path.write_text(change.source, "utf-8")
            files[path.name] = change.of
    words = ["check", "--isolated", "--select", "F821", "--output-format", "json"]
    ruff = Path(sys.executable).with_name("ruff")
    run = subprocess.run(
        [ruff, *words, tmp_path], capture_output=True, check=False, text=True
    )
    problems = json.loads(run.stdout)
    wrong = [(files[Path(p["filename"]).name], p["message"]) for p in problems]
    assert not wrong


def test_the_text_of_each_named_mutant_occurs_once_in_its_file() -> None:
    listed = tomllib.loads((ROOT / "tools" / "mutants.toml").read_text("utf-8"))
    assert len(list(mutate.of_list(ROOT, listed["mutant"]))) > 3


@pytest.mark.slow
def test_the_markers_and_mutants_of_the_project_are_valid() -> None:
    """Every marker marks a statement that can be wrong, every named mutant's text is
    found, each test is one; reading all costs a second, running them is `make mutate`.
    """
    changes = mutate.collected(ROOT)
    table = without_deleted_apps(rows(PAGE.read_text("utf-8")))
    assert {row.marker for row in table} <= {c.of for c in changes}
    for test in {test for c in changes for test in c.tests}:
        assert _is_defined(test), f"no test {test}"


def _is_defined(test: str) -> bool:
    """Return whether a test exists, in its file or in the suite that its class inherits.

    Args:
        test: The test as pytest names it, with or without the values of parameters.
    """
    file, *names = test.partition("[")[0].split("::")
    if definition(ROOT / file, names) is not None:
        return True
    class_ = definition(ROOT / file, names[:-1])
    assert isinstance(class_, ast.ClassDef), f"no class {names[:-1]} in {file}"
    suites = [base.id for base in class_.bases if isinstance(base, ast.Name)]
    return any(
        definition(helper, [suite, names[-1]]) is not None
        for helper in (ROOT / "tests" / "helpers").glob("*.py")
        for suite in suites
    )
