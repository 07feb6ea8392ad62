"""The commands of experiments: `reproduce` and `attention`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fednotes.cli.all_commands import TRAIN, in_panel
from fednotes.cli.completers import complete_from
from fednotes.cli.plain_help import OldName, with_examples
from fednotes.cli.shared import (
    SEEDS,
    SEEDS_HELP,
    Device,
    Json,
    Notes,
    Seed,
    Settings,
    Yes,
    can_ask,
    choose_console,
    console,
    name_options,
    print_json,
    say,
)
from fednotes.core.stopping import telling_how_to_resume


def _list_names() -> Iterable[str]:
    """Return the names of the experiments."""
    from fednotes.apps.experiments.grid_files import list_grid_files

    return list_grid_files()


@in_panel(TRAIN)
@with_examples(
    "fednotes reproduce",
    "fednotes reproduce fedner-table2 --seeds 1-2",
)
def reproduce(
    name: Annotated[
        str,
        typer.Argument(
            help="An experiment, such as fedner-table2; without it, list them all.",
            autocompletion=complete_from(_list_names),
        ),
    ] = "",
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for the runs; runs/reproduce by default."),
    ] = None,
    budget: Annotated[
        bool,
        typer.Option(
            "--budget/--full",
            help="Run a reduced version that takes about an hour on two cores "
            "(--budget), or the experiment at the paper's size (--full).",
        ),
    ] = True,
    base: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]JOB",
            help="Job to use instead of the experiment's own; NAME=JOB replaces the "
            "job NAME.",
        ),
    ] = None,
    settings: Settings = None,
    seeds: Annotated[
        list[str] | None,
        typer.Option("--seeds", OldName("--seed"), metavar=SEEDS, help=SEEDS_HELP),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Number of concurrent runs, one thread each.")
    ] = 2,
    device: Device = "cpu",
    yes: Yes = False,
    json_output: Json = False,
) -> None:
    """Reproduce a paper's table or figure; run it again to resume."""
    from rich.markdown import Markdown

    from fednotes.apps.experiments.attention import ENTROPY_PLOT
    from fednotes.apps.experiments.figures import plot_results
    from fednotes.apps.experiments.grids import list_experiments
    from fednotes.apps.experiments.reproduce import reproduce as run
    from fednotes.apps.experiments.tables import format_results_page
    from fednotes.cli.display import showing_runs
    from fednotes.jobs.seeds import parse_seeds

    if not name and json_output:
        print_json(list_experiments())
        return
    if not name:
        console.print(_make_experiments_table(list_experiments()))
        return
    out = out or Path("runs") / "reproduce"
    output = choose_console(as_json=json_output)
    with showing_runs(output, name) as bar, telling_how_to_resume("the same command"):
        table = run(
            name,
            out,
            full=not budget,
            settings=tuple(settings or ()),
            seed=parse_seeds(",".join(seeds)) if seeds else (),
            base=base or (),
            workers=workers,
            device=device,
            on_plan=bar.show_planning,
            on_run=bar,
            say=lambda line: say(name_options(line), to=output),
            confirm=bar.confirm if can_ask(yes or json_output) else None,
            name_parameters=name_options,
        )
    folder = out / table["name"]
    places = [str(folder / "results.md")]
    has_plot = plot_results(table, folder / "figure.png")
    if json_output:
        print_json(table)
        return
    console.print(Markdown(format_results_page(table)))
    if has_plot:
        places.append(str(folder / "figure.png"))
    # A comparison of attention heads has its own plot.
    if (folder / ENTROPY_PLOT).exists():
        places.append(str(folder / ENTROPY_PLOT))
    say(f"results: {', '.join(places)}")


def _make_experiments_table(titles: Mapping[str, str]) -> Table:
    """Return a table of the available experiments.

    Args:
        titles: The title of each experiment by its name.
    """
    table = Table("experiment", "what it shows", box=None, pad_edge=False)
    for name, title in titles.items():
        table.add_row(escape(name), escape(title))
    return table


@in_panel(TRAIN)
@with_examples(
    "fednotes attention --model a=encoders/a --model b=encoders/b \\",
    "    --notes notes.csv --out runs/attention",
)
def attention(
    model: Annotated[
        list[str],
        typer.Option(metavar="NAME=DIR", help="Model to compare; may be repeated."),
    ],
    notes: Notes,
    out: Annotated[Path, typer.Option(help="Folder for the results.")],
    category: Annotated[
        list[str] | None,
        typer.Option(help="Read only notes of this category; may be repeated."),
    ] = None,
    passages: Annotated[
        int,
        typer.Option(
            "--passages", OldName("--sample"), min=1, help="Number of passages."
        ),
    ] = 200,
    length: Annotated[int, typer.Option(min=3, help="Tokens per passage.")] = 128,
    seed: Seed = 1,
    json_output: Json = False,
) -> None:
    """Write tables comparing the attention heads of several encoders."""
    from rich.markdown import Markdown

    from fednotes.apps.experiments.attention import format_attention_page, run_attention
    from fednotes.cli.display import showing_runs

    with showing_runs(choose_console(as_json=json_output), "attention") as bar:
        facts = run_attention(
            model,
            notes,
            out,
            sample=passages,
            length=length,
            seed=seed,
            categories=category or (),
            progress=bar,
        )
    if json_output:
        print_json(facts)
        return
    console.print(Markdown(format_attention_page(facts)))
    say(f"results: {out / 'attention.md'}")
