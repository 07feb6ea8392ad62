"""Whether a site's process and the server hear of each other: a file in the kit's state.

    KIT/state/contact.json      pid, since, last, refused (times in seconds since 1970)

Written by the process itself, of what reached it (`presence.py`), never of what it hopes for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fednotes.core.parsing import read_json
from fednotes.core.store import write_json, write_text

CONTACT_FILE = Path("state") / "contact.json"
SALT_FILE = Path("state") / "place"  # or a server could find out where the kit lies by trying
LOST_SECONDS = 20.0  # a site asks the server every 5 s
LOOK_SECONDS = 5.0
_MACHINE = Path("/etc/machine-id")
logger = logging.getLogger("fednotes.contact")


@dataclass(frozen=True, slots=True)
class Known:
    """What a process knows. since: of the server's first answer without a pause, last: of its
    newest. refused: why the server does not let it in, or empty."""

    pid: int = 0
    since: float = 0.0
    last: float = 0.0
    refused: str = ""


@dataclass
class Contact:
    """Keeps what a site's process knows. now: the time, for tests."""

    kit: Path
    now: Callable[[], float] = time.time
    known: Known = field(default_factory=lambda: Known(os.getpid()))
    away: bool = True
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def heard(self) -> None:
        """The server answered."""
        with self._lock:
            now, first = self.now(), self.away
            since = now if first else self.known.since
            self.known, self.away = Known(self.known.pid, since, now), False
        if first:
            logger.info("connected to the server")
            self._write()

    def refused(self, reason: str) -> None:
        """The server does not let this process in."""
        with self._lock:
            self.known = Known(self.known.pid, 0.0, 0.0, reason)
        logger.error("the server refuses this site: %s", reason)
        self._write()

    def look(self) -> None:
        """What changed since the last look."""
        with self._lock:
            silent = self.now() - self.known.last
            lost, self.away = not self.away and silent > LOST_SECONDS, silent > LOST_SECONDS
        if lost:
            logger.warning("the server has not answered for %.0f s; trying on", silent)
        self._write()

    def _write(self) -> None:
        with suppress(Exception):  # a full disk does not end the connection
            write_json(self.kit / CONTACT_FILE, asdict(self.known))


def every_look(look: Callable[[], object]) -> None:
    """Call `look` every few seconds, in a thread of its own, until the process ends."""

    def go_on() -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            try:
                look()
            except Exception as error:  # whatever it was, the next look is still needed
                logger.warning("%s: %s", type(error).__name__, error)

    threading.Thread(target=go_on, name="look", daemon=True).start()


def contact_of(kit: Path, pid: int | None) -> Known | None:
    """What a running process keeps of itself; None if that is nothing yet."""
    try:
        found: dict[str, Any] = read_json(kit / CONTACT_FILE)
        known = Known(
            int(found["pid"]), float(found["since"]), float(found["last"]), str(found["refused"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return known if known.pid == pid else None


def connected(known: Known | None, now: float) -> bool:
    """Whether the server answered lately."""
    return known is not None and now - known.last <= LOST_SECONDS


def place_of(kit: Path) -> str:
    """Which folder of which machine a kit lies in, as a hash that says nothing else.

    A copy of a kit has another place; the same kit, started again or renewed, has the same.
    """
    machine = _MACHINE.read_text(encoding="ascii") if _MACHINE.exists() else ""
    if not (kit / SALT_FILE).exists():
        write_text(kit / SALT_FILE, secrets.token_hex(16))
    salt = (kit / SALT_FILE).read_text(encoding="ascii")
    where = json.dumps([salt, os.uname().nodename, machine, str(kit.resolve())])
    return hashlib.sha256(where.encode()).hexdigest()[:32]


@dataclass
class Members:
    """Where the processes of each site are, as the server hears of them. now: in seconds."""

    now: Callable[[], float] = time.monotonic
    heard: dict[str, tuple[str, float]] = field(default_factory=dict)  # site → place, when
    silent: set[str] = field(default_factory=set)

    def alive(self, site: str, place: str) -> None:
        """A sign of life of a site that was let in."""
        if site not in self.heard or site in self.silent:
            logger.info("site %r is connected", site)
        self.silent.discard(site)
        self.heard[site] = place, self.now()

    def left(self, site: str) -> None:
        """A site said goodbye."""
        if self.heard.pop(site, None):
            logger.info("site %r has left", site)

    def look(self) -> None:
        """Say once of each site that it is silent."""
        for site, (_, when) in list(self.heard.items()):
            if site not in self.silent and self.now() - when > LOST_SECONDS:
                self.silent.add(site)
                logger.warning("site %r has not been heard of for %.0f s", site, LOST_SECONDS)

    def elsewhere(self, site: str, place: str) -> bool:
        """Whether a process of this site is alive in another place than this."""
        there, when = self.heard.get(site, ("", -LOST_SECONDS))
        return there not in ("", place) and self.now() - when < LOST_SECONDS
