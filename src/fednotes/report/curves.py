"""The parts of the report that show a run's course: validation F1, loss, and bytes sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from fednotes.report.charts import Point, Series, figure, legend, line_chart
from fednotes.report.run import Json, Run, finite, get, mapping, size

_POOLED = "pooled"  # stands for all sites in the lines of that condition
_PANELS = 24  # sites with curves of their own; a run of 100 sites has them in the tables
# What evaluations measure: over all sites, at one site, in short, in long (together and by site).
_JUDGED = (
    (
        "valid_f1",
        "f1",
        "F1",
        ("Strict F1 on the validation sets", "Strict F1 on each site's validation set"),
    ),
    (
        "valid_loss",
        "valid_loss",
        "Held-out loss",
        ("Loss on masked words of held-out notes", "Held-out loss of each site"),
    ),
)
# The same of a run that finds phenotypes.
_OF_PATIENTS = {
    "valid_f1": ("Macro F1 on validation patients", "Macro F1 on each site's validation patients"),
    "valid_loss": (
        "Loss of stage 1 on the codes of validation patients",
        "Loss of stage 1 on the codes of each site's validation patients",
    ),
}
_THEN = ", of stage 1 and then of the diseases' classifiers"
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))


def training_curves(run: Run) -> str:
    """Validation F1 and loss, together and by site. Empty if there is no `metrics.jsonl`."""
    key = x_key(run)
    sites = list(dict.fromkeys(name for line in run.lines for name in _sites(line)))
    several = len([name for name in sites if name != _POOLED])
    shown = sites[:_PANELS]
    found = [each for each in _JUDGED if any(each[0] in line for line in run.lines)]
    together, by_site = [], []
    words = []
    for total, own, short, what in found or _JUDGED[:1]:
        words.append(_OF_PATIENTS[total] if of_patients(run) else what)
        overall = _overall(run, key, total, several)
        together.append(_Curves(f"mean-{own}", f"{short}, all sites", overall))
        by_site.append(_by_site(run, key, own, shown))
    overall = _overall(run, key, "loss", several)
    together.append(_Curves("mean-loss", "Loss, all sites", overall))
    wide = (460, 230) if len(together) < 3 else (340, 200)
    figures = [
        (together, f"{'. '.join(w[0] for w in words)}, and training loss.", wide, None),
        *(
            (judged, f"{w[1]}, on one scale.", (340, 200), _extent(judged))
            for judged, w in zip(by_site, words, strict=True)
        ),
        (
            _by_site(run, key, "loss", shown),
            f"Training loss at each site{_THEN if of_patients(run) else ''}; the scales differ.",
            (340, 200),
            None,
        ),
    ]
    parts = []
    for curves, caption, shape, y_range in figures:
        charts = [c.draw(key or "evaluation", caption, shape, y_range) for c in curves if c.series]
        if charts:
            parts.append(figure(charts, caption, run.source))
    if not parts:
        return ""
    more = len(sites) - _PANELS
    note = f"<p>{more} more sites have no curves here; the tables hold all.</p>\n"
    return (
        "<section>\n<h2>Training</h2>\n"
        f"{legend(run.conditions)}{''.join(parts)}{note if more > 0 else ''}</section>\n"
    )


def of_patients(run: Run) -> bool:
    """Whether a run is about patients' phenotypes or codes."""
    mean = mapping(run.summary.get("mean"))
    if not any(map(mapping, mean.values())):  # nothing was held out to be judged
        return run.summary.get("method") == "phenotype"
    return any({"phenotypes", "codes"} & mapping(scores).keys() for scores in mean.values())


def _by_site(run: Run, key: str, y: str, sites: Sequence[str]) -> list[_Curves]:
    return [_Curves(f"{y}-{i}", name, _of_site(run, key, y, name)) for i, name in enumerate(sites)]


@dataclass(frozen=True, slots=True)
class _Curves:
    """One chart to be: a curve for each condition."""

    ident: str
    title: str
    series: Sequence[Series]

    def draw(self, x: str, what: str, shape: tuple[int, int], y_range: Point | None) -> str:
        ends = "; ".join(f"{s.name} ends at {s.points[-1][1]:.4g}" for s in self.series)
        return line_chart(
            self.ident,
            self.title,
            f"{what} {ends}.",
            self.series,
            x_label=x,
            y_range=y_range,
            size=shape,
        )


