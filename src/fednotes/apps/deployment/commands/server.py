"""The commands at the server's kit, those at any kit's certificate, and what all kits'
share."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fednotes.cli.all_commands import DEPLOY
from fednotes.cli.shared import say
from fednotes.core.errors import ConfigError, FednotesError, RefusedError

if TYPE_CHECKING:
    from fednotes.apps.deployment.nvflare.processes import Status

server = typer.Typer(
    help="Run the server of a network.", no_args_is_help=True, rich_help_panel=DEPLOY
)
certificates = typer.Typer(
    help="Renew a kit's certificate and update its trust.",
    no_args_is_help=True,
    rich_help_panel=DEPLOY,
)

START_SECONDS = 20.0  # for a server to answer, or a site to be let in
Kit = Annotated[Path, typer.Argument(help="Folder of a kit.")]
Kill = Annotated[
    bool,
    typer.Option("--kill", help="Kill its processes at once, as a power cut would."),
]


# ---- a kit's process -----------------------------------------------------------------


def of_role(kit: Path, role: str) -> None:
    """Raises ConfigError for no kit, or one of another role."""
    from fednotes.apps.deployment.nvflare.kit import read_kit

    facts = read_kit(kit)
    if facts.role != role:
        raise ConfigError(
            f"{kit}: is the kit of {facts.name} ({facts.role}), not of a {role}"
        )


def require_stopped(kit: Path, role: str, otherwise: str = "") -> None:
    """Raises ConfigError if the kit's process runs. otherwise: the remedy, if not to
    stop it."""
    from fednotes.apps.deployment.nvflare import processes

    before = processes.status(kit)
    if before.running:
        raise ConfigError(
            f"{kit}: {before.name} runs already (process {before.pid}); "
            f"{otherwise or f'to stop it: fednotes {role} stop {kit}'}"
        )


def require_ready(
    kit: Path, role: str, source: Path | None = None, otherwise: str = ""
) -> None:
    """Raises ConfigError unless the kit is of this role, stopped, and sound by
    `preflight`.

    source: a site's file that is to be taken over. otherwise: as for `require_stopped`.
    """
    of_role(kit, role)
    require_stopped(kit, role, otherwise)
    require_sound(kit, source)


def require_sound(kit: Path, source: Path | None = None) -> None:
    """Raises ConfigError for what `preflight` finds wrong with the kit itself."""
    from fednotes.apps.deployment.preflight import problems_before_start

    if wrong := problems_before_start(kit, source):
        raise ConfigError(f"{kit}: {'; '.join(check.message for check in wrong)}")


def begin(kit: Path) -> Status:
    """Start a kit's process. Raises FednotesError if it ends at once."""
    from fednotes.apps.deployment.nvflare import processes
    from fednotes.apps.deployment.status import last_words

    processes.start(kit)
    time.sleep(1.0)
    now = processes.status(kit)
    if not now.running:
        raise FednotesError(f"{kit}: the process ended at once: {last_words(kit)}")
    return now


def end(kit: Path, role: str, *, kill: bool = False) -> None:
    """Stop what runs of a kit; with `kill` without letting it tidy up."""
    from fednotes.apps.deployment.nvflare import processes

    of_role(kit, role)
    before = processes.status(kit)
    processes.stop(kit, kill=kill)
    was = "has stopped" if before.running or before.jobs else "did not run"
    say(f"{before.name} {was}; what it kept of its runs is in {kit / 'state'}")
    say(f"next: fednotes {before.role} start {kit} lets them go on")


def process_of(kit: Path, role: str) -> Status:
    """Whether a kit's process runs, said and returned, and what its certificates need."""
    from fednotes.apps.deployment.nvflare import processes
    from fednotes.apps.deployment.nvflare.certificates import check_kit

    of_role(kit, role)
    found = processes.status(kit)
    state = f"runs (process {found.pid})" if found.running else "does not run"
    say(f"{found.name} {state}; log: {found.log}")
    try:
        say(*check_kit(kit))
    except FednotesError as error:
        say(f"this kit cannot work any more: {error}")
    return found


# ---- the server ----------------------------------------------------------------------


Files = Annotated[
    Path | None,
    typer.Option(help="TOML file whose [files] locates vectors and encoders here."),
]


def _ready(kit: Path, files: Path | None) -> None:
    """Make a server's kit ready for its process.

    Raises ConfigError for what is in its way.
    """
    from fednotes.apps.deployment.preflight import check_port
    from fednotes.apps.deployment.server import SERVER_FILE
    from fednotes.apps.deployment.site_file import install

    require_ready(kit, "server")
    port = check_port(kit)
    if "is free" not in port.message:
        raise ConfigError(f"{kit}: port {port.message}")
    if files is not None:
        install(files, kit, SERVER_FILE)


@server.command("run")
def server_run(kit: Kit, files: Files = None) -> None:
    """Run the server in the foreground, for systemd and containers."""
    from fednotes.apps.deployment.nvflare import processes

    _ready(kit, files)
    processes.run(kit)


