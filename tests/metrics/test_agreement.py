"""Agreement of two annotations, compared with nervaluate and scikit-learn."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from nervaluate import Evaluator
from sklearn.metrics import cohen_kappa_score

from fednotes.core.errors import DataError
from fednotes.core.types import Document, Span
from fednotes.data.formats import jsonl, write
from fednotes.data.formats.gathering import ReadDocument
from fednotes.data.formats.problems import Problems
from fednotes.jobs.checking import check_against
from fednotes.metrics.agreement import measure_agreement

Tags = list[list[str]]


@pytest.fixture
def words() -> Tags:
    """Return nine documents of twelve words of three letters each."""
    rng = random.Random(3)
    return [[rng.choice("abc") * 3 for _ in range(12)] for _ in range(9)]


@pytest.fixture
def annotations(words: Tags) -> tuple[Tags, Tags]:
    """Return two random annotations of the words, by type or O."""
    rng = random.Random(4)
    first, second = (
        [[rng.choice(["O", "O", "X", "Y"]) for _ in row] for row in words]
        for _ in range(2)
    )
    return first, second


def annotate(words: Tags, tags: Tags) -> list[Document]:
    """Return documents in which each tagged word is a mention."""
    documents = []
    for number, (row, labels) in enumerate(zip(words, tags, strict=True)):
        spans = tuple(
            Span(4 * i, 4 * i + 3, label)
            for i, label in enumerate(labels)
            if label != "O"
        )
        documents.append(Document(f"d{number}", " ".join(row), spans))
    return documents


def test_kappa_equals_scikit_learn(words: Tags, annotations: tuple[Tags, Tags]) -> None:
    first, second = annotations
    scores = measure_agreement(annotate(words, first), annotate(words, second))
    flat = [[tag for row in tags for tag in row] for tags in annotations]
    assert scores["kappa"] == pytest.approx(cohen_kappa_score(*flat), abs=1e-12)
    assert scores["tokens"] == 108


def test_f1_equals_nervaluate(words: Tags, annotations: tuple[Tags, Tags]) -> None:
    first, second = (annotate(words, tags) for tags in annotations)
    scores = measure_agreement(first, second)
    spans = [
        [
            [
                {"label": span.label, "start": span.start, "end": span.end}
                for span in document.spans
            ]
            for document in documents
        ]
        for documents in (first, second)
    ]
    expected = Evaluator(*spans, tags=["X", "Y"]).evaluate()["overall"]
    assert scores["strict"] == pytest.approx(expected["strict"].f1, abs=1e-12)
    assert scores["relaxed"] == pytest.approx(expected["ent_type"].f1, abs=1e-12)


def test_documents_of_only_one_side_or_with_different_text_are_not_compared() -> None:
    first = [Document("d", "x"), Document("only a", "x"), Document("changed", "a")]
    second = [Document("d", "x"), Document("only b", "x"), Document("changed", "b")]
    scores = measure_agreement(first, second)
    assert (scores["documents"], scores["apart"]) == (1, 3)


def test_annotations_without_mentions_have_no_kappa() -> None:
    documents = [Document("d", "x y"), Document("e", "")]
    scores = measure_agreement(documents, documents)
    assert (scores["kappa"], scores["tokens"]) == (None, 2)


def test_a_check_reports_the_agreement_with_another_file(
    tmp_path: Path, words: Tags, annotations: tuple[Tags, Tags]
) -> None:
    for name, tags in zip("ab", annotations, strict=True):
        write(annotate(words, tags), tmp_path / f"{name}.jsonl", "jsonl")
    checked = check_against(tmp_path / "a.jsonl", tmp_path / "b.jsonl", None, "refuse")
    scores = checked.to_dict()["agreement"]
    assert scores["documents"] == 9
    (finding,) = [each for each in checked.findings if each.code == "agreement"]
    assert f"{scores['kappa']:.3f}" in finding.message


def test_a_check_reads_the_corpus_once_and_numbers_repeated_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = tmp_path / "a.jsonl"
    corpus.write_text('{"id": "d", "text": "x"}\n{"id": "d", "text": "y"}\n')
    write([Document("d", "x"), Document("d~2", "y")], tmp_path / "b.jsonl", "jsonl")
    opened: list[Path] = []
    open_file = jsonl.stream

    def stream(path: Path, problems: Problems) -> Iterator[ReadDocument]:
        opened.append(path)
        return open_file(path, problems)

    monkeypatch.setattr(jsonl, "stream", stream)
    checked = check_against(corpus, tmp_path / "b.jsonl", "jsonl", "refuse")
    assert checked.agreement is not None
    assert checked.agreement["documents"] == 2
    assert opened == [corpus]


def test_a_check_refuses_a_path_that_cannot_be_read(tmp_path: Path) -> None:
    write([Document("z", "y")], tmp_path / "b.jsonl", "jsonl")
    with pytest.raises(DataError, match="no such file or folder"):
        check_against(tmp_path / "a.jsonl", tmp_path / "b.jsonl", None, "refuse")


def test_a_check_refuses_a_file_with_other_documents(tmp_path: Path) -> None:
    write([Document("a", "x")], tmp_path / "a.jsonl", "jsonl")
    write([Document("z", "y")], tmp_path / "c.jsonl", "jsonl")
    with pytest.raises(DataError, match="no document has the same id and text"):
        check_against(tmp_path / "a.jsonl", tmp_path / "c.jsonl", None, "refuse")
