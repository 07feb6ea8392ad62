"""Formatting of sizes, durations and long lists for users."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ("B", "kB", "MB", "GB")


def format_size(count: float) -> str:
    """Format a number of bytes, with decimal units, such as "1.5 MB"."""
    for unit in _UNITS:
        if abs(count) < 999.5:
            return _format_with_unit(count, unit)
        count /= 1000
    return _format_with_unit(count, "TB")


def _format_with_unit(value: float, unit: str) -> str:
    """Return a value with up to three significant digits, and its unit."""
    number = f"{value:.3g}" if abs(value) < 99.95 else f"{value:.0f}"
    return f"{number} {unit}"


def format_duration(seconds: float) -> str:
    """Format a number of seconds as a duration, such as "1 h 02 min"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        minutes, remaining_seconds = divmod(int(seconds), 60)
        return f"{minutes} min {remaining_seconds:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def format_pace(number: int, noun: str, seconds: float) -> str:
    """Format how long some items took, such as "12.3 s, 8.1 notes/s".

    Args:
        number: How many items there were.
        noun: What they are, in the plural.
        seconds: How long they took.
    """
    rate = number / max(seconds, 1e-9)
    shown_rate = f"{rate:.1f}" if rate < 100 else f"{rate:,.0f}"
    return f"{format_duration(seconds)}, {shown_rate} {noun}/s"


def format_rough_duration(seconds: float) -> str:
    """Format an estimate of a duration, such as "about 12 min"."""
    if seconds < 60:
        return "less than a minute"
    if seconds < 3600:
        return f"about {round(seconds / 60)} min"
    return f"about {seconds / 3600:.2g} h"


def format_count(number: int, noun: str, plural: str = "") -> str:
    """Format a number of things, such as "1 type" or "1,200 types".

    Args:
        number: How many there are.
        noun: What is counted, in the singular.
        plural: Its plural, unless that only adds an "s".
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {plural or noun + 's'}"


def list_names(names: Sequence[str], limit: int = 6) -> str:
    """Return names in one line, such as "a, b and 3 more".

    Args:
        names: The names.
        limit: Number of names that are listed; the others are only counted.
    """
    listed = ", ".join(names[:limit])
    unlisted = len(names) - limit
    return f"{listed} and {unlisted} more" if unlisted > 0 else listed
