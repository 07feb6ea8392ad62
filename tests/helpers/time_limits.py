"""Time limits for a part of a test."""

from __future__ import annotations

import gc
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_waiting(seconds: int = 20) -> Iterator[None]:
    """Fail a test whose block takes longer, such as one that waits for a FIFO."""

    def late(number: int, frame: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def processor_time_below(seconds: float) -> Iterator[None]:
    """Fail a test whose block takes more processor time.

    The garbage collector rests, because it would walk through the objects of all tests
    that ran before.
    """
    gc.collect()
    gc.disable()
    start = time.process_time()
    try:
        yield
        processor_time = time.process_time() - start
    finally:
        gc.enable()
    assert processor_time < seconds
