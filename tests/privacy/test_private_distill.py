"""Differential privacy of distillation: completion of units, their effect, resuming."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_models import save_bert
from tiny_taggers import NO_DROPOUT, assert_same

from fednotes.core.errors import ConfigError
from fednotes.core.tensors import copy_tensors, load_into
from fednotes.core.types import SiteData, TagSet
from fednotes.data.synthetic import generate
from fednotes.data.tags import relabel
from fednotes.jobs.job_file import parse_job
from fednotes.methods import distill
from fednotes.methods.distill import pseudo_complete
from fednotes.methods.private import DPMethod
from fednotes.privacy import training as private
from fednotes.privacy.noise import SCALE
from fednotes.privacy.promise import Privacy
from fednotes.taggers.saving import build_model
from fednotes.taggers.token_classifier import TokenClassifierConfig

PRIVATE: Any = DPMethod(distill.METHOD)
TYPES = ("Disease", "Drug", "ADE")
SECRET = bytes(range(32))


@lru_cache
def three() -> list[SiteData]:
    """Return three sites of up to eight notes, two of each patient, with a type
    each."""
    site_data = []
    for generated_site, entity_type in zip(
        generate(num_sites=3, sentences_per_site=40, seed=5), TYPES, strict=True
    ):
        notes = relabel(generated_site.complete.train[:8], {}, {entity_type})
        owned = tuple(replace(d, patient=f"p{n // 2}") for n, d in enumerate(notes))
        site_data.append(
            SiteData(
                generated_site.data.id, TagSet((entity_type,)), owned, owned, owned
            )
        )
    return site_data


def config_of(**options: Any) -> Any:
    privacy = {"noise": 1.5, "rate": 0.5, "clip": 0.25} | options.pop("privacy", {})
    settings = {
        **distill.METHOD.dp.required_settings,
        "rounds": 3,
        "batch_size": 4,
        "seed": 3,
    }
    settings |= {
        "learning_rate": 0.02,
        "unannotated": "soft",
        "model": NO_DROPOUT,
        **options,
    }
    return distill.METHOD.configure(
        distill.Config(privacy=Privacy(**privacy), **settings), three()
    )


def site_of(number: int = 0, **options: Any) -> Any:
    return PRIVATE.make_site(three()[number], config_of(**options), secret=SECRET)


def other_than(site: Any, seed: int = 9) -> dict[str, torch.Tensor]:
    """Return parameters that a server may send, whose model finds mentions of every
    type."""
    model = build_model(site._config.model, site._config.tags, seed)
    return {n: 3 * value for n, value in copy_tensors(model.trainable()).items()}


@pytest.fixture
def without_noise(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[int]], None]:
    """Draw the given units in each round, and add no noise to their sum."""

    def give(units: Sequence[int]) -> None:
        picked = lambda stream, count, rate: np.isin(np.arange(count), units)  # noqa: E731
        zeros = lambda stream, count: np.zeros(count, np.int64)  # noqa: E731
        monkeypatch.setattr(private, "draw_units", picked)
        monkeypatch.setattr(private, "draw_discrete_gaussian", zeros)

    return give


def second(site: Any, teacher: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the answer to the initial parameters where θ_t is another model."""
    sent = copy_tensors(site.site.shared)
    site.noisy_gradients(teacher, round=0)
    return dict(site.noisy_gradients(sent, round=1).tensors)


@pytest.mark.parametrize(
    ("unannotated", "clip"),
    [("soft", 0.05), ("soft", 1e6), ("pseudo", 0.05), ("marginal", 1e6)],
)
def test_a_unit_changes_the_sum_by_at_most_the_clip(
    unannotated: str, clip: float, without_noise: Any
) -> None:
    """By brute force, of the second answer of a round: its θ_t is another model than is
    sent, and completes each unit from that unit alone. Whole numbers, so not a bit is
    of its company."""

    def sums(units: Sequence[int]) -> dict[str, torch.Tensor]:
        without_noise(units)
        site = site_of(unannotated=unannotated, privacy={"clip": clip})
        return second(site, other_than(site))

    units = (0, 1, 3)
    together, single = sums(units), [sums([unit]) for unit in units]
    for name, value in together.items():
        assert torch.equal(
            value, sum((unit_sum[name] for unit_sum in single), torch.zeros_like(value))
        )
    grid = site_of(privacy={"clip": clip}).promise.grids[0]
    for unit_sum in single:
        length = grid * float(
            torch.cat([v.double().flatten() for v in unit_sum.values()]).norm()
        )
        assert 0 < length <= clip
        assert clip > 1 or length == pytest.approx(clip, rel=1e-3)


