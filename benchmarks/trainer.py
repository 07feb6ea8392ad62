"""Seconds of fine-tuning an encoder, and of transformers' Trainer with the same encoder.

    python benchmarks/trainer.py [--train 800] [--test 940] [--epochs 4]
        [--seeds 1 2 3]

Both programs train MiniLM and a classifier to find mentions in the same sentences, with
the same number of epochs, batch size and learning rate, and then find mentions in the
same test sentences. fednotes uses its default precision. Trainer runs in float32 and, on
a processor that has instructions for it, in bfloat16 (`bf16`); its faster run counts.
Neither program trains the word embeddings, unless `--all` is given.

Seconds are CPU seconds on one thread, from sentences in memory to the trained model.
The mentions in the test sentences are found after that. Sentences are those of NCBI
disease in $FEDNOTES_CORPORA if it is set, and generated ones otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fednotes as fn
from fednotes.core.types import Document, Span, TagSet
from fednotes.data.tags import decode_tags, encode_tags
from fednotes.data.text import tokenize
from fednotes.encoders.pretrained import find_encoder_directory
from fednotes.training.precision import has_bfloat16

sys.path.append(str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
import light_tagger
import predict
from scratch import scratch

BATCH = 16
LEARNING_RATE = 3e-4
WARMUP = 0.1
WEIGHT_DECAY = 0.01
NO_LABEL = -100  # of sub-words that the loss ignores
Parts = dict[str, tuple[Document, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", type=int, default=800, help="training sentences")
    parser.add_argument("--test", type=int, default=None, help="test sentences")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--all", action="store_true", help="also train the word embeddings"
    )
    options = parser.parse_args()
    if find_spec("accelerate") is None:
        print("left out: pip install accelerate")
        return
    torch.set_num_threads(1)
    name, parts = predict.corpus(options.train)
    parts["test"] = parts["test"][: options.test]
    print(
        f"{name}: {len(parts['train'])} sentences to train, {len(parts['test'])} to read, "
        f"{options.epochs} epochs"
    )
    ratios = [compare(parts, seed, options) for seed in options.seeds]
    print(
        f"trainer ratio={statistics.median(ratios):.2f} against transformers' Trainer"
    )


def compare(parts: Parts, seed: int, options: argparse.Namespace) -> float:
    """Print the seconds and F1 of both programs; return the ratio of the seconds."""
    start = time.process_time()
    model = train_ours(parts, seed, options)
    seconds = time.process_time() - start
    texts = [document.text for document in parts["test"]]
    spans = [document.spans for document in model.stream(texts, batch=256)]
    show("fednotes", seed, seconds, predict.f1(parts["test"], spans))

    fastest = float("inf")
    precisions = ["float32"]
    if has_bfloat16(torch.device("cpu")):
        precisions.append("bfloat16")
    for precision in precisions:
        start = time.process_time()
        trainer = train_with_trainer(parts, seed, precision, options)
        other_seconds = time.process_time() - start
        spans = find_mentions(trainer, parts)
        f1 = predict.f1(parts["test"], spans)
        show(f"Trainer, {precision}", seed, other_seconds, f1)
        fastest = min(fastest, other_seconds)
    return fastest / seconds


def show(program: str, seed: int, seconds: float, f1: float) -> None:
    """Print the seconds and the strict F1 of a program."""
    print(f"seed {seed}  {program:18} {seconds:6.1f} s  F1 {f1:.1f}", flush=True)


def train_ours(parts: Parts, seed: int, options: argparse.Namespace) -> fn.MentionModel:
    """Train a site alone, as `fednotes simulate` does."""
    training = {
        "cycles": options.epochs,
        "local_epochs": 1,
        "server": "average",
        "batch": "each",
        "batch_size": BATCH,
        "learning_rate": LEARNING_RATE,
        "warmup": WARMUP,
        "weight_decay": WEIGHT_DECAY,
        "evaluate_every": options.epochs,
    }
    job = {
        "method": "finetune",
        "seed": seed,
        "training": training,
        "model": {"train": "all" if options.all else "encoder"},
    }
    # The test sentences are read after the training, as by Trainer.
    few = parts | {part: parts[part][:1] for part in ("valid", "test")}
    with scratch() as path:
        folder = light_tagger.train_alone(job, few, path)
        model = fn.load(folder)
    assert isinstance(model, fn.MentionModel)
    return model


def train_with_trainer(
    parts: Parts, seed: int, precision: str, options: argparse.Namespace
) -> Any:
    """Return transformers' Trainer after it has trained."""
    from transformers import (
        AutoModelForTokenClassification,
        AutoTokenizer,
        DataCollatorForTokenClassification,
        PrinterCallback,
        Trainer,
        TrainingArguments,
        logging,
        set_seed,
    )

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    set_seed(seed)
    directory = str(find_encoder_directory("minilm"))
    tags = list_types(parts["train"])
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForTokenClassification.from_pretrained(
        directory, num_labels=len(tags.tags)
    )
    model.get_input_embeddings().weight.requires_grad_(options.all)
    with scratch() as path:
        arguments = TrainingArguments(
            output_dir=str(path),
            num_train_epochs=options.epochs,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=32,
            learning_rate=LEARNING_RATE,
            warmup_steps=WARMUP,  # a fraction
            weight_decay=WEIGHT_DECAY,
            seed=seed,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=precision == "bfloat16",
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=[encode(d, tokenizer, tags) for d in parts["train"]],
            data_collator=DataCollatorForTokenClassification(tokenizer),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return trainer


def find_mentions(trainer: Any, parts: Parts) -> list[list[Span]]:
    """Return the mentions in each test sentence that Trainer finds."""
    tags = list_types(parts["train"])
    tokenizer = trainer.data_collator.tokenizer
    test = [encode(document, tokenizer, tags) for document in parts["test"]]
    scores = trainer.predict(test).predictions
    rows = zip(parts["test"], test, scores.argmax(-1), strict=True)
    return [decode(document, example, row, tags) for document, example, row in rows]


def list_types(documents: Sequence[Document]) -> TagSet:
    """Return the entity types in documents."""
    return TagSet(tuple(sorted({s.label for d in documents for s in d.spans})))


def encode(document: Document, tokenizer: Any, tags: TagSet) -> dict[str, list[int]]:
    """Return a sentence for Trainer; the first sub-word of a word has its tag."""
    words = tokenize(document.text)
    tag_ids, _ = encode_tags(document.spans, words, tags)
    encoded = tokenizer(
        [document.text[start:end] for start, end in words.tolist()],
        is_split_into_words=True,
        truncation=True,
        max_length=256,
    )
    labels = []
    previous = None
    for word in encoded.word_ids():
        is_first = word is not None and word != previous
        labels.append(int(tag_ids[word]) if is_first else NO_LABEL)
        previous = word
    names = ("input_ids", "attention_mask")
    return {name: encoded[name] for name in names} | {"labels": labels}


def decode(
    document: Document, example: dict[str, list[int]], row: np.ndarray, tags: TagSet
) -> list[Span]:
    """Return the mentions in a sentence by the tags of its words."""
    words = tokenize(document.text)
    labels = np.array(example["labels"])
    tag_ids = row[: len(labels)][labels != NO_LABEL]
    return decode_tags(tag_ids, words[: len(tag_ids)], tags)


if __name__ == "__main__":
    main()
