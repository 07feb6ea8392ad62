"""Fixed-point words, compared with exact fractions over ranges and dtypes."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fednotes.core.errors import ConfigError, RefusedError, TrainingError
from fednotes.core.update import Total, Update
from fednotes.privacy.secure_sum.fixed_point import (
    BLOCK,
    Field,
    SumLayout,
    check_layout,
    compute_limits,
    decode_sum,
    encode_update,
)


def plain(updates: list[Update], name: str) -> list[Fraction]:
    """Return Σ weight · value exactly, with products formed in float64."""
    rows = [
        [Fraction(float(v) * u.weight) for v in u.tensors[name].view(-1).tolist()]
        for u in updates
    ]
    return [sum(column, Fraction()) for column in zip(*rows, strict=True)]


def summed(updates: list[Update], layout: SumLayout) -> Total:
    words = np.zeros(layout.words, np.uint64)
    for update in updates:
        words += encode_update(update, layout)
    return decode_sum(words, layout, [str(i) for i in range(len(updates))])


sizes = st.floats(-1e3, 1e3, width=32)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 50).flatmap(
        lambda n: st.tuples(
            st.just(n),
            st.lists(
                st.tuples(
                    st.lists(sizes, min_size=3, max_size=3), st.integers(0, 2**20)
                ),
                min_size=1,
                max_size=min(n, 6),
            ),
        )
    )
)
def test_sums_of_one_word_equal_sums_of_rounded_values(case: tuple[int, list]) -> None:
    """Against Fraction: each value rounded half to even at 2^-e, summed exactly; and
    within the stated bound of the sum of unrounded values."""
    sites, rows = case
    updates = [Update({"w": torch.tensor(v)}, float(k), {"n": k / 8}) for v, k in rows]
    layout = SumLayout.of(updates[0], sites)
    total = summed(updates, layout)
    unit = Fraction(2) ** layout.fields[0].exponent
    rounded = [
        sum(
            round(Fraction(float(u.tensors["w"][i]) * u.weight) * unit) for u in updates
        )
        for i in range(3)
    ]
    assert total.tensors["w"].tolist() == [float(Fraction(r) / unit) for r in rounded]
    bound = len(updates) * 2.0 ** -(layout.fields[0].exponent + 1)
    for actual, exact in zip(
        total.tensors["w"].tolist(), plain(updates, "w"), strict=True
    ):
        assert (
            abs(Fraction(actual) - exact)
            <= Fraction(bound) + abs(exact) * Fraction(2) ** -53
        )
    assert total.weight == sum(k for _, k in rows)
    assert total.metrics == {"n": sum(k for _, k in rows) / 8}
    assert total.sites == len(rows)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(-1e9, 1e9), min_size=4, max_size=4), min_size=1, max_size=5
    )
)
def test_sums_of_float64_are_exact_but_for_the_last_bit(
    rows: list[list[float]],
) -> None:
    """Against Fraction; the fine word's unit is at least 2^-60 of 1."""
    updates = [
        Update({"w": torch.tensor(r, dtype=torch.float64)}, 3.0, {"m": r[0]})
        for r in rows
    ]
    layout = SumLayout.of(updates[0], 5)
    total = summed(updates, layout)
    for actual, exact in zip(
        total.tensors["w"].tolist(), plain(updates, "w"), strict=True
    ):
        assert (
            abs(Fraction(actual) - exact)
            <= abs(exact) * Fraction(2) ** -52 + 5 * 2**-60
        )
    exact = sum((Fraction(row[0]) for row in rows), Fraction())
    assert (
        abs(Fraction(total.metrics["m"]) - exact)
        <= abs(exact) * Fraction(2) ** -53 + 5 * 2**-60
    )


def test_the_remainder_is_rounded_to_the_nearest_unit_of_the_second_word() -> None:
    """Against Fraction, of numbers with digits beyond the second word's unit, 2^-(e+g)."""
    values = [1e-9, -1e-9, 3.3e-9, -7.7e-12, 1e-15, 0.3]
    update = Update({"w": torch.tensor(values, dtype=torch.float64)})
    layout = SumLayout.of(update, 5)
    signed, field = encode_update(update, layout).view(np.int64), layout.fields[0]
    cut_off = []
    for at, value in enumerate(values):
        scaled = Fraction(value) * Fraction(2) ** field.exponent
        fine_part = (scaled - round(scaled)) * Fraction(2) ** field.fine
        assert signed[at] == round(scaled)
        assert signed[len(values) + at] == round(fine_part)
        cut_off.append(round(fine_part) != math.trunc(fine_part))
    assert any(cut_off)


