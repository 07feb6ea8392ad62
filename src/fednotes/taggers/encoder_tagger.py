"""A frozen encoder, tuned by LoRA or prompts, with a CRF on top.

Any Hugging Face encoder reads the text; a word is the mean of its sub-words' states
above one layer; a projection and a CRF tag it. Trained and sent are the CRF's
parameters and

    tuning = "lora"      low-rank changes of the query and value projections (Hu et al. 2021)
    tuning = "prompts"   keys and values beside the text's (LightNER; Wang et al. 2023, Eq. 14)
    tuning = "none"      nothing else; a `Tagger` with `contextual` computes the same features
                         once and for all, and is then faster by far

The encoder is no part of the model: all models of a process that ask for the same
directory, depth and device share one `Backbone`, so the weights are in memory once.
What measures transfer between losses is the projection's weight, under each tuning: its
gradient comes from the emissions' alone, without a backward pass through the encoder.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Lt
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.settings import checked
from fednotes.core.tensors import device_of, seeded
from fednotes.core.types import Document, TagSet
from fednotes.data.batches import encode_corpus
from fednotes.encoders.adapters import LoRA, Prompts, install, joined, targets
from fednotes.encoders.encoder import hidden_layers
from fednotes.encoders.pretrained import (
    NO_ENCODER,
    Frame,
    Stamp,
    encoder_directory,
    folder_fingerprint,
    open_encoder,
    stamp_of,
)
from fednotes.encoders.reading import reading_version
from fednotes.taggers.corpora import Batch, EncoderCorpus
from fednotes.taggers.layers import CrfOutput
from fednotes.taggers.model import (
    CrfReading,
    Kind,
    Model,
    ModelConfig,
    Preparing,
)


@checked(frozen=True)
class EncoderTaggerConfig(ModelConfig):
    """A pre-trained encoder, tuned by low-rank changes or prompts, with a CRF on top.

    Attributes:
        kind: The encoder-tagger.
        encoder: "minilm" or a Hugging Face directory.
        layer: The last of the encoder's layers that is run; 0 runs all. If it is not
            given: 5 of "minilm", whose sixth layer says less of words, else all.
        tuning: How the encoder is tuned.
        rank: Rank of low-rank changes: W + alpha / rank · B A.
        alpha: Scale of low-rank changes; see `rank`.
        prompts: Number of prompts for each layer; 0 for none.
        prompt_hidden: Width of the layer that makes the prompts.
        dropout: Dropout rate of the words' vectors.
        max_tokens: Longer sentences are cut between entities. A sentence longer than
            the encoder's positions is read in overlapping windows.
    """

    encodes: ClassVar[bool] = True

    kind: Literal["encoder-tagger"] = "encoder-tagger"
    encoder: str = "minilm"
    layer: Annotated[int, Ge(0)] | None = None
    tuning: Literal["lora", "prompts", "none"] = "lora"
    rank: Annotated[int, Ge(1)] = 8
    alpha: Annotated[float, Gt(0)] = 16.0
    prompts: Annotated[int, Ge(0)] = 10
    prompt_hidden: Annotated[int, Ge(1)] = 64
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.2
    max_tokens: Annotated[int, Ge(1)] = 256

    @property
    def depth(self) -> int:
        """The last layer that is run, 0 = the last there is."""
        return (
            (5 if self.encoder == "minilm" else 0) if self.layer is None else self.layer
        )


@dataclass(frozen=True, eq=False)
class Backbone:
    """A frozen Hugging Face encoder of which the first `layers` layers are run.

    frame: what it reads at once. width: columns of a state. whole: the model has no
    layer above `layers`, so its last state is the wanted one. fingerprint: SHA-256 over
    the directory.
    """

    directory: Path
    model: Any
    tokenizer: Any
    frame: Frame
    layers: int
    width: int
    whole: bool
    device: torch.device
    fingerprint: str

    @property
    def heads(self) -> int:
        """Of each self-attention."""
        return int(self.model.config.num_attention_heads)

    def states(
        self,
        ids: Tensor,
        mask: Tensor,
        *,
        every: bool = False,
        around: AbstractContextManager[None] | None = None,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        """States (windows, longest, width) above layer `layers`, or above each one
        below too.

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
    spec: str, layer: int = 0, device: str | torch.device = "cpu"
) -> Backbone:
    """The encoder "minilm" or of a directory, up to a layer (0 = the last).

    Raises ConfigError (a layer or device that is not there), ModelError (nothing
    usable), MissingExtra.
    """
    path = encoder_directory(spec)
    return _open(path, layer, str(device_of(device)), stamp_of(path))


@lru_cache(maxsize=4)
def _open(path: Path, layer: int, device: str, stamp: Stamp) -> Backbone:
    """`stamp` makes a directory that changed on disk a new one."""
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path}: no Hugging Face encoder here (config.json is missing)"
        )
    tokenizer, model = open_encoder(path, device)
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # nobody reads it
    frame, there = Frame.of(path, tokenizer, model), torch.device(device)
    found = hidden_layers(path, model, frame, there)
    last, width = len(found) - 1, int(found[-1].shape[-1])
    if not 0 <= layer <= last:
        raise ConfigError(
            f"{path}: has layers 1 to {last} (0 = the last), layer = {layer} is asked"
        )
    version = reading_version(tokenizer)
    digest = folder_fingerprint(path, kind="backbone", version=version)
    backbone = Backbone(
        path, model, tokenizer, frame, layer or last, width, True, there, digest
    )
    return backbone if backbone.layers == last else _cut(backbone, found)


