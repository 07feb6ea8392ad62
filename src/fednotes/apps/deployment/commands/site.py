"""The commands at a site's kit: its process, its rules and its decisions."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import chop_cells

from fednotes.apps.deployment.commands.server import (
    START_SECONDS,
    Kill,
    Kit,
    begin,
    end,
    of_role,
    process_of,
    require_ready,
    require_sound,
)
from fednotes.cli.all_commands import DEPLOY
from fednotes.cli.shared import console, say
from fednotes.core import plugins
from fednotes.core.cleaning import clean
from fednotes.core.errors import ConfigError, FednotesError
from fednotes.core.tables import table_differences, table_fingerprint

if TYPE_CHECKING:
    from fednotes.apps.deployment.nvflare.processes import Status
    from fednotes.apps.deployment.rules.approval import Quorum, Signer

POLL_SECONDS = 0.5  # between two looks for a job that asks for approval

site = typer.Typer(
    help="Run a site; manage its rules, approvals and data.",
    no_args_is_help=True,
    rich_help_panel=DEPLOY,
)

Job = Annotated[
    str, typer.Argument(metavar="FINGERPRINT", help="Prefix of the job's fingerprint.")
]


# ---- the site's process --------------------------------------------------------------


OwnFile = Annotated[
    Path | None,
    typer.Option("--site", help="The site's file; by default the one in the kit."),
]


def _ready(kit: Path, file: Path | None) -> None:
    """Check a site's kit and file, and take the file over.

    Raises ConfigError for what is wrong.
    """
    from fednotes.apps.deployment.site_file import install, read_kit_site_file

    rules = f"to change its rules: fednotes site rules {kit} --site FILE"
    require_ready(kit, "site", file, rules if file is not None else "")
    if file is not None:
        install(file, kit)
    policy = read_kit_site_file(kit).policy
    say(
        f"rules: sums over {policy.min_sites} sites and more, secure sum {policy.secure_sum}"
    )


@site.command("run")
def site_run(kit: Kit, file: OwnFile = None) -> None:
    """Run the site in the foreground, for systemd and containers."""
    from fednotes.apps.deployment.nvflare import processes

    _ready(kit, file)
    processes.run(kit)


@site.command("start")
def site_start(kit: Kit, file: OwnFile = None) -> None:
    """Install the site's file in the kit and start the site."""
    _ready(kit, file)
    begun = begin(kit)
    say(f"{begun.name} runs (process {begun.pid}); its log: {begun.log}")
    _say_contact(kit, begun)


def _say_contact(kit: Path, begun: Status) -> None:
    """Wait until the server has let a new process in.

    Raises FednotesError if it does not.
    """
    from fednotes.apps.deployment.nvflare import processes
    from fednotes.apps.deployment.preflight import check_server
    from fednotes.apps.deployment.status import await_contact, connection, last_words

    connection_check = check_server(kit)
    if not connection_check.ok:
        say(f"not connected yet: {connection_check.message}; it keeps trying")
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
        Path | None,
        typer.Option(
            "--site", help="A new site file to install; without it, show the rules."
        ),
    ] = None,
) -> None:
    """Show a site's rules, or replace them, even while it runs."""
    from fednotes.apps.deployment.nvflare import processes
    from fednotes.apps.deployment.site_file import (
        SITE_FILE,
        install,
        read_kit_site_file,
    )
    from fednotes.core.settings import read_toml

    of_role(kit, "site")
    if file is None:
        say(*read_kit_site_file(kit).path.read_text(encoding="utf-8").splitlines())
        say(f"next: fednotes site rules {kit} --site FILE puts another in its place")
        return
    require_sound(kit, file)
    path = kit / SITE_FILE
    before = read_toml(path) if path.exists() else {}
    install(file, kit)
    changed = table_differences(before, read_toml(path))
    now = "[policy] is in force now; all else from the next job on, or when the site is started"
    later = (
        f"{now} again"
        if processes.status(kit).running
        else "in force when the site is started"
    )
    say(*(f"  {line}" for line in changed), later if changed else "nothing has changed")
    say(f"next: fednotes site status {kit}")


@site.command("stop")
def site_stop(kit: Kit, kill: Kill = False) -> None:
    """Stop the site; its runs resume when it is started again."""
    end(kit, "site", kill=kill)


