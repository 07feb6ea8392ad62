"""The command `site`: a site's process, its rules and its decisions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.cells import chop_cells

from fednotes.apps.deployment.commands.server import (
    START_SECONDS,
    Kill,
    Kit,
    describe_process,
    report_process,
    require_ready,
    require_role,
    require_sound,
    start_process,
    stop_process,
)
from fednotes.cli.all_commands import DEPLOY
from fednotes.cli.plain_help import OldName, with_examples
from fednotes.cli.shared import Json, Yes, console, print_json, say
from fednotes.core.cleaning import clean
from fednotes.core.errors import ConfigError, FednotesError
from fednotes.core.tables import compare_tables

if TYPE_CHECKING:
    from fednotes.apps.deployment.nvflare.processes import Status
    from fednotes.apps.deployment.rules.approval import Quorum, Signer
    from fednotes.apps.deployment.rules.guard import RequestedJob

POLL_SECONDS = 0.5  # between two checks for a job that asks for approval
_SHOWN_DECISIONS = 5  # maximum number of decisions in a site's status
_SHOWN_CHARACTERS = 12  # of a fingerprint

site = typer.Typer(
    help="Start, stop and inspect a site; manage its rules and approvals.",
    no_args_is_help=True,
    rich_help_panel=DEPLOY,
)

Job = Annotated[
    str, typer.Argument(metavar="FINGERPRINT", help="Prefix of the job's fingerprint.")
]


# ---- the site's process --------------------------------------------------------------


SiteFileOption = Annotated[
    Path | None,
    typer.Option(
        "--site-file",
        OldName("--site"),
        help="The site's file; by default the one in the kit.",
    ),
]


def _check_and_install(kit: Path, file: Path | None) -> None:
    """Check that a site's kit can start, and install its file.

    Args:
        kit: The site's kit.
        file: The file to install; None for the one in the kit.

    Raises:
        ConfigError: A problem of the kit or the file prevents the start.
    """
    from fednotes.apps.deployment.preflight import list_note_warnings
    from fednotes.apps.deployment.site_file import install_site_file, read_kit_site_file

    remedy = ""
    if file is not None:
        remedy = f"to change its rules: fednotes site rules {kit} --site-file FILE"
    require_ready(kit, "site", source=file, remedy=remedy)
    if file is not None:
        install_site_file(file, kit)
    site_file = read_kit_site_file(kit)
    policy = site_file.policy
    say(
        f"rules: sums over {policy.min_sites} or more sites, secure sum "
        f"{policy.secure_sum}"
    )
    say(*(f"warning: {warning}" for warning in list_note_warnings(site_file)))


@site.command("run")
@with_examples(
    "fednotes site run kits/sites/mercy --site-file mercy.toml",
)
def site_run(kit: Kit, file: SiteFileOption = None) -> None:
    """Run the site in the foreground, for systemd and containers."""
    from fednotes.apps.deployment.nvflare import processes

    _check_and_install(kit, file)
    processes.run(kit)


@site.command("start")
@with_examples(
    "fednotes site start kits/sites/mercy --site-file mercy.toml",
)
def site_start(kit: Kit, file: SiteFileOption = None) -> None:
    """Install the site's file in the kit and start the site."""
    _check_and_install(kit, file)
    process = start_process(kit)
    contact = _describe_contact(kit, process)
    say(f"{process.name} is running (process {process.pid}); its log: {process.log}")
    say(*contact)


def _describe_contact(kit: Path, process: Status) -> list[str]:
    """Wait until the server admits a new process; return the result and what to do.

    Raises:
        FednotesError: The server refuses this site, or the process ended.
    """
    from fednotes.apps.deployment.nvflare import processes
    from fednotes.apps.deployment.preflight import check_server
    from fednotes.apps.deployment.status import (
        await_contact,
        describe_connection,
        read_last_words,
    )

    server_check = check_server(kit)
    if not server_check.ok:
        return [
            f"not connected yet: {server_check.message}; it keeps trying",
            f"next: fednotes preflight {kit}",
        ]
    contact = await_contact(kit, process.pid, START_SECONDS)
    if contact is not None and contact.refused:
        processes.stop(kit)
        raise FednotesError(f"{kit}: the server refuses this site: {contact.refused}")
    if not processes.read_status(kit).is_running:
        raise FednotesError(f"{kit}: the process ended: {read_last_words(kit)}")
    return [
        describe_connection(kit, process).text,
        f"next: fednotes site status {kit} shows jobs that are waiting for approval",
    ]


