"""What lies in a kit and in a job's folder: who a kit is of, and NVFlare's files.

The tables are in `kit.toml`: the rules and settings of an owner's machine, and the few
classes that a job may name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from fednotes.core.errors import ConfigError, FednotesError
from fednotes.core.parsing import read_json, shipped
from fednotes.core.store import write_folder, write_json

SERVER, SITE, ADMIN, WATCH = "server", "site", "admin", "watch"
KIT_FILE, LOG_FILE, COMM_FILE = "kit.json", "fednotes.log", "comm_config.json"
# the folder of the socket by which a kit's processes are connected; its scheme
INSIDE = "inside"
RENEWED = ("local/resources.json", "local/log_config.json", COMM_FILE)  # at each start
HEARTBEAT_SECONDS = 5.0  # how often a site's processes tell that they live
POLL_SECONDS = 0.05  # how often an idle site asks for work
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


class Kit(BaseModel):
    """`kit.json`: what a kit's owner is in the network. person: whose certificate an
    admin's session has; that of the server is its watch's, with which it asks itself.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    role: Literal["server", "site", "admin"]
    project: str
    server: str
    port: int
    person: str
    org: str


def read_kit(kit: Path) -> Kit:
    """What a kit says of itself. Raises ConfigError if the folder is no kit."""
    try:
        return Kit.model_validate(read_json(kit / KIT_FILE))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{kit}: not a kit (`fednotes provision` makes kits)"
        ) from error


def in_order(jobs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return submissions in the order in which they were handed in.

    One that repeats another names it ("cloned_from"), and follows it whatever the
    server's clock
    said: a clock that was set back in between would make the older one look new, and
    the watch would hand the run in again and again. Between others the time decides.
    """
    known = {str(job["job_id"]): job for job in jobs}

    def time(job: Mapping[str, Any]) -> float:
        return float(job.get("submit_time") or 0)

    def order(job: Mapping[str, Any]) -> tuple[float, int, float]:
        first, before = job, list[str]()
        while (origin := str(first.get("cloned_from") or "")) not in ("", *before):
            before.append(origin)
            if origin not in known:  # it was deleted
                break
            first = known[origin]
        return time(first), len(before), time(job)

    return [dict(job) for job in sorted(known.values(), key=order)]


def loose_keys(kit: Path) -> list[Path]:
    """Return the private keys of a kit that other users of the machine can read."""
    return [key for key in sorted(kit.rglob("*.key")) if key.stat().st_mode & 0o077]


def kit_files(facts: Kit, kit: Path) -> dict[str, Any]:
    """NVFlare's files of a kit: path in it → JSON. kit: where the kit lies, for NVFlare
    takes absolute paths only for its stores."""
    tables = dict(_tables()[facts.role])
    if facts.role != ADMIN:
        tables |= _tables()["both"]
    if facts.role == SERVER:
        tables |= {f"{WATCH}/{name}": table for name, table in _tables()[ADMIN].items()}
    made: dict[str, Any] = _filled(tables, {**facts.model_dump(), "kit": str(kit)})
    return made


@cache
def _tables() -> dict[str, Any]:
    return shipped("apps/deployment/nvflare/kit.toml")


def _filled(value: Any, words: Mapping[str, Any]) -> Any:
    """A table with its $words filled in; a value that is one word alone keeps the
    word's type."""
    if isinstance(value, dict):
        return {name: _filled(inner, words) for name, inner in value.items()}
    if isinstance(value, list):
        return [_filled(inner, words) for inner in value]
    if isinstance(value, str) and "$" in value:
        return (
            words[value[1:]]
            if value[1:] in words
            else Template(value).substitute(words)
        )
    return value


def job_folder(
    out: Path, job: Mapping[str, Any], *, run: str, sites: Sequence[str], min_sites: int
) -> Path:
    """Write the folder that NVFlare takes as a job: a declaration, and no code.

    job: JSON values. run: names the run, the same when it goes on after a failure.
    sites: in the order in which their replies are added. min_sites: fewer do not begin.
    """
    if not NAME.fullmatch(run):
        raise ConfigError(f"run {run!r}: letters, digits, '_', '.' and '-' only")
    if not 1 <= min_sites <= len(set(sites)) or len(set(sites)) != len(sites):
        raise ConfigError(
            f"min_sites = {min_sites} of {len(set(sites))} sites: impossible"
        )
    # many idle sites would keep the server busy
    poll = POLL_SECONDS * max(1.0, len(sites) / 3)
    words = {"run": run, "least": min_sites, "sites": list(sites), "job": dict(job)}
    words |= {
        "places": ["server", *sites],
        "poll": poll,
        "heartbeat": HEARTBEAT_SECONDS,
    }

    def fill(folder: Path) -> None:
        (folder / "app" / "config").mkdir(parents=True)
        for name, table in _filled(_tables()["job"], words).items():
            write_json(folder / name, table)

    folder = out / run
    try:
        write_folder(folder, fill)
    except (TypeError, ValueError) as error:
        raise FednotesError(
            f"{folder}: the job holds a value that JSON does not know"
        ) from error
    return folder
