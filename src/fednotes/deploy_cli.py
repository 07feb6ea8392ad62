"""The commands of a network: its kits, their check, and runs. Each ends with what to do next."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.table import Table
from rich.text import Text

from fednotes.cli_groups import console, say
from fednotes.core.errors import ConfigError, FednotesError
from fednotes.kit_cli import Kit, server, site
from fednotes.ledger_cli import ledger

Settings = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this form
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job, e.g. seed=2."),
]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for name, group in (("site", site), ("server", server), ("ledger", ledger)):
        app.add_typer(group, name=name)
    for command in (provision, preflight, run):
        app.command()(command)


def provision(
    project: Annotated[Path, typer.Argument(help="A project's TOML: name, server, sites.")],
    out: Annotated[Path, typer.Option(help="The folder of kits; it may have some already.")],
) -> None:
    """Make one folder for the server, each site and the admin, to hand over."""
    from fednotes.core.settings import build, read_toml
    from fednotes.engines.provision import ProjectConfig
    from fednotes.engines.provision import provision as make

    kits = make(build(ProjectConfig, read_toml(project), str(project)), out)
    for name, folder in kits.items():
        say(f"{name}: {folder}")
    say(f"{out / 'authority'} signs new kits: keep it offline, hand it to nobody")
    say("next: give each its folder over a channel you trust; there: fednotes preflight KIT")


def preflight(kit: Kit) -> None:
    """What would stop a kit, each with the remedy."""
    from fednotes.engines.provision import read_kit
    from fednotes.preflight import preflight as check

    checks = check(kit)
    table = Table()
    for head in ("check", "", "finding"):
        table.add_column(head)
    marks = {True: ("ok", ""), False: ("wrong", "bold red"), None: ("look", "yellow")}
    for found in checks:
        mark, style = marks[found.ok]
        table.add_row(found.what, mark, Text(found.told, overflow="fold"), style=style)
    console.print(table)
    wrong = [found for found in checks if found.ok is False]
    if wrong:
        raise FednotesError(f"{kit}: {len(wrong)} of the checks above must be mended first")
    role = read_kit(kit)["role"]
    following = {
        "server": f"fednotes server start {kit}",
        "site": f"fednotes site start {kit} --site FILE",
        "admin": f"fednotes run JOB --on {kit} --out RUN",
    }
    say(f"next: {following.get(str(role), '')}")


def run(
    job: Annotated[
        str, typer.Argument(help="A job file, or a built-in job; not to --attach.")
    ] = "",
    on: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="The admin's kit."),
    ] = None,
    out: Annotated[Path, typer.Option(help="A new folder for the run.")] = Path("run"),
    settings: Settings = None,
    attach: Annotated[
        bool, typer.Option("--attach", help="Go on watching the run that OUT is of.")
    ] = False,
) -> None:
    """Run a job at the sites of a network: hand it in, watch it, fetch what it made."""
    from fednotes.display import RichDisplay
    from fednotes.runs import Follower, admin_kit, hand_in, prepare, quietly, read_run, watched

    if attach == bool(job):
        raise ConfigError("give a job to hand in, or --attach --out RUN to go on watching one")
    if attach:
        known = read_run(out)
        if on is not None:
            known = replace(known, kit=on.resolve())
        kit, person = admin_kit(known.kit)
    else:
        from fednotes.deployed_jobs import load_deployed

        if on is None:
            raise ConfigError("--on KIT: the admin's kit is needed")
        kit, person = admin_kit(on)
        parsed, declared = load_deployed(job, tuple(settings or ()))
        known, least = prepare(parsed, declared, kit, out, time.time())
    from fednotes.engines.nvflare import connect

    with RichDisplay(console) as display:
        if not attach:
            for text in getattr(parsed.module, "warnings", lambda config: ())(parsed.config):
                display.warn(text)
            with quietly(connect, known, person) as session:
                hand_in(session, known, declared, least, out)
            say(f"handed in as run {known.name}, job {known.fingerprint[:12]}")
            say("each site is asked to approve it: there, fednotes site approve KIT")
        follower = Follower(known, out, display, say)
        try:
            summary = watched(follower, partial(quietly, connect, known, person))
        except KeyboardInterrupt:
            print(
                f"the run goes on; to watch it again: fednotes run --attach --out {out}",
                file=sys.stderr,
            )
            sys.exit(130)
    _told(out, known.name, summary)


def _told(out: Path, name: str, summary: dict[str, Any]) -> None:
    f1 = summary.get("metrics", {}).get("valid_f1")
    judged = f", F1 {f1:.3f} on all sites' validation data" if f1 is not None else ""
    say(f"done: {summary.get('rounds')} rounds in {summary.get('seconds', 0):.0f} s{judged}")
    for place, scores in summary.get("scores", {}).items():
        say(f"{place} shares its scores: {json.dumps(scores)[:200]}")
    say(f"each site has its model and its own scores in KIT/results/{name}")
    if (out / "model").exists():
        say(f"next: fednotes predict {out / 'model'} TEXT")
    else:
        say(f"next: at a site: fednotes predict KIT/results/{name}/model TEXT")