@site.command("rules")
@with_examples(
    "fednotes site rules kits/sites/mercy --site-file mercy.toml",
)
def site_rules(
    kit: Kit,
    file: SiteFileOption = None,
    json_output: Json = False,
) -> None:
    """Show or replace a site's rules, even while it is running.

    Show the rules in the kit; with --site-file, install those of a new file.
    """
    from fednotes.apps.deployment.nvflare import processes
    from fednotes.apps.deployment.site_file import (
        SITE_FILE,
        install_site_file,
        read_kit_site_file,
    )
    from fednotes.core.settings import read_toml

    require_role(kit, "site")
    if file is None and json_output:
        print_json(read_toml(read_kit_site_file(kit).path))
        return
    if file is None:
        say(*read_kit_site_file(kit).path.read_text(encoding="utf-8").splitlines())
        say(f"next: to replace the rules: fednotes site rules {kit} --site-file FILE")
        return

    require_sound(kit, file)
    path = kit / SITE_FILE
    old_rules = read_toml(path) if path.exists() else {}
    install_site_file(file, kit)
    changes = compare_tables(old_rules, read_toml(path))
    if json_output:
        print_json({"changes": changes})
        return
    say(*(f"  {line}" for line in changes))
    if not changes:
        say("nothing has changed")
    elif processes.read_status(kit).is_running:
        say(
            "[policy] applies now; everything else applies when the site next joins a "
            "run (including one that is waiting for approval) or is started again"
        )
    else:
        say("the rules apply when the site is started")
    say(f"next: fednotes site status {kit}")


@site.command("stop")
@with_examples(
    "fednotes site stop kits/sites/mercy",
)
def site_stop(kit: Kit, kill: Kill = False) -> None:
    """Stop the site; its runs resume when it is started again."""
    stop_process(kit, "site", kill=kill)


@site.command("status")
@with_examples(
    "fednotes site status kits/sites/mercy",
)
def site_status(kit: Kit, json_output: Json = False) -> None:
    """Show the site's state, runs, waiting approvals and scores."""
    if json_output:
        print_json(_describe_site(kit))
    else:
        _say_status(kit)


def _describe_site(kit: Path) -> dict[str, Any]:
    """Return as JSON what `site status` shows."""
    from fednotes.apps.deployment.approval_requests import read_quorum
    from fednotes.apps.deployment.nvflare import processes
    from fednotes.apps.deployment.problems import read_last_problem
    from fednotes.apps.deployment.rules.guard import (
        clean_job_name,
        open_approvals,
        read_pending_jobs,
    )
    from fednotes.apps.deployment.rules.ledger import Ledger
    from fednotes.apps.deployment.status import (
        describe_connection,
        describe_served_runs,
    )

    described = describe_process(kit, "site")
    process = processes.read_status(kit)
    connection = describe_connection(kit, process)
    problem = read_last_problem(kit)
    last_problem = None
    if problem is not None:
        last_problem = {"when": problem.when.isoformat(), "text": problem.text}
    approvals = open_approvals(kit, read_quorum(kit))
    waiting_jobs = [
        {
            "job": clean_job_name(job.table),
            "fingerprint": job.fingerprint,
            "approved_by": sorted(approvals.read_standing(job.table).people),
        }
        for job in read_pending_jobs(kit)
    ]
    return described | {
        "is_connected": connection.is_up,
        "connection": connection.text,
        "messages": Ledger.in_kit(kit).read_head().lines,
        "runs": describe_served_runs(kit, process),
        "decisions": [
            {
                "job": clean_job_name(decision.table),
                "fingerprint": decision.fingerprint,
                "decision": decision.decision,
                "by": decision.by,
                "person": decision.person,
                "when": decision.when,
            }
            for decision in open_approvals(kit).read_decisions()
        ],
        "scores": _read_scores(kit),
        "last_problem": last_problem,
        "waiting_jobs": waiting_jobs,
    }


