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
import shutil
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fednotes.core.errors import FednotesError, ModelError

FORMAT = 1


def replace_file(path: Path, data: bytes | bytearray | memoryview, *, mode: int = 0o600) -> None:
    """Put a file into its place atomically; it and its name are on disk when this returns.

    mode: its permissions, less the umask. Raises OSError: whoever calls has the words for it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # a killed process's, perhaps of another mode
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)  # or a power cut takes the name back
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def private_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, for their owner alone."""
    for folder in (*reversed(path.parents), path):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


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
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        _make_folder(path.parent, private)
        temporary.mkdir(mode=0o700 if private else 0o777)
        fill(temporary)
        if private:
            make_private(temporary)
        sync_folder(temporary)
        if path.exists():
            os.replace(path, old)
        os.replace(temporary, path)
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
        save_file(contiguous, folder / "tensors.safetensors")
        (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
        sums = {name: _digest(folder / name) for name in ("tensors.safetensors", "facts.json")}
        manifest = {"format": FORMAT, "sha256": sums}
        (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        for name in (*sums, "manifest.json"):
            with (folder / name).open("rb") as file:
                os.fsync(file.fileno())

    write_folder(path, fill)


def load_state(path: Path, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a state folder.

    Raises ModelError if a file is missing, damaged or of a later format.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise ModelError(
                f"{path}: format {manifest['format']}, this version reads {FORMAT}: "
                "use the version of fednotes that wrote it"
            )
        for name, digest in manifest["sha256"].items():
            if _digest(path / name) != digest:
                raise ModelError(f"{path / name}: damaged (its checksum does not match)")
        tensors = load_file(path / "tensors.safetensors", device=device)
        facts = json.loads((path / "facts.json").read_text(encoding="utf-8"))
    except (OSError, KeyError, TypeError, ValueError, SafetensorError) as error:
        raise ModelError(f"{path}: not a readable state folder ({error})") from error
    return tensors, facts


def _make_folder(path: Path, private: bool) -> None:
    if private:
        private_folder(path)
    else:
        path.mkdir(parents=True, exist_ok=True)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _disk_error(path: Path, error: OSError) -> FednotesError:
    reason = error.strerror or str(error)
    return FednotesError(f"{path}: cannot be written ({reason}); what was there before is whole")
