"""Language models for pre-training on notes.

They predict masked words (BERT) or infilled spans (BART). Updates must not reveal a
site's words. However, the sign of the output bias's gradient reveals every masked
token, and only the embedding rows of a batch's words have a gradient. Both are
therefore frozen unless a job trains everything (`train = "all"`, as in Liu and Miller
2020).

Logits are computed only at the positions to predict, which reduces the largest product
of a step to a seventh.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.listeners import BatchListeners
from fednotes.core.numbers import NonNegativeInt, PositiveFloat, PositiveInt
from fednotes.core.seeds import seed_of
from fednotes.core.settings import LocalFile, build, checked
from fednotes.core.store import write_folder
from fednotes.core.tensors import find_device
from fednotes.encoders.adapters import Changed, LoRA, find_linears
from fednotes.encoders.bart import set_layer_norm_eps
from fednotes.encoders.packing import IGNORED, Masked, Sequences, Specials
from fednotes.encoders.pretrained import (
    NO_ENCODER,
    count_positions,
    find_encoder_directory,
    list_upper_layers,
    open_config,
    open_pretrained,
    open_tokenizer,
    require_complete,
    require_fit,
    silencing_library,
    write_pretrained,
)
from fednotes.encoders.token_cache import FastTokenizer, make_fast_tokenizer

Logits = Callable[[Tensor], Tensor]  # (states, width) → (states, vocabulary)

# The names of the same four sizes in several architectures.
SIZES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layers", "encoder_layers", "decoder_layers"),
    "width": ("hidden_size", "dim", "d_model", "embedding_size"),
    "heads": (
        "num_attention_heads",
        "n_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
    ),
    "feed_forward": (
        "intermediate_size",
        "hidden_dim",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
    ),
}
# Predictions whose logits are in memory at once. With more, they are computed twice.
CHUNK = 2048
# The initial values of a head without weights; see `initialise_head`.
NEW_DENSE, NEW_NORM = 0.3, 0.85


@torch.no_grad()
def find_head(model: Any) -> Logits | None:
    """Return the masked-language-model head as a function of states.

    Return None for a model of unknown layout, or if the head's logits differ from the
    model's.
    """
    head = _find_known_head(model)
    if head is None:
        return None
    # In the middle of the vocabulary all ids are words, so none of them is padding.
    middle = len(model.get_input_embeddings().weight) // 2
    ids = torch.arange(middle - 2, middle + 2, device=model.device).clamp(min=0)[None]
    try:
        states = model.base_model(input_ids=ids)[0]  # (1, 4, width)
        logits = read_token_logits(model(input_ids=ids))
        is_same = torch.allclose(head(states[0]), logits[0], rtol=1e-4, atol=1e-4)
    except NO_ENCODER:
        return None
    return head if is_same else None


def _find_known_head(model: Any) -> Logits | None:
    """Return the head of a model of known layout.

    Known layouts are BERT's `cls.predictions`, RoBERTa's `lm_head`, DistilBERT's three
    parts and ModernBERT's two.
    """
    if _has_modules(getattr(model, "cls", None), "predictions"):
        predictions: Logits = model.cls.predictions
        return predictions
    if _has_modules(model, "lm_head"):
        lm_head: Logits = model.lm_head
        return lm_head
    if _has_modules(model, "vocab_transform", "vocab_layer_norm", "vocab_projector"):

        def apply_distilbert_head(states: Tensor) -> Tensor:
            hidden = model.activation(model.vocab_transform(states))
            logits: Tensor = model.vocab_projector(model.vocab_layer_norm(hidden))
            return logits

        return apply_distilbert_head
    if _has_modules(model, "head", "decoder"):

        def apply_modernbert_head(states: Tensor) -> Tensor:
            logits: Tensor = model.decoder(model.head(states))
            return logits

        return apply_modernbert_head
    return None


def _has_modules(owner: Any, *names: str) -> bool:
    """Return whether all these attributes are modules."""
    return all(isinstance(getattr(owner, name, None), nn.Module) for name in names)


def read_token_logits(output: Any) -> Tensor:
    """Return a model output's logits, (batch, tokens, words), by either name."""
    logits: Tensor = (
        output.prediction_logits if "prediction_logits" in output else output.logits
    )
    return logits


