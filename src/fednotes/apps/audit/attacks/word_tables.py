"""Recover words from trained word tables, and masked words from an output bias.

Melis, Song, De Cristofaro and Shmatikov 2019, "Exploiting Unintended Feature Leakage in
Collaborative Learning", section 4.1: a row of an embedding has a nonzero gradient only
if its word was read, so the rows that change are the words of the mini-batch.

    score of word v = |ΔE_v|    ΔE_v: how row v moved; after an optimizer step, without
                                the part along E_v, which weight decay causes

Zhao, Mopuri and Bilen 2020, "iDLG: Improved Deep Leakage from Gradients", infer labels
from the last layer in a similar way. With p_v the predicted probability of v at
each masked position:

    ∂L/∂b_v = Σ p_v − [v is the masked word]
    score of word v = −∂L/∂b_v

The gradient is negative only for masked words, unless the model overestimates how often
one of them occurs.

The word of a row is public, because the vocabulary and the hash are. Decoys are words
that no site read, so anything that a sum over all sites reveals counts as revealed.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fednotes.apps.audit.attack import Attack, NotApplicable, Trial
from fednotes.apps.audit.listening import Observation, find_present_and_absent
from fednotes.apps.audit.scene import Scene
from fednotes.core.word_tables import find_word_tables
from fednotes.training.word_rows import IDS

TINY = 1e-30  # keeps a division by the length of a zero row finite


def rank_words(scene: Scene, *, bias: bool) -> Trial:
    """Rank words by how far their rows moved in an update.

    Args:
        scene: The job. The control sends the gradient of one step.
        bias: Whether to attack output biases, which have a number per word, instead of
            word tables.

    Raises:
        NotApplicable: No such tensor leaves a site.
    """
    if scene.is_control:
        scene = scene.make_one_step()
    # The first update with the most tensors, because an initial warm-up of the head has
    # fewer.
    observation = max(
        scene.list_observed_trainings(),
        key=lambda seen: len(seen.tensors),
        default=None,
    )
    tables = {} if observation is None else _find_tables(observation, bias=bias)
    if observation is None or not tables:
        kind = "output bias with a number" if bias else "table with a row"
        raise NotApplicable(f"no {kind} per word leaves a site")

    present: list[Tensor] = []
    absent: list[Tensor] = []
    for name, table in tables.items():
        is_present, is_absent = find_present_and_absent(table, observation.records)
        scores = _measure_movement(observation, name, rows=len(is_present))
        present.append(scores[torch.from_numpy(is_present)])
        absent.append(scores[torch.from_numpy(is_absent)])
    return Trial.from_scores(torch.cat(present), torch.cat(absent))


def _find_tables(seen: Observation, *, bias: bool) -> dict[str, str]:
    """Return tensors with a row or number per word: name → table in the records."""
    tables = {}
    for name in find_word_tables(seen.tensors):
        tensor = seen.tensors[name]
        if (tensor.dim() == 1) != bias:
            continue
        # Rows sent separately do not show the size of their table, so only the name
        # counts.
        rows = 0 if name + IDS in seen.sent_to_site else len(tensor)
        unnamed = "masked" if bias else ""
        for table, counts in seen.records[0].row_counts.items():
            if table == name or (table == unnamed and len(counts) == rows):
                tables[name] = table
    return tables


def _measure_movement(seen: Observation, name: str, *, rows: int) -> Tensor:
    """Return (rows,) how far each row moved; for a bias, how far it rose."""
    step = seen.compute_descent(name)
    if step is None:  # cannot happen: `_find_tables` lists only tensors that were sent
        raise KeyError(name)
    if step.dim() == 1:
        return step

    ids = seen.sent_to_site.get(name + IDS)
    if ids is None and seen.task == "train":
        before = seen.sent_to_site[name].double()
        along = (step * before).sum(1) / before.square().sum(1).clamp(min=TINY)
        step = step - along[:, None] * before
    length: Tensor = step.norm(dim=1)
    if ids is None:
        return length
    return torch.zeros(rows).double().index_copy_(0, ids, length)


ATTACKS = (
    Attack(
        "words from word tables",
        sees="an update of a table with a row per word",
        closes=(
            'frozen tables: no train_words or hashed tables; train = "encoder"; '
            "noise ([privacy])"
        ),
        trial=partial(rank_words, bias=False),
    ),
    Attack(
        "masked words from the output bias",
        sees="an update of a language model's output bias",
        closes='a frozen output bias: train = "encoder", "top" or "lora"',
        trial=partial(rank_words, bias=True),
    ),
)
