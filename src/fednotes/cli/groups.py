"""Commands of the groups corpus, job and cache; and `convert`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from fednotes.cli.completers import complete_output_format
from fednotes.cli.plain_help import OldName, with_examples
from fednotes.cli.shared import (
    OUTPUT_FORMAT,
    SKIP_REMEDY,
    AsPage,
    EncodingOption,
    FormatOption,
    JobArgument,
    Json,
    Notes,
    OnError,
    OnErrorOption,
    RenamedFormatOption,
    Seed,
    Settings,
    console,
    name_options,
    print_json,
    say,
    showing_work,
    tell,
)
from fednotes.core.cleaning import clean_message
from fednotes.core.errors import (
    UNREADABLE,
    FednotesError,
    JobProblem,
    Problem,
    fold_problems,
)
from fednotes.core.wording import format_count

if TYPE_CHECKING:
    from rich.table import Table

    from fednotes.jobs.checking import Checked

corpus = typer.Typer(
    help="Inspect and generate corpora.", no_args_is_help=True, rich_markup_mode=None
)
cache = typer.Typer(
    help="Manage the cache of features, tokens and concepts.", no_args_is_help=True
)
jobs = typer.Typer(
    help="Inspect jobs and the keys of job files.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


_WIDTH = 80  # columns of findings, also in a pipe or a wide terminal


class Output(StrEnum):
    """Formats for generated corpora."""

    jsonl = "jsonl"
    brat = "brat"
    conll = "conll"


def _name_options(problem: Problem) -> Problem:
    """Return a problem whose message names the options of the command line."""
    if isinstance(problem, JobProblem):
        return problem
    return replace(problem, message=name_options(problem.message))


def show_checked(checked: Checked) -> None:
    """Print the result of `fednotes check`: tables, findings, and each problem."""
    from fednotes.cli.display import describe_run_time, list_findings, make_count_tables

    if checked.job is not None and checked.sites is not None:
        tell(checked.sites.remarks)
        for table in make_count_tables(
            checked.job.kind.tabulate_counts(checked.sites.data)
        ):
            console.print(table)
    for line in list_findings(checked.findings):
        console.print(line, width=min(_WIDTH, console.width), highlight=False)

    problems = list(checked.problems)
    for finding in checked.findings:
        if finding.level == "error":
            problems += finding.problems
    say(*map(clean_message, fold_problems(map(_name_options, problems))))

    if checked.wrong:
        counts = checked.to_dict()["counts"]
        kinds = ", ".join(f"{kind}: {n:,}" for kind, n in counts["kinds"].items())
        problems_text = format_count(counts["problems"], "problem")
        print(f"{problems_text} ({kinds})", file=sys.stderr)
    else:
        warnings = sum(finding.level == "warning" for finding in checked.findings)
        if checked.seconds:
            say(*describe_run_time(checked.seconds))
        of_warnings = f"; {format_count(warnings, 'warning')}" if warnings else ""
        say(f"no problems found{of_warnings}")
    skippable = [p for p in checked.problems if p.file and p.kind != UNREADABLE]
    if skippable:
        print(f"hint: {SKIP_REMEDY}", file=sys.stderr)


@corpus.command("stats")
@with_examples(
    "fednotes corpus stats siteA/notes siteB/notes",
)
def corpus_stats(
    paths: Annotated[
        list[Path], typer.Argument(help="One corpus file or folder for each site.")
    ],
    format: FormatOption = "",
    on_error: OnErrorOption = OnError.refuse,
    encoding: EncodingOption = "auto",
    json_output: Json = False,
) -> None:
    """Count the sentences, types and mentions of each site.

    Also count what the sites have in common.
    """
    from fednotes.cli.display import make_stats_tables
    from fednotes.data.formats import examine
    from fednotes.data.formats.folders import name_paths
    from fednotes.data.stats import compute_corpus_stats as count
    from fednotes.jobs.input_readers import requiring_annotations

    places = name_paths(paths)
    corpora = {}
    left_out = {}
    for name, path in places.items():
        with showing_work("reading"), requiring_annotations(encoding):
            documents, problems = examine(path, format or None, encoding)
        problems.raise_if_refused(on_error.value, documents)
        corpora[name] = documents
        if problems.number:
            left_out[name] = problems
    with showing_work("counting"):
        stats = count(corpora)
    if json_output:
        counts = {name: dict(problems.counts) for name, problems in left_out.items()}
        print_json(stats | {"left_out": counts})
        return
    for name, problems in left_out.items():
        say(f"note: left out of {name}: {problems}")
    for table in make_stats_tables(stats):
        console.print(table)


@corpus.command("overlap")
@with_examples(
    "fednotes corpus overlap --notes notes.csv --documents test/ --strict",
)
def corpus_overlap(
    notes: Notes,
    documents: Annotated[
        list[Path], typer.Option(help="Annotated test corpus; may be repeated.")
    ],
    format: FormatOption = "",
    encoding: EncodingOption = "auto",
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Exit with an error if a sentence is shared."),
    ] = False,
    json_output: Json = False,
) -> None:
    """Count the text shared by notes and annotated documents.

    Shared sentences and shared sequences of 13 words are counted.
    """
    from fednotes.data.formats import read
    from fednotes.data.notes import read_notes
    from fednotes.data.overlap import index_documents, measure_shared_text

    with showing_work("reading"):
        indexes = [index_documents(read(path, encoding=encoding)) for path in documents]
    rows: list[dict[str, Any]] = []
    with showing_work("comparing"):
        for path in notes:
            source = read_notes(path, format or None, encoding=encoding)
            texts = (note.text for note in source)
            for other, shared in zip(
                documents, measure_shared_text(texts, indexes), strict=True
            ):
                rows.append({"notes": path, "documents": other, **asdict(shared)})
    if json_output:
        print_json(rows)
    else:
        console.print(_make_overlap_table(rows))
    total = sum(row["shared_sentences"] for row in rows)
    if strict and total:
        raise FednotesError(
            f"{total:,} sentences of the notes occur in the documents: leave those "
            "notes out (exclude in a job's site), or test on other documents"
        )


def _make_overlap_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table of the text that notes and documents share.

    Args:
        rows: The paths of notes and of documents, and the counts of `SharedText`.
    """
    from fednotes.cli.display import make_sheet
    from fednotes.data.overlap import MIN_WORDS, NGRAM

    title = (
        f"shared text: sentences of {MIN_WORDS} words or more, and "
        f"{NGRAM} words in a row"
    )
    heads = (
        "notes",
        "documents",
        "sentences",
        "shared",
        "in notes",
        "n-grams",
        "shared",
    )
    table = make_sheet(*heads, left=2, title=title)
    for row in rows:
        notes, documents, *counts = row.values()
        names = (
            Text("/".join(path.parts[-2:]), overflow="fold")
            for path in (notes, documents)
        )
        table.add_row(*names, *(f"{count:,}" for count in counts))
    return table


