"""A saved model behind HTTP: `fednotes serve MODEL`.

What comes is judged in this order, and nothing of it is kept or logged: the name that
the server is asked by, or the token; how many requests are under way; the size of the
body while it is read; its content. Texts of all requests that wait are put to the model
together, in one thread.

FastAPI, uvicorn and prometheus-client are of the extra `serve`.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import math
import os
import re
import time
import traceback
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from fednotes import __version__
from fednotes.core.cleaning import NAME, clean
from fednotes.core.errors import ConfigError, DataError, needs, readable
from fednotes.core.http_server import Refused, read_body, run, too_large
from fednotes.core.parsing import JsonError, open_regular, parse_json
from fednotes.core.settings import checked
from fednotes.core.types import Document, Span
from fednotes.data.encodings import AUTO
from fednotes.data.formats import fhir
from fednotes.jobs.inputs import Inputs, inputs_of
from fednotes.jobs.models import MentionModel, PatientFinding, PatientModel, load
from fednotes.jobs.predict import prediction_line

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import Message, Receive, Scope, Send

log = logging.getLogger(__name__)

TOKEN = 20  # characters of a token at least
BATCH, CHARACTERS = (
    32,
    200_000,
)  # texts and characters that are put to the model at once
_LONGEST = 60  # seconds that Retry-After says at most
_FAILED, _GONE = 500, 499  # _GONE is counted, and never sent: its sender went away
_MOST_BYTES = 4096  # of a file with a token
_HALF = re.compile("[\ud800-\udfff]")  # of a surrogate pair
_REFUSED = (401, 403, 408, 413, 415, 422, 429, _FAILED)
_FHIR = "application/fhir+json"
_ISSUES = {
    401: "login",
    413: "too-long",
    422: "invalid",
    429: "throttled",
    _FAILED: "exception",
}
PathLike = str | Path
AnyModel = MentionModel | PatientModel
T = TypeVar("T")


@checked(frozen=True)
class Limits:
    """What the server takes.

    body: bytes of a request. values: JSON values of a request, commas and brackets
    within texts aside. texts: of one request; characters: of one text. under_way:
    requests at a time, those that wait among them; one more is refused. patience:
    seconds in which a body must come.
    """

    body: Annotated[int, Field(ge=1)] = 4_000_000
    values: Annotated[int, Field(ge=1)] = 20_000
    texts: Annotated[int, Field(ge=1)] = 64
    characters: Annotated[int, Field(ge=1)] = 100_000
    under_way: Annotated[int, Field(ge=1)] = 64
    patience: Annotated[float, Field(gt=0)] = 15.0

    def taken(self, texts: list[str]) -> list[str]:
        """The texts, if these are not too many, or too long. Raises Refused."""
        if len(texts) > self.texts:
            raise Refused(
                413, f"{len(texts):,} texts: at most {self.texts:,} in a request"
            )
        for number, text in enumerate(texts, 1):
            if len(text) > self.characters:
                most = f"at most {self.characters:,}: divide it"
                raise Refused(
                    413, f"text {number} has {len(text):,} characters, {most}"
                )
            if not text.isascii() and _HALF.search(text):
                raise Refused(
                    422, f"text {number} has half a character: decode it anew"
                )
        return texts


async def _refuse(refused: Refused, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer a request by a refusal; where FHIR was sent, by an OperationOutcome."""
    from starlette.responses import JSONResponse

    told: dict[str, Any] = {"detail": refused.detail}
    kind = "application/json"
    if scope["path"] == "/fhir":
        issue = {
            "severity": "error",
            "code": _ISSUES.get(refused.status_code, "processing"),
            "diagnostics": refused.detail,
        }
        told = {"resourceType": "OperationOutcome", "issue": [issue]}
        kind = _FHIR
    answer = JSONResponse(told, refused.status_code, refused.headers, kind)
    await answer(scope, receive, send)


# ---- what is asked and answered ------------------------------------------------------


Share = Annotated[float, Field(ge=0, le=1, description="Leave out what is less sure.")]


