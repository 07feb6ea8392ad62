"""Signatures by a kit's own key: what makes a site's keys of the secure sum its own.

A signature carries the signer's certificate; the project's authority, whose certificate is in
every kit, vouches for it. So the server, which relays the keys, cannot put its own in their
place, and sites need nothing of each other beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError
from fednotes.privacy.masks import joined

_PURPOSE = "fednotes keys of a site"  # TLS and NVFlare sign with this key too, never such a text
_LENGTH = 4  # bytes that say how long the certificate is


@dataclass(frozen=True, slots=True)
class CertificateIdentity:
    """A site's certificate and key (`privacy.masks.Identity`). root: the authority's certificate.

    A site is known by the name in its certificate, so provisioning gives no name twice.
    """

    certificate: Any = field(repr=False)
    key: Any = field(repr=False)
    root: Any = field(repr=False)

    @classmethod
    def of_kit(cls, kit: Path) -> CertificateIdentity:
        """That of a site's kit. Raises ConfigError if it cannot be read."""
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from cryptography.x509 import load_pem_x509_certificate

        folder = kit / "startup"
        try:
            own = load_pem_x509_certificate((folder / "client.crt").read_bytes())
            root = load_pem_x509_certificate((folder / "rootCA.pem").read_bytes())
            key = load_pem_private_key((folder / "client.key").read_bytes(), None)
        except (OSError, ValueError, TypeError) as error:  # their messages may quote the key
            said = f"{folder}: no certificate and key of a kit can be read"
            raise ConfigError(f"{said}: ask for a new kit") from error
        return cls(own, key, root)

    def sign(self, text: bytes) -> bytes:
        """This site's certificate, and its signature (RSA-PSS, SHA-256)."""
        from cryptography.hazmat.primitives.serialization import Encoding

        own = self.certificate.public_bytes(Encoding.DER)
        signature: bytes = self.key.sign(joined(_PURPOSE, text), *_scheme())
        return len(own).to_bytes(_LENGTH, "big") + own + signature

    def verify(self, site: str, text: bytes, signature: bytes) -> bool:
        """Whether the holder of a valid certificate of the project in the name `site` signed."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
        from cryptography.x509 import load_der_x509_certificate
        from cryptography.x509.oid import NameOID

        end = _LENGTH + int.from_bytes(signature[:_LENGTH], "big")
        try:
            shown = load_der_x509_certificate(signature[_LENGTH:end])
            shown.verify_directly_issued_by(self.root)
            names = [n.value for n in shown.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
            key = shown.public_key()
            now = datetime.now(UTC)
            if names != [site] or not isinstance(key, RSAPublicKey):
                return False
            if not shown.not_valid_before_utc <= now <= shown.not_valid_after_utc:
                return False
            key.verify(signature[end:], joined(_PURPOSE, text), *_scheme())
        except (ValueError, TypeError, InvalidSignature):
            return False
        return True


def _scheme() -> tuple[Any, Any]:
    from cryptography.hazmat.primitives.asymmetric import padding
    from cryptography.hazmat.primitives.hashes import SHA256

    salt = padding.PSS.DIGEST_LENGTH
    return padding.PSS(mgf=padding.MGF1(SHA256()), salt_length=salt), SHA256()
