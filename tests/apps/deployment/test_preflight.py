"""The check of a kit before use: its certificates, and the connection to the server."""

from __future__ import annotations

import http.server
import json
import shutil
import socket
import sqlite3
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

import intruders
from intruders import PROJECT
from proxy import proxy

from fednotes.apps.deployment.nvflare.authority import ProjectConfig, provision
from fednotes.apps.deployment.preflight import (
    Check,
    await_server,
    check_port,
    explain_other_listener,
    find_port_use,
    find_proxy,
    run_checks,
)
from fednotes.apps.deployment.site_file import SITE_FILE, install_site_file


def checks(kit: Path, subject: str) -> list[Check]:
    return [check for check in run_checks(kit) if check.subject == subject]


def test_a_good_kit_shows_how_long_it_is_valid(kits: dict[str, Path]) -> None:
    """The first end of all its certificates, as they were signed."""
    intruders.redate(kits["h1"], (-1, 70))
    end = f"{datetime.now(UTC) + timedelta(70):%Y-%m-%d}"
    assert checks(kits["h1"], "certificate") == [
        Check("certificate", True, f"valid until {end}")
    ]
    assert [check.ok for check in checks(kits["server"], "certificate")] == [True]


@pytest.mark.parametrize(
    ("who", "file", "message"),
    [
        ("h1", "startup/client.key", "does not belong to the kit's key"),
        (
            "h1",
            "startup/client.crt",
            "the certificate names h2, but the kit belongs to h1",
        ),
        (
            "admin",
            "startup/client.crt",
            "names h2, but the kit belongs to admin@fednotes.org",
        ),
        ("server", "watch/startup/client.crt", "the certificate names h2"),
    ],
)
def test_files_of_another_kit_are_refused(
    kits: dict[str, Path], who: str, file: str, message: str
) -> None:
    """A certificate that the authority signed, but for somebody else."""
    shutil.copyfile(kits["h2"] / "startup" / Path(file).name, kits[who] / file)
    (check,) = checks(kits[who], "certificate")
    assert check.ok is False
    assert message in check.message
    assert "ask for a new kit" in check.message


@pytest.mark.parametrize("who", ["h1", "server"])
def test_a_missing_file_that_nvflare_needs_is_reported(
    kits: dict[str, Path], who: str
) -> None:
    path = kits[who] / "local" / "authorization.json"
    path.unlink()
    wrong = [check.message for check in checks(kits[who], "kit") if check.ok is False]
    assert wrong == [f"{path} is missing: ask for a new kit"]


# the way to the server