@corpus.command("formats")
@with_examples(
    "fednotes corpus formats",
)
def corpus_formats(
    as_page: AsPage = False,
    json_output: Json = False,
) -> None:
    """List the formats, and which parts of a document each preserves."""
    from fednotes.cli.display import make_sheet
    from fednotes.data.formats import make_format_table

    rows = make_format_table()
    if json_output:
        print_json(rows)
        return
    heads = list(max(rows, key=lambda row: len(list(row))))
    lines = [[row.get(head, "") for head in heads] for row in rows]
    if as_page:
        for line in [heads, ["---"] * len(heads), *lines]:
            say(f"| {' | '.join(line)} |")
        return
    title = (
        "formats, and what each keeps of a document; dashes mark formats "
        "that cannot be written"
    )
    table = make_sheet(*heads, left=len(heads), title=title)
    for line in lines:
        table.add_row(*line)
    console.print(table)


@with_examples(
    "fednotes convert notes/ notes.xml --to bioc",
    "fednotes convert export.json notes --format label-studio --to brat",
)
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="A corpus file or folder.")
    ],
    out: Annotated[Path, typer.Argument(help="File or folder to create.")],
    to: Annotated[
        str, typer.Option(help=OUTPUT_FORMAT, autocompletion=complete_output_format)
    ],
    format: RenamedFormatOption = "",
    allow_loss: Annotated[
        bool,
        typer.Option(
            "--allow-loss", help="Write even if the format cannot represent everything."
        ),
    ] = False,
    on_error: OnErrorOption = OnError.refuse,
    encoding: EncodingOption = "auto",
    json_output: Json = False,
) -> None:
    """Convert a corpus to another format, completely or not at all.

    `fednotes corpus formats` lists the formats. The output is read back and compared
    with the input before it is put in place. Exit code: 0, the output was written; 1,
    the conversion was refused because the format cannot represent everything (the
    output lists what and how much); 2, another error.
    """
    from fednotes.data.formats import LossyError
    from fednotes.data.formats import convert as run
    from fednotes.jobs.input_readers import requiring_annotations

    try:
        with showing_work("comparing"), requiring_annotations(encoding):
            number, losses, problems = run(
                source,
                out,
                to,
                format or None,
                allow_loss=allow_loss,
                on_error=on_error.value,
                encoding=encoding,
            )
    except LossyError as error:
        message = name_options(str(error))
        print(f"error: {clean_message(message)}", file=sys.stderr)
        sys.exit(1)
    if json_output:
        left_out = dict(problems.counts)
        print_json(
            {"out": out, "documents": number, "lost": losses, "left_out": left_out}
        )
        return
    if problems.number:
        say(f"left out of {source}: {problems}")
    say(*(f"lost: {kind}: {count:,}" for kind, count in sorted(losses.items())))
    say(f"{number:,} documents in {out}")


