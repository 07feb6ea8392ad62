"""The sites of a run that are not connected: since when, and whether they ever were.

    KIT/state/sites.json    at the server: when each site was first connected

A site that has never connected may be one that nobody has started yet, or a name that
the job misspells. The server cannot tell these apart, because only the authority knows
all sites of a project. The messages therefore name both, and the sites that are
connected without being in the job.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fednotes.apps.deployment.waiting import REPEAT_SECONDS
from fednotes.core.errors import suggest_name
from fednotes.core.parsing import read_json_table
from fednotes.core.store import write_json

GRACE_SECONDS = 15.0  # time after which an absent site is named
SITES_FILE = "sites.json"  # in the folder of the runs' states at the server


def read_known_sites(state: Path) -> frozenset[str]:
    """Return the sites that have ever been connected to a server.

    Args:
        state: The folder of the runs' states in the server's kit.
    """
    return frozenset(read_json_table(state / SITES_FILE))


def record_known_sites(state: Path, connected: Iterable[str], now: float) -> None:
    """Record the time of each site that is connected for the first time.

    Args:
        state: The folder of the runs' states in the server's kit.
        connected: The sites that are connected.
        now: The current time, in seconds since the epoch.
    """
    first_times = read_json_table(state / SITES_FILE)
    new_sites = sorted(set(connected) - set(first_times))
    if new_sites:
        write_json(state / SITES_FILE, {**first_times, **dict.fromkeys(new_sites, now)})


@dataclass
class AbsentSites:
    """The sites of a run that are not connected.

    Attributes:
        since: Site to the time at which its absence was noticed, in seconds.
    """

    since: dict[str, float] = field(default_factory=dict)
    _named_sites: tuple[str, ...] = ()
    _named_at: float = -math.inf

    def update(
        self, sites: Iterable[str], connected: Collection[str], now: float
    ) -> bool:
        """Record which sites are connected, and return whether to name the others.

        A site is named once it has been absent for `GRACE_SECONDS`, because sites
        reconnect one by one after a restart of the server. The names are repeated when
        they change, and after `REPEAT_SECONDS`.

        Args:
            sites: The sites of the run.
            connected: The sites that are connected.
            now: The current time, in seconds.
        """
        self.since = {
            site: self.since.get(site, now) for site in sites if site not in connected
        }
        absent_sites = tuple(
            site for site, start in self.since.items() if now - start >= GRACE_SECONDS
        )
        is_old = now - self._named_at >= REPEAT_SECONDS
        if absent_sites == self._named_sites and not is_old:
            return False
        self._named_sites = absent_sites
        self._named_at = now
        return bool(absent_sites)


def describe_unknown_sites(
    sites: Collection[str], known: Collection[str], connected: Collection[str]
) -> str:
    """Return the sites of a job that have never connected, in words.

    Args:
        sites: The sites of the job.
        known: The sites that have ever been connected to the server.
        connected: The sites that are connected now.

    Returns:
        A phrase that also names the connected sites that are not in the job; "" if all
        sites of the job are known.
    """
    unknown_sites = [site for site in sites if site not in known]
    if not unknown_sites:
        return ""
    text = f"no site {' or '.join(map(repr, unknown_sites))} has ever connected"
    strangers = describe_strangers(unknown_sites, sites, connected)
    return f"{text} ({strangers})" if strangers else text


def describe_strangers(
    absent: Collection[str], sites: Collection[str], connected: Collection[str]
) -> str:
    """Return, in words, the connected sites that are not in a job.

    One of them may be an absent site whose name the job misspells.

    Args:
        absent: The sites of the job that are not connected.
        sites: All sites of the job.
        connected: The sites that are connected.

    Returns:
        A phrase with the connected sites that are not in the job, and the most similar
        name; "" if all connected sites are in the job.
    """
    strangers = sorted(set(connected) - set(sites))
    if not strangers:
        return ""
    text = f"connected, but not in this job: {', '.join(strangers)}"
    hints = (suggest_name(site, strangers, fallback="") for site in absent)
    hint = next(filter(None, hints), "")
    return f"{text}; {hint}" if hint else text
