"""One frozen encoder for all the models of a process that are tuned around it.

A `Backbone` is no part of any model: nothing of it is trained, saved or sent. Simulated sites
that ask for the same directory, depth, device and precision are given the same object, so
the weights are in memory once; what a site trains (prompts, LoRA) comes in with each call.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.tensors import device_of
from fednotes.models.encoder import FINGERPRINTED, marks_of, open_encoder, positions_of
from fednotes.models.encoder_corpus import padded_windows
from fednotes.models.frozen import encoder_directory, fingerprint, stamp_of


@dataclass(frozen=True, eq=False)
class Backbone:
    """A frozen Hugging Face encoder of which the first `layers` layers are run.

    prefix, suffix: ids that stand around every text; pad: id behind it. capacity: sub-words
    that fit between the marks. width: columns of a state. whole: the model has no layer above
    `layers`, so its last state is the wanted one. fingerprint: SHA-256 over the directory's
    weights and settings.
    """

    directory: Path
    model: Any
    tokenizer: Any
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]
    pad: int
    capacity: int
    layers: int
    width: int
    whole: bool
    device: torch.device
    dtype: torch.dtype
    fingerprint: str

    def __deepcopy__(self, memo: dict[int, Any]) -> Backbone:
        """A copy of a model shares its backbone."""
        return self

    @property
    def heads(self) -> int:
        """Of each self-attention."""
        return int(self.model.config.num_attention_heads)

    def rows(
        self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """The model's input for windows of a flat text.

        ids: (sub-words,) all of them; starts, lengths: (windows,). Returns ids and mask, each
        (windows, longest with marks), on the backbone's device.
        """
        marks = (self.prefix, self.suffix)
        out, mask = padded_windows(ids, starts, lengths, marks, self.pad)
        return out.to(self.device), mask.to(self.device)

    def states(
        self,
        ids: Tensor,
        mask: Tensor,
        *,
        every: bool = False,
        around: AbstractContextManager[None] | None = None,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        """States (windows, longest, width) above layer `layers`, or above each one below too.

        around: entered for the forward pass. options: passed to the model (prompts).
        """
        whole = every or not self.whole
        with around or nullcontext():
            out = self.model(
                input_ids=ids,
                attention_mask=mask.long(),
                output_hidden_states=whole,
                return_dict=True,
                **options,
            )
        top = out.last_hidden_state if self.whole else out.hidden_states[self.layers]
        return (*out.hidden_states[1 : self.layers], top) if every else (top,)


def open_backbone(
    spec: str,
    layer: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Backbone:
    """The encoder "minilm" or of a directory, up to a layer (0 = the last).

    Raises ConfigError (a layer or device that is not there), ModelError (nothing usable),
    MissingExtra.
    """
    path = encoder_directory(spec)
    return _open(path, layer, str(device_of(device)), dtype, stamp_of(path))


@lru_cache(maxsize=4)
def _open(path: Path, layer: int, device: str, dtype: torch.dtype, stamp: Any) -> Backbone:
    """`stamp` makes a directory that changed on disk a new one."""
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: no Hugging Face encoder here (config.json is missing)")
    tokenizer, model = open_encoder(path, device)
    model.to(dtype)
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # nobody reads it
    prefix, suffix = marks_of(tokenizer)
    capacity = positions_of(tokenizer, model) - len(prefix) - len(suffix)
    if capacity < 1:
        raise ModelError(f"{path}: the model has no room for a word beside its marks")
    files = {file for form in FINGERPRINTED for file in path.glob(form)}
    backbone = Backbone(
        directory=path,
        model=model,
        tokenizer=tokenizer,
        prefix=tuple(prefix),
        suffix=tuple(suffix),
        pad=tokenizer.pad_token_id or 0,
        capacity=capacity,
        layers=layer,
        width=0,
        whole=False,
        device=torch.device(device),
        dtype=dtype,
        fingerprint=fingerprint(files, kind="backbone", version=1),
    )
    return _cut(backbone)


@torch.no_grad()
def _cut(backbone: Backbone) -> Backbone:
    """Leave the layers above the wanted one out, if the model then gives the same states."""
    probe = np.full(1, backbone.pad)
    ids, mask = backbone.rows(probe, np.zeros(1, np.int64), np.ones(1, np.int64))
    try:
        found = backbone.model(
            input_ids=ids, attention_mask=mask.long(), output_hidden_states=True, return_dict=True
        ).hidden_states
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError) as error:
        raise ModelError(f"{backbone.directory}: does not work as a text encoder") from error
    last = len(found) - 1
    if not 0 <= backbone.layers <= last:
        raise ConfigError(
            f"{backbone.directory}: has layers 1 to {last} (0 = the last), "
            f"layer = {backbone.layers} is asked"
        )
    layers = backbone.layers or last
    cut = replace(backbone, layers=layers, width=int(found[-1].shape[-1]), whole=True)
    if layers == last:
        return cut
    stacks = [
        (module, name, child)
        for module in backbone.model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == last
    ]
    for module, name, child in stacks:
        setattr(module, name, child[:layers])
    if stacks and _same(cut, ids, mask, found[layers]):
        return cut
    for module, name, child in stacks:
        setattr(module, name, child)
    return replace(cut, whole=False)


def _same(backbone: Backbone, ids: Tensor, mask: Tensor, wanted: Tensor) -> bool:
    try:
        return bool(torch.equal(backbone.states(ids, mask)[0], wanted))
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError):
        return False
