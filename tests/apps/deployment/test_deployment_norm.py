"""`[federation] max_norm`: an update beyond it is left out, and the round continues."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from fault_net import STRICT, Net
from fault_toy import JOB
from hospital_jobs import DISTILL
from hospitals import Hospitals
from secure_net import Giver

from fednotes.core.errors import ConfigError, TrainingError
from fednotes.core.messages import decode_reply
from fednotes.core.update import Update
from fednotes.engines.requests import Event
from fednotes.jobs.job import FederationConfig

SITES = ("a", "b", "c")
BIG = 3.0  # in each of 5 × 4 numbers: a norm of 13.4
SITE_UPDATES = {
    site: [Update({"w": torch.full((5, 4), value)}, 2.0, {"n": 1.0})]
    for site, value in (("a", 0.5), ("b", BIG), ("c", -1.0))
}


def net_of(folder: Path, max_norm: float, seal: Any = None) -> Net:
    """Return givers behind hosts with this bound."""
    calls = Counter[str]()
    makes = {site: partial(Giver, site, SITE_UPDATES[site], calls) for site in SITES}
    return Net(makes, folder, seal=seal, max_norm=max_norm)


@pytest.mark.parametrize("at", ["site", "server"])
def test_the_other_updates_are_added_without_one_beyond_the_bound(
    at: str, tmp_path: Path
) -> None:
    """The mean of a and c, by NumPy; where the site does not check, the server does."""
    bound = float(np.linalg.norm(np.full((5, 4), BIG))) * 0.999
    net, events = net_of(tmp_path, bound if at == "site" else 0.0), list[Event]()
    patience = replace(STRICT, min_sites=2)
    engine = net.engine(SITES, patience, notify=events.append, max_norm=bound)
    total = engine.sum("give")
    assert total.included == ("a", "c")
    assert total.mean()["w"].tolist() == np.full((5, 4), (0.5 - 1.0) / 2).tolist()
    refusals = [event.text for event in events if event.kind == "refused"]
    detail = "its norm is above 13.403" + (" (it is 13.42)" if at == "server" else "")
    assert refusals == [f"site 'b': its update was refused: {detail}"]
    site_updates = [
        decode_reply(frame).update for site, frame in net.came if site == "b"
    ]
    assert any(update and update.tensors for update in site_updates) == (at == "server")


def test_only_the_site_checks_the_bound_under_the_secure_sum(tmp_path: Path) -> None:
    """Nothing of the update leaves, masked or not, and no value of it is said."""
    pytest.importorskip("cryptography")
    from fednotes.engines.secure import SecureSeal, SecureSum

    seal = partial(SecureSeal, sites=SITES, job=JOB)
    net, events = net_of(tmp_path, 10.0, seal), list[Event]()
    engine = net.engine(
        SITES,
        replace(STRICT, min_sites=2),
        notify=events.append,
        summing=SecureSum(SITES, job=JOB),
        max_norm=10.0,
    )
    total = engine.sum("give")
    assert total.included == ("a", "c")
    np.testing.assert_allclose(total.mean()["w"], np.full((5, 4), -0.25), atol=1e-6)
    refusals = [event.text for event in events if event.kind == "refused"]
    assert refusals == ["site 'b': its update was refused: its norm is above 10"]
    for site, frame in net.came:
        if site == "b":
            assert "words" not in decode_reply(frame).attached.tensors


@pytest.mark.parametrize("at", ["site", "server"])
def test_the_setting_of_the_job_applies_at_server_and_sites(
    at: str, site_notes: Any, tmp_path: Path
) -> None:
    """With a bound that no model can keep.

    At the server the sites' own check is taken out.
    """
    job = DISTILL.replace("[federation]", "[federation]\nmax_norm = 1e-6")
    hospitals = Hospitals(tmp_path, job, site_notes)
    unchecked = mock.patch("fednotes.engines.host.check_addable")
    with (
        nullcontext() if at == "site" else unchecked,
        pytest.raises(
            TrainingError, match=r"site 'posts'.* its norm is above 1e-06"
        ) as stopped,
    ):
        hospitals.run()
    assert ("(it is" in str(stopped.value)) == (at == "server")


def test_the_bound_must_be_a_number_from_0() -> None:
    assert FederationConfig().max_norm == 0.0
    for value, expected in ((-1.0, "at least 0"), (float("nan"), "a number")):
        with pytest.raises(ConfigError, match=rf"max_norm = .*: expected {expected}"):
            FederationConfig(max_norm=value)
