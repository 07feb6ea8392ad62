"""The cryptography of the secure sum, on bytes and uint64 buffers. Nothing here is home-made.

X25519 (RFC 7748) agrees on secrets, HKDF-SHA256 (RFC 5869) makes a key for each use of one,
ChaCha20 (RFC 8439) stretches a key of 256 bits into masks, ChaCha20-Poly1305 seals shares,
HMAC-SHA256 makes receipts, Ed25519 (RFC 8032) signs public keys. All from `cryptography`,
the extra "secure", which is imported where it is used.
"""

from __future__ import annotations

import hashlib
import hmac
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from fednotes.core.errors import ConfigError, MissingExtra, RefusedError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

KEY_BYTES = 32
BLOCK = 2**15  # words masked at a time: they stay in the cache while every stream is added

Words = NDArray[np.uint64]


def need_cryptography() -> None:
    """Raises MissingExtra where the package is not installed."""
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise MissingExtra("cryptography", "secure") from error


def joined(*parts: str | int | bytes) -> bytes:
    """Parts as one string of bytes, each with its type and length: no two lists give the same.

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
    """A key of 32 bytes for one use of a secret (HKDF-SHA256); one-way in both arguments."""
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
    """`text` encrypted, and it and `bound` authenticated. A key seals one message only."""
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


def same(left: bytes, right: bytes) -> bool:
    """Equality in constant time."""
    return hmac.compare_digest(left, right)


def add_streams(words: Words, streams: Sequence[tuple[bytes, int]]) -> None:
    """Add to `words`, modulo 2^64, the ChaCha20 stream of each (key, +1) and take off (key, -1).

    A stream starts at counter 0 with a nonce of zeros and is read as little-endian words: a
    key must have no other use. In place, a block at a time.
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
            mask = stream if sys.byteorder == "little" else stream.byteswap()
            (np.add if sign > 0 else np.subtract)(part, mask, out=part)


class Identity(Protocol):
    """How a site signs its public keys, and knows those of others."""

    def sign(self, text: bytes) -> bytes:
        """This site's signature."""

    def verify(self, site: str, text: bytes, signature: bytes) -> bool:
        """Whether `site` signed `text`."""


@dataclass(frozen=True, slots=True)
class Ed25519Identity:
    """A signing key and the public keys of the sites, exchanged without the server.

    private: 32 bytes. known: site → 32 bytes.
    """

    private: bytes = field(repr=False)
    known: Mapping[str, bytes]

    def __post_init__(self) -> None:
        lengths = {len(self.private), *map(len, self.known.values())}
        if lengths != {KEY_BYTES}:
            raise ConfigError(f"an Ed25519 key has {KEY_BYTES} bytes")

    @property
    def public(self) -> bytes:
        """What other sites need in `known`."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self.private).public_key().public_bytes_raw()

    def sign(self, text: bytes) -> bytes:
        """64 bytes."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return Ed25519PrivateKey.from_private_bytes(self.private).sign(text)

    def verify(self, site: str, text: bytes, signature: bytes) -> bool:
        """False for an unknown site too."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        if site not in self.known:
            return False
        try:
            Ed25519PublicKey.from_public_bytes(self.known[site]).verify(signature, text)
        except InvalidSignature:
            return False
        return True
