"""A site's decisions on jobs: which job, identified by its fingerprint, and by whom.

A job is a table of JSON values and nothing else: no code comes over the wire, and a
table with any other value has no fingerprint. A site stores its decisions, with the
tables that they concern, in one file that only its owner can read:

    <folder>/approvals.json   every decision in order, and each table once

If several people must approve, each has an Ed25519 key in a separate file, and the
site's rules list the public keys:

    [policy]
    approvals = 2
    approvers = { alice = "MCow…", bob = "9aXk…" }

A signature covers the site, the job's fingerprint, the decision, its time, the account
that made it and the person's name, so it is valid for nothing else. Two signatures show
that two people looked at the job. They do not protect against people who can write to
the site's rules, because such people can list other keys there.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic.dataclasses import dataclass as checked_dataclass

from fednotes.core import bounds
from fednotes.core.cleaning import clean
from fednotes.core.errors import (
    ConfigError,
    FednotesError,
    RefusedError,
    raising_if_unreadable,
    raising_os_errors_as,
)
from fednotes.core.parsing import has_more_values, open_regular, read_json
from fednotes.core.store import locking_file, replace_file
from fednotes.core.tables import (
    Table,
    compare_tables,
    copy_json_value,
    fingerprint_table,
)
from fednotes.jobs.declaration import SITE_TABLES
from fednotes.privacy.secure_sum.crypto import KEY_BYTES, join_parts, need_cryptography

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

Decision = Literal["approved", "rejected"]
Status = Literal["approved", "rejected", "waiting", "unknown", "changed"]

FORMAT = 1
_PURPOSE = "fednotes approval of a job"
_MAX_KEY_FILE_BYTES = 10_000
_PERSON = re.compile(r"[A-Za-z0-9_-]{1,64}")


# ---- people and their keys -----------------------------------------------------------


@dataclass(frozen=True)
class Quorum:
    """How many different people must approve a job at a site.

    Attributes:
        site: The site.
        needed: Number of people who must approve.
        people: Name of each person who may approve to the person's public key (32 bytes
            in base64). If it is empty, whoever runs the command approves, without a
            key.

    Raises:
        ConfigError: A name or a key is not valid, two people have the same key, or
            fewer people are listed than must approve.
    """

    site: str = ""
    needed: int = 1
    people: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for person, key in self.people.items():
            if not _PERSON.fullmatch(person) or _decode_public_key(key) is None:
                raise ConfigError(
                    f'approvers: {person!r} = {key!r}: expected NAME = "KEY", the line '
                    "that `fednotes site key NAME` shows"
                )
        distinct_keys = {_decode_public_key(key) for key in self.people.values()}
        if len(distinct_keys) < len(self.people):
            raise ConfigError(
                "approvers: two names share a key: every approver needs a separate one"
            )
        needs_list = bool(self.people) or self.needed > 1
        if needs_list and len(self.people) < self.needed:
            raise ConfigError(
                f"approvals = {self.needed}, but approvers lists "
                f"{len(self.people)}: list everyone who may approve, with the "
                "line that `fednotes site key NAME` shows"
            )

    def find_person(self, key: Ed25519PrivateKey, path: Path) -> str:
        """Return the person to whom a key belongs.

        Args:
            key: The private key.
            path: Its file, for messages.

        Raises:
            ConfigError: The key belongs to none of the listed people.
        """
        public_key = encode_public_key(key)
        for person, listed_key in self.people.items():
            if _decode_public_key(listed_key) == _decode_public_key(public_key):
                return person
        raise ConfigError(
            f"{path}: its public part, {public_key}, is not among the approvers of "
            f"this site's rules ({', '.join(self.people) or 'none are listed'}); "
            "nothing was decided"
        )

    def has_signed(self, approval: Approval) -> bool:
        """Return whether a listed person signed an approval; True if nobody is listed.

        If nobody is listed, anybody may approve without a signature.
        """
        if not self.people:
            return True
        need_cryptography()
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        raw_key = _decode_public_key(self.people.get(approval.person, ""))
        if raw_key is None:
            return False
        try:
            Ed25519PublicKey.from_public_bytes(raw_key).verify(
                bytes.fromhex(approval.signature), approval.build_signed_text(self.site)
            )
        except (InvalidSignature, ValueError):
            return False
        return True


@dataclass(frozen=True, slots=True)
class Signer:
    """A person who signs decisions.

    Attributes:
        person: The person's name.
        key: The person's private key.
    """

    person: str
    key: Ed25519PrivateKey = field(repr=False)


def make_key(path: Path, person: str, passphrase: str = "") -> str:
    """Write a new private key that only its owner can read.

    Args:
        path: The file to create.
        person: The name of the key's owner.
        passphrase: Encrypts the file; "" leaves it unencrypted.

    Returns:
        The public key, as listed in the site's rules.

    Raises:
        ConfigError: The file exists, or the name has characters that a list of
            approvers does not allow.
    """
    need_cryptography()
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if not _PERSON.fullmatch(person):
        raise ConfigError(f"{person!r}: use at most 64 letters, digits, '_' and '-'")
    if path.exists() or path.is_symlink():
        raise ConfigError(
            f"{path} already exists, and keys are never overwritten: choose another "
            "file"
        )
    encryption: serialization.KeySerializationEncryption = serialization.NoEncryption()
    if passphrase:
        encryption = serialization.BestAvailableEncryption(passphrase.encode())
    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        encryption_algorithm=encryption,
    )
    with raising_os_errors_as(ConfigError, path):
        replace_file(path, text, mode=0o600)
    return encode_public_key(key)


def read_signing_key(path: Path, ask: Callable[[], str]) -> Ed25519PrivateKey:
    """Return a person's private key.

    Args:
        path: The file of the key.
        ask: Returns the passphrase; it is called only if the file is encrypted.

    Raises:
        ConfigError: The file contains no key of an approver, other users can read it,
            or the passphrase is wrong.
    """
    need_cryptography()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    with raising_if_unreadable(path, ConfigError):
        with open(path, "rb", opener=open_regular) as file:
            text = file.read(_MAX_KEY_FILE_BYTES)
        mode = path.stat().st_mode
    if mode & 0o077:
        raise ConfigError(
            f"{path}: other users can read this file: run chmod 600 {path}"
        )

    is_encrypted = b"ENCRYPTED" in text
    try:
        key = load_pem_private_key(text, ask().encode() if is_encrypted else None)
    except (ValueError, TypeError) as error:  # their messages may quote the key
        problem = "it contains no private key"
        if is_encrypted:
            problem = "the passphrase is wrong"
        raise ConfigError(f"{path}: {problem}; nothing was decided") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(
            f"{path}: not a key that `fednotes site key` created; nothing was decided"
        )
    return key


def encode_public_key(key: Ed25519PrivateKey) -> str:
    """Return the public part of a key, as listed in the site's rules."""
    return base64.b64encode(key.public_key().public_bytes_raw()).decode()


