"""Tokens and their places, words and their neighbours, in what a model's lowest maps were told.

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

The lowest maps of a light tagger read a row x a word, wherever it stands, which everybody knows: of
public vectors, the hash and the characters' layer as it was sent. Rows lie in the span likewise.
Gradients at the offsets k of a convolution are linear in what its outputs were told, so that the
order follows in closed form, where DLG (Zhu et al. 2019) and LAMP (Balunović et al. 2022) search:

    G_k = Σ_t δ_t x_{t+k}ᵀ   the gradient at offset k; δ_t that of the output at token t
    A_k = G_k X⁺             X (words, width): column v is Σ δ_t over the t whose t + k is word v
    A_{k+1} = A_k T          where u stands before v the same δ_t is in column u here, and v there
    score of u before v: T[u, v], and likewise backwards; by ridge regression towards what who
                         knows how often each word is there expects

Columns of contextual features depend on the sentence and are left out. Dropout leaves numbers of
the rows out, and X⁺ counts with it: (XᵀX + r diag XᵀX)⁻¹ Xᵀ, r the odds of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.apps.audit import (
    Attack,
    Nothing,
    Read,
    Scene,
    Seen,
    Trial,
    hearing,
    known,
)
from fednotes.core.seeds import rng_of
from fednotes.taggers.model import evaluating

DECOYS = 1500  # words of the vocabulary that are tried beside those that are there
PLACES = 128  # of a sequence, at most
TOGETHER = 32  # words in one call
FAINT = 1e-6  # of the largest singular value: rounding
SLIGHT = 0.05  # of the furthest that the maps move in a round: rounding
WHOLE = 0.8  # of the columns, at most, are the span: where all are spanned, the largest
SOFT = 1e-8  # λ, of the largest s²
MOST = 1500  # words whose neighbours are sought: the most frequent
RIDGE = 0.1  # of T, in the columns' mean square
LITTLE = 1e-9  # likewise of X⁺
KNOWN = 0.02  # weight of how often a word, and a place, is there. Chosen: more hides what is seen


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


Told = Iterator[
    tuple[Seen, list[Tensor]]
]  # answers, and (rows, width) each: what is seen of maps
Given = tuple[Any, list[Tensor], Sequence[Read]]


def _given(scene: Scene, told: Told, what: str, fold: int = 2) -> Given:
    """A site as it computed, what is seen of its lowest maps, and what was read. what: the maps,
    for people. fold: of the control."""
    if scene.control:
        return _undefended(scene, fold)
    for seen, moved in told:
        return scene.sent(seen), moved, seen.reads
    raise Nothing(f"no {what} leaves a site")


def _weights(model: Any) -> list[Tensor]:
    """Of the maps that read an encoder's embeddings, or a light tagger's words."""
    library = _library(model)
    return (
        [linear.weight for linear in _lowest(library)]
        if library
        else [*_maps(model).values()]
    )


def _undefended(scene: Scene, fold: int) -> Given:
    """A site; its gradients, without dropout, of a few sentences, which span a half (or a smaller
    part) of the columns that are known; and what was read."""
    model, width = scene.member.model, _weights(scene.member.model)[0].shape[-1]
    if "context" in getattr(model, "layers", ()):
        fold = -(-fold * width // (width - (model.config.project or model.encoder.dim)))
    bare = scene.bare(
        batch="each", batch_size=2, accumulate=1, length=max(8, width // 4)
    )
    member, read = bare.member, Read()
    model, maps = member.model, _weights(member.model)
    with (
        ExitStack() as stack,
        evaluating(model),
        hearing([model], lambda: read, trains=False),
    ):
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


# ---- an encoder ----------------------------------------------------------------------------------


class _Reached(Exception):
    """The only map that is asked about has read."""


def _library(model: Any) -> Any:
    """The Hugging Face model whose word embeddings are read; None where there is none."""
    found = getattr(model, "library", None) or getattr(model, "model", None)
    return found if hasattr(found, "base_model") else None


def _read_by(
    library: Any, maps: Sequence[nn.Linear], ids: Tensor
) -> list[tuple[Any, Tensor]]:
    """What some maps read of such ids, in order; of one map no further than that."""
    read: list[tuple[Any, Tensor]] = []

    def reached(linear: nn.Module, given: tuple[Tensor, ...]) -> None:
        read.append((linear, given[0]))
        if len(maps) == 1:
            raise _Reached

    with ExitStack() as stack, torch.no_grad(), evaluating(library), suppress(_Reached):
        for linear in maps:
            stack.callback(linear.register_forward_pre_hook(reached).remove)
        library.base_model(input_ids=ids)
    return read


def _lowest(library: Any) -> list[nn.Linear]:
    """The maps that read what the embeddings give."""
    linear = [module for module in library.modules() if isinstance(module, nn.Linear)]
    read = _read_by(library, linear, torch.full((1, 4), 5))
    return [own for own, given in read if given is read[0][1]]


def _distances(library: Any, outside: Tensor, words: np.ndarray, places: int) -> Tensor:
    """(words, places) of what the lowest map reads of each word at each place."""
    first, parts = (
        _lowest(library)[:1],
        torch.from_numpy(words)[:, None].split(TOGETHER),
    )
    rows = (_read_by(library, first, part.expand(-1, places))[0][1] for part in parts)
    return torch.cat([far(of.double(), outside) for of in rows])


def _encoder(scene: Scene) -> Told:
    """Of its maps, or of low-rank changes of them, where they move: half of low ranks begins at 0,
    which stops the other's first step."""
    model, found = scene.member.model, []
    if (library := _library(model)) is None:
        return
    lowest, maps = _lowest(library), getattr(model, "_maps", [])
    names = {id(p): n for n, p in model.trainable().items()}
    for seen in scene.answers:
        own = [seen.change(names.get(id(linear.weight), "")) for linear in lowest]
        if (down := seen.change("lora.down")) is not None:
            wide = [m.in_features for m in maps]
            each = list(down) if down.dim() == 3 else down.split(wide, dim=1)
            own += [
                v
                for m, v in zip(maps, each, strict=True)
                if any(m is o for o in lowest)
            ]
        moved = [value for value in own if value is not None and value.any()]
        found.append((sum(float(value.norm()) for value in moved), seen, moved))
    least = SLIGHT * max((length for length, *_ in found), default=0)
    yield from (
        (seen, moved) for length, seen, moved in found if moved and length >= least
    )


