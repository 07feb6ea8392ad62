"""Turn the texts that people give a model into documents."""

from __future__ import annotations

from fednotes.core.errors import DataError
from fednotes.core.types import Document

Text = str | Document


def document_of(text: Text, number: int) -> Document:
    """Return a text as a document whose id is its place in the input.

    Args:
        text: The text; a document is returned as it is.
        number: The place, counted from 1.

    Raises:
        DataError: It is not a text.
    """
    if isinstance(text, Document):
        _require_text(text.text)
        return text
    _require_text(text)
    return Document(str(number), text)


def _require_text(text: object) -> None:
    """Raise DataError for what is not a text, and for a text with half a character."""
    if not isinstance(text, str):
        raise DataError(f"expected a text or a Document, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"half a character at {error.start} of a text: decode the text again"
        ) from error