def _decode_public_key(public_key: str) -> bytes | None:
    """Return the bytes of a public key in base64; None if the text is not a key."""
    try:
        raw = base64.b64decode(public_key, validate=True)
    except (binascii.Error, ValueError):
        return None
    return raw if len(raw) == KEY_BYTES else None


# ---- decisions -----------------------------------------------------------------------


@checked_dataclass(frozen=True, config={"strict": True, "extra": "forbid"})
class Approval:
    """One decision on one job.

    Attributes:
        fingerprint: The job's fingerprint.
        decision: `approved` or `rejected`.
        by: The account that made the decision.
        when: The time in UTC, as ISO text.
        table: The job.
        person: The person who signed the decision; "" without a signature.
        signature: The person's signature, in hexadecimal; "" without one.
        ledger: Hash of the last line in the site's ledger at that time; "" if the
            ledger was empty, or the hash is not known. The field has the name of its
            key in the file.
    """

    fingerprint: str
    decision: Decision
    by: str
    when: str
    table: dict[str, Any]
    person: str = ""
    signature: str = ""
    ledger: str = ""

    def build_signed_text(self, site: str) -> bytes:
        """Return the text that a person at a site signs."""
        return join_parts(
            _PURPOSE,
            site,
            self.person,
            self.fingerprint,
            self.decision,
            self.by,
            self.when,
        )

    def to_entry(self) -> dict[str, str]:
        """Return the decision as stored in the file; tables are stored separately."""
        names = ["fingerprint", "decision", "by", "when", "ledger"]
        if self.signature:
            names += ["person", "signature"]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class Standing:
    """The result of all decisions on one job.

    Attributes:
        settled: The decision that settles the job; None while too few people have
            approved it.
        people: The people who have approved the job since it was last settled. They
            are too few to settle it again.
    """

    settled: Approval | None = None
    people: frozenset[str] = frozenset()

    def add_decision(self, decision: Approval, quorum: Quorum) -> Standing:
        """Return the standing that results from one more decision.

        Args:
            decision: The decision.
            quorum: Who must approve.
        """
        if decision.decision == "rejected":
            return Standing(decision)
        if not quorum.has_signed(decision):
            return self
        people = self.people | {decision.person}
        if len(people) >= quorum.needed:
            return Standing(decision)
        # An approval stays valid while people approve again; a rejection does not.
        is_approved = self.settled is not None and self.settled.decision == "approved"
        return Standing(self.settled if is_approved else None, people)


