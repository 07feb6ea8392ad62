"""The part of a site's kit that other applications may read: its ledger.

This module is registered as an entry point of the group `fednotes.ledgers`; the local
page shows the ledger.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fednotes.apps.deployment.nvflare.kit import KIT_FILE
from fednotes.apps.deployment.rules.ledger import (
    Ledger,
    LedgerReport,
    get_head_path,
    read_ledger_lines,
    verify_ledger,
)
from fednotes.core.errors import DataError


def is_kit(folder: Path) -> bool:
    """Return whether a folder is a kit."""
    return (folder / KIT_FILE).is_file()


def read_ledger(kit: Path) -> tuple[LedgerReport, list[dict[str, Any]]]:
    """Return the verdict on a kit's ledger, and its lines, oldest first.

    If the ledger was altered, the lines end before the first line that is invalid. A
    site that has sent nothing has no ledger yet, and no lines.

    Raises:
        DataError: The ledger cannot be read, or a line is invalid.
    """
    path = Ledger.in_kit(kit).path
    if not path.exists() and not get_head_path(path).exists():
        return LedgerReport(path, 0, faults=(), notes=(), head=None), []
    report = verify_ledger(path)
    lines: list[dict[str, Any]] = []
    try:
        lines.extend(read_ledger_lines(path))  # keeps those before an error
    except DataError:
        if report.is_intact:
            raise
    return report, lines
