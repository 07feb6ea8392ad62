"""Run the tutorial between real machines: kits, approvals, kills, a model."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("nvflare")
pytest.importorskip("transformers")

from places import Place
from shell_pages import ROOT, run_page
from ward_places import stopped

pytestmark = [pytest.mark.slow, pytest.mark.network]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    yield Place(tmp_path)
    stopped(Place(tmp_path))


def test_the_tutorial_between_machines_works(place: Place) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    page = ROOT / "docs/tutorials/machines.md"
    output = run_page(
        page, place.folder, replaced={"port = 8002": f"port = {port}"}, timeout=800
    )
    assert output.count("approved: job") == 3
    assert "'posts' is back: the run pauses when the other sites have" in output
    assert output.count("resumes from") == 2  # after the site, and after the server
    assert "done: 10 rounds" in output
    assert '"label": "Drug"' in output
    assert "unbroken" in output
