"""A site's kit as the commands take it, and the commands."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from fednotes.cli.app import app
from fednotes.core.errors import FednotesError
from fednotes.engines.nvflare.kit import KIT_FILE


def site_kit(kit: Path) -> Path:
    """Make a folder a site's kit, of a network that nobody starts."""
    kit.mkdir(exist_ok=True)
    facts = {"name": kit.name, "role": "site", "project": "ward", "server": "localhost"}
    (kit / KIT_FILE).write_text(json.dumps({**facts, "port": 1, "person": "", "org": "x"}))
    return kit


def given(*words: object, code: int = 0, typed: str = "") -> str:
    """What `fednotes site …` prints; with a code, its error."""
    done = CliRunner().invoke(app, ["site", *map(str, words)], input=typed or None)
    if code:
        assert isinstance(done.exception, FednotesError), done.output
        return str(done.exception)
    assert done.exit_code == 0, done.output
    return done.output
