"""Checks of a kit before its use; each problem comes with its remedy.

The only connection that is attempted is the one that the kit will use: to the server's
only port, with the kit's certificate.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
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
    SiteFile,
    read_kit_site_file,
    read_site_file,
    select_data,
)
from fednotes.core.databases import DatabaseAddress, is_address
from fednotes.core.errors import (
    FednotesError,
    naming_keys_for_parameters,
    write_install_command,
)
from fednotes.core.settings import expand_path
from fednotes.data.encodings import AUTO, reading_as
from fednotes.data.formats import guess_format
from fednotes.jobs import kinds
from fednotes.jobs.local_files import list_site_path_keys

CONNECT_SECONDS = 10.0  # time limit for reaching the server
# Maximum number of files in a folder whose format is guessed before a start. A job that
# reads the folder guesses it anyway, but opens every file.
MAX_FILES_TO_GUESS = 1000
_NOT_TLS = (
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "RECORD_LAYER_FAILURE",
    "UNKNOWN_PROTOCOL",
)
# OpenSSL's codes for a certificate whose issuer the kit does not know: 7 for a root of
# the same name with another key, 18 and 19 for self-signed certificates, 20 and 21 for
# a root that is missing.
_UNKNOWN_ISSUER = (7, 18, 19, 20, 21)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        subject: What was checked, in a word or two.
        ok: Whether the check passed; None if a person has to judge.
        message: The result in words, with the remedy of a problem.
    """

    subject: str
    ok: bool | None
    message: str


class Address(NamedTuple):
    """A host and a port to connect to."""

    host: str
    port: int

    @property
    def text(self) -> str:
        """The address as messages show it."""
        return f"{self.host}:{self.port}"


