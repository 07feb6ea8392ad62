"""Conversion of mentions to tags and back, flattening, and random tag sets.

A tagger assigns one tag per token (BIO, BIOES or IO). Tags therefore cannot express
that a mention starts inside a token, is nested in another mention, or consists of
several pieces. `encode_tags` and `flatten` count every mention that they change.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np

from fednotes.core.errors import ConfigError, DataError
from fednotes.core.seeds import rng_of
from fednotes.core.types import Counts, Document, Span, TagSet

# The types of each site, in the order of the complete tag set.
TagSets = tuple[tuple[str, ...], ...]
FlattenRule = Literal["outermost", "first_fragment", "drop", "keep"]
AlignmentKind = Literal["exact", "snapped", "shortened", "merged", "lost"]

OUTSIDE = -1  # index in place of a type for tokens outside every mention


@dataclass(frozen=True, slots=True)
class Alignment(Counts):
    """The alignment of mentions with tokens; each mention is in exactly one count.

    Attributes:
        exact: Mentions on token boundaries.
        snapped: Mentions widened to the nearest token boundaries.
        shortened: Mentions that lost some tokens to a neighbour.
        merged: Mentions that the tags cannot distinguish from a neighbour of the same
            type, which has all their tokens or is adjacent under IO.
        lost: Mentions without any token of their own.
    """

    exact: int = 0
    snapped: int = 0
    shortened: int = 0
    merged: int = 0
    lost: int = 0

    @property
    def spans(self) -> int:
        """The total number of mentions."""
        return self.exact + self.snapped + self.shortened + self.merged + self.lost


@dataclass(frozen=True, slots=True)
class FlattenCounts(Counts):
    """Counts of `flatten`. A mention may be nested, crossing and discontinuous at once.

    Attributes:
        spans: Input mentions.
        flat: Returned mentions.
        duplicates: Repeats of the same offsets and label.
        nested: Distinct mentions inside another one, by outer offsets.
        crossing: Distinct mentions that overlap another one, neither inside the other.
        discontinuous: Distinct mentions of several pieces.
    """

    spans: int = 0
    flat: int = 0
    duplicates: int = 0
    nested: int = 0
    crossing: int = 0
    discontinuous: int = 0


@dataclass(frozen=True)
class _TagTable:
    """The meaning of each tag id.

    Attributes:
        prefix: (tags,) <U1, the first letter of each tag.
        type_index: (tags,) index of each tag's type, `OUTSIDE` for O.
        first_tag: The id of each type's first tag.
    """

    prefix: np.ndarray
    type_index: np.ndarray
    first_tag: dict[str, int]


@lru_cache(maxsize=256)
def _make_tag_table(tagset: TagSet) -> _TagTable:
    """Return the meaning of each tag of a tag set."""
    width = len(tagset.prefixes)
    type_indices = np.repeat(np.arange(len(tagset.types)), width)
    return _TagTable(
        prefix=np.array(["O", *tagset.prefixes * len(tagset.types)]),
        type_index=np.concatenate([[OUTSIDE], type_indices]).astype(np.int64),
        first_tag={name: 1 + i * width for i, name in enumerate(tagset.types)},
    )


def encode_tags(
    spans: Iterable[Span], tokens: np.ndarray, tagset: TagSet
) -> tuple[np.ndarray, Alignment]:
    """Return the tag ids of one sentence, and the alignment of its mentions.

    A mention that is not on token boundaries is widened to the nearest ones. If two
    mentions then claim the same token, the one that starts first gets it; if both start
    together, the longer one does.

    Args:
        spans: Flat mentions (see `flatten`).
        tokens: (tokens, 2) character offsets, in order.
        tagset: Types and scheme of the tags.

    Returns:
        (tokens,) int64 tag ids, and the alignment.

    Raises:
        DataError: The tag set lacks the label of a mention.
    """
    ids = np.zeros(len(tokens), dtype=np.int64)
    ordered = sorted(spans, key=lambda s: (s.start, -s.end, s.label))
    if not ordered:
        return ids, Alignment()

    # Look the table up only once: each look-up in the cache compares the whole tag set,
    # which may have thousands of types.
    table = _make_tag_table(tagset)
    starts = tokens[:, 0]
    ends = tokens[:, 1]
    firsts = np.searchsorted(ends, [s.start for s in ordered], side="right").tolist()
    stops = np.searchsorted(starts, [s.end for s in ordered], side="left").tolist()
    counts: dict[AlignmentKind, int] = {}
    settled = 0  # mentions are sorted, so earlier tokens are decided
    for span, first, stop in zip(ordered, firsts, stops, strict=True):
        tag = _find_first_tag(span, tagset, table)
        first_free = max(first, settled)
        is_on_token_boundaries = (
            first < stop and starts[first] == span.start and ends[stop - 1] == span.end
        )
        kind = _classify_alignment(
            ids,
            tag,
            tagset,
            first=first,
            first_free=first_free,
            stop=stop,
            is_on_token_boundaries=is_on_token_boundaries,
        )
        counts[kind] = counts.get(kind, 0) + 1
        if first_free < stop:
            write_tags(ids[first_free:stop], tag, tagset)
            settled = stop
    return ids, Alignment(**counts)


def encode_mentions(
    spans: Iterable[Span], tokens: np.ndarray, tagset: TagSet
) -> np.ndarray:
    """Return the tokens of one sentence's mentions, which may overlap.

    The mentions of each type are aligned with tokens as by `encode_tags`.

    Args:
        spans: Mentions; those of one type must be flat (see `flatten`).
        tokens: (tokens, 2) character offsets, in order.
        tagset: Types and scheme of the tags.

    Returns:
        (mentions, 3) first token, token after the last, and type index, in the order of
        the first tokens.

    Raises:
        DataError: The tag set lacks the label of a mention.
    """
    ranges = [np.zeros((0, 3), np.int64)]
    for label_spans in _group_by_label(spans):
        ids, _ = encode_tags(label_spans, tokens, tagset)
        ranges.append(np.stack(find_spans(ids, tagset), 1))
    joined = np.concatenate(ranges)
    return joined[np.lexsort(joined.T[::-1])]


def _find_first_tag(span: Span, tagset: TagSet, table: _TagTable) -> int:
    """Return the id of the first tag of a mention's type, from the tag set's table."""
    tag = table.first_tag.get(span.label)
    if tag is None:
        raise DataError(
            f"label {span.label!r} is not in the tag set "
            f"{{{', '.join(tagset.types)}}}: map it with a label map or leave it out"
        )
    return tag


def _classify_alignment(
    ids: np.ndarray,
    tag: int,
    tagset: TagSet,
    *,
    first: int,
    first_free: int,
    stop: int,
    is_on_token_boundaries: bool,
) -> AlignmentKind:
    """Return how a mention is aligned with tokens.

    Args:
        ids: (tokens,) tag ids of the sentence, settled before the first free token.
        tag: The first tag of the mention's type.
        tagset: Types and scheme of the tags.
        first: The mention's first token.
        first_free: Its first token that no earlier mention has.
        stop: The token after its last one.
        is_on_token_boundaries: Whether the mention begins and ends with a token.
    """
    if first_free >= stop:
        type_index = _make_tag_table(tagset).type_index
        has_token = first < stop
        if has_token and type_index[ids[stop - 1]] == type_index[tag]:
            return "merged"
        return "lost"
    if tagset.scheme == "IO" and first_free > 0 and ids[first_free - 1] == tag:
        return "merged"
    if first_free > first:
        return "shortened"
    return "exact" if is_on_token_boundaries else "snapped"


def write_tags(ids: np.ndarray, tag: int, tagset: TagSet) -> None:
    """Write the tags of one mention to its tokens, in place.

    Args:
        ids: (tokens,) tag ids of the mention's tokens.
        tag: The first tag of the mention's type. The ids of a type are consecutive: B,
            I, E, S, if the scheme has them.
        tagset: Types and scheme of the tags.
    """
    ids[:] = tag
    if tagset.scheme != "IO":
        ids[1:] = tag + 1
    if tagset.scheme == "BIOES":
        ids[-1] = tag + 3 if len(ids) == 1 else tag + 2


def find_spans(
    tag_ids: np.ndarray, tagset: TagSet
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the mentions in a tag sequence, as read by conlleval.

    Any sequence is accepted (Tjong Kim Sang and Buchholz 2000): an I- or E- without a
    preceding tag of its mention starts one, and a B- without an end tag is a mention.

    Args:
        tag_ids: (tokens,) tag ids.
        tagset: Types and scheme of the tags.

    Returns:
        First token, token after the last, and type index, each (mentions,).
    """
    table = _make_tag_table(tagset)
    ids = np.asarray(tag_ids, dtype=np.int64)
    type_index = table.type_index[ids]
    prefix = table.prefix[ids]

    is_inside = type_index != OUTSIDE
    is_start = is_inside.copy()
    if len(ids) > 1:
        opens = (prefix == "B") | (prefix == "S")
        closes = (prefix == "E") | (prefix == "S")
        changes_type = type_index[1:] != type_index[:-1]
        is_start[1:] &= opens[1:] | closes[:-1] | changes_type
    is_last = is_inside.copy()
    is_last[:-1] &= is_start[1:] | ~is_inside[1:]

    first = np.flatnonzero(is_start)
    stop = np.flatnonzero(is_last) + 1
    return first, stop, type_index[first]


