"""Every fault at every phase, and real processes that are killed."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path

import fault_processes
import faults
import numpy as np
import pytest
from fault_toy import ROUNDS, SITES, by_hand
from faults import FAULTS, PHASES, VICTIM

DOCS = Path(__file__).parents[3] / "docs" / "reliability.md"
EVERYBODY = {
    **{(-1, task): SITES for task in ("count", "share")},
    **{(r, task): SITES for r in range(ROUNDS) for task in ("train", "send")},
    (ROUNDS, "finish"): SITES,
}
LOST = ("corrupt", "after the round")  # the site's own disk: what was on it is gone

pytestmark = pytest.mark.usefixtures("instant_disk")


def documented_table() -> list[str]:
    """Return the lines of the table of faults in the documentation."""
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    start = lines.index(faults.HEADING[0])
    return list(itertools.takewhile(lambda line: line.startswith("|"), lines[start:]))


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_job_goes_on_as_documented_with_the_same_bits(
    fault: str, phase: str
) -> None:
    """The toy job in NumPy (`by_hand`), given who was in which sum.

    With all sites needed that is everybody, whatever happened on the way. What came of
    it, also under the secure sum, is the fault's row in docs/reliability.md.
    """
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
        assert strict.found.tobytes() == by_hand(EVERYBODY).tobytes()
    if fault in ("crash", "slow", "partition"):
        missed = [key for key, sites in loose.took.items() if VICTIM not in sites]
        assert 0 < len(missed) < len(loose.took)
        assert (ROUNDS, "finish") not in missed  # it is back
    if fault in ("crash", "slow", "duplicate", "stale", "partition"):
        assert (strict.starts, loose.starts) == (1, 1)


def test_the_kinds_of_events(tmp_path: Path) -> None:
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
    assert texts == {"'train': waiting for b, 2 have answered"}


def test_the_same_fault_repeats_to_the_last_bit(tmp_path: Path) -> None:
    one, two = (faults.run("slow", "training", 2, tmp_path / name) for name in "xy")
    assert one.found.tobytes() == two.found.tobytes()
    assert one.events == two.events
    assert one.waited == two.waited


def test_two_faults_after_each_other_are_survived_too(tmp_path: Path) -> None:
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
    shown = [tuple(row.split(" | ")[:2]) for row in rows]
    cases = itertools.product(FAULTS, PHASES)
    assert shown == [(f"| {fault}", phase) for fault, phase in cases]


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
def test_killed_processes_are_started_again_and_the_job_ends_with_the_same_bits(
    kills: dict[str, str],
) -> None:
    # short: a socket's path has 100 characters
    with tempfile.TemporaryDirectory() as folder:
        found, killed = fault_processes.run(Path(folder), kills)
    assert killed == len(kills)
    assert np.array_equal(found, by_hand(EVERYBODY))
