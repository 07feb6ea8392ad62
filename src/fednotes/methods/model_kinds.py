"""The error of a method that does not train a kind of model."""

from __future__ import annotations

from fednotes.core.errors import ConfigError, nearest
from fednotes.methods import built_in_names, find
from fednotes.taggers.saving import kinds


def unsupported_kind(method: str, kind: object) -> ConfigError:
    """Return the error of a method that does not train a kind of model.

    It names the kinds that the method trains, and the built-in methods that train this
    kind.

    Args:
        method: The name of the method.
        kind: The value of `kind` in the [model] table.
    """
    known = kinds()
    if kind not in known:
        return ConfigError(f"unknown kind {kind!r}; {nearest(kind, known)}")
    usable = " or ".join(f'"{name}"' for name in find(method).list_models() or known)
    message = f'method "{method}" does not support model kind "{kind}"; use {usable}'
    others = [name for name in built_in_names() if _trains(name, str(kind))]
    if others:
        message += f", or a method that trains this kind: {' or '.join(others)}"
    return ConfigError(message)


def _trains(method: str, kind: str) -> bool:
    """Return whether a method trains a kind of tagger, whatever layers it has."""
    trainer = find(method)
    models = trainer.list_models()
    return not trainer.reads_layers and (models is None or kind in models)
