"""Write the report of a run as a single HTML file.

The file needs no script, font or network. It is made only from the result files
(`summary.json`, and `metrics.jsonl` if it exists), so it cannot contain notes. The page
omits what the files lack. The coordinates of charts are computed here;
`templates/charts.html` writes the SVG.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from fednotes.core.cleaning import clean_to_one_line
from fednotes.core.errors import DataError, FednotesError
from fednotes.core.parsing import as_mapping, find_number
from fednotes.core.settings import require_path
from fednotes.core.store import write_out, write_text
from fednotes.core.wording import format_duration, format_size
from fednotes.jobs.audit_result import read_audit
from fednotes.jobs.causes import Cause
from fednotes.jobs.diagnosis import diagnose_run
from fednotes.jobs.metrics_file import read_metrics
from fednotes.jobs.results import (
    CONDITIONS,
    OWN_MIX,
    SUMMARY,
    RunResult,
    Scores,
    read_result,
)
from fednotes.jobs.score_layouts import (
    CURVES,
    SCORES,
    Dots,
    format_change,
    format_score,
)
from fednotes.jobs.seeds import SEEDS_FILE, read_seeds

Chart = Mapping[str, Any]  # values from which the templates draw a chart
Line = Mapping[str, Any]  # a line of metrics.jsonl
Point = tuple[float, float]
# The name of a curve, the number of its style, and its points by ascending x.
Series = tuple[str, int, Sequence[Point]]
# A site, the title of a score, and its value in each run.
_ScoreRow = tuple[str, str, list[float | None]]

_SHORT = {
    "precision": "P",
    "recall": "R",
    "f1": "F1",
    "auroc": "AUROC",
    "auprc": "AUPRC",
}
# Headings for scores of anything but mentions.
_SCORED = {"notes": "Held-out notes", "patients": "Scores on the test patients"}
_MAX_OPEN_SITES = 3  # with more sites, their disease tables are collapsed
_DISEASE_MEASURES = ("precision", "recall", "f1", "auroc")
_CLASSES = ("present", "absent", "questionable")
_POOLED = "pooled"  # stands for all sites in lines of the pooled condition
# A run of fednotes has up to five conditions. Pages have a column for each.
_MAX_CONDITIONS = 10
# Empty cells of all tables by entity type and by disease; the conditions of a site are
# scored on the same types, so few cells are empty.
_MAX_EMPTY_CELLS = 10_000
_MAX_PANELS = 24  # sites with curves of their own; the tables show all sites
_MAX_POINTS = 300  # maximum number of points drawn for a curve
_MAX_ROWS = 60  # maximum number of rows in a table of curves
_MAX_MARKED = 24  # curves with more points have no markers
_MAX_LABEL = 24  # maximum length of a row's label
_STYLES = 6  # number of curve styles in the style sheet
_MIN_RANGE = 1e-100  # smaller ranges count as zero: tick steps would underflow
_CURVE_SCORES = ("valid_f1", "f1")  # scores in lines of evaluations
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def write_report(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the report of a run, of several seeds, or of an audit.

    Args:
        run: The folder.
        out: The file to write; `report.html` in the folder by default.

    Returns:
        The path of the file.

    Raises:
        DataError: `summary.json` is missing, or a result file is damaged.
        FednotesError: The report cannot be written.
    """
    folder = require_path(run, "a run's folder")
    if (folder / SEEDS_FILE).is_file() and not (folder / SUMMARY).is_file():
        return _write_seeds_report(folder, out)
    audit = read_audit(folder)
    if audit is not None and not (folder / SUMMARY).is_file():
        result = RunResult(
            method=audit.method, title=audit.title, command=audit.command
        )
    else:
        result = read_result(folder)
    parts = collect_page_parts(result, read_metrics(folder))
    parts["audit"] = audit
    parts["causes"] = _find_causes(folder)
    page = make_environment().get_template("report.html").render(parts)
    return _write_page(page, folder, out)


def _find_causes(folder: Path) -> tuple[Cause, ...]:
    """Return the causes that a diagnosis finds; none if the job cannot be read here."""
    if not (folder / SUMMARY).is_file():
        return ()
    try:
        return diagnose_run(folder).causes
    except FednotesError:  # such as a variable that is not set, or a package's method
        return ()


