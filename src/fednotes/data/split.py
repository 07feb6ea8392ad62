"""Splitting of corpora without leaks: by patient, document, sentence or any key.

    units       documents that must stay together: a sentence, a document, a patient,
                or a value of a key
    groups      units joined (union-find) because they share a sentence
    parts       train, valid, test: groups are assigned so that each part has its
                fraction of the sentences

In a naive split of the ADE corpus by rows, half of the test rows have their sentence in
train. Here a sentence is never on both sides of a split. All results depend only on the
arguments and the seed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from fednotes.core.errors import ConfigError, DataError, suggest_name
from fednotes.core.seeds import rng_of
from fednotes.core.types import Document, Offsets, SiteData, Span, TagSet
from fednotes.core.wording import format_count
from fednotes.data.stats import find_overlapping_forms, normalise_span
from fednotes.data.text import merge_overlapping, normalise, split_sentences

MIN_WORDS = 5
MASK = "MASK"


def make_sentence_documents(documents: Iterable[Document]) -> tuple[Document, ...]:
    """Cut documents into sentences; return each as a document with its mentions.

    Ids are `<document>#<number>`, and `meta["document"]` is the id of the note. No
    mention crosses a sentence boundary (`split_sentences`). Applying the function again
    changes only ids.
    """
    return tuple(
        sentence for document in documents for sentence in _cut_document(document)
    )


def _cut_document(document: Document) -> Iterator[Document]:
    """Yield each sentence of a document as a document."""
    spans = sorted(document.spans)
    span_starts = [span.start for span in spans]
    token_starts = [start for start, _ in document.tokens]
    token_ends = [end for _, end in document.tokens]
    meta = {"document": document.id, **_select_plain_values(document.meta)}
    for number, (start, end) in enumerate(split_sentences(document)):
        first_span = bisect_left(span_starts, start)
        stop_span = bisect_left(span_starts, end)
        first_token = bisect_left(token_starts, start)
        stop_token = bisect_right(token_ends, end)
        yield replace(
            document,
            id=f"{document.id}#{number}",
            text=document.text[start:end],
            spans=tuple(_shift(span, start) for span in spans[first_span:stop_span]),
            meta=meta,
            sentences=((0, end - start),),
            tokens=_shift_pieces(document.tokens[first_token:stop_token], start),
        )


def _shift(span: Span, by: int) -> Span:
    """Return a span shifted left by `by` characters, without its confidence."""
    fragments = _shift_pieces(span.fragments, by)
    return Span(span.start - by, span.end - by, span.label, fragments)


def _shift_pieces(pieces: Offsets, by: int) -> Offsets:
    """Return stretches of a text shifted left by `by` characters."""
    return tuple((start - by, end - by) for start, end in pieces)


def _select_plain_values(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metadata values by which a corpus can be split.

    A reader's record of the source file is left out, because it has the old offsets.
    """
    return {
        key: value
        for key, value in meta.items()
        if value is None or isinstance(value, str | int | float)
    }


def list_sentence_keys(document: Document) -> list[str]:
    """Return the normalised text of each sentence, for comparison."""
    return [
        normalise(document.text[start:end]) for start, end in split_sentences(document)
    ]


