"""The command line.

A command exits with code 0, or prints a one-line error to stderr and exits with code 2.
"""

from __future__ import annotations

import os
import shlex
import sys
import time

from fednotes.core.stopping import Stopped, end_while_importing, raising_stopped

if __name__ == "__main__" or sys.argv[0].endswith("fednotes"):
    end_while_importing(sys.argv)  # before the slow imports

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fednotes import __version__
from fednotes.cli.all_commands import (
    DATA,
    INSPECT,
    START,
    TRAIN,
    USE,
    AllCommands,
)
from fednotes.cli.completers import complete_job
from fednotes.cli.completion import answer_shell, completion
from fednotes.cli.doctor import doctor
from fednotes.cli.groups import cache, convert, corpus, jobs, show_checked
from fednotes.cli.init import init
from fednotes.cli.plain_help import (
    OldName,
    list_used_old_names,
    use_plain_help,
    with_examples,
)
from fednotes.cli.shared import (
    OUTPUT_FORMAT,
    SEEDS,
    SEEDS_HELP,
    SKIP_REMEDY,
    Backbone,
    ColumnOption,
    Device,
    Dictionary,
    EncodingOption,
    FormatOption,
    IdColumnOption,
    JobArgument,
    Json,
    LabelMap,
    Labels,
    OmopOption,
    OnError,
    OnErrorOption,
    QueryOption,
    RenamedFormatOption,
    Settings,
    Track,
    Yes,
    can_ask,
    choose_console,
    console,
    name_options,
    print_json,
    read_place,
    read_places,
    say,
    showing_work,
    tell,
)
from fednotes.core.cleaning import clean_message, clean_to_one_line
from fednotes.core.databases import hide_passwords, is_address
from fednotes.core.errors import (
    ConfigError,
    DataError,
    FednotesError,
    NamesParameters,
    Problem,
    fold_problems,
)
from fednotes.core.importing import importing_for_good
from fednotes.core.wording import format_count, format_pace
from fednotes.jobs.workers.child_process import PREDICTIONS, SITES, starting_early

if TYPE_CHECKING:
    from fednotes.jobs.results import RunResult
    from fednotes.jobs.seeds import SeedsResult

