"""The embedded engine: what it calls, counts, keeps and goes on from."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from tiny_notes import DRUGS, tiny_site

from fednotes.core.errors import ModelError, TrainingError
from fednotes.core.federation import State
from fednotes.core.tensors import load_state
from fednotes.core.update import Tensors, Update
from fednotes.engines.inprocess import InProcess
from fednotes.engines.rounds import KEPT_CHECKPOINTS, RoundResult
from fednotes.methods import fedner
from fednotes.taggers.tagger import TaggerConfig


class Counter:
    """A site that adds its number to what it is sent, and counts how often."""

    tasks: ClassVar[frozenset[str]] = frozenset({"add", "evaluate"})

    def __init__(self, name: str, number: float) -> None:
        self._id, self.number = name, number
        self.calls = 0

    @property
    def id(self) -> str:
        return self._id

    def add(self, tensors: Tensors, *, round: int = 0, scale: float = 1.0) -> Update:
        self.calls += 1
        value = tensors["x"] + self.number * scale
        return Update({"x": value}, 2, {"n": 1.0, "r": float(round)})

    def evaluate(self, tensors: Tensors) -> Update:
        return Update(metrics={"calls": float(self.calls)})

    def hidden(self, tensors: Tensors) -> Update:
        raise AssertionError("not a task")

    def state(self) -> State:
        return State(self.calls, {"calls": torch.tensor(self.calls)}, {"name": self._id})

    def restore(self, state: State) -> None:
        assert state.facts == {"name": self._id}
        self.calls = int(state.tensors["calls"])


def counters(*names: str) -> list[Counter]:
    return [Counter(name, float(i)) for i, name in enumerate(names or ("a", "b", "c"))]


X = {"x": torch.zeros(5)}


def test_a_sum_and_its_mean() -> None:
    """Numbers 0, 1 and 2 with weight 2 each: the sum is 6, the mean 1."""
    engine = InProcess(counters())
    total = engine.sum("add", X, round=4)
    assert total.tensors["x"].tolist() == [6.0] * 5
    assert total.mean()["x"].tolist() == [1.0] * 5
    assert total.metrics == {"n": 3.0, "r": 12.0}
    assert (total.weight, total.sites) == (6.0, 3)
    assert engine.sum("add", X, scale=10.0).tensors["x"].tolist() == [60.0] * 5


def test_only_tasks_are_called() -> None:
    with pytest.raises(TrainingError, match="at least one site"):
        InProcess([])
    for name in ("hidden", "__init__", "nothing"):
        with pytest.raises(TrainingError, match=f"site 'a' has no task '{name}'"):
            InProcess(counters()).sum(name)


def test_bytes_are_those_of_numbers() -> None:
    """Down: 5 float32 and one option of 8 bytes. Up: 5 float32, a weight, two metrics."""
    engine = InProcess(counters())
    engine.sum("add", X, round=4)
    assert (engine.bytes_down, engine.bytes_up) == (3 * (20 + 8), 3 * (20 + 8 + 16))
    engine.sum("evaluate")
    assert (engine.bytes_down, engine.bytes_up) == (3 * 28, 3 * (44 + 16))


def run(engine: InProcess, rounds: int, each: int = 2) -> torch.Tensor:
    """x ← mean over sites of x + number, so x is the round; evaluated every `each` rounds."""
    state = engine.resume() or State(0, {"x": torch.zeros(1)}, {"note": ["kept"]})
    for turn in engine.rounds(state.round, rounds):
        x = engine.sum("add", state.tensors, round=turn.number).mean()
        state = State(turn.number + 1, x, state.facts)
        evaluated = (turn.number + 1) % each == 0
        if evaluated:
            engine.sum("evaluate")
        turn.commit(state, {"x": float(x["x"])}, evaluated=evaluated)
    assert state.facts == {"note": ["kept"]}
    return state.tensors["x"]


def test_the_observer_sees_every_round(tmp_path: Path) -> None:
    seen: list[RoundResult] = []
    engine = InProcess(counters(), directory=tmp_path, observer=seen.append)
    assert run(engine, 5).tolist() == [5.0]
    assert [r.round for r in seen] == [0, 1, 2, 3, 4]
    assert [r.evaluated for r in seen] == [False, True, False, True, False]
    assert [r.metrics["x"] for r in seen] == [1, 2, 3, 4, 5]
    assert {r.sites for r in seen} == {3}
    assert seen[3].replies["evaluate"] == {site: {"calls": 4.0} for site in "abc"}
    assert seen[-1].bytes_up == engine.bytes_up
    assert all(a.seconds <= b.seconds for a, b in pairwise(seen))


def test_checkpoints_hold_both_sides_and_only_the_last_are_kept(tmp_path: Path) -> None:
    first = InProcess(counters(), directory=tmp_path)
    run(first, 9)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["round-00000006", "round-00000008"]
    assert len(names) == KEPT_CHECKPOINTS
    sites = counters()
    again = InProcess(sites, directory=tmp_path, resume=True)
    assert [site.calls for site in sites] == [8, 8, 8]
    state = again.resume()
    assert state is not None
    assert (state.round, state.tensors["x"].tolist()) == (8, [8.0])
    assert run(again, 12).tolist() == [12.0]
    whole = InProcess(counters())
    run(whole, 12)
    assert (again.bytes_up, again.bytes_down) == (whole.bytes_up, whole.bytes_down)


def test_time_goes_on_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock: Iterator[float] = iter(range(0, 1000, 10))
    monkeypatch.setattr("fednotes.engines.inprocess.time.monotonic", lambda: next(clock))
    run(InProcess(counters(), directory=tmp_path), 2)
    monkeypatch.setattr("fednotes.engines.inprocess.time.monotonic", lambda: 5.0)
    kept = load_state(tmp_path / "round-00000002")[1]["seconds"]
    assert InProcess(counters(), directory=tmp_path, resume=True).seconds == kept > 0


def test_without_resume_or_checkpoints_a_run_starts_afresh(tmp_path: Path) -> None:
    assert InProcess(counters(), directory=tmp_path / "none", resume=True).resume() is None
    assert InProcess(counters(), resume=True).resume() is None
    run(InProcess(counters(), directory=tmp_path), 2)
    assert InProcess(counters(), directory=tmp_path).resume() is None


def test_checkpoints_of_other_sites_are_refused(tmp_path: Path) -> None:
    run(InProcess(counters(), directory=tmp_path), 2)
    for names in ("ab", "acb", "abcd"):
        with pytest.raises(ModelError, match="the checkpoint is of sites a, b, c"):
            InProcess(counters(*names), directory=tmp_path, resume=True)


# many sites


def settings(vectors: Path) -> fedner.Config:
    model = TaggerConfig(
        word_vectors=str(vectors), char_dim=3, char_filters=4, cnn_filters=5, lstm_units=3
    )
    return fedner.Config(model=model, batch_size=64, epochs=1, tags=DRUGS)


def kept(members: list[fedner.Site]) -> int:
    """Bytes of all distinct tensors that the sites hold on to, frozen tables included."""
    storages: dict[int, int] = {}
    for member in members:
        held = [*member.model.parameters(), *member.model.buffers(), *member.best.tensors.values()]
        held += [*member.adam.state().values()]
        if member.model.vectors is not None:
            held.append(member.model.vectors.table)
        for tensor in held:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def test_a_hundred_sites_train_and_grow_with_the_trainable_state_alone(tmp_path: Path) -> None:
    """Frozen word vectors are held once. A site adds its parameters (p floats), their best
    values (p), and the private ones' two moments (2 q) with a step each, and buffers."""
    vectors = tmp_path / "vectors.txt"
    rows = (" ".join([f"w{i}", *["0.5"] * 50]) for i in range(2000))
    vectors.write_text("\n".join(["aspirin" + " 0.1" * 50, *rows]) + "\n")
    sizes, config = {}, settings(vectors)
    for number in (10, 100):
        members = [fedner.Site(tiny_site(i), config) for i in range(number)]
        engine = InProcess(members)
        fedner.train(engine, config)
        sizes[number] = kept(members)
        assert all(m.scores["strict"]["f1"] >= 0 for m in members)
    assert {m.share for m in members} == {1}  # a batch of 64 has one sentence for each of 100
    member = members[0]
    parameters = sum(p.nbytes for p in member.model.trainable().values())
    private = sum(p.nbytes for p in member.private.values())
    buffers = sum(b.nbytes for b in member.model.buffers())
    expected = 2 * parameters + 2 * private + 4 * len(member.private) + buffers
    assert (sizes[100] - sizes[10]) / 90 == expected
    assert len({id(m.model.vectors) for m in members}) == 1
