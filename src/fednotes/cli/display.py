"""The terminal display of a run: a progress bar, scores, and tables at the end."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from statistics import fmean
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fednotes.cli.time_left import TimeLeft
from fednotes.core.cleaning import NAME, clean, clean_message, clean_to_one_line
from fednotes.core.parsing import find_number
from fednotes.core.wording import (
    format_duration,
    format_rough_duration,
    format_size,
    list_names,
)
from fednotes.core.work import reporting_to
from fednotes.engines.rounds import RoundResult
from fednotes.jobs.left_out_table import LeftOutCell, LeftOutTable
from fednotes.jobs.parts import Part, Traffic
from fednotes.jobs.progress import LARGE_BYTES, LONG_SECONDS, ProgressListener
from fednotes.jobs.results import BASELINES, CONDITIONS, RunResult
from fednotes.jobs.score_layouts import SCORES, Column
from fednotes.jobs.simulate import gather_site_metrics
from fednotes.metrics.gap import Gap
from fednotes.metrics.spans import overlap_differs

if TYPE_CHECKING:
    from fednotes.data.checks import Finding
    from fednotes.jobs.audit_result import Audit
    from fednotes.jobs.compare import Comparison
    from fednotes.jobs.job import CountTable
    from fednotes.jobs.proposal import Facts, Proposal
    from fednotes.jobs.seeds import SeedsResult
    from fednotes.metrics.calibration import Reliability

_SITE_COLUMNS = 4  # with more sites, the table of types has no column for each
_LONG_RUN_SECONDS = 300.0  # a person may want part of the result earlier
_LIKE_FINDINGS = 3  # of more findings of one kind, only the first is shown
_LISTED_TYPES = 15  # maximum number of types in that table
SHORT = 60.0  # seconds; shorter runs are not announced
# Tables of several seeds show only the F1 of these, to fit into 80 columns.
_ONLY_F1 = ("relaxed", "relaxed_one_to_one")
UNPAIRED = (
    "no p: an unpaired interval, because the two models were not "
    "compared on the same test documents"
)
OWN_MIX_WORDS = "a mix of each site's own models"
ONE_TO_ONE = (
    "any overlap: a mention is correct if it overlaps one of the same "
    "type, so one long mention can match several; one to one: each "
    "mention is in at most one pair"
)
# Titles of tables, by the first kind of scores in them.
_TITLES = {
    "masked": "masked words of held-out notes",
    "codes": "codes of test patients",
}
_TEST_SCORES = "test scores in %"
LISTED_SITES = 10  # with more sites, a progress line does not show each site's score
UNPROVEN = "proves nothing: the attack fails even without a defence"
# A progress line shows the first of these scores that sites report.
_LINE_SCORES = (("F1", "f1"), ("held-out loss", "valid_loss"), ("loss", "loss"))
_PRF = ("P", "R", "F1")
_DISEASE_MEASURES = (
    ("precision", "P"),
    ("recall", "R"),
    ("f1", "F1"),
    ("auroc", "AUROC"),
)


class RichDisplay(ProgressListener):
    """Shows a progress bar for each part of a run.

    If the output is not a terminal, it prints a line for each evaluation instead.

    Args:
        console: Where to print.
        ask: Whether to ask a person before long runs and large transfers.
        has_times: Whether lines begin with the time if the output is not a terminal.
    """

    def __init__(
        self, console: Console, *, ask: bool = False, has_times: bool = False
    ) -> None:
        self.console = console
        self._ask = ask
        self._has_times = has_times and not console.is_terminal
        self._bar: Progress | None = None
        self._time = TimeLeft()
        self._is_time_announced = False
        self._warned: set[str] = set()
        self._context = ExitStack()

    @property
    def warnings(self) -> frozenset[str]:
        """The warnings that were printed."""
        return frozenset(self._warned)

    def cost(self, traffic: Traffic) -> None:
        """Show what a run will send.

        Raises:
            typer.Abort: The person declines.
        """
        is_large = traffic.up + traffic.down > LARGE_BYTES
        self._announce(str(traffic), must_ask=is_large)

    def plan(self, work: Mapping[str, float]) -> None:
        """Record the work of each part, to estimate the time left."""
        self._time.plan(work)

    def begin(self, part: Part, rounds: int, examples: int) -> None:
        """Start the bar of a part."""
        self._close_bar()
        self._part = part
        self._rounds = rounds
        self._examples = examples
        self._first: RoundResult | None = None
        self._time.begin(part.name, rounds)
        self._scores = ""
        self._start_bar(part.name, rounds or None)

    def round(self, result: RoundResult) -> None:
        """Show a round: loss, scores, pace, bytes and the time left."""
        assert self._bar is not None
        if result.evaluated:
            self._scores = self._format_scores(result)
        self._first = self._first or result
        line = "  ".join([self._format_loss(result), self._format_pace(result)])
        if self._part.is_federation:  # elsewhere nothing leaves a site
            sent = format_size(result.bytes_up)
            line += f"↑{sent} ↓{format_size(result.bytes_down)}"
        line = line.rstrip()

        self._time.round(result)
        seconds_left = self._time.estimate_seconds()
        left = self._format_time_left(seconds_left) if seconds_left else ""
        announced_seconds = 0.0
        if seconds_left is not None and not self._is_time_announced:
            self._is_time_announced = True
            if seconds_left > SHORT:
                announced_seconds = seconds_left
        self._bar.update(self._task, completed=result.round + 1, line=line, left=left)
        if result.evaluated and not self.console.is_terminal:
            text = self.with_time(
                f"{self._part.name}: {self._format_place(result)}  {line}"
            )
            if left and not announced_seconds:
                text += f"  {left}"
            self.console.print(text, highlight=False, markup=False, soft_wrap=True)

        if announced_seconds:
            self._announce(
                f"the whole run: {left}", must_ask=announced_seconds > LONG_SECONDS
            )

    def with_time(self, text: str) -> str:
        """Return a line after the time, if lines have times."""
        if not self._has_times:
            return text
        return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}"

    def _format_place(self, result: RoundResult) -> str:
        """Return the round, and the epoch if the method counts epochs."""
        rounds = result.round + 1
        place = f"round {rounds}/{self._rounds or '?'}"
        epochs = self._part.epochs
        # An epoch may have many rounds, and a round several epochs.
        if epochs and self._rounds and epochs != self._rounds:
            epoch = math.ceil(rounds * epochs / self._rounds)
            place = f"epoch {epoch}/{epochs}, {place}"
        return place

    def _format_scores(self, result: RoundResult) -> str:
        """Return the scores of an evaluation, by site if sites report them."""
        metrics = gather_site_metrics(result, self._part)
        if not metrics and "valid_f1" in result.metrics:  # a run between real sites
            return f"F1 {_format_percent(result.metrics['valid_f1'])}"
        for name, key in _LINE_SCORES:
            scores = {site: own[key] for site, own in metrics.items() if key in own}
            if scores:
                as_text = _format_percent if key == "f1" else _format_loss
                return f"{name} {format_site_scores(scores, as_text)}"
        return " "

    def _format_loss(self, result: RoundResult) -> str:
        """Return loss and scores; or ε for a private run, which reports neither."""
        if self._part.is_private:
            epsilon = result.metrics.get("epsilon")
            return "" if epsilon is None else f"ε {epsilon:.2f}"
        return f"loss {result.metrics.get('loss', 0):.3f}  {self._scores}"

    def _format_pace(self, result: RoundResult) -> str:
        """Return the number of training examples per second, in words.

        The first round has no rate, because it is measured from the end of that round.
        """
        assert self._first is not None
        rounds = result.round - self._first.round
        seconds = result.seconds - self._first.seconds
        if not self._examples or rounds == 0 or seconds <= 0:
            return ""
        pace = rounds * self._examples / seconds
        return f"{pace:.0f} {self._part.unit}/s  "

    def _format_time_left(self, seconds: float) -> str:
        """Return the time until the whole run ends, in words."""
        return f"about {format_duration(seconds)} left"

    def _announce(self, line: str, *, must_ask: bool) -> None:
        """Print the cost of a run; ask for confirmation if it is high."""
        text = self.with_time(line)
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        if must_ask and self._ask:
            with pausing(self._bar):
                typer.confirm("Continue?", abort=True)

    def end(self) -> None:
        """End the bar of a part."""
        if self._bar is not None:
            self._bar.update(self._task, completed=self._rounds or None)
        self._time.end()
        self._close_bar()

    def features(self, done: int, total: int) -> None:
        """Show how many notes have features of the frozen encoder."""
        bar = self._bar or self._start_bar("features of notes", total)
        bar.update(self._task, completed=done, total=total)
        if done >= total:
            self._close_bar()

    def seed(self, seed: int, place: int, total: int) -> None:
        """Announce the run with a seed."""
        self._close_bar()
        self._time = TimeLeft()
        self._is_time_announced = False
        self.console.print(f"seed {seed} ({place} of {total})", highlight=False)

    def warn(self, text: str) -> None:
        """Print a warning, but only once if several seeds' runs repeat it."""
        if text in self._warned:
            return
        self._warned.add(text)
        line = self.with_time(f"[yellow]warning:[/yellow] {escape(text)}")
        self.console.print(line, soft_wrap=True)

    def __enter__(self) -> RichDisplay:
        if self.console.is_terminal:
            self._context.enter_context(reporting_to(_WorkBetweenParts(self)))
        return self

    def __exit__(self, *error: object) -> None:
        self._context.close()
        self._close_bar()  # an error must not leave the cursor hidden

    def begin_work(self, name: str, total: int | None) -> Progress | None:
        """Start the bar of work outside of all parts, such as reading.

        Returns:
            The bar, which is removed in the end; None if another bar is shown.
        """
        if self._bar is not None:
            return None
        return self._start_bar(name, total, transient=True)

    def end_work(self, bar: Progress) -> None:
        """End a bar of `begin_work`, unless a part has replaced it."""
        if self._bar is bar:
            self._close_bar()

    def _start_bar(
        self, name: str, total: int | None, *, transient: bool = False
    ) -> Progress:
        """Replace the bar by a new one, and show it.

        Args:
            name: What it shows.
            total: The number of items; None if it is unknown.
            transient: Whether it disappears in the end and estimates its own time left.
        """
        time_left: ProgressColumn = TextColumn("{task.fields[left]}")
        if transient:
            time_left = TimeRemainingColumn(compact=True)
        self._bar = _make_bar(self.console, time_left, transient=transient)
        self._task = self._bar.add_task(name, total=total, line="", left="")
        self._bar.start()
        return self._bar

    def _close_bar(self) -> None:
        """Stop the bar, if there is one."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class _WorkBetweenParts:
    """Shows what a run does before, between and after its parts.

    Args:
        display: The display of the run.
    """

    def __init__(self, display: RichDisplay) -> None:
        self._display = display
        self._depth = 0  # of the newest work within other work
        self._bar: Progress | None = None

    def begin(self, name: str, total: int | None) -> None:
        """Show work, unless it belongs to a part or to other work."""
        self._depth += 1
        if self._depth == 1:
            self._bar = self._display.begin_work(name, total)

    def advance(self, done: int) -> None:
        """Show how many items are done."""
        if self._depth == 1 and self._bar is not None:
            task = self._bar.tasks[0]
            self._bar.update(task.id, completed=done, line=_format_rate(task))

    def end(self) -> None:
        """Remove the bar when the work has ended."""
        self._depth -= 1
        if self._depth == 0 and self._bar is not None:
            self._display.end_work(self._bar)
            self._bar = None


def _format_percent(score: float) -> str:
    """Return a score in percent, as in the tables."""
    return f"{score:.1%}"


def _format_loss(loss: float) -> str:
    """Return a loss with three decimals."""
    return f"{loss:.3f}"


def format_site_scores(
    scores: Mapping[str, float], as_text: Callable[[float], str]
) -> str:
    """Return the score of each site; for many sites, the mean, minimum and maximum.

    Args:
        scores: Site → score.
        as_text: Returns the text that shows a score.
    """
    if len(scores) <= LISTED_SITES:
        return " ".join(f"{site} {as_text(score)}" for site, score in scores.items())
    lowest = min(scores, key=scores.__getitem__)
    highest = max(scores, key=scores.__getitem__)
    return (
        f"mean of {len(scores):,} sites {as_text(fmean(scores.values()))}, "
        f"lowest {as_text(scores[lowest])} ({lowest}), "
        f"highest {as_text(scores[highest])} ({highest})"
    )


def make_sheet(*heads: str | Text, left: int = 1, **options: Any) -> Table:
    """Return an empty table with headings.

    Args:
        heads: Headings of the columns.
        left: Number of leading columns that are left-aligned, as for words; the others
            are right-aligned, as for numbers.
        options: Options of `rich.table.Table`.
    """
    table = Table(**options)
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place < left else "right")
    return table


def make_compact_sheet(*heads: str | Text, left: int = 1, title: str = "") -> Table:
    """Return an empty table, narrow enough for 80 columns; see `make_sheet`."""
    options: dict[str, Any] = {
        "box": box.SIMPLE_HEAD,
        "padding": (0, 1, 0, 0),
        "pad_edge": False,
    }
    return make_sheet(*heads, left=left, title=title, **options)


def make_result_tables(result: RunResult) -> list[Table]:
    """Return the tables to show for a run, as far as its models were scored."""
    scores = make_result_table(result) if any(result.mean.values()) else None
    verdicts = [make_verdict_table(result, against) for against in BASELINES]
    left_out = _make_left_out_sheet(result.left_out_table)
    tables = [scores, make_disease_table(result), *verdicts, left_out]
    return [table for table in tables if table is not None]


def make_result_table(result: RunResult) -> Table:
    """Return the scores of each site and condition on test data or held-out words."""
    mean = result.mean
    conditions = [c for c in CONDITIONS if c in mean]
    kinds = _choose_kinds(result, conditions)
    first = kinds[0] if kinds else "masked"
    described = _TITLES.get(first, _TEST_SCORES)
    title = f"{escape(result.title)} ({described}, seed {result.seed})"
    table = make_compact_sheet("site", "trained", left=2, title=title)
    for kind in kinds:
        layout = SCORES[kind]
        heads = _join_heads(layout.columns)
        heading = layout.heading
        table.add_column(
            f"{heading:^{len(heads)}}\n{heads}", justify="right", no_wrap=True
        )

    def add_rows(name: str, scores: Mapping[str, Any], style: str = "") -> None:
        """Add a row for each condition of a site, or of the mean."""
        trained = [condition for condition in conditions if condition in scores]
        for place, condition in enumerate(trained):
            cells = (_format_measures(scores[condition], kind) for kind in kinds)
            label = _mark_condition(condition, result.marks)
            table.add_row(
                _make_name_cell("" if place else name), label, *cells, style=style
            )
        table.add_section()

    hidden = 0
    for site, scores in result.sites.items():
        is_scored = any(first in scores.get(c, {}) for c in conditions)
        if first == "phenotypes" and not is_scored:
            hidden += 1
        else:
            add_rows(site, scores)
    add_rows("mean", mean, "bold")

    notes = _list_mark_notes(conditions, result.marks)
    if hidden:
        notes.append(f"{hidden} more sites have no labelled test patient")
    if "relaxed_one_to_one" in kinds:
        notes.append(ONE_TO_ONE)
    table.caption = "\n".join(notes) or None
    return table


def _make_name_cell(text: str) -> Text:
    """Return a name that a narrow terminal truncates instead of the numbers."""
    return Text(text, no_wrap=True, overflow="ellipsis")


def _mark_condition(condition: str, marks: Mapping[str, str]) -> str:
    """Return a condition's name, with a star if there is a note on it."""
    return f"{condition} *" if condition in marks else condition


