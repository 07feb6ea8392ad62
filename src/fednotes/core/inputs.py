"""Opening files that others may have put there: nobody is waited for."""

from __future__ import annotations

import errno
import os
import stat

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}


class NotAFile(OSError):
    """A FIFO, a socket or a device stands where a file should."""


def regular(name: str, flags: int) -> int:
    """The `opener` of `open` for a regular file, or a folder (whoever opens one has the words).

    What was opened is asked what it is: nobody can put another in its place in between. Raises
    OSError; NotAFile for a FIFO, a socket or a device.
    """
    number = os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        require_file(os.fstat(number).st_mode)
    except NotAFile:
        os.close(number)
        raise
    return number


def require_file(mode: int) -> None:
    """Pass the mode of a file or a folder. Raises NotAFile."""
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = _KINDS.get(stat.S_IFMT(mode), "a device")
        raise NotAFile(errno.EINVAL, f"{kind}, and only files are read: put one in its place")
