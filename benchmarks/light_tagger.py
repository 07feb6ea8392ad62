"""Strict F1 and speed of the light tagger `hash-cnn` and of spaCy's recogniser.

    python benchmarks/light_tagger.py [--corpora ncbi_disease bc5cdr] [--train 800]
        [--seeds 1 2 3 4 5]
    python benchmarks/light_tagger.py --judge valid --seeds 11 12 13 14 15

Each seed draws the sentences on which both programs train, from the training part of a
corpus in $FEDNOTES_CORPORA. spaCy's `ner` has its default settings (a blank English
pipeline). Both programs keep the epoch with the best F1 on the same sentences of the
validation part, and find mentions in all sentences of the test part. `--judge valid`
uses the other sentences of the validation part instead of the test part, so that
settings can be chosen. The differences are tested by a paired test over seeds.

Seconds are CPU seconds on one thread. The seconds of training include reading the data
and the scores on the validation sentences; fednotes also scores the test sentences in
that time. The seconds of prediction are those from texts to mentions, by `model.stream`
and `nlp.pipe` in turn.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import fednotes as fn
from fednotes.core.types import Document, Span
from fednotes.data.formats import jsonl
from fednotes.data.split import make_sentence_documents
from fednotes.metrics.paired_tests import run_paired_t_test
from fednotes.metrics.spans import SpanCounts

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))
from scratch import scratch

JOB: dict[str, Any] = {
    "method": "fedner",
    "model": {"tagger": "hash-cnn"},
    "training": {"learning_rate": 0.002, "batch_size": 32},
}
FILES = {"train": "train.tsv", "valid": "devel.tsv", "test": "test.tsv"}
Texts = Sequence[str]
Finder = Callable[[Texts], Iterable[Sequence[Span]]]
Parts = dict[str, list[Document]]
Trainer = Callable[[Parts, int, int], Finder]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpora", nargs="+", default=["ncbi_disease", "bc5cdr"])
    parser.add_argument("--train", type=int, default=800, help="training sentences")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--judge", choices=["test", "valid"], default="test")
    parser.add_argument(
        "--repeats", type=int, default=3, help="repeats of the measurement of speed"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if (root := os.environ.get("FEDNOTES_CORPORA")) is None:
        print("left out: set FEDNOTES_CORPORA to the folder of the corpora")
        return
    if find_spec("spacy") is None:
        print("left out: needs the extra spacy (in a clone, pip install '.[spacy]')")
        return

    ratios = [compare(Path(root) / corpus, arguments) for corpus in arguments.corpora]
    print(f"light-tagger-speed ratio={min(ratios):.2f} against spaCy's nlp.pipe")


def compare(folder: Path, arguments: argparse.Namespace) -> float:
    """Print both programs' scores on a corpus; return the ratio of their speeds."""
    parts = read_parts(folder)
    trainers: dict[str, Trainer] = {"fednotes": train_ours, "spaCy": train_spacy}
    finders: dict[str, Finder] = {}
    scores: dict[str, list[float]] = {name: [] for name in trainers}
    seconds: dict[str, list[float]] = {name: [] for name in trainers}

    print(f"{folder.name}: {arguments.train} sentences to train")
    print(f"seed  fednotes  spaCy   strict F1, {arguments.judge}")
    for seed in arguments.seeds:
        drawn = draw(parts, arguments.train, seed, arguments.judge)
        for name, train in trainers.items():
            start = time.process_time()
            finders[name] = train(drawn, arguments.epochs, seed)
            seconds[name].append(time.process_time() - start)
            scores[name].append(f1(drawn["test"], finders[name]))
        ours, theirs = (values[-1] for values in scores.values())
        print(f"{seed:4}  {ours:8.1f}  {theirs:5.1f}", flush=True)

    speeds = measure(
        finders, [document.text for document in drawn["test"]], arguments.repeats
    )
    for name, values in scores.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        print(
            f"{name}: {statistics.fmean(values):.1f} ± {spread:.1f}, "
            f"{statistics.median(seconds[name]):.1f} s to train, "
            f"{speeds[name]:,.0f} sentences/s"
        )
    differences = [a - b for a, b in zip(*scores.values(), strict=True)]
    print(f"fednotes - spaCy: {describe(differences)}", flush=True)
    return speeds["fednotes"] / speeds["spaCy"]


def read_parts(folder: Path) -> Parts:
    """Return the sentences of each part of a corpus, without blank ones."""
    return {
        part: [
            document
            for document in make_sentence_documents(fn.read(folder / file))
            if document.text.strip()
        ]
        for part, file in FILES.items()
    }


