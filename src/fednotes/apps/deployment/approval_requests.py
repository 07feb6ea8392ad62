"""What a person must see, and what must hold, before a site approves a job.

The command `fednotes site approve` and the local web UI both use this module, so that
they show the same lines and make the same checks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from fednotes.apps.deployment.nvflare import processes
from fednotes.apps.deployment.nvflare.kit import read_kit, read_submission
from fednotes.apps.deployment.rules.approval import Quorum, compare_notes
from fednotes.apps.deployment.rules.guard import (
    RULES,
    SHOWN_DIGITS,
    RequestedJob,
    clean_job_name,
    open_approvals,
)
from fednotes.apps.deployment.rules.policy import check_audit, check_count_step
from fednotes.apps.deployment.site import create_guard
from fednotes.apps.deployment.site_agreement import can_round_counts
from fednotes.apps.deployment.site_file import (
    SITE_FILE,
    read_kit_site_file,
    read_policy,
    select_data,
)
from fednotes.core import plugins
from fednotes.core.cleaning import clean
from fednotes.core.errors import ConfigError, FednotesError, RefusedError
from fednotes.core.parsing import as_mapping
from fednotes.core.store import create_private_folder, write_json
from fednotes.core.tables import compare_tables, fingerprint_table
from fednotes.engines.launch import Setup
from fednotes.jobs.audit_result import AUDIT, Audit, read_audit
from fednotes.jobs.declaration import (
    SITE_TABLES,
    make_table_to_approve,
    parse_declared,
)


class JobLine(NamedTuple):
    """A line that describes a job to the person who decides on it.

    Attributes:
        text: The line.
        is_from_job: Whether it contains text that the job's author chose. Such a line
            may be long, and must not look like lines of ours where it is wrapped.
    """

    text: str
    is_from_job: bool = False


def read_quorum(kit: Path) -> Quorum:
    """Return who must approve jobs at a site."""
    return read_policy(kit).make_quorum(read_kit(kit).name)


# ---- what the person sees ------------------------------------------------------------


def label_job(table: Mapping[str, Any], fingerprint: str) -> str:
    """Return a job's name and the beginning of its fingerprint."""
    return f"{clean_job_name(table)} ({fingerprint[:SHOWN_DIGITS]})"


def describe_job(kit: Path, job: RequestedJob, quorum: Quorum) -> Iterator[JobLine]:
    """Yield the fingerprint to approve, its job, and its changes since earlier jobs.

    No line begins with text from the job, so a job cannot imitate a line of fednotes.

    Args:
        kit: The site's kit.
        job: The job.
        quorum: The people who must approve jobs at this site.
    """
    approvals = open_approvals(kit, quorum)
    last_of_name = approvals.find_last_approval(str(job.table.get("name")))
    last = last_of_name or approvals.find_last_approval()
    yield JobLine(f"fingerprint {job.fingerprint}")
    yield JobLine(f'job "{clean_job_name(job.table)}"', is_from_job=True)
    for difference in compare_tables({}, job.table):
        setting = difference[2:]  # without the sign of an addition
        yield JobLine(f"  {setting}", is_from_job=True)
    promise = _describe_promise(kit, job.table)
    if promise:
        yield JobLine(f"guarantees {promise}")

    for setting in _list_own_settings(kit, job.table):
        yield JobLine(f"from this site's own file: {setting}")

    if last is None:
        yield JobLine("no job was approved here before")
    else:
        label = label_job(last.table, last.fingerprint)
        yield JobLine(f"changes since {label}, approved {last.when}:", is_from_job=True)
        for difference in compare_tables(last.table, job.table) or ("none",):
            yield JobLine(f"  {difference}", is_from_job=True)
        yield from _describe_earlier_jobs(kit, job, quorum)

    refusal = find_refusal(kit, job)
    if refusal:
        yield JobLine(
            f"warning: this site will not join, even if you approve the job: {refusal}",
            is_from_job=True,
        )


def _describe_promise(kit: Path, table: dict[str, Any]) -> str:
    """Return a job's guarantee of differential privacy; "" if it has none."""
    with suppress(FednotesError):  # an invalid job is refused when it begins
        job = parse_declared(table, kit, "job")
        config: Any = job.config
        num_sites = len(table.get("sites", ()))
        return str(job.module.make_promise(replace(config, sites=num_sites)) or "")
    return ""


