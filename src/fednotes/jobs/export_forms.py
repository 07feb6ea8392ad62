"""Forms in which other programs read a saved model, as packages register them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Fill = Callable[[Path], None]


@dataclass(frozen=True)
class ExportForm:
    """A form of a saved model. A package registers it in the group `fednotes.exports`.

    Attributes:
        writer: Returns what fills an empty folder. Gets the folder of the saved model,
            and the options of the form that are given.
        options: Names of these options.
        of_patients: Whether the form is for models of patients; else for those that
            find mentions.
    """

    writer: Callable[..., Fill]
    options: tuple[str, ...] = ()
    of_patients: bool = False
