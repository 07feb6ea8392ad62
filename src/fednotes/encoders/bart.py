"""A frozen BART from a local directory, one copy of its weights for all models of a
process."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, ModelError, nearest
from fednotes.core.tensors import device_of
from fednotes.data.text import Passage
from fednotes.encoders.adapters import install
from fednotes.encoders.pretrained import (
    Frame,
    Stamp,
    check_weights,
    folder_fingerprint,
    open_config,
    open_pretrained,
    require_complete,
    stamp_of,
)
from fednotes.encoders.reading import Pieces, reading_version, split_passages

# one of them says the sub-words
TOKENIZERS = ("tokenizer.json", "vocab.json", "vocab.txt")
_TOGETHER = 512  # texts in one call of the tokenizer


@dataclass(frozen=True, eq=False)
class BartBackbone:
    """What a BART directory holds, and what the pointer model asks of it.

    model: a `BartModel`, frozen, in eval mode, that takes prompts. It is never run
    itself: each model runs a `view` of it. frame: what the encoder reads at once.
    steps: the most targets the decoder can write. marks: ids of the decoder's start, of
    the end and of padding.
    """

    model: Any
    tokenizer: Any
    frame: Frame
    steps: int
    marks: tuple[int, int, int]
    fingerprint: str

    def split(self, passages: Sequence[Passage]) -> Pieces:
        """Return the sub-words of some texts; see `encoders/reading.py`."""
        starts = range(0, len(passages), _TOGETHER)
        parts = [
            split_passages(self.tokenizer, passages[at : at + _TOGETHER])
            for at in starts
        ]
        return Pieces.join(parts)

    def view(self, dropout: float) -> Any:
        """Modules of one's own on the shared weights, in eval mode; dropout for train
        mode."""
        shared: list[Tensor] = [*self.model.parameters(), *self.model.buffers()]
        mine = copy.deepcopy(self.model, {id(tensor): tensor for tensor in shared})
        for module in mine.modules():
            for name in ("dropout", "activation_dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, dropout)
            if hasattr(module, "layerdrop"):
                # it draws random numbers even where nothing is dropped
                module.layerdrop = 0.0
        return mine


def load_backbone(path: str | Path, device: str | torch.device = "cpu") -> BartBackbone:
    """The backbone of a Hugging Face BART directory, such as facebook/bart-base
    downloaded.

    Loaded once a process for each device, so simulated sites share it. Reads
    safetensors alone and fetches nothing. Raises ModelError (no such directory, not a
    BART, damaged), ConfigError (no such device), MissingExtra.
    """
    directory = Path(path).expanduser().resolve()
    if not directory.is_dir():
        raise ModelError(
            f"backbone {str(path)!r}: no such directory; give a Hugging Face BART directory "
            "(facebook/bart-base, downloaded) or make one with tools/graft.py"
        )
    return _load(directory, str(torch.device(device)), stamp_of(directory))


@lru_cache(maxsize=4)
def _load(directory: Path, device: str, stamp: Stamp) -> BartBackbone:
    """`stamp` makes a directory that changed on disk a new one."""
    check_weights(directory)
    if not any((directory / name).is_file() for name in TOKENIZERS):
        raise ModelError(
            f"{directory}: no tokeniser beside config.json (tokenizer.json)"
        )
    kind = open_config(directory).model_type
    if kind != "bart":
        raise ModelError(
            f"{directory}: is a model of the kind {kind!r}; the pointer model needs a BART "
            "(tools/graft.py makes one of a BERT)"
        )
    tokenizer, model, missing = open_pretrained(directory, "BartModel")
    require_complete(directory, missing)
    model = model.to(device_of(device)).eval().requires_grad_(False)
    set_layer_norm_eps(model)
    install(model)
    config = model.config
    begin = config.decoder_start_token_id
    begin = config.bos_token_id if begin is None else begin
    marks = {"begin": begin, "end": config.eos_token_id, "pad": config.pad_token_id}
    for name, value in marks.items():
        if value is None or not 0 <= value < config.vocab_size:
            raise ModelError(f"{directory}: config.json names no usable {name} token")
    frame = replace(Frame.of(directory, tokenizer, model), pad=marks["pad"])
    steps = int(config.max_position_embeddings)
    if steps < 4:
        raise ModelError(f"{directory}: there is no room for a word beside the marks")
    digest = folder_fingerprint(
        directory, kind="bart", version=reading_version(tokenizer)
    )
    return BartBackbone(model, tokenizer, frame, steps, (*marks.values(),), digest)


def set_layer_norm_eps(model: Any) -> None:
    """Give every LayerNorm the epsilon that config.json names as "layer_norm_eps", if
    it does: a grafted directory's does, a published BART's does not."""
    eps = getattr(model.config, "layer_norm_eps", None)
    if eps is None:
        return
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = float(eps)


def cache_keyword(decoder: nn.Module) -> str:
    """Return the name by which a BART decoder takes and returns its keys and values.

    transformers 5.24 renamed `past_key_values` to `cache`.
    """
    takes_cache = "cache" in signature(decoder.forward).parameters
    return "cache" if takes_cache else "past_key_values"


def words_of(label: str) -> str:
    """A type's name as words: parted at "_" and capitals, lower case; "ADR" stays one."""
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+|\d+", label)
    return " ".join(parts).lower() or label


def fixed_rows(
    backbone: BartBackbone, types: Sequence[str], label_words: Mapping[str, str]
) -> Tensor:
    """(3 + types, width) embeddings of BEGIN, END, PAD and the types: copies, none
    trained.

    label_words: type → words, instead of the type's own name. A type's row is the mean
    over its words' sub-words, as they stand within a text. Raises ConfigError for words
    of no type or alike for two.
    """
    for label in label_words:
        if label not in types:
            raise ConfigError(
                f"label_words: unknown type {label!r}; {nearest(label, types)}"
            )
    table = backbone.model.get_input_embeddings()
    words = {label: label_words.get(label) or words_of(label) for label in types}
    rows = [
        table(torch.tensor([i], device=table.weight.device)) for i in backbone.marks
    ]
    seen: dict[tuple[int, ...], str] = {}
    for label, text in words.items():
        ids = _ids_of(backbone, text)
        other = seen.setdefault(tuple(sorted(ids)), label)
        if not ids or other != label:
            reason = f"cannot be told from {other!r}" if ids else "has no sub-words"
            raise ConfigError(
                f"type {label!r} ({text!r}) {reason} in the backbone's vocabulary: "
                "give it other words in label_words"
            )
        rows.append(
            table(torch.tensor(ids, device=table.weight.device)).mean(0, keepdim=True)
        )
    return torch.cat(rows).clone()


def _ids_of(backbone: BartBackbone, text: str) -> list[int]:
    """The sub-words of words in the middle of a text, so with the blank before the
    first one."""
    words = text.split()
    if not words:
        return []
    passage = Passage(" ".join(["", *words]), np.zeros((0, 2), np.int64))
    return list(map(int, backbone.split([passage]).ids))


def own_cross_attentions(view: Any) -> list[nn.Module]:
    """A view's cross-attentions with parameters of their own, to be trained."""
    attentions = [layer.encoder_attn for layer in view.decoder.layers]
    for attention in attentions:
        for module in attention.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
    return attentions
