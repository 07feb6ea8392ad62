"""The commands of docs/results.md print the rows and columns that the page shows."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from fednotes.apps.experiments.grid_files import list_grid_files
from fednotes.apps.experiments.grids import (
    Grid,
    choose_jobs,
    load_grid,
    select_grid_rows,
)
from fednotes.jobs.job_file import load_table

PAGE = Path(__file__).parents[3] / "docs" / "results.md"
SECTION = re.compile(r"^#+ .*$", re.MULTILINE)
BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^\| run \|.*\n\|[-:|]+\|\n(?:\|.*\n)+", re.MULTILINE)

# Rows that were measured with an option that the program no longer has.
REMOVED_ROWS = {
    "bert-sent": ["all but embeddings, eight bits", "LoRA, eight bits"],
}


class Shown(NamedTuple):
    """A table of an experiment, as the page shows it."""

    name: str
    heads: list[str]
    rows: list[list[str]]


class Command(NamedTuple):
    """A `reproduce` command of the page, its options, and the text of its section."""

    name: str
    seeds: tuple[int, ...]
    base: tuple[str, ...]
    section: str


def commands() -> Iterator[Command]:
    """Yield the `reproduce` commands of all sections."""
    for section in SECTION.split(PAGE.read_text("utf-8")):
        for block in BLOCK.findall(section):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:2] != ["fednotes", "reproduce"]:
                    continue
                seeds = [words[at + 1] for at, w in enumerate(words) if w == "--seeds"]
                base = [words[at + 1] for at, w in enumerate(words) if w == "--base"]
                yield Command(words[2], tuple(map(int, seeds)), tuple(base), section)


def read_tables(section: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield the headings and rows of the tables of runs."""
    for text in TABLE.findall(section):
        lines = [re.split(r" *\| *", line)[1:-1] for line in text.splitlines()]
        yield lines[0], lines[2:]


def shown_tables() -> Iterator[Shown]:
    """Yield the tables whose rows are runs, the first of a section for its first
    command."""
    by_section: dict[str, list[str]] = {}
    for command in COMMANDS:
        by_section.setdefault(command.section, []).append(command.name)
    for section, names in by_section.items():
        tables = [t for t in read_tables(section) if t[0][1] == "condition"]
        for name, (heads, rows) in zip(names, tables, strict=False):
            yield Shown(name, heads, rows)


ON_OTHER_JOBS = [command for command in commands() if command.base]
COMMANDS = [command for command in commands() if not command.base]
SHOWN = list(shown_tables())


def column_names(grid: Grid, folder: str) -> set[str]:
    """Return the headings that the table of a grid may have."""
    names = {"types not annotated", "gap closed", f"behind {grid.against}"}
    if grid.columns:
        return names | set(grid.columns)
    sites = load_table(f"{folder}/{grid.base}")[0]["sites"]
    costs = {
        f"micro strict within {grid.megabytes:g} MB",
        f"micro strict within {grid.seconds:g} s",
    }
    return names | costs | {"seeds", "mean", "MB", "s", *sites}


def test_the_page_has_the_tables_of_most_experiments() -> None:
    """They would all pass without any."""
    assert len(SHOWN) >= 17
    assert {command.name for command in COMMANDS} >= set(list_grid_files()) - {
        "fedner-default"
    }


@pytest.mark.parametrize("table", SHOWN, ids=lambda table: table.name)
def test_a_command_prints_the_rows_of_its_table(table: Shown) -> None:
    """The order is the same too. The page may leave out rows and columns."""
    grid, path = load_grid(table.name)
    jobs = choose_jobs(grid, path.parent.name, ())
    rows, _ = select_grid_rows(grid, jobs, full=False)
    printed = [(row.label, each) for row in rows for each in row.conditions]
    on_page = [
        (label, condition.partition(" + ")[0])
        for label, condition, *_ in table.rows
        if label not in REMOVED_ROWS.get(table.name, ())
    ]
    assert [row for row in on_page if row not in printed] == []
    assert [row for row in printed if row in on_page] == on_page
    assert set(table.heads[2:]) <= column_names(grid, path.parent.name)


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if load_grid(c.name)[0].paper], ids=lambda c: c.name
)
def test_figures_of_the_paper_equal_those_of_the_experiment(command: Command) -> None:
    paper = load_grid(command.name)[0].paper
    heads = list(next(iter(paper.values())))
    expected = [
        [label, *(f"{figures[head]:.2f}" for head in heads)]
        for label, figures in paper.items()
    ]
    assert (["run", *heads], expected) in list(read_tables(command.section))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.name)
def test_the_page_names_the_seeds_of_a_command(command: Command) -> None:
    grid, _ = load_grid(command.name)
    if any(row.seeds for row in grid.runs if not row.full):
        pytest.skip("its rows have different seeds")
    seeds = ", ".join(map(str, command.seeds or grid.budget.seeds))
    text = " ".join(command.section.split()).replace("(", "")
    noun = "seeds" if "," in seeds else "seed"
    assert re.search(rf"\b{noun} {seeds}(?!, \d)", text, re.IGNORECASE)


@pytest.mark.parametrize("command", ON_OTHER_JOBS, ids=lambda c: " ".join(c.base))
def test_the_jobs_of_a_command_can_replace_those_of_the_experiment(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of jobs that the command does not name are left out; others are not."""
    grid, path = load_grid(command.name)
    method = load_table(f"{path.parent.name}/{grid.base}")[0]["method"]
    (tmp_path / "my-job.toml").write_text(f'method = "{method}"\n', "utf-8")
    monkeypatch.chdir(tmp_path)
    jobs = choose_jobs(grid, path.parent.name, command.base)
    rows, missing = select_grid_rows(grid, jobs, full=False)
    assert rows
    assert {row.base for row in rows}.isdisjoint(missing)
    assert len(jobs.replacements) == len(command.base)
