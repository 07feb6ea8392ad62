"""Notes per second of `fednotes predict` and of other programs, on two cores.

    python benchmarks/notes.py [--notes 8000] [--tuned-notes 400]
        [--concept-notes 40000] [--sentences 2000] [--tuned-sentences 600]
        [--only tagger]

Three comparisons read the same generated notes:

    tagger      the light tagger `hash-cnn`, and the `ner` of spaCy with its default
                settings, both trained on the same generated sentences;
                `nlp.pipe(n_process=2)`
    classifier  a token classifier with MiniLM, and transformers' pipeline with the
                exported model in batches of 32 and with two threads
    concepts    the phenotypes of patients by the concepts in their notes, and spaCy's
                PhraseMatcher with the same terms (`nlp.pipe(n_process=2)`)

fednotes runs as a whole command with two workers, from a file of notes to a file of
predictions. The other programs are timed from texts in memory to mentions in memory. In
both, the time of a tenth of the notes is subtracted, so the start of processes does not
count.

Seconds are wall-clock seconds, so use an idle machine.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import sys
import time
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import fednotes as fn
from fednotes.apps.phenotyping.synthetic import build_synthetic_dictionary
from fednotes.data.split import make_sentence_documents
from fednotes.data.synthetic import generate

sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parent / "helpers"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
import light_tagger
import mimic
import predict_workers
from command_runs import NotesFile, measure_speed
from scratch import scratch

WORKERS = 2
EPOCHS = 3
PIPELINE_BATCH = 32
TEXTS_OF_A_NOTE = 4


def main() -> None:
    comparisons: dict[str, Callable[[Path, argparse.Namespace], float]] = {
        "tagger": compare_taggers,
        "classifier": compare_classifiers,
        "concepts": compare_concepts,
    }
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--notes", type=int, default=8_000)
    parser.add_argument(
        "--tuned-notes", type=int, default=400, help="notes of the token classifier"
    )
    parser.add_argument(
        "--concept-notes", type=int, default=40_000, help="notes with concepts"
    )
    parser.add_argument(
        "--sentences", type=int, default=2_000, help="that the taggers learn from"
    )
    parser.add_argument(
        "--tuned-sentences",
        type=int,
        default=600,
        help="that the token classifier learns from",
    )
    parser.add_argument("--only", choices=[*comparisons], nargs="+")
    options = parser.parse_args()
    if find_spec("spacy") is None:
        print("left out: needs the extra spacy (in a clone, pip install '.[spacy]')")
        return
    for name in options.only or comparisons:
        with scratch() as folder:
            ratio = comparisons[name](folder, options)
        other = "transformers" if name == "classifier" else "spaCy"
        print(f"notes-{name} ratio={ratio:.2f} against {other}", flush=True)


def compare_taggers(folder: Path, options: argparse.Namespace) -> float:
    """Return how many times as fast the light tagger is as spaCy's `ner`."""
    parts = generate_parts(options.sentences)
    training = light_tagger.JOB["training"] | {"epochs": EPOCHS}
    job = light_tagger.JOB | {"seed": 1, "training": training}
    model = light_tagger.train_alone(job, parts, folder)
    nlp = light_tagger.train_spacy_pipeline(parts, EPOCHS, 1)
    few, many = write_notes(folder, options.notes)
    ours = measure_speed(model, few, many, WORKERS)
    return ours / pipe_through_spacy(nlp, _read_texts(few), _read_texts(many))


def compare_classifiers(folder: Path, options: argparse.Namespace) -> float:
    """Return how many times as fast a token classifier is as transformers' pipeline."""
    # Imported here, because the other comparisons run without this application.
    from fednotes.apps.serving.exports import export

    job = {"method": "finetune", "seed": 1, "training": {"cycles": 4}}
    parts = generate_parts(options.tuned_sentences)
    model = light_tagger.train_alone(job, parts, folder)
    export(model, "hf", folder / "hf")
    few, many = write_notes(folder, options.tuned_notes)
    ours = measure_speed(model, few, many, WORKERS)
    return ours / run_pipeline(folder / "hf", _read_texts(few), _read_texts(many))