@server.command("start")
def server_start(kit: Kit, files: Files = None) -> None:
    """Start the server in the background and resume its runs."""
    from fednotes.apps.deployment.nvflare import processes
    from fednotes.apps.deployment.nvflare.kit import read_kit
    from fednotes.apps.deployment.preflight import await_server
    from fednotes.apps.deployment.status import last_words

    _ready(kit, files)
    begun, port = begin(kit), read_kit(kit).port
    problem = await_server(kit, START_SECONDS, lambda: processes.status(kit).running)
    if problem:
        said = last_words(kit)
        processes.stop(kit)
        raise FednotesError(
            f"{kit}: the server does not answer at its port {port} ({problem}), and was "
            f"stopped; its last words, in {kit / processes.OUTPUT_FILE}: {said}"
        )
    say(f"{begun.name} runs (process {begun.pid}) and answers at port {port}")
    say(f"its log: {begun.log}")
    say("next: start the sites; then hand in a job with the admin's kit: fednotes run")


@server.command("stop")
def server_stop(kit: Kit, kill: Kill = False) -> None:
    """Stop the server; its runs resume when it is started again."""
    end(kit, "server", kill=kill)


@server.command("status")
def server_status(kit: Kit) -> None:
    """Show whether the server answers, its connected sites and its runs."""
    from fednotes.apps.deployment.status import from_files, network, second_processes

    found, problem = process_of(kit, "server"), ""
    try:
        now = network(kit) if found.running else None
    except FednotesError as error:
        now, problem = None, str(error)
    if now is None:
        say(*from_files(kit))
        if problem:
            say(f"the server does not answer: {problem}")
            say(f"next: look at its log; fednotes server stop {kit}, then start")
        else:
            say(f"next: fednotes server start {kit}")
        return
    say(f"connected sites: {', '.join(now.sites) or 'none'}")
    say(*second_processes(kit), *now.lines)
    if not now.sites:
        say(
            "next: start the sites, each with its own kit: fednotes site start KIT --site FILE"
        )
    elif now.busy:
        say("next: nothing to do here")
    else:
        say(
            "next: hand in a job with the admin's kit: fednotes run JOB --on KIT --out RUN"
        )


# ---- a kit's certificate -------------------------------------------------------------


@certificates.command("renew")
def renew(
    kit: Kit,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the request; NAME.request.pem by default."),
    ] = None,
    take: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Answer to the request, to be installed."),
    ] = None,
) -> None:
    """Request a new certificate; install the answer with --take."""
    from fednotes.apps.deployment.nvflare.certificates import (
        PENDING,
        bytes_of,
        check_kit,
        request,
        take_renewal,
        valid_until,
    )
    from fednotes.apps.deployment.nvflare.kit import read_kit
    from fednotes.core.store import write_out

    facts = read_kit(kit)
    if take is None:
        check_kit(kit)
        out = out or Path(f"{facts.name}.request.pem")
        write_out(out, request(kit).decode())
        say(f"{out}: holds no secret; the new key is in {kit / PENDING}")
        say(
            f"next: to the coordinator: fednotes provision PROJECT --out KITS --sign {out.name}"
        )
        say(f"      then here: fednotes kit renew {kit} --take FILE")
        return
    require_stopped(kit, facts.role)
    try:
        take_renewal(kit, bytes_of(take))
    except RefusedError as error:
        raise ConfigError(f"{take}: {error}; the kit is as it was") from error
    say(
        f"renewed until {min(valid_until(kit).values()):%Y-%m-%d}; runs go on as they were"
    )
    say(f"next: fednotes preflight {kit}")


@certificates.command("trust")
def trust(
    kit: Kit,
    file: Annotated[
        Path, typer.Argument(help="File trust.pem of the project's authority.")
    ],
) -> None:
    """Install the authority's list of revoked kits, and a new root."""
    from fednotes.apps.deployment.nvflare import processes
    from fednotes.apps.deployment.nvflare.certificates import Trust, bytes_of, take
    from fednotes.apps.deployment.nvflare.kit import read_kit

    role = read_kit(kit).role
    before = Trust.of(kit / "startup")
    try:
        news = take(kit, bytes_of(file))
    except RefusedError as error:
        raise ConfigError(f"{file}: {error}; the kit is as it was") from error
    now = Trust.of(kit / "startup")
    if not news:
        say(f"nothing new: this kit has number {now.number} already")
        return
    say(
        f"taken in as number {now.number}: {len(list(now.listed or ()))} certificates count no more"
    )
    if len(now.roots) > len(before.roots):
        say(
            f"a new root; the one before counts until {now.end(before.roots[-1]):%Y-%m-%d}"
        )
        if role != "admin" and processes.status(kit).running:
            say(f"next: within that time: fednotes {role} stop {kit}, then start")
        say(f"next: within that time: fednotes kit renew {kit}")
