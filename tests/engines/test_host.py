"""A site behind its host and journal: what it stores, undoes and refuses."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
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
from fednotes.core import tensors as core_tensors
from fednotes.core.errors import FednotesError, ModelError, RefusedError
from fednotes.core.federation import State
from fednotes.core.messages import (
    BEGIN,
    CHECKPOINT,
    END,
    VERSION,
    Attached,
    Frame,
    Reply,
    Request,
    decode_reply,
    encode_message,
)
from fednotes.core.update import Tensors, Update
from fednotes.engines import history
from fednotes.engines.history import OPENED, Journal, OpenedSums, QuestionHistory
from fednotes.engines.host import SiteHost, remove_folders

X, Y = {"x": torch.ones(4)}, {"x": torch.full((4,), 2.0)}


class Server:
    """Numbers requests and counts every answer, as a server without faults does."""

    def __init__(
        self, host: SiteHost, server_start: int = 1, number: int = 0, counted: int = 0
    ) -> None:
        self.host = host
        self.server_start = server_start
        self.number = number
        self.counted = counted
        self.marks: list[tuple[int, int]] = []

    def request(
        self, task: str, tensors: Tensors | None = None, **fields: Any
    ) -> Request:
        self.number += 1
        fields = {"counted": {"b": self.counted}} | fields
        return Request(
            JOB, self.server_start, self.number, task, tensors=tensors or {}, **fields
        )

    def send(self, request: Request) -> Reply:
        return decode_reply(self.host.handle(encode_message(request)))

    def ask(self, task: str, tensors: Tensors | None = None, **fields: Any) -> Reply:
        reply = self.send(self.request(task, tensors, **fields))
        if reply.update is not None and not task.startswith("@"):
            self.counted = reply.number
        return reply

    def play(self, rounds: int, every: int) -> None:
        """Run rounds with a checkpoint after some; requests carry the existing
        marks."""
        for round in range(rounds):
            marks = tuple(mark for mark, _ in self.marks[-2:])
            self.train(round, checkpoint_numbers=marks)
            if round % every == every - 1:
                self.ask(CHECKPOINT, checkpoint_numbers=marks)
                self.marks.append((self.number, self.counted))

    def train(self, round: int, **fields: Any) -> Reply:
        return self.ask("train", X, first=True, options={"round": round}, **fields)


def host(folder: Path, **options: Any) -> SiteHost:
    return SiteHost(lambda: Toy("b"), folder, **({"job": JOB, "name": "b"} | options))


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(host(tmp_path))


def local_metric(reply: Reply) -> float:
    assert reply.update is not None, reply.refusal
    return reply.update.metrics["own"]


def by_toy(*trained: tuple[Tensors, int]) -> float:
    """Return the toy's private values after these trainings, without a host."""
    site = Toy("b")
    for tensors, number in trained:
        site.train(tensors, round=number)
    return float(site.local_state.sum())


def reference(rounds: int) -> float:
    return by_toy(*((X, round) for round in range(rounds)))


def train(number: int, counted: int, server_start: int = 1, **fields: Any) -> Request:
    """Of a server of any kind."""
    fields = {"tensors": X, "options": {"round": number}, "first": True} | fields
    return Request(JOB, server_start, number, "train", counted={"b": counted}, **fields)


def send(site: SiteHost, request: Request) -> Reply:
    return decode_reply(site.handle(encode_message(request)))


def finished(site: SiteHost, number: int, counted: int, server_start: int = 1) -> float:
    return local_metric(
        send(
            site,
            Request(
                JOB, server_start, number, "finish", tensors=X, counted={"b": counted}
            ),
        )
    )


