"""Turn the texts that a model receives into documents."""

from __future__ import annotations

from fednotes.core.errors import DataError
from fednotes.core.types import Document

Text = str | Document


def to_document(text: Text, number: int) -> Document:
    """Return a text as a document whose id is its position in the input.

    Args:
        text: The text; a document is returned unchanged.
        number: The position, from 1.

    Raises:
        DataError: The item is not a text.
    """
    if isinstance(text, Document):
        _require_text(text.text)
        return text
    _require_text(text)
    return Document(str(number), text)


def _require_text(text: object) -> None:
    """Raise DataError for a value that is not text, or for a lone surrogate in text."""
    if not isinstance(text, str):
        raise DataError(f"expected a text or a Document, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"a text has half a character (a lone surrogate) at index {error.start}: "
            "decode the text again"
        ) from error
