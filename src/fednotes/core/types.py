"""The values that every layer speaks of. Frozen; safe to share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

POOLED = "pooled"  # the site that has every site's notes
Scheme = Literal["BIO", "BIOES", "IO"]
Offsets = tuple[tuple[int, int], ...]


class Counts:
    """Base of frozen dataclasses with slots whose fields are numbers: they add, field
    by field."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        names: tuple[str, ...] = type(self).__slots__
        return type(self)(
            *(getattr(self, name) + getattr(other, name) for name in names)
        )


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """One mention.

    start, end: character offsets into the document's text, half-open.
    label: the entity type.
    fragments: the pieces of a discontinuous mention, in order, half-open; empty for a
        continuous one. `start` is the first fragment's start, `end` the last one's end.
    confidence: how probable a model finds it, 0 to 1; no part of what it is: neither of
        equality nor of order.
    """

    start: int
    end: int
    label: str
    fragments: Offsets = ()
    confidence: float | None = field(default=None, compare=False)

    @property
    def pieces(self) -> Offsets:
        """The stretches of text that it consists of."""
        return self.fragments or ((self.start, self.end),)


@dataclass(frozen=True, slots=True)
class Document:
    """One note with what is annotated in it; what every reader returns. Its repr has no
    text.

    sentences, tokens: character offsets as the source file gives them (CoNLL), kept so
        that writing loses nothing. Empty where the source has none; training always
        tokenises by the project's own rule (`data/text.py`).
    patient: whose note it is, for splits by patient. codes: billing codes of the stay.
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
    """The entity types that one site annotates, and how its tags are written.

    `tags` lists the tags by id: "O" first, then each type's tags in the order B, I, E,
    S.
    """

    types: tuple[str, ...]
    scheme: Scheme = "BIO"

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The tag prefixes of the scheme, in id order."""
        return {"BIO": ("B", "I"), "BIOES": ("B", "I", "E", "S"), "IO": ("I",)}[
            self.scheme
        ]

    @property
    def tags(self) -> tuple[str, ...]:
        """Every tag; a tag's id is its position."""
        return ("O", *(f"{p}-{t}" for t in self.types for p in self.prefixes))

    def union(self, other: TagSet) -> TagSet:
        """The complete tag set of two sites: self's types first, self's scheme."""
        added = tuple(t for t in other.types if t not in self.types)
        return TagSet(self.types + added, self.scheme)


@dataclass(frozen=True, slots=True)
class SiteData:
    """One site's corpus. Never leaves the site.

    test_types: the types annotated in `test` where it is annotated more completely than
        `train` and `valid`; those of `tags` if empty.
    """

    id: str
    tags: TagSet
    train: tuple[Document, ...] = field(repr=False)
    valid: tuple[Document, ...] = field(repr=False)
    test: tuple[Document, ...] = field(repr=False)
    test_types: tuple[str, ...] = ()

    @property
    def scored_types(self) -> tuple[str, ...]:
        """The types that predictions on `test` can be judged by."""
        return self.test_types or self.tags.types
