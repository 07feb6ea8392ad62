"""With a `count_step` no exact count leaves a site, whatever the method; 1 changes no
bit.

What leaves is seen where an engine takes a site's updates, so a count that a method
sends anew is found without being named here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from applications import has_app
from made_sites import mentions
from method_cases import CASES, TAGGER, finetune_case, of_two_types
from recorded import Recording, run
from tiny_models import save_bert
from two_jobs import Case

from fednotes.core.errors import RefusedError
from fednotes.methods import distill, fedner, find, names
from fednotes.methods.private import DPMethod
from fednotes.privacy.promise import Privacy
from fednotes.privacy.training import NOISY

STEP = 10
SUMS = {"loss", "source", "target"}  # of a loss over examples
FLAGS = {
    "contributing",
    "counted",
}  # 0 or 1: whether, or for which tags, a site adds anything
DERIVED = {"share", "part"}  # of reported counts; shares have their own test below


# ---- every method --------------------------------------------------------------------


def with_settings(case: Case, **changes: Any) -> Case:
    made = case.settings
    return replace(case, settings=lambda sites: replace(made(sites), **changes))


def sized_case() -> Case:
    """Distillation that weighs by size and scores test data too."""
    base = distill.Config(
        model=TAGGER, rounds=2, seed=3, aggregation="size", trace=True
    )
    return Case(
        distill.METHOD,
        lambda sites: distill.METHOD.configure(base, sites),
        of_two_types(),
        "train",
        is_change=True,
    )


MORE: dict[str, Callable[[Path], Case]] = {
    "distill, by size": lambda bert: sized_case(),
    "finetune, shared batch, packed": lambda bert: with_settings(
        finetune_case(bert), batch="shared", compression="packed", batch_size=16
    ),
}
if has_app("phenotyping"):
    from phenotype_cases import CALIBRATED_CASES

    MORE |= CALIBRATED_CASES

EVERY = {**CASES, **MORE}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return save_bert(tmp_path_factory.mktemp("rounded counts") / "bert")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDNOTES_CACHE", str(tmp_path))


def is_whole(values: np.ndarray) -> bool:
    """Whether an array can be one of counts: whole numbers, not all of them 0 or 1."""
    finite = np.isfinite(values)
    return bool(
        finite.all()
        and (values == np.round(values)).all()
        and (np.abs(values) > 1).any()
    )


def exact_counts(engine: Recording) -> set[tuple[str, str]]:
    """Where numbers left that can be counts and are no multiples of STEP: task and
    name."""
    found = set()
    for _, task, update in engine.sent:
        numbers = {name: np.array([value]) for name, value in update.metrics.items()}
        if update.weight != 1:
            numbers["weight"] = np.array([update.weight])
        for name, value in update.tensors.items():
            if task == "send":  # changes in a code of whole numbers
                continue
            array = value.double().numpy()
            if (
                name == "sums"
            ):  # of Platt scaling: columns 6 and 7 are numbers of patients
                numbers[name] = array[:, 6:8]
            elif is_whole(array):
                numbers[name] = array
        for name in numbers.keys() - SUMS - FLAGS - DERIVED:
            if (numbers[name] % STEP != 0).any():
                found.add((task, name))
    return found


@pytest.fixture(scope="module")
def run_without_steps(bert: Path) -> Callable[[str], tuple[Recording, Any]]:
    """Train a case by its name with exact counts, once for all tests that ask for it."""

    @functools.cache
    def run_once(name: str) -> tuple[Recording, Any]:
        return run(EVERY[name](bert))

    return run_once


@pytest.mark.parametrize("name", EVERY)
def test_every_count_that_leaves_a_site_is_a_multiple(
    name: str, bert: Path, run_without_steps: Callable[[str], tuple[Recording, Any]]
) -> None:
    """No site here has a number of examples that is one already."""
    exact, _ = run_without_steps(name)
    assert exact_counts(exact)

    rounded, _ = run(EVERY[name](bert), count_step=STEP)
    assert {task for _, task, _ in rounded.sent} == {task for _, task, _ in exact.sent}
    assert exact_counts(rounded) == set()


@pytest.mark.parametrize("name", CASES)
def test_a_step_of_one_changes_no_bit(
    name: str, bert: Path, run_without_steps: Callable[[str], tuple[Recording, Any]]
) -> None:
    without, ended = run_without_steps(name)
    one, same = run(CASES[name](bert), count_step=1)
    assert all(
        torch.equal(value, same.tensors[n]) for n, value in ended.tensors.items()
    )
    for (_, _, update), (_, _, other) in zip(without.sent, one.sent, strict=True):
        assert update.weight == other.weight
        assert update.metrics == other.metrics
        assert update.tensors.keys() == other.tensors.keys()


@pytest.mark.parametrize("name", names())
def test_every_method_rounds_its_counts(name: str) -> None:
    assert find(name).site_class.rounds_counts


# ---- the numbers of equations --------------------------------------------------------


def three_sites(**changes: Any) -> Case:
    """FedNER over sites of 3, 14 and 25 sentences, which are reported as 10, 10 and 30."""
    base = fedner.Config(
        model=TAGGER,
        rounds=1,
        seed=3,
        batch_size=16,
        select="last",
        exchange="weights",
        private=(),
        **changes,
    )
    sites = [
        mentions(name, seed, count) for seed, (name, count) in enumerate(SIZES.items())
    ]
    return Case(
        fedner.METHOD,
        lambda own: fedner.METHOD.configure(base, own),
        sites,
        "train",
        True,
    )


SIZES = {"small": 3, "middle": 14, "large": 25}
REPORTED = {"small": 10, "middle": 10, "large": 30}


def test_equation_2_weighs_by_reported_numbers() -> None:
    """Oracle: NumPy's weighted mean of what the three sites sent."""
    engine, state = run(three_sites(), count_step=STEP)
    updates = {site: update for site, task, update in engine.sent if task == "train"}
    assert {site: update.weight for site, update in updates.items()} == REPORTED
    for name in updates["small"].tensors:
        values = [updates[site].tensors[name].double().numpy() for site in SIZES]
        expected = np.average(values, axis=0, weights=[10, 10, 30])
        found = state.tensors[f"shared.{name}"].double().numpy()
        np.testing.assert_allclose(found, expected, rtol=2**-23, atol=1e-12)


