"""Attacks on counts of patients, which reveal codes, concepts and labels.

Before a stage, sites count their patients by code, concept and label, exactly or with
noise:

    score of code c = number of patients with c

Decoys are as in `patient_updates`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from fednotes.apps.audit.attack import Attack
from fednotes.apps.audit.attacks.counts import PATIENT_COUNTS, guess_counts
from fednotes.apps.audit.attacks.patient_updates import (
    NO_SCORES,
    ItemScores,
    list_audited_site_first,
    make_population_trial,
    split_by_site,
)
from fednotes.apps.audit.scene import Scene
from fednotes.privacy.promise import COUNTS as NOISY_COUNTS


def _score_occurrences(scene: Scene) -> ItemScores:
    """Score codes, concepts and labels by their number of patients."""
    parts = [NO_SCORES]
    for seen in scene.observe():
        if seen.task not in (*PATIENT_COUNTS, NOISY_COUNTS):
            continue
        for name, counts in seen.tensors.items():
            if seen.task == NOISY_COUNTS:
                has = [
                    _mark_counted_items(site, len(counts))
                    for site in list_audited_site_first(scene)
                ]
            else:
                updates = (seen.audited_update, *seen.other_updates)
                has = [update.tensors[name].numpy() > 0 for update in updates]
            parts.append(split_by_site(counts.numpy(), has))
    return ItemScores(
        np.concatenate([part.present for part in parts]),
        np.concatenate([part.absent for part in parts]),
    )


def _mark_counted_items(site: Any, size: int) -> np.ndarray:
    """Return (size,) whether each item has a patient at a site, before noise."""
    positions = np.concatenate([[], *site.list_counted_positions()])
    return np.isin(np.arange(size), positions)


_NOISE = "noise ([privacy])"

PRESENCE_ATTACK = Attack(
    "codes and concepts from counts",
    sees="counts of a site's patients by code, concept and label",
    closes=(
        f"{_NOISE}, which is also added to counts. A secure sum hides whose they are"
    ),
    trial=partial(
        make_population_trial,
        score_items=_score_occurrences,
        reason_if_none="nothing is counted",
    ),
    data="patients",
)
EXACT_ATTACK = Attack(
    "exact counts",
    sees="counts of a site's patients by code, concept, label and prediction",
    closes=f"a secure sum; {_NOISE}, under which nothing is counted exactly",
    trial=guess_counts,
    data="patients",
)
