"""What is said of a kit before it is used: its certificates, as `check_kit` judges them."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

import intruders

from fednotes.engines import provision
from fednotes.preflight import Check, preflight


@pytest.fixture(scope="module")
def kits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("kits")
    return provision.provision(intruders.project(intruders.free_port(), "h1", "h2"), out)


def of_certificates(kit: Path) -> list[Check]:
    return [check for check in preflight(kit) if check.what == "certificate"]


def test_a_good_kit_says_how_long(kits: dict[str, Path], tmp_path: Path) -> None:
    """The first end of all its certificates, as they were signed."""
    kit = intruders.copied(kits["h1"], tmp_path / "kit")
    intruders.date(kit, intruders.Authority.of(kits["server"].parent), (-1, 60))
    end = f"{datetime.now(UTC) + timedelta(60):%Y-%m-%d}"
    assert of_certificates(kit) == [Check("certificate", True, f"valid until {end}")]
    (found,) = of_certificates(kits["server"])
    assert found.ok


def test_a_kit_that_ends_soon_is_looked_at(kits: dict[str, Path], tmp_path: Path) -> None:
    kit = intruders.copied(kits["h1"], tmp_path / "kit")
    intruders.date(kit, intruders.Authority.of(kits["server"].parent), (-1, 20))
    (found,) = of_certificates(kit)
    assert found.ok is None
    assert "client.crt: the certificate expires on" in found.told


@pytest.mark.parametrize(
    ("who", "file", "said"),
    [
        ("h1", "startup/client.key", "of another key than the kit's"),
        ("h1", "startup/client.crt", "the certificate is of h2, the kit of h1"),
        ("server", "watch/startup/client.crt", "the certificate is of h2"),
    ],
)
def test_files_of_another_kit_are_wrong(
    kits: dict[str, Path], tmp_path: Path, who: str, file: str, said: str
) -> None:
    """A certificate that the authority signed, but for somebody else."""
    kit = intruders.copied(kits[who], tmp_path / "kit")
    shutil.copyfile(kits["h2"] / "startup" / Path(file).name, kit / file)
    (found,) = of_certificates(kit)
    assert found.ok is False
    assert said in found.told
    assert "ask for a new kit" in found.told
