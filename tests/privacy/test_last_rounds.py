"""The mean of the models of the last rounds, as the model that is released."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from private_sites import config_of, make_private_site, patients
from tiny_jobs import TABLE
from tiny_taggers import assert_same, resumed
from tiny_taggers import values as copied

from fednotes.core.errors import ConfigError
from fednotes.core.federation import State
from fednotes.core.tensors import select_prefix
from fednotes.engines.inprocess import InProcess
from fednotes.jobs.job_file import parse_job
from fednotes.methods.fedner import METHOD as FEDNER
from fednotes.methods.private import DPMethod
from fednotes.privacy import training as private
from fednotes.privacy.last_rounds import LastRounds
from fednotes.privacy.training import DPSite

ROUNDS = 6  # three epochs of two rounds
AVERAGED = 3


def train(averaged: int = AVERAGED, **options: Any) -> tuple[State, list[DPSite]]:
    """Train three sites for six rounds, and average the last ones."""
    settings: dict[str, Any] = {"privacy": {"averaged_rounds": averaged}}
    members = [
        make_private_site(patients(number), secret=bytes([number] * 32), **settings)
        for number in range(3)
    ]
    federation = InProcess(members, **options)
    return DPMethod(FEDNER).train(
        federation, config_of(patients(), **settings)
    ), members


def mean_of_last(models: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the mean of the last models in NumPy float64, rounded to float32."""
    last = models[-AVERAGED:]
    return {
        name: torch.from_numpy(
            np.mean([m[name].numpy().astype(np.float64) for m in last], axis=0)
        ).to(torch.float32)
        for name in last[0]
    }


def test_a_mean_over_the_last_rounds_equals_one_by_hand() -> None:
    """Of 1, 2, 4, 8, 16 in five rounds, the last three have the mean 28 / 3."""
    mean = LastRounds(rounds=5, averaged=3)
    last = LastRounds(rounds=5, averaged=1)
    for round, value in enumerate((1.0, 2.0, 4.0, 8.0, 16.0), start=1):
        parameters = {"w": torch.tensor([value])}
        for each in (mean, last):
            each.add(parameters, round)
        if round == 2:  # no round is averaged yet
            assert mean.compute(parameters, round) == parameters
    assert mean.compute(parameters, 5)["w"] == torch.tensor([28 / 3])
    assert last.compute(parameters, 5) == parameters
    assert not last.state()


def test_a_run_ends_with_the_mean_of_its_last_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shared layers at the server and at each site, and each site's private layers,
    against every model of the run."""
    shared_models: list[dict[str, torch.Tensor]] = []
    private_models: dict[int, list[dict[str, torch.Tensor]]] = {}
    step = private.Server.step
    answer = DPSite.noisy_gradients

    def record_step(server: private.Server, total: Any) -> None:
        step(server, total)
        shared_models.append(copied(server.shared))

    def record_answer(site: DPSite, *arguments: Any, **options: Any) -> Any:
        update = answer(site, *arguments, **options)
        models = private_models.setdefault(id(site), [])
        models.append(copied(site.site.private))
        return update

    monkeypatch.setattr(private.Server, "step", record_step)
    monkeypatch.setattr(DPSite, "noisy_gradients", record_answer)
    final, members = train()
    assert len(shared_models) == ROUNDS
    expected = mean_of_last(shared_models)
    assert_same(select_prefix("shared.", final.tensors), expected)
    assert not torch.equal(*(m[next(iter(expected))] for m in shared_models[-2:]))
    for member in members:
        assert_same(copied(member.site.shared), expected)
        assert_same(
            copied(member.site.private), mean_of_last(private_models[id(member)])
        )

    shared_models.clear()
    private_models.clear()
    final, members = train(averaged=1)
    assert_same(select_prefix("shared.", final.tensors), shared_models[-1])
    assert_same(copied(members[0].site.private), private_models[id(members[0])][-1])


@pytest.mark.parametrize("kill", [2, 4, 5])
def test_a_resumed_run_has_the_same_mean(tmp_path: Path, kill: int) -> None:
    """It is killed before the first round that is averaged, or among them."""
    final, members = train()
    again, members_again = resumed(train, tmp_path, kill)
    assert_same(again.tensors, final.tensors)
    for first, second in zip(members, members_again, strict=True):
        assert_same(copied(first.site.private), copied(second.site.private))


def test_more_rounds_than_a_job_has_cannot_be_averaged() -> None:
    table = {**TABLE, "conditions": ["federated"]}
    privacy = {"epsilon": 8.0, "rate": 0.5, "unit": "document", "averaged_rounds": 5}
    with pytest.raises(ConfigError, match="this job has 4 rounds: set averaged_rounds"):
        DPMethod(FEDNER).make_promise(
            parse_job({**table, "privacy": privacy}, "job", Path(), "job.toml").config
        )


def test_rounds_of_sites_that_are_drawn_cannot_be_averaged() -> None:
    table = {
        "method": "fedner",
        "synthetic": {},
        "training": {"sites_per_round": 2},
        "privacy": {"epsilon": 8.0, "where": "site", "averaged_rounds": 2},
    }
    with pytest.raises(ConfigError, match="averaged_rounds = 2: with sites_per_round"):
        parse_job(table, "job", Path(), "job.toml")
