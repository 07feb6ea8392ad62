"""A third-party package adds an attack."""

from __future__ import annotations

from pathlib import Path

import pytest
from acme import run_python, unpack_acme

ATTACK = '''
"""An attack that always succeeds."""

from fednotes.apps.audit import Attack, Trial


def _trial(scene):
    return Trial(success=1.0, chance=0.5, low=1.0, high=1.0)


ATTACKS = (Attack("oracle", sees="everything", closes="nothing", trial=_trial),)
'''
ENTRY_POINTS = """\
[fednotes.attacks]
oracle = acme_notes.oracle:ATTACKS
"""
PROGRAM = """
from fednotes.apps.audit import load_attacks

print([attack.name for attack in load_attacks()][-1])
"""


@pytest.mark.slow
def test_attacks_of_packages_are_listed_after_the_built_in_ones(tmp_path: Path) -> None:
    environment = unpack_acme(tmp_path / "acme", ENTRY_POINTS, {"oracle": ATTACK})
    assert run_python(environment, "-c", PROGRAM) == "oracle\n"
