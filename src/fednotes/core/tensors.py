"""Named tensors: small questions, and folders that keep them.

A state folder holds `tensors.safetensors`, `facts.json` and `manifest.json` with the
SHA-256 of both.
"""

from __future__ import annotations

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

from fednotes.core.errors import ConfigError, ModelError, TrainingError
from fednotes.core.parsing import read_json, regular
from fednotes.core.seeds import seed_of
from fednotes.core.store import write_folder

FORMAT = 1
TENSORS, FACTS, MANIFEST = "tensors.safetensors", "facts.json", "manifest.json"


def device_of(spec: str | torch.device) -> torch.device:
    """The device of that name, such as "cpu" or "cuda" (cuda:0).

    Raises ConfigError where this machine has none.
    """
    try:
        found = torch.empty(0, device=spec)
        if found.is_meta:
            raise RuntimeError("a device without memory")
        return found.device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            f"device {str(spec)!r} is not available here; use 'cpu'"
        ) from error


@contextmanager
def seeded(seed: int, layer: str) -> Iterator[None]:
    """Torch's CPU generator seeded for one layer's initial values, then put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, "init", layer))
        yield


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """The bytes of the numbers themselves, without names or framing."""
    return sum(value.numel() * value.element_size() for value in tensors.values())


def fingerprint(tensors: Mapping[str, Tensor]) -> bytes:
    """SHA-256 of names, types, shapes and numbers, in the order of the names."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        head = repr((name, str(flat.dtype), tuple(tensors[name].shape))).encode()
        hasher.update(len(head).to_bytes(8, "big") + head)
        if flat.numel():
            hasher.update(flat.view(torch.uint8).numpy().data)
    return hasher.digest()


def is_finite(value: Tensor) -> bool:
    """Return whether a tensor has neither NaN nor infinity; whole numbers never have."""
    if not value.is_floating_point() or not value.numel():
        return True
    low, high = torch.aminmax(value.detach())  # one pass; a NaN is both
    return math.isfinite(low) and math.isfinite(high)


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor by its name."""
    return {name: tuple(value.shape) for name, value in tensors.items()}


def snapshot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that later steps do not change."""
    return {name: value.detach().clone() for name, value in tensors.items()}


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors below a prefix such as `shared.`."""
    return {f"{prefix}{name}": value for name, value in tensors.items()}


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """What stands below a prefix, by the names that it had before."""
    return {
        n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)
    }


@torch.no_grad()
def load_into(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values into tensors of the same names, shapes and types.

    Raises TrainingError naming the first tensor that does not fit; nothing is copied
        then.
    """
    require_like(targets, values)
    for name, target in targets.items():
        target.copy_(values[name])


def taken(
    values: Mapping[str, Tensor], name: str, dtype: torch.dtype, *shape: int
) -> Tensor:
    """One of several tensors.

    Raises TrainingError where it is missing or does not fit.
    """
    like = {name: torch.empty(shape, dtype=dtype, device="meta")}
    require_like(like, {name: values[name]} if name in values else {})
    return values[name]


def require_like(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Values have the names, shapes and types of `targets`.

    Raises TrainingError naming the first tensor that does not fit.
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
                f"tensor {name!r}: expected shape {tuple(target.shape)}, got {tuple(value.shape)}"
            )
        if target.dtype != value.dtype:
            raise TrainingError(
                f"tensor {name!r}: expected {target.dtype}, got {value.dtype}"
            )


def save_state(
    path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> None:
    """Write a state folder, atomically and with checksums."""

    def fill(folder: Path) -> None:
        contiguous = {
            name: value.detach().contiguous() for name, value in tensors.items()
        }
        save_file(contiguous, folder / TENSORS)
        (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        sums = {name: _digest(folder / name) for name in (TENSORS, FACTS)}
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

    Raises ModelError if a file is missing, damaged, without its checksum or of a later
        format.
    """
    with restoring(path):
        manifest = read_json(path / MANIFEST)
        if manifest["format"] != FORMAT:
            raise ModelError(
                f"{path}: format {str(manifest['format'])[:20]}, this version reads {FORMAT}: "
                "use the version of fednotes that wrote it"
            )
        if manifest["sha256"].keys() != {TENSORS, FACTS}:
            raise ModelError(
                f"{path / MANIFEST}: damaged (not a checksum for each file)"
            )
        for name, digest in manifest["sha256"].items():
            if _digest(path / name) != digest:
                raise ModelError(
                    f"{path / name}: damaged (its checksum does not match)"
                )
        tensors = load_file(path / TENSORS, device=device)
        facts = read_json(path / FACTS, strict=False)
        if not isinstance(facts, dict):
            raise TypeError("its facts are no table")
        return tensors, facts


@contextmanager
def restoring(path: Path | str) -> Iterator[None]:
    """What is kept at a place is other than what was written there: a ModelError says
    so."""
    unfit = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
    try:
        yield
    except (OSError, SafetensorError, TrainingError, RuntimeError, *unfit) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ModelError(
            f"{path}: not a readable state folder ({reason}): begin anew without it"
        ) from error


def _digest(path: Path) -> str:
    with open(path, "rb", opener=regular) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
