"""Whether a kit's certificate can work, before a process is started with it.

NVFlare finds it out as well, but in a thread whose error nobody sees, and then tries for ever.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError, MissingExtra
from fednotes.engines.kit_files import SERVER, WATCH, read_kit

SOON = timedelta(days=30)
_REMEDY = "ask for a new kit"


def check_kit(kit: Path) -> list[str]:
    """Warnings: the certificates of a kit that end within 30 days.

    Raises what `valid_until` raises.
    """
    soon = datetime.now(UTC) + SOON
    return [
        f"{path}: the certificate expires on {end:%Y-%m-%d}: {_REMEDY}"
        for path, end in valid_until(kit).items()
        if end < soon
    ]


def valid_until(kit: Path) -> dict[Path, datetime]:
    """When the certificates of a kit end: its own, at a server its watch's, and its authority's.

    Raises ConfigError if one is missing, not yet or no longer valid, not signed by the kit's
    authority (`rootCA.pem`), of another name than the kit's, or not of the key beside it.
    Nothing is sent anywhere.
    """
    facts = read_kit(kit)
    if facts["role"] != SERVER:
        return _check(kit / "startup" / "client", facts["person"] or facts["name"])
    return {
        **_check(kit / "startup" / "server", facts["server"]),
        **_check(kit / WATCH / "startup" / "client", facts["person"]),
    }


def _check(stem: Path, name: str) -> dict[Path, datetime]:
    """The certificate and the key `stem`.crt and `stem`.key, which speak for `name`."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
        from cryptography.x509.oid import NameOID
    except ImportError as error:
        raise MissingExtra("cryptography", "deploy") from error
    path, root_path = stem.with_suffix(".crt"), stem.with_name("rootCA.pem")
    own = _read(path, x509.load_pem_x509_certificate)
    root = _read(root_path, x509.load_pem_x509_certificate)
    key = _read(stem.with_suffix(".key"), lambda text: load_pem_private_key(text, None))
    try:
        own.verify_directly_issued_by(root)
    except Exception as error:  # of a wrong issuer, a wrong signature, or another kind of key
        said = f"{path}: the certificate is not signed by {root_path.name}"
        raise ConfigError(f"{said}: {_REMEDY}") from error
    names = [n.value for n in own.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    if names != [name]:
        said = f"{path}: the certificate is of {', '.join(map(str, names)) or 'nobody'}"
        raise ConfigError(f"{said}, the kit of {name}: {_REMEDY}")
    if key.public_key() != own.public_key():
        raise ConfigError(f"{path}: the certificate is of another key than the kit's: {_REMEDY}")
    return {file: _end(file, found) for file, found in ((path, own), (root_path, root))}


def _end(path: Path, certificate: Any) -> datetime:
    now = datetime.now(UTC)
    begin: datetime = certificate.not_valid_before_utc
    end: datetime = certificate.not_valid_after_utc
    if now < begin:
        said = f"{path}: the certificate is valid from {begin:%Y-%m-%d %H:%M} UTC on only"
        raise ConfigError(f"{said}: is this machine's clock right?")
    if now > end:
        raise ConfigError(f"{path}: the certificate expired on {end:%Y-%m-%d}: {_REMEDY}")
    return end


def _read(path: Path, load: Any) -> Any:
    try:
        return load(path.read_bytes())
    except OSError as error:
        said = f"{path}: the kit's certificate is not complete ({error.strerror})"
        raise ConfigError(f"{said}: {_REMEDY}") from error
    except (ValueError, TypeError) as error:  # their messages may quote the key
        said = f"{path}: no certificate or key of a kit can be read from it"
        raise ConfigError(f"{said}: {_REMEDY}") from error
