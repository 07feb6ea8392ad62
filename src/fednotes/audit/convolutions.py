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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednotes.audit import Attack, Read, Scene, Seen, Trial
from fednotes.audit.spans import DECOYS, far, metric, undefended
from fednotes.core.seeds import rng_of

MOST = 1500  # words whose neighbours are sought: the most frequent
RIDGE = 0.1  # of T, in the columns' mean square
LITTLE = 1e-9  # likewise of X⁺


def _maps(model: Any) -> dict[str, Tensor]:
    """What reads the words' representations, (offsets or directions, outputs, width) each; none
    where these are contextual features alone."""
    known = {"words", "characters"} & {*getattr(model.config, "layers", ())}
    named = dict(model.named_parameters()) if known else {}
    found = {name: value for name, value in named.items() if name.startswith("cnn.weight")}
    return found or {n: v for n, v in named.items() if n == "lstm.weight_ih_l0"}


def _changes(scene: Scene) -> tuple[Seen, dict[str, Tensor]] | None:
    """What is seen of them at first; None: they stay."""
    for seen in scene.answers:
        own = {name: seen.change(name) for name in _maps(scene.member.model)}
        if moved := {n: value for n, value in own.items() if value is not None and value.any()}:
            return seen, moved
    return None


@torch.no_grad()
def _represented(model: Any, corpora: Sequence[Any]) -> tuple[Tensor, dict[int, np.ndarray]]:
    """(words, width) the distinct rows of all words; and of each corpus, by its identity, (tokens,)
    which of them each is."""
    rows, which = list[Tensor](), {}
    for corpus in corpora:
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


def _words(
    member: Any, changes: Mapping[str, Tensor], read: Read, others: Sequence[Read], _: float
) -> Trial:
    """Those that were read, among others of the site's that nobody read."""
    batches = [corpus for of in (read, *others) for corpus, _ in of.batches]
    known = {id(corpus): corpus for corpus in (*batches, member.train_set, member.valid_set)}
    rows, at = _represented(member.model, [*known.values()])
    own, *rest = (np.unique(np.concatenate([*_texts(of, at), []])) for of in (read, *others))
    site = np.concatenate([at[id(corpus)] for corpus in (member.train_set, member.valid_set)])
    free = np.setdiff1d(site, np.concatenate([own, *rest]))
    decoys, width = rng_of(0, "decoys").permutation(free)[:DECOYS], rows.shape[1]
    outside = metric([change[..., :width].flatten(0, -2) for change in changes.values()])
    found = (rows[of.astype(int)] for of in (own, decoys))
    return Trial.of(*(-far(of[of.any(dim=1)], outside) for of in found))


def _neighbours(
    member: Any, changes: Mapping[str, Tensor], read: Read, others: Sequence[Read], rate: float
) -> Trial:
    """Which words stand side by side, of those of the site that were read. rate: of dropout."""
    batches = [corpus for of in (read, *others) for corpus, _ in of.batches]
    rows, at = _represented(member.model, [*{id(c): c for c in batches}.values()])
    texts = [_texts(of, at) for of in (read, *others)]
    often = np.bincount(np.concatenate([text for of in texts for text in of]), minlength=len(rows))
    chosen = np.argsort(-often, kind="stable")[: min(MOST, int((often > 0).sum()))]
    place = np.full(len(rows), -1)
    place[chosen] = np.arange(len(chosen))
    times = np.zeros((len(texts), len(chosen), len(chosen)))
    for own, of in zip(times, texts, strict=True):
        for text in of:
            pairs = place[np.stack((text[:-1], text[1:]))]
            np.add.at(own, tuple(pairs[:, (pairs >= 0).all(0)]), 1)
    here = (times[0].sum(0) + times[0].sum(1)) > 0
    given = rows[torch.from_numpy(chosen)], torch.from_numpy(often[chosen]).double(), rate
    found = inverted([*changes.values()], *given).numpy()
    part = np.ix_(here, here)
    return Trial.order(found[part], times[0][part], times.sum(0)[part], words=float(here.sum()))


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


def _tried(scene: Scene, how: Callable[..., Trial]) -> Trial:
    changes = _changes(scene)
    assert changes is not None
    (seen, moved), member = changes, scene.sent(changes[0])
    return how(member, moved, seen.read, seen.others, member.config.model.dropout)


def _control(scene: Scene, how: Callable[..., Trial]) -> Trial:
    model = scene.member.model
    wide = next(iter(_maps(model).values())).shape[-1]
    lost = 0 if model.encoder is None else model.config.project or model.encoder.dim
    fold = -(-2 * wide // (wide - lost))  # half of the columns that are known
    member, gradients, read = undefended(scene, lambda own: [*_maps(own).values()], fold)
    return how(member, dict(zip(_maps(member.model), gradients, strict=True)), read, (), 0.0)


def _attack(name: str, how: Callable[..., Trial], kind: str, what: str) -> Attack:
    def absent(scene: Scene) -> str:
        found = _changes(scene)
        there = found is not None and any(
            n.startswith(kind) and len(v) > bool(kind) for n, v in found[1].items()
        )
        return "" if there else f"no {what} leaves a site"

    return Attack(
        name,
        f"an update of {what}",
        "convolutions and LSTM that stay (private); more sentences a batch, dropout; noise "
        "([privacy])",
        absent,
        lambda scene: _tried(scene, how),
        lambda scene: _control(scene, how),
    )


ATTACKS = (
    _attack("words from convolutions", _words, "", "convolution or LSTM that reads words"),
    _attack("neighbours from convolutions", _neighbours, "cnn", "convolution that reads words"),
)
