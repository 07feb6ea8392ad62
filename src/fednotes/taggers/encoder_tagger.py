"""A frozen encoder, tuned by LoRA or prompts, with a CRF on top.

Any Hugging Face encoder reads the text. A word's vector is the mean of its sub-words'
states above a chosen layer; a projection and a CRF predict its tag. The CRF's
parameters are trained and sent, and in addition with

    tuning = "lora"      LoRA adapters in the query and value projections
                         (Hu et al. 2021)
    tuning = "prompts"   keys and values beside those of the text (LightNER; Wang et al.
                         2023, Eq. 14)
    tuning = "none"      nothing. A `Tagger` with `contextual` computes the same
                         features only once and is much faster

The encoder is not part of the model. All models of a process with the same directory,
depth and device share one `Backbone`, so the weights are in memory only once. The
transfer parameter is the projection's weight, whose gradient is computed from the
gradient of the emissions, without a backward pass through the encoder.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.numbers import (
    FractionBelowOne,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
)
from fednotes.core.settings import LocalFile, checked
from fednotes.core.tensors import find_device, seeding_layer
from fednotes.core.types import Document, TagSet
from fednotes.data.batches import encode_corpus
from fednotes.encoders.adapters import (
    LoRA,
    Prompts,
    assign_prompts,
    find_linears,
    install_prompts,
)
from fednotes.encoders.encoder import try_encoder
from fednotes.encoders.pretrained import (
    NO_ENCODER,
    Frame,
    Stamp,
    compute_folder_fingerprint,
    find_encoder_directory,
    open_encoder,
    read_stamp,
)
from fednotes.encoders.reading import choose_reading_version
from fednotes.taggers.corpora import Batch, EncoderCorpus
from fednotes.taggers.layers import CrfOutput
from fednotes.taggers.model import (
    CrfReading,
    Kind,
    ModelConfig,
    PrepareOptions,
    TaggingModel,
)


@checked(frozen=True)
class EncoderTaggerConfig(ModelConfig):
    """A pre-trained encoder, tuned with LoRA adapters or prompts, with a CRF on top.

    Attributes:
        kind: The encoder-tagger.
        encoder: "minilm" or a Hugging Face directory.
        layer: Last layer of the encoder to run; 0 runs all. Default: 5 for "minilm",
            whose sixth layer carries less information about words; otherwise all.
        tuning: How the encoder is tuned.
        rank: Rank of the LoRA adapters: W + alpha / rank · B A.
        alpha: Scale of the LoRA adapters; see `rank`.
        prompts: Number of prompts for each layer; 0 for none.
        prompt_hidden: Width of the layer that computes the prompts.
        dropout: Dropout rate of the words' vectors.
        max_tokens: Maximum number of tokens in a sentence; longer sentences are cut
            between entities. A sentence longer than the encoder's positions is read in
            overlapping windows.
    """

    encodes: ClassVar[bool] = True

    kind: Literal["encoder-tagger"] = "encoder-tagger"
    encoder: LocalFile = "minilm"
    layer: NonNegativeInt | None = None
    tuning: Literal["lora", "prompts", "none"] = "lora"
    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    prompts: NonNegativeInt = 10
    prompt_hidden: PositiveInt = 64
    dropout: FractionBelowOne = 0.2
    max_tokens: PositiveInt = 256

    @property
    def has_frozen_encoder(self) -> bool:
        """True, because tuning adds parameters and does not change the encoder's."""
        return True

    @property
    def depth(self) -> int:
        """The last layer that is run; 0 means the encoder's last."""
        if self.layer is not None:
            return self.layer
        return 5 if self.encoder == "minilm" else 0


