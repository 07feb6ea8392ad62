"""The certificates that a kit trusts: its project's roots and newest trust list.

    KIT/startup/rootCA.pem    one root, or two while a new root replaces the old one
    KIT/startup/trust.pem     the newest trust list

A trust list holds the authority's root, the bridges to it, and a numbered list of the
revoked certificates. A bridge is a certificate for a new root's key, signed by the
previous root; it expires with the replaced root. With a bridge, a kit that knows only
the old root accepts certificates of the new one.

The root signs each trust list, and each list has a higher number than the one before.
It therefore does not matter who delivers a list. The server and the sites send each
other newer lists, and an offline participant installs a list from a file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from fednotes.apps.deployment.nvflare.kit import WATCH
from fednotes.core.errors import ConfigError, RefusedError, needs, raising_if_unreadable
from fednotes.core.parsing import open_regular, read_regular
from fednotes.core.store import locking_file, write_text

with needs("cryptography", "deploy"):
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

T = TypeVar("T")
ROOTS_FILE = "rootCA.pem"
TRUST_FILE = "trust.pem"
LOCK_FILE = ".trust.lock"  # in a kit; held while a list is installed
REMEDY = "ask for a new kit"
CLOCK_TOLERANCE = timedelta(minutes=5)  # maximum difference between clocks
# Maximum size of a trust list, enough for some 800 revoked certificates. A list must
# fit into the header of a message.
MAX_BYTES = 48_000


@dataclass(frozen=True, slots=True)
class CertificateProblem:
    """Why a certificate is not accepted; its text completes "the certificate …".

    Attributes:
        kind: Whether no trusted root signed it, it is not yet valid or has expired, or
            the authority withdrew it.
        text: The problem.
    """

    kind: Literal["unsigned", "early", "expired", "withdrawn"]
    text: str

    def __str__(self) -> str:
        if self.kind == "early":
            return f"{self.text}: check that this machine's clock is right"
        return self.text


@dataclass(frozen=True, slots=True)
class Trust:
    """Certificates and a revocation list that a kit trusts or a file contains.

    Attributes:
        roots: The roots, the newest last.
        bridges: Certificates of newer roots' keys, signed by older roots.
        revocations: The list of revoked certificates; None if there is none.
        leaves: The certificates of participants.
    """

    roots: tuple[x509.Certificate, ...]
    bridges: tuple[x509.Certificate, ...] = ()
    revocations: x509.CertificateRevocationList | None = None
    leaves: tuple[x509.Certificate, ...] = ()

    @property
    def number(self) -> int:
        """The number of the revocation list; 0 without one."""
        return 0 if self.revocations is None else _read_number(self.revocations)

    @staticmethod
    def read(startup: Path) -> Trust:
        """Return what a kit trusts.

        Args:
            startup: The kit's folder `startup`, or `watch/startup`.

        Raises:
            ConfigError: A file is missing or cannot be read.
        """
        stamps = (_read_stamp(startup / ROOTS_FILE), _read_stamp(startup / TRUST_FILE))
        return _read_trust(startup, stamps)

    @staticmethod
    def parse(data: bytes) -> Trust:
        """Return the certificates and the revocation list in a PEM file.

        Nothing is verified, because anybody may have written the file.

        Raises:
            RefusedError: The file contains something else, or is too long.
        """
        if len(data) > MAX_BYTES:
            raise RefusedError(
                f"{len(data):,} bytes are too many: expected at most {MAX_BYTES:,}"
            )
        roots = []
        bridges = []
        leaves = []
        try:
            for certificate in x509.load_pem_x509_certificates(data):
                if not _is_authority(certificate):
                    leaves.append(certificate)
                elif is_issued_by(certificate, certificate):
                    roots.append(certificate)
                else:
                    bridges.append(certificate)
            revocations = None
            if b"-----BEGIN X509 CRL" in data:
                revocations = x509.load_pem_x509_crl(data)
                _read_number(revocations)  # a list without a number is refused
        except (ValueError, TypeError, x509.ExtensionNotFound) as error:
            raise RefusedError(
                "not the certificates of an authority, or incomplete"
            ) from error
        return Trust(tuple(roots), tuple(bridges), revocations, tuple(leaves))

    def encode(self) -> bytes:
        """Return the trust list as a PEM file: roots, bridges and revocations."""
        revocations = () if self.revocations is None else (self.revocations,)
        return encode_pem((*self.roots, *self.bridges, *revocations))

    def find_root_expiry(self, root: x509.Certificate) -> datetime:
        """Return when a root expires, by its own dates or because it was replaced."""
        # A replaced root is valid as long as the bridge to the root that replaces it.
        ends_of_bridges = [
            bridge.not_valid_after_utc
            for bridge in self.bridges
            if is_issued_by(bridge, root)
        ]
        return min([root.not_valid_after_utc, *ends_of_bridges])

    def has_expired(self, root: x509.Certificate) -> bool:
        """Return whether a root has expired, even if this machine's clock is fast."""
        return datetime.now(UTC) - CLOCK_TOLERANCE > self.find_root_expiry(root)

    def find_expiry(self, certificate: x509.Certificate) -> datetime:
        """Return when a certificate expires, by its own dates or with its root."""
        ends_of_roots = [
            self.find_root_expiry(root)
            for root in self.roots
            if is_issued_by(certificate, root)
        ]
        return min([certificate.not_valid_after_utc, *ends_of_roots])

    def find_withdrawal(
        self, certificate: x509.Certificate
    ) -> CertificateProblem | None:
        """Return why the authority withdrew a certificate; None if it did not.

        The authority may have revoked the certificate, or replaced the root that signed
        it. TLS checks neither.
        """
        if self.revocations is not None:
            revocation = self.revocations.get_revoked_certificate_by_serial_number(
                certificate.serial_number
            )
            if revocation is not None:
                day = f"{revocation.revocation_date_utc:%Y-%m-%d}"
                return CertificateProblem("withdrawn", f"was revoked on {day}")
        for root in self.roots:
            if is_issued_by(certificate, root) and self.has_expired(root):
                day = f"{self.find_root_expiry(root):%Y-%m-%d}"
                return CertificateProblem(
                    "withdrawn",
                    f"was signed by a replaced root, which was valid until {day}",
                )
        return None

    def find_problem(
        self,
        certificate: x509.Certificate,
        intermediates: Iterable[x509.Certificate] = (),
    ) -> CertificateProblem | None:
        """Return why a certificate is not accepted; None if it is.

        Args:
            certificate: The certificate of a participant.
            intermediates: Certificates that its owner presents with it. Only bridges
                from a trusted root are used.
        """
        bridges = [
            bridge
            for bridge in intermediates
            if _is_authority(bridge) and self.find_problem(bridge) is None
        ]
        issuers = (*self.roots, *bridges)
        if not any(is_issued_by(certificate, issuer) for issuer in issuers):
            return CertificateProblem("unsigned", f"is not signed by {ROOTS_FILE}")

        now = datetime.now(UTC)
        begin = certificate.not_valid_before_utc
        end = certificate.not_valid_after_utc
        if now + CLOCK_TOLERANCE < begin:
            return CertificateProblem(
                "early", f"is not valid before {begin:%Y-%m-%d %H:%M} UTC"
            )
        if now - CLOCK_TOLERANCE > end:
            return CertificateProblem("expired", f"expired on {end:%Y-%m-%d}")
        return self.find_withdrawal(certificate)


