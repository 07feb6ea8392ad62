"""A model as a folder: `model.json` (what it is) and `model.safetensors` (what was trained).

A light tagger's two files are called `tagger.json` and `tagger.safetensors`. The folder is
replaced as a whole or not at all. What is frozen (word vectors, encoders, backbones) is not
copied into it: the folder names the place and the SHA-256 of the content, loading compares.

A token classifier is fine-tuned whole, so it is a plain Hugging Face directory, which other
programs read too; such a directory that others trained is loaded alike.

Any kind of model from one TOML table.

kind = "tagger"           light: a CRF on frozen features (default)
kind = "encoder-tagger"   a frozen encoder tuned by prompts or LoRA, a CRF on top
kind = "prompt-bart"      a prompt-tuned encoder-decoder that points into the text
kind = "token-classifier" an encoder fine-tuned whole, a softmax for each word
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from fednotes import __version__
from fednotes.core.errors import ConfigError, ModelError, nearest
from fednotes.core.parsing import read_json
from fednotes.core.settings import build
from fednotes.core.store import write_folder
from fednotes.core.types import TagSet
from fednotes.taggers.encoder_tagger import EncoderTaggerConfig, build_encoder_tagger
from fednotes.taggers.model import Model
from fednotes.taggers.prompt_bart import PromptBartConfig, build_prompt_bart
from fednotes.taggers.tagger import TaggerConfig, build_tagger, tagger_config
from fednotes.taggers.token_classifier import (
    TokenClassifier,
    TokenClassifierConfig,
    build_token_classifier,
    open_token_classifier,
    saved_by_us,
)

ModelConfig = TaggerConfig | EncoderTaggerConfig | PromptBartConfig | TokenClassifierConfig
# In the order of ModelConfig.
KINDS = ("tagger", "encoder-tagger", "prompt-bart", "token-classifier")


def kind_of(config: ModelConfig) -> str:
    """The `kind` of a specification."""
    return "tagger" if isinstance(config, TaggerConfig) else config.kind


def model_config(table: Mapping[str, Any], where: str = "model") -> ModelConfig:
    """A specification from a TOML table; its key `kind` says of what (default "tagger").

    where: how messages call the table. Raises ConfigError for an unknown kind or key (with
    the nearest name), a value of the wrong type or an impossible one.
    """
    kind = table.get("kind", "tagger")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{where}: unknown kind {kind!r}; {nearest(str(kind), KINDS)}")
    if kind == "tagger":
        settings = {key: value for key, value in table.items() if key != "kind"}
        return tagger_config(settings, where)
    made: ModelConfig = build(model_class(kind), table, where)
    return made


def model_class(kind: str) -> type[Any]:
    """The class of a kind's specification."""
    found: type[Any] = dict(zip(KINDS, get_args(ModelConfig), strict=True))[kind]
    return found


def build_model(
    config: ModelConfig, tagset: TagSet, seed: int, device: str | torch.device = "cpu"
) -> Model:
    """A new model; equal seeds give equal initial values of all that tag sets share.

    The global random state is left as it was. Raises ConfigError (no types, no input),
    ModelError (word vectors, encoder or backbone missing or damaged), MissingExtra.
    """
    if isinstance(config, TaggerConfig):
        return build_tagger(config, tagset, seed, device)
    if isinstance(config, EncoderTaggerConfig):
        return build_encoder_tagger(config, tagset, seed, device)
    if isinstance(config, TokenClassifierConfig):
        return build_token_classifier(config, tagset, seed, device)
    return build_prompt_bart(config, tagset, seed, device)


FORMAT = 1
STEMS = ("tagger", "model")  # file names; which of the two follows from the kind
BACKBONE = {"tagger": "contextual", "encoder-tagger": "encoder", "prompt-bart": "backbone"}


def save_model(model: Model, directory: str | Path) -> None:
    """Write a model; an earlier one in this folder stays whole until the new one is.

    Raises ModelError if a parameter is not finite or the folder holds something else,
    FednotesError if the disk is full or not writable.
    """
    path = Path(directory)
    ours = _described(path) or saved_by_us(path)
    if path.exists() and not ours and (path.is_file() or any(path.iterdir())):
        raise ModelError(f"{path}: exists and is not a model's folder; name another one")
    if isinstance(model, TokenClassifier):
        _save_directory(model, path)
        return
    tensors = {n: p.detach().cpu().contiguous() for n, p in model.trainable().items()}
    _require_finite(path, tensors)
    data = tensor_bytes(tensors)
    facts = _facts(model)
    facts["tensors"] = {name: list(value.shape) for name, value in sorted(tensors.items())}
    facts["sha256"] = hashlib.sha256(data).hexdigest()
    text = json.dumps(facts, indent=2, ensure_ascii=False)
    stem = _stem(facts["kind"])

    def fill(folder: Path) -> None:
        _write(folder / f"{stem}.safetensors", data)
        _write(folder / f"{stem}.json", text.encode() + b"\n")

    write_folder(path, fill)


