"""What a kit trusts: the project's roots, less the certificates that count no more.

    KIT/startup/rootCA.pem    the roots: one, or two while one takes the other's place
    KIT/startup/trust.pem     what the authority said last: its root, the bridge from the root
                              before it (the new root's key, signed by the old one, until the old
                              one's end), and the list of revoked certificates

What the authority says is signed by its root and has a rising number, so anybody may bring it: the
server and the sites give each other what the other lacks, and a file does it for who is offline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError, MissingExtra, RefusedError
from fednotes.core.store import write_text

ROOTS, TRUST = "rootCA.pem", "trust.pem"
REMEDY = "ask for a new kit"
TOLERANCE = timedelta(minutes=5)  # that two machines' clocks may differ by
MOST_BYTES = 48_000  # of what an authority says: some 800 revoked certificates; a header holds it


@dataclass(frozen=True, slots=True)
class Trust:
    """Roots, bridges and leaves are certificates; listed is the revocation list, None if none."""

    roots: tuple[Any, ...]
    bridges: tuple[Any, ...] = ()
    listed: Any = None
    leaves: tuple[Any, ...] = ()

    @property
    def number(self) -> int:
        """That of the list; 0 without one."""
        from cryptography.x509 import CRLNumber

        if self.listed is None:
            return 0
        return int(self.listed.extensions.get_extension_for_class(CRLNumber).value.crl_number)

    def pem(self) -> bytes:
        """The file of what an authority says: roots, bridges and the list."""
        listed = [] if self.listed is None else [self.listed]
        return to_pem((*self.roots, *self.bridges, *listed))

    def end(self, root: Any) -> datetime:
        """When a root counts no more: at its own end, or once another has taken its place."""
        bridges = (b.not_valid_after_utc for b in self.bridges if issued(b, root))
        return min((root.not_valid_after_utc, *bridges))

    def until(self, certificate: Any) -> datetime:
        """When a certificate of one of the roots counts no more, as far as it is known."""
        ends = (self.end(root) for root in self.roots if issued(certificate, root))
        return min((certificate.not_valid_after_utc, *ends))

    def ended(self, certificate: Any) -> str:
        """Why a certificate that TLS took counts no more; empty if it does."""
        if self.listed is not None:
            found = self.listed.get_revoked_certificate_by_serial_number(certificate.serial_number)
            if found is not None:
                return f"was revoked on {found.revocation_date_utc:%Y-%m-%d}"
        for root in self.roots:
            if issued(certificate, root) and datetime.now(UTC) - TOLERANCE > self.end(root):
                return f"is of a root that was replaced, until {self.end(root):%Y-%m-%d}"
        return ""

    def problem(self, certificate: Any, between: Iterable[Any] = ()) -> str:
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
        return _of(startup, tuple(_stamp(startup / name) for name in (ROOTS, TRUST)))

    @staticmethod
    def parsed(data: bytes) -> Trust:
        """What a PEM file of certificates and at most one list holds, whoever wrote it.

        Raises RefusedError if it holds anything else, or is too long.
        """
        from cryptography import x509

        if len(data) > MOST_BYTES:
            raise RefusedError(f"{len(data):,} bytes are more than an authority says")
        try:
            certificates = x509.load_pem_x509_certificates(data)
            listed = x509.load_pem_x509_crl(data) if b"-----BEGIN X509 CRL" in data else None
            said = Trust(
                tuple(c for c in certificates if _is_authority(c) and issued(c, c)),
                tuple(c for c in certificates if _is_authority(c) and not issued(c, c)),
                listed,
                tuple(c for c in certificates if not _is_authority(c)),
            )
            said.number  # noqa: B018 - a list without one is none
        except (ValueError, TypeError, x509.ExtensionNotFound) as error:
            raise RefusedError("no certificates of an authority, or cut short") from error
        return said


@lru_cache(maxsize=1024)  # the server asks with each message
def issued(certificate: Any, root: Any) -> bool:
    """Whether a root's key signed a certificate in the root's name."""
    try:
        certificate.verify_directly_issued_by(root)
    except Exception:  # of another issuer, a wrong signature, or another kind of key
        return False
    return True


def _is_authority(certificate: Any) -> bool:
    """Whether its holder may sign others' certificates, by its own words."""
    from cryptography import x509

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
def _of(startup: Path, stamps: object) -> Trust:
    """stamps: of the files; others are read anew."""
    try:
        from cryptography.x509 import load_pem_x509_certificates
    except ImportError as error:
        raise MissingExtra("cryptography", "deploy") from error
    roots, path = read(startup / ROOTS, load_pem_x509_certificates), startup / TRUST
    said = read(path, Trust.parsed) if path.exists() else Trust(())
    return Trust(tuple(roots), said.bridges, said.listed)


