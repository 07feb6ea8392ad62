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
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from fednotes.cli.time_left import TimeLeft
from fednotes.core.parsing import number
from fednotes.engines.rounds import RoundResult
from fednotes.jobs.results import (
    BASELINES,
    CONDITIONS,
    SCORES,
    RunResult,
    duration,
    size,
)
from fednotes.jobs.simulate import LARGE, LONG, Display, Part, Traffic, site_metrics
from fednotes.metrics.gap import ALPHA, Gap
from fednotes.metrics.spans import OVERLAP_POINTS, overlap_differs

if TYPE_CHECKING:
    from fednotes.data.checks import Finding
    from fednotes.jobs.compare import Comparison
    from fednotes.jobs.job import CountTable
    from fednotes.jobs.results import Audit
    from fednotes.jobs.seeds import SeedsResult
    from fednotes.metrics.calibration import Reliability

SHORT = 60.0  # seconds that are not worth a line
# of several seeds, so that 80 columns are enough
_ONLY_F1 = ("relaxed", "relaxed_one_to_one")
UNPAIRED = (
    "without p: an unpaired interval, because the two models were not compared on the same test "
    "documents here"
)
OWN_MIX_WORDS = "the mix of two own models"
ONE_TO_ONE = (
    "any overlap: a mention is right if it touches one of the same type, so that one long mention "
    "can match several; one to one: each mention is in one pair at most"
)
LISTED_SITES = 10  # a progress line has the score of each of so many sites
UNPROVEN = "says nothing: the attack fails without defence too"
# the first there is
_SHOWN = (("F1", "f1"), ("held-out loss", "valid_loss"), ("loss", "loss"))
_OF_A_DISEASE = (("precision", "P"), ("recall", "R"), ("f1", "F1"), ("auroc", "AUROC"))


