"""What a site keeps of a job: its journal, and which sums it has helped to open."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fault_toy import JOB, Toy

from fednotes.core import store
from fednotes.core.errors import FednotesError, ModelError, RefusedError
from fednotes.core.federation import State
from fednotes.core.messages import (
    CHECKPOINT,
    VERSION,
    Attached,
    Reply,
    Request,
    decode_reply,
    encode,
)
from fednotes.core.update import Update
from fednotes.engines import history
from fednotes.engines.history import OPENED, Journal, Opened
from fednotes.engines.host import SiteHost

X, Y = {"x": torch.ones(4)}, {"x": torch.full((4,), 2.0)}


def host(folder: Path, job: str = JOB) -> SiteHost:
    return SiteHost(lambda: Toy("b"), folder, job=job, name="b")


def train(number: int, counted: int, run: int = 1, **fields: Any) -> Request:
    fields = {"tensors": X, "options": {"round": number}, "first": True} | fields
    return Request(JOB, run, number, "train", counted={"b": counted}, **fields)


def send(site: SiteHost, request: Request) -> Reply:
    return decode_reply(site.handle(encode(request)))


def own(site: SiteHost, number: int, counted: int, run: int = 1) -> float:
    request = Request(JOB, run, number, "finish", tensors=X, counted={"b": counted})
    reply = send(site, request)
    assert reply.update is not None, reply.refusal
    return reply.update.metrics["own"]


def by_toy(*trained: tuple[dict[str, torch.Tensor], int]) -> float:
    """The toy's private values after these trainings, by the toy itself without a host."""
    site = Toy("b")
    for tensors, number in trained:
        site.train(tensors, round=number)
    return float(site.own.sum())


# whose it is


def test_another_job_does_not_go_on_from_what_one_left(tmp_path: Path) -> None:
    """Same site, same folder, same run and numbers: neither its replies nor its state are given."""
    folder = tmp_path / "run1" / "site"
    send(host(folder), train(1, 0))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(RefusedError) as refused:
        host(folder, "job-2")
    assert str(refused.value) == (
        "site 'b': run1/site holds job job-1, this is job job-2: "
        "run it under another name, or delete run1/site at the site"
    )
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert own(host(folder), 2, 1) == by_toy((X, 1))


@pytest.mark.parametrize("text", ["?", "{}", '{"run": 3}', None])
def test_a_folder_that_does_not_say_whose_it_is_is_refused(
    text: str | None, tmp_path: Path
) -> None:
    send(host(tmp_path), train(1, 0))
    path = tmp_path / "run.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ModelError, match=r"run\.json does not say which job is kept there: delete"):
        host(tmp_path)


def test_what_another_version_keeps_is_refused_with_a_remedy(tmp_path: Path) -> None:
    """Before a version was written there, requests had another form."""
    send(host(tmp_path), train(1, 0))
    run = tmp_path / "run.json"
    for version in ({}, {"format": VERSION + 1}, {"format": None}):
        run.write_text(json.dumps({"job": JOB, "run": 1, **version}))
        with pytest.raises(ModelError, match=r"another version .* end it with that version"):
            host(tmp_path)
    assert (tmp_path / "journal" / "00000001.request").exists()


