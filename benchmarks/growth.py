"""Growth of seconds and memory with the size of the work.

    python benchmarks/growth.py [CASE ...] [--quick] [--json FILE]

    sentences   training of the demo's tagger at one site, two epochs
    types       a step of the CRF (32 sentences of 40 tokens), loss and gradient
    parameters  a sum of three sites' updates in one process
    concepts    terms of a dictionary: matching the same notes
    notes       predictions by `model.stream` on generated notes

Each size runs in a separate process, on one thread. Seconds are CPU seconds. Memory is
the peak of the process beyond what it had before the measured work, after a small piece
of the same work, so that libraries and compiled kernels do not count. The ratio compares
the growth of seconds from the smallest to the largest size with that of the work: 1 is
linear. For types, the work is the number of pairs of tags; for concepts, the number of
characters.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

import fednotes as fn
from fednotes.core.types import TagSet
from fednotes.data.synthetic import generate

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from scratch import scratch


class Case(NamedTuple):
    """A kind of work.

    Attributes:
        prepare: Prepares the work of a size, and yields a function that does it and
            returns its seconds.
        work: The amount of work of a size, in any unit.
        sizes: The sizes, smallest first.
        quick: The sizes with `--quick`.
    """

    prepare: Callable[[int], AbstractContextManager[Callable[[], float]]]
    work: Callable[[int], float]
    sizes: tuple[int, ...]
    quick: tuple[int, ...]


class Row(NamedTuple):
    """The measurement of a size.

    Attributes:
        size: The size.
        seconds: CPU seconds of the work.
        megabytes: Peak memory of the work.
    """

    size: int
    seconds: float
    megabytes: float


@contextmanager
def train_sentences(sentences: int) -> Iterator[Callable[[], float]]:
    """Yield a function that trains with a number of sentences."""
    with scratch() as folder:
        fn.simulate(_training(200, epochs=1), folder / "warm-up")
        job = _training(sentences, epochs=2)
        yield lambda: _seconds(lambda: fn.simulate(job, folder / "run"))


def _training(sentences: int, epochs: int) -> fn.Job:
    """Return a job in which one site trains the demo's tagger."""
    table = {
        "method": "fedner",
        "seed": 1,
        "conditions": ["alone"],
        "synthetic": {"sites": 1, "sentences": sentences},
        "training": {"epochs": epochs, "evaluate_every": epochs},
        "model": fn.job("demo").table["model"],
    }
    return fn.job(table)


@contextmanager
def step_crf(types: int) -> Iterator[Callable[[], float]]:
    """Yield a function that computes losses with their gradients; median seconds."""
    from fednotes.taggers.crf import CRF

    tags = _count_tags(types)
    torch.manual_seed(0)
    crf = CRF(tags)
    emissions = torch.randn(32, 40, tags, requires_grad=True)
    gold = torch.randint(0, tags, (32, 40))
    lengths = torch.full((32,), 40)

    def step() -> None:
        crf.zero_grad()
        crf.loss(emissions, gold, lengths).mean().backward()

    step()
    yield lambda: _median_seconds(step, repeats=30)


def _count_tags(types: int) -> int:
    """Return the number of tags of a number of entity types."""
    return len(TagSet(tuple(f"Type{number:03}" for number in range(types))).tags)


@contextmanager
def add_parameters(parameters: int) -> Iterator[Callable[[], float]]:
    """Yield a function that adds the updates of three sites; median seconds."""
    from fednotes.core.update import Total, Update

    torch.manual_seed(0)
    updates = [Update({"x": torch.randn(parameters)}, weight=1.0) for _ in range(3)]

    small = [Update({"x": torch.randn(10)}, weight=1.0) for _ in range(3)]
    Total.of(iter(small))
    yield lambda: _median_seconds(lambda: Total.of(iter(updates)), repeats=7)


@contextmanager
def match_concepts(terms: int) -> Iterator[Callable[[], float]]:
    """Yield a function that matches 1,000,000 characters of notes; median seconds.

    The memory is that of the matcher.
    """
    import numpy as np
    from concepts import dictionary, texts, vocabulary

    from fednotes.apps.phenotyping.concepts import Matcher

    rng = np.random.default_rng(0)
    words = vocabulary(200_000, rng)
    known_terms = dictionary(terms, words, rng)
    notes = texts(1_000_000, words, rng)
    Matcher(dictionary(100, words, rng), "drop").make_bag(notes[:10])

    def match() -> float:
        matcher = Matcher(known_terms, "drop")
        return _median_seconds(lambda: matcher.make_bag(notes), repeats=3)

    yield match


