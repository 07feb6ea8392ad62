"""The commands at a kit: its process, and a site's decisions. Each ends with what to do next."""

from __future__ import annotations

import getpass
import json
import time
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from fednotes.cli_groups import say
from fednotes.core.errors import ConfigError, FednotesError

site = typer.Typer(help="A site's process, rules and decisions.", no_args_is_help=True)
server = typer.Typer(help="The server's process.", no_args_is_help=True)

Kit = Annotated[Path, typer.Argument(help="A kit's folder.")]


# ---- the server's and a site's process -------------------------------------------------------


def _started(kit: Path, role: str) -> None:
    from fednotes.engines import processes, provision

    facts = provision.read_kit(kit)
    if facts["role"] != role:
        raise ConfigError(
            f"{kit}: is the kit of {facts['name']} ({facts['role']}), not of a {role}"
        )
    before = processes.status(kit)
    if before.running:
        raise ConfigError(
            f"{kit}: {before.name} runs already (process {before.pid}): fednotes {role} stop {kit}"
        )
    begun = processes.start(kit)
    time.sleep(1.0)
    now = processes.status(kit)
    if not now.running:
        raise FednotesError(f"{kit}: the process ended at once: see {kit / 'console.log'}")
    say(f"{begun.name} runs (process {now.pid}); its log: {begun.log}")


def _stopped(kit: Path) -> None:
    from fednotes.engines import processes

    before = processes.status(kit)
    processes.stop(kit)
    was = "has stopped" if before.running or before.jobs or before.watch else "did not run"
    say(f"{before.name} {was}; what it kept of its runs is in {kit / 'state'}")
    say(f"next: fednotes {before.role} start {kit} lets them go on")


def _processes(kit: Path) -> Any:
    from fednotes.engines import processes

    found = processes.status(kit)
    state = f"runs (process {found.pid})" if found.running else "does not run"
    say(f"{found.name} {state}; log: {found.log}")
    if found.jobs:
        say(f"jobs that run here: {', '.join(found.jobs)}")
    return found


@server.command("start")
def server_start(
    kit: Kit,
    files: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(help="A TOML file whose [files] says where this machine keeps vectors …"),
    ] = None,
) -> None:
    """Start the server and its watch, which lets runs go on by themselves."""
    from fednotes.deployment import SERVER_FILE
    from fednotes.site_file import install

    if files is not None:
        install(files, kit, SERVER_FILE)
    _started(kit, "server")
    say("next: start the sites; then hand in a job with the admin's kit: fednotes run")


@server.command("stop")
def server_stop(kit: Kit) -> None:
    """Stop the server; its runs go on when it is started again."""
    _stopped(kit)


@server.command("status")
def server_status(kit: Kit) -> None:
    """Whether the server runs, and its runs."""
    found = _processes(kit)
    if found.running and not found.watch:
        say("its watch does not run: a run that stops stays stopped until the server is restarted")
    for path in sorted((kit / "state").glob("*/outcome.json")):
        try:
            outcome = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        problem = f": {outcome['problem']}" if outcome.get("problem") else ""
        say(f"run {path.parent.name}: {outcome.get('status')}{problem}")
    say(f"next: fednotes server {'stop' if found.running else 'start'} {kit}")


@site.command("start")
def site_start(
    kit: Kit,
    file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--site", help="The site's own file; the one that it has if not given."),
    ] = None,
) -> None:
    """Check the site's file, take it over into the kit, and start the site."""
    from fednotes.site_file import install, of_kit

    if file is not None:
        install(file, kit)
    policy = of_kit(kit).policy
    say(f"rules: sums over {policy.min_sites} sites and more, secure sum {policy.secure_sum}")
    _started(kit, "site")
    say(f"next: fednotes site status {kit} shows jobs that wait for approval")


@site.command("stop")
def site_stop(kit: Kit) -> None:
    """Stop the site; its runs go on when it is started again."""
    _stopped(kit)


