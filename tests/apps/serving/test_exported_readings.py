"""Exported token classifiers of every family of tokenizers find what `predict` finds."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_classifiers import build, loud
from tiny_tokenizers import FAMILIES, TEXTS, save_family

from fednotes.apps.serving.exports import export
from fednotes.core.types import Document, TagSet
from fednotes.data.text import split_sentences
from fednotes.taggers.saving import load_model, save_model

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[3]
Spans = list[tuple[int, int, str]]


def documents() -> tuple[Document, ...]:
    """Notes with brackets, symbols and several sentences."""
    parts = [
        *TEXTS,
        "(pain)... no [nausea]; (50mg)",
        "fever,cough 5.5 mg/dl 37°C",
        "no pain",
    ]
    return tuple(Document(str(n), text) for n, text in enumerate(parts))


def exported(tmp_path: Path, family: str, **settings: Any) -> Path:
    """A classifier on this family's encoder that finds a lot, saved; and its export
    beside it."""
    encoder = save_family(tmp_path / "encoder", family)
    save_model(loud(build(encoder, **settings)), tmp_path / "model")
    export(tmp_path / "model", "hf", tmp_path / "out")
    return tmp_path / "model"


def printed_program(folder: Path) -> Callable[[str], Spans]:
    """The function of docs/use.md that puts words together."""
    page = (ROOT / "docs" / "use.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (block,) = [block for block in blocks if "def mentions" in block]
    names: dict[str, Any] = {}
    exec(re.sub(r"(?m)^  ", "", block).replace('"out/"', repr(str(folder))), names)
    find_mentions: Callable[[str], Spans] = names["mentions"]
    return find_mentions


def predicted(folder: Path, notes: tuple[Document, ...]) -> list[Spans]:
    predictions = load_model(folder).predict(notes)
    return [
        [(span.start, span.end, span.label) for span in document.spans]
        for document in predictions
    ]


@pytest.mark.parametrize("scheme", ["BIO", "IO"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_printed_program_agrees_on_every_span(
    family: str, scheme: Any, tmp_path: Path
) -> None:
    """Sentence by sentence, as the model was trained; none is long enough to be cut
    off."""
    model = exported(tmp_path, family, tags=TagSet(("ADR", "Drug"), scheme))
    expected = predicted(model, documents())
    mentions = printed_program(tmp_path / "out")
    spans = [
        [
            (start + low, start + high, label)
            for start, end in split_sentences(document)
            for low, high, label in mentions(document.text[start:end])
        ]
        for document in documents()
    ]
    assert spans == expected
    assert sum(map(len, expected)) > 5


@pytest.mark.parametrize("family", FAMILIES)
def test_whole_documents_agree(family: str, tmp_path: Path) -> None:
    """With context = "document" the text is all of it, white space around it and in it
    too."""
    model = exported(tmp_path, family, context="document")
    text = "\n\n  " + "\n\n".join(TEXTS) + "\n"
    (expected,) = predicted(model, (Document("a", text),))
    assert printed_program(tmp_path / "out")(text) == expected
    assert expected


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words:UserWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_words_of_the_pipeline_agree_if_blanks_separate_them(
    family: str, tmp_path: Path
) -> None:
    """`aggregation_strategy="first"` on words that stand between blanks. Some
    tokenizers count the blank before a word as part of its sub-word; the pipeline's
    spans then begin there."""
    model = exported(tmp_path, family)
    text = "no pain after aspirin and nausea after metoprolol daily for pain no rash no fever"
    notes = (Document("a", text, sentences=((0, len(text)),)),)
    (expected,) = predicted(model, notes)
    pipe = transformers.pipeline(
        "token-classification", str(tmp_path / "out"), aggregation_strategy="first"
    )
    word_bounds = [
        (each["end"] - len(text[each["start"] : each["end"]].lstrip()), each["end"])
        for each in pipe(text)
    ]
    marks = "▁" in load_model(model).tokenizer.tokenize(text)
    if not marks:  # the pipeline asks a mere mark of a blank for a word of its own
        assert word_bounds == [(start, end) for start, end, _ in expected]
    assert expected


@pytest.mark.slow  # torch takes seconds to trace any encoder
def test_the_graph_of_a_byte_level_model_agrees(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = exported(tmp_path, "roberta")
    export(model, "onnx", tmp_path / "graph")
    page = (ROOT / "docs" / "use.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "class Finder" in block), names)
    find = names["Finder"](tmp_path / "graph")
    spans = [
        [
            (start + low, start + high, label)
            for start, end in split_sentences(document)
            for low, high, label in find(document.text[start:end])
        ]
        for document in documents()
    ]
    assert spans == predicted(model, documents())
