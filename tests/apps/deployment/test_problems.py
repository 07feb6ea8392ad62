"""The last problem of a kit, as its log records it and `site status` shows it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from fednotes.apps.deployment.nvflare.processes import KIT_VARIABLE, KitLog, RateLimit
from fednotes.apps.deployment.problems import (
    PROBLEM_FILE,
    LastProblem,
    mark_line,
    read_last_problem,
    record_problem,
)


@pytest.fixture
def kit_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KitLog]:
    """Return the log of the kit `tmp_path`, as `log_config.json` sets it up."""
    monkeypatch.setenv(KIT_VARIABLE, str(tmp_path))
    log = KitLog("fednotes.log", 1_000_000, 1)
    log.addFilter(RateLimit())
    yield log
    log.close()


def logger_of(name: str, log: KitLog) -> logging.Logger:
    logger = logging.Logger(name, logging.INFO)
    logger.addHandler(log)
    return logger


def text_of(kit: Path) -> str:
    """Return the text of the last problem; "" for none."""
    problem = read_last_problem(kit)
    return problem.text if problem else ""


def test_the_last_problem_is_the_newest_warning_of_fednotes(
    kit_log: KitLog, tmp_path: Path
) -> None:
    ours = logger_of("fednotes.apps.deployment.site", kit_log)
    assert read_last_problem(tmp_path) is None
    ours.info("round 1: train is done")
    logger_of("nvflare.x", kit_log).error("not ours")
    assert read_last_problem(tmp_path) is None
    ours.error("%s has no room", "the disk")
    ours.warning("a rule is broken")
    ours.info("round 2: train is done")
    problem = read_last_problem(tmp_path)
    assert problem is not None
    assert problem.text == "a rule is broken"
    assert problem.is_recent
    assert datetime.now() - problem.when < timedelta(minutes=1)
    lines = (tmp_path / "fednotes.log").read_text().splitlines()
    assert len(lines) == 5  # with the line of NVFlare


def test_a_log_line_can_be_marked_as_problem_or_state(
    kit_log: KitLog, tmp_path: Path
) -> None:
    ours = logger_of("fednotes.presence", kit_log)
    ours.info("refused give (7): no room", extra=mark_line("problem"))
    assert text_of(tmp_path) == "refused give (7): no room"
    ours.warning("the server has not answered", extra=mark_line("state"))
    assert text_of(tmp_path) == "refused give (7): no room"
    ours.info("takes part in run job-1", extra=mark_line("solution"))
    assert text_of(tmp_path) == ""
    ours.info("takes part in run job-2", extra=mark_line("solution"))
    assert text_of(tmp_path) == ""


def test_an_old_problem_is_shown_but_is_not_recent(tmp_path: Path) -> None:
    old = LastProblem(datetime.now() - timedelta(minutes=3), "no room")
    assert not old.is_recent


@pytest.mark.parametrize("text", ["", "[", '{"when": "now"}', '{"when": 1e17}'])
def test_a_damaged_record_shows_no_problem(text: str, tmp_path: Path) -> None:
    record_problem(tmp_path, "no room")
    assert json.loads((tmp_path / PROBLEM_FILE).read_text())["text"] == "no room"
    (tmp_path / PROBLEM_FILE).write_text(text)
    assert read_last_problem(tmp_path) is None


def test_a_problem_that_cannot_be_recorded_does_not_stop_a_process(
    kit_log: KitLog, tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("a file, where a folder should be")
    ours = logger_of("fednotes.presence", kit_log)
    ours.error("no room")
    ours.info("takes part in run job-1", extra=mark_line("solution"))
    assert read_last_problem(tmp_path) is None
