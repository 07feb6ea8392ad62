"""Losses on text whose annotation covers some of its types, by where their targets come
from.

A site annotates the types T_k of the tag set T itself ("known"); for the others a
teacher, the global model, has added what it found. A token inside a known mention has
exactly its tag; any other token may be O or have any tag of the types T\\k. Within
these sets A(x) lie all tag sequences that agree with what the site says, among them the
pseudo-complete one ŷ:

    source = -log p(A(x) | x)      = log Z - log Z_A        what the site says
    target = -log p(ŷ | A(x), x)   = log Z_A - score(ŷ)     what was added, given what it says
    source + target = -log p(ŷ | x)                         the ordinary loss

Z_A sums exp(score) over A(x) alone. So the source part is the loss of partial
annotation: Tsuboi et al. 2008; Greenberg et al. 2018 and Beryozkin et al. 2019 train
named entity recognisers on heterogeneous tag sets with it alone, and so does this
project where nothing is distilled. The scheme's constraints hold within A(x): a B-
opens each added mention.

Soft targets: in place of the one sequence ŷ the teacher's posterior over A(x),

    q(y) = p_teacher(y | x, A(x)),    target = log Z_A - E_q[score(y)] = KL(q || p(· | A)) + H(q)

The score is linear in the tags and transitions that it counts, so q's expected counts,
from one forward-backward pass of the teacher over A(x), give E_q[score] exactly. (Wang
et al. 2020b have a student match the k best sequences or the tokens' marginals,
whatever the text's own annotation says.) It is one step of EM, q the E step, training
on it the M step, so that a student equal to its teacher has (Fisher's identity)

    ∇ E_q[-log p(y)] = ∇ -log p(A(x))        the gradient of source; that of target is 0

Where words are independent given the text (a softmax in place of the CRF) every sum
over sequences is a product over words, and the same losses have a closed form for each
word:

    source = -log p(A)    target = -log p(ŷ) / p(A)    soft target = -Σ q(y) log p(y) / p(A)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, DataError, nearest
from fednotes.core.types import Document, Span, TagSet
from fednotes.data.batches import Encoded
from fednotes.data.tags import encode, flatten
from fednotes.taggers.crf import CRF, Counts


@dataclass(frozen=True, eq=False)
class Soft:
    """A teacher's posterior over a corpus, given what is annotated. Belongs to its
    site.

    unary: (tokens, tags) float32, flat over the corpus. pairs: (sentences, tags, tags)
    float32, expected transitions [from, to].
    """

    unary: np.ndarray
    pairs: np.ndarray


# ---- what a token may be -------------------------------------------------------------


def require_types(known: Collection[str], tagset: TagSet) -> frozenset[str]:
    """`known`, if the tag set has all of it; else ConfigError with the nearest type."""
    for name in sorted(set(known) - set(tagset.types)):
        raise ConfigError(
            f"known type {name!r} is not in the tag set: {nearest(name, tagset.types)}"
        )
    return frozenset(known)


@lru_cache(maxsize=256)
def _known_tags(tagset: TagSet, known: frozenset[str]) -> np.ndarray:
    """(tags,) bool: tags of known types. O is none."""
    width = len(tagset.prefixes)
    of_type = np.array([name in known for name in tagset.types], dtype=bool)
    return np.concatenate([[False], np.repeat(of_type, width)])


def added_tags(tags: Tensor, tagset: TagSet, known: Collection[str]) -> Tensor:
    """Same shape, bool: tags of types that are not known.

    Raises ConfigError as `require_types`.
    """
    others = ~_known_tags(tagset, require_types(known, tagset))
    others[0] = False
    return torch.from_numpy(others).to(tags.device)[tags]


def allowed_tags(tags: Tensor, tagset: TagSet, known: Collection[str]) -> Tensor:
    """The tags that each token may have, given the annotation of the known types.

    tags: (…) tag ids, at padding any. Returns (…, tags) bool: for a tag of a known type
    that tag alone, otherwise O and all tags of the other types. The sequence `tags`
    itself is always within, and so is that with O in place of all tags of other types.
    Raises as `require_types`.
    """
    fixed = _known_tags(tagset, require_types(known, tagset))
    # (tag, tags)
    table = np.where(fixed[:, None], np.eye(len(fixed), dtype=bool), ~fixed)
    return torch.from_numpy(table).to(tags.device)[tags]


# ---- losses --------------------------------------------------------------------------


def split_loss(
    crf: CRF,
    emissions: Tensor,
    tags: Tensor,
    allowed: Tensor | None,
    lengths: Tensor,
    soft: Counts | None = None,
) -> tuple[Tensor, Tensor]:
    """Source and target loss of each sentence, (batch,) both; with gradient.

    emissions: (batch, tokens, tags). tags: (batch, tokens), known and added mentions.
    allowed: (batch, tokens, tags) from `allowed_tags`; None where every type is known.
    lengths: (batch,). soft: posterior to be learnt in place of the added mentions in
    `tags`, see `CRF.posterior`. Where no token has a choice, source is the ordinary
    loss and target exactly 0 without a gradient.
    """
    if allowed is None or bool((allowed.sum(-1) == 1).all()):
        source = crf.loss(emissions, tags, lengths)
        return source, torch.zeros_like(source.detach())
    return crf.split_loss(emissions, tags if soft is None else soft, allowed, lengths)


def transfer_gradients(
    crf: CRF,
    project: nn.Linear,
    features: Tensor,
    tags: Tensor,
    allowed: Tensor | None,
    lengths: Tensor,
    soft: Counts | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients with respect to `project.weight`, of emissions = project(features).

    features: (batch, tokens, width), finite at padding too; the rest as for
        `split_loss`.
    Returns (batch, tags · width), of each sentence's source loss, and (tags · width,),
    of the sum of the target losses; rows as `weight.flatten()`. With δ = ∂ loss / ∂
    emissions, which forward-backward gives for all sentences at once, a sentence's
    gradient is Σ_t δ_t ⊗
    features_t: nothing below the projection is gone through. No `.grad` changes.
    """
    inputs, ones = (
        features.detach(),
        lengths.new_ones(len(features), dtype=features.dtype),
    )
    with torch.no_grad():
        scores = project(inputs)  # (batch, tokens, tags)
    with torch.enable_grad():
        source, target = split_loss(
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


# ---- independent words ----


def word_losses(
    logits: Tensor,
    tags: Tensor,
    allowed: Tensor | None = None,
    soft: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Source and target loss of each word, (words,) both, in float32 at least.

    logits: (words, tags). tags: (words,). allowed: (words, tags) bool that holds each
    word's tag, None where every type is known. soft: (words, tags), 0 where not
    allowed; rows sum to 1.

    Where no word has a choice the target is exactly 0 and has no gradient.
    """
    scores = _wide(logits)
    if allowed is None or bool((allowed.sum(-1) == 1).all()):
        source = F.cross_entropy(scores, tags, reduction="none")
        return source, torch.zeros_like(source.detach())
    free = scores.logsumexp(-1)  # (words,)
    within = scores.masked_fill(~allowed, -torch.inf).logsumexp(-1)
    hard = scores.gather(-1, tags[:, None])[:, 0]
    reached = hard if soft is None else (soft * scores).sum(-1)
    return free - within, within - reached


def word_gradients(
    logits: Tensor,
    tags: Tensor,
    allowed: Tensor | None = None,
    soft: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of both losses with respect to the logits, (words, tags) each.

    Arguments as of `word_losses`. With p the probabilities and p_A those within A:
    p - p_A and p_A - q, q being the tag itself where no soft target is given.
    """
    scores = _wide(logits)
    reached = (
        F.one_hot(tags, scores.shape[-1]).to(scores.dtype) if soft is None else soft
    )
    free = scores.softmax(-1)
    if allowed is None:
        return free - reached, torch.zeros_like(free)
    within = word_posterior(scores, allowed)
    return free - within, within - reached


def word_posterior(logits: Tensor, allowed: Tensor) -> Tensor:
    """(words, tags) probabilities within the allowed tags: what a student learns as
    `soft`."""
    return _wide(logits).masked_fill(~allowed, -torch.inf).softmax(-1)


def _wide(logits: Tensor) -> Tensor:
    """bfloat16 holds too few digits for a sum of exponentials."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


# ---- new mentions on old tokens ------------------------------------------------------


def retag(
    encoded: Encoded, documents: Sequence[Document], known: Collection[str]
) -> Encoded:
    """The same tokens with the mentions of `documents`, other spans on the same texts.

    A span that crosses the end of a sentence (or of a piece of one) ends there. Where a
    mention of a type that is not in `known` wants a token of one that is, it is lost:
    what the site annotated itself is never changed by what was added. Raises DataError
    (other texts, a label that the tag set does not have).
    """
    given = tuple(documents)
    require_same_texts(encoded, given)
    spans, owners = _flat(given, frozenset(known))
    first, last, sentence = _ranges(encoded, spans, owners)
    kept = first < last
    pseudo = np.array([span.label not in known for span in spans], dtype=bool)
    if pseudo.any():
        taken = np.zeros(len(encoded.form) + 1, np.int64)
        np.add.at(taken, first[kept & ~pseudo], 1)
        np.add.at(taken, last[kept & ~pseudo], -1)
        # known tokens
        before = np.concatenate([[0], np.cumsum(np.cumsum(taken)[:-1] > 0)])
        kept &= ~pseudo | (before[last] == before[np.minimum(first, last)])
    tags = np.zeros(len(encoded.form), np.int64)
    rows = np.flatnonzero(kept)
    rows = rows[np.argsort(sentence[rows], kind="stable")]
    cuts = np.flatnonzero(np.diff(sentence[rows])) + 1
    for group in np.split(rows, cuts) if len(rows) else ():
        at = sentence[group[0]]
        part = slice(encoded.bounds[at], encoded.bounds[at + 1])
        own = [spans[i] for i in group]
        tags[part], _ = encode(own, encoded.offsets[part], encoded.tagset)
    return replace(encoded, documents=given, tags=tags)


def require_same_texts(encoded: Encoded, given: tuple[Document, ...]) -> None:
    """Documents with these texts, in this order. Raises DataError."""
    if len(given) != len(encoded.documents):
        raise DataError(
            f"{len(given)} annotated documents for a corpus of {len(encoded.documents)}: give "
            "the same documents, in their order"
        )
    for number, (new, old) in enumerate(zip(given, encoded.documents, strict=True)):
        if new.text != old.text:
            raise DataError(
                f"annotated document {number} (counted from 0) has another text than the corpus: "
                "give the same documents, in their order"
            )


def _flat(
    documents: tuple[Document, ...], known: frozenset[str]
) -> tuple[list[Span], np.ndarray]:
    """Continuous spans that do not overlap within the known and within the other types,
    and the number of the document of each."""
    spans: list[Span] = []
    owners: list[int] = []
    for number, document in enumerate(documents):
        own = [span for span in document.spans if span.label in known]
        added = [span for span in document.spans if span.label not in known]
        for part in (own, added):
            # apart, so that a long added mention does not displace a known one
            if flat := flatten(part, "outermost")[0]:
                spans += flat
                owners += [number] * len(flat)
    return spans, np.array(owners, dtype=np.int64)


def _ranges(
    encoded: Encoded, spans: list[Span], owners: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First token, token after the last (both of the corpus) and sentence of each span,
    (spans,): characters are counted through the corpus, documents one after the other.
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
    behind = encoded.bounds[np.minimum(sentence + 1, encoded.sentences)]
    return first, np.minimum(last, behind), sentence
