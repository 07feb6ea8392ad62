"""The engine of real sites adds those sites that took part, whatever goes wrong."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from fault_net import STRICT, ServerKilled, toys
from fault_toy import SITES, by_hand, toy_job

from fednotes.core.errors import TrainingError

pytestmark = pytest.mark.usefixtures("instant_disk")


@pytest.mark.parametrize("seed", range(12))
def test_with_some_sites_the_bits_follow_from_who_took_part(
    seed: int, tmp_path: Path
) -> None:
    """The toy job in NumPy, told who was in which sum, after random faults."""
    net = toys(tmp_path, random.Random(seed), left=1)
    took: dict[tuple[int, str], tuple[str, ...]] = {}
    policy, found = replace(STRICT, min_sites=1), None
    while found is None:
        try:
            found = toy_job(net.engine(SITES, policy), took)
        except (ServerKilled, TrainingError):
            # too few were left in the middle of a round
            continue
    assert found.tobytes() == by_hand(took).tobytes()
