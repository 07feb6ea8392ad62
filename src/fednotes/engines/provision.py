"""Start-up kits: one folder for the server, each site and the admin, to hand over.

A kit holds a key, a certificate of the project's own authority, where the server is, and the
rules that its owner's machine keeps: no job with code from anyone, one class that a job may name,
no remote shell, no logs that travel. The authority's folder stays with whoever provisions; it
serves to add a site later. Nothing here uses the network.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError, FednotesError
from fednotes.core.store import write_folder, write_json

SERVER, SITE, ADMIN, WATCH = "server", "site", "admin", "watch"
CONTROLLER = "fednotes.engines.nvflare.FednotesController"
EXECUTOR = "fednotes.engines.nvflare_site.FednotesExecutor"
GATES = {SERVER: "fednotes.engines.nvflare.Gate", SITE: "fednotes.engines.nvflare_site.Gate"}
KIT_FILE = "kit.json"
LOG_FILE = "fednotes.log"
LOG_BYTES, LOG_FILES = 2_000_000, 4  # a log is at most 2 MB, and three older ones are kept
HEARTBEAT_SECONDS = 5.0  # how often a site's job process tells that it lives
POLL_SECONDS = 0.05  # how often an idle site asks for work
DAYS = 360  # NVFlare's certificates live as long at most
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
_RESERVED = frozenset({"server", "admin", "watch", "authority"})
_NVFLARE = "nvflare.lighter.impl"


@dataclass(frozen=True, slots=True)
class ProjectConfig:
    """A network of sites.

    name: of the project. server: the host name by which sites reach the server. port: its one
    port. sites: their names, in any order. hosts: further names of the server.
    admin: e-mail address of who submits jobs. organisations: site → organisation.
    """

    name: str
    server: str
    sites: tuple[str, ...]
    port: int = 8002
    hosts: tuple[str, ...] = ()
    admin: str = "admin@fednotes.org"
    organisations: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        for what, name in (("name", self.name), *(("site", s) for s in self.sites)):
            if not _NAME.fullmatch(name) or (what == "site" and "." in name):
                dot = ", '.'" if what == "name" else ""  # NVFlare takes what follows for a job
                raise ConfigError(f"{what} {name!r}: letters, digits, '_'{dot} and '-' only")
        taken = _RESERVED | {self.server, self.name}  # a certificate each, known by its name
        wrong = sorted({s for s in self.sites if s in taken or self.sites.count(s) > 1})
        if not self.sites or wrong:
            raise ConfigError(f"sites {wrong or 'are missing'}: each needs a name of its own")
        _require_apart(self.sites)
        if not 0 < self.port < 65536:
            raise ConfigError(f"port {self.port}: expected 1 to 65535")
        if not re.fullmatch(r"[^@\s]+@[^@\s]+\.[^@\s.]+", self.admin):
            raise ConfigError(f"admin {self.admin!r}: expected an e-mail address")

    @property
    def watch(self) -> str:
        """The identity by which the server's own watch resubmits jobs, and can do no more."""
        return "watch@" + self.admin.partition("@")[2]

    def organisation(self, site: str) -> str:
        own = (
            site if site in self.sites else self.name
        )  # the server and the admin are the project's
        return (self.organisations or {}).get(site, re.sub(r"\W", "_", own))


def _require_apart(sites: Sequence[str]) -> None:
    """Refuse names of which one is the beginning of another, and the rest may begin a token.

    NVFlare's server signs a site's name and its token (lower-case hexadecimal digits and '-')
    with nothing between: the signature for `h1` and a token `0e…` is one for `h10` and `e…`.
    """
    for name in sites:
        for other in sites:
            rest = other[len(name) :]
            if rest and other.startswith(name) and set(rest) <= set("0123456789abcdef-"):
                raise ConfigError(
                    f"sites {name!r} and {other!r} could be taken for one another: choose names of "
                    "one length, such as h01 and h10"
                )


