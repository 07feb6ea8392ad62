"""The check of a kit's certificate before a start, and signatures by its key.

OpenSSL checks what is signed. The false certificates are each wrong in one way; TLS
itself judges them in `test_nvflare_refusals.py`.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("nvflare")

import intruders
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from intruders import PROJECT
from secure_net import SITES, network, random_updates

from fednotes.apps.deployment.nvflare import kit as kit_files
from fednotes.apps.deployment.nvflare import site as nvflare_site
from fednotes.apps.deployment.nvflare.authority import provision
from fednotes.apps.deployment.nvflare.certificates import (
    CertificateIdentity,
    check_kit,
    read_certificate,
    read_kit_key,
)
from fednotes.core.errors import ConfigError, TrainingError
from fednotes.engines import launch
from fednotes.privacy.secure_sum.crypto import join_parts

TEXT = b"\x00keys\xff" * 9


# a kit's certificate


def test_new_kits_pass_the_check(shared_kits: dict[str, Path]) -> None:
    assert [check_kit(kit) for kit in shared_kits.values()] == [[]] * 8


@pytest.mark.parametrize(
    ("kit", "days", "message"),
    [
        ("h1", (1, 9), "startup/client.crt: the certificate is not valid before"),
        ("server/watch", (-9, -1), "watch/startup/client.crt: the certificate expired"),
        ("admin", (-9, -1), "startup/client.crt: the certificate expired"),
    ],
)
def test_a_certificate_outside_its_validity_is_refused(
    kits: dict[str, Path], kit: str, days: tuple[int, int], message: str
) -> None:
    name, _, watch = kit.partition("/")
    intruders.redate(kits[name] / watch, days)
    with pytest.raises(ConfigError, match=message):
        check_kit(kits[name])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("outsider", "is not signed by rootCA.pem"),
        ("self-signed", "is not signed by rootCA.pem"),
        ("expired", "expired on"),
        ("swapped", "names h2, but the kit belongs to h1"),
    ],
)
def test_a_false_kit_is_refused_with_the_reason(
    kits: dict[str, Path], tmp_path: Path, wrong: str, message: str
) -> None:
    """NVFlare finds it out too, but in a thread whose error nobody prints, and waits
    for ever."""
    false = intruders.make_false_kits(tmp_path, kits["h1"], kits["h2"], PROJECT.port)
    with pytest.raises(
        ConfigError, match=f"the certificate {message}.*: ask for a new kit"
    ):
        check_kit(false[wrong])


@pytest.mark.parametrize("name", ["client.crt", "client.key", "rootCA.pem"])
def test_an_error_names_missing_or_damaged_files(
    kits: dict[str, Path], name: str
) -> None:
    path = kits["h1"] / "startup" / name
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(
        ConfigError, match=f"{name}: not a certificate or key .*: ask for a new kit"
    ):
        check_kit(kits["h1"])
    path.unlink()
    with pytest.raises(ConfigError, match=f"{name}: the kit is not complete"):
        check_kit(kits["h1"])


# signatures


def test_openssl_verifies_a_signature(
    tmp_path: Path, shared_kits: dict[str, Path]
) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here")
    signed = CertificateIdentity.read(shared_kits["a"]).sign(TEXT)
    end = 4 + int.from_bytes(signed[:4], "big")
    certificate = x509.load_der_x509_certificate(signed[4:end])
    assert certificate == read_certificate(shared_kits["a"] / "startup/client")
    public = certificate.public_key().public_bytes(
        Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
    )
    (tmp_path / "public").write_bytes(public)
    (tmp_path / "signature").write_bytes(signed[end:])
    pss = ["-sigopt", "rsa_padding_mode:pss", "-sigopt", "rsa_pss_saltlen:digest"]
    command = [
        openssl,
        "dgst",
        "-sha256",
        *pss,
        "-verify",
        "public",
        "-signature",
        "signature",
    ]
    for text, verdict in ((TEXT, "Verified OK"), (TEXT + b"!", "Verification failure")):
        (tmp_path / "text").write_bytes(join_parts("fednotes keys of a site", text))
        completed = subprocess.run(
            [*command, "text"], cwd=tmp_path, capture_output=True, text=True
        )
        assert verdict in completed.stdout + completed.stderr


def test_sites_trust_only_keys_of_the_authority(
    shared_kits: dict[str, Path],
) -> None:
    a, b = (CertificateIdentity.read(shared_kits[site]) for site in ("a", "b"))
    signed = a.sign(TEXT)
    assert b.verify("a", TEXT, signed)
    assert not b.verify("b", TEXT, signed)  # another's name
    assert not b.verify("a", TEXT + b"!", signed)
    wrong = (b"", b"\x00\x00", signed[:-1], signed + b"\x00", b"\xff" * 4 + signed[4:])
    for changed in (*wrong, signed[:60] + bytes([signed[60] ^ 1]) + signed[61:]):
        assert not b.verify("a", TEXT, changed)
    length = int.from_bytes(signed[:4], "big") + 4  # a's certificate, b's signature
    assert not b.verify("a", TEXT, signed[:length] + b.sign(TEXT)[-256:])


def test_signatures_by_a_false_certificate_are_refused(
    tmp_path: Path, kits: dict[str, Path]
) -> None:
    """Of another authority, and of none; expired ones are in `test_trust.py`."""
    outsider = provision(intruders.project(18002, "b"), tmp_path / "other")["b"]
    intruders.self_sign(kits["b"])
    for kit in (outsider, kits["b"]):
        signed = CertificateIdentity.read(kit).sign(TEXT)
        assert not CertificateIdentity.read(kits["a"]).verify("b", TEXT, signed)


def test_certificates_of_server_and_admin_cannot_sign_for_a_site(
    shared_kits: dict[str, Path],
) -> None:
    """The server's certificate, and the admin's, are of other names than any site's."""
    honest = CertificateIdentity.read(shared_kits["a"])
    for stem in (
        shared_kits["server"] / "startup/server",
        shared_kits["admin"] / "startup/client",
    ):
        signer = CertificateIdentity(
            read_certificate(stem), read_kit_key(stem), honest.startup
        )
        assert not any(honest.verify(site, TEXT, signer.sign(TEXT)) for site in SITES)


