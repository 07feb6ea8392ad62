"""Federated learning for clinical text: one model, many sites, notes stay where they are.

`import fednotes as fn`: what stands in `__all__` is the public Python API (`docs/python.md`). It is
read when it is first used, so that the import itself costs nothing.
"""

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# ONNX Runtime tells its maker of its use, over the network, unless this is said before it begins.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

if TYPE_CHECKING:
    from fednotes.api import (
        calibrate,
        check,
        evaluate,
        job,
        read,
        reliability,
        simulate,
    )
    from fednotes.apps.serving.exports import export
    from fednotes.apps.serving.server import serve
    from fednotes.apps.ui.pages import ui
    from fednotes.core.errors import FednotesError
    from fednotes.core.federation import State
    from fednotes.core.types import Document, Span
    from fednotes.core.update import Update
    from fednotes.data.formats import convert
    from fednotes.engines.inprocess import InProcess
    from fednotes.jobs.compare import compare
    from fednotes.jobs.job import Job
    from fednotes.jobs.models import MentionModel, PatientModel, load
    from fednotes.jobs.results import RunResult
    from fednotes.jobs.show import ShownJob, show_job
    from fednotes.report.html import write_report as report

__all__ = [
    "Document",
    "FednotesError",
    "InProcess",
    "Job",
    "MentionModel",
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
    "evaluate",
    "export",
    "job",
    "load",
    "read",
    "reliability",
    "report",
    "serve",
    "show_job",
    "simulate",
    "ui",
]
_PLACES = {
    "core.errors": ("FednotesError",),
    "core.federation": ("State",),
    "core.types": ("Document", "Span"),
    "core.update": ("Update",),
    "data.formats": ("convert",),
    "engines.inprocess": ("InProcess",),
    "jobs.compare": ("compare",),
    "jobs.job": ("Job",),
    "jobs.results": ("RunResult",),
    "jobs.show": ("ShownJob", "show_job"),
    "api": ("calibrate", "check", "evaluate", "job", "read", "reliability", "simulate"),
    "apps.serving.exports": ("export",),
    "jobs.models": ("MentionModel", "PatientModel", "load"),
    "apps.serving.server": ("serve",),
    "apps.ui.pages": ("ui",),
}
_CALLED = ("report",)  # rooms of the package, which can be called


def called(room: str, module: str, name: str) -> None:
    """A room that is imported can be called, as what one of its modules has by that name."""

    class Room(ModuleType):
        def __call__(self, *given: Any, **options: Any) -> Any:
            return getattr(import_module(f"{room}.{module}"), name)(*given, **options)

    sys.modules[room].__class__ = Room


def __getattr__(name: str) -> Any:
    if name in _CALLED:
        return import_module(f"{__name__}.{name}")
    for place, names in _PLACES.items():
        if name in names:
            found = getattr(import_module(f"{__name__}.{place}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
