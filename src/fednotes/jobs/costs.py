"""What a run costs: bytes before it starts, time from its first rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fednotes.data.text import split_sentences
from fednotes.engines.inprocess import RoundResult
from fednotes.jobs.job import Job

LONG = 3600.0  # seconds; a person is asked about more
LARGE = 10e9  # bytes of a site, likewise
SETTLED = 5.0  # seconds of rounds that tell how long the others take
SHORT = 60.0  # seconds that are not worth a line


@dataclass(frozen=True)
class Traffic:
    """What federated training sends at most: bytes of one site in all rounds, as plain numbers.

    up: to the server, down: from it. The secure sum and a carrier's framing come on top.
    """

    rounds: int
    up: int
    down: int

    @property
    def total(self) -> int:
        """Both ways."""
        return self.up + self.down

    def __str__(self) -> str:
        each = " and ".join(
            f"{size(n / max(1, self.rounds))} {way}"
            for n, way in ((self.up, "up"), (self.down, "down"))
        )
        return (
            f"federated: at most {self.rounds:,} rounds, in each about {each} a site: "
            f"{size(self.total)} a site in all"
        )


def traffic(job: Job, config: Any, sites: Sequence[Any]) -> Traffic | None:
    """Of a job's federated part; None where it has none or its method cannot tell.

    config: the method's, with what the sites together say. sites: what each holds.
    """
    if "federated" not in job.conditions:
        return None
    sizes = [1] * len(sites)
    if job.data == "documents":
        sizes = [sum(len(split_sentences(d)) for d in site.train) for site in sites]
    told = job.module.traffic(config, sizes)
    return told and Traffic(job.module.planned(config, sizes)[0], *told)


class Pace:
    """How long a part takes at most, as its first rounds tell."""

    def __init__(self, rounds: int) -> None:
        self._rounds = rounds  # at most; 0: not known
        self._first: tuple[int, float] | None = None

    def left(self, result: RoundResult) -> float | None:
        """Seconds until the last round that there can be; None before they are known."""
        if not self._rounds:
            return None
        if self._first is None:
            self._first = (result.round, result.seconds)
        rounds, seconds = result.round - self._first[0], result.seconds - self._first[1]
        if rounds < 1 or seconds < SETTLED:
            return None
        return (self._rounds - result.round - 1) * seconds / rounds


def size(number: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    raise AssertionError