def test_a_site_that_was_killed_before_its_first_state_begins(tmp_path: Path) -> None:
    kept = {"job": JOB, "format": VERSION}
    with (
        mock.patch.object(history, "save_state", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        host(tmp_path)
    assert json.loads((tmp_path / "run.json").read_text()) == kept | {"run": 0}
    send(host(tmp_path), train(1, 0, run=4))
    assert json.loads((tmp_path / "run.json").read_text()) == kept | {"run": 4}
    assert Journal(tmp_path, "b", JOB).run == 4


# which request a reply belongs to


@pytest.mark.parametrize(
    "other",
    [
        {"tensors": Y},
        {"options": {"round": 7}},
        {"task": "evaluate", "options": {}},
        {"round": 3},
        {"counted": {"b": 0, "a": 0}},
        {"attached": Attached({"note": 1})},
        {"attached": Attached(tensors={"words": torch.ones(1)})},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_stored_reply_is_for_the_same_request_alone(
    other: dict[str, Any], tmp_path: Path
) -> None:
    request = train(1, 0)
    site = host(tmp_path)
    first = site.handle(encode(request))
    for again in (site, host(tmp_path)):  # the second has nothing but the folder
        refused = send(again, replace(request, **other))
        assert "request 1 of run 1 has come before, and was another" in refused.refusal
        assert (refused.update, refused.later) == (None, False)
        assert again.handle(encode(request)) == first
        assert again.handle(bytearray(encode(request))) == first
    assert own(site, 2, 1) == by_toy((X, 1))


def test_a_number_of_an_earlier_run_is_a_new_request(tmp_path: Path) -> None:
    """What the earlier run's request did is undone, for the new one does not count it."""
    site = host(tmp_path)
    send(site, train(1, 0))
    send(site, train(2, 1))
    reply = send(site, train(2, 1, run=2, tensors=Y))
    assert (reply.run, reply.number, reply.refusal) == (2, 2, "")
    assert own(site, 3, 2, run=2) == by_toy((X, 1), (Y, 2))


def test_a_reply_that_lies_in_anothers_place_does_not_leave(tmp_path: Path) -> None:
    """The file of run 1's reply under run 2's request: the task is done again."""
    site, request = host(tmp_path), train(1, 0, run=2)
    path = tmp_path / "journal" / "00000001.reply"
    send(site, train(1, 0))
    old = path.read_bytes()
    first = site.handle(encode(request))
    path.write_bytes(old)
    assert site.handle(encode(request)) == first
    path.write_bytes(old[:-1])
    assert site.handle(encode(request)) == first
    (tmp_path / "journal" / "00000001.request").write_bytes(b"?")
    assert site.handle(encode(request)) == first


# when it is on disk


def frame(number: int) -> bytes:
    return encode(train(number, 0))


def answer(number: int) -> bytes:
    return encode(Reply(JOB, 1, number, "b", Update()))


def test_a_request_without_its_reply_is_never_on_disk(tmp_path: Path) -> None:
    """Killed before each of the two files: by then the entry is not there, or all of it."""
    for place in (1, 2, 3):
        kept, writes = Journal(tmp_path / str(place), "b", JOB), iter(range(1, 9))

        def dying(path: Path, data: Any, place: int = place, writes: Any = writes) -> None:
            if next(writes) == place:
                raise KeyboardInterrupt
            store.replace_file(path, data)

        with mock.patch.object(history, "replace_file", dying):
            if place < 3:
                with pytest.raises(KeyboardInterrupt):
                    kept.add(1, frame(1), answer(1))
            else:
                kept.add(1, frame(1), answer(1))
        names = {path.suffix for path in (tmp_path / str(place) / "journal").iterdir()}
        assert names == {1: set(), 2: {".reply"}, 3: {".reply", ".request"}}[place]
        again = Journal(tmp_path / str(place), "b", JOB)
        assert again.last == (1 if place == 3 else 0)
        assert again.reply(train(1, 0), frame(1)) == (answer(1) if place == 3 else None)


@contextmanager
def calls(root: Path) -> Iterator[list[tuple[str, str]]]:
    """What is synced and renamed below a folder, in order; a file's temporary name is cut."""
    found: list[tuple[str, str]] = []

    def name(path: Any) -> str:
        parts = Path(path).relative_to(root).parts
        return "/".join(
            re.sub(r"\.[0-9a-f]{16}\.(tmp|old)$", "~", p[1:]) if p[0] == "." else p for p in parts
        )

    def noting(kind: str, real: Callable[..., Any], of: Callable[..., str]) -> Any:
        def call(*arguments: Any) -> None:
            found.append((kind, of(*arguments)))
            real(*arguments)

        return mock.patch.object(os, kind, call)

    with (
        noting("fsync", os.fsync, lambda number: name(os.readlink(f"/proc/self/fd/{number}"))),
        noting("replace", os.replace, lambda source, target: name(target)),
    ):
        yield found


def written(folder: str, file: str) -> list[tuple[str, str]]:
    """The bytes, then the name, then that the folder has this name."""
    path = f"{folder}/{file}"
    return [("fsync", f"{path}~"), ("replace", path), ("fsync", folder)]


def test_all_of_a_task_is_on_disk_before_its_reply_leaves(tmp_path: Path) -> None:
    kept = Journal(tmp_path / "site", "b", JOB)
    with calls(tmp_path) as found:
        kept.add(1, frame(1), answer(1))
    journal_of = "site/journal"
    assert found == written(journal_of, "00000001.reply") + written(journal_of, "00000001.request")
    with calls(tmp_path) as found:
        kept.run = 2
    assert found == written("site", "run.json")


def test_what_is_undone_is_so_on_disk_before_anything_follows(tmp_path: Path) -> None:
    kept = Journal(tmp_path, "b", JOB)
    kept.save(5, State(1), 0)
    with calls(tmp_path) as found:
        kept.undo_to(4)
    assert found == [("fsync", "states")]
    assert kept.states == [0]


def test_a_server_that_begins_no_round_cannot_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MOST_BYTES", 3 * len(frame(1)) - 1)
    site = host(tmp_path)
    refused = [send(site, train(n, min(n - 1, 2), first=False)).refusal for n in range(1, 5)]
    assert refused[:2] == ["", ""]
    assert all("bytes of requests of one round at most" in each for each in refused[2:])
    assert len(list((tmp_path / "journal").glob("*.request"))) == 2
    assert send(site, Request(JOB, 1, 6, CHECKPOINT, counted={"b": 2})).refusal == ""
    assert send(site, train(7, 2, first=False)).refusal == ""
    assert own(host(tmp_path), 8, 7) == by_toy((X, 1), (X, 2), (X, 7))


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