def test_parts_of_a_mini_batch_follow_from_reported_numbers() -> None:
    """By hand: of 16 sentences, 10 / 50, 10 / 50 and 30 / 50 are 3.2, 3.2 and 9.6, and
    a quarter of an equal part is 16 / 12, so 2. The smallest site has no more than 3
    sentences."""
    engine, _ = run(three_sites(), count_step=STEP)
    shares = {
        s: u.metrics["share"] for s, task, u in engine.sent if task == "take_share"
    }
    assert shares == {"small": 3, "middle": 3, "large": 10}


def test_a_loss_is_weighed_by_the_reported_number() -> None:
    """Oracle: the mean of each site's loss, from the same run with exact counts. Its
    mini-batches are set to the same parts, so that only the weight differs."""
    means = []
    for step in (1, STEP):
        case = three_sites()
        settings = case.settings(case.sites)
        for site in case.sites:
            member = fedner.Site(site, settings, count_step=step)
            member.share = 3
            start = {n: p.detach().clone() for n, p in member.shared.items()}
            sent = member.train(start, round=0).metrics
            means.append(sent["loss"] / sent["examples"])
    assert means[:3] == pytest.approx(means[3:], rel=1e-12)


def test_a_site_accepts_the_sum_of_reported_numbers() -> None:
    """The sum of 14 sentences alone is 10; 9 is less than the site has reported itself."""
    case = three_sites()
    member = fedner.Site(case.sites[1], case.settings(case.sites), count_step=STEP)
    assert member.count({}).metrics == {"examples": 10}
    member.take_share({}, examples=10)
    with pytest.raises(RefusedError, match="more sentences than the sum"):
        member.take_share({}, examples=9)


def test_averaging_accepts_the_sum_of_reported_numbers(bert: Path) -> None:
    """24 sentences and as many notes are reported as 20; what is trained is exact."""
    case = with_settings(finetune_case(bert), compression="packed")
    settings = case.settings(case.sites)
    member = case.method.make_site(case.sites[0], settings, count_step=STEP)
    assert member.count({}).metrics == {"examples": 20}
    assert member.weight == 20
    member.take_share({}, examples=20)
    with pytest.raises(RefusedError, match="more examples than the sum"):
        member.take_share({}, examples=19)
    assert member.covered("train")["steps"] == 6  # 24 sentences in batches of 4


# ---- what stays exact, and what has noise --------------------------------------------


def test_scores_at_the_site_stay_exact(tmp_path: Path) -> None:
    """Three test sentences have one mention each; ten leave."""
    case = three_sites()
    settings = case.settings(case.sites)
    members = [
        fedner.Site(site, settings, directory=tmp_path / site.id, count_step=STEP)
        for site in case.sites
    ]
    engine = Recording(members)
    fedner.train(engine, settings)
    for member in members:
        assert member.scores["support"] == 3
        assert (tmp_path / member.id / "scores.json").read_text().count(
            '"support": 3'
        ) > 0
    ends = [update for _, task, update in engine.sent if task == "finish"]
    assert [update.metrics["support/drug/gold"] for update in ends] == [10, 10, 10]


def test_with_differential_privacy_no_count_leaves_at_all() -> None:
    """Weights are the constant 1 and there are no metrics. What leaves has the same
    bits whatever the step: all of it is sums of gradients with noise, in whole numbers.
    """
    privacy = Privacy(noise=1.0, rate=0.5, where="site", unit="document")
    base = fedner.Config(
        model=TAGGER,
        rounds=2,
        seed=3,
        exchange="gradients",
        select="last",
        privacy=privacy,
    )
    sites = [
        mentions(name, seed, count) for seed, (name, count) in enumerate(SIZES.items())
    ]
    method = DPMethod(fedner.METHOD)
    settings = replace(fedner.METHOD.configure(base, sites), min_sites=3)
    ends = []
    for step in (1, STEP):
        members = [
            method.make_site(site, settings, secret=bytes(32), count_step=step)
            for site in sites
        ]
        engine = Recording(members)
        ends.append(method.train(engine, settings).tensors)
        assert [task for _, task, _ in engine.sent] == [NOISY] * 6 + ["finish"] * 3
        for _, task, update in engine.sent:
            assert update.weight == 1
            assert update.metrics == {}
            assert (task == NOISY) == bool(update.tensors)
            assert all(value.dtype == torch.int64 for value in update.tensors.values())
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
