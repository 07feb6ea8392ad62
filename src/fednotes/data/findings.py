"""What a check found: a level, a name that stays, a place, a sentence and its numbers.

Levels: info (good to know), warning (look at it), error (training would fail or mislead).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from fednotes.core.errors import Problem

Level = Literal["info", "warning", "error"]
LEVELS: tuple[Level, ...] = ("info", "warning", "error")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found. code: stable name. where: corpus, site or part. counts: the numbers.
    problems: each by file and line, where they are known."""

    level: Level
    code: str
    where: str
    message: str
    counts: Mapping[str, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def __str__(self) -> str:
        return f"{self.level:<8} {self.where}: {self.message}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Report:
    """All findings, in the order of the checks. Reports add."""

    findings: tuple[Finding, ...] = ()

    def __add__(self, other: Report) -> Report:
        return Report(self.findings + other.findings)

    @property
    def worst(self) -> Level:
        """The most serious level that occurs ("info" if nothing was found)."""
        return max((f.level for f in self.findings), key=LEVELS.index, default="info")

    def of(self, code: str) -> tuple[Finding, ...]:
        """The findings with that code."""
        return tuple(f for f in self.findings if f.code == code)
