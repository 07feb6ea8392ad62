"""Splits that leak nothing: by patient, document, sentence or a given key.

    units       what must stay together: a sentence, a document, a patient, a value of a key
    groups      units joined (union-find) because they share an identical sentence
    parts       train, valid, test: groups dealt out until each part has its share of sentences

Half of the ADE corpus' test rows have their sentence in train when its rows are split
naively; here a sentence never stands on both sides of a split. Everything is a function
of the seed.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np

from fednotes.core.errors import ConfigError, DataError, nearest
from fednotes.core.seeds import rng_of
from fednotes.core.types import Document, Offsets, SiteData, Span, TagSet
from fednotes.data.stats import overlapping_forms, span_form
from fednotes.data.text import joined, normalise, split_sentences

MIN_WORDS = 5
MASK = "MASK"


def sentence_documents(documents: Iterable[Document]) -> tuple[Document, ...]:
    """One document per sentence, in order; spans and tokens are kept, offsets shifted.

    Ids are `<document>#<number>`; `meta["document"]` is the id of the note. Idempotent
    up to ids. A mention never straddles two sentences (`split_sentences` sees to that).
    """
    return tuple(piece for document in documents for piece in _pieces(document))


def _pieces(document: Document) -> Iterator[Document]:
    spans, tokens = sorted(document.spans), document.tokens
    starts = [span.start for span in spans]
    firsts, lasts = [first for first, _ in tokens], [last for _, last in tokens]
    meta = {"document": document.id, **_plain(document.meta)}
    for number, (start, end) in enumerate(split_sentences(document)):
        own = spans[bisect_left(starts, start) : bisect_left(starts, end)]
        inside = tokens[bisect_left(firsts, start) : bisect_right(lasts, end)]
        yield replace(
            document,
            id=f"{document.id}#{number}",
            text=document.text[start:end],
            spans=tuple(
                Span(s.start - start, s.end - start, s.label, _back(s.fragments, start))
                for s in own
            ),
            meta=meta,
            sentences=((0, end - start),),
            tokens=_back(inside, start),
        )


def _back(pieces: Offsets, by: int) -> Offsets:
    return tuple((start - by, end - by) for start, end in pieces)


def _plain(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The values that one can split by.

    What a reader keeps of its file has the old offsets.
    """
    return {
        k: v for k, v in meta.items() if v is None or isinstance(v, str | int | float)
    }


def sentence_keys(document: Document) -> list[str]:
    """The normalised text of each sentence: equal keys are one sentence."""
    text = document.text
    return [normalise(text[a:b]) for a, b in split_sentences(document)]


def split(
    documents: Iterable[Document],
    fractions: Mapping[str, float],
    by: str = "",
    seed: int = 0,
    *,
    min_words: int = MIN_WORDS,
) -> dict[str, tuple[Document, ...]]:
    """Deal `documents` out into the named parts.

    fractions: share of the sentences of each part; they sum to 1. A part of 0 is empty.
    by: "patient", "document", "sentence" (every result is a document of one sentence)
        or a key of `Document.meta`. Without it, what `unit_of` says; a document without
        a patient then stands for itself.
    min_words: units of more than one sentence are joined by an identical sentence only
        if it has this many words: "She was discharged ." would make one group of a
        whole hospital. Split by sentence, identical sentences stay together whatever
        their length. Shorter repeats across parts are found by `fednotes check` and
        dropped by `without_leaks`.

    Groups are shuffled and dealt in classes of size (powers of two, largest first),
    each to the part that it leaves least over its share, so parts are near the sizes
    asked for and hold long and short notes alike. Documents keep their order within a
    part.

    Raises ConfigError if the fractions are no shares, DataError if a document lacks the
    key or there are fewer groups than parts.
    """
    shares = fractions.values()
    if not shares or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        shown = ", ".join(f"{name} = {share:g}" for name, share in fractions.items())
        raise ConfigError(
            f"the fractions of a split must sum to 1, not: {shown or 'none given'}"
        )
    lenient, documents = not by, tuple(documents)
    by = by or unit_of(documents)
    items = sentence_documents(documents) if by == "sentence" else documents
    keys = [sentence_keys(d) for d in items]
    groups = _groups(items, keys, by, 1 if by == "sentence" else min_words, lenient)
    sizes = [sum(max(1, len(keys[i])) for i in group) for group in groups]
    wanted = {name: share for name, share in fractions.items() if share > 0}
    if len(groups) < len(wanted):
        remedy = (
            "give more notes, train, valid and test files of your own, or a fraction of 0 for a "
            'part; split = "sentence" also works, but puts sentences of one note in several parts'
        )
        raise DataError(
            f"cannot split {len(items)} documents by {by} into {len(wanted)} parts: they form "
            f"only {len(groups)} group(s) with no sentence in common; "
            f"{'give more data' if by == 'sentence' else remedy}"
        )
    parts: dict[str, tuple[Document, ...]] = dict.fromkeys(fractions, ())
    for name, chosen in _deal(sizes, wanted, rng_of(seed, "split", by)).items():
        parts[name] = tuple(
            items[i] for i in sorted(i for g in chosen for i in groups[g])
        )
    return parts