def test_an_intact_state_is_kept_while_files_cannot_be_opened(tmp_path: Path) -> None:
    server = Server(host(tmp_path))
    server.play(4, every=2)
    states = sorted(path.name for path in (tmp_path / "states").iterdir())
    assert len(states) > 1

    server.host = host(tmp_path)  # the site's process was started again
    no_file = OSError(errno.EMFILE, "Too many open files")
    with mock.patch.object(core_tensors, "load_file", side_effect=no_file):
        reply = server.ask(BEGIN)
    assert reply.later
    assert "cannot be read now (Too many open files)" in reply.refusal
    assert sorted(path.name for path in (tmp_path / "states").iterdir()) == states
    assert server.train(4).update is not None


def test_a_repeated_request_gets_the_stored_reply_and_runs_no_task(
    server: Server, tmp_path: Path
) -> None:
    request = server.request("train", X, first=True, options={"round": 0})
    first = server.host.handle(encode_message(request))
    assert server.host.handle(encode_message(request)) == first
    server.host = host(tmp_path)  # kill -9 and restart: nothing but the folder is left
    assert server.host.handle(encode_message(request)) == first
    server.counted = request.number
    assert local_metric(server.ask("finish", X)) == reference(1)


def test_requests_that_were_not_counted_are_undone(server: Server) -> None:
    server.train(0)
    counted = server.counted
    server.train(7)
    server.ask("send", {"scale": torch.ones(4)})
    server.counted = counted
    assert server.train(1).has == server.number
    assert local_metric(server.ask("finish", X)) == reference(2)


def test_old_requests_are_refused_and_change_nothing(tmp_path: Path) -> None:
    server = Server(host(tmp_path), server_start=2)
    stale_request = server.request("train", X, first=True, options={"round": 0})
    server.train(0)
    for stale in (stale_request, replace(stale_request, server_start=1, number=99)):
        assert "is old: request 2 of run 2 has come" in server.send(stale).refusal
    assert local_metric(server.ask("finish", X)) == reference(1)


