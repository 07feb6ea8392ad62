"""Reliability of confidences, and the calibration of a saved model.

Expected calibration error (Guo et al. 2017), with confidences in 15 bins of equal
width: Σ_b n_b / n · |share of correct spans − mean confidence|. A calibrated confidence
is sigmoid(slope · log-odds + intercept) (Platt 1999), which preserves the order.
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

from fednotes.core.errors import (
    ConfigError,
    DataError,
    MissingExtra,
    ModelError,
    needs,
    raising_if_unreadable,
)
from fednotes.core.parsing import JsonError, open_regular, read_json
from fednotes.core.seeds import rng_of
from fednotes.core.settings import build, checked
from fednotes.core.store import write_json, write_out
from fednotes.core.types import Document

BINS = 15
FOLDS = 5
FILE = "calibration.json"
PICTURES = (".png", ".svg", ".pdf")
# Confidences are clipped to this distance from 0 and 1, so that log-odds are finite.
_EDGE = 1e-6
_STYLES = (("#c4572a", "o"), ("#0b6e6e", "s"))  # colour and marker of each curve

# Returns slope and intercept, from (spans,) log-odds and whether each span is correct.
Fit = Callable[[np.ndarray, np.ndarray], tuple[float, float]]


class Bin(NamedTuple):
    """Confidences from `low` to `high`.

    Attributes:
        low: Lower edge.
        high: Upper edge.
        spans: Number of spans.
        confidence: The spans' mean confidence.
        right: The share of correct spans.
    """

    low: float
    high: float
    spans: int
    confidence: float
    right: float


@dataclass(frozen=True)
class Reliability:
    """The agreement between confidences and the share of correct spans.

    Attributes:
        spans: Number of spans.
        documents: Number of documents.
        ece: Expected calibration error.
        log_loss: Mean log loss per span.
        bins: The bins that are not empty.
    """

    spans: int
    documents: int
    ece: float
    log_loss: float
    bins: tuple[Bin, ...]

    @classmethod
    def of(
        cls, confidences: np.ndarray, is_right: np.ndarray, documents: int
    ) -> Reliability:
        """Compare confidences with correctness.

        Args:
            confidences: (spans,).
            is_right: (spans,) bool.
            documents: Number of documents.
        """
        bin_of = np.clip((confidences * BINS).astype(np.int64), 0, BINS - 1)
        bins = []
        for number in np.unique(bin_of).tolist():
            is_inside = bin_of == number
            bins.append(
                Bin(
                    low=number / BINS,
                    high=(number + 1) / BINS,
                    spans=int(is_inside.sum()),
                    confidence=float(confidences[is_inside].mean()),
                    right=float(is_right[is_inside].mean()),
                )
            )
        differences = sum(b.spans * abs(b.right - b.confidence) for b in bins)
        log_loss = 0.0
        if len(confidences):
            log_loss = float(log_losses(confidences, is_right).mean())
        return cls(
            spans=len(confidences),
            documents=documents,
            ece=differences / max(1, len(confidences)),
            log_loss=log_loss,
            bins=tuple(bins),
        )

    def plot(self, path: str | Path) -> None:
        """Save a reliability diagram as PNG, SVG or PDF.

        Raises:
            ConfigError: The path has none of these suffixes.
            MissingExtra: matplotlib is not installed.
            FednotesError: The file cannot be written.
        """
        write_out(Path(path), draw_picture({"as they are": self}, path))

    def _repr_html_(self) -> str:
        return _to_html({"as they are": self})


@checked(frozen=True)
class Calibration:
    """The calibration of a saved model, stored as `calibration.json` in its folder.

    Attributes:
        slope: Factor of the log-odds.
        intercept: Term added to the scaled log-odds.
        sha256: Digest of the model's weights.
        spans: Number of spans to which it was fitted.
        documents: Number of documents to which it was fitted.
        ece: Expected calibration error before and after, by cross-validation.
        log_loss: Mean log loss before and after, by cross-validation.
        format: Version of the file.
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
    def read(cls, folder: Path) -> Calibration | None:
        """Return the calibration in a model's folder; None if there is none.

        Raises:
            ModelError: The calibration is damaged or belongs to other weights.
        """
        path = folder / FILE
        if not path.exists():
            return None
        remedy = "calibrate the model again, or delete this file"
        try:
            table = read_json(path)
            if not isinstance(table, dict):
                raise ModelError(f"{path}: not a calibration: {remedy}")
            calibration: Calibration = build(cls, table, str(path))
        except (OSError, JsonError, ConfigError) as error:
            raise ModelError(f"{path}: cannot be read ({error}): {remedy}") from error
        if calibration.sha256 != hash_weights(folder):
            raise ModelError(f"{path}: belongs to different weights: {remedy}")
        return calibration

    def write(self, folder: Path) -> None:
        """Write the calibration to a model's folder.

        Raises:
            FednotesError: The file cannot be written.
        """
        write_json(folder / FILE, asdict(self))

    def apply(self, confidences: np.ndarray) -> np.ndarray:
        """Return calibrated confidences of the same shape."""
        return sigmoid(self.slope * log_odds(confidences) + self.intercept)

    def apply_to(self, documents: Sequence[Document]) -> tuple[Document, ...]:
        """Return documents with calibrated confidences of their mentions."""
        calibrated = []
        for document in documents:
            raw = np.array([span.confidence for span in document.spans], np.float64)
            spans = tuple(
                replace(span, confidence=confidence)
                for span, confidence in zip(
                    document.spans, self.apply(raw).tolist(), strict=True
                )
            )
            calibrated.append(replace(document, spans=spans))
        return tuple(calibrated)

    def __str__(self) -> str:
        before, after = self.ece
        return (
            f"calibrated on {self.spans:,} spans of {self.documents:,} notes (expected "
            f"calibration error {before:.3f} before, {after:.3f} after)"
        )


