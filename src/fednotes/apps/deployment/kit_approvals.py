"""The approvals of a site's kit, as the local web UI shows and makes them.

This module is registered as an entry point of the group `fednotes.approvals`. It makes
the same checks as `fednotes site approve` and records decisions in the same way.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from fednotes.apps.deployment.approval_requests import (
    check_and_describe_rounding,
    describe_account,
    describe_effect,
    describe_job,
    describe_partial_approval,
    label_job,
    read_job_audit,
    read_quorum,
    require_audit,
)
from fednotes.apps.deployment.nvflare.kit import read_kit
from fednotes.apps.deployment.rules.approval import Quorum
from fednotes.apps.deployment.rules.guard import (
    SHOWN_DIGITS,
    RequestedJob,
    clean_job_name,
    open_approvals,
    read_pending_jobs,
    settle_job,
)
from fednotes.core.cleaning import clean
from fednotes.core.errors import ConfigError, FednotesError
from fednotes.jobs.site_approvals import (
    ApprovalDesk,
    ApprovalRequest,
    Decision,
    PastDecision,
)


def is_site(folder: Path) -> bool:
    """Return whether a folder is the kit of a site, with facts that can be read."""
    with suppress(ConfigError):
        return read_kit(folder).role == "site"
    return False


def read_requests(kit: Path) -> list[ApprovalRequest]:
    """Return the jobs that wait for a decision at a site, the newest request first.

    Raises:
        FednotesError: The site's rules or records cannot be read.
    """
    return [_describe_request(kit, job) for job in read_pending_jobs(kit)]


def _describe_request(kit: Path, job: RequestedJob) -> ApprovalRequest:
    """Return what the page shows of a job that waits for a decision."""
    quorum = read_quorum(kit)
    lines = [line.text for line in describe_job(kit, job, quorum)]
    problem = _describe_required_keys(quorum)
    try:
        lines += _check_job(kit, job)
    except FednotesError as error:
        problem = problem or str(error)
    people = open_approvals(kit, quorum).read_standing(job.table).people
    if people:
        lines.append(describe_partial_approval(quorum, people))
    prefix = job.fingerprint[:SHOWN_DIGITS]
    key_option = " --key FILE" if quorum.people else ""
    return ApprovalRequest(
        fingerprint=job.fingerprint,
        name=clean_job_name(job.table),
        when=job.when,
        lines=tuple(clean(line, None) for line in lines),
        problem=problem,
        command=f"fednotes site approve {kit} {prefix}{key_option}",
    )


def _describe_required_keys(quorum: Quorum) -> str:
    """Return why only the command can approve; "" if no keys are required."""
    if not quorum.people:
        return ""
    return (
        f"a job needs the approval of {quorum.needed} of these people: "
        f"{', '.join(quorum.people)}; each uses their own key, so each approves with "
        "the command"
    )


def _check_job(kit: Path, job: RequestedJob) -> list[str]:
    """Check a job against the site's policy, as `fednotes site approve` does.

    Returns:
        What the command shows of these checks.

    Raises:
        ConfigError: The audit of the job is damaged, or belongs to another job.
        PolicyRefusal: The policy forbids the job.
    """
    lines = []
    rounding = check_and_describe_rounding(kit, job.table)
    if rounding:
        lines.append(rounding)
    report = read_job_audit(kit, job, folder=None)
    if report is not None:
        lines.append(f"audit: {report.summary}")
    require_audit(kit, report)
    return lines


def read_decisions(kit: Path) -> list[PastDecision]:
    """Return the decisions at a site, oldest first."""
    decisions = []
    for each in open_approvals(kit).read_decisions():
        person = clean(each.by)
        if each.person:
            person = f"{person}, with the key of {each.person}"
        decisions.append(
            PastDecision(
                each.when,
                clean_job_name(each.table),
                each.fingerprint,
                decision=each.decision,
                by=person,
            )
        )
    return decisions


def decide(kit: Path, fingerprint: str, decision: Decision) -> str:
    """Approve or reject a job that waits at a site; return the effect in words.

    Raises:
        ConfigError: The job no longer waits, or its approval needs keys.
        PolicyRefusal: The policy forbids the job.
    """
    jobs = {job.fingerprint: job for job in read_pending_jobs(kit)}
    job = jobs.get(fingerprint)
    if job is None:
        raise ConfigError(
            "this job is no longer waiting for a decision; nothing was decided: look "
            "at the page again"
        )
    quorum = read_quorum(kit)
    label = label_job(job.table, fingerprint)
    if decision == "reject":
        settle_job(kit, job.table, approve=False, by=describe_account(), quorum=quorum)
        return f"rejected: {label}; this site refuses all its requests"

    problem = _describe_required_keys(quorum)
    if problem:
        raise ConfigError(f"{problem}; nothing was decided")
    _check_job(kit, job)
    settle_job(kit, job.table, approve=True, by=describe_account(), quorum=quorum)
    return f"approved: {label}; {describe_effect(kit, job)}"


DESK = ApprovalDesk(is_site, read_requests, read_decisions, decide)