@pytest.mark.parametrize(
    ("keeping", "nbytes"), [(0.0, 2**29), (1e9, 2**29), (1e9, 400)]
)
def test_a_restarted_site_continues_with_the_same_result(
    server: Server,
    tmp_path: Path,
    keeping: float,
    nbytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Restarted between any two requests, with states written each round, or never but
    at checkpoints, or by size."""
    monkeypatch.setattr("fednotes.engines.host.KEEP_BYTES", nbytes)
    for round in range(6):
        server.host = host(tmp_path, keeping=keeping)
        server.train(round)
        server.host = host(tmp_path, keeping=keeping)
        assert server.ask("send", {"scale": torch.ones(4)}).update is not None
        if round == 3:
            assert server.ask(CHECKPOINT).update is not None
    assert local_metric(server.ask("finish", X)) == reference(6)
    states = len(list((tmp_path / "states").iterdir()))
    assert states <= 2


def test_a_task_without_tensors_uses_the_last_broadcast_after_a_restart(
    server: Server, tmp_path: Path
) -> None:
    server.ask("evaluate", X, first=True)
    broadcast = server.counted
    server.ask(CHECKPOINT)
    for round in range(3):
        server.host = host(tmp_path, keeping=0.0)
        reply = server.ask(
            "train", first=True, tensors_of_request=broadcast, options={"round": round}
        )
        assert reply.update is not None
    assert local_metric(server.ask("finish", X)) == reference(3)


def test_the_server_can_return_to_its_last_two_checkpoints_only(
    tmp_path: Path,
) -> None:
    for back in (0, 1, 2, 3):
        folder = tmp_path / str(back)
        server = Server(host(folder))
        server.play(8, 2)
        mark, counted = server.marks[-1 - back]
        again = Server(host(folder), 2, mark, counted)
        reply = again.ask(BEGIN, checkpoint_numbers=(mark,))
        rounds = 8 - 2 * back
        if back == 3:  # two, and the one that the server was just writing, are kept
            assert "cannot return to its state after request" in reply.refusal
            assert reply.has == 0  # and there it begins anew
            again.counted, rounds = 0, 0
        assert local_metric(again.ask("finish", X, first=True)) == reference(rounds)


def test_a_site_that_missed_a_checkpoint_can_still_return_to_it(
    server: Server, tmp_path: Path
) -> None:
    """Its state then is made from an older one and the requests since, which are kept."""
    for round in range(3):
        server.train(round)
    server.number += 1  # the checkpoint's request, which does not arrive
    mark, counted = server.number, server.counted
    for round in range(3, 8):
        if round == 5:  # from here on, states are written
            server.host = host(tmp_path, keeping=0.0)
        server.train(round, checkpoint_numbers=(mark,))
    again = Server(host(tmp_path), 2, mark, counted)
    assert local_metric(again.ask("finish", X, first=True)) == reference(3)


def test_few_states_and_requests_are_kept(tmp_path: Path) -> None:
    Server(host(tmp_path, keeping=0.0)).play(20, 4)
    assert len(list((tmp_path / "states").iterdir())) <= 4
    assert len(list((tmp_path / "journal").iterdir())) <= 10
    assert not [p for p in tmp_path.rglob("*") if p.name.startswith(".")]


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_site_keeps_no_more_checkpoints_than_an_honest_server_has(
    checkpoints: bool, tmp_path: Path
) -> None:
    """A server that names every request of the run as a checkpoint to go back to."""
    server = Server(host(tmp_path, keeping=0.0))
    for round in range(12):
        marks = tuple(range(server.number + 1))
        server.train(round, checkpoint_numbers=marks)
        if checkpoints:
            server.ask(CHECKPOINT, checkpoint_numbers=marks)
    assert len(list((tmp_path / "states").iterdir())) <= 4
    assert len(list((tmp_path / "journal").iterdir())) <= 8
    assert local_metric(server.ask("finish", X)) == reference(12)


def test_the_newest_checkpoints_are_kept_in_any_order(tmp_path: Path) -> None:
    server = Server(host(tmp_path, keeping=0.0))
    server.play(4, 1)
    (older, counted), (newer, _) = server.marks[-2:]
    for round in (4, 5):
        server.train(round, checkpoint_numbers=(newer, newer, older, 1, 0))
    again = Server(host(tmp_path), 2, older, counted)
    assert local_metric(again.ask("finish", X, first=True)) == reference(3)


class Adopts:
    """A secure sum in which the server always says that the site lost its history."""

    strict = True

    def find_history_to_adopt(
        self, request: Request, question: QuestionHistory
    ) -> bytes:
        return bytes([request.number]) * 32

    def seal(self, request: Request, update: Update, question: bytes) -> Attached:
        return Attached()


def test_a_site_that_repeatedly_adopts_a_history_keeps_few_states(
    tmp_path: Path,
) -> None:
    sealer: Any = Adopts()
    server = Server(host(tmp_path, sealer=sealer))
    for _ in range(9):
        assert server.ask("count", preparing=True).update is not None
        wrong = server.ask("train", first=True, options={"rate": 1})
        assert "does not accept the options" in wrong.refusal
    assert len(list((tmp_path / "states").iterdir())) <= 4


# what goes wrong


def test_failures_are_refused_in_one_line_without_note_text(
    tmp_path: Path,
) -> None:
    lines: list[str] = []
    server = Server(host(tmp_path, tell=lines.append))
    server.train(0)

    def fails(error: Exception) -> Callable[..., Update]:
        def task(self: Toy, tensors: Tensors, **options: Any) -> Update:
            self.local_state += 1000.0
            raise error

        return task

    for error, message in (
        (
            KeyError("Mrs Smith"),
            r"site 'b': the task failed (KeyError at test_host.py:",
        ),
        (RuntimeError("line 1\nMrs Smith"), "(RuntimeError at"),
        (RefusedError("not\ntoday"), "not today"),
    ):
        with mock.patch.object(Toy, "send", fails(error)):
            reply = server.ask("send", {"scale": torch.ones(4)})
        assert message in reply.refusal
        assert not reply.later
        assert reply.has == server.counted
        assert "Smith" not in reply.refusal + "".join(lines)
    assert local_metric(server.ask("finish", X)) == reference(1)


def test_an_update_that_is_not_finite_does_not_leave(server: Server) -> None:
    with mock.patch.object(
        Toy, "train", return_value=Update({"x": torch.tensor([torch.nan])})
    ):
        assert "tensor 'x' is not finite" in server.train(0).refusal
    with mock.patch.object(
        Toy, "train", return_value=Update({}, 1.0, {"n": torch.inf})
    ):
        assert server.train(0).refusal.endswith("the metric 'n' is not finite")
    assert local_metric(server.ask("finish", X)) == reference(0)


def test_invalid_requests_are_refused(server: Server) -> None:
    server.train(0)
    for task in ("state", "__init__", "restore", "nothing"):
        assert f"site 'b' has no task '{task}'" in server.ask(task).refusal
    assert "does not take part in secure sums" in server.ask("@keys").refusal
    foreign = replace(server.request("train", X), job="other")
    assert (
        "has approved job job-1, but the request is for job other"
        in server.send(foreign).refusal
    )
    assert "does not name site 'b'" in server.ask("train", counted={"a": 1}).refusal
    wrong = server.ask("train", X, first=True, options={"rate": 1})
    assert "does not accept the options rate" in wrong.refusal
    for value in ("0", 0.5, True):
        wrong = server.ask("train", X, first=True, options={"round": value})
        assert "does not accept the options round" in wrong.refusal
    noise = decode_reply(server.host.handle(b"noise"))
    assert (noise.number, noise.later) == (0, True)
    assert server.ask(END).update is not None
    assert server.host.ended


def test_a_site_that_is_behind_reports_its_last_state(server: Server) -> None:
    server.train(0)
    last_number = server.counted
    server.counted = 40
    reply = server.train(1)
    assert (
        f"cannot return to its state after request 40; "
        f"it has the state after request {last_number}" in reply.refusal
    )
    assert reply.has == last_number


def test_a_full_disk_is_a_temporary_refusal(tmp_path: Path) -> None:
    server = Server(host(tmp_path, keeping=0.0))
    server.train(0)

    def full(*anything: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    request = server.request("train", X, first=True, options={"round": 1})
    for module, name in (
        (store.os, "replace"),
        (core_tensors, "save_file"),
        (store.os, "fsync"),
    ):
        with mock.patch.object(module, name, full):
            reply = server.send(request)
        assert "No space left on device" in reply.refusal
        assert str(tmp_path) not in reply.refusal
        assert reply.later
    assert server.send(request).update is not None
    server.counted = request.number
    assert local_metric(server.ask("finish", X)) == reference(2)


@pytest.mark.parametrize("damage", ["newest state", "request", "all"])
def test_damage_on_disk_is_detected_and_an_older_state_is_used(
    server: Server, tmp_path: Path, damage: str
) -> None:
    server.play(3, 1)
    server.train(3)
    states, requests = (
        sorted((tmp_path / name).glob(pattern))
        for name, pattern in (("states", "0*"), ("journal", "*.request"))
    )
    if damage == "request":
        requests[-1].write_bytes(b"?")
    else:
        for folder in states if damage == "all" else states[-1:]:
            (folder / "tensors.safetensors").write_bytes(b"?")
    server.host = host(tmp_path)
    last_round = {"newest state": 2, "request": 3, "all": 0}[damage]
    for _ in range(4):
        reply = server.ask("finish", X)
        if reply.update is not None:
            break
        server.counted = reply.has
    assert local_metric(reply) == reference(last_round)


def test_incomplete_files_of_a_killed_process_are_removed(
    server: Server, tmp_path: Path
) -> None:
    server.train(0)
    shutil.copytree(
        tmp_path / "states" / "00000000", tmp_path / "states" / ".00000003.9.tmp"
    )
    (tmp_path / "journal" / "00000002.reply").write_bytes(b"cut")
    (tmp_path / "journal" / ".00000002.request.9.tmp").write_bytes(b"cut")
    server.host = host(tmp_path)
    server.train(1)
    assert local_metric(server.ask("finish", X)) == reference(2)


# rules, ledger, secure sum


class Watch:
    """A guard that notes everything and refuses what it is told to.

    room: how much it lets the site write, a piece at a time.
    """

    def __init__(
        self, request: str = "", leaving: str = "", room: float = math.inf
    ) -> None:
        self.no_request, self.no_leaving = request, leaving
        self.room = room
        self.sent: list[tuple[str, bytes, Update | None]] = []
        self.refused: list[str] = []  # tasks that were refused after they were run
        self.reasons: list[str] = []

    def check_request(self, request: Request) -> None:
        if request.task == self.no_request:
            error = RefusedError("outside the allowed hours")
            error.later = True  # type: ignore[attr-defined]
            raise error

    def require_room(self, more: int) -> None:
        if more > self.room:
            raise RefusedError("there is no room")

    def check_refusal(
        self, request: Request, question: bytes, error: Exception
    ) -> None:
        assert question
        self.refused.append(request.task)

    def check_reply(
        self,
        request: Request,
        reply: Frame,
        update: Update | None,
        reason: str = "",
        *,
        question: bytes = b"",
    ) -> None:
        if request.task == self.no_leaving and update is not None:
            raise RefusedError("too few tokens are behind this update")
        self.sent.append((request.task, bytes(reply), update))
        self.reasons.append(reason)


def test_the_guard_gets_no_reason_from_an_error_of_python(tmp_path: Path) -> None:
    """The ledger records reasons as they are, so they must not be text."""

    class Undecodable(Toy):
        def count(self, tensors: Tensors) -> Update:
            raise UnicodeDecodeError("utf-8", b"rash", 0, 1, "rash")

    guard = Watch()
    options: Any = {"job": JOB, "name": "b", "guard": guard}
    server = Server(SiteHost(lambda: Undecodable("b"), tmp_path, **options))
    assert "UnicodeDecodeError at test_host.py" in server.ask("count").refusal
    assert guard.reasons == [""]


def test_the_guard_sees_every_message_and_can_refuse(tmp_path: Path) -> None:
    guard = Watch(request="share", leaving="send")
    server = Server(host(tmp_path, guard=guard))
    request = server.request("train", X, first=True, options={"round": 0})
    frames = [server.host.handle(encode_message(request)) for _ in range(2)]
    server.counted = request.number
    refused = server.ask("share", options={"sizes": 3})
    assert (refused.refusal, refused.later) == ("outside the allowed hours", True)
    assert server.ask("send", {"scale": torch.ones(4)}).refusal.startswith(
        "too few tokens"
    )
    assert [(task, update is None) for task, _, update in guard.sent] == [
        ("train", False), ("train", True), ("share", True), ("send", True)
    ]  # fmt: skip
    assert [frame for _, frame, _ in guard.sent][:2] == frames
    assert guard.refused == ["send"]
    assert local_metric(server.ask("finish", X)) == reference(1)


def test_nothing_is_written_beyond_the_limit_of_the_guard(tmp_path: Path) -> None:
    """Neither a request nor a state; with room again, the run goes on as before."""
    guard = Watch()
    server = Server(host(tmp_path, guard=guard, keeping=0.0))
    server.train(0)
    before = contents(tmp_path)
    guard.room = 0
    assert server.ask(CHECKPOINT).refusal == "there is no room"
    assert contents(tmp_path) == before

    request = server.request("train", X, first=True, options={"round": 1})
    size = len(encode_message(request))
    for room in (size - 1, size):  # too little for it, and for it with its reply
        guard.room = room
        assert server.send(request).refusal == "there is no room"
        assert contents(tmp_path)["journal"] == before["journal"]
    guard.room = math.inf
    assert server.send(request).update is not None
    server.counted = request.number
    assert local_metric(server.ask("finish", X)) == reference(2)


def contents(folder: Path) -> dict[str, list[str]]:
    """Return the names in a site's folders of states and requests."""
    return {
        name: sorted(path.name for path in (folder / name).iterdir())
        for name in ("states", "journal")
    }


def test_an_update_that_may_not_leave_is_not_stored(tmp_path: Path) -> None:
    """A repeated request gets the refusal again, also after a restart, and not the
    update."""
    guard = Watch(leaving="train")
    for _ in range(2):
        site = host(tmp_path, guard=guard)
        for _ in range(2):
            reply = send(site, train(1, 0))
            assert reply.refusal == "too few tokens are behind this update"
            assert reply.update is None
    assert not list((tmp_path / "journal").iterdir())
    guard.no_leaving = ""
    assert send(site, train(1, 0)).update is not None


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("/srv/ward 7/x.toml: gone", "ward 7/x.toml: gone"),
        ("[policy] of /srv/ward7/site.toml", "[policy] of site.toml"),
        ("cannot read '/a/b/c.txt' (line 3)", "cannot read 'c.txt' (line 3)"),
        ("the metric 'relaxed/ADE/gold'", "the metric 'relaxed/ADE/gold'"),
        ("3 / 4 of h1/h2", "3 / 4 of h1/h2"),
    ],
)
def test_paths_of_folders_do_not_leave_a_site(text: str, cleaned: str) -> None:
    assert remove_folders(text) == cleaned


