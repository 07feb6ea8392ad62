"""Atomic writing of files and folders, and exclusive use of folders.

Files and folders are written under a temporary name and renamed, so a killed process or
a full disk leaves the earlier version intact.

Files of a run or a kit are derived from notes. Files and folders are therefore readable
only by their owner, unless the caller requests otherwise.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import mmap
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
from fednotes.core.errors import BusyError, FednotesError, raising_os_errors_as

_KINDS = {stat.S_IFLNK: "a link", stat.S_IFIFO: "a FIFO"}
_MAX_LINKS = 40  # in a chain of links, the limit of the operating system
ATTEMPTS = 5  # at renaming a folder while other processes do the same
BLOCK_BYTES = 4096  # block size of most file systems
LARGE_BYTES = 10_000_000  # smaller messages stay in memory
DIRECT_BYTES = 2**22  # written at a time past the cache; smaller files are not
_LOCK_ATTEMPTS = 3  # at locking a folder that other processes may clean up


def replace_file(
    path: Path,
    data: bytes | bytearray | memoryview,
    *,
    mode: int = 0o600,
    exact: bool = False,
) -> None:
    """Write a file atomically; its content and name are on disk on return.

    Args:
        path: The file.
        data: The content.
        mode: The permissions, before applying the umask.
        exact: Whether to ignore the umask.

    Raises:
        OSError: Writing to disk failed; the caller should word the message.
    """
    with replacing(path, mode=mode, exact=exact) as file:
        view = memoryview(data)
        written = _write_past_cache(file.fileno(), view)
        file.write(view[written:])


def _write_past_cache(descriptor: int, data: memoryview) -> int:
    """Write the beginning of large data to a file, bypassing the page cache.

    A site stores each message on disk before it answers, and seldom reads it again.
    Copying a large message into the page cache first can take longer than writing it.

    Args:
        descriptor: The file, at its beginning.
        data: The content.

    Returns:
        The number of bytes written: a multiple of `DIRECT_BYTES`. It is 0 for data that
        are not large, or if the file system does not support this.

    Raises:
        OSError: Writing to disk failed.
    """
    if len(data) < DIRECT_BYTES or not hasattr(os, "O_DIRECT"):
        return 0
    written = 0
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    # O_DIRECT needs memory that begins at the address of a page, as a map does.
    with mmap.mmap(-1, DIRECT_BYTES) as block:
        try:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
            while len(data) - written >= DIRECT_BYTES:
                block[:] = data[written : written + DIRECT_BYTES]
                written += os.write(descriptor, block)
        except OSError as error:
            is_unsupported = error.errno == errno.EINVAL
            if not is_unsupported:
                raise
        finally:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return written


@contextmanager
def replacing(
    path: Path, *, mode: int = 0o600, exact: bool = False
) -> Iterator[IO[bytes]]:
    """Yield a file that replaces `path` atomically when the context ends.

    If the context raises, the earlier file is unchanged.

    Args:
        path: The file.
        mode: The permissions, before applying the umask.
        exact: Whether to ignore the umask.

    Raises:
        OSError: Writing to disk failed; the caller should word the message.
    """

    def create(name: str, flags: int) -> int:
        """Create the temporary file with the requested permissions."""
        return os.open(name, flags, mode)

    temporary = make_temporary_path(path)
    try:
        with open(temporary, "xb", opener=create) as file:
            yield file
            file.flush()
            if exact:
                os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)  # otherwise a power cut could undo the renaming
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def create_private_folder(path: Path) -> None:
    """Create a folder and its missing parents, readable only by their owner.

    Raises:
        OSError: The folder cannot be created, or another user has put a link there.
    """
    path = follow_links(path)
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)


def open_private(name: str, flags: int) -> int:
    """Open a file that only its owner can read; use it as the `opener` of `open`."""
    return os.open(name, flags, 0o600)


def open_unless_link(name: str, flags: int) -> int:
    """Open a private file that is neither a link nor a FIFO; an `opener` for `open`.

    Another user may have put one into the folder.

    Raises:
        OSError: The path is a link, a FIFO or a device, or cannot be opened.
    """
    # A FIFO without a reader would otherwise block until one comes.
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(name, flags, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        message = "not a regular file: remove it, or choose another path"
        raise OSError(errno.EINVAL, message, name)
    return descriptor


@contextmanager
def locking_file(path: Path) -> Iterator[IO[bytes]]:
    """Yield an open locked file, waiting for other processes if necessary.

    If the file does not exist, it is created readable only by its owner.
    """
    descriptor = open_private(str(path), os.O_RDWR | os.O_CREAT)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        lock(file)
        yield file


def make_private(folder: Path) -> dict[Path, int]:
    """Remove all permissions of other users from a folder and its content.

    Links in it are not followed; one at its own path is.

    Returns:
        The paths that other users could open, with their earlier permissions.

    Raises:
        FednotesError: The folder belongs to another user, who could open it again, or
            it has a path whose permissions cannot change.
        OSError: The folder cannot be listed.
    """
    # The administrator (root) may use folders of other users, and they may use root's.
    if os.geteuid() != 0 and folder.stat().st_uid not in (0, os.geteuid()):
        raise _make_ownership_error(folder)

    closed: dict[Path, int] = {}
    for place, _, names in os.walk(folder, onerror=_raise_unless_missing):
        for path in (Path(place), *(Path(place, name) for name in names)):
            with suppress(FileNotFoundError):  # it was deleted meanwhile
                # A link at the folder itself leads to what is written into.
                is_folder = path == folder
                mode = path.stat().st_mode if is_folder else path.lstat().st_mode
                if stat.S_ISLNK(mode) or not mode & 0o077:
                    continue
                try:
                    path.chmod(stat.S_IMODE(mode) & 0o700)
                except PermissionError as error:
                    raise _make_ownership_error(path) from error
                closed[path] = stat.S_IMODE(mode)
    return closed


def _make_ownership_error(path: Path) -> FednotesError:
    """Return the error for a path that another user could open."""
    return FednotesError(
        f"{path}: belongs to another user of this machine, who could open it: use a "
        "folder that you own"
    )


def _raise_unless_missing(error: OSError) -> None:
    """Raise an error that occurred while a folder was listed.

    If the folder has been deleted, nothing is raised.
    """
    if not isinstance(error, FileNotFoundError):
        raise error


def make_temporary_path(path: Path, ending: str = "tmp") -> Path:
    """Return a new hidden name in the folder of `path`.

    It is random, because process ids are not unique if containers share a volume.
    """
    return path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.{ending}")


def lock(file: int | IO[Any], *, wait: bool = True) -> bool:
    """Lock an open file or folder (`flock`).

    The lock ends when the file is closed, however the process ends. It works between
    machines only if the file system supports this: NFS does from version 4, unless
    mounted with `nolock` or `local_lock`.

    Args:
        file: The open file or its descriptor.
        wait: Whether to wait until other processes release it.

    Returns:
        Whether the lock was acquired.

    Raises:
        OSError: The file system refuses.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


