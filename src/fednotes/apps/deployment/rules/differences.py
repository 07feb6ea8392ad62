"""Refuse a job whose training examples differ by few from those of an earlier job.

The author of two jobs can subtract their sums (docs/privacy.md, "Two jobs"). The
difference reveals most if few examples differ. A site with `[policy] min_difference =
N` therefore remembers the training examples of each run that it joins, and refuses a
run whose examples differ from those of an earlier run by at least one and fewer than N.

    KIT/rules/examples/record.json   the runs, with a digest of each example
    KIT/rules/examples/secret.key    the secret that the digests are keyed with

A digest is 16 bytes of an HMAC-SHA256. Without the secret, the record reveals how many
examples there were and which runs shared some, but no text can be compared with it. The
record ends with an authentication code, so that edits are noticed. Both files are
created together; if one is missing or damaged, the site joins no run.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from fednotes.apps.deployment.rules.policy import Policy, check_difference
from fednotes.core import bounds
from fednotes.core.cleaning import NAME, clean
from fednotes.core.errors import ConfigError
from fednotes.core.parsing import read_json
from fednotes.core.store import (
    create_private_folder,
    locking_file,
    write_folder,
    write_json,
)

FOLDER = "examples"  # in the rules of a kit
RECORD = "record.json"
SECRET = "secret.key"
DIGEST_BYTES = 16
_KEY_BYTES = 32
_MAX_BYTES = bounds.FILE // 2  # of the record, well below the limit of readable files
_SHOWN = 12  # characters of a job's fingerprint to display

# Name of a view → the examples in it, as bytes.
Views = Mapping[str, Iterable[bytes]]
# Name of a view → the digests of its examples.
_ViewDigests = Mapping[str, frozenset[bytes]]


@dataclass(frozen=True)
class JoinedRun:
    """A run of a job that a site joins.

    Attributes:
        run: The run's name.
        job: The fingerprint of its job.
        sites: All sites of the job.
    """

    run: str
    job: str
    sites: tuple[str, ...]


class _Entry(BaseModel):
    """One run in the record.

    Attributes:
        run: The run's name.
        job: The fingerprint of its job.
        sites: All sites of the job.
        views: Name of each view → the key of its digests in `sets` of the record.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    run: str
    job: str
    sites: list[str]
    views: dict[str, str]

    def is_of(self, joining: JoinedRun) -> bool:
        """Return whether this is an entry of the run that a site joins."""
        return self.run == joining.run and self.job == joining.job


class _Record(BaseModel):
    """The contents of the record.

    Attributes:
        format: Version of the format.
        runs: The runs, in the order in which the site joined them.
        sets: Sorted digests in base64, each set once, by the hash of the set.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[1] = 1
    runs: list[_Entry] = []
    sets: dict[str, str] = {}

    def authenticate(self, secret: bytes) -> str:
        """Return the code that shows whether the record is unchanged."""
        text = json.dumps(self.model_dump(), sort_keys=True, separators=(",", ":"))
        return hmac.new(secret, text.encode(), "sha256").hexdigest()

    def to_table(self, secret: bytes) -> dict[str, Any]:
        """Return the contents of the record's file, with the authentication code."""
        return {**self.model_dump(), "code": self.authenticate(secret)}

    def read_digests(self, entry: _Entry, view: str) -> frozenset[bytes]:
        """Return the digests of one view of a run in this record."""
        raw = base64.b64decode(self.sets[entry.views[view]])
        return frozenset(
            raw[start : start + DIGEST_BYTES]
            for start in range(0, len(raw), DIGEST_BYTES)
        )


