"""Which sites have not approved a run's job yet, and since when."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from fednotes.core.parsing import find_number, read_json_table
from fednotes.core.store import write_json

APPROVALS_FILE = "approvals.json"  # in a run's state on the server
REPEAT_SECONDS = 300.0  # time after which an unchanged list is published again


class PendingApprovals:
    """The sites whose approval a run waits for.

    The names come from the run's own list of sites; a site's messages only decide
    whether the run waits for it. The times are kept on disk, so they survive a restart
    of the server.

    Attributes:
        since: Site to the time at which its approval was first known to be missing, in
            seconds since the epoch.

    Args:
        path: The file that stores the times.
        sites: The sites of the run, in the order in which messages name them.
        clock: Returns the seconds since the epoch.
    """

    def __init__(
        self, path: Path, sites: Collection[str], clock: Callable[[], float] = time.time
    ) -> None:
        self._path = path
        self._sites = tuple(sites)
        self._clock = clock
        saved = read_json_table(path)
        times = {site: find_number(saved, site) for site in self._sites}
        self.since = {site: since for site, since in times.items() if since is not None}
        self._published: tuple[str, ...] = ()
        self._published_at = 0.0

    def add(self, site: str) -> None:
        """Record that a site has not approved the job; keep the earliest time."""
        if site in self._sites and site not in self.since:
            self.since[site] = self._clock()
            write_json(self._path, self.since)

    def remove(self, site: str) -> None:
        """Record that a site has approved or rejected the job."""
        if self.since.pop(site, None) is not None:
            write_json(self._path, self.since)

    def take_news(self) -> dict[str, Any] | None:
        """Return a line of progress that is due, and count it as published.

        A line is due if the list has changed, or after `REPEAT_SECONDS`. Otherwise,
        return None.
        """
        missing_sites = tuple(site for site in self._sites if site in self.since)
        now = self._clock()
        is_old = now - self._published_at >= REPEAT_SECONDS
        is_due = bool(missing_sites) and is_old
        if missing_sites == self._published and not is_due:
            return None
        self._published = missing_sites
        self._published_at = now
        text = describe_waiting(self.since, now) or "all approvals have arrived"
        return {
            "kind": "approvals",
            "since": {site: self.since[site] for site in missing_sites},
            "text": text,
        }

    @property
    def text(self) -> str:
        """The list as a sentence; empty if no approval is missing."""
        return describe_waiting(self.since, self._clock())


def describe_waiting(since: Mapping[str, float], now: float) -> str:
    """Return a sentence naming the sites whose approval is missing, and since when.

    Args:
        since: Site to the time at which its approval was first known to be missing, in
            seconds since the epoch.
        now: The current time, in seconds since the epoch.

    Returns:
        The sentence; empty if no approval is missing.
    """
    if not since:
        return ""
    return f"waiting for the approval of: {list_with_times(since, now)}"


def list_with_times(since: Mapping[str, float], now: float) -> str:
    """Return names with the time for which each has been waited for.

    Args:
        since: Name to the time at which the wait began, in seconds.
        now: The current time, in seconds.
    """
    return ", ".join(
        f"{name} ({_format_minutes(now - start)})" for name, start in since.items()
    )


def _format_minutes(seconds: float) -> str:
    """Return a duration in minutes, such as "2 h 05 min"."""
    minutes = max(0, int(seconds // 60))
    if minutes < 1:
        return "less than 1 min"
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"
