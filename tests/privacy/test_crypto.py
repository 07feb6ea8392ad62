"""The cryptography of the secure sum, compared with the test vectors of its RFCs."""

from __future__ import annotations

import hashlib
import hmac
import random
import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import combinations, product
from unittest import mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from fednotes.core.errors import MissingExtra, RefusedError, TrainingError
from fednotes.privacy.secure_sum import Parties, crypto

# RFC 8439, appendix A.1: keystream of test vectors 1 and 2 (key 0, nonce 0, counters 0
# and 1).
ZERO_KEY_STREAM = bytes.fromhex(
    "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
    "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
)


def stream(words: int, key: bytes) -> np.ndarray:
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * words)), "<u8")


def test_the_key_stream_equals_that_of_the_rfc() -> None:
    words = np.zeros(16, np.uint64)
    crypto.add_streams(words, [(bytes(32), 1)])
    assert words.astype("<u8").tobytes() == ZERO_KEY_STREAM


def test_streams_continue_over_blocks_and_add_modulo_2_to_the_64() -> None:
    """Against the library's streams in one piece."""
    first_key, second_key = bytes(range(32)), bytes(range(32, 64))
    size = 2 * crypto.BLOCK + 11
    base = np.arange(size, dtype=np.uint64) - np.uint64(5)
    words = base.copy()
    crypto.add_streams(words, [(first_key, 1), (second_key, -1)])
    plus, minus = map(partial(stream, size), (first_key, second_key))
    assert (words == base + plus - minus).all()
    crypto.add_streams(words, [(first_key, -1), (second_key, 1)])
    assert (words == base).all()


def test_an_invalid_public_key_is_refused() -> None:
    for bad in (bytes(32), b"short"):
        with pytest.raises(RefusedError, match="site 'bob'"):
            crypto.compute_shared_secret(crypto.load_private_key(b"k" * 32), bad, "bob")


def test_keys_equal_those_of_hkdf() -> None:
    """RFC 5869 in two lines of hmac: extract with the salt, expand with the use."""
    secret, salt = b"s" * 32, b"salt"
    extracted = hmac.digest(salt, secret, "sha256")
    info = crypto.join_parts("fednotes secure sum 1", "pair mask", 7)
    assert crypto.derive_key(secret, salt, "pair mask", 7) == hmac.digest(
        extracted, info + b"\x01", "sha256"
    )


def test_joined_parts_are_unambiguous() -> None:
    """No two lists of parts give the same bytes, so no two contexts give the same keys."""
    lists = [
        (), ("",), ("", ""), ("ab",), ("a", "b"), ("", "ab"), (b"ab",), (1,), ("1",), (b"1",),
        (11,), (1, 1), ("s" + 7 * "\0" + "\x01a",), (-1,),
    ]  # fmt: skip
    for first, second in combinations(lists, 2):
        assert crypto.join_parts(*first) != crypto.join_parts(*second)
        assert crypto.hash_parts(*first) != crypto.hash_parts(*second)
    assert (
        crypto.hash_parts("a", 1) == hashlib.sha256(crypto.join_parts("a", 1)).digest()
    )


def test_a_box_opens_only_with_its_key_and_context() -> None:
    key, text = b"k" * 32, b"shares"
    box = crypto.seal(key, text, b"session")
    assert text not in box
    assert crypto.unseal(key, box, b"session") == text
    assert crypto.unseal(b"l" * 32, box, b"session") is None
    assert crypto.unseal(key, box, b"another") is None
    assert crypto.unseal(key, b"", b"session") is None
    for at in range(len(box)):
        changed = bytes(b ^ (i == at) for i, b in enumerate(box))
        assert crypto.unseal(key, changed, b"session") is None


def test_an_error_about_a_missing_package_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(MissingExtra, match=r"fednotes\[secure\]"):
        Parties(("a", "b", "c"))


def shares_of(
    secret: int, factors: Iterable[int], points: Iterable[int]
) -> dict[int, int]:
    """Return the shares, as numbers by point, of the polynomial with these factors."""
    factors_drawn = [*factors]
    with mock.patch("secrets.randbelow", side_effect=factors_drawn):
        shares = crypto.split_secret(
            secret.to_bytes(32, "big"), 1 + len(factors_drawn), [*points]
        )
    return {point: int.from_bytes(share, "big") for point, share in shares.items()}