app = typer.Typer(
    name="fednotes",
    cls=AllCommands,
    help="Train models on the clinical notes of several sites; the notes stay there.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    # commands below take this over from the context above theirs
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(corpus, name="corpus", rich_help_panel=DATA)
app.add_typer(cache, name="cache", rich_help_panel=DATA)
app.add_typer(jobs, name="job", rich_help_panel=TRAIN)
app.command(rich_help_panel=DATA)(convert)
app.command(rich_help_panel=START)(init)
app.command(rich_help_panel=START)(completion)
app.command(rich_help_panel=INSPECT)(doctor)


def _show_version(is_given: bool) -> None:
    """Print the version and exit, if the option `--version` is given."""
    if is_given:
        say(f"fednotes {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_show_version,
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Train models on the clinical notes of several sites; the notes stay there."""


# Formats of predictions when --format still named the one to write.
_FORMERLY_WRITTEN = ("jsonl", "brat", "conll", "csv")
_MAX_PROBLEMS = 20  # maximum number of problems that an error lists


class Predictions(StrEnum):
    """Formats of predictions.

    Mentions are written as all of these, phenotypes as jsonl or csv.
    """

    jsonl = "jsonl"
    parquet = "parquet"
    omop = "omop"
    omop_parquet = "omop-parquet"
    brat = "brat"
    conll = "conll"
    csv = "csv"


# Without --to, these endings of --out name the format.
_FORMATS_BY_ENDING = {".csv": Predictions.csv, ".parquet": Predictions.parquet}


@app.command(rich_help_panel=START)
@with_examples(
    "fednotes simulate demo --out runs/demo",
    "fednotes simulate job.toml --out runs/first --set seed=2",
    "fednotes simulate job.toml --out runs/seeds --seeds 1-5",
)
def simulate(
    context: typer.Context,
    job: JobArgument,
    out: Annotated[Path, typer.Option(help="Folder to write the run to.")],
    settings: Settings = None,
    seeds: Annotated[
        list[str] | None, typer.Option(metavar=SEEDS, help=SEEDS_HELP)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume an interrupted command.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace existing output.")
    ] = False,
    track: Track = None,
    device: Device = "cpu",
    workers: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Number of processes that train at the same time; auto trains the "
            "first condition in one process, and uses the free cores for the others if "
            "they will take long.",
        ),
    ] = "auto",
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT|auto",
            help="Ray cluster on which the processes of --workers compute; auto takes "
            "the address from RAY_ADDRESS.",
        ),
    ] = None,
    yes: Yes = False,
    json_output: Json = False,
) -> None:
    """Run a job: train models alone, federated and pooled.

    The job runs on this machine, or with --cluster on a Ray cluster. With --seeds, run
    the job once per seed, in OUT/seed-1, OUT/seed-2 and so on, and show the mean and
    standard deviation of the scores. With --workers, several processes train different
    sites at the same time. Results are bit-identical with any number of workers.
    """
    if not cluster:
        _start_workers_early(context, SITES, workers)
    with importing_for_good():
        from fednotes import api
        from fednotes.cli.display import RichDisplay
        from fednotes.jobs.job_file import load_job
        from fednotes.jobs.seeds import parse_seeds
        from fednotes.jobs.workers.dealing import AUTO, parse_workers

    for setting in settings or ():
        if seeds and setting.partition("=")[0].strip() == "seed":
            raise ConfigError(
                "--seeds and --set seed=… cannot be used together: give only one"
            )
    parsed = load_job(job, tuple(settings or ()))
    words = ["fednotes", "simulate", job, "--out", str(out)]
    for setting in settings or ():
        words += ["--set", setting]
    for seed in seeds or ():
        words += ["--seeds", seed]
    chosen_workers = parse_workers(workers)
    if chosen_workers != AUTO:
        words += ["--workers", workers]
    if cluster:
        words += ["--cluster", cluster]

    shown = choose_console(as_json=json_output)
    with RichDisplay(shown, ask=can_ask(yes or json_output)) as display:
        start: Callable[..., Any] = partial(
            api.simulate,
            parsed,
            out,
            resume=resume,
            overwrite=overwrite,
            device=device,
            workers=chosen_workers,
            cluster=cluster,
            progress=display,
            track=track or (),
            command=shlex.join(words),
        )
        result = start(seeds=parse_seeds(",".join(seeds))) if seeds else start()
    report = _write_reports(out, result.seeds if seeds else ())
    if json_output:
        print_json(result.model_dump())
    elif seeds:
        _show_seeds(result, report)
    else:
        _show_run(result, out, report, display.warnings)


def _start_workers_early(context: typer.Context, work: str, workers: str) -> None:
    """Start the workers of a command while it imports what it needs.

    Args:
        context: The command's context; workers that are still running end with it.
        work: What they do, `SITES` or `PREDICTIONS`.
        workers: The value of --workers. The command checks it later.
    """
    if workers.isdecimal() and int(workers) > 1:
        context.with_resource(starting_early(work, int(workers)))


def _write_reports(out: Path, seeds: Sequence[int]) -> Path:
    """Write a report for each seed and one for the run; return the last one's path."""
    from fednotes.report.html import write_report

    for seed in seeds:
        write_report(out / f"seed-{seed}")
    return write_report(out)


def _show_run(
    result: RunResult, out: Path, report: Path, shown_warnings: Collection[str]
) -> None:
    """Print the notes and tables of a run, and the path of its report.

    Args:
        result: The result of the run.
        out: The folder of the run.
        report: The report.
        shown_warnings: The warnings that were printed before training.
    """
    from fednotes.cli.display import explain_missing_scores, make_result_tables

    shown = {f"warning: {text}" for text in shown_warnings} | set(shown_warnings)
    tell(note for note in result.notes if note not in shown)
    missing = explain_missing_scores(result)
    if missing:
        say(f"note: {missing}")
    say(f"report: {report}")
    for table in make_result_tables(result):  # printed late, so that they stay in view
        console.print(table)
    _show_next_step(result, out)


def _show_next_step(result: RunResult, out: Path) -> None:
    """Print what a run's federated model is used for, if the run has one."""
    from fednotes.jobs.run_folder import find_model_folder

    try:
        model = find_model_folder(out, "federated", next(iter(result.sites), ""))
    except DataError:
        return  # the job trains alone or pooled only
    if result.holds == "notes":  # a language model, which predicts no mentions
        say(f'next: in [model] of a job that fine-tunes, encoder = "{model}"')
    else:
        say(f"next: fednotes predict {shlex.quote(str(model))} NOTES")


def _show_seeds(result: SeedsResult, report: Path) -> None:
    """Print the notes and tables of a job's seeds, and the path of their report."""
    from fednotes.cli.display import make_seeds_tables

    tell(result.notes)
    say(f"report: {report}")
    for table in make_seeds_tables(result):
        console.print(table)


def _parse_label_map(label_map: list[str] | None) -> dict[str, str]:
    """Return the new name of each label, from pairs OLD=NEW."""
    new_names: dict[str, str] = {}
    for pair in label_map or ():
        old, sign, new = pair.partition("=")
        if not sign or old in new_names:
            raise FednotesError(
                f"--map {pair}: expected OLD=NEW, with a different OLD each time"
            )
        new_names[old] = new
    return new_names


def _parse_types(values: Sequence[str]) -> tuple[str, ...]:
    """Return entity types; a value may hold several, as --types once did."""
    types: dict[str, None] = {}
    for value in values:
        names = [name.strip() for name in value.split(",") if name.strip()]
        if not names:
            raise FednotesError(f"--type {value}: expected an entity type")
        types |= dict.fromkeys(names)
    return tuple(types)


@app.command(rich_help_panel=USE)
@with_examples(
    "fednotes predict runs/first/federated/model --text 'She took aspirin.'",
    "fednotes predict runs/first/federated/model notes.csv --out found.jsonl",
    "fednotes predict runs/first/federated/model env:NOTES_DB --omop cdm.note",
)
def predict(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="A saved model's folder.")],
    path: Annotated[
        str,
        typer.Argument(
            help="File or folder, a database's address or env:NAME, or - for stdin."
        ),
    ] = "-",
    text: Annotated[
        str | None, typer.Option(help="Text to read instead of PATH.")
    ] = None,
    to: Annotated[Predictions, typer.Option(help=OUTPUT_FORMAT)] = Predictions.jsonl,
    out: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="File, folder or database to write; stdout by default.",
        ),
    ] = "",
    out_table: Annotated[
        str,
        typer.Option(
            metavar="[SCHEMA.]TABLE",
            help="Table to write, if --out is a database; note_nlp by default.",
        ),
    ] = "",
    shard: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            help="Write a folder of files of N notes each, or N notes per transaction.",
        ),
    ] = 0,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume an interrupted command."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace existing output.")
    ] = False,
    threshold: Annotated[
        float,
        typer.Option(min=0, max=1, help="Leave out mentions below this confidence."),
    ] = 0.0,
    format: RenamedFormatOption = "",
    column: ColumnOption = "",
    id_column: IdColumnOption = "",
    query: QueryOption = "",
    omop: OmopOption = "",
    on_error: OnErrorOption = OnError.refuse,
    encoding: EncodingOption = "auto",
    device: Device = "cpu",
    workers: Annotated[
        str,
        typer.Option(
            metavar="N|auto",
            help="Number of processes that predict at the same time; auto uses free "
            "cores for 10,000 notes or more.",
        ),
    ] = "1",
    backbone: Backbone = None,
    dictionary: Dictionary = None,
) -> None:
    """Find mentions in text, or predict phenotypes of patients.

    Mentions are written as jsonl, csv (a row for each mention), parquet, omop (NOTE_NLP
    as CSV), omop-parquet, brat or conll. Phenotypes are written as jsonl or csv.
    Without --to, an --out that ends in .csv or .parquet names the format. With
    --shard, or with a database as --out, --resume continues an interrupted command.
    PATH is a table of notes (CSV, TSV, JSON lines or Parquet, also compressed as .gz or
    .zst; MIMIC, OMOP or FHIR), an annotated corpus, a text file that ends in .txt, or a
    folder of these. It can also be a database: a URL without a password, or env:NAME
    for an environment variable that holds the URL.
    """
    to = _choose_output_format(context, to, out)
    _start_workers_early(context, PREDICTIONS, workers)
    with importing_for_good():
        from fednotes.jobs.predict import predict as run
        from fednotes.jobs.saved_models import LoadOptions, NoteSource, PredictionOutput
        from fednotes.jobs.workers.dealing import parse_workers

    _require_clear_format(context, format)
    source = NoteSource(
        read_place(path, query, omop),
        text,
        format=format or None,
        column=column or None,
        id_column=id_column or None,
        encoding=encoding,
        on_error=on_error.value,
    )
    is_database = is_address(out)
    output = PredictionOutput(
        Path(out) if out and not is_database else None,
        to.value,
        threshold,
        shard=shard,
        resume=resume,
        overwrite=overwrite,
        database=out if is_database else "",
        table=out_table,
    )
    options = LoadOptions(device, backbone, dictionary, workers=parse_workers(workers))
    # Predictions on the same terminal show by themselves how far it is.
    is_shown = bool(out) or not console.is_terminal
    start = time.monotonic()
    with showing_work("loading the model", is_shown=is_shown):
        number = run(model, source, output, options, tell=_print_note)
    # A single note is predicted at once, and its predictions say enough.
    if out or (is_shown and number > 1):
        place = f" in {out}" if out else ""
        pace = format_pace(number, "notes", time.monotonic() - start)
        line = f"predictions of {format_count(number, 'note')}{place} ({pace})"
        print(line, file=sys.stderr)


