"""The cost of the in-process engine, compared with a hand-written loop of FedNER.

    python benchmarks/engine.py [--sentences 300] [--epochs 2] [--repeats 5]

Both train three sites by Algorithm 1 of FedNER, with the same taggers, mini-batches,
dropout and optimizers. The hand-written loop is what one would write for a single
experiment: it has no tasks and no checkpoints, does not count bytes, and adds weighted
gradients in float32 in place. It keeps the tagger after each epoch, as the engine's
sites do. No data are held out, so neither program evaluates. Sites are built before the
measurement, and the shared layers at the end are compared.

Both use one thread. Time is CPU time, because other users of a shared machine affect the
wall clock. The two run in turns, round by round. The ratio compares whole runs, with
their beginning and end, and is the median over repeats. glibc is told to keep freed
memory; otherwise, page faults take up to 5 % of the time, and not the same part in both
programs.

The models are CNN-CLSTM-CRF over 4,096 hashed words, and ELMoNER over 384 random frozen
features. The sentences are those of PsyTAR, BC5CDR and NCBI disease in $FEDNOTES_CORPORA
if this is set, and otherwise generated ones, which are half as long.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import sys
import time
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fednotes.core.seeds import rng_of, seed_of
from fednotes.core.types import SiteData, TagSet
from fednotes.data.batches import draw_epoch_batches
from fednotes.data.formats import read
from fednotes.data.split import make_sentence_documents
from fednotes.data.synthetic import generate
from fednotes.data.tags import list_types
from fednotes.engines.inprocess import InProcess
from fednotes.engines.rounds import RoundResult
from fednotes.methods import fedner
from fednotes.taggers import tagger as tagger_module
from fednotes.taggers.tagger import TaggerConfig, read_tagger_config

sys.path.append(str(Path(__file__).resolve().parent / "helpers"))
from random_encoder import RandomEncoder

MODELS: dict[str, TaggerConfig] = {
    "cnn-clstm-crf": read_tagger_config(
        {"tagger": "cnn-clstm-crf", "hashed_words": 4096}
    ),
    "elmoner": read_tagger_config({"tagger": "elmoner", "contextual": "random"}),
}


class ByHand:
    """A site of the hand-written loop."""

    def __init__(self, data: SiteData, config: fedner.Config) -> None:
        self.id, self.config = data.id, config
        self.tagger = tagger_module.build_tagger(config.model, data.tags, config.seed)
        self.corpus = self.tagger.prepare(data.train)
        self.sentences = self.corpus.sentences
        parameters = self.tagger.trainable()
        self.shared = [
            p for n, p in parameters.items() if n.split(".")[0] not in config.private
        ]
        private = [
            p for n, p in parameters.items() if n.split(".")[0] in config.private
        ]
        self.adam = torch.optim.Adam(private, lr=config.learning_rate, fused=True)
        self.step = 0
        self.batches: list[np.ndarray] = []
        self.saved: list[Tensor] = []

    def gradients(self, shared: list[Tensor], share: int) -> float:
        """Compute the gradients of a mini-batch, and take a step of the private layers.

        The gradients are in `.grad` of the shared parameters. Returns the loss.
        """
        epoch, position = divmod(self.step, -(-self.sentences // share))
        if position == 0:
            rng = rng_of(self.config.seed, "order", self.id, epoch)
            self.batches = draw_epoch_batches(self.corpus.lengths, share, rng)
        with torch.no_grad():
            for mine, received in zip(self.shared, shared, strict=True):
                mine.copy_(received)
        torch.manual_seed(seed_of(self.config.seed, "dropout", self.id, self.step))
        self.tagger.train()
        loss = self.tagger.loss(self.corpus, self.batches[position])
        loss.backward()
        self.adam.step()
        self.adam.zero_grad()
        self.step += 1
        return float(loss.detach())

    def keep(self, shared: list[Tensor]) -> None:
        """Keep a copy of the tagger, as the engine does for its validation F1."""
        with torch.no_grad():
            for mine, received in zip(self.shared, shared, strict=True):
                mine.copy_(received)
        self.saved = [p.detach().clone() for p in self.tagger.parameters()]


def by_hand(sites: list[ByHand], config: fedner.Config) -> Iterator[list[Tensor]]:
    """Run Algorithm 1 in one function; yield the shared parameters after each round."""
    start = tagger_module.build_tagger(
        config.model, config.tags, config.seed
    ).trainable()
    shared = [
        p.detach() for n, p in start.items() if n.split(".")[0] not in config.private
    ]
    adam = torch.optim.Adam(shared, lr=config.learning_rate, fused=True)
    sizes = [site.sentences for site in sites]
    shares = [fedner.compute_batch_share(size, sum(sizes), config) for size in sizes]
    rounds = -(-sum(sizes) // sum(shares))
    for number in range(config.epochs * rounds):
        loss = 0.0
        total = [torch.zeros_like(value) for value in shared]
        for site, share in zip(sites, shares, strict=True):
            weight = site.sentences / sum(sizes)
            loss += weight * site.gradients(shared, share)
            for value, mine in zip(total, site.shared, strict=True):
                value.add_(mine.grad, alpha=weight)
                mine.grad = None
        for value, gradient in zip(shared, total, strict=True):
            value.grad = gradient
        adam.step()
        adam.zero_grad()
        if (number + 1) % rounds == 0:
            for site in sites:
                site.keep(shared)
        yield shared


def compare(config: fedner.Config, data: list[SiteData]) -> tuple[float, float]:
    """Return the CPU seconds of the engine and of the hand-written loop, run in turns."""
    members = [fedner.Site(site, config) for site in data]
    plain = [ByHand(site, config) for site in data]
    loop = by_hand(plain, config)
    shared: list[Tensor] = []
    theirs = 0.0

    def round_by_hand(_: RoundResult) -> None:
        nonlocal shared, theirs
        begin = time.process_time()
        shared = next(loop)
        theirs += time.process_time() - begin

    begin = time.process_time()
    state = fedner.train(InProcess(members, observer=round_by_hand), config)
    ours = time.process_time() - begin - theirs

    for mine, reference in zip(state.tensors.values(), shared, strict=False):
        torch.testing.assert_close(mine, reference, rtol=0, atol=5e-3)
    return ours, theirs


def sites(sentences: int) -> list[SiteData]:
    """Return three sites without held-out data."""
    root = os.environ.get("FEDNOTES_CORPORA")
    if not root:
        generated = generate(num_sites=3, sentences_per_site=sentences, seed=1)
        return [
            SiteData(s.data.id, s.data.tags, s.data.train, (), ()) for s in generated
        ]
    files = ("psytar/train.txt", "bc5cdr/train.tsv", "ncbi_disease/train.tsv")
    corpora = {
        file: make_sentence_documents(read(Path(root) / file))[:sentences]
        for file in files
    }
    return [
        SiteData(n, TagSet(list_types(docs)), docs, (), ())
        for n, docs in corpora.items()
    ]


def keep_freed_memory() -> None:
    """Have glibc keep freed memory.

    This sets M_TRIM_THRESHOLD and M_MMAP_THRESHOLD to 1 GiB, and M_TOP_PAD to 256 MiB.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        for option, value in ((-1, 2**30), (-3, 2**30), (-2, 2**28)):
            libc.mallopt(option, value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sentences", type=int, default=300, help="sentences per site")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    tagger_module.load_encoder = lambda spec: RandomEncoder()
    data = sites(options.sentences)
    tags = reduce(TagSet.union, (site.tags for site in data))
    ratios = []
    for name, model in MODELS.items():
        config = fedner.Config(model=model, epochs=options.epochs, tags=tags)
        seconds = [compare(config, data) for _ in range(options.repeats + 1)][
            1:
        ]  # one to warm up
        ours, theirs = (
            statistics.median(column) for column in zip(*seconds, strict=True)
        )
        ratios.append(statistics.median(a / b for a, b in seconds))
        print(
            f"{name}: {ours:.2f} s, by hand {theirs:.2f} s, ratio {ratios[-1]:.3f}",
            flush=True,
        )
    print(f"engine ratio={max(ratios):.2f} against hand-written loop")


if __name__ == "__main__":
    main()
