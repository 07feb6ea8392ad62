"""Sites in other processes: sums, checkpoints and errors equal those of one process."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_toy import SITES, Toy, toy_job
from held_sites import HeldSites, held_in_two
from method_runs import read_files

from fednotes.core.errors import (
    DataError,
    FednotesError,
    LossError,
    ModelError,
    Problem,
    TrainingError,
)
from fednotes.core.pipes import FramePipe, PipeClosedError
from fednotes.engines.inprocess import InProcess
from fednotes.engines.remote_programs import RemotePrograms
from fednotes.engines.rounds import RoundResult
from fednotes.engines.simulation import Simulation

X = {"x": torch.zeros(4)}


def toys(**inside: Callable[[], None]) -> list[Toy]:
    return [Toy(site, inside.get(site, lambda: None)) for site in SITES]


def steady(result: RoundResult) -> tuple[Any, ...]:
    """Return a round without its seconds, in the order of its tables."""
    replies = [
        (task, [(site, list(metrics.items())) for site, metrics in by_site.items()])
        for task, by_site in result.replies.items()
    ]
    return (
        result.round,
        dict(result.metrics),
        result.bytes_up,
        result.bytes_down,
        result.evaluated,
        replies,
    )


@pytest.mark.parametrize("secure", [False, True])
def test_rounds_bytes_and_checkpoints_equal_those_of_one_process(
    secure: bool, tmp_path: Path
) -> None:
    here: list[RoundResult] = []
    there: list[RoundResult] = []
    one = InProcess(
        toys(), directory=tmp_path / "one", observer=here.append, secure=secure
    )
    several = Simulation(
        held_in_two(toys()),
        directory=tmp_path / "several",
        observer=there.append,
        secure=secure,
    )
    assert toy_job(one, {}).tobytes() == toy_job(several, {}).tobytes()
    assert list(map(steady, there)) == list(map(steady, here))
    assert (several.bytes_up, several.bytes_down) == (one.bytes_up, one.bytes_down)
    tensors = {
        name: content
        for name, content in read_files(tmp_path / "one").items()
        if name.endswith("tensors.safetensors")
    }
    assert len(tensors) == 2
    others = read_files(tmp_path / "several")
    assert {name: others[name] for name in tensors} == tensors


def test_sites_in_other_processes_resume_from_a_checkpoint_of_one_process(
    tmp_path: Path,
) -> None:
    """And the other way round: a run may resume with another number of workers."""
    whole = toy_job(InProcess(toys(), directory=tmp_path / "a"), {}).tobytes()
    resumed = Simulation(held_in_two(toys()), directory=tmp_path / "a", resume=True)
    assert resumed.resume() is not None
    assert toy_job(resumed, {}).tobytes() == whole
    toy_job(Simulation(held_in_two(toys()), directory=tmp_path / "b"), {})
    back = InProcess(toys(), directory=tmp_path / "b", resume=True)
    assert back.resume() is not None
    assert toy_job(back, {}).tobytes() == whole


def test_a_task_may_run_at_selected_sites_only() -> None:
    programs = held_in_two(toys())
    updates = programs.run("count", {}, {}, ["c", "a"])
    assert [(site, update.metrics) for site, update in updates] == [
        ("a", {"size": 3}),
        ("c", {"size": 7}),
    ]


# errors


def raising(error: Exception) -> Callable[[], None]:
    def raise_error() -> None:
        raise error

    return raise_error


@pytest.mark.parametrize(
    "error",
    [
        TrainingError("the site has no patients: check the paths"),
        LossError("b", float("nan"), "at step 3", "lower learning_rate"),
        DataError.of(
            [Problem("a.txt", 3, "line", "no tag"), Problem("", 0, "file", "x")]
        ),
        OSError(28, "No space left on device", "/runs/model"),
        MemoryError("allocate memory"),
        ValueError("too short"),
    ],
)
def test_an_error_of_a_site_is_passed_on_unchanged(error: Exception) -> None:
    caught = []
    for engine in (
        InProcess(toys(b=raising(error))),
        Simulation(held_in_two(toys(b=raising(error)))),
    ):
        with pytest.raises(type(error)) as raised:
            engine.sum("train", X, round=0)
        caught.append(raised.value)
    here, there = caught
    assert type(there) is type(here)
    assert str(there) == str(here)
    known = {k: v for k, v in vars(here).items() if not k.startswith("__")}
    assert {k: v for k, v in vars(there).items() if not k.startswith("__")} == known
    if isinstance(here, OSError):
        assert isinstance(there, OSError)
        assert (there.errno, there.filename) == (here.errno, here.filename)
    is_unexpected = not isinstance(here, FednotesError)
    assert hasattr(there, "__notes__") == is_unexpected


class LibraryError(RuntimeError):
    """An error of a class that the other process may not know."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def test_an_error_of_an_unknown_class_becomes_one_of_its_base_class() -> None:
    engine = Simulation(held_in_two(toys(a=raising(LibraryError("it broke", 3)))))
    with pytest.raises(RuntimeError, match="it broke") as raised:
        engine.sum("train", X, round=0)
    assert "fault_toy.py" in raised.value.__notes__[0]


def test_the_error_of_the_first_failing_site_is_raised() -> None:
    first = raising(TrainingError("the first"))
    second = raising(TrainingError("the second"))
    sites = toys(a=second, b=first)
    links = {"b": HeldSites([sites[1]]), "a": HeldSites([sites[0]])}
    engine = Simulation(RemotePrograms(links))
    with pytest.raises(TrainingError, match="the first"):
        engine.sum("train", X, round=0)


def test_a_later_request_skips_unread_replies() -> None:
    engine = Simulation(held_in_two(toys(a=raising(TrainingError("once")))))
    with pytest.raises(TrainingError, match="once"):
        engine.sum("train", X, round=0)
    assert engine.sum("count").metrics == {"size": 15.0}


def test_a_site_in_another_process_has_only_its_tasks() -> None:
    with pytest.raises(TrainingError, match="site 'a' has no task 'state'"):
        Simulation(held_in_two(toys())).sum("state")


def test_a_damaged_state_is_refused_with_the_error_of_one_process(
    tmp_path: Path,
) -> None:
    engine = InProcess(toys(), directory=tmp_path)
    toy_job(engine, {})

    class Strict(Toy):
        def restore(self, state: Any) -> None:
            raise KeyError("own")

    programs = held_in_two([Strict(site) for site in SITES])
    with pytest.raises(ModelError, match="every checkpoint is damaged"):
        Simulation(programs, directory=tmp_path, resume=True)


# pipes


def test_frames_larger_than_a_pipe_arrive_complete_and_writable() -> None:
    reading, writing = os.pipe()
    pipe = FramePipe(reading, writing)
    frames = [b"", b"a", os.urandom(3_000_000)]
    sender = threading.Thread(target=lambda: [pipe.send(frame) for frame in frames])
    sender.start()
    received = [pipe.receive() for _ in frames]
    sender.join()
    assert received == frames
    received[1][0] = 66
    os.close(writing)
    with pytest.raises(PipeClosedError):
        pipe.receive()
    os.close(reading)


def test_a_frame_that_nobody_reads_raises_an_error_of_the_pipe() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(PipeClosedError):
        FramePipe(reading, writing).send(b"frame")
    os.close(writing)
