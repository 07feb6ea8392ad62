"""What a kit trusts: lists of revoked kits, two roots for a while, clocks that differ.

The lists are checked by OpenSSL where it is at hand; what must be refused is made here.
"""

from __future__ import annotations

import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

import dishonest
import intruders
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessagePropKey, ReturnCode
from nvflare.fuel.f3.connection import ConnState
from nvflare.fuel.f3.message import Message

from fednotes.core.errors import ConfigError, RefusedError
from fednotes.engines.nvflare import certificates, gate
from fednotes.engines.nvflare import kit as kit_files
from fednotes.engines.nvflare.authority import authority_of, provision
from fednotes.engines.nvflare.certificates import (
    CertificateIdentity,
    Trust,
    certificate_of,
    check_kit,
    settle,
    shown_problem,
    take,
)
from fednotes.engines.nvflare.gate import require_admins_signature

PROJECT = intruders.project(18002, "h1", "h2")
TEXT = b"keys"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("kits")
    provision(PROJECT, out)
    return out


@pytest.fixture
def out(made: Path, tmp_path: Path) -> Path:
    return intruders.copied(made, tmp_path / "kits")


def kit(out: Path, name: str) -> Path:
    return out / name if name in ("server", "admin") else out / "sites" / name


def revoked(out: Path, *names: str) -> bytes:
    provision(PROJECT, out, revoke=names)
    return (out / "trust.pem").read_bytes()


