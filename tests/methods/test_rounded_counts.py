"""The numbers of equations where sites report rounded counts.

The contract of methods (`tests/methods/test_method_contract.py`) tests that no exact
count leaves a site.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_sites import mentions
from method_cases import TAGGER, finetune_case
from method_runs import Case, Recording, run

from fednotes.methods import fedner

STEP = 10


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDNOTES_CACHE", str(tmp_path))


# ---- the numbers of equations --------------------------------------------------------


def three_sites(**changes: Any) -> Case:
    """Return FedNER over sites of 3, 14 and 25 sentences, reported as 10, 10 and 30."""
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
        lambda site_data: fedner.METHOD.configure(base, site_data),
        sites,
        "train",
        True,
    )


SIZES = {"small": 3, "middle": 14, "large": 25}
REPORTED = {"small": 10, "middle": 10, "large": 30}


def test_equation_2_weighs_by_rounded_numbers() -> None:
    """Oracle: NumPy's weighted mean of what the three sites sent."""
    engine, state = run(three_sites(), count_step=STEP)
    updates = {site: update for site, task, update in engine.sent if task == "train"}
    assert {site: update.weight for site, update in updates.items()} == REPORTED
    for name in updates["small"].tensors:
        values = [updates[site].tensors[name].double().numpy() for site in SIZES]
        expected = np.average(values, axis=0, weights=[10, 10, 30])
        shared_value = state.tensors[f"shared.{name}"].double().numpy()
        np.testing.assert_allclose(shared_value, expected, rtol=2**-23, atol=1e-12)


def test_parts_of_a_mini_batch_follow_from_rounded_numbers() -> None:
    """By hand: of 16 sentences, 10 / 50, 10 / 50 and 30 / 50 are 3.2, 3.2 and 9.6, and
    a quarter of an equal part is 16 / 12, so 2. The smallest site has no more than 3
    sentences."""
    engine, _ = run(three_sites(), count_step=STEP)
    shares = {
        s: u.metrics["share"] for s, task, u in engine.sent if task == "take_share"
    }
    assert shares == {"small": 3, "middle": 3, "large": 10}


def test_a_loss_is_weighted_by_the_rounded_number() -> None:
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
            if step > 1:
                # More bits would tell the number of mini-batches behind a mean.
                assert sent["loss"] == np.float32(sent["loss"])
            means.append(sent["loss"] / sent["examples"])
    assert means[:3] == pytest.approx(means[3:], rel=1e-6)  # float32


def test_a_site_accepts_the_sum_of_rounded_numbers() -> None:
    """14 sentences alone are reported as 10, so a sum of 10 gives a whole batch."""
    case = three_sites()
    member = fedner.Site(case.sites[1], case.settings(case.sites), count_step=STEP)
    assert member.count({}).metrics == {"examples": 10}
    share = member.take_share({}, examples=10).metrics["share"]
    assert share == member.config.batch_size


def test_averaging_accepts_the_sum_of_rounded_numbers(bert: Path) -> None:
    """24 sentences and as many notes are reported as 20; what is trained is exact."""
    case = finetune_case(bert, compression="packed")
    settings = case.settings(case.sites)
    member = case.method.make_site(case.sites[0], settings, count_step=STEP)
    assert member.count({}).metrics == {"examples": 20}
    assert member.weight == 20
    member.take_share({}, examples=20)
    assert member.count_covered("train")["steps"] == 6  # 24 sentences in batches of 4


# ---- what stays exact, and what has noise --------------------------------------------


def test_scores_at_a_site_remain_exact(tmp_path: Path) -> None:
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
