"""What a language model needs to know of the library's many architectures.

Where the prediction head is, so that it can be run on chosen states alone; which parameters
say most of a site's words; where the layers are; what a head without weights starts from.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fednotes.core.errors import ConfigError, ModelError
from fednotes.core.seeds import seed_of

Logits = Callable[[Tensor], Tensor]  # (states, width) → (states, vocabulary)

# The names by which architectures call the same four sizes.
SIZES: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layers", "encoder_layers", "decoder_layers"),
    "width": ("hidden_size", "dim", "d_model", "embedding_size"),
    "heads": (
        "num_attention_heads",
        "n_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
    ),
    "feed_forward": ("intermediate_size", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim"),
}
CHUNK = 2048  # predictions whose logits are held at once; above, they are made twice
NEW_DENSE, NEW_NORM = 0.3, 0.85  # of a head without weights; see `initialise_head`
_LAYER = re.compile(r"(.*\blayers?)\.(\d+)\.")


def head_of(model: Any) -> Logits | None:
    """The masked-language-model head as a function of states; None for an unknown layout.

    Known: BERT's `cls.predictions` (also ERNIE's, BigBird's …), RoBERTa's `lm_head` (XLM-R's,
    CamemBERT's …), DistilBERT's three parts and ModernBERT's two. What is found is tried on a
    few states of the model: a head that gives other logits than the model is not used.
    """
    found: Logits | None = None
    if isinstance(getattr(getattr(model, "cls", None), "predictions", None), nn.Module):
        found = model.cls.predictions
    elif isinstance(getattr(model, "lm_head", None), nn.Module):
        found = model.lm_head
    elif all(hasattr(model, f"vocab_{part}") for part in ("transform", "layer_norm", "projector")):
        found = _distilbert(model)
    elif all(isinstance(getattr(model, part, None), nn.Module) for part in ("head", "decoder")):
        found = lambda states: model.decoder(model.head(states))  # noqa: E731
    return found if found is not None and _agrees(model, found) else None


def _distilbert(model: Any) -> Logits:
    def logits(states: Tensor) -> Tensor:
        states = model.activation(model.vocab_transform(states))
        return model.vocab_projector(model.vocab_layer_norm(states))

    return logits


@torch.no_grad()
def _agrees(model: Any, head: Logits) -> bool:
    # The ids in the middle of the vocabulary are words, whatever the architecture's padding is.
    middle = len(model.get_input_embeddings().weight) // 2
    ids = torch.arange(middle - 2, middle + 2, device=model.device).clamp(min=0)[None]
    try:
        states = model.base_model(input_ids=ids)[0]  # (1, 4, width)
        whole = whole_logits(model(input_ids=ids))
        return torch.allclose(head(states[0]), whole[0], rtol=1e-4, atol=1e-4)
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError):
        return False


def whole_logits(output: Any) -> Tensor:
    """Token logits in what a model gives, whichever they are called; (batch, tokens, words)."""
    logits: Tensor = output.prediction_logits if "prediction_logits" in output else output.logits
    return logits


def takes_segments(model: Any) -> bool:
    """Whether the model tells a first from a second text."""
    accepted = inspect.signature(model.base_model.forward).parameters
    return "token_type_ids" in accepted and getattr(model.config, "type_vocab_size", 0) > 1


def revealing(model: Any) -> set[int]:
    """Ids (of the objects) of parameters whose gradient tells words: embeddings, output bias."""
    output = model.get_output_embeddings()
    found = [model.get_input_embeddings().weight]
    if output is not None:
        found += [output.weight, getattr(output, "bias", None)]
    # Where the output layer has none, its bias may stand beside it, a number for each word.
    words = len(found[0])
    found += [p for p in model.parameters() if tuple(p.shape) == (words,)]
    return {id(parameter) for parameter in found if parameter is not None}


def head_names(model: Any, pairs: bool) -> set[str]:
    """Parameters of the prediction heads: what is not the encoder's; with pairs its pooler."""
    base = {id(p) for n, p in model.base_model.named_parameters() if not (pairs and "pooler" in n)}
    return {name for name, p in model.named_parameters() if id(p) not in base}


def top_names(model: Any, top: int) -> set[str]:
    """Parameters of the last `top` layers of each stack. Raises ConfigError if it has fewer."""
    layers: dict[str, set[int]] = {}
    names = [name for name, _ in model.named_parameters()]
    for name in names:
        if match := _LAYER.match(name):
            layers.setdefault(match[1], set()).add(int(match[2]))
    if not layers or top > min(map(len, layers.values())):
        most = min(map(len, layers.values()), default=0)
        raise ConfigError(f"top = {top}: the model has {most} layers")
    return {
        name
        for name in names
        if (match := _LAYER.match(name)) and int(match[2]) > max(layers[match[1]]) - top
    }


@torch.no_grad()
def initialise_head(model: Any, missing: Iterable[str], seed: int) -> None:
    """Draw weights that the directory does not hold from the seed: the same on every machine.

    The transform's square maps start as 0.3 times the identity and LayerNorm's weight as 0.85;
    biases as zero; all else (pooler, pair classifier) as the library has it, normal with the
    configuration's deviation (0.02). The output rows are the word embeddings, which a state
    of the same model is already near, so a random map would only hide what it says; and
    random logits from rows as long as MiniLM's cost more than a uniform guess. Measured there
    (CodiEsp's background texts, 32 x 64 tokens a step, the encoder frozen, AdamW 1e-3; a
    uniform guess costs 10.33 nats): the library's start 10.97, held out after 50 steps 7.26;
    this start 10.32 and 7.06. LayerNorm's weight of 0.1 alone: 10.34, but 9.35 after 50.
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
        elif parameter is getattr(output, "weight", None) and parameter.shape == words.shape:
            parameter.copy_(words)  # not tied in this directory; it is not trained by default
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
            raise ModelError(f"{directory}: models of this kind have no setting for {key!r}")
        for name in names if value else ():
            setattr(config, name, value)
    width, heads = (
        next(getattr(config, n) for n in SIZES[key] if hasattr(config, n))
        for key in ("width", "heads")
    )
    if width % heads:
        raise ConfigError(f"width = {width} cannot be shared by {heads} heads")


def cross_entropy(head: Logits, states: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Summed loss, with gradient, and how many are right.

    Logits of many predictions (BART's are all tokens of a batch) are made chunk by chunk and
    again in the backward pass, for a vocabulary of 50,000 makes gigabytes of them.
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
