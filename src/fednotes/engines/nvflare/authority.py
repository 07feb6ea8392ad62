"""A project's authority: the key that signs kits, and says which count no more.

    OUT/authority/PROJECT/state/cert.json    its root and key, and the numbers of what it signed
    OUT/trust.pem                            what it says (`trust.py`), for servers and sites

The key may lie there under a passphrase; it is asked for where something is to be signed.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError, RefusedError
from fednotes.core.parsing import read_json
from fednotes.core.store import write_json, write_text
from fednotes.engines.nvflare.certificates import (
    MOST_BYTES,
    RENEWAL,
    TOLERANCE,
    TRUST,
    Trust,
    certificate_of,
    issued,
    names_of,
    signer,
    to_pem,
)
from fednotes.engines.nvflare.kit import WATCH

STATE = "cert.json"
DAYS, ROOT_DAYS, OVERLAP_DAYS = 360, 3650, 90  # of a kit, a root, and of two roots
Secret = Callable[[str], bytes]  # what it is for → the passphrase


def no_secret(what: str) -> bytes:
    """For a key without a passphrase."""
    raise ConfigError(f"{what} is needed, and nobody can be asked for it")


@dataclass
class Authority:
    """What signs. secret: asked for the key's passphrase, once, where it has one.

    former: roots that this one replaced. serials: kit → those of its certificates.
    """

    folder: Path
    project: str
    secret: Secret
    root: Any = None
    stored: str = field(default="", repr=False)  # the key, as it lies on disk
    former: tuple[Any, ...] = ()
    said: Trust = field(default_factory=lambda: Trust(()))
    serials: dict[str, list[str]] = field(default_factory=dict)
    _key: Any = field(default=None, repr=False)

    @classmethod
    def of(cls, folder: Path, project: str, secret: Secret, *, make: bool = True) -> Authority:
        """That of a folder, or a new one.

        Raises ConfigError if the folder's cannot be read, or there is none and `make` is false.
        """
        from cryptography import x509

        own = cls(folder, project, secret)
        if not own._path.exists():
            if not make:
                raise ConfigError(f"{folder}: holds no authority of project {project!r}")
            own._begin()
            return own
        try:
            kept = read_json(own._path)
            own.root = x509.load_pem_x509_certificate(kept["root_cert"].encode())
            own.stored = str(kept["root_pri_key"])
            own.serials = {str(k): list(v) for k, v in kept.get("serials", {}).items()}
            former = kept.get("former", "").encode()
            own.former = tuple(x509.load_pem_x509_certificates(former)) if former else ()
            own.said = Trust.parsed(kept["trust"].encode()) if "trust" in kept else Trust(())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RefusedError) as error:
            raise ConfigError(f"{own._path}: no authority can be read from it") from error
        if own.said.listed is None:  # as earlier versions kept it
            own._say(())
        return own

    @property
    def _path(self) -> Path:
        return self.folder / self.project / "state" / STATE

    @property
    def roots(self) -> tuple[Any, ...]:
        """Those that kits trust now, the one that is being replaced first, as NVFlare needs it."""
        have = Trust((*self.former, self.root), self.said.bridges)
        return tuple(r for r in have.roots if datetime.now(UTC) < have.end(r))

    @property
    def key(self) -> Any:
        """Raises ConfigError if the passphrase is not the key's."""
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        if self._key is None:
            given = None
            if "ENCRYPTED" in self.stored:
                given = self.secret("the passphrase of the authority's key")
            try:
                self._key = load_pem_private_key(self.stored.encode(), given)
            except (ValueError, TypeError) as error:
                said = f"{self._path}: the key cannot be read"
                raise ConfigError(f"{said}; is the passphrase right?" if given else said) from error
        return self._key

    def keep(self) -> None:
        """Write what changed, and what the authority says where it can be handed on."""
        kept = {"root_cert": to_pem([self.root]).decode(), "root_pri_key": self.stored}
        kept |= {"former": to_pem(self.former).decode(), "trust": self.said.pem().decode()}
        write_json(self._path, {**kept, "serials": self.serials})
        write_text(self.folder.parent / TRUST, self.said.pem().decode())

    def protect(self) -> None:
        """Put a passphrase on the key, or another one."""
        from cryptography.hazmat.primitives.serialization import BestAvailableEncryption

        key = self.key
        new = self.secret("a new passphrase for the authority's key")
        if not new:
            raise ConfigError("an empty passphrase protects nothing; nothing was changed")
        self.stored = _pem_of(key, BestAvailableEncryption(new))

    # ---- what it signs ---------------------------------------------------------------------------

    def issue(self, kit: str, subject: Any, public_key: Any, names: Any) -> bytes:
        """A certificate for a kit, as PEM, with the bridge to it where one leads there.

        names: the SubjectAlternativeName. It begins some minutes ago: clocks differ.
        """
        from cryptography import x509

        end = min(datetime.now(UTC) + timedelta(DAYS), self.root.not_valid_after_utc)
        builder = self._builder(subject, public_key, end).add_extension(names, critical=False)
        identifier = x509.SubjectKeyIdentifier.from_public_key(public_key)
        certificate = _signed(builder.add_extension(identifier, critical=False), self.key)
        self.serials.setdefault(kit, []).append(f"{certificate.serial_number:x}")
        bridges = [bridge for bridge in self.said.bridges if issued(certificate, bridge)]
        return to_pem((certificate, *bridges))

    def reissue(self, kit: str, certificate: Any) -> bytes:
        """A certificate that another authority made, signed by this one."""
        return self.issue(kit, certificate.subject, certificate.public_key(), _names(certificate))

    def revoke(self, kits: Mapping[str, Path]) -> None:
        """Say that these kits count no more. kits: name → its folder, if that is still at hand.

        Raises ConfigError where a kit's certificate is not known.
        """
        serials: list[int] = []
        for kit, folder in kits.items():
            known = {int(text, 16) for text in self.serials.get(kit, ())}
            # not all below: a job's folder has the certificate of the admin who handed it in
            at_hand = (*folder.glob("startup/*.crt"), *folder.glob(f"{WATCH}/startup/*.crt"))
            known |= {certificate_of(path.with_suffix("")).serial_number for path in at_hand}
            if not known:
                raise ConfigError(
                    f"{kit}: its certificate is not on record, for an earlier version made it; "
                    "replace the root instead (--new-root), and renew the other kits"
                )
            serials += sorted(known)
        self._say(serials)

    def replace(self, overlap: int) -> None:
        """Make a new root and key; kits of the old one count for `overlap` days more.

        Raises ConfigError while an earlier replacement is under way.
        """
        from cryptography.hazmat.primitives.serialization import NoEncryption

        if len(self.roots) > 1:
            end = Trust(self.former, self.said.bridges).end(self.former[-1])
            raise ConfigError(
                f"{self.folder}: its root is being replaced until {end:%Y-%m-%d}; wait until then"
            )
        old, old_key, protected = self.root, self.key, "ENCRYPTED" in self.stored
        end = min(datetime.now(UTC) + timedelta(overlap), old.not_valid_after_utc)
        self._begin(keep=False)
        bridge = self._builder(old.subject, self._key.public_key(), end)
        for extension in self.root.extensions:  # as those of a root, but for who signs
            if extension.oid.dotted_string != "2.5.29.35":
                bridge = bridge.add_extension(extension.value, extension.critical)
        self.former, self.said = (old,), Trust((), (), self.said.listed)
        self._say((), (_signed(bridge, old_key),))
        self.stored = _pem_of(self._key, NoEncryption())
        if protected:
            self.protect()

    def renew(self, request: bytes, kit_of: Callable[[str], str]) -> bytes:
        """Sign the requests of a kit that shows that it is the holder's (`renewal.request`).

        kit_of: name in a certificate → kit. Raises RefusedError, and signs nothing, where a
        request is not signed by a key whose certificate counts now.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
        from cryptography.x509.oid import AttributeOID

        if len(request) > MOST_BYTES:
            raise RefusedError("too long for the request of a kit")
        trust, signed = Trust(self.roots, self.said.bridges, self.said.listed), []
        form = b"-----BEGIN CERTIFICATE REQUEST-----.*?-----END CERTIFICATE REQUEST-----"
        for block in re.findall(form, request, re.DOTALL):
            try:
                asked = x509.load_pem_x509_csr(block)
                public = asked.public_key()
                value = asked.attributes.get_attribute_for_oid(AttributeOID.UNSTRUCTURED_NAME).value
                text = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
                shown = signer(trust, text, base64.b64decode(value, validate=True), RENEWAL)
            except (ValueError, TypeError, x509.AttributeNotFound) as error:
                raise RefusedError("no request of a kit can be read") from error
            if shown is None or shown.subject != asked.subject or not asked.is_signature_valid:
                raise RefusedError("the request is not signed by a kit that counts now")
            signed.append((shown, public))
        if not signed:
            raise RefusedError("no request of a kit can be read")
        parts = []
        for shown, public in signed:
            kit = kit_of(names_of(shown)[0])
            parts.append(self.issue(kit, shown.subject, public, _names(shown)))
        return b"".join(parts) + self.said.pem()

    # ---- its own ---------------------------------------------------------------------------------

    def _begin(self, keep: bool = True) -> None:
        """A key, and a root of it."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import rsa
        from cryptography.hazmat.primitives.serialization import NoEncryption

        self._key = rsa.generate_private_key(public_exponent=65537, key_size=3072)
        self.stored = _pem_of(self._key, NoEncryption())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, self.project)])
        public = self._key.public_key()
        may = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement"), False
        ) | {"encipher_only": False, "decipher_only": False}
        usage = x509.KeyUsage(digital_signature=True, key_cert_sign=True, crl_sign=True, **may)
        end = datetime.now(UTC) + timedelta(ROOT_DAYS)
        builder = self._builder(name, public, end, issuer=name)
        builder = builder.add_extension(x509.BasicConstraints(True, None), critical=True)
        builder = builder.add_extension(usage, critical=True)
        identifier = x509.SubjectKeyIdentifier.from_public_key(public)
        self.root = _signed(builder.add_extension(identifier, critical=False), self._key)
        if keep:
            self._say(())

    def _builder(self, subject: Any, public_key: Any, end: datetime, issuer: Any = None) -> Any:
        from cryptography import x509

        return (
            x509.CertificateBuilder(issuer or self.root.subject, subject, public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(datetime.now(UTC) - TOLERANCE)
            .not_valid_after(end)
        )

    def _say(self, serials: Iterable[int], bridges: tuple[Any, ...] | None = None) -> None:
        """Make a new list, of what was revoked before and could still be in use, and these."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes

        now = datetime.now(UTC)
        builder = x509.CertificateRevocationListBuilder(self.root.subject)
        builder = builder.last_update(now - TOLERANCE).next_update(self.root.not_valid_after_utc)
        builder = builder.add_extension(x509.CRLNumber(self.said.number + 1), critical=False)
        before = {e.serial_number: e.revocation_date_utc for e in self.said.listed or ()}
        dates = dict.fromkeys(serials, now) | before
        for serial, when in dates.items():
            if now - when < timedelta(DAYS + 1):  # later its certificate is over anyhow
                entry = x509.RevokedCertificateBuilder(serial, when)
                builder = builder.add_revoked_certificate(entry.build())
        listed = builder.sign(self.key, hashes.SHA256())
        if bridges is None:
            bridges = tuple(b for b in self.said.bridges if now < b.not_valid_after_utc)
        said = Trust((self.root,), bridges, listed)
        if len(said.pem()) > MOST_BYTES:
            raise ConfigError("more kits are revoked than a list holds; replace the root instead")
        self.said = said


def _names(certificate: Any) -> Any:
    from cryptography.x509 import SubjectAlternativeName

    return certificate.extensions.get_extension_for_class(SubjectAlternativeName).value


def _signed(builder: Any, key: Any) -> Any:
    """key: the issuer's."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes

    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    return builder.add_extension(identifier, critical=False).sign(key, hashes.SHA256())


def _pem_of(key: Any, encryption: Any) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat

    form = PrivateFormat.PKCS8
    text: bytes = key.private_bytes(Encoding.PEM, form, encryption)
    return text.decode()