@contextmanager
def trying_to_lock_folder(folder: Path) -> Iterator[bool]:
    """Try to lock a folder for the context; yield whether the lock was acquired.

    It is acquired only if no other process, in any container, is writing the folder.
    """
    with ExitStack() as stack:
        is_locked = False
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            is_locked = lock(descriptor, wait=False) and _is_same(
                folder.stat(), descriptor
            )
        yield is_locked


@contextmanager
def locking_folder(path: Path, *, mode: int = 0o777) -> Iterator[None]:
    """Create a folder and lock it for the context, so that no process cleans it up.

    Args:
        path: The folder.
        mode: The permissions, before applying the umask.
    """
    for attempt in range(1, _LOCK_ATTEMPTS + 1):
        # Another process may clean up the folder before it is locked.
        path.mkdir(mode=mode, exist_ok=True)
        with trying_to_lock_folder(path) as is_locked:
            # A file system without locks never locks it; the folder is then used as it
            # is.
            if is_locked or attempt == _LOCK_ATTEMPTS:
                yield
                return


def measure_disk_usage(folder: Path) -> int:
    """Return the bytes that the files of a folder take on disk.

    File sizes are rounded up to blocks of 4 KiB, because otherwise many small files
    would seem to take almost nothing. Links are not followed, and a missing folder
    takes 0 bytes.
    """
    blocks = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # it was deleted meanwhile
                blocks += -(-Path(place, name).lstat().st_size // BLOCK_BYTES)
    return blocks * BLOCK_BYTES


def sync_folder(path: Path) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems do not support this.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str, *, private: bool = True) -> None:
    """Write a text file atomically; it is on disk on return.

    Args:
        path: The file. Missing folders are created.
        text: The content.
        private: Whether only the owner may read it; otherwise the umask applies.

    Raises:
        FednotesError: The file cannot be written.
    """
    with raising_os_errors_as(FednotesError, path, ending=_describe_earlier(path)):
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise _make_encoding_error(path) from error
        _make_folder(path.parent, private=private)
        replace_file(path, data, mode=0o600 if private else 0o666)


def _make_encoding_error(path: Path) -> FednotesError:
    """Return the error for a text that contains half a character."""
    return FednotesError(
        f"{path}: cannot be written (the text has characters that UTF-8 cannot encode)"
    )


def _describe_earlier(path: Path) -> str:
    """Return the end of an error of writing: that the earlier content is unchanged."""
    if os.path.lexists(path):
        return "; the earlier content is unchanged"
    return ""


