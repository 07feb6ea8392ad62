"""What the engine costs: `fedner.train` in the embedded engine against a hand-written loop.

    python benchmarks/engine.py [--sentences 300] [--epochs 2] [--repeats 7] [--ceiling 1.02]

Both train three generated sites by Algorithm 1 of FedNER: the same taggers, mini-batches,
dropout and optimizers. The hand-written loop is what one writes for a single experiment: no
tasks, no checkpoints, no counting of bytes, the weighted sum of the gradients taken in float32
in place. Sites are built before the clock starts. One thread; CPU seconds, because a shared
machine's wall clock measures its other users; the two are timed in turns, and the ratio is the
median over pairs. Before timing, the shared layers that both end with are compared.

Sizes: CNN-CLSTM-CRF over hashed words, and ELMoNER's over 384 random frozen features. Exit
code 1 if a ratio lies above the ceiling.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import torch
from torch import Tensor

from fednotes.core.seeds import rng_of, seed_of
from fednotes.core.types import SiteData, TagSet
from fednotes.data.batches import buckets
from fednotes.data.synthetic import generate
from fednotes.engines.inprocess import InProcess
from fednotes.methods import fedner
from fednotes.models import tagger as tagger_module
from fednotes.models.tagger_config import TaggerConfig, tagger_config

MODELS: dict[str, TaggerConfig] = {
    "cnn-clstm-crf": tagger_config({"tagger": "cnn-clstm-crf", "hashed_words": 4096}),
    "elmoner": tagger_config({"tagger": "elmoner", "contextual": "random"}),
}


@dataclass(frozen=True)
class RandomEncoder:
    """Stands for a frozen encoder: one layer of random features."""

    fingerprint: str = "random"
    layers: int = 1
    dim: int = 384

    def encode(self, sentences: Sequence[Sequence[str]]) -> np.ndarray:
        """(sum of words, 1, dim) float16."""
        tokens = sum(len(words) for words in sentences)
        rng = np.random.default_rng(tokens)
        return rng.standard_normal((tokens, 1, self.dim), dtype=np.float32).astype(np.float16)


class ByHand:
    """One platform of the hand-written loop."""

    def __init__(self, data: SiteData, config: fedner.Config) -> None:
        self.id, self.config = data.id, config
        self.tagger = tagger_module.build_tagger(config.model, data.tags, config.seed)
        self.corpus = self.tagger.prepare(data.train)
        self.sentences = self.corpus.sentences
        parameters = self.tagger.trainable()
        self.shared = [p for n, p in parameters.items() if n.split(".")[0] not in config.private]
        private = [p for n, p in parameters.items() if n.split(".")[0] in config.private]
        self.adam = torch.optim.Adam(private, lr=config.learning_rate, fused=True)
        self.step = 0
        self.batches: list[np.ndarray] = []

    def gradients(self, shared: list[Tensor], share: int) -> float:
        """One mini-batch: gradients into `.grad` of the shared parameters, a private step."""
        epoch, position = divmod(self.step, -(-self.sentences // share))
        if position == 0:
            rng = rng_of(self.config.seed, "order", self.id, epoch)
            self.batches = buckets(self.corpus.lengths, share, rng)
        with torch.no_grad():
            for mine, new in zip(self.shared, shared, strict=True):
                mine.copy_(new)
        torch.manual_seed(seed_of(self.config.seed, "dropout", self.id, self.step))
        self.tagger.train()
        loss = self.tagger.loss(self.corpus, self.batches[position])
        loss.backward()
        self.adam.step()
        self.adam.zero_grad()
        self.step += 1
        return float(loss.detach())


def by_hand(sites: list[ByHand], config: fedner.Config) -> list[Tensor]:
    """Algorithm 1 in one function; returns the shared parameters."""
    start = tagger_module.build_tagger(config.model, config.tags, config.seed).trainable()
    shared = [p.detach() for n, p in start.items() if n.split(".")[0] not in config.private]
    adam = torch.optim.Adam(shared, lr=config.learning_rate, fused=True)
    sizes = [site.sentences for site in sites]
    shares = fedner.batch_shares(sizes, config.batch_size)
    losses = []
    for _ in range(config.epochs * -(-sum(sizes) // config.batch_size)):
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
        losses.append(loss)
    return shared


def compare(config: fedner.Config, data: list[SiteData], repeats: int) -> list[tuple[float, float]]:
    """CPU seconds (engine, hand-written loop) of each repeat; the first warms up and checks."""
    seconds = []
    for repeat in range(repeats + 1):
        members = [fedner.Site(site, config) for site in data]
        plain = [ByHand(site, config) for site in data]
        taken = [0.0, 0.0]
        for which in (0, 1) if repeat % 2 else (1, 0):
            begin = time.process_time()
            if which == 0:
                state = fedner.train(InProcess(members), config)
            else:
                shared = by_hand(plain, config)
            taken[which] = time.process_time() - begin
        if repeat == 0:
            check([member.share for member in members], config, data)
            for ours, theirs in zip(state.tensors.values(), shared, strict=False):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-3)
        else:
            seconds.append((taken[0], taken[1]))
    return seconds


def check(shares: list[int], config: fedner.Config, data: list[SiteData]) -> None:
    """Ties in the shares may fall to other sites; then the two would not do the same work."""
    sizes = [sum(len(d.sentences) for d in site.train) for site in data]
    assert shares == fedner.batch_shares(sizes, config.batch_size), "choose other --sentences"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sentences", type=int, default=300, help="of a site, on average")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ceiling", type=float, default=1.02)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tagger_module.load_encoder = lambda spec: RandomEncoder()
    made = generate(num_sites=3, sentences_per_site=options.sentences, seed=1)
    # No held-out data: judging is no part of the comparison.
    data = [SiteData(s.data.id, s.data.tags, s.data.train, (), ()) for s in made]
    tags = reduce(TagSet.union, (site.tags for site in data))
    ratios = []
    for name, model in MODELS.items():
        config = fedner.Config(model=model, epochs=options.epochs, tags=tags)
        seconds = compare(config, data, options.repeats)
        ours, theirs = (statistics.median(column) for column in zip(*seconds, strict=True))
        ratios.append(statistics.median(a / b for a, b in seconds))
        print(f"{name}: {ours:.2f} s, by hand {theirs:.2f} s, ratio {ratios[-1]:.3f}", flush=True)
    print(f"engine overhead ratio={max(ratios):.2f} against hand-written loop")
    return int(max(ratios) > options.ceiling)


if __name__ == "__main__":
    sys.exit(main())
