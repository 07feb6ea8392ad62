"""Events of a run, and their listeners."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from fednotes.engines.rounds import RoundResult
from fednotes.jobs.parts import Part, Traffic

# A person has to confirm a run that takes longer, or more bytes per site.
LONG_SECONDS = 3600.0
LARGE_BYTES = 10e9


class ProgressListener:
    """Receives the events of a run; this default ignores them."""

    def start(self, folder: Path) -> None:
        """Be notified that a run starts or resumes.

        Args:
            folder: Folder of the run, which describes the job (`jobs/run_folder.py`).
        """

    def finish(self, folder: Path) -> None:
        """Be notified that a run has ended.

        Args:
            folder: Folder of the run, with its results and the cards of its models.
        """

    def fail(self) -> None:
        """Be notified that a run stopped before its end, and may resume later."""

    def cost(self, traffic: Traffic) -> None:
        """Receive the traffic of federated training, once it is known."""

    def plan(self, work: Mapping[str, float]) -> None:
        """Receive the work of each part to be trained, by the part's name.

        Args:
            work: Examples that all rounds of a part read; 0 where it is unknown.
        """

    def begin(self, part: Part, rounds: int, examples: int) -> None:
        """Be notified that a part starts or resumes.

        Args:
            part: The part.
            rounds: Largest number of its rounds.
            examples: Training examples of all sites in a round; 0 if it is unknown.
        """

    def round(self, result: RoundResult) -> None:
        """Receive a committed round."""

    def end(self) -> None:
        """Be notified that the training of the part has ended."""

    def features(self, done: int, total: int) -> None:
        """Receive the number of texts with features, or of notes read so far."""

    def warn(self, text: str) -> None:
        """Receive a warning to show before training."""

    def seed(self, seed: int, place: int, total: int) -> None:
        """Be notified that the next of several runs is starting.

        Args:
            seed: Seed of the run.
            place: Position of the run among all runs, from 1.
            total: Number of runs.
        """


# A listener, or a function that receives a part's name and each of its rounds.
AnyListener = ProgressListener | Callable[[str, RoundResult], None] | None


class _RoundListener(ProgressListener):
    """Passes each round to a function together with the name of the part."""

    def __init__(self, on_round: Callable[[str, RoundResult], None]) -> None:
        self._on_round = on_round
        self._part = ""
        self._run = ""

    def begin(self, part: Part, rounds: int, examples: int) -> None:
        del rounds, examples
        self._part = self._run + part.name

    def seed(self, seed: int, place: int, total: int) -> None:
        del place, total
        self._run = f"seed-{seed}/"

    def round(self, result: RoundResult) -> None:
        self._on_round(self._part, result)


class ListenerGroup(ProgressListener):
    """Passes each event to several listeners, in their order.

    Args:
        listeners: The listeners.
    """

    def __init__(self, listeners: Sequence[ProgressListener]) -> None:
        self._listeners = tuple(listeners)

    def start(self, folder: Path) -> None:
        """Pass the event on."""
        for listener in self._listeners:
            listener.start(folder)

    def finish(self, folder: Path) -> None:
        """Pass the event on."""
        for listener in self._listeners:
            listener.finish(folder)

    def fail(self) -> None:
        """Pass the event on."""
        for listener in self._listeners:
            listener.fail()

    def cost(self, traffic: Traffic) -> None:
        """Pass the event on."""
        for listener in self._listeners:
            listener.cost(traffic)

    def plan(self, work: Mapping[str, float]) -> None:
        """Pass the event on."""
        for listener in self._listeners:
            listener.plan(work)

    def begin(self, part: Part, rounds: int, examples: int) -> None:
        """Pass the event on."""
        for listener in self._listeners:
            listener.begin(part, rounds, examples)

    def round(self, result: RoundResult) -> None:
        """Pass the event on."""
        for listener in self._listeners:
            listener.round(result)

    def end(self) -> None:
        """Pass the event on."""
        for listener in self._listeners:
            listener.end()

    def features(self, done: int, total: int) -> None:
        """Pass the event on."""
        for listener in self._listeners:
            listener.features(done, total)

    def warn(self, text: str) -> None:
        """Pass the event on."""
        for listener in self._listeners:
            listener.warn(text)

    def seed(self, seed: int, place: int, total: int) -> None:
        """Pass the event on."""
        for listener in self._listeners:
            listener.seed(seed, place, total)


@contextmanager
def reporting(listener: ProgressListener, folder: Path) -> Iterator[None]:
    """Notify a listener that a run starts, and that it stops if an error ends it.

    Args:
        listener: The listener.
        folder: Folder of the run.
    """
    listener.start(folder)
    try:
        yield
    except BaseException:
        listener.fail()
        raise


def to_listener(listener: AnyListener) -> ProgressListener:
    """Return a listener made from a listener, a function or None."""
    if listener is None:
        return ProgressListener()
    if isinstance(listener, ProgressListener):
        return listener
    return _RoundListener(listener)
