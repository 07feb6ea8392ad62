"""Causes of poor results: what was seen, the evidence, and a setting to try.

`fednotes doctor` lists all causes of a run or a job (`jobs/diagnosis/`). A run records
those that follow from its scores as notes, which reports and the terminal show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fednotes.jobs.toml_text import format_key, format_value

Importance = Literal["high", "medium", "low"]
IMPORTANCES: tuple[Importance, ...] = ("high", "medium", "low")
# A finding that rests on fewer mentions, patients or sentences may be chance, whatever
# share of all they are.
ENOUGH = 20
# The same for sites and rounds.
ENOUGH_ROUNDS = 3


def limit_importance(
    importance: Importance, count: int, enough: int = ENOUGH
) -> Importance:
    """Return an importance that is "low" if few observations support a finding.

    Args:
        importance: The importance with enough observations.
        count: Number of observations, such as mentions.
        enough: Number of observations that suffice.
    """
    return importance if count >= enough else "low"


@dataclass(frozen=True)
class Setting:
    """A value to try for a key of a job.

    Attributes:
        place: The key after the tables around it, such as ("training", "epochs").
        value: The value to try.
        current: The value that the job has; None if it is not known.
    """

    place: tuple[str, ...]
    value: Any
    current: Any = None

    @classmethod
    def of(cls, *place: str, value: Any, current: Any = None) -> Setting:
        """Return a setting of the key with this name in these tables."""
        return cls(place, value, current)

    @property
    def key(self) -> str:
        """The key with its tables, as in a job file, such as "training.epochs"."""
        return ".".join(map(format_key, self.place))

    @property
    def assignment(self) -> str:
        """The key and the value as the option `--set` reads them."""
        return f"{'.'.join(self.place)}={format_value(self.value)}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {"key": self.key, "value": self.value, "current": self.current}

    def __str__(self) -> str:
        return f"{self.key} = {format_value(self.value)}"


@dataclass(frozen=True)
class Evidence:
    """Numbers that show a cause.

    Attributes:
        text: The numbers in words, without text of any note.
        file: The file of the run that holds them, relative to its folder; "" if they
            were counted from the job and its data.
        numbers: The numbers by name, for programs.
    """

    text: str
    file: str = ""
    numbers: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cause:
    """A likely cause of a poor result.

    Attributes:
        code: Stable name, such as "undertrained".
        importance: How much of the result it can explain.
        where: The site, condition or part of the job.
        message: What was seen, in one clause.
        advice: What to do about it, in one clause.
        evidence: The numbers that show it.
        settings: The values to try, the most promising first.
    """

    code: str
    importance: Importance
    where: str
    message: str
    advice: str = ""
    evidence: tuple[Evidence, ...] = ()
    settings: tuple[Setting, ...] = ()

    @property
    def first_settings(self) -> tuple[Setting, ...]:
        """The settings to try together first.

        Settings of different keys are alternatives, but a key that several sites have,
        such as `label_map`, needs its value at each of them.
        """
        if not self.settings:
            return ()
        first, *others = self.settings
        if first.place[0] != "sites":
            return (first,)
        alike = [each for each in others if each.place[-1] == first.place[-1]]
        return (first, *alike)

    def __str__(self) -> str:
        """Return the cause as a note of a run."""
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}: {self.advice}" if self.advice else text

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        settings = [setting.to_dict() for setting in self.settings]
        return {**asdict(self), "settings": settings}
