"""The command `audit`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from fednotes.cli.all_commands import TRAIN, in_panel
from fednotes.cli.completers import complete_job
from fednotes.cli.plain_help import with_examples
from fednotes.cli.shared import (
    Json,
    Settings,
    choose_console,
    console,
    print_json,
    say,
)


@in_panel(TRAIN)
@with_examples(
    "fednotes audit job.toml --site mercy --out audits/job",
    "fednotes audit runs/first",
)
def audit(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|JOB",
            help="A run's folder, or a job.",
            autocompletion=complete_job,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write to; the run's folder by default."),
    ] = None,
    settings: Settings = None,
    site: Annotated[
        str, typer.Option(help="Name of the site; by default the job's first.")
    ] = "",
    site_file: Annotated[
        Path | None,
        typer.Option(help="The site's file; by default, the notes that the job names."),
    ] = None,
    total: Annotated[
        int,
        typer.Option(
            help="Total number of training examples at all sites; required with "
            "--site-file.",
            show_default=False,
        ),
    ] = 0,
    json_output: Json = False,
) -> None:
    """Estimate locally what an attacker could recover from a job.

    Attack the updates that the job would send, computed from your own notes. Nothing
    leaves this machine.
    """
    from fednotes.apps.audit import open_target, run_audit
    from fednotes.cli.display import make_audit_table
    from fednotes.core.store import reserving_folder, write_json
    from fednotes.jobs.audit_result import AUDIT
    from fednotes.report.html import write_report

    job, key, folder = open_target(
        target, tuple(settings or ()), site, site_file, total, out
    )
    command = shlex.join(["fednotes", *sys.argv[1:]])
    output = choose_console(as_json=json_output)
    with reserving_folder(folder), output.status("") as shown:
        audit_result = run_audit(
            job, site, fingerprint=key, command=command, progress=shown.update
        )
        write_json(folder / AUDIT, audit_result.model_dump())
    report = write_report(folder)
    if json_output:
        print_json(audit_result.model_dump())
        return
    console.print(make_audit_table(audit_result))
    say(f"audit: {folder / AUDIT}", f"report: {report}")
