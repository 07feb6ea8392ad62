"""The in-process engine: its calls, counts, checkpoints and resumption."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_toy import SITES, Took, Toy, by_hand, toy_job
from tiny_notes import DRUGS, tiny_site

from fednotes.core.errors import ModelError, RefusedError, TrainingError
from fednotes.core.federation import State
from fednotes.core.tensors import load_state
from fednotes.engines.inprocess import InProcess
from fednotes.engines.rounds import KEPT_CHECKPOINTS, RoundResult
from fednotes.methods import fedner
from fednotes.taggers.tagger import TaggerConfig

X = {"x": torch.zeros(4)}


def engine_of(sites: Sequence[str] = SITES, **options: Any) -> InProcess:
    return InProcess([Toy(site) for site in sites], **options)


def test_the_toy_job_gives_the_result_computed_by_hand() -> None:
    took: Took = {}
    result = toy_job(engine_of(), took)
    assert set(took.values()) == {SITES}
    assert result.tobytes() == by_hand(took).tobytes()


def test_only_tasks_can_be_called() -> None:
    with pytest.raises(TrainingError, match="at least one site"):
        InProcess([])
    for name in ("state", "__init__", "nothing"):
        with pytest.raises(TrainingError, match=f"site 'a' has no task '{name}'"):
            engine_of().sum(name)


def test_bytes_are_counted_per_number() -> None:
    """Down: 4 float32 numbers and one option of 8 bytes.

    Up: 4 float32 numbers, a weight and a metric.
    """
    engine = engine_of()
    engine.sum("train", X, round=4)
    assert (engine.bytes_down, engine.bytes_up) == (3 * (16 + 8), 3 * (16 + 8 + 8))
    engine.sum("evaluate", X)
    assert (engine.bytes_down, engine.bytes_up) == (3 * (24 + 16), 3 * (32 + 16))


def test_the_observer_sees_every_round(tmp_path: Path) -> None:
    rounds: list[RoundResult] = []
    engine = engine_of(directory=tmp_path, observer=rounds.append)
    toy_job(engine, {})
    assert [r.round for r in rounds] == [0, 1, 2, 3, 4]
    assert [r.evaluated for r in rounds] == [False, True, False, True, False]
    assert {r.sites for r in rounds} == {3}
    assert rounds[3].replies["evaluate"] == {site: {"steps": 4.0} for site in SITES}
    assert rounds[-1].bytes_up == engine.bytes_up - 3 * 16  # of the end
    assert all(a.seconds <= b.seconds for a, b in pairwise(rounds))
    next(engine.rounds(5, 6)).commit(State(6, X), {"x": 1.5})
    assert rounds[-1].metrics == {"x": 1.5}


def test_checkpoints_hold_server_and_sites_and_only_the_last_are_kept(
    tmp_path: Path,
) -> None:
    uninterrupted = engine_of(directory=tmp_path)
    result = toy_job(uninterrupted, {})
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["round-00000002", "round-00000004"]
    assert len(names) == KEPT_CHECKPOINTS
    again = engine_of(directory=tmp_path, resume=True)
    assert [site.steps for site in again._sites] == [4, 4, 4]  # type: ignore[attr-defined]
    state = again.resume()
    assert state is not None
    assert state.round == 4
    assert toy_job(again, {}).tobytes() == result.tobytes()
    # What the sites were told before is sent once more to them, who are new.
    assert (again.bytes_up, again.bytes_down) == (
        uninterrupted.bytes_up,
        uninterrupted.bytes_down + 3 * 16,
    )


def test_time_continues_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock: Iterator[float] = iter(range(0, 1000, 10))
    monkeypatch.setattr(
        "fednotes.engines.simulation.time.monotonic", lambda: next(clock)
    )
    toy_job(engine_of(directory=tmp_path), {})
    monkeypatch.setattr("fednotes.engines.simulation.time.monotonic", lambda: 5.0)
    saved_seconds = load_state(tmp_path / "round-00000004")[1]["seconds"]
    assert engine_of(directory=tmp_path, resume=True).seconds == saved_seconds > 0


def test_a_run_starts_afresh_without_resume_or_checkpoints(tmp_path: Path) -> None:
    assert engine_of(directory=tmp_path / "none", resume=True).resume() is None
    assert engine_of(resume=True).resume() is None
    toy_job(engine_of(directory=tmp_path), {})
    assert engine_of(directory=tmp_path).resume() is None
    for names in ("ab", "acb"):
        with pytest.raises(ModelError, match="the checkpoint has the sites a, b, c"):
            engine_of(names, directory=tmp_path, resume=True)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_neither_reported_nor_stored(
    value: float, tmp_path: Path
) -> None:
    rounds: list[RoundResult] = []
    engine = engine_of(directory=tmp_path, observer=rounds.append)
    first, second = engine.rounds(0, 2)
    first.commit(State(1, X), {}, evaluated=True)
    with pytest.raises(
        TrainingError, match=r"round 2: 'x' of the server's state is not finite"
    ):
        second.commit(State(2, {"x": torch.full((4,), value)}), {}, evaluated=True)
    assert [result.round for result in rounds] == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["round-00000001"]


def test_a_site_in_this_process_computes_only_with_finite_numbers() -> None:
    with pytest.raises(
        RefusedError, match="site 'a': tensor 'x' that came with task 'train'"
    ):
        engine_of().sum("train", {"x": torch.full((4,), float("nan"))}, round=0)


# many sites


def settings(vectors: Path) -> fedner.Config:
    model = TaggerConfig(
        word_vectors=str(vectors),
        char_dim=3,
        char_filters=4,
        cnn_filters=5,
        lstm_units=3,
    )
    return fedner.Config(model=model, batch_size=64, epochs=1, tags=DRUGS)


def count_numbers(members: list[fedner.Site]) -> int:
    """Return the bytes of all tensors of the sites, shared ones once."""
    storages: dict[int, int] = {}
    for member in members:
        tensors = [
            *member.model.parameters(),
            *member.model.buffers(),
            *member.best.tensors.values(),
        ]
        tensors += [*member.adam.state().values()]
        if member.model.vectors is not None:
            tensors.append(member.model.vectors.table)
        for tensor in tensors:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.slow
def test_the_memory_of_a_hundred_sites_grows_only_with_their_trainable_state(
    tmp_path: Path,
) -> None:
    """Frozen word vectors are held once.

    Each site adds its parameters (p floats), their best values (p), two moments (2 q)
    and a step for each private parameter, and buffers.
    """
    vectors = tmp_path / "vectors.txt"
    rows = (" ".join([f"w{i}", *["0.5"] * 50]) for i in range(2000))
    vectors.write_text("\n".join(["aspirin" + " 0.1" * 50, *rows]) + "\n")
    sizes, config = {}, settings(vectors)
    for number in (10, 100):
        members = [fedner.Site(tiny_site(i), config) for i in range(number)]
        engine = InProcess(members)
        fedner.train(engine, config)
        sizes[number] = count_numbers(members)
        assert all(m.scores["strict"]["f1"] >= 0 for m in members)
    # a batch of 64 has one sentence for each of 100
    assert {m.share for m in members} == {1}
    member = members[0]
    parameters = sum(p.nbytes for p in member.model.trainable().values())
    private = sum(p.nbytes for p in member.private.values())
    buffers = sum(b.nbytes for b in member.model.buffers())
    expected = 2 * parameters + 2 * private + 4 * len(member.private) + buffers
    assert (sizes[100] - sizes[10]) / 90 == expected
    assert len({id(m.model.vectors) for m in members}) == 1
