"""A report of one run as a single HTML file: no script, no font, nothing from a
network.

Reads the result files alone (`summary.json`, and `metrics.jsonl` where there is one),
so that no note can get into it. What a file lacks is left out of the page. Charts (dots
by site, and a run's course) are computed here, in units of the picture;
`templates/charts.html` writes the SVG.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

from fednotes.core.cleaning import one_line
from fednotes.core.parsing import mapping, number
from fednotes.core.settings import path_of
from fednotes.core.store import write_out, write_text
from fednotes.jobs.results import (
    CONDITIONS,
    CURVES,
    OWN_MIX,
    SCORES,
    SUMMARY,
    RunResult,
    Scores,
    duration,
    read_audit,
    read_lines,
    read_result,
    size,
)
from fednotes.jobs.seeds import SEEDS_FILE, read_seeds

Chart = Mapping[str, Any]  # what the templates draw
Line = Mapping[str, Any]  # of metrics.jsonl
Point = tuple[float, float]
# a curve's name, its style, and its points, x ascending
Series = tuple[str, int, Sequence[Point]]

_SHORT = {
    "precision": "P",
    "recall": "R",
    "f1": "F1",
    "auroc": "AUROC",
    "auprc": "AUPRC",
}
# else mentions
_JUDGED = {"notes": "Held-out notes", "patients": "Scores on the test patients"}
_OPEN = 3  # sites; of more, the tables of diseases are folded
_OF_A_DISEASE = ("precision", "recall", "f1", "auroc")
_CLASSES = ("present", "absent", "questionable")
_POOLED = "pooled"  # stands for all sites in the lines of that condition
# sites with curves of their own; a run of 100 sites has them in the tables
_PANELS = 24
_DRAWN = 300  # at most so many points of a curve are drawn
_MARKED = 24  # curves of no more points get a marker at each
_LETTERS = 24  # of a row's label
_LOOKS = 6  # in the style sheet
_FLAT = 1e-100  # differences below this are none: a step between ticks would vanish
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def write_report(run: str | Path, out: str | Path | None = None) -> Path:
    """Write the page of a run's results, or of an audit alone, by default to
    `report.html` in its folder; its path.

    Raises DataError if `summary.json` is missing or a result file is not what it should
    be, FednotesError if the report cannot be written.
    """
    folder = path_of(run, "a run's folder")
    if (folder / SEEDS_FILE).is_file() and not (folder / SUMMARY).is_file():
        return _write_seeds_report(folder, out)
    audited, result = read_audit(folder), None
    if audited is not None and not (folder / SUMMARY).is_file():
        told = {
            "method": audited.method,
            "title": audited.title,
            "command": audited.command,
        }
        result = RunResult.model_validate(told)
    parts = parts_of_page(result or read_result(folder), read_lines(folder)) | {
        "audit": audited
    }
    target = folder / "report.html" if out is None else path_of(out, "a file to write")
    page = environment().get_template("report.html").render(parts)
    (write_text if out is None else write_out)(target, page)
    return target


def _write_seeds_report(folder: Path, out: str | Path | None) -> Path:
    """Write the page of several seeds of one job; return its path."""
    result = read_seeds(folder)
    groups = [*result.sites.items(), ("Mean of sites", result.mean)]
    every = [scores for _, site in groups for scores in site.values()]
    measures = [
        (kind, of["title"], measure, _SHORT.get(measure, measure.capitalize()))
        for kind, of in SCORES.items()
        for measure in of["measures"]
        if any(number(scores, kind, measure, "mean") is not None for scores in every)
    ]
    page = (
        environment()
        .get_template("seeds.html")
        .render(
            result=result,
            title=result.title or f"{result.method} runs",
            groups=groups,
            conditions=CONDITIONS,
            measures=measures,
            settings=list(_flat(result.config)),
        )
    )
    target = folder / "report.html" if out is None else path_of(out, "a file to write")
    (write_text if out is None else write_out)(target, page)
    return target


@cache
def environment(*packages: str) -> Environment:
    """What fills the templates of these packages, and of this one: all values are
    escaped."""
    made = Environment(
        loader=ChoiceLoader(
            [PackageLoader(name) for name in (*packages, "fednotes.report")]
        ),
        autoescape=True,
        undefined=StrictUndefined,
        # Result files hold names that other sites chose.
        finalize=lambda value: one_line(value) if type(value) is str else value,
    )
    made.globals |= {"number": number, "most": _most}
    return made


def parts_of_page(result: RunResult, lines: Sequence[Line]) -> dict[str, Any]:
    """What `run.html` shows of a run: its result, and the lines of its evaluations."""
    return _Page(result, lines).parts()


def two_runs(runs: Mapping[str, tuple[RunResult, Sequence[Line]]]) -> dict[str, Any]:
    """Runs side by side: their federated models at each site, and how they came to
    them."""
    pages = {name: _Page(*of) for name, of in runs.items()}
    sites = dict.fromkeys(site for page in pages.values() for site in page.result.sites)
    rows, dots, curves = [], [], []
    for kind, (measure, title, _) in (
        (k, of["dots"]) for k, of in SCORES.items() if "dots" in of
    ):
        found = {}
        for site in sites:
            path = (site, "federated", kind, measure)
            values = {
                name: number(page.result.sites, *path) for name, page in pages.items()
            }
            found[site] = {
                name: value for name, value in values.items() if value is not None
            }
            if found[site]:
                rows.append((site, title, [*values.values()]))
        if any(found.values()):
            kept = {site: row for site, row in found.items() if row}
            dots.append(dot_chart(f"two-{kind}", title, kept, [*pages]))
    for key, of in CURVES.items():
        every = ((name, page._overall(key)) for name, page in pages.items())
        made = [
            (name, points)
            for name, own in every
            for c, _, points in own
            if c == "federated"
        ]
        series = [(name, [*pages].index(name), points) for name, points in made]
        if series:
            title = f"{of['short']}, all sites"
            curves.append(
                line_chart(f"two-{key}", title, title, series, None, (460, 230))
            )
    caption = "Federated models; the axis need not begin at zero."
    return {
        "rows": rows,
        "dots": _figure(dots, caption),
        "curves": _figure(curves, caption),
    }


class _Page:
    """What a page shows of a run; the words and tables are in `templates/`."""

    def __init__(self, result: RunResult, lines: Sequence[Line]) -> None:
        scored = (c for site in (*result.sites.values(), result.mean) for c in site)
        used = {*map(_condition, lines), *scored}
        self.conditions = [
            *(c for c in CONDITIONS if c in used),
            *sorted(used - {*CONDITIONS}),
        ]
        self.result = result
        self.lines = [line for line in lines if number(line, "round") is not None]
        self.sites = list(
            dict.fromkeys(n for line in lines for n in mapping(line.get("sites")))
        )
        # A name, its scores by condition, and whether it is the mean of the others.
        self.groups = [(name, site, False) for name, site in result.sites.items()]
        self.groups += [("Mean of sites", result.mean, True)] if result.mean else []

    def parts(self) -> dict[str, Any]:
        """By the names that they have in the templates."""
        result = self.result
        given = (result.command, result.config.get("command"), result.run)
        measures = {
            kind: of for kind, of in SCORES.items() if self._has(kind, of["measures"])
        }
        groups = [
            (name, own, mean)
            for name, site, mean in self.groups
            if (own := {c: scores for c, scores in site.items() if scores})
        ]
        return {
            "result": result,
            "title": result.title or f"{result.method or 'fednotes'} run",
            "command": next((str(x) for x in given if x), ""),
            "conditions": self.conditions,
            "tiles": list(self._tiles()),
            "groups": groups,
            "verdicts": self._verdicts("alone"),
            "control": self._verdicts(OWN_MIX),
            "dots": self._dots(),
            "measures": measures,
            "lead": next((kind for kind, of in measures.items() if "lead" in of), ""),
            "short": _SHORT,
            "training": self._training(),
            "undrawn": max(0, len(self.sites) - _PANELS),
            "phenotypes": self._phenotypes(),
            "types": list(self._types()),
            "bytes": self._bytes_sent(),
            "settings": [
                ("Configuration", list(_flat(result.config))),
                ("Versions", list(_flat(result.versions))),
            ],
        }

    def _verdicts(self, against: str) -> list[tuple[str, Any, bool]]:
        """Return what the federation gave each group over another condition that it has
        too."""
        found = [
            (name, self.result.verdict(None if mean else name, against), mean)
            for name, _, mean in self.groups
        ]
        return [(name, of, mean) for name, of, mean in found if of is not None]

    def _has(self, kind: str, measures: Iterable[str] = ("f1",)) -> bool:
        return any(
            number(scores, kind, measure) is not None
            for _, site, _ in self.groups
            for scores in site.values()
            for measure in measures
        )

    def _tiles(self) -> Iterator[tuple[str, str, str]]:
        result = self.result
        for kind, (measure, _, what) in self._shown():
            alone = number(result.mean, "alone", kind, measure)
            for name, score in self._by_condition(result.mean, kind, measure).items():
                compared = alone is not None and name != "alone"
                against = f", {score - (alone or 0):+.3f}" if compared else ""
                if what:
                    yield name.capitalize(), f"{score:.3f}", f"mean {what}{against}"
        gap = result.gap()
        if gap is not None:
            closed = "–" if gap.closed is None else f"{100 * gap.closed:.0f} %"
            yield "Gap closed", closed, gap.why or "of pooled − alone"
        for condition, promise in result.privacy.items():
            epsilon, delta = number(promise, "epsilon"), number(promise, "delta")
            if condition == "federated" and epsilon is not None and delta is not None:
                told = (
                    f"at δ = {delta:g}, of each {promise.get('unit', 'unit')} of a site"
                )
                yield "ε promised", f"{math.ceil(100 * epsilon - 1e-9) / 100:.2f}", told
        if result.sites:
            yield "Sites", str(len(result.sites)), ""
        if result.seconds is not None:
            yield "Time", duration(result.seconds), ""
        up, down = result.bytes_up, result.bytes_down
        if up is not None and down is not None:
            yield "Bytes sent", size(up + down), f"{size(up)} up, {size(down)} down"

    def _shown(self) -> Iterator[tuple[str, Sequence[str]]]:
        """What has dots; not what stage 1 learns from, where that is not what the run
        is for."""
        for kind, of in SCORES.items():
            if "dots" in of and (kind != "codes" or not self._has("phenotypes")):
                yield kind, of["dots"]

    def _dots(self) -> Chart | None:
        charts: list[Chart] = []
        for kind, (measure, title, _) in self._shown():
            rows = {
                name: self._by_condition(site, kind, measure)
                for name, site, _ in self.groups
            }
            charts += self._dot_chart(f"dots-{kind}", title, rows)
        what = _JUDGED.get(self.result.holds, "F1 on the test sets")
        return _figure(charts, f"{what}; the axis need not begin at zero.")

    def _dot_chart(
        self, ident: str, title: str, rows: Mapping[str, Mapping[str, float]]
    ) -> Iterator[Chart]:
        if kept := {name: row for name, row in rows.items() if row}:
            yield dot_chart(ident, title, kept, self.conditions)

    def _by_condition(
        self, scores: Mapping[str, object], *path: str
    ) -> dict[str, float]:
        """The number at a path under each condition that has it."""
        found = {c: number(scores, c, *path) for c in self.conditions}
        return {c: value for c, value in found.items() if value is not None}

    def _tables(
        self, site: Mapping[str, Scores], kind: str
    ) -> dict[str, Mapping[str, Any]]:
        """Of each condition that has it, a table of scores by type or by disease."""
        found = {c: mapping(site.get(c, {}).get(kind)) for c in self.conditions}
        return {c: table for c, table in found.items() if table}

    def _types(self) -> Iterator[tuple[str, list[str], list[Any]]]:
        """Of each site: the conditions, and a row for each entity type."""
        for name, site in self.result.sites.items():
            found = self._tables(site, "by_type")
            rows = []
            for kind in sorted({kind for table in found.values() for kind in table}):
                counts = (number(table, kind, "support") for table in found.values())
                support = next((n for n in counts if n is not None), None)
                measured = {
                    condition: [
                        number(table, kind, definition, measure)
                        for definition in ("strict", "relaxed")
                        for measure in ("precision", "recall", "f1")
                    ]
                    for condition, table in found.items()
                }
                rows.append((kind, support, measured))
            if rows:
                yield name, list(found), rows

    def _phenotypes(self) -> dict[str, Any] | None:
        """Dots and a table of diseases (means over sites), and what each site's table
        shows."""
        result = self.result
        mean = self._tables(result.mean, "by_output")
        by_site = {
            name: self._tables(site, "by_output") for name, site in result.sites.items()
        }
        diseases = _names([mean, *by_site.values()])
        if not diseases:
            return None
        charts: list[Chart] = []
        for key in ("f1", "auroc"):
            title = f"{'Macro F1' if key == 'f1' else 'AUROC'} of each disease"
            found = {d: self._by_condition(mean, d, key) for d in diseases}
            charts += self._dot_chart(f"disease-{key}", title, found)
        rows = []
        for d in diseases:
            f1 = [*self._by_condition(mean, d, "f1").values()]
            best = max(f1) if len(f1) > 1 else math.nan
            values = [
                (key, number(t, d, key)) for t in mean.values() for key in _OF_A_DISEASE
            ]
            rows.append(
                (d, [(v, "best" if k == "f1" and v == best else "") for k, v in values])
            )
        columns = zip(
            *([value for value, _ in values] for _, values in rows), strict=True
        )
        known = ([v for v in column if v is not None] for column in columns)
        caption = "Diseases on the test patients, mean of the sites; axes need not begin at zero."
        return {
            "dots": _figure(charts, caption),
            "conditions": list(mean),
            "heads": [_SHORT[key] for key in _OF_A_DISEASE],
            "rows": rows,
            "average": [fmean(values) if values else None for values in known],
            "sites": [
                (name, len(by_site) > _OPEN, _classes(found), found, _names([found]))
                for name, found in by_site.items()
                if found
            ],
        }

    # ---- a run's course: what its evaluations said

    def _training(self) -> list[Chart]:
        """Validation scores and loss, together and by site."""
        names = [j for j in CURVES if any(j in line for line in self.lines)] or [
            "valid_f1"
        ]
        called = [CURVES[j]["called"] for j in names]
        words = [of.get(self.result.holds, of["documents"]) for of in called]
        wide = (460, 230) if len(names) < 2 else (340, 200)
        together = {}
        for name in names:
            short, own = CURVES[name]["short"], CURVES[name]["site"]
            together[f"mean-{own}"] = (f"{short}, all sites", self._overall(name))
        together["mean-loss"] = ("Loss, all sites", self._overall("loss"))
        caption = (
            f"{'. '.join(all_sites for all_sites, _ in words)}, and training loss."
        )
        figures = [self._curves(together, caption, wide)]
        for name, (_, word) in zip(names, words, strict=True):
            charts = self._by_site(CURVES[name]["site"])
            values = [
                y for _, curves in charts.values() for s in curves for _, y in s[2]
            ]
            scale = (min(values), max(values)) if values else None
            figures.append(self._curves(charts, f"{word}, on one scale.", scale=scale))
        figures.append(self._curves(self._by_site("loss"), self.result.words["losses"]))
        return [made for made in figures if made]

    def _curves(
        self,
        charts: Mapping[str, tuple[str, Sequence[Series]]],
        caption: str,
        shape: tuple[int, int] = (340, 200),
        scale: Point | None = None,
    ) -> Chart | None:
        """charts: ident → title and curves."""
        made = []
        for ident, (title, curves) in charts.items():
            ends = "; ".join(
                f"{name} ends at {points[-1][1]:.4g}" for name, _, points in curves
            )
            if curves:
                made.append(
                    line_chart(ident, title, f"{caption} {ends}.", curves, scale, shape)
                )
        return _figure(made, caption)

    def _bytes_sent(self) -> Chart | None:
        """Bytes up and down, cumulative over rounds; None if no line has any."""
        curves, ends = [], []
        for look, (key, name) in enumerate(
            (
                ("bytes_up", "from the sites (up)"),
                ("bytes_down", "to the sites (down)"),
            ),
            3,
        ):
            found = {c: points for c, _, points in self._series(self.lines, key)}
            points = found.get("federated")
            if points:
                curves.append((name, look, points))
                ends.append(f"{name}: {size(points[-1][1])} at the end")
        largest = max((y for _, _, points in curves for _, y in points), default=0.0)
        if not largest:
            return None
        factor, unit = next((f, u) for f, u in _UNITS if largest >= f or f == 1.0)
        scaled = [
            (n, look, [(x, y / factor) for x, y in points])
            for n, look, points in curves
        ]
        title, what = "Bytes sent since the start", "; ".join(ends)
        chart = line_chart("bytes", title, what, scaled, None, (680, 240), f" {unit}")
        return _figure([chart], "Federated training, all sites together, cumulative.")

    def _overall(self, key: str) -> list[Series]:
        """Of all sites: a line of one site out of several is no mean over them."""
        several = len({*self.sites} - {_POOLED})
        own = [(line, [*mapping(line.get("sites"))]) for line in self.lines]
        whole = [line for line, s in own if len(s) in (0, several) or s == [_POOLED]]
        return self._series(whole, key)

    def _by_site(self, key: str) -> dict[str, tuple[str, list[Series]]]:
        """The charts of each site: ident → title and curves."""
        return {
            f"{key}-{place}": (name, self._series(self.lines, "sites", name, key))
            for place, name in enumerate(self.sites[:_PANELS])
        }

    def _series(self, lines: Sequence[Line], *path: str) -> list[Series]:
        """A curve for each condition that has points: one a round, of the later line."""
        made: list[Series] = []
        for look, condition in enumerate(self.conditions):
            own = [
                (line, number(line, *path))
                for line in lines
                if _condition(line) == condition
            ]
            points = {float(line["round"]): y for line, y in own if y is not None}
            if points:
                made.append((condition, look, sorted(points.items())))
        return made


def _names(groups: Iterable[Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Diseases, in the order of the files."""
    return list(
        dict.fromkeys(d for group in groups for table in group.values() for d in table)
    )


