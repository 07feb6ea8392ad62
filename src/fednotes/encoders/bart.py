"""A frozen BART from a local directory.

All models of a process share one copy of its weights.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, ModelError, suggest_name
from fednotes.core.settings import expand_home
from fednotes.core.tensors import find_device
from fednotes.data.tags import split_label
from fednotes.data.text import Passage
from fednotes.encoders.adapters import install_prompts
from fednotes.encoders.pretrained import (
    Frame,
    Stamp,
    check_weights,
    compute_folder_fingerprint,
    open_config,
    open_pretrained,
    read_stamp,
    require_complete,
)
from fednotes.encoders.reading import Pieces, choose_reading_version, split_passages

# The files of a tokenizer; a directory has at least one of them.
TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt")
_TEXTS_PER_CALL = 512  # texts in one call of the tokenizer


@dataclass(frozen=True, eq=False)
class BartBackbone:
    """A BART directory in the form that the pointer model uses.

    Attributes:
        model: A frozen `BartModel` in evaluation mode that accepts prompts. It is never
            run itself: each model runs a `view` of it.
        tokenizer: Its tokenizer.
        frame: The window of sub-words that the encoder reads at once.
        steps: The maximum number of targets that the decoder can write.
        marks: Ids of the decoder's start, of the end and of padding.
        fingerprint: SHA-256 over the directory.
    """

    model: Any
    tokenizer: Any
    frame: Frame
    steps: int
    marks: tuple[int, int, int]
    fingerprint: str

    def split(self, passages: Sequence[Passage]) -> Pieces:
        """Return the sub-words of some texts; see `encoders/reading.py`."""
        parts = [
            split_passages(self.tokenizer, passages[start : start + _TEXTS_PER_CALL])
            for start in range(0, len(passages), _TEXTS_PER_CALL)
        ]
        return Pieces.join(parts)

    def make_view(self, dropout: float) -> Any:
        """Return separate modules with the shared weights, in evaluation mode.

        Args:
            dropout: Their dropout rate in training mode.
        """
        shared: list[Tensor] = [*self.model.parameters(), *self.model.buffers()]
        view = copy.deepcopy(self.model, {id(tensor): tensor for tensor in shared})
        for module in view.modules():
            for name in ("dropout", "activation_dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, dropout)
            if hasattr(module, "layerdrop"):
                # It draws random numbers even if nothing is dropped.
                module.layerdrop = 0.0
        return view


def load_backbone(path: str | Path, device: str | torch.device = "cpu") -> BartBackbone:
    """Return the backbone of a Hugging Face BART directory.

    It is loaded once per process and device, so simulated sites share it. Only
    safetensors are read, and nothing is downloaded.

    Args:
        path: The directory, such as a download of facebook/bart-base.
        device: The device for the backbone.

    Raises:
        ModelError: There is no such directory, it is not a BART, or it is damaged.
        ConfigError: There is no such device.
        MissingExtra: A package is missing.
    """
    directory = expand_home(path)
    if not os.path.isdir(directory):
        raise ModelError(
            f"backbone {str(path)!r}: no such directory: give a Hugging Face BART "
            "directory (facebook/bart-base, downloaded) or make one with tools/graft.py"
        )
    directory = directory.resolve()
    return _load(directory, str(torch.device(device)), read_stamp(directory))


@lru_cache(maxsize=4)
def _load(
    directory: Path,
    device: str,
    stamp: Stamp,  # noqa: ARG001 - a directory that changed on disk is read anew
) -> BartBackbone:
    """Load the backbone of a directory; see `load_backbone`."""
    check_weights(directory)
    if not any((directory / name).is_file() for name in TOKENIZERS):
        raise ModelError(
            f"{directory}: no tokenizer beside config.json (tokenizer.json)"
        )
    kind = open_config(directory).model_type
    if kind != "bart":
        raise ModelError(
            f"{directory}: has model_type {kind!r}, but the pointer model needs a BART "
            "(tools/graft.py makes one from a BERT)"
        )
    tokenizer, model, missing = open_pretrained(directory, "BartModel")
    require_complete(directory, missing)
    model = model.to(find_device(device)).eval().requires_grad_(requires_grad=False)
    set_layer_norm_eps(model)
    install_prompts(model)
    begin, end, pad = _read_marks(directory, model.config)
    steps = int(model.config.max_position_embeddings)
    if steps < 4:
        raise ModelError(
            f"{directory}: the model has too few positions for a word and the special "
            "tokens"
        )
    return BartBackbone(
        model=model,
        tokenizer=tokenizer,
        frame=replace(Frame.of(directory, tokenizer, model), pad=pad),
        steps=steps,
        marks=(begin, end, pad),
        fingerprint=compute_folder_fingerprint(
            directory, kind="bart", version=choose_reading_version(tokenizer)
        ),
    )


def _read_marks(directory: Path, config: Any) -> tuple[int, int, int]:
    """Return the ids of the decoder's start, of the end and of padding.

    Raises:
        ModelError: An id is missing or not in the vocabulary.
    """
    begin = config.decoder_start_token_id
    if begin is None:
        begin = config.bos_token_id
    marks = {"begin": begin, "end": config.eos_token_id, "pad": config.pad_token_id}
    for name, value in marks.items():
        if value is None or not 0 <= value < config.vocab_size:
            raise ModelError(f"{directory}: config.json names no usable {name} token")
    return marks["begin"], marks["end"], marks["pad"]


def set_layer_norm_eps(model: Any) -> None:
    """Set the epsilon of every LayerNorm to "layer_norm_eps" of config.json.

    Directories from tools/graft.py have this setting. Without it, as in a published
    BART, nothing changes.
    """
    eps = getattr(model.config, "layer_norm_eps", None)
    if eps is None:
        return
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = float(eps)


def find_cache_keyword(decoder: nn.Module) -> str:
    """Return the name of a BART decoder's argument for cached keys and values.

    transformers 5.24 renamed `past_key_values` to `cache`.
    """
    takes_cache = "cache" in signature(decoder.forward).parameters
    return "cache" if takes_cache else "past_key_values"


def require_known_labels(label_words: Iterable[str], types: Collection[str]) -> None:
    """Raise ConfigError if a type with words is not one of these types."""
    for label in label_words:
        if label not in types:
            raise ConfigError(
                "[model] label_words: unknown type "
                f"{label!r}: {suggest_name(label, types)}"
            )


def make_fixed_rows(
    backbone: BartBackbone, types: Sequence[str], label_words: Mapping[str, str]
) -> Tensor:
    """Return copies of the embeddings of marks and types, (3 + types, width).

    The marks are BEGIN, END and PAD. A type's row is the mean over the sub-words of its
    words, tokenised as within a text.

    Args:
        backbone: The backbone.
        types: The types.
        label_words: Words for a type in place of its name.

    Raises:
        ConfigError: Words belong to no type, have no sub-words, or are the same for two
            types.
    """
    require_known_labels(label_words, types)
    table = backbone.model.get_input_embeddings()
    device = table.weight.device
    rows = [table(torch.tensor([mark], device=device)) for mark in backbone.marks]
    label_of: dict[tuple[int, ...], str] = {}
    for label in types:
        text = label_words.get(label) or split_label(label)
        ids = _find_ids(backbone, text)
        other = label_of.setdefault(tuple(sorted(ids)), label)
        if not ids or other != label:
            reason = "has no sub-words"
            if ids:
                reason = f"cannot be distinguished from {other!r}"
            raise ConfigError(
                f"type {label!r} ({text!r}) {reason} in the backbone's vocabulary: "
                "give it other words in label_words"
            )
        embedded = table(torch.tensor(ids, device=device))
        rows.append(embedded.mean(0, keepdim=True))
    return torch.cat(rows).clone()


def _find_ids(backbone: BartBackbone, text: str) -> list[int]:
    """Return the sub-word ids of a text, as if a blank preceded it."""
    words = text.split()
    if not words:
        return []
    passage = Passage(" " + " ".join(words), np.zeros((0, 2), np.int64))
    return list(map(int, backbone.split([passage]).ids))


def copy_cross_attentions(view: Any) -> list[nn.Module]:
    """Give a view's cross-attentions their own parameters; return the modules."""
    attentions = [layer.encoder_attn for layer in view.decoder.layers]
    for attention in attentions:
        for module in attention.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
    return attentions
