"""Checks of updates before they are added to a sum, on updates made by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from fednotes.core.errors import RefusedError
from fednotes.core.update import Total, Update
from fednotes.engines import summing
from fednotes.engines.summing import (
    check_addable,
    check_received,
    choose_expected_layout,
    find_mismatch,
    require_example_counts,
)

GOOD = Update(
    {
        "w": torch.tensor([3.0, 0.0, -4.0]),
        "codes": torch.tensor([[1, 2]], dtype=torch.int8),
    },
    2.0,
    {"loss": 0.5},
)


def expected(tensors: Mapping[str, torch.Tensor]) -> Any:
    return {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}


def changed(**tensors: torch.Tensor) -> Update:
    return Update(dict(GOOD.tensors) | tensors, GOOD.weight, GOOD.metrics)


def test_correct_updates_pass() -> None:
    check_addable(GOOD, "mercy")
    assert (
        find_mismatch(GOOD, expected(GOOD.tensors)) == find_mismatch(Update(), {}) == ""
    )
    check_addable(Update({"none": torch.empty(0, 3)}, 0), "mercy")
    big = torch.full((4,), torch.finfo(torch.float32).max)
    check_addable(Update({"w": big}), "mercy")  # their sum is not finite, they are


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (Update(GOOD.tensors, -1.0), r"its weight must be 0 to 1e\+12 \(it is -1.0\)"),
        (Update(GOOD.tensors, math.nan), r"its weight must be .* \(it is nan\)"),
        (Update(GOOD.tensors, math.inf), r"its weight must be .* \(it is inf\)"),
        (
            Update(GOOD.tensors, 1.0, {"loss": math.nan}),
            r"the metric 'loss' is not finite .*nan",
        ),
        (
            Update({}, 1.0, {"loss": 1.7e308}),
            r"the metric 'loss' must be from -4.*1.7e\+308",
        ),
        (changed(w=torch.tensor([0.0, math.nan, 1.0])), r"tensor 'w' is not finite"),
        (changed(w=torch.tensor([0.0, -math.inf, 1.0])), r"tensor 'w' is not finite"),
    ],
)
def test_wrong_updates_are_refused_with_the_site_and_the_reason(
    update: Update, reason: str
) -> None:
    with pytest.raises(
        RefusedError, match=f"site 'mercy': its update was refused: .*{reason}"
    ):
        check_addable(update, "mercy", quoting=True)


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (changed(w=torch.zeros(3, 1)), "tensor 'w' has shape (3, 1), expected (3,)"),
        (
            changed(w=torch.zeros(3).double()),
            "'w' has type torch.float64, expected torch.float32",
        ),
        (changed(more=torch.zeros(1)), "tensor 'more' is unknown here"),
        (Update({"w": GOOD.tensors["w"]}), "tensor 'codes' is missing"),
    ],
)
def test_an_error_names_the_tensor_with_another_shape_or_dtype(
    update: Update, reason: str
) -> None:
    check_addable(update, "mercy")
    assert find_mismatch(update, expected(GOOD.tensors)).endswith(reason)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
def test_numbers_of_examples_must_be_whole_and_not_negative(dtype: torch.dtype) -> None:
    good = torch.tensor([0, 1, 999_999_999], dtype=dtype)
    require_example_counts(Update({"present": good}, 1.0, {"patients": 3.0}), "mercy")
    require_example_counts(Update({"present": torch.empty(0, 3)}), "mercy")
    for wrong in (-1, 2 * 10**12):
        value = torch.tensor([5, wrong, 5], dtype=dtype)
        reason = "site 'mercy'.*tensor 'present' must have whole numbers from 0 to"
        with pytest.raises(RefusedError, match=reason):
            require_example_counts(Update({"present": value}), "mercy")


@pytest.mark.parametrize("wrong", [-1.0, 0.5, math.nan, math.inf, 2e12])
def test_implausible_numbers_of_examples_are_refused(wrong: float) -> None:
    in_metric = Update({}, 1.0, {"patients": wrong})
    in_tensor = Update({"present": torch.tensor([1.0, wrong])})
    for update, name in ((in_metric, "patients"), (in_tensor, "present")):
        with pytest.raises(RefusedError, match=f"site 'mercy'.*'{name}' must have"):
            require_example_counts(update, "mercy")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_dtype_is_checked_for_finite_values(dtype: torch.dtype) -> None:
    value = torch.zeros(1000, dtype=dtype)
    check_addable(Update({"w": value}), "s")
    value[999] = math.inf
    with pytest.raises(RefusedError, match="not finite"):
        check_addable(Update({"w": value}), "s")


BIGGER = changed(v=torch.ones(2, dtype=torch.float64))
SIZE = 3 * 4 + 2 + 2 * 8
NOT_FINITE = changed(w=torch.tensor([math.inf]))


@pytest.mark.parametrize(
    ("update", "bound", "detail", "value"),
    [
        (BIGGER, {"norm": 5}, "its norm is above 5", "it is 5.196"),
        (BIGGER, {"BYTES": SIZE - 1}, f"it has more than {SIZE - 1} bytes", f"{SIZE}"),
        (GOOD, {"WEIGHT": 1}, "its weight must be 0 to 1", "it is 2.0"),
        (GOOD, {"METRICS": 0}, "it has more than 0 metrics", "1"),
        (GOOD, {"norm": 4.5}, "its norm is above 4.5", "it is 5"),
        (Update({}, math.nan), {}, "its weight must be 0 to 1e+12", "it is nan"),
        (
            Update({}, 1.0, {"n": -math.inf}),
            {},
            "the metric 'n' is not finite",
            "it is -inf",
        ),
        (NOT_FINITE, {}, "tensor 'w' is not finite (NaN or infinity)", ""),
    ],
)
def test_a_refusal_by_the_site_reveals_no_value(
    update: Update,
    bound: dict[str, float],
    detail: str,
    value: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The refusals are listed by hand: nothing in them depends on the update's numbers,
    which are in the site's own log. A server quotes what it was sent."""
    max_norm = bound.get("norm", 0.0)
    for name, number in bound.items() - {("norm", max_norm)}:
        monkeypatch.setattr(summing, f"MOST_{name}", number)
    refusal = f"site 's': its update was refused: {detail}"
    with pytest.raises(RefusedError) as refused:
        check_addable(update, "s", max_norm)
    assert str(refused.value) == refusal
    assert (refusal + (f" ({value})" if value else "")) in caplog.text
    with pytest.raises(RefusedError) as quoted:
        check_addable(update, "s", max_norm, quoting=True)
    assert str(quoted.value) == refusal + (f" ({value})" if value else "")


