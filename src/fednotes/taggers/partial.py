r"""Losses on partially annotated text, split by the origin of targets.

A site annotates the types T_k of the tag set T ("known"). For the other types, a
teacher (the global model) has added its predictions. A token inside a known mention has
exactly its tag; any other token may be O or have any tag of the types T\k. The tag
sequences within these sets, A(x), are exactly those that agree with the site's
annotation. One of them is the pseudo-complete sequence ŷ:

    source = -log p(A(x) | x)      = log Z - log Z_A        the site's annotation
    target = -log p(ŷ | A(x), x)   = log Z_A - score(ŷ)     the additions, given this
    source + target = -log p(ŷ | x)                         the ordinary loss

Z_A sums exp(score) only over A(x). The source part is thus the loss of partial
annotation (Tsuboi et al. 2008). Greenberg et al. 2018 and Beryozkin et al. 2019 train
named entity recognisers on heterogeneous tag sets with this loss alone, as does this
project without distillation. The scheme's constraints hold within A(x): a B- opens each
added mention.

With soft targets, the teacher's posterior over A(x) replaces the one sequence ŷ:

    q(y) = p_teacher(y | x, A(x))
    target = log Z_A - E_q[score(y)] = KL(q || p(· | A)) + H(q)

The score is linear in the counts of tags and transitions, so q's expected counts, from
one forward-backward pass of the teacher over A(x), give E_q[score] exactly. (In Wang et
al. 2020b a student matches the k best sequences or the tokens' marginals, regardless of
the text's own annotation.) This is one step of EM: q is the E step, and training on it
the M step. A student that equals its teacher therefore has (Fisher's identity)

    ∇ E_q[-log p(y)] = ∇ -log p(A(x))        the gradient of source; that of target is 0

If words are independent given the text (a softmax in place of the CRF), every sum over
sequences is a product over words, and the losses have a closed form for each word:

    source = -log p(A)
    target = -log p(ŷ) / p(A)
    soft target = -Σ q(y) log p(y) / p(A)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, DataError, suggest_name
from fednotes.core.types import Document, Span, TagSet
from fednotes.data.batches import Encoded
from fednotes.data.tags import (
    encode_mentions,
    encode_tags,
    flatten_for,
    keep_outermost,
)
from fednotes.taggers.crf import CRF, Counts


@dataclass(frozen=True, eq=False)
class Soft:
    """A teacher's posterior over a corpus given its annotation; it stays at the site.

    Attributes:
        unary: (tokens, tags) float32 probabilities, flat over the corpus.
        pairs: (sentences, tags, tags) float32 expected transitions [from, to].
    """

    unary: np.ndarray
    pairs: np.ndarray


# ---- the tags that a token may have --------------------------------------------------


def require_types(known: Collection[str], tagset: TagSet) -> frozenset[str]:
    """Return the known types as a set.

    Raises:
        ConfigError: A type is not in the tag set; the message suggests the nearest one.
    """
    for name in sorted(set(known) - set(tagset.types)):
        raise ConfigError(
            f"known type {name!r} is not in the tag set: "
            f"{suggest_name(name, tagset.types)}"
        )
    return frozenset(known)


@lru_cache(maxsize=256)
def _mark_known_tags(tagset: TagSet, known: frozenset[str]) -> np.ndarray:
    """Return whether each tag is of a known type, (tags,) bool; O is not."""
    width = len(tagset.prefixes)
    is_known_type = np.array([name in known for name in tagset.types], dtype=bool)
    return np.concatenate([[False], np.repeat(is_known_type, width)])


def mark_unknown_tags(tags: Tensor, tagset: TagSet, known: Collection[str]) -> Tensor:
    """Return whether each tag is of an unknown type, in the shape of `tags`.

    Raises:
        ConfigError: A known type is not in the tag set.
    """
    is_unknown = ~_mark_known_tags(tagset, require_types(known, tagset))
    is_unknown[0] = False  # O is of no type
    return torch.from_numpy(is_unknown).to(tags.device)[tags]


def find_allowed_tags(tags: Tensor, tagset: TagSet, known: Collection[str]) -> Tensor:
    """Return the tags that each token may have, given annotation of the known types.

    A token with a tag of a known type may have only this tag. Any other token may have
    O and all tags of the other types. The sequence `tags` is always allowed, and so is
    the sequence with O in place of all tags of other types.

    Args:
        tags: (…) tag ids; any at padding.
        tagset: The tag set.
        known: The types that are annotated.

    Returns:
        (…, tags) bool.

    Raises:
        ConfigError: A known type is not in the tag set.
    """
    is_fixed = _mark_known_tags(tagset, require_types(known, tagset))
    only_itself = np.eye(len(is_fixed), dtype=bool)
    table = np.where(is_fixed[:, None], only_itself, ~is_fixed)  # (tag, tags)
    return torch.from_numpy(table).to(tags.device)[tags]


def _has_no_choice(allowed: Tensor) -> bool:
    """Return whether every token may have only one tag."""
    return bool((allowed.sum(-1) == 1).all())


# ---- losses --------------------------------------------------------------------------


def compute_source_and_target_loss(
    crf: CRF,
    emissions: Tensor,
    tags: Tensor,
    allowed: Tensor | None,
    lengths: Tensor,
    soft: Counts | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the source and target loss of each sentence, (batch,) each.

    If every token has only one allowed tag, source is the ordinary loss and target is
    exactly 0, without a gradient.

    Args:
        crf: The CRF.
        emissions: (batch, tokens, tags).
        tags: (batch, tokens), of known and added mentions.
        allowed: (batch, tokens, tags) from `find_allowed_tags`; None if every type is
            known.
        lengths: (batch,).
        soft: A posterior to use as the target in place of the added mentions in `tags`;
            see `CRF.compute_posterior`.
    """
    if allowed is None or _has_no_choice(allowed):
        source = crf.loss(emissions, tags, lengths)
        return source, torch.zeros_like(source.detach())
    return crf.compute_loss_in_parts(
        emissions, tags if soft is None else soft, allowed, lengths
    )


