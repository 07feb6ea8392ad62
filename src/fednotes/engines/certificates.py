"""Whether a kit's certificate can work, before a process is started with it.

NVFlare finds it out as well, but in a thread whose error nobody sees, and then tries for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError
from fednotes.engines.kit_files import SERVER, WATCH, read_kit
from fednotes.engines.trust import REMEDY, ROOTS, Trust, read

SOON = timedelta(days=60)


def check_kit(kit: Path) -> list[str]:
    """Warnings: the certificates of a kit that end within 60 days.

    Raises what `valid_until` raises.
    """
    soon = datetime.now(UTC) + SOON
    return [
        f"{path}: the certificate expires on {end:%Y-%m-%d}: {_remedy(kit, path)}"
        for path, end in valid_until(kit).items()
        if end < soon
    ]


def _remedy(kit: Path, path: Path) -> str:
    if path.name == ROOTS:
        return "ask the project's coordinator for a new root"
    return f"fednotes kit renew {kit}"


def shown_problem(kit: Path, shown: bytes) -> str:
    """Why a certificate (DER) that another showed by TLS counts no more; empty if it does."""
    from cryptography.x509 import load_der_x509_certificate

    return Trust.of(kit / "startup").ended(load_der_x509_certificate(shown))


def stems(kit: Path) -> dict[Path, str]:
    """A kit's certificates, by their paths without a suffix, and whose each must be."""
    facts = read_kit(kit)
    if facts["role"] != SERVER:
        return {kit / "startup" / "client": facts["person"] or facts["name"]}
    return {
        kit / "startup" / "server": facts["server"],
        kit / WATCH / "startup" / "client": facts["person"],
    }


def valid_until(kit: Path) -> dict[Path, datetime]:
    """When the certificates of a kit end: its own, at a server its watch's, and its authority's.

    Raises ConfigError if one is missing, not yet or no longer valid, revoked, not signed by the
    kit's authority (`rootCA.pem`), of another name than the kit's, or not of the key beside it.
    Nothing is sent anywhere.
    """
    return {path: end for stem, name in stems(kit).items() for path, end in _check(stem, name)}


def _check(stem: Path, name: str) -> Iterator[tuple[Path, datetime]]:
    """The certificate and the key `stem`.crt and `stem`.key, which speak for `name`."""
    trust = Trust.of(stem.parent)
    path, own = stem.with_suffix(".crt"), certificate_of(stem)
    if problem := trust.problem(own):
        raise ConfigError(f"{path}: the certificate {problem}{_asked(problem)}")
    names = names_of(own)
    if names != [name]:
        said = f"{path}: the certificate is of {', '.join(names) or 'nobody'}"
        raise ConfigError(f"{said}, the kit of {name}: {REMEDY}")
    if key_of(stem).public_key() != own.public_key():
        raise ConfigError(f"{path}: the certificate is of another key than the kit's: {REMEDY}")
    yield path, trust.until(own)
    newest = trust.roots[-1]
    if problem := trust.problem(newest):
        raise ConfigError(f"{stem.with_name(ROOTS)}: the certificate {problem}{_asked(problem)}")
    yield stem.with_name(ROOTS), trust.end(newest)


def _asked(problem: str) -> str:
    return "" if problem.endswith("?") else f": {REMEDY}"


def names_of(certificate: Any) -> list[str]:
    """The names that a certificate speaks for; one, in those of a project."""
    from cryptography.x509.oid import NameOID

    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return [str(name.value) for name in found]


def certificate_of(stem: Path) -> Any:
    """Raises ConfigError if it is missing or cannot be read."""
    from cryptography.x509 import load_pem_x509_certificate

    return read(stem.with_suffix(".crt"), load_pem_x509_certificate)


def key_of(stem: Path) -> Any:
    """Raises ConfigError if it is missing or cannot be read."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    return read(stem.with_suffix(".key"), lambda text: load_pem_private_key(text, None))
