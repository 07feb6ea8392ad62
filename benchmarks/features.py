"""Time to get a batch of frozen features: read from the cache, or encoded again.

    python benchmarks/features.py                 the packaged MiniLM
    python benchmarks/features.py --elmo          ELMo at its published size, random weights
    python benchmarks/features.py --encoder PATH  any other encoder

The benchmark uses one thread, and sentences of 8 to 40 random clinical words. It prints
the encoder's speed, the median time of a batch of 32 in both ways, and in the last line
their ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from fednotes.data.text import Passage
from fednotes.encoders.features import compute_features_with_cache, load_encoder

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
from passages import passage
from scratch import scratch

BATCH = 32
STEMS = (
    "cardi",
    "metopr",
    "nephr",
    "hepat",
    "gastr",
    "neur",
    "ator",
    "lisin",
    "derm",
    "angi",
)
ENDINGS = (
    "olol",
    "itis",
    "opathy",
    "vastatin",
    "opril",
    "ectomy",
    "algia",
    "osis",
    "emia",
)
COMMON = (
    "the",
    "patient",
    "was",
    "given",
    "mg",
    "of",
    "for",
    "denies",
    "and",
    "daily",
    ",",
    ".",
)


def corpus(sentences: int) -> tuple[list[Passage], np.ndarray]:
    """Return sentences and the bounds of their tokens.

    Half of the tokens are long clinical words.
    """
    rng = np.random.default_rng(0)
    forms = (*COMMON, *(stem + ending for stem in STEMS for ending in ENDINGS))
    lengths = rng.integers(8, 41, sentences)
    total = int(lengths.sum())
    common = rng.integers(0, len(COMMON), total)
    rare = rng.integers(len(COMMON), len(forms), total)
    form = np.where(rng.random(total) < 0.5, common, rare)
    bounds = np.cumsum([0, *lengths])
    return [passage([forms[i] for i in form[a:b]]) for a, b in pairwise(bounds)], bounds


def write_elmo(directory: Path) -> None:
    """Write an ELMo with random weights in its published layout and size (375 MB)."""
    import h5py

    filters = [[1, 32], [2, 32], [3, 64], [4, 128], [5, 256], [6, 512], [7, 1024]]
    cnn = {
        "activation": "relu",
        "embedding": {"dim": 16},
        "filters": filters,
        "n_highway": 2,
    }
    lstm = {
        "dim": 4096,
        "projection_dim": 512,
        "n_layers": 2,
        "cell_clip": 3,
        "proj_clip": 3,
    }
    options = {
        "char_cnn": {**cnn, "max_characters_per_token": 50, "n_characters": 262},
        "lstm": {**lstm, "use_skip_connections": True},
    }
    (directory / "options.json").write_text(json.dumps(options))
    shapes: dict[str, tuple[int, ...]] = {"char_embed": (261, 16)}
    for i, (width, n) in enumerate(filters):
        shapes |= {f"CNN/W_cnn_{i}": (1, width, 16, n), f"CNN/b_cnn_{i}": (n,)}
    for k in range(2):
        for part in ("carry", "transform"):
            shapes |= {
                f"CNN_high_{k}/W_{part}": (2048, 2048),
                f"CNN_high_{k}/b_{part}": (2048,),
            }
    shapes |= {"CNN_proj/W_proj": (2048, 512), "CNN_proj/b_proj": (512,)}
    for way in range(2):
        for layer in range(2):
            name = f"RNN_{way}/RNN/MultiRNNCell/Cell{layer}/LSTMCell"
            shapes |= {f"{name}/W_0": (1024, 16384), f"{name}/B": (16384,)}
            shapes |= {f"{name}/W_P_0": (4096, 512)}
    rng = np.random.default_rng(0)
    with h5py.File(directory / "weights.hdf5", "w") as file:
        for name, shape in shapes.items():
            file[name] = 0.03 * rng.standard_normal(shape, dtype=np.float32)


def gather(features: np.ndarray, bounds: np.ndarray, batch: np.ndarray) -> torch.Tensor:
    """Return padded float32 features of a batch: (batch, tokens, layers, dim)."""
    lengths = bounds[batch + 1] - bounds[batch]
    positions = np.arange(lengths.max())
    inside = positions < lengths[:, None]  # (batch, tokens)
    out = torch.zeros(*inside.shape, *features.shape[1:])
    rows = features[(bounds[batch][:, None] + positions)[inside]]
    out[torch.from_numpy(inside)] = torch.from_numpy(rows).float()
    return out


def median_seconds(
    run: Callable[[np.ndarray], object], batches: list[np.ndarray]
) -> float:
    """Return the median seconds of a batch; the first one warms up and is left out."""
    seconds = []
    for batch in batches:
        start = time.perf_counter()
        run(batch)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description="cached against on-the-fly frozen features"
    )
    parser.add_argument("--encoder", default="minilm")
    parser.add_argument("--elmo", action="store_true")
    parser.add_argument("--sentences", type=int, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with scratch() as path:
        folder = str(path)
        spec, sentences = arguments.encoder, arguments.sentences or 512
        if arguments.elmo:
            write_elmo(Path(folder))
            spec, sentences = folder, arguments.sentences or 128
        encoder = load_encoder(spec)
        passages, bounds = corpus(sentences)
        tokens = int(bounds[-1])
        start = time.perf_counter()
        features = compute_features_with_cache(
            encoder, passages, Path(folder) / "cache"
        )
        seconds = time.perf_counter() - start
        rate, size = sentences / seconds, features.nbytes / sentences / 1024
        print(f"encode    {rate:8.1f} sentences/s, {tokens / seconds:.0f} tokens/s")
        print(
            f"cache     {size:8.1f} KiB a sentence ({encoder.layers} x {encoder.dim} float16)"
        )
        rng = np.random.default_rng(1)
        batches = [rng.choice(sentences, BATCH, replace=False) for _ in range(41)]
        slow = median_seconds(
            lambda b: encoder.encode([passages[i] for i in b]), batches[:5]
        )
        fast = median_seconds(lambda b: gather(features, bounds, b), batches)
        print(f"on the fly {1000 * slow:9.2f} ms a batch of {BATCH}")
        print(f"cached     {1000 * fast:9.2f} ms")
        print(f"features ratio={slow / fast:.0f} against on-the-fly")


if __name__ == "__main__":
    main()
