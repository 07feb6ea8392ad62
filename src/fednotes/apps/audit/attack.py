"""What an attack is, how its success is measured, and which attacks exist.

The success of an attack is its true-positive rate at a false-positive rate of 1 %
(Carlini et al. 2022, "Membership Inference Attacks From First Principles", section 3):
the fraction of the things that are present (words, types, members, …) which the
adversary names while he wrongly names 1 % of the things that are absent. An average
over all thresholds would hide that a few are named with certainty.

    success   TPR at 1 % FPR on the job as it is
    control   the same without any defence; if it is low, the attack proves nothing
    chance    success without information: 0.01, and more where decoys are few

A new attack is a module in `attacks/` whose `ATTACKS` are listed in
`attacks/__init__.py`. All attacks, those of other packages too, are registered as entry
points of the group `fednotes.attacks`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from fednotes.core import plugins
from fednotes.core.errors import ConfigError, FednotesError
from fednotes.jobs.audit_result import Leak
from fednotes.metrics.calibration import wilson

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
        """Measure how well scores tell what is present from what is absent.

        Between two thresholds the adversary draws lots, so his true-positive rate is
        linear there. An adversary without information has a success of `chance`, which
        exceeds 1 % where decoys are few: now and then none of them scores high.

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

        true_positives = _rates_above(targets, thresholds)
        false_positives = _rates_above(decoys, thresholds)
        # The last threshold whose rate is allowed; one more always follows, with a rate
        # of 1.
        last = int(np.searchsorted(false_positives, FALSE_POSITIVE_RATE, side="right"))
        last -= 1
        step = false_positives[last + 1] - false_positives[last]
        lots = (FALSE_POSITIVE_RATE - false_positives[last]) / step
        gain = true_positives[last + 1] - true_positives[last]
        success = float(true_positives[last] + lots * gain)  # [audit success]

        # Without information, all decoys that may be named rank below a target by luck.
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
        """Measure how well scores tell the pairs that occur at the audited site.

        Chance is the success of an adversary who knows how often each of the two things
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
        """Return a trial whose interval is that of Wilson 1927 for `count` targets."""
        low, high = wilson(success, count)
        return cls(success, chance, low, high, details)

    def without_interval(self) -> Self:
        """Return this trial for targets that are not a sample, but all there are."""
        return replace(self, low=self.success, high=self.success)


def _rates_above(scores: np.ndarray, thresholds: np.ndarray) -> np.ndarray:
    """Return (1 + thresholds,) fractions of scores at or above each threshold, 0 first.

    thresholds: descending.
    """
    below = np.searchsorted(np.sort(scores), thresholds)
    return np.append(0.0, len(scores) - below) / len(scores)


@dataclass(frozen=True)
class Attack:
    """One way to learn about notes from what leaves their site.

    Attributes:
        name: Its name in results.
        sees: What the adversary must see, for people.
        closes: What defends against it, for people.
        trial: Try it on a job, as it is or without defences; raises `NotApplicable`
            where the job sends nothing of the kind.
        min_control: Success on the undefended job below which the attack proves
            nothing.
        data: Jobs that it applies to: those on notes, those on patients, or both.
    """

    name: str
    sees: str
    closes: str
    trial: Callable[[Scene], Trial]
    min_control: float = 0.9
    data: Literal["notes", "patients", "any"] = "notes"

    def run(self, scene: Scene) -> Leak:
        """Try the attack on a job and on its control; a failure is a result, too."""
        try:
            self._require_data(scene)
            trial = self.trial(scene)
        except NotApplicable as reason:
            return self._leak(applies=False, why=str(reason))
        except FednotesError as error:
            return self._leak(why=f"could not be tried: {error}")
        try:
            control = self.trial(scene.control())
        except FednotesError as error:
            return self._leak(why=f"could not be tried: {error}")

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

    def _leak(self, *, why: str, applies: bool = True) -> Leak:
        """Return a result without numbers."""
        return Leak(
            attack=self.name,
            sees=self.sees,
            closes=self.closes,
            applies=applies,
            why=why,
        )


def all_attacks() -> Iterator[Attack]:
    """Yield the built-in attacks, then those that other packages register."""
    for attacks in plugins.load_all("attacks", (tuple, list)).values():
        yield from attacks