class ExampleRecord:
    """The training examples of the runs that one site joined.

    Args:
        rules: The folder of the site's rules, in its kit.
    """

    def __init__(self, rules: Path) -> None:
        self.folder = rules / FOLDER

    def compare_and_record(
        self, joining: JoinedRun, read_examples: Callable[[], Views], policy: Policy
    ) -> None:
        """Compare a run's training examples with earlier runs, then record them.

        A run is not compared with itself, because a site that resumes a run calls this
        again. With `min_difference = 0` nothing is read, compared or written.

        Args:
            joining: The run that the site is about to join.
            read_examples: Returns the training examples as bytes, in one or several
                views. A view omits a part of the examples, such as labels; runs are
                compared in each view that both have. An example that occurs twice
                counts twice.
            policy: The site's rules.

        Raises:
            PolicyRefusal: The examples differ from those of an earlier run by at least
                one and fewer than `min_difference`. In this case, nothing is recorded.
            ConfigError: The record or its secret is missing or damaged, or the record
                would be too large. In this case, no run may be joined.
            FednotesError: The record cannot be written.
        """
        if not policy.min_difference:
            return
        create_private_folder(self.folder.parent)
        with locking_file(self.folder.with_suffix(".lock")):
            if not self.folder.exists():
                self._create()
            secret, record = self._read()
            view_digests = {
                view: digest_examples(secret, view, examples)
                for view, examples in read_examples().items()
            }
            for earlier in record.runs:
                if not earlier.is_of(joining):
                    _require_difference(record, earlier, view_digests, policy)
            self._remember(joining, view_digests, secret=secret, record=record)

    def _create(self) -> None:
        """Write a new secret, and a record without runs."""
        secret = secrets.token_bytes(_KEY_BYTES)

        def fill(folder: Path) -> None:
            (folder / SECRET).write_bytes(secret)
            write_json(folder / RECORD, _Record().to_table(secret))

        write_folder(self.folder, fill)

    def _read(self) -> tuple[bytes, _Record]:
        """Return the secret and the record.

        Raises:
            ConfigError: One of them is missing, damaged or edited.
        """
        try:
            secret = (self.folder / SECRET).read_bytes()
            table = dict(read_json(self.folder / RECORD))
            stored_code = table.pop("code")
            record = _Record.model_validate(table)
            code = record.authenticate(secret)
            is_unchanged = hmac.compare_digest(stored_code, code)
            if len(secret) != _KEY_BYTES or not is_unchanged:
                raise ValueError("changed since it was written")
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise ConfigError(
                f"{self.folder}: {RECORD} or {SECRET} is missing, damaged or edited, "
                "so it is unknown which examples earlier jobs trained on, and "
                "min_difference keeps the site out of every run: restore a copy of "
                "the folder; if there is none, move the folder away (new jobs are "
                "then no longer compared with the jobs in it)"
            ) from error
        return secret, record

    def _remember(
        self,
        joining: JoinedRun,
        view_digests: _ViewDigests,
        *,
        secret: bytes,
        record: _Record,
    ) -> None:
        """Add a run to the record, unless the record has it with the same examples."""
        views = {}
        sets = dict(record.sets)
        for view, digests in view_digests.items():
            raw = b"".join(sorted(digests))
            key = hashlib.sha256(raw).hexdigest()
            views[view] = key
            sets[key] = base64.b64encode(raw).decode()
        entry = _Entry(
            run=joining.run,
            job=joining.job,
            sites=sorted(joining.sites),
            views=views,
        )
        if entry in record.runs:
            return

        new_record = _Record(runs=[*record.runs, entry], sets=sets)
        table = new_record.to_table(secret)
        size = len(json.dumps(table, indent=2, ensure_ascii=False))
        if size > _MAX_BYTES:
            raise ConfigError(
                f"{self.folder}: the record of earlier jobs' examples would grow "
                f"to {size:,} bytes, but at most {_MAX_BYTES:,} are allowed: archive "
                "this folder elsewhere; new jobs are then no longer compared with the "
                "jobs in it"
            )
        write_json(self.folder / RECORD, table)


def digest_examples(
    secret: bytes, view: str, examples: Iterable[bytes]
) -> frozenset[bytes]:
    """Return a keyed digest of each example; repeated examples get different digests.

    Args:
        secret: The secret of the site's record.
        view: The name of the examples' view.
        examples: The examples as bytes, in any order.

    Returns:
        One digest of `DIGEST_BYTES` bytes per example.
    """
    view_key = hmac.digest(secret, view.encode(), "sha256")
    occurrences: Counter[bytes] = Counter()
    digests = set()
    for example in examples:
        content_digest = hmac.digest(view_key, example, "sha256")
        occurrences[content_digest] += 1
        occurrence = occurrences[content_digest].to_bytes(8, "big")
        digest = hmac.digest(view_key, content_digest + occurrence, "sha256")
        digests.add(digest[:DIGEST_BYTES])
    return frozenset(digests)


def _require_difference(
    record: _Record, earlier: _Entry, view_digests: _ViewDigests, policy: Policy
) -> None:
    """Check that examples equal those of an earlier run, or differ in enough of them.

    Args:
        record: The record.
        earlier: The earlier run in the record.
        view_digests: The digests of the examples.
        policy: The site's rules.

    Raises:
        PolicyRefusal: They differ in too few examples.
    """
    fingerprint = earlier.job[:_SHOWN]
    name = f"an earlier job ({fingerprint}, run {clean(earlier.run, NAME)})"
    for view, digests in view_digests.items():
        if view not in earlier.views:
            continue
        in_one_only = digests ^ record.read_digests(earlier, view)
        check_difference(policy, len(in_one_only), view=view, earlier=name)
