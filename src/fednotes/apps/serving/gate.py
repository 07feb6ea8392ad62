"""Decide which requests `fednotes serve` answers.

The gate checks each request in this order: the token (or, without a token, the `Host`
header), the number of concurrent requests, the size of the body while it arrives, and
finally whether it is JSON. It neither stores nor logs any of the content.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from fednotes.apps.serving.limits import Limits
from fednotes.apps.serving.metrics import Metrics
from fednotes.core.errors import describe_place
from fednotes.core.http_server import Refused, make_size_refusal, read_body
from fednotes.core.parsing import JsonError, parse_json

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

log = logging.getLogger(__name__)

FHIR_JSON = "application/fhir+json"
# Status of the refusals that the OpenAPI schema lists.
REFUSED_STATUS = (401, 403, 408, 413, 415, 422, 429, 500, 507)

# Appears only in the metrics: the client disconnected before the answer.
_DISCONNECTED = 499
# Maximum number of digits of the header Content-Length.
_LENGTH_DIGITS = 18
# Codes of FHIR's value set "issue-type".
_FHIR_ISSUES = {
    401: "login",
    413: "too-long",
    422: "invalid",
    429: "throttled",
    500: "exception",
}


class Gate:
    """ASGI middleware that enforces the token and the limits, and counts requests.

    Args:
        app: The ASGI application behind the gate.
        limits: The limits on requests.
        token: The token that requests must carry; "" admits loopback names only.
        metrics: The metrics to update.
        retry_seconds: Returns the estimated seconds until a refused request may
            succeed.
        takes_tables: Whether `POST /batch` accepts bodies that are not JSON.
    """

    def __init__(
        self,
        app: Any,
        *,
        limits: Limits,
        token: str,
        metrics: Metrics,
        retry_seconds: Callable[[], int],
        takes_tables: bool,
    ) -> None:
        self._app = app
        self._limits = limits
        self._token = token.encode()
        self._metrics = metrics
        self._retry_seconds = retry_seconds
        self._takes_tables = takes_tables
        self._slots = asyncio.Semaphore(limits.max_requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status = _DISCONNECTED

        async def send_and_note_status(message: Message) -> None:
            """Send a part of the answer, and remember its status for the metrics."""
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._check_and_answer(scope, receive, send_and_note_status)
        except Refused as refused:
            await _send_refusal(refused, scope, receive, send=send_and_note_status)
        except Exception as error:
            # The message of the error may hold text of a note.
            log.error("a request failed: %s", describe_place(error))
            if status == _DISCONNECTED:
                failure = Refused(
                    500, "the model failed; the server's log names the place"
                )
                await _send_refusal(failure, scope, receive, send=send_and_note_status)
        finally:
            seconds = time.perf_counter() - start
            self._metrics.count_request(scope["path"], status, seconds)

    async def _check_and_answer(
        self, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Check a request and pass it on to the application.

        Raises:
            Refused: The request lacks access or exceeds a limit, or its body is not the
                expected JSON.
        """
        headers = {key.decode("latin-1"): value for key, value in scope["headers"]}
        self._require_access(scope["path"], headers)
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        self._require_length(headers)
        if self._slots.locked():
            # If the body stayed unread, the connection would break before the client
            # received the refusal.
            await self._read_body(receive, keep=False)
            raise Refused(
                429,
                "too many concurrent requests: try again after the number of seconds "
                "in the header Retry-After",
                **{"retry-after": str(self._retry_seconds())},
            )
        async with self._slots:
            with self._metrics.under_way.track_inprogress():
                body = await self._read_body(receive)
                is_table = self._takes_tables and scope["path"] == "/batch"
                if not is_table:
                    await self._require_json(body, headers)
                await _answer_unless_gone(
                    self._app,
                    scope,
                    receive,
                    send,
                    body=body,
                    seconds=self._limits.body_seconds,
                )

    async def _read_body(self, receive: Receive, *, keep: bool = True) -> bytes:
        """Return the body of a request, of limited size and in limited time."""
        return await read_body(
            receive, self._limits.max_bytes, self._limits.body_seconds, keeps_body=keep
        )

    def _require_access(self, path: str, headers: Mapping[str, bytes]) -> None:
        """Raise Refused unless a request has the token or, without one, a local name.

        Without a token, the check of the `Host` header stops web pages whose domain
        name was rebound to this address.
        """
        if not self._token:
            host = headers.get("host", b"").decode("latin-1")
            name = re.sub(r":\d+$", "", host).strip("[]").lower()
            if not is_loopback(name):
                raise Refused(
                    403,
                    "without a token, the server answers only to the names 127.0.0.1, "
                    "[::1] and localhost",
                )
            return
        if path == "/health":
            return
        scheme, _, token = headers.get("authorization", b"").partition(b" ")
        is_right = hmac.compare_digest(token.strip(), self._token)
        if scheme.lower() != b"bearer" or not is_right:
            raise Refused(
                401,
                "send the token in the header: authorization: Bearer TOKEN",
                **{"www-authenticate": "Bearer", "connection": "close"},
            )

    def _require_length(self, headers: Mapping[str, bytes]) -> None:
        """Raise Refused if a body's length is too large, ambiguous or not a number."""
        if "content-length" in headers and "transfer-encoding" in headers:
            # A proxy may use the other of the two and see a different request.
            raise Refused(
                400,
                "send content-length or transfer-encoding, not both",
                connection="close",
            )
        length = headers.get("content-length", b"0")
        # Python refuses to convert a number of thousands of digits.
        is_number = length.isdigit() and len(length) <= _LENGTH_DIGITS
        if not is_number or int(length) > self._limits.max_bytes:
            raise make_size_refusal(self._limits.max_bytes)

    async def _require_json(self, body: bytes, headers: Mapping[str, bytes]) -> None:
        """Raise Refused unless a body is JSON by its content type and its content."""
        content_type = headers.get("content-type", b"").decode("latin-1")
        if read_media_type(content_type) not in ("application/json", FHIR_JSON):
            raise Refused(
                415, "send JSON, with the header: content-type: application/json"
            )
        try:
            # Parsing runs in a thread, so that the event loop can serve other requests.
            await asyncio.to_thread(
                parse_json, body, max_values=self._limits.max_values
            )
        except JsonError as error:
            raise Refused(
                422, f"line {error.line} of the body is not accepted: {error}"
            ) from None


