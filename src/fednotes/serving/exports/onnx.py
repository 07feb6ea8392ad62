"""A tagger or token classifier as an ONNX graph, with all that a program needs beside it.

    model.onnx      one sentence (or text) → emissions (tokens, tags)
    fednotes.json   tags, how text becomes tokens, and what the graph reads of a token
    crf.npz         start (tags,), transitions (tags, tags) [from, to] and end (tags,) scores, -inf
                    where forbidden; of a model that ends with a CRF
    words.txt       the words of the table of word vectors, line n for row n
    tokenizer.json  of a token classifier

`docs/use.md` has a program of numpy and onnxruntime that reads such a folder.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fednotes.core.errors import ConfigError, MissingExtra, ModelError
from fednotes.core.store import write_json
from fednotes.data.tags import allowed_transitions
from fednotes.data.text import TOKEN
from fednotes.encoders.pretrained import Frame, quiet
from fednotes.taggers.layers import CHARACTERS
from fednotes.taggers.saving import load_model
from fednotes.taggers.tagger import Tagger
from fednotes.taggers.token_classifier import TokenClassifier

FORMAT, OPSET, IR = 1, 18, 10
GATES = (0, 3, 1, 2)  # ONNX has input, output, forget and cell gates; here i, f, g, o
QUANTISED = ("MatMul", "Gemm", "LSTM", "Gather")


def writer(model: Path, int8: bool = False) -> Callable[[Path], None]:
    """What fills a folder with a saved model's graph.

    int8: matrices and tables in eight bits a number, activations as they come (dynamic).
    Raises ConfigError for a kind of model that there is no graph of, ModelError, MissingExtra
    without onnx, onnxruntime or onnxscript.
    """
    loaded = load_model(model)
    if not isinstance(loaded, Tagger | TokenClassifier):
        raise ConfigError(f"{model}: of the kind {loaded.config.kind!r}, which is not exported")
    if isinstance(loaded, Tagger) and loaded.encoder is not None:
        raise ConfigError(
            f"{model}: reads the features of a frozen encoder ({loaded.config.contextual}), which "
            "are not in a tagger's own graph: train it without contextual, or a token-classifier"
        )
    for package in ("onnx", "onnxruntime", *(["onnxscript"] if loaded.whole else [])):
        try:
            import_module(package)
        except ImportError:
            raise MissingExtra(package, "onnx") from None

    def fill(folder: Path) -> None:
        graph, tagset = folder / "model.onnx", loaded.tagset
        facts = {"format": FORMAT, "kind": loaded.config.kind, "token": TOKEN.pattern}
        facts |= {"tags": tagset.tags, "scheme": tagset.scheme}
        if isinstance(loaded, Tagger):
            graph.write_bytes(tagger_graph(loaded).SerializeToString())
            facts |= _beside_tagger(loaded, folder)
        else:
            facts |= _classifier(loaded, graph)
            loaded.tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
        if int8:
            _quantise(graph)
        write_json(folder / "fednotes.json", facts, private=False)

    return fill


# ---- the light tagger: its graph is written down layer by layer --------------------------------


@dataclass
class _Graph:
    """Nodes in the order in which they are added; a value is known by its name."""

    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)

    def constant(self, value: Tensor | np.ndarray) -> str:
        """A weight."""
        from onnx import numpy_helper

        array = value.detach().cpu().numpy() if isinstance(value, Tensor) else value
        name = f"constant{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def input(self, name: str, *shape: int) -> str:
        """Whole numbers, (tokens, *shape)."""
        from onnx import TensorProto, helper

        made = helper.make_tensor_value_info(name, TensorProto.INT64, ["tokens", *shape])
        self.inputs.append(made)
        return name

    def add(self, kind: str, *inputs: str, to: str = "", **attributes: Any) -> str:
        """The name of what a node gives; to: a name for it."""
        from onnx import helper

        name = to or f"value{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def whole(self, name: str, width: int) -> Any:
        """The model that gives (tokens, width) under this name."""
        from onnx import TensorProto, checker, helper

        out = helper.make_tensor_value_info(name, TensorProto.FLOAT, ["tokens", width])
        graph = helper.make_graph(self.nodes, "tagger", self.inputs, [out], self.constants)
        opset = [helper.make_opsetid("", OPSET)]
        made = helper.make_model(graph, opset_imports=opset, ir_version=IR)
        checker.check_model(made)
        return made


def tagger_graph(model: Tagger) -> Any:
    """A light tagger as an `onnx.ModelProto`: the tokens of one sentence → emissions."""
    config, graph, parts = model.config, _Graph(), list[str]()
    axes = [graph.constant(np.array([n])) for n in range(3)]
    if model.vectors is not None:
        table = model.words.weight if config.train_words else model.vectors.table
        parts.append(graph.add("Gather", graph.constant(table), graph.input("words")))
    if config.hashed_words:
        hashed = graph.constant(model.words.hashed)
        parts.append(graph.add("Gather", hashed, graph.input("hashed")))
    if config.characters:
        layer, ids = model.characters, graph.input("characters", config.char_max)
        table = layer.embedding.detach().clone()
        table[0] = 0.0  # what stands beside a word
        letters = graph.add("Gather", graph.constant(table), ids)  # (tokens, size, dim)
        seen = _convolved(
            graph, graph.add("Transpose", letters, perm=[0, 2, 1]), layer.weight, layer.bias
        )
        beside = graph.add("Equal", ids, graph.constant(np.array(0)))
        low = graph.constant(np.array(-np.inf, np.float32))
        masked = graph.add("Where", graph.add("Unsqueeze", beside, axes[1]), low, seen)
        most = graph.add("ReduceMax", masked, axes[2], keepdims=0)
        parts.append(graph.add("Relu", most))
    values = _joined(graph, parts, 1)  # (tokens, width)
    if config.cnn_filters:
        turned = graph.add("Unsqueeze", graph.add("Transpose", values, perm=[1, 0]), axes[0])
        each = [
            _convolved(graph, turned, *(getattr(model.cnn, f"{n}_{w}") for n in ("weight", "bias")))
            for w in model.cnn.widths
        ]  # (1, filters, tokens)
        joined = graph.add("Squeeze", graph.add("Relu", _joined(graph, each, 1)), axes[0])
        values = graph.add("Transpose", joined, perm=[1, 0])
    for number in range(config.lstm_layers if config.lstm_units else 0):
        values = _lstm(graph, values, model.lstm, number, axes[1])
    project = model.crf.project
    given = (graph.constant(project.weight), graph.constant(project.bias))
    graph.add("Gemm", values, *given, to="emissions", transB=1)
    return graph.whole("emissions", len(model.tagset.tags))


def _joined(graph: _Graph, parts: Sequence[str], axis: int) -> str:
    return parts[0] if len(parts) == 1 else graph.add("Concat", *parts, axis=axis)


def _convolved(graph: _Graph, values: str, weight: Tensor, bias: Tensor) -> str:
    """weight (width, filters, dim): values (·, dim, length) → (·, filters, length)."""
    width = len(weight)
    kernel, shift = graph.constant(weight.permute(1, 2, 0)), graph.constant(bias)
    return graph.add("Conv", values, kernel, shift, pads=[(width - 1) // 2, width // 2])


def _lstm(graph: _Graph, values: str, layer: Any, number: int, axis: str) -> str:
    """(tokens, ·) → (tokens, 2 · units)."""
    names = (f"weight_ih_l{number}", f"weight_hh_l{number}", f"bias_l{number}")
    into, across, bias = (
        getattr(layer, n).detach().unflatten(1, (4, -1))[:, GATES].flatten(1, 2) for n in names
    )
    biases = torch.cat([bias, torch.zeros_like(bias)], 1)
    weights = (graph.constant(each) for each in (into, across, biases))
    one = graph.add("Unsqueeze", values, axis)  # (tokens, 1, ·)
    out = graph.add("LSTM", one, *weights, hidden_size=layer.units, direction="bidirectional")
    shape = graph.constant(np.array([-1, 2 * layer.units]))  # of (tokens, directions, 1, units)
    return graph.add("Reshape", out, shape)


def _beside_tagger(model: Tagger, folder: Path) -> dict[str, Any]:
    """Write what stands beside the graph; what the graph reads of a token."""
    config, crf = model.config, model.crf.crf
    scores = {"start": crf.start, "transitions": crf.transitions, "end": crf.end}
    allowed = allowed_transitions(model.tagset)
    arrays = {
        name: np.where(may, score.detach().numpy(), -np.inf).astype(np.float32)
        for (name, score), may in zip(scores.items(), allowed, strict=True)
    }
    np.savez(folder / "crf.npz", allow_pickle=False, **arrays)
    if model.vectors is not None:
        rows = {row: word for word, row in model.vectors.index.items()}
        words = [rows.get(row, "") for row in range(1, len(model.vectors.table))]
        (folder / "words.txt").write_text("\n".join(words), encoding="utf-8")
    facts = {"words": model.vectors is not None, "hashed": config.hashed_words}
    facts |= {"characters": CHARACTERS if config.characters else "", "char_max": config.char_max}
    return {**facts, "max_tokens": config.max_tokens}


# ---- a token classifier: the library's model, traced ---------------------------------------------


def _classifier(model: TokenClassifier, to: Path) -> dict[str, Any]:
    """Write the graph, ids and mask (sentences, length) → logits (sentences, length, tags); what a
    program has to know of it."""
    frame = Frame.of(model.config.encoder, model.tokenizer, model.library, model.config.window)
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
    except Exception as error:  # whatever torch says of an encoder that it cannot trace
        reason = str(error).partition("\n")[0][:200]
        raise ModelError(f"{model.config.encoder}: has no ONNX graph ({reason})") from error
    marks = {"prefix": frame.prefix, "suffix": frame.suffix}
    return {**marks, "window": frame.capacity, "context": model.config.context}


def _quantise(graph: Path) -> None:
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
    """What torch and onnxruntime tell of packages and processors is not for who exports."""
    logging.disable(logging.WARNING)
    try:
        with quiet(), redirect_stdout(StringIO()):
            yield
    finally:
        logging.disable(logging.NOTSET)
