"""Export a tagger or token classifier as an ONNX graph.

The export is a folder with everything that another program needs:

    model.onnx      maps one sentence (or text) to emissions (tokens, tags). Its
                    metadata entry "fednotes" is JSON with the tags, the rule that
                    splits text into tokens, and the features of a token that the graph
                    reads
    crf.npz         scores of the CRF: start (tags,), transitions (tags, tags)
                    [from, to] and end (tags,), -inf where forbidden; all 0 for a token
                    classifier, which has no CRF
    tokenizer.json  the tokenizer of a token classifier, which also cuts texts into
                    windows; for a tagger, the table row of each word

`docs/use.md` has a program of less than 100 lines that reads such a folder.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn

from fednotes.core.cleaning import clean_to_one_line
from fednotes.core.errors import ConfigError, ModelError, needs
from fednotes.data.tags import find_allowed_transitions
from fednotes.data.text import TOKEN
from fednotes.encoders.pretrained import Frame, silencing_library
from fednotes.encoders.reading import list_blank_marks
from fednotes.report.html import make_environment
from fednotes.taggers.layers import CHARACTERS, FIRST, WordCNN
from fednotes.taggers.saving import load_model
from fednotes.taggers.tagger import Tagger
from fednotes.taggers.token_classifier import TokenClassifier

FORMAT: Final = 4  # version of the metadata
OPSET: Final = 18  # version of ONNX's operators
IR_VERSION: Final = 10  # version of ONNX's file format

_GRAPH_FILE = "model.onnx"
_CRF_FILE = "crf.npz"
_TOKENIZER_FILE = "tokenizer.json"

# ONNX orders the gates of an LSTM as input, output, forget, cell; the tagger's order is
# input, forget, cell, output.
_ONNX_GATES = (0, 3, 1, 2)
_QUANTISED_OPERATORS = ("MatMul", "Gemm", "LSTM", "Gather")
# A token classifier's windows bound the length of its input, so sentences are never
# truncated.
_NO_MAXIMUM = 10**9


def make_writer(model: Path, *, int8: bool = False) -> Callable[[Path], None]:
    """Return a function that writes the ONNX export of a saved model to a folder.

    Args:
        model: The folder of the saved model.
        int8: Store matrices and tables in one byte per number; activations are
            quantised at run time (dynamic quantisation).

    Raises:
        ConfigError: Models of this kind cannot be exported.
        ModelError: The model cannot be read.
        MissingExtra: onnx, onnxruntime or onnxscript is not installed.
    """
    loaded = load_model(model)
    if not isinstance(loaded, Tagger | TokenClassifier):
        raise ConfigError(
            f"{model}: models of kind {loaded.config.kind!r} cannot be exported as an "
            "ONNX graph; taggers and token classifiers can"
        )
    if isinstance(loaded, Tagger) and loaded.encoder is not None:
        raise ConfigError(
            f"{model}: this tagger reads the features of a frozen encoder "
            f"({loaded.config.contextual}), which would not be part of its graph: "
            "train it without contextual, or train a token classifier"
        )
    packages = ["onnx", "onnxruntime"]
    if isinstance(loaded, TokenClassifier):
        packages.append("onnxscript")
    for package in packages:
        with needs(package, "onnx"):
            import_module(package)
    return partial(_write_export, loaded, int8=int8)


def _write_export(model: Tagger | TokenClassifier, folder: Path, *, int8: bool) -> None:
    """Write the files of an export to a folder."""
    from onnx import helper, load, save

    graph_file = folder / _GRAPH_FILE
    metadata = {
        "format": FORMAT,
        "kind": model.config.kind,
        "token": TOKEN.pattern,
        "tags": model.tagset.tags,
        "scheme": model.tagset.scheme,
    }
    if isinstance(model, Tagger):
        metadata |= _write_tagger(model, folder)
    else:
        metadata |= _write_classifier(model, folder)
    if int8:
        _quantise(graph_file)

    graph = load(graph_file)
    helper.set_model_props(graph, {"fednotes": json.dumps(metadata)})
    save(graph, graph_file)


# ---- a light tagger: `templates/tagger.onnx.txt` has its graph -----------------------


def _write_tagger(model: Tagger, folder: Path) -> dict[str, Any]:
    """Write a tagger's graph, crf.npz and tokenizer.json.

    Returns:
        Metadata on the features of a token that the graph reads.
    """
    graph = _build_tagger_graph(model)
    (folder / _GRAPH_FILE).write_bytes(graph.SerializeToString())
    _write_crf(model, folder)

    words = {}
    if model.vectors is not None:
        words = {row: word for word, row in model.vectors.index.items()}
    # Rows without a word get names that no word can have.
    vocabulary = {
        words.get(row, f"\n{row}"): row for row in range(max(words, default=0) + 1)
    }
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="\n0"))
    tokenizer.save(str(folder / _TOKENIZER_FILE))

    config = model.config
    # For longer words, the model reads only the beginning and the end.
    max_characters = config.char_max - 2
    return {
        # The graph has the input, whether it reads it or not.
        "hashed": config.hashed_tables or {"hashed": 1},
        "hashes": config.hashes,
        "max_tokens": config.max_tokens,
        "letters": {character: row for row, character in enumerate(CHARACTERS, FIRST)},
        "ends": ((max_characters + 1) // 2, max_characters // 2),
    }


def _write_crf(model: Tagger, folder: Path) -> None:
    """Write the scores of a tagger's CRF, -inf where its tag scheme forbids them."""
    crf = model.crf.crf
    scores = (crf.start, crf.transitions, crf.end)
    masks = find_allowed_transitions(model.tagset)
    start, transitions, end = (
        np.where(is_allowed, score.detach().numpy(), -np.inf).astype(np.float32)
        for score, is_allowed in zip(scores, masks, strict=True)
    )
    np.savez(folder / _CRF_FILE, start=start, transitions=transitions, end=end)


