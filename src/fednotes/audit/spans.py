"""Tokens, and their places, in the span of what the lowest maps of an encoder were told.

Petrov et al. 2024, "DAGER: Exact Gradient Inversion for Large Language Models", section 4.1. A map
Y = X Wᵀ of the lowest layer has the gradient ∂L/∂W = (∂L/∂Y)ᵀ X: its rows are sums of the rows of
X, (tokens, width), of which each is one token at one place. Fewer tokens than columns span less
than everything, and what lies in the span was in the batch:

    d(v, i) = |x - P x| / |x|, x the row of word v at place i, P onto the rows of the gradient
    score of v: -min_i d(v, i)
    score of v at i: log d of v's places in the mean over that at i, where each direction counts by
                     λ / (s² + λ), s its singular value, and not by whether it is spanned; a
                     little more where both are there often

The paper's second step, which finds what words of several sentences belong together, is left out.
Dropout moves the rows, more tokens than columns span everything, and a step of Adam is made of the
signs of such sums.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.audit import Attack, Nothing, Read, Scene, Seen, Trial, hearing, known
from fednotes.core.seeds import rng_of
from fednotes.taggers.model import evaluating

DECOYS = 1500  # words of the vocabulary that are tried beside those that are there
PLACES = 128  # of a sequence, at most
TOGETHER = 32  # words in one call
FAINT = 1e-6  # of the largest singular value: rounding
SLIGHT = 0.05  # of the furthest that the maps move in a round: rounding
WHOLE = 0.8  # of the columns, at most, are the span: where all are spanned, the largest
SOFT = 1e-8  # λ, of the largest s²
KNOWN = 0.02  # weight of how often a word, and a place, is there. Chosen: more hides what is seen


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


def _changes(scene: Scene) -> list[tuple[Seen, list[Tensor]]]:
    """Answers, and (rows, width) each: what is seen of the lowest maps, or of low-rank changes of
    them, where they move: half of low ranks begins at 0, which stops the other's first step."""
    model, found = scene.member.model, []
    library, maps = _library(model), getattr(model, "_maps", [])
    lowest = [] if library is None else _lowest(library)
    names = {id(p): n for n, p in model.trainable().items()} if library is not None else {}
    for seen in scene.answers if lowest else ():
        own = [seen.change(names.get(id(linear.weight), "")) for linear in lowest]
        if (down := seen.change("lora.down")) is not None:
            wide = [m.in_features for m in maps]
            each = list(down) if down.dim() == 3 else down.split(wide, dim=1)
            own += [v for m, v in zip(maps, each, strict=True) if any(m is o for o in lowest)]
        if moved := [value for value in own if value is not None and value.any()]:
            found.append((seen, moved))
    far = [sum(float(value.norm()) for value in moved) for _, moved in found]
    return [one for one, own in zip(found, far, strict=True) if own >= SLIGHT * max(far)]


def metric(changes: Sequence[Tensor], soft: bool = False) -> Tensor:
    """(width, directions) what rows of a batch have little of, in its maps' gradients.

    That is what these do not span; soft: each direction, by how little they have of it.
    """
    each = torch.cat([change / change.norm() for change in changes])
    turn: Tensor
    squares, turn = torch.linalg.eigh(each.T @ each)
    squares = (squares / squares[-1]).clamp(min=0)
    if soft:
        turn *= (SOFT / (squares + SOFT)).sqrt()
        return turn
    rank = min(int((squares > FAINT**2).sum()), int(WHOLE * len(squares)))
    return turn[:, : len(squares) - rank]


def far(rows: Tensor, outside: Tensor) -> Tensor:
    """How much of each row is outside, from 0 to 1."""
    left, whole = (rows @ outside).norm(dim=-1), rows.norm(dim=-1)
    share: Tensor = left / whole
    return share


def _distances(library: Any, outside: Tensor, words: np.ndarray, places: int) -> Tensor:
    """(words, places)"""
    first, parts = _lowest(library)[0], torch.from_numpy(words).split(TOGETHER)
    return torch.cat([far(_rows(library, first, part, places), outside) for part in parts])


