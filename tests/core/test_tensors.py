"""Seeding torch for one device."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from fednotes.core.tensors import require_deterministic_kernels, seed_torch


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_draws_on_the_cpu_equal_those_of_torch_manual_seed(seed: int) -> None:
    torch.manual_seed(seed)
    expected = torch.nn.functional.dropout(torch.ones(50))
    torch.rand(3)

    seed_torch(seed, torch.device("cpu"))

    assert torch.equal(torch.nn.functional.dropout(torch.ones(50)), expected)


def test_an_accelerator_is_seeded_too() -> None:
    with mock.patch("torch.manual_seed") as seed_every_device:
        seed_torch(5, torch.device("cuda"))

    seed_every_device.assert_called_once_with(5)


def test_kernels_whose_results_vary_are_refused_only_on_the_cpu() -> None:
    require_deterministic_kernels("cpu")
    assert torch.are_deterministic_algorithms_enabled()
    require_deterministic_kernels("cuda")
    assert not torch.are_deterministic_algorithms_enabled()
