"""The core's methods do what every method must (`method_contract.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from method_cases import CASES, FURTHER, PRIVATE
from method_contract import MethodContract
from other_packages import leave_out_others

from fednotes.methods import find_method, list_method_names

APPLICATIONS = Path(__file__).parents[1] / "apps"
METHODS = leave_out_others("methods", list_method_names())

TWO_CHANGES = "in a federation a site trains two changes of the encoder, and alone one"


class TestMethods(MethodContract):
    cases: ClassVar = CASES
    further: ClassVar = FURTHER
    private: ClassVar = PRIVATE
    never_alone: ClassVar = {
        "distill, target gradient": "instance weights need three sites",
        "fedmd": "no site alone has predictions of another one to learn from",
        "personal": TWO_CHANGES,
        "personal, shared batch": TWO_CHANGES,
        "finetune, shared batch, packed": "alone, nothing is compressed",
        "pretrain, new head": "alone, no optimizer of a server steps",
    }


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_contract_case(name: str) -> None:
    """A method of an application is in the application's tests."""
    room, folder, *modules = type(find_method(name)).__module__.split(".")[1:]
    if room == "methods":
        assert folder == name
        assert name in {case.partition(",")[0] for case in CASES}, (
            f"add a case of {name} to CASES in tests/helpers/method_cases.py"
        )
        return
    tests = (APPLICATIONS / folder).glob("test_*_contract.py")
    assert modules
    assert any("MethodContract" in path.read_text("utf-8") for path in tests), (
        f"add a subclass of MethodContract in tests/apps/{folder}/test_…_contract.py"
    )


@pytest.mark.parametrize("name", METHODS)
def test_every_method_rounds_its_counts(name: str) -> None:
    site_class = find_method(name).site_class
    assert site_class.rounds_counts, (
        f"{site_class.__module__}.{site_class.__qualname__} lacks `rounds_counts = True`: "
        'round what it sends (core/counts.py; "Rounded counts" in CONTRIBUTING.md)'
    )


def test_every_method_with_differential_privacy_has_a_private_contract_case() -> None:
    supporting = {name for name in METHODS if find_method(name).dp is not None}
    cases = {case.partition(",")[0] for case in CASES}
    private = {case.partition(",")[0] for case in PRIVATE}
    assert supporting & cases == private, (
        "PRIVATE in tests/helpers/method_cases.py names a case of each method with `dp`"
    )
