"""Spans ⇄ tags: BIO, BIOES and IO, label maps, mentions made flat, and tag sets drawn
at random.

A tagger writes one tag per token, so it cannot say that a mention starts inside a
token, lies within another mention, or comes in pieces. Whatever is changed to fit is
counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.seeds import rng_of
from fednotes.core.types import Counts, Document, Span, TagSet

# of each site, in the order of the complete tag set
TagSets = tuple[tuple[str, ...], ...]
FlattenRule = Literal["outermost", "first_fragment", "drop"]


@dataclass(frozen=True, slots=True)
class Alignment(Counts):
    """How gold spans fell on tokens. Each span is in exactly one count; counts add.

    exact: on token boundaries. snapped: moved to the nearest boundaries that hold it.
    shortened: lost some tokens to a neighbour. merged: not told from a neighbour of the
    same type (all tokens taken by it, or adjacent under IO). lost: no token is left for
    it.
    """

    exact: int = 0
    snapped: int = 0
    shortened: int = 0
    merged: int = 0
    lost: int = 0

    @property
    def spans(self) -> int:
        """All spans that were given."""
        return self.exact + self.snapped + self.shortened + self.merged + self.lost


@dataclass(frozen=True, slots=True)
class FlattenCounts(Counts):
    """What `flatten` met; counts add.

    spans: given. kept: returned. duplicates: repeats of the same offsets and label. The
    others count distinct mentions by their outer offsets: nested (inside another),
    crossing (overlaps another, neither inside the other), discontinuous; a mention may
    be in several.
    """

    spans: int = 0
    kept: int = 0
    duplicates: int = 0
    nested: int = 0
    crossing: int = 0
    discontinuous: int = 0


@dataclass(frozen=True)
class _Table:
    """What each tag id means. prefix: one letter; type: index into types, -1 for O."""

    prefix: np.ndarray  # (tags,) <U1
    type: np.ndarray  # (tags,)
    first: dict[str, int]  # type → id of its first tag


@lru_cache(maxsize=256)
def _table(tagset: TagSet) -> _Table:
    width = len(tagset.prefixes)
    prefix = np.array(["O", *tagset.prefixes * len(tagset.types)])
    kind = np.concatenate(
        [[-1], np.repeat(np.arange(len(tagset.types)), width)]
    ).astype(np.int64)
    return _Table(prefix, kind, {t: 1 + i * width for i, t in enumerate(tagset.types)})


def encode(
    spans: Iterable[Span], tokens: np.ndarray, tagset: TagSet
) -> tuple[np.ndarray, Alignment]:
    """Tags of one sentence.

    tokens: (n, 2) character offsets in order. spans: flat (see `flatten`); one that
    does not fall on token boundaries is snapped outward. Where two then want the same
    token, the one that starts first (then the longer) has it.

    Returns tag ids (n,) int64 and how the spans fell. Raises DataError for a label that
    the tag set does not have.
    """
    ids = np.zeros(len(tokens), dtype=np.int64)  # (tokens,)
    counts = dict.fromkeys(Alignment.__slots__, 0)
    ordered = sorted(spans, key=lambda s: (s.start, -s.end, s.label))
    if not ordered:
        return ids, Alignment()
    starts, ends = tokens[:, 0], tokens[:, 1]
    firsts = np.searchsorted(ends, [s.start for s in ordered], side="right").tolist()
    lasts = np.searchsorted(starts, [s.end for s in ordered], side="left").tolist()
    table = _table(tagset)
    taken = 0  # spans come in order, so the tokens before this one are settled
    for span, first, last in zip(ordered, firsts, lasts, strict=True):
        if span.label not in table.first:
            raise DataError(
                f"label {span.label!r} is not in the tag set {{{', '.join(tagset.types)}}}: "
                "map it with a label map or leave it out"
            )
        tag = table.first[span.label]
        free = max(first, taken)
        if free >= last:
            same = first < last and table.type[ids[last - 1]] == table.type[tag]
            counts["merged" if same else "lost"] += 1
            continue
        if tagset.scheme == "IO" and free and ids[free - 1] == tag:
            counts["merged"] += 1
        elif free > first:
            counts["shortened"] += 1
        elif starts[first] == span.start and ends[last - 1] == span.end:
            counts["exact"] += 1
        else:
            counts["snapped"] += 1
        ids[free:last] = tag  # the id of its type's first tag
        if tagset.scheme != "IO":
            ids[free + 1 : last] = tag + 1
        if tagset.scheme == "BIOES":
            ids[last - 1] = tag + 3 if last - free == 1 else tag + 2
        taken = last
    return ids, Alignment(**counts)


def runs(
    tag_ids: np.ndarray, tagset: TagSet
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Spans in a tag sequence, as conlleval (Tjong Kim Sang 2000) reads it.

    Returns first token, token after the last, and type index, each (spans,). Tolerant:
    an I- or E- that continues nothing starts a span; a B- that nothing ends is a span.
    """
    table = _table(tagset)
    ids = np.asarray(tag_ids, dtype=np.int64)
    kind, prefix = table.type[ids], table.prefix[ids]  # (tokens,)
    inside = kind >= 0
    start = inside.copy()
    if len(ids) > 1:
        opens = (prefix == "B") | (prefix == "S")
        closes = (prefix == "E") | (prefix == "S")
        start[1:] &= opens[1:] | closes[:-1] | (kind[1:] != kind[:-1])
    stop = inside.copy()
    stop[:-1] &= start[1:] | ~inside[1:]
    first = np.flatnonzero(start)
    return first, np.flatnonzero(stop) + 1, kind[first]