def decode_tags(
    tag_ids: np.ndarray,
    tokens: np.ndarray,
    tagset: TagSet,
    confidences: np.ndarray | None = None,
) -> list[Span]:
    """Return the mentions of one sentence from its tags.

    This is the inverse of `encode_tags` for flat mentions on token boundaries. Under
    IO, adjacent mentions of the same type are merged, because the scheme cannot
    distinguish them.

    Args:
        tag_ids: (tokens,) tag ids.
        tokens: (tokens, 2) character offsets.
        tagset: Types and scheme of the tags.
        confidences: (tokens,) the confidence of a mention, at its first token.
    """
    first, stop, type_index = find_spans(tag_ids, tagset)
    starts = tokens[first, 0].tolist()
    ends = tokens[stop - 1, 1].tolist()
    labels = [tagset.types[index] for index in type_index.tolist()]
    values: list[float | None] = [None] * len(first)
    if confidences is not None:
        values = confidences[first].tolist()
    return [
        Span(start, end, label, confidence=value)
        for start, end, label, value in zip(starts, ends, labels, values, strict=True)
    ]


@lru_cache(maxsize=4096)
def make_span_mask(tagset: TagSet, type_index: int, size: int) -> np.ndarray:
    """Return the tags with which a legal sequence contains exactly a given mention.

    Legal sequences are those that `find_allowed_transitions` permits.

    Args:
        tagset: Types and scheme of the tags.
        type_index: Index of the mention's type. `OUTSIDE` instead selects sequences in
            which none of the tokens is in a mention.
        size: Number of tokens of the mention.

    Returns:
        (size + 2, tags) bool: the tags permitted for the token before the mention, for
        its tokens, and for the token after it.
    """
    table = _make_tag_table(tagset)
    is_of_type = table.type_index == type_index
    mask = np.ones((size + 2, len(is_of_type)), dtype=bool)
    if type_index == OUTSIDE:
        mask[1:-1] = is_of_type
        return mask

    continues = is_of_type & np.isin(table.prefix, ["I", "E"])
    mask[1:-1] = continues
    mask[-1] = ~continues
    if tagset.scheme == "IO":
        # A neighbour of the same type would be part of the mention.
        mask[0] = ~is_of_type
    else:
        mask[1] = is_of_type & ~continues
        # Only the last token ends it.
        mask[1:size] &= ~np.isin(table.prefix, ["E", "S"])
    return mask


