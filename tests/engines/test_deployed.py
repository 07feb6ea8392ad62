"""The engine of real sites: who takes part, what is stored, and secure sums."""

from __future__ import annotations

import errno
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from fault_net import STRICT, Net, toys
from fault_toy import JOB, SITES, Toy, by_hand, toy_job

from fednotes.core import tensors as core_tensors
from fednotes.core.errors import ConfigError, FednotesError, ModelError, TrainingError
from fednotes.core.federation import State
from fednotes.core.messages import Attached, Frame, Reply, Request, encode_message
from fednotes.core.stored_tensors import copy_or_store_tensors
from fednotes.core.update import Tensors, Update
from fednotes.engines import deployed, requests
from fednotes.engines.requests import (
    CollectedReplies,
    Event,
    Participants,
    Patience,
    RunState,
)
from fednotes.engines.rounds import RoundResult

# who takes part


def test_tensors_that_a_site_missed_are_sent_again(tmp_path: Path) -> None:
    """b misses an evaluation; the next task has no tensors for a and c, but for b."""
    net = toys(tmp_path)
    engine = net.engine(SITES, replace(STRICT, min_sites=2))
    x = {"x": torch.ones(4)}
    turns = engine.rounds(0, 9)
    next(turns)
    engine.sum("train", x, round=0)
    net.down = {"b"}
    assert engine.sum("evaluate", x).included == ("a", "c")
    net.down = set()
    assert engine.sum("evaluate", x).included == ("a", "c")  # not before the next round
    next(turns)
    net.sent.clear()
    assert engine.sum("train", round=1).included == SITES
    sent = {site: request for site, request, _ in net.sent if request.task == "train"}
    assert {s: bool(r.tensors) for s, r in sent.items()} == {
        "a": False,
        "b": True,
        "c": False,
    }
    assert torch.equal(sent["b"].tensors["x"], x["x"])
    frames = {id(frame) for site, request, frame in net.sent if request.task == "train"}
    assert len(frames) == 2  # sites that are sent the same have the same object


def test_a_request_for_several_sites_is_encoded_once(tmp_path: Path) -> None:
    engine = toys(tmp_path).engine(SITES)
    with mock.patch.object(requests, "encode_message", wraps=encode_message) as encode:
        engine.sum("count")
    encoded = [call.args[0] for call in encode.call_args_list]
    assert [request.task for request in encoded].count("count") == 1


@dataclass
class Watched(Net):
    """Hosts in this process, whose replies are known to be in memory or not."""

    replies: list[weakref.ref[memoryview]] = field(default_factory=list)

    def exchange(
        self, frames: Mapping[str, Frame], **limits: Any
    ) -> Iterator[tuple[str, Frame]]:
        for site, frame in super().exchange(frames, **limits):
            reply = memoryview(frame)
            self.replies.append(weakref.ref(reply))
            yield site, reply

    def count_replies(self) -> int:
        return sum(reply() is not None for reply in self.replies)


def test_the_replies_are_freed_before_what_was_sent_is_copied(tmp_path: Path) -> None:
    """The copy of the tensors that were sent before is freed earlier still."""
    sites: dict[str, Any] = {site: lambda site=site: Toy(site) for site in SITES}
    net = Watched(sites, tmp_path)
    engine = net.engine(SITES)
    copies, held = list[weakref.ref[torch.Tensor]](), list[tuple[int, int]]()

    def copy(tensors: Tensors, folder: Path) -> Tensors:
        num_copies = sum(reference() is not None for reference in copies)
        held.append((net.count_replies(), num_copies))
        copied = copy_or_store_tensors(tensors, folder)
        copies.extend(map(weakref.ref, copied.values()))
        return copied

    with mock.patch.object(deployed, "copy_or_store_tensors", copy):
        for turn in engine.rounds(0, 3):
            engine.sum("train", {"x": torch.ones(4)}, round=turn.number)
            turn.commit(State(turn.number + 1, {}, {}), {})
    assert held == [(0, 0)] * 3


def test_late_joiners_catch_up_on_the_tasks_before_the_first_round(
    tmp_path: Path,
) -> None:
    net, events = toys(tmp_path), list[Event]()
    engine = net.engine(SITES, replace(STRICT, min_sites=2), notify=events.append)
    net.down = {"c"}
    took: dict[tuple[int, str], tuple[str, ...]] = {}
    original = engine.rounds

    def rounds(start: int, stop: int) -> Iterator[Any]:
        for turn in original(start, stop):
            if turn.number == 2:
                net.down = set()
            yield turn

    with mock.patch.object(engine, "rounds", rounds):
        result = toy_job(engine, took)
    assert took[-1, "count"] == took[1, "train"] == ("a", "b")
    assert took[2, "train"] == SITES
    assert result.tobytes() == by_hand(took).tobytes()
    tasks = [request.task for site, request, _ in net.sent if site == "c"]
    first = tasks.index("count")
    assert tasks[first : first + 3] == ["count", "share", "train"]
    assert [e.site for e in events if e.kind == "joined"] == ["a", "b", "c"]


