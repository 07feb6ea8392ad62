"""A kit is renewed in place: the request, its signature, and the installation."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("nvflare")

import dishonest
import intruders
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.x509.oid import AttributeOID
from intruders import PROJECT, replace_root, revoke
from secure_net import SITES, network, random_updates

from fednotes.apps.deployment.nvflare import kit as kit_files
from fednotes.apps.deployment.nvflare import renewal
from fednotes.apps.deployment.nvflare.authority import open_authority
from fednotes.apps.deployment.nvflare.certificates import (
    CertificateIdentity,
    check_kit,
    find_stems,
    read_certificate,
    read_expiry_dates,
)
from fednotes.apps.deployment.nvflare.gate import require_admins_signature
from fednotes.apps.deployment.nvflare.renewal import install_renewal, request_renewal
from fednotes.apps.deployment.nvflare.trust import Trust, install_trust
from fednotes.core.errors import ConfigError, RefusedError


def signed(kits: dict[str, Path], requests: bytes) -> bytes:
    authority = open_authority(PROJECT, kits["server"].parent)
    answer = authority.sign_requests(requests, PROJECT.find_kit)
    authority.save()
    return answer


def tree(kit: Path) -> dict[Path, tuple[bytes, int]]:
    files = (path for path in kit.rglob("*") if path.is_file())
    return {p.relative_to(kit): (p.read_bytes(), p.stat().st_mode) for p in files}


@pytest.mark.parametrize("who", ["a", "admin", "server"])
def test_a_renewal_replaces_keys_and_certificates_only(
    kits: dict[str, Path], who: str
) -> None:
    """Only the request travels, and it holds no private key."""
    kit = kits[who]
    if who != "server":
        intruders.redate(kit, (-300, 20))
        assert len(check_kit(kit)) == 1
    before, old_certificates = (
        tree(kit),
        {stem: read_certificate(stem) for stem in find_stems(kit)},
    )
    requests = request_renewal(kit)
    assert request_renewal(kit).count(b"BEGIN CERTIFICATE REQUEST") == len(
        old_certificates
    )
    assert b"PRIVATE" not in requests
    asking = tree(kit)
    assert before.items() <= asking.items()
    assert {asking[path][1] & 0o777 for path in asking.keys() - before.keys()} == {
        0o600
    }
    answer = signed(kits, requests)
    assert b"PRIVATE" not in answer
    install_renewal(kit, answer)
    assert check_kit(kit) == []
    after = tree(kit)
    changed = {path for path in before if after[path][0] != before[path][0]}
    assert {path.suffix for path in changed} == {".key", ".crt"}
    assert len(changed) == 2 * len(old_certificates)
    assert {path: entry[1] for path, entry in after.items()} == {
        path: entry[1] for path, entry in before.items()
    }
    for stem, certificate in old_certificates.items():
        renewed = read_certificate(stem)
        assert renewed.subject == certificate.subject
        assert renewed.public_key() != certificate.public_key()
        names = x509.SubjectAlternativeName
        assert renewed.extensions.get_extension_for_class(names) == (
            certificate.extensions.get_extension_for_class(names)
        )
    assert min(read_expiry_dates(kit).values()) > certificate.not_valid_before_utc


def test_a_run_continues_with_a_renewed_kit(
    kits: dict[str, Path], tmp_path: Path
) -> None:
    """Its sums equal those of a run without the renewal, bit for bit."""
    sums = []
    for renewed in (False, True):
        identities = {site: CertificateIdentity.read(kits[site]) for site in SITES}
        folder = tmp_path / f"net{renewed}"
        net, engine, _, _ = network(folder, random_updates(2), identities=identities)
        engine.sum("give")
        if renewed:
            install_renewal(kits["a"], signed(kits, request_renewal(kits["a"])))
            identities["a"] = CertificateIdentity.read(kits["a"])
            net.hosts.pop("a")  # its process is started again
        total = engine.sum("give")
        assert total.sites == len(SITES)
        sums.append(total)
    assert all(
        (sums[0].tensors[n] == sums[1].tensors[n]).all() for n in sums[0].tensors
    )


def test_a_job_submitted_before_a_renewal_still_runs_after_it(
    kits: dict[str, Path], tmp_path: Path
) -> None:
    """The watch resubmits it with its first signature."""
    folder = kit_files.write_job_folder(
        tmp_path, {}, run="r1", sites=SITES, min_sites=3
    )
    dishonest.sign(folder / "app", kits["admin"])
    install_renewal(kits["admin"], signed(kits, request_renewal(kits["admin"])))
    require_admins_signature(folder / "app", kits["a"] / "startup/rootCA.pem")
    dishonest.sign(folder / "app", kits["admin"])
    require_admins_signature(folder / "app", kits["a"] / "startup/rootCA.pem")


def test_revoking_a_renewed_kit_revokes_both_of_its_certificates(
    kits: dict[str, Path],
) -> None:
    old_identity = CertificateIdentity.read(kits["a"])
    install_renewal(kits["a"], signed(kits, request_renewal(kits["a"])))
    new_identity, b = (
        CertificateIdentity.read(kits["a"]),
        CertificateIdentity.read(kits["b"]),
    )
    assert b.verify("a", b"x", old_identity.sign(b"x"))
    assert b.verify("a", b"x", new_identity.sign(b"x"))
    kits["a"].rename(kits["server"].with_name("away"))
    install_trust(kits["b"], revoke(kits, "a"))
    assert not b.verify("a", b"x", old_identity.sign(b"x"))
    assert not b.verify("a", b"x", new_identity.sign(b"x"))


def test_a_renewal_moves_a_kit_to_the_new_root(kits: dict[str, Path]) -> None:
    """The answer brings the root, and kits of the old root accept the new certificate."""
    a, b = kits["a"], kits["b"]
    replace_root(kits, 30)
    install_renewal(a, signed(kits, request_renewal(a)))
    assert len(Trust.read(a / "startup").roots) == 2
    assert check_kit(a) == []
    chain = x509.load_pem_x509_certificates((a / "startup/client.crt").read_bytes())
    known = Trust.read(b / "startup")
    assert str(known.find_problem(chain[0])) == "is not signed by rootCA.pem"
    assert known.find_problem(chain[0], chain[1:]) is None


# requests that are not signed


def asked_for(subject: Any, proof: bytes) -> bytes:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    builder = x509.CertificateSigningRequestBuilder(subject)
    builder = builder.add_attribute(AttributeOID.UNSTRUCTURED_NAME, proof)
    return builder.sign(key, hashes.SHA256()).public_bytes(intruders.PEM)


def proof_of(request_pem: bytes) -> bytes:
    request = x509.load_pem_x509_csr(request_pem)
    return request.attributes.get_attribute_for_oid(
        AttributeOID.UNSTRUCTURED_NAME
    ).value


def test_only_the_holder_of_a_valid_kit_gets_a_certificate(
    kits: dict[str, Path],
) -> None:
    good = request_renewal(kits["a"])
    subject = x509.load_pem_x509_csr(good).subject
    of_server = x509.load_pem_x509_csr(request_renewal(kits["server"])).subject
    expired = intruders.copy_kit(kits["b"], kits["b"].with_name("old"))
    late = request_renewal(expired)
    intruders.redate(expired, (-30, -1))
    stranger = intruders.copy_kit(kits["b"], kits["b"].with_name("stranger"))
    intruders.self_sign(stranger)
    wrong = {
        "another key": asked_for(subject, proof_of(good)),
        "another name": asked_for(of_server, proof_of(good)),
        "no proof": asked_for(subject, b"x"),
        "cut short": good[:-40],
        "no request": b"hello",
        "expired": request_renewal(expired),
        "a stranger's": request_renewal(stranger),
        "one good, one not": good + asked_for(of_server, proof_of(good)),
        "too long": good * 60,
    }
    assert wrong["expired"] != late
    for kind, request in wrong.items():
        with pytest.raises(RefusedError):
            pytest.fail(f"{kind}: {signed(kits, request)!r}")
    revoke(kits, "a")
    with pytest.raises(RefusedError, match="not signed by a currently valid kit"):
        signed(kits, good)


# answers that are not installed


def test_a_wrong_answer_leaves_the_kit_unchanged(kits: dict[str, Path]) -> None:
    a, b = kits["a"], kits["b"]
    with pytest.raises(ConfigError, match="has no pending request"):
        install_renewal(a, signed(kits, request_renewal(b)))
    answer = signed(kits, request_renewal(a))
    before = tree(a)
    for wrong in (
        signed(kits, request_renewal(b)),
        answer[:900],
        answer[-900:],
        b"",
        b"x" * 60_000,
    ):
        with pytest.raises(RefusedError):
            install_renewal(a, wrong)
        assert tree(a) == before
    install_trust(a, revoke(kits, "a"))
    with pytest.raises(RefusedError, match="its certificate was revoked on"):
        install_renewal(a, answer)


@pytest.mark.parametrize("when", range(1, 5))
def test_a_power_cut_during_the_installation_loses_nothing(
    kits: dict[str, Path], when: int
) -> None:
    """It comes before each of the server's four files; the next call finishes."""
    kit = kits["server"]
    answer = signed(kits, request_renewal(kit))
    cut = mock.Mock(wraps=renewal.replace_file)
    cut.side_effect = [mock.DEFAULT] * (when - 1) + [KeyboardInterrupt]
    with (
        mock.patch.object(renewal, "replace_file", cut),
        pytest.raises(KeyboardInterrupt),
    ):
        install_renewal(kit, answer)
    install_renewal(kit, answer)
    assert check_kit(kit) == []
    assert not (kit / "renewal").exists()