@pytest.fixture
def answering(shared_kits: dict[str, Path]) -> Iterator[None]:
    """Run the server's TLS: it shows its certificate and wants the site's."""
    startup = shared_kits["server"] / "startup"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(startup / "server.crt", startup / "server.key")
    context.load_verify_locations(startup / "rootCA.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server(("127.0.0.1", PROJECT.port)) as listening:
        listening.settimeout(0.1)
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                with suppress(OSError), listening.accept()[0] as plain:
                    plain.settimeout(5)
                    with context.wrap_socket(plain, server_side=True) as secure:
                        secure.recv(1)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        ended.set()
        thread.join()


def to_server(kit: Path) -> Check:
    (check,) = checks(kit, "server")
    return check


@pytest.mark.usefixtures("answering")
def test_the_server_is_reached_through_the_proxy_of_the_environment(
    shared_kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert to_server(shared_kits["h1"]).ok
    with proxy() as hospital:
        monkeypatch.setenv("https_proxy", hospital.url)
        check = to_server(shared_kits["h1"])
        assert check.ok
        assert (
            f"through the proxy {hospital.url.removeprefix('http://')}" in check.message
        )
        assert hospital.addresses == [f"localhost:{PROJECT.port}"]
        hospital.refuses = True
        check = to_server(shared_kits["h1"])
        assert check.ok is False
        assert "407 Proxy Authentication Required" in check.message
        monkeypatch.setenv("no_proxy", "elsewhere.org, localhost")
        assert to_server(shared_kits["h1"]).ok
        assert len(hospital.addresses) == 2


@pytest.mark.usefixtures("answering")
@pytest.mark.parametrize("project", [PROJECT, replace(PROJECT, name="x")])
def test_the_server_of_another_project_is_recognised(
    tmp_path: Path, project: ProjectConfig
) -> None:
    """Of a project with the same name and another authority, too."""
    check = to_server(provision(project, tmp_path / "kits")["h1"])
    assert check.ok is False
    assert (
        f"is not the server of this kit's project, {project.name!r}: another authority "
        "signed its certificate"
    ) in check.message


def test_an_unknown_host_name_is_not_reported_as_a_firewall(
    kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kit in (kits["h1"], kits["server"]):
        facts = json.loads((kit / "kit.json").read_text())
        (kit / "kit.json").write_text(json.dumps({**facts, "server": "ward.invalid"}))
    check = to_server(kits["h1"])
    assert check.ok is False
    assert "this machine cannot resolve the host name 'ward.invalid'" in check.message
    assert "firewall" not in check.message
    monkeypatch.setenv("https_proxy", "http://proxy.invalid:3128")
    check = to_server(kits["h1"])
    assert "cannot resolve the host name 'proxy.invalid'" in check.message
    assert "https_proxy" in check.message
    (check,) = checks(kits["server"], "host name")
    assert check.ok is None
    assert "'ward.invalid', the name by which sites and the admin" in check.message


def test_a_known_host_name_is_not_mentioned(
    shared_kits: dict[str, Path],
) -> None:
    assert checks(shared_kits["server"], "host name") == []


@pytest.mark.usefixtures("answering")
def test_the_listener_at_a_port_is_recognised_by_its_certificate(
    shared_kits: dict[str, Path], tmp_path: Path
) -> None:
    assert explain_other_listener(shared_kits["server"]) == ""
    assert check_port(shared_kits["server"]).ok
    other_server = intruders.copy_kit(shared_kits["server"], tmp_path / "other")
    (other_server / "startup/server.crt").write_bytes(
        (shared_kits["h1"] / "startup/client.crt").read_bytes()
    )
    assert (
        explain_other_listener(other_server) == "another server of this project answers"
    )
    stranger = provision(PROJECT, tmp_path / "stranger")["server"]
    assert "it shows another certificate" in explain_other_listener(stranger)
    assert check_port(stranger).ok is False


@pytest.fixture
def no_tls(shared_kits: dict[str, Path]) -> Iterator[None]:
    """Run a web server on the port, which answers a TLS hello in plain text."""
    handler = type(
        "Quiet", (http.server.BaseHTTPRequestHandler,), {"log_message": lambda *a: None}
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", PROJECT.port), handler) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        yield
        web.shutdown()
        thread.join()


@pytest.mark.usefixtures("no_tls")
def test_another_program_on_the_port_is_reported(
    shared_kits: dict[str, Path],
) -> None:
    check = to_server(shared_kits["h1"])
    assert check.ok is False
    assert "answers, but not with TLS" in check.message
    check = check_port(shared_kits["server"])
    assert check.ok is False
    assert not find_port_use(shared_kits["server"]).is_free
    assert "in use by another program (it does not speak TLS)" in check.message
    assert (
        await_server(shared_kits["server"], 0.0, lambda: True)
        == "it does not speak TLS"
    )


def test_a_free_port_and_a_silent_server_are_reported(
    shared_kits: dict[str, Path],
) -> None:
    assert find_port_use(shared_kits["server"]).is_free
    assert check_port(shared_kits["server"]).message.endswith("is free")
    looks = iter([True, True, False])
    assert (
        await_server(shared_kits["server"], 60.0, lambda: next(looks))
        == "nothing answers"
    )
    assert next(looks, None) is None  # it ended with the process


def test_an_unreachable_server_is_reported_with_the_route_to_it(
    shared_kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    check = to_server(shared_kits["h1"])
    assert check.ok is False
    assert "does not answer" in check.message
    monkeypatch.setenv("https_proxy", f"127.0.0.1:{intruders.free_port()}")
    check = to_server(shared_kits["h1"])
    assert check.ok is False
    assert "through the proxy 127.0.0.1:" in check.message


def test_the_reported_proxy_is_the_one_that_grpc_uses() -> None:
    """As gRPC documents it: grpc_proxy, https_proxy, http_proxy; no_grpc_proxy before
    no_proxy."""
    https = {"https_proxy": "http://p.org:3128"}
    assert find_proxy("s.org", https) == ("p.org", 3128)
    assert find_proxy("s.org", {**https, "grpc_proxy": "q.org:99"}) == ("q.org", 99)
    assert find_proxy("s.org", {"http_proxy": "p.org:3128"}) == ("p.org", 3128)
    assert find_proxy("s.org", {"HTTPS_PROXY": "http://p.org:3128"}) is None
    assert find_proxy("s.org", {**https, "no_proxy": "a.net,.org"}) is None
    assert find_proxy("s.org", {**https, "no_proxy": ".org", "no_grpc_proxy": ".net"})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "names no notes, so no job can begin at this site: under [data], give"),
        ("types = ['Drug']", "names no notes"),
        ("path = 'nothing'", "path = {folder}/nothing: the folder is empty"),
        ("train = 'letter.txt'\ntest = 'drugs.conll'", "train: a job that trains on"),
        ("path = 'letter.txt'", "letter.txt: cannot recognise the format: give format"),
    ],
)
def test_notes_that_no_job_could_read_cause_a_warning(
    kits: dict[str, Path], tmp_path: Path, data: str, message: str
) -> None:
    """A site may start without notes, so this is no error."""
    (tmp_path / "nothing").mkdir()
    (tmp_path / "letter.txt").write_text("The patient was seen today. She is well.\n")
    (tmp_path / "drugs.conll").write_text("Aspirin\tB-Drug\nhelped\tO\n\n")
    path = tmp_path / "h1.toml"
    path.write_text(f"[data]\n{data}\n" if data else "")
    install_site_file(path, kits["h1"])
    exists, *warnings = checks(kits["h1"], "data")
    assert exists.ok
    assert [check.ok for check in warnings] == [None]
    assert message.format(folder=tmp_path) in warnings[0].message

    path.write_text("[data]\ntrain = 'drugs.conll'\ntest = 'drugs.conll'\n")
    install_site_file(path, kits["h1"])
    assert [check.ok for check in checks(kits["h1"], "data")] == [True]


def test_the_format_in_the_site_file_is_used(
    kits: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "letter.txt").write_text("The patient was seen today. She is well.\n")
    path = tmp_path / "h1.toml"
    path.write_text("[data]\npath = 'letter.txt'\nformat = 'conll'\n")
    install_site_file(path, kits["h1"])
    assert [check.ok for check in checks(kits["h1"], "data")] == [True]


def test_a_database_of_a_site_file_is_opened_and_a_wrong_one_reported(
    kits: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sqlalchemy")
    sqlite3.connect(tmp_path / "notes.db").close()
    (kits["h1"] / SITE_FILE).write_text('[data]\npath = "env:NOTES_DB"\n', "utf-8")
    monkeypatch.setenv("NOTES_DB", f"sqlite:///{tmp_path}/notes.db")
    assert [check.ok for check in checks(kits["h1"], "data")] == [True]
    monkeypatch.setenv("NOTES_DB", f"sqlite:///{tmp_path}/missing.db")
    (check,) = checks(kits["h1"], "data")
    assert check.ok is False
    assert check.message.startswith("path: env:NOTES_DB: there is no such SQLite file")
