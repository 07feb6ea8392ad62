"""Windows: the notes of an input that a model reads together.

A model groups the sentences of a window by length. The last bits of a confidence may
depend on the other sentences of its group, so windows are cut in one place, and never
depend on which process predicts them. Workers receive whole windows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from fednotes.core.types import Document

# Number of notes that are read together from a file, enough to fill a model's batches
# with sentences of similar length.
FILE_BATCH = 256
# Largest number of characters in a window, unless one note is longer.
MAX_CHARACTERS = 1 << 19

Window = Sequence[Document]


class HasText(Protocol):
    """A document, or a note of a patient."""

    @property
    def text(self) -> str:
        """The text."""


AnyNote = TypeVar("AnyNote", bound=HasText)


class WindowPredictor(Protocol):
    """Predicts the notes of windows: a model, or worker processes that have loaded it.

    Attributes:
        types: The entity types of the model.
    """

    @property
    def types(self) -> tuple[str, ...]:
        """The entity types that are predicted."""

    def predict_windows(
        self, windows: Iterable[Window], threshold: float
    ) -> Iterator[Document]:
        """Yield the documents of windows with predicted spans, in their order.

        Args:
            windows: The windows, which are read as needed.
            threshold: Spans of a lower confidence are left out.
        """


def cut_windows(
    documents: Iterable[AnyNote], size: int, batch: int | None = None
) -> Iterator[Sequence[AnyNote]]:
    """Yield the documents in windows.

    Args:
        documents: The documents or notes, which are read as needed.
        size: Largest number of documents in a window; fewer if they are long.
        batch: A window also ends after each multiple of this number of documents, so
            that batches that are stored apart are predicted apart.
    """
    window: list[AnyNote] = []
    characters = 0
    for number, document in enumerate(documents, 1):
        window.append(document)
        characters += len(document.text)
        is_full = len(window) >= size or characters >= MAX_CHARACTERS
        ends_batch = batch is not None and number % batch == 0
        if is_full or ends_batch:
            yield window
            window = []
            characters = 0
    if window:
        yield window