@dataclass(frozen=True, eq=False)
class Backbone:
    """A frozen Hugging Face encoder whose first `layers` layers are run.

    Attributes:
        directory: The directory that it was read from.
        model: The encoder.
        tokenizer: Its tokenizer.
        frame: The window of sub-words that it reads at once.
        layers: The number of layers that are run.
        width: The number of columns of a state.
        is_cut: Whether the layers above `layers` were removed, so that the last state
            is the one to use.
        device: The device of the encoder.
        fingerprint: SHA-256 over the directory.
    """

    directory: Path
    model: Any
    tokenizer: Any
    frame: Frame
    layers: int
    width: int
    is_cut: bool
    device: torch.device
    fingerprint: str

    @property
    def heads(self) -> int:
        """The number of heads of each self-attention."""
        return int(self.model.config.num_attention_heads)

    def compute_states(
        self,
        ids: Tensor,
        mask: Tensor,
        *,
        all_layers: bool = False,
        around: AbstractContextManager[None] | None = None,
        **options: Any,
    ) -> tuple[Tensor, ...]:
        """Run the encoder.

        Args:
            ids: (windows, longest) ids.
            mask: (windows, longest) bool, False at padding.
            all_layers: Whether to also return the states above all lower layers.
            around: A context to open for the forward pass.
            **options: Passed to the model, such as prompts.

        Returns:
            States (windows, longest, width) above layer `layers`, preceded by those
            above each lower layer if `all_layers`.
        """
        needs_hidden = all_layers or not self.is_cut
        with around or nullcontext():
            out = self.model(
                input_ids=ids,
                attention_mask=mask.long(),
                output_hidden_states=needs_hidden,
                return_dict=True,
                **options,
            )
        top = out.last_hidden_state if self.is_cut else out.hidden_states[self.layers]
        if not all_layers:
            return (top,)
        return (*out.hidden_states[1 : self.layers], top)


def open_backbone(
    spec: str, layer: int = 0, device: str | torch.device = "cpu"
) -> Backbone:
    """Return an encoder up to a layer, loading it once per process.

    Args:
        spec: "minilm" or a Hugging Face directory.
        layer: The last layer to run; 0 is the encoder's last.
        device: The device for the encoder.

    Raises:
        ConfigError: There is no such layer or device.
        ModelError: The directory has no usable encoder.
        MissingExtra: A package is missing.
    """
    path = find_encoder_directory(spec)
    return _open(path, layer, str(find_device(device)), read_stamp(path))


@lru_cache(maxsize=4)
def _open(
    path: Path,
    layer: int,
    device_name: str,
    stamp: Stamp,  # noqa: ARG001 - a directory that changed on disk is read anew
) -> Backbone:
    """Load an encoder up to a layer; see `open_backbone`."""
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path}: contains no Hugging Face encoder (config.json is missing): give "
            "the folder of an encoder"
        )
    tokenizer, model = open_encoder(path, device_name)
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # its output is not used
    frame = Frame.of(path, tokenizer, model)
    device = torch.device(device_name)

    states = try_encoder(path, model, frame, device)
    last = len(states) - 1
    if not 0 <= layer <= last:
        raise ConfigError(
            f"{path}: has layers 1 to {last} (0 is the last), but layer = {layer}"
        )
    backbone = Backbone(
        directory=path,
        model=model,
        tokenizer=tokenizer,
        frame=frame,
        layers=layer or last,
        width=int(states[-1].shape[-1]),
        is_cut=True,
        device=device,
        fingerprint=compute_folder_fingerprint(
            path, kind="backbone", version=choose_reading_version(tokenizer)
        ),
    )
    return (
        backbone if backbone.layers == last else _remove_unused_layers(backbone, states)
    )


@torch.no_grad()
def _remove_unused_layers(backbone: Backbone, states: tuple[Tensor, ...]) -> Backbone:
    """Remove the layers above the last one used, if this keeps the states.

    Args:
        backbone: The encoder with all layers.
        states: The states of one padding sub-word, above each of its layers.
    """
    stacks = [
        (module, name, child)
        for module in backbone.model.modules()
        for name, child in module.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == len(states) - 1
    ]
    for module, name, child in stacks:
        setattr(module, name, child[: backbone.layers])

    if stacks and _has_same_state(backbone, states[backbone.layers]):
        return backbone

    for module, name, child in stacks:
        setattr(module, name, child)
    return replace(backbone, is_cut=False)