@torch.no_grad()
def _cut(backbone: Backbone, found: tuple[Tensor, ...]) -> Backbone:
    """Leave the layers above the wanted one out, if the model then gives the same
    states.

    found: what all its layers say of one padding sub-word.
    """
    stacks = [
        (module, name, child)
        for module in backbone.model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == len(found) - 1
    ]
    for module, name, child in stacks:
        setattr(module, name, child[: backbone.layers])
    one, frame = np.ones(1, np.int64), backbone.frame
    ids, mask = frame.rows(np.full(1, frame.pad), 0 * one, one, backbone.device)
    try:
        if stacks and torch.equal(
            backbone.states(ids, mask)[0], found[backbone.layers]
        ):
            return backbone
    except NO_ENCODER:
        pass
    for module, name, child in stacks:
        setattr(module, name, child)
    return replace(backbone, whole=False)


@lru_cache(maxsize=8)
def _maps(backbone: Backbone) -> list[nn.Linear]:
    return targets(backbone.model, other='take [model] kind = "token-classifier"')


@lru_cache(maxsize=8)
def _attentions(backbone: Backbone) -> list[nn.Module]:
    return install(backbone.model)


class EncoderTagger(Model):
    """A tuned encoder with a CRF; see `build_encoder_tagger`. backbone: the shared
    encoder."""

    transfer = "crf.project.weight"
    reads = EncoderCorpus
    place = "encoder"

    def __init__(
        self, config: EncoderTaggerConfig, tagset: TagSet, seed: int, backbone: Backbone
    ) -> None:
        super().__init__(config, tagset)
        self.backbone = backbone
        if config.tuning == "lora":
            self.lora = LoRA(_maps(backbone), config.rank, config.alpha, seed)
        elif config.tuning == "prompts" and config.prompts:
            self.prompts = Prompts(
                len(_attentions(backbone)),
                backbone.heads,
                backbone.width,
                config.prompts,
                config.prompt_hidden,
                seed,
            )
        with seeded(seed, "crf"):
            self.crf = CrfOutput(backbone.width, tagset)

    @property
    def frozen(self) -> int:
        """Parameters of the encoder, of which the layers above the used ones are left
        out."""
        return sum(p.numel() for p in self.backbone.model.parameters())

    @property
    def widths(self) -> tuple[int, ...]:
        """The columns of each layer of `Losses.hidden`: every encoder layer that is
        run."""
        return (self.backbone.width,) * self.backbone.layers

    @property
    def backbone_fingerprint(self) -> str:
        """SHA-256 over the frozen encoder's weights and settings."""
        return self.backbone.fingerprint

    def _encode(self, documents: tuple[Document, ...], how: Preparing) -> EncoderCorpus:
        """Nothing is kept: tuning changes what the encoder says."""
        encoded = encode_corpus(
            documents, self.tagset, max_tokens=self.config.max_tokens
        )
        tokenizer, capacity = self.backbone.tokenizer, self.backbone.frame.capacity
        return EncoderCorpus.of(encoded, tokenizer, capacity, progress=how.progress)

    def _read(
        self, corpus: EncoderCorpus, chosen: np.ndarray, every: bool = False
    ) -> CrfReading:
        batch = Batch.of(corpus, chosen, self.device)
        layers = self._words(corpus, batch, every)  # (sentences, steps, width) each
        features = F.dropout(layers[-1], self.config.dropout, self.training)
        return CrfReading(self.crf, batch, features, layers)

    def _words(
        self, corpus: EncoderCorpus, batch: Batch, every: bool = False
    ) -> list[Tensor]:
        """Words' vectors (sentences, steps, width) above the last layer, or above each.

        The mean of a word's sub-words; zero at padding and for a word without
        sub-words.
        """
        backbone, steps = self.backbone, batch.inside.shape[1]
        dtype = self.crf.project.weight.dtype
        places: list[np.ndarray] = []
        parts: list[list[Tensor]] = []  # of each group of windows, each layer
        for group in corpus.pieces.groups(batch.rows, backbone.frame, self.device):
            places.append(
                group.sentence * steps + group.token - batch.tokens[group.sentence, 0]
            )
            share = torch.from_numpy(group.share).to(self.device, dtype)
            flat = torch.from_numpy(group.at).to(self.device)
            tuned = hasattr(self, "lora") or hasattr(self, "prompts")
            with torch.set_grad_enabled(torch.is_grad_enabled() and tuned):
                states = backbone.states(
                    group.ids, group.mask, every=every, **self._tuning()
                )
            parts.append(
                [s.flatten(0, 1).index_select(0, flat) * share[:, None] for s in states]
            )
        shape = (*batch.inside.shape, backbone.width)
        zero = torch.zeros(shape, dtype=dtype, device=self.device).flatten(0, 1)
        if not parts:
            return [zero.view(shape)] * (backbone.layers if every else 1)
        place = torch.from_numpy(np.concatenate(places)).to(self.device)
        return [
            zero.index_add(0, place, torch.cat(of_layer)).view(shape)
            for of_layer in zip(*parts, strict=True)
        ]

    def _tuning(self) -> dict[str, Any]:
        """What goes with a forward pass of the frozen encoder."""
        if hasattr(self, "lora"):
            return {"around": self.lora.applied(_maps(self.backbone))}
        if hasattr(self, "prompts"):
            return {"prompts": joined(_attentions(self.backbone), self.prompts())}
        return {}


def build_encoder_tagger(
    config: EncoderTaggerConfig,
    tagset: TagSet,
    seed: int,
    device: str | torch.device = "cpu",
) -> EncoderTagger:
    """A new model around the process's one copy of the encoder. Raises as
    `build_model`; ConfigError also for a layer that is not there or an encoder that
    cannot be tuned so."""
    backbone = open_backbone(config.encoder, config.depth, device)
    return EncoderTagger(config, tagset, seed, backbone).to(device)


KIND = Kind(EncoderTaggerConfig, build_encoder_tagger)
