"""The project of a server and sites on loopback, and the end of their processes."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path

from places import Place

from fednotes.apps.deployment.nvflare import processes


def project(folder: Path, names: Iterable[str]) -> None:
    """Write project.toml of sites on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "project.toml").write_text(
        f'name = "ward"\nserver = "localhost"\nport = {port}\nsites = {list(names)}\n'
    )


def stopped(place: Place) -> None:
    """End everything that was started in a place."""
    for kit in (
        place.folder / "kits" / "server",
        *(place.folder / "kits" / "sites").glob("*"),
    ):
        processes.stop(kit, patience=5)
