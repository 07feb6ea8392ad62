"""The commands that look at a site's ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.table import Table
from rich.text import Text

from fednotes.cli_groups import console, say
from fednotes.core.errors import FednotesError

ledger = typer.Typer(help="What left a site.", no_args_is_help=True)

Kit = Annotated[Path, typer.Argument(help="A kit's folder.")]


def _ledger(kit: Path) -> Path:
    from fednotes.engines.provision import read_kit
    from fednotes.guard import ledger_of

    read_kit(kit)
    return ledger_of(kit).path


@ledger.command("verify")
def ledger_verify(kit: Kit) -> None:
    """Whether the ledger is as it was written: no line altered, removed, added or moved."""
    from fednotes.privacy.ledger_check import verify

    report = verify(_ledger(kit))
    if not report.ok:
        raise FednotesError(f"{report}; keep both files as evidence".replace("\n", "; "))
    say(str(report))
    say("next: note the last hash elsewhere, so that a rewritten history shows")


@ledger.command("show")
def ledger_show(
    kit: Kit,
    run: Annotated[Optional[str], typer.Option(help="Of this run alone.")] = None,  # noqa: UP045
    first: Annotated[int, typer.Option(min=0, help="From this round on.")] = 0,
    last: Annotated[Optional[int], typer.Option(help="Up to this round.")] = None,  # noqa: UP045
    json_output: Annotated[bool, typer.Option("--json", help="Lines as they are.")] = False,
) -> None:
    """What left: when, of which round and task, which tensors, how many bytes."""
    from fednotes.privacy.ledger import show

    lines = show(_ledger(kit), run=run, first=first, last=last)
    if json_output:
        for line in lines:
            print(json.dumps(line))
        return
    table = Table()
    for head in ("line", "time", "run", "round", "task", "tensors", "bytes", "masked"):
        right = head in ("line", "round", "tensors", "bytes")
        table.add_column(head, justify="right" if right else "left", overflow="fold")
    for line in lines:
        cells = (line["seq"], line["time"], line["run"], line["round"], line["task"])
        numbers = (len(line["tensors"]), f"{line['bytes']:,}", "yes" if line["masked"] else "")
        table.add_row(*(Text(str(cell)) for cell in (*cells, *numbers)))
    console.print(table)
    say(f"next: fednotes ledger verify {kit}")
