"""Memorised names and canaries: which value of a secret the model prefers.

Carlini, Liu, Erlingsson, Kos and Song 2019, "The Secret Sharer: Evaluating and Testing
Unintended Memorization in Neural Networks". A secret is planted into the training data,
in one note or in ten notes. The adversary knows the text around it and ranks it among
other possible values R:

    exposure = log₂ |R| − log₂ rank        R is a sample: the secret and 99 other values

A canary is a random number; a name is guessed in the same way.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from fednotes.apps.audit.attack import Attack, NotApplicable, Trial
from fednotes.apps.audit.scene import Scene
from fednotes.apps.audit.shadow.models import train_shadow_models
from fednotes.apps.audit.shadow.secrets import TIMES_PLANTED, SecretKind

MIN_CONTROL = 0.5
NAMES: dict[SecretKind, str] = {"name": "memorised names", "number": "canaries"}


def rank_planted_secrets(scene: Scene, *, kind: SecretKind, times: int) -> Trial:
    """Rank secrets that were planted into notes among other values, by shadow models.

    Args:
        scene: The job.
        kind: The kind of the secrets.
        times: Number of notes into which each secret was planted.

    Raises:
        NotApplicable: The secret is a number, and the model predicts no words.
    """
    if kind == "number" and scene.job.data != "notes":
        raise NotApplicable("the model finds mentions and predicts no words")
    scores = train_shadow_models(scene)
    return make_ranking_trial(
        np.stack(scores.secrets[kind, times]), models=scores.num_models
    )


def make_ranking_trial(scores: np.ndarray, *, models: int) -> Trial:
    """Return the trial of an adversary who ranks the possible values of a secret.

    Args:
        scores: (secrets, guesses) log-odds, the true value first. Tied values get their
            mean rank.
        models: Number of models, for the details.
    """
    higher = (scores[:, None, :] > scores[:, :, None]).sum(2)
    ties = (scores[:, None, :] == scores[:, :, None]).sum(2) - 1
    ranks = 1 + higher + ties / 2  # (secrets, guesses)
    exposure = np.log2(scores.shape[1]) - np.log2(ranks[:, 0])
    return Trial.from_scores(
        -ranks[:, 0], -ranks[:, 1:], models=models, exposure=float(exposure.mean())
    )


def _make_attack(kind: SecretKind, times: int) -> Attack:
    """Return the attack on secrets that were planted into `times` notes each."""
    often = "once" if times == 1 else f"{times} times"
    return Attack(
        f"{NAMES[kind]}, planted {often}",
        sees=f"the trained model with all its layers, and a note without its {kind}",
        closes=(
            "differential privacy ([privacy]); less training on more notes weakens it; "
            "names can be removed from the notes first"
        ),
        trial=partial(rank_planted_secrets, kind=kind, times=times),
        min_control=MIN_CONTROL,
    )


ATTACKS = tuple(_make_attack(kind, times) for kind in NAMES for times in TIMES_PLANTED)