def _list_mark_notes(conditions: Sequence[str], marks: Mapping[str, str]) -> list[str]:
    """Return the notes on the conditions that have a star."""
    return [f"* {escape(marks[c])}" for c in conditions if c in marks]


def _choose_kinds(result: RunResult, conditions: Sequence[str]) -> list[str]:
    """Return the kinds of scores that a run's table shows."""
    mean = result.mean
    kinds = [
        kind
        for kind, layout in SCORES.items()
        if layout.columns
        and kind != "codes"
        and all(kind in mean[condition] for condition in conditions)
    ]
    all_scores = [scores for site in result.sites.values() for scores in site.values()]
    if "relaxed_one_to_one" in kinds and not any(map(overlap_differs, all_scores)):
        kinds.remove("relaxed_one_to_one")
    if not kinds and any("codes" in mean[c] for c in conditions):
        kinds = ["codes"]
    return kinds


def _format_measures(scores: Mapping[str, Any], kind: str) -> str:
    """Return the measures of one kind of score, side by side."""
    columns = SCORES[kind].columns
    cells = [
        format_number(
            find_number(scores, kind, column.measure), column.factor, column.digits
        )
        for column in columns
    ]
    return _join_cells(cells, [column.head for column in columns])


def make_seeds_tables(result: SeedsResult) -> list[Table]:
    """Return the tables of several seeds: means and deviations, then paired tests."""
    tests = make_seeds_test_table(result)
    left_out = _make_left_out_sheet(result.left_out_table)
    tables = [make_seeds_table(result), tests, left_out]
    return [table for table in tables if table is not None]


