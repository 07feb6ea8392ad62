"""People who approve jobs by keys of their own, where a site asks for more than one of them.

Each has an Ed25519 key in a file of their own; the public part stands in the site's rules:

    [policy]
    approvals = 2
    approvers = { alice = "MCow…", bob = "9aXk…" }

A signature is over the site, the job's fingerprint, the decision, the time, the account it was
made from and the person's name, so it counts for nothing else. That two people looked is what
it shows: whoever may write the site's rules can list other keys there.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fednotes.core.errors import ConfigError
from fednotes.core.store import replace_file
from fednotes.privacy.masks import KEY_BYTES, joined, need_cryptography

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_PURPOSE = "fednotes approval of a job"
_MOST_BYTES = 10_000  # of a key's file
_PERSON = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Quorum:
    """How many different people must approve a job at a site.

    people: name → public key, 32 bytes in base64. None: whoever runs the command, without a key.
    Raises ConfigError for what no decision could fulfil.
    """

    site: str = ""
    needed: int = 1
    people: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.needed < 1:
            raise ConfigError(f"approvals = {self.needed}: at least 1 is needed")
        for person, key in self.people.items():
            if not _PERSON.fullmatch(person) or _raw(key) is None:
                raise ConfigError(
                    f'approvers: {person!r} = {key!r}: expected NAME = "KEY", the line that '
                    "`fednotes site key NAME` shows"
                )
        if len(set(map(_raw, self.people.values()))) < len(self.people):
            raise ConfigError("approvers: two names have the same key; each needs their own")
        if len(self.people) < self.needed and (self.people or self.needed > 1):
            raise ConfigError(
                f"approvals = {self.needed}, and approvers lists {len(self.people)}: list all who "
                "may approve, as the line that `fednotes site key NAME` shows"
            )

    def signed(self, signature: bytes, person: str, *about: str) -> bool:
        """Whether this person of the list signed this. about: as it was given to `sign`."""
        need_cryptography()
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        raw = _raw(self.people.get(person, ""))
        if raw is None:
            return False
        try:
            Ed25519PublicKey.from_public_bytes(raw).verify(signature, self._text(person, *about))
        except (InvalidSignature, ValueError):
            return False
        return True

    def sign(self, key: Ed25519PrivateKey, person: str, *about: str) -> bytes:
        """The signature of a person's decision, 64 bytes."""
        return key.sign(self._text(person, *about))

    def _text(self, person: str, *about: str) -> bytes:
        return joined(_PURPOSE, self.site, person, *about)

    def person_of(self, key: Ed25519PrivateKey, path: Path) -> str:
        """Whose key it is. Raises ConfigError if it is nobody's of the list."""
        public = public_of(key)
        for person, known in self.people.items():
            if _raw(known) == _raw(public):
                return person
        raise ConfigError(
            f"{path}: its public part, {public}, is not among the approvers of this site's rules "
            f"({', '.join(self.people) or 'none are listed'}); nothing was decided"
        )


def make_key(path: Path, person: str, passphrase: str = "") -> str:
    """Write a new private key that only its owner can read; returns the public part.

    passphrase: with which the file is encrypted; "" leaves it plain. Raises ConfigError for a
    file that is there, or a name that no list of approvers can hold.
    """
    need_cryptography()
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if not _PERSON.fullmatch(person):
        raise ConfigError(f"{person!r}: letters, digits, '_' and '-' only, 64 at most")
    if path.exists() or path.is_symlink():
        raise ConfigError(
            f"{path}: is there already, and no key is overwritten: give another --out"
        )
    key = Ed25519PrivateKey.generate()
    locked = form.BestAvailableEncryption(passphrase.encode()) if passphrase else None
    text = key.private_bytes(
        form.Encoding.PEM, form.PrivateFormat.PKCS8, locked or form.NoEncryption()
    )
    try:
        replace_file(path, text, mode=0o600)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error.strerror})") from error
    return public_of(key)


def read_key(path: Path, ask: Callable[[], str]) -> Ed25519PrivateKey:
    """A person's private key. ask: for its passphrase, where it has one.

    Raises ConfigError if there is none, others can read it, or the passphrase is wrong.
    """
    need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES)
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    if mode & 0o077:
        raise ConfigError(f"{path}: others can read it: chmod 600 {path}")
    locked = b"ENCRYPTED" in text
    try:
        key = load_pem_private_key(text, ask().encode() if locked else None)
    except (ValueError, TypeError) as error:  # their messages may quote the key
        what = "the passphrase is wrong" if locked else "no private key is in it"
        raise ConfigError(f"{path}: {what}; nothing was decided") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(f"{path}: is no key that `fednotes site key` made; nothing was decided")
    return key


def public_of(key: Ed25519PrivateKey) -> str:
    """The public part as the site's rules have it."""
    return base64.b64encode(key.public_key().public_bytes_raw()).decode()


def _raw(public: str) -> bytes | None:
    try:
        raw = base64.b64decode(public, validate=True)
    except (binascii.Error, ValueError):
        return None
    return raw if len(raw) == KEY_BYTES else None
