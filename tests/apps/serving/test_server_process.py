"""`fednotes serve` as a process: its port, its token, TLS, and how it ends."""

from __future__ import annotations

import asyncio
import json
import resource
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.client import HTTPResponse
from ipaddress import ip_address
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from every_kind import WORDS, make
from places import Place, until

from fednotes.core import http_server
from fednotes.taggers.saving import save_model

pytest.importorskip("fastapi")
httpx2 = pytest.importorskip("httpx2")
uvicorn = pytest.importorskip("uvicorn")
pytestmark = pytest.mark.network

TOKEN = "0123456789abcdef0123456789abcdef"
BEGUN: list[Popen[str]] = []


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("served")
    save_model(make("tagger", place), place / "model")
    return place / "model"


class Process:
    """A server that began to listen; its address."""

    def __init__(self, place: Place, *words: object) -> None:
        self.process: Popen[str] = place.begin("serve", *map(str, words), "--port", "0")
        BEGUN.append(self.process)
        assert self.process.stdout is not None
        self.output = ""
        while "listening at " not in self.output:
            line = self.process.stdout.readline()
            assert line, self.output
            self.output += line
        self.address = self.output.split("listening at ")[1].strip()

    def end(self, sign: int = signal.SIGINT) -> tuple[int, str]:
        """Its exit code, and what else it said."""
        self.process.send_signal(sign)
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """A folder for servers; they end with the test."""
    yield Place(tmp_path)
    while BEGUN:
        process = BEGUN.pop()
        process.kill()
        process.communicate()


def test_pending_requests_are_answered_before_the_server_ends(
    place: Place, model: Path
) -> None:
    """A request of which half was sent holds the only place until the rest arrives."""
    served = Process(place, model, "--max-requests", "1")
    address = _host_and_port(served)
    body = json.dumps({"texts": WORDS}).encode()
    head = (
        "POST /predict HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(address, timeout=60) as line:
        line.sendall(head.encode() + body[:9])
        until(lambda: "under_way 1.0" in httpx2.get(f"{served.address}/metrics").text)
        more = httpx2.post(f"{served.address}/predict", json={"texts": WORDS})
        assert more.status_code == 429
        served.process.send_signal(signal.SIGINT)
        until(lambda: not _accepts(address))
        line.sendall(body[9:])
        answer = HTTPResponse(line)
        answer.begin()
        assert answer.status == 200
        assert len(json.loads(answer.read())["results"]) == len(WORDS)
    assert served.process.communicate(timeout=60)[0] == "stopped\n"
    assert served.process.returncode == 130


def test_an_endless_body_is_cut_off(place: Place, model: Path) -> None:
    """By a socket of ours: it is answered, and closed, long before what we would send."""
    served = Process(place, model, "--max-bytes", "100000")
    head = "POST /predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    with socket.create_connection(_host_and_port(served), timeout=30) as line:
        line.sendall(head.encode())
        with pytest.raises(OSError, match=r"reset|[Bb]roken"):
            _pour(line)
    wrong = httpx2.post(f"{served.address}/predict", content=b"x" * 200_000)
    assert wrong.status_code == 413
    assert httpx2.get(f"{served.address}/health").status_code == 200
    assert served.end(signal.SIGTERM) == (143, "stopped\n")


def test_silent_connections_stop_no_other_connection(place: Place, model: Path) -> None:
    """More half requests than it may have files open; each goes, and none fills the
    log."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, limits[1]))
    try:
        served = Process(place, model)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    address = _host_and_port(served)
    lines = [socket.create_connection(address, timeout=30) for _ in range(150)]
    try:
        for line in lines:
            with suppress(OSError):
                line.sendall(b"GET /health HTTP/1.1\r\nHost: loc")
        for _ in range(3):
            assert httpx2.get(f"{served.address}/health", timeout=5).status_code == 200
        for line in lines:
            with suppress(ConnectionError):
                assert line.recv(1) == b""
    finally:
        for line in lines:
            line.close()
    assert served.end() == (130, "stopped\n")


def test_an_answer_that_is_read_slowly_arrives_completely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The deadline is for what is asked: 30 MB are taken a while after they were sent."""
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.1)
    length = 30_000_000

    async def large(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", str(length).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(length)})

    async def read_slowly() -> int:
        protocol, options = (
            http_server.make_protocol_with_deadline(),
            uvicorn.Config(large, log_config=None),
        )
        state, loop = uvicorn.server.ServerState(), asyncio.get_running_loop()
        served = await loop.create_server(
            lambda: protocol(options, state, {}), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*served.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.sleep(0.5)
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.read()
        writer.close()
        served.close()
        assert b"200" in head
        return len(body)

    assert asyncio.run(read_slowly()) == length


@pytest.mark.parametrize(("length", "requests"), [(30_000_000, 1), (100, 200_000)])
def test_an_answer_that_nobody_reads_does_not_stay_in_memory(
    monkeypatch: pytest.MonkeyPatch, length: int, requests: int
) -> None:
    """A large answer, or many small ones whose requests came at once."""
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.2)
    monkeypatch.setattr(http_server, "STALL_SECONDS", 0.3)

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", str(length).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": bytes(length)})

    async def ask_without_reading() -> None:
        protocol = http_server.make_protocol_with_deadline()
        options = uvicorn.Config(answer, log_config=None)
        state = uvicorn.server.ServerState()
        loop = asyncio.get_running_loop()
        served = await loop.create_server(
            lambda: protocol(options, state, {}), "127.0.0.1", 0
        )
        with socket.socket() as line:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            line.setblocking(False)
            await loop.sock_connect(line, served.sockets[0].getsockname())
            ask = loop.sock_sendall(
                line, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * requests
            )
            with suppress(ConnectionError):
                await asyncio.wait_for(ask, 30)
            async with asyncio.timeout(30):
                while state.connections:
                    await asyncio.sleep(0.1)
        served.close()

    asyncio.run(ask_without_reading())