def compute_transfer_gradients(
    crf: CRF,
    project: nn.Linear,
    features: Tensor,
    tags: Tensor,
    allowed: Tensor | None,
    lengths: Tensor,
    soft: Counts | None = None,
) -> tuple[Tensor, Tensor]:
    """Return gradients of both losses with respect to `project.weight`.

    The emissions are project(features). With δ = ∂ loss / ∂ emissions, which
    forward-backward computes for all sentences at once, a sentence's gradient is Σ_t
    δ_t ⊗ features_t. Nothing below the projection is differentiated, and no `.grad`
    changes.

    Args:
        crf: The CRF.
        project: The projection to tags.
        features: (batch, tokens, width), finite even at padding.
        tags: As in `compute_source_and_target_loss`.
        allowed: As in `compute_source_and_target_loss`.
        lengths: As in `compute_source_and_target_loss`.
        soft: As in `compute_source_and_target_loss`.

    Returns:
        (batch, tags · width) for each sentence's source loss, and (tags · width,) for
        the sum of the target losses; rows are laid out as `weight.flatten()`.
    """
    inputs = features.detach()
    ones = lengths.new_ones(len(features), dtype=features.dtype)
    with torch.no_grad():
        scores = project(inputs)  # (batch, tokens, tags)
    with torch.enable_grad():
        source, target = compute_source_and_target_loss(
            crf, scores.requires_grad_(), tags, allowed, lengths, soft
        )
    (delta,) = torch.autograd.grad(source, scores, ones, retain_graph=True)
    each = delta.transpose(1, 2) @ inputs  # (batch, tags, width) [tagsets crf eq 11]
    total = torch.zeros_like(project.weight, requires_grad=False)
    if target.requires_grad:
        (delta,) = torch.autograd.grad(target, scores, ones)
        # (tags, width) [tagsets crf eq 11]
        total = delta.flatten(0, 1).T @ inputs.flatten(0, 1)
    return each.flatten(1), total.flatten()


