"""The command line. Every command ends with 0, or with one line on stderr and 2."""

from __future__ import annotations

import os
import shlex
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Optional

import typer
from rich.console import Console

from fednotes.core.errors import FednotesError

app = typer.Typer(
    name="fednotes",
    help="Federated learning for clinical text.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
corpus = typer.Typer(help="Look at corpora.", no_args_is_help=True, rich_markup_mode=None)
cache = typer.Typer(help="The cache of frozen features.", no_args_is_help=True)
app.add_typer(corpus, name="corpus")
app.add_typer(cache, name="cache")
backbones = typer.Typer(help="Frozen backbones that need no download.", no_args_is_help=True)
app.add_typer(backbones, name="backbone")
console = Console()

Settings = Annotated[
    Optional[list[str]],  # noqa: UP045 - typer reads this form
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the job, e.g. seed=2."),
]
Backbone = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="Where the frozen encoder is, if it has moved since training."),
]
Device = Annotated[str, typer.Option(help="Where tensors live: cpu, cuda, cuda:1 …")]


class Output(StrEnum):
    """Formats that predictions are written in."""

    jsonl = "jsonl"
    brat = "brat"
    conll = "conll"


@app.command()
def simulate(
    job: Annotated[str, typer.Argument(help="A job file, or a built-in job such as `demo`.")],
    out: Annotated[Path, typer.Option(help="The run's folder.")],
    settings: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on after a stop.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run.")] = False,
    device: Device = "cpu",
) -> None:
    """Train the job's sites on this machine: alone, federated, pooled."""
    from fednotes.display import RichDisplay, result_table
    from fednotes.jobs import load_job
    from fednotes.simulate import simulate as run

    parsed = load_job(job, tuple(settings or ()))
    check_device(device)
    changes = [word for setting in settings or () for word in ("--set", setting)]
    repeated = ["fednotes", "simulate", job, "--out", str(out), *changes]
    with RichDisplay(console) as display:
        summary = run(
            parsed,
            out,
            resume=resume,
            overwrite=overwrite,
            device=device,
            display=display,
            command=shlex.join(repeated),
        )
    console.print(result_table(summary))
    for note in summary["notes"]:
        say(f"note: {note}")
    say(f"report: {out / 'report.html'}")


