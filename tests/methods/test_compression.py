"""Codes for updates that add: NumPy for the codes, an identity for what is left over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fednotes.core.errors import RefusedError
from fednotes.methods.averaging import BLOCK, agreed, decode, encode, require_code, told


def change(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(10, 30, generator=generator),
        "b": torch.randn(7, generator=generator) / 100,
    }


def test_eight_bits_round_to_the_step_and_keep_the_rest() -> None:
    """NumPy: nearest multiple of 4 rms / 127, at most 127 of them; nothing is lost."""
    one = change(1)
    code = agreed(told(one, "int8"), "int8", 0)
    sent, left = encode(one, code, "int8")
    for name, value in one.items():
        step = 4 * np.sqrt(np.mean(value.numpy() ** 2)) / 127
        wanted = np.clip(np.round(value.numpy() / step), -127, 127)
        assert sent[name].dtype == torch.int8
        np.testing.assert_array_equal(sent[name].numpy(), wanted)
    back = decode({n: v.float() for n, v in sent.items()}, code, one, "int8")
    for name, value in one.items():
        torch.testing.assert_close(back[name] + left[name], value)


def test_the_blocks_with_the_largest_sums_are_sent() -> None:
    """NumPy: mean squares over two sites by block; the largest third of all blocks."""
    sites = [change(1), change(2)]
    means = {n: (told(sites[0], "top-k")[n] + told(sites[1], "top-k")[n]) / 2 for n in sites[0]}
    code = agreed(means, "top-k", 1 / 3)
    blocks = []
    for name in ("a", "b"):
        flat = [np.pad(s[name].numpy().ravel(), (0, -s[name].numel() % BLOCK)) for s in sites]
        energy = sum(f.reshape(-1, BLOCK) ** 2 for f in flat).mean(1)
        blocks += [(float(e), name, i) for i, e in enumerate(energy)]
    wanted = {(name, i) for _, name, i in sorted(blocks, reverse=True)[:2]}
    assert {(n, int(i)) for n, chosen in code.items() for i in chosen} == wanted
    sent, left = encode(sites[0], code, "top-k")
    back = decode(sent, code, sites[0], "top-k")
    for name, value in sites[0].items():
        torch.testing.assert_close(back[name] + left[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("compression", ["int8", "top-k"])
def test_error_feedback_sends_everything_in_time(compression: Any) -> None:
    """A site that keeps changing by the same amount: what was sent tends to t times that."""
    constant = {name: value / value.std() for name, value in change(1).items()}
    left = {name: torch.zeros_like(value) for name, value in constant.items()}
    total: dict[str, torch.Tensor] = {}
    for _ in range(60):
        now = {n: v + left[n] for n, v in constant.items()}
        code = agreed(told(now, compression), compression, 0.34)
        sent, left = encode(now, code, compression)
        got = decode({n: v.float() for n, v in sent.items()}, code, constant, compression)
        total = {n: got[n] + total.get(n, 0) for n in got}
    for name, value in constant.items():
        torch.testing.assert_close(total[name] / 60, value, rtol=0, atol=0.4)
        torch.testing.assert_close(total[name] + left[name], 60 * value, rtol=1e-4, atol=1e-3)


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_a_code_that_narrows_an_update_down_is_refused() -> None:
    """Of 5 blocks and 1, a third is two; a step size for each tensor."""
    one = change(1)
    for right in ({"a": int32(0, 4), "b": int32()}, {"a": int32(3), "b": int32(0)}):
        require_code(right, one, "top-k", 1 / 3)
    for wrong in (
        {"a": int32(0), "b": int32()},  # one block alone
        {"a": int32(0, 0), "b": int32()},
        {"a": int32(4, 0), "b": int32()},
        {"a": int32(-1, 0), "b": int32()},
        {"a": int32(0), "b": int32(1)},
        {"a": int32(0, 1).long(), "b": int32()},
        {"a": int32(0, 1).reshape(1, 2), "b": int32()},
        {"a": int32(0, 1)},
    ):
        with pytest.raises(RefusedError, match="the code for the changes is none of this job"):
            require_code(wrong, one, "top-k", 1 / 3)
    steps = {"a": torch.tensor([0.1]), "b": torch.tensor([0.0])}
    require_code(steps, one, "int8", 1.0)
    for step in (torch.tensor([-0.1]), torch.tensor([torch.inf]), torch.tensor([torch.nan])):
        with pytest.raises(RefusedError, match="none of this job"):
            require_code(steps | {"b": step}, one, "int8", 1.0)
    with pytest.raises(RefusedError, match="none of this job"):
        require_code(steps | {"b": torch.tensor([0.1, 0.2])}, one, "int8", 1.0)