class Approvals:
    """The decisions of one site.

    A person who approves twice counts once, and a rejection withdraws every approval
    before it. Methods raise ConfigError if the file cannot be read or was edited by
    hand, so that a damaged file never counts as an approval.

    Args:
        folder: The folder of the file; it is created with the first decision.
        quorum: How many people must approve, and with which keys.

    Attributes:
        path: The file.
        quorum: How many people must approve, and with which keys.
    """

    def __init__(self, folder: Path, quorum: Quorum | None = None) -> None:
        self.path = folder / "approvals.json"
        self.quorum = quorum or Quorum()

    def decide(
        self,
        decision: Decision,
        table: Table,
        by: str,
        when: datetime,
        signer: Signer | None = None,
        ledger_hash: str = "",
    ) -> str:
        """Approve or reject a job, or withdraw an approval.

        Args:
            decision: The decision.
            table: The job.
            by: The account that makes the decision.
            when: The time, with a time zone.
            signer: The person who signs the decision; None leaves it unsigned.
            ledger_hash: Hash of the last line of the site's ledger; "" if it is empty.

        Returns:
            The job's fingerprint.

        Raises:
            FednotesError: The decision cannot be written.
        """
        if when.tzinfo is None:
            raise ValueError("the time of a decision needs a time zone")
        fingerprint = fingerprint_table(table)
        approval = Approval(
            fingerprint,
            decision,
            by=by,
            when=when.astimezone(UTC).isoformat(),
            table=copy_json_value(table),
            ledger=ledger_hash,
        )
        if signer is not None:
            approval = replace(approval, person=signer.person)
            signed_text = approval.build_signed_text(self.quorum.site)
            signature = signer.key.sign(signed_text).hex()
            approval = replace(approval, signature=signature)

        with raising_os_errors_as(
            FednotesError, self.path, ending="; nothing was decided"
        ):
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # Without a lock, one of two simultaneous decisions would be lost.
            with locking_file(self.path.with_name(f".{self.path.name}.lock")):
                self._write((*self.read_decisions(), approval))
        return fingerprint

    def _write(self, decisions: tuple[Approval, ...]) -> None:
        """Replace the file by one with these decisions.

        Raises:
            ConfigError: The file would be too large to be read again, so that none of
                its decisions would hold.
        """
        contents = {
            "format": FORMAT,
            "decisions": [decision.to_entry() for decision in decisions],
            "jobs": {decision.fingerprint: decision.table for decision in decisions},
        }
        text = json.dumps(contents, indent=2) + "\n"
        if len(text) > bounds.FILE // 16:  # nested tables are mostly indentation
            text = json.dumps(contents, separators=(",", ":")) + "\n"
        if len(text) > bounds.FILE or has_more_values(text, bounds.JSON_VALUES):
            raise ConfigError(
                f"{self.path}: the table of this job would make the file too large to "
                "be read again; nothing was decided, and the site does not join the "
                "job: ask the job's author for a smaller job"
            )
        replace_file(self.path, text.encode(), mode=0o600)

    def read_status(self, table: Table) -> Status:
        """Read all decisions, and return the status of a job.

        Returns:
            `"approved"` or `"rejected"`; `"waiting"` if some, but too few people have
            approved it; `"changed"` if nobody has decided on exactly this table, but
            another table of the same name was approved; otherwise `"unknown"`.
        """
        standing = self.read_standing(table)
        if standing.settled is not None:
            return standing.settled.decision
        if standing.people:
            return "waiting"
        is_changed = (
            "name" in table and self.find_last_approval(table["name"]) is not None
        )
        return "changed" if is_changed else "unknown"

    def read_standing(self, table: Table) -> Standing:
        """Read all decisions, and return the result of those on exactly this table."""
        return self._read_standings().get(fingerprint_table(table), Standing())

    def find_ledger_hash_at_approval(self, table: Table) -> str:
        """Return the hash of the line that ended the ledger at a job's last approval.

        The hash marks the time of the approval without relying on a clock. It is "" if
        the job is not approved, or if the ledger was empty.
        """
        settled = self.read_standing(table).settled
        if settled is None or settled.decision != "approved":
            return ""
        return settled.ledger

    def find_last_approval(self, name: str | None = None) -> Approval | None:
        """Return the newest approval that still holds.

        Args:
            name: Only consider jobs with this name.
        """
        for standing in reversed(self._read_standings().values()):
            approval = standing.settled
            if approval is None or approval.decision != "approved":
                continue
            if name is None or approval.table.get("name") == name:
                return approval
        return None

    def list_ever_approved(self) -> tuple[Approval, ...]:
        """Return the newest approval of each job ever approved, newest first.

        Jobs whose approval was withdrawn are included, because their sums may have left
        before that.
        """
        newest_approvals: dict[str, Approval] = {}
        for decision in reversed(self.read_decisions()):
            if decision.decision == "approved":
                newest_approvals.setdefault(decision.fingerprint, decision)
        return tuple(newest_approvals.values())

    def _read_standings(self) -> dict[str, Standing]:
        """Return each job's standing by fingerprint, the last changed one last."""
        standings: dict[str, Standing] = {}
        for decision in self.read_decisions():
            old_standing = standings.get(decision.fingerprint, Standing())
            new_standing = old_standing.add_decision(decision, self.quorum)
            if new_standing != old_standing:
                # Removing the old standing first moves the job to the end.
                standings.pop(decision.fingerprint, None)
                standings[decision.fingerprint] = new_standing
        return standings

    def read_decisions(self) -> tuple[Approval, ...]:
        """Return every decision, oldest first.

        Raises:
            ConfigError: The file cannot be read, has another format, or was edited.
        """
        try:
            facts = self.path.stat()
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise _make_error(self.path, "cannot be read as JSON") from error
        return _read_decisions(
            self.path, facts.st_ino, facts.st_ctime_ns, facts.st_mtime_ns, facts.st_size
        )


