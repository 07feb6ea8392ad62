"""The secure sum when sites, the server and messages fail: what is lost, what is not
shown."""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import fault_net
import faults
import numpy as np
import pytest
import torch
from fault_net import STRICT, Net, ServerKilled, seal_of, toys
from fault_toy import JOB, ROUNDS, SITES, Toy, by_hand, toy_job
from faults import FAULTS, PHASES

from fednotes.core.errors import TrainingError
from fednotes.core.messages import decode_reply
from fednotes.engines.history import OPENED
from fednotes.engines.inprocess import InProcess
from fednotes.engines.secure import SecureSum

LOST = ("corrupt", "after the round")  # the site's own disk: what was on it is gone
LAST = (ROUNDS, "finish")
FEW_SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))]

pytestmark = pytest.mark.usefixtures("instant_disk")


@pytest.fixture(scope="module")
def reference() -> bytes:
    """The toy job under the secure sum in one process, without faults; NumPy says it is
    right."""
    took: dict[tuple[int, str], tuple[str, ...]] = {}
    found = toy_job(InProcess([Toy(site) for site in SITES], secure=True), took)
    np.testing.assert_allclose(found, by_hand(took), rtol=1e-6)
    return found.tobytes()


def net_of(
    folder: Path,
    chaos: random.Random | None = None,
    threshold: int | None = None,
    **options: Any,
) -> Net:
    seal = partial(seal_of, folder, threshold=threshold)
    return toys(folder, chaos, seal=seal, **options)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_fault_matrix(
    fault: str, phase: str, tmp_path: Path, reference: bytes
) -> None:
    """With every site needed: the bits of the run without a fault. The table of the
    documentation says what comes of two of three, by NumPy (`faults.Outcome.close`)."""
    outcome = faults.run(fault, phase, 3, tmp_path, secure=True)
    assert outcome.struck
    assert set(outcome.took.values()) == {SITES}
    assert outcome.found.tobytes() == reference or (fault, phase) == LOST


@pytest.mark.parametrize("stage", ["@keys", "@shares", "@confirm", "@unmask"])
@pytest.mark.parametrize("phase", ["receiving", "sending"])
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_faults_at_the_protocols_own_messages(
    half: int, stage: str, phase: str, tmp_path: Path, reference: bytes
) -> None:
    """A site that is lost after its masked update is in the sum all the same.

    Half of the faults are tried when a message is received and the others when it is
    sent; the other halves are slow.
    """
    opening = stage in ("@confirm", "@unmask")
    at = {"secure": True, "task": stage, "round": 2 if opening else 0}
    every_fault = (
        "crash",
        "slow",
        "duplicate",
        "stale",
        "corrupt",
        "partition",
        "server kill",
    )
    for fault in every_fault[(half + (phase == "sending")) % 2 :: 2]:
        if fault == "stale" and not opening:
            continue  # so early in a run there is nothing old
        loose = faults.run(fault, phase, 2, tmp_path / fault / "2", **at)
        assert loose.struck
        # where all are needed there is one list, and nothing to confirm
        if stage != "@confirm":
            strict = faults.run(fault, phase, 3, tmp_path / fault / "3", **at)
            assert strict.struck
            assert strict.found.tobytes() == reference, fault
        assert loose.close, fault
        assert loose.took[LAST] == SITES
        if opening:
            assert loose.took[2, "train"] == SITES, fault


def until_done(
    net: Net, threshold: int | None = None, **options: Any
) -> tuple[np.ndarray, Any]:
    took: dict[tuple[int, str], tuple[str, ...]] = {}
    while True:
        try:
            record = net.folder / OPENED
            summing = SecureSum(SITES, job=JOB, threshold=threshold, record=record)
            return toy_job(net.engine(SITES, summing=summing, **options), took), took
        except (ServerKilled, TrainingError):
            continue


@pytest.mark.parametrize("seed", FEW_SEEDS)
@pytest.mark.parametrize("threshold", [2, 3])
def test_random_faults_leave_the_bits_alone(
    seed: int, threshold: int, tmp_path: Path, reference: bytes
) -> None:
    """Messages lost and repeated, sites and the server killed, all sites needed."""
    net = net_of(tmp_path, random.Random(seed), threshold, left=2)
    found, took = until_done(net, threshold)
    assert found.tobytes() == reference
    assert set(took.values()) == {SITES}


@pytest.mark.parametrize("seed", FEW_SEEDS)
def test_random_faults_with_two_of_three(seed: int, tmp_path: Path) -> None:
    """The toy job in NumPy, told who was in which sum."""
    patience = fault_net.Patience(
        min_sites=2, timeout=10, knock=1, knock_every=0, pause=1
    )
    found, took = until_done(
        net_of(tmp_path, random.Random(seed), left=1), patience=patience
    )
    np.testing.assert_allclose(found, by_hand(took), rtol=1e-6)


