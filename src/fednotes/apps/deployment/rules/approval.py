"""What a site said yes to: jobs by the hash of their table, and who said it.

A job is a table of JSON values and nothing else: no code comes over the wire, and a
table that holds anything but such values has no fingerprint. A site keeps its
decisions, with the tables they were about, in one file that only its owner can read:

    <folder>/approvals.json   every decision in order, and each table once

Where a site asks for more than one person, each has an Ed25519 key in a file of their
own, and the public parts stand in the site's rules:

    [policy]
    approvals = 2
    approvers = { alice = "MCow…", bob = "9aXk…" }

A signature is over the site, the job's fingerprint, the decision, the time, the account
it was made from and the person's name, so it counts for nothing else. That two people
looked is what it shows: whoever may write the site's rules can list other keys there.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic.dataclasses import dataclass as checked_dataclass

from fednotes.core.cleaning import clean
from fednotes.core.errors import (
    ConfigError,
    FednotesError,
    RefusedError,
    on_disk,
    readable,
)
from fednotes.core.parsing import read_json
from fednotes.core.store import locked_file, replace_file
from fednotes.core.tables import Table, plain_copy, table_differences, table_fingerprint
from fednotes.privacy.secure_sum.crypto import KEY_BYTES, joined, need_cryptography

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

Decision = Literal["approved", "rejected"]
Status = Literal["approved", "rejected", "waiting", "unknown", "changed"]

FORMAT = 1
_PURPOSE = "fednotes approval of a job"
_MOST_BYTES = 10_000  # of a key's file
_PERSON = re.compile(r"[A-Za-z0-9_-]{1,64}")


# ---- people and their keys -----------------------------------------------------------


@dataclass(frozen=True)
class Quorum:
    """How many different people must approve a job at a site.

    people: name → public key, 32 bytes in base64. None: whoever runs the command,
        without a key.
    Raises ConfigError for what no decision could fulfil.
    """

    site: str = ""
    needed: int = 1
    people: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for person, key in self.people.items():
            if not _PERSON.fullmatch(person) or _raw(key) is None:
                raise ConfigError(
                    f'approvers: {person!r} = {key!r}: expected NAME = "KEY", the line that '
                    "`fednotes site key NAME` shows"
                )
        if len(set(map(_raw, self.people.values()))) < len(self.people):
            raise ConfigError(
                "approvers: two names have the same key; each needs their own"
            )
        if len(self.people) < self.needed and (self.people or self.needed > 1):
            raise ConfigError(
                f"approvals = {self.needed}, and approvers lists {len(self.people)}: list all who "
                "may approve, as the line that `fednotes site key NAME` shows"
            )

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

    def signed(self, made: Approval) -> bool:
        """Whether a person of the list approved this with their key; anybody counts
        where none is listed."""
        if not self.people:
            return True
        need_cryptography()
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        raw = _raw(self.people.get(made.person, ""))
        try:
            signature = bytes.fromhex(made.signature)
            if raw is not None:
                Ed25519PublicKey.from_public_bytes(raw).verify(
                    signature, made.text(self.site)
                )
        except (InvalidSignature, ValueError):
            return False
        return raw is not None


@dataclass(frozen=True, slots=True)
class Signer:
    """A person who approves with a key of their own."""

    person: str
    key: Ed25519PrivateKey = field(repr=False)


def make_key(path: Path, person: str, passphrase: str = "") -> str:
    """Write a new private key that only its owner can read; returns the public part.

    passphrase: with which the file is encrypted; "" leaves it plain. Raises ConfigError
    for a file that is there, or a name that no list of approvers can hold.
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
    with on_disk(path, ConfigError):
        replace_file(path, text, mode=0o600)
    return public_of(key)


def read_key(path: Path, ask: Callable[[], str]) -> Ed25519PrivateKey:
    """A person's private key. ask: for its passphrase, where it has one.

    Raises ConfigError if there is none, others can read it, or the passphrase is wrong.
    """
    need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    with readable(path, ConfigError):
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES)
        mode = path.stat().st_mode
    if mode & 0o077:
        raise ConfigError(f"{path}: others can read it: chmod 600 {path}")
    locked = b"ENCRYPTED" in text
    try:
        key = load_pem_private_key(text, ask().encode() if locked else None)
    except (ValueError, TypeError) as error:  # their messages may quote the key
        what = "the passphrase is wrong" if locked else "no private key is in it"
        raise ConfigError(f"{path}: {what}; nothing was decided") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(
            f"{path}: is no key that `fednotes site key` made; nothing was decided"
        )
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


