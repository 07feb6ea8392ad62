"""Files and folders that are whole or absent, and one process a folder.

Both are written beside their place and renamed into it, so a killed process or a full
disk leaves the earlier one whole.

What a run or a kit keeps derives from notes, so files and folders are for their owner
alone unless whoever writes them says otherwise.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import secrets
import shlex
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from pathlib import Path
from platform import node
from typing import IO, Any

from safetensors import SafetensorError

from fednotes.core.cleaning import clean
from fednotes.core.errors import BusyError, FednotesError, on_disk

_WHOLE = "; what was there before is whole"
_KINDS = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a FIFO"}
_MOST_LINKS = 40  # that lead to each other, as in the system
ATTEMPTS = 5  # at putting a folder into its place while others do the same


def replace_file(
    path: Path,
    data: bytes | bytearray | memoryview,
    *,
    mode: int = 0o600,
    exact: bool = False,
) -> None:
    """Put a file into its place atomically; it and its name are on disk when this
    returns.

    mode: its permissions, less the umask; exact: whatever the umask says. Raises
    OSError: whoever calls has the words for it.
    """
    with replacing(path, mode=mode, exact=exact) as file:
        file.write(data)


@contextmanager
def replacing(
    path: Path, *, mode: int = 0o600, exact: bool = False
) -> Iterator[IO[bytes]]:
    """Yield a file to write into, which takes its place atomically when the block ends.

    Where the block raises, what was at the path before stays as it was.

    Args:
        path: The place.
        mode: Its permissions, less the umask.
        exact: Whether the permissions are these whatever the umask says.

    Raises:
        OSError: The disk refuses; whoever calls has the words for it.
    """
    temporary = beside(path)
    try:
        with open(
            temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)
        ) as file:
            yield file
            file.flush()
            if exact:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)  # or a power cut takes the name back
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def private_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, for their owner alone."""
    if not path.exists():
        private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def owned(name: str, flags: int) -> int:
    """The `opener` of `open` for a file that only its owner can read."""
    return os.open(name, flags, 0o600)


@contextmanager
def alone(path: Path) -> Iterator[IO[bytes]]:
    """A file, made for its owner if there is none, that nobody else has for the while:
    who comes second waits."""
    with os.fdopen(
        owned(str(path), os.O_RDWR | os.O_CREAT), "r+b", buffering=0
    ) as file:
        lock(file)
        yield file


def make_private(folder: Path) -> dict[Path, int]:
    """Take a folder, and all that is in it, from everybody but its owner. No link is
    followed.

    Returns:
        What was open to others, with the permissions that it had.

    Raises:
        FednotesError: Something there belongs to another user, so it cannot be closed.
    """
    closed: dict[Path, int] = {}
    for place, _, names in os.walk(folder):
        for path in (Path(place), *(Path(place, name) for name in names)):
            with suppress(FileNotFoundError):  # it went away meanwhile
                mode = path.lstat().st_mode
                if stat.S_ISLNK(mode) or not mode & 0o077:
                    continue
                try:
                    path.chmod(stat.S_IMODE(mode) & 0o700)
                except PermissionError as error:
                    raise FednotesError(
                        f"{path}: belongs to another user of this machine, and others can open "
                        "it: use a folder of your own"
                    ) from error
                closed[path] = stat.S_IMODE(mode)
    return closed


def beside(path: Path, ending: str = "tmp") -> Path:
    """A hidden name in the same folder that nobody else takes: process numbers are not
    unique where containers share a volume."""
    return path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.{ending}")


