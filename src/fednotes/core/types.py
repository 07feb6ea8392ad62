"""The values that all layers share. All of them are immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

POOLED = "pooled"  # the name of the site that holds the notes of all sites
Scheme = Literal["BIO", "BIOES", "IO"]
Offsets = tuple[tuple[int, int], ...]  # (start, end) of stretches of a text

_PREFIXES: dict[Scheme, tuple[str, ...]] = {
    "BIO": ("B", "I"),
    "BIOES": ("B", "I", "E", "S"),
    "IO": ("I",),
}


class Counts:
    """Base of frozen dataclasses with slots whose fields are numbers.

    Two values of one class add field by field.
    """

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        names: tuple[str, ...] = type(self).__slots__
        return type(self)(
            *(getattr(self, name) + getattr(other, name) for name in names)
        )


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """One mention.

    Attributes:
        start: Character offset of its first character in the document's text.
        end: Character offset behind its last character.
        label: The entity type.
        fragments: The (start, end) offsets of the pieces of a discontinuous mention, in
            order; empty for a continuous one. `start` is the start of the first piece
            and `end` the end of the last one.
        confidence: The probability that a model gives it, from 0 to 1. It plays no part
            in equality and order.
    """

    start: int
    end: int
    label: str
    fragments: Offsets = ()
    confidence: float | None = field(default=None, compare=False)

    @property
    def pieces(self) -> Offsets:
        """The (start, end) offsets of the stretches of text that it consists of."""
        return self.fragments or ((self.start, self.end),)


@dataclass(frozen=True, slots=True)
class Document:
    """One note and its annotations, as every reader returns it.

    Its `repr` shows no text, so that none gets into a log.

    Attributes:
        id: The note's id, unique in its corpus.
        text: The text.
        spans: The annotated mentions.
        patient: Id of the patient, for splits by patient; None if unknown.
        codes: Billing codes of the hospital stay.
        meta: Further facts of the source file.
        sentences: Offsets of the sentences as the source file gives them (CoNLL), so
            that writing loses nothing; empty if it gives none.
        tokens: Likewise for tokens. Training always tokenises by the rules of
            `data/text.py`.
    """

    id: str
    text: str = field(repr=False)
    spans: tuple[Span, ...] = ()
    patient: str | None = field(default=None, repr=False)
    codes: tuple[str, ...] = field(default=(), repr=False)
    meta: Mapping[str, Any] = field(default_factory=dict, repr=False)
    sentences: Offsets = ()
    tokens: Offsets = ()


@dataclass(frozen=True, slots=True)
class TagSet:
    """The entity types that one site annotates, and how they are written as tags.

    Attributes:
        types: The entity types.
        scheme: How a mention is written as tags of its tokens.
    """

    types: tuple[str, ...]
    scheme: Scheme = "BIO"

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes of the scheme, in the order of the tags."""
        return _PREFIXES[self.scheme]

    @property
    def tags(self) -> tuple[str, ...]:
        """All tags: "O", then those of each type. A tag's id is its position."""
        tags = [f"{prefix}-{name}" for name in self.types for prefix in self.prefixes]
        return ("O", *tags)

    def union(self, other: TagSet) -> TagSet:
        """Return the types of both sets, this set's first, in this set's scheme."""
        added = tuple(name for name in other.types if name not in self.types)
        return TagSet(self.types + added, self.scheme)


@dataclass(frozen=True, slots=True)
class SiteData:
    """The corpus of one site. It never leaves the site.

    Attributes:
        id: The site's name.
        tags: The entity types that the site annotates.
        train: Documents to train on.
        valid: Documents to choose a model by.
        test: Documents to report scores on.
        test_types: The types annotated in `test`, where these are more than in `train`
            and `valid`; empty if they are the same.
    """

    id: str
    tags: TagSet
    train: tuple[Document, ...] = field(repr=False)
    valid: tuple[Document, ...] = field(repr=False)
    test: tuple[Document, ...] = field(repr=False)
    test_types: tuple[str, ...] = ()

    @property
    def scored_types(self) -> tuple[str, ...]:
        """The types whose predictions on `test` can be scored."""
        return self.test_types or self.tags.types