class Question(BaseModel, extra="forbid", strict=True):
    """One text, or several."""

    text: str | None = Field(None, description="One text; or give `texts`.")
    texts: list[str] | None = None
    threshold: Share = 0.0
    offsets: Literal["characters", "utf16"] = Field(
        "characters",
        description="characters: Unicode code points, as Python counts; utf16: code units, as "
        "JavaScript, Java and C# count.",
    )

    def shown(self, document: Document) -> Mentions:
        """What was found, as it was asked for."""
        wide = [place for place, c in enumerate(document.text) if c > "\uffff"]

        def at(place: int) -> int:
            return place + bisect_left(wide, place) * (self.offsets == "utf16")

        return Mentions(
            spans=[
                replace(
                    span,
                    start=at(span.start),
                    end=at(span.end),
                    fragments=tuple(
                        (at(start), at(end)) for start, end in span.fragments
                    ),
                )
                for span in document.spans
                if _sure(span, self.threshold)
            ]
        )


def _sure(span: Span, threshold: float) -> bool:
    return span.confidence is None or span.confidence >= threshold


class Mentions(BaseModel):
    """The mentions of one text as it was sent: start and end count as was asked for.

    What a confidence is: GET /model says.
    """

    spans: list[Span]


class Results(BaseModel, Generic[T]):
    """As many as texts or patients came, in their order."""

    results: list[T]


class PatientNotes(BaseModel, extra="forbid", strict=True):
    """Patients, each with notes."""

    patients: dict[str, list[str]]


class About(BaseModel):
    """The model that answers."""

    types: list[str]
    confidence: str
    version: str


class Refusal(BaseModel):
    """Why nothing was done, and what to do; holds nothing of the texts."""

    detail: str


# ---- the model, asked for many at once -----------------------------------------------


def _length(given: Any) -> int:
    """Return the characters of a text, a document or several texts."""
    return len(given.text if isinstance(given, Document) else "".join(given))


class Batches:
    """Puts what waits to a model together: up to `BATCH` inputs or `CHARACTERS` at a
    time.

    call: gives as many results as it is given inputs, texts or lists of them; runs in a
    thread of its own, never twice at a time.
    """

    def __init__(self, call: Callable[[list[Any]], Sequence[Any]]) -> None:
        self._call = call
        self._waiting: asyncio.Queue[tuple[Any, asyncio.Future[Any]]] = asyncio.Queue()
        self._seconds = 0.1  # that an input takes, by the last ones

    async def results(self, inputs: Sequence[Any]) -> list[Any]:
        """The model's results. Raises what the model raised for one of them."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in inputs]
        for pair in zip(inputs, futures, strict=True):
            self._waiting.put_nowait(pair)
        try:
            return list(await asyncio.gather(*futures))
        finally:
            for future in futures:  # nobody waits for the others any more
                future.cancel()

    def soon(self) -> int:
        """Seconds until what waits now is done, about."""
        return min(_LONGEST, max(1, math.ceil(self._seconds * self._waiting.qsize())))

    async def work(self) -> None:
        """Answer until cancelled."""
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "model")
        try:
            while True:
                chosen = await self._chosen()
                begin = time.perf_counter()
                found = await loop.run_in_executor(
                    thread, self._tried, [i for i, _ in chosen]
                )
                for (_, future), result in zip(chosen, found, strict=True):
                    if future.done():
                        continue
                    if isinstance(result, Exception):
                        future.set_exception(result)
                    else:
                        future.set_result(result)
                spent = (time.perf_counter() - begin) / max(1, len(chosen))
                self._seconds += 0.2 * (spent - self._seconds)
        finally:
            thread.shutdown(wait=False)

    async def _chosen(self) -> list[tuple[Any, asyncio.Future[Any]]]:
        """What the model is asked next; waits for something."""
        chosen, held = [await self._waiting.get()], 0
        while len(chosen) < BATCH and not self._waiting.empty():
            held += _length(chosen[-1][0])
            if held >= CHARACTERS:
                break
            chosen.append(self._waiting.get_nowait())
        return [pair for pair in chosen if not pair[1].done()]

    def _tried(self, inputs: list[Any]) -> Sequence[Any]:
        """Results; what one input did to the model is its own result alone."""
        try:
            return self._call(inputs) if inputs else ()
        except Exception as error:
            if len(inputs) == 1:
                return (error,)
        return [result for given in inputs for result in self._tried([given])]


# ---- who may ask, and how much -------------------------------------------------------


class _Meters:
    """What `GET /metrics` says: counts and seconds, nothing of texts."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = own = CollectorRegistry()
        self.paths: set[str] = set()  # that are counted by name
        by, kind = ("path", "status"), ("path",)
        self.requests = Counter(
            "fednotes_requests", "Requests answered.", by, registry=own
        )
        about = "Seconds until a request was answered."
        self.seconds = Histogram("fednotes_request_seconds", about, kind, registry=own)
        self.under_way = Gauge(
            "fednotes_under_way", "Requests under way.", registry=own
        )
        self.texts = Counter("fednotes_texts", "Texts for the model.", registry=own)
        self.characters = Counter(
            "fednotes_characters", "Their characters.", registry=own
        )

    def count(self, path: str, status: int, seconds: float) -> None:
        path = path if path in self.paths else "other"
        self.requests.labels(path, status).inc()
        self.seconds.labels(path).observe(seconds)