def _described(path: Path) -> bool:
    return any((path / f"{stem}.json").is_file() for stem in STEMS)


def _save_directory(model: TokenClassifier, path: Path) -> None:
    """A token classifier as a Hugging Face directory."""
    _require_finite(path, model.state_dict())

    def fill(folder: Path) -> None:
        model.save(folder)
        for file in folder.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())

    write_folder(path, fill)


def load_model(
    directory: str | Path,
    device: str | torch.device = "cpu",
    backbone: str | None = None,
    word_vectors: str | Path | None = None,
) -> Model:
    """Read a model of any kind, in evaluation mode; also a token classifier of others.

    backbone, word_vectors: where the frozen encoder or encoder-decoder, or the vector file,
    is on this machine, if not where it was when the model was saved; the content must be the
    same. A model that has none ignores them.

    Raises ModelError (folder, vectors or backbone missing, damaged or not those the model was
    trained with, a later format, weights that are not finite), MissingExtra.
    """
    path = Path(directory)
    if (path / "config.json").is_file() and not _described(path):
        classifier = open_token_classifier(path, device)
        _require_finite(path, classifier.state_dict())
        return classifier
    file, facts = _read_facts(path)
    config, tagset = _specification(file, facts)
    moved: dict[str, Any] = {}
    frozen = BACKBONE[kind_of(config)]
    if backbone is not None and getattr(config, frozen):
        moved[frozen] = backbone
    if word_vectors is not None and isinstance(config, TaggerConfig) and config.word_vectors:
        moved["word_vectors"] = str(word_vectors)
    config = replace(config, **moved)
    tensors = _read_tensors(file, facts)
    try:
        model = build_model(config, tagset, seed=0, device=device)
    except ConfigError as error:
        raise ModelError(f"{file}: {error}") from error
    except ModelError as error:
        raise ModelError(
            f"{path}: {error} (if it is elsewhere on this machine, name it as backbone or "
            "word_vectors; in a command with --backbone)"
        ) from error
    except (TypeError, ValueError, RuntimeError, MemoryError, OverflowError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise ModelError(f"{file}: describes no model that can be made ({reason})") from error
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
    return "tagger" if kind == "tagger" else "model"


def _facts(model: Any) -> dict[str, Any]:
    """All but the tensors: what the model is, and which frozen tables it needs."""
    config, tagset = model.config, model.tagset
    kind = kind_of(config)
    table: dict[str, Any] = {
        field.name: dict(value) if isinstance(value, Mapping) else value
        for field in fields(config)
        if field.name != "kind"
        for value in [getattr(config, field.name)]
    }
    facts: dict[str, Any] = {"format": FORMAT, "fednotes": __version__, "kind": kind}
    if getattr(model, "vectors", None) is not None:
        vectors = model.vectors
        table["word_vectors"] = str(vectors.path)
        facts["word_vectors"] = {"name": vectors.path.name, "sha256": vectors.sha256}
    if fingerprint := _fingerprint(model):
        name = BACKBONE[kind]
        facts[_table_key(kind)] = {"name": table[name], "fingerprint": fingerprint}
        table[name] = _absolute(table[name])
    return facts | {
        "config": table,
        "tagset": {"types": list(tagset.types), "scheme": tagset.scheme},
    }


def _table_key(kind: str) -> str:
    return "contextual" if kind == "tagger" else "backbone"


def _fingerprint(model: Any) -> str:
    """Of the frozen encoder or backbone; "" where there is none."""
    if isinstance(model.config, TaggerConfig):
        return "" if model.encoder is None else str(model.encoder.fingerprint)
    return str(model.backbone_fingerprint)


def _absolute(spec: str) -> str:
    """A directory's absolute path (options behind "#" are kept); a name stays a name."""
    head, mark, options = (spec, "", "") if Path(spec).is_dir() else spec.partition("#")
    path = Path(head).expanduser()
    return str(path.resolve()) + mark + options if head != "minilm" and path.is_dir() else spec


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read_facts(path: Path) -> tuple[Path, dict[str, Any]]:
    """The file that describes the model, and what it says."""
    file = next((f for s in STEMS if (f := path / f"{s}.json").is_file()), path / "model.json")
    try:
        facts = read_json(file)
    except OSError as error:
        raise ModelError(
            f"{path}: no model here ({file.name}: {error.strerror}); name the folder that "
            "training wrote"
        ) from error
    except ValueError as error:
        raise ModelError(f"{file}: damaged (not JSON: {error}); copy the folder again") from error
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
        raise ModelError(f"{file}: damaged ('config' or 'tagset' is incomplete)") from error


def _read_tensors(description: Path, facts: dict[str, Any]) -> dict[str, Tensor]:
    file = description.with_suffix(".safetensors")
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror})") from error
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
    kind = kind_of(model.config)
    known = _table(facts, _table_key(kind))
    if (found := _fingerprint(model)) and found != known.get("fingerprint"):
        place = getattr(model.config, BACKBONE[kind])
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