# whose it is


def test_a_job_does_not_continue_from_the_state_of_another(tmp_path: Path) -> None:
    """Same site, same folder, same run and numbers: neither its replies nor its state
    are given."""
    folder = tmp_path / "run1" / "site"
    send(host(folder), train(1, 0))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(RefusedError) as refused:
        host(folder, job="job-2")
    assert str(refused.value) == (
        "site 'b': run1/site holds job job-1, but this is job job-2: "
        "run it under another name, or delete run1/site at the site"
    )
    assert {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file()
    } == before
    assert finished(host(folder), 2, 1) == by_toy((X, 1))


@pytest.mark.parametrize("text", ["?", "{}", '{"run": 3}', None])
def test_a_folder_of_an_unknown_job_is_refused(
    text: str | None, tmp_path: Path
) -> None:
    send(host(tmp_path), train(1, 0))
    path = tmp_path / "run.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(
        ModelError, match=r"run\.json does not say which job is stored there: delete"
    ):
        host(tmp_path)


def test_the_state_of_another_version_is_refused_with_a_remedy(tmp_path: Path) -> None:
    """Before a version was written there, requests had another form."""
    send(host(tmp_path), train(1, 0))
    run = tmp_path / "run.json"
    for version in ({}, {"format": VERSION + 1}, {"format": None}):
        run.write_text(json.dumps({"job": JOB, "run": 1, **version}))
        with pytest.raises(
            ModelError, match=r"another version .* finish the job with that version"
        ):
            host(tmp_path)
    assert (tmp_path / "journal" / "00000001.request").exists()


