"""The commands `provision`, `preflight` and `run`.

Each ends with a hint about what to do next.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from fednotes.apps.deployment.commands.server import Kit
from fednotes.cli.all_commands import DEPLOY, in_panel
from fednotes.cli.completers import complete_job
from fednotes.cli.plain_help import with_examples
from fednotes.cli.shared import (
    Json,
    Protect,
    Settings,
    Track,
    choose_console,
    console,
    print_json,
    say,
)
from fednotes.core.cleaning import clean
from fednotes.core.errors import ConfigError, FednotesError, RefusedError, TrainingError
from fednotes.core.parsing import find_number
from fednotes.core.wording import format_count, format_duration

if TYPE_CHECKING:
    from rich.console import Console

    from fednotes.apps.deployment.nvflare.authority import AskPassphrase, ProjectConfig
    from fednotes.apps.deployment.nvflare.processes import Status
    from fednotes.apps.deployment.preflight import Check
    from fednotes.apps.deployment.runs import AdminKit, Run
    from fednotes.core.stopping import Interrupt
    from fednotes.jobs.results import RunResult

MIN_WAITING_SECONDS = 10.0  # shorter waits of a run are not shown


@in_panel(DEPLOY)
@with_examples(
    "fednotes provision project.toml --out kits",
    "fednotes provision project.toml --out kits --again mercy",
)
def provision(
    project: Annotated[
        Path, typer.Argument(help="The project's TOML file: name, server, sites.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder for the kits; existing kits are kept.")
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
    protect: Protect = False,
    passphrase: Annotated[
        Path | None,
        typer.Option(
            "--passphrase-file",
            metavar="FILE",
            help="File with the passphrase, such as /dev/fd/3; without it, the command "
            "asks in the terminal. With --protect, the line after the current "
            "passphrase is the new one.",
        ),
    ] = None,
) -> None:
    """Create the kits of a network's server, sites and admin.

    Later, the same command revokes kits, renews them and replaces the root certificate.
    """
    from fednotes.apps.deployment.nvflare.authority import (
        ProjectConfig,
        list_kit_folders,
    )
    from fednotes.apps.deployment.nvflare.authority import provision as create_kits
    from fednotes.apps.deployment.nvflare.trust import TRUST_FILE
    from fednotes.core.settings import build, read_toml

    network = build(ProjectConfig, read_toml(project), str(project))
    ask_passphrase = _make_passphrase_reader(passphrase)
    if sign is not None or new_root or protect or revoke:
        _change_authority(
            network,
            out,
            ask_passphrase,
            request=sign,
            overlap=overlap if new_root else 0,
            protect=protect,
        )
        if not (revoke or again):
            return

    old_kits = {
        name
        for name, folder in list_kit_folders(network, out).items()
        if folder.exists()
    }
    kits = create_kits(
        network,
        out,
        again=again or (),
        revoke=revoke or (),
        ask_passphrase=ask_passphrase,
    )
    _say_kits(kits, old_kits)
    revoked_kits = [*(revoke or ()), *(again or ())]
    if revoked_kits:
        say(f"{', '.join(revoked_kits)}: every earlier kit of this name is revoked")
        say(
            f"next: give {out / TRUST_FILE} to the server, and to sites that are "
            "offline; run there: fednotes kit trust KIT FILE"
        )
    say(f"{out / 'authority'} signs new kits: keep it offline and share it with nobody")
    say(
        "next: send each participant its folder over a trusted channel, then run "
        "`fednotes preflight KIT` there"
    )


def _say_kits(kits: Mapping[str, Path], old_kits: Collection[str]) -> None:
    """Print the folder of each kit, and whether the kit is new.

    Args:
        kits: Name of each kit to its folder.
        old_kits: Names of the kits whose folders existed before.
    """
    for name, folder in kits.items():
        if not folder.exists():
            state = f"handed over earlier; to replace it: --again {name}"
        elif name in old_kits:
            state = "kept"
        else:
            state = "new"
        say(f"{name}: {folder} ({state})")


def _change_authority(
    network: ProjectConfig,
    out: Path,
    ask_passphrase: AskPassphrase,
    *,
    request: Path | None,
    overlap: int,
    protect: bool,
) -> None:
    """Change the authority itself, and sign a request.

    Args:
        network: The project.
        out: The folder of the kits and of the authority.
        ask_passphrase: Returns a passphrase; receives its purpose.
        request: A kit's request for a new certificate; None for no request.
        overlap: Days for which a replaced root stays valid; 0 keeps the root.
        protect: Whether to encrypt the authority's key.
    """
    from fednotes.apps.deployment.nvflare.authority import (
        holding_authority,
        open_authority,
    )
    from fednotes.apps.deployment.nvflare.trust import TRUST_FILE, read_bounded_file
    from fednotes.core.store import write_out

    with holding_authority(out):
        authority = open_authority(network, out, ask_passphrase)
        certificates = b""
        if overlap:
            authority.replace_root(overlap)
        if protect:
            authority.encrypt_key()
        if request is not None:
            try:
                certificates = authority.sign_requests(
                    read_bounded_file(request), network.find_kit
                )
            except RefusedError as error:
                raise ConfigError(f"{request}: {error}; nothing was signed") from error
        authority.save()

    if request is not None:
        answer = request.with_suffix(".signed.pem")
        write_out(answer, certificates.decode())
        say(
            f"next: give {answer} to the kit's owner; run there: fednotes kit renew "
            "KIT --take FILE"
        )
    if protect:
        say("the authority's key now has a passphrase; without it nobody can sign kits")
    if overlap:
        say(
            f"next: send {out / TRUST_FILE} to the server first, then run `fednotes "
            f"kit trust KIT {TRUST_FILE}` there"
        )
        say("      sites that connect receive it automatically; then renew each kit")
        say(f"      within {overlap} days: fednotes kit renew KIT")


def _make_passphrase_reader(path: Path | None) -> AskPassphrase:
    """Return a function that asks for each passphrase once and then remembers it.

    Args:
        path: A file with a passphrase on each line; None to ask in the terminal.
    """
    from fednotes.apps.deployment.nvflare.trust import read_bounded_file

    lines = None if path is None else iter(read_bounded_file(path).splitlines())

    @cache
    def ask(what: str) -> bytes:
        """Return the passphrase for a purpose, from the file or the terminal."""
        if lines is not None:
            line = next(lines, b"")
            if not line:
                raise ConfigError(
                    f"{path} has no line for {what}: put each passphrase on a line of "
                    "its own"
                )
            return line
        if not sys.stdin.isatty():
            raise ConfigError(
                f"{what} is needed: run this in a terminal, or give --passphrase-file "
                "FILE"
            )
        text: str = typer.prompt(
            what,
            hide_input=True,
            confirmation_prompt=what.startswith("a new"),
            err=True,
        )
        return text.encode()

    return ask


@in_panel(DEPLOY)
@with_examples(
    "fednotes preflight kits/sites/mercy",
)
def preflight(kit: Kit, json_output: Json = False) -> None:
    """Check whether a kit can run; show a remedy for each problem."""
    from fednotes.apps.deployment.nvflare.kit import read_kit
    from fednotes.apps.deployment.nvflare.processes import read_status
    from fednotes.apps.deployment.preflight import run_checks

    checks = run_checks(kit)
    if json_output:
        print_json([asdict(check) for check in checks])
    else:
        _show_checks(checks)
    num_failures = sum(check.ok is False for check in checks)
    if num_failures:
        raise FednotesError(
            f"{kit}: {format_count(num_failures, 'check')} failed: fix these problems "
            "first"
        )
    if json_output:
        return

    role = read_kit(kit).role
    process = read_status(kit)
    if role != "admin" and process.is_running:
        _say_how_it_runs(kit, role, process)
        return
    next_commands = {
        "server": f"fednotes server start {kit}",
        "site": f"fednotes site start {kit} --site-file FILE",
        "admin": f"fednotes run JOB --on {kit} --out RUN",
    }
    say(f"next: {next_commands[role]}")


def _show_checks(checks: Sequence[Check]) -> None:
    """Print the results of checks as a table."""
    from fednotes.cli.display import make_sheet

    table = make_sheet("check", "", "finding", left=3)
    marks = {True: "ok", False: "wrong", None: "look"}
    styles = {True: "", False: "bold red", None: "yellow"}
    for check in checks:
        table.add_row(
            check.subject,
            marks[check.ok],
            Text(clean(check.message), overflow="fold"),
            style=styles[check.ok],
        )
    console.print(table)


def _say_how_it_runs(kit: Path, role: str, process: Status) -> None:
    """Print whether a running process is connected, and what to do next.

    Args:
        kit: The kit of a server or a site.
        role: "server" or "site".
        process: The running process.
    """
    from fednotes.apps.deployment.status import describe_connection

    connection = None
    if role == "site":
        connection = describe_connection(kit, process)
    if connection is None or connection.is_up:
        say(f"connected; next: fednotes {role} status {kit}")
        return
    say(
        f"{connection.text}, although the server's port answers: the server is still "
        "starting, or it has revoked this kit"
    )
    say(
        "next: if this does not change, ask the coordinator for the "
        f"newest trust.pem and run: fednotes kit trust {kit} trust.pem"
    )


@in_panel(DEPLOY)
@with_examples(
    "fednotes run job.toml --on kits/admin --out run",
    "fednotes run --attach --out run",
    "fednotes run --abort job-20260131-093000 --on kits/admin",
)
def run(
    job: Annotated[
        str,
        typer.Argument(
            help="A job file, or the name of a built-in job; with --attach or --abort, "
            "the name of a run whose folder is not on this machine.",
            autocompletion=complete_job,
        ),
    ] = "",
    on: Annotated[Path | None, typer.Option(help="Folder of the admin's kit.")] = None,
    out: Annotated[Path, typer.Option(help="Folder to create for the run.")] = Path(
        "run"
    ),
    settings: Settings = None,
    track: Track = None,
    attach: Annotated[
        bool,
        typer.Option(
            "--attach", help="Reconnect to the run in OUT, or to the named run."
        ),
    ] = False,
    abort: Annotated[
        bool,
        typer.Option(
            "--abort", help="Abort the run in OUT, or the named run, permanently."
        ),
    ] = False,
    json_output: Json = False,
) -> None:
    """Run a job at the sites of a network, and fetch its results."""
    from fednotes.core.stopping import ending_at_once
    from fednotes.jobs.tracking import require_trackers

    is_submission = not (attach or abort)
    if (is_submission and not job) or (attach and abort):
        raise ConfigError(
            "give a job to submit, --attach --out OUT to watch a run again, or --abort "
            "--out OUT to abort one"
        )
    if settings and not is_submission:
        raise ConfigError(
            "--set changes a job that is submitted, not a run: leave it out, or submit "
            "the job with it to another --out"
        )
    output = choose_console(as_json=json_output)
    with ending_at_once("stopped; nothing was submitted") as farewell:
        if abort:
            which_run = f"{job} --on {on}" if job else f"--out {out}"
            farewell.line = (
                "stopped; the run may continue; to abort it: fednotes run --abort "
                f"{which_run}"
            )
            _abort(job, on, out, json_output=json_output)
        elif attach:
            farewell.line = "stopped; the run continues"
            attached_run = _open_run(job, on, out, output=output)
            farewell.line = _format_attach_hint(out)
            _watch(attached_run, out, track=track, json_output=json_output)
        else:
            require_trackers(track or ())
            submitted = _submit(
                job, on, out, settings=settings, farewell=farewell, output=output
            )
            _watch(
                submitted,
                out,
                just_submitted=True,
                track=track,
                json_output=json_output,
            )


def _format_attach_hint(out: Path) -> str:
    """Return the command with which a person can watch the run again."""
    return f"the run continues; to watch it again: fednotes run --attach --out {out}"


def _open_kit(on: Path | None, output: Console) -> AdminKit:
    """Return the admin's kit, and print a warning if it expires soon.

    Args:
        on: The kit; None if the command names none.
        output: Where to print.

    Raises:
        ConfigError: The command names no kit, or the kit cannot be used.
    """
    from fednotes.apps.deployment.runs import open_admin_kit

    if on is None:
        raise ConfigError("the admin's kit is missing: give it with --on KIT")
    kit = open_admin_kit(on)
    for warning in kit.warnings:
        say(f"warning: {warning}", to=output)
    return kit


def _open_run(name: str, on: Path | None, out: Path, *, output: Console) -> Run:
    """Return the run to watch, and reserve its folder.

    Args:
        name: The run's name; "" for the run of the folder.
        on: The admin's kit; None for the kit with which the run was submitted.
        out: The run's folder.
        output: Where to print.
    """
    from fednotes.apps.deployment.runs import adopt_folder, find_run, opening_session

    if not name:
        return _read_run(on, out)
    kit = _open_kit(on, output)
    with opening_session(kit) as session:
        named_run = find_run(session, kit.path, name)
    return adopt_folder(named_run, out)


def _read_run(on: Path | None, out: Path) -> Run:
    """Return the run of a folder.

    Args:
        on: The admin's kit; None for the kit with which the run was submitted.
        out: The run's folder.
    """
    from fednotes.apps.deployment.runs import read_run

    run = read_run(out)
    if on is not None:
        run = replace(run, kit=on.resolve())
    return run


def _submit(
    job: str,
    on: Path | None,
    out: Path,
    *,
    settings: list[str] | None,
    farewell: Interrupt,
    output: Console,
) -> Run:
    """Submit a job as a new run.

    The run claims its folder first, so that every run at the server has a folder.

    Args:
        job: A job file, or the name of a built-in job.
        on: The admin's kit; None if the command names none.
        out: The folder to create for the run.
        settings: Assignments such as "seed=2".
        farewell: What to print and to undo if a person stops the command.
        output: Where to print.
    """
    from fednotes.apps.deployment.runs import (
        claim_folder,
        opening_session,
        prepare_run,
        release_folder,
        submit_run,
    )
    from fednotes.jobs.declaration import load_declared

    kit = _open_kit(on, output)
    parsed_job, declaration = load_declared(job, tuple(settings or ()))
    run, min_sites = prepare_run(
        parsed_job, declaration, kit.path, out=out, when=time.time()
    )
    for warning in parsed_job.module.list_warnings(parsed_job.config):
        say(f"warning: {warning}", to=output)

    claim_folder(run, declaration, out)
    farewell.undo = lambda: release_folder(out)
    is_submitting = False
    try:
        with opening_session(kit) as session:
            is_submitting = True
            farewell.undo = None
            farewell.line = (
                "stopped while the job was submitted; to see whether the server has "
                f"it: fednotes run --attach --out {out}"
            )
            submit_run(session, run, declaration, min_sites=min_sites, out=out)
    except BaseException as error:
        may_have_arrived = is_submitting and isinstance(error, TrainingError)
        if not may_have_arrived:
            release_folder(out)
        raise
    farewell.line = _format_attach_hint(out)
    say(f"submitted as run {run.name}, job {run.fingerprint[:12]}", to=output)
    return run


def _watch(
    run: Run,
    out: Path,
    *,
    just_submitted: bool = False,
    track: list[str] | None = None,
    json_output: bool = False,
) -> None:
    """Follow a run until it ends, reconnecting if necessary, and print its results."""
    from fednotes.apps.deployment.runs import (
        Follower,
        follow_with_reconnects,
        open_admin_kit,
        opening_session,
    )
    from fednotes.cli.display import RichDisplay
    from fednotes.jobs.card import write_cards
    from fednotes.jobs.progress import reporting
    from fednotes.jobs.tracking import add_trackers
    from fednotes.report.html import write_report

    kit = open_admin_kit(run.kit)
    output = choose_console(as_json=json_output)

    def say_with_time(*lines: str) -> None:
        say(*map(display.with_time, lines), to=output)

    with RichDisplay(output, has_times=True) as display:
        listener = add_trackers(display, track or ())
        follower = Follower(
            replace(run, kit=kit.path),
            out,
            display=listener,
            say=say_with_time,
            just_submitted=just_submitted,
        )
        with reporting(listener, out):
            result = follow_with_reconnects(follower, partial(opening_session, kit))
    write_cards(out)
    report = write_report(out)
    if json_output:
        print_json(result.model_dump())
    else:
        _say_results(out, run.name, result, report)
    listener.finish(out)


def _abort(name: str, on: Path | None, out: Path, *, json_output: bool) -> None:
    """Abort a run.

    Args:
        name: The run's name; "" for the run of the folder.
        on: The admin's kit; None for the kit with which the run was submitted.
        out: The run's folder.
        json_output: Whether to print the result as JSON.
    """
    from fednotes.apps.deployment.runs import abort_run, find_run, opening_session

    output = choose_console(as_json=json_output)
    if name:
        kit = _open_kit(on, output)
        with opening_session(kit) as session:
            run = find_run(session, kit.path, name)
            abort_run(session, run, None)
    else:
        run = _read_run(on, out)
        kit = _open_kit(run.kit, output)
        with opening_session(kit) as session:
            abort_run(session, run, out)
    if json_output:
        print_json({"run": run.name, "aborted": True})
        return
    say(f"run {run.name} was aborted; the server does not resubmit it")
    say(
        f"each site keeps its files of this run: KIT/state/{run.name}, its ledger and "
        "its decisions"
    )
    say("next: waiting runs start by themselves; a new job needs another --out")


def _describe_time(result: RunResult) -> str:
    """Return how long a run took, and how much of that it spent waiting."""
    working = result.seconds or 0.0
    elapsed = find_number(result.conditions, "federated", "elapsed") or 0.0
    waiting = elapsed - working
    if waiting < MIN_WAITING_SECONDS:
        return format_duration(working)
    return (
        f"{format_duration(elapsed)} ({format_duration(working)} working, "
        f"{format_duration(waiting)} waiting for approvals, sites or the server)"
    )


def _say_results(out: Path, name: str, result: RunResult, report: Path) -> None:
    """Print the scores of a finished run, where its files are, and what to do next."""
    f1 = result.metrics.get("valid_f1")
    score = ""
    if f1 is not None:
        score = f", F1 {f1:.1%} on all sites' validation data"
    rounds = result.conditions.get("federated", {}).get("rounds")
    say(f"done: {rounds} rounds in {_describe_time(result)}{score}")
    say(*result.notes)
    for site, scores in result.sites.items():
        if scores:
            say(f"{site} shares its scores: {json.dumps(scores['federated'])[:200]}")
    say(f"report: {report}")
    say(f"each site has its model and its own scores in KIT/results/{name}")

    model = out / "model"
    where = ""
    if not model.exists():
        model = Path("KIT") / "results" / name / "model"
        where = "at a site: "
    first_line, *other_lines = (
        line.format(place=model) for line in result.wording.next_lines
    )
    say(f"next: {where}{first_line}", *(f"      {line}" for line in other_lines))
