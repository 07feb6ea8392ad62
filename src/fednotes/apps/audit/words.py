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

from functools import partial

import torch
from torch import Tensor

from fednotes.apps.audit import Attack, Nothing, Scene, Seen, Trial, known
from fednotes.apps.deployment.rules.policy import word_tables
from fednotes.training.word_rows import IDS


def _tables(seen: Seen, bias: bool) -> dict[str, str]:
    """Tensors that travel with a row (or a number) per word: name → what of `Read` they show."""
    found = dict[str, str]()
    for name in word_tables(seen.tensors):
        rows = len(seen.tensors[name]) if name + IDS not in seen.sent else 0
        for read, counts in seen.reads[0].rows.items():
            right = read == name or (
                len(counts) == rows and read == ("masked" if bias else "")
            )
            if right and (seen.tensors[name].dim() == 1) == bias:
                found[name] = read
    return found


def _moved(seen: Seen, name: str, rows: int) -> Tensor:
    """(rows,) how far each row went, other than along itself, where weight decay takes it; of a
    bias where to."""
    change = seen.change(name)
    assert change is not None
    if change.dim() == 1:
        return change
    ids = seen.sent.get(name + IDS)
    if ids is None and seen.task == "train":
        before = seen.sent[name].double()
        along = (change * before).sum(1) / before.square().sum(1).clamp(min=1e-30)
        change = change - along[:, None] * before
    length = change.norm(dim=1)
    return (
        length
        if ids is None
        else torch.zeros(rows).double().index_copy_(0, ids, length)
    )


def _told(scene: Scene, bias: bool) -> Trial:
    of = scene.bare(exchange="gradients", local_steps=1) if scene.control else scene
    # The first answer, but for a warm-up's, which has fewer tensors.
    seen = max(of.answers, key=lambda seen: len(seen.tensors), default=None)
    if seen is None or not (tables := _tables(seen, bias)):
        kind = "output bias with a number" if bias else "table with a row"
        raise Nothing(f"no {kind} per word leaves a site")
    parts: tuple[list[Tensor], list[Tensor]] = [], []
    for name, read in tables.items():
        rows = known(read, seen.reads)
        change = _moved(seen, name, len(rows[0]))
        for part, chosen in zip(parts, rows, strict=True):
            part.append(change[torch.from_numpy(chosen)])
    return Trial.of(*map(torch.cat, parts))


ATTACKS = (
    Attack(
        "words from word tables",
        "an update of a table with a row per word",
        'frozen tables: no train_words or hashed_words; train = "encoder"; noise ([privacy])',
        partial(_told, bias=False),
    ),
    Attack(
        "masked words from the output bias",
        "an update of a language model's output bias",
        'a frozen output bias: train = "encoder", "top" or "lora"',
        partial(_told, bias=True),
    ),
)
