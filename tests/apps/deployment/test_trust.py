"""What a kit trusts: lists of revoked kits, a replaced root, and clock differences.

OpenSSL verifies the lists where it is installed. What must be refused is made here.
"""

from __future__ import annotations

import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

import dishonest
import intruders
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import load_pem_x509_certificate as loaded
from intruders import PROJECT, replace_root, revoke, trust_list_of
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessagePropKey, ReturnCode
from nvflare.fuel.f3.connection import ConnState
from nvflare.fuel.f3.message import Message

from fednotes.apps.deployment.nvflare import authority, certificates, gate, trust
from fednotes.apps.deployment.nvflare import kit as kit_files
from fednotes.apps.deployment.nvflare.authority import open_authority, provision
from fednotes.apps.deployment.nvflare.certificates import (
    CertificateIdentity,
    check_kit,
    find_withdrawal_of_peer,
    read_certificate,
    read_kit_key,
)
from fednotes.apps.deployment.nvflare.gate import require_admins_signature
from fednotes.apps.deployment.nvflare.trust import (
    Trust,
    drop_expired_roots,
    install_trust,
)
from fednotes.core.errors import BusyError, ConfigError, RefusedError

Kits = dict[str, Path]
TEXT = b"keys"


def trusted(kit: Path) -> Trust:
    return Trust.read(kit / "startup")


def believes(
    verifying: Path | CertificateIdentity, signing: Path, name: str = "h2"
) -> bool:
    """Return whether one site accepts the other's signature.

    one: a kit, or the identity that a running job holds.
    """
    verifier = (
        CertificateIdentity.read(verifying)
        if isinstance(verifying, Path)
        else verifying
    )
    return verifier.verify(name, TEXT, CertificateIdentity.read(signing).sign(TEXT))