def install_trust(kit: Path, data: bytes) -> bool:
    """Install a trust list in a kit, regardless of who delivers it.

    Args:
        kit: The kit's folder.
        data: The trust list.

    Returns:
        Whether the list is newer than the kit's own.

    Raises:
        RefusedError: No root that the kit trusts signed the list, the list is older
            than the kit's own, or it was cut short. The kit is unchanged.
    """
    new_list = Trust.parse(data)
    # Of two lists that arrive at the same time, the older one must not come last.
    with locking_file(kit / LOCK_FILE):
        return _install_newer(kit, new_list)


def _install_newer(kit: Path, new_list: Trust) -> bool:
    """Install a parsed trust list in a kit; see `install_trust`."""
    current_list = Trust.read(kit / "startup")
    root = _require_signed(new_list, current_list)
    is_installed = (
        new_list.number == current_list.number
        and new_list.revocations == current_list.revocations
    )
    if is_installed:
        return False
    if new_list.number <= current_list.number:
        raise RefusedError(
            f"its number, {new_list.number}, is not higher than "
            f"{current_list.number}, the number of this kit's list"
        )

    roots = current_list.roots
    if root not in roots:
        roots = (*roots, root)
    # This order allows an interrupted installation to be repeated.
    for startup in _list_startup_folders(kit):
        write_text(startup / ROOTS_FILE, encode_pem(roots).decode())
        write_text(startup / TRUST_FILE, new_list.encode().decode())
    return True


