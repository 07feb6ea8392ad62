"""Draw the table of a grid, and the entropies of attention heads."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fednotes.apps.experiments.head_measures import Heads
from fednotes.apps.experiments.tables import Table, TableRow, is_plain
from fednotes.core.errors import needs
from fednotes.core.store import write_out

# Models are distinguishable with every common colour vision, and by their markers.
_COLOURS = ("#0072b2", "#c85200", "#00835f", "#a3487f", "#7d6608", "#5f6b78")
_MARKERS = "osD^vP"


def plot_results(table: Table, path: Path) -> bool:
    """Draw a panel for each site's strict F1, or for each of the grid's own columns.

    Args:
        table: The table of a grid.
        path: The image to write.

    Returns:
        Whether an image was written. None is written without matplotlib (the extra
        "plot"), nor for a table without rows or with a row per disease.
    """
    if not table.get("rows") or table.get("by_output"):
        return False
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False

    columns = table["columns"] or list(table["rows"][0]["scores"])
    labels = list(dict.fromkeys(row["label"] for row in table["rows"]))
    height = 3.0 if table["x"] else 1.2 + 0.32 * len(labels)
    figure = Figure(figsize=(2.9 * len(columns), height), layout="constrained")
    panels = figure.subplots(1, len(columns), sharey=not table["x"], squeeze=False)[0]
    for panel, column in zip(panels, columns, strict=True):
        _draw_panel(panel, table, column, labels)
    if table["x"] and not table["columns"]:
        panels[0].set_ylabel("strict F1 (%)")
    panels[-1].legend()
    figure.savefig(path, dpi=110)
    return True


def _draw_panel(panel: Any, table: Table, column: str, labels: Sequence[str]) -> None:
    """Draw one column: each condition with standard deviations."""
    for condition in dict.fromkeys(row["condition"] for row in table["rows"]):
        rows = [row for row in table["rows"] if row["condition"] == condition]
        means, deviations = _list_numbers(table, rows, column)
        if table["x"]:
            panel.errorbar(
                [row["x"] for row in rows],
                means,
                yerr=deviations,
                marker="o",
                capsize=3,
                label=condition,
            )
        else:
            panel.errorbar(
                means,
                [-labels.index(row["label"]) for row in rows],
                xerr=deviations,
                fmt="o",
                capsize=3,
                label=condition,
            )
    panel.set_title(column)
    if table["x"]:
        panel.set_xlabel(table["x"])
        return
    panel.set_xlabel("" if table["columns"] else "strict F1 (%)")
    panel.set_yticks([-place for place in range(len(labels))], labels)


def _list_numbers(
    table: Table, rows: Sequence[TableRow], column: str
) -> tuple[list[float], list[float]]:
    """Return the means and the standard deviations of a column, by row.

    A missing mean is NaN, and a missing deviation 0. Scores are returned in percent,
    and other numbers (bytes, seconds, errors) unchanged.

    Args:
        table: The table of a grid.
        rows: Some of its rows.
        column: A column of the table. If the table has no columns, the name of a site,
            whose strict F1 is returned.
    """
    has_columns = bool(table["columns"])
    factor = 1.0 if has_columns and is_plain(column) else 100.0
    if has_columns:
        numbers = [row["columns"][column] for row in rows]
    else:
        numbers = [row["scores"][column]["strict"]["f1"] for row in rows]
    means = [
        math.nan if number["mean"] is None else factor * number["mean"]
        for number in numbers
    ]
    deviations = [factor * (number["std"] or 0) for number in numbers]
    return means, deviations


def plot_entropy(heads: Mapping[str, Heads], path: Path) -> None:
    """Draw the entropies of heads by depth, as Clark et al. 2019 do in their figure 4.

    Each head is a dot, each model has a colour, and a line joins the means of layers.

    Args:
        heads: The measures of each model's heads by name.
        path: The image to write. It is written completely or not at all.

    Raises:
        MissingExtra: matplotlib is not installed.
        FednotesError: The file cannot be written.
    """
    with needs("matplotlib", "plot"):
        from matplotlib.figure import Figure
    layers = len(next(iter(heads.values())).entropy)
    width = max(5.2, 2.2 + 0.55 * layers)
    figure = Figure(figsize=(width, 3.9), layout="constrained")
    panel = figure.subplots()
    places = np.arange(1, layers + 1)
    step = 0.48 / len(heads)  # models are side by side within a layer
    for number, (name, each) in enumerate(heads.items()):
        shift = (number - (len(heads) - 1) / 2) * step
        style = number % len(_COLOURS)
        _draw_model(
            panel,
            places + shift,
            each,
            name=name,
            colour=_COLOURS[style],
            marker=_MARKERS[style],
        )

    panel.set(xticks=places, xlabel="layer", ylabel="entropy of attention (nats)")
    # A head that attends to one token is at 0, and its dot must be fully visible.
    panel.set_ylim(bottom=-0.02 * panel.get_ylim()[1])
    panel.set_title("Entropy of attention heads by depth", loc="left")
    panel.grid(axis="y", color="#e3e6e9", lw=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, title="line: mean of a layer", alignment="left")

    image = io.BytesIO()
    figure.savefig(image, dpi=130, format="png")
    write_out(path, image.getvalue())


def _draw_model(
    panel: Any, x: np.ndarray, heads: Heads, *, name: str, colour: str, marker: str
) -> None:
    """Draw the heads of one model, and a line through the means of its layers.

    Args:
        panel: The panel to draw on.
        x: (layers,) x coordinate of each layer.
        heads: The measures of the heads.
        name: The model.
        colour: Colour of dots and line.
        marker: Marker of dots and line.
    """
    panel.scatter(
        np.repeat(x, heads.entropy.shape[1]),
        heads.entropy.ravel(),
        s=16,
        c=colour,
        marker=marker,
        alpha=0.45,
        linewidths=0,
    )
    panel.plot(
        x,
        heads.average_by_layer(),
        color=colour,
        marker=marker,
        ms=5,
        lw=2,
        label=name,
    )