def read_media_type(content_type: str) -> str:
    """Return the media type of a Content-Type header, without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def is_loopback(name: str) -> bool:
    """Return whether a host name or address refers to the loopback interface."""
    with suppress(ValueError):
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost"


async def _send_refusal(
    refused: Refused, scope: Scope, receive: Receive, *, send: Send
) -> None:
    """Send a refusal as JSON, or as an OperationOutcome to a FHIR request."""
    from starlette.responses import JSONResponse

    content: dict[str, Any] = {"detail": refused.detail}
    content_type = "application/json"
    if scope["path"] == "/fhir":
        issue = {
            "severity": "error",
            "code": _FHIR_ISSUES.get(refused.status_code, "processing"),
            "diagnostics": refused.detail,
        }
        content = {"resourceType": "OperationOutcome", "issue": [issue]}
        content_type = FHIR_JSON
    response = JSONResponse(
        content,
        status_code=refused.status_code,
        headers=refused.headers,
        media_type=content_type,
    )
    await response(scope, receive, send)


async def _answer_unless_gone(
    app: Any,
    scope: Scope,
    receive: Receive,
    send: Send,
    *,
    body: bytes,
    seconds: float,
) -> None:
    """Run the application on a body that was already read; stop if the client is gone.

    A client that does not accept a part of the answer within `seconds` counts as gone,
    so that it does not keep a place from others.
    """
    unread = [{"type": "http.request", "body": body, "more_body": False}]
    leaving = asyncio.ensure_future(receive())
    stalled = asyncio.get_running_loop().create_future()

    async def receive_again() -> Message:
        """Return the body that was already read, then wait until the client leaves."""
        if unread:
            return unread.pop()
        return await asyncio.shield(leaving)

    async def send_in_time(message: Message) -> None:
        """Send a part of the answer; if it takes too long, stop the answer."""
        try:
            async with asyncio.timeout(seconds):
                await send(message)
        except TimeoutError:
            stalled.set_result(None)
            await asyncio.Future()  # until `answering` is cancelled

    answering = asyncio.ensure_future(app(scope, receive_again, send_in_time))
    try:
        await asyncio.wait(
            {answering, leaving, stalled}, return_when=asyncio.FIRST_COMPLETED
        )
        if answering.done():
            answering.result()
    finally:
        answering.cancel()
        leaving.cancel()
