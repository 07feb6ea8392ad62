"""Tokens in the span of what the lowest maps of an encoder were told.

Petrov et al. 2024, "DAGER: Exact Gradient Inversion for Large Language Models", section 4.1. A map
Y = X Wᵀ of the lowest layer has the gradient ∂L/∂W = (∂L/∂Y)ᵀ X: its rows are sums of the rows of
X, (tokens, width), of which each is one token at one place. Fewer tokens than columns span less
than everything, and what lies in the span was in the batch:

    d(v, i) = |x - P x| / |x|, x the row of word v at place i, P onto the rows of the gradient
    score of v: -min_i d(v, i)

The paper's second step, which finds the order of the words, is left out. Dropout moves the rows,
more tokens than columns span everything, and a step of Adam is made of the signs of such sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.audit import Attack, Read, Scene, Trial
from fednotes.core.seeds import rng_of
from fednotes.taggers.model import evaluating

DECOYS = 1500  # words of the vocabulary that are tried beside those that are there
PLACES = 128  # of a sequence, at most
TOGETHER = 32  # words in one call
FAINT = 1e-6  # of the largest singular value: rounding
SLIGHT = 0.05  # of the furthest that the maps move in a round: rounding
WHOLE = 0.8  # of the columns, at most, are the span: where all are spanned, the largest


class _Reached(Exception):
    """The lowest map is about to read."""


def _library(model: Any) -> Any:
    """The Hugging Face model whose word embeddings are read; None where there is none."""
    found = getattr(model, "library", None) or getattr(model, "model", None)
    return found if hasattr(found, "base_model") else None


def _lowest(library: Any) -> list[nn.Linear]:
    """The maps that read what the embeddings give."""
    read: list[tuple[nn.Linear, Tensor]] = []
    with ExitStack() as stack, torch.no_grad():
        for linear in (m for m in library.modules() if isinstance(m, nn.Linear)):
            hook = linear.register_forward_pre_hook(lambda m, given: read.append((m, given[0])))
            stack.callback(hook.remove)
        library.base_model(input_ids=torch.full((1, 4), 5))
    return [linear for linear, given in read if given is read[0][1]]


def _rows(library: Any, first: nn.Linear, words: Tensor, places: int) -> Tensor:
    """(words, places, width) what the lowest map reads of each word at each place."""
    read: list[Tensor] = []

    def reached(_: nn.Module, given: tuple[Tensor, ...]) -> None:
        read.append(given[0])
        raise _Reached

    hook = first.register_forward_pre_hook(reached)
    with torch.no_grad(), evaluating(library), suppress(_Reached):
        library.base_model(input_ids=words[:, None].expand(-1, places))
    hook.remove()
    return read[0].double()


def _changes(scene: Scene) -> list[tuple[list[Tensor], Read, Sequence[Read]]]:
    """(rows, width) each: what is seen of the lowest maps, or of low-rank changes of them, in each
    answer where they move: half of low ranks begins at 0, which stops the other's first step."""
    model, found = scene.member.model, []
    library, maps = _library(model), getattr(model, "_maps", [])
    lowest = [] if library is None else _lowest(library)
    names = {id(p): n for n, p in model.named_parameters()}
    for seen in scene.answers if lowest else ():
        own = [seen.change(names.get(id(linear.weight), "")) for linear in lowest]
        if (down := seen.change("lora.down")) is not None:
            wide = [m.in_features for m in maps]
            each = list(down) if down.dim() == 3 else down.split(wide, dim=1)
            own += [v for m, v in zip(maps, each, strict=True) if any(m is o for o in lowest)]
        if moved := [value for value in own if value is not None and value.any()]:
            found.append((moved, seen.read, seen.others))
    far = [sum(float(value.norm()) for value in moved) for moved, *_ in found]
    return [one for one, own in zip(found, far, strict=True) if own >= SLIGHT * max(far)]


def _told(model: Any, changes: list[Tensor], read: Read, others: Sequence[Read] = ()) -> Trial:
    library = _library(model)
    config, (own, nobody) = library.config, read.known("", others)
    _, sizes, rows = torch.linalg.svd(
        torch.cat([change / change.norm() for change in changes]), full_matrices=False
    )
    rank = min(int((sizes > FAINT * sizes[0]).sum()), int(WHOLE * rows.shape[1]))
    span = rows[:rank]
    free = np.flatnonzero(nobody & (np.arange(len(own)) != config.pad_token_id))
    decoys = rng_of(0, "decoys").permutation(free)[:DECOYS]
    places = min(PLACES, getattr(config, "max_position_embeddings", PLACES) - 2)
    first, scores = _lowest(library)[0], []
    for words in (np.flatnonzero(own), decoys):
        near = []
        for part in torch.from_numpy(words).split(TOGETHER):
            x = _rows(library, first, part, places)
            left = (x - x @ span.T @ span).norm(dim=2) / x.norm(dim=2)
            near.append(-left.min(dim=1).values)
        scores.append(torch.cat(near))
    return Trial.of(*scores, span=float(rank), width=float(rows.shape[1]))


def _control(scene: Scene) -> Trial:
    """The gradient of a few sentences, without dropout."""
    width = _lowest(_library(scene.member.model))[0].in_features
    bare = scene.bare(batch="each", batch_size=2, accumulate=1, length=max(8, width // 4))
    member, read = bare.member, Read()
    library = _library(member.model)
    weights = [linear.weight for linear in _lowest(library)]
    words = library.get_input_embeddings()
    with ExitStack() as stack, evaluating(library):
        hook = words.register_forward_pre_hook(
            lambda table, given: read.note("", given[0].numpy(), table.num_embeddings)
        )
        stack.callback(hook.remove)
        for weight in weights:
            stack.callback(weight.requires_grad_, weight.requires_grad)
            weight.requires_grad_(True)
        if hasattr(member.model, "losses"):
            sizes = member.train_set.lengths + 2
            fits = np.flatnonzero(sizes <= max(width // 2, sizes.min()))
            few = fits[: max(1, int((sizes[fits].cumsum() <= width // 2).sum()))]
            loss = member.model.losses(member.train_set, few).source.sum()
        else:
            (part, *_) = next(iter(member.steps(0)))
            member.model.eval()
            loss = part.loss([part])
        gradients = torch.autograd.grad(loss, weights)
    return _told(member.model, [gradient.double() for gradient in gradients], read)


ATTACKS = (
    Attack(
        "tokens from the lowest maps",
        "an update of the maps that read an encoder's embeddings",
        'lowest layers that stay as they are (train = "top"); noise ([privacy])',
        lambda scene: (
            "" if _changes(scene) else "no map that reads an encoder's embeddings leaves a site"
        ),
        lambda scene: _told(scene.member.model, *_changes(scene)[0]),
        _control,
    ),
)
