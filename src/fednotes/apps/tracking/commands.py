"""The commands `fednotes export mlflow` and `fednotes export tensorboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fednotes.cli.plain_help import with_examples
from fednotes.cli.shared import say
from fednotes.core.databases import hide_passwords

Run = Annotated[
    Path,
    typer.Argument(
        metavar="RUN", help="Folder of a run, or of runs with several seeds."
    ),
]


@with_examples(
    "fednotes export mlflow runs/first --uri http://127.0.0.1:5000",
)
def export_mlflow(
    run: Run,
    uri: Annotated[
        str, typer.Option(help="Tracking URI: the address of a server, or a folder.")
    ],
    experiment: Annotated[
        str, typer.Option(help="Name of the experiment.")
    ] = "fednotes",
) -> None:
    """Write a run to MLflow: settings, curves, scores and files."""
    from fednotes.apps.tracking import export

    number = export.export_mlflow(run, uri, experiment=experiment)
    runs = "1 run" if number == 1 else f"{number} runs"
    say(f"{hide_passwords(uri)}: {runs} in experiment {experiment}")


@with_examples(
    "fednotes export tensorboard runs/first events/",
)
def export_tensorboard(
    run: Run,
    out: Annotated[
        Path, typer.Argument(help="Folder for TensorBoard to show; may already exist.")
    ],
) -> None:
    """Write a run for TensorBoard: its settings, curves and scores."""
    from fednotes.apps.tracking import export

    number = export.export_tensorboard(run, out)
    say(f"{out}: {number} run{'s' if number > 1 else ''}")
    say(f"next: show the folder {out} in TensorBoard")