def _read_scores(kit: Path) -> dict[str, Any]:
    """Return the scores of each run that has any, by its name."""
    from fednotes.apps.deployment.site import RESULTS
    from fednotes.core.parsing import read_json

    scores = {}
    for path in sorted((kit / RESULTS).glob("*/scores.json")):
        with suppress(OSError, ValueError):  # the text shows which is not readable
            scores[path.parent.name] = read_json(path, strict=False)
    return scores


def _say_status(kit: Path) -> None:
    """Print a site's state, runs, waiting approvals and scores, and what to do next."""
    from fednotes.apps.deployment.approval_requests import read_quorum
    from fednotes.apps.deployment.nvflare.processes import read_last_refusal
    from fednotes.apps.deployment.problems import read_last_problem
    from fednotes.apps.deployment.rules.guard import read_pending_jobs
    from fednotes.apps.deployment.rules.ledger import Ledger
    from fednotes.apps.deployment.status import (
        describe_connection,
        describe_served_runs,
    )

    process = report_process(kit, "site")
    connection = describe_connection(kit, process)
    if process.is_running:
        say(connection.text)
    _say_decisions(kit)
    say(f"messages that left: {Ledger.in_kit(kit).read_head().lines:,}")
    say(*describe_served_runs(kit, process))
    _say_scores(kit)
    problem = read_last_problem(kit)
    if problem is not None:
        say(f"last problem ({problem.when:%F %H:%M:%S}): {problem.text}")

    waiting_jobs = read_pending_jobs(kit)
    for job in waiting_jobs:
        _say_waiting_job(kit, job)
    if _has_invalid_certificate(kit):
        say("next: ask the project's coordinator for a new kit")
    elif not process.is_running and problem is not None and read_last_refusal(kit):
        # The server refused this site, and would do so again.
        say(f"next: fix the last problem above; then: fednotes site start {kit}")
    elif not process.is_running:
        say(f"next: fednotes site start {kit}")
    elif not connection.is_up:
        say(f"next: fednotes preflight {kit}")
    elif waiting_jobs:
        choice = " FINGERPRINT" if len(waiting_jobs) > 1 else ""
        key_option = " --key FILE" if read_quorum(kit).people else ""
        say(f"next: fednotes site approve {kit}{choice}{key_option}")
    elif problem is not None and problem.is_recent:
        say(f"next: fix the last problem above; {process.log} has the details")
    else:
        say("next: no action needed")


def _has_invalid_certificate(kit: Path) -> bool:
    """Return whether a kit cannot start because of its certificates."""
    from fednotes.apps.deployment.nvflare.certificates import check_kit

    try:
        check_kit(kit)
    except FednotesError:
        return True
    return False


def _say_decisions(kit: Path) -> None:
    """Print the newest decisions on jobs, and who made them."""
    from fednotes.apps.deployment.approval_requests import label_job
    from fednotes.apps.deployment.rules.guard import open_approvals

    for decision in open_approvals(kit).read_decisions()[-_SHOWN_DECISIONS:]:
        person = clean(decision.by)
        if decision.person:
            person = f"{person}, with the key of {decision.person}"
        label = label_job(decision.table, decision.fingerprint)
        say(f"{label}: {decision.decision} by {person}")


def _say_scores(kit: Path) -> None:
    """Print the scores of each run that has any, and its privacy guarantee."""
    from fednotes.apps.deployment.site import RESULTS
    from fednotes.apps.deployment.status import describe_scores
    from fednotes.core.parsing import read_json_table
    from fednotes.jobs.results import PROMISED

    for path in sorted((kit / RESULTS).glob("*/scores.json")):
        run = path.parent
        say(f"run {run.name}: {describe_scores(path)}; model: {run / 'model'}")
        promise = read_json_table(path.with_name(PROMISED)).get("promise")
        if promise:
            say(f"  {clean(promise)}")


