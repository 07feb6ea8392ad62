"""Read what a list shows from the address of its page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


def parse_query(adapter: TypeAdapter[T], query: Mapping[str, str]) -> T:
    """Return the filter in a query string; ignore invalid values."""
    try:
        return adapter.validate_python(dict(query))
    except ValidationError as error:
        wrong = {each["loc"][0] for each in error.errors()}
        possible = {name: value for name, value in query.items() if name not in wrong}
        return adapter.validate_python(possible)
