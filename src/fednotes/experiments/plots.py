"""A gathered grid as a picture: curves where it has an `x`, else a row of dots a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

Rows = list[Mapping[str, Any]]


def plot(table: Mapping[str, Any], path: Path) -> bool:
    """Strict F1 with standard deviations, one panel a column of the table, as a PNG.

    False where matplotlib (the extra "plot") is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = list(table["rows"][0]["scores"])
    labels = list(dict.fromkeys(row["label"] for row in table["rows"]))
    height = 3.0 if table["x"] else 1.2 + 0.32 * len(labels)
    figure, panels = pyplot.subplots(
        1, len(columns), figsize=(2.9 * len(columns), height), sharey=not table["x"], squeeze=False
    )
    figure.set_layout_engine("constrained")
    for panel, column in zip(panels[0], columns, strict=True):
        for condition, rows in _by_condition(table).items():
            scores = [row["scores"][column]["strict"]["f1"] for row in rows]
            means = [100 * score["mean"] for score in scores]
            spread = [100 * (score["std"] or 0) for score in scores]
            if table["x"]:
                places = [row["x"] for row in rows]
                panel.errorbar(places, means, spread, marker="o", capsize=3, label=condition)
            else:
                heights = [-labels.index(row["label"]) for row in rows]
                panel.errorbar(means, heights, xerr=spread, fmt="o", capsize=3, label=condition)
        panel.set_title(column)
        panel.set_xlabel(table["x"] or "strict F1 (%)")
        if not table["x"]:
            panel.set_yticks([-i for i in range(len(labels))], labels)
    if table["x"]:
        panels[0][0].set_ylabel("strict F1 (%)")
    panels[0][-1].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _by_condition(table: Mapping[str, Any]) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for row in table["rows"]:
        found.setdefault(row["condition"], []).append(row)
    return found