@mock.patch.object(crypto, "PRIME", 1613)
def test_shares_equal_a_published_example() -> None:
    """The worked example of Wikipedia's article (f(x) = 1234 + 166x + 94x², modulo
    1613)."""
    published = {1: 1494, 2: 329, 3: 965, 4: 176, 5: 1188, 6: 775}
    assert shares_of(1234, [166, 94], range(1, 7)) == published
    for three in combinations(published, 3):
        recovered = crypto.combine_shares(
            {x: published[x].to_bytes(33, "big") for x in three}
        )
        assert int.from_bytes(recovered, "big") == 1234


def test_the_prime_is_the_smallest_above_2_to_the_256() -> None:
    """Fermat's test to twelve bases; even numbers need none."""

    def probably_prime(number: int) -> bool:
        bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
        return all(pow(base, number - 1, number) == 1 for base in bases)

    assert probably_prime(crypto.PRIME)
    assert not any(probably_prime(2**256 + add) for add in range(1, 297, 2))


@mock.patch.object(crypto, "PRIME", 7)
def test_fewer_shares_than_the_threshold_reveal_nothing() -> None:
    """Brute force over all polynomials modulo 7: for t - 1 given shares, each secret is
    left with equally many polynomials."""
    dealings = [
        (secret, shares_of(secret, factors, (1, 2, 4, 6)))
        for secret, *factors in product(range(7), repeat=3)
    ]
    for points in combinations((1, 2, 4, 6), 2):
        views = Counter(
            (secret, *(shares[x] for x in points)) for secret, shares in dealings
        )
        assert len(views) == 7**3  # every pair of shares with every secret
        assert set(views.values()) == {1}


@pytest.mark.parametrize("n", [3, 5, 10, 50])
def test_any_set_of_threshold_shares_gives_the_secret(n: int) -> None:
    draw = random.Random(n)
    for secret in (bytes(32), b"\xff" * 32, draw.randbytes(32)):
        threshold = n // 2 + 1
        shares = crypto.split_secret(secret, threshold, range(1, n + 1))
        assert {len(share) for share in shares.values()} == {crypto.SHARE_BYTES}
        for size in (threshold, n):
            chosen = draw.sample(range(1, n + 1), size)
            assert crypto.combine_shares({x: shares[x] for x in chosen}) == secret
        few = draw.sample(range(1, n + 1), threshold - 1)
        assert crypto.combine_shares({x: shares[x] for x in few}) != secret


def test_coefficients_are_drawn_from_the_whole_field() -> None:
    """By hand: with the largest factors, which are -1, f(x) = 5 - x - x² modulo the
    prime.

    Factors from a part of the field would leave some secrets more likely than others.
    """
    with mock.patch("secrets.randbelow", side_effect=lambda end: end - 1) as randbelow:
        shares = crypto.split_secret((5).to_bytes(32, "big"), 3, [1, 2, 3])
    assert randbelow.call_count == 2
    expected = {x: (5 - x - x**2) % (2**256 + 297) for x in (1, 2, 3)}
    assert {x: int.from_bytes(share, "big") for x, share in shares.items()} == expected


def test_impossible_input_is_refused() -> None:
    beyond = crypto.PRIME.to_bytes(33, "big")
    for shares in (
        {1: b"\xff" * 33, 2: bytes(33)},
        {1: bytes(33), 2: beyond},
        {0: bytes(33), 1: bytes(33)},
        {crypto.PRIME: bytes(33), 1: bytes(33)},
    ):
        with pytest.raises(TrainingError, match="not in the field"):
            crypto.combine_shares(shares)
    largest = (crypto.PRIME - 1).to_bytes(33, "big")  # f(x) = x - 2 at 1; 0 at 2
    with pytest.raises(TrainingError, match="contradict each other"):
        crypto.combine_shares({1: largest, 2: bytes(33)})
    above = (2**256 + 5).to_bytes(33, "big")  # in the field, but no 32 bytes
    with pytest.raises(TrainingError, match="contradict each other"):
        crypto.combine_shares({1: above, 2: above})