def _choose_output_format(
    context: typer.Context, to: Predictions, out: str
) -> Predictions:
    """Return --to; without it, the format that the ending of --out names, if any."""
    source = context.get_parameter_source("to")
    is_given = source is not None and source.name != "DEFAULT"
    return to if is_given else _FORMATS_BY_ENDING.get(Path(out).suffix, to)


def _print_note(message: str) -> None:
    """Print a remark to stderr, with the names of options."""
    print(f"note: {clean_to_one_line(name_options(message))}", file=sys.stderr)


def _require_clear_format(context: typer.Context, format: str) -> None:
    """Refuse --format alone where it may be meant as what --to now is.

    Once, --format named the format to write, and --from the format to read.
    """
    source = context.get_parameter_source("to")
    is_alone = source is not None and source.name == "DEFAULT"
    is_ambiguous = is_alone and format in _FORMERLY_WRITTEN
    if is_ambiguous and "--from" not in list_used_old_names(context):
        raise FednotesError(
            f"--format {format}: this option now names the format of PATH, and --to "
            "the format to write: give --to as well"
        )


@app.command(rich_help_panel=USE)
@with_examples(
    "fednotes evaluate runs/first/federated/model test.jsonl",
    "fednotes evaluate runs/first/federated/model test/ --map ADR=ADE --type ADE",
)
def evaluate(
    model: Annotated[Path, typer.Argument(help="A saved model's folder.")],
    path: Annotated[
        str,
        typer.Argument(help="Annotated file or folder, or notes of labelled patients."),
    ],
    format: FormatOption = "",
    query: QueryOption = "",
    omop: OmopOption = "",
    label_map: LabelMap = None,
    labels: Labels = None,
    types: Annotated[
        list[str] | None,
        typer.Option(
            "--type",
            OldName("--types"),
            help="Entity type to score; all by default; may be repeated.",
        ),
    ] = None,
    on_error: OnErrorOption = OnError.refuse,
    encoding: EncodingOption = "auto",
    json_output: Json = False,
    device: Device = "cpu",
    backbone: Backbone = None,
    dictionary: Dictionary = None,
) -> None:
    """Score a saved model on annotated text, or on labelled patients."""
    from fednotes.api import evaluate as run
    from fednotes.cli.display import make_evaluation_table
    from fednotes.jobs.models import load

    new_names = _parse_label_map(label_map)
    chosen_types = _parse_types(types or ())
    with showing_work("loading the model"):
        loaded = load(model, device, backbone, calibrated=False, dictionary=dictionary)
        evaluation = run(
            loaded,
            read_place(path, query, omop),
            types=chosen_types,
            label_map=new_names,
            labels=labels,
            format=format or None,
            on_error=on_error.value,
            encoding=encoding,
        )
    for line in evaluation.notes():
        _print_note(line)
    if json_output:
        print_json(evaluation.to_dict())
    else:
        console.print(make_evaluation_table(evaluation.scores))