class RichDisplay(Display):
    """A progress bar for each part; a line for each evaluation where there is no
    terminal.

    ask: whether a person is asked about what takes very long or sends very much.
    """

    def __init__(self, console: Console, ask: bool = False) -> None:
        self.console, self._ask = console, ask
        self._bar: Progress | None = None
        self._time = TimeLeft()
        self._told = False  # whether the time of the run was said once
        self._warned: set[str] = set()

    def cost(self, traffic: Traffic) -> None:
        """Raises typer.Abort where a person does not want it."""
        self._tell_cost(str(traffic), traffic.up + traffic.down > LARGE)

    def plan(self, work: Mapping[str, float]) -> None:
        self._time.plan(work)

    def begin(self, part: Part, rounds: int, sentences: int) -> None:
        self._close()
        self._part, self._rounds, self._sentences = part, rounds, sentences
        self._first: RoundResult | None = None
        self._time.begin(part.name, rounds)
        self._scores = ""
        self._begin(part.name, rounds or None)

    def round(self, result: RoundResult) -> None:
        assert self._bar is not None
        if result.evaluated:
            found = site_metrics(result, self._part)
            name, key = next(
                ((n, k) for n, k in _SHOWN if any(k in m for m in found.values())),
                ("", ""),
            )
            scores = {site: m[key] for site, m in found.items() if key in m}
            self._scores = f"{name} {site_scores_text(scores)}"
            # between real sites: over all of them
            if not found and "valid_f1" in result.metrics:
                self._scores = f"F1 {result.metrics['valid_f1']:.3f}"
        self._first = self._first or result
        rounds, seconds = (
            result.round - self._first.round,
            result.seconds - self._first.seconds,
        )
        pace = rounds * self._sentences / seconds if seconds > 0 else 0.0
        rate = f"{pace:.0f} {self._part.unit}/s  " if self._sentences else ""
        done = f"loss {result.metrics.get('loss', 0):.3f}  {self._scores}"
        if self._part.promised:  # no loss leaves a site
            epsilon = result.metrics.get("epsilon")
            done = "" if epsilon is None else f"ε {epsilon:.2f}"
        line = f"{done}  {rate}↑{size(result.bytes_up)} ↓{size(result.bytes_down)}"
        self._time.round(result)
        left = self._time.seconds()
        more = f"  {self._left_text(left)}" if left else ""
        self._bar.update(
            self._task, completed=result.round + 1, line=line, left=more.strip()
        )
        if result.evaluated and not self.console.is_terminal:
            self.console.print(
                f"{self._part.name}: round {result.round + 1}/{self._rounds or '?'}  {line}{more}",
                highlight=False,
                soft_wrap=True,
            )
        if left is not None and not self._told:
            self._told = True
            if left > SHORT:
                self._tell_cost(f"the whole run: {self._left_text(left)}", left > LONG)

    def _left_text(self, seconds: float) -> str:
        """Return how long the whole run still takes."""
        if self._time.stops_early:
            return f"about {duration(seconds)} left"
        return f"{duration(seconds)} left at most"

    def _tell_cost(self, line: str, much: bool) -> None:
        """A line of what a run costs; where that is much, a person is asked."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        if much and self._ask:
            with paused(self._bar):
                typer.confirm("Go on?", abort=True)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=self._rounds or None)
        self._time.end()
        self._close()

    def features(self, done: int, total: int) -> None:
        bar = self._bar or self._begin("features of notes", total)
        bar.update(self._task, completed=done, total=total)
        if done >= total:
            self._close()

    def seed(self, seed: int, place: int, total: int) -> None:
        self._close()
        self._time, self._told = TimeLeft(), False
        self.console.print(f"seed {seed} ({place} of {total})", highlight=False)

    def warn(self, text: str) -> None:
        if text in self._warned:  # of several seeds each run has the same
            return
        self._warned.add(text)
        self.console.print(f"[yellow]warning:[/yellow] {escape(text)}", soft_wrap=True)

    def __enter__(self) -> RichDisplay:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()  # an error must not leave the terminal without its cursor

    def _begin(self, name: str, total: int | None) -> Progress:
        self._bar = _bar(self.console, TextColumn("{task.fields[left]}"))
        self._task = self._bar.add_task(name, total=total, line="", left="")
        self._bar.start()
        return self._bar

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def site_scores_text(scores: Mapping[str, float]) -> str:
    """Return every site's score; of more than ten sites the mean, the lowest and the
    highest."""
    if len(scores) <= LISTED_SITES:
        return " ".join(f"{site} {score:.3f}" for site, score in scores.items())
    lowest, highest = (
        min(scores, key=scores.__getitem__),
        max(scores, key=scores.__getitem__),
    )
    return (
        f"mean of {len(scores):,} sites {fmean(scores.values()):.3f}, "
        f"lowest {scores[lowest]:.3f} ({lowest}), highest {scores[highest]:.3f} ({highest})"
    )


def sheet(*heads: str | Text, left: int = 1, **options: Any) -> Table:
    """An empty table. left: so many of the first columns hold words, the others
    numbers."""
    table = Table(**options)
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place < left else "right")
    return table


def compact_sheet(*heads: str, left: int = 1, title: str = "") -> Table:
    """Return an empty table that is narrow enough for 80 columns; see `sheet`."""
    options: dict[str, Any] = {
        "box": box.SIMPLE_HEAD,
        "padding": (0, 1, 0, 0),
        "pad_edge": False,
    }
    return sheet(*heads, left=left, title=title, **options)


def result_tables(result: RunResult) -> list[Table]:
    """What is shown of a run, as far as it was judged."""
    first = result_table(result) if any(result.mean.values()) else None
    verdicts = (verdict_table(result, against) for against in BASELINES)
    return [t for t in (first, disease_table(result), *verdicts) if t is not None]


def result_table(result: RunResult) -> Table:
    """Return a row for each site and condition: scores on test data, or on held-out
    words."""
    mean = result.mean
    conditions = [c for c in CONDITIONS if c in mean]
    kinds = _shown_kinds(result, conditions)
    first = kinds[0] if kinds else "masked"
    what = {
        "masked": "masked words of held-out notes",
        "codes": "codes of test patients",
    }
    title = f"{escape(result.title)} ({what.get(first, 'test scores in %')}, seed {result.seed})"
    table = compact_sheet("site", "trained", left=2, title=title)
    for kind in kinds:
        heads = _side_by_side([column[1] for column in SCORES[kind]["columns"]])
        heading = str(SCORES[kind]["heading"])
        table.add_column(
            f"{heading:^{len(heads)}}\n{heads}", justify="right", no_wrap=True
        )

    def add(name: str, scores: Mapping[str, Any], style: str = "") -> None:
        trained = [c for c in conditions if c in scores]
        for place, condition in enumerate(trained):
            label = condition + " *" * (condition in result.marks)
            cells = (_measures(scores[condition], kind) for kind in kinds)
            # In a narrow terminal a name is cut, not a number.
            shown = Text("" if place else name, no_wrap=True, overflow="ellipsis")
            table.add_row(shown, label, *cells, style=style)
        table.add_section()

    hidden = 0
    for site, scores in result.sites.items():
        if first == "phenotypes" and not any(
            first in scores.get(c, {}) for c in conditions
        ):
            hidden += 1
        else:
            add(site, scores)
    add("mean", mean, "bold")
    told = [f"* {escape(result.marks[c])}" for c in conditions if c in result.marks]
    told += [f"{hidden} more sites have no labelled test patient"] if hidden else []
    told += [ONE_TO_ONE] if "relaxed_one_to_one" in kinds else []
    table.caption = "\n".join(told) or None
    return table


def _shown_kinds(result: RunResult, conditions: Sequence[str]) -> list[str]:
    """Return the kinds of scores that a run's table shows."""
    mean = result.mean
    kinds = [
        kind
        for kind, of in SCORES.items()
        if "columns" in of
        and kind != "codes"
        and all(kind in mean[c] for c in conditions)
    ]
    every = (s for site in result.sites.values() for s in site.values())
    if "relaxed_one_to_one" in kinds and not any(map(overlap_differs, every)):
        kinds.remove("relaxed_one_to_one")
    if not kinds and any("codes" in mean[c] for c in conditions):
        kinds = ["codes"]
    return kinds