def say(line: str) -> None:
    """One line as it is: no colours, no markup, never wrapped."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def check_device(device: str) -> None:
    """Raises FednotesError for a device that this machine lacks."""
    import torch

    try:
        if torch.empty(1, device=device).is_meta:
            raise RuntimeError("a device without memory")
    except (RuntimeError, AssertionError) as error:
        raise FednotesError(f"--device {device}: not available on this machine") from error


@app.command()
def predict(
    model: Annotated[Path, typer.Argument(help="A saved model's folder.")],
    text: Annotated[str, typer.Argument(help="Text, a file or folder, or - for stdin.")] = "-",
    format: Annotated[Output, typer.Option(help="How predictions are written.")] = Output.jsonl,
    out: Annotated[Path | None, typer.Option(help="A file or folder; stdout if not given.")] = None,
    device: Device = "cpu",
    backbone: Backbone = None,
) -> None:
    """Find the mentions in new text."""
    from fednotes.predict import predict_text

    check_device(device)
    predict_text(model, text, format.value, out, device, backbone)


@app.command()
def evaluate(
    model: Annotated[Path, typer.Argument(help="A saved model's folder.")],
    path: Annotated[Path, typer.Argument(help="An annotated file or folder.")],
    format: Annotated[str, typer.Option(help="Of the file; guessed if not given.")] = "",
    label_map: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option("--map", metavar="OLD=NEW", help="Rename a label of the file."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Scores as JSON.")] = False,
    device: Device = "cpu",
    backbone: Backbone = None,
) -> None:
    """Score a saved model on annotated text."""
    from fednotes.predict import evaluate_path, score_table

    check_device(device)
    for pair in label_map or ():
        if "=" not in pair:
            raise FednotesError(f"--map {pair}: expected OLD=NEW")
    renamed = dict(pair.split("=", 1) for pair in label_map or ())
    scores, unknown = evaluate_path(model, path, format or None, device, renamed, backbone)
    if unknown:
        names = ", ".join(unknown)
        print(f"note: the model has no {names}: left out (--map OLD=NEW)", file=sys.stderr)
    if json_output:
        console.print_json(data=scores)
    else:
        console.print(score_table(scores))


@app.command()
def check(
    target: Annotated[str, typer.Argument(help="A corpus file or folder, or a job.")],
    format: Annotated[str, typer.Option(help="Of the file; guessed if not given.")] = "",
    settings: Settings = None,
) -> None:
    """What to know before training: alignment, labels, duplicates, leaks, lengths. Counts only."""
    from fednotes.data.checks import check_documents, check_sites
    from fednotes.data.formats import read
    from fednotes.display import findings_table
    from fednotes.jobs import built_in_jobs, load_job
    from fednotes.sites import load_sites

    if not target.strip():
        raise FednotesError("name a corpus file or folder, or a job")
    if target.endswith(".toml") or target in built_in_jobs():
        if format:
            raise FednotesError("--format is for a corpus; a job's sites have their own format")
        job = load_job(target, tuple(settings or ()))
        sites = load_sites(job)
        job.module.for_sites(job.config, sites.data)  # what the method does not take
        report = check_sites(list(sites.data))
        for note in sites.notes:
            say(f"note: {note}")
    else:
        report = check_documents(read(Path(target), format or None), None)
    console.print(findings_table(report))
    if errors := sum(finding.level == "error" for finding in report.findings):
        raise FednotesError(f"{target}: {errors} error(s) above must be mended before training")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    out: Annotated[Optional[Path], typer.Option(help="RUN/report.html if not given.")] = None,  # noqa: UP045
) -> None:
    """Write a run's HTML report again."""
    from fednotes.report.html import write_report

    say(f"report: {write_report(run, out)}")


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A run's folder.")],
    b: Annotated[Path, typer.Argument(help="Another run's folder, or the same one.")],
    condition: Annotated[str, typer.Option(help="Of the first run.")] = "federated",
    against: Annotated[str, typer.Option(help="Condition of the second run.")] = "alone",
    metric: Annotated[str, typer.Option(help="strict or relaxed.")] = "strict",
    samples: Annotated[int, typer.Option(min=1, help="Bootstrap samples.")] = 10_000,
) -> None:
    """Paired bootstrap between two runs on the same test data, site by site."""
    from fednotes.compare_runs import comparison_table

    console.print(comparison_table(a, b, condition, against, metric, samples))


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help="An experiment, such as fedner-table2.")],
    out: Annotated[
        Path | None, typer.Option(help="runs/reproduce if not given; grids share its runs.")
    ] = None,
    budget: Annotated[
        bool, typer.Option("--budget/--full", help="About an hour on two cores, or all of it.")
    ] = True,
    settings: Settings = None,
    seed: Annotated[
        Optional[list[int]],  # noqa: UP045
        typer.Option(help="A seed in place of the experiment's own; may be repeated."),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Runs at a time, one thread each.")] = 2,
) -> None:
    """Repeat a paper's table or figure; go on where an earlier call stopped."""
    from rich.markdown import Markdown

    from fednotes.display import runs_bar
    from fednotes.experiments.plots import plot
    from fednotes.experiments.reproduce import markdown
    from fednotes.experiments.reproduce import reproduce as run

    folder = out or Path("runs") / "reproduce"
    with runs_bar(console, name) as tell:
        table = run(
            name,
            folder,
            full=not budget,
            settings=tuple(settings or ()),
            seeds=tuple(seed or ()),
            workers=workers,
            tell=tell,
        )
    console.print(Markdown(markdown(table)))
    figure = folder / name / "figure.png"
    drawn = f", {figure}" if plot(table, figure) else ""
    say(f"results: {folder / name / 'results.md'}{drawn}")


