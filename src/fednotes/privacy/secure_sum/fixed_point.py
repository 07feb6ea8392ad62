"""Fixed-point numbers modulo 2^64, so that masks cancel and sums do not overflow.

A number v = weight · value (computed in float64, as in the plain sum) becomes the
integer round(v · 2^e), ties to even. With n sites, |v| · 2^e is bounded by 2^62 /
2^ceil(log2 n), so a sum of n such integers stays below 2^63 and is unambiguous. Larger
values are refused before anything is masked.

The rounding error of a sum of S summands:

- values of 4 bytes or fewer take one word: at most S · 2^-(e+1). With the default limit
  2^31 on weight · value and 5 sites e is 28; with limits from an earlier total, e is
  about 47 bits below the largest sum, so that a float32 (24 bits) loses nothing in
  practice;
- integers take one word, and products up to 2^52 are exact;
- other values of 8 bytes, weights and metrics take two words, and the second holds the
rounding error of the first: e + g is at least 60 up to 64 sites, and a float64 sum is
accurate to its last bit.

The sum of the integers is exact, in any order and for any drop-outs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.update import Total, Update
from fednotes.privacy.secure_sum.crypto import Words, hash_parts

BLOCK = 2**15  # numbers per block, so that a block stays in the cache
ROOM = 62  # bits of a sum's magnitude
LIMIT = 31  # default limit of |weight · value|, a power of two
SPARE = 12  # bits by which a limit exceeds the last total
WIDE = 52  # limit of two-word values and integers, up to which float64 is exact
MOST_SITES = 2**10
BITS = 300  # a limit lies between 2^-BITS and 2^BITS

Kind = Literal["tensor", "weight", "metric"]
Signed = NDArray[np.int64]


def compute_limits(total: Total) -> dict[str, int]:
    """Return limits for the next sum of the same task, as exponents of two.

    A tensor's limit is 2^SPARE times its largest magnitude in the last total, rounded
    up to a power of two. If this magnitude is zero, or otherwise not between
    2^-(BITS / 2) and 2^(BITS / 2), the result has no limit for the tensor, and the
    default limit applies. These bounds leave room for the factor 2^SPARE, so every
    limit is between 2^-BITS and 2^BITS.

    The total is public, so limits reveal nothing more. If a site's values exceed the
    limits, the site refuses; only this refusal becomes known. The server can then
    repeat the request with wider limits in the same exchange.
    """
    limits = {}
    largest_exponent = BITS // 2
    for name, value in total.tensors.items():
        largest = float(value.abs().max()) if value.numel() else 0.0
        if 2.0**-largest_exponent < largest < 2.0**largest_exponent:
            limits[name] = _compute_ceil_log2(largest) + SPARE
    return limits


@dataclass(frozen=True, slots=True)
class Field:
    """The layout of one tensor, weight or metric as words.

    Attributes:
        kind: The kind of the value.
        name: Its name.
        shape: Its shape.
        exponent: e; the unit of the first word is 2^-e.
        fine: g; the unit of the second word is 2^-(e+g). 0 means that there is no
            second word.
    """

    kind: Kind
    name: str
    shape: tuple[int, ...]
    exponent: int
    fine: int

    @property
    def numbers(self) -> int:
        """The number of its values."""
        return math.prod(self.shape)

    @property
    def words(self) -> int:
        """The number of its words."""
        return self.numbers * (2 if self.fine else 1)


@dataclass(frozen=True, slots=True)
class SumLayout:
    """The layout on which sites must agree, so that their words can be summed.

    The last word of a message is 1 at each site. The sum of these words shows that the
    masks cancelled.

    Attributes:
        purpose: The purpose of the sum (round and task).
        sites: Maximum number of sites in the sum.
        fields: The fields, in order.
    """

    purpose: str
    sites: int
    fields: tuple[Field, ...]

    @classmethod
    def of(
        cls,
        update: Update,
        sites: int,
        *,
        limits: Mapping[str, int] | None = None,
        metrics: Sequence[str] | None = None,
        purpose: str = "",
    ) -> SumLayout:
        """Return the layout of an update.

        Args:
            update: The update.
            sites: Maximum number of sites in the sum.
            limits: The public bound on |weight · value| for each tensor, as an exponent
                of two.
            metrics: The names of the metrics that every site sends; a missing one
                counts as 0. By default those of the update.
            purpose: The purpose of the sum.

        Raises:
            TrainingError: A metric of the update is not among `metrics`.
            ConfigError: A tensor is complex, or a limit is beyond 2^±300.
        """
        if not 1 <= sites <= MOST_SITES:
            raise ConfigError(f"a secure sum has 1 to {MOST_SITES} sites, not {sites}")
        metric_names = sorted(update.metrics if metrics is None else set(metrics))
        for name in sorted(update.metrics.keys() - set(metric_names)):
            raise TrainingError(
                f"metric {name!r} is not among those that the sites agreed to sum: "
                "first agree on the metric names of all sites"
            )
        limits = limits or {}
        for name, limit in limits.items():
            if abs(limit) > BITS:
                raise ConfigError(
                    f"secure sum: the limit of tensor {name!r} must be between "
                    f"2^-{BITS} and 2^{BITS}"
                )
        fields = [
            _make_tensor_field(name, value, sites, limits.get(name, LIMIT))
            for name, value in update.tensors.items()
        ]
        fields.append(_make_wide_field("weight", "", (), sites))
        fields.extend(
            _make_wide_field("metric", name, (), sites) for name in metric_names
        )
        return cls(purpose, sites, tuple(fields))

    @property
    def words(self) -> int:
        """The number of uint64 words in a message."""
        return sum(field.words for field in self.fields) + 1

    @property
    def largest(self) -> int:
        """The maximum magnitude of the integer in a first word."""
        return 2 ** (ROOM - _compute_ceil_log2(self.sites))

    def compute_digest(self) -> bytes:
        """Return 32 bytes that two layouts share only if they are equal."""
        parts: list[str | int] = [self.purpose, self.sites, len(self.fields)]
        for item in self.fields:
            parts += [
                item.kind,
                item.name,
                len(item.shape),
                *item.shape,
                item.exponent,
                item.fine,
            ]
        return hash_parts(*parts)


def encode_update(update: Update, layout: SumLayout) -> Words:
    """Encode an update as the words of a layout.

    Raises:
        TrainingError: The tensors are not those of the layout, or a value is not finite
            or out of range; in the latter case, the message names what has the value.
    """
    words = np.empty(layout.words, np.uint64)
    expected_shapes = [
        (item.name, item.shape) for item in layout.fields if item.kind == "tensor"
    ]
    shapes = [(name, tuple(value.shape)) for name, value in update.tensors.items()]
    if shapes != expected_shapes:
        raise TrainingError(
            "the tensors of this site are not those that the secure sum expects"
        )
    if not math.isfinite(update.weight):
        raise TrainingError("the site's weight is not finite: nothing was sent")
    for part in _split_words(words, layout):
        item = part.field
        factor = 1.0  # the weight and the metrics are summed without weights
        if item.kind == "tensor":
            value = update.tensors[item.name]
            factor = update.weight
        elif item.kind == "weight":
            value = torch.tensor(float(update.weight), dtype=torch.float64)
        else:
            number = float(update.metrics.get(item.name, 0.0))
            value = torch.tensor(number, dtype=torch.float64)
        _encode(value, factor, item, layout.largest, part.first, part.second)
    words[-1] = 1  # see `SumLayout`
    return words


def decode_sum(words: Words, layout: SumLayout, included: Sequence[str]) -> Total:
    """Decode the sum of several sites' words into a total.

    Args:
        words: The sum of the words, without masks.
        layout: The layout of the words.
        included: The sites in the sum.

    Raises:
        TrainingError: The words are not a valid sum, because a mask remains.
    """
    if words.size != layout.words or int(words[-1]) != len(included):
        raise TrainingError(
            "the masks of the secure sum did not cancel: no total was computed"
        )
    tensors: dict[str, Tensor] = {}
    metrics: dict[str, float] = {}
    weight = 0.0
    for part in _split_words(words, layout):
        item = part.field
        _check_sum(part.first, len(included) * layout.largest)
        _check_sum(part.second, len(included) << max(item.fine - 1, 0))
        if item.kind == "tensor":
            numbers = _decode(part.first, part.second, item)
            tensors[item.name] = torch.from_numpy(numbers).reshape(item.shape)
            continue
        # Integers of any size make the result of a single number exact.
        integer = (int(part.first[0]) << item.fine) + int(part.second[0])
        number = float(Fraction(integer) / Fraction(2) ** (item.exponent + item.fine))
        if item.kind == "metric":
            metrics[item.name] = number
        else:
            weight = number
    return Total(tensors, weight, metrics, len(included), tuple(included))


class _FieldWords(NamedTuple):
    """The words of one field in a message.

    Attributes:
        field: The field.
        first: Its first words, (numbers,).
        second: Its second words, (numbers,) or (0,).
    """

    field: Field
    first: Signed
    second: Signed


def _split_words(words: Words, layout: SumLayout) -> Iterator[_FieldWords]:
    """Yield the words of each field, as views."""
    signed = words.view(np.int64)
    start = 0
    for item in layout.fields:
        middle = start + item.numbers
        end = start + item.words
        yield _FieldWords(item, signed[start:middle], signed[middle:end])
        start = end


def _compute_ceil_log2(number: float) -> int:
    """Return the smallest n for which 2^n is at least a positive number."""
    fraction, exponent = math.frexp(number)
    return exponent - 1 if fraction == 0.5 else exponent


def _make_tensor_field(name: str, value: Tensor, sites: int, limit: int) -> Field:
    """Return the field of a tensor.

    Args:
        name: The tensor's name.
        value: The tensor.
        sites: Maximum number of sites in the sum.
        limit: Bound on |weight · value|, as an exponent of two.

    Raises:
        ConfigError: The tensor does not hold real numbers.
    """
    if value.is_complex() or value.is_quantized:
        raise ConfigError(
            f"tensor {name!r}: a secure sum takes real numbers, not {value.dtype}"
        )
    shape = tuple(value.shape)
    if not value.is_floating_point():
        limit = WIDE
    elif value.element_size() > 4:
        return _make_wide_field("tensor", name, shape, sites, max(limit, WIDE))
    exponent = ROOM - _compute_ceil_log2(sites) - limit
    return Field("tensor", name, shape, exponent, fine=0)


def _make_wide_field(
    kind: Kind, name: str, shape: tuple[int, ...], sites: int, limit: int = WIDE
) -> Field:
    """Return a field with a second word for what rounding the first one leaves."""
    room = ROOM - _compute_ceil_log2(sites)
    return Field(kind, name, shape, room - limit, room)


def _encode(
    value: Tensor,
    weight: float,
    item: Field,
    largest: int,
    first: Signed,
    second: Signed,
) -> None:
    """Write weight · value as the words of one field, block by block.

    Args:
        value: The value.
        weight: Its weight.
        item: The field.
        largest: Maximum magnitude of an integer in a first word.
        first: The first words, which are filled.
        second: The second words, which are filled.

    Raises:
        TrainingError: A number is not finite or out of range.
    """
    value = value.detach().cpu().contiguous()
    if value.dtype is torch.bfloat16:  # NumPy has no such type
        value = value.float()
    numbers = value.view(-1).numpy()
    buffer = np.empty(min(BLOCK, numbers.size))
    units_per_number = 2.0**item.exponent
    for start in range(0, numbers.size, BLOCK):
        block = slice(start, start + BLOCK)
        scaled = buffer[: first[block].size]
        scaled[...] = numbers[block]
        with np.errstate(over="ignore", invalid="ignore"):
            scaled *= weight
            scaled *= units_per_number
            # False for NaN.
            is_in_range = scaled.max() <= largest and scaled.min() >= -largest
        if not is_in_range:
            _refuse(numbers[block], item, largest)
        whole = np.rint(scaled)
        first[block] = whole
        if item.fine:
            second[block] = np.rint((scaled - whole) * 2.0**item.fine)


def _refuse(numbers: NDArray[np.generic], item: Field, largest: int) -> None:
    """Raise TrainingError for numbers out of range; the message has no number."""
    what = f"{item.kind} {item.name!r}"
    if item.kind == "weight":
        what = "the site's weight"
    if not np.isfinite(numbers.astype(np.float64)).all():
        raise TrainingError(f"{what} has a value that is not finite: nothing was sent")
    limit = _compute_ceil_log2(largest) - item.exponent
    raise TrainingError(
        f"{what}: weight times value exceeds the secure sum's limit 2^{limit}: nothing "
        "was sent; lower the learning rate or give the tensor a wider limit"
    )


def _check_sum(sums: Signed, largest: int) -> None:
    """Raise TrainingError if a sum exceeds its bound, because a mask remains."""
    if sums.size and (int(sums.max()) > largest or int(sums.min()) < -largest):
        raise TrainingError("a secure sum is out of range: no total was computed")


def _decode(first: Signed, second: Signed, item: Field) -> NDArray[np.float64]:
    """Convert integers to float64.

    One word is correctly rounded; two words are accurate to one unit in the last place.
    """
    if not item.fine:
        return first.astype(np.float64) * 2.0**-item.exponent
    # Rounding to the nearest gives small sums of either sign the upper half 0.
    upper_half = (first + 2**31) >> 32
    lower_half = first - (upper_half << 32)
    high = upper_half.astype(np.float64) * 2.0 ** (32 - item.exponent)
    low = lower_half.astype(np.float64) * 2.0**-item.exponent
    fine = second.astype(np.float64) * 2.0 ** -(item.exponent + item.fine)
    return high + (low + fine)


def check_layout(layout: SumLayout) -> None:
    """Raise RefusedError for a received layout that no site can have created."""
    kinds = [item.kind for item in layout.fields]
    names = [(item.kind, item.name) for item in layout.fields]
    is_valid = (
        1 <= layout.sites <= MOST_SITES
        and kinds.count("weight") == 1
        and len(set(names)) == len(names)
        and all(_is_valid_field(item, layout.sites) for item in layout.fields)
    )
    if not is_valid:
        raise RefusedError("the layout of a masked update is not valid")


def _is_valid_field(item: Field, sites: int) -> bool:
    """Return whether a site can have created a field.

    Args:
        item: The field.
        sites: Maximum number of sites in the sum.
    """
    if item.kind not in ("tensor", "weight", "metric"):
        return False
    if any(size < 0 for size in item.shape):
        return False
    if len(item.shape) > 16 or item.numbers >= 2**48:
        return False
    if not -BITS <= item.exponent <= 2 * BITS:
        return False
    if item.fine not in (0, ROOM - _compute_ceil_log2(sites)):
        return False
    is_single_wide_number = bool(item.fine) and item.numbers == 1
    return item.kind == "tensor" or is_single_wide_number
