"""A step of masked language modelling, with logits at masked or at all positions.

    python benchmarks/masked_positions.py                  the packaged MiniLM, 32 x 32 tokens
    python benchmarks/masked_positions.py --encoder PATH   any other encoder
    python benchmarks/masked_positions.py --tokens 128 --train all --bfloat16

A step is forward, backward and AdamW on random words, 15 % of them masked, on one
thread. "Everywhere" is the library's own model with `labels=`, on the same parameters.
The benchmark prints the shortest time of each, the difference of the losses (without
dropout), and their ratio in the last line.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from fednotes.encoders.language_model import (
    LanguageModel,
    LanguageModelConfig,
    build_language_model,
)
from fednotes.encoders.packing import Masked, Sequences, mask


def batch(model: LanguageModel, rows: int, tokens: int) -> tuple[Sequences, Masked]:
    """Return sequences of random words that have the same length, and their masks."""
    rng = np.random.default_rng(0)
    words = np.setdiff1d(np.arange(model.vocabulary), model.specials.all)
    ids = rng.choice(words, (rows, tokens))
    ids[:, 0], ids[:, -1] = model.specials.cls, model.specials.sep
    sequences = Sequences(ids, np.zeros_like(ids), np.full(rows, tokens), None)
    return sequences, mask(ids, model.specials, model.vocabulary, rng)


def best_seconds(steps: list[Callable[[], object]], repeats: int) -> list[float]:
    """Return the shortest time of each function.

    They are called in turns, so that other load on the machine affects all of them.
    """
    seconds = [[] for _ in steps]  # type: list[list[float]]
    for _ in range(repeats + 1):
        for step, times in zip(steps, seconds, strict=True):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
    return [min(times[1:]) for times in seconds]  # the first call warms up


def main() -> None:
    parser = argparse.ArgumentParser(description="logits at masked positions only")
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument(
        "--train", choices=("encoder", "all", "top", "lora"), default="encoder"
    )
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    config = LanguageModelConfig(encoder=arguments.encoder, train=arguments.train)
    model = build_language_model(config, seed=0)
    sequences, masked = batch(model, arguments.rows, arguments.tokens)
    inputs, labels = torch.from_numpy(masked.inputs), torch.from_numpy(masked.labels)

    def chosen() -> Tensor:
        return model.loss(sequences, masked).loss

    def everywhere() -> Tensor:
        loss: Tensor = model.model(input_ids=inputs, labels=labels).loss
        return loss

    with torch.no_grad():
        difference = abs(float(chosen()) - float(everywhere()))
    parameters = list(model.trainable().values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    model.train()

    def step(loss: Callable[[], Tensor]) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arguments.bfloat16):
            value = loss()
        optimizer.zero_grad()
        value.backward()
        optimizer.step()

    slow, fast = best_seconds(
        [lambda: step(everywhere), lambda: step(chosen)], arguments.repeats
    )
    print(
        f"everywhere        {1000 * slow:8.0f} ms a step of {arguments.rows} x {arguments.tokens} tokens"
    )
    print(
        f"masked positions  {1000 * fast:8.0f} ms; the loss differs by {difference:.1e}"
    )
    print(f"masked-positions ratio={slow / fast:.1f} against logits at every position")


if __name__ == "__main__":
    main()
