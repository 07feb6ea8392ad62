"""A kit's own certificates and keys: their validity and their signatures."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from fednotes.apps.deployment.nvflare.kit import SERVER, WATCH, read_kit
from fednotes.apps.deployment.nvflare.trust import (
    REMEDY,
    ROOTS_FILE,
    CertificateProblem,
    Trust,
    load_kit_file,
)
from fednotes.core.errors import ConfigError, needs
from fednotes.privacy.secure_sum.crypto import join_parts

with needs("cryptography", "deploy"):
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import padding, rsa
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        load_pem_private_key,
    )
    from cryptography.x509.oid import NameOID

logger = logging.getLogger("fednotes.certificates")
EXPIRY_WARNING = timedelta(days=60)
# Purposes of signatures. TLS and NVFlare use the same key, but never sign these texts.
KEYS_PURPOSE = "fednotes keys of a site"
RENEWAL_PURPOSE = "fednotes request for a new certificate"
_LENGTH_BYTES = 4  # size of the certificate's length in a signature
_PSS = padding.PSS(mgf=padding.MGF1(SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)


# ---- files ---------------------------------------------------------------------------


def find_stems(kit: Path) -> dict[Path, str]:
    """Return the paths of a kit's certificates, and the names that they must have.

    Returns:
        The stem of each certificate, which is the path of the certificate and its key
        without their endings, with the name that the certificate must have.

    Raises:
        ConfigError: The folder is not a kit.
    """
    facts = read_kit(kit)
    if facts.role != SERVER:
        return {kit / "startup" / "client": facts.person or facts.name}
    return {
        kit / "startup" / "server": facts.server,
        kit / WATCH / "startup" / "client": facts.person,
    }


def read_certificate(stem: Path) -> x509.Certificate:
    """Read a kit's certificate.

    Args:
        stem: Path of the certificate without its ending.

    Raises:
        ConfigError: The file is missing or cannot be read.
    """
    return load_kit_file(stem.with_suffix(".crt"), x509.load_pem_x509_certificate)


def read_kit_key(stem: Path) -> rsa.RSAPrivateKey:
    """Read a kit's private key.

    Args:
        stem: Path of the key without its ending.

    Raises:
        ConfigError: The file is missing or cannot be read.
    """

    def load(text: bytes) -> rsa.RSAPrivateKey:
        key = load_pem_private_key(text, None)
        if not isinstance(key, rsa.RSAPrivateKey):
            raise TypeError("a kit's key is RSA")
        return key

    return load_kit_file(stem.with_suffix(".key"), load)


def list_owner_names(certificate: x509.Certificate) -> list[str]:
    """Return the names of a certificate's owner; a project's certificates have one."""
    attributes = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return [str(attribute.value) for attribute in attributes]


# ---- whether a kit's certificates are valid ------------------------------------------
# NVFlare would fail in a thread whose error nobody sees, and wait forever.


def check_kit(kit: Path) -> list[str]:
    """Check a kit's certificates and return warnings about those that expire soon.

    Raises:
        ConfigError: As for `read_expiry_dates`.
    """
    limit = datetime.now(UTC) + EXPIRY_WARNING
    warnings = []
    for path, end in read_expiry_dates(kit).items():
        if end >= limit:
            continue
        remedy = f"fednotes kit renew {kit}"
        if path.name == ROOTS_FILE:
            remedy = "ask the project's coordinator for a new root"
        warnings.append(f"{path}: the certificate expires on {end:%Y-%m-%d}: {remedy}")
    return warnings


def read_expiry_dates(kit: Path) -> dict[Path, datetime]:
    """Return when a kit's certificates and its root expire.

    Raises:
        ConfigError: A certificate is missing, not yet valid, expired or revoked, was
            not signed by the kit's authority, has a different name than the kit, or
            does not match the key beside it.
    """
    dates: dict[Path, datetime] = {}
    owner = read_kit(kit).name
    for stem, name in find_stems(kit).items():
        dates |= _check_certificate(stem, name, owner)
    return dates


def _check_certificate(stem: Path, name: str, owner: str) -> dict[Path, datetime]:
    """Check one certificate of a kit, and the root beside it.

    Args:
        stem: Path of the certificate and its key without their endings.
        name: The name that the certificate must have.
        owner: The name of the kit in its project.

    Returns:
        The files of the certificate and of the root, with their expiry dates.
    """
    trust = Trust.read(stem.parent)
    certificate_file = stem.with_suffix(".crt")
    certificate = read_certificate(stem)
    _require_valid(certificate_file, trust.find_problem(certificate), owner)
    names = list_owner_names(certificate)
    if names != [name]:
        raise ConfigError(
            f"{certificate_file}: the certificate names "
            f"{', '.join(names) or 'nobody'}, but the kit belongs to {name}: {REMEDY}"
        )
    if read_kit_key(stem).public_key() != certificate.public_key():
        raise ConfigError(
            f"{certificate_file}: the certificate does not belong to the kit's key: "
            f"{REMEDY}"
        )
    roots_file = stem.with_name(ROOTS_FILE)
    newest_root = trust.roots[-1]
    _require_valid(roots_file, trust.find_problem(newest_root), "")
    return {
        certificate_file: trust.find_expiry(certificate),
        roots_file: trust.find_root_expiry(newest_root),
    }


def _require_valid(path: Path, problem: CertificateProblem | None, owner: str) -> None:
    """Raise ConfigError if a certificate has a problem.

    Args:
        path: The certificate.
        problem: Its problem; None if there is none.
        owner: The name of the kit that the certificate belongs to; "" for a root.
    """
    if problem is None:
        return
    remedy = "" if problem.kind == "early" else f": {REMEDY}"
    if owner and problem.kind in ("expired", "withdrawn"):
        remedy = (
            f"{remedy}; the coordinator makes one: fednotes provision PROJECT --out "
            f"KITS --again {owner}"
        )
    raise ConfigError(f"{path}: the certificate {problem}{remedy}")


def find_withdrawal_of_peer(kit: Path, der: bytes) -> CertificateProblem | None:
    """Return why a peer's certificate was withdrawn; None if it was not.

    Args:
        kit: The kit that connects to the peer.
        der: The certificate that the peer presented in TLS, in DER.
    """
    certificate = x509.load_der_x509_certificate(der)
    return Trust.read(kit / "startup").find_withdrawal(certificate)


# ---- signatures ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CertificateIdentity:
    """A site's certificate and key, with which it signs its keys of the secure sum.

    It is an `Identity` of `fednotes.privacy.secure_sum.crypto`. A signature carries the
    signer's certificate, for which the project's authority vouches. Therefore the
    server, which relays the keys of the secure sum, cannot replace them with its own,
    and sites need not know each other beforehand.

    A site is known by the name in its certificate, so no two participants of a project
    have the same name. The kit's trust list is read again for each signature, so that a
    revoked kit is refused immediately.

    Attributes:
        certificate: The certificate.
        key: Its private key.
        startup: The kit's folder with the certificates that it trusts.
    """

    certificate: x509.Certificate = field(repr=False)
    key: rsa.RSAPrivateKey = field(repr=False)
    startup: Path

    @classmethod
    def read(cls, kit: Path, stem: str = "startup/client") -> CertificateIdentity:
        """Read a kit's certificate and key.

        Args:
            kit: The kit's folder.
            stem: Path of both files within the kit, without their endings.

        Raises:
            ConfigError: A file is missing or cannot be read.
        """
        path = kit / stem
        return cls(read_certificate(path), read_kit_key(path), path.parent)

    def sign(self, text: bytes, purpose: str = KEYS_PURPOSE) -> bytes:
        """Sign a text (RSA-PSS, SHA-256).

        Returns:
            The length of this site's certificate, the certificate in DER, and the
            signature.
        """
        certificate = self.certificate.public_bytes(Encoding.DER)
        signature: bytes = self.key.sign(join_parts(purpose, text), _PSS, SHA256())
        length = len(certificate).to_bytes(_LENGTH_BYTES, "big")
        return length + certificate + signature

    def verify(self, site: str, text: bytes, signature: bytes) -> bool:
        """Return whether a site signed its keys of the secure sum.

        The signature must come with a certificate in the site's name that is valid now.

        Raises:
            ConfigError: The files that say what this kit trusts cannot be read.
        """
        trust = Trust.read(self.startup)
        certificate = find_signer(trust, text, signature, purpose=KEYS_PURPOSE)
        if certificate is not None:
            return list_owner_names(certificate) == [site]
        problem = _find_problem_of_signer(trust, signature)
        if problem is not None:
            hint = ""
            if problem.kind == "expired":
                # A wrong clock can make a valid certificate look expired.
                hint = ": check that this machine's clock is right"
            logger.warning(
                "the certificate shown for site %r %s%s", site, problem, hint
            )
        return False


def find_signer(
    trust: Trust, text: bytes, signature: bytes, *, purpose: str
) -> x509.Certificate | None:
    """Return the certificate of the signer of a text.

    Args:
        trust: The roots, bridges and revocations that the verifier trusts.
        text: The text.
        signature: The result of `CertificateIdentity.sign`.
        purpose: The purpose that the signature must have.

    Returns:
        The certificate; None if it is not accepted or the signature is wrong.
    """
    parts = _split_signature(signature)
    try:
        certificate = x509.load_der_x509_certificate(parts.certificate)
        key = certificate.public_key()
        if trust.find_problem(certificate) or not isinstance(key, rsa.RSAPublicKey):
            return None
        key.verify(parts.signature, join_parts(purpose, text), _PSS, SHA256())
    except (ValueError, TypeError, InvalidSignature):
        return None
    return certificate


def _find_problem_of_signer(
    trust: Trust, signature: bytes
) -> CertificateProblem | None:
    """Return why the certificate in a signature is not accepted.

    Returns:
        The problem; None if the certificate is accepted or cannot be read.
    """
    der = _split_signature(signature).certificate
    try:
        return trust.find_problem(x509.load_der_x509_certificate(der))
    except (ValueError, TypeError):
        return None


class _SignatureParts(NamedTuple):
    """The parts of a result of `CertificateIdentity.sign`.

    Attributes:
        certificate: The signer's certificate, in DER.
        signature: The signature without the certificate.
    """

    certificate: bytes
    signature: bytes


def _split_signature(signature: bytes) -> _SignatureParts:
    """Return the certificate in a signature, and the signature alone."""
    end = _LENGTH_BYTES + int.from_bytes(signature[:_LENGTH_BYTES], "big")
    return _SignatureParts(signature[_LENGTH_BYTES:end], signature[end:])
