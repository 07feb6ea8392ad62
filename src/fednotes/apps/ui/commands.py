"""The command `ui`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fednotes.cli.all_commands import USE, in_panel
from fednotes.cli.plain_help import with_examples
from fednotes.cli.shared import (
    Backbone,
    Device,
    EncodingOption,
    FormatOption,
    Labels,
    OnError,
    OnErrorOption,
    Port,
    say,
)
from fednotes.core.stopping import Stopped


@in_panel(USE)
@with_examples(
    "fednotes ui runs/first runs/second",
    "fednotes ui runs/first/federated/model notes/",
)
def ui(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN…|MODEL [NOTES…]",
            help="Runs or folders of runs; a model and notes; or a site's kit.",
        ),
    ],
    port: Port = 0,
    format: FormatOption = "",
    on_error: OnErrorOption = OnError.refuse,
    encoding: EncodingOption = "auto",
    corrections: Annotated[
        Path | None,
        typer.Option(help="File to save decisions in; by default beside NOTES or RUN."),
    ] = None,
    device: Device = "cpu",
    backbone: Backbone = None,
    labels: Labels = None,
) -> None:
    """Open the local web UI for runs, a model's errors, or a kit.

    For a site's kit, show its ledger and approvals.
    """
    from fednotes.apps.ui.background import is_work_running
    from fednotes.apps.ui.pages import open_ui

    try:
        open_ui(
            *paths,
            port=port,
            format=format,
            on_error=on_error.value,
            encoding=encoding,
            corrections=corrections,
            device=device,
            backbone=backbone,
            labels=labels,
            tell=say,
        )
    except Stopped as stopped:
        if is_work_running():
            # An ordinary exit would end the thread within PyTorch, which then aborts.
            stopped.end_process()
        raise
