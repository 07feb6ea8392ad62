"""Time of the span evaluator and of seqeval on 100,000 sentences.

    python benchmarks/metrics.py [--sentences 100000]

Both compute strict scores by type on the same random corpus. seqeval starts from tag
lists, fednotes from documents (what a tagger returns); "with tags" adds the time of a
plain loop that turns the tag lists into documents. fednotes computes micro and macro
scores, both relaxed definitions and unseen forms in the same call.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

from fednotes.core.types import Document, Span
from fednotes.metrics.spans import SpanCounts, collect_forms

Tags = list[list[str]]


def random_tags(sentences: int, seed: int = 0) -> tuple[Tags, Tags]:
    """Return gold tags and predicted tags, of which one in twelve is wrong.

    There are about 1.5 mentions in 20 tokens.
    """
    rng = np.random.default_rng(seed)
    types = ("ADR", "Chemical", "Disease", "Drug")
    gold, predicted = [], []
    for length in rng.integers(5, 36, sentences):
        tags = ["O"] * length
        for start in rng.integers(0, length, rng.integers(0, 4)):
            kind = types[start % len(types)]
            stop = min(length, start + 1 + start % 3)
            tags[start:stop] = [f"B-{kind}", *[f"I-{kind}"] * (stop - start - 1)]
        wrong = set(np.flatnonzero(rng.random(length) < 1 / 12).tolist())
        gold.append(tags)
        predicted.append(
            [("O", "B-Drug")[i % 2] if i in wrong else t for i, t in enumerate(tags)]
        )
    return gold, predicted


def documents(tags: Tags) -> list[Document]:
    """Return a document for each sentence; token i has the characters 5i to 5i + 4."""
    return [
        Document(str(n), "word " * len(row), spans(row)) for n, row in enumerate(tags)
    ]


def spans(tags: Sequence[str]) -> tuple[Span, ...]:
    """Return the mentions of a sentence; an I- tag without a beginning starts a mention."""
    runs, begin, kind = [], 0, ""
    for i, tag in enumerate([*tags, "O"]):
        if kind and tag != f"I-{kind}":
            runs.append(Span(5 * begin, 5 * i - 1, kind))
            kind = ""
        if not kind and tag != "O":
            begin, kind = i, tag[2:]
    return tuple(runs)


def timed(run: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Return the shortest time of some repeats, in seconds, and the result."""
    best = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        result = run()
        best = min(best, time.perf_counter() - begin)
    return best, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sentences", type=int, default=100_000)
    gold_tags, predicted_tags = random_tags(parser.parse_args().sentences)
    gold, predicted = documents(gold_tags), documents(predicted_tags)
    training_forms = collect_forms(gold[: len(gold) // 2])
    conversion, _ = timed(lambda: (documents(gold_tags), documents(predicted_tags)), 1)
    ours, counts = timed(
        lambda: SpanCounts.of(gold, predicted, training_forms).scores(), 3
    )
    reference, (_, _, f1, _) = timed(
        lambda: precision_recall_fscore_support(
            gold_tags, predicted_tags, average=None
        ),
        1,
    )
    our_f1 = [
        counts["by_type"][name]["strict"]["f1"] for name in sorted(counts["by_type"])
    ]
    if not np.allclose(our_f1, f1, atol=1e-12):
        raise SystemExit(f"scores differ: {our_f1} and {f1}")
    mentions = sum(len(d.spans) for d in gold + predicted)
    print(
        f"{len(gold)} sentences, {mentions} mentions, strict F1 {counts['strict']['f1']:.4f}"
    )
    print(
        f"fednotes {ours:.2f} s (with tags {ours + conversion:.2f} s), seqeval {reference:.2f} s"
    )
    print(f"metrics ratio={reference / ours:.1f} against seqeval")


if __name__ == "__main__":
    main()
