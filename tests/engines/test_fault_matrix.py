"""Every fault at every phase, in the clear and under the secure sum.

A site stays away, answers late, twice or wrongly, is killed, or has no room; the server
is killed. Then faults at random moments, and real processes that are killed.
"""

from __future__ import annotations

import itertools
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import fault_net
import fault_processes
import faults
import numpy as np
import pytest
from fault_net import STRICT, Net, ServerKilled, toys
from fault_toy import JOB, ROUNDS, SITES, Toy, by_hand, toy_job
from faults import FAULTS, PHASES, VICTIM
from secure_net import secure_toys

from fednotes.core.errors import TrainingError
from fednotes.engines.history import OPENED
from fednotes.engines.inprocess import InProcess
from fednotes.engines.secure import SecureSum

DOCS = Path(__file__).parents[2] / "docs" / "reliability.md"
EVERYBODY = {
    **{(-1, task): SITES for task in ("count", "share")},
    **{(r, task): SITES for r in range(ROUNDS) for task in ("train", "send")},
    (ROUNDS, "finish"): SITES,
}
LAST = (ROUNDS, "finish")
LOST = ("corrupt", "after the round")  # the site's own disk: what was on it is gone
# Half of the matrix is slow; each fault and each phase is in both halves.
CELLS = [
    pytest.param(fault, phase, marks=[pytest.mark.slow] if (row + column) % 2 else [])
    for row, fault in enumerate(FAULTS)
    for column, phase in enumerate(PHASES)
]
FEW_SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4))]


@pytest.fixture(scope="module")
def secure_reference() -> bytes:
    """The toy job under the secure sum in one process, without faults; NumPy says it is
    right."""
    took: dict[tuple[int, str], tuple[str, ...]] = {}
    result = toy_job(InProcess([Toy(site) for site in SITES], secure=True), took)
    np.testing.assert_allclose(result, by_hand(took), rtol=1e-6)
    return result.tobytes()


def documented_table() -> list[str]:
    """Return the lines of the table of faults in the documentation."""
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    start = lines.index(faults.HEADING[0])
    return list(itertools.takewhile(lambda line: line.startswith("|"), lines[start:]))


@pytest.mark.parametrize(("fault", "phase"), CELLS)
def test_the_job_continues_as_documented_with_the_same_result(
    fault: str, phase: str, secure_reference: bytes, tmp_path: Path
) -> None:
    """The toy job in NumPy (`by_hand`), given who was in which sum.

    With all sites needed that is everybody, whatever happened on the way. What came of
    it, also under the secure sum of two of three, is the fault's row in
    docs/reliability.md. Under the secure sum of all, the bits are those of the run
    without a fault.
    """
    struck_run = faults.run(fault, phase, 3, tmp_path, secure=True)
    assert struck_run.struck
    assert set(struck_run.took.values()) == {SITES}
    if (fault, phase) != LOST:
        assert struck_run.result.tobytes() == secure_reference

    strict, loose, secure = faults.outcomes(fault, phase)
    assert faults.row(fault, phase, (strict, loose, secure)) in documented_table()
    assert secure.struck
    if (fault, phase) != LOST:
        assert secure.close
    for outcome in (strict, loose):
        assert outcome.struck
        assert all(
            set(SITES) - {VICTIM} <= set(sites) for sites in outcome.took.values()
        )
        if (fault, phase) != LOST:
            assert outcome.same
    assert {key: strict.took[key] for key in EVERYBODY} == EVERYBODY
    if (fault, phase) != LOST:
        assert strict.result.tobytes() == by_hand(EVERYBODY).tobytes()
    if fault in ("crash", "slow", "partition"):
        missed = [key for key, sites in loose.took.items() if VICTIM not in sites]
        assert 0 < len(missed) < len(loose.took)
        assert (ROUNDS, "finish") not in missed  # it is back
    if fault in ("crash", "slow", "duplicate", "stale", "partition"):
        assert (strict.starts, loose.starts) == (1, 1)


def test_each_fault_has_the_documented_kind_of_event(tmp_path: Path) -> None:
    for fault, phase, kind in (
        ("slow", "sending", "late"),
        ("duplicate", "sending", "duplicate"),
        ("stale", "sending", "late"),
        ("corrupt", "receiving", "damaged"),
        ("corrupt", "sending", "damaged"),
        ("corrupt", "training", "refused"),
        ("crash", "training", "missing"),
        ("disk full", "training", "refused"),
    ):
        events = faults.run(fault, phase, 2, tmp_path / fault / phase).events
        assert kind in {event.kind for event in events if event.site == VICTIM}, (
            fault,
            phase,
        )
    waits = faults.run("crash", "training", 3, tmp_path / "waits").events
    texts = {event.text for event in waits if event.kind == "waiting"}
    assert texts == {"'train': waiting for b; answers so far: 2"}


def test_the_same_fault_gives_the_same_result(tmp_path: Path) -> None:
    first, second = (
        faults.run("slow", "training", 2, tmp_path / name) for name in "xy"
    )
    assert first.result.tobytes() == second.result.tobytes()
    assert first.events == second.events
    assert first.waited == second.waited


