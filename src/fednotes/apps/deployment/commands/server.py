"""The commands `server` and `kit`, and functions that commands of all kits share."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fednotes.cli.all_commands import DEPLOY
from fednotes.cli.plain_help import OldName, with_examples
from fednotes.cli.shared import Json, print_json, say
from fednotes.core.errors import ConfigError, FednotesError, RefusedError

if TYPE_CHECKING:
    from fednotes.apps.deployment.nvflare.processes import Status
    from fednotes.apps.deployment.status import Network

server = typer.Typer(
    help="Start, stop and inspect the server of a network.",
    no_args_is_help=True,
    rich_help_panel=DEPLOY,
)
certificates = typer.Typer(
    help="Renew a kit's certificate, or install a new trust list.",
    no_args_is_help=True,
    rich_help_panel=DEPLOY,
)

START_SECONDS = 20.0  # time for a server to answer, or to admit a site
Kit = Annotated[Path, typer.Argument(help="Folder of a kit.")]
Kill = Annotated[
    bool,
    typer.Option("--kill", help="Kill the processes at once, as a power cut would."),
]


# ---- a kit's process -----------------------------------------------------------------


def require_role(kit: Path, role: str) -> None:
    """Raise ConfigError unless a folder is a kit of this role."""
    from fednotes.apps.deployment.nvflare.kit import read_kit

    facts = read_kit(kit)
    if facts.role != role:
        raise ConfigError(
            f"{kit} is the kit of {facts.name} ({facts.role}): give the kit of a {role}"
        )


def require_stopped(kit: Path, role: str, remedy: str = "") -> None:
    """Raise ConfigError if a kit's process runs.

    Args:
        kit: The kit.
        role: Its role.
        remedy: What to do about it; by default, to stop the process.
    """
    from fednotes.apps.deployment.nvflare import processes

    process = processes.read_status(kit)
    if process.is_running:
        remedy = remedy or f"to stop it: fednotes {role} stop {kit}"
        raise ConfigError(
            f"{kit}: {process.name} is already running (process "
            f"{process.pid}); {remedy}"
        )


def require_ready(
    kit: Path, role: str, *, source: Path | None = None, remedy: str = ""
) -> None:
    """Raise ConfigError unless a kit has a role, is stopped and passes its checks.

    Args:
        kit: The kit.
        role: The role that it must have.
        source: A new site file to be installed; None for the one in the kit.
        remedy: What to do if the process is running; by default, to stop it.
    """
    require_role(kit, role)
    require_stopped(kit, role, remedy)
    require_sound(kit, source)


def require_sound(kit: Path, source: Path | None = None) -> None:
    """Raise ConfigError if `preflight` finds a problem with a kit itself."""
    from fednotes.apps.deployment.preflight import list_problems_before_start

    problems = list_problems_before_start(kit, source)
    if problems:
        raise ConfigError(f"{kit}: {'; '.join(check.message for check in problems)}")


def start_process(kit: Path) -> Status:
    """Start a kit's process in the background and return its status.

    Raises:
        FednotesError: The process exited immediately.
    """
    from fednotes.apps.deployment.nvflare import processes
    from fednotes.apps.deployment.status import read_last_words

    processes.start(kit)
    time.sleep(1.0)
    process = processes.read_status(kit)
    if not process.is_running:
        raise FednotesError(
            f"{kit}: the process exited immediately: {read_last_words(kit)}"
        )
    return process


def stop_process(kit: Path, role: str, *, kill: bool = False) -> None:
    """Stop a kit's processes.

    Args:
        kit: The kit.
        role: Its role.
        kill: Whether to kill them immediately, without letting them clean up.
    """
    from fednotes.apps.deployment.nvflare import processes

    require_role(kit, role)
    process = processes.read_status(kit)
    processes.stop(kit, kill=kill)
    result = "has stopped" if process.is_running or process.jobs else "was not running"
    say(f"{process.name} {result}; the states of its runs are in {kit / 'state'}")
    say(f"next: fednotes {process.role} start {kit} (resumes these runs)")


def report_process(kit: Path, role: str) -> Status:
    """Print whether a kit's process runs, and the state of its certificates.

    Returns:
        The status of the process.
    """
    from fednotes.apps.deployment.nvflare import processes
    from fednotes.apps.deployment.nvflare.certificates import check_kit

    require_role(kit, role)
    process = processes.read_status(kit)
    state = "is not running"
    if process.is_running:
        state = f"is running (process {process.pid})"
    say(f"{process.name} {state}; log: {process.log}")
    try:
        say(*check_kit(kit))
    except FednotesError as error:
        say(f"this kit no longer works: {error}")
    return process


# ---- the server ----------------------------------------------------------------------


ServerFile = Annotated[
    Path | None,
    typer.Option(
        "--server-file",
        OldName("--files"),
        help="The server's file: its [files] table gives the paths of word vectors "
        "and encoders on this machine.",
    ),
]


def _check_and_install(kit: Path, server_file: Path | None) -> None:
    """Check that a server's kit can start, and install its file.

    Args:
        kit: The server's kit.
        server_file: The file to install; None for the one in the kit.

    Raises:
        ConfigError: A problem of the kit, the port or the file prevents the start.
    """
    from fednotes.apps.deployment.preflight import find_port_use
    from fednotes.apps.deployment.server import SERVER_FILE
    from fednotes.apps.deployment.site_file import install_site_file

    require_ready(kit, "server")
    use = find_port_use(kit)
    if use.other_program:
        raise ConfigError(f"{kit}: port {use.describe()}")
    if not use.is_free:
        # `require_ready` has checked that it does not run from this folder.
        raise ConfigError(
            f"{kit}: port {use.describe()}, from another folder of this kit; to stop "
            "it there: fednotes server stop FOLDER"
        )
    if server_file is not None:
        install_site_file(server_file, kit, SERVER_FILE)


@server.command("run")
@with_examples(
    "fednotes server run kits/server",
)
def server_run(kit: Kit, server_file: ServerFile = None) -> None:
    """Run the server in the foreground, for systemd and containers."""
    from fednotes.apps.deployment.nvflare import processes

    _check_and_install(kit, server_file)
    processes.run(kit)


@server.command("start")
@with_examples(
    "fednotes server start kits/server",
)
def server_start(kit: Kit, server_file: ServerFile = None) -> None:
    """Start the server in the background and resume its runs."""
    from fednotes.apps.deployment.nvflare import processes
    from fednotes.apps.deployment.nvflare.kit import read_kit
    from fednotes.apps.deployment.preflight import await_server
    from fednotes.apps.deployment.status import list_resumable_runs, read_last_words

    _check_and_install(kit, server_file)
    runs = list_resumable_runs(kit)
    process = start_process(kit)
    port = read_kit(kit).port
    problem = await_server(
        kit, START_SECONDS, lambda: processes.read_status(kit).is_running
    )
    if problem:
        last_words = read_last_words(kit)
        processes.stop(kit)
        raise FednotesError(
            f"{kit}: the server did not answer at port {port} ({problem}), so it was "
            f"stopped; the last line of {kit / processes.OUTPUT_FILE}: {last_words}"
        )
    say(f"{process.name} is running (process {process.pid}) and answers at port {port}")
    say(f"its log: {process.log}")
    if runs:
        say(
            "next: start the sites that are not running; these runs then resume "
            f"automatically: {', '.join(runs)}"
        )
    else:
        say(
            "next: start the sites; then submit a job with the admin's kit: "
            "fednotes run"
        )


@server.command("stop")
@with_examples(
    "fednotes server stop kits/server",
)
def server_stop(kit: Kit, kill: Kill = False) -> None:
    """Stop the server; its runs resume when it is started again."""
    stop_process(kit, "server", kill=kill)


@server.command("status")
@with_examples(
    "fednotes server status kits/server",
)
def server_status(kit: Kit, json_output: Json = False) -> None:
    """Show whether the server answers; list its connected sites and runs."""
    from fednotes.apps.deployment.status import ask_server, describe_saved_runs

    if json_output:
        print_json(_describe_server(kit))
        return
    process = report_process(kit, "server")
    if not process.is_running:
        say(*describe_saved_runs(kit))
        say(f"next: fednotes server start {kit}")
        return
    try:
        network = ask_server(kit)
    except FednotesError as error:
        say(*describe_saved_runs(kit))
        say(f"the server does not answer: {error}")
        say(
            f"next: read its log; then run fednotes server stop {kit}, and "
            "start it again"
        )
        return
    _say_network(kit, network)


def describe_process(kit: Path, role: str) -> dict[str, Any]:
    """Return as JSON values whether a kit's process runs, and warnings about the kit.

    Raises:
        ConfigError: The kit has another role.
    """
    from fednotes.apps.deployment.nvflare import processes
    from fednotes.apps.deployment.nvflare.certificates import check_kit

    require_role(kit, role)
    process = processes.read_status(kit)
    facts: dict[str, Any] = {
        "name": process.name,
        "is_running": process.is_running,
        "process": process.pid,
        "log": process.log,
        "warnings": [],
        "problem": "",
    }
    try:
        facts["warnings"] = list(check_kit(kit))
    except FednotesError as error:
        facts["problem"] = f"this kit no longer works: {error}"
    return facts


def _describe_server(kit: Path) -> dict[str, Any]:
    """Return the facts that `server status` shows, as JSON values."""
    from fednotes.apps.deployment.status import (
        ask_server,
        describe_refused_copies,
        describe_saved_runs,
    )

    facts = describe_process(kit, "server")
    network = None
    if facts["is_running"]:
        try:
            network = ask_server(kit)
        except FednotesError as error:
            facts["problem"] = f"the server does not answer: {error}"
    if network is None:
        return facts | {
            "answers": False,
            "sites": [],
            "runs": describe_saved_runs(kit),
        }
    return facts | {
        "answers": True,
        "sites": network.sites,
        "runs": network.lines,
        "is_busy": network.is_busy,
        "actions": [asdict(action) for action in network.actions],
        "refused_copies": describe_refused_copies(kit),
    }


def _say_network(kit: Path, network: Network) -> None:
    """Print what a server reports about itself, and what to do next."""
    from fednotes.apps.deployment.status import (
        describe_actions,
        describe_refused_copies,
    )

    say(f"connected sites: {', '.join(network.sites) or 'none'}")
    say(*describe_refused_copies(kit), *network.lines)
    actions = describe_actions(network.actions)
    if actions:
        first_action, *other_actions = actions
        say(f"next: {first_action}", *(f"      {action}" for action in other_actions))
    elif not network.sites:
        say(
            "next: start the sites, each with its own kit: fednotes site start KIT "
            "--site-file FILE"
        )
    elif network.is_busy:
        say("next: no action needed")
    else:
        say(
            "next: submit a job with the admin's kit: fednotes run JOB --on KIT --out "
            "RUN"
        )


# ---- a kit's certificate -------------------------------------------------------------


@certificates.command("renew")
@with_examples(
    "fednotes kit renew kits/sites/mercy",
    "fednotes kit renew kits/sites/mercy --take mercy.request.signed.pem",
)
def renew(
    kit: Kit,
    out: Annotated[
        Path | None,
        typer.Option(help="File for the request; NAME.request.pem by default."),
    ] = None,
    take: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Signed certificate to install."),
    ] = None,
) -> None:
    """Request a new certificate, or install the signed certificate.

    Without --take, write a request for `fednotes provision --sign`. With --take,
    install the certificate that was signed.
    """
    from fednotes.apps.deployment.nvflare.certificates import (
        check_kit,
        read_expiry_dates,
    )
    from fednotes.apps.deployment.nvflare.kit import read_kit
    from fednotes.apps.deployment.nvflare.renewal import (
        RENEWAL_FOLDER,
        install_renewal,
        request_renewal,
    )
    from fednotes.apps.deployment.nvflare.trust import read_bounded_file
    from fednotes.core.store import write_out

    facts = read_kit(kit)
    if take is None:
        check_kit(kit)
        out = out or Path(f"{facts.name}.request.pem")
        write_out(out, request_renewal(kit).decode())
        say(f"{out}: contains no secret; the new key is in {kit / RENEWAL_FOLDER}")
        say(
            "next: send it to the coordinator, who signs it: fednotes provision "
            f"PROJECT --out KITS --sign {out.name}"
        )
        say(f"      then install the answer: fednotes kit renew {kit} --take FILE")
        return
    require_stopped(kit, facts.role)
    try:
        install_renewal(kit, read_bounded_file(take))
    except RefusedError as error:
        raise ConfigError(f"{take}: {error}; the kit is unchanged") from error
    until = min(read_expiry_dates(kit).values())
    say(
        f"the renewed certificate is valid until {until:%Y-%m-%d}; runs resume when "
        "the kit is started"
    )
    say(f"next: fednotes preflight {kit}")


@certificates.command("trust")
@with_examples(
    "fednotes kit trust kits/sites/mercy trust.pem",
)
def trust(
    kit: Kit,
    file: Annotated[
        Path, typer.Argument(help="The file trust.pem of the project's authority.")
    ],
) -> None:
    """Install the authority's newest list of revoked kits.

    Also install the authority's new root certificate, if there is one.
    """
    from fednotes.apps.deployment.nvflare import processes
    from fednotes.apps.deployment.nvflare.kit import read_kit
    from fednotes.apps.deployment.nvflare.trust import (
        Trust,
        install_trust,
        read_bounded_file,
    )

    role = read_kit(kit).role
    old_trust = Trust.read(kit / "startup")
    try:
        is_news = install_trust(kit, read_bounded_file(file))
    except RefusedError as error:
        raise ConfigError(f"{file}: {error}; the kit is unchanged") from error
    new_trust = Trust.read(kit / "startup")
    if not is_news:
        say(f"nothing new: this kit already has number {new_trust.number}")
        return
    revoked = len(list(new_trust.revocations or ()))
    say(f"installed as number {new_trust.number}: {revoked} certificates are revoked")
    if len(new_trust.roots) > len(old_trust.roots):
        say(
            "new root certificate installed; the old one stays valid until "
            f"{new_trust.find_root_expiry(old_trust.roots[-1]):%Y-%m-%d}"
        )
        if role != "admin" and processes.read_status(kit).is_running:
            say(f"next: before that day, run: fednotes {role} stop {kit}, then start")
        say(f"next: before that day, run: fednotes kit renew {kit}")
