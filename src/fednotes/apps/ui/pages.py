"""Local web UI: its pages and its access control.

The server listens on 127.0.0.1 only. The first address contains a random token, which
becomes a cookie. Browsers send cookies to every port of a computer, including those of
other users' programs, so all addresses begin with a random folder and the cookie is
restricted to it. The `Host` header of each request, and the `Origin` of each request
that changes something, must be those of this server, so that no other web site in the
same browser can read or write here. The pages load nothing from other servers.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, urlencode

from markupsafe import Markup, escape

from fednotes.api import read
from fednotes.apps.ui.review import (
    Filter,
    Item,
    Later,
    Review,
    compared,
    filter_of,
    of_run,
    require_writable,
)
from fednotes.core import plugins
from fednotes.core.cleaning import clean
from fednotes.core.errors import ConfigError, FednotesError, needs
from fednotes.core.http_server import Refused, read_body, run
from fednotes.core.parsing import shipped
from fednotes.core.types import Document, Span
from fednotes.data.encodings import AUTO
from fednotes.data.formats import LossyError
from fednotes.data.formats.folders import name_paths
from fednotes.data.formats.problems import OnError
from fednotes.jobs.compare import Comparison, compare
from fednotes.jobs.models import MentionModel, PatientModel, folder_of, load
from fednotes.jobs.results import SUMMARY, read_lines, size
from fednotes.jobs.run_folder import is_run, read_progress
from fednotes.metrics.judging import KINDS
from fednotes.report.html import environment, parts_of_page, two_runs
from fednotes.taggers.saving import is_model

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"
MOST_FORM = 2**20  # bytes of what a page sends
_SLOWEST = 15.0  # seconds in which it must come
MOST_TEXT = 100_000  # characters of a text to try
_ROWS = 50  # errors of a list
_LINES = 100  # of a ledger, the newest
_PATIENCE = 2.0  # seconds, until a page says that something is written still
_AGAIN = 5  # seconds, until a run that goes on is looked at again
_AROUND = 6_000  # characters of a longer note before and after a mention
_PAGE = shipped("apps/ui/page.toml")  # its words, and the headers of its answers
Form = Mapping[str, str]
T = TypeVar("T")
Predict = Callable[[Sequence[Document]], Sequence[Document]]


@dataclass
class Desk:
    """The content of the web UI.

    Attributes:
        review: The errors to review, or None.
        model: Finds mentions in documents, or None.
        about: The name of the model.
        sure: A description of the model's confidence.
        runs: The folders of runs by name.
        kits: The folders of site kits by name.
        token: The secret that grants access.
        root: The random folder with which all addresses begin.
    """

    review: Later[Review] | None = None
    model: Predict | None = None
    about: str = ""
    sure: str = ""
    runs: dict[str, Path] = field(default_factory=dict)
    kits: dict[str, Path] = field(default_factory=dict)
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    root: str = field(default_factory=lambda: f"/{secrets.token_urlsafe(16)}")

    @property
    def sections(self) -> list[tuple[str, str]]:
        """The available sections, each as address and name."""
        parts = {
            "Runs": ("/runs", self.runs),
            "Side by side": ("/compare", len(self.runs) > 1),
            "What left": ("/ledger", self.kits),
            "Errors": ("/errors", self.review),
            "Try": ("/try", self.model),
        }
        return [(path, name) for name, (path, there) in parts.items() if there]


def application(desk: Desk) -> Callable[..., Any]:
    """Return the ASGI application, which serves requests with the token only."""
    with needs("starlette", "ui"):
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.exceptions import HTTPException
        from starlette.middleware.base import BaseHTTPMiddleware
        from starlette.routing import Mount, Route
        from starlette.staticfiles import StaticFiles
    pages = Pages(desk)

    def route(
        path: str, handler: Callable[[Request, Form], Response], *methods: str
    ) -> Route:
        async def answer(request: Request) -> Response:
            form = await _form(request) if request.method == "POST" else {}
            return await run_in_threadpool(handler, request, form)

        return Route(path, answer, methods=methods or ("GET",))

    folders: Any = [("fednotes.apps.ui", "static"), ("fednotes.report", "templates")]
    routes = [
        route("/", pages.start),
        Mount("/static", StaticFiles(packages=folders)),
        route("/runs", pages.runs),
        route("/runs/{number}", pages.run),
        route("/compare", pages.compare),
        route("/ledger", pages.ledger),
        route("/errors", pages.errors),
        route("/errors/{number}", pages.item),
        route("/errors/{number}", pages.decide, "POST"),
        route("/export/{format}", pages.export),
        route("/try", pages.trial, "GET", "POST"),
    ]
    refused = dict.fromkeys(
        (HTTPException, Refused, FednotesError, _Soon), pages.refused
    )
    app = Starlette(
        routes=[Mount(desk.root, routes=routes)], exception_handlers=refused
    )
    return BaseHTTPMiddleware(app, dispatch=pages.guarded)


async def _form(request: Request) -> Form:
    """Return the form fields of a request; raise Refused if it is too large or bad."""
    body = await read_body(request.receive, MOST_FORM, _SLOWEST)
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=50))
    except ValueError as error:
        raise Refused(400, "not what a form of this page sends") from error


class _Soon(Exception):
    """The requested page is not ready; the message says why, and the browser retries."""


class Pages:
    """The handlers of the web UI, one for each address."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self._written: dict[tuple[str, bool], tuple[Any, Later[tuple[str, bytes]]]] = {}
        self._tests: dict[tuple[str, str], Later[Comparison]] = {}
        self._templates = environment("fednotes.apps.ui")
        self._templates.filters["note"] = shown

    def page(self, name: str, code: int = 200, **values: Any) -> Response:
        """Return the response of a rendered template."""
        from starlette.responses import HTMLResponse

        given = {"desk": self.desk, "root": self.desk.root, "address": self.address}
        given |= {"KINDS": KINDS, "said": _PAGE, "here": "", "poll": 0, **values}
        return HTMLResponse(self._templates.get_template(name).render(given), code)

    def refused(self, request: Request, error: Exception) -> Response:
        """Return a page that explains an error, or a page that waits."""
        if isinstance(error, _Soon) and request.method != "POST":
            return self.page("wait.html", poll=2, what=str(error))
        status = getattr(error, "status_code", 400)
        why = getattr(error, "detail", str(error))
        return self.page("message.html", status, why=why, status=status)

    def address(self, path: str, by: Filter | None = None, **more: Any) -> str:
        """Return an address with a filter's values, omitting those that are defaults."""
        plain = asdict(Filter())
        given = asdict(by or Filter()) | more
        given = {k: v for k, v in given.items() if v != plain.get(k, "")}
        given |= {"open": 1} if given.get("open") else {}
        return self.desk.root + path + (f"?{urlencode(given)}" if given else "")

    async def guarded(
        self, request: Request, go_on: Callable[[Request], Any]
    ) -> Response:
        """Pass on a request that carries the token; refuse all others.

        Refusals contain no address, since addresses begin with the secret folder.
        """
        from starlette.responses import PlainTextResponse, RedirectResponse

        port, token = (
            (request.scope.get("server") or (HOST, 80))[1],
            self.desk.token.encode(),
        )
        host, cookie = request.headers.get("host", ""), f"fednotes-{port}"
        given = request.query_params.get("token", "").encode()
        held = request.cookies.get(cookie, "").encode()
        answer: Response
        if host not in (f"{HOST}:{port}", f"localhost:{port}"):
            answer = PlainTextResponse("not a name of this page", 421)
        elif request.method not in ("GET", "HEAD") and (
            request.headers.get("origin") != f"http://{host}"
        ):
            answer = PlainTextResponse(
                "this came from another page: nothing was done", 403
            )
        elif given and secrets.compare_digest(given, token):
            answer = RedirectResponse(request.scope["path"], 303)
            only: Any = {"path": self.desk.root, "httponly": True, "samesite": "strict"}
            answer.set_cookie(cookie, self.desk.token, **only)
        elif not secrets.compare_digest(held, token):
            answer = PlainTextResponse(
                "open the whole address that the terminal shows", 403
            )
        else:
            answer = await go_on(request)
        answer.headers.update(_PAGE["headers"])
        return answer

    def to(self, path: str, by: Filter | None = None, anchor: str = "") -> Response:
        """Return a redirect to another page."""
        from starlette.responses import RedirectResponse

        return RedirectResponse(self.address(path, by) + anchor, 303)

    def start(self, request: Request, form: Form) -> Response:
        """Redirect to the first available section."""
        return self.to(self.desk.sections[0][0])

    # ---- runs

    def runs(self, request: Request, form: Form) -> Response:
        """Show the results of all runs; redirect to the run if there is only one."""
        if len(self._runs) == 1:
            return self.to("/runs/0")
        rows = [
            (name, read_progress(folder), (folder / SUMMARY).is_file())
            for name, folder in self._runs
        ]
        return self.page("runs.html", here="/runs", rows=rows)

    def run(self, request: Request, form: Form) -> Response:
        """Show the report of a run; the page of an unfinished run refreshes itself."""
        folder = _numbered(self._runs, request, "run")[1]
        lines, ended = read_lines(folder), (folder / SUMMARY).is_file()
        parts = parts_of_page(read_progress(folder), lines)
        parts["title"] = parts["result"].title or folder.name
        last = lines[-1] if lines else {}
        poll = 0 if ended else _AGAIN
        return self.page(
            "run_page.html", here="/runs", poll=poll, ended=ended, last=last, **parts
        )

    @property
    def _runs(self) -> list[tuple[str, Path]]:
        return [*self.desk.runs.items()]

    def compare(self, request: Request, form: Form) -> Response:
        """Show two runs side by side and, on demand, a test of their difference."""
        names = [*self.desk.runs]
        if len(names) < 2:
            raise ConfigError("name two runs: fednotes ui RUN RUN")
        asked = [request.query_params.get(key, "") for key in "ab"]
        one, two = (a if a in names else names[n] for n, a in enumerate(asked))
        folders = {name: self.desk.runs[name] for name in (one, two)}
        parts = two_runs(
            {n: (read_progress(f), read_lines(f)) for n, f in folders.items()}
        )
        tests, asked_for = None, bool(request.query_params.get("test"))
        if asked_for:
            test = partial(compare, condition="federated", against="federated")
            begun = Later(partial(test, folders[one], folders[two]))
            tests = self._tests.setdefault((one, two), begun).get()
        poll = 2 if asked_for and tests is None else 0
        parts |= {"names": names, "one": one, "two": two, "tests": tests, "poll": poll}
        return self.page("compare.html", here="/compare", **parts)

    def ledger(self, request: Request, form: Form) -> Response:
        """Show what left each site according to its ledger."""
        found = []
        for name, kit in self.desk.kits.items():
            report, lines = _ledger_source(kit).read_ledger(kit)
            parts: dict[tuple[str, str], list[Any]] = {}
            for line in lines:
                parts.setdefault((line["run"], line["task"]), []).append(line)
            found.append((name, report, parts, lines[: -_LINES - 1 : -1]))
        return self.page("ledger.html", here="/ledger", found=found, size=size)

    # ---- errors

    def errors(self, request: Request, form: Form) -> Response:
        """Show counts by type and kind, and the mentions that a filter selects."""
        review, by = self._review(), filter_of(request.query_params)
        chosen = review.select(by)
        pages = max(1, ceil(len(chosen) / _ROWS))
        number = min(pages, _whole(request.query_params.get("page", "1")))
        first = (number - 1) * _ROWS
        rows, counts = chosen[first : first + _ROWS], review.counts()
        given: Any = {
            "review": review,
            "by": by,
            "counts": counts,
            "total": len(chosen),
        }
        given |= {"rows": rows, "first": first, "number": number, "pages": pages}
        return self.page("errors.html", here="/errors", **given)

    def item(self, request: Request, form: Form) -> Response:
        """Show one mention in its note with the possible decisions."""
        review, by, item = self._item(request)
        source, gold = review.sources[item.source], review.document(item)
        low, high = 0, len(gold.text)
        if high > 3 * _AROUND:
            low = max(low, item.span.start - _AROUND)
            high = min(high, item.span.end + _AROUND)
        note = stretches(gold.spans, source.predicted[item.document].spans, low, high)
        before, after = review.around(item, by)
        given: Any = {
            "review": review,
            "by": by,
            "item": item,
            "source": source,
            "document": gold,
        }
        given |= {
            "before": before,
            "after": after,
            "note": note,
            "low": low,
            "high": high,
        }
        return self.page("item.html", here="/errors", **given)

    def decide(self, request: Request, form: Form) -> Response:
        """Record a decision and redirect to the next mention."""
        review, by, item = self._item(request)
        after = review.around(item, by)[1]
        action = form.get("action", "")
        review.decide(item, action, form.get("label", "").strip())
        to = item if action == "undo" or not after else after[0]
        return self.to(f"/errors/{to.number}", by, "#here")

    def export(self, request: Request, form: Form) -> Response:
        """Return the corrected notes as a download."""
        from starlette.responses import Response

        review = self._review()
        format, exports = request.path_params["format"], _PAGE["exports"]
        if format not in exports:
            raise ConfigError(f"{format}: written are {', '.join(exports)}")
        key, decided = (
            (format, bool(request.query_params.get("anyway"))),
            review.decisions,
        )
        begun = self._written.get(key)
        if begun is None or begun[0] != decided:
            begun = self._written[key] = decided, Later(partial(review.export, *key))
        try:
            made = begun[1].get(_PATIENCE)
        except LossyError as error:
            kinds = ", ".join(
                f"{kind} ({number:,})" for kind, number in error.lost.items()
            )
            why = f"{exports[format]} cannot hold all of these notes: {kinds}. The notes are whole."
            return self.page(
                "message.html", 409, why=why, status=409, anyway=request.url.path
            )
        if made is None:
            raise _Soon("The notes are being written")
        name, data = made
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(data, media_type="application/octet-stream", headers=headers)

    def _review(self) -> Review:
        if self.desk.review is None:
            raise ConfigError("there are no notes here: fednotes ui MODEL NOTES")
        if (found := self.desk.review.get()) is None:
            raise _Soon("The notes are still being read")
        return found

    def _item(self, request: Request) -> tuple[Review, Filter, Item]:
        """Return the review, filter and mention that an address names."""
        review = self._review()
        item = _numbered(review.items, request, "mention")
        return review, filter_of(request.query_params), item

    # ---- a text

    def trial(self, request: Request, form: Form) -> Response:
        """Show a form for a text and the mentions that the model finds in it."""
        if self.desk.model is None:
            raise ConfigError("there is no model here: fednotes ui MODEL")
        text = form.get("text", "").replace("\r\n", "\n")
        found: Document | None = None
        if len(text) > MOST_TEXT:
            raise ConfigError(f"over {MOST_TEXT:,} characters: try a shorter text")
        if text.strip():
            (found,) = self.desk.model([Document("text", text)])
        note = stretches((), found.spans, 0, len(text)) if found else ()
        return self.page("try.html", here="/try", text=text, found=found, note=note)


