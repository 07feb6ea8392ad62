"""Whether confidences are what they say, and the calibration that a saved model may
have.

Expected calibration error (Guo et al. 2017): of confidences in 15 bins of equal width,
Σ_b n_b / n · |share that is right − mean confidence|. A calibrated confidence is
sigmoid(slope · log-odds + intercept) (Platt 1999), which keeps the order.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from annotated_types import Gt

from fednotes.core.errors import ConfigError, DataError, MissingExtra, ModelError, needs
from fednotes.core.parsing import JsonError, read_json
from fednotes.core.seeds import rng_of
from fednotes.core.settings import build, checked
from fednotes.core.store import write_json, write_out
from fednotes.core.types import Document

BINS, FOLDS = 15, 5
FILE = "calibration.json"
PICTURES = (".png", ".svg", ".pdf")
_EDGE = 1e-6  # a confidence nearer to 0 or 1 counts as this: its logarithm is finite
Fit = Callable[[np.ndarray, np.ndarray], tuple[float, float]]
"""(spans,) log-odds, and whether each is right → slope and intercept."""


class Bin(NamedTuple):
    """Confidences from low to high: how many, their mean, and the share that is right."""

    low: float
    high: float
    spans: int
    confidence: float
    right: float


@dataclass(frozen=True)
class Reliability:
    """How far confidences are what they say. bins: those that are not empty. log_loss:
    mean."""

    spans: int
    documents: int
    ece: float
    log_loss: float
    bins: tuple[Bin, ...]

    @classmethod
    def of(cls, chances: np.ndarray, right: np.ndarray, documents: int) -> Reliability:
        """chances: (spans,) confidences; right: (spans,) bool."""
        place = np.clip((chances * BINS).astype(np.int64), 0, BINS - 1)
        bins = []
        for number in np.unique(place).tolist():
            inside = place == number
            values = chances[inside].mean(), right[inside].mean()
            bins.append(
                Bin(
                    number / BINS,
                    (number + 1) / BINS,
                    int(inside.sum()),
                    *map(float, values),
                )
            )
        error = sum(b.spans * abs(b.right - b.confidence) for b in bins) / max(
            1, len(chances)
        )
        loss = float(log_losses(chances, right).mean()) if len(chances) else 0.0
        return cls(len(chances), documents, error, loss, tuple(bins))

    def plot(self, path: str | Path) -> None:
        """Write it as a picture: PNG, SVG or PDF.

        Raises as `picture`, FednotesError.
        """
        write_out(Path(path), picture({"as they are": self}, path))

    def _repr_html_(self) -> str:
        return _html({"as they are": self})


@checked(frozen=True)
class Calibration:
    """`calibration.json` of a model's folder.

    sha256: of the weights that it is of. spans, documents: what it was fitted to. ece,
    log_loss: there, before and after, by cross-validation.
    """

    slope: Annotated[float, Gt(0)]
    intercept: float
    sha256: str
    spans: int
    documents: int
    ece: tuple[float, float]
    log_loss: tuple[float, float]
    format: Literal[1] = 1

    @classmethod
    def of(cls, folder: Path) -> Calibration | None:
        """That of a model's folder, if there is one. Raises ModelError where it is
        damaged, or of other weights."""
        path = folder / FILE
        if not path.exists():
            return None
        remedy = "calibrate the model again, or delete this file"
        try:
            table = read_json(path)
            if not isinstance(table, dict):
                raise ModelError(f"{path}: not a calibration: {remedy}")
            found: Calibration = build(cls, table, str(path))
        except (OSError, JsonError, ConfigError) as error:
            raise ModelError(f"{path}: cannot be read ({error}): {remedy}") from error
        if found.sha256 != weights_digest(folder):
            raise ModelError(f"{path}: is of other weights than these: {remedy}")
        return found

    def write(self, folder: Path) -> None:
        """Put it into a model's folder. Raises FednotesError."""
        write_json(folder / FILE, asdict(self))

    def values(self, chances: np.ndarray) -> np.ndarray:
        """Confidences of the same shape, calibrated."""
        return sigmoid(self.slope * log_odds(chances) + self.intercept)

    def on(self, documents: Sequence[Document]) -> tuple[Document, ...]:
        """The documents with calibrated confidences."""
        made = []
        for document in documents:
            raw = np.array([span.confidence for span in document.spans], np.float64)
            pairs = zip(document.spans, self.values(raw).tolist(), strict=True)
            spans = tuple(replace(span, confidence=chance) for span, chance in pairs)
            made.append(replace(document, spans=spans))
        return tuple(made)

    def __str__(self) -> str:
        before, after = self.ece
        return (
            f"calibrated on {self.spans:,} spans of {self.documents:,} notes (expected calibration "
            f"error {before:.3f} before, {after:.3f} after)"
        )


