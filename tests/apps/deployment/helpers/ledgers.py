"""Ledgers of messages that were never sent."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from fednotes.apps.deployment.rules.ledger import Entry, Ledger

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
DIGEST = hashlib.sha256(b"the message").hexdigest()
MESSAGE = Entry(NOON, "run-1", 0, "train", "server", (), 4, DIGEST)


def write_ledger(path: Path, lines: int) -> Ledger:
    """Write a ledger of some lines, each of its own round."""
    ledger = Ledger(path)
    for number in range(lines):
        ledger.append(replace(MESSAGE, round=number))
    return ledger


def rehashed(line: bytes) -> bytes:
    """Return a changed line with the hash of its new content, as a forger would."""
    body = line[: line.rindex(b',"hash"')]
    return body + f',"hash":"{hashlib.sha256(body).hexdigest()}"}}\n'.encode()


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)
