"""Shamir's secret sharing of 256-bit secrets: any t of n shares give the secret, t - 1 nothing.

Shamir, "How to share a secret", CACM 22(11), 1979. The field is the integers modulo
2^256 + 297, the least prime above 2^256, so every string of 32 bytes is a secret as it is.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence

from fednotes.core.errors import TrainingError

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33

Below = Callable[[int], int]  # a uniform integer in 0 … argument - 1


def split(
    secret: int,
    threshold: int,
    points: Sequence[int],
    *,
    prime: int = PRIME,
    below: Below = secrets.randbelow,
) -> dict[int, int]:
    """Point → value there of a random polynomial of degree threshold - 1 with f(0) = secret.

    points: distinct, in 1 … prime - 1.
    """
    if not 0 <= secret < prime:
        raise ValueError("the secret is not in the field")
    if not 1 <= threshold <= len(points):
        raise ValueError(f"threshold {threshold} of {len(points)} shares")
    if len(set(points)) != len(points) or not all(0 < point < prime for point in points):
        raise ValueError("points must be distinct and not zero")
    return evaluated([secret, *(below(prime) for _ in range(threshold - 1))], points, prime)


def evaluated(polynomial: Sequence[int], points: Sequence[int], prime: int) -> dict[int, int]:
    """The polynomial (constant term first) at each point, by Horner's rule."""
    values = {}
    for point in points:
        value = 0
        for factor in reversed(polynomial):
            value = (value * point + factor) % prime
        values[point] = value
    return values


def combine(shares: Mapping[int, int], *, prime: int = PRIME) -> int:
    """f(0) of the polynomial through the shares, by Lagrange's formula.

    The caller gives as many shares as the threshold, or more; with fewer the result is
    unrelated to the secret.
    """
    if not all(0 < point < prime and 0 <= value < prime for point, value in shares.items()):
        raise TrainingError("a share of a secret is not in the field")
    secret = 0
    for point, value in shares.items():
        above = below = 1
        for other in shares:
            if other != point:
                above = above * other % prime
                below = below * (other - point) % prime
        secret = (secret + value * above * pow(below, -1, prime)) % prime
    return secret


def share_bytes(
    secret: bytes, threshold: int, points: Sequence[int], below: Below = secrets.randbelow
) -> dict[int, bytes]:
    """`split` for 32 bytes; a share has 33."""
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"a secret has {SECRET_BYTES} bytes")
    shares = split(int.from_bytes(secret, "big"), threshold, points, below=below)
    return {point: value.to_bytes(SHARE_BYTES, "big") for point, value in shares.items()}


def combine_bytes(shares: Mapping[int, bytes]) -> bytes:
    """The 32 bytes that were shared.

    Raises TrainingError if what the shares give is no such secret (one of them is wrong).
    """
    secret = combine({point: int.from_bytes(share, "big") for point, share in shares.items()})
    if secret >> (8 * SECRET_BYTES):
        raise TrainingError("the shares of a secret do not fit together: one of them is wrong")
    return secret.to_bytes(SECRET_BYTES, "big")
