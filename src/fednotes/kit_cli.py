"""The commands at a site's kit: its process, its rules and its decisions."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from fednotes.cli_groups import say
from fednotes.core.errors import ConfigError, FednotesError
from fednotes.server_cli import (
    START_SECONDS,
    Kit,
    begin,
    end,
    of_role,
    process_of,
    require_sound,
    require_stopped,
)

site = typer.Typer(help="A site's process, rules and decisions.", no_args_is_help=True)

Job = Annotated[
    str, typer.Argument(metavar="FINGERPRINT", help="Which job: how its fingerprint begins.")
]


# ---- the site's process ----------------------------------------------------------------------


OwnFile = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--site", help="The site's own file; the one that it has if not given."),
]


def _ready(kit: Path, file: Path | None) -> None:
    """Check a site's kit and file, and take the file over. Raises ConfigError for what is wrong."""
    from fednotes.site_file import install, of_kit

    of_role(kit, "site")
    rules = f"to change its rules: fednotes site rules {kit} --site FILE"
    require_stopped(kit, "site", rules if file is not None else "")
    require_sound(kit, file)
    if file is not None:
        install(file, kit)
    policy = of_kit(kit).policy
    say(f"rules: sums over {policy.min_sites} sites and more, secure sum {policy.secure_sum}")


@site.command("run")
def site_run(kit: Kit, file: OwnFile = None) -> None:
    """Run the site here until SIGTERM or Ctrl-C: for systemd and containers."""
    from fednotes.engines import processes

    _ready(kit, file)
    processes.run(kit)


@site.command("start")
def site_start(kit: Kit, file: OwnFile = None) -> None:
    """Check the site's file, take it over into the kit, and run the site in the background."""
    _ready(kit, file)
    begun = begin(kit)
    say(f"{begun.name} runs (process {begun.pid}); its log: {begun.log}")
    _say_contact(kit, begun)


def _say_contact(kit: Path, begun: Any) -> None:
    """Wait until the server has let a new process in. Raises FednotesError if it does not."""
    from fednotes.engines import processes
    from fednotes.kit_status import await_contact, connection, last_words
    from fednotes.preflight import reached

    way = reached(kit)
    if not way.ok:
        say(f"not connected yet: {way.told}; it goes on trying")
        say(f"next: fednotes preflight {kit}")
        return
    known = await_contact(kit, begun.pid, START_SECONDS)
    if known is not None and known.refused:
        processes.stop(kit)
        raise FednotesError(f"{kit}: the server refuses this site: {known.refused}")
    if not processes.status(kit).running:
        raise FednotesError(f"{kit}: the process ended: {last_words(kit)}")
    say(connection(kit, begun)[1])
    say(f"next: fednotes site status {kit} shows jobs that wait for approval")


@site.command("rules")
def site_rules(
    kit: Kit,
    file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--site", help="A new file of the site; without it, the rules are shown."),
    ] = None,
) -> None:
    """Show a site's file, or put a new one in its place, also while the site runs."""
    from fednotes.core.settings import read_toml
    from fednotes.engines import processes
    from fednotes.privacy.approval import difference
    from fednotes.site_file import SITE_FILE, install, of_kit

    of_role(kit, "site")
    if file is None:
        say((of_kit(kit).path).read_text(encoding="utf-8").rstrip())
        say(f"next: fednotes site rules {kit} --site FILE puts another in its place")
        return
    require_sound(kit, file)
    path = kit / SITE_FILE
    before = read_toml(path) if path.exists() else {}
    install(file, kit)
    changed = difference(before, read_toml(path))
    for line in changed:
        say(f"  {line}")
    if not changed:
        say("nothing has changed")
    elif processes.status(kit).running:
        say(
            "[policy] is in force now; all else from the next job on, or when the site is started "
            "again"
        )
    else:
        say("in force when the site is started")
    say(f"next: fednotes site status {kit}")


@site.command("stop")
def site_stop(kit: Kit) -> None:
    """Stop the site; its runs go on when it is started again."""
    end(kit, "site")