def draw(parts: Parts, train: int, seed: int, judge: str) -> Parts:
    """Return the sentences of a seed; validation sentences are a fifth of `train`.

    With `judge` "valid", the other validation sentences stand for the test sentences.
    """
    generator = random.Random(seed)
    drawn = {
        "train": generator.sample(parts["train"], train),
        "valid": generator.sample(parts["valid"], train // 5),
        "test": parts["test"],
    }
    if judge == "valid":
        chosen = {id(document) for document in drawn["valid"]}
        drawn["test"] = [d for d in parts["valid"] if id(d) not in chosen]
    return drawn


def train_ours(parts: Parts, epochs: int, seed: int) -> Finder:
    """Train a site alone, as `fednotes simulate` does."""
    training = JOB["training"] | {"epochs": epochs, "patience": epochs}
    with scratch() as path:
        folder = train_alone(JOB | {"seed": seed, "training": training}, parts, path)
        model = fn.load(folder)
    assert isinstance(model, fn.MentionModel)
    return lambda texts: [document.spans for document in model.stream(texts, batch=256)]


def train_alone(job: dict[str, Any], parts: Parts, path: Path) -> Path:
    """Train a site alone; return the folder of its model."""
    files = {part: str(path / f"{part}.jsonl") for part in parts}
    for part, documents in parts.items():
        jsonl.write(documents, Path(files[part]))
    # spaCy keeps training sentences that occur in another part, too.
    site = files | {"repeats": "keep"}
    table = job | {"conditions": ["alone"], "sites": {"here": site}}
    fn.simulate(fn.job(table), path / "out", workers=1)
    folders = (path / "out" / "alone").glob("**/model")
    return next(folder for folder in sorted(folders) if folder.is_dir())


def train_spacy(parts: Parts, epochs: int, seed: int) -> Finder:
    """Train a blank English pipeline's `ner`; return what finds mentions with it."""
    return finder_of(train_spacy_pipeline(parts, epochs, seed))


def train_spacy_pipeline(parts: Parts, epochs: int, seed: int) -> Any:
    """Train a blank English pipeline's `ner` with the settings of spaCy's default."""
    import spacy
    from spacy.schemas import ConfigSchemaTraining
    from spacy.training import Example
    from spacy.util import registry

    spacy.util.fix_random_seed(seed)
    nlp = spacy.blank("en")
    nlp.add_pipe("ner")
    settings = registry.resolve(
        nlp.config.interpolate()["training"], schema=ConfigSchemaTraining
    )
    find = finder_of(nlp)
    examples = [example_of(Example, nlp, document) for document in parts["train"]]
    optimizer = nlp.initialize(lambda: examples, sgd=settings["optimizer"])
    order = random.Random(seed)
    best_score, best_weights = -1.0, b""
    for _ in range(epochs):
        order.shuffle(examples)
        for batch in settings["batcher"](examples):
            nlp.update(batch, sgd=optimizer, drop=settings["dropout"])
        score = f1(parts["valid"], find)
        if score > best_score:
            best_score, best_weights = score, nlp.to_bytes()
    return nlp.from_bytes(best_weights)


def finder_of(nlp: Any) -> Finder:
    """Return a function that finds mentions with a pipeline of spaCy."""
    return lambda texts: [spans_of(doc) for doc in nlp.pipe(texts, batch_size=256)]


def example_of(kind: Any, nlp: Any, document: Document) -> Any:
    """Return spaCy's training example of a sentence."""
    import spacy

    doc = nlp.make_doc(document.text)
    spans = [
        doc.char_span(span.start, span.end, span.label, alignment_mode="expand")
        for span in document.spans
    ]
    doc.set_ents(spacy.util.filter_spans([span for span in spans if span is not None]))
    return kind(nlp.make_doc(document.text), doc)


def spans_of(doc: Any) -> list[Span]:
    return [Span(span.start_char, span.end_char, span.label_) for span in doc.ents]


def f1(gold: Sequence[Document], find: Finder) -> float:
    """Return the strict F1 of the found mentions, in percent."""
    predicted = [
        replace(document, spans=tuple(sorted(spans)))
        for document, spans in zip(
            gold, find([document.text for document in gold]), strict=True
        )
    ]
    return 100 * SpanCounts.of(gold, predicted).scores()["strict"]["f1"]


def measure(finders: dict[str, Finder], texts: Texts, repeats: int) -> dict[str, float]:
    """Return the median sentences per second of the CPU; the programs run in turn."""
    speeds: dict[str, list[float]] = {name: [] for name in finders}
    for repeat in range(repeats + 1):
        for name, find in finders.items():
            start = time.process_time()
            list(find(texts))
            if repeat:  # the first repeat warms up
                speeds[name].append(len(texts) / (time.process_time() - start))
    return {name: statistics.median(values) for name, values in speeds.items()}


def describe(differences: Sequence[float]) -> str:
    """Return the mean difference, with its 95 % interval and p value if it has one."""
    if len(differences) < 2:
        return f"{statistics.fmean(differences):+.1f}"
    test = run_paired_t_test(differences)
    return (
        f"{test.mean:+.1f} (95 % interval {test.low:+.1f} to {test.high:+.1f}, "
        f"p = {test.p_value:.3f}, paired t test over {test.n} seeds)"
    )


if __name__ == "__main__":
    main()
