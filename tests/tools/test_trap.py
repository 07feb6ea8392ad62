"""Whether `tools/trap.py` reads single sentences."""

from __future__ import annotations

import pytest
import trap


@pytest.fixture(autouse=True)
def few_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trap, "SENTENCES", 40)


def test_trap_weights_read_neighbours_of_words_through_a_secure_sum() -> None:
    setting = trap.WORDS["fedner, 8 sentences"]
    trapped = trap.words_read(setting, 1, secure=True, honest=False)
    honest = trap.words_read(setting, 1, secure=True, honest=True)
    assert trapped >= 0.25
    assert honest <= 0.1
