"""Speed of `model.stream`, and of the same model with one sentence at a time.

    python benchmarks/predict.py [--train 800] [--repeats 3] [--no-encoder]

Two models are trained on the same sentences: the light tagger of the demo, and a token
classifier with MiniLM. They are compared with transformers' pipeline with the exported
token classifier, which reads one sentence at a time by default, and in batches of 32.
All predict test sentences from their text on one thread. The sentences are those of NCBI
disease in $FEDNOTES_CORPORA if it is set, and generated ones otherwise.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import fednotes as fn
from fednotes.core.types import Document, Span
from fednotes.data.formats import jsonl
from fednotes.data.split import make_sentence_documents
from fednotes.data.synthetic import generate
from fednotes.metrics.spans import SpanCounts

sys.path.append(str(Path(__file__).resolve().parent / "helpers"))
sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
from scratch import scratch
from turns import measure_in_turns

ONE_BY_ONE = 300  # number of test sentences that are read one at a time
LIGHT = {
    "method": "fedner",
    "model": fn.job("demo").table["model"],
    "training": {"learning_rate": 0.004, "epochs": 15},
}
ENCODER = {"method": "finetune", "training": {"cycles": 8}}
Found = Callable[[Sequence[str]], Iterable[Sequence[Span]]]


def corpus(train: int) -> tuple[str, dict[str, tuple[Document, ...]]]:
    """Return a name for the sentences, and the sentences of each part."""
    root = os.environ.get("FEDNOTES_CORPORA")
    if root:
        folder = Path(root) / "ncbi_disease"
        files = {"train": "train.tsv", "valid": "devel.tsv", "test": "test.tsv"}
        parts = {
            part: make_sentence_documents(fn.read(folder / name))
            for part, name in files.items()
        }
        name = "NCBI disease"
    else:
        data = generate(num_sites=1, sentences_per_site=train, seed=1)[0].data
        parts = {"train": data.train, "valid": data.valid, "test": data.test}
        parts = {
            part: make_sentence_documents(documents)
            for part, documents in parts.items()
        }
        name = "generated"
    parts = {
        part: tuple(d for d in documents if d.text.strip())
        for part, documents in parts.items()
    }
    random.Random(1).shuffle(shuffled := list(parts["train"]))
    return name, parts | {
        "train": tuple(shuffled[:train]),
        "valid": parts["valid"][: train // 5],
    }


def trained(job: dict[str, Any], files: dict[str, str], out: Path) -> fn.MentionModel:
    """Train one site alone; return its model."""
    table = job | {"seed": 1, "conditions": ["alone"], "sites": {"here": files}}
    fn.simulate(fn.job(table), out)
    model = fn.load(
        next(path for path in sorted(out.glob("alone/**/model")) if path.is_dir())
    )
    assert isinstance(model, fn.MentionModel)
    return model


def f1(gold: Sequence[Document], predicted_spans: Iterable[Sequence[Span]]) -> float:
    """Return the strict F1 in percent."""
    pairs = zip(gold, predicted_spans, strict=True)
    predicted = [
        replace(document, spans=tuple(sorted(spans))) for document, spans in pairs
    ]
    return 100 * SpanCounts.of(gold, predicted).scores()["strict"]["f1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=int, default=800, help="training sentences")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--no-encoder", action="store_true", help="only the light tagger"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name, parts = corpus(arguments.train)
    gold = parts["test"]
    texts = [document.text for document in gold]
    few = min(ONE_BY_ONE, len(texts))
    print(
        f"{name}: {len(parts['train'])} sentences to train, {len(texts)} to read, one thread"
    )
    # Name of a program → a function that finds mentions, and its number of sentences.
    runs: dict[str, tuple[Found, int]] = {}
    with scratch() as path:
        files = {part: str(path / f"{part}.jsonl") for part in parts}
        for part, documents in parts.items():
            jsonl.write(documents, Path(files[part]))
        light = trained(LIGHT, files, path / "light")
        runs["tagger, model.stream"] = ours(light), len(texts)
        runs["tagger, one at a time"] = (
            (lambda t: [light(note).spans for note in t]),
            few,
        )
        print(f"tagger: {size(light.model):,} parameters")
        if not arguments.no_encoder:
            classifier = trained(ENCODER, files, path / "encoder")
            runs["token classifier, model.stream"] = ours(classifier), len(texts)
            runs["token classifier, one at a time"] = (
                (lambda t: [classifier(note).spans for note in t]),
                few,
            )
            for batch in (1, 32):
                runs[f"token classifier, transformers' pipeline, batch {batch}"] = (
                    (in_pipeline(classifier, path / f"hf{batch}", batch)),
                    (few if batch == 1 else len(texts)),
                )
        rates = measured(runs, texts, arguments.repeats)
        print(f"{'':53} sentences/s  strict F1 of the first {few}")
        for label, (find, _) in runs.items():
            score = f1(gold[:few], find(texts[:few]))
            print(f"{label:53} {rates[label]:11.0f}  {score:9.1f}")
    ratio = rates["tagger, model.stream"] / rates["tagger, one at a time"]
    print(f"predict ratio={ratio:.1f} against one-at-a-time")


def ours(model: fn.MentionModel) -> Found:
    """Return a function that finds mentions with `model.stream`."""
    return lambda texts: [document.spans for document in model.stream(texts, batch=256)]


def size(model: Any) -> int:
    """Return the number of trained parameters."""
    return sum(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad
    )


def in_pipeline(model: fn.MentionModel, folder: Path, batch: int) -> Found:
    """Return a function that finds mentions with transformers' pipeline of the export."""
    from transformers import logging, pipeline

    # Imported here, because the other comparisons run without this application.
    from fednotes.apps.serving.exports import export

    logging.disable_progress_bar()
    model.model.save(folder / "model")
    export(folder / "model", "hf", folder / "hf")
    find = pipeline(
        "token-classification", str(folder / "hf"), aggregation_strategy="first"
    )

    def find_spans(texts: Sequence[str]) -> list[list[Span]]:
        with warnings.catch_warnings(action="ignore"):
            rows = find(list(texts), batch_size=batch)
        return [
            [Span(r["start"], r["end"], r["entity_group"]) for r in row] for row in rows
        ]

    return find_spans


def measured(
    runs: dict[str, tuple[Found, int]], texts: Sequence[str], repeats: int
) -> dict[str, float]:
    """Return the median sentences per second of each program, in wall-clock time."""
    programs = {
        label: lambda find=find, count=count: list(find(texts[:count]))
        for label, (find, count) in runs.items()
    }
    seconds = measure_in_turns(programs, repeats, time.perf_counter)
    return {
        label: statistics.median(count / value for value in seconds[label])
        for label, (_, count) in runs.items()
    }


if __name__ == "__main__":
    main()