def _say_waiting_job(kit: Path, job: RequestedJob) -> None:
    """Print that a job waits for a decision, and who has already approved it."""
    from fednotes.apps.deployment.approval_requests import (
        describe_partial_approval,
        has_run,
        label_job,
        read_quorum,
    )
    from fednotes.apps.deployment.rules.guard import open_approvals

    quorum = read_quorum(kit)
    people = open_approvals(kit, quorum).read_standing(job.table).people
    line = f"{label_job(job.table, job.fingerprint)} is waiting for a decision"
    if not has_run(kit, job):
        line = f"{line}, but no run asks for it now"
    if people:
        line = f"{line}: {describe_partial_approval(quorum, people)}"
    say(line)


@site.command("forget")
@with_examples(
    "fednotes site forget kits/sites/mercy ner-20261128-101500",
)
def site_forget(
    kit: Kit,
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN", help="The run's name, as `site status` shows it."
        ),
    ],
) -> None:
    """Delete a run's files at this site.

    Delete the run's journals and states, its model and scores. Also delete the site's
    whole cache of features, tokens and concepts. The ledger and the decisions are kept.
    """
    from fednotes.apps.deployment.rules.ledger import Ledger
    from fednotes.apps.deployment.status import forget_run

    require_role(kit, "site")
    freed = forget_run(kit, run)
    say(*(f"deleted: {folder}, {size:,} bytes" for folder, size in freed.items()))
    say(
        f"{sum(freed.values()):,} bytes in all; {Ledger.in_kit(kit).path} still "
        "says what left"
    )
    say("if the server asks for this run again, the site starts it from the beginning")
    say(f"next: fednotes site status {kit}")


# ---- decisions -----------------------------------------------------------------------


@site.command("key")
@with_examples(
    "fednotes site key alice --out alice.key",
)
def site_key(
    person: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the person whose key it is.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="File to create; NAME.key by default.")
    ] = None,
    protect: Annotated[
        bool,
        typer.Option(
            "--protect",
            OldName("--passphrase"),
            help="Encrypt the key with a passphrase.",
        ),
    ] = False,
) -> None:
    """Create a key with which a person approves jobs.

    With --protect, prompt for the passphrase.
    """
    from fednotes.apps.deployment.rules.approval import make_key

    path = out or Path(f"{person}.key")
    secret = ""
    if protect:
        secret = _ask_passphrase(is_new=True)
    public = make_key(path, person, secret)
    say(f"{path}: the key of {person}; keep it where nobody else can read it")
    say(
        "next: in [policy] of the site's file, add a line for each "
        "person who may approve:"
    )
    say("      approvals = 2")
    say(f'      approvers.{person} = "{public}"')


@site.command("approve")
@with_examples(
    "fednotes site approve kits/sites/mercy --wait",
    "fednotes site approve kits/sites/mercy 3f2a9c --key alice.key",
)
def site_approve(
    kit: Kit,
    job: Job = "",
    yes: Yes = False,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until a job asks for approval.")
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Maximum time of --wait."),
    ] = 600.0,
    key_file: Annotated[
        Path | None,
        typer.Option(
            "--key",
            metavar="FILE",
            help="File with your key, if the site's rules list keys.",
        ),
    ] = None,
    audit: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder of the job's audit (`fednotes audit`)."
        ),
    ] = None,
) -> None:
    """Show the job that is waiting for approval, and approve it.

    Also show how the job differs from the last approved job. If several jobs are
    waiting, a fingerprint is required. With a fingerprint, approve that job, even if it
    was rejected before. With --wait, wait until the server asks this site for approval.
    """
    from fednotes.apps.deployment.approval_requests import (
        describe_account,
        describe_partial_approval,
        read_quorum,
    )
    from fednotes.apps.deployment.rules.guard import (
        open_approvals,
        read_pending_jobs,
        settle_job,
    )

    require_role(kit, "site")
    quorum = read_quorum(kit)
    if wait:
        _await_request(kit, job, timeout)
    waiting_jobs = read_pending_jobs(kit)
    requested = _find_requested_job(kit, job, waiting_jobs, command="approve")
    if requested is None:
        raise ConfigError(_explain_no_job(kit))
    table = requested.table

    signer = _load_signer(kit, quorum, key_file)
    _show_job(kit, requested, quorum)
    _check_job(kit, requested, audit)
    _say_other_jobs(kit, requested, waiting_jobs)
    people = open_approvals(kit, quorum).read_standing(table).people
    if signer is not None and signer.person in people:
        partial_approval = describe_partial_approval(quorum, people)
        say(f"{signer.person} has approved this job before: {partial_approval}")
        return
    if not yes and not _confirm_approval():
        prefix = requested.fingerprint[:_SHOWN_CHARACTERS]
        say(
            f"nothing was decided; to reject the job: fednotes site reject {kit} "
            f"{prefix}"
        )
        return
    settle_job(
        kit, table, approve=True, by=describe_account(), quorum=quorum, signer=signer
    )
    _say_approved(kit, requested, quorum)


