"""Independent words on text whose annotation covers some types: a softmax in place of a CRF.

`partial.py` splits the loss of a tag sequence by where its target comes from. Where the score
of a sequence is the sum of its words' scores, with no transitions and no constraint, every sum
over sequences is a product over words, and the same losses have a closed form for each word.
With A the tags that the site's own annotation leaves to a word and ŷ its tag,

    source = -log p(A)             what the site says
    target = -log p(ŷ) / p(A)      what was added, given what it says
    soft     -Σ q(y) log p(y) / p(A)   in place of target; q: a teacher's posterior over A

A word of a known mention has A = {ŷ}: source is the usual cross-entropy, target is 0. What a
soft target adds has no gradient where teacher and student are equal, as in `partial.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

NEVER = float("-inf")


def word_losses(
    logits: Tensor, tags: Tensor, allowed: Tensor | None = None, soft: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Source and target loss of each word, (words,) both, in float32 at least.

    logits: (words, tags). tags: (words,). allowed: (words, tags) bool that holds each word's
    tag, None where every type is known. soft: (words, tags), 0 where not allowed; rows sum to 1.

    Where no word has a choice the target is exactly 0 and has no gradient.
    """
    scores = _wide(logits)
    if allowed is None or bool((allowed.sum(-1) == 1).all()):
        source = F.cross_entropy(scores, tags, reduction="none")
        return source, torch.zeros_like(source.detach())
    free = scores.logsumexp(-1)  # (words,)
    within = scores.masked_fill(~allowed, NEVER).logsumexp(-1)
    hard = scores.gather(-1, tags[:, None])[:, 0]
    reached = hard if soft is None else (soft * scores).sum(-1)
    return free - within, within - reached


def word_gradients(
    logits: Tensor, tags: Tensor, allowed: Tensor | None = None, soft: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of both losses with respect to the logits, (words, tags) each.

    Arguments as of `word_losses`. With p the probabilities and p_A those within A:
    p - p_A and p_A - q, q being the tag itself where no soft target is given.
    """
    scores = _wide(logits)
    reached = F.one_hot(tags, scores.shape[-1]).to(scores.dtype) if soft is None else soft
    free = scores.softmax(-1)
    if allowed is None:
        return free - reached, torch.zeros_like(free)
    within = word_posterior(scores, allowed)
    return free - within, within - reached


def word_posterior(logits: Tensor, allowed: Tensor) -> Tensor:
    """(words, tags) probabilities within the allowed tags: what a student learns as `soft`."""
    return _wide(logits).masked_fill(~allowed, NEVER).softmax(-1)


def _wide(logits: Tensor) -> Tensor:
    """bfloat16 holds too few digits for a sum of exponentials."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