def provision(project: ProjectConfig, out: Path) -> dict[str, Path]:
    """Make the kits that `out` does not have yet; kits that are there stay as they are.

    Returns name → folder: "server", "admin" and one per site, `out/authority` beside them.
    Raises ConfigError if `out` belongs to another project, or has a site whose name a new one's
    could be taken for.
    """
    from fednotes.engines.nvflare import make_kits

    authority = out / "authority"
    _same_project(project, authority)
    _require_apart(sorted({*project.sites, *_known(project, authority)}))
    authority.mkdir(parents=True, exist_ok=True)
    authority.chmod(0o700)  # it holds the key that signs new kits
    noise = io.StringIO()
    with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
        made = make_kits(_definition(project), authority)
    if made is None:
        raise ConfigError(f"{out}: NVFlare made no kits: {noise.getvalue().strip()[-300:]}")
    kits: dict[str, Path] = {}
    roles = {"server": SERVER, "admin": ADMIN, **dict.fromkeys(project.sites, SITE)}
    for name, role in roles.items():
        kits[name] = out / ("sites" if role == SITE else "") / name
        if not (kits[name] / KIT_FILE).exists():
            source = made / {"server": project.server, "admin": project.admin}.get(name, name)
            watch = made / project.watch if role == SERVER else None
            _hand_over(project, name, role, source, kits[name], watch)
    shutil.rmtree(made)
    write_json(authority / "project.json", {"name": project.name, "server": project.server})
    return kits


