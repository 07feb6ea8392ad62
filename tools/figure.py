"""Draw figures in docs/figures from the tables in docs/results.md and performance.md.

    python tools/figure.py [--out docs/figures]

    silos    silos alone, plain averaging, the default, and all notes in one place ("What a
             federation gains"; `fednotes reproduce pays-silos`)
    privacy  scores by ε, and without differential privacy ("What differential privacy costs";
             `pays-privacy`, `phenotype-privacy`)
    growth   seconds and memory by the size of the work ("Growth" in docs/performance.md)
    sites    seconds per round and memory by the number of sites, fednotes and Flower
             ("Compared with Flower's simulation", there too)

The figures contain no number that is not in these tables.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
NAME = r"^\| maccrobat, (\d+ silos|one place)(?:, ([^|]+?))? \|"
ROW = re.compile(rf"{NAME}(?:[^|]+\|){{3}} ([\d.]+) ± ([\d.]+) \|", re.MULTILINE)
# | work | size | seconds | MB |
GROWTH_ROW = re.compile(
    r"^\| ([a-z][^|]+) \| ([\d,]+) \| ([\d.e-]+) \| (\d+) \|$", re.MULTILINE
)
# | sites | fednotes, s per round | MB | Flower, s per round | MB |
SITES_ROW = re.compile(
    r"^\| ([\d,]+) \| ([\d.]+) \| ([\d,]+) \| ([\d.]+) \| ([\d,]+) \|$", re.MULTILINE
)
PROGRAMS = {"fednotes": "#0b6e6e", "Flower": "#c4572a"}
DRAWN = {
    "default": "together",
    "FedAvg": "together, plain averaging",
    "alone": "each alone",
}
COLOURS = {"default": "#0b6e6e", "FedAvg": "#8a8a8a", "alone": "#c4572a"}
PANELS = {
    "strict F1, %": ("FedNER", "distillation", "fine-tuning"),
    "mean AUROC, %": ("30,000 patients", "9,000 patients", "500 cases of CodiEsp"),
}
NONE = 16  # where scores without differential privacy are drawn, beside ε = 8
EPSILONS = (NONE, 8, 4, 2, 1)  # in the order of the table's columns
Scores = dict[str, dict[int, tuple[float, float]]]


def scores(page: str) -> Scores:
    """Return the mean and standard deviation of F1 by row and number of silos.

    Notes in one place count as one silo.
    """
    rows: Scores = {}
    for place, row, mean, spread in ROW.findall(page):
        silos = 1 if place == "one place" else int(place.split()[0])
        rows.setdefault(row, {})[silos] = (float(mean), float(spread))
    return rows


def draw(rows: Scores, out: Path) -> None:
    """Draw a line with standard deviations for each row."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    mean, spread = rows[""][1]
    silos = sorted(rows["default"])
    figure, axes = pyplot.subplots(figsize=(6.4, 2.9), dpi=150, layout="constrained")
    axes.axhspan(mean - spread, mean + spread, color="#dddddd", lw=0)
    axes.axhline(mean, color="#444444", lw=1.2, ls="--")
    last = silos[-1] * 1.04
    axes.text(last, mean + 1.0, "all notes in one place", color="#444444", va="bottom")
    for row, name in DRAWN.items():
        means, spreads = zip(*(rows[row][n] for n in silos), strict=True)
        axes.errorbar(
            silos, means, spreads, color=COLOURS[row], marker="o", lw=2, capsize=3
        )
        low = 1.6 if row == "default" else 0
        axes.text(
            last,
            means[-1] - low,
            name,
            color=COLOURS[row],
            va="top" if low else "center",
        )
    axes.set_xscale("log")
    axes.set_xticks(silos, [f"{n} silos" for n in silos])
    axes.minorticks_off()
    axes.set_xlim(silos[0] * 0.9, silos[-1] * 2.1)
    axes.set_ylim(15, 65)
    axes.set_ylabel("strict F1, %")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, metadata={"Software": None})


def prices(page: str) -> Scores:
    """Return the mean and standard deviation of the scores by method and ε.

    Columns without a number are left out.
    """
    prices_by_method: Scores = {}
    section = page.partition("## What differential privacy costs\n")[2].partition(
        "\n## "
    )[0]
    for line in section.splitlines():
        method, *cells = (cell.strip() for cell in line.strip("| ").split(" | "))
        if any(method in methods for methods in PANELS.values()):
            pairs = zip(EPSILONS, cells, strict=False)
            numbers = {
                at: cell.partition(" (")[0].split(" ± ")
                for at, cell in pairs
                if " ± " in cell
            }
            prices_by_method[method] = {
                at: (float(mean), float(spread))
                for at, (mean, spread) in numbers.items()
            }
    return prices_by_method


