"""Describe how tables, charts and messages show the scores of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Column(NamedTuple):
    """A column of a table in the terminal.

    Attributes:
        measure: The measure that it shows.
        head: Its heading.
        factor: Factor by which the measure is multiplied for display.
        digits: Number of digits after the decimal point.
    """

    measure: str
    head: str
    factor: int = 100
    digits: int = 1


class Dots(NamedTuple):
    """A chart with a row of dots for each site.

    Attributes:
        measure: The measure that it shows.
        title: Its title.
        tile: Name of the measure on a tile of the report; "" for no tile.
    """

    measure: str
    title: str
    tile: str = ""


@dataclass(frozen=True)
class ScoreLayout:
    """How one kind of score is shown.

    Attributes:
        title: Title above its columns in a report.
        measures: The measures that a report shows.
        is_lead: Whether a report compares its F1 with the F1 of the site alone.
        dots: Its chart; None for no chart.
        heading: Heading above its columns in the terminal.
        columns: Its columns in the terminal; empty if the terminal does not show it.
    """

    title: str
    measures: tuple[str, ...]
    is_lead: bool = False
    dots: Dots | None = None
    heading: str = ""
    columns: tuple[Column, ...] = ()


_F1_MEASURES = ("precision", "recall", "f1")
_F1_COLUMNS = (Column("precision", "P"), Column("recall", "R"), Column("f1", "F1"))

# The kinds of scores in the order in which they are shown.
SCORES: Mapping[str, ScoreLayout] = {
    "strict": ScoreLayout(
        "Strict",
        _F1_MEASURES,
        is_lead=True,
        dots=Dots("f1", "Strict F1", "strict F1"),
        heading="strict",
        columns=_F1_COLUMNS,
    ),
    "relaxed": ScoreLayout(
        "Any overlap",
        _F1_MEASURES,
        dots=Dots("f1", "F1 by any overlap"),
        heading="any overlap",
        columns=_F1_COLUMNS,
    ),
    # The terminal shows it only where it differs clearly from any overlap.
    "relaxed_one_to_one": ScoreLayout(
        "One to one", _F1_MEASURES, heading="one to one", columns=_F1_COLUMNS
    ),
    "unseen": ScoreLayout("Unseen forms", ("f1",)),
    "masked": ScoreLayout(
        "Masked words",
        ("loss", "perplexity", "accuracy"),
        dots=Dots("accuracy", "Masked words guessed", "words guessed"),
        heading="masked words",
        columns=(
            Column("loss", "loss", factor=1, digits=3),
            Column("accuracy", "guessed %"),
        ),
    ),
    "next_sentence": ScoreLayout("Next sentence", ("accuracy",)),
    "phenotypes": ScoreLayout(
        "Macro",
        _F1_MEASURES,
        is_lead=True,
        dots=Dots("f1", "Macro F1", "macro F1"),
        heading="macro",
        columns=_F1_COLUMNS,
    ),
    "present": ScoreLayout("Present", _F1_MEASURES),
    "ranking": ScoreLayout(
        "Ranking",
        ("auroc", "auprc"),
        dots=Dots("auroc", "AUROC", "AUROC"),
        heading="ranking",
        columns=(Column("auroc", "AUROC"),),
    ),
    "calibration": ScoreLayout("Calibration", ("brier",)),
    # Dots and columns are shown only if a run learned only codes.
    "codes": ScoreLayout(
        "Codes",
        ("loss", "auroc"),
        dots=Dots("auroc", "AUROC of codes", "AUROC of codes"),
        heading="codes",
        columns=(
            Column("loss", "loss", factor=1, digits=3),
            Column("auroc", "AUROC %"),
        ),
    ),
}


# Measures that are no fractions of a whole, so they are not shown in percent.
_ABSOLUTE = frozenset({"loss", "perplexity", "brier", "valid_loss"})


def is_percent(measure: str) -> bool:
    """Return whether people read a measure in percent, such as F1."""
    return measure not in _ABSOLUTE


def format_score(value: float, measure: str = "f1") -> str:
    """Format a score for people: "64.9" for an F1 of 0.649, "0.320" for a loss."""
    return f"{100 * value:.1f}" if is_percent(measure) else f"{value:.3f}"


def format_change(value: float, measure: str = "f1") -> str:
    """Format the difference of two scores, in points or as that of two losses."""
    return f"{100 * value:+.1f}" if is_percent(measure) else f"{value:+.3f}"


class CurveTitles(NamedTuple):
    """Titles of the charts of one measure: over all sites, and at each site."""

    all_sites: str
    each_site: str


@dataclass(frozen=True)
class CurveLayout:
    """How a measure of the evaluations is drawn over the rounds.

    Attributes:
        site_measure: Name of the measure in the evaluation of one site.
        short: Its name on a chart.
        titles: Titles of its charts by what the sites hold.
    """

    site_measure: str
    short: str
    titles: Mapping[str, CurveTitles]


# By the name of the measure over all sites.
CURVES: Mapping[str, CurveLayout] = {
    "valid_f1": CurveLayout(
        "f1",
        "F1 in %",
        {
            "documents": CurveTitles(
                "Strict F1 on the validation sets",
                "Strict F1 on each site's validation set",
            ),
            "patients": CurveTitles(
                "Macro F1 on validation patients",
                "Macro F1 on each site's validation patients",
            ),
        },
    ),
    "valid_loss": CurveLayout(
        "valid_loss",
        "Held-out loss",
        {
            "documents": CurveTitles(
                "Loss on masked words of held-out notes", "Held-out loss of each site"
            ),
            "patients": CurveTitles(
                "Loss of the network on validation patients",
                "Loss of the network on each site's validation patients",
            ),
        },
    ),
}


@dataclass(frozen=True)
class DataWording:
    """The wording for runs on one kind of data.

    Attributes:
        unscored: Why a run has no scores.
        next_lines: What a person can do with a trained model; "{place}" stands for its
            folder.
        loss_caption: Caption of the charts of training losses.
    """

    unscored: str
    next_lines: tuple[str, ...]
    loss_caption: str


_PREDICT = "fednotes predict {place} --text TEXT"
_NOTHING_HELD_OUT = "nothing is held out at any site, so there are no scores"
_LOSS_CAPTION = "Training loss at each site; the scales differ."

# By the kind of data that sites hold.
WORDINGS: Mapping[str, DataWording] = {
    "documents": DataWording(_NOTHING_HELD_OUT, (_PREDICT,), _LOSS_CAPTION),
    "notes": DataWording(
        _NOTHING_HELD_OUT,
        (
            'train entities on it: a job with method = "finetune" and in [model]',
            'encoder = "{place}"',
        ),
        _LOSS_CAPTION,
    ),
    "patients": DataWording(
        "no test patient has a label or a code that is predicted, so there are no "
        "scores: give sites `test` or a test_fraction, and `labels` or `codes`",
        (_PREDICT,),
        "Training loss at each site, of the network and then of any classifiers of "
        "diseases; the scales differ.",
    ),
}
