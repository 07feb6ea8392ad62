"""The layers of INCEpTION and WebAnno: which of them holds the mentions.

A layer is an annotation type of UIMA. One of its features, a string, is the type of a
mention. The same rule applies to all formats of these tools:

1. the layer and the feature that the user names (`choices.py`),
2. NamedEntity and its `value`, if it is in use or if no layer is,
3. the only feature of the only layer in use.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fednotes.core.errors import ConfigError, DataError

CHOICE = "LAYER/FEATURE"
_MAX_LISTED = 12
# Layers of linguistic analysis and of the tools themselves, which hold no mentions.
_OTHER_LAYERS = (
    "uima.",
    "de.tudarmstadt.ukp.clarin.webanno.",
    "de.tudarmstadt.ukp.inception.",
    "de.tudarmstadt.ukp.dkpro.core.api.coref.",
    "de.tudarmstadt.ukp.dkpro.core.api.lexmorph.",
    "de.tudarmstadt.ukp.dkpro.core.api.metadata.",
    "de.tudarmstadt.ukp.dkpro.core.api.segmentation.",
    "de.tudarmstadt.ukp.dkpro.core.api.structure.",
    "de.tudarmstadt.ukp.dkpro.core.api.syntax.",
)


class Layer(NamedTuple):
    """A layer and the feature that holds the types of its mentions.

    Attributes:
        type: The full name of the layer's annotation type.
        feature: The name of the feature.
    """

    type: str
    feature: str

    def __str__(self) -> str:
        return f"{self.type}/{self.feature}"


NAMED_ENTITIES = Layer(
    "de.tudarmstadt.ukp.dkpro.core.api.ner.type.NamedEntity", "value"
)


def can_hold_mentions(type: str) -> bool:
    """Return whether a layer may hold mentions, by its name."""
    return not type.startswith(_OTHER_LAYERS)


def choose_layer_to_write(choice: str) -> Layer:
    """Return the layer that a user names, or that of named entities.

    Raises:
        ConfigError: The choice is not a layer and a feature.
    """
    return _parse_layer(choice) if choice else NAMED_ENTITIES


def choose_layer_to_read(
    choice: str, used: Iterable[Layer], declared: Iterable[Layer], path: Path
) -> Layer:
    """Return the layer that holds the mentions of a corpus.

    Args:
        choice: The layer that the user names, perhaps without the first parts of its
            name; "" if none.
        used: The layers with annotations.
        declared: All layers that the files declare.
        path: The corpus, for messages.

    Raises:
        ConfigError: The choice is not a layer and a feature.
        DataError: The corpus does not have the chosen layer, or one must be chosen.
    """
    in_use = set(used)
    if choice:
        return _find_layer(_parse_layer(choice), in_use | set(declared), path)
    candidates = {layer for layer in in_use if can_hold_mentions(layer.type)}
    if NAMED_ENTITIES in candidates or not candidates:
        return NAMED_ENTITIES
    if len(candidates) > 1:
        raise DataError.at(
            path,
            0,
            f"it has several layers: {_join_layer_names(candidates)}; choose one after "
            "the name of the format and a colon",
        )
    return candidates.pop()


def _parse_layer(choice: str) -> Layer:
    """Return the layer and the feature that a user names.

    Raises:
        ConfigError: The choice is not a layer and a feature.
    """
    type, _, feature = choice.rpartition("/")
    if not type or not feature:
        raise ConfigError(
            f"{choice!r} is not a layer: expected a layer and its feature, such as "
            f"{NAMED_ENTITIES}"
        )
    return Layer(type, feature)


def _find_layer(wanted: Layer, known: set[Layer], path: Path) -> Layer:
    """Return the layer with a name, which may lack its first parts.

    Args:
        wanted: The layer that the user names.
        known: The layers of the corpus.
        path: The corpus, for messages.

    Raises:
        DataError: No layer, or more than one, has this name.
    """
    if wanted in known or not known:
        return wanted
    matches = [
        layer
        for layer in known
        if layer.feature == wanted.feature and layer.type.endswith(f".{wanted.type}")
    ]
    if len(matches) == 1:
        return matches[0]
    listed = _join_layer_names(
        {layer for layer in known if can_hold_mentions(layer.type)}
    )
    problem = "several layers are" if matches else "no layer is"
    raise DataError.at(
        path, 0, f"{problem} called {wanted}: choose one of {listed or 'none'}"
    )


def _join_layer_names(layers: Iterable[Layer]) -> str:
    """Return the names of layers in one line."""
    names = sorted(map(str, layers))
    return ", ".join(names[:_MAX_LISTED]) + (" …" if len(names) > _MAX_LISTED else "")
