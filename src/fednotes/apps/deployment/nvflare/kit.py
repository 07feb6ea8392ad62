"""The contents of a kit and of a job's folder: who owns a kit, and NVFlare's files.

The tables are in `kit.toml`: the rules and settings of an owner's machine, and the few
classes that a job may name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from fednotes.core.errors import ConfigError, FednotesError, suggest_name
from fednotes.core.parsing import (
    as_mapping,
    find_number,
    read_json,
    read_json_table,
    read_shipped_table,
)
from fednotes.core.store import write_folder, write_json
from fednotes.engines.launch import STATE_FILES

SERVER = "server"
SITE = "site"
ADMIN = "admin"
WATCH = "watch"
KIT_FILE = "kit.json"
LOG_FILE = "fednotes.log"
COMM_FILE = "comm_config.json"
# The folder of the socket that connects a kit's processes. The socket's address has
# the same scheme.
INSIDE = "inside"
# A kit starts without these files.
REWRITTEN_FILES = ("local/resources.json", "local/log_config.json", COMM_FILE)
# The folders from whose files NVFlare takes names of classes, and modules of code.
_CODE_FOLDERS = ("startup", "local", f"{WATCH}/startup", f"{WATCH}/local")
# Endings of other files there: keys, certificates, and a file that is being written.
_OTHER_SUFFIXES = (".key", ".crt", ".pem", ".tmp")
# What NVFlare lets the process of a job import. A job has no code, so in this folder,
# which NVFlare creates, there is at most the file with NVFlare's signatures.
_CODE_OF_JOBS = "*/app_*/custom/*"
_SIGNATURE_FILE = ".__nvfl_sig.json"
# At the server, these rules are its owner's. Each site has its own.
_SERVER_RULES = "local/authorization.json"
HEARTBEAT_SECONDS = 5.0  # between two heartbeats of a site's processes
ABORTED = "FINISHED:ABORTED"  # NVFlare's status of a job that a person aborted
POLL_SECONDS = 0.05  # between two requests of an idle site for work
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")


class Kit(BaseModel):
    """`kit.json`: who owns a kit, and where the network is.

    Attributes:
        name: The owner's name.
        role: The owner's role in the network.
        project: The project's name.
        server: The server's host.
        port: The server's port.
        person: The person in the certificate of an admin's kit. A server's kit has the
            person of its watch, which is the identity with which the server's machine
            queries the server. A site's kit has "".
        org: The owner's organisation, as NVFlare writes it.
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
    """Return the facts in a kit's `kit.json`.

    Raises:
        ConfigError: The folder is not a kit.
    """
    try:
        return Kit.model_validate(read_json(kit / KIT_FILE))
    except (OSError, ValueError) as error:
        problem = "give a folder that `fednotes provision` created"
        if not kit.exists():
            problem = f"there is no such folder: {_suggest_kit(kit)}"
        raise ConfigError(f"{kit} is not a kit: {problem}") from error


def _suggest_kit(missing: Path) -> str:
    """Return a hint for the misspelt folder of a kit, from the kits beside it."""
    try:
        kits = [path.parent for path in missing.parent.glob(f"*/{KIT_FILE}")]
    except OSError:
        kits = []
    return suggest_name(missing, map(str, kits), fallback="give the folder of a kit")


def can_name_run(name: str) -> bool:
    """Return whether a text can be the name of a run, and of the folder of its state.

    The folder must not take the place of a file of the kit.
    """
    return bool(NAME.fullmatch(name)) and name.lower() not in STATE_FILES