def split_documents(
    documents: Iterable[Document],
    fractions: Mapping[str, float],
    by: str = "",
    seed: int = 0,
    *,
    min_words: int = MIN_WORDS,
) -> dict[str, tuple[Document, ...]]:
    """Split documents into named parts, so that no sentence is in two parts.

    Groups are shuffled and assigned in size classes (powers of two, the largest first),
    each to the part that it overfills least. Parts therefore come close to their
    target sizes, and each gets both long and short notes. Documents keep their order
    within a part.

    Args:
        documents: The documents.
        fractions: Each part's fraction of the sentences; they must sum to 1. A
            fraction of 0 gives an empty part.
        by: "patient", "document", "sentence" (every result is a document of one
            sentence) or a key of `Document.meta`. "" uses the result of `choose_unit`;
            a document without a patient is then a separate unit.
        seed: Seed of the split.
        min_words: Units of several sentences are joined by an identical sentence only
            if it has at least this many words: "She was discharged ." would join all
            notes of a hospital. In a split by sentence, identical sentences always stay
            together. `fednotes check` counts shorter repeats across parts, and
            `remove_leaks` drops them.

    Raises:
        ConfigError: The fractions are negative or do not sum to 1.
        DataError: A document lacks the key, or there are fewer groups than parts.
    """
    _check_fractions(fractions)
    documents = tuple(documents)
    may_lack_unit = not by
    by = by or choose_unit(documents)
    items = documents
    if by == "sentence":
        items = make_sentence_documents(documents)
        min_words = 1
    keys = [list_sentence_keys(item) for item in items]
    units = [
        _find_unit(items, index, by, may_be_missing=may_lack_unit)
        for index in range(len(items))
    ]
    groups = _group_documents(keys, units, min_words)
    sizes = [sum(max(1, len(keys[i])) for i in group) for group in groups]
    shares = {name: fraction for name, fraction in fractions.items() if fraction > 0}
    if len(groups) < len(shares):
        remedy = (
            "give more notes, give separate train, valid and test files, or set the "
            'fraction of a part to 0; split = "sentence" also works, but puts '
            "sentences of one note in several parts"
        )
        if by == "sentence":
            remedy = "give more data"
        raise DataError(
            f"cannot split {len(items)} documents by {by} into {len(shares)} parts: "
            f"they form only {format_count(len(groups), 'group')} with no sentence in "
            f"common; {remedy}"
        )

    parts: dict[str, tuple[Document, ...]] = dict.fromkeys(fractions, ())
    for name, dealt in _deal_groups(sizes, shares, rng_of(seed, "split", by)).items():
        indices = sorted(index for group in dealt for index in groups[group])
        parts[name] = tuple(items[index] for index in indices)
    return parts


def _check_fractions(fractions: Mapping[str, float]) -> None:
    """Raise ConfigError unless fractions sum to 1 and none is negative."""
    values = fractions.values()
    if not values or min(values) < 0 or abs(sum(values) - 1) > 1e-6:
        shown = ", ".join(f"{name} = {value:g}" for name, value in fractions.items())
        raise ConfigError(
            "the fractions of a split must sum to 1, and none may be negative; "
            f"given: {shown or 'none'}"
        )


def choose_unit(documents: Iterable[Document]) -> str:
    """Return the default unit: "patient" if a document has one, else "document"."""
    return "patient" if any(d.patient is not None for d in documents) else "document"


def _group_documents(
    keys: Sequence[Sequence[str]], units: Sequence[str | None], min_words: int
) -> list[list[int]]:
    """Return the indices of the documents that stay together (union-find).

    Args:
        keys: The keys of each document's sentences.
        units: The unit of each document; None does not join it to others.
        min_words: Sentences with fewer words do not join documents.
    """
    group_of = {index: [index] for index in range(len(keys))}
    first_index: dict[tuple[str, str], int] = {}
    for index, (sentences, unit) in enumerate(zip(keys, units, strict=True)):
        links = [
            ("sentence", key) for key in sentences if len(key.split()) >= min_words
        ]
        if unit is not None:
            links.append(("unit", unit))
        for link in links:
            other = first_index.setdefault(link, index)
            smaller, larger = sorted((group_of[other], group_of[index]), key=len)
            if smaller is not larger:  # join the two groups
                larger += smaller
                group_of |= dict.fromkeys(smaller, larger)
    distinct = {id(group): group for group in group_of.values()}
    return sorted(sorted(group) for group in distinct.values())


def _find_unit(
    items: Sequence[Document], index: int, by: str, *, may_be_missing: bool
) -> str | None:
    """Return the unit of a document; None if units do not join it to others.

    Args:
        items: All documents, for the message.
        index: The index of the document.
        by: As in `split_documents`.
        may_be_missing: Whether the document may lack the unit.

    Raises:
        DataError: The document lacks a unit that must not be missing.
    """
    if by in ("sentence", "document"):
        return None
    value = _get_unit(items[index], by)
    if value is not None:
        return str(value)
    if may_be_missing:
        return None
    known: Sequence[str] = ()
    if by != "patient":
        known = ("patient", "document", "sentence", *items[index].meta)
    hint = suggest_name(
        by,
        known,
        "leave split out: known patients stay together, and each other document is a "
        "unit of its own",
    )
    missing = sum(_get_unit(document, by) is None for document in items)
    raise DataError(
        f"cannot split by {by}: {missing} of {len(items)} documents have no value for "
        f"it; {hint}"
    )


