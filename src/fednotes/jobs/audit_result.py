"""Hold the result of an audit, and read it from audit.json.

An audit tries attacks on a job. Approvals, pages and model cards read its result.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, FiniteFloat

from fednotes.core.numbers import Fraction
from fednotes.jobs.run_files import VERSION, read_versioned

AUDIT = "audit.json"


class Leak(BaseModel):
    """Hold the result of one attack on a job's updates, as fractions.

    Attributes:
        attack: Name of the attack.
        sees: What the attacker must be able to see.
        closes: Which defence stops the attack.
        applies: Whether the attack applies to this job.
        why: Why the attack does not apply or could not be tried.
        success: Success rate on the unchanged job; None if it was not tried.
        chance: Success rate of guessing.
        low: Lower end of the 95% confidence interval of `success`.
        high: Upper end of the 95% confidence interval of `success`.
        control: Success rate of the same attack without any defence.
        proven: Whether the control succeeded; otherwise `success` is meaningless.
        details: Further measurements by name.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    attack: str
    sees: str = ""
    closes: str = ""
    applies: bool = True
    why: str = ""
    success: Fraction | None = None
    chance: Fraction = 0.0
    low: Fraction | None = None
    high: Fraction | None = None
    control: Fraction | None = None
    proven: bool = False
    details: dict[str, FiniteFloat] = {}

    @property
    def advantage(self) -> float:
        """The largest plausible success above chance.

        It uses the upper end of the interval, so that few trials cannot hide a leak.
        """
        return max(self.success or 0.0, self.high or 0.0, self.chance) - self.chance


class Audit(BaseModel):
    """Hold the content of audit.json: what attacks recover from one site's updates.

    Attributes:
        version: Version of the file.
        title: Title of the job.
        method: Name of the method.
        site: The audited site.
        fingerprint: Fingerprint of the job.
        command: Command that repeats the audit.
        seconds: Duration.
        attacks: Result of each attack.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int = VERSION
    title: str = ""
    method: str = ""
    site: str = ""
    fingerprint: str = ""
    command: str = ""
    seconds: FiniteFloat = 0.0
    attacks: list[Leak] = []

    @property
    def worst(self) -> float:
        """The largest advantage of an attack; 0 without attacks."""
        return max((leak.advantage for leak in self.attacks), default=0.0)

    @property
    def unproven(self) -> list[str]:
        """The attacks that apply but prove nothing.

        They were not tried, or fail even without a defence.
        """
        return [
            leak.attack for leak in self.attacks if leak.applies and not leak.proven
        ]

    @property
    def untried(self) -> list[str]:
        """The attacks that apply but have no result."""
        return [
            leak.attack
            for leak in self.attacks
            if leak.applies and leak.success is None
        ]

    @property
    def summary(self) -> str:
        """The result of the audit in one line."""
        none = Leak(attack="none")
        best = max(self.attacks, key=lambda leak: leak.advantage, default=none)
        line = (
            f"the best attack, {best.attack}, may be {best.advantage:.3f} above chance"
        )
        if self.unproven:
            line += f"; these attacks prove nothing: {', '.join(self.unproven)}"
        return line


def read_audit(folder: Path) -> Audit | None:
    """Return a folder's audit.json, or None if there is none.

    Raises:
        DataError: The file is damaged, or of a later version.
    """
    path = folder / AUDIT
    return read_versioned(path, Audit) if path.is_file() else None