def _build_tagger_graph(model: Tagger) -> Any:
    """Return a light tagger as an `onnx.ModelProto`.

    The graph maps the tokens of one sentence to emissions (tokens, tags).
    """
    from onnx import checker, numpy_helper, parser

    config = model.config
    widths = model.cnn.widths if config.cnn_filters else ()
    lstm_layers = config.lstm_layers if config.lstm_units else 0
    cnn_layers: list[WordCNN] = []
    if config.cnn_filters:
        cnn_layers = [model.cnn, *(cast(WordCNN, layer) for layer in model.cnn.above)]
    features = _list_token_features(model)

    weights = {
        "project_weight": model.crf.project.weight,
        "project_bias": model.crf.project.bias,
    }
    for feature_weights in features.values():
        weights |= feature_weights
    for number, cnn_layer in enumerate(cnn_layers):
        weights |= _arrange_cnn_layer(cnn_layer, number)
    for number in range(lstm_layers):
        weights |= _arrange_lstm_layer(model.lstm, number)

    template = make_environment("fednotes.apps.serving").get_template("tagger.onnx.txt")
    text = template.render(
        parts=list(features),
        config=config,
        hashed_tables=list(config.hashed_tables),
        widths=widths,
        cnn_layers=len(cnn_layers),
        lstm_layers=lstm_layers,
        tags=len(model.tagset.tags),
        opset=OPSET,
        ir=IR_VERSION,
    )
    graph = parser.parse_model(text)
    for name, value in weights.items():
        array = np.ascontiguousarray(value.detach().cpu().numpy())
        graph.graph.initializer.append(numpy_helper.from_array(array, name))
    checker.check_model(graph)
    return graph


def _list_token_features(model: Tagger) -> dict[str, dict[str, Tensor]]:
    """Return the weights behind each feature of a token, by the feature's name.

    The names are those of `templates/tagger.onnx.txt`: "known" (word vectors), those of
    the hashed tables, and "spelt" (characters).
    """
    config = model.config
    features: dict[str, dict[str, Tensor]] = {}
    if model.vectors is not None:
        table = model.vectors.table
        if config.train_words:
            table = model.words.weight
        features["known"] = {"known_table": table}
    for name in config.hashed_tables:
        table = model.words.get_parameter(name)
        features[f"sum_of_{name}"] = {f"{name}_table": table}
    if config.characters:
        letters = model.characters.embedding.detach().clone()
        letters[0] = 0.0  # row 0 pads the characters of a word
        convolution = _arrange_convolution(
            "letters", model.characters.weight, model.characters.bias
        )
        features["spelt"] = {"letters_table": letters, **convolution}
    return features


def _arrange_cnn_layer(layer: WordCNN, number: int) -> dict[str, Tensor]:
    """Return the weights of a layer of the word CNN."""
    weights: dict[str, Tensor] = {}
    for width in layer.widths:
        weights |= _arrange_convolution(
            f"cnn_{number}_{width}",
            layer.get_parameter(f"weight_{width}"),
            layer.get_parameter(f"bias_{width}"),
        )
    if layer.pieces > 1:
        weights[f"cnn_{number}_scale"] = layer.norm.weight
        weights[f"cnn_{number}_shift"] = layer.norm.bias
    return weights


def _arrange_convolution(name: str, weight: Tensor, bias: Tensor) -> dict[str, Tensor]:
    """Return the weight and bias of a convolution in ONNX's layout.

    Args:
        name: The prefix of the weights' names in the graph.
        weight: The filters (width, filters, dim); returned as (filters, dim, width).
        bias: The biases (filters,).
    """
    return {f"{name}_weight": weight.permute(1, 2, 0), f"{name}_bias": bias}