def order_submissions(jobs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return submissions in the order in which they were submitted.

    A submission that repeats another one names it (`cloned_from`) and follows it,
    regardless of the server's clock. Otherwise, if the clock was set back in between,
    the older submission would look newer, and the watch would resubmit the run forever.
    All other submissions are ordered by time.

    NVFlare checks few of the facts, which any admin of the project can write. A
    submission whose name cannot be that of a run gets its id as its name, because the
    state of a run is in a folder of its name.

    Args:
        jobs: NVFlare's facts of each submission, among them `job_id`.
    """
    jobs_by_id = {
        str(job["job_id"]): _make_name_safe(job)
        for job in jobs
        if NAME.fullmatch(str(job.get("job_id")))
    }
    order = _SubmissionOrder(jobs_by_id)
    return [dict(jobs_by_id[job_id]) for job_id in sorted(jobs_by_id, key=order.rank)]


class _SubmissionOrder:
    """The order of submissions, some of which repeat earlier ones.

    Args:
        jobs: NVFlare's facts of each submission, by its id.
    """

    def __init__(self, jobs: Mapping[str, Mapping[str, Any]]) -> None:
        self._jobs = jobs
        # For each submission whose chain of origins was followed: the time of the first
        # submission of the chain, and the number of repetitions since.
        self._places: dict[str, tuple[float, int]] = {}

    def rank(self, job_id: str) -> tuple[float, int, float]:
        """Return the sort key of a submission.

        It is the time of the first submission, the number of repetitions since, and the
        time of this one. Both times are by the server's clock.
        """
        if job_id not in self._places:
            self._place_chain(job_id)
        return *self._places[job_id], self._get_time(job_id)

    def _place_chain(self, job_id: str) -> None:
        """Find the places of a submission and of those that it repeats."""
        # From the submission to its origins. A dictionary keeps this order and reveals
        # a circle, which a forged history may contain.
        chain = {job_id: None}
        origin = self._find_origin(job_id)
        while (
            origin in self._jobs and origin not in chain and origin not in self._places
        ):
            chain[origin] = None
            origin = self._find_origin(origin)

        oldest = next(reversed(chain))
        if origin in self._places:
            first_time, repetitions = self._places[origin]
            repetitions += 1
        else:
            first_time = self._get_time(oldest)
            # An origin that is not placed was deleted, or the chain is a circle.
            repetitions = 1 if origin else 0
        for number, each in enumerate(reversed(chain), repetitions):
            self._places[each] = (first_time, number)

    def _find_origin(self, job_id: str) -> str:
        """Return the id of the submission that a submission repeats; "" for none."""
        return str(self._jobs[job_id].get("cloned_from") or "")

    def _get_time(self, job_id: str) -> float:
        """Return when a job was submitted; 0 if that is unknown."""
        return find_number(self._jobs[job_id], "submit_time") or 0.0


def _make_name_safe(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the facts of a submission, with a name that can be that of a run."""
    name = job.get("name")
    if not isinstance(name, str) or not can_name_run(name):
        name = str(job["job_id"])
    return {**job, "name": name, "status": str(job.get("status") or "")}


def list_job_sites(job: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the sites to which a job is deployed, in the job's order.

    Args:
        job: NVFlare's facts of a submission.
    """
    places = [
        place
        for listed_places in as_mapping(job.get("deploy_map")).values()
        if isinstance(listed_places, list | tuple)
        for place in listed_places
        if isinstance(place, str)
    ]
    return tuple(place for place in dict.fromkeys(places) if place != SERVER)


def read_submission(kit: Path, job_id: str) -> dict[str, Any]:
    """Return the job file of a submission in a kit; {} if it cannot be read.

    Args:
        kit: The kit.
        job_id: NVFlare's id of the submission.

    Returns:
        A table with `run`, `job`, `sites` and `min_sites`.
    """
    for path in (kit / job_id).glob("app*/config/job.json"):
        return read_json_table(path)
    return {}


def find_loose_keys(kit: Path) -> list[Path]:
    """Return the private keys of a kit that other users of the machine can read."""
    return [key for key in sorted(kit.rglob("*.key")) if key.stat().st_mode & 0o077]


def build_kit_files(facts: Kit, kit: Path) -> dict[str, Any]:
    """Return the content of NVFlare's files in a kit.

    Args:
        facts: The facts in `kit.json`.
        kit: The kit's folder; NVFlare takes only absolute paths for its stores.

    Returns:
        The path of each file within the kit, with its JSON value.
    """
    templates = _read_tables()
    tables = dict(templates[facts.role])
    if facts.role != ADMIN:
        tables |= templates["both"]
    if facts.role == SERVER:
        # The server's watch connects as an admin, from a folder of its own.
        for name, table in templates[ADMIN].items():
            tables[f"{WATCH}/{name}"] = table
    values = {**facts.model_dump(), "kit": str(kit)}
    files: dict[str, Any] = _fill_in(tables, values)
    return files


@cache
def _read_tables() -> dict[str, Any]:
    """Return the templates of NVFlare's files, by the role of the kit."""
    return read_shipped_table("apps/deployment/nvflare/kit.toml")


def restore_kit_files(kit: Path, facts: Kit) -> None:
    """Write NVFlare's files of a kit again if they differ from those of this version.

    The files contain the kit's folder and names of classes. Kits therefore still work
    after they were moved, or if an earlier version created them. A kit that somebody
    changed on its way to its owner cannot run code.

    The code of jobs is deleted: the server unpacks a job before it refuses its code,
    and must start again afterwards.

    Raises:
        ConfigError: The kit has further files, from which NVFlare could load code.
    """
    files = build_kit_files(facts, kit)
    for path in (path for folder in _CODE_FOLDERS for path in kit.glob(f"{folder}/*")):
        is_known = path.relative_to(kit).as_posix() in files
        if not is_known and (path.is_dir() or path.suffix not in _OTHER_SUFFIXES):
            raise _make_code_error(path)
    for path in kit.glob(_CODE_OF_JOBS):
        _delete_code(path, kit)
    for name, table in files.items():
        is_of_owner = facts.role == SERVER and name == _SERVER_RULES
        if not is_of_owner and read_json_table(kit / name) != table:
            write_json(kit / name, table)


def _delete_code(path: Path, kit: Path) -> None:
    """Delete a file or folder of a job's code, but not NVFlare's signatures.

    Raises:
        ConfigError: The path leads out of the kit by a link, so it is not deleted.
    """
    folder = path.parent
    if folder.resolve() != kit.resolve() / folder.relative_to(kit):
        raise _make_code_error(path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif path.name != _SIGNATURE_FILE:
        path.unlink()


def _make_code_error(path: Path) -> ConfigError:
    """Return the error about a file or folder that no kit has."""
    return ConfigError(
        f"{path}: not a file of a kit, and NVFlare could run code from it: ask for a "
        "new kit, over a channel that you trust"
    )


def _fill_in(value: Any, words: Mapping[str, Any]) -> Any:
    """Return a value in which every $word is replaced.

    A string that consists of one $word becomes the word's value, of whatever type.
    """
    if isinstance(value, dict):
        return {name: _fill_in(inner, words) for name, inner in value.items()}
    if isinstance(value, list):
        return [_fill_in(inner, words) for inner in value]
    if not isinstance(value, str) or "$" not in value:
        return value
    word = value[1:]
    if word in words:
        return words[word]
    return Template(value).substitute(words)


def write_job_folder(
    out: Path, job: Mapping[str, Any], *, run: str, sites: Sequence[str], min_sites: int
) -> Path:
    """Write the folder that NVFlare accepts as a job: a declaration without code.

    Args:
        out: Parent of the new folder.
        job: The job, as JSON values.
        run: The run's name, which all its submissions share.
        sites: The sites, in the order in which their updates are added.
        min_sites: Minimum number of sites with which the job begins.

    Returns:
        The new folder, `out`/`run`.

    Raises:
        ConfigError: The run's name or the number of sites is not possible.
        FednotesError: The job holds a value that JSON cannot represent.
    """
    if not NAME.fullmatch(run):
        raise ConfigError(f"run {run!r}: use letters, digits, '_', '.' and '-' only")
    if not can_name_run(run):
        raise ConfigError(
            f"run {run!r}: a kit has a file of this name beside the states of runs: "
            "choose another name"
        )
    if len(set(sites)) != len(sites):
        raise ConfigError(f"sites {', '.join(sites)}: each must be named once")
    if not 1 <= min_sites <= len(sites):
        raise ConfigError(
            f"min_sites = {min_sites} of {len(sites)} sites: expected 1 to {len(sites)}"
        )
    words = {
        "run": run,
        "least": min_sites,
        "sites": list(sites),
        "job": dict(job),
        "places": ["server", *sites],
        # With many sites, each polls less often. Otherwise they would overload the
        # server.
        "poll": POLL_SECONDS * max(1.0, len(sites) / 3),
        "heartbeat": HEARTBEAT_SECONDS,
    }

    def fill(folder: Path) -> None:
        """Write the files of the job."""
        (folder / "app" / "config").mkdir(parents=True)
        for name, table in _fill_in(_read_tables()["job"], words).items():
            write_json(folder / name, table)

    folder = out / run
    try:
        write_folder(folder, fill)
    except (TypeError, ValueError) as error:
        raise FednotesError(
            f"{folder}: the job holds a value that JSON cannot represent"
        ) from error
    return folder
