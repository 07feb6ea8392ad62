"""Before a kit is used: what would stop it, each with the remedy.

The only connection that is tried is the one that the kit will use: to the server's one
port, with the kit's own certificate.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fednotes.apps.deployment.nvflare.certificates import (
    check_kit,
    shown_problem,
    valid_until,
)
from fednotes.apps.deployment.nvflare.kit import (
    RENEWED,
    SERVER,
    SITE,
    WATCH,
    Kit,
    kit_files,
    loose_keys,
    read_kit,
)
from fednotes.apps.deployment.rules.guard import approvals_of
from fednotes.apps.deployment.site_file import (
    SITE_FILE,
    read_kit_site_file,
    read_site_file,
)
from fednotes.core.errors import FednotesError
from fednotes.core.settings import expand

SECONDS = 10.0  # to reach the server
_PLAIN = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "RECORD_LAYER_FAILURE",
    "UNKNOWN_PROTOCOL",
)


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. ok: None is for a person to judge."""

    what: str
    ok: bool | None
    told: str


def preflight(kit: Path) -> list[Check]:
    """All checks of a kit. Raises ConfigError if the folder is no kit."""
    facts = read_kit(kit)
    checks = [
        Check("kit", True, f"{facts.role} {facts.name!r} of project {facts.project!r}"),
        *_own(kit, facts),
        *_certificate(kit),
        *(site_checks(kit) if facts.role == SITE else ()),
    ]
    return [*checks, port_check(kit) if facts.role == SERVER else reached(kit)]


def before_start(kit: Path, source: Path | None = None) -> list[Check]:
    """What is wrong with a kit itself, before a process is started with it.

    source: a site's file that is to be taken over; the kit's own if None.
    """
    facts = read_kit(kit)
    site = site_checks(kit, source) if facts.role == SITE else ()
    return [check for check in (*_own(kit, facts), *site) if check.ok is False]


def _own(kit: Path, facts: Kit) -> Iterator[Check]:
    """What a kit's process would not begin without; the keys' contents are
    `_certificate`'s."""
    for name in kit_files(facts, kit):
        if (
            name.startswith("local/")
            and name not in RENEWED
            and not (kit / name).is_file()
        ):
            yield Check("kit", False, f"{kit / name} is missing: ask for a new kit")
    yield _installed()
    if " " in str(kit.resolve()):
        yield Check(
            "folder", False, "a space in its path: NVFlare cannot run there, move it"
        )
    for key in loose_keys(kit):
        yield Check("key", False, f"{key}: others can read it: chmod 600 {key}")


def _installed() -> Check:
    try:
        version = importlib.metadata.version("nvflare")
    except importlib.metadata.PackageNotFoundError:
        return Check("nvflare", False, "not installed: pip install 'fednotes[deploy]'")
    fits = version.startswith("2.9.")
    return Check("nvflare", fits, version if fits else f"{version}, 2.9 is needed")


def _certificate(kit: Path) -> Iterator[Check]:
    try:
        warnings, until = check_kit(kit), min(valid_until(kit).values())
    except FednotesError as error:
        yield Check("certificate", False, str(error))
        return
    yield from (Check("certificate", None, warning) for warning in warnings)
    if not warnings:
        yield Check("certificate", True, f"valid until {until:%Y-%m-%d}")


def site_checks(kit: Path, source: Path | None = None) -> Iterator[Check]:
    """A site's file, what it names, and its decisions. source: as in `before_start`."""
    if source is None and not (kit / SITE_FILE).exists():
        remedy = f"none yet: `fednotes site start {kit} --site FILE` takes it over"
        yield Check("site file", None, remedy)
        return
    try:
        file = read_kit_site_file(kit) if source is None else read_site_file(source)
    except FednotesError as error:
        yield Check("site file", False, str(error))
        return
    policy = file.policy
    told = (
        f"sums over {policy.min_sites} sites and more, secure sum {policy.secure_sum}"
    )
    yield Check("site file", True, told)
    places = [
        (key, file.folder / expand(value, key)) for key, value in _places(file.data)
    ]
    missing = [f"{key} = {place}" for key, place in places if not place.exists()]
    told = (
        f"not there: {', '.join(missing)}"
        if missing
        else "the files that it names are there"
    )
    yield Check("data", not missing, told)
    try:
        approvals_of(kit).decisions()
    except FednotesError as error:
        yield Check("approvals", False, str(error))


def _places(data: Any, where: str = "") -> Iterator[tuple[str, str]]:
    names = (
        "path",
        "paths",
        "train",
        "valid",
        "test",
        "notes",
        "codes",
        "labels",
        "concepts",
    )
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _places(value, f"{key}.")
        elif key in names:
            for text in value if isinstance(value, list) else [value]:
                if text:
                    yield f"{where}{key}", str(text)


def port_check(kit: Path) -> Check:
    """Whether the server can listen at its port, or does."""
    port = read_kit(kit).port
    if asyncio.run(_is_free(port)):
        return Check("port", True, f"{port} is free")
    problem = answer_of(kit)
    if not problem:
        return Check("port", True, f"{port}: this server runs and answers there")
    told = f"{port} is in use by another program ({problem}): stop that, or make kits of another"
    return Check("port", False, f"{told} port")


