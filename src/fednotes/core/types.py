"""The immutable values that all layers share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

POOLED = "pooled"  # the name of the site that holds the notes of all sites
# Names that no site of a job may have: tables have a row "mean" after the sites' rows.
RESERVED_SITE_NAMES = frozenset({POOLED, "mean"})
Scheme = Literal["BIO", "BIOES", "IO"]
Offsets = tuple[tuple[int, int], ...]  # (start, end) of stretches of a text

_PREFIXES: dict[Scheme, tuple[str, ...]] = {
    "BIO": ("B", "I"),
    "BIOES": ("B", "I", "E", "S"),
    "IO": ("I",),
}


class Counts:
    """Base class of frozen dataclasses with slots whose fields are numbers.

    Values of the same class are added field by field.
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
        end: Character offset after its last character.
        label: The entity type.
        fragments: The (start, end) offsets of the pieces of a discontinuous mention, in
            order; empty for a continuous one. `start` is the start of the first piece
            and `end` the end of the last one.
        confidence: The probability assigned by a model, from 0 to 1. It is ignored in
            comparisons.
    """

    start: int
    end: int
    label: str
    fragments: Offsets = ()
    confidence: float | None = field(default=None, compare=False)

    @property
    def pieces(self) -> Offsets:
        """The (start, end) offsets of the mention's stretches of text."""
        return self.fragments or ((self.start, self.end),)


@dataclass(frozen=True, slots=True)
class Document:
    """A note and its annotations, as returned by every reader.

    Its `repr` does not show text, so that text does not get into logs.

    Attributes:
        id: The note's id, unique in its corpus.
        text: The text.
        spans: The annotated mentions.
        patient: Id of the patient, for splits by patient; None if unknown.
        codes: Billing codes of the hospital stay.
        meta: Further information from the source file.
        sentences: Offsets of the sentences in the source file (CoNLL), so that writing
            loses nothing; empty if it has none.
        tokens: Offsets of the tokens in the source file, as for sentences. Training
            always tokenises by the rules of `data/text.py`.
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
    """The entity types that a site annotates, and their tagging scheme.

    Attributes:
        types: The entity types.
        scheme: The scheme for encoding a mention as tags of its tokens.
        overlaps: Whether mentions of different types may overlap. Tags of tokens then
            describe only the longest of overlapping mentions.
    """

    types: tuple[str, ...]
    scheme: Scheme = "BIO"
    overlaps: bool = field(default=False, repr=False)

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
        return replace(self, types=self.types + added)


def is_type_name(name: str) -> bool:
    """Return whether a text can be the name of an entity type.

    It is not empty, and can be written in UTF-8, which a lone surrogate cannot.
    """
    try:
        return bool(name.encode())
    except UnicodeEncodeError:
        return False


@dataclass(frozen=True, slots=True)
class PublicNotes:
    """Texts that anybody may read; all sites of a job have the same ones.

    Attributes:
        digest: SHA-256 of the texts, as hexadecimal digits.
        documents: The texts, without annotation; empty where only the digest is known.
    """

    digest: str
    documents: tuple[Document, ...] = field(default=(), repr=False)

    @classmethod
    def of(cls, documents: Iterable[Document]) -> Self:
        """Return the texts of documents, without their annotation.

        The boundaries of sentences and tokens in a source file are removed, too. All
        sites therefore cut texts with the same digest into the same sentences.
        """
        texts = tuple(
            replace(document, spans=(), sentences=(), tokens=())
            for document in documents
        )
        digest = hashlib.sha256()
        for document in texts:
            digest.update(f"{document.text}\x1e".encode())
        return cls(digest.hexdigest(), texts)


@dataclass(frozen=True, slots=True)
class SiteData:
    """The corpus of one site, which never leaves the site.

    Attributes:
        id: The site's name.
        tags: The entity types that the site annotates.
        train: Documents to train on.
        valid: Documents for model selection.
        test: Documents for reported scores.
        test_types: The types annotated in `test`, if there are more than in `train` and
            `valid`; empty if they are the same.
        public: The public notes of the job; None if its method does not read any.
    """

    id: str
    tags: TagSet
    train: tuple[Document, ...] = field(repr=False)
    valid: tuple[Document, ...] = field(repr=False)
    test: tuple[Document, ...] = field(repr=False)
    test_types: tuple[str, ...] = ()
    public: PublicNotes | None = None

    @property
    def scored_types(self) -> tuple[str, ...]:
        """The types whose predictions on `test` can be scored."""
        return self.test_types or self.tags.types