@pytest.mark.parametrize("unannotated", ["soft", "pseudo"])
def test_the_completion_of_a_unit_does_not_depend_on_other_units(
    unannotated: str, without_noise: Any
) -> None:
    """Not a bit of what a unit adds is of the notes that lie beside it at the site."""

    def sums(unit: int, owners: Sequence[str]) -> dict[str, torch.Tensor]:
        without_noise([unit])
        data = three()[0]
        remaining = tuple(d for d in data.train if d.patient in owners)
        site = PRIVATE.make_site(
            replace(data, train=remaining),
            config_of(unannotated=unannotated),
            secret=SECRET,
        )
        return second(site, other_than(site))

    every = ("p0", "p1", "p2", "p3")
    for unit, owner in enumerate(every):
        of_unit = sums(unit, every)
        # A gradient that cannot be computed would count as zero.
        assert any(value.any() for value in of_unit.values())
        assert_same(of_unit, sums(0, [owner]))


def plain(
    site: Any, teacher: dict[str, Any], unannotated: str, unit: Sequence[int]
) -> list[torch.Tensor]:
    """The gradients of a unit's mean loss as the method without noise has them, at a
    site that holds this unit's notes and no other."""
    data = replace(three()[0], train=tuple(three()[0].train[n] for n in unit))
    settings = replace(config_of(unannotated=unannotated), privacy=None)
    reference = distill.Site(data, settings)
    reference.begin(teacher, round=0)
    (_, corpus), start = reference._begun, copy_tensors(site.site.shared)
    load_into(reference.parameters, start)
    losses = reference.model.losses(corpus, range(reference.num_examples))
    return list(torch.autograd.grad((losses.source + losses.target * (unannotated != "marginal")).mean(),
                                    list(reference.parameters.values()), allow_unused=True))  # fmt: skip


@pytest.mark.parametrize("unannotated", ["soft", "pseudo", "marginal", "outside"])
def test_a_unit_is_completed_as_without_differential_privacy(
    unannotated: str, without_noise: Any
) -> None:
    """Against the method itself (Eq. 4 and 5, or the posterior) at a site of that unit
    alone."""
    without_noise([2])
    site = site_of(unannotated=unannotated, privacy={"clip": 1e6})
    start, teacher = copy_tensors(site.site.shared), other_than(site)
    private_gradient = second(site, teacher)
    load_into(site.site.shared, start)
    plain_gradient = plain(site, teacher, unannotated, [4, 5])
    for (name, value), gradient in zip(
        private_gradient.items(), plain_gradient, strict=True
    ):
        expected = (
            torch.zeros_like(site.site.shared[name]) if gradient is None else gradient
        )
        rescaled = value.double() * site.promise.grids[0]
        torch.testing.assert_close(rescaled.float(), expected, rtol=1e-4, atol=3e-2)


def test_predictions_of_other_types_complete_the_annotation() -> None:
    """Eq. 5 word by word against whole documents: what the teacher finds of other
    types, but over the site's own mentions."""
    site = site_of(unannotated="pseudo")
    site.support.prepare_round(site.site, 0, {})
    site.site.teacher = other_than(site)
    corpus, way = site.site.complete_sentences(np.arange(site.num_examples))
    assert way == "pseudo"
    model = build_model(site._config.model, site._config.tags, 0)
    load_into(model.trainable(), site.site.teacher)
    gold = three()[0].train
    predicted = model.predict([replace(d, spans=()) for d in gold])
    known = frozenset(("Disease",))
    completed = [
        pseudo_complete(g, p, known) for g, p in zip(gold, predicted, strict=True)
    ]
    expected = model.annotate(site.site.train_set, completed, known)
    assert (corpus.encoded.tags == expected.encoded.tags).all()
    assert any(
        len(w.spans) > len(g.spans) for w, g in zip(completed, gold, strict=True)
    )
    assert all(
        torch.equal(v, site.site.shared[n])
        for n, v in copy_tensors(site.site.shared).items()
    )


