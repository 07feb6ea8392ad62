"""Identification, by name, of tensors with a row per word.

A row of such a tensor changes only if its word occurs, so an update reveals which words
a site's notes contain.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

_WORD_TABLES = (
    # embeddings
    "*embed*",
    "wte.*",
    "*.wte.*",
    "words.*",
    "*.words.*",
    "shared.weight",
    "*.shared.weight",
    # output layers over the vocabulary
    "*lm_head.weight",
    "*lm_head.bias",
    "*lm_head.decoder.*",
    "*predictions.decoder.*",
    "*predictions.bias",
    "*vocab_projector.*",
    "*final_logits_bias",
)
# Names like those of word tables, of tensors without a row per word.
_NO_WORD_TABLES = (
    "*position_embeddings*",
    "*embed_positions*",
    "*token_type_embeddings*",
    "*layernorm*",
    "*layer_norm*",
    "characters.*",
    "*.characters.*",
    # scores words for texts about entity types
    "classifier.words.*",
)


def find_word_tables(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the tensors that have a row per word, sorted.

    Every embedding counts unless its name says that it belongs to positions, segments,
    characters or a layer norm. So do output layers over the vocabulary and their bias.
    The layer of a type scorer that reads words has no table of them.
    """
    return tuple(sorted(name for name in names if _is_word_table(name.lower())))


def _is_word_table(name: str) -> bool:
    """Return whether a name, in lower case, is that of a tensor with a row per word."""
    if any(fnmatchcase(name, pattern) for pattern in _NO_WORD_TABLES):
        return False
    return any(fnmatchcase(name, pattern) for pattern in _WORD_TABLES)