def find_revealing_parameters(model: Any) -> set[int]:
    """Return the `id` of each parameter whose gradient reveals words.

    They are the embeddings and the output bias.
    """
    output = model.get_output_embeddings()
    parameters = [model.get_input_embeddings().weight]
    if output is not None:
        parameters += [output.weight, getattr(output, "bias", None)]
    # A bias outside the output layer is recognised by its size, one number per word.
    words = len(parameters[0])
    parameters += [p for p in model.parameters() if tuple(p.shape) == (words,)]
    return {id(parameter) for parameter in parameters if parameter is not None}


def list_head_names(model: Any, *, pairs: bool) -> set[str]:
    """Return the names of the parameters of the prediction heads.

    Args:
        model: The model.
        pairs: Whether it predicts pairs, so that the pooler belongs to the heads.
    """
    of_encoder = {
        id(parameter)
        for name, parameter in model.base_model.named_parameters()
        if not (pairs and "pooler" in name)
    }
    return {
        name
        for name, parameter in model.named_parameters()
        if id(parameter) not in of_encoder
    }


@torch.no_grad()
def initialise_head(model: Any, missing: Iterable[str], seed: int) -> None:
    """Initialise parameters that a directory lacks, identically on every machine.

    The transform's square maps start as 0.3 times the identity, LayerNorm's weight as
    0.85, and biases as zero. All others (pooler, pair classifier) start as in the
    library, normal with the configuration's standard deviation (0.02), but drawn from
    the seed. The output rows are the word embeddings. States of the same model are
    already near them, and a random map would only obscure this. On MiniLM (CodiEsp's
    background texts; a uniform guess costs 10.33 nats), the loss is 10.97 with the
    library's initialisation, and 7.26 on held-out text after 50 steps; with this
    initialisation it is 10.32 and 7.06.

    Args:
        model: The model.
        missing: Names of the parameters.
        seed: The run's seed.
    """
    deviation = float(getattr(model.config, "initializer_range", 0.02))
    words = model.get_input_embeddings().weight
    output_weight = getattr(model.get_output_embeddings(), "weight", None)
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
        elif parameter is output_weight and parameter.shape == words.shape:
            # This directory does not tie the two, and neither is trained by default.
            parameter.copy_(words)
        elif parameter.shape[0] == parameter.shape[1] and "pooler" not in name:
            parameter.copy_(NEW_DENSE * torch.eye(len(parameter)))
        else:
            generator = torch.Generator().manual_seed(seed_of(seed, "init", name))
            parameter.normal_(0.0, deviation, generator=generator)


def resize_config(directory: Path, config: Any, sizes: Mapping[str, int]) -> None:
    """Change the sizes of a configuration in place.

    Args:
        directory: The model's directory, for messages.
        config: The configuration.
        sizes: Sizes by the keys of `SIZES`; 0 leaves a size unchanged.

    Raises:
        ConfigError: The heads do not divide the width.
        ModelError: The architecture lacks a size.
    """
    for key, value in sizes.items():
        names = [name for name in SIZES[key] if hasattr(config, name)]
        if value and not names:
            raise ModelError(
                f"{directory}: models of this kind have no setting for {key!r}"
            )
        if value:
            for name in names:
                setattr(config, name, value)

    def read_size(key: str) -> int:
        names = [name for name in SIZES[key] if hasattr(config, name)]
        if not names:
            raise ModelError(
                f"{directory}: models of this kind have no setting for {key!r}: "
                "use another model"
            )
        size: int = getattr(config, names[0])
        return size

    width = read_size("width")
    heads = read_size("heads")
    if width % heads:
        raise ConfigError(f"width = {width} is not a multiple of heads = {heads}")


