"""Signatures by the kits' keys: OpenSSL checks what is signed, and false signers are refused."""

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
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)
from secure_net import SITES, network, random_updates

from fednotes.core.errors import ConfigError, TrainingError
from fednotes.engines import pipe
from fednotes.engines.nvflare import kit as kit_files
from fednotes.engines.nvflare import site as nvflare_site
from fednotes.engines.nvflare.authority import provision
from fednotes.engines.nvflare.certificates import CertificateIdentity
from fednotes.privacy.secure_sum.masks import joined

TEXT = b"\x00keys\xff" * 9


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("kits")
    return provision(intruders.project(18002, *SITES), out)


def key_of(kit: Path, stem: str) -> Any:
    return load_pem_private_key((kit / f"startup/{stem}.key").read_bytes(), None)


def test_a_signature_is_what_openssl_verifies(tmp_path: Path, kits: dict[str, Path]) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl here")
    signed = CertificateIdentity.of_kit(kits["a"]).sign(TEXT)
    length = int.from_bytes(signed[:4], "big")
    shown = x509.load_der_x509_certificate(signed[4 : 4 + length])
    kept = x509.load_pem_x509_certificate((kits["a"] / "startup/client.crt").read_bytes())
    assert shown == kept
    public = shown.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public").write_bytes(public)
    (tmp_path / "signature").write_bytes(signed[4 + length :])
    pss = ["-sigopt", "rsa_padding_mode:pss", "-sigopt", "rsa_pss_saltlen:digest"]
    for text, said in ((TEXT, "Verified OK"), (TEXT + b"!", "Verification failure")):
        (tmp_path / "text").write_bytes(joined("fednotes keys of a site", text))
        command = [openssl, "dgst", "-sha256", *pss, "-verify", "public", "-signature"]
        found = subprocess.run(
            [*command, "signature", "text"], cwd=tmp_path, capture_output=True, text=True
        )
        assert said in found.stdout + found.stderr


def test_sites_know_each_other_by_the_authority_alone(kits: dict[str, Path]) -> None:
    a, b = (CertificateIdentity.of_kit(kits[site]) for site in ("a", "b"))
    signed = a.sign(TEXT)
    assert b.verify("a", TEXT, signed)
    assert not b.verify("b", TEXT, signed)  # another's name
    assert not b.verify("a", TEXT + b"!", signed)
    wrong = (b"", b"\x00\x00", signed[:-1], signed + b"\x00", b"\xff" * 4 + signed[4:])
    for changed in (*wrong, signed[:60] + bytes([signed[60] ^ 1]) + signed[61:]):
        assert not b.verify("a", TEXT, changed)
    length = int.from_bytes(signed[:4], "big") + 4  # a's certificate, b's signature
    assert not b.verify("a", TEXT, signed[:length] + b.sign(TEXT)[-256:])


@pytest.mark.parametrize("false", ["other authority", "self-signed", "expired"])
def test_a_false_certificate_signs_nothing(
    tmp_path: Path, kits: dict[str, Path], false: str
) -> None:
    honest = CertificateIdentity.of_kit(kits["a"])
    if false == "other authority":
        kit = provision(intruders.project(18002, "b"), tmp_path / "other")["b"]
    else:
        kit = intruders.copied(kits["b"], tmp_path / "b")
        if false == "expired":
            intruders.date(kit, intruders.Authority.of(kits["server"].parent), (-30, -1))
        else:
            intruders.self_signed(kit)
    assert not honest.verify("b", TEXT, CertificateIdentity.of_kit(kit).sign(TEXT))


def test_what_else_the_authority_signed_is_no_site(kits: dict[str, Path]) -> None:
    """The server's certificate, and the admin's, are of other names than any site's."""
    honest = CertificateIdentity.of_kit(kits["a"])
    for folder, stem in ((kits["server"], "server"), (kits["admin"], "client")):
        own = CertificateIdentity.of_kit(kits["b"])
        shown = x509.load_pem_x509_certificate((folder / f"startup/{stem}.crt").read_bytes())
        signed = CertificateIdentity(shown, key_of(folder, stem), own.startup).sign(TEXT)
        assert not any(honest.verify(site, TEXT, signed) for site in SITES)
    for name in ("localhost", "ward"):  # of the server, and of the authority
        with pytest.raises(ConfigError, match=name):
            intruders.project(18002, "a", name)


def test_a_server_that_hands_out_keys_of_its_own_opens_nothing(
    tmp_path: Path, kits: dict[str, Path]
) -> None:
    """With each site's kit the sum is made; where b's keys are the server's, no site masks."""
    updates = random_updates(2)
    identities = {site: CertificateIdentity.of_kit(kits[site]) for site in SITES}
    _, engine, _, _ = network(tmp_path / "1", updates, identities=identities)
    total = engine.sum("give")
    plain = sum(u.weight * u.tensors["layer.weight"] for u in (updates[s][0] for s in SITES))
    assert (total.tensors["layer.weight"] - plain).abs().max() < 1e-4
    own = x509.load_pem_x509_certificate((kits["server"] / "startup/server.crt").read_bytes())
    server = CertificateIdentity(own, key_of(kits["server"], "server"), identities["a"].startup)
    _, engine, events, _ = network(tmp_path / "2", updates, identities={**identities, "b": server})
    with pytest.raises(TrainingError, match="nothing was opened"):
        engine.sum("give")
    assert any("the keys of site 'b' are not signed by it" in event.text for event in events)


def test_a_kit_without_its_key_is_named(tmp_path: Path, kits: dict[str, Path]) -> None:
    kit = intruders.copied(kits["a"], tmp_path / "a")
    (kit / "startup/client.key").write_text("no key")
    with pytest.raises(ConfigError, match="ask for a new kit"):
        CertificateIdentity.of_kit(kit)


def test_a_sites_process_on_the_network_has_its_kits_identity(
    tmp_path: Path, kits: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = intruders.copied(kits["a"], tmp_path / "a")
    job = kit_files.job_folder(tmp_path / "jobs", {}, run="r1", sites=SITES, min_sites=3)
    begun: list[pipe.Setup] = []
    monkeypatch.setattr(nvflare_site, "require_admins_signature", lambda app, root: None)
    monkeypatch.setattr(pipe, "load_main", lambda which: begun.append)
    workspace = SimpleNamespace(get_app_dir=lambda job_id: job / "app", get_root_dir=lambda: kit)
    context: Any = SimpleNamespace(
        get_workspace=lambda: workspace, get_job_id=lambda: "id", get_identity_name=lambda: "a"
    )
    nvflare_site.FednotesExecutor()._start(context)
    (setup,) = begun
    assert setup.identity is not None
    assert CertificateIdentity.of_kit(kits["b"]).verify("a", TEXT, setup.identity.sign(TEXT))
