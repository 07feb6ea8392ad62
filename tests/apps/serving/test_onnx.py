"""Exported graphs give the model's scores, and the program in docs/use.md its mentions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_classifiers import build, loud, notes
from tiny_models import save_encoder
from tiny_taggers import NO_DROPOUT, HashEncoder

from fednotes.apps.serving.exports import export
from fednotes.core.errors import FednotesError, MissingExtra, ModelError
from fednotes.core.types import Document, TagSet
from fednotes.data.text import split_sentences, tokenize
from fednotes.taggers.saving import build_model, load_model, save_model
from fednotes.taggers.tagger import Tagger

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
ROOT = Path(__file__).parents[3]
NOTES = (
    "Took metoprolol and 5mg of Nausea-Stop. No pain today, no nausea!\nE\u0301tude: µg — 🙂 ok\n",
    "metoprolol " * 40 + "pain",
    "x",
    "pneumonoultramicroscopicsilicovolcanoconiosis, no pain and no fever. Well.",
)
DOCUMENTS = tuple(Document(str(number), text) for number, text in enumerate(NOTES))
VECTORS = "\n".join(
    f"{w} {n}.5 -{n} 0.25" for n, w in enumerate("no pain pain nausea .".split())
)
SHAPES: dict[str, dict[str, Any]] = {
    "words": {
        "word_vectors": "V",
        "train_words": True,
        "characters": False,
        "lstm_units": 0,
    },
    "several": {"cnn_widths": (2, 3, 4), "char_width": 2, "hashed_words": 0},
    "stacked": {
        "word_vectors": "V",
        "lstm_layers": 2,
        "cnn_filters": 0,
        "max_tokens": 7,
    },
    "hashed": {
        "hashed_prefixes": 7,
        "hashed_suffixes": 50,
        "hashed_shapes": 20,
        "hashes": 3,
        "characters": False,
    },
    "deep": {"cnn_layers": 3, "cnn_pieces": 3, "cnn_widths": (2, 3), "lstm_units": 0},
    "residual": {"cnn_layers": 2},
    "flat": {"lstm_units": 0, "cnn_filters": 0, "char_max": 6},
}


def program() -> Any:
    """The program that the page prints."""
    page = (ROOT / "docs" / "use.md").read_text("utf-8")
    blocks = [
        b for b in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Finder" in b
    ]
    assert len(blocks) == 1
    names: dict[str, Any] = {}
    exec(compile(blocks[0], "docs/use.md", "exec"), names)
    return names["Finder"]


def by_program(
    folder: Path, documents: Any = DOCUMENTS
) -> list[list[tuple[int, int, str]]]:
    find = program()(folder)
    return [
        [
            (start + a, start + b, label)
            for start, end in split_sentences(document)
            for a, b, label in find(document.text[start:end])
        ]
        for document in documents
    ]


def predicted(
    folder: Path, documents: Any = DOCUMENTS
) -> list[list[tuple[int, int, str]]]:
    predictions = load_model(folder).predict(documents)
    return [
        [(s.start, s.end, s.label) for s in document.spans] for document in predictions
    ]


def tagger(tmp_path: Path, scheme: Any, **shape: Any) -> Tagger:
    """It finds a lot; of random weights."""
    if "word_vectors" in shape:
        (tmp_path / "vectors.txt").write_text(VECTORS)
        shape["word_vectors"] = str(tmp_path / "vectors.txt")
    config = replace(NO_DROPOUT, **shape)
    model = build_model(config, TagSet(("ADR", "Drug"), scheme), seed=4)
    assert isinstance(model, Tagger)
    with torch.no_grad():
        model.crf.project.weight.mul_(8)
        model.crf.project.bias.zero_()
    return model


@pytest.mark.parametrize("scheme", ["BIO", "BIOES", "IO"])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_exported_tagger_predicts_the_same_without_torch(
    shape: str, scheme: Any, tmp_path: Path
) -> None:
    model = tagger(tmp_path, scheme, **SHAPES[shape])
    save_model(model, tmp_path / "model")
    export(tmp_path / "model", "onnx", tmp_path / "out")
    expected = predicted(tmp_path / "model")
    assert sum(map(len, expected)) > 5
    assert by_program(tmp_path / "out") == expected
    assert np.load(tmp_path / "out" / "crf.npz").files == [
        "start",
        "transitions",
        "end",
    ]
    find, corpus = program()(tmp_path / "out"), model.prepare(DOCUMENTS, gold=False)
    for number, (a, b) in enumerate(pairwise(corpus.encoded.bounds.tolist())):
        words = [corpus.encoded.forms[i] for i in corpus.encoded.form[a:b]]
        with torch.no_grad():
            emissions = (
                model.eval()
                ._read(corpus, np.array([number]))
                .compute_emissions()[0]
                .numpy()
            )
        np.testing.assert_allclose(find.tagger(words), emissions, atol=1e-4)


@pytest.mark.slow  # torch takes seconds to trace any encoder
def test_an_exported_token_classifier_predicts_the_same_without_torch(
    tmp_path: Path,
) -> None:
    bert = save_encoder(
        tmp_path / "bert", "BertForMaskedLM", max_position_embeddings=60
    )
    save_model(loud(build(bert)), tmp_path / "model")
    export(tmp_path / "model", "onnx", tmp_path / "out")
    # a longer sentence is read in windows, which the program cuts otherwise
    short = notes(9)
    expected = predicted(tmp_path / "model", short)
    assert by_program(tmp_path / "out", short) == expected
    assert sum(map(len, expected)) > 15
    model = load_model(tmp_path / "model")
    text = " ".join(document.text for document in short)
    places = tokenize(text).tolist()
    coded = model.tokenizer(text, add_special_tokens=False)
    (before, *_, after), size = model.tokenizer("pain")["input_ids"], 58
    assert len(coded["input_ids"]) > 2 * size
    rows = []  # of each sub-word, in windows one after the other
    for at in range(0, len(coded["input_ids"]), size):
        ids = torch.tensor([[before, *coded["input_ids"][at : at + size], after]])
        with torch.no_grad():
            rows += model.library(input_ids=ids).logits[0, 1:-1].tolist()
    first = [coded.char_to_token(start) for start, _ in places]
    scores = program()(tmp_path / "out").classifier(text, places)
    np.testing.assert_allclose(scores, np.array(rows)[first], atol=1e-4)
    assert np.load(tmp_path / "out" / "crf.npz").files == [
        "start",
        "transitions",
        "end",
    ]


def test_eight_bit_scores_are_close(tmp_path: Path) -> None:
    """Tables and matrices take a quarter of the bytes. A weight changes by up to 1/126 of
    the largest weight beside it, so scores change by a few hundredths of the largest
    score, whether or not the processor has instructions that add 8-bit products."""
    shape = {**SHAPES["flat"], "hashed_words": 4000}
    save_model(tagger(tmp_path, "BIO", **shape), tmp_path / "model")
    sizes, scores = [], []
    for int8 in (False, True):
        out = tmp_path / f"out{int8}"
        export(tmp_path / "model", "onnx", out, int8=int8)
        find = program()(out)
        words = "no pain after metoprolol".split()
        scores.append(find.tagger(words))
        sizes.append((out / "model.onnx").stat().st_size)
    assert sizes[1] < sizes[0] / 2
    assert 0 < np.abs(scores[0] - scores[1]).max() < 0.05 * np.abs(scores[0]).max()


def test_models_without_a_graph_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(tagger(tmp_path, "BIO"), tmp_path / "model")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(
        FednotesError, match="already exists and is not an empty folder"
    ):
        export(tmp_path / "model", "onnx", tmp_path / "full")
    assert [file.name for file in (tmp_path / "full").iterdir()] == ["mine"]
    encoder = HashEncoder()
    monkeypatch.setattr("fednotes.taggers.tagger.load_encoder", lambda _: encoder)
    config = replace(NO_DROPOUT, contextual="hashes")
    save_model(build_model(config, TagSet(("Drug",)), seed=1), tmp_path / "reads")
    with pytest.raises(FednotesError, match="train it without contextual"):
        export(tmp_path / "reads", "onnx", tmp_path / "out")
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(MissingExtra, match=r"fednotes\[onnx\]"):
        export(tmp_path / "model", "onnx", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_onnx_runtime_sends_no_telemetry(tmp_path: Path) -> None:
    """Where the library would identify the machine and send what it does, it leaves no
    trace."""
    save_model(tagger(tmp_path, "BIO"), tmp_path / "model")
    export(tmp_path / "model", "onnx", tmp_path / "out")
    graph = str(tmp_path / "out" / "model.onnx")
    opening = f"import onnxruntime; onnxruntime.InferenceSession({graph!r})"
    files_written = {}
    for words in ("", "import fednotes; "):
        home = tmp_path / f"home{len(words)}"
        home.mkdir()
        environment = {
            "HOME": str(home),
            "PYTHONPATH": str(ROOT / "src"),
            "PATH": os.environ["PATH"],
        }
        call = [sys.executable, "-c", words + opening]
        subprocess.run(call, env=environment, check=True, timeout=120)
        files_written[words] = [path for path in home.rglob("*") if path.is_file()]
    if not files_written[""]:
        pytest.skip("this build of it has no telemetry")
    assert not files_written["import fednotes; "]


@pytest.mark.slow
def test_an_encoder_without_a_graph_is_refused_with_an_explanation(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Longformer asks for the length of its input in Python, which torch cannot trace.
    Its message is coloured for a terminal."""
    shape = {
        "max_position_embeddings": 66,
        "attention_window": [4, 4, 4],
        "pad_token_id": 0,
    }
    encoder = save_encoder(tmp_path / "longformer", "LongformerForMaskedLM", **shape)
    save_model(build(encoder), tmp_path / "model")
    capfd.readouterr()
    with pytest.raises(
        ModelError, match="cannot be exported as an ONNX graph"
    ) as raised:
        export(tmp_path / "model", "onnx", tmp_path / "out")
    assert "def forward" not in capfd.readouterr().err  # torch prints the whole graph
    message = str(raised.value)
    assert message.isprintable()
    assert "\\x1b" not in message
    assert "[96m" not in message
    assert message.endswith("train on another encoder, such as BERT or RoBERTa")
