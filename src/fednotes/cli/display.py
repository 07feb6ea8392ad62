"""How a run looks in a terminal: a bar, the last evaluation, a table at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fednotes.engines.inprocess import RoundResult
from fednotes.jobs.costs import LARGE, LONG, SHORT, Pace, Traffic, size
from fednotes.jobs.simulate import Part, site_metrics
from fednotes.patients.cohort import Bags, SitePatients
from fednotes.report.run import duration

if TYPE_CHECKING:
    from fednotes.data.checks import Report
    from fednotes.data.stats import CorpusStats

CONDITIONS = ("alone", "federated", "pooled")
_SHOWN = (("F1", "f1"), ("held-out loss", "valid_loss"), ("loss", "loss"))  # the first there is
_COLUMNS = (  # of the table at the end: the kind of score, its measure, head, factor, digits
    ("strict", "f1", "strict", 100, 1),
    ("relaxed", "f1", "relaxed", 100, 1),
    ("masked", "loss", "loss", 1, 3),
    ("masked", "accuracy", "guessed %", 100, 1),
    ("phenotypes", "f1", "macro F1", 100, 1),
    ("ranking", "auroc", "AUROC", 1, 3),
)
_OF_CODES = (("codes", "loss", "loss", 1, 3), ("codes", "auroc", "AUROC", 1, 3))
_OF_A_DISEASE = (("precision", "P"), ("recall", "R"), ("f1", "F1"), ("auroc", "AUROC"))


class RichDisplay:
    """A progress bar for each part; a line for each evaluation where there is no terminal.

    ask: whether a person is asked about what takes very long or sends very much.
    """

    def __init__(self, console: Console, ask: bool = False) -> None:
        self.console, self._ask = console, ask
        self._bar: Progress | None = None

    def cost(self, traffic: Traffic) -> None:
        """What federated training will send. Raises typer.Abort where a person does not want it."""
        self._tell_cost(str(traffic), traffic.total > LARGE)

    def begin(self, part: Part, rounds: int, sentences: int) -> None:
        """A part starts (or goes on). sentences: trained on in each round, all sites together.

        They are patients where the sites hold patients. Either may be 0: not known.
        """
        self._close()
        self._part, self._rounds, self._sentences = part, rounds, sentences
        self._started: tuple[int, float] | None = None
        self._pace, self._told = Pace(rounds), False
        self._scores = ""
        self._unit = "patients" if isinstance(part.sites[0], SitePatients) else "sent"
        self._bar = _bar(self.console)
        self._task = self._bar.add_task(part.name, total=rounds or None, line="")
        self._bar.start()

    def round(self, result: RoundResult) -> None:
        """A round was committed."""
        assert self._bar is not None
        if result.evaluated:
            found = site_metrics(result, self._part)
            name, key = next(
                ((n, k) for n, k in _SHOWN if any(k in m for m in found.values())), ("", "")
            )
            self._scores = f"{name} " + " ".join(
                f"{site} {m[key]:.3f}" for site, m in found.items() if key in m
            )
            if not found and "valid_f1" in result.metrics:  # between real sites: over all of them
                self._scores = f"F1 {result.metrics['valid_f1']:.3f}"
        pace = self._rate(result)  # from here the time left is counted, too
        rate = f"{pace:.0f} {self._unit}/s  " if self._sentences else ""
        line = (
            f"loss {result.metrics.get('loss', 0):.3f}  {self._scores}  {rate}"
            f"↑{size(result.bytes_up)} ↓{size(result.bytes_down)}"
        )
        self._bar.update(self._task, completed=result.round + 1, line=line)
        left = self._pace.left(result)
        if result.evaluated and not self.console.is_terminal:
            more = f"  {duration(left)} left at most" if left else ""
            self.console.print(
                f"{self._part.name}: round {result.round + 1}/{self._rounds or '?'}  {line}{more}",
                highlight=False,
                soft_wrap=True,
            )
        if left is not None and not self._told:
            self._told = True
            if left > SHORT:
                text = f"{self._part.name}: {duration(left)} more at most"
                self._tell_cost(text, left > LONG)

    def _tell_cost(self, line: str, much: bool) -> None:
        """A line of what a run costs; where that is much, a person is asked."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        if much and self._ask:
            with paused(self._bar):
                typer.confirm("Go on?", abort=True)

    def end(self) -> None:
        """The part is trained."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._rounds or None)
        self._close()

    def features(self, done: int, total: int) -> None:
        """Frozen features are being computed, or notes read for concepts."""
        if self._bar is None:
            self._bar = _bar(self.console)
            self._task = self._bar.add_task("features of notes", total=total, line="")
            self._bar.start()
        self._bar.update(self._task, completed=done, total=total)
        if done >= total:
            self._close()

    def warn(self, text: str) -> None:
        """Something to know before training."""
        self.console.print(f"[yellow]warning:[/yellow] {escape(text)}", soft_wrap=True)

    def _rate(self, result: RoundResult) -> float:
        """Training sentences a second since the part began or went on."""
        if self._started is None:
            self._started = (result.round, result.seconds)
            return 0.0
        rounds, seconds = result.round - self._started[0], result.seconds - self._started[1]
        return rounds * self._sentences / seconds if seconds > 0 else 0.0

    def __enter__(self) -> RichDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()  # an error must not leave the terminal without its cursor

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def result_table(summary: Mapping[str, Any]) -> Table:
    """Every site under every condition: scores on test data, or of guesses at held-out words."""
    mean = summary["mean"]
    conditions = [c for c in CONDITIONS if c in mean]
    columns = [each for each in _COLUMNS if all(each[0] in mean[c] for c in conditions)]
    if not columns and any("codes" in mean[c] for c in conditions):
        columns = [*_OF_CODES]
    first = columns[0][0] if columns else "masked"
    what = {"masked": "masked words of held-out notes", "codes": "codes of test patients"}
    title = what.get(first, "test F1 in %")
    table = Table(title=f"{escape(summary['title'])} ({title}, seed {summary['seed']})")
    table.add_column("site")
    for condition in conditions:
        for number, column in enumerate(columns):
            table.add_column(f"{'' if number else condition}\n{column[2]}", justify="right")
    hidden = 0
    for site, scores in summary["sites"].items():
        if first == "phenotypes" and not any(first in scores.get(c, {}) for c in conditions):
            hidden += 1
        else:
            table.add_row(Text(site), *_cells(scores, conditions, columns))
    if hidden:
        table.caption = f"{hidden} more sites have no labelled test patient"
    table.add_section()
    table.add_row("mean", *_cells(mean, conditions, columns), style="bold")
    return table


def nothing_judged(summary: Mapping[str, Any]) -> str:
    """What a run lacks whose models were never judged, so that there is no table; else ""."""
    if any(summary["mean"].values()):
        return ""
    if summary["method"] == "phenotype":
        return (
            "no test patient has a label or a code that is predicted, so there are no scores: "
            "give sites `test` or a test_fraction, and `labels` or `codes`"
        )
    return "nothing is held out at any site, so there are no scores"


def _cells(scores: Mapping[str, Any], conditions: list[str], columns: list[Any]) -> list[str]:
    return [
        number_of(scores[condition].get(kind, {}).get(key), factor, digits)
        for condition in conditions
        for kind, key, _, factor, digits in columns
    ]


def number_of(value: float | None, factor: float = 100, digits: int = 1) -> str:
    """A number for a table, a dash where it does not exist."""
    return "–" if value is None else f"{factor * value:.{digits}f}"


def disease_table(summary: Mapping[str, Any]) -> Table | None:
    """Table 3 of Liu, Dligach and Miller 2019: every disease, and the average of all, in percent.

    Of each disease the mean over its classes, then over the sites. None where a run judges no
    diseases.
    """
    found = {
        c: summary["mean"][c]["by_output"]
        for c in CONDITIONS
        if "by_output" in summary["mean"].get(c, {})
    }
    diseases = list(dict.fromkeys(name for each in found.values() for name in each))
    if not diseases:
        return None
    sites = max(each[d]["sites"] for each in found.values() for d in each)
    table = Table(
        title="each disease, mean over its classes"
        + (f" and {sites} sites" if sites > 1 else "")
        + " (test, %)",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("disease")
    heads = _side_by_side([head for _, head in _OF_A_DISEASE])
    for condition in found:
        table.add_column(f"{condition:^{len(heads)}}\n{heads}", no_wrap=True)
    for name in diseases:
        # In a narrow terminal a name is cut, not a number.
        label = Text(name, no_wrap=True, overflow="ellipsis")
        table.add_row(label, *(_averages([each.get(name, {})]) for each in found.values()))
    table.add_section()
    averages = (_averages(list(each.values())) for each in found.values())
    table.add_row("average", *averages, style="bold")
    return table


def _averages(scores: list[Mapping[str, Any]]) -> str:
    """Of each measure, the mean of the numbers that exist."""
    numbers = []
    for key, _ in _OF_A_DISEASE:
        values = [value for each in scores if (value := each.get(key)) is not None]
        numbers.append(number_of(fmean(values) if values else None))
    return _side_by_side(numbers)


def _side_by_side(cells: list[str]) -> str:
    return "".join(f"{cell:>5}" for cell in cells[:-1]) + f"{cells[-1]:>6}"


class RunsBar:
    """A bar over whole runs; called with each one that has ended."""

    def __init__(self, console: Console, name: str, bar: Progress) -> None:
        self._console, self._name, self._bar = console, name, bar
        self._task = bar.add_task(name, total=None, line="")

    def __call__(self, run: str, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total, line=run)
        if not self._console.is_terminal:
            self._console.print(f"{self._name}: {done}/{total} {run}", highlight=False)

    def confirm(self, line: str) -> None:
        """Ask a person. Raises typer.Abort for no."""
        with paused(self._bar):
            typer.confirm("Go on?", abort=True)


@contextmanager
def runs_bar(console: Console, name: str) -> Iterator[RunsBar]:
    """A bar over whole runs."""
    with _bar(console) as bar:
        yield RunsBar(console, name, bar)


@contextmanager
def paused(bar: Progress | None) -> Iterator[None]:
    """Without a bar that moves, so that a person can be asked."""
    if bar is None:
        yield
        return
    bar.stop()
    yield
    bar.start()


def _bar(console: Console) -> Progress:
    """Description, bar, count, a free line, time left; silent where there is no terminal."""
    return Progress(
        TextColumn("[bold]{task.description:<22}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[line]}"),
        TimeRemainingColumn(compact=True),
        console=console,
        disable=not console.is_terminal,
    )


def stats_tables(stats: CorpusStats) -> list[Table]:
    """Table 1 of Ge et al. 2020: each site's counts, then the forms that sites share."""
    table = Table(title="corpora")
    for head in ("site", "documents", "sentences", "tokens", "entities", "forms", "types"):
        table.add_column(head, justify="left" if head in ("site", "types") else "right")
    for site in stats.sites:
        numbers = (site.documents, site.sentences, site.tokens, site.mentions, site.forms)
        types = ", ".join(f"{label} {count:,}" for label, count in site.entities.items())
        table.add_row(Text(site.site), *(f"{n:,}" for n in numbers), Text(types))
    if len(stats.sites) == 1:
        return [table]
    shared = Table(title=f"overlapping entities: {stats.overlapping:,} forms at two sites or more")
    shared.add_column("forms in common")
    for site in stats.sites:
        shared.add_column(Text(site.site), justify="right")
    for site, row in zip(stats.sites, stats.pairwise, strict=True):
        shared.add_row(Text(site.site), *(f"{n:,}" for n in row))
    return [table, shared]


