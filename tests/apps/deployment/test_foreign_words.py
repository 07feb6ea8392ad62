"""Foreign words on a screen and in logs, reports and messages are made harmless.

Each word tries to clear the screen, to begin a second line and to turn the line round.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from fednotes.apps.deployment.nvflare.processes import KIT_VARIABLE, KitLog, RateLimit
from fednotes.apps.deployment.problems import read_last_problem
from fednotes.apps.deployment.rules.policy import (
    Policy,
    PolicyRefusal,
    check_participation,
)
from fednotes.apps.deployment.site_agreement import Description, derive_config
from fednotes.cli import app, shared
from fednotes.core.errors import ConfigError, RefusedError
from fednotes.core.messages import Reply, WireError, decode_reply, encode_message
from fednotes.engines.host import explain_error
from fednotes.report.html import write_report

EVIL = "1\x1b[2J\n2026-01-01 00:00:00,000 ERROR fednotes.x: all is lost \u202e\u200b"
HIDDEN = ("\x1b", "\u202e", "\u200b")


def plain(text: str) -> bool:
    return "all is lost" in text and not any(character in text for character in HIDDEN)


def test_a_command_prints_foreign_words_on_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared.say(f"job {EVIL}")
    with pytest.raises(SystemExit):
        app.fail(EVIL)
    printed = capsys.readouterr()
    assert plain(printed.out)
    assert plain(printed.err)
    assert (printed.out.count("\n"), printed.err.count("\n")) == (1, 1)


def test_a_foreign_version_is_cleaned_in_an_error() -> None:
    described = {"h1": Description(version=EVIL + "9" * 10_000)}
    with pytest.raises(ConfigError, match="different versions") as refusal:
        derive_config(None, described)  # type: ignore[arg-type]
    assert not any(character in str(refusal.value) for character in HIDDEN)
    assert len(str(refusal.value)) < 400


def test_a_foreign_method_name_is_cleaned_in_a_refusal() -> None:
    with pytest.raises(PolicyRefusal) as refusal:
        check_participation(
            Policy(methods=("fedner",)), EVIL, 3, 3, rounds=1, secure=True
        )
    assert plain(str(refusal.value))
    assert "\n" not in str(refusal.value)


def test_a_log_shows_foreign_words_on_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one could pass for a line of ours. `site status` shows the line too."""
    monkeypatch.setenv(KIT_VARIABLE, str(tmp_path))
    log = logging.Logger("fednotes.engines.host")
    handler = KitLog("log", 1_000_000, 1)
    handler.setFormatter(
        logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    handler.addFilter(RateLimit())
    log.addHandler(handler)
    log.warning("site %s", EVIL)
    handler.close()
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert plain(line)
    problem = read_last_problem(tmp_path)
    assert problem is not None
    assert plain(problem.text)
    assert problem.text.startswith("site 1")


def test_a_report_escapes_foreign_words(tmp_path: Path) -> None:
    sites = {EVIL: {"federated": {"strict": {"f1": 0.5}}}}
    values = {"title": EVIL, "sites": sites, "notes": [EVIL], "config": {EVIL: EVIL}}
    (tmp_path / "summary.json").write_text(json.dumps(values))
    page = write_report(tmp_path).read_text()
    assert plain(page)
    assert "\\u202e" in page


def test_a_refusal_sent_to_the_server_is_cleaned() -> None:
    message = explain_error(RefusedError(EVIL), "h1")
    assert plain(message)
    assert (
        decode_reply(encode_message(Reply("j", 1, 1, "h1", refusal=message))).refusal
        == message
    )
    for forged in (f"no\x1b{message}", "no\u3164", "x" * 2001):
        with pytest.raises(WireError):
            decode_reply(encode_message(Reply("j", 1, 1, "h1", refusal=forged)))
