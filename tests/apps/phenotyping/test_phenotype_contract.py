"""Phenotyping satisfies the contract of methods (`method_contract.py`)."""

from __future__ import annotations

from typing import ClassVar

import torch
from method_contract import MethodContract
from method_runs import Reference
from phenotype_cases import CASES, FURTHER, PRIVATE


class TestPhenotyping(MethodContract):
    cases: ClassVar = CASES
    further: ClassVar = FURTHER
    private: ClassVar = PRIVATE

    def test_counts_of_patients_are_whole_numbers(self, reference: Reference) -> None:
        """The sum that they are in is exact, also if it is secure."""
        totals = reference.engine.totals
        counted = [total for task, total in totals if task.startswith("count_")]
        without_counts = (
            "phenotype, classifiers",
            "phenotype, attention",
            "phenotype, attention without adapters",
        )
        assert counted or reference.name in without_counts
        for total in counted:
            assert all(torch.equal(v, v.round()) for v in total.tensors.values())


def test_phenotyping_has_a_contract_case() -> None:
    assert {name.partition(",")[0] for name in CASES} == {"phenotype"}