def _make_left_out_sheet(scores: LeftOutTable | None) -> Table | None:
    """Return the table of the strict F1 of each model at each left-out site.

    Returns:
        The table; None if the run has no left-out sites.
    """
    if scores is None:
        return None
    sites = [Text(site) for site in scores.sites]
    title = "models at a site that took no part, strict F1 in %"
    table = make_compact_sheet("model", *sites, "mean", title=title)
    for name, cells in scores.rows:
        table.add_row(name, *map(_format_left_out_cell, cells))
    notes = [f"types that are scored: {escape(scores.types_in_words)}"]
    if scores.has_partial_scores:
        notes.append(
            "* this model knows only some of these types, and is scored only on those"
        )
    table.caption = "\n".join(notes)
    return table


def _format_left_out_cell(cell: LeftOutCell | None) -> str:
    """Return an F1, with its standard deviation over seeds if it is known."""
    if cell is None:
        return "–"
    text = format_number(cell.f1)
    if cell.std is not None:
        text += f" ± {format_number(cell.std)}"
    return text if cell.counts_all else f"{text} *"


def make_seeds_table(result: SeedsResult) -> Table:
    """Return mean ± standard deviation over the seeds, for each site and condition."""
    conditions = [c for c in CONDITIONS if c in result.mean]
    kinds = _choose_kinds(_take_means(result), conditions)
    columns = [
        (kind, column)
        for kind in kinds
        for column in SCORES[kind].columns
        if kind not in _ONLY_F1 or column.measure == "f1"
    ]
    seeds = len(result.seeds)
    described = _TITLES.get(kinds[0], _TEST_SCORES) if kinds else _TEST_SCORES
    title = f"{escape(result.title)} ({described}, mean ± SD of {seeds} seeds)"
    table = make_compact_sheet("site", "trained", left=2, title=title)
    for place, (kind, column) in enumerate(columns):
        is_first = not place or columns[place - 1][0] != kind
        heading = SCORES[kind].heading if is_first else ""
        table.add_column(f"{heading}\n{column.head}", justify="right", no_wrap=True)
    groups = [*result.sites.items(), ("mean", result.mean), ("micro", result.micro)]
    for site, scores in groups:
        trained = [c for c in conditions if c in scores]
        for place, condition in enumerate(trained):
            cells = (
                _format_mean_and_sd(scores[condition], kind, column)
                for kind, column in columns
            )
            label = _mark_condition(condition, result.marks)
            style = "bold" if site == "mean" else ""
            table.add_row(
                _make_name_cell("" if place else site), label, *cells, style=style
            )
        table.add_section()

    notes = _list_mark_notes(conditions, result.marks)
    if "relaxed_one_to_one" in kinds:
        notes.append(ONE_TO_ONE)
    if result.micro:
        notes.append("micro: on the test data of all sites together")
    notes += _list_traffic_notes(result)
    table.caption = "\n".join(notes) or None
    return table