def _has_same_state(backbone: Backbone, wanted: Tensor) -> bool:
    """Return whether a cut encoder still runs and computes this state."""
    ids, mask = backbone.frame.make_padding_row(backbone.device)
    try:
        return torch.equal(backbone.compute_states(ids, mask)[0], wanted)
    except NO_ENCODER:
        return False


def compute_word_vectors(
    backbone: Backbone,
    corpus: EncoderCorpus,
    batch: Batch,
    *,
    run: Callable[[Tensor, Tensor], tuple[Tensor, ...]],
    dtype: torch.dtype,
    layers: int = 1,
) -> list[Tensor]:
    """Return word vectors, (sentences, steps, width), above each layer that is used.

    A vector is the mean of the word's sub-words; zero at padding and for a word without
    sub-words.

    Args:
        backbone: The encoder.
        corpus: The corpus.
        batch: The sentences.
        run: Maps ids and mask, both (windows, longest), to the states (windows,
            longest, width) above each of `layers` layers.
        dtype: The type of the result.
        layers: The number of layers whose states `run` returns.
    """
    device = backbone.device
    steps = batch.inside.shape[1]
    places: list[np.ndarray] = []
    parts: list[list[Tensor]] = []  # for each group of windows, each layer

    for group in corpus.pieces.iterate_groups(batch.rows, backbone.frame, device):
        first_token = batch.tokens[group.sentence, 0]
        places.append(group.sentence * steps + group.token - first_token)
        share = torch.from_numpy(group.share).to(device, dtype)
        position = torch.from_numpy(group.position).to(device)
        parts.append(
            [
                states.flatten(0, 1).index_select(0, position) * share[:, None]
                for states in run(group.ids, group.mask)
            ]
        )

    shape = (*batch.inside.shape, backbone.width)
    zero = torch.zeros(shape, dtype=dtype, device=device)
    if not parts:
        return [zero] * layers
    flat = zero.flatten(0, 1)
    place = torch.from_numpy(np.concatenate(places)).to(device)
    return [
        flat.index_add(0, place, torch.cat(layer)).view(shape)
        for layer in zip(*parts, strict=True)
    ]


@lru_cache(maxsize=8)
def _find_linears(backbone: Backbone) -> list[nn.Linear]:
    """Return a backbone's linear layers for LoRA adapters, once per process."""
    return find_linears(backbone.model, remedy='use [model] kind = "token-classifier"')


@lru_cache(maxsize=8)
def _find_attentions(backbone: Backbone) -> list[nn.Module]:
    """Make a backbone accept prompts, once per process; return its self-attentions."""
    return install_prompts(backbone.model)


class TunedEncoder(TaggingModel):
    """A shared frozen encoder, of which a model trains small additions.

    Attributes:
        backbone: The shared encoder.
    """

    reads = EncoderCorpus
    encoder_key = "encoder"

    def __init__(self, config: ModelConfig, tagset: TagSet, backbone: Backbone) -> None:
        super().__init__(config, tagset)
        self.backbone = backbone

    def count_frozen(self) -> int:
        """Return the number of the encoder's parameters, without unused layers."""
        return sum(p.numel() for p in self.backbone.model.parameters())

    @property
    def backbone_fingerprint(self) -> str:
        """SHA-256 over the frozen encoder's weights and settings."""
        return self.backbone.fingerprint

    def _encode(
        self, documents: tuple[Document, ...], options: PrepareOptions
    ) -> EncoderCorpus:
        """Encode documents without a cache, because tuning changes the states."""
        encoded = encode_corpus(
            documents, self.tagset, max_tokens=self.config.max_tokens
        )
        return EncoderCorpus.of(
            encoded,
            self.backbone.tokenizer,
            self.backbone.frame.capacity,
            progress=options.progress,
        )


