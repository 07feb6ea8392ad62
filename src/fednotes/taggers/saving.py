"""Building any kind of model from a TOML table, and saving and loading it.

A kind is a module of this folder with the constant `KIND` (see `model.py`):
"encoder-tagger" is found in `encoder_tagger`. Other packages add kinds through entry
points (`core/plugins.py`).

A folder holds `model.json` (the description) and `model.safetensors` (the trained
parameters); the two files of a light tagger are called `tagger.json` and
`tagger.safetensors`. A folder is replaced completely or not at all. Frozen parts (word
vectors, encoders, backbones) are not copied into it. The folder records their path and
the SHA-256 of their content, which loading checks.

A token classifier is fine-tuned as a whole and therefore saved as a plain Hugging Face
directory, which other programs can read. Such a directory from another program is
loaded in the same way.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from fednotes import __version__
from fednotes.core import plugins
from fednotes.core.allocation import OversizedModelError, limiting_allocation
from fednotes.core.errors import (
    ConfigError,
    ModelError,
    MovedError,
    raising_if_unreadable,
)
from fednotes.core.parsing import read_json, read_regular
from fednotes.core.settings import (
    Mark,
    build,
    expand_home,
    list_marked_fields,
    make_place_prefix,
)
from fednotes.core.store import write_folder
from fednotes.core.tensors import find_device
from fednotes.core.types import TagSet, is_type_name
from fednotes.encoders.reading import READING
from fednotes.encoders.vectors import WordVectors
from fednotes.taggers.model import Kind, Model, ModelConfig, SavesItself

FORMAT = 1
DEFAULT = "tagger"
# Pairs of tags beyond the number of parameters: those of 4,000 types in BIO.
_SPARE_PAIRS = 2**26
# The file names in a folder, without suffix: of the default kind, and of all others.
STEMS = (DEFAULT, "model")


# ---- kinds of models -----------------------------------------------------------------


def list_model_kinds() -> list[str]:
    """Return the names of all kinds: the default, other built-in kinds, plug-ins."""
    built_in = _list_built_in_kinds()
    return [*built_in, *sorted(plugins.list_added_entries("taggers", built_in))]


def _list_built_in_kinds() -> list[str]:
    """Return the names of the built-in kinds, the default first."""
    modules = plugins.list_modules(*sys.modules[__package__].__path__)
    names = [name.replace("_", "-") for name in modules]
    return sorted(
        filter(_find_built_in_kind, names), key=lambda name: (name != DEFAULT, name)
    )


def _find_kind(name: str) -> Kind | None:
    """Return the kind with this name, or None if there is none.

    Raises:
        ConfigError: A package registers a kind under a name other than the kind's own.
    """
    built_in = _find_built_in_kind(name)
    if built_in is not None:
        return built_in
    entry = plugins.list_added_entries("taggers", _list_built_in_kinds()).get(name)
    if entry is None:
        return None
    kind: Kind = plugins.load_entry(entry, Kind)
    declared = getattr(kind.config, "kind", None)
    if isinstance(declared, str) and declared != name:
        raise ConfigError(
            f"{entry.value} is registered as {name!r} in fednotes.taggers, and its "
            f"specification {kind.config.__name__} has kind = {declared!r}: rename the "
            f"entry point to {declared!r}, the value of `kind`"
        )
    return kind


def _find_built_in_kind(name: str) -> Kind | None:
    """Return the built-in kind with this name, or None if there is none."""
    module = f"{__package__}.{name.replace('-', '_')}"
    if "." in name or "_" in name or find_spec(module) is None:
        return None
    kind: Kind | None = getattr(import_module(module), "KIND", None)
    return kind


def find_config_class(kind: str) -> type[ModelConfig]:
    """Return the class of a kind's specification.

    Raises:
        ConfigError: There is no such kind.
    """
    entry = _find_kind(kind)
    if entry is None:
        hint = plugins.suggest_entry(kind, "taggers", list_model_kinds())
        raise ConfigError(f"unknown kind {kind!r}: {hint}")
    return entry.config


def read_model_config(table: Mapping[str, Any], where: str = "model") -> ModelConfig:
    """Read a model's specification from a TOML table with the key `kind`.

    Args:
        table: The table. Without `kind` it describes a light tagger.
        where: The name of the table in messages; "" if the caller adds it.

    Raises:
        ConfigError: The kind or a key is unknown (the message suggests the nearest
            name), or a value has the wrong type or is impossible.
    """
    name = table.get("kind", DEFAULT)
    entry = _find_kind(name) if isinstance(name, str) else None
    if entry is None:
        hint = plugins.suggest_entry(name, "taggers", list_model_kinds())
        raise ConfigError(f"{make_place_prefix(where)}unknown kind {name!r}: {hint}")
    config: ModelConfig
    if entry.read is None:
        config = build(entry.config, table, where)
    else:
        settings = {key: value for key, value in table.items() if key != "kind"}
        config = entry.read(settings, where)
    return config


def build_model(
    config: ModelConfig, tagset: TagSet, seed: int, device: str | torch.device = "cpu"
) -> Model:
    """Return a new model.

    With the same seed, all parameters that do not depend on the tag set start with the
    same values. The global random state is not changed.

    Raises:
        ConfigError: The tag set has no types, its mentions may overlap and this kind of
            model cannot find such mentions, or there is no such device.
        ModelError: Word vectors, encoder or backbone are missing or damaged.
        MissingExtra: A package is missing.
    """
    entry = _find_kind(config.kind)
    assert entry is not None
    if tagset.overlaps and not config.finds_overlaps:
        raise ConfigError(
            'flatten = "keep" keeps overlapping mentions, and [model] kind = '
            f'"{config.kind}" cannot find them: use kind = "type-scorer", or '
            'flatten = "outermost" at each site'
        )
    return entry.build(config, tagset, seed, device)


# ---- saved models --------------------------------------------------------------------


def save_model(model: Model, directory: str | Path) -> None:
    """Write a model into a folder.

    An earlier model in the folder stays until the new one is complete.

    Raises:
        ModelError: A parameter is not finite, or the folder has other content.
        FednotesError: The disk is full or not writable.
    """
    path = Path(directory)
    _require_replaceable(path)
    if isinstance(model, SavesItself):
        _require_finite(path, model.state_dict())
        write_folder(path, lambda folder: _fill_folder(folder, model))
        return

    tensors = {
        name: parameter.detach().cpu().contiguous()
        for name, parameter in model.trainable().items()
    }
    _require_finite(path, tensors)
    data = tensor_bytes(tensors)
    facts = _describe(model) | {
        "tensors": {name: list(value.shape) for name, value in sorted(tensors.items())},
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    text = json.dumps(facts, indent=2, ensure_ascii=False)
    stem = DEFAULT if model.config.kind == DEFAULT else "model"
    files = {f"{stem}.safetensors": data, f"{stem}.json": text.encode() + b"\n"}
    write_folder(path, lambda folder: _fill_folder(folder, files))


def _require_replaceable(path: Path) -> None:
    """Raise ModelError if a path holds anything except a model of this package."""
    if not path.exists() or _is_described(path) or _is_saved_by_us(path):
        return
    if path.is_file() or any(path.iterdir()):
        raise ModelError(
            f"{path} exists and is not a model's folder: choose another one"
        )


def _fill_folder(folder: Path, content: SavesItself | Mapping[str, bytes]) -> None:
    """Write files, or a model that saves itself, and sync them to disk."""
    if isinstance(content, SavesItself):
        content.save(folder)
    else:
        for name, data in content.items():
            (folder / name).write_bytes(data)
    for file in folder.iterdir():
        with file.open("rb") as written:
            os.fsync(written.fileno())


def _is_described(path: Path) -> bool:
    """Return whether a folder has a description in the format of this package."""
    return any((path / f"{stem}.json").is_file() for stem in STEMS)


def is_model(path: Path) -> bool:
    """Return whether a folder may hold a model that `load_model` can open."""
    return _is_described(path) or (path / "config.json").is_file()


def _is_saved_by_us(directory: Path) -> bool:
    """Return whether `save_model` wrote this Hugging Face directory."""
    try:
        facts = read_json(directory / "config.json", strict=False)
    except (OSError, ValueError):
        return False
    return isinstance(facts, dict) and "fednotes" in facts


def read_config(directory: str | Path) -> ModelConfig | None:
    """Return the specification of a saved model; None for a Hugging Face directory.

    Raises:
        ModelError: The folder contains no model, or its description is damaged.
    """
    path = Path(directory)
    if _is_hugging_face(path):
        return None
    return _read_specification(*_read_description(path))[0]


def _is_hugging_face(path: Path) -> bool:
    """Return whether a folder is a Hugging Face directory."""
    return (path / "config.json").is_file() and not _is_described(path)


def load_model(
    directory: str | Path,
    device: str | torch.device = "cpu",
    backbone: str | None = None,
    word_vectors: str | Path | None = None,
) -> Model:
    """Read a model of any kind, in evaluation mode.

    It can be a token classifier from another program.

    Args:
        directory: The model's folder.
        device: The device for the model.
        backbone: Path of the frozen encoder or encoder-decoder on this machine, if it
            has moved since the model was saved. The content must be the same. Models
            without a frozen encoder ignore it.
        word_vectors: Path of the vector file, if it has moved.

    Raises:
        ModelError: The folder, vectors or backbone are missing, damaged or not those of
            training; the format is newer; or weights are not finite.
        MissingExtra: A package is missing.
        ConfigError: There is no such device.
    """
    path = Path(directory)
    find_device(device)
    if _is_hugging_face(path):
        from fednotes.taggers.token_classifier import open_token_classifier

        classifier = open_token_classifier(path, device)
        _require_finite(path, classifier.state_dict())
        return classifier

    file, facts = _read_description(path)
    config, tagset = _read_specification(file, facts)
    config = _set_places(config, backbone, word_vectors)
    tensors = _read_tensors(file, facts)
    model = _build_described(path, file, config, tagset, tensors, device)
    _require_same_frozen_parts(path, facts, model)
    parameters = model.trainable()
    _require_same_parameters(file, tensors, parameters)
    _require_finite(path, tensors)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    model.eval()
    return model


def _set_places(
    config: ModelConfig, backbone: str | None, word_vectors: str | Path | None
) -> ModelConfig:
    """Return a specification with this machine's paths, for the keys that it has."""
    places: dict[str, str | Path | None] = dict.fromkeys(
        list_encoder_keys(config), backbone
    )
    places["word_vectors"] = word_vectors
    changed: dict[str, Any] = {
        key: str(place)
        for key, place in places.items()
        if place is not None and getattr(config, key, None)
    }
    return replace(config, **changed)


