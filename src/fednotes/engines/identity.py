"""Signatures by a kit's own key: what makes a site's keys of the secure sum its own.

A signature carries the signer's certificate; the project's authority, whose certificate is in
every kit, vouches for it. So the server, which relays the keys, cannot put its own in their
place, and sites need nothing of each other beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fednotes.engines.certificates import certificate_of, key_of, names_of
from fednotes.engines.trust import Trust
from fednotes.privacy.masks import joined

_PURPOSE = "fednotes keys of a site"  # TLS and NVFlare sign with this key too, never such a text
RENEWAL = "fednotes request for a new certificate"
_LENGTH = 4  # bytes that say how long the certificate is


@dataclass(frozen=True, slots=True)
class CertificateIdentity:
    """A site's certificate and key (`privacy.masks.Identity`). startup: where is what it trusts.

    A site is known by the name in its certificate, so provisioning gives no name twice. What is
    trusted is read anew with each signature: a kit that is revoked counts no more at once.
    """

    certificate: Any = field(repr=False)
    key: Any = field(repr=False)
    startup: Path

    @classmethod
    def of_kit(cls, kit: Path, stem: str = "startup/client") -> CertificateIdentity:
        """That of a kit. stem: of its files. Raises ConfigError if it cannot be read."""
        path = kit / stem
        return cls(certificate_of(path), key_of(path), path.parent)

    def sign(self, text: bytes, purpose: str = _PURPOSE) -> bytes:
        """This site's certificate, and its signature (RSA-PSS, SHA-256)."""
        from cryptography.hazmat.primitives.serialization import Encoding

        own = self.certificate.public_bytes(Encoding.DER)
        signature: bytes = self.key.sign(joined(purpose, text), *_scheme())
        return len(own).to_bytes(_LENGTH, "big") + own + signature

    def verify(self, site: str, text: bytes, signature: bytes) -> bool:
        """Whether the holder of a certificate of the project in the name `site` signed, and the
        certificate counts now.

        Raises ConfigError where what is trusted cannot be read.
        """
        shown = signer(Trust.of(self.startup), text, signature, _PURPOSE)
        return shown is not None and names_of(shown) == [site]


def signer(trust: Trust, text: bytes, signature: bytes, purpose: str) -> Any:
    """The certificate of who signed for a purpose; None unless it counts and the signature is
    its key's."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
    from cryptography.x509 import load_der_x509_certificate

    end = _LENGTH + int.from_bytes(signature[:_LENGTH], "big")
    try:
        shown = load_der_x509_certificate(signature[_LENGTH:end])
        key = shown.public_key()
        if trust.problem(shown) or not isinstance(key, RSAPublicKey):
            return None
        key.verify(signature[end:], joined(purpose, text), *_scheme())
    except (ValueError, TypeError, InvalidSignature):
        return None
    return shown


def _scheme() -> tuple[Any, Any]:
    from cryptography.hazmat.primitives.asymmetric import padding
    from cryptography.hazmat.primitives.hashes import SHA256

    salt = padding.PSS.DIGEST_LENGTH
    return padding.PSS(mgf=padding.MGF1(SHA256()), salt_length=salt), SHA256()
