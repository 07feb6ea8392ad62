"""Limits on the requests that `fednotes serve` accepts."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from fednotes.core.http_server import Refused
from fednotes.core.numbers import PositiveFloat, PositiveInt
from fednotes.core.settings import checked

# Lone surrogates, which cannot be encoded as UTF-8.
_SURROGATE = re.compile("[\ud800-\udfff]")


@checked(frozen=True)
class Limits:
    """Limits on the requests that the server accepts.

    Attributes:
        max_bytes: Maximum size of a request body in bytes.
        max_values: Maximum number of JSON values in a request. Commas and brackets
            inside texts do not count.
        max_texts: Maximum number of texts or patients in a request.
        max_notes: Maximum number of notes in a table. A small compressed table can have
            millions of short ones.
        max_characters: Maximum number of characters in a text.
        max_requests: Maximum number of concurrent requests, including those that wait
            for the model. The server refuses any further request.
        body_seconds: Time in seconds within which the whole body must arrive, and
            within which a client must accept each part of the answer.
    """

    max_bytes: PositiveInt = 4_000_000
    max_values: PositiveInt = 20_000
    max_texts: PositiveInt = 64
    max_notes: PositiveInt = 100_000
    max_characters: PositiveInt = 100_000
    max_requests: PositiveInt = 64
    body_seconds: PositiveFloat = 15.0

    def require_texts(self, texts: Sequence[str]) -> None:
        """Raise Refused unless the texts of a request respect the limits.

        Raises:
            Refused: There are too many texts, or a text is too long or contains a lone
                surrogate.
        """
        if len(texts) > self.max_texts:
            raise Refused(
                413,
                f"{len(texts):,} texts: a request may have at most "
                f"{self.max_texts:,}; send fewer",
            )
        for number, text in enumerate(texts, 1):
            self.require_length(f"text {number}", text)
            require_unicode(f"text {number}", text)

    def require_patients(self, names: Collection[str]) -> None:
        """Raise Refused if there are too many patients.

        Even a patient without notes gets a result for each of the model's phenotypes.
        """
        if len(names) > self.max_texts:
            raise Refused(
                413,
                f"{len(names):,} patients: a request may have at most "
                f"{self.max_texts:,}; send fewer",
            )

    def require_length(self, name: str, text: str) -> None:
        """Raise Refused if a text has too many characters.

        Args:
            name: What the refusal calls the text, such as "text 1".
            text: The text.
        """
        if len(text) > self.max_characters:
            raise Refused(
                413,
                f"{name} has {len(text):,} characters, but at most "
                f"{self.max_characters:,} are allowed: split it",
            )


def require_unicode(name: str, text: str) -> None:
    """Raise Refused if a text contains a lone surrogate.

    Args:
        name: What the refusal calls the text, such as "text 1".
        text: The text.
    """
    if not text.isascii() and _SURROGATE.search(text):
        raise Refused(
            422,
            f"{name} contains half a character (a lone surrogate): decode it again",
        )
