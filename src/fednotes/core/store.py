"""Files that are whole or absent: atomic writes, and folders of named tensors with facts.

A state folder holds `tensors.safetensors`, `facts.json` and `manifest.json` with the SHA-256
of both. It is written beside its place and renamed into it, so a killed process or a full
disk leaves the earlier one whole.

What a run or a kit keeps derives from notes, so files and folders are for their owner alone
unless whoever writes them says otherwise.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fednotes.core.errors import FednotesError, ModelError, TrainingError
from fednotes.core.inputs import regular
from fednotes.core.parsing import read_json

try:
    import fcntl
except ImportError:  # not on Windows: there nobody knows what a killed process left
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
ATTEMPTS = 5  # at putting a folder into its place while others do the same
TENSORS, FACTS, MANIFEST = "tensors.safetensors", "facts.json", "manifest.json"


def replace_file(
    path: Path, data: bytes | bytearray | memoryview, *, mode: int = 0o600, exact: bool = False
) -> None:
    """Put a file into its place atomically; it and its name are on disk when this returns.

    mode: its permissions, less the umask; exact: whatever the umask says. Raises OSError: whoever
    calls has the words for it.
    """
    temporary = beside(path)
    try:
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
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


def make_private(folder: Path) -> None:
    """Take a folder, and all that is in it, from everybody but its owner. No link is followed."""
    for place, _, names in os.walk(folder):
        for path in (Path(place), *(Path(place, name) for name in names)):
            with suppress(FileNotFoundError):  # it went away meanwhile
                mode = path.lstat().st_mode
                if not stat.S_ISLNK(mode) and mode & 0o077:
                    path.chmod(stat.S_IMODE(mode) & 0o700)


def beside(path: Path, ending: str = "tmp") -> Path:
    """A hidden name in the same folder that nobody else takes: process numbers are not unique
    where containers share a volume."""
    return path.with_name(f".{path.name[:50]}.{secrets.token_hex(8)}.{ending}")


@contextmanager
def holding(folder: Path) -> Iterator[bool]:
    """Whether surely nobody else is writing a folder, in whatever container; it is ours for the
    while then."""
    number, ours = -1, False
    with suppress(OSError):
        number = os.open(folder, os.O_RDONLY)
        if fcntl is not None:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.samestat(os.fstat(number), folder.stat())
    try:
        yield ours
    finally:
        if number >= 0:
            os.close(number)


@contextmanager
def new_folder(path: Path, *, mode: int = 0o777) -> Iterator[None]:
    """Make a folder that others leave in peace for the while; mode: less the umask."""
    for last in (False, False, True):  # somebody's cleaning may come between the next two lines
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
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that has no such thing
            raise
    finally:
        os.close(number)


def write_text(path: Path, text: str, *, private: bool = True) -> None:
    """Write a text file atomically, on disk when this returns.

    private: False for what a person asked for, whose permissions the umask says.
    """
    try:
        _make_folder(path.parent, private)
        replace_file(path, text.encode(), mode=0o600 if private else 0o666)
    except OSError as error:
        raise _disk_error(path, error) from error


def write_json(path: Path, value: Any, *, private: bool = True) -> None:
    """Write a JSON file atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False, sort_keys=False)
    write_text(path, f"{text}\n", private=private)


def write_folder(path: Path, fill: Callable[[Path], None], *, private: bool = True) -> None:
    """Make a folder atomically: `fill` writes into a temporary sibling, then it is renamed.

    A folder that was there before is replaced, and stays whole if `fill` fails. private: as in
    `write_text`, whatever permissions `fill` gives.
    """
    temporary, old = beside(path), beside(path, "old")
    try:
        _make_folder(path.parent, private)
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
            except OSError as error:  # another process was here in between: the last one stays
                if not left or error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            shutil.rmtree(old, ignore_errors=True)
        sync_folder(path.parent)
    except OSError as error:
        raise _disk_error(path, error) from error
    except SafetensorError as error:
        raise FednotesError(f"{path}: cannot be written ({error}); is the disk full?") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):
            if old.exists() and not path.exists():
                os.replace(old, path)  # whatever stopped us between the two renames
            shutil.rmtree(old, ignore_errors=True)


def save_state(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Write a state folder, atomically and with checksums."""

    def fill(folder: Path) -> None:
        contiguous = {name: value.detach().contiguous() for name, value in tensors.items()}
        save_file(contiguous, folder / TENSORS)
        (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        sums = {name: _digest(folder / name) for name in (TENSORS, FACTS)}
        manifest = {"format": FORMAT, "sha256": sums}
        (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        for name in (*sums, MANIFEST):
            with (folder / name).open("rb") as file:
                os.fsync(file.fileno())

    write_folder(path, fill)


def load_state(path: Path, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a state folder.

    Raises ModelError if a file is missing, damaged, without its checksum or of a later format.
    """
    with restoring(path):
        manifest = read_json(path / MANIFEST)
        if manifest["format"] != FORMAT:
            raise ModelError(
                f"{path}: format {str(manifest['format'])[:20]}, this version reads {FORMAT}: "
                "use the version of fednotes that wrote it"
            )
        if manifest["sha256"].keys() != {TENSORS, FACTS}:
            raise ModelError(f"{path / MANIFEST}: damaged (not a checksum for each file)")
        for name, digest in manifest["sha256"].items():
            if _digest(path / name) != digest:
                raise ModelError(f"{path / name}: damaged (its checksum does not match)")
        tensors = load_file(path / TENSORS, device=device)
        facts = read_json(path / FACTS, strict=False)
        if not isinstance(facts, dict):
            raise TypeError("its facts are no table")
        return tensors, facts


@contextmanager
def restoring(path: Path | str) -> Iterator[None]:
    """What is kept at a place is other than what was written there: a ModelError says so."""
    try:
        yield
    except (OSError, SafetensorError, TrainingError, RuntimeError, *_UNFIT) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ModelError(
            f"{path}: not a readable state folder ({reason}): begin anew without it"
        ) from error


_UNFIT = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)


def _make_folder(path: Path, private: bool) -> None:
    if private:
        private_folder(path)
    else:
        path.mkdir(parents=True, exist_ok=True)


def _digest(path: Path) -> str:
    with open(path, "rb", opener=regular) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _disk_error(path: Path, error: OSError) -> FednotesError:
    reason = error.strerror or str(error)
    return FednotesError(f"{path}: cannot be written ({reason}); what was there before is whole")