def _get_unit(document: Document, by: str) -> object:
    """Return the value of a unit that a document has; None if it has none."""
    return document.patient if by == "patient" else document.meta.get(by)


def _deal_groups(
    sizes: Sequence[int], shares: Mapping[str, float], rng: np.random.Generator
) -> dict[str, list[int]]:
    """Assign groups to parts by Webster's rule, so that no part is empty.

    Args:
        sizes: Sentences of each group.
        shares: Fraction of each part, above 0.
        rng: Source of randomness.

    Returns:
        The indices of the groups of each part, by the part's name.
    """
    order = rng.permutation(len(sizes)).tolist()
    # The sort is stable, so groups stay shuffled within a class.
    order.sort(key=lambda group: -sizes[group].bit_length())
    filled = dict.fromkeys(shares, 0.0)
    dealt: dict[str, list[int]] = {name: [] for name in shares}
    for group in order:
        half = sizes[group] / 2
        name = min(shares, key=lambda n: (filled[n] + half) / shares[n])
        dealt[name].append(group)
        filled[name] += sizes[group]
    for name in shares:
        if not dealt[name]:
            donor = max(shares, key=lambda n: len(dealt[n]))
            smallest = min(reversed(dealt[donor]), key=lambda group: sizes[group])
            dealt[donor].remove(smallest)
            dealt[name].append(smallest)
    return dealt


def subsample(
    documents: Sequence[Document], fraction: float, seed: int = 0
) -> tuple[Document, ...]:
    """Return a random fraction of the documents, at least one, in their order.

    With the same seed, a smaller sample is a subset of a larger one, so each point of a
    learning curve only adds data.
    """
    order = rng_of(seed, "subsample").permutation(len(documents))
    count = max(1, round(fraction * len(documents)))
    return tuple(documents[i] for i in sorted(order[:count].tolist()))


def remove_leaks(
    train: Sequence[Document], test: Iterable[Document]
) -> tuple[tuple[Document, ...], int]:
    """Remove the sentences of `test` from `train`.

    Documents without such sentences are returned unchanged. The remaining sentences of
    other documents are returned as single-sentence documents.

    Returns:
        The training documents, and the number of sentences that were removed.
    """
    test_keys = {key for document in test for key in list_sentence_keys(document)}
    clean: list[Document] = []
    dropped = 0
    for document in train:
        is_leak = [key in test_keys for key in list_sentence_keys(document)]
        if not any(is_leak):
            clean.append(document)
            continue
        dropped += sum(is_leak)
        sentences = make_sentence_documents([document])
        clean += [
            sentence
            for sentence, leaks in zip(sentences, is_leak, strict=True)
            if not leaks
        ]
    return tuple(clean), dropped


def mask_overlap(
    documents: Sequence[Document],
    other_sites_documents: Sequence[Sequence[Document]],
    ratio: float,
    seed: int = 0,
) -> tuple[Document, ...]:
    """Mask a fraction of the entities that one site shares with others.

    Fig. 5 of the paper only says "randomly masking different ratios of overlapped
    entities in training data". Here, candidates are the surface forms (ignoring case
    and white space) that are annotated, with any label, in the training data of two or
    more sites; a random `ratio` of them is drawn. Every annotated mention of a drawn
    form is replaced by the word MASK and loses its label. The sentence is kept.

    The draw depends only on the set of forms and on the seed. Therefore every site that
    knows the documents of all others draws the same forms, and the forms of a smaller
    ratio are a subset of those of a larger one. A mention around a masked one keeps its
    label (over the word MASK); a mention inside it, or across its boundary, is removed.
    Occurrences without annotation are kept.

    Args:
        documents: The site's training documents.
        other_sites_documents: The training documents of each other site.
        ratio: Fraction of the shared forms to mask, 0 to 1.
        seed: Seed of the draw.
    """
    forms = sorted(find_overlapping_forms([documents, *other_sites_documents]))
    order = rng_of(seed, "mask").permutation(len(forms))
    drawn = {forms[i] for i in order[: round(ratio * len(forms))].tolist()}
    return tuple(_mask_forms(document, drawn) for document in documents)


