"""The error for a kind of model that a method does not train."""

from __future__ import annotations

from fednotes.core.errors import ConfigError, suggest_name
from fednotes.methods import find_method, list_built_in_names
from fednotes.taggers.saving import list_model_kinds


def make_unsupported_kind_error(method: str, kind: object) -> ConfigError:
    """Return the error for a kind of model that a method does not train.

    Its message names the kinds that the method trains and the built-in methods that
    train this kind.

    Args:
        method: The name of the method.
        kind: The value of `kind` in the [model] table.
    """
    known = list_model_kinds()
    if kind not in known:
        return ConfigError(f"unknown kind {kind!r}: {suggest_name(kind, known)}")
    usable = " or ".join(
        f'"{name}"' for name in find_method(method).list_models() or known
    )
    message = f'method "{method}" does not support model kind "{kind}": use {usable}'
    others = [name for name in list_built_in_names() if _can_train(name, str(kind))]
    if others:
        message += f", or a method that trains this kind: {' or '.join(others)}"
    return ConfigError(message)


def _can_train(method: str, kind: str) -> bool:
    """Return whether a method trains a kind of tagger, regardless of its layers."""
    trainer = find_method(method)
    models = trainer.list_models()
    return not trainer.reads_layers and (models is None or kind in models)
