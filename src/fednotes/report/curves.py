"""What the charts of a report draw: dots by site, and a run's course (F1, loss, bytes sent).

Everything is computed here, in units of the picture; `templates/charts.html` writes the SVG.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from fednotes.jobs.results import RunResult, mapping, number, size

Line = Mapping[str, Any]  # of metrics.jsonl
Point = tuple[float, float]
Mark = tuple[float, float, str]  # its place, and its tooltip

_DRAWN = 300  # at most so many points of a curve are drawn
_DOTS = 24  # curves of no more points get a marker at each
_LETTERS = 24  # of a row's label
_LOOKS = 6  # in the style sheet
_POOLED = "pooled"  # stands for all sites in the lines of that condition
_PANELS = 24  # sites with curves of their own; a run of 100 sites has them in the tables
# What evaluations measure: over all sites, at one site, in short, and in long: together, by site.
_JUDGED = {
    ("valid_f1", "f1", "F1"): (
        ("Strict F1 on the validation sets", "Strict F1 on each site's validation set"),
        ("Macro F1 on validation patients", "Macro F1 on each site's validation patients"),
    ),
    ("valid_loss", "valid_loss", "Held-out loss"): (
        ("Loss on masked words of held-out notes", "Held-out loss of each site"),
        (
            "Loss of stage 1 on the codes of validation patients",
            "Loss of stage 1 on the codes of each site's validation patients",
        ),
    ),
}
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


class Series(NamedTuple):
    """One curve. look: index of its style. points: (x, y), finite, x ascending."""

    name: str
    look: int
    points: Sequence[Point]


class Curve(NamedTuple):
    """A curve as it is drawn: an SVG path, and markers."""

    name: str
    look: int
    path: str
    marks: Sequence[Mark]


class Dots(NamedTuple):
    """A row of a dot chart. first, last: ends of the line through its markers (look first)."""

    label: str
    y: float
    first: float
    last: float
    marks: Sequence[tuple[int, float, float, str]]


@dataclass(frozen=True)
class Chart:
    """One picture, in units of the picture; ident: unique on the page."""

    ident: str
    title: str
    description: str
    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    x_label: str = ""
    x_ticks: Sequence[tuple[float, str]] = ()
    y_ticks: Sequence[tuple[float, str]] = ()
    curves: Sequence[Curve] = ()
    rows: Sequence[Dots] = ()


class Figure(NamedTuple):
    """Charts side by side with a caption."""

    charts: Sequence[Chart]
    caption: str


@dataclass(frozen=True)
class Axis:
    """Numbers onto a stretch of the picture, with round ticks."""

    ticks: Sequence[float]
    bounds: tuple[float, float]
    ends: tuple[float, float] = field(default=(0.0, 1.0))

    def at(self, value: float) -> float:
        """Where a number stands."""
        low, high = self.bounds
        low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
        place = self.ends[0] + (value - low) / (high - low) * (self.ends[1] - self.ends[0])
        return round(place, 1)


def ticks(low: float, high: float, about: int) -> list[float]:
    """Round numbers that enclose low and high, roughly `about` steps of 1, 2, 2.5 or 5 · 10ⁿ."""
    if high <= low:
        pad = abs(low) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next(m for m in (1, 2, 2.5, 5, 10) if rough <= m * power * (1 + 1e-9))
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
    x_label: str,
    y_range: Point | None = None,
    shape: tuple[int, int] = (340, 220),
    unit: str = "",
) -> Chart:
    """Curves over a common x axis. unit: after each y tick."""
    (width, height), xs = shape, [x for s in series for x, _ in s.points]
    ys = y_range or [y for s in series for _, y in s.points]
    rows = ticks(min(ys), max(ys), 4)
    left, right, top, bottom = 46, width - 14, 30, height - 38
    across = Axis(ticks(min(xs), max(xs), 5), (min(xs), max(xs)), (left, right))
    up = Axis(rows, (rows[0], rows[-1]), (bottom, top))
    curves = []
    for s in series:
        stride = math.ceil(len(s.points) / _DRAWN) or 1
        kept = [*s.points[:-1:stride], *s.points[-1:]]
        places = [(across.at(x), up.at(y)) for x, y in kept]
        marked = range(len(kept)) if len(kept) <= _DOTS else [len(kept) - 1]
        tips = [f"{s.name}, {x_label} {tick(kept[i][0])}: {kept[i][1]:.4g}{unit}" for i in marked]
        marks = [(*places[i], tip) for i, tip in zip(marked, tips, strict=True)]
        path = "L".join(f"{x} {y}" for x, y in places)
        curves.append(Curve(s.name, s.look % _LOOKS, path, marks))
    return Chart(
        *(ident, title, what, width, height, left, right, top, bottom, x_label),
        x_ticks=[(across.at(x), tick(x)) for x in across.ticks if min(xs) <= x <= max(xs)],
        y_ticks=[(up.at(y), tick(y) + unit) for y in rows],
        curves=curves,
    )


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
    across = Axis(marks, (marks[0], marks[-1]), (left, width - 16))
    rows = []
    for place, (label, row) in enumerate(groups.items()):
        middle = top + 4 + step * (place + 0.5)
        found = []
        for order, (name, value) in enumerate(row.items()):
            # A little apart, so that equal scores do not hide each other.
            y = round(middle + (order - (len(row) - 1) / 2) * min(4.5, step / 5), 1)
            look = conditions.index(name) % _LOOKS
            found.append((look, across.at(value), y, f"{label}, {name}: {value:.3f}"))
        places = [x for _, x, _, _ in found]
        short = label if len(label) <= _LETTERS else label[: _LETTERS - 1] + "…"
        rows.append(Dots(short, middle, min(places), max(places), found))
    return Chart(
        *(ident, title, f"{title} by condition", width, bottom + 24),
        *(left, width - 16, top, bottom),
        x_ticks=[(across.at(value), tick(value)) for value in marks],
        rows=rows,
    )


# ---- a run's course ----------------------------------------------------------------------------


class Course:
    """The lines of a run's metrics.jsonl. of_patients: whether they judge patients."""

    def __init__(self, lines: Sequence[Line], conditions: Sequence[str], of_patients: bool) -> None:
        self._lines, self._conditions, self._of_patients = lines, conditions, of_patients
        self._key = next((k for k in ("round", "epoch") if lines and _all_have(lines, k)), "")
        self._sites = list(dict.fromkeys(name for line in lines for name in _sites(line)))
        self.undrawn = max(0, len(self._sites) - _PANELS)

    def training(self) -> list[Figure]:
        """Validation scores and loss, together and by site."""
        judged = [j for j in _JUDGED if any(j[0] in line for line in self._lines)]
        judged = judged or [*_JUDGED][:1]
        words = [_JUDGED[each][self._of_patients] for each in judged]
        wide = (460, 230) if len(judged) < 2 else (340, 200)
        together = {
            ("mean-" + o, f"{short}, all sites"): self._overall(t) for t, o, short in judged
        }
        together["mean-loss", "Loss, all sites"] = self._overall("loss")
        then = ", of stage 1 and then of the diseases' classifiers" if self._of_patients else ""
        figures = [
            self._figure(together, f"{'. '.join(w[0] for w in words)}, and training loss.", wide)
        ]
        for (_, own, _), word in zip(judged, words, strict=True):
            figures.append(self._figure(self._by_site(own), f"{word[1]}, on one scale.", one=True))
        caption = f"Training loss at each site{then}; the scales differ."
        figures.append(self._figure(self._by_site("loss"), caption))
        return [made for made in figures if made.charts]

    def _figure(
        self,
        charts: Mapping[tuple[str, str], Sequence[Series]],
        caption: str,
        shape: tuple[int, int] = (340, 200),
        one: bool = False,
    ) -> Figure:
        """charts: ident and title → curves. one: all on one scale."""
        values = [y for each in charts.values() for series in each for _, y in series.points]
        scale = (min(values), max(values)) if one and values else None
        made = []
        for (ident, title), series in charts.items():
            if series:
                ends = "; ".join(f"{s.name} ends at {s.points[-1][1]:.4g}" for s in series)
                x_label = self._key or "evaluation"
                what = f"{caption} {ends}."
                made.append(line_chart(ident, title, what, series, x_label, scale, shape))
        return Figure(made, caption)

    def bytes_sent(self, result: RunResult) -> Figure | None:
        """Bytes up and down, cumulative over rounds; None if no line has any.

        Lines count since the start or since the line before. The two are told apart by the run's
        total, or, without one, by whether the numbers ever fall or stand still.
        """
        lines = [line for line in self._lines if _condition(line) == "federated"]
        key = "round" if _all_have(lines, "round") else ""
        totals: dict[str, list[Point]] = {}
        for name, words, total in (
            ("bytes_up", "from the sites (up)", result.bytes_up),
            ("bytes_down", "to the sites (down)", result.bytes_down),
        ):
            kept = [line for line in lines if number(line, name) is not None]
            sent = [float(line[name]) for line in kept]
            if sent and total is not None:
                running = abs(sent[-1] - total) <= abs(sum(sent) - total)
            else:
                running = all(a < b for a, b in pairwise(sent))
            totals[words] = _points(kept, key, sent if running else list(accumulate(sent)))
        largest = max((y for points in totals.values() for _, y in points), default=0.0)
        if not largest:
            return None
        factor, unit = next((f, u) for f, u in _UNITS if largest >= f or f == 1.0)
        ends = [f"{n}: {size(p[-1][1])} at the end" for n, p in totals.items() if p]
        series = [
            Series(name, look, [(x, y / factor) for x, y in points])
            for look, (name, points) in enumerate(totals.items(), 3)
            if points
        ]
        chart = line_chart(
            *("bytes", "Bytes sent since the start", "; ".join(ends), series, key or "evaluation"),
            shape=(680, 240),
            unit=f" {unit}",
        )
        return Figure([chart], "Federated training, all sites together, cumulative.")

    def _overall(self, y: str) -> list[Series]:
        """Of all sites: a line of one site out of several is no mean over them."""
        several = len([name for name in self._sites if name != _POOLED])

        def value(line: Line) -> float | None:
            own = [*_sites(line)]
            whole = not own or len(own) == several or own == [_POOLED]
            return number(line, y) if whole else None

        return self._series([(line, value(line)) for line in self._lines])

    def _by_site(self, y: str) -> dict[tuple[str, str], list[Series]]:
        made = {}
        for place, name in enumerate(self._sites[:_PANELS]):
            found = []
            for line in self._lines:
                value = number(_sites(line), name, y)
                if value is None and y == "f1":  # some write it under the overall score's name
                    value = number(_sites(line), name, "valid_f1")
                found.append((line, value))
            made[f"{y}-{place}", name] = self._series(found)
        return made

    def _series(self, values: Sequence[tuple[Line, float | None]]) -> list[Series]:
        """A curve for each condition that has points."""
        made = []
        for look, condition in enumerate(self._conditions):
            own = [(line, y) for line, y in values if _condition(line) == condition and _has(y)]
            lines, ys = [line for line, _ in own], [y for _, y in own if y is not None]
            if points := _points(lines, self._key, ys):
                made.append(Series(condition, look, points))
        return made


def _all_have(lines: Sequence[Line], key: str) -> bool:
    return all(number(line, key) is not None for line in lines)


def _has(value: float | None) -> bool:
    return value is not None


def _condition(line: Line) -> str:
    return str(line.get("condition", "federated"))


def _sites(line: Line) -> Mapping[str, Any]:
    if "site" in line:  # a line of one site alone
        found = {key: line.get(key) for key in ("loss", "valid_loss")}
        return {str(line["site"]): {"f1": line.get("valid_f1"), **found}}
    return mapping(line.get("sites"))


def _points(lines: Sequence[Line], key: str, values: Sequence[float]) -> list[Point]:
    """(x, y) where x is there, one point an x (the later line), x ascending."""
    places: dict[float, float] = {}
    for order, (line, y) in enumerate(zip(lines, values, strict=True), 1):
        x = number(line, key) if key else float(order)
        if x is not None:
            places[x] = y
    return sorted(places.items())
