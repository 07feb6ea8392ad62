"""Read the meanings and types of fields from the classes behind a job's tables."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import BaseMetadata, Ge, Gt, Interval, Le, Lt

_SECTION = "Attributes:\n"
_ENTRY = re.compile(r"^((?:\w+, )*\w+): ", re.MULTILINE)


# ---- docstrings ----------------------------------------------------------------------


def read_docstring(cls: type[Any]) -> tuple[str, dict[str, str]]:
    """Return a class's description and the meanings of its fields from its docstring.

    The docstring's `Attributes:` section has an entry for each field, such as
    `rounds: …` or `rank, alpha: …`. If a class does not describe a field, the entry
    comes from the classes that it extends.

    Returns:
        The prose about the class, and the meanings of the fields by name.
    """
    names = {field.name for field in fields(cls)} | {"kind"}
    meanings: dict[str, str] = {}
    for base in cls.__mro__:
        if is_dataclass(base):
            for paragraph in _split_paragraphs(base)[1:]:
                for name, text in _read_entries(paragraph, names).items():
                    meanings.setdefault(name, text)
    prose = [
        _join_lines(paragraph)
        for paragraph in _split_paragraphs(cls)
        if not paragraph.startswith(_SECTION) and not _read_entries(paragraph, names)
    ]
    return "\n\n".join(prose), meanings


def _split_paragraphs(cls: type[Any]) -> list[str]:
    """Return the paragraphs of a class's docstring."""
    return inspect.cleandoc(cls.__doc__ or "").split("\n\n")


def _read_entries(paragraph: str, names: Collection[str]) -> dict[str, str]:
    """Return the entries of a paragraph by name.

    Args:
        paragraph: A paragraph of a docstring.
        names: Names that entries may have.

    Returns:
        The texts by name; {} if the paragraph does not begin with an entry.
    """
    text = inspect.cleandoc(paragraph.removeprefix(_SECTION))
    heads = [
        head for head in _ENTRY.finditer(text) if set(head[1].split(", ")) <= set(names)
    ]
    if not heads or heads[0].start() > 0:
        return {}
    ends = [head.start() for head in heads[1:]] + [len(text)]
    entries = {}
    for head, end in zip(heads, ends, strict=True):
        for name in head[1].split(", "):
            entries[name] = _join_lines(text[head.end() : end])
    return entries


def _join_lines(text: str) -> str:
    """Return a text on one line, with single spaces."""
    return " ".join(text.split())


# ---- types ---------------------------------------------------------------------------

_WORDS = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    Any: "text or list of texts",
}


def describe_type(hint: Any) -> str:
    """Describe the permitted values of a type, such as "whole number, at least 1"."""
    origin = get_origin(hint)
    inner = get_args(hint)
    if origin is Annotated:
        return ", ".join([describe_type(inner[0]), *_describe_bounds(inner[1:])])
    if origin is Literal:
        return " or ".join(json.dumps(choice) for choice in inner)
    if origin in (Union, types.UnionType):
        return describe_type(next(each for each in inner if each is not type(None)))
    if origin is tuple:
        element = describe_type(inner[0]).partition(",")[0]
        return f"list of {element}s"
    if origin is not None and issubclass(origin, Mapping):
        return "table of texts" if inner[1] is str else "table"
    return _WORDS.get(hint, "table")


def _describe_bounds(metadata: Sequence[Any]) -> Iterator[str]:
    """Yield the bounds among the metadata of a type, in words."""
    for each in metadata:
        parts = each if isinstance(each, Interval) else (each,)
        for part in parts:
            if isinstance(part, BaseMetadata):
                yield from _describe_bound(part)


def _describe_bound(bound: BaseMetadata) -> Iterator[str]:
    """Yield one bound in words; nothing if it has another form."""
    if isinstance(bound, Ge):
        yield f"at least {bound.ge:,.10g}"
    elif isinstance(bound, Gt):
        yield f"more than {bound.gt:,.10g}"
    elif isinstance(bound, Le):
        yield f"at most {bound.le:,.10g}"
    elif isinstance(bound, Lt):
        yield f"less than {bound.lt:,.10g}"
