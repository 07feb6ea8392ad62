"""The attention analysis as pictures: entropy by depth, and how a model's heads relate."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fednotes.core.errors import FednotesError, MissingExtra
from fednotes.core.store import replace_file
from fednotes.metrics.attention import Floats, Heads

# Told apart with every common colour vision, as in the report, and by marker.
_COLOURS = ("#0072b2", "#c85200", "#00835f", "#a3487f", "#7d6608", "#5f6b78")
_MARKERS = "osD^vP"


def plots(heads: Mapping[str, Heads], folder: Path) -> tuple[Path, ...]:
    """entropy_by_depth.png and js_heads.png in `folder`; each is whole or not there.

    Raises MissingExtra without matplotlib, FednotesError where a file cannot be written.
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise MissingExtra("matplotlib", "plot") from None
    matplotlib.use("Agg")
    return (
        _save(_entropy_by_depth(heads), folder / "entropy_by_depth.png"),
        _save(_js_heads(heads), folder / "js_heads.png"),
    )


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot

    picture = io.BytesIO()
    try:
        figure.savefig(picture, dpi=130, format="png")
        replace_file(path, picture.getvalue(), mode=0o666)
    except OSError as error:
        raise FednotesError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        pyplot.close(figure)
    return path


def _entropy_by_depth(heads: Mapping[str, Heads]) -> Any:
    """A dot a head, a line through the layers' means, a colour a model (Clark et al., fig. 4)."""
    from matplotlib import pyplot

    layers = len(next(iter(heads.values())).entropy)
    figure, panel = pyplot.subplots(figsize=(max(5.2, 2.2 + 0.55 * layers), 3.9))
    figure.set_layout_engine("constrained")
    places = np.arange(1, layers + 1)
    step = 0.48 / len(heads)  # models stand side by side within a layer
    for number, (name, each) in enumerate(heads.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        marker = _MARKERS[number % len(_MARKERS)]
        x = places + (number - (len(heads) - 1) / 2) * step
        across = np.repeat(x, each.entropy.shape[1])
        panel.scatter(
            across, each.entropy.ravel(), s=16, c=colour, marker=marker, alpha=0.45, linewidths=0
        )
        panel.plot(x, each.by_depth, color=colour, marker=marker, ms=5, lw=2, label=name)
    panel.set_xticks(places)
    panel.set_ylim(bottom=-0.02 * panel.get_ylim()[1])  # a head on one token lies at 0: all of it
    panel.set_xlabel("layer")
    panel.set_ylabel("entropy of attention (nats)")
    panel.set_title("Entropy of attention heads by depth", loc="left")
    panel.grid(axis="y", color="#e3e6e9", lw=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    panel.legend(frameon=False, title="line: mean of a layer", alignment="left")
    return figure


def _js_heads(heads: Mapping[str, Heads]) -> Any:
    """Above: every head as a point (Clark et al., fig. 6). Below: the JS matrix itself."""
    from matplotlib import pyplot

    layers, width = next(iter(heads.values())).entropy.shape
    figure, panels = pyplot.subplots(
        2, len(heads), figsize=(0.9 + 3.3 * len(heads), 6.6), squeeze=False
    )
    figure.set_layout_engine("constrained")
    first: Floats | None = None
    drawn = []
    for upper, (name, each) in zip(panels[0], heads.items(), strict=True):
        places = turned(embed(each.divergence), first)
        first = places if first is None else first
        drawn.append(places)
        depth = np.repeat(np.arange(1, layers + 1), width)
        dots = upper.scatter(
            *places.T, s=26, c=depth, cmap="viridis", vmin=0.5, vmax=layers + 0.5, lw=0
        )
        upper.set_title(name)
        upper.set_aspect("equal")
        upper.set_xticks([])
        upper.set_yticks([])
    low, high = np.min(np.vstack(drawn), 0), np.max(np.vstack(drawn), 0)
    middle, reach = (low + high) / 2, 0.56 * float((high - low).max()) or 1.0
    for upper, lower, each in zip(*panels, heads.values(), strict=True):
        upper.set_xlim(middle[0] - reach, middle[0] + reach)
        upper.set_ylim(middle[1] - reach, middle[1] + reach)
        image = lower.imshow(each.divergence, cmap="magma", vmin=0, vmax=np.log(2))
        middles = [(layer - 0.5) * width - 0.5 for layer in range(1, layers + 1)]
        lower.set_xticks(middles, range(1, layers + 1))
        lower.set_yticks(middles, range(1, layers + 1))
        lower.tick_params(length=0)
        lower.set_xlabel("layer of head")
    panels[0][0].set_ylabel("heads by similarity")
    panels[1][0].set_ylabel("layer of head")
    bar = figure.colorbar(dots, ax=panels[0], ticks=range(1, layers + 1), aspect=25)
    bar.set_label("layer")
    figure.colorbar(image, ax=panels[1], aspect=25).set_label("JS divergence (nats)")
    return figure


def embed(divergence: Floats) -> Floats:
    """Classical multidimensional scaling of heads onto a plane: (heads, 2).

    The root of the Jensen–Shannon divergence is a distance in a Euclidean space, so the
    divergences are its squares, and the plane shows the two widest directions of that space.
    """
    centred = divergence - divergence.mean(axis=0)
    gram = -(centred - centred.mean(axis=1, keepdims=True)) / 2
    values, vectors = np.linalg.eigh((gram + gram.T) / 2)
    places = np.zeros((len(divergence), 2))
    count = min(2, len(values))
    places[:, :count] = (vectors * np.sqrt(np.maximum(values, 0)))[:, ::-1][:, :count]
    return places


def turned(places: Floats, onto: Floats | None) -> Floats:
    """The points turned and mirrored to lie nearest to `onto`, head by head (Procrustes)."""
    if onto is None:
        return places
    left, _, right = np.linalg.svd(places.T @ onto)
    turned: Floats = places @ (left @ right)
    return turned
