"""Reading foreign JSON and TOML: a value or one reason, in bounded memory and depth."""

from __future__ import annotations

import json
import os
import tracemalloc
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from time_limits import no_waiting, processor_time_below

from fednotes.core import bounds
from fednotes.core.errors import ConfigError, DataError, ModelError
from fednotes.core.parsing import JsonError, has_more_values, parse_json, read_json
from fednotes.core.settings import read_toml
from fednotes.core.tensors import load_state
from fednotes.data.formats.files import open_file

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@pytest.mark.slow
@given(VALUES, st.booleans())
def test_json_values_survive_a_round_trip(value: Any, strict: bool) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert parse_json(text, strict=strict) == value
    assert parse_json(text.encode(), strict=strict) == value


@given(
    st.binary() | st.text(alphabet='[]{}",:0e-u\\dNaInfity ', max_size=60),
    st.booleans(),
)
def test_any_bytes_give_a_value_or_a_reason(raw: str | bytes, strict: bool) -> None:
    with suppress(JsonError):
        value = parse_json(raw, strict=strict)
        assert not strict or value == json.loads(raw)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Expecting value"),
        (b"\xff", "not UTF-8"),
        ("[" * 1_000_000, "nested too deeply: more than 64"),
        ("[" * 65 + "]" * 65, "nested too deeply: more than 64"),
        ('{"a":' * 3000 + "1" + "}" * 3000, "nested too deeply: more than 64"),
        ("[" + "1," * 2**21 + "1]", "more than 2,097,152 values"),
        (b" " * (2**26 + 1), "over 67,108,864 bytes"),
        ("1" * 5000, "too many digits"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_json_beyond_a_bound_is_refused(
    text: str | bytes, reason: str, strict: bool
) -> None:
    with pytest.raises(JsonError, match=reason):
        parse_json(text, strict=strict)


def test_json_at_the_greatest_allowed_depth_is_read() -> None:
    deep = "[" * bounds.JSON_DEPTH + "]" * bounds.JSON_DEPTH
    assert json.dumps(parse_json(deep)) == deep
    assert len(parse_json(f"[{'[],' * 999}[]]")) == 1000


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1, "a": 2}', "a name occurs twice"),
        ('[{"a": {"b": 1, "b": 1}}]', "a name occurs twice"),
        ("[NaN]", "NaN or Infinity"),
        ("-Infinity", "NaN or Infinity"),
        ("1e999", "NaN or Infinity"),
    ],
)
def test_strict_parsing_refuses_what_the_json_standard_leaves_open(
    text: str, reason: str
) -> None:
    with pytest.raises(JsonError, match=reason):
        parse_json(text)
    parse_json(text, strict=False)


def test_a_refusal_takes_no_more_memory_than_the_text() -> None:
    text = "[" + "[]," * 2**20 + "[]]"
    tracemalloc.start()
    with pytest.raises(JsonError, match="more than 65,536 values"):
        parse_json(text, max_values=2**16)
    assert tracemalloc.get_traced_memory()[1] < 1e5
    tracemalloc.stop()


def test_a_file_is_read_within_bounds_and_errors_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('\n{"a": \n}')
    with pytest.raises(JsonError) as caught:
        read_json(path)
    assert caught.value.line == 3
    with path.open("wb") as file:
        file.truncate(2**33)  # a hole of 8 GB: no more is read than may be
    with pytest.raises(JsonError, match="over 67,108,864 bytes"):
        read_json(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_json(path)


# ---- what stands where a file of ours should be --------------------------------------


def test_a_fifo_is_refused_without_waiting(tmp_path: Path) -> None:
    with no_waiting(10):
        fifo = tmp_path / "manifest.json"
        os.mkfifo(fifo)
        with pytest.raises(OSError, match="a FIFO, but only files are read"):
            read_json(fifo)
        with pytest.raises(ConfigError, match="a FIFO, but only files"):
            read_toml(fifo)
        with pytest.raises(ModelError, match="a FIFO"):
            load_state(tmp_path)
        with pytest.raises(
            DataError, match=r"manifest.json: a FIFO, but only files are read"
        ):
            open_file(fifo)
        with pytest.raises(ConfigError, match="is a folder"):
            read_toml(tmp_path)


def test_a_toml_file_that_is_slow_to_parse_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    for text in (".".join(["a"] * 20_000) + " = 1", "#" * (2**20 + 1)):
        path.write_text(text)
        with pytest.raises(ConfigError, match="too large for a TOML settings file"):
            read_toml(path)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ('["a,b,c,[{", 1]', 2),  # a list and a comma
        (r'["a \" , , \\", "b", {}]', 4),
        ('{"a": "[[[["}', 1),
        ('"' + "," * 1000 + '"', 0),
    ],
)
def test_commas_and_brackets_inside_strings_are_not_counted_as_values(
    text: str, values: int
) -> None:
    assert parse_json(text, max_values=values) == json.loads(text)
    if values:
        with pytest.raises(JsonError, match="more than"):
            parse_json(text, max_values=values - 1)


def test_an_unclosed_string_is_read_in_linear_time() -> None:
    """Each of its quotes could begin a string; a megabyte took minutes."""
    text = "[" * 2000 + '"' + '\\"' * 500_000
    with processor_time_below(5):
        with pytest.raises(JsonError, match="more than 1,000 values"):
            parse_json(text, max_values=1000)
        with pytest.raises(JsonError):
            parse_json(text)


@pytest.mark.parametrize("end", ["", "\\", '\\"', ',"'])
def test_values_before_an_unclosed_string_are_counted(end: str) -> None:
    assert has_more_values(f'[1,2,"a,b,c{end}', 2)
    assert not has_more_values(f'[1,2,"a,b,c{end}', 4)
