"""Attacks, the measure of their success, and the list of all attacks.

The success of an attack is its true-positive rate at a false-positive rate of 1 %
(Carlini et al. 2022, "Membership Inference Attacks From First Principles", section 3):
the fraction of present items (words, types, members, …) that the adversary identifies
while wrongly naming 1 % of the absent items. An average over all thresholds would hide
that a few items are identified with certainty.

    success   TPR at 1 % FPR on the unchanged job
    control   the same without any defence; if it is low, the attack proves nothing
    chance    success without information: 0.01, or more if there are few decoys

A new attack is a module in `attacks/` whose `ATTACKS` are listed in
`attacks/__init__.py`. All attacks, including those of other packages, are registered as
entry points of the group `fednotes.attacks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from fednotes.core import plugins
from fednotes.core.errors import ConfigError, FednotesError
from fednotes.jobs.audit_result import Leak
from fednotes.metrics.calibration import compute_wilson_interval

if TYPE_CHECKING:
    from fednotes.apps.audit.scene import Scene

FALSE_POSITIVE_RATE = 0.01


class NotApplicable(FednotesError):
    """The attack does not apply to this job; the message says why."""


@dataclass(frozen=True)
class Trial:
    """The outcome of one attack on one job; all numbers are fractions.

    Attributes:
        success: True-positive rate at a false-positive rate of 1 %.
        chance: The success of an adversary who sees nothing.
        low: Lower end of the 95 % confidence interval of `success`.
        high: Upper end of that interval.
        details: Further numbers for the report, by name.
    """

    success: float
    chance: float
    low: float
    high: float
    details: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_scores(cls, present: Any, absent: Any, **details: float) -> Self:
        """Measure how well scores separate present items from absent ones.

        Between two thresholds, the adversary chooses at random, so the true-positive
        rate is linear there. An adversary without information has a success of
        `chance`, which exceeds 1 % if there are few decoys, because occasionally none
        of them scores high.

        Args:
            present: Scores of the targets, any shape; a higher score means "more likely
                present".
            absent: Scores of the decoys.
            **details: Further numbers for `details`.

        Raises:
            ConfigError: There are no targets or no decoys, or a score is not finite.
        """
        targets = np.asarray(present, np.float64).ravel()
        decoys = np.asarray(absent, np.float64).ravel()
        if not len(targets) or not len(decoys):
            raise ConfigError(
                "there are no targets, or no decoys to compare them with: audit "
                "more notes"
            )
        thresholds = np.unique(np.concatenate((targets, decoys)))[::-1]
        if not np.isfinite(thresholds).all():
            raise ConfigError(
                "a score is not a finite number because training diverged: "
                "lower learning_rate"
            )

        true_positives = _compute_rates_above(targets, thresholds)
        false_positives = _compute_rates_above(decoys, thresholds)
        # The last threshold with a permitted rate; another always follows, with rate 1.
        last = int(np.searchsorted(false_positives, FALSE_POSITIVE_RATE, side="right"))
        last -= 1
        step = false_positives[last + 1] - false_positives[last]
        fraction = (FALSE_POSITIVE_RATE - false_positives[last]) / step
        gain = true_positives[last + 1] - true_positives[last]
        success = float(true_positives[last] + fraction * gain)  # [audit success]

        # Without information, a target outranks the decoys only by luck.
        allowed = int(FALSE_POSITIVE_RATE * len(decoys) + 1e-9)
        return cls.from_fraction(
            success,
            len(targets),
            (1 + allowed) / (1 + len(decoys)),
            auc=float(np.trapezoid(true_positives, false_positives)),
            targets=float(len(targets)),
            decoys=float(len(decoys)),
            **details,
        )

    @classmethod
    def from_pair_scores(
        cls, scores: Any, counts: np.ndarray, **details: float
    ) -> Self:
        """Measure how well scores identify the pairs that occur at the audited site.

        Chance is the success of an adversary who knows how often each of the two items
        occurs in any pair, but not in which pairs.

        Args:
            scores: (first, second) score of each pair.
            counts: (sites, first, second) how often each pair occurs, the audited site
                first.
            **details: Further numbers for `details`.

        Raises:
            ConfigError: As in `from_scores`.
        """
        at_site = counts[0]
        is_present = at_site > 0
        is_absent = counts.sum(0) == 0
        by_frequency = np.outer(at_site.sum(1), at_site.sum(0))
        trial = cls.from_scores(scores[is_present], scores[is_absent], **details)
        without_order = cls.from_scores(
            by_frequency[is_present], by_frequency[is_absent]
        )
        return replace(trial, chance=max(trial.chance, without_order.success))

    @classmethod
    def from_fraction(
        cls, success: float, count: int, chance: float, /, **details: float
    ) -> Self:
        """Return a trial with the Wilson (1927) interval for `count` targets."""
        low, high = compute_wilson_interval(success, count)
        return cls(success, chance, low, high, details)

    def drop_interval(self) -> Self:
        """Return this trial for targets that are the whole population, not a sample."""
        return replace(self, low=self.success, high=self.success)


def _compute_rates_above(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return the (1 + thresholds,) fractions of scores at or above thresholds, 0 first.

    Args:
        scores: The scores, in any order.
        thresholds: Thresholds, in descending order.
    """
    num_below = np.searchsorted(np.sort(scores), thresholds)
    return np.append(0.0, len(scores) - num_below) / len(scores)


@dataclass(frozen=True)
class Attack:
    """One way to learn about notes from the messages that leave their site.

    Attributes:
        name: Its name in results.
        sees: Description of what the adversary must see.
        closes: Description of the defence against it.
        trial: Tries the attack on a job, unchanged or without defences; raises
            `NotApplicable` if the job sends nothing of the kind.
        min_control: Success on the undefended job below which the attack proves
            nothing.
        data: Kinds of jobs that it applies to: on notes, on patients, or both.
    """

    name: str
    sees: str
    closes: str
    trial: Callable[[Scene], Trial]
    min_control: float = 0.9
    data: Literal["notes", "patients", "any"] = "notes"

    def run(self, scene: Scene) -> Leak:
        """Try the attack on a job and on its control; a failure is also a result."""
        try:
            self._require_data(scene)
            trial = self.trial(scene)
        except NotApplicable as reason:
            return self._make_result_without_numbers(applies=False, why=str(reason))
        except FednotesError as error:
            return self._make_result_without_numbers(why=f"could not be tried: {error}")
        try:
            control = self.trial(scene.get_control())
        except FednotesError as error:
            return self._make_result_without_numbers(why=f"could not be tried: {error}")

        return Leak(
            attack=self.name,
            sees=self.sees,
            closes=self.closes,
            success=trial.success,
            chance=trial.chance,
            low=trial.low,
            high=trial.high,
            control=control.success,
            proven=control.success >= self.min_control,
            details=dict(trial.details),
        )

    def _require_data(self, scene: Scene) -> None:
        """Raise NotApplicable for a job on another kind of data."""
        kind = "patients" if scene.has_patients else "notes"
        if self.data not in ("any", kind):
            raise NotApplicable(f"it applies to models of {self.data}, not of {kind}")

    def _make_result_without_numbers(self, *, why: str, applies: bool = True) -> Leak:
        """Return a result without numbers."""
        return Leak(
            attack=self.name,
            sees=self.sees,
            closes=self.closes,
            applies=applies,
            why=why,
        )


def load_attacks() -> Iterator[Attack]:
    """Yield the built-in attacks, then those registered by other packages."""
    for attacks in plugins.load_all("attacks", (tuple, list)).values():
        yield from attacks