def _list_own_settings(kit: Path, table: dict[str, Any]) -> Iterator[str]:
    """Yield the model and settings in the site's file with which it would train."""
    if not (kit / SITE_FILE).exists():
        return
    with suppress(FednotesError):  # an invalid job is refused when it begins
        job = parse_declared(table, kit, "job")
        data = select_data(read_kit_site_file(kit), job.data)
        own = {key: data[key] for key in SITE_TABLES if key in data}
        if job.module.site_keys:
            for difference in compare_tables({}, own):
                yield difference[2:]  # without the sign of an addition


def _describe_earlier_jobs(
    kit: Path, job: RequestedJob, quorum: Quorum
) -> Iterator[JobLine]:
    """Yield lines that compare a job's sites and notes with each job approved before.

    Args:
        kit: The site's kit.
        job: The job that waits for approval.
        quorum: Who must approve.
    """
    min_sites = read_policy(kit).min_sites
    for earlier in open_approvals(kit, quorum).list_ever_approved():
        if earlier.fingerprint == job.fingerprint:
            continue
        difference = compare_notes(earlier.table, job.table, quorum.site)
        sites = "the same sites"
        if difference.sites:
            sites = f"other sites ({', '.join(map(clean, difference.sites))})"
        notes = "other notes here" if difference.notes else "the same notes here"
        label = label_job(earlier.table, earlier.fingerprint)
        yield JobLine(
            f"compared with {label}, approved {earlier.when}: {sites}, {notes}",
            is_from_job=True,
        )
        for note in difference.notes:
            yield JobLine(f"  {note}", is_from_job=True)
        for warning in difference.list_warnings(min_sites):
            yield JobLine(f"  warning: {warning}", is_from_job=True)


def describe_partial_approval(quorum: Quorum, people: frozenset[str]) -> str:
    """Return who has approved a job, and how many more must; "" if nobody has.

    Args:
        quorum: Who must approve.
        people: The people who have approved.
    """
    if not people:
        return ""
    missing = [person for person in quorum.people if person not in people]
    return (
        f"approved by {', '.join(sorted(people))}; {quorum.needed - len(people)} more "
        f"of {', '.join(missing)} must"
    )


def describe_effect(kit: Path, job: RequestedJob) -> str:
    """Return what follows from the approval of a job, in words."""
    if find_refusal(kit, job):
        return (
            "this site joins once its rules permit the job: fednotes site rules "
            f"{kit} --site-file FILE"
        )
    if has_run(kit, job):
        return "this site joins within seconds"
    return "no run asks for it now; this site joins when one does"


def has_run(kit: Path, job: RequestedJob) -> bool:
    """Return whether a run of a job has a process at this site.

    Such a run asks for the approval every few seconds. A run that has ended no longer
    has a process.
    """
    for job_id in processes.read_status(kit).jobs:
        submission = read_submission(kit, job_id)
        with suppress(LookupError, TypeError, RefusedError):  # it may be incomplete
            table = make_table_to_approve(
                submission["job"], submission["sites"], submission["min_sites"]
            )
            if fingerprint_table(table) == job.fingerprint:
                return True
    return False


# ---- what must hold ------------------------------------------------------------------


def find_refusal(kit: Path, job: RequestedJob) -> str:
    """Return why the site's rules refuse a job, even if it is approved.

    The site makes the same checks when it joins a run, before it reads its notes.

    Args:
        kit: The site's kit.
        job: The job.

    Returns:
        The reason with its remedy; "" if the rules permit the job. An invalid job is
        refused only when it begins.
    """
    if not (kit / SITE_FILE).exists():
        return ""  # a site does not start without its rules
    table = job.table
    try:
        parsed_job = parse_declared(table, kit, "job")
    except FednotesError:
        return ""
    sites = tuple(map(str, table.get("sites", ())))
    setup = Setup(
        kit=kit,
        site=read_kit(kit).name,
        job=table,
        job_id="",
        run="",
        sites=sites,
        min_sites=int(table.get("min_sites", len(sites))),
        folder=kit,
        state=kit / "state",
    )
    try:
        create_guard(setup, read_kit_site_file(kit), table, parsed_job)
    except RefusedError as refusal:
        return str(refusal)
    return ""


