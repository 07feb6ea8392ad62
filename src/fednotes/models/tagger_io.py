"""A tagger as a folder: `tagger.json` (what it is) and `tagger.safetensors` (its parameters).

The folder is replaced as a whole or not at all. Frozen word vectors and encoders are not
copied into it: it names the file and the SHA-256 of its content, and loading compares.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as tensor_bytes
from torch import Tensor

from fednotes import __version__
from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.store import write_folder
from fednotes.core.types import TagSet
from fednotes.models.tagger import Tagger, TaggerConfig, build_tagger, tagger_config

FORMAT = 1
FACTS, TENSORS = "tagger.json", "tagger.safetensors"


def save_tagger(tagger: Tagger, directory: str | Path) -> None:
    """Write a tagger; an earlier one in this folder stays whole until the new one is.

    Raises ModelError if a parameter is not finite or the folder holds something else,
    FednotesError if the disk is full or not writable.
    """
    path = Path(directory)
    if path.exists() and not (path / FACTS).is_file() and (path.is_file() or any(path.iterdir())):
        raise ModelError(f"{path}: exists and is not a tagger's folder; name another one")
    tensors = {n: v.detach().cpu().contiguous() for n, v in tagger.state_dict().items()}
    _require_finite(path, tensors)
    data = tensor_bytes(tensors)
    text = json.dumps(_facts(tagger, tensors, data), indent=2, ensure_ascii=False)

    def fill(folder: Path) -> None:
        _write(folder / TENSORS, data)
        _write(folder / FACTS, text.encode() + b"\n")

    write_folder(path, fill)


def load_tagger(
    directory: str | Path,
    device: str | torch.device = "cpu",
    word_vectors: str | Path | None = None,
    contextual: str | None = None,
) -> Tagger:
    """Read a tagger, in evaluation mode.

    word_vectors, contextual: where the vector file and the encoder are on this machine, if
    not where they were when the tagger was saved; their content must be the same.

    Raises ModelError (folder, vectors or encoder missing, damaged or not those the tagger was
    trained with, a later format, weights that are not finite), MissingExtra.
    """
    path = Path(directory)
    facts = _read_facts(path)
    config, tagset = _specification(path, facts)
    if word_vectors is not None and config.word_vectors:
        config = replace(config, word_vectors=str(word_vectors))
    if contextual is not None and config.contextual:
        config = replace(config, contextual=contextual)
    tensors = _read_tensors(path, facts)
    try:
        tagger = build_tagger(config, tagset, seed=0)
    except ConfigError as error:
        raise ModelError(f"{path / FACTS}: {error}") from error
    _require_same_tables(path, facts, tagger)
    _require_same_shapes(path, tensors, tagger.state_dict())
    tagger.load_state_dict(tensors)
    return tagger.to(device).eval()


def _facts(tagger: Tagger, tensors: dict[str, Tensor], data: bytes) -> dict[str, Any]:
    config, tagset = asdict(tagger.config), tagger.tagset
    facts: dict[str, Any] = {"format": FORMAT, "fednotes": __version__}
    if tagger.vectors is not None:
        config["word_vectors"] = str(tagger.vectors.path)
        facts["word_vectors"] = {
            "name": tagger.vectors.path.name,
            "sha256": tagger.vectors.sha256,
        }
    if tagger.encoder is not None:
        facts["contextual"] = {
            "name": tagger.config.contextual,
            "fingerprint": tagger.encoder.fingerprint,
        }
    facts["config"] = config
    facts["tagset"] = {"types": list(tagset.types), "scheme": tagset.scheme}
    facts["tensors"] = {name: list(value.shape) for name, value in sorted(tensors.items())}
    facts["sha256"] = hashlib.sha256(data).hexdigest()
    return facts


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        facts = json.loads((path / FACTS).read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(
            f"{path}: no tagger here ({FACTS}: {error.strerror}); name the folder that training "
            "wrote"
        ) from error
    except ValueError as error:
        raise ModelError(f"{path / FACTS}: damaged (not JSON)") from error
    if not isinstance(facts, dict) or "format" not in facts:
        raise ModelError(f"{path / FACTS}: not a tagger's description (no 'format')")
    if facts["format"] != FORMAT:
        raise ModelError(
            f"{path / FACTS}: format {facts['format']}, written by fednotes "
            f"{facts.get('fednotes', '?')}; this version ({__version__}) reads format {FORMAT}: "
            "install the version that wrote it"
        )
    return facts


def _specification(path: Path, facts: dict[str, Any]) -> tuple[TaggerConfig, TagSet]:
    try:
        tagset = facts["tagset"]
        if tagset["scheme"] not in ("BIO", "BIOES", "IO"):
            raise ModelError(f"{path / FACTS}: unknown scheme {tagset['scheme']!r}")
        return tagger_config(facts["config"]), TagSet(tuple(tagset["types"]), tagset["scheme"])
    except ConfigError as error:
        raise ModelError(f"{path / FACTS}: {error}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path / FACTS}: damaged ('config' or 'tagset' is incomplete)") from error


def _read_tensors(path: Path, facts: dict[str, Any]) -> dict[str, Tensor]:
    try:
        data = (path / TENSORS).read_bytes()
    except OSError as error:
        raise ModelError(f"{path / TENSORS}: cannot be read ({error.strerror})") from error
    if hashlib.sha256(data).hexdigest() != facts.get("sha256"):
        raise ModelError(
            f"{path / TENSORS}: damaged or not the one that {FACTS} describes (its SHA-256 "
            "differs); copy the folder again or train again"
        )
    try:
        tensors = parse_tensors(data)
    except (SafetensorError, ValueError) as error:
        raise ModelError(f"{path / TENSORS}: damaged ({error})") from error
    _require_finite(path, tensors)
    return tensors


def _require_finite(path: Path, tensors: dict[str, Tensor]) -> None:
    for name, value in tensors.items():
        if not torch.isfinite(value).all():
            raise ModelError(
                f"{path}: parameter {name!r} is not finite (NaN or infinite): training diverged"
            )


def _require_same_tables(path: Path, facts: dict[str, Any], tagger: Tagger) -> None:
    """The vector file and the encoder are those that the tagger was trained with."""
    if tagger.vectors is not None:
        known = facts.get("word_vectors") or {}
        if tagger.vectors.sha256 != known.get("sha256"):
            raise ModelError(
                f"{path}: trained with word vectors {known.get('name')!r} (SHA-256 "
                f"{str(known.get('sha256'))[:12]}…), but {tagger.vectors.path} has other content: "
                "name the right file as word_vectors"
            )
    if tagger.encoder is not None:
        known = facts.get("contextual") or {}
        if tagger.encoder.fingerprint != known.get("fingerprint"):
            raise ModelError(
                f"{path}: trained with the encoder {known.get('name')!r} (fingerprint "
                f"{str(known.get('fingerprint'))[:12]}…), but {tagger.config.contextual!r} is "
                "another one: name the right folder as contextual"
            )


def _require_same_shapes(path: Path, found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    odd = sorted(found.keys() ^ wanted.keys())
    if odd:
        side = "missing" if odd[0] in wanted else "unknown"
        raise ModelError(f"{path / TENSORS}: parameter {odd[0]!r} is {side}")
    for name, value in found.items():
        if value.shape != wanted[name].shape:
            raise ModelError(
                f"{path / TENSORS}: parameter {name!r} has shape {list(value.shape)}, "
                f"{FACTS} asks for {list(wanted[name].shape)}"
            )