@lru_cache(maxsize=1)
def _read_decisions(path: Path, *_stamp: int) -> tuple[Approval, ...]:
    """Return every decision in a file; see `Approvals.read_decisions`.

    A site checks its approval with each message, and other jobs in the file may be
    large, so the file is only read again if it has changed.

    Args:
        path: The file.
        _stamp: Facts of the file that differ if it was replaced or changed.
    """
    try:
        contents = read_json(path)
    except (OSError, ValueError) as error:
        raise _make_error(path, "cannot be read as JSON") from error
    try:
        if contents["format"] != FORMAT:
            raise _make_error(
                path,
                f"has format {contents['format']}, but this version reads {FORMAT}",
            )
        tables = contents["jobs"]
        for fingerprint, table in tables.items():
            if fingerprint_table(table) != fingerprint:
                raise _make_error(
                    path, "was edited: a job does not have its fingerprint"
                )
        return tuple(
            Approval(**entry | {"table": tables[entry["fingerprint"]]})
            for entry in contents["decisions"]
        )
    except (LookupError, TypeError, ValueError, AttributeError, RefusedError) as error:
        raise _make_error(path, "was edited, or is not a list of decisions") from error


def _make_error(path: Path, problem: str) -> ConfigError:
    """Return the error for a file of decisions that cannot be used."""
    return ConfigError(
        f"{path}: {problem}: move it away and approve the site's jobs again"
    )