def _list_traffic_notes(result: SeedsResult) -> Iterator[str]:
    """Yield what a site sends in federated training, in MB over the seeds."""
    if "federated" not in result.mean:
        return
    factor = 1e-6 / max(1, len(result.sites))
    texts = []
    for direction, traffic in (("up", result.bytes_up), ("down", result.bytes_down)):
        mean = find_number(traffic, "mean")
        if mean is None:
            return
        text = format_number(mean, factor, 2)
        std = find_number(traffic, "std")
        if std is not None:
            text += f" ± {format_number(std, factor, 2)}"
        texts.append(f"{text} MB {direction}")
    yield f"federated training, a site: {', '.join(texts)}"


def _format_mean_and_sd(scores: Mapping[str, Any], kind: str, column: Column) -> str:
    """Return the mean ± standard deviation of the measure that a column shows."""
    mean = find_number(scores, kind, column.measure, "mean")
    std = find_number(scores, kind, column.measure, "std")
    text = format_number(mean, column.factor, column.digits)
    if std is None:
        return text
    return f"{text} ± {format_number(std, column.factor, column.digits)}"


def _take_means(result: SeedsResult) -> RunResult:
    """Return the means over the seeds in the form of one run."""

    def take_means(scores: Mapping[str, Any]) -> dict[str, Any]:
        """Return the mean of each measure, from its mean and deviation."""
        return {
            kind: {
                measure: value.get("mean")
                for measure, value in measures.items()
                if isinstance(value, Mapping)
            }
            for kind, measures in scores.items()
            if kind in SCORES and isinstance(measures, Mapping)
        }

    sites = {}
    for site, conditions in result.sites.items():
        sites[site] = {name: take_means(scores) for name, scores in conditions.items()}
    mean = {name: take_means(scores) for name, scores in result.mean.items()}
    return RunResult(sites=sites, mean=mean)


def make_seeds_test_table(result: SeedsResult) -> Table | None:
    """Return the table of paired tests over the seeds; None if there are none."""
    if not result.differences:
        return None
    unit = _name_unit(result.holds)
    title = f"federated − another condition, {unit}, paired t test over seeds"
    table = make_compact_sheet(
        "site", "against", "gain", "95 %", "p", "seeds", left=2, title=title
    )
    for test in result.differences:
        gain, low, high = (
            _format_difference(value, result.holds)
            for value in (test.mean, test.low, test.high)
        )
        cells = (gain, f"{low} to {high}", f"{test.p_value:.4f}", str(test.n))
        table.add_row(Text(test.site or "mean"), test.against, *cells)
    return table


