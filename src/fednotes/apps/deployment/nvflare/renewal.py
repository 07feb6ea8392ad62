"""Renew a kit's certificates; no private key leaves the kit.

    KIT/renewal/STEM.key      new keys, until their certificates arrive

The kit creates new keys and a request for their certificates (`request_renewal`). The
authority signs it (`Authority.sign_requests`), and the kit installs the answer
(`install_renewal`).
"""

from __future__ import annotations

import base64
import shutil
from pathlib import Path

from fednotes.apps.deployment.nvflare.certificates import (
    RENEWAL_PURPOSE,
    CertificateIdentity,
    find_stems,
    read_certificate,
    read_kit_key,
)
from fednotes.apps.deployment.nvflare.trust import (
    Trust,
    encode_pem,
    install_trust,
    is_issued_by,
)
from fednotes.core.errors import ConfigError, RefusedError, needs
from fednotes.core.store import replace_file

with needs("cryptography", "deploy"):
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )
    from cryptography.x509.oid import AttributeOID

RENEWAL_FOLDER = "renewal"  # in the kit


def request_renewal(kit: Path) -> bytes:
    """Create new keys, which stay in the kit, and request certificates for them.

    Each request is signed by the new key. It is also signed by the kit's current key,
    which proves to the authority that the request comes from the kit's holder. A second
    call before the certificates arrive requests them for the same keys.

    Returns:
        A request for each certificate of the kit, in one PEM file.

    Raises:
        ConfigError: The kit's current certificates or keys cannot be read.
    """
    requests = []
    for stem in find_stems(kit):
        identity = CertificateIdentity.read(kit, str(stem.relative_to(kit)))
        new_stem = _get_new_stem(kit, stem)
        new_key_file = new_stem.with_suffix(".key")
        if not new_key_file.exists():
            new_key_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(new_key_file, create_key_pem())
        new_key = read_kit_key(new_stem)
        public_key = new_key.public_key().public_bytes(
            Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        )
        proof = base64.b64encode(identity.sign(public_key, RENEWAL_PURPOSE))
        builder = x509.CertificateSigningRequestBuilder(identity.certificate.subject)
        builder = builder.add_attribute(AttributeOID.UNSTRUCTURED_NAME, proof)
        requests.append(builder.sign(new_key, SHA256()).public_bytes(Encoding.PEM))
    return b"".join(requests)


def install_renewal(kit: Path, answer: bytes) -> None:
    """Replace a kit's certificates and keys with the ones that it requested.

    The current ones stay until the entire answer has been checked. If the installation
    is interrupted, the next call finishes it.

    Args:
        kit: The kit's folder.
        answer: The authority's answer: certificates and the newest trust list.

    Raises:
        ConfigError: The kit has not requested anything.
        RefusedError: The answer does not belong to the kit's request, or its
            certificates are not valid.
    """
    parsed_answer = Trust.parse(answer)
    certificates = _match_certificates(kit, parsed_answer)
    is_newer = parsed_answer.number > Trust.read(kit / "startup").number
    if parsed_answer.revocations is not None and is_newer:
        trust_list = Trust(
            parsed_answer.roots, parsed_answer.bridges, parsed_answer.revocations
        )
        install_trust(kit, trust_list.encode())
    for stem, certificate in certificates.items():
        problem = Trust.read(stem.parent).find_problem(certificate)
        if problem is not None:
            raise RefusedError(f"its certificate {problem}")

    for stem, certificate in certificates.items():
        bridges = [
            bridge
            for bridge in parsed_answer.bridges
            if is_issued_by(certificate, bridge)
        ]
        new_key = _get_new_stem(kit, stem).with_suffix(".key").read_bytes()
        replace_file(stem.with_suffix(".key"), new_key)
        certificate_file = stem.with_suffix(".crt")
        replace_file(
            certificate_file,
            encode_pem((certificate, *bridges)),
            mode=certificate_file.stat().st_mode & 0o777,
        )
    shutil.rmtree(kit / RENEWAL_FOLDER)


def _match_certificates(kit: Path, answer: Trust) -> dict[Path, x509.Certificate]:
    """Return the new certificate for each stem of a kit.

    Args:
        kit: The kit's folder.
        answer: The authority's answer.

    Raises:
        ConfigError: The kit has not requested anything.
        RefusedError: A certificate for one of its new keys is missing.
    """
    certificates = {}
    for stem in find_stems(kit):
        new_stem = _get_new_stem(kit, stem)
        if not new_stem.with_suffix(".key").exists():
            raise ConfigError(
                f"{kit} has no pending request: create one with fednotes kit "
                f"renew {kit}"
            )
        new_key = read_kit_key(new_stem).public_key()
        certificate = next(
            (leaf for leaf in answer.leaves if leaf.public_key() == new_key), None
        )
        current_subject = read_certificate(stem).subject
        if certificate is None or certificate.subject != current_subject:
            raise RefusedError("contains no certificate for the request of this kit")
        certificates[stem] = certificate
    return certificates


def create_key_pem() -> bytes:
    """Return a new private key of a kit, as a PEM file."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _get_new_stem(kit: Path, stem: Path) -> Path:
    """Return the path at which a new key waits for its certificate, without an ending.

    Args:
        kit: The kit's folder.
        stem: The path of the current key, without its ending.
    """
    return kit / RENEWAL_FOLDER / stem.relative_to(kit)