def _measures(scores: Mapping[str, Any], kind: str) -> str:
    """Return the measures of one kind of score, side by side."""
    return _side_by_side(
        [
            number_of(number(scores, kind, measure), factor, digits)
            for measure, _, factor, digits in SCORES[kind]["columns"]
        ]
    )


def seeds_tables(result: SeedsResult) -> list[Table]:
    """Return what is shown of several seeds: means ± deviations, then the paired tests."""
    return [seeds_table(result), *filter(None, (seeds_test_table(result),))]


def seeds_table(result: SeedsResult) -> Table:
    """Return mean ± standard deviation over the seeds, for each site and condition."""
    conditions = [c for c in CONDITIONS if c in result.mean]
    kinds = _shown_kinds(_means_of(result), conditions)
    columns = [
        (kind, *column)
        for kind in kinds
        for column in SCORES[kind]["columns"]
        if kind not in _ONLY_F1 or column[0] == "f1"
    ]
    seeds = len(result.seeds)
    title = f"{escape(result.title)} (test scores, mean ± SD of {seeds} seeds)"
    table = compact_sheet("site", "trained", left=2, title=title)
    for place, (kind, _, head, *_) in enumerate(columns):
        new = not place or columns[place - 1][0] != kind
        heading = str(SCORES[kind]["heading"]) if new else ""
        table.add_column(f"{heading}\n{head}", justify="right", no_wrap=True)
    for site, scores in [*result.sites.items(), ("mean", result.mean)]:
        trained = [c for c in conditions if c in scores]
        for place, condition in enumerate(trained):
            cells = (_mean_and_sd(scores[condition], column) for column in columns)
            label = condition + " *" * (condition in result.marks)
            shown = Text("" if place else site, no_wrap=True, overflow="ellipsis")
            table.add_row(shown, label, *cells, style="bold" if site == "mean" else "")
        table.add_section()
    told = [f"* {escape(result.marks[c])}" for c in conditions if c in result.marks]
    told += [ONE_TO_ONE] if "relaxed_one_to_one" in kinds else []
    table.caption = "\n".join(told) or None
    return table


def _mean_and_sd(scores: Mapping[str, Any], column: Sequence[Any]) -> str:
    kind, measure, _, factor, digits = column
    mean, std = (number(scores, kind, measure, name) for name in ("mean", "std"))
    text = number_of(mean, factor, digits)
    return text if std is None else f"{text} ± {number_of(std, factor, digits)}"


