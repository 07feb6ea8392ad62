"""A site's identity by keys that were exchanged without the server, as a test makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey


@dataclass(frozen=True)
class Ed25519Identity:
    """private: 32 bytes. known: site → its public key, 32 bytes."""

    private: bytes
    known: Mapping[str, bytes]

    @property
    def public(self) -> bytes:
        return Ed25519PrivateKey.from_private_bytes(self.private).public_key().public_bytes_raw()

    def sign(self, text: bytes) -> bytes:
        return Ed25519PrivateKey.from_private_bytes(self.private).sign(text)

    def verify(self, site: str, text: bytes, signature: bytes) -> bool:
        try:
            Ed25519PublicKey.from_public_bytes(self.known[site]).verify(signature, text)
        except (InvalidSignature, KeyError):
            return False
        return True