@app.command(rich_help_panel=USE)
@with_examples(
    "fednotes calibrate runs/first/federated/model devel.jsonl --plot sure.png",
    "fednotes calibrate runs/first/federated/model test.jsonl --report-only",
)
def calibrate(
    model: Annotated[Path, typer.Argument(help="A saved model's folder.")],
    notes: Annotated[
        Path, typer.Argument(help="Annotated notes that the model was not trained on.")
    ],
    label_map: LabelMap = None,
    encoding: EncodingOption = "auto",
    report_only: Annotated[
        bool,
        typer.Option(
            "--report-only",
            OldName("--check"),
            help="Report the calibration without changing the model.",
        ),
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Figure to write: .png, .svg or .pdf.")
    ] = None,
    json_output: Json = False,
    device: Device = "cpu",
    backbone: Backbone = None,
) -> None:
    """Calibrate a model's confidences on annotated notes.

    Save the calibration in the model's folder (calibration.json) if it improves the
    confidences by more than chance alone would. `predict` and the Python API then use
    it.
    """
    from fednotes import api
    from fednotes.cli.display import make_reliability_table
    from fednotes.jobs.models import load
    from fednotes.metrics.calibration import draw_picture

    if plot is not None:
        draw_picture({}, plot)  # fail before any work if the plot cannot be written
    new_names = _parse_label_map(label_map)
    if report_only:
        with showing_work("loading the model"):
            loaded = load(model, device, backbone)
            result: Any = api.reliability(
                loaded, notes, label_map=new_names, encoding=encoding
            )
        tables = {"as they are": result}
        conclusion = loaded.confidence
    else:
        with showing_work("calibrating"):
            result = api.calibrate(
                model,
                notes,
                label_map=new_names,
                device=device,
                backbone=backbone,
                encoding=encoding,
            )
        tables = result.reliabilities
        outcome = "nothing was written"
        if result.calibration is not None:
            outcome = f"saved in {model / 'calibration.json'}"
        conclusion = (
            f"log loss per mention lower by {result.gain:.4f} ± {result.error:.4f}: "
            f"{outcome}"
        )
    if plot is not None:
        result.plot(plot)
    if json_output:
        print_json(asdict(result))
        return
    for title, reliability in tables.items():
        console.print(make_reliability_table(title, reliability))
    say(conclusion)


