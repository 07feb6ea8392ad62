"""One process a folder: who comes second is told who holds it.

The lock is the system's (`flock`) on the file `lock` in the folder, so it ends with its process,
however that ends; what is written in it is for people. It holds between machines only where the
file system says so: NFS does from version 4 on, unless mounted with `nolock` or `local_lock`.
"""

from __future__ import annotations

import errno
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from platform import node

from fednotes.core.errors import BusyError, FednotesError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"
_MOST = 500  # bytes of it that are shown
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
logger = logging.getLogger("fednotes.core.lock")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made if there is none; one in which nothing was put then goes.

    It may be moved while it is held: the lock moves along. Raises BusyError, which names the
    process, if another one holds it; FednotesError where it cannot be written.
    """
    try:
        made = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        number, place = _taken(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise FednotesError(f"{folder}: cannot be written ({reason})") from error
    try:
        yield
    finally:
        with suppress(OSError):
            os.unlink(LOCK, dir_fd=place)  # while it is ours: who waits for it looks again
        os.close(number)
        os.close(place)
        if made:
            with suppress(OSError):
                folder.rmdir()


def _taken(folder: Path) -> tuple[int, int]:
    """The open lock and the open folder, once both are those that the path leads to."""
    while True:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        number = -1
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            number = os.open(LOCK, flags, 0o600, dir_fd=place)
            _lock(folder, number)
            if _same(os.stat(LOCK, dir_fd=place), number) and _same(folder.stat(), place):
                os.ftruncate(number, 0)
                os.write(number, _who().encode("utf-8", "replace"))
                return number, place
        except FileNotFoundError:
            pass  # the one who had it has just ended, or moved it away
        except BaseException:
            _close(number, place)
            raise
        _close(number, place)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def _lock(folder: Path, number: int) -> None:
    try:
        if fcntl is not None:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        told = os.pread(number, _MOST, 0).decode("utf-8", "replace")
        who = "".join(c if c.isprintable() else "?" for c in told) or "another process"
        raise BusyError(f"{folder}: in use by {who}: wait for its end, or end it") from error
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning("%s: this file system has no locks: start nothing else there", folder)


def _who() -> str:
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return f"process {os.getpid()} on {node()} since {since} ({command[: _MOST // 2]})"


def _same(found: os.stat_result, number: int) -> bool:
    return os.path.samestat(found, os.fstat(number))


def _close(*numbers: int) -> None:
    for number in numbers:
        if number >= 0:
            os.close(number)