def test_the_engine_waits_for_enough_sites_and_reports_it_and_may_give_up(
    tmp_path: Path,
) -> None:
    net, events = toys(tmp_path, down={"a", "c"}), list[Event]()
    engine = net.engine(SITES, replace(STRICT, min_sites=2), notify=events.append)
    with pytest.raises(
        TrainingError, match=r"a, c did not answer task '@begin' within 3.. seconds"
    ):
        engine.sum("count")
    assert "'@begin': waiting for a, c; answers so far: 1" in {
        event.text for event in events
    }
    assert 300 <= net.now < 320


def test_grace_closes_a_round_early(tmp_path: Path) -> None:
    net = toys(tmp_path)
    engine = net.engine(SITES, replace(STRICT, min_sites=2, timeout=100, grace=3))
    engine.sum("count")
    net.down, before = {"c"}, net.now
    with mock.patch.object(Net, "exchange", patient):
        assert engine.sum("count").included == ("a", "b")
    assert net.now - before == pytest.approx(3, abs=0.5)


def patient(
    self: Net, frames: Mapping[str, Frame], *, timeout: float, grace: float, enough: int
) -> Iterator[tuple[str, Frame]]:
    """A transport that ends exchanges as the protocol says."""
    reachable = [site for site in frames if site not in self.down]
    for site in reachable:
        yield site, self.host(site).handle(frames[site])
    self.now += 0 if len(reachable) == len(frames) else min(timeout, grace)


def test_refusals_end_the_job_if_too_few_sites_remain(tmp_path: Path) -> None:
    net, events = toys(tmp_path), list[Event]()
    with pytest.raises(TrainingError, match=r"'hop': 0 sites can be added, 3 are needed: site 'a' has no task 'hop'; site"):  # fmt: skip
        net.engine(SITES, notify=events.append).sum("hop")
    (tmp_path / "server" / "run.json").unlink()
    with pytest.raises(
        TrainingError, match="too few sites can take part: site 'a' has approved"
    ):
        net.engine(SITES, job="other").sum("count")
    assert {event.kind for event in events} == {"joined", "refused"}


@pytest.mark.parametrize(
    ("update", "limit", "reason"),
    [
        (Update({"least": torch.ones(5)}, 1.0), 0, "shape (5,), expected (4,)"),
        (Update({"other": torch.ones(4)}, 1.0), 0, "tensor 'least' is missing"),
        (Update({"least": torch.ones(4).double()}, 1.0), 0, "type torch.float64"),
        (
            Update({"least": torch.full((4,), 99.0)}, 1.0),
            50,
            "norm is above 50 (it is 198)",
        ),
    ],
)
def test_a_bad_update_is_left_out_and_undone_at_its_site(
    update: Update, limit: float, reason: str, tmp_path: Path
) -> None:
    net, events = toys(tmp_path), list[Event]()
    engine = net.engine(
        SITES, replace(STRICT, min_sites=2), notify=events.append, max_norm=limit
    )
    x = {"x": torch.ones(4)}
    net.host("b")._prepare_site()
    bad = mock.patch.object(net.host("b")._site, "train", return_value=update)
    with bad:
        assert engine.sum("train", x, round=0).included == ("a", "c")
    assert [event.site for event in events if event.kind == "refused"] == ["b"]
    assert reason in next(event.text for event in events if event.kind == "refused")
    next(engine.rounds(0, 1))
    assert engine.sum("train", x, round=0).included == SITES
    assert net.hosts["b"]._journal.last == engine._members.counted["b"]


def test_a_site_cannot_answer_for_another(tmp_path: Path) -> None:
    net, events = toys(tmp_path), list[Event]()
    net.hosts["b"] = net.host("a")
    with pytest.raises(TrainingError, match="b did not answer task"):
        net.engine(SITES, notify=events.append).sum("count")
    assert "site 'b' answered in the name of 'a'" in {event.text for event in events}


class Scripted:
    """A transport whose only site returns the next of these replies each time."""

    def __init__(self, *replies: Reply) -> None:
        self.replies = list(replies)

    def exchange(
        self, frames: Mapping[str, Frame], **limits: Any
    ) -> Iterator[tuple[str, Frame]]:
        yield "a", encode_message(self.replies.pop(0))


def collect_answers(
    counted: int, *replies: Reply
) -> tuple[CollectedReplies, list[tuple[str, str]]]:
    """Return the replies to request 9 of run 3 from one site, and the events."""
    logged: list[tuple[str, str]] = []
    members = Participants(
        Scripted(*replies),
        STRICT,
        lambda event: logged.append((event.kind, event.text)),
        job=JOB,
        server_start=3,
        progress=RunState(9, {"a": counted}, {"a": 0}),
        sleep=lambda seconds: None,
    )
    return members.ask(
        {"a": Request(JOB, 3, 9, "t", counted={"a": counted})}, least=1
    ), logged


