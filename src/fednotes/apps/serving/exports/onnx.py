"""Export a tagger or token classifier as an ONNX graph.

The export is a folder with everything that another program needs:

    model.onnx      maps one sentence (or text) to emissions (tokens, tags). Its metadata
                    entry "fednotes" is JSON with the tags, the rule that splits text into
                    tokens, and the features of a token that the graph reads
    crf.npz         scores of the CRF: start (tags,), transitions (tags, tags) [from, to]
                    and end (tags,), -inf where forbidden; all 0 for a token classifier,
                    which has no CRF
    tokenizer.json  the tokenizer of a token classifier, which also cuts texts into
                    windows; for a tagger, the table row of each word

`docs/use.md` has a program of less than 70 lines that reads such a folder.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from fednotes.core.cleaning import one_line
from fednotes.core.errors import ConfigError, ModelError, needs
from fednotes.data.tags import allowed_transitions
from fednotes.data.text import TOKEN
from fednotes.encoders.pretrained import Frame, quiet
from fednotes.encoders.reading import blank_marks
from fednotes.report.html import environment
from fednotes.taggers.layers import CHARACTERS, FIRST
from fednotes.taggers.saving import load_model
from fednotes.taggers.tagger import Tagger
from fednotes.taggers.token_classifier import TokenClassifier

FORMAT, OPSET, IR, CRF = 3, 18, 10, "crf.npz"
# ONNX orders the LSTM gates input, output, forget, cell; PyTorch orders them i, f, g, o.
GATES = (0, 3, 1, 2)
QUANTISED = ("MatMul", "Gemm", "LSTM", "Gather")


def writer(model: Path, int8: bool = False) -> Callable[[Path], None]:
    """Return a function that writes the ONNX export of a saved model to a folder.

    Args:
        model: The folder of the saved model.
        int8: Store matrices and tables in eight bits per number; activations are
            quantised at run time (dynamic quantisation).

    Raises:
        ConfigError: Models of this kind cannot be exported.
        ModelError: The model cannot be read.
        MissingExtra: onnx, onnxruntime or onnxscript is not installed.
    """
    loaded = load_model(model)
    if not isinstance(loaded, Tagger | TokenClassifier):
        raise ConfigError(
            f"{model}: of the kind {loaded.config.kind!r}, which is not exported"
        )
    if isinstance(loaded, Tagger) and loaded.encoder is not None:
        raise ConfigError(
            f"{model}: reads the features of a frozen encoder ({loaded.config.contextual}), which "
            "are not in a tagger's own graph: train it without contextual, or a token-classifier"
        )
    packages = ["onnx", "onnxruntime"]
    if isinstance(loaded, TokenClassifier):
        packages.append("onnxscript")
    for package in packages:
        with needs(package, "onnx"):
            import_module(package)

    def fill(folder: Path) -> None:
        from onnx import helper, load, save

        graph, tagset = folder / "model.onnx", loaded.tagset
        facts = {"format": FORMAT, "kind": loaded.config.kind, "token": TOKEN.pattern}
        facts |= {"tags": tagset.tags, "scheme": tagset.scheme}
        if isinstance(loaded, Tagger):
            graph.write_bytes(tagger_graph(loaded).SerializeToString())
            facts |= _beside_tagger(loaded, folder)
        else:
            facts |= _classifier(loaded, graph)
        if int8:
            _quantise(graph)
        made = load(graph)
        helper.set_model_props(made, {"fednotes": json.dumps(facts)})
        save(made, graph)

    return fill


# ---- the light tagger: `templates/tagger.onnx.txt` has its graph ---------------------


def tagger_graph(model: Tagger) -> Any:
    """Return a light tagger as an `onnx.ModelProto`.

    The graph maps the tokens of one sentence to emissions (tokens, tags).
    """
    from onnx import checker, numpy_helper, parser

    config, project, parts = model.config, model.crf.project, list[str]()
    widths = model.cnn.widths if config.cnn_filters else ()
    layers = config.lstm_layers if config.lstm_units else 0
    weights = {"project_weight": project.weight, "project_bias": project.bias}
    if model.vectors is not None:
        parts.append("known")
        weights["known_table"] = (
            model.words.weight if config.train_words else model.vectors.table
        )
    if config.hashed_words:
        parts.append("bucket")
        weights["bucket_table"] = model.words.hashed
    if config.characters:
        parts.append("spelt")
        weights["letters_table"] = model.characters.embedding.detach().clone()
        # Row 0 pads the characters of a word.
        weights["letters_table"][0] = 0.0
        weights |= _kernel("letters", model.characters.weight, model.characters.bias)
    for width in widths:
        both = (getattr(model.cnn, f"{name}_{width}") for name in ("weight", "bias"))
        weights |= _kernel(f"cnn_{width}", *both)
    for layer in range(layers):
        names = (f"weight_ih_l{layer}", f"weight_hh_l{layer}", f"bias_l{layer}")
        into, across, bias = (
            getattr(model.lstm, name)
            .detach()
            .unflatten(1, (4, -1))[:, GATES]
            .flatten(1, 2)
            for name in names
        )
        weights |= {f"into_{layer}": into, f"across_{layer}": across}
        weights[f"bias_{layer}"] = torch.cat([bias, torch.zeros_like(bias)], 1)
    values = {"parts": parts, "config": config, "widths": widths, "layers": layers}
    values |= {"tags": len(model.tagset.tags), "opset": OPSET, "ir": IR}
    text = (
        environment("fednotes.apps.serving")
        .get_template("tagger.onnx.txt")
        .render(values)
    )
    made = parser.parse_model(text)
    for name, value in weights.items():
        array = value.detach().cpu().numpy()
        made.graph.initializer.append(
            numpy_helper.from_array(np.ascontiguousarray(array), name)
        )
    checker.check_model(made)
    return made


def _kernel(name: str, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """Return the weight and bias of a convolution in ONNX's layout.

    Args:
        name: The prefix of the weights' names in the graph.
        weight: The filters (width, filters, dim); returned as (filters, dim, width).
        bias: The biases (filters,).
    """
    return {f"{name}_weight": weight.permute(1, 2, 0), f"{name}_bias": bias}


def _beside_tagger(model: Tagger, folder: Path) -> dict[str, Any]:
    """Write crf.npz and tokenizer.json; return the metadata on a token's features."""
    config, crf = model.config, model.crf.crf
    scores = zip(
        (crf.start, crf.transitions, crf.end),
        allowed_transitions(model.tagset),
        strict=True,
    )
    start, transitions, end = (
        np.where(may, score.detach().numpy(), -np.inf).astype(np.float32)
        for score, may in scores
    )
    np.savez(folder / CRF, start=start, transitions=transitions, end=end)
    rows = (
        {row: word for word, row in model.vectors.index.items()}
        if model.vectors
        else {}
    )
    words = {rows.get(row, f"\n{row}"): row for row in range(max(rows, default=0) + 1)}
    Tokenizer(WordLevel(words, unk_token="\n0")).save(str(folder / "tokenizer.json"))
    letters, room = (
        {c: row for row, c in enumerate(CHARACTERS, FIRST)},
        config.char_max - 2,
    )
    # The model reads the beginning and the end of a word longer than `room` characters.
    ends = (room + 1) // 2, room // 2
    facts: dict[str, Any] = {
        "hashed": max(1, config.hashed_words),
        "max_tokens": config.max_tokens,
    }
    return {**facts, "letters": letters, "ends": ends}