def _means_of(result: SeedsResult) -> RunResult:
    """Return the means over the seeds as a run's scores."""

    def means(scores: Mapping[str, Any]) -> dict[str, Any]:
        return {
            kind: {
                measure: value.get("mean")
                for measure, value in of.items()
                if isinstance(value, Mapping)
            }
            for kind, of in scores.items()
            if kind in SCORES and isinstance(of, Mapping)
        }

    return RunResult(
        sites={
            s: {c: means(of) for c, of in own.items()}
            for s, own in result.sites.items()
        },
        mean={c: means(of) for c, of in result.mean.items()},
    )


def seeds_test_table(result: SeedsResult) -> Table | None:
    """Return the paired tests over the seeds; None without any."""
    if not result.differences:
        return None
    nats = result.holds == "notes"
    unit = "nats of held-out loss" if nats else "points of F1"
    title = f"federated − another condition, {unit}, paired t test over seeds"
    table = compact_sheet(
        "site", "against", "gain", "95 %", "p", "seeds", left=2, title=title
    )
    for test in result.differences:
        values = (test.mean, test.low, test.high)
        gain, low, high = (f"{x:+.3f}" if nats else f"{100 * x:+.1f}" for x in values)
        cells = (gain, f"{low} to {high}", f"{test.p_value:.4f}", str(test.n))
        table.add_row(Text(test.site or "mean"), test.against, *cells)
    return table


def verdict_table(result: RunResult, against: str = "alone") -> Table | None:
    """Return for each site what the federation gave and took, and which model it should
    use.

    None where no site has both a federated model and that of the other condition.
    """
    whole, nats = result.verdict(against=against), result.holds == "notes"
    if whole is None:
        return None
    unit = "nats of held-out loss" if nats else "points of F1"
    other = "each site alone" if against == "alone" else OWN_MIX_WORDS
    heads = ("gain", "95 %", "p", "gap\nclosed")
    table = compact_sheet("site", *heads, title=f"federated against {other}, {unit}")
    table.add_column("use")
    verdicts = ((site, result.verdict(site, against)) for site in result.sites)
    rows = [(site, found) for site, found in verdicts if found is not None]
    for site, of in [*rows, ("mean", whole)]:
        gain, low, high = (f"{x:+.3f}" if nats else f"{100 * x:+.1f}" for x in of[:3])
        p_value = "–" if of.p_value is None else f"{of.p_value:.4f}"
        cells = (gain, f"{low} to {high}", p_value, gap_of(of.gap), of.use)
        table.add_row(Text(site), *cells)
    told = (
        [f"cost of the federation at a site: {result.cost}"]
        if against == "alone"
        else []
    )
    told += [] if all(of.paired for _, of in rows) else [UNPAIRED]
    told += [f"gap closed: {whole.gap.why}"] if whole.gap and whole.gap.why else []
    table.caption = "\n".join(told) or None
    return table


def gap_of(gap: Gap | None) -> str:
    """The share of pooled - alone that is closed, a dash where there is none."""
    return "–" if gap is None or gap.closed is None else f"{gap.closed:.2f}"


def nothing_judged(result: RunResult) -> str:
    """What a run lacks whose models were never judged, so that there is no table; else
    ""."""
    return "" if any(result.mean.values()) else str(result.words["unjudged"])


def number_of(value: float | None, factor: float = 100, digits: int = 1) -> str:
    """A number for a table, a dash where it does not exist."""
    return "–" if value is None else f"{factor * value:.{digits}f}"


