"""Who hears of whom: a clock that is moved by hand, and the file that a person's command reads."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

pytest.importorskip("nvflare")

from fednotes.engines.nvflare.presence import Contact, SignsOfLife, place_of
from fednotes.engines.nvflare.processes import Known, connected, contact_of


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def test_a_site_knows_since_when_the_server_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    contact = Contact(tmp_path, clock, Known(7))
    contact.look()
    assert contact_of(tmp_path, 7) == Known(7)
    assert not connected(contact_of(tmp_path, 7), clock.time)
    for _ in range(10):
        contact.heard()
        contact.look()
        clock.time += 5
    assert contact_of(tmp_path, 7) == Known(7, 1000.0, 1045.0)
    assert connected(contact_of(tmp_path, 7), clock.time)
    assert contact_of(tmp_path, 8) is None  # of a process that is gone
    for _ in range(10):
        clock.time += 5
        contact.look()
    assert not connected(contact_of(tmp_path, 7), clock.time)
    contact.heard()
    assert contact_of(tmp_path, 7) == Known(7, 1100.0, 1100.0)
    assert [record.getMessage() for record in caplog.records] == [
        "connected to the server",
        "the server has not answered for 25 s; trying on",
        "connected to the server",
    ]


def test_a_refusal_is_kept(tmp_path: Path) -> None:
    contact = Contact(tmp_path, Clock(), Known(7))
    contact.heard()
    contact.refused("a second one")
    assert contact_of(tmp_path, 7) == Known(7, 0.0, 0.0, "a second one")


def test_a_damaged_file_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "contact.json").write_text("[")
    assert contact_of(tmp_path, 7) is None


def test_a_second_process_is_one_of_another_place(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = Clock()
    members = SignsOfLife(clock)
    members.alive("h1", "here")
    clock.time += 19
    assert not members.elsewhere("h1", "here")  # started again where it was
    assert members.elsewhere("h1", "there")
    assert not members.elsewhere("h2", "there")
    clock.time += 2
    assert not members.elsewhere("h1", "there")  # the first is gone
    members.look()
    members.look()
    members.alive("h1", "there")
    members.left("h1")
    assert not members.elsewhere("h1", "here")
    assert [record.getMessage() for record in caplog.records] == [
        "site 'h1' is connected",
        "site 'h1' has not been heard of for 20 s",
        "site 'h1' is connected",
        "site 'h1' has left",
    ]


def test_a_copy_of_a_kit_has_another_place(tmp_path: Path) -> None:
    for name, key in (("one", "k"), ("copy", "k"), ("other", "x")):
        (tmp_path / name / "startup").mkdir(parents=True)
        (tmp_path / name / "startup" / "client.key").write_text(key)
    places = [place_of(tmp_path / name) for name in ("one", "copy", "other")]
    assert len(set(places)) == 3
    (tmp_path / "one" / "startup" / "client.key").write_text("renewed")
    assert place_of(tmp_path / "copy" / ".." / "one") == places[0]