def draw_prices(prices_by_method: Scores, out: Path) -> None:
    """Draw a line with standard deviations for each method, and a panel for each score."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, 2, figsize=(8.4, 3.1), dpi=150, layout="constrained"
    )
    for axes, (kind, methods) in zip(panels, PANELS.items(), strict=True):
        for method, colour in zip(methods, COLOURS.values(), strict=False):
            places = sorted(prices_by_method[method])
            means, spreads = zip(
                *(prices_by_method[method][at] for at in places), strict=True
            )
            finite = [at for at in places if at != NONE]
            private = slice(0, len(finite))
            style = {"color": colour, "capsize": 3, "lw": 2, "label": method}
            axes.errorbar(finite, means[private], spreads[private], marker="o", **style)
            style |= {"label": None, "marker": "D", "mfc": "white"}
            axes.errorbar(
                places[len(finite) :],
                means[len(finite) :],
                spreads[len(finite) :],
                **style,
            )
        axes.set_xscale("log")
        axes.set_xticks([1, 2, 4, 8, NONE], ["ε = 1", "2", "4", "8", "none"])
        axes.minorticks_off()
        axes.set_ylabel(kind)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, metadata={"Software": None})


class Point(NamedTuple):
    """A row of the table of growth."""

    size: float
    seconds: float
    megabytes: float


def growth(page: str) -> dict[str, list[Point]]:
    """Return the measured sizes of each kind of work, from the table of a page."""
    section = page.partition("\n## Growth\n")[2].partition("\n## ")[0]
    points: dict[str, list[Point]] = {}
    for work, *cells in GROWTH_ROW.findall(section):
        numbers = (float(cell.replace(",", "")) for cell in cells)
        points.setdefault(work, []).append(Point(*numbers))
    return points


def draw_growth(points: dict[str, list[Point]], out: Path) -> None:
    """Draw a column for each kind of work: seconds above, memory below.

    The dashed line is linear growth, drawn through the largest size.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(
        2, len(points), figsize=(11, 4.2), dpi=150, layout="constrained"
    )
    for column, (work, measured) in enumerate(points.items()):
        sizes = [point.size for point in measured]
        panels = {
            "CPU seconds": [point.seconds for point in measured],
            "MB": [max(point.megabytes, 1.0) for point in measured],
        }
        for axes, (unit, values) in zip(rows[:, column], panels.items(), strict=True):
            linear = [values[-1] * size / sizes[-1] for size in sizes]
            axes.plot(sizes, linear, color="#8a8a8a", ls="--", lw=1)
            axes.plot(sizes, values, color="#0b6e6e", marker="o", lw=2)
            axes.set_xscale("log")
            axes.set_yscale("log")
            ends = (sizes[0], sizes[-1])
            axes.set_xticks(ends, [f"{size:,.0f}" for size in ends])
            extremes = (min(values), max(values))
            axes.set_yticks(extremes, [f"{value:g}" for value in extremes])
            axes.minorticks_off()
            axes.spines[["top", "right"]].set_visible(False)
            if column == 0:
                axes.set_ylabel(unit)
        name, _, detail = work.partition(", ")
        rows[0, column].set_title(f"{name}\n{detail}", fontsize=9)
    figure.savefig(out, metadata={"Software": None})


def sites_points(page: str) -> dict[str, list[Point]]:
    """Return each program's measured numbers of sites, from the table of a page."""
    heading = "\n### Compared with Flower's simulation\n"
    section = page.partition(heading)[2].partition("\n## ")[0]
    points: dict[str, list[Point]] = {program: [] for program in PROGRAMS}
    for cells in SITES_ROW.findall(section):
        sites, *numbers = (float(cell.replace(",", "")) for cell in cells)
        points["fednotes"].append(Point(sites, *numbers[:2]))
        points["Flower"].append(Point(sites, *numbers[2:]))
    return points


def draw_sites(points: dict[str, list[Point]], out: Path) -> None:
    """Draw seconds per round, and memory beside; a line for each program."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(8.4, 3.1), dpi=150, layout="constrained"
    )
    for program, measured in points.items():
        sites = [point.size for point in measured]
        panels = {
            left: [point.seconds for point in measured],
            right: [point.megabytes for point in measured],
        }
        for axes, values in panels.items():
            axes.plot(sites, values, color=PROGRAMS[program], marker="o", lw=2)
            axes.text(
                sites[-1] * 1.25,
                values[-1],
                program,
                color=PROGRAMS[program],
                va="center",
            )
    ticks = {left: (0.01, 0.1, 1, 10, 50), right: (500, 1000, 2000, 5000)}
    left.set_ylabel("seconds per round")
    right.set_ylabel("MB, all processes")
    for axes, values in ticks.items():
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(sites, [f"{number:,.0f}" for number in sites])
        axes.set_xlim(sites[0] * 0.8, sites[-1] * 5)
        axes.minorticks_off()
        axes.set_xlabel("sites")
        axes.set_yticks(values, [f"{value:,g}" for value in values])
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    out = parser.parse_args().out
    results = (ROOT / "docs" / "results.md").read_text("utf-8")
    performance = (ROOT / "docs" / "performance.md").read_text("utf-8")
    draw(scores(results), out / "silos.png")
    draw_prices(prices(results), out / "privacy.png")
    draw_growth(growth(performance), out / "growth.png")
    draw_sites(sites_points(performance), out / "sites.png")


if __name__ == "__main__":
    main()
