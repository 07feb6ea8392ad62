"""Checks of a kit before its use; each problem comes with its remedy.

The only connection attempted is the one that the kit will use: to the server's one
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
    find_withdrawal_of_peer,
    read_expiry_dates,
)
from fednotes.apps.deployment.nvflare.kit import (
    REWRITTEN_FILES,
    SERVER,
    SITE,
    WATCH,
    Kit,
    build_kit_files,
    find_loose_keys,
    read_kit,
)
from fednotes.apps.deployment.rules.guard import open_approvals
from fednotes.apps.deployment.site_file import (
    SITE_FILE,
    read_kit_site_file,
    read_site_file,
)
from fednotes.core.errors import FednotesError
from fednotes.core.settings import expand
from fednotes.jobs.local_files import site_path_keys

CONNECT_SECONDS = 10.0  # time limit for reaching the server
_NOT_TLS = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "RECORD_LAYER_FAILURE",
    "UNKNOWN_PROTOCOL",
)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        subject: What was checked, in a word or two.
        ok: Whether it is in order; None if a person has to judge.
        message: The result in words, with the remedy of a problem.
    """

    subject: str
    ok: bool | None
    message: str


def preflight(kit: Path) -> list[Check]:
    """Return all checks of a kit.

    Raises:
        ConfigError: The folder is not a kit.
    """
    facts = read_kit(kit)
    checks = [
        Check(
            "kit",
            ok=True,
            message=f"{facts.role} {facts.name!r} of project {facts.project!r}",
        )
    ]
    checks.extend(_check_folder(kit, facts))
    checks.extend(_check_certificate(kit))
    if facts.role == SITE:
        checks.extend(check_site(kit))
    checks.append(check_port(kit) if facts.role == SERVER else check_server(kit))
    return checks


def problems_before_start(kit: Path, source: Path | None = None) -> list[Check]:
    """Return the problems of a kit itself, before its process is started.

    Args:
        kit: The kit.
        source: A site's file that is to be installed; None for the one in the kit.
    """
    facts = read_kit(kit)
    checks = list(_check_folder(kit, facts))
    if facts.role == SITE:
        checks.extend(check_site(kit, source))
    return [check for check in checks if check.ok is False]


def _check_folder(kit: Path, facts: Kit) -> Iterator[Check]:
    """Check all that a process of the kit needs, except the contents of its keys."""
    for name in build_kit_files(facts, kit):
        is_needed = name.startswith("local/") and name not in REWRITTEN_FILES
        if is_needed and not (kit / name).is_file():
            yield Check(
                "kit", ok=False, message=f"{kit / name} is missing: ask for a new kit"
            )
    yield _check_nvflare()
    if " " in str(kit.resolve()):
        yield Check(
            "folder",
            ok=False,
            message="its path has a space, with which NVFlare cannot run: move the kit",
        )
    for key in find_loose_keys(kit):
        yield Check(
            "key",
            ok=False,
            message=f"{key}: other users can read this file; run: chmod 600 {key}",
        )


def _check_nvflare() -> Check:
    try:
        version = importlib.metadata.version("nvflare")
    except importlib.metadata.PackageNotFoundError:
        return Check(
            "nvflare", ok=False, message="not installed: pip install 'fednotes[deploy]'"
        )
    if version.startswith("2.9."):
        return Check("nvflare", ok=True, message=version)
    return Check(
        "nvflare",
        ok=False,
        message=f"{version}, 2.9 is needed: pip install 'fednotes[deploy]'",
    )


def _check_certificate(kit: Path) -> Iterator[Check]:
    try:
        warnings = check_kit(kit)
        until = min(read_expiry_dates(kit).values())
    except FednotesError as error:
        yield Check("certificate", ok=False, message=str(error))
        return
    for warning in warnings:
        yield Check("certificate", ok=None, message=warning)
    if not warnings:
        yield Check("certificate", ok=True, message=f"valid until {until:%Y-%m-%d}")