# ---- tables --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NotesDifference:
    """The differences between the notes that two jobs train on.

    The author of both jobs can subtract their sums. The result depends only on the
    sites of one of the two jobs, and on the notes that a site reads for only one of
    them.

    Attributes:
        sites: The sites that only one of the two jobs has, sorted.
        notes: The differences in how the two jobs select the notes of this site, one
            line per key.
    """

    sites: tuple[str, ...]
    notes: tuple[str, ...]

    def list_warnings(self, min_sites: int) -> tuple[str, ...]:
        """Return the warnings to show before a person approves the later job.

        Args:
            min_sites: Minimum number of sites that the difference of two sums may
                cover; the same as for a sum.
        """
        warnings = []
        if 0 < len(self.sites) < min_sites:
            names = ", ".join(clean(site) for site in self.sites)
            warnings.append(
                f"the sums of the two jobs differ only by a few sites ({names}): "
                "whoever subtracts them sees what these sites sent, apart from "
                "the other sites' secret random draws"
            )
        if self.notes:
            warnings.append(
                "this site reads other notes for this job: if only a few notes "
                "differ, the sums of the two jobs can reveal them; [privacy] "
                "bounds what they reveal"
            )
        return tuple(warnings)


def compare_notes(earlier: Table, later: Table, site: str) -> NotesDifference:
    """Compare the notes of an approved job and of a job that waits for approval.

    The site's own file may also say which notes are read. It is not part of a job's
    table, so it is not compared.

    Args:
        earlier: The table of the approved job.
        later: The table of the job that waits.
        site: The name of the site that compares them.

    Raises:
        RefusedError: A table contains values that no job has.
    """
    earlier_sites = set(map(str, earlier.get("sites", ())))
    later_sites = set(map(str, later.get("sites", ())))
    notes = compare_tables(
        _select_settings(earlier, site), _select_settings(later, site)
    )
    return NotesDifference(tuple(sorted(earlier_sites ^ later_sites)), notes)


def _select_settings(table: Table, site: str) -> dict[str, Any]:
    """Return the settings of a job that determine which notes of a site it uses.

    These are the site's table, without its [model] and [training], and the seed for
    splitting and subsampling notes.
    """
    job = table.get("job")
    if not isinstance(job, Mapping):
        job = {}
    site_tables = job.get("sites")
    if not isinstance(site_tables, Mapping):
        site_tables = {}
    site_table = site_tables.get(site) or {}
    if isinstance(site_table, Mapping):
        site_table = {k: v for k, v in site_table.items() if k not in SITE_TABLES}
    return {"sites": {site: site_table}, "seed": job.get("seed", 0)}