def _name_unit(holds: str) -> str:
    """Return the unit of differences between models of this kind of data."""
    return "nats of held-out loss" if holds == "notes" else "points of F1"


def _format_difference(value: float, holds: str) -> str:
    """Return a difference between models with its sign."""
    return f"{value:+.3f}" if holds == "notes" else f"{100 * value:+.1f}"


def make_verdict_table(result: RunResult, against: str = "alone") -> Table | None:
    """Return each site's gain from the federation, and the model that it should use.

    Returns:
        None if no site has both a federated model and one of the other condition.
    """
    mean = result.verdict(against=against)
    if mean is None:
        return None
    other = "each site alone" if against == "alone" else OWN_MIX_WORDS
    heads = ("gain", "95 %", "p", "gap\nclosed")
    title = f"federated against {other}, {_name_unit(result.holds)}"
    table = make_compact_sheet("site", *heads, title=title)
    table.add_column("use")

    verdicts = [(site, result.verdict(site, against)) for site in result.sites]
    rows = [(site, verdict) for site, verdict in verdicts if verdict is not None]
    for site, verdict in [*rows, ("mean", mean)]:
        gain, low, high = (
            _format_difference(value, result.holds) for value in verdict[:3]
        )
        p_value = "–" if verdict.p_value is None else f"{verdict.p_value:.4f}"
        cells = (
            gain,
            f"{low} to {high}",
            p_value,
            format_gap(verdict.gap),
            verdict.use,
        )
        table.add_row(Text(site), *cells)

    notes = []
    if against == "alone":
        notes.append(f"cost of the federation at a site: {result.cost}")
    if not all(verdict.paired for _, verdict in rows):
        notes.append(UNPAIRED)
    if mean.gap and mean.gap.why:
        notes.append(f"gap closed: {mean.gap.why}")
    table.caption = "\n".join(notes) or None
    return table


def format_gap(gap: Gap | None) -> str:
    """Return the share of pooled − alone that is closed; a dash if there is none."""
    return "–" if gap is None or gap.closed is None else f"{gap.closed:.2f}"


def explain_missing_scores(result: RunResult) -> str:
    """Return why a run has no table of scores; "" if it has one."""
    return "" if any(result.mean.values()) else result.wording.unscored


def format_number(value: float | None, factor: float = 100, digits: int = 1) -> str:
    """Return a number for a table; a dash if it is None."""
    return "–" if value is None else f"{factor * value:.{digits}f}"


def make_disease_table(result: RunResult) -> Table | None:
    """Return the scores of each disease and their average, in percent.

    This is Table 3 of Liu, Dligach and Miller 2019. The score of a disease is the mean
    over its classes, then over the sites.

    Returns:
        None if the run predicts no diseases.
    """
    scores = {}
    for condition in CONDITIONS:
        by_disease = result.mean.get(condition, {}).get("by_output")
        if by_disease:
            scores[condition] = by_disease
    diseases = list(dict.fromkeys(d for table in scores.values() for d in table))
    if not diseases:
        return None

    sites = max(table[d]["sites"] for table in scores.values() for d in table)
    means = "its classes" if sites == 1 else f"its classes and {sites} sites"
    table = make_compact_sheet(
        "disease", left=1, title=f"each disease, mean over {means} (test, %)"
    )
    names = [head for _, head in _DISEASE_MEASURES]
    heads = _join_cells(names, names)
    for condition in scores:
        table.add_column(f"{condition:^{len(heads)}}\n{heads}", no_wrap=True)
    for disease in diseases:
        cells = (
            _format_averages([by_disease.get(disease, {})])
            for by_disease in scores.values()
        )
        table.add_row(_make_name_cell(disease), *cells)
    table.add_section()
    averages = (
        _format_averages(list(by_disease.values())) for by_disease in scores.values()
    )
    table.add_row("average", *averages, style="bold")
    return table


def _format_averages(scores: list[Mapping[str, Any]]) -> str:
    """Return the mean of each measure over the diseases that have it, side by side."""
    numbers = []
    for key, _ in _DISEASE_MEASURES:
        values = [each[key] for each in scores if each.get(key) is not None]
        numbers.append(format_number(fmean(values) if values else None))
    return _join_cells(numbers, [head for _, head in _DISEASE_MEASURES])


def _join_heads(columns: Sequence[Column]) -> str:
    """Return the headings of columns that share a cell."""
    heads = [column.head for column in columns]
    return _join_cells(heads, heads)


def _join_cells(cells: Sequence[str], heads: Sequence[str]) -> str:
    """Return short texts as one cell; each is as wide as its heading or as 100.0."""
    pairs = zip(cells, heads, strict=True)
    return " ".join(f"{cell:>{max(5, len(head))}}" for cell, head in pairs)


def make_evaluation_table(scores: Mapping[str, Any]) -> Table:
    """Return the scores of a model, by disease or by entity type."""
    if "by_output" in scores:
        return _make_patient_score_table(scores)
    return _make_mention_score_table(scores)


