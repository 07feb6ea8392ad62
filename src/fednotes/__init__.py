"""Federated learning for clinical text: one model, many sites, notes stay where they are.

`import fednotes as fn`: what stands in `__all__` is the public Python API (`docs/python.md`). It is
read when it is first used, so that the import itself costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fednotes.core.errors import FednotesError
    from fednotes.core.federation import State
    from fednotes.core.types import Document, Span
    from fednotes.core.update import Update
    from fednotes.data.formats import convert
    from fednotes.engines.inprocess import InProcess
    from fednotes.jobs.job import Job
    from fednotes.jobs.results import RunResult
    from fednotes.serving.api import (
        calibrate,
        check,
        compare,
        evaluate,
        job,
        read,
        reliability,
        simulate,
    )
    from fednotes.serving.models import MentionModel, PatientModel, load
    from fednotes.serving.server import serve

__all__ = [
    "Document",
    "FednotesError",
    "InProcess",
    "Job",
    "MentionModel",
    "PatientModel",
    "RunResult",
    "Span",
    "State",
    "Update",
    "calibrate",
    "check",
    "compare",
    "convert",
    "evaluate",
    "job",
    "load",
    "read",
    "reliability",
    "serve",
    "simulate",
]
_PLACES = {
    "core.errors": ("FednotesError",),
    "core.federation": ("State",),
    "core.types": ("Document", "Span"),
    "core.update": ("Update",),
    "data.formats": ("convert",),
    "engines.inprocess": ("InProcess",),
    "jobs.job": ("Job",),
    "jobs.results": ("RunResult",),
    "serving.api": (
        *("calibrate", "check", "compare", "evaluate", "job", "read", "reliability", "simulate"),
    ),
    "serving.models": ("MentionModel", "PatientModel", "load"),
    "serving.server": ("serve",),
}


def __getattr__(name: str) -> Any:
    for place, names in _PLACES.items():
        if name in names:
            found = getattr(import_module(f"{__name__}.{place}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
