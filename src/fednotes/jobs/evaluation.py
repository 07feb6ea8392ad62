"""Scores of a saved model, and what of the data was not scored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError, nearest


@dataclass(frozen=True)
class Evaluation:
    """Scores of mentions, and what was not scored.

    unknown: labels of the documents that the model lacks. silent: types of the model
    that the documents do not annotate. left: types that they do, but that were not
    asked for. skipped: what of the documents could not be used.
    """

    scores: dict[str, Any]
    unknown: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    skipped: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The scores, and what was not scored, for JSON."""
        rest = {
            "unknown": self.unknown,
            "not_annotated": self.silent,
            "not_asked": self.left,
        }
        return {**self.scores, "not_scored": {k: list(v) for k, v in rest.items()}}

    def told(self) -> Iterator[str]:
        """What was not scored, a line each."""
        if self.unknown:
            names = ", ".join(self.unknown)
            yield f"the model has no {names}: left out (--map OLD=NEW)"
        if self.silent:
            names = ", ".join(self.silent)
            yield f"not annotated here, so not scored: {names} (--types scores them all the same)"
        if self.skipped:
            yield f"left out of the documents: {self.skipped}"


def require_mapping(
    label_map: Mapping[str, str] | None,
    found: Sequence[str],
    known: Sequence[str],
    path: Path | str,
) -> Mapping[str, str]:
    """The mapping, {} if there is none. Raises ConfigError for what is no mapping, a
    label that is not there, or that becomes none of the model's."""
    if not isinstance(label_map, Mapping | None):
        raise ConfigError(
            f"label_map: expected a table of labels and new names, not {type(label_map).__name__}"
        )
    for old, new in (label_map or {}).items():
        if old not in found:
            near = nearest(old, found, "")
            raise ConfigError(
                f"--map {old}={new}: {path} has no label {old!r}, it has "
                f"{', '.join(found) or 'none'}{near and f'; {near}'}"
            )
        if new and new not in known:
            raise ConfigError(
                f"--map {old}={new}: the model has no {new!r}; {nearest(new, known)}"
            )
    return label_map or {}
