"""The promise of noisy rounds, compared with independent formulas and Opacus."""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy import special, stats

from fednotes.core.errors import ConfigError, MissingExtra
from fednotes.privacy import promise as module
from fednotes.privacy.noise import SCALE, clip_to_grid
from fednotes.privacy.promise import (
    ORDERS,
    Privacy,
    Promise,
    compute_epsilon,
    find_noise,
)


def moment(order: int, noise: float, rate: float) -> float:
    """Return log E[((1 - q) + q μ1/μ0)^α] of the Gaussian.

    Mironov, Talwar, Zhang 2019, section 3.3.
    """
    return math.log(
        math.fsum(
            math.comb(order, k)
            * (1 - rate) ** (order - k)
            * rate**k
            * math.exp((k * k - k) / (2 * noise**2))
            for k in range(order + 1)
        )
    )


def by_hand(noise: float, delta: float, rate: float, rounds: int) -> float:
    """Compute ε by Canonne, Kamath, Steinke 2020, Proposition 12.

    It is the least over orders that fit a float.
    """
    return min(
        rounds * moment(a, noise, rate) / (a - 1)
        + math.log((a - 1) / a)
        - (math.log(delta) + math.log(a)) / (a - 1)
        for a in ORDERS
        if a <= 32
    )


@pytest.mark.parametrize(
    ("noise", "delta", "rate", "rounds"),
    [(1.0, 1e-5, 64 / 5000, 1560), (1.5, 1e-5, 0.05, 600), (2.0, 1e-6, 0.2, 100)],
)
def test_epsilon_equals_the_formulas(
    noise: float, delta: float, rate: float, rounds: int
) -> None:
    expected = by_hand(noise, delta, rate, rounds)
    assert compute_epsilon(noise, delta, rate, rounds) == pytest.approx(
        expected, rel=1e-6
    )


def test_epsilon_of_counts_is_added_per_order() -> None:
    """Rényi of a Gaussian of everybody is α / 2 σ² (Mironov 2017, Proposition 7); of
    rounds of rate 1 it is so too."""
    for noise, rounds, scores in ((4.0, 3, 6.0), (9.0, 20, 2.0)):
        curve = rounds / (2 * noise**2) + 1 / (2 * scores**2)
        expected = min(
            a * curve + math.log((a - 1) / a) - (math.log(1e-5) + math.log(a)) / (a - 1)
            for a in ORDERS
        )
        assert compute_epsilon(noise, 1e-5, 1.0, rounds, scores) == pytest.approx(
            expected, rel=1e-6
        )
    with_counts = find_noise(4.0, 1e-5, 0.1, 40, 3.0)
    assert with_counts > find_noise(4.0, 1e-5, 0.1, 40)
    assert 3.99 < compute_epsilon(with_counts, 1e-5, 0.1, 40, 3.0) <= 4.0
    with pytest.raises(ConfigError, match=r"no noise keeps it .* and counts = 0.5"):
        find_noise(4.0, 1e-5, 0.1, 40, 0.5)


def integrated(order: float, noise: float, rate: float) -> float:
    """Rényi divergence of a round, the larger of adding a unit and removing it, from
    the two densities alone: Mironov et al., Definition 2 and section 3, by the
    trapezoidal rule, which for analytic integrands that decay so is exact but for
    rounding. No binomial sum."""
    x = np.arange(-40 * noise, order + 1 + 40 * noise, noise / 64)
    without = stats.norm.logpdf(x, 0, noise)
    with_one = np.logaddexp(
        math.log1p(-rate) + without, math.log(rate) + stats.norm.logpdf(x, 1, noise)
    )
    divergences = [
        special.logsumexp(order * p + (1 - order) * q) + math.log(noise / 64)
        for p, q in ((with_one, without), (without, with_one))
    ]
    return float(max(divergences)) / (order - 1)


@pytest.mark.parametrize(
    ("noise", "delta", "rate", "rounds"),
    [(0.7, 1e-5, 0.01, 500), (1.5, 1e-6, 0.05, 600), (3.0, 1e-5, 0.5, 40)],
)
def test_epsilon_equals_that_of_a_numerical_accountant(
    noise: float, delta: float, rate: float, rounds: int
) -> None:
    """The same at whole orders; broken ones, which the discrete noise has no proof for,
    would promise up to 1 % less."""

    def least(orders: Sequence[float]) -> float:
        """Compute ε by Balle et al. 2020, Theorem 21."""
        return min(
            rounds * integrated(a, noise, rate)
            + math.log1p(-1 / a)
            - (math.log(delta) + math.log(a)) / (a - 1)
            for a in orders
        )

    epsilon = compute_epsilon(noise, delta, rate, rounds)
    assert epsilon == pytest.approx(least([a for a in ORDERS if a <= 64]), rel=1e-6)
    assert (
        0.99 * epsilon < least(np.arange(1.5, 40, 0.1).tolist()) <= epsilon * (1 + 1e-9)
    )