# ---- independent words ---------------------------------------------------------------


def compute_word_losses(
    logits: Tensor,
    tags: Tensor,
    allowed: Tensor | None = None,
    soft: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the source and target loss of each word, (words,) each.

    They are at least float32. If every word has only one allowed tag, the target is
    exactly 0 and has no gradient.

    Args:
        logits: (words, tags).
        tags: (words,).
        allowed: (words, tags) bool, including each word's tag; None if every type is
            known.
        soft: (words, tags) probabilities, 0 where not allowed.
    """
    scores = _widen_to_float32(logits)
    if allowed is None or _has_no_choice(allowed):
        source = F.cross_entropy(scores, tags, reduction="none")
        return source, torch.zeros_like(source.detach())
    log_z = scores.logsumexp(-1)  # (words,)
    log_z_within = scores.masked_fill(~allowed, -torch.inf).logsumexp(-1)
    if soft is None:
        reached = scores.gather(-1, tags[:, None])[:, 0]
    else:
        reached = (soft * scores).sum(-1)
    return log_z - log_z_within, log_z_within - reached


def compute_word_gradients(
    logits: Tensor,
    tags: Tensor,
    allowed: Tensor | None = None,
    soft: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return gradients of both losses with respect to the logits, (words, tags) each.

    Let p be the probabilities, p_A those within the allowed tags, and q the target (the
    tag itself without a soft target). The gradients are p - p_A and p_A - q. The
    arguments are those of `compute_word_losses`.
    """
    scores = _widen_to_float32(logits)
    if soft is None:
        reached = F.one_hot(tags, scores.shape[-1]).to(scores.dtype)
    else:
        reached = soft
    probabilities = scores.softmax(-1)
    if allowed is None:
        return probabilities - reached, torch.zeros_like(probabilities)
    within = compute_word_posterior(scores, allowed)
    return probabilities - within, within - reached


def compute_word_posterior(logits: Tensor, allowed: Tensor) -> Tensor:
    """Return (words, tags), the probabilities within the allowed tags."""
    scores = _widen_to_float32(logits)
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1)