def test_a_site_that_was_killed_before_its_first_state_starts_afresh(
    tmp_path: Path,
) -> None:
    description = {"job": JOB, "format": VERSION}
    with (
        mock.patch.object(history, "save_state", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        host(tmp_path)
    assert json.loads((tmp_path / "run.json").read_text()) == description | {"run": 0}
    send(host(tmp_path), train(1, 0, server_start=4))
    assert json.loads((tmp_path / "run.json").read_text()) == description | {"run": 4}
    assert Journal(tmp_path, "b", JOB).server_start == 4


# which request a reply belongs to


@pytest.mark.parametrize(
    "changes",
    [
        {"tensors": Y},
        {"options": {"round": 7}},
        {"task": "evaluate", "options": {}},
        {"round": 3},
        {"counted": {"b": 0, "a": 0}},
        {"attached": Attached({"note": 1})},
        {"attached": Attached(tensors={"words": torch.ones(1)})},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_stored_reply_answers_only_the_same_request(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    request = train(1, 0)
    site = host(tmp_path)
    first = site.handle(encode_message(request))
    for again in (site, host(tmp_path)):  # the second has nothing but the folder
        refused = send(again, replace(request, **changes))
        assert (
            "request 1 of run 1 was received before with different content"
            in refused.refusal
        )
        assert (refused.update, refused.later) == (None, False)
        assert again.handle(encode_message(request)) == first
        assert again.handle(bytearray(encode_message(request))) == first
    assert finished(site, 2, 1) == by_toy((X, 1))


def test_a_request_number_of_an_earlier_run_is_a_new_request(tmp_path: Path) -> None:
    """What the earlier run's request did is undone, for the new one does not count it."""
    site = host(tmp_path)
    send(site, train(1, 0))
    send(site, train(2, 1))
    reply = send(site, train(2, 1, server_start=2, tensors=Y))
    assert (reply.server_start, reply.number, reply.refusal) == (2, 2, "")
    assert finished(site, 3, 2, server_start=2) == by_toy((X, 1), (Y, 2))


def test_a_reply_of_another_request_does_not_leave(tmp_path: Path) -> None:
    """The file of run 1's reply under run 2's request: the task is done again."""
    site, request = host(tmp_path), train(1, 0, server_start=2)
    path = tmp_path / "journal" / "00000001.reply"
    send(site, train(1, 0))
    stored = path.read_bytes()
    first = site.handle(encode_message(request))
    path.write_bytes(stored)
    assert site.handle(encode_message(request)) == first
    path.write_bytes(stored[:-1])
    assert site.handle(encode_message(request)) == first
    (tmp_path / "journal" / "00000001.request").write_bytes(b"?")
    assert site.handle(encode_message(request)) == first


# when it is on disk


def frame(number: int) -> bytes:
    return encode_message(train(number, 0))


def answer(number: int) -> bytes:
    return encode_message(Reply(JOB, 1, number, "b", Update()))


def test_a_request_is_never_stored_without_its_reply(tmp_path: Path) -> None:
    """Killed before each of the two files: by then the entry is not there, or all of
    it."""
    for place in (1, 2, 3):
        journal, writes = Journal(tmp_path / str(place), "b", JOB), iter(range(1, 9))

        def dying(
            path: Path, data: Any, place: int = place, writes: Any = writes
        ) -> None:
            if next(writes) == place:
                raise KeyboardInterrupt
            store.replace_file(path, data)

        with mock.patch.object(history, "replace_file", dying):
            if place < 3:
                with pytest.raises(KeyboardInterrupt):
                    journal.add(1, frame(1), answer(1))
            else:
                journal.add(1, frame(1), answer(1))
        names = {path.suffix for path in (tmp_path / str(place) / "journal").iterdir()}
        assert names == {1: set(), 2: {".reply"}, 3: {".reply", ".request"}}[place]
        again = Journal(tmp_path / str(place), "b", JOB)
        assert again.last == (1 if place == 3 else 0)
        assert again.find_reply(train(1, 0), frame(1)) == (
            answer(1) if place == 3 else None
        )


@contextmanager
def calls(root: Path) -> Iterator[list[tuple[str, str]]]:
    """Yield what is synced and renamed below a folder, in order, with cut temporary
    names."""
    events: list[tuple[str, str]] = []

    def name(path: Any) -> str:
        parts = Path(path).relative_to(root).parts
        return "/".join(
            re.sub(r"\.[0-9a-f]{16}\.(tmp|old)$", "~", p[1:]) if p[0] == "." else p
            for p in parts
        )

    def noting(
        kind: str, real: Callable[..., Any], describe: Callable[..., str]
    ) -> Any:
        def call(*arguments: Any) -> None:
            events.append((kind, describe(*arguments)))
            real(*arguments)

        return mock.patch.object(os, kind, call)

    with (
        noting(
            "fsync",
            os.fsync,
            lambda number: name(os.readlink(f"/proc/self/fd/{number}")),
        ),
        noting("replace", os.replace, lambda source, target: name(target)),
    ):
        yield events


def writes_of(folder: str, file: str) -> list[tuple[str, str]]:
    """Return the calls that write a file: its bytes, its name, and the folder."""
    path = f"{folder}/{file}"
    return [("fsync", f"{path}~"), ("replace", path), ("fsync", folder)]


def test_a_task_is_completely_on_disk_before_its_reply_leaves(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "site", "b", JOB)
    with calls(tmp_path) as events:
        journal.add(1, frame(1), answer(1))
    journal_of = "site/journal"
    assert events == writes_of(journal_of, "00000001.reply") + writes_of(
        journal_of, "00000001.request"
    )
    with calls(tmp_path) as events:
        journal.set_server_start(2)
    assert events == writes_of("site", "run.json")


def test_a_request_is_undone_on_disk_before_the_next_one(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path, "b", JOB)
    journal.save(5, State(1), 0)
    with calls(tmp_path) as events:
        journal.undo_to(4)
    assert events == [("fsync", "states")]
    assert journal.states == [0]


def test_a_server_that_starts_no_round_cannot_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MOST_BYTES", 3 * len(frame(1)) - 1)
    site = host(tmp_path)
    refused = [
        send(site, train(n, min(n - 1, 2), first=False)).refusal for n in range(1, 5)
    ]
    assert refused[:2] == ["", ""]
    assert all("bytes of requests of one round" in each for each in refused[2:])
    assert len(list((tmp_path / "journal").glob("*.request"))) == 2
    assert send(site, Request(JOB, 1, 6, CHECKPOINT, counted={"b": 2})).refusal == ""
    assert send(site, train(7, 2, first=False)).refusal == ""
    assert finished(host(tmp_path), 8, 7) == by_toy((X, 1), (X, 2), (X, 7))


FIRST, SECOND, THIRD = b"\x01" * 32, b"\x02" * 32, b"\x03" * 32


def test_a_question_is_opened_only_for_the_same_sites(tmp_path: Path) -> None:
    opened = OpenedSums("a", tmp_path / OPENED)
    opened.add(FIRST, ["a", "b", "c"])
    opened.add(FIRST, ["c", "b", "a"])
    for now in (opened, OpenedSums("a", tmp_path / OPENED)):
        assert now.find_survivors(FIRST)
        assert not now.find_survivors(SECOND)
        assert now.find_survivors(FIRST) == ("a", "b", "c")
        for sites in (["a", "b"], ["a", "b", "c", "d"], ["a", "b", "d"]):
            for step in (now.require, now.add):
                with pytest.raises(
                    RefusedError, match="has been opened for the sites a, b, c;"
                ):
                    step(FIRST, sites)
    assert (tmp_path / OPENED).stat().st_mode & 0o777 == 0o600


def test_a_line_that_was_cut_does_not_affect_others(tmp_path: Path) -> None:
    """A kill cuts the last line, whose answer did not leave; then the site goes on."""
    OpenedSums("a", tmp_path / OPENED).add(FIRST, ["a", "b"])
    intact = (tmp_path / OPENED).read_bytes()
    for cut in range(1, len(intact)):
        (tmp_path / OPENED).write_bytes(intact + intact[:-cut].replace(b"01", b"02"))
        OpenedSums("a", tmp_path / OPENED).add(THIRD, ["b", "c"])
        again = OpenedSums("a", tmp_path / OPENED)
        assert again.find_survivors(FIRST) == ("a", "b")
        assert again.find_survivors(THIRD) == ("b", "c")
        assert again.find_survivors(SECOND) in ((), ("a", "b"))


def test_no_sum_is_opened_if_the_disk_cannot_record_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = OpenedSums("a", tmp_path / "missing" / OPENED)
    with pytest.raises(FednotesError, match="cannot save what it opened"):
        opened.add(FIRST, ["a", "b"])
    assert not opened.find_survivors(FIRST)

    def broken(number: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    opened = OpenedSums("a", tmp_path / OPENED)
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(FednotesError, match="cannot save what it opened"):
        opened.add(FIRST, ["a", "b"])
    assert not opened.find_survivors(FIRST)
