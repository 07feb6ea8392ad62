"""Any kind of model from one TOML table, and as a folder.

A kind is a module of this folder with the constant `KIND` (see `model.py`):
"encoder-tagger" is found in `encoder_tagger`. Other packages add kinds by entry points
(`core/plugins.py`).

A folder holds `model.json` (what it is) and `model.safetensors` (what was trained); a
light tagger's two files are called `tagger.json` and `tagger.safetensors`. It is
replaced as a whole or not at all. What is frozen (word vectors, encoders, backbones) is
not copied into it: the folder names the place and the SHA-256 of the content, and
loading compares the two.

A token classifier is fine-tuned whole, so it is a plain Hugging Face directory, which
other programs read too; such a directory that others trained is loaded alike.
"""

from __future__ import annotations

import hashlib
import json
import os
import pkgutil
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
from fednotes.core.allocation import OversizedModelError, bounded_allocation
from fednotes.core.errors import ConfigError, ModelError, nearest, readable
from fednotes.core.parsing import read_json
from fednotes.core.settings import build
from fednotes.core.store import write_folder
from fednotes.core.tensors import device_of
from fednotes.core.types import TagSet
from fednotes.encoders.reading import READING
from fednotes.taggers.model import Kind, Model, ModelConfig

FORMAT = 1
STEMS = ("tagger", "model")  # file names; which of the two follows from the kind
DEFAULT = "tagger"
PLACES = ("contextual", "encoder", "backbone")  # keys that name a frozen encoder


# ---- by kind -------------------------------------------------------------------------


def kinds() -> list[str]:
    """Return the names of all kinds, the default one first and those of other packages
    last."""
    built_in = _built_in_kinds()
    return [*built_in, *sorted(plugins.added("taggers", built_in))]


def _built_in_kinds() -> list[str]:
    modules = pkgutil.iter_modules(sys.modules[__package__].__path__)
    names = [module.name.replace("_", "-") for module in modules]
    return sorted(
        filter(_built_in_kind, names), key=lambda name: (name != DEFAULT, name)
    )


def _kind(name: str) -> Kind | None:
    """Return the kind of this name, or None where there is none."""
    built_in = _built_in_kind(name)
    if built_in is not None:
        return built_in
    entry = plugins.added("taggers", _built_in_kinds()).get(name)
    return None if entry is None else plugins.load(entry, Kind)


def _built_in_kind(name: str) -> Kind | None:
    module = f"{__package__}.{name.replace('-', '_')}"
    if "." in name or "_" in name or find_spec(module) is None:
        return None
    kind: Kind | None = getattr(import_module(module), "KIND", None)
    return kind


def model_class(kind: str) -> type[ModelConfig]:
    """The class of a kind's specification.

    Raises ConfigError where there is no such kind.
    """
    found = _kind(kind)
    if found is None:
        raise ConfigError(f"unknown kind {kind!r}; {nearest(kind, kinds())}")
    return found.config


