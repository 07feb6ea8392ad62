"""The commands of real sites: kits, sites, the server, runs, the ledger.

Each ends with what to do next.
"""

from __future__ import annotations

import getpass
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
from fednotes.ledger_cli import ledger

site = typer.Typer(help="A site's process, rules and decisions.", no_args_is_help=True)
server = typer.Typer(help="The server's process.", no_args_is_help=True)

Kit = Annotated[Path, typer.Argument(help="A kit's folder.")]
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


# ---- runs ------------------------------------------------------------------------------------


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