def _require_signed(new_list: Trust, trust: Trust) -> x509.Certificate:
    """Return the root of a trust list after checking that the kit trusts it.

    A kit trusts a new root if one of its own roots has signed a bridge to it.

    Args:
        new_list: The trust list.
        trust: The roots, bridges and revocations that the kit trusts.

    Raises:
        RefusedError: It is not a trust list, or the kit does not trust its root.
    """
    if new_list.revocations is None or len(new_list.roots) != 1 or new_list.leaves:
        raise RefusedError(
            "not a trust list: expected one root and one list of revoked certificates"
        )
    unknown_signer = RefusedError("not signed by the authority of this kit's project")
    (root,) = new_list.roots
    if root in trust.roots:
        if any(is_issued_by(bridge, root) for bridge in trust.bridges):
            raise RefusedError("signed by a root certificate that was replaced")
    else:
        bridges = [
            bridge
            for bridge in new_list.bridges
            if bridge.public_key() == root.public_key()
        ]
        has_trusted_bridge = any(
            trust.find_problem(bridge) is None for bridge in bridges
        )
        if not has_trusted_bridge:
            raise unknown_signer
    key: Any = root.public_key()
    if not new_list.revocations.is_signature_valid(key):
        raise unknown_signer
    return root


def drop_expired_roots(kit: Path) -> None:
    """Remove expired roots from a kit, before a process reads them.

    One root always remains.
    """
    for startup in _list_startup_folders(kit):
        trust = Trust.read(startup)
        roots = tuple(root for root in trust.roots if not trust.has_expired(root))
        if roots and roots != trust.roots:
            write_text(startup / ROOTS_FILE, encode_pem(roots).decode())


def _list_startup_folders(kit: Path) -> list[Path]:
    """Return a kit's folders of certificates; a server's kit has one for its watch."""
    folders = (kit / "startup", kit / WATCH / "startup")
    return [folder for folder in folders if folder.is_dir()]


# ---- files ---------------------------------------------------------------------------


def load_kit_file(path: Path, load: Callable[[bytes], T]) -> T:
    """Read a file of a kit and return the result of `load`.

    Raises:
        ConfigError: The file is missing, or `load` does not accept it.
    """
    try:
        return load(read_regular(path))
    except OSError as error:
        raise ConfigError(
            f"{path}: the kit is not complete ({error.strerror}): {REMEDY}"
        ) from error
    except (ValueError, TypeError, RefusedError) as error:
        # The message of the error may quote the key.
        raise ConfigError(
            f"{path}: not a certificate or key of a kit: {REMEDY}"
        ) from error


def read_bounded_file(path: Path) -> bytes:
    """Read a file that an authority or a kit wrote.

    At most one byte more than `MAX_BYTES` is read, so that the parser refuses a longer
    file.

    Raises:
        ConfigError: The file cannot be read.
    """
    with (
        raising_if_unreadable(path, ConfigError),
        open(path, "rb", opener=open_regular) as file,
    ):
        return file.read(MAX_BYTES + 1)


def encode_pem(
    parts: Iterable[x509.Certificate | x509.CertificateRevocationList],
) -> bytes:
    """Return certificates and lists as the content of a PEM file."""
    return b"".join(part.public_bytes(Encoding.PEM) for part in parts)


def _read_stamp(path: Path) -> tuple[int, int]:
    """Return a file's inode and time of change, which show whether it has changed.

    Both are 0 if the file does not exist.
    """
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns


@lru_cache(maxsize=32)
def _read_trust(startup: Path, stamps: object) -> Trust:  # noqa: ARG001 - for the cache
    """Return the roots, bridges and revocations that a kit trusts.

    Args:
        startup: The kit's folder with these files.
        stamps: The files' stamps; changed files are read again.
    """
    roots = load_kit_file(startup / ROOTS_FILE, x509.load_pem_x509_certificates)
    trust_list = Trust(())
    if (startup / TRUST_FILE).exists():
        trust_list = load_kit_file(startup / TRUST_FILE, Trust.parse)
    return Trust(tuple(roots), trust_list.bridges, trust_list.revocations)


# ---- certificates --------------------------------------------------------------------


@lru_cache(maxsize=1024)  # the server asks this for each message
def is_issued_by(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Return whether the key of `issuer` signed a certificate in its name."""
    try:
        certificate.verify_directly_issued_by(issuer)
    except Exception:  # another issuer, a wrong signature, or another kind of key
        return False
    return True


def _is_authority(certificate: x509.Certificate) -> bool:
    """Return whether a certificate allows its holder to sign others."""
    try:
        constraints = certificate.extensions.get_extension_for_class(
            x509.BasicConstraints
        )
    except x509.ExtensionNotFound:
        return False
    return bool(constraints.value.ca)


def _read_number(revocations: x509.CertificateRevocationList) -> int:
    """Return the number of a revocation list.

    Raises:
        x509.ExtensionNotFound: The list has no number.
    """
    extension = revocations.extensions.get_extension_for_class(x509.CRLNumber)
    return int(extension.value.crl_number)