def test_a_slow_answer_is_awaited_and_a_silent_connection_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that takes five deadlines, then two at once on the same connection, then half
    of one."""
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.3)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(1.5 if scope["path"] == "/slow" else 0)
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    async def read_answers() -> tuple[bytes, ...]:
        protocol, options = (
            http_server.make_protocol_with_deadline(),
            uvicorn.Config(slow, log_config=None),
        )
        state, loop = uvicorn.server.ServerState(), asyncio.get_running_loop()
        served = await loop.create_server(
            lambda: protocol(options, state, {}), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*served.sockets[0].getsockname())
        head = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"
        received = []
        for sent in (head % b"/slow", head % b"/" + head % b"/slow"):
            writer.write(sent)
            received += [
                await reader.readuntil(b"ok") for _ in range(sent.count(b"GET"))
            ]
        writer.write(b"GET / HTTP/1.1\r\nHost: loc")
        received.append(await asyncio.wait_for(reader.read(), 20))
        writer.close()
        served.close()
        return tuple(received)

    *answers, end = asyncio.run(read_answers())
    assert [answer.count(b" 200 ") for answer in answers] == [1, 1, 1]
    assert end == b""


@pytest.mark.parametrize("more", [b"", b"1"])
def test_a_body_that_never_arrives_keeps_no_connection_that_was_answered(
    monkeypatch: pytest.MonkeyPatch, more: bytes
) -> None:
    """A request is refused without its body, of which nothing or a part follows."""
    monkeypatch.setattr(http_server, "HEAD_SECONDS", 0.3)

    async def refuse(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": b"no"})

    async def ask_without_a_body() -> bytes:
        protocol = http_server.make_protocol_with_deadline()
        options = uvicorn.Config(refuse, log_config=None)
        state = uvicorn.server.ServerState()
        served = await asyncio.get_running_loop().create_server(
            lambda: protocol(options, state, {}), "127.0.0.1", 0
        )
        reader, writer = await asyncio.open_connection(*served.sockets[0].getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n")
        answer = await reader.readuntil(b"no")
        writer.write(more)
        rest = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        served.close()
        assert b" 403 " in answer
        return rest

    assert asyncio.run(ask_without_a_body()) == b""


def test_the_server_accepts_only_its_token_over_tls(place: Place, model: Path) -> None:
    token = place.folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    certificate, key = _certificate(place.folder)
    words = (
        "--token-file",
        token,
        "--certificate",
        certificate,
        "--certificate-key",
        key,
    )
    served = Process(place, model, "--host", "0.0.0.0", *words)
    port = served.address.rpartition(":")[2]
    with httpx2.Client(
        verify=ssl.create_default_context(cafile=str(certificate)),
        base_url=f"https://127.0.0.1:{port}",
    ) as client:
        assert client.post("/predict", json={"text": "a"}).status_code == 401
        headers = {"authorization": f"Bearer {TOKEN}"}
        answer = client.post("/predict", json={"text": WORDS[0]}, headers=headers)
        assert answer.status_code == 200
    assert served.end() == (130, "stopped\n")
    assert TOKEN not in served.output


def test_a_port_in_use_is_reported(place: Place, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        message = place.give(
            "serve", str(model), "--port", str(listener.getsockname()[1]), code=2
        )
    assert message.startswith("error: 127.0.0.1:")
    assert message.count("\n") == 1


def _host_and_port(served: Process) -> tuple[str, int]:
    host, port = served.address.removeprefix("http://").split(":")
    return host, int(port)


def _accepts(address: tuple[str, int]) -> bool:
    """Whether something listens at an address."""
    try:
        socket.create_connection(address, timeout=30).close()
    except ConnectionRefusedError:
        return False
    return True


def _pour(line: socket.socket) -> None:
    """A body in parts, which is given up after 100 MB."""
    for _ in range(10_000):
        line.sendall(b"2710\r\n" + b"x" * 10_000 + b"\r\n")


def _certificate(folder: Path) -> tuple[Path, Path]:
    """A certificate that signs itself, of this machine's loopback, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name, now = x509.Name([]), datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(
            name, name, key.public_key(), x509.random_serial_number()
        )
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]),
            critical=True,
        )
        .sign(key, hashes.SHA256())
    )
    pem, none = serialization.Encoding.PEM, serialization.NoEncryption()
    (folder / "cert.pem").write_bytes(certificate.public_bytes(pem))
    raw = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, none)
    (folder / "key.pem").write_bytes(raw)
    return folder / "cert.pem", folder / "key.pem"