def disease_table(result: RunResult) -> Table | None:
    """Table 3 of Liu, Dligach and Miller 2019: every disease, and the average of all,
    in percent.

    Of each disease the mean over its classes, then over the sites. None where a run
    judges no diseases.
    """
    found = {
        c: of for c in CONDITIONS if (of := result.mean.get(c, {}).get("by_output"))
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
        table.add_row(
            label, *(_averages([each.get(name, {})]) for each in found.values())
        )
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


def _side_by_side(cells: Sequence[str]) -> str:
    """Return short numbers or heads as one cell, each with room for 100.0."""
    return f"{cells[0]:>5}" + "".join(f"{cell:>6}" for cell in cells[1:])


def score_table(scores: Mapping[str, Any]) -> Table:
    """Return precision, recall and F1 in percent, all types together and one by one."""
    kinds = ["strict", "relaxed"]
    rows: dict[str, Any] = dict(scores["by_type"])
    if any(map(overlap_differs, [scores, *rows.values()])):
        kinds.append("relaxed_one_to_one")
    table = compact_sheet("type", "mentions")
    for kind in kinds:
        heads = _side_by_side([column[1] for column in SCORES[kind]["columns"]])
        heading = str(SCORES[kind]["heading"])
        table.add_column(
            f"{heading:^{len(heads)}}\n{heads}", justify="right", no_wrap=True
        )
    for label, score in rows.items():
        cells = (_measures(score, kind) for kind in kinds)
        table.add_row(Text(label), str(score["support"]), *cells)
    table.add_section()
    support = sum(score["support"] for score in rows.values())
    cells = (_measures(scores, kind) for kind in kinds)
    table.add_row("all", str(support), *cells, style="bold")
    table.caption = ONE_TO_ONE if "relaxed_one_to_one" in kinds else None
    return table


def reliability_table(title: str, found: Reliability) -> Table:
    """Confidences by bins: how many there are, their mean, and how many are right."""
    heads = ("spans", "mean confidence", "right, %")
    table = sheet("confidence", *heads, title=f"{title}: ECE {found.ece:.3f}")
    for row in found.bins:
        numbers = f"{row.spans:,}", f"{row.confidence:.3f}", number_of(row.right)
        table.add_row(f"{row.low:.2f}–{row.high:.2f}", *numbers)
    table.caption = f"{found.spans:,} spans of {found.documents:,} notes, log loss {found.log_loss:.3f}"
    return table


def patient_score_table(scores: Mapping[str, Any]) -> Table:
    """Each disease: its patients, the mean over its classes in percent, AUROC; then the
    average."""

    def shares(macro: Mapping[str, Any], area: Mapping[str, Any]) -> list[str]:
        known = area["low"] is not None
        bounds = f"{area['low']:.2f}–{area['high']:.2f}" if known else ""
        numbers = [number_of(macro[key]) for key in ("precision", "recall", "f1")]
        return [*numbers, number_of(area["value"], 1, 3), bounds]

    table = sheet("phenotype", "present", "absent", "P", "R", "F1", "AUROC", "95 %")
    for name, score in scores["by_output"].items():
        numbers = [
            str(score.get(kind, {}).get("support", 0)) for kind in ("present", "absent")
        ]
        table.add_row(Text(name), *numbers, *shares(score["macro"], score["auroc"]))
    table.add_section()
    average = shares(scores["macro"], scores["ranking"]["auroc"])
    table.add_row("average", "", "", *average, style="bold")
    return table


def comparison_table(found: Comparison) -> Table:
    """Return what `fednotes compare` prints, in percent."""
    sides = (found.condition, found.against)
    names = list(sides)
    if found.runs:
        pairs = zip(sides, found.runs, strict=True)
        names = [f"{side} of {run}" for side, run in pairs]
    title = f"{found.kind}: {' minus '.join(names)}, {found.samples:,} resamples"
    gaps = found.gaps if any(found.gaps.values()) else {}
    table = compact_sheet("site", title=escape(title))
    for place, side in enumerate(sides):
        heads = _side_by_side(["P", "R", "F1"]) if found.scores else ""
        lines = [*found.runs[place : place + 1], side]
        width = max(map(len, (*lines, heads)))
        centred = [f"{line:^{width}}" for line in lines]
        table.add_column(
            Text("\n".join([*centred, heads])), justify="right", no_wrap=True
        )
    for head in ("differ-\nence", "95 %", "p", *(["gap\nclosed"] if gaps else [])):
        table.add_column(head, justify="right", no_wrap=True)
    table.caption = "\n".join(_comparison_notes(found)) or None
    for site, test in found.tests.items():
        if found.scores:
            pair = (_precision_recall_f1(side) for side in found.scores[site])
        else:
            pair = (number_of(value) for value in (test.f1_a, test.f1_b))
        table.add_row(
            Text(site),
            *pair,
            f"{100 * test.difference:+.1f}",
            f"{100 * test.low:+.1f} to {100 * test.high:+.1f}",
            f"{test.p_value:.4f}",
            *([gap_of(gaps.get(site))] if gaps else []),
        )
    return table


def _precision_recall_f1(scores: Mapping[str, float]) -> str:
    return _side_by_side(
        [number_of(scores[name]) for name in ("precision", "recall", "f1")]
    )


def _comparison_notes(found: Comparison) -> Iterator[str]:
    """Yield what a reader of a comparison should know."""
    if found.kind == "macro F1":
        yield "a class counts where either model knows it, in reports where its own does"
    tests = found.tests.values()
    if any((of.low > 0 or of.high < 0) != (of.p_value < ALPHA) for of in tests):
        yield (
            "where the interval and p disagree, as with few and skewed resamples, claim no "
            "difference"
        )
    for site, (first, second) in found.one_to_one.items():
        test = found.tests[site]
        if max(abs(first - test.f1_a), abs(second - test.f1_b)) > OVERLAP_POINTS:
            yield (
                f"{escape(site)}: one to one, F1 is {number_of(first)} and {number_of(second)}: a "
                "long mention matches several; compare with --metric relaxed_one_to_one"
            )


def audit_table(found: Audit) -> Table:
    """What `fednotes audit` prints, in percent."""
    title = f"{escape(found.title)}: what leaves {escape(found.site)}"
    table = sheet("attack", "success", "control", "chance", title=title)
    table.add_column("what closes it, or why it is none")
    for leak in found.attacks:
        told = (
            leak.why or leak.closes if leak.success is None or leak.proven else UNPROVEN
        )
        cells = ["–"] * 3
        if leak.success is not None and leak.low is not None and leak.high is not None:
            bounds = (
                f"\n{leak.low:.1%} to {leak.high:.1%}" if leak.low < leak.high else ""
            )
            cells = [
                f"{leak.success:.1%}{bounds}".replace("%", ""),
                number_of(leak.control),
                number_of(leak.chance),
            ]
        table.add_row(Text(leak.attack), *cells, Text(told))
    table.caption = (
        "of what is there, named at 1 % false alarms, in %; intervals hold 95 %"
    )
    return table


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
    with _bar(console, TimeRemainingColumn(compact=True)) as bar:
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


def _bar(console: Console, time_left: ProgressColumn) -> Progress:
    """Description, bar, count, a free line, time left; silent where there is no
    terminal."""
    return Progress(
        TextColumn("[bold]{task.description:<22}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[line]}"),
        time_left,
        console=console,
        disable=not console.is_terminal,
    )


def stats_tables(stats: Mapping[str, Any]) -> list[Table]:
    """Table 1 of Ge et al. 2020: each site's counts, then the forms that sites share."""
    table = sheet(
        *("site", "documents", "sentences", "tokens", "entities", "forms"),
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
    shared = sheet(
        "forms in common", *(Text(site["site"]) for site in stats["sites"]), title=title
    )
    for site, row in zip(stats["sites"], stats["pairwise"], strict=True):
        shared.add_row(Text(site["site"]), *(f"{n:,}" for n in row))
    return [table, shared]


def findings_table(findings: Sequence[Finding]) -> Table:
    """What `fednotes check` found, errors first."""
    table = sheet("level", "where", "what", "finding", left=4)
    looks = {"error": "bold red", "warning": "yellow", "info": ""}
    for level, look in looks.items():
        for finding in findings:
            if finding.level == level:
                cells = (finding.where, finding.code, finding.message)
                table.add_row(level, *map(Text, cells), style=look)
    return table


def count_tables(found: Sequence[CountTable]) -> list[Table]:
    """What a job's sites hold, as counts."""
    tables = []
    for counts in found:
        tables.append(
            sheet(*counts.heads, left=counts.words, title=counts.title or None)
        )
        for row in counts.rows:
            tables[-1].add_row(*map(Text, row))
    return tables