def _classes(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The classes that any patient has of any disease."""
    names = _names([found])
    return [
        k
        for k in _CLASSES
        if any(_most(found.values(), d, k, "support") for d in names)
    ]


def _most(tables: Iterable[object], *path: str) -> float:
    return max(number(table, *path) or 0 for table in tables)


def _flat(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as (dotted key, value)."""
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        value = {str(place): inner for place, inner in enumerate(value, 1)}
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list):
        yield prefix, ", ".join(map(str, value))
    elif value is not None:
        yield prefix, str(value)


def _condition(line: Line) -> str:
    return str(line.get("condition", "federated"))


# ---- charts --------------------------------------------------------------------------


def _figure(charts: Sequence[Chart], caption: str) -> Chart | None:
    """Charts side by side with a caption; None without any."""
    return {"charts": charts, "caption": caption} if charts else None


def _frame(
    ident: str, title: str, description: str, box: Sequence[float]
) -> dict[str, Any]:
    """What all charts have. ident: unique on the page."""
    names = ("width", "height", "left", "right", "top", "bottom")
    named = {"ident": ident, "title": title, "description": description}
    return {**named, **dict(zip(names, box, strict=True))}


def _axis(
    low: float, high: float, start: float, end: float
) -> Callable[[float], float]:
    """Where numbers from low to high stand on a stretch of the picture."""
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    return lambda value: round(start + (value - low) / (high - low) * (end - start), 1)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers that enclose low and high, roughly `about` steps of 1, 2, 2.5 or 5
    · 10ⁿ."""
    if high - low < _FLAT:
        pad = abs(low) * 0.1 if abs(low) > _FLAT else 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(
        m for m in (1, 2, 2.5, 5, 10) if rough <= m * power * (1 + 1e-9)
    )
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]


def tick(value: float) -> str:
    """A tick's label: no trailing zeros, thousands set apart."""
    if abs(value) >= 1000 and value == round(value):
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.6g}"


