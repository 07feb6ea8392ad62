"""What an update must be before it is added: named right, shaped right, finite, of bounded size.

The site runs this before anything leaves it, the server when a reply arrives. Under a secure
sum the server sees no values, so there the site's own check is the only one of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fednotes.core.errors import RefusedError
from fednotes.core.tensors import nbytes
from fednotes.core.update import Tensors, Update

Expected = Mapping[str, tuple[tuple[int, ...], torch.dtype]]  # name → shape, type


@dataclass(frozen=True)
class Limits:
    """The most that an update may be.

    norm: of all its floating-point tensors together (L2); infinite for no bound. nbytes: of
    its tensors. weight: how much one site may count. metrics: how many.
    """

    norm: float = math.inf
    nbytes: int = 2**36
    weight: float = 1e12
    metrics: int = 10_000


LIMITS = Limits()


def expected(tensors: Tensors) -> Expected:
    """Names, shapes and types of these tensors."""
    return {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}


def agreed(updates: Iterable[Update], known: Expected | None = None) -> Expected:
    """What the updates of one request should look like.

    That is what `known` says where any update still looks so, else what most look like; of
    equally many, what the first does.
    """
    seen = [expected(update.tensors) for update in updates]
    if known is not None and known in seen:
        return known
    counts = Counter(tuple(sorted(each.items(), key=lambda item: item[0])) for each in seen)
    return dict(counts.most_common(1)[0][0]) if counts else {}


def check_update(
    update: Update, site: str, like: Expected | None = None, limits: Limits = LIMITS
) -> None:
    """Pass an update that may be added to a sum.

    like: what its tensors must be; None leaves that open.
    Raises RefusedError with the site and the reason.
    """
    reason = (
        _numbers(update, limits)
        or (_unlike(update.tensors, like) if like is not None else "")
        or _values(update.tensors, limits)
    )
    if reason:
        raise RefusedError(f"site {site!r}: its update is refused: {reason}")


def _numbers(update: Update, limits: Limits) -> str:
    weight = float(update.weight)
    if not 0 <= weight <= limits.weight:
        return f"its weight is {weight}, expected 0 to {limits.weight:g}"
    if len(update.metrics) > limits.metrics:
        return f"{len(update.metrics):,} metrics, at most {limits.metrics:,} are accepted"
    for name, number in update.metrics.items():
        if not math.isfinite(number):
            return f"the metric {name!r} is {float(number)}"
    if (size := nbytes(update.tensors)) > limits.nbytes:
        return f"it has {size:,} bytes, at most {limits.nbytes:,} are accepted"
    return ""


def _unlike(tensors: Tensors, like: Expected) -> str:
    if tensors.keys() != like.keys():
        odd = sorted(tensors.keys() ^ like.keys())[0]
        return f"tensor {odd!r} is " + ("unknown here" if odd in tensors else "missing")
    for name, (shape, dtype) in like.items():
        value = tensors[name]
        if tuple(value.shape) != shape:
            return f"tensor {name!r} has shape {tuple(value.shape)}, expected {shape}"
        if value.dtype != dtype:
            return f"tensor {name!r} has type {value.dtype}, expected {dtype}"
    return ""


def _values(tensors: Tensors, limits: Limits) -> str:
    square = 0.0
    for name, value in tensors.items():
        if not value.is_floating_point() or not value.numel():
            continue
        if not _finite(value):
            return f"tensor {name!r} is not finite (NaN or infinity)"
        if limits.norm < math.inf:
            square += float(torch.linalg.vector_norm(value.detach(), dtype=torch.float64)) ** 2
    if math.sqrt(square) > limits.norm:
        return f"its norm is {math.sqrt(square):.4g}, at most {limits.norm:g} is accepted"
    return ""


def _finite(value: Tensor) -> bool:
    low, high = torch.aminmax(value.detach())  # one pass; a NaN is both
    return math.isfinite(low) and math.isfinite(high)
