"""Small questions about named tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from fednotes.core.errors import ConfigError, TrainingError
from fednotes.core.seeds import seed_of


def device_of(spec: str | torch.device) -> torch.device:
    """The device of that name, such as "cpu" or "cuda" (cuda:0).

    Raises ConfigError where this machine has none.
    """
    try:
        return torch.empty(0, device=spec).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {str(spec)!r} is not available here; use 'cpu'") from error


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


def snapshot(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that later steps do not change."""
    return {name: value.detach().clone() for name, value in tensors.items()}


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors below a prefix such as `shared.`."""
    return {f"{prefix}{name}": value for name, value in tensors.items()}


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """What stands below a prefix, by the names that it had before."""
    return {n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}


@torch.no_grad()
def load_into(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy values into tensors of the same names, shapes and types.

    Raises TrainingError naming the first tensor that does not fit; nothing is copied then.
    """
    require_like(targets, values)
    for name, target in targets.items():
        target.copy_(values[name])


def taken(values: Mapping[str, Tensor], name: str, dtype: torch.dtype, *shape: int) -> Tensor:
    """One of several tensors. Raises TrainingError where it is missing or does not fit."""
    like = {name: torch.empty(shape, dtype=dtype, device="meta")}
    require_like(like, {name: values[name]} if name in values else {})
    return values[name]


def require_like(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Values have the names, shapes and types of `targets`.

    Raises TrainingError naming the first tensor that does not fit.
    """
    if targets.keys() != values.keys():
        odd = sorted(targets.keys() ^ values.keys())[0]
        side = "received but unknown here" if odd in values else "expected but not received"
        raise TrainingError(f"tensor {odd!r} is {side}: both sides must run the same job")
    for name, target in targets.items():
        value = values[name]
        if target.shape != value.shape:
            raise TrainingError(
                f"tensor {name!r}: expected shape {tuple(target.shape)}, got {tuple(value.shape)}"
            )
        if target.dtype != value.dtype:
            raise TrainingError(f"tensor {name!r}: expected {target.dtype}, got {value.dtype}")
