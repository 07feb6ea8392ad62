"""What a site has helped to open is kept, and is not opened again over other sites."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fednotes.core.errors import FednotesError, RefusedError
from fednotes.engines.question import OPENED, Opened

FIRST, SECOND, THIRD = b"\x01" * 32, b"\x02" * 32, b"\x03" * 32


def test_a_question_is_opened_over_the_same_sites_alone(tmp_path: Path) -> None:
    opened = Opened("a", tmp_path / OPENED)
    opened.add(FIRST, ["a", "b", "c"])
    opened.add(FIRST, ["c", "b", "a"])
    for now in (opened, Opened("a", tmp_path / OPENED)):
        assert now.survivors(FIRST)
        assert not now.survivors(SECOND)
        assert now.survivors(FIRST) == ("a", "b", "c")
        for sites in (["a", "b"], ["a", "b", "c", "d"], ["a", "b", "d"]):
            for step in (now.require, now.add):
                with pytest.raises(RefusedError, match="opened before, over the sites a, b, c;"):
                    step(FIRST, sites)
    assert (tmp_path / OPENED).stat().st_mode & 0o777 == 0o600


def test_a_line_that_was_cut_costs_no_other(tmp_path: Path) -> None:
    """A kill cuts the last line, whose answer did not leave; then the site goes on."""
    Opened("a", tmp_path / OPENED).add(FIRST, ["a", "b"])
    whole = (tmp_path / OPENED).read_bytes()
    for cut in range(1, len(whole)):
        (tmp_path / OPENED).write_bytes(whole + whole[:-cut].replace(b"01", b"02"))
        Opened("a", tmp_path / OPENED).add(THIRD, ["b", "c"])
        again = Opened("a", tmp_path / OPENED)
        assert again.survivors(FIRST) == ("a", "b")
        assert again.survivors(THIRD) == ("b", "c")
        assert again.survivors(SECOND) in ((), ("a", "b"))


def test_a_disk_that_keeps_nothing_opens_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened("a", tmp_path / "missing" / OPENED)
    with pytest.raises(FednotesError, match="cannot keep what it opened"):
        opened.add(FIRST, ["a", "b"])
    assert not opened.survivors(FIRST)

    def broken(number: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    opened = Opened("a", tmp_path / OPENED)
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(FednotesError, match="cannot keep what it opened"):
        opened.add(FIRST, ["a", "b"])
    assert not opened.survivors(FIRST)
