"""Which entity types an evaluation of a model scores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fednotes.api import evaluate
from fednotes.core.types import Document, Span, TagSet
from fednotes.jobs.models import MentionModel


class Finder:
    """A model that finds the first two words of every note, as two types."""

    tagset = TagSet(("ADE", "Drug"))

    def predict(self, documents: Sequence[Document]) -> tuple[Document, ...]:
        spans = (Span(0, 4, "Drug"), Span(5, 9, "ADE"))
        return tuple(replace(document, spans=spans) for document in documents)


@pytest.mark.parametrize(
    ("types", "precision", "not_annotated", "not_requested"),
    [
        ((), 1.0, ("ADE",), ()),
        (("ADE", "Drug"), 0.5, (), ()),
        (("ADE",), 0.0, (), ("Drug",)),
    ],
)
def test_types_that_are_not_annotated_are_scored_only_on_request(
    tmp_path: Path,
    types: tuple[str, ...],
    precision: float,
    not_annotated: tuple[str, ...],
    not_requested: tuple[str, ...],
) -> None:
    """Ten notes have a drug, which is found, and no annotated side effect."""
    path = tmp_path / "gold.jsonl"
    row = json.dumps({"text": "drug rash", "spans": [[0, 4, "Drug"]]}) + "\n"
    path.write_text(row * 10)
    evaluation = evaluate(MentionModel(Finder()), path, types=types)
    assert evaluation.scores["strict"]["precision"] == precision
    assert (evaluation.not_annotated, evaluation.not_requested) == (
        not_annotated,
        not_requested,
    )
    assert set(evaluation.scores["by_type"]) <= set(types or ("Drug",))
