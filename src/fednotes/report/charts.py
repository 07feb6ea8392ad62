"""Small SVG charts without any library: lines over rounds, and dots by site.

Colours, dashes and markers come from the page's style sheet by class ("c0", "c1", ...), so a
chart follows light, dark and print. Every chart has a title and a description for screen
readers, and every point a tooltip. All text is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fednotes.report.run import escape

Point = tuple[float, float]
Range = tuple[float, float]

STYLES = 6  # how many distinct looks the style sheet has
_DRAWN = 300  # at most so many points of a curve are drawn
_LETTERS = 24  # of a row's label
_DOTS = 24  # curves of no more points get a marker at each


@dataclass(frozen=True, slots=True)
class Series:
    """One curve. look: index of its style. points: (x, y), finite, x ascending."""

    name: str
    look: int
    points: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Axes:
    """The frame of a chart: data ranges onto a rectangle of the picture (SVG units)."""

    x: Range
    y: Range
    left: float
    right: float
    top: float
    bottom: float

    def at(self, x: float, y: float) -> Point:
        """A data point's place in the picture."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return (
            self.left + across * (self.right - self.left),
            self.bottom - up * (self.bottom - self.top),
        )


def line_chart(
    ident: str,
    title: str,
    description: str,
    series: Sequence[Series],
    *,
    x_label: str,
    y_range: Range | None = None,
    size: tuple[int, int] = (340, 220),
    unit: str = "",
) -> str:
    """Curves over a common x axis. ident: unique on the page. unit: after each y tick."""
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points]
    width, height = size
    y_ticks = ticks(*(y_range or (min(ys), max(ys))), 4)
    x_ticks = ticks(min(xs), max(xs), 5)
    axes = Axes(
        _widen((min(xs), max(xs))), _widen((y_ticks[0], y_ticks[-1])),
        left=46, right=width - 14, top=30, bottom=height - 38,
    )  # fmt: skip
    parts = [_text(4, 14, title, "chart-title")]
    for value in y_ticks:
        _, y = axes.at(axes.x[0], value)
        parts.append(f'<path class="grid" d="M{axes.left} {y:.1f}H{axes.right}"/>')
        parts.append(_text(axes.left - 6, y + 3.5, number(value) + unit, "tick end"))
    for value in x_ticks:
        if axes.x[0] <= value <= axes.x[1]:
            x, _ = axes.at(value, axes.y[0])
            parts.append(_text(x, axes.bottom + 15, number(value), "tick middle"))
    parts.append(f'<path class="axis" d="M{axes.left} {axes.bottom}H{axes.right}"/>')
    parts.append(_text((axes.left + axes.right) / 2, height - 6, x_label, "tick middle"))
    parts.extend(_curve(s, axes, x_label, unit) for s in series)
    return _svg(ident, title, description, width, height, parts)


def dot_chart(
    ident: str,
    title: str,
    description: str,
    rows: Sequence[tuple[str, Mapping[str, float]]],
    looks: Mapping[str, int],
    *,
    width: int = 460,
) -> str:
    """A row for each (label, values by condition), a marker for each value."""
    values = [v for _, row in rows for v in row.values()]
    marks = ticks(min(values), max(values), 5)
    step = 34 if len(rows) <= 24 else 20
    letters = min(_LETTERS, max(len(label) for label, _ in rows))
    axes = Axes(
        _widen((marks[0], marks[-1])), (0.0, 1.0),
        left=max(124, 16 + 7 * letters), right=width - 16, top=30, bottom=34 + step * len(rows),
    )  # fmt: skip
    parts = [_text(4, 14, title, "chart-title")]
    for value in marks:
        x, _ = axes.at(value, 0)
        parts.append(f'<path class="grid" d="M{x:.1f} {axes.top}V{axes.bottom}"/>')
        parts.append(_text(x, axes.bottom + 16, number(value), "tick middle"))
    for place, (label, row) in enumerate(rows):
        middle = axes.top + 4 + step * (place + 0.5)
        parts.append(_text(axes.left - 12, middle + 4, shorten(label, _LETTERS), "label end"))
        across = {name: axes.at(value, 0)[0] for name, value in row.items()}
        ends = (min(across.values()), max(across.values())) if across else (axes.left, axes.left)
        parts.append(f'<path class="span" d="M{ends[0]:.1f} {middle:.1f}H{ends[1]:.1f}"/>')
        for order, (name, x) in enumerate(across.items()):
            # A little apart, so that equal scores do not hide each other.
            y = middle + (order - (len(across) - 1) / 2) * min(4.5, step / 5)
            tip = f"{label}, {name}: {row[name]:.3f}"
            parts.append(marker(looks[name], x, y, tip, 4.5))
    return _svg(ident, title, description, width, int(axes.bottom) + 24, parts)


