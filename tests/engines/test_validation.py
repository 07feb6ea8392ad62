"""What may be added to a sum, judged by hand-made updates."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fednotes.core.errors import RefusedError
from fednotes.core.update import Update
from fednotes.engines.validation import Limits, agreed, check_update, expected

GOOD = Update(
    {"w": torch.tensor([3.0, 0.0, -4.0]), "codes": torch.tensor([[1, 2]], dtype=torch.int8)},
    2.0,
    {"loss": 0.5},
)


def changed(**tensors: torch.Tensor) -> Update:
    return Update(dict(GOOD.tensors) | tensors, GOOD.weight, GOOD.metrics)


def test_what_is_right_passes() -> None:
    check_update(GOOD, "mercy", expected(GOOD.tensors))
    check_update(Update(), "mercy", {})
    check_update(Update({"none": torch.empty(0, 3)}, 0), "mercy")
    big = torch.full((4,), torch.finfo(torch.float32).max)
    check_update(Update({"w": big}), "mercy")  # their sum is not finite, they are


@pytest.mark.parametrize(
    ("update", "reason"),
    [
        (Update(GOOD.tensors, -1.0), r"its weight is -1.0"),
        (Update(GOOD.tensors, math.nan), r"its weight is nan"),
        (Update(GOOD.tensors, math.inf), r"its weight is inf"),
        (Update(GOOD.tensors, 1.0, {"loss": math.nan}), r"the metric 'loss' is nan"),
        (changed(w=torch.tensor([0.0, math.nan, 1.0])), r"tensor 'w' is not finite"),
        (changed(w=torch.tensor([0.0, -math.inf, 1.0])), r"tensor 'w' is not finite"),
        (changed(w=torch.zeros(3, 1)), r"tensor 'w' has shape \(3, 1\), expected \(3,\)"),
        (changed(w=torch.zeros(3).double()), r"'w' has type torch.float64, expected torch.float32"),
        (changed(more=torch.zeros(1)), r"tensor 'more' is unknown here"),
        (Update({"w": GOOD.tensors["w"]}), r"tensor 'codes' is missing"),
    ],
)
def test_what_is_wrong_is_refused_with_the_site_and_the_reason(update: Update, reason: str) -> None:
    with pytest.raises(RefusedError, match=f"site 'mercy': its update is refused: .*{reason}"):
        check_update(update, "mercy", expected(GOOD.tensors))


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
    check_update(update, "s", limits=Limits(norm=norm * 1.000001))
    with pytest.raises(RefusedError, match=r"its norm is 5.196, at most 5 is accepted"):
        check_update(update, "s", limits=Limits(norm=5))
    size = 3 * 4 + 2 + 2 * 8
    check_update(update, "s", limits=Limits(nbytes=size))
    with pytest.raises(RefusedError, match=f"it has {size} bytes, at most {size - 1}"):
        check_update(update, "s", limits=Limits(nbytes=size - 1))
    with pytest.raises(RefusedError, match=r"its weight is 2.0, expected 0 to 1"):
        check_update(update, "s", limits=Limits(weight=1))
    with pytest.raises(RefusedError, match="1 metrics, at most 0"):
        check_update(update, "s", limits=Limits(metrics=0))


def test_what_most_look_like_or_what_is_known_is_expected() -> None:
    small, wide = (Update({"w": torch.zeros(n)}) for n in (2, 3))
    assert agreed([small, wide, wide]) == expected(wide.tensors)
    assert agreed([small, wide]) == expected(small.tensors)
    assert agreed([small, wide, wide], expected(small.tensors)) == expected(small.tensors)
    assert agreed([wide, wide], expected(small.tensors)) == expected(wide.tensors)
    assert agreed([Update()]) == agreed([]) == {}