def keep_outermost(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return the flat mentions that the rule "outermost" of `flatten` keeps."""
    flat, _ = flatten(spans, "outermost")
    return flat


def flatten_for(
    tagset: TagSet, spans: Iterable[Span]
) -> tuple[tuple[Span, ...], FlattenCounts]:
    """Flatten mentions by the rule that suits a tag set.

    The rule is "keep" if mentions of the tag set may overlap, else "outermost".

    Args:
        tagset: The tag set.
        spans: Mentions of one document.
    """
    return flatten(spans, "keep" if tagset.overlaps else "outermost")


def flatten(
    spans: Iterable[Span], rule: FlattenRule
) -> tuple[tuple[Span, ...], FlattenCounts]:
    """Reduce mentions to continuous, non-overlapping ones, in order.

    Args:
        spans: Mentions of one document.
        rule: "outermost": a discontinuous mention becomes the whole stretch from its
            first to its last piece; of overlapping mentions the longest is kept, then
            the leftmost. "first_fragment": a discontinuous mention becomes its first
            piece, and "outermost" then applies. "drop": discontinuous mentions and all
            mentions that overlap another one are dropped. "keep": "outermost" applies
            to the mentions of each label separately, so mentions with different labels
            may overlap in the result.

    Returns:
        The flat mentions, and a count of what was changed.
    """
    all_spans = tuple(spans)
    if rule == "keep":
        return _flatten_each_label(all_spans)
    distinct = sorted(
        set(all_spans), key=lambda s: (s.start, -s.end, s.label, s.fragments)
    )
    is_nested, is_crossing, is_outer = _find_overlaps(distinct)
    is_discontinuous = [len(span.fragments) > 1 for span in distinct]
    if rule == "drop":
        flat = [
            replace(span, fragments=())
            for i, span in enumerate(distinct)
            if not (
                is_nested[i] or is_crossing[i] or is_outer[i] or is_discontinuous[i]
            )
        ]
    else:
        flat = _select_longest([_join_pieces(span, rule) for span in distinct])
    counts = FlattenCounts(
        spans=len(all_spans),
        flat=len(flat),
        duplicates=len(all_spans) - len(distinct),
        nested=sum(is_nested),
        crossing=sum(is_crossing),
        discontinuous=sum(is_discontinuous),
    )
    return tuple(flat), counts


def _flatten_each_label(
    spans: Sequence[Span],
) -> tuple[tuple[Span, ...], FlattenCounts]:
    """Apply the rule "outermost" of `flatten` to the mentions of each label."""
    flat: list[Span] = []
    counts = FlattenCounts()
    for label_spans in _group_by_label(spans):
        label_flat, changes = flatten(label_spans, "outermost")
        flat += label_flat
        counts += changes
    return tuple(sorted(flat)), counts


def _group_by_label(spans: Iterable[Span]) -> Iterable[list[Span]]:
    """Return the spans of each label, in the order of the labels' first spans."""
    by_label: dict[str, list[Span]] = {}
    for span in spans:
        by_label.setdefault(span.label, []).append(span)
    return by_label.values()


def _join_pieces(span: Span, rule: FlattenRule) -> Span:
    """Return a mention as one continuous stretch, chosen by a rule of `flatten`."""
    if rule == "first_fragment" and span.fragments:
        start, end = span.fragments[0]
        return Span(start, end, span.label)
    return Span(span.start, span.end, span.label)


def _find_overlaps(
    spans: Sequence[Span],
) -> tuple[list[bool], list[bool], list[bool]]:
    """Return three lists: which mentions lie inside, cross, and contain another one.

    Mentions are not compared in pairs: a short text can have 100,000 mentions, all of
    which overlap.

    Args:
        spans: The mentions, sorted as in `flatten`.
    """
    is_nested = []
    furthest_end = -1  # of the mentions so far, which start no later than the next one
    for span in spans:
        is_nested.append(furthest_end > span.start and furthest_end >= span.end)
        furthest_end = max(furthest_end, span.end)

    is_outer = []
    earliest_end = math.inf  # of the mentions that follow, which start no earlier
    for span in reversed(spans):
        is_outer.append(earliest_end <= span.end)
        # An empty mention counts as one character, so that it does not lie inside a
        # mention that ends where it starts.
        earliest_end = min(earliest_end, max(span.end, span.start + 1))
    is_outer.reverse()

    is_crossing = [
        crosses_later or crosses_earlier
        for crosses_later, crosses_earlier in zip(
            _find_crossed_ends(spans), _find_crossed_starts(spans), strict=True
        )
    ]
    return is_nested, is_crossing, is_outer


def _find_crossed_ends(spans: Sequence[Span]) -> list[bool]:
    """Return which mentions end inside a later mention that goes on beyond them.

    Args:
        spans: The mentions, sorted as in `flatten`.
    """
    is_crossed = [False] * len(spans)
    # A stack of later mentions: on top the nearest one, below it the next one that ends
    # later than that, and so on.
    longer: list[Span] = []
    for i in reversed(range(len(spans))):
        span = spans[i]
        while longer and longer[-1].end <= span.end:
            longer.pop()
        if longer:
            is_crossed[i] = longer[-1].start < span.end
        longer.append(span)
    return is_crossed


def _find_crossed_starts(spans: Sequence[Span]) -> list[bool]:
    """Return which mentions start inside an earlier mention and end after it.

    Args:
        spans: The mentions, sorted as in `flatten`.
    """
    is_crossed = [False] * len(spans)
    # The loop visits mentions in the order of their ends; if two ends are equal, the
    # inner mention comes first. `earlier` is a stack of the indices of visited mentions
    # that start before the current one. The one on top ends last.
    earlier: list[int] = []
    for i in sorted(range(len(spans)), key=lambda i: (spans[i].end, -i)):
        while earlier and earlier[-1] >= i:
            earlier.pop()
        if earlier:
            is_crossed[i] = spans[earlier[-1]].end > spans[i].start
        earlier.append(i)
    return is_crossed


def _select_longest(spans: Sequence[Span]) -> list[Span]:
    """Select non-overlapping mentions, longest first, ties from the left."""
    ordered = sorted(spans)
    if all(left.end <= right.start for left, right in pairwise(ordered)):
        return ordered

    selected: list[Span] = []  # by their starts
    for span in sorted(set(spans), key=lambda s: (s.start - s.end, s.start, s.label)):
        # The selected mentions do not overlap. Of those that start before the end of
        # this one, the last one therefore ends last, too.
        following = bisect_left(selected, span.end, key=lambda other: other.start)
        if not following or selected[following - 1].end <= span.start:
            selected.insert(following, span)
    return sorted(selected)


def relabel(
    documents: Iterable[Document],
    label_map: Mapping[str, str],
    keep: Collection[str] | None = None,
) -> tuple[Document, ...]:
    """Return documents with mapped labels.

    An unchanged document is returned as the same object.

    Args:
        documents: The documents.
        label_map: New labels by old label; "" drops the mentions.
        keep: The new labels to keep; None keeps all.
    """
    kept_labels = None if keep is None else frozenset(keep)
    relabelled = []
    for document in documents:
        spans = []
        for span in document.spans:
            label = label_map.get(span.label, span.label)
            is_dropped = kept_labels is not None and label not in kept_labels
            if not label or is_dropped:
                continue
            spans.append(span if label == span.label else replace(span, label=label))
        if tuple(spans) == document.spans:
            relabelled.append(document)
        else:
            relabelled.append(replace(document, spans=tuple(spans)))
    return tuple(relabelled)


def list_types(documents: Iterable[Document]) -> tuple[str, ...]:
    """Return the labels that occur in documents, sorted."""
    return tuple(
        sorted({span.label for document in documents for span in document.spans})
    )


def split_label(label: str) -> str:
    """Split a type's name at "_" and capitals into lower-case words.

    "ADR" remains one word.
    """
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+", label)
    return " ".join(parts).lower() or label


def find_allowed_transitions(
    tagset: TagSet,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tags that may start, follow each other in, and end a sentence.

    Returns:
        Boolean arrays: start (tags,), transition (tags, tags) [from, to], end (tags,).
    """
    table = _make_tag_table(tagset)
    type_index = table.type_index
    anywhere = np.ones(len(type_index), dtype=bool)
    if tagset.scheme == "IO":
        every_pair = np.ones((len(type_index), len(type_index)), dtype=bool)
        return anywhere, every_pair, anywhere.copy()

    continues = np.isin(table.prefix, ["I", "E"])  # must follow an open mention
    is_open = np.isin(table.prefix, ["B", "I"])
    may_end = anywhere if tagset.scheme == "BIO" else ~is_open
    same_type = type_index[:, None] == type_index[None, :]
    goes_on = is_open[:, None] & same_type & continues[None, :]
    begins = may_end[:, None] & ~continues[None, :]
    return ~continues, goes_on | begins, may_end.copy()


# ---- random tag sets of sites --------------------------------------------------------


def draw_disjoint(
    types: Sequence[str], sites: int, per_site: int = 0, seed: int = 0
) -> TagSets:
    """Draw types for each site uniformly, with no type at two sites.

    Args:
        types: The complete tag set.
        sites: Number of sites.
        per_site: Number of types of each site; types beyond sites · per_site are
            annotated nowhere. 0 distributes all types as evenly as possible; randomly
            drawn sites get one more.
        seed: Seed of the draw.

    Raises:
        ConfigError: There are too few types, or a type is listed twice.
    """
    _check_design(types, sites)
    if per_site < 0 or sites * per_site > len(types):
        raise ConfigError(
            f"{sites} sites with {per_site} types each and none in common need "
            f"{sites * max(per_site, 1)} types, but there are {len(types)}: lower "
            "per_site"
        )
    rng = rng_of(seed, "tags", "disjoint")
    order = rng.permutation(len(types)).tolist()
    # With per_site = 0, these sites get one type more than the others.
    larger_sites = set(rng.permutation(sites)[: len(types) % sites].tolist())
    sets: list[set[str]] = []
    for site in range(sites):
        if per_site:
            size = per_site
        else:
            size = len(types) // sites
            if site in larger_sites:
                size += 1
        sets.append({types[order.pop()] for _ in range(size)})
    return _sort_types(types, sets)


def draw_appendix_d(types: Sequence[str], sites: int, seed: int = 0) -> TagSets:
    """Draw types for each site as in Appendix D of the tag-set paper.

    Each site gets one type that no other site annotates, drawn uniformly without
    replacement. A fair coin then decides for each remaining type whether one or two
    sites annotate it; the sites are drawn uniformly.

    Raises:
        ConfigError: There are fewer than two sites or fewer types than sites, or a type
            is listed twice.
    """
    _check_design(types, sites)
    if sites < 2:
        raise ConfigError(
            "a type may be annotated at two sites: 2 sites or more are needed"
        )
    rng = rng_of(seed, "tags", "appendix-d")
    order = rng.permutation(len(types)).tolist()
    sets = [{types[index]} for index in order[:sites]]  # [tagsets appendix d]
    for index in sorted(order[sites:]):
        number = 1 + int(rng.integers(2))  # [tagsets appendix d]
        chosen = rng.choice(sites, size=number, replace=False)  # [tagsets appendix d]
        for site in chosen.tolist():
            sets[site].add(types[index])
    return _sort_types(types, sets)


def _check_design(types: Sequence[str], sites: int) -> None:
    """Raise ConfigError unless each site can have an exclusive type."""
    if len(set(types)) < len(types):
        raise ConfigError(f"types = {list(types)}: a type is named twice")
    if sites < 1:
        raise ConfigError(f"{sites} sites: expected at least one")
    if len(types) < sites:
        raise ConfigError(
            f"{sites} sites cannot each have a type that no other annotates: there are "
            f"{len(types)} types ({', '.join(types) or 'none'})"
        )


def _sort_types(types: Sequence[str], sets: Sequence[set[str]]) -> TagSets:
    """Return each site's types in the order of the complete tag set."""
    return tuple(tuple(t for t in types if t in chosen) for chosen in sets)
