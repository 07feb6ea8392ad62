"""The CRF against pytorch-crf: loss with gradient, and decoding. One thread, float32.

    python benchmarks/crf.py

Batch 32, 40 and 128 tokens, 11 tags. Both programs get the same parameters, and losses,
gradients and best sequences are compared before anything is timed. The two are timed in
turns; medians. Expected of the loss: at least 10 times at 40 tokens and 15 times at
128.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torchcrf
from torch import Tensor

from fednotes.taggers.crf import CRF

BATCH, TAGS = 32, 11


def pair(seed: int) -> tuple[CRF, torchcrf.CRF]:
    """Our CRF and pytorch-crf's with equal parameters."""
    torch.manual_seed(seed)
    ours, theirs = CRF(TAGS), torchcrf.CRF(TAGS, batch_first=True)
    with torch.no_grad():
        theirs.start_transitions.copy_(ours.start)
        theirs.transitions.copy_(ours.transitions)
        theirs.end_transitions.copy_(ours.end)
    return ours, theirs


def in_turns(
    first: Callable[[], object], second: Callable[[], object], repeats: int
) -> list[float]:
    """Median seconds of each, timed alternately so that a busy machine slows down both."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for function, durations in zip((first, second), seconds, strict=True):
            begin = time.perf_counter()
            function()
            durations.append(time.perf_counter() - begin)
    return [statistics.median(durations) for durations in seconds]


def compare(tokens: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Seconds (ours, theirs) of "loss" and "decode", after a check that both agree."""
    ours, theirs = pair(seed=0)
    x = torch.randn(BATCH, tokens, TAGS, requires_grad=True)
    gold = torch.randint(0, TAGS, (BATCH, tokens))
    lengths, mask = (
        torch.full((BATCH,), tokens),
        torch.ones(BATCH, tokens, dtype=torch.bool),
    )

    def our_loss() -> Tensor:
        loss = ours.loss(x, gold, lengths).mean()
        loss.backward()
        return loss

    def their_loss() -> Tensor:
        loss = -theirs(x, gold, mask=mask, reduction="mean")
        loss.backward()
        return loss

    def forget() -> Tensor:
        gradient = x.grad
        assert gradient is not None
        for module in (ours, theirs):
            module.zero_grad()
        x.grad = None
        return gradient

    results = []
    for function in (our_loss, their_loss):
        loss = function()
        results.append((loss.detach(), forget()))
    for ours_value, their_value in zip(*results, strict=True):
        torch.testing.assert_close(ours_value, their_value, atol=1e-4, rtol=1e-5)
    assert ours.decode(x, lengths).tolist() == theirs.decode(x, mask=mask)
    return {
        "loss": tuple(in_turns(our_loss, their_loss, repeats)),
        "decode": tuple(
            in_turns(
                lambda: ours.decode(x, lengths),
                lambda: theirs.decode(x, mask=mask),
                repeats,
            )
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=60)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    lines = []
    for tokens in (40, 128):
        for task, (ours, theirs) in compare(tokens, repeats).items():
            print(
                f"{task} {tokens} tokens: {ours * 1e3:.3f} ms, pytorch-crf {theirs * 1e3:.3f} ms"
            )
            ratio = theirs / ours
            lines.append(f"crf-{task}-{tokens} ratio={ratio:.1f} against pytorch-crf")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
