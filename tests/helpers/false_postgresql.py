"""A false PostgreSQL server, which answers what a test wants."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_TEXT_TYPE = 25
_READY, _IN_TRANSACTION = b"I", b"T"


@dataclass(frozen=True)
class Answers:
    """What a false server answers.

    Attributes:
        announced: The columns that it announces for a cursor.
        sent: The columns of the rows that it sends.
        row: The values of the one row; each is in all rows' places.
        types: The number of each sent column's type, if it is not text.
        version: What it says its version is.
        code: The code of the error with which it answers a FETCH; "" for no error.
    """

    announced: tuple[str, ...] = ("note_id", "note_text")
    sent: tuple[str, ...] = ("note_id", "note_text")
    row: tuple[str, ...] = ("1", "Took aspirin.")
    types: tuple[int, ...] = ()
    version: str = "PostgreSQL 16.0"
    code: str = ""


def _pack(kind: bytes, body: bytes = b"") -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


def _end(text: str) -> bytes:
    return text.encode() + b"\0"


def _announce(names: tuple[str, ...], types: tuple[int, ...] = ()) -> bytes:
    body = struct.pack("!H", len(names))
    for place, name in enumerate(names):
        number = types[place] if place < len(types) else _TEXT_TYPE
        body += _end(name) + struct.pack("!IhIhih", 0, 0, number, -1, -1, 0)
    return _pack(b"T", body)


def _send_row(values: tuple[str, ...]) -> bytes:
    body = struct.pack("!H", len(values))
    for value in values:
        body += struct.pack("!i", len(value.encode())) + value.encode()
    return _pack(b"D", body)


class _Session:
    """One connection."""

    def __init__(self, connection: socket.socket, answers: Answers) -> None:
        self._connection = connection
        self._answers = answers
        self._state = _READY
        self._query = ""
        self._is_fetched = False

    def run(self) -> None:
        """Answer until the client closes the connection."""
        while not self._begin():
            self._connection.sendall(b"N")  # no encryption
        greeting = _pack(b"R", struct.pack("!I", 0))
        for name, value in (("server_version", "16.0"), ("client_encoding", "UTF8")):
            greeting += _pack(b"S", _end(name) + _end(value))
        self._connection.sendall(greeting + _pack(b"Z", self._state))
        while True:
            kind = self._read(1)
            body = self._read(struct.unpack("!I", self._read(4))[0] - 4)
            self._connection.sendall(self._answer(kind, body))

    def _begin(self) -> bool:
        body = self._read(struct.unpack("!I", self._read(4))[0] - 4)
        return bool(struct.unpack("!I", body[:4])[0] == 3 << 16)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = self._connection.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data

    def _answer(self, kind: bytes, body: bytes) -> bytes:
        if kind == b"Q":
            self._query = body[:-1].decode()
            return self._describe() + self._execute() + self._finish()
        if kind == b"P":
            self._query = body.split(b"\0")[1].decode()
            return _pack(b"1")
        if kind == b"D":
            is_cursor = body[:1] == b"P" and body[1:] != b"\0"
            names = self._answers.announced
            return _announce(names) if is_cursor else self._describe() or _pack(b"n")
        answers = {b"B": _pack(b"2"), b"C": _pack(b"3"), b"E": self._execute}
        answer = answers.get(kind, b"")
        if kind == b"S":
            return self._finish()
        return answer() if callable(answer) else answer

    def _finish(self) -> bytes:
        word = self._query.split(" ")[0].upper()
        states = {"BEGIN": _IN_TRANSACTION, "COMMIT": _READY, "ROLLBACK": _READY}
        self._state = states.get(word, self._state)
        return _pack(b"Z", self._state)

    def _describe(self) -> bytes:
        """Return the columns of the query's result; b"" if it has none."""
        query = self._query.lower()
        if query.startswith("fetch"):
            return _announce(self._answers.sent, self._answers.types)
        return _announce(("value",)) if query.startswith(("select", "show")) else b""

    def _execute(self) -> bytes:
        query = self._query.lower()
        done = _pack(b"C", _end(query.split(" ")[0].upper()))
        if query.startswith("declare"):
            self._is_fetched = "limit 0" in query
        if "version()" in query:
            return _send_row((self._answers.version,)) + done
        if query.startswith(("select", "show")) and "pg_type" not in query:
            return _send_row(("on",)) + done
        if not query.startswith("fetch"):
            return done
        if self._answers.code:
            text = f"SERROR\0C{self._answers.code}\0MTook aspirin.\0\0"
            return _pack(b"E", text.encode())
        row = b"" if self._is_fetched else _send_row(self._answers.row)
        self._is_fetched = True
        return row + done


@contextmanager
def false_server(answers: Answers) -> Iterator[str]:
    """Yield the address of a database of a false server."""

    def serve(connection: socket.socket) -> None:
        with connection, suppress(EOFError, OSError):
            _Session(connection, answers).run()

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"postgresql://reader@127.0.0.1:{listener.getsockname()[1]}/notes"
