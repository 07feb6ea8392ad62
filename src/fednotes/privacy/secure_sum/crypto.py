"""The cryptography of the secure sum, on bytes and uint64 buffers.

The primitives come from the package `cryptography` (the extra "secure"), which is
imported on use: X25519 (RFC 7748) agrees on secrets, HKDF-SHA256 (RFC 5869) derives a
key for each use of a secret, ChaCha20 (RFC 8439) expands a key of 256 bits into masks,
ChaCha20-Poly1305 seals shares, and HMAC-SHA256 makes receipts.

Secrets of 256 bits are shared by Shamir's method ("How to share a secret", CACM 22(11),
1979): any t of n shares determine the secret, and t - 1 reveal nothing. The field is
the integers modulo 2^256 + 297, the smallest prime above 2^256, so every string of 32
bytes can be a secret.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from fednotes.core.errors import RefusedError, TrainingError, needs

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

KEY_BYTES = 32
BLOCK = 2**15  # words per block, so that a block stays in the cache for all streams
PRIME = 2**256 + 297
SHARE_BYTES = 33
Words = NDArray[np.uint64]


def need_cryptography() -> None:
    """Raise MissingExtra if the package is not installed."""
    with needs("cryptography", "secure"):
        import cryptography  # noqa: F401


def join_parts(*parts: str | int | bytes) -> bytes:
    """Join parts into one byte string, each with its type and length.

    Different lists of parts give different strings. For example, the context of an
    exchange is `join_parts(job, run, number)`.
    """
    out = []
    for part in parts:
        if isinstance(part, bytes):
            kind = b"b"
            raw = part
        elif isinstance(part, str):
            kind = b"s"
            raw = part.encode()
        else:
            kind = b"i"
            raw = str(int(part)).encode()
        out.append(kind + len(raw).to_bytes(8, "big") + raw)
    return b"".join(out)


def hash_parts(*parts: str | int | bytes) -> bytes:
    """Return the SHA-256 of the joined parts."""
    return hashlib.sha256(join_parts(*parts)).digest()


def derive_key(secret: bytes, salt: bytes, *use: str | int | bytes) -> bytes:
    """Return a key of 32 bytes for one use of a secret (HKDF-SHA256).

    It is one-way in both arguments.
    """
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = join_parts("fednotes secure sum 1", *use)
    return HKDF(SHA256(), KEY_BYTES, salt=salt, info=info).derive(secret)


def load_private_key(raw: bytes) -> X25519PrivateKey:
    """Return the X25519 private key with these 32 bytes."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(raw)


def derive_public_key(key: X25519PrivateKey) -> bytes:
    """Return the public half of a key, 32 bytes."""
    return key.public_key().public_bytes_raw()


def compute_shared_secret(key: X25519PrivateKey, public: bytes, owner: str) -> bytes:
    """Return the secret of 32 bytes that the owners of both keys can compute.

    Args:
        key: The private key.
        public: The other owner's public key.
        owner: The other owner's name, for the message.

    Raises:
        RefusedError: The public key is malformed or has a low order.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    try:
        return key.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise RefusedError(
            f"the public key of site {owner!r} is not a usable X25519 key"
        ) from error


_NONCE = bytes(12)  # constant, because a key seals only one message


def seal(key: bytes, text: bytes, associated_data: bytes) -> bytes:
    """Return `text` encrypted and authenticated; `associated_data` is not encrypted.

    Never seal two messages with one key, because the nonce is fixed.
    """
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(_NONCE, text, associated_data)


def unseal(key: bytes, sealed: bytes, associated_data: bytes) -> bytes | None:
    """Return the sealed text; None if any argument is wrong."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, sealed, associated_data)
    except (InvalidTag, ValueError):
        return None


def compute_receipt(key: bytes, *parts: str | int | bytes) -> bytes:
    """Return the HMAC-SHA256 of the parts, a proof for one other site."""
    return hmac.digest(key, join_parts(*parts), "sha256")