def _find_requested_job(
    kit: Path, prefix: str, waiting_jobs: Sequence[RequestedJob], *, command: str
) -> RequestedJob | None:
    """Return the job on which a person decides; None if no job waits.

    Args:
        kit: The site's kit.
        prefix: Prefix of the job's fingerprint; "" for the only waiting job.
        waiting_jobs: The jobs that wait for a decision.
        command: "approve" or "reject".

    Raises:
        ConfigError: No job has the prefix, or it is missing although several jobs wait.
    """
    from fednotes.apps.deployment.approval_requests import has_run, label_job
    from fednotes.apps.deployment.rules.guard import find_job

    if prefix:
        return find_job(kit, prefix)
    if len(waiting_jobs) > 1:
        labels = []
        for job in waiting_jobs:
            label = label_job(job.table, job.fingerprint)
            if not has_run(kit, job):
                label = f"{label}, for which no run asks now"
            labels.append(label)
        raise ConfigError(
            f"{kit}: {len(waiting_jobs)} jobs are waiting for a decision: "
            f"{'; '.join(labels)}. Choose one by its fingerprint: fednotes site "
            f"{command} {kit} FINGERPRINT"
        )
    return waiting_jobs[0] if waiting_jobs else None


def _say_other_jobs(
    kit: Path, shown_job: RequestedJob, waiting_jobs: Sequence[RequestedJob]
) -> None:
    """Print which jobs wait for a decision besides the one that is shown."""
    from fednotes.apps.deployment.approval_requests import label_job

    labels = [
        label_job(job.table, job.fingerprint)
        for job in waiting_jobs
        if job.fingerprint != shown_job.fingerprint
    ]
    if labels:
        say(
            f"also waiting for a decision: {', '.join(labels)}; to see one of them: "
            f"fednotes site approve {kit} FINGERPRINT"
        )


def _confirm_approval() -> bool:
    """Ask the person whether to approve the job that is shown.

    Raises:
        ConfigError: The input has ended, so nobody can answer.
    """
    try:
        return typer.confirm("Approve this job at this site?")
    except typer.Abort as error:
        raise ConfigError(
            "the input ended without an answer, so nothing was decided: run the "
            "command in a terminal, or approve the job without the question (--yes)"
        ) from error


def _ask_passphrase(*, is_new: bool = False) -> str:
    """Ask for the passphrase of a person's key.

    Args:
        is_new: Whether the person chooses it, and so has to repeat it.

    Raises:
        ConfigError: The input has ended, so nobody can answer.
    """
    try:
        return str(
            typer.prompt("Passphrase", hide_input=True, confirmation_prompt=is_new)
        )
    except typer.Abort as error:
        raise ConfigError(
            "the input ended without a passphrase, so nothing was done: run the "
            "command in a terminal"
        ) from error


def _say_approved(kit: Path, job: RequestedJob, quorum: Quorum) -> None:
    """Print the effect of an approval.

    Args:
        kit: The site's kit.
        job: The job.
        quorum: The people who must approve jobs at this site.
    """
    from fednotes.apps.deployment.approval_requests import (
        describe_effect,
        describe_partial_approval,
        label_job,
    )
    from fednotes.apps.deployment.rules.guard import open_approvals

    label = label_job(job.table, job.fingerprint)
    prefix = job.fingerprint[:_SHOWN_CHARACTERS]
    people = open_approvals(kit, quorum).read_standing(job.table).people
    if people:
        say(f"{label}: {describe_partial_approval(quorum, people)}")
        say(f"next: each of them runs: fednotes site approve {kit} {prefix} --key FILE")
        return
    say(f"approved: {label}; {describe_effect(kit, job)}")
    say(
        f"next: fednotes site status {kit}; to withdraw the approval: "
        f"fednotes site reject {kit} {prefix}"
    )