def _ledger_source(folder: Path) -> Any:
    """Return the registered module that reads the ledger of a site's kit, if the folder
    is one."""
    for entry in plugins.registered("ledgers").values():
        source = plugins.load(entry, ModuleType)
        if source.is_kit(folder):
            return source
    return None


def _numbered(all: Sequence[T], request: Request, what: str) -> T:
    """Return the element whose number is in the address; raise ConfigError if none."""
    text = request.path_params["number"]
    if not re.fullmatch("[0-9]{1,9}", text) or int(text) >= len(all):
        raise ConfigError(f"there is no {what} {clean(text, 20)}: there are {len(all)}")
    return all[int(text)]


def _whole(text: str) -> int:
    return int(text) if re.fullmatch("[0-9]{1,6}", text) and int(text) else 1


# ---- text with marks


def shown(text: str) -> Markup:
    """Return a note's text as HTML, with control and invisible characters spelt out."""
    parts = re.split("([\n\t\xa0]+)", text.replace("\r\n", "\n"))
    return escape("".join(p if n % 2 else clean(p, None) for n, p in enumerate(parts)))


def stretches(
    gold: Sequence[Span], predicted: Sequence[Span], low: int, high: int
) -> Iterator[tuple[tuple[int, int], list[tuple[str, Span]]]]:
    """A note from `low` to `high`, cut where mentions begin and end: where each stretch
    is, and the mentions that cover it; "g": annotated, "p": predicted."""
    sides = [("g", s) for s in gold] + [("p", s) for s in predicted]
    sides = [(side, s) for side, s in sides if s.end > low and s.start < high]
    edges = {low, high, *(e for _, s in sides for piece in s.pieces for e in piece)}
    cuts = sorted(edge for edge in edges if low <= edge <= high)
    covered: list[list[tuple[str, Span]]] = [[] for _ in cuts]
    for side, span in sides:
        for piece in span.pieces:
            for place in range(*(bisect_left(cuts, edge) for edge in piece)):
                covered[place].append((side, span))
    return zip(pairwise(cuts), covered, strict=False)