def test_a_published_setting_has_the_published_epsilon() -> None:
    """σ = 1, q = 64/5000, 1,560 rounds, δ = 1e-5: 3.31 by Rényi, 3.00 by privacy
    losses."""
    assert compute_epsilon(1.0, 1e-5, 64 / 5000, 1560) == pytest.approx(3.31, abs=0.01)
    with module._importing_accounting() as (events, _):
        accountants = importlib.import_module(
            "dp_accounting.pld.pld_privacy_accountant"
        )
        training_step = events.PoissonSampledDpEvent(
            64 / 5000, events.GaussianDpEvent(1.0)
        )
        accountant = accountants.PLDAccountant().compose(training_step, 1560)
        assert accountant.get_epsilon(1e-5) == pytest.approx(3.00, abs=0.02)


@pytest.mark.parametrize("scale", [1, 2, 5])
@pytest.mark.parametrize("shift", [1, 3])
@pytest.mark.parametrize("order", [2, 3, 8])
def test_the_discrete_gaussian_promises_no_less_than_the_continuous_one(
    scale: int, shift: int, order: int
) -> None:
    """Its moment on whole numbers, summed, is at most the continuous one; so is that of
    the other direction, of removing a unit."""
    rate, wide = 0.3, range(-60 * scale - shift, 60 * scale + 2 * shift)

    def weight(x: int) -> float:
        return math.exp(-(x**2) / (2 * scale**2))

    normalizer = math.fsum(map(weight, wide))
    mixed = {x: (1 - rate) * weight(x) + rate * weight(x - shift) for x in wide}
    support = [x for x in wide if weight(x) > 1e-290 and weight(x - shift) > 1e-290]
    ratio = {x: math.log(mixed[x]) - math.log(weight(x)) for x in support}
    adding = math.fsum(
        math.exp(order * ratio[x] + math.log(weight(x) / normalizer)) for x in support
    )
    removing = math.fsum(
        math.exp((1 - order) * ratio[x]) * weight(x) / normalizer for x in support
    )
    bound = moment(order, scale / shift, rate)
    assert math.log(adding) <= bound + 1e-9
    assert math.log(removing) <= bound + 1e-9


@pytest.mark.parametrize(
    ("epsilon", "delta", "rate", "rounds", "opacus"),
    [
        (4.0, 1e-5, 0.05, 600, 1.64165),
        (1.0, 1e-5, 0.01, 1000, 1.51321),
        (8.0, 1e-6, 0.1, 300, 1.45360),
    ],
)
def test_noise_equals_that_of_opacus(
    epsilon: float, delta: float, rate: float, rounds: int, opacus: float
) -> None:
    """Opacus 1.6.0: get_noise_multiplier(target_epsilon=…, target_delta=…,
    sample_rate=…, steps=…, accountant="rdp", epsilon_tolerance=1e-4); it has broken
    orders too."""
    noise = find_noise(epsilon, delta, rate, rounds)
    assert noise == pytest.approx(opacus, rel=0.01)
    assert compute_epsilon(noise, delta, rate, rounds) <= epsilon
    # no more than is needed
    assert compute_epsilon(noise - 2e-4, delta, rate, rounds) > epsilon


def test_epsilon_grows_with_rounds() -> None:
    promise = Promise.of(Privacy(noise=1.0), 50, 3)
    spent = [promise.compute_epsilon(rounds) for rounds in (0, 1, 10, 50)]
    assert spent[0] == 0
    assert all(a < b for a, b in pairwise(spent))
    assert spent[-1] == promise.compute_epsilon() == promise.to_dict()["epsilon"]


def test_the_shown_epsilon_is_never_smaller_than_the_promised_one() -> None:
    """ε is shown with two decimals, rounded up, of whatever noise."""
    for noise in (0.8, 0.9, 1.0, 1.1, 1.3, 1.7, 2.3):
        promise = Promise.of(Privacy(noise=noise), 50, 3)
        (printed,) = re.findall(r"ε = ([0-9.]+) at δ", str(promise))
        assert (
            promise.compute_epsilon()
            <= float(printed)
            < promise.compute_epsilon() + 0.01
        )