def _await_request(kit: Path, job: str, timeout: float) -> None:
    """Wait until a job asks for approval at a site.

    Args:
        kit: The site's kit.
        job: Prefix of the fingerprint of the job to wait for; "" for any job. An
            earlier decision on that job also ends the wait.
        timeout: Maximum time to wait, in seconds.

    Raises:
        ConfigError: No such job has asked for approval within that time.
    """
    from fednotes.apps.deployment.nvflare import processes
    from fednotes.apps.deployment.rules.guard import open_approvals

    begin = time.monotonic()
    if not processes.read_status(kit).is_running:
        say(
            "note: this site is not running, so no job can ask for approval; "
            f"to start it: fednotes site start {kit}"
        )
    if not console.is_terminal:
        say(f"waiting up to {timeout:g} s for a job that asks for approval")
    decided_jobs: list[str] = []
    if job:
        decisions = open_approvals(kit).read_decisions()
        decided_jobs = [decision.fingerprint for decision in decisions]
    with console.status("waiting for a job that asks for approval") as spinner:
        while not _is_known_job(kit, job, decided_jobs):
            seconds = time.monotonic() - begin
            if seconds >= timeout:
                condition = f" whose fingerprint begins with {job!r}" if job else ""
                raise ConfigError(
                    f"{kit}: no job{condition} has asked for approval within "
                    f"{timeout:g} s. Check that the site is connected (fednotes site "
                    f"status {kit}) and that the job was submitted (fednotes run), or "
                    "wait longer with --timeout SECONDS"
                )
            spinner.update(
                f"waiting for a job that asks for approval ({seconds:.0f} s)"
            )
            time.sleep(min(POLL_SECONDS, timeout - seconds))


def _is_known_job(kit: Path, prefix: str, decided_jobs: Sequence[str]) -> bool:
    """Return whether a job waits for a decision, or was decided on.

    Args:
        kit: The site's kit.
        prefix: Prefix of the job's fingerprint; "" for any job.
        decided_jobs: Fingerprints of the jobs that were decided on.
    """
    from fednotes.apps.deployment.rules.guard import read_pending_jobs

    waiting_jobs = [job.fingerprint for job in read_pending_jobs(kit)]
    fingerprints = [*decided_jobs, *waiting_jobs]
    begin = prefix.strip().lower()
    return any(fingerprint.startswith(begin) for fingerprint in fingerprints)


@site.command("reject")
@with_examples(
    "fednotes site reject kits/sites/mercy",
    "fednotes site reject kits/sites/mercy 3f2a9c",
)
def site_reject(kit: Kit, job: Job = "") -> None:
    """Reject the waiting job, or withdraw the approval of a job.

    A fingerprint is required if several jobs are waiting, and to withdraw an approval.
    One person's rejection is enough and needs no key.
    """
    from fednotes.apps.deployment.approval_requests import (
        describe_account,
        label_job,
        read_quorum,
    )
    from fednotes.apps.deployment.rules.guard import (
        open_approvals,
        read_pending_jobs,
        settle_job,
    )

    require_role(kit, "site")
    quorum = read_quorum(kit)
    approvals = open_approvals(kit, quorum)
    last_approval = approvals.find_last_approval()
    requested = _find_requested_job(kit, job, read_pending_jobs(kit), command="reject")
    if requested is None and last_approval is not None:
        label = label_job(last_approval.table, last_approval.fingerprint)
        prefix = last_approval.fingerprint[:_SHOWN_CHARACTERS]
        raise ConfigError(
            f"{kit}: no job is waiting for a decision; to withdraw the approval of "
            f"{label}: fednotes site reject {kit} {prefix}"
        )
    if requested is None:
        raise ConfigError(
            f"{kit}: no job is waiting for a decision, and none is approved"
        )
    table = requested.table

    effect = "a job that was not approved"
    if approvals.read_status(table) == "approved":
        effect = "its approval is withdrawn"
    fingerprint = settle_job(
        kit, table, approve=False, by=describe_account(), quorum=quorum
    )
    label = label_job(table, fingerprint)
    say(f"rejected: {label}, {effect}; this site refuses all its requests")
    if last_approval is not None and last_approval.fingerprint != fingerprint:
        say(
            "still approved: "
            f"{label_job(last_approval.table, last_approval.fingerprint)}"
        )
    say(
        f"next: fednotes site status {kit}; to undo this: fednotes site approve {kit} "
        f"{fingerprint[:_SHOWN_CHARACTERS]}"
    )