def compute_cross_entropy(
    head: Logits, states: Tensor, wanted: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the summed loss, with gradient, and the number of right predictions.

    The logits of many predictions (all tokens of a batch in BART) are computed in
    chunks, and recomputed in the backward pass: with a vocabulary of 50,000 they would
    take gigabytes.

    Args:
        head: Maps states to logits.
        states: (predictions, width).
        wanted: (predictions,) the correct tokens.
    """

    def sum_losses(states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(states).float()  # (predictions, vocabulary)
        num_right = (logits.detach().argmax(-1) == wanted).sum()
        return F.cross_entropy(logits, wanted, reduction="sum"), num_right

    if len(wanted) <= CHUNK:
        return sum_losses(states, wanted)
    losses = []
    nums_right = []
    chunks = zip(states.split(CHUNK), wanted.split(CHUNK), strict=True)
    for chunk_states, chunk_wanted in chunks:
        loss, num_right = checkpoint(
            sum_losses,
            chunk_states,
            chunk_wanted,
            use_reentrant=False,
            preserve_rng_state=False,
        )
        losses.append(loss)
        nums_right.append(num_right)
    return torch.stack(losses).sum(), torch.stack(nums_right).sum()


def _return_logits(logits: Tensor) -> Tensor:
    """Return logits that a model has computed itself, unchanged."""
    return logits


@checked(frozen=True)
class LanguageModelConfig:
    """The language model to pre-train.

    Attributes:
        encoder: "minilm" or a Hugging Face directory: BERT, RoBERTa, DistilBERT or
            another encoder with a masked-language-model head; BART for objective =
            "denoise".
        objective: Training objective: predict masked tokens ("mlm"), also predict
            whether one text follows the other ("mlm+nsp"), or reconstruct infilled
            spans with BART ("denoise").
        fresh: Whether the model starts from random weights, with the directory's
            tokenizer and configuration.
        layers: Number of layers of a fresh model; 0 uses the directory's number.
        width: Width of a fresh model; 0 uses the directory's width.
        heads: Number of attention heads of a fresh model; 0 uses the directory's
            number.
        feed_forward: Width of the feed-forward layers of a fresh model; 0 uses the
            directory's width.
        train: Parameters to train: "encoder" all except the word embeddings (which are
            also the output matrix) and the output bias; "all" every parameter, as in
            the paper; "top" the last layers; "lora" LoRA adapters. The head's
            transform is always trained.
        top: Number of layers to train with train = "top".
        rank: Rank of the LoRA adapters with train = "lora": W + alpha / rank · B A.
            A higher rank can learn more and sends more bytes.
        alpha: Scale of the LoRA adapters; see `rank`.
        maps: Matrices of each layer that train = "lora" changes: "all", or those of
            queries and values ("attention").
    """

    encoder: LocalFile = "minilm"
    objective: Literal["mlm", "mlm+nsp", "denoise"] = "mlm"
    fresh: bool = False
    layers: NonNegativeInt = 0
    width: NonNegativeInt = 0
    heads: NonNegativeInt = 0
    feed_forward: NonNegativeInt = 0
    train: Literal["encoder", "all", "top", "lora"] = "encoder"
    top: PositiveInt = 2
    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    maps: Changed = "attention"

    def __post_init__(self) -> None:
        """Raise ConfigError for settings that exclude each other."""
        changed = [name for name, value in self.sizes.items() if value]
        if changed and not self.fresh:
            raise ConfigError(
                f"{changed[0]} changes only a model without weights: set fresh = true"
            )
        if self.fresh and self.train != "all":
            raise ConfigError(
                f'train = "{self.train}" would leave random word embeddings as they '
                'are: a fresh model needs train = "all"'
            )

    @property
    def sizes(self) -> dict[str, int]:
        """The four sizes of a fresh model, by the keys of `SIZES`."""
        return {name: getattr(self, name) for name in SIZES}


def read_language_model_config(
    table: Mapping[str, Any], where: str = "model"
) -> LanguageModelConfig:
    """Return the specification of a pre-training job's [model] table.

    Args:
        table: The table.
        where: The name of the table in messages; "" if the caller adds it.

    Raises:
        ConfigError: A key is unknown or its value is wrong.
    """
    return build(LanguageModelConfig, table, where)


@dataclass(frozen=True, eq=False)
class Guesses:
    """The loss of a batch, and the number of correct predictions.

    A number is copied from the device only when its property is read, so the backward
    pass need not wait.

    Attributes:
        masked: Scalar with gradient, the mean over the predicted tokens.
        next_sentence: Scalar with gradient, the mean over the pairs of next-sentence
            prediction; zero without pairs.
        predictions: Number of predicted tokens.
        pairs: Number of pairs.
        sums: (3,) float64: the tokens' loss, and the numbers of correct tokens and
            pairs.
    """

    masked: Tensor
    next_sentence: Tensor
    predictions: int
    pairs: int
    sums: Tensor

    @property
    def loss(self) -> Tensor:
        """The sum of both means, as in BERT's training."""
        return self.masked + self.next_sentence

    @property
    def token_loss(self) -> float:
        """The sum over the predicted tokens, in nats."""
        return float(self.sums[0])

    @property
    def right(self) -> int:
        """Number of tokens whose most probable prediction is correct."""
        return int(self.sums[1])

    @property
    def pair_right(self) -> int:
        """Number of pairs that are classified correctly; 0 without pairs."""
        return int(self.sums[2])


class LanguageModel(nn.Module):
    """A transformer with its prediction head; see `build_language_model`.

    Attributes:
        config: The specification.
        model: The library's model.
        tokenizer: The parts of its tokenizer that pre-training uses.
        specials: The ids that are not words.
        vocabulary: Number of ids.
        positions: The maximum number of tokens in a sequence, including special ones.
        new_head: Whether the directory had no weights of the head, so that the head
            should be trained for some steps (see `select_head`) before the encoder.
        revealing: Whether word embeddings or output bias are trained.
        batch_listeners: Callbacks that receive each batch before the model reads it.
        lora: The LoRA adapters, or None.
        adapted_layers: The linear layers with LoRA adapters, in their order.
    """

    def __init__(
        self,
        config: LanguageModelConfig,
        tokenizer: Any,
        model: Any,
        *,
        new_head: bool,
        seed: int,
    ) -> None:
        super().__init__()
        self.config = config
        self.new_head = new_head
        self.batch_listeners = BatchListeners()
        self.model = model.requires_grad_(requires_grad=False)
        self._hf_tokenizer = tokenizer
        self.tokenizer: FastTokenizer = make_fast_tokenizer(tokenizer.backend_tokenizer)
        self.specials = read_specials(tokenizer, config.encoder)
        self.vocabulary = self.tokenizer.vocabulary
        self.positions = count_positions(tokenizer, model)
        self._pairs = config.objective == "mlm+nsp"
        accepted = inspect.signature(model.base_model.forward).parameters
        # Whether the model distinguishes the first text of a pair from the second.
        self._has_segments = (
            "token_type_ids" in accepted
            and getattr(model.config, "type_vocab_size", 0) > 1
        )
        self._head = None if config.objective == "denoise" else find_head(model)
        self.lora: LoRA | None = None
        self.adapted_layers: list[nn.Linear] = []
        if config.train == "lora":
            self.adapted_layers = find_linears(model, config.maps)
            self.lora = LoRA(self.adapted_layers, config.rank, config.alpha, seed)

        self._head_names = list_head_names(model, pairs=self._pairs)
        revealing_ids = find_revealing_parameters(model)
        trained = self._list_trained_names()
        for name, parameter in model.named_parameters():
            may_train = config.train == "all" or id(parameter) not in revealing_ids
            parameter.requires_grad_(may_train and name in trained)
        self.revealing = any(
            id(parameter) in revealing_ids for parameter in self.trainable().values()
        )
        self.eval()

    def _list_trained_names(self) -> set[str]:
        """Return the parameters that `train` selects, even if they reveal words."""
        if self.config.train == "lora":
            return self._head_names
        if self.config.train == "top":
            upper = list_upper_layers("the model", self.model, self.config.top)
            return self._head_names | upper
        return {name for name, _ in self.model.named_parameters()}

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.model.parameters()).device

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return all parameters that are trained and sent, sorted by name."""
        trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        if self.lora is not None:
            trained |= {f"lora.{name}": p for name, p in self.lora.named_parameters()}
        return dict(sorted(trained.items()))

    def select_head(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters of the prediction heads.

        With pairs, they include the pooler.
        """
        return {n: p for n, p in self.trainable().items() if n in self._head_names}

    def loss(self, sequences: Sequences, masked: Masked) -> Guesses:
        """Return the loss of a batch, in float32 under any autocast.

        Args:
            sequences: The batch.
            masked: The batch's masked tokens, from `mask` ("mlm", "mlm+nsp") or
                `denoise`.

        Raises:
            ConfigError: The next sentence is to be predicted, but the sequences are not
                pairs.
        """
        self.batch_listeners.announce(self, sequences, masked)
        picked, wanted, head, pooled = self._pick_states(sequences, masked)
        total, right = compute_cross_entropy(head, picked, wanted)
        masked_loss = total / max(1, len(wanted))
        next_loss = masked_loss.new_zeros(())
        sums = [total.detach(), right, torch.zeros_like(right)]
        pairs = 0
        if self._pairs:
            next_loss, sums[2], pairs = self._predict_next_sentence(pooled, sequences)
        return Guesses(
            masked=masked_loss,
            next_sentence=next_loss,
            predictions=len(wanted),
            pairs=pairs,
            sums=torch.stack([value.double() for value in sums]),
        )

    def losses(self, sequences: Sequences, masked: Masked) -> Tensor:
        """Return (batch,), the summed loss of each sequence; arguments as in `loss`."""
        picked, wanted, head, _ = self._pick_states(sequences, masked)
        each = F.cross_entropy(head(picked).float(), wanted, reduction="none")
        rows = self._make_tensor(masked.positions // masked.labels.shape[1])
        return each.new_zeros(len(masked.labels)).index_add(0, rows, each)

    def _pick_states(
        self, sequences: Sequences, masked: Masked
    ) -> tuple[Tensor, Tensor, Logits, Any]:
        """Run the model, and select the positions to predict.

        Returns:
            States (predictions, width); the correct tokens (predictions,); the map from
            states to logits; and pooled states, None without pairs.
        """
        at = self._make_tensor(masked.positions)
        wanted = self._make_tensor(masked.labels).flatten()[at]
        adapted = (
            nullcontext()
            if self.lora is None
            else self.lora.applying(self.adapted_layers)
        )
        with adapted:
            if self.config.objective == "denoise":
                states = self._decode(masked)
                head: Logits = self._apply_bart_head
                pooled = None
            else:
                states, head, pooled = self._encode(sequences, masked)
        return states.flatten(0, 1).index_select(0, at), wanted, head, pooled

    def _apply_bart_head(self, states: Tensor) -> Tensor:
        """Return the logits of BART's decoder states."""
        logits: Tensor = self.model.lm_head(states) + self.model.final_logits_bias
        return logits

    def _encode(
        self, sequences: Sequences, masked: Masked
    ) -> tuple[Tensor, Logits, Any]:
        """Run an encoder.

        Returns:
            States (batch, tokens, width); the map from states to logits; and pooled
            states, None without pairs. A model whose head is unknown returns logits
            (batch, tokens, vocabulary) in place of states, and the identity as the map.
        """
        inputs: dict[str, Tensor] = {"input_ids": self._make_tensor(masked.inputs)}
        longest = masked.inputs.shape[1]
        if (sequences.lengths < longest).any():
            inside = np.arange(longest) < sequences.lengths[:, None]
            inputs["attention_mask"] = self._make_tensor(inside.astype(np.int64))
        if self._has_segments:
            inputs["token_type_ids"] = self._make_tensor(sequences.segments)
        if self._head is None:
            output = self.model(**inputs)
            return read_token_logits(output), _return_logits, None
        output = self.model.base_model(**inputs)
        states = output[0]
        pooled = output.pooler_output if self._pairs else None
        return states, self._head, pooled

    def _decode(self, masked: Masked) -> Tensor:
        """Return BART's decoder states, (batch, tokens, width).

        Each state depends only on preceding tokens.
        """
        model = self.model
        inputs = self._make_tensor(masked.inputs)
        labels = self._make_tensor(masked.labels)
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

    def _predict_next_sentence(
        self, pooled: Any, sequences: Sequences
    ) -> tuple[Tensor, Tensor, int]:
        """Return the mean loss of pairs, the number of correct ones, and their number.

        Label 1 means that B does not follow A.
        """
        if sequences.random_next is None:
            raise ConfigError('objective = "mlm+nsp" needs sequences that are pairs')
        wanted = self._make_tensor(sequences.random_next)  # (batch,)
        logits = self.model.cls.seq_relationship(pooled).float()  # (batch, 2)
        right = (logits.detach().argmax(-1) == wanted).sum()
        return F.cross_entropy(logits, wanted), right, len(wanted)

    def _make_tensor(self, array: np.ndarray) -> Tensor:
        """Return an array as a tensor on the model's device."""
        return torch.from_numpy(np.ascontiguousarray(array)).to(
            self.device, non_blocking=True
        )

    def save(self, directory: Path) -> None:
        """Write a Hugging Face directory, which `AutoModel` and `AutoTokenizer` load.

        LoRA adapters are merged into the weights. An earlier model in the directory
        stays until the new one is complete.

        Raises:
            ModelError: A weight is not finite, or the directory has other content.
            FednotesError: The disk is full.
        """
        is_model = (directory / "config.json").is_file()
        is_free = is_model or not directory.exists()
        if not is_free and (directory.is_file() or any(directory.iterdir())):
            raise ModelError(
                f"{directory}: the folder has files but no model: choose another folder"
            )
        for name, parameter in self.trainable().items():
            if not torch.isfinite(parameter).all():
                raise ModelError(
                    f"{directory}: {name!r} is not finite: training diverged"
                )
        model = self.model
        if self.lora is not None:
            model = copy.deepcopy(model)
            self.lora.merge(find_linears(model, self.config.maps))
        write_folder(
            directory, lambda f: write_pretrained(f, model, self._hf_tokenizer)
        )


def build_language_model(
    config: LanguageModelConfig, seed: int, device: str | torch.device = "cpu"
) -> LanguageModel:
    """Return a pre-trained or fresh language model, in evaluation mode.

    New weights depend only on the seed.

    Raises:
        ModelError: The directory is missing or damaged; its tokenizer lacks a mask,
            cls, sep or pad token or does not match the model; or the objective cannot
            train this architecture.
        ConfigError: Sizes are impossible, or there is no such device.
        MissingExtra: A package is missing.
    """
    directory = find_encoder_directory(config.encoder)
    kind = open_config(directory)
    _require_kind(directory, kind, config.objective)
    auto = {
        "mlm": "AutoModelForMaskedLM",
        "mlm+nsp": "AutoModelForPreTraining",
        "denoise": "BartForConditionalGeneration",
    }[config.objective]
    if config.fresh:
        tokenizer, model = _build_fresh(directory, kind, auto, config, seed)
        missing: tuple[str, ...] = ()
    else:
        tokenizer, model, missing = open_pretrained(directory, auto)
        parameters = {name for name, _ in model.named_parameters()}
        of_head = list_head_names(model, pairs=config.objective == "mlm+nsp")
        missing = tuple(name for name in missing if name in parameters)
        missing_encoder = tuple(name for name in missing if name not in of_head)
        require_complete(directory, missing_encoder)
        initialise_head(model, missing, seed)
    if config.objective == "denoise":
        set_layer_norm_eps(model)
    if config.objective == "mlm+nsp" and not hasattr(model.cls, "seq_relationship"):
        raise ModelError(f"{directory}: {_NO_PAIRS}")
    target = find_device(device)
    language_model = LanguageModel(
        config, tokenizer, model.to(target), new_head=bool(missing), seed=seed
    )
    return language_model.to(target)


_NO_PAIRS = 'has no next-sentence head: give a BERT, or set objective = "mlm"'


def _require_kind(directory: Path, kind: Any, objective: str) -> None:
    """Raise ModelError if an objective cannot train an architecture."""
    if objective == "denoise" and kind.model_type != "bart":
        raise ModelError(
            f"{directory}: has model_type {kind.model_type!r}, but objective = "
            '"denoise" needs a BART: set objective = "mlm" for this model'
        )
    if objective != "denoise" and getattr(kind, "is_encoder_decoder", False):
        raise ModelError(
            f'{directory}: is an encoder-decoder: set objective = "denoise"'
        )
    from transformers import BertConfig

    if objective == "mlm+nsp" and not isinstance(kind, BertConfig):
        raise ModelError(f"{directory}: {_NO_PAIRS}")


def _build_fresh(
    directory: Path, kind: Any, auto: str, config: LanguageModelConfig, seed: int
) -> tuple[Any, Any]:
    """Return a directory's tokenizer and a model with random weights."""
    import transformers

    tokenizer = open_tokenizer(directory)
    resize_config(directory, kind, config.sizes)
    make = getattr(transformers, auto)
    make = getattr(make, "from_config", getattr(make, "_from_config", make))
    with silencing_library(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_of(seed, "init", "language-model"))
        try:
            model = make(kind).float().eval()
        except (TypeError, ValueError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(
                f"{directory}: cannot be initialised with new weights: {reason}"
            ) from error
    require_fit(directory, tokenizer, model)
    return tokenizer, model


def read_specials(tokenizer: Any, where: str) -> Specials:
    """Return the ids of a tokenizer's special tokens.

    Args:
        tokenizer: The tokenizer.
        where: The name by which messages call the model.

    Raises:
        ModelError: One of the four special tokens is missing, or two are the same.
    """
    marks = ("cls", "sep", "mask", "pad")
    ids: dict[str, Any] = {m: getattr(tokenizer, f"{m}_token_id", None) for m in marks}
    lacking = [mark for mark, value in ids.items() if value is None]
    if lacking:
        raise ModelError(
            f"encoder {where!r}: its tokenizer has no {' and no '.join(lacking)} "
            "token: use a directory with the tokenizer of a BERT, RoBERTa or BART"
        )
    if len(set(ids.values())) < len(ids):
        raise ModelError(
            f"encoder {where!r}: its tokenizer uses one special token for two purposes"
        )
    others = set(tokenizer.all_special_ids) - {*ids.values(), tokenizer.unk_token_id}
    return Specials(**ids, others=tuple(sorted(others)))