def read(path: Path, load: Callable[[bytes], Any]) -> Any:
    """What `load` makes of a file of a kit. Raises ConfigError if it is missing or no such file."""
    try:
        return load(path.read_bytes())
    except OSError as error:
        said = f"{path}: the kit's certificate is not complete ({error.strerror})"
        raise ConfigError(f"{said}: {REMEDY}") from error
    except (ValueError, TypeError, RefusedError) as error:  # their messages may quote the key
        said = f"{path}: no certificate or key of a kit can be read from it"
        raise ConfigError(f"{said}: {REMEDY}") from error


def to_pem(parts: Iterable[Any]) -> bytes:
    """Certificates and lists as a PEM file has them, one after the other."""
    from cryptography.hazmat.primitives.serialization import Encoding

    return b"".join(part.public_bytes(Encoding.PEM) for part in parts)


def bytes_of(path: Path) -> bytes:
    """A file that an authority or a kit wrote, no longer than such a file is.

    Raises ConfigError if it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error


def take(kit: Path, data: bytes) -> bool:
    """Take in what the project's authority says, whoever brings it; whether it was news.

    Raises RefusedError, and changes nothing, if it is not signed by a root that this kit trusts,
    is not newer than what the kit has, or was cut short.
    """
    said, have = Trust.parsed(data), Trust.of(kit / "startup")
    if said.listed is None or len(said.roots) != 1 or said.leaves:
        raise RefusedError("not what an authority says: one root and a list of revoked kits")
    (root,) = said.roots
    if root not in have.roots:
        bridges = [b for b in said.bridges if b.public_key() == root.public_key()]
        if all(have.problem(bridge) for bridge in bridges):
            raise RefusedError("not signed by the authority of this kit's project")
    elif any(issued(bridge, root) for bridge in have.bridges):
        raise RefusedError("signed by a root that another has replaced")
    if not said.listed.is_signature_valid(root.public_key()):
        raise RefusedError("not signed by the authority of this kit's project")
    if said.number <= have.number:
        if said.number == have.number and said.listed == have.listed:
            return False
        raise RefusedError(f"number {said.number} is not newer than {have.number}, this kit's own")
    roots = have.roots if root in have.roots else (*have.roots, root)
    for startup in _startups(kit):  # in this order it can be done again
        write_text(startup / ROOTS, Trust(roots).pem().decode())
        write_text(startup / TRUST, said.pem().decode())
    return True


def settle(kit: Path) -> None:
    """Leave roots out that count no more, before a process reads them; one always stays."""
    for startup in _startups(kit):
        have = Trust.of(startup)
        roots = tuple(root for root in have.roots if not _is_over(have, root))
        if roots and roots != have.roots:
            write_text(startup / ROOTS, Trust(roots).pem().decode())


def _is_over(trust: Trust, root: Any) -> bool:
    return datetime.now(UTC) - TOLERANCE > trust.end(root)


def _startups(kit: Path) -> list[Path]:
    """The folders of a kit that hold its certificates: at a server, its watch's too."""
    return [path for path in (kit / "startup", kit / "watch" / "startup") if path.is_dir()]