def test_the_teacher_follows_the_first_answer_of_a_round_and_the_warm_up() -> None:
    """Two answers to an epoch, E_loc = 2: θ_t of the first of four; warm-up of one
    round."""
    site = site_of(local_epochs=2, warmup=1)
    assert site.promise.rounds == 12
    sent = [
        {n: v * (1 + step) for n, v in other_than(site).items()} for step in range(6)
    ]
    for step, parameters in enumerate(sent):
        site.noisy_gradients(parameters, round=step)
        assert_same(dict(site.site.teacher), sent[step - step % 4])
        assert site.site._choose_treatment(site.site.rounds) == (
            "marginal" if step < 4 else "soft"
        )


def test_answers_depend_on_the_teacher() -> None:
    """The same parameters at the same step after another teacher have other units and
    other noise; after the same one, made again from the kept state too, the same bits.
    """
    site, again, third_site = site_of(), site_of(), site_of()
    teacher, sent = other_than(site), copy_tensors(site.site.shared)
    first = second(site, teacher)
    again.noisy_gradients(teacher, round=0)
    back = site_of()
    back.restore(again.state())
    assert_same(first, dict(back.noisy_gradients(sent, round=1).tensors))
    third = second(third_site, other_than(third_site, 8))
    assert site._derive_key(1) == back._derive_key(1) != third_site._derive_key(1)
    spread = [(first[n] - third[n]).double().numpy().ravel() / SCALE for n in first]
    assert np.concatenate(spread).std() > 1.2


def test_a_round_without_units_is_only_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """χ², p > 1e-4."""
    monkeypatch.setattr(
        private, "draw_units", lambda stream, count, rate: np.zeros(count, bool)
    )
    site = site_of()
    answer = site.noisy_gradients(copy_tensors(site.site.shared), round=0)
    noise = (
        np.concatenate([v.double().numpy().ravel() for v in answer.tensors.values()])
        / SCALE
    )
    low, high = stats.chi2.ppf([5e-5, 1 - 5e-5], len(noise))
    assert low < float(noise @ noise) < high
    assert (answer.weight, dict(answer.metrics)) == (1.0, {})


@pytest.mark.parametrize("unannotated", ["soft", "pseudo"])
def test_token_classifiers_are_distilled_with_differential_privacy(
    unannotated: str, tmp_path: Path, without_noise: Any
) -> None:
    """A unit alone and in company: the same bits of its windows and of its annotation."""
    pytest.importorskip("transformers")
    encoder = str(save_bert(tmp_path / "bert"))
    model = TokenClassifierConfig(encoder=encoder, train="lora", rank=2, dropout=0.0)

    def sums(units: Sequence[int]) -> dict[str, torch.Tensor]:
        without_noise(units)
        site = site_of(unannotated=unannotated, model=model)
        return second(site, other_than(site))

    together, single = sums([1, 4]), [sums([1]), sums([4])]
    assert_same(together, {n: single[0][n] + single[1][n] for n in together})
    assert any(value.any() for value in together.values())


def test_settings_that_couple_units_are_refused_by_name() -> None:
    table: dict[str, Any] = {
        "method": "distill",
        "synthetic": {},
        "privacy": {"epsilon": 2.0},
    }
    assert not parse_job(table, "job", Path(), "job.toml").config.weighting
    for training, message in (
        (
            {"unannotated": "pseudo", "weighting": True},
            r"weighting = True: under \[privacy\]",
        ),
        ({"aggregation": "uniform"}, r"aggregation = 'uniform': under \[privacy\]"),
        ({"trace": True}, r"trace = True: under \[privacy\]"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_job({**table, "training": training}, "job", Path(), "job.toml")
    with pytest.raises(
        ConfigError, match=r"\[model\] kind = 'prompt-bart' does not: set"
    ):
        parse_job({**table, "preset": "paper"}, "job", Path(), "job.toml")
