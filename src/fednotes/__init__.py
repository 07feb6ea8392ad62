"""Federated learning for clinical text: notes stay at the site that owns them.

`import fednotes as fn`: the names in `__all__` are the public Python API of the core
(`docs/python.md`). Applications and other packages add functions by entry points of the
group `fednotes.api`, such as `fn.serve`; `dir(fn)` lists these too. Each name is
imported when it is first used, so that the import of fednotes itself costs nothing.
"""

import os
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__version__ = "0.1.0"

# ONNX Runtime reports its use to its maker over the network unless this is set before
# its import.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from fednotes.api import (
        calibrate,
        check,
        doctor,
        evaluate,
        init,
        job,
        read,
        reliability,
        simulate,
    )
    from fednotes.core.errors import FednotesError
    from fednotes.core.federation import State
    from fednotes.core.types import Document, Span
    from fednotes.core.update import Update
    from fednotes.data.formats import convert
    from fednotes.data.notes import NoteDatabase
    from fednotes.engines.inprocess import InProcess
    from fednotes.jobs.compare import compare
    from fednotes.jobs.diagnosis import Diagnosis
    from fednotes.jobs.job import Job
    from fednotes.jobs.models import MentionModel, PatientModel, load
    from fednotes.jobs.proposal import FirstJob
    from fednotes.jobs.results import RunResult
    from fednotes.jobs.show import ShownJob, show_job
    from fednotes.report.html import write_report

__all__ = [
    "Diagnosis",
    "Document",
    "FednotesError",
    "FirstJob",
    "InProcess",
    "Job",
    "MentionModel",
    "NoteDatabase",
    "PatientModel",
    "RunResult",
    "ShownJob",
    "Span",
    "State",
    "Update",
    "calibrate",
    "check",
    "compare",
    "convert",
    "doctor",
    "evaluate",
    "init",
    "job",
    "load",
    "read",
    "reliability",
    "show_job",
    "simulate",
    "write_report",
]
_PLACES = {
    "core.errors": ("FednotesError",),
    "core.federation": ("State",),
    "core.types": ("Document", "Span"),
    "core.update": ("Update",),
    "data.formats": ("convert",),
    "data.notes": ("NoteDatabase",),
    "engines.inprocess": ("InProcess",),
    "jobs.compare": ("compare",),
    "jobs.diagnosis": ("Diagnosis",),
    "jobs.job": ("Job",),
    "jobs.results": ("RunResult",),
    "jobs.show": ("ShownJob", "show_job"),
    "api": (
        "calibrate",
        "check",
        "doctor",
        "evaluate",
        "init",
        "job",
        "read",
        "reliability",
        "simulate",
    ),
    "jobs.models": ("MentionModel", "PatientModel", "load"),
    "jobs.proposal": ("FirstJob",),
    "report.html": ("write_report",),
}


def _find_added_names() -> Mapping[str, "EntryPoint"]:
    """Return the names that applications and other packages add.

    Raises:
        ConfigError: A package adds a name that fednotes has itself.
    """
    from fednotes.core import plugins

    return plugins.list_added_entries("api", __all__)


def __getattr__(name: str) -> Any:
    for place, names in _PLACES.items():
        if name in names:
            value = getattr(import_module(f"{__name__}.{place}"), name)
            globals()[name] = value
            return value

    entry = None if name.startswith("_") else _find_added_names().get(name)
    if entry is not None:
        from fednotes.core import plugins

        value = plugins.load_entry(entry, object)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    public = [*__all__, *_find_added_names()]
    return sorted({*public, *(name for name in globals() if name.startswith("__"))})
