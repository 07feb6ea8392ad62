"""What the tests of deployment share: the notes of three hospitals, and kits."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hospital_jobs import corpus


@pytest.fixture(scope="session", autouse=True)
def _keys_checked_once() -> Iterator[None]:
    """Check the primes of each RSA key once, which takes longer than most tests."""
    pytest.importorskip("cryptography")
    from fednotes.apps.deployment.nvflare import authority, certificates

    with pytest.MonkeyPatch.context() as patch:
        for module in (authority, certificates):
            load = functools.cache(module.load_pem_private_key)
            patch.setattr(module, "load_pem_private_key", load)
        yield


@pytest.fixture(scope="module")
def site_notes(
    few_sentences: None, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """Return the data of the three sites of `hospital_jobs`; tests only read it."""
    return corpus(tmp_path_factory.mktemp("notes") / "notes")


@pytest.fixture(scope="session")
def shared_kits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the kits of `intruders.PROJECT`; tests only read them."""
    pytest.importorskip("nvflare")
    from intruders import PROJECT

    from fednotes.apps.deployment.nvflare.authority import provision

    return provision(PROJECT, tmp_path_factory.mktemp("kits") / "kits")


@pytest.fixture
def kits(shared_kits: dict[str, Path], tmp_path: Path) -> dict[str, Path]:
    """Return a copy of the folder of `shared_kits`, for a test that changes kits."""
    from intruders import PROJECT, copy_kit

    from fednotes.apps.deployment.nvflare.authority import list_kit_folders

    return list_kit_folders(
        PROJECT, copy_kit(shared_kits["server"].parent, tmp_path / "kits")
    )