_MAPS = "map that reads an encoder's embeddings"


def _tokens(scene: Scene) -> Trial:
    """Those that were read, among decoys that nobody read."""
    member, changes, reads = _given(scene, _encoder(scene), _MAPS)
    library, outside = _library(member.model), metric(changes)
    config, (own, nobody) = library.config, known("", reads)
    free = np.flatnonzero(nobody & (np.arange(len(own)) != config.pad_token_id))
    words = np.flatnonzero(own), rng_of(0, "decoys").permutation(free)[:DECOYS]
    places = min(PLACES, getattr(config, "max_position_embeddings", PLACES) - 2)
    found = (
        -_distances(library, outside, of, places).min(dim=1).values for of in words
    )
    width, left = outside.shape
    return Trial.of(*found, span=float(width - left), width=float(width))


def _places(scene: Scene) -> Trial:
    """Where the words stood that were read, of those that know them."""
    member, changes, reads = _given(scene, _encoder(scene), _MAPS, 8)
    model, sequences = member.model, reads[0].sequences
    marks = (
        model.specials.all
        if hasattr(model, "specials")
        else model.tokenizer.all_special_ids
    )
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


# ---- a light tagger ------------------------------------------------------------------------------


def _maps(model: Any) -> dict[str, Tensor]:
    """What reads the words' representations, (offsets or directions, outputs, width) each; none
    where these are contextual features alone."""
    known = {"words", "characters"} & {*getattr(model, "layers", ())}
    named = dict(model.named_parameters()) if known else {}
    found = {
        name: value for name, value in named.items() if name.startswith("cnn.weight")
    }
    return found or {n: v for n, v in named.items() if n == "lstm.weight_ih_l0"}


def _light(scene: Scene, kind: str = "") -> Told:
    """The first of its maps that move, if one's name begins so; convolutions have offsets then."""
    for seen in scene.answers:
        own = {name: seen.change(name) for name in _maps(scene.member.model)}
        if moved := {
            n: value for n, value in own.items() if value is not None and value.any()
        }:
            if any(
                n.startswith(kind) and len(value) > bool(kind)
                for n, value in moved.items()
            ):
                yield seen, [*moved.values()]
            return


@torch.no_grad()
def _represented(
    model: Any, corpora: Sequence[Any]
) -> tuple[Tensor, dict[int, np.ndarray]]:
    """(words, width) the distinct rows of all words; and of each corpus, by its identity, (tokens,)
    which of them each is."""
    rows, which = list[Tensor](), {}
    for corpus in {id(corpus): corpus for corpus in corpora}.values():
        _, first, form = np.unique(
            corpus.encoded.form, return_index=True, return_inverse=True
        )
        which[id(corpus)] = form + sum(len(of) for of in rows)
        parts = [*model._represent(replace(corpus, context=None), first)]
        rows.append(torch.cat(parts, dim=1).double())
    words, same = np.unique(torch.cat(rows).numpy(), axis=0, return_inverse=True)
    return torch.from_numpy(words), {key: same.ravel()[of] for key, of in which.items()}


