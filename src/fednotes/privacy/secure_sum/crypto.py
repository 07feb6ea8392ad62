"""The cryptography of the secure sum, on bytes and uint64 buffers. Nothing here is
home-made.

X25519 (RFC 7748) agrees on secrets, HKDF-SHA256 (RFC 5869) makes a key for each use of
one, ChaCha20 (RFC 8439) stretches a key of 256 bits into masks, ChaCha20-Poly1305 seals
shares, HMAC-SHA256 makes receipts. All from `cryptography`, the extra "secure", which
is imported where it is used.

Shares of a secret of 256 bits, of which any t of n give it and t - 1 say nothing, are
Shamir's ("How to share a secret", CACM 22(11), 1979). The field is the integers modulo
2^256 + 297, the least prime above 2^256, so every string of 32 bytes is a secret as it
is.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from fednotes.core.errors import RefusedError, TrainingError, needs

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

KEY_BYTES = 32
# words masked at a time: they stay in the cache while every stream is added
BLOCK = 2**15
PRIME, SHARE_BYTES = 2**256 + 297, 33
Words = NDArray[np.uint64]


def need_cryptography() -> None:
    """Raises MissingExtra where the package is not installed."""
    with needs("cryptography", "secure"):
        import cryptography  # noqa: F401


def joined(*parts: str | int | bytes) -> bytes:
    """Parts as one string of bytes, each with its type and length: no two lists give
    the same.

    The context of an exchange is made of it: `joined(job, run, number)`.
    """
    out = []
    for part in parts:
        if isinstance(part, bytes):
            kind, raw = b"b", part
        elif isinstance(part, str):
            kind, raw = b"s", part.encode()
        else:
            kind, raw = b"i", str(int(part)).encode()
        out.append(kind + len(raw).to_bytes(8, "big") + raw)
    return b"".join(out)


def digest(*parts: str | int | bytes) -> bytes:
    """SHA-256 of `joined`."""
    return hashlib.sha256(joined(*parts)).digest()


def derived(secret: bytes, salt: bytes, *use: str | int | bytes) -> bytes:
    """A key of 32 bytes for one use of a secret (HKDF-SHA256); one-way in both
    arguments."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = joined("fednotes secure sum 1", *use)
    return HKDF(SHA256(), KEY_BYTES, salt=salt, info=info).derive(secret)


def private_key(raw: bytes) -> X25519PrivateKey:
    """An X25519 key of 32 random bytes."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(raw)


def public_bytes(key: X25519PrivateKey) -> bytes:
    """The public half, 32 bytes."""
    return key.public_key().public_bytes_raw()


def agreed(key: X25519PrivateKey, public: bytes, owner: str) -> bytes:
    """The secret of 32 bytes that both owners of the two keys can compute.

    Raises RefusedError for a public key that is none, or of low order.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    try:
        return key.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise RefusedError(
            f"the public key of site {owner!r} is not a usable X25519 key"
        ) from error


def sealed(key: bytes, text: bytes, bound: bytes) -> bytes:
    """`text` encrypted, and it and `bound` authenticated.

    A key seals one message only.
    """
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(bytes(12), text, bound)


def opened(key: bytes, box: bytes, bound: bytes) -> bytes | None:
    """What was sealed; None if key, box or bound are not what they were."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), box, bound)
    except (InvalidTag, ValueError):
        return None


def receipt(key: bytes, *parts: str | int | bytes) -> bytes:
    """HMAC-SHA256 of the parts: its holder shows one other site what it did."""
    return hmac.digest(key, joined(*parts), "sha256")


def add_streams(words: Words, streams: Sequence[tuple[bytes, int]]) -> None:
    """Add to `words`, modulo 2^64, the ChaCha20 stream of each (key, +1) and take off
    (key, -1).

    A stream starts at counter 0 with a nonce of zeros and is read as little-endian
    words (no other machine can send them): a key must have no other use. In place, a
    block at a time.
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
            (np.add if sign > 0 else np.subtract)(part, stream, out=part)


class Identity(Protocol):
    """How a site signs its public keys, and knows those of others."""

    def sign(self, text: bytes) -> bytes:
        """This site's signature."""

    def verify(self, site: str, text: bytes, signature: bytes) -> bool:
        """Whether `site` signed `text`."""


# shares of a secret


def split(secret: bytes, threshold: int, points: Sequence[int]) -> dict[int, bytes]:
    """Point → value there of a random polynomial of degree threshold - 1 with f(0) =
    secret.

    secret: 32 bytes. points: distinct, from 1. A share has 33 bytes.
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


def combine(shares: Mapping[int, bytes]) -> bytes:
    """f(0) of the polynomial through the shares, by Lagrange's formula: the secret of
    32 bytes.

    The caller gives as many shares as the threshold, or more; with fewer the result is
    unrelated to the secret. Raises TrainingError if what they give is no secret (one of
    them is wrong).
    """
    values = {point: int.from_bytes(share, "big") for point, share in shares.items()}
    if not all(0 < point < PRIME and value < PRIME for point, value in values.items()):
        raise TrainingError("a share of a secret is not in the field")
    secret = 0
    for point, value in values.items():
        above = below = 1
        for other in values:
            if other != point:
                above = above * other % PRIME
                below = below * (other - point) % PRIME
        secret = (secret + value * above * pow(below, -1, PRIME)) % PRIME
    if secret >> (8 * KEY_BYTES):
        raise TrainingError(
            "the shares of a secret do not fit together: one of them is wrong"
        )
    return secret.to_bytes(KEY_BYTES, "big")