@site.command("status")
def site_status(kit: Kit) -> None:
    """Show the site's state, runs, waiting approvals and scores."""
    from fednotes.apps.deployment.rules.guard import approvals_of, named, pending
    from fednotes.apps.deployment.rules.ledger import ledger_of
    from fednotes.apps.deployment.site import RESULTS
    from fednotes.apps.deployment.status import (
        connection,
        headline,
        last_problem,
        serving,
    )
    from fednotes.core.parsing import read_json_table
    from fednotes.jobs.results import PROMISED

    found = process_of(kit, "site")
    up, told = connection(kit, found)
    if found.running:
        say(told)
    for decision in approvals_of(kit).decisions()[-5:]:
        by = clean(decision.by) + (
            f", with the key of {decision.person}" * bool(decision.person)
        )
        key = decision.fingerprint[:12]
        say(f"job {named(decision.table)} ({key}): {decision.decision} by {by}")
    say(f"messages that left: {ledger_of(kit).head().lines:,}")
    say(*serving(kit, found))
    for path in sorted((kit / RESULTS).glob("*/scores.json")):
        say(f"run {path.parent.name}: {headline(path)}; model: {path.parent / 'model'}")
        if promised := read_json_table(path.with_name(PROMISED)).get("promise"):
            say(f"  {clean(promised)}")
    problem = last_problem(found.log)
    if problem is not None:
        say(f"last problem ({problem.when:%F %H:%M:%S}): {problem.text}")
    waiting = pending(kit)
    if waiting:
        quorum = _quorum(kit)
        some = _some(
            quorum, approvals_of(kit, quorum).standing(waiting["table"]).people
        )
        key = waiting["fingerprint"][:12]
        say(
            f"job {named(waiting['table'])} ({key}) waits for a decision{some and f': {some}'}"
        )
        say(f"next: fednotes site approve {kit}" + " --key FILE" * bool(quorum.people))
    elif not found.running:
        say(f"next: fednotes site start {kit}")
    elif not up:
        say(f"next: fednotes preflight {kit}")
    elif problem is not None and problem.recent:
        say(f"next: mend the last problem above; more is in {found.log}")
    else:
        say("next: nothing to do here")


@site.command("forget")
def site_forget(
    kit: Kit,
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The run's name, as `site status` shows it."
        ),
    ],
) -> None:
    """Delete what this site keeps of a run.

    Journals, states, the model, its scores and the cache of its notes are deleted. The
    ledger and the decisions stay."""
    from fednotes.apps.deployment.rules.ledger import ledger_of
    from fednotes.apps.deployment.status import forget

    of_role(kit, "site")
    freed = forget(kit, run)
    say(*(f"deleted: {folder}, {size:,} bytes" for folder, size in freed.items()))
    say(
        f"{sum(freed.values()):,} bytes in all; {ledger_of(kit).path} still says what left"
    )
    say("should the server ask for this run again, the site begins it anew")
    say(f"next: fednotes site status {kit}")


# ---- decisions -----------------------------------------------------------------------


@site.command("key")
def site_key(
    person: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the person whose key it is.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to create; NAME.key by default.")
    ] = None,
    passphrase: Annotated[
        bool,
        typer.Option(
            "--passphrase", help="Encrypt the file with a passphrase that is asked for."
        ),
    ] = False,
) -> None:
    """Create the key with which one person approves jobs."""
    from fednotes.apps.deployment.rules.approval import make_key

    path = out or Path(f"{person}.key")
    words = "Passphrase"
    secret = (
        typer.prompt(words, hide_input=True, confirmation_prompt=True)
        if passphrase
        else ""
    )
    public = make_key(path, person, secret)
    say(f"{path}: the key of {person}; keep it where nobody else can read it")
    say("next: in [policy] of the site's file, with a line for each who may approve:")
    say("      approvals = 2")
    say(f'      approvers.{person} = "{public}"')