def _make_folder(path: Path, *, private: bool) -> None:
    """Create a folder and its missing parents.

    Args:
        path: The folder.
        private: Whether only the owner may read the folders that are created.
    """
    if private:
        create_private_folder(path)
    else:
        path.mkdir(parents=True, exist_ok=True)


def write_json(path: Path, value: Any, *, private: bool = True) -> None:
    """Write a JSON file atomically; see `write_text`."""
    text = json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False)
    write_text(path, f"{text}\n", private=private)


def write_folder(
    path: Path, fill: Callable[[Path], None], *, private: bool = True
) -> None:
    """Write a folder atomically.

    An existing folder is replaced; it is unchanged if `fill` fails.

    Args:
        path: The folder.
        fill: Writes the content into a temporary folder, which is then renamed.
        private: Whether only the owner may read it, regardless of the permissions that
            `fill` sets.

    Raises:
        FednotesError: The folder cannot be written.
    """
    temporary = make_temporary_path(path)
    old = make_temporary_path(path, "old")
    try:
        with raising_os_errors_as(FednotesError, path, ending=_describe_earlier(path)):
            _make_folder(path.parent, private=private)
            with locking_folder(temporary, mode=0o700 if private else 0o777):
                fill(temporary)
                if private:
                    make_private(temporary)
                sync_folder(temporary)
            _put_in_place(temporary, path, old)
            sync_folder(path.parent)
    except SafetensorError as error:
        raise FednotesError(
            f"{path}: cannot be written ({error}): check that the disk is not full"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            # An error between the two renames must not lose the earlier folder.
            if old.exists() and not path.exists():
                os.replace(old, path)
            shutil.rmtree(old, ignore_errors=True)


def _put_in_place(temporary: Path, path: Path, old: Path) -> None:
    """Rename a folder to `path`, after renaming an existing one to `old`.

    If several processes do this at the same time, the last one's folder remains.
    """
    for attempts_left in reversed(range(ATTEMPTS)):
        if path.exists():
            with suppress(FileNotFoundError):
                os.replace(path, old)
        try:
            os.replace(temporary, path)
            return
        except OSError as error:
            is_taken = error.errno in (errno.ENOTEMPTY, errno.EEXIST)
            if not is_taken or not attempts_left:
                raise
        shutil.rmtree(old, ignore_errors=True)


def write_out(path: Path, text: str | bytes) -> None:
    """Write bytes, or text as UTF-8, to a path from a user; see `streaming_out`.

    Raises:
        FednotesError: As `streaming_out`.
    """
    with streaming_out(path) as file:
        file.write(text.encode("utf-8") if isinstance(text, str) else text)


@contextmanager
def streaming_out(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file for streaming output to a path from a user.

    The file appears complete when the context ends, or not at all. A file of this user
    keeps its permissions. A link is kept, and its target is written. A device or FIFO
    (/dev/stdout) receives the bytes immediately.

    Another user who may write in the same folder (/tmp) could create a link or FIFO at
    this path beforehand. Such a link is not followed, and such a FIFO is not written.

    Raises:
        FednotesError: The path cannot be written, is another user's link or FIFO, or
            the text has characters that UTF-8 cannot encode.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _opening_out(follow_links(path)) as file:
            yield file
    except UnicodeEncodeError as error:
        raise _make_encoding_error(path) from error
    except OSError as error:
        raise FednotesError(
            f"{path}: cannot be written ({error.strerror or error})"
        ) from error


@contextmanager
def _opening_out(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, device or FIFO that is not a link; see `streaming_out`."""
    if is_stream(path):
        with open(path, "ab") as stream:  # appends to earlier output on stdout
            yield stream
        return

    try:
        status = path.lstat()
    except FileNotFoundError:
        with replacing(path, mode=0o666) as file:
            yield file
        return

    if stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode):
        is_ours = status.st_uid == os.geteuid()
        mode = stat.S_IMODE(status.st_mode) if is_ours else 0o666
        with replacing(path, mode=mode, exact=is_ours) as file:
            yield file
        return

    _require_trusted(path, status)
    with open(path, "ab", opener=_open_existing) as stream:
        if not os.path.samestat(status, os.fstat(stream.fileno())):
            raise OSError(errno.ESTALE, "it was replaced meanwhile")
        yield stream


def follow_links(path: Path) -> Path:
    """Follow the links at a path that will be written to, and return their target.

    The operating system follows links in the folders of the path.

    Raises:
        OSError: Another user could have created a link, or there are too many links.
    """
    for _ in range(_MAX_LINKS):
        if is_stream(path):
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


def is_stream(path: Path) -> bool:
    """Return whether a path names an open file of this process, such as /dev/stdout."""
    return os.path.abspath(path).startswith(("/dev/std", "/dev/fd/", "/proc/"))


def _require_trusted(path: Path, status: os.stat_result) -> None:
    """Refuse a link, FIFO or device that another user created in a shared folder.

    The operating system applies this rule in folders such as /tmp if
    `fs.protected_symlinks` and `fs.protected_fifos` are set.

    Raises:
        PermissionError: The folder is writable by others or by a group, and the path
            belongs to another user.
    """
    folder = path.parent.stat()
    is_shared = folder.st_mode & 0o022
    if is_shared and status.st_uid not in (os.geteuid(), folder.st_uid, 0):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise PermissionError(
            errno.EPERM,
            f"another user of this machine has put {kind} there: write to a "
            "folder of your own",
        )


def _open_existing(name: str, flags: int) -> int:
    """Open a file that exists and is no link; use it as the `opener` of `open`."""
    return os.open(name, flags & ~os.O_CREAT | os.O_NOFOLLOW)


# ---- one process at a time -----------------------------------------------------------

LOCK = "lock"  # file in a folder in use; its text names the process
_MAX_OWNER_BYTES = 500  # of the lock file's text that are shown
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
logger = logging.getLogger(__name__)


@contextmanager
def reserving_folder(folder: Path) -> Iterator[None]:
    """Reserve a folder for this process within the context, by a lock.

    The folder is created if it does not exist, and removed again if it stays empty. It
    may be moved within the context; the lock moves with it.

    Raises:
        BusyError: Another process has locked it; the message names the process.
        FednotesError: The folder cannot be written, or another user has put a link
            there.
    """
    with raising_os_errors_as(FednotesError, folder):
        folder = follow_links(folder)
        is_new = not folder.exists()
        lock_descriptor, folder_descriptor = _lock_folder(folder)
    try:
        yield
    finally:
        with suppress(OSError):
            # It is deleted while locked, so a waiting process opens a new lock file.
            os.unlink(LOCK, dir_fd=folder_descriptor)
        os.close(lock_descriptor)
        os.close(folder_descriptor)
        if is_new:
            with suppress(OSError):
                folder.rmdir()


def is_reserved(folder: Path) -> bool:
    """Return whether another process has reserved a folder (`reserving_folder`).

    Only the lock file of a process that was killed is locked, for a moment: a process
    that ends normally deletes its lock file.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        return not lock(descriptor, wait=False)
    except OSError:  # the file system has no locks
        return False
    finally:
        os.close(descriptor)


def _lock_folder(folder: Path) -> tuple[int, int]:
    """Lock a folder, and write into its lock file which process holds it.

    Returns:
        The descriptors of the lock file and of the folder, both verified to be at this
        path.
    """
    while True:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        # A file may vanish when its process ends or moves the folder.
        with ExitStack() as stack, suppress(FileNotFoundError):
            folder_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, folder_descriptor)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
            lock_descriptor = os.open(LOCK, flags, 0o600, dir_fd=folder_descriptor)
            stack.callback(os.close, lock_descriptor)
            if os.fstat(lock_descriptor).st_nlink > 1:
                # Writing into it would change another file.
                raise FednotesError(
                    f"{folder / LOCK} is a hard link to another file: delete it if no "
                    "other command is using this folder"
                )

            _lock_or_raise(folder, lock_descriptor)
            is_same_lock = _is_same(
                os.stat(LOCK, dir_fd=folder_descriptor), lock_descriptor
            )
            if is_same_lock and _is_same(folder.stat(), folder_descriptor):
                os.ftruncate(lock_descriptor, 0)
                os.write(
                    lock_descriptor, _describe_this_process().encode("utf-8", "replace")
                )
                stack.pop_all()
                return lock_descriptor, folder_descriptor


def _describe_this_process() -> str:
    """Return a line about this process, for users who find its lock."""
    since = datetime.now().astimezone().isoformat(" ", "seconds")
    command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    command = command[: _MAX_OWNER_BYTES // 2]
    return f"process {os.getpid()} on {node()} since {since} ({command})"


def _lock_or_raise(folder: Path, descriptor: int) -> None:
    """Lock the lock file of a folder.

    Raises:
        BusyError: Another process has locked it.
    """
    try:
        if not lock(descriptor, wait=False):
            raw = os.pread(descriptor, _MAX_OWNER_BYTES, 0)
            owner = clean(raw.decode("utf-8", "replace")) or "another process"
            raise BusyError(
                f"{folder} is in use by {owner}: wait until it ends, or stop it"
            )
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        logger.warning(
            "%s: this file system has no locks, so nothing stops a second "
            "command from using the folder: run one at a time",
            folder,
        )


def _is_same(status: os.stat_result, descriptor: int) -> bool:
    """Return whether a status is that of the file behind an open descriptor."""
    return os.path.samestat(status, os.fstat(descriptor))