def days_later(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """Let the clock of everybody be ahead."""

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(days)

    monkeypatch.setattr(certificates, "datetime", Later)


def signed_job(out: Path, tmp_path: Path, run: str) -> Path:
    folder = kit_files.job_folder(tmp_path / "jobs", {}, run=run, sites=["h1", "h2"], min_sites=2)
    dishonest.sign(folder / "app", kit(out, "admin"))
    return folder / "app"


# a kit that is revoked


def test_the_list_is_one_that_openssl_verifies(out: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here")
    serial = certificate_of(kit(out, "h2") / "startup/client").serial_number
    (out / "list.pem").write_bytes(revoked(out, "h2"))
    root = kit(out, "h1") / "startup/rootCA.pem"
    command = [openssl, "crl", "-in", "list.pem", "-CAfile", str(root), "-noout", "-text"]
    found = subprocess.run(command, cwd=out, capture_output=True, text=True)
    assert "verify OK" in found.stdout + found.stderr
    assert f"{serial:X}" in found.stdout
    for name, refused in (("h1", False), ("h2", True)):
        chain = ["-crl_check", "-CRLfile", "list.pem", "-CAfile", str(root)]
        path = kit(out, name) / "startup/client.crt"
        done = subprocess.run([openssl, "verify", *chain, path], cwd=out, capture_output=True)
        assert (done.returncode != 0) is refused


def test_a_revoked_site_signs_nothing_from_now_on(out: Path) -> None:
    """The identities that are held in a running job learn of it with the next signature."""
    h1, h2 = (CertificateIdentity.of_kit(kit(out, name)) for name in ("h1", "h2"))
    assert h1.verify("h2", TEXT, h2.sign(TEXT))
    assert take(kit(out, "h1"), revoked(out, "h2"))
    assert not h1.verify("h2", TEXT, h2.sign(TEXT))
    assert h1.verify("h1", TEXT, h1.sign(TEXT))
    assert check_kit(kit(out, "h1")) == []


def test_a_kit_that_is_made_again_is_another(out: Path, tmp_path: Path) -> None:
    """The lost one counts no more, the new one does."""
    kit(out, "h2").rename(tmp_path / "lost")
    again = provision(PROJECT, out, again=["h2"])["h2"]
    assert take(kit(out, "h1"), (out / "trust.pem").read_bytes())
    h1 = CertificateIdentity.of_kit(kit(out, "h1"))
    assert not h1.verify("h2", TEXT, CertificateIdentity.of_kit(tmp_path / "lost").sign(TEXT))
    assert h1.verify("h2", TEXT, CertificateIdentity.of_kit(again).sign(TEXT))
    assert check_kit(again) == []
    take(tmp_path / "lost", (out / "trust.pem").read_bytes())
    with pytest.raises(ConfigError, match=r"client.crt: the certificate was revoked on \d{4}-"):
        check_kit(tmp_path / "lost")


def test_a_job_of_a_revoked_admin_is_refused(out: Path, tmp_path: Path) -> None:
    app, h1 = signed_job(out, tmp_path, "r1"), kit(out, "h1")
    require_admins_signature(app, h1 / "startup/rootCA.pem")
    take(h1, revoked(out, "admin"))
    with pytest.raises(RefusedError, match="signature is not valid"):
        require_admins_signature(app, h1 / "startup/rootCA.pem")


def test_who_handed_in_a_job_is_not_revoked_with_a_kit_that_served_it(
    out: Path, tmp_path: Path
) -> None:
    """NVFlare's folder of a job, in a kit that is still at hand, holds the admin's certificate."""
    h1, app = kit(out, "h1"), signed_job(out, tmp_path, "r1")
    for name in ("h2", "server"):
        shutil.copytree(app, kit(out, name) / "11fc898f-1fc4-4b3c-9533-b5b1d56a0f0c" / "app")
        assert len(list(kit(out, name).rglob("*.crt"))) > len(certificates.stems(kit(out, name)))
    take(h1, revoked(out, "h2", "server"))
    listed = {entry.serial_number for entry in Trust.of(h1 / "startup").listed}
    ours = [stem for name in ("h2", "server") for stem in certificates.stems(kit(out, name))]
    assert {certificate_of(stem).serial_number for stem in ours} <= listed
    assert certificate_of(kit(out, "admin") / "startup/client").serial_number not in listed
    require_admins_signature(app, h1 / "startup/rootCA.pem")


def test_a_revoked_server_is_seen_by_what_it_shows(out: Path) -> None:
    """As `preflight` does; both its certificates count no more."""
    h1, server = kit(out, "h1"), kit(out, "server")
    shown = certificate_of(server / "startup/server").public_bytes(Encoding.DER)
    assert shown_problem(h1, shown) == ""
    said = revoked(out, "server")
    take(h1, said)
    assert "was revoked on" in shown_problem(h1, shown)
    watch = certificate_of(server / "watch/startup/client")
    assert "was revoked on" in Trust.of(h1 / "startup").problem(watch)
    assert take(server, said)
    assert Trust.of(server / "watch/startup").number == Trust.of(server / "startup").number == 2


# which lists are taken


def test_an_older_list_does_not_undo_a_newer_one(out: Path) -> None:
    h1 = kit(out, "h1")
    first, second = revoked(out, "h2"), revoked(out, "admin")
    assert take(h1, second)
    assert not take(h1, second)
    before = (h1 / "startup/trust.pem").read_bytes()
    with pytest.raises(RefusedError, match="number 2 is not newer than 3, this kit's own"):
        take(h1, first)
    assert (h1 / "startup/trust.pem").read_bytes() == before
    assert len(list(Trust.of(h1 / "startup").listed)) == 2  # the newer has what the older had


def forged(out: Path) -> bytes:
    """A list of the right name and a high number, signed by a site's key, with its root's words."""
    said = Trust.parsed((out / "trust.pem").read_bytes())
    now = datetime.now(UTC)
    builder = x509.CertificateRevocationListBuilder(said.listed.issuer, now, now + timedelta(9))
    builder = builder.add_extension(x509.CRLNumber(99), critical=False)
    key: Any = certificates.key_of(kit(out, "h2") / "startup/client")
    return Trust(said.roots, (), builder.sign(key, hashes.SHA256())).pem()


def test_what_the_authority_did_not_say_is_refused(out: Path, tmp_path: Path) -> None:
    h1, true = kit(out, "h1"), revoked(out, "h2")
    provision(PROJECT, tmp_path / "other")
    other = (tmp_path / "other/trust.pem").read_bytes()
    own = (kit(out, "h2") / "startup/client.crt").read_bytes()
    cut = [true[: len(true) * part // 9] for part in range(9)]
    false = (forged(out), other, other + true, own + true, b"x" * 60_000, *cut)
    before = (h1 / "startup/trust.pem").read_bytes()
    for said in false:
        with pytest.raises(RefusedError):
            take(h1, said)
    with pytest.raises(RefusedError, match="bytes are more than an authority says"):
        take(h1, true + b"\n" * certificates.MOST_BYTES)
    assert (h1 / "startup/trust.pem").read_bytes() == before
    assert take(h1, true)


def test_a_kit_of_an_earlier_version_takes_its_first_list(out: Path) -> None:
    h1, h2 = kit(out, "h1"), kit(out, "h2")
    (h1 / "startup/trust.pem").unlink()
    assert CertificateIdentity.of_kit(h1).verify(
        "h2", TEXT, CertificateIdentity.of_kit(h2).sign(TEXT)
    )
    assert take(h1, revoked(out, "h2"))


# two roots


def test_two_roots_overlap_and_the_old_one_ends(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """h1 has taken the new root in and is of the old one; a kit is made under the new one."""
    h1, h2 = kit(out, "h1"), kit(out, "h2")
    authority = authority_of(PROJECT, out)
    authority.replace(overlap=80)
    authority.keep()
    with pytest.raises(ConfigError, match="is being replaced until"):
        authority.replace(overlap=80)
    more = intruders.project(18002, "h1", "h2", "h3")
    h3 = provision(more, out)["h3"]
    of_new, of_old = CertificateIdentity.of_kit(h3), CertificateIdentity.of_kit(h2)
    old_only = CertificateIdentity.of_kit(h1)
    assert not old_only.verify("h3", TEXT, of_new.sign(TEXT))  # before it knows the new root
    assert take(h1, (out / "trust.pem").read_bytes())
    assert old_only.verify("h3", TEXT, of_new.sign(TEXT))
    assert old_only.verify("h2", TEXT, of_old.sign(TEXT))
    assert of_new.verify("h2", TEXT, of_old.sign(TEXT))
    assert check_kit(h1) == check_kit(h3) == []
    days_later(monkeypatch, 21)
    assert ["client.crt: the certificate expires on" in w for w in check_kit(h1)] == [True]
    assert check_kit(h3) == []
    days_later(monkeypatch, 81)
    assert old_only.verify("h3", TEXT, of_new.sign(TEXT))
    assert not old_only.verify("h2", TEXT, of_old.sign(TEXT))
    assert not of_new.verify("h2", TEXT, of_old.sign(TEXT))
    with pytest.raises(ConfigError, match="is of a root that was replaced, until"):
        check_kit(h1)
    settle(h3)
    assert len(Trust.of(h3 / "startup").roots) == 1
    assert not of_new.verify("h2", TEXT, of_old.sign(TEXT))
    assert of_new.verify("h3", TEXT, of_new.sign(TEXT))


def test_only_the_old_root_brings_a_new_one(out: Path, tmp_path: Path) -> None:
    """Another authority of the same name without a bridge, with one that a site's key signed, or
    with the true one, to another key; an older root's word after it was replaced."""
    h1 = kit(out, "h1")
    provision(PROJECT, tmp_path / "other")
    for _ in range(9):  # its number is newer
        revoked(tmp_path / "other", "h2")
    false = authority_of(PROJECT, tmp_path / "other")
    (root,) = false.roots
    site = intruders.Authority(root, certificates.key_of(kit(out, "h2") / "startup/client"))
    bridge = x509.load_pem_x509_certificate(site.sign(root, false.key, (-1, 30)))
    old = intruders.copied(out, tmp_path / "stolen")
    authority = authority_of(PROJECT, out)
    authority.replace(30)
    authority.keep()
    for bridges in ((), (bridge,), authority.said.bridges):
        with pytest.raises(RefusedError, match="not signed by the authority"):
            take(h1, Trust(false.said.roots, bridges, false.said.listed).pem())
    take(h1, (out / "trust.pem").read_bytes())
    for _ in range(3):
        late = revoked(old, "h2")
    with pytest.raises(RefusedError, match="signed by a root that another has replaced"):
        take(h1, late)


def test_neither_a_site_nor_a_stranger_is_a_bridge(out: Path, tmp_path: Path) -> None:
    """What their keys sign counts for nobody, whatever they show beside it."""
    provision(PROJECT, tmp_path / "other")
    own = kit(out, "h2") / "startup/client"
    site = intruders.Authority(certificate_of(own), certificates.key_of(own))
    victim = certificate_of(kit(out, "server") / "startup/server")
    for liar in (site, intruders.Authority.of(tmp_path / "other")):
        false = x509.load_pem_x509_certificate(liar.sign(victim, site.key, (-1, 9)))
        assert certificates.issued(false, liar.certificate)
        problem = Trust.of(kit(out, "h1") / "startup").problem(false, (liar.certificate,))
        assert problem == "is not signed by rootCA.pem"


# clocks


@pytest.mark.parametrize(
    ("begin", "end", "counts"),
    [(4, 900, True), (6, 900, False), (-900, -4, True), (-900, -6, False)],
)
def test_clocks_may_differ_by_five_minutes(out: Path, begin: int, end: int, counts: bool) -> None:
    h1, h2, minutes = kit(out, "h1"), kit(out, "h2"), 24 * 60
    days: Any = (begin / minutes, end / minutes)
    intruders.date(h2, intruders.Authority.of(out), days)
    h2_signs = CertificateIdentity.of_kit(h2).sign(TEXT)
    assert CertificateIdentity.of_kit(h1).verify("h2", TEXT, h2_signs) is counts
    if counts:
        assert len(check_kit(h2)) == 1  # it ends soon
    else:
        with pytest.raises(ConfigError, match=r"is valid from|expired on"):
            check_kit(h2)


def test_what_is_new_counts_on_a_clock_that_is_five_minutes_late(out: Path) -> None:
    """TLS itself allows nothing, so certificates and lists begin earlier than they are made."""
    now, paths = datetime.now(UTC), sorted(out.rglob("*.crt"))
    assert len(paths) == 5
    for path in (*paths, *out.rglob("rootCA.pem")):
        found = x509.load_pem_x509_certificate(path.read_bytes())
        assert found.not_valid_before_utc <= now - timedelta(minutes=5)
    root = Trust.of(kit(out, "h1") / "startup").roots[0]
    assert root.not_valid_after_utc - now > timedelta(9.9 * 365)


# inside NVFlare


class Manager:
    """As much of NVFlare's manager of connections as is asked."""

    def __init__(self) -> None:
        self.sfm_endpoints: dict[str, list[Any]] = {}
        self.let_in: list[Any] = []

    def get_connections(self, name: str) -> Any:
        return self.sfm_endpoints.get(name)

    def state_change(self, connection: Any) -> None:
        self.let_in.append(connection)


def connection(kit: Path) -> Any:
    shown = {"x509_pem_cert": [(kit / "startup/client.crt").read_bytes()]}
    found = SimpleNamespace(context=SimpleNamespace(auth_context=lambda: shown), open=True)
    found.state, found.close = ConnState.CONNECTED, lambda: setattr(found, "open", False)
    return found


def test_the_server_s_port_is_shut_to_a_revoked_kit_at_once(out: Path) -> None:
    server, manager = kit(out, "server"), Manager()
    filters: list[Any] = []
    core: Any = SimpleNamespace(
        communicator=SimpleNamespace(conn_manager=manager),
        add_incoming_filter=lambda channel, topic, judge: filters.append(judge),
    )
    doors = gate.Doors(server / "startup", core)
    there = {name: connection(kit(out, name)) for name in ("h1", "h2")}
    local = SimpleNamespace(state=ConnState.CONNECTED)  # a job's process, without a certificate
    for each in (*there.values(), local):
        manager.state_change(each)
    assert manager.let_in == [*there.values(), local]
    for name, each in there.items():
        manager.sfm_endpoints[name] = [SimpleNamespace(conn=each)]

    def judged(name: str) -> Any:
        message = Message({MessageHeaderKey.ORIGIN: name}, None)
        message.set_prop(MessagePropKey.ENDPOINT, SimpleNamespace(name=name))
        return filters[0](message)

    assert judged("h1") is judged("h2") is None
    take(server, revoked(out, "h2"))
    assert judged("h2").get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.UNAUTHENTICATED
    assert judged("h1") is None
    assert [each.open for each in there.values()] == [True, False]
    again = connection(kit(out, "h2"))
    manager.state_change(again)
    assert not again.open
    assert again not in manager.let_in
    take(server, revoked(out, "h1"))
    doors.look()  # it sends nothing
    assert not there["h1"].open


def test_server_and_site_give_each_other_what_they_lack(out: Path) -> None:
    server, site = (gate.Carrier(kit(out, name)) for name in ("server", "h1"))

    def passed(sender: Any, receiver: Any, name: str) -> bool:
        message = Message({}, None)
        sender.give(message, "server" if name == "h1" else "h1")
        receiver.hear(message, name)
        return bool(message.get_header(gate.SAID))

    def number(name: str) -> int:
        return Trust.of(kit(out, name) / "startup").number

    for holder in ("h1", "server"):
        take(kit(out, holder), revoked(out, "h2"))
        heartbeats = [
            (passed(site, server, "h1"), passed(server, site, "server")) for _ in range(3)
        ]
        assert number("h1") == number("server")
        assert heartbeats[-1] == (False, False)  # it is sent no more than needed
    assert number("h1") == 3
