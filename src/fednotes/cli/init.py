"""The command `fednotes init`: inspect notes and write a first job for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fednotes.cli.completers import complete_one_of
from fednotes.cli.plain_help import OldName, with_examples
from fednotes.cli.shared import (
    ColumnOption,
    EncodingOption,
    FormatOption,
    Json,
    OmopOption,
    OnError,
    OnErrorOption,
    QueryOption,
    can_ask,
    console,
    print_json,
    say,
    showing_work,
)
from fednotes.core.cleaning import NAME, clean_to_one_line
from fednotes.core.errors import FednotesError

if TYPE_CHECKING:
    from fednotes.jobs.proposal import Choices, Facts, FirstJob

_JOB = Path("job.toml")
_QUICKLY_READ_NOTES = 20_000  # more are not read again to estimate the time of a run
_METHODS = "finetune|fedner|distill|personal|pretrain"


@with_examples(
    "fednotes init hospitals/",
    "fednotes init north=siteA/notes south=siteB/notes.jsonl --out job.toml",
    "fednotes init mercy=env:NOTES_DB --omop cdm.note",
)
def init(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH…|NAME=PATH…",
            help="A folder of sites, one corpus, or the notes of each site.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Job file to write.")] = _JOB,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace existing output.")
    ] = False,
    method: Annotated[
        str,
        typer.Option(
            metavar=_METHODS,
            autocompletion=complete_one_of(_METHODS),
            help="Method to train with; proposed if omitted.",
        ),
    ] = "",
    encoder: Annotated[
        str,
        typer.Option(
            metavar="minilm|none|DIR",
            autocompletion=complete_one_of("minilm|none"),
            help="Encoder, or none for a light tagger; proposed if omitted.",
        ),
    ] = "",
    sites: Annotated[
        int,
        typer.Option(
            "--sites",
            OldName("--silos"),
            min=0,
            help="Number of simulated sites; 0 lets the command propose a number.",
        ),
    ] = 0,
    interactive: Annotated[
        bool, typer.Option("--interactive", help="Ask before each decision.")
    ] = False,
    format: FormatOption = "",
    column: ColumnOption = "",
    query: QueryOption = "",
    omop: OmopOption = "",
    on_error: OnErrorOption = OnError.refuse,
    encoding: EncodingOption = "auto",
    json_output: Json = False,
) -> None:
    """Write a first job file for the notes of several sites.

    Count what the notes contain, without showing text, and propose names of entity
    types, a method and a model, with a reason for each. If a folder contains one
    subfolder per site, each subfolder becomes a site; a single corpus is divided among
    simulated sites.
    """
    from fednotes.cli.display import make_facts_tables
    from fednotes.jobs.proposal import (
        Choices,
        ReadOptions,
        find_places,
        make_first_job,
        read_facts,
        require_output,
    )

    if interactive and (json_output or not can_ask(yes=False)):
        raise FednotesError(
            "--interactive needs a terminal: leave it out, and use the proposals, "
            "or the options --method, --encoder and --sites"
        )
    options = ReadOptions(format, column, on_error.value, encoding)
    with showing_work("examining"):
        places = find_places(paths, encoding, query=query, omop=omop)
        # Before the notes are read, which may take minutes.
        if not interactive:
            require_output(out, overwrite=overwrite)
        facts = read_facts(places, options)
    choices = Choices(method=method, encoder=encoder, silos=sites)
    if not json_output:
        for table in make_facts_tables(facts):
            console.print(table)
    if interactive:
        choices = _ask_choices(facts, choices)
        out, overwrite = _ask_file(out, overwrite=overwrite)
    first_job = make_first_job(facts, choices, out, overwrite=overwrite)
    if json_output:
        print_json(first_job.to_dict())
    else:
        _show(first_job, choices)


def _show(first_job: FirstJob, choices: Choices) -> None:
    """Print the decisions, their reasons, what to do next, and how long it takes."""
    from fednotes.cli.display import describe_run_time, make_decisions_table
    from fednotes.jobs.run_folder import find_free_folder

    console.print(make_decisions_table(first_job.proposal))
    for remark in first_job.proposal.remarks:
        console.print(f"note: {remark}", highlight=False, markup=False)
    run = find_free_folder(Path("runs", "first"))
    say(
        f"job: {first_job.path}; next:",
        f"  fednotes check {first_job.path}",
        f"  fednotes simulate {first_job.path} --out {run}",
    )
    seconds = _estimate_seconds(first_job)
    if seconds:
        say(*describe_run_time(seconds))
    if _can_be_lighter(first_job, choices):
        say(
            "for a light tagger, which is smaller and often faster, repeat init with",
            "  --encoder none --overwrite",
        )


def _estimate_seconds(first_job: FirstJob) -> Mapping[str, float]:
    """Return the estimated seconds of each condition; empty if there is no estimate.

    The job that was written may still have problems, which `fednotes check` lists.
    """
    from fednotes.jobs.duration import estimate_seconds
    from fednotes.jobs.job_file import load_job
    from fednotes.jobs.parts import prepare

    notes = sum(site.notes for site in first_job.proposal.facts.sites)
    if notes > _QUICKLY_READ_NOTES:
        return {}
    try:
        with showing_work("timing a few sentences"):
            job = load_job(str(first_job.path))
            _, _, parts = prepare(job)
            return estimate_seconds(job, parts)
    except FednotesError:
        return {}


def _can_be_lighter(first_job: FirstJob, choices: Choices) -> bool:
    """Return whether an encoder was proposed where a light tagger would do, too."""
    from fednotes.jobs.proposal import propose

    if choices.encoder or first_job.proposal.is_light:
        return False
    light_choices = replace(choices, encoder="none")
    facts = first_job.proposal.facts
    return propose(facts, light_choices, has_minilm=True).is_light


# ---- questions -----------------------------------------------------------------------


def _ask_choices(facts: Facts, choices: Choices) -> Choices:
    """Ask the person for each decision; the proposal is the default."""
    from fednotes.jobs.proposal import has_minilm, list_methods, propose

    proposal = propose(facts, choices, has_minilm=has_minilm())
    answers: dict[tuple[str, str], bool] = {}
    for each in proposal.label_maps:
        old, new = clean_to_one_line(each.old, NAME), clean_to_one_line(each.new, NAME)
        answers[each.site, each.old] = typer.confirm(
            f"{each.site}: {old} {each.reason}. Rename it to {new}?",
            default=each.is_active,
        )
    choices = replace(choices, label_maps=answers)

    proposal = propose(facts, choices, has_minilm=has_minilm())
    say(proposal.method.reason)
    known = list_methods(proposal.sites)
    method = _ask_one_of("Method", known, proposal.method.value)
    choices = replace(choices, method=method)

    proposal = propose(facts, choices, has_minilm=has_minilm())
    say(proposal.model.reason)
    encoder = typer.prompt(
        "Encoder (minilm, none or a directory)", default=proposal.model.value
    )
    choices = replace(choices, encoder=encoder)
    if proposal.silos is not None:
        number = typer.prompt(
            "Number of simulated sites", default=proposal.silos.number, type=int
        )
        choices = replace(choices, silos=number)
    return choices


def _ask_one_of(question: str, known: tuple[str, ...], default: str) -> str:
    """Ask until the answer is one of the known ones."""
    while True:
        answer: str = typer.prompt(
            f"{question} ({', '.join(known)})", default=default
        ).strip()
        if answer in known:
            return answer
        say(f"expected one of {', '.join(known)}")


def _ask_file(out: Path, *, overwrite: bool) -> tuple[Path, bool]:
    """Ask for the job file, and whether to replace one that exists."""
    path = Path(typer.prompt("Job file", default=str(out)))
    if path.exists() and not overwrite:
        typer.confirm(f"{path} exists. Replace it?", abort=True)
        overwrite = True
    return path, overwrite
