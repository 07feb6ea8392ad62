"""A local HTTP server with limits, which applications share: bodies, connections and
seconds.

The application itself, an ASGI one, is its owner's. uvicorn and h11 are imported when
it starts.
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

FAREWELL = 30  # seconds that requests under way have to end
HEAD = 10  # seconds in which a request's first lines must come
_CONNECTIONS = 1000  # at a time, or half of the files that may be open
PathLike = str | Path


class Refused(Exception):
    """A request is refused: the status and what its sender is told."""

    def __init__(self, status: int, detail: str, **headers: str) -> None:
        super().__init__(detail)
        self.status_code, self.detail, self.headers = status, detail, headers


async def read_body(
    receive: Receive, most: int, patience: float, keep: bool = True
) -> bytes:
    """Return a request's body.

    Args:
        receive: Gives the request's messages, as ASGI has them.
        most: Bytes after which nothing more is read.
        patience: Seconds in which the body must come.
        keep: Whether the body is kept; else it is read and forgotten.

    Raises:
        Refused: The body is too large, or did not come in time.
    """
    parts: list[bytes] = []
    length, more = 0, True
    try:
        async with asyncio.timeout(patience):
            while more:
                message = await receive()
                part, more = message.get("body", b""), message.get("more_body", False)
                length += len(part)
                if length > most:
                    raise too_large(most)
                if keep:
                    parts.append(part)
    except TimeoutError:
        raise Refused(
            408, "the body did not come in time", connection="close"
        ) from None
    return b"".join(parts)


def too_large(most: int) -> Refused:
    """Return the refusal of a request of more than `most` bytes."""
    return Refused(
        413,
        f"a request has at most {most:,} bytes: send less at a time",
        connection="close",
    )


def prompt() -> Any:
    """uvicorn's protocol, with a deadline for a request's first lines. Where there are
    too many connections, the one goes that such lines have been missing on for longest.
    """
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = min(_CONNECTIONS, files // 2) if files > 0 else _CONNECTIONS  # -1: no limit

    class Prompt(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.timeout_keep_alive, wait = HEAD, self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(HEAD, wait)
            if len(self.connections) > most:
                every: Any = self.connections
                silent = {each.timeout_keep_alive_task: each for each in every}
                oldest = silent[min(task for task in silent if task is not None)]
                oldest.transport.close()
                oldest._unset_keepalive_if_required()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._unset_keepalive_if_required()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._unset_keepalive_if_required()  # of the next request

        def _unset_keepalive_if_required(self) -> None:
            if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
                super()._unset_keepalive_if_required()

    return Prompt


def run(
    app: Any,
    host: str,
    port: int,
    ready: Callable[[str], None],
    certificate: PathLike | None = None,
    key: PathLike | None = None,
    extra: str = "serve",
) -> None:
    """Listen until SIGINT or SIGTERM; requests under way are answered first.

    port: 0 takes a free one. ready: is told the address once somebody can connect.
        certificate,
    key: PEM files, for TLS. extra: that brings what this needs.
    Raises FednotesError where nothing can listen there, MissingExtra.
    """
    with needs("uvicorn", extra):
        import uvicorn

    class Listening(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.started:
                number = self.servers[0].sockets[0].getsockname()[1]
                name = f"[{host}]" if ":" in host else host
                ready(f"http{'s' if certificate else ''}://{name}:{number}")

    logging.getLogger("asyncio").addHandler(
        logging.NullHandler()
    )  # or lines without end
    options: dict[str, Any] = {"ws": "none", "timeout_graceful_shutdown": FAREWELL}
    options |= {"backlog": 128, "http": prompt()}
    options |= {"access_log": False, "server_header": False, "proxy_headers": False}
    options |= {
        "log_config": None,
        "log_level": "critical",
    }  # its words of an error may hold text
    options |= {"ssl_certfile": certificate, "ssl_keyfile": key}
    server = Listening(uvicorn.Config(app, host, port, **options))
    try:
        _in_a_thread(server) if _of_a_notebook() else server.run()
    except (SystemExit, OverflowError):
        where = f"{host}:{port}: nothing can listen there"
        raise FednotesError(
            f"{where}: is the port in use, or the address another's?"
        ) from None


def _of_a_notebook() -> bool:
    """Whether a loop runs here already, which is no server's."""
    with suppress(RuntimeError):
        return bool(asyncio.get_running_loop())
    return False


def _in_a_thread(server: Any) -> None:
    """Run beside a notebook's loop, until its cell is interrupted."""
    with ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(server.run).result()
        except KeyboardInterrupt:
            server.should_exit = True