@site.command("approve")
def site_approve(
    kit: Kit,
    job: Job = "",
    yes: Annotated[bool, typer.Option("--yes", help="Approve without asking.")] = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until a job asks for approval.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Maximum time that --wait waits."),
    ] = 600.0,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key", metavar="FILE", help="Your key, if the site's rules list keys."
        ),
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder of `fednotes audit`; the kit keeps a copy."
        ),
    ] = None,
) -> None:
    """Show the job that waits for approval, and approve it.

    Its changes since the last approved job are shown. With a fingerprint, approve that
    job, even if it was rejected before. With --wait, wait until the server asks this
    site for approval.
    """
    from fednotes.apps.deployment.rules.guard import (
        approvals_of,
        job_by,
        named,
        pending,
        settle,
    )

    of_role(kit, "site")
    quorum = _quorum(kit)
    if wait:
        _await_request(kit, job, timeout)
    waiting = pending(kit)
    if job:
        key, table = job_by(kit, job)
    elif waiting is None:
        raise ConfigError(_nothing_waits(kit))
    else:
        key, table = str(waiting["fingerprint"]), dict(waiting["table"])
    signer = _signer(kit, quorum, key_file)
    _show_job(kit, table, key, quorum)
    _check_counts(kit, table)
    _audited(kit, table, key, audit)
    have = approvals_of(kit, quorum).standing(table).people
    if signer is not None and signer.person in have:
        say(f"{signer.person} has approved this job before: {_some(quorum, have)}")
        return
    if not yes and not typer.confirm("Approve this job at this site?"):
        say(f"nothing was decided; to say no: fednotes site reject {kit} {key[:12]}")
        return
    settle(kit, table, approve=True, by=account(), quorum=quorum, signer=signer)
    if have := approvals_of(kit, quorum).standing(table).people:
        say(f"{named(table)} ({key[:12]}): {_some(quorum, have)}")
        say(f"next: who is asked: fednotes site approve {kit} {key[:12]} --key FILE")
        return
    asked = waiting is not None and waiting["fingerprint"] == key
    joins = (
        "joins within seconds"
        if asked
        else "takes part where a run of it goes on or comes"
    )
    say(f"approved: {named(table)} ({key[:12]}); this site {joins}")
    say(
        f"next: fednotes site status {kit}; to take it back: fednotes site reject {kit} {key[:12]}"
    )


def _await_request(kit: Path, job: str, timeout: float) -> None:
    """Wait until a job asks for approval at a site.

    Args:
        kit: The site's kit.
        job: Prefix of the fingerprint of the job to wait for; "" for any job.
        timeout: Maximum time to wait, in seconds.

    Raises:
        ConfigError: No such job has asked within that time.
    """
    from fednotes.apps.deployment.nvflare import processes
    from fednotes.apps.deployment.rules.guard import approvals_of

    begin = time.monotonic()
    if not processes.status(kit).running:
        say(
            f"note: this site does not run, so nothing can ask it: fednotes site start {kit}"
        )
    if not console.is_terminal:
        say(f"waiting up to {timeout:g} s for a job that asks for approval")
    known = [past.fingerprint for past in approvals_of(kit).decisions()] if job else []
    with console.status("waiting for a job that asks for approval") as shown:
        while not _has_request(kit, job, known):
            seconds = time.monotonic() - begin
            if seconds >= timeout:
                which = f" whose fingerprint begins with {job!r}" if job else ""
                raise ConfigError(
                    f"{kit}: no job{which} has asked for approval within {timeout:g} s. Check that "
                    f"the site is connected (fednotes site status {kit}) and that the job was "
                    "handed in (fednotes run), or wait longer with --timeout SECONDS"
                )
            shown.update(f"waiting for a job that asks for approval ({seconds:.0f} s)")
            time.sleep(min(POLL_SECONDS, timeout - seconds))


def _has_request(kit: Path, job: str, known: Sequence[str]) -> bool:
    """Return whether a job that `job` names waits for a decision, or was decided on
    before."""
    from fednotes.apps.deployment.rules.guard import pending

    request = pending(kit)
    fingerprints = [*known, *([str(request["fingerprint"])] if request else [])]
    return any(each.startswith(job.strip().lower()) for each in fingerprints)


