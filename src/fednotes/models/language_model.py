"""Language models for pre-training on notes: masked words (BERT) or infilled spans (BART).

A site's words must not be read off what it sends. The sign of the output bias' gradient tells
every masked token, and only the rows of a batch's words have a gradient in the embeddings; so
both are frozen unless everything is asked for (`train = "all"`, as Liu and Miller 2020 did).

Logits are made at the positions to guess alone: a seventh of the largest product of a step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.seeds import seed_of
from fednotes.core.settings import build
from fednotes.core.store import write_folder
from fednotes.core.tensors import device_of
from fednotes.data.masking import IGNORED, Masked
from fednotes.data.packing import Sequences, Specials
from fednotes.data.token_cache import FastTokenizer, fast_tokenizer
from fednotes.models import language_heads as heads
from fednotes.models.bart_backbone import set_layer_norm_eps
from fednotes.models.encoder import positions_of
from fednotes.models.frozen import encoder_directory
from fednotes.models.lora import LoRA, targets
from fednotes.models.pretrained import (
    open_config,
    open_pretrained,
    open_tokenizer,
    quiet,
    require_complete,
    require_fit,
    write_pretrained,
)


@dataclass(frozen=True)
class LanguageModelConfig:
    """A pre-training job's [model] table.

    encoder: "minilm" or a Hugging Face directory (BERT, RoBERTa, DistilBERT, others with a
    masked-language-model head; BART for "denoise").
    fresh: random weights, with the directory's tokenizer and configuration; then layers,
    width, heads and feed_forward change its sizes (0: as they are).
    train: "encoder", all but the word embeddings (which are also the output matrix) and the
    output bias; "all", the paper's setting; "top", the last `top` layers; "lora", low-rank
    changes of the query and value maps. The head's transform is trained in every case.
    """

    encoder: str = "minilm"
    objective: Literal["mlm", "mlm+nsp", "denoise"] = "mlm"
    fresh: bool = False
    layers: int = 0
    width: int = 0
    heads: int = 0
    feed_forward: int = 0
    train: Literal["encoder", "all", "top", "lora"] = "encoder"
    top: int = 2
    rank: int = 8
    alpha: float = 16.0

    def __post_init__(self) -> None:
        sizes = self.sizes
        if low := [name for name, value in sizes.items() if value < 0]:
            raise ConfigError(f"{low[0]} must be 0 (as it is) or above, not {sizes[low[0]]}")
        if any(sizes.values()) and not self.fresh:
            name = next(name for name, value in sizes.items() if value)
            raise ConfigError(f"{name} changes a model without weights only: set fresh = true")
        if self.fresh and self.train != "all":
            raise ConfigError(
                f'train = "{self.train}" would leave random word embeddings as they are: a fresh '
                'model needs train = "all"'
            )
        if self.top < 1 or self.rank < 1 or not self.alpha > 0:
            raise ConfigError("top and rank must be 1 or above, alpha above 0")

    @property
    def sizes(self) -> dict[str, int]:
        """The four numbers that change a fresh model."""
        return {name: getattr(self, name) for name in heads.SIZES}


def language_model_config(table: Mapping[str, Any]) -> LanguageModelConfig:
    """The [model] table of a pre-training job. Raises ConfigError for an unknown or wrong key."""
    return build(LanguageModelConfig, table, "model")


@dataclass(frozen=True, eq=False)
class Guesses:
    """What a batch cost and how much of it was right.

    masked, next_sentence: scalars with gradient, the mean over the predicted tokens and over
    the pairs of next-sentence prediction (zero without). The numbers below them are read when
    they are asked for, so that an accelerator need not wait for them before the backward pass.
    """

    masked: Tensor
    next_sentence: Tensor
    predictions: int
    pairs: int
    sums: Tensor  # (3,) float64: loss of the tokens, tokens right, pairs right

    @property
    def loss(self) -> Tensor:
        """Both means together, as BERT's training adds them."""
        return self.masked + self.next_sentence

    @property
    def token_loss(self) -> float:
        """Sum over the predicted tokens, in nats."""
        return float(self.sums[0])

    @property
    def right(self) -> int:
        """Tokens whose most likely guess is the right one."""
        return int(self.sums[1])

    @property
    def pair_right(self) -> int:
        """Pairs told rightly; 0 without next-sentence prediction."""
        return int(self.sums[2])


