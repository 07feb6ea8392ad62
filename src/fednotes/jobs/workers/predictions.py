"""Worker processes that predict notes, seen by the process that starts them.

Each loads the saved model once. The process that starts them reads the notes, deals
windows of them out, and yields the predicted documents in the order of the input. Only
a few windows are under way at a time, so memory does not grow with the input.

For a model of patients, whose notes may be anywhere in the input, workers compute the
features of each note. The process that starts them adds up those of each patient.

The text of notes goes through the pipes of these processes and nowhere else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any, Generic

import torch

from fednotes.core.errors import ParameterError
from fednotes.core.types import Document
from fednotes.engines.carried import make_request
from fednotes.jobs.prediction_windows import AnyNote, Window
from fednotes.jobs.saved_models import LoadOptions, NoteFeatures
from fednotes.jobs.workers.child_process import PREDICTIONS, ChildProcess
from fednotes.jobs.workers.dealing import (
    AUTO,
    EVERY_GPU,
    check_workers,
    choose_devices,
    choose_worker_number,
    count_cores,
    require_worker_number,
)
from fednotes.jobs.workers.prediction_messages import (
    COMPUTE_FEATURES,
    LOAD,
    PREDICT,
    decode_spans,
    encode_notes,
)
from fednotes.jobs.workers.worker_process import WorkerProcess, end_workers
from fednotes.taggers.saving import read_config

# Number of notes from which "auto" starts workers: the start of one takes a few seconds
# of a core.
MANY_NOTES = 10_000
# Remedy for a worker that has ended before its time.
FEWER_WORKERS = "give fewer `workers` if memory is short"
# A worker computes one window while another waits in its pipe.
_WINDOWS_OF_WORKER = 2
# Windows under way for each worker: its own, and one that waits for its turn.
_WINDOWS_UNDER_WAY = 3


def require_possible_workers(options: LoadOptions) -> None:
    """Raise ParameterError for an impossible number of workers."""
    if options.workers == AUTO:
        return
    require_worker_number(options.workers)
    if options.workers == 1 and options.device == EVERY_GPU:
        raise ParameterError(
            f"`device` = {EVERY_GPU!r} distributes workers over all GPUs: set "
            '`workers`, for example to "auto", or name one GPU, such as "cuda"'
        )


def choose_worker_devices(
    folder: Path, options: LoadOptions, notes: int | None, threads: int | None = None
) -> list[str]:
    """Return the device of each worker; one device if this process predicts itself.

    Args:
        folder: Folder of the saved model.
        options: How it is loaded.
        notes: The number of notes; None if it is unknown.
        threads: Number of threads of a process; None for those with which a model that
            finds mentions predicts.

    Raises:
        ConfigError: The number of workers is impossible here, or there is no such
            device.
        ModelError: The folder contains no model, or a damaged one.
    """
    require_possible_workers(options)
    if threads is None:
        threads = _count_threads(folder)
    number = _choose_workers(options, notes, threads)
    if notes is not None:
        number = min(number, max(1, notes))
    return choose_devices(options.device, number)


def _choose_workers(options: LoadOptions, notes: int | None, threads: int) -> int:
    """Return the number of workers that the user chose, or left to this function."""
    if options.workers == AUTO:
        is_large = notes is not None and notes >= MANY_NOTES
        return choose_worker_number(options.device, threads) if is_large else 1
    if options.workers > 1 and options.device == "cpu":
        _require_cores(options.workers, threads)
    return options.workers


def _count_threads(folder: Path) -> int:
    """Return the number of threads with which a model finds mentions."""
    config = read_config(folder)
    prefers_one = config is not None and config.prefers_one_thread
    return 1 if prefers_one else torch.get_num_threads()


def _require_cores(workers: int, threads: int) -> None:
    """Raise ParameterError if there are too few cores."""
    cores = count_cores()
    if threads > 1 and workers * threads > cores:
        fewer = max(1, cores // workers)
        raise ParameterError(
            f"`workers` = {workers}: this model predicts with {threads} threads in "
            f"each process, but this process may use {cores} cores: set the "
            f"environment variable OMP_NUM_THREADS={fewer}, or give fewer `workers`"
        )
    check_workers(workers, threads, cores)


@contextmanager
def running_prediction_workers(
    folder: Path, options: LoadOptions, devices: Sequence[str], remedy: str
) -> Iterator[PredictionWorkers]:
    """Yield workers that have loaded a model; they end with the context.

    Args:
        folder: Folder of the saved model.
        options: How it is loaded.
        devices: The device of each worker.
        remedy: What to do if a worker ends before its time.

    Raises:
        ModelError: The model cannot be loaded.
        WorkerError: A worker has ended before its time.
    """
    workers: list[WorkerProcess] = []
    try:
        for number, device in enumerate(devices, 1):
            child = ChildProcess(PREDICTIONS)
            worker = WorkerProcess(child, number, device, remedy=remedy)
            workers.append(worker)
            worker.duty = "loaded the model"
            values = {
                "folder": str(folder.absolute()),
                "options": asdict(replace(options, device=device, workers=1)),
                "threads": torch.get_num_threads(),
            }
            worker.send(make_request(LOAD, values).frame)
        types: Sequence[str] = ()
        for worker in workers:
            types = worker.wait_for_result()
            worker.duty = "predicted notes"
        yield PredictionWorkers(workers, tuple(types))
    finally:
        end_workers(workers)


@dataclass(eq=False)
class _SentWindow(Generic[AnyNote]):
    """A window that was sent to a worker.

    Attributes:
        notes: Its notes.
        results: The result for each note as JSON values; None until they are computed.
    """

    notes: Sequence[AnyNote]
    results: Sequence[Any] | None = None

    def pair(self) -> Iterator[tuple[AnyNote, Any]]:
        """Yield each note with its result."""
        assert self.results is not None
        yield from zip(self.notes, self.results, strict=True)


@dataclass(eq=False)
class _BusyWorker:
    """A worker, and the windows that were sent to it and have no results.

    Attributes:
        process: The process.
        windows: The windows, in the order in which it computes them.
    """

    process: WorkerProcess
    windows: deque[_SentWindow[Any]] = field(default_factory=deque)


class PredictionWorkers:
    """Processes that have loaded a model (`WindowPredictor`).

    They compute the windows of one input at a time, to its end.

    Args:
        workers: The processes.
        types: What the model predicts.

    Attributes:
        types: What the model predicts: entity types, phenotypes or codes.
    """

    def __init__(
        self, workers: Sequence[WorkerProcess], types: tuple[str, ...]
    ) -> None:
        self.types = types
        self._workers = [_BusyWorker(worker) for worker in workers]

    def predict_windows(
        self, windows: Iterable[Window], threshold: float
    ) -> Iterator[Document]:
        """Yield the documents of windows with predicted spans, in their order.

        Args:
            windows: The windows. A few are read before they are needed.
            threshold: Spans of a lower confidence are left out.

        Raises:
            WorkerError: A worker has ended before its time.
            Exception: A worker raised it, or the windows did. Windows before an error
                of the input are predicted first.
        """

        def ask(documents: Window) -> bytes:
            values = {"notes": encode_notes(documents), "threshold": threshold}
            return make_request(PREDICT, values).frame

        for document, spans in self._compute(windows, ask):
            yield replace(document, spans=decode_spans(spans))

    def compute_features(
        self, windows: Iterable[Sequence[AnyNote]]
    ) -> Iterator[tuple[AnyNote, NoteFeatures]]:
        """Yield the notes of windows with the features that a model of patients reads.

        Args:
            windows: The windows. A few are read before they are needed.

        Raises:
            WorkerError: A worker has ended before its time.
            Exception: As in `predict_windows`.
        """

        def ask(notes: Sequence[AnyNote]) -> bytes:
            texts = [note.text for note in notes]
            return make_request(COMPUTE_FEATURES, texts).frame

        yield from self._compute(windows, ask)

    def _compute(
        self,
        windows: Iterable[Sequence[AnyNote]],
        ask: Callable[[Sequence[AnyNote]], bytes],
    ) -> Iterator[tuple[AnyNote, Any]]:
        """Yield the notes of windows with the workers' results, in order.

        Args:
            windows: The windows.
            ask: Returns the encoded request for a window.
        """
        unread = _ReadAhead(windows)
        under_way: deque[_SentWindow[AnyNote]] = deque()
        limit = len(self._workers) * _WINDOWS_UNDER_WAY
        with DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.process, EVENT_READ, worker)
            while True:
                self._send_windows(unread, under_way, limit, ask)
                if not under_way:
                    break
                if under_way[0].results is not None:
                    yield from under_way.popleft().pair()
                    continue
                for key, _ in selector.select():
                    _receive_result(key.data)
        unread.raise_error()

    def _send_windows(
        self,
        unread: _ReadAhead[AnyNote],
        under_way: deque[_SentWindow[AnyNote]],
        limit: int,
        ask: Callable[[Sequence[AnyNote]], bytes],
    ) -> None:
        """Send windows to the workers that have fewest, until all have enough.

        Args:
            unread: The windows of the input.
            under_way: The windows that were sent and are not yielded; grows.
            limit: The largest number of them.
            ask: Returns the encoded request for a window.
        """
        while len(under_way) < limit:
            worker = min(self._workers, key=lambda each: len(each.windows))
            if len(worker.windows) >= _WINDOWS_OF_WORKER:
                return
            notes = unread.take_window()
            if notes is None:
                return
            worker.process.send(ask(notes))
            window = _SentWindow(notes)
            worker.windows.append(window)
            under_way.append(window)


def _receive_result(worker: _BusyWorker) -> None:
    """Receive the results of the first window that a worker has."""
    results = worker.process.wait_for_result()
    worker.windows.popleft().results = results


class _ReadAhead(Generic[AnyNote]):
    """Windows that are read before they are needed.

    An error of the input waits until the windows before it are predicted, as it would
    in one process.

    Args:
        windows: The windows.
    """

    def __init__(self, windows: Iterable[Sequence[AnyNote]]) -> None:
        self._windows = iter(windows)
        self._error: Exception | None = None

    def take_window(self) -> Sequence[AnyNote] | None:
        """Return the next window; None if there is none."""
        if self._error is not None:
            return None
        try:
            return next(self._windows, None)
        except Exception as error:
            self._error = error
            return None

    def raise_error(self) -> None:
        """Raise the error of the input, if there was one."""
        if self._error is not None:
            raise self._error