def _explain_no_job(kit: Path) -> str:
    """Return why there is nothing to approve, and the likely remedy."""
    from fednotes.apps.deployment.rules.guard import clean_job_name, open_approvals

    decisions = open_approvals(kit).read_decisions()
    if decisions and decisions[-1].decision == "rejected":
        last_decision = decisions[-1]
        name = clean_job_name(last_decision.table)
        prefix = last_decision.fingerprint[:_SHOWN_CHARACTERS]
        return (
            f"{kit}: no job is waiting for a decision; {name} was rejected; to "
            f"approve it after all: fednotes site approve {kit} {prefix}"
        )
    return (
        f"{kit}: no job is waiting for a decision; one arrives when the admin submits "
        f"it and this site is running (fednotes site status {kit})"
    )


def _show_job(kit: Path, job: RequestedJob, quorum: Quorum) -> None:
    """Show the fingerprint to approve, then its job.

    Args:
        kit: The site's kit.
        job: The job.
        quorum: The people who must approve jobs at this site.
    """
    from fednotes.apps.deployment.approval_requests import describe_job

    for line in describe_job(kit, job, quorum):
        if line.is_from_job:
            _say_rows(line.text)
        else:
            say(line.text)


def _check_job(kit: Path, job: RequestedJob, audit_folder: Path | None) -> None:
    """Check a job against the policy, and show its audit.

    Args:
        kit: The site's kit.
        job: The job.
        audit_folder: The folder of its audit; None for the copy in the kit, if there is
            one.

    Raises:
        ConfigError: The audit is missing, or belongs to another job, site or
            federation.
        PolicyRefusal: The policy forbids the job.
    """
    from fednotes.apps.deployment.approval_requests import (
        check_and_describe_rounding,
        read_job_audit,
        require_audit,
    )

    rounding = check_and_describe_rounding(kit, job.table)
    if rounding:
        say(rounding)
    report = read_job_audit(kit, job, audit_folder)
    if report is not None:
        say(f"audit: {clean(report.summary, None)}")
    require_audit(kit, report)


def _say_rows(line: str) -> None:
    """Print a line that contains text from a job.

    The continuation of a wrapped line begins with a mark. Otherwise the end of a long
    name could look like a line of fednotes.
    """
    width = max(20, console.width - 8) if console.is_terminal else 10**6
    for number, row in enumerate(chop_cells(clean(line, None), width)):
        say(f"      … {row}" if number else row)


def _load_signer(kit: Path, quorum: Quorum, file: Path | None) -> Signer | None:
    """Return the person who approves, with the person's key; None if none is needed.

    Args:
        kit: The site's kit.
        quorum: The people who must approve jobs at this site.
        file: The file of the key; None without one.

    Raises:
        ConfigError: A key is missing, or the site's rules list no keys.
    """
    from fednotes.apps.deployment.rules.approval import Signer, read_signing_key

    if file is None and quorum.people:
        raise ConfigError(
            f"{kit}: a job needs the approval of {quorum.needed} of these people: "
            f"{', '.join(quorum.people)}; each uses their own key: fednotes site "
            f"approve {kit} --key FILE"
        )
    if file is None:
        return None
    if not quorum.people:
        raise ConfigError(f"{kit}: its rules list no approvers: approve without --key")
    key = read_signing_key(file, _ask_passphrase)
    return Signer(quorum.find_person(key, file), key)