def _make_mention_score_table(scores: Mapping[str, Any]) -> Table:
    """Return precision, recall and F1 in percent, by type and for all types."""
    kinds = ["strict", "relaxed"]
    rows: dict[str, Any] = dict(scores["by_type"])
    if any(map(overlap_differs, [scores, *rows.values()])):
        kinds.append("relaxed_one_to_one")
    table = make_compact_sheet("type", "mentions")
    for kind in kinds:
        layout = SCORES[kind]
        heads = _join_heads(layout.columns)
        heading = layout.heading
        table.add_column(
            f"{heading:^{len(heads)}}\n{heads}", justify="right", no_wrap=True
        )
    for label, score in rows.items():
        cells = (_format_measures(score, kind) for kind in kinds)
        table.add_row(Text(label), str(score["support"]), *cells)
    table.add_section()
    support = sum(score["support"] for score in rows.values())
    cells = (_format_measures(scores, kind) for kind in kinds)
    table.add_row("all", str(support), *cells, style="bold")
    table.caption = ONE_TO_ONE if "relaxed_one_to_one" in kinds else None
    return table


def make_reliability_table(title: str, reliability: Reliability) -> Table:
    """Return confidences by bin: their number, mean, and share that is right."""
    heads = ("mentions", "mean confidence", "right, %")
    table = make_sheet(
        "confidence", *heads, title=f"{title}: ECE {reliability.ece:.3f}"
    )
    for row in reliability.bins:
        numbers = (f"{row.spans:,}", f"{row.confidence:.3f}", format_number(row.right))
        table.add_row(f"{row.low:.2f}–{row.high:.2f}", *numbers)
    table.caption = (
        f"{reliability.spans:,} mentions in {reliability.documents:,} notes, log loss "
        f"{reliability.log_loss:.3f}"
    )
    return table


def _make_patient_score_table(scores: Mapping[str, Any]) -> Table:
    """Return the scores of each disease and their average.

    All scores are in percent. Precision, recall and F1 are means over a disease's
    classes.
    """

    def format_cells(macro: Mapping[str, Any], area: Mapping[str, Any]) -> list[str]:
        """Return P, R, F1, AUROC and the interval of AUROC."""
        bounds = ""
        if area["low"] is not None:
            bounds = f"{format_number(area['low'])}–{format_number(area['high'])}"
        numbers = [format_number(macro[key]) for key in ("precision", "recall", "f1")]
        return [*numbers, format_number(area["value"]), bounds]

    table = make_sheet(
        "phenotype", "present", "absent", "P", "R", "F1", "AUROC", "95 %"
    )
    for name, score in scores["by_output"].items():
        numbers = [
            str(score.get(kind, {}).get("support", 0)) for kind in ("present", "absent")
        ]
        table.add_row(
            Text(name), *numbers, *format_cells(score["macro"], score["auroc"])
        )
    table.add_section()
    average = format_cells(scores["macro"], scores["ranking"]["auroc"])
    table.add_row("average", "", "", *average, style="bold")
    return table


def make_comparison_table(comparison: Comparison) -> Table:
    """Return the table that `fednotes compare` prints, in percent."""
    sides = (comparison.condition, comparison.against)
    gaps = comparison.gaps if any(comparison.gaps.values()) else {}
    table = make_compact_sheet("site", title=escape(comparison.title))
    for place, side in enumerate(sides):
        heads = _join_cells(_PRF, _PRF) if comparison.scores else ""
        lines = [*comparison.runs[place : place + 1], side]
        width = max(map(len, (*lines, heads)))
        centred = [f"{line:^{width}}" for line in lines]
        table.add_column(
            Text("\n".join([*centred, heads])), justify="right", no_wrap=True
        )
    for head in ("differ-\nence", "95 %", "p", *(["gap\nclosed"] if gaps else [])):
        table.add_column(head, justify="right", no_wrap=True)
    table.caption = escape("\n".join(comparison.remarks())) or None
    for site, test in comparison.tests.items():
        if comparison.scores:
            pair = (
                _format_precision_recall_f1(side) for side in comparison.scores[site]
            )
        else:
            pair = (format_number(value) for value in (test.f1_a, test.f1_b))
        table.add_row(
            Text(site),
            *pair,
            f"{100 * test.difference:+.1f}",
            f"{100 * test.low:+.1f} to {100 * test.high:+.1f}",
            f"{test.p_value:.4f}",
            *([format_gap(gaps.get(site))] if gaps else []),
        )
    return table


def _format_precision_recall_f1(scores: Mapping[str, float]) -> str:
    """Return precision, recall and F1 in percent, side by side."""
    numbers = [format_number(scores[name]) for name in ("precision", "recall", "f1")]
    return _join_cells(numbers, _PRF)


def make_audit_table(audit: Audit) -> Table:
    """Return the table that `fednotes audit` prints, in percent."""
    title = f"{escape(audit.title)}: what leaves {escape(audit.site)}"
    table = make_sheet("attack", "success", "control", "chance", title=title)
    table.add_column("defence, or why it does not apply")
    for leak in audit.attacks:
        not_applicable = leak.why
        defence = leak.closes
        remark = not_applicable or defence
        if leak.success is not None and not leak.proven:
            remark = UNPROVEN
        cells = ["–", "–", "–"]
        if leak.success is not None and leak.low is not None and leak.high is not None:
            success = format_number(leak.success)
            if leak.low < leak.high:
                success += f"\n{format_number(leak.low)} to {format_number(leak.high)}"
            cells = [success, format_number(leak.control), format_number(leak.chance)]
        table.add_row(Text(leak.attack), *cells, Text(remark))
    table.caption = (
        "in percent, with 95 % intervals; success: share of the items in the notes "
        "that the attack identifies, at a false-alarm rate of 1 %"
    )
    return table


