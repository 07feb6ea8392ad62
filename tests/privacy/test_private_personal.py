"""Test personal models with differential privacy.

What a unit changes, and what stays as without differential privacy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_notes import tiny_site

from fednotes.core.tensors import copy_tensors
from fednotes.core.types import SiteData, TagSet
from fednotes.engines.inprocess import InProcess
from fednotes.methods import personal
from fednotes.methods.private import DPMethod
from fednotes.privacy import training as private
from fednotes.privacy.noise import SCALE
from fednotes.privacy.promise import Privacy
from fednotes.taggers.saving import load_model
from fednotes.taggers.token_classifier import TokenClassifierConfig

PRIVATE: Any = DPMethod(personal.METHOD)


def three() -> list[SiteData]:
    """Return three sites of eight notes each.

    All annotate "Drug"; the last two also annotate "ADE".
    """
    types = (("Drug",), ("Drug", "ADE"), ("ADE", "Drug"))
    return [
        replace(tiny_site(n, 8), tags=TagSet(site_types))
        for n, site_types in enumerate(types)
    ]


def config_of(bert: Path, sites: Sequence[Any], **privacy_options: Any) -> Any:
    model = TokenClassifierConfig(encoder=str(bert), train="lora", rank=2)
    privacy = {
        "noise": 1.5,
        "rate": 0.5,
        "clip": 0.25,
        "unit": "document",
    } | privacy_options
    settings = personal.METHOD.dp.required_settings | {
        "cycles": 2,
        "batch_size": 4,
        "seed": 3,
    }
    config = personal.Config(
        model=model, privacy=Privacy(**privacy), learning_rate=0.02, **settings
    )
    return personal.METHOD.configure(config, sites)


@pytest.mark.parametrize("clip", [0.01, 1e6])
def test_a_unit_changes_sent_and_own_parameters_by_at_most_the_clip(
    bert: Path,
    clip: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answers with and without a unit are compared by brute force.

    Both the sent update and the changes of the site's own parameters count. A row that
    only other sites have does not change.
    """
    data = three()[0]
    config = config_of(bert, three(), clip=clip)
    zeros = lambda stream, count: np.zeros(count, np.int64)  # noqa: E731
    monkeypatch.setattr(private, "draw_discrete_gaussian", zeros)

    def sums(units: Sequence[int]) -> np.ndarray:
        picked = lambda stream, count, rate: np.isin(np.arange(count), units)  # noqa: E731
        monkeypatch.setattr(private, "draw_units", picked)
        site = PRIVATE.make_site(data, config, secret=bytes(32))
        moved: dict[str, torch.Tensor] = {}
        site._adam.step = moved.update
        answer = site.noisy_gradients(copy_tensors(site.site.shared), round=0).tensors
        assert not answer["classifier.weight.B-ADE"].any()
        assert {name.split(".")[0] for name in moved} == {"private", "classifier"}
        sent_part = [
            v.double().numpy().ravel() * site._grids[n]
            for n, v in sorted(answer.items())
        ]
        # N = 4
        private_part = [
            4 * v.double().numpy().ravel() for _, v in sorted(moved.items())
        ]
        return np.concatenate(sent_part + private_part)

    every = range(8)
    together, lengths = sums(every), []
    for unit in (0, 3, 7):
        alone = sums([unit])
        without = sums([u for u in every if u != unit])
        assert np.allclose(together - without, alone, rtol=0, atol=2e-6 * min(clip, 1))
        lengths.append(float(np.linalg.norm(alone)))
    assert 0 < max(lengths) <= clip
    assert clip > 1 or min(lengths) == pytest.approx(clip, rel=2e-3)


def test_a_run_saves_only_the_model_trained_with_noise(
    bert: Path, tmp_path: Path
) -> None:
    """The saved and scored model is the federated one, which was trained with noise.

    A row that a site lacks has only noise, of the promised size.
    """
    sites = three()
    config = config_of(bert, sites)
    members = [
        PRIVATE.make_site(d, config, secret=bytes([n]) * 32)
        for n, d in enumerate(sites)
    ]
    first = (
        members[0]
        .noisy_gradients(copy_tensors(members[0].site.shared), round=0)
        .tensors
    )
    lacked = first["classifier.weight.B-ADE"].double().numpy() / SCALE
    low, high = stats.chi2.ppf([5e-5, 1 - 5e-5], lacked.size)
    assert low < float((lacked**2).sum()) < high
    members[0] = PRIVATE.make_site(
        sites[0], config, secret=bytes(32), directory=tmp_path / "a"
    )
    untrained = copy_tensors(members[0].site.own_site.parameters)
    final = PRIVATE.train(InProcess(members), config)
    assert final.round == 4
    assert {"parts", "unseen"}.isdisjoint(members[0].scores)
    assert "strict" in members[0].scores
    own_parameters = members[0].site.own_site.parameters
    assert all(
        torch.equal(own_parameters[name], value) for name, value in untrained.items()
    )
    saved = load_model(tmp_path / "a" / "model")
    corpus = saved.prepare(sites[0].test, gold=False)
    mine = members[0].site.model.prepare(sites[0].test, gold=False)
    expected = members[0].site.model.compute_emissions(mine)
    np.testing.assert_allclose(
        saved.compute_emissions(corpus), expected, rtol=0, atol=1e-4
    )


def test_training_alone_and_pooled_is_private_fine_tuning(bert: Path) -> None:
    sites = [tiny_site(0, 6), tiny_site(1, 6)]
    config = config_of(bert, sites)
    for own_config in PRIVATE.configure_alone(config, sites):
        assert (own_config.sites, own_config.batch_size) == (1, 4)
        assert own_config.privacy == config.privacy
        assert PRIVATE.make_promise(own_config).shares == 1
    (together,), of_all = PRIVATE.configure_pooled(config, sites, None)
    final = PRIVATE.train(InProcess([PRIVATE.make_site(together, of_all)]), of_all)
    assert final.round == 4
