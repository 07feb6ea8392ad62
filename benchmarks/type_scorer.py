"""Speed of predictions of the type scorer, and of a token classifier, with many types.

    python benchmarks/type_scorer.py [--types 40] [--sentences 640] [--repeats 5]

Both are models of MiniLM with the same entity types, and read the same generated
sentences on one thread. Neither is trained, because the weights change the speed only by
the number of predicted mentions. The threshold of the scorer and the classifier's bias
for words outside mentions are set so that each predicts about two mentions per sentence.

Seconds are CPU seconds. The models predict in turns, so that other work on the machine
affects both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fednotes.core.types import Document, TagSet
from fednotes.data.split import make_sentence_documents
from fednotes.data.synthetic import generate
from fednotes.taggers.model import Model
from fednotes.taggers.saving import build_model
from fednotes.taggers.token_classifier import TokenClassifier, TokenClassifierConfig
from fednotes.taggers.type_scorer import TypeScorer, TypeScorerConfig

sys.path.append(str(Path(__file__).resolve().parent / "helpers"))
from turns import measure_in_turns

MENTIONS_PER_SENTENCE = 2
NUM_TRIED = 32
# An untrained scorer's probabilities and an untrained classifier's logits are in these
# ranges.
THRESHOLDS = np.linspace(0.1, 0.16, 61).tolist()
OUTSIDE_BIASES = np.linspace(0, 2, 11).tolist()


def name_types(number: int) -> tuple[str, ...]:
    """Return names of two words each."""
    kinds = (
        "disease",
        "drug",
        "procedure",
        "symptom",
        "device",
        "organ",
        "gene",
        "test",
    )
    parts = ("name", "site", "severity", "course", "cause", "date", "dose", "result")
    names = [f"{kind}_{part}" for part in parts for kind in kinds]
    return tuple(sorted(names[:number]))


def build_scorer(tagset: TagSet, sentences: Sequence[Document]) -> TypeScorer:
    """Return an untrained scorer that predicts about two mentions per sentence."""
    config = TypeScorerConfig()
    model = build_model(config, tagset, seed=1)
    assert isinstance(model, TypeScorer)
    some = model.prepare(sentences[:NUM_TRIED], gold=False)
    predictions = model.predict_by_threshold(some, THRESHOLDS)
    model.config = replace(config, threshold=find_best_setting(predictions))
    return model


def build_classifier(tagset: TagSet, sentences: Sequence[Document]) -> TokenClassifier:
    """Return an untrained classifier that predicts about two mentions per sentence."""
    model = build_model(TokenClassifierConfig(), tagset, seed=1)
    assert isinstance(model, TokenClassifier)
    outside = tagset.tags.index("O")
    some = model.prepare(sentences[:NUM_TRIED], gold=False)
    predictions = {}
    with torch.no_grad():
        for bias in OUTSIDE_BIASES:
            model.classifier.bias[outside] = bias
            predictions[bias] = model.predict(some)
        model.classifier.bias[outside] = find_best_setting(predictions)
    return model


def find_best_setting(predictions: Mapping[float, Sequence[Document]]) -> float:
    """Return the setting whose predictions have about two mentions per sentence."""

    def measure_difference(setting: float) -> float:
        rate = statistics.mean(len(document.spans) for document in predictions[setting])
        return abs(rate - MENTIONS_PER_SENTENCE)

    return min(predictions, key=measure_difference)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", type=int, default=40, help="at most 64")
    parser.add_argument("--sentences", type=int, default=640)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = generate(num_sites=1, sentences_per_site=options.sentences, seed=1)[0].data
    sentences = make_sentence_documents(data.train)
    tagset = TagSet(name_types(options.types))
    models: dict[str, Model] = {
        "type scorer": build_scorer(tagset, sentences),
        "token classifier": build_classifier(tagset, sentences),
    }
    seconds = measure_in_turns(
        {name: partial(model.predict, sentences) for name, model in models.items()},
        options.repeats,
    )
    print(f"{options.types} types, {len(sentences)} sentences")
    for name, model in models.items():
        speeds = [len(sentences) / value for value in seconds[name]]
        mentions = sum(len(document.spans) for document in model.predict(sentences))
        print(
            f"{name:17} {statistics.median(speeds):6.0f} sentences/s "
            f"({min(speeds):.0f} to {max(speeds):.0f}), {mentions} mentions"
        )
    ratio = statistics.median(
        other / ours
        for ours, other in zip(
            seconds["type scorer"], seconds["token classifier"], strict=True
        )
    )
    print(f"type-scorer ratio={ratio:.2f} against the token classifier")


if __name__ == "__main__":
    main()
