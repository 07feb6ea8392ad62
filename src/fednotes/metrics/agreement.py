"""Agreement between two annotations of the same documents."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from fednotes.core.types import Document
from fednotes.data.tags import keep_outermost
from fednotes.metrics.spans import SpanCounts, compute_token_kappa


def measure_agreement(
    one: Iterable[Document], other: Iterable[Document]
) -> dict[str, Any]:
    """Measure the agreement of two annotations, on documents with equal id and text.

    Overlapping mentions are flattened to the outermost ones.

    Returns:
        "documents", "gold", "predicted" and "tokens": the numbers of common documents,
        of mentions in each annotation, and of tokens. "apart": the number of ids that
        are in only one annotation or have different texts. "strict" and "relaxed" (any
        overlap): F1 of mentions over all types; "strict_by_type": by type. "kappa":
        Cohen's kappa of the tokens' types, or None.
    """
    documents = list(one)
    others = {document.id: document for document in other}
    in_both = [
        document
        for document in documents
        if document.id in others and others[document.id].text == document.text
    ]
    ids = {document.id for document in documents} | others.keys()
    gold = _flatten_all(in_both)
    predicted = _flatten_all([others[document.id] for document in in_both])
    counts = SpanCounts.of(gold, predicted)
    tokens, kappa = compute_token_kappa(gold, predicted)
    return {
        "documents": len(in_both),
        "apart": len(ids) - len(in_both),
        "gold": counts.total.gold,
        "predicted": counts.total.predicted,
        "tokens": tokens,
        "strict": counts.total.score("strict")["f1"],
        "relaxed": counts.total.score("relaxed")["f1"],
        "kappa": kappa,
        "strict_by_type": {
            label: of_type.score("strict")["f1"]
            for label, of_type in counts.by_type.items()
        },
    }


def _flatten_all(documents: Sequence[Document]) -> list[Document]:
    """Return documents with only their outermost mentions."""
    return [
        replace(document, spans=keep_outermost(document.spans))
        for document in documents
    ]
