"""What a site's host lets leave of an error, and what its guard stops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from fault_toy import JOB, Toy

from fednotes.core.errors import RefusedError
from fednotes.core.update import Update
from fednotes.engines.host import Guard, SiteHost, placeless
from fednotes.engines.wire import Frame, Reply, Request, decode_reply, encode

ASKED = Request(
    JOB,
    1,
    1,
    "train",
    first=True,
    counted={"b": 0},
    tensors={"x": torch.ones(4)},
    options={"round": 0},
)


class Watch:
    """A guard that refuses updates of a task."""

    def __init__(self, task: str) -> None:
        self.task = task

    def request(self, request: Request) -> None:
        pass

    def leaving(
        self, request: Request, reply: Frame, update: Update | None, reason: str = ""
    ) -> None:
        if request.task == self.task and update is not None:
            raise RefusedError("too few tokens are behind this update")


class Mute(Watch):
    """A guard whose ledger cannot be written."""

    def leaving(
        self, request: Request, reply: Frame, update: Update | None, reason: str = ""
    ) -> None:
        raise RefusedError("no ledger")


def host(
    folder: Path, guard: Guard | None = None, tell: Callable[[str], None] = lambda line: None
) -> SiteHost:
    return SiteHost(lambda: Toy("b"), folder, job=JOB, name="b", guard=guard, tell=tell)


def send(site: SiteHost, request: Request = ASKED) -> Reply:
    return decode_reply(site.handle(encode(request)))


def test_an_update_that_may_not_leave_is_not_kept_for_later(tmp_path: Path) -> None:
    """A repeated request gets the refusal again, also after a restart, and not the update."""
    guard = Watch("train")
    for _ in range(2):
        site = host(tmp_path, guard)
        for _ in range(2):
            reply = send(site)
            assert reply.refusal == "too few tokens are behind this update"
            assert reply.update is None
    assert not list((tmp_path / "journal").iterdir())
    guard.task = ""
    assert send(site).update is not None


def test_a_refusal_that_may_not_leave_is_an_error(tmp_path: Path) -> None:
    """Nothing leaves without the guard's leave, not even a bare no."""
    lines: list[str] = []
    site = host(tmp_path, Mute(""), lines.append)
    nothing = Request(JOB, 1, 1, "nothing", counted={"b": 0})
    for frame in (encode(nothing), encode(ASKED), b"?"):
        with pytest.raises(RefusedError, match="no ledger"):
            site.handle(frame)
    assert "has no task 'nothing'" in lines[0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("/srv/ward 7/x.toml: gone", "ward 7/x.toml: gone"),
        ("[policy] of /srv/ward7/site.toml", "[policy] of site.toml"),
        ("cannot read '/a/b/c.txt' (line 3)", "cannot read 'c.txt' (line 3)"),
        ("the metric 'relaxed/ADE/gold'", "the metric 'relaxed/ADE/gold'"),
        ("3 / 4 of h1/h2", "3 / 4 of h1/h2"),
    ],
)
def test_folders_do_not_leave(text: str, told: str) -> None:
    assert placeless(text) == told


class Hushed(RefusedError):
    public = "the rule\nalone"


def test_the_server_is_told_what_an_error_says_in_public(tmp_path: Path) -> None:
    lines: list[str] = []
    with mock.patch.object(Toy, "train", side_effect=Hushed("41 patients, in /srv/ward7/x")):
        assert send(host(tmp_path, tell=lines.append)).refusal == "the rule alone"
    assert "41 patients, in /srv/ward7/x" in lines[-1]
