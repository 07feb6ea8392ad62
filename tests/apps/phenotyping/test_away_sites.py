"""A site that was absent when stage 2 began participates once it is back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fault_net import STRICT, Net
from fault_toy import JOB
from phenotype_patients import config_of, sites_of

from fednotes.apps.phenotyping import two_stage as phenotype
from fednotes.apps.phenotyping.two_stage import Site
from fednotes.core.federation import State
from fednotes.core.update import Tensors, Total
from fednotes.engines.deployed import Deployed
from fednotes.engines.history import OPENED
from fednotes.engines.secure import SecureSeal, SecureSum

PATIENTS = sites_of(3)
NAMES = tuple(site.id for site in PATIENTS)
AWAY = NAMES[-1]
ENOUGH = 2  # sites
CONFIG = phenotype.METHOD.configure(config_of(classifier_cycles=4), PATIENTS)


@dataclass
class Recorder:
    """A federation that records its sums.

    Attributes:
        engine: The federation.
        totals: The task and the total of each sum.
    """

    engine: Deployed
    totals: list[tuple[str, Total]] = field(default_factory=list)

    def sum(
        self, task: str, tensors: Tensors | None = None, /, **options: Any
    ) -> Total:
        total = self.engine.sum(task, tensors, **options)
        self.totals.append((task, total))
        return total

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


def run(folder: Path, *, since: str, secure: bool) -> tuple[State, Recorder, Net]:
    """Run both stages.

    Args:
        folder: The folder for the files of the sites and the server.
        since: The task from which the last site is away, until the first cycle of stage 2
            ends; "" if it never is.
        secure: Whether the sums are secure.
    """
    makes = {
        site.id: partial(Site, site, CONFIG, directory=folder / site.id)
        for site in PATIENTS
    }
    net = Net(makes, folder / "net")
    summing = None
    if secure:
        net.seal = lambda site: SecureSeal(
            site,
            NAMES,
            job=JOB,
            threshold=ENOUGH,
            record=folder / "net" / site / OPENED,
        )
        summing = SecureSum(NAMES, job=JOB, threshold=ENOUGH)

    def disturb(task: str) -> None:
        if task == since:
            net.down.add(AWAY)
        elif AWAY in net.down and task == "evaluate":  # the first cycle ends
            net.down.discard(AWAY)
            net.before = lambda task: None

    if since:
        net.before = disturb
    patience = replace(STRICT, min_sites=ENOUGH)
    recorder = Recorder(net.engine(NAMES, patience, summing=summing))
    state = phenotype.METHOD.train(recorder, CONFIG)
    return state, recorder, net


def stage_2(recorder: Recorder, task: str) -> list[Total]:
    """Return the totals of a task since stage 2 began."""
    tasks = [each for each, _ in recorder.totals]
    start = tasks.index("count_labels")
    return [total for each, total in recorder.totals[start:] if each == task]


def count_labelled(names: Sequence[str]) -> list[int]:
    """Return, for each disease, the number of labelled training patients."""
    counts = [
        np.count_nonzero(site.train.labels >= 0, axis=0)
        for site in PATIENTS
        if site.id in names
    ]
    return np.sum(counts, axis=0).tolist()


@pytest.mark.parametrize("since", ["finish", "prepare"])
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "secure"])
def test_a_site_that_comes_back_trains_in_the_next_cycle(
    secure: bool, since: str, tmp_path: Path
) -> None:
    """It takes part in the next sum without patients, and then receives stage 1."""
    state, recorder, net = run(tmp_path, since=since, secure=secure)
    sums = stage_2(recorder, "train")
    assert [total.included for total in sums] == [NAMES[:2], NAMES, NAMES, NAMES]
    counts = [total.tensors["patients"].tolist() for total in sums]
    two, three = count_labelled(NAMES[:2]), count_labelled(NAMES)
    assert counts == [two, two, three, three]
    assert len(stage_2(recorder, "prepare")) == 2

    # what the site ends with is what the others end with
    models = [(tmp_path / name / "model") for name in NAMES]
    files = [{f.name: f.read_bytes() for f in model.iterdir()} for model in models]
    assert files[0] == files[1] == files[2]
    assert net.host(AWAY)._prepare_site().scores["codes"]
    expected = sums[-1].tensors["svm.weight"] / sums[-1].tensors["patients"]
    assert np.array_equal(state.tensors["svm.weight"], expected.float())


def test_stage_2_begins_once_if_no_site_is_away(tmp_path: Path) -> None:
    _, recorder, _ = run(tmp_path, since="", secure=False)
    assert len(stage_2(recorder, "prepare")) == 1


def test_a_site_without_classifiers_sends_zeros() -> None:
    site = Site(PATIENTS[0], CONFIG)
    sent = {"svm.weight": torch.ones(12, 3), "svm.intercept": torch.ones(3)}
    update = site.train(sent, cycle=0)
    assert {name: value.shape for name, value in update.tensors.items()} == {
        "svm.weight": (12, 3),
        "svm.intercept": (3,),
        "patients": (3,),
    }
    assert not any(value.any() for value in update.tensors.values())
    assert set(update.metrics.values()) == {0.0}