def decode(
    tag_ids: np.ndarray,
    tokens: np.ndarray,
    tagset: TagSet,
    chances: np.ndarray | None = None,
) -> list[Span]:
    """Spans of one sentence: tag ids (n,) and token offsets (n, 2) → character offsets.

    The inverse of `encode` for flat spans on token boundaries; under IO two adjacent
    spans of one type come back as one, since the scheme cannot tell them apart.
    chances: (n,) at a span's first token, its confidence.
    """
    first, last, kind = runs(tag_ids, tagset)
    begin, end = tokens[first, 0].tolist(), tokens[last - 1, 1].tolist()
    sure = [None] * len(first) if chances is None else chances[first].tolist()
    rows = zip(begin, end, kind.tolist(), sure, strict=True)
    return [Span(b, e, tagset.types[k], confidence=c) for b, e, k, c in rows]


@lru_cache(maxsize=4096)
def making(tagset: TagSet, kind: int, size: int) -> np.ndarray:
    """Tags that make exactly one span, in sequences as `allowed_transitions` has them.

    Returns (size + 2, tags) bool: of the token before it, of its tokens, of the one
        behind it.
    kind: index of its type; -1: none of its tokens is in a mention.
    """
    table = _table(tagset)
    own = table.type == kind
    goes_on = own & np.isin(table.prefix, ["I", "E"]) & (kind >= 0)
    found = np.ones((size + 2, len(own)), dtype=bool)
    found[1:-1] = goes_on if kind >= 0 else own
    if kind >= 0 and tagset.scheme == "IO":  # its neighbours would be in it
        found[0] = ~own
    elif kind >= 0:
        found[1] = own & ~goes_on
        found[1:size] &= ~np.isin(table.prefix, ["E", "S"])  # but the last one
    found[-1] = ~goes_on
    return found


def flatten(
    spans: Iterable[Span], rule: FlattenRule
) -> tuple[tuple[Span, ...], FlattenCounts]:
    """Mentions that do not overlap, all continuous, in order.

    outermost: a discontinuous mention becomes its whole stretch; of overlapping
    mentions the longest stays (then the leftmost). first_fragment: a discontinuous
    mention becomes its first piece; then as outermost. drop: discontinuous mentions go,
    and so does every mention that overlaps another.
    """
    given = tuple(spans)
    distinct = sorted(set(given), key=lambda s: (s.start, -s.end, s.label, s.fragments))
    nested, crossing, holding = _overlaps(distinct)
    broken = [len(span.fragments) > 1 for span in distinct]
    if rule == "drop":
        bad = zip(distinct, nested, crossing, holding, broken, strict=True)
        kept = [replace(s, fragments=()) for s, *flags in bad if not any(flags)]
    else:
        first = rule == "first_fragment"
        stretches = [
            s.fragments[0] if first and s.fragments else (s.start, s.end)
            for s in distinct
        ]
        rows = zip(stretches, distinct, strict=True)
        kept = _longest([Span(start, end, s.label) for (start, end), s in rows])
    counts = FlattenCounts(
        len(given),
        len(kept),
        len(given) - len(distinct),
        sum(nested),
        sum(crossing),
        sum(broken),
    )
    return tuple(kept), counts


def _overlaps(spans: Sequence[Span]) -> tuple[list[bool], list[bool], list[bool]]:
    """Which spans, in `flatten`'s order, lie inside another, cross another, hold
    another."""
    nested, crossing, holding = ([False] * len(spans) for _ in range(3))
    active: list[int] = []
    for i, span in enumerate(spans):
        active = [j for j in active if spans[j].end > span.start]
        for j in active:
            if spans[j].end >= span.end:  # starts no later, ends no earlier
                nested[i] = holding[j] = True
            else:
                crossing[i] = crossing[j] = True
        active.append(i)
    return nested, crossing, holding


