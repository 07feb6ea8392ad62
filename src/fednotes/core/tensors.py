"""Helpers for named tensors, and folders that store them.

A state folder holds `tensors.safetensors`, `facts.json` and `manifest.json` with the
SHA-256 of both.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fednotes.core.errors import ConfigError, FednotesError, ModelError, TrainingError
from fednotes.core.parsing import open_regular, read_json
from fednotes.core.seeds import seed_of
from fednotes.core.store import write_folder

FORMAT = 1
TENSORS, FACTS, MANIFEST = "tensors.safetensors", "facts.json", "manifest.json"


def require_deterministic_kernels(device: str) -> None:
    """Let torch refuse operations on the CPU whose results vary between calls.

    `torch.use_deterministic_algorithms` does the same, but imports torch's compiler,
    which takes almost a second and 70 MiB.

    Args:
        device: The PyTorch device on which this process computes. On devices
            other than the CPU, torch refuses nothing.
    """
    torch.set_deterministic_debug_mode("error" if device == "cpu" else "default")


def find_device(spec: str | torch.device) -> torch.device:
    """Return the device with a name such as "cpu", "cuda" (the first GPU) or "cuda:1".

    Raises:
        ConfigError: This machine has no such device.
    """
    try:
        probe = torch.empty(0, device=spec)
        if probe.is_meta:
            raise RuntimeError("a device without memory")
        return probe.device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {str(spec)!r} is not available here: use 'cpu'"
        ) from error


@contextmanager
def seeding_layer(seed: int, layer: str) -> Iterator[None]:
    """Seed torch's CPU generator for the initial values of one layer.

    The generator's earlier state is restored when the context ends.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_of(seed, "init", layer))
        yield


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed the generator from which random layers on a device draw.

    `torch.manual_seed` also seeds every accelerator, and stores a stack trace for each
    one that is not initialized. For a small model this takes longer than some layers.
    """
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Return the size of all tensors' elements in bytes, without names or framing."""
    return sum(value.numel() * value.element_size() for value in tensors.values())


def fingerprint_tensors(tensors: Mapping[str, Tensor]) -> bytes:
    """Return the SHA-256 of names, types, shapes and values, in the order of names."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        head = repr((name, str(flat.dtype), tuple(tensors[name].shape))).encode()
        hasher.update(len(head).to_bytes(8, "big") + head)
        if flat.numel():
            hasher.update(flat.view(torch.uint8).numpy().data)
    return hasher.digest()


def is_finite(value: Tensor) -> bool:
    """Return whether a tensor is free of NaN and infinity; integer tensors are."""
    if not value.is_floating_point() or not value.numel():
        return True
    low, high = torch.aminmax(value.detach())  # one pass; NaN propagates to both
    return math.isfinite(low) and math.isfinite(high)


def list_shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by its name."""
    return {name: tuple(value.shape) for name, value in tensors.items()}


def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies that later training steps do not change."""
    return {name: value.detach().clone() for name, value in tensors.items()}


def add_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the same tensors with a prefix, such as "shared.", before their names."""
    return {f"{prefix}{name}": value for name, value in tensors.items()}


def select_prefix(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names have a prefix, under their names without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


@torch.no_grad()
def load_into(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values into tensors of the same names, shapes and types.

    Raises:
        TrainingError: A tensor does not match; the message names the first one, and
            nothing is copied.
    """
    require_like(targets, values)
    for name, target in targets.items():
        target.copy_(values[name])


def require_tensor(
    values: Mapping[str, Tensor], name: str, dtype: torch.dtype, *shape: int
) -> Tensor:
    """Return the tensor with a name, after checking its type and shape.

    Raises:
        TrainingError: The tensor is missing or has another type or shape.
    """
    like = {name: torch.empty(shape, dtype=dtype, device="meta")}
    require_like(like, {name: values[name]} if name in values else {})
    return values[name]


def require_like(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Check that values have the names, shapes and types of `targets`.

    Raises:
        TrainingError: A tensor does not match; the message names the first one.
    """
    if targets.keys() != values.keys():
        odd = sorted(targets.keys() ^ values.keys())[0]
        side = (
            "received but unknown here"
            if odd in values
            else "expected but not received"
        )
        raise TrainingError(
            f"tensor {odd!r} is {side}: both sides must run the same job"
        )
    for name, target in targets.items():
        value = values[name]
        if target.shape != value.shape:
            raise TrainingError(
                f"tensor {name!r}: expected shape {tuple(target.shape)}, got "
                f"{tuple(value.shape)}"
            )
        if target.dtype != value.dtype:
            raise TrainingError(
                f"tensor {name!r}: expected {target.dtype}, got {value.dtype}"
            )


def save_state(
    path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Write a state folder atomically, with checksums."""

    def fill(folder: Path) -> None:
        """Write the files of the state, and sync them to disk."""
        contiguous = {
            name: value.detach().contiguous() for name, value in tensors.items()
        }
        save_file(contiguous, folder / TENSORS)
        (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        sums = {name: _hash_file(folder / name) for name in (TENSORS, FACTS)}
        manifest = {"format": FORMAT, "sha256": sums}
        (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        for name in (*sums, MANIFEST):
            with (folder / name).open("rb") as file:
                os.fsync(file.fileno())

    write_folder(path, fill)


def load_state(
    path: Path, device: str = "cpu"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a state folder.

    Returns:
        The tensors, on `device`, and the facts.

    Raises:
        ModelError: A file is missing or damaged, has no checksum, or has a newer
            format.
    """
    with restoring(path):
        manifest = read_json(path / MANIFEST)
        if manifest["format"] != FORMAT:
            raise ModelError(
                f"{path}: has format {str(manifest['format'])[:20]}, but this version "
                f"reads {FORMAT}: use the version of fednotes that wrote it"
            )
        if manifest["sha256"].keys() != {TENSORS, FACTS}:
            raise ModelError(
                f"{path / MANIFEST}: damaged (it does not have a checksum for "
                "each file)"
            )
        for name, digest in manifest["sha256"].items():
            if _hash_file(path / name) != digest:
                raise ModelError(
                    f"{path / name}: damaged (its checksum does not match)"
                )
        tensors = load_file(path / TENSORS, device=device)
        facts = read_json(path / FACTS, strict=False)
        if not isinstance(facts, dict):
            raise TypeError("its facts are not a table")
        return tensors, facts


# What this process or its machine lacks for now; the file may be intact.
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


@contextmanager
def restoring(path: Path | str) -> Iterator[None]:
    """Turn errors of reading a stored state into ones that name its path.

    An edited or truncated state can fail in any of these ways.

    Raises:
        ModelError: The state is damaged.
        FednotesError: It cannot be read now, for example because too many files are
            open. It may be intact.
    """
    try:
        yield
    except (
        OSError,
        SafetensorError,
        TrainingError,
        RuntimeError,
        LookupError,
        TypeError,
        ValueError,
        AttributeError,
        ArithmeticError,
    ) as error:
        if isinstance(error, OSError) and error.errno in _SHORTAGES:
            raise FednotesError(
                f"{path}: the saved state cannot be read now ({error.strerror}): try "
                "again later"
            ) from error
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ModelError(
            f"{path}: cannot read the saved state ({reason}): move this folder away "
            "and start again"
        ) from error


def _hash_file(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with open(path, "rb", opener=open_regular) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