@corpus.command("stats")
def corpus_stats(
    paths: Annotated[list[Path], typer.Argument(help="One corpus file or folder for each site.")],
    format: Annotated[str, typer.Option(help="Of the files; guessed if not given.")] = "",
    json_output: Annotated[bool, typer.Option("--json", help="Counts as JSON.")] = False,
) -> None:
    """Sentences, types and entities of each site, and the entities that sites share."""
    from fednotes.data.formats import read
    from fednotes.data.stats import corpus_stats as count
    from fednotes.display import stats_tables

    names = [path.name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    if len(set(names)) < len(names):
        raise FednotesError("a path is given twice: each stands for one site")
    stats = count({n: read(path, format or None) for n, path in zip(names, paths, strict=True)})
    if json_output:
        console.print_json(data=stats.to_dict())
        return
    for table in stats_tables(stats):
        console.print(table)


@corpus.command("list")
def corpus_list() -> None:
    """The corpora that jobs know, and where each is obtained."""
    from fednotes.data.catalogue import CORPORA

    for item in CORPORA:
        console.print(f"[bold]{item.name}[/bold]  {item.what}", highlight=False)
        console.print(f"    {item.size}; {item.licence}", highlight=False)
        console.print(f"    from: {item.source}; {item.reference}", highlight=False)


@corpus.command("synthesise")
def corpus_synthesise(
    out: Annotated[Path, typer.Argument(help="A new folder, one below it for each site.")],
    sites: Annotated[int, typer.Option(help="How many sites.")] = 3,
    sentences: Annotated[int, typer.Option(help="Training sentences a site, roughly.")] = 400,
    seed: Annotated[int, typer.Option(help="The same seed, the same notes.")] = 1,
    format: Annotated[Output, typer.Option(help="How they are written.")] = Output.conll,
) -> None:
    """Write generated notes of several sites, to try things out."""
    from fednotes.data.synthetic import generate, write_sites

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FednotesError(f"{out} is not an empty folder")
    made = generate(num_sites=sites, sentences_per_site=sentences, seed=seed)
    write_sites(made, out, format.value)
    say(f"{len(made)} sites in {out}; next: fednotes corpus stats {out}/*/train*")


@cache.command("clear")
def cache_clear() -> None:
    """Delete the frozen features that were computed from notes."""
    from fednotes.models.features import clear_cache, default_cache

    freed = clear_cache(default_cache())
    say(f"{freed / 1e6:.1f} MB freed in {default_cache()}")


@backbones.command("graft")
def backbone_graft(
    out: Annotated[Path, typer.Argument(help="A new folder, in Hugging Face's BART layout.")],
    text: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option(help="Public text to train on, repeatable; generated notes if not given."),
    ] = None,
    encoder: Annotated[str, typer.Option(help="minilm or a BERT directory.")] = "minilm",
    layers: Annotated[int, typer.Option(min=1, help="Of the decoder.")] = 2,
    steps: Annotated[int, typer.Option(min=0, help="Of training.")] = 2500,
    seed: Annotated[int, typer.Option(help="The same seed, the same backbone.")] = 1,
) -> None:
    """Make a small BART of a BERT: its encoder as it is, a decoder trained on public text."""
    from fednotes.display import runs_bar
    from fednotes.models.graft import describe, graft, read_texts

    texts, names = read_texts(text or [], seed)
    with runs_bar(console, "graft") as tell:
        report = graft(
            encoder, out, texts=texts, steps=steps, seed=seed, sources=names,
            decoder_layers=layers, progress=lambda done, total: tell("steps", done, total),
        )  # fmt: skip
    for line in describe(report):
        say(line)
    say(f'in a job: [model] kind = "prompt-bart", backbone = "{out}"')


def main() -> None:
    """The console script."""
    try:
        _run()
    except FednotesError as error:
        fail(str(error))
    except typer.Abort:
        sys.exit(130)
    except KeyboardInterrupt:
        print("stopped; a simulate goes on with --resume, a reproduce as it is", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:  # whoever reads our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        fail(f"{error.filename or 'a file'}: {error.strerror or error}")
    except Exception as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            fail("not enough memory: choose smaller layers or batches in the job's [model]")
        if type(error).__module__.split(".")[0] not in ("click", "typer"):
            raise
        fail(error.format_message() if hasattr(error, "format_message") else str(error))


def _run() -> None:
    try:
        app(standalone_mode=False)
    except Exception as error:
        if type(error).__name__ != "NoArgsIsHelpError":
            raise
        print(error)  # a command without its arguments shows its help


def fail(message: str) -> None:
    """One line for the person who made the mistake."""
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
