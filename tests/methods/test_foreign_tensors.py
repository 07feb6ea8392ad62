"""Tensors that do not fit: a server's at a site, a checkpoint's at both; nothing is cast."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_taggers import MODEL, generated, values

from fednotes.core.errors import ModelError, TrainingError
from fednotes.core.federation import State
from fednotes.core.tensors import load_into, restoring, taken
from fednotes.core.types import SiteData
from fednotes.methods import distill, fedner

DTYPES = (torch.int8, torch.bool, torch.complex64, torch.float64, torch.float8_e4m3fn)


@pytest.fixture(scope="module")
def site() -> SiteData:
    return generated(30, sites=1)[0]


@pytest.fixture(scope="module")
def config(site: SiteData) -> fedner.Config:
    return fedner.Config(model=MODEL, batch_size=12, epochs=2, seed=3, tags=site.tags)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_cast(dtype: torch.dtype) -> None:
    target = {"a": torch.zeros(2), "b": torch.zeros(2)}
    with pytest.raises(TrainingError, match=rf"'b': expected torch.float32, got {dtype}"):
        load_into(target, {"a": torch.ones(2), "b": torch.ones(2).to(dtype)})
    assert target["a"].tolist() == [0, 0]  # nor is a part taken
    with pytest.raises(TrainingError, match=r"'b': expected torch\.float32"):
        taken({"b": torch.ones(2).to(dtype)}, "b", torch.float32, 2)
    with pytest.raises(TrainingError, match="'c' is expected but not received"):
        taken({}, "c", torch.float32, 2)


@pytest.mark.parametrize("task", ["gradients", "train", "evaluate"])
def test_a_site_refuses_what_does_not_fit_its_model(
    site: SiteData, config: fedner.Config, task: str
) -> None:
    member = fedner.Site(site, config)
    member.share = 12
    good = values(member.shared)
    name = sorted(good)[0]
    wrong: list[dict[str, torch.Tensor]] = [
        *({**good, name: good[name].to(dtype)} for dtype in DTYPES),
        {**good, name: good[name][None]},
        {**good, "more": good[name]},
        {key: value for key, value in good.items() if key != name},
    ]
    for tensors in wrong:
        with pytest.raises(TrainingError, match=r"^tensor '") as caught:
            getattr(member, task)(tensors, round=0)
        assert "\n" not in str(caught.value)
    assert all(torch.equal(good[n], member.shared[n]) for n in good)


def damaged(state: State) -> list[State]:
    """States that are no such state, of right checksums for all that it matters."""
    name = sorted(state.tensors)[0]
    value = state.tensors[name]
    return [
        *(replace(state, tensors={**state.tensors, name: value.to(d)}) for d in DTYPES),
        replace(state, tensors={**state.tensors, name: value.reshape(1, 1, -1)}),
        replace(state, tensors={}),
        *(replace(state, facts={**state.facts, key: "x"}) for key in state.facts),
        *(replace(state, facts={**state.facts, key: []}) for key in state.facts),
        replace(state, facts={}),
    ]


def test_a_checkpoint_of_another_form_is_one_error_at_the_server(
    site: SiteData, config: fedner.Config
) -> None:
    tagger = distill.Config(model=MODEL, tags=site.tags, seed=3)
    servers: list[Callable[[State | None], Any]] = [
        lambda state: fedner.Server(config, state),
        lambda state: distill.Server(tagger, state, None),
    ]
    for make in servers:
        state = make(None).state()
        make(state)
        for wrong in damaged(state):
            with pytest.raises(ModelError, match="begin anew without it"):
                make(wrong)


def test_a_checkpoint_of_another_form_is_one_error_at_a_site(
    site: SiteData, config: fedner.Config
) -> None:
    member = fedner.Site(site, config)
    member.share = 12
    member.gradients(values(member.shared), round=0)
    state = member.state()
    for wrong in damaged(state):
        other = fedner.Site(site, config)
        with pytest.raises(ModelError, match="begin anew"), restoring("here"):
            other.restore(wrong)