@app.command(rich_help_panel=START)
@with_examples(
    "fednotes check job.toml",
    "fednotes check siteA/train siteA/test --format brat",
    "fednotes check anna/ --other-annotation ben/",
)
def check(
    targets: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH…|JOB",
            help="A corpus, the files of its parts (train and test), or a job.",
            autocompletion=complete_job,
        ),
    ],
    format: FormatOption = "",
    query: QueryOption = "",
    omop: OmopOption = "",
    on_error: OnErrorOption = OnError.refuse,
    encoding: EncodingOption = "auto",
    settings: Settings = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--other-annotation",
            OldName("--against"),
            help="Another annotation of the same documents to compare with.",
        ),
    ] = None,
    json_output: Json = False,
) -> None:
    """Check a corpus or a job and report problems before training.

    Report counts and locations, never text. Exit code: 0 no problems, 1 problems
    found, 2 the check could not run.
    """
    from fednotes.api import check as run

    with showing_work("checking"):
        checked = run(
            *read_places(targets, query, omop),
            format=format,
            on_error=on_error.value,
            settings=settings or (),
            against=against,
            encoding=encoding,
            estimates_time=True,
        )
    if json_output:
        print_json(checked.to_dict())
    else:
        show_checked(checked)
    if checked.wrong:
        sys.exit(1)