def findings_table(report: Report) -> Table:
    """What `fednotes check` found, errors first."""
    table = Table()
    for head in ("level", "where", "what", "finding"):
        table.add_column(head)
    looks = {"error": "bold red", "warning": "yellow", "info": ""}
    for level, look in looks.items():
        for finding in report.findings:
            if finding.level == level:
                cells = (finding.where, finding.code, finding.message)
                table.add_row(level, *map(Text, cells), style=look)
    return table


def patients_table(sites: Sequence[SitePatients]) -> Table:
    """What sites of patients hold, as counts.

    coded: patients with billed codes, labelled: with a label of any phenotype. concepts: of a
    patient, the mean and the most, where notes are read as concepts.
    """
    table = Table()
    dense = any(site.space.dense for site in sites)
    concepts = () if dense else ("without concepts", "concepts each", "most")
    for head in ("site", "part", "patients", "coded", "labelled", *concepts):
        table.add_column(head, justify="left" if head in ("site", "part") else "right")
    for site in sites:
        for number, part in enumerate(("train", "valid", "test")):
            cohort = getattr(site, part)
            coded = sum(patient in site.codes for patient in cohort.patients)
            labelled = int((cohort.labels >= 0).any(axis=1).sum())
            cells = [f"{n:,}" for n in (len(cohort), coded, labelled)]
            if isinstance(cohort.bags, Bags):
                sizes = cohort.bags.sizes
                cells += [f"{int((sizes == 0).sum()):,}"]
                cells += [f"{sizes.mean():,.1f}", f"{sizes.max():,}"] if len(sizes) else ["–", "–"]
            table.add_row(Text("" if number else site.id), part, *cells)
    return table


def labels_table(sites: Sequence[SitePatients]) -> Table | None:
    """Test patients present/absent/questionable of each phenotype, at sites that have labels.

    None where no site has any.
    """
    judged = [site for site in sites if (site.test.labels >= 0).any()]
    if not judged:
        return None
    table = Table(title="test patients: present/absent/questionable")
    table.add_column("phenotype")
    for site in judged:
        table.add_column(Text(site.id), justify="right")
    counts = [site.test.label_counts() for site in judged]
    for row, name in enumerate(judged[0].phenotypes):
        cells = (
            "/".join(f"{of[kind][row]}" for kind in ("present", "absent", "questionable"))
            for of in counts
        )
        table.add_row(Text(name), *cells)
    return table
