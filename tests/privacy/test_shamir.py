"""Shamir's secret sharing, against published shares and brute force over a small field."""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations, product

import pytest

from fednotes.core.errors import TrainingError
from fednotes.privacy.secure_sum import shamir


def test_published_shares() -> None:
    """The worked example of Wikipedia's article (f(x) = 1234 + 166x + 94x², modulo 1613)."""
    published = {1: 1494, 2: 329, 3: 965, 4: 176, 5: 1188, 6: 775}
    coefficients = iter([166, 94])
    made = shamir.split(1234, 3, range(1, 7), prime=1613, below=lambda _: next(coefficients))
    assert made == published
    for three in combinations(published, 3):
        assert shamir.combine({x: published[x] for x in three}, prime=1613) == 1234


def test_the_prime_is_the_least_above_2_to_the_256() -> None:
    """Miller and Rabin's test to twelve bases; even numbers need none."""

    def probably_prime(number: int) -> bool:
        odd, twos = number - 1, 0
        while odd % 2 == 0:
            odd, twos = odd // 2, twos + 1
        for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
            powers = [pow(base, odd << i, number) for i in range(twos)]
            if powers[0] != 1 and number - 1 not in powers:
                return False
        return True

    assert probably_prime(shamir.PRIME)
    assert not any(probably_prime(2**256 + add) for add in range(1, 297, 2))


def test_fewer_shares_than_the_threshold_fit_every_secret_alike() -> None:
    """Brute force over all polynomials modulo 7: for t - 1 given shares, each secret is left
    with equally many polynomials."""
    prime, threshold, points = 7, 3, (1, 2, 4, 6)
    for seen in combinations(points, threshold - 1):
        left: Counter[tuple[tuple[int, ...], int]] = Counter()
        for polynomial in product(range(prime), repeat=threshold):
            coefficients = iter(polynomial[1:])
            shares = shamir.split(
                polynomial[0],
                threshold,
                points,
                prime=prime,
                below=lambda _, c=coefficients: next(c),
            )
            left[tuple(shares[x] for x in seen), polynomial[0]] += 1
        assert len(left) == prime**threshold  # every pair of shares with every secret
        assert set(left.values()) == {1}


@pytest.mark.parametrize("n", [3, 5, 10, 50])
def test_any_threshold_of_shares_gives_the_secret(n: int) -> None:
    draw = random.Random(n)
    for secret in (bytes(32), b"\xff" * 32, draw.randbytes(32)):
        threshold = n // 2 + 1
        shares = shamir.share_bytes(secret, threshold, range(1, n + 1))
        assert {len(share) for share in shares.values()} == {shamir.SHARE_BYTES}
        for size in (threshold, n):
            chosen = draw.sample(range(1, n + 1), size)
            assert shamir.combine_bytes({x: shares[x] for x in chosen}) == secret
        few = draw.sample(range(1, n + 1), threshold - 1)
        assert shamir.combine({x: int.from_bytes(shares[x], "big") for x in few}) != (
            int.from_bytes(secret, "big")
        )


def test_impossible_input_is_refused() -> None:
    for secret, threshold, points in [
        (shamir.PRIME, 2, (1, 2)),
        (-1, 2, (1, 2)),
        (1, 3, (1, 2)),
        (1, 0, (1, 2)),
        (1, 2, (1, 1)),
        (1, 2, (0, 1)),
    ]:
        with pytest.raises(ValueError, match=r"secret|threshold|points"):
            shamir.split(secret, threshold, points)
    with pytest.raises(ValueError, match="32 bytes"):
        shamir.share_bytes(b"short", 2, (1, 2))
    with pytest.raises(TrainingError, match="not in the field"):
        shamir.combine_bytes({1: b"\xff" * 33, 2: bytes(33)})
    above = (2**256 + 5).to_bytes(33, "big")  # in the field, but no 32 bytes
    with pytest.raises(TrainingError, match="do not fit together"):
        shamir.combine_bytes({1: above, 2: above})
