"""The local page: what its addresses show, and who may ask.

It listens on 127.0.0.1 alone. A random token in the first address becomes a cookie; the Host that
a request names, and the Origin of one that changes something, must be this page's own, so that no
other site in the same browser reads or writes here. Nothing is fetched from anywhere.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from itertools import pairwise
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode

from markupsafe import Markup, escape

from fednotes.core.cleaning import clean
from fednotes.core.errors import ConfigError, FednotesError, MissingExtra
from fednotes.core.types import Document, Span
from fednotes.data.formats import read
from fednotes.metrics.spans import KINDS
from fednotes.report.html import environment
from fednotes.serving.models import MentionModel, load
from fednotes.taggers.saving import is_model
from fednotes.ui.review import (
    ORDERS,
    Filter,
    Item,
    Later,
    Review,
    compared,
    kinds_of,
    offered,
)

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

HOST = "127.0.0.1"
MOST_FORM = 2**20  # bytes of what a page sends
MOST_TEXT = 100_000  # characters of a text to try
_PAGE = 50  # errors of a list
_AROUND = 6_000  # characters of a longer note before and after a mention
_NEAR = 40  # before a mention in a list; twice as many after it
_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'"
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
_STATIC = {
    "app.css": ("fednotes.ui", "static/app.css", "text/css"),
    "app.js": ("fednotes.ui", "static/app.js", "text/javascript"),
    "icon.svg": ("fednotes.ui", "static/icon.svg", "image/svg+xml"),
    "report.css": ("fednotes.report", "templates/style.css", "text/css"),
}
NAMES = {
    "correct": "Right",
    "boundary": "Boundary",
    "type": "Type",
    "both": "Boundary and type",
    "missed": "Missed",
    "spurious": "Spurious",
}
Form = Mapping[str, str]
Predict = Callable[[Sequence[Document]], Sequence[Document]]


@dataclass
class Desk:
    """What the page is about. model: finds mentions; about: its name; sure: what its confidence
    is."""

    review: Later[Review] | None = None
    model: Predict | None = None
    about: str = ""
    sure: str = ""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    @property
    def sections(self) -> list[tuple[str, str]]:
        """The page's parts: address and name."""
        found = [("/errors", "Errors")] if self.review is not None else []
        return [*found, *([("/try", "Try")] if self.model is not None else [])]


def application(desk: Desk) -> Callable[..., Any]:
    """The ASGI application of a page."""
    try:
        from starlette.applications import Starlette
        from starlette.concurrency import run_in_threadpool
        from starlette.exceptions import HTTPException
        from starlette.routing import Route
    except ImportError as error:
        raise MissingExtra("starlette", "ui") from error
    pages = Pages(desk)

    def route(path: str, handler: Callable[[Request, Form], Response], *methods: str) -> Route:
        async def answer(request: Request) -> Response:
            form = await _form(request) if request.method == "POST" else {}
            try:
                return await run_in_threadpool(handler, request, form)
            except FednotesError as error:
                return pages.refused(str(error), 400)

        return Route(path, answer, methods=methods or ("GET",))

    async def failed(request: Request, error: Exception) -> Response:
        told = error if isinstance(error, HTTPException) else None
        return pages.refused(told.detail if told else "", told.status_code if told else 500)

    routes = [
        route("/", pages.start),
        route("/static/{name}", pages.static),
        route("/errors", pages.errors),
        route("/errors/{number:int}", pages.item),
        route("/errors/{number:int}", pages.decide, "POST"),
        route("/export/{format}", pages.export),
        route("/try", pages.trial, "GET", "POST"),
    ]
    return _guarded(Starlette(routes=routes, exception_handlers={HTTPException: failed}), pages)


