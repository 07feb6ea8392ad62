"""Errors of a worker process, carried as JSON values to the process that it works for.

There, the error has the class and the text that it would have had in one process.
Nothing is pickled: an error's class is found by name among the classes of errors that a
user can cause and Python's own, and its fields are plain values.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fednotes.core.errors import DataError, FednotesError, Problem

Plain = str | int | float | bool | None


def describe_error(error: Exception) -> dict[str, Any]:
    """Return an error as JSON values for `rebuild_error`."""
    kind = _find_known_class(error)
    values = {
        name: value for name, value in vars(error).items() if isinstance(value, Plain)
    }
    problems = error.problems if isinstance(error, DataError) else ()
    is_plain = all(isinstance(value, Plain) for value in error.args)
    return {
        "module": kind.__module__,
        "class": kind.__qualname__,
        "text": str(error),
        "arguments": _list_arguments(error)
        if is_plain and type(error) is kind
        else None,
        "fields": values,
        "problems": [asdict(problem) for problem in problems],
        "trace": "".join(traceback.format_tb(error.__traceback__)),
    }


def rebuild_error(description: Mapping[str, Any]) -> Exception:
    """Return the error that `describe_error` described."""
    name = str(description["class"])
    text = str(description["text"])
    module = importlib.import_module(str(description["module"]))
    kind = getattr(module, name, None)
    if isinstance(kind, type) and issubclass(kind, FednotesError):
        # Classes have constructors of their own, which need not take the text.
        error: Exception = kind.__new__(kind, text)
        Exception.__init__(error, text)
        vars(error).update(description["fields"])
        if isinstance(error, DataError):
            problems = description["problems"]
            error.problems = tuple(Problem(**problem) for problem in problems)
        return error

    arguments = description["arguments"]
    if isinstance(kind, type) and issubclass(kind, Exception) and arguments is not None:
        error = kind(*arguments)
    elif isinstance(kind, type) and issubclass(kind, RuntimeError | OSError):
        error = kind(text)
    else:
        error = RuntimeError(f"{name}: {text}")
    error.add_note(f"in a worker process:\n{description['trace']}")
    return error


def _list_arguments(error: Exception) -> list[Plain]:
    """Return the arguments of the constructor that make an equal error."""
    if isinstance(error, OSError) and error.filename is not None:
        return [error.errno, error.strerror, str(error.filename)]
    return list(error.args)


def _find_known_class(error: Exception) -> type[BaseException]:
    """Return the nearest class of an error that the receiving process can import."""
    for kind in type(error).__mro__:
        is_top_level = "." not in kind.__qualname__
        is_known = issubclass(kind, FednotesError) or kind.__module__ == "builtins"
        if is_known and is_top_level and issubclass(kind, BaseException):
            return kind
    return RuntimeError
