"""Whose approval a run waits for and since when, at the server and in its status."""

from __future__ import annotations

from pathlib import Path

from fednotes.apps.deployment.status import describe_progress
from fednotes.apps.deployment.waiting import (
    APPROVALS_FILE,
    PendingApprovals,
    describe_waiting,
)


class Times:
    """A clock that a test sets."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_minutes_are_counted_from_the_first_report(tmp_path: Path) -> None:
    """Also after a restart of the server, which reads the times again."""
    clock = Times()
    pending = PendingApprovals(
        tmp_path / APPROVALS_FILE, ["reports", "discharge"], clock
    )
    pending.add("discharge")
    clock.now += 12 * 60
    pending.add("discharge")
    assert pending.text == "waiting for the approval of: discharge (12 min)"
    again = PendingApprovals(tmp_path / APPROVALS_FILE, ["reports", "discharge"], clock)
    assert again.text == pending.text
    clock.now += 50 * 60
    assert again.text == "waiting for the approval of: discharge (1 h 02 min)"
    again.remove("discharge")
    assert again.text == ""
    assert PendingApprovals(tmp_path / APPROVALS_FILE, ["discharge"], clock).text == ""


def test_a_site_outside_the_run_is_ignored(tmp_path: Path) -> None:
    pending = PendingApprovals(tmp_path / APPROVALS_FILE, ["reports"], Times())
    pending.add("somebody else")
    assert pending.text == ""
    (tmp_path / APPROVALS_FILE).write_text('{"somebody else": 1.0, "reports": "soon"}')
    assert PendingApprovals(tmp_path / APPROVALS_FILE, ["reports"], Times()).text == ""


def test_the_list_is_published_when_it_changes_and_every_five_minutes(
    tmp_path: Path,
) -> None:
    clock = Times()
    pending = PendingApprovals(tmp_path / APPROVALS_FILE, ["a", "b"], clock)
    assert pending.take_news() is None
    pending.add("b")
    line = pending.take_news()
    assert line is not None
    assert line["since"] == {"b": 1_000_000.0}
    clock.now += 299
    assert pending.take_news() is None
    clock.now += 1
    line = pending.take_news()
    assert line is not None
    assert line["text"] == "waiting for the approval of: b (5 min)"
    pending.remove("b")
    line = pending.take_news()
    assert line is not None
    assert (line["since"], line["text"]) == ({}, "all approvals have arrived")
    assert pending.take_news() is None


def test_the_status_of_a_server_counts_minutes_up_to_now() -> None:
    """The line was published when nobody had waited long; the times in it are absolute."""
    published = {"kind": "approvals", "since": {"discharge": 0.0}, "text": "waiting …"}
    silent = {
        "kind": "event",
        "site": "discharge",
        "text": "site 'discharge' has not approved",
    }
    progress = describe_progress({"lines": [silent, published], "sites": ["reports"]})
    begin, waiting = progress.split("; ")
    assert begin == "before round 1, with reports"
    assert waiting.startswith("waiting for the approval of: discharge (")
    assert int(waiting.split("(")[1].split(" h")[0]) > 480_000  # hours since 1970
    over = {"kind": "approvals", "since": {}, "text": "all approvals have arrived"}
    progress = describe_progress({"lines": [published, over], "sites": ["reports"]})
    assert progress == "before round 1, with reports"


def test_short_waiting_times_are_shown_as_less_than_a_minute() -> None:
    assert describe_waiting({"a": 10.0, "b": 0.0}, 69.0) == (
        "waiting for the approval of: a (less than 1 min), b (1 min)"
    )