def _widen_to_float32(logits: Tensor) -> Tensor:
    """Return logits in at least float32; half precision is too coarse for sums."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


# ---- new mentions on existing tokens -------------------------------------------------


def retag(
    encoded: Encoded, documents: Sequence[Document], known: Collection[str]
) -> Encoded:
    """Return the same tokens with the mentions of `documents`.

    A span that crosses the end of a sentence (or of a piece of one) ends there. A
    mention of an unknown type is dropped if it overlaps a known mention, so that
    additions never change the site's own annotation; if mentions of different types may
    overlap, additions cannot change it anyway.

    Args:
        encoded: The corpus.
        documents: The same texts, in the same order.
        known: The types that the site annotates itself.

    Raises:
        DataError: The texts differ, or a label is not in the tag set.
    """
    annotated = tuple(documents)
    require_same_texts(encoded, annotated)
    overlaps = encoded.tagset.overlaps
    spans, owners = _flatten_spans(annotated, encoded.tagset, frozenset(known))
    first, last, sentence = _find_token_ranges(encoded, spans, owners)

    stays = first < last
    is_added = np.array([span.label not in known for span in spans], dtype=bool)
    if is_added.any() and not overlaps:
        is_fixed = stays & ~is_added
        covered = _count_covered(len(encoded.form), first[is_fixed], last[is_fixed])
        # No token is covered from the first to before the last.
        is_free = covered[last] == covered[np.minimum(first, last)]
        stays &= ~is_added | is_free

    tags = np.zeros(len(encoded.form), np.int64)
    ranges = [np.zeros((0, 3), np.int64)]
    rows = np.flatnonzero(stays)
    rows = rows[np.argsort(sentence[rows], kind="stable")]
    cuts = np.flatnonzero(np.diff(sentence[rows])) + 1
    for group in np.split(rows, cuts) if len(rows) else ():
        at = sentence[group[0]]
        part = slice(encoded.bounds[at], encoded.bounds[at + 1])
        words = encoded.offsets[part]
        mentions: Sequence[Span] = [spans[i] for i in group]
        if overlaps:
            in_sentence = encode_mentions(mentions, words, encoded.tagset)
            ranges.append(in_sentence + [part.start, part.start, 0])
            mentions = keep_outermost(mentions)
        tags[part], _ = encode_tags(mentions, words, encoded.tagset)
    return replace(
        encoded,
        documents=annotated,
        tags=tags,
        mentions=np.concatenate(ranges) if overlaps else None,
    )


def _count_covered(tokens: int, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """Return the number of covered tokens before each token, (tokens + 1,).

    Args:
        tokens: Number of tokens.
        first: (spans,) the first token of each span.
        last: (spans,) the token after its last one.
    """
    change = np.zeros(tokens + 1, np.int64)
    np.add.at(change, first, 1)
    np.add.at(change, last, -1)
    is_covered = np.cumsum(change)[:-1] > 0
    return np.concatenate([[0], np.cumsum(is_covered)])


def require_same_texts(encoded: Encoded, documents: tuple[Document, ...]) -> None:
    """Raise DataError unless documents have the corpus's texts, in its order."""
    if len(documents) != len(encoded.documents):
        raise DataError(
            f"{len(documents)} annotated documents for a corpus of "
            f"{len(encoded.documents)}: give the same documents, in the same order"
        )
    pairs = zip(documents, encoded.documents, strict=True)
    for number, (new, old) in enumerate(pairs):
        if new.text != old.text:
            raise DataError(
                f"the text of annotated document {number} (counted from 0) differs "
                "from the corpus: give the same documents, in the same order"
            )


def _flatten_spans(
    documents: tuple[Document, ...], tagset: TagSet, known: frozenset[str]
) -> tuple[list[Span], np.ndarray]:
    """Return continuous spans, and the index of each span's document.

    No two known spans overlap, and no two added ones, unless mentions of the tag set
    may. The two groups are flattened separately, so that a long added mention does not
    displace a known one.
    """
    spans: list[Span] = []
    owners: list[int] = []
    for number, document in enumerate(documents):
        known_spans = [span for span in document.spans if span.label in known]
        added_spans = [span for span in document.spans if span.label not in known]
        for group in (known_spans, added_spans):
            flat, _ = flatten_for(tagset, group)
            spans += flat
            owners += [number] * len(flat)
    return spans, np.array(owners, dtype=np.int64)


def _find_token_ranges(
    encoded: Encoded, spans: list[Span], owners: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return each span's first token, the token after its last one, and its sentence.

    Tokens are numbered across the corpus. Characters are numbered across all documents,
    so that one search finds the tokens of all spans.

    Args:
        encoded: The corpus.
        spans: The spans.
        owners: (spans,) the index of each span's document.
    """
    sizes = [len(document.text) + 1 for document in encoded.documents]
    base = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)  # of each document
    shift = base[np.repeat(encoded.sentence_document, encoded.lengths)][:, None]
    tokens = encoded.offsets + shift  # (tokens, 2)
    edges = np.array([(s.start, s.end) for s in spans], np.int64).reshape(-1, 2)
    edges += base[owners][:, None]
    first = np.searchsorted(tokens[:, 1], edges[:, 0], side="right")
    last = np.searchsorted(tokens[:, 0], edges[:, 1], side="left")
    sentence = np.searchsorted(encoded.bounds, first, side="right") - 1
    end_of_sentence = encoded.bounds[np.minimum(sentence + 1, encoded.sentences)]
    return first, np.minimum(last, end_of_sentence), sentence