@pytest.mark.parametrize(
    ("sites", "least", "place", "colluding", "shares"),
    [
        (1, 0, "sum", 1, 1),
        (2, 0, "sum", 1, 1),
        (3, 0, "sum", 1, 2),
        (10, 0, "sum", 1, 9),
        (10, 6, "sum", 1, 5),  # a sum may be of six, one of which knows its own noise
        (10, 7, "sum", 3, 4),
        (10, 2, "sum", 0, 6),  # no secure sum is opened with fewer than six of ten
        (10, 0, "site", 1, 1),
        (3, 0, "sum", 0, 3),
    ],
)
def test_the_noise_of_the_fewest_honest_sites_suffices(
    sites: int, least: int, place: str, colluding: int, shares: int
) -> None:
    privacy = {"noise": 2.0, "where": place, "colluding": colluding}
    promise = Promise.of(Privacy(**privacy), 10, sites, least)
    assert promise.shares == shares
    assert promise.site_noise**2 * shares == pytest.approx(2.0**2)


@pytest.mark.parametrize("norm", [1e-30, 1e-3, 1.0, 1e8, 1e37])
def test_the_smallest_clip_has_as_much_noise_as_promised(norm: float) -> None:
    """At a clip of 3e-316, a gradient of norm 1.1e8 was 2.5 times as long on the grid
    as the noise allows for: ε was 14 instead of 1.9."""
    for noise in (0.7, 1.5):
        privacy = Privacy(noise=noise, clip=module.LEAST_CLIP, where="site")
        promise = Promise.of(privacy, 100, 3)
        grids = {"w": promise.grids.shared}
        gradient = {"w": torch.tensor([norm, -norm])}
        clipped = clip_to_grid(gradient, privacy.clip, grids)["w"].double()
        assert float(clipped.norm()) <= SCALE / promise.site_noise
    for clip in (3e-316, 1e-300, 0.99 * module.LEAST_CLIP):
        with pytest.raises(ConfigError, match="clip"):
            Privacy(noise=1.5, clip=clip)
        with pytest.raises(ConfigError, match="counted"):
            Privacy(noise=1.5, counted=clip)


def test_grid_steps_are_fractions_of_the_noise() -> None:
    """By hand: σ = 2 and C = 3 of four sites, one of which counts as none, are 2^26
    steps of 6 / √3 / 2^26 in what is shared, and of 6 / 2^26 in what is not."""
    promise = Promise.of(Privacy(noise=2.0, clip=3.0), 10, 4)
    assert promise.grids == pytest.approx(
        (6 / math.sqrt(3) / 2**26, 6 / 2**26), rel=1e-12
    )


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({}, "give either epsilon"),
        ({"epsilon": 1.0, "noise": 1.0}, "give either epsilon"),
        ({"noise": 0.05}, "at least 0.1"),
        ({"epsilon": 1.0, "delta": 0.5}, "delta = 0.5"),
        ({"epsilon": 1.0, "clip": 0.0}, "clip = 0.0"),
        ({"epsilon": 1.0, "rate": 0.0}, "rate = 0.0"),
        ({"epsilon": -1.0}, "epsilon = -1.0"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"epsilon": 1.0, "clip": float("inf")}, "clip"),
        ({"epsilon": 1.0, "unit": "word"}, "unit = 'word'"),
    ],
)
def test_settings_without_a_promise_are_refused(
    table: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Privacy(**table)


def test_an_epsilon_that_no_noise_reaches_is_refused() -> None:
    with pytest.raises(ConfigError, match="no noise keeps it"):
        Promise.of(Privacy(epsilon=1e-4, rate=1.0), 10_000, 3)


@pytest.mark.parametrize(
    ("sites", "least", "colluding", "needed"),
    [(3, 2, 1, 3), (5, 3, 1, 4), (10, 6, 3, 7), (3, 3, 3, 4)],
)
def test_sums_that_colluding_sites_could_open_are_refused(
    sites: int, least: int, colluding: int, needed: int
) -> None:
    """t > (n + c) / 2, of the secure sum's paper: else c sites and a lying server read
    others."""
    with pytest.raises(ConfigError, match=rf"min_sites to at least {needed} \(of"):
        Promise.of(Privacy(noise=1.0, colluding=colluding), 10, sites, least)
    assert 2 * needed > sites + colluding >= 2 * (needed - 1)


def test_an_error_about_a_missing_package_names_its_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(module.importlib, "import_module", missing)
    with pytest.raises(MissingExtra, match=r"dp-accounting.*fednotes\[privacy\]"):
        compute_epsilon(1.2345, 1e-5, 0.1, 7)
