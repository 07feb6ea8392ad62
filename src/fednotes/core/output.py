"""What a person asked for, written where they asked for it (`--out`)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fednotes.core.errors import FednotesError
from fednotes.core.store import replace_file


def write_out(path: Path, text: str) -> None:
    """Write a text as UTF-8 to a place that a person named.

    A file is written whole or not at all, and keeps the permissions that it had. Through a link
    it is the file that the link leads to; the link stays. A device or a FIFO (/dev/stdout) is
    given the bytes. Raises FednotesError.
    """
    try:
        data = text.encode("utf-8")
        path.parent.mkdir(parents=True, exist_ok=True)
        if _takes_bytes(path):
            with open(path, "ab") as stream:  # what the same stdout was given before stays
                stream.write(data)
        else:
            _replace(Path(os.path.realpath(path)), data)
    except (OSError, UnicodeEncodeError) as error:
        reason = getattr(error, "strerror", None) or "the text has characters that UTF-8 has not"
        raise FednotesError(f"{path}: cannot be written ({reason})") from error


def _takes_bytes(path: Path) -> bool:
    """Whether a place is no file to be replaced: not even where the shell led stdout into one."""
    place = os.path.abspath(path)
    if place.startswith(("/dev/std", "/dev/fd/", "/proc/")):
        return True
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _replace(path: Path, data: bytes) -> None:
    """The file that `path` itself is; on disk when this returns."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        replace_file(path, data, mode=0o666)
    else:
        replace_file(path, data, mode=mode, exact=True)