def lock(file: int | IO[Any], *, wait: bool = True) -> bool:
    """Take the system's lock (`flock`) on an open file or folder; whether it is ours.

    It ends when that is closed, however its process ends, and holds between machines
    only where the file system says so: NFS does from version 4 on, unless mounted with
    `nolock` or `local_lock`. Raises OSError.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


@contextmanager
def holding(folder: Path) -> Iterator[bool]:
    """Whether surely nobody else is writing a folder, in whatever container; it is ours
    for the while then."""
    with ExitStack() as opened:
        ours = False
        with suppress(OSError):
            number = os.open(folder, os.O_RDONLY)
            opened.callback(os.close, number)
            ours = lock(number, wait=False) and _same(folder.stat(), number)
        yield ours


@contextmanager
def new_folder(path: Path, *, mode: int = 0o777) -> Iterator[None]:
    """Make a folder that others leave in peace for the while; mode: less the umask."""
    # somebody's cleaning may come between the next two lines
    for last in (False, False, True):
        path.mkdir(mode=mode, exist_ok=True)
        with holding(path) as ours:
            if ours or last:  # else there are no locks here
                yield
                return


def sync_folder(path: Path) -> None:
    """Names that were given and taken in a folder are so on disk when this returns."""
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    except OSError as error:
        # a file system that has no such thing
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


def write_text(path: Path, text: str, *, private: bool = True) -> None:
    """Write a text file atomically, on disk when this returns.

    private: False for what a person asked for, whose permissions the umask says.
    """
    with on_disk(path, FednotesError, _WHOLE):
        private_folder(path.parent) if private else path.parent.mkdir(
            parents=True, exist_ok=True
        )
        replace_file(path, text.encode(), mode=0o600 if private else 0o666)


def write_json(path: Path, value: Any, *, private: bool = True) -> None:
    """Write a JSON file atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False)
    write_text(path, f"{text}\n", private=private)


