"""Trackers of experiments, which packages register, as listeners of a run.

Nothing is tracked unless a person names a tracker and where it writes, such as
"mlflow=http://tracker.example:5000". A tracker that fails never ends a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fednotes.core import plugins
from fednotes.core.cleaning import clean_to_one_line
from fednotes.core.databases import hide_passwords
from fednotes.core.errors import ConfigError, ParameterError, suggest_name
from fednotes.engines.rounds import RoundResult
from fednotes.jobs.parts import Part
from fednotes.jobs.progress import ListenerGroup, ProgressListener

_SEPARATOR = "="
_MAX_MESSAGE = 200  # characters of a tracker's error


@dataclass(frozen=True)
class TrackerKind:
    """A kind of trackers. A package registers it in the group `fednotes.trackers`.

    Attributes:
        open: Returns a tracker that writes to a target. It raises an error only if a
            package is missing or the target is impossible, and connects to nothing yet.
        target: What the target is, such as "URI" or "FOLDER".
    """

    open: Callable[[str], ProgressListener]
    target: str


def add_trackers(
    listener: ProgressListener, trackers: Iterable[str]
) -> ProgressListener:
    """Return a listener that also passes the events of a run to trackers.

    Args:
        listener: The listener. It receives a warning if a tracker fails.
        trackers: The name of each tracker and its target, such as
            "tensorboard=FOLDER".

    Raises:
        ConfigError: There is no such tracker, or its target is impossible.
        MissingExtra: A package that the tracker needs is not installed.
    """
    opened = [_open_tracker(text, listener.warn) for text in trackers]
    return ListenerGroup((listener, *opened)) if opened else listener


def require_trackers(trackers: Iterable[str]) -> None:
    """Check trackers before a run begins; see `add_trackers`."""
    for text in trackers:
        _open_tracker(text, lambda _warning: None)


def _open_tracker(text: str, warn: Callable[[str], None]) -> ProgressListener:
    """Return the tracker that a text such as "tensorboard=FOLDER" names."""
    name, _, target = text.partition(_SEPARATOR)
    known = plugins.list_entries("trackers")
    if name not in known:
        raise ConfigError(f"unknown tracker {name!r}: {suggest_name(name, known)}")
    kind: TrackerKind = plugins.load_entry(known[name], TrackerKind)
    if not target:
        raise ParameterError(
            f"`track`: {name} needs a target: give {name}{_SEPARATOR}{kind.target}"
        )
    return _GuardedTracker(name, kind.open(target), warn)


class _GuardedTracker(ProgressListener):
    """Passes events to a tracker until it fails, and then warns once.

    Args:
        name: Name of the tracker.
        tracker: The tracker.
        warn: Receives the warning.
    """

    def __init__(
        self, name: str, tracker: ProgressListener, warn: Callable[[str], None]
    ) -> None:
        self._name = name
        self._tracker: ProgressListener | None = tracker
        self._warn = warn

    def start(self, folder: Path) -> None:
        self._pass_on(lambda tracker: tracker.start(folder))

    def finish(self, folder: Path) -> None:
        self._pass_on(lambda tracker: tracker.finish(folder))

    def fail(self) -> None:
        self._pass_on(lambda tracker: tracker.fail())

    def begin(self, part: Part, rounds: int, examples: int) -> None:
        self._pass_on(lambda tracker: tracker.begin(part, rounds, examples))

    def round(self, result: RoundResult) -> None:
        self._pass_on(lambda tracker: tracker.round(result))

    def end(self) -> None:
        self._pass_on(lambda tracker: tracker.end())

    def seed(self, seed: int, place: int, total: int) -> None:
        self._pass_on(lambda tracker: tracker.seed(seed, place, total))

    def _pass_on(self, event: Callable[[ProgressListener], None]) -> None:
        """Pass an event to the tracker; if it fails, warn and pass no more events."""
        if self._tracker is None:
            return
        try:
            event(self._tracker)
        except Exception as error:
            self._tracker = None
            text = hide_passwords(str(error) or type(error).__name__)
            reason = clean_to_one_line(text, _MAX_MESSAGE)
            self._warn(
                f"{self._name} failed, and no longer tracks this run ({reason}); to "
                f"track it afterwards: fednotes export {self._name}"
            )