class _Gate:
    """Stands before all that the application does. app: the ASGI application behind it.
    soon: seconds until there is room again."""

    def __init__(
        self,
        app: Any,
        limits: Limits,
        token: str,
        meters: _Meters,
        soon: Callable[[], int],
        takes_tables: bool,
    ) -> None:
        self._takes_tables = takes_tables
        self._app, self._limits, self._meters, self._soon = app, limits, meters, soon
        self._token, self._room = token.encode(), asyncio.Semaphore(limits.under_way)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.perf_counter(), _GONE

        async def telling(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._judged(scope, receive, telling)
        except Refused as no:
            await _refuse(no, scope, receive, telling)
        except Exception as error:  # its words may hold text
            where = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(where.filename).name}:{where.lineno}"
            log.error("a request failed: %s at %s", type(error).__name__, place)
            if status == _GONE:
                failed = Refused(
                    _FAILED, "the model failed; the server's log says where"
                )
                await _refuse(failed, scope, receive, telling)
        finally:
            self._meters.count(scope["path"], status, time.perf_counter() - begin)

    async def _judged(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {key.decode("latin-1"): value for key, value in scope["headers"]}
        self._require_known(scope["path"], headers)
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        length, most = headers.get("content-length", b"0"), self._limits
        if not length.isdigit() or int(length) > most.body:
            raise too_large(most.body)
        if self._room.locked():  # unread, the connection breaks before it is told
            await read_body(receive, most.body, most.patience, keep=False)
            detail = "too many requests are under way: come again"
            raise Refused(429, detail, **{"retry-after": str(self._soon())})
        async with self._room:
            with self._meters.under_way.track_inprogress():
                body = await read_body(receive, most.body, most.patience)
                if self._takes_tables and scope["path"] == "/batch":
                    await _unless_gone(self._app, scope, body, receive, send)
                    return
                kind = (
                    headers.get("content-type", b"").partition(b";")[0].strip().lower()
                )
                if kind not in (b"application/json", _FHIR.encode()):
                    raise Refused(
                        415, "send JSON, with the content-type application/json"
                    )
                try:  # in a thread, so that other requests are answered meanwhile
                    await asyncio.to_thread(
                        parse_json, body, most_values=self._limits.values
                    )
                except JsonError as error:
                    raise Refused(
                        422, f"the body's line {error.line}: {error}"
                    ) from None
                await _unless_gone(self._app, scope, body, receive, send)

    def _require_known(self, path: str, headers: Mapping[str, bytes]) -> None:
        """Raises Refused for who asks without the token, or, where none is needed, by a
        name that a web page made lead here."""
        if not self._token:
            name = re.sub(r":\d+$", "", headers.get("host", b"").decode("latin-1"))
            if not loopback(name.strip("[]").lower()):
                raise Refused(
                    403, "ask by 127.0.0.1 or localhost: without a token no other name"
                )
        elif path != "/health":
            scheme, _, given = headers.get("authorization", b"").partition(b" ")
            right = hmac.compare_digest(given.strip(), self._token)
            if scheme.lower() != b"bearer" or not right:
                more = {"www-authenticate": "Bearer", "connection": "close"}
                raise Refused(
                    401, "send the token: authorization: Bearer TOKEN", **more
                )


async def _unless_gone(
    app: Any, scope: Scope, body: bytes, receive: Receive, send: Send
) -> None:
    """The application's answer to a body that was read; it stops where nobody waits for
    it."""
    unread = [{"type": "http.request", "body": body, "more_body": False}]
    leaving = asyncio.ensure_future(receive())

    async def again() -> Message:
        return unread.pop() if unread else await asyncio.shield(leaving)

    answering = asyncio.ensure_future(app(scope, again, send))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            answering.result()
    finally:
        answering.cancel()
        leaving.cancel()


def loopback(name: str) -> bool:
    """Whether a name is this machine's for itself alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost"


# ---- the application -----------------------------------------------------------------


def application(
    model: AnyModel,
    limits: Limits | None = None,
    token: str = "",
    *,
    batch: bool = False,
) -> FastAPI:
    """Return the application of a model.

    Args:
        model: The model.
        limits: What the server takes.
        token: What requests must show; "" answers to names of loopback only.
        batch: Whether `POST /batch` takes tables of notes.

    Raises:
        ConfigError: The model is of patients, and tables are to be taken.
        MissingExtra: The extra "serve" is not installed.
    """
    if batch and isinstance(model, PatientModel):
        raise ConfigError("--batch needs a model of mentions: this one is of patients")
    with needs("", "serve"):
        import prometheus_client
        from fastapi import Body, FastAPI, Header
        from fastapi.exceptions import RequestValidationError
        from fastapi.responses import (
            JSONResponse,
            PlainTextResponse,
            StreamingResponse,
        )

    most, meters, batches = limits or Limits(), _Meters(), Batches(model)

    @asynccontextmanager
    async def at_work(app: FastAPI) -> AsyncIterator[None]:
        worker = asyncio.ensure_future(batches.work())
        yield
        worker.cancel()

    app = FastAPI(
        title="fednotes",
        version=__version__,
        docs_url=None,  # these pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # to wherever the request says that it was sent
        lifespan=at_work,
        responses={status: {"model": Refusal} for status in _REFUSED},
        # It would tell of exceptions with their messages, wherever the environment
        # says.
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
            "auto_configure": False,
        },
    )
    app.add_middleware(
        _Gate,
        limits=most,
        token=token,
        meters=meters,
        soon=batches.soon,
        takes_tables=batch,
    )

    @app.exception_handler(RequestValidationError)
    async def wrong(request: object, error: RequestValidationError) -> None:
        told = (
            f"{'.'.join(map(_known, e['loc']))}: {e['msg']}" for e in error.errors()
        )
        raise Refused(422, "; ".join(clean(each, 2 * NAME) for each in islice(told, 5)))

    async def results(inputs: list[Any], texts: list[str]) -> list[Any]:
        meters.texts.inc(len(texts))
        meters.characters.inc(sum(map(len, texts)))
        return await batches.results(inputs)

    async def predict(asked: Question) -> Results[Mentions]:
        """Find the mentions in one text, or in several."""
        if (asked.text is None) == (asked.texts is None):
            raise Refused(422, "give `text` or `texts`")
        texts = most.taken(asked.texts or [] if asked.text is None else [asked.text])
        return Results(
            results=[asked.shown(found) for found in await results(texts, texts)]
        )

    async def predict_patients(asked: PatientNotes) -> Results[PatientFinding]:
        """Find the phenotypes of patients in their notes."""
        if any(map(_HALF.search, asked.patients)):
            raise Refused(422, "a patient's name has half a character: decode it anew")
        notes = list(asked.patients.values())
        found = await results(
            notes, most.taken([text for own in notes for text in own])
        )
        named = zip(asked.patients, found, strict=True)
        return Results(
            results=[replace(one, patient=patient) for patient, one in named]
        )

    async def predict_table(
        table: bytes = Body(media_type="text/csv"),
        content_type: str = Header(""),
        content_encoding: str = Header(""),
        format: TableFormat | None = None,
        column: str | None = None,
        encoding: str = AUTO,
        threshold: Share = 0.0,
    ) -> Any:
        """Find the mentions in the notes of a table; a JSON line a note, in their
        order.

        The table is CSV, TSV, JSON lines or Parquet, also packed by gzip or Zstandard.
        """
        ending = _ending(table, content_type, content_encoding, format)
        folder = TemporaryDirectory(prefix="fednotes-")  # its owner alone can read it

        def opened() -> Inputs:
            path = Path(folder.name, f"notes{ending}")
            path.write_bytes(table)
            inputs = inputs_of(str(path), column=column or None, encoding=encoding)
            _require_taken(inputs, most)
            return inputs

        try:
            documents = iter(await asyncio.to_thread(opened))
        except (ConfigError, DataError) as error:
            folder.cleanup()
            told = str(error).replace(f"{folder.name}/", "")
            raise Refused(422, clean(told, 4 * NAME)) from None
        except Refused:
            folder.cleanup()
            raise

        async def lines() -> AsyncIterator[str]:
            with folder:
                while window := await asyncio.to_thread(_window, documents):
                    found = await results(window, [own.text for own in window])
                    for note, own in zip(window, found, strict=True):
                        spans = tuple(s for s in own.spans if _sure(s, threshold))
                        yield prediction_line(replace(note, spans=spans))

        return StreamingResponse(lines(), media_type="application/x-ndjson")

    class FhirResponse(JSONResponse):
        media_type = _FHIR

    async def annotate(
        resource: dict[str, Any], threshold: Share = 0.0
    ) -> dict[str, Any]:
        """Find the mentions in the notes of a DocumentReference, a DiagnosticReport or
        a Bundle.

        The answer is a Bundle of these resources, with an extension for each mention;
        others of the Bundle are left out. Errors are an OperationOutcome.
        """
        try:
            given = [(one, fhir.text_of(one)) for one in fhir.list_resources(resource)]
        except DataError as error:
            raise Refused(422, f"a resource cannot be read: {error}") from None
        notes = [(one, text) for one, text in given if text is not None]
        if not notes and resource.get("resourceType") != "Bundle":
            held = " or a ".join(fhir.PLACES)
            raise Refused(
                422, f"there is no note in it: send a {held}, or a Bundle of these"
            )
        texts = most.taken([text for _, text in notes])
        pairs = zip(notes, await results(texts, texts), strict=True)
        return fhir.bundle(
            fhir.with_mentions(one, (s for s in document.spans if _sure(s, threshold)))
            for (one, _), document in pairs
        )

    if isinstance(model, PatientModel):
        app.post("/predict")(predict_patients)
    else:
        app.post("/predict")(predict)
        app.post("/fhir", response_class=FhirResponse)(annotate)
    if batch:
        app.post("/batch", response_class=StreamingResponse, response_model=None)(
            predict_table
        )

    @app.get("/model")
    async def about() -> About:
        """What the model finds, and what its confidences are."""
        return About(
            types=list(model.types), confidence=model.confidence, version=__version__
        )

    @app.get("/health")
    async def health() -> dict[Literal["status"], Literal["ok"]]:
        """Whether the server answers; asks for no token."""
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        """Counts and seconds, in the text format of Prometheus."""
        return prometheus_client.generate_latest(meters.registry).decode()

    meters.paths.update(app.openapi()["paths"])
    return app


# ---- tables of notes -----------------------------------------------------------------

TableFormat = Literal["csv", "tsv", "jsonl", "parquet"]
_TABLE_TYPES: dict[str, TableFormat] = {
    "text/csv": "csv",
    "text/tab-separated-values": "tsv",
    "application/jsonl": "jsonl",
    "application/x-ndjson": "jsonl",
    "application/vnd.apache.parquet": "parquet",
}
_ANY_TYPES = ("application/octet-stream", "application/gzip", "application/zstd")
_UNPACKED = 10  # times the bytes of a request that its notes may have characters


def _ending(
    table: bytes, content_type: str, content_encoding: str, format: TableFormat | None
) -> str:
    """Return the ending of the name of a file with this table.

    Raises Refused for a type that is no table's. A web page of another site cannot send
    one of those that are without being asked about it first.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind not in _TABLE_TYPES and kind not in _ANY_TYPES:
        known = ", ".join(_TABLE_TYPES)
        raise Refused(415, f"send a table, with the content-type {known}")
    found = format or _TABLE_TYPES.get(kind)
    if found is None:
        raise Refused(415, "say what the table is: format=csv, tsv, jsonl or parquet")
    if content_encoding.strip().lower() not in ("", "identity", "gzip", "zstd"):
        raise Refused(415, "pack the table by gzip or zstd, or not at all")
    if table.startswith(b"\x1f\x8b"):
        return f".{found}.gz"
    return f".{found}.zst" if table.startswith(b"\x28\xb5\x2f\xfd") else f".{found}"


def _require_taken(inputs: Inputs, limits: Limits) -> None:
    """Read a table once, so that nothing of it is answered if anything in it is wrong.

    Raises:
        DataError: A note cannot be read.
        Refused: A note, or all notes together, have too many characters.
    """
    total = 0
    for number, note in enumerate(inputs, 1):
        if len(note.text) > limits.characters:
            told = f"note {number} has {len(note.text):,} characters"
            raise Refused(413, f"{told}, at most {limits.characters:,}: divide it")
        total += len(note.text)
        if total > _UNPACKED * limits.body:
            told = (
                f"unpacked, its notes have over {_UNPACKED * limits.body:,} characters"
            )
            raise Refused(413, f"{told}: send fewer at a time")


def _window(documents: Iterator[Document]) -> list[Document]:
    """Return the next documents: those that are put to the model together."""
    window: list[Document] = []
    held = 0
    for document in islice(documents, BATCH):
        window.append(document)
        held += len(document.text)
        if held >= CHARACTERS:
            break
    return window


def _known(part: str | int) -> str:
    """A part of a place in what was sent; names that are not ours may be text, or a
    patient's."""
    known = {"format", "column", "encoding", "threshold"}
    known |= {"body", "query", *Question.model_fields, *PatientNotes.model_fields}
    return str(part) if isinstance(part, int) or part in known else "…"


# ---- the process ---------------------------------------------------------------------


def read_token(path: PathLike) -> str:
    """The token in a file that its owner alone can read. Raises ConfigError."""
    with readable(path, ConfigError), open(path, "rb", opener=open_regular) as file:
        mode, raw = os.fstat(file.fileno()).st_mode, file.read(_MOST_BYTES)
    if mode & 0o077:
        raise ConfigError(f"{path}: others can read it: chmod 600 {path}")
    token = raw.decode("latin-1").strip()
    if not re.fullmatch(r"[\w.~+/=-]+", token, re.ASCII) or len(token) < TOKEN:
        raise ConfigError(
            f"{path}: expected one word of {TOKEN} letters and digits or more, such as "
            "`openssl rand -hex 32` gives"
        )
    return token


def serve(
    model: PathLike | AnyModel,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    token_file: PathLike | None = None,
    certificate: PathLike | None = None,
    key: PathLike | None = None,
    limits: Limits | None = None,
    batch: bool = False,
    tell: Callable[[str], None] = print,
) -> None:
    """Answer requests for a model's predictions until SIGINT or SIGTERM.

    model: its folder, or what `load` gave. host: another than loopback needs a token.
    token_file: holds it, and others cannot read it. certificate, key: PEM files, for
    TLS. batch: whether `POST /batch` takes tables of notes. tell: is told the address.
    Raises ConfigError, FednotesError where nothing can listen there, MissingExtra.
    """
    token = "" if token_file is None else read_token(token_file)
    if not token and not loopback(host):
        raise ConfigError(
            f"--host {host}: others could ask there: name a --token-file FILE"
        )
    if (certificate is None) != (key is None):
        raise ConfigError("--certificate and --key go together")
    opened = model if isinstance(model, MentionModel | PatientModel) else load(model)
    app = application(opened, limits, token, batch=batch)
    opened(["Aspirin was given."])  # what is compiled or read at the first time
    if not loopback(host) and certificate is None:
        tell(
            "note: without --certificate notes and the token can be read on their way here"
        )
    run(
        app,
        host,
        port,
        lambda address: tell(f"listening at {address}"),
        certificate,
        key,
    )