@site.command("reject")
def site_reject(kit: Kit, job: Job = "") -> None:
    """Reject the waiting job; if none waits, withdraw the last approval.

    With a fingerprint, reject that job. One person's rejection is enough and needs no
    key.
    """
    from fednotes.apps.deployment.rules.guard import (
        approvals_of,
        job_by,
        named,
        pending,
        settle,
    )

    of_role(kit, "site")
    quorum, waiting = _quorum(kit), pending(kit)
    approvals = approvals_of(kit, quorum)
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
    key = settle(kit, table, approve=False, by=account(), quorum=quorum)
    what = (
        "an approval is taken back"
        if before == "approved"
        else "a job that was not approved"
    )
    say(
        f"rejected: {named(table)} ({key[:12]}), {what}; this site serves no request of it"
    )
    if last is not None and last.fingerprint != key:
        say(f"still approved: {named(last.table)} ({last.fingerprint[:12]})")
    say(
        f"next: fednotes site status {kit}; to undo this: fednotes site approve {kit} {key[:12]}"
    )


def _check_counts(kit: Path, table: dict[str, Any]) -> None:
    """Check that a job's sites can round their counts, where the site's rules ask for
    it.

    Raises:
        PolicyRefusal: Exact counts would leave the site.
    """
    from fednotes.apps.deployment.agreement import can_round_counts
    from fednotes.apps.deployment.rules.policy import check_counts
    from fednotes.apps.deployment.site_file import read_policy
    from fednotes.jobs.declaration import parse_declared

    policy = read_policy(kit)
    if policy.count_step == 1:
        return

    try:
        job = parse_declared(table, kit, "job")
    except FednotesError:
        return  # a job that is none is refused when it begins
    check_counts(policy, job.method, can_round_counts(job))
    say(f"weights and counts of this site leave in multiples of {policy.count_step:,}")


def _audited(kit: Path, table: dict[str, Any], key: str, given: Path | None) -> None:
    """Show the audit of a job, a new one or the one that the kit keeps, and judge it by
    the rules.

    Raises ConfigError for one of another job, site or federation, PolicyRefusal.
    """
    from fednotes.apps.deployment.nvflare.kit import read_kit
    from fednotes.apps.deployment.rules.guard import RULES
    from fednotes.apps.deployment.rules.policy import check_audit
    from fednotes.apps.deployment.site_file import read_policy
    from fednotes.core.parsing import mapping
    from fednotes.core.store import private_folder, write_json
    from fednotes.jobs.results import AUDIT, read_audit

    kept = kit / RULES / "audits" / key
    found, name, worst = read_audit(given or kept), read_kit(kit).name, None
    if given is not None and found is None:
        raise ConfigError(
            f"{given}: no {AUDIT} there; name the folder that `fednotes audit` wrote"
        )
    if found is not None:
        declared = table_fingerprint(table.get("job", {}))
        if (found.fingerprint, found.site) != (declared, name):
            raise ConfigError(
                f"{given or kept}: an audit of site {clean(found.site)!r} and the job table "
                f"{clean(found.fingerprint)[:12]!r}, where site {name!r} and {declared[:12]!r} "
                f"are asked about: fednotes audit JOB --site {name}, with the file that was run"
            )
        if {*table.get("sites", ())} != {
            *mapping(mapping(table.get("job")).get("sites"))
        }:
            raise ConfigError(
                "the run is not of the sites that the job's table has, which was audited; reject it"
            )
        if given is not None:
            private_folder(kept)
            write_json(kept / AUDIT, found.model_dump())
        say(f"audit: {clean(found.summary, None)}")
        attacks = chain(*plugins.load_all("attacks", (tuple, list)).values())
        lacking = {attack.name for attack in attacks} - {
            leak.attack for leak in found.attacks
        }
        worst = None if lacking or found.untried else found.worst
    check_audit(read_policy(kit), worst)


def _nothing_waits(kit: Path) -> str:
    """Why there is nothing to approve, and what could be meant instead."""
    from fednotes.apps.deployment.rules.guard import approvals_of, named

    past = approvals_of(kit).decisions()
    if past and past[-1].decision == "rejected":
        name, key = named(past[-1].table), past[-1].fingerprint[:12]
        return (
            f"{kit}: no job waits for a decision; {name} was rejected, which "
            f"`fednotes site approve {kit} {key}` takes back"
        )
    return (
        f"{kit}: no job waits for a decision; one comes when the admin hands it in and this "
        f"site runs (fednotes site status {kit})"
    )


