"""A kit's certificate is renewed where the kit lies: a request goes out, no private key.

    KIT/renewal/…    new keys, until their certificates have come

The request is signed twice: by the new key, as every such request is, and by the kit's present one,
which shows the authority that it comes from the kit's holder.
"""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError, RefusedError
from fednotes.core.store import replace_file
from fednotes.engines.certificates import certificate_of, key_of, stems
from fednotes.engines.identity import RENEWAL, CertificateIdentity
from fednotes.engines.trust import Trust, issued, take, to_pem

PENDING = "renewal"


def request(kit: Path) -> bytes:
    """Make new keys, which stay here, and the requests for their certificates, as PEM.

    Asked again before the certificates have come, it is of the same keys. Raises ConfigError if
    the kit's present certificates or keys cannot be read.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import rsa
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
    )
    from cryptography.x509.oid import AttributeOID

    found = []
    for stem in stems(kit):
        present = CertificateIdentity.of_kit(kit, str(stem.relative_to(kit)))
        pending = _pending(kit, stem)
        if not pending.with_suffix(".key").exists():
            key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
            text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            pending.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(pending.with_suffix(".key"), text, mode=0o600)
        key = key_of(pending)
        public = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        proof = base64.b64encode(present.sign(public, RENEWAL))
        asked = x509.CertificateSigningRequestBuilder(present.certificate.subject)
        asked = asked.add_attribute(AttributeOID.UNSTRUCTURED_NAME, proof)
        found.append(asked.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    return b"".join(found)


def take_renewal(kit: Path, answer: bytes) -> None:
    """Put the certificates that were asked for, and their keys, into the place of the present ones.

    Those stay until all of the answer is found to be right. If it is cut off, the next call ends
    it. Raises ConfigError if no request is under way, RefusedError if the answer is not to it.
    """
    said, new = Trust.parsed(answer), dict[Path, Any]()
    for stem in stems(kit):
        pending = _pending(kit, stem)
        if not pending.with_suffix(".key").exists():
            raise ConfigError(f"{kit}: no request is under way: fednotes kit renew {kit} makes one")
        public = key_of(pending).public_key()
        match = [leaf for leaf in said.leaves if leaf.public_key() == public]
        if not match or match[0].subject != certificate_of(stem).subject:
            raise RefusedError("no certificate for the request of this kit")
        new[stem] = match[0]
    if said.listed is not None and said.number > Trust.of(kit / "startup").number:
        take(kit, Trust(said.roots, said.bridges, said.listed).pem())
    for stem, leaf in new.items():
        if problem := Trust.of(stem.parent).problem(leaf):
            raise RefusedError(f"its certificate {problem}")
    for stem, leaf in new.items():
        text = to_pem((leaf, *(bridge for bridge in said.bridges if issued(leaf, bridge))))
        key = _pending(kit, stem).with_suffix(".key").read_bytes()
        path = stem.with_suffix(".crt")
        replace_file(stem.with_suffix(".key"), key, mode=0o600)
        replace_file(path, text, mode=path.stat().st_mode & 0o777)
    shutil.rmtree(kit / PENDING)


def _pending(kit: Path, stem: Path) -> Path:
    return kit / PENDING / stem.relative_to(kit)