@contextmanager
def predict_notes(notes: int) -> Iterator[Callable[[], float]]:
    """Yield a function that predicts notes of ten sentences, read as a stream."""
    with scratch() as folder:
        fn.simulate(_training(100, epochs=1), folder / "run")
        model_folder = next(
            path
            for path in (folder / "run" / "alone").glob("**/model")
            if path.is_dir()
        )
        model = fn.load(model_folder)
        assert isinstance(model, fn.MentionModel)

        def predict(count: int) -> None:
            for _ in model.stream(_stream_notes(count)):
                pass

        predict(100)
        yield lambda: _seconds(lambda: predict(notes))


def _stream_notes(count: int) -> Iterator[str]:
    """Yield notes of ten sentences, drawn again and again from 1,000 sentences."""
    site = generate(num_sites=1, sentences_per_site=1000, seed=2)[0].data
    sentences = [document.text for document in site.train]
    for number in range(count):
        first = (number * 7) % (len(sentences) - 10)
        yield "\n".join(sentences[first : first + 10])


def _seconds(function: Callable[[], object]) -> float:
    """Return the CPU seconds of a function."""
    start = time.process_time()
    function()
    return time.process_time() - start


def _median_seconds(function: Callable[[], object], repeats: int) -> float:
    """Return the median CPU seconds of several calls of a function."""
    return statistics.median(_seconds(function) for _ in range(repeats))


CASES = {
    "sentences": Case(
        train_sentences, float, (1000, 2000, 4000, 8000, 16000), (200, 800)
    ),
    "types": Case(
        step_crf,
        lambda types: _count_tags(types) ** 2.0,
        (2, 4, 8, 16, 32, 64),
        (8, 32),
    ),
    "parameters": Case(
        add_parameters,
        float,
        # Smaller sizes fit into a processor's cache.
        (16 * 10**6, 32 * 10**6, 64 * 10**6),
        (16 * 10**6, 32 * 10**6),
    ),
    "concepts": Case(
        match_concepts, lambda terms: 1.0, (10**4, 10**5, 10**6), (10**4, 10**5)
    ),
    "notes": Case(predict_notes, float, (500, 1000, 2000, 4000, 8000), (100, 400)),
}


def run_one(name: str, size: int) -> Row:
    """Measure a size of a case in this process."""
    torch.set_num_threads(1)
    with CASES[name].prepare(size) as work:
        before = _peak_megabytes()
        seconds = work()
        return Row(size, seconds, _peak_megabytes() - before)


def _peak_megabytes() -> float:
    """Return the process's largest resident size so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6


def run_case(name: str, sizes: tuple[int, ...]) -> list[Row]:
    """Measure each size in a process of its own, and print it."""
    rows = []
    # A forked process does not import the libraries again, which takes seconds. Its peak
    # memory begins with what it has of this process, in which nothing computes.
    context = multiprocessing.get_context("fork")
    for size in sizes:
        with ProcessPoolExecutor(1, mp_context=context) as executor:
            row = executor.submit(run_one, name, size).result()
        rows.append(row)
        print(
            f"{name} {row.size:>12,} {row.seconds:12.4f} s {row.megabytes:9.0f} MB",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", choices=[*CASES, []], metavar="CASE")
    parser.add_argument(
        "--quick", action="store_true", help="only two small sizes of each case"
    )
    parser.add_argument("--json", type=Path, help="file to write the measurements to")
    options = parser.parse_args()
    names = options.cases or list(CASES)
    measured = {}
    ratios = []
    for name in names:
        case = CASES[name]
        rows = run_case(name, case.quick if options.quick else case.sizes)
        measured[name] = [row._asdict() for row in rows]
        growth = rows[-1].seconds / rows[0].seconds
        expected = case.work(rows[-1].size) / case.work(rows[0].size)
        ratios.append(
            f"growth-{name} ratio={growth / expected:.2f} against linear growth"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(measured, indent=2) + "\n", "utf-8")
    print("\n".join(ratios))


if __name__ == "__main__":
    main()
