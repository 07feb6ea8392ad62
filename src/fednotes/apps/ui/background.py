"""Long-running work in a thread, so that the pages stay responsive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")
_THREAD_NAME = "fednotes-background"


class BackgroundWork(Generic[T]):
    """Work that begins in a separate thread when its result is first requested.

    The thread ends with the process.

    Args:
        work: Computes the result.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._future: Future[T] | None = None

    def get(self, seconds: float = 0.3) -> T | None:
        """Return the result, or None if it is not available within some seconds.

        Raises:
            Exception: The exception of the work. The next call starts the work again.
        """
        with self._lock:
            if self._future is None:
                self._future = Future()
                thread = threading.Thread(
                    target=self._run_work,
                    name=_THREAD_NAME,
                    args=(self._future,),
                    daemon=True,
                )
                thread.start()
            future = self._future
        if not futures.wait((future,), seconds).done:
            return None
        if future.exception():
            self._future = None
        return future.result()

    def _run_work(self, future: Future[T]) -> None:
        """Do the work, and store its result or its exception."""
        try:
            future.set_result(self._work())
        except BaseException as error:  # raised again by `get`
            future.set_exception(error)


def is_work_running() -> bool:
    """Return whether any background work of this process is running."""
    return any(thread.name == _THREAD_NAME for thread in threading.enumerate())
