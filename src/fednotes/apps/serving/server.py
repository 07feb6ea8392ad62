"""Serve the predictions of a saved model over HTTP (`fednotes serve MODEL`).

The server checks each request in this order: the token (or, without a token, the
`Host` header), the number of concurrent requests, the size of the body while it
arrives, and finally its content. It neither stores nor logs any of the content. The
texts of all waiting requests go to the model in joint batches, in a single thread.

FastAPI, uvicorn and prometheus-client come with the extra `serve`.
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

# Minimum length of a token in characters.
TOKEN = 20
# Maximum number of texts, and of characters, in one call of the model.
BATCH, CHARACTERS = (
    32,
    200_000,
)
# Maximum value of the header Retry-After, in seconds.
_LONGEST = 60
# _GONE appears in the metrics only: the client disconnected before the answer.
_FAILED, _GONE = 500, 499
# Maximum number of digits of the header Content-Length.
_LENGTH_DIGITS = 18
# Number of bytes read from a token file.
_MOST_BYTES = 4096
# Lone surrogates, which cannot be encoded as UTF-8.
_HALF = re.compile("[\ud800-\udfff]")
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
    """Limits on the requests that the server accepts.

    Attributes:
        body: Maximum size of a request body in bytes.
        values: Maximum number of JSON values in a request. Commas and brackets inside
            texts do not count.
        texts: Maximum number of texts in a request.
        characters: Maximum number of characters in a text.
        under_way: Maximum number of concurrent requests, including those that wait for
            the model. The server refuses any further request.
        patience: Time in seconds within which the whole body must arrive.
    """

    body: Annotated[int, Field(ge=1)] = 4_000_000
    values: Annotated[int, Field(ge=1)] = 20_000
    texts: Annotated[int, Field(ge=1)] = 64
    characters: Annotated[int, Field(ge=1)] = 100_000
    under_way: Annotated[int, Field(ge=1)] = 64
    patience: Annotated[float, Field(gt=0)] = 15.0

    def taken(self, texts: list[str]) -> list[str]:
        """Return the texts unchanged if they respect the limits.

        Raises:
            Refused: There are too many texts, or a text is too long or contains a lone
                surrogate.
        """
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
    """Send a refusal as JSON, or as an OperationOutcome to a FHIR request."""
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


# ---- requests and responses ----------------------------------------------------------


Share = Annotated[float, Field(ge=0, le=1, description="Leave out what is less sure.")]


class Question(BaseModel, extra="forbid", strict=True):
    """One text or several texts in which to find mentions."""

    text: str | None = Field(None, description="One text; or give `texts`.")
    texts: list[str] | None = None
    threshold: Share = 0.0
    offsets: Literal["characters", "utf16"] = Field(
        "characters",
        description="characters: Unicode code points, as Python counts; utf16: code units, as "
        "JavaScript, Java and C# count.",
    )

    def shown(self, document: Document) -> Mentions:
        """Return a document's mentions with the requested threshold and offsets."""
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
    """The mentions in one text, with the kind of offsets that was requested.

    `GET /model` describes what the confidences mean.
    """

    spans: list[Span]


class Results(BaseModel, Generic[T]):
    """One result for each text or patient, in the order of the request."""

    results: list[T]


class PatientNotes(BaseModel, extra="forbid", strict=True):
    """The notes of each patient, by patient name."""

    patients: dict[str, list[str]]


class About(BaseModel):
    """A description of the model that answers."""

    types: list[str]
    confidence: str
    version: str


class Refusal(BaseModel):
    """The reason why a request was refused, and its remedy; quotes no text."""

    detail: str


# ---- batches for the model -----------------------------------------------------------


def _length(given: Any) -> int:
    """Return the number of characters in a text, a document or a list of texts."""
    return len(given.text if isinstance(given, Document) else "".join(given))


