"""The secure sum if too few sites remain or sites return.

The fault matrix (`test_fault_matrix.py`) has every fault under the secure sum too.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import fault_net
import pytest
import torch
from fault_net import STRICT
from fault_toy import JOB, SITES, Toy
from secure_net import secure_toys

from fednotes.core.errors import TrainingError
from fednotes.core.messages import decode_reply
from fednotes.engines.inprocess import InProcess
from fednotes.engines.secure import SecureSum


def test_the_server_waits_below_the_threshold_and_asks_no_site_to_open(
    tmp_path: Path,
) -> None:
    """A policy of one site is lifted to two of three; the third's update alone stays
    masked."""
    net = secure_toys(tmp_path)
    patience = fault_net.Patience(
        min_sites=1, timeout=10, knock=1, knock_every=0, pause=1, give_up=90
    )
    engine = net.engine(SITES, patience, summing=SecureSum(SITES, job=JOB))
    assert engine.sum("count").included == SITES
    net.down, before = {"b", "c"}, len(net.sent)
    with pytest.raises(
        TrainingError, match=r"b, c did not answer task 'count' within 9. seconds"
    ):
        engine.sum("count")
    tasks = [request.task for _, request, _ in net.sent[before:]]
    assert "count" in tasks
    assert "@unmask" not in tasks
    net.down, before = set(), len(net.sent)
    assert engine.sum("count").included == SITES
    tasks = [request.task for site, request, _ in net.sent[before:] if site == "a"]
    opened = ["@confirm", "@unmask"]
    # what was masked is not used again
    assert tasks == ["@keys", "@shares", "count", *opened]


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
def test_sites_lost_while_a_sum_is_opened_start_afresh(
    task: str, lost: str, tmp_path: Path
) -> None:
    """a and b are killed between their updates and the opening: too few can open, so
    the task is done again, once as far as what is private is concerned. What was masked
    before is never opened. A site that lost its disk too makes up for what it missed
    before the first round; in the middle of a round it is left out, and then too few
    remain."""
    net = secure_toys(tmp_path)
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


def test_a_site_that_leaves_before_the_opening_is_still_in_the_sum(
    tmp_path: Path,
) -> None:
    """The other two open it, though three are needed in a sum; nobody waits for its
    return."""
    net = secure_toys(tmp_path)
    engine = net.engine(SITES, STRICT, summing=SecureSum(SITES, job=JOB))
    net.after["count"] = lambda: net.down.add("b")
    total = engine.sum("count")
    assert total.included == SITES
    assert total.metrics == {"size": 15.0}
    assert net.now < 2 * STRICT.timeout


def test_a_site_whose_disk_is_lost_catches_up_at_a_fresh_start(tmp_path: Path) -> None:
    """Its private value is gone, as it is in the clear: there the same is done, and
    told to be right by `test_deployed`."""
    metric_sums = []
    for name, summing in (("secure", SecureSum(SITES, job=JOB)), ("clear", None)):
        net = secure_toys(tmp_path / name)
        net.seal = net.seal if summing else None
        engine = net.engine(SITES, summing=summing)
        engine.sum("share", sizes=int(engine.sum("count").metrics["size"]))
        for turn in engine.rounds(0, 2):
            if turn.number == 1:
                del net.hosts["b"]
                shutil.rmtree(tmp_path / name / "b")
                if summing is not None:
                    summing._is_prepared = (
                        False  # as after a failure: "@keys" comes first
                    )
            assert engine.sum("train", {"x": torch.ones(4)}, round=0).included == SITES
            engine._active_sites = {}
        metric_sums.append(engine.sum("finish", {"x": torch.ones(4)}).metrics["own"])
    assert metric_sums[0] == pytest.approx(metric_sums[1], rel=1e-6)


def test_a_restarted_server_has_new_keys_and_reuses_no_exchange(
    tmp_path: Path,
) -> None:
    """Every public key and exchange in all replies of four starts, told apart."""
    net = secure_toys(tmp_path)
    for _ in range(4):
        net.engine(SITES, summing=SecureSum(SITES, job=JOB)).sum("count")
    keys, exchanges = [], []
    for _, frame in net.came:
        attached = decode_reply(frame).attached
        if not attached.facts:
            continue
        message = attached.facts.get("message") or attached.facts
        for key_message in (message, message.get("next_keys") or {}):
            if "sharing" in key_message:
                keys += [
                    key_message["sharing"],
                    key_message["masking"],
                    key_message["commitment"],
                ]
                exchanges.append((key_message["exchange"], key_message["site"]))
    # starts, sites, parts; this exchange and the next
    assert len(keys) == 4 * 3 * 3 * 2
    assert len(set(keys)) == len(keys)
    assert len(set(exchanges)) == len(exchanges)