def _guarded(app: Callable[..., Any], pages: Pages) -> Callable[..., Any]:
    """The application for those who have the token, and for nobody else."""
    from starlette.requests import Request
    from starlette.responses import RedirectResponse, Response

    token = pages.desk.token.encode()

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await app(scope, receive, send)
            return
        request, port = Request(scope), (scope.get("server") or (HOST, 80))[1]
        hosts = (f"{HOST}:{port}", f"localhost:{port}")
        host, cookie = request.headers.get("host", ""), f"fednotes-{port}"
        given = request.query_params.get("token", "").encode()
        held = request.cookies.get(cookie, "").encode()

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                more = [(k.encode(), v.encode()) for k, v in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        answer: Response | None = None
        if host not in hosts:
            answer = Response("not a name of this page", 421)
        elif request.method not in ("GET", "HEAD") and (
            request.headers.get("origin") != f"http://{host}"
        ):
            answer = pages.refused("this came from another page: nothing was done", 403)
        elif given and secrets.compare_digest(given, token):
            answer = RedirectResponse(scope["path"], 303)
            answer.set_cookie(cookie, pages.desk.token, httponly=True, samesite="strict")
        elif not secrets.compare_digest(held, token):
            answer = pages.refused("open the whole address that the terminal shows", 403)
        await (answer or app)(scope, receive, sent)

    return guarded


async def _form(request: Request) -> Form:
    """The fields that a page sends, bounded before they are parsed."""
    from starlette.exceptions import HTTPException

    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MOST_FORM:
            raise HTTPException(413, f"over {MOST_FORM:,} bytes: send less")
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=50))
    except ValueError as error:
        raise HTTPException(400, "not what a form of this page sends") from error