# ---- decisions -----------------------------------------------------------------------


@checked_dataclass(frozen=True, config={"strict": True, "extra": "forbid"})
class Approval:
    """One decision. by: the account it was made from. when: UTC, as ISO text. table:
    the job that it was about. person, signature (hexadecimal): of who approved with a
    key of their own. ledger: the hash of the last line of the site's ledger then; "" if
    it had none, or is not known."""

    fingerprint: str
    decision: Decision
    by: str
    when: str
    table: dict[str, Any]
    person: str = ""
    signature: str = ""
    ledger: str = ""

    def text(self, site: str) -> bytes:
        """What a person signs."""
        about = (self.fingerprint, self.decision, self.by, self.when)
        return joined(_PURPOSE, site, self.person, *about)

    def kept(self) -> dict[str, str]:
        """As it stands in the file, which has each table once."""
        names = ["fingerprint", "decision", "by", "when", "ledger"]
        names += ["person", "signature"] if self.signature else []
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Standing:
    """What all decisions on one job come to. made: the one that settled it; None while
    too few have approved. people: who have approved since, of those who must."""

    made: Approval | None = None
    people: frozenset[str] = frozenset()

    def after(self, past: Approval, quorum: Quorum) -> Standing:
        """As it stands after another decision."""
        if past.decision == "rejected":
            return Standing(past)
        if not quorum.signed(past):
            return self
        people = self.people | {past.person}
        if len(people) >= quorum.needed:
            return Standing(past)
        rejected = self.made is not None and self.made.decision == "rejected"
        return Standing(None if rejected else self.made, people)


class Approvals:
    """The decisions of one site, kept in `folder` (made when the first one is written).

    quorum: how many must approve, and by which keys. Who approves twice counts once; a
    no takes every yes before it back.

    Raises ConfigError where the file cannot be read or was edited by hand: a site that
    does not know what it approved approves nothing.
    """

    def __init__(self, folder: Path, quorum: Quorum | None = None) -> None:
        self.path, self.quorum = folder / "approvals.json", quorum or Quorum()

    def decide(
        self,
        decision: Decision,
        table: Table,
        by: str,
        when: datetime,
        signer: Signer | None = None,
        ledger: str = "",
    ) -> str:
        """Say yes to a job or no, or take an approval back; returns its fingerprint.
        when: with a time zone. ledger: see `Approval`."""
        if when.tzinfo is None:
            raise ValueError("the time of a decision needs a time zone")
        key, moment, job = (
            table_fingerprint(table),
            when.astimezone(UTC).isoformat(),
            plain_copy(table),
        )
        made = Approval(key, decision, by, moment, job, ledger=ledger)
        if signer is not None:
            made = replace(made, person=signer.person)
            made = replace(
                made, signature=signer.key.sign(made.text(self.quorum.site)).hex()
            )
        with on_disk(self.path, FednotesError, "; nothing was decided"):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # or one would be lost
            with locked_file(self.path.with_name(f".{self.path.name}.lock")):
                every = (*self.decisions(), made)
                jobs = {past.fingerprint: past.table for past in every}
                kept = {"format": FORMAT, "decisions": [past.kept() for past in every]}
                text = json.dumps({**kept, "jobs": jobs}, indent=2) + "\n"
                replace_file(self.path, text.encode(), mode=0o600)
        return key

    def status(self, table: Table) -> Status:
        """What was decided on exactly this table. "waiting": some of those who must
        have approved it. "changed": nothing, but another table of the same `name` was
        approved; "unknown": nothing at all."""
        found = self.standing(table)
        if found.made is not None:
            return found.made.decision
        if found.people:
            return "waiting"
        same = "name" in table and self.last_approved(table["name"]) is not None
        return "changed" if same else "unknown"

    def standing(self, table: Table) -> Standing:
        """What the decisions on exactly this table come to."""
        return self._standings().get(table_fingerprint(table), Standing())

    def approved_after(self, table: Table) -> str:
        """After which line of the ledger exactly this table was approved last, by all
        who must: its hash, which no clock moves; "" for none."""
        made = self.standing(table).made
        return made.ledger if made is not None and made.decision == "approved" else ""

    def last_approved(self, name: str | None = None) -> Approval | None:
        """The newest approval that still holds; with `name`, of a job called so."""
        for standing in reversed(self._standings().values()):
            made = standing.made
            named = made is not None and name in (None, made.table.get("name"))
            if made is not None and named and made.decision == "approved":
                return made
        return None

    def approved(self) -> tuple[Approval, ...]:
        """Return each job that was ever approved here, by its newest approval, newest
        first.

        A job whose approval was taken back may have had its sums by then, so it counts
        too.
        """
        found: dict[str, Approval] = {}
        for past in reversed(self.decisions()):
            if past.decision == "approved":
                found.setdefault(past.fingerprint, past)
        return tuple(found.values())

    def _standings(self) -> dict[str, Standing]:
        """Fingerprint → standing, the one that changed last at the end."""
        found: dict[str, Standing] = {}
        for past in self.decisions():
            before = found.get(past.fingerprint, Standing())
            if (after := before.after(past, self.quorum)) != before:
                found.pop(past.fingerprint, None)
                found[past.fingerprint] = after
        return found

    def decisions(self) -> tuple[Approval, ...]:
        """Every decision, oldest first."""
        try:
            kept = read_json(self.path)
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as error:
            raise self._unusable("cannot be read as JSON") from error
        try:
            if kept["format"] != FORMAT:
                raise self._unusable(
                    f"has format {kept['format']}, this version reads {FORMAT}"
                )
            jobs = kept["jobs"]
            if any(table_fingerprint(table) != key for key, table in jobs.items()):
                raise self._unusable("was edited: a job does not have its fingerprint")
            listed = kept["decisions"]
            return tuple(
                Approval(**d | {"table": jobs[d["fingerprint"]]}) for d in listed
            )
        except (
            LookupError,
            TypeError,
            ValueError,
            AttributeError,
            RefusedError,
        ) as error:
            raise self._unusable("was edited, or is no list of decisions") from error

    def _unusable(self, why: str) -> ConfigError:
        return ConfigError(
            f"{self.path}: {why}; move it away and approve the site's jobs again"
        )


