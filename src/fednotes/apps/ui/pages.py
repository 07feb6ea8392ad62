"""The local web UI (`fednotes ui`): its addresses and their content.

`access.py` decides who may see the pages, and `content.py` gathers their content. The
pages load nothing from other servers. starlette and uvicorn come with the extra `ui`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from fednotes.apps.ui.access import HOST, Access
from fednotes.apps.ui.content import Content, load_content
from fednotes.apps.ui.error_pages import ErrorPages
from fednotes.apps.ui.patient_pages import PatientPages
from fednotes.apps.ui.run_pages import RunPages
from fednotes.apps.ui.site_pages import SitePages
from fednotes.apps.ui.trial_pages import TrialPages
from fednotes.apps.ui.views import Form, NotReady, Views
from fednotes.core.errors import ConfigError, FednotesError, needs
from fednotes.core.http_server import Refused, read_body, serve_application
from fednotes.data.encodings import AUTO
from fednotes.data.formats.problems import OnError
from fednotes.jobs.models import find_source_folder
from fednotes.jobs.saved_models import SavedModel

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

# Limits on the form that a page sends.
_MAX_FORM_BYTES = 2**20
_MAX_FORM_FIELDS = 50
_FORM_SECONDS = 15.0


def open_ui(  # noqa: PLR0913 - what a person may want to set
    *paths: str | Path | SavedModel,
    port: int = 0,
    format: str = "",
    corrections: str | Path | None = None,
    on_error: OnError = "refuse",
    encoding: str = AUTO,
    device: str = "cpu",
    backbone: str | None = None,
    labels: str | Path | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Show runs, a model's errors in notes, or a ledger, until SIGINT or SIGTERM.

    The pages are for a browser on this computer only.

    Args:
        paths: Runs, or a folder of runs; a model from `load` or its folder, perhaps
            with notes; the kit of a site.
        port: The TCP port; 0 takes a free one.
        format: The format of the notes; recognised if empty.
        corrections: The file of decisions; beside the notes or the run if None.
        on_error: As in `read`.
        encoding: As in `read`.
        device: As in `load`.
        backbone: As in `load`.
        labels: A table of labels for the notes of patients, as in `evaluate`.
        tell: Receives a line with the address.

    Raises:
        FednotesError: The paths exclude each other, something cannot be read, or the
            server cannot listen on this port.
        MissingExtra: The extra "ui" is not installed.
    """
    if not paths:
        raise ConfigError(
            "nothing to show: give a run, a model and notes, or a site's kit"
        )
    content = load_content(
        [find_source_folder(path, "a run, a model or notes") for path in paths],
        format=format or None,
        corrections=None if corrections is None else Path(corrections),
        on_error=on_error,
        encoding=encoding,
        device=device,
        backbone=backbone,
        labels=None if labels is None else Path(labels),
    )
    access = Access()

    def tell_address(address: str) -> None:
        """Tell the address of the pages, once the server listens."""
        tell(
            f"open {address}{access.root}/?token={access.token} in a browser on this "
            "computer; Ctrl-C stops it"
        )

    serve_application(
        create_app(content, access), HOST, port, ready=tell_address, extra="ui"
    )


# ---- the application -----------------------------------------------------------------


def create_app(content: Content, access: Access) -> Callable[..., Any]:
    """Return the ASGI application, which only serves requests with the token.

    Raises:
        MissingExtra: The extra "ui" is not installed.
    """
    with needs("starlette", "ui"):
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.exceptions import HTTPException
        from starlette.middleware.base import BaseHTTPMiddleware
        from starlette.routing import Mount, Route
        from starlette.staticfiles import StaticFiles

    views = Views(content, access.root)
    runs = RunPages(content, views)
    sites = SitePages(content, views)
    errors = ErrorPages(content, views)
    patients = PatientPages(content, views)
    trial = TrialPages(content, views)

    def make_page(path: str, show: Callable[[Request], Response]) -> Route:
        """Return the route of a page, which is rendered in a thread."""

        async def answer(request: Request) -> Response:
            return await run_in_threadpool(show, request)

        return Route(path, answer, methods=["GET"])

    def make_form(path: str, handle: Callable[[Request, Form], Response]) -> Route:
        """Return the route of a form, which is handled in a thread."""

        async def answer(request: Request) -> Response:
            fields = await _read_form(request)
            return await run_in_threadpool(handle, request, fields)

        return Route(path, answer, methods=["POST"])

    static: Any = [("fednotes.apps.ui", "static"), ("fednotes.report", "templates")]
    routes = [
        make_page("/", views.show_start),
        Mount("/static", StaticFiles(packages=static)),
        make_page("/runs", runs.show_runs),
        make_page("/runs/{number}", runs.show_run),
        make_page("/compare", runs.show_comparison),
        make_page("/ledger", sites.show_ledgers),
        make_page("/approvals", sites.show_approvals),
        make_form("/approvals/{number}", sites.decide),
        make_page("/errors", errors.show_errors),
        make_page("/errors/{number}", errors.show_item),
        make_page("/confusion", errors.show_confusion),
        make_page("/calibration", errors.show_calibration),
        make_form("/errors/{number}", errors.decide),
        make_page("/export/{format}", errors.export),
        make_page("/patients", patients.show_patients),
        make_page("/patients/{number}", patients.show_patient),
        make_page("/phenotype", patients.show_phenotype),
        make_page("/try", trial.show_trial),
        make_form("/try", trial.try_text),
    ]
    handlers: Any = {
        HTTPException: views.show_http_error,
        Refused: views.show_http_error,
        FednotesError: views.show_error,
        NotReady: views.show_progress,
    }
    app = Starlette(
        routes=[Mount(access.root, routes=routes)], exception_handlers=handlers
    )
    return BaseHTTPMiddleware(app, dispatch=access.guard)


async def _read_form(request: Request) -> Form:
    """Return the form fields of a request; raise Refused if it is too large or bad."""
    body = await read_body(request.receive, _MAX_FORM_BYTES, _FORM_SECONDS)
    try:
        fields = parse_qsl(
            body.decode(), keep_blank_values=True, max_num_fields=_MAX_FORM_FIELDS
        )
    except ValueError as error:
        raise Refused(
            400, "this request is not a form of these pages: reload the page"
        ) from error
    return dict(fields)
