"""What the tests of all formats use: a file to read, what was found in it, what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fednotes.core.errors import DataError
from fednotes.core.types import Document
from fednotes.data.formats import read


@pytest.fixture
def forms() -> Callable[[Document], list[tuple[str, str]]]:
    """forms(document): the text and label of each span."""
    return lambda document: [(document.text[s.start : s.end], s.label) for s in document.spans]


@pytest.fixture
def complains() -> Callable[..., None]:
    """complains(path, message, format): reading it is refused, in one line, without its text."""

    def check(path: Path, message: str, format: str | None = None) -> None:
        with pytest.raises(DataError, match=message) as caught:
            read(path, format)
        assert "\n" not in str(caught.value)
        assert "Zyxwolan" not in str(caught.value)

    return check
