"""What other applications may read of a site's kit: its ledger.

It is registered as an entry point of the group `fednotes.ledgers`; the local page shows
it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fednotes.apps.deployment.nvflare.kit import KIT_FILE
from fednotes.apps.deployment.rules.ledger import LedgerReport, ledger_of, show, verify


def is_kit(folder: Path) -> bool:
    """Return whether a folder is a kit."""
    return (folder / KIT_FILE).is_file()


def read_ledger(kit: Path) -> tuple[LedgerReport, list[dict[str, Any]]]:
    """Return the verdict on a kit's ledger, and its lines, oldest first.

    Raises:
        DataError: The ledger cannot be read, or a line is none of a ledger.
    """
    path = ledger_of(kit).path
    lines = list(show(path))
    return verify(path), lines