# ---- tables --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    """How a job differs from an earlier one in whose notes are summed.

    Whoever writes both jobs can subtract their sums. What is left is of the sites that
    are in one of them alone, and of the notes that a site reads for one of them alone.

    Attributes:
        sites: The sites that are in one of the two jobs alone, sorted.
        own: What the two jobs say differently of the notes of this site, a line for
            each key.
    """

    sites: tuple[str, ...]
    own: tuple[str, ...]

    def warnings(self, least: int) -> tuple[str, ...]:
        """Return what a person should know before approving the later job.

        Args:
            least: The fewest sites that the difference of two sums may be of, as of any
                sum.
        """
        told = []
        if 0 < len(self.sites) < least:
            named = ", ".join(clean(site) for site in self.sites)
            told.append(
                f"the sums of both jobs differ by few sites alone ({named}): whoever subtracts "
                "them sees what these sent, but for what the others draw in secret"
            )
        if self.own:
            told.append(
                "this site reads other notes for it: where few notes differ, the sums of both jobs "
                "can tell these; [privacy] bounds what they tell"
            )
        return tuple(told)


def compare(earlier: Table, later: Table, site: str) -> Comparison:
    """Compare two jobs as a site approves them.

    Args:
        earlier: The table of the job that was approved before.
        later: The table of the job that waits.
        site: The name of the site that reads this.

    Returns:
        The comparison. The site's own file may say besides which notes are read; it is
        not in the tables of jobs.

    Raises:
        RefusedError: A table holds what no job does.
    """
    sites = [set(map(str, table.get("sites", ()))) for table in (earlier, later)]
    before, after = (_selection(table, site) for table in (earlier, later))
    return Comparison(
        tuple(sorted(sites[0] ^ sites[1])), table_differences(before, after)
    )


def _selection(table: Table, site: str) -> dict[str, Any]:
    """Return what a job says of the notes that a site reads: its own table, and the
    seed, by which notes are split and left out."""
    job = table.get("job")
    job = job if isinstance(job, Mapping) else {}
    sites = job.get("sites")
    own = sites.get(site) if isinstance(sites, Mapping) else None
    return {"sites": {site: own or {}}, "seed": job.get("seed", 0)}