async def _is_free(port: int) -> bool:
    try:
        server = await asyncio.start_server(
            lambda reader, writer: None, "0.0.0.0", port
        )
    except OSError:
        return False
    server.close()
    return True


def answer_of(kit: Path) -> str:
    """Why nothing at the port of a server's kit is this server; empty if it is.

    It is asked from its own machine, by the identity that it has for that.
    """
    facts = read_kit(kit)
    startup = kit / WATCH / "startup"
    shown, wrong, told = _shown(startup, ("127.0.0.1", facts.port), facts.server, None)
    if wrong:
        says = {
            "certificate": "it shows another certificate: ",
            "plain": "it does not speak TLS",
        }
        return {**says, "TLS": "TLS: ", "silent": "nothing answers"}[wrong] + told
    path = kit / "startup" / "server.crt"
    own = path.exists() and shown == ssl.PEM_cert_to_DER_cert(path.read_text("ascii"))
    return "" if own else "another server of this project answers"


def await_answer(kit: Path, seconds: float, alive: Callable[[], bool]) -> str:
    """`answer_of`, until it is the server, `seconds` have passed, or its process has
    ended."""
    end = time.monotonic() + seconds
    while (problem := answer_of(kit)) and alive() and time.monotonic() < end:
        time.sleep(0.3)
    return problem


def reached(kit: Path) -> Check:
    """Whether the server answers a site's or the admin's kit."""
    facts = read_kit(kit)
    host, port = facts.server, facts.port
    proxy = proxy_of(host, os.environ)
    through = f" through the proxy {proxy[0]}:{proxy[1]}" if proxy else ""
    where = f"{host}:{port}{through}"
    shown, wrong, problem = _shown(kit / "startup", (host, port), host, proxy)
    if wrong:
        plain = "answers, but not with TLS: another program has that port, or a proxy is between"
        silent = f"does not answer: is it started, and does a firewall let {port} out?"
        says = {
            "certificate": f"{where} is not this project's: {problem}",
            "plain": f"{where} {plain}",
            "TLS": f"{where} refuses this kit ({problem})",
            "proxy": f"{host}:{port}: the proxy {problem}; no_proxy = {host} goes past it",
            "silent": f"{where} {silent}",
        }
        return Check("server", False, says[wrong])
    if problem := shown_problem(kit, shown):
        return Check("server", False, f"{where} shows a certificate that {problem}")
    told = f"{host}:{port} answers{through}, with this project's certificate"
    return Check("server", True, told)


def proxy_of(host: str, environment: Mapping[str, str]) -> tuple[str, int] | None:
    """The proxy through which gRPC reaches a host: these variables in this order, in
    small letters, unless a name or ending in no_grpc_proxy or no_proxy is the host's.
    """
    around = environment.get("no_grpc_proxy") or environment.get("no_proxy") or ""
    if any(host.endswith(end.strip()) for end in around.split(",") if end.strip()):
        return None
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        if value := environment.get(name):
            parts = urlsplit(value if "://" in value else f"http://{value}")
            return (parts.hostname or "", parts.port or 80)
    return None


def _shown(
    startup: Path, where: tuple[str, int], name: str, proxy: tuple[str, int] | None
) -> tuple[bytes, str, str]:
    """The certificate that the server shows, as DER; what is wrong if it shows none
    (certificate, plain, TLS, proxy or silent), and the words for it. name: that it must
    have."""
    try:
        shaking = asyncio.wait_for(_shake_hands(startup, where, name, proxy), SECONDS)
        return asyncio.run(shaking), "", ""
    except ssl.SSLCertVerificationError as error:
        return b"", "certificate", error.verify_message
    except ssl.SSLError as error:
        return (
            (b"", "plain", "") if error.reason in _PLAIN else (b"", "TLS", error.reason)
        )
    except ConnectionRefusedError as error:
        # by the proxy in words, else by the other machine
        told = str(error) if error.errno is None else ""
        return b"", "proxy" if told else "silent", told
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return b"", "silent", ""


async def _shake_hands(
    startup: Path, where: tuple[str, int], name: str, proxy: tuple[str, int] | None
) -> bytes:
    context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
    context.load_cert_chain(startup / "client.crt", startup / "client.key")
    context.set_alpn_protocols(["h2"])
    host, port = where
    reader, writer = await asyncio.open_connection(*(proxy or where))
    try:
        if proxy:
            writer.write(
                f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode()
            )
            answer = await reader.readuntil(b"\r\n\r\n")
            status = answer.split(b"\r\n", 1)[0].decode("latin-1")
            if " 200 " not in f"{status} ":
                raise ConnectionRefusedError(f"{proxy[0]}:{proxy[1]} says {status!r}")
        await writer.start_tls(context, server_hostname=name)
        secured: ssl.SSLObject = writer.get_extra_info("ssl_object")
        return secured.getpeercert(binary_form=True) or b""
    finally:
        writer.transport.abort()