# ---- a token classifier: PyTorch's exporter traces the library's model ---------------


# Escape sequences that colour text on a terminal.
_STYLES = re.compile(r"\x1b\[[0-9;]*m")


def _reason(error: BaseException) -> str:
    """Return the first line of the exporter's root error, without terminal colours."""
    while error.__cause__ is not None:
        error = error.__cause__
    first_line = _STYLES.sub("", str(error)).strip().partition("\n")[0]
    return one_line(first_line or type(error).__name__, 200)


def _classifier(model: TokenClassifier, to: Path) -> dict[str, Any]:
    """Write a token classifier's graph, crf.npz and tokenizer.json; return metadata.

    Args:
        model: The token classifier.
        to: The path of the graph, which maps the inputs input_ids and attention_mask
            (sentences, length) to the output logits (sentences, length, tags).

    Raises:
        ModelError: PyTorch cannot trace the encoder.
    """
    frame = Frame.of(
        model.config.encoder, model.tokenizer, model.library, model.config.window
    )
    ids = torch.full((2, len(frame.prefix) + 2 + len(frame.suffix)), frame.pad)
    free = {0: "sentences", 1: "length"}
    names = ["input_ids", "attention_mask"]
    try:
        with _silent():
            torch.onnx.export(
                model.library.eval(),
                f=to,
                kwargs=dict(zip(names, (ids, torch.ones_like(ids)), strict=True)),
                input_names=names,
                output_names=["logits"],
                dynamic_shapes=dict.fromkeys(names, free),
                opset_version=OPSET,
                external_data=False,
                dynamo=True,
            )
    except Exception as error:
        # The exporter raises many types of exceptions for an encoder it cannot trace.
        raise ModelError(
            f"{model.config.encoder}: this encoder cannot be exported as an ONNX graph "
            f"({_reason(error)}); use the model from Python or over HTTP, or train on "
            "another encoder, such as BERT or RoBERTa"
        ) from error
    zero = np.zeros(len(model.tagset.tags), np.float32)
    np.savez(to.with_name(CRF), start=zero, transitions=zero[:, None] + zero, end=zero)
    tokenizer = Tokenizer.from_str(model.tokenizer.backend_tokenizer.to_str())
    tokenizer.enable_truncation(frame.capacity + len(frame.prefix) + len(frame.suffix))
    tokenizer.save(str(to.parent / "tokenizer.json"))
    return {
        "max_tokens": 10**9,
        "context": model.config.context,
        "blanks": blank_marks(model.tokenizer),
    }


def _quantise(graph: Path) -> None:
    """Replace a graph file by its int8 version."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with tempfile.TemporaryDirectory(dir=graph.parent) as folder, _silent():
        whole, kinds = graph.rename(Path(folder) / graph.name), list(QUANTISED)
        quantize_dynamic(
            whole,
            graph,
            op_types_to_quantize=kinds,
            weight_type=QuantType.QInt8,
            per_channel=True,
        )


@contextmanager
def _silent() -> Iterator[None]:
    """Hide the output of torch and onnxruntime during an export.

    Failures are still visible, because both raise exceptions.
    """
    logging.disable(logging.ERROR)
    try:
        with quiet(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
