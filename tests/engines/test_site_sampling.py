"""Rounds on sampled sites: who trains, what is summed, restarts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import fault_toy
import numpy as np
import pytest
import torch
from fault_net import Net, ServerKilled
from fault_toy import JOB, ROUNDS, Took, Toy, by_hand, toy_job
from held_sites import held_in_two
from secure_net import Giver

from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.messages import BEGIN, CHECKPOINT, Request
from fednotes.core.seeds import Draws
from fednotes.core.update import Update
from fednotes.engines.history import OPENED, NamedSites
from fednotes.engines.inprocess import InProcess
from fednotes.engines.requests import Event, Patience
from fednotes.engines.rounds import RoundResult
from fednotes.engines.sampling import RoundSampling
from fednotes.engines.secure import SecureSeal, SecureSum
from fednotes.engines.simulation import Simulation
from fednotes.privacy.secure_sum import messages as wire

FIVE = ("a", "b", "c", "d", "e")
EVERYWHERE = frozenset({"evaluate"})
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))]


@pytest.fixture(autouse=True)
def _five_toys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the toy job five sites."""
    monkeypatch.setattr(
        fault_toy, "SIZES", dict(zip(FIVE, (3, 5, 7, 2, 9), strict=True))
    )
    monkeypatch.setattr(fault_toy, "SITES", FIVE)


def sampling(drawn: int = 3, seed: int = 1) -> RoundSampling:
    return RoundSampling(drawn, Draws(seed), EVERYWHERE)


def toys(**options: Any) -> InProcess:
    return InProcess([Toy(site) for site in FIVE], **options)


# ---- the draw ------------------------------------------------------------------------