@dataclass(frozen=True)
class Calibrated:
    """The result of `calibrate`, on the notes to which it was fitted.

    Attributes:
        before: Reliability of the model's uncalibrated confidences.
        after: Reliability of calibrated confidences, by cross-validation.
        gain: The reduction of the mean log loss per span.
        error: The standard error of the gain.
        calibration: The calibration; None if the gain was not larger than its standard
            error.
    """

    before: Reliability
    after: Reliability
    gain: float
    error: float
    calibration: Calibration | None

    @property
    def reliabilities(self) -> dict[str, Reliability]:
        """The reliability before and after, by the name in plots."""
        return {"before": self.before, "after, by cross-validation": self.after}

    def plot(self, path: str | Path) -> None:
        """Save both in one diagram; see `Reliability.plot`."""
        write_out(Path(path), draw_picture(self.reliabilities, path))

    def _repr_html_(self) -> str:
        return _to_html(self.reliabilities)


def judge_spans(
    gold: Sequence[Document], predicted: Sequence[Document], types: Collection[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the confidence and correctness of each predicted span.

    Args:
        gold: Documents with gold mentions.
        predicted: The same documents with predictions and confidences.
        types: The types of predictions to include.

    Returns:
        Confidence, whether an equal gold mention exists, and index of the document;
        (spans,) each.

    Raises:
        DataError: Nothing is predicted.
    """
    confidences = []
    is_right = []
    owners = []
    for index, (annotated, model_output) in enumerate(
        zip(gold, predicted, strict=True)
    ):
        gold_spans = frozenset(annotated.spans)
        for span in model_output.spans:
            if span.label in types:
                confidences.append(span.confidence)
                is_right.append(span in gold_spans)
                owners.append(index)
    if not owners:
        raise DataError("the model finds nothing in these notes: give more notes")
    return (
        np.array(confidences, np.float64),
        np.array(is_right, bool),
        np.array(owners, np.int64),
    )


def calibrate(
    confidences: np.ndarray,
    is_right: np.ndarray,
    owners: np.ndarray,
    fit: Fit,
    digest: str,
) -> Calibrated:
    """Fit a calibration, evaluated by five-fold cross-validation over documents.

    Args:
        confidences: (spans,).
        is_right: (spans,) bool.
        owners: (spans,) index of each span's document.
        fit: Fits slope and intercept.
        digest: `hash_weights` of the model.

    Returns:
        The result. It has a calibration only if the reduction of the log loss exceeds
        its standard error over documents.

    Raises:
        DataError: There are fewer than five documents.
    """
    documents, place = np.unique(owners, return_inverse=True)
    number = len(documents)
    if number < FOLDS:
        raise DataError(
            f"the model finds something in {number} of these notes: {FOLDS} are "
            "needed, and hundreds are better"
        )
    odds = log_odds(confidences)
    after = _cross_validate(odds, is_right, place, fit)
    gains = log_losses(confidences, is_right) - log_losses(after, is_right)
    gain = float(gains.mean())
    # Spans of one document are not independent, so deviations are summed by document.
    deviations = np.bincount(place, gains - gain)
    variance = number / (number - 1) * (deviations**2).sum()
    error = float(np.sqrt(variance) / len(gains))
    reliability_before = Reliability.of(confidences, is_right, number)
    reliability_after = Reliability.of(after, is_right, number)
    calibration = None
    if gain > error:
        slope, intercept = fit(odds, is_right)
        calibration = Calibration(
            slope=slope,
            intercept=intercept,
            sha256=digest,
            spans=len(odds),
            documents=number,
            ece=(reliability_before.ece, reliability_after.ece),
            log_loss=(reliability_before.log_loss, reliability_after.log_loss),
        )
    return Calibrated(
        before=reliability_before,
        after=reliability_after,
        gain=gain,
        error=error,
        calibration=calibration,
    )


def _cross_validate(
    odds: np.ndarray, is_right: np.ndarray, place: np.ndarray, fit: Fit
) -> np.ndarray:
    """Return confidences, each calibrated by a fit without its document, (spans,).

    Args:
        odds: (spans,) log-odds.
        is_right: (spans,) bool.
        place: (spans,) index of each span's document among those with spans.
        fit: Fits slope and intercept.
    """
    number = int(place.max()) + 1
    fold = rng_of(0, "calibration").permutation(number)[place] % FOLDS
    calibrated = np.empty_like(odds)
    for left_out in range(FOLDS):
        is_left_out = fold == left_out
        slope, intercept = fit(odds[~is_left_out], is_right[~is_left_out])
        calibrated[is_left_out] = sigmoid(slope * odds[is_left_out] + intercept)
    return calibrated


# ---- pictures ------------------------------------------------------------------------


def draw_picture(curves: Mapping[str, Reliability], path: str | Path = ".png") -> bytes:
    """Draw a reliability diagram: the share of correct spans by confidence.

    Below the diagonal, a model is overconfident. Bars are Wilson's 95 % intervals
    (1927), which assume independent spans. A second panel shows the number of spans.

    Args:
        curves: The reliabilities to draw, by name.
        path: A path whose suffix determines the format.

    Returns:
        The content of the file.

    Raises:
        ConfigError: The format is not supported.
        MissingExtra: matplotlib is not installed.
    """
    suffix = Path(path).suffix.lower() or str(path)
    if suffix not in PICTURES:
        raise ConfigError(
            f"{path}: unsupported kind of picture: use a name that ends in "
            f"{', '.join(PICTURES)}"
        )
    buffer = io.BytesIO()
    _make_figure(curves).savefig(buffer, format=suffix[1:])
    return buffer.getvalue()


def _make_figure(curves: Mapping[str, Reliability]) -> Any:
    """Return the figure of a reliability diagram; see `draw_picture`."""
    with needs("matplotlib", "plot"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=(4.6, 5.4), dpi=130, layout="constrained")
    panel, histogram = figure.subplots(2, sharex=True, height_ratios=(4, 1))
    panel.plot((0, 1), (0, 1), color="#8a8a8a", lw=1, ls="--")
    panel.text(0.97, 0.04, "overconfident", color="#6a6a6a", ha="right")
    width = 1 / BINS / max(1, len(curves))
    for number, (name, curve) in enumerate(curves.items()):
        colour, marker = _STYLES[number % len(_STYLES)]
        _draw_curve(panel, name, curve, color=colour, marker=marker)
        left_edges = np.array([b.low for b in curve.bins]) + width * number
        counts = [b.spans for b in curve.bins]
        histogram.bar(left_edges, counts, width * 0.9, align="edge", color=colour)
    panel.set(ylabel="fraction correct", xlim=(0, 1), ylim=(-0.02, 1.02))
    if curves:
        figure.legend(frameon=False, loc="outside upper left")
    histogram.set(xlabel="confidence", ylabel="spans")
    for axes in (panel, histogram):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _draw_curve(panel: Any, name: str, curve: Reliability, **style: str) -> None:
    """Draw the share of correct spans in each bin, with its interval."""
    confidence = np.array([b.confidence for b in curve.bins])
    right = np.array([b.right for b in curve.bins])
    intervals = [compute_wilson_interval(b.right, b.spans) for b in curve.bins]
    low, high = np.array(intervals).reshape(-1, 2).T
    panel.errorbar(
        confidence,
        right,
        yerr=(right - low, high - right),
        capsize=2,
        ms=5,
        lw=1,
        label=f"{name}: ECE {curve.ece:.3f}",
        **style,
    )


def compute_wilson_interval(share: float, number: int) -> tuple[float, float]:
    """Return the 95 % interval of a probability (Wilson 1927).

    Args:
        share: The share of successes.
        number: The number of trials.
    """
    z = 1.96
    spread = z * np.sqrt(share * (1 - share) / number + (z / number) ** 2 / 4)
    centre = share + z**2 / number / 2
    scale = 1 + z**2 / number
    low = float((centre - spread) / scale)
    high = float((centre + spread) / scale)
    return max(0.0, low), min(1.0, high)


def _to_html(curves: Mapping[str, Reliability]) -> str:
    """Return the diagram and the numbers as HTML for a notebook.

    Without matplotlib, it has only the numbers.
    """
    caption = "; ".join(
        f"{name}: expected calibration error {curve.ece:.3f}, log loss "
        f"{curve.log_loss:.3f}, {curve.spans:,} spans of {curve.documents:,} notes"
        for name, curve in curves.items()
    )
    try:
        data = base64.b64encode(draw_picture(curves)).decode()
    except MissingExtra:
        return f"<p>{caption}</p>"
    source = f"data:image/png;base64,{data}"
    image = f'<img alt="fraction of correct spans by confidence" src="{source}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


# ---- probabilities -------------------------------------------------------------------


def log_odds(confidences: np.ndarray) -> np.ndarray:
    """Return log p / (1 − p), which is always finite."""
    inside = np.clip(confidences, _EDGE, 1 - _EDGE)
    return np.log(inside) - np.log1p(-inside)


def sigmoid(odds: np.ndarray) -> np.ndarray:
    """Return 1 / (1 + exp(−odds)), which does not overflow."""
    small = np.exp(-np.abs(odds))
    return np.where(odds >= 0, 1, small) / (1 + small)


def log_losses(confidences: np.ndarray, is_right: np.ndarray) -> np.ndarray:
    """Return −log of the probability of the actual outcome, (spans,)."""
    return np.logaddexp(0, np.where(is_right, -1, 1) * log_odds(confidences))


def hash_weights(folder: Path) -> str:
    """Return the SHA-256 of the weights in a model's folder.

    Raises:
        ModelError: There are no weights, or they cannot be read.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(
            f"{folder}: no model here (no .safetensors file): give a model's folder"
        )
    digest = hashlib.sha256()
    for path in files:
        with (
            raising_if_unreadable(path, ModelError),
            open(path, "rb", opener=open_regular) as file,
        ):
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
