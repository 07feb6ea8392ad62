"""TOML tables to dataclasses: an error names the mistake and the nearest valid name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from fednotes.core.errors import ConfigError
from fednotes.core.settings import (
    assign,
    build,
    checked,
    expand_path,
    read_toml,
    require_variables,
)


@checked(frozen=True)
class Inner:
    size: int = 1
    name: str = ""


@checked(frozen=True)
class Outer:
    needed: str
    rounds: int = 3
    rate: float = 0.1
    on: bool = False
    scheme: Literal["BIO", "IO"] = "BIO"
    names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = (1,)
    labels: Mapping[str, str] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    parts: tuple[Inner, ...] = ()
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ConfigError(f"rounds = {self.rounds}: at least 1 is needed")


def make(**table: Any) -> Outer:
    return build(Outer, {"needed": "x", **table}, "job.toml [t]")


def test_values_of_a_table_become_fields() -> None:
    settings = make(
        rounds=5, rate=1, on=True, scheme="IO", names=["a", "b"], sizes=[], labels={"A": "B"},
        inner={"size": 2}, parts=[{"name": "p"}, {}], limit=4,
    )  # fmt: skip
    assert settings == Outer(
        "x",
        5,
        1.0,
        True,
        "IO",
        ("a", "b"),
        (),
        {"A": "B"},
        Inner(2),
        (Inner(1, "p"), Inner()),
        4,
    )
    assert type(settings.rate) is float
    assert make(inner=Inner(7)).inner == Inner(7)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"round": 3},
            r"job\.toml \[t\]: unknown key 'round': did you mean 'rounds'\?",
        ),
        ({"zzz": 3}, "unknown key 'zzz': known: inner, labels, limit, names"),
        (
            {"inner": {"sise": 2}},
            r"\[t\] inner: unknown key 'sise': did you mean 'size'\?",
        ),
        ({"parts": [{"nam": ""}]}, "parts: unknown key 'nam': did you mean 'name'"),
        ({"rounds": "3"}, "rounds = '3': expected a whole number"),
        ({"rounds": 3.0}, r"rounds = 3\.0: expected a whole number"),
        ({"rounds": True}, "rounds = True: expected a whole number"),
        ({"rounds": 2**63}, "rounds = 9223372036854775808: expected at most 9,223,372"),
        ({"limit": -(10**400)}, "limit = -1000.*: expected at least -9"),
        ({"sizes": [10**400]}, "sizes = 1000.*: expected at most 9"),
        ({"rate": "x"}, "rate = 'x': expected a number"),
        ({"rate": False}, "rate = False: expected a number"),
        ({"on": 1}, "on = 1: expected true or false"),
        ({"needed": 3}, "needed = 3: expected text in quotes"),
        ({"scheme": "BIOE"}, "scheme = 'BIOE': expected one of 'BIO', 'IO'"),
        ({"scheme": ["BIO"]}, "expected one of"),
        ({"names": "a"}, "names = 'a': expected a list"),
        ({"names": ["a", 2]}, "names = 2: expected text"),
        ({"labels": ["a"]}, "labels = .*: expected a table"),
        ({"labels": {"A": 1}}, r"labels\.A = 1: expected text"),
        ({"inner": 3}, "inner = 3: expected a table"),
        ({"limit": "x"}, "limit = 'x': expected a whole number"),
        ({"rounds": 0}, r"job\.toml \[t\]: rounds = 0: at least 1 is needed"),
    ],
)
def test_an_error_names_the_wrong_key_or_value(
    table: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**table)


def test_an_error_names_the_missing_key() -> None:
    with pytest.raises(ConfigError, match="the key 'needed' is missing"):
        build(Outer, {}, "job.toml")


def test_assignments_reach_nested_tables() -> None:
    table: dict[str, Any] = {"seed": 1, "sites": {"a": {"x": 1}, "b": {}}}
    for text in ("seed=7", "training.rate=1e-3", "training.names=['a','b']", "sites.*.x=0.5",
                 "sites.a.label_map.ADR=ADE", "title=two words", "empty=", "on=true",
                 "quoted='3'", "eq=a=b"):  # fmt: skip
        assign(table, text)
    assert table == {
        "seed": 7, "training": {"rate": 1e-3, "names": ["a", "b"]},
        "sites": {"a": {"x": 0.5, "label_map": {"ADR": "ADE"}}, "b": {"x": 0.5}},
        "title": "two words", "empty": "", "on": True, "quoted": "3", "eq": "a=b",
    }  # fmt: skip


@pytest.mark.parametrize(
    "called", [lambda: Inner(sise=2), lambda: replace(Inner(), sise=2)]
)
def test_a_misspelt_keyword_in_code_is_refused(called: Callable[[], Inner]) -> None:
    with pytest.raises(ConfigError, match="unknown key 'sise'"):
        called()


@pytest.mark.parametrize(
    ("called", "message"),
    [
        (lambda: Inner("2"), "size = '2': expected a whole number"),
        (lambda: Inner(2, 3), "name = 3: expected text in quotes"),
        (
            lambda: Outer("x", 3, 0.1, False, "BIO", ("a", 4)),
            "names = 4: expected text in quotes",
        ),
        (lambda: Outer("x", sizes=(1, "2")), "sizes = '2': expected a whole number"),
    ],
)
def test_an_error_names_a_positional_value_of_the_wrong_type(
    called: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{message}"):
        called()


@pytest.mark.parametrize("text", ["", "seed", "=3", "  =3"])
def test_an_assignment_needs_a_key_and_a_value(text: str) -> None:
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        assign({}, text)


@pytest.mark.parametrize("text", ["names=[a]", "names=['a'", "sites.a={path=x}"])
def test_a_list_or_table_without_quotes_is_not_read_as_text(text: str) -> None:
    with pytest.raises(ConfigError, match=r'texts in quotes, such as \["a", "b"\]'):
        assign({}, text)


@pytest.mark.parametrize("text", ["seed.x=1", "*.x=1", "sites.*.x=1", "seed.*.x=1"])
def test_an_assignment_needs_a_table(text: str) -> None:
    """A value is no table; and `*` without any table would set nothing, silently."""
    with pytest.raises(ConfigError, match="is not a table"):
        assign({"seed": 1, "sites": {}}, text)


def test_files_that_are_not_toml_are_refused(tmp_path: Path) -> None:
    good, bad, binary = tmp_path / "a.toml", tmp_path / "b.toml", tmp_path / "c.toml"
    good.write_text("a = 1\n")
    bad.write_text("a = 1\nb = \n")
    binary.write_bytes(b"\xff\xfe")
    assert read_toml(good) == {"a": 1}
    with pytest.raises(ConfigError, match=r"b\.toml: not a TOML file: .*line 2"):
        read_toml(bad)
    with pytest.raises(ConfigError, match=r"c\.toml: not a TOML file"):
        read_toml(binary)
    with pytest.raises(ConfigError, match="no such file"):
        read_toml(tmp_path / "d.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        read_toml(tmp_path)


@pytest.mark.parametrize(
    "text", ["a = " + "[" * 5000, "a = " + "{b=" * 3000, "a = 1" + "0" * 5000], ids=len
)
def test_a_file_that_breaks_the_toml_parser_is_refused(
    tmp_path: Path, text: str
) -> None:
    """Nested without end, and a number of thousands of digits: one line, no traceback."""
    path = tmp_path / "job.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not a TOML file"):
        read_toml(path)


# ---- environment variables -----------------------------------------------------------


def test_variables_and_the_home_folder_are_expanded_in_a_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NOTES", "/notes")
    monkeypatch.setenv("HOME", "/home/ann")
    assert expand_path("$NOTES/${NOTES}/a", "path") == "/notes//notes/a"
    assert expand_path("~/a", "path") == "/home/ann/a"


def test_set_variables_pass_the_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NOTES", "")
    require_variables([("path", "$NOTES/a"), ("test", "b")])


def test_an_error_suggests_the_former_name_of_a_variable_if_that_is_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("MIMIC_III", "OTHER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MIMIC3", "/mimic")
    with pytest.raises(ConfigError) as error:
        expand_path("$MIMIC_III/NOTEEVENTS.csv", "path")
    assert str(error.value) == (
        "path = '$MIMIC_III/NOTEEVENTS.csv': the environment variable MIMIC_III is not "
        "set; MIMIC3, its former name, is set: export MIMIC_III=$MIMIC3"
    )
    with pytest.raises(ConfigError, match=r"OTHER=/path/to/folder MIMIC_III=\$MIMIC3$"):
        require_variables([("a", "$OTHER"), ("b", "$MIMIC_III")])


def test_a_path_with_a_nul_character_is_refused() -> None:
    with pytest.raises(ConfigError, match="dictionary: the path has a NUL character"):
        expand_path("a\0b", "dictionary")
