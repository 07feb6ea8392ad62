"""A frozen encoder, tuned by LoRA or prompts, with a CRF on top.

Any Hugging Face encoder reads the text; a word is the mean of its sub-words' states above one
layer; a projection and a CRF tag it. Trained and sent are the CRF's parameters and

    tuning = "lora"      low-rank changes of the query and value projections (Hu et al. 2021)
    tuning = "prompts"   keys and values beside the text's (LightNER; Wang et al. 2023, Eq. 14)
    tuning = "none"      nothing else; a `Tagger` with `contextual` computes the same features
                         once and for all, and is then faster by far

The encoder is no part of the model: all models of a process share one (`backbone.py`).
What measures transfer between losses is the projection's weight, under each tuning: its
gradient comes from the emissions' alone, without a backward pass through the encoder.

One frozen encoder for all the models of a process that are tuned around it.

A `Backbone` is no part of any model: nothing of it is trained, saved or sent. Simulated sites
that ask for the same directory, depth, device and precision are given the same object, so
the weights are in memory once; what a site trains (prompts, LoRA) comes in with each call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.tensors import device_of
from fednotes.core.types import Document, TagSet
from fednotes.data.batches import encode_corpus, with_spans, without_gold
from fednotes.encoders.encoder import FINGERPRINTED, marks_of, open_encoder, positions_of
from fednotes.encoders.frozen import encoder_directory, fingerprint, length_batches, stamp_of
from fednotes.encoders.lora import LoRA, targets
from fednotes.encoders.prompts import Prompts, install, joined
from fednotes.taggers.corpora import (
    EncoderBatch,
    EncoderCorpus,
    by_encoder,
    evaluating,
    flat_corpus,
    padded_windows,
    read_pieces,
    window_groups,
)
from fednotes.taggers.layers import Output, seeded
from fednotes.taggers.model import Corpus, Losses
from fednotes.taggers.partial import (
    Soft,
    added_tags,
    allowed_tags,
    posterior,
    require_types,
    retag,
    split_loss,
    transfer_gradients,
)


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


WHOLE_BATCH = (8192, 256)  # most sub-words and sentences that are decoded together


@dataclass(frozen=True)
class EncoderTaggerConfig:
    """Field names are TOML keys of a job's [model] table.

    encoder: "minilm" or a Hugging Face directory. layer: the last of its layers that is run
    (0 = all); not given: 5 of "minilm", whose sixth says less of words, else all.
    tuning: "lora", "prompts" or "none". rank, alpha: of LoRA, W + alpha / rank · B A.
    prompts: how many for each layer (0 = none); prompt_hidden: width of the layer between.
    dropout: on the words' vectors. max_tokens: longer sentences are cut between entities; a
    sentence longer than the encoder's positions is read in overlapping windows.
    """

    kind: Literal["encoder-tagger"] = "encoder-tagger"
    encoder: str = "minilm"
    layer: int | None = None
    tuning: Literal["lora", "prompts", "none"] = "lora"
    rank: int = 8
    alpha: float = 16.0
    prompts: int = 10
    prompt_hidden: int = 64
    dropout: float = 0.2
    max_tokens: int = 256

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that no model can have."""
        for name, least in (("rank", 1), ("prompts", 0), ("prompt_hidden", 1), ("max_tokens", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} = {getattr(self, name)}: it must be at least {least}")
        if self.layer is not None and self.layer < 0:
            raise ConfigError(f"layer = {self.layer}: it must be at least 0 (0 = all layers)")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout = {self.dropout}: it must be at least 0 and below 1")
        if not self.alpha > 0.0:
            raise ConfigError(f"alpha = {self.alpha}: it must be above 0")
        if self.tuning not in ("lora", "prompts", "none"):
            raise ConfigError(f"tuning = {self.tuning!r}: 'lora', 'prompts' or 'none'")

    @property
    def depth(self) -> int:
        """The last layer that is run, 0 = the last there is."""
        return (5 if self.encoder == "minilm" else 0) if self.layer is None else self.layer


class EncoderTagger(nn.Module):
    """A tuned encoder with a CRF; see `build_encoder_tagger`.

    config, tagset: what it was built from. backbone: the shared frozen encoder.
    """

    transfer: str = "crf.project.weight"
    softens: bool = True

    def __init__(
        self, config: EncoderTaggerConfig, tagset: TagSet, seed: int, backbone: Backbone
    ) -> None:
        super().__init__()
        self.config, self.tagset, self.backbone = config, tagset, backbone
        if config.tuning == "lora":
            self.lora = LoRA(backbone.model, config.rank, config.alpha, seed)
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
            self.crf = Output(backbone.width, tagset)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.crf.project.weight.device

    @property
    def frozen(self) -> int:
        """Parameters of the encoder, of which the layers above the used ones are left out."""
        return sum(p.numel() for p in self.backbone.model.parameters())

    @property
    def widths(self) -> tuple[int, ...]:
        """The columns of each layer of `Losses.hidden`: every encoder layer that is run."""
        return (self.backbone.width,) * self.backbone.layers

    @property
    def output_width(self) -> int:
        """The columns of `Losses.outputs`."""
        return self.crf.project.in_features

    @property
    def backbone_fingerprint(self) -> str:
        """SHA-256 over the frozen encoder's weights and settings."""
        return self.backbone.fingerprint

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name → parameter, sorted by name, of everything that training changes and sends."""
        named = sorted(self.named_parameters(), key=lambda pair: pair[0])
        return {name: parameter for name, parameter in named if parameter.requires_grad}

    # ---- corpora -------------------------------------------------------------------------------

    def prepare(
        self,
        documents: Sequence[Document],
        cache: Path | None = None,
        progress: Callable[[int, int], None] | None = None,
        gold: bool = True,
    ) -> EncoderCorpus:
        """Encode a corpus; every type known.

        cache is not used: tuning changes what the encoder says. progress(done, all) is called
        as sentences are cut into sub-words. gold=False strips the spans first. Raises
        DataError for a label that the tag set does not have.
        """
        given = tuple(documents) if gold else without_gold(documents)
        encoded = encode_corpus(given, self.tagset, max_tokens=self.config.max_tokens)
        pieces = read_pieces(encoded, self.backbone.tokenizer, progress=progress)
        return flat_corpus(encoded, pieces, self.backbone.capacity)

    def annotate(
        self, corpus: Corpus, documents: Sequence[Document], known: Collection[str]
    ) -> EncoderCorpus:
        """The same texts with the spans of `documents` as the annotation.

        Raises ConfigError for a known type that the tag set lacks, DataError for other texts.
        """
        own, types = by_encoder(corpus), require_types(known, self.tagset)
        return replace(own, encoded=retag(own.encoded, documents, types), known=types, soft=None)

    @torch.no_grad()
    def soften(self, corpus: Corpus) -> EncoderCorpus:
        """The same corpus whose target is this model's posterior, given the known types' spans.

        Unchanged where every type is known: nothing is left to guess.
        """
        own, tags = by_encoder(corpus), len(self.tagset.tags)
        if own.complete(self.tagset):
            return replace(own, soft=None)
        unary = np.zeros((len(own.encoded.form), tags), np.float32)
        pairs = np.zeros((own.sentences, tags, tags), np.float32)
        with evaluating(self):
            for indices in length_batches(own.lengths.tolist(), *WHOLE_BATCH):
                batch = EncoderBatch.of(own, indices, self.tagset, self.device)
                allowed = allowed_tags(batch.tags, self.tagset, own.known)
                emissions = self.crf.project(self._words(own, batch)[-1])
                of_tags, of_pairs = posterior(self.crf.crf, emissions, allowed, batch.lengths)
                unary[batch.tokens[batch.inside]] = of_tags.float().cpu().numpy()[batch.inside]
                pairs[indices] = of_pairs.float().cpu().numpy()
        return replace(own, soft=Soft(unary, pairs))

    # ---- losses --------------------------------------------------------------------------------

    def losses(
        self, corpus: Corpus, indices: Sequence[int] | np.ndarray, *, states: bool = False
    ) -> Losses:
        """The losses of some sentences, in the order of `indices`; see `partial.py`.

        `hidden` has the output of each encoder layer that is run, mean over the words.
        Raises TrainingError for no sentences.
        """
        own = by_encoder(corpus)
        batch = EncoderBatch.of(own, indices, self.tagset, self.device)
        layers = self._words(own, batch, every=states)  # (sentences, steps, width) each
        features = F.dropout(layers[-1], self.config.dropout, self.training)
        source, target = split_loss(
            self.crf.crf,
            self.crf.project(features),
            batch.tags,
            batch.allowed,
            batch.lengths,
            batch.soft,
        )
        if not states:
            return Losses(source, target)
        inside = torch.from_numpy(batch.inside).to(self.device)
        return Losses(
            source,
            target,
            hidden=tuple(layer.sum(1) / batch.lengths[:, None] for layer in layers),
            outputs=features[inside],  # (tokens, width)
            pseudo=added_tags(batch.tags, self.tagset, own.known)[inside],
            score=self.crf.project,
        )

    def gradients(
        self, corpus: Corpus, indices: Sequence[int] | np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Gradients with respect to `crf.project.weight`, without dropout; see `Model`."""
        own, chosen = by_encoder(corpus), np.asarray(indices, np.int64)
        weight = self.crf.project.weight
        each = weight.new_zeros(len(chosen), weight.numel())
        total = weight.new_zeros(weight.numel())
        with evaluating(self):
            for part in length_batches(own.lengths[chosen].tolist(), *WHOLE_BATCH):
                batch = EncoderBatch.of(own, chosen[part], self.tagset, self.device)
                with torch.no_grad():
                    features = self._words(own, batch)[-1]
                each[part], of_target = transfer_gradients(
                    self.crf.crf,
                    self.crf.project,
                    features,
                    batch.tags,
                    batch.allowed,
                    batch.lengths,
                    batch.soft,
                )
                total += of_target
        return each, total

    # ---- prediction ----------------------------------------------------------------------------

    @torch.no_grad()
    def predict(self, documents: Sequence[Document] | Corpus) -> tuple[Document, ...]:
        """The documents with predicted spans in place of their own.

        Given documents, what is annotated in them is not looked at. Dropout is off.
        """
        if isinstance(documents, Sequence):
            own = self.prepare(documents, gold=False)
        else:
            own = by_encoder(documents)
        encoded = own.encoded
        ids = np.zeros(len(encoded.form), np.int64)  # (tokens,)
        with evaluating(self):
            for indices in length_batches(own.lengths.tolist(), *WHOLE_BATCH):
                batch = EncoderBatch.of(own, indices, self.tagset, self.device)
                emissions = self.crf.project(self._words(own, batch)[-1])
                best = self.crf.crf.decode(emissions, batch.lengths).cpu().numpy()
                ids[batch.tokens[batch.inside]] = best[batch.inside]
        return with_spans(encoded, ids)

    # ---- the encoder ---------------------------------------------------------------------------

    def _words(
        self, corpus: EncoderCorpus, batch: EncoderBatch, every: bool = False
    ) -> list[Tensor]:
        """Words' vectors (sentences, steps, width) above the last layer, or above each.

        The mean of a word's sub-words; zero at padding and for a word without sub-words.
        """
        backbone, steps = self._frozen(), batch.inside.shape[1]
        places: list[np.ndarray] = []
        parts: list[list[Tensor]] = []  # of each group of windows, each layer
        for group in window_groups(
            corpus, batch.sentences, backbone.rows, len(backbone.prefix), self.device
        ):
            places.append(group.sentence * steps + group.token - batch.tokens[group.sentence, 0])
            share = torch.from_numpy(group.share).to(self.device, backbone.dtype)
            flat = torch.from_numpy(group.at).to(self.device)
            with torch.set_grad_enabled(torch.is_grad_enabled() and self._tuned):
                states = backbone.states(
                    group.ids, group.mask, every=every, **self._tuning(backbone)
                )
            parts.append([s.flatten(0, 1).index_select(0, flat) * share[:, None] for s in states])
        shape = (*batch.inside.shape, backbone.width)
        zero = torch.zeros(shape, dtype=backbone.dtype, device=self.device).flatten(0, 1)
        if not parts:
            return [zero.view(shape)] * (backbone.layers if every else 1)
        place = torch.from_numpy(np.concatenate(places)).to(self.device)
        return [
            zero.index_add(0, place, torch.cat(of_layer)).view(shape)
            for of_layer in zip(*parts, strict=True)
        ]

    @property
    def _tuned(self) -> bool:
        return hasattr(self, "lora") or hasattr(self, "prompts")

    def _tuning(self, backbone: Backbone) -> dict[str, Any]:
        """What goes with a forward pass of the frozen encoder."""
        if hasattr(self, "lora"):
            around: AbstractContextManager[None] = self.lora.applied(_maps(backbone))
            return {"around": around}
        if hasattr(self, "prompts"):
            return {"prompts": joined(_attentions(backbone), self.prompts())}
        return {}

    def _frozen(self) -> Backbone:
        """The backbone, on the device and in the precision that the parameters now have."""
        weight = self.crf.project.weight
        if (self.backbone.device, self.backbone.dtype) != (weight.device, weight.dtype):
            self.backbone = open_backbone(
                str(self.backbone.directory), self.backbone.layers, weight.device, weight.dtype
            )
        return self.backbone


def build_encoder_tagger(
    config: EncoderTaggerConfig, tagset: TagSet, seed: int, device: str | torch.device = "cpu"
) -> EncoderTagger:
    """A new model around the process's one copy of the encoder.

    Initial values come from (seed, part) alone: sites with other tag sets start from equal
    prompts or LoRA. The global random state is left as it was.

    Raises ConfigError (no types, a layer that is not there, an encoder that cannot be tuned
    so), ModelError (nothing usable in the directory), MissingExtra.
    """
    if not tagset.types:
        raise ConfigError("the tag set has no entity types: a tagger needs at least one")
    backbone = open_backbone(config.encoder, config.depth, device)
    return EncoderTagger(config, tagset, seed, backbone).to(device)


@lru_cache(maxsize=8)
def _maps(backbone: Backbone) -> list[nn.Linear]:
    return targets(backbone.model)


@lru_cache(maxsize=8)
def _attentions(backbone: Backbone) -> list[nn.Module]:
    return install(backbone.model)
