"""Read annotated documents, and prepare them for scoring a model of mentions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from fednotes.core.errors import (
    DataError,
    LabelError,
    ParameterError,
    suggest_name,
)
from fednotes.core.types import Document, TagSet
from fednotes.data import formats
from fednotes.data.encodings import AUTO
from fednotes.data.formats.problems import OnError
from fednotes.data.tags import flatten_for, list_types, relabel
from fednotes.jobs.evaluation import check_label_map
from fednotes.jobs.input_readers import requiring_annotations


class AnnotatedDocuments(NamedTuple):
    """Documents with their annotations as read.

    Attributes:
        documents: The documents.
        name: How messages refer to the documents.
        skipped: Description of the unusable data.
    """

    documents: tuple[Document, ...]
    name: str
    skipped: str


class GoldDocuments(NamedTuple):
    """Documents with the annotations against which a model is scored.

    Attributes:
        documents: The documents, with flattened spans of the model's types.
        scored: The types that can be scored.
        labels: All labels of the documents, with their new names.
    """

    documents: tuple[Document, ...]
    scored: tuple[str, ...]
    labels: tuple[str, ...]


def read_annotated(
    source: str | Path | Sequence[Document],
    format: str | None = None,
    on_error: OnError = "refuse",
    encoding: str = AUTO,
) -> AnnotatedDocuments:
    """Return annotated documents.

    Args:
        source: The documents, or a file or folder of them.
        format: Format of the files; recognised if it is None.
        on_error: "skip" leaves out what cannot be used.
        encoding: Encoding of files without a byte-order mark that are not UTF-8.

    Raises:
        DataError: A file cannot be read, or an item is not a document.
    """
    if isinstance(source, str | Path):
        with requiring_annotations(encoding):
            documents, problems = formats.examine(source, format, encoding)
        problems.raise_if_refused(on_error, documents)
        return AnnotatedDocuments(documents, str(source), str(problems))

    documents = tuple(source) if isinstance(source, Iterable) else (source,)
    for document in documents:
        if not isinstance(document, Document):
            raise DataError(
                f"expected annotated Documents, not {type(document).__name__}; `read` "
                "returns them"
            )
    return AnnotatedDocuments(documents, "the corpus", "")


def prepare_gold(
    annotated: AnnotatedDocuments,
    tagset: TagSet,
    label_map: Mapping[str, str] | None = None,
    types: Sequence[str] = (),
) -> GoldDocuments:
    """Return documents with the annotations against which a model is scored.

    Only types that the documents annotate are scored, because the absence of another
    type means nothing.

    Args:
        annotated: The documents.
        tagset: The tag set of the model.
        label_map: New names of the documents' labels. Unknown labels are not scored.
        types: The types to score, annotated or not; by default the types of the model
            that the documents annotate.

    Raises:
        DataError: The documents annotate none of the model's types.
        ConfigError: A label to map or a type does not exist.
    """
    model_types = tagset.types
    original_labels = list_types(annotated.documents)
    label_map = check_label_map(label_map, original_labels, model_types, annotated.name)
    documents = relabel(annotated.documents, label_map, None)
    labels = list_types(documents)
    _require_known_types(types, model_types)
    candidates = types or labels
    scored = tuple(label for label in model_types if label in candidates)
    if not scored:
        raise LabelError(
            f"{annotated.name} annotates {', '.join(labels) or 'nothing'}, but the "
            f"model knows {', '.join(model_types)}: rename labels with `label_map`"
        )
    of_known_types = relabel(documents, {}, model_types)
    gold = []
    for document in of_known_types:
        spans, _ = flatten_for(tagset, document.spans)
        gold.append(replace(document, spans=spans))
    return GoldDocuments(tuple(gold), scored, labels)


def _require_known_types(types: Sequence[str], model_types: Sequence[str]) -> None:
    """Raise ParameterError unless a model knows all types that are to be scored."""
    for label in types:
        if label not in model_types:
            raise ParameterError(
                f"`types`: the model has no {label!r}: "
                f"{suggest_name(label, model_types)}"
            )