def _longest(spans: Sequence[Span]) -> list[Span]:
    """Spans picked greedily from long to short, ties from left to right, none
    overlapping."""
    flat = sorted(spans)
    if all(left.end <= right.start for left, right in pairwise(flat)):
        return flat
    picked: list[Span] = []
    starts, ends = np.empty(len(flat), np.int64), np.empty(len(flat), np.int64)
    for span in sorted(set(spans), key=lambda s: (s.start - s.end, s.start, s.label)):
        n = len(picked)
        if not np.any((starts[:n] < span.end) & (ends[:n] > span.start)):
            starts[n], ends[n] = span.start, span.end
            picked.append(span)
    return sorted(picked)


def relabel(
    documents: Iterable[Document],
    label_map: Mapping[str, str],
    keep: Collection[str] | None = None,
) -> tuple[Document, ...]:
    """Documents with other labels: mapped first ("" drops), then only those in `keep`."""
    made = []
    for document in documents:
        named = (
            (span, label_map.get(span.label, span.label)) for span in document.spans
        )
        spans = tuple(
            span if label == span.label else replace(span, label=label)
            for span, label in named
            if label and (keep is None or label in keep)
        )
        made.append(
            document if spans == document.spans else replace(document, spans=spans)
        )
    return tuple(made)


def types_of(documents: Iterable[Document]) -> tuple[str, ...]:
    """The labels that occur, sorted."""
    return tuple(
        sorted({span.label for document in documents for span in document.spans})
    )


def allowed_transitions(tagset: TagSet) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a tag sequence of the scheme may look like.

    Returns boolean start (T,), transition (T, T) [from, to] and end (T,).
    """
    table = _table(tagset)
    kind, prefix = table.type, table.prefix
    every = np.ones(len(kind), dtype=bool)
    if tagset.scheme == "IO":
        return every, np.ones((len(kind), len(kind)), dtype=bool), every.copy()
    continues = np.isin(prefix, ["I", "E"])  # (T,) must follow an open span of its type
    opened = np.isin(prefix, ["B", "I"])
    # (T,) may be followed by a new span or O
    end = every if tagset.scheme == "BIO" else ~opened
    # (T, T)
    onward = opened[:, None] & (kind[:, None] == kind[None, :]) & continues[None, :]
    fresh = end[:, None] & ~continues[None, :]
    return ~continues, onward | fresh, end.copy()


# ---- which entity types each site annotates ------------------------------------------


def disjoint(
    types: Sequence[str], sites: int, per_site: int = 0, seed: int = 0
) -> TagSets:
    """Types drawn for each site without replacement, uniformly; no type at two sites.

    per_site: types of each site; types beyond sites · per_site are annotated nowhere. 0
        deals all of them out as evenly as can be, the spare ones to random sites.

    Raises ConfigError where there are too few types, or a type is named twice.
    """
    _check(types, sites)
    if per_site < 0 or sites * per_site > len(types):
        raise ConfigError(
            f"{sites} sites with {per_site} types each and none in common need "
            f"{sites * max(per_site, 1)} types, there are {len(types)}: lower per_site"
        )
    rng = rng_of(seed, "tags", "disjoint")
    drawn = rng.permutation(len(types)).tolist()
    spare = set(rng.permutation(sites)[: len(types) % sites].tolist())
    sets: list[set[str]] = []
    for site in range(sites):
        size = per_site or len(types) // sites + (site in spare)
        sets.append({types[drawn.pop()] for _ in range(size)})
    return _ordered(types, sets)


def appendix_d(types: Sequence[str], sites: int, seed: int = 0) -> TagSets:
    """Appendix D: one type for each site that no other site annotates, drawn uniformly
    without replacement; each remaining type at n ∈ {1, 2} sites by a fair coin, n sites
    drawn uniformly.

    Raises ConfigError for fewer than two sites, fewer types than sites, or a type named
        twice.
    """
    _check(types, sites)
    if sites < 2:
        raise ConfigError(
            "a type may be annotated at two sites: 2 sites or more are needed"
        )
    rng = rng_of(seed, "tags", "appendix-d")
    drawn = rng.permutation(len(types)).tolist()
    sets = [{types[own]} for own in drawn[:sites]]  # [tagsets appendix d]
    for index in sorted(drawn[sites:]):
        number = 1 + int(rng.integers(2))  # [tagsets appendix d]
        # [tagsets appendix d]
        for site in rng.choice(sites, size=number, replace=False).tolist():
            sets[site].add(types[index])
    return _ordered(types, sets)


def _check(types: Sequence[str], sites: int) -> None:
    if len(set(types)) < len(types):
        raise ConfigError(f"types = {list(types)}: a type is named twice")
    if sites < 1:
        raise ConfigError(f"{sites} sites: tag sets are drawn for one site or more")
    if len(types) < sites:
        raise ConfigError(
            f"{sites} sites cannot each annotate a type of its own: there are "
            f"{len(types)} types ({', '.join(types) or 'none'})"
        )


def _ordered(types: Sequence[str], sets: Sequence[set[str]]) -> TagSets:
    return tuple(tuple(t for t in types if t in chosen) for chosen in sets)
