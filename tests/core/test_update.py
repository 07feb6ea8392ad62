"""Sums over sites, compared with NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fednotes.core.errors import TrainingError
from fednotes.core.update import GROUP_SIZE, Total, Update

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


def updates(sites: int, size: int, dtype: torch.dtype = torch.float32) -> list[Update]:
    rng = np.random.default_rng(sites)
    return [
        Update(
            {"w": torch.from_numpy(rng.normal(size=size)).to(dtype)},
            int(rng.integers(1, 999)),
        )
        for _ in range(sites)
    ]


@pytest.mark.parametrize(
    "sites", [1, 2, 3, GROUP_SIZE, GROUP_SIZE + 1, 3 * GROUP_SIZE + 2]
)
@pytest.mark.parametrize("size", [1, 7, 2**15, 2**15 + 1, 100_003])
def test_the_sum_equals_numpy_in_float64_in_the_given_order(
    sites: int, size: int
) -> None:
    """NumPy: total = 0.0; for each site: total += weight * float64(value).

    Equal to the bit.
    """
    site_updates = updates(sites, size)
    expected = np.zeros(size)
    for update in site_updates:
        expected += update.weight * update.tensors["w"].numpy().astype(np.float64)
    total = Total.of(iter(site_updates))
    assert total.tensors["w"].dtype == torch.float64
    np.testing.assert_array_equal(total.tensors["w"].numpy(), expected)
    weight = sum(update.weight for update in site_updates)
    assert (total.weight, total.sites) == (weight, sites)
    mean = total.mean()["w"]
    np.testing.assert_array_equal(mean.numpy(), (expected / weight).astype(np.float32))


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64]
)
def test_other_dtypes_and_layouts_give_the_same_sum(dtype: torch.dtype) -> None:
    """A transposed view and every type of number, against the same loop in NumPy."""
    rng = np.random.default_rng(0)
    values = [
        torch.from_numpy(rng.normal(size=(50, 30)) * 9).to(dtype).T for _ in range(3)
    ]
    weights = [3, 17, 170]
    total = Total.of(Update({"w": v}, w) for v, w in zip(values, weights, strict=True))
    pairs = zip(values, weights, strict=True)
    expected = sum(w * v.to(torch.float64).numpy() for v, w in pairs)
    np.testing.assert_array_equal(total.tensors["w"].numpy(), expected)
    np.testing.assert_allclose(total.mean()["w"].numpy(), expected / 190, rtol=1e-6)


@settings(max_examples=300, deadline=None)
@given(
    arrays.arrays(np.float32, st.integers(1, 40), elements=finite),
    st.integers(1, 2**28),
)
def test_the_mean_of_one_site_equals_its_value_to_the_last_bit(
    value: np.ndarray, weight: int
) -> None:
    """24 bits times 28 are exact in 53, so dividing gives the value back, signed zeros
    too."""
    mean = Total.of([Update({"w": torch.from_numpy(value)}, weight)]).mean()["w"]
    assert mean.numpy().tobytes() == value.tobytes()


def test_the_mean_is_rounded_to_its_dtype_only_once() -> None:
    """(2^24 + 1 + 2^24 - 1) / 2 = 2^24; a float32 sum would lose the 1."""
    pair = [Update({"w": torch.tensor([x])}) for x in (2.0**24, 2.0, 2.0**24 - 2)]
    assert Total.of(pair).tensors["w"].item() == 2.0**25
    assert Total.of(pair).mean(torch.float64)["w"].item() == 2.0**25 / 3


def test_computing_a_total_does_not_change_the_updates() -> None:
    site_updates = updates(3, 10)
    before = [update.tensors["w"].clone() for update in site_updates]
    total = Total.of(site_updates)
    summed = total.tensors["w"].clone()
    total.mean()["w"].zero_()
    assert all(
        torch.equal(b, u.tensors["w"])
        for b, u in zip(before, site_updates, strict=True)
    )
    assert torch.equal(total.tensors["w"], summed)


def test_metrics_are_added_without_weights() -> None:
    total = Total.of(
        [Update({}, 5, {"tp": 2, "fn": 1}), Update({}, 7, {"tp": 3, "fp": 4.5})]
    )
    assert total.metrics == {"tp": 5.0, "fn": 1.0, "fp": 4.5}
    assert total.weight == 12


@pytest.mark.parametrize("number", [2, GROUP_SIZE + 1])
def test_updates_with_different_names_or_shapes_are_refused(number: int) -> None:
    """Wherever the odd one comes, also behind the updates that are added together."""
    plain = [Update({"a": torch.zeros(2)})] * (number - 1)
    with pytest.raises(TrainingError, match="'a' is not in all"):
        Total.of([*plain, Update({"b": torch.zeros(2)})])
    with pytest.raises(TrainingError, match="not in all"):
        Total.of([*plain, Update({})])
    with pytest.raises(
        TrainingError, match=r"'a' has shape \(2,\) at one site and \(3,\)"
    ):
        Total.of([*plain, Update({"a": torch.zeros(3)})])
    with pytest.raises(TrainingError, match="shape"):
        Total.of([*plain, Update({"a": torch.zeros(1, 2)})])


def test_a_total_without_weight_has_no_mean() -> None:
    with pytest.raises(TrainingError, match="no site has any training data"):
        Total.of([Update({"a": torch.zeros(2)}, 0)]).mean()
    assert Total.of([]).sites == 0


def test_a_site_of_weight_zero_does_not_affect_the_mean() -> None:
    mean = Total.of(
        [Update({"a": torch.ones(2)}, 0), Update({"a": torch.full((2,), 3.0)}, 4)]
    )
    assert mean.mean()["a"].tolist() == [3.0, 3.0]


def test_a_sum_carries_no_gradient() -> None:
    value = torch.ones(3, requires_grad=True)
    assert not Total.of([Update({"a": value}, 2)]).tensors["a"].requires_grad


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"w": (2, 3), "b": (3,)}, "tensor 'b' is missing in the sites' updates"),
        ({}, "tensor 'w' is not expected in the sites' updates"),
        ({"w": (3, 2)}, r"returned tensor 'w' with shape \(2, 3\), expected \(3, 2\)"),
        ({"w": (6,)}, r"returned tensor 'w' with shape \(2, 3\), expected \(6,\)"),
    ],
)
def test_a_sum_with_other_tensors_than_the_server_needs_is_refused(
    shapes: dict[str, tuple[int, ...]], message: str
) -> None:
    total = Total.of([Update({"w": torch.ones(2, 3)})])
    total.require({"w": (2, 3)})
    with pytest.raises(TrainingError, match=message):
        total.require(shapes)


def test_an_error_names_a_count_that_no_site_reported() -> None:
    total = Total.of([Update(metrics={"loss": 2.0}), Update()])
    assert total.metric("loss") == 2.0
    with pytest.raises(TrainingError, match="no site reported the count 'examples'"):
        total.metric("examples")