class EncoderTagger(TunedEncoder):
    """A tuned encoder with a CRF; see `build_encoder_tagger`.

    Attributes:
        backbone: The shared encoder.
        lora: The LoRA adapters, or None.
        prompts: The prompts, or None.
        crf: The projection to tags, and the CRF.
    """

    transfer = "crf.project.weight"
    confidence_meaning = CrfReading.confidence_meaning

    def __init__(
        self, config: EncoderTaggerConfig, tagset: TagSet, seed: int, backbone: Backbone
    ) -> None:
        super().__init__(config, tagset, backbone)
        self.lora: LoRA | None = None
        self.prompts: Prompts | None = None
        if config.tuning == "lora":
            self.lora = LoRA(_find_linears(backbone), config.rank, config.alpha, seed)
        elif config.tuning == "prompts" and config.prompts:
            self.prompts = Prompts(
                len(_find_attentions(backbone)),
                backbone.heads,
                backbone.width,
                count=config.prompts,
                hidden=config.prompt_hidden,
                seed=seed,
            )
        with seeding_layer(seed, "crf"):
            self.crf = CrfOutput(backbone.width, tagset)

    @property
    def widths(self) -> tuple[int, ...]:
        """The columns of each layer of `Losses.hidden`, for all layers that are run."""
        return (self.backbone.width,) * self.backbone.layers

    def _read(
        self, corpus: EncoderCorpus, chosen: np.ndarray, *, all_layers: bool = False
    ) -> CrfReading:
        batch = Batch.of(corpus, chosen, self.device)
        layers = self._compute_word_vectors(corpus, batch, all_layers=all_layers)
        features = F.dropout(layers[-1], self.config.dropout, self.training)
        return CrfReading(self.crf, batch, features, layers)

    def _compute_word_vectors(
        self, corpus: EncoderCorpus, batch: Batch, *, all_layers: bool
    ) -> list[Tensor]:
        """Return word vectors, (sentences, steps, width), above the last or all layers.

        See `compute_word_vectors`.
        """
        return compute_word_vectors(
            self.backbone,
            corpus,
            batch,
            run=partial(self._run, all_layers=all_layers),
            dtype=self.crf.project.weight.dtype,
            layers=self.backbone.layers if all_layers else 1,
        )

    def _run(
        self, ids: Tensor, mask: Tensor, *, all_layers: bool
    ) -> tuple[Tensor, ...]:
        """Run the frozen encoder with its tuning; see `Backbone.compute_states`."""
        options: dict[str, Any] = {}
        if self.lora is not None:
            options["around"] = self.lora.applying(_find_linears(self.backbone))
        elif self.prompts is not None:
            attentions = _find_attentions(self.backbone)
            options["prompts"] = assign_prompts(attentions, self.prompts())
        # Without tuning, nothing below the projection is trained.
        needs_gradient = torch.is_grad_enabled() and bool(options)
        with torch.set_grad_enabled(needs_gradient):
            return self.backbone.compute_states(
                ids, mask, all_layers=all_layers, **options
            )


def build_encoder_tagger(
    config: EncoderTaggerConfig,
    tagset: TagSet,
    seed: int,
    device: str | torch.device = "cpu",
) -> EncoderTagger:
    """Return a new model that uses the process's shared copy of the encoder.

    Raises:
        ConfigError: There is no such layer, or the encoder cannot be tuned in this way;
            or as `build_model`.
        ModelError: As `build_model`.
        MissingExtra: As `build_model`.
    """
    backbone = open_backbone(config.encoder, config.depth, device)
    return EncoderTagger(config, tagset, seed, backbone).to(device)


KIND = Kind(EncoderTaggerConfig, build_encoder_tagger)