@site.command("status")
def site_status(kit: Kit) -> None:
    """Whether the site runs and is connected, what it serves, what waits for a decision, and its
    own scores."""
    from fednotes.deployment import RESULTS
    from fednotes.guard import approvals_of, ledger_of, pending
    from fednotes.kit_status import connection, headline, last_problem, serving

    found = process_of(kit, "site")
    up, told = connection(kit, found)
    if found.running:
        say(told)
    for decision in approvals_of(kit).decisions()[-5:]:
        name = decision.table.get("name", "")
        say(f"job {name} ({decision.fingerprint[:12]}): {decision.decision} by {decision.by}")
    say(f"messages that left: {ledger_of(kit).head().lines:,}")
    for line in serving(kit, found):
        say(line)
    for path in sorted((kit / RESULTS).glob("*/scores.json")):
        say(f"run {path.parent.name}: {headline(path)}; model: {path.parent / 'model'}")
    problem = last_problem(found.log)
    if problem is not None:
        say(f"last problem ({problem.when:%F %H:%M:%S}): {problem.text}")
    waiting = pending(kit)
    if waiting:
        name = waiting["table"].get("name", "")
        say(f"job {name} ({waiting['fingerprint'][:12]}) waits for a decision")
        say(f"next: fednotes site approve {kit}")
    elif not found.running:
        say(f"next: fednotes site start {kit}")
    elif not up:
        say(f"next: fednotes preflight {kit}")
    elif problem is not None and problem.recent:
        say(f"next: mend the last problem above; more is in {found.log}")
    else:
        say("next: nothing to do here")


# ---- decisions -------------------------------------------------------------------------------


@site.command("approve")
def site_approve(
    kit: Kit,
    job: Job = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Show the job that waits, and what changed since the last approved one; say yes to it.

    With a fingerprint: to that job, also where it was rejected before.
    """
    from fednotes.guard import job_by, pending, settle

    of_role(kit, "site")
    waiting = pending(kit)
    if job:
        key, table = job_by(kit, job)
    elif waiting is None:
        raise ConfigError(_nothing_waits(kit))
    else:
        key, table = str(waiting["fingerprint"]), dict(waiting["table"])
    _show_job(kit, table, key)
    if not yes and not typer.confirm("Approve this job at this site?"):
        say(f"nothing was decided; to say no: fednotes site reject {kit} {key[:12]}")
        return
    settle(kit, table, approve=True, by=_person())
    asked = waiting is not None and waiting["fingerprint"] == key
    joins = "joins within seconds" if asked else "takes part where a run of it goes on or comes"
    say(f"approved: {table.get('name')} ({key[:12]}); this site {joins}")
    say(f"next: fednotes site status {kit}; to take it back: fednotes site reject {kit} {key[:12]}")


@site.command("reject")
def site_reject(kit: Kit, job: Job = "") -> None:
    """Say no to the job that waits; without one, take the last approval back.

    With a fingerprint: no to that job.
    """
    from fednotes.guard import approvals_of, job_by, pending, settle

    of_role(kit, "site")
    waiting = pending(kit)
    approvals = approvals_of(kit)
    last = approvals.last_approved()
    if job:
        _, table = job_by(kit, job)
    elif waiting is not None:
        table = waiting["table"]
    elif last is not None:
        table = dict(last.table)
    else:
        raise ConfigError(f"{kit}: no job waits for a decision, and none is approved")
    before = approvals.status(table)
    key = settle(kit, table, approve=False, by=_person())
    what = "an approval is taken back" if before == "approved" else "a job that was not approved"
    say(f"rejected: {table.get('name')} ({key[:12]}), {what}; this site serves no request of it")
    if last is not None and last.fingerprint != key:
        say(f"still approved: {last.table.get('name')} ({last.fingerprint[:12]})")
    say(f"next: fednotes site status {kit}; to undo this: fednotes site approve {kit} {key[:12]}")


def _nothing_waits(kit: Path) -> str:
    """Why there is nothing to approve, and what could be meant instead."""
    from fednotes.guard import approvals_of

    past = approvals_of(kit).decisions()
    if past and past[-1].decision == "rejected":
        name, key = past[-1].table.get("name"), past[-1].fingerprint[:12]
        return (
            f"{kit}: no job waits for a decision; {name} was rejected, which "
            f"`fednotes site approve {kit} {key}` takes back"
        )
    return (
        f"{kit}: no job waits for a decision; one comes when the admin hands it in and this "
        f"site runs (fednotes site status {kit})"
    )


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
