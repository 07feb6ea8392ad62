"""Words that an update names: rows of trained word tables, and the output bias of pre-training.

A row of an embedding has a gradient other than zero only if its word was read, so the rows that
change are the words of the mini-batch (Melis et al. 2019, "Exploiting Unintended Feature Leakage in
Collaborative Learning", section 4.1). The gradient of a language model's output bias is Σ p_v -
[v was to be guessed]: negative for words that were masked and for no others, unless the model
expects one more often than it came (as labels from the last layer: Zhao, Mopuri, Bilen 2020, iDLG).

Which word a row is, everybody knows: the vocabulary is public, and the hash too. Words of nobody's
notes are the decoys, so what the sum over all sites tells counts as told.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fednotes.audit import Attack, Scene, Seen, Trial
from fednotes.methods.word_rows import IDS
from fednotes.rules.policy import word_tables


def _tables(seen: Seen | None, bias: bool) -> dict[str, str]:
    """Tensors that travel with a row (or a number) per word: name → what of `Read` they show."""
    found = dict[str, str]()
    if seen is None:
        return found
    for name in word_tables(seen.tensors):
        rows = len(seen.tensors[name]) if name + IDS not in seen.sent else 0
        for read, counts in seen.read.rows.items():
            right = read == name or (len(counts) == rows and read == ("masked" if bias else ""))
            if right and (seen.tensors[name].dim() == 1) == bias:
                found[name] = read
    return found


def _moved(seen: Seen, name: str, rows: int) -> Tensor:
    """(rows,) how far each row went, other than along itself, where weight decay takes it."""
    change = seen.change(name)
    assert change is not None
    ids = seen.sent.get(name + IDS)
    if ids is None and seen.task == "train":
        before = seen.sent[name].double()
        along = (change * before).sum(1) / before.square().sum(1).clamp(min=1e-30)
        change = change - along[:, None] * before
    length = change.norm(dim=1)
    return length if ids is None else torch.zeros(rows).double().index_copy_(0, ids, length)


def _told(scene: Scene, bias: bool) -> Trial:
    seen = scene.training
    assert seen is not None
    inside, outside = [], []
    for name, read in _tables(seen, bias).items():
        own, nobody = map(torch.from_numpy, seen.read.known(read, seen.others))
        change = seen.change(name) if bias else _moved(seen, name, len(own))
        assert change is not None
        inside.append(change[own])
        outside.append(change[nobody])
    return Trial.of(torch.cat(inside), torch.cat(outside))


def _bare(scene: Scene) -> Scene:
    return scene.bare(exchange="gradients", local_steps=1)


def _absent(scene: Scene, bias: bool, what: str) -> str:
    return "" if _tables(scene.training, bias) else f"{what} leaves a site"


ATTACKS = (
    Attack(
        "words from word tables",
        "an update of a table with a row per word",
        'frozen tables: no train_words or hashed_words; train = "encoder"; noise ([privacy])',
        lambda scene: _absent(scene, False, "no table with a row per word"),
        lambda scene: _told(scene, False),
        lambda scene: _told(_bare(scene), False),
    ),
    Attack(
        "masked words from the output bias",
        "an update of a language model's output bias",
        'a frozen output bias: train = "encoder", "top" or "lora"',
        lambda scene: _absent(scene, True, "no output bias with a number per word"),
        lambda scene: _told(scene, True),
        lambda scene: _told(_bare(scene), True),
    ),
)
