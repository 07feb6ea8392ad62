"""Try every attack on a job."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from fednotes.apps.audit.attack import load_attacks
from fednotes.apps.audit.scene import Scene
from fednotes.jobs.audit_result import Audit
from fednotes.jobs.job import Job, load_sites


def run_audit(
    job: Job,
    site: str = "",
    *,
    fingerprint: str = "",
    command: str = "",
    progress: Callable[[str], None] = lambda _: None,
) -> Audit:
    """Try all attacks on a job, with the notes of one site as targets.

    Args:
        job: The job.
        site: Name of the audited site; by default the job's first.
        fingerprint: Fingerprint of the job's table, stored in the result.
        command: The command line, stored in the result.
        progress: Called with the name of each attack before it is tried.

    Raises:
        FednotesError: The sites' data cannot be read, or the job has no such site. An
            attack that fails raises nothing: its result says why.
    """
    started = time.monotonic()
    torch.set_num_threads(job.threads)
    scene = Scene(job, load_sites(job), site)
    leaks = []
    for attack in load_attacks():
        progress(attack.name)
        leaks.append(attack.run(scene))
    return Audit(
        title=job.title,
        method=job.method,
        site=scene.site,
        fingerprint=fingerprint,
        command=command,
        seconds=time.monotonic() - started,
        attacks=leaks,
    )