class _Masking:
    """Stretches of a text to replace by the word MASK, and the new offsets.

    Args:
        stretches: Half-open offsets, at least one, in order and without overlaps.
    """

    def __init__(self, stretches: Sequence[tuple[int, int]]) -> None:
        self.stretches = stretches
        self._starts, self._ends = np.array(stretches).T
        # shifts[i]: the shift of text after the first i stretches
        gains = len(MASK) - (self._ends - self._starts)
        self._shifts = np.concatenate([[0], np.cumsum(gains)])

    def apply(self, text: str) -> str:
        """Return the text with each stretch replaced."""
        # The unmasked text lies before, between and after the stretches.
        starts = [0, *self._ends.tolist()]
        ends = [*self._starts.tolist(), len(text)]
        unmasked = zip(starts, ends, strict=True)
        return MASK.join(text[start:end] for start, end in unmasked)

    def move(self, offset: int) -> int:
        """Return the new offset; offsets inside a masked stretch map to its end."""
        # Stretches that begin before the offset; the last of them may go on beyond it.
        num_begun = int(np.searchsorted(self._starts, offset, side="left"))
        is_inside = num_begun > 0 and offset < self._ends[num_begun - 1]
        base = self._ends[num_begun - 1] if is_inside else offset
        return int(base + self._shifts[num_begun])

    def move_pieces(self, pieces: Iterable[tuple[int, int]]) -> Offsets:
        """Return the new offsets of stretches of text."""
        return tuple((self.move(start), self.move(end)) for start, end in pieces)

    def touches(self, start: int, end: int) -> bool:
        """Return whether a piece of text overlaps a masked stretch."""
        return bool(self._find_touched(start, end))

    def breaks(self, start: int, end: int) -> bool:
        """Return whether a piece is inside a masked stretch or crosses its boundary."""
        touched = self._find_touched(start, end)
        # All stretches between the first and the last one are inside the piece.
        return any(
            (start, end) == (s, e) or not (start <= s and e <= end)
            for s, e in (*touched[:1], *touched[-1:])
        )

    def _find_touched(self, start: int, end: int) -> Sequence[tuple[int, int]]:
        """Return the masked stretches that overlap a piece of text."""
        first = int(np.searchsorted(self._ends, start, side="right"))
        stop = int(np.searchsorted(self._starts, end))
        return self.stretches[first:stop]


def _mask_forms(document: Document, forms: set[str]) -> Document:
    """Return a document in which the mentions of some forms are masked."""
    masked_spans = {
        s for s in document.spans if normalise_span(document.text, s) in forms
    }
    if not masked_spans:
        return document
    masking = _Masking(
        merge_overlapping(piece for span in masked_spans for piece in span.pieces)
    )
    spans = [
        Span(
            masking.move(span.start),
            masking.move(span.end),
            span.label,
            masking.move_pieces(span.fragments),
        )
        for span in document.spans
        if span not in masked_spans
        and not any(masking.breaks(start, end) for start, end in span.pieces)
    ]
    tokens: Offsets = ()
    if document.tokens:
        outside = [piece for piece in document.tokens if not masking.touches(*piece)]
        tokens = tuple(sorted(masking.move_pieces([*outside, *masking.stretches])))
    return replace(
        document,
        text=masking.apply(document.text),
        spans=tuple(sorted(spans)),
        tokens=tokens,
        meta=_select_plain_values(document.meta),
        sentences=masking.move_pieces(document.sentences),
    )


def pool_documents(sites: Sequence[SiteData]) -> SiteData:
    """Return one site with all sites' training and validation documents and types."""
    return SiteData(
        id="pooled",
        tags=reduce(TagSet.union, (site.tags for site in sites)),
        train=tuple(document for site in sites for document in site.train),
        valid=tuple(document for site in sites for document in site.valid),
        test=(),
    )
