"""Answer an unknown key of [training] with the key that does its work in the method.

Methods have different keys for the same purpose, because their training differs: FedNER
counts epochs, fine-tuning counts cycles, and distillation counts rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import NamedTuple

from fednotes.core.errors import suggest_name

# Names that are more alike than this differ by a slip of the finger.
_MISSPELT = 0.85


class _Purpose(NamedTuple):
    """What keys of several methods are for.

    Attributes:
        words: The purpose, in words.
        keys: The keys of the methods, and those of other programs.
    """

    words: str
    keys: tuple[str, ...]


_PURPOSES = (
    _Purpose(
        "the length of training",
        (
            "epochs",
            "cycles",
            "rounds",
            "classifier_cycles",
            "max_epochs",
            "max_steps",
            "num_epochs",
            "num_rounds",
            "num_train_epochs",
            "steps",
        ),
    ),
    _Purpose("the model that is kept", ("select", "keep_cycle", "keep_best")),
    _Purpose(
        "what stays at each site", ("private", "personal_epochs", "share_outputs")
    ),
    _Purpose(
        "the size of a batch",
        ("batch_size", "per_device_train_batch_size", "batchsize"),
    ),
    _Purpose("the learning rate", ("learning_rate", "lr", "alpha")),
    _Purpose("the norm at which gradients are clipped", ("clip", "max_grad_norm")),
    _Purpose("the training between two exchanges", ("local_epochs", "local_steps")),
    _Purpose("the interval of evaluations", ("evaluate_every", "eval_steps")),
)


def hint_training_key(key: str, known: Iterable[str], method: str) -> str:
    """Return which key a user may have meant by an unknown key of [training].

    Args:
        key: The unknown key.
        known: The keys that the method has.
        method: Name of the method.
    """
    names = sorted(known)
    if get_close_matches(key, names, n=1, cutoff=_MISSPELT):
        return suggest_name(key, names)
    for purpose in _PURPOSES:
        if not get_close_matches(key, purpose.keys, n=1, cutoff=_MISSPELT):
            continue
        answers = [repr(each) for each in purpose.keys if each in names]
        if answers:
            return f'{purpose.words} is {" or ".join(answers)} with method "{method}"'
    return suggest_name(key, names)
