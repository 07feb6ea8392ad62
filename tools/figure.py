"""Draws docs/figures/silos.png and privacy.png from tables in docs/results.md.

    python tools/figure.py [--out docs/figures]

silos: what silos have alone, by plain averaging and by the default, and what all notes
in one place have ("What a federation gains"; `fednotes reproduce pays-silos`). privacy:
scores by ε, and without a promise ("What differential privacy costs"; `pays-privacy`,
`phenotype-privacy`). The pictures have no number of their own.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = r"^\| maccrobat, (\d+ silos|one place)(?:, ([^|]+?))? \|"
ROW = re.compile(rf"{NAME}(?:[^|]+\|){{3}} ([\d.]+) ± ([\d.]+) \|", re.MULTILINE)
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
NONE = 16  # where what has no promise stands beside ε = 8
EPSILONS = (NONE, 8, 4, 2, 1)  # as the columns go
Scores = dict[str, dict[int, tuple[float, float]]]


def scores(page: str) -> Scores:
    """row: silos: mean and standard deviation of F1; of notes in one place it is silos
    1."""
    rows: Scores = {}
    for place, row, mean, spread in ROW.findall(page):
        silos = 1 if place == "one place" else int(place.split()[0])
        rows.setdefault(row, {})[silos] = (float(mean), float(spread))
    return rows


def draw(rows: Scores, out: Path) -> None:
    """A line a row, with its standard deviations."""
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
    """method: ε: mean and standard deviation; a column without a number is left out."""
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
    """A line a method, with standard deviations; a panel a kind of score."""
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
            promised = slice(0, len(finite))
            style = {"color": colour, "capsize": 3, "lw": 2, "label": method}
            axes.errorbar(
                finite, means[promised], spreads[promised], marker="o", **style
            )
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures")
    page, out = (
        (ROOT / "docs" / "results.md").read_text("utf-8"),
        parser.parse_args().out,
    )
    draw(scores(page), out / "silos.png")
    draw_prices(prices(page), out / "privacy.png")


if __name__ == "__main__":
    main()
