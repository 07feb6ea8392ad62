"""The interface of the audited site's data for training shadow models."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import Any, ClassVar, Protocol

import numpy as np

from fednotes.apps.audit.shadow.secrets import Planted, Secret, SecretKind
from fednotes.core.errors import DataError

MIN_LOSS = 1e-9  # a smaller loss would make the log-odds infinite


class Subject(Protocol):
    """The audited site's data, in units whose membership is judged.

    Attributes:
        kinds: Kinds of secrets that can be planted.
    """

    kinds: ClassVar[tuple[SecretKind, ...]]

    @property
    def num_carriers(self) -> int:
        """Number of texts that a secret can be planted into."""

    @property
    def judged_units(self) -> Sized:
        """The units whose membership is judged."""

    def make_training_data(
        self,
        is_member: np.ndarray,
        planted: Sequence[Planted],
        *,
        copies: int,
        with_others: bool,
    ) -> Any:
        """Return the site with the data on which one model is trained.

        Args:
            is_member: (judged_units,) whether the model is trained on each unit.
            planted: Secrets that it is also trained on.
            copies: Number of copies of each member.
            with_others: Whether it is also trained on the units that are not judged.
        """

    def score_units(self, site: Any) -> dict[str, np.ndarray]:
        """Return (judged_units,) scores under a trained site's model, by criterion.

        A higher score means that the unit is more likely under the model.
        """

    def measure_guess_losses(self, site: Any, secret: Secret) -> np.ndarray:
        """Return each guess's loss, shape (guesses,), under a trained site's model."""


def convert_to_log_odds(losses: np.ndarray) -> np.ndarray:
    """Return φ = log(p / (1 − p)) for p = exp(−loss).

    Raises:
        DataError: A loss is not a finite number.
    """
    if not np.isfinite(losses).all():
        raise DataError(
            "a trained model gives losses that are not finite because training "
            "diverged: lower learning_rate"
        )
    odds: np.ndarray = -losses - np.log(-np.expm1(-np.maximum(losses, MIN_LOSS)))
    return odds
