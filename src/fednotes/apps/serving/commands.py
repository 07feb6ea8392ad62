"""The commands `serve` and `export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fednotes.cli.all_commands import USE, RegisteredCommands, in_panel
from fednotes.cli.plain_help import OldName, with_examples
from fednotes.cli.shared import Backbone, Device, Dictionary, Port, say, showing_work
from fednotes.core import plugins


class ExportCommands(RegisteredCommands):
    """The group `fednotes export`."""

    entry_points = "export_commands"


export = typer.Typer(
    cls=ExportCommands,
    help="Export a saved model or a run for other programs.",
    no_args_is_help=True,
    rich_help_panel=USE,
    rich_markup_mode=None,
)

Saved = Annotated[Path, typer.Argument(metavar="MODEL", help="A saved model's folder.")]
New = Annotated[
    Path, typer.Argument(metavar="OUT", help="New or empty folder to write to.")
]


@export.command("hf")
@with_examples(
    "fednotes export hf runs/first/federated/model out/",
)
def export_hf(model: Saved, out: New) -> None:
    """Export a token classifier as a Hugging Face directory."""
    from fednotes.apps.serving import exports

    with showing_work("exporting"):
        exports.export(model, "hf", out)
    say(
        f'{out}: load it with pipeline("token-classification", "{out}", '
        'aggregation_strategy="first")'
    )


@export.command("onnx")
@with_examples(
    "fednotes export onnx runs/first/federated/model out/ --int8",
)
def export_onnx(
    model: Saved,
    out: New,
    int8: Annotated[
        bool, typer.Option("--int8", help="Quantise the weights to eight bits.")
    ] = False,
) -> None:
    """Export a light tagger or token classifier as an ONNX graph."""
    from fednotes.apps.serving import exports

    with showing_work("exporting"):
        exports.export(model, "onnx", out, int8=int8)
    say(f"{out}: model.onnx and its data; docs/use.md has a program that reads them")


@with_examples(
    "fednotes export sklearn runs/first/federated/model out/",
)
def export_sklearn(
    model: Saved,
    out: New,
    dictionary: Dictionary = None,
) -> None:
    """Export a phenotyping model as a scikit-learn pipeline."""
    from fednotes.apps.serving import exports

    with showing_work("exporting"):
        exports.export(model, "sklearn", out, dictionary=dictionary)
    say(f'{out}: load it with skops.io.load("{out}/pipeline.skops")')


if "sklearn" in plugins.list_entries("exports"):  # a format of another application
    export.command("sklearn")(export_sklearn)


@export.command("card")
@with_examples(
    "fednotes export card runs/first/federated/model README.md",
)
def export_card(
    model: Saved,
    out: Annotated[
        Path | None, typer.Argument(help="File to write; stdout by default.")
    ] = None,
) -> None:
    """Write the card of a model: its training, privacy and scores."""
    from fednotes.apps.serving import exports
    from fednotes.jobs.card import render_card

    if out is None:
        sys.stdout.write(render_card(model))
    else:
        exports.export(model, "card", out)


@in_panel(USE)
@with_examples(
    "fednotes serve runs/first/federated/model --port 8000",
    "fednotes serve runs/first/federated/model --host 0.0.0.0 \\",
    "    --token-file token --certificate tls.pem --certificate-key tls.key",
)
def serve(
    model: Annotated[Path, typer.Argument(help="A saved model's folder.")],
    host: Annotated[
        str,
        typer.Option(
            help="Address to listen on; addresses other than loopback require "
            "--token-file."
        ),
    ] = "127.0.0.1",
    port: Port = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that requests must send.")
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(help="PEM file with the server's certificate chain, for TLS."),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(
            "--certificate-key",
            OldName("--key"),
            help="PEM file with the certificate's private key.",
        ),
    ] = None,
    max_requests: Annotated[
        int, typer.Option(min=1, help="Maximum number of concurrent requests.")
    ] = 64,
    max_texts: Annotated[
        int,
        typer.Option(min=1, help="Maximum number of texts or patients per request."),
    ] = 64,
    max_notes: Annotated[
        int,
        typer.Option(min=1, help="Maximum number of notes per table, with --batch."),
    ] = 100_000,
    max_characters: Annotated[
        int, typer.Option(min=1, help="Maximum number of characters per text.")
    ] = 100_000,
    max_bytes: Annotated[
        int, typer.Option(min=1, help="Maximum size of a request in bytes.")
    ] = 4_000_000,
    max_values: Annotated[
        int, typer.Option(min=1, help="Maximum number of JSON values per request.")
    ] = 20_000,
    batch: Annotated[
        bool,
        typer.Option("--batch", help="Also accept tables of notes, at POST /batch."),
    ] = False,
    device: Device = "cpu",
    backbone: Backbone = None,
    dictionary: Dictionary = None,
) -> None:
    """Serve a saved model's predictions over HTTP until Ctrl-C."""
    from fednotes.apps.serving.limits import Limits
    from fednotes.apps.serving.server import serve as serve_model
    from fednotes.jobs.models import load

    limits = Limits(
        max_bytes=max_bytes,
        max_values=max_values,
        max_texts=max_texts,
        max_notes=max_notes,
        max_characters=max_characters,
        max_requests=max_requests,
    )
    serve_model(
        load(model, device, backbone, dictionary=dictionary),
        host,
        port,
        token_file=token_file,
        certificate=certificate,
        key=key,
        limits=limits,
        batch=batch,
        tell=say,
    )
