"""Import large modules fast."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing_fast() -> Iterator[None]:
    """Import large modules in the context without garbage collection.

    Collection would take a quarter of the import time and free nothing.
    """
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_collecting:
            gc.enable()


@contextmanager
def importing_for_good() -> Iterator[None]:
    """Import a program's modules in the context, as in `importing_fast`.

    Later garbage collections also skip what was imported, because it stays until the
    process ends.
    """
    with importing_fast():
        yield
        gc.freeze()
