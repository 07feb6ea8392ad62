"""Cleaning of foreign text: control characters are escaped, and lengths are bounded."""

from __future__ import annotations

import unicodedata

import pytest

from fednotes.core.cleaning import LINE, NAME, clean, clean_message, clean_to_one_line


@pytest.mark.parametrize(
    "kind",
    [
        *(
            "\x00\x07\b\t\n\v\f\r\x1b\x7f\x85\x9b",
            "\u2028\u2029",
            "\u200b\u200c\u2060\ufeff\xad",
        ),
        *(
            "\u202a\u202b\u202c\u202d\u202e",
            "\u2066\u2067\u2068\u2069\u200e\u200f\u061c",
        ),
        *(
            "\u034f\u115f\u1160\u3164\uffa0\u2800",
            "\xa0\u2003\u3000",
            "\U000e0041\U000e0101",
        ),
        *("\ue000\ud800\u0378",),
    ],
)
def test_invisible_characters_are_escaped(kind: str) -> None:
    for character in kind:
        cleaned = clean(f"a{character}b")
        assert cleaned.isascii(), ascii(character)
        assert cleaned[:2] == "a\\"
        assert cleaned[-1] == "b"


def test_no_control_character_or_odd_blank_of_unicode_remains() -> None:
    """By the database of the standard library; the one joiner has its own test."""
    every = [chr(n) for n in range(0x110000)]
    for character in set(clean("a".join(every), None)):
        category = unicodedata.category(character)
        assert category[0] != "C", ascii(character)
        assert category[0] != "Z" or character == " ", ascii(character)


def test_words_of_every_script_are_unchanged() -> None:
    for text in (
        "Charité, Straße",
        "Ελλάδα",
        "東京",
        "שלום",
        "हिन्दी",
        "e\u0301",
        "👍🏽 ♥\ufe0f",
        "",
    ):
        assert clean(text) == text


def test_a_zero_width_joiner_remains_only_inside_an_emoji() -> None:
    nurse = "\U0001f469\u200d\u2695\ufe0f"
    assert clean(nurse) == nurse
    assert clean("pay\u200dpal") == "pay\\u200dpal"
    assert clean("pay\u200d\u2695") == "pay\\u200d\u2695"
    assert clean(f"{nurse}\u200d") == f"{nurse}\\u200d"


def test_a_text_is_cut_to_the_given_length() -> None:
    assert clean("x" * NAME, NAME) == "x" * NAME
    assert clean("x" * 10**6, NAME) == "x" * (NAME - 1) + "…"
    assert len(clean("\x1b" * 10**6)) == LINE
    assert clean("x" * 10**4, None) == "x" * 10**4
    assert clean(12) == "12"


def test_several_lines_become_one_line() -> None:
    assert clean_to_one_line(" a\n\tb\r\n\x1b[2J  c ") == "a b \\x1b[2J c"
    assert clean_to_one_line(ValueError("no\nway")) == "no way"


def test_a_long_message_keeps_its_beginning_and_its_remedy() -> None:
    short = "a.json: kind = 'y': write one of x"
    assert clean_message(f" {short}\n") == short
    message = clean_message(f"a.json: kind = '{'y ' * 10**6}': write one of \x1b")
    assert message.startswith("a.json: kind = 'y y")
    assert message.endswith("': write one of \\x1b")
    assert len(message) < 2 * LINE + 20