def _write_seeds_report(folder: Path, out: str | Path | None) -> Path:
    """Write the report of several seeds of one job; return its path."""
    result = read_seeds(folder)
    groups = [
        *result.sites.items(),
        ("All test data together", result.micro),
        ("Mean of sites", result.mean),
    ]
    all_scores = [scores for _, site in groups for scores in site.values()]

    measures = []
    for kind, layout in SCORES.items():
        for measure in layout.measures:
            means = [
                find_number(scores, kind, measure, "mean") for scores in all_scores
            ]
            if any(mean is not None for mean in means):
                name = _SHORT.get(measure, measure.capitalize())
                measures.append((kind, layout.title, measure, name))

    template = make_environment().get_template("seeds.html")
    page = template.render(
        result=result,
        title=result.title or f"{result.method} runs",
        groups=groups,
        conditions=CONDITIONS,
        measures=measures,
        settings=list(_list_settings(result.config)),
    )
    return _write_page(page, folder, out)


def _write_page(page: str, folder: Path, out: str | Path | None) -> Path:
    """Write a page to `out`, or to `report.html` in a run's folder.

    Returns:
        The path of the file.
    """
    if out is None:
        target = folder / "report.html"
        write_text(target, page)
    else:
        target = require_path(out, "a file to write")
        write_out(target, page)
    return target


@cache
def make_environment(*packages: str) -> Environment:
    """Return the Jinja environment of these packages' templates and of our own.

    All values are escaped. It is made once for the same packages.
    """
    jinja_environment = Environment(
        loader=ChoiceLoader(
            [PackageLoader(name) for name in (*packages, "fednotes.report")]
        ),
        autoescape=True,
        undefined=StrictUndefined,
        # Result files contain names that other sites chose.
        finalize=lambda value: (
            clean_to_one_line(value) if type(value) is str else value
        ),
    )
    jinja_environment.globals |= {"number": find_number, "most": _find_largest}
    jinja_environment.filters["code"] = mark_code
    jinja_environment.filters["score"] = format_score
    jinja_environment.filters["change"] = format_change
    return jinja_environment


def mark_code(text: str) -> Markup:
    """Return a message as HTML, in which backticks mark code."""
    escaped = str(escape(clean_to_one_line(text)))
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", escaped))


def collect_page_parts(result: RunResult, lines: Sequence[Line]) -> dict[str, Any]:
    """Return the values that `run.html` shows for a run.

    Args:
        result: The run's result.
        lines: The lines of its evaluations.
    """
    return _Page(result, lines).collect_parts()


class ComparedRun(NamedTuple):
    """One side of a comparison.

    Attributes:
        result: The run's result, or what is known of it so far.
        lines: The lines of its metrics.jsonl.
        condition: The condition whose models are compared.
    """

    result: RunResult
    lines: Sequence[Line]
    condition: str


def collect_comparison(runs: Mapping[str, ComparedRun]) -> dict[str, Any]:
    """Collect what a page shows of runs side by side.

    Args:
        runs: The sides of the comparison, by the name that the page shows.

    Returns:
        "rows": a site, a score and its value on each side.
        "dots": these scores as a figure.
        "curves": the training of all sides as a figure.
    """
    rows, dots = _compare_scores(runs)
    caption = "In %; the axis may not start at zero."
    return {
        "rows": rows,
        "dots": _make_figure(dots, caption),
        "curves": _make_figure(_compare_curves(runs), caption),
    }


def _compare_scores(
    runs: Mapping[str, ComparedRun],
) -> tuple[list[_ScoreRow], list[Chart]]:
    """Return a row for each site and score, and a chart for each kind of score."""
    sites = dict.fromkeys(site for run in runs.values() for site in run.result.sites)
    rows: list[_ScoreRow] = []
    charts = []
    for kind, layout in SCORES.items():
        if layout.dots is None:
            continue
        measure, title, _ = layout.dots
        scores = {}
        for site in sites:
            values = {
                name: find_number(run.result.sites, site, run.condition, kind, measure)
                for name, run in runs.items()
            }
            known = {name: value for name, value in values.items() if value is not None}
            if known:
                scores[site] = known
                rows.append((site, title, list(values.values())))
        if scores:
            charts.append(make_dot_chart(f"two-{kind}", title, scores, list(runs)))
    return rows, charts