@dataclass(frozen=True)
class Calibrated:
    """What `calibrate` found. before, after: of the notes that it was fitted to; after
    by cross-validation. gain, error: of the log loss a span, and its standard error.
    calibration: what was kept; None where it was not better by more than the standard
    error."""

    before: Reliability
    after: Reliability
    gain: float
    error: float
    calibration: Calibration | None

    @property
    def shown(self) -> dict[str, Reliability]:
        """Before and after, by these names."""
        return {"before": self.before, "after, by cross-validation": self.after}

    def plot(self, path: str | Path) -> None:
        """As `Reliability.plot`, both in one picture."""
        write_out(Path(path), picture(self.shown, path))

    def _repr_html_(self) -> str:
        return _html(self.shown)


def judged(
    gold: Sequence[Document], predicted: Sequence[Document], types: Collection[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each predicted span of some types its confidence, whether a gold span is equal
    to it, and the number of its document; (spans,) each. Raises DataError where none is
    predicted."""
    rows = [
        (span.confidence, span in own, number)
        for number, (wanted, said) in enumerate(zip(gold, predicted, strict=True))
        for own in [frozenset(wanted.spans)]
        for span in said.spans
        if span.label in types
    ]
    if not rows:
        raise DataError("the model finds nothing in these notes: give more of them")
    chances, right, owner = zip(*rows, strict=True)
    return (
        np.array(chances, np.float64),
        np.array(right, bool),
        np.array(owner, np.int64),
    )


def calibrate(
    chances: np.ndarray, right: np.ndarray, owner: np.ndarray, fit: Fit, weights: str
) -> Calibrated:
    """Fit a calibration, and judge it by five-fold cross-validation over documents.

    It is kept where the log loss is lower by more than its standard error, over
    documents.
    weights: `weights_digest` of the model. Raises DataError for fewer than five
        documents.
    """
    documents, place = np.unique(owner, return_inverse=True)
    number = len(documents)
    if number < FOLDS:
        raise DataError(
            f"the model finds something in {number} of these notes: {FOLDS} are needed, and "
            "hundreds are better"
        )
    odds, after = log_odds(chances), np.empty_like(chances)
    fold = rng_of(0, "calibration").permutation(number)[place] % FOLDS
    for left_out in range(FOLDS):
        slope, intercept = fit(odds[fold != left_out], right[fold != left_out])
        after[fold == left_out] = sigmoid(slope * odds[fold == left_out] + intercept)
    gains = log_losses(chances, right) - log_losses(after, right)
    gain = float(gains.mean())
    # (documents,): spans of one are no free draws
    spread = np.bincount(place, gains - gain)
    error = float(np.sqrt(number / (number - 1) * (spread**2).sum()) / len(gains))
    found = (Reliability.of(each, right, number) for each in (chances, after))
    old, new = found
    kept = None
    if gain > error:
        facts = (old.ece, new.ece), (old.log_loss, new.log_loss)
        kept = Calibration(*fit(odds, right), weights, len(odds), number, *facts)
    return Calibrated(old, new, gain, error, kept)


def picture(shown: Mapping[str, Reliability], path: str | Path = ".png") -> bytes:
    """Confidences and the share that is right, bin by bin, of what is called so, and
    how many spans there are. Below the diagonal a model is too sure of itself. Bars are
    Wilson's intervals of 95 % (1927), of spans as if none hung together.

    path: its suffix says what kind of picture. Raises ConfigError for another,
    MissingExtra without matplotlib.
    """
    kind = Path(path).suffix.lower() or str(path)
    if kind not in PICTURES:
        raise ConfigError(f"{path}: a picture is one of {', '.join(PICTURES)}")
    drawn = io.BytesIO()
    _figure(shown).savefig(drawn, format=kind[1:])
    return drawn.getvalue()


def _figure(shown: Mapping[str, Reliability]) -> Any:
    with needs("matplotlib", "plot"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(4.6, 5.4), dpi=130, layout="constrained")
    panel, below = figure.subplots(2, sharex=True, height_ratios=(4, 1))
    panel.plot((0, 1), (0, 1), color="#8a8a8a", lw=1, ls="--")
    panel.text(0.97, 0.04, "too sure of itself", color="#6a6a6a", ha="right")
    for number, (name, each) in enumerate(shown.items()):
        colour, marker = (("#c4572a", "o"), ("#0b6e6e", "s"))[number % 2]
        rows = [
            (b.low, b.confidence, b.right, *wilson(b.right, b.spans)) for b in each.bins
        ]
        low, x, y, least, most = np.array(rows).reshape(-1, 5).T
        told = f"{name}: ECE {each.ece:.3f}"
        bars = {
            "yerr": (y - least, most - y),
            "capsize": 2,
            "ms": 5,
            "lw": 1,
            "label": told,
        }
        panel.errorbar(x, y, color=colour, marker=marker, **bars)
        wide = 1 / BINS / len(shown)
        spans = [b.spans for b in each.bins]
        below.bar(low + wide * number, spans, wide * 0.9, align="edge", color=colour)
    panel.set(ylabel="share that is right", xlim=(0, 1), ylim=(-0.02, 1.02))
    if shown:
        figure.legend(frameon=False, loc="outside upper left")
    below.set(xlabel="confidence", ylabel="spans")
    for each in (panel, below):
        each.spines[["top", "right"]].set_visible(False)
    return figure


def wilson(share: float, number: int) -> tuple[float, float]:
    """Where a chance lies that gave this share of so many, by 95 % (Wilson 1927)."""
    z = 1.96
    spread = z * np.sqrt(share * (1 - share) / number + (z / number) ** 2 / 4)
    low, high = (
        (share + z**2 / number / 2 + s) / (1 + z**2 / number) for s in (-spread, spread)
    )
    return max(0.0, float(low)), min(1.0, float(high))


def _html(shown: Mapping[str, Reliability]) -> str:
    """For a notebook: the picture, where there is matplotlib, and the numbers."""
    told = "; ".join(
        f"{name}: expected calibration error {each.ece:.3f}, log loss {each.log_loss:.3f}, "
        f"{each.spans:,} spans of {each.documents:,} notes"
        for name, each in shown.items()
    )
    try:
        data = base64.b64encode(picture(shown)).decode()
    except MissingExtra:
        return f"<p>{told}</p>"
    image = f'<img alt="share that is right by confidence" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{told}</figcaption></figure>"


def log_odds(chances: np.ndarray) -> np.ndarray:
    """log p / (1 - p), finite."""
    inside = np.clip(chances, _EDGE, 1 - _EDGE)
    return np.log(inside) - np.log1p(-inside)


def sigmoid(odds: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-odds)), which does not overflow."""
    small = np.exp(-np.abs(odds))
    return np.where(odds >= 0, 1, small) / (1 + small)


def log_losses(chances: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(spans,) -log of the probability that was given to what is so."""
    return np.logaddexp(0, np.where(right, -1, 1) * log_odds(chances))


def weights_digest(folder: Path) -> str:
    """SHA-256 over the weights in a model's folder.

    Raises ModelError where there are none.
    """
    found = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{folder}: no model here (no .safetensors file); name a model's folder"
        )
    for path in files:
        with path.open("rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()
