"""The command `ledger`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from fednotes.apps.deployment.commands.server import Kit
from fednotes.cli.all_commands import INSPECT
from fednotes.cli.plain_help import with_examples
from fednotes.cli.shared import Json, console, print_json, say
from fednotes.core.cleaning import NAME, clean
from fednotes.core.errors import FednotesError

ledger = typer.Typer(
    help="Inspect the record of what left a site.",
    no_args_is_help=True,
    rich_help_panel=INSPECT,
)


def _ledger_path(kit: Path) -> Path:
    from fednotes.apps.deployment.nvflare.kit import read_kit
    from fednotes.apps.deployment.rules.ledger import ledger_of

    read_kit(kit)  # raises for a folder that is not a kit
    return ledger_of(kit).path


@ledger.command("verify")
@with_examples(
    "fednotes ledger verify kits/sites/mercy",
)
def ledger_verify(
    kit: Kit,
    noted: Annotated[
        str | None,
        typer.Option(
            metavar="LINES:HASH",
            help="LINES:HASH that an earlier verify printed; detects a rewritten "
            "ledger.",
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Verify that no line of the ledger was altered, removed or moved."""
    from fednotes.apps.deployment.rules.ledger import noted_end, verify

    end = noted_end(noted) if noted is not None else None
    report = verify(_ledger_path(kit), end)
    if not report.ok:
        faults = str(report).replace("\n", "; ")
        raise FednotesError(f"{faults}; keep both files as evidence")
    if json_output:
        digest = None if report.head is None else report.head.hash
        print_json({"lines": report.lines, "hash": digest, "notes": report.notes})
        return
    say(*str(report).splitlines())
    if noted is not None:
        say("the ledger contains the hash that was noted")
    if report.head is not None and report.head.lines:
        head = f"{report.head.lines}:{report.head.hash}"
        say(
            f"next: note {head} elsewhere; later: fednotes ledger verify {kit} --noted "
            f"{head}"
        )


@ledger.command("show")
@with_examples(
    "fednotes ledger show kits/sites/mercy --tail 5",
)
def ledger_show(
    kit: Kit,
    run: Annotated[str | None, typer.Option(help="Show this run only.")] = None,
    first: Annotated[
        int, typer.Option("--first-round", min=0, help="First round to show.")
    ] = 0,
    last: Annotated[
        int | None, typer.Option("--last-round", help="Last round to show.")
    ] = None,
    tail: Annotated[
        int,
        typer.Option(min=0, help="Show only this many of the last lines; 0 shows all."),
    ] = 20,
    json_output: Json = False,
) -> None:
    """List what left the site: time, round, task, tensors, bytes, hash.

    --json adds the name, shape and norm of each tensor.
    """
    from fednotes.apps.deployment.rules.ledger import show

    all_lines = list(show(_ledger_path(kit), run=run, first=first, last=last))
    lines = all_lines[-tail:] if tail else all_lines
    if json_output:
        print_json(lines)
        return
    for name in dict.fromkeys(line["run"] for line in lines):
        console.print(_table(name, [line for line in lines if line["run"] == name]))
    say(
        f"{len(lines):,} of {len(all_lines):,} lines; each tensor's name, shape and "
        "norm: --json"
    )
    say(f"next: fednotes ledger verify {kit}")


def _table(run: str, lines: list[dict[str, Any]]) -> Table:
    """Return a table of the lines of one run."""
    title = Text(f"run {clean(run, NAME)}")
    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
    for heading in ("line", "time", "round", "task", "tensors", "bytes", "SHA-256", ""):
        is_number = heading in ("line", "round", "tensors", "bytes")
        table.add_column(
            heading,
            justify="right" if is_number else "left",
            no_wrap=heading in ("time", "bytes", "SHA-256"),
            overflow="fold",
        )
    for line in lines:
        table.add_row(
            f"{line['seq']}",
            line["time"][5:19].replace("T", " "),
            f"{line['round']}",
            Text(clean(line["task"], NAME)),
            f"{len(line['tensors'])}",
            f"{line['bytes']:,}",
            line["sha256"][:8],
            _remark(line),
        )
    return table


def _remark(line: dict[str, Any]) -> str:
    """Return "masked", the reason for a refusal, or "" for a plain update."""
    if line.get("refusal"):
        return clean(line.get("reason") or "refusal", NAME)
    return "masked" if line["masked"] else ""