def test_float32_means_are_exact_with_limits_from_the_last_total() -> None:
    """Gradients over six decades, weights of hospitals; Fraction is the judge: the
    mean, cast to float32, has the bits of the exact mean wherever the value is within
    2^-20 of the largest."""
    draw = np.random.default_rng(3)
    before, now = (
        [
            Update(
                {
                    "g": torch.from_numpy(
                        draw.normal(size=2000) * 10 ** draw.uniform(-9, -3, 2000)
                    ).float()
                },
                float(draw.integers(100, 100_000)),
            )
            for _ in range(5)
        ]
        for _ in range(2)
    )
    limits = compute_limits(Total.of(before))
    total = summed(now, SumLayout.of(now[0], 5, limits=limits))
    exact = plain(now, "g")
    weight = sum(Fraction(u.weight) for u in now)
    expected = torch.tensor([float(e / weight) for e in exact]).float()
    large = expected.abs() >= expected.abs().max() * 2**-20
    assert large.sum() > 1000
    different = (total.mean()["g"] != expected) & large
    # a tie between two float32 may fall the other way
    assert different.float().mean() < 0.01
    assert torch.allclose(total.mean()["g"], expected, rtol=2**-23, atol=1e-16)


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (torch.float32, 1), (torch.float16, 1), (torch.bfloat16, 1), (torch.int32, 1),
        (torch.uint8, 1), (torch.bool, 1), (torch.float64, 2), (torch.int64, 1),
    ],
)  # fmt: skip
def test_every_real_dtype_is_summed(dtype: torch.dtype, words: int) -> None:
    """Small integers are exact in all of them: the plain sum is the expected value."""
    value = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    updates = [
        Update({"x": value, "e": torch.zeros(0, 4)}, k, {}) for k in (1.0, 2.5, 4.0)
    ]
    layout = SumLayout.of(updates[0], 3)
    assert layout.words == 6 * words + 2 + 1
    total, expected = summed(updates, layout), Total.of(updates)
    assert {n: t.tolist() for n, t in total.tensors.items()} == {
        n: t.tolist() for n, t in expected.tensors.items()
    }
    assert {t.dtype for t in total.tensors.values()} == {torch.float64}
    assert (total.weight, list(total.tensors)) == (7.5, ["x", "e"])


def test_large_counts_are_exact() -> None:
    count = torch.tensor([2**31 - 1, -(2**31), 0], dtype=torch.int32)
    updates = [Update({"c": count}, 2.0**20) for _ in range(7)]
    assert summed(updates, SumLayout.of(updates[0], 50)).tensors["c"].tolist() == [
        7 * 2**20 * (2**31 - 1), -7 * 2**51, 0.0
    ]  # fmt: skip


def test_strided_and_long_tensors_are_summed_exactly() -> None:
    """Against Total.of: integers, so that both sums are exact."""
    base = torch.arange(2 * BLOCK + 14, dtype=torch.float32).reshape(2, -1)
    updates = [Update({"x": base.t().requires_grad_()}, k) for k in (1.0, 3.0)]
    total = summed(updates, SumLayout.of(updates[0], 2))
    assert torch.equal(total.tensors["x"], Total.of(updates).tensors["x"])


@pytest.mark.parametrize("sites", [1, 2, 3, 4, 5, 8, 9, 50, 64, 1024])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_sum_of_all_sites_at_the_limit_does_not_wrap(sites: int, sign: float) -> None:
    """Every site sends the largest value allowed, either sign; the next float32 is
    refused."""
    largest = SumLayout.of(Update({"w": torch.zeros(1)}), sites).largest
    field = SumLayout.of(Update({"w": torch.zeros(1)}), sites).fields[0]
    limit = largest / 2.0**field.exponent
    assert limit >= 2.0**31
    assert sites * largest < 2**63
    update = Update({"w": torch.tensor([sign * limit])})
    layout = SumLayout.of(update, sites)
    words = np.zeros(layout.words, np.uint64)
    for _ in range(sites):
        words += encode_update(update, layout)
    names = [str(i) for i in range(sites)]
    assert decode_sum(words, layout, names).tensors["w"].tolist() == [
        sign * limit * sites
    ]
    above = torch.nextafter(torch.tensor([limit]), torch.tensor([math.inf])) * sign
    with pytest.raises(TrainingError, match=r"tensor 'w'.*limit 2\^31"):
        encode_update(Update({"w": above}), layout)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30])
def test_invalid_values_are_refused_by_name_without_showing_them(bad: float) -> None:
    for dtype in (torch.float32, torch.float64):
        value: Tensor = torch.zeros(BLOCK + 7, dtype=dtype)
        value[-1] = bad
        update = Update({"fine": torch.ones(2), "layer.weight": value})
        with pytest.raises(
            TrainingError, match=r"tensor 'layer\.weight'.*nothing was sent"
        ) as error:
            encode_update(update, SumLayout.of(update, 3))
        assert "1e+30" not in str(error.value)
    for update in (Update(weight=bad), Update(metrics={"loss": bad})):
        with pytest.raises(TrainingError, match=r"weight|metric 'loss'"):
            encode_update(update, SumLayout.of(update, 3))
    update = Update({"w": torch.full((2,), 1e30)}, 1e300)  # the product overflows
    with pytest.raises(TrainingError, match=r"tensor 'w'.*limit"):
        encode_update(update, SumLayout.of(update, 3))


