"""Draws docs/figures/silos.png from the table "What a federation pays" in docs/results.md.

    python tools/figure.py [--out docs/figures/silos.png]

What silos have alone, by plain averaging and by the default, and what all notes in one place have,
as the table says it: the picture has no number of its own. The table's runs are those of
`fednotes reproduce pays-silos`.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAME = r"^\| maccrobat, (\d+ silos|one place)(?:, ([^|]+?))? \|"
ROW = re.compile(rf"{NAME}(?:[^|]+\|){{3}} ([\d.]+) ± ([\d.]+) \|", re.MULTILINE)
DRAWN = {"default": "together", "FedAvg": "together, plain averaging", "alone": "each alone"}
COLOURS = {"default": "#0b6e6e", "FedAvg": "#8a8a8a", "alone": "#c4572a"}
Scores = dict[str, dict[int, tuple[float, float]]]


def scores(page: str) -> Scores:
    """row: silos: mean and standard deviation of F1; of notes in one place it is silos 1."""
    found: Scores = {}
    for place, row, mean, spread in ROW.findall(page):
        silos = 1 if place == "one place" else int(place.split()[0])
        found.setdefault(row, {})[silos] = (float(mean), float(spread))
    return found


def draw(found: Scores, out: Path) -> None:
    """A line a row, with its standard deviations."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    mean, spread = found[""][1]
    silos = sorted(found["default"])
    figure, axes = pyplot.subplots(figsize=(6.4, 2.9), dpi=150, layout="constrained")
    axes.axhspan(mean - spread, mean + spread, color="#dddddd", lw=0)
    axes.axhline(mean, color="#444444", lw=1.2, ls="--")
    last = silos[-1] * 1.04
    axes.text(last, mean + 1.0, "all notes in one place", color="#444444", va="bottom")
    for row, name in DRAWN.items():
        means, spreads = zip(*(found[row][n] for n in silos), strict=True)
        axes.errorbar(silos, means, spreads, color=COLOURS[row], marker="o", lw=2, capsize=3)
        low = 1.6 if row == "default" else 0
        axes.text(last, means[-1] - low, name, color=COLOURS[row], va="top" if low else "center")
    axes.set_xscale("log")
    axes.set_xticks(silos, [f"{n} silos" for n in silos])
    axes.minorticks_off()
    axes.set_xlim(silos[0] * 0.9, silos[-1] * 2.1)
    axes.set_ylim(15, 65)
    axes.set_ylabel("strict F1, %")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures" / "silos.png")
    draw(scores((ROOT / "docs" / "results.md").read_text("utf-8")), parser.parse_args().out)


if __name__ == "__main__":
    main()
