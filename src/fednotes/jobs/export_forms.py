"""Export formats of saved models for other programs, as packages register them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fednotes.jobs.saved_models import ModelInput

Fill = Callable[[Path], None]


@dataclass(frozen=True)
class ExportForm:
    """An export format. A package registers it in the group `fednotes.exports`.

    Attributes:
        writer: Returns a function that fills an empty folder. It receives the folder of
            the saved model, and the options of the format that a person set.
        options: Names of these options.
        reads: What the exported models read.
    """

    writer: Callable[..., Fill]
    options: tuple[str, ...] = ()
    reads: ModelInput = "documents"