def compare_concepts(folder: Path, options: argparse.Namespace) -> float:
    """Return how many times as fast concepts are found as by spaCy's PhraseMatcher."""
    import spacy
    from spacy.matcher import PhraseMatcher

    few = mimic.write_corpus(folder / "few", options.concept_notes // 10).notes
    many = mimic.write_corpus(folder / "many", options.concept_notes).notes
    model = mimic.train_model(folder / "run")
    ours = measure_speed(model, few, many, WORKERS)

    nlp = spacy.blank("en")
    matcher = PhraseMatcher(nlp.vocab, attr="LOWER")
    matcher.add("concept", list(nlp.pipe(build_synthetic_dictionary().terms)))

    def find_phrases(doc: Any) -> Any:
        doc.set_ents(spacy.util.filter_spans(matcher(doc, as_spans=True)))
        return doc

    spacy.Language.component("phrases", func=find_phrases)
    nlp.add_pipe("phrases")
    return ours / pipe_through_spacy(nlp, _read_table(few), _read_table(many))


def generate_parts(sentences: int) -> light_tagger.Parts:
    """Return the generated sentences of one site."""
    data = generate(num_sites=1, sentences_per_site=sentences, seed=1)[0].data
    parts = {"train": data.train, "valid": data.valid, "test": data.test}
    return {part: list(make_sentence_documents(some)) for part, some in parts.items()}


def write_notes(folder: Path, number: int) -> tuple[NotesFile, NotesFile]:
    """Write a file with a tenth of a number of generated notes, and one with all."""
    few = predict_workers.write_notes(folder, number // 10, TEXTS_OF_A_NOTE)
    return few, predict_workers.write_notes(folder, number, TEXTS_OF_A_NOTE)


def _read_texts(notes: NotesFile) -> list[str]:
    """Return the texts of generated notes."""
    return [document.text for document in fn.read(notes.path)]


def _read_table(notes: NotesFile) -> list[str]:
    """Return the texts of a compressed table of notes."""
    with gzip.open(notes.path, "rt", encoding="utf-8", newline="") as file:
        return [row["TEXT"] for row in csv.DictReader(file)]


def pipe_through_spacy(nlp: Any, few: list[str], many: list[str]) -> float:
    """Return the notes per second of spaCy's `nlp.pipe` with as many processes."""

    def count_mentions(texts: list[str]) -> int:
        docs = nlp.pipe(texts, batch_size=256, n_process=WORKERS)
        return sum(len(doc.ents) for doc in docs)

    return _measure_speed_of("spaCy", count_mentions, few, many)


def run_pipeline(folder: Path, few: list[str], many: list[str]) -> float:
    """Return the notes per second of transformers' pipeline of an exported model."""
    from transformers import logging, pipeline

    logging.disable_progress_bar()
    torch.set_num_threads(WORKERS)
    find = pipeline("token-classification", str(folder), aggregation_strategy="first")

    def count_mentions(texts: list[str]) -> int:
        with warnings.catch_warnings(action="ignore"):
            return sum(map(len, find(texts, batch_size=PIPELINE_BATCH)))

    return _measure_speed_of("transformers", count_mentions, few, many)


def _measure_speed_of(
    program: str,
    count_mentions: Callable[[list[str]], int],
    few: list[str],
    many: list[str],
) -> float:
    """Return the notes per second of another program, without its start."""
    start = time.perf_counter()
    count_mentions(few)
    middle = time.perf_counter()
    mentions = count_mentions(many)
    seconds = time.perf_counter() - middle
    speed = (len(many) - len(few)) / (seconds - (middle - start))
    print(
        f"{program}: {seconds:.1f} s, {mentions:,} mentions, {speed:.0f} notes/s "
        "without the start"
    )
    return speed


if __name__ == "__main__":
    main()
