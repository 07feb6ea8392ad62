"""Calibration of confidences, compared with scikit-learn's numbers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fednotes.api import _fit_platt
from fednotes.core.errors import ConfigError, DataError, MissingExtra, ModelError
from fednotes.core.types import Document, Span
from fednotes.encoders.pretrained import compute_folder_fingerprint
from fednotes.metrics.calibration import (
    BINS,
    FILE,
    Calibrated,
    Calibration,
    Reliability,
    _make_figure,
    calibrate,
    hash_weights,
    judge_spans,
    log_odds,
)

DOCUMENTS, EACH = 80, 25


def draw_spans(slope: float, intercept: float, seed: int = 0) -> tuple[np.ndarray, ...]:
    """Draw confidences with true log-odds `slope · log-odds + intercept`, 25 a
    document."""
    rng = np.random.default_rng(seed)
    chances = rng.beta(4, 1, DOCUMENTS * EACH)
    truth = 1 / (1 + np.exp(-(slope * np.log(chances / (1 - chances)) + intercept)))
    return (
        chances,
        rng.random(len(chances)) < truth,
        np.repeat(np.arange(DOCUMENTS), EACH),
    )


def fitted(slope: float, intercept: float) -> Calibrated:
    return calibrate(*draw_spans(slope, intercept), _fit_platt, "")


def test_the_reliability_table_equals_scikit_learn() -> None:
    """Its `calibration_curve` of equal widths has each bin's means, NumPy the counts."""
    curves = pytest.importorskip("sklearn.calibration")
    metrics = pytest.importorskip("sklearn.metrics")
    chances, right, _ = draw_spans(0.6, -0.5)
    actual = Reliability.of(chances, right, DOCUMENTS)
    share, mean = curves.calibration_curve(
        right, chances, n_bins=BINS, strategy="uniform"
    )
    counts = np.histogram(chances, BINS, (0, 1))[0]
    counts = counts[counts > 0]
    assert [b.spans for b in actual.bins] == counts.tolist()
    assert [b.right for b in actual.bins] == pytest.approx(share.tolist())
    assert [b.confidence for b in actual.bins] == pytest.approx(mean.tolist())
    assert actual.ece == pytest.approx(
        (counts * np.abs(share - mean)).sum() / len(chances)
    )
    assert actual.log_loss == pytest.approx(metrics.log_loss(right, chances))
    sure = Reliability.of(np.array([0.0, 1.0, 1.0]), np.array([False, True, True]), 1)
    assert sure.ece == 0
    assert sure.log_loss < 1e-5