def _texts(read: Read, words: dict[int, np.ndarray]) -> list[np.ndarray]:
    """Each sentence that was read, in words."""
    return [
        words[id(corpus)][slice(*corpus.encoded.bounds[at : at + 2])]
        for corpus, chosen in read.batches
        for at in chosen
    ]


def _words(scene: Scene) -> Trial:
    """Those that were read, among others of the site's that nobody read."""
    what = "convolution or LSTM that reads words"
    member, changes, reads = _given(scene, _light(scene), what)
    held = member.train_set, member.valid_set
    rows, at = _represented(
        member.model, [*(c for of in reads for c, _ in of.batches), *held]
    )
    own, *rest = (np.unique(np.concatenate([*_texts(of, at), []])) for of in reads)
    site = np.concatenate([at[id(corpus)] for corpus in held])
    free = np.setdiff1d(site, np.concatenate([own, *rest]))
    decoys, width = rng_of(0, "decoys").permutation(free)[:DECOYS], rows.shape[1]
    outside = metric([change[..., :width].flatten(0, -2) for change in changes])
    found = (rows[of.astype(int)] for of in (own, decoys))
    return Trial.of(*(-far(of[of.any(dim=1)], outside) for of in found))


def _neighbours(scene: Scene) -> Trial:
    """Which words stand side by side, of those of the site that were read."""
    what = "convolution that reads words"
    member, changes, reads = _given(scene, _light(scene, "cnn"), what)
    rate = 0.0 if scene.control else member.config.model.dropout
    rows, at = _represented(member.model, [c for of in reads for c, _ in of.batches])
    texts = [_texts(of, at) for of in reads]
    often = np.bincount(
        np.concatenate([text for of in texts for text in of]), minlength=len(rows)
    )
    chosen = np.argsort(-often, kind="stable")[: min(MOST, int((often > 0).sum()))]
    place = np.full(len(rows), -1)
    place[chosen] = np.arange(len(chosen))
    times = np.zeros((len(texts), len(chosen), len(chosen)))
    for own, of in zip(times, texts, strict=True):
        for text in of:
            pairs = place[np.stack((text[:-1], text[1:]))]
            np.add.at(own, tuple(pairs[:, (pairs >= 0).all(0)]), 1)
    here = np.flatnonzero(times[0].sum(0) + times[0].sum(1))
    given = (
        rows[torch.from_numpy(chosen)],
        torch.from_numpy(often[chosen]).double(),
        rate,
    )
    found = inverted(changes, *given).numpy()
    return Trial.order(
        found[here][:, here], times[:, here][:, :, here], words=float(len(here))
    )


def inverted(
    changes: Sequence[Tensor], rows: Tensor, often: Tensor, rate: float
) -> Tensor:
    """(words, words) how often each is likely to stand before each, twice.

    changes: (offsets, outputs, width) of each convolution. rows: (words, width). often: (words,)
    how often each word is there, by which alone it is as often before any other as that is there.
    rate: of dropout.
    """
    squares = rows.T @ rows
    mean = squares.diagonal() * rate / (1 - rate) + LITTLE * squares.diagonal().mean()
    inverse = torch.linalg.solve(
        squares + mean.diag(), rows.T
    )  # [audit order] (width, words)
    told = [change[..., : rows.shape[1]].double() @ inverse for change in changes]
    before = torch.cat(
        [of[:-1].flatten(0, 1) for of in told]
    )  # (offsets · outputs, words)
    after = torch.cat([of[1:].flatten(0, 1) for of in told])
    return (
        _ridge(before, after, often) + _ridge(after, before, often).T
    )  # [audit order]


def _ridge(x: Tensor, y: Tensor, often: Tensor) -> Tensor:
    """T of x T = y, each row as often as its word is there."""
    squares, blind = x.T @ x, (often / often.sum()).expand(len(often), -1)
    most = RIDGE * squares.diagonal().mean() * torch.eye(len(squares))
    found: Tensor
    found = blind + torch.linalg.solve(squares + most, x.T @ y - squares @ blind)
    return found * often[:, None]


_SEES = "an update of the maps that read an encoder's embeddings"
_CLOSED = 'lowest layers that stay as they are (train = "top"); noise ([privacy])'
_READS = "an update of {} that reads words"
_STAY = "convolutions and LSTM that stay (private); more sentences a batch, dropout; noise ([privacy])"
ATTACKS = (
    Attack("tokens from the lowest maps", _SEES, _CLOSED, _tokens),
    Attack(
        "places from the lowest maps", _SEES, f"{_CLOSED}; more local steps", _places
    ),
    Attack(
        "words from convolutions", _READS.format("convolution or LSTM"), _STAY, _words
    ),
    Attack(
        "neighbours from convolutions", _READS.format("convolution"), _STAY, _neighbours
    ),
)
