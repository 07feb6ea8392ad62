"""Words, and which of them are neighbours, from what a light tagger's lowest maps were told.

They read a row x a word, wherever it stands, which everybody knows: of public vectors, the hash and
the characters' layer as it was sent. Rows lie in the span of the gradients, as in `spans.py`; and
gradients at the offsets k of a convolution are linear in what its outputs were told, so that the
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

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednotes.audit import Attack, Nothing, Read, Scene, Trial
from fednotes.audit.spans import DECOYS, far, metric, undefended
from fednotes.core.seeds import rng_of

MOST = 1500  # words whose neighbours are sought: the most frequent
RIDGE = 0.1  # of T, in the columns' mean square
LITTLE = 1e-9  # likewise of X⁺


def _maps(model: Any) -> dict[str, Tensor]:
    """What reads the words' representations, (offsets or directions, outputs, width) each; none
    where these are contextual features alone."""
    known = {"words", "characters"} & {*getattr(model, "layers", ())}
    named = dict(model.named_parameters()) if known else {}
    found = {name: value for name, value in named.items() if name.startswith("cnn.weight")}
    return found or {n: v for n, v in named.items() if n == "lstm.weight_ih_l0"}


def _given(
    scene: Scene, kind: str = "", what: str = "convolution or LSTM that reads words"
) -> tuple[Any, list[Tensor], Sequence[Read], float]:
    """A site as it computed, what is seen of its lowest maps, what was read, and the rate of
    dropout. kind: how such a map's name begins, of which there are offsets; "": any; what: of
    people."""
    if scene.control:
        model = scene.member.model
        wide = next(iter(_maps(model).values())).shape[-1]
        lost = 0 if model.encoder is None else model.config.project or model.encoder.dim
        fold = -(-2 * wide // (wide - lost))  # half of the columns that are known
        return *undefended(scene, lambda own: [*_maps(own).values()], fold), 0.0
    for seen in scene.answers:
        own = {name: seen.change(name) for name in _maps(scene.member.model)}
        moved = {n: value for n, value in own.items() if value is not None and value.any()}
        if any(n.startswith(kind) and len(value) > bool(kind) for n, value in moved.items()):
            member = scene.sent(seen)
            return member, [*moved.values()], seen.reads, member.config.model.dropout
        if moved:
            break
    raise Nothing(f"no {what} leaves a site")


@torch.no_grad()
def _represented(model: Any, corpora: Sequence[Any]) -> tuple[Tensor, dict[int, np.ndarray]]:
    """(words, width) the distinct rows of all words; and of each corpus, by its identity, (tokens,)
    which of them each is."""
    rows, which = list[Tensor](), {}
    for corpus in {id(corpus): corpus for corpus in corpora}.values():
        _, first, form = np.unique(corpus.encoded.form, return_index=True, return_inverse=True)
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
    member, changes, reads, _ = _given(scene)
    held = member.train_set, member.valid_set
    rows, at = _represented(member.model, [*(c for of in reads for c, _ in of.batches), *held])
    own, *rest = (np.unique(np.concatenate([*_texts(of, at), []])) for of in reads)
    site = np.concatenate([at[id(corpus)] for corpus in held])
    free = np.setdiff1d(site, np.concatenate([own, *rest]))
    decoys, width = rng_of(0, "decoys").permutation(free)[:DECOYS], rows.shape[1]
    outside = metric([change[..., :width].flatten(0, -2) for change in changes])
    found = (rows[of.astype(int)] for of in (own, decoys))
    return Trial.of(*(-far(of[of.any(dim=1)], outside) for of in found))


def _neighbours(scene: Scene) -> Trial:
    """Which words stand side by side, of those of the site that were read."""
    member, changes, reads, rate = _given(scene, "cnn", "convolution that reads words")
    rows, at = _represented(member.model, [c for of in reads for c, _ in of.batches])
    texts = [_texts(of, at) for of in reads]
    often = np.bincount(np.concatenate([text for of in texts for text in of]), minlength=len(rows))
    chosen = np.argsort(-often, kind="stable")[: min(MOST, int((often > 0).sum()))]
    place = np.full(len(rows), -1)
    place[chosen] = np.arange(len(chosen))
    times = np.zeros((len(texts), len(chosen), len(chosen)))
    for own, of in zip(times, texts, strict=True):
        for text in of:
            pairs = place[np.stack((text[:-1], text[1:]))]
            np.add.at(own, tuple(pairs[:, (pairs >= 0).all(0)]), 1)
    here = np.flatnonzero(times[0].sum(0) + times[0].sum(1))
    given = rows[torch.from_numpy(chosen)], torch.from_numpy(often[chosen]).double(), rate
    found = inverted(changes, *given).numpy()
    return Trial.order(
        found[np.ix_(here, here)], times[:, here][:, :, here], words=float(len(here))
    )


def inverted(changes: Sequence[Tensor], rows: Tensor, often: Tensor, rate: float) -> Tensor:
    """(words, words) how often each is likely to stand before each, twice.

    changes: (offsets, outputs, width) of each convolution. rows: (words, width). often: (words,)
    how often each word is there, by which alone it is as often before any other as that is there.
    rate: of dropout.
    """
    squares = rows.T @ rows
    mean = squares.diagonal() * rate / (1 - rate) + LITTLE * squares.diagonal().mean()
    inverse = torch.linalg.solve(squares + mean.diag(), rows.T)  # [audit order] (width, words)
    told = [change[..., : rows.shape[1]].double() @ inverse for change in changes]
    before = torch.cat([of[:-1].flatten(0, 1) for of in told])  # (offsets · outputs, words)
    after = torch.cat([of[1:].flatten(0, 1) for of in told])
    return _ridge(before, after, often) + _ridge(after, before, often).T  # [audit order]


def _ridge(x: Tensor, y: Tensor, often: Tensor) -> Tensor:
    """T of x T = y, each row as often as its word is there."""
    squares, blind = x.T @ x, (often / often.sum()).expand(len(often), -1)
    most = RIDGE * squares.diagonal().mean() * torch.eye(len(squares))
    found: Tensor
    found = blind + torch.linalg.solve(squares + most, x.T @ y - squares @ blind)
    return found * often[:, None]


_SEES = "an update of {} that reads words"
_CLOSED = (
    "convolutions and LSTM that stay (private); more sentences a batch, dropout; noise ([privacy])"
)
ATTACKS = (
    Attack("words from convolutions", _SEES.format("convolution or LSTM"), _CLOSED, _words),
    Attack("neighbours from convolutions", _SEES.format("convolution"), _CLOSED, _neighbours),
)