@site.command("status")
def site_status(kit: Kit) -> None:
    """Whether the site runs, what waits for a decision, what left it, and its own scores."""
    from fednotes.deployment import RESULTS
    from fednotes.guard import approvals_of, ledger_of, pending

    found = _processes(kit)
    for decision in approvals_of(kit).decisions()[-5:]:
        name = decision.table.get("name", "")
        say(f"job {name} ({decision.fingerprint[:12]}): {decision.decision} by {decision.by}")
    head = ledger_of(kit).head()
    say(f"messages that left: {head.lines:,}")
    for path in sorted((kit / RESULTS).glob("*/scores.json")):
        say(f"run {path.parent.name}: {_headline(path)}; model: {path.parent / 'model'}")
    waiting = pending(kit)
    if waiting:
        name = waiting["table"].get("name", "")
        say(f"job {name} ({waiting['fingerprint'][:12]}) waits for a decision")
        say(f"next: fednotes site approve {kit}")
    elif not found.running:
        say(f"next: fednotes site start {kit}")
    else:
        say("next: nothing to do here")


def _headline(path: Path) -> str:
    """A site's scores in a few words."""
    try:
        scores = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return f"{path} is not readable"
    parts = []
    for kind, name, label in (
        ("strict", "f1", "strict F1"),
        ("phenotypes", "f1", "macro F1"),
        ("codes", "auroc", "AUROC of codes"),
        ("masked", "accuracy", "masked words guessed"),
    ):
        value = scores.get(kind, {}).get(name)
        if value is not None:
            parts.append(f"{label} {value:.3f}")
    return "test " + ", ".join(parts) if parts else f"scores: {path}"


# ---- decisions -------------------------------------------------------------------------------


@site.command("approve")
def site_approve(
    kit: Kit,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Show the job that waits, and what changed since the last approved one; say yes to it."""
    from fednotes.guard import settle

    table, key = _waiting(kit)
    _show_job(kit, table, key)
    if not yes and not typer.confirm("Approve this job at this site?"):
        say(f"nothing was decided; to say no: fednotes site reject {kit}")
        return
    settle(kit, table, approve=True, by=_person())
    say(f"approved: {table.get('name')} ({key[:12]}); this site joins within seconds")
    say(f"next: fednotes site status {kit}; to take it back: fednotes site reject {kit}")


@site.command("reject")
def site_reject(kit: Kit) -> None:
    """Say no to the job that waits; without one, take the last approval back."""
    from fednotes.guard import approvals_of, pending, settle

    waiting = pending(kit)
    last = approvals_of(kit).last_approved()
    if waiting is None and last is None:
        raise ConfigError(f"{kit}: no job waits for a decision, and none is approved")
    table = waiting["table"] if waiting else last.table  # type: ignore[union-attr]
    key = settle(kit, table, approve=False, by=_person())
    say(f"rejected: {table.get('name')} ({key[:12]}); this site serves no request of it")
    say(f"next: fednotes site status {kit}")


def _waiting(kit: Path) -> tuple[dict[str, Any], str]:
    from fednotes.guard import pending

    waiting = pending(kit)
    if waiting is None:
        raise ConfigError(
            f"{kit}: no job waits for a decision; one comes when the admin hands it in and this "
            f"site runs (fednotes site status {kit})"
        )
    return dict(waiting["table"]), str(waiting["fingerprint"])


def _show_job(kit: Path, table: dict[str, Any], key: str) -> None:
    from fednotes.guard import approvals_of
    from fednotes.privacy.approval import difference

    last = (
        approvals_of(kit).last_approved(str(table.get("name"))) or approvals_of(kit).last_approved()
    )
    say(f"job {table.get('name')}, fingerprint {key}")
    for line in difference({}, table):
        say(f"  {line[2:]}")
    if last is None:
        say("no job was approved here before")
        return
    changed = difference(last.table, table)
    say(f"changes since {last.table.get('name')} ({last.fingerprint[:12]}), approved {last.when}:")
    for line in changed or ("none",):
        say(f"  {line}")


def _person() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"