def test_the_picture_shows_the_numbers_of_the_table(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Points are the bins, bars SciPy's Wilson intervals, columns the counts; both of a
    calibration stand in one picture, and in a notebook beside the numbers."""
    pytest.importorskip("matplotlib")
    stats = pytest.importorskip("scipy.stats")
    actual = fitted(0.5, -0.7)
    panel, counts_panel = _make_figure(actual.reliabilities).axes
    for number, each in enumerate((actual.before, actual.after)):
        line, _, (bars,) = panel.containers[number]
        assert line.get_xdata().tolist() == [b.confidence for b in each.bins]
        assert line.get_ydata().tolist() == [b.right for b in each.bins]
        for reliability_bin, segment in zip(
            each.bins, bars.get_segments(), strict=True
        ):
            test = stats.binomtest(
                round(reliability_bin.right * reliability_bin.spans),
                reliability_bin.spans,
            )
            interval = test.proportion_ci(method="wilson")
            assert segment[:, 1].tolist() == pytest.approx(
                [interval.low, interval.high], abs=1e-4
            )
        assert [b.get_height() for b in counts_panel.containers[number]] == [
            b.spans for b in each.bins
        ]
    actual.plot(tmp_path / "new" / "a.SVG")
    assert (tmp_path / "new" / "a.SVG").read_bytes().startswith(b"<?xml")
    actual.before.plot(tmp_path / "one.svg")
    assert "image/png;base64,iVBOR" in actual.before._repr_html_()
    with pytest.raises(ConfigError, match=r"ends in .png, .svg, .pdf"):
        actual.plot(tmp_path / "a.gif")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match=r"fednotes\[plot\]"):
        actual.plot(tmp_path / "b.png")
    assert actual._repr_html_().startswith(
        f"<p>before: expected calibration error {actual.before.ece:.3f}"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "one.svg"]


def test_the_fit_equals_scikit_learn() -> None:
    """Its sigmoid calibration has Platt's targets too; it is given the log-odds."""
    curves = pytest.importorskip("sklearn.calibration")
    chances, right, _ = draw_spans(0.5, -0.7)
    reference = curves._SigmoidCalibration().fit(log_odds(chances), right)
    assert _fit_platt(log_odds(chances), right) == pytest.approx(
        (-reference.a_, -reference.b_), rel=1e-3
    )
    calibration = fitted(0.5, -0.7).calibration
    assert calibration is not None
    assert calibration.apply(chances) == pytest.approx(
        reference.predict(log_odds(chances)), rel=1e-3
    )


def test_a_calibration_is_kept_only_if_it_helps() -> None:
    """A calibration that is needed is found and kept; one that changes nothing is not
    kept."""
    actual = fitted(0.5, -0.7)
    assert actual.calibration is not None
    assert (actual.calibration.slope, actual.calibration.intercept) == pytest.approx(
        (0.5, -0.7), abs=0.15
    )
    assert actual.after.ece < 0.04 < 0.2 < actual.before.ece
    assert actual.gain == pytest.approx(actual.before.log_loss - actual.after.log_loss)
    assert actual.gain > 10 * actual.error > 0
    judged = fitted(1.0, 0.0)
    assert judged.calibration is None
    assert judged.gain < judged.error
    assert abs(judged.before.ece - judged.after.ece) < 0.02


def test_each_document_is_scored_by_a_fit_that_did_not_see_it() -> None:
    """scikit-learn fits and predicts the five folds; a loop over documents has the
    error.

    With few spans the loss on what was fitted is clearly lower than on the documents
    left out. The spans of a document are in one fold, and folds are as equal as they
    can be.
    """
    curves = pytest.importorskip("sklearn.calibration")
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(1)
    owner = np.repeat(np.arange(12), 3)
    chances = rng.beta(2, 1, len(owner))
    right = rng.random(len(owner)) < chances**2
    odds = log_odds(chances)
    fits: list[tuple[np.ndarray, Any]] = []

    def fit(fitted_odds: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
        rows = np.flatnonzero(np.isin(odds, fitted_odds))
        assert np.array_equal(right[rows], truth)
        theirs = curves._SigmoidCalibration().fit(fitted_odds, truth)
        fits.append((rows, theirs))
        return -float(theirs.a_), -float(theirs.b_)

    actual = calibrate(chances, right, owner, fit, "")
    every, after, sizes = np.arange(len(owner)), np.empty(len(owner)), []
    judged_rows: list[int] = []
    for rows, theirs in fits[:5]:
        left_out = np.setdiff1d(every, rows)
        after[left_out] = theirs.predict(odds[left_out])
        judged_rows += left_out.tolist()
        sizes.append(len(set(owner[left_out])))
        assert len(left_out) == 3 * sizes[-1]
    assert sorted(judged_rows) == every.tolist()
    assert sorted(sizes) == [2, 2, 2, 3, 3]

    losses = [-np.log(np.where(right, each, 1 - each)) for each in (chances, after)]
    gains = losses[0] - losses[1]
    deviations = [
        (gains[owner == document] - gains.mean()).sum() for document in range(12)
    ]
    error = np.sqrt(12 / 11 * np.square(deviations).sum()) / len(owner)
    assert actual.after.log_loss == pytest.approx(
        metrics.log_loss(right, after), rel=1e-6
    )
    assert actual.gain == pytest.approx(gains.mean(), rel=1e-6)
    assert actual.error == pytest.approx(error, rel=1e-6)
    in_sample = curves._SigmoidCalibration().fit(odds, right).predict(odds)
    assert actual.after.log_loss > metrics.log_loss(right, in_sample) + 0.005


def test_errors_are_computed_over_documents_not_spans() -> None:
    """Right is who has the same offsets and label in its own document; other types do
    not count."""
    gold = [
        Document("a", "x" * 9, (Span(0, 2, "A"),)),
        Document("b", "x" * 9, (Span(3, 5, "B"),)),
    ]
    predictions = [
        Document(
            "a",
            "x" * 9,
            (Span(0, 2, "A", confidence=0.9), Span(3, 5, "B", confidence=0.2)),
        ),
        Document(
            "b",
            "x" * 9,
            (Span(3, 6, "B", confidence=0.4), Span(0, 1, "C", confidence=1.0)),
        ),
    ]
    chances, right, owner = judge_spans(gold, predictions, ("A", "B"))
    assert chances.tolist() == [0.9, 0.2, 0.4]
    assert right.tolist() == [True, False, False]
    assert owner.tolist() == [0, 0, 1]
    with pytest.raises(DataError, match="finds nothing"):
        judge_spans(gold, [Document("a", "x"), Document("b", "x")], ("A",))
    with pytest.raises(DataError, match="in 2 of these notes: 5"):
        calibrate(chances, right, owner, _fit_platt, "")


def test_a_calibration_is_refused_for_other_weights(tmp_path: Path) -> None:
    """Written and read again; damaged or of other weights it is refused, with the
    remedy."""
    with pytest.raises(ModelError, match="no model here"):
        hash_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert Calibration.read(tmp_path) is None
    calibration = Calibration(
        0.5, -0.25, hash_weights(tmp_path), 9, 5, (0.2, 0.1), (0.5, 0.4)
    )
    before = compute_folder_fingerprint(tmp_path)
    calibration.write(tmp_path)
    assert Calibration.read(tmp_path) == calibration
    assert (
        compute_folder_fingerprint(tmp_path) == before
    )  # as an encoder it is what it was
    (document,) = calibration.apply_to(
        [Document("a", "x", (Span(0, 1, "A", confidence=0.8),))]
    )
    by_hand = 1 / (1 + np.exp(-(0.5 * np.log(4) - 0.25)))
    assert document.spans[0].confidence == pytest.approx(by_hand)
    table = json.loads((tmp_path / FILE).read_text())
    for wrong in (
        {"slope": -1.0},
        {"slope": "steep"},
        {"format": 2},
        {"colour": "red"},
    ):
        (tmp_path / FILE).write_text(json.dumps(table | wrong))
        with pytest.raises(ModelError, match="calibrate the model again, or delete"):
            Calibration.read(tmp_path)
    for text in ("", "[]", "{", json.dumps(table).replace("0.5", "NaN", 1)):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(ModelError, match=r"calibration.json: .*delete this file"):
            Calibration.read(tmp_path)
    calibration.write(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"others")
    with pytest.raises(ModelError, match="belongs to different weights"):
        Calibration.read(tmp_path)


def test_a_calibration_with_a_gain_within_its_standard_error_is_dropped() -> None:
    """Ten notes with a span each, of confidence 1/2, and a fit that adds 0.01 to the
    log-odds.

    By hand: a right span gains log 2 - log(1 + exp(-0.01)), a wrong one loses about as
    much. The standard error is SciPy's.
    """

    def add(odds: np.ndarray, right: np.ndarray) -> tuple[float, float]:
        return 1.0, 0.01

    for number, is_kept in ((6, False), (9, True)):
        right = np.arange(10) < number
        actual = calibrate(np.full(10, 0.5), right, np.arange(10), add, "0" * 64)
        gains = np.log(2) - np.log1p(np.exp(np.where(right, -0.01, 0.01)))
        assert actual.gain == pytest.approx(gains.mean())
        assert actual.error == pytest.approx(stats.sem(gains))
        assert (actual.gain > actual.error) == is_kept
        assert (actual.calibration is not None) == is_kept


def test_calibration_needs_at_least_five_notes() -> None:
    def keep(odds: np.ndarray, right: np.ndarray) -> tuple[float, float]:
        return 1.0, 0.0

    chances, right = np.full(8, 0.5), np.arange(8) < 4
    five = calibrate(chances, right, np.arange(8) % 5, keep, "0" * 64)
    assert five.before.documents == 5
    with pytest.raises(DataError, match="in 4 of these notes: 5 are needed"):
        calibrate(chances, right, np.arange(8) % 4, keep, "0" * 64)