@pytest.mark.parametrize(
    "changes", [{"job": "job-2"}, {"server_start": 2}, {"number": 8}], ids=str
)
def test_a_reply_to_another_request_is_dropped(changes: dict[str, Any]) -> None:
    right = Reply(JOB, 3, 9, "a", Update({"x": torch.ones(1)}))
    answers, logged = collect_answers(0, replace(right, **changes), right)
    assert [kind for kind, _ in logged] == ["late"]
    assert {name: getattr(answers.replies["a"], name) for name in changes} == {
        name: getattr(right, name) for name in changes
    }


def test_attached_tensors_are_limited_in_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """40 bytes of numbers, as a secure sum sends instead of an update."""
    words = {"words": torch.zeros(5, dtype=torch.int64)}
    reply = Reply(JOB, 3, 9, "a", Update(), attached=Attached(tensors=words))
    for limit, accepted in ((40, True), (39, False)):
        monkeypatch.setattr("fednotes.engines.requests.MOST_BYTES", limit)
        answers, logged = collect_answers(4, reply)
        assert ("a" in answers.replies) == accepted
        if not accepted:
            assert logged == [
                ("refused", "site 'a' attached 40 bytes, but at most 39 are accepted")
            ]
            assert (answers.refused["a"].has, answers.refused["a"].attached) == (
                4,
                Attached(),
            )


# what is kept


def test_rounds_are_observed_and_bytes_equal_the_frames(tmp_path: Path) -> None:
    rounds: list[RoundResult] = []
    net = toys(tmp_path)
    engine = net.engine(SITES, observer=rounds.append)
    toy_job(engine, {})
    assert [(r.round, r.evaluated, r.sites) for r in rounds] == [
        (0, False, 3), (1, True, 3), (2, False, 3), (3, True, 3), (4, False, 3)
    ]  # fmt: skip
    assert engine.bytes_down == sum(len(frame) for _, _, frame in net.sent)
    assert rounds[-1].replies == {}
    files = sorted(p.name for p in (tmp_path / "server").iterdir())
    assert files == ["round-00000002", "round-00000004", "run.json"]
    again = net.engine(SITES)
    state = again.resume()
    assert state is not None
    assert state.round == 4
    assert again.bytes_down >= rounds[3].bytes_down
    engine.end()
    assert all(host.ended for host in net.hosts.values())


def test_a_checkpoint_is_written_after_some_time(tmp_path: Path) -> None:
    net = toys(tmp_path)
    toy_job(net.engine(SITES, replace(STRICT, checkpoint_seconds=0)), {})
    names = sorted(p.name for p in (tmp_path / "server").glob("round-*"))
    assert names == ["round-00000004", "round-00000005"]


def test_a_full_disk_at_the_server_ends_the_run_and_it_can_be_resumed(
    tmp_path: Path,
) -> None:
    net = toys(tmp_path)
    reference = toy_job(Net(net.makes, tmp_path / "whole").engine(SITES), {})

    def full(tensors: Any, path: Path) -> None:
        if "server" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(tensors, path)

    real = core_tensors.save_file
    with (
        mock.patch.object(core_tensors, "save_file", full),
        pytest.raises(FednotesError, match="No space left on device"),
    ):
        toy_job(net.engine(SITES), {})
    assert toy_job(net.engine(SITES), {}).tobytes() == reference.tobytes()


def test_checkpoints_of_other_jobs_and_sites_are_refused(tmp_path: Path) -> None:
    net = toys(tmp_path)
    toy_job(net.engine(SITES), {})
    with pytest.raises(
        ModelError, match="the checkpoint has the sites a, b, c, but the job has a, c"
    ):
        net.engine(("a", "c"))
    with pytest.raises(
        ModelError, match="holds job job-1, but this is job other: use another"
    ):
        net.engine(SITES, job="other")
    (tmp_path / "server" / "run.json").write_text("?")
    with pytest.raises(
        ModelError,
        match=r"damaged: replace its content with .*number of times this job was started",
    ):
        net.engine(SITES)
    with pytest.raises(
        TrainingError, match="4 or more with different names are needed"
    ):
        net.engine(SITES, Patience(min_sites=4))
    with pytest.raises(ConfigError, match="timeout = 0: expected more than 0"):
        Patience(timeout=0)


# the place of a secure sum


def test_the_state_of_the_method_is_stored_unchanged(tmp_path: Path) -> None:
    net = toys(tmp_path)
    engine = net.engine(SITES)
    engine.sum("count")
    turn = next(engine.rounds(0, 1))
    state = State(1, {"a/b": torch.tensor([1.5])}, {"names": ["x"], "best": None})
    turn.commit(state, {}, evaluated=True)
    resumed = net.engine(SITES).resume()
    assert resumed is not None
    assert (resumed.round, resumed.facts) == (1, state.facts)
    assert torch.equal(resumed.tensors["a/b"], state.tensors["a/b"])