def check_site(kit: Path, source: Path | None = None) -> Iterator[Check]:
    """Check a site's file, the files that it names, and the site's decisions.

    Args:
        kit: The site's kit.
        source: A site's file that is to be installed; None for the one in the kit.
    """
    if source is None and not (kit / SITE_FILE).exists():
        yield Check(
            "site file",
            ok=None,
            message=f"none yet: `fednotes site start {kit} --site FILE` installs one",
        )
        return
    try:
        file = read_kit_site_file(kit) if source is None else read_site_file(source)
    except FednotesError as error:
        yield Check("site file", ok=False, message=str(error))
        return
    policy = file.policy
    yield Check(
        "site file",
        ok=True,
        message=(
            f"sums over {policy.min_sites} or more sites, secure sum "
            f"{policy.secure_sum}"
        ),
    )

    missing = [
        f"{key} = {path}"
        for key, path in _named_paths(file.data, file.folder)
        if not path.exists()
    ]
    if missing:
        yield Check("data", ok=False, message=f"missing: {', '.join(missing)}")
    else:
        yield Check("data", ok=True, message="all files that it names exist")
    try:
        open_approvals(kit).decisions()
    except FednotesError as error:
        yield Check("approvals", ok=False, message=str(error))


def _named_paths(
    data: Mapping[str, Any], folder: Path, prefix: str = ""
) -> Iterator[tuple[str, Path]]:
    """Yield the files that a site's [data] names, each with its key."""
    path_keys = site_path_keys()
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _named_paths(value, folder, f"{prefix}{key}.")
        elif key in path_keys:
            names = value if isinstance(value, list) else [value]
            for name in names:
                if name:
                    full_key = f"{prefix}{key}"
                    yield full_key, folder / expand(str(name), full_key)


# ---- a server's own port -------------------------------------------------------------


def check_port(kit: Path) -> Check:
    """Check whether the server can listen at its port, or does so already."""
    port = read_kit(kit).port
    if asyncio.run(_is_free(port)):
        return Check("port", ok=True, message=f"{port} is free")
    problem = explain_other_listener(kit)
    if not problem:
        return Check(
            "port", ok=True, message=f"{port}: this server is running and answers there"
        )
    return Check(
        "port",
        ok=False,
        message=f"{port} is in use by another program ({problem}): stop that program, "
        "or make kits with another port",
    )


async def _is_free(port: int) -> bool:
    try:
        server = await asyncio.start_server(
            lambda _reader, _writer: None, "0.0.0.0", port
        )
    except OSError:
        return False
    server.close()
    return True


def explain_other_listener(kit: Path) -> str:
    """Return why the listener at a server's port is not this server; empty if it is.

    The check is made from the server's own machine, with the certificate that the
    server has for that.
    """
    facts = read_kit(kit)
    startup = kit / WATCH / "startup"
    try:
        shown = _fetch_certificate(
            startup, ("127.0.0.1", facts.port), name=facts.server, proxy=None
        )
    except _ConnectionFailure as failure:
        explanations = {
            "certificate": f"it shows another certificate: {failure.reason}",
            "plain": "it does not speak TLS",
            "TLS": f"TLS: {failure.reason}",
            "silent": "nothing answers",
        }
        return explanations[failure.kind]
    path = kit / "startup" / "server.crt"
    is_this_server = path.exists() and shown == ssl.PEM_cert_to_DER_cert(
        path.read_text("ascii")
    )
    return "" if is_this_server else "another server of this project answers"


def await_server(kit: Path, seconds: float, is_alive: Callable[[], bool]) -> str:
    """Wait until a server answers at its port; return the reason if it does not.

    Args:
        kit: The server's kit.
        seconds: Maximum time to wait.
        is_alive: Returns whether the server's process still runs.

    Returns:
        The explanation of `explain_other_listener`; empty if the server answers.
    """
    end = time.monotonic() + seconds
    problem = explain_other_listener(kit)
    while problem and is_alive() and time.monotonic() < end:
        time.sleep(0.3)
        problem = explain_other_listener(kit)
    return problem


# ---- the connection to the server ----------------------------------------------------