def _arrange_lstm_layer(lstm: nn.Module, layer: int) -> dict[str, Tensor]:
    """Return the weights of a BiLSTM's layer with the gates in ONNX's order."""

    def reorder(name: str) -> Tensor:
        """Return a parameter of the layer with the gates in ONNX's order."""
        weight = lstm.get_parameter(f"{name}_l{layer}").detach()
        # (directions, gates, units, …)
        gates: Tensor = weight.unflatten(1, (4, -1))
        return gates[:, _ONNX_GATES].flatten(1, 2)

    bias = reorder("bias")
    # ONNX adds two biases; the tagger has one.
    both_biases = torch.cat([bias, torch.zeros_like(bias)], 1)
    return {
        f"into_{layer}": reorder("weight_ih"),
        f"across_{layer}": reorder("weight_hh"),
        f"bias_{layer}": both_biases,
    }


# ---- a token classifier: PyTorch's exporter traces the library's model ---------------


def _write_classifier(model: TokenClassifier, folder: Path) -> dict[str, Any]:
    """Write a token classifier's graph, crf.npz and tokenizer.json.

    Returns:
        Metadata on how the tokenizer reads a text.

    Raises:
        ModelError: PyTorch cannot trace the encoder.
    """
    frame = Frame.of(
        model.config.encoder, model.tokenizer, model.library, model.config.window
    )
    marks = len(frame.prefix) + len(frame.suffix)
    _trace_classifier(
        model, folder / _GRAPH_FILE, torch.full((2, marks + 2), frame.pad)
    )

    zeros = np.zeros(len(model.tagset.tags), np.float32)
    np.savez(
        folder / _CRF_FILE,
        start=zeros,
        transitions=zeros[:, None] + zeros,
        end=zeros,
    )

    tokenizer = Tokenizer.from_str(model.tokenizer.backend_tokenizer.to_str())
    tokenizer.enable_truncation(frame.capacity + marks)
    tokenizer.save(str(folder / _TOKENIZER_FILE))
    return {
        "max_tokens": _NO_MAXIMUM,
        "context": model.config.context,
        "blanks": list_blank_marks(model.tokenizer),
    }


def _trace_classifier(model: TokenClassifier, path: Path, ids: Tensor) -> None:
    """Write a token classifier's graph.

    It maps the inputs input_ids and attention_mask (sentences, length) to the output
    logits (sentences, length, tags).

    Args:
        model: The token classifier.
        path: The file to write.
        ids: An example of input_ids.

    Raises:
        ModelError: PyTorch cannot trace the encoder.
    """
    free_dimensions = {0: "sentences", 1: "length"}
    try:
        with _silencing_output():
            torch.onnx.export(
                model.library.eval(),
                f=path,
                kwargs={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
                input_names=["input_ids", "attention_mask"],
                output_names=["logits"],
                dynamic_shapes={
                    "input_ids": free_dimensions,
                    "attention_mask": free_dimensions,
                },
                opset_version=OPSET,
                external_data=False,
                dynamo=True,
            )
    except Exception as error:
        # The exporter raises many types of exceptions for an encoder it cannot trace.
        raise ModelError(
            f"{model.config.encoder}: this encoder cannot be exported as an ONNX graph "
            f"({_find_root_message(error)}): use the model from Python or over HTTP, "
            "or train on another encoder, such as BERT or RoBERTa"
        ) from error


# Escape sequences that colour text on a terminal.
_STYLES = re.compile(r"\x1b\[[0-9;]*m")


def _find_root_message(error: BaseException) -> str:
    """Return the first line of an error's root cause, without terminal colours."""
    while error.__cause__ is not None:
        error = error.__cause__
    first_line = _STYLES.sub("", str(error)).strip().partition("\n")[0]
    return clean_to_one_line(first_line or type(error).__name__, 200)


# ---- quantisation --------------------------------------------------------------------


def _quantise(graph_file: Path) -> None:
    """Replace a graph file with its int8 version.

    Weights are stored in eight bits, but use only seven (`reduce_range`). Processors
    without VNNI instructions add two products of eight-bit numbers in 16 bits, which
    could overflow with weights of eight bits.
    """
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with (
        tempfile.TemporaryDirectory(dir=graph_file.parent) as folder,
        _silencing_output(),
    ):
        full_size = graph_file.rename(Path(folder) / graph_file.name)
        quantize_dynamic(
            full_size,
            graph_file,
            op_types_to_quantize=list(_QUANTISED_OPERATORS),
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
        )


@contextmanager
def _silencing_output() -> Iterator[None]:
    """Hide the output of torch and onnxruntime during an export.

    Failures are still visible, because both raise exceptions.
    """
    logging.disable(logging.ERROR)
    try:
        with (
            silencing_library(),
            redirect_stdout(StringIO()),
            redirect_stderr(StringIO()),
        ):
            yield
    finally:
        logging.disable(logging.NOTSET)