class LanguageModel(nn.Module):
    """A pre-trained or fresh transformer with its prediction head; see `build_language_model`.

    vocabulary: ids are below it. positions: tokens of a sequence at most, special ones
    included. tokenizer, specials: for the data layer. new_head: the directory held no weights
    of the head, so it should be trained for some steps with the encoder frozen (`head()`)
    before the encoder is. revealing: word embeddings or output bias are trained.
    """

    def __init__(
        self, config: LanguageModelConfig, tokenizer: Any, model: Any, new_head: bool, seed: int
    ) -> None:
        super().__init__()
        self.config, self.new_head = config, new_head
        self.model = model.requires_grad_(False)
        self._hf_tokenizer = tokenizer
        self.tokenizer: FastTokenizer = fast_tokenizer(tokenizer.backend_tokenizer)
        self.specials = specials_of(tokenizer, config.encoder)
        self.vocabulary = self.tokenizer.vocabulary
        self.positions = positions_of(tokenizer, model)
        self._pairs = config.objective == "mlm+nsp"
        self._segments = config.objective != "denoise" and heads.takes_segments(model)
        self._head = None if config.objective == "denoise" else heads.head_of(model)
        self.lora: LoRA | None = None
        self._maps: list[nn.Linear] = []
        if config.train == "lora":
            self._maps = _lora_maps(model)
            self.lora = LoRA(model, config.rank, config.alpha, seed)
        secret = heads.revealing(model)
        self._head_names = heads.head_names(model, self._pairs)
        for name, parameter in model.named_parameters():
            open_to_all = config.train == "all" or id(parameter) not in secret
            parameter.requires_grad_(open_to_all and name in self._chosen())
        self.revealing = any(id(p) in secret for p in self.trainable().values())
        self.eval()

    def _chosen(self) -> set[str]:
        """Names of what this way of training changes, frozen embeddings not taken out."""
        everything = {name for name, _ in self.model.named_parameters()}
        if self.config.train == "lora":
            return self._head_names
        if self.config.train == "top":
            return self._head_names | heads.top_names(self.model, self.config.top)
        return everything

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.model.parameters()).device

    def trainable(self) -> dict[str, nn.Parameter]:
        """What training changes and sends, sorted by name."""
        found = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if self.lora is not None:
            found |= {f"lora.{name}": p for name, p in self.lora.named_parameters()}
        return dict(sorted(found.items()))

    def head(self) -> dict[str, nn.Parameter]:
        """Those of `trainable` that belong to the prediction heads (with pairs, the pooler)."""
        return {n: p for n, p in self.trainable().items() if n in self._head_names}

    def loss(self, sequences: Sequences, masked: Masked) -> Guesses:
        """Run a batch. Loss in float32, whatever an autocast around the call computes in.

        masked: of `sequences.ids`, by `mask` ("mlm", "mlm+nsp") or `denoise`. Raises
        ConfigError for sequences without pairs where the next sentence is to be predicted.
        """
        at = self._tensor(masked.positions)
        wanted = self._tensor(masked.labels).flatten()[at]  # (predictions,)
        adapted = nullcontext() if self.lora is None else self.lora.applied(self._maps)
        with adapted:
            if self.config.objective == "denoise":
                states, pooled = self._denoised(masked), None
                head: heads.Logits = self._bart_logits
            else:
                states, head, pooled = self._encoded(sequences, masked)
        picked = states.flatten(0, 1).index_select(0, at)  # (predictions, width)
        total, right = heads.cross_entropy(head, picked, wanted)
        masked_loss = total / max(1, len(wanted))
        next_loss = masked_loss.new_zeros(())
        sums = [total.detach(), right, torch.zeros_like(right)]
        pairs = 0
        if self._pairs:
            next_loss, sums[2], pairs = self._next_sentence(pooled, sequences)
        both = torch.stack([s.double() for s in sums])
        return Guesses(masked_loss, next_loss, len(wanted), pairs, both)

    def _encoded(self, sequences: Sequences, masked: Masked) -> tuple[Tensor, heads.Logits, Any]:
        """States (batch, tokens, width), what makes logits of them, and pooled states."""
        given: dict[str, Tensor] = {"input_ids": self._tensor(masked.inputs)}
        longest = masked.inputs.shape[1]
        if (sequences.lengths < longest).any():
            inside = np.arange(longest) < sequences.lengths[:, None]
            given["attention_mask"] = self._tensor(inside.astype(np.int64))
        if self._segments:
            given["token_type_ids"] = self._tensor(sequences.segments)
        if self._head is None:
            output = self.model(**given)
            return heads.whole_logits(output), _unchanged, None
        output = self.model.base_model(**given)
        return output[0], self._head, output.pooler_output if self._pairs else None

    def _denoised(self, masked: Masked) -> Tensor:
        """The decoder's states, (batch, tokens, width): each reads the tokens before its own."""
        model = self.model
        inputs, labels = self._tensor(masked.inputs), self._tensor(masked.labels)
        before = labels.roll(1, 1).masked_fill(labels.roll(1, 1) == IGNORED, self.specials.pad)
        before[:, 0] = model.config.decoder_start_token_id
        states: Tensor = model.model(
            input_ids=inputs,
            attention_mask=(inputs != self.specials.pad).long(),
            decoder_input_ids=before,
            use_cache=False,
        )[0]
        return states

    def _bart_logits(self, states: Tensor) -> Tensor:
        logits: Tensor = self.model.lm_head(states) + self.model.final_logits_bias
        return logits

    def _next_sentence(self, pooled: Any, sequences: Sequences) -> tuple[Tensor, Tensor, int]:
        """Mean loss, how many are right, and of how many. Label 1: B is no continuation."""
        if sequences.random_next is None:
            raise ConfigError('objective = "mlm+nsp" needs sequences that are pairs')
        wanted = self._tensor(sequences.random_next)  # (batch,)
        logits = self.model.cls.seq_relationship(pooled).float()  # (batch, 2)
        right = (logits.detach().argmax(-1) == wanted).sum()
        return F.cross_entropy(logits, wanted), right, len(wanted)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)

    def save(self, directory: Path) -> None:
        """A Hugging Face directory: `AutoModel` and the tokenizer's classes load it.

        LoRA's changes are added to the weights. A directory that was there stays whole until
        the new one is. Raises ModelError if a weight is not finite or the folder holds
        something else, FednotesError if the disk is full.
        """
        ours = (directory / "config.json").is_file()
        if directory.exists() and not ours and (directory.is_file() or any(directory.iterdir())):
            raise ModelError(f"{directory}: holds something else than a model; name another")
        for name, parameter in self.trainable().items():
            if not torch.isfinite(parameter).all():
                raise ModelError(f"{directory}: {name!r} is not finite: training diverged")
        model = self.model if self.lora is None else self._merged(self.lora)
        write_folder(directory, lambda f: write_pretrained(f, model, self._hf_tokenizer))

    @torch.no_grad()
    def _merged(self, lora: LoRA) -> Any:
        model = copy.deepcopy(self.model)
        for linear, down, up in zip(targets(model), lora.down, lora.up, strict=True):
            linear.weight += lora.scale * up @ down
        return model


