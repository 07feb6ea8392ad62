"""How a deployed run goes, for people: lines that travel to whoever watches, and a file.

A line is a table with `kind`:

    plan      rounds (0: not known), examples of a round (0: not known), the job's title
    round     a committed round; numbers are of sums over sites
    event     something that a person may want to know, such as a site that is waited for
    end       the run is done
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from fednotes.core.store import write_text
from fednotes.core.update import Tensors, Total, Update
from fednotes.engines.asking import Event
from fednotes.engines.inprocess import RoundResult
from fednotes.federation import Federation, Option, Round, State
from fednotes.jobs import Job

logger = logging.getLogger("fednotes.deployment")
METRICS = "metrics.jsonl"
_TOLD = ("waiting", "missing", "joined")  # kinds of events that travel


class Published(Protocol):
    """Where lines go."""

    def publish(self, line: Mapping[str, Any]) -> None: ...


class Progress:
    """What a server's run tells. state: the run's folder there."""

    def __init__(self, state: Path, pipe: Published, job: Job) -> None:
        self.path = state / METRICS
        self._pipe, self._job = pipe, job
        self._config: Any = None
        self._last = ""
        self._silent: dict[str, str] = {}  # site → why it gave no answer
        self.metrics: Mapping[str, float] = {}
        self.rounds = 0
        self.refusals: list[str] = []

    def begin(self, config: Any, resumed: State | None) -> None:
        """The run starts, or goes on: what was told before is told again."""
        self._config = config
        self.rounds = resumed.round if resumed else 0
        kept = [entry for entry in self._kept() if entry["round"] < self.rounds]
        write_text(self.path, "".join(json.dumps(entry) + "\n" for entry in kept))
        examples = (resumed.facts if resumed else {}).get("examples", 0)
        self.plan([examples] if examples else [])
        for entry in kept:
            self._pipe.publish({"kind": "round", "evaluated": True, **entry})

    def plan(self, sizes: list[int]) -> None:
        """How long it will take. sizes: of the sites, or of all together; [] if not known."""
        plan = self._job.module.planned
        if sizes:
            rounds, each = plan(self._config, sizes)
        else:
            few, many = (plan(self._config, [n])[0] for n in (1, 1_000_000))
            rounds, each = (few if few == many else 0), 0
        line = {"kind": "plan", "title": self._job.title, "rounds": rounds, "examples": each}
        self._pipe.publish(line)

    def round(self, result: RoundResult) -> None:
        """A round was committed."""
        self.rounds, self.metrics = result.round + 1, dict(result.metrics)
        entry = {
            "part": "federated",
            "condition": "federated",
            "round": result.round,
            **result.metrics,
            "took_part": result.sites,
            "bytes_up": result.bytes_up,
            "bytes_down": result.bytes_down,
            "seconds": round(result.seconds, 3),
        }
        if result.evaluated:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
        self._pipe.publish({"kind": "round", "evaluated": result.evaluated, **entry})

    def event(self, event: Event) -> None:
        """Something went wrong, or is well again."""
        if event.kind == "refused":
            self.refusals.append(event.text)
        if event.kind in _TOLD:
            self._tell(event.site, event.text)

    def silent(self, sites: Mapping[str, str]) -> None:
        """Which sites gave no answer just now, and why; the same reason is told once."""
        told = self._silent
        self._silent = dict(sites)
        for site, reason in sites.items():
            if told.get(site) != reason:
                logger.info("no answer from site %r: %s", site, reason)
                self._tell(site, f"no answer from site {site!r}: {reason}")

    def _tell(self, site: str, text: str) -> None:
        if text != self._last:
            self._last = text
            self._pipe.publish({"kind": "event", "text": text, "site": site})

    def end(self) -> None:
        """All is done."""
        self._pipe.publish({"kind": "end", "rounds": self.rounds})

    def _kept(self) -> Iterator[dict[str, Any]]:
        with suppress(OSError):
            for line in self.path.read_text(encoding="utf-8").splitlines():
                with suppress(ValueError, KeyError, TypeError):
                    entry = json.loads(line)
                    int(entry["round"])
                    yield entry


class Told:
    """A federation that notes how many examples all sites have, once a sum says so."""

    def __init__(self, federation: Federation, progress: Progress) -> None:
        self._federation, self._progress = federation, progress
        self.each: Callable[..., Mapping[str, Update]] = federation.each
        self.resume: Callable[[], State | None] = federation.resume
        self.rounds: Callable[[int, int], Iterator[Round]] = federation.rounds

    def sum(self, task: str, tensors: Tensors | None = None, /, **options: Option) -> Total:
        """As the federation's own."""
        total = self._federation.sum(task, tensors, **options)
        if sentences := int(total.metrics.get("sentences", 0)):
            self._progress.plan([sentences])
        return total
