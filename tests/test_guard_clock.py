"""A site's rules while its clock jumps: what counts rounds is the ledger, not the time."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from guarded import TABLE, Guarded

from fednotes.core.update import Update
from fednotes.rules import guard as module
from fednotes.rules.guard import approvals_of
from fednotes.rules.ledger import FIRST, head_path, ledger_of
from fednotes.rules.policy import Policy

pytestmark = pytest.mark.usefixtures("instant_disk")
NOON = datetime(2030, 5, 6, 12, tzinfo=UTC)
RULES = Policy(secure_sum="off", share_scores=True, max_rounds=3)
NIGHT = replace(RULES, max_rounds=0, hours="11:00-13:00", timezone="UTC")


class Clock:
    """What the site takes for the time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.time = NOON
        patch.setattr(module, "now", lambda: self.time)

    def move(self, **by: float) -> None:
        self.time += timedelta(**by)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def updates() -> list[Update]:
    return [Update({"lstm.w": torch.full((4,), 1.0 + n)}, 2.0) for n in range(60)]


def served(site: Guarded, number: int, asked: int) -> int:
    """How many of so many requests are answered."""
    done, counted = 0, number - 1
    for at in range(number, number + asked):
        if site.ask("train", at, counted, round=0).update is not None:
            done, counted = done + 1, at
    return done


@pytest.mark.parametrize("years", [-20, 20])
def test_a_clock_that_jumps_gives_no_further_rounds(
    tmp_path: Path, clock: Clock, years: int
) -> None:
    """Before the approval's time stamp no round counted; nor may an approval of the future hide
    those after it."""
    site = Guarded(tmp_path, RULES, updates())
    assert served(site, 1, 2) == 2
    clock.move(days=365 * years)
    assert served(site, 3, 6) == 1
    site.restart()
    assert served(site, 4, 6) == 0
    site.approve()  # by the clock as it is now, before or after everything
    clock.move(days=-365 * years)
    assert served(site, 4, 9) == 3
    assert served(site, 13, 9) == 0


def test_an_approval_notes_where_the_ledger_ends(tmp_path: Path, clock: Clock) -> None:
    site = Guarded(tmp_path, RULES, updates())
    assert approvals_of(tmp_path).approved_after(TABLE) == FIRST
    served(site, 1, 2)
    site.approve()
    assert approvals_of(tmp_path).approved_after(TABLE) == ledger_of(tmp_path).head().hash
    assert approvals_of(tmp_path).approved_after({"name": "another"}) == ""


def test_where_the_approval_is_of_another_ledger_all_lines_count(
    tmp_path: Path, clock: Clock
) -> None:
    """A ledger was begun anew after the approval, or an earlier version noted no place."""
    site = Guarded(tmp_path, RULES, updates())
    served(site, 1, 2)
    site.approve()
    for path in (ledger_of(tmp_path).path, head_path(ledger_of(tmp_path).path)):
        path.rename(path.with_suffix(".evidence"))
    site.restart()
    assert served(site, 3, 9) == 3
    kept = approvals_of(tmp_path).path
    table: dict[str, Any] = json.loads(kept.read_text())
    for decision in table["decisions"]:
        del decision["ledger"]
    kept.write_text(json.dumps(table))
    site.restart()
    assert served(site, 12, 9) == 0


def test_hours_are_not_judged_by_a_clock_that_was_set_back(tmp_path: Path, clock: Clock) -> None:
    site = Guarded(tmp_path, NIGHT, updates())
    assert served(site, 1, 1) == 1
    clock.move(minutes=-4)  # as clocks are corrected
    assert served(site, 2, 1) == 1
    clock.move(hours=-20, minutes=30)  # inside the hours by its own word, the day before
    clock.move(hours=-4)
    refused = site.ask("train", 3, 2)
    assert (refused.update, refused.later) == (None, True)
    assert refused.refusal == "the clock of site 'b' was set back"
    assert "set the clock; where the ledger is wrong, approve the job again" in site.told[-1]
    site.restart()
    assert served(site, 3, 1) == 0
    site.policy = replace(NIGHT, hours="")
    assert served(site, 3, 1) == 1  # no rule asks for the time


def test_after_a_clock_that_was_ahead_a_new_approval_mends(tmp_path: Path, clock: Clock) -> None:
    site = Guarded(tmp_path, NIGHT, updates())
    clock.move(days=3650)
    assert served(site, 1, 1) == 1
    clock.move(days=-3650)
    assert served(site, 2, 1) == 0
    site.approve()
    assert served(site, 2, 1) == 1
