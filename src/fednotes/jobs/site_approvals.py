"""Approvals of jobs at a site, as packages register them for the local web UI.

An application that asks the people of a site before a job joins it registers an
`ApprovalDesk` in the group `fednotes.approvals`. The page shows what the desk returns,
and hands a person's decision back to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Decision = Literal["approve", "reject"]


@dataclass(frozen=True)
class ApprovalRequest:
    """A job that waits for a site's decision.

    Attributes:
        fingerprint: The job's fingerprint.
        name: The job's name.
        when: When the server first asked, as ISO text.
        lines: What a person must see before approving, one statement a line. Lines
            contain text that the job's author chose.
        problem: Why the page cannot approve the job; "" if it can.
        command: The command that decides on the job.
    """

    fingerprint: str
    name: str
    when: str
    lines: tuple[str, ...]
    problem: str
    command: str


@dataclass(frozen=True)
class PastDecision:
    """A decision that was made at a site.

    Attributes:
        when: The time, as ISO text.
        name: The job's name.
        fingerprint: The job's fingerprint.
        decision: What was decided, such as "approved".
        by: Who decided.
    """

    when: str
    name: str
    fingerprint: str
    decision: str
    by: str


@dataclass(frozen=True)
class ApprovalDesk:
    """How the people of a site decide on jobs.

    Attributes:
        is_site: Returns whether a folder is the kit of a site whose jobs this desk
            knows.
        read_requests: Returns the jobs that wait at a site, the newest request first.
            It raises a FednotesError if the records of the site are damaged.
        read_decisions: Returns the decisions at a site, oldest first.
        decide: Decides on a waiting job by its fingerprint, and returns the effect
            in words. It makes all checks again, and raises a FednotesError if the job
            no longer waits or must not be approved.
    """

    is_site: Callable[[Path], bool]
    read_requests: Callable[[Path], Sequence[ApprovalRequest]]
    read_decisions: Callable[[Path], Sequence[PastDecision]]
    decide: Callable[[Path, str, Decision], str]