def _extent(charts: Sequence[_Curves]) -> tuple[float, float] | None:
    """The lowest and highest value of several charts, for a common scale."""
    values = [y for chart in charts for series in chart.series for _, y in series.points]
    return (min(values), max(values)) if values else None


def traffic(run: Run) -> str:
    """Bytes up and down, cumulative over rounds. Empty if no line has any."""
    lines = [line for line in run.lines if line.get("condition", "federated") == "federated"]
    key = "round" if all(finite(line.get("round")) is not None for line in lines) else ""
    totals = {
        name: _cumulative(lines, key, name, finite(run.summary.get(name)))
        for name in ("bytes_up", "bytes_down")
    }
    largest = max((y for points in totals.values() for _, y in points), default=0.0)
    if not largest:
        return ""
    factor, unit = next((f, u) for f, u in _UNITS if largest >= f or f == 1.0)
    names = ("from the sites (up)", "to the sites (down)")
    series = [
        Series(name, look, [(x, y / factor) for x, y in points])
        for look, (name, points) in enumerate(zip(names, totals.values(), strict=True), 3)
        if points
    ]
    chart = line_chart(
        "bytes",
        "Bytes sent since the start",
        "; ".join(f"{s.name}: {size(s.points[-1][1] * factor)} at the end" for s in series),
        series,
        x_label=key or "evaluation",
        y_range=(0.0, largest / factor),
        size=(680, 240),
        unit=f" {unit}",
    )
    caption = "Federated training, all sites together, cumulative."
    return (
        "<section>\n<h2>Communication</h2>\n"
        f"{legend(names, 3)}{figure([chart], caption, run.source)}</section>\n"
    )


def x_key(run: Run) -> str:
    """What the curves run over: rounds; without them epochs; else the evaluations, counted."""
    for key in ("round", "epoch"):
        if run.lines and all(finite(line.get(key)) is not None for line in run.lines):
            return key
    return ""


def _sites(line: Json) -> Json:
    if "site" in line:  # a line of one site alone
        found = {key: line.get(key) for key in ("loss", "valid_loss")}
        return {str(line["site"]): {"f1": line.get("valid_f1"), **found}}
    return mapping(line.get("sites"))


def _points(lines: Sequence[Json], key: str, values: Sequence[float | None]) -> list[Point]:
    """(x, y) where both are there, one point an x (the later line), x ascending."""
    places: dict[float, float] = {}
    for order, (line, y) in enumerate(zip(lines, values, strict=True), 1):
        x = finite(line.get(key)) if key else float(order)
        if x is not None and y is not None:
            places[x] = y
    return sorted(places.items())


def _lines_of(run: Run, condition: str) -> list[Json]:
    return [line for line in run.lines if str(line.get("condition", "federated")) == condition]


def _overall(run: Run, key: str, y: str, sites: int) -> list[Series]:
    found = []
    for look, condition in enumerate(run.conditions):
        # A line of one site out of several is no mean over them.
        lines = [
            line
            for line in _lines_of(run, condition)
            if not _sites(line) or len(_sites(line)) == sites or [*_sites(line)] == [_POOLED]
        ]
        points = _points(lines, key, [finite(line.get(y)) for line in lines])
        if points:
            found.append(Series(condition, look, points))
    return found


def _of_site(run: Run, key: str, y: str, name: str) -> list[Series]:
    found = []
    for look, condition in enumerate(run.conditions):
        lines = [line for line in _lines_of(run, condition) if name in _sites(line)]
        values = [get(_sites(line), name, y) for line in lines]
        if y == "f1":  # some write it under the name of the overall score
            spare = [get(_sites(line), name, "valid_f1") for line in lines]
            values = [s if v is None else v for v, s in zip(values, spare, strict=True)]
        points = _points(lines, key, values)
        if points:
            found.append(Series(condition, look, points))
    return found


def _cumulative(lines: Sequence[Json], key: str, name: str, total: float | None) -> list[Point]:
    """Bytes since the start, whether the lines count since the start or since the line before.

    The two are told apart by the run's total, or, without one, by whether the numbers ever
    fall or stand still.
    """
    kept = [line for line in lines if finite(line.get(name)) is not None]
    numbers = [float(line[name]) for line in kept]
    if not numbers:
        return []
    if total is not None:
        running = abs(numbers[-1] - total) <= abs(sum(numbers) - total)
    else:
        running = all(a < b for a, b in pairwise(numbers))
    return _points(kept, key, numbers if running else list(accumulate(numbers)))