def test_metrics_are_summed_by_agreed_names() -> None:
    update = Update(metrics={"b": 2.0})
    layout = SumLayout.of(update, 3, metrics=["c", "b", "b"])
    total = decode_sum(encode_update(update, layout), layout, ["x"])
    assert total.metrics == {"b": 2.0, "c": 0.0}
    with pytest.raises(TrainingError, match="metric 'b' is not among"):
        SumLayout.of(update, 3, metrics=["c"])


def test_words_that_are_not_a_sum_give_no_total() -> None:
    update = Update({"w": torch.ones(3)}, metrics={"n": 1.0})
    layout = SumLayout.of(update, 3)
    words = encode_update(update, layout)
    for names in ([], ["a", "b"]):
        with pytest.raises(TrainingError, match="did not cancel"):
            decode_sum(words, layout, names)
    with pytest.raises(TrainingError, match="did not cancel"):
        decode_sum(words[1:], layout, ["a"])
    for at in range(layout.words - 1):  # a first and a fine word
        wrong = words.copy()
        wrong[at] = np.uint64(2**63)
        with pytest.raises(TrainingError, match="out of range"):
            decode_sum(wrong, layout, ["a"])


def test_layouts_with_any_difference_are_unequal() -> None:
    update = Update({"w": torch.zeros(2, 3)}, metrics={"n": 1.0})
    base = SumLayout.of(update, 3, purpose="p")
    others = [
        SumLayout.of(update, 4, purpose="p"),
        SumLayout.of(update, 3, purpose="q"),
        SumLayout.of(update, 3, purpose="p", metrics=["n", "m"]),
        SumLayout.of(update, 3, purpose="p", limits={"w": 20}),
        SumLayout.of(update, 3, purpose="p", limits={"w": 21}),
        SumLayout.of(Update({"v": torch.zeros(2, 3)}, 1, {"n": 1.0}), 3, purpose="p"),
        SumLayout.of(Update({"w": torch.zeros(3, 2)}, 1, {"n": 1.0}), 3, purpose="p"),
        SumLayout.of(
            Update({"w": torch.zeros(2, 3).double()}, 1, {"n": 1.0}), 3, purpose="p"
        ),
    ]
    assert len({layout.compute_digest() for layout in (base, *others)}) == 1 + len(
        others
    )
    assert (
        base.compute_digest() == SumLayout.of(update, 3, purpose="p").compute_digest()
    )
    for layout in (base, *others):
        check_layout(layout)
    with pytest.raises(TrainingError, match="not those that the secure sum expects"):
        encode_update(update, others[-2])


def test_impossible_settings_are_refused() -> None:
    for limit in (-301, 301, 10**6):
        with pytest.raises(ConfigError, match="limit of tensor 'w'"):
            SumLayout.of(Update({"w": torch.zeros(2)}), 3, limits={"w": limit})
    with pytest.raises(ConfigError, match="complex64"):
        SumLayout.of(Update({"z": torch.zeros(2, dtype=torch.complex64)}), 3)
    with pytest.raises(ConfigError, match="1 to 1024 sites"):
        SumLayout.of(Update(), 2000)
    weight = Field("weight", "", (), 8, 60)
    for fields in [
        (),
        (weight, weight),
        (weight, Field("tensor", "w", (-1,), 28, 0)),
        (weight, Field("tensor", "w", (1,), 10_000, 0)),
        (weight, Field("tensor", "w", (1,), 28, 3)),
        (weight, Field("metric", "m", (2,), 8, 60)),
        (weight, Field("metric", "m", (), 8, 0)),
        (weight, Field("what", "m", (), 8, 60)),  # type: ignore[arg-type]
    ]:
        with pytest.raises(RefusedError, match="layout"):
            check_layout(SumLayout("", 3, fields))


@pytest.mark.parametrize(
    ("largest", "limit"), [(3.0, 14), (4.0, 14), (-4.5, 15), (0.3, 11)]
)
def test_the_limit_allows_4096_times_the_last_sum(largest: float, limit: int) -> None:
    """By hand: the next power of two is 4, 4, 8 and 1/2, and 4096 is 2^12."""
    total = Total(
        {"g": torch.tensor([0.1, largest, -0.2], dtype=torch.float64)}, 2.0, {}
    )
    assert compute_limits(total) == {"g": limit}