def add_streams(words: Words, streams: Sequence[tuple[bytes, int]]) -> None:
    """Add ChaCha20 streams to words modulo 2^64, in place and in blocks.

    A stream starts at counter 0 with a nonce of zeros, so its key must have no other
    use. It is read as little-endian words, the byte order of every supported machine.

    Args:
        words: The words.
        streams: Keys, each with +1 (add its stream) or -1 (subtract it).
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    ciphers = [
        (Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor(), sign)
        for key, sign in streams
    ]
    zeros = bytes(8 * min(BLOCK, words.size))
    buffer = np.empty(min(BLOCK, words.size), np.uint64)
    for start in range(0, words.size, BLOCK):
        part = words[start : start + BLOCK]
        stream = buffer[: part.size]
        for cipher, sign in ciphers:
            cipher.update_into(zeros[: 8 * part.size], stream.data.cast("B"))
            if sign > 0:
                np.add(part, stream, out=part)
            else:
                np.subtract(part, stream, out=part)


class Identity(Protocol):
    """Signs a site's public keys and verifies those of other sites."""

    def sign(self, text: bytes) -> bytes:
        """Return this site's signature of a text."""

    def verify(self, site: str, text: bytes, signature: bytes) -> bool:
        """Return whether a site signed a text."""


# ---- shares of a secret --------------------------------------------------------------


def split_secret(
    secret: bytes, threshold: int, points: Sequence[int]
) -> dict[int, bytes]:
    """Split a secret into shares.

    A share is the value of a random polynomial of degree threshold - 1 with f(0) =
    secret.

    Args:
        secret: The secret, 32 bytes.
        threshold: Number of shares that determine the secret.
        points: The points at which the polynomial is evaluated, distinct integers from
            1.

    Returns:
        The share of each point, 33 bytes.
    """
    polynomial = [int.from_bytes(secret, "big")]
    polynomial += (secrets.randbelow(PRIME) for _ in range(threshold - 1))
    shares = {}
    for point in points:
        value = 0
        for factor in reversed(polynomial):  # Horner's rule
            value = (value * point + factor) % PRIME
        shares[point] = value.to_bytes(SHARE_BYTES, "big")
    return shares


# A server that looks for wrong shares combines those of the same sites for each secret.
# Without the cache, one site among 200 that sends wrong shares costs a minute per sum.
@lru_cache(maxsize=1024)
def _compute_coefficients(points: tuple[int, ...], prime: int) -> tuple[int, ...]:
    """Return the factor of the share at each point in Lagrange's formula."""
    coefficients = []
    for point in points:
        numerator = 1
        denominator = 1
        for other in points:
            if other != point:
                numerator = numerator * other % prime
                denominator = denominator * (other - point) % prime
        coefficients.append(numerator * pow(denominator, -1, prime) % prime)
    return tuple(coefficients)


def combine_shares(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret f(0), 32 bytes, from the shares f(x).

    Lagrange's formula: f(0) = Σ f(x) · Π x' / (x' - x), where the product is over the
    other points x'.

    Args:
        shares: At least as many shares as the threshold, by point. With fewer, the
            result is unrelated to the secret.

    Raises:
        TrainingError: The shares do not determine a secret, so one of them is wrong.
    """
    values = {point: int.from_bytes(share, "big") for point, share in shares.items()}
    if not all(0 < point < PRIME and value < PRIME for point, value in values.items()):
        raise TrainingError("a share of a secret is not in the field")
    coefficients = _compute_coefficients(tuple(values), PRIME)
    secret = 0
    for value, coefficient in zip(values.values(), coefficients, strict=True):
        secret = (secret + value * coefficient) % PRIME
    if secret >= 2 ** (8 * KEY_BYTES):
        raise TrainingError(
            "the shares of a secret contradict each other: at least one of them is "
            "wrong"
        )
    return secret.to_bytes(KEY_BYTES, "big")