@app.command(rich_help_panel=INSPECT)
@with_examples(
    "fednotes report runs/first",
)
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    out: Annotated[
        Path | None, typer.Option(help="File to write; RUN/report.html by default.")
    ] = None,
) -> None:
    """Write or rewrite the HTML report of a run."""
    from fednotes.report.html import write_report

    say(f"report: {write_report(run, out)}")


@app.command(rich_help_panel=INSPECT)
@with_examples(
    "fednotes compare runs/first runs/first",
    "fednotes compare runs/second runs/first --other-condition federated",
)
def compare(
    a: Annotated[Path, typer.Argument(help="Folder of a run.")],
    b: Annotated[
        Path, typer.Argument(help="Folder of another run, or of the same one.")
    ],
    condition: Annotated[
        str, typer.Option(help="Condition of the first run.")
    ] = "federated",
    other_condition: Annotated[
        str,
        typer.Option(
            "--other-condition",
            OldName("--against"),
            help="Condition of the second run.",
        ),
    ] = "alone",
    metric: Annotated[
        str,
        typer.Option(
            help="Score to compare: strict, relaxed (any overlap) or "
            "relaxed_one_to_one; auroc for patients."
        ),
    ] = "strict",
    samples: Annotated[
        int, typer.Option(min=1, help="Number of bootstrap samples.")
    ] = 10_000,
    json_output: Json = False,
) -> None:
    """Compare two runs on the same test data by a paired bootstrap."""
    from fednotes.cli.display import make_comparison_table
    from fednotes.jobs.compare import compare as run

    with showing_work("comparing"):
        comparison = run(a, b, condition, other_condition, metric, samples)
    if json_output:
        print_json(comparison.to_dict())
    else:
        console.print(make_comparison_table(comparison))


use_plain_help(app)


def main() -> None:
    """Run the command line; the entry point of the console script."""
    try:
        with raising_stopped():
            _run()
    except Stopped as stopped:
        print(stopped.line, file=sys.stderr)
        sys.exit(stopped.code)
    except FednotesError as error:
        message = str(error)
        if isinstance(error, NamesParameters | DataError):
            message = name_options(message)
        fail(message, error.problems[1:] if isinstance(error, DataError) else ())
    except typer.Abort:
        sys.exit(130)
    except BrokenPipeError:  # the reader of the output, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        fail(f"{error.filename or 'a file'}: {error.strerror or error}")
    except Exception as error:
        _fail_unexpected(error)


def _fail_unexpected(error: Exception) -> None:
    """Print out-of-memory errors and errors of the CLI library; raise others."""
    # torch raises a RuntimeError if there is too little memory
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        fail("not enough memory: choose smaller layers or batches in the job's [model]")
    if type(error).__module__.split(".")[0] not in ("click", "typer"):
        raise error
    if hasattr(error, "format_message"):
        fail(error.format_message())
    fail(str(error))


def _run() -> None:
    """Run the command that the arguments name, or answer a shell that completes one."""
    answer_shell()
    try:
        app(standalone_mode=False)
    except Exception as error:
        if type(error).__name__ != "NoArgsIsHelpError":
            raise
        print(error)  # the help of a command that was called without arguments


def fail(message: str, more: Sequence[Problem] = ()) -> None:
    """Print what is wrong and exit with code 2.

    Args:
        message: What is wrong, on one line.
        more: Further problems; of many similar ones, only a few are printed.
    """
    print(f"error: {clean_message(hide_passwords(message))}", file=sys.stderr)
    lines = fold_problems(more)
    for line in lines[: _MAX_PROBLEMS - 1]:
        print(f"error: {clean_message(name_options(line))}", file=sys.stderr)
    unlisted = len(lines) + 1 - _MAX_PROBLEMS
    if unlisted > 0:
        print(f"error: {format_count(unlisted, 'further problem')}", file=sys.stderr)
    if more:
        print("hint: `fednotes check` lists all problems", file=sys.stderr)
        print(f"hint: {SKIP_REMEDY}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