def run_checks(kit: Path) -> list[Check]:
    """Make all checks of a kit and return their results.

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
    if facts.role == SERVER:
        checks.append(check_port(kit))
        checks.extend(_check_host_name(facts.server))
    else:
        checks.append(check_server(kit))
    return checks


def list_problems_before_start(kit: Path, source: Path | None = None) -> list[Check]:
    """Return the failed checks of a kit itself, before its process is started.

    Args:
        kit: The kit.
        source: A new site file to be installed; None for the one in the kit.
    """
    facts = read_kit(kit)
    checks = list(_check_folder(kit, facts))
    if facts.role == SITE:
        checks.extend(check_site(kit, source))
    return [check for check in checks if check.ok is False]


def _check_folder(kit: Path, facts: Kit) -> Iterator[Check]:
    """Check what a process of the kit needs, except the contents of keys."""
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
            message="its path has a space, which NVFlare does not allow: move the kit",
        )
    for key in find_loose_keys(kit):
        yield Check(
            "key",
            ok=False,
            message=f"{key}: other users can read this file: run chmod 600 {key}",
        )


def _check_nvflare() -> Check:
    """Check the version of NVFlare."""
    try:
        version = importlib.metadata.version("nvflare")
    except importlib.metadata.PackageNotFoundError:
        message = f"not installed: {write_install_command('deploy')}"
        return Check("nvflare", ok=False, message=message)
    if version.startswith("2.9."):
        return Check("nvflare", ok=True, message=version)
    return Check(
        "nvflare",
        ok=False,
        message=f"{version}, 2.9 is needed: {write_install_command('deploy')}",
    )


def _check_certificate(kit: Path) -> Iterator[Check]:
    """Check that the kit's certificates are valid, and warn before they expire."""
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
    """Check a site's file, the notes that it names, and the file of decisions.

    Args:
        kit: The site's kit.
        source: A new site file to be installed; None for the one in the kit.
    """
    if source is None and not (kit / SITE_FILE).exists():
        yield Check(
            "site file",
            ok=None,
            message=(
                f"none yet: `fednotes site start {kit} --site-file FILE` installs one"
            ),
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

    check = _check_data(file)
    yield check
    if check.ok:
        for warning in list_note_warnings(file):
            yield Check("data", ok=None, message=warning)
    try:
        open_approvals(kit).read_decisions()
    except FednotesError as error:
        yield Check("approvals", ok=False, message=str(error))


def _check_data(file: SiteFile) -> Check:
    """Check that the files and databases exist that [data] of a site's file names."""
    missing: list[str] = []
    for key, place in _list_data_places(file.data, file.folder):
        if isinstance(place, Path):
            if not place.exists():
                missing.append(f"{key} = {place}")
            continue
        try:
            with place.connect():
                pass
        except FednotesError as error:
            return Check("data", ok=False, message=f"{key}: {error}")
    if missing:
        return Check("data", ok=False, message=f"missing: {', '.join(missing)}")
    return Check("data", ok=True, message="all files that it names exist")


def list_note_warnings(file: SiteFile) -> Iterator[str]:
    """Yield warnings about the notes that a site's file names.

    A site may start without notes, but no job can begin there.

    Args:
        file: The site's file. The files that it names exist.
    """
    source_keys: set[str] = set()
    has_source = False
    for kind in kinds.list_kinds():
        table = select_data(file, kind.name)
        source_keys.update(kind.source_keys)
        has_source = has_source or any(table.get(key) for key in kind.source_keys)
    if not has_source:
        yield (
            f"{file.path} names no notes, so no job can begin at this site: under "
            f"[data], give one of {', '.join(sorted(source_keys))}"
        )
    for key, place in _list_data_places(file.data, file.folder):
        if not isinstance(place, Path) or not place.is_dir():
            continue
        if not any(place.iterdir()):
            yield (
                f"{key} = {place}: the folder is empty, so no job can begin at this "
                "site: put the notes there, or name another folder"
            )
    yield from _list_annotation_warnings(file)


def _list_annotation_warnings(file: SiteFile) -> Iterator[str]:
    """Yield warnings about annotated documents whose format cannot be guessed."""
    table = select_data(file, "documents")
    has_documents = bool(table.get("path") or table.get("train"))
    if not has_documents or table.get("format"):
        return
    encoding = str(table.get("encoding") or AUTO)
    for key in ("path", "train", "valid", "test"):
        name = table.get(key)
        if not isinstance(name, str) or not name or is_address(name):
            continue
        path = file.folder / expand_path(name, key)
        if path.is_dir() and not 1 <= _count_files(path) <= MAX_FILES_TO_GUESS:
            continue
        try:
            with naming_keys_for_parameters(), reading_as(encoding):
                guess_format(path)
        except FednotesError as error:
            yield (
                f"{key}: a job that trains on annotated documents cannot read them: "
                f"{error}"
            )


def _count_files(folder: Path) -> int:
    """Return the number of entries in a folder, at most MAX_FILES_TO_GUESS + 1."""
    return sum(1 for _ in islice(folder.rglob("*"), MAX_FILES_TO_GUESS + 1))


def _list_data_places(
    data: Mapping[str, Any], folder: Path, prefix: str = ""
) -> Iterator[tuple[str, Path | DatabaseAddress]]:
    """Yield the files and databases of [data] of a site's file, each with its key.

    Args:
        data: The table [data], or a table in it.
        folder: The folder to which paths are relative.
        prefix: Prefix of the table's keys in messages.
    """
    path_keys = list_site_path_keys()
    for key, value in data.items():
        full_key = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _list_data_places(value, folder, f"{full_key}.")
        elif key in path_keys:
            names = value if isinstance(value, list) else [value]
            for name in map(str, filter(None, names)):
                if is_address(name):
                    yield full_key, DatabaseAddress(name).resolve_from(folder)
                else:
                    yield full_key, folder / expand_path(name, full_key)


# ---- a server's own port -------------------------------------------------------------


class PortUse(NamedTuple):
    """The use of a server's port on this machine.

    Attributes:
        port: The port.
        is_free: Whether a process could listen there.
        other_program: What shows that another program listens there; "" if the server
            itself does, or nobody.
    """

    port: int
    is_free: bool
    other_program: str

    def describe(self) -> str:
        """Return the use in words, with the remedy of a problem."""
        if self.is_free:
            return f"{self.port} is free"
        if not self.other_program:
            return f"{self.port}: this server is running and answers there"
        return (
            f"{self.port} is in use by another program ({self.other_program}): stop "
            "that program, or make kits with another port"
        )


def find_port_use(kit: Path) -> PortUse:
    """Return who listens at the port of a server's kit."""
    port = read_kit(kit).port
    is_free = asyncio.run(_is_free_port(port))
    other_program = "" if is_free else explain_other_listener(kit)
    return PortUse(port, is_free, other_program)


def check_port(kit: Path) -> Check:
    """Check that the server can listen at its port, or already does."""
    use = find_port_use(kit)
    return Check("port", ok=not use.other_program, message=use.describe())


def _check_host_name(host: str) -> Iterator[Check]:
    """Warn if the host name by which sites reach a server is unknown here."""
    if not asyncio.run(_can_resolve(host)):
        yield Check(
            "host name",
            ok=None,
            message=(
                f"this machine cannot resolve {host!r}, the name by which sites and "
                "the admin reach it: check that it resolves at each of them (DNS or "
                "/etc/hosts)"
            ),
        )


async def _is_free_port(port: int) -> bool:
    """Return whether a process could listen at a port of this machine."""
    try:
        server = await asyncio.start_server(
            lambda _reader, _writer: None, "0.0.0.0", port
        )
    except OSError:
        return False
    server.close()
    return True


def explain_other_listener(kit: Path) -> str:
    """Return why the listener at a server's port is not this server; "" if it is.

    Call this on the server's machine. The connection uses the certificate in the kit's
    folder for queries.
    """
    facts = read_kit(kit)
    startup = kit / WATCH / "startup"
    try:
        certificate = _fetch_certificate(
            startup, Address("127.0.0.1", facts.port), name=facts.server, proxy=None
        )
    except _ConnectionFailure as failure:
        explanations = {
            "certificate": f"it shows another certificate: {failure.reason}",
            "issuer": "it shows another certificate, signed by another authority",
            "plain": "it does not speak TLS",
            "TLS": f"TLS: {failure.reason}",
            "silent": "nothing answers",
        }
        return explanations[failure.kind]
    path = kit / "startup" / "server.crt"
    if path.exists() and certificate == ssl.PEM_cert_to_DER_cert(
        path.read_text("ascii")
    ):
        return ""
    return "another server of this project answers"


def await_server(kit: Path, seconds: float, is_alive: Callable[[], bool]) -> str:
    """Wait until a server answers at its port; return the problem if it does not.

    Args:
        kit: The server's kit.
        seconds: Maximum time to wait.
        is_alive: Returns whether the server's process still runs.

    Returns:
        The explanation of `explain_other_listener`; "" if the server answers.
    """
    end = time.monotonic() + seconds
    problem = explain_other_listener(kit)
    while problem and is_alive() and time.monotonic() < end:
        time.sleep(0.3)
        problem = explain_other_listener(kit)
    return problem


# ---- the connection to the server ----------------------------------------------------


def check_server(kit: Path) -> Check:
    """Check that the server answers a kit of a site or the admin."""
    facts = read_kit(kit)
    server = Address(facts.server, facts.port)
    proxy = find_proxy(server.host, os.environ)
    try:
        certificate = _fetch_certificate(
            kit / "startup", server, name=server.host, proxy=proxy
        )
    except _ConnectionFailure as failure:
        message = _explain_failure(failure, server, proxy, project=facts.project)
        return Check("server", ok=False, message=message)
    through = _describe_proxy(proxy)
    problem = find_withdrawal_of_peer(kit, certificate)
    if problem is not None:
        return Check(
            "server",
            ok=False,
            message=f"{server.text}{through} presents a certificate that {problem}",
        )
    return Check(
        "server",
        ok=True,
        message=f"{server.text} answers{through}, with this project's certificate",
    )


def _explain_failure(
    failure: _ConnectionFailure,
    server: Address,
    proxy: Address | None,
    *,
    project: str,
) -> str:
    """Return why no certificate of a server was received, and the remedy."""
    where = f"{server.text}{_describe_proxy(proxy)}"
    first_host = (proxy or server).host
    explanations = {
        "name": (
            f"this machine cannot resolve the host name {first_host!r}, so it cannot "
            f"reach {where}: {_suggest_name_remedy(is_proxy=proxy is not None)}"
        ),
        "issuer": (
            f"{where} is not the server of this kit's project, {project!r}: another "
            "authority signed its certificate. Use the kit of the project that runs "
            "there, or ask the coordinator which server this kit is for"
        ),
        "certificate": f"{where} is not the server of this project: {failure.reason}",
        "plain": (
            f"{where} answers, but not with TLS: another program uses that port, or a "
            "proxy is in between"
        ),
        "TLS": f"{where} refuses this kit ({failure.reason})",
        "proxy": (
            f"{server.text}: the proxy {failure.reason}; to bypass it, set no_proxy = "
            f"{server.host}"
        ),
        "silent": (
            f"{where} does not answer: check that the server is running, and that no "
            f"firewall blocks connections to port {server.port}"
        ),
    }
    return explanations[failure.kind]


def _suggest_name_remedy(*, is_proxy: bool) -> str:
    """Return what to do about a host name that a machine cannot resolve."""
    if is_proxy:
        return "check the proxy in the environment (https_proxy), or set no_proxy"
    return (
        "add the name to the DNS or to /etc/hosts of this machine; if the name is "
        "wrong, the coordinator makes new kits with the right `server`"
    )


def _describe_proxy(proxy: Address | None) -> str:
    """Return the part of a message that names a proxy; "" for none."""
    return "" if proxy is None else f" through the proxy {proxy.text}"


def find_proxy(host: str, environment: Mapping[str, str]) -> Address | None:
    """Return the proxy through which gRPC reaches a host; None if it uses none.

    gRPC reads these variables in this order and only in lower case. It uses no proxy if
    an entry of no_grpc_proxy or no_proxy is the end of the host's name.

    Args:
        host: The host.
        environment: The environment variables.
    """
    exceptions = environment.get("no_grpc_proxy") or environment.get("no_proxy") or ""
    endings = [ending.strip() for ending in exceptions.split(",") if ending.strip()]
    if any(host.endswith(ending) for ending in endings):
        return None
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        value = environment.get(name)
        if value:
            url = value if "://" in value else f"http://{value}"
            parts = urlsplit(url)
            return Address(parts.hostname or "", parts.port or 80)
    return None


class _ConnectionFailure(Exception):
    """No certificate was received.

    Attributes:
        kind: `certificate` (not the expected one), `issuer` (signed by another
            authority), `plain` (no TLS), `TLS`, `proxy`, `name` (the host's name is
            unknown) or `silent`.
        reason: The other side's words; "" for none.
    """

    def __init__(self, kind: str, reason: str = "") -> None:
        super().__init__(f"{kind}: {reason}")
        self.kind = kind
        self.reason = reason


def _fetch_certificate(
    startup: Path, server: Address, *, name: str, proxy: Address | None
) -> bytes:
    """Return the certificate that the server shows, in DER.

    Args:
        startup: The folder of the kit's certificate.
        server: The server's address.
        name: The name that the server's certificate must have.
        proxy: The proxy to connect through; None for none.

    Raises:
        _ConnectionFailure: The server shows no suitable certificate.
    """
    handshake = _shake_hands(startup, server, name, proxy)
    try:
        return asyncio.run(asyncio.wait_for(handshake, CONNECT_SECONDS))
    except ssl.SSLCertVerificationError as error:
        kind = "certificate"
        if error.verify_code in _UNKNOWN_ISSUER:
            kind = "issuer"
        raise _ConnectionFailure(kind, error.verify_message) from error
    except ssl.SSLError as error:
        if error.reason in _NOT_TLS:
            raise _ConnectionFailure("plain") from error
        raise _ConnectionFailure("TLS", error.reason) from error
    except ConnectionRefusedError as error:
        # An error without a number is from `_shake_hands`, with the proxy's words.
        if error.errno is None:
            raise _ConnectionFailure("proxy", str(error)) from error
        raise _ConnectionFailure("silent") from error
    except (TimeoutError, asyncio.IncompleteReadError) as error:
        raise _ConnectionFailure("silent") from error
    except OSError as error:
        first_hop = proxy or server
        is_known = asyncio.run(_can_resolve(first_hop.host))
        raise _ConnectionFailure("silent" if is_known else "name") from error


async def _can_resolve(host: str) -> bool:
    """Return whether this machine can resolve a host name."""
    try:
        await asyncio.get_running_loop().getaddrinfo(host, None)
    except OSError:
        return False
    return True


async def _shake_hands(
    startup: Path, server: Address, name: str, proxy: Address | None
) -> bytes:
    """Connect with TLS, return the certificate that the server shows, and disconnect.

    The arguments are those of `_fetch_certificate`.

    Raises:
        ConnectionRefusedError: The server or the proxy refuses the connection.
        OSError: The connection or the handshake fails.
    """
    context = ssl.create_default_context(cafile=str(startup / "rootCA.pem"))
    context.load_cert_chain(startup / "client.crt", startup / "client.key")
    context.set_alpn_protocols(["h2"])
    first_hop = proxy or server
    reader, writer = await asyncio.open_connection(first_hop.host, first_hop.port)
    try:
        if proxy is not None:
            request = f"CONNECT {server.text} HTTP/1.1\r\nHost: {server.text}\r\n\r\n"
            writer.write(request.encode())
            reply = await reader.readuntil(b"\r\n\r\n")
            status_line, _, _ = reply.partition(b"\r\n")
            status = status_line.decode("latin-1")
            if " 200 " not in f"{status} ":
                raise ConnectionRefusedError(f"{proxy.text} answered {status!r}")
        await writer.start_tls(context, server_hostname=name)
        tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
        return tls.getpeercert(binary_form=True) or b""
    finally:
        writer.transport.abort()