def build_language_model(
    config: LanguageModelConfig, seed: int, device: str | torch.device = "cpu"
) -> LanguageModel:
    """Open or make a language model, in evaluation mode; weights that are new come from the seed.

    Raises ModelError (no such directory, damaged, a tokenizer without a mask, cls, sep or pad
    token or not the model's, an architecture that the objective cannot train), ConfigError
    (sizes that cannot be, a device that is not there), MissingExtra.
    """
    directory = encoder_directory(config.encoder)
    kind = open_config(directory)
    _require_kind(directory, kind, config.objective)
    auto = {
        "mlm": "AutoModelForMaskedLM",
        "mlm+nsp": "AutoModelForPreTraining",
        "denoise": "BartForConditionalGeneration",
    }[config.objective]
    if config.fresh:
        tokenizer, model = _fresh(directory, kind, auto, config, seed)
        missing: tuple[str, ...] = ()
    else:
        tokenizer, model, missing = open_pretrained(directory, auto)
        parameters = {name for name, _ in model.named_parameters()}
        of_head = heads.head_names(model, config.objective == "mlm+nsp")
        missing = tuple(name for name in missing if name in parameters)
        require_complete(directory, tuple(name for name in missing if name not in of_head))
        heads.initialise_head(model, missing, seed)
    if config.objective == "denoise":
        set_layer_norm_eps(model)
    if config.objective == "mlm+nsp" and not hasattr(model.cls, "seq_relationship"):
        raise ModelError(f"{directory}: {_NO_PAIRS}")
    there = device_of(device)
    return LanguageModel(config, tokenizer, model.to(there), bool(missing), seed).to(there)


