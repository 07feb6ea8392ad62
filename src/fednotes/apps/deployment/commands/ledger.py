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


def _find_ledger(kit: Path) -> Path:
    """Return the ledger's file; raise ConfigError for a folder that is not a kit."""
    from fednotes.apps.deployment.nvflare.kit import read_kit
    from fednotes.apps.deployment.rules.ledger import Ledger

    read_kit(kit)
    return Ledger.in_kit(kit).path


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
            help="Value that an earlier `ledger verify` printed; detects a rewritten "
            "ledger.",
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Verify that no line of the ledger was altered, removed or moved."""
    from fednotes.apps.deployment.rules.ledger import parse_noted_end, verify_ledger

    noted_end = None if noted is None else parse_noted_end(noted)
    report = verify_ledger(_find_ledger(kit), noted_end)
    if not report.is_intact:
        faults = str(report).replace("\n", "; ")
        raise FednotesError(f"{faults}; keep both files as evidence")
    head = report.head
    if json_output:
        digest = None if head is None else head.hash
        print_json({"lines": report.lines, "hash": digest, "notes": report.notes})
        return
    say(*str(report).splitlines())
    if noted_end is not None:
        say("the ledger contains the hash that was noted")
    if head is not None and head.lines:
        end = f"{head.lines}:{head.hash}"
        say(
            f"next: note {end} elsewhere; later: fednotes ledger verify {kit} --noted "
            f"{end}"
        )


@ledger.command("show")
@with_examples(
    "fednotes ledger show kits/sites/mercy --tail 5",
)
def ledger_show(
    kit: Kit,
    run: Annotated[str | None, typer.Option(help="Show this run only.")] = None,
    first: Annotated[
        int, typer.Option("--first-round", min=1, help="First round to show.")
    ] = 1,
    last: Annotated[
        int | None, typer.Option("--last-round", min=1, help="Last round to show.")
    ] = None,
    tail: Annotated[
        int,
        typer.Option(min=0, help="Number of most recent lines to show; 0 shows all."),
    ] = 20,
    json_output: Json = False,
) -> None:
    """List what left the site: time, round, task, tensors, bytes, hash.

    Rounds count from 1. With --json, also list the name, shape and norm of each tensor,
    and count rounds from 0, as the ledger file does.
    """
    from fednotes.apps.deployment.rules.ledger import read_ledger_lines

    all_lines = list(
        read_ledger_lines(
            _find_ledger(kit),
            run=run,
            first=first - 1,
            last=None if last is None else last - 1,
        )
    )
    lines = all_lines[-tail:] if tail else all_lines
    if json_output:
        print_json(lines)
        return
    lines_by_run: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        lines_by_run.setdefault(line["run"], []).append(line)
    for name, lines_of_run in lines_by_run.items():
        console.print(_make_table(name, lines_of_run))
    if any(line.get("refusal") for line in lines):
        say("refused: this site's rules kept the answer back; only the reason left")
    say(
        f"{len(lines):,} of {len(all_lines):,} lines; each tensor's name, shape and "
        "norm: --json"
    )
    say(f"next: fednotes ledger verify {kit}")


def _make_table(run: str, lines: list[dict[str, Any]]) -> Table:
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
            _format_time(line["time"]),
            f"{line['round'] + 1}",
            Text(_describe_task(line["task"])),
            f"{len(line['tensors'])}",
            f"{line['bytes']:,}",
            line["sha256"][:8],
            _describe_line(line),
        )
    return table


def _format_time(stamp: str) -> str:
    """Return a time without its year and its fractions of a second."""
    without_fraction, _, _ = stamp.partition(".")
    _, _, without_year = without_fraction.partition("-")
    return without_year.replace("T", " ")


def _describe_task(task: str) -> str:
    """Return the task that a message answers, in words."""
    from fednotes.apps.deployment.site_agreement import DESCRIBE, SCORES

    words = {DESCRIBE: "description", SCORES: "test scores", "-": "start"}
    return words.get(task, clean(task, NAME))


def _describe_line(line: dict[str, Any]) -> str:
    """Return "masked", that and why it is a refusal, or "" for a plain update."""
    if line.get("refusal"):
        reason = clean(line.get("reason") or "", NAME)
        return f"refused: {reason}" if reason else "refused"
    return "masked" if line["masked"] else ""