@pytest.mark.slow
def test_two_successive_faults_are_survived(tmp_path: Path) -> None:
    """A run without its last checkpoint goes on in the same folders, with another
    fault."""
    for number, (first, second) in enumerate(
        itertools.product(("slow", "crash"), FAULTS)
    ):
        folder = tmp_path / str(number)
        took = faults.run(first, "training", 2, folder).took
        shutil.rmtree(folder / "server" / f"round-{ROUNDS - 1:08d}")
        outcome = faults.run(second, "training", 2, folder, dict(took))
        assert outcome.struck
        assert outcome.same


def test_the_documentation_has_one_row_for_each_fault_and_phase() -> None:
    """The rows themselves are compared where the faults are run."""
    heading, rows = documented_table()[:2], documented_table()[2:]
    assert heading == list(faults.HEADING)
    documented = [tuple(row.split(" | ")[:2]) for row in rows]
    cases = itertools.product(FAULTS, PHASES)
    assert documented == [(f"| {fault}", phase) for fault, phase in cases]


# ---- the secure sum's own messages, and random moments


@pytest.mark.parametrize("stage", ["@keys", "@shares", "@confirm", "@unmask"])
@pytest.mark.parametrize("phase", ["receiving", "sending"])
@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_faults_at_messages_of_the_secure_sum_are_survived(
    half: int, stage: str, phase: str, tmp_path: Path, secure_reference: bytes
) -> None:
    """A site that is lost after its masked update is in the sum all the same.

    Half of the faults are tried when a message is received and the others when it is
    sent; the other halves are slow.
    """
    opening = stage in ("@confirm", "@unmask")
    at = {"secure": True, "task": stage, "round": 2 if opening else 0}
    lost_on_the_way = [fault for fault in FAULTS if fault != "disk full"]
    for fault in lost_on_the_way[(half + (phase == "sending")) % 2 :: 2]:
        if fault == "stale" and not opening:
            continue  # so early in a run there is nothing old
        loose = faults.run(fault, phase, 2, tmp_path / fault / "2", **at)
        assert loose.struck
        # where all are needed there is one list, and nothing to confirm
        if stage != "@confirm":
            strict = faults.run(fault, phase, 3, tmp_path / fault / "3", **at)
            assert strict.struck
            assert strict.result.tobytes() == secure_reference, fault
        assert loose.close, fault
        assert loose.took[LAST] == SITES
        if opening:
            assert loose.took[2, "train"] == SITES, fault


def run_securely(
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
def test_random_faults_do_not_change_the_result(
    seed: int, threshold: int, tmp_path: Path, secure_reference: bytes
) -> None:
    """Messages lost and repeated, sites and the server killed, all sites needed."""
    net = secure_toys(tmp_path, random.Random(seed), threshold, failures_left=2)
    result, took = run_securely(net, threshold)
    assert result.tobytes() == secure_reference
    assert set(took.values()) == {SITES}


@pytest.mark.parametrize("seed", FEW_SEEDS)
def test_random_faults_leave_the_right_sum_of_two_of_three_sites(
    seed: int, tmp_path: Path
) -> None:
    """The toy job in NumPy, told who was in which sum."""
    patience = fault_net.Patience(
        min_sites=2, timeout=10, knock=1, knock_every=0, pause=1
    )
    result, took = run_securely(
        secure_toys(tmp_path, random.Random(seed), failures_left=1), patience=patience
    )
    np.testing.assert_allclose(result, by_hand(took), rtol=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_the_result_depends_only_on_the_sites_that_took_part(
    seed: int, tmp_path: Path
) -> None:
    """The toy job in NumPy, told who was in which sum, after random faults."""
    net = toys(tmp_path, random.Random(seed), failures_left=1)
    took: dict[tuple[int, str], tuple[str, ...]] = {}
    policy, result = replace(STRICT, min_sites=1), None
    while result is None:
        try:
            result = toy_job(net.engine(SITES, policy), took)
        except (ServerKilled, TrainingError):
            # too few were left in the middle of a round
            continue
    assert result.tobytes() == by_hand(took).tobytes()


# ---- processes


@pytest.mark.parametrize(
    "kills",
    [
        {"b": "training 3"},
        {"a": "sending train 2", "c": "receiving send 3"},
        {"b": "writing 9", "c": "writing 12"},
        {"server": "asking send 8"},
        {"server": "writing 3"},
        {"server": "asking train 10", "a": "training 4", "b": "sending @checkpoint 1"},
    ],
    ids=str,
)
def test_a_job_with_killed_processes_ends_with_the_same_result(
    kills: dict[str, str],
) -> None:
    # short: a socket's path has 100 characters
    with tempfile.TemporaryDirectory() as folder:
        result, killed = fault_processes.run(Path(folder), kills)
    assert killed == len(kills)
    assert np.array_equal(result, by_hand(EVERYBODY))