def unit_of(documents: Iterable[Document]) -> str:
    """What a split leaves whole unless it is told: "patient" if any document has one,
    else "document"."""
    return "patient" if any(d.patient is not None for d in documents) else "document"


def _groups(
    items: Sequence[Document],
    keys: Sequence[Sequence[str]],
    by: str,
    min_words: int,
    lenient: bool,
) -> list[list[int]]:
    """Documents, by index, that stay together. lenient: one may lack the unit."""
    # the smaller joins the larger
    group = {index: [index] for index in range(len(items))}
    first: dict[tuple[str, str], int] = {}
    for index, sentences in enumerate(keys):
        names = [
            ("sentence", key) for key in sentences if len(key.split()) >= min_words
        ]
        if by not in ("sentence", "document") and not (
            lenient and items[index].patient is None
        ):
            names.append(("unit", _unit(items, index, by)))
        for name in names:
            one, two = sorted(
                (group[first.setdefault(name, index)], group[index]), key=len
            )
            if one is not two:
                two += one
                group |= dict.fromkeys(one, two)
    found = {id(own): sorted(own) for own in group.values()}
    return sorted(found.values())


def _unit(items: Sequence[Document], index: int, by: str) -> str:
    def own(document: Document) -> object:
        return document.patient if by == "patient" else document.meta.get(by)

    value = own(items[index])
    if value is None:
        known = (
            ()
            if by == "patient"
            else ("patient", "document", "sentence", *items[index].meta)
        )
        told = "leave split out: known patients stay together, and each other document"
        hint = nearest(by, known, told)
        lacking = sum(own(document) is None for document in items)
        raise DataError(
            f"cannot split by {by}: {lacking} of {len(items)} documents have none; {hint}"
        )
    return str(value)


def _deal(
    sizes: Sequence[int], wanted: Mapping[str, float], rng: np.random.Generator
) -> dict[str, list[int]]:
    """Group indices per part. Webster's divisor rule on sizes; no part stays empty."""
    order = rng.permutation(len(sizes)).tolist()
    order.sort(key=lambda g: -sizes[g].bit_length())  # stable: shuffled within a class
    filled = dict.fromkeys(wanted, 0.0)
    dealt: dict[str, list[int]] = {name: [] for name in wanted}
    for group in order:
        name = min(wanted, key=lambda n: (filled[n] + sizes[group] / 2) / wanted[n])
        dealt[name].append(group)
        filled[name] += sizes[group]
    for name in wanted:
        if not dealt[name]:
            donor = max(wanted, key=lambda n: len(dealt[n]))
            smallest = min(reversed(dealt[donor]), key=lambda g: sizes[g])
            dealt[donor].remove(smallest)
            dealt[name].append(smallest)
    return dealt


def subsample(
    documents: Sequence[Document], fraction: float, seed: int = 0
) -> tuple[Document, ...]:
    """A random `fraction` of the documents (rounded, at least one), in their order.

    Nested: with one seed a smaller sample is a subset of a larger one, so that a
    learning curve adds data at each point and exchanges none.
    """
    order = rng_of(seed, "subsample").permutation(len(documents))
    count = max(1, round(fraction * len(documents)))
    return tuple(documents[i] for i in sorted(order[:count].tolist()))


