"""A gathered grid as a picture: curves where it has an `x`, else a row of dots a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fednotes.experiments.tables import is_plain

Rows = list[Mapping[str, Any]]


def plot(table: Mapping[str, Any], path: Path) -> bool:
    """Strict F1 of each site, or the table's own columns, with standard deviations: a panel each.

    False where matplotlib (the extra "plot") is not installed, or the table has no rows or has
    one a disease.
    """
    if not table.get("rows") or table.get("by_output"):
        return False
    try:
        import matplotlib
    except ModuleNotFoundError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = table["columns"] or list(table["rows"][0]["scores"])
    labels = list(dict.fromkeys(row["label"] for row in table["rows"]))
    height = 3.0 if table["x"] else 1.2 + 0.32 * len(labels)
    figure, panels = pyplot.subplots(
        1, len(columns), figsize=(2.9 * len(columns), height), sharey=not table["x"], squeeze=False
    )
    figure.set_layout_engine("constrained")
    for panel, column in zip(panels[0], columns, strict=True):
        for condition, rows in _by_condition(table).items():
            scores = [_score(table, row, column) for row in rows]
            factor = 1 if is_plain(column) else 100
            means = [float("nan") if s["mean"] is None else factor * s["mean"] for s in scores]
            spread = [factor * (score["std"] or 0) for score in scores]
            if table["x"]:
                places = [row["x"] for row in rows]
                panel.errorbar(places, means, spread, marker="o", capsize=3, label=condition)
            else:
                heights = [-labels.index(row["label"]) for row in rows]
                panel.errorbar(means, heights, xerr=spread, fmt="o", capsize=3, label=condition)
        panel.set_title(column)
        panel.set_xlabel(table["x"] or ("" if table["columns"] else "strict F1 (%)"))
        if not table["x"]:
            panel.set_yticks([-i for i in range(len(labels))], labels)
    if table["x"] and not table["columns"]:
        panels[0][0].set_ylabel("strict F1 (%)")
    panels[0][-1].legend()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _score(table: Mapping[str, Any], row: Mapping[str, Any], column: str) -> Mapping[str, Any]:
    found = row["columns"][column] if table["columns"] else row["scores"][column]["strict"]["f1"]
    assert isinstance(found, Mapping)
    return found


def _by_condition(table: Mapping[str, Any]) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for row in table["rows"]:
        found.setdefault(row["condition"], []).append(row)
    return found
