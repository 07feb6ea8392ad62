"""A site's kit as the commands take it, and the commands."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from fednotes.apps.deployment.nvflare.kit import KIT_FILE
from fednotes.cli.app import app
from fednotes.core.errors import FednotesError


def site_kit(kit: Path) -> Path:
    """Make a folder a site's kit, of a network that nobody starts."""
    kit.mkdir(exist_ok=True)
    facts = {"name": kit.name, "role": "site", "project": "ward", "server": "localhost"}
    (kit / KIT_FILE).write_text(
        json.dumps({**facts, "port": 1, "person": "", "org": "x"})
    )
    return kit


def run_command(*words: object, typed: str = "") -> str:
    """Return a command's output; "error: " and the message if it ends with an error."""
    result = CliRunner().invoke(app, [str(word) for word in words], input=typed or None)
    if isinstance(result.exception, FednotesError):
        return f"error: {result.exception}"
    assert result.exit_code == 0, result.output
    return result.output


def run_site_command(*words: object, code: int = 0, typed: str = "") -> str:
    """Return the output of `fednotes site …`, or with a code its error."""
    output = run_command("site", *words, typed=typed)
    assert output.startswith("error: ") == bool(code), output
    return output.removeprefix("error: ")