def test_a_server_that_replaces_keys_opens_no_sum(
    tmp_path: Path, shared_kits: dict[str, Path]
) -> None:
    """With each site's kit the sum is shared_kits; where b's keys are the server's, no site
    masks."""
    updates = random_updates(2)
    identities = {site: CertificateIdentity.read(shared_kits[site]) for site in SITES}
    _, engine, _, _ = network(tmp_path / "1", updates, identities=identities)
    total = engine.sum("give")
    plain = sum(
        u.weight * u.tensors["layer.weight"] for u in (updates[s][0] for s in SITES)
    )
    assert (total.tensors["layer.weight"] - plain).abs().max() < 1e-4
    stem = shared_kits["server"] / "startup/server"
    server = CertificateIdentity(
        read_certificate(stem), read_kit_key(stem), identities["a"].startup
    )
    _, engine, events, _ = network(
        tmp_path / "2", updates, identities={**identities, "b": server}
    )
    with pytest.raises(TrainingError, match="nothing was opened"):
        engine.sum("give")
    assert any(
        "the keys of site 'b' are not signed by it" in event.text for event in events
    )


def test_the_process_of_a_site_has_the_identity_of_its_kit(
    kits: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = kit_files.write_job_folder(
        tmp_path / "jobs", {}, run="r1", sites=SITES, min_sites=3
    )
    setups: list[launch.Setup] = []
    monkeypatch.setattr(
        nvflare_site, "require_admins_signature", lambda app, root: None
    )
    monkeypatch.setattr(launch, "load_main", lambda variable, default: setups.append)
    folders = {
        "get_app_dir": lambda job_id: job / "app",
        "get_root_dir": lambda: kits["a"],
    }
    context: Any = SimpleNamespace(
        get_workspace=lambda: SimpleNamespace(**folders),
        get_job_id=lambda: "id",
        get_identity_name=lambda: "a",
    )
    nvflare_site.FednotesExecutor()._start_host(context)
    (setup,) = setups
    assert setup.identity is not None
    assert CertificateIdentity.read(kits["b"]).verify(
        "a", TEXT, setup.identity.sign(TEXT)
    )
