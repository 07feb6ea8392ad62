"""A proxy of a hospital: it takes CONNECT, and passes bytes on."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Handler(socketserver.StreamRequestHandler):
    server: Proxy

    def handle(self) -> None:
        request = self.rfile.readline().decode("ascii").split()
        while self.rfile.readline().strip():
            pass
        self.server.addresses.append(request[1])
        if self.server.refuses:
            self.wfile.write(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
            return
        host, _, port = request[1].rpartition(":")
        with socket.create_connection((host, int(port))) as target:
            self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n")
            back = threading.Thread(target=_pass_on, args=(target, self.connection))
            back.start()
            _pass_on(self.connection, target)
            back.join()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    try:
        while chunk := source.recv(65536):
            sink.sendall(chunk)
        sink.shutdown(socket.SHUT_WR)
    except OSError:  # one of the two is gone
        pass


class Proxy(socketserver.ThreadingTCPServer):
    """asked: the addresses that were asked for. refuses: it wants a password."""

    daemon_threads, block_on_close = True, False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.addresses: list[str] = []
        self.refuses = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def proxy() -> Iterator[Proxy]:
    """Yield a proxy that runs until the end of the block."""
    with Proxy() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()
