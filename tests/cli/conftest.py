"""What tests of commands share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Run = Callable[..., tuple[str, str]]


@pytest.fixture
def run(run_cli: Callable[..., tuple[int, str, str]]) -> Run:
    """Return a function that runs a command and returns stdout and stderr."""

    def run_command(*arguments: object, code: int = 0) -> tuple[str, str]:
        ended, out, err = run_cli(*arguments)
        assert ended == code, err
        return out, err

    return run_command
