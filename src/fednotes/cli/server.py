"""The commands at the server's kit, and what they share with those at a site's."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from fednotes.cli.groups import say
from fednotes.core.errors import ConfigError, FednotesError

server = typer.Typer(help="The server's process.", no_args_is_help=True)

START_SECONDS = 20.0  # for a server to answer, or a site to be let in
Kit = Annotated[Path, typer.Argument(help="A kit's folder.")]


# ---- a kit's process -------------------------------------------------------------------------


def of_role(kit: Path, role: str) -> dict[str, Any]:
    """What a kit says of itself. Raises ConfigError for no kit, or one of another role."""
    from fednotes.engines.nvflare.kit import read_kit

    facts = read_kit(kit)
    if facts["role"] != role:
        raise ConfigError(
            f"{kit}: is the kit of {facts['name']} ({facts['role']}), not of a {role}"
        )
    return facts


def require_stopped(kit: Path, role: str, otherwise: str = "") -> None:
    """Raises ConfigError if the kit's process runs. otherwise: the remedy, if not to stop it."""
    from fednotes.engines.nvflare import processes

    before = processes.status(kit)
    if before.running:
        raise ConfigError(
            f"{kit}: {before.name} runs already (process {before.pid}); "
            f"{otherwise or f'to stop it: fednotes {role} stop {kit}'}"
        )


def require_sound(kit: Path, source: Path | None = None) -> None:
    """Raises ConfigError for what `preflight` finds wrong with the kit itself. source: a site's
    file that is to be taken over."""
    from fednotes.jobs.deployed.preflight import before_start

    if wrong := before_start(kit, source):
        raise ConfigError(f"{kit}: {'; '.join(check.told for check in wrong)}")


def begin(kit: Path) -> Any:
    """Start a kit's process. Raises FednotesError if it ends at once."""
    from fednotes.engines.nvflare import processes
    from fednotes.jobs.deployed.status import last_words

    processes.start(kit)
    time.sleep(1.0)
    now = processes.status(kit)
    if not now.running:
        raise FednotesError(f"{kit}: the process ended at once: {last_words(kit)}")
    return now


def end(kit: Path, role: str) -> None:
    """Stop what runs of a kit."""
    from fednotes.engines.nvflare import processes

    of_role(kit, role)
    before = processes.status(kit)
    processes.stop(kit)
    was = "has stopped" if before.running or before.jobs or before.watch else "did not run"
    say(f"{before.name} {was}; what it kept of its runs is in {kit / 'state'}")
    say(f"next: fednotes {before.role} start {kit} lets them go on")


def process_of(kit: Path, role: str) -> Any:
    """Whether a kit's process runs (`engines.processes.Status`), said and returned, and what its
    certificates need."""
    from fednotes.engines.nvflare import processes
    from fednotes.engines.nvflare.certificates import check_kit

    of_role(kit, role)
    found = processes.status(kit)
    state = f"runs (process {found.pid})" if found.running else "does not run"
    say(f"{found.name} {state}; log: {found.log}")
    try:
        for warning in check_kit(kit):
            say(warning)
    except FednotesError as error:
        say(f"this kit cannot work any more: {error}")
    return found


# ---- the server ------------------------------------------------------------------------------


Files = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(help="A TOML file whose [files] says where this machine keeps vectors …"),
]


def _ready(kit: Path, files: Path | None) -> dict[str, Any]:
    """Make a server's kit ready for its process. Raises ConfigError for what is in its way."""
    from fednotes.jobs.deployed.preflight import port_check
    from fednotes.jobs.deployed.server import SERVER_FILE
    from fednotes.jobs.deployed.site_file import install

    facts = of_role(kit, "server")
    require_stopped(kit, "server")
    require_sound(kit)
    port = port_check(kit)
    if "is free" not in port.told:
        raise ConfigError(f"{kit}: port {port.told}")
    if files is not None:
        install(files, kit, SERVER_FILE)
    return facts


@server.command("run")
def server_run(kit: Kit, files: Files = None) -> None:
    """Run the server here until SIGTERM or Ctrl-C: for systemd and containers."""
    from fednotes.engines.nvflare import processes

    _ready(kit, files)
    processes.run(kit)


@server.command("start")
def server_start(kit: Kit, files: Files = None) -> None:
    """Run the server in the background; its watch lets runs go on by themselves."""
    from fednotes.engines.nvflare import processes
    from fednotes.jobs.deployed.preflight import await_answer
    from fednotes.jobs.deployed.status import last_words

    facts = _ready(kit, files)
    begun = begin(kit)
    problem = await_answer(kit, START_SECONDS, lambda: processes.status(kit).running)
    if problem:
        said = last_words(kit)
        processes.stop(kit)
        raise FednotesError(
            f"{kit}: the server does not answer at its port {facts['port']} ({problem}), and was "
            f"stopped; its last words, in {kit / processes.OUTPUT_FILE}: {said}"
        )
    say(f"{begun.name} runs (process {begun.pid}) and answers at port {facts['port']}")
    say(f"its log: {begun.log}; its watch's: {kit / 'watch.log'}")
    say("next: start the sites; then hand in a job with the admin's kit: fednotes run")


@server.command("stop")
def server_stop(kit: Kit) -> None:
    """Stop the server; its runs go on when it is started again."""
    end(kit, "server")


@server.command("status")
def server_status(kit: Kit) -> None:
    """Whether the server runs and answers, the sites that are connected, and its runs."""
    from fednotes.jobs.deployed.status import from_files, network, seconds

    found = process_of(kit, "server")
    if not found.running:
        for line in from_files(kit):
            say(line)
        say(f"next: fednotes server start {kit}")
        return
    if not found.watch:
        say("its watch does not run: a run that stops stays stopped until the server is restarted")
    try:
        now = network(kit)
    except FednotesError as error:
        for line in from_files(kit):
            say(line)
        say(f"the server does not answer: {error}")
        say(f"next: look at its log; fednotes server stop {kit}, then start")
        return
    say(f"connected sites: {', '.join(now.sites) or 'none'}")
    for line in (*seconds(kit), *now.lines):
        say(line)
    if not now.sites:
        say("next: start the sites, each with its own kit: fednotes site start KIT --site FILE")
    elif now.busy:
        say("next: nothing to do here")
    else:
        say("next: hand in a job with the admin's kit: fednotes run JOB --on KIT --out RUN")