def model_config(table: Mapping[str, Any], where: str = "model") -> ModelConfig:
    """A specification from a TOML table; its key `kind` says of what (default
    "tagger").

    where: how messages call the table. Raises ConfigError for an unknown kind or key
    (with the nearest name), a value of the wrong type or an impossible one.
    """
    name = table.get("kind", DEFAULT)
    found = _kind(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(
            f"{where}: unknown kind {name!r}; {nearest(str(name), kinds())}"
        )
    if found.read is not None:
        made = found.read(
            {key: value for key, value in table.items() if key != "kind"}, where
        )
    else:
        made = build(found.config, table, where)
    config: ModelConfig = made
    return config


def build_model(
    config: ModelConfig, tagset: TagSet, seed: int, device: str | torch.device = "cpu"
) -> Model:
    """A new model; equal seeds give equal initial values of all that tag sets share.

    The global random state is left as it was. Raises ConfigError (no types, no such
    device), ModelError (word vectors, encoder or backbone missing or damaged),
    MissingExtra.
    """
    found = _kind(config.kind)
    assert found is not None
    return found.build(config, tagset, seed, device)


# ---- as a folder ---------------------------------------------------------------------


def save_model(model: Model, directory: str | Path) -> None:
    """Write a model; an earlier one in this folder stays whole until the new one is.

    Raises ModelError if a parameter is not finite or the folder holds something else,
    FednotesError if the disk is full or not writable.
    """
    path = Path(directory)
    ours = _described(path) or _saved_by_us(path)
    if path.exists() and not ours and (path.is_file() or any(path.iterdir())):
        raise ModelError(
            f"{path}: exists and is not a model's folder; name another one"
        )
    if model.whole:
        _require_finite(path, model.state_dict())
        write_folder(path, lambda folder: _filled(folder, model))
        return
    tensors = {n: p.detach().cpu().contiguous() for n, p in model.trainable().items()}
    _require_finite(path, tensors)
    data = tensor_bytes(tensors)
    facts = _facts(model) | {
        "tensors": {name: list(value.shape) for name, value in sorted(tensors.items())},
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    text = json.dumps(facts, indent=2, ensure_ascii=False)
    stem = _stem(model.config.kind)
    files = {f"{stem}.safetensors": data, f"{stem}.json": text.encode() + b"\n"}
    write_folder(path, lambda folder: _filled(folder, files))


def _filled(folder: Path, content: Model | Mapping[str, bytes]) -> None:
    """Write files, or what a model writes itself, so that they are on disk."""
    if isinstance(content, Model):
        content.save(folder)
    else:
        for name, data in content.items():
            (folder / name).write_bytes(data)
    for file in folder.iterdir():
        with file.open("rb") as written:
            os.fsync(written.fileno())


def _described(path: Path) -> bool:
    return any((path / f"{stem}.json").is_file() for stem in STEMS)


def is_model(path: Path) -> bool:
    """Whether a folder holds a model that `load_model` may open."""
    return _described(path) or (path / "config.json").is_file()


def _saved_by_us(directory: Path) -> bool:
    """Whether `save_model` wrote this Hugging Face directory."""
    try:
        facts = read_json(directory / "config.json", strict=False)
    except (OSError, ValueError):
        return False
    return isinstance(facts, dict) and "fednotes" in facts


def load_model(
    directory: str | Path,
    device: str | torch.device = "cpu",
    backbone: str | None = None,
    word_vectors: str | Path | None = None,
) -> Model:
    """Read a model of any kind, in evaluation mode; also a token classifier of others.

    backbone, word_vectors: where the frozen encoder or encoder-decoder, or the vector
    file, is on this machine, if not where it was when the model was saved; the content
    must be the same. A model that has none ignores them.

    Raises ModelError (folder, vectors or backbone missing, damaged or not those the
    model was trained with, a later format, weights that are not finite), MissingExtra,
    ConfigError for a device that is not here.
    """
    path = Path(directory)
    device_of(device)
    if (path / "config.json").is_file() and not _described(path):
        from fednotes.taggers.token_classifier import open_token_classifier

        classifier = open_token_classifier(path, device)
        _require_finite(path, classifier.state_dict())
        return classifier
    file, facts = _read_facts(path)
    config, tagset = _specification(file, facts)
    given = {"word_vectors": word_vectors, **dict.fromkeys(PLACES, backbone)}
    moved = {
        k: str(v)
        for k, v in given.items()
        if v is not None and getattr(config, k, None)
    }
    config = replace(config, **moved)
    tensors = _read_tensors(file, facts)
    held = sum(tensor.numel() for tensor in tensors.values())
    try:
        with bounded_allocation(held):
            model = build_model(config, tagset, seed=0, device=device)
    except (ConfigError, OversizedModelError) as error:
        raise ModelError(f"{file}: {error}") from error
    except ModelError as error:
        raise ModelError(
            f"{path}: {error} (if it is elsewhere on this machine, name it as backbone or "
            "word_vectors; in a command with --backbone)"
        ) from error
    except (TypeError, ValueError, RuntimeError, MemoryError, OverflowError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise ModelError(
            f"{file}: describes no model that can be made ({reason})"
        ) from error
    _require_same_tables(path, facts, model)
    parameters = model.trainable()
    _require_same_shapes(file, tensors, parameters)
    _require_finite(path, tensors)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    model.train(False)
    return model


def _stem(kind: str) -> str:
    return DEFAULT if kind == DEFAULT else "model"


def _facts(model: Any) -> dict[str, Any]:
    """All but the tensors: what the model is, and which frozen tables it needs."""
    config, tagset = model.config, model.tagset
    table: dict[str, Any] = {
        field.name: dict(value) if isinstance(value, Mapping) else value
        for field in fields(config)
        if field.name != "kind"
        for value in [getattr(config, field.name)]
    }
    facts: dict[str, Any] = {
        "format": FORMAT,
        "fednotes": __version__,
        "kind": config.kind,
    }
    if getattr(model, "vectors", None) is not None:
        vectors = model.vectors
        table["word_vectors"] = str(vectors.path)
        facts["word_vectors"] = {"name": vectors.path.name, "sha256": vectors.sha256}
    if fingerprint := model.backbone_fingerprint:
        name = table[model.place]
        facts[_table_key(config.kind)] = {
            "name": name,
            "fingerprint": fingerprint,
            "reading": READING,
        }
        table[model.place] = _absolute(name)
    return facts | {
        "config": table,
        "tagset": {"types": list(tagset.types), "scheme": tagset.scheme},
    }


def _table_key(kind: str) -> str:
    return "contextual" if kind == DEFAULT else "backbone"


def _absolute(spec: str) -> str:
    """A directory's absolute path (options behind "#" are kept); a name stays a name."""
    head, mark, options = (spec, "", "") if Path(spec).is_dir() else spec.partition("#")
    path = Path(head).expanduser()
    return (
        str(path.resolve()) + mark + options
        if head != "minilm" and path.is_dir()
        else spec
    )


def _read_facts(path: Path) -> tuple[Path, dict[str, Any]]:
    """The file that describes the model, and what it says."""
    file = next(
        (f for s in STEMS if (f := path / f"{s}.json").is_file()), path / "model.json"
    )
    try:
        facts = read_json(file)
    except OSError as error:
        raise ModelError(
            f"{path}: no model here ({file.name}: {error.strerror}); name the folder that "
            "training wrote"
        ) from error
    except ValueError as error:
        raise ModelError(
            f"{file}: damaged (not JSON: {error}); copy the folder again"
        ) from error
    if not isinstance(facts, dict) or "format" not in facts:
        raise ModelError(f"{file}: not a model's description (no 'format')")
    if facts["format"] != FORMAT:
        raise ModelError(
            f"{file}: format {facts['format']}, written by fednotes "
            f"{facts.get('fednotes', '?')}; this version ({__version__}) reads format {FORMAT}: "
            "install the version that wrote it"
        )
    return file, facts


def _specification(file: Path, facts: dict[str, Any]) -> tuple[ModelConfig, TagSet]:
    try:
        tagset = facts["tagset"]
        if tagset["scheme"] not in ("BIO", "BIOES", "IO"):
            raise ModelError(f"{file}: unknown scheme {tagset['scheme']!r}")
        config = model_config(facts["config"] | {"kind": facts.get("kind", "tagger")})
        return config, TagSet(tuple(tagset["types"]), tagset["scheme"])
    except ConfigError as error:
        raise ModelError(f"{file}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{file}: damaged ('config' or 'tagset' is incomplete)"
        ) from error


def _read_tensors(description: Path, facts: dict[str, Any]) -> dict[str, Tensor]:
    file = description.with_suffix(".safetensors")
    with readable(file, ModelError):
        data = file.read_bytes()
    if hashlib.sha256(data).hexdigest() != facts.get("sha256"):
        raise ModelError(
            f"{file}: damaged or not the one that {description.name} describes (its SHA-256 "
            "differs); copy the folder again or train again"
        )
    try:
        tensors = parse_tensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"{file}: damaged ({error})") from error
    return tensors


def _require_finite(path: Path, tensors: dict[str, Tensor]) -> None:
    for name, value in tensors.items():
        if not torch.isfinite(value).all():
            raise ModelError(
                f"{path}: parameter {name!r} is not finite (NaN or infinite): training diverged"
            )


def _require_same_tables(path: Path, facts: dict[str, Any], model: Any) -> None:
    """The vector file and the frozen encoder are those that the model was trained with."""
    if getattr(model, "vectors", None) is not None:
        known = _table(facts, "word_vectors")
        if model.vectors.sha256 != known.get("sha256"):
            raise ModelError(
                f"{path}: trained with word vectors {known.get('name')!r} (SHA-256 "
                f"{str(known.get('sha256'))[:12]}…), but {model.vectors.path} has other content: "
                "name the right file as word_vectors"
            )
    known = _table(facts, _table_key(model.config.kind))
    if (found := model.backbone_fingerprint) and found != known.get("fingerprint"):
        place = getattr(model.config, model.place)
        if "reading" not in known:  # by a version whose fingerprints do not name it
            raise ModelError(
                f"{path}: trained with another encoder than {place!r}, or by an earlier version of "
                "fednotes, which gave words to the encoder's tokenizer one by one, without the "
                "blanks between them: name the encoder's right folder as backbone (in a command "
                "with --backbone), or train the model again"
            )
        raise ModelError(
            f"{path}: trained with the encoder {known.get('name')!r} (fingerprint "
            f"{str(known.get('fingerprint'))[:12]}…), but {place!r} is another one: name the "
            "right folder as backbone (in a command with --backbone)"
        )


def _table(facts: dict[str, Any], name: str) -> dict[str, Any]:
    found = facts.get(name)
    return found if isinstance(found, dict) else {}


def _require_same_shapes(
    description: Path, found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]
) -> None:
    file = description.with_suffix(".safetensors")
    odd = sorted(found.keys() ^ wanted.keys())
    if odd:
        side = "missing" if odd[0] in wanted else "unknown"
        raise ModelError(f"{file}: parameter {odd[0]!r} is {side}")
    for name, value in found.items():
        if value.shape != wanted[name].shape:
            raise ModelError(
                f"{file}: parameter {name!r} has shape {list(value.shape)}, "
                f"{description.name} asks for {list(wanted[name].shape)}"
            )
        if value.dtype != wanted[name].dtype:
            raise ModelError(
                f"{file}: parameter {name!r} has type {value.dtype}, {wanted[name].dtype} is "
                "needed: copy the folder again or train again"
            )
