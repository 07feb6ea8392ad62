"""Models that find mentions, in the Python API."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from every_kind import DOCUMENTS, WORDS, make
from typer.testing import CliRunner

import fednotes as fn
from fednotes.cli.app import app
from fednotes.core import plugins
from fednotes.core.errors import ConfigError, DataError, ModelError
from fednotes.core.types import Document, Span
from fednotes.data.formats import jsonl, read
from fednotes.jobs.predict import predict
from fednotes.jobs.saved_models import NoteSource, PredictionOutput
from fednotes.taggers.saving import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("served")
    save_model(make("tagger", place), place / "model")
    return place / "model"


@pytest.fixture
def model(folder: Path) -> fn.MentionModel:
    loaded = fn.load(str(folder))
    assert isinstance(loaded, fn.MentionModel)
    return loaded


def texts(number: int) -> list[str]:
    """Return texts of different lengths."""
    return [" ".join((WORDS * 9)[: 1 + 7 * n % 50]) for n in range(number)]


def test_importing_the_package_loads_no_other_module() -> None:
    """Modules are loaded when a name is first used. Applications add functions."""
    code = (
        "import sys, fednotes as fn; "
        "large = {'torch', 'numpy', 'pydantic'}; "
        "print(sorted({m.split('.')[0] for m in sys.modules} & large), "
        "[m for m in sys.modules if m.startswith('fednotes.')], "
        "sorted({n for n in dir(fn) if n[0] != '_'} - {*fn.__all__}))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert ended.stdout == f"[] [] {sorted(plugins.list_entries('api'))}\n"
    assert all(callable(getattr(fn, name)) for name in dir(fn) if name[0] != "_")
    assert not hasattr(fn, "simulat")


def test_a_model_finds_the_same_spans_as_the_command(
    model: fn.MentionModel, folder: Path, tmp_path: Path
) -> None:
    """In texts, documents, lists, and streams of any batch; confidences are equal."""
    notes = tmp_path / "in.jsonl"
    out = tmp_path / "out.jsonl"
    jsonl.write([Document(str(n), text) for n, text in enumerate(texts(9), 1)], notes)
    predict(folder, NoteSource(str(notes)), PredictionOutput(out))
    expected = list(read(out, "jsonl", "refuse"))

    annotated = model(texts(9))
    assert annotated == expected
    assert any(document.spans for document in annotated)
    assert annotated == [*model.stream(iter(texts(9)), batch=4)]
    assert model(expected[3]) == expected[3]
    assert [model(text).spans for text in texts(9)] == [d.spans for d in expected]
    confidences = [span.confidence for d in annotated for span in d.spans]
    span_confidences = [span.confidence for d in expected for span in d.spans]
    assert span_confidences == pytest.approx(confidences, abs=1e-6)


def test_a_stream_reads_one_batch_at_a_time(model: fn.MentionModel) -> None:
    yielded = 0

    def source() -> Iterator[str]:
        nonlocal yielded
        for text in texts(50):
            yielded += 1
            yield text

    stream = model.stream(source(), batch=8)
    assert yielded == 0
    assert next(stream).text == texts(1)[0]
    assert yielded == 8
    assert [document.text for document in stream] == texts(50)[1:]


def test_a_threshold_leaves_out_spans_of_a_lower_confidence(
    model: fn.MentionModel, folder: Path
) -> None:
    def confidences(threshold: float) -> list[float]:
        documents = model(texts(9), threshold=threshold)
        return sorted(s.confidence or 0 for d in documents for s in d.spans)

    every = confidences(0.0)
    middle = every[len(every) // 2]
    remaining = confidences(middle)
    assert remaining == [confidence for confidence in every if confidence >= middle]
    assert 0 < len(remaining) < len(every)

    text = max(texts(9), key=len)
    command = ["predict", str(folder), "--text", text, "--threshold", str(middle)]
    spans = json.loads(CliRunner().invoke(app, command).stdout)["spans"]
    assert [(span["start"], span["end"]) for span in spans] == [
        (span.start, span.end) for span in model(text, threshold=middle).spans
    ]
    for impossible in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="threshold"):
            model("pain", threshold=impossible)


def test_a_predicted_span_is_explained_by_its_confidence(
    model: fn.MentionModel,
) -> None:
    assert model.types == ("ADR", "Drug")
    assert "marginal" in model.confidence
    assert "not calibrated" in model.confidence
    document = model(DOCUMENTS[2])
    assert document.spans
    for span in document.spans:
        explained = model.explain(document, span)
        assert explained[span.label] == pytest.approx(span.confidence)
        assert explained == model.explain(document.text, (span.start, span.end))


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "\x00",
        "\n\n",
        "🙂 pain 👩‍👩‍👧",
        "e\u0301 pain",
        "pain\r\ntook",
        "a" * 5000,
    ],
)
def test_spans_stay_within_any_text(model: fn.MentionModel, text: str) -> None:
    document = model(text)
    assert document.text == text
    assert all(0 <= span.start < span.end <= len(text) for span in document.spans)


def test_a_value_that_is_not_text_is_refused(
    model: fn.MentionModel, tmp_path: Path
) -> None:
    assert model([]) == []
    with pytest.raises(DataError, match="not int"):
        model([3])  # type: ignore[list-item]
    for wrong in (None, 3, b"pain", {"text": "pain"}):
        with pytest.raises(DataError, match=f"not {type(wrong).__name__}"):
            model(wrong)  # type: ignore[call-overload]
    with pytest.raises(DataError, match=r"a text has half a character .* at index 5"):
        model("pain \ud83d")
    with pytest.raises(ConfigError, match="several texts"):
        model.stream("pain")
    with pytest.raises(ConfigError, match="batch = 0"):
        model.stream(["pain"], batch=0)
    with pytest.raises(ModelError, match="no model here"):
        fn.load(tmp_path)


def test_json_lines_hold_confidences(tmp_path: Path) -> None:
    """A confidence plays no part in equality; a wrong one is refused by its line."""
    spans = (Span(0, 4, "ADR", confidence=0.25), Span(5, 6, "ADR"))
    jsonl.write([Document("1", "pain .", spans)], tmp_path / "a.jsonl")
    (document,) = read(tmp_path / "a.jsonl", "jsonl", "refuse")
    assert [span.confidence for span in document.spans] == [0.25, None]
    assert Span(0, 4, "ADR", confidence=0.25) == Span(0, 4, "ADR") < Span(5, 6, "ADR")
    assert len({Span(0, 4, "ADR", confidence=0.25), Span(0, 4, "ADR")}) == 1
    record = json.loads((tmp_path / "a.jsonl").read_text())
    for wrong in ("high", 2, -0.1, True):
        record["spans"][0]["confidence"] = wrong
        (tmp_path / "b.jsonl").write_text(json.dumps(record) + "\n")
        with pytest.raises(DataError, match=r"b.jsonl:1: .*confidence"):
            read(tmp_path / "b.jsonl", "jsonl", "refuse")