@corpus.command("list")
@with_examples(
    "fednotes corpus list",
)
def corpus_list(json_output: Json = False) -> None:
    """List the corpora of built-in jobs and where to get them."""
    from fednotes.data.formats import read_known_corpora

    if json_output:
        print_json(read_known_corpora())
        return
    for name, item in read_known_corpora().items():
        console.print(f"[bold]{name}[/bold]  {item['what']}", highlight=False)
        console.print(f"    {item['size']}; {item['licence']}", highlight=False)
        console.print(
            f"    from: {item['source']}; {item['reference']}", highlight=False
        )


@corpus.command("synthesise")
@with_examples(
    "fednotes corpus synthesise hospitals --sites 3 --to brat",
)
def corpus_synthesise(
    out: Annotated[
        Path, typer.Argument(help="Folder to create, with a folder for each site.")
    ],
    sites: Annotated[int, typer.Option(help="Number of sites.")] = 3,
    sentences: Annotated[
        int, typer.Option(help="Approximate number of training sentences per site.")
    ] = 400,
    seed: Seed = 1,
    to: Annotated[
        Output, typer.Option("--to", OldName("--format"), help=OUTPUT_FORMAT)
    ] = Output.conll,
) -> None:
    """Generate annotated notes for several sites."""
    from fednotes.data.synthetic import generate, write_sites

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FednotesError(f"{out} is not an empty folder: give a new or empty one")
    with showing_work("writing"):
        generated = generate(num_sites=sites, sentences_per_site=sentences, seed=seed)
        write_sites(generated, out, to.value)
    say(f"{len(generated)} sites in {out}; next: fednotes init {out}")


@jobs.callback()
def _group() -> None:
    """Job files."""


@jobs.command("keys")
@with_examples(
    "fednotes job keys",
    "fednotes job keys training",
)
def job_keys(
    table: Annotated[
        str,
        typer.Argument(
            help="Show one table only, such as sites or training; top shows the keys "
            "before the first table."
        ),
    ] = "",
    as_page: AsPage = False,
    json_output: Json = False,
) -> None:
    """List every key of a job file with its default and meaning."""
    from fednotes.jobs.reference_text import (
        describe_tables,
        format_page,
        format_tables,
    )

    if json_output:
        print_json(describe_tables(table))
        return
    text = format_page() if as_page else format_tables(table)
    say(*text.splitlines())


@jobs.command("show")
@with_examples(
    "fednotes job show job.toml --changed",
    "fednotes job show demo --set seed=2",
)
def job_show(
    job: JobArgument,
    settings: Settings = None,
    changed: Annotated[
        bool,
        typer.Option(
            "--changed", help="Show only keys that differ from their default."
        ),
    ] = False,
    json_output: Json = False,
) -> None:
    """Print a job as it will run, with the source of each value."""
    from fednotes.jobs.show import show_job

    shown = show_job(job, settings or ())
    if json_output:
        print_json(shown.to_dict())
    else:
        say(*shown.to_toml(changed=changed).splitlines())


@jobs.command("schema")
@with_examples(
    "fednotes job schema > job.schema.json",
)
def job_schema() -> None:
    """Print the JSON schema of a job file, for editors."""
    from fednotes.jobs.schema import make_schema

    print_json(make_schema())


@cache.command("clear")
@with_examples(
    "fednotes cache clear",
)
def cache_clear() -> None:
    """Delete all cached features, tokens and concepts."""
    from fednotes.encoders.features import find_default_cache
    from fednotes.encoders.token_cache import clear_caches

    folder = find_default_cache()
    say(f"{clear_caches(folder) / 1e6:.1f} MB freed in {folder}")
