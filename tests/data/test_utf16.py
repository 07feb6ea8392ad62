"""Offsets in UTF-16 units, compared with Python's codec."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fednotes.data.formats.utf16 import Utf16Units, count_units

TEXTS = st.text(st.sampled_from("aé中😀💩\U00010000\uffff\n"), max_size=20)


def units_of(text: str) -> int:
    return len(text.encode("utf-16-le")) // 2


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_positions_equal_the_codec(text: str) -> None:
    units = Utf16Units(text)
    starts = {units_of(text[:at]): at for at in range(len(text) + 1)}
    for at in range(len(text) + 1):
        assert units.to_unit(at) == units_of(text[:at])
    for unit in range(units_of(text) + 1):
        assert units.to_character(unit) == starts.get(unit)
    assert count_units(text) == units_of(text)
