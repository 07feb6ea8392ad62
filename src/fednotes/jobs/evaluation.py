"""The scores of a saved model, and what could not be scored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fednotes.core.errors import ConfigError, ParameterError, suggest_name


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model, and what was not scored.

    Attributes:
        scores: The scores.
        unknown: Labels of the documents that the model does not know.
        not_annotated: Types of the model that the documents do not annotate.
        not_requested: Types that the documents annotate but that were not requested.
        skipped: Descriptions of the unusable data in the documents.
    """

    scores: dict[str, Any]
    unknown: tuple[str, ...] = ()
    not_annotated: tuple[str, ...] = ()
    not_requested: tuple[str, ...] = ()
    skipped: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the scores and what was not scored as JSON values."""
        not_scored = {
            "unknown": list(self.unknown),
            "not_annotated": list(self.not_annotated),
            "not_asked": list(self.not_requested),
        }
        return {**self.scores, "not_scored": not_scored}

    def notes(self) -> Iterator[str]:
        """Yield one line for each thing that was not scored."""
        if self.unknown:
            names = ", ".join(self.unknown)
            yield (
                f"left out {names}, which the model does not have (`label_map` renames "
                "labels)"
            )
        if self.not_annotated:
            names = ", ".join(self.not_annotated)
            yield (
                f"the documents do not annotate {names}: not scored (name types in "
                "`types` to score them anyway)"
            )
        if self.skipped:
            yield f"left out of the documents: {self.skipped}"


def check_label_map(
    label_map: Mapping[str, str] | None,
    labels: Sequence[str],
    model_types: Sequence[str],
    path: Path | str,
) -> Mapping[str, str]:
    """Return a mapping of labels after checking it; {} if there is none.

    Args:
        label_map: New names of labels; "" drops a label.
        labels: The labels of the documents.
        model_types: The types of the model.
        path: The documents, for messages.

    Raises:
        ConfigError: `label_map` is not a mapping, names a label that does not occur, or
            maps a label to a type that the model lacks.
    """
    if label_map is None:
        return {}
    if not isinstance(label_map, Mapping):
        raise ConfigError(
            "label_map: expected a table of labels and new names, not "
            f"{type(label_map).__name__}"
        )
    for old, new in label_map.items():
        pair = f"`label_map` {old}={new}"
        if old not in labels:
            message = f"{pair}: {path} has no label {old!r}; it has "
            message += ", ".join(labels) or "none"
            hint = suggest_name(old, labels, "")
            raise ParameterError(f"{message}: {hint}" if hint else message)
        if new and new not in model_types:
            raise ParameterError(
                f"{pair}: the model has no {new!r}: {suggest_name(new, model_types)}"
            )
    return label_map