def line_chart(
    ident: str,
    title: str,
    what: str,
    series: Sequence[Series],
    scale: Point | None,
    shape: tuple[int, int],
    unit: str = "",
) -> Chart:
    """Curves over rounds. scale: what y spans, if not the curves; unit: after each y
    tick."""
    (width, height), xs = shape, [x for _, _, points in series for x, _ in points]
    ys = scale or [y for _, _, points in series for _, y in points]
    rows = ticks(min(ys), max(ys), 4)
    left, right, top, bottom = 46, width - 14, 30, height - 38
    across, up = (
        _axis(min(xs), max(xs), left, right),
        _axis(rows[0], rows[-1], bottom, top),
    )
    curves = []
    for name, look, points in series:
        kept = [*points[: -1 : math.ceil(len(points) / _DRAWN)], points[-1]]
        places = [(across(x), up(y)) for x, y in kept]
        tips = [f"{name}, round {tick(x)}: {y:.4g}{unit}" for x, y in kept]
        marks = [(*place, tip) for place, tip in zip(places, tips, strict=True)]
        path = "L".join(f"{x} {y}" for x, y in places)
        shown = marks if len(kept) <= _MARKED else marks[-1:]
        curves.append(
            {"name": name, "look": look % _LOOKS, "path": path, "marks": shown}
        )
    columns = [x for x in ticks(min(xs), max(xs), 5) if min(xs) <= x <= max(xs)]
    return {
        **_frame(ident, title, what, (width, height, left, right, top, bottom)),
        "x_ticks": [(across(x), tick(x)) for x in columns],
        "y_ticks": [(up(y), tick(y) + unit) for y in rows],
        "curves": curves,
    }


