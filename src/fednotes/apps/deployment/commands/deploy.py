"""The commands of a network: its kits, their check, and runs.

Each ends with what to do next.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fednotes.apps.deployment.commands.server import Kit
from fednotes.cli.all_commands import DEPLOY, in_panel
from fednotes.cli.shared import Settings, console, say
from fednotes.core.cleaning import clean
from fednotes.core.errors import ConfigError, FednotesError, RefusedError, TrainingError

if TYPE_CHECKING:
    from fednotes.apps.deployment.nvflare.authority import ProjectConfig, Secret
    from fednotes.apps.deployment.runs import Run
    from fednotes.core.stopping import Interrupt
    from fednotes.jobs.results import RunResult


@in_panel(DEPLOY)
def provision(
    project: Annotated[
        Path, typer.Argument(help="The project's TOML file: name, server, sites.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder of the kits; existing kits are kept.")
    ],
    again: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Revoke a lost kit and create it again."),
    ] = None,
    revoke: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Revoke a kit."),
    ] = None,
    sign: Annotated[
        Path | None,
        typer.Option(metavar="REQUEST", help="Sign a request of `fednotes kit renew`."),
    ] = None,
    new_root: Annotated[
        bool,
        typer.Option(
            "--new-root", help="Replace the root certificate that signs kits."
        ),
    ] = False,
    overlap: Annotated[
        int,
        typer.Option(
            metavar="DAYS", min=1, help="Days for which the replaced root stays valid."
        ),
    ] = 90,
    protect: Annotated[
        bool,
        typer.Option(
            "--protect", help="Encrypt the authority's key with a passphrase."
        ),
    ] = False,
    passphrase: Annotated[
        Path | None,
        typer.Option(
            "--passphrase-file",
            metavar="FILE",
            help="Read the passphrase from here, /dev/fd/3 too; with --protect a new one from the "
            "next line. Without it the terminal asks.",
        ),
    ] = None,
) -> None:
    """Create the kits of a network's server, sites and admin.

    Also what its authority does later: revoke kits, renew them, replace the root.
    """
    from fednotes.apps.deployment.nvflare.authority import ProjectConfig, folders
    from fednotes.apps.deployment.nvflare.authority import provision as make
    from fednotes.apps.deployment.nvflare.certificates import TRUST
    from fednotes.core.settings import build, read_toml

    network = build(ProjectConfig, read_toml(project), str(project))
    secret = _passphrase(passphrase)
    if sign is not None or new_root or protect or revoke:
        _at_authority(network, out, secret, sign, overlap if new_root else 0, protect)
        if not (revoke or again):
            return
    there = {name for name, folder in folders(network, out).items() if folder.exists()}
    kits = make(network, out, tuple(again or ()), tuple(revoke or ()), secret)
    for name, folder in kits.items():
        kept = (
            "kept"
            if folder.exists()
            else "handed over earlier; to replace it: --again " + name
        )
        say(
            f"{name}: {folder} ({kept if name in there or not folder.exists() else 'new'})"
        )
    if revoke or again:
        names = ", ".join([*(revoke or ()), *(again or ())])
        say(f"{names}: what is on record as made before counts no more")
        where = f"{out / TRUST} to the server, and to who is offline"
        say(f"next: {where}: fednotes kit trust KIT FILE")
    say(f"{out / 'authority'} signs new kits: keep it offline, hand it to nobody")
    say(
        "next: give each its folder over a channel you trust; there: fednotes preflight KIT"
    )


def _at_authority(
    network: ProjectConfig,
    out: Path,
    secret: Secret,
    sign: Path | None,
    overlap: int,
    protect: bool,
) -> None:
    """What changes the authority itself, and answers requests. overlap: 0 keeps its
    root."""
    from fednotes.apps.deployment.nvflare.authority import authority_of
    from fednotes.apps.deployment.nvflare.certificates import TRUST, bytes_of
    from fednotes.core.store import write_out

    authority, answer = authority_of(network, out, secret), b""
    if overlap:
        authority.replace(overlap)
    if protect:
        authority.protect()
    if sign is not None:
        try:
            answer = authority.renew(bytes_of(sign), network.kit_of)
        except RefusedError as error:
            raise ConfigError(f"{sign}: {error}; nothing was signed") from error
    authority.keep()
    if sign is not None:
        path = sign.with_suffix(".signed.pem")
        write_out(path, answer.decode())
        say(
            f"next: give the kit's owner {path}; there: fednotes kit renew KIT --take FILE"
        )
    if protect:
        say("the authority's key has a passphrase now; without it nobody can sign kits")
    if overlap:
        say(f"next: {out / TRUST} to the server first: fednotes kit trust KIT {TRUST}")
        say("      sites that connect get it by themselves; then renew each kit within")
        say(f"      {overlap} days: fednotes kit renew KIT")


def _passphrase(path: Path | None) -> Secret:
    """What asks for passphrases: a line of a file each, or the terminal."""
    from fednotes.apps.deployment.nvflare.certificates import bytes_of

    lines = None if path is None else iter(bytes_of(path).splitlines())

    @cache
    def ask(what: str) -> bytes:
        if lines is not None:
            if not (line := next(lines, b"")):
                raise ConfigError(f"{path}: has no line for {what}")
            return line
        if not sys.stdin.isatty():
            raise ConfigError(
                f"{what} is needed: run this in a terminal, or --passphrase-file FILE"
            )
        new = what.startswith("a new")
        text: str = typer.prompt(
            what, hide_input=True, confirmation_prompt=new, err=True
        )
        return text.encode()

    return ask


@in_panel(DEPLOY)
def preflight(kit: Kit) -> None:
    """Check whether a kit can run, with a remedy for each problem."""
    from fednotes.apps.deployment.nvflare.kit import read_kit
    from fednotes.apps.deployment.nvflare.processes import status
    from fednotes.apps.deployment.preflight import preflight as check
    from fednotes.apps.deployment.status import connection
    from fednotes.cli.display import sheet

    checks = check(kit)
    table = sheet("check", "", "finding", left=3)
    marks = {True: ("ok", ""), False: ("wrong", "bold red"), None: ("look", "yellow")}
    for found in checks:
        mark, style = marks[found.ok]
        table.add_row(
            found.what, mark, Text(clean(found.told), overflow="fold"), style=style
        )
    console.print(table)
    wrong = [found for found in checks if found.ok is False]
    if wrong:
        raise FednotesError(
            f"{kit}: {len(wrong)} of the checks above must be mended first"
        )
    role = read_kit(kit).role
    if role != "admin" and (process := status(kit)).running:
        up, told = connection(kit, process) if role == "site" else (True, "")
        if up:
            say(f"next: it runs; fednotes {role} status {kit}")
        else:
            say(f"{told}, but its port does: as while it starts, and for a revoked kit")
            say(
                f"next: for the coordinator's trust.pem: fednotes kit trust {kit} trust.pem"
            )
        return
    following = {
        "server": f"fednotes server start {kit}",
        "site": f"fednotes site start {kit} --site FILE",
        "admin": f"fednotes run JOB --on {kit} --out RUN",
    }
    say(f"next: {following[role]}")


@in_panel(DEPLOY)
def run(
    job: Annotated[
        str, typer.Argument(help="A job file, or the name of a built-in job.")
    ] = "",
    on: Annotated[Path | None, typer.Option(help="The admin's kit.")] = None,
    out: Annotated[Path, typer.Option(help="Folder to create for the run.")] = Path(
        "run"
    ),
    settings: Settings = None,
    attach: Annotated[
        bool, typer.Option("--attach", help="Follow the run in OUT again.")
    ] = False,
    abort: Annotated[
        bool, typer.Option("--abort", help="Abort the run in OUT permanently.")
    ] = False,
) -> None:
    """Run a job at the sites of a network, and fetch its results."""
    from fednotes.core.stopping import end_at_once

    if attach + abort + bool(job) != 1:
        raise ConfigError(
            "give a job to hand in, or --attach --out RUN to go on watching one, or --abort "
            "--out RUN to end one"
        )
    with end_at_once("stopped; nothing was handed in") as farewell:
        if abort:
            farewell.line = (
                f"stopped; the run may go on: fednotes run --abort --out {out}"
            )
            _abort(out, on)
        elif attach:
            farewell.line = _goes_on(out)
            _watch(_known(out, on), out)
        else:
            _watch(_handed_in(job, on, out, settings, farewell), out, fresh=True)


def _goes_on(out: Path) -> str:
    return f"the run goes on; to watch it again: fednotes run --attach --out {out}"


def _known(out: Path, on: Path | None) -> Run:
    from fednotes.apps.deployment.runs import read_run

    known = read_run(out)
    return known if on is None else replace(known, kit=on.resolve())


def _handed_in(
    job: str,
    on: Path | None,
    out: Path,
    settings: list[str] | None,
    farewell: Interrupt,
) -> Run:
    """Hand a job in as a run that has OUT; no run is at the server that no folder
    knows."""
    from fednotes.apps.deployment.runs import (
        admin_kit,
        claim,
        hand_in,
        prepare,
        release,
    )
    from fednotes.jobs.declaration import load_declared

    if on is None:
        raise ConfigError("--on KIT: the admin's kit is needed")
    kit, person = admin_kit(on)
    parsed, declared = load_declared(job, tuple(settings or ()))
    known, least = prepare(parsed, declared, kit, out, time.time())
    for text in parsed.module.warnings(parsed.config):
        say(f"warning: {text}")
    from fednotes.apps.deployment.nvflare.server import connect

    claim(known, declared, out)
    farewell.undo = lambda: release(out)
    handing = False
    try:
        with connect(kit, person) as session:
            handing, farewell.undo = True, None
            farewell.line = f"stopped while it was handed in; whether it was: fednotes run --attach --out {out}"
            hand_in(session, known, declared, least, out)
    except BaseException as error:
        if not handing or not isinstance(error, TrainingError):
            release(out)  # the server has nothing
        raise
    farewell.line = _goes_on(out)
    say(f"handed in as run {known.name}, job {known.fingerprint[:12]}")
    return known


def _watch(known: Run, out: Path, fresh: bool = False) -> None:
    from fednotes.apps.deployment.nvflare.server import connect
    from fednotes.apps.deployment.runs import Follower, admin_kit, watched
    from fednotes.cli.display import RichDisplay

    kit, person = admin_kit(known.kit)
    with RichDisplay(console) as display:
        follower = Follower(replace(known, kit=kit), out, display, say, fresh)
        result = watched(follower, partial(connect, kit, person))
    _told(out, known.name, result)


def _abort(out: Path, on: Path | None) -> None:
    from fednotes.apps.deployment.nvflare.server import connect
    from fednotes.apps.deployment.runs import abort, admin_kit

    known = _known(out, on)
    kit, person = admin_kit(known.kit)
    with connect(kit, person) as session:
        abort(session, known, out)
    say(f"run {known.name} was aborted; the server hands it in no more")
    say(
        f"each site keeps what it has of it: KIT/state/{known.name}, and its ledger and decisions"
    )
    say("next: what waited behind it begins by itself; another job takes another --out")


def _told(out: Path, name: str, result: RunResult) -> None:
    from fednotes.jobs.card import write_cards
    from fednotes.report.html import write_report

    f1 = result.metrics.get("valid_f1")
    judged = f", F1 {f1:.3f} on all sites' validation data" if f1 is not None else ""
    rounds = result.conditions.get("federated", {}).get("rounds")
    say(f"done: {rounds} rounds in {result.seconds or 0:.0f} s{judged}")
    say(*result.notes)
    for sharing, scores in result.sites.items():
        if scores:
            say(f"{sharing} shares its scores: {json.dumps(scores['federated'])[:200]}")
    write_cards(out)
    say(f"report: {write_report(out)}")
    say(f"each site has its model and its own scores in KIT/results/{name}")
    made = out / "model"
    place = made if made.exists() else Path("KIT") / "results" / name / "model"
    where = "" if made.exists() else "at a site: "
    first, *more = (line.format(place=place) for line in result.words["next"])
    say(f"next: {where}{first}", *(f"      {line}" for line in more))