def check_and_describe_rounding(kit: Path, table: dict[str, Any]) -> str:
    """Check how the policy rounds what leaves the site, and describe it.

    The person who approves a job reads the description.

    Args:
        kit: The site's kit.
        table: The job.

    Returns:
        The description; "" if the policy rounds nothing.

    Raises:
        PolicyRefusal: Exact counts would leave the site.
    """
    policy = read_policy(kit)
    if policy.count_step == 1:
        return ""
    try:
        job = parse_declared(table, kit, "job")
    except FednotesError:
        return ""  # an invalid job is refused when it begins
    check_count_step(policy, job.method, rounds_counts=can_round_counts(job))
    return (
        f"weights and counts of this site leave in multiples of {policy.count_step:,}"
    )


def read_job_audit(kit: Path, job: RequestedJob, folder: Path | None) -> Audit | None:
    """Return the audit of a job, and copy it into the kit.

    Args:
        kit: The site's kit.
        job: The job.
        folder: A folder of `fednotes audit`; None for the copy in the kit, if there is
            one.

    Raises:
        ConfigError: The audit is missing, or belongs to another job, site or
            federation.
    """
    copy_folder = kit / RULES / "audits" / job.fingerprint
    audit_folder = folder or copy_folder
    report = read_audit(audit_folder)
    if folder is not None and report is None:
        raise ConfigError(
            f"{folder} contains no {AUDIT}: give the folder that `fednotes audit` wrote"
        )
    if report is not None:
        _require_same_job(kit, job.table, report=report, folder=audit_folder)
        if folder is not None:
            create_private_folder(copy_folder)
            write_json(copy_folder / AUDIT, report.model_dump())
    return report


def require_audit(kit: Path, report: Audit | None) -> None:
    """Raise PolicyRefusal if the policy requires an audit, or a better result.

    Args:
        kit: The site's kit.
        report: The job's audit, if there is one.
    """
    best_gain = None
    if report is not None and _has_tried_every_attack(report):
        best_gain = report.worst
    check_audit(read_policy(kit), best_gain)


def _has_tried_every_attack(report: Audit) -> bool:
    """Return whether an audit tried all attacks that are installed here."""
    attacks = chain(*plugins.load_all("attacks", (tuple, list)).values())
    installed_attacks = {attack.name for attack in attacks}
    tried_attacks = {leak.attack for leak in report.attacks}
    return installed_attacks <= tried_attacks and not report.untried


def _require_same_job(
    kit: Path, table: dict[str, Any], *, report: Audit, folder: Path
) -> None:
    """Raise ConfigError unless an audit belongs to this job and this site.

    Args:
        kit: The site's kit.
        table: The job.
        report: The audit.
        folder: The folder of the audit.
    """
    site_name = read_kit(kit).name
    job_fingerprint = fingerprint_table(table.get("job", {}))
    if (report.fingerprint, report.site) != (job_fingerprint, site_name):
        audited_job = clean(report.fingerprint)[:SHOWN_DIGITS]
        raise ConfigError(
            f"{folder} is an audit of site {clean(report.site)!r} and job table "
            f"{audited_job!r}, but site {site_name!r} and job table "
            f"{job_fingerprint[:SHOWN_DIGITS]!r} are needed: run fednotes audit "
            f"JOB --site {site_name} with the submitted job file"
        )
    audited_sites = {*as_mapping(as_mapping(table.get("job")).get("sites"))}
    if {*table.get("sites", ())} != audited_sites:
        raise ConfigError(
            "the sites of the run differ from those in the job's table, which was "
            "audited: reject the job"
        )


# ---- who decides ---------------------------------------------------------------------


def describe_account() -> str:
    """Return the system account that runs this process, to record who decided.

    No environment variable can change the account. The user who called sudo, which sets
    a variable, is appended.
    """
    name = _describe_user(os.getuid())
    sudo = os.environ.get("SUDO_UID", "")
    if sudo.isdecimal():
        return f"{name}; SUDO_UID belongs to {_describe_user(int(sudo))}"
    return name


def _describe_user(number: int) -> str:
    """Return the name and the number of an account."""
    import pwd  # missing on Windows, where no kit runs

    try:
        name = pwd.getpwuid(number).pw_name
    except (KeyError, OverflowError):  # accounts in containers often have no name
        name = "no name"
    return f"{name} (uid {number})"