class WorkBar:
    """Shows what is done, how much of it, at which rate and for how long.

    Args:
        console: Where to print; nothing if this is no terminal.
        name: What is done first.
    """

    def __init__(self, console: Console, name: str) -> None:
        self._bar = Progress(
            TextColumn("{task.description:<22}", style="bold", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[count]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            disable=not console.is_terminal,
            transient=True,
            # Results go through stdout, perhaps into a file, while the bar is shown.
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._name = name
        self._task = self._bar.add_task(name, total=None, count="")
        self._depth = 0  # of the newest work within other work

    def begin(self, name: str, total: int | None) -> None:
        """Show work, unless it is a part of other work."""
        self._depth += 1
        if self._depth == 1:
            self._restart_bar(name, total)

    def advance(self, done: int) -> None:
        """Show how many items are done, and how many in a second."""
        # Work within other work has counts of its own, which are not shown.
        if self._depth == 1:
            rate = _format_rate(self._bar.tasks[0])
            self._bar.update(self._task, completed=done, count=f"{done:,}  {rate}")

    def end(self) -> None:
        """Show the first name again when the work has ended."""
        self._depth -= 1
        if self._depth == 0:
            self._restart_bar(self._name, None)

    def _restart_bar(self, name: str, total: int | None) -> None:
        """Show new work at zero items."""
        self._bar.reset(self._task, description=name, total=total, count="")

    def __enter__(self) -> WorkBar:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()


def _format_rate(task: Task) -> str:
    """Return how many items a second are done; "" while it is not known."""
    return f"{task.speed:,.0f}/s" if task.speed else ""


class RunsBar:
    """Shows how many of several runs are done; call it after each run.

    If the output is not a terminal, it prints a line for each run instead.

    Args:
        console: Where to print.
        name: What the runs are for.
        bar: The bar.
    """

    def __init__(self, console: Console, name: str, bar: Progress) -> None:
        self._console = console
        self._name = name
        self._bar = bar
        self._planning: TaskID | None = None
        self._task = bar.add_task(name, total=None, line="")

    def show_planning(self, run: str, done: int, total: int) -> None:
        """Show which run is being planned; none if `done` equals `total`."""
        if self._planning is None:
            if not self._console.is_terminal:
                self._print(f"{self._name}: planning the runs")
            self._bar.update(self._task, visible=False)
            self._planning = self._bar.add_task("planning", total=total, line=run)
        self._bar.update(self._planning, completed=done, line=run)
        if done == total:
            self._bar.update(self._planning, visible=False)
            self._bar.reset(self._task, visible=True)

    def __call__(self, run: str, done: int, total: int) -> None:
        """Show that a run has ended."""
        self._bar.update(self._task, completed=done, total=total, line=run)
        if not self._console.is_terminal:
            self._print(f"{self._name}: {done}/{total} {run}")

    def _print(self, line: str) -> None:
        """Print a line as it is."""
        self._console.print(line, highlight=False, markup=False)

    def confirm(self, line: str) -> None:  # noqa: ARG002 - printed before
        """Ask a person whether to continue.

        Raises:
            typer.Abort: The answer is no.
        """
        with pausing(self._bar):
            typer.confirm("Continue?", abort=True)


@contextmanager
def showing_runs(console: Console, name: str) -> Iterator[RunsBar]:
    """Show a bar over several runs within the context; yield it."""
    with _make_bar(console, TimeRemainingColumn(compact=True)) as bar:
        yield RunsBar(console, name, bar)


@contextmanager
def pausing(bar: Progress | None) -> Iterator[None]:
    """Stop a bar within the context, so that a person can be asked a question."""
    if bar is None:
        yield
        return
    bar.stop()
    yield
    bar.start()


def _make_bar(
    console: Console, time_left: ProgressColumn, *, transient: bool = False
) -> Progress:
    """Return a bar with a description, a count, a free text and the time left.

    It shows nothing if the output is not a terminal. Names of jobs and sites may
    contain square brackets, so no column interprets markup.
    """
    return Progress(
        TextColumn("{task.description:<22}", style="bold", markup=False),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[line]}", markup=False),
        time_left,
        console=console,
        disable=not console.is_terminal,
        transient=transient,
    )


def make_stats_tables(stats: Mapping[str, Any]) -> list[Table]:
    """Return tables of each site's counts, and of surface forms that sites share.

    This is Table 1 of Ge et al. 2020.
    """
    table = make_sheet(
        "site",
        "documents",
        "sentences",
        "tokens",
        "entities",
        "forms",
        title="corpora",
    )
    table.add_column("types")
    for site in stats["sites"]:
        numbers = ("documents", "sentences", "tokens", "mentions", "forms")
        types = ", ".join(
            f"{label} {count:,}" for label, count in site["entities"].items()
        )
        table.add_row(
            Text(site["site"]), *(f"{site[n]:,}" for n in numbers), Text(types)
        )
    if len(stats["sites"]) == 1:
        return [table]
    title = f"overlapping entities: {stats['overlapping']:,} forms at two sites or more"
    shared = make_sheet(
        "forms in common", *(Text(site["site"]) for site in stats["sites"]), title=title
    )
    for site, row in zip(stats["sites"], stats["pairwise"], strict=True):
        shared.add_row(Text(site["site"]), *(f"{n:,}" for n in row))
    return [table, shared]


def make_facts_tables(facts: Facts) -> list[Table]:
    """Return tables of what `fednotes init` counted: the sites and their types."""
    tables = [_make_sites_table(facts)]
    annotated = [site for site in facts.sites if site.types]
    if annotated:
        counts = {site.name: site.types for site in annotated}
        tables.append(_make_types_table("entity type", counts, "mentions of each type"))
    labelled = {
        site.name: site.labels.counts for site in facts.sites if site.labels is not None
    }
    if labelled:
        tables.append(_make_types_table("label", labelled, "labelled patients"))
    return tables


def _make_sites_table(facts: Facts) -> Table:
    """Return the size of each site's notes."""
    table = make_compact_sheet(
        "site",
        "format",
        "notes",
        "patients",
        "words\na note",
        "characters\na note",
        "mentions",
        "over-\nlapping",
        left=2,
        title="notes of each site",
    )
    for site in facts.sites:
        overlapping = "–"
        if site.mentions:
            overlapping = f"{100 * site.overlapping / site.mentions:.1f} %"
        table.add_row(
            _make_name_cell(clean(site.name, NAME)),
            _make_name_cell(clean(site.format, NAME)),
            f"{site.notes:,}",
            f"{site.patients:,}" if site.patients else "–",
            f"{site.words.median:,}",
            f"{site.characters.median:,}",
            f"{site.mentions:,}" if site.mentions else "–",
            overlapping,
        )
    encodings = sorted({name for site in facts.sites for name in site.encodings})
    lines = ["lengths are medians"]
    if encodings:
        lines.append(f"encoding: {', '.join(encodings)}")
    table.caption = escape("; ".join(lines))
    return table


def _make_types_table(
    head: str, sites: Mapping[str, Mapping[str, int]], title: str
) -> Table:
    """Return the counts of each name, by site if there are few sites.

    Args:
        head: Heading of the names.
        sites: Counts by name, for each site.
        title: Title of the table.
    """
    totals: Counter[str] = Counter()
    for counts in sites.values():
        totals.update(counts)
    is_by_site = len(sites) <= _SITE_COLUMNS
    heads: list[str | Text] = ["in all"]
    if is_by_site:
        heads = [Text(name) for name in sites]
    if len(sites) > 1:
        heads.append("sites")
    table = make_compact_sheet(head, *heads, title=title)
    number_of_sites = Counter(label for counts in sites.values() for label in counts)
    # The table may be cut, and types that a site lacks decide the method.
    ordered = sorted(
        totals,
        key=lambda each: (number_of_sites[each] == len(sites), -totals[each]),
    )
    for label in ordered[:_LISTED_TYPES]:
        numbers = [totals[label]]
        if is_by_site:
            numbers = [counts.get(label, 0) for counts in sites.values()]
        cells = [f"{count:,}" if count else "–" for count in numbers]
        if len(sites) > 1:
            cells.append(f"{number_of_sites[label]} of {len(sites)}")
        table.add_row(_make_name_cell(clean(label, NAME)), *cells)
    unlisted = len(ordered) - _LISTED_TYPES
    if unlisted > 0:
        table.caption = f"and {unlisted:,} more"
    return table


def make_decisions_table(proposal: Proposal) -> Table:
    """Return a table of what `fednotes init` decided, with the reasons."""
    table = make_compact_sheet("", "proposal", "reason", left=3, title="first job")
    method, model = proposal.method, proposal.model
    table.add_row("method", method.value, method.reason)
    name = "light tagger" if proposal.is_light else clean(model.value, NAME)
    table.add_row("model", Text(name, overflow="fold"), model.reason)
    if proposal.silos is not None:
        table.add_row(
            "sites",
            f"{proposal.silos.number} simulated",
            "There is only one corpus, so its notes are dealt at random by "
            f"{proposal.silos.by}. For real sites, name a folder for each.",
        )
    for each in proposal.label_maps:
        old = clean(each.old, NAME)
        reason = f"{each.site}: {old} {clean_to_one_line(each.reason)}."
        action = "rename"
        if not each.is_active:
            action = "keep"
            reason += " The job has the renaming as a comment."
        table.add_row("label", Text(f"{action} {old}"), Text(reason))
    return table


def list_findings(findings: Sequence[Finding]) -> list[Text]:
    """Return a line for each finding of `fednotes check`, errors first.

    Of many findings of one kind, such as that of each part of each site, the first one
    stands for all.
    """
    styles = {"error": "bold red", "warning": "yellow", "info": "dim"}
    groups: dict[tuple[str, str], list[Finding]] = {}
    for level in styles:
        for finding in findings:
            if finding.level == level:
                groups.setdefault((level, finding.code), []).append(finding)
    lines = []
    for (level, _), group in groups.items():
        is_short = level == "error" or len(group) <= _LIKE_FINDINGS
        shown = group if is_short else group[:1]
        for finding in shown:
            message = f"{finding.where}: {finding.message} [{finding.code}]"
            text = clean_message(message)
            lines.append(Text.assemble((level, styles[level]), "  ", text))
        unshown = group[len(shown) :]
        if unshown:
            places = list_names(
                [clean_to_one_line(each.where, NAME) for each in unshown]
            )
            lines.append(Text(f"{' ' * len(level)}  the same kind: {places}"))
    return lines


def describe_run_time(seconds: Mapping[str, float]) -> list[str]:
    """Return lines about how long a simulation takes.

    Args:
        seconds: The estimated seconds of each condition in one process.
    """
    total = sum(seconds.values())
    lines = [
        f"estimated time: {format_rough_duration(total)} on one core, less if others "
        "are free"
    ]
    federated = seconds.get("federated", 0.0)
    if total > _LONG_RUN_SECONDS and 0 < federated < total:
        lines += [
            f"the federated model needs {format_rough_duration(federated)} of it; to "
            "train only this one, add",
            "  --set 'conditions=[\"federated\"]'",
            "the same command with --resume instead trains the others later",
        ]
    return lines


def make_count_tables(counts: Sequence[CountTable]) -> list[Table]:
    """Return tables of counts about a job's sites."""
    tables = []
    for each in counts:
        table = make_compact_sheet(*each.heads, left=each.words, title=each.title)
        for row in each.rows:
            table.add_row(*map(Text, row))
        tables.append(table)
    return tables