def write_folder(
    path: Path, fill: Callable[[Path], None], *, private: bool = True
) -> None:
    """Make a folder atomically: `fill` writes into a temporary sibling, then it is
    renamed.

    A folder that was there before is replaced, and stays whole if `fill` fails.
    private: as in `write_text`, whatever permissions `fill` gives.
    """
    folder, temporary, old = path.parent, beside(path), beside(path, "old")
    try:
        with on_disk(path, FednotesError, _WHOLE):
            private_folder(folder) if private else folder.mkdir(
                parents=True, exist_ok=True
            )
            with new_folder(temporary, mode=0o700 if private else 0o777):
                fill(temporary)
                if private:
                    make_private(temporary)
                sync_folder(temporary)
            for left in reversed(range(ATTEMPTS)):
                if path.exists():
                    with suppress(FileNotFoundError):
                        os.replace(path, old)
                try:
                    os.replace(temporary, path)
                    break
                except OSError as error:
                    # another process was here in between: the last one stays
                    if not left or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                shutil.rmtree(old, ignore_errors=True)
            sync_folder(folder)
    except SafetensorError as error:
        raise FednotesError(
            f"{path}: cannot be written ({error}); is the disk full?"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            if old.exists() and not path.exists():
                os.replace(old, path)  # whatever stopped us between the two renames
            shutil.rmtree(old, ignore_errors=True)


def write_out(path: Path, text: str | bytes) -> None:
    """Write bytes, or a text as UTF-8, to a place that a person named.

    Raises as `stream_out`.
    """
    with stream_out(path) as file:
        file.write(text.encode("utf-8") if isinstance(text, str) else text)


@contextmanager
def stream_out(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write into piece by piece, for a place that a person named
    (`--out`).

    A file is there whole when the block ends, or not at all. One that was this user's
    keeps its permissions. Through a link it is the file that the link leads to; the
    link stays. A device or a FIFO (/dev/stdout) is given the bytes as they come.

    Another user of the machine who may write in the same folder (/tmp) can put a link
    or a FIFO at the place beforehand. It is not followed or written to.

    Raises:
        FednotesError: The place cannot be written or is another user's link or FIFO, or
            a text has characters that UTF-8 has not.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        real = _followed(path)
        if _is_stream(real):
            with open(
                real, "ab"
            ) as stream:  # what the same stdout was given before stays
                yield stream
            return
        try:
            status = real.lstat()
        except FileNotFoundError:
            status = None
        if (
            status is None
            or stat.S_ISREG(status.st_mode)
            or stat.S_ISDIR(status.st_mode)
        ):
            ours = status is not None and status.st_uid == os.geteuid()
            asked = (
                stat.S_IMODE(status.st_mode) if status is not None and ours else 0o666
            )
            with replacing(real, mode=asked, exact=ours) as file:
                yield file
        else:
            _require_trusted(real, status)
            with open(real, "ab", opener=_without_creating) as stream:
                if not os.path.samestat(status, os.fstat(stream.fileno())):
                    raise OSError(errno.ESTALE, "it was replaced meanwhile")
                yield stream
    except (OSError, UnicodeEncodeError) as error:
        reason = (
            getattr(error, "strerror", None)
            or "the text has characters that UTF-8 has not"
        )
        raise FednotesError(f"{path}: cannot be written ({reason})") from error


def _followed(path: Path) -> Path:
    """Return where the links at a path lead. The system follows those in its folders.

    Raises:
        OSError: Another user could have put a link there, or there are too many.
    """
    for _ in range(_MOST_LINKS):
        if _is_stream(path):
            return path
        try:
            target = os.readlink(path)
        except FileNotFoundError:
            return path
        except OSError as error:
            if error.errno == errno.EINVAL:  # not a link
                return path
            raise
        _require_trusted(path, os.lstat(path))
        path = path.parent / target
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _is_stream(path: Path) -> bool:
    """Return whether a path names a file that this process has open, such as
    /dev/stdout."""
    return os.path.abspath(path).startswith(("/dev/std", "/dev/fd/", "/proc/"))


def _require_trusted(path: Path, status: os.stat_result) -> None:
    """Pass a link, a FIFO or a device that no other user can have put into a shared
    folder.

    The system has this rule for links in folders such as /tmp where
    `fs.protected_symlinks` and `fs.protected_fifos` are set.

    Raises:
        PermissionError: Everybody may write in its folder, and it belongs to another
            user.
    """
    folder = path.parent.stat()
    if folder.st_mode & 0o002 and status.st_uid not in (os.geteuid(), folder.st_uid, 0):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise PermissionError(
            errno.EPERM,
            f"another user of this machine has put {kind} there: write into a folder of your own",
        )


def _without_creating(name: str, flags: int) -> int:
    return os.open(name, flags & ~os.O_CREAT | os.O_NOFOLLOW)


LOCK = "lock"  # the file in a held folder; what is written in it is for people
_MOST = 500  # bytes of it that are shown
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
logger = logging.getLogger("fednotes.core.store")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Hold a folder, which is made if there is none; one in which nothing was put then
    goes.

    It may be moved while it is held: the lock moves along. Raises BusyError, which
    names the process, if another one holds it; FednotesError where it cannot be
    written.
    """
    with on_disk(folder, FednotesError):
        made = not folder.exists()
        number, place = _taken(folder)
    try:
        yield
    finally:
        with suppress(OSError):
            # while it is ours: who waits for it looks again
            os.unlink(LOCK, dir_fd=place)
        os.close(number)
        os.close(place)
        if made:
            with suppress(OSError):
                folder.rmdir()


def _taken(folder: Path) -> tuple[int, int]:
    """The open lock and the open folder, once both are those that the path leads to."""
    while True:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with ExitStack() as opened, suppress(FileNotFoundError):
            # not found: the one who had it has just ended, or moved it away
            place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            opened.callback(os.close, place)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            number = os.open(LOCK, flags, 0o600, dir_fd=place)
            opened.callback(os.close, number)
            if (
                os.fstat(number).st_nlink > 1
            ):  # what is written into it would be in another file
                raise FednotesError(
                    f"{folder / LOCK}: is a hard link to another file: delete it, if no other "
                    "command is running there"
                )
            _lock(folder, number)
            if _same(os.stat(LOCK, dir_fd=place), number) and _same(
                folder.stat(), place
            ):
                since = datetime.now().astimezone().isoformat(" ", "seconds")
                command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])[
                    : _MOST // 2
                ]
                who = f"process {os.getpid()} on {node()} since {since} ({command})"
                os.ftruncate(number, 0)
                os.write(number, who.encode("utf-8", "replace"))
                opened.pop_all()
                return number, place


def _lock(folder: Path, number: int) -> None:
    try:
        if not lock(number, wait=False):
            told = os.pread(number, _MOST, 0).decode("utf-8", "replace")
            who = clean(told) or "another process"
            raise BusyError(f"{folder}: in use by {who}: wait for its end, or end it")
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            "%s: this file system has no locks: start nothing else there", folder
        )


def _same(found: os.stat_result, number: int) -> bool:
    return os.path.samestat(found, os.fstat(number))