def marker(look: int, x: float, y: float, tip: str = "", radius: float = 3.0) -> str:
    """The marker of a style: circle, disc, diamond, square, triangle, cross by turns."""
    r, d, w = radius, radius * 1.25, radius * 2
    shapes = (
        f'<circle class="c0 mark" cx="{x:.1f}" cy="{y:.1f}" r="{r}">',
        f'<circle class="c1 mark" cx="{x:.1f}" cy="{y:.1f}" r="{r}">',
        f'<path class="c2 mark" d="M{x:.1f} {y - d:.1f}l{d} {d}l-{d} {d}l-{d} -{d}z">',
        f'<path class="c3 mark" d="M{x - r:.1f} {y - r:.1f}h{w}v{w}h-{w}z">',
        f'<path class="c4 mark" d="M{x:.1f} {y - d:.1f}l{d} {2 * d}h-{2 * d}z">',
        f'<path class="c5 mark" d="M{x - r:.1f} {y - r:.1f}l{w} {w}m0 -{w}l-{w} {w}">',
    )
    shape = shapes[look % STYLES]
    return f"{shape}{f'<title>{escape(tip)}</title>' if tip else ''}</{shape[1:].split()[0]}>"


def swatch(look: int) -> str:
    """A sample of a style, for a legend."""
    return (
        '<svg class="swatch" viewBox="0 0 30 12" width="30" height="12" aria-hidden="true">'
        f'<path class="c{look % STYLES} curve" d="M1 6H29"/>{marker(look, 15, 6)}</svg>'
    )


def legend(names: Sequence[str], first: int = 0) -> str:
    """A list of samples; the looks count from `first`."""
    items = "".join(
        f"<li>{swatch(look)}{escape(name)}</li>" for look, name in enumerate(names, first)
    )
    return f'<ul class="legend">{items}</ul>\n'


def figure(charts: Sequence[str], caption: str, source: str) -> str:
    """Charts side by side with a caption. source: seed and command, already HTML."""
    css = "panels" if len(charts) > 1 else "panel"
    return (
        f'<figure>\n<div class="{css}">\n' + "\n".join(charts) + "\n</div>\n"
        f'<figcaption>{escape(caption)} <span class="source">{source}</span></figcaption>\n'
        "</figure>\n"
    )


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


def number(value: float) -> str:
    """A tick's label: no trailing zeros, thousands set apart."""
    if abs(value) >= 1000 and value == round(value):
        return f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.6g}"


def shorten(label: str, length: int) -> str:
    """A label that fits its place."""
    return label if len(label) <= length else label[: length - 1] + "…"


def _curve(series: Series, axes: Axes, x_label: str, unit: str) -> str:
    points = list(series.points)
    stride = math.ceil(len(points) / _DRAWN) or 1
    kept = points[:-1:stride] + points[-1:]
    places = [axes.at(x, y) for x, y in kept]
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    look = series.look % STYLES
    parts = [f'<path class="c{look} curve" d="M{path}"><title>{escape(series.name)}</title></path>']
    marked = range(len(kept)) if len(kept) <= _DOTS else [len(kept) - 1]
    for i in marked:
        tip = f"{series.name}, {x_label} {number(kept[i][0])}: {kept[i][1]:.4g}{unit}"
        parts.append(marker(look, *places[i], tip, 2.5))
    return "".join(parts)


def _widen(bounds: Range) -> Range:
    low, high = bounds
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _text(x: float, y: float, text: str, css: str) -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _svg(
    ident: str, title: str, description: str, width: int, height: int, parts: Sequence[str]
) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'style="max-width:{width * 1.2:.0f}px" aria-labelledby="{ident}-t {ident}-d">'
        f'<title id="{ident}-t">{escape(title)}</title>'
        f'<desc id="{ident}-d">{escape(description)}</desc>{"".join(parts)}</svg>'
    )
