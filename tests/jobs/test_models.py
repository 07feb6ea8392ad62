"""Saved models in use: the same spans as `fednotes predict`, in order, whatever comes
in."""

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


def texts(number: int) -> list[str]:
    return [" ".join((WORDS * 9)[: 1 + 7 * n % 50]) for n in range(number)]


def test_the_import_reads_nothing() -> None:
    """Neither torch nor NumPy, nor a module of ours, until a name is used; a wrong name
    is told. Applications add functions of their own."""
    code = (
        "import sys, fednotes as fn; "
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'numpy', 'pydantic'}), "
        "[m for m in sys.modules if m.startswith('fednotes.')], "
        "sorted({n for n in dir(fn) if n[0] != '_'} - {*fn.__all__}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == f"[] [] {sorted(plugins.registered('api'))}\n"
    assert all(callable(getattr(fn, name)) for name in dir(fn) if name[0] != "_")
    assert not hasattr(fn, "simulat")


def test_the_same_spans_as_the_command(folder: Path, tmp_path: Path) -> None:
    """Given as texts, documents, a list or a stream of any batch; confidences too."""
    jsonl.write(
        [Document(str(n), t) for n, t in enumerate(texts(9), 1)], tmp_path / "in.jsonl"
    )
    predict(
        folder,
        NoteSource(str(tmp_path / "in.jsonl")),
        PredictionOutput(tmp_path / "out.jsonl"),
    )
    wanted = list(read(tmp_path / "out.jsonl", "jsonl", "refuse"))
    model = fn.load(folder)
    assert isinstance(model, fn.MentionModel)
    found = model(texts(9))
    assert found == wanted
    assert any(d.spans for d in found)
    assert found == [*model.stream(iter(texts(9)), batch=4)]
    assert model(wanted[3]) == wanted[3]
    sure = [s.confidence for d in found for s in d.spans]
    again = [s.confidence for d in wanted for s in d.spans]
    assert again == pytest.approx(sure, abs=1e-6)
    assert [model(t).spans for t in texts(9)] == [d.spans for d in wanted]


def test_a_stream_is_read_as_it_is_asked(folder: Path) -> None:
    """Never more than a batch ahead, in order."""
    model, given = fn.load(folder), 0
    assert isinstance(model, fn.MentionModel)

    def source() -> Iterator[str]:
        nonlocal given
        for text in texts(50):
            given += 1
            yield text

    stream = model.stream(source(), batch=8)
    assert given == 0
    assert next(stream).text == texts(1)[0]
    assert given == 8
    assert [d.text for d in stream] == texts(50)[1:]


def test_a_threshold(folder: Path) -> None:
    model = fn.load(folder)
    assert isinstance(model, fn.MentionModel)
    sure = sorted(s.confidence or 0 for d in model(texts(9)) for s in d.spans)
    least = sure[len(sure) // 2]
    kept = [
        s.confidence or 0 for d in model(texts(9), threshold=least) for s in d.spans
    ]
    assert sorted(kept) == [c for c in sure if c >= least]
    assert 0 < len(kept) < len(sure)
    text = max(texts(9), key=len)
    command = ["predict", str(folder), "--text", text, "--threshold", str(least)]
    said = json.loads(CliRunner().invoke(app, command).stdout)["spans"]
    assert [(s["start"], s["end"]) for s in said] == [
        (s.start, s.end) for s in model(text, threshold=least).spans
    ]
    for wrong in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="threshold"):
            model("pain", threshold=wrong)


def test_explained(folder: Path) -> None:
    """What is predicted is explained by the same number."""
    model = fn.load(folder)
    assert isinstance(model, fn.MentionModel)
    assert model.types == ("ADR", "Drug")
    assert "marginal" in model.confidence
    assert "not calibrated" in model.confidence
    document = model(DOCUMENTS[2])
    for span in document.spans:
        assert model.explain(document, span)[span.label] == pytest.approx(
            span.confidence
        )
        assert model.explain(document.text, (span.start, span.end)) == model.explain(
            document, span
        )


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
def test_odd_texts(folder: Path, text: str) -> None:
    model = fn.load(folder)
    found = model(text)
    assert isinstance(found, Document)
    assert found.text == text
    assert all(0 <= s.start < s.end <= len(text) for s in found.spans)


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    model = fn.load(str(folder))
    assert isinstance(model, fn.MentionModel)
    assert model([]) == []
    with pytest.raises(DataError, match="not int"):
        model([3])  # type: ignore[list-item]
    for wrong in (None, 3, b"pain", {"text": "pain"}):
        with pytest.raises(DataError, match=f"not {type(wrong).__name__}"):
            model(wrong)  # type: ignore[call-overload]
    with pytest.raises(DataError, match="half a character at 5"):
        model("pain \ud83d")
    with pytest.raises(ConfigError, match="several texts"):
        model.stream("pain")
    with pytest.raises(ConfigError, match="batch = 0"):
        model.stream(["pain"], batch=0)
    with pytest.raises(ModelError, match="no model here"):
        fn.load(tmp_path)


def test_confidences_are_kept_in_jsonl(tmp_path: Path) -> None:
    """They are no part of equality; a number that is none is refused by its line."""
    spans = (Span(0, 4, "ADR", confidence=0.25), Span(5, 6, "ADR"))
    jsonl.write([Document("1", "pain .", spans)], tmp_path / "a.jsonl")
    (again,) = read(tmp_path / "a.jsonl", "jsonl", "refuse")
    assert [s.confidence for s in again.spans] == [0.25, None]
    assert Span(0, 4, "ADR", confidence=0.25) == Span(0, 4, "ADR") < Span(5, 6, "ADR")
    assert len({Span(0, 4, "ADR", confidence=0.25), Span(0, 4, "ADR")}) == 1
    record = json.loads((tmp_path / "a.jsonl").read_text())
    for wrong in ("high", 2, -0.1, True):
        record["spans"][0]["confidence"] = wrong
        (tmp_path / "b.jsonl").write_text(json.dumps(record) + "\n")
        with pytest.raises(DataError, match=r"b.jsonl:1: .*confidence"):
            read(tmp_path / "b.jsonl", "jsonl", "refuse")
