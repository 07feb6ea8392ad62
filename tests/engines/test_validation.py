"""What may be added to a sum, judged by hand-made updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from fednotes.core.errors import RefusedError
from fednotes.core.update import Update
from fednotes.engines.summing import UpdateLimits, agreed, check_like, check_update, limits_of

GOOD = Update(
    {"w": torch.tensor([3.0, 0.0, -4.0]), "codes": torch.tensor([[1, 2]], dtype=torch.int8)},
    2.0,
    {"loss": 0.5},
)


def expected(tensors: Mapping[str, torch.Tensor]) -> Any:
    return {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}


def changed(**tensors: torch.Tensor) -> Update:
    return Update(dict(GOOD.tensors) | tensors, GOOD.weight, GOOD.metrics)


def test_what_is_right_passes() -> None:
    check_update(GOOD, "mercy")
    check_like(GOOD, "mercy", expected(GOOD.tensors))
    check_like(Update(), "mercy", {})
    check_update(Update({"none": torch.empty(0, 3)}, 0), "mercy")
    big = torch.full((4,), torch.finfo(torch.float32).max)
    check_update(Update({"w": big}), "mercy")  # their sum is not finite, they are


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (Update(GOOD.tensors, -1.0), r"its weight must be 0 to 1e\+12 \(it is -1.0\)"),
        (Update(GOOD.tensors, math.nan), r"its weight must be .* \(it is nan\)"),
        (Update(GOOD.tensors, math.inf), r"its weight must be .* \(it is inf\)"),
        (Update(GOOD.tensors, 1.0, {"loss": math.nan}), r"the metric 'loss' is not finite .*nan"),
        (changed(w=torch.tensor([0.0, math.nan, 1.0])), r"tensor 'w' is not finite"),
        (changed(w=torch.tensor([0.0, -math.inf, 1.0])), r"tensor 'w' is not finite"),
        (changed(w=torch.zeros(3, 1)), r"tensor 'w' has shape \(3, 1\), expected \(3,\)"),
        (changed(w=torch.zeros(3).double()), r"'w' has type torch.float64, expected torch.float32"),
        (changed(more=torch.zeros(1)), r"tensor 'more' is unknown here"),
        (Update({"w": GOOD.tensors["w"]}), r"tensor 'codes' is missing"),
    ],
)
def test_what_is_wrong_is_refused_with_the_site_and_the_reason(update: Update, reason: str) -> None:
    def check() -> None:
        check_update(update, "mercy", quoting=True)
        check_like(update, "mercy", expected(GOOD.tensors))

    with pytest.raises(RefusedError, match=f"site 'mercy': its update is refused: .*{reason}"):
        check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_every_type_of_number_is_checked(dtype: torch.dtype) -> None:
    value = torch.zeros(1000, dtype=dtype)
    check_update(Update({"w": value}), "s")
    value[999] = math.inf
    with pytest.raises(RefusedError, match="not finite"):
        check_update(Update({"w": value}), "s")


def test_bounds() -> None:
    """The norm is NumPy's over all floating-point tensors together: 5 of (3, 0, -4)."""
    norm = float(np.linalg.norm([3.0, 0.0, -4.0, 1.0, 1.0]))
    update = changed(v=torch.ones(2, dtype=torch.float64))
    check_update(update, "s", limits=UpdateLimits(norm=norm * 1.000001))
    with pytest.raises(RefusedError, match=r"its norm is above 5 \(it is 5.196\)"):
        check_update(update, "s", limits=UpdateLimits(norm=5), quoting=True)
    size = 3 * 4 + 2 + 2 * 8
    check_update(update, "s", limits=UpdateLimits(nbytes=size))
    with pytest.raises(RefusedError, match=rf"more than {size - 1} bytes \({size}\)"):
        check_update(update, "s", limits=UpdateLimits(nbytes=size - 1), quoting=True)
    with pytest.raises(RefusedError, match=r"its weight must be 0 to 1 \(it is 2.0\)"):
        check_update(update, "s", limits=UpdateLimits(weight=1), quoting=True)
    with pytest.raises(RefusedError, match=r"more than 0 metrics \(1\)"):
        check_update(update, "s", limits=UpdateLimits(metrics=0), quoting=True)


def test_the_setting_of_a_job_is_a_bound_or_none() -> None:
    assert limits_of(0) == UpdateLimits()
    assert limits_of(2.5) == UpdateLimits(norm=2.5)


def test_a_sites_own_refusal_says_no_value_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """The refusals are listed by hand: nothing in them depends on the update's numbers."""
    metrics = {f"n{i}": 1.0 for i in range(7)}
    for update, limits, said in (
        (Update({}, 41.0), UpdateLimits(weight=9), "its weight must be 0 to 9"),
        (Update({}, math.nan), UpdateLimits(), "its weight must be 0 to 1e+12"),
        (Update({}, 1.0, metrics), UpdateLimits(metrics=3), "it has more than 3 metrics"),
        (Update({}, 1.0, {"n": -math.inf}), UpdateLimits(), "the metric 'n' is not finite"),
        (GOOD, UpdateLimits(nbytes=13), "it has more than 13 bytes"),
        (GOOD, UpdateLimits(norm=4.5), "its norm is above 4.5"),
        (
            changed(w=torch.tensor([math.inf])),
            UpdateLimits(),
            "tensor 'w' is not finite (NaN or infinity)",
        ),
    ):
        with pytest.raises(RefusedError) as refused:
            check_update(update, "s", limits=limits)
        assert str(refused.value) == f"site 's': its update is refused: {said}"
    assert "its norm is above 4.5 (it is 5)" in caplog.text  # in the site's own log


def test_what_most_look_like_or_what_is_known_is_expected() -> None:
    small, wide = (Update({"w": torch.zeros(n)}) for n in (2, 3))
    assert agreed([small, wide, wide]) == expected(wide.tensors)
    assert agreed([small, wide]) == expected(small.tensors)
    assert agreed([small, wide, wide], expected(small.tensors)) == expected(small.tensors)
    assert agreed([wide, wide], expected(small.tensors)) == expected(wide.tensors)
    assert agreed([Update()]) == agreed([]) == {}