class Pages:
    """What each address shows."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self._templates = environment("fednotes.ui")
        self._templates.globals |= {"NAMES": NAMES, "KINDS": KINDS, "address": address}
        self._templates.filters["note"] = shown

    def page(self, name: str, code: int = 200, **values: Any) -> Response:
        """A template, filled."""
        from starlette.responses import HTMLResponse

        given = {"desk": self.desk, "here": "", "poll": 0, **values}
        return HTMLResponse(self._templates.get_template(name).render(given), code)

    def refused(self, why: str, status: int) -> Response:
        """Why something was not done."""
        return self.page("message.html", status, why=why or "something went wrong", status=status)

    def start(self, request: Request, form: Form) -> Response:
        """The first part that there is."""
        from starlette.responses import RedirectResponse

        return RedirectResponse(self.desk.sections[0][0], 303)

    def static(self, request: Request, form: Form) -> Response:
        """Style sheets and the script."""
        from starlette.responses import Response

        found = _STATIC.get(request.path_params["name"])
        if found is None:
            return self.refused("there is no such file", 404)
        package, path, kind = found
        return Response(resources.files(package).joinpath(path).read_bytes(), media_type=kind)

    # ---- errors

    def errors(self, request: Request, form: Form) -> Response:
        """Counts by type and kind, and a list of the errors that a filter takes."""
        review, by = self._review(), _filter(request.query_params)
        if review is None:
            return self.page("wait.html", here="/errors", poll=2, what="The model reads the notes")
        chosen = review.select(by)
        pages = max(1, ceil(len(chosen) / _PAGE))
        number = min(pages, _whole(request.query_params.get("page", "1")))
        rows = []
        for item in chosen[(number - 1) * _PAGE : number * _PAGE]:
            text, span = review.document(item).text, item.span
            near = (
                text[max(0, span.start - _NEAR) : span.start],
                text[span.end : span.end + _NEAR],
            )
            rows.append((item, near[0], text[span.start : span.end][:200], near[1]))
        counts = review.counts()
        return self.page(
            "errors.html",
            here="/errors",
            review=review,
            by=by,
            rows=rows,
            total=len(chosen),
            number=number,
            pages=pages,
            counts=counts,
            sums=kinds_of(counts),
            orders=ORDERS,
            formats=offered(),
        )

    def item(self, request: Request, form: Form) -> Response:
        """One mention in its note, and what can be decided of it."""
        review, by = self._review(), _filter(request.query_params)
        if review is None:
            return self.page("wait.html", here="/errors", poll=2, what="The model reads the notes")
        item = _numbered(review, request)
        chosen = review.select(by)
        before = [each for each in chosen if by.key(each) < by.key(item)]
        after = [each for each in chosen if by.key(each) > by.key(item)]
        source, gold = review.sources[item.source], review.document(item)
        said = source.predicted[item.document]
        first = max(0, item.span.start - _AROUND)
        last = min(len(gold.text), item.span.end + _AROUND)
        whole = len(gold.text) <= 3 * _AROUND
        window = (0, len(gold.text)) if whole else (first, last)
        return self.page(
            "item.html",
            here="/errors",
            review=review,
            by=by,
            item=item,
            source=source,
            document=gold,
            decision=review.decision(item),
            place=len(before) + 1,
            total=len(chosen),
            chosen=item in chosen,
            previous=before[-1] if before else None,
            following=after[0] if after else None,
            window=None if whole else window,
            note=marked(gold.text, gold.spans, said.spans, window, item),
        )

    def decide(self, request: Request, form: Form) -> Response:
        """Write down a decision and go on to the next mention."""
        from starlette.responses import RedirectResponse

        review, by = self._review(), _filter(request.query_params)
        if review is None:
            raise ConfigError("the notes are still being read: nothing was decided")
        item = _numbered(review, request)
        after = [each for each in review.select(by) if by.key(each) > by.key(item)]
        action = form.get("action", "")
        review.decide(item, action, form.get("label", "").strip())
        to = item if action == "undo" or not after else after[0]
        return RedirectResponse(address(f"/errors/{to.number}", by) + "#here", 303)

    def export(self, request: Request, form: Form) -> Response:
        """The corrected notes, to be saved."""
        from starlette.responses import Response

        review = self._review()
        if review is None:
            raise ConfigError("the notes are still being read: nothing was exported")
        name, data = review.export(request.path_params["format"])
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        return Response(data, media_type="application/octet-stream", headers=headers)

    def _review(self) -> Review | None:
        if self.desk.review is None:
            raise ConfigError("there are no notes here: fednotes ui MODEL NOTES")
        return self.desk.review.get()

    # ---- a text

    def trial(self, request: Request, form: Form) -> Response:
        """A text, and what the model finds in it."""
        if self.desk.model is None:
            raise ConfigError("there is no model here: fednotes ui MODEL")
        text = form.get("text", "").replace("\r\n", "\n")
        found: Document | None = None
        if len(text) > MOST_TEXT:
            raise ConfigError(f"over {MOST_TEXT:,} characters: try a shorter text")
        if text.strip():
            (found,) = self.desk.model([Document("text", text)])
        note = marked(text, (), found.spans, (0, len(text))) if found else ""
        return self.page("try.html", here="/try", text=text, found=found, note=note)


def _numbered(review: Review, request: Request) -> Item:
    number: int = request.path_params["number"]
    if number >= len(review.items):
        raise ConfigError(f"there is no mention {number}: there are {len(review.items)}")
    return review.items[number]


def _whole(text: str) -> int:
    return int(text) if re.fullmatch("[0-9]{1,6}", text) and int(text) else 1


def _filter(query: Mapping[str, str]) -> Filter:
    """The filter that an address names; what is no value of a key is left out."""
    plain, kind, order = Filter(), query.get("kind", ""), query.get("order", "")
    given = {key: query.get(key, "") for key in ("least", "most")}
    bounds = {
        k: float(v) for k, v in given.items() if re.fullmatch(r"\d{1,3}(\.\d{1,6})?", v, re.A)
    }
    return Filter(
        kind if kind in (*KINDS, "all") else plain.kind,
        query.get("label", ""),
        query.get("site", ""),
        bounds.get("least", plain.least),
        bounds.get("most", plain.most),
        order if order in ORDERS else plain.order,
        query.get("open", "") == "1",
    )


def address(path: str, by: Filter, **more: Any) -> str:
    """An address with a filter; what is as it is without one is left out."""
    plain = asdict(Filter())
    given = {k: v for k, v in (asdict(by) | more).items() if v != plain.get(k, "")}
    given |= {"open": 1} if given.get("open") else {}
    return f"{path}?{urlencode(given)}" if given else path


# ---- text with marks


def shown(text: str) -> Markup:
    """A note's text as it stands, but for what moves the cursor or is not seen: that is spelt."""
    parts = re.split("([\n\t\xa0]+)", text.replace("\r\n", "\n"))
    return escape("".join(p if n % 2 else clean(p, None) for n, p in enumerate(parts)))