def without_leaks(
    train: Sequence[Document], test: Iterable[Document]
) -> tuple[tuple[Document, ...], int]:
    """`train` without the sentences that occur in `test`, and how many sentences were
    dropped.

    A document without such a sentence is returned as it is; of another one the
    remaining sentences are returned, as documents of one sentence each.
    """
    known = {key for document in test for key in sentence_keys(document)}
    kept: list[Document] = []
    dropped = 0
    for document in train:
        leaks = [key in known for key in sentence_keys(document)]
        if not any(leaks):
            kept.append(document)
            continue
        dropped += sum(leaks)
        pieces = sentence_documents([document])
        kept.extend(
            piece for piece, leak in zip(pieces, leaks, strict=True) if not leak
        )
    return tuple(kept), dropped


def mask_overlap(
    documents: Sequence[Document],
    other_sites_documents: Sequence[Sequence[Document]],
    ratio: float,
    seed: int = 0,
) -> tuple[Document, ...]:
    """One site's training documents with a `ratio` of the overlapping entities masked.

    The paper's Fig. 5 says no more than "randomly masking different ratios of
    overlapped entities in training data". Here: of the surface forms, case and white
    space aside, that are annotated, with any label, in the training data of two sites
    or more, a random `ratio` is picked. Every annotated mention of one is replaced by
    the word MASK and loses its label; the sentence stays.

    The pick depends on the set of forms and the seed alone: every site that is given
    all the others picks the same forms, and a smaller ratio's forms are among a larger
    one's. A mention around a masked one keeps its label (over the word MASK); a mention
    inside it, or crossing its edge, goes with it. Unannotated occurrences stay.
    """
    forms = sorted(overlapping_forms([documents, *other_sites_documents]))
    order = rng_of(seed, "mask").permutation(len(forms))
    picked = {forms[i] for i in order[: round(ratio * len(forms))].tolist()}
    return tuple(_masked(document, picked) for document in documents)


def _masked(document: Document, picked: set[str]) -> Document:
    doomed = [s for s in document.spans if span_form(document.text, s) in picked]
    if not doomed:
        return document
    edits = joined(piece for span in doomed for piece in span.pieces)
    starts, ends = np.array(edits).T
    # gain[i]: by how much text behind the first i edits moves
    gain = np.concatenate([[0], np.cumsum(len(MASK) - (ends - starts))])

    def moved(at: int) -> int:
        """The new offset; one inside a masked stretch goes to the end of its MASK."""
        before = int(np.searchsorted(starts, at, side="left"))
        inside = before > 0 and at < ends[before - 1]
        return int((ends[before - 1] if inside else at) + gain[before])

    def move(pieces: Iterable[tuple[int, int]]) -> Offsets:
        return tuple((moved(a), moved(b)) for a, b in pieces)

    def touched(a: int, b: int) -> list[tuple[int, int]]:
        return [(s, e) for s, e in edits if a < e and s < b]

    def cut(a: int, b: int) -> bool:
        """Whether [a, b) lies in, or crosses the edge of, a masked stretch."""
        return any(
            (a, b) == (s, e) or not (a <= s and e <= b) for s, e in touched(a, b)
        )

    text = document.text
    for start, end in reversed(edits):
        text = text[:start] + MASK + text[end:]
    spans = [
        Span(moved(s.start), moved(s.end), s.label, move(s.fragments))
        for s in document.spans
        if s not in doomed and not any(cut(*piece) for piece in s.pieces)
    ]
    tokens = [piece for piece in document.tokens if not touched(*piece)]
    return replace(
        document,
        text=text,
        spans=tuple(sorted(spans)),
        tokens=tuple(sorted(move([*tokens, *edits]))) if document.tokens else (),
        meta=_plain(document.meta),
        sentences=move(document.sentences),
    )


def pool(sites: Sequence[SiteData]) -> SiteData:
    """One site that has every site's training and validation documents, and their
    types."""
    return SiteData(
        id="pooled",
        tags=reduce(TagSet.union, (site.tags for site in sites)),
        train=tuple(d for site in sites for d in site.train),
        valid=tuple(d for site in sites for d in site.valid),
        test=(),
    )
