"""What lies in a kit: who it is of, and the rules and settings of its owner's machine.

The rules are NVFlare's files of a kit's `local` folder; NVFlare's own defaults allow more than a
hospital should.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError
from fednotes.core.parsing import read_json

SERVER, SITE, ADMIN, WATCH = "server", "site", "admin", "watch"
CONTROLLER = "fednotes.engines.nvflare.server.FednotesController"
EXECUTOR = "fednotes.engines.nvflare.site.FednotesExecutor"
GATES = {SERVER: "fednotes.engines.nvflare.server.Gate", SITE: "fednotes.engines.nvflare.site.Gate"}
PRESENCE = {
    SERVER: "fednotes.engines.nvflare.presence.ServerPresence",
    SITE: "fednotes.engines.nvflare.presence.SitePresence",
}
KIT_FILE = "kit.json"
LOG_FILE = "fednotes.log"
INSIDE = "inside"  # the folder of the socket by which a kit's processes are connected; its scheme
COMM_FILE = "comm_config.json"  # in the kit itself: NVFlare takes the first that it finds below
COMM = {"internal": {"scheme": INSIDE, "resources": {}}}
LOG_BYTES, LOG_FILES = 2_000_000, 4  # a log is at most 2 MB, and three older ones are kept


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
    parts += [{"id": "presence", "path": PRESENCE[role], "args": {}}]
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
        "filters": {"seldom": {"()": "fednotes.engines.nvflare.log.Seldom"}},
        "handlers": {
            "file": {
                "()": "fednotes.engines.nvflare.log.KitLog",
                "formatter": "line",
                "filters": ["seldom"],
                "file": LOG_FILE,  # not `filename`: NVFlare would give each job a log of its own
                "most": LOG_BYTES,
                "kept": LOG_FILES - 1,
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
        facts = read_json(kit / KIT_FILE)
        return {k: facts[k] for k in ("name", "role", "project", "server", "port", "person", "org")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{kit}: not a kit (`fednotes provision` makes kits)") from error