def test_below_the_threshold_it_waits_and_asks_nobody_to_open(tmp_path: Path) -> None:
    """A policy of one site is lifted to two of three; the third's update alone stays
    masked."""
    net = net_of(tmp_path)
    patience = fault_net.Patience(
        min_sites=1, timeout=10, knock=1, knock_every=0, pause=1, give_up=90
    )
    engine = net.engine(SITES, patience, summing=SecureSum(SITES, job=JOB))
    assert engine.sum("count").included == SITES
    net.down, before = {"b", "c"}, len(net.sent)
    with pytest.raises(
        TrainingError, match=r"no answer from b, c to 'count' in 9. seconds"
    ):
        engine.sum("count")
    asked = [request.task for _, request, _ in net.sent[before:]]
    assert "count" in asked
    assert "@unmask" not in asked
    net.down, before = set(), len(net.sent)
    assert engine.sum("count").included == SITES
    asked = [request.task for site, request, _ in net.sent[before:] if site == "a"]
    opened = ["@confirm", "@unmask"]
    # what was masked is not used again
    assert asked == ["@keys", "@shares", "count", *opened]


def private(engine: Any) -> float:
    """Of all sites together, after a prologue and a round of two requests."""
    x = {"x": torch.ones(4)}
    engine.sum("share", sizes=int(engine.sum("count").metrics["size"]))
    next(engine.rounds(0, 1))
    assert engine.sum("train", x, round=0).included == SITES
    assert engine.sum("send", {"scale": torch.ones(4)}).included == SITES
    return float(engine.sum("finish", x).metrics["own"])


@pytest.mark.parametrize("task", ["train", "send"])
@pytest.mark.parametrize("lost", ["process", "disk"])
def test_sites_lost_while_a_sum_is_opened_begin_afresh(
    task: str, lost: str, tmp_path: Path
) -> None:
    """a and b are killed between their updates and the opening: too few can open, so
    the task is done again, once as far as what is private is concerned. What was masked
    before is never opened. A site that lost its disk too makes up for what it missed
    before the first round; in the middle of a round it is left out, and then too few
    remain."""
    net = net_of(tmp_path)
    engine = net.engine(SITES, summing=SecureSum(SITES, job=JOB))

    def kill() -> None:
        del net.hosts["a"], net.hosts["b"]
        if lost == "disk":
            shutil.rmtree(tmp_path / "a")

    net.after[task] = kill
    if (task, lost) == ("send", "disk"):
        with pytest.raises(TrainingError, match="'send': 2 sites can be added"):
            private(engine)
        assert sum(site == "a" and r.task == "send" for site, r, _ in net.sent) == 1
        return
    expected = private(InProcess([Toy(site) for site in SITES], secure=True))
    assert private(engine) == pytest.approx(expected, rel=1e-6)
    numbers = [r.number for site, r, _ in net.sent if r.task == task and site == "c"]
    assert len(numbers) == 2


def test_a_site_that_is_gone_when_the_sum_is_opened_is_in_it(tmp_path: Path) -> None:
    """The other two open it, though three are needed in a sum; nobody waits for its
    return."""
    net = net_of(tmp_path)
    engine = net.engine(SITES, STRICT, summing=SecureSum(SITES, job=JOB))
    net.after["count"] = lambda: net.down.add("b")
    total = engine.sum("count")
    assert total.included == SITES
    assert total.metrics == {"size": 15.0}
    assert net.now < 2 * STRICT.timeout


def test_a_site_whose_disk_is_lost_catches_up_at_a_fresh_start(tmp_path: Path) -> None:
    """Its private value is gone, as it is in the clear: there the same is done, and
    told to be right by `test_deployed`."""
    found = []
    for name, summing in (("secure", SecureSum(SITES, job=JOB)), ("clear", None)):
        net = net_of(tmp_path / name)
        net.seal = net.seal if summing else None
        engine = net.engine(SITES, summing=summing)
        engine.sum("share", sizes=int(engine.sum("count").metrics["size"]))
        for turn in engine.rounds(0, 2):
            if turn.number == 1:
                del net.hosts["b"]
                shutil.rmtree(tmp_path / name / "b")
                if summing is not None:
                    summing._whole = False  # as after a failure: "@keys" comes first
            assert engine.sum("train", {"x": torch.ones(4)}, round=0).included == SITES
            engine._active = None
        found.append(engine.sum("finish", {"x": torch.ones(4)}).metrics["own"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_restarted_server_has_new_keys_and_never_uses_an_exchange_again(
    tmp_path: Path,
) -> None:
    """Every public key and exchange in all replies of four starts, told apart."""
    net = net_of(tmp_path)
    for _ in range(4):
        net.engine(SITES, summing=SecureSum(SITES, job=JOB)).sum("count")
    keys, exchanges = [], []
    for _, frame in net.came:
        attached = decode_reply(frame).attached
        if not attached.facts:
            continue
        message = attached.facts.get("message") or attached.facts
        for own in (message, message.get("next_keys") or {}):
            if "sharing" in own:
                keys += [own["sharing"], own["masking"], own["commitment"]]
                exchanges.append((own["exchange"], own["site"]))
    # starts, sites, parts; this exchange and the next
    assert len(keys) == 4 * 3 * 3 * 2
    assert len(set(keys)) == len(keys)
    assert len(set(exchanges)) == len(exchanges)
