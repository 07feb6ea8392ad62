"""A saved model in the formats of other programs predicts the same mentions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_classifiers import build, loud, notes
from tiny_models import save_encoder
from tiny_taggers import MODEL

from fednotes.apps.serving.exports import export
from fednotes.core.errors import FednotesError
from fednotes.core.types import Document, Span, TagSet
from fednotes.data.text import split_sentences
from fednotes.taggers.saving import build_model, load_model, save_model

transformers = pytest.importorskip("transformers")
TAGS = TagSet(("ADR", "Drug"))


def piped(
    folder: Path, documents: tuple[Document, ...], **options: Any
) -> list[tuple[Span, ...]]:
    """The spans that transformers' pipeline finds, sentence by sentence."""
    pipe = transformers.pipeline("token-classification", str(folder), **options)
    span_lists = []
    for document in documents:
        spans = []
        for start, end in split_sentences(document):
            for each in pipe(document.text[start:end]):
                name = each["entity_group"]
                spans.append(Span(start + each["start"], start + each["end"], name))
        span_lists.append(tuple(spans))
    return span_lists


@pytest.mark.parametrize("scheme", ["BIO", "BIOES", "IO"])
def test_the_exported_pipeline_finds_the_mentions_of_predict(
    scheme: Any, tmp_path: Path
) -> None:
    """Words of one sub-word and of several; "first" is how the model was trained."""
    bert = save_encoder(
        tmp_path / "bert", "BertForMaskedLM", max_position_embeddings=40
    )
    save_model(
        loud(build(bert, TagSet(TAGS.types, scheme), window=30)), tmp_path / "model"
    )
    export(tmp_path / "model", "hf", tmp_path / "out")
    documents = notes(12)
    expected = load_model(tmp_path / "model").predict(documents)
    assert sum(len(document.spans) for document in expected) > 20
    span_lists = piped(tmp_path / "out", documents, aggregation_strategy="first")
    assert span_lists == [document.spans for document in expected]
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 30


def test_a_huge_card_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A file with holes can have any size in an archive of a few kilobytes."""
    bert = save_encoder(tmp_path / "bert", "BertForMaskedLM")
    save_model(build(bert, TAGS), tmp_path / "model")
    with open(tmp_path / "model" / "README.md", "wb") as card:
        card.truncate(2**40)
    with pytest.raises(FednotesError, match=r"README\.md: over 67,108,864 bytes"):
        export(tmp_path / "model", "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_unsupported_kind_of_model_is_refused_by_name(tmp_path: Path) -> None:
    save_model(build_model(MODEL, TAGS, 1), tmp_path / "model")
    with pytest.raises(FednotesError, match="fednotes export onnx"):
        export(tmp_path / "model", "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