def _compare_curves(runs: Mapping[str, ComparedRun]) -> list[Chart]:
    """Return a chart for each kind of curve, with one curve for each side."""
    pages = {name: _Page(run.result, run.lines) for name, run in runs.items()}
    charts = []
    for key, curve in CURVES.items():
        series = [
            (name, style, points)
            for style, (name, page) in enumerate(pages.items())
            for condition, _, points in page.list_overall_series(key)
            if condition == runs[name].condition
        ]
        if series:
            title = f"{curve.short}, all sites"
            chart = make_line_chart(
                f"two-{key}", title, title, series, scale=None, shape=(460, 230)
            )
            charts.append(chart)
    return charts


class _Group(NamedTuple):
    """The scores of a site, or their mean.

    Attributes:
        name: Its name on the page.
        scores: The scores by condition.
        is_mean: Whether it is the mean of the sites.
    """

    name: str
    scores: Mapping[str, Mapping[str, Any]]
    is_mean: bool


class _Page:
    """Computes the values on the page of a run; `templates/` has words and tables."""

    def __init__(self, result: RunResult, lines: Sequence[Line]) -> None:
        used = set(map(_get_condition, lines))
        for site in (*result.sites.values(), result.mean):
            used.update(site)
        if len(used) > _MAX_CONDITIONS:
            raise DataError(
                f"the files of this run name {len(used):,} conditions, and a page "
                f"shows at most {_MAX_CONDITIONS}: the run's folder is damaged; copy "
                "it again"
            )
        known = [condition for condition in CONDITIONS if condition in used]
        self.conditions = [*known, *sorted(used - set(CONDITIONS))]

        self.result = result
        self.lines = [line for line in lines if find_number(line, "round") is not None]
        self.sites = list(
            dict.fromkeys(
                name for line in lines for name in as_mapping(line.get("sites"))
            )
        )
        self.groups = [
            _Group(name, scores, is_mean=False) for name, scores in result.sites.items()
        ]
        if result.mean:
            self.groups.append(_Group("Mean of sites", result.mean, is_mean=True))
        self._require_filled_tables()

    def _require_filled_tables(self) -> None:
        """Raise DataError if the tables by entity type and disease are mostly empty.

        The tables have a cell for each type in each condition. If every condition had
        different types, the tables would grow with the square of the size of the files.
        """
        num_cells = 0
        num_filled = 0
        for group in self.groups:
            for kind in ("by_type", "by_output"):
                tables = self._find_tables(group.scores, kind)
                num_cells += len(tables) * len(
                    set(chain.from_iterable(tables.values()))
                )
                num_filled += sum(map(len, tables.values()))
        if num_cells > 2 * num_filled + _MAX_EMPTY_CELLS:
            raise DataError(
                "the summary of this run has different entity types or diseases in "
                f"each condition, and tables of {num_cells:,} cells are not shown: the "
                "run's folder is damaged; copy it again"
            )

    def collect_parts(self) -> dict[str, Any]:
        """Return the values that the templates show, by their names there."""
        result = self.result
        measures = {
            kind: layout
            for kind, layout in SCORES.items()
            if self._has_scores(kind, layout.measures)
        }
        leads = [kind for kind, layout in measures.items() if layout.is_lead]
        return {
            "result": result,
            "title": result.title or f"{result.method or 'fednotes'} run",
            "command": self._find_command(),
            "conditions": self.conditions,
            "tiles": list(self._list_tiles()),
            "groups": self._list_scored_groups(),
            "verdicts": self._list_verdicts("alone"),
            "control": self._list_verdicts(OWN_MIX),
            "dots": self._make_dots(),
            "measures": measures,
            "lead": leads[0] if leads else "",
            "short": _SHORT,
            "training": self._make_training_figures(),
            "curve_tables": self._make_curve_tables(),
            "undrawn": max(0, len(self.sites) - _MAX_PANELS),
            "phenotypes": self._make_phenotypes(),
            "types": list(self._list_types()),
            "bytes": self._make_bytes_figure(),
            "causes": (),
            "settings": [
                ("Configuration", list(_list_settings(result.config))),
                ("Versions", list(_list_settings(result.versions))),
            ],
        }

    def _find_command(self) -> str:
        """Return the command of the run, or its name; "" if neither is known."""
        result = self.result
        for command in (result.command, result.config.get("command"), result.run):
            if command:
                return str(command)
        return ""

    def _list_scored_groups(self) -> list[_Group]:
        """Return the groups with any scores, without their empty conditions."""
        groups = []
        for group in self.groups:
            scored = {
                condition: scores
                for condition, scores in group.scores.items()
                if scores
            }
            if scored:
                groups.append(group._replace(scores=scored))
        return groups

    def _list_verdicts(self, against: str) -> list[tuple[str, Any, bool]]:
        """Return how the federation compares with another condition in each group."""
        verdicts = []
        for group in self.groups:
            site = None if group.is_mean else group.name
            verdict = self.result.verdict(site, against)
            if verdict is not None:
                verdicts.append((group.name, verdict, group.is_mean))
        return verdicts

    def _has_scores(self, kind: str, measures: Iterable[str] = ("f1",)) -> bool:
        """Return whether any group has one of these measures."""
        return any(
            find_number(scores, kind, measure) is not None
            for group in self.groups
            for scores in group.scores.values()
            for measure in measures
        )

    def _list_tiles(self) -> Iterator[tuple[str, str, str]]:
        """Yield the tiles at the top of the page: heading, number and remark."""
        result = self.result
        for kind, (measure, _, what) in self._list_kinds_with_dots():
            if not what:
                continue
            alone = find_number(result.mean, "alone", kind, measure)
            for name, score in self._find_by_condition(
                result.mean, kind, measure
            ).items():
                remark = f"mean {what}"
                if alone is not None and name != "alone":
                    remark += f", {format_change(score - alone, measure)}"
                text = format_score(score, measure)
                yield name.capitalize(), f"{text} %", remark
        yield from self._list_facts()

    def _list_facts(self) -> Iterator[tuple[str, str, str]]:
        """Yield tiles with facts about the complete run."""
        result = self.result
        gap = result.gap()
        if gap is not None:
            closed = "–" if gap.closed is None else f"{100 * gap.closed:.0f} %"
            yield "Gap closed", closed, gap.why or "of pooled − alone"
        promise = result.privacy.get("federated", {})
        epsilon = find_number(promise, "epsilon")
        delta = find_number(promise, "delta")
        if epsilon is not None and delta is not None:
            remark = (
                f"at δ = {delta:g}, of each {promise.get('unit', 'unit')} of a site"
            )
            rounded_up = math.ceil(100 * epsilon - 1e-9) / 100
            yield "ε guaranteed", f"{rounded_up:.2f}", remark
        if result.sites:
            yield "Sites", str(len(result.sites)), ""
        if result.seconds is not None:
            yield "Time", format_duration(result.seconds), ""
        up, down = result.bytes_up, result.bytes_down
        if up is not None and down is not None:
            yield (
                "Bytes sent",
                format_size(up + down),
                f"{format_size(up)} up, {format_size(down)} down",
            )

    def _list_kinds_with_dots(self) -> Iterator[tuple[str, Dots]]:
        """Yield the kinds of scores that are drawn as dots.

        If a run predicts phenotypes, the scores on codes, the targets of stage 1, are
        left out.
        """
        for kind, layout in SCORES.items():
            is_auxiliary = kind == "codes" and self._has_scores("phenotypes")
            if layout.dots is not None and not is_auxiliary:
                yield kind, layout.dots

    def _make_dots(self) -> Chart | None:
        """Return a chart of each kind of score, with a row for each site."""
        charts: list[Chart] = []
        for kind, (measure, title, _) in self._list_kinds_with_dots():
            rows = {
                group.name: self._find_by_condition(group.scores, kind, measure)
                for group in self.groups
            }
            charts += self._make_dot_charts(f"dots-{kind}", title, rows)
        what = _SCORED.get(self.result.holds, "F1 on the test sets")
        return _make_figure(charts, f"{what}, in %; the axis may not start at zero.")

    def _make_dot_charts(
        self, chart_id: str, title: str, rows: Mapping[str, Mapping[str, float]]
    ) -> Iterator[Chart]:
        """Yield a chart of the rows that have values, if any have."""
        filled = {name: row for name, row in rows.items() if row}
        if filled:
            yield make_dot_chart(chart_id, title, filled, self.conditions)

    def _find_by_condition(
        self, scores: Mapping[str, object], *path: str
    ) -> dict[str, float]:
        """Return the number at a path for each condition that has one."""
        values = {c: find_number(scores, c, *path) for c in self.conditions}
        return {c: value for c, value in values.items() if value is not None}

    def _find_tables(
        self, site: Mapping[str, Scores], kind: str
    ) -> dict[str, Mapping[str, Any]]:
        """Return each condition's table of scores by entity type or by disease."""
        tables = {c: as_mapping(site.get(c, {}).get(kind)) for c in self.conditions}
        return {c: table for c, table in tables.items() if table}

    def _list_types(self) -> Iterator[tuple[str, list[str], list[Any]]]:
        """Yield each site with its conditions and a row for each entity type."""
        for name, site in self.result.sites.items():
            tables = self._find_tables(site, "by_type")
            rows = []
            for label in sorted(
                {label for table in tables.values() for label in table}
            ):
                counts = (
                    find_number(table, label, "support") for table in tables.values()
                )
                support = next((count for count in counts if count is not None), None)
                scores = {
                    condition: [
                        find_number(table, label, definition, measure)
                        for definition in ("strict", "relaxed")
                        for measure in ("precision", "recall", "f1")
                    ]
                    for condition, table in tables.items()
                }
                rows.append((label, support, scores))
            if rows:
                yield name, list(tables), rows

    def _make_phenotypes(self) -> dict[str, Any] | None:
        """Return the part of the page about diseases.

        It has dots and a table of means over sites, and a table for each site.

        Returns:
            None if the run predicts no diseases.
        """
        result = self.result
        mean = self._find_tables(result.mean, "by_output")
        by_site = {
            name: self._find_tables(site, "by_output")
            for name, site in result.sites.items()
        }
        diseases = _list_diseases([mean, *by_site.values()])
        if not diseases:
            return None
        charts: list[Chart] = []
        for key in ("f1", "auroc"):
            title = f"{'Macro F1' if key == 'f1' else 'AUROC'} of each disease"
            scores = {d: self._find_by_condition(mean, d, key) for d in diseases}
            charts += self._make_dot_charts(f"disease-{key}", title, scores)
        rows = [
            (disease, self._make_disease_cells(mean, disease)) for disease in diseases
        ]

        is_folded = len(by_site) > _MAX_OPEN_SITES
        sites = [
            (name, is_folded, _list_classes(tables), tables, _list_diseases([tables]))
            for name, tables in by_site.items()
            if tables
        ]
        caption = (
            "Diseases on the test patients, mean of the sites, in %; axes need not "
            "begin at zero."
        )
        return {
            "dots": _make_figure(charts, caption),
            "conditions": list(mean),
            "heads": [_SHORT[key] for key in _DISEASE_MEASURES],
            "rows": rows,
            "average": _average_columns([cells for _, cells in rows]),
            "sites": sites,
        }

    def _make_disease_cells(
        self, tables: Mapping[str, Mapping[str, Any]], disease: str
    ) -> list[tuple[float | None, str]]:
        """Return a disease's scores in all conditions, with a style for the best F1."""
        f1 = list(self._find_by_condition(tables, disease, "f1").values())
        best = max(f1) if len(f1) > 1 else math.nan
        cells = []
        for table in tables.values():
            for key in _DISEASE_MEASURES:
                value = find_number(table, disease, key)
                style = "best" if key == "f1" and value == best else ""
                cells.append((value, style))
        return cells

    # ---- curves of training

    def _make_training_figures(self) -> list[Chart]:
        """Return curves of validation scores and loss, over all sites and by site."""
        names = self._list_curve_names()
        captions = []
        for name in names:
            titles = CURVES[name].titles
            captions.append(titles.get(self.result.holds, titles["documents"]))
        of_all_sites = ". ".join(all_sites for all_sites, _ in captions)
        shape = (460, 230) if len(names) < 2 else (340, 200)
        caption = f"{of_all_sites}, and training loss."
        figures = [self._make_curves(self._list_overall_curves(), caption, shape)]

        for name, (_, of_each_site) in zip(names, captions, strict=True):
            charts = self._list_site_curves(CURVES[name].site_measure)
            values = [
                y
                for _, curves in charts.values()
                for _, _, points in curves
                for _, y in points
            ]
            scale = (min(values), max(values)) if values else None
            caption = f"{of_each_site}, all on the same scale."
            figures.append(self._make_curves(charts, caption, scale=scale))
        losses = self._list_site_curves("loss")
        figures.append(self._make_curves(losses, self.result.wording.loss_caption))
        return [figure for figure in figures if figure]

    def _list_curve_names(self) -> list[str]:
        """Return the names of the validation curves that the run has."""
        names = [name for name in CURVES if any(name in line for line in self.lines)]
        return names or ["valid_f1"]

    def _list_overall_curves(self) -> dict[str, tuple[str, list[Series]]]:
        """Return title and curves of each chart over all sites, by its id."""
        charts = {}
        for name in self._list_curve_names():
            curve = CURVES[name]
            title = f"{curve.short}, all sites"
            charts[f"mean-{curve.site_measure}"] = (
                title,
                self.list_overall_series(name),
            )
        charts["mean-loss"] = ("Loss, all sites", self.list_overall_series("loss"))
        return charts

    def _make_curve_tables(self) -> list[CurveTable]:
        """Return the curves as tables, for people who cannot see them.

        The first tables are over all sites; then each site that has curves has one.
        """
        tables = [
            _make_curve_table(title, series)
            for title, series in self._list_overall_curves().values()
            if series
        ]
        measures = {
            CURVES[name].site_measure: CURVES[name].short
            for name in self._list_curve_names()
        }
        measures["loss"] = "loss"
        for site in self.sites[:_MAX_PANELS]:
            series = [
                (f"{short}, {condition}", style, points)
                for measure, short in measures.items()
                for condition, style, points in self._list_series(
                    self.lines, "sites", site, measure
                )
            ]
            if series:
                tables.append(_make_curve_table(site, series))
        return tables

    def _make_curves(
        self,
        charts: Mapping[str, tuple[str, Sequence[Series]]],
        caption: str,
        shape: tuple[int, int] = (340, 200),
        scale: Point | None = None,
    ) -> Chart | None:
        """Return charts of curves with a caption; None if no chart has a curve.

        Args:
            charts: Title and curves of each chart, by its id on the page.
            caption: The caption.
            shape: Width and height of each chart.
            scale: Range of the y axes; by default that of the curves.
        """
        drawn = []
        for chart_id, (title, curves) in charts.items():
            if not curves:
                continue
            ends = "; ".join(
                f"{name} ends at {points[-1][1]:.4g}" for name, _, points in curves
            )
            text = f"{caption} {ends}."
            drawn.append(
                make_line_chart(chart_id, title, text, curves, scale=scale, shape=shape)
            )
        return _make_figure(drawn, caption)

    def _make_bytes_figure(self) -> Chart | None:
        """Return the figure of bytes up and down, cumulative over rounds.

        Returns:
            None if no line of the run has bytes.
        """
        first_style = 3  # differs from the styles of conditions
        directions = {
            "bytes_up": "from the sites (up)",
            "bytes_down": "to the sites (down)",
        }
        curves: list[Series] = []
        ends = []
        for style, (key, name) in enumerate(directions.items(), first_style):
            for condition, _, points in self._list_series(self.lines, key):
                if condition == "federated":
                    curves.append((name, style, points))
                    ends.append(f"{name}: {format_size(points[-1][1])} at the end")

        largest = max((y for _, _, points in curves for _, y in points), default=0.0)
        if not largest:
            return None
        factor, unit = next(
            (factor, unit)
            for factor, unit in _UNITS
            if largest >= factor or factor == 1
        )
        scaled = [
            (name, style, [(x, y / factor) for x, y in points])
            for name, style, points in curves
        ]
        chart = make_line_chart(
            "bytes",
            "Bytes sent since the start",
            "; ".join(ends),
            scaled,
            scale=None,
            shape=(680, 240),
            unit=f" {unit}",
        )
        return _make_figure(
            [chart], "Federated training, all sites together, cumulative."
        )

    def list_overall_series(self, key: str) -> list[Series]:
        """Return the curves of a measure over all sites.

        Lines that cover only some of the sites are left out, as they are no mean over
        all.
        """
        number_of_sites = len(set(self.sites) - {_POOLED})
        lines = []
        for line in self.lines:
            sites = list(as_mapping(line.get("sites")))
            if len(sites) in (0, number_of_sites) or sites == [_POOLED]:
                lines.append(line)
        return self._list_series(lines, key)

    def _list_site_curves(self, key: str) -> dict[str, tuple[str, list[Series]]]:
        """Return the title and curves of each site's chart, by its id on the page."""
        return {
            f"{key}-{place}": (name, self._list_series(self.lines, "sites", name, key))
            for place, name in enumerate(self.sites[:_MAX_PANELS])
        }

    def _list_series(self, lines: Sequence[Line], *path: str) -> list[Series]:
        """Return a curve for each condition that has points.

        The page counts rounds from 1, as progress lines do; metrics.jsonl counts from
        0. If there are several lines for one round, the last one counts. Scores are in
        percent, with one decimal.
        """
        has_percent = path[-1] in _CURVE_SCORES
        by_condition: dict[str, dict[float, float]] = {}
        for line in lines:
            value = find_number(line, *path)
            if value is not None:
                shown_value = round(100 * value, 1) if has_percent else value
                points = by_condition.setdefault(_get_condition(line), {})
                points[float(line["round"]) + 1] = shown_value
        return [
            (condition, style, sorted(by_condition[condition].items()))
            for style, condition in enumerate(self.conditions)
            if condition in by_condition
        ]


