"""Write and read metrics.jsonl, which has one line per evaluation of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednotes.core import bounds
from fednotes.core.errors import DataError, TrainingError, raising_os_errors_as
from fednotes.core.parsing import has_more_values, parse_json
from fednotes.core.store import open_unless_link, write_text
from fednotes.jobs.run_files import parse_object, read_run_text

if TYPE_CHECKING:
    from fednotes.engines.rounds import RoundResult

METRICS = "metrics.jsonl"


def make_entry(
    result: RoundResult,
    part: str,
    condition: str,
    details: Mapping[str, object],
) -> dict[str, Any]:
    """Return the entry of metrics.jsonl for an evaluation.

    Args:
        result: The evaluated round.
        part: Name of the part of the run.
        condition: Condition of the part.
        details: Further values of the entry.
    """
    return {
        "part": part,
        "condition": condition,
        "round": result.round,
        **result.metrics,
        **details,
        "bytes_up": result.bytes_up,
        "bytes_down": result.bytes_down,
        "seconds": round(result.seconds, 3),
    }


def append_entry(path: Path, entry: Mapping[str, object]) -> None:
    """Append an entry to metrics.jsonl.

    Raises:
        TrainingError: The file cannot be written.
    """
    with (
        raising_os_errors_as(TrainingError, path),
        open(path, "a", encoding="utf-8", opener=open_unless_link) as file,
    ):
        file.write(json.dumps(entry) + "\n")


def read_metrics(folder: Path) -> Sequence[Mapping[str, Any]]:
    """Return the entries of a run's metrics.jsonl; none if there is no such file.

    An incomplete last line, as a killed run leaves it, is ignored.

    Args:
        folder: Folder of the run.

    Raises:
        DataError: A line is not a JSON object, or the file exceeds `bounds.FILE` or
            `bounds.JSON_VALUES`.
    """
    path = folder / METRICS
    if not path.is_file():
        return []
    lines = [
        (number, line)
        for number, line in enumerate(_read_bounded(path).split("\n"), 1)
        if line.strip()
    ]
    entries = [parse_object(path, number, line) for number, line in lines[:-1]]
    if lines:
        with suppress(DataError):
            entries.append(parse_object(path, *lines[-1]))
    return entries


def rewind_metrics(path: Path, part: str, round: int) -> list[dict[str, Any]]:
    """Remove a part's entries from `round` on, and incomplete lines.

    The part repeats these rounds, and writes their entries again.

    Args:
        path: The file.
        part: Name of the part.
        round: First round to remove.

    Returns:
        The entries that stay.

    Raises:
        DataError: The file cannot be read, or is larger than `read_metrics` reads.
    """
    entries = [
        entry
        for entry in _read_complete_entries(path)
        if entry["part"] != part or entry["round"] < round
    ]
    _write_entries(path, entries)
    return entries


def order_entries(path: Path, parts: Sequence[str]) -> None:
    """Put the entries of a finished run into the order of its parts.

    Parts that train at the same time write their entries as they come, perhaps before
    the run was resumed.

    Args:
        path: The file.
        parts: Names of the parts in their order.
    """
    entries = _read_complete_entries(path)
    places = {part: place for place, part in enumerate(parts)}
    ordered = sorted(entries, key=lambda entry: places.get(entry["part"], len(places)))
    if ordered != entries:
        _write_entries(path, ordered)


def _read_complete_entries(path: Path) -> list[dict[str, Any]]:
    """Return the entries of the file, without incomplete lines."""
    text = _read_bounded(path) if path.exists() else ""
    entries = []
    for line in text.splitlines():
        # An incomplete line is not JSON, or is not an entry.
        with suppress(ValueError, KeyError, TypeError):
            entry = parse_json(line, strict=False)
            if isinstance(entry["part"], str) and isinstance(entry["round"], int):
                entries.append(entry)
    return entries


def _write_entries(path: Path, entries: Sequence[Mapping[str, Any]]) -> None:
    """Replace the file by these entries."""
    write_text(path, "".join(json.dumps(entry) + "\n" for entry in entries))


def _read_bounded(path: Path) -> str:
    """Return the text of a metrics.jsonl after checking its size.

    The check comes before any line is parsed, so that a huge file cannot fill memory.
    """
    text = read_run_text(path)
    if len(text.encode()) > bounds.FILE:
        raise DataError(
            f"{path}: over {bounds.FILE:,} bytes; fednotes reads no larger file"
        )
    if has_more_values(text, bounds.JSON_VALUES):
        raise DataError(
            f"{path}: more than {bounds.JSON_VALUES:,} values; fednotes reads no "
            "larger file"
        )
    return text