def test_every_subset_of_the_sites_is_drawn_equally_often() -> None:
    """χ² over all subsets and many seeds. Its 1 - 1e-6 quantile is the limit: a correct
    draw exceeds it with one set of seeds in a million."""
    stats = pytest.importorskip("scipy.stats")
    for drawn in (1, 2, 3, 4):
        subsets = list(combinations(FIVE, drawn))
        repeats = 200 * len(subsets)
        counts = Counter(
            sampling(drawn, seed).draw_sites(round, FIVE)
            for seed in range(repeats // 4)
            for round in range(4)
        )
        assert counts.keys() <= set(subsets)  # in the fixed order, no site twice
        expected = repeats / len(subsets)
        statistic = sum((counts[each] - expected) ** 2 / expected for each in subsets)
        assert statistic < stats.chi2.isf(1e-6, len(subsets) - 1)


def test_draws_of_two_rounds_are_independent() -> None:
    """χ² over the pairs of subsets that consecutive rounds of many seeds have."""
    stats = pytest.importorskip("scipy.stats")
    subsets = list(combinations(FIVE, 2))
    counts = Counter(
        (each.draw_sites(0, FIVE), each.draw_sites(1, FIVE))
        for each in (sampling(2, seed) for seed in range(4_000))
    )
    expected = 4_000 / len(subsets) ** 2
    statistic = sum(
        (counts[pair, next_pair] - expected) ** 2 / expected
        for pair in subsets
        for next_pair in subsets
    )
    assert statistic < stats.chi2.isf(1e-6, len(subsets) ** 2 - 1)


def test_the_draw_of_a_round_depends_only_on_seed_and_round() -> None:
    first = [sampling().draw_sites(round, FIVE) for round in range(20)]
    again = [sampling().draw_sites(round, FIVE) for round in reversed(range(20))]
    assert first == again[::-1]
    assert len(set(first)) > 5
    assert first != [sampling(seed=2).draw_sites(round, FIVE) for round in range(20)]


# ---- what a round computes -----------------------------------------------------------


def test_the_mean_covers_the_drawn_sites_weighted_by_their_examples() -> None:
    """Compared with NumPy: Σ n_k x_k / Σ n_k over the sites of each round."""
    rng = np.random.default_rng(5)
    values = {site: rng.normal(size=4).astype(np.float32) for site in FIVE}
    weights = dict(zip(FIVE, (3, 50, 7, 20, 900), strict=True))
    members = [
        Giver(site, [Update({"x": torch.from_numpy(values[site])}, weights[site])])
        for site in FIVE
    ]
    engine = InProcess(members, sampling=sampling(2))
    for turn in engine.rounds(0, 6):
        drawn = sampling(2).draw_sites(turn.number, FIVE)
        total = engine.sum("give")
        assert total.included == drawn
        weighted = sum(weights[site] * values[site].astype(float) for site in drawn)
        expected = weighted / sum(weights[site] for site in drawn)
        np.testing.assert_allclose(total.mean()["x"].numpy(), expected, rtol=1e-6)
    assert engine.sum("give").included == FIVE  # after the rounds


def test_only_drawn_sites_train_and_all_evaluate() -> None:
    """Compared with the toy job in NumPy, which computes with the sites of each sum."""
    took: Took = {}
    rounds: list[RoundResult] = []
    result = toy_job(toys(sampling=sampling(), observer=rounds.append), took)
    assert result.tobytes() == by_hand(took).tobytes()
    for round in range(ROUNDS):
        drawn = sampling().draw_sites(round, FIVE)
        assert took[round, "train"] == took[round, "send"] == drawn
        assert (rounds[round].drawn, rounds[round].sites) == (drawn, 3)
        assert rounds[round].absent == ()
        assert rounds[round].replies["train"].keys() == set(drawn)
    assert {took[place, "evaluate"] for place in (1, 3)} == {FIVE}
    assert took[-1, "count"] == took[ROUNDS, "finish"] == FIVE


def test_without_sampling_no_site_is_recorded_as_drawn() -> None:
    rounds: list[RoundResult] = []
    toy_job(toys(observer=rounds.append), {})
    assert {result.drawn for result in rounds} == {()}


def test_sites_in_several_processes_give_the_same_result() -> None:
    took: Took = {}
    here = toy_job(toys(sampling=sampling()), took)
    there_took: Took = {}
    programs = held_in_two([Toy(site) for site in FIVE])
    there = toy_job(Simulation(programs, sampling=sampling()), there_took)
    assert (there.tobytes(), there_took) == (here.tobytes(), took)


@pytest.mark.parametrize("kill", range(ROUNDS))
def test_a_resumed_simulation_draws_the_same_sites(kill: int, tmp_path: Path) -> None:
    took: Took = {}
    uninterrupted = toy_job(toys(sampling=sampling()), took)

    def stop(result: RoundResult) -> None:
        if result.round == kill:
            raise KeyboardInterrupt

    again: Took = {}
    with pytest.raises(KeyboardInterrupt):
        toy_job(toys(sampling=sampling(), directory=tmp_path, observer=stop), again)
    resumed = toys(sampling=sampling(), directory=tmp_path, resume=True)
    assert toy_job(resumed, again).tobytes() == uninterrupted.tobytes()
    assert again == took


# ---- the secure sum ------------------------------------------------------------------


def test_a_secure_sum_of_drawn_sites_equals_the_plain_sum() -> None:
    """Up to the rounding of the secure sum: 2^-29 of the largest value of each site."""
    took: Took = {}
    plain = toy_job(toys(sampling=sampling()), took)
    secure_took: Took = {}
    secure = toy_job(toys(sampling=sampling(), secure=True), secure_took)
    assert secure_took == took
    np.testing.assert_allclose(secure, plain, rtol=1e-5)


def test_a_task_without_options_is_another_question_in_each_round() -> None:
    """The sites of a round answer it although other sites answered it before."""
    updates = {site: Update({"x": torch.ones(2)}, 1) for site in FIVE}
    members = [Giver(site, [updates[site]]) for site in FIVE]
    engine = InProcess(members, sampling=sampling(), secure=True)
    for turn in engine.rounds(0, 4):
        total = engine.sum("give")
        assert total.included == sampling().draw_sites(turn.number, FIVE)
        assert total.weight == 3


def secure_options(least: int = 0) -> dict[str, Any]:
    """Return how the thresholds of sums follow from the number of their sites."""

    def threshold_of(num_sites: int) -> int:
        return max(least or num_sites, num_sites // 2 + 1)

    threshold = threshold_of(len(FIVE))
    return {"job": JOB, "threshold": threshold, "threshold_of_drawn": threshold_of}


def network(
    folder: Path, chaos: random.Random | None = None, least: int = 0, **options: Any
) -> Net:
    """Return the toy job's sites between which a secure sum of drawn sites is made."""

    def seal(site: str) -> SecureSeal:
        record = folder / site / OPENED
        return SecureSeal(site, FIVE, record=record, **secure_options(least))

    makes = {site: partial(Toy, site) for site in FIVE}
    return Net(makes, folder, chaos, seal=seal, **options)


def engine_of(net: Net, patience: Patience | None = None, **options: Any) -> Any:
    """Return an engine whose sums are secure if its sites' are."""
    least = patience.min_sites if patience else 0
    if net.seal is not None and "summing" not in options:
        record = net.folder / "server" / "opened"
        options["summing"] = SecureSum(FIVE, record=record, **secure_options(least))
    others = {} if patience is None else {"patience": patience}
    return net.engine(FIVE, sampling=sampling(), **others, **options)


def test_masks_are_shared_only_among_the_drawn_sites(tmp_path: Path) -> None:
    net = network(tmp_path)
    engine = engine_of(net)
    took: Took = {}
    expected: Took = {}
    simulated = toy_job(toys(sampling=sampling(), secure=True), expected)
    assert toy_job(engine, took).tobytes() == simulated.tobytes()
    assert took == expected
    for site, request, _ in net.sent:
        is_of_round = request.task in ("train", "send") or (
            request.task.startswith("@")
            and request.task not in (BEGIN, CHECKPOINT, "@end")
            and len(request.counted) < len(FIVE)
        )
        if is_of_round:
            drawn = sampling().draw_sites(request.round, FIVE)
            assert site in drawn
            assert tuple(name for name in FIVE if name in request.counted) == drawn
    keyed = {
        (request.round, site)
        for site, request, _ in net.sent
        if request.task == "@keys" and len(request.counted) == 3
    }
    assert keyed == {
        (round, site)
        for round in range(ROUNDS)
        for site in sampling().draw_sites(round, FIVE)
    }


@pytest.mark.parametrize("is_secure", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_faults_and_restarts_do_not_change_the_result(
    seed: int, is_secure: bool, tmp_path: Path
) -> None:
    """Messages are lost and repeated, sites and the server are killed; all drawn sites
    are needed, so the result is that of a run without faults."""
    expected: Took = {}
    uninterrupted = toy_job(toys(sampling=sampling(), secure=is_secure), expected)
    net = network(tmp_path, random.Random(seed), failures_left=3)
    if not is_secure:
        net.seal = None
    took: Took = {}
    while True:
        try:
            result = toy_job(engine_of(net), took)
            break
        except (ServerKilled, TrainingError):  # too few were left to open a sum
            continue
    assert result.tobytes() == uninterrupted.tobytes()
    assert took == expected


def test_only_drawn_sites_can_be_absent(tmp_path: Path) -> None:
    """Two of the three drawn sites suffice; a site that was not drawn is not missed."""
    patience = Patience(
        min_sites=2, timeout=10, knock=1, knock_every=0, pause=1, give_up=300
    )
    rounds: list[RoundResult] = []
    net = network(tmp_path, least=2)
    engine = engine_of(net, patience, observer=rounds.append)
    took: Took = {}
    away = sampling().draw_sites(2, FIVE)[1]
    net.before = lambda task: None if task != "send" else net.down.clear()
    original = net.exchange

    def exchange(frames: Any, **limits: Any) -> Iterator[Any]:
        if engine._members.round == 2 and not rounds[2:]:
            net.down.add(away)
        return original(frames, **limits)

    net.exchange = exchange  # type: ignore[method-assign]
    engine._members._transport = net
    result = toy_job(engine, took)
    assert away not in took[2, "train"]
    assert rounds[2].absent == (away,)
    assert rounds[2].drawn == sampling().draw_sites(2, FIVE)
    assert [result.absent for result in rounds if result.round != 2] == [()] * 4
    np.testing.assert_allclose(result, by_hand(took), rtol=1e-5)


def test_a_round_waits_only_for_drawn_sites(tmp_path: Path) -> None:
    net = network(tmp_path)
    net.seal = None
    events: list[Event] = []
    engine = engine_of(net, notify=events.append)
    engine.sum("count")
    for turn in engine.rounds(0, 1):
        drawn = sampling().draw_sites(turn.number, FIVE)
        net.down = set(FIVE) - set(drawn)
        assert engine.sum("train", {"x": torch.ones(4)}, round=0).included == drawn
        net.down = {drawn[0]}
        with pytest.raises(TrainingError, match=f"{drawn[0]} did not answer"):
            engine.sum("send", {"scale": torch.ones(4)})
    assert any(event.kind == "waiting" for event in events)


# ---- a server that lies --------------------------------------------------------------


def test_a_question_is_masked_for_only_one_list_of_sites(tmp_path: Path) -> None:
    """A restarted server that draws others for the same round gets no second sum."""
    net = network(tmp_path)
    summing = SecureSum(FIVE, **secure_options())
    engine = engine_of(net, summing=summing)
    engine.sum("count")
    x = {"x": torch.ones(4)}
    for _ in engine.rounds(0, 1):
        engine.sum("train", x, round=0)
    other_sampling = RoundSampling(3, Draws(2), EVERYWHERE)
    first, second = (each.draw_sites(0, FIVE) for each in (sampling(), other_sampling))
    assert 0 < len(set(first) & set(second)) < 3
    refusals: list[str] = []
    again = net.engine(
        FIVE,
        sampling=other_sampling,
        summing=SecureSum(FIVE, **secure_options()),
        notify=lambda event: refusals.append(event.text),
    )
    again.sum("count")
    for _ in again.rounds(0, 1):
        with pytest.raises(TrainingError, match="requested before for a sum over"):
            again.sum("train", x, round=0)
    opened = (tmp_path / first[0] / OPENED).read_text()
    assert all(site in first or "train" not in opened for site in first)
    assert any("it is not masked for others" in text for text in refusals)


def test_keys_for_sites_outside_the_task_open_nothing(tmp_path: Path) -> None:
    """The task is for three sites as the policy demands, the keys are for other ones."""
    net = network(tmp_path)
    engine = engine_of(net)
    engine.sum("count")
    seal = SecureSeal("a", FIVE, **secure_options())
    drawn, others = ("a", "b", "c"), ("a", "d", "e")
    keys = Request(
        JOB,
        1,
        1,
        wire.KEYS,
        counted=dict.fromkeys(others, 0),
        attached=wire.pack(wire.Stage(1)),
    )
    seal.answer_stage(keys)
    terms = wire.Terms(1, others, None, {})
    task = Request(
        JOB,
        1,
        2,
        "train",
        counted=dict.fromkeys(drawn, 0),
        attached=wire.pack(terms),
    )
    answer = wire.read_message(
        wire.Masking, seal.seal(task, Update({"x": torch.ones(2)}, 1), b"q").facts
    )
    assert "is not among the sites that the request names" in answer.again


def test_a_sum_of_two_drawn_sites_is_refused_by_the_site() -> None:
    """Of two sites, each could take its own part out of the sum."""
    seal = SecureSeal("a", FIVE, **secure_options())
    attached = wire.pack(wire.Terms(1, ("a", "b"), None, {}))
    request = Request(JOB, 1, 2, "train", counted={"a": 0, "b": 0}, attached=attached)
    with pytest.raises(RefusedError, match=r"needs 3 to .* sites, not 2"):
        seal.seal(request, Update(), b"q")
    with pytest.raises(ConfigError, match=r"needs 3 to .* sites, not 2"):
        InProcess([Giver(site, [Update()]) for site in ("a", "b")], secure=True)


def test_sites_of_a_task_are_stored_on_disk(tmp_path: Path) -> None:
    NamedSites("a", tmp_path / "named").add(b"q", ("a", "b", "c"))
    again = NamedSites("a", tmp_path / "named")
    again.add(b"q", ("c", "b", "a"))
    again.add(b"p", ("a", "d", "e"))
    with pytest.raises(RefusedError, match="over the sites a, b, c"):
        again.add(b"q", ("a", "b", "d"))