class Batches:
    """Groups waiting inputs into joint calls of the model.

    A call receives up to `BATCH` inputs and stops growing at `CHARACTERS` characters.

    Args:
        call: Maps inputs (texts, documents or lists of texts) to one result each. It
            runs in a thread of its own and is never called concurrently.
    """

    def __init__(self, call: Callable[[list[Any]], Sequence[Any]]) -> None:
        self._call = call
        self._waiting: asyncio.Queue[tuple[Any, asyncio.Future[Any]]] = asyncio.Queue()
        # Moving average of the seconds per input.
        self._seconds = 0.1

    async def results(self, inputs: Sequence[Any]) -> list[Any]:
        """Return one result per input; raise the model's exception if one fails."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in inputs]
        for pair in zip(inputs, futures, strict=True):
            self._waiting.put_nowait(pair)
        try:
            return list(await asyncio.gather(*futures))
        finally:
            # If one input failed, nobody waits for the results of the others.
            for future in futures:
                future.cancel()

    def soon(self) -> int:
        """Return the estimated time in seconds until the waiting inputs are done."""
        return min(_LONGEST, max(1, math.ceil(self._seconds * self._waiting.qsize())))

    async def work(self) -> None:
        """Process waiting inputs until cancelled."""
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
        """Wait for inputs and return the next batch, without cancelled ones."""
        chosen, held = [await self._waiting.get()], 0
        while len(chosen) < BATCH and not self._waiting.empty():
            held += _length(chosen[-1][0])
            if held >= CHARACTERS:
                break
            chosen.append(self._waiting.get_nowait())
        return [pair for pair in chosen if not pair[1].done()]

    def _tried(self, inputs: list[Any]) -> Sequence[Any]:
        """Return one result per input, or the exception that this input caused.

        If a joint call fails, each input is tried on its own, so that an input that the
        model cannot process does not affect the others.
        """
        try:
            return self._call(inputs) if inputs else ()
        except Exception as error:
            if len(inputs) == 1:
                return (error,)
        return [result for given in inputs for result in self._tried([given])]


# ---- access and limits ---------------------------------------------------------------


class _Meters:
    """The metrics of `GET /metrics`: counts and durations, never content."""

    def __init__(self) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

        self.registry = own = CollectorRegistry()
        # Other paths are counted together, because a client chooses their names.
        self.paths: set[str] = set()
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
        """Count one answered request and its duration in seconds."""
        path = path if path in self.paths else "other"
        self.requests.labels(path, status).inc()
        self.seconds.labels(path).observe(seconds)


class _Gate:
    """ASGI middleware that enforces the token, the limits and the metrics.

    Args:
        app: The ASGI application behind the gate.
        limits: The limits on requests.
        token: The token that requests must carry; "" admits loopback names only.
        meters: The metrics to update.
        soon: Returns the estimated seconds until a refused request may succeed.
        takes_tables: Whether `POST /batch` accepts bodies that are not JSON.
    """

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
        except Exception as error:
            # The message may contain text of a note, so only the type is logged.
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
        """Check a request and pass it on to the application.

        Raises:
            Refused: The request lacks access or exceeds a limit, or its body is not the
                expected JSON.
        """
        headers = {key.decode("latin-1"): value for key, value in scope["headers"]}
        self._require_known(scope["path"], headers)
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        length, most = headers.get("content-length", b"0"), self._limits
        # Python refuses to convert a number of thousands of digits.
        has_number = length.isdigit() and len(length) <= _LENGTH_DIGITS
        if not has_number or int(length) > most.body:
            raise too_large(most.body)
        if self._room.locked():
            # If the body stayed unread, the connection would break before the client
            # received the refusal.
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
                try:
                    # A thread parses, so that the event loop serves other requests.
                    await asyncio.to_thread(
                        parse_json, body, most_values=self._limits.values
                    )
                except JsonError as error:
                    raise Refused(
                        422, f"the body's line {error.line}: {error}"
                    ) from None
                await _unless_gone(self._app, scope, body, receive, send)

    def _require_known(self, path: str, headers: Mapping[str, bytes]) -> None:
        """Raise unless a request carries the token or, without one, a loopback name.

        Without a token, the check of the `Host` header stops web pages whose domain
        name was rebound to this address.

        Raises:
            Refused: The token is missing or wrong, or the host name is not loopback.
        """
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
    """Run the application on a body already read; stop if the client disconnects."""
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
    """Return whether a host name or address refers to the loopback interface."""
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
    """Return the FastAPI application that serves a model.

    Args:
        model: The model.
        limits: The limits on requests; the defaults if None.
        token: The token that requests must carry; "" admits loopback names only.
        batch: Whether `POST /batch` accepts tables of notes.

    Raises:
        ConfigError: `batch` is set, but the model predicts patients, not mentions.
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
        # The documentation pages would load scripts from other servers.
        docs_url=None,
        redoc_url=None,
        # A redirect would go to the host that the request names, whatever that is.
        redirect_slashes=False,
        lifespan=at_work,
        responses={status: {"model": Refusal} for status in _REFUSED},
        # Telemetry would send exception messages, which may contain text, to a
        # collector that the environment names.
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
        """Find the mentions in one text or in several texts."""
        if (asked.text is None) == (asked.texts is None):
            raise Refused(422, "give `text` or `texts`")
        texts = most.taken(asked.texts or [] if asked.text is None else [asked.text])
        return Results(
            results=[asked.shown(found) for found in await results(texts, texts)]
        )

    async def predict_patients(asked: PatientNotes) -> Results[PatientFinding]:
        """Predict the phenotypes of patients from their notes."""
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
        """Find the mentions in a table of notes and return one JSON line per note.

        The lines have the order of the notes. The table is CSV, TSV, JSON Lines or
        Parquet, optionally compressed with gzip or Zstandard.
        """
        ending = _ending(table, content_type, content_encoding, format)
        # Only the owner can read a temporary directory.
        folder = TemporaryDirectory(prefix="fednotes-")

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
        """Find the mentions in FHIR resources that contain notes.

        Send a DocumentReference, a DiagnosticReport or a Bundle. The response is a
        Bundle of the resources with notes, each with an extension for every mention;
        the other resources of a Bundle are omitted. Errors are an OperationOutcome.
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
        """Describe what the model finds and what its confidences mean."""
        return About(
            types=list(model.types), confidence=model.confidence, version=__version__
        )

    @app.get("/health")
    async def health() -> dict[Literal["status"], Literal["ok"]]:
        """Report that the server is running; needs no token."""
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> str:
        """Return the metrics in the Prometheus text format."""
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
# A compressed table may have this many characters per byte of the largest request.
_UNPACKED = 10


def _ending(
    table: bytes, content_type: str, content_encoding: str, format: TableFormat | None
) -> str:
    """Return the file name extension for a table, such as ".csv.gz".

    The content type must be that of a table: a web page of another origin cannot send
    such a type without a preflight request, which this server does not grant.

    Raises:
        Refused: The content type or encoding is not supported, or the format is
            missing.
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
    """Read a whole table and check it before the first line is answered.

    Raises:
        DataError: A note cannot be read.
        Refused: One note, or all notes together, have too many characters.
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
    """Return the documents of the next joint call of the model; empty at the end."""
    window: list[Document] = []
    held = 0
    for document in islice(documents, BATCH):
        window.append(document)
        held += len(document.text)
        if held >= CHARACTERS:
            break
    return window


def _known(part: str | int) -> str:
    """Return one part of the path to an invalid value, or "…" for unknown names.

    A name that is not a field of this API may be text of a note or name a patient.
    """
    known = {"format", "column", "encoding", "threshold"}
    known |= {"body", "query", *Question.model_fields, *PatientNotes.model_fields}
    return str(part) if isinstance(part, int) or part in known else "…"


# ---- the process ---------------------------------------------------------------------


def read_token(path: PathLike) -> str:
    """Return the token in a file.

    Raises:
        ConfigError: The file cannot be read, other users can read it, or it does not
            contain one token of at least `TOKEN` characters.
    """
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
    """Serve a model's predictions until SIGINT or SIGTERM.

    Args:
        model: A model from `load`, or its folder.
        host: The address to listen on; any address but loopback needs a token.
        port: The TCP port.
        token_file: A file with the token that only its owner can read.
        certificate: The server's TLS certificate (PEM).
        key: The certificate's private key (PEM).
        limits: The limits on requests; the defaults if None.
        batch: Whether `POST /batch` accepts tables of notes.
        tell: Receives a line with the address, and a warning where TLS is missing.

    Raises:
        ConfigError: The options do not fit together or do not fit the model.
        FednotesError: The server cannot listen on this address.
        MissingExtra: The extra "serve" is not installed.
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
    # The first call compiles and loads what later calls reuse.
    opened(["Aspirin was given."])
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
