"""Per-sentence gradients of the prompts q, in one backward pass and in the paper's loop.

    python benchmarks/per_sample_gradients.py [--base] [--threads 1]

There are three batches of 32, grouped by length as in training, from 512 sentences of 6
to 30 words with up to four entities; the site annotates three of the five types. The
model is a random BART with 6 + 2 layers of width 384, the shape that `tools/graft.py`
makes from MiniLM; with --base, a model of bart-base's size is measured, too. First, the
results of both are compared in float64 (each sentence's source gradient and the batch's
target gradient). Then they are timed in turns, in float32; times are medians of CPU
seconds. The loop computes both gradients of one sentence after another, as Algorithm 2
does.

Expected: 2.3 times as fast for the smaller model. Most of the time is matrix products, and
about half of the sentences have a target, which costs a second backward pass.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor

from fednotes.core.types import Document, Span, TagSet
from fednotes.data.batches import draw_epoch_batches
from fednotes.taggers.pointer import PointerCorpus
from fednotes.taggers.prompt_bart import PromptBart, PromptBartConfig, build_prompt_bart

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from scratch import scratch

BATCH, SENTENCES, BATCHES = 32, 512, 3
TAGS = TagSet(("Drug", "ADE", "Disease", "Finding", "Symptom"))
KNOWN = {"Drug", "ADE", "Disease"}
WORDS = """drug ade disease finding symptom patient denies pain fever nausea after before the of
with and no was given daily dose mild severe chronic acute chest abdominal left right history
hypertension diabetes aspirin metformin insulin warfarin heparin rash cough dizziness""".split()


def build(folder: Path, width: int, decoder: int, vocabulary: int) -> PromptBart:
    """Return a random BART with prompts, 6 encoder layers and `decoder` decoder layers."""
    words = ["<s>", "<pad>", "</s>", "<unk>", *WORDS]
    tokenizer = transformers.BertTokenizerFast(
        vocab={word: i for i, word in enumerate(words)},
        cls_token="<s>",
        sep_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<unk>",
    )
    tokenizer.save_pretrained(folder)
    config = transformers.BartConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=6,
        decoder_layers=decoder,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        max_position_embeddings=512,
        init_std=0.1,
    )
    torch.manual_seed(0)
    transformers.BartModel(config).save_pretrained(folder)
    return build_prompt_bart(PromptBartConfig(backbone=str(folder)), TAGS, seed=0)


def documents(rng: np.random.Generator) -> list[Document]:
    """Return documents of one sentence each; every third has no entity."""
    notes = []
    for number in range(SENTENCES):
        words = rng.choice(WORDS[5:], rng.integers(6, 31)).tolist()
        at = np.cumsum([0, *(len(word) + 1 for word in words)])
        first = rng.choice(
            len(words) - 1, 0 if number % 3 == 0 else rng.integers(1, 5), False
        )
        spans = [
            Span(int(at[i]), int(at[i + 1 + i % 2]) - 1, str(rng.choice(TAGS.types)))
            for i in sorted(first.tolist())
        ]
        notes.append(Document(str(number), " ".join(words), tuple(spans)))
    return notes


def loop(
    model: PromptBart, corpus: PointerCorpus, batch: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Return the same as `gradients`, computed for one sentence after another."""
    q = model.trainable()[model.transfer]
    rows, total = [], q.new_zeros(q.numel())
    for sentence in batch:
        losses = model.losses(corpus, [sentence])
        has_target = bool(losses.target.detach().any())
        (source,) = torch.autograd.grad(losses.source.sum(), q, retain_graph=has_target)
        rows.append(source.flatten())
        if has_target:
            total = total + torch.autograd.grad(losses.target.sum(), q)[0].flatten()
    return torch.stack(rows), total


def in_turns(
    first: Callable[[], object], second: Callable[[], object], repeats: int
) -> list[float]:
    """Return the median CPU seconds of both functions.

    They are called in turns, so that other load on the machine affects both.
    """
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for function, durations in zip((first, second), seconds, strict=True):
            begin = time.process_time()
            function()
            durations.append(time.process_time() - begin)
    return [statistics.median(durations) for durations in seconds]


def compare(name: str, model: PromptBart, repeats: int) -> float:
    """Check that both programs agree; return how many times faster one pass is."""
    rng = np.random.default_rng(0)
    corpus = model.prepare(documents(rng))
    corpus = model.annotate(corpus, corpus.documents, KNOWN)
    batches = draw_epoch_batches(corpus.lengths, BATCH, rng)[:BATCHES]
    model.eval().double()
    shared = model.frozen
    model.frozen = copy.deepcopy(shared)
    model.frozen.view.double()
    pairs = zip(
        model.gradients(corpus, batches[0]),
        loop(model, corpus, batches[0]),
        strict=True,
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(
            ours, theirs, rtol=1e-6, atol=1e-6 * float(theirs.abs().max())
        )
    model.frozen = shared
    model.float()
    together, one_by_one = in_turns(
        lambda: [model.gradients(corpus, batch) for batch in batches],
        lambda: [loop(model, corpus, batch) for batch in batches],
        repeats,
    )
    milliseconds = [duration * 1e3 / BATCHES for duration in (together, one_by_one)]
    print("{}: a batch {:.0f} ms, loop {:.0f} ms".format(name, *milliseconds))
    return one_by_one / together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--base", action="store_true", help="also one of bart-base's size"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.disable_progress_bar()
    with scratch() as folder:
        if arguments.base:
            base = build(folder / "base", width=768, decoder=6, vocabulary=50265)
            compare("bart-base's size", base, min(arguments.repeats, 3))
        small = build(folder / "small", width=384, decoder=2, vocabulary=30522)
        ratio = compare("6 + 2 layers of 384", small, arguments.repeats)
    print(f"per-sample-gradients ratio={ratio:.1f} against the loop")


if __name__ == "__main__":
    main()
