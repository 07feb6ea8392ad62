"""A local HTTP server with limits on body sizes, connections and times.

It serves any ASGI application. uvicorn and h11 are imported when it starts.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fednotes.core.errors import FednotesError, needs

if TYPE_CHECKING:
    from starlette.types import Receive

SHUTDOWN_SECONDS = 30  # time for running requests to end
HEAD_SECONDS = 10  # time for the head of a request to arrive
STALL_SECONDS = 15  # time in which a client must accept `_LEAST_PROGRESS` of an answer
_LEAST_PROGRESS = 2**16  # bytes, or all that remain
_MAX_CONNECTIONS = 1000  # or half the limit of open files, if that is lower
PathLike = str | Path


class Refused(Exception):
    """A refused request.

    Attributes:
        status_code: Status of the response.
        detail: The message to the sender.
        headers: Headers of the response.
    """

    def __init__(self, status: int, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status_code = status
        self.detail = detail
        self.headers = headers


async def read_body(
    receive: Receive, max_bytes: int, seconds: float, *, keeps_body: bool = True
) -> bytes:
    """Return a request's body.

    Args:
        receive: Returns the request's next message, as ASGI defines it.
        max_bytes: The maximum size of the body.
        seconds: Time in which the body must arrive.
        keeps_body: Whether to return the body; otherwise it is read and discarded.

    Raises:
        Refused: The body is too large, or did not arrive in time.
    """
    parts: list[bytes] = []
    length = 0
    is_complete = False
    try:
        async with asyncio.timeout(seconds):
            while not is_complete:
                message = await receive()
                part = message.get("body", b"")
                is_complete = not message.get("more_body", False)
                length += len(part)
                if length > max_bytes:
                    raise make_size_refusal(max_bytes)
                if keeps_body:
                    parts.append(part)
    except TimeoutError:
        raise Refused(
            408,
            f"the body did not arrive within {seconds:g} seconds: send it again",
            connection="close",
        ) from None
    return b"".join(parts)


def make_size_refusal(max_bytes: int) -> Refused:
    """Return the error for a request with more than `max_bytes` bytes."""
    return Refused(
        413,
        f"a request may have at most {max_bytes:,} bytes: send less at a time",
        connection="close",
    )


class _ReadingWatch:
    """Aborts a connection whose client does not read what was written.

    Args:
        transport: The connection.
        loop: Its event loop.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._unread = 0  # bytes, when `_timer` began
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Begin to watch if the client has not yet read everything."""
        if self._timer is None:
            self._unread = self._transport.get_write_buffer_size()
            if self._unread:
                self._timer = self._loop.call_later(STALL_SECONDS, self._check)

    def stop(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self) -> None:
        """Abort the connection if its client has hardly read anything."""
        self._timer = None
        num_accepted = self._unread - self._transport.get_write_buffer_size()
        if num_accepted < min(self._unread, _LEAST_PROGRESS):
            # Closing it would wait until the client has read the rest.
            self._transport.abort()
        else:
            self.begin()


def make_protocol_with_deadline() -> Any:  # noqa: C901 - all methods count
    """Make a class of uvicorn's protocol that sets a deadline for each request's head.

    A request that was answered before its body arrived, such as one that is refused,
    has the same deadline for the rest of its body.

    If there are too many connections, the one that has waited longest for a head is
    closed. A connection is also closed if its client does not read the answer, which
    would otherwise stay in memory as long as the client likes.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    max_connections = _MAX_CONNECTIONS
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if open_files > 0:  # -1 stands for no limit
        max_connections = min(max_connections, open_files // 2)

    class DeadlineProtocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._reading = _ReadingWatch(transport, self.loop)
            self.timeout_keep_alive = HEAD_SECONDS
            self.timeout_keep_alive_task = self.loop.call_later(
                HEAD_SECONDS, self.timeout_keep_alive_handler
            )
            if len(self.connections) > max_connections:
                self._close_oldest()

        def _close_oldest(self) -> None:
            """Close the connection whose deadline comes first."""
            connections: Any = self.connections
            by_deadline = {
                each.timeout_keep_alive_task: each
                for each in connections
                if each.timeout_keep_alive_task is not None
            }
            oldest = by_deadline[min(by_deadline)]
            oldest.transport.close()
            oldest._unset_keepalive_if_required()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._unset_keepalive_if_required()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._unset_keepalive_if_required()  # for the next request

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            # The connection closes only when the client has read the rest.
            self._reading.begin()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._reading.begin()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._reading.stop()
            if self.transport.is_closing():
                self._reading.begin()  # until the client has read the rest

        def connection_lost(self, exc: Exception | None) -> None:
            self._reading.stop()
            super().connection_lost(exc)

        def _unset_keepalive_if_required(self) -> None:
            # uvicorn would end the deadline at the first byte; it must last until the
            # head is complete. It must also last if the request was answered before its
            # body arrived: otherwise, the client could keep the connection for ever.
            is_answering = (
                self.conn.their_state is not h11.IDLE
                and self.conn.our_state is not h11.DONE
            )
            if is_answering or self.transport.is_closing():
                super()._unset_keepalive_if_required()

    return DeadlineProtocol


def serve_application(
    app: Any,
    host: str,
    port: int,
    ready: Callable[[str], None],
    certificate: PathLike | None = None,
    key: PathLike | None = None,
    extra: str = "serve",
) -> None:
    """Serve an application until SIGINT or SIGTERM.

    Running requests are answered before the server ends.

    Args:
        app: The ASGI application.
        host: The address to listen on.
        port: The port; 0 takes a free one.
        ready: Called with the server's address once clients can connect.
        certificate: PEM file of the certificate, for TLS.
        key: PEM file of the certificate's private key.
        extra: The extra of fednotes that installs uvicorn.

    Raises:
        FednotesError: The server cannot listen at this address.
        MissingExtra: uvicorn is not installed.
    """
    with needs("uvicorn", extra):
        import uvicorn

    class AnnouncingServer(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                bound_port = self.servers[0].sockets[0].getsockname()[1]
                name = f"[{host}]" if ":" in host else host
                scheme = "https" if certificate else "http"
                ready(f"{scheme}://{name}:{bound_port}")

    # Without a handler, asyncio would print a line for every broken connection.
    logging.getLogger("asyncio").addHandler(logging.NullHandler())
    config = uvicorn.Config(
        app,
        host,
        port,
        http=make_protocol_with_deadline(),
        ws="none",
        backlog=128,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        log_config=None,
        log_level="critical",  # its error messages may contain note text
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )
    server = AnnouncingServer(config)
    try:
        if _has_running_loop():
            _run_in_thread(server)
        else:
            server.run()
    except (SystemExit, OverflowError):
        raise FednotesError(
            f"{host}:{port}: the server cannot listen there: choose a free port and an "
            "address of this machine"
        ) from None


def _has_running_loop() -> bool:
    """Return whether an event loop is already running, as in a notebook."""
    with suppress(RuntimeError):
        return bool(asyncio.get_running_loop())
    return False


def _run_in_thread(server: Any) -> None:
    """Run a server next to a notebook's event loop until its cell is interrupted."""
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(server.run).result()
        except KeyboardInterrupt:
            server.should_exit = True