def _same_project(project: ProjectConfig, authority: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        there = json.loads((authority / "project.json").read_text(encoding="utf-8"))
        ours = {"name": project.name, "server": project.server}
        if there != ours:
            raise ConfigError(
                f"{authority.parent}: holds kits of project {there['name']!r} at "
                f"{there['server']!r}, not of {project.name!r} at {project.server!r}: "
                "choose another folder"
            )


def _known(project: ProjectConfig, authority: Path) -> set[str]:
    """The sites that the authority ever signed a certificate for."""
    names: set[str] = set()
    with contextlib.suppress(FileNotFoundError):
        path = authority / project.name / "state" / "cert.json"
        kept = json.loads(path.read_text(encoding="utf-8"))
        names = {name for name, value in kept.items() if isinstance(value, dict)}
    return {name for name in names if "@" not in name and name != project.server}


def _definition(project: ProjectConfig) -> dict[str, Any]:
    """NVFlare's own project file, as a table."""
    organisation = project.organisation("server")
    server: dict[str, Any] = {
        **{"name": project.server, "type": "server", "org": organisation},
        **{"fed_learn_port": project.port, "admin_port": project.port},
        **({"host_names": list(project.hosts)} if project.hosts else {}),
    }
    people = [(project.admin, "project_admin"), (project.watch, "lead")]
    return {
        "api_version": 3,
        "name": project.name,
        "participants": [
            server,
            *({"name": s, "type": "client", "org": project.organisation(s)} for s in project.sites),
            *({"name": n, "type": "admin", "org": organisation, "role": r} for n, r in people),
        ],
        "builders": [
            {
                "path": f"{_NVFLARE}.workspace.WorkspaceBuilder",
                "args": {"template_file": ["master_template.yml"]},
            },
            {
                "path": f"{_NVFLARE}.static_file.StaticFileBuilder",
                # A site takes no job that its admin's key did not sign, whatever the server says.
                "args": {"config_folder": "config", "scheme": "grpc", "require_signed_jobs": True},
            },
            {"path": f"{_NVFLARE}.cert.CertBuilder", "args": {}},
            {"path": f"{_NVFLARE}.signature.SignatureBuilder", "args": {}},
        ],
    }


def _hand_over(
    project: ProjectConfig, name: str, role: str, source: Path, kit: Path, watch: Path | None
) -> None:
    """Copy one kit out of NVFlare's folder, with our rules in its `local` folder."""

    def fill(folder: Path) -> None:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        if watch is not None:
            shutil.copytree(watch, folder / WATCH)
        for script in folder.rglob("*.sh"):
            script.unlink()  # ours start plain processes; these would loop for ever
        for leftover in (*folder.rglob("*.ipynb"), *folder.rglob("readme.txt")):
            leftover.unlink()
        for default in folder.glob("local/*") if role != ADMIN else ():
            default.unlink()  # what is not said below is not allowed
        for file, table in local_files(role).items():
            write_json(folder / "local" / file, table)
        facts: dict[str, Any] = {
            "name": name,
            "role": role,
            "project": project.name,
            "server": project.server,
        }
        person = {ADMIN: project.admin, SERVER: project.watch}.get(role, "")
        facts |= {"port": project.port, "person": person, "org": project.organisation(name)}
        write_json(folder / KIT_FILE, facts)
        for key in folder.rglob("*.key"):
            key.chmod(0o600)
        folder.chmod(0o700)

    write_folder(kit, fill)


def local_files(role: str) -> dict[str, Any]:
    """The rules and settings of one machine: NVFlare's files of a kit's `local` folder."""
    if role not in (SERVER, SITE):
        return {}
    launcher = f"nvflare.app_common.job_launcher.{'server' if role == SERVER else 'client'}"
    launcher += f"_process_launcher.{'Server' if role == SERVER else 'Client'}ProcessJobLauncher"
    resources: dict[str, Any] = {
        "format_version": 2,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": [CONTROLLER if role == SERVER else EXECUTOR],
        "allow_log_streaming": False,
    }
    parts: list[dict[str, Any]] = [{"id": "process_launcher", "path": launcher, "args": {}}]
    parts += [{"id": "gate", "path": GATES[role], "args": {}}]
    common = "nvflare.app_common"
    files = f"{common}.storages.filesystem_storage.FilesystemStorage"
    if role == SERVER:
        resources["servers"] = [
            {"admin_storage": "transfer", "max_num_clients": 100, "heart_beat_timeout": 60}
        ]
        snapshots = {"root_dir": "/store/snapshots", "uri_root": "/"}
        resources["snapshot_persistor"] = {
            "path": f"{common}.state_persistors.storage_state_persistor.StorageStatePersistor",
            "args": {"uri_root": "/", "storage": {"path": files, "args": snapshots}},
        }
        schedule = {"max_jobs": 1, "max_schedule_count": 1_000_000, "min_schedule_interval": 1.0}
        parts += [
            {
                "id": "job_scheduler",
                "path": f"{common}.job_schedulers.job_scheduler.DefaultJobScheduler",
                "args": {**schedule, "max_schedule_interval": 10.0},
            },
            {
                "id": "job_manager",
                "path": "nvflare.apis.impl.job_def_manager.SimpleJobDefManager",
                "args": {"uri_root": "/store/jobs", "job_store_id": "job_store"},
            },
            {
                "id": "job_store",
                "path": files,
                "args": {},
            },
        ]
    else:
        resources["client"] = {"retry_timeout": 30}
        gpu: dict[str, Any] = {"num_of_gpus": 0, "mem_per_gpu_in_GiB": 0, "expiration_period": 300}
        parts += [
            {
                "id": "resource_manager",
                "path": f"{common}.resource_managers.gpu_resource_manager.GPUResourceManager",
                "args": gpu,
            },
            {
                "id": "resource_consumer",
                "path": f"{common}.resource_consumers.gpu_resource_consumer.GPUResourceConsumer",
                "args": {},
            },
        ]
    resources["components"] = parts
    return {
        "resources.json": resources,
        "authorization.json": _rights(role),
        "log_config.json": _logging(),
    }


def _rights(role: str) -> dict[str, Any]:
    """Who may do what. NVFlare's default lets a project admin send code and read files."""
    never = dict.fromkeys(
        ("byoc", "server-predeployed-flwr", "shell_commands", "show_errors", "report_env"), "none"
    )
    never |= dict.fromkeys(("configure_job_log", "configure_site_log"), "none")
    everyone = {"view": "any", "manage_job": "any", **never}
    if role == SITE:  # the watch may resubmit, but the signature that a site checks is the admin's
        deploy = {**everyone, "submit_job": "any", "operate": "none"}
        return _policy(deploy, deploy)
    submitter = {"submit_job": "any", "clone_job": "any", "download_job": "any", "operate": "any"}
    resubmitter = {"submit_job": "none", "clone_job": "any", "download_job": "none"}
    command = {"app_command": "any"}
    return _policy(
        {**everyone, **submitter, **command, **never},
        {**everyone, **resubmitter, **command, "operate": "none"},
    )


def _policy(admin: Mapping[str, str], watch: Mapping[str, str]) -> dict[str, Any]:
    nothing = {"byoc": "none"}
    return {
        "format_version": "1.0",
        "permissions": {
            "project_admin": dict(admin),
            "lead": dict(watch),
            "org_admin": nothing,
            "member": nothing,
        },
    }


def _logging() -> dict[str, Any]:
    """One log that rotates: our lines, and NVFlare's warnings, a kind once a minute."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
        "filters": {"seldom": {"()": "fednotes.engines.seldom.Seldom"}},
        "handlers": {
            "file": {
                "class": "logging.handlers.RotatingFileHandler",
                "formatter": "line",
                "filters": ["seldom"],
                "filename": LOG_FILE,
                "maxBytes": LOG_BYTES,
                "backupCount": LOG_FILES - 1,
            }
        },
        "loggers": {
            "root": {"level": "WARNING", "handlers": ["file"]},
            "fednotes": {"level": "INFO"},
        },
    }


def read_kit(kit: Path) -> dict[str, Any]:
    """What a kit's owner is in the network.

    Raises ConfigError if the folder is no kit.
    """
    try:
        facts = json.loads((kit / KIT_FILE).read_text(encoding="utf-8"))
        return {k: facts[k] for k in ("name", "role", "project", "server", "port", "person", "org")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{kit}: not a kit (`fednotes provision` makes kits)") from error


def job_folder(
    out: Path, job: Mapping[str, Any], *, run: str, sites: Sequence[str], min_sites: int
) -> Path:
    """Write the folder that NVFlare takes as a job: a declaration, and no code.

    job: JSON values. run: names the run, the same when it goes on after a failure.
    sites: in the order in which their replies are added. min_sites: fewer do not begin.
    """
    if not _NAME.fullmatch(run):
        raise ConfigError(f"run {run!r}: letters, digits, '_', '.' and '-' only")
    if not 1 <= min_sites <= len(set(sites)) or len(set(sites)) != len(sites):
        raise ConfigError(f"min_sites = {min_sites} of {len(set(sites))} sites: impossible")
    poll = POLL_SECONDS * max(1.0, len(sites) / 3)  # many idle sites would keep the server busy
    server = {
        "format_version": 2,
        "server": {"task_request_interval": poll},
        "workflows": [{"id": "fednotes", "path": CONTROLLER, "args": {}}],
        "dead_client_grace_period": 15.0,
        "dead_client_check_lead_time": 15.0,
    }
    empty: dict[str, Any] = {"task_data_filters": [], "task_result_filters": [], "components": []}
    executor = {"tasks": ["exchange"], "executor": {"path": EXECUTOR, "args": {}}}
    client: dict[str, Any] = {
        **{"format_version": 2, "default_task_fetch_interval": poll},
        "job_heartbeat_interval": HEARTBEAT_SECONDS,
    }
    declared = {"run": run, "sites": list(sites), "min_sites": min_sites, "job": dict(job)}
    meta = {
        **{"name": run, "resource_spec": {}, "min_clients": min_sites},
        "deploy_map": {"app": ["server", *sites]},
    }

    def fill(folder: Path) -> None:
        config = folder / "app" / "config"
        config.mkdir(parents=True)
        write_json(folder / "meta.json", meta)
        write_json(config / "config_fed_server.json", {**server, **empty})
        write_json(config / "config_fed_client.json", {**client, "executors": [executor], **empty})
        write_json(config / "job.json", declared)

    folder = out / run
    try:
        write_folder(folder, fill)
    except (TypeError, ValueError) as error:
        raise FednotesError(f"{folder}: the job holds a value that JSON does not know") from error
    return folder