# ---- the page itself


def opened(
    paths: Sequence[Path],
    format: str = "",
    file: Path | None = None,
    on_error: OnError = "refuse",
    encoding: str = AUTO,
    **options: Any,
) -> Desk:
    """What paths are about: a model, and notes. file: of corrections; on_error,
    encoding: as `read`; options: of `load`.

    Notes are read at once, and tagged when they are first asked for. Raises
    FednotesError.
    """
    folders = {path: path.resolve().name for path in paths if path.is_dir()}
    models = [path for path in folders if is_model(path)]
    runs = [path for path in folders if path not in models and is_run(path)]
    kits = [path for path in folders if _ledger_source(path) is not None]
    notes = [path for path in paths if path not in (*models, *runs, *kits)]
    if len(models) > 1 or (notes and not models):
        told = "two models" if models else f"{notes[0]} is no model, no run and no kit"
        raise ConfigError(
            f"{told}: fednotes ui MODEL NOTES, with one model, or fednotes ui RUN"
        )
    desk = Desk(about=str(paths[0]), runs=name_paths(runs), kits=name_paths(kits))
    beside = (notes or runs or paths)[0].resolve()
    kept = file or beside.with_name(f"{beside.name}.corrections.json")
    if file or notes:
        require_writable(kept)
    if models:
        model = load(models[0], **options)
        if not isinstance(model, MentionModel):
            raise ConfigError(
                f"{models[0]}: it finds no mentions; the page is for models that do"
            )
        desk.model, desk.about, desk.sure = model, str(models[0]), model.confidence
        held = {
            name: read(path, format or None, on_error, encoding=encoding)
            for name, path in name_paths(notes).items()
        }

        def tagged() -> Review:
            made = (
                compared(name, own, model.types, model, model.explain)
                for name, own in held.items()
            )
            return Review(tuple(made), kept, ", ".join(held))

    if notes:
        desk.review = Later(tagged)
    elif runs and read_progress(runs[0]).holds in ("", "documents"):
        desk.review = Later(partial(of_run, runs[0], kept))
    return desk


def open_ui(
    *paths: str | Path | MentionModel | PatientModel,
    port: int = 0,
    format: str = "",
    corrections: str | Path | None = None,
    on_error: OnError = "refuse",
    encoding: str = AUTO,
    device: str = "cpu",
    backbone: str | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Look at runs, a model's errors in notes, and what left: a page on this computer
    alone, until SIGINT or SIGTERM.

    paths: runs; a model, opened or not, and notes; a site's kit. port: 0 takes a free
        one.
    corrections: where decisions are kept; beside the notes or the run if not given.
    tell: is told the address. The others: as `read` and `load`. Raises FednotesError.
    """
    if not paths:
        raise ConfigError("name a run, a model and notes, or a site's kit")
    file = None if corrections is None else Path(corrections)
    given: Any = {"device": device, "backbone": backbone}
    named_by = [folder_of(path, "a run, a model or notes") for path in paths]
    desk = opened(named_by, format, file, on_error, encoding, **given)

    def ready(place: str) -> None:
        tell(
            f"open {place}{desk.root}/?token={desk.token} in a browser on this computer; "
            "Ctrl-C ends it"
        )

    run(application(desk), HOST, port, ready, extra="ui")
