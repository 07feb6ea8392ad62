"""A job whose server adds by the median needs the permission of every site."""

from __future__ import annotations

from pathlib import Path

import pytest
from hospital_jobs import FEDNER, corpus
from hospitals import OPEN, Hospitals, simulated

MEDIAN = FEDNER.replace("[training]", '[training]\naggregation = "median"').replace(
    "hashed_words = 64", "hashed_words = 1024"
)


@pytest.mark.slow
def test_a_median_at_permitting_sites_equals_the_simulation(tmp_path: Path) -> None:
    """FedNER's gradients, with rows of a table of words."""
    data = corpus(tmp_path / "notes", 12)
    folder = tmp_path / "closed"
    folder.mkdir()
    closed = Hospitals(folder, MEDIAN, data)
    assert "refused by individual_updates of this site's policy" in closed.refusal()
    folder = tmp_path / "open"
    folder.mkdir()
    hospitals = Hospitals(
        folder, MEDIAN, data, policy=f"{OPEN}individual_updates = true\n"
    )
    hospitals.run()
    assert hospitals.ends() == simulated(MEDIAN, data, tmp_path / "simulated")