def _show_job(kit: Path, table: dict[str, Any], key: str, quorum: Quorum) -> None:
    """The hash that is approved, then what it is of. Only our own words begin a row."""
    from fednotes.apps.deployment.rules.guard import approvals_of, named
    from fednotes.jobs.declaration import parse_declared

    approvals = approvals_of(kit, quorum)
    last = approvals.last_approved(str(table.get("name"))) or approvals.last_approved()
    say(f"fingerprint {key}")
    _rows(f"job {named(table)}")
    for line in table_differences({}, table):
        _rows(f"  {line[2:]}")
    with suppress(FednotesError):  # a job that is none is refused when it begins
        job = parse_declared(table, kit, "job")
        config: Any = job.config
        if promise := job.module.promise(
            replace(config, sites=len(table.get("sites", ())))
        ):
            say(f"promises {promise}")
    if last is None:
        say("no job was approved here before")
        return
    changed = table_differences(last.table, table)
    _rows(
        f"changes since {named(last.table)} ({last.fingerprint[:12]}), approved {last.when}:"
    )
    for line in changed or ("none",):
        _rows(f"  {line}")
    _show_earlier(kit, table, key, quorum)


def _show_earlier(kit: Path, table: dict[str, Any], key: str, quorum: Quorum) -> None:
    """Show how a job differs from each that was approved before, in whose notes are
    summed."""
    from fednotes.apps.deployment.rules.approval import compare
    from fednotes.apps.deployment.rules.guard import approvals_of, named
    from fednotes.apps.deployment.site_file import read_policy

    least = read_policy(kit).min_sites
    for past in approvals_of(kit, quorum).approved():
        if past.fingerprint == key:
            continue
        found = compare(past.table, table, quorum.site)
        sites = (
            f"other sites ({', '.join(map(clean, found.sites))})"
            if found.sites
            else "its sites"
        )
        notes = "other notes here" if found.own else "its notes here"
        _rows(
            f"compared with {named(past.table)} ({past.fingerprint[:12]}): {sites}, {notes}"
        )
        for line in found.own:
            _rows(f"  {line}")
        for warning in found.warnings(least):
            _rows(f"  warning: {warning}")


def _rows(line: str) -> None:
    """A line with a job's words. What a terminal would break goes on behind a mark, or
    a long name could look like a line of ours."""
    width = max(20, console.width - 8) if console.is_terminal else 10**6
    for number, row in enumerate(chop_cells(clean(line, None), width)):
        say(f"      … {row}" if number else row)


def _quorum(kit: Path) -> Quorum:
    from fednotes.apps.deployment.nvflare.kit import read_kit
    from fednotes.apps.deployment.site_file import read_policy

    return read_policy(kit).quorum(read_kit(kit).name)


def _signer(kit: Path, quorum: Quorum, file: Path | None) -> Signer | None:
    """Who approves, where that takes a key.

    Raises ConfigError for one too few or too many.
    """
    from fednotes.apps.deployment.rules.approval import Signer, read_key

    if file is None and quorum.people:
        raise ConfigError(
            f"{kit}: its rules ask for {quorum.needed} of {', '.join(quorum.people)} to approve, "
            f"each with their own key: fednotes site approve {kit} --key FILE"
        )
    if file is None:
        return None
    if not quorum.people:
        raise ConfigError(f"{kit}: its rules list no approvers: approve without --key")
    key = read_key(file, lambda: str(typer.prompt("Passphrase", hide_input=True)))
    return Signer(quorum.person_of(key, file), key)


def _some(quorum: Quorum, have: frozenset[str]) -> str:
    """Who has approved a job that more must approve; empty where nobody has."""
    rest = [person for person in quorum.people if person not in have]
    told = (
        f"approved by {', '.join(sorted(have))}; {quorum.needed - len(have)} more of "
    )
    return f"{told}{', '.join(rest)} must" if have else ""


def account() -> str:
    """Whose account of the system runs this. No variable of the environment can change
    it; what sudo says in one is told besides."""
    sudo = os.environ.get("SUDO_UID", "")
    besides = f"; SUDO_UID is of {_of_user(int(sudo))}" if sudo.isdecimal() else ""
    return f"{_of_user(os.getuid())}{besides}"


def _of_user(number: int) -> str:
    import pwd  # not on Windows, where no kit runs either

    try:
        name = pwd.getpwuid(number).pw_name
    except (KeyError, OverflowError):  # as in many containers
        name = "no name"
    return f"{name} (uid {number})"
