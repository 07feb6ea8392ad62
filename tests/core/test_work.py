"""Work is counted and reported to registered listeners."""

from __future__ import annotations

import pytest

from fednotes.core import work
from fednotes.core.work import count_items, reporting_to, working


class Recorder:
    """Records what a listener receives."""

    def __init__(self) -> None:
        self.events: list[tuple[object, ...]] = []

    def begin(self, name: str, total: int | None) -> None:
        self.events.append(("begin", name, total))

    def advance(self, done: int) -> None:
        self.events.append(("advance", done))

    def end(self) -> None:
        self.events.append(("end",))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """Return a listener that is told of every item."""
    monkeypatch.setattr(work, "INTERVAL", 0.0)
    return Recorder()


def test_counting_yields_the_same_items_with_and_without_a_listener(
    recorder: Recorder,
) -> None:
    assert list(count_items("abc", "letters")) == ["a", "b", "c"]
    assert recorder.events == []
    with reporting_to(recorder):
        assert list(count_items("ab", "letters", 2)) == ["a", "b"]
    assert recorder.events == [
        ("begin", "letters", 2),
        ("advance", 1),
        ("advance", 2),
        ("end",),
    ]


def test_work_ends_after_an_error_and_when_the_consumer_stops_reading(
    recorder: Recorder,
) -> None:
    def fail_at_once() -> None:
        with working("failing") as count:
            count.add(3)
            raise ValueError("no more")

    with reporting_to(recorder):
        with pytest.raises(ValueError, match="no more"):
            fail_at_once()
        stream = count_items("abc", "letters")
        next(stream)
        stream.close()  # type: ignore[attr-defined]
    assert recorder.events == [
        ("begin", "failing", None),
        ("advance", 3),
        ("end",),
        ("begin", "letters", None),
        ("end",),
    ]


def test_at_most_one_report_is_sent_per_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder()
    monkeypatch.setattr(work, "INTERVAL", 1000.0)
    with reporting_to(recorder):
        list(count_items(range(10), "numbers"))
    assert [event for event in recorder.events if event[0] == "advance"] == [
        ("advance", 1)
    ]