def _unchanged(logits: Tensor) -> Tensor:
    return logits


_NO_PAIRS = 'has no next-sentence head: give a BERT, or set objective = "mlm"'


def _require_kind(directory: Path, kind: Any, objective: str) -> None:
    """The objective can train this architecture, as far as its configuration tells."""
    if objective == "denoise" and kind.model_type != "bart":
        raise ModelError(
            f'{directory}: is a model of the kind {kind.model_type!r}; objective = "denoise" '
            'needs a BART, set objective = "mlm" for this one'
        )
    if objective != "denoise" and getattr(kind, "is_encoder_decoder", False):
        raise ModelError(f'{directory}: is an encoder-decoder; set objective = "denoise"')
    from transformers import BertConfig

    if objective == "mlm+nsp" and not isinstance(kind, BertConfig):
        raise ModelError(f"{directory}: {_NO_PAIRS}")


def _fresh(
    directory: Path, kind: Any, auto: str, config: LanguageModelConfig, seed: int
) -> tuple[Any, Any]:
    """The directory's tokenizer, and a model of its configuration with random weights."""
    import transformers

    tokenizer = open_tokenizer(directory)
    heads.resize(directory, kind, config.sizes)
    make = getattr(transformers, auto)
    make = getattr(make, "from_config", getattr(make, "_from_config", make))
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_of(seed, "init", "language-model"))
        try:
            model = make(kind).float().eval()
        except (TypeError, ValueError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"{directory}: cannot be made anew: {reason}") from error
    require_fit(directory, tokenizer, model)
    return tokenizer, model


def specials_of(tokenizer: Any, where: str) -> Specials:
    """The ids of a tokenizer that are no words. Raises ModelError if one of four is missing."""
    marks = ("cls", "sep", "mask", "pad")
    ids: dict[str, Any] = {m: getattr(tokenizer, f"{m}_token_id", None) for m in marks}
    lacking = [mark for mark, value in ids.items() if value is None]
    if lacking:
        raise ModelError(
            f"encoder {where!r}: its tokenizer has no {' and no '.join(lacking)} token; a language "
            "model is trained with a BERT's, RoBERTa's or BART's tokenizer"
        )
    if len(set(ids.values())) < len(ids):
        raise ModelError(f"encoder {where!r}: its tokenizer uses one special token as two")
    others = set(tokenizer.all_special_ids) - {*ids.values(), tokenizer.unk_token_id}
    return Specials(**ids, others=tuple(sorted(others)))


def _lora_maps(model: Any) -> list[nn.Linear]:
    try:
        return targets(model)
    except ConfigError as error:  # which speaks of a tagger's setting
        raise ConfigError(f'train = "lora": {str(error).partition(": ")[2]}') from None