def _given(scene: Scene, fold: int) -> tuple[Any, list[Tensor], Sequence[Read]]:
    """A site as it computed, what is seen of its lowest maps, and what was read. fold: of the
    control."""
    if scene.control:
        return undefended(scene, _weights, fold)
    for seen, moved in _changes(scene):
        return scene.sent(seen), moved, seen.reads
    raise Nothing("no map that reads an encoder's embeddings leaves a site")


def _tokens(scene: Scene) -> Trial:
    """Those that were read, among decoys that nobody read."""
    member, changes, reads = _given(scene, 2)
    library, outside = _library(member.model), metric(changes)
    config, (own, nobody) = library.config, known("", reads)
    free = np.flatnonzero(nobody & (np.arange(len(own)) != config.pad_token_id))
    words = np.flatnonzero(own), rng_of(0, "decoys").permutation(free)[:DECOYS]
    places = min(PLACES, getattr(config, "max_position_embeddings", PLACES) - 2)
    found = (-_distances(library, outside, of, places).min(dim=1).values for of in words)
    width, left = outside.shape
    return Trial.of(*found, span=float(width - left), width=float(width))


def _places(scene: Scene) -> Trial:
    """Where the words stood that were read, of those that know them."""
    member, changes, reads = _given(scene, 8)
    model, sequences = member.model, reads[0].sequences
    marks = model.specials.all if hasattr(model, "specials") else model.tokenizer.all_special_ids
    words = np.setdiff1d(np.concatenate([ids.ravel() for ids in sequences]), marks)
    places = min(PLACES, max(ids.shape[1] for ids in sequences))
    times = np.stack([_stood(read, words, places) for read in reads])
    near = _distances(_library(model), metric(changes, soft=True), words, places)
    return Trial.order(placed(near.numpy(), times[0]), times)


def placed(distances: np.ndarray, times: np.ndarray) -> np.ndarray:
    """(words, places) the more, the likelier. times: how often each word is at each place, of which
    nothing but the sums is told."""
    often = np.log1p(np.outer(times.sum(1), times.sum(0)))  # [audit places]
    near = np.log(distances)
    scores: np.ndarray
    scores = near.mean(1, keepdims=True) - near + KNOWN * often  # [audit places]
    return scores


def _stood(read: Read, words: np.ndarray, places: int) -> np.ndarray:
    """(words, places) how often each stood at each place. words: sorted."""
    times = np.zeros((len(words), places))
    for ids in read.sequences:
        row, place = np.nonzero(np.isin(ids[:, :places], words))
        np.add.at(times, (np.searchsorted(words, ids[row, place]), place), 1)
    return times


def undefended(
    scene: Scene, weights: Callable[[Any], Sequence[Tensor]], fold: int = 2
) -> tuple[Any, list[Tensor], Sequence[Read]]:
    """A site; its gradients, without dropout, of a few sentences, which span a half of the columns
    (or a smaller part) of the maps with these weights; and what was read."""
    width = weights(scene.member.model)[0].shape[-1]
    bare = scene.bare(batch="each", batch_size=2, accumulate=1, length=max(8, width // 4))
    member, read = bare.member, Read()
    model, maps = member.model, weights(member.model)
    with ExitStack() as stack, evaluating(model):
        stack.enter_context(hearing([model], lambda: read, trains=False))
        for weight in maps:
            stack.callback(weight.requires_grad_, weight.requires_grad)
            weight.requires_grad_(True)
        if hasattr(model, "tagset"):
            sizes = member.train_set.lengths + 2
            fits = np.flatnonzero(sizes <= max(width // fold, sizes.min()))
            few = fits[: max(1, int((sizes[fits].cumsum() <= width // fold).sum()))]
            loss = model.losses(member.train_set, few).source.sum()
        else:
            (part, *_) = next(iter(member.steps(0)))
            model.eval()
            loss = part.loss([part])
        gradients = torch.autograd.grad(loss, maps)
    return member, [gradient.double() for gradient in gradients], (read,)


def _weights(model: Any) -> list[Tensor]:
    return [linear.weight for linear in _lowest(_library(model))]


_SEES = "an update of the maps that read an encoder's embeddings"
_CLOSED = 'lowest layers that stay as they are (train = "top"); noise ([privacy])'
ATTACKS = (
    Attack("tokens from the lowest maps", _SEES, _CLOSED, _tokens),
    Attack("places from the lowest maps", _SEES, f"{_CLOSED}; more local steps", _places),
)