def test_an_update_just_within_a_bound_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm is NumPy's over all floating-point tensors together."""
    norm = float(np.linalg.norm([3.0, 0.0, -4.0, 1.0, 1.0]))
    for name, number in (("BYTES", SIZE), ("WEIGHT", 2), ("METRICS", 1)):
        monkeypatch.setattr(summing, f"MOST_{name}", number)
    check_addable(BIGGER, "s", norm * 1.000001)
    check_addable(BIGGER, "s")


def test_the_largest_metrics_of_the_most_sites_add_up_to_a_finite_number() -> None:
    """2^52 each is the bound of the secure sum too; a float64 sum of 2^10 of them is
    finite."""
    update = Update({}, 1.0, {"count": 2.0**52, "below": -(2.0**52)})
    check_addable(update, "s")
    total = Total.of([update] * 2**10)
    assert total.metrics == {"count": 2.0**62, "below": -(2.0**62)}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_site_computes_only_with_finite_numbers(value: float) -> None:
    received = {"good": torch.ones(2), "codes": torch.ones(2, dtype=torch.int64)}
    check_received(received, "mercy", "train")
    received["bad"] = torch.tensor([1.0, value])
    with pytest.raises(
        RefusedError, match=r"site .mercy.: tensor .bad. .* task .train. is not fi"
    ):
        check_received(received, "mercy", "train")


def test_the_expected_layout_is_the_known_one_or_that_of_most_sites() -> None:
    small, wide = (Update({"w": torch.zeros(n)}) for n in (2, 3))
    assert choose_expected_layout([small, wide, wide]) == expected(wide.tensors)
    assert choose_expected_layout([small, wide]) == expected(small.tensors)
    assert choose_expected_layout(
        [small, wide, wide], expected(small.tensors)
    ) == expected(small.tensors)
    assert choose_expected_layout([wide, wide], expected(small.tensors)) == expected(
        wide.tensors
    )
    assert choose_expected_layout([Update()]) == choose_expected_layout([]) == {}
