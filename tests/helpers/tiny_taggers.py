"""A tagger that trains in a blink, and whether two sets of parameters have the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from fednotes.taggers.tagger import TaggerConfig

MODEL = TaggerConfig(
    char_dim=6, char_filters=8, cnn_filters=10, lstm_units=5, hashed_words=50, word_dim=4
)
NO_DROPOUT = replace(MODEL, dropout=0.0)


def assert_same(left: Mapping[str, Any], right: Mapping[str, Any]) -> None:
    """The same names, and each value to the bit."""
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name