def days_later(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    """Set the clock ahead for all participants."""

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + timedelta(days)

    for module in (authority, certificates, trust):
        monkeypatch.setattr(module, "datetime", Later)


# a revoked kit


def test_openssl_verifies_the_list_of_revoked_kits(kits: Kits, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here")
    (tmp_path / "list.pem").write_bytes(revoke(kits, "h2"))
    root = str(kits["h1"] / "startup/rootCA.pem")

    def checked(*words: object) -> subprocess.CompletedProcess[str]:
        command = [openssl, *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)

    completed = checked("crl", "-in", "list.pem", "-CAfile", root, "-noout", "-text")
    assert "verify OK" in completed.stdout + completed.stderr
    assert (
        f"{read_certificate(kits['h2'] / 'startup/client').serial_number:X}"
        in completed.stdout
    )
    chain = ("-crl_check", "-CRLfile", "list.pem", "-CAfile", root)
    for name, refused in (("h1", False), ("h2", True)):
        verification = checked("verify", *chain, kits[name] / "startup/client.crt")
        assert (verification.returncode != 0) is refused


def test_signatures_of_a_revoked_site_are_refused_at_once(kits: Kits) -> None:
    """The identity that a running job holds knows it with the next signature."""
    h1 = CertificateIdentity.read(kits["h1"])
    assert believes(h1, kits["h2"])
    assert install_trust(kits["h1"], revoke(kits, "h2"))
    assert not believes(h1, kits["h2"])
    assert believes(h1, kits["h1"], "h1")
    assert check_kit(kits["h1"]) == []


def test_a_reissued_kit_replaces_the_lost_one(kits: Kits, tmp_path: Path) -> None:
    """The lost kit is revoked, and the new one is accepted."""
    lost = kits["h2"].rename(tmp_path / "lost")
    again = provision(PROJECT, kits["server"].parent, again=["h2"])["h2"]
    assert install_trust(kits["h1"], trust_list_of(kits))
    assert not believes(kits["h1"], lost)
    assert believes(kits["h1"], again)
    assert check_kit(again) == []
    install_trust(lost, trust_list_of(kits))
    with pytest.raises(
        ConfigError, match=r"client.crt: the certificate was revoked on \d{4}-"
    ):
        check_kit(lost)


def test_a_revocation_is_not_lost_to_a_command_that_waits_for_the_passphrase(
    kits: Kits,
) -> None:
    out = kits["server"].parent
    locked_authority = open_authority(PROJECT, out, lambda _: b"secret")
    locked_authority.encrypt_key()
    locked_authority.save()

    def ask(_purpose: str) -> bytes:
        """Revoke another kit before answering, as a person at another terminal."""
        with pytest.raises(BusyError, match="in use by process"):
            provision(PROJECT, out, revoke=["h2"], ask_passphrase=lambda _: b"secret")
        return b"secret"

    provision(PROJECT, out, revoke=["h1"], ask_passphrase=ask)
    provision(PROJECT, out, revoke=["h2"], ask_passphrase=lambda _: b"secret")

    trust_list = Trust.parse((out / "trust.pem").read_bytes())
    for site in ("h1", "h2"):
        certificate = read_certificate(kits[site] / "startup" / "client")
        assert trust_list.find_withdrawal(certificate) is not None


def test_a_revocation_is_not_lost_while_the_clock_runs_ahead(
    kits: Kits, monkeypatch: pytest.MonkeyPatch
) -> None:
    revoke(kits, "h1")
    with monkeypatch.context() as clock:
        days_later(clock, 400)
        revoke(kits, "h2")
    revoke(kits, "admin")

    listed = Trust.parse(trust_list_of(kits))
    for name in ("h1", "h2", "admin"):
        certificate = read_certificate(kits[name] / "startup" / "client")
        assert listed.find_withdrawal(certificate) is not None


def test_expired_certificates_leave_a_list_that_has_no_room_for_them(
    kits: Kits, monkeypatch: pytest.MonkeyPatch
) -> None:
    revoke(kits, "h1")
    before = trust_list_of(kits)
    monkeypatch.setattr(authority, "MAX_BYTES", len(before))
    with pytest.raises(ConfigError, match="more kits are revoked than a trust list"):
        revoke(kits, "h2")
    assert trust_list_of(kits) == before

    days_later(monkeypatch, 400)
    listed = Trust.parse(revoke(kits, "h2"))
    (entry,) = listed.revocations or ()
    certificate = read_certificate(kits["h2"] / "startup" / "client")
    assert entry.serial_number == certificate.serial_number


def test_revoking_a_kit_does_not_revoke_the_admin_of_its_jobs(
    kits: Kits, tmp_path: Path
) -> None:
    """NVFlare's folder of a job in the revoked kit holds the admin's certificate.

    A job of an admin who is revoked is refused.
    """
    root, app = kits["h1"] / "startup/rootCA.pem", tmp_path / "r1" / "app"
    kit_files.write_job_folder(tmp_path, {}, run="r1", sites=["h1", "h2"], min_sites=2)
    dishonest.sign(app, kits["admin"])
    for name in ("h2", "server"):
        shutil.copytree(
            app, kits[name] / "11fc898f-1fc4-4b3c-9533-b5b1d56a0f0c" / "app"
        )
        assert len(list(kits[name].rglob("*.crt"))) > len(
            certificates.find_stems(kits[name])
        )
    install_trust(kits["h1"], revoke(kits, "h2", "server"))
    listed = {entry.serial_number for entry in trusted(kits["h1"]).revocations or ()}
    ours = [
        stem
        for name in ("h2", "server")
        for stem in certificates.find_stems(kits[name])
    ]
    assert {read_certificate(stem).serial_number for stem in ours} <= listed
    assert (
        read_certificate(kits["admin"] / "startup/client").serial_number not in listed
    )
    require_admins_signature(app, root)
    install_trust(kits["h1"], revoke(kits, "admin"))
    with pytest.raises(RefusedError, match="signature is not valid"):
        require_admins_signature(app, root)


def test_the_certificate_of_a_revoked_server_is_refused(kits: Kits) -> None:
    """`preflight` checks it so. Both certificates of the server are revoked."""
    h1, server = kits["h1"], kits["server"]
    certificate = read_certificate(server / "startup/server").public_bytes(Encoding.DER)
    assert find_withdrawal_of_peer(h1, certificate) is None
    list_of_it = revoke(kits, "server")
    install_trust(h1, list_of_it)
    assert "was revoked on" in str(find_withdrawal_of_peer(h1, certificate))
    watch = read_certificate(server / "watch/startup/client")
    assert "was revoked on" in str(trusted(h1).find_problem(watch))
    assert install_trust(server, list_of_it)
    assert trusted(server / "watch").number == trusted(server).number == 2


# which trust lists are accepted


def test_an_older_list_does_not_undo_a_newer_one(kits: Kits) -> None:
    h1 = kits["h1"]
    first, second = revoke(kits, "h2"), revoke(kits, "admin")
    assert install_trust(h1, second)
    assert not install_trust(h1, second)
    before = (h1 / "startup/trust.pem").read_bytes()
    with pytest.raises(
        RefusedError,
        match="its number, 2, is not higher than 3, the number of this kit's list",
    ):
        install_trust(h1, first)
    assert (h1 / "startup/trust.pem").read_bytes() == before
    assert (
        len(list(trusted(h1).revocations or ())) == 2
    )  # the newer has what the older had


def forged(kits: Kits) -> bytes:
    """Return a trust list with the true root and a high number, signed by a site."""
    genuine, now = Trust.parse(trust_list_of(kits)), datetime.now(UTC)
    issuer: Any = genuine.roots[0].subject
    builder = x509.CertificateRevocationListBuilder(issuer, now, now + timedelta(9))
    builder = builder.add_extension(x509.CRLNumber(99), critical=False)
    listed = builder.sign(read_kit_key(kits["h2"] / "startup/client"), hashes.SHA256())
    return Trust(genuine.roots, (), listed).encode()


def test_of_two_lists_that_arrive_at_once_the_newer_one_stays(
    kits: Kits, monkeypatch: pytest.MonkeyPatch
) -> None:
    h1 = kits["h1"]
    first, second = revoke(kits, "h2"), revoke(kits, "admin")
    newer = Thread(target=lambda: install_trust(h1, second))
    require_signed = trust._require_signed

    def check_slowly(*lists: Trust) -> Any:
        """Let the newer list arrive once the older one has been compared."""
        if newer.ident is None:
            newer.start()
            newer.join(timeout=1)
        return require_signed(*lists)

    monkeypatch.setattr(trust, "_require_signed", check_slowly)
    install_trust(h1, first)
    newer.join()
    assert trusted(h1).number == Trust.parse(second).number


@pytest.mark.parametrize("name", ["server", "h1"])
def test_a_kit_starts_after_a_trust_list_was_installed(kits: Kits, name: str) -> None:
    """No file is left where NVFlare loads code, in which a kit has only known files."""
    kit = kits[name]
    install_trust(kit, revoke(kits, "h2"))
    kit_files.restore_kit_files(kit, kit_files.read_kit(kit))


def test_a_trust_list_not_signed_by_the_authority_is_refused(
    kits: Kits, tmp_path: Path
) -> None:
    h1, genuine = kits["h1"], revoke(kits, "h2")
    foreign_list = trust_list_of(provision(PROJECT, tmp_path / "other"))
    own_certificate = (kits["h2"] / "startup/client.crt").read_bytes()
    cut = [genuine[: len(genuine) * part // 9] for part in range(9)]
    before = (h1 / "startup/trust.pem").read_bytes()
    for false in (
        forged(kits),
        foreign_list,
        foreign_list + genuine,
        own_certificate + genuine,
        b"x" * 60_000,
        *cut,
    ):
        with pytest.raises(RefusedError):
            install_trust(h1, false)
    with pytest.raises(RefusedError, match="bytes are too many"):
        install_trust(h1, genuine + b"\n" * trust.MAX_BYTES)
    assert (h1 / "startup/trust.pem").read_bytes() == before
    assert install_trust(h1, genuine)


def test_a_kit_of_an_earlier_version_accepts_its_first_list(kits: Kits) -> None:
    (kits["h1"] / "startup/trust.pem").unlink()
    assert believes(kits["h1"], kits["h2"])
    assert install_trust(kits["h1"], revoke(kits, "h2"))


# two roots


def test_two_roots_overlap_and_the_old_one_ends(
    kits: Kits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """h1 is of the old root and knows the new one; h3 is of the new root."""
    h1, h2, out = kits["h1"], kits["h2"], kits["server"].parent
    new_root = replace_root(kits, 80)
    with pytest.raises(ConfigError, match="is being replaced until"):
        open_authority(PROJECT, out).replace_root(overlap=80)
    h3 = provision(intruders.project(PROJECT.port, *PROJECT.sites, "h3"), out)["h3"]
    assert not believes(h1, h3, "h3")  # before it knows the new root
    assert install_trust(h1, new_root)
    of_old, of_new = CertificateIdentity.read(h1), CertificateIdentity.read(h3)
    assert believes(of_old, h3, "h3")
    assert believes(of_old, h2)
    assert believes(of_new, h2)
    assert check_kit(h1) == check_kit(h3) == []
    days_later(monkeypatch, 21)
    assert ["client.crt: the certificate expires on" in w for w in check_kit(h1)] == [
        True
    ]
    assert check_kit(h3) == []
    days_later(monkeypatch, 81)
    assert believes(of_old, h3, "h3")
    assert not believes(of_old, h2)
    assert not believes(of_new, h2)
    with pytest.raises(
        ConfigError, match="was signed by a replaced root, which was valid until"
    ):
        check_kit(h1)
    drop_expired_roots(h3)
    assert len(trusted(h3).roots) == 1
    assert not believes(of_new, h2)
    assert believes(of_new, h3, "h3")


@pytest.mark.slow
def test_only_the_old_root_can_introduce_a_new_one(kits: Kits, tmp_path: Path) -> None:
    """Lists of another authority with the same name are refused.

    They have no bridge, a bridge that a site's key signed, or the true bridge to
    another key. A list of the old root is refused after it was replaced.
    """
    h1, strange = kits["h1"], provision(PROJECT, tmp_path / "other")
    for _ in range(9):  # its number is newer
        revoke(strange, "h2")
    false = open_authority(PROJECT, tmp_path / "other")
    (root,) = false.list_valid_roots()
    site = read_kit_key(kits["h2"] / "startup/client")
    bridge = loaded(intruders.reissue(root, site, root, false.load_key(), (-1, 30)))
    old_authority = {
        "server": intruders.copy_kit(kits["server"].parent, tmp_path / "stolen")
        / "server"
    }
    genuine = Trust.parse(replace_root(kits, 30))
    for bridges in ((), (bridge,), genuine.bridges):
        with pytest.raises(RefusedError, match="not signed by the authority"):
            install_trust(
                h1,
                Trust(
                    false.trust_list.roots, bridges, false.trust_list.revocations
                ).encode(),
            )
    install_trust(h1, trust_list_of(kits))
    for _ in range(3):
        late = revoke(old_authority, "h2")
    with pytest.raises(
        RefusedError, match="signed by a root certificate that was replaced"
    ):
        install_trust(h1, late)


def test_certificates_signed_by_a_site_or_a_stranger_are_refused(
    kits: Kits, tmp_path: Path
) -> None:
    """They are refused also if the signer's own certificate is shown with them."""
    provision(PROJECT, tmp_path / "other")
    own_certificate, stranger = (
        kits["h2"] / "startup/client",
        open_authority(PROJECT, tmp_path / "other"),
    )
    victim, key = (
        read_certificate(kits["server"] / "startup/server"),
        read_kit_key(own_certificate),
    )
    for liar, signer in (
        (read_certificate(own_certificate), key),
        (stranger.root, stranger.load_key()),
    ):
        false = loaded(intruders.reissue(liar, signer, victim, key, (-1, 9)))
        assert trust.is_issued_by(false, liar)
        problem = trusted(kits["h1"]).find_problem(false, (liar,))
        assert str(problem) == "is not signed by rootCA.pem"


# clocks


@pytest.mark.parametrize(
    ("begin", "end", "problem"),
    [
        (4, 900, ""),
        (6, 900, "is not valid before"),
        (-900, -4, ""),
        (-900, -6, "expired on"),
    ],
)
def test_clocks_may_differ_by_five_minutes(
    kits: Kits,
    begin: int,
    end: int,
    problem: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log of the site that refuses another's keys suspects its clock."""
    day = 24 * 60
    intruders.redate(kits["h2"], (begin / day, end / day))
    assert believes(kits["h1"], kits["h2"]) is (problem == "")
    assert ("check that this machine's clock is right" in caplog.text) is (
        problem != ""
    )
    if problem:
        assert f"the certificate shown for site 'h2' {problem}" in caplog.text
        with pytest.raises(ConfigError, match=problem):
            check_kit(kits["h2"])
    else:
        assert len(check_kit(kits["h2"])) == 1  # it ends soon


def test_new_certificates_are_valid_on_a_clock_that_is_five_minutes_slow(
    shared_kits: Kits,
) -> None:
    """TLS tolerates no difference, so certificates and lists begin in the past."""
    now = datetime.now(UTC)
    out = shared_kits["server"].parent
    paths = [*out.rglob("*.crt"), *out.rglob("rootCA.pem")]
    assert len(paths) == 2 * (len(shared_kits) + 1)
    for path in paths:
        certificate = loaded(path.read_bytes())
        assert certificate.not_valid_before_utc <= now - timedelta(minutes=5)
    (root,) = trusted(shared_kits["h1"]).roots
    assert root.not_valid_after_utc - now > timedelta(9.9 * 365)


# inside NVFlare


def open_connection(kit: Path) -> Any:
    """Return as much of a connection as NVFlare's manager has, with a kit's certificate."""
    auth_context = {"x509_pem_cert": [(kit / "startup/client.crt").read_bytes()]}
    connection = SimpleNamespace(
        context=SimpleNamespace(auth_context=lambda: auth_context),
        state=ConnState.CONNECTED,
        is_open=True,
    )
    connection.close = lambda: setattr(connection, "is_open", False)
    return connection


def test_the_server_closes_connections_of_a_revoked_kit_at_once(kits: Kits) -> None:
    server = kits["server"]
    accepted: list[Any] = []
    filters: list[Any] = []
    endpoints: dict[str, list[Any]] = {}
    # as much of NVFlare's manager of connections as is needed
    manager = SimpleNamespace(
        sfm_endpoints=endpoints,
        get_connections=endpoints.get,
        state_change=accepted.append,
    )
    core: Any = SimpleNamespace(
        communicator=SimpleNamespace(conn_manager=manager),
        add_incoming_filter=lambda channel, topic, judge: filters.append(judge),
    )
    connections = gate.Connections(server / "startup", core)
    by_site = {name: open_connection(kits[name]) for name in ("h1", "h2")}
    # a job's process, without a certificate
    local = SimpleNamespace(state=ConnState.CONNECTED)
    for each in (*by_site.values(), local):
        manager.state_change(each)
    assert accepted == [*by_site.values(), local]
    for name, each in by_site.items():
        endpoints[name] = [SimpleNamespace(conn=each)]

    def judge(name: str) -> Any:
        message = Message({MessageHeaderKey.ORIGIN: name}, None)
        message.set_prop(MessagePropKey.ENDPOINT, SimpleNamespace(name=name))
        return filters[0](message)

    assert judge("h1") is judge("h2") is None
    install_trust(server, revoke(kits, "h2"))
    refusal = judge("h2")
    assert (
        refusal.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.UNAUTHENTICATED
    )
    assert judge("h1") is None
    assert [each.is_open for each in by_site.values()] == [True, False]
    later = open_connection(kits["h2"])
    manager.state_change(later)
    assert not later.is_open
    assert later not in accepted
    install_trust(server, revoke(kits, "h1"))
    connections.close_withdrawn()  # h1 sends nothing
    assert not by_site["h1"].is_open


def test_server_and_site_exchange_the_newest_list(kits: Kits) -> None:
    server, site = (gate.TrustCourier(kits[name]) for name in ("server", "h1"))

    def passed(sender: Any, receiver: Any, name: str) -> bool:
        message = Message({}, None)
        sender.attach(message, "server" if name == "h1" else "h1")
        receiver.receive(message, name)
        return bool(message.get_header(gate.TRUST_HEADER))

    for holder in ("h1", "server"):
        install_trust(kits[holder], revoke(kits, "h2"))
        beats = [
            (passed(site, server, "h1"), passed(server, site, "server"))
            for _ in range(3)
        ]
        assert trusted(kits["h1"]).number == trusted(kits["server"]).number
        assert beats[-1] == (False, False)  # it is sent no more than needed
    assert trusted(kits["h1"]).number == 3
