"""Language models for pre-training on notes: masked words (BERT) or infilled spans
(BART).

A site's words must not be read off what it sends. The sign of the output bias' gradient
tells every masked token, and only the rows of a batch's words have a gradient in the
embeddings; so both are frozen unless everything is asked for (`train = "all"`, as Liu
and Miller 2020 did).

Logits are made at the positions to guess alone: a seventh of the largest product of a
step.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.listeners import BatchListeners
from fednotes.core.seeds import seed_of
from fednotes.core.settings import build, checked
from fednotes.core.store import write_folder
from fednotes.core.tensors import device_of
from fednotes.encoders.adapters import Changed, LoRA, targets
from fednotes.encoders.bart import set_layer_norm_eps
from fednotes.encoders.packing import IGNORED, Masked, Sequences, Specials
from fednotes.encoders.pretrained import (
    NO_ENCODER,
    encoder_directory,
    open_config,
    open_pretrained,
    open_tokenizer,
    positions_of,
    quiet,
    require_complete,
    require_fit,
    upper_layers,
    write_pretrained,
)
from fednotes.encoders.token_cache import FastTokenizer, fast_tokenizer

Logits = Callable[[Tensor], Tensor]  # (states, width) → (states, vocabulary)

# The names by which architectures call the same four sizes.
SIZES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layers", "encoder_layers", "decoder_layers"),
    "width": ("hidden_size", "dim", "d_model", "embedding_size"),
    "heads": (
        *("num_attention_heads", "n_heads"),
        *("encoder_attention_heads", "decoder_attention_heads"),
    ),
    "feed_forward": (
        "intermediate_size",
        "hidden_dim",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
    ),
}
CHUNK = 2048  # predictions whose logits are held at once; above, they are made twice
NEW_DENSE, NEW_NORM = 0.3, 0.85  # of a head without weights; see `initialise_head`


@torch.no_grad()
def head_of(model: Any) -> Logits | None:
    """The masked-language-model head as a function of states; None for an unknown
    layout.

    Known: BERT's `cls.predictions`, RoBERTa's `lm_head`, DistilBERT's three parts and
    ModernBERT's two. A head that gives other logits than the model is not used.
    """
    found: Logits | None = None
    if isinstance(getattr(getattr(model, "cls", None), "predictions", None), nn.Module):
        found = model.cls.predictions
    elif isinstance(getattr(model, "lm_head", None), nn.Module):
        found = model.lm_head
    elif all(
        hasattr(model, f"vocab_{part}")
        for part in ("transform", "layer_norm", "projector")
    ):
        found = lambda states: model.vocab_projector(  # noqa: E731
            model.vocab_layer_norm(model.activation(model.vocab_transform(states)))
        )
    elif all(
        isinstance(getattr(model, part, None), nn.Module)
        for part in ("head", "decoder")
    ):
        found = lambda states: model.decoder(model.head(states))  # noqa: E731
    if found is None:
        return None
    # The ids in the middle of the vocabulary are words, whatever the architecture's
    # padding is.
    middle = len(model.get_input_embeddings().weight) // 2
    ids = torch.arange(middle - 2, middle + 2, device=model.device).clamp(min=0)[None]
    try:
        states = model.base_model(input_ids=ids)[0]  # (1, 4, width)
        whole = whole_logits(model(input_ids=ids))
        return (
            found
            if torch.allclose(found(states[0]), whole[0], rtol=1e-4, atol=1e-4)
            else None
        )
    except NO_ENCODER:
        return None


def whole_logits(output: Any) -> Tensor:
    """Token logits in what a model gives, whichever they are called; (batch, tokens,
    words)."""
    logits: Tensor = (
        output.prediction_logits if "prediction_logits" in output else output.logits
    )
    return logits


def revealing(model: Any) -> set[int]:
    """Ids (of the objects) of parameters whose gradient tells words: embeddings, output
    bias."""
    output = model.get_output_embeddings()
    found = [model.get_input_embeddings().weight]
    if output is not None:
        found += [output.weight, getattr(output, "bias", None)]
    # Where the output layer has none, its bias may stand beside it, a number for each
    # word.
    words = len(found[0])
    found += [p for p in model.parameters() if tuple(p.shape) == (words,)]
    return {id(parameter) for parameter in found if parameter is not None}


def head_names(model: Any, pairs: bool) -> set[str]:
    """Parameters of the prediction heads: what is not the encoder's; with pairs its
    pooler."""
    base = {
        id(p)
        for n, p in model.base_model.named_parameters()
        if not (pairs and "pooler" in n)
    }
    return {name for name, p in model.named_parameters() if id(p) not in base}


@torch.no_grad()
def initialise_head(model: Any, missing: Iterable[str], seed: int) -> None:
    """Draw weights that the directory does not hold from the seed: the same on every
    machine.

    The transform's square maps start as 0.3 times the identity and LayerNorm's weight
    as 0.85; biases as zero; all else (pooler, pair classifier) as the library has it,
    normal with the configuration's deviation (0.02). The output rows are the word
    embeddings, which a state of the same model is already near, so a random map would
    only hide what it says. Measured on MiniLM (CodiEsp's background texts; a uniform
    guess costs 10.33 nats): the library's start 10.97, held out after 50 steps 7.26;
    this start 10.32 and 7.06.
    """
    deviation = float(getattr(model.config, "initializer_range", 0.02))
    words, output = model.get_input_embeddings().weight, model.get_output_embeddings()
    norms = {
        f"{name}.{part}"
        for name, module in model.named_modules()
        if isinstance(module, nn.LayerNorm)
        for part, _ in module.named_parameters(recurse=False)
    }
    parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
    for name in sorted(set(missing) & parameters.keys()):
        parameter = parameters[name]
        if name in norms and name.endswith("weight"):
            parameter.fill_(NEW_NORM)
        elif parameter.dim() < 2:
            parameter.zero_()
        elif (
            parameter is getattr(output, "weight", None)
            and parameter.shape == words.shape
        ):
            # not tied in this directory; it is not trained by default
            parameter.copy_(words)
        elif parameter.shape[0] == parameter.shape[1] and "pooler" not in name:
            parameter.copy_(NEW_DENSE * torch.eye(len(parameter)))
        else:
            generator = torch.Generator().manual_seed(seed_of(seed, "init", name))
            parameter.normal_(0.0, deviation, generator=generator)


def resize(directory: Path, config: Any, sizes: Mapping[str, int]) -> None:
    """Give a configuration other sizes, in place; 0 leaves one as it is.

    Raises ConfigError where the heads do not divide the width, ModelError where the
    architecture does not know a size.
    """
    for key, value in sizes.items():
        names = [name for name in SIZES[key] if hasattr(config, name)]
        if value and not names:
            raise ModelError(
                f"{directory}: models of this kind have no setting for {key!r}"
            )
        for name in names if value else ():
            setattr(config, name, value)
    width, heads = (
        next(getattr(config, n) for n in SIZES[key] if hasattr(config, n))
        for key in ("width", "heads")
    )
    if width % heads:
        raise ConfigError(f"width = {width} cannot be shared by {heads} heads")


def cross_entropy(
    head: Logits, states: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """Summed loss, with gradient, and how many are right.

    Logits of many predictions (BART's are all tokens of a batch) are made chunk by
    chunk and again in the backward pass, for a vocabulary of 50,000 makes gigabytes of
    them.
    """

    def part(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(states).float()  # (predictions, vocabulary)
        right = (logits.detach().argmax(-1) == wanted).sum()
        return F.cross_entropy(logits, wanted, reduction="sum"), right

    if len(wanted) <= CHUNK:
        return part(states, wanted)
    parts = [
        checkpoint(part, s, w, use_reentrant=False, preserve_rng_state=False)
        for s, w in zip(states.split(CHUNK), wanted.split(CHUNK), strict=True)
    ]
    losses, rights = zip(*parts, strict=True)
    return torch.stack(losses).sum(), torch.stack(rights).sum()


@checked(frozen=True)
class LanguageModelConfig:
    """A language model that is pre-trained.

    Attributes:
        encoder: "minilm" or a Hugging Face directory: BERT, RoBERTa, DistilBERT or
            another encoder with a masked-language-model head; BART for objective =
            "denoise".
        objective: What is learnt: masked tokens ("mlm"), also whether one text follows
            the other ("mlm+nsp"), or infilled spans of BART ("denoise").
        fresh: Whether the model starts from random weights, with the directory's
            tokenizer and configuration.
        layers: Number of layers of a fresh model; 0 leaves the directory's.
        width: Width of a fresh model; 0 leaves the directory's.
        heads: Number of attention heads of a fresh model; 0 leaves the directory's.
        feed_forward: Width of the feed-forward layers of a fresh model; 0 leaves the
            directory's.
        train: What is trained: "encoder" is all but the word embeddings (which are also
            the output matrix) and the output bias; "all" is the paper's setting; "top"
            the last layers; "lora" low-rank changes. The head's transform is always
            trained.
        top: Number of layers that train = "top" trains.
        rank: Rank of the changes of train = "lora": W + alpha / rank · B A.
        alpha: Scale of these changes; see `rank`.
        maps: Maps of the layers that train = "lora" changes: "all", or those of the
            queries and values ("attention").
    """

    encoder: str = "minilm"
    objective: Literal["mlm", "mlm+nsp", "denoise"] = "mlm"
    fresh: bool = False
    layers: Annotated[int, Ge(0)] = 0
    width: Annotated[int, Ge(0)] = 0
    heads: Annotated[int, Ge(0)] = 0
    feed_forward: Annotated[int, Ge(0)] = 0
    train: Literal["encoder", "all", "top", "lora"] = "encoder"
    top: Annotated[int, Ge(1)] = 2
    rank: Annotated[int, Ge(1)] = 8
    alpha: Annotated[float, Gt(0)] = 16.0
    maps: Changed = "attention"

    def __post_init__(self) -> None:
        if (
            given := [name for name, value in self.sizes.items() if value]
        ) and not self.fresh:
            name = given[0]
            raise ConfigError(
                f"{name} changes a model without weights only: set fresh = true"
            )
        if self.fresh and self.train != "all":
            raise ConfigError(
                f'train = "{self.train}" would leave random word embeddings as they are: a fresh '
                'model needs train = "all"'
            )

    @property
    def sizes(self) -> dict[str, int]:
        """The four numbers that change a fresh model."""
        return {name: getattr(self, name) for name in SIZES}


def language_model_config(table: Mapping[str, Any]) -> LanguageModelConfig:
    """The [model] table of a pre-training job.

    Raises ConfigError for an unknown or wrong key.
    """
    return build(LanguageModelConfig, table, "model")


@dataclass(frozen=True, eq=False)
class Guesses:
    """What a batch cost and how much of it was right.

    masked, next_sentence: scalars with gradient, the mean over the predicted tokens and
    over the pairs of next-sentence prediction (zero without). The others are read when
    they are asked
    for: an accelerator need not wait for them before the backward pass.
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
    """A pre-trained or fresh transformer with its prediction head; see
    `build_language_model`.

    vocabulary: ids are below it. positions: tokens of a sequence at most, special ones
    included. new_head: the directory held no weights of the head, so it should be
    trained for some steps (`head()`) before the encoder is. revealing: word embeddings
    or output bias are trained.
    """

    def __init__(
        self,
        config: LanguageModelConfig,
        tokenizer: Any,
        model: Any,
        new_head: bool,
        seed: int,
    ) -> None:
        super().__init__()
        self.config, self.new_head = config, new_head
        self.batch_listeners = BatchListeners()
        self.model = model.requires_grad_(False)
        self._hf_tokenizer = tokenizer
        self.tokenizer: FastTokenizer = fast_tokenizer(tokenizer.backend_tokenizer)
        self.specials = specials_of(tokenizer, config.encoder)
        self.vocabulary = self.tokenizer.vocabulary
        self.positions = positions_of(tokenizer, model)
        self._pairs = config.objective == "mlm+nsp"
        accepted = inspect.signature(model.base_model.forward).parameters
        self._segments = (  # whether it tells a first from a second text
            "token_type_ids" in accepted
            and getattr(model.config, "type_vocab_size", 0) > 1
        )
        self._head = None if config.objective == "denoise" else head_of(model)
        self.lora: LoRA | None = None
        self._maps: list[nn.Linear] = []
        if config.train == "lora":
            self._maps = targets(model, config.maps)
            self.lora = LoRA(self._maps, config.rank, config.alpha, seed)
        secret = revealing(model)
        self._head_names = head_names(model, self._pairs)
        chosen = {name for name, _ in model.named_parameters()}
        if config.train in ("lora", "top"):
            upper = (
                upper_layers("the model", model, config.top)
                if config.train == "top"
                else set()
            )
            chosen = self._head_names | upper
        for name, parameter in model.named_parameters():
            open_to_all = config.train == "all" or id(parameter) not in secret
            parameter.requires_grad_(open_to_all and name in chosen)
        self.revealing = any(id(p) in secret for p in self.trainable().values())
        self.eval()

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
        """Those of `trainable` that belong to the prediction heads (with pairs, the
        pooler)."""
        return {n: p for n, p in self.trainable().items() if n in self._head_names}

    def loss(self, sequences: Sequences, masked: Masked) -> Guesses:
        """Run a batch. Loss in float32, whatever an autocast around the call computes
        in.

        masked: of `sequences.ids`, by `mask` ("mlm", "mlm+nsp") or `denoise`. Raises
        ConfigError for sequences without pairs where the next sentence is to be
        predicted.
        """
        self.batch_listeners.announce(self, sequences, masked)
        picked, wanted, head, pooled = self._picked(sequences, masked)
        total, right = cross_entropy(head, picked, wanted)
        masked_loss = total / max(1, len(wanted))
        next_loss = masked_loss.new_zeros(())
        sums = [total.detach(), right, torch.zeros_like(right)]
        pairs = 0
        if self._pairs:
            next_loss, sums[2], pairs = self._next_sentence(pooled, sequences)
        both = torch.stack([s.double() for s in sums])
        return Guesses(masked_loss, next_loss, len(wanted), pairs, both)

    def losses(self, sequences: Sequences, masked: Masked) -> Tensor:
        """(batch,) the summed loss of each sequence's masked tokens; arguments as of
        `loss`."""
        picked, wanted, head, _ = self._picked(sequences, masked)
        each = F.cross_entropy(head(picked).float(), wanted, reduction="none")
        rows = self._tensor(masked.positions // masked.labels.shape[1])
        return each.new_zeros(len(masked.labels)).index_add(0, rows, each)

    def _picked(
        self, sequences: Sequences, masked: Masked
    ) -> tuple[Tensor, Tensor, Logits, Any]:
        """States (predictions, width) and tokens (predictions,) that are masked, what
        makes logits of such states, and pooled states."""
        at = self._tensor(masked.positions)
        wanted = self._tensor(masked.labels).flatten()[at]
        adapted = nullcontext() if self.lora is None else self.lora.applied(self._maps)
        with adapted:
            if self.config.objective == "denoise":
                states, pooled, model = self._denoised(masked), None, self.model
                head: Logits = lambda s: model.lm_head(s) + model.final_logits_bias  # noqa: E731
            else:
                states, head, pooled = self._encoded(sequences, masked)
        return states.flatten(0, 1).index_select(0, at), wanted, head, pooled

    def _encoded(
        self, sequences: Sequences, masked: Masked
    ) -> tuple[Tensor, Logits, Any]:
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
            return whole_logits(output), lambda logits: logits, None
        output = self.model.base_model(**given)
        return output[0], self._head, output.pooler_output if self._pairs else None

    def _denoised(self, masked: Masked) -> Tensor:
        """The decoder's states, (batch, tokens, width): each reads the tokens before
        its own."""
        model = self.model
        inputs, labels = self._tensor(masked.inputs), self._tensor(masked.labels)
        before = labels.roll(1, 1).masked_fill(
            labels.roll(1, 1) == IGNORED, self.specials.pad
        )
        before[:, 0] = model.config.decoder_start_token_id
        states: Tensor = model.model(
            input_ids=inputs,
            attention_mask=(inputs != self.specials.pad).long(),
            decoder_input_ids=before,
            use_cache=False,
        )[0]
        return states

    def _next_sentence(
        self, pooled: Any, sequences: Sequences
    ) -> tuple[Tensor, Tensor, int]:
        """Mean loss, how many are right, and of how many.

        Label 1: B is no continuation.
        """
        if sequences.random_next is None:
            raise ConfigError('objective = "mlm+nsp" needs sequences that are pairs')
        wanted = self._tensor(sequences.random_next)  # (batch,)
        logits = self.model.cls.seq_relationship(pooled).float()  # (batch, 2)
        right = (logits.detach().argmax(-1) == wanted).sum()
        return F.cross_entropy(logits, wanted), right, len(wanted)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(
            self.device, non_blocking=True
        )

    def save(self, directory: Path) -> None:
        """A Hugging Face directory: `AutoModel` and the tokenizer's classes load it.

        LoRA's changes are added to the weights. A directory that was there stays whole
        until the new one is. Raises ModelError if a weight is not finite or the folder
        holds something else, FednotesError if the disk is full.
        """
        ours = (directory / "config.json").is_file()
        if (
            directory.exists()
            and not ours
            and (directory.is_file() or any(directory.iterdir()))
        ):
            raise ModelError(
                f"{directory}: holds something else than a model; name another"
            )
        for name, parameter in self.trainable().items():
            if not torch.isfinite(parameter).all():
                raise ModelError(
                    f"{directory}: {name!r} is not finite: training diverged"
                )
        model = self.model
        if self.lora is not None:
            model = copy.deepcopy(model)
            self.lora.merge(targets(model, self.config.maps))
        write_folder(
            directory, lambda f: write_pretrained(f, model, self._hf_tokenizer)
        )


def build_language_model(
    config: LanguageModelConfig, seed: int, device: str | torch.device = "cpu"
) -> LanguageModel:
    """Open or make a language model, in evaluation mode; weights that are new come from
    the seed.

    Raises ModelError (no such directory, damaged, a tokenizer without a mask, cls, sep
    or pad token or not the model's, an architecture that the objective cannot train),
    ConfigError (sizes that cannot be, a device that is not there), MissingExtra.
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
        of_head = head_names(model, config.objective == "mlm+nsp")
        missing = tuple(name for name in missing if name in parameters)
        require_complete(
            directory, tuple(name for name in missing if name not in of_head)
        )
        initialise_head(model, missing, seed)
    if config.objective == "denoise":
        set_layer_norm_eps(model)
    if config.objective == "mlm+nsp" and not hasattr(model.cls, "seq_relationship"):
        raise ModelError(f"{directory}: {_NO_PAIRS}")
    there = device_of(device)
    return LanguageModel(config, tokenizer, model.to(there), bool(missing), seed).to(
        there
    )


_NO_PAIRS = 'has no next-sentence head: give a BERT, or set objective = "mlm"'


def _require_kind(directory: Path, kind: Any, objective: str) -> None:
    """The objective can train this architecture, as far as its configuration tells."""
    if objective == "denoise" and kind.model_type != "bart":
        raise ModelError(
            f'{directory}: is a model of the kind {kind.model_type!r}; objective = "denoise" '
            'needs a BART, set objective = "mlm" for this one'
        )
    if objective != "denoise" and getattr(kind, "is_encoder_decoder", False):
        raise ModelError(
            f'{directory}: is an encoder-decoder; set objective = "denoise"'
        )
    from transformers import BertConfig

    if objective == "mlm+nsp" and not isinstance(kind, BertConfig):
        raise ModelError(f"{directory}: {_NO_PAIRS}")


def _fresh(
    directory: Path, kind: Any, auto: str, config: LanguageModelConfig, seed: int
) -> tuple[Any, Any]:
    """The directory's tokenizer, and a model of its configuration with random weights."""
    import transformers

    tokenizer = open_tokenizer(directory)
    resize(directory, kind, config.sizes)
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
    """The ids of a tokenizer that are no words.

    Raises ModelError if one of four is missing.
    """
    marks = ("cls", "sep", "mask", "pad")
    ids: dict[str, Any] = {m: getattr(tokenizer, f"{m}_token_id", None) for m in marks}
    lacking = [mark for mark, value in ids.items() if value is None]
    if lacking:
        raise ModelError(
            f"encoder {where!r}: its tokenizer has no {' and no '.join(lacking)} token; a language "
            "model is trained with a BERT's, RoBERTa's or BART's tokenizer"
        )
    if len(set(ids.values())) < len(ids):
        raise ModelError(
            f"encoder {where!r}: its tokenizer uses one special token as two"
        )
    others = set(tokenizer.all_special_ids) - {*ids.values(), tokenizer.unk_token_id}
    return Specials(**ids, others=tuple(sorted(others)))