def check_server(kit: Path) -> Check:
    """Check whether the server answers a kit of a site or the admin."""
    facts = read_kit(kit)
    host = facts.server
    port = facts.port
    proxy = proxy_of(host, os.environ)
    through = f" through the proxy {proxy[0]}:{proxy[1]}" if proxy else ""
    where = f"{host}:{port}{through}"
    try:
        shown = _fetch_certificate(
            kit / "startup", (host, port), name=host, proxy=proxy
        )
    except _ConnectionFailure as failure:
        reason = failure.reason
        explanations = {
            "certificate": f"{where} is not the server of this project: {reason}",
            "plain": (
                f"{where} answers, but not with TLS: another program uses that "
                "port, or a proxy is in between"
            ),
            "TLS": f"{where} refuses this kit ({reason})",
            "proxy": f"{host}:{port}: the proxy {reason}; to bypass it, set "
            f"no_proxy = {host}",
            "silent": (
                f"{where} does not answer: check that the server is running, and that "
                f"no firewall blocks connections to port {port}"
            ),
        }
        return Check("server", ok=False, message=explanations[failure.kind])
    problem = find_withdrawal_of_peer(kit, shown)
    if problem is not None:
        return Check(
            "server", ok=False, message=f"{where} shows a certificate that {problem}"
        )
    return Check(
        "server",
        ok=True,
        message=f"{host}:{port} answers{through}, with this project's certificate",
    )


def proxy_of(host: str, environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the host and port of the proxy through which gRPC reaches a host, if any.

    gRPC reads these variables in this order and only in lower case. It uses no proxy if
    an entry of no_grpc_proxy or no_proxy is the end of the host's name.
    """
    exceptions = environment.get("no_grpc_proxy") or environment.get("no_proxy") or ""
    endings = [ending.strip() for ending in exceptions.split(",") if ending.strip()]
    if any(host.endswith(ending) for ending in endings):
        return None
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        value = environment.get(name)
        if value:
            parts = urlsplit(value if "://" in value else f"http://{value}")
            return (parts.hostname or "", parts.port or 80)
    return None


class _ConnectionFailure(Exception):
    """No certificate was received.

    Attributes:
        kind: `certificate`, `plain` (no TLS), `TLS`, `proxy` or `silent`.
        reason: The other side's words, if any.
    """

    def __init__(self, kind: str, reason: str = "") -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind
        self.reason = reason


def _fetch_certificate(
    startup: Path, where: tuple[str, int], *, name: str, proxy: tuple[str, int] | None
) -> bytes:
    """Return the certificate that the server shows, in DER.

    Args:
        startup: The folder of the kit's own certificate.
        where: Host and port.
        name: The name that the server's certificate must have.
        proxy: Host and port of a proxy, if any.

    Raises:
        _ConnectionFailure: The server shows no suitable certificate.
    """
    try:
        return asyncio.run(
            asyncio.wait_for(_shake_hands(startup, where, name, proxy), CONNECT_SECONDS)
        )
    except ssl.SSLCertVerificationError as error:
        raise _ConnectionFailure("certificate", error.verify_message) from error
    except ssl.SSLError as error:
        if error.reason in _NOT_TLS:
            raise _ConnectionFailure("plain") from error
        raise _ConnectionFailure("TLS", error.reason) from error
    except ConnectionRefusedError as error:
        # Without a number, `_shake_hands` raised it with the proxy's words.
        if error.errno is None:
            raise _ConnectionFailure("proxy", str(error)) from error
        raise _ConnectionFailure("silent") from error
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise _ConnectionFailure("silent") from error


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
            request = f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n"
            writer.write(request.encode())
            answer = await reader.readuntil(b"\r\n\r\n")
            status = answer.split(b"\r\n", 1)[0].decode("latin-1")
            if " 200 " not in f"{status} ":
                raise ConnectionRefusedError(f"{proxy[0]}:{proxy[1]} says {status!r}")
        await writer.start_tls(context, server_hostname=name)
        secured: ssl.SSLObject = writer.get_extra_info("ssl_object")
        return secured.getpeercert(binary_form=True) or b""
    finally:
        writer.transport.abort()