def list_encoder_keys(config: ModelConfig) -> frozenset[str]:
    """Return the keys of a specification that name a pretrained encoder."""
    return list_marked_fields(type(config), Mark.LOCAL_FILE) - {"word_vectors"}


def _build_described(
    path: Path,
    file: Path,
    config: ModelConfig,
    tagset: TagSet,
    tensors: Mapping[str, Tensor],
    device: str | torch.device,
) -> Model:
    """Build the model that a folder describes, within a memory limit.

    Args:
        path: The folder.
        file: The model's description.
        config: The specification.
        tagset: The tag set.
        tensors: The saved parameters.
        device: The device for the model.

    Raises:
        ModelError: The described model cannot be built.
    """
    size = sum(tensor.numel() for tensor in tensors.values())
    # The rules of decoding have a number for each pair of tags.
    if len(tagset.tags) ** 2 > size + _SPARE_PAIRS:
        raise ModelError(
            f"{file}: describes {len(tagset.types):,} entity types, far more than the "
            "folder's parameters can predict: it is damaged or was tampered with; copy "
            "the folder again"
        )
    try:
        with limiting_allocation(size):
            return build_model(config, tagset, seed=0, device=device)
    except (ConfigError, OversizedModelError) as error:
        raise ModelError(f"{file}: {error}") from error
    except ModelError as error:
        raise MovedError(
            f"{path}: {error}; put it back, or give the new path of the encoder with "
            "`backbone`"
        ) from error
    except (TypeError, ValueError, RuntimeError, MemoryError, OverflowError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise ModelError(
            f"{file}: does not describe a model that can be built ({reason})"
        ) from error


def _describe(model: Model) -> dict[str, Any]:
    """Return the description of a model, everything except the tensors, as JSON."""
    config = model.config
    table: dict[str, Any] = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name != "kind":
            table[field.name] = dict(value) if isinstance(value, Mapping) else value

    facts: dict[str, Any] = {
        "format": FORMAT,
        "fednotes": __version__,
        "kind": config.kind,
    }
    vectors = _find_word_vectors(model)
    if vectors is not None:
        table["word_vectors"] = str(vectors.path)
        facts["word_vectors"] = {"name": vectors.path.name, "sha256": vectors.sha256}
    fingerprint = model.backbone_fingerprint
    if fingerprint:
        name = table[model.encoder_key]
        facts[_name_backbone_key(config.kind)] = {
            "name": name,
            "fingerprint": fingerprint,
            "reading": READING,
        }
        table[model.encoder_key] = _make_place_absolute(name)
    facts["config"] = table
    facts["tagset"] = {
        "types": list(model.tagset.types),
        "scheme": model.tagset.scheme,
        "overlaps": model.tagset.overlaps,
    }
    return facts


def _find_word_vectors(model: Model) -> WordVectors | None:
    """Return the word vectors that a model reads; None if there are none."""
    vectors = getattr(model, "vectors", None)
    return vectors if isinstance(vectors, WordVectors) else None


def _name_backbone_key(kind: str) -> str:
    """Return the key of the frozen encoder in a description."""
    return "contextual" if kind == DEFAULT else "backbone"


def _make_place_absolute(spec: str) -> str:
    """Return the specification of an encoder with its directory as an absolute path.

    Args:
        spec: "minilm" or a directory, possibly with options after "#"; see
            `load_encoder`. "minilm" is returned unchanged: it names a package, even if
            there is a directory of this name.
    """
    name = spec
    mark = ""
    options = ""
    if not os.path.isdir(expand_home(spec)):  # A directory may have a "#" in its name.
        name, mark, options = spec.partition("#")
    path = expand_home(name)
    if name == "minilm" or not os.path.isdir(path):
        return spec
    return str(path.resolve()) + mark + options


def _read_description(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file that describes a model, and its content."""
    file = path / "model.json"
    for stem in STEMS:
        if (path / f"{stem}.json").is_file():
            file = path / f"{stem}.json"
            break
    try:
        facts = read_json(file)
    except OSError as error:
        raise ModelError(
            f"{path}: no model here ({file.name}: {error.strerror}): give the folder "
            "that training wrote"
        ) from error
    except ValueError as error:
        raise ModelError(
            f"{file}: damaged (not JSON: {error}): copy the folder again"
        ) from error
    if not isinstance(facts, dict) or "format" not in facts:
        raise ModelError(f"{file}: not a model's description (no 'format')")
    if facts["format"] != FORMAT:
        raise ModelError(
            f"{file}: format {facts['format']}, written by fednotes "
            f"{facts.get('fednotes', '?')}; this version ({__version__}) reads format "
            f"{FORMAT}: install the version that wrote it"
        )
    return file, facts


def _read_specification(
    file: Path, facts: dict[str, Any]
) -> tuple[ModelConfig, TagSet]:
    """Return the specification and the tag set of a description."""
    try:
        tagset = facts["tagset"]
        if tagset["scheme"] not in ("BIO", "BIOES", "IO"):
            raise ModelError(f"{file}: unknown scheme {tagset['scheme']!r}")
        config = read_model_config(
            facts["config"] | {"kind": facts.get("kind", DEFAULT)}
        )
        types = tuple(tagset["types"])
        if not all(isinstance(name, str) for name in types):
            raise ModelError(
                f"{file}: damaged (the name of an entity type is not a string)"
            )
        if len(set(types)) < len(types) or not all(map(is_type_name, types)):
            raise ModelError(
                f"{file}: damaged (the name of an entity type is empty, occurs twice "
                "or has characters that UTF-8 cannot encode)"
            )
        # Models of earlier versions have flat mentions.
        overlaps = tagset.get("overlaps", False)
        if not isinstance(overlaps, bool):
            raise ModelError(f"{file}: damaged ('overlaps' is not true or false)")
        return config, TagSet(types, tagset["scheme"], overlaps)
    except ConfigError as error:
        raise ModelError(f"{file}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{file}: damaged ('config' or 'tagset' is incomplete)"
        ) from error


def _read_tensors(description: Path, facts: dict[str, Any]) -> dict[str, Tensor]:
    """Check the SHA-256 of the saved parameters, and return them."""
    file = description.with_suffix(".safetensors")
    with raising_if_unreadable(file, ModelError):
        data = read_regular(file)
    if hashlib.sha256(data).hexdigest() != facts.get("sha256"):
        raise ModelError(
            f"{file}: damaged, or not the file that {description.name} describes (the "
            "SHA-256 differs): copy the folder again or train again"
        )
    try:
        tensors = parse_tensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"{file}: damaged ({error})") from error
    return tensors


def _require_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise ModelError if a number is NaN or infinite."""
    for name, value in tensors.items():
        if not torch.isfinite(value).all():
            raise ModelError(
                f"{path}: parameter {name!r} is not finite (NaN or infinite): training "
                "diverged"
            )


def _require_same_frozen_parts(path: Path, facts: dict[str, Any], model: Model) -> None:
    """Raise ModelError if word vectors or the encoder are not those of training."""
    _require_same_vectors(path, facts, model)
    _require_same_encoder(path, facts, model)


def _require_same_vectors(path: Path, facts: dict[str, Any], model: Model) -> None:
    """Raise ModelError if a model's word vectors are not those of training."""
    vectors = _find_word_vectors(model)
    if vectors is None:
        return
    trained = _read_subtable(facts, "word_vectors")
    if vectors.sha256 != trained.get("sha256"):
        raise ModelError(
            f"{path}: trained with word vectors {trained.get('name')!r} (SHA-256 "
            f"{str(trained.get('sha256'))[:12]}…), but {vectors.path} has other "
            "content: put the right file there"
        )


def _require_same_encoder(path: Path, facts: dict[str, Any], model: Model) -> None:
    """Raise MovedError if a model's encoder is not the one with which it was trained.

    Args:
        path: The model's folder.
        facts: The facts that were saved with the model.
        model: The model, opened with the encoder that was found.
    """
    fingerprint = model.backbone_fingerprint  # "" for a model without an encoder
    trained = _read_subtable(facts, _name_backbone_key(model.config.kind))
    if not fingerprint or fingerprint == trained.get("fingerprint"):
        return
    encoder_path = getattr(model.config, model.encoder_key)
    if "reading" not in trained:
        # Written by an earlier version, whose fingerprints did not cover how text is
        # passed to the tokenizer.
        raise MovedError(
            f"{path}: trained with an encoder other than {encoder_path!r}, or by an "
            "earlier version of fednotes, which passed words to the encoder's "
            "tokenizer one by one, without the spaces between them: give the encoder's "
            "path with `backbone`, or train the model again"
        )
    raise MovedError(
        f"{path}: trained with the encoder {trained.get('name')!r} (fingerprint "
        f"{str(trained.get('fingerprint'))[:12]}…), but {encoder_path!r} has a "
        "different encoder: give the path of the first one with `backbone`"
    )


def _read_subtable(facts: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a table of a description; empty if it is missing or not a table."""
    table = facts.get(name)
    return table if isinstance(table, dict) else {}


def _require_same_parameters(
    description: Path, saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> None:
    """Raise ModelError unless saved parameters have the names, shapes and types wanted.

    Args:
        description: The file that describes the model.
        saved: The saved parameters.
        wanted: The model's parameters.
    """
    file = description.with_suffix(".safetensors")
    differing = sorted(saved.keys() ^ wanted.keys())
    if differing:
        side = "missing" if differing[0] in wanted else "unknown"
        raise ModelError(f"{file}: parameter {differing[0]!r} is {side}")
    for name, value in saved.items():
        if value.shape != wanted[name].shape:
            raise ModelError(
                f"{file}: parameter {name!r} has shape {list(value.shape)}, but "
                f"{description.name} needs {list(wanted[name].shape)}"
            )
        if value.dtype != wanted[name].dtype:
            raise ModelError(
                f"{file}: parameter {name!r} has type {value.dtype}, but "
                f"{wanted[name].dtype} is needed: copy the folder again or train again"
            )
