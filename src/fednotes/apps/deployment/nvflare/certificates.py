"""A kit's certificates: what it trusts, whether its own can work, signatures, and
renewal.

    KIT/startup/rootCA.pem    the roots: one, or two while one takes the other's place
    KIT/startup/trust.pem     what the authority said last: its root, the bridge from the root
                              before it (the new root's key, signed by the old one, until the old
                              one's end), and the list of revoked certificates
    KIT/renewal/…             new keys, until their certificates have come

What the authority says is signed by its root and has a rising number, so anybody may
bring it: the server and the sites give each other what the other lacks, and a file does
it for who is offline.
"""

from __future__ import annotations

import base64
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from fednotes.apps.deployment.nvflare.kit import SERVER, WATCH, read_kit
from fednotes.core.errors import ConfigError, RefusedError, needs, readable
from fednotes.core.store import replace_file, write_text
from fednotes.privacy.secure_sum.crypto import joined

with needs("cryptography", "deploy"):
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric import padding, rsa
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        PublicFormat,
        load_pem_private_key,
    )
    from cryptography.x509.oid import AttributeOID, NameOID

T = TypeVar("T")
logger = logging.getLogger("fednotes.certificates")
ROOTS, TRUST, PENDING = "rootCA.pem", "trust.pem", "renewal"
REMEDY = "ask for a new kit"
SOON = timedelta(days=60)
TOLERANCE = timedelta(minutes=5)  # that two machines' clocks may differ by
# of what an authority says: some 800 revoked certificates; a header holds it
MOST_BYTES = 48_000
# TLS and NVFlare sign with this key too, never such a text
KEYS = "fednotes keys of a site"
RENEWAL = "fednotes request for a new certificate"
_LENGTH = 4  # bytes that say how long the certificate in a signature is
_PSS = padding.PSS(mgf=padding.MGF1(SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)


# ---- what a kit trusts ---------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trust:
    """Roots, bridges and leaves are certificates; listed is the revocation list, None
    if none."""

    roots: tuple[x509.Certificate, ...]
    bridges: tuple[x509.Certificate, ...] = ()
    listed: x509.CertificateRevocationList | None = None
    leaves: tuple[x509.Certificate, ...] = ()

    @property
    def number(self) -> int:
        """That of the list; 0 without one."""
        if self.listed is None:
            return 0
        return int(
            self.listed.extensions.get_extension_for_class(
                x509.CRLNumber
            ).value.crl_number
        )

    def pem(self) -> bytes:
        """The file of what an authority says: roots, bridges and the list."""
        listed = () if self.listed is None else (self.listed,)
        return to_pem((*self.roots, *self.bridges, *listed))

    def end(self, root: x509.Certificate) -> datetime:
        """When a root counts no more: at its own end, or once another has taken its
        place."""
        bridges = (b.not_valid_after_utc for b in self.bridges if issued(b, root))
        return min((root.not_valid_after_utc, *bridges))

    def over(self, root: x509.Certificate) -> bool:
        """Whether a root counts no more, on a clock that may be late."""
        return datetime.now(UTC) - TOLERANCE > self.end(root)

    def until(self, certificate: x509.Certificate) -> datetime:
        """When a certificate of one of the roots counts no more, as far as it is known."""
        ends = (self.end(root) for root in self.roots if issued(certificate, root))
        return min((certificate.not_valid_after_utc, *ends))

    def ended(self, certificate: x509.Certificate) -> str:
        """Why a certificate that TLS took counts no more; empty if it does."""
        if self.listed is not None:
            number = certificate.serial_number
            found = self.listed.get_revoked_certificate_by_serial_number(number)
            if found is not None:
                return f"was revoked on {found.revocation_date_utc:%Y-%m-%d}"
        for root in self.roots:
            if issued(certificate, root) and self.over(root):
                return (
                    f"is of a root that was replaced, until {self.end(root):%Y-%m-%d}"
                )
        return ""

    def problem(
        self, certificate: x509.Certificate, between: Iterable[x509.Certificate] = ()
    ) -> str:
        """Why a certificate does not count, as the end of a sentence; empty if it does.

        between: what its owner shows with it, of which bridges from our roots help.
        """
        now = datetime.now(UTC)
        begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        bridges = [b for b in between if _is_authority(b) and not self.problem(b)]
        if not any(issued(certificate, root) for root in (*self.roots, *bridges)):
            return f"is not signed by {ROOTS}"
        if now + TOLERANCE < begin:
            said = f"is valid from {begin:%Y-%m-%d %H:%M} UTC on only"
            return f"{said}: is this machine's clock right?"
        if now - TOLERANCE > end:
            return f"expired on {end:%Y-%m-%d}"
        return self.ended(certificate)

    @staticmethod
    def of(startup: Path) -> Trust:
        """That of a kit, by its folder `startup` (or `watch/startup`).

        Raises ConfigError where a file cannot be read.
        """
        return _trust_of(
            startup, tuple(_stamp(startup / name) for name in (ROOTS, TRUST))
        )

    @staticmethod
    def parsed(data: bytes) -> Trust:
        """What a PEM file of certificates and at most one list holds, whoever wrote it.

        Raises RefusedError if it holds anything else, or is too long.
        """
        if len(data) > MOST_BYTES:
            raise RefusedError(f"{len(data):,} bytes are more than an authority says")
        try:
            certificates = x509.load_pem_x509_certificates(data)
            listed = (
                x509.load_pem_x509_crl(data) if b"-----BEGIN X509 CRL" in data else None
            )
            said = Trust(
                tuple(c for c in certificates if _is_authority(c) and issued(c, c)),
                tuple(c for c in certificates if _is_authority(c) and not issued(c, c)),
                listed,
                tuple(c for c in certificates if not _is_authority(c)),
            )
            said.number  # noqa: B018 - a list without one is none
        except (ValueError, TypeError, x509.ExtensionNotFound) as error:
            raise RefusedError(
                "no certificates of an authority, or cut short"
            ) from error
        return said


@lru_cache(maxsize=1024)  # the server asks with each message
def issued(certificate: x509.Certificate, root: x509.Certificate) -> bool:
    """Whether a root's key signed a certificate in the root's name."""
    try:
        certificate.verify_directly_issued_by(root)
    except Exception:  # of another issuer, a wrong signature, or another kind of key
        return False
    return True


def _is_authority(certificate: x509.Certificate) -> bool:
    """Whether its holder may sign others' certificates, by its own words."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
    except x509.ExtensionNotFound:
        return False
    return bool(found.value.ca)


def _stamp(path: Path) -> tuple[int, int]:
    try:
        found = path.stat()
    except OSError:
        return 0, 0
    return found.st_ino, found.st_mtime_ns


@lru_cache(maxsize=32)
def _trust_of(startup: Path, stamps: object) -> Trust:
    """stamps: of the files; others are read anew."""
    roots, path = (
        _read(startup / ROOTS, x509.load_pem_x509_certificates),
        startup / TRUST,
    )
    said = _read(path, Trust.parsed) if path.exists() else Trust(())
    return Trust(tuple(roots), said.bridges, said.listed)


def _read(path: Path, load: Callable[[bytes], T]) -> T:
    """What `load` makes of a file of a kit.

    Raises ConfigError if it is missing or no such file.
    """
    try:
        return load(path.read_bytes())
    except OSError as error:
        said = f"{path}: the kit's certificate is not complete ({error.strerror})"
        raise ConfigError(f"{said}: {REMEDY}") from error
    except (ValueError, TypeError, RefusedError) as error:
        # their messages may quote the key
        said = f"{path}: no certificate or key of a kit can be read from it"
        raise ConfigError(f"{said}: {REMEDY}") from error


def to_pem(parts: Iterable[x509.Certificate | x509.CertificateRevocationList]) -> bytes:
    """Certificates and lists as a PEM file has them, one after the other."""
    return b"".join(part.public_bytes(Encoding.PEM) for part in parts)


def bytes_of(path: Path) -> bytes:
    """A file that an authority or a kit wrote, no longer than such a file is.

    Raises ConfigError if it cannot be read.
    """
    with readable(path, ConfigError), path.open("rb") as file:
        return file.read(MOST_BYTES + 1)


def take(kit: Path, data: bytes) -> bool:
    """Take in what the project's authority says, whoever brings it; whether it was
    news.

    Raises RefusedError, and changes nothing, if it is not signed by a root that this
    kit trusts, is not newer than what the kit has, or was cut short.
    """
    said, have = Trust.parsed(data), Trust.of(kit / "startup")
    if said.listed is None or len(said.roots) != 1 or said.leaves:
        raise RefusedError(
            "not what an authority says: one root and a list of revoked kits"
        )
    (root,) = said.roots
    if root not in have.roots:
        bridges = [b for b in said.bridges if b.public_key() == root.public_key()]
        if all(have.problem(bridge) for bridge in bridges):
            raise RefusedError("not signed by the authority of this kit's project")
    elif any(issued(bridge, root) for bridge in have.bridges):
        raise RefusedError("signed by a root that another has replaced")
    key: Any = root.public_key()
    if not said.listed.is_signature_valid(key):
        raise RefusedError("not signed by the authority of this kit's project")
    if said.number <= have.number:
        if said.number == have.number and said.listed == have.listed:
            return False
        raise RefusedError(
            f"number {said.number} is not newer than {have.number}, this kit's own"
        )
    roots = have.roots if root in have.roots else (*have.roots, root)
    for startup in _startups(kit):  # in this order it can be done again
        write_text(startup / ROOTS, Trust(roots).pem().decode())
        write_text(startup / TRUST, said.pem().decode())
    return True


def settle(kit: Path) -> None:
    """Leave roots out that count no more, before a process reads them; one always
    stays."""
    for startup in _startups(kit):
        have = Trust.of(startup)
        roots = tuple(root for root in have.roots if not have.over(root))
        if roots and roots != have.roots:
            write_text(startup / ROOTS, Trust(roots).pem().decode())


def _startups(kit: Path) -> list[Path]:
    """The folders of a kit that hold its certificates: at a server, its watch's too."""
    return [
        path for path in (kit / "startup", kit / WATCH / "startup") if path.is_dir()
    ]


# ---- whether a kit's own can work; NVFlare finds out in a thread whose error nobody se


def check_kit(kit: Path) -> list[str]:
    """Warnings: the certificates of a kit that end within 60 days.

    Raises what `valid_until` raises.
    """
    soon = datetime.now(UTC) + SOON
    new_root, renew = (
        "ask the project's coordinator for a new root",
        f"fednotes kit renew {kit}",
    )
    return [
        f"{path}: the certificate expires on {end:%Y-%m-%d}: "
        + (new_root if path.name == ROOTS else renew)
        for path, end in valid_until(kit).items()
        if end < soon
    ]


def shown_problem(kit: Path, shown: bytes) -> str:
    """Why a certificate (DER) that another showed by TLS counts no more; empty if it
    does."""
    return Trust.of(kit / "startup").ended(x509.load_der_x509_certificate(shown))


def stems(kit: Path) -> dict[Path, str]:
    """A kit's certificates, by their paths without a suffix, and whose each must be."""
    facts = read_kit(kit)
    if facts.role != SERVER:
        return {kit / "startup" / "client": facts.person or facts.name}
    return {
        kit / "startup" / "server": facts.server,
        kit / WATCH / "startup" / "client": facts.person,
    }


def valid_until(kit: Path) -> dict[Path, datetime]:
    """When the certificates of a kit end: its own, at a server its watch's, and its
    authority's.

    Raises ConfigError if one is missing, not yet or no longer valid, revoked, not
    signed by the kit's authority (`rootCA.pem`), of another name than the kit's, or not
    of the key beside it.
    """
    return {
        path: end
        for stem, name in stems(kit).items()
        for path, end in _ends(stem, name)
    }


def _ends(stem: Path, name: str) -> Iterator[tuple[Path, datetime]]:
    """Of the certificate and the key `stem`.crt and `stem`.key, which speak for `name`."""
    trust = Trust.of(stem.parent)
    path, own = stem.with_suffix(".crt"), certificate_of(stem)
    _require_none(path, trust.problem(own))
    names = names_of(own)
    if names != [name]:
        said = f"{path}: the certificate is of {', '.join(names) or 'nobody'}"
        raise ConfigError(f"{said}, the kit of {name}: {REMEDY}")
    if key_of(stem).public_key() != own.public_key():
        raise ConfigError(
            f"{path}: the certificate is of another key than the kit's: {REMEDY}"
        )
    yield path, trust.until(own)
    path, newest = stem.with_name(ROOTS), trust.roots[-1]
    _require_none(path, trust.problem(newest))
    yield path, trust.end(newest)


def _require_none(path: Path, problem: str) -> None:
    if problem:
        asked = "" if problem.endswith("?") else f": {REMEDY}"
        raise ConfigError(f"{path}: the certificate {problem}{asked}")


def names_of(certificate: x509.Certificate) -> list[str]:
    """The names that a certificate speaks for; one, in those of a project."""
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return [str(name.value) for name in found]


def certificate_of(stem: Path) -> x509.Certificate:
    """Raises ConfigError if it is missing or cannot be read."""
    return _read(stem.with_suffix(".crt"), x509.load_pem_x509_certificate)


def key_of(stem: Path) -> rsa.RSAPrivateKey:
    """Raises ConfigError if it is missing or cannot be read."""

    def load(text: bytes) -> rsa.RSAPrivateKey:
        key = load_pem_private_key(text, None)
        if not isinstance(key, rsa.RSAPrivateKey):
            raise TypeError("a kit's key is RSA")
        return key

    return _read(stem.with_suffix(".key"), load)


# ---- signatures by a kit's own key: what makes a site's keys of the secure sum its own


@dataclass(frozen=True, slots=True)
class CertificateIdentity:
    """A site's certificate and key, a `crypto.Identity`. startup: where is what it
    trusts.

    A signature carries the signer's certificate, for which the project's authority
    vouches: the server, which relays the keys, cannot put its own in their place, and
    sites need nothing of each other beforehand. A site is known by the name in its
    certificate, so provisioning gives no name twice. What is trusted is read anew each
    time: a kit that is revoked counts no more at once.
    """

    certificate: x509.Certificate = field(repr=False)
    key: rsa.RSAPrivateKey = field(repr=False)
    startup: Path

    @classmethod
    def of_kit(cls, kit: Path, stem: str = "startup/client") -> CertificateIdentity:
        """That of a kit. stem: of its files.

        Raises ConfigError if it cannot be read.
        """
        path = kit / stem
        return cls(certificate_of(path), key_of(path), path.parent)

    def sign(self, text: bytes, purpose: str = KEYS) -> bytes:
        """This site's certificate, and its signature (RSA-PSS, SHA-256)."""
        own = self.certificate.public_bytes(Encoding.DER)
        signature: bytes = self.key.sign(joined(purpose, text), _PSS, SHA256())
        return len(own).to_bytes(_LENGTH, "big") + own + signature

    def verify(self, site: str, text: bytes, signature: bytes) -> bool:
        """Whether the holder of a certificate of the project in the name `site` signed,
        and the certificate counts now.

        Raises ConfigError where what is trusted cannot be read.
        """
        trust = Trust.of(self.startup)
        shown = signer(trust, text, signature, KEYS)
        if shown is None and (reason := _reason(trust, signature)):
            logger.warning("the certificate shown for site %r %s", site, reason)
        return shown is not None and names_of(shown) == [site]


def _reason(trust: Trust, signature: bytes) -> str:
    """Return why the certificate in a signature does not count; empty if there is none,
    or it does.

    An end that a wrong clock only pretends is said as such.
    """
    end = _LENGTH + int.from_bytes(signature[:_LENGTH], "big")
    try:
        reason = trust.problem(x509.load_der_x509_certificate(signature[_LENGTH:end]))
    except (ValueError, TypeError):
        return ""
    return (
        f"{reason}: is this machine's clock right?" if "expired" in reason else reason
    )


def signer(
    trust: Trust, text: bytes, signature: bytes, purpose: str
) -> x509.Certificate | None:
    """The certificate of who signed for a purpose; None unless it counts and the
    signature is its key's."""
    end = _LENGTH + int.from_bytes(signature[:_LENGTH], "big")
    try:
        shown = x509.load_der_x509_certificate(signature[_LENGTH:end])
        key = shown.public_key()
        if trust.problem(shown) or not isinstance(key, rsa.RSAPublicKey):
            return None
        key.verify(signature[end:], joined(purpose, text), _PSS, SHA256())
    except (ValueError, TypeError, InvalidSignature):
        return None
    return shown


# ---- renewal: a request goes out, no private key -------------------------------------


def request(kit: Path) -> bytes:
    """Make new keys, which stay here, and the requests for their certificates, as PEM.

    Each is signed by the new key, and by the kit's present one, which shows the
    authority that it comes from the kit's holder. Asked again before the certificates
    have come, it is of the same keys. Raises ConfigError if the kit's present
    certificates or keys cannot be read.
    """
    found = []
    for stem in stems(kit):
        present = CertificateIdentity.of_kit(kit, str(stem.relative_to(kit)))
        pending = _pending(kit, stem)
        if not pending.with_suffix(".key").exists():
            pending.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_file(pending.with_suffix(".key"), new_key_pem())
        key = key_of(pending)
        public = key.public_key().public_bytes(
            Encoding.DER, PublicFormat.SubjectPublicKeyInfo
        )
        proof = base64.b64encode(present.sign(public, RENEWAL))
        asked = x509.CertificateSigningRequestBuilder(present.certificate.subject)
        asked = asked.add_attribute(AttributeOID.UNSTRUCTURED_NAME, proof)
        found.append(asked.sign(key, SHA256()).public_bytes(Encoding.PEM))
    return b"".join(found)


def new_key_pem() -> bytes:
    """A new key of a kit."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def take_renewal(kit: Path, answer: bytes) -> None:
    """Put the certificates that were asked for, and their keys, into the place of the
    present ones.

    Those stay until all of the answer is found to be right. If it is cut off, the next
    call ends it. Raises ConfigError if no request is under way, RefusedError if the
    answer is not to it.
    """
    said, new = Trust.parsed(answer), dict[Path, x509.Certificate]()
    for stem in stems(kit):
        pending = _pending(kit, stem)
        if not pending.with_suffix(".key").exists():
            raise ConfigError(
                f"{kit}: no request is under way: fednotes kit renew {kit} makes one"
            )
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
        text = to_pem(
            (leaf, *(bridge for bridge in said.bridges if issued(leaf, bridge)))
        )
        key = _pending(kit, stem).with_suffix(".key").read_bytes()
        path = stem.with_suffix(".crt")
        replace_file(stem.with_suffix(".key"), key)
        replace_file(path, text, mode=path.stat().st_mode & 0o777)
    shutil.rmtree(kit / PENDING)


def _pending(kit: Path, stem: Path) -> Path:
    return kit / PENDING / stem.relative_to(kit)
