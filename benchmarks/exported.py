"""F1 and speed of a model and of its exports, with and without 8-bit weights.

    python benchmarks/exported.py [--model FOLDER --notes ANNOTATED]

The program that reads the export is the one in docs/use.md: one sentence at a time, on
one thread. Without --model, an untrained tagger of the paper's size reads generated
notes; F1 has no meaning then.

A token classifier is also read by transformers' pipeline, with two ways of joining
sub-words.

Seconds are CPU seconds, medians of several turns. The ratio is the speed of the graph
with 8-bit weights divided by that of the model.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fednotes.apps.serving.exports import export
from fednotes.core.types import Document, Span
from fednotes.data.formats import guess_format, read
from fednotes.data.synthetic import generate
from fednotes.data.text import split_sentences
from fednotes.metrics.spans import SpanCounts
from fednotes.taggers.saving import build_model, load_model, save_model
from fednotes.taggers.tagger import TaggerConfig
from fednotes.taggers.token_classifier import TokenClassifier

sys.path.append(str(Path(__file__).resolve().parent / "helpers"))
from turns import measure_in_turns

PAGE = Path(__file__).parents[1] / "docs" / "use.md"
TURNS = 3
Annotate = Callable[[Sequence[Document]], Sequence[Document]]


def program(folder: Path) -> Any:
    """Return the program of the page with a folder opened, on one thread."""
    import onnxruntime

    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    names: dict[str, Any] = {}
    exec(next(block for block in blocks if "class Finder" in block), names)
    finder, options = names["Finder"](folder), onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    finder.graph = onnxruntime.InferenceSession(folder / "model.onnx", options)
    return finder


def annotate_all(finder: Any, documents: Sequence[Document]) -> list[Document]:
    """Return documents with the mentions that a program finds."""
    return [
        replace(
            document,
            spans=tuple(
                Span(start + a, start + b, label)
                for start, end in split_sentences(document)
                for a, b, label in finder(document.text[start:end])
            ),
        )
        for document in documents
    ]


def piped(
    folder: Path, aggregation: str
) -> Callable[[str], list[tuple[int, int, str]]]:
    """Return transformers' pipeline of a folder, which is called like the page's program."""
    import transformers

    pipe = transformers.pipeline(
        "token-classification", str(folder), aggregation_strategy=aggregation
    )
    return lambda text: [(e["start"], e["end"], e["entity_group"]) for e in pipe(text)]


def measure_speeds(
    documents: Sequence[Document], programs: Mapping[str, Annotate]
) -> dict[str, list[float]]:
    """Print the F1 and the speed of programs; return sentences per second of each turn."""
    sentences = sum(len(split_sentences(document)) for document in documents)
    seconds = measure_in_turns(
        {name: partial(annotate, documents) for name, annotate in programs.items()},
        TURNS,
    )
    speeds = {
        name: [sentences / value for value in values]
        for name, values in seconds.items()
    }
    for name, values in speeds.items():
        scores = SpanCounts.of(documents, programs[name](documents)).scores()
        f1 = " ".join(
            f"{kind}={100 * scores[kind]['f1']:.1f}" for kind in ("strict", "relaxed")
        )
        print(f"{name}: {f1} {statistics.median(values):.0f} sentences a second")
    return speeds


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--model", type=Path)
    options.add_argument("--notes", type=Path)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.model and arguments.notes:
            documents = read(arguments.notes, guess_format(arguments.notes))
        else:
            site = generate(num_sites=1, sentences_per_site=200, seed=1)[0].data
            documents, arguments.model = site.train, folder / "model"
            save_model(
                build_model(TaggerConfig(hashed_words=4096), site.tags, 1),
                arguments.model,
            )
        model = load_model(arguments.model)
        programs: dict[str, Annotate] = {"predict": model.predict}
        for int8 in (False, True):
            out = folder / f"int8-{int8}"
            export(arguments.model, "onnx", out, int8=int8)
            size = (out / "model.onnx").stat().st_size / 1e6
            smallest = f"onnx{' int8' if int8 else ''}, {size:.1f} MB"
            programs[smallest] = partial(annotate_all, program(out))
        if isinstance(model, TokenClassifier):
            export(arguments.model, "hf", folder / "hf")
            for aggregation in ("first", "simple"):
                pipe = piped(folder / "hf", aggregation)
                programs[f"pipeline {aggregation}"] = partial(annotate_all, pipe)
        speeds = measure_speeds(documents, programs)
    ratio = statistics.median(
        graph / plain
        for graph, plain in zip(speeds[smallest], speeds["predict"], strict=True)
    )
    print(f"exported ratio={ratio:.2f} against the model itself")


if __name__ == "__main__":
    main()
