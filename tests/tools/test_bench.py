"""The program behind `make bench`, run on tiny benchmarks."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import bench
import pytest
from scratch import working_in

ROOT = Path(__file__).parents[2]


def write_project(folder: Path, goals: str, **programs: str) -> Path:
    """Write benchmarks and their goals; return the file of goals."""
    for name, program in programs.items():
        (folder / f"{name}.py").write_text(program)
    path = folder / "goals.toml"
    path.write_text(goals)
    return path


def entry(name: str, ratios: str, arguments: str = "[]") -> str:
    return f'[[benchmarks]]\nfile = "{name}.py"\narguments = {arguments}\n{ratios}\n\n'


FAST = "print('fast ratio=12.5 against a loop')"


def test_each_ratio_stands_beside_its_limits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    two = "import sys; print('size ratio=' + sys.argv[1] + ' against plain')"
    goals = write_project(
        tmp_path,
        entry("one", "ratios.fast = { floor = 10, goal = 20 }")
        + entry("two", "ratios.size = { ceiling = 2.1 }", '["2.1"]'),
        one=FAST,
        two=two,
    )
    assert bench.main(["--goals", str(goals)]) == 0
    table = capfd.readouterr().out.splitlines()[-2:]
    assert [line.split("  ") for line in table]
    words = [" ".join(line.split()) for line in table]
    assert words == [
        "fast 12.5 a loop at least 10, goal 20 goal not reached",
        "size 2.1 plain at most 2.1 ok",
    ]


@pytest.mark.parametrize(
    ("limits", "accepted"),
    [
        ("floor = 12.5", True),
        ("floor = 12.6", False),
        ("ceiling = 12.5", True),
        ("ceiling = 12.4", False),
        ("goal = 100", True),
    ],
)
def test_a_ratio_beyond_a_limit_fails(
    tmp_path: Path, limits: str, accepted: bool
) -> None:
    goals = write_project(
        tmp_path, entry("one", f"ratios.fast = {{ {limits} }}"), one=FAST
    )
    assert bench.main(["--goals", str(goals)]) == (0 if accepted else 1)


@pytest.mark.parametrize(
    ("limits", "ratio", "reached"),
    [
        (bench.Limits(floor=1, goal=2), 2.0, True),
        (bench.Limits(floor=1, goal=2), 1.9, False),
        (bench.Limits(ceiling=3, goal=2), 2.0, True),
        (bench.Limits(ceiling=3, goal=2), 2.1, False),
    ],
)
def test_a_goal_is_reached_below_a_ceiling_or_above_a_floor(
    limits: bench.Limits, ratio: float, reached: bool
) -> None:
    assert limits.is_kept_by(ratio)
    assert limits.is_goal_reached_by(ratio) == reached


@pytest.mark.parametrize(
    "program",
    [
        "print('other ratio=99 against a loop')",
        "print('fast ratio=99 against a loop'); raise SystemExit(3)",
    ],
    ids=["another name", "failed"],
)
def test_a_ratio_that_is_not_printed_fails(tmp_path: Path, program: str) -> None:
    goals = write_project(
        tmp_path, entry("one", "ratios.fast = { floor = 1 }"), one=program
    )
    assert bench.main(["--goals", str(goals)]) == 1


def test_an_optional_ratio_may_be_missing_but_not_beyond_its_limits(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = "ratios.fast = { floor = 13, optional = true }"
    goals = write_project(tmp_path, entry("one", limits), one="print('no compiler')")
    assert bench.main(["--goals", str(goals)]) == 0
    assert capfd.readouterr().out.splitlines()[-1].endswith("not measured")
    (tmp_path / "one.py").write_text(FAST)
    assert bench.main(["--goals", str(goals)]) == 1


@pytest.mark.slow
def test_a_benchmark_and_its_processes_end_when_the_time_is_up(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys\n"
        "print('fast ratio=99 against a loop')\n"
        f"subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)', "
        f"{str(tmp_path)!r}])\n"
    )
    goals = write_project(
        tmp_path,
        entry("one", "ratios.fast = { floor = 1 }")
        + entry("two", "ratios.fast = { floor = 1 }"),
        one=program,
        two=FAST,
    )
    start = time.monotonic()
    assert bench.main(["--goals", str(goals), "--minutes", "0.05"]) == 1
    assert time.monotonic() - start < 30
    assert working_in(tmp_path) == []


def test_a_benchmark_ends_with_the_program_that_started_it(tmp_path: Path) -> None:
    """SIGTERM, as from `timeout`, ends the benchmark, too."""
    program = f"import time\nprint({str(tmp_path)!r}, flush=True)\ntime.sleep(60)\n"
    goals = write_project(tmp_path, entry("one", "ratios.fast = {}"), one=program)
    command = [sys.executable, bench.__file__, "--goals", str(goals)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line.strip() == str(tmp_path) for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
    assert working_in(tmp_path) == []


def test_only_the_named_benchmarks_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    goals = write_project(
        tmp_path,
        entry("one", "ratios.fast = { floor = 1 }")
        + entry("two", "ratios.slow = { floor = 1 }"),
        one=FAST,
        two="raise SystemExit('must not run')",
    )
    assert bench.main(["one", "--goals", str(goals)]) == 0
    assert bench.main(["three", "--goals", str(goals)]) == 2
    assert "no benchmark 'three'; there are: one, two" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("goals", "message"),
    [
        ("x = ", "goals.toml"),
        (entry("missing", "ratios.fast = { floor = 1 }"), "missing.py"),
        (entry("one", "ratios.fast = { least = 1 }"), "least"),
        (entry("one", "ratios.fast = { floor = 1 }\nsize = 3"), "'size'"),
    ],
    ids=["no TOML", "no program", "unknown limit", "unknown key"],
)
def test_a_wrong_file_of_goals_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], goals: str, message: str
) -> None:
    path = write_project(tmp_path, goals, one=FAST)
    assert bench.main(["--goals", str(path)]) == 2
    assert message in capsys.readouterr().err


def test_each_benchmark_of_the_project_has_limits() -> None:
    benchmarks = bench.read_goals(ROOT / "benchmarks" / "goals.toml")
    programs = sorted((ROOT / "benchmarks").glob("*.py"))
    assert sorted(benchmark.path for benchmark in benchmarks) == programs
    for benchmark in benchmarks:
        assert benchmark.ratios
        for limits in benchmark.ratios.values():
            assert (limits.floor is None) != (limits.ceiling is None)