def dot_chart(
    ident: str,
    title: str,
    groups: Mapping[str, Mapping[str, float]],
    conditions: Sequence[str],
) -> Chart:
    """A row for each group, a marker for each of its values by condition."""
    values = [v for row in groups.values() for v in row.values()]
    marks = ticks(min(values), max(values), 5)
    step = 34 if len(groups) <= 24 else 20
    left = max(124, 16 + 7 * min(_LETTERS, max(map(len, groups))))
    width, top, bottom = 460, 30, 34 + step * len(groups)
    across = _axis(marks[0], marks[-1], left, width - 16)
    rows = []
    for place, (label, row) in enumerate(groups.items()):
        middle = top + 4 + step * (place + 0.5)
        found = []
        for order, (name, value) in enumerate(row.items()):
            # A little apart, so that equal scores do not hide each other.
            y = round(middle + (order - (len(row) - 1) / 2) * min(4.5, step / 5), 1)
            look = conditions.index(name) % _LOOKS
            found.append((look, across(value), y, f"{label}, {name}: {value:.3f}"))
        ends = [x for _, x, _, _ in found]
        short = label if len(label) <= _LETTERS else label[: _LETTERS - 1] + "…"
        # of the line through the markers
        ends_at = {"first": min(ends), "last": max(ends)}
        rows.append({"label": short, "y": middle, **ends_at, "marks": found})
    box = (width, bottom + 24, left, width - 16, top, bottom)
    return {
        **_frame(ident, title, f"{title} by condition", box),
        "x_ticks": [(across(value), tick(value)) for value in marks],
        "rows": rows,
    }
