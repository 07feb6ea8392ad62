"""Marks in the types of settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from fednotes.core.settings import (
    FilledIn,
    LocalFile,
    Mark,
    checked,
    list_marked_fields,
)


@checked(frozen=True)
class Base:
    path: LocalFile = ""
    seed: FilledIn[int] = 0
    rate: Annotated[float, Ge(0)] = 0.5


@checked(frozen=True)
class Derived(Base):
    names: FilledIn[tuple[str, ...]] = ()
    table: LocalFile = "none"


@dataclass(frozen=True)
class Plain:
    path: LocalFile
    other: str


def test_marked_fields_of_base_classes_are_listed() -> None:
    assert list_marked_fields(Base, Mark.LOCAL_FILE) == {"path"}
    assert list_marked_fields(Base, Mark.FILLED_IN) == {"seed"}
    assert list_marked_fields(Derived, Mark.LOCAL_FILE) == {"path", "table"}
    assert list_marked_fields(Derived, Mark.FILLED_IN) == {"seed", "names"}
    assert list_marked_fields(Plain, Mark.LOCAL_FILE) == {"path"}


def test_marks_change_neither_values_nor_their_repr() -> None:
    assert Derived(path="a", seed=3, names=("b",)).names == ("b",)
    assert repr(Base(path="a")) == "Base(path='a', seed=0, rate=0.5)"