def _list_diseases(groups: Iterable[Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Return the names of diseases, in the order of the files."""
    names = [d for group in groups for table in group.values() for d in table]
    return list(dict.fromkeys(names))


def _average_columns(
    rows: Iterable[Sequence[tuple[float | None, str]]],
) -> list[float | None]:
    """Return the mean of the known values in each column; None if there are none.

    Args:
        rows: The value and the style of each cell.
    """
    averages: list[float | None] = []
    for column in zip(*rows, strict=True):
        known = [value for value, _ in column if value is not None]
        averages.append(fmean(known) if known else None)
    return averages


def _list_classes(tables: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the classes that at least one patient has of any disease."""
    diseases = _list_diseases([tables])
    return [
        name
        for name in _CLASSES
        if any(_find_largest(tables.values(), d, name, "support") for d in diseases)
    ]


def _find_largest(tables: Iterable[object], *path: str) -> float:
    """Return the largest of the numbers at a path in each table; 0 without one."""
    return max(find_number(table, *path) or 0 for table in tables)


def _list_settings(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted keys and values of nested settings."""
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        value = {str(place): inner for place, inner in enumerate(value, 1)}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _list_settings(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list):
        yield prefix, ", ".join(map(str, value))
    elif value is not None:
        yield prefix, str(value)


def _get_condition(line: Line) -> str:
    """Return the condition of a line of metrics."""
    return str(line.get("condition", "federated"))


# ---- tables of curves ----------------------------------------------------------------


class CurveTable(NamedTuple):
    """The points of some curves.

    Attributes:
        title: The title of their chart.
        names: The name of each curve.
        rows: Each round, with the value of each curve; None where it has no point.
    """

    title: str
    names: list[str]
    rows: list[tuple[str, list[float | None]]]


def _make_curve_table(title: str, series: Sequence[Series]) -> CurveTable:
    """Return curves as a table of their values by round; rows are left out if many."""
    points = [dict(points) for _, _, points in series]
    rounds = sorted({x for curve in points for x in curve})
    stride = math.ceil(len(rounds) / _MAX_ROWS)
    shown = [*rounds[:-1:stride], rounds[-1]]
    rows = [(format_tick(x), [curve.get(x) for curve in points]) for x in shown]
    return CurveTable(title, [name for name, _, _ in series], rows)


# ---- charts --------------------------------------------------------------------------


def _make_figure(charts: Sequence[Chart], caption: str) -> Chart | None:
    """Return charts side by side with a caption; None if there are no charts."""
    return {"charts": charts, "caption": caption} if charts else None


def _make_frame(
    chart_id: str, title: str, description: str, box: Sequence[float]
) -> dict[str, Any]:
    """Return the values that all charts have.

    Args:
        chart_id: An id that is unique on the page.
        title: The chart's title.
        description: A description for people who cannot see the chart.
        box: Width and height of the chart; left, right, top and bottom of its plot.
    """
    width, height, left, right, top, bottom = box
    return {
        "ident": chart_id,
        "title": title,
        "description": description,
        "width": width,
        "height": height,
        "left": left,
        "right": right,
        "top": top,
        "bottom": bottom,
    }


def _make_axis(
    low: float, high: float, start: float, end: float
) -> Callable[[float], float]:
    """Return a function that maps values to chart coordinates.

    Args:
        low: The least value.
        high: The largest value.
        start: The coordinate of the least value.
        end: The coordinate of the largest value.
    """
    if high <= low:
        # A smaller margin would be lost in the rounding of large numbers.
        half = max(0.5, abs(low) * 1e-9)
        low, high = low - half, high + half
    return lambda value: round(start + (value - low) / (high - low) * (end - start), 1)


def choose_ticks(low: float, high: float, num_steps: int) -> list[float]:
    """Return round numbers that enclose two values, in equal steps.

    Args:
        low: The smaller value.
        high: The larger value.
        num_steps: The approximate number of steps, each of 1, 2, 2.5 or 5 · 10ⁿ.
    """
    if high - low < _MIN_RANGE:
        pad = abs(low) * 0.1 if abs(low) > _MIN_RANGE else 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / num_steps
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(
        m for m in (1, 2, 2.5, 5, 10) if rough <= m * power * (1 + 1e-9)
    )
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]


def format_tick(value: float) -> str:
    """Return a tick's label, without trailing zeros and with thousands separated."""
    if abs(value) >= 1000 and value == round(value):
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.6g}"


def make_line_chart(
    chart_id: str,
    title: str,
    description: str,
    series: Sequence[Series],
    *,
    scale: Point | None,
    shape: tuple[int, int],
    unit: str = "",
) -> Chart:
    """Return a chart of curves over rounds.

    Args:
        chart_id: An id that is unique on the page.
        title: The chart's title.
        description: A description for people who cannot see the chart.
        series: The curves.
        scale: Range of the y axis; None takes that of the curves.
        shape: Width and height.
        unit: Shown after each tick of the y axis.
    """
    width, height = shape
    left, right, top, bottom = 46, width - 14, 30, height - 38
    xs = [x for _, _, points in series for x, _ in points]
    ys = scale or [y for _, _, points in series for _, y in points]
    rows = choose_ticks(min(ys), max(ys), 4)
    across = _make_axis(min(xs), max(xs), left, right)
    up = _make_axis(rows[0], rows[-1], bottom, top)

    curves = []
    for name, style, points in series:
        stride = math.ceil(len(points) / _MAX_POINTS)
        drawn = [*points[:-1:stride], points[-1]]
        path = "L".join(f"{across(x)} {up(y)}" for x, y in drawn)
        marks = [
            (across(x), up(y), f"{name}, round {format_tick(x)}: {y:.4g}{unit}")
            for x, y in drawn
        ]
        if len(drawn) > _MAX_MARKED:
            marks = marks[-1:]
        curves.append(
            {"name": name, "look": style % _STYLES, "path": path, "marks": marks}
        )
    columns = [x for x in choose_ticks(min(xs), max(xs), 5) if min(xs) <= x <= max(xs)]
    return {
        **_make_frame(
            chart_id, title, description, (width, height, left, right, top, bottom)
        ),
        "x_ticks": [(across(x), format_tick(x)) for x in columns],
        "y_ticks": [(up(y), format_tick(y) + unit) for y in rows],
        "curves": curves,
    }


def make_dot_chart(
    chart_id: str,
    title: str,
    groups: Mapping[str, Mapping[str, float]],
    conditions: Sequence[str],
) -> Chart:
    """Return a chart with a row for each group and a marker for each of its values.

    Args:
        chart_id: An id that is unique on the page.
        title: The chart's title.
        groups: The scores of each group by condition, as fractions; the chart has
            percent.
        conditions: All conditions; a condition's index decides its style.
    """
    groups = {
        label: {name: 100 * value for name, value in row.items()}
        for label, row in groups.items()
    }
    values = [value for row in groups.values() for value in row.values()]
    marks = choose_ticks(min(values), max(values), 5)
    step = 34 if len(groups) <= 24 else 20
    left = max(124, 16 + 7 * min(_MAX_LABEL, max(map(len, groups))))
    width, top, bottom = 460, 30, 34 + step * len(groups)
    across = _make_axis(marks[0], marks[-1], left, width - 16)

    rows = []
    for place, (label, row) in enumerate(groups.items()):
        middle = top + 4 + step * (place + 0.5)
        markers = []
        for order, (name, value) in enumerate(row.items()):
            # Markers are slightly offset, so that equal scores do not hide each other.
            shift = (order - (len(row) - 1) / 2) * min(4.5, step / 5)
            style = conditions.index(name) % _STYLES
            tip = f"{label}, {name}: {value:.1f} %"
            markers.append((style, across(value), round(middle + shift, 1), tip))
        xs = [x for _, x, _, _ in markers]
        short_label = (
            label if len(label) <= _MAX_LABEL else label[: _MAX_LABEL - 1] + "…"
        )
        rows.append(
            {
                "label": short_label,
                "y": middle,
                "first": min(xs),  # ends of the line through the markers
                "last": max(xs),
                "marks": markers,
            }
        )
    box = (width, bottom + 24, left, width - 16, top, bottom)
    return {
        **_make_frame(chart_id, title, f"{title} by condition", box),
        "x_ticks": [(across(value), format_tick(value)) for value in marks],
        "rows": rows,
    }
