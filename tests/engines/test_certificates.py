"""A kit's certificate, looked at before a process starts with it; and names that begin alike.

The certificates are made here, each wrong in one way; TLS itself judges them in
`test_nvflare_refusals.py`.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("nvflare")

import intruders

from fednotes.core.errors import ConfigError
from fednotes.engines.nvflare import processes
from fednotes.engines.nvflare.authority import provision
from fednotes.engines.nvflare.certificates import check_kit


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("kits")
    return provision(intruders.project(18002, "h1", "h2"), out)


def dated(kits: dict[str, Path], to: Path, days: tuple[int, int], kit: str = "h1") -> Path:
    """A copy of a kit whose certificate the authority signed for other days."""
    copy = intruders.copied(kits[kit], to)
    own = copy / "watch" if kit == "server" else copy
    intruders.date(own, intruders.Authority.of(kits["server"].parent), days)
    return copy


def test_new_kits_pass(kits: dict[str, Path]) -> None:
    assert [check_kit(kit) for kit in kits.values()] == [[]] * 4


@pytest.mark.parametrize(
    ("kit", "days", "said"),
    [
        ("h1", (1, 9), "certificate is valid from .* on only"),
        ("h1", (-9, -1), "certificate expired"),
        ("server", (-9, -1), "watch/startup/client.crt: the certificate expired"),
        ("admin", (-9, -1), "certificate expired"),
    ],
)
def test_a_certificate_out_of_its_time_is_refused(
    tmp_path: Path, kits: dict[str, Path], kit: str, days: tuple[int, int], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        check_kit(dated(kits, tmp_path / "kit", days, kit))


@pytest.mark.parametrize(("left", "warned"), [(59, True), (61, False)])
def test_a_certificate_that_ends_soon_is_named(
    tmp_path: Path,
    kits: dict[str, Path],
    left: int,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kit = dated(kits, tmp_path / "kit", (-9, left))
    assert ["certificate expires on" in line for line in check_kit(kit)] == [True] * warned
    idle = processes.Status("h1", "site", None, (), kit)
    monkeypatch.setattr(processes, "status", lambda kit: idle)
    monkeypatch.setattr(
        processes.subprocess, "Popen", lambda *_, **__: SimpleNamespace(poll=lambda: 0)
    )
    with caplog.at_level(logging.WARNING):
        assert processes.start(kit) == idle
    assert ("certificate expires on" in caplog.text) is warned


@pytest.mark.parametrize(
    ("files", "source", "said"),
    [
        (("client.key",), "h2", "of another key"),
        (("client.crt", "client.key"), "h2", "certificate is of h2, the kit of h1"),
        (("client.crt", "client.key"), "admin", "certificate is of admin@fednotes.org"),
    ],
)
def test_another_kits_files_are_refused(
    tmp_path: Path, kits: dict[str, Path], files: tuple[str, ...], source: str, said: str
) -> None:
    kit = intruders.copied(kits["h1"], tmp_path / "kit")
    for name in files:
        shutil.copyfile(kits[source] / "startup" / name, kit / "startup" / name)
    with pytest.raises(ConfigError, match=said):
        check_kit(kit)


@pytest.mark.parametrize("name", ["client.crt", "client.key", "rootCA.pem"])
def test_files_that_are_missing_or_damaged_are_named(
    tmp_path: Path, kits: dict[str, Path], name: str
) -> None:
    kit = intruders.copied(kits["h1"], tmp_path / "kit")
    path = kit / "startup" / name
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ConfigError, match=f"{name}: no certificate or key"):
        check_kit(kit)
    path.unlink()
    with pytest.raises(ConfigError, match=f"{name}: the kit's certificate is not complete"):
        check_kit(kit)


@pytest.mark.parametrize(
    ("sites", "alike"),
    [
        (("h1", "h10"), True),
        (("h1", "h1-a"), True),
        (("h1", "h1face"), True),
        (("h10", "h1"), True),
        (("h1", "h1x"), False),
        (("h1", "h1A"), False),
        (("h1", "h1_0"), False),
        (("h01", "h10"), False),
    ],
)
def test_names_that_could_be_taken_for_one_another(sites: tuple[str, ...], alike: bool) -> None:
    if alike:
        with pytest.raises(ConfigError, match="such as h01 and h10"):
            intruders.project(8002, *sites)
    else:
        assert intruders.project(8002, *sites).sites == sites


def test_a_site_that_is_added_later_is_compared_with_those_before(tmp_path: Path) -> None:
    """Also where its kit was deleted, and the project file no longer names it."""
    provision(intruders.project(8002, "h1"), tmp_path)
    shutil.rmtree(tmp_path / "sites")
    with pytest.raises(ConfigError, match="'h1' and 'h10'"):
        provision(intruders.project(8002, "h10"), tmp_path)
    assert not (tmp_path / "sites").exists()
    assert "h2" in provision(intruders.project(8002, "h2"), tmp_path)


def test_a_dot_in_a_sites_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'a\.b': letters, digits, '_' and '-' only"):
        intruders.project(8002, "a.b")