def marked(
    text: str,
    gold: Sequence[Span],
    predicted: Sequence[Span],
    window: tuple[int, int],
    item: Item | None = None,
) -> Markup:
    """A stretch of a note with its mentions: annotated ones are underlined, predicted ones have a
    dashed line above; those of `item` stand out, and are named to screen readers."""
    low, high = window
    sides = [("g", s) for s in gold] + [("p", s) for s in predicted]
    sides = [(side, s) for side, s in sides if s.end > low and s.start < high]
    own = (
        [(s, n) for s, n in ((item.gold, "annotated"), (item.predicted, "predicted")) if s]
        if (item)
        else []
    )
    edges = {low, high, *(e for _, s in sides for piece in s.pieces for e in piece)}
    cuts = sorted(edge for edge in edges if low <= edge <= high)
    covered: list[list[tuple[str, Span]]] = [[] for _ in cuts]
    for side, span in sides:
        for piece in span.pieces:
            for place in range(*(bisect_left(cuts, edge) for edge in piece)):
                covered[place].append((side, span))
    out, begun = [Markup("…" if low else "")], False
    for (start, end), over in zip(pairwise(cuts), covered, strict=False):
        inside = any(s.start <= start < s.end for s, _ in own)
        css = " ".join(dict.fromkeys([*(c for c, _ in over), *(["own"] if inside else [])]))
        words = [f"{n} {s.label}: " for s, n in own if s.start == start]
        anchor = Markup(' id="here"') if inside and not begun else ""
        begun = begun or inside
        if words:
            out.append(Markup('<span class="unseen">[{}</span>').format(clean(" ".join(words))))
        words_here = shown(text[start:end])
        whole = Markup('<span class="{}"{}>{}</span>').format(css, anchor, words_here)
        out.append(whole if css else words_here)
        ended = {(s.label, c) for c, s in over if s.end == end}
        for label in sorted({name for name, _ in ended}):
            kinds = "".join(c for c in "gp" if (label, c) in ended)
            chip = Markup('<span class="chip {}" aria-hidden="true">{}</span>')
            out.append(chip.format(" ".join(kinds), clean(label, 40)))
        if any(s.end == end for s, _ in own):
            out.append(Markup('<span class="unseen">] </span>'))
    return Markup("").join(out) + ("…" if high < len(text) else "")


# ---- the page itself


def opened(
    paths: Sequence[Path], format: str = "", file: Path | None = None, **options: Any
) -> Desk:
    """What paths are about: a model, and notes. file: of corrections; options: of `load`.

    Notes are read at once, and tagged when they are first asked for. Raises FednotesError.
    """
    models = [path for path in paths if path.is_dir() and is_model(path)]
    notes = [path for path in paths if path not in models]
    if len(models) > 1 or (notes and not models):
        told = "two models" if models else "notes and no model"
        raise ConfigError(f"these are {told}: fednotes ui MODEL NOTES, one model")
    model = load(models[0], **options)
    if not isinstance(model, MentionModel):
        raise ConfigError(f"{models[0]}: it finds no mentions; the page is for models that do")
    desk = Desk(model=model, about=str(models[0]), sure=model.confidence)
    if notes:
        names = [
            path.name if len({p.name for p in notes}) == len(notes) else str(path) for path in notes
        ]
        read_in = {
            name: read(path, format or None) for name, path in zip(names, notes, strict=True)
        }
        file = file or notes[0].with_name(f"{notes[0].name}.corrections.json")
        kept, known = file, model.types

        def tagged() -> Review:
            sources = (compared(n, d, known, model) for n, d in read_in.items())
            return Review(tuple(sources), kept, ", ".join(read_in))

        desk.review = Later(tagged)
    return desk


def serve_page(desk: Desk, port: int, say: Callable[[str], None]) -> None:
    """Listen until somebody stops it. port: 0 takes a free one. Raises FednotesError."""
    try:
        import uvicorn
    except ImportError as error:
        raise MissingExtra("uvicorn", "ui") from error
    config = uvicorn.Config(
        application(desk), HOST, port, log_config=None, access_log=False, server_header=False
    )
    try:
        socket = config.bind_socket()
    except SystemExit as error:
        raise FednotesError(f"--port {port}: cannot be listened on; 0 takes a free one") from error
    with socket:
        place = f"http://{HOST}:{socket.getsockname()[1]}"
        say(f"open {place}/?token={desk.token} in a browser on this computer; Ctrl-C ends it")
        uvicorn.Server(config).run(sockets=[socket])
