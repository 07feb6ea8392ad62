"""The local web UI (`fednotes ui`): its addresses and their content.

`access.py` decides who may see the pages, and `content.py` gathers their content. The
pages load nothing from other servers. starlette and uvicorn come with the extra `ui`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl, urlencode

from fednotes.apps.ui.access import HOST, Access
from fednotes.apps.ui.background import BackgroundWork
from fednotes.apps.ui.content import Content, ledger_reader, load_content
from fednotes.apps.ui.corrections import Decision, MentionKey
from fednotes.apps.ui.marked_text import cut_at_mentions, to_html
from fednotes.apps.ui.review import (
    UNDO,
    Filter,
    Item,
    Predict,
    Review,
    parse_filter,
)
from fednotes.core.cleaning import clean
from fednotes.core.errors import ConfigError, FednotesError, needs
from fednotes.core.http_server import Refused, read_body, run
from fednotes.core.types import Document
from fednotes.core.wording import format_size
from fednotes.data.encodings import AUTO
from fednotes.data.formats import LossyError
from fednotes.data.formats.problems import OnError
from fednotes.jobs.compare import Comparison, compare
from fednotes.jobs.metrics_file import read_metrics
from fednotes.jobs.models import folder_of
from fednotes.jobs.results import SUMMARY
from fednotes.jobs.run_folder import read_progress
from fednotes.jobs.saved_models import SavedModel
from fednotes.metrics.judging import KINDS
from fednotes.report.html import compare_runs, environment, parts_of_page

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

# Limits on the form that a page sends.
_MAX_FORM_BYTES = 2**20
_MAX_FORM_FIELDS = 50
_FORM_SECONDS = 15.0
_MAX_TEXT = 100_000  # maximum length of a text to try

_ERRORS_PER_PAGE = 50
_LEDGER_LINES = 100  # newest lines of a ledger that are shown
# Characters that are shown before and after a mention if its note is long.
_CONTEXT = 6_000

# Seconds until a page says that an export is still being written.
_EXPORT_SECONDS = 2.0
# Seconds after which a page reloads itself.
_REFRESH_RUN = 5
_REFRESH_WORK = 2

_KIND_NAMES = {
    "correct": "Correct",
    "boundary": "Boundary",
    "type": "Type",
    "both": "Boundary and type",
    "missed": "Missed",
    "spurious": "Spurious",
}
_ORDER_NAMES = {
    "place": "as in the notes",
    "certain": "most confident first",
    "uncertain": "least confident first",
}
_EXPORT_NAMES = {
    "jsonl": "JSONL",
    "brat": "brat (.zip)",
    "label-studio": "Label Studio",
}

Form = Mapping[str, str]
T = TypeVar("T")


def open_ui(  # noqa: PLR0913 - what a person may want to set
    *paths: str | Path | SavedModel,
    port: int = 0,
    format: str = "",
    corrections: str | Path | None = None,
    on_error: OnError = "refuse",
    encoding: str = AUTO,
    device: str = "cpu",
    backbone: str | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Show runs, a model's errors in notes, or a ledger, until SIGINT or SIGTERM.

    The pages are for a browser on this computer only.

    Args:
        paths: Runs; a model from `load` or its folder, perhaps with notes; the kit of a
            site.
        port: The TCP port; 0 takes a free one.
        format: The format of the notes; recognised if empty.
        corrections: The file of decisions; beside the notes or the run if None.
        on_error: As in `read`.
        encoding: As in `read`.
        device: As in `load`.
        backbone: As in `load`.
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
        [folder_of(path, "a run, a model or notes") for path in paths],
        format=format or None,
        corrections=None if corrections is None else Path(corrections),
        on_error=on_error,
        encoding=encoding,
        device=device,
        backbone=backbone,
    )
    access = Access()

    def tell_address(address: str) -> None:
        tell(
            f"open {address}{access.root}/?token={access.token} in a browser on this "
            "computer; Ctrl-C ends the page"
        )

    run(create_app(content, access), HOST, port, ready=tell_address, extra="ui")


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

    pages = Pages(content, access.root)

    def page(path: str, show: Callable[[Request], Response]) -> Route:
        async def answer(request: Request) -> Response:
            return await run_in_threadpool(show, request)

        return Route(path, answer, methods=["GET"])

    def form(path: str, handle: Callable[[Request, Form], Response]) -> Route:
        async def answer(request: Request) -> Response:
            fields = await _read_form(request)
            return await run_in_threadpool(handle, request, fields)

        return Route(path, answer, methods=["POST"])

    static: Any = [("fednotes.apps.ui", "static"), ("fednotes.report", "templates")]
    routes = [
        page("/", pages.redirect_to_start),
        Mount("/static", StaticFiles(packages=static)),
        page("/runs", pages.show_runs),
        page("/runs/{number}", pages.show_run),
        page("/compare", pages.compare_runs),
        page("/ledger", pages.show_ledgers),
        page("/errors", pages.show_errors),
        page("/errors/{number}", pages.show_item),
        form("/errors/{number}", pages.decide),
        page("/export/{format}", pages.export),
        page("/try", pages.show_trial),
        form("/try", pages.try_text),
    ]
    handlers: Any = {
        HTTPException: pages.show_http_error,
        Refused: pages.show_http_error,
        FednotesError: pages.show_error,
        _NotReady: pages.show_progress,
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


class _NotReady(Exception):
    """The requested page is not ready; the message says why. The browser retries."""


class _Export(NamedTuple):
    """An export, and the decisions that it contains."""

    decisions: Mapping[MentionKey, Decision]
    file: BackgroundWork[tuple[str, bytes]]


# ---- the pages -----------------------------------------------------------------------


class Pages:
    """The handlers of the web UI.

    Args:
        content: The content of the pages.
        root: The folder with which all addresses begin.
    """

    def __init__(self, content: Content, root: str) -> None:
        self._content = content
        self._root = root
        self._runs = list(content.runs.items())
        # By format, and whether it may leave out what it cannot represent.
        self._exports: dict[tuple[str, bool], _Export] = {}
        self._comparisons: dict[tuple[str, str], BackgroundWork[Comparison]] = {}
        self._templates = environment("fednotes.apps.ui")
        self._templates.filters["note"] = to_html

    def _render(self, template: str, *, status: int = 200, **values: Any) -> Response:
        """Return the response of a rendered template.

        The layout uses `section`, the address of the current section, and `refresh`,
        the seconds after which the page reloads itself.
        """
        from starlette.responses import HTMLResponse

        common = {
            "content": self._content,
            "root": self._root,
            "link": self._link,
            "kinds": KINDS,
            "kind_names": _KIND_NAMES,
            "status": status,
            "section": "",
            "refresh": 0,
        }
        html = self._templates.get_template(template).render(common | values)
        return HTMLResponse(html, status)

    def _link(self, path: str, filters: Filter | None = None, **changes: Any) -> str:
        """Return an address with the non-default values of a filter.

        Args:
            path: The path below the root.
            filters: The filter.
            changes: Values that replace those of the filter, or further ones.
        """
        defaults = asdict(Filter())
        values = asdict(filters or Filter()) | changes
        query = {
            name: value
            for name, value in values.items()
            if value != defaults.get(name, "")
        }
        if query.get("undecided"):
            query["undecided"] = 1
        address = self._root + path
        return f"{address}?{urlencode(query)}" if query else address

    def _redirect(
        self, path: str, filters: Filter | None = None, anchor: str = ""
    ) -> Response:
        from starlette.responses import RedirectResponse

        return RedirectResponse(self._link(path, filters) + anchor, 303)

    def redirect_to_start(self, _request: Request) -> Response:
        """Redirect to the first section."""
        path, _ = self._content.list_sections()[0]
        return self._redirect(path)

    # ---- errors

    def show_http_error(self, _request: Request, error: Any) -> Response:
        """Explain a starlette `HTTPException`, or a `Refused`."""
        return self._render(
            "message.html", status=error.status_code, message=error.detail
        )

    def show_error(self, _request: Request, error: Exception) -> Response:
        """Explain a FednotesError."""
        return self._render("message.html", status=400, message=str(error))

    def show_progress(self, request: Request, error: Exception) -> Response:
        """Show a page that waits for work in progress."""
        if request.method == "POST":
            return self.show_error(request, error)
        return self._render("wait.html", refresh=_REFRESH_WORK, message=str(error))

    # ---- runs

    def show_runs(self, _request: Request) -> Response:
        """List the results of all runs; redirect to the run if there is only one."""
        if len(self._runs) == 1:
            return self._redirect("/runs/0")
        rows = [
            (name, read_progress(folder), _has_ended(folder))
            for name, folder in self._runs
        ]
        return self._render("runs.html", section="/runs", rows=rows)

    def show_run(self, request: Request) -> Response:
        """Show the report of a run; the page of an unfinished run refreshes itself."""
        _, folder = _pick(self._runs, request, "run")
        lines = read_metrics(folder)
        has_ended = _has_ended(folder)
        parts = parts_of_page(read_progress(folder), lines)
        parts["title"] = parts["result"].title or folder.name
        return self._render(
            "run_page.html",
            section="/runs",
            refresh=0 if has_ended else _REFRESH_RUN,
            refresh_seconds=_REFRESH_RUN,
            ended=has_ended,
            last=lines[-1] if lines else {},
            **parts,
        )

    def compare_runs(self, request: Request) -> Response:
        """Show two runs side by side and, on demand, a test of their difference."""
        names = list(self._content.runs)
        if len(names) < 2:
            raise ConfigError("name two runs: fednotes ui RUN RUN")
        first = request.query_params.get("a", "")
        second = request.query_params.get("b", "")
        first = first if first in names else names[0]
        second = second if second in names else names[1]

        results = {}
        for name in (first, second):
            folder = self._content.runs[name]
            results[name] = (read_progress(folder), read_metrics(folder))
        comparison = None
        refresh = 0
        if request.query_params.get("test"):
            comparison = self._compare(first, second)
            if comparison is None:
                refresh = _REFRESH_WORK
        return self._render(
            "compare.html",
            section="/compare",
            refresh=refresh,
            names=names,
            first=first,
            second=second,
            comparison=comparison,
            **compare_runs(results),
        )

    def _compare(self, first: str, second: str) -> Comparison | None:
        """Return the test of two runs' difference; None while it is computed."""
        key = (first, second)
        if key not in self._comparisons:
            self._comparisons[key] = BackgroundWork(
                partial(
                    compare,
                    self._content.runs[first],
                    self._content.runs[second],
                    condition="federated",
                    against="federated",
                )
            )
        return self._comparisons[key].get()

    def show_ledgers(self, _request: Request) -> Response:
        """Show what left each site according to its ledger."""
        ledgers = []
        for name, kit in self._content.kits.items():
            report, lines = ledger_reader(kit).read_ledger(kit)
            by_task: dict[tuple[str, str], list[Any]] = {}
            for line in lines:
                by_task.setdefault((line["run"], line["task"]), []).append(line)
            newest = lines[: -_LEDGER_LINES - 1 : -1]
            ledgers.append((name, report, by_task, newest))
        return self._render(
            "ledger.html", section="/ledger", ledgers=ledgers, format_size=format_size
        )

    # ---- errors in notes

    def show_errors(self, request: Request) -> Response:
        """Show counts by type and kind, and the mentions that a filter selects."""
        review = self._review()
        filters = parse_filter(request.query_params)
        items = review.select(filters)
        pages = max(1, ceil(len(items) / _ERRORS_PER_PAGE))
        page = min(pages, _page_number(request.query_params.get("page", "")))
        first = (page - 1) * _ERRORS_PER_PAGE
        return self._render(
            "errors.html",
            section="/errors",
            review=review,
            filters=filters,
            counts=review.count_kinds(),
            total=len(items),
            items=items[first : first + _ERRORS_PER_PAGE],
            first=first,
            page=page,
            pages=pages,
            order_names=_ORDER_NAMES,
            export_names=_EXPORT_NAMES,
        )

    def show_item(self, request: Request) -> Response:
        """Show one mention in its note with the possible decisions."""
        review, filters, item = self._item(request)
        source = review.sources[item.source]
        document = review.document(item)
        length = len(document.text)
        low, high = 0, length
        if length > 3 * _CONTEXT:
            low = max(0, item.span.start - _CONTEXT)
            high = min(length, item.span.end + _CONTEXT)
        predicted = source.predicted[item.document]
        before, after = review.neighbours(item, filters)
        return self._render(
            "item.html",
            section="/errors",
            review=review,
            filters=filters,
            item=item,
            source=source,
            document=document,
            stretches=cut_at_mentions(document.spans, predicted.spans, low, high),
            low=low,
            high=high,
            before=before,
            after=after,
        )

    def decide(self, request: Request, form: Form) -> Response:
        """Save a decision and redirect to the next mention."""
        review, filters, item = self._item(request)
        # The decision may remove the item from the list.
        _, after = review.neighbours(item, filters)
        action = form.get("action", "")
        review.decide(item, action, form.get("label", "").strip())
        stays = action == UNDO or not after
        number = item.number if stays else after[0].number
        return self._redirect(f"/errors/{number}", filters, "#here")

    def export(self, request: Request) -> Response:
        """Return the corrected notes as a download."""
        from starlette.responses import Response

        review = self._review()
        format = request.path_params["format"]
        if format not in _EXPORT_NAMES:
            known = ", ".join(_EXPORT_NAMES)
            raise ConfigError(f"unknown format {format!r}; known: {known}")
        allow_loss = bool(request.query_params.get("anyway"))
        try:
            file = self._export_file(review, format, allow_loss=allow_loss)
        except LossyError as error:
            return self._show_loss(request, format, error)
        if file is None:
            raise _NotReady("The export is being written")
        name, data = file
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(data, media_type="application/octet-stream", headers=headers)

    def _export_file(
        self, review: Review, format: str, *, allow_loss: bool
    ) -> tuple[str, bytes] | None:
        """Return the name and content of an export; None while it is written.

        Raises:
            LossyError: The format cannot represent everything.
        """
        key = (format, allow_loss)
        decisions = review.decisions
        export = self._exports.get(key)
        if export is None or export.decisions != decisions:
            work = partial(review.export, format, allow_loss=allow_loss)
            export = _Export(decisions, BackgroundWork(work))
            self._exports[key] = export
        return export.file.get(_EXPORT_SECONDS)

    def _show_loss(self, request: Request, format: str, error: LossyError) -> Response:
        """Ask whether to export what a format can represent."""
        losses = ", ".join(f"{kind} ({count:,})" for kind, count in error.lost.items())
        return self._render(
            "message.html",
            status=409,
            message=f"{_EXPORT_NAMES[format]} cannot represent everything in these "
            f"notes: {losses}. The notes themselves are not changed.",
            anyway=request.url.path,
        )

    def _review(self) -> Review:
        if self._content.review is None:
            raise ConfigError("there are no notes here: fednotes ui MODEL NOTES")
        review = self._content.review.get()
        if review is None:
            raise _NotReady("The model is reading the notes")
        return review

    def _item(self, request: Request) -> tuple[Review, Filter, Item]:
        """Return the review, filter and mention that an address names."""
        review = self._review()
        item = _pick(review.items, request, "mention")
        return review, parse_filter(request.query_params), item

    # ---- a text

    def show_trial(self, _request: Request) -> Response:
        """Show a form for a text to try the model on."""
        self._model()
        return self._render_trial("", None)

    def try_text(self, _request: Request, form: Form) -> Response:
        """Show the mentions that the model finds in a text."""
        model = self._model()
        text = form.get("text", "").replace("\r\n", "\n")
        if len(text) > _MAX_TEXT:
            raise ConfigError(
                f"the text has over {_MAX_TEXT:,} characters; try a shorter one"
            )
        if not text.strip():
            return self._render_trial(text, None)
        (result,) = model([Document("text", text)])
        return self._render_trial(text, result)

    def _model(self) -> Predict:
        if self._content.model is None:
            raise ConfigError("there is no model here: fednotes ui MODEL")
        return self._content.model

    def _render_trial(self, text: str, result: Document | None) -> Response:
        spans = () if result is None else result.spans
        return self._render(
            "try.html",
            section="/try",
            text=text,
            result=result,
            stretches=cut_at_mentions((), spans, 0, len(text)),
            max_text=_MAX_TEXT,
        )


def _has_ended(run_folder: Path) -> bool:
    return (run_folder / SUMMARY).is_file()


def _pick(items: Sequence[T], request: Request, name: str) -> T:
    """Return the item whose number is in the address, or raise ConfigError.

    Args:
        items: The items.
        request: The request.
        name: How messages refer to an item.
    """
    text = request.path_params["number"]
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) >= len(items):
        raise ConfigError(
            f"there is no {name} {clean(text, 20)}; there are {len(items)}, counted "
            "from 0"
        )
    return items[int(text)]


def _page_number(text: str) -> int:
    """Return the number of a page; 1 if the text is not the number of a page."""
    if not re.fullmatch("[0-9]{1,6}", text):
        return 1
    return max(1, int(text))
